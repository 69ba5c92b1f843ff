"""Results of a process that has changed Triton: to its interpreter, or to pretend a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def run_interpreted(module: str, *folders: Path) -> Any:
    """What `python -m module` prints, JSON; the module imports `tests.triton_interpreter` or
    `tests.triton_compilations`. Packages may lie in further `folders`."""
    command = [sys.executable, "-W", "ignore", "-m", module]
    paths = [*map(str, folders), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False, env=env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
