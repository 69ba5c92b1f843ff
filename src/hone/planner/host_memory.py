"""Host memory of the processes on one host, before anything is started.

    roles = host_roles(plan, num_local=1)
    sum(role.num_bytes for role in roles) <= available_host_bytes()

On a CPU it is all that a run has: weights, gradients, moments, activations, the KV cache. On GPUs
it is what `trainer.offload`, `trainer.offload_activations` and `trainer.enable_sleep` move there,
the weights of a vLLM engine that sleeps, and of a reward model that sleeps with the engine. A
checkpoint that is written behind the training is a copy of masters and moments. Not counted, so
that the plan is below what a run takes: what attention on a CPU computes with, reward workers, the
data, Ray, and on GPUs what a process itself takes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hone.config.plan import Command, RunPlan
from hone.config.rules.finding import Finding
from hone.config.tree import RLConfig, SFTConfig
from hone.hardware import GIB
from hone.planner.run_memory import PROCESS_BYTES, RunMemory, sum_in_gib
from hone.trainer.cost import TrainingMemory

__all__ = [
    "LEAST_LENGTH_SHARE",
    "HostRole",
    "host_roles",
    "saved_at_the_end",
    "saves_in_background",
    "shortage",
    "trainer_role",
]

LEAST_LENGTH_SHARE = 8
"""For lower bounds, the average row is assumed to have at least this fraction of the longest row:
an eighth."""


@dataclass(frozen=True, slots=True)
class HostRole:
    """Host memory of the processes of one kind on this host."""

    name: str
    number: int
    parts: Mapping[str, int]
    """Bytes of one process, by kind, at the peak of a step."""

    @property
    def num_bytes(self) -> int:
        """Bytes of all processes of the role."""
        return self.number * sum(self.parts.values())

    def in_words(self) -> str:
        """Text with the parts of one process, in GiB."""
        times = f"{self.number} {self.name}s x " if self.number > 1 else f"the {self.name}: "
        return f"{times}{sum_in_gib(self.parts)}"


def host_roles(plan: RunPlan, *, num_local: int, at_least: bool = False) -> list[HostRole]:
    """Host memory of a run on this host, where `num_local` of its trainer processes run (or engine
    processes, without a trainer). Rows have full length; with `at_least`, 1/`LEAST_LENGTH_SHARE` of
    it.

    Engines and references of a Ray cluster may be on other hosts and are left out.
    """
    run = RunMemory(plan, length_share=LEAST_LENGTH_SHARE if at_least else 1)
    if not plan.is_on_cpu:
        return [*_offloaded(run, num_local)]
    first = "engine" if plan.trainer is None else "trainer"
    numbers = {first: num_local}
    if not (isinstance(plan.config, RLConfig) and plan.config.cluster.address is not None):
        apart = [role for role in plan.roles.values() if role.where == "ray"]
        numbers |= {role.name: role.num_devices for role in apart}
    if run.critic is not None and run.critic_beside is None:
        numbers["critic"] = plan.roles["critic"].num_devices
    phases = [(phase.role or first, phase) for phase in run.phases()]
    roles: list[HostRole] = []
    for name, number in numbers.items():
        widest = max((x for role, x in phases if role == name), key=lambda x: x.num_bytes)
        own: dict[str, int] = {}
        if name == "trainer":
            own = {"offloaded": run.offloaded, **_copied(run)}
        elif name == "critic" and run.critic is not None:
            own = {"offloaded": run.critic.host, **_copied(run, "critic")}
        roles.append(HostRole(name, number, {**widest.parts, **own}))
    return roles


def saves_in_background(cfg: Command) -> bool:
    """Whether checkpoints are written in the background; the last one is not."""
    if not isinstance(cfg, RLConfig | SFTConfig):
        return False
    every = [cfg.checkpoint.every_n_steps]
    every += [cfg.eval.every_n_steps] if cfg.checkpoint.keep_best else []
    return any(0 < n < cfg.run.steps for n in every)


def saved_at_the_end(cfg: RLConfig | SFTConfig) -> dict[str, Any]:
    """Settings of `checkpoint` that save nothing before the end."""
    once: dict[str, Any] = {"every_n_steps": 0}
    checkpoint = cfg.checkpoint.model_copy(update=once)
    if not saves_in_background(cfg.model_copy(update={"checkpoint": checkpoint})):
        return once
    return once | {"keep_best": False}


def _copied(run: RunMemory, name: Literal["policy", "critic"] = "policy") -> dict[str, int]:
    """Bytes that a trainer process copies for a checkpoint in the background; of replicas, one
    process copies."""
    if run.plan.trainer is None or not saves_in_background(run.plan.config):
        return {}
    axes = run.plan.roles[name].axes
    num_copies = axes.world // (axes.fsdp * axes.tensor)
    beside = [run.step, run.critic_beside]
    models = beside if name == "policy" else [run.critic]
    state = sum(model.state for model in models if model is not None)
    return {"copy for a checkpoint": state // num_copies}


def trainer_role(step: TrainingMemory, number: int) -> HostRole:
    """Trainer processes on a CPU that make optimizer steps of this memory, without an engine."""
    parts = {**step.parts, "offloaded": step.host, "Python and torch": PROCESS_BYTES}
    return HostRole("trainer", number, parts)


def _offloaded(run: RunMemory, num_local: int) -> Iterator[HostRole]:
    if run.engine_asleep:
        yield HostRole("engine", num_local, {"asleep": run.engine_asleep})
    if run.plan.trainer is None:
        return
    if run.reward_model_asleep:
        judge, engine = run.plan.roles["reward_model"], run.plan.roles["engine"]
        # A whole copy is in the first process of each engine alone.
        number = num_local if judge.axes.world > 1 else -(-num_local // engine.axes.world)
        yield HostRole("reward model", number, {"asleep": run.reward_model_asleep})
    beside = run.critic_beside
    parts = {
        "offloaded": run.offloaded,
        "asleep": run.trainer_asleep,
        "rounded up": run.step.host_padding + (beside.host_padding if beside else 0),
        **_copied(run),
    }
    if any(parts.values()):
        yield HostRole("trainer", num_local, parts)
    if (critic := run.critic) is None or beside is not None:
        return
    parts = {
        "offloaded": critic.host,
        "rounded up": critic.host_padding,
        **_copied(run, "critic"),
    }
    if any(parts.values()):
        yield HostRole("critic", run.plan.roles["critic"].num_devices, parts)


def shortage(
    roles: Sequence[HostRole], *, available: int, takes: str, advice: str, keys: Sequence[str]
) -> Finding | None:
    """The error where `roles` take more than is available; None where they fit. `takes` is the
    phrase that introduces the sum."""
    needed = sum(role.num_bytes for role in roles)
    if needed <= available:
        return None
    message = (
        f"by prediction this host's memory is too small for the run: {takes} "
        f"{needed / GIB:.1f} GiB ({'; '.join(role.in_words() for role in roles)}), and "
        f"{available / GIB:.1f} GiB are available, {(needed - available) / GIB:.1f} too few. "
        f"{advice}"
    )
    return Finding("error", tuple(keys), message)
