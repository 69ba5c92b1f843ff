"""Rules on what only the host knows where a command starts processes: its cores and its GPUs.

`hone check` plans for other hosts too; it knows these facts of a run on a CPU, which is this one's.
"""

from __future__ import annotations

from functools import cached_property

from hone.config.rules.facts import Facts
from hone.config.rules.rule import error, with_facts
from hone.config.rules.view import required

__all__ = ["RULES"]


class HostFacts(Facts):
    """The facts of a host on which a command starts processes."""

    @cached_property
    def num_started(self) -> int:
        """Processes that are started here."""
        return required(self.known.get("num_started"), "num_started")

    @cached_property
    def started_by(self) -> str:
        """The flag or key that says how many."""
        return required(self.known.get("started_by"), "started_by")

    @cached_property
    def gpus_here(self) -> int:
        """GPUs that a run can use."""
        return required(self.known.get("gpus_here"), "gpus_here")

    @cached_property
    def cores_here(self) -> int:
        """CPU cores."""
        return required(self.known.get("cores_here"), "cores_here")

    @cached_property
    def is_on_cpu(self) -> bool:
        """Whether processes take cores in place of GPUs."""
        device = self["run.device"]
        return device == "cpu" or (device == "auto" and self.gpus_here == 0)

    @cached_property
    def places_here(self) -> int:
        """Processes that this host serves, one a GPU or a core."""
        return self.cores_here if self.is_on_cpu else self.gpus_here

    @cached_property
    def why_places(self) -> str:
        """What each process takes, and what there is."""
        if not self.is_on_cpu:
            return f"each process takes a GPU, and this host has {self.gpus_here or 'none'}"
        no_gpu = " and no GPU" if self.known.get("gpus_here") == 0 else ""
        return f"this host has {self.cores_here} CPU cores{no_gpu}"


RULES = with_facts(
    HostFacts,
    error("@num_started > @places_here", given=("@places_here > 0",),
          says="{started_by} is {num_started}, and run.device is {run.device}",
          why="{why_places}",
          fix="set {started_by} to at most {places_here}"),
    error("@num_started", "@places_here = 0",
          says="{started_by} is {num_started}, and run.device is {run.device}",
          why="{why_places}",
          fix="leave {started_by} out, and set run.device to cpu"),
)  # fmt: skip
