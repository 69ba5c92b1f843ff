"""What a rule is, how its conditions are read, and the one place where messages are written.

    error("trainer.offload != none", "trainer.optimizer.name = muon",
          why="Muon orthogonalises whole matrices, and what lies on the host comes back in pieces",
          fix="trainer.optimizer.name = adamw | trainer.offload = none")

is found in a run that has both, of any command whose tree has both keys, as

    trainer.offload is gradients, and trainer.optimizer.name is muon: Muon orthogonalises whole
    matrices, and what lies on the host comes back in pieces. Set trainer.optimizer.name to adamw,
    or trainer.offload to none.

A condition is one of

    KEY                 it is on, above 0, or has a value
    not KEY             it is off, 0, unset or empty
    KEY has X           its list holds it
    KEY is set          it has another value than its default; `is default`: it has not
    SECTION.* is set    some key of the section has, or of SECTION.(A|B|C)
    KEY = A|B           one of these; likewise !=, <, <=, >, >=, `does not divide`

where what is compared with is a value (`unset`: none), another KEY, or a @fact; facts may also be
on the left. A condition on a key that the tree of a command does not have, or on a fact that is not
known, does not hold. So most rules need not say which commands they are for.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import PurePath
from typing import Any, TypedDict, Unpack, cast

from hone.config.base import Section
from hone.config.rules.finding import Finding, Level
from hone.config.rules.view import Fact, NotKnownError, View
from hone.extras import missing_extra

__all__ = ["Condition", "Rule", "error", "excludes", "needs", "unused", "warning"]

Found = Iterable[Mapping[str, object]]

_CONDITION = re.compile(
    r"(not )?(@?[\w.]+(?:\*|\([\w|]+\))?)"
    r"(?: (is set|is default|has|=|!=|<=|>=|<|>|does not divide)(?: (.+))?)?"
)
_COMPARED: Mapping[str, tuple[Callable[[Any, Any], bool], str]] = {
    "<": (operator.lt, "less than"),
    "<=": (operator.le, "no more than"),
    ">": (operator.gt, "more than"),
    ">=": (operator.ge, "no less than"),
    "does not divide": (lambda part, whole: whole % part != 0, "which does not divide"),
}
_CHANGE = re.compile(r"([\w.]+) = (.+)")
_PLACE = re.compile(r"\{([\w.]+)\}")
_KEY = re.compile(r"[a-z]\w*(?:\.\w+)+")


@dataclass(frozen=True, slots=True)
class Condition:
    """One comparison of a setting or a fact."""

    left: str
    op: str = ""
    right: str = ""

    @classmethod
    def parse(cls, text: str) -> Condition:
        """Read the notation above."""
        match = _CONDITION.fullmatch(text)
        assert match is not None, f"{text=}"
        negated, left, op, right = match.groups(default="")
        return cls(left, "not" if negated else op, right)

    def holds(self, view: View) -> bool:
        """Whether the run that is viewed is so."""
        try:
            if self.op == "is set":
                return bool(self.meant(view))
            left = _left(view, self.left)
            match self.op:
                case "":
                    return bool(left)
                case "not":
                    return not left
                case "is default":
                    return not view.is_set(self.left)
                case "has":
                    return self.right in left
                case "=" | "!=":
                    rights = [_value(view, right) for right in self.right.split("|")]
                    return (left in rights) == (self.op == "=")
                case compared:
                    both = left, _value(view, self.right)
                    are_numbers = all(isinstance(value, int | float) for value in both)
                    return are_numbers and _COMPARED[compared][0](*both)
        except NotKnownError:
            return False

    def meant(self, view: View) -> list[str]:
        """The keys on the left that have another value than their default."""
        if self.left.startswith("@"):
            return []
        above, _, names = self.left.rpartition(".")
        section = view[above] if above else view.plan.config
        fields = type(section).model_fields if names == "*" else names.strip("()").split("|")
        keys = [f"{above}.{name}" if above else name for name in fields]
        return [view.key(key) for key in keys if view.is_set(key)]

    def says(self, view: View) -> str:
        """The condition in words, with the values that are there."""
        if self.op == "is set":
            return " and ".join(f"{key} is {_in_words(view[key])}" for key in self.meant(view))
        fact = view.fact(self.left[1:]) if self.left.startswith("@") else None
        if isinstance(fact, Fact):
            said = f"{fact.noun} is {_in_words(fact.value)}{f' ({fact.how})' * bool(fact.how)}"
        else:
            said = f"{view.key(self.left)} is {_in_words(view[self.left])}"
            if self.left == "run.device" and view.plan.config.run.device == "auto":
                said += " here"
        if self.op == "is default":
            return f"{said}, its default"
        if not (self.right.startswith("@") or view.has(self.right)):
            return said
        words = _COMPARED[self.op][1] if self.op in _COMPARED else "and not"
        return f"{said}, {words} {_operand(view, self.right)}"


def _left(view: View, term: str) -> Any:
    return view.number(term[1:]) if term.startswith("@") else view[term]


def _value(view: View, term: str) -> Any:
    """A @fact, the value of a key, or the value that is written."""
    if term.startswith("@"):
        return view.number(term[1:])
    if term in _CONSTANTS:
        return _CONSTANTS[term]
    try:
        return float(term) if "." in term or "e" in term else int(term)
    except ValueError:
        return view[term] if "." in term or view.has(term) else term


_CONSTANTS = {"true": True, "false": False, "unset": None}


def _operand(view: View, term: str) -> str:
    if not term.startswith("@"):
        return f"{view.key(term)} = {_in_words(view[term])}"
    fact = view.fact(term[1:])
    assert isinstance(fact, Fact), f"{term=}"
    return f"{fact.noun} ({f'{fact.how} = ' * bool(fact.how)}{_in_words(fact.value)})"


def _in_words(value: object) -> str:
    match value:
        case None:
            return "unset"
        case bool():
            return "on" if value else "off"
        case float():
            return f"{value:g}"
        case Section():
            return "set"
        case dict():
            entries = cast("dict[str, object]", value).items()
            return f"{{{', '.join(f'{key}: {_in_words(held)}' for key, held in entries)}}}"
        case tuple() | list():
            return f"[{', '.join(map(_in_words, value))}]" if value else "empty"
        case str() | PurePath() if re.search(r"[\s/']|^$", str(value)):
            return f"'{value}'"
        case _:
            return str(value)


class _Rest(TypedDict, total=False):
    """Fields of a rule besides its level and `when`."""

    why: str
    fix: str
    given: tuple[str, ...]
    each: Callable[[View], Found]
    says: str
    only: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """A row of the table: what is found, why it is wrong, what to change to what.

    In texts `{key}`, `{fact}` and `{detail}` stand for their values, `{meant}` for the keys that
    `when` says are set.
    """

    level: Level
    when: tuple[str, ...]
    """Conditions that all hold; the message states them."""
    why: str = ""
    """The reason."""
    fix: str = ""
    """Remedies, each of which serves, between ` | `: `KEY = VALUE`, or what to do in words."""
    given: tuple[str, ...] = ()
    """Further conditions, which go without saying."""
    each: Callable[[View], Found] | None = None
    """What else is looked at, such as files: the details of each finding, by their names."""
    says: str = ""
    """What the message states, where that is not `when`."""
    only: tuple[str, ...] = ()
    """Commands that it is for; none: all but the simulation."""
    is_unused: bool = False
    """The first of `when` has no effect because of the others."""

    def find(self, view: View) -> Iterator[Finding]:
        """The findings in a run."""
        is_for = view.command in self.only if self.only else view.command != "plan"
        if not is_for or not all(_condition(x).holds(view) for x in (*self.when, *self.given)):
            return
        try:
            for details in [{}] if self.each is None else self.each(view):
                yield self.finding(view, **details)
        except NotKnownError:
            return

    def finding(self, view: View, **details: object) -> Finding:
        """What is told of a run in which the rule applies."""
        conditions = [_condition(text) for text in self.when]
        meant = [key for x in conditions if x.op == "is set" for key in x.meant(view)]
        view = replace(view, known={**view.known, "meant": " and ".join(meant), **details})
        statement, why = self._statement(view), _filled(self.why, view)
        told = f"{statement}: {why}" if why else statement
        terms = [term for x in conditions for term in (x.left, x.right)]
        named = [*map(view.key, terms), statement.split()[0], *_KEY.findall(told)]
        keys = dict.fromkeys([*meant, *(key for key in named if view.has(key))])
        return Finding(self.level, tuple(keys), _sentences(told, _remedy(self.fixes(view))))

    def fixes(self, view: View) -> list[str]:
        """The remedies with their values."""
        return [text for text in _filled(self.fix, view).split(" | ") if text]

    def _statement(self, view: View) -> str:
        if self.says:
            return _filled(self.says, view)
        first, *others = [_condition(text).says(view) for text in self.when]
        if not self.is_unused:
            return _listed([first, *others])
        since = f", since {' and '.join(others)}" if others else ""
        verb = "has" if " and " not in first else "have"
        return f"{first} and {verb} no effect{since}"


_condition = cache(Condition.parse)


def error(*when: str, **rest: Unpack[_Rest]) -> Rule:
    """A rule whose finding stops the run before it starts."""
    return Rule("error", when, **rest)


def warning(*when: str, **rest: Unpack[_Rest]) -> Rule:
    """A rule whose finding is told."""
    return Rule("warning", when, **rest)


def unused(key: str, *since: str, instead: str = "", **rest: Unpack[_Rest]) -> Rule:
    """A warning of a setting that was meant and has no effect; `instead` makes it act."""
    rest["fix"] = f"{instead} | remove {{meant}}"
    return Rule("warning", (f"{key} is set", *since), **rest, is_unused=True)


def excludes(feature: str, off: str, others: Mapping[str, tuple[str, str]]) -> tuple[Rule, ...]:
    """Errors of what `feature` cannot be combined with: conditions, each with the reason and the
    value that serves. `off` takes the feature away."""
    return tuple(
        error(feature, other, why=why, fix=f"{_condition(other).left} = {value} | {off}")
        for other, (why, value) in others.items()
    )


def needs(package: str, *when: str, by: str, instead: str = "", only: tuple[str, ...] = ()) -> Rule:
    """An error where a package is not installed; `by` is what needs it. None where packages are
    known to be installed later (`can_install`): a plan is for another machine."""

    def missing(view: View) -> Iterator[Mapping[str, object]]:
        if view.known.get("can_install", False):
            return
        on_cpu = view["run.device"] == "cpu"
        text = missing_extra(package, needed_by=_filled(by, view), on_cpu=on_cpu)
        yield from [] if text is None else [{"missing": text}]

    return error(*when, each=missing, says="{missing}", fix=instead, only=only)


def _listed(texts: Sequence[str]) -> str:
    *most, last = texts
    return f"{', '.join(most)}, and {last}" if most else last


def _filled(text: str, view: View) -> str:
    """A text with values in its places, and the section's keys for those of `sampling`."""

    def value(place: re.Match[str]) -> str:
        name = place[1]
        is_fact = name in view.known or not ("." in name or view.has(name))
        found = view.number(name) if is_fact else view[name]
        if is_fact and isinstance(found, tuple | list):
            return ", ".join(map(str, found))
        return str(found) if isinstance(found, str | PurePath) else _in_words(found)

    text = _PLACE.sub(value, text)
    return re.sub(r"(?<![\w.])sampling\.\w+", lambda match: view.key(match[0]), text)


def _remedy(fixes: Sequence[str]) -> str:
    """`Set A to x, or B to y, or do z`."""
    told, was_change = list[str](), False
    for text in fixes:
        change = _CHANGE.fullmatch(text)
        if change is not None:
            text = f"{'' if was_change else 'set '}{change[1]} to {change[2]}"
        was_change = change is not None
        told.append(text)
    return ", or ".join(told)


def _sentences(*texts: str) -> str:
    """Texts that each begin with a capital, but a key, and end with a stop."""
    first, *others = [text for text in texts if text]
    others = [text[0].upper() + text[1:] for text in others]
    return " ".join(text if text.endswith((".", "?")) else f"{text}." for text in [first, *others])
