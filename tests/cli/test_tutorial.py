"""The blocks of each tutorial run as they stand, in order, in a folder of their own."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from hone.cli import quickstart

DOCS = Path(__file__).parents[2] / "docs"
PAGES = sorted(page.stem for page in (DOCS / "tutorials").glob("*.md"))
OUTCOMES = {
    "images": ("rows.html", "runs/pictures/report.html"),
    "large-data": ("runs/large/report.html",),
    "moving": (
        "from_trl.yaml",
        "from_trl_functions.py",
        "from_verl.yaml",
        "from_openrlhf.yaml",
        "runs/moved/report.html",
    ),
    "several-gpus": ("runs/two/report.html", "runs/tensor/report.html", "runs/ring/report.html"),
    "tools-and-environments": ("runs/agent/report.html", "runs/game/report.html"),
}
"""By page: files that its blocks write last."""
_BLOCK = re.compile(r'```(\w+)(?: title="([^"]+)")?\n(.*?)```', re.DOTALL)
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """In which `hone` and `python` are those of these tests."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name, command in (("hone", f"{sys.executable} -m hone"), ("python", sys.executable)):
        (programs / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (programs / name).chmod(0o755)
    path = f"{programs}:{os.environ['PATH']}"
    return os.environ | {"PATH": path, "PYTHONPATH": str(DOCS.parent / "src")}


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what the quick start leaves to other pages: rows, and a model that adds."""
    folder = tmp_path_factory.mktemp("quickstart")
    inputs = folder / "runs/quickstart"
    quickstart.make_inputs(inputs, seed=0)
    shutil.copytree(inputs / "model", inputs / "sft/model")
    return folder


def run_blocks(page: Path, folder: Path, environment: dict[str, str]) -> int:
    """Run the blocks of a page; the number of them."""
    blocks = _BLOCK.findall(page.read_text())
    for language, title, content in blocks:
        if title:
            (folder / title).write_text(content)
            continue
        assert language == "bash", content
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", content],
            cwd=folder,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{content}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return len(blocks)


def test_every_block_runs(tmp_path: Path, environment: dict[str, str]) -> None:
    folder = tmp_path / "empty"
    folder.mkdir()
    assert run_blocks(DOCS / "tutorial.md", folder, environment) >= 10
    assert (folder / "both.html").exists()
    assert (folder / "runs" / "mine" / "eval" / "eval.json").exists()


@pytest.mark.parametrize("page", PAGES)
def test_every_block_of_a_subject_runs(
    page: str, started: Path, tmp_path: Path, environment: dict[str, str]
) -> None:
    folder = tmp_path / "here"
    shutil.copytree(started, folder)
    assert run_blocks(DOCS / "tutorials" / f"{page}.md", folder, environment) > 4
    assert [name for name in OUTCOMES[page] if not (folder / name).exists()] == []
