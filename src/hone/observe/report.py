"""`report.html`: one page about a run, from its folder alone, that needs nothing else to open.

    write_report(Path("runs/gsm8k"))  # -> runs/gsm8k/report.html

It may be written while the run goes on, after it died, or from a folder with hardly anything in
it: sections without data are left out, and an empty run says so.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from hone.observe.charts import chart_sections, metric_table, phase_chart
from hone.observe.run_folder import RunFolder
from hone.observe.transcripts import transcripts
from hone.observe.whole_file import write_whole

__all__ = ["write_report"]


def write_report(run_dir: Path, output: Path | None = None, *, has_ended: bool = False) -> Path:
    """Write the report of a run folder, by default into it, and return its path. `has_ended` as in
    `RunFolder.read`.

    Raises UserError when `run_dir` is no folder of a run, and DiskError where the report cannot be
    written.
    """
    run = RunFolder.read(run_dir, has_ended=has_ended)
    target = output or run_dir / "report.html"
    write_whole(target, _render(run), "run.dir" if output is None else "--output")
    return target


def _render(run: RunFolder) -> str:
    environment = Environment(
        loader=PackageLoader("hone.observe", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"number": _number, "duration": _duration, "signed": _signed}
    sections = chart_sections(run)
    phases = phase_chart(run)
    return environment.get_template("report.html.jinja").render(
        title=run.path.resolve().name,
        status=run.status,
        error=_error(run.error),
        facts=_facts(run),
        tiles=_tiles(run),
        alarms=_alarms(run.events),
        events=[_event(event) for event in run.events if event.get("kind") != "alarm"],
        sections=sections,
        phases=phases,
        evaluations=_evaluations(run),
        metrics=metric_table(run),
        samples=transcripts(run),
        config_text=run.config_text,
        chart_data=_script_json({"sections": sections, "phases": phases}),
        written=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
    )


def _script_json(data: object) -> Markup:
    """JSON that can stand inside a script element."""
    return Markup(json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))


def _facts(run: RunFolder) -> list[tuple[str, str]]:
    """What the run is, in a few words each."""
    steps = run.setting("run.steps")
    done = run.rows[-1]["step"] if run.rows else 0
    sources = run.setting("data.train") or []
    seconds = run.values("time/step_s")
    facts = [
        ("Model", run.setting("model.path")),
        ("Data", ", ".join(Path(source["path"]).name for source in sources)),
        ("Algorithm", run.setting("algorithm.advantage")),
        ("Steps", f"{done:,} of {steps:,}" if steps else f"{done:,}"),
        ("Duration", _duration(sum(seconds)) if seconds else None),
        ("Seed", run.setting("run.seed")),
    ]
    return [(name, str(value)) for name, value in facts if value not in (None, "")]


def _tiles(run: RunFolder) -> list[dict[str, Any]]:
    """Headline numbers: what improved, and how fast."""
    tiles: list[dict[str, Any]] = []
    thresholds = run.values("eval/pass_threshold")
    passing = f" (score \N{GREATER-THAN OR EQUAL TO} {thresholds[-1]:g})" if thresholds else ""
    for metric, title, better in (
        ("eval/reward/mean", "Evaluation reward", 1),
        ("eval/pass@1", f"Evaluation pass@1{passing}", 1),
        ("eval/loss", "Held-out loss", -1),
        ("reward/mean", "Training reward", 1),
        ("train/loss", "Training loss", -1),
    ):
        values = run.values(metric)
        if not values or (metric == "train/loss" and run.values("reward/mean")):
            continue
        width = 1 if metric.startswith("eval/") else max(len(values) // 20, 1)
        before, after = statistics.fmean(values[:width]), statistics.fmean(values[-width:])
        tiles.append(
            {
                "title": title,
                "value": _number(after),
                "before": _number(before) if len(values) > 1 else None,
                "change": _signed(after - before),
                "good": better * (after - before) > 0,
                "flat": math.isclose(after, before, rel_tol=1e-3, abs_tol=1e-9),
            }
        )
    for metric, title, unit in (
        ("perf/tokens_per_s", "Throughput", "tokens/s"),
        ("perf/R_step", "Hardware limit", "R_step"),
        ("time/step_s", "Step time", "seconds"),
    ):
        if values := run.values(metric):
            median = statistics.median(values)
            value = f"{100 * median:.1f} %" if metric == "perf/R_step" else _number(median)
            tiles.append({"title": title, "value": value, "unit": f"{unit}, median"})
    return tiles


def _error(event: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """What the page says of the error that ended the run."""
    if event is None:
        return None
    return {name: event.get(name) for name in ("message", "step", "phase", "traceback")}


def _event(event: Mapping[str, Any]) -> dict[str, Any]:
    """Kind and fields of an event; a traceback fills a page, and `error` has it."""
    hidden = ("kind", "timestamp_s", "traceback")
    fields = {name: value for name, value in event.items() if name not in hidden}
    return {"kind": event.get("kind"), "fields": fields}


def _alarms(events: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Alarms by name and metric: the newest one, and when it was raised before."""
    grouped: dict[tuple[Any, Any], list[Mapping[str, Any]]] = {}
    for event in events:
        if event.get("kind") == "alarm":
            grouped.setdefault((event.get("name"), event.get("metric")), []).append(event)
    return [
        {
            "metric": metric,
            "step": newest.get("step"),
            "value": newest.get("value"),
            "limit": newest.get("limit"),
            "text": newest.get("advice") or newest.get("message") or "",
            "earlier": [event.get("step") for event in earlier],
        }
        for (_, metric), (*earlier, newest) in grouped.items()
    ]


def _evaluations(run: RunFolder) -> dict[str, Any] | None:
    """Columns and rows of the evaluation table; reward and pass rates first."""
    names = [name for name in run.metric_names if name.startswith("eval/")]
    if not names:
        return None
    names.sort(
        key=lambda name: (name not in ("eval/reward/mean", "eval/loss"), "pass@" not in name)
    )
    rows = [
        {"step": row["step"], "values": [row.get(name) for name in names]}
        for row in run.rows
        if any(name in row for name in names)
    ]
    return {"names": [name.removeprefix("eval/") for name in names], "rows": rows}


def _number(value: float | None) -> str:
    """About four significant digits, thousands separated."""
    if value is None:
        return "\N{EN DASH}"
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
