"""Settings that a result of `hone eval` or `hone generate` was made with. Only the same command
replaces a result.

The settings are stored next to the result as YAML, which is a valid recipe. Comments above them
identify the files: size and modification time of `model.path`, and the content of local data.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import yaml

from hone.config.load import dump_config
from hone.config.tree import EvaluateConfig, GenerateConfig
from hone.errors import UserError
from hone.observe.differences import differences, flat
from hone.observe.resumable_jsonl import parts_folder
from hone.observe.run_folder import EVAL_CONFIG, EVAL_METRICS
from hone.paths import settings_file

__all__ = ["require_same_settings", "settings_text"]

_HEAD = "# What this was made with; only the same command replaces it.\n"
_HASHED_BYTES = 1 << 28
"""Bytes of each data file that are hashed, from its beginning: a quarter of a second."""
_MAX_LISTED = 4


def settings_text(cfg: EvaluateConfig | GenerateConfig) -> str:
    """Text of the settings file of a result."""
    meant = "".join(f"# {key}: {value}\n" for key, value in _files(cfg).items())
    return f"{_HEAD}{meant}{dump_config(cfg)}"


def require_same_settings(cfg: EvaluateConfig | GenerateConfig) -> None:
    """Raise UserError if a result of other settings, weights or data, or any other file, exists at
    the output's path. A failed evaluation is not a result."""
    if isinstance(cfg, EvaluateConfig):
        key, place, noun = "run.dir", cfg.run.dir, "an evaluation"
        result, settings = cfg.run.dir / EVAL_METRICS, cfg.run.dir / EVAL_CONFIG
        existing = [result] if result.is_file() else []
    else:
        key, place, noun = "output", cfg.output, "completions"
        result, settings = cfg.output, settings_file(cfg.output)
        places = (result, parts_folder(cfg.output), settings)
        existing = [place for place in places if place.exists()]
    if not existing:
        return
    text = settings.read_text(encoding="utf-8", errors="replace") if settings.is_file() else ""
    files = " and ".join(f"'{file}'" for file in existing)
    remedy = f"Name another {key}, or remove {files} to make it again."
    if existing == [settings] and text.startswith(_HEAD):
        return  # the settings of a removed result
    if not text.startswith(_HEAD):
        raise UserError(f"'{existing[-1]}' exists, and its settings are not recorded. {remedy}")
    before, now = _flat(text), _flat(settings_text(cfg))
    changed = [
        f"{name} is {value}, was {earlier}"
        for name, earlier, value in differences([before, now])
        if not _is_place(name, before)
    ]
    if changed:
        listed = changed[:_MAX_LISTED] + [f"{len(changed) - _MAX_LISTED} more"] * (
            len(changed) > _MAX_LISTED
        )
        raise UserError(
            f"{key} '{place}' exists, with {noun} of other settings: {'; '.join(listed)}. {remedy}"
        )


def _is_place(name: str, before: dict[str, str]) -> bool:
    """Whether a setting is a path to something whose content is compared."""
    owner, _, key = name.rpartition(".")
    return name in ("run.dir", "output") or (key == "path" and owner in before)


def _files(cfg: EvaluateConfig | GenerateConfig) -> dict[str, str]:
    """Identification of the files that the settings name, by key."""
    identities: dict[str, str] = {}
    if (folder := Path(cfg.model.path)).is_dir():
        files = [file.stat() for file in folder.iterdir() if file.is_file()]
        at = time.gmtime(max((file.st_mtime for file in files), default=0))
        num_bytes = sum(file.st_size for file in files)
        identities["weights"] = f"{num_bytes:,} bytes, written {time.strftime('%F %T', at)} UTC"
    for key, path in _local_data(cfg):
        identities[key] = f"'{path.name}', {path.stat().st_size:,} bytes, {_digest(path)}"
    return identities


def _local_data(cfg: EvaluateConfig | GenerateConfig) -> Iterator[tuple[str, Path]]:
    for split in ("train", "eval"):
        for index, source in enumerate(getattr(cfg.data, split)):
            path = Path(source.path).expanduser()
            if path.is_file():
                yield f"data.{split}.{index}", path


def _digest(path: Path) -> str:
    digest, left = blake2b(digest_size=8), _HASHED_BYTES
    with path.open("rb") as file:
        while left > 0 and (block := file.read(min(left, 1 << 20))):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def _flat(text: str) -> dict[str, str]:
    """Settings by dotted keys, including those in the comments."""
    comments = [line[2:].partition(": ") for line in text.splitlines() if line.startswith("# ")]
    settings: Any = yaml.safe_load(text)
    return {key: value for key, _, value in comments[1:]} | flat(settings)
