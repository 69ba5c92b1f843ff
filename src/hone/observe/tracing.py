"""Traces of one process for the section `profile`: its training, its engine, its allocations.

    tracing = Tracing(cfg.profile, folder, place="rank0_dp0_tp0_pp0", device=device, steps_done=0)
    spans = Spans(on_begin=tracing.begin, on_end=tracing.end)

Training is traced by its spans, an engine by its forward passes. A process has one profile at a
time: where an engine samples in the process of a trainer, whose profile is under way, the engine's
waits for a later pass of its rollout, and the other way round. On CUDA every span is an NVTX range.

Each trace says under `hone` which step it is of, for `hone trace`.
"""

from __future__ import annotations

import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from hone.observe.ranges import FACTS, RANGE
from hone.observe.settings import MemoryProfileConfig, ProfileConfig, RolloutProfileConfig

__all__ = ["PREPARATION", "UPDATE", "EngineTracer", "MemoryRecorder", "Tracing"]

PREPARATION, UPDATE = "experience", "train"
"""Spans of a step: the passes before the update, and the update."""
_TARGETS = {
    "train_overall": (PREPARATION, UPDATE),
    "train_log_probs": (PREPARATION, PREPARATION),
    "train_actor": (UPDATE, UPDATE),
}
"""First and last span of each target."""
_MAX_BYTES = 16 << 30
"""Limit of the traces that a process writes in a launch: those with stacks fill disks."""
_MAX_MEMORY_EVENTS = 200_000
_ACTIVITIES = {"cpu": ProfilerActivity.CPU, "gpu": ProfilerActivity.CUDA}

_log = logging.getLogger(__name__)
_profiling = threading.Lock()
"""Locked while this process records a profile: torch has one for all threads."""


class Tracing:
    """Records profiles of a training process, driven by its spans."""

    def __init__(
        self,
        cfg: ProfileConfig,
        folder: Path,
        *,
        place: str,
        device: torch.device,
        steps_done: int,
    ) -> None:
        """`place` is this process's rank and coordinates, for file names; `steps_done` is the
        number of updates before this launch. Starts the record of allocations if it is configured.
        """
        self._cfg, self._place, self._steps_done = cfg.train, place, steps_done
        self._folder = folder / "train_trace"
        self._num_steps = 0
        self._is_cuda = device.type == "cuda"
        self._writer = _Writer()
        self._profile: _Profile | None = None
        self._ended: tuple[_Profile, Path, dict[str, Any]] | None = None
        self._ranges: list[record_function] = []
        self._memory = MemoryRecorder(cfg.memory, folder / "memory_snapshot", place, device)

    def begin(self, path: str) -> None:
        """Called when a span begins."""
        first, _ = _TARGETS[self._cfg.target]
        if path == first and self._num_steps in self._cfg.steps and self._writer.is_open:
            cfg = self._cfg
            self._profile = _Profile.begin(
                _ACTIVITIES.values(),
                with_stack=cfg.with_stack,
                profile_memory=cfg.with_memory,
                with_flops=cfg.with_flops,
            )
            if self._profile is None:
                _log.warning("warning: an engine of this process is being traced, this step is not")
        if self._is_cuda:
            torch.cuda.nvtx.range_push(path)
        if self._profile is not None:
            self._ranges.append(record_function(f"{RANGE}{path}"))
            self._ranges[-1].__enter__()

    def end(self, path: str) -> None:
        """Called when a span has ended."""
        if self._is_cuda:
            torch.cuda.nvtx.range_pop()
        if self._ranges:
            self._ranges.pop().__exit__(None, None, None)
        _, last = _TARGETS[self._cfg.target]
        if path == last and self._profile is not None:
            name = f"{self._cfg.target}_{self._place}.{time.time_ns() // 1_000_000}.pt"
            facts = {"step": self._steps_done + self._num_steps + 1, "process": self._place}
            self._ended = self._profile, self._folder / f"{name}.trace.json.gz", facts
            self._profile = None
        if path == UPDATE:
            self._num_steps += 1
            self._memory.after(self._num_steps)

    @property
    def has_trace(self) -> bool:
        """Whether a finished profile waits for `write`, which takes seconds."""
        return self._ended is not None

    def write(self) -> None:
        """Write the profile of the span that has ended."""
        if self._ended is not None:
            record, path, facts = self._ended
            self._ended = None
            record.end(self._writer, path, facts)

    def close(self) -> None:
        """Stop recording."""
        self._memory.close()


class EngineTracer:
    """Records profiles of one engine rank, driven by its forward passes."""

    def __init__(self, cfg: RolloutProfileConfig, folder: Path, *, name: str, tp_rank: int) -> None:
        """`name` is the engine's name, such as `engine 0`."""
        self._cfg, self._folder = cfg, folder / "rollout_trace"
        self._name, self._tp_rank = name.replace(" ", ""), tp_rank
        self._rollout = -1
        self._num_left = Counter[str]()
        self._writer = _Writer()
        self._profile: _Profile | None = None
        self._stage = ""
        self._range: record_function | None = None

    def begin(self, rollout: int, *, is_prefill: bool) -> None:
        """Called when a forward pass of a rollout begins. `is_prefill` says whether it has prompts,
        not only decoding."""
        if rollout != self._rollout:
            self._rollout = rollout
            wanted = rollout in self._cfg.steps
            limit = self._cfg.num_forwards if self._cfg.num_forwards >= 0 else 1 << 62
            stages = ["prefill", "decode"] if self._cfg.by_stage else [""]
            self._num_left = Counter(dict.fromkeys(stages, limit if wanted else 0))
        kind = "prefill" if is_prefill else "decode"
        stage = kind if self._cfg.by_stage else ""
        if self._profile is not None and stage != self._stage:
            self._write()
        if not self._num_left[stage] or not self._writer.is_open:
            return
        if self._profile is None:
            self._stage = stage
            self._profile = _Profile.begin(
                [_ACTIVITIES[name] for name in self._cfg.activities],
                with_stack=self._cfg.with_stack,
                record_shapes=self._cfg.record_shapes,
            )
        if self._profile is not None:
            self._range = record_function(f"{RANGE}{kind}")
            self._range.__enter__()

    def end(self, *, is_idle: bool) -> None:
        """Called when a forward pass has ended. `is_idle` says that nothing is left to sample."""
        if self._range is None:
            return
        self._range.__exit__(None, None, None)
        self._range = None
        self._num_left[self._stage] -= 1
        if is_idle or not self._num_left[self._stage]:
            self._write()

    def _write(self) -> None:
        """Write the finished profile. Must come before another profile of this process begins."""
        assert self._profile is not None
        name = f"{self._name}-{time.time_ns() // 1_000_000}-TP-{self._tp_rank}"
        name += f"-{self._stage}" if self._stage else ""
        path = self._folder / f"rollout_{self._rollout}" / f"{name}.trace.json.gz"
        facts = {"step": self._rollout + 1, "process": f"{self._name} TP-{self._tp_rank}"}
        self._profile.end(self._writer, path, facts)
        self._profile = None


class MemoryRecorder:
    """Records the allocations of this process."""

    def __init__(
        self, cfg: MemoryProfileConfig, folder: Path, place: str, device: torch.device
    ) -> None:
        """Start recording. `place` is part of the file names."""
        self._after_steps, self._num_steps = cfg.after_steps, 0
        self._stem = folder / f"memory_snapshot_time{time.time_ns() // 1_000_000}_{place}"
        self._memray: Any = None
        self._is_recording = cfg.recorder != "none"
        if cfg.recorder == "torch":
            torch.cuda.memory._record_memory_history(max_entries=_MAX_MEMORY_EVENTS)  # pyright: ignore[reportPrivateUsage]
            # torch's documented hook; it is called before the error is raised.
            torch._C._cuda_attach_out_of_memory_observer(self._on_out_of_memory)  # pyright: ignore
        elif cfg.recorder == "memray":
            import memray  # pyright: ignore

            folder.mkdir(parents=True, exist_ok=True)
            self._memray = memray.Tracker(Path(f"{self._stem}_snapshot.memray.bin"))  # pyright: ignore
            self._memray.__enter__()

    def after(self, num_steps: int) -> None:
        """Called after each step, with the number of steps done in this launch."""
        self._num_steps = num_steps
        if num_steps == self._after_steps:
            self._end()

    def close(self) -> None:
        """Stop recording."""
        if self._memray is not None:
            self._end()

    def _end(self) -> None:
        if not self._is_recording:
            return
        self._is_recording = False
        if self._memray is not None:
            self._memray.__exit__(None, None, None)
            path = f"{self._stem}_snapshot.memray.bin"
            _log.info("allocations of the host, of %d steps, are in %s", self._num_steps, path)
            return
        self._dump()
        torch.cuda.memory._record_memory_history(enabled=None)  # pyright: ignore[reportPrivateUsage]

    def _on_out_of_memory(self, *_: int) -> None:
        if self._is_recording:
            self._dump()

    def _dump(self) -> None:
        path = Path(f"{self._stem}_snapshot.pickle")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            torch.cuda.memory._dump_snapshot(f"{path}")  # pyright: ignore[reportPrivateUsage]
        except OSError as error:  # recording must not end the run
            _log.warning("warning: the history of allocations could not be written: %s", error)
        else:
            _log.info("the history of allocations is in %s; see pytorch.org/memory_viz", path)


class _Writer:
    """Writes traces until the disk or the limit is full."""

    def __init__(self) -> None:
        self.is_open = True
        self._num_bytes = 0

    def write(self, export: Callable[[str], object], path: Path) -> None:
        # Written under another name first, so that a trace is complete or absent.
        partial = path.with_name(f".{os.getpid()}.{path.name}")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            export(f"{partial}")
            self._num_bytes += partial.stat().st_size
            partial.rename(path)
        except OSError as error:  # torch may also fail silently, without a file
            with suppress(OSError):
                partial.unlink()
            self._close(f"a trace could not be written ({error})")
            return
        _log.info("trace: %s", path)
        if self._num_bytes > _MAX_BYTES:
            self._close(f"this process has written {self._num_bytes / 2**30:.0f} GiB of traces")

    def _close(self, why: str) -> None:
        self.is_open = False
        _log.warning("warning: %s: nothing more is traced, and the run goes on", why)


class _Profile:
    """A running profile of this process."""

    def __init__(self, record: profile) -> None:
        self._record = record

    @classmethod
    def begin(cls, activities: Iterable[ProfilerActivity], **options: Any) -> _Profile | None:
        """Start a profile. None if this process has another one."""
        if not _profiling.acquire(blocking=False):
            return None
        # Otherwise Kineto prints two lines per trace.
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")
        here = torch.profiler.supported_activities()
        record = profile(activities=here.intersection(activities), **options)
        record.__enter__()
        return cls(record)

    def end(self, writer: _Writer, path: Path, facts: dict[str, Any]) -> None:
        """Stop, and write the profile with `facts`."""
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self._record.add_metadata_json(FACTS, json.dumps(facts))
        self._record.__exit__(None, None, None)
        _profiling.release()
        writer.write(self._record.export_chrome_trace, path)
