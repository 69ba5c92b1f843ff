"""`hone COMMAND --help`: every key with its type, default and meaning."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from hone.config import UserError
from hone.config.base import Section
from hone.config.plan import Command
from hone.config.schema import Field, fields, is_section
from hone.config.signatures import OWN, SHAPES
from hone.config.tree import (
    BenchEngineConfig,
    BenchTrainConfig,
    EvaluateConfig,
    GenerateConfig,
    RLConfig,
    SFTConfig,
    SimulateConfig,
)

__all__ = ["TREES", "print_help"]

TREES: dict[str, type[Command]] = {
    "rl": RLConfig,
    "sft": SFTConfig,
    "eval": EvaluateConfig,
    "generate": GenerateConfig,
}
"""Trees of the commands that `hone check` checks."""

_PAGES: dict[str, type[Section]] = {
    **TREES,
    "bench engine": BenchEngineConfig,
    "bench train": BenchTrainConfig,
    "simulate": SimulateConfig,
}

_MAX_WIDTH = 100


def print_help(command: str, sections: Sequence[str]) -> int:
    """Print the keys of a command's tree, or those of the named sections."""
    tree = _PAGES[command]
    shown = [field for field in fields(tree) if _selected(field, sections)]
    if not shown:
        raise UserError(
            f"`hone {command}` has no section '{sections[0]}'; its sections are "
            f"{', '.join(tree.model_fields)}."
        )
    console = Console(highlight=False)
    console.width = min(console.width, _MAX_WIDTH)
    if not sections:
        console.print(Text(" ".join((tree.__doc__ or "").split())))
        console.print(f"usage: hone {command} [RECIPE] [--section.key VALUE ...]", markup=False)
        if command in TREES:
            console.print("--nproc N runs it in N processes of this host, one a GPU.", markup=False)
        console.print(
            "A switch needs no value: --a.flag, --no-a.flag. Lists: inline YAML, or --a.0 X."
        )
    for field in shown:
        for line in _lines(field):
            console.print(line)
    if sections and any(field.key == "reward.functions" for field in shown):
        console.print(_shapes())
    return 0


def _selected(field: Field, sections: Sequence[str]) -> bool:
    if not sections:
        return True
    return any(field.path[: len(x.split("."))] == tuple(x.split(".")) for x in sections)


def _lines(field: Field) -> Iterator[Text | Padding]:
    """One key: a heading for a section, else `--key  allowed  [default]` over its help."""
    if is_section(field.annotation):
        yield Text.assemble("\n", (field.key, "bold underline"), f"  {field.help}")
        return
    state = "required" if field.required else f"default: {_default(field.default)}"
    yield Text.assemble(
        "  ", (f"--{field.key}", "bold cyan"), f"  {field.allowed}  ", (f"[{state}]", "green")
    )
    yield Padding(Text(field.help), (0, 0, 0, 6), expand=False)


def _shapes() -> Table:
    """What functions of each framework's shape are called with, and what they return."""
    table = Table(
        *("shape of", "known by", "arguments, by name", "returns"),
        title="\nA function is called in the shape that its signature shows",
        title_justify="left",
        show_lines=True,
    )
    for shape in (OWN, *SHAPES):
        arguments = ", ".join(shape.given)
        if shape.takes_columns:
            arguments += "; any column of the data"
        arguments += f". {shape.called_with[0].upper()}{shape.called_with[1:]}"
        known = "everything else" if shape.mark is None else shape.mark
        table.add_row(shape.framework, known, arguments, shape.returns)
    return table


def _default(value: Any) -> str:
    """A default as it would be typed."""
    match value:
        case None:
            return "unset"
        case bool() | float() | int():
            return json.dumps(value)
        case tuple():
            return json.dumps([_plain(item) for item in value])
        case _:
            return str(value) or '""'


def _plain(item: Any) -> Any:
    if isinstance(item, Section):
        return item.model_dump(mode="json", exclude_defaults=True)
    return str(item) if isinstance(item, Path) else item
