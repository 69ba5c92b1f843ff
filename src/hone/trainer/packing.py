"""Rows to micro-batches: which sequences share a forward pass, and the tensors of that pass.

    for indices in pack(rows, max_tokens=16384):
        batch = collate([rows[i] for i in indices], [weights[i] for i in indices], device)

A bin never holds more than `max_tokens` tokens. Within that cap bins are balanced by estimated
FLOPs, since attention makes one long sequence dearer than many short ones of the same total.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hone.types import MicroBatch, Trajectory

__all__ = ["AttentionCost", "collate", "pack"]

Cost = Callable[[int], float]
"""Relative time of a forward pass over one sequence of so many tokens; must not decrease."""


@dataclass(frozen=True, slots=True)
class AttentionCost:
    """FLOPs of a sequence's forward pass: linear in its tokens, plus causal attention."""

    per_token: float
    per_token_squared: float

    @classmethod
    def of(cls, *, num_parameters: int, num_layers: int, attention_width: int) -> AttentionCost:
        """`attention_width` is query heads times head size. Scores and values cost
        `4 * width * n^2 / 2` FLOPs a layer, matrices 2 FLOPs a parameter and token."""
        return cls(2.0 * num_parameters, 2.0 * num_layers * attention_width)

    def __call__(self, num_tokens: int) -> float:
        return self.per_token * num_tokens + self.per_token_squared * num_tokens**2


def pack(
    rows: Sequence[Trajectory],
    *,
    max_tokens: int,
    micro_batch_size: int | None = None,
    cost: Cost | None = None,
) -> list[list[int]]:
    """Cut rows into micro-batches; returns the row indices of each, deterministic.

    With `micro_batch_size` every bin takes at most that many rows, whatever their length;
    otherwise at most `max_tokens` tokens. As few bins as the cap allows are balanced by `cost`
    (default: tokens), the dearest rows first, each into the cheapest bin that has room.

    Raises ValueError for a row longer than `max_tokens`.
    """
    lengths = [row.num_tokens for row in rows]
    if micro_batch_size is not None:
        sizes, capacity = [1] * len(rows), micro_batch_size
    else:
        sizes, capacity = lengths, max_tokens
        for row, length in zip(rows, lengths, strict=True):
            if length > max_tokens:
                raise ValueError(
                    f"sequence {row.id!r} has {length} tokens, more than the budget of "
                    f"{max_tokens} for one pass; raise trainer.max_tokens_per_microbatch (or "
                    "max_tokens_per_forward), or shorten prompts or completions"
                )
    if not rows:
        return []
    costs = [cost(n) for n in lengths] if cost else [float(n) for n in lengths]
    num_bins = ceil(sum(sizes) / capacity)
    while True:
        bins = _place(sizes, costs, capacity, num_bins)
        if len(bins) == num_bins:
            return sorted(sorted(members) for members in bins)
        num_bins = len(bins)


def _place(
    sizes: Sequence[int], costs: Sequence[float], capacity: int, num_bins: int
) -> list[list[int]]:
    """Longest-processing-time placement into `num_bins` bins, or more where a row fits in none."""
    bins: list[list[int]] = [[] for _ in range(num_bins)]
    room = np.full(len(sizes), capacity)
    load = np.zeros(len(sizes))
    for row in sorted(range(len(sizes)), key=lambda i: (-costs[i], i)):
        open_bins = len(bins)
        loads = np.where(room[:open_bins] >= sizes[row], load[:open_bins], np.inf)
        best = int(loads.argmin())
        if loads[best] == np.inf:
            best = open_bins
            bins.append([])
        bins[best].append(row)
        room[best] -= sizes[row]
        load[best] += costs[row]
    return bins


def collate(
    rows: Sequence[Trajectory], weights: Sequence[float], device: torch.device | str
) -> MicroBatch:
    """Lay rows end to end. `weights` holds one weight a row, carried by each of its trained tokens.

    Raises ValueError where a row trains its first token, which nothing predicts, or where a field
    does not hold one value for each trained token.
    """
    device = torch.device(device)
    lengths = [row.num_tokens for row in rows]
    borders = np.concatenate([[0], np.cumsum(lengths)])
    input_ids = np.concatenate([np.asarray(row.token_ids, dtype=np.int64) for row in rows])
    mask = np.concatenate([np.asarray(row.loss_mask, dtype=bool) for row in rows])
    assert len(mask) == len(input_ids), f"{len(mask)=} {len(input_ids)=}"
    if mask[borders[:-1]].any():
        first = int(mask[borders[:-1]].argmax())
        raise ValueError(f"sequence {rows[first].id!r} trains its first token: nothing predicts it")
    trained = np.flatnonzero(mask)
    num_trained = np.add.reduceat(mask.astype(np.int64), borders[:-1])

    def to_device(array: np.ndarray[Any, Any] | Tensor) -> Tensor:
        tensor = torch.as_tensor(array)
        if device.type == "cuda":
            return tensor.pin_memory().to(device, non_blocking=True)
        return tensor.to(device)

    def per_token(name: str) -> Tensor | None:
        values = _concatenate(rows, num_trained.tolist(), name)
        return None if values is None else to_device(values)

    return MicroBatch(
        input_ids=to_device(input_ids),
        position_ids=to_device(np.arange(len(input_ids)) - np.repeat(borders[:-1], lengths)),
        cu_seqlens=to_device(borders.astype(np.int32)),
        max_seqlen=max(lengths),
        predict_index=to_device(trained - 1),
        labels=to_device(input_ids[trained]),
        sequence_index=to_device(np.repeat(np.arange(len(rows)), num_trained)),
        weights=to_device(np.repeat(np.asarray(weights, dtype=np.float32), num_trained)),
        advantages=per_token("advantages"),
        rollout_logprobs=per_token("rollout_logprobs"),
        staleness=per_token("staleness"),
        old_logprobs=per_token("old_logprobs"),
        ref_logprobs=per_token("ref_logprobs"),
        ids=tuple(row.id for row in rows),
        lengths=tuple(lengths),
    )


def _concatenate(
    rows: Sequence[Trajectory], num_trained: Sequence[int], name: str
) -> Tensor | None:
    """One per-token field of all rows, [N] float32; None where no row has it."""
    values: list[Tensor | None] = [getattr(row, name) for row in rows]
    present = [value for value in values if value is not None]
    if not present:
        return None
    if len(present) < len(rows):
        raise ValueError(f"{name} is set on {len(present)} of {len(rows)} rows; set all or none")
    for row, value, expected in zip(rows, present, num_trained, strict=True):
        if value.shape != (expected,):
            raise ValueError(
                f"{name} of sequence {row.id!r} has shape {tuple(value.shape)}; its loss mask "
                f"trains {expected} tokens"
            )
    return torch.cat(present).float()
