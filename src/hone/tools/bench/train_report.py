"""Table and JSON file of `hone bench train`."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from hone.observe.whole_file import whole_file
from hone.tools.bench.train import StepTime, TrainResult
from hone.tools.bench.train_memory import KINDS, Kind
from hone.trainer.cost import TrainingMemory
from hone.version import __version__

__all__ = ["as_json", "print_table", "write_file"]

_LABELS: dict[Kind, str] = {"other": "logits and other buffers"}


def write_file(result: TrainResult) -> None:
    """Write `cfg.output`."""
    with whole_file(result.cfg.output, "output") as file:
        json.dump(as_json(result), file, indent=1)
        file.write("\n")


def as_json(result: TrainResult) -> dict[str, Any]:
    """All numbers: seconds, bytes, FLOPs."""
    rates, memory, typical = result.rates, result.memory, result.typical
    rows = result.cfg.rows
    return {
        "workload": {"num_rows": rows.per_step, "num_tokens": rows.per_step * rows.tokens},
        "model": {
            "name": result.model_name,
            "num_params": result.num_params,
            "num_trained_params": result.num_trained_params,
        },
        "speed": {
            "tokens_per_s": result.tokens_per_s,
            "tokens_per_s_per_device": result.tokens_per_s / rates.num_devices,
            **asdict(typical),
            "num_micro_batches": result.num_micro_batches,
            "start_s": result.start_s,
            "first_step_s": result.first_step_s,
            "model_flops_per_step": result.flops,
            "utilisation": {
                part: {
                    "of_measured": result.utilisation(seconds, rates.measured_flops_per_s),
                    "of_datasheet": result.utilisation(seconds, rates.datasheet_flops_per_s),
                }
                for part, seconds in _parts(typical)
            },
        },
        "memory": {
            "peak": result.peak,
            "peak_reserved": result.allocator_reserved,
            "played_back": {
                "peak": memory.peak,
                "phase": memory.phase,
                "at_peak": memory.at_peak,
                "largest": memory.largest,
                "host": memory.host,
            },
            "planned": result.plan.as_dict(),
        },
        "device": asdict(rates),
        "steps": {name: [getattr(s, name) for s in result.steps] for name in StepTime.__slots__},
        "versions": {
            "hone": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "config": result.cfg.model_dump(mode="json"),
    }


def print_table(result: TrainResult, console: Console) -> None:
    """Print speed, then memory by kind, measured and planned."""
    rows = result.cfg.rows
    title = f"{result.model_name}: {rows.per_step:,} rows of {rows.tokens:,} tokens a step"
    console.print(title, style="bold", markup=False)
    speed = Table("", box=None, show_header=False)
    speed.add_column(justify="right", no_wrap=True)
    for label, value in _speed(result):
        speed.add_row(label, value)
    console.print(speed)
    console.print(_memory(result))


def _memory(result: TrainResult) -> Table:
    memory, plan = result.memory, result.plan
    unit, size = ("GiB", 1 << 30) if result.peak >= 1 << 30 else ("MiB", 1 << 20)

    def shown(num_bytes: int) -> str:
        return f"{num_bytes / size:,.2f}"

    table = Table(f"{unit} on a device", box=None)
    for heading in ("at the peak", "at most", "planned"):
        table.add_column(heading, justify="right", no_wrap=True)
    planned = _planned(plan)
    for kind in KINDS:
        numbers = (memory.at_peak[kind], memory.largest[kind], planned[kind])
        table.add_row(_LABELS.get(kind, kind), *map(shown, numbers))
    peak = f"peak, in {memory.phase}"
    table.add_row(peak, shown(memory.peak), "", shown(plan.peak), style="bold")
    for label, num_bytes in (
        ("peak that torch reports", result.allocator_peak),
        ("with gaps between blocks", result.allocator_reserved),
        ("memory of the device", result.rates.memory_bytes),
    ):
        if num_bytes is not None:
            table.add_row(label, shown(num_bytes))
    if memory.host or plan.host:
        table.add_row("in host memory", f"{shown(memory.host)}", "", shown(plan.host))
    return table


def _speed(result: TrainResult) -> Iterator[tuple[str, str]]:
    typical, rates = result.typical, result.rates
    yield "tokens/s", f"{result.tokens_per_s:,.0f}"
    if rates.num_devices > 1:
        yield "tokens/s of each device", f"{result.tokens_per_s / rates.num_devices:,.0f}"
    yield "step", _ms(typical.step_s)
    passes = "micro-batch" if result.num_micro_batches == 1 else "micro-batches"
    label = f"forward and backward, {result.num_micro_batches} {passes}"
    yield label, _ms(typical.forward_backward_s)
    yield "optimizer step", _ms(typical.optimizer_s)
    yield "model TFLOP a step", f"{result.flops / 1e12:,.4g}"
    for source, flops_per_s in (
        ("measured", rates.measured_flops_per_s),
        ("data-sheet", rates.datasheet_flops_per_s),
    ):
        for part, seconds in _parts(typical):
            share = result.utilisation(seconds, flops_per_s)
            if flops_per_s is not None and share is not None:
                rate = f"{source} {flops_per_s / 1e12:.4g} TFLOP/s"
                yield f"utilisation, {part.replace('_', ' and ')}, of {rate}", f"{share:.1%}"
    yield "model and trainer made in", f"{result.start_s:.3g} s"
    yield "first step, with compilation", f"{result.first_step_s:.3g} s"


def _parts(time: StepTime) -> tuple[tuple[str, float], ...]:
    return ("forward_backward", time.forward_backward_s), ("step", time.step_s)


def _planned(plan: TrainingMemory) -> dict[Kind, int]:
    """Planned memory, by the kinds that are measured."""
    return {
        "weights": plan.weights + plan.gathered,
        "masters": plan.masters,
        "gradients": plan.gradients,
        "optimizer": plan.optimizer,
        "activations": plan.activations,
        "other": plan.reducing + max(plan.logits, plan.workspace),
    }


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:,.4g} ms"
