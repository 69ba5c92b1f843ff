"""Going on with the run that a folder holds: from where, as what, and what has changed since."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from hone.checkpoint.random_state import restore_random_state
from hone.checkpoint.sharded import StoredTensor
from hone.checkpoint.store import Checkpoint, CheckpointStore
from hone.config.base import Section
from hone.config.errors import UserError
from hone.config.load import dump_config
from hone.config.run import RunConfig
from hone.distributed.mesh import MeshSizes
from hone.trainer.learner import Learner

__all__ = ["announce", "find_checkpoint", "restore", "save_config"]

_CONFIG = "config.yaml"


def find_checkpoint(run: RunConfig, store: CheckpointStore, tree: Section) -> Checkpoint | None:
    """The checkpoint that `run.resume` asks for; None where the folder holds none.

    Raises UserError where the folder's run is of another command than `tree`, or `run.resume` is
    never, and CheckpointError for a folder with damaged ones only: to start afresh beside them
    would look like going on.
    """
    _require_same_command(run.dir, _saved_config(run.dir), tree)
    if isinstance(run.resume, int):
        return store.load(run.resume)
    if store.is_empty:
        return None
    if run.resume == "never":
        raise UserError(
            f"run.resume is never, but run.dir={str(run.dir)!r} holds checkpoints. Choose another "
            "run.dir, or run.resume=auto to go on from them."
        )
    return store.load("latest")


def announce(found: Checkpoint, run: RunConfig, tree: Section, sizes: MeshSizes) -> Iterator[str]:
    """Lines on what the run goes on from, and what a person may not expect of it."""
    yield _origin(found, sizes)
    if found.step >= run.steps:
        yield (
            f"run.steps is {run.steps}: nothing is left to train. Raise it to go on, or choose "
            "another run.dir"
        )
        return  # what has changed is not used
    before, now = _flat(_saved_config(run.dir)), _flat(yaml.safe_load(dump_config(tree)))
    changed = [key for key in now if key in before and before[key] != now[key]]
    for key in changed:
        if key not in ("run.resume", "run.steps"):
            yield f"changed since then: {key} is {now[key]}, was {before[key]}"


def restore(trainer: Learner, parts: Mapping[str, Any]) -> None:
    """Let trainer and random generators go on from a checkpoint, whatever processes wrote it.

    Each process reads what it holds. Raises ValueError where it belongs to another model.
    """
    trainer.load_state_dict(parts["trainer"], parts["trainer_metadata"])
    restore_random_state(_in_memory(parts["random"]))


def save_config(folder: Path, tree: Section) -> None:
    """Write the configuration into a run folder: once nothing stands against going on there."""
    (folder / _CONFIG).write_text(dump_config(tree), encoding="utf-8")


def _saved_config(folder: Path) -> dict[str, Any]:
    """The configuration of the run that the folder holds; empty where there is none."""
    file = folder / _CONFIG
    saved = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else None
    return saved if isinstance(saved, dict) else {}


def _require_same_command(folder: Path, saved: Mapping[str, Any], tree: Section) -> None:
    """Raise UserError where `hone sft` would go on with a run of `hone rl`, or the other way."""
    own, other = ("rollout" in names for names in (type(tree).model_fields, saved))
    if saved and own != other:
        command = "hone rl" if other else "hone sft"
        raise UserError(
            f"run.dir={str(folder)!r} holds a run of `{command}`: choose another run.dir. What it "
            f"has trained is in its folder `model`, for model.path."
        )


def _flat(tree: Any, above: str = "") -> dict[str, Any]:
    """Values by dotted key."""
    if not isinstance(tree, dict):
        return {above: tree}
    parts = [_flat(value, f"{above}.{key}" if above else key) for key, value in tree.items()]
    return {key: value for part in parts for key, value in part.items()}


def _origin(found: Checkpoint, own: MeshSizes) -> str:
    """One line on where the run goes on from, who wrote that, and how it is read."""
    line = f"going on after step {found.step}, from {found.path}"
    if found.saved_at is not None:
        line += f", saved {time.strftime('%Y-%m-%d %H:%M', time.localtime(found.saved_at))}"
    if found.written_by is None:
        return line
    line += f" by {_described(found.written_by)}"
    if found.written_by != own:
        line += f"; now {_described(own)}, so each reads its own regions of the tensors"
    return line


def _described(sizes: MeshSizes) -> str:
    """For example `8 processes (data 4 x tensor 2, shards over 4)`."""
    if sizes.world == 1:
        return "1 process"
    axes = {name: getattr(sizes, name) for name in ("data", "ring", "ulysses", "tensor")}
    product = " x ".join(f"{name} {size}" for name, size in axes.items() if size > 1)
    return f"{sizes.world} processes ({product}, shards over {sizes.fsdp})"


def _in_memory(tree: Any) -> Any:
    """A small tree with its tensors read."""
    match tree:
        case StoredTensor():
            return tree.full()
        case dict():
            return {key: _in_memory(value) for key, value in tree.items()}
        case list():
            return [_in_memory(value) for value in tree]
        case _:
            return tree
