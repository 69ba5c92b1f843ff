"""Roofline model: the shortest possible time of a step on a device, from the step's actual lengths.

One decode step of B sequences reads every weight once and every visible key and value once, and
reads and writes the states of recurrent layers:

    t = max(weight_bytes / bandwidth, 2 * params * B / flops)
        + (kv_bytes * sum(context) + 2 * state_bytes * B) / bandwidth

Of experts, only those that B tokens are expected to pass are read. Matrix products and attention
follow each other, and attention of single queries is always bound by the KV cache. Generation is
the sum of t over the decode steps while the batch shrinks, plus the FLOPs of the prefill; training
is three forward passes' FLOPs. A vision tower encodes each distinct image once, as a part of
generation. Measured times are divided into these limits as `perf/R_gen`,
`perf/R_train` and `perf/R_step`.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from hone.families.shape import Floats, ModelShape
from hone.hardware import Peaks

__all__ = [
    "decode_step_s",
    "encoding_time_s",
    "generation_time_s",
    "training_flops",
    "training_time_s",
]

Ints: TypeAlias = "np.ndarray[Any, np.dtype[np.int64]]"


def decode_step_s(
    shape: ModelShape,
    peaks: Peaks,
    num_seqs: Floats | float,
    num_keys: Floats | float,
    *,
    bytes_per_value: int = 2,
    kv_bytes_per_value: int | None = None,
    packs_rows: bool = False,
) -> Floats:
    """Lower limit of the time of decode steps in seconds; elementwise over steps.

    `num_seqs` sequences advance by one token and read `num_keys` cached keys in all, averaged over
    the layers. A step without sequences takes no time. Keys and values take as many bytes as
    weights do where `kv_bytes_per_value` is None. With `packs_rows` matrices of layers are 8-bit
    codes (`engine.weight_dtype=int8`).
    """
    kv_bytes = shape.kv_bytes_per_token(kv_bytes_per_value or bytes_per_value)
    seqs = np.asarray(num_seqs, dtype=np.float64)
    weights = shape.decode_bytes(bytes_per_value, packs_rows=packs_rows)
    untouched = shape.untouched_experts(seqs) * (1 if packs_rows else bytes_per_value)
    weights_s = (weights - untouched) / peaks.bytes_per_s
    matmul_s = 2.0 * (shape.active_body_params + shape.head_params) * seqs / peaks.flops_per_s
    read = kv_bytes * np.asarray(num_keys) + 2 * shape.state_bytes(bytes_per_value) * seqs
    return np.where(seqs > 0, np.maximum(weights_s, matmul_s) + read / peaks.bytes_per_s, 0.0)


def generation_time_s(
    shape: ModelShape,
    peaks: Peaks,
    prompt_lengths: Sequence[int],
    completion_lengths: Sequence[int],
    *,
    max_num_seqs: int,
    prefill_lengths: Sequence[int] | None = None,
    bytes_per_value: int = 2,
    kv_bytes_per_value: int | None = None,
    packs_rows: bool = False,
) -> float:
    """Lower limit of the time to generate these samples on one device, in seconds.

    Samples start in the given order; when one ends, the next takes its place among the
    `max_num_seqs`. The prefill yields each sample's first token. `prefill_lengths` are the prompts
    that must be computed: give each shared prompt once; None prefills every sample's own.
    """
    prompts = np.asarray(prompt_lengths, dtype=np.int64)
    num_decodes = np.asarray(completion_lengths, dtype=np.int64) - 1
    prefills = prompts if prefill_lengths is None else np.asarray(prefill_lengths, dtype=np.int64)
    prefill_flops = shape.forward_flops(prefills, num_head_tokens=len(prefills))
    prompts, num_decodes = prompts[num_decodes > 0], num_decodes[num_decodes > 0]
    if not len(prompts):
        return prefill_flops / peaks.flops_per_s

    keys = _num_keys(num_decodes, prompts, window=None)
    if shape.sliding_window is not None:
        windowed = _num_keys(num_decodes, prompts, window=shape.sliding_window)
        keys += shape.sliding_share * (windowed - keys)
    kv_bytes = shape.kv_bytes_per_token(kv_bytes_per_value or bytes_per_value)
    seqs = _seqs_per_step(num_decodes, max_num_seqs)
    matrices_s = decode_step_s(
        shape, peaks, seqs, 0, bytes_per_value=bytes_per_value, packs_rows=packs_rows
    )
    decode_s = float(matrices_s.sum()) + kv_bytes * keys / peaks.bytes_per_s
    return prefill_flops / peaks.flops_per_s + decode_s


def training_flops(
    shape: ModelShape,
    lengths: ArrayLike,
    *,
    num_head_tokens: int,
    num_adapter_params: int | None = None,
) -> float:
    """FLOPs of forward and backward over sequences of these lengths, for any packing.

    Recomputation does not count. `num_head_tokens` are the tokens whose logits are needed. With
    `num_adapter_params` the base model is frozen: its matrices have no gradients and take two
    products in place of three.
    """
    if num_adapter_params is None:
        return 3.0 * shape.forward_flops(lengths, num_head_tokens=num_head_tokens)
    num_tokens = float(np.asarray(lengths).sum())
    frozen = 2.0 * (shape.active_body_params * num_tokens + shape.head_params * num_head_tokens)
    adapters = 2.0 * num_adapter_params * num_tokens
    return 2.0 * frozen + 3.0 * (shape.mixing_flops(lengths) + adapters)


def training_time_s(
    shape: ModelShape,
    peaks: Peaks,
    lengths: Sequence[int],
    *,
    passes: float = 3.0,
    num_head_tokens: int | None = None,
) -> float:
    """Lower limit of the time to train on sequences of these lengths, in seconds; it does not
    depend on packing.

    `passes` counts forwards: 3 is forward and backward, 4 adds old or reference log-probabilities.
    Recomputed activations are the program's own choice and not part of a limit. `num_head_tokens`
    are the tokens whose logits are needed; None: all.
    """
    flops = shape.forward_flops(lengths, num_head_tokens=num_head_tokens)
    return passes * flops / peaks.flops_per_s


def encoding_time_s(shape: ModelShape, peaks: Peaks, num_tokens: Iterable[int]) -> float:
    """Lower limit of the time in which a vision tower encodes images of these numbers of tokens,
    each given once, in seconds. Raises ValueError for a model without a tower."""
    tower = shape.tower
    if tower is None:
        raise ValueError(f"a {shape.family} model has no tower that encodes images")
    patches = (number * tower.patches_per_token for number in num_tokens)
    return sum(map(tower.flops, patches)) / peaks.flops_per_s


def _seqs_per_step(durations: Ints, max_num_seqs: int) -> Floats:
    """Number of running sequences at each step, [steps]; at most `max_num_seqs` run at once, and a
    free place is refilled."""
    starts = np.zeros(len(durations), dtype=np.int64)
    free_at = durations[:max_num_seqs].tolist()
    heapq.heapify(free_at)
    for index in range(max_num_seqs, len(durations)):
        starts[index] = free_at[0]
        heapq.heapreplace(free_at, free_at[0] + int(durations[index]))
    ends = starts + durations
    size = int(ends.max()) + 1
    change = np.bincount(starts, minlength=size) - np.bincount(ends, minlength=size)
    return np.cumsum(change, dtype=np.float64)[:-1]


def _num_keys(durations: Ints, prompts: Ints, *, window: int | None) -> float:
    """Keys read in all steps: prompt, tokens before, and the token itself, at most `window` each.

    A sequence reads `prompts + 1`, `prompts + 2`, ... keys, until it meets the window.
    """
    rising = durations
    if window is not None:
        rising = np.clip(window - prompts, 0, durations)
    line = rising * prompts + rising * (rising + 1) / 2
    return float((line + (durations - rising) * (window or 0)).sum())
