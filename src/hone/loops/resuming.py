"""Resume a run from its folder: from which checkpoint, as what, and what has changed since."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from typing import Any

from hone.checkpoint.random_state import restore_random_state
from hone.checkpoint.store import Checkpoint, CheckpointStore
from hone.checkpoint.tree import in_memory
from hone.config.parallel import AxisSizes
from hone.config.plan import Devices, resolve
from hone.config.tree import RLConfig, SFTConfig
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
    """The checkpoint that `run.resume` asks for; None where the folder holds none.

    Raises UserError as `require_resumable` does, and CheckpointError for a folder with damaged ones
    only: to start afresh beside them would look like going on.
    """
    require_resumable(cfg, newest=None if store.is_empty else newest_step(cfg.run.dir) or 0)
    if isinstance(cfg.run.resume, int):
        return store.load(cfg.run.resume)
    return None if store.is_empty else store.load("latest")


def announce(found: Checkpoint, cfg: RLConfig | SFTConfig, sizes: AxisSizes) -> Iterator[str]:
    """Lines on what the run goes on from, and what a person may not expect of it."""
    yield _origin(found, sizes)
    if found.step >= cfg.run.steps:
        yield (
            f"run.steps is {cfg.run.steps}: nothing is left to train. Raise it to go on, or choose "
            "another run.dir"
        )
        return  # what has changed is not used
    for text in changes(cfg, found.step):
        yield f"changed since then: {text}"


def changes(cfg: RLConfig | SFTConfig, step: int) -> list[str]:
    """What differs from the run that `run.dir` holds, where it goes on after `step`: settings with
    both values, and the learning rate where other `run.steps` change it."""
    return [*changed_settings(cfg).values(), *_changed_course(cfg, step)]


def _changed_course(cfg: RLConfig | SFTConfig, step: int) -> Iterator[str]:
    """How the learning rate jumps after `step` where its schedule ends at another step than it did:
    a longer one lies higher throughout."""
    optimizer, before = cfg.trainer.optimizer, saved_config(cfg.run.dir).get("run", {}).get("steps")
    batch = resolve(cfg, None, Devices()).batch
    assert batch is not None
    waits = (
        cfg.critic.warmup_steps if isinstance(cfg, RLConfig) and cfg.algorithm.needs_critic else 0
    )

    def rate(after: int, last: int) -> float:
        """Of the first optimizer step after step `after` of a run of `last` steps."""
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
    """A line on what a folder without a checkpoint holds of an earlier launch, which is lost."""
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
    """What learns, by the name of its part in a checkpoint."""
    return {
        "trainer" if role == "policy" else role: trainer
        for role, trainer in models.learners.items()
    }


def restore(models: Models, parts: Mapping[str, Any]) -> None:
    """Let what learns and random generators go on from a checkpoint, whatever processes wrote it.

    Each process reads what it holds. Raises ValueError where it belongs to another model, and
    UserError where it has none for a role.
    """
    for name, trainer in saved_names(models).items():
        if name not in parts:
            raise UserError(
                f"algorithm.advantage gae needs a {name}, and the checkpoint is of a run without "
                "one. Set algorithm.advantage as it was, or choose another run.dir."
            )
        trainer.load_state_dict(parts[name], parts[f"{name}_metadata"])
    restore_random_state(in_memory(parts["random"]))


def _origin(found: Checkpoint, own: AxisSizes) -> str:
    """One line on where the run goes on from, who wrote that, and how it is read."""
    saved_at = time.strftime("%Y-%m-%d %H:%M", time.localtime(found.saved_at))
    line = f"going on after step {found.step}, from {found.path}, saved {saved_at}"
    line += f" by {_described(found.written_by)}"
    if found.written_by != own:
        line += f"; now {_described(own)}, so each reads its own regions of the tensors"
    return line


def _described(sizes: AxisSizes) -> str:
    """For example `8 processes (data 4 x tensor 2, shards over 4)`."""
    if sizes.world == 1:
        return "1 process"
    axes = {name: getattr(sizes, name) for name in _AXES}
    product = " x ".join(f"{name} {size}" for name, size in axes.items() if size > 1)
    return f"{sizes.world} processes ({product}, shards over {sizes.fsdp})"
