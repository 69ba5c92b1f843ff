"""The rows that `hone bench train` trains on: lengths from the configuration or a file, random ids.

Every step trains the same rows, as many as the real trainer would be given.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from pydantic import Field, ValidationError

from hone.config.base import Section
from hone.config.errors import UserError
from hone.config.schema import locate, nearest
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


def _read(path: Path) -> RowLengths:
    if not path.is_file():
        raise UserError(
            f"workload '{path}' is neither `rows` nor a file. Give `rows`, or the path of a JSONL "
            "file of lengths."
        )
    tokens: list[int] = []
    prompts: list[int] = []
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, start=1):
            if text.strip():
                line = _parse(text, where=f"{path}, line {number}")
                tokens += [line.tokens] * line.n
                prompts += [line.prompt_tokens] * line.n
    if not tokens:
        raise UserError(f"{path} holds no rows")
    return RowLengths(path.name, tuple(tokens), tuple(prompts))


def _parse(text: str, *, where: str) -> _Line:
    try:
        line = _Line.model_validate_json(text, strict=True)
    except ValidationError as error:
        raise UserError(f"{where}: {_explain(error)}") from error
    if line.prompt_tokens >= line.tokens:
        raise UserError(
            f"{where}: prompt_tokens is {line.prompt_tokens} of {line.tokens} tokens, which leaves "
            "none to train; give at most one less than tokens"
        )
    return line


def _explain(error: ValidationError) -> str:
    """The problem of a line. A misspelt key comes first: it explains one that is missing."""
    details = error.errors(include_url=False)
    detail = next((x for x in details if x["type"] == "extra_forbidden"), details[0])
    path = [str(part) for part in detail["loc"]]
    match detail["type"]:
        case "json_invalid" | "model_type":
            return f"no JSON object: {detail['msg']}"
        case "extra_forbidden":
            near = nearest(_Line, path)
            keys = ", ".join(_Line.model_fields)
            hint = f"did you mean {' or '.join(near)}?" if near else f"allowed: {keys}"
            return f"unknown key '{path[0]}'; {hint}"
        case "missing":
            return f"'{path[0]}' is required"
        case _:
            field = locate(_Line, path[:1])
            assert field is not None, f"{path=}"
            return f"{path[0]} is {detail['input']!r}; allowed: {field.allowed}"
