"""Shapes that the decode kernel is tested with."""

from __future__ import annotations

HEADS_2 = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 32, "block_size": 16}
HEADS_1 = {"num_heads": 6, "num_kv_heads": 1, "head_dim": 16, "block_size": 32}
HEADS_3 = {"num_heads": 1, "num_kv_heads": 1, "head_dim": 16, "block_size": 32}
HEADS_WIDE = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 128, "block_size": 16}
HEADS_MERGED = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 16, "block_size": 16}
HEADS_20 = {"num_heads": 20, "num_kv_heads": 1, "head_dim": 24, "block_size": 16}

DTYPES = {"float32": 2e-6, "float16": 2e-3}
"""Largest error allowed, relative to the largest output."""
FP8_LIMIT = 2e-3
"""The same with a quantised cache: the kernel multiplies float16 numbers then."""

# Arguments: key lengths, heads; then by name what is not as usual: splits a key head, tile, groups
# with their shared keys and members a group, options of the layer.
DECODE_CASES = {
    "one split": {"keys": [1, 17, 64], "heads": HEADS_2, "splits": 1},
    "several tiles": {"keys": [65, 128, 200], "heads": HEADS_2, "splits": 1},
    "splits within sequences": {"keys": [70, 3, 200], "heads": HEADS_2, "splits": 5},
    "more splits than tiles": {"keys": [20, 130], "heads": HEADS_1, "splits": 16},
    "own choice of splits": {"keys": [33, 300], "heads": HEADS_1},
    "short in a long graph": {"keys": [40, 90], "heads": HEADS_2, "splits": 6, "longest": 4000},
    "uneven": {"keys": [5, 400, 1, 30, 90, 2, 2, 250], "heads": HEADS_1, "splits": 7},
    "270 sequences": {
        "keys": [1 + i % 40 for i in range(270)],
        "heads": HEADS_3,
        "splits": 9,
        "tile": 32,
    },
    "window": {"keys": [10, 150, 41], "heads": HEADS_2, "window": 40, "splits": 1},
    "window over splits": {"keys": [300], "heads": HEADS_1, "window": 140, "splits": 4},
    "window of one": {"keys": [30, 64], "heads": HEADS_1, "window": 1, "splits": 2},
    "window longer than all": {"keys": [30, 64], "heads": HEADS_1, "window": 64, "splits": 2},
    "softcap": {"keys": [77], "heads": HEADS_2, "softcap": 0.8, "splits": 3},
    "softcap and window": {
        "keys": [90, 31],
        "heads": HEADS_1,
        "softcap": 0.8,
        "window": 33,
        "splits": 3,
    },
    "wide heads": {"keys": [90], "heads": HEADS_WIDE, "splits": 2},
    "group of 20, head of 24": {"keys": [90], "heads": HEADS_20, "splits": 2},
    "shared": {
        "keys": [100, 70, 65, 9, 80],
        "heads": HEADS_2,
        "splits": 3,
        "groups": [((0, 1, 2), 64)],
        "members": 4,
    },
    "shared over many splits": {
        "keys": [100, 33, 70, 101, 9, 80, 34],
        "heads": HEADS_1,
        "splits": 14,
        "groups": [((3, 0, 5), 64), ((6, 1), 32)],
        "members": 3,
    },
    "shared in one split": {
        "keys": [100, 33, 70, 101, 9, 80, 34],
        "heads": HEADS_1,
        "splits": 1,
        "groups": [((3, 0, 5), 64), ((6, 1), 32)],
        "members": 3,
    },
    "shared, a member in two splits": {
        "keys": [100, 70, 101, 90, 9, 80, 34],
        "heads": HEADS_1,
        "splits": 2,
        "groups": [((3, 6), 32), ((2, 0, 5), 64)],
        "members": 3,
    },
    "shared by less than a tile": {
        "keys": [20, 40, 17],
        "heads": HEADS_2,
        "splits": 3,
        "tile": 32,
        "groups": [((1, 0, 2), 16)],
        "members": 8,
    },
    "shared, two groups": {
        "keys": [70, 64, 36, 68],
        "heads": HEADS_2,
        "splits": 5,
        "groups": [((3, 0), 64), ((2, 1), 32)],
        "members": 2,
    },
    "shared and a window": {
        "keys": [100, 70, 65],
        "heads": HEADS_2,
        "splits": 4,
        "window": 50,
        "groups": [((0, 1, 2), 64)],
        "members": 4,
    },
    "shared and a long window": {
        "keys": [100, 70, 65],
        "heads": HEADS_2,
        "splits": 4,
        "window": 100,
        "groups": [((0, 1, 2), 64)],
        "members": 4,
    },
    "shared and a softcap": {
        "keys": [100, 70],
        "heads": HEADS_2,
        "softcap": 0.8,
        "splits": 4,
        "groups": [((0, 1), 64)],
        "members": 2,
    },
}

HALF_CASES = (
    "splits within sequences",
    "softcap and window",
    "wide heads",
    "several tiles",
    "shared over many splits",
)
"""What is run with float16 too; with float32 all are."""

FP8_CASES = (
    "splits within sequences",
    "several tiles",
    "softcap and window",
    "shared over many splits",
    "group of 20, head of 24",
)

MERGE_CASE = {
    "keys": [100, 230, 90, 101, 9, 80, 140, 66],
    "heads": HEADS_MERGED,
    "splits": 4,
    "groups": [((3, 0, 5), 64), ((6, 1, 7), 48)],
    "members": 4,
}
"""Sequences with own keys in one split and in several, beside shared ones."""

BUGS = {
    "tables swapped": "splits within sequences",
    "context one short": "splits within sequences",
    "shared too far": "shared over many splits",
}
"""Planted bugs, and the case that must show them."""
