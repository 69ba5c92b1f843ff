"""Which curves a report shows, and their data in the form that the page's script draws.

A chart appears when the run has at least one of its metrics.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from hone.observe.run_folder import RunFolder

__all__ = ["chart_sections", "metric_table", "phase_chart"]

MAX_POINTS = 800


@dataclass(frozen=True, slots=True)
class Chart:
    """Curves that share their axes."""

    title: str
    unit: str
    lines: Mapping[str, str]
    """Label by metric."""
    scale: Literal["linear", "zero", "share", "log"] = "zero"
    """`zero`: the axis starts at 0; `share`: 0 to 100 %."""
    band: tuple[str, str] | None = None
    """Metrics of the lower and upper edge of a shaded band."""


SECTIONS: Mapping[str, tuple[Chart, ...]] = {
    "Learning": (
        Chart(
            "Reward", "", {"reward/mean": "training", "eval/reward/mean": "evaluation"}, "linear"
        ),
        Chart("Loss", "", {"train/loss": "training", "eval/loss": "held out"}, "linear"),
        Chart(
            "Completion length",
            "tokens",
            {
                "rollout/completion_tokens/mean": "mean",
                "rollout/completion_tokens/p95": "95th percentile",
            },
        ),
        Chart("Entropy", "nats per token", {"policy/entropy": "policy"}),
        Chart("Gradient norm", "", {"train/grad_norm": "before clipping"}),
        Chart("Learning rate", "", {"train/lr": "peak group"}),
    ),
    "Distance between policies": (
        Chart(
            "Engine and trainer",
            "KL, nats per token",
            {"off_policy/mismatch_kl": "mismatch", "off_policy/kl": "with staleness"},
            "log",
        ),
        Chart(
            "Importance ratio",
            "trainer / engine",
            {"off_policy/ratio/mean": "mean"},
            "linear",
            band=("off_policy/ratio/p05", "off_policy/ratio/p95"),
        ),
        Chart(
            "Policy",
            "KL, nats per token",
            {"policy/approx_kl": "one update", "policy/ref_kl": "from the reference"},
        ),
        Chart("Clipped tokens", "share", {"policy/clip_fraction": "clipped"}, "share"),
    ),
    "Sampling": (
        Chart(
            "Groups and lengths",
            "share",
            {
                "rollout/truncated_share": "truncated",
                "rollout/zero_spread_share": "groups of equal reward",
                "rollout/duplicate_share": "duplicates in a group",
            },
            "share",
        ),
        Chart(
            "Staleness",
            "updates since the group was started",
            {"rollout/staleness/mean": "mean", "rollout/staleness/max": "largest"},
        ),
    ),
    "Speed and memory": (
        Chart(
            "Throughput",
            "tokens/s",
            {"perf/tokens_per_s": "whole step", "perf/generated_tokens_per_s": "generation"},
        ),
        Chart(
            "Share of the hardware limit",
            "limit / measured",
            {"perf/R_gen": "generation", "perf/R_train": "training", "perf/R_step": "whole step"},
            "share",
        ),
        Chart(
            "Engines at work",
            "share of the time",
            {"perf/engine_busy_share": "of all engines"},
            "share",
        ),
        Chart(
            "Memory",
            "GiB",
            {
                "mem/rss_gib": "host",
                "mem/gpu_peak_gib": "GPU peak",
                "mem/gpu_free_gib": "GPU free",
            },
        ),
    ),
}


def chart_sections(run: RunFolder) -> list[dict[str, Any]]:
    """Sections of charts that have data: `{"title", "charts": [{"title", "unit", ...}]}`."""
    names = run.metric_names
    parts = {
        name: name.split("/")[1]
        for name in names
        if name.startswith("reward/") and name.count("/") == 2 and name.endswith("/mean")
    }
    sections: list[dict[str, Any]] = []
    for title, charts in SECTIONS.items():
        if title == "Sampling" and len(parts) > 1:
            charts = (Chart("Reward parts", "mean", parts, "linear"), *charts)
        drawn = [_chart_data(run, chart) for chart in charts if chart.lines.keys() & {*names}]
        if drawn:
            sections.append({"title": title, "charts": drawn})
    return sections


def _chart_data(run: RunFolder, chart: Chart) -> dict[str, Any]:
    names = set(run.metric_names)
    band = chart.band if chart.band is not None and names.issuperset(chart.band) else ()
    lines = [metric for metric in chart.lines if metric in names]
    columns = {metric: [row.get(metric) for row in run.rows] for metric in (*lines, *band)}
    steps, columns = _thin([int(row["step"]) for row in run.rows], columns)
    return {
        "title": chart.title,
        "unit": chart.unit,
        "scale": chart.scale,
        "steps": steps,
        "lines": [
            {
                "label": chart.lines[metric],
                # Measured at some steps only: drawn with a dot at each.
                "sparse": metric.startswith("eval/"),
                "values": columns[metric],
            }
            for metric in lines
        ],
        "band": [columns[edge] for edge in band] or None,
    }


def phase_chart(run: RunFolder) -> dict[str, Any] | None:
    """Seconds by top-level phase and step, the largest phase first, the unattributed rest last."""
    rest = "time/unattributed_s"
    phases = [
        name
        for name in run.metric_names
        if name.startswith("time/") and name.count("/") == 1 and name not in ("time/step_s", rest)
    ]
    if not phases:
        return None
    totals = {name: sum(run.values(name)) for name in [*phases, rest]}
    phases.sort(key=lambda name: -totals[name])
    ordered = [*phases, rest]
    columns = {name: [row.get(name, 0.0) for row in run.rows] for name in ordered}
    steps, columns = _thin([int(row["step"]) for row in run.rows], columns, max_points=120)
    whole = sum(totals.values()) or 1.0
    return {
        "title": "Time by phase",
        "unit": "seconds per step",
        "steps": steps,
        "lines": [
            {
                "label": name.removeprefix("time/").removesuffix("_s"),
                "rest": name == rest,
                "share": totals[name] / whole,
                "values": columns[name],
            }
            for name in ordered
            if totals[name] > 0
        ],
    }


def metric_table(run: RunFolder) -> list[dict[str, Any]]:
    """Every metric with its first, last, smallest and largest value."""
    rows: list[dict[str, Any]] = []
    for name in run.metric_names:
        values = run.values(name)
        if values:
            rows.append(
                {
                    "name": name,
                    "first": values[0],
                    "last": values[-1],
                    "min": min(values),
                    "max": max(values),
                }
            )
    return rows


def _thin(
    steps: Sequence[int],
    columns: Mapping[str, Sequence[float | None]],
    *,
    max_points: int = MAX_POINTS,
) -> tuple[list[int], dict[str, list[float | None]]]:
    """At most `max_points` points: means over neighbouring steps, labelled by the last of them."""
    width = math.ceil(len(steps) / max_points) or 1
    cuts = range(0, len(steps), width)
    thinned = {
        name: [_mean(values[cut : cut + width]) for cut in cuts] for name, values in columns.items()
    }
    return [steps[min(cut + width, len(steps)) - 1] for cut in cuts], thinned


def _mean(values: Sequence[float | None]) -> float | None:
    held = [value for value in values if value is not None]
    return float(f"{sum(held) / len(held):.6g}") if held else None
