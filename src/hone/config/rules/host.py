"""Rules on what only the host knows where a command starts processes: its cores and its GPUs.

`hone check` plans for other hosts too and does not know these facts.
"""

from __future__ import annotations

from hone.config.rules.rule import error

__all__ = ["RULES"]

RULES = (
    error("@num_started > @gpus_here", given=("run.device != cpu", "@gpus_here > 0"),
          says="{started_by} is {num_started}, and run.device is {run.device}",
          why="each process takes a GPU, and this host has {gpus_here}",
          fix="use at most {gpus_here}"),
    error("@num_started > @cores_here", given=("run.device = cpu",),
          says="{started_by} is {num_started}, and run.device is {run.device}",
          why="this host has {cores_here} CPU cores and no GPU for them",
          fix="use at most {cores_here}"),
    error("@num_started", "@gpus_here = 0", given=("run.device = cuda",),
          says="{started_by} is {num_started}, and run.device is cuda",
          why="each process takes a GPU, and this host has none",
          fix="run.device = cpu, without {started_by}"),
)  # fmt: skip
