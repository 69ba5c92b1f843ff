"""The values that conditions of rules read: settings by dotted key, and further facts about a
run."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property
from typing import Any, Generic, TypedDict, TypeVar

from hone.config.base import Section
from hone.config.plan import RunPlan
from hone.config.schema import is_section, locate
from hone.config.tree import TREES
from hone.families.model_facts import ModelFacts

__all__ = ["Details", "Fact", "Known", "NotKnownError", "View", "command_of", "differs", "required"]

T = TypeVar("T")

Details = Mapping[str, object]
"""Details that a rule on files or list entries has found, by the names in its texts."""


class NotKnownError(LookupError):
    """A tree has no such key, or a fact cannot be known: no condition on it holds."""


@dataclass(frozen=True, slots=True)
class Fact(Generic[T]):
    """A value that follows from settings, and how a message names it."""

    value: T
    noun: str
    """Noun phrase for messages, such as `the longest row`."""
    how: str = ""
    """The settings that it comes from, as in `data.max_prompt_tokens + ...`."""


class Known(TypedDict, total=False):
    """What a caller of the rules knows of a run and no plan has: where a command starts processes,
    this host and the first rows of the data. `hone check` plans for other hosts too."""

    can_install: bool
    """Whether packages can still be installed, so that none is missing."""
    lacks_room_for_two_rows: bool
    """Whether memory is known not to hold two of the longest rows at once."""
    num_started: int
    """Processes that are started on this host."""
    started_by: str
    """The flag or key that says how many."""
    gpus_here: int | None
    """GPUs of this host that a run can use; None: not known."""
    cores_here: int
    """CPU cores of this host."""
    num_trainers_here: Fact[int]
    """Processes that train on this host, where others train elsewhere."""
    first_rows: Mapping[str, Sequence[tuple[str, Collection[str]]]]
    """The first rows of each source, as a place such as `train.jsonl:1` and the row's columns."""
    unread_arrays: Sequence[Details]
    """Sources that are JSON arrays too large to be read before the run, whose columns matter."""
    data_problems: Sequence[Details]
    """Sources whose first rows cannot be read or lack a column."""
    weak_pairs: Sequence[Details]
    """Sources of pairs among whose first rows some teach nothing."""
    num_train_rows: int
    """Rows to train on, before some are held out or dropped, where they do not fill a step."""
    reward_problems: Sequence[Details]
    """Built-in reward functions that cannot be made with their arguments."""
    hub_problems: Sequence[Details]
    """Models that the hub does not give."""


def required(value: T | None, name: str) -> T:
    """The value. Raises NotKnownError with the name of what is not known, where it is None."""
    if value is None:
        raise NotKnownError(name)
    return value


def command_of(plan: RunPlan) -> str:
    """The command that is planned, as the words after `hone`."""
    return next(name for name, tree in TREES.items() if tree is type(plan.config))


@cache
def _path(key: str) -> tuple[str | int, ...]:
    """The parts of a dotted key, those of decimal digits as indices."""
    return tuple(int(part) if part.isdecimal() else part for part in key.split("."))


@dataclass(frozen=True)
class View:
    """A run as rules read it."""

    plan: RunPlan
    section: str | None = None
    """The section whose keys `sampling.*` are; None: nothing is sampled."""
    known: Known = field(default_factory=Known)
    held: dict[str, bool] = field(default_factory=dict[str, bool])
    """Whether conditions hold, by their text: many rules have one in common."""

    @cached_property
    def command(self) -> str:
        """The words after `hone`."""
        return command_of(self.plan)

    @property
    def model(self) -> ModelFacts:
        """Limits and sizes of the model. Raises NotKnownError where they are not known."""
        return required(self.plan.model, "config.json")

    def key(self, key: str) -> str:
        """The key with its section in place of `sampling`."""
        if _path(key)[0] != "sampling":
            return key
        if key == "sampling.n_samples_per_prompt" and self.section == "generation":
            return "n_samples_per_prompt"
        return key.replace("sampling", self.section or "sampling", 1)

    def __getitem__(self, key: str) -> Any:
        """The value of a setting, `run.device` with auto decided. Raises NotKnownError where the
        tree has no such key."""
        if key == "run.device":
            return self.plan.device
        value: Any = self.plan.config
        try:
            for part in _path(self.key(key)):
                value = value[part] if isinstance(part, int) else getattr(value, part)
        except (AttributeError, IndexError, TypeError):
            raise NotKnownError(key) from None
        return value

    def is_set(self, key: str) -> bool:
        """Whether a setting has another value than its default, that is, was meant."""
        above, _, name = self.key(key).rpartition(".")
        section = self[above] if above else self.plan.config
        if name not in type(section).model_fields:
            raise NotKnownError(key)
        return bool(differs(section, name))

    def has(self, key: str) -> bool:
        """Whether the tree has such a setting; sections and their entries are none."""
        setting = locate(type(self.plan.config), self.key(key).split("."))
        return setting is not None and not is_section(setting.annotation)


def differs(section: Section, *names: str) -> list[str]:
    """The fields whose value differs from their default, and so was set on purpose."""
    defaults = type(section).model_fields
    return [
        name
        for name in names
        if getattr(section, name)
        != defaults[name].get_default(call_default_factory=True, validated_data={})
    ]
