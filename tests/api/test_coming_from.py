"""The page and the scripts for users of TRL, verl and OpenRLHF hold what they say."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import hone
from hone.cli.quickstart import make_inputs
from hone.config.aliases import alias_hint
from hone.config.schema import nearest
from tests.tables import table
from tests.tiny_runs import lines

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "coming-from.md").read_text()
SCRIPTS = sorted((ROOT / "examples" / "coming_from").glob("*.py"))
BLOCK = re.compile(
    r"### [^\n]*\n\n```python\n# (\w+)\.py\n(.*?)```\n(?:\n```bash\n(.*?)```\n)?", re.S
)
ORIGINALS = {name: (program, shell) for name, program, shell in BLOCK.findall(PAGE)}


def functions(program: str) -> dict[str, str]:
    tree = ast.parse(program)
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return {node.name: ast.dump(node) for node in tree.body if isinstance(node, kinds)}


def count(text: str) -> int:
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in text.split("\n"))


@table("script", SCRIPTS)
def test_rewards_and_data_are_those_of_the_original(script: Path) -> None:
    program, shell = ORIGINALS[script.stem]
    assert functions(program) == functions(script.read_text())
    row = re.search(rf"\[{script.name}\]\(\S+\) \| (\d+) \| (\d+) \|", PAGE)
    assert row is not None
    counted = count(f"{program}\n{shell}"), count(script.read_text())
    assert (int(row[1]), int(row[2])) == counted


def keys() -> Iterator[tuple[str, str]]:
    """A framework's key and the cell of ours, from the table of the page."""
    table = PAGE.split("## Keys side by side")[1].split("##")[0]
    for line in [line for line in table.split("\n") if line.startswith("|")][2:]:
        what, *theirs, ours = [cell.strip() for cell in line.strip("|").split("|")]
        if "columns" not in what:
            yield from ((key, ours) for cell in theirs for key in re.findall(r"`([\w.]+)`", cell))


@table("theirs, ours", list(keys()))
def test_keys_of_others_are_answered_with_ours(theirs: str, ours: str) -> None:
    path = theirs.split(".")
    told = alias_hint(hone.RLConfig, path) or f"{nearest(hone.RLConfig, path)}"
    named = re.findall(r"`([\w.]+)`", ours)
    assert any(key in told for key in named) or "nothing to set" in told, told


@pytest.fixture(scope="module")
def quickstart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the first half of the quick start leaves."""
    folder = tmp_path_factory.mktemp("quickstart")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        make_inputs(Path("runs/quickstart"), seed=0)
        hone.sft("quickstart-sft", log={"to": []})
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_the_reward_rises(script: Path, quickstart: Path) -> None:
    env = os.environ | {"PYTHONPATH": str(ROOT / "src"), "HF_HOME": str(quickstart / "hf")}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=quickstart, env=env, capture_output=True, text=True,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    rows = lines(quickstart / "runs" / script.stem / "metrics.jsonl")
    rewards = [row["reward/mean"] for row in rows]
    assert len(rewards) == 60
    assert sum(rewards[-5:]) / 5 > sum(rewards[:3]) / 3 + 0.2
