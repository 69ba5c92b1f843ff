"""What a model says of rows, over all processes that hold it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import PreTrainedModel

from hone.algorithms.algorithm import Outputs
from hone.checkpoint.sharded import bytes_on
from hone.config.algorithm import Output
from hone.config.trainer import SFTTrainerConfig
from hone.distributed.mesh import Mesh
from hone.models.adapters import adapters_off
from hone.models.routes import unrecorded
from hone.trainer.batcher import Batcher, PassKind
from hone.trainer.collating import check_rows
from hone.trainer.out_of_memory import Repair
from hone.trainer.packing import Plan, digest
from hone.trainer.parallel_model import ParallelModel
from hone.types import Column, MicroBatch, Row

if TYPE_CHECKING:
    from hone.planner.rungs import Rungs

__all__ = ["FrozenScorer", "RowScorer", "WithoutAdapters", "agree", "agreed_passes", "row_outputs"]


class RowScorer(Protocol):
    """A model that scores rows, frozen or in training, in this process or elsewhere."""

    def begin(
        self, rows: Sequence[Row], outputs: frozenset[Output], /
    ) -> Callable[[], list[Outputs]]:
        """Begin to score; what is returned waits for the `outputs` of each row's trained tokens,
        [N_i] or [N_i, K] on the CPU, no gradient. Collective, as is the waiting."""
        ...


def row_outputs(
    model: ParallelModel,
    batcher: Batcher,
    rows: Sequence[Row],
    outputs: frozenset[Output],
    *,
    step: int = 0,
    before_pass: Callable[[], None] = lambda: None,
) -> list[Outputs]:
    """The outputs of each row's trained tokens, [N_i] or [N_i, K] on the CPU, no gradient.

    Every process of the model's mesh is given all rows and returns the same; inside, rows are
    distributed over the data axis. `before_pass` ends it by raising, on every process before the
    same pass. `step` and what else is raised as in `agreed_passes`.
    """
    mesh = model.mesh
    passes = agreed_passes(batcher, rows, "forward", mesh, step=step)
    own = passes[mesh.data.rank]
    scored: dict[Output, list[Tensor]] = {output: [] for output in sorted(outputs)}
    try:
        with torch.no_grad():
            batches = batcher.micro_batches(rows, [0.0] * len(rows), own, mesh)
            for batch, found in model.forward_each(_each(batches, before_pass), outputs):
                for output, values in scored.items() if found else ():  # found by the last stage
                    values.append(found[output] if batch.ids else found[output][:0])
    finally:
        model.free()

    result: list[dict[Output, Tensor]] = [{o: torch.empty(0) for o in scored} for _ in rows]
    orders = [[i for indices in of_rank for i in indices] for of_rank in passes]
    lengths = [[rows[i].num_trained for i in order] for order in orders]
    for output, values in scored.items():
        everyones: list[Tensor] = []
        if mesh.is_last_stage:
            own_n = torch.cat(values or [torch.empty(0, device=mesh.device)])
            everyones = mesh.gather_values(own_n, [sum(own) for own in lengths])
        everyones = mesh.gather_stages(everyones)[-1]
        for order, own, of_rank in zip(orders, lengths, everyones, strict=True):
            for i, row_values in zip(order, of_rank.split(own), strict=True):
                result[i][output] = row_values.clone()
    return [*result]


def _each(batches: Iterable[MicroBatch], before: Callable[[], None]) -> Iterator[MicroBatch]:
    """Calls `before` when it is asked for one."""
    for batch in batches:
        before()
        yield batch


def agreed_passes(
    batcher: Batcher, rows: Sequence[Row], kind: PassKind, mesh: Mesh, *, step: int
) -> Plan:
    """`Batcher.passes`, the same on every rank.

    Raises DisagreementError, on every process and before anything is computed, where one is at
    another `step` or has other rows or passes; ValueError as `Batcher.passes` and `check_rows`.
    """
    passes = batcher.passes(rows, kind, mesh)
    agree(rows, passes, mesh, step=step)
    if mesh.world.size > 1:  # on every rank, not just on that which will collate the bad one
        check_rows([row for row in rows if row.num_trained])
    return passes


def agree(rows: Sequence[Row], passes: Plan, mesh: Mesh, *, step: int) -> None:
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
        top_k: int = 1,
        mesh: Mesh | None = None,
        role: str = "reference",
        dump_dir: Path | None = None,
        rungs: Rungs | None = None,
    ) -> None:
        """`cfg` is the trainer's, `top_k` as of `ParallelModel`, other arguments as of
        `Trainer`."""
        self._batcher = Batcher.of(cfg, model, exact=exact)
        mesh = Mesh.alone(model.device) if mesh is None else mesh
        self.repair = Repair(cfg, mesh, role=role, folder=dump_dir, rungs=rungs)
        self.repair.adopt(self._batcher)
        self.model = ParallelModel.frozen(
            model, cfg, mesh, temperature=temperature, exact=exact, top_k=top_k
        )

    @property
    def device_bytes(self) -> int:
        """Of the weights that this process holds on the device that computes."""
        return bytes_on(self.model.mesh.device, self.model.module.parameters())

    def begin(self, rows: Sequence[Row], outputs: frozenset[Output]) -> Callable[[], list[Outputs]]:
        """Scored when it is waited for."""
        return partial(self._outputs, rows, outputs)

    def score(self, rows: Sequence[Row], outputs: frozenset[Output]) -> npt.NDArray[np.float32]:
        """The outputs, sorted by name, of the trained tokens of `rows`, one row's after the
        other's: [K, N]."""
        found = self._outputs(rows, outputs)
        return np.stack(
            [
                torch.cat([torch.empty(0), *(of_row[output] for of_row in found)]).numpy()
                for output in sorted(outputs)
            ]
        )

    def _outputs(self, rows: Sequence[Row], outputs: frozenset[Output]) -> list[Outputs]:
        score = partial(row_outputs, self.model, self._batcher, rows, outputs)
        return self.repair.until_it_fits("forward", rows, score)


class WithoutAdapters:
    """The model in training with its adapters off: the reference of a run that trains adapters. It
    replays no routes, which are the policy's."""

    def __init__(self, model: PreTrainedModel, scorer: RowScorer) -> None:
        """`scorer` is the trainer, of the same `model`."""
        self._model = model
        self._scorer = scorer

    def begin(self, rows: Sequence[Row], outputs: frozenset[Output]) -> Callable[[], list[Outputs]]:
        """Scored when it is waited for."""

        def score() -> list[Outputs]:
            with adapters_off(self._model):
                return self._scorer.begin(list(map(_without_routes, rows)), outputs)()

        return score


def _without_routes(row: Row) -> Row:
    """The row with tokens that choose their experts themselves."""
    if "routes" not in row.columns:
        return row
    recorded = row.column("routes")
    unknown = torch.full_like(recorded, unrecorded(recorded.dtype))
    return replace(row, columns={**row.columns, "routes": Column(unknown, per="token")})
