"""Writes `report.html` from the files of runs. The page is self-contained.

    write_report(Path("runs/gsm8k"))  # -> runs/gsm8k/report.html
    write_report(Path("runs/a"), Path("runs/b"))  # both in one page: runs/comparison.html

Data flow: `RunFolder.read` parses the files; `content.describe` says what the page holds, as one
`Page` of plain values; `page.html.jinja` lays it out; `charts.js` and `samples.js` draw from the
data in the page. It may be written while a run goes on, after it died, or from a folder with hardly
anything in it: sections without data are left out, and an empty run says so.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from jinja2 import ChoiceLoader, Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from hone.errors import UserError
from hone.observe.printable import breakable
from hone.observe.run_folder import RunFolder
from hone.observe.whole_file import write_whole
from hone.tools.report.content import Page, describe
from hone.tools.report.jump import anchor, jump_links

__all__ = ["render", "sentence", "template_environment", "write_report"]


def write_report(
    run_dir: Path, *others: Path, output: Path | None = None, has_ended: bool = False
) -> Path:
    """Write the report of a run, or a comparison of several, and return its path.

    A run is its folder, or the JSONL file of `hone generate`. By default the page is written into
    the folder, next to the file, or for several runs as `comparison.html` into their common folder.
    `has_ended` as in `RunFolder.read`. Raises UserError if a path is no run, and DiskError if the
    report cannot be written.
    """
    paths = (run_dir, *others)
    if len({path.resolve() for path in paths}) < len(paths):
        raise UserError("a run is named twice; name each run of a comparison once.")
    read = [RunFolder.read(path, has_ended=has_ended) for path in paths]
    runs = [replace(run, name=name) for run, name in zip(read, distinct_names(paths), strict=True)]
    target = output or _default_output(paths)
    write_whole(target, render(describe(runs)), "run.dir" if output is None else "--output")
    return target


def distinct_names(paths: Sequence[Path]) -> list[str]:
    """Names of runs: folder names, with as many parents as make them distinct."""
    parts = [path.resolve().parts for path in paths]
    longest = max(map(len, parts))
    names = [[part[-depth:] for part in parts] for depth in range(1, longest + 1)]
    return next(["/".join(n) for n in held] for held in names if len(set(held)) == len(paths))


def _default_output(paths: Sequence[Path]) -> Path:
    run = paths[0]
    if len(paths) == 1:
        return run.with_name(f"{run.name}.report.html") if run.is_file() else run / "report.html"
    parents = [path.resolve().parent for path in paths]
    shared = Path(os.path.commonpath(parents))
    # Runs in distant folders share only the root or a home folder, where the page does not belong.
    folder = shared if shared in parents else parents[0]
    return Path(os.path.relpath(folder)) / "comparison.html"


def render(page: Page) -> str:
    """The page as HTML."""
    return _template().render(page=page, links=jump_links(page))


def template_environment(*packages: str) -> Environment:
    """The environment of pages whose templates are in the folders of these packages."""
    environment = Environment(
        loader=ChoiceLoader([PackageLoader(package, ".") for package in packages]),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = _breakable
    return environment


@cache
def _template() -> Template:
    environment = template_environment("hone.tools.report")
    environment.filters["script_json"] = _script_json
    environment.filters["anchor"] = anchor
    environment.filters["sentence"] = sentence
    return environment.get_template("page.html.jinja")


def _breakable(value: object) -> Markup:
    return Markup(breakable(str(value)))


def sentence(text: str) -> Markup:
    """A sentence as HTML, with what stands between backticks as code."""
    words = text.split("`")
    if len(words) % 2 == 0:  # one has no partner
        return escape(text)
    return Markup("").join(
        Markup("<code>{}</code>").format(_breakable(word)) if place % 2 else word
        for place, word in enumerate(words)
    )


def _script_json(data: object) -> Markup:
    """JSON that is safe inside a script element."""
    return Markup(json.dumps(data, separators=(",", ":")).replace("<", "\\u003c"))
