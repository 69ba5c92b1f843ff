"""The curves of a report, and their data in the form that `charts.js` draws.

A chart appears if a run has at least one of its metrics and not all values are 0. For one run the
curves of a chart are its metrics. For several runs each metric has its own chart, and the curves
are the runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from hone.observe.histogram import NUM_BINS
from hone.observe.run_folder import RunFolder
from hone.tools.report.explanations import explanation_of_all
from hone.tools.report.lanes import lanes_chart

__all__ = ["chart_data"]

MAX_POINTS = 4000
"""Most points of a curve; the page shows fewer until it is zoomed in."""
MAX_COLUMNS = 240
"""Most bars or columns of a chart."""


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
        Chart("Reward", "", {"reward/mean": "training", "eval/reward/mean": "evaluation"},
              "linear"),
        Chart("Loss", "", {"train/loss": "training", "eval/loss": "held out"}, "linear"),
        Chart("Completion length", "tokens",
              {"rollout/completion_tokens/mean": "mean",
               "rollout/completion_tokens/p95": "95th percentile"}),
        Chart("Entropy", "nats per token", {"policy/entropy": "policy"}),
        Chart("Gradient norm", "", {"train/grad_norm": "before clipping"}),
        Chart("Learning rate", "",
              {"train/lr": "AdamW", "train/muon_lr": "Muon", "critic/lr": "critic"}),
    ),
    "Preferences": (
        Chart("Margin", "reward of the chosen less the other's",
              {"rewards/margins": "training", "eval/rewards/margins": "held out",
               "margin": "training", "eval/margin": "held out"}, "linear"),
        Chart("Pairs in the right order", "share",
              {"rewards/accuracies": "training", "eval/rewards/accuracies": "held out",
               "accuracy": "training", "eval/accuracy": "held out"}, "share"),
        Chart("Rewards", "of the chosen and the others",
              {"max_reward": "largest", "mean_reward": "mean", "min_reward": "smallest"}, "linear"),
        Chart("Implicit rewards", "",
              {"rewards/chosen": "chosen", "rewards/rejected": "rejected"}, "linear"),
        Chart("Log-probabilities", "nats per completion",
              {"logps/chosen": "chosen", "logps/rejected": "rejected"}, "linear"),
        Chart("Odds of the chosen", "log of the ratio", {"log_odds_chosen": "training"}, "linear"),
        Chart("Divergence in the loss", "nats per completion", {"kl": "from the reference"}),
    ),
    "Distance between policies": (
        Chart("Engine and trainer", "KL, nats per token",
              {"off_policy/mismatch_kl": "mismatch", "off_policy/kl": "with staleness"}, "log"),
        Chart("Importance ratio", "trainer / engine", {"off_policy/ratio/mean": "mean"}, "linear",
              band=("off_policy/ratio/p05", "off_policy/ratio/p95")),
        Chart("Movement of the policy", "KL, nats per token",
              {"policy/approx_kl": "one update", "policy/ref_kl": "from the reference"}),
        Chart("Clipped tokens", "share", {"policy/clip_fraction": "clipped"}, "share"),
        Chart("Masked tokens", "share of those with an advantage of this sign",
              {"policy/masked_share/positive": "positive",
               "policy/masked_share/negative": "negative"}, "share"),
    ),
    "Sampling": (
        Chart("Groups and lengths", "share",
              {"rollout/truncated_share": "truncated",
               "rollout/zero_spread_share": "groups of equal reward",
               "rollout/duplicate_share": "duplicates in a group",
               "rollout/failed_share": "failed"}, "share"),
        Chart("Staleness", "updates since the group was started",
              {"rollout/staleness/mean": "mean", "rollout/staleness/max": "largest"}),
    ),
    "Speed and memory": (
        Chart("Throughput", "tokens/s",
              {"perf/tokens_per_s": "whole step", "perf/generated_tokens_per_s": "generation"}),
        Chart("Share of the hardware limit", "limit / measured",
              {"perf/R_gen": "generation", "perf/R_train": "training", "perf/R_step": "whole step",
               "perf/mfu": "training, of the data sheet (MFU)"}, "share"),
        Chart("Use and waiting", "share of the time",
              {"perf/engine_busy_share": "engines at work",
               "perf/gpu_utilization": "GPU of the trainers",
               "perf/wait_for_samples_share": "trainers wait for samples",
               "perf/wait_for_weights_share": "engines wait for weights"}, "share"),
        Chart("Memory by role", "GiB",
              {"mem/policy_gib": "policy", "mem/critic_gib": "critic",
               "mem/reference_gib": "reference", "mem/teacher_gib": "teacher",
               "mem/engine_weights_gib": "engines' own weights",
               "mem/engine_cache_gib": "engines' caches"}),
        Chart("Weight delivery", "bytes/s", {"perf/sync_bytes_per_s": "to engines"}),
        Chart("Network of the busiest host", "bytes/s",
              {"perf/network_sent_bytes_per_s": "sent",
               "perf/network_received_bytes_per_s": "received"}),
        Chart("Memory", "GiB",
              {"mem/rss_gib": "host", "mem/gpu_peak_gib": "GPU peak",
               "mem/gpu_free_gib": "GPU free"}),
    ),
}  # fmt: skip


def chart_data(runs: Sequence[RunFolder]) -> dict[str, Any]:
    """`{"steps": steps of each run, "sections": [{"title", "charts": [...]}], "zero": titles of
    charts left out because all of their values are 0, "why_zero": sentences that explain it}`.

    A chart has `title`, `unit` and `kind`, and curves have `notes`: sentences on what may surprise
    (`hone.tools.report.explanations`). `curves` has `lines`, each with the number of its `run`,
    whose steps its `values` are at; `bars` and `columns` (a histogram for each of its steps, of
    counts where it is `whole`) have `steps` of their own; `lanes` are over time.
    """
    grids = [_thin(run.rows, ()) for run in runs]
    curves, empty = _curves(runs)
    spreads, zero_spreads = _histograms(runs)
    return {
        "steps": [steps for steps, _ in grids],
        "sections": [*curves, *spreads, *_phases(runs)],
        "zero": list(dict.fromkeys([*(chart.title for chart in empty), *zero_spreads])),
        "why_zero": list(dict.fromkeys(note for chart in empty for note in _notes(runs, chart))),
    }


def _curves(runs: Sequence[RunFolder]) -> tuple[list[dict[str, Any]], list[Chart]]:
    """The sections of curves, and the charts whose values are all 0."""
    names = {name for run in runs for name in run.metric_names}
    parts = {
        name: name.split("/")[1]
        for name in sorted(names)
        if name.startswith("reward/") and name.count("/") == 2 and name.endswith("/mean")
    }
    sections: list[dict[str, Any]] = []
    zero: list[Chart] = []
    for title, charts in SECTIONS.items():
        if title == "Sampling" and len(parts) > 1:
            charts = (Chart("Reward parts", "mean", parts, "linear"), *charts)
        charts = tuple(_with_groups(runs, chart) for chart in charts)
        if len(runs) > 1:
            charts = tuple(single for chart in charts for single in _one_metric_each(chart))
        present = [chart for chart in charts if chart.lines.keys() & names]
        empty = [chart for chart in present if _is_zero(runs, chart)]
        drawn = [_chart_of(runs, chart) for chart in present if chart not in empty]
        zero += empty
        if drawn:
            sections.append({"title": title, "charts": drawn})
    return sections, zero


def _is_zero(runs: Sequence[RunFolder], chart: Chart) -> bool:
    """Whether the chart has values, all of them 0."""
    shown = (*chart.lines, *(chart.band or ()))
    values = [value for run in runs for metric in shown for value in run.values(metric)]
    return bool(values) and not any(values)


def _with_groups(runs: Sequence[RunFolder], chart: Chart) -> Chart:
    """The chart of the learning rate with the groups that the optimizers of these runs have; where
    there is one run, with the parameters of each."""
    if "train/lr" not in chart.lines:
        return chart
    present = {m: label for m, label in chart.lines.items() if any(run.values(m) for run in runs)}
    if len(runs) > 1:
        return replace(chart, lines=present)
    trained = "adapters" if runs[0].setting("model.lora.rank") else "all weights"
    named = {
        "train/lr": "embeddings, head, vectors" if "train/muon_lr" in present else trained,
        "train/muon_lr": "hidden matrices",
    }
    lines = {m: f"{label}: {named[m]}" if m in named else label for m, label in present.items()}
    return replace(chart, lines=lines)


def _notes(runs: Sequence[RunFolder], chart: Chart) -> list[str]:
    """What is to be said of the course of a chart's curves."""
    said = (explanation_of_all(metric, runs) for metric in chart.lines)
    return [note for note in dict.fromkeys(said) if note]


def _one_metric_each(chart: Chart) -> list[Chart]:
    if len(chart.lines) == 1:
        return [replace(chart, band=None)]
    return [
        replace(chart, title=f"{chart.title}: {label}", lines={metric: label}, band=None)
        for metric, label in chart.lines.items()
    ]


def _chart_of(runs: Sequence[RunFolder], chart: Chart) -> dict[str, Any]:
    lines: list[dict[str, Any]] = []
    for number, run in enumerate(runs):
        names = set(run.metric_names)
        wanted = [metric for metric in chart.lines if metric in names]
        _, columns = _thin(run.rows, wanted)
        lines += [
            {
                "run": number,
                "label": chart.lines[metric],
                # Measured at some steps only, and drawn with a dot at each.
                "sparse": metric.startswith("eval/"),
                "values": columns[metric],
            }
            for metric in wanted
        ]
    band = chart.band
    if band is not None and set(band) <= set(runs[0].metric_names):
        _, edges = _thin(runs[0].rows, band)
        drawn_band = [edges[edge] for edge in band]
    else:
        drawn_band = None
    return {
        "kind": "curves",
        "title": chart.title,
        "unit": chart.unit,
        "scale": chart.scale,
        "lines": lines,
        "band": drawn_band,
        "notes": _notes(runs, chart),
    }


def _histograms(runs: Sequence[RunFolder]) -> tuple[list[dict[str, Any]], list[str]]:
    """Section of histograms (rewards, lengths and staleness of all samples of each training step),
    and the titles of those that are all 0."""
    charts: list[dict[str, Any]] = []
    zero: list[str] = []
    for run in runs:
        rows = [row for row in run.histograms() if row.get("split") == "train"]
        for name, title, unit, is_whole in (
            ("reward", "Rewards", "share of a step's samples", False),
            ("completion_tokens", "Lengths", "tokens, share of a step's samples", True),
            ("staleness", "Staleness", "updates behind, share of a step's samples", True),
        ):
            recorded = [(int(row["step"]), row[name]) for row in rows if name in row]
            if len(recorded) < 2:
                continue
            named = f"{title} of {run.name}" if len(runs) > 1 else title
            if all(np.allclose(_values(row)[0], 0) for _, row in recorded):
                zero.append(named)
                continue
            chart = {"kind": "columns", "title": named, "unit": unit, "whole": is_whole}
            charts.append(chart | _columns(recorded))
    return [{"title": "Spread of all samples", "charts": charts}] if charts else [], zero


def _columns(recorded: Sequence[tuple[int, Mapping[str, Any]]]) -> dict[str, Any]:
    """Histograms on common bins, with neighbouring steps added up: `{"low", "high", "steps",
    "shares"}`. `shares` has a list of `NUM_BINS` shares for each step."""
    values = [_values(row) for _, row in recorded]
    low = min(float(middles.min()) for middles, _ in values)
    high = max(float(middles.max()) for middles, _ in values)
    if low == high:
        low, high = low - 0.5, high + 0.5
    width = math.ceil(len(recorded) / MAX_COLUMNS)
    steps: list[int] = []
    shares: list[list[float]] = []
    for cut in range(0, len(recorded), width):
        middles, counts = map(np.concatenate, zip(*values[cut : cut + width], strict=True))
        merged, _ = np.histogram(middles, NUM_BINS, (low, high), weights=counts)
        steps.append(recorded[min(cut + width, len(recorded)) - 1][0])
        shares.append([round(share, 4) for share in (merged / merged.sum()).tolist()])
    return {"low": low, "high": high, "steps": steps, "shares": shares}


def _values(row: Mapping[str, Any]) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """Positions and counts of a histogram's values: the middle of a bin, or its outer edge for the
    smallest and the largest."""
    counts = np.asarray(row["counts"], dtype=np.float64)
    edges = np.linspace(row["low"], row["high"], len(counts) + 1)
    middles = (edges[:-1] + edges[1:]) / 2
    middles[0], middles[-1] = edges[0], edges[-1]
    return middles[counts > 0], counts[counts > 0]


def _phases(runs: Sequence[RunFolder]) -> list[dict[str, Any]]:
    sections: list[dict[str, Any]] = []
    drawn = (("Where the time went", _phase_chart), ("What each device did", lanes_chart))
    for title, draw in drawn:
        charts = [
            chart | ({"title": f"{chart['title']} of {run.name}"} if len(runs) > 1 else {})
            for run in runs
            if (chart := draw(run)) is not None
        ]
        if charts:
            sections.append({"title": title, "charts": charts})
    return sections


def _phase_chart(run: RunFolder) -> dict[str, Any] | None:
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
    steps, columns = _thin(run.rows, ordered, max_points=MAX_COLUMNS, missing=0.0)
    whole = sum(totals.values()) or 1.0
    return {
        "kind": "bars",
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


def _thin(
    rows: Sequence[Mapping[str, Any]],
    metrics: Sequence[str],
    *,
    max_points: int = MAX_POINTS,
    missing: float | None = None,
) -> tuple[list[int], dict[str, list[float | None]]]:
    """Reduce to at most `max_points` points: means over neighbouring steps, labelled by the last of
    them."""
    width = math.ceil(len(rows) / max_points) or 1
    cuts = range(0, len(rows), width)
    thinned = {
        name: [_mean([row.get(name, missing) for row in rows[cut : cut + width]]) for cut in cuts]
        for name in metrics
    }
    return [int(rows[min(cut + width, len(rows)) - 1]["step"]) for cut in cuts], thinned


def _mean(values: Sequence[float | None]) -> float | None:
    present = [value for value in values if value is not None]
    return float(f"{sum(present) / len(present):.6g}") if present else None
