"""Which kernels Triton would compile for a Hopper GPU, on a machine without one. Launches do
nothing, so that results are what lies in memory. For a process of its own, since nothing is put
back."""

from __future__ import annotations

from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import JITFunction

__all__ = ["compiled_since", "forget", "pretend"]

_compiled: list[str] = []
_caches: list[dict[Any, Any]] = []


class _Driver:
    """A driver of one Hopper GPU."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return device

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class _Compiled:
    """A kernel that does nothing, launched by Triton or as `hone.attention.kernel_launch` does."""

    function = packed_metadata = None

    def launch_metadata(self, *_: Any) -> None:
        return None

    def run(self, *_: Any) -> None:
        return None

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *_: None


def _compile(self: Any, key: Any, signature: Any, device: int, *_: Any) -> _Compiled:
    kernels = self.device_caches[device][0]
    _caches.append(kernels)
    _compiled.append(self.fn.__name__)
    kernels[key] = _Compiled()
    return kernels[key]


def pretend() -> None:
    """From now on there is a Hopper GPU. Packages that look for one when they are imported have to
    be imported before."""
    driver.set_active(_Driver())  # pyright: ignore[reportArgumentType]
    JITFunction._do_compile = _compile  # pyright: ignore[reportAttributeAccessIssue]


def compiled_since() -> list[str]:
    """Names of the kernels compiled since the last call, one for each time."""
    found = _compiled[:]
    _compiled.clear()
    return found


def forget() -> None:
    """As if no kernel had been compiled."""
    for kernels in _caches:
        kernels.clear()
    _caches.clear()
    _compiled.clear()
