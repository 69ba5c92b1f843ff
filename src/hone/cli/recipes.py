"""`hone recipes [show NAME | copy NAME [PATH]]`: the recipes that come with hone."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from difflib import get_close_matches
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from hone.config.recipe import RECIPES, read_recipe, recipe_names
from hone.config.sharing import command_of, key_paths
from hone.errors import UserError
from hone.observe.whole_file import write_whole

__all__ = ["copy_recipe", "run"]


def run(argv: Sequence[str]) -> int:
    """Run `hone recipes`: list, show or copy."""
    parser = ArgumentParser(
        prog="hone recipes",
        description="The recipes that come with hone: `hone COMMAND NAME` runs one as it is, a "
        "copy is yours to change.",
    )
    actions = parser.add_subparsers(dest="action", metavar="{show,copy}")
    show = actions.add_parser("show", help="print a recipe with its comments")
    show.add_argument("name", metavar="NAME")
    copy = actions.add_parser("copy", help="write a recipe, with its comments, to a file")
    copy.add_argument("name", metavar="NAME")
    copy.add_argument("path", metavar="PATH", type=Path, nargs="?", help="NAME.yaml, here")
    copy.add_argument("--overwrite", action="store_true", help="replace an existing file")
    arguments = parser.parse_args(argv)
    if arguments.action is None:
        _list()
    elif arguments.action == "show":
        sys.stdout.write(_file(arguments.name).read_text(encoding="utf-8"))
    else:
        path = copy_recipe(arguments.name, arguments.path, overwrite=arguments.overwrite)
        sys.stdout.write(f"{path}\n")
    return 0


def copy_recipe(name: str, path: Path | None, *, overwrite: bool = False) -> Path:
    """Write a built-in recipe to a file, or into a folder under its name. The command in its
    comments is adapted to the copy. Raises UserError for an unknown name and if the file exists."""
    text = _file(name).read_text(encoding="utf-8")
    target = Path(f"{name}.yaml") if path is None else path
    if target.is_dir():
        target /= f"{name}.yaml"
    if target.exists() and not overwrite:
        raise UserError(f"'{target}' exists. Name another file, or add --overwrite to replace it.")
    if not target.parent.is_dir():
        raise UserError(f"there is no folder '{target.parent}' to write '{target.name}' to.")
    text = re.sub(rf"(hone \w+) {re.escape(name)}\b", rf"\1 {target}", text)
    write_whole(target, text, "the argument PATH")
    return target


def _file(name: str) -> Path:
    names = recipe_names()
    if name not in names:
        near = get_close_matches(name, names, 1)
        hint = f"Did you mean `{near[0]}`?" if near else f"There are {', '.join(names)}."
        raise UserError(f"no recipe '{name}' comes with hone. {hint}")
    return RECIPES / f"{name}.yaml"


def _list() -> None:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), show_header=False)
    table.add_column(no_wrap=True)
    table.add_column()
    for name in recipe_names():
        file = RECIPES / f"{name}.yaml"
        command = command_of([*key_paths(read_recipe(file).values, into_lists=True)])
        first = file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
        table.add_row(Text(f"hone {command} {name}", style="bold"), Text(first))
    console = Console(highlight=False)
    console.print(table)
    console.print(
        "\n`hone recipes show NAME` prints one, `hone recipes copy NAME` writes it to a file that "
        "is yours.",
        markup=False,
    )
