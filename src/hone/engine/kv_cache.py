"""The memory that holds keys and values: its size, allocation and release."""

from __future__ import annotations

import math

import numpy as np
import psutil
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from hone.config.engine import EngineConfig
from hone.config.errors import UserError

__all__ = ["KVCache", "available_bytes", "blocks_for", "choose_num_blocks"]

_GIB = 2**30
_CPU_DEFAULT_BYTES = _GIB


class KVCache:
    """One tensor a layer, [2, num_blocks, block_size, num_kv_heads, head_dim]: keys, then values.

    Its size is fixed; the tensors exist between `allocate` and `free`.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        num_heads = config.num_attention_heads
        self.num_layers: int = config.num_hidden_layers
        self.block_size = block_size
        self.num_kv_heads: int = getattr(config, "num_key_value_heads", None) or num_heads
        self.head_dim: int = getattr(config, "head_dim", None) or config.hidden_size // num_heads
        self.dtype = dtype
        self.device = device
        self.layers: list[Tensor] = []

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        per_layer = 2 * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return self.num_layers * per_layer

    def allocate(self, num_blocks: int) -> None:
        """Make the tensors. Raises UserError with both sizes where memory is lacking.

        Filled with zeros: masked keys are multiplied by zero, which only finite values survive.
        """
        needed, available = num_blocks * self.block_bytes, available_bytes(self.device)
        if needed > available:
            raise UserError(
                f"the KV cache needs {needed / _GIB:.2f} GiB and {available / _GIB:.2f} GiB are "
                f"available on {self.device}; lower engine.kv_cache_gib or "
                "engine.gpu_memory_utilization, or free memory first"
            )
        shape = (2, num_blocks, self.block_size, self.num_kv_heads, self.head_dim)
        self.layers = [self._zeros(shape) for _ in range(self.num_layers)]

    def free(self) -> None:
        """Give the tensors back to the process."""
        self.layers = []

    def _zeros(self, shape: tuple[int, ...]) -> Tensor:
        if self.device.type != "cpu":
            return torch.zeros(shape, dtype=self.dtype, device=self.device)
        # numpy leaves the zeroing to the operating system, page by page at the first touch.
        num_bytes = math.prod(shape) * self.dtype.itemsize
        return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(self.dtype).view(shape)


def available_bytes(device: torch.device) -> int:
    """Memory that this process can still take, what its allocator has cached included."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    free, _ = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return free + cached


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that `num_tokens` tokens of one sequence take."""
    return -(-num_tokens // block_size)


def choose_num_blocks(
    cache: KVCache, cfg: EngineConfig, *, max_model_len: int, reserved_bytes: int
) -> int:
    """Blocks in the cache, by `EngineConfig.kv_cache_gib` or `gpu_memory_utilization`.

    `reserved_bytes` of the CUDA share are needed for activations and weights. Sized automatically,
    the cache never exceeds what `max_num_seqs` sequences of full length use. Raises ValueError for
    a cache that cannot hold one such sequence.
    """
    per_sequence = blocks_for(max_model_len, cache.block_size)
    if cfg.kv_cache_gib is not None:
        source = f"engine.kv_cache_gib={cfg.kv_cache_gib}"
        num_blocks = int(cfg.kv_cache_gib * _GIB) // cache.block_bytes
    else:
        if cache.device.type == "cuda":
            total = torch.cuda.get_device_properties(cache.device).total_memory
            source = (
                f"engine.gpu_memory_utilization={cfg.gpu_memory_utilization} of "
                f"{total / _GIB:.1f} GiB, less {reserved_bytes / _GIB:.2f} GiB for one step,"
            )
            share = int(total * cfg.gpu_memory_utilization) - reserved_bytes
        else:
            source, share = "the default of 1 GiB (engine.kv_cache_gib)", _CPU_DEFAULT_BYTES
        num_blocks = min(max(share, 0) // cache.block_bytes, cfg.max_num_seqs * per_sequence)
    if num_blocks < per_sequence:
        raise ValueError(
            f"the KV cache is too small: {source} holds {num_blocks * cache.block_size} tokens, "
            f"and one sequence of max_model_len={max_model_len} needs {per_sequence} blocks of "
            f"{cache.block_size} ({per_sequence * cache.block_bytes / _GIB:.3f} GiB); "
            "enlarge the cache or lower engine.max_model_len"
        )
    return num_blocks
