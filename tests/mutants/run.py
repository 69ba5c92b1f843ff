"""Plant each known mistake, one at a time, in a copy of the tree, and say which test kills it.

    python -m tests.mutants.run --only offload --jobs 2

The catalogue is the YAML files beside this one: a list of entries with the fields of `Mutant`. A
mutant is killed when one of the tests that it names fails with the mistake in and passes without.
The exit status is 0 where every mutant is killed, 1 where one is not, 2 for a catalogue that does
not fit the code.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).parents[2]
CATALOGUE = Path(__file__).parent
DEADLINE_S = 900.0
"""For the tests of one mutant. A mistake that hangs has to be caught by its test's own deadline."""
_INTERRUPT_S = 20.0
"""For pytest to end what its fixtures have started."""
_COPIED = ("src", "tests", "docs", "pyproject.toml")
_LINKED = (".venv", "README.md", "benchmarks", "examples")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One mistake and the tests that must notice it."""

    id: str
    what: str
    file: str
    find: str
    replace: str
    killed_by: list[str]
    """Files or node ids, from the root of the repository."""
    area: str = ""
    """Name of the catalogue's file, without its ending."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a mutant."""

    outcome: str
    """One of `killed`, `SURVIVED`, `TIMED OUT` and `BROKEN`."""
    detail: str
    """The test that killed it, or why there is none."""


def load(catalogue: Path) -> list[Mutant]:
    """Every mutant of a folder. ValueError for an entry that has not just the fields above, and for
    a file that is not YAML."""
    mutants: list[Mutant] = []
    for file in sorted(catalogue.glob("*.yaml")):
        try:
            entries = yaml.safe_load(file.read_text(encoding="utf-8")) or []
        except yaml.YAMLError as error:
            raise ValueError(f"{file.name}: {error}") from error
        for number, entry in enumerate(entries, 1):
            mutants.append(_checked(entry, f"{file.name}, entry {number}", file.stem))
    return mutants


def _checked(entry: Any, where: str, area: str) -> Mutant:
    names = [field.name for field in fields(Mutant) if field.name != "area"]
    if not isinstance(entry, dict) or sorted(entry) != sorted(names):
        raise ValueError(f"{where}: needs exactly {', '.join(names)}; got {entry!r}")
    tests = entry["killed_by"]
    texts = [entry[name] for name in names if name != "killed_by"]
    all_text = isinstance(tests, list) and all(isinstance(text, str) for text in texts + tests)
    if not tests or not all_text:
        raise ValueError(f"{where}: killed_by is a list of tests, not empty; the rest is text")
    if not re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", entry["id"]):
        raise ValueError(f"{where}: {entry['id']!r} is not kebab case")
    return Mutant(**entry, area=area)


def problems(mutants: Sequence[Mutant], root: Path) -> list[str]:
    """One line for each entry that no longer fits the tree at `root`."""
    ids = Counter(mutant.id for mutant in mutants)
    found = [f"{name}: {count} entries have this id" for name, count in ids.items() if count > 1]
    for mutant in mutants:
        found += [f"{mutant.area}.yaml, {mutant.id}: {why}" for why in _misfits(mutant, root)]
    return found


def _misfits(mutant: Mutant, root: Path) -> Iterator[str]:
    source = root / mutant.file
    if not source.is_file():
        yield f"there is no file {mutant.file}"
    elif Path(mutant.file).parts[0] not in _COPIED:
        yield f"{mutant.file} would be changed itself: only {', '.join(_COPIED)} are copied"
    elif (count := source.read_text(encoding="utf-8").count(mutant.find)) != 1:
        yield f"`find` occurs {count} times in {mutant.file}, not once"
    elif mutant.find == mutant.replace:
        yield "`find` and `replace` are the same"
    elif source.suffix == ".py":
        try:
            ast.parse(_planted(mutant, root))
        except SyntaxError as error:
            yield f"{mutant.file} no longer parses with the mistake in: {error}"
    for test in mutant.killed_by:
        file, *names = test.split("[")[0].split("::")
        if not (root / file).is_file():
            yield f"there is no test file {file}"
        elif not _defines(ast.parse((root / file).read_text(encoding="utf-8")), names):
            yield f"{file} has no test {'::'.join(names)}"


def _planted(mutant: Mutant, root: Path) -> str:
    return (root / mutant.file).read_text(encoding="utf-8").replace(mutant.find, mutant.replace)


def _defines(scope: ast.Module | ast.ClassDef, names: Sequence[str]) -> bool:
    """Whether there is `names[0]`, and in it `names[1]`, and so on."""
    if not names:
        return True
    for item in scope.body:
        if isinstance(item, ast.ClassDef) and item.name == names[0]:
            return _defines(item, names[1:])
        if isinstance(item, ast.FunctionDef) and item.name == names[0]:
            return len(names) == 1
    return False


class Runner:
    """Runs mutants of the tree at `root`; several threads may."""

    def __init__(self, root: Path, deadline_s: float = DEADLINE_S) -> None:
        self.root = root
        self.deadline_s = deadline_s
        self._stop = threading.Event()
        self._passes_unplanted: dict[str, bool] = {}

    def stop(self) -> None:
        """End what runs; every later run ends at once."""
        self._stop.set()

    def verdict(self, mutant: Mutant) -> Verdict:
        """Plant the mistake in a copy and run its tests there, up to the first that fails."""
        with _copy(self.root) as tree:
            (tree / mutant.file).write_text(_planted(mutant, self.root), encoding="utf-8")
            status, output = self._pytest(tree, mutant.killed_by)
        if status is None:
            return Verdict("TIMED OUT", f"after {self.deadline_s:.0f} s: {_last_line(output)}")
        if status == 0:
            return Verdict("SURVIVED", ", ".join(mutant.killed_by))
        failure = re.search(r"^(FAILED|ERROR) (\S.*?)(?: - |$)", output, re.MULTILINE)
        if status != 1 or failure is None:
            return Verdict("BROKEN", f"pytest ended with {status}: {_last_line(output)}")
        kind, test = failure.groups()
        if not self._passes(test):
            return Verdict("BROKEN", f"{test} fails without the mistake too")
        return Verdict("killed", test if kind == "FAILED" else f"{test}, while it was set up")

    def _passes(self, test: str) -> bool:
        if test not in self._passes_unplanted:
            with _copy(self.root) as tree:
                self._passes_unplanted[test] = self._pytest(tree, [test])[0] == 0
        return self._passes_unplanted[test]

    def _pytest(self, tree: Path, tests: Sequence[str]) -> tuple[int | None, str]:
        """Its exit status, None after the deadline, and what it printed."""
        options = ["-x", "-q", "-rfE", "--tb=short", "-p", "no:cacheprovider"]
        output = tree / "pytest.log"
        with output.open("w", encoding="utf-8") as log:
            process = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, *tests],
                cwd=tree,
                env=os.environ
                | {"PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1", "COLUMNS": "400"},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            end = time.monotonic() + self.deadline_s
            status = None
            try:
                while status is None and time.monotonic() < end and not self._stop.is_set():
                    try:
                        status = process.wait(timeout=0.2)
                    except subprocess.TimeoutExpired:
                        continue
            finally:
                _end(process)
        if self._stop.is_set():
            raise KeyboardInterrupt
        return status, output.read_text(encoding="utf-8", errors="replace")


@contextmanager
def _copy(root: Path) -> Generator[Path]:
    """A copy of the tree, deleted afterwards. What tests only read is linked."""
    with tempfile.TemporaryDirectory(prefix="hone-mutant-", ignore_cleanup_errors=True) as folder:
        tree = Path(folder)
        for name in _COPIED:
            if (root / name).is_dir():
                ignored = shutil.ignore_patterns("__pycache__")
                shutil.copytree(root / name, tree / name, ignore=ignored)
            elif (root / name).exists():
                shutil.copy2(root / name, tree / name)
        for name in _LINKED:
            if (root / name).exists():
                (tree / name).symlink_to((root / name).resolve())
        yield tree


def _end(process: subprocess.Popen[Any]) -> None:
    """Interrupt pytest, so that fixtures clean up; then kill it and all it has started."""
    if process.poll() is not None:
        return
    started = psutil.Process(process.pid).children(recursive=True)
    process.send_signal(signal.SIGINT)
    try:
        process.wait(timeout=_INTERRUPT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for descendant in started:
        if descendant.is_running():
            descendant.kill()


def _last_line(output: str) -> str:
    return (output.strip().splitlines() or ["no output"])[-1]


def run(mutants: Sequence[Mutant], runner: Runner, num_jobs: int, say: Callable[[str], Any]) -> int:
    """Run them all, a line for each as it ends. The exit status."""
    width = max(len(mutant.id) for mutant in mutants)
    outcomes: Counter[str] = Counter()

    def judge(mutant: Mutant) -> None:
        verdict = runner.verdict(mutant)
        outcomes[verdict.outcome] += 1
        text = f"killed by {verdict.detail}" if verdict.outcome == "killed" else verdict.detail
        say(f"{mutant.id:{width}}  {verdict.outcome:9}  {mutant.what}\n{'':{width}}  {text}\n")

    pool = ThreadPoolExecutor(num_jobs)
    try:
        for future in [pool.submit(judge, mutant) for mutant in mutants]:
            future.result()
    except KeyboardInterrupt:
        say("Interrupted.\n")
        return 130
    finally:
        runner.stop()
        pool.shutdown(cancel_futures=True)
        counts = ", ".join(f"{count} {name}" for name, count in sorted(outcomes.items())) or "none"
        say(f"{len(mutants)} mutants: {counts}\n")
    return int(outcomes["killed"] < len(mutants))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="tests.mutants.run", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--only", default="", metavar="PATTERN", help="ids that hold this text")
    parser.add_argument("--area", default="", metavar="FILE", help="one file of the catalogue")
    parser.add_argument(
        "--slice", default="1/1", metavar="K/N", help="every Nth mutant, from the Kth"
    )
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="mutants at a time")
    options = parser.parse_args(arguments)
    say = partial(print, end="", flush=True)
    try:
        mutants = load(CATALOGUE)
    except ValueError as error:
        say(f"error: {error}\n")
        return 2
    area = Path(options.area).stem
    mutants = [m for m in mutants if options.only in m.id and area in ("", m.area)]
    first, step = map(int, options.slice.split("/"))
    mutants = mutants[first - 1 :: step]
    errors = problems(mutants, ROOT) or ["no mutant fits"] * (not mutants)
    if errors:
        say("".join(f"error: {line}\n" for line in errors))
        return 2
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    return run(mutants, Runner(ROOT), options.jobs, say)


if __name__ == "__main__":
    sys.exit(main())
