"""Generated problems against Python's own arithmetic."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.data.arithmetic import ALPHABET, generate, write_jsonl
from hone.data.settings import SourceConfig
from hone.data.sources import read_source
from hone.errors import UserError
from tests.tables import table


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 1000),
    low=st.integers(0, 50),
    width=st.integers(5, 500),
    num_operands=st.integers(2, 5),
    ops=st.sampled_from(["+", "-", "*", "+-", "+*", "-*", "+-*"]),
)
def test_answers_are_right_and_problems_distinct(seed, low, width, num_operands, ops):
    rows = generate(20, seed, low=low, high=low + width, num_operands=num_operands, ops=ops)
    for row in rows:
        assert row["completion"] == row["answer"] == str(eval(row["prompt"].removesuffix("=")))
        assert set(row["prompt"] + row["completion"]) <= set(ALPHABET)
        operands = re.findall(r"\d+", row["prompt"])
        assert len(operands) == num_operands
        assert all(low <= int(operand) <= low + width for operand in operands)
        assert set(re.findall(r"[^\d=]", row["prompt"])) <= set(ops)
    assert len({row["prompt"] for row in rows}) == 20


def test_rows_are_a_pure_function_and_prefixes_agree():
    assert generate(50, 3) == generate(80, 3)[:50]
    assert generate(50, 3) != generate(50, 4)
    assert generate(2, 0) == GOLDEN_ROWS


GOLDEN_ROWS = [
    {"prompt": "78+39=", "completion": "117", "answer": "117"},
    {"prompt": "5+14=", "completion": "19", "answer": "19"},
]


def test_all_problems_can_be_asked_for_but_no_more():
    rows = generate(100, 0, low=0, high=9)
    assert {row["prompt"] for row in rows} == {f"{a}+{b}=" for a in range(10) for b in range(10)}
    with pytest.raises(UserError, match=r"there are 100 problems .* fewer than the 101 asked for"):
        generate(101, 0, low=0, high=9)


@table(
    "settings, message",
    [
        ({"ops": "/"}, r"one or more of '\+-\*', got '/'"),
        ({"ops": ""}, "ops must be"),
        ({"low": 5, "high": 4}, "low=5 high=4"),
        ({"low": -1}, "low=-1"),
        ({"num_operands": 1}, "num_operands=1"),
    ],
)
def test_impossible_problems_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        generate(1, 0, **settings)


def test_rows_are_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "deep" / "a.jsonl"
    rows = generate(10, 0)
    write_jsonl(path, rows)
    assert [row.columns for row in read_source(SourceConfig(path=str(path)))] == rows

    def breaks_off():
        yield from rows[:3]
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        write_jsonl(path, breaks_off())
    assert [json.loads(line) for line in path.read_text().splitlines()] == rows
    assert list(path.parent.iterdir()) == [path]
