"""The language of rules: their form, the evaluation of conditions, and the writing of messages.

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

A @fact is an attribute of the class that `with_facts` gives to a table of rules; a name that the
class does not have is refused there.
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
from hone.config.rules.facts import Facts
from hone.config.rules.finding import Finding, Level
from hone.config.rules.view import Details, Fact, NotKnownError
from hone.config.tree import TREES
from hone.errors import did_you_mean
from hone.extras import missing_extra

__all__ = ["Condition", "Rule", "error", "excludes", "needs", "unused", "warning", "with_facts"]


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

    @property
    def facts(self) -> list[str]:
        """The names of the facts that it reads."""
        terms = [self.left, *self.right.split("|")]
        return [term[1:] for term in terms if term.startswith("@")]

    def holds(self, view: Facts) -> bool:
        """Whether the run that is viewed is so."""
        try:
            if self.op == "is set":
                return bool(self.keys_set(view))
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
                    rights = [_right(view, right) for right in self.right.split("|")]
                    return (left in rights) == (self.op == "=")
                case compared:
                    both = left, _right(view, self.right)
                    are_numbers = all(isinstance(value, int | float) for value in both)
                    return are_numbers and _COMPARED[compared][0](*both)
        except NotKnownError:
            return False

    @property
    def keys(self) -> list[str]:
        """The keys on the left, `data.(eval|eval_fraction)` written out."""
        above, _, names = self.left.rpartition(".")
        return [f"{above}.{name}" if above else name for name in names.strip("()").split("|")]

    def keys_set(self, view: Facts) -> list[str]:
        """The keys on the left that have another value than their default."""
        if self.left.startswith("@"):
            return []
        above, _, names = self.left.rpartition(".")
        section = view[above] if above else view.plan.config
        fields = type(section).model_fields if names == "*" else names.strip("()").split("|")
        keys = [f"{above}.{name}" if above else name for name in fields]
        return [view.key(key) for key in keys if view.is_set(key)]

    def in_words(self, view: Facts) -> str:
        """The condition as a clause, with the values that are there."""
        if self.op == "is set":
            return " and ".join(f"{key} is {_in_words(view[key])}" for key in self.keys_set(view))
        fact = getattr(view, self.left[1:]) if self.left.startswith("@") else None
        if isinstance(fact, Fact):
            clause = f"{fact.noun} is {_in_words(fact.value)}{f' ({fact.how})' * bool(fact.how)}"
        else:
            clause = f"{view.key(self.left)} is {_in_words(view[self.left])}"
            if self.left == "run.device" and view.plan.config.run.device == "auto":
                clause += " here"
        if self.op == "is default":
            return f"{clause}, its default"
        if not (self.right.startswith("@") or view.has(self.right)):
            return clause
        relation = _COMPARED[self.op][1] if self.op in _COMPARED else "and not"
        return f"{clause}, {relation} {_operand(view, self.right)}"


def _number(view: Facts, name: str) -> Any:
    """The value of a fact."""
    fact = getattr(view, name)
    return fact.value if isinstance(fact, Fact) else fact


def _left(view: Facts, term: str) -> Any:
    """The value of a @fact or of a key."""
    return _number(view, term[1:]) if term.startswith("@") else view[term]


def _right(view: Facts, term: str) -> Any:
    """The value of a @fact or of a key, or the value that is written."""
    if term.startswith("@"):
        return _number(view, term[1:])
    written = _written(term)
    if written is not _NO_VALUE:
        return written
    return view[term] if "." in term or view.has(term) else term


@cache
def _written(term: str) -> Any:
    """The constant or the number that is written; `_NO_VALUE` for other words."""
    if term in _CONSTANTS:
        return _CONSTANTS[term]
    try:
        return float(term) if "." in term or "e" in term else int(term)
    except ValueError:
        return _NO_VALUE


_CONSTANTS = {"true": True, "false": False, "unset": None}
_NO_VALUE = object()


def _operand(view: Facts, term: str) -> str:
    """The right side of a comparison, as text with its name and value."""
    if not term.startswith("@"):
        return f"{view.key(term)} = {_in_words(view[term])}"
    fact = getattr(view, term[1:])
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
    each: Callable[[Any], Iterable[Details]] | str
    says: str
    only: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Rule:
    """A row of the table: what is wrong, why, and what to change to what.

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
    each: Callable[[Any], Iterable[Details]] | str | None = None
    """What else is looked at, such as files, by a function of the facts or by a @fact: the details
    of each finding, by their names."""
    says: str = ""
    """Statement of the message; by default that of `when`."""
    only: tuple[str, ...] = ()
    """Commands that it is for; none: all but the simulation."""
    is_unused: bool = False
    """The first of `when` has no effect because of the others."""
    facts: type[Facts] = Facts
    """Class whose attributes are the rule's facts."""

    def is_for(self, command: str) -> bool:
        """Whether the rule applies to a command, given as the words after `hone`."""
        return command in self.only if self.only else command != "plan"

    def find(self, view: Facts) -> Iterable[Finding]:
        """The findings in a run of a command that the rule is for, which is viewed as the rule's
        `facts`."""
        for text in (*self.when, *self.given):
            if (holds := view.held.get(text)) is None:
                holds = view.held[text] = _condition(text).holds(view)
            if not holds:
                return ()
        return self._found(view)

    def _found(self, view: Facts) -> Iterator[Finding]:
        try:
            for details in self._details(view):
                yield self._finding(view, details)
        except NotKnownError:
            return

    def unread_keys(self, command: str) -> list[str]:
        """The keys that by this rule a command always reads past, whatever else is set."""
        if not self.is_unused or command not in self.only or len(self.when) != 1 or self.given:
            return []
        return _condition(self.when[0]).keys

    def facts_read(self) -> list[str]:
        """The names of the facts in its conditions and texts.

        A place in a text names a fact where it names no key. With `each` it may name a detail too,
        and only the function knows which there are: then it counts where there is such a fact.
        """
        conditions = [_condition(text) for text in (*self.when, *self.given)]
        if isinstance(self.each, str):
            conditions.append(_condition(self.each))
        names = [name for condition in conditions for name in condition.facts]
        places = _PLACE.findall(f"{self.why} {self.fix} {self.says}")
        known = self.facts.names()
        return names + [
            place
            for place in places
            if "." not in place and place not in _no_facts() and (not self.each or place in known)
        ]

    def misspelt(self) -> Iterator[str]:
        """A sentence for each fact that it reads and its `facts` do not have."""
        known = self.facts.names()
        for name in self.facts_read():
            if name not in known:
                yield (
                    f"the {self.level} on '{' and '.join(self.when) or self.says}' reads the fact "
                    f"'{name}', which {self.facts.__name__} does not have."
                    f"{did_you_mean(name, known)}"
                )

    def _details(self, view: Facts) -> Iterable[Details]:
        if self.each is None:
            return [{}]
        return _left(view, self.each) if isinstance(self.each, str) else self.each(view)

    def _finding(self, view: Facts, details: Details) -> Finding:
        """The message for a run to which the rule applies."""
        conditions = [_condition(text) for text in self.when]
        meant = [key for x in conditions if x.op == "is set" for key in x.keys_set(view)]
        details = {"meant": " and ".join(meant), **details}
        statement, why = self._statement(view, details), _filled(self.why, view, details)
        problem = f"{statement}: {why}" if why else statement
        fixes = [text for text in _filled(self.fix, view, details).split(" | ") if text]
        terms = [term for x in conditions for term in (x.left, x.right)]
        named = [*map(view.key, terms), statement.split()[0], *_KEY.findall(problem)]
        keys = dict.fromkeys([*meant, *(key for key in named if view.has(key))])
        return Finding(self.level, tuple(keys), _sentences(problem, _remedy(fixes)))

    def _statement(self, view: Facts, details: Details) -> str:
        if self.says:
            return _filled(self.says, view, details)
        first, *others = [_condition(text).in_words(view) for text in self.when]
        if not self.is_unused:
            *most, last = first, *others
            return ", ".join([*most, f"and {last}" if most else last])
        since = f", since {' and '.join(others)}" if others else ""
        verb = "has" if " and " not in first else "have"
        return f"{first} and {verb} no effect{since}"


def with_facts(facts: type[Facts], *rules: Rule) -> tuple[Rule, ...]:
    """The rules as they read `facts`. Raises AttributeError for a fact that these do not have."""
    own = tuple(replace(rule, facts=facts) for rule in rules)
    if problems := [problem for rule in own for problem in rule.misspelt()]:
        raise AttributeError("\n".join(problems))
    return own


@cache
def _no_facts() -> frozenset[str]:
    """What a place without a dot may name besides a fact: a key at the top of some tree, and the
    keys that are set."""
    return frozenset({"meant", *(name for tree in TREES.values() for name in tree.model_fields)})


_condition = cache(Condition.parse)


def error(*when: str, **rest: Unpack[_Rest]) -> Rule:
    """A rule whose finding stops the run before it starts."""
    return Rule("error", when, **rest)


def warning(*when: str, **rest: Unpack[_Rest]) -> Rule:
    """A rule whose finding is printed, and stops nothing."""
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

    def missing(view: Facts) -> Iterator[Details]:
        if view.known.get("can_install", False):
            return
        on_cpu = view["run.device"] == "cpu"
        text = missing_extra(package, needed_by=_filled(by, view, {}), on_cpu=on_cpu)
        yield from [] if text is None else [{"missing": text}]

    return error(*when, each=missing, says="{missing}", fix=instead, only=only)


def _filled(text: str, view: Facts, details: Details) -> str:
    """A text with values in its places, and the section's keys for those of `sampling`."""

    def value(place: re.Match[str]) -> str:
        name = place[1]
        if name not in details and ("." in name or view.has(name)):
            setting = view[name]
            return str(setting) if isinstance(setting, str | PurePath) else _in_words(setting)
        value = details[name] if name in details else _number(view, name)
        if isinstance(value, tuple | list):
            return ", ".join(map(str, value))
        return str(value) if isinstance(value, str | PurePath) else _in_words(value)

    text = _PLACE.sub(value, text)
    return re.sub(r"(?<![\w.])sampling\.\w+", lambda match: view.key(match[0]), text)


def _remedy(fixes: Sequence[str]) -> str:
    """`Set A to x, or B to y, or do z`."""
    parts, was_change = list[str](), False
    for text in fixes:
        change = _CHANGE.fullmatch(text)
        if change is not None:
            text = f"{'' if was_change else 'set '}{change[1]} to {change[2]}"
        was_change = change is not None
        parts.append(text)
    return ", or ".join(parts)


def _sentences(*texts: str) -> str:
    """Texts that each begin with a capital, but a key, and end with a stop."""
    first, *others = [text for text in texts if text]
    others = [text[0].upper() + text[1:] for text in others]
    return " ".join(text if text.endswith((".", "?")) else f"{text}." for text in [first, *others])
