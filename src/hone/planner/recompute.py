"""`trainer.recompute auto`: the least recomputation whose predicted memory fits the GPUs of a run.

    plan = settled(plan)
    plan.config.trainer.recompute            # block:12
    plan.chosen["trainer.recompute"]         # the reason, as text

The values that the key can have are tried in the order of their predicted time, and the first one
is taken with which the steps of the policy, and of a critic that has the same value, leave a share
of the GPU's memory free (`margin.py`). Where none does, the one that takes the least memory is
taken: whether that fits is for `hone.planner.fitting` to say, as of any other value. A plan keeps
`auto` where nothing can be predicted yet, such as without a GPU or a number of processes. Its
memory is then that of `off`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain
from typing import Literal, TypeAlias

from hone.config.plan import RunPlan
from hone.families.stages import layer_costs, stage_layers
from hone.hardware import GIB
from hone.planner.fitting import changed, errors
from hone.planner.knobs import setting
from hone.planner.margin import free_share
from hone.planner.run_memory import RunMemory
from hone.trainer.settings import RecomputeMode, SFTTrainerConfig

__all__ = [
    "COMPUTED_AGAIN",
    "KEY",
    "chosen_values",
    "is_open",
    "settled",
]

KEY = "trainer.recompute"
COMPUTED_AGAIN: Mapping[RecomputeMode, float] = {"off": 0.0, "selective": 0.8, "full": 1.0}
"""Share of a layer's forward pass: measured 18 and 22 % of a step of 1.7B, 22 and 27 % of 4B."""
_Learner: TypeAlias = Literal["policy", "critic"]


def is_open(plan: RunPlan) -> bool:
    """Whether the value is `auto`, and the run needs another."""
    return plan.batch is not None and setting(plan.config, KEY) == "auto"


def settled(plan: RunPlan, *, kept: Mapping[str, str] | None = None) -> RunPlan:
    """The plan with a value in place of `auto` and the reason in `RunPlan.chosen`; unchanged where
    nothing is `auto` or can be known. A value in `kept`, by key, which the run has chosen before,
    stays, whatever fits now."""
    if not is_open(plan):
        return plan
    if kept is not None and KEY in kept:
        value, reason = kept[KEY], "chosen when the run began, and kept"
    elif plan.is_on_cpu:
        value, reason = "off", "a run on a CPU has no GPU's memory to fit"
    elif _is_predictable(plan):
        value, reason = _Choice(plan).made()
    else:
        return plan
    return replace(changed(plan, {KEY: value}), chosen={KEY: reason})


def chosen_values(plan: RunPlan) -> dict[str, str]:
    """The values that `settled` has chosen, by key."""
    return {key: setting(plan.config, key) for key in plan.chosen}


def _layers_again(trainer: SFTTrainerConfig, stages: Iterable[Sequence[range]]) -> int:
    """Number of recomputed layers, of all groups of layers by pipeline stage."""
    groups = map(len, chain(*stages))
    return sum(len(span) for number in groups for span in trainer.recomputed_spans(number))


def _is_predictable(plan: RunPlan) -> bool:
    gpu = plan.devices.gpu
    is_laid_out = plan.world_size is not None and plan.problem is None
    return plan.shape is not None and is_laid_out and gpu is not None and bool(gpu.memory_gib)


@dataclass(frozen=True)
class _Choice:
    """The choice of a value for a plan whose memory can be predicted."""

    plan: RunPlan

    def made(self) -> tuple[str, str]:
        """The value, and the reason for it."""
        gpu, values = self.plan.devices.gpu, sorted(self._allowed(), key=self._price)
        assert gpu is not None
        total = gpu.memory_gib or 0
        share = free_share(max(self.plan.roles[name].axes.world for name in self._learners))
        peaks: dict[str, int] = {}
        for value in values:
            peaks[value] = self._peak(value)
            if peaks[value] <= (1 - share) * total * GIB:
                other = "full" if value == "off" else "off"
                return value, (
                    f"the cheapest with which training leaves {share:.0%} of {total} GiB free: it "
                    f"takes {peaks[value] / GIB:.1f} GiB, {self._peak(other) / GIB:.1f} with "
                    f"{other}"
                )
        least = min(values, key=peaks.__getitem__)
        return least, (
            f"no value leaves {share:.0%} of {total} GiB free, and with this one training takes "
            f"least, {peaks[least] / GIB:.1f} GiB"
        )

    @cached_property
    def _learners(self) -> tuple[_Learner, ...]:
        """The models that the value is for: also a critic that sets nothing else."""
        has_own = setting(self.plan.config, "critic.recompute") is not None
        is_shared = "critic" in self.plan.roles and not has_own
        return ("policy", "critic") if is_shared else ("policy",)

    def _peak(self, value: str) -> int:
        """Bytes of the fullest device in a step of the models that the value is for."""
        run = RunMemory(changed(self.plan, {KEY: value}))
        return max(map(run.training_peak, self._learners))

    def _price(self, value: str) -> float:
        """Predicted time of what a value computes again, in the unit of `layer_costs`."""
        plan, price = changed(self.plan, {KEY: value}), 0.0
        for name in self._learners:
            role, stages = plan.roles[name], self._stages[name]
            costs = layer_costs(RunMemory(plan).shape_of(role))
            again = _layers_again(role.trainer, stages) / len(costs) * sum(costs)
            price += role.num_epochs * COMPUTED_AGAIN[role.trainer.recompute_mode] * again
        return price

    def _allowed(self) -> list[str]:
        """The values that break the fewest rules: exact mode recomputes all layers or none, and
        offloaded inputs of layers need layers that are recomputed."""
        kinds: dict[str, list[str]] = {}
        for value in self._values():
            kinds.setdefault(value.partition(":")[0], []).append(value)
        broken = {kind: len(errors(changed(self.plan, {KEY: x[0]}))) for kind, x in kinds.items()}
        fewest = min(broken.values())
        return [value for kind, own in kinds.items() if broken[kind] == fewest for value in own]

    def _values(self) -> Iterator[str]:
        """All values with numbers up to that of the layers. Of those that cost the same, the first
        that fits is taken."""
        number = max(map(len, chain(*chain(*self._stages.values()))))
        yield from ("off", "selective", "full")
        yield from (f"block:{n}" for n in range(1, number + 1))
        yield from (f"uniform:{n}" for n in range(2, number + 1))

    @cached_property
    def _stages(self) -> Mapping[_Learner, list[list[range]]]:
        """Groups of neighbouring layers in each pipeline stage, by model."""
        run, stages = RunMemory(self.plan), dict[_Learner, list[list[range]]]()
        for name in self._learners:
            role, has_head = self.plan.roles[name], name == "policy" and not self.plan.gives_values
            shape, axes = run.shape_of(role), role.axes
            num_stages = min(axes.pipeline, shape.num_layers)
            stages[name] = stage_layers(shape, num_stages, axes.virtual_stages, has_head=has_head)
        return stages
