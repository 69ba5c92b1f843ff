"""Decoder layers whose weights lie in host memory, and visit the device to compute."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hone.trainer.offload import HostBuffer, Lane, mark_of, wait_for, whole_storage

__all__ = ["VisitingLayers"]


class VisitingLayers:
    """Decoder layers whose weights lie in pinned host memory, and on the device while they compute.

    A layer's weights come before its forward and its backward, those of the layer that computes
    next behind them, and others go: no more than three layers are there at a time. Storages are
    freed and filled in place, so that whoever holds a parameter keeps it, autograd too.

    What is on the device is never changed. Who changes a home calls `send_home` first.
    """

    def __init__(self, layers: Iterable[nn.Module], device: torch.device) -> None:
        """Takes all parameters and buffers of `layers`, wherever they lie, to the host, and watches
        the layers' forward and backward on `device`. Call after `apply_recompute`; what a layer
        computes may be compiled, but not the layer, whose hooks run outside. Raises UserError where
        the host has too little memory."""
        self._layers = [_Visitor(layer, device) for layer in layers]
        self.homes = {t: home for visitor in self._layers for t, home in visitor.homes.items()}
        """Where values of the layers' parameters and buffers are kept, in host memory."""
        self._device = device
        self._lane = Lane(device)
        self._here: dict[int, torch.Event | None] = {}
        """Layers on the device, and when their weights will have arrived."""
        for index, visitor in enumerate(self._layers):
            layer: Any = visitor.layer
            if getattr(layer, "gradient_checkpointing", False):
                # Around the checkpoint: hooks of the module would run again with the recomputation,
                # among the operations that a selective policy counts.
                run = layer._gradient_checkpointing_func
                layer._gradient_checkpointing_func = partial(self._run, index, run)
            else:
                layer.register_forward_pre_hook(partial(self._before_forward, index))
                layer.register_forward_hook(partial(self._after_forward, index))

    def send_home(self) -> None:
        """Free all layers' device memory. They come again, as their homes are then."""
        for index in list(self._here):
            self._leave(index)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # homes are not read from here on

    def _run(
        self, index: int, run: Callable[..., Any], call: Callable[..., Any], *args: Any
    ) -> Any:
        self._before_forward(index)
        output = run(call, *args)
        self._after_forward(index, None, None, output)
        return output

    def _before_forward(self, index: int, *_: Any) -> None:
        following = index + 1
        if following == len(self._layers):
            # Backward begins here; without it the next pass begins with the first layer.
            following = index if torch.is_grad_enabled() else 0
        self._visit(index, following)

    def _after_forward(self, index: int, _layer: Any, _inputs: Any, output: Any) -> None:
        for tensor in output if isinstance(output, tuple) else (output,):
            if isinstance(tensor, Tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self._before_backward, index))

    def _before_backward(self, index: int, _grad: Tensor) -> None:
        self._visit(index, max(index - 1, 0))

    def _visit(self, index: int, following: int) -> None:
        """Let work wait for one layer's weights, and begin to bring those of another."""
        for other in [i for i in self._here if i not in (index, following)]:
            self._leave(other)
        self._come(index)
        wait_for(self._here[index])
        self._come(following)

    @torch.no_grad()
    def _come(self, index: int) -> None:
        if index in self._here:
            return
        storages = self._layers[index].storages
        for storage, host in storages:
            storage.resize_(host.nbytes)
        # The memory may still be read by earlier work of the current stream.
        with self._lane.after(mark_of(self._device)):
            for storage, host in storages:
                whole_storage(storage).copy_(host, non_blocking=True)
            self._here[index] = self._lane.mark()

    def _leave(self, index: int) -> None:
        wait_for(self._here.pop(index))  # later work may be given the same memory
        for storage, _ in self._layers[index].storages:
            storage.resize_(0)


class _Visitor:
    """A layer with empty storages on the device, and what they are filled from."""

    def __init__(self, layer: nn.Module, device: torch.device) -> None:
        self.layer = layer
        tensors = [*dict.fromkeys((*layer.parameters(), *layer.buffers()))]
        layout = [(tensor.shape, tensor.dtype) for tensor in tensors]
        self._buffer = HostBuffer.for_layout(
            layout, device, purpose="trainer.offload_parameters keeps weights of layers on the host"
        )
        self.homes = dict(zip(tensors, self._buffer.tensors(layout), strict=True))
        self.storages: list[tuple[torch.UntypedStorage, Tensor]] = []
        for tensor, home in self.homes.items():
            home.copy_(tensor.detach())
            # Each a storage of its own, on the device.
            tensor.data = torch.empty_like(home, device=device)
            storage = tensor.untyped_storage()
            self.storages.append((storage, home.view(-1).view(torch.uint8)))
            storage.resize_(0)
