"""Which sequences compute how many tokens in the next step."""

from __future__ import annotations

import heapq
from collections.abc import Collection
from dataclasses import dataclass, field

from hone.engine.block_manager import BlockManager
from hone.engine.sequence import Sequence

__all__ = ["Batch", "Scheduler"]


@dataclass(slots=True)
class Batch:
    """The work of one step: `num_tokens[i]` pending tokens of `sequences[i]`."""

    sequences: list[Sequence] = field(default_factory=list[Sequence])
    num_tokens: list[int] = field(default_factory=list[int])
    admitted: list[Sequence] = field(default_factory=list[Sequence])
    """Those of `sequences` that have just got a slot."""


class Scheduler:
    """Continuous batching: a step decodes all that can decode and prefills in what budget is left.

    Sequences are served by priority, then arrival. When blocks run out, the running sequence that
    would be served last gives up its blocks and waits to be recomputed, keeping all it sampled.
    """

    def __init__(
        self, blocks: BlockManager, *, max_num_seqs: int, max_num_batched_tokens: int
    ) -> None:
        self.blocks = blocks
        self.max_num_batched_tokens = max_num_batched_tokens
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_cached_tokens = 0
        self._waiting: list[tuple[tuple[int, int], Sequence]] = []  # heap
        # Every running sequence must be able to decode in every step.
        self._free_slots = list(range(min(max_num_seqs, max_num_batched_tokens)))
        heapq.heapify(self._free_slots)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def has_unfinished(self) -> bool:
        return bool(self.running or self._waiting)

    def add(self, sequence: Sequence) -> None:
        """Queue a sequence."""
        heapq.heappush(self._waiting, (sequence.order, sequence))

    def remove(self, sequences: Collection[Sequence]) -> None:
        """Forget finished or aborted sequences and take their blocks and slots back."""
        gone = set(sequences)
        for sequence in gone:
            if sequence.slot >= 0:
                self._vacate(sequence)
        self.running = [sequence for sequence in self.running if sequence not in gone]
        if any(sequence in gone for _, sequence in self._waiting):
            self._waiting = [entry for entry in self._waiting if entry[1] not in gone]
            heapq.heapify(self._waiting)

    def schedule(self) -> Batch:
        """Plan one step. Empty only when nothing is queued or running."""
        batch = Batch()
        num_preemptions = self.num_preemptions
        self._grow_running()
        budget = self._schedule_running(batch)
        # Blocks that were just taken back must not be handed out to the sequence that lost them.
        if num_preemptions == self.num_preemptions:
            self._admit(batch, budget)
        assert batch.sequences or not self.has_unfinished, f"{len(self._waiting)=}"
        return batch

    def preempt_all(self) -> None:
        """Back to waiting with everything that runs, after a step that failed half-way.

        Blocks that the step was to write are published already, so no prefix can be trusted.
        """
        for sequence in self.running.copy():
            self._preempt(sequence)
        self.blocks.invalidate_prefixes()

    def _grow_running(self) -> None:
        """Room for one token in every running sequence, by preempting the last served if need be.

        Done before anything is scheduled or published, so that no block can be taken away from a
        sequence that others in the same step read from.
        """
        for sequence in self.running.copy():
            while sequence.slot >= 0 and not self.blocks.grow(sequence):
                self._preempt(max(self.running, key=lambda running: running.order))

    def _schedule_running(self, batch: Batch) -> int:
        """Decodes first, then prefills under way. Returns the token budget that is left."""
        block_size = self.blocks.block_size
        prefilling: list[Sequence] = []
        for sequence in self.running:
            num_tokens = len(sequence.token_ids)
            if num_tokens - sequence.num_computed > 1:
                prefilling.append(sequence)
                continue
            batch.sequences.append(sequence)
            if num_tokens - sequence.num_published * block_size >= block_size:
                self.blocks.publish(sequence, num_tokens)
        batch.num_tokens = [1] * len(batch.sequences)
        budget = self.max_num_batched_tokens - len(batch.sequences)
        for sequence in sorted(prefilling, key=lambda prefill: prefill.order):
            budget -= self._schedule_prefill(batch, sequence, budget)
        return budget

    def _schedule_prefill(self, batch: Batch, sequence: Sequence, budget: int) -> int:
        """Add the next chunk of a prefill; returns its size."""
        size = min(len(sequence.token_ids) - sequence.num_computed, budget)
        if size:
            batch.sequences.append(sequence)
            batch.num_tokens.append(size)
            self.blocks.publish(sequence, sequence.num_computed + size)
        return size

    def _admit(self, batch: Batch, budget: int) -> None:
        """Start waiting sequences while slots, blocks and budget last.

        Each may reuse blocks that an earlier one writes in this very step. One block for every
        running sequence stays free, lest an admission cause a preemption right away.
        """
        while self._waiting and self._free_slots and budget:
            sequence = self._waiting[0][1]
            if not self.blocks.allocate(sequence, reserve=len(self.running)):
                return
            heapq.heappop(self._waiting)
            sequence.slot = heapq.heappop(self._free_slots)
            self.running.append(sequence)
            batch.admitted.append(sequence)
            if sequence.num_cached_tokens < 0:
                num_prompt = len(sequence.request.prompt_ids)
                sequence.num_cached_tokens = min(sequence.num_computed, num_prompt)
                self.num_prompt_tokens += num_prompt
                self.num_cached_tokens += sequence.num_cached_tokens
            budget -= self._schedule_prefill(batch, sequence, budget)

    def _preempt(self, sequence: Sequence) -> None:
        self._vacate(sequence)
        self.running.remove(sequence)
        self.add(sequence)
        self.num_preemptions += 1

    def _vacate(self, sequence: Sequence) -> None:
        self.blocks.release(sequence)
        heapq.heappush(self._free_slots, sequence.slot)
        sequence.slot = -1
