"""Checks with a few steps of training and sampling on the first device, by the code of `hone
bench`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hone.config.bench import BenchModelConfig, BenchTrainModelConfig, DecodeConfig, RowsConfig
from hone.config.planning import PlanningConfig
from hone.config.tree import BenchEngineConfig, BenchTrainConfig
from hone.families.shape import ModelShape
from hone.hardware import GPUS, Peaks, gpu_peaks
from hone.tools.doctor.machine import Finding, Machine, judge
from hone.tools.plan.compute_time import Compute

__all__ = ["sampling", "training"]

WORK_S = 180.0
"""Time limit. The first run on a GPU compiles."""
_LEAST_SHARE = 0.5
"""Lowest healthy share of the rate that `hone plan` assumes."""
Rate = tuple[float, float]
"""Tokens per second: measured and assumed; the latter is 0 on a CPU, whose rate is unknown."""


def training(machine: Machine) -> Finding:
    """Check a few optimizer steps."""
    return _judge(machine, _train)


def sampling(machine: Machine) -> Finding:
    """Check a few decode steps of the embedded engine."""
    return _judge(machine, _sample)


def _judge(machine: Machine, measure: Callable[[bool, int], Rate]) -> Finding:
    (rate,) = machine.ask([0], partial(measure, machine.torch.num_gpus > 0), WORK_S)
    measured, assumed = rate
    return judge(
        f"{measured:,.0f} tokens/s of a small model",
        f"{_LEAST_SHARE * assumed:,.0f} or more" if assumed else "that it works",
        (
            measured < _LEAST_SHARE * assumed,
            "slow",
            "First what is not ok above. Else `hone bench train` and `hone bench engine` say where "
            "the time goes.",
        ),
    )


def _make_model(folder: str, on_gpu: bool) -> None:
    """Write a small model. On a GPU it has the width of Qwen3-0.6B, but fewer layers and tokens, so
    that it starts sooner."""
    from hone.models.tiny import SHAPES, make_tiny_model

    wide: dict[str, Any] = {**SHAPES["qwen3-0.6b"], "num_layers": 8, "vocab_size": 32768}
    make_tiny_model(folder, weights=False, **(wide if on_gpu else {}))


def _train(on_gpu: bool, index: int) -> Rate:
    from hone.tools.bench.train import bench_train

    with TemporaryDirectory() as folder:
        _make_model(folder, on_gpu)
        rows = RowsConfig(per_step=16, tokens=1024) if on_gpu else RowsConfig(per_step=4, tokens=64)
        model = BenchTrainModelConfig(path=folder, init="random")
        result = bench_train(BenchTrainConfig(model=model, rows=rows, steps=3, warmup_steps=1))
        shape = ModelShape.from_config(json.loads((Path(folder) / "config.json").read_bytes()))
    if not on_gpu:
        return result.tokens_per_s, 0.0
    gpu = gpu_peaks(result.rates.device) or _peaks_of(result.rates.measured_flops_per_s)
    lengths = [rows.tokens] * rows.per_step
    assumed_s = 3 * Compute(gpu, PlanningConfig()).forward_s(shape, lengths)
    return result.tokens_per_s, rows.per_step * rows.tokens / assumed_s


def _peaks_of(flops_per_s: float) -> Peaks:
    """Peaks of a GPU that is not in the table. Its memory is assumed to be as fast as an H200's in
    proportion."""
    known = GPUS[0]
    bytes_per_s = known.bytes_per_s * flops_per_s / known.flops_per_s
    return replace(known, name="GPU", flops_per_s=flops_per_s, bytes_per_s=bytes_per_s)


def _sample(on_gpu: bool, index: int) -> Rate:
    from hone.tools.bench.bench import bench_engine

    with TemporaryDirectory() as folder:
        _make_model(folder, on_gpu)
        decode = (
            DecodeConfig(batch=64, context=512)
            if on_gpu
            else DecodeConfig(batch=8, context=64, steps=16)
        )
        model = BenchModelConfig(path=folder, init="random")
        cfg = BenchEngineConfig(model=model, workload="decode", decode=decode)
        summary = bench_engine(cfg).summaries["hone"]
    if not on_gpu or summary.decode is None:
        return summary.tokens_per_s, 0.0
    assumed, steps = PlanningConfig(), summary.decode
    step_s = steps.step_s * steps.share_of_limit / assumed.decode_share + assumed.decode_overhead_s
    return steps.batch / steps.step_s, steps.batch / step_s
