"""Speculation without a draft model: what the group and earlier rollouts wrote is the draft.

The samples of a group share long stretches of text with each other and with the rollouts of the
same prompt in earlier epochs. `DraftIndex` remembers which token followed which context,
`SpeculationController` decides whether verifying drafts pays, and `accept` counts the drafted
tokens that hold. After Saxena (Prompt Lookup Decoding, 2023), SuffixDecoding (Oliaro et al., 2024)
and, for choosing the draft length by the measured gain, SmartSpec (Liu et al., 2024).

Nothing here can change a result. The engine samples position p of a request from its seed, p and
the logits whether or not a draft was there, so drafts that are stale, wrong or of older weights
cost time only.

    drafts = index.propose(slots, k)            # k = controller.draft_length(len(slots)) > 0
    launch(slots, drafts)                       # one forward over k + 1 tokens a sequence
    index.learn()                               # while the device works
    accepted = accept(drafts, sampled)          # accepted + 1 tokens of each row are new
    controller.record_verify(drafts, accepted, seconds)
    index.extend(slots, sampled, accepted + 1)

Letters: B sequences, K drafted tokens, Q tokens a row, L tokens of the longest context, N context
sizes, T tokens, M keys, R rows of the table and W ways in each.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

__all__ = [
    "CONTEXT_SIZES",
    "DRAFT_LENGTHS",
    "DraftIndex",
    "SpeculationController",
    "SpeculationCounters",
    "accept",
]

Ints = NDArray[np.int64]
Keys = NDArray[np.uint64]

CONTEXT_SIZES = (8, 3, 1)
"""Tokens before the predicted one that are looked up, longest first."""

DRAFT_LENGTHS = (1, 3, 7)
"""Drafts with which the verified rows fill 2, 4 or 8 queries of the attention kernel."""


def accept(drafts_BK: Ints, sampled_BQ: Ints) -> Ints:
    """How many drafted tokens of each row equal the sampled ones before the first that differs.

    `sampled_BQ`, Q = K + 1, holds the token sampled at each position with the drafts before it in
    the context, so the first `accepted + 1` tokens of a row are what plain steps would have
    sampled, and the rest is void. Drafts may end early with -1. Stops are left to the caller.
    """
    if sampled_BQ.shape != (len(drafts_BK), drafts_BK.shape[1] + 1):
        raise ValueError(
            f"drafts of shape {drafts_BK.shape} need sampled tokens of shape "
            f"{(len(drafts_BK), drafts_BK.shape[1] + 1)}, got {sampled_BQ.shape}"
        )
    same_BK = drafts_BK == sampled_BQ[:, :-1]
    return np.logical_and.accumulate(same_BK, axis=1).sum(1)


class ContinuationTable:
    """From the hash of a context to the token that follows it most often. Memory is fixed.

    An entry is one Misra-Gries counter: a token and its votes, which other tokens cancel, so that a
    token that follows more than half of the time is the one kept. Votes are capped, so that habits
    of the newest weights soon outvote old ones. Tokens that arrive together are counted before they
    vote (Agarwal et al., Mergeable Summaries, PODS 2012). Entries lie in rows of four, one cache
    line; a full row drops the entry that was not voted on for longest.
    """

    _WAYS = 4
    _MAX_VOTES = 8
    _ENTRY = np.dtype([("tag", "u4"), ("token", "u4"), ("votes", "u4"), ("learned", "u4")])

    def __init__(self, num_entries: int) -> None:
        """`num_entries`, 16 bytes each, are rounded up to a power of two."""
        self._row_bits = max(1, math.ceil(math.log2(num_entries / self._WAYS)))
        self._entries_RW = np.zeros((1 << self._row_bits, self._WAYS), self._ENTRY)
        self._clock = 0

    def lookup(self, keys_M: Keys) -> tuple[NDArray[np.bool_], Ints]:
        """Whether each key is known, and its token, which means nothing where it is not."""
        entries_MW = self._entries_RW.take(self._rows(keys_M), axis=0)
        hits_MW = entries_MW["tag"] == self._tags(keys_M)[:, None]
        at = np.arange(len(keys_M)), hits_MW.argmax(1)
        return hits_MW[at], entries_MW["token"][at].astype(np.int64)

    def learn(self, keys_M: Keys, tokens_M: Ints) -> None:
        """Count one more time that each token followed its context."""
        self._clock += 1
        keys_M, tokens_M, votes_M = _merge(keys_M, tokens_M)
        while len(keys_M):
            rows_M, tags_M = self._rows(keys_M), self._tags(keys_M)
            self._vote(rows_M, tags_M, tokens_M, votes_M)
            # New contexts of one row chose the same way; all but one of them go again.
            stored_MW = self._entries_RW.take(rows_M, axis=0)["tag"]
            lost_M = ~(stored_MW == tags_M[:, None]).any(1)
            if not lost_M.any():
                return
            keys_M, tokens_M, votes_M = keys_M[lost_M], tokens_M[lost_M], votes_M[lost_M]

    def _vote(
        self, rows_M: Ints, tags_M: NDArray[np.uint32], tokens_M: Ints, votes_M: Ints
    ) -> None:
        """Merge counters of different keys with those of the table."""
        entries_MW = self._entries_RW.take(rows_M, axis=0)
        hits_MW = entries_MW["tag"] == tags_M[:, None]
        found_M = hits_MW.any(1)
        ways_M = np.where(found_M, hits_MW.argmax(1), entries_MW["learned"].argmin(1))
        entries_M = entries_MW[np.arange(len(ways_M)), ways_M]
        old_tokens_M = entries_M["token"].astype(np.int64)
        old_votes_M = np.where(found_M, entries_M["votes"], 0).astype(np.int64)
        agree_M = old_tokens_M == tokens_M
        leads_M = np.where(agree_M, old_votes_M + votes_M, abs(old_votes_M - votes_M))
        entries_M["tag"] = tags_M
        entries_M["token"] = np.where(old_votes_M > votes_M, old_tokens_M, tokens_M)
        entries_M["votes"] = np.minimum(leads_M, self._MAX_VOTES)
        entries_M["learned"] = self._clock
        self._entries_RW.reshape(-1)[rows_M * self._WAYS + ways_M] = entries_M

    # Row and tag come from different bits; the lowest ones of a multilinear hash are poor.

    def _rows(self, keys_M: Keys) -> Ints:
        return (keys_M >> np.uint64(64 - self._row_bits)).astype(np.int64)

    def _tags(self, keys_M: Keys) -> NDArray[np.uint32]:
        return (keys_M >> np.uint64(8)).astype(np.uint32) | np.uint32(1)  # 0 marks an empty entry


def _merge(keys_M: Keys, tokens_M: Ints) -> tuple[Keys, Ints, Ints]:
    """Each key once, with its most frequent token and that one's lead over the next."""
    order_M = np.argsort(keys_M)
    keys_M, tokens_M = keys_M[order_M], tokens_M[order_M]
    same = keys_M[1:] == keys_M[:-1]
    once_M = ~(np.append(same, False) | np.append(False, same))
    if once_M.all():
        return keys_M, tokens_M, np.ones(len(keys_M), np.int64)
    keys, tokens = keys_M[~once_M], tokens_M[~once_M]  # a minority, so that sorting twice is cheap
    order = np.lexsort((tokens, keys))
    keys, tokens = keys[order], tokens[order]
    changes = (keys[1:] != keys[:-1]) | (tokens[1:] != tokens[:-1])
    starts = np.flatnonzero(np.append(True, changes))
    counts = np.diff(starts, append=len(keys))
    keys, tokens = keys[starts], tokens[starts]
    order = np.lexsort((counts, keys))
    keys, tokens, counts = keys[order], tokens[order], counts[order]
    same = keys[1:] == keys[:-1]
    leads = counts - np.append(0, np.where(same, counts[:-1], 0))
    last = np.append(~same, True)
    return (
        np.concatenate([keys_M[once_M], keys[last]]),
        np.concatenate([tokens_M[once_M], tokens[last]]),
        np.concatenate([np.ones(once_M.sum(), np.int64), leads[last]]),
    )


class DraftIndex:
    """Drafts for running sequences, from all that was written for the same prompts.

    Sequences are known by their slots and prompts by their tokens, so siblings and later epochs
    share what is learned, and a sequence that ends needs no word: what it wrote stays, and `start`
    gives its slot to the next. New weights change nothing either. All sequences of a step are
    served at once in numpy; the cost is linear in tokens and independent of what is remembered.

    Memory is 16 bytes an entry, `len(CONTEXT_SIZES)` entries for a token whose context is new to
    its prompt. Contexts that were not seen again for longest are dropped for new ones.
    """

    def __init__(self, num_slots: int, *, num_entries: int = 1 << 24) -> None:
        self._table = ContinuationTable(num_entries)
        self._contexts_SL = np.zeros((num_slots, max(CONTEXT_SIZES)), np.uint64)
        self._salts_S = np.zeros(num_slots, np.uint64)
        self._started: OrderedDict[int, None] = OrderedDict()
        """Salts of prompts that were last started; room for as many as can run."""
        self._unlearned: list[tuple[Keys, Keys, Ints]] = []
        # A key is the dot product of the context with random odd numbers, one row of them for each
        # place and one column for each size, plus the prompt's salt, modulo 2**64: multilinear
        # hashing (Carter and Wegman, 1979).
        places = np.arange(max(CONTEXT_SIZES), 0, -1)
        random = np.random.default_rng(0)
        factors_LN = random.integers(
            0, 1 << 64, (len(places), len(CONTEXT_SIZES)), np.uint64, endpoint=False
        )
        within_LN = places[:, None] <= np.array(CONTEXT_SIZES)
        self._factors_LN = np.where(within_LN, factors_LN | np.uint64(1), np.uint64(0))

    def start(self, slot: int, prompt_ids: Seq[int], completion_ids: Seq[int] = ()) -> None:
        """A sequence takes `slot`; `completion_ids` are those it had sampled when it was resumed.

        The prompt is learned once for its group. What was sampled is taken as learned.
        """
        prompt = np.array(prompt_ids, np.int64)
        salt = int.from_bytes(blake2b(prompt.tobytes(), digest_size=8).digest(), "little")
        length = self._contexts_SL.shape[1]
        text = np.zeros(length + len(prompt) + len(completion_ids), np.uint64)
        text[length : length + len(prompt)] = prompt + 1
        text[length + len(prompt) :] = np.array(completion_ids, np.int64) + 1
        self._contexts_SL[slot] = text[-length:]
        self._salts_S[slot] = salt
        if salt not in self._started:
            contexts_TL = sliding_window_view(text, length)[: len(prompt)]
            self._unlearned.append((contexts_TL, np.full(len(prompt), salt, np.uint64), prompt))
        self._started[salt] = None
        self._started.move_to_end(salt)
        if len(self._started) > len(self._salts_S):
            self._started.popitem(last=False)

    def extend(self, slots_B: Ints, tokens_BQ: Ints, counts_B: Ints) -> None:
        """Append the first `counts_B` tokens of each row to the sequences in `slots_B`.

        They are drafted from after the next `learn`, which an `extend` does itself if need be.
        """
        self.learn()
        length = self._contexts_SL.shape[1]
        texts = np.concatenate([self._contexts_SL[slots_B], tokens_BQ.astype(np.uint64) + 1], 1)
        contexts_BQL = sliding_window_view(texts, length, axis=1)  # one more than there are tokens
        valid_BQ = np.arange(tokens_BQ.shape[1]) < counts_B[:, None]
        self._unlearned.append(
            (
                contexts_BQL[:, :-1][valid_BQ],
                np.repeat(self._salts_S[slots_B], counts_B),
                tokens_BQ[valid_BQ],
            )
        )
        self._contexts_SL[slots_B] = contexts_BQL[np.arange(len(slots_B)), counts_B]

    def learn(self) -> None:
        """Take in what was started and appended. To be called while the device computes."""
        if not self._unlearned:
            return
        contexts_TL, salts_T, tokens_T = map(np.concatenate, zip(*self._unlearned, strict=True))
        self._unlearned.clear()
        keys_TN = self._keys(contexts_TL, salts_T)
        self._table.learn(keys_TN.ravel(), np.repeat(tokens_T, keys_TN.shape[1]))

    def propose(self, slots_B: Ints, k: int) -> Ints:
        """Up to `k` likely next tokens of each sequence: [B, k] int64, -1 after the last one.

        Each token is what mostly followed the longest known context, drafted tokens included.
        """
        length = self._contexts_SL.shape[1]
        drafts_BK = np.full((len(slots_B), k), -1, np.int64)
        rows = np.arange(len(slots_B))  # those with all tokens so far
        salts = self._salts_S[slots_B]
        texts = np.zeros((len(slots_B), length + k), np.uint64)
        texts[:, :length] = self._contexts_SL[slots_B]
        for step in range(k):
            keys = self._keys(texts[:, step : step + length], salts)
            found, tokens = (x.reshape(keys.shape) for x in self._table.lookup(keys.ravel()))
            longest = found.argmax(1)
            known = np.flatnonzero(found.any(1))
            tokens = tokens[known, longest[known]]
            rows, salts, texts = rows[known], salts[known], texts[known]
            drafts_BK[rows, step] = tokens
            texts[:, length + step] = tokens + 1
        return drafts_BK

    def _keys(self, contexts_TL: Keys, salts_T: Keys) -> Keys:
        """Hash [T, N] of the last tokens of each context, for each context size."""
        return contexts_TL @ self._factors_LN + salts_T[:, None]


@dataclass(slots=True)
class SpeculationCounters:
    """What speculation did so far."""

    num_plain_steps: int = 0
    num_verify_steps: int = 0
    num_drafted_tokens: int = 0
    num_accepted_tokens: int = 0


@dataclass(slots=True)
class _Measurement:
    """Moving average of a duration; of values long apart the newer one replaces the older."""

    mean: float | None = None
    step: int = 0
    """When it was last measured, in steps of its bucket."""
    tried: int = 0
    """When it was last asked for."""

    _KEPT = 0.9
    """Weight of the old mean after one step."""
    _OUTLIER = 2.0
    """Hiccups count as at most so many times the mean."""

    def clip(self, value: float) -> float:
        return value if self.mean is None else min(value, self._OUTLIER * self.mean)

    def update(self, value: float, step: int) -> None:
        value = self.clip(value)
        kept = 0.0 if self.mean is None else self._KEPT ** (step - self.step)
        self.mean = kept * (self.mean or 0.0) + (1 - kept) * value
        self.step = self.tried = step


@dataclass(slots=True)
class _Bucket:
    """What is known of the batch sizes up to one power of two."""

    num_steps: int = 0
    plain_s: _Measurement = field(default_factory=_Measurement)
    costs: dict[int, _Measurement] = field(
        default_factory=lambda: {k: _Measurement() for k in DRAFT_LENGTHS}
    )
    """By number of drafts: time of a verify step in plain steps."""
    budget_s: float = math.inf
    """What attempts may lose; capped as soon as the time of a plain step is known."""


class SpeculationController:
    """Chooses how many tokens to draft, from what verifying costs and how many are accepted.

    A step with k drafts yields 1 + accepted tokens a sequence and takes as long as `cost` plain
    steps; the k with the best ratio runs, 0 among them. Costs are kept by batch bucket. Acceptance
    is kept for all together, as the chance that the k-th token holds if those before it do, so that
    long drafts tell about short ones and a shrinking batch keeps what is known.

    Lengths that are not in use are tried now and then, as far as this loses at most one percent of
    the time, so cheap attempts come often and expensive ones seldom. All sequences of a step have
    one k, because it computes k + 1 rows for each of them anyway.

    Call `draft_length` once a step and then one `record`, except for steps that are no measure:
    those that recorded a CUDA graph or had prompt tokens in them.
    """

    _PROBING_SHARE = 0.01
    _PROBING_CREDIT = 16
    """Plain steps that attempts may lose at once, when a bucket is new for example."""
    _PROBING_INTERVAL = 16
    """Steps of a bucket from one attempt to the next of the same length."""
    _LEAST_GAIN = 0.02
    _MEMORY = 256
    """Sequences drafted for after which an observed acceptance weighs 1 / e."""

    def __init__(self) -> None:
        self.counters = SpeculationCounters()
        self._buckets: dict[int, _Bucket] = {}
        self._num_reached_K = np.zeros(max(DRAFT_LENGTHS))
        self._num_held_K = np.zeros(max(DRAFT_LENGTHS))

    def draft_length(self, batch_size: int) -> int:
        """Tokens to draft for each of `batch_size` sequences now; 0 for a plain step."""
        index = _bucket_index(batch_size)
        bucket = self._buckets.setdefault(index, _Bucket())
        bucket.num_steps += 1
        plain_s = bucket.plain_s.mean
        if plain_s is None:
            return 0
        best, best_rate = self._best(index)
        lengths = [k for k in (0, *DRAFT_LENGTHS) if k != best]
        for k in sorted(lengths, key=lambda k: self._measurement(bucket, k).tried):
            attempt = self._measurement(bucket, k)
            if bucket.num_steps - attempt.tried < self._PROBING_INTERVAL and attempt.tried:
                break
            loss_s = plain_s * (self._cost(index, k) - self._yield(k) / best_rate)
            if loss_s <= bucket.budget_s:
                attempt.tried = bucket.num_steps
                return k
        return best

    def record_plain(self, batch_size: int, seconds: float) -> None:
        """A step without drafts took `seconds` of wall time, from the end of the step before it."""
        self.counters.num_plain_steps += 1
        index = _bucket_index(batch_size)
        bucket = self._buckets.setdefault(index, _Bucket())
        self._spend(index, 0, bucket.plain_s.clip(seconds), num_tokens=1.0)
        bucket.plain_s.update(seconds, bucket.num_steps)

    def record_verify(self, drafts_BK: Ints, accepted_B: Ints, seconds: float) -> None:
        """A step verified `drafts_BK` in `seconds` of wall time, drafting them included.

        `accepted_B` is what `accept` returned. Raises ValueError for a width that `draft_length`
        never asks for.
        """
        batch_size, k = drafts_BK.shape
        if k not in DRAFT_LENGTHS:
            raise ValueError(f"drafts have {k} tokens a sequence, allowed are {DRAFT_LENGTHS}")
        self.counters.num_verify_steps += 1
        self.counters.num_drafted_tokens += int((drafts_BK >= 0).sum())
        self.counters.num_accepted_tokens += int(accepted_B.sum())
        index = _bucket_index(batch_size)
        bucket = self._buckets.setdefault(index, _Bucket())
        if bucket.plain_s.mean is not None:
            cost = bucket.costs[k].clip(seconds / bucket.plain_s.mean)
            num_tokens = 1 + float(accepted_B.mean())
            self._spend(index, k, cost * bucket.plain_s.mean, num_tokens=num_tokens)
            bucket.costs[k].update(cost, bucket.num_steps)
        kept = math.exp(-batch_size / self._MEMORY)
        held_K = (accepted_B[:, None] > np.arange(k)).sum(0)
        reached_K = np.append(batch_size, held_K[:-1])
        self._num_held_K[:k] = kept * self._num_held_K[:k] + held_K
        self._num_reached_K[:k] = kept * self._num_reached_K[:k] + reached_K

    def _spend(self, index: int, k: int, seconds: float, *, num_tokens: float) -> None:
        """Earn probing's share of a step, and pay for what it lost if it was not the best."""
        bucket = self._buckets[index]
        plain_s = bucket.plain_s.mean
        if plain_s is None:
            return
        best, best_rate = self._best(index)
        if k != best:
            bucket.budget_s -= max(0.0, seconds - plain_s * num_tokens / best_rate)
        bucket.budget_s += self._PROBING_SHARE * seconds
        bucket.budget_s = min(bucket.budget_s, self._PROBING_CREDIT * plain_s)

    def _best(self, index: int) -> tuple[int, float]:
        """The length that yields most tokens a sequence in the time of a plain step, and how many.

        No drafts where the gain would be less than the noise of the measurements.
        """
        rates = {k: self._yield(k) / self._cost(index, k) for k in DRAFT_LENGTHS}
        rates[0] = 1.0 + self._LEAST_GAIN
        best = max(rates, key=lambda k: rates[k])
        return best, rates[best] if best else 1.0

    def _yield(self, k: int) -> float:
        """Expected tokens a sequence of a step with k drafts."""
        chances_K = self._num_held_K[:k] / (self._num_reached_K[:k] + 1)  # 0 where nothing is known
        return 1.0 + float(np.multiply.accumulate(chances_K).sum())

    def _cost(self, index: int, k: int) -> float:
        """Time of a step with k drafts in plain steps: as measured in the nearest bucket.

        Before any measurement, as long as sampling its tokens one by one.
        """
        if k == 0:
            return 1.0
        known = {
            abs(other - index): mean
            for other, bucket in self._buckets.items()
            if (mean := bucket.costs[k].mean) is not None
        }
        return known[min(known)] if known else 1.0 + k

    @staticmethod
    def _measurement(bucket: _Bucket, k: int) -> _Measurement:
        return bucket.costs[k] if k else bucket.plain_s


def _bucket_index(batch_size: int) -> int:
    return (batch_size - 1).bit_length()
