"""Settings of processes: which devices each role has, and the axes of its training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from pydantic import Field

from hone.config.base import Section
from hone.errors import UserError

__all__ = [
    "ROW_SCORERS",
    "SCORERS",
    "AxisSizes",
    "ClusterConfig",
    "CriticParallelConfig",
    "ParallelConfig",
    "RoleDevices",
    "RoleName",
    "host_and_port",
    "ulysses_problem",
]

RoleName = Literal["policy", "engine", "critic", "reference", "teacher", "reward_model"]
"""The parts of a run that have a model."""
ROW_SCORERS: tuple[RoleName, ...] = ("reference", "teacher")
"""Frozen models whose outputs become columns of the rows."""
SCORERS: tuple[RoleName, ...] = (*ROW_SCORERS, "reward_model")
"""Frozen models, each of which can have devices of its own, `num_<name>s` of them."""


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
    each training process, or with `trainer.parallel.zero_stage` 3 in shards over all of them, which
    then score together once each has generated its samples; where engines are apart it lies whole
    on the device of the first trainer."""

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
    def num_scorers(self) -> Mapping[RoleName, int]:
        """Copies of the frozen models that have devices of their own, by role."""
        return {role: number for role in SCORERS if (number := getattr(self, f"num_{role}s"))}

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

    @property
    def others(self) -> list[RoleDevices]:
        """The devices of the critic and of frozen models that have some."""
        numbers = {"critic": self.num_critics, **self.num_scorers}
        return [RoleDevices.of(x, f"cluster.num_{x}s", n) for x, n in numbers.items() if n]

    @property
    def num_others(self) -> int:
        """Their sum."""
        return sum(role.number for role in self.others)

    def devices(self, tensor_parallel_size: int) -> list[RoleDevices]:
        """The devices of each role that has some, with engines of so many. Those of trainers and
        critics are of processes that are started together, the rest is Ray's."""
        num_ranks = self.num_engines * tensor_parallel_size
        engine = ("cluster.num_engines", "engine.tensor_parallel_size")
        sampling = f"{engine[0]} {self.num_engines} x {engine[1]} {tensor_parallel_size}"
        others = self.others
        roles = [
            RoleDevices.of("trainer", "cluster.num_trainers", self.num_trainers),
            *(role for role in others if role.trains),
            RoleDevices("engine", num_ranks, sampling, engine),
            *(role for role in others if not role.trains),
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


class ParallelConfig(Section):
    """Sizes of the axes: `pipeline x data x ring x ulysses x tensor` processes, data filling up the
    rest."""

    zero_stage: Literal[0, 1, 2, 3] = 2
    """What is sharded over processes: 0 nothing, 1 optimizer states and master weights, 2 also
    gradients, 3 also the weights that compute, and those of a reward model that shares the
    processes' devices with their engines. Higher stages need less memory and talk more."""

    fsdp_size: int = Field(default=-1, ge=-1)
    """Processes that share one set of shards; -1: all. Fewer replicate the shards (hybrid
    sharding), which keeps most traffic inside a node."""

    tensor_parallel_size: int = Field(default=1, ge=1)
    """Processes that share every layer's matrices, and the tokens between layers."""

    pipeline_parallel_size: int = Field(default=1, ge=1)
    """Processes that each hold neighbouring layers, a stage, and pass hidden states on (1F1B).
    Stages take about equally long: the last, which has the head, holds fewer layers."""

    virtual_stages: int = Field(default=1, ge=1)
    """Groups of neighbouring layers that each stage holds, dealt out in turn: micro-batches pass
    all stages once a group (interleaved 1F1B). With V of them stages wait a V-th of the time, keep
    more activations, and send V times as much."""

    expert_parallel_size: int = Field(default=1, ge=1)
    """Processes, among those that share or copy shards, that each hold some of every layer's
    experts; tokens travel to them (all-to-all). With tensor parallelism that size or a multiple."""

    ulysses_size: int = Field(default=1, ge=1)
    """Processes that share a sequence's tokens, and in attention its heads (all-to-all)."""

    ring_size: int = Field(default=1, ge=1)
    """Processes that share a sequence's tokens and pass keys and values round in attention."""

    reference_ulysses_size: int | None = Field(default=None, ge=1)
    """As `ulysses_size`, for the reference model and a teacher; unset: the same."""

    reference_ring_size: int | None = Field(default=None, ge=1)
    """As `ring_size`, for the reference model and a teacher; unset: the same."""

    timeout_s: float = Field(default=600.0, gt=0)
    """Seconds after which a process that waits for others gives up and names whom it missed."""

    @property
    def replica_size(self) -> int:
        """Processes that train the same rows together."""
        sharing = self.ring_size * self.ulysses_size * self.tensor_parallel_size
        return sharing * self.pipeline_parallel_size

    @property
    def for_reference(self) -> ParallelConfig:
        """That of the frozen reference model: its own context axes, no pipeline, and sharded
        whatever the policy's `zero_stage` is."""
        return self.model_copy(
            update={
                "zero_stage": 3,
                "pipeline_parallel_size": 1,
                "virtual_stages": 1,
                "ring_size": self.reference_ring_size or self.ring_size,
                "ulysses_size": self.reference_ulysses_size or self.ulysses_size,
            }
        )

    @property
    def for_sequences(self) -> ParallelConfig:
        """That of a reward model in shards: each process scores whole sequences."""
        return ParallelConfig(zero_stage=3, fsdp_size=self.fsdp_size, timeout_s=self.timeout_s)


class CriticParallelConfig(Section):
    """How a critic with processes of its own (`cluster.num_critics`) is divided, where that is not
    how the policy is."""

    zero_stage: Literal[0, 1, 2, 3] | None = None
    """As `trainer.parallel.zero_stage`, for the critic; unset: the same."""

    fsdp_size: int | None = Field(default=None, ge=-1)
    """As `trainer.parallel.fsdp_size`, for the critic; unset: the same."""

    tensor_parallel_size: int | None = Field(default=None, ge=1)
    """As `trainer.parallel.tensor_parallel_size`, for the critic; unset: the same."""

    pipeline_parallel_size: int | None = Field(default=None, ge=1)
    """Stages of the critic, each with one group of layers; unset: as those of the policy, with
    `trainer.parallel.virtual_stages` groups."""

    expert_parallel_size: int | None = Field(default=None, ge=1)
    """As `trainer.parallel.expert_parallel_size`, for the critic; unset: the same."""

    ulysses_size: int | None = Field(default=None, ge=1)
    """As `trainer.parallel.ulysses_size`, for the critic; unset: the same."""

    ring_size: int | None = Field(default=None, ge=1)
    """As `trainer.parallel.ring_size`, for the critic; unset: the same."""


@dataclass(frozen=True, slots=True)
class AxisSizes:
    """Processes along each axis; their product is the number of processes."""

    data: int = 1
    ring: int = 1
    ulysses: int = 1
    tensor: int = 1
    fsdp: int = 1
    """Processes, among those of data and context, that share one set of shards."""
    expert: int = 1
    """Neighbours, among those of data, context and tensor, that divide the experts."""
    pipeline: int = 1
    """Stages of layers."""
    virtual_stages: int = 1
    """Groups of neighbouring layers that each stage holds: no axis, but it says which layers."""

    @classmethod
    def of(cls, cfg: ParallelConfig, world_size: int | None = None) -> AxisSizes:
        """The sizes that `cfg` gives `world_size` processes; None: as few as make up one replica.

        Raises UserError with the product that does not divide.
        """
        replica, tensor = cfg.replica_size, cfg.tensor_parallel_size
        stages = cfg.pipeline_parallel_size
        world = world_size or replica
        if world % replica:
            raise UserError(
                f"trainer.parallel.ring_size {cfg.ring_size} x trainer.parallel.ulysses_size "
                f"{cfg.ulysses_size} x trainer.parallel.tensor_parallel_size {tensor} x "
                f"trainer.parallel.pipeline_parallel_size {stages} = {replica} processes a "
                f"replica, which does not divide the number of processes, {world}. Start a "
                f"multiple of {replica} (--nproc {replica}), or lower one of the four."
            )
        sharers = world // tensor // stages
        fsdp = sharers if cfg.fsdp_size == -1 or world_size is None else cfg.fsdp_size
        if cfg.zero_stage == 0:
            fsdp = 1
        if fsdp < 1 or sharers % fsdp:
            raise UserError(
                f"trainer.parallel.fsdp_size is {cfg.fsdp_size}, which does not divide the "
                f"{sharers} processes that differ in data or context ({world} processes / "
                f"trainer.parallel.tensor_parallel_size {tensor} / "
                f"trainer.parallel.pipeline_parallel_size {stages}). Use a divisor of {sharers}, "
                "or -1 for all."
            )
        expert = 1 if world_size is None else cfg.expert_parallel_size
        if expert > 1 and expert % tensor:
            raise UserError(
                f"trainer.parallel.expert_parallel_size is {expert}, which is no multiple of "
                f"trainer.parallel.tensor_parallel_size, {tensor}: processes that share matrices "
                f"also divide experts. Use {tensor} or a multiple."
            )
        divided, shared = sharers * tensor, fsdp * tensor
        if divided % expert or (shared % expert and expert % shared):
            raise UserError(
                f"trainer.parallel.expert_parallel_size is {expert}, which must divide the "
                f"{divided} processes of a pipeline stage, and divide the {shared} of one set of "
                "shards or be a multiple of them. Change it, fsdp_size or the number of processes."
            )
        return cls(
            data=world // replica,
            ring=cfg.ring_size,
            ulysses=cfg.ulysses_size,
            tensor=tensor,
            fsdp=fsdp,
            expert=expert,
            pipeline=stages,
            virtual_stages=cfg.virtual_stages,
        )

    @property
    def world(self) -> int:
        """All processes."""
        return self.pipeline * self.data * self.context * self.tensor

    @property
    def expert_fsdp(self) -> int:
        """Processes that share one set of shards of the same experts."""
        return max(1, self.fsdp * self.tensor // self.expert)

    @property
    def context(self) -> int:
        """Processes that share the tokens of a row."""
        return self.ring * self.ulysses


def ulysses_problem(size: int, num_heads: int, num_kv_heads: int) -> str | None:
    """Why `size` processes cannot share so many query and key heads, or None where they can.

    Each takes equally many query heads and all the key heads that these need; a key head may be
    needed by several.
    """
    if num_heads % size == 0 and (num_kv_heads % size == 0 or size % num_kv_heads == 0):
        return None
    fitting = [
        n
        for n in range(1, num_heads + 1)
        if num_heads % n == 0 and (num_kv_heads % n == 0 or n % num_kv_heads == 0)
    ]
    return (
        f"each process takes equally many of the {num_heads} query heads and of the "
        f"{num_kv_heads} key heads, or a whole key head that others take too; sizes that do: "
        f"{', '.join(map(str, fitting))}"
    )
