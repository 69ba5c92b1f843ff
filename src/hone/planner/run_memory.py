"""Memory of a device over the phases of a run of `hone rl`, before anything is started.

    phases = run_phases(cfg, shape, world_size=1, gpu=gpu)
    phases[1].name, phases[1].num_bytes, phases[1].parts

A step generates, trains and syncs. Where trainer and engine share a device, what one holds while
the other works decides whether the run fits: the KV cache stays unless `engine.enable_sleep`,
masters and moments stay unless `trainer.enable_sleep`. Where they are apart, each has a device of
its own, as has a reference with `cluster.num_references`.

Of the trainer all is `training_memory`. The cache is sized as the engine does it when it starts,
before the trainer has moments, which is why a cache that was granted may be missing later. On an
H200 whole runs of Qwen3-0.6B and 1.7B peaked 1 to 2 % below what is planned here. Not compared with
measurements: vLLM's division of its share, adapters, engines and references apart.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from hone.config.derived import (
    Derived,
    compute_dtype,
    kv_dtype,
    samples_per_optimizer_step,
    trainers_hold_reference,
)
from hone.config.hardware import Peaks
from hone.config.model_facts import ModelFacts
from hone.config.parallel import AxisSizes
from hone.config.tree import RLConfig
from hone.families.shape import ModelShape
from hone.planner.memory import TrainingMemory, planned_step

__all__ = [
    "Phase",
    "RunMemory",
    "derived_run_memory",
    "run_phases",
]

_GIB = 1 << 30
CONTEXT_BYTES = _GIB
"""CUDA's context, libraries, loaded kernels and the pools of CUDA graphs, of one process."""
CACHE_MARGIN_BYTES = _GIB // 2
"""What the engine leaves free where free memory bounds the cache; as `hone.engine.kv_cache`."""
GROUP_BYTES = 1 << 28
"""Whole weights that a sync within a process holds at a time; as `hone.weights.sync`."""
GATHER_BYTES = 1 << 27
"""Whole weights that processes gather at a time; as `hone.trainer.gathering`."""
CPU_CACHE_BYTES = _GIB
"""KV cache of an engine on a CPU without `engine.kv_cache_gib`; as `hone.engine.kv_cache`."""
PROCESS_BYTES = _GIB // 5
"""Python, torch and transformers, loaded and without a model, in host memory: half of what a
process shows, since processes share the libraries' pages."""

PhaseName = Literal["generate", "train", "sync", "score"]


@dataclass(frozen=True, slots=True)
class Phase:
    """What one device holds at most in one phase of a step, in bytes by kind."""

    name: PhaseName
    role: Literal["", "trainer", "engine", "reference"]
    """Whose device it is; empty where they share one."""
    parts: Mapping[str, int]

    @property
    def num_bytes(self) -> int:
        """The sum."""
        return sum(self.parts.values())

    @property
    def title(self) -> str:
        """The phase, after its role where devices have one."""
        return f"{self.role} {self.name}".strip()

    @property
    def sum_in_words(self) -> str:
        """The parts in GiB, those that show."""
        shown = {name: num / _GIB for name, num in self.parts.items() if num >= 0.05 * _GIB}
        return " + ".join(f"{name} {gib:.1f}" for name, gib in shown.items())

    def in_words(self) -> str:
        """All of it and its parts, in GiB."""
        return f"{self.num_bytes / _GIB:.1f} GiB ({self.sum_in_words})"


def run_phases(
    cfg: RLConfig, shape: ModelShape, *, world_size: int | None, gpu: Peaks | None
) -> tuple[Phase, ...]:
    """The phases of a step on the device that has most, for `world_size` trainers; None: as few as
    make up one replica.

    Nothing where the cache's size is not known, which without `engine.kv_cache_gib` takes the size
    of a GPU's memory, and nothing on a CPU. Raises UserError as `AxisSizes.of` does.
    """
    run = RunMemory(cfg, shape, world_size, gpu)
    return () if cfg.run.device == "cpu" or run.cache is None else run.phases()


def derived_run_memory(
    cfg: RLConfig, shape: ModelShape, *, world_size: int | None, gpu: Peaks | None
) -> list[Derived]:
    """The lines of `hone check`: each phase's peak, beside what `gpu` has, as `run_phases`."""
    has = "" if gpu is None else f". {gpu.name} has {gpu.memory_gib}"
    lines = [
        Derived(
            f"{phase.title.replace(' ', '_')}_peak_gib",
            round(phase.num_bytes / _GIB, 1),
            phase.sum_in_words + has,
        )
        for phase in run_phases(cfg, shape, world_size=world_size, gpu=gpu)
    ]
    return lines


class RunMemory:
    """All sides of a run, on a device that has them all or on one for each."""

    def __init__(
        self,
        cfg: RLConfig,
        shape: ModelShape,
        world_size: int | None,
        gpu: Peaks | None,
        *,
        length_share: int = 1,
    ) -> None:
        """With a `length_share` of n rows are an n-th of the longest on average, and the engine's
        step is left out: what is planned then is what a run takes at least."""
        self.cfg, self.shape, self.gpu = cfg, shape, gpu
        self.length_share = length_share
        self.is_on_cpu = cfg.run.device == "cpu"
        self.is_apart = cfg.cluster.num_engines > 0
        self.has_engine_thread = cfg.has_engine_thread
        self.is_vllm = cfg.engine.backend == "vllm"
        self.sizes = AxisSizes.of(cfg.trainer.parallel, world_size)
        dtype = compute_dtype(cfg.model, cfg.run.device)
        self.num_bytes = 4 if dtype == "float32" else 2
        facts = ModelFacts.read(cfg.model.path)
        self.max_model_len = cfg.engine.max_model_len or (facts and facts.context_length)

    @property
    def longest(self) -> int:
        """Tokens of the rows that are planned for."""
        longest = self.cfg.data.max_prompt_tokens + self.cfg.rollout.max_completion_tokens
        return -(-longest // self.length_share)

    # -- the trainer -----------------------------------------------------------------------------

    @cached_property
    def step(self) -> TrainingMemory:
        """An optimizer step with the largest micro-batches that the run's rows can make."""
        cfg, sizes = self.cfg, self.sizes
        trainer, longest = cfg.trainer, self.longest
        rows = -(-samples_per_optimizer_step(cfg) // sizes.data)
        if trainer.micro_batch_size is not None:
            is_single = rows <= trainer.micro_batch_size
            num_tokens = -(-min(trainer.micro_batch_size, rows) * longest // sizes.context)
        else:
            whole = -(-rows * longest // sizes.context)
            is_single = whole <= trainer.max_tokens_per_microbatch
            num_tokens = min(whole, trainer.max_tokens_per_microbatch)
        return planned_step(
            self.shape,
            cfg.model,
            trainer,
            device=cfg.run.device,
            sizes=sizes,
            num_tokens=num_tokens,
            num_micro_batches=1 if is_single else 2,
        )

    @property
    def reference(self) -> int:
        """The frozen model of the KL term, sharded in every stage; with adapters it is the base."""
        if not trainers_hold_reference(self.cfg):
            return 0
        sizes, zero_stage = self.sizes, self.cfg.trainer.parallel.zero_stage
        parts = sizes.fsdp * sizes.tensor if zero_stage else sizes.world
        return -(-self.shape.weight_bytes(self.num_bytes) // parts)

    def trainer_at_rest(self, *, has_moments: bool = True) -> dict[str, int]:
        """While the engine works."""
        asleep = self.cfg.trainer.enable_sleep and not self.is_apart
        return {
            "weights": self.step.weights,
            "masters": 0 if asleep else self.step.masters,
            "moments": 0 if asleep or not has_moments else self.step.optimizer,
            "reference": self.reference,
        }

    def trainer_at_work(self) -> dict[str, int]:
        """At the peak of its step, besides the engine."""
        step = self.step
        held = step.weights + step.masters + step.optimizer
        return {
            "weights": step.weights,
            "masters": step.masters,
            "moments": step.optimizer,
            "gradients, activations and work": step.peak - held,
            "reference": self.reference,
        }

    # -- the engine ------------------------------------------------------------------------------

    @property
    def engine_weights(self) -> int:
        """What the engine samples with, where that is not the trainer's own module."""
        is_alias = self.sizes.world == 1 and not self.cfg.model.lora.rank and not self.is_vllm
        if is_alias and not self.cfg.num_engines_apart:
            return 0
        parts = self.cfg.engine.tensor_parallel_size
        return -(-self.shape.weight_bytes(self.num_bytes) // parts)

    @property
    def engine_step(self) -> int:
        """Of the largest prefill, and of decode, whose graphs keep their memory to themselves."""
        engine, shape = self.cfg.engine, self.shape
        if self.length_share > 1:
            return 0
        values = 3 * shape.intermediate_size // engine.tensor_parallel_size + 2 * shape.hidden_size
        logits = engine.max_num_seqs * shape.vocab_size * (4 + self.num_bytes)
        return engine.max_num_batched_tokens * values * self.num_bytes + logits

    @property
    def sequence_bytes(self) -> int | None:
        """Keys and values of one sequence of full length."""
        if self.max_model_len is None:
            return None
        engine = self.cfg.engine
        device = "cpu" if self.is_on_cpu else "cuda"
        kv_bytes = 1 if kv_dtype(engine, self.cfg.model, device) == "fp8" else self.num_bytes
        num_tokens = -(-self.max_model_len // engine.block_size) * engine.block_size
        per_token = self.shape.kv_bytes_per_token(kv_bytes) // engine.tensor_parallel_size
        return num_tokens * per_token

    @cached_property
    def cache(self) -> int | None:
        """Bytes of the KV cache, as the engine chooses them; None where they are not known."""
        engine = self.cfg.engine
        if self.is_on_cpu:
            return self._touched_cache
        if engine.kv_cache_gib is not None:
            return int(engine.kv_cache_gib * _GIB)
        if self.gpu is None or self.gpu.memory_gib is None:
            return None
        total = self.gpu.memory_gib * _GIB
        own = self.engine_weights + self.engine_step
        limits = [int(total * engine.gpu_memory_utilization) - own]
        if not self.is_vllm:
            beside = 0 if self.is_apart else sum(self.trainer_at_rest(has_moments=False).values())
            limits.append(total - CONTEXT_BYTES - beside - own - CACHE_MARGIN_BYTES)
            if self.sequence_bytes is not None:
                limits.append(engine.max_num_seqs * self.sequence_bytes)
        return max(min(limits), 0)

    @property
    def _touched_cache(self) -> int:
        """Bytes of a cache in host memory that the sequences of a step write to: the others are
        never taken from the system."""
        engine, rollout = self.cfg.engine, self.cfg.rollout
        gib = engine.kv_cache_gib
        size = CPU_CACHE_BYTES if gib is None else int(gib * _GIB)
        most = min(engine.max_num_seqs, rollout.prompts_per_step * rollout.n_samples_per_prompt)
        per_token = self.shape.kv_bytes_per_token(self.num_bytes) // engine.tensor_parallel_size
        return min(size, most * self.longest * per_token)

    @property
    def _process(self) -> dict[str, int]:
        """What a process has besides the model."""
        return {"Python and torch": PROCESS_BYTES} if self.is_on_cpu else {"CUDA": CONTEXT_BYTES}

    @property
    def lacks_room_for_one(self) -> bool:
        """Whether the cache is too small for the engine to start."""
        known = self.cache is not None and self.sequence_bytes is not None
        return known and self.cache_gib < self.sequence_gib

    @property
    def cache_gib(self) -> float:
        return (self.cache or 0) / _GIB

    @property
    def sequence_gib(self) -> float:
        return (self.sequence_bytes or 0) / _GIB

    def engine(self, *, awake: bool) -> dict[str, int]:
        weights_stay = awake or not self.is_vllm
        return {
            "engine's weights": self.engine_weights if weights_stay else 0,
            "KV cache": (self.cache or 0) if awake else 0,
        }

    # -- phases ----------------------------------------------------------------------------------

    def phases(self) -> tuple[Phase, ...]:
        if self.has_engine_thread:
            phases = self._together()
        else:
            phases = self._apart() if self.is_apart else self._shared()
        return (*phases, self._scoring()) if self.cfg.cluster.num_references else phases

    def _shared(self) -> tuple[Phase, ...]:
        at_rest, awake = self.trainer_at_rest(), self.engine(awake=True)
        asleep = self.engine(awake=not self.cfg.engine.enable_sleep)
        moving = self._moving if self.engine_weights else 0
        rest = self._process
        return (
            Phase("generate", "", at_rest | awake | {"engine's step": self.engine_step} | rest),
            Phase("train", "", self.trainer_at_work() | asleep | rest),
            Phase("sync", "", at_rest | awake | {"weights on their way": moving} | rest),
        )

    def _apart(self) -> tuple[Phase, ...]:
        at_rest, engine = self.trainer_at_rest(), self.engine(awake=True)
        bucket = self.cfg.cluster.update_weight_buffer_size
        rest = self._process
        # Two are under way; an engine still has to deliver the end of a third.
        sent, received = self._moving + 2 * bucket, 3 * bucket
        return (
            Phase("train", "trainer", self.trainer_at_work() | rest),
            Phase("sync", "trainer", at_rest | {"weights on their way": sent} | rest),
            Phase("generate", "engine", engine | {"engine's step": self.engine_step} | rest),
            Phase("sync", "engine", engine | {"weights on their way": received} | rest),
        )

    def _together(self) -> tuple[Phase, ...]:
        """An engine in a thread of the trainer: both are at work on one device."""
        engine, rest = self.engine(awake=True), self._process
        # Two buckets are sent and up to three received; none is larger than the weights.
        buckets = 5 * min(self.cfg.cluster.update_weight_buffer_size, self.engine_weights)
        moving = {"weights on their way": 2 * self._moving + buckets}
        work = self.trainer_at_work() | engine | {"engine's step": self.engine_step}
        return (
            Phase("train", "", work | rest),
            Phase("sync", "", self.trainer_at_rest() | engine | moving | rest),
        )

    def _scoring(self) -> Phase:
        """A pass of a reference: the widest moment of a layer, or of the head."""
        trainer, shape, values = self.cfg.trainer, self.shape, self.num_bytes
        num_rows = self.cfg.rollout.prompts_per_step * self.cfg.rollout.n_samples_per_prompt
        if trainer.micro_batch_size is not None:
            num_tokens = min(trainer.micro_batch_size, num_rows) * self.longest
        else:
            budget = trainer.max_tokens_per_forward or 2 * trainer.max_tokens_per_microbatch
            num_tokens = min(budget, num_rows * self.longest)
        hidden = num_tokens * shape.hidden_size * values
        layer = 3 * num_tokens * shape.intermediate_size * values
        # As they come, and in float32 twice.
        logits = trainer.logits_chunk_tokens * shape.vocab_size * (values + 2 * 4)
        parts = {
            "weights": shape.weight_bytes(values),
            "activations and work": 2 * hidden + max(layer, hidden + logits),
        }
        return Phase("score", "reference", parts | self._process)

    @property
    def _moving(self) -> int:
        """Whole weights that exist beside both sides': a group, and the tensor that ends it, which
        several processes gather from parts of it in the format that travels."""
        head = self.shape.head_params * self.num_bytes
        if self.sizes.fsdp == 1:
            return GROUP_BYTES + head
        return GROUP_BYTES + max(head + head // self.sizes.fsdp, 2 * GATHER_BYTES)
