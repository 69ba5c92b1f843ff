"""What is read before any weight: prompts that fit, text to tokens, reward workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from transformers import PreTrainedTokenizerBase

from hone.config.reward import RewardConfig
from hone.config.tree import EvaluateConfig, GenerateConfig, RLConfig
from hone.data.prompts import PromptData, load_prompts
from hone.data.sources import shorten
from hone.data.turns import RenderError, TurnRenderer
from hone.distributed.processes import processes
from hone.errors import UserError
from hone.families.tokens import is_of_tokenizers
from hone.models.load import load_config, load_end_ids
from hone.models.support import classifies, context_length
from hone.models.tokenizer import load_tokenizer, require_known_tokens
from hone.rewards.scorer import Scorer
from hone.rollout.judge import Transcripts
from hone.types import Prompt

__all__ = [
    "encoder",
    "prompts_of",
    "room_for_prompts",
    "share_of_workers",
    "transcripts_of",
    "try_out",
    "turns_of",
]


def prompts_of(cfg: RLConfig | EvaluateConfig, tokenizer: PreTrainedTokenizerBase) -> PromptData:
    """The prompts of `cfg.data` that leave a completion its full length. Raises UserError for one
    that the model has no tokens for."""
    data = load_prompts(
        cfg.data,
        tokenizer,
        seed=cfg.run.seed,
        max_prompt_tokens=room_for_prompts(cfg),
        keeps_messages=cfg.env.path is not None,
    )
    vocab_size = load_config(cfg.model).vocab_size
    require_known_tokens(data.all_rows(), tokenizer, vocab_size, cfg.model.path)
    return data


def room_for_prompts(cfg: RLConfig | EvaluateConfig | GenerateConfig) -> int:
    """Tokens of the model's context that completions of full length leave to their prompts."""
    return context_length(load_config(cfg.model)) - cfg.max_completion_tokens


def turns_of(
    cfg: RLConfig | EvaluateConfig | GenerateConfig, tokenizer: PreTrainedTokenizerBase
) -> TurnRenderer:
    """The renderer that makes tokens of the model from what environments say."""
    return TurnRenderer(
        tokenizer,
        cfg.data,
        vocab_size=load_config(cfg.model).vocab_size,
        end_ids=load_end_ids(cfg.model, tokenizer),
    )


def transcripts_of(
    cfg: RLConfig | EvaluateConfig | GenerateConfig, prompts: Sequence[Prompt]
) -> Transcripts | None:
    """What a reward model reads, tried with the first of `prompts`; None without a model. Raises
    UserError."""
    model = cfg.reward.model.config_of(cfg.model)
    if model is None:
        return None
    config = load_config(model)
    if not classifies(config):
        raise UserError(
            f"reward.model.path={model.path!r} is {config.architectures or 'a model'}, which gives "
            "no score; name a model for sequence classification with one label"
        )
    tokenizer = load_tokenizer(model, path_key="reward.model.path")
    limit = context_length(config)
    found = Transcripts(
        tokenizer,
        cfg.data,
        max_tokens=limit,
        vocab_size=config.vocab_size,
        path=model.path,
    )
    for prompt in prompts[:1]:
        found.check(prompt)
    return found


def encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], list[int]]:
    """Text to token ids, as a completion has them."""

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
) -> None:
    """`Scorer.check_data`, and what an environment answers there is rendered. Raises UserError."""
    sample = scorer.check_data(prompts, encoder(tokenizer))
    if sample is not None and sample.observation is not None:
        try:
            render(sample, sample.observation)
        except RenderError as error:
            raise UserError(f"the answer of env.path to row {sample.prompt.id}: {error}") from error


def share_of_workers(cfg: RewardConfig, *, processes_per_engine: int) -> RewardConfig:
    """The reward workers of a process that drives an engine: its part of those of the host."""
    num_engines = max(processes().local_world_size // processes_per_engine, 1)
    num_workers = cfg.worker_limit // num_engines
    return cfg.model_copy(update={"num_workers": max(num_workers, 1)})
