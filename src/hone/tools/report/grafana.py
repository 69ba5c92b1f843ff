"""A Grafana dashboard for the metrics that `/metrics` serves: the charts of a report, in panels
that Grafana imports (grafana.com/docs, "JSON model"). Panels for preferences come last, folded."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import count
from typing import Any

from hone.observe.metrics_server import metric_name
from hone.tools.report.charts import SECTIONS, Chart

__all__ = ["dashboard"]

_STATS = (
    ("Step", "hone_step", "none"),
    ("Since the last step", "time() - hone_last_step_timestamp_seconds", "s"),
    ("Alarms", "hone_alarms", "none"),
)
_ENGINES = (
    Chart("Step time", "seconds", {"time/step_s": "step", "time/generate_s": "generate",
                                   "time/train_s": "train", "time/sync_s": "sync"}),
    Chart("Samples", "samples/s", {"perf/samples_per_s": "trained"}),
    Chart("KV caches", "share", {"engine/kv_cache_usage/max": "of the fullest"}, "share"),
    Chart("Preemptions", "sequences a step", {"engine/preemptions": "of all engines"}),
)  # fmt: skip
"""Charts that a report shows in another form, or not at all."""
_FOLDED = "Preferences"
_SOURCE = {"type": "prometheus", "uid": "${datasource}"}
_UNITS = {"seconds": "s", "bytes/s": "Bps"}
_AXES: dict[str, dict[str, Any]] = {
    "linear": {}, "zero": {"axisSoftMin": 0}, "share": {"axisSoftMin": 0},
    "log": {"scaleDistribution": {"type": "log", "log": 10}},
}  # fmt: skip
"""Settings for the scales of charts, as in the report."""
_WIDTH = 24
"""Width of a dashboard, in Grafana's units."""


def dashboard() -> dict[str, Any]:
    """The dashboard, for JSON."""
    sections = {**SECTIONS, "Engines and steps": _ENGINES}
    sections[_FOLDED] = sections.pop(_FOLDED)
    run = {
        "name": "run", "label": "Run", "type": "query", "datasource": _SOURCE,
        "query": {"query": "label_values(hone_step, run)", "refId": "run"},
        "refresh": 2, "includeAll": True, "multi": True, "allValue": ".*",
    }  # fmt: skip
    source = {"name": "datasource", "label": "Prometheus", "type": "datasource"}
    panels, numbers = [*_panels(sections)], count(1)
    for panel in panels:
        for each in (panel, *panel.get("panels", ())):
            each["id"] = next(numbers)
    return {
        "title": "hone", "uid": "hone", "tags": ["hone"], "schemaVersion": 39,
        "editable": True, "refresh": "30s", "time": {"from": "now-6h", "to": "now"},
        "templating": {"list": [source | {"query": "prometheus"}, run]},
        "panels": panels,
    }  # fmt: skip


def _panels(sections: dict[str, tuple[Chart, ...]]) -> Iterator[dict[str, Any]]:
    width, y = _WIDTH // len(_STATS), 4
    for number, (title, metric, unit) in enumerate(_STATS):
        place = {"x": width * number, "y": 0, "w": width, "h": y}
        yield _panel("stat", title, place, {metric: ""}, unit)
    for title, charts in sections.items():
        inner = [*_charts(charts, y + 1)]
        is_folded = title == _FOLDED
        place = {"x": 0, "y": y, "w": _WIDTH, "h": 1}
        row = {"type": "row", "title": title, "collapsed": is_folded, "gridPos": place}
        yield row | {"panels": inner if is_folded else []}
        yield from [] if is_folded else inner
        y = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in inner)


def _charts(charts: tuple[Chart, ...], y: int) -> Iterator[dict[str, Any]]:
    """Panels of charts, two per line."""
    width, height = _WIDTH // 2, 8
    for number, chart in enumerate(charts):
        place = {"x": width * (number % 2), "y": y + number // 2 * height, "w": width, "h": height}
        unit = "percentunit" if chart.scale == "share" else _UNITS.get(chart.unit, "short")
        title = f"{chart.title} ({chart.unit})" if chart.unit else chart.title
        edges = {edge: edge.rpartition("/")[2] for edge in chart.band or ()}
        lines = {metric_name(name): label for name, label in {**chart.lines, **edges}.items()}
        panel = _panel("timeseries", title, place, lines, unit)
        panel["fieldConfig"]["defaults"]["custom"] = _AXES[chart.scale]
        yield panel


def _panel(
    kind: str, title: str, place: dict[str, int], lines: dict[str, str], unit: str
) -> dict[str, Any]:
    targets = [
        {"datasource": _SOURCE, "expr": f'{metric}{{run=~"$run"}}', "refId": chr(65 + number),
         "legendFormat": f"{{{{run}}}} {label}".strip()}
        for number, (metric, label) in enumerate(lines.items())
    ]  # fmt: skip
    config = {"defaults": {"unit": unit}, "overrides": list[Any]()}
    return {"type": kind, "title": title, "datasource": _SOURCE, "gridPos": place,
            "fieldConfig": config, "targets": targets}  # fmt: skip
