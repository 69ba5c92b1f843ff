"""Shapes that the decode kernel is tested with: key lengths, heads, options, splits."""

HEADS_2 = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "block_size": 16}
HEADS_1 = {"num_heads": 6, "num_kv_heads": 1, "head_dim": 16, "block_size": 32}
HEADS_8 = {"num_heads": 16, "num_kv_heads": 8, "head_dim": 128, "block_size": 16}
HEADS_20 = {"num_heads": 20, "num_kv_heads": 1, "head_dim": 24, "block_size": 16}

DTYPES = {"float32": 2e-6, "float16": 2e-3}
"""Largest error allowed, relative to the largest output."""

DECODE_CASES = {
    "one tile": ([1, 17, 64], HEADS_2, {}, 1),
    "several tiles": ([65, 128, 200], HEADS_2, {}, 1),
    "splits": ([70, 3, 200], HEADS_2, {}, 4),
    "more splits than tiles": ([20, 130], HEADS_1, {}, 8),
    "own choice of splits": ([33, 300], HEADS_1, {}, None),
    "window": ([10, 150, 41], HEADS_2, {"window": 40}, 1),
    "window in splits": ([300], HEADS_1, {"window": 140}, 2),
    "softcap": ([77], HEADS_2, {"softcap": 0.8}, 2),
    "softcap and window": ([90, 31], HEADS_1, {"softcap": 0.8, "window": 33}, 1),
    "wide heads": ([90], HEADS_8, {}, 2),
    "group of 20, head of 24": ([90], HEADS_20, {}, 2),
}
