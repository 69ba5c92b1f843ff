"""Rows that repeat an earlier row of the epoch, beside a set over the order of all rows."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from decimal import Decimal
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.data import duplicates, streamed
from hone.data.duplicates import Digests, Repeats, digest
from hone.data.order import EpochOrder, Window
from hone.data.row_filters import InFileOrder, Sieve
from hone.data.row_source import Skipped
from hone.data.rows import SourceRow
from hone.data.settings import DataConfig
from hone.data.stream import Stream
from hone.data.streamed import StreamedRows
from hone.types import Prompt
from tests.data.test_streamed import blocks_of

AHEAD = 5


class Contents:
    """Blocks whose rows have given contents; `read` counts the rows that are read."""

    fingerprint = "abc"

    def __init__(self, sizes: Sequence[int], contents: Sequence[int | None]) -> None:
        self.sizes, self._contents, self.read = blocks_of(sizes), contents, 0

    def rows(self, block: int, numbers: Sequence[int], /) -> list[SourceRow]:
        first = int(self.sizes.first_rows[block])
        self.read += len(numbers)
        assert all(0 <= number < self.sizes.num_rows[block] for number in numbers)
        return [
            SourceRow({"p": self._contents[first + n], "id": first + n}, f"row {first + n}")
            for n in numbers
        ]


class ByOneColumn:
    """A row without content has no answer."""

    content_columns = ("p",)
    images_column = None

    def missing(self, row: SourceRow) -> str | None:
        return row.location if row.columns["p"] is None else None


CFG = DataConfig(train=(), duplicates="drop", missing_answers="drop")


def wants(row: SourceRow) -> bool:
    """The function of a user, which does not depend on the content."""
    return row.columns["id"] % 5 != 2


def source(
    sizes: Sequence[int], contents: Sequence[int | None], window: int, *, shuffle: bool = True
) -> StreamedRows[Prompt]:
    def prepare(rows, numbers):
        assert [row.columns["id"] for row in rows] == list(numbers)
        return [
            Skipped("too_long", "")
            if row.columns["p"] == 0
            else Prompt(id=f"a:{number + 1}", token_ids=(number,), text="")
            for row, number in zip(rows, numbers, strict=True)
        ]

    return StreamedRows(
        Contents(sizes, contents),
        prepare,
        name="a",
        seed=3,
        shuffle=shuffle,
        window=Window(rows=window),
        sieve=Sieve(CFG, ByOneColumn(), wants),
    )


def order_of(sizes: Sequence[int], window: int, epoch: int, *, shuffle: bool = True) -> list[int]:
    order = EpochOrder(
        blocks_of(sizes),
        seed=3,
        epoch=epoch,
        shuffle=shuffle,
        window=Window(rows=window),
        row_id=lambda number: f"a:{number + 1}",
    )
    return [order[place] for place in range(len(order))]


def slow(sizes, contents, window: int, *, num_epochs: int, shuffle: bool = True) -> list[int | str]:
    """What each place gives: the number of its row, or why it is skipped."""
    found: list[int | str] = []
    for epoch in range(num_epochs):
        seen: set[int] = set()
        for row in order_of(sizes, window, epoch, shuffle=shuffle):
            content = contents[row]
            if row % 5 == 2:
                found.append("filter")
            elif content is None:
                found.append("missing_answer")
            elif content in seen:
                found.append("duplicate")
            else:
                seen.add(content)
                found.append("too_long" if content == 0 else row)
    return found


def told(row: Prompt | Skipped) -> int | str:
    return row.reason if isinstance(row, Skipped) else row.token_ids[0]


@pytest.fixture(autouse=True)
def few_rows_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streamed, "TOGETHER_ROWS", AHEAD)
    monkeypatch.setattr(streamed, "_DIGESTED_ROWS", 3)
    monkeypatch.setattr(duplicates, "_LONGEST_RUN", 8)


SIZES = st.lists(st.integers(0, 7), min_size=1, max_size=9).filter(lambda sizes: sum(sizes) > 0)
WINDOWS = st.integers(1, 40)


@st.composite
def rows(draw: st.DrawFn) -> tuple[list[int], list[int | None]]:
    """Sizes of blocks, and contents of their rows."""
    sizes = draw(SIZES)
    some = st.one_of(st.none(), st.integers(0, draw(st.integers(0, 30))))
    return sizes, draw(st.lists(some, min_size=sum(sizes), max_size=sum(sizes)))


@settings(deadline=None)
@given(batches=st.lists(st.lists(st.integers(0, 40), max_size=12), max_size=12))
def test_digests_are_a_set(batches: list[list[int]]):
    digests, seen = Digests(), set[int]()
    for batch in batches:
        expected: list[bool] = []
        for value in batch:
            expected.append(value in seen)
            seen |= {value} - {0}
        assert digests.add(np.array(batch, dtype=np.uint64)).tolist() == expected
    assert len(digests) == len(seen)
    assert digests.num_bytes == 8 * len(seen)


def test_digests_take_eight_bytes_each_in_few_arrays(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(duplicates, "_LONGEST_RUN", 1 << 22)
    digests, drawn = Digests(), np.random.default_rng(0).integers(1, 1 << 63, 100_000, np.uint64)
    for start in range(0, len(drawn), 256):
        assert not digests.add(drawn[start : start + 256]).any()
    assert digests.add(drawn[::-1]).all()
    assert digests.num_bytes == 8 * len(drawn)
    assert len(digests._runs) <= 10


@settings(deadline=None)
@given(sizes=SIZES, window=WINDOWS, epoch=st.integers(0, 2), shuffle=st.booleans())
def test_rows_before_a_place_are_those_of_all_places_before(sizes, window, epoch, shuffle):
    expected = order_of(sizes, window, epoch, shuffle=shuffle)
    blocks = blocks_of(sizes)
    order = EpochOrder(
        blocks,
        seed=3,
        epoch=epoch,
        shuffle=shuffle,
        window=Window(rows=window),
        row_id=lambda number: f"a:{number + 1}",
    )
    for place in range(len(expected)):
        found: list[int] = []
        for block, wanted in order.rows_before(place):
            every = range(int(blocks.num_rows[block]))
            inside = every if wanted is None else np.flatnonzero(wanted).tolist()
            found += [int(blocks.first_rows[block]) + number for number in inside]
        assert sorted(found) == sorted(expected[:place])


@settings(max_examples=60, deadline=None)
@given(data=rows(), window=WINDOWS, shuffle=st.booleans())
def test_each_place_gives_what_a_set_over_the_order_says(data, window, shuffle):
    sizes, contents = data
    made = source(sizes, contents, window, shuffle=shuffle)
    expected = slow(sizes, contents, window, num_epochs=3, shuffle=shuffle)
    assert [told(made.row(read)) for read in range(len(expected))] == expected


@settings(max_examples=25, deadline=None)
@given(data=rows(), window=WINDOWS, shuffle=st.booleans())
def test_a_resume_at_every_place_of_three_epochs_goes_on_the_same(data, window, shuffle):
    sizes, contents = data
    expected = slow(sizes, contents, window, num_epochs=4, shuffle=shuffle)
    for begin in range(3 * sum(sizes)):
        made = source(sizes, contents, window, shuffle=shuffle)
        found = [told(made.row(begin + read)) for read in range(min(sum(sizes), 2 * AHEAD + 1))]
        assert found == expected[begin : begin + len(found)]


@settings(max_examples=60, deadline=None)
@given(data=rows(), window=WINDOWS, visits=st.lists(st.floats(0, 0.999), min_size=1, max_size=30))
def test_places_in_any_order_give_the_same(data, window, visits):
    sizes, contents = data
    expected = slow(sizes, contents, window, num_epochs=3)
    made = source(sizes, contents, window)
    for visit in visits:
        read = int(visit * len(expected))
        assert told(made.row(read)) == expected[read]


SIZES_LEDGER = (7, 1, 30, 4, 2)
CONTENTS = [number * number % 17 for number in range(44)]


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 9), st.sampled_from(["", "peek", "save", "kill"])), max_size=20
    ),
    window=st.sampled_from([1, 9, 1000]),
)
def test_a_stream_serves_each_content_once_an_epoch_whatever_happens(steps, window):
    def make() -> Stream[Prompt]:
        return Stream([source(SIZES_LEDGER, CONTENTS, window)], seed=3)

    places = slow(SIZES_LEDGER, CONTENTS, window, num_epochs=30)
    served = [row for row in places if isinstance(row, int)]
    stream, drawn = make(), list[int]()
    saved, kept = json.dumps(stream.state_dict()), 0
    for number, event in steps:
        if event == "peek":
            stream.peek(3 * number)
        drawn += [row.token_ids[0] for row in stream.take(number)]
        if event == "save":
            saved, kept = json.dumps(stream.state_dict()), len(drawn)
        if event == "kill":
            stream = make()
            stream.load_state_dict(json.loads(saved))
            del drawn[kept:]
    assert drawn == served[: len(drawn)]
    state = stream.state_dict()
    (read,) = state["read"]
    skipped = [why for why in places[:read] if isinstance(why, str)]
    assert state["skipped"] == {why: skipped.count(why) for why in skipped}


def test_a_look_ahead_into_the_next_epoch_reads_nothing_again(monkeypatch: pytest.MonkeyPatch):
    begun: list[int] = []
    monkeypatch.setattr(Repeats, "_read_again", lambda self, epoch, *rest: begun.append(epoch))
    made = source(SIZES_LEDGER, CONTENTS, 9)
    stream = Stream([made], seed=3)
    for _ in range(60):
        stream.peek(4)
        stream.take(1)
    assert stream.state_dict()["read"][0] > 2 * len(CONTENTS)
    assert begun == []
    made.row(5 * len(CONTENTS) + 1)
    assert begun == [5]


def test_reading_again_is_logged_where_it_takes_a_moment(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    caplog.set_level("INFO")
    monkeypatch.setattr(duplicates, "_MOMENT_S", math.inf)
    source(SIZES_LEDGER, CONTENTS, 9).row(40)
    assert caplog.messages == []
    monkeypatch.setattr(duplicates, "_MOMENT_S", -1)
    source(SIZES_LEDGER, CONTENTS, 9).row(40)
    first, last = caplog.messages
    assert first.startswith("a: the 40 rows of the epoch before this place are read again")
    assert last.startswith("a: 40 rows read again in ")


@settings(max_examples=60, deadline=None)
@given(data=rows(), begin=st.floats(0, 1), size=st.integers(1, 9))
def test_reading_in_file_order_may_begin_anywhere(data, begin: float, size: int):
    sizes, contents = data
    located = [SourceRow({"p": x, "id": n}, f"row {n}") for n, x in enumerate(contents)]
    expected = slow(sizes, contents, 1, num_epochs=1, shuffle=False)
    first = int(begin * len(located))
    in_order, found = InFileOrder(Sieve(CFG, ByOneColumn(), wants)), list[int | str]()
    in_order.learn(located[:first])
    for start in range(first, len(located), size):
        some = located[start : start + size]
        found += [
            (row.columns["id"] if row.columns["p"] else "too_long") if why is None else why.reason
            for row, why in zip(some, in_order(some), strict=True)
        ]
    assert found == expected[first:]


def test_digests_are_of_what_a_run_reads():
    def of(columns, *, folder: str | None = None, padded: bool = False) -> int:
        row = SourceRow(columns, "row 1", None if folder is None else Path(folder), padded)
        return digest(row, ["p", "r.a"], "pics")

    base = {"p": "x", "r": {"a": "1"}}
    same = [
        {**base, "id": 3},
        {"r": {"a": "1", "b": 2}, "p": "x"},
        {**base, "pics": None},
    ]
    assert {of(row) for row in same} == {of(base)}
    assert of(base, folder="/a") == of(base, folder="/b")
    other = [
        {"p": "x", "r": {"a": 1}},
        {"p": "x", "r": {"a": None}},
        {"p": "x1"},
        {"p": None, "r": {"a": "x"}},
        {"p": ["x"], "r": {"a": "1"}},
        {**base, "pics": ["a.png"]},
        {**base, "pics": ["a.png", "b.png"]},
        {"p": b"x", "r": {"a": "1"}},
        {"p": Decimal(1), "r": {"a": "1"}},
        {"p": date(2024, 2, 29), "r": {"a": "1"}},
        {"p": "\ud800", "r": {"a": "1"}},
        {"p": [{"role": "user", "content": "x"}], "r": {"a": "1"}},
        {"p": [{"role": "user", "content": "x", "arguments": {"k": None}}], "r": {"a": "1"}},
    ]
    assert len({of(row) for row in [base, *other]}) == len(other) + 1
    # Nulls that Arrow adds for fields of other rows.
    turn = {"role": "user", "content": "x"}
    assert of({"p": [turn]}) == of({"p": [{**turn, "tool_calls": None}]}, padded=True)
    # Images: by their bytes, else by name and folder.
    held = {"p": "x", "pics": [{"bytes": b"1", "path": "a.png"}]}
    assert of(held) == of({"p": "x", "pics": [{"bytes": b"1", "path": "b.png"}]})
    assert of(held) != of({"p": "x", "pics": [{"bytes": b"2", "path": "a.png"}]})
    named = {"p": "x", "pics": ["a.png"]}
    assert of(named, folder="/a") != of(named, folder="/b")
    inside = {"p": [{"role": "user", "content": [{"type": "image", "image": "a.png"}]}]}
    assert of(inside, folder="/a") != of(inside, folder="/b")


@pytest.mark.parametrize("num_processes", [1, 3])
def test_processes_with_other_hash_seeds_find_the_same(num_processes: int):
    program = (
        "from tests.data.test_duplicates import *\n"
        "import sys\n"
        "made = source(SIZES_LEDGER, CONTENTS, 9)\n"
        "begin = int(sys.argv[1])\n"
        "print([told(made.row(begin + read)) for read in range(30)])\n"
    )
    expected = slow(SIZES_LEDGER, CONTENTS, 9, num_epochs=3)
    for rank in range(num_processes):
        found = subprocess.run(
            [sys.executable, "-c", program, "51"],
            env={**os.environ, "PYTHONHASHSEED": f"{rank}"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert found.stdout.strip() == str(expected[51:81])
