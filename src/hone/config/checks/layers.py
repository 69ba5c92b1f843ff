"""Checks on what is trained, how it multiplies and where it waits: adapters, float8, sleep."""

from __future__ import annotations

from collections.abc import Iterator

from hone.config.algorithm import AlgorithmConfig
from hone.config.checks.finding import Finding, error, warning
from hone.config.extras import missing_extra
from hone.config.model import LoraConfig, TrainedModelConfig, unknown_targets
from hone.config.trainer import SFTTrainerConfig, TrainerConfig

__all__ = [
    "check_adapters",
    "check_matmul_precision",
    "check_rounded_trainer",
    "check_sleep",
]

_RANK = "model.lora.rank"
_TARGETS = "model.lora.target_modules"
_PRECISION = "trainer.matmul_precision"


def check_adapters(
    lora: LoraConfig, trainer: SFTTrainerConfig, *, exact: bool
) -> Iterator[Finding]:
    """Whether adapters can be trained as asked for."""
    if lora.load_in_4bit and not lora.rank:
        yield error(
            f"model.lora.load_in_4bit is on, but {_RANK} is 0: four bits cannot be trained, only "
            f"adapters beside them. Set {_RANK}, 16 for example, or switch it off.",
            "model.lora.load_in_4bit",
            _RANK,
        )
    if (problem := unknown_targets(lora)) is not None:
        yield error(problem, _TARGETS)
    if not lora.rank:
        if lora.target_modules:
            yield warning(
                f"{_TARGETS} is set, but {_RANK} is 0: there are no adapters, and all weights are "
                f"trained. Set {_RANK}, 16 for example, or remove {_TARGETS}.",
                _TARGETS,
                _RANK,
            )
        return
    if exact:
        yield error(
            f"{_RANK} is {lora.rank}, and model.exact is on: exact mode computes with whole "
            f"weights. Set {_RANK} to 0 or model.exact to false.",
            _RANK,
            "model.exact",
        )
    tensor = trainer.parallel.tensor_parallel_size
    if tensor > 1:
        yield error(
            f"{_RANK} is {lora.rank}, and trainer.parallel.tensor_parallel_size {tensor}: adapters "
            "are not split over the tensor axis. Set it to 1; trainer.parallel.zero_stage 3 shards "
            "the frozen weights over processes, so that each holds a part.",
            _RANK,
            "trainer.parallel.tensor_parallel_size",
        )


def check_matmul_precision(
    trainer: SFTTrainerConfig, model: TrainedModelConfig, *, device: str
) -> Iterator[Finding]:
    """Whether products of this model can multiply so, as far as no device is asked."""
    precision = trainer.matmul_precision
    if precision == "default":
        return
    tensor = trainer.parallel.tensor_parallel_size
    on_cuda = ("run.device", device, device != "cpu", "cuda")
    if precision == "tf32":
        needs = [on_cuda, ("model.dtype", model.dtype, model.dtype == "float32", "float32")]
    else:
        needs = [
            on_cuda,
            ("model.dtype", model.dtype, model.dtype != "float32", "auto"),
            ("model.exact", "true", not model.exact, "false"),
            (_RANK, model.lora.rank, not model.lora.rank, "0"),
            ("trainer.parallel.tensor_parallel_size", tensor, tensor == 1, "1"),
        ]
    for key, got, is_served, allowed in needs:
        if not is_served:
            yield error(
                f"{_PRECISION} is {precision}, which {key} {got} cannot serve. Set {key} to "
                f"{allowed}, or {_PRECISION} to default.",
                _PRECISION,
                key,
            )
    if precision != "fp8":
        return
    missing = missing_extra("torchao", needed_by=f"{_PRECISION}=fp8")
    if missing is not None:
        yield error(f"{missing}. Or set {_PRECISION} to default.", _PRECISION)
    if trainer.compile is False:
        yield warning(
            f"{_PRECISION} is fp8, and trainer.compile is off: rounding operands by itself takes "
            "longer than float8 saves. Leave trainer.compile unset.",
            _PRECISION,
            "trainer.compile",
        )


def check_rounded_trainer(trainer: TrainerConfig, algorithm: AlgorithmConfig) -> Iterator[Finding]:
    """What a trainer that rounds more than its engine makes of the gap between them."""
    precision, parity = trainer.matmul_precision, trainer.parity
    if precision == "default":
        return
    if parity.enabled and parity.max_kl is None:
        yield warning(
            f"{_PRECISION} is {precision}, and trainer.parity.max_kl is unset: its default is for "
            "products in the model's own format, and a sound run may exceed it. Set it to a few "
            "times what the gate reports of the first step (off_policy/parity/kl).",
            _PRECISION,
            "trainer.parity.max_kl",
        )
    if precision == "fp8" and algorithm.correction.kind == "none":
        yield warning(
            f"{_PRECISION} is fp8, so that samples come from a slightly different policy than the "
            "trainer's, and algorithm.correction.kind is none. Set it to tis.",
            _PRECISION,
            "algorithm.correction.kind",
        )


def check_sleep(trainer: TrainerConfig, world_size: int | None) -> Iterator[Finding]:
    """Whether the trainer can leave the device to the engine."""
    if trainer.enable_sleep and world_size is not None and world_size > 1:
        yield error(
            f"trainer.enable_sleep is on, and {world_size} processes train together: their shards "
            "are gathered while the engine is awake, so the room would not be handed over. Switch "
            "it off; trainer.parallel.zero_stage and offload_optimizer save memory there.",
            "trainer.enable_sleep",
        )
    if trainer.enable_sleep and trainer.offload_gradients:
        yield error(
            "trainer.enable_sleep moves masters, moments and gradients to the host while the "
            "engine generates, and trainer.offload_gradients keeps them there for good: nothing is "
            "left to move. Turn trainer.enable_sleep off.",
            "trainer.enable_sleep",
            "trainer.offload_gradients",
        )
