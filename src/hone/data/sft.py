"""Demonstrations for supervised fine-tuning."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from hone.config.tree import SFTDataConfig
from hone.data.chat import Demonstration, Renderer
from hone.data.columns import Example, ExampleReaders
from hone.data.filters import LengthLimit
from hone.data.loading import load_data
from hone.data.prompts import is_put_into_template, show_template
from hone.data.split import Data
from hone.data.stream import Stream
from hone.types import Row

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from hone.images.reader import ImageReader

__all__ = ["RowStream", "SFTData", "load_sft"]

RowStream: TypeAlias = Stream[Row]
SFTData: TypeAlias = Data[Row]


def load_sft(
    cfg: SFTDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    seed: int,
    end_ids: Collection[int] = (),
    images: ImageReader | None = None,
    cache: Path | None = None,
) -> SFTData:
    """Read, render, filter and split the demonstrations of all sources.

    Rows have `token_ids` and `loss_mask`, which is true on the completion and its end token and,
    with `train_on_prompt`, on the prompt except its first token. `end_ids` and `images` are those
    of `Renderer`, `cache` is a folder for indexes of large sources.

    Raises UserError for anything wrong with the data.
    """
    renderer = Renderer(tokenizer, cfg, end_ids=end_ids, images=images)
    shown: list[str] = []

    def make(example: Example, row: Demonstration) -> Row:
        if not shown and is_put_into_template(example.prompt, renderer, cfg):
            shown.append(str(tokenizer.decode([*row.token_ids])))
            show_template("demonstrations", shown[0])
        # The first token has no predecessor to be predicted from.
        first_trained = 1 if cfg.train_on_prompt else row.num_prompt_tokens
        return Row(
            id=example.id,
            token_ids=list(row.token_ids),
            loss_mask=[position >= first_trained for position in range(len(row.token_ids))],
            model_input=row.model_input,
        )

    return load_data(
        cfg,
        readers=ExampleReaders(demonstrations=True),
        render=lambda examples: renderer.demonstrations(
            examples, max_prompt_tokens=cfg.max_prompt_tokens, max_tokens=cfg.max_tokens
        ),
        limits=[
            LengthLimit("data.max_prompt_tokens", cfg.max_prompt_tokens, _num_prompt_tokens),
            LengthLimit("data.max_tokens", cfg.max_tokens, _num_tokens),
        ],
        make=make,
        content=lambda row: (row.id, row.token_ids, row.loss_mask, *row.model_input.key),
        seed=seed,
        images=images,
        cache=cache,
    )


def _num_tokens(row: Demonstration) -> int:
    return len(row.token_ids)


def _num_prompt_tokens(row: Demonstration) -> int:
    return row.num_prompt_tokens
