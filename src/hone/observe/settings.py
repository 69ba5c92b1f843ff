"""What is traced: forward passes of engines, steps of training, allocations."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from hone.config.base import Section

__all__ = [
    "MemoryProfileConfig",
    "ProfileConfig",
    "RLProfileConfig",
    "RolloutProfileConfig",
    "TrainProfileConfig",
]


class TrainProfileConfig(Section):
    """Operators and kernels of training, in every training process."""

    steps: tuple[int, ...] = ()
    """Steps to trace, counted from 0 at the start of this launch, so that 2 is the third step
    after a resume too. A file a step and process in `train_trace`. The first steps compile:
    choose later ones, such as [10, 11, 12]."""

    target: Literal["train_overall", "train_actor", "train_log_probs"] = "train_overall"
    """What of a step: `train_log_probs`, the passes before the update (log-probabilities of policy
    and reference, values, the parity gate); `train_actor`, the update of all that learns;
    `train_overall`, both."""

    with_stack: bool = False
    """Also record Python call stacks; slower, and traces grow severalfold."""

    with_memory: bool = False
    """Also record allocations; slower."""

    with_flops: bool = False
    """Also estimate the floating-point operations of matrix products."""


class RolloutProfileConfig(Section):
    """Operators and kernels of forward passes in every engine."""

    steps: tuple[int, ...] = ()
    """Rollouts to trace, by the weight version that samples: rollout 0 is that of the run's first
    step, whatever checkpoint the launch goes on from. A file an engine and rank in
    `rollout_trace/rollout_<id>`. An evaluation that comes first under these weights is what is
    traced."""

    num_forwards: int = Field(default=3, ge=-1)
    """Forward passes of the engine to trace in each of these rollouts; -1: all."""

    activities: tuple[Literal["cpu", "gpu"], ...] = Field(default=("cpu", "gpu"), min_length=1)
    """What is recorded: operators on the host, kernels on the device."""

    by_stage: bool = False
    """Trace `num_forwards` passes that take prompts and as many that only decode, in files of their
    own."""

    with_stack: bool = False
    """Also record Python call stacks; slower, and traces grow severalfold."""

    record_shapes: bool = False
    """Also record the shapes of operators' inputs."""


class MemoryProfileConfig(Section):
    """The history of allocations, in every process of the run."""

    recorder: Literal["none", "torch", "memray"] = "none"
    """Whose allocations, a file a process in `memory_snapshot`. `torch`: of GPU memory, written
    where memory runs out and after `after_steps`, for pytorch.org/memory_viz. `memray`: of host
    memory, written as the run goes, for `memray flamegraph`; needs the extra `memray`."""

    after_steps: int | None = Field(default=None, ge=1)
    """Steps of this launch after which a snapshot is written and recording ends; with 3 after that
    of number 2, counted from 0. Unset: when memory runs out, and with memray at the end."""


class ProfileConfig(Section):
    """What is traced, for `hone trace` and ui.perfetto.dev. Nothing is, unless it is asked for."""

    dir: Path | None = None
    """Folder that receives traces, in folders by kind; unset: `traces` in `run.dir`. Where its disk
    is full tracing ends, and the run goes on."""

    train: TrainProfileConfig = TrainProfileConfig()
    memory: MemoryProfileConfig = MemoryProfileConfig()

    def folder(self, run_dir: Path) -> Path:
        """Where the traces of a run lie."""
        return self.dir or run_dir / "traces"


class RLProfileConfig(ProfileConfig):
    """What is traced, for `hone trace` and ui.perfetto.dev. Nothing is, unless it is asked for."""

    rollout: RolloutProfileConfig = RolloutProfileConfig()
