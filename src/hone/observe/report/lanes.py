"""What each trainer and each engine did in the newest steps, as a chart with a lane for each.

    lanes_chart(run)    # {"kind": "lanes", "states", "lanes": [{"name", "use", "spans"}], ...}

The run folder has the outermost spans of each training process, and when engines apart were at
work. Where engine and trainer share a device its engine has a lane too, which follows from those:
it samples while the trainer waits for samples, and then waits or sleeps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hone.observe.run_folder import RunFolder

__all__ = ["STATES", "lanes_chart"]

STATES = (
    "train", "score", "generate", "sync weights", "evaluate", "save", "other", "wait", "asleep",
)  # fmt: skip
"""Drawn in this order of colours; the last two are none."""
_AT_WORK = ("train", "score", "generate", "evaluate")
_OF_SPANS = {
    "train": "train", "experience": "score", "sync": "sync weights", "eval": "evaluate",
    "checkpoint": "save", "generate": "wait",
}  # fmt: skip
_NUM_STEPS = 6
_MOST_SPANS = 6000
_SEAM_S = 1e-3
"""Between spans that follow each other."""


class _Span(NamedTuple):
    state: str
    begin_s: float
    end_s: float


def lanes_chart(run: RunFolder) -> dict[str, Any] | None:
    """Of the newest steps; None where none has lanes."""
    rows = [row for row in run.newest_lanes(_NUM_STEPS) if any(row["lanes"].values())]
    while len(rows) > 1 and sum(len(spans) for row in rows for spans in row["lanes"].values()) > (
        _MOST_SPANS
    ):
        rows = rows[1:]
    if not rows:
        return None
    found: dict[str, list[_Span]] = {}
    steps: list[tuple[int, float, float]] = []
    for row in rows:
        for name, spans in row["lanes"].items():
            found.setdefault(name, []).extend(_Span(*span) for span in spans)
        own = [span for name, spans in row["lanes"].items() if _trains(name) for span in spans]
        if own:
            steps.append((row["step"], min(s[1] for s in own), max(s[2] for s in own)))
    if not steps:
        return None
    begin_s, end_s = steps[0][1], max(end for _, _, end in steps)
    lanes = _with_states(run, found)
    return {
        "kind": "lanes",
        "title": "Use of each device",
        "unit": f"seconds, the newest {len(steps)} step{'s' * (len(steps) > 1)}; share at work",
        "states": STATES,
        "steps": [(n, round(a - begin_s, 3), round(b - begin_s, 3)) for n, a, b in steps],
        "lanes": [_lane(name, spans, begin_s, end_s) for name, spans in lanes.items() if spans],
    }


def _trains(name: str) -> bool:
    return not name.startswith("engine")


def _with_states(run: RunFolder, found: Mapping[str, Sequence[_Span]]) -> dict[str, list[_Span]]:
    trainers = {name: spans for name, spans in found.items() if _trains(name)}
    engines = {name: spans for name, spans in found.items() if not _trains(name)}
    waits = "asleep" if run.setting("trainer.enable_sleep") else "wait"
    lanes: dict[str, list[_Span]] = {}
    for name, spans in trainers.items():
        states = _OF_SPANS | {"generate": waits}
        lanes[name] = [span._replace(state=states.get(span.state, "other")) for span in spans]
    if engines:
        syncs = [span for span in next(iter(lanes.values())) if span.state == "sync weights"]
        lanes |= {name: _with_waits([*spans, *syncs]) for name, spans in engines.items()}
    elif any(span.state == "generate" for spans in trainers.values() for span in spans):
        rests = "asleep" if run.setting("engine.enable_sleep") else "wait"
        states = {"generate": "generate", "eval": "generate", "sync": "sync weights"}
        states |= {"train": rests, "experience": rests}
        lanes |= {
            name.replace("trainer", "engine"): [
                span._replace(state=states.get(span.state, "wait")) for span in spans
            ]
            for name, spans in trainers.items()
            if name.startswith("trainer")
        }
    return lanes


def _with_waits(spans: Sequence[_Span]) -> list[_Span]:
    """In order, with what lies between them."""
    found: list[_Span] = []
    for span in sorted(spans, key=lambda span: span.begin_s):
        if found and span.begin_s > found[-1].end_s:
            found.append(_Span("wait", found[-1].end_s, span.begin_s))
        found.append(span)
    return found


def _merged(spans: Sequence[_Span]) -> list[_Span]:
    """Without seams between spans of one state that touch, such as a sleep during two phases."""
    found: list[_Span] = []
    for span in spans:
        if found and found[-1].state == span.state and span.begin_s - found[-1].end_s <= _SEAM_S:
            last = found.pop()
            span = last._replace(end_s=max(last.end_s, span.end_s))
        found.append(span)
    return found


def _lane(name: str, spans: Sequence[_Span], begin_s: float, end_s: float) -> dict[str, Any]:
    inside = [
        _Span(state, max(begin, begin_s), min(end, end_s))
        for state, begin, end in sorted(spans, key=lambda span: span.begin_s)
        if end > begin_s and begin < end_s
    ]
    inside = _merged(inside)
    worked_s = sum(s.end_s - s.begin_s for s in inside if s.state in _AT_WORK)
    return {
        "name": name,
        "use": min(worked_s / max(end_s - begin_s, 1e-9), 1.0),
        "spans": [
            (STATES.index(state), round(begin - begin_s, 3), round(end - begin_s, 3))
            for state, begin, end in inside
        ],
    }
