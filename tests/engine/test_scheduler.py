"""Scheduler and block manager against a symbolic KV cache.

The cache below stores, for each slot, *which prefix of ids and contents under which weights* was
written there, so reading back proves every table, share, eviction and preemption right.
"""

import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.engine.block_manager import BlockManager
from hone.engine.model_runner import segments_of
from hone.engine.scheduler import Scheduler
from hone.engine.sequence import Sequence
from hone.engine.snapshots import Snapshots
from hone.model_input import TEXT, Content, ModelInput
from hone.types import Request, SamplingParams, StopReason
from tests.tables import table

BLOCK_SIZE = 4
MAX_LEN = 40


class Simulation:
    """Drives a scheduler as the engine does, with symbols in place of keys and values.

    `tokens` is what the device knows: with `depth` 1 the host learns a token one step later.
    """

    def __init__(
        self,
        seed,
        *,
        num_blocks=14,
        max_num_seqs=5,
        budget=13,
        caching=True,
        depth=0,
        whole=False,
        num_snapshots=None,
    ):
        self.random = random.Random(seed)
        snapshots = None
        if num_snapshots is not None:
            snapshots = Snapshots(range(max_num_seqs + 1, max_num_seqs + 1 + num_snapshots))
        self.states = {}  # row -> (oldest epoch, prefix)
        self.num_reused = 0
        self.blocks = BlockManager(
            num_blocks=num_blocks,
            block_size=BLOCK_SIZE,
            enable_prefix_caching=caching,
            snapshots=snapshots,
        )
        self.scheduler = Scheduler(
            self.blocks,
            max_num_seqs=max_num_seqs,
            max_num_batched_tokens=budget,
            prefills_stop_decodes=seed % 2 == 1,
            keeps_contents_whole=whole,
        )
        self.whole = whole
        self.budget = budget
        self.depth = depth
        self.memory = {}  # (block, offset) -> (epoch, prefix)
        self.epoch = 0
        self.alive = {}  # sequence -> epoch of its admission
        self.tokens = {}  # sequence -> its tokens, those in flight included
        self.in_flight = []  # steps, each a list of (sequence, sampled token)
        self.num_submitted = 0

    def submit(self):
        """A group of one to three sequences with the same prompt; prompts share beginnings, and
        some have one of two images in the place of the same ids."""
        stem = [self.random.choice((1, 2))] * self.random.randint(1, 12)
        prompt = tuple(stem + self.random.choices((1, 2), k=self.random.randint(0, 12)))
        priority = self.random.choice((0, 0, 1))
        model_input = TEXT
        if len(prompt) >= 6 and (name := self.random.choice(("", "a", "b"))):
            model_input = ModelInput(self.images(name, len(prompt)))
        for _ in range(self.random.randint(1, 3)):
            max_tokens = self.random.randint(1, MAX_LEN - len(prompt))
            sequence = Sequence(
                request=Request(
                    id=str(self.num_submitted),
                    prompt_ids=prompt,
                    sampling=SamplingParams(max_tokens=max_tokens),
                    priority=priority,
                    model_input=model_input,
                ),
                arrival=self.num_submitted,
                stop_ids=frozenset(),
            )
            self.num_submitted += 1
            self.alive[sequence] = -1
            self.scheduler.add(sequence)

    def images(self, name, num_tokens):
        """One image of three tokens; where they are kept whole, several that each fit a step."""
        if not self.whole:
            return (Content(kind="image", hash=name, start=3, num_tokens=3),)
        found, start = [], self.random.randint(0, 4)
        while True:
            size = self.random.randint(1, min(self.budget, 9))
            if start + size > num_tokens:
                return tuple(found)
            found.append(Content(kind="image", hash=name, start=start, num_tokens=size))
            start += size + self.random.choice((0, 1, 3))

    def abort(self):
        gone = self.random.sample(list(self.alive), k=min(2, len(self.alive)))
        self.scheduler.remove(gone)
        for sequence in gone:
            del self.alive[sequence]

    def sync(self):
        self.collect(0)
        self.epoch += 1
        self.blocks.invalidate_prefixes()

    def fail(self):
        """A step whose forward raises before anything is written, perhaps since it ran out of
        memory."""
        plan = self.scheduler.schedule()
        if self.random.random() < 0.5:
            self.scheduler.limit.fail(plan.num_tokens)
        self.in_flight.clear()
        self.scheduler.restart(self.alive)

    def step(self):
        running_before = list(self.scheduler.running)
        decoding_before = [s for s in running_before if s.is_decoding]
        plan = self.scheduler.schedule()
        assert plan or self.in_flight or not self.alive
        for sequence in plan.admitted:
            self.alive[sequence] = self.epoch
            assert sequence.num_in_flight <= 1
            self.tokens[sequence] = list(sequence.token_ids)
        self.check_plan(plan, decoding_before)
        sampled = []
        if self.blocks.snapshots is not None:
            self.run_states(plan)
        for sequence in plan.decodes:
            self.write(sequence, sequence.num_computed - 1, 1)
        for sequence in plan.decodes:
            self.read(sequence, sequence.num_computed)
            sampled.append((sequence, self.draw(sequence)))
        for sequence, start, size, *_ in plan.chunks:
            self.write(sequence, start, size)
        for sequence, start, size, samples, *_ in plan.chunks:
            self.read(sequence, start + size)
            if samples:
                sampled.append((sequence, self.draw(sequence)))
        if plan:
            self.in_flight.append(sampled)
        self.collect(self.depth if plan else 0)

    def draw(self, sequence):
        token = self.random.choice((1, 2))
        self.tokens[sequence].append(token)
        return token

    def collect(self, depth):
        while len(self.in_flight) > depth:
            ended = []
            for sequence, token in self.in_flight.pop(0):
                if sequence.has_ended:
                    continue
                sequence.num_in_flight -= 1
                stops = self.random.random() < 0.1  # a stop string, say
                if sequence.append(token, -0.5, self.epoch) is StopReason.LENGTH or stops:
                    ended.append(sequence)
            self.scheduler.remove(ended)
            for sequence in ended:
                del self.alive[sequence]

    def write(self, sequence, start, size):
        for position in range(start, start + size):
            slot = sequence.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE
            self.memory[slot] = self.epoch, self.prefix(sequence, position)

    def run_states(self, plan):
        """Recurrent layers: a decode moves the state in its row by a token; segments of a prefill
        begin with zeros, a row or a parent's state. All rows are read before any is written."""
        for sequence in plan.decodes:
            self.advance(sequence.slot, sequence, sequence.num_computed - 1, 1)
        segments = segments_of(plan.chunks)
        cuts = [
            (chunk.sequence, end)
            for chunk in plan.chunks
            for end in sorted({*(at for at, _ in chunk.snapshots), chunk.start + chunk.size})
        ]
        begins = {segment.read: self.states.get(segment.read) for segment in segments}
        ends, written, place = [], [], 0
        for segment, (sequence, end) in zip(segments, cuts, strict=True):
            assert segment.start == place
            place += segment.size
            start = end - segment.size
            assert segment.parent is None or segment.read is None
            begin = begins[segment.read] if segment.parent is None else ends[segment.parent]
            if segment.parent is None and segment.read is None:
                assert start == 0, "a state is lost"
                begin = (self.epoch, ((), ()))
            self.num_reused += begin is not None and segment.read not in (None, sequence.slot)
            self.check_state(begin, sequence, start)
            ends.append((min(begin[0], self.epoch), self.prefix(sequence, end - 1)))
            written += [(row, ends[-1]) for row in segment.writes]
        rows = [row for row, _ in written]
        assert len(rows) == len(set(rows)), "a row is written twice"
        self.states |= dict(written)

    def advance(self, row, sequence, start, size):
        self.check_state(self.states[row], sequence, start)
        oldest = min(self.states[row][0], self.epoch)
        self.states[row] = oldest, self.prefix(sequence, start + size - 1)

    def check_state(self, state, sequence, num_tokens):
        epoch, prefix = state
        expected = self.prefix(sequence, num_tokens - 1) if num_tokens else ((), ())
        assert prefix == expected, f"{num_tokens=}"
        assert epoch >= self.alive[sequence], f"state of other weights: {epoch=}"

    def prefix(self, sequence, position):
        contents = sequence.request.model_input.contents
        seen = tuple((x.start, x.hash) for x in contents if x.start <= position)
        return tuple(self.tokens[sequence][: position + 1]), seen

    def read(self, sequence, end):
        for position in range(end):
            slot = sequence.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE
            epoch, prefix = self.memory[slot]
            assert prefix == self.prefix(sequence, position), f"{slot=} {position=}"
            assert epoch >= self.alive[sequence], f"stale {slot=}: {epoch=}"

    def check_plan(self, plan, decoding_before):
        assert len(plan.decodes) + sum(chunk.size for chunk in plan.chunks) <= self.budget
        planned = [*plan.decodes, *(chunk.sequence for chunk in plan.chunks)]
        assert len(set(planned)) == len(planned)
        for sequence, start, size, samples, *_ in plan.chunks:
            assert size >= 1
            if self.whole:
                contents = sequence.request.model_input.contents
                assert not any(x.start < start + size < x.stop for x in contents), "inside an image"
            assert samples == (start + size == len(sequence.token_ids))
            assert sequence.num_computed == start + size <= len(self.tokens[sequence])
        for sequence in decoding_before:  # decodes are never left out for prefills
            is_last = sequence not in plan.decodes and sequence.num_left == 0
            assert sequence in plan.decodes or sequence.slot < 0 or is_last
        for sequence in planned:
            assert sequence.num_left >= 0
        for sequence in plan.decodes:  # their only pending token was sampled by an earlier step
            assert sequence in decoding_before

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
        assert not self.scheduler.running
        assert self.scheduler.num_waiting == 0
        assert self.blocks.usage == 0


@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    fields=st.fixed_dictionaries(
        {
            "num_blocks": st.integers(MAX_LEN // BLOCK_SIZE, 30),
            "max_num_seqs": st.integers(1, 6),
            "budget": st.integers(1, 30),
            "caching": st.booleans(),
            "depth": st.integers(0, 1),
            "whole": st.booleans(),
            "num_snapshots": st.sampled_from([None, 1, 2, 20]),
        }
    ),
)
def test_invariants_hold_over_random_events(seed, fields):
    Simulation(seed, **fields).run(60)


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


def _key_by_ids(correct):
    def key(self, sequence, chain, start):
        return correct(self, sequence, chain, start)[:2]

    return key


def simulate_many(num_snapshots=None):
    """Returns how often a state of another sequence was reused."""
    num_reused = 0
    for seed in range(40):
        simulation = Simulation(seed, budget=6, depth=seed % 2, num_snapshots=num_snapshots)
        simulation.run(80)
        num_reused += simulation.num_reused
    return num_reused


def test_correct_simulation_passes():
    simulate_many()


def test_states_are_reused_where_a_prefix_has_one():
    assert simulate_many(num_snapshots=6) > 20


PLANTED_IN_STATES = {
    "R9: states without the weight version": (
        BlockManager,
        "invalidate_prefixes",
        lambda correct: lambda self: None,
    ),
    "a prefix without a state is reused": (
        Snapshots,
        "__contains__",
        lambda correct: lambda self, chain: True,
    ),
    "a row is taken twice in a step": (
        Snapshots,
        "take",
        lambda correct: lambda self, chain: (self._taken.clear(), correct(self, chain))[1],
    ),
    "a state is kept a token late": (
        Scheduler,
        "_snapshots",
        lambda correct: (
            lambda self, sequence, stop, snapshots: (
                (min(border + 1, stop), row)
                for border, row in correct(self, sequence, stop, snapshots)
            )
        ),
    ),
}


@table("owner, method, mutate", PLANTED_IN_STATES.values())
def test_planted_bugs_in_states_are_caught(monkeypatch, owner, method, mutate):
    monkeypatch.setattr(owner, method, mutate(getattr(owner, method)))
    with pytest.raises((AssertionError, KeyError, TypeError)):
        simulate_many(num_snapshots=1)


PLANTED = {
    "published before it is scheduled": ("publish", _publish_all_at_once),
    "shared block freed with its first owner": ("release", _release_without_counting),
    "key without the prefix before the block": ("publish", _key_by_tokens_alone),
    "key without the contents of the block": ("_key", _key_by_ids),
    "R9: key without the weight version": (
        "invalidate_prefixes",
        lambda correct: lambda self: None,
    ),
    "blocks never given back": ("release", lambda correct: lambda self, sequence: None),
}


@table("method, mutate", PLANTED.values())
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


def scheduler_of(*, num_blocks=100, max_num_seqs=8, budget=64, **settings):
    blocks = BlockManager(num_blocks=num_blocks, block_size=BLOCK_SIZE, enable_prefix_caching=True)
    return Scheduler(blocks, max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, **settings)


def finish_step(plan):
    for sequence in [*plan.decodes, *(chunk.sequence for chunk in plan.chunks if chunk.samples)]:
        sequence.num_in_flight -= 1
        sequence.append(7, -1.0, 0)


def sizes_of(plan):
    return [1] * len(plan.decodes) + [chunk.size for chunk in plan.chunks]


def test_a_group_computes_its_prompt_once_in_one_step():
    scheduler = scheduler_of()
    for arrival in range(4):
        scheduler.add(sequence_of(11, arrival=arrival))
    plan = scheduler.schedule()
    assert sizes_of(plan) == [11, 3, 3, 3]
    assert len({tuple(s.block_table[:2]) for s in plan.admitted}) == 1
    assert len({s.block_table[2] for s in plan.admitted}) == 4
    assert [s.num_cached_tokens for s in plan.admitted] == [0, 8, 8, 8]
    assert (scheduler.num_prompt_tokens, scheduler.num_cached_tokens) == (44, 24)


def test_a_fully_cached_prompt_still_computes_a_token():
    scheduler = scheduler_of()
    scheduler.add(sequence_of(8, arrival=0))
    scheduler.add(sequence_of(8, arrival=1))
    assert sizes_of(scheduler.schedule()) == [8, 4]


def test_prompts_with_the_same_ids_share_blocks_up_to_the_first_other_image():
    scheduler = scheduler_of()
    for arrival, name in enumerate("aab"):
        image = Content(kind="image", hash=name, start=6, num_tokens=4)
        sequence = sequence_of(17, arrival=arrival)
        sequence.request = replace(sequence.request, model_input=ModelInput((image,)))
        scheduler.add(sequence)
    scheduler.add(sequence_of(17, arrival=3))
    plan = scheduler.schedule()
    assert [s.num_cached_tokens for s in plan.admitted] == [0, 16, 4, 4]


def test_prefill_is_chunked_and_decodes_go_first():
    scheduler = scheduler_of(budget=10)
    scheduler.add(sequence_of(3, arrival=0))
    finish_step(scheduler.schedule())
    scheduler.add(sequence_of(25, arrival=1))
    sizes = []
    for _ in range(3):
        plan = scheduler.schedule()
        sizes.append(sizes_of(plan))
        finish_step(plan)
    assert sizes == [[1, 9], [1, 9], [1, 7]]


def image_sequence(num_tokens, *contents, arrival):
    """A sequence with images, each (start, size)."""
    sequence = sequence_of(num_tokens, arrival=arrival, first_token=1000 * arrival)
    images = [Content(kind="image", hash=f"{n}", start=s, num_tokens=n) for s, n in contents]
    sequence.request = replace(sequence.request, model_input=ModelInput(tuple(images)))
    return sequence


CHUNKS = [
    ([(6, 8)], True, [6, 10, 9]),
    ([(6, 8)], False, [10, 10, 5]),
    ([(0, 10)], True, [10, 10, 5]),
    ([(5, 5), (10, 10)], True, [10, 10, 5]),  # they adjoin
    ([(1, 10), (11, 3)], True, [1, 10, 10, 4]),
    ([(15, 10)], True, [10, 5, 10]),
]


@table("images, whole, expected", CHUNKS)
def test_no_chunk_ends_inside_an_image_that_is_kept_whole(images, whole, expected):
    scheduler = scheduler_of(budget=10, keeps_contents_whole=whole)
    scheduler.add(image_sequence(25, *images, arrival=0))
    assert [size for _ in expected for size in sizes_of(scheduler.schedule())] == expected


def test_the_rest_of_an_image_behind_cached_blocks_is_one_chunk():
    scheduler = scheduler_of(budget=20, keeps_contents_whole=True)
    first = image_sequence(20, (2, 9), arrival=0)
    scheduler.add(first)
    finish_step(scheduler.schedule())
    text = sequence_of(17, arrival=1, first_token=500)
    second = image_sequence(20, (2, 9), arrival=2)
    second.token_ids = [*first.request.prompt_ids[:11], *range(9)]  # eight tokens are cached
    scheduler.add(text)
    scheduler.add(second)
    plan = scheduler.schedule()
    assert sizes_of(plan) == [1, 17], "two tokens are left for the three of the image"
    assert not second.block_table
    finish_step(plan)
    (chunk,) = scheduler.schedule().chunks
    assert (chunk.sequence, chunk.start, chunk.size) == (second, 8, 12)


def test_an_image_that_finds_no_room_beside_decodes_is_next():
    scheduler = scheduler_of(budget=10, keeps_contents_whole=True)
    for arrival in range(3):
        scheduler.add(sequence_of(3, arrival=arrival, first_token=100 * arrival))
    finish_step(scheduler.schedule())  # three of three tokens
    scheduler.add(image_sequence(9, (0, 8), arrival=3))
    scheduler.add(sequence_of(3, arrival=4, first_token=500))
    plan = scheduler.schedule()
    assert sizes_of(plan) == [1, 1, 1], "the text would take the room of the image for ever"
    assert scheduler.num_waiting == 2
    finish_step(plan)
    scheduler.remove(plan.decodes[:1])
    assert sizes_of(scheduler.schedule()) == [1, 1, 8]


def test_an_image_in_the_middle_of_a_prompt_is_not_overtaken():
    scheduler = scheduler_of(budget=10, keeps_contents_whole=True)
    for arrival in range(3):
        scheduler.add(sequence_of(1, arrival=arrival, first_token=100 * arrival))
    scheduler.add(image_sequence(12, (2, 8), arrival=3))
    plan = scheduler.schedule()
    assert sizes_of(plan) == [1, 1, 1, 2]
    finish_step(plan)
    late = sequence_of(20, arrival=4, first_token=500)
    scheduler.blocks.allocate(late, reserve=0)  # as if it had been admitted before
    late.slot = 7
    scheduler.running.append(late)
    plan = scheduler.schedule()
    assert sizes_of(plan) == [1, 1, 1]
    finish_step(plan)
    scheduler.remove(plan.decodes[:1])
    assert sizes_of(scheduler.schedule()) == [1, 1, 8]


def test_a_step_that_ran_out_of_memory_shrinks_to_an_image_and_no_further():
    scheduler = scheduler_of(budget=64, keeps_contents_whole=True)
    scheduler.add(image_sequence(40, (3, 20), arrival=0))
    limit = scheduler.limit
    assert limit.fail(64)
    assert limit.now == 32
    assert limit.fail(32)
    assert limit.now == 20
    assert not limit.fail(20)
    scheduler.add(image_sequence(40, (3, 25), arrival=1))
    assert limit.now == 25
    assert sizes_of(scheduler.schedule()) == [25]
    assert sizes_of(scheduler.schedule()) == [15, 3]


def test_a_step_is_planned_before_the_tokens_of_the_last_are_known():
    scheduler = scheduler_of()
    sequence = sequence_of(3, arrival=0)  # eight tokens may be sampled
    scheduler.add(sequence)
    assert sizes_of(scheduler.schedule()) == [3]
    assert [len(scheduler.schedule().decodes) for _ in range(8)] == [1] * 7 + [0]
    assert (sequence.num_in_flight, sequence.num_left, len(sequence.token_ids)) == (8, 0, 3)


def test_a_full_engine_waits_for_several_free_slots():
    scheduler = scheduler_of(num_blocks=500, max_num_seqs=64, budget=500)
    for arrival in range(80):
        scheduler.add(sequence_of(2, arrival=arrival))
    first = scheduler.schedule().admitted
    assert len(first) == 64
    scheduler.remove(first[:1])
    assert not scheduler.schedule().admitted
    scheduler.remove(first[1:2])
    assert len(scheduler.schedule().admitted) == 2


@pytest.mark.parametrize("num_running", [1, 8, 64])
def test_sequences_wait_until_that_costs_as_much_as_a_prefill(num_running):
    """One comes in each step, as turns of episodes do; a prefill costs each that runs a token."""
    scheduler = scheduler_of(
        num_blocks=2000, max_num_seqs=128, budget=500, prefills_stop_decodes=True
    )
    for arrival in range(num_running):
        scheduler.add(sequence_of(2, arrival=arrival))
    assert len(scheduler.schedule().admitted) == num_running
    num_lost = num_waiting = 0
    for arrival in range(num_running, num_running + 40):
        scheduler.add(sequence_of(2, arrival=arrival))
        num_waiting += 1
        num_lost += num_waiting
        admitted = scheduler.schedule().admitted
        assert len(admitted) == (num_waiting if num_lost >= num_running else 0)
        if admitted:
            scheduler.remove(admitted)
            num_lost = num_waiting = 0


def test_a_sequence_joins_a_prefill_that_holds_up_the_others_anyway():
    scheduler = scheduler_of(
        num_blocks=500, max_num_seqs=128, budget=100, prefills_stop_decodes=True
    )
    for arrival in range(64):
        scheduler.add(sequence_of(1, arrival=arrival))
    scheduler.schedule()
    for arrival in range(64, 64 + 32):
        scheduler.add(sequence_of(50, arrival=arrival, first_token=1000 * arrival))
    while not (plan := scheduler.schedule()).admitted:
        pass
    assert not plan.chunks[-1].samples, "the budget ends within it"
    num_running = len(scheduler.running)
    assert len(scheduler.schedule().admitted) > 0
    assert len(scheduler.running) > num_running


def test_priority_then_arrival():
    scheduler = scheduler_of(max_num_seqs=2)
    for arrival, priority in enumerate((1, 0, 1, 0)):
        scheduler.add(sequence_of(3, arrival=arrival, priority=priority))
    assert [s.arrival for s in scheduler.schedule().admitted] == [1, 3]


def test_the_last_served_is_preempted_and_keeps_its_tokens():
    scheduler = scheduler_of(num_blocks=5)
    first = sequence_of(8, arrival=0, priority=1, first_token=100)
    second = sequence_of(7, arrival=1, priority=0)
    scheduler.add(second)
    finish_step(scheduler.schedule())  # two blocks, one token of room
    scheduler.add(first)
    finish_step(scheduler.schedule())  # two more blocks, full
    plan = scheduler.schedule()  # both need a block now, one is left
    assert plan.decodes == [second]
    assert scheduler.num_preemptions == 1
    assert scheduler.num_waiting == 1
    assert first.token_ids[-1] == 7
    assert first.logprobs == [-1.0]
    assert first.num_computed == 0
