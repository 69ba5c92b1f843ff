"""Which run a folder holds, and whether a configuration may resume it. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from hone.config.base import Section
from hone.config.load import dump_config
from hone.config.tree import RLConfig, SFTConfig
from hone.errors import UserError
from hone.models.settings import ModelConfig
from hone.observe.disk import MANIFEST_NAME
from hone.observe.run_folder import (
    CONFIG,
    RunFolder,
    is_locked,
    read_config,
    training_command,
)
from hone.observe.whole_file import write_whole
from hone.paths import must_be_local
from hone.user_code.digest import code_digest

__all__ = [
    "changed_settings",
    "exported_last",
    "exported_step",
    "is_finished",
    "kept_choices",
    "newest_step",
    "require_resumable",
    "save_config",
    "saved_config",
]

_MODEL = "model.json"
"""Record of the model that the run trains: its resolved path, its initialisation and, for a local
folder, `config.json`."""
_FUNCTIONS = "functions.json"
"""Digests of the code of the user's functions, by the keys that name them."""
_CHOSEN = "chosen.json"
"""The values that the run has chosen for settings that are `auto`, by key."""
_WITHOUT_EFFECT = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
"""Keys of `config.json` that do not change the architecture."""


def newest_step(folder: Path) -> int | None:
    """Step of the checkpoint in a run folder that was saved last, complete or not. None without
    checkpoints."""
    folders = folder.glob("checkpoints/step_*")
    steps = {int(path.name[5:]): path for path in folders if path.name[5:].isdecimal()}
    return max(steps, key=lambda step: _order(steps[step]), default=None)


def _order(checkpoint: Path) -> int:
    """Position of a checkpoint in the order of saving. -1 if its manifest is damaged."""
    try:
        return int(_manifest_entry(checkpoint)["order"])
    except (OSError, ValueError, KeyError, TypeError):
        return -1


def _manifest_entry(folder: Path) -> dict[str, Any]:
    """The manifest's entry for a published folder as a whole. Raises OSError, ValueError, KeyError
    or TypeError if it is missing or damaged."""
    document = json.loads((folder / MANIFEST_NAME).read_text(encoding="utf-8"))
    return document["content"]["metadata"]


def is_finished(tree: RLConfig | SFTConfig) -> bool:
    """Whether the run in `run.dir` has made all of `run.steps` and written its model, so that
    nothing is left to do."""
    folder, made = tree.run.dir, exported_step(tree)
    if tree.run.resume != "auto" or made is None or made < tree.run.steps or is_locked(folder):
        return False
    return _has_ended_well(folder)


def _has_ended_well(folder: Path) -> bool:
    end = RunFolder.read(folder, has_ended=True).end
    return end is not None and end["kind"] == "finished"


def exported_step(tree: RLConfig | SFTConfig) -> int | None:
    """The step of which the run in `run.dir` has written all trained models. None if there is
    none."""
    roles = ["model"]
    if isinstance(tree, RLConfig) and tree.algorithm.needs_critic:
        roles.append("critic")
    try:
        step = min(_step_of(tree.run.dir, role) for role in roles)
        written_s = (tree.run.dir / "model" / MANIFEST_NAME).stat().st_mtime
        is_older = exported_last(tree).stat().st_mtime < written_s
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return None if tree.model.lora.rank > 0 and is_older else step


def _step_of(run: Path, role: str) -> int:
    """The step of the exported model of a role. Raises as `_manifest_entry`, and ValueError if the
    step is unknown.

    Manifests of older versions have no step. Those versions wrote a model right after the state of
    its step: it belongs to the newest state, unless that is newer.
    """
    entry = _manifest_entry(run / role)
    if "step" in entry:
        return int(entry["step"])
    newest = newest_step(run)
    if newest is None:
        raise ValueError(f"{run} holds no state")
    saved_s = _manifest_entry(run / "checkpoints" / f"step_{newest}")["saved_at"]
    if saved_s > (run / role / MANIFEST_NAME).stat().st_mtime:
        raise ValueError(f"{run / role} is of an earlier step")
    return newest


def exported_last(tree: RLConfig | SFTConfig) -> Path:
    """The last file that an export writes."""
    inner = "adapter/adapter_config.json" if tree.model.lora.rank > 0 else "model/config.json"
    return tree.run.dir / inner


def changed_settings(tree: RLConfig | SFTConfig) -> dict[str, str]:
    """Settings and function code that differ from the run in `run.dir`, by key, with both values.
    Settings that only say how far the run goes and where it starts are left out."""
    before = _flat(saved_config(tree.run.dir)) | _saved_digests(tree.run.dir)
    now = _flat(yaml.safe_load(dump_config(tree))) | _function_digests(tree)
    return {
        key: f"{key} is {now[key]}, was {before[key]}"
        for key in now
        if key in before and before[key] != now[key] and key not in _HOW_FAR
    }


_HOW_FAR = ("run.dir", "run.resume", "run.steps")
_OF_RECORDS = ("log.", "checkpoint.")
"""Sections whose settings do not change the training."""


def require_resumable(tree: RLConfig | SFTConfig, *, newest: int | None) -> None:
    """Raise UserError if the run in `run.dir` cannot be resumed with this configuration.

    That is so if it belongs to another command. If it has checkpoints (the latest of step
    `newest`), or has ended with its model alone, it is also so if it trains another model, has
    another seed, has made all steps with other settings or cannot make more, or if `run.resume` is
    never.
    """
    run = tree.run
    _require_same_command(run.dir, saved_config(run.dir), tree)
    made = exported_step(tree)
    if newest is None:
        if made is None or not _has_ended_well(run.dir):
            return
        _require_no_more(tree, made)
        newest = made
    if run.resume == "never":
        raise UserError(
            f"run.resume is never, but run.dir={str(run.dir)!r} holds checkpoints. Choose another "
            "run.dir, or run.resume=auto to go on from them."
        )
    _require_same_model(run.dir, tree.model)
    changed = changed_settings(tree)
    if "run.seed" in changed:
        raise UserError(
            f"{changed['run.seed']} in the run that run.dir={str(run.dir)!r} holds: the order of "
            "its rows and its samples follow from it. Choose another run.dir for a run with this "
            "seed, or set run.seed as it was to go on."
        )
    listed = [text for key, text in changed.items() if not key.startswith(_OF_RECORDS)]
    if listed and newest >= run.steps and run.resume == "auto":
        raise UserError(
            f"run.dir={str(run.dir)!r} holds a run that has made its {newest} steps, so nothing is "
            f"left to train, and settings have changed since: {'; '.join(listed)}. Choose another "
            "run.dir to train with these, or raise run.steps to go on with them from there."
        )


def _require_no_more(tree: RLConfig | SFTConfig, made: int) -> None:
    """Raise UserError if a run that ended after `made` steps, with its model but no state, would
    run again: that would replace the model."""
    run = tree.run
    if run.steps > made or run.resume != "auto":
        model = str(run.dir / "model")
        raise UserError(
            f"run.dir={str(run.dir)!r} holds a run that has ended after step {made}, and its model "
            "alone: its state was not saved (checkpoint.every_n_steps was 0, or it did not fit). "
            "So it cannot be extended, and beginning again would replace the model. Choose another "
            f"run.dir; model.path={model!r} there begins with this model."
        )


def _flat(tree: Any, above: str = "") -> dict[str, Any]:
    """Flatten a tree to values by dotted key. A list is one value."""
    if not isinstance(tree, dict):
        return {above: tree}
    parts = [_flat(value, f"{above}.{key}" if above else key) for key, value in tree.items()]
    return {key: value for part in parts for key, value in part.items()}


def save_config(cfg: RLConfig | SFTConfig, chosen: Mapping[str, Any] | None = None) -> None:
    """Write the configuration into its run folder, with a record of the model, of the functions'
    code, and of the values by key that were `chosen` for settings that are `auto`. Called once
    nothing can refuse a resume any more."""
    write_whole(cfg.run.dir / CONFIG, dump_config(cfg), "run.dir")
    write_whole(cfg.run.dir / _MODEL, json.dumps(_identity(cfg.model), indent=2), "run.dir")
    functions = json.dumps(_function_digests(cfg), indent=2)
    write_whole(cfg.run.dir / _FUNCTIONS, functions, "run.dir")
    if chosen:
        write_whole(cfg.run.dir / _CHOSEN, json.dumps(chosen, indent=2), "run.dir")
    else:
        (cfg.run.dir / _CHOSEN).unlink(missing_ok=True)


def kept_choices(cfg: RLConfig | SFTConfig) -> Mapping[str, Any]:
    """The values by key that the run in `run.dir` has chosen for settings that are `auto`. Empty if
    there is no checkpoint to resume from. Raises UserError if the record is damaged."""
    record = cfg.run.dir / _CHOSEN
    if newest_step(cfg.run.dir) is None or not record.is_file():
        return {}
    try:
        held = json.loads(record.read_text(encoding="utf-8"))
    except ValueError:
        held = None
    if not isinstance(held, dict) or not all(isinstance(value, str) for value in held.values()):
        raise UserError(
            f"{str(record)!r}, which says what the run has chosen for settings that are auto, is "
            "damaged. Remove it to choose again, or name the values in the recipe."
        )
    return held


def saved_config(folder: Path) -> dict[str, Any]:
    """The configuration of the run in the folder, empty if there is none. Raises UserError if it
    cannot be read."""
    _, saved = read_config(folder)
    return saved


def _function_digests(cfg: RLConfig | SFTConfig) -> dict[str, str]:
    """Digests of the code of rewards, environment and filter, by key, if this host has the code."""
    specs: dict[str, str] = {}
    if isinstance(cfg, RLConfig):
        specs |= {f"reward.functions.{i}.fn": f.fn for i, f in enumerate(cfg.reward.functions)}
        specs |= {f"env.tools.{i}": spec for i, spec in enumerate(cfg.env.tools)}
        specs |= {} if cfg.env.path is None else {"env.path": cfg.env.path}
    if cfg.data.filter is not None:
        specs["data.filter"] = cfg.data.filter
    digests = {f"the code of {key} ({spec})": code_digest(spec) for key, spec in specs.items()}
    return {what: digest for what, digest in digests.items() if digest is not None}


def _saved_digests(folder: Path) -> dict[str, str]:
    """Recorded digests of the run in the folder. Empty if none were recorded or they are
    damaged."""
    try:
        held = json.loads((folder / _FUNCTIONS).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return held if isinstance(held, dict) else {}


def _require_same_command(folder: Path, saved: Mapping[str, Any], tree: Section) -> None:
    """Raise UserError if the folder's run belongs to another command."""
    own, other = (training_command(config) for config in (tree.model_dump(), saved))
    if saved and own != other:
        raise UserError(
            f"run.dir={str(folder)!r} holds a run of `hone {other}`: choose another run.dir. What "
            f"it has trained is in its folder `model`, for model.path."
        )


def _identity(model: ModelConfig) -> dict[str, Any]:
    """The properties by which two models are the same."""
    folder = Path(model.path)
    config = folder / "config.json"
    return {
        "path": _place(model.path),
        "init": model.init,
        "config": json.loads(config.read_text(encoding="utf-8")) if config.is_file() else None,
    }


def _place(path: str) -> str:
    """Absolute path of a folder, or the name of a model on the hub."""
    local = Path(path).exists() or must_be_local(path)
    return str(Path(path).resolve()) if local else path


def _require_same_model(folder: Path, model: ModelConfig) -> None:
    """Raise UserError if the folder's run trains another model than `model`."""
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
    """The record of the model that `save_config` wrote. Raises UserError if it is damaged."""
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
