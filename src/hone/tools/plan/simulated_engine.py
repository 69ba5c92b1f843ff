"""A simulated engine: event-driven continuous batching.

A decode step of B sequences that read K keys takes

    t(B, K) = max(weights_s - experts_s * u + uneven_s * sqrt(u (1 - u)), B * seq_s)
              + B * (state_s + sent_s) + K * key_s + overhead_s,    u = unused_share**B

where the second term is what no sequence passes of a layer's experts, and the third what the rank
reads more that has most of the others, where ranks share them. Keys of a prompt that members of a
group read together are taken off K, by the engine's own rule (`engine/shared_prefix.py`), at the
share that is gained. Until a sequence ends B stays and K grows by B a step, so that n steps are one
sum. Samples are admitted in their order at step boundaries; their prompts are computed there, which
yields the first token of each and keeps the others waiting.

Every event makes a token, however little time it takes, so that every run ends.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, fields
from itertools import count
from operator import itemgetter

from hone.engine.settings import BLOCK_SIZE, MIN_SAVED, SHARED_PREFIX_MEMBERS

__all__ = ["EngineRates", "SimulatedEngine", "SimulatedSample"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineRates:
    """Seconds that an engine takes for each kind of work."""

    weights_s: float
    """Reading the weights once, in a decode step."""
    experts_s: float = 0.0
    """The part of `weights_s` for reading all experts."""
    unused_share: float = 0.0
    """Share of the experts that one sequence does not pass."""
    uneven_s: float = 0.0
    """`experts_s`, times what the fullest rank's share of the experts that are passed is expected
    to be above the mean, in standard deviations of one expert that is passed or not."""
    seq_s: float = 0.0
    """Matrix products of one sequence in a decode step."""
    state_s: float = 0.0
    """Reading and writing the recurrent states of one sequence in a decode step."""
    sent_s: float = 0.0
    """What the devices of an engine send each other for one sequence in a decode step."""
    key_s: float = 0.0
    """Reading the keys and values of one token."""
    gained_share: float = 0.0
    """The part of `key_s` that is saved for a key that another member of the group has read; 0:
    every sequence reads its own keys."""
    overhead_s: float = 0.0
    """Fixed time of a decode step, for any batch."""
    prefill_token_s: float = 0.0
    """Matrix products of one token of a prompt."""
    prefill_key_s: float = 0.0
    """Attention of one token of a prompt to one before it."""
    prefill_seq_s: float = 0.0
    """The first token's logits."""

    def __post_init__(self) -> None:
        """Raises ValueError for rates with which time could go backwards."""
        for rate in fields(self):
            value, is_time = getattr(self, rate.name), rate.name in _SECONDS
            if not 0 <= value < math.inf or (value > 1 and not is_time):
                allowed = "a finite time" if is_time else "from 0 to 1"
                raise ValueError(f"{rate.name} must be {allowed}, is {value}")
        if self.experts_s > self.weights_s:
            raise ValueError(f"experts are weights: {self.experts_s=}, {self.weights_s=}")


_SECONDS = tuple(rate.name for rate in fields(EngineRates) if rate.name.endswith("_s"))
"""Rates that are times; the others are shares."""


@dataclass(slots=True, eq=False)
class _Family:
    """Running samples that share the blocks of their group's prompt."""

    num_block_tokens: int
    """Tokens in these blocks; a sample always computes the last prompt token itself."""
    size: int = 0
    """Number of its running samples."""


@dataclass(slots=True, eq=False)
class SimulatedSample:
    """A completion that will have `length` tokens."""

    group: int
    """Number of its group: members share a prompt."""
    length: int
    num_prompt_tokens: int
    most_tokens: int
    """Length at which it would be truncated, the only length known before it ends."""
    done: int = 0
    """Number of tokens it had when it last entered or left the running batch."""
    family: _Family | None = None
    """The family with which it shares the blocks of its prompt; None: the blocks are its own."""
    ended_s: float = math.inf

    @property
    def outstanding_tokens(self) -> int:
        """Tokens that it may still take, prompt included."""
        return self.num_prompt_tokens + self.most_tokens - self.done


@dataclass(slots=True)
class SimulatedEngine:
    """Devices that hold one copy of the weights, and the samples dealt to them."""

    rates: EngineRates
    max_num_seqs: int
    max_num_keys: int
    """Tokens whose keys and values fit the cache. One whole sample must fit."""
    shares_prompts: bool = True
    """Whether a group's prompt is computed only once for each version of the weights."""
    time_s: float = 0.0
    """Time of the current step boundary; for an idle engine it may lie in the past."""
    outstanding_tokens: int = 0
    """Outstanding tokens of all its samples, by which groups are assigned."""
    num_tokens: int = 0
    """Sampled so far."""
    num_preemptions: int = 0
    busy: list[tuple[float, float]] = field(default_factory=list[tuple[float, float]])
    """Intervals of work, in order, none touching the next."""
    _waiting: deque[SimulatedSample] = field(default_factory=deque[SimulatedSample])
    _running: list[tuple[int, int, SimulatedSample]] = field(
        default_factory=list[tuple[int, int, SimulatedSample]]
    )
    """A heap of (step at which it ends, running number, sample)."""
    _ended: list[SimulatedSample] = field(default_factory=list[SimulatedSample])
    _prompts: dict[int, _Family] = field(default_factory=dict[int, _Family])
    """Groups whose prompt is cached, and the family of those that read it."""
    _step: int = 0
    _num_keys: int = 0
    """Tokens of all running samples."""
    _num_again: int = 0
    """Keys that members of a family need not read again."""
    _num_spared: float = 0.0
    """Number of keys that a step does not read where the engine reads shared keys once."""
    _is_new: bool = False
    """Whether the batch has changed since that decision."""
    _fixed_s: dict[int, float] = field(default_factory=dict[int, float])
    """Step time without keys, by batch size."""
    _to_event: tuple[int, float] | None = None
    """Decode steps until the next event, and their time; None once the batch has changed."""
    _order: Iterator[int] = field(default_factory=count)

    @property
    def has_unfinished(self) -> bool:
        return bool(self._running or self._waiting)

    @property
    def num_uncounted_tokens(self) -> int:
        """Tokens that running samples have beyond their `done`."""
        left = sum(end - self._step for end, *_ in self._running)
        return sum(sample.length - sample.done for *_, sample in self._running) - left

    def submit(self, samples: Iterable[SimulatedSample], now_s: float) -> None:
        """Queue samples for the first step boundary at or after `now_s`. Raises ValueError for a
        sample that does not fit the cache."""
        self.settle(now_s)
        waiting, most = self._waiting, self.max_num_keys
        for sample in samples:
            if (num_tokens := sample.num_prompt_tokens + sample.length) >= most:
                raise ValueError(f"{num_tokens} tokens do not fit a cache: {self.max_num_keys=}")
            waiting.append(sample)
            self.outstanding_tokens += sample.outstanding_tokens
        self._admit()

    def next_event_s(self) -> float:
        """Time of the next change of the running batch; inf where nothing runs."""
        if not self._running:
            return math.inf
        return self.time_s + (self._to_event or self._steps_to_event())[1]

    def advance(self) -> None:
        """Work up to the next event, also where that takes no time."""
        if self._running:
            self._make(*(self._to_event or self._steps_to_event()))

    def settle(self, now_s: float) -> None:
        """Work up to the first step boundary at or after `now_s`."""
        while self._running and self.time_s < now_s:
            num_steps, seconds = self._steps_to_event()
            if self.time_s + seconds > now_s:
                num_steps = self._steps_until(now_s, num_steps)
                seconds = self._steps_s(num_steps)
            self._make(num_steps, seconds)
        self.time_s = max(self.time_s, now_s)

    def take_ended(self) -> list[SimulatedSample]:
        """Samples that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def hold(self, until_s: float) -> None:
        """Pause until `until_s`; keys and values stay, but prompts are computed again for later
        samples."""
        self.time_s = until_s
        self._prompts.clear()

    def abort(self) -> list[SimulatedSample]:
        """Remove and return the unfinished samples with their tokens, in the order of
        submission."""
        running = sorted(self._running, key=lambda entry: entry[1])
        for entry in running:
            self._stop(entry)
        samples = [*(sample for *_, sample in running), *self._waiting]
        self._running.clear()
        self._waiting.clear()
        self.outstanding_tokens -= sum(sample.outstanding_tokens for sample in samples)
        return samples

    def _steps_s(self, num_steps: int) -> float:
        """Time of the next `num_steps` decode steps of the running batch."""
        size = len(self._running)
        if (fixed_s := self._fixed_s.get(size)) is None:
            fixed_s = self._fixed_s[size] = self._step_s(size)
        keys = num_steps * (self._num_keys - self._num_spared)
        keys += size * (num_steps * (num_steps - 1) // 2)
        return num_steps * fixed_s + keys * self.rates.key_s

    def _step_s(self, size: int) -> float:
        """The part of a step's time that does not depend on keys, for a batch of `size`."""
        rates = self.rates
        unused = rates.unused_share**size
        weights_s = rates.weights_s - rates.experts_s * unused
        weights_s += rates.uneven_s * math.sqrt(unused * (1 - unused))
        of_batch = size * (rates.state_s + rates.sent_s)
        return max(weights_s, size * rates.seq_s) + of_batch + rates.overhead_s

    def _steps_to_event(self) -> tuple[int, float]:
        """Decode steps until a sample ends or the cache is full, at least 1, and their time."""
        if self._to_event is None:
            num_steps = self._running[0][0] - self._step
            until_full = (self.max_num_keys - self._num_keys) // len(self._running)
            if until_full < num_steps:
                num_steps = max(until_full, 1)
            self._to_event = num_steps, self._steps_s(num_steps)
        return self._to_event

    def _steps_until(self, now_s: float, most: int) -> int:
        """The smallest number of decode steps that reaches `now_s`, a time ahead; `most` steps
        do."""
        linear = self._steps_s(1)
        growth = len(self._running) * self.rates.key_s
        left = now_s - self.time_s
        # linear * n + growth * n * (n - 1) / 2 = left, solved without a difference of like terms.
        b = linear - growth / 2
        guess = 2 * left / (b + math.sqrt(b * b + 2 * growth * left))
        num_steps = min(max(math.ceil(guess) - 1, 1), most)
        while num_steps < most and self.time_s + self._steps_s(num_steps) < now_s:
            num_steps += 1
        return num_steps

    def _make(self, num_steps: int, seconds: float) -> None:
        """Make decode steps, at most up to the next event, which take so many seconds."""
        running, num_tokens = self._running, num_steps * len(self._running)
        most = self.max_num_keys - len(running)
        self._to_event = None
        self._work(seconds)
        step = self._step = self._step + num_steps
        self._num_keys += num_tokens
        self.num_tokens += num_tokens
        while running and running[0][0] == step:
            _, _, sample = heapq.heappop(running)
            self._count(sample, -1)
            self._num_keys -= sample.num_prompt_tokens + sample.length
            self._end(sample)
        if self._num_keys > most:
            self._preempt()
        if self._waiting:
            self._admit()
        elif self._is_new:
            self._decide()

    def _preempt(self) -> None:
        """Preempt the latest samples until the others have room for a step."""
        running = sorted(self._running, key=itemgetter(1))
        while self._num_keys + len(running) > self.max_num_keys:
            latest = running.pop()
            self._stop(latest)
            self._waiting.appendleft(latest[2])
            self.num_preemptions += 1
        heapq.heapify(running)
        self._running = running

    def _admit(self) -> None:
        """Start waiting samples as long as there is room, and compute their prompts."""
        rates, waiting, running, seconds = self.rates, self._waiting, self._running, 0.0
        ended: list[SimulatedSample] = []
        while waiting and len(running) < self.max_num_seqs:
            sample = waiting[0]
            num_prompt_tokens, done = sample.num_prompt_tokens, sample.done
            context = num_prompt_tokens + done
            if self._num_keys + context + 1 + len(running) + 1 > self.max_num_keys:
                break
            waiting.popleft()
            family = sample.family = self._prompts.get(sample.group)
            known = 0 if family is None else num_prompt_tokens
            if context == known:
                seconds += rates.prefill_seq_s
            else:
                seconds += rates.prefill_seq_s + (context - known) * rates.prefill_token_s
                seconds += (context**2 - known**2) / 2 * rates.prefill_key_s
            if family is None and self.shares_prompts:
                block_tokens = max(num_prompt_tokens - 1, 0) // BLOCK_SIZE * BLOCK_SIZE
                sample.family = self._prompts[sample.group] = _Family(block_tokens)
            self.num_tokens += 1
            if done + 1 == sample.length:
                ended.append(sample)
                continue
            self._count(sample, 1)
            self._num_keys += context + 1
            end = self._step + sample.length - done - 1
            heapq.heappush(running, (end, next(self._order), sample))
        if seconds:
            self._work(seconds)
        for sample in ended:
            self._end(sample)
        if self._is_new:
            self._decide()

    def _count(self, sample: SimulatedSample, change: int) -> None:
        """Update the counters for a sample that enters or leaves the running batch."""
        self._is_new, self._to_event = True, None
        if (family := sample.family) is None:
            return
        before = family.size
        after = family.size = before + change
        # Of the members that read together, only the first reads the shared keys.
        if (before if change > 0 else after) % SHARED_PREFIX_MEMBERS:
            self._num_again += change * family.num_block_tokens

    def _decide(self) -> None:
        """Decide whether this batch reads shared keys once; valid until the batch changes."""
        pays = self._num_again >= MIN_SAVED * self._num_keys
        self._num_spared = self._num_again * self.rates.gained_share if pays else 0.0
        self._is_new = False

    def _work(self, seconds: float) -> None:
        start = self.time_s
        self.time_s += seconds
        if self.time_s == start:  # nothing, or less than a time as late as this one can show
            return
        if self.busy and self.busy[-1][1] == start:
            start = self.busy.pop()[0]
        self.busy.append((start, self.time_s))

    def _end(self, sample: SimulatedSample) -> None:
        self.outstanding_tokens -= sample.outstanding_tokens
        sample.done, sample.ended_s = sample.length, self.time_s
        self._ended.append(sample)

    def _stop(self, entry: tuple[int, int, SimulatedSample]) -> None:
        """Record the progress of a running sample, and free its keys."""
        end, _, sample = entry
        self._count(sample, -1)
        done = sample.length - (end - self._step)
        self.outstanding_tokens -= done - sample.done
        self._num_keys -= sample.num_prompt_tokens + done
        sample.done = done
