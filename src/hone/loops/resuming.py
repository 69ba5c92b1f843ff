"""Resuming a run from its folder: which checkpoint, and which settings changed since."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from hone.checkpoint.random_state import restore_random_state
from hone.checkpoint.store import Checkpoint, CheckpointStore
from hone.checkpoint.tree import in_memory
from hone.config.plan import Devices, resolve
from hone.config.tree import RLConfig, SFTConfig
from hone.distributed.settings import AxisSizes
from hone.errors import UserError
from hone.observe.resumed_run import (
    changed_settings,
    newest_step,
    require_resumable,
    saved_config,
)
from hone.observe.run_folder import METRICS, RunFolder
from hone.trainer.models import Models
from hone.trainer.schedule import lr_scale
from hone.trainer.trainer import Trainer

__all__ = ["announce", "announce_restart", "changes", "find_checkpoint", "restore", "saved_names"]

_AXES = ("pipeline", "data", "ring", "ulysses", "tensor")


def find_checkpoint(cfg: RLConfig | SFTConfig, store: CheckpointStore) -> Checkpoint | None:
    """The checkpoint that `run.resume` selects, or None if the folder holds none.

    Raises UserError as `require_resumable` does, and CheckpointError for a folder that holds only
    damaged checkpoints: starting afresh there would look like resuming.
    """
    require_resumable(cfg, newest=None if store.is_empty else newest_step(cfg.run.dir) or 0)
    if isinstance(cfg.run.resume, int):
        return store.load(cfg.run.resume)
    return None if store.is_empty else store.load("latest")


def announce(checkpoint: Checkpoint, cfg: RLConfig | SFTConfig, sizes: AxisSizes) -> Iterator[str]:
    """Lines that say which checkpoint the run resumes from, and which settings have changed."""
    yield _origin(checkpoint, sizes)
    if checkpoint.step >= cfg.run.steps:
        yield (
            f"run.steps is {cfg.run.steps}: nothing is left to train. Raise it to go on, or choose "
            "another run.dir"
        )
        return  # the changed settings have no effect
    for text in changes(cfg, checkpoint.step):
        yield f"changed since then: {text}"


def changes(cfg: RLConfig | SFTConfig, step: int) -> list[str]:
    """Differences from the run in `run.dir` when it is resumed after `step`: changed settings with
    both values, and the learning rate if a changed `run.steps` moves it."""
    return [*changed_settings(cfg).values(), *_changed_course(cfg, step)]


def _changed_course(cfg: RLConfig | SFTConfig, step: int) -> Iterator[str]:
    """The jump of the learning rate after `step` if the schedule now ends at another step. A longer
    schedule has higher rates throughout."""
    plan = resolve(cfg, None, Devices())
    before = saved_config(cfg.run.dir).get("run", {}).get("steps")
    optimizer, batch = plan.policy.trainer.optimizer, plan.batch
    assert batch is not None
    waits = (
        cfg.critic.warmup_steps if isinstance(cfg, RLConfig) and cfg.algorithm.needs_critic else 0
    )

    def rate(after: int, last: int) -> float:
        """Learning rate of the first optimizer step after step `after` in a run of `last` steps."""
        done, total = (max(n - waits, 0) * batch.optimizer_steps_per_rollout for n in (after, last))
        return optimizer.lr * lr_scale(done, optimizer, total)

    if not isinstance(before, int) or rate(step, before) == (now := rate(step, cfg.run.steps)):
        return
    yield (
        f"run.steps is {cfg.run.steps}, was {before}, and trainer.optimizer.schedule "
        f"{optimizer.schedule} ends with it: the learning rate goes on at {now:.3g}, and would "
        f"have been {rate(step, before):.3g}. Where that jump is not wanted, set "
        "trainer.optimizer.schedule to constant, and trainer.optimizer.lr to what it was last"
    )


def announce_restart(cfg: RLConfig | SFTConfig) -> Iterator[str]:
    """A line on the records of an earlier launch that a folder without a checkpoint holds, and
    which are lost."""
    if not (cfg.run.dir / METRICS).is_file():
        return
    rows = RunFolder.read(cfg.run.dir, has_ended=True).rows
    if rows:
        every = cfg.checkpoint.every_n_steps
        yield (
            f"run.dir={str(cfg.run.dir)!r} holds records of an earlier launch up to step "
            f"{rows[-1]['step']}, and no checkpoint: this run begins at step 0 and replaces them. "
            + (
                f"A lower checkpoint.every_n_steps (now {every}) saves earlier"
                if every
                else "checkpoint.every_n_steps is 0, which saves the run that a signal ends and no "
                "other; set it to save on the way"
            )
        )


def saved_names(models: Models) -> dict[str, Trainer]:
    """Trainers by the name of their part in a checkpoint."""
    return {
        "trainer" if role == "policy" else role: trainer
        for role, trainer in models.learners.items()
    }


def restore(models: Models, parts: Mapping[str, Any]) -> None:
    """Restore trainers and random generators from a checkpoint, whatever number of processes wrote
    it.

    Each process reads its own shards. Raises ValueError if the checkpoint belongs to another model,
    and UserError if it lacks a role.
    """
    for name, trainer in saved_names(models).items():
        if name not in parts:
            raise UserError(
                f"algorithm.advantage gae needs a {name}, and the checkpoint is of a run without "
                "one. Set algorithm.advantage as it was, or choose another run.dir."
            )
        trainer.load_state_dict(parts[name], parts[f"{name}_metadata"])
    restore_random_state(in_memory(parts["random"]))


def _origin(checkpoint: Checkpoint, sizes: AxisSizes) -> str:
    """One line that names the checkpoint, the processes that wrote it, and how it is read now."""
    saved_at = time.strftime("%Y-%m-%d %H:%M", time.localtime(checkpoint.saved_at))
    line = f"going on after step {checkpoint.step}, from {checkpoint.path}, saved {saved_at}"
    line += f" by {_described(checkpoint.written_by)}"
    if checkpoint.written_by != sizes:
        line += f"; now {_described(sizes)}, so each reads its own regions of the tensors"
    return line


def _described(sizes: AxisSizes) -> str:
    """Describe sizes, for example `8 processes (data 4 x tensor 2, shards over 4)`."""
    if sizes.world == 1:
        return "1 process"
    axes = {name: getattr(sizes, name) for name in _AXES}
    product = " x ".join(f"{name} {size}" for name, size in axes.items() if size > 1)
    return f"{sizes.world} processes ({product}, shards over {sizes.fsdp})"
