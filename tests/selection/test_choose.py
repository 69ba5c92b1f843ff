"""What is chosen for a change, and that no unit waits longer than promised."""

from __future__ import annotations

import random

import pytest

from tests.selection.choose import NUM_PARTS, Minutes, Unit, choose, part_of

MINUTES = Minutes(touched=4, far=2, turn=1, workers=2)


def unit(name: str, seconds: float = 60) -> Unit:
    return Unit(name, f"tests/test_{name}.py", seconds)


def distances(**found: int) -> dict[str, int]:
    return {f"tests/test_{name}.py": distance for name, distance in found.items()}


def names(units: tuple[Unit, ...]) -> list[str]:
    return [unit.name for unit in units]


def test_nearest_units_come_first_and_of_these_the_cheapest() -> None:
    units = [unit("far"), unit("dear", 100), unit("near"), unit("apart")]
    found = choose(
        units, distances(far=3, dear=1, near=1), MINUTES, number=0, last_run={"apart": 0}
    )
    assert names(found.touched) == ["near", "dear", "far"]
    assert names(found.turn) == ["apart"]
    assert found.names == {"near", "dear", "far", "apart"}


def test_far_units_have_less_time_and_what_does_not_fit_is_left() -> None:
    units = [*(unit(f"near{n}") for n in range(9)), *(unit(f"far{n}") for n in range(9))]
    near = distances(**{f"near{n}": 1 for n in range(3)})
    far = distances(**{f"far{n}": 2 for n in range(9)})
    found = choose(units, near | far, MINUTES, number=0, last_run={})
    assert names(found.touched) == ["near0", "near1", "near2", *(f"far{n}" for n in range(4))]
    assert names(found.left) == [f"far{n}" for n in range(4, 9)]
    found = choose(
        units, distances(**{f"near{n}": 1 for n in range(9)}) | far, MINUTES, number=0, last_run={}
    )
    assert names(found.touched) == [f"near{n}" for n in range(8)]


def test_a_unit_that_is_too_large_makes_room_for_smaller_ones() -> None:
    units = [unit("large", 900), unit("small")]
    found = choose(units, distances(large=1, small=1), MINUTES, number=0, last_run={})
    assert (names(found.touched), names(found.left)) == (["small"], ["large"])


def test_without_a_base_the_turn_has_all_minutes() -> None:
    units = [unit(f"u{n}") for n in range(60)]
    found = choose(units, None, MINUTES, number=5, last_run={})
    assert not found.touched
    assert len(found.turn) == 10  # five minutes of two workers
    own = [unit for unit in units if part_of(unit.name) == 5]
    assert set(own) <= set(found.turn) or set(found.turn) <= set(own)


def test_without_minutes_nothing_is_chosen() -> None:
    nothing = Minutes(0, 0, 0)
    found = choose([unit("a")], distances(a=1), nothing, number=0, last_run={})
    assert not found.names


def test_minutes_are_read_from_text() -> None:
    assert Minutes.parse("25,10,0.5") == Minutes(25, 10, 0.5)
    with pytest.raises(ValueError, match="'25,x' is not three numbers of minutes"):
        Minutes.parse("25,x")


@pytest.mark.parametrize("remembers", [True, False])
def test_no_unit_waits_longer_than_promised(remembers: bool) -> None:
    """Over 400 landings of one to nine commits each, none of which touches any unit.

    With a record of earlier runs no unit waits for more landings than twice what all units need
    by turns, and twelve. Without one no base is known either, so that the turn has all minutes, and
    the commit's number decides alone: no unit waits for ever.
    """
    draw = random.Random(7)
    units = [unit(f"u{n}", draw.choice([4, 8, 20, 60, 120, 500])) for n in range(200)]
    minutes = Minutes(touched=25, far=10, turn=5)
    per_turn = minutes.seconds(minutes.turn)
    promised = 2 * sum(unit.seconds for unit in units) / per_turn + NUM_PARTS
    last_run: dict[str, int] = {}
    waited = dict.fromkeys(names(tuple(units)), 0)
    longest = number = 0
    for _ in range(400):
        number += draw.randint(1, 9)
        if remembers:
            found = choose(units, {}, minutes, number=number, last_run=last_run)
        else:
            found = choose(units, None, minutes, number=number, last_run={})
        chosen = found.names
        last_run |= dict.fromkeys(chosen, number)
        waited = {name: 0 if name in chosen else since + 1 for name, since in waited.items()}
        longest = max(longest, *waited.values())
    assert set(last_run) == set(waited)
    assert longest <= (promised if remembers else 100)
