"""Curves in notebooks: axes that can be read, and values where they belong."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from hone.config.rules.finding import Finding
from hone.curves import CURVES, curves
from hone.results import Check, RunResult
from tests.tables import table

Row = dict[str, Any]


def course(values: list[float | None], metric: str = "reward/mean", first: int = 1) -> list[Row]:
    return [{"step": step, metric: value} for step, value in enumerate(values, start=first)]


def drawn(rows: list[Row]) -> ElementTree.Element:
    """The one plot of these rows."""
    return ElementTree.fromstring(curves(rows).replace("<br>", " "))


def texts(plot: ElementTree.Element, anchor: str) -> list[str]:
    """Numbers of the vertical axis (`end`) or of the horizontal one (`middle`)."""
    return [
        element.text or ""
        for element in plot.iter("text")
        if element.get("text-anchor") == anchor and element.text != "step"
    ]


def lines_of(plot: ElementTree.Element) -> list[list[tuple[float, float]]]:
    return [
        [(float(x), float(y)) for x, y in (pair.split(",") for pair in line.split())]
        for line in (element.get("points", "") for element in plot.iter("polyline"))
    ]


def read(label: str) -> float:
    return float(label.replace(",", ""))


@table(
    "values, marks",
    [
        ([0.0, 1.0], ["0", "0.5", "1.0"]),
        ([0.13, 0.97], ["0", "0.5", "1.0"]),
        ([-0.4, 0.4], ["-0.4", "-0.2", "0", "0.2", "0.4"]),
        ([3.0, 3.0], ["1", "2", "3", "4", "5"]),
        ([0.0, 0.0], ["0", "0.5", "1.0"]),
        ([1200.0, 3100.0], ["1,000", "1,500", "2,000", "2,500", "3,000", "3,500"]),
        ([2e-5, 6e-5], ["2e-05", "3e-05", "4e-05", "5e-05", "6e-05"]),
        ([1.0, 0.9999999], ["0.5", "1.0", "1.5"]),
    ],
)
def test_marks_of_the_values(values: list[float], marks: list[str]) -> None:
    assert texts(drawn(course(list(values))), "end") == marks


@table(
    "first, num, marks",
    [
        (1, 3, ["1", "2", "3"]),
        (1, 150, ["50", "100", "150"]),
        (0, 4, ["0", "1", "2", "3"]),
        (9_998, 5, ["9,998", "9,999", "10,000", "10,001", "10,002"]),
    ],
)
def test_marks_of_the_steps_are_whole(first: int, num: int, marks: list[str]) -> None:
    plot = drawn(course([float(n % 2) for n in range(num)], first=first))
    assert texts(plot, "middle") == marks
    assert [element.text for element in plot.iter("text")].count("step") == 1


def test_a_value_lies_between_its_marks() -> None:
    """Each point is read again from the axis, by the places of two of its marks."""
    values: list[float | None] = [0.2, 0.85, 0.4]
    plot = drawn(course(values))
    marks = {
        read(element.text or ""): float(element.get("y", ""))
        for element in plot.iter("text")
        if element.get("text-anchor") == "end" and element.text != "step"
    }
    (low, at_low), (high, at_high) = min(marks.items()), max(marks.items())
    assert at_high < at_low, "larger values are above"
    (line,) = lines_of(plot)
    shown = [low + (at_low - y) / (at_low - at_high) * (high - low) for _, y in line]
    assert shown == pytest.approx(values, abs=2e-3)
    assert [x for x, _ in line] == sorted(x for x, _ in line)


@table("missing", [None, float("nan"), float("inf")])
def test_a_missing_value_is_a_gap(missing: float | None) -> None:
    plot = drawn(course([1.0, 2.0, missing, 3.0, missing, 4.0, 5.0]))
    assert [len(line) for line in lines_of(plot)] == [2, 1, 2]
    assert len([*plot.iter("circle")]) == 1, "a value between gaps is seen"
    assert "nan" not in curves(course([1.0, 2.0, missing]))
    assert curves(course([1.0, missing])) == ""


def test_units_and_what_is_measured_at_some_steps() -> None:
    rows: list[Row] = [
        {"step": step, "policy/entropy": 1.0 / step, "rollout/completion_tokens/mean": step}
        for step in range(1, 6)
    ]
    html = curves(rows)
    assert html.count("<figure") == html.count("<svg") == 2
    assert "<b>entropy</b> (nats per token) 0.2" in html
    assert "<b>completion length</b> (tokens) 5" in html
    held_out = [{"step": step, "eval/reward/mean": step / 10} for step in (1, 3, 5)]
    between: list[Row] = [{"step": step} for step in (2, 4)]
    plot = drawn(sorted([*held_out, *between], key=lambda row: row["step"]))
    assert len([*plot.iter("circle")]) == 3
    assert [len(line) for line in lines_of(plot)] == [3], "no gaps in between"


def test_plots_are_named_for_who_does_not_see_them_and_have_the_colour_of_the_page() -> None:
    for curve in CURVES:
        plot = next(drawn(course([1.0, 2.0], curve.metric)).iter("svg"))
        assert plot.get("role") == "img"
        assert plot.get("fill") == "currentColor"
        assert curve.name in plot.get("aria-label", "")


def test_a_run_shows_its_curves(tmp_path: Path) -> None:
    folder = tmp_path / "<b>"
    folder.mkdir()
    rows = course([0.1, 0.9])
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    html = RunResult(folder, 2)._repr_html_()  # pyright: ignore[reportPrivateUsage]
    assert curves(rows) in html
    assert f"{tmp_path}/&lt;b&gt;" in html


def test_a_check_is_shown_as_tables() -> None:
    findings = [
        Finding("warning", ("a.b",), "a.b is <odd>"),
        Finding("error", ("c", "d.e"), "c is wrong"),
    ]
    derived = {"num": 12345.678, "tokens": 16384, "mode": "<x>"}
    check = Check(findings, derived, {}, {"num": "3 < 4"})
    html = check._repr_html_()  # pyright: ignore[reportPrivateUsage]
    cells = [re.sub(r"<.*?>", "", cell) for cell in re.findall(r"<td.*?>(.*?)</td>", html)]
    assert cells == [
        *("error", "c, d.e", "c is wrong"),
        *("warning", "a.b", "a.b is &lt;odd&gt;"),
        *("num", "12,345.7", "3 &lt; 4"),
        *("tokens", "16,384", ""),
        *("mode", "&lt;x&gt;", ""),
    ]
    breaking = [cell for cell in re.findall(r"<td.*?</td>", html) if "overflow-wrap" in cell]
    assert len(breaking) == 2 * 2 + 3, (
        "keys and sentences break on a phone, words and numbers do not"
    )
    assert "errors: 1, warnings: 1" in html
    nothing = Check([], {}, {}, {})._repr_html_()  # pyright: ignore[reportPrivateUsage]
    assert "errors: 0, warnings: 0" in nothing
    assert "<table" not in nothing
