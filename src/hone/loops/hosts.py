"""Checks that all hosts of a run see the same files: those that it reads, and the folder it
writes."""

from __future__ import annotations

import hashlib
import os
import socket
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from hone.config.plan import RunPlan
from hone.distributed.mesh import Mesh
from hone.distributed.processes import processes
from hone.errors import UserError
from hone.observe.disk import writing
from hone.paths import data_suffix, files_that_match, has_wildcards, is_url, local_path

__all__ = ["require_same_inputs", "require_shared"]

_OF_MODELS = (".safetensors", ".json", ".jinja", ".model", ".bin")
_PROBE_BYTES = 2**16
"""Bytes hashed at the start, middle and end of a file. Weights of different training differ
everywhere, so that these suffice."""

_VISIBLE_S = 10.0
"""Longest time until a new file is seen on other hosts. Network file systems cache folder listings
for some seconds."""


def require_shared(folder: Path, everyone: Mesh) -> None:
    """Raise UserError on every process if a host does not see the `folder` of the first one. Each
    process writes its parts of a checkpoint there and reads those of the others. The folder is
    created for the check.

    Collective. Does nothing if all processes are on one host.
    """
    if not processes().has_other_hosts:
        return
    host = socket.gethostname()
    mark = folder.absolute() / f".seen_by_all_{uuid.uuid4().hex}"
    is_new = False
    if everyone.is_first:
        with writing(folder, "run.dir"):
            is_new = not folder.exists()
            folder.mkdir(parents=True, exist_ok=True)
            mark.touch()
    try:
        first, place, name = everyone.broadcast((host, f"{mark.parent}", mark.name))
        seen = everyone.gather((host, _is_seen(folder.absolute() / name)))
    finally:
        if everyone.is_first:
            mark.unlink(missing_ok=True)
    blind = sorted({name for name, sees in seen if not sees})
    if blind:
        if is_new:
            with suppress(OSError):  # another program may have written into it
                folder.rmdir()
        raise UserError(
            f"run.dir {place!r} of {first} is another folder, or none, on "
            f"{', '.join(blind)}. All hosts write checkpoints there and read them: name a folder "
            "of a file system that all share, under the same path, and copy into it what an "
            "earlier launch has left on each."
        )


def _is_seen(mark: Path) -> bool:
    until = time.monotonic() + _VISIBLE_S
    while True:
        with suppress(OSError):
            # Opening a folder makes a network file system ask its server again.
            for parent in reversed(mark.parents):
                os.close(os.open(parent, os.O_RDONLY))
            if mark.name in os.listdir(mark.parent):
                return True
        if time.monotonic() > until:
            return False
        time.sleep(0.1)


def require_same_inputs(plan: RunPlan, everyone: Mesh) -> None:
    """Raise UserError on every process if a host has other weights or data under the paths of
    `plan` than the first one. Each reads its own part, and the run would train on a mixture.

    Compares names, sizes and some of the content. Collective. Does nothing if all processes are on
    one host.
    """
    own = processes()
    if not own.has_other_hosts:
        return
    digests = {key: _digests(path) for key, path in _inputs(plan)} if own.local_rank == 0 else {}
    of_all: list[tuple[str, dict[str, dict[str, str]]]]
    of_all = everyone.gather((socket.gethostname(), digests))
    first, expected = of_all[0]
    for host, files_by_key in of_all:
        for key, path in _inputs(plan) if files_by_key else ():
            files, wanted = files_by_key[key], expected[key]
            if files == wanted:
                continue
            names = sorted(n for n in files | wanted if files.get(n) != wanted.get(n))
            raise UserError(
                f"{key} {path!r} is not the same on {host} as on {first}: {', '.join(names[:3])}"
                f"{' and others' * (len(names) > 3)}. Each host reads its own parts: copy the "
                "files again, or name a place that all share."
            )


def _inputs(plan: RunPlan) -> Iterator[tuple[str, str]]:
    paths: dict[str, str] = {}
    for role in plan.roles.values():
        if role.name == "reward_model" and (role.has_own_devices or plan.is_apart):
            continue  # read on one host alone
        paths.setdefault(role.model.path, role.path_key)
    yield from ((key, path) for path, key in paths.items())
    for section in ("train", "eval"):
        for index, source in enumerate(getattr(plan.data, section)):
            yield f"data.{section}.{index}.path", source.path


def _digests(path: str) -> dict[str, str]:
    """Digests by file name of the files under a local path, or that a pattern matches. Empty for a
    URL and for a name of the hub."""
    place = local_path(path)
    if place.is_dir():
        found = (file for file in place.iterdir() if file.is_file())
        files = [file for file in found if file.suffix in _OF_MODELS or data_suffix(file)]
    elif place.is_file():
        files = [place]
    elif has_wildcards(path) and not is_url(path):
        return {str(file): _digest(file) for file in files_that_match(str(place))}
    else:
        files = []
    return {file.name: _digest(file) for file in files}


def _digest(file: Path) -> str:
    num_bytes = file.stat().st_size
    digest = hashlib.blake2b(f"{num_bytes}".encode(), digest_size=8)
    with file.open("rb") as content:
        for start in (0, num_bytes // 2, max(num_bytes - _PROBE_BYTES, 0)):
            content.seek(start)
            digest.update(content.read(_PROBE_BYTES))
    return digest.hexdigest()
