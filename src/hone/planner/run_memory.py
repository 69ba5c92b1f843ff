"""Memory of a device over the phases of a planned run, before anything is started.

    phases = RunMemory(plan).phases()
    phases[1].name, phases[1].num_bytes, phases[1].parts

What each part takes is computed in its folder (`hone.trainer.cost`, `hone.engine.cost`); this
module combines the parts that are on a device at the same time. A step generates, trains and syncs.
Where trainer and engine are colocated, the memory that one keeps while the other works decides
whether the run fits: the engine keeps its KV cache and weights of its own unless
`engine.enable_sleep` is on, the trainer keeps masters, moments and a whole critic unless
`trainer.enable_sleep` is on. Frozen models sleep with the side that they serve: a reward model with
the engine, references and teachers with the trainer. Otherwise each has devices of its own, as do
frozen models with `cluster.num_references`, `num_teachers` and `num_reward_models`, and a critic
with `cluster.num_critics`. Commands that only train or only sample have one phase.

The engine sizes its cache when it starts, before the trainer has moments, so the room that it was
granted may be missing later. On an H200 whole runs of Qwen3-0.6B and 1.7B peaked 1 to 2 % below
what is planned here. Adapters, and references on devices of their own, have not been compared with
measurements.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

from hone.config.plan import Role, RoleName, RunPlan
from hone.config.tree import RLConfig
from hone.engine.cost import CONTEXT_BYTES, GROUP_BYTES, EngineMemory
from hone.families.shape import ModelShape
from hone.hardware import GIB
from hone.rewards.settings import RewardModelConfig
from hone.trainer.cost import (
    TrainingMemory,
    adapted_tensors,
    frozen_bytes,
    gathered_to_score,
    layer_code,
    planned_step,
    scoring_bytes,
    training_memory,
)

__all__ = ["Phase", "RunMemory", "in_gib", "peak_bytes", "sum_in_gib"]

GATHER_BYTES = 1 << 27
"""Bytes of whole weights that processes gather at a time; the same as in
`hone.trainer.gathering`."""
PROCESS_BYTES = GIB // 5
"""Host memory of Python, torch and transformers, without a model: half of a process's resident
size, since processes share the libraries' pages."""


def in_gib(parts: Mapping[str, int]) -> str:
    """Bytes by kind as a sum of GiB; kinds that round to 0 are left out."""
    shown = {name: num / GIB for name, num in parts.items() if num >= 0.05 * GIB}
    return " + ".join(f"{name} {gib:.1f}" for name, gib in shown.items())


def sum_in_gib(parts: Mapping[str, int]) -> str:
    """The total in GiB, with its parts in parentheses."""
    told = in_gib(parts)
    return f"{sum(parts.values()) / GIB:.1f} GiB" + f" ({told})" * bool(told)


@dataclass(frozen=True, slots=True)
class Phase:
    """Largest memory of one device in one phase of a step, in bytes by kind."""

    name: Literal["generate", "train", "sync", "score"]
    role: Literal["", "trainer"] | RoleName
    """Role of the device; empty where roles share one."""
    parts: Mapping[str, int]

    @property
    def num_bytes(self) -> int:
        """The sum."""
        return sum(self.parts.values())

    @property
    def title(self) -> str:
        """The phase, after its role where devices have one."""
        return f"{self.role} {self.name}".replace("_", " ").strip()

    def in_words(self) -> str:
        """Text with the total and its parts, in GiB."""
        return sum_in_gib(self.parts)


class RunMemory:
    """Device memory of a plan whose model's shape is known."""

    def __init__(self, plan: RunPlan, *, length_share: int = 1) -> None:
        """With a `length_share` of n, rows have an n-th of the longest length on average, and the
        engine's step is left out, which gives a lower bound."""
        assert plan.shape is not None
        self.plan, self.shape, self.length_share = plan, plan.shape, length_share
        self.num_bytes = plan.num_bytes
        self.role = plan.roles.get("engine")

    @property
    def longest(self) -> int:
        """Tokens of the longest row that is planned for."""
        return -(-(self.plan.max_sequence_tokens or 0) // self.length_share)

    @property
    def is_known(self) -> bool:
        """Whether every size is known: that of a cache without `engine.kv_cache_gib` depends on a
        GPU's memory."""
        return self.role is None or self.cache is not None

    # -- the trainer -----------------------------------------------------------------------------

    @cached_property
    def step(self) -> TrainingMemory:
        """Memory of an optimizer step of the policy, with the largest micro-batches of the run's
        rows."""
        plan = self.plan
        num_tokens, num_micro_batches = self.micro_batches(plan.policy)
        return planned_step(plan, num_tokens=num_tokens, num_micro_batches=num_micro_batches)

    def shape_of(self, role: Role) -> ModelShape:
        """Shape of the role's model, or the policy's where that is not known; without a head where
        the model gives values."""
        shape = (role.facts and role.facts.shape) or self.shape
        return replace(shape, tied=True) if role.name in ("critic", "reward_model") else shape

    @cached_property
    def critic(self) -> TrainingMemory | None:
        """Memory of an optimizer step of the critic, which has no logits."""
        if (role := self.plan.roles.get("critic")) is None:
            return None
        num_tokens, num_micro_batches = self.micro_batches(role)
        return training_memory(
            self.shape_of(role),
            role.trainer,
            dtype=role.dtype,
            num_tokens=num_tokens,
            num_trained=0,
            num_micro_batches=num_micro_batches,
            layers=layer_code(role.trainer, self.plan.devices.kind),
            sizes=role.axes,
        )

    def micro_batches(self, role: Role) -> tuple[int, int]:
        """One device's tokens of the largest micro-batch of an optimizer step, and the number of
        micro-batches: 1, or 2 for several."""
        plan, sizes, trainer = self.plan, role.axes, role.trainer
        micro = trainer.micro_batch_size
        assert plan.batch is not None
        rows = -(-plan.batch.samples_per_optimizer_step // sizes.data)
        whole = -(-rows * self.longest // sizes.context)
        budget = trainer.max_tokens_per_microbatch
        if micro is not None:
            budget = -(-min(micro, rows) * self.longest // sizes.context)
        return min(whole, budget), 1 if whole <= budget else 2

    @property
    def critic_at_rest(self) -> int:
        """Bytes of a critic on the policy's devices while the policy works."""
        critic = self.critic_beside
        return 0 if critic is None else critic.weights + critic.masters + critic.optimizer

    @property
    def critic_beside(self) -> TrainingMemory | None:
        """Memory of a colocated critic; None otherwise."""
        role = self.plan.roles.get("critic")
        return None if role is None or role.has_own_devices else self.critic

    @property
    def offloaded(self) -> int:
        """Bytes in host memory that are offloaded by the policy and a colocated critic."""
        return self.step.host + (self.critic_beside.host if self.critic_beside else 0)

    @cached_property
    def frozen(self) -> dict[str, int]:
        """Weights of frozen models colocated with the policy, by role, where all are awake."""
        return {role.title: self._beside(role) for role in self.plan.scorers}

    def _frozen_awake(self, side: Literal["engine", "trainer"]) -> dict[str, int]:
        """`frozen` while one side works, without those of the other side where it sleeps."""
        asleep = self._frozen_asleep("trainer" if side == "engine" else "engine")
        return {title: 0 if title in asleep else n for title, n in self.frozen.items()}

    def _frozen_asleep(self, side: Literal["engine", "trainer"]) -> dict[str, int]:
        """Weights of frozen models that sleep with a side: those that score samples with the
        engine, those that score rows with the trainer."""
        if not (self._trainer_sleeps if side == "trainer" else self._engine_sleeps):
            return {}
        own = [x for x in self.plan.scorers if x.scores_rows == (side == "trainer")]
        return {role.title: self.frozen[role.title] for role in own}

    @property
    def judging(self) -> dict[str, int]:
        """Work memory of a pass of a colocated reward model on the device of the policy or an
        engine, while samples are scored."""
        role = self.plan.roles.get("reward_model")
        if role is None or role.has_own_devices or self.length_share > 1:
            return {}
        gathered = 0
        if role.axes.world > 1:
            gathered = gathered_to_score(self.shape_of(role), num_bytes=self.num_bytes)
        return {"reward model's pass": self._scoring_bytes(role) + gathered}

    @property
    def _teaching(self) -> dict[str, int]:
        """Work memory of a pass of a teacher colocated with the policy, before the policy's
        step."""
        role = self.plan.roles.get("teacher")
        if role is None or role.has_own_devices:
            return {}
        if self.length_share > 1 or role.axes.world > 1:
            return {}  # several processes share the tokens, and layers by turns
        return {"teacher's pass": self._scoring_bytes(role)}

    def _scoring_bytes(self, role: Role) -> int:
        """Work memory of a frozen model's pass over the rows of a step."""
        batch = self.plan.batch
        num_rows = None if batch is None else batch.samples_per_step
        return scoring_bytes(
            role,
            self.shape_of(role),
            longest=self.longest,
            num_rows=num_rows,
            num_bytes=self.num_bytes,
        )

    def _beside(self, role: Role) -> int:
        if role.has_own_devices or role.aliases_weights_of is not None:
            return 0
        return self.held_by(role)

    def held_by(self, role: Role) -> int:
        """Weights of a frozen model on the fullest of its devices."""
        return frozen_bytes(
            self.shape_of(role),
            role.axes,
            num_bytes=self.num_bytes,
            gives_values=role.name == "reward_model",
        )

    @property
    def _trainer_sleeps(self) -> bool:
        return self.plan.policy.sleeps and not self.plan.is_apart

    @property
    def _engine_sleeps(self) -> bool:
        return self.role is not None and self.role.sleeps and not self.plan.is_apart

    @property
    def sleeping_weights(self) -> int:
        """Weights of a sleeping trainer that move with its masters: those of several processes,
        whose shards no engine samples from."""
        return self.step.weights if self.plan.policy.axes.world > 1 else 0

    @property
    def trainer_asleep(self) -> int:
        """Bytes that a sleeping trainer, a colocated critic and frozen models that score rows move
        to host memory while the engine works."""
        if not self._trainer_sleeps:
            return 0
        step, frozen = self.step, sum(self._frozen_asleep("trainer").values())
        return step.masters + step.optimizer + self.sleeping_weights + self.critic_at_rest + frozen

    def trainer_at_rest(self, *, has_moments: bool = True) -> dict[str, int]:
        """Memory of the trainer while the engine works, by kind."""
        asleep = self._trainer_sleeps
        critic = self.critic_at_rest
        if self.critic_beside is not None and not has_moments:
            critic -= self.critic_beside.optimizer
        return {
            "weights": self.step.weights - (self.sleeping_weights if asleep else 0),
            "masters": 0 if asleep else self.step.masters,
            "moments": 0 if asleep or not has_moments else self.step.optimizer,
            **self._frozen_awake("engine"),
            "critic": 0 if asleep else critic,
        }

    def trainer_at_work(self) -> dict[str, int]:
        """Memory of the trainer, by kind, at the peak of its step, of the critic's step, or of a
        teacher's pass."""
        return max(self._moments.values(), key=lambda parts: sum(parts.values()))

    @property
    def _moments(self) -> dict[RoleName, dict[str, int]]:
        """Memory of the trainer, by kind, while each of the models on its devices works."""
        frozen = self._frozen_awake("trainer")
        policy = {**self.step.parts, **frozen, "critic": self.critic_at_rest}
        held = {name: policy[name] for name in ("weights", "masters", "moments", *frozen)}
        moments: dict[RoleName, dict[str, int]] = {
            "policy": policy,
            "teacher": held | {"critic": self.critic_at_rest} | self._teaching,
        }
        if self.critic_beside is not None:
            moments["critic"] = held | {"critic": self.critic_beside.peak}
        return moments

    def training_peak(self, role: Literal["policy", "critic"]) -> int:
        """Bytes of the fullest device of the policy or the critic at the peak of its optimizer
        step."""
        phases = [phase for phase in self.phases() if phase.name == "train"]
        own = next((phase for phase in phases if phase.role == role), None)
        if own is not None:  # a critic with devices of its own
            return own.num_bytes
        shared = next(phase for phase in phases if phase.role in ("", "trainer"))
        at_work = sum(self.trainer_at_work().values())
        return shared.num_bytes - at_work + sum(self._moments[role].values())

    # -- towers ----------------------------------------------------------------------------------

    def towers(self, host: RoleName) -> dict[str, int]:
        """Towers of the models on a device of the role `host`: their weights, the features that
        they keep, and the work memory of one pass. Empty for text models."""
        here = [
            role
            for role in self.plan.roles.values()
            if host in (role.name, role.shares_devices_of) and not role.aliases_weights_of
        ]
        found = [(tower, role) for role in here if (tower := self.shape_of(role).tower)]
        if not found:
            return {}
        tokens = [self.micro_batches(role)[0] for _, role in found if role.name == "policy"]
        tokens += [
            max(role.settings.max_tokens_per_forward, self.longest)
            for _, role in found
            if isinstance(role.settings, RewardModelConfig)
        ]
        if self.role is not None:
            tokens.append(self.role.engine.max_num_batched_tokens)
        num_tokens = max(tokens, default=self.longest)
        held = sum(
            tower.weight_bytes(self.num_bytes) + int(role.model.image_cache_gib * GIB)
            for tower, role in found
        )
        work = max(tower.pass_bytes(num_tokens, self.num_bytes) for tower, _ in found)
        return {"vision tower": held + work}

    # -- the engine ------------------------------------------------------------------------------

    @cached_property
    def engine(self) -> EngineMemory:
        """An engine of the plan. Raises KeyError where it has none."""
        is_least = self.length_share > 1
        return EngineMemory(self.plan, self.shape, longest=self.longest, at_least=is_least)

    @property
    def engine_asleep(self) -> int:
        """Weights of a sleeping engine in host memory, while the trainer works."""
        return 0 if self.role is None else self.engine.asleep

    @property
    def reward_model_asleep(self) -> int:
        """Weights of a reward model in a process that sleeps with the engine, in host memory."""
        return sum(self._frozen_asleep("engine").values())

    @cached_property
    def cache(self) -> int | None:
        """Bytes of the KV cache that the engine chooses; None where not known."""
        if self.plan.trainer is None:
            reserved = self.frozen
        else:
            reserved = self.trainer_at_rest(has_moments=False) if self.engine.is_colocated else {}
        host = self.plan.roles["engine"].shares_devices_of or "engine"
        reserved = {**reserved, **self.towers(host)}
        return self.engine.cache(reserved=sum(reserved.values()))

    @property
    def _process(self) -> dict[str, int]:
        """Memory of a process without its models, by kind."""
        on_cpu = self.plan.is_on_cpu
        return {"Python and torch": PROCESS_BYTES} if on_cpu else {"CUDA": CONTEXT_BYTES}

    @property
    def lacks_room_for_one(self) -> bool:
        """Whether the cache is too small for the engine to start."""
        if self.role is None:
            return False
        needed = self.engine.sequence_bytes
        return self.cache is not None and needed is not None and self.cache < needed

    def _engine_at_rest(self, *, awake: bool) -> dict[str, int]:
        return {
            "engine's weights": self.engine.weights if awake else 0,
            "KV cache": (self.cache or 0) if awake else 0,
            "recurrent states": self.engine.states if awake else 0,
        }

    # -- phases ----------------------------------------------------------------------------------

    def phases(self) -> tuple[Phase, ...]:
        """The phases of a step on the fullest device of each role."""
        first: RoleName = "engine" if self.plan.trainer is None else "policy"

        if not any(self.shape_of(role).tower for role in self.plan.roles.values()):
            return self._phases()

        def with_towers(phase: Phase) -> Phase:
            host = first if phase.role in ("", "trainer") else phase.role
            return replace(phase, parts={**phase.parts, **self.towers(host)})

        return tuple(map(with_towers, self._phases()))

    def _phases(self) -> tuple[Phase, ...]:
        """Those of decoders."""
        plan = self.plan
        if self.role is None:
            return (Phase("train", "", self.trainer_at_work() | self._process),)
        if plan.trainer is None:
            return (Phase("generate", "", self._generating() | self.frozen | self.judging),)
        if self.role.where == "thread":
            phases = self._together()
        else:
            phases = self._apart() if plan.is_apart else self._shared()
        if self.critic is not None and self.critic_beside is None:
            phases = (*phases, Phase("train", "critic", {**self.critic.parts, **self._process}))
        return (*phases, *(self._scoring(x) for x in plan.scorers if x.has_own_devices))

    def _generating(self) -> dict[str, int]:
        return (
            self._engine_at_rest(awake=True) | {"engine's step": self.engine.step} | self._process
        )

    def _shared(self) -> tuple[Phase, ...]:
        at_rest, awake = self.trainer_at_rest(), self._engine_at_rest(awake=True)
        asleep = self._engine_at_rest(awake=not self.engine.settings.enable_sleep)
        moving = self._moving + self.engine.packed if self.engine.weights else 0
        return (
            Phase("generate", "", at_rest | self._generating() | self.judging),
            Phase("train", "", self.trainer_at_work() | asleep | self._process),
            Phase("sync", "", at_rest | awake | {"weights on their way": moving} | self._process),
        )

    def _apart(self) -> tuple[Phase, ...]:
        at_rest, engine, rest = (
            self.trainer_at_rest(),
            self._engine_at_rest(awake=True),
            self._process,
        )
        assert isinstance(self.plan.config, RLConfig)
        bucket = self.plan.config.cluster.update_weight_buffer_size
        # Two buckets are in transfer, and an engine may still have to deliver the end of a third.
        sent, received = self._moving + 2 * bucket, 3 * bucket + self.engine.packed
        return (
            Phase("train", "trainer", self.trainer_at_work() | self.judging | rest),
            Phase("sync", "trainer", at_rest | {"weights on their way": sent} | rest),
            Phase("generate", "engine", self._generating()),
            Phase("sync", "engine", engine | {"weights on their way": received} | rest),
        )

    def _together(self) -> tuple[Phase, ...]:
        """Phases with an engine in a thread of the trainer: both work on one device at the same
        time."""
        engine, rest = self._engine_at_rest(awake=True), self._process
        assert isinstance(self.plan.config, RLConfig)
        # Two buckets are sent and up to three received; none is larger than the weights.
        buckets = 5 * min(self.plan.config.cluster.update_weight_buffer_size, self.engine.weights)
        moving = {"weights on their way": 2 * self._moving + buckets + self.engine.packed}
        work = self.trainer_at_work() | engine | {"engine's step": self.engine.step}
        work |= self.judging
        return (
            Phase("train", "", work | rest),
            Phase("sync", "", self.trainer_at_rest() | engine | moving | rest),
        )

    def _scoring(self, role: Role) -> Phase:
        """The phase of a remote frozen model."""
        parts = {
            "weights": self.held_by(role),
            "activations and work": self._scoring_bytes(role),
        }
        return Phase("score", role.name, parts | self._process)

    @property
    def _moving(self) -> int:
        """Bytes of whole weights in transfer, in addition to those of trainer and engine: a group,
        and the tensor that ends it. Several processes gather that tensor from parts, in the format
        of the transfer."""
        # A head, or the experts of a layer.
        largest = max(tensor.numel for tensor in self.shape.tensors())
        head, sizes = largest * self.num_bytes, self.plan.policy.axes
        if sizes.fsdp == 1:
            return GROUP_BYTES + head + self._merging
        # Shards of a sleeping policy are copied to the device as masters.
        visiting = 4 // self.num_bytes if self._trainer_sleeps else 0
        shards = (1 + visiting) * head // sizes.fsdp
        return GROUP_BYTES + max(head + shards, (2 + visiting) * GATHER_BYTES) + self._merging

    @property
    def _merging(self) -> int:
        """Bytes of experts with merged adapters while the gathered ones without are there too. In
        one process these are the trainer's own."""
        lora = self.plan.lora
        if lora is None or self.plan.policy.axes.world == 1:
            return 0
        stacked = (t.numel for t in adapted_tensors(self.shape, lora) if t.of_experts)
        return max(stacked, default=0) * self.num_bytes


def peak_bytes(plan: RunPlan) -> int:
    """Memory of the fullest device in its fullest phase."""
    return max(phase.num_bytes for phase in RunMemory(plan).phases())
