"""Metrics of a run for Prometheus, and its health (key `log.metrics_port`).

    /metrics        the newest row of `metrics.jsonl` and the newest evaluation, a gauge each:
                    `reward/mean` as `hone_reward_mean{run="gsm8k"}`
    /health         200 while steps come as usual, 503 once one is late; JSON says more
    /grafana.json   a dashboard of these, to be imported into Grafana

The text is made once a step and kept: who reads it, and how slowly, does not matter to training.
"""

from __future__ import annotations

import json
import math
import re
import time
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from hone.observe.local_server import LocalServer, Reply

__all__ = ["MetricsServer", "exposition", "metric_name"]

MANY_TIMES = 5.0
LEAST_LATE_S = 300.0
"""A step is late if it has taken at least this long and `MANY_TIMES` as long as the longest of the
last `NUM_STEPS`, including evaluation and checkpoint. This minimum is needed because the first
evaluation takes longer than all steps before."""
NUM_STEPS = 100


class MetricsServer:
    """HTTP server of the latest metrics given to `publish`."""

    def __init__(
        self,
        port: int,
        run: str,
        *,
        dashboard: Callable[[], dict[str, Any]] | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        """`run` is the label of all metrics. Without a `dashboard` there is no `/grafana.json`.
        Raises UserError if the port is taken."""
        self._run = run
        self._clock = clock
        self._step = 0
        self._num_alarms = 0
        self._evaluation: dict[str, float] = {}
        self._published_s: float | None = None
        self._intervals_s: deque[float] = deque(maxlen=NUM_STEPS)
        self._text = b""
        routes = {"/metrics": self._metrics, "/health": self._health}
        if dashboard is not None:
            routes["/grafana.json"] = lambda _: _as_json(dashboard())
        self._server = LocalServer(port, routes, key="log.metrics_port")
        self.port = self._server.port

    def publish(self, step: int, scalars: Mapping[str, float], *, num_alarms: int = 0) -> None:
        """Serve the metrics of `step` from now on. `num_alarms` is the number of alarms that it
        raised."""
        now_s = self._clock()
        if self._published_s is not None:
            self._intervals_s.append(now_s - self._published_s)
        self._num_alarms += num_alarms
        # Kept over steps: Prometheus scrapes four times a minute and would miss most evaluations of
        # shorter steps.
        self._evaluation |= {key: scalars[key] for key in scalars if key.startswith("eval/")}
        own = {"step": step, "last_step_timestamp_seconds": now_s, "alarms": self._num_alarms}
        self._text = exposition({**self._evaluation, **scalars, **own}, run=self._run)
        self._step, self._published_s = step, now_s

    def close(self) -> None:
        """Stop serving."""
        self._server.close()

    def _metrics(self, _: Mapping[str, str]) -> Reply:
        return Reply(self._text, "text/plain; version=0.0.4; charset=utf-8")

    def _health(self, _: Mapping[str, str]) -> Reply:
        published_s, longest_s = self._published_s, max(self._intervals_s.copy(), default=0.0)
        limit_s = max(MANY_TIMES * longest_s, LEAST_LATE_S)
        age_s = None if published_s is None else self._clock() - published_s
        status = "starting" if age_s is None else "late" if age_s > limit_s else "ok"
        body_fields = {"status": status, "step": self._step, "age_s": age_s, "limit_s": limit_s}
        body = f"{json.dumps(body_fields)}\n".encode()
        return Reply(body, "application/json", 503 if status == "late" else 200)


def _as_json(page: Mapping[str, Any]) -> Reply:
    return Reply(json.dumps(page, indent=1).encode(), "application/json")


def metric_name(metric: str) -> str:
    """Prometheus name of a metric. Letters and digits are kept."""
    return f"hone_{re.sub(r'[^a-zA-Z0-9]+', '_', metric)}"


def exposition(scalars: Mapping[str, float], *, run: str) -> bytes:
    """Encode gauges in the text format of Prometheus, version 0.0.4
    (prometheus.io/docs/instrumenting/exposition_formats). One line per gauge does not justify the
    package `prometheus_client`."""
    label = run.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
    named = {metric_name(key): value for key, value in scalars.items()}
    lines = [
        f'# TYPE {name} gauge\n{name}{{run="{label}"}} {_number(value)}\n'
        for name, value in named.items()
    ]
    return "".join(lines).encode(errors="backslashreplace")


def _number(value: float) -> str:
    if math.isfinite(value):
        return repr(value)
    return "NaN" if math.isnan(value) else "+Inf" if value > 0 else "-Inf"
