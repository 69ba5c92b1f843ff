"""`hone data show`, `stats` and `check`: what a run would read, before it starts."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.text import Text

from hone.cli.arguments import Actions, run_action, take_number
from hone.cli.command import quiet_transformers, say_loading, take_word
from hone.distributed.openmp import set_up_openmp
from hone.errors import UserError
from hone.observe.printable import printable
from hone.observe.whole_file import write_whole
from hone.tools.data_view.check import check
from hone.tools.data_view.chosen import Viewed, choose
from hone.tools.data_view.page import check_page, show_page, stats_page
from hone.tools.data_view.show import show
from hone.tools.data_view.stats import count
from hone.tools.data_view.terminal import print_check, print_show, print_stats
from hone.tools.data_view.text import Language, NoTokenizerError, plain_text

__all__ = ["Progress", "language_of", "run"]

_USAGE = """\
usage: hone data show  [RECIPE] [SOURCE ...] [--rows N] [--from N]
                       [--for COMMAND] [--output FILE.html] [--section.key VALUE ...]
       hone data stats [RECIPE] [SOURCE ...] [--for COMMAND] [--output FILE.html] ...
       hone data check [RECIPE] [SOURCE ...] [--for COMMAND] [--output FILE.html] ...

What a run would read of its data, before it starts; nothing is trained, and no GPU
is needed. `show` lists the columns, how they are read, and the first rows as the run
would have them. `stats` counts rows, tasks, answers, lengths, what limits would
drop, and prompts that repeat. `check` reads every row as the run would, and says
what it would refuse or drop, with places and remedies.

SOURCE is a JSONL or Parquet file, a folder, a pattern ('shards/*.parquet'), a URL
or a name on the hub (owner/name); it takes the place of those of the recipe.
Without one all of the recipe are read. How rows are read follows from the command
that the recipe is for, else from their columns: as prompts (rl), demonstrations
(sft) or preferences (dpo, reward-model).
With --model.path rows are rendered by its tokenizer and chat template, lengths are
in tokens, and the tokens that are trained are told from the others; without it
texts are plain and lengths in characters.

  --rows N       rows of each source to show (3)
  --from N       the first row to show, counted from 1
  --for COMMAND  rl, sft, dpo or reward-model, in place of what is recognised
  --output FILE  also write a page that shows the same in a browser

Exit code of `check`: 1 where a run would refuse the data. Ctrl-C ends `stats` and
`check` with what was counted so far.
"""
_ROWS = 3
_INTERRUPTED = 128 + signal.SIGINT
_TELL_EVERY_S = 0.5


def run(argv: Sequence[str]) -> int:
    """Run `hone data show`, `stats` or `check`."""
    return run_action("hone data", _ACTIONS, _USAGE, argv)


@dataclass(frozen=True, slots=True)
class _Given:
    """The arguments that all actions have."""

    viewed: Viewed
    output: Path | None

    def console(self) -> Console:
        """A console on which it is said how the rows are read."""
        console = Console(highlight=False)
        for line in self.viewed.said:
            console.print(Text(printable(line), style="dim"))
        return console

    def write(self, page: str) -> None:
        """Write the page where one is asked for."""
        if self.output is not None:
            write_whole(self.output, page, "--output")
            sys.stderr.write(f"written: {self.output}\n")


def _show(words: list[str]) -> int:
    number, words = take_number("--rows", words, _ROWS)
    first, words = take_number("--from", words, 1)
    given = _given(words)
    shown = show(given.viewed, language_of(given.viewed), first=first, number=number)
    console = given.console()
    print_show(console, shown)
    given.write(show_page(given.viewed, shown))
    return 1 if shown.has_problems else 0


def _stats(words: list[str]) -> int:
    given = _given(words)
    with Progress() as progress:
        stats = count(given.viewed, language_of(given.viewed), progress.tell)
    stats.require_rows()
    print_stats(given.console(), stats)
    given.write(stats_page(given.viewed, stats))
    return _INTERRUPTED if stats.is_interrupted else 0


def _check(words: list[str]) -> int:
    given = _given(words)
    language = language_of(given.viewed, is_strict=True)
    with Progress() as progress:
        checked = check(given.viewed, language, progress.tell)
    print_check(given.console(), checked)
    given.write(check_page(given.viewed, checked))
    if checked.problems:
        return 1
    return _INTERRUPTED if checked.is_interrupted else 0


def _given(words: list[str]) -> _Given:
    output, words = take_word("--output", words)
    command, words = take_word("--for", words)
    if output is not None and Path(output).suffix != ".html":
        raise UserError(f"--output takes the name of an HTML page, as in data.html, got {output!r}")
    return _Given(choose(words, command), None if output is None else Path(output))


def language_of(viewed: Viewed, *, is_strict: bool = False) -> Language:
    """The model's language, or plain texts where no model is named or, unless `is_strict`, its
    tokenizer is not here."""
    model = viewed.cfg.model
    if not model.path and model.tokenizer is None:
        return plain_text(
            "no model is named, so rows are not rendered and lengths are in characters; "
            "--model.path shows its tokens"
        )
    set_up_openmp("cpu", None)
    say_loading()
    from hone.tools.data_view.tokens import model_language

    quiet_transformers()
    try:
        return model_language(viewed.cfg)
    except NoTokenizerError as error:
        if is_strict:
            raise
        return plain_text(f"rows are not rendered and lengths are in characters, since {error}")


class Progress:
    """A line on the terminal that says how far reading has come. In the block Ctrl-C takes effect
    at the end of a block of rows, so that figures are of whole rows; a second one at once."""

    def __init__(self) -> None:
        self._is_interrupted = False
        self._handler: Any = None
        self._is_shown = sys.stderr.isatty()
        self._began = self._last = perf_counter()
        self._first_bytes = _bytes_read()
        self._has_line = False

    def __enter__(self) -> Progress:
        self._handler = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *exc: object) -> None:
        signal.signal(signal.SIGINT, self._handler)
        if self._has_line:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _interrupt(self, number: int, frame: object) -> None:
        del number, frame
        self._is_interrupted = True
        signal.signal(signal.SIGINT, self._handler)

    def tell(self, num_rows: int) -> None:
        """Rewrite the line, at most twice a second. Raises KeyboardInterrupt after Ctrl-C."""
        if self._is_interrupted:
            raise KeyboardInterrupt
        now = perf_counter()
        if not self._is_shown or now - self._last < _TELL_EVERY_S:
            return
        self._last, self._has_line = now, True
        sys.stderr.write(f"\r\x1b[K{self._line(num_rows, now - self._began)}")
        sys.stderr.flush()

    def _line(self, num_rows: int, seconds: float) -> str:
        line = f"{num_rows:,} rows, {num_rows / seconds:,.0f} rows/s"
        read = _bytes_read()
        if read is not None and self._first_bytes is not None:
            line += f", {(read - self._first_bytes) / 2**20:,.1f} MiB read"
        return line


def _bytes_read() -> int | None:
    """Bytes that this process has read so far; None where the system does not say."""
    try:
        text = Path("/proc/self/io").read_text(encoding="ascii")
    except OSError:
        return None
    return int(text.split("rchar: ", 1)[1].split("\n", 1)[0])


_ACTIONS: Actions = {"show": _show, "stats": _stats, "check": _check}
