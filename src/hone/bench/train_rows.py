"""The rows that `hone bench train` trains on: lengths from the configuration or a file, random ids.

Every step trains the same rows, as many as the real trainer would be given.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from pydantic import Field, model_validator

from hone.bench.lines import read_lines
from hone.config.base import Section
from hone.config.errors import UserError
from hone.config.tree import BenchTrainConfig
from hone.types import Trajectory

__all__ = ["RowLengths", "draw_rows", "row_lengths"]


@dataclass(frozen=True, slots=True)
class RowLengths:
    """The rows of one optimizer step, in this order."""

    name: str
    tokens: tuple[int, ...]
    prompt_tokens: tuple[int, ...]
    """Tokens at a row's start that are not trained, at least the first."""

    @property
    def num_tokens(self) -> int:
        return sum(self.tokens)

    @property
    def num_trained(self) -> int:
        return self.num_tokens - sum(self.prompt_tokens)

    @property
    def longest(self) -> int:
        return max(self.tokens)

    def __len__(self) -> int:
        return len(self.tokens)


def row_lengths(cfg: BenchTrainConfig) -> RowLengths:
    """What `cfg.workload` names. Raises UserError for a missing file and for a bad line."""
    if cfg.workload == "rows":
        count = cfg.rows.per_step
        return RowLengths("rows", (cfg.rows.tokens,) * count, (1,) * count)
    return _read(Path(cfg.workload))


def draw_rows(
    lengths: RowLengths, *, vocab_size: int, seed: int, objective: str
) -> list[Trajectory]:
    """Rows of these lengths with random ids, each of a group of its own.

    For `rl` they carry advantages and the log-probabilities of an even distribution.
    """
    generator = torch.Generator().manual_seed(seed)
    rows: list[Trajectory] = []
    for index, (tokens, prompt) in enumerate(
        zip(lengths.tokens, lengths.prompt_tokens, strict=True)
    ):
        num_trained = tokens - prompt
        row = Trajectory(
            id=str(index),
            token_ids=torch.randint(vocab_size, (tokens,), generator=generator).tolist(),
            loss_mask=[False] * prompt + [True] * num_trained,
        )
        if objective == "rl":
            advantage = torch.randn(1, generator=generator)
            row.advantages = advantage.expand(num_trained).clone()
            row.rollout_logprobs = -torch.full((num_trained,), float(vocab_size)).log()
        rows.append(row)
    return rows


class _Line(Section):
    """One line of a file of rows."""

    tokens: int = Field(ge=2)
    """Length of the row."""

    prompt_tokens: int = Field(default=1, ge=1)
    """Tokens at its start that are not trained."""

    n: int = Field(default=1, ge=1)
    """Rows of this length."""

    @model_validator(mode="after")
    def _trains_some(self) -> Self:
        if self.prompt_tokens >= self.tokens:
            raise ValueError(
                f"prompt_tokens is {self.prompt_tokens} of {self.tokens} tokens, which leaves none "
                "to train; give at most one less than tokens"
            )
        return self


def _read(path: Path) -> RowLengths:
    if not path.is_file():
        raise UserError(
            f"workload '{path}' is neither `rows` nor a file. Give `rows`, or the path of a JSONL "
            "file of lengths."
        )
    lines = [line for _, line in read_lines(path, _Line) for _ in range(line.n)]
    if not lines:
        raise UserError(f"{path} holds no rows")
    return RowLengths(
        path.name,
        tuple(line.tokens for line in lines),
        tuple(line.prompt_tokens for line in lines),
    )
