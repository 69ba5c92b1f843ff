"""A CUDA driver of host memory: addresses are real, physical memory is counted, calls can fail."""

import ctypes

import torch

PAGE = 4096


class FakeDriver:
    def __init__(self, capacity=2**20):
        self.capacity = capacity
        self.calls = []
        self.fail_at = None  # (name, how often it still succeeds, exception)
        self.buffers = {}  # reserved address -> its bytes
        self.handles = {}  # open handle -> size
        self.mapped = {}  # mapped address -> (size, handle)
        self.readable = set()

    @property
    def held(self):
        """Bytes of physical memory that a handle or a mapping keeps."""
        alive = dict(self.handles) | {handle: size for size, handle in self.mapped.values()}
        return sum(alive.values())

    def free_bytes(self):
        return self.capacity - self.held

    def _enter(self, *call):
        self.calls.append(call)
        if self.fail_at is not None and self.fail_at[0] == call[0]:
            name, successes, error = self.fail_at
            self.fail_at = (name, successes - 1, error)
            if successes == 0:
                raise error

    def names(self):
        return [name for name, *_ in self.calls]

    def granularity(self):
        return PAGE

    def reserve(self, num_bytes):
        self._enter("reserve", num_bytes)
        buffer = (ctypes.c_uint8 * num_bytes)()
        self.buffers[ctypes.addressof(buffer)] = buffer
        return ctypes.addressof(buffer)

    def free_address(self, address, num_bytes):
        self._enter("free_address", address, num_bytes)
        assert len(self.buffers.pop(address)) == num_bytes
        assert not self.mapped

    def create(self, num_bytes):
        self._enter("create", num_bytes)
        assert num_bytes % PAGE == 0
        if num_bytes > self.free_bytes():
            raise torch.OutOfMemoryError("cuMemCreate is out of memory")
        handle = object()
        self.handles[handle] = num_bytes
        return handle

    def release(self, handle):
        self._enter("release")
        del self.handles[handle]

    def map(self, address, num_bytes, handle):
        self._enter("map", address, num_bytes)
        assert self.handles[handle] == num_bytes
        assert address not in self.mapped
        ends = [start + len(buffer) for start, buffer in self.buffers.items() if start <= address]
        assert address + num_bytes <= max(ends)
        self.mapped[address] = (num_bytes, handle)
        ctypes.memset(address, 0xFF, num_bytes)  # fresh memory may hold anything, NaN as well

    def unmap(self, address, num_bytes):
        self._enter("unmap", address, num_bytes)
        whole = [a for a in self.mapped if address <= a < address + num_bytes]
        assert sum(self.mapped.pop(a)[0] for a in whole) == num_bytes
        self.readable.discard(address)

    def allow_access(self, address, num_bytes):
        self._enter("allow_access", address, num_bytes)
        self.readable.add(address)

    def zero(self, address, num_bytes):
        self._enter("zero", address, num_bytes)
        assert address in self.readable
        ctypes.memset(address, 0, num_bytes)

    def view(self, address, num_bytes, *, keep_alive=None):
        buffer = (ctypes.c_uint8 * num_bytes).from_address(address)
        buffer.keep_alive = keep_alive
        return torch.frombuffer(buffer, dtype=torch.uint8)

    def synchronize(self):
        self._enter("synchronize")
