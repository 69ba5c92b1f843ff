"""A team in threads: what the first process announces the others do, in its order."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from queue import Queue
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.distributed import team as of_team
from hone.distributed.team import Team, run_for

WAIT_S = 120.0


class Messages:
    """What processes of a team have in common, for threads."""

    def __init__(self, said: Sequence[Queue[Any]], own: int) -> None:
        self.said, self.own = said, own

    def broadcast(self, value: Any) -> Any:
        if self.own:
            return self.said[self.own].get(timeout=WAIT_S)
        for queue in self.said[1:]:
            queue.put(value)
        return value


class Made:
    """The calls that a process has made."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []

    def calls(self) -> dict[str, Callable[[int], int]]:
        return {name: lambda x, name=name: self._make(name, x) for name in ("submit", "step")}

    def _make(self, name: str, number: int) -> int:
        if number < 0:
            raise ValueError(f"{number} is refused")
        self.log.append((name, number))
        return 2 * number


def make_teams(size: int) -> tuple[list[Team], list[Made]]:
    said, made = [Queue[Any]() for _ in range(size)], [Made() for _ in range(size)]
    teams = [
        Team(Messages(said, own), is_first=own == 0, calls=made[own].calls()) for own in range(size)
    ]
    return teams, made


def run_all(works: Sequence[Callable[[], Any]]) -> list[Any]:
    """What each process returns."""
    with ThreadPoolExecutor(len(works)) as pool:
        return [future.result(WAIT_S) for future in [pool.submit(work) for work in works]]


@given(
    st.lists(st.tuples(st.sampled_from(["call", "later", "refused"]), st.integers(0, 9))),
    st.integers(1, 3),
)
def test_all_make_the_calls_of_the_first_in_its_order_and_have_its_result(
    plan: list[tuple[str, int]], size: int
) -> None:
    """A call that raises in the first process is made by nobody else."""
    teams, made = make_teams(size)

    def work() -> list[int]:
        results: list[int] = []
        for kind, number in plan:
            if kind == "refused":
                with pytest.raises(ValueError, match="refused"):
                    teams[0].later("submit", -1)
            elif kind == "later":
                results.append(teams[0].later("submit", number))
            else:
                results.append(teams[0].call("step", number))
        return results

    found = run_all([lambda own=own: own.run(work) for own in teams])
    expected = [(kind, n) for kind, n in plan if kind != "refused"]
    assert found == [[2 * n for _, n in expected]] * size
    names = {"call": "step", "later": "submit"}
    assert [own.log for own in made] == [[(names[kind], n) for kind, n in expected]] * size


def test_what_is_made_later_comes_with_the_next_call_and_not_before() -> None:
    """So that submitting a thousand requests costs one message."""
    teams, made = make_teams(2)
    said = teams[1]._messages.said[1]  # pyright: ignore
    for number in range(3):
        teams[0].later("submit", number)
    assert said.empty()
    assert made[0].log == [("submit", 0), ("submit", 1), ("submit", 2)]
    teams[0].call("step", 7)
    assert said.qsize() == 1


def test_the_first_process_of_two_teams_works_once_for_both() -> None:
    """Each of the others follows one team, and makes the calls of that alone."""
    (engine, engine_rank), engine_made = make_teams(2)
    (critics, critic), critic_made = make_teams(2)

    def work() -> int:
        return engine.call("step", 4) + 1

    found = run_all(
        [
            lambda: run_for([critics, engine], work),
            lambda: run_for([engine_rank], work),
            lambda: run_for([critic], work),
        ]
    )
    assert found == [9, 9, 9]
    assert engine_made[1].log == [("step", 4)]
    assert critic_made[0].log == critic_made[1].log == []


def test_who_waits_hears_of_the_first_process_once_in_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now_s = 100.0
    monkeypatch.setattr(of_team, "monotonic", lambda: now_s)
    teams, _ = make_teams(2)
    said = teams[1]._messages.said[1]  # pyright: ignore
    teams[0].call("step", 1)
    for now_s, expected in [(104.9, 1), (105.1, 2), (105.2, 2), (110.3, 3)]:  # noqa: B007
        teams[0].keep_waiting()
        assert said.qsize() == expected


def test_a_process_alone_sends_nothing() -> None:
    made = Made()
    team = Team(None, is_first=True, calls=made.calls())
    assert team.run(lambda: team.later("submit", 1) + team.call("step", 2)) == 6
    assert made.log == [("submit", 1), ("step", 2)]
