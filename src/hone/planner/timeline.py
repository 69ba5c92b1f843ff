"""The plot of simulated runs: who worked when, as one SVG file without script or style sheet.

One block a run, all on the same scale of seconds; a row is an engine, or all trainers together.
What is blank is idle.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from hone.planner.simulator import SimulatedRun

__all__ = ["draw_timelines"]

_SAMPLE, _TRAIN, _SYNC = "#2563c9", "#d9730d", "#5f6670"
_GRID, _TEXT, _IDLE = "#e3e6ea", "#333a42", "#f4f5f7"
_WIDTH, _LEFT, _RIGHT = 920, 92, 18
_HEADER, _TITLE, _AXIS = 64, 30, 40
_ROW, _GAP = 14, 3
_MAX_ENGINES = 8
"""Rows of a block; of more engines evenly many are shown."""
_NUM_STEPS = 3
"""Steps that the longest run shows."""

_Bar = tuple[float, float, str]
_Row = tuple[str, list[_Bar]]


def draw_timelines(title: str, runs: Sequence[tuple[str, SimulatedRun]]) -> str:
    """The timelines of named runs from their first counted step on, as the text of an SVG file."""
    seconds = max(
        sum(step.end_s - step.start_s for step in run.steady[:_NUM_STEPS]) for _, run in runs
    )
    blocks = [(label, _rows(run, seconds)) for label, run in runs]
    heights = [_TITLE + len(rows) * (_ROW + _GAP) + _AXIS for _, rows in blocks]
    height = _HEADER + sum(heights)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
        f'width="{_WIDTH}" height="{height}" font-family="sans-serif" font-size="12" '
        f'fill="{_TEXT}">',
        f'<rect width="{_WIDTH}" height="{height}" fill="#ffffff"/>',
        f'<text x="20" y="26" font-size="16">{escape(title)}</text>',
        *_legend(),
    ]
    top = _HEADER
    for (label, rows), room in zip(blocks, heights, strict=True):
        parts += [f'<g transform="translate(0 {top})">', *_block(label, rows, seconds), "</g>"]
        top += room
    return "\n".join([*parts, "</svg>\n"])


def _rows(run: SimulatedRun, seconds: float) -> list[_Row]:
    """What each row shows between the first counted step and so many seconds later."""
    start = run.steady[0].start_s
    train: list[_Bar] = []
    sync: list[_Bar] = []
    for step in run.steady:
        trained_s = step.start_s + step.wait_s + step.train_s
        train.append((trained_s - step.train_s, trained_s, _TRAIN))
        sync.append((trained_s + step.halt_s, step.end_s, _SYNC))
    shared = [*train, *sync] if run.placement.colocated else sync
    count = len(run.engine_busy)
    shown = range(count)
    if count > _MAX_ENGINES:
        shown = [round(i * (count - 1) / (_MAX_ENGINES - 1)) for i in range(_MAX_ENGINES)]
    rows: list[_Row] = []
    for index in shown:
        sampling = [(begin, end, _SAMPLE) for begin, end in run.engine_busy[index]]
        name = "GPU" if run.placement.colocated else "engine"
        rows.append((f"{name} {index}", [*sampling, *shared]))
    if not run.placement.colocated:
        number = run.placement.num_trainers
        rows.append((f"{number} trainer{'s' * (number > 1)}", [*train, *sync]))
    return [(label, list(_clip(bars, start, seconds))) for label, bars in rows]


def _clip(bars: Sequence[_Bar], start: float, seconds: float) -> Iterator[_Bar]:
    for begin, end, color in bars:
        left, right = max(begin - start, 0.0), min(end - start, seconds)
        if right > left:
            yield left, right, color


def _legend() -> Iterator[str]:
    x = 20
    for label, color in (
        ("sampling", _SAMPLE),
        ("training", _TRAIN),
        ("weights", _SYNC),
        ("idle", _IDLE),
    ):
        yield f'<rect x="{x}" y="39" width="22" height="12" fill="{color}" stroke="{_GRID}"/>'
        yield f'<text x="{x + 29}" y="49">{label}</text>'
        x += 110


def _block(label: str, rows: Sequence[_Row], seconds: float) -> Iterator[str]:
    width = _WIDTH - _LEFT - _RIGHT
    bottom = _TITLE + len(rows) * (_ROW + _GAP)
    yield f'<text x="20" y="16" font-size="13">{escape(label)}</text>'
    for number, (name, _) in enumerate(rows):
        y = _TITLE + number * (_ROW + _GAP)
        yield f'<text x="{_LEFT - 8}" y="{y + 11}" text-anchor="end">{escape(name)}</text>'
        yield f'<rect x="{_LEFT}" y="{y}" width="{width}" height="{_ROW}" fill="{_IDLE}"/>'
    for value in _ticks(seconds):
        x = _LEFT + value / seconds * width
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{_TITLE - 4}" y2="{bottom}" stroke="{_GRID}"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{value:g}</text>'
    for number, (_, bars) in enumerate(rows):
        y = _TITLE + number * (_ROW + _GAP)
        for begin, end, color in bars:
            x, wide = _LEFT + begin / seconds * width, (end - begin) / seconds * width
            yield f'<rect x="{x:.2f}" y="{y}" width="{wide:.2f}" height="{_ROW}" fill="{color}"/>'
    yield f'<text x="{_WIDTH - _RIGHT}" y="{bottom + 28}" text-anchor="end">seconds</text>'


def _ticks(seconds: float) -> list[float]:
    """Round values from 0 to `seconds`: steps of 1, 2 or 5 powers of ten."""
    raw = seconds / 8
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= raw * (1 - 1e-9))
    return [round(k * step, 9) for k in range(math.floor(seconds / step + 1e-9) + 1)]
