"""What conditions of rules read: settings by their dotted keys, and facts by their names."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from hone.config.base import Section
from hone.config.plan import RunPlan
from hone.config.schema import is_section, locate
from hone.config.tree import TREES
from hone.families.model_facts import ModelFacts

__all__ = ["Fact", "NotKnownError", "View", "differs", "fact", "outside"]


class NotKnownError(LookupError):
    """A tree has no such key, or a fact cannot be known: no condition on it holds."""


@dataclass(frozen=True, slots=True)
class Fact:
    """A value that follows from settings, and how a message names it."""

    value: Any
    noun: str
    """As in `the longest row`."""
    how: str = ""
    """The settings that it comes from, as in `data.max_prompt_tokens + ...`."""


_FACTS: dict[str, Callable[[View], Any]] = {}


def fact(compute: Callable[[View], Any]) -> Callable[[View], Any]:
    """Register a function under its name; conditions read it as `@name`, texts as `{name}`.

    It returns a Fact, or a value that no message names. It raises NotKnownError, or lets what it
    reads raise it, where there is no such fact.
    """
    _FACTS[compute.__name__] = compute
    return compute


def outside(*names: str) -> None:
    """Declare facts that a caller of the rules knows, or does not; no plan has them."""

    def unknown(view: View) -> Any:
        raise NotKnownError

    _FACTS.update(dict.fromkeys(names, unknown))


@dataclass(frozen=True, slots=True)
class View:
    """A run as rules read it."""

    plan: RunPlan
    section: str | None = None
    """The section whose keys `sampling.*` are; None: nothing is sampled."""
    known: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Facts of which the plan does not know, and what the rule at hand has found."""

    @classmethod
    def all(cls, plan: RunPlan, known: Mapping[str, Any]) -> Iterator[View]:
        """A view for each section that samples, or the only one of a command without."""
        for section in plan.sampling or [None]:
            yield cls(plan, section, known)

    @property
    def command(self) -> str:
        """The words after `hone`."""
        return next(name for name, tree in TREES.items() if tree is type(self.plan.config))

    @property
    def model(self) -> ModelFacts:
        """Limits and sizes of the model. Raises NotKnownError where they are not known."""
        if self.plan.model is None:
            raise NotKnownError("config.json")
        return self.plan.model

    def key(self, key: str) -> str:
        """The key with its section in place of `sampling`."""
        if key.partition(".")[0] != "sampling":
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
        for part in self.key(key).split("."):
            try:
                value = value[int(part)] if part.isdecimal() else getattr(value, part)
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
        found = locate(type(self.plan.config), self.key(key).split("."))
        return found is not None and not is_section(found.annotation)

    def fact(self, name: str) -> Any:
        """A fact by its name: one of the caller, a registered one, or else what the plan or its
        model has of that name. It is a Fact, or a value that no message names."""
        if name in self.known:
            return self.known[name]
        if name in _FACTS:
            return _FACTS[name](self)
        return getattr(self.plan if hasattr(RunPlan, name) else self.model, name)

    def number(self, name: str) -> Any:
        """The value of a fact."""
        found = self.fact(name)
        return found.value if isinstance(found, Fact) else found


def differs(section: Section, *names: str) -> list[str]:
    """Which of these fields have another value than their default, that is, were meant."""
    defaults = type(section).model_fields
    return [
        name
        for name in names
        if getattr(section, name)
        != defaults[name].get_default(call_default_factory=True, validated_data={})
    ]
