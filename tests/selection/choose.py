"""Which costly tests a run includes: those that the change touches, and those whose turn it is.

A *unit* is what one worker runs in a piece: a file whose tests share a module fixture, else a test
function with all its parameters; its tests that are marked slow are a unit of their own. Cheap
units always run, so that only costly ones are chosen here. Everything in this file is arithmetic on
what other files have read.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from zlib import crc32

COSTLY_S = 1.5
"""CPU seconds above which a unit runs only where it is chosen. The units below it, nine tenths of
all, need 270 CPU seconds together: what `make test` can always afford."""

NUM_PARTS = 12
"""Parts into which costly units are dealt; a commit's number picks one."""

NEAR = 1
"""Imports between a unit's file and the change within which the unit is almost always chosen."""


@dataclass(frozen=True)
class Unit:
    """A costly unit: its name, the test file it is in, and its CPU seconds in all processes."""

    name: str
    file: str
    seconds: float


@dataclass(frozen=True)
class Minutes:
    """Minutes that a run may take for costly units, with `workers` of them at a time."""

    touched: float
    """For what the change touches, near or further off."""
    far: float
    """Of these, for units further off."""
    turn: float
    workers: int = 2

    @classmethod
    def parse(cls, text: str) -> Minutes:
        """`12,8,4` are 12 minutes, of which 8 for units further off, and 4 for the turn."""
        try:
            touched, far, turn = map(float, text.split(","))
        except ValueError:
            raise ValueError(
                f"{text!r} is not three numbers of minutes: TOUCHED,FAR,TURN"
            ) from None
        return cls(touched, far, turn)

    def seconds(self, minutes: float) -> float:
        return 60 * minutes * self.workers


@dataclass(frozen=True)
class Choice:
    """What a run includes, and what it leaves to others."""

    touched: tuple[Unit, ...]
    left: tuple[Unit, ...]
    """Units that the change touches, but for which the minutes did not suffice."""
    turn: tuple[Unit, ...]

    @property
    def names(self) -> frozenset[str]:
        return frozenset(unit.name for unit in (*self.touched, *self.turn))


def choose(
    units: Iterable[Unit],
    distances: Mapping[str, int] | None,
    minutes: Minutes,
    *,
    number: int,
    last_run: Mapping[str, int],
) -> Choice:
    """Choose among costly units.

    `distances` are imports between each file and the change, None where no base is known: the turn
    then has all minutes. `number` is that of the commit, and `last_run` the number at which a unit
    ran last, as far as it is known.
    """
    units = sorted(units, key=lambda unit: unit.name)
    touched, left = (), ()
    if distances is None:
        minutes = replace(minutes, turn=minutes.touched + minutes.turn)
    else:
        touched, left = _touched(units, distances, minutes)
    names = {unit.name for unit in touched}
    rest = [unit for unit in units if unit.name not in names]
    return Choice(touched, left, _turn(rest, minutes, number=number, last_run=last_run))


def _touched(
    units: list[Unit], distances: Mapping[str, int], minutes: Minutes
) -> tuple[tuple[Unit, ...], tuple[Unit, ...]]:
    """Nearest units first, of equally near ones the cheapest, as many as fit."""
    reached = [unit for unit in units if unit.file in distances]
    reached.sort(key=lambda unit: (distances[unit.file], unit.seconds))
    chosen: list[Unit] = []
    left: list[Unit] = []
    spent = spent_far = 0.0
    for unit in reached:
        is_far = distances[unit.file] > NEAR
        fits = spent + unit.seconds <= minutes.seconds(minutes.touched)
        if is_far:
            fits &= spent_far + unit.seconds <= minutes.seconds(minutes.far)
        if not fits:
            left.append(unit)
            continue
        chosen.append(unit)
        spent += unit.seconds
        spent_far += unit.seconds if is_far else 0
    return tuple(chosen), tuple(left)


def part_of(name: str) -> int:
    """The part into which a unit is dealt: it depends on its name alone, so that it stays there."""
    return crc32(name.encode()) % NUM_PARTS


def _turn(
    units: list[Unit], minutes: Minutes, *, number: int, last_run: Mapping[str, int]
) -> tuple[Unit, ...]:
    """Whatever has waited longest, of equals the part of this commit first, as many as fit. Where
    nothing is known of earlier runs, the commit's number decides alone.

    The first unit is included even where it takes longer than the turn, since it would wait for
    ever otherwise.
    """
    waiting = sorted(
        units, key=lambda unit: (last_run.get(unit.name, -1), *_place(unit.name, number))
    )
    chosen: list[Unit] = []
    spent, limit = 0.0, minutes.seconds(minutes.turn)
    for unit in waiting:
        if limit > 0 and (not chosen or spent + unit.seconds <= limit):
            chosen.append(unit)
            spent += unit.seconds
    return tuple(chosen)


def _place(name: str, number: int) -> tuple[int, int]:
    """Parts in turn, and in each an order that is another one every time its turn comes."""
    return (part_of(name) - number) % NUM_PARTS, crc32(f"{number} {name}".encode())
