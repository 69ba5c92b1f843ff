"""Outputs of a model for rows, computed by all processes that have a part of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from hone.algorithms.algorithm import Outputs
from hone.algorithms.settings import Output
from hone.distributed.mesh import Mesh
from hone.trainer.batcher import Batcher, PassKind
from hone.trainer.collating import check_rows
from hone.trainer.packing import Plan, digest
from hone.trainer.parallel_model import ParallelModel
from hone.types import MicroBatch, Row

__all__ = ["RowScorer", "agree", "agreed_passes", "row_outputs"]


class RowScorer(Protocol):
    """A model that scores rows, frozen or in training, in this process or elsewhere."""

    def begin(
        self, rows: Sequence[Row], outputs: frozenset[Output], /
    ) -> Callable[[], list[Outputs]]:
        """Start scoring. The returned function waits for the `outputs` of each row's trained
        tokens, [N_i] or [N_i, K] on the CPU, without gradient. Both calls are collective."""
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
    """The outputs of each row's trained tokens, [N_i] or [N_i, K] on the CPU, without gradient.

    Every process of the model's mesh passes all rows and gets the same result; the rows are
    distributed over the data axis. `before_pass` may raise to stop the scoring; it must do so on
    every process before the same pass. `step` and other errors are those of `agreed_passes`.
    """
    mesh = model.mesh
    passes = agreed_passes(batcher, rows, "forward", mesh, step=step)
    own = passes[mesh.data.rank]
    scored: dict[Output, list[Tensor]] = {output: [] for output in sorted(outputs)}
    try:
        with torch.no_grad():
            batches = batcher.micro_batches(rows, [0.0] * len(rows), own, mesh)
            for batch, scores in model.forward_each(_each(batches, before_pass), outputs):
                for output, values in scored.items() if scores else ():  # the last stage has them
                    values.append(scores[output] if batch.ids else scores[output][:0])
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
    """Yield the batches, calling `before` ahead of each."""
    for batch in batches:
        before()
        yield batch


def agreed_passes(
    batcher: Batcher, rows: Sequence[Row], kind: PassKind, mesh: Mesh, *, step: int
) -> Plan:
    """The result of `Batcher.passes`, verified to be the same on every rank.

    Raises DisagreementError on every process, before any computation, where processes differ in
    `step`, rows or passes; ValueError as `Batcher.passes` and `check_rows`.
    """
    passes = batcher.passes(rows, kind, mesh)
    agree(rows, passes, mesh, step=step)
    if mesh.world.size > 1:  # so every rank raises, not only the one that would collate the bad row
        check_rows([row for row in rows if row.num_trained], batcher.inputs)
    return passes


def agree(rows: Sequence[Row], passes: Plan, mesh: Mesh, *, step: int) -> None:
    """Raise DisagreementError as `agreed_passes`. Collective."""
    if mesh.world.size > 1:
        numbers = {"step": step, "rows": len(rows), "passes": list(map(len, passes))}
        mesh.agree("rows and micro-batches", numbers | {"of": digest(rows, passes)})
