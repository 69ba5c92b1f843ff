"""The language of a model: its tokenizer and chat template, exactly as in training."""

from __future__ import annotations

from collections.abc import Sequence

from hone.config.env_try import EnvTryConfig
from hone.data.chat import Renderer
from hone.data.filters import FilterReport
from hone.data.images import open_images
from hone.data.prompts import make_prompt
from hone.data.turns import TurnRenderer
from hone.errors import UserError
from hone.loops.inputs import encoder, image_reader, tools_of
from hone.models.load import load_config, load_end_ids
from hone.models.support import context_length
from hone.models.tokenizer import decoder, load_tokenizer, require_known_tokens
from hone.rewards.pool import describe
from hone.tools.env_try.language import Language, examples_of

__all__ = ["model_language"]


def model_language(cfg: EnvTryConfig, num_rows: int) -> Language:
    """The language of `model.path`, or of `model.tokenizer` alone. Raises UserError for anything
    wrong with the rows, and the errors of the loaders where there is no such tokenizer."""
    tokenizer = load_tokenizer(cfg.model)
    eos: int | None = tokenizer.eos_token_id  # pyright: ignore[reportAssignmentType]
    vocab_size, end_ids, context = len(tokenizer), () if eos is None else (eos,), None
    if cfg.model.path:
        config = load_config(cfg.model)
        vocab_size, context = config.vocab_size, context_length(config)
        end_ids = load_end_ids(cfg.model, tokenizer)
    max_tokens = cfg.max_completion_tokens
    note = ""
    if context is not None and max_tokens >= context:
        max_tokens = context // 2
        note = (
            f"episodes are cut at {max_tokens:,} tokens, since the longest completion "
            f"({cfg.max_completion_tokens:,}) leaves no room for a prompt in a context of "
            f"{context:,}"
        )
    examples = examples_of(cfg, num_rows)
    facts = describe(cfg.reward, cfg.env) if cfg.env.is_set else None
    tools = tools_of(facts, cfg.env, tokenizer)
    images = image_reader(cfg.model, cfg.data, tokenizer) if cfg.model.path else None
    examples = open_images(examples, images, cfg.data, FilterReport())
    renderer = Renderer(
        tokenizer, cfg.data, keeps_messages=True, tools=tools.schemas, images=images
    )
    rendered = renderer.prompts(examples)
    prompts = [make_prompt(*both) for both in zip(examples, rendered, strict=True)]
    room = None if context is None else context - max_tokens
    require_known_tokens(prompts, tokenizer, vocab_size, cfg.model.path or "model.tokenizer")
    for prompt in prompts:
        if room is not None and len(prompt.token_ids) > room:
            raise UserError(
                f"row {prompt.id} has {len(prompt.token_ids):,} tokens, and the context has room "
                f"for {room:,} before a completion of full length; lower the longest completion"
            )
    render = TurnRenderer(
        tokenizer,
        cfg.data,
        vocab_size=vocab_size,
        end_ids=end_ids,
        tools=tools.schemas,
        tool_format=tools.format,
        max_prompt_tokens=room,
        max_observation_tokens=cfg.env.max_observation_tokens,
        images=images,
    )
    render.require_answers()
    return Language(
        prompts=prompts,
        encode=encoder(tokenizer),
        decode=decoder(tokenizer, end_ids),
        render=render,
        tool_format=tools.format,
        end_id=_end_of_turn(eos, end_ids),
        max_tokens=max_tokens,
        has_tokens=True,
        note=note,
    )


def _end_of_turn(eos: int | None, end_ids: Sequence[int]) -> int | None:
    """The tokenizer's end token, if it ends a turn of the model, else the first one that does."""
    return eos if eos in end_ids else next(iter(end_ids), None)
