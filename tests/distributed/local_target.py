"""What workers of this host make in the tests of their carrier."""

from __future__ import annotations

import os
import sys
import time
from typing import Any

from hone.errors import UserError


class Target:
    def __init__(self, cfg: Any) -> None:
        self._cfg = cfg

    def describe(self) -> dict[str, Any]:
        named = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS")
        values = {name: os.environ.get(name) for name in named}
        return {"pid": os.getpid(), "cfg": self._cfg, "argv": sys.orig_argv, **values}

    def hang(self) -> None:
        sys.stderr.write("the last words\n")
        sys.stderr.flush()
        time.sleep(3600)

    def follow(self) -> None:
        self.hang()


def build(role: str, cfg: Any, name: str) -> Target:
    if cfg == "refuse":
        raise UserError(f"{name}, a {role}, is not made")
    if cfg == "break the second":
        if os.environ["RANK"] == "1":
            raise KeyError("no room")
        time.sleep(3600)  # as in a collective that the other rank never comes to
    if cfg == "break":
        raise KeyError("of ours")
    return Target(cfg)
