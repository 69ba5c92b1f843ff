"""Cutting rows into optimizer steps, the passes of every rank, and micro-batches.

The result depends on rows and configuration alone, so every rank that has all rows computes the
whole plan without a message.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from math import ceil
from typing import Literal

from transformers import PreTrainedModel

from hone.distributed.mesh import Mesh
from hone.families.registry import inputs_of, spec_of
from hone.model_input import TEXT_ONLY, InputSpec
from hone.models.support import head_dim_of
from hone.trainer.collating import collate, empty_batch
from hone.trainer.packing import AttentionCost, Cost, Plan, plan, units_of
from hone.trainer.prefixes import pass_tokens, shared_prefixes
from hone.trainer.settings import SFTTrainerConfig, TrainerConfig
from hone.types import LossExtent, MicroBatch, Row

__all__ = ["Batcher", "PassKind"]

PassKind = Literal["backward", "forward"]
"""Kinds of passes: with gradient, and without."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batcher:
    """Cuts rows into passes. Token budgets are those of one device."""

    max_tokens: int
    """Tokens of a pass with gradient."""
    max_tokens_forward: int | None
    """Tokens of a pass without gradient; None: `micro_batch_size` counts."""
    micro_batch_size: int | None
    """Rows of a pass with gradient; None: its cap is a number of tokens."""
    cost: Cost
    shares_prefixes: bool = True
    """Whether the rows of a group compute their prompt once a pass, where each device has whole
    rows."""
    inputs: InputSpec = TEXT_ONLY
    """Inputs of the model other than token ids."""
    shuffle: bool = False
    """Whether groups are drawn in a new order in each epoch; otherwise one optimizer step has all
    rows, in their order."""
    num_epochs: int = 1
    groups_per_step: int | None = None
    """Groups of an optimizer step; None: all groups."""
    seed: int = 0
    """Orders groups."""
    oom_caps: dict[PassKind, int] = field(default_factory=dict[PassKind, int])
    """Token caps, reduced after an out-of-memory error. A unit larger than its cap still gets a
    pass of its own."""

    @classmethod
    def of(
        cls,
        cfg: SFTTrainerConfig,
        model: PreTrainedModel,
        *,
        seed: int = 0,
        exact: bool = False,
    ) -> Batcher:
        """The batcher that `cfg` asks for. `model` is the unchanged module. In `exact` mode each
        row is computed as in the engine, with its own prompt."""
        is_rollout = isinstance(cfg, TrainerConfig)
        usual = 2 * cfg.max_tokens_per_microbatch if cfg.micro_batch_size is None else None
        return cls(
            max_tokens=cfg.max_tokens_per_microbatch,
            max_tokens_forward=cfg.max_tokens_per_forward or usual,
            micro_batch_size=cfg.micro_batch_size,
            cost=_attention_cost(model),
            shares_prefixes=not exact,
            inputs=inputs_of(model.config),
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
        """Whether `optimizer_steps` gives more than one step."""
        num_groups = len(_by_group(rows))
        return self.num_epochs > 1 or num_groups > self._groups_per_step(num_groups)

    def passes(self, rows: Sequence[Row], kind: PassKind, mesh: Mesh) -> Plan:
        """Row indices of each pass of each rank along the data axis. Raises ValueError as
        `packing.plan`."""
        num_ranks, sharers = mesh.data.size, mesh.context.size
        return self._cut(rows, kind, num_ranks, sharers=sharers)

    def configured(self, kind: PassKind) -> int:
        """The configured cap: tokens of one device, or rows (`counts_rows`)."""
        if kind == "forward" and self.max_tokens_forward is not None:
            return self.max_tokens_forward
        return self.micro_batch_size or self.max_tokens

    def counts_rows(self, kind: PassKind) -> bool:
        """Whether the cap of a pass is a number of rows."""
        by_tokens = kind == "forward" and self.max_tokens_forward is not None
        return self.micro_batch_size is not None and not by_tokens

    def lower(self, kind: PassKind, rows: Sequence[Row], mesh: Mesh) -> int | None:
        """Halve the cap of the fullest pass of `rows`, down to their largest unit. Returns the new
        cap, or None where the fullest pass has only one unit."""
        sharers = mesh.context.size
        of_ranks = self.passes(rows, kind, mesh)
        fullest = max(self._sizes(rows, chain(*of_ranks), kind, sharers))
        largest = self._largest_unit(rows, kind, sharers)
        if fullest <= largest:
            return None
        self.oom_caps[kind] = max(fullest // 2, largest)
        return self.oom_caps[kind]

    def plan_scoring_passes(self, rows: Sequence[Row], num_devices: int) -> list[list[int]]:
        """Row indices of the passes in which `num_devices` devices, each with a whole model, score
        all trained tokens: the most expensive first, with similar sums of cost for each device.

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
        """Yield the micro-batch of each pass of a rank when it is needed; in host memory where it
        will be split over the context axis. `weights` and `per` as in `collating.collate`. A
        micro-batch without `ids` has no rows: its rank runs it only to take part in collectives."""
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
                    inputs=self.inputs,
                )
            else:
                yield empty_batch(device, inputs=self.inputs)

    def _groups_per_step(self, num_groups: int) -> int:
        return self.groups_per_step or max(num_groups, 1)

    def _prefixes(self, rows: Sequence[Row], sharers: int) -> list[int]:
        """Lengths by `shared_prefixes`, or all 0 where prompts are not shared."""
        if self.shares_prefixes and sharers == 1:
            return shared_prefixes(rows)
        return [0] * len(rows)

    def _sizes(
        self, rows: Sequence[Row], passes: Iterable[Sequence[int]], kind: PassKind, sharers: int
    ) -> list[int]:
        """Size of each pass in the unit of its cap: tokens or rows."""
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
        """The plan of passes. A unit without trained tokens is in none. `sharers` devices share the
        tokens of a pass."""
        units = units_of(rows)
        trained = [i for unit in units if any(rows[i].num_trained for i in unit) for i in unit]
        prefixes = self._prefixes(rows, sharers)
        cap = self.configured(kind)
        if kind in self.oom_caps:
            cap = min(cap, max(self.oom_caps[kind], self._largest_unit(rows, kind, sharers)))
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
    recurrent = spec_of(config.model_type).recurrent_layers(config.to_dict())
    return AttentionCost.of(
        num_parameters=sum(p.numel() for p in model.parameters()),
        num_layers=config.num_hidden_layers - len(recurrent.indices if recurrent else ()),
        attention_width=heads * head_dim,
        recurrence=recurrent.flops_per_token if recurrent else 0,
    )
