"""R18, data part: each row once an epoch, in the same order, whatever happens in between."""

import json
import random
from collections import Counter
from dataclasses import replace
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.data.mixture import Mixture
from hone.data.prompts import PromptStream
from hone.data.row_source import epoch_order
from hone.data.stream import Stream
from hone.errors import UserError
from hone.types import Prompt
from tests.tables import table


def prompts(num: int, name: str = "a") -> list[Prompt]:
    return [Prompt(id=f"{name}:{i}", token_ids=(i, i + 1), text=f"{i}") for i in range(num)]


def ids(items) -> list[str]:
    return [item.id for item in items]


def two_sources() -> dict:
    return {"sources": [prompts(7, "a"), prompts(4, "b")], "weights": [2, 1], "seed": 3}


# --------------------------------------------------------------------------- the ledger (R18)

Step = tuple[int, str]
"""Rows taken, and what follows: "", "save" or "kill"."""


def run_ledger(kind: type[Stream], steps: list[Step], **arguments) -> list[str]:
    """Play a run that is saved and killed; return the rows consumed.

    A kill loses everything since the last save, as a real one does.
    """
    stream = kind(**arguments)
    consumed: list[str] = []
    saved = (json.dumps(stream.state_dict()), 0)
    for num, event in steps:
        consumed += ids(stream.take(num))
        if event == "save":
            saved = (json.dumps(stream.state_dict()), len(consumed))
        if event == "kill":
            stream = kind(**arguments)
            stream.load_state_dict(json.loads(saved[0]))
            del consumed[saved[1] :]
    return consumed


def check_ledger(kind: type[Stream], steps: list[Step], **arguments) -> None:
    """The rows of an interrupted run are those of an uninterrupted one, each once an epoch."""
    consumed = run_ledger(kind, steps, **arguments)
    uninterrupted = ids(Stream(**arguments).take(len(consumed)))
    assert consumed == uninterrupted
    for source in arguments["sources"]:
        names = set(ids(source))
        served = [name for name in consumed if name in names]
        for start in range(0, len(served), len(names)):
            epoch = served[start : start + len(names)]
            assert len(epoch) == len(set(epoch)), "a row was served twice in one epoch"
            assert len(epoch) == len(names) or start + len(names) > len(served)


STEPS = st.lists(
    st.tuples(st.integers(0, 9), st.sampled_from(["", "", "save", "kill"])),
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(steps=STEPS, seed=st.integers(0, 2**40), shuffle=st.booleans(), sizes=st.data())
def test_R18_ledger_survives_any_kills(steps, seed, shuffle, sizes):
    num_sources = sizes.draw(st.integers(1, 3))
    sources = [prompts(sizes.draw(st.integers(1, 12)), f"s{i}") for i in range(num_sources)]
    weights = [sizes.draw(st.sampled_from([0.1, 1, 2.5])) for _ in sources]
    check_ledger(PromptStream, steps, sources=sources, weights=weights, seed=seed, shuffle=shuffle)


@table("num_resumes", [1, 2, 5])
@table("batch", [1, 3, 7])
def test_R18_resumes_at_every_place_of_three_epochs(num_resumes, batch):
    arguments = {"sources": [prompts(7)], "seed": 11}
    for start in range(21 // batch):
        steps = [(batch, "save")] * start + [(batch, "save"), (2, "kill")] * num_resumes
        check_ledger(Stream, [*steps, (15, "")], **arguments)


class ReplaysFirstEpoch(Stream):
    """The position is restored, but the order of the first epoch replayed."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        for number, source in enumerate(self.sources):
            epoch = state["read"][number] // source.num_rows
            names = ids(source.first_rows())
            source._order = (epoch, epoch_order(names, seed=self.seed, epoch=0))


class SecondResumeShifts(Stream):
    """The position within a session is added to a start that is not carried on."""

    start = 0

    def state_dict(self):
        state = super().state_dict()
        return {**state, "start": state["read"], "read": [n - self.start for n in state["read"]]}

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self.start = sum(state["read"])


class ReseedsEachStart(Stream):
    """The order depends on how often the run was started."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        for source in self.sources:
            source._seed += 1


class OneOrderForAll(Stream):
    """Sampling with replacement: rows repeat within an epoch."""

    def _draw(self, step):
        item = super()._draw(step)
        return random.Random(sum(self._read)).choice(self.sources[0].first_rows()) if item else item


@table(
    "bug",
    [
        ReplaysFirstEpoch,
        SecondResumeShifts,
        ReseedsEachStart,
        OneOrderForAll,
    ],
)
def test_R18_planted_bugs_turn_the_ledger_red(bug):
    steps = [(5, "save"), (3, "kill")] * 4 + [(9, "save"), (1, "kill"), (12, "")]
    check_ledger(Stream, steps, **two_sources())
    with pytest.raises(AssertionError):
        check_ledger(bug, steps, **two_sources())


# --------------------------------------------------------------------------- order and mixing


def test_order_is_a_pure_function_of_seed_and_epoch():
    names = [f"a:{i}" for i in range(50)]
    first = epoch_order(names, seed=1, epoch=0)
    assert sorted(first) == list(range(50))
    assert first == epoch_order(names, seed=1, epoch=0)
    assert first != epoch_order(names, seed=1, epoch=1)
    assert first != epoch_order(names, seed=2, epoch=0)
    assert epoch_order(names, seed=1, epoch=5, shuffle=False) == list(range(50))
    # The order of two rows does not depend on the others, so a changed filter moves nothing else.
    fewer = names[::2]
    kept = [names[i] for i in first if names[i] in fewer]
    assert kept == [fewer[i] for i in epoch_order(fewer, seed=1, epoch=0)]


def test_order_is_the_same_on_every_machine():
    assert epoch_order([f"a:{i}" for i in range(8)], seed=0, epoch=0) == GOLDEN_ORDER


GOLDEN_ORDER = [2, 0, 3, 7, 5, 6, 1, 4]


def test_orders_are_uniform():
    counts = Counter(
        tuple(epoch_order(["x", "y", "z"], seed=7, epoch=epoch)) for epoch in range(6000)
    )
    assert len(counts) == 6
    assert max(abs(count - 1000) for count in counts.values()) < 150  # 5 standard deviations


def check_mix(kind: type[Mixture], weights: list[float], num: int) -> None:
    """After every draw each source has given its share of the draws, to within one row."""
    sources = [prompts(3 + i, f"s{i}") for i in range(len(weights))]
    total = sum(Fraction(str(weight)) for weight in weights)
    counts = Counter()
    stream = Stream(sources, weights=weights, seed=0)
    stream._phases._mixtures[tuple(range(len(weights)))] = kind(weights)
    for k, item in enumerate(stream.take(num), start=1):
        counts[item.id.split(":")[0]] += 1
        for i, weight in enumerate(weights):
            assert abs(counts[f"s{i}"] - Fraction(str(weight)) / total * k) < 1, (k, counts)


WEIGHTS = st.lists(st.floats(0.01, 100).map(lambda w: round(w, 3)), min_size=1, max_size=6)


@settings(max_examples=80, deadline=None)
@given(weights=WEIGHTS)
def test_weights_hold_to_within_one_row_at_every_moment(weights):
    check_mix(Mixture, weights, 150)


class RoundRobin(Mixture):
    def next_source(self, served):
        return sum(served) % len(served)


class RandomMix(Mixture):
    def next_source(self, served):
        weights = [float(share) for share in self.shares]
        return random.Random(sum(served)).choices(range(len(weights)), weights)[0]


class InBlocks(Mixture):
    def next_source(self, served):
        return 0 if sum(served) % 10 < 10 * self.shares[0] else 1


@table("bug", [RoundRobin, RandomMix, InBlocks])
def test_planted_mixes_turn_the_check_red(bug):
    with pytest.raises(AssertionError):
        check_mix(bug, [7, 3], 100)


def test_each_source_has_its_own_epochs():
    stream = Stream([prompts(2, "a"), prompts(8, "b")], weights=[1, 1], seed=0)
    taken = ids(stream.take(16))
    small = [name for name in taken if name.startswith("a")]
    assert all(set(small[i : i + 2]) == {"a:0", "a:1"} for i in range(0, 8, 2))
    assert len({name for name in taken if name.startswith("b")}) == 8


# --------------------------------------------------------------------------- state


def test_state_is_small_json():
    stream = Stream([prompts(5000)], seed=0)
    stream.take(7000)
    assert len(json.dumps(stream.state_dict())) < 400


@table(
    "change, named",
    [
        ({"seed": 4}, "seed was 3 and is now 4"),
        ({"shuffle": False}, "shuffle was True"),
        ({"weights": [1, 1]}, "shares"),
        ({"sources": [prompts(7, "a"), prompts(5, "b")]}, "num_rows"),
        ({"sources": [prompts(7, "a"), prompts(4, "c")]}, "fingerprint"),
        (
            {"sources": [prompts(7, "a"), [replace(p, token_ids=(9,)) for p in prompts(4, "b")]]},
            "fingerprint",
        ),
    ],
)
def test_state_of_other_data_is_refused(change, named):
    state = Stream(**two_sources()).state_dict()
    with pytest.raises(UserError, match=named):
        Stream(**{**two_sources(), **change}).load_state_dict(state)


def test_nothing_to_train_on_is_an_error():
    with pytest.raises(UserError, match="no rows to train on"):
        Stream([], seed=0).take(1)


@table("weight", [0, -1, float("inf"), float("nan")])
def test_weights_must_be_positive_and_finite(weight):
    with pytest.raises(UserError, match="positive and finite"):
        Stream([prompts(1), prompts(1, "b")], weights=[1, weight], seed=0)
