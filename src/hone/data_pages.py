"""`hone data show`, `stats` and `check` from Python: as a page in a notebook, as text elsewhere."""

from __future__ import annotations

import json
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from io import StringIO
from pathlib import Path
from typing import Any

from rich.console import Console

from hone.cli.data import language_of
from hone.data.given import GivenRows, given_rows, is_source
from hone.errors import UserError
from hone.images.store import STORE
from hone.observe.disk import TEMPORARY, temporary_directory
from hone.observe.user_errors import raises_user_errors
from hone.observe.whole_file import write_whole
from hone.paths import standing_in
from hone.tools.data_view.check import check
from hone.tools.data_view.chosen import Viewed, choose
from hone.tools.data_view.page import check_page, show_page, stats_page
from hone.tools.data_view.show import show
from hone.tools.data_view.stats import count
from hone.tools.data_view.terminal import print_check, print_show, print_stats

__all__ = ["DataPage", "data_check", "data_show", "data_stats"]

_WIDTH = 100
_HEIGHT = 640
"""Of a page in a notebook, in pixels."""
_ROWS = "rows.jsonl"
"""The name under which rows are shown that a program passes."""


@dataclass(frozen=True, slots=True)
class DataPage:
    """What `hone data` says of some data. A notebook shows it as a page, `print` as text."""

    text: str
    page: str
    """HTML that needs nothing else."""
    has_problems: bool
    """Whether a run would refuse a row that was looked at."""

    def save(self, path: str | Path) -> None:
        """Write the page to a file that a browser opens."""
        write_whole(Path(path), self.page, "path")

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        # In a frame, so that neither changes the styles of the other.
        page = escape(self.page)
        return f'<iframe srcdoc="{page}" width="100%" height="{_HEIGHT}" frameborder="0"></iframe>'


@raises_user_errors
def data_show(
    data: Any, /, *, rows: int = 3, first: int = 1, command: str | None = None, **sections: Any
) -> DataPage:
    """The columns of data, how they are read, and `rows` rows from row `first` on, counted from 1,
    as the run of `command` would have them (rl, sft, dpo or reward-model; None: recognised).

    `data` are rows (dicts, or texts for prompts alone), a pandas DataFrame, a `datasets.Dataset`, a
    path, a hub name, or a recipe. Sections are those of the command, such as
    `model={"path": "Qwen/Qwen3-0.6B"}`, with which tokens are shown. Raises UserError.

        hone.data_show([{"prompt": "1+1=", "answer": "2"}])
    """
    for name, value in (("rows", rows), ("first", first)):
        if type(value) is not int or value < 1:
            raise UserError(f"{name}={value!r}; allowed: a whole number >= 1")
    with _viewed(data, command, sections) as (viewed, place):
        shown = show(viewed, language_of(viewed), first=first, number=rows)
        text = _text(viewed, lambda console: print_show(console, shown))
        return DataPage(place(text), place(show_page(viewed, shown)), shown.has_problems)


@raises_user_errors
def data_stats(data: Any, /, *, command: str | None = None, **sections: Any) -> DataPage:
    """What all rows hold: tasks, answers, lengths, what limits drop, prompts that repeat. Arguments
    and errors as of `data_show`."""
    with _viewed(data, command, sections) as (viewed, place):
        stats = count(viewed, language_of(viewed))
        stats.require_rows()
        text = _text(viewed, lambda console: print_stats(console, stats))
        return DataPage(place(text), place(stats_page(viewed, stats)), bool(stats.problems))


@raises_user_errors
def data_check(data: Any, /, *, command: str | None = None, **sections: Any) -> DataPage:
    """Every row that the run would refuse or drop, with its place and a remedy. Arguments and
    errors as of `data_show`."""
    with _viewed(data, command, sections) as (viewed, place):
        checked = check(viewed, language_of(viewed, is_strict=True))
        text = _text(viewed, lambda console: print_check(console, checked))
        return DataPage(place(text), place(check_page(viewed, checked)), bool(checked.problems))


def _text(viewed: Viewed, print_on: Callable[[Console], None]) -> str:
    console = Console(file=StringIO(), width=_WIDTH, highlight=False)
    for line in viewed.said:
        console.print(line, markup=False)
    print_on(console)
    written = console.file
    assert isinstance(written, StringIO)
    return written.getvalue()


@contextmanager
def _viewed(
    data: Any, command: str | None, sections: Mapping[str, Any]
) -> Generator[tuple[Viewed, Callable[[str], str]]]:
    """The configuration under which data are looked at, and what gives rows of the program their
    name in texts. In the block the data can be read."""
    flags = [f"--{key}={value}" for key, value in _flat("", sections)]
    if is_source(data):
        with STORE.own_workers():
            yield choose([str(data), *flags], command), lambda text: text
        return
    with STORE.own_workers(), temporary_directory("hone-") as folder:
        file = GivenRows.of("train", given_rows(data, "data")).write(Path(folder), TEMPORARY)
        with standing_in({_ROWS: file}):
            viewed = choose([_ROWS, *flags], command)
            yield viewed, lambda text: text.replace(str(file), _ROWS)


def _flat(path: str, value: Any) -> Iterable[tuple[str, str]]:
    """Each setting with its key, from nested dicts, as flags have them."""
    if not isinstance(value, Mapping):
        yield path, str(value) if isinstance(value, str | Path) else json.dumps(value)
        return
    for key, item in value.items():
        yield from _flat(f"{path}.{key}" if path else str(key), item)
