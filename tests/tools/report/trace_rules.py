"""The rules of the trace-event format, as far as Perfetto drops or misplaces what breaks them.

docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU, and Perfetto's
`trace_processor/importers/json` and `slice_tracker`, which counts what it drops.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["broken_rules"]

_OF_METADATA = ("process_name", "process_sort_index", "process_labels", "thread_name",
                "thread_sort_index")  # fmt: skip
_TOUCH_US = 1e-6
"""Perfetto counts nanoseconds: less is no overlap."""


def broken_rules(events: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is wrong, a text each; empty for a trace that is shown whole."""
    broken = [text for event in events for text in _of_event(event)]
    if broken:
        return broken
    last: Mapping[str, Any] | None = None
    tracks: defaultdict[tuple[int, int], list[Mapping[str, Any]]] = defaultdict(list)
    flows: Counter[tuple[Any, ...]] = Counter()
    for event in events:
        if event["ph"] == "M":
            continue
        if last is not None and _place(event) < _place(last):
            broken.append(f"not in order: {event} after {last}")
        last = event
        if event["ph"] == "X":
            tracks[event["pid"], event["tid"]].append(event)
        elif event["ph"] in "stf":
            key = event["cat"], event["name"], event["id"]
            if event["ph"] != "s" and not flows[key]:
                broken.append(f"an arrow that has not begun: {event}")
            flows[key] += 1
        elif event["ph"] in "be":
            key = event["cat"], event["name"], event["id"], event["pid"]
            flows[key] += 1 if event["ph"] == "b" else -1
            if flows[key] < 0:
                broken.append(f"an end without a beginning: {event}")
    for spans in tracks.values():
        broken += _overlaps(spans)
    named = {event["pid"] for event in events if event["name"] == "process_name"}
    broken += [f"process {pid} has no name" for pid in {pid for pid, _ in tracks} - named]
    return broken


def _of_event(event: Mapping[str, Any]) -> list[str]:
    broken: list[str] = []
    if event.get("ph") not in {"X", "C", "s", "t", "f", "b", "e", "n", "M"}:
        return [f"no phase that is drawn: {event}"]
    if not (isinstance(event.get("name"), str) and event["name"]):
        broken.append(f"no name: {event}")
    if not isinstance(event.get("pid"), int):
        broken.append(f"no number of a process: {event}")
    if not isinstance(event.get("args", {}), dict):
        broken.append(f"args that are no object: {event}")
    if event["ph"] == "M":
        if event["name"] not in _OF_METADATA or not event.get("args"):
            broken.append(f"metadata that says nothing: {event}")
        return broken
    if not isinstance(event.get("tid"), int) and event["ph"] != "C":
        broken.append(f"no number of a thread: {event}")
    for name in ("ts", "dur") if event["ph"] == "X" else ("ts",):
        value = event.get(name)
        if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
            broken.append(f"no {name} of 0 or more: {event}")
    if event["ph"] in "stfben" and "id" not in event:
        broken.append(f"no id: {event}")
    elif event["ph"] in "stf" and not isinstance(event["id"], int):
        broken.append(f"an arrow whose id is no number: {event}")
    return broken


def _place(event: Mapping[str, Any]) -> tuple[float, float]:
    """A slice comes before those that begin with it and are inside."""
    return event["ts"], -event.get("dur", 0.0)


def _overlaps(spans: Sequence[Mapping[str, Any]]) -> list[str]:
    broken: list[str] = []
    around: list[Mapping[str, Any]] = []
    for span in spans:
        while around and _end(around[-1]) <= span["ts"] + _TOUCH_US:
            around.pop()
        if around and _end(span) > _end(around[-1]) + _TOUCH_US:
            broken.append(f"ends after the one around it: {span} in {around[-1]}")
        around.append(span)
    return broken


def _end(span: Mapping[str, Any]) -> float:
    return span["ts"] + span["dur"]
