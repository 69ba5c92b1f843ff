"""Log-probabilities of rows under a model, over all processes that hold it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hone.config.trainer import SFTTrainerConfig
from hone.distributed.mesh import Mesh
from hone.models.adapters import adapters_off
from hone.trainer.batcher import Batcher
from hone.trainer.packing import Plan, check_rows, digest
from hone.trainer.parallel_model import ParallelModel
from hone.types import Trajectory

__all__ = ["FrozenScorer", "RowScorer", "WithoutAdapters", "agree", "agreed_passes", "row_logprobs"]


class RowScorer(Protocol):
    """A model that scores rows, in this process or elsewhere."""

    def begin(self, rows: Sequence[Trajectory], /) -> Callable[[], list[Tensor]]:
        """Begin to score; what is returned waits for the log-probabilities of each row's trained
        tokens, [N_i] float32 on the CPU, no gradient. Collective, as is the waiting."""
        ...


def row_logprobs(
    model: ParallelModel, batcher: Batcher, rows: Sequence[Trajectory], *, step: int = 0
) -> list[Tensor]:
    """Log-probabilities of each row's trained tokens, [N_i] float32 on the CPU, no gradient.

    Every process of the model's mesh is given all rows and returns the same; inside, rows are
    distributed over the data axis. `step` and what is raised as in `agreed_passes`.
    """
    mesh = model.mesh
    passes = agreed_passes(batcher, rows, batcher.max_tokens_forward, mesh, step=step)
    own = passes[mesh.data.rank]
    scored = [torch.empty(0, device=mesh.device)]
    with torch.no_grad():
        for batch in batcher.micro_batches(rows, [0.0] * len(rows), own, mesh):
            logprobs = model.forward(batch, frozenset({"logprobs"})).logprobs
            scored += [logprobs] if batch.ids else []
    model.free()

    result = [torch.empty(0)] * len(rows)
    orders = [[i for indices in of_rank for i in indices] for of_rank in passes]
    lengths = [[rows[i].num_trained for i in order] for order in orders]
    everyones = mesh.gather_values(torch.cat(scored), [sum(own) for own in lengths])
    for order, own, values in zip(orders, lengths, everyones, strict=True):
        for i, logprobs in zip(order, values.split(own), strict=True):
            result[i] = logprobs.clone()
    return result


def agreed_passes(
    batcher: Batcher, rows: Sequence[Trajectory], max_tokens: int, mesh: Mesh, *, step: int
) -> Plan:
    """`Batcher.passes`, the same on every rank.

    Raises DisagreementError, on every process and before anything is computed, where one is at
    another `step` or has other rows or passes; ValueError as `Batcher.passes` and `check_rows`.
    """
    passes = batcher.passes(rows, max_tokens, mesh)
    agree(rows, passes, mesh, step=step)
    if mesh.world.size > 1:  # on every rank, not just on that which will collate the bad one
        check_rows([row for row in rows if row.num_trained])
    return passes


def agree(rows: Sequence[Trajectory], passes: Plan, mesh: Mesh, *, step: int) -> None:
    """Raise DisagreementError as `agreed_passes`. Collective, as everything is that follows from
    rows and passes."""
    if mesh.world.size > 1:
        numbers = {"step": step, "rows": len(rows), "passes": list(map(len, passes))}
        mesh.agree("rows and micro-batches", numbers | {"of": digest(rows, passes)})


class FrozenScorer:
    """A model that does not learn, such as the reference of a KL term.

    Beside a trainer it takes part in the trainer's mesh; alone on a device of its own it is scored
    with the same kernels and in the same passes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cfg: SFTTrainerConfig,
        *,
        temperature: float = 1.0,
        exact: bool = False,
        mesh: Mesh | None = None,
    ) -> None:
        """`cfg` is the trainer's, other arguments as of `Trainer`."""
        self._batcher = Batcher.of(cfg, model)
        mesh = Mesh.alone(model.device) if mesh is None else mesh
        self.model = ParallelModel.frozen(model, cfg, mesh, temperature=temperature, exact=exact)

    def logprobs(self, rows: Sequence[Trajectory]) -> list[Tensor]:
        """As `row_logprobs`."""
        return row_logprobs(self.model, self._batcher, rows)

    def begin(self, rows: Sequence[Trajectory]) -> Callable[[], list[Tensor]]:
        """Scored when it is waited for."""
        return partial(self.logprobs, rows)

    def score(self, rows: Sequence[Trajectory]) -> npt.NDArray[np.float32]:
        """Log-probabilities of the trained tokens of `rows`, one row's after the other's."""
        return torch.cat([torch.empty(0), *self.logprobs(rows)]).numpy()


class WithoutAdapters:
    """The model in training with its adapters off: the reference of a run that trains adapters."""

    def __init__(
        self, model: PreTrainedModel, logprobs: Callable[[Sequence[Trajectory]], list[Tensor]]
    ) -> None:
        """`logprobs` is the trainer's, of the same `model`."""
        self._model = model
        self._logprobs = logprobs

    def logprobs(self, rows: Sequence[Trajectory]) -> list[Tensor]:
        with adapters_off(self._model):
            return self._logprobs(rows)

    def begin(self, rows: Sequence[Trajectory]) -> Callable[[], list[Tensor]]:
        """Scored when it is waited for."""
        return partial(self.logprobs, rows)
