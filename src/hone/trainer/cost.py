"""Memory of a training step on one device, by kind, from shape and configuration alone.

    plan = training_memory(shape, cfg.trainer, dtype="bfloat16", num_tokens=16384)
    plan.peak, plan.as_dict()

Weights, masters, gradients and optimizer states are counted tensor by tensor and are exact. The
memory that a pass adds is modelled:

* activations by the tensors that each kind of layer keeps for backward (`LayerCode`): those of
  compiled layers are fitted to measurements of Qwen3 0.6B to 4B; layers that are not compiled are
  modelled from transformers' code, without the buffers of attention on a CPU,
* the head by its chunk of logits and the gradient of its matrix,
* workspace by the largest tensors that one layer's backward has at a time,
* several processes by FSDP's unsharded tensors: gathered weights, and gradients not yet reduced,
* pipeline stages by the fullest: its layers and ends, and the passes through groups of its layers
  that 1F1B has in flight there at once, in a step of many micro-batches,
* offloaded state by its buffers on the device: gradients in transfer, a window each way.

On an H200 peaks of compiled layers came out within 1 % of those measured (Qwen3 of 0.6B to 8B, each
knob of a 4B step; 10 % above at a peak of 7.5 GiB); on two GPUs (8B and 12 of its layers, stages 2
and 3) 2 to 5 % below. Fragmentation, CUDA's context and libraries (about 1 GiB), and an engine's
own memory come on top (`hone.planner.run_memory`).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from itertools import accumulate, chain
from math import prod
from typing import Literal, NamedTuple

from hone.config.plan import Role, RunPlan
from hone.distributed.settings import AxisSizes
from hone.families.model_facts import NF4_BLOCK
from hone.families.registry import spec_of
from hone.families.shape import ModelShape, TensorShape
from hone.families.stages import most_of_a_round, passes_in_flight, stage_layers
from hone.models.settings import LoraConfig
from hone.rewards.settings import RewardModelConfig
from hone.segments import CHUNK
from hone.trainer.settings import RecomputeMode, SFTTrainerConfig

__all__ = [
    "LayerCode",
    "TrainingMemory",
    "active_adapter_params",
    "adapted_tensors",
    "adapter_params",
    "expert_adapter_params",
    "frozen_bytes",
    "gathered_to_score",
    "layer_code",
    "params_in_4bit",
    "planned_step",
    "scoring_bytes",
    "training_memory",
]

LayerCode = Literal["compiled", "eager"]
"""Execution of transformers' decoder layers: compiled or eager."""

_BUCKETS_BYTES = 2 * (128 << 20)
"""Device memory that an offloaded optimizer step streams through."""
_MAX_SAMPLED = 1 << 22
"""Number of elements whose change a step measures; several processes do so in float64."""
_MESSAGES = 6
"""Hidden states and gradients that a pipeline stage has received, or has not sent yet."""
_MESSAGES_OF_GROUPS = 9
"""`_MESSAGES` of a stage that has several groups of layers."""
_MUON_COPIES = 12
"""Work memory of Muon's Newton-Schulz steps: bytes per element of the largest matrix."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingMemory:
    """Bytes on the fullest device, each kind at its own maximum."""

    weights: int
    """Weights of the module between steps, in the format that computes, including the frozen
    weights under adapters."""
    masters: int
    """Float32 copies that the optimizer moves; 0 where the weights are float32 themselves."""
    gradients: int
    """Gradients of the masters after the last micro-batch; 0 where they wait on the host."""
    optimizer: int
    """Moments."""
    gathered: int
    """Weights that a pass of one of several processes gathers from the shards."""
    reducing: int
    """Unsharded gradients of layers, or of the model, before they reach the shards or the host."""
    activations: int
    """Activations: tensors that forward keeps for backward."""
    logits: int
    """A chunk of logits with its gradient, and the gradient of the head's matrix."""
    workspace: int
    """Work memory of one layer's backward."""
    host: int
    """In host memory: offloaded masters, moments, gradients, weights and activations."""
    host_padding: int
    """Padding in a GPU host's memory: torch rounds page-locked blocks, in which FSDP keeps
    parameters and gradients, up to a power of two."""
    state: int
    """Masters and moments, wherever they are: the size of a checkpoint."""
    peak: int
    """The largest sum at any one time."""
    peak_phase: Literal["head", "layers", "optimizer"]
    """The time of the peak: the start of backward, later in backward, or the optimizer's step."""

    @property
    def parts(self) -> dict[str, int]:
        """The tensors that make up the peak, in bytes by kind."""
        held = self.weights + self.masters + self.optimizer
        return {
            "weights": self.weights,
            "masters": self.masters,
            "moments": self.optimizer,
            "gradients, activations and work": self.peak - held,
        }

    def as_dict(self) -> dict[str, int | str]:
        return asdict(self)


def layer_code(trainer: SFTTrainerConfig, kind: str) -> LayerCode:
    """How a trainer runs layers on a kind of device; layers of exact mode count as compiled."""
    return "compiled" if trainer.compiles(kind) else "eager"


def training_memory(
    shape: ModelShape,
    trainer: SFTTrainerConfig,
    *,
    dtype: Literal["float32", "bfloat16"],
    num_tokens: int,
    num_trained: int | None = None,
    num_micro_batches: int = 2,
    layers: LayerCode = "compiled",
    lora: LoraConfig | None = None,
    sizes: AxisSizes | None = None,
) -> TrainingMemory:
    """Memory of optimizer steps over micro-batches of `num_tokens` tokens on each device.

    `num_trained` of them go through the head; None: all. The numbers are those after the first
    optimizer step, when moments exist. `sizes` are the axes of several processes; None or a world
    of one is one process. With pipeline stages the result is that of the fullest.
    """
    return _fullest_stage(
        _Trained(
            shape=shape,
            trainer=trainer,
            lora=lora or LoraConfig(),
            sizes=sizes or AxisSizes(),
            layers=layers,
            num_bytes=4 if dtype == "float32" else 2,
            num_tokens=num_tokens,
            num_trained=num_tokens if num_trained is None else num_trained,
            is_single=num_micro_batches == 1,
            has_head=num_trained != 0,
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trained:
    """The arguments of `training_memory`, without defaults."""

    shape: ModelShape
    trainer: SFTTrainerConfig
    lora: LoraConfig
    sizes: AxisSizes
    layers: LayerCode
    num_bytes: int
    num_tokens: int
    num_trained: int
    is_single: bool
    has_head: bool


@lru_cache(maxsize=8192)
def _fullest_stage(what: _Trained) -> TrainingMemory:
    """`training_memory`, kept: a search asks for the same trainer beside many engines and hosts."""
    shape, axes = what.shape, what.sizes

    def of_stage(number: int, groups: Sequence[range]) -> TrainingMemory:
        own = [*chain(*groups)]
        step = _Step(
            shape.part(own),
            what.trainer,
            what.lora,
            axes,
            what.layers,
            num_bytes=what.num_bytes,
            num_tokens=what.num_tokens,
            num_trained=what.num_trained,
            is_single=what.is_single,
            stage=number,
            groups=[len(group) for group in groups],
        )
        for tensor in step.shape.tensors():
            if tensor.in_layer or step.holds(tensor):
                step.count(tensor)
        return step.plan()

    num_stages = min(axes.pipeline, shape.num_layers)
    stages = stage_layers(shape, num_stages, axes.virtual_stages, has_head=what.has_head)
    return max((of_stage(*stage) for stage in enumerate(stages)), key=lambda memory: memory.peak)


def planned_step(plan: RunPlan, *, num_tokens: int, num_micro_batches: int = 2) -> TrainingMemory:
    """`training_memory` of a plan whose model has a known shape."""
    assert plan.shape is not None
    assert plan.trainer is not None
    return training_memory(
        replace(plan.shape, tied=True) if plan.gives_values else plan.shape,
        plan.trainer,
        dtype=plan.dtype,
        num_tokens=num_tokens,
        num_trained=0 if plan.gives_values else None,
        num_micro_batches=num_micro_batches,
        layers=layer_code(plan.trainer, plan.devices.kind),
        lora=plan.lora,
        sizes=plan.policy.axes,
    )


def scoring_bytes(
    role: Role, shape: ModelShape, *, longest: int, num_rows: int | None, num_bytes: int
) -> int:
    """Work memory of a frozen model's pass on one device, at the widest moment of a layer or of
    the head. Rows have at most `longest` tokens; a step has `num_rows`, None where that is not
    known. `num_bytes` is the size of a value."""
    settings = role.settings
    if isinstance(settings, RewardModelConfig):
        num_tokens = max(settings.max_tokens_per_forward, longest)
    else:
        settings = role.trainer
        num_tokens = settings.max_tokens_per_forward or 2 * settings.max_tokens_per_microbatch
        if settings.micro_batch_size is not None and settings.max_tokens_per_forward is None:
            num_tokens = settings.micro_batch_size * longest
    whole = None if num_rows is None else num_rows * longest
    num_tokens = min(num_tokens, whole or num_tokens)
    hidden = num_tokens * shape.hidden_size * num_bytes
    layer = num_tokens * max(3 * shape.mlp_size, shape.recurrence_work) * num_bytes
    if isinstance(settings, RewardModelConfig):
        return 2 * hidden + layer
    # Logits in the model's format, and twice in float32.
    chunk = min(settings.logits_chunk_tokens, num_tokens)
    logits = chunk * shape.vocab_size * (num_bytes + 2 * 4)
    return 2 * hidden + max(layer, hidden + logits)


def frozen_bytes(shape: ModelShape, axes: AxisSizes, *, num_bytes: int, gives_values: bool) -> int:
    """Bytes of a frozen model's weights on the fullest of the devices that share a copy, of
    `num_bytes` each. A model that `gives_values` has a head of one row on the first of them."""
    held = sum(_shard(tensor, axes) for tensor in shape.tensors())
    return num_bytes * (held + gives_values * shape.hidden_size)


def gathered_to_score(shape: ModelShape, *, num_bytes: int) -> int:
    """Bytes of the weights that a pass of a frozen model in shards gathers at a time: those outside
    the layers, a layer and the one fetched ahead of it."""
    tensors = shape.tensors()
    layers = sum(t.count * t.numel for t in tensors if t.in_layer)
    rest = sum(t.count * t.numel for t in tensors if not t.in_layer)
    return num_bytes * (rest + min(2, shape.num_layers) * layers // shape.num_layers)


def adapter_params(shape: ModelShape, lora: LoraConfig) -> int:
    """Parameters of the adapters, over all layers."""
    return sum(t.count * t.numel for t in _adapters(shape, lora))


def expert_adapter_params(shape: ModelShape, lora: LoraConfig) -> int:
    """`adapter_params` of experts alone."""
    return sum(t.count * t.numel for t in _adapters(shape, lora) if t.of_experts)


def active_adapter_params(shape: ModelShape, lora: LoraConfig) -> int:
    """`adapter_params` that a token uses."""
    return sum(t.count * shape.passed(t) for t in _adapters(shape, lora))


def params_in_4bit(shape: ModelShape, lora: LoraConfig) -> int:
    """Frozen parameters that are kept in four bits, over all layers."""
    held = adapted_tensors(shape, lora) if lora.load_in_4bit else ()
    return sum(t.count * t.numel for t in held)


def adapted_tensors(shape: ModelShape, lora: LoraConfig) -> list[TensorShape]:
    """The tensors of the shape's layers that have adapters beside them."""
    return [t for t in shape.tensors() if _has_adapter(shape, t, lora)]


def _has_adapter(shape: ModelShape, tensor: TensorShape, lora: LoraConfig) -> bool:
    targets = lora.target_modules or spec_of(shape.family).lora_targets
    return bool(lora.rank) and tensor.name in targets


def _adapters(shape: ModelShape, lora: LoraConfig) -> Iterator[TensorShape]:
    """All A and B."""
    return chain.from_iterable(t.adapter(lora.rank) for t in adapted_tensors(shape, lora))


def _shard(tensor: TensorShape, axes: AxisSizes) -> int:
    """Number of elements that a process keeps of all `count` tensors: FSDP cuts rows."""
    rows, *rest = _local(tensor, axes)
    ranks = axes.expert_fsdp if tensor.of_experts else axes.fsdp
    return tensor.count * -(-rows // ranks) * prod(rest)


def _local(tensor: TensorShape, axes: AxisSizes) -> tuple[int, ...]:
    """Shape of one tensor after the tensor and expert axes have divided it, as FSDP gets it."""
    if tensor.of_experts:
        return (tensor.size[0] // axes.expert, *tensor.size[1:])
    return tensor.local(axes.tensor)


def _nf4_bytes(tensor: TensorShape) -> int:
    """Bytes of a tensor in NF4: codes of four bits, and a float32 scale per block."""
    return tensor.count * (tensor.numel // 2 + 4 * (tensor.numel // NF4_BLOCK))


class _Mixer(NamedTuple):
    """What attention or recurrence keeps of one token for backward."""

    values: int
    """Values in the format that computes."""
    statistics: int
    """Bytes of values in float32."""


@dataclass(slots=True)
class _Step:
    shape: ModelShape
    trainer: SFTTrainerConfig
    lora: LoraConfig
    sizes: AxisSizes
    layers: LayerCode
    num_bytes: int
    num_tokens: int
    num_trained: int
    is_single: bool
    """Whether the step has only one micro-batch."""
    stage: int
    """Number of this stage of the pipeline; `shape` has the stage's layers alone."""
    groups: Sequence[int]
    """Number of layers of each group of neighbouring layers in the stage."""
    # Bytes of tensors that exist between passes; the first five as in `TrainingMemory`.
    weights: int = 0
    masters: int = 0
    gradients: int = 0
    optimizer: int = 0
    host: int = 0
    host_padding: int = 0
    state: int = 0
    whole_root: int = 0
    """Gathered weights outside the layers: embedding, head and final norm, in the format that
    computes."""
    whole_layers: int = 0
    whole_gradients: int = 0
    """Float32 gradients before they are reduced."""
    largest_matrix: int = 0
    """Elements of the largest matrix that Muon updates."""
    trained: int = 0
    """Number of elements of this process's masters."""
    layer_gradients: int = 0
    """Bytes of this process's masters in all layers, on device or host."""
    known_layers: dict[tuple[RecomputeMode, bool], int] = field(
        default_factory=dict[tuple[RecomputeMode, bool], int]
    )
    """Results of `_layer_bytes`."""
    spans: Sequence[range] = field(init=False)
    """Spans of layers that are recomputed together, by number in the stage."""

    def __post_init__(self) -> None:
        starts = accumulate(self.groups, initial=0)
        self.spans = [
            range(start + span.start, start + span.stop)
            for start, number in zip(starts, self.groups, strict=False)
            for span in self.trainer.recomputed_spans(number)
        ]

    @property
    def is_shared(self) -> bool:
        return self.sizes.world > 1

    @property
    def is_last_stage(self) -> bool:
        return self.stage == self.sizes.pipeline - 1

    def holds(self, tensor: TensorShape) -> bool:
        """Whether this stage has a tensor that belongs to no layer; a tied embedding is in the
        first and the last stage."""
        if tensor.name != "embed_tokens":
            return self.is_last_stage
        is_head = self.shape.tied and self.num_trained > 0 and self.is_last_stage
        return self.stage == 0 or is_head

    @property
    def _in_flight(self) -> int:
        """Passes through groups of this stage's layers whose activations exist at once."""
        stages = self.sizes.pipeline
        num_batches = 1 if self.is_single else most_of_a_round(stages)
        return passes_in_flight(self.stage, stages, len(self.groups), num_batches=num_batches)

    def _of_passes(self, of_stage: int) -> int:
        """Bytes kept by all passes in flight, where one pass through every group of the stage keeps
        `of_stage`."""
        return self._in_flight * of_stage // len(self.groups)

    def plan(self) -> TrainingMemory:
        gathered, reducing, kept = self._gathered(), self._reducing(), self._activations()
        logits, workspace = self._logits() * self.is_last_stage, self._workspace()
        rest = self.weights + self.masters + self.optimizer
        # In the first micro-batch gradients grow while activations go.
        before = 0 if self.is_single else self.gradients
        last = self.gradients + kept // max(self._of_passes(self.shape.num_layers), 1)
        phases: dict[Literal["head", "layers", "optimizer"], int] = {
            "head": (rest + gathered + reducing + before + kept + logits) * self.is_last_stage,
            "layers": rest + gathered + reducing + max(before + kept, last) + workspace,
            "optimizer": rest + self.gradients + self._optimizer_workspace(),
        }
        peak_phase = max(phases, key=lambda phase: phases[phase])
        return TrainingMemory(
            weights=self.weights,
            masters=self.masters,
            gradients=self.gradients,
            optimizer=self.optimizer,
            gathered=gathered,
            reducing=reducing,
            activations=kept,
            logits=logits,
            workspace=workspace,
            host=self.host + self._activations_on_host(),
            host_padding=self.host_padding,
            state=self.state,
            peak=phases[peak_phase],
            peak_phase=peak_phase,
        )

    # -- counted exactly -------------------------------------------------------------------------

    def count(self, tensor: TensorShape) -> None:
        """Add a parameter of the model, and its adapter."""
        if not self.lora.rank:
            self._count_trained(tensor)
            return
        is_adapted = _has_adapter(self.shape, tensor, self.lora)
        if is_adapted and self.lora.load_in_4bit:
            # Buffers, which are not sharded: they stay on the device of one of several.
            self._hold("weights", _nf4_bytes(tensor), on_host=False)
        else:
            self._count_whole(tensor, self._whole(tensor))
            self._count_weights(self.num_bytes * self._shard(tensor))
            self._count_padding(tensor, self.num_bytes)
        if is_adapted:
            for own in tensor.adapter(self.lora.rank):
                self._count_trained(own)

    def _count_trained(self, tensor: TensorShape) -> None:
        trainer, optimizer = self.trainer, self.trainer.optimizer
        shard, whole = self._shard(tensor), self._whole(tensor)
        self._count_whole(tensor, whole)
        self.trained += shard
        self._hold("gradients", 4 * shard, on_host=trainer.offloads("gradients"))
        self.layer_gradients += 4 * shard * tensor.in_layer
        self.whole_gradients += 4 * tensor.count * whole
        if self.num_bytes == 4:
            self._count_weights(4 * shard)
        else:
            if not self.is_shared:  # else they are gathered for a pass
                self._count_weights(self.num_bytes * shard)
            are_away = trainer.offloads("parameters" if self.is_shared else "optimizer")
            self._hold("masters", 4 * shard, on_host=are_away)
        moments = 2 * (2 if optimizer.state_dtype == "bfloat16" else 4)
        if optimizer.name == "muon" and len(tensor.size) == 2 and tensor.in_layer:
            moments = 4
            self.largest_matrix = max(self.largest_matrix, whole)
        self._hold("optimizer", moments * shard, on_host=trainer.offloads("optimizer"))
        self.state += (4 + moments) * shard
        self._count_padding(tensor, 4, copies=2)  # its gradient

    def _count_weights(self, num_bytes: int) -> None:
        """Add the bytes that hold a tensor's values between passes."""
        away = self.is_shared and self.trainer.offloads("parameters")
        self._hold("weights", num_bytes, on_host=away)

    def _count_padding(self, tensor: TensorShape, width: int, *, copies: int = 1) -> None:
        """Add the padding of FSDP's host copies, whose elements have `width` bytes."""
        if self.is_shared and self.trainer.offloads("parameters"):
            num_bytes = width * self._shard(tensor) // tensor.count
            padding = (1 << (num_bytes - 1).bit_length()) - num_bytes
            self.host_padding += copies * tensor.count * padding

    def _hold(
        self,
        kind: Literal["weights", "masters", "gradients", "optimizer"],
        num_bytes: int,
        *,
        on_host: bool,
    ) -> None:
        name = "host" if on_host else kind
        setattr(self, name, getattr(self, name) + num_bytes)

    def _count_whole(self, tensor: TensorShape, whole: int) -> None:
        num_bytes = self.num_bytes * tensor.count * whole
        if tensor.in_layer:
            self.whole_layers += num_bytes
        else:
            self.whole_root += num_bytes

    def _shard(self, tensor: TensorShape) -> int:
        return _shard(tensor, self.sizes)

    def _whole(self, tensor: TensorShape) -> int:
        """Number of elements of one tensor that a pass gathers; of experts, only this process's
        own."""
        return prod(_local(tensor, self.sizes))

    # -- modelled --------------------------------------------------------------------------------

    def _gathered(self) -> int:
        """Bytes of FSDP's gathered weights: all of them, or with stage 3 those outside the layers,
        the layers that are recomputed together, and one prefetched layer."""
        if not self.is_shared:
            return 0
        one_layer = self.whole_layers // self.shape.num_layers
        is_kept = self.trainer.parallel.zero_stage < 3
        at_once = min(1 + self.trainer.recomputed_together, self.shape.num_layers)
        return self.whole_root + (self.whole_layers if is_kept else at_once * one_layer)

    def _reducing(self) -> int:
        """Bytes of FSDP's buffers for reducing gradients: one layer's, and all gradients where they
        are reduced once a step. Where gradients wait on the host: the buffers in transfer each
        way."""
        trainer = self.trainer
        travelling = 0
        if trainer.offloads("gradients") and not (
            self.is_shared and trainer.offloads("parameters")
        ):
            window = max(self.layer_gradients // self.shape.num_layers, _BUCKETS_BYTES // 2)
            travelling = min(4 * self.trained, window) * (1 if self.is_single else 2)
        if not self.is_shared:
            return travelling
        one_layer = (self.whole_layers + self.whole_gradients) // self.shape.num_layers
        is_late = not trainer.offloads("gradients") and trainer.parallel.zero_stage < 2
        is_whole = is_late and not self.is_single
        return one_layer + travelling + (self.whole_gradients if is_whole else 0)

    def _activations(self) -> int:
        """Bytes of activations on the device, of the layers, the embedding and the head."""
        spans, inputs = self.spans, self._input_bytes
        num_spans, mode = len(spans), self.trainer.recompute_mode
        plain = set(range(self.shape.num_layers)).difference(*spans)
        of_spans = self._layers_bytes(mode, [span[0] for span in spans])
        of_layers = self._of_passes(self._layers_bytes("off", plain) + of_spans)
        if self.trainer.offload_activations:
            # Of each group, one more is in transfer besides the newest.
            of_layers -= max(self._of_passes(num_spans) - 2 * len(self.groups), 0) * inputs
        if self.sizes.pipeline > 1:
            of_layers += (_MESSAGES if len(self.groups) == 1 else _MESSAGES_OF_GROUPS) * inputs
        width = self.shape.hidden_size * self.num_bytes
        # The final norm's input and output, the rows that the head takes.
        at_end = 2 * self.num_tokens + self.num_trained if self.is_last_stage else 0
        return of_layers + at_end * width

    def _activations_on_host(self) -> int:
        kept = self._of_passes(len(self.spans) * self._input_bytes)
        return kept * self.trainer.offload_activations

    @property
    def _input_bytes(self) -> int:
        """Bytes of a layer's input: the residual stream, divided over the tensor axis."""
        return self.num_tokens * self.shape.hidden_size * self.num_bytes // self.sizes.tensor

    @property
    def _routed(self) -> int:
        """Values of one token's hidden states before and after its experts, where each of these
        experts has a copy; a device of the tensor axis has those of its share of tokens."""
        return 2 * self.shape.experts_per_token * self.shape.hidden_size // self.sizes.tensor

    def _layers_bytes(self, mode: RecomputeMode, layers: Collection[int]) -> int:
        """Bytes that these layers keep for backward, for all tokens of a micro-batch on this
        device."""
        if mode == "full":
            return len(layers) * self._input_bytes
        num_recurrent = sum(layer in layers for layer in self.shape.recurrent_indices)
        numbers = {False: len(layers) - num_recurrent, True: num_recurrent}
        return sum(n * self._layer_bytes(mode, kind) for kind, n in numbers.items() if n)

    def _layer_bytes(self, mode: Literal["off", "selective"], is_recurrent: bool) -> int:
        """`_layers_bytes` of one layer with one of the two mixers."""
        kind = mode, is_recurrent
        if kind not in self.known_layers:
            self.known_layers[kind] = self._bytes_of_layer(*kind)
        return self.known_layers[kind]

    def _bytes_of_layer(self, mode: Literal["off", "selective"], is_recurrent: bool) -> int:
        shape, tensor = self.shape, self.sizes.tensor
        inputs, inter = shape.hidden_size // tensor, shape.mlp_size // tensor
        mixer = (self._recurrent_mixer if is_recurrent else self._attention_mixer)(mode)
        # Both residuals, gate and up.
        values = 2 * inputs + mixer.values + 2 * inter + self._routed
        if mode == "off":
            values += self._normed + inter
            if self.layers == "eager":
                # Norms keep their input in float32, activations their result.
                values += 2 * self._wide * inputs + inter
            elif self.sizes.expert > 1:  # divided experts are in no graph
                values += shape.experts_per_token * shape.expert_size // tensor
        elif self.layers == "compiled":
            # `selective` recomputes everything around the results of attention.
            values = inputs + mixer.values
        if self.lora.rank:
            number = sum(t.of_experts for t in adapted_tensors(shape, self.lora))
            values += (7 + shape.experts_per_token * number) * self.lora.rank
        return self.num_tokens * (values * self.num_bytes + mixer.statistics)

    @property
    def _normed(self) -> int:
        """Values of one token in results of norms, which products keep. The tensor axis gathers
        them for attention and an MLP; a router reads a device's share, as float32 where scores are
        sigmoids."""
        shape, share = self.shape, self.shape.hidden_size // self.sizes.tensor
        has_mlp = shape.num_expert_layers < shape.num_layers or shape.shared_expert_size > 0
        values = shape.hidden_size + (shape.hidden_size if has_mlp else share)
        experts = spec_of(shape.family).experts
        return values + (self._wide * share if experts and experts.scores == "sigmoid" else 0)

    @property
    def _wide(self) -> int:
        """Size of a float32 value in those of the format that computes."""
        return 4 // self.num_bytes

    def _attention_mixer(self, mode: Literal["off", "selective"]) -> _Mixer:
        """What attention keeps: queries, keys and values, their results with rotated heads, and the
        result. A gate takes as much as queries do, and so does the gated result."""
        shape, tensor = self.shape, self.sizes.tensor
        q = shape.num_heads * shape.head_dim // tensor
        kv = shape.num_kv_heads * shape.head_dim // tensor
        gate = q * spec_of(shape.family).gated_attention
        is_compiled, is_off = self.layers == "compiled", mode == "off"
        values = q if is_compiled and not is_off else gate + (q + 2 * kv) + q
        values += (q + kv + gate) * is_off
        if is_off and not is_compiled:
            values += self._wide * (q + kv) * shape.has_head_norms + gate
        return _Mixer(values, 4 * shape.num_heads // tensor)

    def _recurrent_mixer(self, mode: Literal["off", "selective"]) -> _Mixer:
        """What gated linear attention keeps with the kernels of `fla-core`: channels before the
        convolution; normalised queries and keys, and values, behind it; the solved systems of
        chunks; the gate, the result, its norm and what `out_proj` takes. Logarithms of decays, as
        they are and cumulated, and their inputs are float32. The states of chunks are computed
        again."""
        own, tensor = self.shape.recurrent, self.sizes.tensor
        assert own is not None
        if mode == "selective":
            # Results of products alone, in layers that are not compiled.
            products = own.num_channels + own.value_width + 2 * own.num_value_heads
            return _Mixer(products // tensor * (self.layers == "eager"), 0)
        widths = 2 * own.num_channels + CHUNK * own.num_value_heads + 4 * own.value_width
        if self.layers == "eager":
            # The norm's input, silu of the gate and its input in float32.
            widths += own.value_width * (3 * self._wide - 1)
        return _Mixer(widths // tensor, 4 * 4 * own.num_value_heads // tensor)

    def _logits(self) -> int:
        """Bytes at the head at the start of backward."""
        vocab = -(-self.shape.vocab_size // self.sizes.tensor)
        width = self.shape.hidden_size
        chunk = min(self.trainer.logits_chunk_tokens, self.num_trained) * vocab
        copies = 4 + self.num_bytes if self.layers != "eager" else 12 + self.num_bytes
        matrix = 0 if self.lora.rank else 4 * vocab * width
        return chunk * copies + matrix + self.num_trained * width * self.num_bytes

    def _workspace(self) -> int:
        """Work memory of the backward of one layer, or of several that are recomputed together."""
        shape, tensor = self.shape, self.sizes.tensor
        inter, hidden = shape.mlp_size // tensor, shape.hidden_size
        # Gradients of gate and up, of their product and it, of the stream and the norm's result.
        values = max(4 * inter, self._recurrent_backward) + 3 * hidden + self._routed
        # Activations of the layers of a span while backward goes through them.
        mode = self.trainer.recompute_mode
        spans = self.spans
        if not shape.recurrent_indices:  # then the longest span keeps most
            spans = sorted(spans, key=len)[-1:]
        recomputed = max(
            (self._layers_bytes("off", x) - self._layers_bytes(mode, x[:1]) for x in spans),
            default=0,
        )
        # A matrix's own gradient, before it is added to the master's.
        matrix = 0 if self.lora.rank else inter * hidden * (self.num_bytes + 4)
        return self.num_tokens * values * self.num_bytes + recomputed + matrix + self._unpacked

    @property
    def _unpacked(self) -> int:
        """Bytes of the largest matrix in 4 bits, or of that of all experts, during a product."""
        if not self.lora.load_in_4bit:
            return 0
        held = adapted_tensors(self.shape, self.lora)
        return self.num_bytes * max((tensor.numel for tensor in held), default=0)

    @property
    def _recurrent_backward(self) -> int:
        """Values of one token in the backward of a recurrent layer: keys and values of chunks and
        new values, which are computed again, with their gradients; states of chunks and their
        gradients; gradients of queries, keys and values, before and behind the convolution, and of
        the result and the gate."""
        own = self.shape.recurrent
        if own is None or not own.indices:
            return 0
        keys, values = own.num_value_heads * own.key_dim, own.value_width
        of_chunks = 2 * (keys + 2 * values) + 2 * own.state_values // CHUNK + 2 * keys
        return (of_chunks + 2 * own.num_channels + 2 * values) // self.sizes.tensor

    def _optimizer_workspace(self) -> int:
        buckets = min(_BUCKETS_BYTES, self.host)
        sampled = min(self.trained, _MAX_SAMPLED) * (48 if self.is_shared else 12)
        return buckets + sampled + _MUON_COPIES * self.largest_matrix
