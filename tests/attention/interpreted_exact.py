"""Runs the exact attention in Triton's interpreter and prints errors and unequal rows as JSON.

A process of its own, as the interpreter is chosen before triton is first imported.
"""

from __future__ import annotations

import dataclasses
import json
import sys

from tests import stand_in_for_transformers  # noqa: F401  # isort: skip
from tests.attention import matrix_unit  # noqa: F401  # isort: skip

import torch

from hone.attention import PackedContext, PagedContext, exact
from tests.attention.twin import attend_one

SCALE = 0.3
SPLIT = 64
LENGTHS = (1, 70, 40, 150)
ROW_TILES = (exact.DECODE_TILE, exact.PREFILL_TILE, exact.RowTile(64, 4, 2))


class Sequences:
    """Queries, keys and values of sequences; any piece of them as a call of either kind."""

    def __init__(self, lengths, *, num_heads=2, num_kv_heads=1, head_dim=32, seed=0):
        draw = torch.Generator().manual_seed(seed)

        def normal(count, heads):
            return torch.randn(count, heads, head_dim, generator=draw).half()

        self.q = [normal(n, num_heads) for n in lengths]
        self.k = [normal(n, num_kv_heads) for n in lengths]
        self.v = [normal(n, num_kv_heads) for n in lengths]
        self.draw = draw

    def packed(self, members, *, window=None, **options):
        """Outputs of whole sequences in one packed row, one each."""
        q, k, v = (torch.cat([x[i] for i in members]) for x in (self.q, self.k, self.v))
        # As slices of one projection: rows with a stride.
        q, k, v = torch.cat([q, k, v], 1).split([q.shape[1], k.shape[1], v.shape[1]], 1)
        lengths = [len(self.q[i]) for i in members]
        options = {"keys_per_split": SPLIT} | options
        output, _ = exact._attend_packed(
            q, k, v, PackedContext.from_lengths(lengths), scale=SCALE, window=window, **options
        )
        return output.split(lengths)

    def paged(self, pieces, *, window=None, spare=0, empty=None, **options):
        """Outputs of pieces (sequence, start, stop), each against the keys 0 .. stop - 1."""
        block_size = 16
        stops = [stop for _, _, stop in pieces]
        num_blocks = [-(-stop // block_size) for stop in stops]
        order = torch.randperm(sum(num_blocks), generator=self.draw)
        tables = torch.zeros(len(pieces), max(num_blocks), dtype=torch.int32)
        # Unwritten slots hold large numbers, so that reading one shows.
        shape = (2, sum(num_blocks), block_size, *self.k[0].shape[1:])
        kv_cache = 50 * torch.randn(shape, generator=self.draw).half()
        flat = kv_cache.flatten(1, 2)
        for row, ((i, _, stop), blocks) in enumerate(
            zip(pieces, order.split(num_blocks), strict=True)
        ):
            tables[row, : len(blocks)] = blocks
            slots = (blocks[:, None] * block_size + torch.arange(block_size)).flatten()[:stop]
            flat[0, slots], flat[1, slots] = self.k[i][:stop], self.v[i][:stop]
        lengths = tuple(stop - start for _, start, stop in pieces)
        borders = torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)
        context = PagedContext(
            kv_caches=[kv_cache],
            block_tables=tables,
            slot_mapping=torch.zeros(sum(lengths), dtype=torch.int64),
            cu_seqlens_q=borders,
            context_lens=torch.tensor(stops, dtype=torch.int32),
            max_seqlen_q=max(lengths),
            max_context_len=max(stops) + spare,
            query_lens=lengths,
            key_lens=tuple(stops),
        )
        if empty is not None:
            context.context_lens[empty] = 0
        if set(lengths) == {1}:  # as a decode step: the host knows no lengths
            context = dataclasses.replace(context, query_lens=(), key_lens=())
        q = torch.cat([self.q[i][start:stop] for i, start, stop in pieces])
        options = {"keys_per_split": SPLIT} | options
        output = exact.paged_attention(q, kv_cache, context, scale=SCALE, window=window, **options)
        return output.split(lengths)


def num_unequal(expected, pieces, outputs):
    """Queries whose bits are not those of the packed row."""
    return sum(
        int((expected[i][start:stop] != output).flatten(1).any(1).sum())
        for (i, start, stop), output in zip(pieces, outputs, strict=True)
    )


def error(sequences, outputs, *, window=None):
    worst = 0.0
    for i, output in enumerate(outputs):
        for t in range(0, len(output), 7):
            keys, values = sequences.k[i][: t + 1], sequences.v[i][: t + 1]
            exact_row = attend_one(sequences.q[i][t], keys, values, scale=SCALE, window=window)
            gap = (output[t].double() - exact_row).abs().max() / exact_row.abs().max()
            worst = max(worst, gap.item())
    return worst


def invariance(chunks, window=None, *, prefill_programs=1, **shape):
    """Unequal queries by way of computing them; the packed row of all is the measure.

    Several programs for a tile are folded by one program for each query, so few queries have them.
    """
    sequences = Sequences(LENGTHS, **shape)
    every = range(len(LENGTHS))
    expected = sequences.packed(every, window=window)
    found = {"error": error(sequences, expected, window=window)}

    def compare(name, pieces, outputs):
        found[name] = num_unequal(expected, pieces, outputs)

    whole = [(i, 0, LENGTHS[i]) for i in every]
    backwards = [whole[i] for i in (3, 1, 2)]
    compare("packed otherwise", backwards, sequences.packed((3, 1, 2), window=window))
    for piece in whole[1:]:
        compare(f"alone {piece[0]}", [piece], sequences.packed([piece[0]], window=window))
    for tile in ROW_TILES[:1]:
        name = f"packed in tiles of {tile.rows}"
        compare(name, whole, sequences.packed(every, window=window, tile=tile))
    outputs = sequences.paged(whole, window=window, num_programs=1)
    compare("prefill", whole, outputs)
    outputs = sequences.paged(whole[1:3], window=window, num_programs=prefill_programs)
    compare("prefill of two", whole[1:3], outputs)
    for size in chunks:
        for start in range(0, max(LENGTHS), size):
            pieces = [(i, start, min(start + size, n)) for i, n in enumerate(LENGTHS) if n > start]
            outputs = sequences.paged(pieces, window=window, num_programs=1)
            compare(f"chunk of {size} at {start}", pieces, outputs)
    for programs in (1, 2):
        for back in (0, 37):
            pieces = [(i, n - back - 1, n - back) for i, n in enumerate(LENGTHS) if n > back]
            outputs = sequences.paged(pieces, window=window, num_programs=programs, spare=200)
            compare(f"decode {back} before the last by {programs}", pieces, outputs)
    for tile in ROW_TILES:
        pieces = [(3, 149, 150), (2, 5, 6)]
        compare(f"decode in {tile.rows}", pieces, sequences.paged(pieces, window=window, tile=tile))
    for count in (3, 5):
        pieces = [(i, n - count, n) for i, n in enumerate(LENGTHS) if n >= count]
        outputs = sequences.paged(pieces, window=window, num_programs=2)
        compare(f"{count} queries each", pieces, outputs)
    return found


def long_context():
    """The sizes in use, with several splits a context; decode in its own number of programs."""
    sequences = Sequences([40, 1100])
    expected = sequences.packed([0, 1], keys_per_split=exact.KEYS_PER_SPLIT)
    pieces = [(1, 1099, 1100), (0, 39, 40)]
    outputs = sequences.paged(pieces, keys_per_split=exact.KEYS_PER_SPLIT)
    alone = sequences.paged(pieces[:1], keys_per_split=exact.KEYS_PER_SPLIT)
    return num_unequal(expected, pieces, outputs) + num_unequal(expected, pieces[:1], alone)


def planted(bug):
    """Unequal queries of a decode step whose order of additions is not that of the packed row."""
    sequences = Sequences(LENGTHS)
    expected = sequences.packed(range(len(LENGTHS)))
    pieces = [(3, 149, 150), (1, 69, 70)]
    options = {
        "splits by batch": {"keys_per_split": SPLIT * len(pieces)},
        "narrow tiles": {"keys_per_tile": 32},
    }
    return num_unequal(expected, pieces, sequences.paged(pieces, **options[bug]))


def empty_sequence(programs):
    """A padded row of a decode batch gives zeros and moves nothing."""
    sequences = Sequences([3, 200])
    pieces = [(0, 2, 3), (1, 199, 200)]
    expected = sequences.paged(pieces, num_programs=programs)
    found = sequences.paged(pieces, num_programs=programs, empty=0)
    return bool((found[0] == 0).all()) and torch.equal(found[1], expected[1])


def log_sums_error():
    sequences = Sequences([90, 200])
    q, k, v = (torch.cat(x) for x in (sequences.q, sequences.k, sequences.v))
    _, log_sums = exact._attend_packed(
        q, k, v, PackedContext.from_lengths([90, 200]), scale=SCALE, window=None
    )
    worst = 0.0
    for t, start in ((0, 0), (89, 0), (90, 90), (289, 90)):
        for head in range(2):
            scores = k[start : t + 1, 0].double() @ q[t, head].double() * SCALE
            worst = max(worst, abs(log_sums[head, t].item() - scores.logsumexp(0).item()))
    return worst


def main() -> None:
    results = {
        "two heads a key head": invariance((50, 129), prefill_programs=None),
        "three heads a key head": invariance((129,), num_heads=3),
        "window": invariance((50,), window=80),
        "long context": long_context(),
        "empty": [empty_sequence(programs) for programs in (1, 2)],
        "log sums": log_sums_error(),
        "planted": {bug: planted(bug) for bug in ("splits by batch", "narrow tiles")},
    }
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
