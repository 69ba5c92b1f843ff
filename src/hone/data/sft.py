"""Demonstrations for supervised fine-tuning."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

from hone.config.data import SourceConfig
from hone.config.tree import SFTDataConfig
from hone.data.chat import Demonstration, Renderer
from hone.data.columns import map_rows
from hone.data.filters import FilterReport, LengthLimit, filter_length
from hone.data.sources import read_source
from hone.data.split import load_split
from hone.data.stream import Stream
from hone.types import Trajectory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["RowStream", "SFTData", "load_sft"]

logger = logging.getLogger(__name__)

RowStream: TypeAlias = Stream[Trajectory]


@dataclass(frozen=True, slots=True)
class SFTData:
    """The demonstrations of a run."""

    train: RowStream
    eval: list[Trajectory]
    report: FilterReport


def load_sft(cfg: SFTDataConfig, tokenizer: PreTrainedTokenizerBase, *, seed: int) -> SFTData:
    """Read, render, filter and split the demonstrations of all sources.

    Rows carry `token_ids` and `loss_mask`: true on the completion with its end token, and on the
    prompt (but for its first token) with `train_on_prompt`. Raises UserError for anything wrong
    with the data.
    """
    renderer = Renderer(tokenizer, cfg)
    report = FilterReport()
    limits = {
        "max_prompt_tokens": LengthLimit(
            "data.max_prompt_tokens", cfg.max_prompt_tokens, _num_prompt_tokens
        ),
        "max_tokens": LengthLimit("data.max_tokens", cfg.max_tokens, _num_tokens),
    }

    def load(source: SourceConfig, name: str) -> list[Trajectory]:
        examples = map_rows(read_source(source), source, name=name, demonstrations=True)
        demonstrations = renderer.demonstrations(
            examples, max_prompt_tokens=cfg.max_prompt_tokens, max_tokens=cfg.max_tokens
        )
        rows = list(zip(examples, demonstrations, strict=True))
        kept = filter_length(rows, limits, overlong=cfg.overlong_prompts, report=report)
        return [
            _trajectory(example.id, row, train_on_prompt=cfg.train_on_prompt)
            for example, row in kept
        ]

    split = load_split(cfg, load, seed)
    logger.log(logging.WARNING if report.dropped else logging.INFO, "%s", report.summary())
    train = RowStream(
        split.train,
        seed=seed,
        weights=[source.weight for source in cfg.train],
        shuffle=cfg.shuffle,
        content=lambda row: (row.id, row.token_ids, row.loss_mask),
    )
    return SFTData(train, split.eval, report)


def _num_tokens(row: Demonstration) -> int:
    return len(row.token_ids)


def _num_prompt_tokens(row: Demonstration) -> int:
    return row.num_prompt_tokens


def _trajectory(row_id: str, row: Demonstration, *, train_on_prompt: bool) -> Trajectory:
    # The first token has no predecessor to be predicted from.
    first_trained = 1 if train_on_prompt else row.num_prompt_tokens
    return Trajectory(
        id=row_id,
        token_ids=list(row.token_ids),
        loss_mask=[position >= first_trained for position in range(len(row.token_ids))],
    )
