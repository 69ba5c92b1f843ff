"""Rows that a thread prepares ahead are those that are prepared when they are drawn."""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.data.ahead import Ahead, Part
from hone.data.order import Window
from hone.data.stream import Stream
from hone.data.streamed import TOGETHER_ROWS, StreamedRows
from hone.errors import UserError
from tests.data.support import write_rows
from tests.data.test_streamed import Rows, blocks_of, prompt, skipped
from tests.tables import table

pytestmark = pytest.mark.timeout(60)
"""A mistake here makes a thread wait for ever."""


def until(is_so: Callable[[], bool]) -> None:
    """Wait for another thread; a test that waits in vain has its deadline."""
    while not is_so():
        time.sleep(0.001)


class Numbers:
    """Parts of three numbers, which note where they were made."""

    def __init__(self, *, num_bytes: int = 10, fails: Sequence[int] = ()) -> None:
        self.num_bytes, self.fails = num_bytes, fails
        self.made: list[int] = []
        self.threads: set[str] = set()

    def make(self, start: int) -> Part[int]:
        self.made.append(start)
        self.threads.add(threading.current_thread().name)
        if start in self.fails:
            raise UserError(f"{start} is wrong")
        return Part(range(start, start + 3), start + 3, self.num_bytes)

    def ahead(self, *, max_bytes: int = 10**9, max_rows: int = 30) -> Ahead[int]:
        return Ahead(self.make, max_bytes=max_bytes, max_rows=max_rows)


def is_idle(ahead: Ahead[int]) -> bool:
    """Whether the thread makes nothing until the next part is asked for."""
    with ahead._work._changed:
        return not ahead._work._has_room()


@table("limits, parts", [({"max_bytes": 50}, 5), ({"max_rows": 13}, 5), ({"max_bytes": 0}, 0)])
def test_as_much_is_made_ahead_as_there_is_room_for(limits, parts):
    numbers = Numbers()
    ahead = numbers.ahead(**limits)
    assert not numbers.made
    for start in (0, 3, 6):
        assert list(ahead.part(start).rows) == [start, start + 1, start + 2]
        until(lambda: is_idle(ahead))
        assert numbers.made == list(range(0, start + 3 * (parts + 1), 3))
    assert numbers.threads == {"hone-rows"}


def test_an_error_comes_with_its_part_and_again():
    numbers = Numbers(fails=[6])
    ahead = numbers.ahead()
    ahead.part(0)
    until(lambda: is_idle(ahead))
    assert numbers.made == [0, 3, 6]
    assert ahead.part(3).following == 6
    for _ in range(2):
        with pytest.raises(UserError, match="6 is wrong"):
            ahead.part(6)
    numbers.fails = ()
    assert ahead.part(6).following == 9
    assert ahead.part(9).following == 12


def test_an_exit_within_a_part_is_raised_too():
    class Exits(Numbers):
        def make(self, start: int) -> Part[int]:
            raise SystemExit(3)

    ahead = (exits := Exits()).ahead()
    with pytest.raises(SystemExit):
        ahead.part(0)
    del exits


def test_a_jump_makes_other_parts():
    numbers = Numbers()
    ahead = numbers.ahead()
    for start in (0, 3, 300, 303, 6, 9, 0):
        assert list(ahead.part(start).rows) == [start, start + 1, start + 2]


def test_what_is_made_of_an_earlier_round_is_dropped():
    """A part that was begun before a jump comes from another state of things."""
    holds, goes_on = threading.Event(), threading.Event()

    class Slow(Numbers):
        def make(self, start: int) -> Part[int]:
            if start == 3 and 3 not in self.made:
                holds.set()
                goes_on.wait()
            return super().make(start)

    numbers = Slow()
    ahead = numbers.ahead(max_bytes=10)
    ahead.part(0)
    holds.wait()
    asking = threading.Thread(target=lambda: ahead.part(90))
    asking.start()
    until(lambda: ahead._work._asked == 90)
    goes_on.set()
    asking.join()
    until(lambda: is_idle(ahead))
    assert sorted(ahead._work._made) == [93]


def test_the_thread_ends_with_what_it_makes_parts_of():
    numbers = Numbers()
    ahead = numbers.ahead()
    ahead.part(0)
    thread, gone = ahead._work._thread, weakref.ref(numbers)
    while not is_idle(ahead):
        time.sleep(0.001)
    del numbers
    gc.collect()
    assert gone() is None
    del ahead
    gc.collect()
    assert thread is not None
    assert not thread.is_alive()


# --------------------------------------------------------------------------- sources


def source(sizes: Sequence[int], *, in_thread: bool, drop: int = 0, wrong: int = -1, **rest: Any):
    def prepare(rows: Any, numbers: Sequence[int]) -> list[Any]:
        if wrong in numbers:
            raise UserError(f"row {wrong} is wrong")
        return [skipped(n) if drop and n % drop == 0 else prompt(n) for n in numbers]

    window = Window(rows=rest.pop("window", 50))
    settings = {"name": "a", "seed": 3, "shuffle": True, "window": window, **rest}
    return StreamedRows(Rows(sizes), prepare, in_thread=in_thread, **settings)


@settings(max_examples=40, deadline=None)
@given(
    steps=st.lists(
        st.tuples(st.integers(0, 300), st.sampled_from(["", "peek", "save", "kill"])), max_size=8
    ),
    window=st.sampled_from([1, 30, 1000]),
    drop=st.sampled_from([0, 2, 3]),
)
def test_R18_the_thread_changes_no_row(steps, window, drop):
    sizes = [7, 1, 300, 40, 2]

    def play(*, in_thread: bool) -> tuple[list[str], list[str], dict[str, Any]]:
        def make() -> Stream[Any]:
            return Stream([source(sizes, in_thread=in_thread, window=window, drop=drop)], seed=3)

        seen = list[str]()
        stream, drawn = make(), list[str]()
        stream.add_check(lambda rows: seen.extend(row.id for row in rows))
        saved = json.dumps(stream.state_dict())
        for num, event in steps:
            if event == "peek":
                drawn += [row.id for row in stream.peek(num)]
            drawn += [row.id for row in stream.take(num)]
            if event == "save":
                saved = json.dumps(stream.state_dict())
            if event == "kill":
                stream.load_state_dict(json.loads(saved))
        return drawn, seen, stream.state_dict()

    assert play(in_thread=True) == play(in_thread=False)


def test_a_wrong_row_is_named_when_its_batch_is_drawn():
    rows = source([2000], in_thread=True, shuffle=False, wrong=3 * TOGETHER_ROWS + 5)
    stream = Stream([rows], seed=3)
    assert rows._thread is not None
    stream.take(1)
    until(lambda: is_idle(rows._thread))
    assert len(stream.take(3 * TOGETHER_ROWS - 1)) == 3 * TOGETHER_ROWS - 1
    for _ in range(2):
        with pytest.raises(UserError, match=f"row {3 * TOGETHER_ROWS + 5} is wrong"):
            stream.take(1)


def test_a_check_refuses_a_row_when_it_is_drawn():
    rows = source([2000], in_thread=True, shuffle=False)
    stream = Stream([rows], seed=3)

    def check(items: Sequence[Any]) -> None:
        assert threading.current_thread() is threading.main_thread()
        if any(item.token_ids == (TOGETHER_ROWS + 7,) for item in items):
            raise UserError("refused")

    stream.add_check(check)
    assert len(stream.take(TOGETHER_ROWS)) == TOGETHER_ROWS
    with pytest.raises(UserError, match="refused"):
        stream.take(1)


def test_no_thread_runs_before_the_first_draw():
    rows = source([500], in_thread=True)
    rows.first_rows()
    assert rows._thread is not None
    assert rows._thread._work._thread is None
    assert not rows._rows.read[0] > 1


def test_rows_are_prepared_by_one_thread_at_a_time():
    at_work, most = [0], [0]

    def sources() -> list[StreamedRows[Any]]:
        made = [source([3000], in_thread=True) for _ in range(3)]
        for own in made:
            plain = own._prepare

            def prepare(rows: Any, numbers: Any, plain: Any = plain) -> Any:
                at_work[0] += 1
                most[0] = max(most[0], at_work[0])
                found = plain(rows, numbers)
                time.sleep(0)  # lets others run
                at_work[0] -= 1
                return found

            own._prepare = prepare
        return made

    stream = Stream(sources(), seed=3)
    for _ in range(20):
        stream.take(200)
    assert most == [1]


@table("num_bytes, num_rows", [(1, TOGETHER_ROWS), (1 << 20, 2), (5 << 20, 1)])
def test_rows_that_are_read_together_are_bounded_in_bytes(num_bytes, num_rows):
    rows = source([600], in_thread=False)
    rows._rows.sizes = blocks_of([600], [600 * num_bytes])
    part = rows._made_from(0)
    assert len(part.rows) == num_rows
    assert part.num_bytes == num_rows * num_bytes
    assert part.following == num_rows


PROGRAM = """
import sys, time, signal
from pathlib import Path
from hone.data.prompts import load_prompts
from hone.data.settings import DataConfig, SourceConfig
from tests.data.support import char_tokenizer
cfg = DataConfig(train=(SourceConfig(path=sys.argv[1]),), shuffle_window=9000)
stream = load_prompts(cfg, char_tokenizer(), seed=0).train
print(len(stream.take(3)), flush=True)
if sys.argv[2] == "error":
    raise ValueError("an error of the run")
if sys.argv[2] == "interrupt":
    signal.raise_signal(signal.SIGINT)
"""


@table("end, status", [("end", 0), ("error", 1), ("interrupt", -signal.SIGINT)])
def test_a_process_ends_while_rows_are_prepared(end: str, status: int, tmp_path: Path):
    """With no more than its own traceback."""
    path = write_rows(
        tmp_path / "a.jsonl", [{"prompt": f"{i}", "answer": "x"} for i in range(9000)]
    )
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM, path, end],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert found.returncode == status, found.stderr
    assert found.stdout == "3\n"
    assert found.stderr.count("Traceback") == (end != "end"), found.stderr
    assert "hone-rows" not in found.stderr
