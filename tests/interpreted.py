"""Results of kernels in Triton's interpreter, from a process that has imported it first."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def run_interpreted(module: str) -> Any:
    """What `python -m module` prints, JSON; the module imports `tests.triton_interpreter`."""
    command = [sys.executable, "-W", "ignore", "-m", module]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
