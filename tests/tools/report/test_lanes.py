"""What devices did over time: recorded a row a step, drawn of the newest steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from hone.config.run import LogConfig
from hone.observe.loggers import MAX_LANES, RunLog
from hone.observe.run_folder import RunFolder
from hone.observe.spans import Spans
from hone.tools.report.lanes import STATES, lanes_chart

Lanes = dict[str, list[tuple[str, float, float]]]


def chart_of(folder: Path, steps: list[Lanes], **config: Any) -> dict[str, Any]:
    with RunLog(folder, LogConfig(to=())) as log:
        for number, lanes in enumerate(steps, start=1):
            log.log(number, {})
            log.lanes(number, lanes)
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    found = lanes_chart(RunFolder.read(folder))
    assert found is not None
    return json.loads(json.dumps(found))


def states(chart: dict[str, Any]) -> dict[str, list[tuple[str, float, float]]]:
    return {
        lane["name"]: [(STATES[state], begin, end) for state, begin, end in lane["spans"]]
        for lane in chart["lanes"]
    }


def test_spans_tell_what_has_ended_in_seconds_of_the_wall_clock() -> None:
    now = iter([100.0, 101.0, 102.0, 103.0, 104.0, 106.0, 107.0])
    spans = Spans(clock=lambda: next(now))
    base = spans._origin_ns / 1e9  # pyright: ignore[reportPrivateUsage]
    with spans.span("generate"), spans.span("reward"):
        pass
    ((name, begin, end),) = spans.take_ended()
    assert (name, begin - base, end - base) == ("generate", pytest.approx(1), pytest.approx(4))
    with spans.span("record"):
        assert spans.take_ended() == []  # it is open
    assert [name for name, *_ in spans.take_ended()] == ["record"]


def test_engines_apart_sample_wait_and_take_weights(tmp_path: Path) -> None:
    trainer = [("generate", 50.0, 51.0), ("train", 51.0, 54.0), ("sync", 54.0, 54.5)]
    engine = [("generate", 49.0, 52.0), ("generate", 53.0, 54.0), ("generate", 54.5, 55.5)]
    chart = chart_of(tmp_path, [{"trainer 0": trainer, "engine 0": engine}])
    assert states(chart) == {
        "trainer 0": [("wait", 0, 1), ("train", 1, 4), ("sync weights", 4, 4.5)],
        "engine 0": [  # no longer than the steps
            ("generate", 0, 2),
            ("wait", 2, 3),
            ("generate", 3, 4),
            ("sync weights", 4, 4.5),
        ],
    }
    assert [lane["use"] for lane in chart["lanes"]] == pytest.approx([3 / 4.5, 3 / 4.5])
    assert chart["steps"] == [[1, 0, 4.5]]


@pytest.mark.parametrize(
    ("asleep", "in_generation", "in_training"),
    [({}, "wait", "wait"), ({"enable_sleep": True}, "asleep", "asleep")],
)
def test_those_that_share_a_device_take_turns(
    tmp_path: Path, asleep: dict[str, bool], in_generation: str, in_training: str
) -> None:
    trainer = [("generate", 0.0, 2.0), ("experience", 2.0, 3.0), ("train", 3.0, 5.0)]
    lanes: Lanes = {"trainer 0": trainer, "trainer 1": trainer}
    chart = chart_of(tmp_path, [lanes], engine=asleep, trainer=asleep)
    found = {name: [state for state, *_ in spans] for name, spans in states(chart).items()}
    for rank in (0, 1):
        assert found[f"trainer {rank}"] == [in_generation, "score", "train"]
        assert found[f"engine {rank}"] == ["generate", in_training]  # without a seam


def test_an_evaluation_is_work_of_the_engines(tmp_path: Path) -> None:
    trainer = [("train", 0.0, 2.0), ("eval", 3.0, 5.0)]
    lanes: Lanes = {"trainer 0": trainer}
    apart = chart_of(tmp_path / "apart", [lanes | {"engine 0": [("generate", 3.1, 4.9)]}])
    assert states(apart) == {
        "trainer 0": [("train", 0, 2), ("other", 2, 3), ("wait", 3, 5)],  # all is told
        "engine 0": [("evaluate", 3.1, 4.9)],
    }
    assert [lane["use"] for lane in apart["lanes"]] == pytest.approx([2 / 5, 1.8 / 5])
    turns = [("generate", -1.0, 0.0), *trainer]
    found = states(chart_of(tmp_path / "turns", [{"trainer 0": turns}]))
    assert [state for state, *_ in found["engine 0"]] == ["generate", "wait", "evaluate"]
    fine_tuning = states(chart_of(tmp_path / "alone", [lanes]))
    assert [state for state, *_ in fine_tuning["trainer 0"]] == ["train", "other", "evaluate"]


def test_steps_of_the_launch_before_leave_the_chart(tmp_path: Path) -> None:
    begins = [0.0, 10.0, 20.0, 3600.0, 3610.0]
    chart = chart_of(tmp_path, [{"trainer 0": [("train", s, s + 9.0)]} for s in begins])
    assert chart["steps"] == [[4, 0, 9], [5, 10, 19]]
    assert chart["lanes"][0]["use"] == pytest.approx(18 / 19)


def test_a_long_run_shows_its_newest_steps_and_reads_no_more(tmp_path: Path) -> None:
    def step(number: int) -> Lanes:
        return {
            f"trainer {rank}": [
                ("train", number + part / 10, number + part / 10 + 0.09) for part in range(8)
            ]
            for rank in range(400)
        }

    chart = chart_of(tmp_path, [step(number) for number in range(90)])
    assert (tmp_path / "lanes.jsonl").stat().st_size > 1 << 20
    assert [number for number, *_ in chart["steps"]] == [85, 86, 87, 88, 89, 90]
    names = [lane["name"] for lane in chart["lanes"]]
    assert len(names) == MAX_LANES
    assert names[:2] == ["trainer 0", "trainer 6"]  # evenly
    assert lanes_chart(RunFolder.read(tmp_path)) is not None


def test_a_run_without_lanes_has_no_chart(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    assert lanes_chart(RunFolder.read(tmp_path)) is None
    (tmp_path / "lanes.jsonl").write_text('{"step": 1, "lanes": {"trainer 0": [["tr')  # at work
    assert lanes_chart(RunFolder.read(tmp_path)) is None
