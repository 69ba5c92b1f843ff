"""What a step does where device memory ends in its passes.

    found = repair.until_it_fits("backward", rows, compute, discard=policy.drop_gradient)

One process gives up what the attempt has made, takes the next rung and computes the same step
again: fewer tokens a pass, down to the longest row, then `recompute full`. Weights of tokens are
settled over the whole step, so its gradient is that of a step that never failed.

With several processes every pass is a sequence of collectives: the others are inside one. The step
is aborted, and a new launch goes on from the last checkpoint with the rung that is noted.

    <run.dir>/out_of_memory.json       {"policy/backward": {"configured": 16384, "now": 8192}}

What is noted holds for later launches, until the setting is changed or the file removed.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from hone.checkpoint.random_state import capture_random_state, restore_random_state
from hone.config.trainer import SFTTrainerConfig, cap_key
from hone.distributed.mesh import Mesh
from hone.models.failed_pass import free_failed_pass
from hone.observe.metrics import Last, Metrics, Sum
from hone.observe.whole_file import write_whole
from hone.trainer.batcher import Batcher, PassKind
from hone.trainer.recompute import recompute_fully
from hone.types import Row

if TYPE_CHECKING:
    from hone.planner.rungs import Rungs

__all__ = ["Repair", "RestartError"]

T = TypeVar("T")
NOTES = "out_of_memory.json"
_UNITS = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10, "bytes": 1}
_log = logging.getLogger(__name__)


class RestartError(torch.OutOfMemoryError):
    """Memory has ended among several processes; another launch goes on with less."""


class Repair:
    """The rungs that the passes of one role have taken."""

    def __init__(
        self,
        cfg: SFTTrainerConfig,
        mesh: Mesh,
        *,
        role: str,
        folder: Path | None = None,
        rungs: Rungs | None = None,
    ) -> None:
        """`rungs` are what a run can give up; without, nothing is, and errors stay as they are.
        `folder` keeps notes, which are taken over and told. Collective."""
        self.num_failures = 0
        """Since `take_metrics` was last called."""
        self._mesh = mesh
        self._role = role
        self._path = None if folder is None else folder / NOTES
        self._rungs = rungs
        self._noted = self._read_notes()
        self._own = cfg
        if self._in_force("recompute", cfg.recompute) is not None:
            cfg = recompute_fully(cfg)
        self.cfg = cfg
        """The configuration, with what is noted."""

    def adopt(self, batcher: Batcher, recompute: Callable[[], bool] = lambda: False) -> None:
        """Lower the caps of `batcher` as noted, and from now on where memory ends. `recompute`
        switches recomputation of all layers on; it returns False where there is none to switch."""
        self._batcher, self._recompute = batcher, recompute
        kinds: tuple[PassKind, PassKind] = ("backward", "forward")
        for kind in kinds:
            if (cap := self._in_force(kind, batcher.configured(kind))) is not None:
                batcher.lowered[kind] = cap

    def take_metrics(self) -> Metrics:
        """Caps that are lowered, and how often memory has ended since this was last called."""
        caps = self._batcher.lowered.items()
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
        """What `compute` returns, whose passes over `rows` are cut by the batcher. After each
        failure what it held is freed, `discard` called and random generators put back.

        Raises torch.OutOfMemoryError where no rung is left, and RestartError with several
        processes.
        """
        if self._rungs is None:
            return compute()
        random_state = capture_random_state()
        may_be_fragments = True
        while True:
            try:
                return compute()
            except torch.OutOfMemoryError as error:
                told = str(error)
                discard()
                free_failed_pass(error, self._mesh.device)
            restore_random_state(random_state)
            self.num_failures += 1
            place = f"out of memory in a {kind} pass of the {self._role}"
            if may_be_fragments and self._mesh.world.size == 1 and _is_fragmented(told):
                may_be_fragments = False
                _log.warning(
                    "warning: %s, though enough was free in fragments. The step is computed again "
                    "as it is. If this comes often, set PYTORCH_CUDA_ALLOC_CONF="
                    "expandable_segments:True in the environment.",
                    place,
                )
                continue
            rung = self._take_rung(kind, rows, told)
            if self._mesh.world.size > 1:
                raise RestartError(
                    f"{place}. Other processes wait in the same step, which is lost: started "
                    f"again, the run goes on from its last checkpoint with {rung}, as {self._path} "
                    f"says. Set that in the recipe to keep it.\nFrom torch: {told}"
                )
            _log.warning(
                "warning: %s. The step is computed again, and the run goes on, with %s. Set that "
                "in the recipe to keep it.",
                place,
                rung,
            )

    def exhausted(self, what: str, told: str) -> torch.OutOfMemoryError:
        """The end of a run in which `what` does not fit, and the rungs that need another start."""
        rest = "" if self._rungs is None else self._rungs.rest()
        return torch.OutOfMemoryError(
            f"{what} of the {self._role} does not fit, and a run under way has nothing else to "
            f"give up. {rest}\nFrom torch: {told}"
        )

    def _take_rung(self, kind: PassKind, rows: Sequence[Row], told: str) -> str:
        """Give up the next, note it, and say which and what it costs."""
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
            raise self.exhausted(f"a {kind} pass over the longest row alone", told)
        assert self._rungs is not None
        return f"{key} {value}{self._rungs.cost({key: value})}"

    # -- notes -----------------------------------------------------------------------------------

    def _in_force(self, name: str, configured: object) -> Any:
        """What is noted in place of a setting, and is told; None without a note, or where the
        setting has changed since."""
        noted = self._noted.get(f"{self._role}/{name}")
        if noted is None or noted["configured"] != configured:
            return None
        if self._mesh.is_first:
            _log.warning(
                "warning: %s of the %s is %s in place of %s, with which memory has ended; "
                "remove %s to try again",
                "recompute" if name == "recompute" else f"the cap of {name} passes",
                self._role,
                noted["now"],
                configured,
                self._path,
            )
        return noted["now"]

    def _read_notes(self) -> Mapping[str, Mapping[str, Any]]:
        """As the first process finds them."""
        found: Mapping[str, Mapping[str, Any]] = {}
        if self._path is not None and self._mesh.is_first and self._path.is_file():
            found = json.loads(self._path.read_text(encoding="utf-8"))
        return self._mesh.broadcast(found) if self._path is not None else found

    def _note(self, name: str, configured: object, now: object) -> None:
        if self._path is None:
            return
        notes: dict[str, Any] = {}
        if self._path.is_file():  # other roles have their own
            notes = json.loads(self._path.read_text(encoding="utf-8"))
        notes[f"{self._role}/{name}"] = {"configured": configured, "now": now}
        write_whole(self._path, json.dumps(notes, indent=1) + "\n", "run.dir")


def _is_fragmented(told: str) -> bool:
    """Whether torch's allocator held, in pieces, as much as was asked for."""
    asked = re.search(r"Tried to allocate ([\d.]+) (GiB|MiB|KiB|bytes)", told)
    free = re.search(r"([\d.]+) (GiB|MiB|KiB|bytes) is reserved by PyTorch but unallocated", told)
    if asked is None or free is None:
        return False
    return float(free[1]) * _UNITS[free[2]] >= float(asked[1]) * _UNITS[asked[2]]
