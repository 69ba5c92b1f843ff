"""Memory of a device over the phases of a planned run, before anything is started.

    phases = RunMemory(plan).phases()
    phases[1].name, phases[1].num_bytes, phases[1].parts

A step generates, trains and syncs. Where trainer and engine share a device, what one holds while
the other works decides whether the run fits: the KV cache, and weights that the engine has for
itself, stay unless `engine.enable_sleep`, masters, moments and all of a critic unless
`trainer.enable_sleep`. Where they are apart, each has a device of its own, as have frozen models
with `cluster.num_references`, `num_teachers` and `num_reward_models`, and a critic with
`cluster.num_critics`. Commands that only train or only sample have one phase.

Of the trainer all is `training_memory`. The cache is sized as the engine does it when it starts,
before the trainer has moments, which is why a cache that was granted may be missing later. On an
H200 whole runs of Qwen3-0.6B and 1.7B peaked 1 to 2 % below what is planned here. Not compared with
measurements: vLLM's division of its share, adapters, engines and references apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Literal, get_args

from hone.config.cluster import ScorerName
from hone.config.engine import BLOCK_SIZE, CPU_CACHE_GIB, EngineConfig
from hone.config.plan import Role, RoleName, RunPlan
from hone.config.reward import RewardModelConfig
from hone.config.trainer import SFTTrainerConfig
from hone.config.tree import EvaluateConfig, GenerateConfig, RLConfig
from hone.families.model_facts import ModelFacts
from hone.families.shape import ModelShape
from hone.hardware import GIB
from hone.planner.memory import TrainingMemory, layer_code, planned_step, training_memory

__all__ = ["Phase", "RunMemory", "in_gib", "peak_bytes", "sum_in_gib"]

CONTEXT_BYTES = GIB
"""CUDA's context, libraries, loaded kernels and the pools of CUDA graphs, of one process."""
CACHE_MARGIN_BYTES = GIB // 2
"""What the engine leaves free where free memory bounds the cache; as `hone.engine.kv_cache`."""
GROUP_BYTES = 1 << 28
"""Whole weights that a sync within a process holds at a time; as `hone.weights.sync`."""
GATHER_BYTES = 1 << 27
"""Whole weights that processes gather at a time; as `hone.trainer.gathering`."""
_SCORERS: tuple[ScorerName, ...] = get_args(ScorerName)
PROCESS_BYTES = GIB // 5
"""Python, torch and transformers, loaded and without a model, in host memory: half of what a
process shows, since processes share the libraries' pages."""


def in_gib(parts: Mapping[str, int]) -> str:
    """Bytes by kind as a sum of GiB, of those that show."""
    shown = {name: num / GIB for name, num in parts.items() if num >= 0.05 * GIB}
    return " + ".join(f"{name} {gib:.1f}" for name, gib in shown.items())


def sum_in_gib(parts: Mapping[str, int]) -> str:
    """All of it, and what of it shows."""
    told = in_gib(parts)
    return f"{sum(parts.values()) / GIB:.1f} GiB" + f" ({told})" * bool(told)


@dataclass(frozen=True, slots=True)
class Phase:
    """What one device holds at most in one phase of a step, in bytes by kind."""

    name: Literal["generate", "train", "sync", "score"]
    role: Literal["", "trainer", "critic", "engine"] | ScorerName
    """Whose device it is; empty where they share one."""
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
        """All of it and its parts, in GiB."""
        return sum_in_gib(self.parts)


class RunMemory:
    """What devices hold in a plan whose model's shape is known."""

    def __init__(self, plan: RunPlan, *, length_share: int = 1) -> None:
        """With a `length_share` of n rows are an n-th of the longest on average, and the engine's
        step is left out: what is planned then is what a run takes at least."""
        assert plan.shape is not None
        self.plan, self.shape, self.length_share = plan, plan.shape, length_share
        self.gpu, self.num_bytes = plan.devices.gpu, plan.num_bytes
        self.role = plan.roles.get("engine")
        self.is_vllm = plan.engine is not None and plan.engine.backend == "vllm"

    @property
    def longest(self) -> int:
        """Tokens of the rows that are planned for."""
        return -(-(self.plan.max_sequence_tokens or 0) // self.length_share)

    @property
    def is_known(self) -> bool:
        """Whether every size is: that of a cache without `engine.kv_cache_gib` follows from a
        GPU's memory."""
        return self.role is None or self.cache is not None

    # -- the trainer -----------------------------------------------------------------------------

    @cached_property
    def step(self) -> TrainingMemory:
        """An optimizer step with the largest micro-batches that the run's rows can make."""
        plan = self.plan
        assert plan.trainer is not None
        num_tokens, num_micro_batches = self.micro_batches(plan.trainer, plan.policy)
        return planned_step(plan, num_tokens=num_tokens, num_micro_batches=num_micro_batches)

    @cached_property
    def critic_shape(self) -> ModelShape:
        """That of `critic.path` where it is set and known, else the policy's; without its head."""
        cfg = self.plan.config
        return self._headless(cfg.critic.path if isinstance(cfg, RLConfig) else None)

    @cached_property
    def reward_model_shape(self) -> ModelShape:
        """Likewise of `reward.model.path`."""
        return self._headless(None if self._reward_model is None else self._reward_model.path)

    @property
    def _reward_model(self) -> RewardModelConfig | None:
        cfg = self.plan.config
        found = None
        if isinstance(cfg, RLConfig | EvaluateConfig | GenerateConfig):
            found = cfg.reward.model
        return None if found is None or found.path is None else found

    def _headless(self, path: str | None) -> ModelShape:
        facts = None if path is None else ModelFacts.known(path)
        return replace((facts and facts.shape) or self.shape, tied=True)

    @cached_property
    def critic(self) -> TrainingMemory | None:
        """An optimizer step of the critic, which has no logits."""
        cfg, plan = self.plan.config, self.plan
        if "critic" not in plan.roles or not isinstance(cfg, RLConfig):
            return None
        trainer, role = cfg.critic_trainer, plan.roles["critic"]
        num_tokens, num_micro_batches = self.micro_batches(trainer, role)
        return training_memory(
            self.critic_shape,
            trainer,
            dtype=plan.dtype,
            num_tokens=num_tokens,
            num_trained=0,
            num_micro_batches=num_micro_batches,
            layers=layer_code(on_gpu=not plan.is_on_cpu, compile=trainer.compile),
            sizes=role.axes,
        )

    def micro_batches(self, trainer: SFTTrainerConfig, role: Role) -> tuple[int, int]:
        """Tokens that a device has of the largest micro-batch of an optimizer step, and whether
        there are several, as 1 or 2."""
        plan, sizes, micro = self.plan, role.axes, trainer.micro_batch_size
        assert plan.batch is not None
        rows = -(-plan.batch.samples_per_optimizer_step // sizes.data)
        whole = -(-rows * self.longest // sizes.context)
        budget = trainer.max_tokens_per_microbatch
        if micro is not None:
            budget = -(-min(micro, rows) * self.longest // sizes.context)
        return min(whole, budget), 1 if whole <= budget else 2

    @property
    def critic_at_rest(self) -> int:
        """On the policy's devices, while that works."""
        critic = self.critic_beside
        return 0 if critic is None else critic.weights + critic.masters + critic.optimizer

    @property
    def critic_beside(self) -> TrainingMemory | None:
        """`critic`, where it is on the policy's devices."""
        return None if self.is_own_device("critic") else self.critic

    @property
    def offloaded(self) -> int:
        """In host memory: what is offloaded of the policy, and of a critic beside it."""
        return self.step.host + (self.critic_beside.host if self.critic_beside else 0)

    @property
    def frozen(self) -> dict[str, int]:
        """The parts of frozen models that lie beside the policy: of the KL term's reference, and of
        a teacher, which is taken to be of the policy's shape where its own is not known, and of a
        reward model, likewise."""
        return {name.replace("_", " "): self._beside(name) for name in _SCORERS}

    def scorer_shape(self, name: ScorerName) -> ModelShape:
        """That of a frozen model: the policy's where its own is not known."""
        match name:
            case "reference":
                return self.shape
            case "teacher":
                return (self.plan.teacher and self.plan.teacher.shape) or self.shape
            case "reward_model":
                return self.reward_model_shape

    def is_own_device(self, name: RoleName) -> bool:
        """Whether copies of a frozen model, or the critic, have devices of their own."""
        role = self.plan.roles.get(name)
        return role is not None and role.shares_devices_of is None

    @property
    def judging(self) -> dict[str, int]:
        """What a pass of the reward model takes beside its weights on the device of the policy or
        an engine, while samples are scored."""
        is_apart = self.is_own_device("reward_model")
        if self._reward_model is None or is_apart or self.length_share > 1:
            return {}
        return {"reward model's pass": self._scoring_bytes("reward_model")}

    @property
    def _teaching(self) -> dict[str, int]:
        """Likewise of a teacher that lies beside the policy, before the policy's step."""
        if "teacher" not in self.plan.roles or self.is_own_device("teacher"):
            return {}
        if self.length_share > 1 or self.plan.roles["teacher"].axes.world > 1:
            return {}  # several processes share the tokens, and layers by turns
        return {"teacher's pass": self._scoring_bytes("teacher")}

    def _scoring_bytes(self, name: ScorerName) -> int:
        """Of a pass of a frozen model on one device, at the widest moment of a layer, or of the
        head."""
        cfg, batch, trainer = self.plan.config, self.plan.batch, self.plan.trainer
        whole = None if batch is None else batch.samples_per_step * self.longest
        if name == "reward_model":
            assert self._reward_model is not None
            num_tokens = max(self._reward_model.max_tokens_per_forward, self.longest)
        else:
            assert isinstance(cfg, RLConfig)
            trainer = cfg.teacher_trainer if name == "teacher" else cfg.trainer
            num_tokens = trainer.max_tokens_per_forward or 2 * trainer.max_tokens_per_microbatch
            if trainer.micro_batch_size is not None and trainer.max_tokens_per_forward is None:
                num_tokens = trainer.micro_batch_size * self.longest
        num_tokens = min(num_tokens, whole or num_tokens)
        shape = self.scorer_shape(name)
        hidden, layer = self._pass_bytes(shape, num_tokens)
        if name == "reward_model" or trainer is None:
            return 2 * hidden + layer
        # As they come, and in float32 twice.
        chunk = min(trainer.logits_chunk_tokens, num_tokens)
        logits = chunk * shape.vocab_size * (self.num_bytes + 2 * 4)
        return 2 * hidden + max(layer, hidden + logits)

    def _pass_bytes(self, shape: ModelShape, num_tokens: int) -> tuple[int, int]:
        """Of a hidden state, and of the widest moment of a layer, in a pass without gradient."""
        hidden = num_tokens * shape.hidden_size * self.num_bytes
        return hidden, 3 * num_tokens * shape.mlp_size * self.num_bytes

    def _beside(self, name: ScorerName) -> int:
        role, shape = self.plan.roles.get(name), self.scorer_shape(name)
        if role is None or role.shares_devices_of is None:
            return 0
        return -(-shape.weight_bytes(self.num_bytes) // (role.axes.fsdp * role.axes.tensor))

    @property
    def _trainer_sleeps(self) -> bool:
        return getattr(self.plan.trainer, "enable_sleep", False) and not self.plan.is_apart

    @property
    def sleeping_weights(self) -> int:
        """Weights of a trainer that sleep with its masters: those of several processes, with whose
        shards no engine samples."""
        return self.step.weights if self.plan.policy.axes.world > 1 else 0

    @property
    def trainer_asleep(self) -> int:
        """In host memory, while the engine works: what leaves the device of a trainer that sleeps,
        and of a critic beside it."""
        if not self._trainer_sleeps:
            return 0
        step = self.step
        return step.masters + step.optimizer + self.sleeping_weights + self.critic_at_rest

    @property
    def engine_asleep(self) -> int:
        """In host memory, while the trainer works: weights of an engine of vLLM that sleeps. Those
        of the engine that is built in are delivered anew."""
        if self.role is None or self.role.shares_devices_of is None or not self.is_vllm:
            return 0
        return self.engine_weights if self._engine[1].enable_sleep else 0

    def trainer_at_rest(self, *, has_moments: bool = True) -> dict[str, int]:
        """While the engine works."""
        asleep = self._trainer_sleeps
        critic = self.critic_at_rest
        if self.critic_beside is not None and not has_moments:
            critic -= self.critic_beside.optimizer
        return {
            "weights": self.step.weights - (self.sleeping_weights if asleep else 0),
            "masters": 0 if asleep else self.step.masters,
            "moments": 0 if asleep or not has_moments else self.step.optimizer,
            **self.frozen,
            "critic": 0 if asleep else critic,
        }

    def trainer_at_work(self) -> dict[str, int]:
        """At the peak of its step, of the critic's, or of a teacher's pass, besides the engine."""
        policy = {**self.step.parts, **self.frozen, "critic": self.critic_at_rest}
        held = {name: policy[name] for name in ("weights", "masters", "moments", *self.frozen)}
        moments = [policy, held | {"critic": self.critic_at_rest} | self._teaching]
        if self.critic_beside is not None:
            moments.append(held | {"critic": self.critic_beside.peak})
        return max(moments, key=lambda parts: sum(parts.values()))

    # -- the engine ------------------------------------------------------------------------------

    @property
    def _engine(self) -> tuple[Role, EngineConfig]:
        assert self.role is not None
        assert self.plan.engine is not None
        return self.role, self.plan.engine

    @property
    def engine_weights(self) -> int:
        """What the engine samples with, where that is not the trainer's own module."""
        role, _ = self._engine
        if role.aliases_weights_of is not None:
            return 0
        size = role.axes.tensor
        if self.is_vllm:  # which divides the embedding too
            return -(-self.shape.weight_bytes(self.num_bytes) // size)
        return self.shape.rank_bytes(size, self.num_bytes, packs_rows=self.plan.packs_rows)

    @property
    def engine_step(self) -> int:
        """Of the largest prefill, and of decode, whose graphs keep their memory to themselves."""
        (role, engine), shape = self._engine, self.shape
        if self.length_share > 1:
            return 0
        values = 3 * shape.mlp_size // role.axes.tensor + 2 * shape.hidden_size
        logits = engine.max_num_seqs * shape.vocab_size * (4 + self.num_bytes)
        of_tokens = engine.max_num_batched_tokens * values * self.num_bytes
        return of_tokens + logits + self._unpacked

    @property
    def _unpacked(self) -> int:
        """Weights that a prefill makes of 8-bit codes at a time: the experts of a layer, or a gate
        and what it lets through."""
        if not self.plan.packs_rows:
            return 0
        size = self._engine[0].axes.tensor
        tensors = {t.name: prod(t.local(size)) for t in self.shape.tensors() if t.is_layer_matrix}
        pairs = ("gate_proj", "up_proj"), ("experts.gate_up_proj", "experts.down_proj")
        return max(sum(tensors.get(name, 0) for name in pair) for pair in pairs) * self.num_bytes

    @property
    def _packed(self) -> int:
        """Codes that a sync makes of a group of weights and the one that ends it, beside both."""
        if not self.plan.packs_rows:
            return 0
        largest = max(t.numel for t in self.shape.tensors() if t.is_layer_matrix)
        return (GROUP_BYTES // self.num_bytes + largest) // self._engine[0].axes.tensor

    @property
    def kv_bytes_per_token(self) -> int:
        """Of one token in the cache, on each device of an engine."""
        num_bytes = {"fp8": 1, "bfloat16": 2, "float32": 4}[self.plan.kv_dtype]
        return self.shape.kv_bytes_per_token(num_bytes) // self._engine[0].axes.tensor

    @property
    def max_length(self) -> int | None:
        """Tokens that an engine must have room for: what it is made for, as far as it is known."""
        return self.plan.max_model_len or self.plan.max_sequence_tokens

    @property
    def sequence_bytes(self) -> int | None:
        """Keys and values of one sequence of full length."""
        length = self.max_length
        if length is None:
            return None
        return -(-length // BLOCK_SIZE) * BLOCK_SIZE * self.kv_bytes_per_token

    @cached_property
    def cache(self) -> int | None:
        """Bytes of the KV cache, as the engine chooses them; None where they are not known."""
        (role, engine), plan = self._engine, self.plan
        if plan.is_on_cpu:
            return self._touched_cache
        if engine.kv_cache_gib is not None:
            return int(engine.kv_cache_gib * GIB)
        if self.gpu is None or self.gpu.memory_gib is None:
            return None
        total = self.gpu.memory_gib * GIB
        own = self.engine_weights + self.engine_step
        limits = [int(total * engine.gpu_memory_utilization) - own]
        if not self.is_vllm:
            is_beside = role.shares_devices_of is not None
            beside = sum(self.trainer_at_rest(has_moments=False).values()) if is_beside else 0
            if plan.trainer is None:
                beside = sum(self.frozen.values())
            limits.append(total - CONTEXT_BYTES - beside - own - CACHE_MARGIN_BYTES)
            if plan.max_model_len is not None and self.sequence_bytes is not None:
                limits.append(engine.max_num_seqs * self.sequence_bytes)
        return max(min(limits), 0)

    @property
    def _touched_cache(self) -> int:
        """Bytes of a cache in host memory that the sequences of a step write to: the others are
        never taken from the system."""
        (_, engine), batch = self._engine, self.plan.batch
        size = int((engine.kv_cache_gib or CPU_CACHE_GIB) * GIB)
        if batch is None:  # where nothing has been written to
            return 0
        most = min(engine.max_num_seqs, batch.samples_per_step)
        return min(size, most * self.longest * self.kv_bytes_per_token)

    @property
    def _process(self) -> dict[str, int]:
        """What a process has besides the model."""
        on_cpu = self.plan.is_on_cpu
        return {"Python and torch": PROCESS_BYTES} if on_cpu else {"CUDA": CONTEXT_BYTES}

    @property
    def lacks_room_for_one(self) -> bool:
        """Whether the cache is too small for the engine to start."""
        if self.role is None:
            return False
        known = self.cache is not None and self.sequence_bytes is not None
        return known and (self.cache or 0) < (self.sequence_bytes or 0)

    def engine(self, *, awake: bool) -> dict[str, int]:
        return {
            "engine's weights": self.engine_weights if awake else 0,
            "KV cache": (self.cache or 0) if awake else 0,
        }

    # -- phases ----------------------------------------------------------------------------------

    def phases(self) -> tuple[Phase, ...]:
        """Of a step, on the device that has most."""
        plan = self.plan
        if self.role is None:
            return (Phase("train", "", self.trainer_at_work() | self._process),)
        if plan.trainer is None:
            return (Phase("generate", "", self._generating() | self.frozen | self.judging),)
        if self.role.where == "thread":
            phases = self._together()
        else:
            phases = self._apart() if plan.is_apart else self._shared()
        if self.critic is not None and self.is_own_device("critic"):
            phases = (*phases, Phase("train", "critic", {**self.critic.parts, **self._process}))
        return (*phases, *(self._scoring(name) for name in _SCORERS if self.is_own_device(name)))

    def _generating(self) -> dict[str, int]:
        return self.engine(awake=True) | {"engine's step": self.engine_step} | self._process

    def _shared(self) -> tuple[Phase, ...]:
        at_rest, awake = self.trainer_at_rest(), self.engine(awake=True)
        asleep = self.engine(awake=not self._engine[1].enable_sleep)
        moving = self._moving + self._packed if self.engine_weights else 0
        return (
            Phase("generate", "", at_rest | self._generating() | self.judging),
            Phase("train", "", self.trainer_at_work() | asleep | self._process),
            Phase("sync", "", at_rest | awake | {"weights on their way": moving} | self._process),
        )

    def _apart(self) -> tuple[Phase, ...]:
        at_rest, engine, rest = self.trainer_at_rest(), self.engine(awake=True), self._process
        assert isinstance(self.plan.config, RLConfig)
        bucket = self.plan.config.cluster.update_weight_buffer_size
        # Two are under way; an engine still has to deliver the end of a third.
        sent, received = self._moving + 2 * bucket, 3 * bucket + self._packed
        return (
            Phase("train", "trainer", self.trainer_at_work() | self.judging | rest),
            Phase("sync", "trainer", at_rest | {"weights on their way": sent} | rest),
            Phase("generate", "engine", self._generating()),
            Phase("sync", "engine", engine | {"weights on their way": received} | rest),
        )

    def _together(self) -> tuple[Phase, ...]:
        """An engine in a thread of the trainer: both are at work on one device."""
        engine, rest = self.engine(awake=True), self._process
        assert isinstance(self.plan.config, RLConfig)
        # Two buckets are sent and up to three received; none is larger than the weights.
        buckets = 5 * min(self.plan.config.cluster.update_weight_buffer_size, self.engine_weights)
        moving = {"weights on their way": 2 * self._moving + buckets + self._packed}
        work = self.trainer_at_work() | engine | {"engine's step": self.engine_step}
        work |= self.judging
        return (
            Phase("train", "", work | rest),
            Phase("sync", "", self.trainer_at_rest() | engine | moving | rest),
        )

    def _scoring(self, name: ScorerName) -> Phase:
        """Of a frozen model on a device of its own."""
        parts = {
            "weights": self.scorer_shape(name).weight_bytes(self.num_bytes),
            "activations and work": self._scoring_bytes(name),
        }
        return Phase("score", name, parts | self._process)

    @property
    def _moving(self) -> int:
        """Whole weights that exist beside both sides': a group, and the tensor that ends it, which
        several processes gather from parts of it in the format that travels."""
        # A head, or the experts of a layer.
        largest = max(tensor.numel for tensor in self.shape.tensors())
        head, sizes = largest * self.num_bytes, self.plan.policy.axes
        if sizes.fsdp == 1:
            return GROUP_BYTES + head
        # Shards of a policy that sleeps visit the device, as masters.
        visiting = 4 // self.num_bytes if self._trainer_sleeps else 0
        shards = (1 + visiting) * head // sizes.fsdp
        return GROUP_BYTES + max(head + shards, (2 + visiting) * GATHER_BYTES)


def peak_bytes(plan: RunPlan) -> int:
    """Memory of the fullest device in its fullest phase."""
    return max(phase.num_bytes for phase in RunMemory(plan).phases())
