"""What is wrong with the rows of a source: all counted by kind, the first ones of each told."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

__all__ = ["MOST_SHOWN", "Kind", "Problems"]

MOST_SHOWN = 20
"""Problems of a kind that are told."""
_PLACE = re.compile(r"^(.*?, (?:line|row) \d+)(?:, column '[^']*')?: ")
_ENDS = (", got ", ", near", " (", "; the row has", ": ", ", but text", ", but a ")
_NUMBER = re.compile(r"\d[\d,]*")
_REMEDIES = {
    "not valid JSON": "mend the lines or take them out; each line is one JSON object",
    "JSON that Python cannot read": "shorten the numbers or the nesting, or take the lines out",
    "a row must be a JSON object": "write each row as an object with named columns",
    "nothing": "fill the column, take the rows out, or name another one in `columns` of the source",
    "answer_pattern": "widen answer_pattern of the source, or take the rows out",
    "the prompt": "write the prompt as text or as messages with role and content, or name another "
    "column in columns.prompt",
    "chosen and rejected": "write both in the same way, or take the rows out",
    "the label": "write true or false",
    "the margin": "write a finite number, or take the column out",
    "column": "write all rows of a source in the same way, or split them into two sources",
}
"""What to change, by how a kind begins, for messages that do not say it themselves."""


@dataclass(slots=True)
class Kind:
    """Problems that differ in their rows and values alone."""

    what: str
    number: int = 0
    told: list[str] = field(default_factory=list[str])
    """The first messages, each with its place."""

    @property
    def remedy(self) -> str:
        """What to change, where the messages do not say it."""
        return next((text for head, text in _REMEDIES.items() if self.what.startswith(head)), "")


@dataclass(slots=True)
class Problems:
    """Problems by kind."""

    kinds: dict[str, Kind] = field(default_factory=dict[str, Kind])
    stopped: list[str] = field(default_factory=list[str])
    """Sources whose rest could not be read, with the place."""

    def __bool__(self) -> bool:
        return bool(self.kinds)

    def __len__(self) -> int:
        return sum(kind.number for kind in self.kinds.values())

    def add(self, message: str) -> None:
        """Count a problem, whose message begins with its place if it has one."""
        place = _PLACE.match(message)
        what = message[place.end() :] if place else message
        name = _name(what) if place else what
        kind = self.kinds.setdefault(name, Kind(name))
        kind.number += 1
        if len(kind.told) < MOST_SHOWN:
            kind.told.append(message)


def _name(what: str) -> str:
    """The message of a row without what differs from row to row."""
    ends = [place for end in _ENDS if (place := what.find(end)) > 0]
    return _NUMBER.sub("N", what[: min(ends, default=len(what))])
