"""Time of the trainers for a step: matrix products, memory savings, and transfers.

    seconds = TrainingTime(plan, assumed).step_s(lengths, num_trained)

Products and attention are those of `Compute`, at the share of the matrix rate that `plan` assumes.
On top of them come, by count and with the rates of benchmarks/memory.md:

* recomputed layers: their forward pass once more; keeping the results of attention saves a fifth;
* logits, whose product runs once more in backward: that is part of the rate assumed. What the last
  chunk of a micro-batch keeps of them is taken off;
* offloaded states: every optimizer step brings them to the device and back, gradients one way,
  parameters twice a micro-batch;
* offloaded gradients: every micro-batch brings their sums to the device and back, beside backward.
  Nothing is left to hide those of the embedding, which backward brings last;
* offloaded activations: the inputs of recomputed layers come back in every micro-batch;
* rows of a group share their prompt in a pass, where one device has whole rows: they are taken to
  share it once;
* gradients of a micro-batch are added up in the device's memory, whole ones below stage 2;
* weights of four bits: every pass of a micro-batch writes them in the format that computes;
* collectives: a micro-batch reduces its gradients, and gathers weights twice with stage 3; below
  stage 2 a step reduces once, below stage 3 it gathers once, with stage 0 sums go round in place of
  weights. Over NVLink they last as long as what they take of memory and multiprocessors from the
  passes beside them; over slower links they run beside four fifths of these, and take time where
  that is not enough.
  Those of tensor, Ulysses and ring parallelism hold up the pass, and once more where layers are
  recomputed: in rows of a part's length attention gives those of a ring nothing to hide behind;
* pipeline stages: all go at the pace of the slowest, which computes its layers and may have the
  head. It waits for a micro-batch of each other in every optimizer step, or with V groups of layers
  in each stage a V-th of that. What they send is hidden; what a pass through a group takes by
  itself, messages and hooks, is what second groups took in measured steps of 0.6B.

The critic's products, its waiting stages and its collectives count, and its sums of gradients.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, NamedTuple, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray

from hone.config.plan import Role, RoleName, RunPlan
from hone.config.planning import PlanningConfig
from hone.config.tree import RLConfig
from hone.distributed.settings import AxisSizes
from hone.families.shape import ModelShape
from hone.families.stages import layer_costs, stage_layers
from hone.models.settings import LoraConfig
from hone.planner.recompute import COMPUTED_AGAIN
from hone.planner.roofline import training_work
from hone.planner.run_memory import RunMemory
from hone.prefixes import COPIED, saves_enough
from hone.tools.plan.compute_time import Compute
from hone.tools.plan.simulator import Scoring
from hone.trainer.cost import adapter_params, expert_adapter_params, params_in_4bit
from hone.trainer.settings import SFTTrainerConfig, recomputed_spans

__all__ = ["LINK_SHARE", "TrainingTime"]

Integers: TypeAlias = NDArray[np.integer[Any]]
Lengths: TypeAlias = Sequence[int] | Integers

_HIDDEN = 0.8
"""Share of a pass beside which collectives run over links slower than NVLink."""
_NVLINK = 100e9
"""Bytes a second that no slower link has."""
LINK_SHARE = 0.7
"""Share of a link's rate that collectives reach."""
_PASS_S = 0.017
"""Seconds of the passes of a micro-batch through a group of layers of a pipeline stage, forward and
backward, in addition to what they compute."""
_STARTING_S = 0.017
"""Seconds that the host needs to start what a recurrent layer computes for a micro-batch, forward
and backward: so long a pass takes at least. Without what an update takes once, Qwen3.5 0.8B took
0.31 s for each of 17 micro-batches, and 0.67 s for each of six (H200)."""
_GRADIENT_BYTES = 4
_BACKWARD = 2 / 3
"""Share of a pass that is backward."""
_ADAPTED_VALUES = 8
"""How often, in 16 bits, the inputs and outputs of adapted experts are read or written for the
products of their adapters and the sums with those, forward and backward. Measured on an H200: 3.5
ms more a layer of 30B-A3B for 16,384 tokens, at rank 16 and at rank 32."""
_UNPACKED_BYTES = 0.5625 + 2
"""Device memory that a weight of four bits with its scale is read from, and written to."""


@dataclass(frozen=True, slots=True)
class _Rows:
    """Rows whose times are kept: a search asks for those of the same rows with hundreds of
    settings."""

    lengths: bytes
    """As int64."""
    num_head_tokens: int

    @classmethod
    def of(cls, lengths: Integers, num_head_tokens: int) -> Self:
        return cls(lengths.astype(np.int64).tobytes(), num_head_tokens)

    @property
    def array(self) -> Integers:
        return np.frombuffer(self.lengths, dtype=np.int64)


class _Adapters(NamedTuple):
    """Adapters of a rank beside the target modules; of rank 0 none."""

    rank: int
    targets: tuple[str, ...]


@lru_cache(maxsize=256)
def _forward_s(rows: _Rows, compute: Compute, shape: ModelShape) -> float:
    """Seconds of a forward pass on one device."""
    return compute.forward_s(shape, rows.array, num_head_tokens=rows.num_head_tokens)


@lru_cache(maxsize=256)
def _training_s(rows: _Rows, compute: Compute, shape: ModelShape, adapters: _Adapters) -> float:
    """Seconds of forward and backward on one device."""
    lora = LoraConfig(rank=adapters.rank, target_modules=adapters.targets)
    work = training_work(shape, rows.array, num_head_tokens=rows.num_head_tokens, lora=lora)
    seconds = compute.passes_s(shape, rows.array, work.products, num_attention=3)
    if not lora.rank or not shape.num_experts:
        return seconds
    per_expert = expert_adapter_params(shape, lora) / lora.rank / shape.num_experts
    values = per_expert * shape.experts_per_token * int(rows.array.sum())
    return seconds + 2 * _ADAPTED_VALUES * values / compute.gpu.bytes_per_s


@lru_cache(maxsize=256)
def _repeated(rows: _Rows, group: int) -> _Rows:
    """Prompts that other rows of their group bring, all of the mean length: those of all rows but
    one in a `group` of so many, where sharing saves enough."""
    lengths = rows.array
    mean = float(lengths.mean())
    prompt = round(mean - rows.num_head_tokens / len(lengths))
    if not saves_enough(prompt, group, group * mean):
        return _Rows.of(np.zeros(0, dtype=np.int64), 0)
    return _Rows.of(np.full(round(len(lengths) * (1 - 1 / group)), prompt), 0)


@dataclass(frozen=True, slots=True)
class _Epoch:
    """Rows of an update on one device, without the prompts that others of their group bring."""

    num_tokens: int
    """Tokens; a copied one counts as the part of a token that its copy costs."""
    forward_s: float
    """A forward pass with the logits of trained tokens."""
    body_s: float
    """A forward pass without logits."""
    training_s: float
    """Forward and backward."""


@lru_cache(maxsize=256)
def _epoch(
    rows: _Rows, group: int, compute: Compute, shape: ModelShape, adapters: _Adapters
) -> _Epoch:
    bodies, repeated = _Rows(rows.lengths, 0), _repeated(rows, group)
    copied_s = _forward_s(repeated, compute, shape)
    trained_s = _training_s(rows, compute, shape, adapters)
    return _Epoch(
        num_tokens=int(rows.array.sum()) - int((1 - COPIED) * repeated.array.sum()),
        forward_s=_forward_s(rows, compute, shape) - copied_s,
        body_s=_forward_s(bodies, compute, shape) - copied_s,
        training_s=trained_s - _training_s(repeated, compute, shape, adapters),
    )


@dataclass(frozen=True, slots=True)
class _Stages:
    """Layers of a model in pipeline stages, some of which are recomputed."""

    recomputed_share: float
    """Share of the layers that are recomputed."""
    again: float
    """Share of a forward pass that is computed again."""
    most_layers: int
    """Layers of the largest stage."""
    most_sparse: int
    """The largest number of layers with experts in a stage."""
    most_spans: int
    """The largest number of spans in a stage that are recomputed together."""
    costs: tuple[float, ...]
    """What each stage costs, forward and backward, without the head."""


@lru_cache(maxsize=1024)
def _stages(
    shape: ModelShape,
    axes: tuple[int, int],
    recompute: tuple[str, int],
    again: float,
    *,
    has_head: bool,
) -> _Stages:
    """The stages of a model by numbers of stages and of groups in each. Layers are recomputed by
    `trainer.recompute` and `trainer.recompute_every_n_layers`, at `again` of a forward pass."""
    stages, costs = stage_layers(shape, *axes, has_head=has_head), layer_costs(shape)
    spans = [[recomputed_spans(*recompute, len(group)) for group in groups] for groups in stages]

    def cost(group: range, own: Sequence[range]) -> float:
        passes = 3 + again * sum(map(len, own)) / max(len(group), 1)
        return passes * sum(costs[group.start : group.stop])

    numbers = [[*chain(*groups)] for groups in stages]
    num_recomputed = sum(len(span) for own in chain(*spans) for span in own)
    recomputed_share = num_recomputed / shape.num_layers
    return _Stages(
        recomputed_share=recomputed_share,
        again=again * recomputed_share,
        most_layers=max(map(len, numbers)),
        most_sparse=max(sum(index in shape.expert_layers for index in own) for own in numbers),
        most_spans=max(sum(map(len, own)) for own in spans),
        costs=tuple(sum(map(cost, *each)) for each in zip(stages, spans, strict=True)),
    )


def _own_params(num_params: int, of_experts: int, axes: AxisSizes, *, is_sharded: bool) -> int:
    """Number of parameters of a rank in one pipeline stage, of so many in all, of which some are
    experts': parts of matrices, and whole experts of its own; or its shards of both."""
    shards, of_own_experts = (axes.fsdp, axes.expert_fsdp) if is_sharded else (1, 1)
    matrices = (num_params - of_experts) // axes.tensor // shards
    return (matrices + of_experts // axes.expert // of_own_experts) // axes.pipeline


def _trained_params(
    shape: ModelShape, lora: LoraConfig, axes: AxisSizes, *, is_sharded: bool
) -> int:
    """`_own_params` of what is trained: the model, or adapters."""
    numbers = shape.num_params, shape.expert_params
    if lora.rank:
        numbers = adapter_params(shape, lora), expert_adapter_params(shape, lora)
    return _own_params(*numbers, axes, is_sharded=is_sharded)


class _Trained(NamedTuple):
    """A model that is trained: the policy, or a critic."""

    role: Role
    shape: ModelShape
    lora: LoraConfig
    stages: _Stages

    @property
    def reduces_late(self) -> bool:
        """Whether gradients are reduced once an optimizer step."""
        trainer = self.role.trainer
        return trainer.parallel.zero_stage < 2 and not trainer.offloads("gradients")


def _pace(stages: _Stages, shape: ModelShape, *, head: float = 0.0) -> float:
    """Compute time of the slowest stage over the mean of all stages, forward and backward. `head`
    is the time of the head over that of all layers."""
    *others, last = stages.costs
    costs = [*others, last + 3 * head * sum(layer_costs(shape))]
    return max(costs) * len(costs) / sum(costs)


@dataclass(frozen=True, slots=True)
class TrainingTime:
    """Training times of a plan whose model's shape and GPU are known."""

    plan: RunPlan
    assumed: PlanningConfig

    def step_s(self, lengths: Lengths, num_trained: int) -> float:
        """Seconds of all trainers for an update whose samples have all ended at once. `lengths` are
        those of its rows, prompts included; `num_trained` of their tokens are trained."""
        return self.update_s(lengths, num_trained) + self.scoring(lengths, num_trained).wait_s

    def ahead_s(self, lengths: Lengths, num_trained: int) -> float:
        """Seconds between two updates whose samples are there and scored in time, as where engines
        sample ahead: those of the trainers, or of the slowest remote model."""
        scoring = self.scoring(lengths, num_trained)
        return max(self.update_s(lengths, num_trained), *scoring.seconds.values(), 0.0)

    def update_s(self, lengths: Lengths, num_trained: int) -> float:
        """`step_s` without waiting for remote models."""
        plan, trainer = self.plan, self._config.trainer
        shape, batch = plan.shape, plan.batch
        assert shape is not None
        assert batch is not None
        epochs, lengths = plan.policy.num_epochs, np.asarray(lengths)
        rows = _Rows.of(lengths, num_trained)
        lora = self._config.model.lora
        adapters = _Adapters(lora.rank, lora.target_modules)
        epoch = _epoch(rows, self._sharing, self._compute, shape, adapters)
        num_tokens, forward, body = epoch.num_tokens, epoch.forward_s, epoch.body_s
        # Of one device, until it is divided among all.
        stages = self._stages(trainer, shape, plan.policy)
        kept = self._kept_logits_share(len(lengths), num_tokens, num_trained)
        head = (1 - kept / 3) * (forward - body) / body
        pace = _pace(stages, shape, head=head)
        training = epoch.training_s + stages.again * body
        training -= kept * (forward - body)
        work = pace * epochs * training
        update, values_s, critic_s, besides_s = work, 0.0, 0.0, 0.0
        if (role := plan.roles.get("critic")) is not None:
            # The critic's values and its update; it has no logits.
            own_shape = self._run.shape_of(role)
            own_stages = self._stages(role.trainer, own_shape, role)
            passes = role.num_epochs * (3 + own_stages.again)
            own_pace = _pace(own_stages, own_shape)
            values = own_pace * self._forward_s(own_shape, rows, num_head_tokens=0)
            speed = self._speed_of(role)  # that of the policy where it lies beside it
            exchanges_s = self._besides_s(
                _Trained(role, own_shape, LoraConfig(), own_stages),
                num_tokens,
                passes * values / speed,
            )
            if role.has_own_devices:
                waits = self._stages_wait(role.trainer, role, num_tokens, own_pace)
                values_s = values / speed
                critic_s = passes * (1 + waits) * values_s + exchanges_s
            else:
                work += (role.num_scorings + passes) * values
                besides_s = exchanges_s
        scores = plan.policy.num_scorings * pace * forward
        work += scores
        for role in plan.scorers:
            if role.shares_devices_of == "policy" and role.num_scorings:
                scored = self._run.shape_of(role)
                work += self._forward_s(scored, rows, num_head_tokens=num_trained)
        compute_s = work / self._speed
        seconds = compute_s + self._judging_s(lengths)
        waits = self._stages_wait(trainer, plan.policy, num_tokens, pace)
        # A remote critic computes values while the policy scores the rows, and is trained in
        # parallel to it.
        seconds += max(values_s - scores / self._speed, 0.0)
        num_micro_batches = epochs * self._num_micro_batches(trainer, plan.policy, num_tokens)
        besides_s += self._besides_s(
            _Trained(plan.policy, shape, lora, stages), num_tokens, compute_s
        )
        besides_s += self._offloads_s(num_micro_batches, _BACKWARD * compute_s)
        besides_s += num_micro_batches * self._unpacking_s(stages)
        besides_s += self._activations_s(stages, epochs * num_tokens)
        update_s = (1 + waits) * update / self._speed + besides_s
        seconds += max(critic_s - update_s, 0.0)
        return seconds + waits * compute_s + besides_s + self.assumed.overhead_s

    def _besides_s(self, model: _Trained, num_tokens: int, compute_s: float) -> float:
        """Seconds of an update for what processes of a trained model exchange, for adding up
        gradients, for passes through pipeline stages by themselves, and for waiting for the host.
        It computes for `compute_s`."""
        role = model.role
        number = role.num_epochs * self._num_micro_batches(role.trainer, role, num_tokens)
        exchanged_s = self._collectives_s(model, num_tokens, compute_s / role.num_epochs)
        of_each = self._adding_s(model) + self._passing_s(role)
        started = len(model.shape.recurrent_indices) / role.axes.pipeline
        started *= 1 + model.stages.again / 3
        starting_s = number * _STARTING_S * started
        late_s = max(starting_s - compute_s, 0.0)
        return role.num_epochs * exchanged_s + number * of_each + late_s

    def scoring(self, lengths: Lengths, num_trained: int) -> Scoring:
        """Times of remote models for such rows."""
        remote = [role for role in self.plan.scorers if role.has_own_devices]
        if not remote:
            return Scoring()
        lengths = np.asarray(lengths)
        rows = _Rows.of(lengths, num_trained)
        run, seconds = self._run, dict[RoleName, float]()
        for role in remote:
            shape = run.shape_of(role)
            if role.name == "reward_model":
                pass_s = self._compute.forward_s(shape, lengths, num_head_tokens=0)
            else:
                pass_s = self._forward_s(shape, rows, num_head_tokens=num_trained)
            seconds[role.name] = pass_s / role.num_workers
        shape, left_s = self.plan.shape, 0.0
        assert shape is not None
        if "reward_model" in seconds:  # each copy's last pass; samples are scored as they end
            last = self._config.reward.model.max_tokens_per_forward
            last *= self.plan.roles["reward_model"].num_workers
            left_s = min(last / max(int(lengths.sum()), 1), 1.0) * seconds["reward_model"]
        own = self._forward_s(shape, rows, num_head_tokens=num_trained)
        beside_s = self.plan.policy.num_scorings * own / self._speed
        return Scoring(seconds=seconds, beside_s=beside_s, left_s=left_s)

    @property
    def _run(self) -> RunMemory:
        return RunMemory(self.plan)

    def _judging_s(self, lengths: Lengths) -> float:
        """Seconds of a colocated reward model's passes: in shards on all devices; else on the
        device of each engine's first process, or of the first trainer where engines are remote."""
        engine, role = self.plan.roles.get("engine"), self.plan.roles.get("reward_model")
        if role is None or engine is None or role.has_own_devices:
            return 0.0
        shape, sharers = self._run.shape_of(role), role.axes.world
        seconds = self._compute.forward_s(shape, lengths, num_head_tokens=0)
        if sharers == 1:
            return seconds / (1 if self.plan.is_apart else engine.num_workers)
        return seconds / sharers + self._gathers_to_judge_s(role, shape, int(np.sum(lengths)))

    def _gathers_to_judge_s(self, role: Role, shape: ModelShape, num_tokens: int) -> float:
        """Seconds in which the passes of a reward model in shards gather its weights."""
        gpu, axes = self.plan.devices.gpu, role.axes
        assert gpu is not None
        per_node = self.plan.devices.per_node or axes.world
        link = gpu.link_bytes_per_s if axes.fsdp <= per_node else gpu.node_bytes_per_s
        budget = self._config.reward.model.max_tokens_per_forward
        num_passes = -(-num_tokens // (axes.world * budget))
        num_bytes = shape.weight_bytes(self.plan.num_bytes) * (axes.fsdp - 1) / axes.fsdp
        return num_passes * num_bytes / (link * LINK_SHARE)

    def _forward_s(self, shape: ModelShape, rows: _Rows, *, num_head_tokens: int) -> float:
        """Seconds of a forward pass on one device, without the prompts that others bring."""
        whole_s = _forward_s(_Rows(rows.lengths, num_head_tokens), self._compute, shape)
        return whole_s - _forward_s(_repeated(rows, self._sharing), self._compute, shape)

    @property
    def _sharing(self) -> int:
        """Rows that may share their prompt in a pass; 1 where none do."""
        is_whole = self.plan.policy.axes.context == 1 and not self._config.model.exact
        return self._config.rollout.n_samples_per_prompt if is_whole else 1

    @property
    def _config(self) -> RLConfig:
        assert isinstance(self.plan.config, RLConfig)
        return self.plan.config

    @property
    def _compute(self) -> Compute:
        gpu = self.plan.devices.gpu
        assert gpu is not None
        return Compute(gpu, self.assumed)

    @property
    def _speed(self) -> float:
        """Speed of all trainers relative to one device."""
        return self._speed_of(self.plan.policy)

    def _speed_of(self, role: Role) -> float:
        """Speed of all devices of a trained role relative to one."""
        world = role.axes.world
        return world * (self.assumed.training_scaling if world > 1 else 1.0)

    def _stages(self, trainer: SFTTrainerConfig, shape: ModelShape, role: Role) -> _Stages:
        """Its layers, by stage."""
        return _stages(
            shape,
            (role.axes.pipeline, role.axes.virtual_stages),
            (trainer.recompute, trainer.recompute_every_n_layers),
            COMPUTED_AGAIN[trainer.recompute_mode],
            has_head=role.name == "policy",
        )

    def _num_micro_batches(self, trainer: SFTTrainerConfig, role: Role, num_tokens: int) -> int:
        """Number of micro-batches of each device in an epoch."""
        each = num_tokens / (role.axes.data * role.axes.context)
        return math.ceil(each / trainer.max_tokens_per_microbatch)

    def _kept_logits_share(self, num_rows: int, num_tokens: int, num_trained: int) -> float:
        """Share of a micro-batch's logits that the last chunk keeps until backward."""
        trainer, axes = self._config.trainer, self.plan.policy.axes
        number = float(self._num_micro_batches(trainer, self.plan.policy, num_tokens))
        if trainer.micro_batch_size is not None:
            number = num_rows / (axes.data * trainer.micro_batch_size)
        own = num_trained / (axes.data * axes.context * max(number, self._num_steps))
        return min(trainer.logits_chunk_tokens / max(own, 1), 1.0)

    def _stages_wait(
        self, trainer: SFTTrainerConfig, role: Role, num_tokens: int, pace: float
    ) -> float:
        """Waiting time of the slowest stage as a share of its passes, while the other stages
        compute the first and the last micro-batch of an optimizer step."""
        bubble = (role.axes.pipeline / pace - 1) / role.axes.virtual_stages
        return bubble * self._num_steps / self._num_micro_batches(trainer, role, num_tokens)

    @property
    def _num_steps(self) -> int:
        """Number of optimizer steps of an epoch."""
        assert self.plan.batch is not None
        return self.plan.batch.num_minibatches

    def _unpacking_s(self, stages: _Stages) -> float:
        """Seconds for unpacking 4-bit weights in the passes of a micro-batch, recomputation
        included."""
        gpu, cfg, shape = self.plan.devices.gpu, self._config, self.plan.shape
        assert gpu is not None
        assert shape is not None
        passes = 2 + stages.again
        return passes * _UNPACKED_BYTES * params_in_4bit(shape, cfg.model.lora) / gpu.bytes_per_s

    def _passing_s(self, role: Role) -> float:
        """Seconds that passes of a micro-batch through the groups of a pipeline stage take besides
        what they compute."""
        axes = role.axes
        return _PASS_S * axes.virtual_stages if axes.pipeline > 1 else 0.0

    def _adding_s(self, model: _Trained) -> float:
        """Seconds for adding a micro-batch's gradients to the sums: two tensors are read, one is
        written."""
        gpu = self.plan.devices.gpu
        assert gpu is not None
        number = _trained_params(
            model.shape, model.lora, model.role.axes, is_sharded=not model.reduces_late
        )
        return 3 * _GRADIENT_BYTES * number / gpu.bytes_per_s

    def _collectives_s(self, model: _Trained, num_tokens: int, compute_s: float) -> float:
        """Seconds of an epoch's collectives that do not overlap with compute."""
        plan, role, shape, stages = self.plan, model.role, model.shape, model.stages
        axes, trainer, gpu = role.axes, role.trainer, plan.devices.gpu
        assert gpu is not None
        per_node = plan.devices.per_node or axes.world
        # Between the processes of a stage of layers, which are neighbours.
        is_near = axes.world <= per_node or per_node % (axes.world // axes.pipeline) == 0
        link = gpu.link_bytes_per_s if is_near else gpu.node_bytes_per_s
        own_link = gpu.link_bytes_per_s * LINK_SHARE
        num_micro_batches = self._num_micro_batches(trainer, role, num_tokens)
        seconds, shards = 0.0, axes.data * axes.context
        if shards > 1:
            stage, num_steps = trainer.parallel.zero_stage, self._num_steps
            sharded = shape.num_params - params_in_4bit(shape, model.lora)
            weights = 2 * _own_params(sharded, shape.expert_params, axes, is_sharded=False)
            trained = _trained_params(shape, model.lora, axes, is_sharded=False)
            reduced = _GRADIENT_BYTES * trained
            # Per micro-batch, and per optimizer step, of which one micro-batch hides a part.
            often, once = 2 * weights * (stage == 3), weights * (0 < stage < 3)
            if model.reduces_late:
                once += reduced * (1 if stage else 2)
            else:
                often += reduced * (1 if stage else 2)
            rate = link * LINK_SHARE * shards / (shards - 1)
            hidden_s = _HIDDEN * compute_s * (link < _NVLINK)
            once_s, often_s = num_steps * once / rate, num_micro_batches * often / rate
            beside_s = min(once_s, hidden_s * min(num_steps / num_micro_batches, 1.0))
            seconds += once_s - beside_s + max(often_s - (hidden_s - beside_s), 0.0)
        own_tokens = num_tokens / (axes.data * axes.context)
        # Passes that talk: forward, backward, and forward again, which may keep attention.
        again, num_layers = stages.recomputed_share, stages.most_layers
        passes, attention_passes = 2 + again, 2 + again * (trainer.recompute_mode == "full")
        keys = 2 * shape.num_kv_heads * shape.head_dim
        if axes.tensor > 1:  # a gather and a sum for attention, and for an MLP or shared expert
            num_mlps = num_layers - stages.most_sparse * (not shape.shared_expert_size)
            values = 2 * (num_layers + num_mlps) * shape.hidden_size * own_tokens
            seconds += 2 * passes * values * (axes.tensor - 1) / axes.tensor / own_link
        if axes.ulysses > 1:  # queries, keys, values, and what attention returns
            width = 2 * shape.num_heads * shape.head_dim + keys
            values = 2 * num_layers * width * own_tokens / axes.tensor
            seconds += attention_passes * values * (axes.ulysses - 1) / axes.ulysses / own_link
        if axes.expert > 1:  # hidden states to experts and back
            width = 2 * shape.experts_per_token * shape.hidden_size
            values = 2 * stages.most_sparse * width * own_tokens / axes.tensor
            seconds += passes * values * (axes.expert - 1) / axes.expert / own_link
        if axes.ring > 1:  # keys and values a pass; backward their float32 gradients, all round
            link = gpu.link_bytes_per_s if axes.ring * axes.ulysses <= per_node else link
            values = num_layers * keys * own_tokens / axes.tensor
            num_bytes = values * (2 * attention_passes * (axes.ring - 1) + 4 * axes.ring)
            seconds += num_bytes / (link * LINK_SHARE)
        return seconds

    def _activations_s(self, stages: _Stages, num_tokens: int) -> float:
        """Seconds for copying inputs of layers back from the host."""
        plan, trainer = self.plan, self._config.trainer
        gpu, shape = plan.devices.gpu, plan.shape
        assert gpu is not None
        assert shape is not None
        if not trainer.offload_activations or trainer.recompute == "off":
            return 0.0
        axes = plan.policy.axes
        values = stages.most_spans * shape.hidden_size * num_tokens / (axes.data * axes.context)
        return plan.num_bytes * values / axes.tensor / gpu.host_bytes_per_s

    def _offloads_s(self, num_micro_batches: int, backward_s: float) -> float:
        """Seconds of transfers between device and host that do not overlap with compute."""
        gpu, trainer, axes = self.plan.devices.gpu, self._config.trainer, self.plan.policy.axes
        shape, batch, lora = self.plan.shape, self.plan.batch, self._config.model.lora
        assert gpu is not None
        assert shape is not None
        assert batch is not None
        num_steps = batch.optimizer_steps_per_rollout
        num_params = _trained_params(shape, lora, axes, is_sharded=True)
        states = 8 if trainer.optimizer.state_dtype == "bfloat16" else 12
        num_bytes = 0.0
        if trainer.offloads("optimizer"):
            num_bytes += num_steps * states * num_params
        if trainer.offloads("gradients"):
            last = 0 if lora.rank else shape.head_params / axes.tensor / axes.fsdp
            travelling = num_micro_batches * _GRADIENT_BYTES * (num_params - last)
            num_bytes += max(travelling - backward_s * gpu.host_bytes_per_s, 0.0)
            num_bytes += num_micro_batches * _GRADIENT_BYTES * last
            num_bytes += num_steps * _GRADIENT_BYTES * num_params
        if trainer.offloads("parameters"):
            number = _own_params(shape.num_params, shape.expert_params, axes, is_sharded=True)
            num_bytes += 2 * num_micro_batches * 2 * number
        if trainer.enable_sleep:
            num_bytes += 2 * states * num_params
        return num_bytes / gpu.host_bytes_per_s
