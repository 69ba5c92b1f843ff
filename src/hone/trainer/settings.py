"""Optimizer steps: batch sizes, memory, optimizers, schedules."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal, Self, get_args

from pydantic import Field

from hone.config.base import Section
from hone.distributed.settings import ParallelConfig

__all__ = [
    "MatmulPrecision",
    "OffloadLevel",
    "OptimizerConfig",
    "Recompute",
    "RecomputeMode",
    "SFTTrainerConfig",
    "TrainerConfig",
    "cap_key",
    "recomputed_spans",
]


MatmulPrecision = Literal["default", "tf32", "fp8"]
RecomputeMode = Literal["off", "selective", "full"]
Recompute = (
    Literal["off", "selective", "full", "auto"]
    | Annotated[
        str, Field(pattern=r"^(uniform|block):[1-9][0-9]*$", description="uniform:N, or block:N")
    ]
)
OffloadLevel = Literal["none", "optimizer", "gradients", "parameters"]
_OFFLOAD_LEVELS: tuple[OffloadLevel, ...] = get_args(OffloadLevel)


class OptimizerConfig(Section):
    """AdamW, or Muon (of momentum 0.95) for hidden matrices with AdamW for the rest."""

    name: Literal["adamw", "muon"] = "adamw"
    """`muon` orthogonalises the update of hidden matrices; embeddings, head, vectors use AdamW."""

    lr: float = Field(default=1e-6, ge=0)
    """Peak learning rate (of AdamW)."""

    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of AdamW's first and second moment."""

    eps: float = Field(default=1e-8, gt=0)
    """AdamW's denominator offset."""

    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled decay of matrices; vectors (norms, biases) are never decayed."""

    muon_lr: float = Field(default=0.02, ge=0)
    """Peak learning rate of the matrices under Muon."""

    state_dtype: Literal["float32", "bfloat16"] = "float32"
    """Format of AdamW's moments; bfloat16 halves them, rounded stochastically."""

    max_grad_norm: float = Field(default=1.0, ge=0)
    """Gradients are scaled down to this global norm; 0 does not clip."""

    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Course of the learning rate after warm-up."""

    warmup_steps: int = Field(default=0, ge=0)
    """Optimizer steps over which the learning rate rises linearly from 0."""

    min_lr_ratio: float = Field(default=0.0, ge=0, le=1)
    """Learning rate at the end of a schedule, as a share of the peak."""


class SFTTrainerConfig(Section):
    """Settings that supervised and reinforcement training share."""

    max_tokens_per_microbatch: int = Field(default=16384, ge=1)
    """Token budget of one forward and backward pass on one device: a hard cap. Longer single
    sequences are refused before the run starts."""

    max_tokens_per_forward: int | None = Field(default=None, ge=1)
    """Token budget of forward-only passes (old and reference log-probabilities, the evaluation of
    `hone sft`); unset: `micro_batch_size` where that is set, else twice
    `max_tokens_per_microbatch`."""

    micro_batch_size: int | None = Field(default=None, ge=1)
    """Sequences per micro-batch, as an alternative to `max_tokens_per_microbatch`; unset: dynamic
    batches."""

    recompute: Recompute = "off"
    """What backward computes again instead of keeping it: `full` all of a decoder layer but its
    input, `selective` also keeps the results of attention, and of matrix products where layers are
    not compiled (a compiled layer recomputes what lies around attention as a whole). `block:N` is
    `full` for the first N layers, of each group in a pipeline stage. `uniform:N` keeps the input of
    every N layers, which are computed again together: less is kept, and more exists at a time.
    `auto` is the cheapest of these whose predicted memory fits the GPUs of the run with a margin,
    chosen when it starts, and kept when it is resumed; on a CPU it is `off`."""

    recompute_every_n_layers: int = Field(default=1, ge=1)
    """Recompute every n-th layer only."""

    offload_activations: bool = False
    """Keep the inputs of recomputed layers in pinned host memory until backward needs them."""

    offload: OffloadLevel = "none"
    """What is kept in pinned host memory; each adds to the one before. `optimizer`: master weights
    and optimizer states, 12 bytes a parameter, or 8 with moments in bfloat16; where masters are
    what computes or is sharded, they stay on the device. `gradients`: also gradients, 4 bytes a
    parameter, but while backward adds to them; several processes then reduce after each micro-batch
    in every ZeRO stage. `parameters`: also the shards of weights, which are gathered on the device
    while they compute; for several processes, with `parallel.zero_stage` 3. Not for Muon."""

    compile: bool | None = None
    """Compile decoder layers and head with torch.compile: half the time and two thirds of the
    memory on a GPU, for ten to twenty seconds in the first step, a few where torch's cache has them
    from an earlier run. Unset: on CUDA only."""

    matmul_precision: MatmulPrecision = "default"
    """How operands of matrix products are rounded; weights, masters and exports stay as they are.
    `tf32` (float32 models): all products of the process, the engine's too, multiply with 10 bits of
    mantissa. `fp8` (bfloat16 models; GPUs from Ada and Hopper on; extra `fp8`): projections of
    decoder layers multiply in float8, forward and backward; attention, head and engine do not. Then
    the launch gate measures that rounding too: it tells a bug from it only by limits of your own
    (`trainer.parity`), and `algorithm.correction` is advised. On an H200 steps of 8B
    are 1.13 times as fast as in bfloat16, steps of 0.6B take half as long again; gradients are off
    by 0.19 where bfloat16's are by 0.015 (0.6B)."""

    logits_chunk_tokens: int = Field(default=1024, ge=1)
    """Tokens whose logits exist at a time; bounds memory at this many times the vocabulary. A
    micro-batch's last chunk stays until backward, which computes the logits of the others again:
    with all tokens in one chunk the head takes about 30 % less time."""

    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and schedule."""

    parallel: ParallelConfig = ParallelConfig()
    """How several processes share the work."""

    def compiles(self, kind: str) -> bool:
        """Whether layers are compiled on a kind of device, `cuda` or `cpu`; layers of exact mode
        never are."""
        return kind == "cuda" if self.compile is None else self.compile

    @property
    def recompute_mode(self) -> RecomputeMode:
        """Recomputation mode of the layers that are recomputed; `off` before `auto` is settled."""
        match self.recompute:
            case "off" | "selective" as mode:
                return mode
            case "auto":
                return "off"
            case _:
                return "full"

    @property
    def recompute_number(self) -> int | None:
        """The number N of `uniform:N` and `block:N`; None for other modes."""
        _, _, number = self.recompute.partition(":")
        return int(number) if number else None

    def recomputed_spans(self, num_layers: int) -> Sequence[range]:
        """Spans of recomputed layers among `num_layers` neighbours: the layers of a span are
        recomputed together, from the input of the first."""
        return recomputed_spans(self.recompute, self.recompute_every_n_layers, num_layers)

    @property
    def recomputed_together(self) -> int:
        """Number of layers of the longest span."""
        return (self.recompute.startswith("uniform") and self.recompute_number) or 1

    def recomputing_all(self) -> Self:
        """This configuration with full recomputation of all layers."""
        if self.recomputed_together > 1:
            return self
        return self.model_copy(update={"recompute": "full", "recompute_every_n_layers": 1})

    def offloads(self, what: OffloadLevel) -> bool:
        """Whether `what` is offloaded to host memory; each level includes those before it."""
        return _OFFLOAD_LEVELS.index(self.offload) >= _OFFLOAD_LEVELS.index(what)


class TrainerConfig(SFTTrainerConfig):
    """Reinforcement training: how many optimizer steps a rollout is used for."""

    prompts_per_minibatch: int | None = Field(default=None, ge=1)
    """Prompts per optimizer step, over all devices; unset: all of a step, one optimizer step a
    rollout."""

    num_epochs: int = Field(default=1, ge=1)
    """Passes over each rollout."""

    enable_sleep: bool = False
    """Keep master weights and optimizer states in pinned host memory but while they train, and the
    weights of a reference and a teacher beside them but while they score, so that the engine has
    their room; of several processes each its shards."""

    parity: Literal["auto", "off"] | float = "auto"
    """Launch gate: engine and trainer must agree on log-probabilities of the first step's samples,
    or the run stops before the first update. A number is the limit of the mean k3 divergence;
    `auto`: 2e-3 for bfloat16, 1e-6 for float32, made for equal rounding: set it where
    `trainer.matmul_precision` is not `default`. Ratios may lie outside [0.9, 1.1] for 8 % of the
    tokens. `off`: no gate."""


def recomputed_spans(recompute: str, every_n_layers: int, num_layers: int) -> Sequence[range]:
    """`SFTTrainerConfig.recomputed_spans` by the values of `trainer.recompute` and
    `trainer.recompute_every_n_layers`."""
    mode, _, number = recompute.partition(":")
    match mode:
        case "off" | "auto":
            return ()
        case "block":
            starts = range(min(int(number), num_layers))
        case "uniform":
            starts = range(0, num_layers, int(number))
            return [range(start, min(start + int(number), num_layers)) for start in starts]
        case _:
            starts = range(0, num_layers, every_n_layers)
    return [range(start, start + 1) for start in starts]


def cap_key(role: str, kind: Literal["backward", "forward"], *, in_rows: bool) -> str:
    """The key that limits a pass of the role, in tokens or in rows."""
    if in_rows:
        return "trainer.micro_batch_size"
    section = role if role == "critic" or (role, kind) == ("teacher", "forward") else "trainer"
    return f"{section}.max_tokens_per_{'microbatch' if kind == 'backward' else 'forward'}"
