"""R24, second part: time is attributed, and a delay shows where it is."""

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.observe.spans import Spans
from tests.tools.report.perfetto import needs_perfetto, what_is_shown


class Clock:
    """A clock that moves when told."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def run_step(spans: Spans, sleep: Callable[[str], None]) -> dict[str, float]:
    with spans.span("generate"):
        sleep("generate")
        with spans.span("score"):
            sleep("score")
    with spans.span("train"):
        sleep("train")
    sleep("outside")
    return spans.take()


def check_delay_is_named(seconds: dict[str, float], slow: str, delay_s: float) -> None:
    phases = {k: v for k, v in seconds.items() if k not in ("step", "unattributed")}
    assert max(phases, key=lambda name: phases[name]) == slow
    assert phases[slow] == pytest.approx(delay_s, abs=0.01)
    assert seconds["unattributed"] <= 0.05 * seconds["step"]
    top_level = sum(value for name, value in phases.items() if "/" not in name)
    assert top_level + seconds["unattributed"] == pytest.approx(seconds["step"], rel=0.02)


def run_slow_step(slow: str) -> dict[str, float]:
    clock = Clock()

    def sleep(phase: str) -> None:
        clock.now += 0.2 if phase == slow else 0.001

    return run_step(Spans(clock=clock), sleep)


@pytest.mark.parametrize("slow", ["generate", "train"])
def test_R24_an_injected_delay_is_the_top_span(slow: str) -> None:
    check_delay_is_named(run_slow_step(slow), slow, 0.2)


def test_R24_a_delay_outside_of_spans_is_caught() -> None:
    seconds = run_slow_step("outside")
    assert seconds["unattributed"] == pytest.approx(0.2, abs=0.01)
    with pytest.raises(AssertionError):
        check_delay_is_named(seconds, "train", 0.2)


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.floats(0, 5)), max_size=30))
def test_top_level_spans_and_the_rest_add_up_to_the_wall(moves: list[tuple[int, float]]) -> None:
    """Any nesting, with `take` called while spans are open: no second is lost or counted twice."""
    clock = Clock()
    spans = Spans(clock=clock)
    stack = []
    taken: list[dict[str, float]] = []
    for move, seconds in moves:
        clock.now += seconds
        if move == 0:
            stack.append(spans.span(f"level{len(stack)}"))
            stack[-1].__enter__()
        elif move == 1 and stack:
            stack.pop().__exit__(None, None, None)
        elif move == 2:
            taken.append(spans.take())
    taken.append(spans.take())
    for seconds in taken:
        top_level = sum(v for k, v in seconds.items() if "/" not in k and k != "step")
        assert top_level == pytest.approx(seconds["step"], abs=1e-9)
    assert sum(t["step"] for t in taken) == pytest.approx(clock.now - 100, abs=1e-9)


def test_nested_names_and_repetition() -> None:
    clock = Clock()
    spans = Spans(clock=clock)
    for _ in range(3):
        with spans.span("train"), spans.span("forward"):
            clock.now += 2
    assert spans.take() == {"train": 6, "train/forward": 6, "unattributed": 0, "step": 6}
    assert spans.take() == {"unattributed": 0, "step": 0}


def test_an_exception_closes_its_spans() -> None:
    clock = Clock()
    spans = Spans(clock=clock)

    def fail() -> None:
        with spans.span("train"), spans.span("forward"):
            clock.now += 1
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    with spans.span("eval"):
        clock.now += 1
    assert spans.take() == {"train": 1, "train/forward": 1, "eval": 1, "unattributed": 0, "step": 2}


def test_reserved_names_are_refused() -> None:
    with pytest.raises(ValueError, match="'step'"), Spans().span("step"):
        pass


def test_the_trace_nests_like_the_spans(tmp_path: Path) -> None:
    spans = Spans()
    run_step(spans, lambda _: time.sleep(0.001))
    spans.write_trace(tmp_path / "trace.json")
    process, *written = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert (process["name"], process["args"]) == ("process_name", {"name": "hone"})
    events = {event["name"]: event for event in written}
    assert events.keys() == {"generate", "score", "train"}
    outer, inner = events["generate"], events["score"]
    assert outer["ts"] <= inner["ts"]
    assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] <= events["train"]["ts"]
    assert all(event["ph"] == "X" and event["dur"] >= 900 for event in events.values())


@needs_perfetto
def test_perfetto_shows_the_trace_of_a_run(tmp_path: Path) -> None:
    spans = Spans()
    run_step(spans, lambda _: None)
    spans.write_trace(tmp_path / "trace.json")
    shown = what_is_shown(tmp_path / "trace.json")
    assert shown["complaints"] == shown["misplaced"] == []
    assert [(track["process"], track["slices"]) for track in shown["tracks"]] == [("hone", 3)]


def test_a_span_costs_microseconds() -> None:
    spans = Spans(max_trace_events=10)
    start = time.thread_time()  # others may have the core for longer
    for _ in range(10_000):
        with spans.span("decode"):
            pass
    assert time.thread_time() - start < 0.5
    assert len(spans.trace_events()) == 10
