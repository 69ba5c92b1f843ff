"""The table on the console, the JSON file and the plot beside it."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import hone
from hone.bench.bench import BenchResult
from hone.bench.measure import EngineRun, Step
from hone.bench.plot import draw
from hone.bench.summary import Quantiles, Summary
from hone.observe.whole_file import whole_file

__all__ = ["as_json", "print_table", "write_files"]


def write_files(result: BenchResult) -> Path:
    """Write `cfg.output`, and the plot beside it; returns the path of the plot."""
    output = result.cfg.output
    plot = output.with_suffix(".svg")
    with whole_file(output) as file:
        json.dump(as_json(result), file, indent=1)
        file.write("\n")
    with whole_file(plot) as file:
        file.write(draw(result))
    return plot


def as_json(result: BenchResult) -> dict[str, Any]:
    """All numbers: what was measured with what, a summary for each engine, and every step."""
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
            "hone": hone.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "config": result.cfg.model_dump(mode="json"),
        "engines": {
            run.name: {
                "version": run.version,
                "warmup_s": run.warmup_s,
                "summary": summaries[run.name].as_dict(),
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
    """One row a number, one column an engine; beside vLLM also ours over theirs."""
    workload, peaks = result.workload, result.limits.peaks
    names = [f"{run.name} {run.version}" for run in result.runs]
    table = Table("", box=None)
    for name in names:
        table.add_column(name, justify="right", no_wrap=True)
    if len(names) > 1:
        table.add_column(f"{result.runs[0].name} / {result.runs[1].name}", justify="right")
    for label, values, form in _rows(list(result.summaries.values())):
        cells = ["\N{EN DASH}" if value is None else form(value) for value in values]
        if len(values) > 1:
            cells.append(_ratio(*values[:2]))
        table.add_row(label, *cells)
    console.print(_title(result), style="bold", markup=False)
    console.print(table)
    console.print(
        f"limit: {result.limits.total_s(workload):.3f} s on {peaks.name} "
        f"({peaks.bytes_per_s / 1e12:.3g} TB/s, {peaks.flops_per_s / 1e12:.3g} TFLOP/s, "
        f"{peaks.source}): weights once a step, every sequence's own keys and values, all products"
    )


def _title(result: BenchResult) -> str:
    workload = result.workload
    return (
        f"{result.model_name}, {workload.name}: {len(workload.requests)} requests, "
        f"{sum(workload.prompt_lengths):,} prompt and {workload.num_output_tokens:,} output tokens"
    )


_Row = tuple[str, list[float | None], Callable[[float], str]]


def _rows(columns: list[Summary]) -> Iterator[_Row]:
    """Label, a value for each engine, and how it is written."""

    def row(
        label: str, read: Callable[[Summary], float | None], form: Callable[[float], str]
    ) -> _Row:
        return label, [read(column) for column in columns], form

    yield row("output tokens/s", lambda x: x.tokens_per_s, "{:,.0f}".format)
    yield row("total time", lambda x: x.total_s, _seconds)
    yield row("share of the limit", lambda x: x.share_of_limit, "{:.1%}".format)
    batches = {f"{x.decode.batch}" for x in columns if x.decode}
    if batches:
        label = f"decode step, batch {' and '.join(sorted(batches))}"
        yield row(label, lambda x: x.decode and x.decode.step_s, _seconds)
        yield row(
            "its share of the limit",
            lambda x: x.decode and x.decode.share_of_limit,
            "{:.1%}".format,
        )
    for quantile in ("p50", "p90", "p99"):
        yield row(f"step {quantile}", _quantile("step_s", quantile), _seconds)
    for quantile in ("p50", "p90", "p99"):
        yield row(f"first token {quantile}", _quantile("first_token_s", quantile), _seconds)
    yield row("KV cache in use, mean", lambda x: x.kv_cache_usage_mean, "{:.1%}".format)
    yield row("KV cache in use, most", lambda x: x.kv_cache_usage_max, "{:.1%}".format)
    yield row("preemptions", lambda x: x.num_preemptions, "{:,.0f}".format)
    yield row("prompt tokens from the cache", lambda x: x.cached_prompt_share, "{:.1%}".format)
    yield row("engine start", lambda x: x.start_s, _seconds)
    yield row("cold start to full speed", lambda x: x.cold_start_s, _seconds)


def _quantile(times: str, quantile: str) -> Callable[[Summary], float]:
    def read(summary: Summary) -> float:
        quantiles: Quantiles = getattr(summary, times)
        return getattr(quantiles, quantile)

    return read


def _ratio(ours: float | None, theirs: float | None) -> str:
    if ours is None or not theirs:
        return "\N{EN DASH}"
    return f"{ours / theirs:.2f}x"


def _seconds(value: float) -> str:
    if value < 1e-3:
        return f"{value * 1e6:.0f} us"
    return f"{value * 1e3:.3g} ms" if value < 1 else f"{value:.4g} s"
