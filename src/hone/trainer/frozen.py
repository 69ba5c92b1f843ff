"""Models that are scored and not trained: frozen models, and the policy without its adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from transformers import PreTrainedModel

from hone.algorithms.algorithm import Outputs
from hone.algorithms.settings import Output
from hone.checkpoint.sharded import bytes_on, local_part
from hone.distributed.mesh import Mesh
from hone.models.adapted import adapters_off
from hone.models.routes import unrecorded
from hone.trainer.batcher import Batcher
from hone.trainer.build import attempts, frozen_model
from hone.trainer.scorer import RowScorer, row_outputs
from hone.trainer.settings import SFTTrainerConfig
from hone.types import Column, Row

if TYPE_CHECKING:
    from hone.trainer.offload import StateOffload

__all__ = ["FrozenScorer", "SleepingWeights", "WithoutAdapters"]


_PURPOSE = (
    "the weights of a frozen model sleep on the host, those of a reward model with "
    "engine.enable_sleep, others with trainer.enable_sleep"
)


class SleepingWeights:
    """The weights of a frozen model in this process, whole or shards, which can wait in host memory
    while nothing scores."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._offload: StateOffload | None = None
        """Created by the first `sleep`."""

    def sleep(self) -> None:
        """Move the weights to host memory, pinned where they are on a GPU, and their device memory
        to the driver. The host keeps its copy from then on. No pass may run until `wake`. Raises
        UserError, with nothing moved, where the host has too little memory."""
        if self._offload is None:
            from hone.trainer.offload import StateOffload

            self._offload = StateOffload(_PURPOSE, is_frozen=True)
        self._offload.offload([local_part(p.detach()) for p in self._module.parameters()])

    def wake(self) -> None:
        """Bring the weights back. Raises torch.OutOfMemoryError, still asleep, where the device has
        too little memory free."""
        if self._offload is not None:
            self._offload.restore()


class FrozenScorer:
    """A model that is not trained, such as the reference of a KL term.

    A colocated one takes part in the trainer's mesh; a remote one, on devices of its own, is scored
    with the same kernels and in the same passes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cfg: SFTTrainerConfig,
        *,
        temperature: float = 1.0,
        exact: bool = False,
        top_k: int = 1,
        mesh: Mesh | None = None,
        role: str = "reference",
        dump_dir: Path | None = None,
        on_exhausted: Callable[[], str] | None = None,
    ) -> None:
        """`cfg` is the trainer's, `top_k` as of `ParallelModel`, other arguments as of
        `Trainer`."""
        self._batcher = Batcher.of(cfg, model, exact=exact)
        mesh = Mesh.alone(model.device) if mesh is None else mesh
        self.repair = attempts(cfg, mesh, role=role, folder=dump_dir, on_exhausted=on_exhausted)
        self.repair.adopt(self._batcher)
        self.model = frozen_model(
            model, cfg, mesh, temperature=temperature, exact=exact, top_k=top_k
        )
        self._weights = SleepingWeights(model)

    @property
    def device_bytes(self) -> int:
        """Bytes of the weights that this process has on its device."""
        return bytes_on(self.model.mesh.device, self.model.module.parameters())

    def sleep(self) -> None:
        """Move the weights to host memory. Raises as `SleepingWeights.sleep`."""
        self._weights.sleep()

    def wake(self) -> None:
        """Bring the weights back. Raises as `SleepingWeights.wake`."""
        self._weights.wake()

    def begin(self, rows: Sequence[Row], outputs: frozenset[Output]) -> Callable[[], list[Outputs]]:
        """Scoring starts when the returned function is called."""
        return partial(self._outputs, rows, outputs)

    def score(self, rows: Sequence[Row], outputs: frozenset[Output]) -> npt.NDArray[np.float32]:
        """The outputs, sorted by name, of the trained tokens of `rows`, one row's after the
        other's: [K, N]."""
        scored = self._outputs(rows, outputs)
        return np.stack(
            [
                torch.cat([torch.empty(0), *(of_row[output] for of_row in scored)]).numpy()
                for output in sorted(outputs)
            ]
        )

    def _outputs(self, rows: Sequence[Row], outputs: frozenset[Output]) -> list[Outputs]:
        score = partial(row_outputs, self.model, self._batcher, rows, outputs)
        return self.repair.until_it_fits("forward", rows, score)


class WithoutAdapters:
    """The policy with its adapters off, which is the reference of a run that trains adapters. It
    replays no routes, since those are the policy's."""

    def __init__(self, model: PreTrainedModel, scorer: RowScorer) -> None:
        """`scorer` is the trainer of the same `model`."""
        self._model = model
        self._scorer = scorer

    def begin(self, rows: Sequence[Row], outputs: frozenset[Output]) -> Callable[[], list[Outputs]]:
        """Scoring starts when the returned function is called."""

        def score() -> list[Outputs]:
            with adapters_off(self._model):
                return self._scorer.begin(list(map(_without_routes, rows)), outputs)()

        return score


def _without_routes(row: Row) -> Row:
    """The row without recorded routes, so that the model's router chooses the experts."""
    if "routes" not in row.columns:
        return row
    recorded = row.column("routes")
    unknown = torch.full_like(recorded, unrecorded(recorded.dtype))
    return replace(row, columns={**row.columns, "routes": Column(unknown, per="token")})
