"""The table on the console and the JSON file of `hone bench engine`."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable
from dataclasses import asdict, fields
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from hone.observe.whole_file import whole_file
from hone.tools.bench.bench import BenchResult
from hone.tools.bench.measure import EngineRun, Step
from hone.tools.bench.summary import Summary
from hone.version import __version__

__all__ = ["as_json", "print_table", "write_file"]


def write_file(result: BenchResult) -> None:
    """Write `cfg.output`."""
    with whole_file(result.cfg.output, "output") as file:
        json.dump(as_json(result), file, indent=1)
        file.write("\n")


def as_json(result: BenchResult) -> dict[str, Any]:
    """All numbers: the setup, a summary for each engine, and every step."""
    workload, summaries = result.workload, result.summaries
    ours, *others = summaries.values()
    return {
        "workload": {
            "name": workload.name,
            "num_requests": len(workload.requests),
            "num_prompt_tokens": sum(workload.prompt_lengths),
            "num_output_tokens": workload.num_output_tokens,
            "prompt_lengths": workload.prompt_lengths,
            "output_lengths": workload.output_lengths,
        },
        "limit": {
            "total_s": result.limits.total_s(workload),
            "bytes_per_value": result.limits.bytes_per_value,
            "kv_bytes_per_value": result.limits.kv_bytes_per_value,
            "device": asdict(result.limits.peaks),
        },
        "versions": {
            "hone": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "config": result.cfg.model_dump(mode="json"),
        "engines": {
            run.name: {
                "version": run.version,
                "warmup_s": run.warmup_s,
                "summary": asdict(summaries[run.name]),
                "steps": _columns(run),
            }
            for run in result.runs
        },
        "speedup": ours.tokens_per_s / others[0].tokens_per_s if others else None,
    }


def _columns(run: EngineRun) -> dict[str, list[float]]:
    steps = run.measured.steps
    return {
        column.name: [round(getattr(step, column.name), 6) for step in steps]
        for column in fields(Step)
    }


def print_table(result: BenchResult, console: Console) -> None:
    """Print one row per number and one column per engine; with vLLM also the ratio of hone to
    it."""
    workload, peaks = result.workload, result.limits.peaks
    table = Table("", box=None)
    for run in result.runs:
        table.add_column(f"{run.name} {run.version}", justify="right", no_wrap=True)
    if len(result.runs) > 1:
        table.add_column(" / ".join(run.name for run in result.runs), justify="right")
    for label, read, form in _ROWS:
        values = [read(summary) for summary in result.summaries.values()]
        cells = ["\N{EN DASH}" if value is None else form(value) for value in values]
        if len(values) > 1:
            ours, theirs = values
            cells.append(f"{ours / theirs:.2f}x" if ours is not None and theirs else "\N{EN DASH}")
        table.add_row(label, *cells)
    title = (
        f"{result.model_name}, {workload.name}: {len(workload.requests)} requests, "
        f"{sum(workload.prompt_lengths):,} prompt and {workload.num_output_tokens:,} output tokens"
    )
    console.print(title, style="bold", markup=False)
    console.print(table)
    console.print(
        f"limit: {result.limits.total_s(workload):.3f} s on {peaks.name} "
        f"({peaks.bytes_per_s / 1e12:.3g} TB/s, {peaks.flops_per_s / 1e12:.3g} TFLOP/s, "
        f"{peaks.source}): weights once a step, every sequence's own keys and values, all products"
    )


def _seconds(value: float) -> str:
    if value < 1e-3:
        return f"{value * 1e6:.0f} us"
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.4g} s"


_count, _share = "{:,.0f}".format, "{:.1%}".format
_ROWS: tuple[tuple[str, Callable[[Summary], float | None], Callable[[float], str]], ...] = (
    ("output tokens/s", lambda x: x.tokens_per_s, _count),
    ("total time", lambda x: x.total_s, _seconds),
    ("share of the limit", lambda x: x.share_of_limit, _share),
    ("largest decode batch", lambda x: x.decode and x.decode.batch, _count),
    ("its decode step", lambda x: x.decode and x.decode.step_s, _seconds),
    ("its share of the limit", lambda x: x.decode and x.decode.share_of_limit, _share),
    ("step p50", lambda x: x.step_s.p50, _seconds),
    ("step p90", lambda x: x.step_s.p90, _seconds),
    ("step p99", lambda x: x.step_s.p99, _seconds),
    ("first token p50", lambda x: x.first_token_s.p50, _seconds),
    ("first token p90", lambda x: x.first_token_s.p90, _seconds),
    ("first token p99", lambda x: x.first_token_s.p99, _seconds),
    ("KV cache in use, mean", lambda x: x.kv_cache_usage_mean, _share),
    ("KV cache in use, most", lambda x: x.kv_cache_usage_max, _share),
    ("preemptions", lambda x: x.num_preemptions, _count),
    ("prompt tokens from the cache", lambda x: x.cached_prompt_share, _share),
    ("engine start", lambda x: x.start_s, _seconds),
    ("cold start to full speed", lambda x: x.cold_start_s, _seconds),
)
