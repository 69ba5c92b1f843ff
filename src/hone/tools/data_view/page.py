"""Pages of `hone data`, self-contained and in the look of a run's report.

`data.html.jinja` lays them out with the styles of `hone.tools.report`; histograms are drawn here,
as SVG that needs no script.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from jinja2 import Template

from hone.observe.printable import printable
from hone.tools.data_view.check import Checked
from hone.tools.data_view.chosen import Viewed
from hone.tools.data_view.counts import Bar
from hone.tools.data_view.show import Piece, Shown, ShownRow, ShownSource, ShownText
from hone.tools.data_view.stats import Stats
from hone.tools.data_view.terminal import answers_of, conclusion, elided, range_of, share
from hone.tools.report.write import template_environment

__all__ = ["check_page", "show_page", "stats_page"]

_MOST = 100_000
"""Most characters of a text on a page."""
_BAR = 0.94
"""Width of a bar of a histogram, of the room that it has."""


@dataclass(frozen=True, slots=True)
class _Table:
    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    is_text: bool = False


@dataclass(frozen=True, slots=True)
class _Bar:
    x: float
    y: float
    width: float
    height: float
    said: str


@dataclass(frozen=True, slots=True)
class _Chart:
    title: str
    unit: str
    bars: Sequence[_Bar]
    ticks: Sequence[tuple[float, str]]
    top: str
    """The number of rows of the highest bar."""


@dataclass(frozen=True, slots=True)
class _Run:
    """A piece of a text on the page."""

    text: str
    kind: str


@dataclass(frozen=True, slots=True)
class _Text:
    label: str
    meta: str
    runs: Sequence[_Run]


@dataclass(frozen=True, slots=True)
class _Row:
    id: str
    location: str
    problem: str
    facts: Sequence[tuple[str, str]]
    texts: Sequence[_Text]


@dataclass(slots=True)
class _Section:
    """A source with its rows."""

    title: str
    table: _Table | None = None
    error: str = ""
    rows: list[_Row] = field(default_factory=list[_Row])


@dataclass(slots=True)
class _Page:
    title: str
    facts: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    notes: list[str] = field(default_factory=list[str])
    tiles: list[tuple[str, str, str]] = field(default_factory=list[tuple[str, str, str]])
    """Title, value and note of the headline numbers."""
    has_mask: bool = False
    sections: list[_Section] = field(default_factory=list[_Section])
    charts: list[_Chart] = field(default_factory=list[_Chart])
    tables: list[_Table] = field(default_factory=list[_Table])
    errors: list[tuple[str, Sequence[str], str]] = field(
        default_factory=list[tuple[str, Sequence[str], str]]
    )
    """What, messages, and what to change."""


def _page(title: str, viewed: Viewed) -> _Page:
    facts = [("Read as", f"hone {viewed.command}"), ("Since", viewed.since)]
    if viewed.cfg.model.path:
        facts.append(("Model", viewed.cfg.model.path))
    return _Page(title, facts, list(viewed.notes))


def show_page(viewed: Viewed, shown: Shown) -> str:
    """The page of `hone data show`."""
    page = _page("Data", viewed)
    if shown.note:
        page.notes.append(shown.note)
    page.sections = [_section(source, shown.unit) for source in shown.sources]
    page.has_mask = any(
        text.has_mask for source in shown.sources for row in source.rows for text in row.texts
    )
    return _render(page)


def _section(source: ShownSource, unit: str) -> _Section:
    cells = [(x.name, x.kind, x.read_as, x.example) for x in source.columns]
    columns = ("column", "holds", "read as", "for example")
    return _Section(
        f"{source.path} ({source.key})",
        _Table("", columns, cells, source.layout, is_text=True),
        source.problem,
        [_row(row, unit) for row in source.rows],
    )


def _row(row: ShownRow, unit: str) -> _Row:
    texts = [_text(text, unit) for text in row.texts]
    return _Row(row.id, row.location, row.problem, row.facts, texts)


def _text(text: ShownText, unit: str) -> _Text:
    rest = text.num_whole - text.num_prompt
    counts = f"{text.num_prompt:,} + {rest:,}" if rest else f"{text.num_whole:,}"
    meta = " · ".join(filter(None, [f"{counts} {unit}", text.note]))
    runs = [_run(piece, has_mask=text.has_mask) for piece in elided(text.pieces, _MOST)]
    return _Text(text.label, meta, runs)


def _run(piece: Piece | int, *, has_mask: bool) -> _Run:
    if isinstance(piece, int):
        return _Run(f" … {piece:,} more characters … ", "left-out")
    kinds = ["special"] if piece.is_special else []
    if has_mask:
        kinds.append("trained" if piece.is_trained else "untrained")
    return _Run(piece.text, " ".join(kinds))


def stats_page(viewed: Viewed, stats: Stats) -> str:
    """The page of `hone data stats`."""
    page = _page("Data in numbers", viewed)
    page.notes += filter(None, [stats.note])
    if stats.is_interrupted:
        page.notes.append(
            f"Interrupted: these are the figures of the first {stats.num_rows:,} rows alone."
        )
    num_files = sum(len(source.files) for source in stats.sources)
    size = sum(source.num_bytes for source in stats.sources)
    repeats = stats.prompts.num_repeats
    page.tiles = [
        ("Rows", f"{stats.num_rows:,}", f"{stats.num_read:,} can be read"),
        ("Files", f"{num_files:,}", f"{size:,} bytes"),
        ("Repeated prompts", f"{repeats:,}", share(repeats, stats.prompts.number)),
    ]
    if stats.missing_answers is not None:
        note = f"of {stats.num_rows:,} rows"
        page.tiles.append(("Missing answers", f"{stats.missing_answers:,}", note))
    page.notes += stats.dropped.skipped_in_words
    if stats.problems:
        page.tiles.append(("Problems", f"{len(stats.problems):,}", "see hone data check"))
    page.charts = [
        _chart(f"Length of the {name}", stats.unit, lengths.bars())
        for name, lengths in stats.lengths.items()
    ]
    page.tables = [*_sources(stats), *_lengths(stats), *_values(stats)]
    return _render(page)


def _sources(stats: Stats) -> list[_Table]:
    rows = [
        (x.path, f"{x.num_rows:,}", f"{len(x.files):,}", f"{x.num_bytes:,}", x.layout)
        for x in stats.sources
    ]
    tables = [_Table("Sources", ("source", "rows", "files", "bytes", "layout"), rows)]
    if len(stats.tasks) > 1:
        tasks = [
            (task, f"{number:,}", share(number, stats.num_read))
            for task, number in stats.tasks.most_common(50)
        ]
        tables.append(_Table("Rows by task", ("task", "rows", "share"), tasks))
    return tables


def _lengths(stats: Stats) -> list[_Table]:
    tables: list[_Table] = []
    if stats.lengths:
        names = list(next(iter(stats.lengths.values())).quantiles)
        rows = [
            (name, *(f"{value:,}" for value in x.quantiles.values()), f"{x.mean:,.1f}")
            for name, x in stats.lengths.items()
        ]
        tables.append(_Table(f"Lengths in {stats.unit}", ("of the", *names, "mean"), rows))
    for name, lengths in stats.lengths.items():
        if name == "completion":
            continue
        own = stats.limits.get(name)
        limits = lengths.limits(*([] if own is None else [own[1]]))
        rows = [
            (
                f"{limit:,}" + (f" ({own[0]})" if own is not None and own[1] == limit else ""),
                f"{lengths.above(limit):,}",
                share(lengths.above(limit), lengths.number),
            )
            for limit in limits
        ]
        title = f"What a limit of the {name} drops"
        tables.append(_Table(title, ("limit", "rows", "share"), rows))
    return tables


def _values(stats: Stats) -> list[_Table]:
    tables: list[_Table] = []
    if duplicates := stats.duplicates(20):
        rows = [(x.text or "(not remembered)", f"{x.number:,}", x.place) for x in duplicates]
        columns = ("prompt", "rows", "first in")
        tables.append(_Table("Prompts that repeat", columns, rows, is_text=True))
    if stats.answers.number:
        found = stats.answers.most_frequent(20)
        of = stats.answers.number
        rows = [(x.text or "(not remembered)", f"{x.number:,}", share(x.number, of)) for x in found]
        title = f"Most frequent {answers_of(stats)}"
        tables.append(_Table(title, ("answer", "rows", "share"), rows, is_text=True))
    return tables


def check_page(viewed: Viewed, checked: Checked) -> str:
    """The page of `hone data check`."""
    page = _page("Data, checked", viewed)
    if checked.is_interrupted:
        page.notes.append(f"Interrupted: {checked.num_rows:,} rows were checked, and no more.")
    number = len(checked.problems)
    page.tiles = [
        ("Errors", f"{number:,}", "a run refuses the data" if number else "a run takes the data"),
        ("Dropped", f"{checked.num_dropped:,}", f"of {checked.num_rows:,} rows"),
    ]
    page.notes += [*conclusion(checked), *checked.warnings]
    page.errors = [
        (f"{kind.number:,} x {kind.what}", kind.told, kind.remedy)
        for kind in checked.problems.kinds.values()
    ]
    rows = [
        (x.path, f"{x.num_rows:,}", f"{x.num_kept:,}", f"{x.num_held_out:,}", x.layout)
        for x in checked.sources
    ]
    page.tables = [_Table("Sources", ("source", "rows", "kept", "held out", "read as"), rows)]
    page.tables += [
        _Table(f"Dropped: {x.reason}", ("row",), [(told,) for told in x.told], f"{x.number:,} rows")
        for x in checked.dropped.values()
    ]
    return _render(page)


def _chart(title: str, unit: str, bars: Sequence[Bar]) -> _Chart:
    most = max(bar.number for bar in bars)
    step = 100 / len(bars)
    drawn = [
        _Bar(
            x=place * step,
            y=100 - 100 * bar.number / most,
            width=step * _BAR,
            height=100 * bar.number / most,
            said=f"{range_of(bar)} {unit}: {bar.number:,}",
        )
        for place, bar in enumerate(bars)
    ]
    # Five labels at most, none so far to the right that it would leave a phone's page.
    every = -(-len(bars) // 5)
    places = range(0, max(len(bars) - every // 2, 1), every)
    ticks = [(place * step, f"{bars[place].low:,}") for place in places]
    return _Chart(title, unit, drawn, ticks, f"{most:,}")


def _render(page: _Page) -> str:
    return _template().render(page=page)


@cache
def _template() -> Template:
    environment = template_environment("hone.tools.data_view", "hone.tools.report")
    environment.filters["printable"] = _printable
    return environment.get_template("data.html.jinja")


def _printable(value: Any) -> str:
    return printable(str(value))
