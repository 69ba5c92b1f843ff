"""Host memory of the processes on one host, before anything is started.

    roles = host_roles(cfg, shape, world_size=1, num_local=1)
    sum(role.num_bytes for role in roles) <= available_host_bytes()

On a CPU it is all that a run has: weights, gradients, moments, activations, the KV cache. On GPUs
it is what `trainer.offload_*` and `trainer.enable_sleep` move there. Not counted, so that the plan
is below what a run takes: what attention on a CPU computes with, reward workers, the data, Ray, and
on GPUs what a process itself takes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from hone.config.derived import compute_dtype
from hone.config.parallel import AxisSizes
from hone.config.rules.finding import Finding
from hone.config.tree import EvaluateConfig, GenerateConfig, RLConfig, SFTConfig
from hone.families.shape import ModelShape
from hone.planner.memory import TrainingMemory, planned_step
from hone.planner.run_memory import PROCESS_BYTES, RunMemory

__all__ = [
    "LEAST_LENGTH_SHARE",
    "HostRole",
    "available_host_bytes",
    "engine_role",
    "host_roles",
    "sampler_role",
    "shortage",
    "trainer_role",
]

_GIB = 1 << 30
_CGROUPS = Path("/sys/fs/cgroup")
LEAST_LENGTH_SHARE = 8
"""Rows of a run are taken to be at least an eighth of the longest on average, where what it takes
at least is planned."""


@dataclass(frozen=True, slots=True)
class HostRole:
    """Processes of one kind on this host."""

    name: str
    number: int
    parts: Mapping[str, int]
    """Bytes of each of them, by kind, at the widest moment of a step."""

    @property
    def num_bytes(self) -> int:
        """Of all of them."""
        return self.number * sum(self.parts.values())

    def in_words(self) -> str:
        """The parts in GiB, those that show."""
        shown = {name: num / _GIB for name, num in self.parts.items() if num >= 0.05 * _GIB}
        parts = " + ".join(f"{name} {gib:.1f}" for name, gib in shown.items())
        times = f"{self.number} {self.name}s x " if self.number > 1 else f"the {self.name}: "
        return f"{times}{sum(self.parts.values()) / _GIB:.1f} GiB ({parts})"


def host_roles(
    cfg: RLConfig | SFTConfig,
    shape: ModelShape,
    *,
    world_size: int | None,
    num_local: int,
    at_least: bool = False,
) -> list[HostRole]:
    """What a training run takes of this host, on which `num_local` of `world_size` trainers are.

    With rows of full length, or `at_least`, with those of `LEAST_LENGTH_SHARE`. Engines and
    references of a Ray cluster may be elsewhere and are left out. Raises UserError as
    `AxisSizes.of` does.
    """
    share = LEAST_LENGTH_SHARE if at_least else 1
    if isinstance(cfg, SFTConfig):
        mean, num_rows = -(-cfg.data.max_tokens // share), cfg.data.examples_per_step
        sizes = AxisSizes.of(cfg.trainer.parallel, world_size)
        budget, per_rank = cfg.trainer.max_tokens_per_microbatch, -(-num_rows // sizes.data)
        if cfg.trainer.micro_batch_size is not None:
            budget = cfg.trainer.micro_batch_size * mean
        num_tokens = min(budget, -(-per_rank * mean // sizes.context))
        step = planned_step(
            shape,
            cfg.model,
            cfg.trainer,
            device=cfg.run.device,
            sizes=sizes,
            num_tokens=num_tokens,
            num_micro_batches=1 if per_rank * mean <= budget * sizes.context else 2,
        )
        return [trainer_role(step, num_local, on_cpu=cfg.run.device == "cpu")]
    run = RunMemory(cfg, shape, world_size, None, length_share=share)
    if cfg.run.device != "cpu":
        return [*_offloaded(cfg, run.step, num_local)]
    numbers = {
        "trainer": num_local,
        "engine": cfg.cluster.num_engines * cfg.engine.tensor_parallel_size,
        "reference": cfg.cluster.num_references,
    }
    if cfg.cluster.address is not None:
        numbers = {"trainer": num_local}
    phases = [(phase.role or "trainer", phase) for phase in run.phases()]
    roles: list[HostRole] = []
    for name, number in numbers.items():
        widest = max(
            (phase for role, phase in phases if role == name),
            key=lambda phase: phase.num_bytes,
            default=None,
        )
        if widest is not None and number:
            offloaded = run.step.host if name == "trainer" else 0
            roles.append(HostRole(name, number, {**widest.parts, "offloaded": offloaded}))
    return roles


def trainer_role(step: TrainingMemory, number: int, *, on_cpu: bool) -> HostRole:
    """Trainers that take such optimizer steps, without an engine."""
    if not on_cpu:
        return HostRole("trainer", number, {"offloaded": step.host})
    held = step.weights + step.masters + step.optimizer
    parts = {
        "weights": step.weights,
        "masters": step.masters,
        "moments": step.optimizer,
        "gradients, activations and work": step.peak - held,
        "offloaded": step.host,
        "Python and torch": PROCESS_BYTES,
    }
    return HostRole("trainer", number, parts)


def sampler_role(
    cfg: EvaluateConfig | GenerateConfig, shape: ModelShape, *, num_local: int
) -> HostRole:
    """The engines of `hone eval` and `hone generate` on a CPU."""
    num_bytes = 4 if compute_dtype(cfg.model, "cpu") == "float32" else 2
    return engine_role(shape, num_bytes=num_bytes, number=num_local)


def engine_role(shape: ModelShape, *, num_bytes: int, number: int) -> HostRole:
    """Engines on a CPU that have weights of their own, `num_bytes` an element, before the cache has
    been written to."""
    parts = {"weights": shape.weight_bytes(num_bytes), "Python and torch": PROCESS_BYTES}
    return HostRole("engine", number, parts)


def _offloaded(cfg: RLConfig, step: TrainingMemory, num_local: int) -> Iterator[HostRole]:
    asleep = step.masters + step.optimizer if cfg.trainer.enable_sleep else 0
    if step.host or asleep:
        yield HostRole("trainer", num_local, {"offloaded": step.host, "asleep": asleep})


def shortage(
    roles: Sequence[HostRole], *, available: int, takes: str, advice: str, keys: Sequence[str]
) -> Finding | None:
    """The error where what `roles` take is more than is available; `takes` says of what it is the
    sum. None where it fits."""
    needed = sum(role.num_bytes for role in roles)
    if needed <= available:
        return None
    message = (
        f"by prediction this host's memory does not hold what is asked for: {takes} "
        f"{needed / _GIB:.1f} GiB ({'; '.join(role.in_words() for role in roles)}), and "
        f"{available / _GIB:.1f} GiB are available, {(needed - available) / _GIB:.1f} too few. "
        f"{advice}"
    )
    return Finding("error", tuple(keys), message)


def available_host_bytes(root: Path = _CGROUPS, own: Path = Path("/proc/self/cgroup")) -> int:
    """Bytes that this host's processes can still take: what the system can free without swapping,
    and what the memory limits of this process's control groups leave, as of containers."""
    return int(min(psutil.virtual_memory().available, _left_by_cgroups(root, own)))


def _left_by_cgroups(root: Path, own: Path) -> float:
    """Infinite without a limit. Versions 1 and 2; a limit above ours counts as well."""
    try:
        entries = [line.split(":", 2) for line in own.read_text().splitlines()]
    except OSError:
        return math.inf
    left = math.inf
    for number, controllers, path in (entry for entry in entries if len(entry) == 3):
        if number == "0":
            base, names = root, ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
            base = root / "memory"
        else:
            continue
        folder = base / path.lstrip("/")
        for group in (folder, *folder.parents):
            left = min(left, _left_in(group, *names))
            if group == base:
                break
    return left


def _left_in(group: Path, limit: str, usage: str, cached: str) -> float:
    """Bytes below the limit of one control group, its file cache being free."""
    try:
        most, used = (group / limit).read_text().strip(), int((group / usage).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return math.inf  # no such group here: the container does not show it
    return math.inf if most == "max" else max(int(most) - used + int(stat.get(cached, 0)), 0)
