"""Merges the traces of all processes of a step, and finds what takes longest.

A step is traced by trainers, in `train_trace`, and by the engines that sampled with the weights
from before it, in `rollout_trace`. Torch's traces count microseconds from a base that each names,
so that those of several processes, and hosts with clocks in step, lie side by side.

Viewers drop a slice that ends after the one around it. So times are never counted from 1970, where
a float of microseconds has steps of a quarter, a thread that has two names has one track, and of
kernels of a stream that begin before the one ahead has ended, as programmatic launches do, every
other has a second track.
"""

from __future__ import annotations

import gzip
import json
import re
from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, count, zip_longest
from pathlib import Path
from typing import Any

from hone.errors import UserError
from hone.observe.ranges import FACTS, RANGE

__all__ = ["Longest", "StepTrace", "read_step"]

Event = dict[str, Any]
_OWN_US = "own_us"
_NUM_LONGEST = 10
_SUFFIX = ".trace.json.gz"
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_ON_STREAM = (*_ON_DEVICE, "gpu_user_annotation")
_OF_RECORDING = ("Trace", "overhead")
_FIRST_EXTRA = 1_000_000
"""First number of additional tracks, which no thread and no stream has."""
_DRAWN = ("X", "C", "s", "t", "f", "b", "e", "n")
"""Kinds of events that are kept: slices, counters and arrows. Metadata is written anew."""


@dataclass(frozen=True, slots=True)
class Longest:
    """A kernel with all its calls, or a gap between two kernels."""

    name: str
    num_calls: int
    total_us: float
    share: float
    """Share of the time of its phase."""


@dataclass(frozen=True, slots=True)
class StepTrace:
    """Merged trace of a step."""

    step: int
    files: Sequence[Path]
    events: Sequence[Event]
    """Events in Chrome's trace format, in microseconds."""
    kernels: Mapping[str, Sequence[Longest]]
    """Kernels with the longest total time, over all calls and processes, by phase. If no GPU was
    traced: operators, without the time of their callees."""
    gaps: Mapping[str, Sequence[Longest]]
    """Longest times in which a process ran no kernel, by phase."""

    def write(self, path: Path) -> None:
        """Write a file that ui.perfetto.dev opens."""
        trace = {"displayTimeUnit": "ms", "traceEvents": self.events}
        with gzip.open(path, "wt", compresslevel=4) as file:
            json.dump(trace, file)


def read_step(folder: Path, step: int | None = None) -> StepTrace:
    """Merge the traces of `step`, or of the latest traced step. Raises UserError if there is no
    trace of it or a file is damaged."""
    found: defaultdict[int, list[tuple[Path, dict[str, Any]]]] = defaultdict(list)
    for path in sorted(folder.glob(f"*_trace/**/*{_SUFFIX}")):
        if not path.name.startswith("."):  # a trace that is being written
            trace = _read(path)
            found[trace[FACTS]["step"]].append((path, trace))
    if not found:
        raise UserError(
            f"There is no trace in '{folder}'. Set profile.train.steps or profile.rollout.steps, "
            "such as [10], and give the command of the run again."
        )
    step = max(found) if step is None else step
    if step not in found:
        steps = ", ".join(map(str, sorted(found)))
        raise UserError(f"There is no trace of step {step} in '{folder}'; there are {steps}.")
    return _merged(step, found[step])


def _read(path: Path) -> dict[str, Any]:
    try:
        with gzip.open(path, "rt", encoding="utf-8") as file:
            trace: dict[str, Any] = json.load(file)
        trace[FACTS]["step"]
    except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is no trace of hone, or damaged ({error}): remove it.") from error
    return trace


def _merged(step: int, traces: Sequence[tuple[Path, dict[str, Any]]]) -> StepTrace:
    traces = sorted(traces, key=lambda one: _natural(one[1][FACTS]["process"]))
    bases_ns = [int(trace.get("baseTimeNanoseconds", 0)) for _, trace in traces]
    by_process: list[tuple[str, list[Event]]] = []
    arrows: dict[tuple[Any, ...], int] = {}
    for number, ((_, trace), base_ns) in enumerate(zip(traces, bases_ns, strict=True)):
        process: str = trace[FACTS]["process"]
        base_us = (base_ns - min(bases_ns)) / 1000
        own = list(_renumbered(trace["traceEvents"], number, process, base_us, arrows))
        by_process.append((process, own))
    events = [event for _, own in by_process for event in own]
    origin = min((event["ts"] for event in events if event["ph"] == "X"), default=0.0)
    for event in events:
        if "ts" in event:
            event["ts"] = round(max(event["ts"] - origin, 0.0), 3)
    events.sort(key=_place)
    phases: defaultdict[str, list[_Phase]] = defaultdict(list)
    for process, own in by_process:
        for phase in _phases(own, process):
            phases[phase.name].append(phase)
    return StepTrace(
        step,
        [path for path, _ in traces],
        events,
        {name: _longest_kernels(found) for name, found in phases.items()},
        {name: _longest_gaps(found) for name, found in phases.items()},
    )


def _place(event: Event) -> tuple[float, float]:
    """Sort key: metadata first, then by time. A slice comes before those that begin with it and are
    inside: viewers take the first one for the outer one."""
    return event.get("ts", -1.0), -event.get("dur", 0.0)


def _natural(name: str) -> list[tuple[int, str]]:
    """Sort key for natural order: engine 2 before engine 10."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in re.split(r"(\d+)", name)]


def _renumbered(
    events: Sequence[Event],
    number: int,
    process: str,
    base_us: float,
    arrows: dict[tuple[Any, ...], int],
) -> Iterator[Event]:
    """The events with their own process numbers and names, and arrows renumbered through `arrows`.
    torch's notes on its recording are left out, and so are tracks with nothing else."""
    labels: dict[Any, str] = {}
    names: dict[tuple[Any, Any], str] = {}
    for event in events:
        if event["name"] == "process_labels":
            labels[event["pid"]] = event["args"]["labels"]
        elif event["name"] == "thread_name":  # of two names the shorter is the program's
            track = event["pid"], event["tid"]
            names[track] = max(names.get(track, ""), event["args"]["name"], key=len)
    tracks: dict[Any, int] = {}
    threads: dict[tuple[Any, Any], bool] = {}
    events = list(_whole_arrows(_untangled(events, names)))
    for event in events:
        if event["ph"] not in _DRAWN or event.get("cat") in _OF_RECORDING:
            continue
        own = dict(event)
        track = event["pid"], event["tid"]
        own["pid"] = tracks.setdefault(event["pid"], 1000 * (number + 1) + len(tracks))
        own["ts"] = own["ts"] + base_us
        # Arrows, as from launch to kernel: Perfetto draws only those with numeric ids.
        if "id" in own:
            own["id"] = arrows.setdefault((number, own.get("cat"), own["id"]), len(arrows))
        threads[track] = threads.get(track, False) or event["name"].startswith(RANGE)
        yield own
    for original, pid in tracks.items():
        name = f"{_display_name(process)}: {labels.get(original, original)}"
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
    told = {track: names.get(track, "") for track in threads}
    order = sorted(threads, key=lambda track: (not threads[track], told[track], str(track[1])))
    for place, track in enumerate(order):  # the track of hone's ranges first
        about = {"ph": "M", "pid": tracks[track[0]], "tid": track[1]}
        if track in names:
            yield about | {"name": "thread_name", "args": {"name": names[track]}}
        yield about | {"name": "thread_sort_index", "args": {"sort_index": place}}


def _untangled(events: Sequence[Event], names: dict[tuple[Any, Any], str]) -> Iterator[Event]:
    """The events, with additional tracks of a stream (added to `names`) for slices that overlap in
    it and for the arrows that end there."""
    streams: defaultdict[tuple[Any, Any], list[Event]] = defaultdict(list)
    others: list[Event] = []
    for event in events:
        is_on_stream = event["ph"] == "X" and event.get("cat") in _ON_STREAM
        (streams[event["pid"], event["tid"]] if is_on_stream else others).append(event)
    moved: dict[tuple[Any, ...], int] = {}
    extra = count(_FIRST_EXTRA)
    for track, slices in streams.items():
        lanes: dict[Any, list[float]] = {track[1]: []}  # end of the running slice
        for event in sorted(slices, key=_place):
            tid = _free_lane(lanes, event)
            if tid is None:
                tid = next(extra)
                lanes[tid] = []
                name = names.get(track, f"stream {track[1]}").strip()
                names[track[0], tid] = f"{name}, overlapping"
            lanes[tid].append(event["ts"] + event["dur"])
            if tid != track[1]:
                moved[*track, event["ts"]] = tid
            yield event | {"tid": tid}
    for event in others:
        place = event["pid"], event["tid"], event.get("ts")
        is_moved = event["ph"] in ("s", "t", "f") and place in moved
        yield event | {"tid": moved[place]} if is_moved else event


def _free_lane(lanes: Mapping[Any, list[float]], event: Event) -> Any:
    """The first lane whose running slices end before this event begins, or after it has ended."""
    for tid, ends in lanes.items():
        while ends and ends[-1] <= event["ts"]:
            ends.pop()
        if not ends or event["ts"] + event["dur"] <= ends[-1]:
            return tid
    return None


def _whole_arrows(events: Iterable[Event]) -> Iterator[Event]:
    """Drop arrows of which torch recorded only one end: kernels of a graph have one launch."""
    events = list(events)
    begun, ended = (
        {(event.get("cat"), event["id"]) for event in events if event["ph"] == ph} for ph in "sf"
    )
    whole = begun & ended
    for event in events:
        if event["ph"] not in "sf" or (event.get("cat"), event["id"]) in whole:
            yield event


def _display_name(process: str) -> str:
    """Display name: a trainer's rank and coordinates, or an engine and its rank."""
    return f"trainer {process}" if process.startswith("rank") else process


@dataclass(frozen=True, slots=True)
class _Phase:
    """An innermost range of hone in one process."""

    name: str
    process: str
    begin: float
    end: float
    work: Sequence[Event]
    """Kernels or operators that began inside, in order."""


def _phases(events: Sequence[Event], process: str) -> Iterator[_Phase]:
    """Innermost ranges of hone that contain kernels or operators."""
    work = [event for event in events if event.get("cat") in _ON_DEVICE]
    work = work or _operators(event for event in events if event.get("cat") == "cpu_op")
    work.sort(key=lambda event: event["ts"])
    starts = [event["ts"] for event in work]
    ranges = [
        (event["ts"], event["ts"] + event["dur"], event["name"].removeprefix(RANGE))
        for event in events
        if event.get("cat") == "user_annotation" and event["name"].startswith(RANGE)
    ]
    ranges.sort(key=lambda one: (one[0], -one[1]))
    for own, following in zip_longest(ranges, ranges[1:]):
        begin, end, name = own
        if following is not None and following[0] < end:
            continue  # it contains another range
        inside = work[bisect_left(starts, begin) : bisect_left(starts, end)]
        if inside:
            yield _Phase(name, process, begin, end, inside)


def _operators(events: Iterable[Event]) -> list[Event]:
    """Operators of a host, each with its own time, without that of its callees."""
    found: list[Event] = []
    open_calls: list[Event] = []
    for event in sorted(events, key=lambda event: (event["tid"], event["ts"], -event["dur"])):
        while open_calls and not _is_inside(event, open_calls[-1]):
            open_calls.pop()
        if open_calls:
            open_calls[-1][_OWN_US] -= event["dur"]
        open_calls.append(event | {_OWN_US: event["dur"]})
        found.append(open_calls[-1])
    return found


def _is_inside(event: Event, outer: Event) -> bool:
    return event["tid"] == outer["tid"] and event["ts"] < outer["ts"] + outer["dur"]


def _longest_kernels(phases: Sequence[_Phase]) -> list[Longest]:
    total: defaultdict[str, float] = defaultdict(float)
    calls: Counter[str] = Counter()
    for event in chain.from_iterable(phase.work for phase in phases):
        total[event["name"]] += event.get(_OWN_US, event["dur"])
        calls[event["name"]] += 1
    passed_us = sum(phase.end - phase.begin for phase in phases)
    longest = sorted(total, key=lambda name: -total[name])[:_NUM_LONGEST]
    return [Longest(name, calls[name], total[name], total[name] / passed_us) for name in longest]


def _longest_gaps(phases: Sequence[_Phase]) -> list[Longest]:
    """Times in which no stream of a process ran a kernel."""
    passed_us = sum(phase.end - phase.begin for phase in phases)
    gaps: list[Longest] = []
    for phase in phases:
        busy_until, last = phase.begin, "the beginning"
        end: Event = {"ts": phase.end, "dur": 0.0, "name": "the end"}
        for event in [*phase.work, end]:
            if (length := event["ts"] - busy_until) > 0:
                between = f"{phase.process}: {_short(last)} .. {_short(event['name'])}"
                gaps.append(Longest(between, 1, length, length / passed_us))
            if event["ts"] + event["dur"] > busy_until:
                busy_until, last = event["ts"] + event["dur"], event["name"]
    return sorted(gaps, key=lambda gap: -gap.total_us)[:_NUM_LONGEST]


def _short(name: str) -> str:
    """A kernel's name without return type, namespaces, template and parameters."""
    plain = name.replace("(anonymous namespace)::", "").removeprefix("void ")
    name = re.split("[<(]", plain)[0].rsplit("::", 1)[-1].strip() or name
    return name if len(name) <= 32 else f"{name[:29]}..."
