"""The report of one run, served and kept up to date: `hone watch RUN`.

    with serve(Path("runs/gsm8k"), port=8642) as server:
        ...

From the run's files alone, so that it serves a run that goes on, one that has ended, and one whose
folder is on a file system that the run's host shares. The page is that of `hone report` without the
samples; it asks for `/stamp`, and when that has changed for itself. Samples come a page at a time
from `/samples` and `/group`, the last, longest, failed and worst episodes from `/episodes`, and the
small pictures of their images from `/picture`, by hash.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from hone.observe.local_server import LocalServer, Reply
from hone.observe.run_folder import RunFolder, is_locked, read_picture
from hone.tools.report.content import describe
from hone.tools.report.pieces import Splitter
from hone.tools.report.sample_table import SampleTable
from hone.tools.report.write import render

__all__ = ["serve"]


def serve(run: Path, port: int) -> LocalServer:
    """Serve the report of a run. Raises UserError if the path is no run or the port is taken."""
    RunFolder.read(run)
    page = _Page(run)
    page.html({})
    routes = {
        "/": page.html,
        "/stamp": page.stamp,
        "/samples": page.samples,
        "/group": page.group,
        "/episodes": page.episodes,
        "/picture": page.picture,
    }
    return LocalServer(port, routes, key="--port")


class _Page:
    def __init__(self, run: Path) -> None:
        self._run = run
        self._samples = SampleTable(run)
        self._lock = Lock()
        """Guards the latest page and its stamp."""
        self._made = ("", b"")
        self._shown: RunFolder | None = None
        self._splitter: Splitter | None = None

    def html(self, _: Mapping[str, str]) -> Reply:
        """The page, rendered once for each state of the files."""
        with self._lock:
            stamp = self._stamp()
            if self._made[0] != stamp:
                self._shown = RunFolder.read(self._run)
                page = describe([self._shown], stamp=stamp)
                self._made = stamp, render(page).encode(errors="replace")
            return Reply(self._made[1], "text/html; charset=utf-8")

    def stamp(self, _: Mapping[str, str]) -> Reply:
        return _json({"stamp": self._stamp()})

    def samples(self, query: Mapping[str, str]) -> Reply:
        self._samples.refresh()
        try:
            return _json(self._samples.select(query))
        except ValueError as error:
            return Reply(f"{error}\n".encode(), "text/plain", 400)

    def episodes(self, _: Mapping[str, str]) -> Reply:
        """Episodes of a run with an environment; an empty object without one."""
        self._samples.refresh()
        return _json(self._samples.episodes())

    def group(self, query: Mapping[str, str]) -> Reply:
        number = query.get("number", "")
        self._samples.refresh()
        try:
            return _json(self._samples.group(int(number), self._split()))
        except (ValueError, IndexError):
            return Reply(f"there is no group {number!r}\n".encode(), "text/plain", 404)

    def picture(self, query: Mapping[str, str]) -> Reply:
        name = query.get("hash", "")
        picture = read_picture(self._run, name)
        if picture is None:
            return Reply(f"there is no picture {name!r}\n".encode(), "text/plain", 404)
        return Reply(*picture)

    def _split(self) -> Splitter | None:
        """The splitter, built once: with a large vocabulary that takes as long as a hundred
        groups."""
        with self._lock:
            if self._splitter is None and self._shown is not None:
                self._splitter = Splitter.of_run(self._shown)
            return self._splitter

    def _stamp(self) -> str:
        """A text that changes with the files and with the run's end."""
        if self._run.is_file():
            return str(self._run.stat().st_mtime_ns)
        files = [path for path in sorted(self._run.iterdir()) if path.suffix in _SUFFIXES]
        held = [f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files]
        return "; ".join([*held, f"running {is_locked(self._run)}"])


_SUFFIXES = (".jsonl", ".json", ".yaml")


def _json(data: Any) -> Reply:
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=False)
    return Reply(text.encode(errors="replace"), "application/json")
