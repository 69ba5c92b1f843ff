"""The settings in which runs differ, of those that their commands read.

    unequal_settings(runs).rows  # [["algorithm.advantage", "grpo", "rloo"], ...]

A run folder has the whole configuration of its command. What a command reads past, such as
`log.samples_per_step` where nothing is sampled, makes no difference and is left out; so is a key
that one run lacks where the others have its default, as in an entry that only one list has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, get_args, get_origin

from hone.config.rules.files import UNREAD_OF_SOURCES
from hone.config.schema import is_section, locate
from hone.config.tree import TREES
from hone.observe.differences import DASH, differences, flat
from hone.observe.run_folder import Kind, RunFolder
from hone.rules import unread_keys

__all__ = ["Unequal", "unequal_settings"]

_PLACES = ("run.dir", "output")
"""Where a run writes to, which differs between any two."""
_AS_WRITTEN = {"None": "unset", "True": "true", "False": "false"}
"""Values as recipes and messages have them."""


class Unequal(NamedTuple):
    """What `unequal_settings` has found."""

    rows: list[list[str]]
    """Key, and its value in each run."""
    unknown: list[str]
    """Keys that differ and that the runs' command does not have, as those of another version."""


def unequal_settings(runs: Sequence[RunFolder]) -> Unequal:
    """The settings whose values are not equal in all runs. Of runs of several commands those that
    each of the commands has."""
    kinds: list[Kind] = list(dict.fromkeys(run.kind for run in runs))
    values = [flat(run.config) for run in runs]
    keys = dict.fromkeys(key for each in values for key in each if key not in _PLACES)
    shared = [key for key in keys if all(_is_read(kind, key) for kind in kinds)]
    unknown = [key for key in keys if not any(_has(kind, key) for kind in kinds)]
    rows = [
        [key, *(_AS_WRITTEN.get(cell, cell) for cell in cells)]
        for key, *cells in differences([_only(each, shared) for each in values])
        if DASH not in cells
        or any(
            cell not in (DASH, _default(run.kind, key))
            for run, cell in zip(runs, cells, strict=True)
        )
    ]
    others = differences([_only(each, unknown) for each in values])
    return Unequal(rows, [key for key, *_ in others])


def _only(values: Mapping[str, str], keys: Sequence[str]) -> dict[str, str]:
    return {key: values[key] for key in keys if key in values}


def _default(kind: Kind, key: str) -> str:
    """The default of a key as `flat` writes it; that of one that must be given is unset."""
    field = locate(TREES[kind], key.split("."))
    default = None if field is None else field.default
    return str(list(default) if isinstance(default, tuple) else default)


def _has(kind: Kind, key: str) -> bool:
    """Whether a command has a key, or has it inside of the value of one, as `algorithm.loss.gspo`
    is of a mapping of losses."""
    path = key.split(".")
    found = (locate(TREES[kind], path[:length]) for length in range(len(path), 0, -1))
    nearest = next((field for field in found if field is not None), None)
    return nearest is not None and (nearest.key == key or not _holds_keys(nearest.annotation))


def _holds_keys(annotation: Any) -> bool:
    """Whether a value of this type is a section or a list of sections, whose keys are declared."""
    entry = get_args(annotation)[0] if get_origin(annotation) is tuple else annotation
    return is_section(entry)


def _is_read(kind: Kind, key: str) -> bool:
    """Whether a command has a key and does not read past it."""
    return _has(kind, key) and not any(
        key == unread or key.startswith(f"{unread}.") for unread in _unread(kind, key)
    )


def _unread(kind: Kind, key: str) -> Iterator[str]:
    """The keys that the command reads past, of the same source as this one where they are of
    sources: `data.train.0.weight`."""
    yield from unread_keys(kind)
    section, _, rest = key.removeprefix("data.").partition(".")
    number = rest.partition(".")[0]
    for name in UNREAD_OF_SOURCES.get(kind, {}).get(section, ()):
        yield f"data.{section}.{number}.{name}"
