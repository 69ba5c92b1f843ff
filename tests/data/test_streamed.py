"""R18 where rows are read as they are drawn: each once an epoch, whatever happens."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.data.order import BlockSizes, EpochOrder, Window
from hone.data.row_source import Skipped, epoch_order
from hone.data.sources import SourceRow
from hone.data.stream import Stream
from hone.data.streamed import TOGETHER_ROWS, StreamedRows
from hone.errors import UserError
from hone.types import Prompt
from tests.tables import table


def blocks_of(sizes: Sequence[int], num_bytes: Sequence[int] | None = None) -> BlockSizes:
    rows = np.array(sizes, dtype=np.int64)
    return BlockSizes(
        first_rows=np.cumsum(rows) - rows,
        num_rows=rows,
        num_bytes=rows if num_bytes is None else np.array(num_bytes, dtype=np.int64),
    )


class Rows:
    """BlockSizes whose rows are their numbers; counts what is read."""

    fingerprint = "abc"

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = blocks_of(sizes)
        self.read: Counter[int] = Counter()

    def rows(self, block: int, numbers: Sequence[int], /) -> list[SourceRow]:
        self.read[block] += 1
        assert all(0 <= number < self.sizes.num_rows[block] for number in numbers)
        first = int(self.sizes.first_rows[block])
        return [SourceRow({"number": first + number}, f"row {number}") for number in numbers]


def prompt(number: int) -> Prompt:
    return Prompt(id=f"a:{number + 1}", token_ids=(number,), text=str(number))


def skipped(number: int) -> Skipped:
    return Skipped("too_long", f"row {number}")


def source(sizes, *, window, drop=lambda number: False, seed=3, shuffle=True) -> StreamedRows:
    def prepare(rows, numbers):
        assert [row.columns["number"] for row in rows] == list(numbers)
        return [skipped(number) if drop(number) else prompt(number) for number in numbers]

    return StreamedRows(
        Rows(sizes), prepare, name="a", seed=seed, shuffle=shuffle, window=Window(rows=window)
    )


def stream_of(sizes, **options) -> Stream:
    seed, shuffle = options.get("seed", 3), options.get("shuffle", True)
    return Stream([source(sizes, **options)], seed=seed, shuffle=shuffle)


def order(sizes, window, *, epoch=0, seed=3, shuffle=True) -> list[int]:
    found = EpochOrder(
        blocks_of(sizes),
        seed=seed,
        epoch=epoch,
        shuffle=shuffle,
        window=window,
        row_id=lambda number: f"a:{number + 1}",
    )
    return [found[place] for place in range(len(found))]


SIZES = st.lists(st.integers(0, 9), min_size=1, max_size=12).filter(lambda sizes: sum(sizes) > 0)


@settings(deadline=None)
@given(sizes=SIZES, window=st.integers(1, 60), epoch=st.integers(0, 3), seed=st.integers(0, 99))
def test_every_row_has_one_place_and_windows_keep_their_blocks(sizes, window, epoch, seed):
    found = order(sizes, Window(rows=window), epoch=epoch, seed=seed)
    assert sorted(found) == list(range(sum(sizes)))
    block_of = np.repeat(np.arange(len(sizes)), sizes)
    # Cut into windows by a slow walk over blocks in the order in which they first appear.
    left, place = Counter(block_of.tolist()), 0
    while place < len(found):
        inside: set[int] = set()
        begin = place
        while place < len(found):
            inside.add(int(block_of[found[place]]))
            place += 1
            if place - begin == sum(left[block] for block in inside):
                break
        assert len(inside) == 1 or sum(left[block] for block in inside) <= window


@settings(deadline=None)
@given(sizes=SIZES, epoch=st.integers(0, 3), seed=st.integers(0, 99), shuffle=st.booleans())
def test_a_window_of_all_has_the_order_of_a_source_that_is_read_whole(sizes, epoch, seed, shuffle):
    ids = [f"a:{number + 1}" for number in range(sum(sizes))]
    whole = epoch_order(ids, seed=seed, epoch=epoch, shuffle=shuffle)
    for window in (Window(rows=sum(sizes)), Window(bytes=sum(sizes)), Window()):
        assert order(sizes, window, epoch=epoch, seed=seed, shuffle=shuffle) == whole


def test_orders_differ_by_epoch_and_seed_and_not_by_window_alone():
    sizes = [5] * 20
    orders = [order(sizes, Window(rows=20), epoch=e, seed=s) for e in (0, 1) for s in (3, 4)]
    assert len({tuple(found) for found in orders}) == 4
    assert order(sizes, Window(rows=5), shuffle=False) == list(range(100))


def test_a_window_holds_at_least_a_block_and_no_more_than_its_bytes():
    blocks = blocks_of([1] * 5, num_bytes=[10, 4, 4, 3, 20])
    starts = Window(bytes=8).starts(blocks, np.arange(5))
    assert starts.tolist() == [0, 1, 3, 4]
    assert Window(rows=2).starts(blocks, np.arange(5)).tolist() == [0, 2, 4]


@settings(max_examples=60, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 400), st.sampled_from(["", "save", "kill"])), max_size=12
    ),
    window=st.sampled_from([1, 30, 1000]),
    every=st.sampled_from([0, 2, 3]),
)
def test_R18_ledger_survives_any_kills(steps, window, every):
    """Rows of blocks of odd sizes, of which every second or third is dropped."""
    sizes = [7, 1, 300, 40, 2]

    def drop(number: int) -> bool:
        return bool(every) and number % every == 0

    def make() -> Stream:
        return stream_of(sizes, window=window, drop=drop)

    stream, consumed = make(), list[str]()
    saved, kept = json.dumps(stream.state_dict()), 0
    for num, event in steps:
        consumed += [row.id for row in stream.take(num)]
        if event == "save":
            saved, kept = json.dumps(stream.state_dict()), len(consumed)
        if event == "kill":
            stream = make()
            stream.load_state_dict(json.loads(saved))
            del consumed[kept:]
    assert consumed == [row.id for row in make().take(len(consumed))]
    served = [f"a:{n + 1}" for n in range(sum(sizes)) if not drop(n)]
    for start in range(0, len(consumed) - len(served) + 1, len(served)):
        assert sorted(consumed[start : start + len(served)]) == sorted(served)


def test_rows_that_are_dropped_are_read_and_not_served():
    stream = stream_of([10, 10], window=20, drop=lambda number: number % 4 == 0, shuffle=False)
    assert [row.token_ids[0] for row in stream.take(6)] == [1, 2, 3, 5, 6, 7]
    state = stream.state_dict()
    assert (state["read"], state["served"]) == ([8], [6])
    assert state["skipped"] == {"too_long": 2}
    assert stream.counts == {"rows_read": 8, "skipped_too_long": 2}
    assert [row.token_ids[0] for row in stream.peek(2)] == [9, 10]
    assert stream.state_dict() == state


def test_a_look_ahead_reads_no_row_twice():
    rows = source([2000], window=2000)
    stream = Stream([rows], seed=3)
    prepared: list[int] = []
    rows.add_check(lambda items: prepared.extend(item.token_ids[0] for item in items))
    for _ in range(100):
        stream.take(7)
        stream.peek(7)
    assert len(prepared) <= 700 + 2 * TOGETHER_ROWS


def test_a_position_with_one_counter_is_taken_over():
    whole = [Prompt(id=f"b:{i}", token_ids=(i,), text="") for i in range(7)]
    stream = Stream([whole], seed=0)
    drawn = [row.id for row in stream.take(9)]
    state = stream.state_dict()
    old = {key: x for key, x in state.items() if key not in ("read", "served", "skipped")}
    other = Stream([whole], seed=0)
    other.load_state_dict({**old, "drawn": [4]})
    assert [row.id for row in other.take(5)] == drawn[4:]


def test_a_share_counts_rows_that_are_served():
    halved = source([50], window=50, drop=lambda number: number % 2 == 0)
    whole = [Prompt(id=f"b:{i}", token_ids=(i,), text="") for i in range(7)]
    stream = Stream([halved, whole], weights=[1, 1], seed=0)
    for _ in range(40):
        drawn = [row.id[0] for row in stream.take(10)]
        assert drawn.count("a") == 5


def test_a_source_of_which_all_rows_are_dropped_says_so():
    stream = stream_of([5], window=5, drop=lambda number: True)
    with pytest.raises(UserError, match=r"a: all 5 rows"):
        stream.sources[0].first_rows()
    with pytest.raises(
        UserError, match=r"a: all 5 rows were read, and none is left: `hone data check`"
    ):
        stream.take(1)


def test_other_files_or_windows_are_other_data():
    saved = stream_of([5, 5], window=5).state_dict()
    with pytest.raises(UserError, match="belongs to other data: fingerprint"):
        stream_of([5, 5], window=6).load_state_dict(saved)


def test_only_blocks_that_are_needed_are_read():
    rows = source([100] * 1000, window=200)
    stream = Stream([rows], seed=3)
    stream.take(10)
    assert len(rows._rows.read) <= 2 + TOGETHER_ROWS // 100


def test_rows_are_checked_before_they_are_drawn():
    seen: list[int] = []
    rows = source([600], window=600)
    rows.add_check(lambda items: seen.extend(item.token_ids[0] for item in items))
    stream = Stream([rows], seed=3)
    drawn = [row.token_ids[0] for row in stream.take(300)]
    assert seen[:300] == drawn
    assert len(seen) == 2 * TOGETHER_ROWS


class ForgetsWhatItRead(Stream):
    """After a resume, rows served are taken for rows read."""

    def load_state_dict(self, state):
        super().load_state_dict({**state, "read": state["served"]})


class LosesWhatIsAhead(Stream):
    """A resume goes on behind the rows that had been prepared, as shuffle buffers do."""

    def load_state_dict(self, state):
        super().load_state_dict(state)
        self._read = [-(-read // 16) * 16 for read in self._read]


@table("bug", [ForgetsWhatItRead, LosesWhatIsAhead])
def test_R18_planted_bugs_turn_it_red(bug):
    def run(kind) -> list[str]:
        def make():
            rows = source([40, 40], window=80, drop=lambda number: number % 3 == 0)
            return kind([rows], seed=3)

        stream = make()
        found = [row.id for row in stream.take(11)]
        state = stream.state_dict()
        stream = make()
        stream.load_state_dict(state)
        return found + [row.id for row in stream.take(20)]

    assert run(Stream) == [
        row.id
        for row in Stream(
            [source([40, 40], window=80, drop=lambda number: number % 3 == 0)], seed=3
        ).take(31)
    ]
    assert run(bug) != run(Stream)
