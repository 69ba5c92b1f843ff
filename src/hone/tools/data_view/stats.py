"""`hone data stats`: what all rows hold, counted in one pass.

Memory does not grow with the rows but for 16 bytes each, the digests of prompt and answer; lengths
are counted, not kept.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from hone.data.columns import Example, value_of
from hone.data.filters import FilterReport
from hone.data.sources import SourceRow, shorten
from hone.errors import UserError
from hone.tools.data_view.chosen import Viewed
from hone.tools.data_view.counts import Lengths, Repeated, Values, digest_of
from hone.tools.data_view.problems import Problems
from hone.tools.data_view.reading import (
    Item,
    Reader,
    attempt,
    blocks,
    examples_of,
    read_in_passes,
    readers_of,
)
from hone.tools.data_view.text import Entry, Language, open_all, said

__all__ = ["SourceCounts", "Stats", "Tell", "count"]

Tell = Callable[[int], None]
"""Is told the number of rows read so far, once a block."""
_MOST_TASKS = 1000
_OTHER_TASKS = "(others)"


@dataclass(slots=True)
class SourceCounts:
    """What a source has."""

    path: str
    key: str
    layout: str = ""
    roles: dict[str, str] = field(default_factory=dict[str, str])
    num_rows: int = 0
    files: dict[str, int] = field(default_factory=dict[str, int])
    """Bytes by file, as far as it is read; empty for what is no file here."""

    @property
    def num_bytes(self) -> int:
        return sum(self.files.values())


@dataclass(slots=True)
class Stats:
    """What has been counted."""

    unit: str
    note: str = ""
    """What a person should know about the lengths."""
    sources: list[SourceCounts] = field(default_factory=list[SourceCounts])
    tasks: Counter[str] = field(default_factory=Counter[str])
    num_read: int = 0
    """Rows that a run can read."""
    dropped: FilterReport = field(default_factory=FilterReport)
    """Rows that a run leaves out before it reads them; they are in no other figure."""
    num_unreadable_images: int = 0
    missing_answers: int | None = None
    """Rows without an answer, of those that no filter leaves out; None where none is read."""
    lengths: dict[str, Lengths] = field(default_factory=dict[str, Lengths])
    """Of `prompt`, `completion` and `whole row`."""
    num_cut: int = 0
    """Rows too long to be measured, which count with the length of their beginning."""
    limits: dict[str, tuple[str, int]] = field(default_factory=dict[str, tuple[str, int]])
    """Of the run, by what they limit: the key and the most tokens."""
    prompts: Values = field(default_factory=Values)
    answers: Values = field(default_factory=Values)
    """Of demonstrations the completions, of pairs the chosen ones."""
    problems: Problems = field(default_factory=Problems)
    is_interrupted: bool = False

    @property
    def num_rows(self) -> int:
        return sum(source.num_rows for source in self.sources)

    def require_rows(self) -> None:
        """Raise UserError where nothing could be read, with the first reason."""
        if not self.num_rows and self.problems:
            raise UserError(next(iter(self.problems.kinds.values())).told[0])

    def duplicates(self, most: int = 5) -> list[Repeated]:
        """The prompts that most rows have."""
        return self.prompts.most_frequent(most, at_least=2)


def count(viewed: Viewed, language: Language, tell: Tell = lambda num_rows: None) -> Stats:
    """Count all rows of all sources. Ctrl-C ends it; what was counted until then is returned."""
    counter = _Counter(viewed, language, tell)
    readers = readers_of(viewed.cfg, viewed.sources)
    if not read_in_passes(readers, counter.begin, counter.read):
        counter.stats.is_interrupted = True
    return counter.stats


class _Counter:
    """One pass over all sources, or several where rows say something else than the first ones."""

    def __init__(self, viewed: Viewed, language: Language, tell: Tell) -> None:
        self._viewed, self._language, self._tell = viewed, language, tell
        self.begin()

    def begin(self) -> None:
        """Forget what an earlier pass has counted."""
        self.stats = Stats(self._language.unit, self._language.note)
        for limit in self._language.limits:
            what = "whole row" if limit.name == "data.max_tokens" else "prompt"
            self.stats.limits[what] = (limit.name, limit.max_tokens)

    def read(self, reader: Reader) -> None:
        """Count the rows of a source."""
        stats = self.stats
        source = SourceCounts(reader.source.path, reader.key)
        stats.sources.append(source)
        files = _Files(source)
        for block in blocks(reader, stats.problems):
            source.layout, source.roles = reader.layout, reader.roles
            source.num_rows += len(block.rows)
            for row in block.rows:
                files.see(row)
            for why in block.skipped:
                stats.dropped.skip(why)
            self._answers(reader, block.left)
            self._entries([(row, item) for row, items in block.read for item in items])
            self._tell(stats.num_rows)

    def _answers(self, reader: Reader, rows: Sequence[SourceRow]) -> None:
        column = reader.roles.get("answer")
        if column is None:
            return
        missing = sum(value_of(row.columns, column) is None for row in rows)
        self.stats.missing_answers = (self.stats.missing_answers or 0) + missing

    def _entries(self, read: Sequence[tuple[SourceRow, Item]]) -> None:
        stats, language = self.stats, self._language
        report = FilterReport()
        items = [item for _, item in read]
        opened = open_all(items, language, stats.problems, report)
        stats.num_unreadable_images += len(report.unreadable)
        done = attempt(opened, lambda some: language.render(some, False), stats.problems)
        last = ""
        for item, entry in done:
            # Two completions of a pair may be items of their own.
            self._entry(item, entry, is_new=item.location != last)
            last = item.location

    def _entry(self, item: Item, entry: Entry, *, is_new: bool) -> None:
        stats = self.stats
        example = examples_of(item)[0]
        stats.num_cut += entry.is_cut
        self._length("prompt", entry.num_prompt)
        if example.completion is not None:
            for text in entry.texts:
                self._length("completion", text.num_completion)
            self._length("whole row", entry.num_whole)
        if not is_new:
            return
        stats.num_read += 1
        task = example.task
        if task not in stats.tasks and len(stats.tasks) >= _MOST_TASKS:
            task = _OTHER_TASKS
        stats.tasks[task] += 1
        stats.prompts.add(entry.digest, _shown(example), item.location)
        said_last = example.completion
        answer = example.answer if said_last is None else said(said_last["content"])
        if answer is not None:
            stats.answers.add(digest_of(answer), shorten(answer), item.location)

    def _length(self, name: str, length: int) -> None:
        self.stats.lengths.setdefault(name, Lengths()).add(length)


def _shown(example: Example) -> str:
    asked = example.prompt
    if isinstance(asked, str):
        return shorten(asked)
    return shorten(" / ".join(said(message.get("content")) for message in asked))


class _Files:
    """The files of a source, found by the places of its rows."""

    def __init__(self, source: SourceCounts) -> None:
        self._source = source
        self._last = ""

    def see(self, row: SourceRow) -> None:
        """Take note of the file of a row."""
        name = row.location.rpartition(", ")[0]
        if name == self._last or row.folder is None:
            return
        self._last = name
        with suppress(OSError):
            self._source.files.setdefault(name, Path(name).stat().st_size)
