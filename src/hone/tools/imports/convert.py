"""Converts settings of another framework to hone's. No setting is dropped silently."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hone.config.aliases import Alias, aliases, find_alias
from hone.config.recipe import read_recipe
from hone.config.schema import locate
from hone.tools.imports import transforms
from hone.tools.imports.imported import Imported, Value
from hone.tools.imports.source import Given, Source, Unread, text_of
from hone.tools.imports.taken_out import Script, take_out

__all__ = ["convert"]

_DEFAULTS = Path(__file__).with_name("defaults.yaml")
_REQUIRED = ("model.path", "data.train.0.path")
_OFF = (False, None, "", [])


def convert(source: Source, output: Path = Path("RECIPE.yaml")) -> Imported:
    """Convert all settings of a source, and its framework's defaults, to a recipe that is to be
    written to `output`."""
    imported = Imported(source)
    imported.processes = source.processes or transforms.processes(imported)
    number = {id(row): place for place, row in enumerate(aliases())}
    rows: list[tuple[int, Given, Alias]] = []
    for one in _last(source.given):
        row = _row(source, one.name)
        if row is None:
            why = "hone knows no setting of this name; `hone rl --help` has all of its own"
            imported.unread.append((one, why))
        else:
            rows.append((number[id(row)], one, row))
    taken = {place for place, _, _ in rows}
    for name, value in _defaults(source):
        row = _row(source, name)
        assert row is not None, name
        if number[id(row)] not in taken:
            rows.append((number[id(row)], Given(name, value, ""), row))
    for _, one, row in sorted(rows, key=lambda entry: entry[0]):
        _take(row, one, imported)
    used = [one for value in imported.values.values() for one in value.given]
    imported.unneeded = [(one, why) for one, why in imported.unneeded if one not in used]
    _complete(imported)
    _take_out_functions(imported, output)
    return imported


def _row(source: Source, name: str) -> Alias | None:
    found = find_alias(source.framework, [source.program, *name.split(".")])
    return found and found[1]


def _last(given: Sequence[Given]) -> Iterator[Given]:
    """Drop repeated settings: the last one counts, as in every framework."""
    last = {one.name: one for one in given}
    return (one for one in given if last[one.name] is one)


def _defaults(source: Source) -> Iterator[tuple[str, Any]]:
    """The framework's defaults of settings that are not given, if hone's differ."""
    programs = _programs()[source.framework]
    for name in dict.fromkeys((source.command, source.program)):
        yield from programs.get(name, {}).items()


@cache
def _programs() -> Mapping[str, Any]:
    """The defaults of each framework's programs."""
    return read_recipe(_DEFAULTS).values


def _made(row: Alias, value: Any, imported: Imported) -> Any:
    """The converted value, or values by key. None if nothing is to be set."""
    if row.map is not None:
        if text_of(value) not in row.map:
            known = ", ".join(name for name in row.map if name not in ("true", "false", "null"))
            raise transforms.NotServed(f"of its values hone knows {known}")
        return row.map[text_of(value)]
    return transforms.transform(row.by, value, imported, row) if row.by else value


def _complete(imported: Imported) -> None:
    """Add required values, and values that follow from all settings together."""
    transforms.finish(imported)
    for key in _REQUIRED:
        if key not in imported.values:
            imported.leave_open(key, "nothing that could be read names it")
    for key, value in imported.values.items():
        if isinstance(value.value, str) and ("$" in value.value or "`" in value.value):
            imported.to_do.append(f"{key}: {value.value} is known only when the script runs")


def _take_out_functions(imported: Imported, output: Path) -> None:
    """Name functions of a script that a run must not import by a file beside the recipe."""
    if imported.source.script is None:
        return
    path, text = imported.source.script
    script, prefix = Script(path, text), f"{path}:"
    named = [value for value in imported.values.values() if _names(value, prefix)]
    why = script.why_not_imported()
    if not named or not why:
        return
    place = output.with_name(f"{output.stem}_functions.py")
    names = dict.fromkeys(name for value in named for name in _names(value, prefix))
    imported.taken_out, reasons = take_out(script, names, place)
    if imported.taken_out is not None:
        imported.warn(f"{path} is not for a run to import, since {why}: {place} has a copy of "
                      f"{', '.join(imported.taken_out.names)} with what they use.")  # fmt: skip
    for name, reason in reasons.items():
        imported.to_do.append(f"{place}: move {name} there, since {path} is not for a run to "
                              f"import ({why}); it is not copied, since {reason}")  # fmt: skip
    for value in named:
        parts = [part.replace(prefix, f"{place}:") for part in _texts(value)]
        value.value = parts if isinstance(value.value, list) else parts[0]


def _names(value: Value, prefix: str) -> list[str]:
    return [part.removeprefix(prefix) for part in _texts(value) if part.startswith(prefix)]


def _texts(value: Value) -> list[str]:
    parts = value.value if isinstance(value.value, list) else [value.value]
    return [part for part in parts if isinstance(part, str)]


def _take(row: Alias, one: Given, imported: Imported) -> None:
    """Convert one setting by its row of the table."""
    target = next((key for key in row.to if imported.has(key)), None)
    if _is_unread(one.value) and not row.always and not _is_text(one.value, imported.tree, target):
        imported.unread.append((one, "only a run of the script could tell"))
    elif row.to and target is None:
        imported.skip(one, f"{' and '.join(row.to)}: not of `hone {imported.source.command}`")
    elif reason := next(filter(None, (_unmet(*rule, imported) for rule in row.when.items())), None):
        imported.skip(one, reason)
    elif target is None or row.always or row.missing:
        if row.always or any(_is_same(one.value, off) for off in (*_OFF, *(row.off or (0,)))):
            imported.skip(one, row.always or "as here")
        else:
            imported.missing.append((one, row.missing))
        _warn(row, one, imported)
    else:
        _take_over(row, one, target, imported)


def _take_over(row: Alias, one: Given, target: str, imported: Imported) -> None:
    value = one.value.text if isinstance(one.value, Unread) else one.value
    try:
        made = _made(row, value, imported)
    except transforms.NotServed as error:
        imported.missing.append((one, str(error)))
    except transforms.Nothing as error:
        imported.skip(one, str(error))
    except (TypeError, ValueError, ArithmeticError, AttributeError):
        imported.unread.append((one, "it is not what hone takes this setting to be"))
    else:
        is_of_keys = isinstance(made, dict) and any("." in key for key in made)
        parts = made if is_of_keys else {target: made}
        if made is None:
            imported.skip(one, f"unset, as {target} is here")
            return
        for key, part in parts.items():
            imported.set(key, part, one)
        if any(imported.key(key) != imported.default(key) for key in parts):
            _warn(row, one, imported)


def _warn(row: Alias, one: Given, imported: Imported) -> None:
    written = text_of(one.value)
    text = row.differs if isinstance(row.differs, str) else row.differs.get(written, "")
    if text and one.where:
        imported.warn(f"{one.name} {written}: {text}.")


def _unmet(key: str, wanted: Any, imported: Imported) -> str:
    """Why a setting has no effect, by a condition of its row. Empty if it has one."""
    value = imported.key(key)
    if isinstance(wanted, bool):
        return (
            "" if bool(value) == wanted else f"it only counts with{'' if wanted else 'out'} {key}"
        )
    allowed = wanted if isinstance(wanted, list) else [wanted]
    return "" if value in allowed else f"it only counts where {key} is {' or '.join(allowed)}"


def _is_same(value: Any, other: Any) -> bool:
    """Whether the values are equal and both or neither are booleans."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _is_unread(value: Any) -> bool:
    """Whether a value, or a part of it, is known only when the script runs."""
    if isinstance(value, list):
        return any(isinstance(part, Unread) and part.is_expression for part in value)
    return isinstance(value, Unread)


def _is_text(value: Any, tree: type[Any], key: str | None) -> bool:
    """Whether a value is a text for a key that takes any text, which the user can then complete."""
    if not isinstance(value, Unread) or value.is_expression:
        return False
    target = locate(tree, key.replace("*", "0").split(".")) if key else None
    return target is not None and target.annotation in (str, str | None, Path, Path | None)
