"""References elsewhere, as fakes in this process: what is handed out, and what follows a loss."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError
from typing import Any

import pytest
import torch
from torch import Tensor

from hone.algorithms.settings import Output
from hone.distributed import pool
from hone.distributed.pool import WorkersLostError
from hone.rollout import scorer_pool
from hone.rollout.scorer_pool import AHEAD, ScorerPool
from hone.types import Column, EngineLostError, Row

WAIT_S = 20.0
OUTPUTS = frozenset[Output]({"logprobs", "entropy"})


def twin(row: Row) -> Tensor:
    """A row's log-probabilities under the fake reference."""
    ids = torch.tensor(row.token_ids, dtype=torch.float32)
    return -(ids.cumsum(0) / 7)[torch.tensor(row.loss_mask)]


def random_rows(number: int, seed: int) -> list[Row]:
    draw = random.Random(seed)
    rows: list[Row] = []
    for index in range(number):
        mask = [False] + [draw.random() < 0.6 for _ in range(draw.randint(1, 30))]
        ids = [draw.randrange(50) for _ in mask]
        extra = torch.zeros(sum(mask))
        rows.append(
            Row(
                id=f"r{index}", token_ids=ids, loss_mask=mask, columns={"advantages": Column(extra)}
            )
        )
    return rows


def cut(rows: Sequence[Row], size: int) -> list[list[int]]:
    trained = [i for i, row in enumerate(rows) if row.num_trained]
    return [trained[start : start + size] for start in range(0, len(trained), size)]


class Clock:
    """Time that passes where somebody waits for what never comes."""

    def __init__(self) -> None:
        self.now = time.monotonic()

    def __call__(self) -> float:
        return self.now


class Fake:
    """Scores a pass each time it is asked whether it has, but for what `fate` says of its life."""

    num_ranks = 1

    def __init__(
        self,
        name: str,
        fate: dict[int, Exception],
        slowness: int = 1,
        clock: Clock | None = None,
    ) -> None:
        """`fate` is what comes in place of the answer to the call of that number; the first is
        whether it is there. Each of the others takes `slowness` looks."""
        self.name, self.fate, self.slowness = name, fate, slowness
        self.clock = clock or Clock()
        self.calls: list[list[Row]] = []
        self.num_open = self.most_open = 0
        self.is_killed = False

    def call(self, method: str, /, *args: Any) -> FakePending:
        assert method == "score"
        assert not self.is_killed
        self.calls.append(args[0])
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        return FakePending(self, len(self.calls) - 1)

    def kill(self) -> None:
        self.is_killed = True


class FakePending:
    def __init__(self, fake: Fake, number: int) -> None:
        self.fake, self.number, self.looks = fake, number, 0

    def result(self, timeout_s: float) -> Any:
        assert not self.fake.is_killed
        if error := self.fake.fate.get(self.number):
            self.fake.clock.now += timeout_s or 0.05
            raise error
        self.looks += 1
        if self.number > 0 and self.looks < self.fake.slowness:
            raise TimeoutError
        self.fake.num_open -= 1
        rows = self.fake.calls[self.number]
        logprobs = torch.cat([torch.empty(0), *map(twin, rows)])
        return torch.stack([-logprobs, logprobs]).numpy()  # as their names are sorted


def make_group(fakes: list[Fake], restart: Callable[[int], Fake], **limits: Any) -> ScorerPool:
    options = {"timeout_s": WAIT_S, "max_restarts": 3} | limits
    return ScorerPool("reference", fakes, restart=restart, **options)


def score(group: ScorerPool, rows: Sequence[Row], size: int) -> list[Tensor]:
    found = group.begin(rows, cut(rows, size), OUTPUTS).result(WAIT_S)
    assert all(torch.equal(own["entropy"], -own["logprobs"]) for own in found)
    return [own["logprobs"] for own in found]


def assert_scored(found: Sequence[Tensor], rows: Sequence[Row]) -> None:
    for values, row in zip(found, rows, strict=True):
        assert values.dtype == torch.float32
        assert torch.equal(values, twin(row)), row.id


def never(index: int) -> Fake:
    raise AssertionError(f"reference {index} was started anew")


@pytest.mark.parametrize("seed", range(6))
def test_rows_are_scored_once_in_small_portions_by_all(seed: int) -> None:
    """Also of a second step. What travels is bounded, and nothing but what decides the numbers."""
    draw = random.Random(seed)
    fakes = [Fake(f"reference {i}", {}, draw.randint(1, 3)) for i in range(draw.randint(1, 3))]
    group = make_group(fakes, never)
    for step in range(2):
        rows = random_rows(draw.randint(0, 40), seed=10 * seed + step)
        assert_scored(score(group, rows, draw.randint(1, 4)), rows)
    group.close()
    assert all(fake.is_killed for fake in fakes)
    assert all(fake.most_open <= AHEAD for fake in fakes)
    sent = [row for fake in fakes for call in fake.calls for row in call]
    assert not any(row.columns for row in sent)


def test_passes_are_dealt_by_their_tokens() -> None:
    """The dearest first, each to who has least: equal shares here, though not equal numbers."""
    lengths = [90, 30, 30, 30]
    rows = [
        Row(id=f"{n}", token_ids=[1] * n, loss_mask=[False] + [True] * (n - 1)) for n in lengths
    ]
    fakes = [Fake("reference 0", {}, 40), Fake("reference 1", {}, 4)]
    group = make_group(fakes, never)
    assert_scored(score(group, rows, 1), rows)
    group.close()
    shares = [[row.num_tokens for call in fake.calls for row in call] for fake in fakes]
    assert shares == [[90], [30, 30, 30]]


def test_a_slow_reference_gets_fewer_passes() -> None:
    rows = [Row(id=f"{n}", token_ids=[1] * 9, loss_mask=[False] + [True] * 8) for n in range(20)]
    fakes = [Fake("reference 0", {}, 50), Fake("reference 1", {})]
    group = make_group(fakes, never)
    assert_scored(score(group, rows, 1), rows)
    group.close()
    assert len(fakes[0].calls) < 6 < len(fakes[1].calls)


LOST = EngineLostError("reference 0", "killed by a test")
FATES: dict[str, tuple[dict[int, Exception], str]] = {
    "dies at work": ({2: LOST}, "killed by a test"),
    "dies as it starts": ({0: LOST}, "killed by a test"),
    "cannot be made": ({0: RuntimeError("no room")}, "it could not be made: no room"),
    "breaks": ({1: RuntimeError("CUDA error")}, "RuntimeError: CUDA error"),
    "hangs": ({2: TimeoutError()}, "it does not answer"),
    "never starts": ({0: TimeoutError()}, "it has not started"),
}


@pytest.mark.parametrize(
    ("fate", "number"), [*((fate, 1) for fate in FATES), ("dies at work", 2), ("hangs", 2)]
)
def test_R11_a_lost_reference_is_named_and_replaced_and_its_rows_are_scored_again(
    fate: str,
    number: int,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events, words = FATES[fate]
    rows, clock = random_rows(30, seed=5), Clock()
    for module in (pool, scorer_pool):
        monkeypatch.setattr(module, "monotonic", clock)
    fakes = [Fake("reference 0", events, clock=clock)]
    fakes += [Fake("reference 1", {}, 9)] * (number - 1)
    fresh: list[Fake] = []

    def restart(index: int) -> Fake:
        assert index == 0
        fresh.append(Fake("reference 0", {}))
        return fresh[-1]

    group = make_group(fakes, restart, timeout_s=0.2)
    with caplog.at_level(logging.WARNING):
        assert_scored(score(group, rows, 2), rows)
    group.close()
    assert len(fresh) == 1
    assert fakes[0].is_killed
    assert "reference 0 is lost and replaced (restart 1 of at most 3)" in caplog.text
    assert words in caplog.text


def test_R11_a_run_of_losses_ends_with_the_cause() -> None:
    def restart(index: int) -> Fake:
        return Fake(f"reference {index}", {1: LOST})

    group = make_group([restart(0)], restart, max_restarts=2)
    told: list[dict[str, Any]] = []
    group.report_to(lambda kind, **fields: told.append({"kind": kind} | fields))
    with pytest.raises(WorkersLostError, match=r"2 restarts .* used up.*killed by a test"):
        score(group, random_rows(4, seed=0), 2)
    group.close()
    expected = {"kind": "reference_lost", "name": "reference 0", "cause": LOST.cause}
    assert told == [expected | {"restart": restart} for restart in (1, 2, None)]


def test_what_a_reference_refuses_is_raised_as_it_is() -> None:
    group = make_group([Fake("reference 0", {1: ValueError("a bad row")})], never)
    with pytest.raises(ValueError, match="a bad row"):
        score(group, random_rows(4, seed=0), 2)
    group.close()


def test_closing_ends_what_waits_and_starts_nobody_anew() -> None:
    group = make_group([Fake("reference 0", {1: TimeoutError()})], never)
    rows = random_rows(4, seed=0)
    scoring = group.begin(rows, cut(rows, 2), OUTPUTS)
    group.close()
    with pytest.raises(CancelledError):
        scoring.result(WAIT_S)


def test_calls_share_the_workers_and_end_each_for_itself() -> None:
    """As those of a reward model do, of samples as they end: two workers have work at a time."""
    fakes = [Fake(f"reference {i}", {}, 3) for i in range(2)]
    group = make_group(fakes, never)
    asked = [random_rows(3, seed=seed) for seed in range(6)]
    waiting = [group.begin(rows, [range(len(rows))], OUTPUTS) for rows in asked]
    for rows, found in zip(asked, waiting, strict=True):
        assert_scored([own["logprobs"] for own in found.result(WAIT_S)], rows)
    group.close()
    assert all(len(fake.calls) > 1 for fake in fakes)


def test_after_what_was_refused_nothing_is_answered() -> None:
    """Nor does a later call wait for ever."""
    group = make_group([Fake("reference 0", {1: ValueError("a bad row")})], never)
    for _ in range(2):
        with pytest.raises(ValueError, match="a bad row"):
            score(group, random_rows(4, seed=0), 2)
    group.close()
