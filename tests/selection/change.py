"""What differs from the last landed state, as git and CI's own record know it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

STATE_VARIABLE = "HONE_CI_STATE"
"""Names the file in which CI keeps what it knows between runs; by default it is
`~/.local/state/hone/ci.json`, outside the clone, which is fresh every time."""


@dataclass(frozen=True)
class Record:
    """What CI remembers: the last commit that passed, and the number at which each unit ran."""

    passed: str | None = None
    last_run: dict[str, int] = field(default_factory=dict)


def state_file() -> Path:
    default = Path.home() / ".local" / "state" / "hone" / "ci.json"
    return Path(os.environ.get(STATE_VARIABLE) or default)


def read_record(file: Path) -> Record:
    """The record; an empty one where there is none yet, or where a file is no record."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        return Record(found["passed"], {str(k): int(v) for k, v in found["last_run"].items()})
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return Record()


def write_record(file: Path, commit: str, number: int, units: Iterable[str]) -> None:
    """Note that a commit has passed, with the costly units that ran on it. Raises OSError where the
    file cannot be written."""
    last_run = read_record(file).last_run | dict.fromkeys(units, number)
    text = json.dumps({"passed": commit, "last_run": dict(sorted(last_run.items()))}, indent=1)
    file.parent.mkdir(parents=True, exist_ok=True)
    own = file.with_name(f"{file.name}.{os.getpid()}")
    own.write_text(text, encoding="utf-8")
    own.replace(file)


@dataclass(frozen=True)
class Change:
    """The files that differ from the base, in the working tree too; None without a base."""

    base: str | None
    why: str
    files: frozenset[str] | None
    head: str | None
    number: int
    """First-parent commits up to `head`."""


def read_change(root: Path, record: Record) -> Change:
    """Find the base and what differs from it."""
    base, why = _base(root, record)
    files = None
    if base is not None:
        changed = _git(root, "diff", "--name-only", "--no-renames", base)
        new = _git(root, "ls-files", "--others", "--exclude-standard")
        if changed is None or new is None:
            raise ValueError(f"git cannot compare the working tree with the base {base}")
        files = frozenset((*changed.splitlines(), *new.splitlines()))
    head = _git(root, "rev-parse", "HEAD")
    number = int(_git(root, "rev-list", "--count", "--first-parent", "HEAD") or 0)
    return Change(base, why, files, head, number)


def _base(root: Path, record: Record) -> tuple[str | None, str]:
    if name := os.environ.get("BASE"):
        commit = _git(root, "rev-parse", "--verify", "--quiet", f"{name}^{{commit}}")
        if commit is None:
            raise ValueError(
                f"BASE={name} names no commit of this repository. Give a commit, a branch or a "
                "tag, or leave BASE out."
            )
        return commit, "BASE"
    head = _git(root, "rev-parse", "HEAD")
    if head is None:
        return None, "this is no git repository"
    for branch in ("origin/HEAD", "origin/main"):
        fork = _git(root, "merge-base", "HEAD", branch)
        if fork is not None and fork != head:
            return fork, f"where this branch left {branch}"
    if record.passed is None:
        if _git(root, "status", "--porcelain"):
            return head, "what is not committed; no commit is known that CI passed"
        return None, "no commit is known that CI passed"
    fork = _git(root, "merge-base", record.passed, "HEAD")
    if fork is None:
        return None, "the last commit that CI passed is not part of this history"
    return fork, "the last commit that CI passed"


def _git(root: Path, *arguments: str) -> str | None:
    """What git prints; None where it fails or is not installed."""
    try:
        done = subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=False
        )
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
