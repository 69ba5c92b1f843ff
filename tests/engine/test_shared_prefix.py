"""Groups of sequences with common leading blocks, against comparing every pair of tables."""

import random

import numpy as np
import pytest

from hone.engine import shared_prefix
from hone.engine.settings import SHARED_PREFIX_MEMBERS
from hone.engine.shared_prefix import find_prefix_groups, max_groups

BLOCK_SIZE = 4


def random_batch(draw, num_families):
    """Tables of families that share some leading blocks, shuffled, and their context lengths."""
    tables, lens, fresh = [], [], iter(range(10_000))
    for _ in range(num_families):
        stem = [next(fresh) for _ in range(draw.randint(0, 5))]
        for _ in range(draw.choice((1, 2, 5, 20))):
            own = [next(fresh) for _ in range(draw.randint(1, 6))]
            table = stem[: draw.choice((len(stem), len(stem), 2))] + own
            tables.append(table)
            lens.append((len(table) - 1) * BLOCK_SIZE + draw.randint(1, BLOCK_SIZE))
    order = draw.sample(range(len(tables)), len(tables))
    # What lies behind a table's end is left over from others, and may look shared.
    array = np.full((len(tables), max(map(len, tables)) + 2), 7, np.int32)
    for row, i in enumerate(order):
        array[row, : len(tables[i])] = tables[i]
    return array, np.array([lens[i] for i in order]), [tables[i] for i in order]


def common(tables):
    """Number of leading blocks that all tables share, counted one by one."""
    count = 0
    while all(len(t) > count and t[count] == tables[0][count] for t in tables):
        count += 1
    return count


def check(seed):
    draw = random.Random(seed)
    array, lens, tables = random_batch(draw, draw.randint(1, 6))
    num_rows = len(tables) + draw.randint(0, 3)
    groups = find_prefix_groups(array, lens, block_size=BLOCK_SIZE, num_rows=num_rows)
    if groups is None:
        return
    assert groups.rows.shape == (max_groups(num_rows), SHARED_PREFIX_MEMBERS)
    assert groups.starts.shape == (num_rows,)
    starts = np.zeros(num_rows, np.int64)
    seen = set()
    for members, length in zip(groups.rows, groups.lens, strict=True):
        rows = [int(row) for row in members if row >= 0]
        assert list(members[: len(rows)]) == rows  # the first ones are set
        if not rows:
            assert length == 0
            continue
        assert len(rows) >= 2
        assert not seen & set(rows)
        seen |= set(rows)
        assert length == common([tables[row] for row in rows]) * BLOCK_SIZE
        assert all(length < lens[row] for row in rows)  # the newest key is a row's own
        starts[rows] = length
    assert (groups.starts == starts).all()
    firsts = [table[0] for table in tables]
    for row, table in enumerate(tables):  # nobody who shares is left alone, but for the cut
        if lens[row] > BLOCK_SIZE and row not in seen:
            peers = [r for r, first in enumerate(firsts) if first == table[0] and lens[r] > 4]
            assert len(peers) % SHARED_PREFIX_MEMBERS == 1


@pytest.fixture(autouse=True)
def _always_pays(monkeypatch):
    monkeypatch.setattr(shared_prefix, "MIN_SAVED", 1e-9)


def check_many():
    for seed in range(200):
        check(seed)


def test_groups_are_what_comparing_all_tables_gives():
    check_many()


@pytest.mark.parametrize("num_blocks", [1, -1])
def test_planted_wrong_length_is_caught(monkeypatch, num_blocks):
    correct = find_prefix_groups

    def wrong(*arrays, **options):
        groups = correct(*arrays, **options)
        if groups is not None:
            groups.lens[groups.lens > 0] += num_blocks * BLOCK_SIZE
        return groups

    monkeypatch.setitem(globals(), "find_prefix_groups", wrong)
    with pytest.raises(AssertionError):
        check_many()


def test_little_sharing_is_not_worth_a_merge(monkeypatch):
    monkeypatch.setattr(shared_prefix, "MIN_SAVED", 0.05)
    tables = np.array([[1, 2, 3], [1, 4, 5]], np.int32)

    def found(lens):
        tables_of = np.concatenate((tables, np.full((2, 50), 9, np.int32)), 1)
        return find_prefix_groups(tables_of, np.array(lens), block_size=BLOCK_SIZE, num_rows=2)

    assert found([40, 40]) is not None  # 4 of 80 keys
    assert found([41, 40]) is None


def test_groups_do_not_depend_on_which_blocks_hold_the_keys():
    draw = random.Random(11)
    for _ in range(50):
        tables, lens, _ = random_batch(draw, draw.randint(1, 6))
        options = {"block_size": BLOCK_SIZE, "num_rows": len(tables)}
        first = find_prefix_groups(tables, lens, **options)
        names = np.random.default_rng(draw.randint(0, 99)).permutation(tables.max() + 1)
        renamed = names.astype(np.int32)[tables]
        again = find_prefix_groups(renamed, lens, **options)
        if first is None:
            assert again is None
            continue
        assert (first.rows == again.rows).all()
        assert (first.lens == again.lens).all()
