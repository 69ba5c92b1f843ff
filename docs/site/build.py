"""`make docs`: the pages of the repository and a generated reference as a site in `build/docs`.

Pages keep their places, so that links work here and there; what they link to comes along.
"""

from __future__ import annotations

import inspect
import itertools
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import hone
from hone import api
from hone.cli.help import default_text
from hone.config.aliases import FRAMEWORKS, aliases
from hone.config.recipe import RECIPES, recipe_names
from hone.config.schema import Field, fields, is_section
from hone.config.tree import TREES
from hone.version import __version__

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "build" / "docs-source"
PAGES = ("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "CODE_OF_CONDUCT.md", "SECURITY.md",
         "docs/**/*.md", "examples/README.md", "benchmarks/*.md")  # fmt: skip
_LINK = re.compile(r"""(?:\]\(|src(?:set)?=")([^)"#\s]+)(?:#[^)"]*)?[)"]""")
"""A link of Markdown, or the source of a picture."""


def copy_pages(source: Path) -> None:
    """The pages, and the files of the repository that they link to."""
    for page in [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]:
        for file in [page, *_linked(page)]:
            target = source / file.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)


def _linked(page: Path) -> Iterator[Path]:
    for link in _LINK.findall(page.read_text(encoding="utf-8")):
        file = (page.parent / link).resolve()
        if "://" not in link and file.is_file() and file.suffix != ".md":
            yield file


def key_reference() -> str:
    """Every key of every command, from the docstrings of the configuration."""
    lines = [
        "# All keys",
        "",
        "What recipes and flags set, by command; `hone COMMAND --help SECTION` prints the same.",
    ]
    for command, tree in TREES.items():
        lines += ["", f"## hone {command}", "", _escaped(" ".join((tree.__doc__ or "").split()))]
        for field in fields(tree):
            lines += _described(command, field)
    return "\n".join(lines) + "\n"


def names_elsewhere(key: str) -> str:
    """What other frameworks call a key: `TRL: num_generations; verl: rollout.n`."""
    rows = [row for row in aliases() if key in row.to]
    said = []
    for framework, title in FRAMEWORKS.items():
        names = [name for row in rows for name in row.names.get(framework, ())]
        if names:
            said.append(f"{title}: {', '.join(f'`{name}`' for name in dict.fromkeys(names))}")
    return "; ".join(said)


def name_reference() -> str:
    """Every setting of other frameworks that hone knows, with what it is here."""
    lines = [
        "# Settings of other frameworks",
        "",
        "Each setting that `hone import` knows, and what it is here. An unknown key of a recipe is",
        "looked up in the same table.",
    ]
    for framework, title in FRAMEWORKS.items():
        lines += ["", f"## {title}", "", "| There | Here | Remark |", "|---|---|---|"]
        for row in aliases():
            differs = (
                row.differs if isinstance(row.differs, str) else row.differs.get(framework, "")
            )
            keys = ", ".join(f"`{key}`" for key in row.to if key)
            here = keys or f"{row.words[0].upper()}{row.words[1:]}"
            remark = _cell(". ".join(each for each in (row.note, differs) if each))
            lines += [
                f"| `{name}` | {_cell(here)} | {remark} |" for name in row.names.get(framework, ())
            ]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return _escaped(" ".join(text.split())).replace("|", "\\|")


def _described(command: str, field: Field) -> list[str]:
    anchor = f"{command.replace(' ', '-')}.{field.key}"
    if is_section(field.annotation):
        return ["", f"### `{field.key}` {{ #{anchor} }}", "", _escaped(field.help)]
    state = "required" if field.required else f"default `{default_text(field.default)}`"
    heading = f"`--{field.key}` {{ #{anchor} }}"
    names = names_elsewhere(field.key)
    elsewhere = ["", f"    *Elsewhere*: {names}"] if names else []
    return ["", f"**{heading.partition(' {')[0]}** {field.allowed}; {state}", "",
            f":   {_escaped(field.help)}", *elsewhere]  # fmt: skip


def _escaped(text: str) -> str:
    """Without what Markdown would read as HTML, outside of code."""
    parts = text.split("`")
    parts[::2] = [
        part.replace("<", "&lt;").replace("*", "\\*").replace("[", "\\[") for part in parts[::2]
    ]
    return "`".join(parts)


def recipe_reference() -> str:
    """What each recipe that ships needs and brings, from its comment, and the recipes whole."""
    rows = [
        "# Recipes",
        "",
        "`hone recipes copy NAME` writes one out. Its comment says what comes before it. Sizes of",
        "GPUs are predictions of `hone check`.",
        "",
        "| Recipe | What it trains | Model | GPU | Time | Curve |",
        "|---|---|---|---|---|---|",
    ]
    whole = ""
    for name in recipe_names():
        content = (RECIPES / f"{name}.yaml").read_text(encoding="utf-8")
        facts = (re.sub(r", by the prediction of.*", "", each) for each in recipe_facts(content))
        cells = [_escaped(each or "-") for each in facts]
        rows.append(f"| [{name}](#{name}) | {' | '.join(cells)} |")
        whole += f"\n## {name}\n\n```yaml\n{content}```\n"
    return "\n".join(rows) + "\n" + whole


def recipe_facts(content: str) -> tuple[str, ...]:
    """Title, model, GPU, time and curve of a recipe, from its comment; empty where it is silent."""
    comment = itertools.takewhile(lambda line: line.startswith("#"), content.splitlines())
    title, *rest = (line.removeprefix("#").strip() for line in comment)
    both = "Time: not measured. Curve: not measured."
    text = " ".join(rest).replace("Time and curve: not measured.", both)
    names = ("Model", "GPU", "Time", "Curve")
    end = rf"\.?(?=\s+(?:{'|'.join(names)}): |\s+[A-Z][\w' ]*?: |\s{{2,}}|$)"
    found = (re.search(rf"\b{name}: (.*?){end}", text) for name in names)
    return (title.removesuffix("."), *(each[1] if each else "" for each in found))


def python_reference() -> str:
    """The public names of the package, which mkdocstrings fills in: the commands, then what they
    take and return, then the parts."""
    names = [name for name in hone.__all__ if name != "__version__"]
    names.sort(key=lambda name: (name not in api.__all__, inspect.isclass(getattr(hone, name))))
    text = "# Python\n\n[Python](../docs/python.md) says how they belong together.\n"
    for name in names:
        found = getattr(hone, name)
        place = f"hone.api.{name}"
        if name not in api.__all__:
            place = f"{found.__module__}.{found.__qualname__}"
        text += f"\n::: {place}\n"
        if not place.endswith(f".{name}"):
            text += f"    options: {{heading: {name}, toc_label: {name}}}\n"
    return text


def main() -> int:
    """Assemble the pages and build the site; a warning is a failure."""
    shutil.rmtree(SOURCE, ignore_errors=True)
    copy_pages(SOURCE)
    reference = SOURCE / "reference"
    reference.mkdir(parents=True)
    (reference / "keys.md").write_text(key_reference(), encoding="utf-8")
    (reference / "names.md").write_text(name_reference(), encoding="utf-8")
    (reference / "recipes.md").write_text(recipe_reference(), encoding="utf-8")
    (reference / "python.md").write_text(python_reference(), encoding="utf-8")
    if "--pages-only" in sys.argv:
        return 0
    here = Path(__file__).parent
    for name in ("wide.css", "iframe-worker.js"):
        shutil.copy(here / name, SOURCE)
    config = str(here / "mkdocs.yml")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", config]
    named = os.environ | {"HONE_SITE_NAME": f"hone {__version__}"}
    return subprocess.run(command, check=False, env=named).returncode


if __name__ == "__main__":
    raise SystemExit(main())
