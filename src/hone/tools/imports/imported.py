"""The result of an import so far, as conversion functions read it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any

from pydantic import TypeAdapter, ValidationError

from hone.config.schema import Field, fields, locate
from hone.config.tree import TREES
from hone.tools.imports.source import Given, Source
from hone.tools.imports.taken_out import TakenOut

__all__ = ["FILL_IN", "Imported", "Value", "order"]

FILL_IN = "FILL_IN"
"""Placeholder in a recipe for a value that the source does not give, which `hone check` refuses."""


@dataclass(slots=True)
class Value:
    """A value of hone's, and the settings that it comes from."""

    value: Any
    given: list[Given]


@dataclass(slots=True)
class Imported:
    """The result of an import: what became of each setting of a source."""

    source: Source
    values: dict[str, Value] = field(default_factory=dict[str, Value])
    """Values by hone's dotted keys; entries of lists have their position."""
    differs: list[str] = field(default_factory=list[str])
    """Notes on values that mean something else in hone."""
    missing: list[tuple[Given, str]] = field(default_factory=list[tuple[Given, str]])
    """Settings that hone does not have, with the reason."""
    unread: list[tuple[Given, str]] = field(default_factory=list[tuple[Given, str]])
    """Settings whose value is unknown or invalid here, and names that the table lacks."""
    unneeded: list[tuple[Given, str]] = field(default_factory=list[tuple[Given, str]])
    """Settings for which nothing has to be set, with the reason."""
    to_do: list[str] = field(default_factory=list[str])
    """Tasks that are left for the user."""
    taken_out: TakenOut | None = None
    """A file that the recipe names and that is to be written beside it."""
    processes: int = 1
    """Training processes: `--nproc`."""

    def key(self, key: str) -> Any:
        """Current value of a key: set, or the default."""
        found = self.values.get(key)
        if found is not None:
            return found.value
        return self.default(key)

    def is_set(self, key: str) -> bool:
        """Whether a setting has given the key a value."""
        return key in self.values and self.values[key].value != FILL_IN

    def leave_open(self, key: str, why: str) -> None:
        """Leave a key to be filled in, which nothing has set."""
        self.to_do.append(f"{key}: {why}")
        self.values.setdefault(key, Value(FILL_IN, []))

    def given(self, *names: str, default: Any = None) -> Any:
        """The value of the first of these settings that is given."""
        for name in names:
            for one in reversed(self.source.given):
                if f".{self.source.program}.{one.name}".endswith(f".{name}"):
                    return one.value
        return default

    def warn(self, text: str) -> None:
        """Add a note on a different meaning, once."""
        if text not in self.differs:
            self.differs.append(text)

    @property
    def tree(self) -> type[Any]:
        """Configuration class of the command that the recipe is for."""
        return TREES[self.source.command]

    @property
    def is_spread(self) -> bool:
        """Whether a role has devices other than the trainers'."""
        roles = ("engines", "critics", "references", "reward_models")
        return self.is_rl and any(self.key(f"cluster.num_{role}") for role in roles)

    @property
    def is_rl(self) -> bool:
        """Whether it is for `hone rl`."""
        return self.source.command == "rl"

    def set(self, key: str, value: Any, one: Given) -> None:
        """Set a key, or the same key of all entries of a list."""
        entries = self._entries(key)
        if not entries:
            self.skip(one, f"{key.partition('.*')[0]} is empty")
        for each in entries:
            made, problem = _checked(self.tree, each, value)
            before = self.values.get(each)
            if problem:
                self.unread.append((one, f"{each}: {problem}"))
            elif before is not None and before.value == made:
                before.given.append(one)
            elif one.where or made != self.key(each) or ".*." in key:
                for other in before.given if before else []:
                    if other.where:
                        self.skip(other, f"{one.name} decides over {each}")
                self.values[each] = Value(made, [one])

    def _entries(self, key: str) -> list[str]:
        head, star, rest = key.partition(".*.")
        if not star:
            return [key]
        count = sum(
            name.startswith(f"{head}.") and name.endswith((".path", ".fn")) for name in self.values
        )
        count = max(count, head == "data.train")  # the one that is to be filled in
        return [f"{head}.{number}.{rest}" for number in range(count)]

    def default(self, key: str) -> Any:
        """Default of a key."""
        target = locate(self.tree, key.split("."))
        return target and target.default

    def has(self, key: str) -> bool:
        """Whether the command has the key."""
        return locate(self.tree, key.replace("*", "0").split(".")) is not None

    def skip(self, one: Given, why: str) -> None:
        """Record that nothing has to be set for a setting. Defaults of the framework are not
        recorded."""
        if one.where:
            self.unneeded.append((one, why))


def _checked(tree: type[Any], key: str, value: Any) -> tuple[Any, str]:
    """The value as the key's type, or the error."""
    parts = ["0" if part.isdecimal() else part for part in key.split(".")]
    target = locate(tree, parts)
    assert target is not None, key
    adapter = TypeAdapter[Any](_bounded(target))
    try:
        return adapter.dump_python(adapter.validate_python(value), mode="json"), ""
    except ValidationError:
        return None, f"got {value!r}, allowed is {target.allowed}"


def _bounded(target: Field) -> Any:
    """The type of a key with its bounds, which pydantic stores separately."""
    made = target.annotation
    for bound in target.info.metadata if target.info else ():
        made = Annotated[made, bound]
    return made


def order(command: str) -> Mapping[str, int]:
    """Position of each key in the tree of a command."""
    return {field.key: place for place, field in enumerate(fields(TREES[command]))}
