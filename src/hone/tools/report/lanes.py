"""Chart of the activity of each trainer and engine in the latest steps, with a lane for each.

    lanes_chart(run)    # {"kind": "lanes", "states", "lanes": [{"name", "use", "spans"}], ...}

The run folder has the outermost spans of each training process, and when engines apart were at
work. Where engine and trainer share a device its engine has a lane too, which follows from those:
it samples while the trainer waits for samples, and then waits or sleeps. Where there are engines
an evaluation is their work, and the trainers wait for it too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from hone.observe.run_folder import RunFolder

__all__ = ["STATES", "lanes_chart"]

STATES = (
    "train", "score", "generate", "sync weights", "evaluate", "save", "other", "wait", "asleep",
)  # fmt: skip
"""States in the order of their colours; the last two have none."""
_AT_WORK = ("train", "score", "generate", "evaluate")
_OF_SPANS = {
    "train": "train", "experience": "score", "sync": "sync weights", "eval": "evaluate",
    "checkpoint": "save", "generate": "wait",
}  # fmt: skip
_OF_ENGINES = {"generate": "generate", "eval": "evaluate", "sync": "sync weights"}
_NUM_STEPS = 6
_MOST_SPANS = 6000
_SEAM_S = 1e-3
"""Largest gap between spans that are drawn as one."""


class _Span(NamedTuple):
    state: str
    begin_s: float
    end_s: float


def lanes_chart(run: RunFolder) -> dict[str, Any] | None:
    """Chart of the latest steps. None if none has lanes."""
    rows = [row for row in run.newest_lanes(_NUM_STEPS) if any(row["lanes"].values())]
    while len(rows) > 1 and sum(len(spans) for row in rows for spans in row["lanes"].values()) > (
        _MOST_SPANS
    ):
        rows = rows[1:]
    spans_by_name: dict[str, list[_Span]] = {}
    steps: list[tuple[int, float, float]] = []
    for row in rows:
        own = [span for name, spans in row["lanes"].items() if _trains(name) for span in spans]
        if own:
            step = row["step"], min(s[1] for s in own), max(s[2] for s in own)
            if steps and step[1] - steps[-1][2] > max(end - begin for _, begin, end in steps):
                # A step of an earlier launch: the pause in between would leave no room for the
                # steps.
                spans_by_name, steps = {}, []
            steps.append(step)
        for name, spans in row["lanes"].items():
            spans_by_name.setdefault(name, []).extend(_Span(*span) for span in spans)
    if not steps:
        return None
    begin_s, end_s = steps[0][1], max(end for _, _, end in steps)
    lanes = _lanes(run, spans_by_name)
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


def _lanes(run: RunFolder, spans_by_name: Mapping[str, Sequence[_Span]]) -> dict[str, list[_Span]]:
    trainers = {name: spans for name, spans in spans_by_name.items() if _trains(name)}
    engines = {name: spans for name, spans in spans_by_name.items() if not _trains(name)}
    samples = engines or any(s.state == "generate" for spans in trainers.values() for s in spans)
    waits = "asleep" if run.setting("trainer.enable_sleep") else "wait"
    states = _OF_SPANS | ({"generate": waits, "eval": waits} if samples else {})
    lanes = {name: _with_states(spans, states, "other") for name, spans in trainers.items()}
    if engines:
        first = next(iter(trainers.values()))
        syncs = [span for span in first if span.state == "sync"]
        evals = [span for span in first if span.state == "eval"]
        for name, spans in engines.items():
            engine_spans = [
                span._replace(state="eval") if any(_is_inside(span, e) for e in evals) else span
                for span in spans
            ]
            lanes[name] = _with_states([*engine_spans, *syncs], _OF_ENGINES, "wait")
    elif samples:
        rests = "asleep" if run.setting("engine.enable_sleep") else "wait"
        states = _OF_ENGINES | {"train": rests, "experience": rests}
        lanes |= {
            name.replace("trainer", "engine"): _with_states(spans, states, "wait")
            for name, spans in trainers.items()
            if name.startswith("trainer")
        }
    return lanes


def _is_inside(span: _Span, around: _Span) -> bool:
    """Whether most of the span is inside: an engine starts work with a delay."""
    return around.begin_s <= (span.begin_s + span.end_s) / 2 <= around.end_s


def _with_states(spans: Sequence[_Span], states: Mapping[str, str], rest: str) -> list[_Span]:
    """Assign states in order. Spans without a state, and gaps, become `rest`."""
    filled: list[_Span] = []
    for span in sorted(spans, key=lambda span: span.begin_s):
        if filled and span.begin_s - filled[-1].end_s > _SEAM_S:
            filled.append(_Span(rest, filled[-1].end_s, span.begin_s))
        filled.append(span._replace(state=states.get(span.state, rest)))
    return filled


def _merged(spans: Sequence[_Span]) -> list[_Span]:
    """Merge touching spans with the same state, such as a sleep during two phases."""
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
