"""The pages that `hone.cli` and `hone.api` pass to a run."""

from __future__ import annotations

from hone.observe.pages import Pages
from hone.tools.report.grafana import dashboard
from hone.tools.report.write import write_report

__all__ = ["PAGES"]

PAGES = Pages(write_report, dashboard)
