"""Rows in the tokens of a model: its tokenizer, chat template and limits, as in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

from hone.config.data_view import ViewConfig
from hone.config.tree import PairsConfig, RLConfig, SFTConfig
from hone.data.chat import Demonstration, Rendered, Renderer
from hone.data.columns import Example
from hone.data.filters import FilterReport, LengthLimit
from hone.data.images import open_images
from hone.errors import UserError
from hone.families.tokens import unknown_token
from hone.loops.inputs import image_reader, room_for_prompts, tools_of
from hone.model_input import prompt_digest
from hone.models.load import load_config, load_end_ids
from hone.models.tokenizer import load_tokenizer
from hone.rewards.pool import describe
from hone.tools.data_view.reading import Item, examples_of
from hone.tools.data_view.text import Entry, Language, NoTokenizerError, Text
from hone.tools.report.pieces import Splitter

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["model_language"]

_MOST_MEASURED = 1 << 18
"""Longest row that is tokenised whole to be measured, in tokens."""


def model_language(cfg: ViewConfig) -> Language:
    """The language of `model.path`, or of `model.tokenizer` alone. Raises NoTokenizerError
    where it is not here, and UserError for settings that a run refuses."""
    try:
        tokenizer = load_tokenizer(cfg.model)
    except (FileNotFoundError, UserError) as error:
        raise NoTokenizerError(f"{error}") from error
    vocab_size, room, images = len(tokenizer), None, None
    end_ids: tuple[int, ...] = ()
    if cfg.model.path:
        vocab_size = load_config(cfg.model).vocab_size
        end_ids = load_end_ids(cfg.model, tokenizer)
        images = image_reader(cfg.model, cfg.data, tokenizer)
        room = _room(cfg) if isinstance(cfg, RLConfig) else None
    if isinstance(cfg, RLConfig):
        has_env = cfg.env.is_set and cfg.env.harness.command is None
        facts = describe(cfg.reward, cfg.env) if has_env else None
        tools = tools_of(facts, cfg.env, tokenizer)
        renderer = Renderer(
            tokenizer,
            cfg.data,
            keeps_messages=cfg.env.is_set,
            tools=tools.schemas,
            images=images,
        )
    else:
        renderer = Renderer(tokenizer, cfg.data, end_ids=end_ids, images=images)

    def opened(items: Sequence[Item], report: FilterReport) -> list[Item]:
        return open_images(items, images, cfg.data, report)

    def unknown(token_ids: Sequence[int]) -> str | None:
        found = unknown_token(token_ids, vocab_size, tokenizer.convert_ids_to_tokens)
        return f"{found}, and the model has {vocab_size:,}" if found else None

    return Language(
        unit="tokens",
        render=partial(_render, cfg, renderer, room),
        open_images=opened,
        limits=_limits(cfg, room),
        pieces=Splitter(_decoder(tokenizer)),
        special_ids=frozenset(tokenizer.all_special_ids) | frozenset(end_ids),
        unknown=unknown,
        uses_chat=renderer.uses_chat,
    )


def _room(cfg: RLConfig) -> int:
    room = room_for_prompts(cfg)
    if room < 1:
        raise UserError(
            f"a completion of {cfg.max_completion_tokens:,} tokens leaves no room for a prompt in "
            "the model's context; lower rollout.max_completion_tokens (and that of eval)"
        )
    return room


def _decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[Sequence[int]], str]:
    def decode(ids: Sequence[int]) -> str:
        text = tokenizer.decode(
            [*ids], skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return str(text)

    return decode


def _limits(cfg: ViewConfig, room: int | None) -> list[LengthLimit[Entry]]:
    name, most = "data.max_prompt_tokens", cfg.data.max_prompt_tokens
    if isinstance(cfg, SFTConfig):
        return [
            LengthLimit(name, most, _num_prompt),
            LengthLimit("data.max_tokens", cfg.data.max_tokens, _num_whole),
        ]
    if room is not None and room < most:
        return [LengthLimit("the context's room for a prompt", room, _num_prompt)]
    return [LengthLimit(name, most, _num_prompt)]


def _num_prompt(entry: Entry) -> int:
    return entry.num_prompt


def _num_whole(entry: Entry) -> int:
    return entry.num_whole


def _render(
    cfg: ViewConfig,
    renderer: Renderer,
    room: int | None,
    items: Sequence[Item],
    is_limited: bool,
) -> list[Entry]:
    examples = [example for item in items for example in examples_of(item)]
    most = cfg.data.max_prompt_tokens
    most_prompt = most if room is None else min(most, room)
    if not is_limited:
        most_prompt = _MOST_MEASURED
    if not isinstance(cfg, SFTConfig):
        prompts = renderer.prompts(examples, max_tokens=most_prompt)
        return [_asked(prompt) for prompt in prompts]
    _refuse_split(items, renderer)
    is_for_reward = isinstance(cfg, PairsConfig) and cfg.for_reward_model
    render = renderer.transcripts if is_for_reward else renderer.demonstrations
    rendered = iter(
        render(
            examples,
            max_prompt_tokens=most_prompt,
            max_tokens=cfg.data.max_tokens if is_limited else _MOST_MEASURED,
        )
    )
    on_prompt = not isinstance(cfg, PairsConfig) and cfg.data.train_on_prompt
    return [_learned([next(rendered) for _ in examples_of(item)], on_prompt) for item in items]


def _refuse_split(items: Sequence[Item], renderer: Renderer) -> None:
    """Raise UserError for pairs of texts without a prompt, as `load_pairs` does."""
    split = next((x for x in items if not isinstance(x, Example) and x.is_split), None)
    if renderer.uses_chat and split is not None:
        raise UserError(
            f"{split.location}: chosen and rejected are texts without a prompt, and the chat "
            "template needs to know which part of them is the user's message. Add a column "
            "prompt, write them as chat messages, or set data.chat to 'never' to train the "
            "texts as they are"
        )


def _asked(prompt: Rendered) -> Entry:
    number = len(prompt.token_ids)
    text = Text(prompt.token_ids, number, number)
    return _entry((text,), prompt.token_ids, prompt)


def _learned(rows: Sequence[Demonstration], on_prompt: bool) -> Entry:
    texts = tuple(
        Text(
            row.token_ids,
            row.num_prompt_tokens,
            max(len(row.token_ids), row.num_prompt_tokens),
            first_trained=1 if on_prompt else row.num_prompt_tokens,
        )
        for row in rows
    )
    entry = _entry(texts, rows[0].prompt_ids, rows[0])
    is_cut = any(row.is_cut for row in rows)
    return Entry(texts, entry.digest, entry.prompt_ids, entry.model_input, is_cut)


def _entry(
    texts: tuple[Text, ...], prompt_ids: tuple[int, ...], row: Rendered | Demonstration
) -> Entry:
    digest = int.from_bytes(prompt_digest(prompt_ids, row.model_input)[:8])
    return Entry(texts, digest, prompt_ids, row.model_input, row.is_cut)
