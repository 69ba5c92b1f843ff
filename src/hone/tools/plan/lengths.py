"""Completion lengths of a simulated run, from a distribution or a file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from hone.config.planning import LengthsConfig
from hone.errors import UserError

__all__ = ["draw_lengths"]


def draw_lengths(
    cfg: LengthsConfig, num_samples: int, *, most: int, rng: np.random.Generator
) -> list[int]:
    """Completion lengths, 1 to `most`. Raises UserError for a file that has none."""
    match cfg.distribution:
        case "fixed":
            drawn = np.full(num_samples, cfg.median)
        case "uniform":
            drawn = rng.uniform(1.0, 2.0 * cfg.median, num_samples)
        case "lognormal":
            drawn = rng.lognormal(math.log(cfg.median), cfg.sigma, num_samples)
        case "file":
            drawn = rng.choice(_measured_lengths(cfg.path), num_samples)
    return np.clip(np.rint(drawn), 1, most).astype(int).tolist()


def _measured_lengths(path: Path | None) -> list[int]:
    assert path is not None, "check_simulate demands a file"
    lengths: list[int] = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            length = _length(line)
            if length is None:
                raise UserError(
                    f"{path}:{number}: a line must be an object with `tokens`, a whole number from "
                    "1 on, or with the list `token_ids`"
                )
            lengths.append(length)
    if not lengths:
        raise UserError(f"plan.lengths.path: {path} has no lengths")
    return lengths


def _length(line: str) -> int | None:
    """The length in a line of the file; None where it has none."""
    try:
        row: Any = json.loads(line)
    except json.JSONDecodeError:
        return None
    match row:
        case {"tokens": int(length)} if length >= 1:
            return length
        case {"token_ids": [_, *_] as ids}:
            return len(ids)
        case _:
            return None
