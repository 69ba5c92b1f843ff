"""Where training processes and engines live when they are apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, NamedTuple

from pydantic import Field

from hone.config.base import Section

__all__ = ["ClusterConfig", "ScorerName", "host_and_port"]

ScorerName = Literal["reference", "teacher", "reward_model"]
"""Frozen models that can have devices of their own."""


class ClusterConfig(Section):
    """Processes on Ray. Where nothing but training has devices none is started: each training
    process has an engine on its own device, and `--nproc` says how many there are."""

    address: str | None = None
    """Ray cluster to join: `auto` for the one this host belongs to, `host:port` of its head, or
    `ray://host:port` of Ray's client. Unset: a Ray of this host alone is started for the run."""

    num_trainers: int = Field(default=1, ge=1)
    """Processes that train together, one a device; `trainer.parallel` says how. All on the host
    that the run is started on, or where they are more than `devices_per_node`, on whole nodes of
    the Ray cluster."""

    num_critics: int = Field(default=0, ge=0)
    """Processes that train the critic of PPO (section `critic`), one a device, at the same time as
    `num_trainers` others train the policy; `trainer.parallel` says how. They are started beside
    those, without Ray. 0: it lies beside the policy, and the two are trained in turns."""

    num_engines: int = Field(default=0, ge=0)
    """Engines on devices of their own, `engine.tensor_parallel_size` devices each. More engines are
    faster than larger ones where the model fits. 0: engines share the trainers' devices."""

    num_references: int = Field(default=0, ge=0)
    """Copies of the reference model of `algorithm.kl` on devices of their own, one each, which
    share the rows of a step. 0: it lies beside the policy, sharded over the trainers."""

    num_teachers: int = Field(default=0, ge=0)
    """Copies of the teacher (`teacher.path`) on devices of their own, one each, likewise. 0: it
    lies beside the policy, sharded over the trainers."""

    num_reward_models: int = Field(default=0, ge=0)
    """Copies of the reward model (`reward.model.path`) on devices of their own, one each, which
    score samples as they end, beside generation and training. 0: it lies whole beside the engine of
    each training process, or where engines are apart on the device of the first trainer."""

    num_nodes: int = Field(default=1, ge=1)
    """Hosts that the run may use."""

    devices_per_node: int | None = Field(default=None, ge=1)
    """GPUs of a host, or with `run.device` cpu processes that it may hold; unset: what Ray finds.
    Trainers, critics, engines, references, teachers and reward models together must fit."""

    update_weight_buffer_size: int = Field(default=512 << 20, ge=1)
    """Bytes of weights that are on their way to engines at a time; two such buffers are held. A
    tensor that is larger travels alone."""

    engine_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds in which an engine, or a model that scores, must show progress while it has work; a
    silent one is restarted, three times in a run."""

    @property
    def is_used(self) -> bool:
        """Whether anything but the policy's training has devices of its own."""
        return self.needs_ray or self.num_critics > 0

    @property
    def needs_ray(self) -> bool:
        """Whether anything but training has devices of its own, so that there is a cluster."""
        return self.num_engines > 0 or bool(self.num_scorers)

    @property
    def num_processes(self) -> int:
        """Processes that train, of policy and critic."""
        return self.num_trainers + self.num_critics

    @property
    def processes_by(self) -> str:
        """The settings that say how many these are, for messages."""
        return "cluster.num_trainers" + " + cluster.num_critics" * bool(self.num_critics)

    @property
    def num_scorers(self) -> Mapping[ScorerName, int]:
        """Copies of the frozen models that have devices of their own, by role."""
        numbers: dict[ScorerName, int] = {
            "reference": self.num_references,
            "teacher": self.num_teachers,
            "reward_model": self.num_reward_models,
        }
        return {role: number for role, number in numbers.items() if number}

    @property
    def num_trainer_nodes(self) -> int:
        """Nodes that the trainers, also of the critic, are on."""
        each = self.devices_per_node or self.num_processes
        return -(-self.num_processes // each)

    @property
    def used_by(self) -> str:
        """The setting that makes it so, for messages."""
        role = "engine" if self.num_engines else next(iter(self.num_scorers), "critic")
        return f"cluster.num_{role}s"

    def devices(self, tensor_parallel_size: int) -> list[RoleDevices]:
        """The devices of each role that has some, with engines of so many. Those of trainers and
        critics are of processes that are started together, the rest is Ray's."""
        num_ranks = self.num_engines * tensor_parallel_size
        engine = ("cluster.num_engines", "engine.tensor_parallel_size")
        sampling = f"{engine[0]} {self.num_engines} x {engine[1]} {tensor_parallel_size}"
        roles = [
            RoleDevices.of("trainer", "cluster.num_trainers", self.num_trainers),
            RoleDevices.of("critic", "cluster.num_critics", self.num_critics),
            RoleDevices("engine", num_ranks, sampling, engine),
            *(RoleDevices.of(x, f"cluster.num_{x}s", n) for x, n in self.num_scorers.items()),
        ]
        return [role for role in roles if role.number]


class RoleDevices(NamedTuple):
    """What a role has for itself."""

    role: str
    number: int
    words: str
    """The settings that it follows from."""
    keys: tuple[str, ...]
    """Their names."""

    @property
    def trains(self) -> bool:
        """Whether its processes are started with the run, and not by Ray."""
        return self.role in ("trainer", "critic")

    @classmethod
    def of(cls, role: str, key: str, number: int) -> RoleDevices:
        """As many as a setting says."""
        return cls(role, number, f"{key} {number}", (key,))


def host_and_port(address: str) -> tuple[str, int] | None:
    """What `host:port` or `ray://host:port` names; None for what is neither."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        return None
    return host.strip("[]"), int(port)
