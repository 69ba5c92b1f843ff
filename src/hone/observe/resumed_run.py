"""What run a folder holds, and whether a configuration may go on with it. Needs no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hone.config.base import Section
from hone.config.errors import UserError
from hone.config.load import dump_config
from hone.config.model import ModelConfig
from hone.config.paths import must_be_local
from hone.config.tree import RLConfig, SFTConfig
from hone.observe.run_folder import CONFIG, read_config
from hone.observe.whole_file import write_whole

__all__ = ["require_resumable", "save_config", "saved_config"]

_MODEL = "model.json"
"""Which model the run trains: its place, resolved, how its weights began, and, of a local folder,
`config.json`."""
_WITHOUT_EFFECT = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")
"""Keys of `config.json` that may change without another architecture."""


def require_resumable(tree: RLConfig | SFTConfig, *, has_checkpoints: bool) -> None:
    """Raise UserError where the run that `run.dir` holds is of another command, trains another
    model, or has checkpoints and `run.resume` is never."""
    run = tree.run
    _require_same_command(run.dir, saved_config(run.dir), tree)
    if not has_checkpoints:
        return
    if run.resume == "never":
        raise UserError(
            f"run.resume is never, but run.dir={str(run.dir)!r} holds checkpoints. Choose another "
            "run.dir, or run.resume=auto to go on from them."
        )
    _require_same_model(run.dir, tree.model)


def save_config(cfg: RLConfig | SFTConfig) -> None:
    """Write the configuration into its run folder, and which model it means: once nothing stands
    against resuming there."""
    write_whole(cfg.run.dir / CONFIG, dump_config(cfg), "run.dir")
    write_whole(cfg.run.dir / _MODEL, json.dumps(_identity(cfg.model), indent=2), "run.dir")


def saved_config(folder: Path) -> dict[str, Any]:
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
