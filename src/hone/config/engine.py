"""The generation engine and its memory."""

from __future__ import annotations

from pydantic import Field

from hone.config.base import Section

__all__ = ["EngineConfig"]


class EngineConfig(Section):
    """The embedded engine: paged KV cache and continuous batching in the trainer's process."""

    gpu_memory_utilization: float = Field(default=0.5, gt=0, le=1)
    """Fraction of the device's total memory that the KV cache and the activations of generation may
    take together, and in `hone eval` and `hone generate` the weights too; in training the weights
    are the trainer's. On a CPU the cache is sized by `kv_cache_gib`."""

    kv_cache_gib: float | None = Field(default=None, gt=0)
    """Size of the KV cache in GiB; unset: from `gpu_memory_utilization` on CUDA; on a CPU what
    `max_num_seqs` sequences of full length need, at most 1 GiB."""

    block_size: int = Field(default=16, ge=1)
    """Tokens in one KV block (page)."""

    max_num_seqs: int = Field(default=256, ge=1)
    """Sequences that may run at once."""

    max_num_batched_tokens: int = Field(default=8192, ge=1)
    """Tokens of one engine step; longer prompts are prefilled in chunks of this size."""

    max_model_len: int | None = Field(default=None, ge=2)
    """Longest prompt plus completion in tokens; unset: the model's context length."""

    enable_sleep: bool = False
    """Free the KV cache while the trainer works and allocate it again afterwards."""

    enable_prefix_caching: bool = True
    """Share the KV blocks of equal prompt beginnings, within a group above all."""

    cuda_graphs: bool = True
    """Replay decode steps from CUDA graphs, which spares the host the launch of every kernel; off
    only to look for faults. No effect on a CPU."""

    compile: bool = True
    """Compile the decoder layers of those graphs with torch.compile: some seconds at the start, a
    fifth less time in every decode step."""
