"""Checks on what is trained, and where it waits: adapters, hone's own layers, sleep."""

from __future__ import annotations

from collections.abc import Iterator

from hone.config.checks.finding import Finding, error
from hone.config.model import LoraConfig
from hone.config.trainer import SFTTrainerConfig, TrainerConfig

__all__ = ["check_adapters", "check_fused_layers", "check_sleep"]

_RANK = "model.lora.rank"


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
    if not lora.rank:
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
            "are not split over the tensor axis. Use 1; fsdp_size shards them.",
            _RANK,
            "trainer.parallel.tensor_parallel_size",
        )


def check_fused_layers(
    trainer: SFTTrainerConfig,
    lora: LoraConfig,
    *,
    exact: bool,
    device: str,
    world_size: int | None,
) -> Iterator[Finding]:
    """Whether hone's own layers serve the run. Whether the family has them shows at its start."""
    if not trainer.fused_layers:
        return
    key = "trainer.fused_layers"
    if exact:
        yield error(
            f"{key} and model.exact are both on: exact mode has layers of its own. Switch one off.",
            key,
            "model.exact",
        )
    if lora.rank:
        yield error(
            f"{key} is on, and {_RANK} is {lora.rank}: fused layers have no adapters. Switch "
            f"{key} off.",
            key,
            _RANK,
        )
    if device == "cpu":
        yield error(
            f"{key} is on, and run.device is cpu: its kernels need CUDA.", key, "run.device"
        )
    if world_size is not None and world_size > 1:
        yield error(
            f"{key} is on, and {world_size} processes train together: weights that are sharded go "
            f"through transformers' layers. Switch {key} off, or start one process.",
            key,
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
