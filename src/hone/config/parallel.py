"""How training is spread over several processes, one a device."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from pydantic import Field

from hone.config.base import Section
from hone.errors import UserError
from hone.families.stages import cut_evenly

__all__ = [
    "AxisSizes",
    "CriticParallelConfig",
    "ParallelConfig",
    "most_of_a_round",
    "passes_in_flight",
    "rounds",
    "ulysses_problem",
]


class ParallelConfig(Section):
    """Sizes of the axes: `pipeline x data x ring x ulysses x tensor` processes, data filling up the
    rest."""

    zero_stage: Literal[0, 1, 2, 3] = 2
    """What is sharded over processes: 0 nothing, 1 optimizer states and master weights, 2 also
    gradients, 3 also the weights that compute. Higher stages need less memory and talk more."""

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
    experts; tokens travel to them (all-to-all)."""

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

    def over(self, policy: ParallelConfig) -> ParallelConfig:
        """`policy`, with what is set here in place of its own."""
        own = self.model_dump(exclude_none=True)
        if "pipeline_parallel_size" in own:
            own["virtual_stages"] = 1
        return policy.model_copy(update=own)


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
    """Neighbours, among those of data and context, that divide the experts."""
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
        if sharers % expert or (fsdp % expert and expert % fsdp):
            raise UserError(
                f"trainer.parallel.expert_parallel_size is {expert}, which must divide the "
                f"{sharers} processes that differ in data or context, and divide the {fsdp} that "
                "share shards or be a multiple of them. Change it, fsdp_size or the number of "
                "processes."
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
        return max(1, self.fsdp // self.expert)

    @property
    def context(self) -> int:
        """Processes that share the tokens of a row."""
        return self.ring * self.ulysses


def rounds(num_batches: int, num_stages: int) -> list[range]:
    """The micro-batches of a step in the rounds in which they go through one group of layers before
    the next: S or a few more, since with fewer than S stages would wait for what goes round."""
    return cut_evenly(num_batches, max(num_batches // num_stages, 1))


def most_of_a_round(num_stages: int) -> int:
    """Micro-batches of the largest round that there can be: one more would make two of them."""
    return 2 * num_stages - 1


def passes_in_flight(
    stage: int, num_stages: int, virtual_stages: int = 1, *, num_batches: int
) -> int:
    """Most forward passes of a stage, each through one of its groups, whose backward is still to
    come.

    With one group so many that it goes on while the first is on its way to the last stage. With
    several so many that it goes on while the first comes back as well, after a round through all
    groups but the last.
    """
    most = num_batches * virtual_stages
    if virtual_stages == 1:
        return min(num_stages - stage, most)
    of_round = len(rounds(num_batches, num_stages)[0])
    return min((virtual_stages - 1) * of_round + 2 * (num_stages - stage) - 1, most)


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
