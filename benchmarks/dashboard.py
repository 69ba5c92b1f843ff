"""Asks Prometheus every query of the dashboard, as Grafana would: which it refuses, and which have
no series.

    prometheus --config.file prometheus.yml &   # that reads runs with `log.metrics_port`
    python benchmarks/dashboard.py http://127.0.0.1:9090 --minutes 60
"""

from __future__ import annotations

import argparse
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from hone.tools.report.grafana import dashboard


def ask(server: str, path: str, **parameters: Any) -> Any:
    """What the API answers, errors too."""
    url = f"{server}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
    try:
        with urllib.request.urlopen(url) as reply:
            return json.load(reply)
    except urllib.error.HTTPError as error:
        return json.load(error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("server")
    parser.add_argument("--minutes", type=float, default=60)
    args = parser.parse_args()
    now = time.time()
    runs = ask(args.server, "label/run/values", **{"match[]": "hone_step"})["data"]
    print(f"runs: {', '.join(runs)}")
    rows = dashboard()["panels"]
    panels = [panel for row in rows for panel in (row, *row.get("panels", ()))]
    num_queries = num_series = num_refused = 0
    for panel in panels:
        for target in panel.get("targets", ()):
            query = target["expr"].replace("$run", ".*")
            span = {"start": now - 60 * args.minutes, "end": now, "step": args.minutes / 60}
            answer = ask(args.server, "query_range", query=query, **span)
            found = answer.get("data", {}).get("result", ())
            num_queries, num_series = num_queries + 1, num_series + len(found)
            if answer["status"] != "success":
                num_refused += 1
                print(f"refused: {query}: {answer['error']}")
            elif not found:
                print(f"no series: {panel['title']}: {query}")
    print(f"{num_queries} queries, {num_refused} refused, {num_series} series")


if __name__ == "__main__":
    main()
