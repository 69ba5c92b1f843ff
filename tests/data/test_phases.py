"""Sources with limits: each phase of a run has its shares exactly, whatever a step draws and
wherever the run is killed."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.data.order import Window
from hone.data.phases import Limits, Phases
from hone.data.prompts import load_prompts
from hone.data.row_source import Skipped
from hone.data.settings import DataConfig, SourceConfig
from hone.data.stream import Stream
from hone.data.streamed import StreamedRows
from hone.errors import UserError
from hone.types import Prompt
from tests.data.support import char_tokenizer, write_rows
from tests.data.test_streamed import Rows
from tests.tables import table

TOKENIZER = char_tokenizer()


class Draws(NamedTuple):
    """Rows that are drawn together."""

    num: int
    steps_on: int
    """How much later their step is than that of the draws before; 0: the same step draws more."""
    event: str = ""
    """What follows: "save", "kill", "peek" or nothing."""


class Given(NamedTuple):
    """A source: its rows, of which each `drop`-th is skipped while it is read (0: none is)."""

    weight: float
    num_rows: int
    limits: Limits
    drop: int = 0

    @property
    def served(self) -> list[int]:
        """The numbers of rows that are not skipped."""
        return [n for n in range(self.num_rows) if not (self.drop and n % self.drop == 0)]


def item(name: str, number: int) -> Prompt:
    return Prompt(id=f"{name}:{number + 1}", token_ids=(number,), text="")


def streamed(name: str, given: Given, *, seed: int) -> StreamedRows[Prompt]:
    kept = set(given.served)

    def prepare(rows: Sequence[Any], numbers: Sequence[int]) -> list[Prompt | Skipped]:
        return [item(name, n) if n in kept else Skipped("too_long", str(n)) for n in numbers]

    sizes = [1] * (given.num_rows % 3) + [3] * (given.num_rows // 3)
    window = Window(rows=given.num_rows)
    return StreamedRows(Rows(sizes), prepare, name=name, seed=seed, shuffle=True, window=window)


def stream_of(sources: Sequence[Given], *, whole: bool, seed: int = 3) -> Stream[Prompt]:
    """A stream over `sources`: as rows in memory, without those that are skipped, or streamed."""
    rows = [
        [item(f"s{i}", n) for n in given.served] if whole else streamed(f"s{i}", given, seed=seed)
        for i, given in enumerate(sources)
    ]
    return Stream(
        rows,
        seed=seed,
        weights=[given.weight for given in sources],
        limits=[given.limits for given in sources],
        names=[f"s{i}" for i in range(len(sources))],
    )


def play(make: Any, draws: Sequence[Draws], *, kills: bool = True) -> list[tuple[int, str]]:
    """The step and the id of each row of a run. After a kill it goes on from the last save, and
    draws again what was lost."""
    stream, log, place, step = make(), list[tuple[int, str]](), 0, 1
    saved, killed = (json.dumps(stream.state_dict()), 0, 0, 1), set[int]()
    while place < len(draws):
        num, steps_on, event = draws[place]
        step += steps_on
        if event == "peek":
            ahead = [row.id for row in stream.peek(num, step=step)]
            assert ahead == [row.id for row in stream.peek(num, step=step)]
        rows = [row.id for row in stream.take(num, step=step)]
        assert event != "peek" or rows == ahead
        log += [(step, name) for name in rows]
        place += 1
        if event == "save":
            saved = json.dumps(stream.state_dict()), len(log), place, step
        if event == "kill" and kills and place not in killed:
            killed.add(place)
            stream = make()
            stream.load_state_dict(json.loads(saved[0]))
            _, kept, place, step = saved
            del log[kept:]
    return log


def check_log(log: Sequence[tuple[int, str]], sources: Sequence[Given]) -> int:
    """Go through the draws of a run, and count by hand. Returns the number of phases."""
    served, since = Counter[int](), Counter[int]()
    num_phases, phase, within, last_step = 0, set[int](), False, 0
    for step, name in log:
        active = {
            i
            for i, (_, _, limits, _) in enumerate(sources)
            if limits.from_step <= step <= (limits.until_step or step)
            and served[i] < (limits.max_epochs or 10**9) * len(sources[i].served)
        }
        if active != phase or (within and step != last_step):
            num_phases += 1
            phase, within, since = active, step == last_step, Counter()
        last_step = step
        source = int(name[1:].partition(":")[0])
        assert source in active, (step, name)
        served[source] += 1
        since[source] += 1
        total = sum(Fraction(str(sources[i].weight)) for i in active)
        for i in active:
            share = Fraction(str(sources[i].weight)) / total
            assert abs(since[i] - share * since.total()) < 1, (step, i, since)
    for i, source in enumerate(sources):
        names = [name for _, name in log if name.startswith(f"s{i}:")]
        times, size = Counter(names), len(source.served)
        assert max(times.values(), default=0) <= (source.limits.max_epochs or 10**9)
        for start in range(0, len(names), size):
            epoch = names[start : start + size]
            assert len(epoch) == len(set(epoch)), "a row was drawn twice in an epoch"
    return num_phases


STEPS = st.integers(1, 12)
LIMITS = st.builds(
    Limits,
    from_step=st.sampled_from([1, 1, 2, 5]),
    until_step=st.none() | STEPS,
    max_epochs=st.none() | st.integers(1, 3),
)
SOURCES = st.lists(
    st.builds(
        Given,
        weight=st.sampled_from([0.1, 0.3, 1, 2, 2.5, 7]),
        num_rows=st.integers(2, 14),
        limits=LIMITS,
        drop=st.sampled_from([0, 0, 2, 3]),
    ),
    max_size=4,
)
ENDLESS = st.builds(
    Given,
    weight=st.sampled_from([0.1, 1, 3]),
    num_rows=st.integers(2, 14),
    limits=st.just(Limits()),
    drop=st.sampled_from([0, 3]),
)
DRAWS = st.lists(
    st.builds(
        Draws,
        st.integers(0, 12),
        st.sampled_from([0, 1, 1, 1, 2]),
        st.sampled_from(["", "", "save", "kill", "peek"]),
    ),
    max_size=25,
)


@settings(max_examples=150, deadline=None)
@given(limited=SOURCES, endless=ENDLESS, first=st.booleans(), draws=DRAWS, whole=st.booleans())
def test_R18_phases_have_their_shares_and_survive_any_kills(limited, endless, first, draws, whole):
    sources = [endless, *limited] if first else [*limited, endless]
    log = play(lambda: stream_of(sources, whole=whole), draws)
    assert log == play(lambda: stream_of(sources, whole=whole), draws, kills=False)
    check_log(log, sources)
    # A source that is read while it is drawn from gives what it gives when it is read whole.
    assert log == play(lambda: stream_of(sources, whole=not whole), draws)


def counts(log: Sequence[tuple[int, str]], first: int, last: int) -> dict[str, int]:
    """Rows by source in the steps from `first` to `last`."""
    return Counter(name.partition(":")[0] for step, name in log if first <= step <= last)


@table("whole", [False, True])
def test_every_window_of_steps_has_its_quotas(whole):
    """Of 16 rows a step: 8, 4 and 4; one source ends with step 3 and another one within step 4;
    from step 7 on another one gives two thirds of the rows."""
    sources = [
        Given(2, 30, Limits()),
        Given(1, 9, Limits(until_step=3)),
        Given(1, 14, Limits(max_epochs=2), drop=2),
        Given(4, 50, Limits(from_step=7)),
    ]
    draws = [Draws(16, 1, "save" if step % 4 == 0 else "") for step in range(2, 21)]
    draws = [Draws(16, 0), *draws]
    log = play(lambda: stream_of(sources, whole=whole), draws)
    assert check_log(log, sources) == 5
    for first in range(1, 4):
        for last in range(first, 4):
            n = last - first + 1
            assert counts(log, first, last) == {"s0": 8 * n, "s1": 4 * n, "s2": 4 * n}, first
    # 14 rows in two epochs of 7: 12 are drawn until step 3, and 2 more in step 4.
    ended = next(step for step in range(20, 0, -1) if counts(log, step, step)["s2"])
    assert ended == 4
    assert counts(log, 1, 20)["s2"] == 14
    assert counts(log, 5, 6) == {"s0": 32}
    for first in range(7, 21):
        for last in range(first, 21):
            found = counts(log, first, last)
            n = last - first + 1
            # Whole numbers in every third step: 16 n / 3 and 32 n / 3.
            assert abs(found["s0"] - Fraction(16 * n, 3)) < 2
            if (first - 7) % 3 == 0 and n % 3 == 0:
                assert found == {"s0": 16 * n // 3, "s3": 32 * n // 3}


def test_a_step_after_an_end_within_a_step_is_exact():
    """Where the share of one source is a whole number, and those of others are not."""
    endless = [Given(weight, 50, Limits()) for weight in (1, 1, 1, 3)]
    for num_rows in range(1, 9):
        sources = [*endless, Given(6, num_rows, Limits(max_epochs=1))]
        log = play(lambda x=sources: stream_of(x, whole=True), [Draws(4, 0), *[Draws(4, 1)] * 19])
        assert counts(log, 1, 5)["s4"] == num_rows
        for step in range(6, 21):
            assert counts(log, step, step)["s3"] == 2, (num_rows, step)


def test_without_limits_the_order_is_as_before():
    """That of a count of all rows, as in checkpoints which have no phase."""
    sources = [Given(2, 5, Limits()), Given(1, 7, Limits(), drop=3), Given(0.3, 3, Limits())]
    stream = stream_of(sources, whole=False)
    whole = [row.id for step in range(1, 41) for row in stream.take(3, step=step)]
    together = [row.id for row in stream_of(sources, whole=False).take(120)]
    assert whole == together
    for place in range(0, 100, 7):
        stream = stream_of(sources, whole=False)
        stream.take(place, step=3)
        old = stream.state_dict()
        for key in ("phase", "limits", "told"):
            del old[key]
        stream = stream_of(sources, whole=False)
        stream.load_state_dict(json.loads(json.dumps(old)))
        assert [row.id for row in stream.take(20, step=4)] == whole[place : place + 20]


def test_limits_of_a_run_cannot_change_under_its_position():
    sources = [Given(1, 5, Limits()), Given(1, 5, Limits())]
    state = stream_of(sources, whole=True).state_dict()
    limited = [Given(1, 5, Limits()), Given(1, 5, Limits(max_epochs=2))]
    for saved in (state, {key: x for key, x in state.items() if key != "limits"}):
        with pytest.raises(UserError, match="belongs to other data: limits"):
            stream_of(limited, whole=True).load_state_dict(saved)


def test_without_a_source_in_a_step_the_error_says_what_to_change():
    stream = stream_of([Given(1, 5, Limits(until_step=2))], whole=True)
    stream.take(3, step=2)
    with pytest.raises(UserError, match=r"has rows for step 3: leave until_step and max_epochs"):
        stream.take(3, step=3)


def test_a_limited_source_of_which_all_rows_are_dropped_says_so():
    sources = [Given(1, 5, Limits()), Given(1, 4, Limits(max_epochs=1), drop=1)]
    with pytest.raises(UserError, match="s1: all 4 rows were read, and none is left"):
        stream_of(sources, whole=False).take(1)


def test_ends_and_beginnings_are_said_once(caplog: pytest.LogCaptureFixture):
    sources = [
        Given(1, 9, Limits()),
        Given(1, 4, Limits(max_epochs=1)),
        Given(2, 9, Limits(from_step=3, until_step=4)),
    ]
    with caplog.at_level(logging.INFO):
        stream = stream_of(sources, whole=True)
        for step in range(1, 7):
            stream.peek(6, step=step)
            stream.take(6, step=step)
            stream.peek(6, step=step + 1)
            state = stream.state_dict()
            stream = stream_of(sources, whole=True)
            stream.load_state_dict(state)
    assert [record.getMessage() for record in caplog.records] == [
        "step 2: s1 ends (max_epochs 1); shares: s0 100.0%",
        "step 3: s2 begins; shares: s0 33.3%, s2 66.7%",
        "step 5: s2 ends (until_step 4); shares: s0 100.0%",
    ]


def test_a_row_that_a_look_ahead_skips_is_said_once(caplog: pytest.LogCaptureFixture):
    source = streamed("s0", Given(1, 9, Limits(), drop=2), seed=1)
    stream = Stream([source], seed=1)
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            stream.peek(6)
            stream.take(6)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1, messages


def test_other_data_are_named():
    sources = [Given(1, 5, Limits()), Given(1, 5, Limits())]
    state = stream_of(sources, whole=True).state_dict()
    assert "digests" in state
    other = [Given(1, 5, Limits()), Given(1, 6, Limits(), drop=3)]
    for saved in (state, {key: x for key, x in state.items() if key != "digests"}):
        with pytest.raises(UserError) as caught:
            stream_of(other, whole=True).load_state_dict(saved)
        is_named = "Of s1 the files or the keys that choose rows have changed" in str(caught.value)
        assert is_named == ("digests" in saved)


def test_rows_drawn_are_told_by_source_and_step():
    sources = [Given(3, 9, Limits()), Given(1, 4, Limits(until_step=1), drop=2)]
    stream = stream_of(sources, whole=False)
    stream.take(8, step=1)
    assert stream.drawn() == {"s0": 6, "s1": 2}
    stream.take(8, step=2)
    stream.peek(9, step=3)
    state = json.loads(json.dumps(stream.state_dict()))
    for _ in range(2):
        stream = stream_of(sources, whole=False)
        stream.load_state_dict(state)
        assert stream.drawn() == {"s0": 8, "s1": 0}
    assert stream_of(sources[:1], whole=True).drawn() == {}


@table("streams", [False, True])
def test_quotas_hold_over_files(streams: bool, tmp_path: Path):
    """Through the configuration and the reader, killed after each step."""
    paths = [
        write_rows(
            tmp_path / f"{name}.jsonl",
            [{"prompt": f"{i}{'0' * (i % 5 == 0) * 9}", "answer": "x"} for i in range(num)],
        )
        for name, num in (("s0", 40), ("s1", 20), ("s2", 30))
    ]
    cfg = DataConfig(
        train=(
            SourceConfig(path=paths[0], weight=3),
            SourceConfig(path=paths[1], weight=1, max_epochs=2),
            SourceConfig(path=paths[2], weight=2, from_step=3, until_step=8),
        ),
        shuffle_window=64 if streams else None,
        max_prompt_tokens=5,
    )
    given = [
        Given(3, 40, Limits(), drop=5),
        Given(1, 20, Limits(max_epochs=2), drop=5),
        Given(2, 30, Limits(from_step=3, until_step=8), drop=5),
    ]
    data = load_prompts(cfg, TOKENIZER, seed=1)
    log, drawn = list[tuple[int, str]](), list[dict[str, float]]()
    for step in range(1, 16):
        log += [(step, row.id) for row in data.train.take(12, step=step)]
        drawn.append({x: m.value for x, m in data.metrics().items() if "drawn" in x})
        saved = json.dumps(data.train.state_dict())
        data = load_prompts(cfg, TOKENIZER, seed=1)
        data.train.load_state_dict(json.loads(saved))
    check_log(log, given)
    assert counts(log, 1, 2) == {"s0": 18, "s1": 6}
    assert counts(log, 3, 8) == {"s0": 36, "s1": 12, "s2": 24}
    assert counts(log, 1, 15)["s1"] == 32
    by_step = [counts(log, step, step) for step in range(1, 16)]
    assert drawn == [
        {f"data/drawn/{name}": found[name] for name in ("s0", "s1", "s2")} for found in by_step
    ]


class NeverCountsAnew(Phases):
    """The rows of all phases count against the shares of the present one."""

    def next_source(self, phase, served):
        return super().next_source(phase._replace(served=(0,) * len(served)), served)


class RestsOfAStepCount(Phases):
    """A phase that began within a step goes on after it."""

    def following(self, phase, step, served, ended):
        return super().following(phase, step, served, ended)._replace(is_of_step=False)


class OneStepMore(Phases):
    """`until_step` is left out by one."""

    def following(self, phase, step, served, ended):
        found = super().following(phase, step - 1 or 1, served, ended)
        return found._replace(step=step)


@table("bug", [NeverCountsAnew, RestsOfAStepCount, OneStepMore])
def test_planted_phases_turn_the_check_red(bug):
    sources = [
        Given(3, 50, Limits()),
        Given(1, 50, Limits()),
        Given(4, 5, Limits(max_epochs=1)),
        Given(4, 9, Limits(until_step=3)),
    ]

    def make() -> Stream[Prompt]:
        stream = stream_of(sources, whole=True)
        stream._phases = bug(stream._phases.weights, stream._phases.limits)
        return stream

    with pytest.raises(AssertionError):
        check_log(play(make, [Draws(7, 0), *[Draws(7, 1)] * 9]), sources)
