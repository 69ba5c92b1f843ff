"""Rules on what only the host knows where a command starts processes: its cores and its GPUs.

`hone check` plans for other hosts too; it knows these facts of a run on a CPU, which is this one's.
"""

from __future__ import annotations

from hone.config.rules.rule import error
from hone.config.rules.view import NotKnownError, View, fact

__all__ = ["RULES"]

RULES = (
    error("@num_started > @places_here", given=("@places_here > 0",),
          says="{started_by} is {num_started}, and run.device is {run.device}",
          why="{why_places}",
          fix="set {started_by} to at most {places_here}"),
    error("@num_started", "@places_here = 0",
          says="{started_by} is {num_started}, and run.device is {run.device}",
          why="{why_places}",
          fix="leave {started_by} out, and set run.device to cpu"),
)  # fmt: skip


@fact
def places_here(view: View) -> int:
    """Processes that this host serves, one a GPU or a core."""
    if not _is_on_cpu(view):
        return _num_gpus(view)
    return view.number("cores_here")


@fact
def why_places(view: View) -> str:
    """What each process takes, and what there is."""
    if not _is_on_cpu(view):
        return f"each process takes a GPU, and this host has {_num_gpus(view) or 'none'}"
    no_gpu = " and no GPU" if view.number("gpus_here") == 0 else ""
    return f"this host has {view.number('cores_here')} CPU cores{no_gpu}"


def _is_on_cpu(view: View) -> bool:
    device = view["run.device"]
    return device == "cpu" or (device == "auto" and view.number("gpus_here") == 0)


def _num_gpus(view: View) -> int:
    number = view.number("gpus_here")
    if number is None:
        raise NotKnownError("gpus_here")
    return number
