"""Rows to optimizer steps, to the passes of every rank, to micro-batches.

Pure: a function of rows and configuration, so every rank that holds all rows computes all of it.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import ceil
from typing import Literal

from transformers import PreTrainedModel

from hone.config.trainer import SFTTrainerConfig, TrainerConfig
from hone.distributed.mesh import Mesh
from hone.models.support import head_dim_of
from hone.trainer.collating import collate, empty_batch
from hone.trainer.packing import AttentionCost, Cost, Plan, plan, units_of
from hone.trainer.prefixes import pass_tokens, shared_prefixes
from hone.types import LossExtent, MicroBatch, Row

__all__ = ["Batcher", "PassKind"]

PassKind = Literal["backward", "forward"]
"""Passes with gradient, and without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batcher:
    """How rows are cut. Token budgets are those of one device."""

    max_tokens: int
    """Of a pass with gradient."""
    max_tokens_forward: int | None
    """Of a pass without; None: `micro_batch_size`."""
    micro_batch_size: int | None
    """Rows of a pass with gradient, in place of a number of tokens."""
    cost: Cost
    shares_prefixes: bool = True
    """Whether rows of a group bring their prompt into a pass once, where one device has whole
    rows."""
    shuffle: bool = False
    """Whether groups are drawn in a new order in each epoch; else one optimizer step has all rows,
    in their order."""
    num_epochs: int = 1
    groups_per_step: int | None = None
    """Of an optimizer step; None: all."""
    seed: int = 0
    """Orders groups."""
    lowered: dict[PassKind, int] = field(default_factory=dict[PassKind, int])
    """Caps in place of the configured ones, since memory has ended. A larger unit still has its
    pass."""

    @classmethod
    def of(
        cls,
        cfg: SFTTrainerConfig,
        model: PreTrainedModel,
        *,
        seed: int = 0,
        exact: bool = False,
    ) -> Batcher:
        """As configured, for `model` before anything has been done to it. In `exact` mode each row
        is computed as the engine does, with its own prompt."""
        is_rollout = isinstance(cfg, TrainerConfig)
        usual = 2 * cfg.max_tokens_per_microbatch if cfg.micro_batch_size is None else None
        return cls(
            max_tokens=cfg.max_tokens_per_microbatch,
            max_tokens_forward=cfg.max_tokens_per_forward or usual,
            micro_batch_size=cfg.micro_batch_size,
            cost=_attention_cost(model),
            shares_prefixes=not exact,
            shuffle=is_rollout,
            num_epochs=cfg.num_epochs if is_rollout else 1,
            groups_per_step=cfg.prompts_per_minibatch if is_rollout else None,
            seed=seed,
        )

    def optimizer_steps(self, rows: Sequence[Row], number: int) -> list[list[Row]]:
        """Rows of each optimizer step of update `number`: whole groups, each once an epoch."""
        if not self.shuffle:
            return [list(rows)]
        groups = _by_group(rows)
        size = self._groups_per_step(len(groups))
        steps: list[list[Row]] = []
        for epoch in range(self.num_epochs):
            order = list(groups)
            random.Random(f"{self.seed}/minibatch/{number}/{epoch}").shuffle(order)
            for start in range(0, max(len(order), 1), size):
                steps.append(
                    [row for group in order[start : start + size] for row in groups[group]]
                )
        return steps

    def makes_several_steps(self, rows: Sequence[Row]) -> bool:
        """Whether `optimizer_steps` gives more than one."""
        num_groups = len(_by_group(rows))
        return self.num_epochs > 1 or num_groups > self._groups_per_step(num_groups)

    def passes(self, rows: Sequence[Row], kind: PassKind, mesh: Mesh) -> Plan:
        """Row indices of each pass of each rank along data. Raises ValueError as
        `packing.plan`."""
        num_ranks, sharers = mesh.data.size, mesh.context.size
        return self._cut(rows, kind, num_ranks, sharers=sharers)

    def configured(self, kind: PassKind) -> int:
        """The cap of the configuration: tokens of one device, or rows (`counts_rows`)."""
        if kind == "forward" and self.max_tokens_forward is not None:
            return self.max_tokens_forward
        return self.micro_batch_size or self.max_tokens

    def counts_rows(self, kind: PassKind) -> bool:
        """Whether the cap of a pass is a number of rows."""
        by_tokens = kind == "forward" and self.max_tokens_forward is not None
        return self.micro_batch_size is not None and not by_tokens

    def lower(self, kind: PassKind, rows: Sequence[Row], mesh: Mesh) -> int | None:
        """Halve what the fullest pass of `rows` holds, down to their largest unit; the new cap, or
        None where the fullest has no more than that."""
        sharers = mesh.context.size
        of_ranks = self.passes(rows, kind, mesh)
        fullest = max(self._sizes(rows, chain(*of_ranks), kind, sharers))
        largest = self._largest_unit(rows, kind, sharers)
        if fullest <= largest:
            return None
        self.lowered[kind] = max(fullest // 2, largest)
        return self.lowered[kind]

    def plan_scoring_passes(self, rows: Sequence[Row], num_devices: int) -> list[list[int]]:
        """Row indices of the passes in which `num_devices`, each with a whole model, score all
        trained tokens: the most expensive first, and of like sums for each device.

        With one device these are the passes of one process. Raises ValueError as `packing.plan`.
        """
        passes = self._cut(rows, "forward", num_devices)
        return [own[number] for number in range(len(passes[0])) for own in passes if own[number]]

    def micro_batches(
        self,
        rows: Sequence[Row],
        weights: Sequence[float],
        passes: Sequence[Sequence[int]],
        mesh: Mesh,
        *,
        per: LossExtent = "trained",
    ) -> Iterator[MicroBatch]:
        """Each pass of a rank when it is asked for; in host memory where it will be split over the
        context axis. `weights` and `per` as in `collating.collate`. Those without `ids` hold no
        rows: they run what other ranks run."""
        device = mesh.device if mesh.context.size == 1 else "cpu"
        prefixes = self._prefixes(rows, mesh.context.size)
        for indices in passes:
            if indices:
                yield collate(
                    [rows[i] for i in indices],
                    [weights[i] for i in indices],
                    device,
                    per=per,
                    prefixes=[prefixes[i] for i in indices],
                )
            else:
                yield empty_batch(device)

    def _groups_per_step(self, num_groups: int) -> int:
        return self.groups_per_step or max(num_groups, 1)

    def _prefixes(self, rows: Sequence[Row], sharers: int) -> list[int]:
        """`shared_prefixes` where they are shared."""
        if self.shares_prefixes and sharers == 1:
            return shared_prefixes(rows)
        return [0] * len(rows)

    def _sizes(
        self, rows: Sequence[Row], passes: Iterable[Sequence[int]], kind: PassKind, sharers: int
    ) -> list[int]:
        """Of passes, in what the cap counts."""
        if self.counts_rows(kind):
            return [len(own) for own in passes]
        prefixes = self._prefixes(rows, sharers)
        return [
            ceil(pass_tokens([rows[i] for i in own], [prefixes[i] for i in own]) / sharers)
            for own in passes
        ]

    def _largest_unit(self, rows: Sequence[Row], kind: PassKind, sharers: int) -> int:
        units = [unit for unit in units_of(rows) if any(rows[i].num_trained for i in unit)]
        return max(self._sizes(rows, units, kind, sharers), default=1)

    def _cut(
        self, rows: Sequence[Row], kind: PassKind, num_ranks: int, *, sharers: int = 1
    ) -> Plan:
        """A unit without trained tokens is in no pass. `sharers` devices share the tokens of
        one."""
        units = units_of(rows)
        trained = [i for unit in units if any(rows[i].num_trained for i in unit) for i in unit]
        prefixes = self._prefixes(rows, sharers)
        cap = self.configured(kind)
        if kind in self.lowered:
            cap = min(cap, max(self.lowered[kind], self._largest_unit(rows, kind, sharers)))
        passes = plan(
            [rows[i] for i in trained],
            max_tokens=cap * sharers,
            num_ranks=num_ranks,
            micro_batch_size=cap if self.counts_rows(kind) else None,
            cost=self.cost,
            prefixes=[prefixes[i] for i in trained],
        )
        return [[[trained[m] for m in members] for members in own] for own in passes]


def _by_group(rows: Sequence[Row]) -> dict[str, list[Row]]:
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.group_id or row.id, []).append(row)
    return groups


def _attention_cost(model: PreTrainedModel) -> AttentionCost:
    config = model.config
    heads: int = config.num_attention_heads
    head_dim = head_dim_of(config)
    return AttentionCost.of(
        num_parameters=sum(p.numel() for p in model.parameters()),
        num_layers=config.num_hidden_layers,
        attention_width=heads * head_dim,
    )
