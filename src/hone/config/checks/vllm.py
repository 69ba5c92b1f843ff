"""What vLLM, as the engine of a run, does not serve."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from hone.config.checks.finding import Finding, differs, error, warning
from hone.config.engine import EngineConfig
from hone.config.extras import missing_extra
from hone.config.model import ModelConfig
from hone.config.rollout import GenerationConfig
from hone.config.run import CheckpointConfig, EvalConfig

__all__ = [
    "LOWEST_TEMPERATURE",
    "check_vllm",
    "check_vllm_bench",
    "check_vllm_sleep",
    "undivided",
]

LOWEST_TEMPERATURE = 0.01
"""vLLM raises lower ones to this, and would then sample from another distribution."""


def check_vllm(
    engine: EngineConfig,
    model: ModelConfig,
    sampled: Mapping[str, GenerationConfig],
    *,
    device: str,
) -> Iterator[Finding]:
    """Whether `engine.backend` vllm is here and can do what is asked of it.

    `sampled` are the sections that say how completions are drawn.
    """
    if engine.backend == "embedded":
        yield from _sleep_level(engine)
        return
    missing = missing_extra("vllm", needed_by="engine.backend=vllm", on_cpu=device == "cpu")
    if missing is not None:
        yield error(f"{missing}. Or set engine.backend to embedded.", "engine.backend")
    for key, got, is_served, reason, allowed in (
        (
            "model.exact",
            "on",
            not model.exact,
            "its kernels depend on the batch and are not the trainer's",
            "false",
        ),
        (
            "engine.kv_cache_dtype",
            engine.kv_cache_dtype,
            engine.kv_cache_dtype == "auto",
            "its FP8 scales are not set anew for each weight version",
            "auto",
        ),
        (
            "engine.block_size",
            engine.block_size,
            not differs(engine, "block_size"),
            "vLLM chooses the block size by the device",
            "its default",
        ),
    ):
        if not is_served:
            yield error(
                f"{key} is {got}, which engine.backend vllm does not serve: {reason}. Set {key} to "
                f"{allowed}, or engine.backend to embedded.",
                key,
                "engine.backend",
            )
    if engine.max_num_batched_tokens < engine.max_num_seqs:
        yield error(
            f"engine.max_num_batched_tokens is {engine.max_num_batched_tokens}, less than "
            f"engine.max_num_seqs = {engine.max_num_seqs}, which engine.backend vllm refuses. "
            "Raise engine.max_num_batched_tokens.",
            "engine.max_num_batched_tokens",
            "engine.max_num_seqs",
            "engine.backend",
        )
    for section, generation in sampled.items():
        if 0 < generation.temperature < LOWEST_TEMPERATURE:
            yield error(
                f"{section}.temperature is {generation.temperature:g}; engine.backend vllm samples "
                f"at 0 (greedy), or {LOWEST_TEMPERATURE} or more.",
                f"{section}.temperature",
                "engine.backend",
            )
    if not engine.compile:
        yield warning(
            "engine.compile is off, which has no effect with engine.backend vllm; "
            "engine.cuda_graphs off keeps vLLM from compiling. Remove engine.compile.",
            "engine.compile",
            "engine.backend",
            "engine.cuda_graphs",
        )
    if engine.enable_sleep and device == "cpu":
        yield warning(
            "engine.enable_sleep is on, but with engine.backend vllm and run.device cpu nothing is "
            "freed: vLLM does not serve it there.",
            "engine.enable_sleep",
            "engine.backend",
            "run.device",
        )


def undivided(numbers: Mapping[str, int], size: int) -> list[str]:
    """Of numbers of `config.json`, those that so many ranks of vLLM cannot share.

    A key head may be whole on several of them.
    """
    return [
        f"{name} = {number}"
        for name, number in numbers.items()
        if number % size and (name != "num_key_value_heads" or size % number)
    ]


def check_vllm_sleep(
    engine: EngineConfig, checkpoint: CheckpointConfig, evaluation: EvalConfig
) -> Iterator[Finding]:
    """Whether a sync follows each sleep, where sleep drops the weights."""
    if engine.backend != "vllm" or engine.sleep_level == 1:
        return
    if not engine.enable_sleep:
        yield warning(
            "engine.sleep_level is 2, but engine.enable_sleep is off, so that vLLM never sleeps. "
            "Switch it on, or remove engine.sleep_level.",
            "engine.sleep_level",
            "engine.enable_sleep",
        )
        return
    saves = {
        "every_n_steps": (checkpoint.every_n_steps > 0, "0"),
        "keep_best": (checkpoint.keep_best and evaluation.every_n_steps > 0, "false"),
    }
    for name, (is_on, off) in saves.items():
        if is_on:
            yield error(
                f"engine.sleep_level is 2 and checkpoint.{name} is "
                f"{str(getattr(checkpoint, name)).lower()}: the engine also sleeps while a "
                "checkpoint is written, which is after the weights were delivered, and would have "
                f"none in the next step. Set engine.sleep_level to 1, or checkpoint.{name} to "
                f"{off}.",
                "engine.sleep_level",
                f"checkpoint.{name}",
            )


def check_vllm_bench(engine: EngineConfig) -> Iterator[Finding]:
    """`hone bench engine` measures the embedded engine."""
    if engine.backend == "vllm":
        yield error(
            "engine.backend is vllm, but `hone bench engine` measures the embedded engine and runs "
            "vLLM beside it where against is vllm. Set engine.backend to embedded.",
            "engine.backend",
            "against",
        )
    else:
        yield from _sleep_level(engine)


def _sleep_level(engine: EngineConfig) -> Iterator[Finding]:
    """Whether a level is set for the embedded engine, which has none."""
    if differs(engine, "sleep_level"):
        yield warning(
            "engine.sleep_level has no effect with engine.backend embedded, which has no "
            "weights of its own to drop. Remove it.",
            "engine.sleep_level",
            "engine.backend",
        )
