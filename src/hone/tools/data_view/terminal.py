"""Prints what was found out about data, in colours where the console has them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from hone.observe.printable import printable
from hone.tools.data_view.check import Checked
from hone.tools.data_view.counts import Bar, Lengths
from hone.tools.data_view.problems import Problems
from hone.tools.data_view.show import Piece, Shown, ShownRow, ShownSource, ShownText
from hone.tools.data_view.stats import Stats

__all__ = [
    "answers_of",
    "conclusion",
    "elided",
    "print_check",
    "print_show",
    "print_stats",
    "range_of",
    "share",
]

_LABEL_WIDTH = 13
_BAR_WIDTH = 40
_MOST = 4000
"""Most characters of a text that are printed."""
_TRAINED, _OTHER, _SPECIAL = "green", "bright_black", "reverse"
_OPEN, _CLOSE = "⟦", "⟧"
"""Around what is trained, where there are no colours."""


def share(number: int, of: int) -> str:
    """A share in per cent."""
    return f"{100 * number / of:.3g} %" if of else "-"


def elided(pieces: Sequence[Piece], most: int) -> list[Piece | int]:
    """The pieces of a text; of a longer one than `most` characters its beginning and its end, with
    the number of characters left out between them."""
    total = sum(len(piece.text) for piece in pieces)
    if total <= most:
        return list(pieces)
    left, right = most // 2, total - most // 2
    kept: list[Piece | int] = []
    place = 0
    for piece in pieces:
        begin, end = place, place + len(piece.text)
        place = end
        parts = [piece.text[: max(left - begin, 0)], piece.text[max(right - begin, 0) :]]
        for part, is_tail in zip(parts, (False, True), strict=True):
            if is_tail and total - most not in kept and end > right:
                kept.append(total - most)
            if part:
                kept.append(Piece(part, piece.is_trained, piece.is_special))
    return kept


def print_show(console: Console, shown: Shown) -> None:
    """Print columns and rows."""
    for source in shown.sources:
        _print_source(console, source, shown.unit)
    has_mask = any(t.has_mask for s in shown.sources for row in s.rows for t in row.texts)
    if has_mask:
        console.print()
        console.print(_legend(console))
    if shown.note:
        console.print(Text(f"note: {printable(shown.note)}", style="dim"))


def _legend(console: Console) -> Text:
    if _has_colours(console):
        return Text.assemble(
            ("trained", _TRAINED),
            ", ",
            ("not trained", _OTHER),
            ", ",
            ("special tokens", _SPECIAL),
        )
    return Text(f"{_OPEN} {_CLOSE} stand around what is trained")


def _has_colours(console: Console) -> bool:
    return console.color_system is not None and not console.no_color


def _print_source(console: Console, source: ShownSource, unit: str) -> None:
    console.print()
    title = f"{source.path} ({source.key})"
    console.print(Rule(Text(printable(title), style="bold"), align="left", style="dim"))
    if source.layout:
        console.print(f"layout: {source.layout}", markup=False)
    table = Table(box=None, padding=(0, 2, 0, 0), expand=True)
    table.add_column("column", no_wrap=True)
    for name, width in (("holds", 14), ("read as", 10)):
        table.add_column(name, min_width=width)
    table.add_column("for example", overflow="ellipsis", no_wrap=True, style="dim", ratio=1)
    for column in source.columns:
        cells = (column.name, column.kind, column.read_as, column.example)
        table.add_row(*(Text(printable(cell)) for cell in cells))
    console.print(table)
    if source.problem:
        console.print(Text.assemble(("error: ", "bold red"), printable(source.problem)))
    for row in source.rows:
        _print_row(console, row, unit)


def _print_row(console: Console, row: ShownRow, unit: str) -> None:
    console.print()
    title = Text.assemble((printable(row.id), "bold"), (f"  {printable(row.location)}", "dim"))
    console.print(title)
    if row.problem:
        console.print(Text.assemble(("refused: ", "bold red"), printable(row.problem)))
    for name, value in row.facts:
        _line(console, name, Text(printable(value)))
    for text in row.texts:
        _line(console, text.label, _text(console, text), _meta(text, unit))


def _meta(text: ShownText, unit: str) -> str:
    rest = text.num_whole - text.num_prompt
    counts = f"{text.num_prompt:,} + {rest:,}" if rest else f"{text.num_whole:,}"
    return "\n".join(filter(None, [f"{counts} {unit}", text.note]))


def _text(console: Console, text: ShownText) -> Text:
    """A text with its mask: in colours, or with marks around what is trained."""
    said = Text()
    has_marks = text.has_mask and not _has_colours(console)
    is_open = False
    for piece in elided(text.pieces, _MOST):
        if isinstance(piece, int):
            said.append(f" … {piece:,} more characters … ", style="dim")
            continue
        if has_marks and piece.is_trained is not is_open:
            said.append(_OPEN if piece.is_trained else _CLOSE)
            is_open = piece.is_trained
        style = ""
        if text.has_mask:
            style = _TRAINED if piece.is_trained else _OTHER
        if piece.is_special:
            style = f"{style} {_SPECIAL}".strip()
        said.append(printable(piece.text), style=style)
    if is_open:
        said.append(_CLOSE)
    return said


def _line(console: Console, label: str, said: Text, meta: str = "") -> None:
    grid = Table.grid(expand=True, padding=(0, 2, 0, 0))
    grid.add_column(width=_LABEL_WIDTH, no_wrap=True, overflow="ellipsis", style="bold")
    grid.add_column(ratio=1, overflow="fold")
    grid.add_column(justify="right", style="dim", max_width=28)
    grid.add_row(Text(printable(label)), said, meta)
    console.print(grid)


def print_stats(console: Console, stats: Stats) -> None:
    """Print all figures and histograms."""
    if stats.is_interrupted:
        text = f"interrupted: these are the figures of the first {stats.num_rows:,} rows alone"
        console.print(Text(text, style="bold yellow"))
    _print_sources(console, stats)
    if len(stats.tasks) > 1:
        _print_counts(console, "rows by task", stats.tasks, stats.num_read)
    for name, lengths in stats.lengths.items():
        _print_lengths(console, name, lengths, stats)
    _print_duplicates(console, stats)
    _print_answers(console, stats)
    _print_refused(console, stats.problems)
    if stats.note:
        console.print()
        console.print(Text(f"note: {printable(stats.note)}", style="dim"))


def _print_sources(console: Console, stats: Stats) -> None:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("source", overflow="fold")
    for name in ("rows", "files", "bytes"):
        table.add_column(name, justify="right")
    table.add_column("layout", overflow="fold")
    for source in stats.sources:
        files, size = (f"{len(source.files):,}", f"{source.num_bytes:,}")
        table.add_row(
            Text(printable(source.path)),
            f"{source.num_rows:,}",
            files if source.files else "-",
            size if source.files else "-",
            Text(source.layout),
        )
    console.print(table)
    console.print()
    console.print(f"rows: {stats.num_rows:,}, of which a run can read {stats.num_read:,}")
    for line in stats.dropped.skipped_in_words:
        console.print(Text(printable(line)), soft_wrap=True)
    if stats.num_unreadable_images:
        number = f"{stats.num_unreadable_images:,}"
        console.print(f"dropped for an image that cannot be read: {number}")


def _print_counts(console: Console, title: str, counts: Mapping[str, int], of: int) -> None:
    console.print()
    console.print(Text(title, style="bold"))
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(overflow="fold", max_width=60)
    table.add_column(justify="right")
    table.add_column(justify="right", style="dim")
    ordered = sorted(counts.items(), key=lambda pair: -pair[1])
    for name, number in ordered[:20]:
        table.add_row(Text(printable(name)), f"{number:,}", share(number, of))
    if len(ordered) > 20:
        rest = sum(number for _, number in ordered[20:])
        table.add_row(f"{len(ordered) - 20:,} others", f"{rest:,}", share(rest, of))
    console.print(table)


def _print_lengths(console: Console, name: str, lengths: Lengths, stats: Stats) -> None:
    console.print()
    title = f"length of the {name}, in {stats.unit}"
    console.print(Text(title, style="bold"))
    figures = ", ".join(f"{key} {value:,}" for key, value in lengths.quantiles.items())
    console.print(f"{figures}; mean {lengths.mean:,.1f}, total {lengths.total:,}")
    if stats.num_cut and name != "completion":
        console.print(f"{stats.num_cut:,} rows are longer than is measured; their beginning counts")
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(justify="right")
    table.add_column(no_wrap=True)
    table.add_column(justify="right", style="dim")
    bars = lengths.bars()
    most = max(bar.number for bar in bars)
    for bar in bars:
        table.add_row(range_of(bar), Text("█" * _cells(bar, most)), f"{bar.number:,}")
    console.print(table)
    if name == "completion":
        return
    own = stats.limits.get(name)
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("a limit of", justify="right")
    table.add_column("drops", justify="right")
    table.add_column("share", justify="right", style="dim")
    table.add_column()
    for limit in lengths.limits(*([] if own is None else [own[1]])):
        above = lengths.above(limit)
        is_own = own is not None and limit == own[1]
        mark = f"{own[0]} of the run" if own is not None and is_own else ""
        table.add_row(f"{limit:,}", f"{above:,}", share(above, lengths.number), mark)
    console.print(table)


def range_of(bar: Bar) -> str:
    """The lengths of a bar."""
    return f"{bar.low:,}" if bar.high - bar.low == 1 else f"{bar.low:,} to {bar.high - 1:,}"


def _cells(bar: Bar, most: int) -> int:
    """The length of a bar. One that is not empty shows."""
    return max(round(_BAR_WIDTH * bar.number / most), 1) if bar.number else 0


def _print_duplicates(console: Console, stats: Stats) -> None:
    number = stats.prompts.num_repeats
    console.print()
    console.print(Text("prompts that repeat another row's", style="bold"))
    distinct = f"{stats.prompts.num_distinct:,} different prompts"
    of = share(number, stats.prompts.number)
    console.print(f"{number:,} rows ({of}); {distinct}")
    for each in stats.duplicates():
        text = "one that is not remembered" if each.text is None else f"{each.place}: {each.text}"
        console.print(Text(printable(f"  {each.number:,} times, {text}")), soft_wrap=True)


def _print_answers(console: Console, stats: Stats) -> None:
    console.print()
    what = answers_of(stats)
    if not stats.answers.number and stats.missing_answers is None:
        console.print(f"{what}: no column has them")
        return
    console.print(Text(f"most frequent {what}", style="bold"))
    missing = stats.missing_answers
    rest = "" if missing is None else f"; {missing:,} rows have none"
    console.print(f"{stats.answers.num_distinct:,} different ones{rest}")
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(overflow="fold", max_width=60)
    table.add_column(justify="right")
    table.add_column(justify="right", style="dim")
    for each in stats.answers.most_frequent(5):
        shown = "(not remembered)" if each.text is None else printable(each.text)
        of = share(each.number, stats.answers.number)
        table.add_row(Text(shown), f"{each.number:,}", of)
    console.print(table)


def answers_of(stats: Stats) -> str:
    """What is counted as the answer of a row."""
    return "completions" if "completion" in stats.lengths else "answers"


def _print_refused(console: Console, problems: Problems) -> None:
    if not problems:
        return
    console.print()
    number = f"{len(problems):,}"
    text = f"problems that a run would refuse: {number}; `hone data check` names them"
    console.print(Text(text, style="bold red"))
    for place in problems.stopped:
        console.print(Text(printable(f"reading stopped at {place}"), style="red"))


def print_check(console: Console, checked: Checked) -> None:
    """Print what is dropped, what is refused, and what to change."""
    if checked.is_interrupted:
        text = f"interrupted: {checked.num_rows:,} rows were checked, and no more"
        console.print(Text(text, style="bold yellow"))
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("source", overflow="fold")
    for name in ("rows", "kept", "held out"):
        table.add_column(name, justify="right")
    table.add_column("read as", overflow="fold")
    for source in checked.sources:
        roles = ", ".join(f"{role} from '{name}'" for role, name in source.roles.items())
        table.add_row(
            Text(printable(source.path)),
            f"{source.num_rows:,}",
            f"{source.num_kept:,}",
            f"{source.num_held_out:,}",
            Text(printable(f"{source.layout}: {roles}" if roles else "")),
        )
    console.print(table)
    for dropped in checked.dropped.values():
        console.print()
        title = f"dropped: {dropped.number:,} rows with {dropped.reason}"
        console.print(Text(title, style="yellow"))
        _print_told(console, dropped.told, dropped.number)
    for warning in checked.warnings:
        console.print(Text.assemble(("warning: ", "yellow"), printable(warning)))
    for kind in checked.problems.kinds.values():
        console.print()
        text = printable(f"{kind.number:,} x {kind.what}")
        console.print(Text.assemble(("error: ", "bold red"), text))
        _print_told(console, kind.told, kind.number)
        if kind.remedy:
            console.print(Text(f"  change: {kind.remedy}", style="dim"))
    console.print()
    for line in conclusion(checked):
        console.print(Text(printable(line), style="dim"))
    number = len(checked.problems)
    summary = f"errors: {number:,}, dropped: {checked.num_dropped:,} of {checked.num_rows:,} rows"
    console.print(Text(summary, style="bold red" if number else "bold green"))


def conclusion(checked: Checked) -> Iterator[str]:
    """What else is to be said of a check."""
    for place in checked.problems.stopped:
        yield f"reading stopped at {place}: what follows there was not checked"
    if checked.note:
        yield f"note: {checked.note}"
    if checked.longest:
        yield f"the longest row that is kept has {checked.longest:,} {checked.unit}"


def _print_told(console: Console, told: Sequence[str], number: int) -> None:
    for message, _ in groupby(told):
        console.print(Text(printable(f"  {message}")), soft_wrap=True)
    if number > len(told):
        console.print(Text(f"  and {number - len(told):,} more", style="dim"))
