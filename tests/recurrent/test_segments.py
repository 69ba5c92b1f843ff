"""Plans of segments against a walk over the segments one by one."""

from __future__ import annotations

import random
from itertools import pairwise
from typing import Any

import pytest
import torch

from hone.segments import BEFORE, CHUNK, Segment, SegmentPlan, plan_segments
from tests.tables import table


def drawn(num_segments: int) -> list[Segment]:
    """Segments in any order of places, with parents of any depth, and stored states of some."""
    sizes = [random.choice([1, 2, 5, 64, 65, 200]) for _ in range(num_segments)]
    places = random.sample(range(num_segments), num_segments)
    starts = [sum(sizes[other] for other in places[: places.index(n)]) for n in range(num_segments)]
    rows = iter(random.sample(range(100), 100))
    found: list[Segment] = []
    for number in range(num_segments):
        kind = random.choice(["zero", "stored", "parent"])
        parent = random.randrange(number) if kind == "parent" and number else None
        read = next(rows) if kind == "stored" else None
        writes = tuple(next(rows) for _ in range(random.choice([0, 0, 1, 2])))
        found.append(Segment(starts[number], sizes[number], parent, read, writes))
    return found


def walk(segments: list[Segment], stored: dict[int, Any]) -> tuple[dict[int, Any], dict[int, Any]]:
    """The tokens that each token has before it, itself included, behind what was stored; and what
    is stored afterwards."""
    ends: list[Any] = []
    seen: dict[int, Any] = {}
    after: dict[int, Any] = {}
    for segment in segments:
        history: Any = ()
        if segment.parent is not None:
            history = ends[segment.parent]
        elif segment.read is not None:
            history = stored[segment.read]
        for token in range(segment.start, segment.start + segment.size):
            history = (*history, token)
            seen[token] = history
        ends.append(history)
        after |= dict.fromkeys(segment.writes, history)
    return seen, after


def follow(plan: SegmentPlan, num_tokens: int, stored: dict[int, Any]):
    """The same from a plan, as a layer uses it."""
    ends: list[Any] = []
    seen: dict[int, Any] = {}
    order = [*range(num_tokens)] if plan.order is None else plan.order[0].tolist()
    if plan.order is not None:
        assert [order[place] for place in plan.order[1].tolist()] == [*range(num_tokens)]
        assert order != [*range(num_tokens)]
    for number, level in enumerate(plan.levels):
        borders = level.cu_seqlens.tolist()
        assert [b - a for a, b in pairwise(borders)] == [*level.lengths]
        before: list[Any] = [()] * len(level.lengths)
        if number == 0:
            assert level.parents is None
            if plan.reads is not None:
                for place, row in zip(*(x.tolist() for x in plan.reads), strict=True):
                    before[place] = stored[row]
        else:
            assert level.parents is not None
            before = [ends[place] for place in level.parents.tolist()]
        finals = []
        for history, start, end in zip(before, borders, borders[1:], strict=False):
            for place in range(start, end):
                history = (*history, order[place])
                seen[order[place]] = history
            finals.append(history)
        ends += finals
    after = {}
    if plan.writes is not None:
        after = {
            row: ends[place] for place, row in zip(*(x.tolist() for x in plan.writes), strict=True)
        }
    return seen, after


@table("num_segments", [1, 2, 3, 8, 20])
def test_each_token_has_the_history_of_a_walk_over_segments(num_segments: int):
    for _ in range(20):
        segments = drawn(num_segments)
        plan = plan_segments(segments, torch.as_tensor)
        stored = {x.read: ("stored", x.read) for x in segments if x.read is not None}
        num_tokens = sum(x.size for x in segments)
        assert follow(plan, num_tokens, stored) == walk(segments, stored)


@table("num_segments", [1, 2, 3, 8, 20])
def test_all_levels_are_numbered_as_one(num_segments: int):
    for _ in range(20):
        plan = plan_segments(drawn(num_segments), torch.as_tensor)
        borders = plan.cu_seqlens.tolist()
        assert [b - a for a, b in pairwise(borders)] == [*plan.lengths]
        counts = [-(-length // CHUNK) for length in plan.lengths]
        chunks = [[number, i] for number, count in enumerate(counts) for i in range(count)]
        assert plan.chunks.tolist() == chunks
        segment = 0
        for level in plan.levels:
            end = segment + len(level.lengths)
            assert level.cu_seqlens.tolist() == borders[segment : end + 1]
            assert level.lengths == plan.lengths[segment:end]
            firsts = [sum(counts[:number]) for number in range(segment, end)]
            assert level.chunk_offsets.tolist() == firsts
            segment = end
        assert segment == len(plan.lengths) == num_segments


@table("num_segments", [1, 2, 3, 8, 20])
def test_inputs_before_each_segment_are_those_of_a_walk(num_segments: int):
    """Of segments shorter than a convolution, of their parents and of what was stored."""
    num_found = 0
    for _ in range(20):
        segments = drawn(num_segments)
        plan = plan_segments(segments, torch.as_tensor)
        places = [*range(sum(plan.lengths))] if plan.order is None else plan.order[0].tolist()
        starts = [places[border] for border in plan.cu_seqlens.tolist()[:-1]]
        stored = {x.read: tuple((x.read, i) for i in range(BEFORE)) for x in segments if x.read}
        seen, _ = walk(segments, stored | {0: tuple((0, i) for i in range(BEFORE))})
        expected = [seen[start][:-1][-BEFORE:] for start in starts]
        found: list[Any] = [None] * (num_segments * BEFORE)
        if plan.before is not None:
            for number, token in zip(*(x.tolist() for x in plan.before), strict=True):
                found[number] = places[token]
        if plan.reads is not None:
            assert plan.before_reads is not None
            rows = dict(zip(*(x.tolist() for x in plan.reads), strict=True))
            for number, other in zip(*(x.tolist() for x in plan.before_reads), strict=True):
                root, i = divmod(other, BEFORE)
                assert found[number] is None
                found[number] = (rows[root], i) if root in rows else None
        for number, inputs in enumerate(expected):
            zeros = [None] * (BEFORE - len(inputs))
            assert found[number * BEFORE :][:BEFORE] == [*zeros, *inputs]
            num_found += len(inputs)
    assert num_found or num_segments == 1


def test_whole_sequences_end_to_end_need_no_order():
    plan = plan_segments([Segment(0, 3), Segment(3, 2)], torch.as_tensor)
    (level,) = plan.levels
    assert plan.order is None
    assert level.lengths == (3, 2)
    assert plan.reads is plan.writes is None


WRONG = {
    "empty": [Segment(0, 0)],
    "a child before its parent": [Segment(0, 2, parent=1), Segment(2, 2)],
    "two beginnings": [Segment(0, 2), Segment(2, 2, parent=0, read=1)],
}


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_plan(case: str):
    with pytest.raises(AssertionError):
        plan_segments(WRONG[case], torch.as_tensor)
