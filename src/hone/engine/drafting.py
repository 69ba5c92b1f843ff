"""Speculation for the sequences of an engine: when to draft, what, and learning from what came."""

from __future__ import annotations

from collections.abc import Sequence as Seq

import numpy as np
from numpy.typing import NDArray

from hone.engine.model_runner import Sampled
from hone.engine.sequence import Sequence
from hone.engine.speculation import DraftIndex, SpeculationController, SpeculationCounters

__all__ = ["Drafting"]


class Drafting:
    """Feeds a `DraftIndex` with what sequences sample, and asks it for drafts where that pays."""

    def __init__(self, num_slots: int, *, block_size: int) -> None:
        self._index = DraftIndex(num_slots)
        self._controller = SpeculationController()
        self._block_size = block_size

    @property
    def counters(self) -> SpeculationCounters:
        """What speculation did so far."""
        return self._controller.counters

    def length(self, sequences: Seq[Sequence]) -> int:
        """Tokens to draft in the next step, if `sequences` run; 0 for a plain one."""
        num_decoding = sum(sequence.is_decoding for sequence in sequences)
        return self._controller.draft_length(num_decoding) if num_decoding else 0

    def propose(self, sequences: Seq[Sequence], length: int) -> NDArray[np.int64]:
        """Drafts [B, K] for planned sequences, -1 after the last: not past a sequence's blocks or
        the tokens that it may still sample."""
        slots = np.array([sequence.slot for sequence in sequences])
        drafts_BK = self._index.propose(slots, length)
        room = [
            min(len(seq.block_table) * self._block_size - seq.num_tokens + 1, seq.num_left)
            for seq in sequences
        ]
        drafts_BK[np.arange(length) >= np.array(room)[:, None]] = -1
        return drafts_BK

    def start(self, admitted: Seq[Sequence]) -> None:
        """Sequences have got slots."""
        for sequence in admitted:
            prompt_ids = sequence.request.prompt_ids
            completion_ids = sequence.token_ids[len(prompt_ids) :]
            self._index.start(sequence.slot, prompt_ids, completion_ids)

    def learn(self) -> None:
        """Take in what came since; to be called while the device computes."""
        self._index.learn()

    def extend(self, sampled: Seq[Sampled]) -> None:
        """Running sequences have sampled; to be called before any of them is removed."""
        alive = [one for one in sampled if one.sequence.slot >= 0]
        if not alive:
            return
        counts_B = np.array([len(one.token_ids) for one in alive])
        tokens_BQ = np.zeros((len(alive), counts_B.max()), np.int64)
        for row, one in enumerate(alive):
            tokens_BQ[row, : len(one.token_ids)] = one.token_ids
        self._index.extend(np.array([one.sequence.slot for one in alive]), tokens_BQ, counts_B)

    def record(
        self, drafts_BK: NDArray[np.int64] | None, sampled: Seq[Sampled], seconds: float
    ) -> None:
        """A step of sequences that only decoded took `seconds`."""
        if drafts_BK is None:
            self._controller.record_plain(len(sampled), seconds)
        else:
            accepted_B = np.array([len(one.token_ids) - 1 for one in sampled])
            self._controller.record_verify(drafts_BK, accepted_B, seconds)
