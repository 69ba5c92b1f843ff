"""Scheduler and block manager against a symbolic KV cache.

The cache below stores, for each slot, *which prefix under which weights* was written there, so
reading back proves every table, share, eviction and preemption right.
"""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.engine.block_manager import BlockManager
from hone.engine.scheduler import Scheduler
from hone.engine.sequence import Sequence
from hone.types import Request, SamplingParams, StopReason

BLOCK_SIZE = 4
MAX_LEN = 40


class Simulation:
    """Drives a scheduler as the engine does, with symbols in place of keys and values."""

    def __init__(self, seed, *, num_blocks=14, max_num_seqs=5, budget=13, caching=True):
        self.random = random.Random(seed)
        self.blocks = BlockManager(
            num_blocks=num_blocks, block_size=BLOCK_SIZE, enable_prefix_caching=caching
        )
        self.scheduler = Scheduler(
            self.blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget
        )
        self.budget = budget
        self.memory = {}  # (block, offset) -> (epoch, prefix)
        self.epoch = 0
        self.alive = {}  # sequence -> epoch of its admission
        self.num_submitted = 0

    def submit(self):
        """A group of one to three sequences with the same prompt; prompts share beginnings."""
        stem = [self.random.choice((1, 2))] * self.random.randint(1, 12)
        prompt = tuple(stem + self.random.choices((1, 2), k=self.random.randint(0, 12)))
        priority = self.random.choice((0, 0, 1))
        for _ in range(self.random.randint(1, 3)):
            max_tokens = self.random.randint(1, MAX_LEN - len(prompt))
            sequence = Sequence(
                request=Request(
                    id=str(self.num_submitted),
                    prompt_ids=prompt,
                    sampling=SamplingParams(max_tokens=max_tokens),
                    priority=priority,
                ),
                arrival=self.num_submitted,
                stop_ids=frozenset(),
            )
            self.num_submitted += 1
            self.alive[sequence] = -1
            self.scheduler.add(sequence)

    def abort(self):
        gone = self.random.sample(list(self.alive), k=min(2, len(self.alive)))
        self.scheduler.remove(gone)
        for sequence in gone:
            del self.alive[sequence]

    def sync(self):
        self.epoch += 1
        self.blocks.invalidate_prefixes()

    def fail(self):
        """A step whose forward raises before anything is written."""
        self.scheduler.schedule()
        self.scheduler.preempt_all()

    def step(self):
        running_before = list(self.scheduler.running)
        batch = self.scheduler.schedule()
        assert bool(batch.sequences) == bool(self.alive)
        for sequence in batch.admitted:
            self.alive[sequence] = self.epoch
        self.check_batch(batch, running_before)
        for sequence, size in zip(batch.sequences, batch.num_tokens, strict=True):
            self.write(sequence, size)
        for sequence, size in zip(batch.sequences, batch.num_tokens, strict=True):
            self.read(sequence, sequence.num_computed + size)
        ended = []
        for sequence, size in zip(batch.sequences, batch.num_tokens, strict=True):
            sequence.num_computed += size
            if sequence.num_computed == len(sequence.token_ids):
                reason = sequence.append(self.random.choice((1, 2)), -0.5, self.epoch)
                if reason is StopReason.LENGTH:
                    ended.append(sequence)
        self.scheduler.remove(ended)
        for sequence in ended:
            del self.alive[sequence]

    def write(self, sequence, size):
        for position in range(sequence.num_computed, sequence.num_computed + size):
            slot = sequence.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE
            self.memory[slot] = self.epoch, tuple(sequence.token_ids[: position + 1])

    def read(self, sequence, end):
        for position in range(end):
            slot = sequence.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE
            epoch, prefix = self.memory[slot]
            assert prefix == tuple(sequence.token_ids[: position + 1]), f"{slot=} {position=}"
            assert epoch >= self.alive[sequence], f"stale {slot=}: {epoch=}"

    def check_batch(self, batch, running_before):
        assert sum(batch.num_tokens) <= self.budget
        assert len(set(batch.sequences)) == len(batch.sequences)
        for sequence, size in zip(batch.sequences, batch.num_tokens, strict=True):
            pending = len(sequence.token_ids) - sequence.num_computed
            assert 1 <= size <= pending
        for sequence in running_before:  # decodes are never left out for prefills
            decoding = len(sequence.token_ids) - sequence.num_computed == 1
            assert sequence in batch.sequences or sequence.slot < 0 or not decoding

    def check_ownership(self):
        """Each block is free, idle or held, and the counts are those of the tables."""
        running, blocks = self.scheduler.running, self.blocks
        held = Counter(block for sequence in running for block in sequence.block_table)
        assert dict(held) == {b: refs for b, refs in enumerate(blocks._refs) if refs}
        places = [*blocks._free, *blocks._idle, *held]
        assert sorted(places) == list(range(blocks.num_blocks)), f"{places=}"
        for block, count in held.items():
            assert count == 1 or blocks._keys[block] is not None, f"{block=} shared, not published"
        published = {block: key for key, (block, _) in blocks._published.items()}
        assert published == {b: key for b, key in enumerate(blocks._keys) if key is not None}
        slots = [sequence.slot for sequence in running]
        assert len(set(slots)) == len(slots)
        assert min(slots, default=0) >= 0
        waiting = [sequence for sequence in self.alive if sequence not in running]
        assert len(waiting) == self.scheduler.num_waiting
        assert all(s.slot < 0 and not s.block_table and not s.num_computed for s in waiting)

    def run(self, num_events):
        events = [self.submit] * 4 + [self.step] * 12 + [self.abort, self.sync, self.fail]
        for _ in range(num_events):
            self.random.choice(events)()
            self.check_ownership()
        while self.alive:
            self.step()
            self.check_ownership()
        assert not self.scheduler.has_unfinished
        assert self.blocks.usage == 0


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(MAX_LEN // BLOCK_SIZE, 30),
    max_num_seqs=st.integers(1, 6),
    budget=st.integers(1, 30),
    caching=st.booleans(),
)
def test_invariants_hold_over_random_events(seed, num_blocks, max_num_seqs, budget, caching):
    Simulation(
        seed,
        num_blocks=num_blocks,
        max_num_seqs=max_num_seqs,
        budget=budget,
        caching=caching,
    ).run(60)


def _publish_all_at_once(correct):
    def publish(self, sequence, num_tokens):
        correct(self, sequence, len(sequence.token_ids))

    return publish


def _release_without_counting(correct):
    def release(self, sequence):
        for block in sequence.block_table:
            self._refs[block] = 1
        correct(self, sequence)

    return release


def _key_by_tokens_alone(correct):
    def publish(self, sequence, num_tokens):
        sequence.chain = self._root
        correct(self, sequence, num_tokens)

    return publish


def simulate_many():
    for seed in range(30):
        Simulation(seed, budget=6).run(80)


def test_correct_simulation_passes():
    simulate_many()


PLANTED = {
    "published before it is scheduled": ("publish", _publish_all_at_once),
    "shared block freed with its first owner": ("release", _release_without_counting),
    "key without the prefix before the block": ("publish", _key_by_tokens_alone),
    "R9: key without the weight version": (
        "invalidate_prefixes",
        lambda correct: lambda self: None,
    ),
    "blocks never given back": ("release", lambda correct: lambda self, sequence: None),
}


@pytest.mark.parametrize(("method", "mutate"), PLANTED.values(), ids=PLANTED)
def test_planted_bugs_are_caught(monkeypatch, method, mutate):
    monkeypatch.setattr(BlockManager, method, mutate(getattr(BlockManager, method)))
    with pytest.raises((AssertionError, KeyError)):
        simulate_many()


def sequence_of(num_tokens, *, arrival, priority=0, first_token=0):
    request = Request(
        id=str(arrival),
        prompt_ids=tuple(range(first_token, first_token + num_tokens)),
        sampling=SamplingParams(max_tokens=8),
        priority=priority,
    )
    return Sequence(request=request, arrival=arrival, stop_ids=frozenset())


def scheduler_of(*, num_blocks=100, max_num_seqs=8, budget=64):
    blocks = BlockManager(num_blocks=num_blocks, block_size=BLOCK_SIZE, enable_prefix_caching=True)
    return Scheduler(blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget)


def finish_step(batch):
    for sequence, size in zip(batch.sequences, batch.num_tokens, strict=True):
        sequence.num_computed += size
        if sequence.num_computed == len(sequence.token_ids):
            sequence.append(7, -1.0, 0)


def test_a_group_computes_its_prompt_once_in_one_step():
    scheduler = scheduler_of()
    for arrival in range(4):
        scheduler.add(sequence_of(11, arrival=arrival))
    batch = scheduler.schedule()
    assert batch.num_tokens == [11, 3, 3, 3]
    assert len({tuple(s.block_table[:2]) for s in batch.sequences}) == 1
    assert len({s.block_table[2] for s in batch.sequences}) == 4
    assert [s.num_cached_tokens for s in batch.sequences] == [0, 8, 8, 8]
    assert (scheduler.num_prompt_tokens, scheduler.num_cached_tokens) == (44, 24)


def test_a_fully_cached_prompt_still_computes_a_token():
    scheduler = scheduler_of()
    scheduler.add(sequence_of(8, arrival=0))
    scheduler.add(sequence_of(8, arrival=1))
    assert scheduler.schedule().num_tokens == [8, 4]


def test_prefill_is_chunked_and_decodes_go_first():
    scheduler = scheduler_of(budget=10)
    scheduler.add(sequence_of(3, arrival=0))
    finish_step(scheduler.schedule())
    scheduler.add(sequence_of(25, arrival=1))
    sizes = []
    for _ in range(3):
        batch = scheduler.schedule()
        sizes.append(batch.num_tokens)
        finish_step(batch)
    assert sizes == [[1, 9], [1, 9], [1, 7]]


def test_priority_then_arrival():
    scheduler = scheduler_of(max_num_seqs=2)
    for arrival, priority in enumerate((1, 0, 1, 0)):
        scheduler.add(sequence_of(3, arrival=arrival, priority=priority))
    assert [s.arrival for s in scheduler.schedule().sequences] == [1, 3]


def test_the_last_served_is_preempted_and_keeps_its_tokens():
    scheduler = scheduler_of(num_blocks=5)
    first = sequence_of(8, arrival=0, priority=1, first_token=100)
    second = sequence_of(7, arrival=1, priority=0)
    scheduler.add(second)
    finish_step(scheduler.schedule())  # two blocks, one token of room
    scheduler.add(first)
    finish_step(scheduler.schedule())  # two more blocks, full
    batch = scheduler.schedule()  # both need a block now, one is left
    assert batch.sequences == [second]
    assert scheduler.num_preemptions == 1
    assert scheduler.num_waiting == 1
    assert first.token_ids[-1] == 7
    assert first.logprobs == [-1.0]
    assert first.num_computed == 0
