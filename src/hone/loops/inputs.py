"""Inputs that are read before any weights: prompts, text encoding, reward workers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from transformers import PreTrainedTokenizerBase
from transformers.configuration_utils import PreTrainedConfig
from transformers.image_processing_base import ImageProcessingMixin

from hone.config.plan import RunPlan
from hone.config.roles import Role
from hone.config.tree import EvaluateConfig, GenerateConfig, RLConfig
from hone.data.prompts import PromptData, PromptStream, load_prompts
from hone.data.settings import DataConfig, ServedDataConfig
from hone.data.sources import shorten
from hone.data.template_check import RenderError
from hone.data.tool_schemas import ToolSchemas
from hone.data.turns import TurnRenderer
from hone.distributed.processes import processes
from hone.envs.tools.formats.registry import format_of
from hone.errors import UserError
from hone.families.tokens import is_of_tokenizers
from hone.families.vision.registry import VISION, complete_config
from hone.hub import locate_model
from hone.images.reader import ImageReader
from hone.images.store import STORE
from hone.models.load import load_config, load_end_ids
from hone.models.settings import ModelConfig
from hone.models.support import classifies, context_length
from hone.models.tokenizer import load_tokenizer, require_known_tokens
from hone.observe.run_folder import INDEXES
from hone.rewards.environment import EnvFacts
from hone.rewards.pool import describe
from hone.rewards.scorer import Scorer
from hone.rewards.settings import RewardConfig
from hone.rollout.buffer import mean_reward
from hone.rollout.settings import EnvConfig
from hone.rollout.transcripts import Transcripts
from hone.types import Group, Prompt

__all__ = [
    "Tools",
    "encoder",
    "facts_of",
    "image_reader",
    "prompts_of",
    "rates_to",
    "require_same_images",
    "room_for_prompts",
    "share_of_workers",
    "tools_of",
    "transcripts_of",
    "try_out",
    "turns_of",
]


_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools of a run's environment."""

    schemas: ToolSchemas = ()
    """What the chat template shows of them."""
    format: str | None = None
    """The format in which the model writes calls; None where none are read."""


class Everyone(Protocol):
    """All processes of a run: the part of `Mesh` and of `Host` that passes what one of them
    knows."""

    @property
    def is_first(self) -> bool: ...
    def broadcast(self, value: Any) -> Any: ...


def facts_of(env: EnvConfig, reward: RewardConfig, everyone: Everyone) -> EnvFacts | None:
    """What the environment of a run is; None without one, and for a program that plays by itself.
    The first process loads it once in a worker, with the limits of `reward`, however many processes
    there are. Collective. Raises ValueError in the first process where it cannot be loaded."""
    if not env.is_set or env.harness.command is not None:
        return None
    return everyone.broadcast(describe(reward, env) if everyone.is_first else None)


def tools_of(facts: EnvFacts | None, env: EnvConfig, tokenizer: PreTrainedTokenizerBase) -> Tools:
    """The tools of an environment. Raises UserError where the chat template does not show how tools
    are called."""
    if facts is None:
        return Tools()
    if not facts.needs_tool_format:
        return Tools(facts.tools)
    template = None
    if tokenizer.chat_template is not None:
        template = tokenizer.get_chat_template(tools=[dict(tool) for tool in facts.tools] or None)
    return Tools(facts.tools, format_of(env.tool_format, template))


def prompts_of(
    cfg: RLConfig | EvaluateConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: ToolSchemas = (),
) -> PromptData:
    """Load the prompts of `cfg.data` that leave room for a completion of full length, with the
    schemas of the environment's `tools`. An evaluation reads what is trained only where rows are
    held out of it. Raises UserError for a prompt with text that the model has no tokens for."""
    sources = cfg.data
    if isinstance(cfg, EvaluateConfig) and sources.eval:
        sources = sources.model_copy(update={"train": ()})
    data = load_prompts(
        sources,
        tokenizer,
        seed=cfg.run.seed,
        max_prompt_tokens=room_for_prompts(cfg),
        keeps_messages=cfg.env.is_set,
        tools=tools,
        images=image_reader(cfg.model, sources, tokenizer),
        cache=cfg.run.dir / INDEXES,
        curriculum=cfg.data.curriculum if isinstance(cfg, RLConfig) else None,
    )
    vocab_size = load_config(cfg.model).vocab_size
    data.check(lambda rows: require_known_tokens(rows, tokenizer, vocab_size, cfg.model.path))
    return data


def rates_to(stream: PromptStream) -> Callable[[Group], None] | None:
    """Callback that reports the rate of each scored group to the stream; None where no prompt
    rests."""
    if not stream.learns:
        return None

    def learn(group: Group) -> None:
        if (rate := mean_reward(group)) is not None:
            stream.learn(group.prompt.id, rate)

    return learn


def image_reader(
    model: ModelConfig,
    data: DataConfig | ServedDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    path_key: str = "model.path",
) -> ImageReader | None:
    """The reader of images of a vision-language model, which `path_key` names; None for a text
    model. Raises UserError where the model's files or `data.max_image_tokens` leave no way to make
    tokens of images."""
    place = locate_model(model.path, path_key)
    config, _ = PreTrainedConfig.get_config_dict(place)
    if config.get("model_type") not in VISION:
        return None
    try:
        processor, _ = ImageProcessingMixin.get_image_processor_dict(place)
    except OSError:
        _log.info("%s has no preprocessor_config.json: images get its family's settings", place)
        processor = {}
    STORE.use_workers(data.image_workers)
    try:
        return ImageReader.of(
            complete_config(config),
            processor,
            tokenizer.get_vocab(),
            max_tokens=data.max_image_tokens,
            may_fetch=isinstance(data, DataConfig) and data.image_urls,
        )
    except ValueError as error:
        raise UserError(
            f"{path_key}={model.path!r} {error} (data.max_image_tokens is {data.max_image_tokens})"
        ) from error


def require_same_images(role: Role, plan: RunPlan, tokenizer: PreTrainedTokenizerBase) -> None:
    """Raise UserError unless the model of `role` reads images as the policy does, with whose pixels
    its tower works."""
    assert plan.data is not None
    own, other = (
        image_reader(model, plan.data, tokenizer) for model in (plan.policy.model, role.model)
    )
    if own is not None and (other is None or other.settings != own.settings):
        how = "reads text alone" if other is None else "makes other pixels or tokens of an image"
        raise UserError(
            f"{role.path_key}={role.model.path!r} {how}, and scores rows of "
            f"model.path={plan.policy.model.path!r}, which sees images. Name a model of its family "
            "with the same settings in preprocessor_config.json"
        )


def room_for_prompts(cfg: RLConfig | EvaluateConfig | GenerateConfig) -> int:
    """Longest prompt, in tokens, that leaves room in the model's context for a completion of full
    length."""
    return context_length(load_config(cfg.model)) - cfg.max_completion_tokens


def turns_of(
    cfg: RLConfig | EvaluateConfig | GenerateConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    tools: Tools,
) -> TurnRenderer:
    """Renderer that turns environment messages into tokens of the model. Raises UserError where the
    chat template cannot go on after the answers of `tools`."""
    render = TurnRenderer(
        tokenizer,
        cfg.data,
        vocab_size=load_config(cfg.model).vocab_size,
        end_ids=load_end_ids(cfg.model, tokenizer),
        max_prompt_tokens=room_for_prompts(cfg),
        max_observation_tokens=cfg.env.max_observation_tokens,
        tools=tools.schemas,
        tool_format=tools.format,
        images=image_reader(cfg.model, cfg.data, tokenizer),
    )
    render.require_answers()
    return render


def transcripts_of(plan: RunPlan, prompts: Sequence[Prompt]) -> Transcripts | None:
    """Renderer of the transcripts that the reward model reads, tested with the first of `prompts`.
    None without a reward model. Raises UserError."""
    if (role := plan.roles.get("reward_model")) is None:
        return None
    model, data = role.model, plan.data
    assert data is not None
    config = load_config(model)
    if not classifies(config):
        raise UserError(
            f"reward.model.path={model.path!r} is {config.architectures or 'a model'}, which gives "
            "no score; name a model for sequence classification with one label"
        )
    tokenizer = load_tokenizer(model, path_key=role.path_key)
    limit = context_length(config)
    transcripts = Transcripts(
        tokenizer,
        data,
        max_tokens=limit,
        vocab_size=config.vocab_size,
        path=model.path,
        images=image_reader(model, data, tokenizer, path_key=role.path_key),
    )
    with_images = (prompt for prompt in prompts if prompt.model_input)
    for prompt in (*prompts[:1], *islice(with_images, 1)):
        transcripts.check(prompt)
    return transcripts


def encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], list[int]]:
    """Encode text into token ids without special tokens, as in a completion."""

    def encode(text: str) -> list[int]:
        try:
            return list(tokenizer.encode(text, add_special_tokens=False))
        except Exception as error:
            if not is_of_tokenizers(error):
                raise
            raise UserError(
                f"the tokenizer cannot encode {shorten(text)!r}, the answer of the first row, with "
                f"which rewards are tried ({error}). Mend the row, or name another tokenizer in "
                "model.tokenizer."
            ) from error

    return encode


def try_out(
    scorer: Scorer,
    prompts: Sequence[Prompt],
    tokenizer: PreTrainedTokenizerBase,
    render: TurnRenderer,
    transcripts: Transcripts | None = None,
) -> None:
    """Test the rewards with `Scorer.check_data`, and render the environment's answer if there is
    one, also for the reward model of `transcripts`. Raises UserError."""
    for sample in scorer.check_data(prompts, encoder(tokenizer)):
        assert sample.observation is not None, sample.id
        try:
            if sample.turns:
                turn = sample.turns[-1]
                said = render(sample, sample.observation)
                turn.observed, turn.messages = said.text, said.messages
                sample.model_input = said.model_input
            else:
                sample.prompt = render.opening(sample.prompt, sample.observation)
            if transcripts is not None:
                transcripts.check(sample.prompt, sample.turns, sample.model_input)
        except RenderError as error:
            raise UserError(
                f"the answer of the environment to row {sample.prompt.id}: {error}"
            ) from error


def share_of_workers(cfg: RewardConfig, *, processes_per_engine: int) -> RewardConfig:
    """Reward settings of a process that drives an engine: its share of the host's workers."""
    num_engines = max(processes().local_world_size // processes_per_engine, 1)
    num_workers = cfg.worker_limit // num_engines
    return cfg.model_copy(update={"num_workers": max(num_workers, 1)})
