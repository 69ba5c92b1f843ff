"""Engine weights whose memory is freed while the engine sleeps and whose addresses stay the
same."""

from __future__ import annotations

import torch
from torch import Tensor, UntypedStorage
from transformers import PreTrainedModel

from hone.engine.arena import Arena, HostArena
from hone.errors import UserError
from hone.hardware import GIB
from hone.models.fused_layers import is_fusible, merge_projections

__all__ = ["SleepingWeights"]

_ALIGNMENT = 512
"""Every storage begins at a multiple of this many bytes, as torch's own do."""


class SleepingWeights:
    """The parameters of a model, moved into an arena whose memory can be freed.

    Their values and ties stay. Parameters that fused layers merge are merged before, so that a
    `generation_model` made afterwards, and its CUDA graphs, use them at these addresses. After
    `wake` the values are undefined until a sync delivers all of them.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        if is_fusible(model):
            merge_projections(model)
        parameters: dict[int, list[Tensor]] = {}
        storages: dict[int, UntypedStorage] = {}
        offsets: dict[int, int] = {}
        self.num_bytes = 0
        for parameter in model.parameters():
            storage = parameter.untyped_storage()
            address = storage.data_ptr()
            parameters.setdefault(address, []).append(parameter)
            if address not in storages:
                storages[address], offsets[address] = storage, self.num_bytes
                self.num_bytes += -(-storage.nbytes() // _ALIGNMENT) * _ALIGNMENT
        self._device = model.device
        self._arena: Arena | HostArena
        if self._device.type == "cuda":
            self._arena = Arena(self.num_bytes, self._device)
        else:
            self._arena = HostArena(self.num_bytes)
        for address, offset in offsets.items():
            storage = storages.pop(address)
            region = self._arena.tensor((storage.nbytes(),), torch.uint8, offset=offset)
            region.copy_(torch.empty(0, dtype=torch.uint8, device=self._device).set_(storage))
            for parameter in parameters.pop(address):
                parameter.data = region.view(parameter.dtype).as_strided(
                    parameter.shape, parameter.stride(), parameter.storage_offset()
                )

    def sleep(self) -> None:
        """Free the memory. Waits for the device."""
        self._arena.unmap()

    def wake(self) -> None:
        """Allocate the memory again, if necessary after torch has returned its unused cached
        blocks. Raises UserError with both sizes where memory is lacking; `wake` can then be called
        again."""
        try:
            self._arena.map()
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            try:
                self._arena.map()
            except torch.OutOfMemoryError as error:
                raise UserError(
                    f"the engine's weights need {self.num_bytes / GIB:.2f} GiB on "
                    f"{self._device}: {error}. Lower engine.gpu_memory_utilization, raise "
                    "engine.tensor_parallel_size, or free memory first."
                ) from error
