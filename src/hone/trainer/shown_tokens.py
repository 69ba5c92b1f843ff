"""Outputs of an update for the single tokens of a few rows, for people who look at samples.

    shown = ShownTokens(ids)
    trainer.update(rows, shown)
    shown.add_to(rows, trainer.mesh)     # columns `logprobs/policy`, `entropy/policy`

The loss computes both for every token, so keeping them takes no further pass and no wait for the
device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hone.algorithms.algorithm import Outputs
from hone.algorithms.settings import Output
from hone.distributed.mesh import Mesh
from hone.types import Column, MicroBatch, Row

__all__ = ["ShownTokens"]

_SHOWN: tuple[Output, ...] = ("logprobs", "entropy")


@dataclass(slots=True)
class ShownTokens:
    """Collects logprobs and entropy of the rows with these `ids`, from their first pass in the
    update."""

    ids: frozenset[str]
    num_steps: int = 0
    """Number of finished optimizer steps of the update. It decides which pass of a row was the
    first, since each epoch may assign the row to another process."""
    _passes: list[tuple[int, Sequence[str], Outputs]] = field(
        default_factory=list[tuple[int, Sequence[str], Outputs]]
    )
    """For each pass: `num_steps`, its row ids, and its outputs over all trained tokens."""

    def see(self, batch: MicroBatch, outputs: Outputs) -> None:
        """Keep the outputs of a pass with gradient."""
        if not self.ids.isdisjoint(batch.ids):
            shown: Outputs = {name: outputs[name].detach() for name in _SHOWN if name in outputs}
            self._passes.append((self.num_steps, batch.ids, shown))

    def add_to(self, rows: Sequence[Row], mesh: Mesh) -> None:
        """Add the columns that rows lack, in every process. Collective."""
        num_trained = {row.id: row.num_trained for row in rows}
        own: dict[str, tuple[int, Outputs]] = {}
        for step, ids, outputs in self._passes:
            sizes = [num_trained[row_id] for row_id in ids]
            columns: Outputs = {name: values.cpu() for name, values in outputs.items()}
            ends = np.cumsum(sizes).tolist()
            for row_id, size, end in zip(ids, sizes, ends, strict=True):
                if row_id in self.ids and row_id not in own:
                    part: Outputs = {k: v[end - size : end].clone() for k, v in columns.items()}
                    own[row_id] = step, part
        first: dict[str, tuple[int, Outputs]] = {}
        for of_rank in mesh.gather(own):
            for row_id, candidate in of_rank.items():
                if row_id not in first or candidate[0] < first[row_id][0]:
                    first[row_id] = candidate
        for row in rows:
            for name, values in first.get(row.id, (0, {}))[1].items():
                row.columns.setdefault(f"{name}/policy", Column(values))
