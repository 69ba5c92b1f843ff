"""Going on with the run that a folder holds: from where, as what, and what has changed since."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from hone.checkpoint.random_state import restore_random_state
from hone.checkpoint.store import Checkpoint, CheckpointStore
from hone.checkpoint.tree import in_memory
from hone.config.base import Section
from hone.config.errors import UserError
from hone.config.load import dump_config
from hone.config.model import ModelConfig
from hone.config.parallel import AxisSizes
from hone.config.paths import must_be_local
from hone.config.run import CheckpointConfig, RunConfig
from hone.config.tree import RLConfig, SFTConfig
from hone.observe.run_folder import CONFIG, METRICS, RunFolder, read_config
from hone.observe.whole_file import write_whole
from hone.trainer.trainer import Trainer

__all__ = ["announce", "announce_restart", "find_checkpoint", "restore", "save_config"]

_MODEL = "model.json"
"""Which model the run trains: its place, resolved, how its weights began, and, of a local folder,
`config.json`."""
_WITHOUT_EFFECT = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
"""Keys of `config.json` that may change without another architecture."""


def find_checkpoint(
    run: RunConfig, store: CheckpointStore, tree: RLConfig | SFTConfig
) -> Checkpoint | None:
    """The checkpoint that `run.resume` asks for; None where the folder holds none.

    Raises UserError where the folder's run is of another command than `tree` or trains another
    model, or `run.resume` is never, and CheckpointError for a folder with damaged ones only: to
    start afresh beside them would look like going on.
    """
    _require_same_command(run.dir, _saved_config(run.dir), tree)
    if isinstance(run.resume, int):
        found = store.load(run.resume)
    elif store.is_empty:
        return None
    elif run.resume == "never":
        raise UserError(
            f"run.resume is never, but run.dir={str(run.dir)!r} holds checkpoints. Choose another "
            "run.dir, or run.resume=auto to go on from them."
        )
    else:
        found = store.load("latest")
    _require_same_model(run.dir, tree.model)
    return found


def announce(found: Checkpoint, run: RunConfig, tree: Section, sizes: AxisSizes) -> Iterator[str]:
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


def announce_restart(run: RunConfig, checkpoint: CheckpointConfig) -> Iterator[str]:
    """A line on what a folder without a checkpoint holds of an earlier launch, which is lost."""
    if not (run.dir / METRICS).is_file():
        return
    rows = RunFolder.read(run.dir, has_ended=True).rows
    if rows:
        every = checkpoint.every_n_steps
        yield (
            f"run.dir={str(run.dir)!r} holds records of an earlier launch up to step "
            f"{rows[-1]['step']}, and no checkpoint: this run begins at step 0 and replaces them. "
            + (
                f"A lower checkpoint.every_n_steps (now {every}) saves earlier"
                if every
                else "checkpoint.every_n_steps is 0, which saves at the end alone; set it to save "
                "earlier"
            )
        )


def restore(trainer: Trainer, parts: Mapping[str, Any]) -> None:
    """Let trainer and random generators go on from a checkpoint, whatever processes wrote it.

    Each process reads what it holds. Raises ValueError where it belongs to another model.
    """
    trainer.load_state_dict(parts["trainer"], parts["trainer_metadata"])
    restore_random_state(in_memory(parts["random"]))


def save_config(folder: Path, tree: RLConfig | SFTConfig) -> None:
    """Write the configuration into a run folder, and which model it means: once nothing stands
    against going on there."""
    write_whole(folder / CONFIG, dump_config(tree), "run.dir")
    write_whole(folder / _MODEL, json.dumps(_identity(tree.model), indent=2), "run.dir")


def _saved_config(folder: Path) -> dict[str, Any]:
    """The configuration of the run that the folder holds; empty where there is none. Raises
    UserError where it cannot be read."""
    _, saved = read_config(folder)
    return saved


def _require_same_command(folder: Path, saved: Mapping[str, Any], tree: Section) -> None:
    """Raise UserError where `hone sft` would go on with a run of `hone rl`, or the other way."""
    own, other = ("rollout" in names for names in (type(tree).model_fields, saved))
    if saved and own != other:
        command = "hone rl" if other else "hone sft"
        raise UserError(
            f"run.dir={str(folder)!r} holds a run of `{command}`: choose another run.dir. What it "
            f"has trained is in its folder `model`, for model.path."
        )


def _identity(model: ModelConfig) -> dict[str, Any]:
    """What makes two models the same one."""
    folder = Path(model.path)
    config = folder / "config.json"
    return {
        "path": _place(model.path),
        "init": model.init,
        "config": json.loads(config.read_text(encoding="utf-8")) if config.is_file() else None,
    }


def _place(path: str) -> str:
    """A folder as an absolute path; the name of a model on the hub as it is."""
    local = Path(path).exists() or must_be_local(path)
    return str(Path(path).resolve()) if local else path


def _require_same_model(folder: Path, model: ModelConfig) -> None:
    """Raise UserError where the folder's run trains another model than `model`."""
    record = folder / _MODEL
    if not record.is_file():
        return
    before, now = _read_record(record), _identity(model)
    changed = [
        f"model.{key} is {now[key]!r}, was {before[key]!r}"
        for key in ("path", "init")
        if now[key] != before[key]
    ]
    if not changed:
        own, other = now["config"] or {}, before["config"] or {}
        changed = [
            f"in config.json of model.path={model.path!r} {key} is {own[key]!r}, was {other[key]!r}"
            for key in own
            if key in other and own[key] != other[key] and key not in _WITHOUT_EFFECT
        ]
    if changed:
        raise UserError(
            f"run.dir={str(folder)!r} holds a run that trains another model: {'; '.join(changed)}. "
            "To train this one choose another run.dir. Where it is the same model, which was moved "
            f"for example, remove {str(record)!r}: the run then goes on from its checkpoint."
        )


def _read_record(record: Path) -> dict[str, Any]:
    """What `save_config` wrote of the model. Raises UserError where that is damaged."""
    try:
        held = json.loads(record.read_text(encoding="utf-8"))
    except ValueError:
        held = None
    if not isinstance(held, dict) or not {"path", "init", "config"} <= held.keys():
        raise UserError(
            f"{str(record)!r}, which says what model the run trains, is damaged. Remove it to go "
            "on with the run's checkpoint, or choose another run.dir."
        )
    return held


def _flat(tree: Any, above: str = "") -> dict[str, Any]:
    """Values by dotted key."""
    if not isinstance(tree, dict):
        return {above: tree}
    parts = [_flat(value, f"{above}.{key}" if above else key) for key, value in tree.items()]
    return {key: value for part in parts for key, value in part.items()}


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
    axes = {name: getattr(sizes, name) for name in ("data", "ring", "ulysses", "tensor")}
    product = " x ".join(f"{name} {size}" for name, size in axes.items() if size > 1)
    return f"{sizes.world} processes ({product}, shards over {sizes.fsdp})"
