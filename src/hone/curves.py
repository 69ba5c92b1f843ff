"""Small plots of a run's metrics, as HTML for notebooks.

    curves(rows)  # rows of metrics.jsonl -> "<figure ...><svg ...>...</figure>..."

Lines and letters have the notebook's own colour, so that they can be read on a dark ground too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from itertools import pairwise
from typing import Any

__all__ = ["CURVES", "Curve", "curves"]


@dataclass(frozen=True, slots=True)
class Curve:
    """A metric that is plotted."""

    metric: str
    name: str
    unit: str = ""


CURVES = (
    Curve("reward/mean", "reward"),
    Curve("eval/reward/mean", "held-out reward"),
    Curve("train/loss", "loss"),
    Curve("eval/loss", "held-out loss"),
    Curve("rollout/completion_tokens/mean", "completion length", "tokens"),
    Curve("policy/entropy", "entropy", "nats per token"),
)

_WIDTH, _HEIGHT = 300, 176
_LEFT, _RIGHT, _TOP, _BOTTOM = 50, 18, 8, 34
"""Space around the plot, for the numbers of its axes."""
_NUM_MARKS = 4
"""Marks of an axis, about."""
_ROUNDING = 2e-6
"""Largest spread of values, relative to them, that is rounding of single precision."""
_INK = "#4c8bf5"

Points = Sequence[tuple[int, float | None]]
"""Steps, ascending, each with its value; None where that is no finite number."""


def curves(rows: Sequence[Mapping[str, Any]]) -> str:
    """A plot with axes for each of `CURVES` that has at least two values in the rows, which are
    those of `metrics.jsonl`, by ascending step."""
    return "".join(_figures(rows))


def _figures(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for curve in CURVES:
        points = [(row["step"], _finite(row[curve.metric])) for row in rows if curve.metric in row]
        if sum(value is not None for _, value in points) > 1:
            yield _figure(curve, points)


def _finite(value: Any) -> float | None:
    return value if isinstance(value, int | float) and math.isfinite(value) else None


def _figure(curve: Curve, points: Points) -> str:
    held = [value for _, value in points if value is not None]
    low, high = min(held), max(held)
    unit = f" ({curve.unit})" if curve.unit else ""
    said = f"{curve.name}{unit}: {held[-1]:.4g} at step {points[-1][0]}, {low:.4g} to {high:.4g}"
    return (
        # All figures have one width, so that plots line up in columns whatever the captions.
        f'<figure style="display:inline-block;width:{_WIDTH}px;margin:4px 16px 8px 0">'
        f'<figcaption style="font-size:small"><b>{curve.name}</b>{unit} {held[-1]:.4g}<br>'
        f'<span style="opacity:0.65">{low:.4g} to {high:.4g}</span></figcaption>'
        f'<svg width="{_WIDTH}" height="{_HEIGHT}" viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" '
        f'aria-label="{escape(said)}" style="font:11px sans-serif" fill="currentColor">'
        f"{_plot(curve, points)}</svg></figure>"
    )


def _plot(curve: Curve, points: Points) -> str:
    held = [value for _, value in points if value is not None]
    y_marks = _marks(*_spread(min(held), max(held)), covers=True)
    low, high = y_marks[0], y_marks[-1]
    first, last = points[0][0], points[-1][0]
    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM

    def x(step: float) -> float:
        return _LEFT + (right - _LEFT) * (step - first) / ((last - first) or 1)

    def y(value: float) -> float:
        return bottom - (bottom - _TOP) * (value - low) / (high - low)

    drawn: list[str] = []
    for mark, label in zip(y_marks, _labels(y_marks), strict=True):
        at = f"{y(mark):.1f}"
        drawn.append(
            f'<line x1="{_LEFT}" x2="{right}" y1="{at}" y2="{at}" '
            'stroke="currentColor" stroke-opacity="0.15"/>'
            f'<text x="{_LEFT - 6}" y="{at}" dy="4" text-anchor="end">{label}</text>'
        )
    steps = [mark for mark in _marks(first, last, is_whole=True) if first <= mark <= last]
    for mark, label in zip(steps, _labels(steps), strict=True):
        drawn.append(
            f'<text x="{x(mark):.1f}" y="{bottom + 15}" text-anchor="middle">{label}</text>'
        )
    drawn.append(
        f'<text x="{right}" y="{bottom + 29}" text-anchor="end" opacity="0.65">step</text>'
    )
    return "".join([*drawn, *_lines(curve, points, x, y)])


def _lines(
    curve: Curve, points: Points, x: Callable[[float], float], y: Callable[[float], float]
) -> Iterator[str]:
    """The curve, with a gap where a value is missing; what is measured at some steps only, and a
    value between gaps, has dots."""
    for part in _whole_parts(points):
        places = [(x(step), y(value)) for step, value in part]
        if curve.metric.startswith("eval/") or len(places) == 1:
            yield from (
                f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" fill="{_INK}"/>' for a, b in places
            )
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in places)
        yield f'<polyline points="{path}" fill="none" stroke="{_INK}" stroke-width="1.6"/>'


def _whole_parts(points: Points) -> Iterator[list[tuple[int, float]]]:
    part: list[tuple[int, float]] = []
    for step, value in points:
        if value is not None:
            part.append((step, value))
        elif part:
            yield part
            part = []
    if part:
        yield part


def _spread(low: float, high: float) -> tuple[float, float]:
    """The range of an axis. Equal values, up to rounding, lie in its middle."""
    if high - low > _ROUNDING * max(abs(low), abs(high)):
        return low, high
    return (low - abs(low) / 2, high + abs(high) / 2) if low else (0.0, 1.0)


def _marks(low: float, high: float, *, covers: bool = False, is_whole: bool = False) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten from `low` to `high`; with `covers` they enclose
    both, and of counts they are whole."""
    raw = max((high - low) / _NUM_MARKS, 1.0 if is_whole else 0.0) or 1.0
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    # What lies a hair beyond a mark needs no further one.
    if covers:
        begin, end = math.floor(low / step + 1e-3), math.ceil(high / step - 1e-3)
    else:
        begin, end = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [number * step for number in range(begin, max(end, begin) + 1)]


def _labels(marks: Sequence[float]) -> list[str]:
    """The marks as text, with as many digits as tell neighbours apart."""
    gap = min((b - a for a, b in pairwise(marks)), default=1.0)
    largest = max(map(abs, marks))
    if largest >= 1e6 or 0 < largest < 1e-3:
        digits = max(math.floor(math.log10(largest / gap) + 1e-9) + 1, 1)
        return [f"{mark:.{digits - 1}e}" if mark else "0" for mark in marks]
    decimals = max(-math.floor(math.log10(gap) + 1e-9), 0)
    return [f"{mark:,.{decimals}f}" if mark else "0" for mark in marks]
