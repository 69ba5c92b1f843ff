"""Runs what lies between the compiled parts of a hybrid and its head over micro-batches as runs
have them; prints as JSON which kernels Triton would compile for the first one, and for later ones.
"""

from __future__ import annotations

import json
import os
import random
import sys
from collections.abc import Iterator

from hone.attention.recurrent.launches import FOLDER

os.environ |= {"FLA_CACHE_MODE": "default", "FLA_CONFIG_DIR": str(FOLDER)}

import torch

from hone.attention import kernel_launch, packed_keys
from hone.attention.recurrent import fla_convolution, fla_rule, kernels, state_passes
from hone.attention.recurrent.delta_rule import Tokens
from hone.model_input import InputSpec
from hone.trainer import logprob_kernels, logprobs
from hone.trainer.collating import collate
from hone.trainer.packing import plan
from hone.trainer.prefixes import shared_prefixes
from hone.types import MicroBatch, Row
from tests import triton_compilations
from tests.trainer.examples import VOCAB, tiny_model

KEY_HEADS, HEADS, KEYS, VALUES, WINDOW = 8, 16, 16, 32, 4
CHANNELS = 2 * KEY_HEADS * KEYS + HEADS * VALUES
NUM_STEPS = 12
COPIES = {"_gather_kernel", "_sum_kernel"}
"""Of the keys of a shared prompt, which a pass without one does not launch."""
MODEL = tiny_model()


def group(name: str, prompt: int, sizes: list[int], *, shares: bool = True) -> list[Row]:
    """Rows of one prompt, or of one each."""
    return [
        Row(
            id=f"{name}.{number}",
            group_id=name if shares else f"{name}.{number}",
            token_ids=[1] * (prompt + size),
            loss_mask=[False] * prompt + [True] * size,
        )
        for number, size in enumerate(sizes)
    ]


FIRST = {
    "full groups": [row for name in "ab" for row in group(name, 256, [1024] * 8)],
    "a group of which one row ends early": group("a", 256, [1024] * 7 + [1001]),
    "rows that share nothing": group("a", 256, [1024] * 4, shares=False),
    "one row": group("a", 33, [80]),
    "a prompt of one token": group("a", 1, [16] * 8),
}
"""Micro-batches of a first step."""


def later(rng: random.Random) -> Iterator[MicroBatch]:
    """Micro-batches of further steps: whole groups and their remains, rows that end at the limit or
    before, prompts of one token and more, short ones that are not shared, and single rows."""
    for rows in FIRST.values():
        yield batch_of(rows)
    for _ in range(NUM_STEPS):
        limit = rng.choice([64, 256, 1024])
        rows: list[Row] = []
        for number in range(rng.randint(1, 6)):
            sizes = [limit if rng.random() < 0.7 else rng.randint(1, limit) for _ in range(8)]
            prompt = rng.choice([1, 15, 16, rng.randint(1, limit)])
            rows += group(str(number), prompt, sizes, shares=rng.random() < 0.8)
        prefixes = shared_prefixes(rows)
        for own in plan(rows, max_tokens=rng.choice([4096, 12288]), prefixes=prefixes)[0]:
            yield batch_of([rows[index] for index in own])


def batch_of(rows: list[Row]) -> MicroBatch:
    prefixes = shared_prefixes(rows)
    inputs = InputSpec(has_states=True)
    return collate(rows, [1.0] * len(rows), "cpu", prefixes=prefixes, inputs=inputs)


def work(batch: MicroBatch) -> None:
    """Forward and backward of what is not compiled by torch: convolution and recurrence of a
    layer, the copies of keys, and the log-probabilities, of which 1,024 are computed at a time."""
    assert batch.segments is not None
    size = len(batch.input_ids)
    x = torch.empty(size, CHANNELS, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.empty(CHANNELS, WINDOW, dtype=torch.bfloat16, requires_grad=True)
    before = kernels.inputs_before(x.detach(), WINDOW - 1, batch.segments, None)
    y, _ = fla_convolution.convolve(x, weight, batch.segments, before, gives_final=False)
    q, k, v = y.split((KEY_HEADS * KEYS, KEY_HEADS * KEYS, HEADS * VALUES), 1)
    tokens = Tokens(
        q=q.unflatten(1, (KEY_HEADS, KEYS)),
        k=k.unflatten(1, (KEY_HEADS, KEYS)),
        v=v.unflatten(1, (HEADS, VALUES)),
        g=torch.empty(size, HEADS, requires_grad=True),
        beta=torch.empty(size, HEADS, dtype=torch.bfloat16, requires_grad=True),
    )
    output, _ = fla_rule.gated_delta_rule(tokens, batch.segments, None, gives_final=False)
    output.sum().backward()
    if batch.keys is not None:
        own, values = (torch.empty(size, 2, 16, requires_grad=True) for _ in range(2))
        copies = packed_keys.gather_keys(own, values, batch.keys)
        (copies[0] + copies[1]).sum().backward()
    hidden = torch.empty(len(batch.labels), MODEL.config.hidden_size, requires_grad=True)
    found, entropy = logprobs.token_logprobs(
        MODEL, hidden, batch.labels % VOCAB, temperature=1.0, chunk_tokens=1024, with_entropy=True
    )
    assert entropy is not None
    (found + entropy).sum().backward()


def main() -> None:
    triton_compilations.pretend()
    packed_keys._has_kernels = lambda x: True
    logprobs._operations = lambda logits: logprob_kernels
    first: dict[str, int] = {}
    again: dict[str, list[str]] = {}
    for number, (name, rows) in enumerate(FIRST.items()):
        triton_compilations.forget()
        kernel_launch._compiled.clear()
        state_passes._launched.clear()
        work(batch_of(rows))
        first[name] = len({*triton_compilations.compiled_since()} - COPIES)
        for batch in later(random.Random(number)):
            work(batch)
        again[name] = triton_compilations.compiled_since()
    json.dump({"first": first, "again": again, "copies": sorted(COPIES)}, sys.stdout)


if __name__ == "__main__":
    main()
