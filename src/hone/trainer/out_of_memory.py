"""Recovery of a step whose passes run out of device memory.

    result = repair.until_it_fits("backward", rows, compute, discard=policy.drop_gradient)

A single process discards the results of the attempt, reduces its memory use and computes the same
step again: first with fewer tokens a pass, down to the longest row, then with `recompute full`. The
weights of tokens are fixed over the whole step, so its gradient is that of a step that never
failed.

With several processes every pass is a sequence of collectives, and the others wait inside one. The
step is aborted, and a new launch goes on from the last checkpoint with the noted reduction.

    <run.dir>/out_of_memory.json       {"policy/backward": {"configured": 16384, "now": 8192}}

A note applies to later launches, until the setting is changed or the file removed.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import torch

from hone.checkpoint.random_state import capture_random_state, restore_random_state
from hone.distributed.mesh import Mesh
from hone.models.failed_pass import free_failed_pass
from hone.observe.metrics import Last, Metrics, Sum
from hone.observe.whole_file import write_whole
from hone.trainer.attempts import Attempts
from hone.trainer.batcher import Batcher, PassKind
from hone.trainer.settings import SFTTrainerConfig, cap_key
from hone.types import Row

__all__ = ["Repair", "RestartError"]

T = TypeVar("T")
NOTES = "out_of_memory.json"
_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "bytes": 1}
_log = logging.getLogger(__name__)


class RestartError(torch.OutOfMemoryError):
    """One of several processes ran out of memory; a new launch goes on with a reduced setting."""


class Repair(Attempts):
    """Retries passes of one role with less memory after out-of-memory errors."""

    def __init__(
        self,
        cfg: SFTTrainerConfig,
        mesh: Mesh,
        *,
        role: str,
        folder: Path | None = None,
        on_exhausted: Callable[[], str] | None = None,
    ) -> None:
        """`on_exhausted` is called when no further reduction is possible, and returns a sentence on
        the settings that would help; without it there is no retry, and errors are raised unchanged.
        `folder` keeps notes of reductions, which are applied and logged. Collective."""
        self._mesh = mesh
        self._role = role
        self._path = None if folder is None else folder / NOTES
        self._on_exhausted = on_exhausted
        self._noted = self._read_notes()
        self._own = cfg
        super().__init__(cfg, role=role)
        if self._in_force("recompute", cfg.recompute) is not None:
            self.cfg = cfg.recomputing_all()

    def adopt(self, batcher: Batcher, recompute: Callable[[], bool] = lambda: False) -> None:
        """Apply the noted caps to `batcher`, and lower them after later out-of-memory errors.
        `recompute` switches recomputation of all layers on; it returns False where it cannot."""
        self._batcher, self._recompute = batcher, recompute
        kinds: tuple[PassKind, PassKind] = ("backward", "forward")
        for kind in kinds:
            if (cap := self._in_force(kind, batcher.configured(kind))) is not None:
                batcher.oom_caps[kind] = cap

    def take_metrics(self) -> Metrics:
        """The reduced caps, and the number of out-of-memory errors since the last call."""
        caps = self._batcher.oom_caps.items()
        metrics: Metrics = {f"mem/{self._role}_{kind}_cap": Last(cap) for kind, cap in caps}
        if self.num_failures:
            metrics[f"mem/{self._role}_replays"] = Sum(self.num_failures)
            self.num_failures = 0
        return metrics

    def until_it_fits(
        self,
        kind: PassKind,
        rows: Sequence[Row],
        compute: Callable[[], T],
        *,
        discard: Callable[[], None] = lambda: None,
    ) -> T:
        """Result of `compute`, retried after out-of-memory errors with the random state restored.

        Raises torch.OutOfMemoryError where no reduction is left, and RestartError with several
        processes.
        """
        if self._on_exhausted is None:
            return compute()
        random_state = capture_random_state()
        may_be_fragments = True
        while True:
            try:
                return compute()
            except torch.OutOfMemoryError as error:
                message = str(error)
                discard()
                free_failed_pass(error, self._mesh.device)
            restore_random_state(random_state)
            self.num_failures += 1
            place = f"out of memory in a {kind} pass of the {self._role}"
            if may_be_fragments and self._mesh.world.size == 1 and _is_fragmented(message):
                may_be_fragments = False
                _log.warning(
                    "warning: %s, though enough was free in fragments. The step is computed again "
                    "as it is. If this comes often, set PYTORCH_CUDA_ALLOC_CONF="
                    "expandable_segments:True in the environment.",
                    place,
                )
                continue
            reduction = self._reduce(kind, rows, message)
            if self._mesh.world.size > 1:
                raise RestartError(
                    f"{place}. Other processes wait in the same step, which is lost: started "
                    f"again, the run goes on from its last checkpoint with {reduction}, as "
                    f"{self._path} says. Set that in the recipe to keep it.\nFrom torch: {message}"
                )
            _log.warning(
                "warning: %s. The step is computed again, and the run goes on, with %s. Set that "
                "in the recipe to keep it.",
                place,
                reduction,
            )

    def _advice(self) -> str:
        return "" if self._on_exhausted is None else self._on_exhausted()

    def _reduce(self, kind: PassKind, rows: Sequence[Row], message: str) -> str:
        """Apply the next reduction and note it; returns the key and value that would configure
        it."""
        configured: object = self._batcher.configured(kind)
        now: object = self._batcher.lower(kind, rows, self._mesh)
        if isinstance(now, int):
            in_rows = self._batcher.counts_rows(kind)
            key, value = cap_key(self._role, kind, in_rows=in_rows), now
            self._note(kind, configured, now)
        elif kind == "backward" and self._recompute():
            key, value = f"{'critic' if self._role == 'critic' else 'trainer'}.recompute", "full"
            self._note("recompute", self._own.recompute, value)
        else:
            raise self.exhausted(f"a {kind} pass over the longest row alone", message)
        return f"{key} {value}"

    # -- notes -----------------------------------------------------------------------------------

    def _in_force(self, name: str, configured: object) -> Any:
        """The noted value that replaces a setting, which is also logged; None without a note, or
        where the setting has changed since."""
        noted = self._noted.get(f"{self._role}/{name}")
        if noted is None or noted["configured"] != configured:
            return None
        if self._mesh.is_first:
            _log.warning(
                "warning: %s of the %s is %s in place of %s, which ran out of memory; "
                "remove %s to try again",
                "recompute" if name == "recompute" else f"the cap of {name} passes",
                self._role,
                noted["now"],
                configured,
                self._path,
            )
        return noted["now"]

    def _read_notes(self) -> Mapping[str, Mapping[str, Any]]:
        """The notes that the first process reads, on all processes."""
        notes: Mapping[str, Mapping[str, Any]] = {}
        if self._path is not None and self._mesh.is_first and self._path.is_file():
            notes = json.loads(self._path.read_text(encoding="utf-8"))
        return self._mesh.broadcast(notes) if self._path is not None else notes

    def _note(self, name: str, configured: object, now: object) -> None:
        if self._path is None:
            return
        notes: dict[str, Any] = {}
        if self._path.is_file():  # which has notes of other roles too
            notes = json.loads(self._path.read_text(encoding="utf-8"))
        notes[f"{self._role}/{name}"] = {"configured": configured, "now": now}
        write_whole(self._path, json.dumps(notes, indent=1) + "\n", "run.dir")


def _is_fragmented(message: str) -> bool:
    """Whether torch's allocator had as much as was requested, in fragments."""
    asked = re.search(r"Tried to allocate ([\d.]+) (GiB|MiB|KiB|bytes)", message)
    free = re.search(
        r"([\d.]+) (GiB|MiB|KiB|bytes) is reserved by PyTorch but unallocated", message
    )
    if asked is None or free is None:
        return False
    return float(free[1]) * _UNITS[free[2]] >= float(asked[1]) * _UNITS[asked[2]]
