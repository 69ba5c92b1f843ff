"""Drafts against a table of dictionaries and a brute-force search; the controller on simulated
machines whose best choice is known."""

import hashlib
import random
from collections import Counter, defaultdict

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.engine import speculation
from hone.engine.speculation import (
    CONTEXT_SIZES,
    DRAFT_LENGTHS,
    ContinuationTable,
    DraftIndex,
    SpeculationController,
    accept,
)

NUM_SLOTS = 4
MAX_VOTES = 8
PAD = (None,) * max(CONTEXT_SIZES)

# --- accept --------------------------------------------------------------------------------------


def slow_accept(drafts, sampled):
    accepted = 0
    for draft, token in zip(drafts, sampled, strict=False):
        if draft != token:
            break
        accepted += 1
    return accepted


@given(
    st.integers(1, 5).flatmap(
        lambda k: st.lists(
            st.tuples(
                st.lists(st.integers(-1, 2), min_size=k, max_size=k),
                st.lists(st.integers(0, 2), min_size=k + 1, max_size=k + 1),
            ),
            min_size=1,
            max_size=6,
        )
    )
)
def test_accept_stops_at_the_first_difference(rows):
    drafts, sampled = (np.array(part) for part in zip(*rows, strict=True))
    assert accept(drafts, sampled).tolist() == [slow_accept(*row) for row in rows]


def test_accept_names_the_shape_it_needs():
    with pytest.raises(ValueError, match=r"need sampled tokens of shape \(2, 4\), got \(2, 3\)"):
        accept(np.zeros((2, 3), np.int64), np.zeros((2, 3), np.int64))


# --- the index -----------------------------------------------------------------------------------


class SlowIndex:
    """The same counters in a dictionary of tuples, one token at a time, without hashes or slots."""

    def __init__(self):
        self.counters = {}  # (prompt, context) -> (token, votes)
        self.texts = {}  # slot -> prompt, text
        self.waiting = []
        self.prompts = []  # most recently started last

    def start(self, slot, prompt, completion):
        self.texts[slot] = prompt, [*PAD, *prompt, *completion]
        if prompt not in self.prompts[-NUM_SLOTS:]:
            padded = [*PAD, *prompt]
            self.waiting += [
                (prompt, padded[:end], padded[end]) for end in range(len(PAD), len(padded))
            ]
        self.prompts = [other for other in self.prompts if other != prompt] + [prompt]

    def extend(self, slot, tokens):
        prompt, text = self.texts[slot]
        for token in tokens:
            self.waiting.append((prompt, list(text), token))
            text.append(token)

    def learn(self):
        followers = defaultdict(Counter)
        for prompt, text, token in self.waiting:
            for size in CONTEXT_SIZES:
                followers[prompt, tuple(text[-size:])][token] += 1
        self.waiting = []
        for key, counts in followers.items():
            ranked = sorted(((count, token) for token, count in counts.items()), reverse=True)
            token, votes = ranked[0][1], ranked[0][0]
            votes -= ranked[1][0] if len(ranked) > 1 else 0
            old_token, old_votes = self.counters.get(key, (token, 0))
            if old_token == token:
                votes += old_votes
            elif old_votes > votes:
                token, votes = old_token, old_votes - votes
            else:
                votes -= old_votes
            self.counters[key] = token, min(votes, MAX_VOTES)

    def propose(self, slot, k):
        prompt, text = self.texts[slot]
        text = list(text)
        drafts = []
        for _ in range(k):
            known = [(prompt, tuple(text[-size:])) for size in CONTEXT_SIZES]
            known = [key for key in known if key in self.counters]
            if not known:
                break
            drafts.append(self.counters[known[0]][0])
            text.append(drafts[-1])
        return drafts + [-1] * (k - len(drafts))


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 4))
def test_drafts_are_those_of_the_slow_index(seed, vocab_size):
    draw = random.Random(seed)

    def words(low, high):
        return [draw.randrange(vocab_size) for _ in range(draw.randint(low, high))]

    prompts = [tuple(words(1, 12)) for _ in range(NUM_SLOTS + 2)]
    index, slow = DraftIndex(NUM_SLOTS, num_entries=1 << 14), SlowIndex()
    running = []
    for _ in range(draw.randint(1, 25)):
        event = draw.random()
        if event < 0.3 or not running:
            slot, prompt, completion = draw.randrange(NUM_SLOTS), draw.choice(prompts), words(0, 3)
            index.start(slot, prompt, completion)
            slow.start(slot, prompt, completion)
            running = sorted({*running, slot})
        elif event < 0.4:
            index.learn()
            slow.learn()
        elif event < 0.8:
            slots = draw.sample(running, draw.randint(1, len(running)))
            width = draw.randint(1, 8)
            counts = [draw.randint(0, width) for _ in slots]
            tokens = np.array([[draw.randrange(vocab_size) for _ in range(width)] for _ in slots])
            slow.learn()
            index.extend(np.array(slots), tokens, np.array(counts))
            for slot, row, size in zip(slots, tokens.tolist(), counts, strict=True):
                slow.extend(slot, row[:size])
        k = draw.randint(1, 7)
        drafts = index.propose(np.array(running), k)
        assert drafts.tolist() == [slow.propose(slot, k) for slot in running]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 4))
def test_first_draft_is_what_mostly_follows_the_longest_match(seed, vocab_size):
    """Search of all texts of the prompt for the longest context that occurs in one of them."""
    draw = random.Random(seed)
    index = DraftIndex(NUM_SLOTS, num_entries=1 << 14)
    prompts = [tuple(draw.choices(range(vocab_size), k=5)) for _ in range(2)]
    seen = {prompt: [(*PAD, *prompt)] for prompt in prompts}  # texts whose ends were sampled
    for _ in range(8):
        prompt = draw.choice(prompts)
        index.start(0, prompt)
        text = [*PAD, *prompt]
        for _ in range(draw.randint(1, 10)):
            index.learn()
            [[draft]] = index.propose(np.array([0]), 1).tolist()
            followers = Counter()
            for size in CONTEXT_SIZES:
                if followers := _followers(seen[prompt], [*text], size, len(PAD) + len(prompt)):
                    break
            assert (draft in followers) or (draft == -1 and not followers), (draft, followers)
            if followers:
                token, count = followers.most_common(1)[0]
                if 2 * count > followers.total() and followers.total() <= MAX_VOTES:
                    assert draft == token
            text.append(draw.randrange(vocab_size))
            index.extend(np.array([0]), np.array([text[-1:]]), np.array([1]))
            if len(text) > len(PAD) + len(prompt) + 1:
                seen[prompt].pop()  # the same text, one token shorter
            seen[prompt].append(tuple(text))


def _followers(texts, text, size, prompt_end):
    """What followed the last `size` tokens; the prompt, which all texts begin with, counts once."""
    followers = Counter()
    for number, other in enumerate(texts):
        for end in range(len(PAD) if number == 0 else prompt_end, len(other)):
            if list(other[end - size : end]) == text[-size:]:
                followers[other[end]] += 1
    return followers


def test_siblings_and_later_epochs_draft_from_each_other_and_other_prompts_do_not():
    index = DraftIndex(3)
    story = list(range(10, 40))
    index.start(0, (1, 2, 3))
    index.extend(np.array([0]), np.array([story]), np.array([len(story)]))
    index.learn()
    index.start(0, (7, 8, 9))  # the first sequence ended
    index.start(1, (1, 2, 3))
    index.start(2, (1, 2, 4))
    expected = [[-1] * 7, story[:7], [-1] * 7]
    index.learn()
    slots = np.arange(3)
    assert index.propose(slots, 7)[1:].tolist() == expected[1:]
    index.extend(slots, np.array([[99, 98], story[:2], story[:2]]), np.array([0, 2, 2]))
    assert index.propose(slots, 7)[1].tolist() == story[2:9]
    assert index.propose(slots, 7)[2].tolist() == [-1] * 7


def test_a_resumed_sequence_goes_on_in_the_middle():
    index = DraftIndex(2)
    story = list(range(10, 40))
    index.start(0, (1, 2))
    index.extend(np.array([0]), np.array([story]), np.array([len(story)]))
    index.start(1, (1, 2), story[:20])
    index.learn()
    assert index.propose(np.array([1]), 3).tolist() == [story[20:23]]


def test_the_majority_of_siblings_is_drafted_and_new_habits_replace_old_ones():
    index = DraftIndex(8)
    slots = np.arange(8)
    for slot in slots:
        index.start(int(slot), (1, 2))
    firsts = np.array([5, 6, 5, 7, 5, 6, 5, 5])[:, None]
    index.extend(slots, firsts, np.ones(8, np.int64))
    index.start(0, (1, 2))
    index.learn()
    assert index.propose(slots[:1], 1).tolist() == [[5]]
    for _ in range(50):  # fills the votes
        index.start(0, (1, 2))
        index.extend(slots[:1], np.array([[5]]), np.ones(1, np.int64))
    for _ in range(MAX_VOTES + 1):
        index.start(0, (1, 2))
        index.extend(slots[:1], np.array([[6]]), np.ones(1, np.int64))
    index.learn()
    index.start(0, (1, 2))
    assert index.propose(slots[:1], 1).tolist() == [[6]]


def test_memory_is_bounded_and_the_newest_stays():
    table = ContinuationTable(4096)
    bytes_at_first = table._entries_RW.nbytes
    assert bytes_at_first == 4096 * 16
    keys = np.random.default_rng(0).integers(0, 1 << 64, 40_000, np.uint64)
    for some in np.split(keys, 400):
        table.learn(some, np.arange(100))
    found, tokens = table.lookup(keys[-500:])
    assert found.mean() > 0.99
    assert (tokens == np.tile(np.arange(100), 5))[found].all()
    assert table.lookup(keys[:20_000])[0].mean() < 0.01
    assert table._entries_RW.nbytes == bytes_at_first

    index = DraftIndex(NUM_SLOTS, num_entries=64)
    for number in range(100):
        index.start(number % NUM_SLOTS, (number, 1, 2))
        index.extend(np.array([0]), np.arange(30)[None], np.array([30]))
    assert len(index._started) <= NUM_SLOTS
    assert len(index._unlearned) <= 2


def test_more_new_contexts_than_a_row_holds_at_once():
    table = ContinuationTable(8)
    table.learn(np.random.default_rng(0).integers(0, 1 << 64, 100, np.uint64), np.arange(100))
    assert table._entries_RW["tag"].all()


@pytest.mark.parametrize("k", DRAFT_LENGTHS)
def test_drafts_never_change_what_is_sampled(k, monkeypatch):
    """A sampler whose token follows from seed and all tokens before; with drafts good and bad."""

    def sampled(seed, text):
        digest = hashlib.blake2b(repr((seed, text[-3:])).encode(), digest_size=2).digest()
        return digest[0] % 4

    def generate(k, *, mislead=False):
        index = DraftIndex(2, num_entries=1 << 12)
        slots, texts = np.arange(2), {}
        num_steps = 0
        for epoch in range(3):
            for slot in range(2):
                index.start(slot, (1, 2, 3))
                texts[epoch, slot] = [1, 2, 3]
            while any(len(texts[epoch, slot]) < 60 for slot in range(2)):
                num_steps += 1
                drafts = index.propose(slots, k) if k else np.empty((2, 0), np.int64)
                if mislead:
                    drafts[:] = 3
                index.learn()
                rows = [
                    [
                        sampled(slot, texts[epoch, slot] + row[:position])
                        for position in range(k + 1)
                    ]
                    for slot, row in enumerate(drafts.tolist())
                ]
                counts = accept(drafts, np.array(rows)) + 1
                for slot in range(2):
                    texts[epoch, slot] += rows[slot][: counts[slot]]
                index.extend(slots, np.array(rows), counts)
        return {key: text[:60] for key, text in texts.items()}, num_steps

    plain, num_plain_steps = generate(0)
    drafted, num_steps = generate(k)
    assert drafted == plain
    assert num_steps < 0.9 * num_plain_steps
    assert generate(k, mislead=True)[0] == plain

    def accept_all(drafts, sampled):  # a planted bug: drafts are believed
        return np.full(len(drafts), drafts.shape[1])

    monkeypatch.setitem(globals(), "accept", accept_all)
    assert generate(k)[0] != plain


# --- the controller ------------------------------------------------------------------------------


class Machine:
    """Steps whose time and acceptance are known, driven by a controller."""

    def __init__(self, *, cost, acceptance, noise=0.03, seed=0):
        self.controller = SpeculationController()
        self.cost = cost  # (batch size, k) -> seconds
        self.acceptance = acceptance
        self.noise = noise
        self.random = np.random.default_rng(seed)

    def rate(self, batch_size, k):
        """Expected tokens a sequence and second."""
        tokens = sum(self.acceptance**depth for depth in range(k + 1))
        return tokens / self.cost(batch_size, k)

    def best(self, batch_size):
        return max((0, *DRAFT_LENGTHS), key=lambda k: self.rate(batch_size, k))

    def run(self, num_steps, batch_size):
        """Share of the time lost against the best choice, and the lengths that ran."""
        lengths, seconds, tokens = [], 0.0, 0.0
        for _ in range(num_steps):
            k = self.controller.draft_length(batch_size)
            lengths.append(k)
            took_s = self.cost(batch_size, k) * self.random.normal(1, self.noise)
            if k == 0:
                self.controller.record_plain(batch_size, took_s)
            else:
                holds = self.random.random((batch_size, k)) < self.acceptance
                accepted = np.logical_and.accumulate(holds, axis=1).sum(1)
                self.controller.record_verify(np.ones((batch_size, k), int), accepted, took_s)
            seconds += self.cost(batch_size, k)
            tokens += self.rate(batch_size, k) * self.cost(batch_size, k)
        ideal_s = tokens / self.rate(batch_size, self.best(batch_size))
        return 1 - ideal_s / seconds, lengths


def memory_bound(batch_size, k):
    return 1e-3 * (1 + 0.03 * k)


def compute_bound(batch_size, k):
    return 1e-2 * (1 + 0.7 * k)


def turning(batch_size, k):
    """Reading weights and cache, or multiplying, whichever takes longer."""
    return max(1e-3 + 5e-6 * batch_size, 2e-5 * batch_size * (k + 1))


@pytest.mark.parametrize("cost", [memory_bound, compute_bound, turning])
@pytest.mark.parametrize("batch_size", [1, 8, 64, 512])
def test_without_acceptance_it_is_off_and_loses_little(cost, batch_size):
    machine = Machine(cost=cost, acceptance=0.0)
    lost, lengths = machine.run(2000, batch_size)
    assert lost < 0.02
    for slower, share in ((1.02, 0.25), (1.2, 0.07)):
        if cost(batch_size, 1) > slower * cost(batch_size, 0):  # else trying is next to free
            assert np.count_nonzero(lengths[100:]) < share * len(lengths[100:])


@pytest.mark.parametrize("acceptance", [0.5, 0.8])
@pytest.mark.parametrize("cost", [memory_bound, compute_bound, turning])
@pytest.mark.parametrize("batch_size", [1, 8, 64, 512])
def test_it_finds_the_best_length(cost, batch_size, acceptance):
    machine = Machine(cost=cost, acceptance=acceptance)
    machine.run(300, batch_size)
    lost, lengths = machine.run(2000, batch_size)
    assert lost < 0.03, Counter(lengths)


@pytest.mark.parametrize("batch_size", [4, 64])
def test_it_recovers_after_changes_of_acceptance(batch_size):
    machine = Machine(cost=memory_bound, acceptance=0.0)
    machine.run(2000, batch_size)
    machine.acceptance = 0.8
    machine.run(200, batch_size)
    assert machine.run(500, batch_size)[0] < 0.03
    machine.acceptance = 0.0
    machine.run(200, batch_size)
    assert machine.run(2000, batch_size)[0] < 0.02


def test_a_shrinking_batch_turns_it_on_and_a_growing_one_off():
    machine = Machine(cost=turning, acceptance=0.6)
    assert machine.best(512) == 0
    assert machine.best(4) == 7
    assert machine.run(1000, 512)[0] < 0.03
    assert machine.run(300, 4)[0] < 0.1  # the first seconds of this batch size included
    assert machine.run(500, 4)[0] < 0.03
    assert machine.run(1000, 512)[0] < 0.02


def test_growing_contexts_and_a_stall_do_not_mislead_it():
    """All steps become slower together; that says nothing of drafts. Nor does one stall."""
    machine = Machine(cost=memory_bound, acceptance=0.5)
    machine.run(500, 32)
    for percent in range(100, 300):
        machine.cost = lambda batch, k, scale=percent / 100: memory_bound(batch, k) * scale
        assert machine.run(10, 32)[0] < 0.3
        if percent % 50 == 0:
            k = machine.controller.draft_length(32)
            machine.controller.record_verify(np.ones((32, k or 1), int), np.zeros(32, int), 2.0)
    machine.run(100, 32)
    assert machine.run(1000, 32)[0] < 0.03


def test_counters_and_bad_widths():
    controller = SpeculationController()
    controller.draft_length(2)
    controller.record_plain(2, 1e-3)
    drafts = np.array([[5, 6, -1], [-1, -1, -1]])
    controller.record_verify(drafts, np.array([1, 0]), 1e-3)
    counters = controller.counters
    assert (counters.num_plain_steps, counters.num_verify_steps) == (1, 1)
    assert (counters.num_drafted_tokens, counters.num_accepted_tokens) == (2, 1)
    with pytest.raises(ValueError, match=r"2 tokens a sequence, allowed are \(1, 3, 7\)"):
        controller.record_verify(drafts[:, :2], np.array([1, 0]), 1e-3)


def test_max_votes_of_the_slow_index_is_that_of_the_table():
    assert speculation.ContinuationTable._MAX_VOTES == MAX_VOTES
