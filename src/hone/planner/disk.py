"""Disk use of a training run, and whether the disk has room for it.

    use = disk_use(plan)
    use.most_at_end <= free_bytes(cfg.run.dir) + what is there of it already

Exported models and the states of checkpoints are counted. Records and reports are not, since they
are small in comparison.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from hone.config.plan import RunPlan
from hone.config.rules.finding import Finding
from hone.config.tree import RLConfig, SFTConfig
from hone.distributed.settings import AxisSizes
from hone.planner.run_memory import RunMemory
from hone.trainer.cost import adapter_params, planned_step

__all__ = ["DiskUse", "check_disk", "disk_use"]


@dataclass(frozen=True, slots=True)
class DiskUse:
    """Disk use in bytes of a run whose model's shape is known."""

    export: int
    """The exported models, and adapters."""
    state: int
    """One checkpoint."""
    num_on_the_way: int
    """Number of checkpoints that exist at one time before the last step, including the one in
    writing."""
    num_at_end: int
    """Number of checkpoints that exist while the last step's is written."""

    @property
    def most_on_the_way(self) -> int:
        """The larger of the checkpoints before the end and the exported model."""
        return self.num_on_the_way * self.state + self.export

    @property
    def most_at_end(self) -> int:
        """Bytes at the end of the run, including the state of the last step."""
        return self.num_at_end * self.state + self.export


def disk_use(plan: RunPlan) -> DiskUse | None:
    """The disk use of a plan; None where nothing is trained, or the model's shape is not known."""
    cfg = plan.config
    if plan.shape is None or plan.trainer is None or not isinstance(cfg, RLConfig | SFTConfig):
        return None
    widths = {"auto": plan.num_bytes, "float32": 4, "bfloat16": 2}
    lora = cfg.model.lora
    width = widths[cfg.checkpoint.export_dtype]
    tower = plan.shape.tower
    export = plan.shape.weight_bytes(width) + (tower.weight_bytes(width) if tower else 0)
    export += 4 * adapter_params(plan.shape, lora)
    alone = AxisSizes()  # of one process, so that its part is the whole
    whole = replace(
        plan, roles={name: replace(role, axes=alone) for name, role in plan.roles.items()}
    )
    state = planned_step(whole, num_tokens=1).state
    run = RunMemory(whole)
    if run.critic is not None:
        state += run.critic.state
        export += run.shape_of(plan.roles["critic"]).weight_bytes(plan.num_bytes)
    every, steps = cfg.checkpoint.every_n_steps, cfg.run.steps
    evaluated = cfg.eval.every_n_steps if cfg.checkpoint.keep_best else 0
    num_scheduled, num_evaluated = ((steps - 1) // n if n else 0 for n in (every, evaluated))
    # Any evaluation may be the best so far, and the best checkpoint is kept in addition to the
    # newest.
    most = cfg.checkpoint.keep_last + 1 + bool(num_evaluated)
    num_saved = num_scheduled + num_evaluated
    return DiskUse(export, state, min(num_saved, most), min(num_saved + bool(every), most))


def check_disk(plan: RunPlan, *, free: int, held: int) -> Iterator[Finding]:
    """Check that the disk of `run.dir`, with `free` bytes and `held` bytes of earlier checkpoints,
    has room for the run. An error where the model or a checkpoint before the end does not fit, a
    warning where only the state at the end does not."""
    use = disk_use(plan)
    if use is None:
        return
    cfg = plan.config
    assert isinstance(cfg, RLConfig | SFTConfig)
    place = f"run.dir '{cfg.run.dir}'"
    there = f"{_gb(free)} are free there"
    remedy = "Free some space, set run.dir to another place"
    if use.export > free:
        told = f"by prediction {place} does not hold the trained model: it has {_gb(use.export)}"
        yield Finding("error", ("run.dir",), f"{told}, and {there}. {remedy}.")
        return
    if held:
        there += f", and checkpoints there have {_gb(held)}"
    if use.num_on_the_way and use.most_on_the_way > free + held:
        told = (
            f"by prediction {place} does not hold the checkpoints: at one time there are "
            f"{use.num_on_the_way} of {_gb(use.state)}, the one that is being written among them, "
            f"then the model of {_gb(use.export)}, and {there}"
        )
        keys = ["checkpoint.keep_last to 1"] * (cfg.checkpoint.keep_last > 1)
        keys += ["checkpoint.keep_best to false"] * cfg.checkpoint.keep_best
        keys.append("checkpoint.every_n_steps to 0, with which the model alone is written")
        changes = ", ".join([remedy, *keys[:-1], f"or {keys[-1]}"])
        yield Finding("error", ("run.dir", "checkpoint.keep_last"), f"{told}. {changes}.")
    elif use.most_at_end > free + held:
        told = (
            f"by prediction {place} does not hold both the model ({_gb(use.export)}) and the state "
            f"of the last step ({_gb(use.state)}): {there}. The run then ends with its model alone "
            "and cannot be extended"
        )
        quiet = "or checkpoint.every_n_steps to 0, with which no state is written at the end"
        yield Finding("warning", ("run.dir",), f"{told}. {remedy}, {quiet}.")


def _gb(num_bytes: int) -> str:
    """Size in GB, powers of ten, as disks are sold and `df -H` counts."""
    return f"{num_bytes / 1e9:,.1f} GB"
