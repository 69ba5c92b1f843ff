"""Which keys a command reads while it runs, and who reads them.

While a run is recorded, each attribute that is read of a section of the loaded tree is written down
as the dotted key that it is, with the module and function that read it. A section that lies at
several places (a default) is copied first, so that an object has one place; a copy that the run
makes of a section with other values keeps the place for the values that it keeps.

The reader is the nearest caller outside `hone.config`: a property of a section is read through, and
a validator has no such caller. What only looks at settings reads nothing: the loading, the checks
and their rules, `hone check`, dumps, reports, comparisons with a former run, and predictions in a
command that predicts nothing.
"""

from __future__ import annotations

import copy
import sys
from dataclasses import dataclass, field
from types import FrameType
from typing import Any

import pytest

from hone.cli import command
from hone.config.base import Section

LOOKS_ONLY = (
    "hone.rules:",
    "hone.config.rules",
    "hone.config.load:",
    "hone.config.schema:",
    "hone.config.fit:",
    "hone.cli.command:",
    "hone.cli.check:",
    "hone.cli.help:",
    "hone.cli.plan:_as_json",
    "hone.cli.plan:_title",
    "hone.tools.bench.report:as_json",
    "hone.tools.bench.report:print_table",
    "hone.tools.bench.train_report:as_json",
    "hone.tools.bench.train_report:print_table",
    "hone.observe.advice:",
    "hone.observe.kept_result:",
    "hone.observe.resumed_run:",
    "hone.tools.plan.lines:",
    "hone.tools.plan.comparison:changed_settings",
    "hone.tools.plan.comparison:planned_config",
    "hone.tools.plan.comparison:run_flags",
    # These check settings, and make others of them.
    "hone.planner.fitting:_updated",
    "hone.planner.fitting:changed",
    "hone.planner.fitting:errors",
    "hone.planner.fitting:rl_config",
    "hone.planner.knobs:setting",
)
"""Beginnings of `module:function`: what they and those whom they call read is not used in a run."""
PLANS = ("hone.planner.", "hone.tools.plan.")
"""The same in every command except `hone plan`. What `hone.config.plan` reads builders read off
roles."""
_READ_THROUGH = ("hone.config.", "functools:", "contextlib:", f"{__name__}:")

Readers = dict[str, set[str]]
"""For each key that is read, who reads it, as `module:function`."""


@dataclass(frozen=True)
class Place:
    """Where a section lies in the tree; values that were `replaced` are not the tree's."""

    prefix: str
    replaced: frozenset[str] = frozenset()


@dataclass
class KeyReads:
    """Records what one command reads, from the end of its loading."""

    tree: str
    readers: Readers = field(default_factory=dict)
    _places: dict[int, tuple[Section, Place]] = field(default_factory=dict)

    def record(self, patch: pytest.MonkeyPatch) -> None:
        """Records all reads until the patch is undone."""
        fit, read, make_copy = command.fit_to_context, Section.__getattribute__, Section.model_copy

        def fitted(*args: Any) -> Any:
            cfg, notes = fit(*args)
            return self.placed(cfg), notes

        def reading(section: Section, name: str) -> Any:
            if (found := self._places.get(id(section))) is not None:
                self._note(found[1], name, sys._getframe(1))
            return read(section, name)

        def copied(section: Section, **kwargs: Any) -> Section:
            result = make_copy(section, **kwargs)
            if (found := self._places.get(id(section))) is not None:
                place, update = found[1], kwargs.get("update") or {}
                self._keep(result, Place(place.prefix, place.replaced | frozenset(update)))
            return result

        patch.setattr(command, "fit_to_context", fitted)
        patch.setattr(Section, "model_copy", copied)
        patch.setattr(Section, "__getattribute__", reading)

    def placed(self, section: Section, prefix: str = "") -> Section:
        """A copy whose sections, at any depth, are objects of their own with a known place."""
        result = copy.copy(section)
        for name, value in section:
            at = f"{prefix}{name}."
            if isinstance(value, Section):
                result.__dict__[name] = self.placed(value, at)
            elif isinstance(value, tuple) and value and isinstance(value[0], Section):
                result.__dict__[name] = tuple(self.placed(x, f"{at}0.") for x in value)
        self._keep(result, Place(prefix))
        return result

    def _keep(self, section: Section, place: Place) -> None:
        """Notes the place of a section, which is held so that no other object gets its id."""
        self._places[id(section)] = section, place

    def _note(self, place: Place, name: str, frame: FrameType) -> None:
        if name.startswith("_") or name in place.replaced:
            return
        if (reader := self._reader(frame)) is not None:
            self.readers.setdefault(place.prefix + name, set()).add(reader)

    def _reader(self, frame: FrameType | None) -> str | None:
        """The nearest of the callers that is more than a way through; None where it only looks."""
        reader = None
        looks_only = LOOKS_ONLY if self.tree == "plan" else (*LOOKS_ONLY, *PLANS)
        while frame is not None:
            caller = _named(frame)
            if caller.startswith(looks_only):
                return None
            if reader is None and not caller.startswith(_READ_THROUGH):
                if not caller.startswith("hone."):
                    return None
                reader = caller
            frame = frame.f_back
        return reader


def _named(frame: FrameType) -> str:
    return f"{frame.f_globals.get('__name__')}:{frame.f_code.co_qualname}"
