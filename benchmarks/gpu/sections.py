"""Starting a script of this folder: sections by name, a time limit, progress, tables, a verdict.

    run = Run(__doc__, ("layers", "step"), seconds=200)
    sys.exit(run.go({"layers": layers, "step": step}))

GPU time is short: what one section finds must not be lost to another one that fails, hangs or takes
longer than thought. Every line is printed when it is known and again, without progress, at the end.
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import os
import sys
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch
import torch.distributed as dist

GRACE_S = 60.0
"""How long after its time a script is shown by the stacks of its threads, and ended."""
NAME_WIDTH, CELL_WIDTH = 46, 13
STARTED = perf_counter()


class Run:
    """One start of a script, in one process or in all that torchrun has started.

    Of several processes the first prints, and all make the same calls: time and failures are agreed
    upon. `args` are the parsed flags.
    """

    def __init__(
        self,
        doc: str | None,
        sections: Sequence[str],
        *,
        on_request: Sequence[str] = (),
        seconds: float,
        add_flags: Callable[[argparse.ArgumentParser], object] | None = None,
    ) -> None:
        """Reads the command line. Sections `on_request` run only where they are named; `seconds` is
        the default of the time after which nothing is begun."""
        parser = argparse.ArgumentParser(
            description=doc, formatter_class=argparse.RawDescriptionHelpFormatter
        )
        parser.add_argument(
            "sections", nargs="*", metavar="SECTION", help=f"of {', '.join(sections)}"
        )
        parser.add_argument(
            "--seconds",
            type=float,
            default=seconds,
            help=f"begin nothing after so many ({seconds:g})",
        )
        if add_flags is not None:
            add_flags(parser)
        self.args = parser.parse_args()
        if unknown := set(self.args.sections) - set(sections):
            parser.error(f"unknown: {', '.join(sorted(unknown))}; known: {', '.join(sections)}")
        self.chosen = self.args.sections or [s for s in sections if s not in on_request]
        self._is_first = os.environ.get("RANK", "0") == "0"
        self._lines: list[str] = []
        self._failed: list[str] = []
        self._skipped: list[str] = []
        faulthandler.dump_traceback_later(self.args.seconds + GRACE_S, exit=True)

    def go(self, sections: Mapping[str, Callable[[], object]]) -> int:
        """Runs what is chosen, in the order in which it is named; the exit code: 1 where a check
        failed, 2 where time ran out, else 0."""
        for name in self.chosen:
            if name not in sections or not self.has_time(name):
                continue
            begun = perf_counter()
            self.note(f"-- {name}")
            self._lines.append("")
            with self.attempt(name):
                sections[name]()
            self.note(f"-- {name} took {perf_counter() - begun:.1f} s")
        return self._finish()

    @contextmanager
    def attempt(self, name: str) -> Generator[None]:
        """In one process an error within the block is a failed check, and what follows runs. Of
        several processes the others wait for this one, until torchrun ends them."""
        try:
            yield
        except Exception as error:
            self.check(f"{name}: {type(error).__name__}: {error}"[:300], False)
            traceback.print_exc()
            if dist.is_initialized() and dist.get_world_size() > 1:
                self._print()
                raise
        release()

    def note(self, *cells: object) -> None:
        """A line of progress."""
        self._say(f"{perf_counter() - STARTED:6.1f} s  {_line(*cells)}")

    def row(self, *cells: object) -> None:
        """A line that is printed at the end as well."""
        self.note(*cells)
        self._lines.append(_line(*cells))

    def check(self, name: str, good: bool, *cells: object) -> None:
        """A row with a verdict, which decides the exit code; `good` may differ between ranks."""
        self.row(name, *cells, "ok" if good else "FAILED")
        if not good:
            self._failed.append(name)

    def has_time(self, what: str) -> bool:
        """Whether `what` may begin; where not, it is named as skipped. Collective."""
        elapsed = max(self._gather(perf_counter() - STARTED))
        if elapsed <= self.args.seconds:
            return True
        self._skipped.append(what)
        self.note(f"no time left for {what}")
        return False

    def _finish(self) -> int:
        failed = {name: None for names in self._gather(self._failed) for name in names}
        self._print()
        if failed:
            self._say(f"FAILED: {'; '.join(failed)}")
        if self._skipped:
            self._say(f"SKIPPED for lack of time: {'; '.join(self._skipped)}")
        if not failed and not self._skipped:
            self._say("all good")
        self._say(f"{perf_counter() - STARTED:.0f} s")
        if dist.is_initialized():
            dist.destroy_process_group()
        faulthandler.cancel_dump_traceback_later()
        return 1 if failed else 2 if self._skipped else 0

    def _print(self) -> None:
        self._say("\n".join(["", *self._lines, ""]))

    def _say(self, text: str) -> None:
        if self._is_first:
            sys.stdout.write(text + "\n")
            sys.stdout.flush()

    def _gather(self, value: Any) -> list[Any]:
        """The value of every process."""
        if not dist.is_initialized():
            return [value]
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values


def release() -> None:
    """Gives the memory of what is no longer referred to back to the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _line(*cells: object) -> str:
    texts = [f"{cell:.4g}" if isinstance(cell, float) else str(cell) for cell in cells]
    return f"{texts[0]:{NAME_WIDTH}}" + "".join(f" {text:>{CELL_WIDTH}}" for text in texts[1:])
