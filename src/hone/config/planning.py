"""What `hone plan` assumes of devices, lengths and the speed that programs reach."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from hone.config.base import Section
from hone.models.settings import TrainedModelConfig

__all__ = ["GPUS_UNSET", "LengthsConfig", "PlannedModelConfig", "PlanningConfig"]

GPUS_UNSET = 8
"""GPUs of a recipe that names none."""


class PlannedModelConfig(TrainedModelConfig):
    """The model, of which only the shape counts."""

    path: str = ""
    """Folder in the Hugging Face layout, of which `config.json` is read, or the hub name of a
    public shape, such as `Qwen/Qwen3-0.6B`."""

    shape: str | None = None
    """Public shape, in place of `path`: qwen3-8b, qwen2.5-7b, llama-3.1-70b, mistral-7b-v0.3 and
    others of these families."""


class LengthsConfig(Section):
    """Completion lengths, all cut at `rollout.max_completion_tokens`."""

    distribution: Literal["fixed", "uniform", "lognormal", "file"] = "lognormal"
    """`fixed`: all are `median`. `uniform`: 1 to twice `median`. `lognormal`: of `median` and
    `sigma`. `file`: drawn from `path`."""

    median: float = Field(default=800.0, ge=1)
    """Median length, in tokens."""

    sigma: float = Field(default=0.7, ge=0)
    """Standard deviation of the logarithm of log-normal lengths."""

    path: Path | None = None
    """JSONL file of measured lengths; a line has `tokens` (a number) or `token_ids` (a list), as
    `samples.jsonl` of a run folder has."""


class PlanningConfig(Section):
    """Devices, lengths, and what share of the hardware's limits programs reach. Defaults are from
    one H200 (benchmarks/README.md) where nothing else is said."""

    gpus: int | None = Field(default=None, ge=1)
    """GPUs in all; unset: those that `cluster` asks for, 8 where it has no engines."""

    gpu: str = "H200"
    """Their type, a name of hone's table of devices."""

    host_gib: float | None = Field(default=None, gt=0)
    """Memory that each host has for the run, in GiB: what is offloaded must fit. Unset: where this
    host has such a GPU, its own; else nothing is refused for it, and what a host must hold is
    told."""

    goal: Literal["throughput", "on_policy", "memory"] = "throughput"
    """What is ranked first: the most tokens/s; of those whose samples are all of the newest weights
    the most tokens/s; or the least memory of the fullest GPU."""

    prompt_tokens: int = Field(default=256, ge=1)
    """Tokens of every prompt."""

    lengths: LengthsConfig = LengthsConfig()
    """Completion lengths."""

    staleness: tuple[int, ...] = (1, 2)
    """Values of `pipeline.max_staleness` that are tried, besides the recipe's own."""

    steps: int = Field(default=20, ge=4)
    """Updates of each run, of which the first quarter is not counted."""

    decode_share: float = Field(default=0.9, gt=0, le=1)
    """Share of the limit (bandwidth, matrix rate) that decode steps reach, `decode_overhead_s`
    apart."""

    decode_overhead_s: float = Field(default=0.0008, ge=0)
    """Seconds of a decode step that do not depend on the batch: 0.5 ms of an engine alone, 0.8 of
    one in a run."""

    prefill_share: float = Field(default=0.5, gt=0, le=1)
    """Share of the matrix rate that computing prompts reaches."""

    training_share: float = Field(default=0.88, gt=0, le=1)
    """Share of the matrix rate that products of very wide models reach in training. On an H200
    those of 8B reach 0.76, of 0.6B 0.54, and attention 0.24 to 0.36
    (`hone.tools.plan.compute_time`)."""

    training_scaling: float = Field(default=0.93, gt=0, le=1)
    """The same of several trainers against one."""

    two_gpus_layer_s: float = Field(default=2.3e-5, ge=0)
    """Seconds that a layer takes in a decode step of an engine over two GPUs, besides a GPU's share
    of the work and what is sent: ranks meet twice, and half of a kernel's work takes more than half
    of its time. Five steps on two H200, within 5 %."""

    more_gpus_layer_s: float = Field(default=1.2e-4, ge=0)
    """The same over four GPUs and more: what one step of 30B-A3B with an engine over four took
    longer than with two over two. Eight have not been measured."""

    sync_bytes_per_s: float = Field(default=5e10, gt=0)
    """Rate at which weights reach engines on devices of their own, proof included: 5e10 of 1.7B in
    a run, 1.7e11 of 8B by itself."""

    switch_s: float = Field(default=0.15, ge=0)
    """Seconds a step for sync, sleep and wake where engines share the trainers' devices."""

    overhead_s: float = Field(default=0.15, ge=0)
    """Seconds a step for rows and records, in which the trainers wait."""
