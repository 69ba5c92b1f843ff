"""The plan of a run of the suite, without running it, and what CI keeps of its runs.

python -m tests.selection show                            # the plan of `make test`, a line a unit
python -m tests.selection show --budget 8,5,3             # that of `.ci/run`
python -m tests.selection chosen FILE ...                 # those of the files that are chosen
python -m tests.selection passed                          # note that CI passed what it ran
python -m tests.selection failed FILE                   # how many tests pytest says have failed
python -m tests.selection unsteady FIRST AGAIN            # what failed first and passed alone
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from tests.selection.change import STATE_VARIABLE, state_file, write_record
from tests.selection.choose import Minutes
from tests.selection.plan import QUICK, RAN, Plan, file_of


def show(plan: Plan) -> str:
    """A line for each costly unit, and one for the whole."""
    units = sorted(plan.costs.costly, key=lambda unit: (plan.reason(unit), unit.name))
    lines = [f"{unit.seconds:7.1f} s  {unit.name:90}  {plan.reason(unit)}" for unit in units]
    return "".join(f"{line}\n" for line in [*lines, plan.line])


def chosen(plan: Plan, files: list[Path]) -> str:
    """Those of the files that have a chosen unit, a line each."""
    names = {file_of(name) for name in plan.choice.names}
    return "".join(f"{file}\n" for file in files if file.as_posix() in names)


def passed() -> None:
    """Add the run that has just passed to CI's record, with the commit on which it began."""
    ran = json.loads(RAN.read_text(encoding="utf-8"))
    if ran["commit"] is None:
        sys.exit("Nothing is noted: this is no git repository, so what passed has no commit.")
    try:
        write_record(state_file(), ran["commit"], ran["number"], ran["units"])
    except OSError as error:
        sys.exit(
            f"The tests passed, and {state_file()} cannot be written: {error}. Let "
            f"{STATE_VARIABLE} name a file in a folder that can."
        )


def failed(file: Path) -> str:
    """How many tests are in pytest's list of failed ones."""
    return f"{len(json.loads(file.read_text(encoding='utf-8')))}\n"


def unsteady(first: Path, again: Path) -> str:
    """What two of pytest's lists of failed tests say: of a run, and of these tests run alone."""
    failed = set(json.loads(first.read_text(encoding="utf-8")))
    broken = set(json.loads(again.read_text(encoding="utf-8"))) if again.exists() else set()
    steady = sorted(failed - broken)
    lines = [f"{len(steady)} of {len(failed)} tests failed once and passed alone.", *steady]
    return "".join(f"{line}\n" for line in lines)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.selection",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=["show", "chosen", "passed", "failed", "unsteady"])
    parser.add_argument("files", nargs="*", type=Path)
    parser.add_argument("--budget", type=Minutes.parse, default=QUICK, metavar="TOUCHED,FAR,TURN")
    options = parser.parse_args()
    match options.command:
        case "show":
            sys.stdout.write(show(Plan.make(options.budget)))
        case "chosen":
            sys.stdout.write(chosen(Plan.make(options.budget), options.files))
        case "passed":
            passed()
        case "failed":
            sys.stdout.write(failed(*options.files))
        case "unsteady":
            sys.stdout.write(unsteady(*options.files))
    return 0


if __name__ == "__main__":
    sys.exit(main())
