"""Writes an import as a recipe, with comments that say where each value comes from."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from textwrap import wrap
from typing import Any

from hone.config.aliases import FRAMEWORKS
from hone.config.recipe import to_yaml
from hone.tools.imports.imported import Imported, Value, order
from hone.tools.imports.source import Given, text_of

__all__ = ["counts", "recipe"]

_WIDTH = 98


def recipe(found: Imported, origin: str, name: str) -> str:
    """The recipe as YAML that `read_recipe` reads. `origin` is the imported file or command, `name`
    the recipe's name in its comments."""
    source = found.source
    nproc = f" --nproc {found.processes}" if found.processes > 1 and not found.is_spread else ""
    lines = [
        f"# {origin} ({FRAMEWORKS[source.framework]}, {source.program}), as a recipe of hone.",
        f"#   hone check {source.command} {name}{nproc}",
        f"#   hone {source.command} {name}{nproc}",
        *_list("To be done", found.to_do),
        *_list("What means something else here", found.differs),
        *_table("Not served", [(_named(one, found), why) for one, why in found.missing]),
        *_table("Not read", found.unread),
        *_list("What could not be followed", source.notes),
        "",
        *_section(_nested(found), 0, found.source.framework),
        "",
        *[*_table("Nothing to set", found.unneeded)][1:],
    ]
    return "\n".join(lines) + "\n"


def counts(found: Imported) -> str:
    """One line on what became of the settings."""
    given = {one.name for one in found.source.given}
    mapped = given & {one.name for value in found.values.values() for one in value.given}
    mapped -= {one.name for one, _ in found.missing}  # for evaluation alone
    parts = [f"{len(given)} settings: {len(mapped)} taken over"]
    parts += [f"{len(names)} {words}" for entries, words in (
        (found.unneeded, "need nothing"), (found.missing, "not served"), (found.unread, "not read"),
    ) if (names := given & {one.name for one, _ in entries} - mapped)]  # fmt: skip
    texts = (
        (found.differs, "difference of meaning", "differences of meaning"),
        (found.to_do, "thing to be done", "things to be done"),
        (found.source.notes, "part not followed", "parts not followed"),
    )
    more = [f"{len(entries)} {one if len(entries) == 1 else many}" for entries, one, many in texts
            if entries]  # fmt: skip
    return "; ".join([", ".join(parts), *more])


def _list(title: str, texts: Sequence[str]) -> Iterator[str]:
    if texts:
        yield from ("#", f"# {title}:")
    for text in texts:
        yield from wrap(_one_line(text), _WIDTH, initial_indent="#   ", subsequent_indent="#     ",
                        break_long_words=False, break_on_hyphens=False)  # fmt: skip


def _table(title: str, entries: Sequence[tuple[Given, str]]) -> Iterator[str]:
    """Settings by reason."""
    reasons: dict[str, list[str]] = {}
    for one, why in entries:
        name = f"{one.name} {_shown(one.value)}".strip()
        if name not in reasons.setdefault(why, []):
            reasons[why].append(name)
    yield from _list(title, [f"{', '.join(names)}: {why}" for why, names in reasons.items()])


def _named(one: Given, found: Imported) -> Given:
    """Name a default's framework."""
    whose = f"{_shown(one.value)} (default of {FRAMEWORKS[found.source.framework]})".strip()
    return one if one.where else one._replace(value=whose)


def _shown(value: Any) -> str:
    return "" if value is True else text_of(value)


def _nested(found: Imported) -> dict[str, Any]:
    """The values in sections, in the order of the tree; lists as mappings of positions."""
    places = order(found.source.command)
    tree: dict[str, Any] = {}

    def place(key: str) -> tuple[int, str]:
        plain = ".".join("0" if part.isdecimal() else part for part in key.split("."))
        return places.get(plain, len(places)), key

    top = list(found.tree.model_fields)
    for key in sorted(found.values, key=lambda key: (top.index(key.partition(".")[0]), place(key))):
        *sections, last = key.split(".")
        at = tree
        for section in sections:
            at = at.setdefault(section, {})
        at[last] = found.values[key]
    return tree


def _section(values: dict[str, Any], depth: int, framework: str) -> Iterator[str]:
    for name, value in values.items():
        pad = "  " * depth
        if isinstance(value, Value):
            text = to_yaml({name: value.value}).rstrip("\n").split("\n")
            comment = _comment(value, framework)
            if len(text) > 1 and isinstance(value.value, str):  # no comment within a text
                yield f"{pad}{comment.strip()}"
                comment = ""
            yield f"{pad}{text[0]}{comment}"
            yield from (f"{pad}{line}" for line in text[1:])
            continue
        yield f"{pad}{name}:"
        if all(key.isdecimal() for key in value):
            for number in sorted(value, key=int):
                lines = list(_section(value[number], depth + 2, framework))
                first = lines[0].lstrip()
                yield f"{pad}  - {first}"
                yield from lines[1:]
        else:
            yield from _section(value, depth + 1, framework)


def _comment(value: Value, framework: str) -> str:
    if not value.given:
        return ""
    sources: list[str] = []
    for one in value.given:
        text = _shown(one.value)
        text = text if len(text) < 40 else f"{text[:36]} ..."
        shown = "" if str(one.value) == str(value.value) else f" {text}".rstrip()
        whose = f"default of {FRAMEWORKS[framework]}"
        sources.append(f"{one.name}{shown}, {one.where or whose}")
    return f"  # {_one_line('; '.join(dict.fromkeys(sources)))}"


def _one_line(text: str) -> str:
    """A text as one line for a comment. YAML also ends lines at U+2028."""
    return "".join(character if character.isprintable() else " " for character in text)
