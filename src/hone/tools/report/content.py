"""The content of a report, of one run or several, as plain values for one template.

A `Page` holds everything. For several runs it compares them: results and differences in columns,
curves of one metric in one chart.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from hone.observe.differences import DASH, differences, flat
from hone.observe.run_folder import Kind, RunFolder
from hone.tools.report.charts import chart_data
from hone.tools.report.samples import SampleStore, sample_store
from hone.tools.report.settings import unequal_settings

__all__ = ["Page", "describe"]

_KINDS: Mapping[Kind, str] = {
    "rl": "reinforcement learning",
    "sft": "supervised fine-tuning",
    "dpo": "preference optimisation",
    "reward-model": "reward modelling",
    "eval": "evaluation",
    "generate": "generation",
}

_MAX_UNKNOWN = 5
"""Most keys of other versions that a comparison names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """A headline number."""

    title: str
    value: str
    note: str
    change: str = ""
    """Change since the first measurement; its `tone` is `good`, `bad` or `flat`."""
    tone: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class AlarmLine:
    """Alarms of one name and metric: the latest, and the steps of earlier ones."""

    step: Any
    metric: str
    value: str
    limit: str
    text: str
    earlier: Sequence[Any]
    """Steps of earlier alarms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """A table with cells as text. The first column is the name of the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""
    is_folded: bool = False
    is_text: bool = False
    """Whether cells are words, not numbers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunSummary:
    """The part of the page on one run."""

    name: str
    kind: str
    status: str
    facts: Sequence[tuple[str, str]]
    error: Mapping[str, Any] | None
    ending: str
    """Cause of the end of a run before its first step."""
    alarms: Sequence[AlarmLine]
    has_steps: bool
    events: Sequence[tuple[str, Mapping[str, Any]]]
    config_text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    """A report."""

    title: str
    written: str
    runs: Sequence[RunSummary]
    notes: Sequence[str]
    """Notes at the top."""
    tiles: Sequence[Tile]
    results: Sequence[Table]
    """Tables above the charts."""
    charts: Mapping[str, Any]
    """Result of `chart_data`, with the `names` of the runs."""
    samples: SampleStore | None
    tables: Sequence[Table]
    """Tables below the samples."""
    is_live: bool = False
    """Whether page and samples are served while the run goes on."""
    stamp: str = ""
    """Stamp of the files that a live page was made from."""


def describe(runs: Sequence[RunFolder], *, stamp: str | None = None) -> Page:
    """The page of a run, or the comparison of several. With a `stamp` it is a live page."""
    names = [run.name for run in runs]
    samples = sample_store(runs) if stamp is None else None
    several = len(runs) > 1
    results = [*_comparison(runs)] if several else [*_evaluation_by_command(runs[0])]
    tables = [] if several else [_evaluations(runs[0]), _metrics(runs[0])]
    return Page(
        title=" / ".join(names),
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        runs=[_summary(run) for run in runs],
        notes=_notes(runs, samples),
        tiles=[] if several else _tiles(runs[0]),
        results=[table for table in results if table.rows],
        charts={"names": names, **chart_data(runs)},
        samples=samples,
        tables=[table for table in tables if table.rows],
        is_live=stamp is not None,
        stamp=stamp or "",
    )


def _summary(run: RunFolder) -> RunSummary:
    return RunSummary(
        name=run.name,
        kind=_KINDS[run.kind],
        status=run.status,
        facts=_facts(run),
        error=_error(run.error),
        ending=(run.end or {}).get("message", "") if run.status == "stopped" else "",
        alarms=_alarms(run.events),
        has_steps=bool(run.rows),
        events=[_event(event) for event in run.events if event.get("kind") != "alarm"],
        config_text=run.config_text,
    )


def _notes(runs: Sequence[RunFolder], samples: SampleStore | None) -> list[str]:
    notes: list[str] = []
    if len({run.kind for run in runs}) > 1:
        listed = "; ".join(f"{run.name}: {_KINDS[run.kind]}" for run in runs)
        notes.append(
            f"These runs are of different kinds ({listed}). Curves and results are shown together "
            "where they have the same metric, which need not mean the same: a loss of one kind is "
            "not that of another."
        )
    notes += _unequal_rewards(runs)
    for run in runs:
        of_run = f" of {run.name}" * (len(runs) > 1)
        notes += [
            f"Settings{of_run} have changed after step {event.get('step')}: "
            f"{'; '.join(event.get('settings', []))}. What stands before was made with the earlier "
            "ones."
            for event in run.events
            if event.get("kind") == "changed"
        ]
    if samples is not None and samples.left_out:
        notes.append(samples.left_out)
    return notes


def _unequal_rewards(runs: Sequence[RunFolder]) -> list[str]:
    """Note that runs are rewarded by different functions."""
    keys = ("reward.functions", "reward.model", "env")
    rewarded = [run for run in runs if _rewards(run)]
    settings = {run.name: [run.setting(key) for key in keys] for run in rewarded}
    if all(each == settings[rewarded[0].name] for each in settings.values()):
        return []
    listed = "; ".join(f"{run.name}: {_rewards(run)}" for run in rewarded)
    return [
        f"These runs are not rewarded by the same functions ({listed}). Rewards, and what is "
        "counted from them, have one name here and are not one measure: compare what `hone eval` "
        "says of each model with one and the same reward."
    ]


def _rewards(run: RunFolder) -> str:
    functions = [
        " ".join(
            [
                _weighted(function["fn"], function.get("weight", 1.0)),
                *([str(function["args"])] if function.get("args") else []),
            ]
        )
        for function in run.setting("reward.functions") or []
    ]
    env, model = run.setting("env.path"), run.setting("reward.model.path")
    if model:
        weight = run.setting("reward.model.weight")
        functions.append(f"{model} x {weight:g}" if weight != 1 else model)
    return " + ".join([*([env] if env else []), *functions])


def _losses(run: RunFolder) -> str | None:
    losses = run.setting("algorithm.loss")
    if not isinstance(losses, Mapping):
        return losses
    return " + ".join(itertools.starmap(_weighted, losses.items()))


def _weighted(name: str, weight: float) -> str:
    return name if weight == 1.0 else f"{name} x {weight:g}"


def _facts(run: RunFolder) -> list[tuple[str, str]]:
    """Facts about the run, in a few words each."""
    steps = run.setting("run.steps")
    done = run.rows[-1]["step"] if run.rows else 0
    split = "eval" if run.kind == "eval" and run.setting("data.eval") else "train"
    sources = run.setting(f"data.{split}") or []
    seconds = run.values("time/step_s")
    trains = run.kind not in ("eval", "generate")
    facts = [
        ("Model", run.setting("model.path")),
        ("Data", ", ".join(Path(source["path"]).name for source in sources)),
        ("Algorithm", run.setting("algorithm.advantage") or _losses(run)),
        ("Steps", (f"{done:,} of {steps:,}" if steps else f"{done:,}") if trains else None),
        ("Duration", _duration(sum(seconds)) if seconds else None),
        ("Device", run.environment.get("device")),
        ("Seed", run.setting("run.seed")),
    ]
    return [(name, str(value)) for name, value in facts if value not in (None, "")]


def _tiles(run: RunFolder) -> list[Tile]:
    """Headline numbers: what improved, and how fast."""
    tiles: list[Tile] = []
    thresholds = run.values("eval/pass_threshold")
    passing = f" (score \N{GREATER-THAN OR EQUAL TO} {thresholds[-1]:g})" if thresholds else ""
    for metric, title, better in (
        ("eval/reward/mean", "Evaluation reward", 1),
        ("eval/pass@1", f"Evaluation pass@1{passing}", 1),
        ("eval/rewards/accuracies", "Held-out accuracy", 1),
        ("eval/accuracy", "Held-out accuracy", 1),
        ("eval/loss", "Held-out loss", -1),
        ("reward/mean", "Training reward", 1),
        ("train/loss", "Training loss", -1),
    ):
        values = run.values(metric)
        if not values or (metric == "train/loss" and run.values("reward/mean")):
            continue
        width = 1 if metric.startswith("eval/") else max(len(values) // 20, 1)
        before, after = statistics.fmean(values[:width]), statistics.fmean(values[-width:])
        is_flat = math.isclose(after, before, rel_tol=1e-3, abs_tol=1e-9)
        tone = "flat" if is_flat else "good" if better * (after - before) > 0 else "bad"
        tiles.append(
            Tile(title=title, value=_number(after), note="one measurement")
            if len(values) == 1
            else Tile(
                title=title,
                value=_number(after),
                note=f"from {_number(before)}",
                change=_signed(after - before),
                tone=tone,
            )
        )
    for metric, title, unit in (
        ("perf/tokens_per_s", "Throughput", "tokens/s"),
        ("perf/R_step", "Hardware limit", "R_step"),
        ("time/step_s", "Step time", "seconds"),
    ):
        if values := run.values(metric):
            median = statistics.median(values)
            value = f"{100 * median:.1f} %" if metric == "perf/R_step" else _number(median)
            tiles.append(Tile(title=title, value=value, note=f"{unit}, median"))
    return tiles


def _error(event: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """The error that ended the run, as values for the page."""
    if event is None:
        return None
    return {name: event.get(name) for name in ("message", "step", "phase", "traceback")}


def _event(event: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Kind and fields of an event, without the traceback, which the error shows."""
    hidden = ("kind", "timestamp_s", "traceback")
    fields = {name: value for name, value in event.items() if name not in hidden}
    return str(event.get("kind")), fields


def _alarms(events: Sequence[Mapping[str, Any]]) -> list[AlarmLine]:
    """Alarms by name and metric: the latest, and the steps of earlier ones. Those on correctness
    come first."""
    grouped: dict[tuple[Any, Any], list[Mapping[str, Any]]] = {}
    for event in events:
        if event.get("kind") == "alarm":
            grouped.setdefault((event.get("name"), event.get("metric")), []).append(event)
    return [
        AlarmLine(
            metric=str(metric),
            step=newest.get("step"),
            value=_number(newest.get("value")),
            limit=_number(newest.get("limit")),
            text=newest.get("advice") or newest.get("message") or "",
            earlier=[event.get("step") for event in earlier],
        )
        for (_, metric), (*earlier, newest) in sorted(
            grouped.items(), key=lambda item: bool(item[1][-1].get("is_tuning"))
        )
    ]


def _evaluation_by_command(run: RunFolder) -> list[Table]:
    """Table of the metrics of `hone eval`."""
    rows = [
        (name.removeprefix("eval/"), _number(value), _number(_stderr(run.evaluation, name)))
        for name, value in sorted(run.evaluation.items())
        if not name.endswith("/stderr")
    ]
    columns = ("metric", "value", "\N{PLUS-MINUS SIGN}")
    return [Table(title="Measured by hone eval", columns=columns, rows=rows)]


def _stderr(scalars: Mapping[str, float], name: str) -> float | None:
    return scalars.get(f"{name.removesuffix('/mean')}/stderr")


def _evaluations(run: RunFolder) -> Table:
    """Table of a training run's evaluations by step; reward and pass rates first."""
    names = [name for name in run.metric_names if name.startswith("eval/")]
    names.sort(
        key=lambda name: (name not in ("eval/reward/mean", "eval/loss"), "pass@" not in name)
    )
    rows = [
        [str(row["step"]), *(_number(row.get(name)) for name in names)]
        for row in run.rows
        if any(name in row for name in names)
    ]
    columns = ["step", *(name.removeprefix("eval/") for name in names)]
    return Table(title="Evaluation", columns=columns, rows=rows)


def _metrics(run: RunFolder) -> Table:
    """Table of every metric with its first, last, smallest and largest value."""
    rows = [
        [name, *map(_number, (values[0], values[-1], min(values), max(values)))]
        for name in run.metric_names
        if (values := run.values(name))
    ]
    columns = ["metric", "first", "last", "smallest", "largest"]
    return Table(title="All metrics", columns=columns, rows=rows, is_folded=True)


def _comparison(runs: Sequence[RunFolder]) -> list[Table]:
    """Tables that compare runs: what differs between their settings and environments, results."""
    names = [run.name for run in runs]
    environments = _unequal_environments(runs)
    results = Table(title="Results", columns=["", *names], rows=_results(runs))
    metrics = Table(
        title="All metrics, last values",
        columns=["metric", *names],
        rows=[
            [name, *(_number(_last(run, name)) for run in runs)]
            for name in dict.fromkeys(name for run in runs for name in run.metric_names)
        ],
        is_folded=True,
    )
    differ = [environments, results] if environments.columns else [results, environments]
    return [_unequal_configurations(runs), *differ, metrics]


def _unequal_configurations(runs: Sequence[RunFolder]) -> Table:
    rows, unknown = unequal_settings(runs)
    kinds = list(dict.fromkeys(run.kind for run in runs))
    note = (
        "Settings that only one kind of run has are not listed."
        if len(kinds) > 1
        else f"All other settings that `hone {kinds[0]}` reads are equal, except for where it "
        "writes to."
    )
    if unknown:
        shown = [*unknown[:_MAX_UNKNOWN], *["..."] * (len(unknown) > _MAX_UNKNOWN)]
        note += (
            " Not compared, because this version of hone does not have them there: "
            f"{', '.join(shown)}."
        )
    return Table(
        title="What differs between the configurations",
        columns=["key", *(run.name for run in runs)] if rows else (),
        rows=rows or [["nothing"]],
        note=note,
        is_text=True,
    )


def _unequal_environments(runs: Sequence[RunFolder]) -> Table:
    rows = differences([flat(run.environment) for run in runs])
    unknown = [run.name for run in runs if not run.environment]
    nothing = "nothing" if len(runs) - len(unknown) > 1 else "not known"
    return Table(
        title="What differs between the environments",
        columns=["", *(run.name for run in runs)] if rows else (),
        rows=rows or [[nothing]],
        note=f"Not recorded of {', '.join(unknown)}." if unknown else "",
        is_text=True,
    )


def _results(runs: Sequence[RunFolder]) -> list[list[str]]:
    """Rows of headline numbers and metrics of `hone eval`, with a column for each run."""
    tiles = [{tile.title: tile for tile in _tiles(run)} for run in runs]
    rows = [["status", *(run.status for run in runs)]]
    for title in dict.fromkeys(title for values_by_title in tiles for title in values_by_title):
        of_runs = [values_by_title.get(title) for values_by_title in tiles]
        notes = {tile.note for tile in of_runs if tile and tile.note.endswith("median")}
        named = f"{title}, {notes.pop()}" if notes else title
        rows.append([named, *(tile.value if tile else DASH for tile in of_runs)])
    measured = dict.fromkeys(name for run in runs for name in sorted(run.evaluation))
    for name in measured:
        if not name.endswith("/stderr"):
            cells = [_with_error(run.evaluation, name) for run in runs]
            rows.append([f"hone eval: {name.removeprefix('eval/')}", *cells])
    return rows


def _with_error(scalars: Mapping[str, float], name: str) -> str:
    error = _stderr(scalars, name)
    value = _number(scalars.get(name))
    return value if error is None else f"{value} \N{PLUS-MINUS SIGN} {_number(error)}"


def _last(run: RunFolder, metric: str) -> float | None:
    values = run.values(metric)
    return values[-1] if values else None


def _number(value: float | None) -> str:
    """Format with about four significant digits and separated thousands."""
    if value is None:
        return DASH
    size = abs(value)
    if size >= 1000:
        return f"{value:,.0f}"
    if size >= 100 or value == int(value):
        return f"{value:.4g}"
    if size >= 0.001:
        return f"{value:.3g}" if size < 1 else f"{value:.4g}"
    return f"{value:.2e}"


def _signed(value: float) -> str:
    sign = "+" if value >= 0 else "\N{MINUS SIGN}"
    return sign + _number(abs(value))


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
