"""`hone COMMAND [RECIPE] --help [SECTION or WORDS]`: the most used keys first, then every key."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args, get_origin

from rich.console import Console
from rich.padding import Padding
from rich.text import Text

from hone.cli.help_search import Hit, search_keys
from hone.config.aliases import alias_hint
from hone.config.base import Section
from hone.config.commands import COMMANDS, FirstPage
from hone.config.plan import RECIPE_TREES
from hone.config.recipe import read_recipe, recipe_names, resolve_recipe
from hone.config.schema import Field, fields, is_section, locate
from hone.config.sharing import key_paths, split_recipe
from hone.config.tree import TREES
from hone.config.unknown import unknown_key
from hone.errors import UserError

__all__ = ["FIRST_PAGES", "default_text", "is_help", "print_help"]

_MAX_WIDTH, _NARROW = 100, 80
_ALL = "all"


FIRST_PAGES: Mapping[str, FirstPage] = {
    **{name: entry.page for name, entry in COMMANDS.items() if entry.page is not None},
    **{
        f"{name} {action}": page
        for name, entry in COMMANDS.items()
        for action, page in entry.actions.items()
        if page is not None
    },
}
"""First help pages by the words after `hone`."""


def is_help(argv: Iterable[str]) -> bool:
    """Whether the arguments ask for help."""
    return any(word in ("-h", "--help") for word in argv)


def print_help(command: str, argv: Sequence[str]) -> int:
    """Print help of a command: the first page, or the keys of the sections that `argv` names, or
    the keys that match all its other words. Values of a recipe are shown if it names one; flags are
    ignored. Raises UserError if no key matches the words."""
    tree = TREES[command]
    sections, words, recipe = _words(command, tree, argv)
    values = {} if recipe is None else _values(tree, recipe)
    page = _Page(command, tree, values, "" if recipe is None else recipe.stem)
    console = Console(highlight=False)
    console.width = min(console.width, _MAX_WIDTH)
    if words:
        text = " ".join([*sections, *words])
        hits = search_keys(tree, text)
        elsewhere = alias_hint(tree, _path(text.replace(" ", "_")))
        if not hits and not elsewhere:
            raise UserError(_unknown(command, tree, text))
        page.print_found(console, text, hits, elsewhere or "")
    elif sections:
        for number, section in enumerate(sections):
            for line in page.section(section, is_first=number == 0):
                console.print(line)
    else:
        page.print_first(console)
    return 0


def _words(
    command: str, tree: type[Section], argv: Sequence[str]
) -> tuple[list[str], list[str], Path | None]:
    """Split `argv` into named sections, other words after `--help`, and the recipe."""
    sections: list[str] = []
    others: list[str] = []
    recipe: Path | None = None
    follows_flag = follows_help = False
    for word in argv:
        is_flag = word.startswith("-")
        if not is_flag and not follows_flag:
            if word == _ALL or locate(tree, _path(word)) is not None:
                sections.append(word)
            elif recipe is None and (Path(word).is_file() or word in recipe_names()):
                recipe = resolve_recipe(word)
            elif follows_help:
                others.append(word)
            else:  # the position of a recipe
                raise UserError(_unknown(command, tree, word))
        follows_help |= is_help([word])
        follows_flag = is_flag and "=" not in word and not is_help([word])
    return sections, others, recipe


def _path(word: str) -> list[str]:
    return word.removeprefix("--").replace("-", "_").split(".")


def _unknown(command: str, tree: type[Section], text: str) -> str:
    known = [*(field.key for field in fields(tree)), *recipe_names()]
    near = get_close_matches(text, known, 1)
    hint = f"did you mean {near[0]}?" if near else unknown_key(tree, _path(text.replace(" ", "_")))
    nearest = "" if hint.startswith("allowed here") else f" {hint[0].upper()}{hint[1:].rstrip('.')}"
    nearest += "." if nearest and not nearest.endswith("?") else ""
    return (
        f"no key of `hone {command}` has to do with '{text}', and no recipe is called so.{nearest} "
        f"Sections: {', '.join(tree.model_fields)}. Recipes: {', '.join(recipe_names())}, or the "
        "path of a YAML file."
    )


def _values(tree: type[Section], recipe: Path) -> dict[tuple[str, ...], Any]:
    """Values that a recipe sets, by path of the key."""
    own = split_recipe(tree, read_recipe(recipe).values).own
    values_by_path: dict[tuple[str, ...], Any] = {}
    for path in key_paths(own):
        value: Any = own
        for part in path:
            value = value[part]
        values_by_path[path] = value
        if isinstance(value, list) and value and isinstance(value[0], dict):
            values_by_path.update({(*path, "0", *at): x for at, x in _leaves(value[0])})
    return values_by_path


def _leaves(values: Mapping[str, Any]) -> Iterator[tuple[tuple[str, ...], Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from (((name, *at), x) for at, x in _leaves(value))
        else:
            yield (name,), value


@dataclass(frozen=True, slots=True)
class _Page:
    """Help of a command, with the values of a recipe."""

    command: str
    tree: type[Section]
    values: Mapping[tuple[str, ...], Any]
    recipe: str
    """Name of the recipe, or empty."""

    def print_first(self, console: Console) -> None:
        """Print the description of the command and the most used keys."""
        command, recipe, tree = self.command, self.recipe, self.tree
        page = FIRST_PAGES[command]
        console.print(Text(_joined(tree.__doc__)))
        console.print(Text(f"\nusage: hone {command} [RECIPE] [--section.key VALUE ...]"))
        if command in RECIPE_TREES:
            console.print(Text("       --nproc N runs it in N processes of this host, one a GPU"))
        console.print(Text("\nexamples:", "bold"))
        console.print(Padding(Text(page.examples), (0, 0, 0, 2)), soft_wrap=True)
        console.print(Text("\nkeys that nearly everybody sets:", "bold"))
        everyday = [found for key in page.keys.split() if (found := locate(tree, key.split(".")))]
        for field in everyday:
            for line in self._key(field, is_brief=True):
                console.print(line)
        shown = {field.path for field in everyday}
        others = [path for path in self.values if path not in shown and not self._is_above(path)]
        if present := [field for path in others if (field := locate(tree, path))]:
            console.print(Text(f"\nand what else {recipe} sets:", "bold"))
            for field in present:
                for line in self._head(field, is_brief=True):
                    console.print(line)
        console.print(Text("\nall keys, by section:", "bold"))
        width = max(map(len, tree.model_fields)) + 2
        for name, info in tree.model_fields.items():
            field = Field((name,), info.annotation, info)
            text = Text.assemble("  ", (name.ljust(width), "cyan"), _sentence(field.help))
            console.print(text, no_wrap=True, overflow="ellipsis")
        words = f"hone {command}{f' {recipe}' if recipe else ''} --help"
        shows = (
            f"\n`{words} {_example(tree)}` shows a section, `{words} all` all of them, and "
            f"`{words} WORD` the keys that have to do with a word."
        )
        console.print(Text(shows))
        console.print(
            Text("A switch needs no value: --a.flag, --no-a.flag. Lists: inline YAML, or --a.0 X.")
        )

    def print_found(self, console: Console, text: str, hits: Sequence[Hit], elsewhere: str) -> None:
        """Print the keys that match some words, closest first. `elsewhere` says what serves a
        setting of that name in other frameworks."""
        console.print(Text(f"{_counted(len(hits))} of `hone {self.command}` for '{text}':", "bold"))
        if elsewhere:
            console.print(Padding(Text(f"{text}: {elsewhere}"), (0, 0, 0, 2)))
        for hit in hits:
            for line in self._key(hit.field, is_brief=True):
                console.print(line)
            if hit.foreign:
                console.print(Padding(Text(f"elsewhere: {hit.foreign}", "dim"), (0, 0, 0, 6)))

    def section(self, name: str, *, is_first: bool) -> Iterator[Text | Padding]:
        """Lines of a section: heading, own keys, then each subsection."""
        if name == _ALL:
            for number, part in enumerate(self._below(())):
                yield from self._block(part, is_first=is_first and number == 0)
            return
        field = locate(self.tree, _path(name))
        assert field is not None, f"{name=}"
        yield from self._block(field, is_first=is_first)

    def _block(self, field: Field, *, is_first: bool) -> Iterator[Text | Padding]:
        if is_section(field.annotation):
            heading = Text.assemble((field.key, "bold underline"), f"  {field.help}")
            yield heading if is_first else Text.assemble("\n", heading)
        else:
            if _has_keys(field) and not is_first:
                yield Text()
            yield from self._key(field)
        for entry in self._below(field.path):
            yield from self._block(entry, is_first=False)

    def _below(self, above: tuple[str, ...]) -> list[Field]:
        """Fields directly below a path. Plain keys come first: after a subsection they would look
        like its keys."""
        below = [
            field
            for field in fields(self.tree)
            if field.path[:-1] == above
            or (field.path[:-2] == above and field.path[-2:-1] == ("0",))
        ]
        return sorted(below, key=_has_keys)

    def _is_above(self, path: tuple[str, ...]) -> bool:
        """Whether the recipe sets a key at or below a path."""
        return any(at[: len(path)] == path and len(at) > len(path) for at in self.values)

    def _key(self, field: Field, *, is_brief: bool = False) -> Iterator[Text | Padding]:
        """Lines of one key: `--key allowed [default]`, then its help."""
        yield from self._head(field, is_brief=is_brief)
        help_text = _sentence(field.help) if is_brief else field.help
        yield Padding(Text(help_text), (0, 0, 0, 6), expand=False)

    def _head(self, field: Field, *, is_brief: bool = False) -> Iterator[Text | Padding]:
        """Head of a key: one line if it fits 80 columns, otherwise the allowed values go below the
        key."""
        key = Text.assemble("  ", (f"--{field.key}", "bold cyan"))
        parts: list[Any] = [] if is_brief else [field.allowed, "  "]
        if field.path in self.values:
            value = default_text(self.values[field.path])
            parts += [(f"[{self.recipe}: {value}]", "bold green"), "  "]
        rest = Text.assemble(*parts, (f"[{self._state(field)}]", "green"))
        if key.cell_len + 2 + rest.cell_len <= _NARROW:
            yield Text.assemble(key, "  ", rest)
        else:
            yield key
            yield Padding(rest, (0, 0, 0, 6), expand=False)

    def _state(self, field: Field) -> str:
        """`required`, or the default. For a key of a list's entry, the default of that list's
        entry."""
        if "0" in field.path:
            at = field.path.index("0")
            entries = locate(self.tree, field.path[:at])
            assert entries is not None, f"{field.path=}"
            if not entries.required and field.required:
                first: Any = (entries.default or [None])[0]
                entry_default = None if first is None else getattr(first, field.path[at + 1])
                if entry_default is None:
                    return "required in an entry"
                return f"default: {default_text(entry_default)}"
        return "required" if field.required else f"default: {default_text(field.default)}"


def _example(tree: type[Section]) -> str:
    names = [name for name, info in tree.model_fields.items() if is_section(info.annotation)]
    return "rollout" if "rollout" in names else names[-1]


def _has_keys(field: Field) -> bool:
    """Whether the field is a section or a list of sections."""
    return is_section(field.annotation) or (
        get_origin(field.annotation) is tuple and is_section(get_args(field.annotation)[0])
    )


def _counted(number: int) -> str:
    return "1 key" if number == 1 else f"{number} keys"


def _sentence(text: str) -> str:
    """The first sentence of a help text."""
    return text.partition(". ")[0].rstrip(".")


def _joined(text: str | None) -> str:
    return " ".join((text or "").split())


def default_text(value: Any) -> str:
    """A value as one would type it."""
    match value:
        case None:
            return "unset"
        case bool() | float() | int():
            return json.dumps(value)
        case tuple() | list():
            return json.dumps([_plain(item) for item in value], ensure_ascii=False)
        case _:
            return str(value) or '""'


def _plain(item: Any) -> Any:
    if isinstance(item, Section):
        return item.model_dump(mode="json", exclude_defaults=True)
    return str(item) if isinstance(item, Path) else item
