"""The links at the top of a page, which lead to its sections.

    jump_links(page)  # [Link("learning", "Learning"), Link("samples", "Samples"), ...]

A section has the `anchor` of its title as its id, also in `page.html.jinja`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from hone.tools.report.content import Page

__all__ = ["Link", "anchor", "jump_links"]

_SHORT: Mapping[str, str] = {
    "What differs between the configurations": "Differences",
    "What differs between the environments": "Environments",
    "Measured by hone eval": "Measured",
    "Distance between policies": "Policies",
    "Speed and memory": "Speed",
    "Spread of all samples": "Spread",
    "Where the time went": "Time",
    "What each device did": "Devices",
    "All metrics": "Metrics",
    "All metrics, last values": "Metrics",
    "Configuration": "Settings",
}
"""Labels of titles that are too long for a link."""


class Link(NamedTuple):
    """A link to a section."""

    anchor: str
    """Id of the section."""
    label: str


def anchor(title: str) -> str:
    """The id of the section with this title."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def jump_links(page: Page) -> list[Link]:
    """The links of a page, in the order of its sections. A live page has those of its samples even
    where there are none yet; its script hides them."""
    return [Link(anchor(title), _SHORT.get(title, title)) for title in _titles(page)]


def _titles(page: Page) -> Iterator[str]:
    if any(run.alarms for run in page.runs):
        yield "Alarms"
    yield from (table.title for table in page.results if not table.is_folded)
    yield from (section["title"] for section in page.charts["sections"])
    if page.is_live or (page.samples is not None and page.samples.episodes):
        yield "Episodes"
    if page.is_live or page.samples is not None:
        yield "Samples"
    yield from (table.title for table in page.tables)
    yield from (table.title for table in page.results if table.is_folded)
    if any(run.events for run in page.runs):
        yield "Events"
    if any(run.config_text for run in page.runs):
        yield "Configuration"
