"""What the hooks of profilers cost while nothing is traced: CPU time of steps with and without.

    python benchmarks/profilers_off.py RECIPE [--section.key VALUE ...]

One run in one process. In every other step the hooks are taken out: spans tell nobody, and ranges
are not opened. The cost is the mean difference of neighbouring steps, over steps that collect,
train and push alike, with its standard error; and, which no noise touches, the CPU time inside the
hooks themselves.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

from hone.cli.rl import run as run_rl
from hone.loops.run import Run
from hone.observe.tracing import Tracing
from hone.trainer import models

WARM_UP = 6
"""Steps that are left out."""


class Hooks:
    """The calls of profilers, with the time inside them, on or off."""

    def __init__(self) -> None:
        self.is_on = True
        self.inside_s = 0.0
        self.num_calls = 0
        self._range = models.record_function
        Tracing.begin, Tracing.end = self._method(Tracing.begin), self._method(Tracing.end)
        models.record_function = self._open

    def _method(self, hook: Callable[[Tracing, str], None]) -> Callable[[Tracing, str], None]:
        def timed(tracing: Tracing, path: str) -> None:
            if self.is_on:
                start = time.perf_counter()
                hook(tracing, path)
                self.inside_s += time.perf_counter() - start
                self.num_calls += 1

        return timed

    @contextmanager
    def _open(self, name: str) -> Iterator[None]:
        if not self.is_on:
            yield
            return
        start = time.perf_counter()
        opened = self._range(name)
        opened.__enter__()
        self.inside_s += time.perf_counter() - start
        try:
            yield
        finally:
            start = time.perf_counter()
            opened.__exit__(None, None, None)
            self.inside_s += time.perf_counter() - start
            self.num_calls += 1


def main() -> int:
    """Run, and print the cost."""
    hooks, taken = Hooks(), list[tuple[bool, float, float]]()
    steps = Run.steps

    def alternating(run: Run[Any]) -> Iterator[int]:
        for step in steps(run):
            hooks.is_on, hooks.inside_s = step % 2 == 0, 0.0
            start = time.process_time()
            yield step
            taken.append((hooks.is_on, time.process_time() - start, hooks.inside_s))

    Run.steps = alternating
    code = run_rl(sys.argv[1:])
    kept = taken[WARM_UP:]
    off = [seconds for is_on, seconds, _ in kept if not is_on]
    inside = [inside for is_on, _, inside in kept if is_on]
    differences = [(b[1] - a[1]) * (1 if b[0] else -1) for a, b in pairwise(kept)]
    mean_s = statistics.fmean(off)
    error = statistics.stdev(differences) / len(differences) ** 0.5
    cost, spent = statistics.fmean(differences) / mean_s, statistics.median(inside) / mean_s
    sys.stdout.write(
        f"{len(kept)} steps of {mean_s:.3f} s of CPU time without hooks\n"
        f"with hooks {cost:+.3%} (standard error {error / mean_s:.3%})\n"
        f"inside the hooks {spent:.4%}, {hooks.num_calls / (len(taken) // 2):.0f} calls a step\n"
    )
    return code


if __name__ == "__main__":
    sys.exit(main())
