"""Roofline model: the shortest possible time of a step on a device, from the step's actual lengths.

One decode step of B sequences reads every weight once and every visible key and value once, and
reads and writes the states of recurrent layers:

    t = max(weight_bytes / bandwidth, 2 * params * B / flops)
        + (kv_bytes * sum(context) + 2 * state_bytes * B) / bandwidth

Of experts, only those that B tokens are expected to pass are read. Matrix products and attention
follow each other, and attention of single queries is always bound by the KV cache. Generation is
the sum of t over the decode steps while the batch shrinks, plus the FLOPs of the prefill; training
is three forward passes' FLOPs, fewer where weights are frozen (`training_work`). A vision tower
encodes each distinct image once, as a part of generation, and where the trainer has a model of its
own, once more there. Measured times are divided into these limits as `perf/R_gen`, `perf/R_train`
and `perf/R_step`.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from hone.families.shape import Floats, ModelShape
from hone.hardware import Peaks
from hone.models.settings import LoraConfig
from hone.trainer.cost import active_adapter_params, adapted_tensors

__all__ = [
    "RowPasses",
    "TrainingWork",
    "decode_step_s",
    "encoding_time_s",
    "generation_time_s",
    "training_flops",
    "training_work",
]

_NO_ADAPTERS = LoraConfig()

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


@dataclass(frozen=True, slots=True)
class RowPasses:
    """The passes of one model over the rows of a step."""

    shape: ModelShape
    lora: LoraConfig = _NO_ADAPTERS
    """Adapters that all passes compute with, and the only weights that are trained."""
    num_scorings: int = 0
    """Passes without gradient."""
    num_epochs: int = 1
    """Passes forward and backward."""
    has_head: bool = True
    """Whether it computes logits; False for one that gives values."""

    def flops(self, lengths: ArrayLike, *, num_head_tokens: int) -> float:
        """FLOPs over rows of these lengths, for any packing; `num_head_tokens` are the tokens whose
        logits are needed."""
        num_tokens = float(np.asarray(lengths).sum())
        head = num_head_tokens if self.has_head else 0
        forward = self.shape.forward_flops(lengths, num_head_tokens=head)
        forward += 2.0 * active_adapter_params(self.shape, self.lora) * num_tokens
        trained = training_work(self.shape, lengths, num_head_tokens=head, lora=self.lora)
        return self.num_scorings * forward + self.num_epochs * trained.flops


class TrainingWork(NamedTuple):
    """FLOPs of forward and backward."""

    products: float
    """With weights."""
    mixing: float
    """Of attention and recurrence."""

    @property
    def flops(self) -> float:
        """All FLOPs."""
        return self.products + self.mixing


def training_work(
    shape: ModelShape, lengths: ArrayLike, *, num_head_tokens: int, lora: LoraConfig
) -> TrainingWork:
    """The least work of forward and backward over sequences of these lengths, for any packing.

    A weight takes a product of 2 FLOPs a token forward, another one for the gradient of its input,
    and a third one for its own gradient where it is trained. With adapters the base weights are
    frozen; what lies before the first adapters, and their own inputs, has no gradient then.
    Recomputation does not count. `num_head_tokens` are the tokens whose logits are needed.
    """
    num_tokens = float(np.asarray(lengths).sum())
    weights = shape.active_body_params * num_tokens + shape.head_params * num_head_tokens
    mixing = shape.mixing_flops(lengths)
    if not lora.rank:
        return TrainingWork(6.0 * weights, 3.0 * mixing)
    start, adapters = _without_gradient(shape, lora), active_adapter_params(shape, lora)
    recurrence = shape.recurrence_flops_per_token * num_tokens
    attention = mixing - recurrence
    return TrainingWork(
        4.0 * weights + 6.0 * adapters * num_tokens - 2.0 * start.num_inputs * num_tokens,
        3.0 * mixing - 2.0 * (attention * start.attention + recurrence * start.recurrence),
    )


def training_flops(
    shape: ModelShape,
    lengths: ArrayLike,
    *,
    num_head_tokens: int,
    lora: LoraConfig = _NO_ADAPTERS,
) -> float:
    """All FLOPs of `training_work`."""
    return training_work(shape, lengths, num_head_tokens=num_head_tokens, lora=lora).flops


class _Start(NamedTuple):
    """What lies before the first adapters, so that no gradient passes it."""

    num_inputs: int
    """Weights of a token, those of adapters too, whose inputs have no gradient."""
    attention: float
    """Share of all layers' attention."""
    recurrence: float
    """Share of all recurrences."""


_PLACES = {
    "q_proj": 0,
    "k_proj": 0,
    "v_proj": 0,
    "in_proj_qkv": 0,
    "in_proj_z": 0,
    "in_proj_b": 0,
    "in_proj_a": 0,
    "conv1d": 1,
    "o_proj": 2,
    "out_proj": 2,
    "mlp.gate": 3,
    "shared_expert_gate": 3,
    "gate_proj": 3,
    "up_proj": 3,
    "experts.gate_up_proj": 3,
    "down_proj": 4,
    "experts.down_proj": 4,
}
"""The order in which the matrices of a layer are multiplied. Attention and recurrence are behind
the first ones."""


def _without_gradient(shape: ModelShape, lora: LoraConfig) -> _Start:
    num_inputs, mixers = 0, {False: 0.0, True: 0.0}
    names = {t.name for t in adapted_tensors(shape, lora)}
    for index in range(shape.num_layers):
        matrices = shape.matrices_of_layer(index)
        own = names & {t.name for t in matrices}
        first = min((_PLACES[name] for name in own), default=len(_PLACES))
        for tensor in matrices:
            if _PLACES[tensor.name] <= first:
                num_inputs += shape.passed(tensor)
            if _PLACES[tensor.name] == first and tensor.name in own:
                num_inputs += shape.passed(tensor.adapter(lora.rank)[0])
        mixers[index in shape.recurrent_indices] += 1.0 if first else _spared_mixing(own)
        if own:
            break
    return _Start(
        num_inputs,
        mixers[False] / max(shape.num_attention_layers, 1),
        mixers[True] / max(len(shape.recurrent_indices), 1),
    )


def _spared_mixing(names: Collection[str]) -> float:
    """Share of the backward pass of the first attention that is spared where only some of what it
    reads has a gradient, because it has an adapter, by `names`. Four products give the gradients of
    values, scores, queries and keys. All of the backward pass of a recurrence counts."""
    q, k, v = (f"{name}_proj" in names for name in "qkv")
    return 1 - (v + (q or k) + q + k) / 4 if q or k or v else 0.0


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
