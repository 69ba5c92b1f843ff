"""The blocks of the tutorial run as they stand, in order, in an empty folder."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

TUTORIAL = Path(__file__).parents[2] / "docs" / "tutorial.md"
_BLOCK = re.compile(r'```(\w+)(?: title="([^"]+)")?\n(.*?)```', re.DOTALL)


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_every_block_runs(tmp_path: Path) -> None:
    program = tmp_path / "bin" / "hone"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m hone "$@"\n')
    program.chmod(0o755)
    folder = tmp_path / "empty"
    folder.mkdir()
    sources = str(Path(__file__).parents[2] / "src")
    env = os.environ | {"PATH": f"{program.parent}:{os.environ['PATH']}", "PYTHONPATH": sources}
    blocks = _BLOCK.findall(TUTORIAL.read_text())
    assert len(blocks) >= 10
    for language, title, content in blocks:
        if title:
            (folder / title).write_text(content)
            continue
        assert language == "bash", content
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", content],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{content}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert (folder / "both.html").exists()
    assert (folder / "runs" / "mine" / "eval" / "eval.json").exists()
