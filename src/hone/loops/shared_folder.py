"""Whether all hosts of a run see its folder as the same one."""

from __future__ import annotations

import os
import socket
import time
import uuid
from contextlib import suppress
from pathlib import Path

from hone.config.errors import UserError
from hone.distributed.mesh import Mesh
from hone.distributed.processes import processes
from hone.observe.disk import writing

__all__ = ["require_shared"]

_VISIBLE_S = 10.0
"""What a new file may take to be seen on other hosts: network file systems remember what a folder
held some seconds ago."""


def require_shared(folder: Path, everyone: Mesh) -> None:
    """Raise UserError, on every process, where a host does not see the first one's `folder`: each
    writes its parts of a checkpoint there, and reads those of the others. It is made for this.

    Collective; nothing where all processes are on one host.
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
        first, mark = everyone.broadcast((host, mark))
        seen = everyone.gather((host, _is_seen(mark)))
    finally:
        if everyone.is_first:
            mark.unlink(missing_ok=True)
    blind = sorted({name for name, sees in seen if not sees})
    if blind:
        if is_new:
            with suppress(OSError):  # what is in there by now is not ours
                folder.rmdir()
        raise UserError(
            f"run.dir {str(mark.parent)!r} of {first} is another folder, or none, on "
            f"{', '.join(blind)}. All hosts write checkpoints there and read them: name a folder "
            "of a file system that all share, under the same path, and copy into it what an "
            "earlier launch has left on each."
        )


def _is_seen(mark: Path) -> bool:
    until = time.monotonic() + _VISIBLE_S
    while True:
        with suppress(OSError):
            if mark.name in os.listdir(
                mark.parent
            ):  # asks the server, as a look at the file may not
                return True
        if time.monotonic() > until:
            return False
        time.sleep(0.1)
