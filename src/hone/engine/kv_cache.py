"""The KV cache, with the states of recurrent layers: its size, allocation, sleep and wake."""

from __future__ import annotations

import logging
import math
from bisect import bisect_right
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import psutil
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from hone.attention.context import FP8_DTYPE
from hone.engine.settings import CPU_CACHE_GIB, EngineConfig
from hone.errors import UserError
from hone.families.registry import spec_of
from hone.hardware import GIB
from hone.models.support import head_dim_of

if TYPE_CHECKING:
    from hone.engine.arena import Arena

__all__ = [
    "KVCache",
    "available_bytes",
    "blocks_for",
    "cache_dtype",
    "check_max_num_seqs",
    "choose_num_blocks",
    "most_blocks",
]

logger = logging.getLogger(__name__)

_MARGIN_BYTES = GIB // 2
"""Margin of device memory for everything that the profiling run does not measure: CUDA graphs,
kernels that are loaded later, fragmentation of torch's allocator."""
_ALIGNMENT = 512
"""Every tensor begins at a multiple of this many bytes, as torch's own tensors do."""


class KVCache:
    """One tensor a layer, [2, num_blocks, block_size, num_kv_heads, head_dim]: keys, then values.

    `layers` is empty until `allocate`, while the cache sleeps and after `free`. On CUDA all layers
    lie in one arena: the tensors keep their addresses across `sleep` and `wake`, and with them
    CUDA graphs stay valid. torch's allocator does not know this memory, so
    `torch.cuda.memory_allocated`, its peaks and everything made of them leave the cache out;
    `torch.cuda.mem_get_info` counts it while it is awake.

    `dtype` float8_e4m3fn halves the bytes of a token; `scales`, float32 [L, 2, num_kv_heads] with a
    row for every layer of the model, then holds what stored keys and values are multiplied with,
    ones at first, and is None with any other dtype. It outlives `sleep`.

    With `records_routes` (`hone.models.routes`) the experts that each token passes lie in `routes`,
    [slots + 1, L, K], at the token's slot: blocks that sequences share bring theirs along. The last
    row takes those of padding.

    Recurrent layers have an empty tensor in `layers`, and `num_state_rows` rows of states in
    `states`, as `PagedContext` describes them. The inputs of convolutions among these are kept as
    the model computes them, in `model_dtype`; None: in `dtype`.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        block_size: int,
        dtype: torch.dtype,
        device: torch.device,
        records_routes: bool = False,
        num_state_rows: int = 0,
        model_dtype: torch.dtype | None = None,
    ) -> None:
        num_heads = config.num_attention_heads
        self._total_layers: int = config.num_hidden_layers
        self._recurrent = spec_of(config.model_type).recurrent_layers(config.to_dict())
        recurrent = () if self._recurrent is None else self._recurrent.indices
        self._with_keys = [i for i in range(self._total_layers) if i not in recurrent]
        self._num_state_rows = num_state_rows
        self.num_layers = len(self._with_keys)
        """Layers with keys and values."""
        self.block_size = block_size
        self.num_kv_heads: int = getattr(config, "num_key_value_heads", None) or num_heads
        self.head_dim = head_dim_of(config)
        self.dtype = dtype
        self._model_dtype = model_dtype or dtype
        self.device = device
        self.layers: list[Tensor] = []
        self.states: list[tuple[Tensor, Tensor] | None] = []
        self.scales: Tensor | None = None
        if dtype == FP8_DTYPE:
            self.scales = torch.ones(self._total_layers, 2, self.num_kv_heads, device=device)
        self.routes: Tensor | None = None
        self._route_size, self._route_dtype = (0, 0), torch.uint8
        if records_routes:
            from hone.families.shape import ModelShape
            from hone.models.routes import route_dtype, route_size

            shape = ModelShape.from_config(config.to_dict())
            self._route_size = route_size(shape)
            self._route_dtype = route_dtype(shape.num_experts)
        self.is_asleep = False
        self._num_blocks = 0
        self._arena: Arena | None = None
        self._arena_tensors: list[Tensor] = []

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers."""
        per_layer = 2 * self.block_size * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        per_token = math.prod(self._route_size) * self._route_dtype.itemsize
        return self.num_layers * per_layer + self.block_size * per_token

    def routes_of(self, slots: Tensor) -> Tensor:
        """The experts [T, L, K] of the tokens that lie at `slots` [T], on the host. Waits for the
        device."""
        assert self.routes is not None
        return self.routes[slots].cpu()

    def allocate(self, num_blocks: int) -> None:
        """Make the tensors, filled with zeros.

        Attention in plain torch multiplies masked keys and values by zero, which only finite values
        survive. Raises UserError with both sizes where memory is lacking.
        """
        assert not self.layers
        assert not self.is_asleep
        self._num_blocks = num_blocks
        self._require_memory()
        if self.device.type == "cpu":
            self._use([_host_zeros(*each) for each in self._tensors()])
            return
        from hone.engine.arena import Arena

        try:
            arena = Arena(self.num_bytes, self.device)
        except torch.OutOfMemoryError as error:
            raise self._lack_of_memory() from error
        self._arena = arena
        offset = 0
        for shape, dtype in self._tensors():
            self._arena_tensors.append(arena.tensor(shape, dtype, offset=offset))
            offset += _aligned_bytes(shape, dtype)
        self._use(self._arena_tensors)

    def free(self) -> None:
        """Free tensors and addresses, in any state; the cache can be allocated again.

        CUDA graphs and other references to them must not be used again.
        """
        self._use([])
        self._arena_tensors, self.is_asleep = [], False
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def sleep(self) -> None:
        """Free the memory, on CUDA to the driver; the contents are lost.

        Waits for the device.
        """
        assert self.layers
        self._use([])
        self.is_asleep = True
        if self._arena is not None:
            self._arena.unmap()

    def wake(self) -> None:
        """Allocate the memory again, filled with zeros; on CUDA `layers` are the same tensors as
        before.

        Where the driver has too little, torch first returns the cached blocks that it does not
        use. Raises UserError with both sizes where that is not enough: the cache then still sleeps,
        holds no memory, and `wake` can be called again.
        """
        assert self.is_asleep
        self._require_memory()
        if self._arena is None:
            self._use([_host_zeros(*each) for each in self._tensors()])
        else:
            try:
                self._arena.map()
            except torch.OutOfMemoryError as error:
                raise self._lack_of_memory() from error
            self._use(self._arena_tensors)
        self.is_asleep = False

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors, awake or asleep."""
        return sum(_aligned_bytes(*each) for each in self._tensors())

    @property
    def state_row_bytes(self) -> int:
        """Bytes of the states of one sequence in all recurrent layers."""
        if self._recurrent is None:
            return 0
        return self._recurrent.state_bytes(self._model_dtype.itemsize)

    @property
    def state_bytes(self) -> int:
        """Bytes of all rows of states."""
        return self._num_state_rows * self.state_row_bytes

    @property
    def _shape(self) -> tuple[int, ...]:
        return (2, self._num_blocks, self.block_size, self.num_kv_heads, self.head_dim)

    @property
    def _has_routes(self) -> bool:
        return math.prod(self._route_size) > 0

    def _tensors(self) -> list[tuple[tuple[int, ...], torch.dtype]]:
        """Shapes and dtypes of all tensors: keys and values by layer, states by layer, routes."""
        found = [(self._shape, self.dtype)] * self.num_layers
        if (layers := self._recurrent) is not None:
            rows = self._num_state_rows
            heads = (layers.num_value_heads, layers.key_dim, layers.value_dim)
            tails = ((rows, layers.kernel_size - 1, layers.num_channels), self._model_dtype)
            found += [tails, ((rows, *heads), torch.float32)] * len(layers.indices)
        if self._has_routes:
            slots = self._num_blocks * self.block_size
            found.append(((slots + 1, *self._route_size), self._route_dtype))
        return found

    def _use(self, tensors: list[Tensor]) -> None:
        """Take `tensors`, in the order of `_tensors`, into use; none: have none."""
        self.layers, self.states, self.routes = [], [], None
        if not tensors:
            return
        given = iter(tensors)
        keys = {layer: next(given) for layer in self._with_keys}
        empty = tensors[0][:, :0]
        self.layers = [keys.get(layer, empty) for layer in range(self._total_layers)]
        if self._recurrent is not None:
            states = {layer: (next(given), next(given)) for layer in self._recurrent.indices}
            self.states = [states.get(layer) for layer in range(self._total_layers)]
        self.routes = next(given, None)

    def _require_memory(self) -> None:
        needed = self.num_bytes
        if needed > available_bytes(self.device) and self.device.type == "cuda":
            torch.cuda.empty_cache()
        if needed > available_bytes(self.device):
            raise self._lack_of_memory()

    def _lack_of_memory(self) -> UserError:
        needed, available = self.num_bytes, available_bytes(self.device)
        holder = ""
        if self.device.type == "cuda":
            allocated = torch.cuda.memory_allocated(self.device)
            holder = f", where torch's tensors of this process hold {allocated / GIB:.2f} GiB"
        return UserError(
            f"the KV cache needs {needed / GIB:.2f} GiB and {available / GIB:.2f} GiB are "
            f"available on {self.device}{holder}; lower engine.kv_cache_gib or "
            "engine.gpu_memory_utilization, or free memory first"
        )


def _aligned_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes from one tensor to the next in the arena."""
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT) * _ALIGNMENT


def _host_zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    # numpy leaves the zeroing to the operating system, page by page at the first touch.
    num_bytes = math.prod(shape) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, np.uint8)).view(dtype).view(shape)


def cache_dtype(cfg: EngineConfig, dtype: torch.dtype) -> torch.dtype:
    """The format of keys and values, of a model that computes in `dtype`."""
    return FP8_DTYPE if cfg.kv_cache_dtype == "fp8" else dtype


def available_bytes(device: torch.device) -> int:
    """Bytes that can be allocated now; on CUDA the driver's number, without torch's cached
    blocks."""
    if device.type != "cuda":
        return int(psutil.virtual_memory().available)
    return torch.cuda.mem_get_info(device)[0]


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that `num_tokens` tokens of one sequence take."""
    return -(-num_tokens // block_size)


def check_max_num_seqs(
    cache: KVCache,
    cfg: EngineConfig,
    *,
    max_model_len: int,
    bytes_of: Callable[[int], int],
    resident_bytes: int = 0,
) -> None:
    """Raise ValueError where `max_num_seqs` sequences can never fit together with the smallest
    cache.

    `bytes_of` so many running sequences go to what they need besides keys and values: states and
    rows of logits. The smallest cache holds one sequence of `max_model_len` tokens. To be called
    before any of this is taken; `resident_bytes` as in `choose_num_blocks`.
    """
    smallest = blocks_for(max_model_len, cache.block_size) * cache.block_bytes
    if cache.device.type == "cuda":
        total, free = _cuda_memory(cache.device)
        limits = [(free, f"{free / GIB:.2f} GiB free on {cache.device}")]
        if cfg.kv_cache_gib is None:
            limits.append(_share(total, cfg, resident_bytes))
    else:
        free = available_bytes(cache.device)
        limits = [(free, f"{free / GIB:.2f} GiB available on {cache.device}")]
    budget, source = min(limits)
    if bytes_of(cfg.max_num_seqs) <= budget - smallest:
        return
    numbers = range(1, cfg.max_num_seqs)
    most = bisect_right(numbers, budget - smallest, key=bytes_of)
    remedy = f"at most {most} would; lower engine.max_num_seqs"
    if most < 1:
        remedy = "not even one does; free memory or shorten sequences"
    raise ValueError(
        f"engine.max_num_seqs={cfg.max_num_seqs} sequences do not fit: besides keys and values "
        f"each takes {bytes_of(cfg.max_num_seqs) / cfg.max_num_seqs / 2**20:.2f} MiB, "
        f"{bytes_of(cfg.max_num_seqs) / GIB:.2f} GiB in all, and the smallest KV cache "
        f"for max_model_len={max_model_len} {smallest / GIB:.3f} GiB, of {source}; {remedy}"
    )


def choose_num_blocks(
    cache: KVCache,
    cfg: EngineConfig,
    *,
    max_model_len: int,
    reserved_bytes: int,
    resident_bytes: int = 0,
) -> int:
    """Blocks in the cache: `most_blocks`, but no more than `max_num_seqs` sequences of
    `max_model_len` tokens use.

    Call it after a profiling run, when all permanent memory of the engine is allocated. Logs the
    choice and its reason. That fewer sequences of full length fit than may run is normal: the
    scheduler preempts.
    """
    per_sequence = blocks_for(max_model_len, cache.block_size)
    num_blocks, source = most_blocks(
        cache,
        cfg,
        max_model_len=max_model_len,
        reserved_bytes=reserved_bytes,
        resident_bytes=resident_bytes,
    )
    is_filled = cfg.kv_cache_gib is not None and cache.block_bytes
    if not is_filled and num_blocks > cfg.max_num_seqs * per_sequence:
        num_blocks = cfg.max_num_seqs * per_sequence
        source = f"all that engine.max_num_seqs={cfg.max_num_seqs} sequences can use"
    logger.info(
        "KV cache: %d blocks, %d tokens, %.2f GiB: %s; %d sequences of max_model_len=%d fit at "
        "once, %d may run",
        num_blocks,
        num_blocks * cache.block_size,
        num_blocks * cache.block_bytes / GIB,
        source,
        num_blocks // per_sequence,
        max_model_len,
        cfg.max_num_seqs,
    )
    return num_blocks


def most_blocks(
    cache: KVCache,
    cfg: EngineConfig,
    *,
    max_model_len: int,
    reserved_bytes: int,
    resident_bytes: int,
) -> tuple[int, str]:
    """Number of blocks that `kv_cache_gib` or memory allows, and the reason as text. On CUDA it is
    the smaller

    * of its share: `gpu_memory_utilization` of the total memory, less the `resident_bytes` that the
      engine holds (weights it owns, loaded already or not, state of its sequences) and the
      `reserved_bytes` that one step takes (activations),
    * and of what is really free once torch has returned its unused blocks, whoever holds the rest,
      less `reserved_bytes`, the states of recurrent layers, and a margin of 512 MiB for graphs and
      kernels that are loaded later.

    Raises ValueError with all numbers where that does not hold one sequence of `max_model_len`.
    """
    per_sequence = blocks_for(max_model_len, cache.block_size)
    if cfg.kv_cache_gib is not None:
        limits = [(int(cfg.kv_cache_gib * GIB), f"engine.kv_cache_gib={cfg.kv_cache_gib}")]
    elif cache.device.type == "cuda":
        total, free = _cuda_memory(cache.device)
        share, words = _share(total, cfg, resident_bytes)
        step = f"less {reserved_bytes / GIB:.2f} GiB for one step"
        margin = f"a margin of {_MARGIN_BYTES / GIB:.2f} GiB"
        held = cache.state_bytes
        states = f", {held / GIB:.2f} GiB for states of recurrent layers" if held else ""
        limits = [
            (share - reserved_bytes, f"{words}, {step}"),
            (
                free - reserved_bytes - cache.state_bytes - _MARGIN_BYTES,
                f"{free / GIB:.2f} GiB free on {cache.device}, {step}{states} and {margin}",
            ),
        ]
    else:
        limits = [(CPU_CACHE_GIB * GIB, "the default of 1 GiB (engine.kv_cache_gib)")]
    (size, source), *others = sorted(limits)
    # Blocks of a model without attention take no bytes.
    num_blocks = max(size, 0) // max(cache.block_bytes, 1)
    if num_blocks < per_sequence:
        raise ValueError(
            f"the KV cache is too small: {source} holds {num_blocks * cache.block_size} tokens, "
            f"and one sequence of max_model_len={max_model_len} needs {per_sequence} blocks of "
            f"{cache.block_size} ({per_sequence * cache.block_bytes / GIB:.3f} GiB); "
            + "".join(f"{other} would be {left / GIB:.3f} GiB; " for left, other in others)
            + "enlarge the cache or shorten sequences"
        )
    return num_blocks, source


def _share(total: int, cfg: EngineConfig, resident_bytes: int) -> tuple[int, str]:
    """The engine's share of a GPU's memory, less what it holds: bytes, and the same in words."""
    return int(total * cfg.gpu_memory_utilization) - resident_bytes, (
        f"engine.gpu_memory_utilization={cfg.gpu_memory_utilization} of {total / GIB:.1f} GiB, "
        f"less {resident_bytes / GIB:.2f} GiB that the engine holds"
    )


def _cuda_memory(device: torch.device) -> tuple[int, int]:
    """Total bytes, and those free once torch has returned the cached blocks it does not use."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return total, free
