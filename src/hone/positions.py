"""Indices and positions of tokens, computed in this one place for engine and trainer.

A token has an *index* in its sequence, which decides where its keys are stored and what it attends
to, and *positions* for the rotary embedding. For text both are the same number, and the same array.
A model family may use other positions, such as frame, row and column of an image, three for each
token (Qwen2.5-VL and Qwen3-VL). After the last content all positions grow by one a token, so a
decode step adds one number for each sequence (`position_shift`) to the index.

Shapes: T tokens of a pass, S sequences, A axes of a rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from hone.model_input import ModelInput, PositionRule

__all__ = ["packed_positions", "position_shift"]

Ints: TypeAlias = NDArray[np.int64]


def packed_positions(
    sizes: Sequence[int] | Ints,
    starts: Ints | None = None,
    *,
    inputs: Sequence[ModelInput] = (),
    rule: PositionRule | None = None,
) -> tuple[Ints, Ints]:
    """Indices [T] and positions [T], or [A, T] with a rule, of slices of S sequences end to end.

    Slice s has `sizes[s]` tokens from index `starts[s]` on, by default from 0. `inputs` has the
    model input of each sequence, for the `rule`. Without a rule both results are the same array.
    """
    borders = np.concatenate([[0], np.cumsum(sizes)])
    offsets = -borders[:-1] if starts is None else starts - borders[:-1]
    indices = np.arange(borders[-1]) + np.repeat(offsets, sizes)
    if rule is None:
        return indices, indices
    assert len(inputs) == len(sizes), f"{len(inputs)=} {len(sizes)=}"
    begins = [0] * len(sizes) if starts is None else starts.tolist()
    rows = [
        rule.rows(each, start + int(size))[:, start:]
        for each, start, size in zip(inputs, begins, sizes, strict=True)
    ]
    return indices, np.concatenate(rows, axis=1)


def position_shift(rule: PositionRule, model_input: ModelInput) -> int:
    """Position minus index of the tokens after the last content of a sequence, at most 0."""
    end = model_input.contents[-1].stop if model_input else 0
    return int(rule.rows(model_input, end + 1)[0, end]) - end
