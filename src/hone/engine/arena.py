"""Device memory at a fixed address that can be given back to the driver and taken again.

CUDA's virtual memory calls separate an address range from the memory that is mapped to it
(https://docs.nvidia.com/cuda/cuda-programming-guide/04-special-topics/virtual-memory-management.html).
A range that is unmapped and mapped again keeps its address, so tensors over it and CUDA graphs that
were recorded with them stay valid.
"""

from __future__ import annotations

import math
import mmap
import weakref
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hone.extras import import_extra
from hone.hardware import GIB

__all__ = ["Arena", "CudaDriver", "HostArena"]

_CHUNK_BYTES = GIB
"""Bytes of one allocation from the driver; large, since each one takes several driver calls."""


class Arena:
    """`num_bytes` of device memory, rounded up to the driver's granularity; made mapped.

    The memory does not come from torch's allocator: `torch.cuda.memory_allocated` and
    `memory_reserved` never count it, `torch.cuda.mem_get_info` does while it is mapped. Tensors
    made by `tensor` keep the arena alive and must not be touched while it is unmapped; a kernel
    that does poisons the CUDA context. When an arena is garbage-collected, its memory and address
    are freed.

    `map` and the constructor raise torch.OutOfMemoryError with both sizes where memory is lacking,
    and RuntimeError naming the call for other failures of the driver; then no memory stays
    allocated.
    """

    def __init__(
        self, num_bytes: int, device: torch.device, *, driver: CudaDriver | None = None
    ) -> None:
        self._driver = driver or CudaDriver(device)
        granularity = self._driver.granularity()
        self.num_bytes = _round_up(num_bytes, granularity)
        self._chunk_bytes = _round_up(_CHUNK_BYTES, granularity)
        self.address = self._driver.reserve(self.num_bytes)
        # Finalizers of one object run from the newest to the oldest: the mapping goes first.
        self._reservation = weakref.finalize(
            self, self._driver.free_address, self.address, self.num_bytes
        )
        self._mapping: weakref.finalize[..., Arena] | None = None
        # When the process ends, the driver frees everything, and may be unloaded before this
        # object.
        self._reservation.atexit = False
        try:
            self.map()
        except BaseException:
            self._reservation()
            raise

    @property
    def is_mapped(self) -> bool:
        """Whether memory is mapped to the address range."""
        return self._mapping is not None and self._mapping.alive

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, *, offset: int = 0) -> Tensor:
        """A contiguous tensor over the arena's own bytes from `offset` on; nothing is copied."""
        num_bytes = math.prod(shape) * dtype.itemsize
        assert self.is_mapped
        assert offset % dtype.itemsize == 0
        assert 0 <= offset <= self.num_bytes - num_bytes
        view = self._driver.view(self.address + offset, num_bytes, keep_alive=self)
        return view.view(dtype).view(shape)

    def map(self) -> None:
        """Allocate and map memory again, filled with zeros, and wait until that is done."""
        assert self._reservation.alive
        assert not self.is_mapped
        driver = self._driver
        try:
            with ExitStack() as rollback:
                for start in range(0, self.num_bytes, self._chunk_bytes):
                    size = min(self._chunk_bytes, self.num_bytes - start)
                    handle = driver.create(size)
                    try:
                        driver.map(self.address + start, size, handle)
                        rollback.callback(driver.unmap, self.address + start, size)
                    finally:
                        # From here on only the mapping keeps the memory alive.
                        driver.release(handle)
                driver.allow_access(self.address, self.num_bytes)
                driver.zero(self.address, self.num_bytes)
                rollback.pop_all()
        except torch.OutOfMemoryError as error:
            raise torch.OutOfMemoryError(
                f"{self.num_bytes / GIB:.2f} GiB of device memory were asked for and "
                f"{driver.free_bytes() / GIB:.2f} GiB are free"
            ) from error
        self._mapping = weakref.finalize(
            self, _unmap_when_idle, driver, self.address, self.num_bytes
        )
        self._mapping.atexit = False

    def unmap(self) -> None:
        """Wait for the device, then return all memory to the driver; the address range stays
        reserved."""
        assert self._mapping is not None
        self._mapping()

    def close(self) -> None:
        """Free memory and address range; no tensor over it may be used again. May be called
        twice."""
        if self._mapping is not None:
            self._mapping()
        self._reservation()


class HostArena:
    """The counterpart of `Arena` in host memory: pages that can be freed, at an address that stays.

    While it is unmapped, its tensors may be read, but their values are undefined.
    """

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype, *, offset: int = 0) -> Tensor:
        """As `Arena.tensor`."""
        count = math.prod(shape)
        return torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset).view(shape)

    def map(self) -> None:
        """Do nothing, since the system allocates a page at its first use."""

    def unmap(self) -> None:
        """Free all pages."""
        self._memory.madvise(mmap.MADV_DONTNEED)


class CudaDriver:
    """CUDA's virtual memory calls for one device, with failures as exceptions.

    Raises torch.OutOfMemoryError where memory is lacking, RuntimeError with the driver's own words
    otherwise, and UserError without the `cuda-bindings` package, which torch's CUDA wheels require.
    """

    def __init__(self, device: torch.device) -> None:
        driver, needed_by = "cuda.bindings.driver", "the KV cache on a GPU"
        self._cuda: Any = import_extra("cuda.bindings", needed_by=needed_by, module=driver)
        self._device = torch.empty(0, device=device).device  # "cuda" becomes "cuda:0"
        self.synchronize()  # makes the device's context, which the driver's calls need
        cuda = self._cuda
        self._properties = cuda.CUmemAllocationProp()
        self._properties.type = cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._access = cuda.CUmemAccessDesc()
        self._access.flags = cuda.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        for location in (self._properties.location, self._access.location):
            location.type = cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
            location.id = self._device.index

    def granularity(self) -> int:
        """Unit of sizes and addresses, in bytes."""
        flag = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_RECOMMENDED
        return int(self._call("cuMemGetAllocationGranularity", self._properties, flag))

    def reserve(self, num_bytes: int) -> int:
        """Reserve an address range without memory; returns its start."""
        return int(self._call("cuMemAddressReserve", num_bytes, 0, 0, 0))

    def free_address(self, address: int, num_bytes: int) -> None:
        self._call("cuMemAddressFree", address, num_bytes)

    def create(self, num_bytes: int) -> Any:
        """Allocate memory, which lives as long as the returned handle or a mapping of it."""
        return self._call("cuMemCreate", num_bytes, self._properties, 0)

    def release(self, handle: Any) -> None:
        self._call("cuMemRelease", handle)

    def map(self, address: int, num_bytes: int, handle: Any) -> None:
        """Map memory to an address; it must not be used before `allow_access`."""
        self._call("cuMemMap", address, num_bytes, 0, handle, 0)

    def unmap(self, address: int, num_bytes: int) -> None:
        """Unmap a range that consists of whole mappings. Does not wait for kernels."""
        self._call("cuMemUnmap", address, num_bytes)

    def allow_access(self, address: int, num_bytes: int) -> None:
        """Let the device read and write a mapped range."""
        self._call("cuMemSetAccess", address, num_bytes, [self._access], 1)

    def zero(self, address: int, num_bytes: int) -> None:
        """Fill a range with zeros and wait, so that every stream sees them."""
        self.view(address, num_bytes).view(torch.int64).zero_()
        self.synchronize()

    def view(self, address: int, num_bytes: int, *, keep_alive: object = None) -> Tensor:
        """The bytes at an address as a tensor, uint8 [num_bytes], which keeps a reference to
        `keep_alive`."""
        span = _Span(address, num_bytes, keep_alive)
        with torch.cuda.device(self._device):
            tensor = torch.as_tensor(span, device=self._device)
        assert tensor.data_ptr() == address, "torch copied the arena's bytes"
        return tensor

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def free_bytes(self) -> int:
        """Bytes that are free for this and all other processes."""
        return torch.cuda.mem_get_info(self._device)[0]

    def _call(self, name: str, *arguments: object) -> Any:
        """Call the driver and return its one result, None if it has none."""
        status, *results = getattr(self._cuda, name)(*arguments)
        if status == self._cuda.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
            raise torch.OutOfMemoryError(f"{name} is out of memory on {self._device}")
        if status != self._cuda.CUresult.CUDA_SUCCESS:
            raise RuntimeError(f"{name} failed on {self._device}: {status.name}")
        return results[0] if results else None


@dataclass(frozen=True, slots=True)
class _Span:
    """Bytes that torch can wrap by the CUDA array interface, version 3.

    https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html
    """

    address: int
    num_bytes: int
    keep_alive: object

    @property
    def __cuda_array_interface__(self) -> dict[str, object]:
        return {
            "shape": (self.num_bytes,),
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
            "version": 3,
        }


def _unmap_when_idle(driver: CudaDriver, address: int, num_bytes: int) -> None:
    driver.synchronize()
    driver.unmap(address, num_bytes)


def _round_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple
