"""Console output of a run: one line per step, and a progress bar on a terminal.

      step    reward   length   entropy  KL_rollout     tok/s     time  R_step
         1     0.125    212.0     1.840     3.1e-04     9,512    12.4s    0.41
         2     0.141    208.3     1.832     2.9e-04    10,006    11.8s    0.43

`KL_rollout` is how far the policy that is trained is from the one that sampled; with a KL term
`KL_ref`, how far it is from the reference, stands in its place. `R_step` exists on a GPU only.

Of steps that are over in less than two seconds one in each two seconds has a line, and each that
was evaluated. Without a terminal the same lines come without bar and colour, so that logs stay
plain text.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from typing import NamedTuple, Self

from rich.console import Console as RichConsole
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.text import Text

from hone.observe.printable import printable

__all__ = ["SFT_COLUMNS", "Column", "Console", "Output", "rl_columns"]

HEADER_EVERY = 40
_LINE_EVERY_S = 2.0
_WAITING_LINE_EVERY_S = 20.0
_EVALUATIONS = {
    "eval/reward/mean": "eval",
    "eval/loss": "eval loss",
    "eval/accuracy": "eval accuracy",
}
"""Names of evaluation metrics in a line, by metric."""


class Column(NamedTuple):
    """A column of the step line."""

    title: str
    metric: str
    width: int
    format: Callable[[float], str]


def _compact(value: float) -> str:
    """At most seven characters with three significant digits."""
    if value == 0 or 1e-2 <= abs(value) < 1e4:
        return f"{value:.3f}" if abs(value) < 10 else f"{value:.1f}"
    return f"{value:.1e}"


def _whole(value: float) -> str:
    return f"{value:,.0f}"


def _seconds(value: float) -> str:
    return f"{value:.2f}s" if value < 10 else f"{value:,.1f}s"


def _ratio(value: float) -> str:
    return f"{value:.2f}" if value >= 0.01 else f"{value:.4f}"


_SPEED = (
    Column("tok/s", "perf/tokens_per_s", 10, _whole),
    Column("time", "time/step_s", 9, _seconds),
)
_LIMIT = Column("R_step", "perf/R_step", 8, _ratio)


def rl_columns(*, runs_ahead: bool, has_reference: bool, has_limit: bool) -> tuple[Column, ...]:
    """Columns of the step line of `hone rl`. If engines run ahead: the staleness of samples and the
    time that training waited for them; otherwise the entropy. With a reference the divergence is
    from it. The share of the hardware limit comes last, if it is known."""
    own = (Column("entropy", "policy/entropy", 10, _compact),)
    if runs_ahead:
        own = (
            Column("stale", "rollout/staleness/mean", 7, _ratio),
            Column("wait", "time/generate_s", 8, _seconds),
        )
    title, metric = (
        ("KL_ref", "policy/ref_kl") if has_reference else ("KL_rollout", "off_policy/kl")
    )
    return (
        Column("reward", "reward/mean", 10, _compact),
        Column("length", "rollout/completion_tokens/mean", 9, _compact),
        *own,
        Column(title, metric, 12, _compact),
        *_SPEED,
        *((_LIMIT,) if has_limit else ()),
    )


_LOSS = Column("loss", "train/loss", 10, _compact)
SFT_COLUMNS = (
    _LOSS,
    Column("grad", "train/grad_norm", 10, _compact),
    Column("lr", "train/lr", 10, _compact),
    *_SPEED,
)


PAIR_COLUMNS = {
    accuracy: (
        _LOSS,
        Column("accuracy", accuracy, 9, _compact),
        Column("margin", margin, 9, _compact),
        *SFT_COLUMNS[1:],
    )
    for accuracy, margin in (("rewards/accuracies", "rewards/margins"), ("accuracy", "margin"))
}
"""Columns for `hone dpo` and `hone reward-model`, by the metric that their steps have."""


class Output(RichConsole):
    """Console that raises the error of a broken pipe; rich would end the process."""

    def on_broken_pipe(self) -> None:
        raise  # called inside the `except` block of the error


class Console:
    """Context manager that prints step lines above a progress bar.

    A console that can no longer be written does not end the run: `on_lost` is called once. A
    resumed run has `done` of `total_steps` steps behind it. A metric that a step lacks is shown as
    a dot, so that columns never move. `rl_columns` defines the columns; an evaluation's score
    follows at the end of its line.
    """

    def __init__(
        self,
        total_steps: int,
        *,
        done: int = 0,
        runs_ahead: bool = False,
        has_reference: bool = False,
        has_limit: bool = False,
        output: RichConsole | None = None,
        on_lost: Callable[[str], None] = lambda message: None,
    ) -> None:
        self._rl_columns = rl_columns(
            runs_ahead=runs_ahead, has_reference=has_reference, has_limit=has_limit
        )
        self._console = output or Output(highlight=False, soft_wrap=True)
        self._on_lost = on_lost
        self._lines = 0
        self._total_steps = total_steps
        self._unreported_s = math.inf
        """Total time of the steps since the last line."""
        self._shown_at = 0.0
        self._waited_at = -math.inf
        self._progress = Progress(
            TextColumn("  "),
            BarColumn(bar_width=28, complete_style="cyan", finished_style="cyan"),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("[dim]left[/dim]"),
            TimeRemainingColumn(),
            TextColumn("[dim]{task.fields[doing]}[/dim]"),
            console=self._console,
            refresh_per_second=4,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._progress.add_task("", total=total_steps, completed=done, doing="")

    def __enter__(self) -> Self:
        with self._printing():
            self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        with self._printing():
            self._progress.stop()

    def step(self, step: int, scalars: Mapping[str, float]) -> None:
        """Print the line of a finished step, unless one was printed less than two seconds ago, and
        advance the bar."""
        self._progress.update(self._task, completed=step, doing="")
        self._unreported_s += scalars.get("time/step_s", math.inf)
        is_due = self._unreported_s >= _LINE_EVERY_S or step == self._total_steps
        if is_due or not scalars.keys().isdisjoint(_EVALUATIONS):
            self._print_step(step, scalars)
            self._unreported_s = 0.0

    def _print_step(self, step: int, scalars: Mapping[str, float]) -> None:
        is_supervised = "train/loss" in scalars or "eval/loss" in scalars
        is_supervised = is_supervised and "reward/mean" not in scalars
        columns = SFT_COLUMNS if is_supervised else self._rl_columns
        for metric, of_pairs in PAIR_COLUMNS.items():
            if is_supervised and metric in scalars:
                columns = of_pairs
        if self._lines % HEADER_EVERY == 0:
            titles = "".join(f"{column.title:>{column.width}}" for column in columns)
            self._print(Text(f"{'step':>6}{titles}", style="dim"))
        self._lines += 1
        line = Text(f"{step:>6}", style="bold")
        for column in columns:
            line.append(f"{_cell(column, scalars):>{column.width}}", style="not bold")
        for metric, name in _EVALUATIONS.items():
            if metric in scalars:
                line.append(f"   {name} {_compact(scalars[metric])}", style="not bold cyan")
        if "eval/pass@1" in scalars:
            passed, threshold = scalars["eval/pass@1"], scalars.get("eval/pass_threshold", 1.0)
            text = f"   pass@1 {_compact(passed)} (score >= {threshold:g})"
            line.append(text, style="not bold cyan")
        self._print(line)

    def progress(self, finished: int, total: int) -> None:
        """Show how many samples of the current step are finished. Cheap enough to call for every
        token."""
        now = time.monotonic()
        if self._console.is_terminal and now - self._shown_at > 0.2:
            self._shown_at = now
            self._progress.update(self._task, doing=f"{finished:,} of {total:,} samples")

    def waiting(self, text: str) -> None:
        """Show what the run waits for: behind the bar, or without a terminal as a line at
        intervals."""
        if self._console.is_terminal:
            self._progress.update(self._task, doing=text)
        elif time.monotonic() - self._waited_at > _WAITING_LINE_EVERY_S:
            self._waited_at = time.monotonic()
            self._print(Text(f"      {text}"))

    def warn(self, message: str) -> None:
        """Print a highlighted line, such as an alarm."""
        self._print(Text(f"      ! {printable(message)}", style="yellow"))

    def _print(self, line: Text) -> None:
        with self._printing():
            self._console.print(line, soft_wrap=True)

    @contextmanager
    def _printing(self) -> Generator[None]:
        """Context manager that stops all printing once the output is closed or full."""
        try:
            yield
        except OSError as error:
            if self._console.quiet:
                return
            self._console.quiet = True
            # The rest in Python's buffers would fail again, at the latest when the process ends.
            with suppress(OSError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, self._console.file.fileno())
                os.close(nowhere)
            self._on_lost(f"standard output takes no more ({error}): the run goes on without it")


def _cell(column: Column, scalars: Mapping[str, float]) -> str:
    value = scalars.get(column.metric)
    if value is None:
        return "·"
    return column.format(value) if math.isfinite(value) else str(value)
