"""Nobody looks at an empty screen while torch is loaded: a line comes before it, and reaches the
reader."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from hone.config.commands import COMMANDS
from tests.config import workspace
from tests.config.workspace import BASE
from tests.tables import check_rows

LOADED = "<torch is loaded>"

FIRST_LINES = f"""
import json, os, sys
import hone.cli.command  # once for all calls
from hone.cli.main import main

class EndsAtTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            os.write(1, {LOADED.encode()!r})  # past the buffers, which may hold lines still
            os._exit(0)

sys.meta_path.insert(0, EndsAtTorch())
found = []
for argv in json.load(sys.stdin):
    said = os.memfd_create("said")
    if (child := os.fork()) == 0:
        os.dup2(said, 1), os.dup2(said, 2)
        code = main(argv)
        sys.stdout.flush()
        os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.lseek(said, 0, os.SEEK_SET)
    found.append((code, open(said, encoding="utf-8").read()))
json.dump(found, sys.stdout)
"""
"""Calls of the command line, each to its end or to the import of torch, and what they have said."""

DATA = ("train.jsonl", "--model.path", "model")
LOADING = {
    **{name: [*name.split(), *flags] for name, flags in BASE.items() if name != "plan"},
    "quickstart": ["quickstart", "--dir", "qs"],
    "data show": ["data", "show", *DATA],
    "data stats": ["data", "stats", *DATA],
    "data check": ["data", "check", *DATA],
    "bench data": ["bench", "data"],
    "env": ["env", "check", "envs.py:Game", "--model.path=model"],
}
"""A call of each command that may load torch."""
LIGHT = {
    *("check", "completion", "import", "plan", "recipes", "report", "trace", "watch"),
    *("doctor", "tune"),  # they say what they do, and load it in processes of their own
}
"""Commands that load no torch here."""


def test_a_line_comes_before_torch_is_loaded(tmp_path: Path) -> None:
    workspace.fill(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", FIRST_LINES],
        input=json.dumps([*LOADING.values()]),
        capture_output=True,
        text=True,
        cwd=tmp_path,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr

    def check(argv: list[str], found: tuple[int, str]) -> None:
        _, text = found
        before, _, _ = text.partition(LOADED)
        assert before.strip(), f"nothing is said before torch is loaded: {text!r}"

    found = json.loads(done.stdout)
    rows = dict(zip(LOADING, zip(LOADING.values(), found, strict=True), strict=True))
    check_rows(rows, check, minimum=len(LOADING))
    assert {argv[0] for argv in LOADING.values()} | LIGHT == {*COMMANDS}
    assert all(LOADED in text for _, text in found), "a call that loads no torch shows nothing here"


ENDS = """
import gc, sys
from hone.cli.main import main

main(["--version"])
assert gc.get_freeze_count() == 0, "a program that calls a command goes on"
sys.argv[1:] = ["--version"]
sys.modules["triton"] = sys
assert main() == 0
assert gc.get_freeze_count() == 0, "triton reports as leaked what is kept"
del sys.modules["triton"]
assert main() == 0
assert gc.get_freeze_count() > len(gc.get_objects(0))
"""


def test_the_command_line_ends_without_a_search_for_cycles() -> None:
    """Among all objects of torch and transformers it takes longer than reading the last lines."""
    done = subprocess.run([sys.executable, "-c", ENDS], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
