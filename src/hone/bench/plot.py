"""The plot: one SVG file without script, style sheet or font of its own.

Four panels: sequences and tokens/s over time, decode steps over the batch against the limit, and
the KV cache over time.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Literal

import numpy as np

from hone.bench.bench import BenchResult
from hone.bench.measure import EngineRun, decode_steps
from hone.bench.summary import Limits
from hone.bench.workloads import Workload

__all__ = ["Panel", "Series", "draw", "panels", "svg", "ticks"]

Point = tuple[float, float]

_COLORS = ("#2563c9", "#d9730d")
_LIMIT_COLOR, _GRID_COLOR, _TEXT_COLOR = "#5f6670", "#e3e6ea", "#333a42"
_PANEL_WIDTH, _PANEL_HEIGHT = 460, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 18, 34, 44
_HEADER_HEIGHT = 64
_LEGEND_LINE, _LEGEND_MARK, _LEGEND_GAP = 18, 29, 16
_LETTER = 6.6
"""About the width of a letter, a little more than most."""
_MAX_POINTS = 400
_MARK = 9
"""Half the width of a line that has one point only."""


@dataclass(frozen=True, slots=True)
class Series:
    """Points of one engine, or of the limit."""

    label: str
    color: str
    points: Sequence[Point]
    style: Literal["line", "dots", "dashes"] = "line"


@dataclass(frozen=True, slots=True)
class Panel:
    """Series that share their axes, both from 0."""

    title: str
    x_label: str
    series: Sequence[Series]


def draw(result: BenchResult) -> str:
    """The plot of a result as the text of an SVG file."""
    title = f"{result.model_name}, {result.workload.name}, {result.limits.peaks.name}"
    return svg(title, panels(result.runs, result.workload, result.limits))


def panels(runs: Sequence[EngineRun], workload: Workload, limits: Limits) -> list[Panel]:
    """The four panels and their points."""
    inks = list(zip(runs, _COLORS, strict=False))

    def over_time(title: str, value: str) -> Panel:
        lines = [
            Series(
                run.name,
                ink,
                _thin([(x.end_s, float(getattr(x, value))) for x in run.measured.steps]),
            )
            for run, ink in inks
        ]
        return Panel(title, "seconds", lines)

    rates = [Series(run.name, ink, _rate(run)) for run, ink in inks]
    return [
        over_time("Sequences running", "num_seqs"),
        Panel("Output tokens/s", "seconds", rates),
        _decode_panel(inks, workload, limits),
        over_time("KV cache in use, share", "kv_cache_usage"),
    ]


def _decode_panel(
    inks: Iterable[tuple[EngineRun, str]], workload: Workload, limits: Limits
) -> Panel:
    """Median decode step of each batch; the limit at the keys that our steps have read."""
    series: list[Series] = []
    for run, ink in inks:
        measured: defaultdict[int, list[float]] = defaultdict(list)
        limit: defaultdict[int, list[float]] = defaultdict(list)
        for step in decode_steps(run.measured, workload.requests):
            measured[step.num_seqs].append(step.duration_s * 1e3)
            limit[step.num_seqs].append(limits.step_s(step) * 1e3)
        if not series and limit:
            series.append(Series("limit", _LIMIT_COLOR, _medians(limit), "dashes"))
        series.append(Series(run.name, ink, _medians(measured), "dots"))
    return Panel("Decode step, milliseconds", "sequences", series)


def _medians(values: dict[int, list[float]]) -> list[Point]:
    return [(float(key), statistics.median(values[key])) for key in sorted(values)]


def _rate(run: EngineRun) -> list[Point]:
    """Tokens/s in equal intervals; the tokens of a step count evenly over its duration."""
    steps = run.measured.steps
    ends = np.array([0.0, *(step.end_s for step in steps)])
    tokens = np.cumsum([0, *(step.num_tokens for step in steps)])
    edges = np.linspace(0.0, ends[-1], min(max(len(steps) // 4, 1), 100) + 1)
    rates = np.diff(np.interp(edges, ends, tokens)) / np.diff(edges)
    centres = (edges[1:] + edges[:-1]) / 2
    return [(float(x), float(y)) for x, y in zip(centres, rates, strict=True)]


def _thin(points: Sequence[Point]) -> list[Point]:
    """Every n-th point, and the last."""
    every = math.ceil(len(points) / _MAX_POINTS)
    return [*points[:-1:every], points[-1]]


def ticks(high: float, count: int = 4) -> list[float]:
    """Round values from 0 to the first at or above `high`: steps of 1, 2 or 5 powers of ten."""
    raw = (high or 1.0) / count
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    return [k * step for k in range(math.ceil((high or 1.0) / step - 1e-9) + 1)]


def svg(title: str, drawn: Sequence[Panel], *, legend_in_panels: bool = False) -> str:
    """Panels, two in a row, as the text of an SVG file.

    One legend serves all panels, in which a label then has one colour; or each has its own.
    """
    inks = {series.label: series for panel in drawn for series in panel.series}
    shared = [] if legend_in_panels else _legend(inks.values(), 20, 2 * _PANEL_WIDTH - _RIGHT)
    own = [
        _legend(panel.series if legend_in_panels else (), _LEFT, _PANEL_WIDTH - _RIGHT)
        for panel in drawn
    ]
    header = _HEADER_HEIGHT - _LEGEND_LINE + _LEGEND_LINE * len(shared)
    room = _LEGEND_LINE * max(map(len, own), default=0)
    rows = math.ceil(len(drawn) / 2)
    width, height = 2 * _PANEL_WIDTH, header + rows * (room + _PANEL_HEIGHT)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" '
        f'width="{width}" height="{height}" font-family="sans-serif" font-size="12" '
        f'fill="{_TEXT_COLOR}">',
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="20" y="26" font-size="16">{escape(title)}</text>',
        *_legend_text(shared, 45),
    ]
    for index, (panel, legend) in enumerate(zip(drawn, own, strict=True)):
        left, top = index % 2 * _PANEL_WIDTH, header + index // 2 * (room + _PANEL_HEIGHT)
        parts += [
            f'<g transform="translate({left} {top})">',
            f'<text x="{_LEFT}" y="{_TOP - 14}" font-size="13">{escape(panel.title)}</text>',
            *_legend_text(legend, _TOP + 2),
            f'<g transform="translate(0 {room})">',
            *_panel(panel),
            "</g></g>",
        ]
    return "\n".join([*parts, "</svg>\n"])


def _legend(drawn: Iterable[Series], left: float, right: float) -> list[list[tuple[float, Series]]]:
    """Lines of a legend between two edges: each series and where its entry begins."""
    lines: list[list[tuple[float, Series]]] = []
    x = math.inf
    for series in sorted(drawn, key=lambda held: held.style == "dashes"):
        entry = _LEGEND_MARK + _LETTER * len(series.label)
        if x + entry > right:
            lines.append([])
            x = left
        lines[-1].append((x, series))
        x += entry + _LEGEND_GAP
    return lines


def _legend_text(lines: Sequence[Sequence[tuple[float, Series]]], top: int) -> Iterator[str]:
    """The first line at `top`, further ones below."""
    for number, line in enumerate(lines):
        y = top + number * _LEGEND_LINE
        for x, series in line:
            dashes = _DASHES if series.style == "dashes" else ""
            yield (
                f'<line x1="{x}" x2="{x + 22}" y1="{y}" y2="{y}" stroke="{series.color}" '
                f'stroke-width="3"{dashes}/>'
            )
            yield f'<text x="{x + _LEGEND_MARK}" y="{y + 4}">{escape(series.label)}</text>'


_DASHES = ' stroke-dasharray="5 4"'


def _panel(panel: Panel) -> Iterator[str]:
    points = [point for series in panel.series for point in series.points]
    x_ticks = ticks(max((x for x, _ in points), default=1.0), 6)
    y_ticks = ticks(max((y for _, y in points), default=1.0))
    right, bottom = _PANEL_WIDTH - _RIGHT, _PANEL_HEIGHT - _BOTTOM

    def place(point: Point) -> Point:
        x = _LEFT + point[0] / x_ticks[-1] * (right - _LEFT)
        return x, bottom - point[1] / y_ticks[-1] * (bottom - _TOP)

    for value in y_ticks:
        y = place((0.0, value))[1]
        yield (
            f'<line x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="{_GRID_COLOR}"/>'
        )
        yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{_number(value)}</text>'
    for value in x_ticks:
        x = place((value, 0.0))[0]
        yield f'<text x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{_number(value)}</text>'
    yield f'<text x="{right}" y="{bottom + 34}" text-anchor="end">{escape(panel.x_label)}</text>'
    for series in panel.series:
        yield from _series(series, [place(point) for point in series.points])


def _series(series: Series, places: Sequence[Point]) -> Iterator[str]:
    if series.style == "dots":
        for x, y in places:
            yield f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.4" fill="{series.color}"/>'
    elif places:
        if len(places) == 1:
            ((x, y),) = places
            places = [(x - _MARK, y), (x + _MARK, y)]
        dashes = _DASHES if series.style == "dashes" else ""
        course = "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
        yield (
            f'<path d="M{course}" fill="none" stroke="{series.color}" stroke-width="1.8" '
            f'stroke-linejoin="round"{dashes}/>'
        )


def _number(value: float) -> str:
    if value >= 1e6:
        return f"{value / 1e6:g}M"
    return f"{value / 1e3:g}k" if value >= 1e4 else f"{value:.4g}"
