"""Settings of another framework become values of ours; nothing is left out silently."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from hone.config.aliases import Alias, aliases, find_alias
from hone.config.recipe import read_recipe
from hone.config.schema import locate
from hone.importing import transforms
from hone.importing.imported import Imported, Value
from hone.importing.source import Given, Source, Unread, text_of

__all__ = ["FILL_IN", "convert"]

FILL_IN = "FILL_IN"
"""What a recipe has where nothing names what it needs."""

_DEFAULTS = Path(__file__).with_name("defaults.yaml")
_REQUIRED = ("model.path", "data.train.0.path")
_OFF = (False, None, "", [])


def convert(source: Source) -> Imported:
    """Serve all settings of a source, and those that its framework sets by itself."""
    found = Imported(source)
    found.processes = source.processes or transforms.processes(found)
    number = {id(row): place for place, row in enumerate(aliases())}
    rows: list[tuple[int, Given, Alias]] = []
    for one in _last(source.given):
        row = _row(source, one.name)
        if row is None:
            why = "hone knows no setting of this name; `hone rl --help` has all of its own"
            found.unread.append((one, why))
        else:
            rows.append((number[id(row)], one, row))
    taken = {place for place, _, _ in rows}
    for name, value in _defaults(source):
        row = _row(source, name)
        assert row is not None, name
        if number[id(row)] not in taken:
            rows.append((number[id(row)], Given(name, value, ""), row))
    for _, one, row in sorted(rows, key=lambda entry: entry[0]):
        _take(row, one, found)
    used = [one for value in found.values.values() for one in value.given]
    found.unneeded = [(one, why) for one, why in found.unneeded if one not in used]
    _complete(found)
    return found


def _row(source: Source, name: str) -> Alias | None:
    found = find_alias(source.framework, [source.program, *name.split(".")])
    return found and found[1]


def _last(given: Sequence[Given]) -> Iterator[Given]:
    """Of a setting that is given twice the last, as everywhere."""
    last = {one.name: one for one in given}
    return (one for one in given if last[one.name] is one)


def _defaults(source: Source) -> Iterator[tuple[str, Any]]:
    """What the framework does where a setting is not given, and hone does not."""
    programs = _programs()[source.framework]
    for name in dict.fromkeys((source.command, source.program)):
        yield from programs.get(name, {}).items()


@cache
def _programs() -> Mapping[str, Any]:
    """The defaults of each framework's programs."""
    return read_recipe(_DEFAULTS).values


def _made(row: Alias, value: Any, found: Imported) -> Any:
    """Our value, or values by key; None where nothing is to be set."""
    if row.map is not None:
        if text_of(value) not in row.map:
            known = ", ".join(name for name in row.map if name not in ("true", "false", "null"))
            raise transforms.NotServed(f"of its values hone knows {known}")
        return row.map[text_of(value)]
    return transforms.transform(row.by, value, found, row) if row.by else value


def _complete(found: Imported) -> None:
    """What a recipe cannot do without, and what follows from all of it."""
    transforms.finish(found)
    for key in _REQUIRED:
        if key not in found.values:
            found.values[key] = Value(FILL_IN, [])
            found.to_do.append(f"{key}: nothing that could be read names it")
    for key, value in found.values.items():
        if isinstance(value.value, str) and ("$" in value.value or "`" in value.value):
            found.to_do.append(f"{key}: {value.value} is known only when the script runs")


def _take(row: Alias, one: Given, found: Imported) -> None:
    """Serve one setting by its row of the table."""
    target = next((key for key in row.to if found.has(key)), None)
    if _is_unread(one.value) and not row.always and not _is_text(one.value, found.tree, target):
        found.unread.append((one, "only a run of the script could tell"))
    elif row.to and target is None:
        found.skip(one, f"{' and '.join(row.to)}: not of `hone {found.source.command}`")
    elif reason := next(filter(None, (_unmet(*rule, found) for rule in row.when.items())), None):
        found.skip(one, reason)
    elif target is None or row.always or row.missing:
        if row.always or any(_is_same(one.value, off) for off in (*_OFF, *(row.off or (0,)))):
            found.skip(one, row.always or "as here")
        else:
            found.missing.append((one, row.missing))
        _warn(row, one, found)
    else:
        _take_over(row, one, target, found)


def _take_over(row: Alias, one: Given, target: str, found: Imported) -> None:
    value = one.value.text if isinstance(one.value, Unread) else one.value
    try:
        made = _made(row, value, found)
    except transforms.NotServed as error:
        found.missing.append((one, str(error)))
    except transforms.Nothing as error:
        found.skip(one, str(error))
    except (TypeError, ValueError, ArithmeticError, AttributeError):
        found.unread.append((one, "it is not what hone takes this setting to be"))
    else:
        is_of_keys = isinstance(made, dict) and any("." in key for key in made)
        parts = made if is_of_keys else {target: made}
        if made is None:
            found.skip(one, f"unset, as {target} is here")
            return
        for key, part in parts.items():
            found.set(key, part, one)
        if any(found.key(key) != found.default(key) for key in parts):
            _warn(row, one, found)


def _warn(row: Alias, one: Given, found: Imported) -> None:
    written = text_of(one.value)
    text = row.differs if isinstance(row.differs, str) else row.differs.get(written, "")
    if text and one.where:
        found.warn(f"{one.name} {written}: {text}.")


def _unmet(key: str, wanted: Any, found: Imported) -> str:
    """Why a setting does not count, by a condition of its row; empty where it does."""
    value = found.key(key)
    if isinstance(wanted, bool):
        return (
            "" if bool(value) == wanted else f"it only counts with{'' if wanted else 'out'} {key}"
        )
    allowed = wanted if isinstance(wanted, list) else [wanted]
    return "" if value in allowed else f"it only counts where {key} is {' or '.join(allowed)}"


def _is_same(value: Any, other: Any) -> bool:
    """Equal, and no number beside a truth value."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _is_unread(value: Any) -> bool:
    """Whether a value is known only when the script runs, or has a part that is."""
    if isinstance(value, list):
        return any(isinstance(part, Unread) and part.is_expression for part in value)
    return isinstance(value, Unread)


def _is_text(value: Any, tree: type[Any], key: str | None) -> bool:
    """Whether a value is a text for a key that takes any, to be filled in by a person."""
    if not isinstance(value, Unread) or value.is_expression:
        return False
    target = locate(tree, key.replace("*", "0").split(".")) if key else None
    return target is not None and target.annotation in (str, str | None, Path, Path | None)
