"""Scheduler: chooses the sequences and tokens of each step."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from hone.engine.block_manager import BlockManager
from hone.engine.sequence import Sequence
from hone.engine.snapshots import Snapshots
from hone.engine.step_limit import StepLimit
from hone.model_input import inside_of

__all__ = ["Chunk", "Plan", "Scheduler"]

_SLOTS_PER_ADMISSION = 32
"""A full engine admits again when one in this many of its slots is free. A prefill stops all others
for some milliseconds, so one for every sequence that ends would cost more than idle slots do."""


class Chunk(NamedTuple):
    """Pending tokens `start .. start + size` of a sequence."""

    sequence: Sequence
    start: int
    size: int
    samples: bool
    """Whether it ends with the sequence's last token, so that the next one is sampled."""
    source: int | None = None
    """Row of the recurrent state with which it begins, if the prefill of another sequence has left
    that state. None: it begins with its own state, or with zero at token 0."""
    snapshots: tuple[tuple[int, int], ...] = ()
    """Numbers of tokens after which the recurrent state is kept, in ascending order, each with the
    row that takes it."""


@dataclass(slots=True)
class Plan:
    """The work of one step: one token of each of `decodes`, then the chunks of prompts."""

    decodes: list[Sequence] = field(default_factory=list[Sequence])
    chunks: list[Chunk] = field(default_factory=list[Chunk])
    admitted: list[Sequence] = field(default_factory=list[Sequence])
    """Sequences among the chunks that have just got a slot."""

    def __bool__(self) -> bool:
        return bool(self.decodes or self.chunks)

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the step computes."""
        return len(self.decodes) + sum(chunk.size for chunk in self.chunks)


class Scheduler:
    """Continuous batching: a step decodes every sequence that can decode, and uses the remaining
    token budget for prefill.

    Sequences are served by priority, then arrival. When blocks run out, the running sequence that
    would be served last loses its blocks and waits to be recomputed; it keeps its sampled tokens.

    Planned work counts as done: `schedule` advances `num_computed` and `num_in_flight`, so that the
    next step can be planned while this one runs.
    """

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        prefills_stop_decodes: bool = False,
        keeps_contents_whole: bool = False,
        on_vacate: Callable[[Sequence], None] | None = None,
    ) -> None:
        """`prefills_stop_decodes`: a step with a prefill takes about as long as two without one,
        since only steps that decode alone are replayed as CUDA graphs. `keeps_contents_whole`: no
        chunk ends inside a content, whose tokens attend to each other in both directions.
        `on_vacate` is called before a sequence loses its blocks, except in `restart`."""
        self.blocks = blocks
        self._keeps_contents_whole = keeps_contents_whole
        self._on_vacate = on_vacate
        self.limit = StepLimit(max_num_batched_tokens)
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []  # heap
        # Every running sequence must be able to decode in every step.
        self._num_slots = min(max_num_seqs, max_num_batched_tokens)
        self._free_slots = list(range(self._num_slots))
        self._enough_slots = max(1, self._num_slots // _SLOTS_PER_ADMISSION)
        self._prefills_stop_decodes = prefills_stop_decodes
        self._num_lost = 0
        """Tokens that waiting sequences could have sampled in free slots since the last
        admission."""

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        if self._keeps_contents_whole:
            for content in sequence.request.model_input.contents:
                self.limit.require(content.num_tokens)
        heapq.heappush(self._waiting, (sequence.order, sequence))

    def remove(self, sequences: Collection[Sequence]) -> None:
        """Remove finished or aborted sequences and free their blocks and slots.

        Steps in flight may still write to these blocks; a new owner's writes come later.
        """
        # In a fixed order, unlike that of a set: with tensor parallelism all ranks must free blocks
        # in the same order.
        gone = dict.fromkeys(sequences)
        for sequence in gone:
            sequence.has_ended = True
            if sequence.slot >= 0:
                self._vacate(sequence)
        self.running = [sequence for sequence in self.running if sequence not in gone]
        if any(sequence in gone for _, sequence in self._waiting):
            self._waiting = [entry for entry in self._waiting if entry[1] not in gone]
            heapq.heapify(self._waiting)

    def schedule(self) -> Plan:
        """Plan one step; empty where no sequence has a token left to launch."""
        plan = Plan()
        if self.blocks.snapshots is not None:
            self.blocks.snapshots.next_step()
        num_preemptions = self.num_preemptions
        self._grow_running()
        budget = self._schedule_running(plan)
        # Blocks of a sequence preempted just now must not be given back to it.
        if num_preemptions == self.num_preemptions:
            self._admit(plan, budget)
        return plan

    def restart(self, sequences: Iterable[Sequence]) -> None:
        """Send all `sequences` of the engine back to waiting, and reset the scheduler and the block
        manager.

        A step may have failed at any point, even within `schedule`, after blocks were published
        that it has never written.
        """
        waiting = list(sequences)
        self.num_preemptions += len(self.running)
        self.blocks.clear()
        self.running = []
        self._free_slots = list(range(self._num_slots))
        for sequence in waiting:
            sequence.leave()
        self._waiting = [(sequence.order, sequence) for sequence in waiting]
        heapq.heapify(self._waiting)

    def restart_prefills(self) -> None:
        """Send sequences in prefill, which have keys and values of a part of their tokens, back to
        waiting.

        No step may be in flight.
        """
        partial = [sequence for sequence in self.running if not sequence.is_decoding]
        for sequence in partial:
            self._vacate(sequence)
            self.add(sequence)
        self.running = [sequence for sequence in self.running if sequence not in partial]

    def _grow_running(self) -> None:
        """Make room for one token in every running sequence; preempts the lowest in priority if
        necessary.

        Done before anything is scheduled or published, so that no block can be taken away from a
        sequence that others in the same step read from.
        """
        for sequence in self.running.copy():
            if sequence.num_left == 0:  # its last token is in flight and needs no block
                continue
            while sequence.slot >= 0 and not self.blocks.grow(sequence):
                self._preempt(max(self.running, key=lambda running: running.order))

    def _schedule_running(self, plan: Plan) -> int:
        """Schedule decodes, then unfinished prefills. Returns the remaining token budget."""
        block_size = self.blocks.block_size
        prefilling: list[Sequence] = []
        for sequence in self.running:
            if not sequence.is_decoding:
                prefilling.append(sequence)
            elif sequence.num_left > 0:
                # Only tokens that the host knows can be published, and these are computed.
                num_known = min(sequence.num_computed, len(sequence.token_ids))
                if num_known - sequence.num_published * block_size >= block_size:
                    self.blocks.publish(sequence, num_known)
                sequence.num_computed += 1
                sequence.num_in_flight += 1
                plan.decodes.append(sequence)
        budget = self.limit.now - len(plan.decodes)
        for sequence in sorted(prefilling, key=lambda prefill: prefill.order):
            size = self._chunk_size(sequence, budget)
            if not size:  # others would take what it lacks, in every step
                return 0
            self._schedule_prefill(plan, sequence, size)
            budget -= size
        return budget

    def _chunk_size(self, sequence: Sequence, budget: int) -> int:
        """Size of the next chunk of a prefill; 0 where the budget does not suffice."""
        start = sequence.num_computed
        size = min(len(sequence.token_ids) - start, budget)
        if self._keeps_contents_whole:
            content = inside_of(sequence.request.model_input, start + size)
            if content is not None:
                return max(content.start - start, 0)
        return size

    def _schedule_prefill(
        self, plan: Plan, sequence: Sequence, size: int, *, is_new: bool = False
    ) -> None:
        """Add the next chunk of a prefill."""
        start = sequence.num_computed
        samples = start + size == len(sequence.token_ids)
        source, snapshots = None, ()
        if self.blocks.snapshots is not None:
            if is_new and start:
                source = self.blocks.snapshots.use(sequence.chain)
            snapshots = tuple(self._snapshots(sequence, start + size, self.blocks.snapshots))
        plan.chunks.append(Chunk(sequence, start, size, samples, source, snapshots))
        sequence.num_computed += size
        sequence.num_in_flight += samples
        sequence.is_decoding = samples
        self.blocks.publish(sequence, sequence.num_computed)

    def _snapshots(
        self, sequence: Sequence, stop: int, snapshots: Snapshots
    ) -> Iterator[tuple[int, int]]:
        """Tokens up to `stop` behind which the state of a prefill is kept, each with its row: where
        a published prefix without a snapshot ended, since others may have it too, and the last
        block border that leaves a token to compute. Publishes the blocks in front of them."""
        if not self.blocks.enable_prefix_caching:
            return
        size = self.blocks.block_size
        last = (len(sequence.token_ids) - 1) // size * size
        for border in sorted({sequence.num_matched, last}):
            if not sequence.num_computed < border <= stop:
                continue
            self.blocks.publish(sequence, border)
            if sequence.chain in snapshots:
                continue
            row = snapshots.take(sequence.chain)
            if row is not None:
                yield border, row

    def _admit(self, plan: Plan, budget: int) -> None:
        """Start waiting sequences while slots, blocks and budget last.

        Each may reuse blocks that an earlier one writes in the same step. One block for every
        running sequence stays free, so that an admission does not cause a preemption immediately.
        """
        if self.running and not self._is_time_to_admit(plan):
            return
        self._num_lost = 0
        while self._waiting and self._free_slots and budget and len(self.running) < self.limit.now:
            sequence = self._waiting[0][1]
            if not self.blocks.allocate(sequence, reserve=len(self.running)):
                return
            size = self._chunk_size(sequence, budget)
            if not size:
                self.blocks.release(sequence)
                return
            heapq.heappop(self._waiting)
            sequence.slot = heapq.heappop(self._free_slots)
            self.running.append(sequence)
            plan.admitted.append(sequence)
            if sequence.num_cached_tokens < 0:
                num_prompt = len(sequence.request.prompt_ids)
                sequence.num_cached_tokens = min(sequence.num_computed, num_prompt)
                self.num_prompt_tokens += num_prompt
                self.num_cached_tokens += sequence.num_cached_tokens
            self._schedule_prefill(plan, sequence, size, is_new=True)
            budget -= size

    def _is_time_to_admit(self, plan: Plan) -> bool:
        """Whether others that run should be held up by the prefills of waiting sequences.

        Where a prefill holds all of them up for a step, it waits until waiting has cost as many
        tokens as that step would. With n running sequences of which r end in a step, an admission
        then takes sqrt(2 r n) sequences, which is where idle slots and held-up steps together cost
        least, and no order of arrivals makes it cost more than twice the least.
        """
        num_startable = min(len(self._waiting), len(self._free_slots))
        if not self._prefills_stop_decodes:
            return num_startable >= min(self._enough_slots, len(self._waiting))
        self._num_lost += num_startable
        return bool(plan.chunks) or self._num_lost >= len(self.running)

    def _preempt(self, sequence: Sequence) -> None:
        self._vacate(sequence)
        self.running.remove(sequence)
        self.add(sequence)
        self.num_preemptions += 1

    def _vacate(self, sequence: Sequence) -> None:
        if self._on_vacate is not None:
            self._on_vacate(sequence)
        self.blocks.release(sequence)
        heapq.heappush(self._free_slots, sequence.slot)
        sequence.slot = -1
        sequence.is_decoding = False
