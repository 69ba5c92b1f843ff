"""The gated delta rule in chunks against itself token by token."""

from __future__ import annotations

import random

import pytest
import torch

from hone.attention.recurrent.delta_rule import Tokens, chunked, step
from hone.segments import CHUNK
from tests.recurrent import slow
from tests.tables import table

LENGTHS = {
    "one token": [1],
    "one chunk": [CHUNK],
    "a token more": [CHUNK + 1],
    "several chunks": [2 * CHUNK + 7],
    "the first ends first": [3, 2 * CHUNK + 5, CHUNK],
    "the last ends first": [CHUNK + 9, 1],
    "equal ones": [70, 70, 70],
    "drawn": None,
}
HEADS = [(1, 1), (2, 2), (2, 4), (1, 3)]


@table("lengths", LENGTHS.values())
@table("starts", [False, True])
def test_chunks_have_the_numbers_and_gradients_of_tokens(lengths: list[int] | None, starts: bool):
    lengths = lengths or [random.randint(1, 200) for _ in range(5)]
    heads = random.choice(HEADS)
    tokens = slow.draw_tokens(sum(lengths), heads=heads, dims=(3, 5))
    initial = slow.draw_states(len(lengths), tokens) if starts else None
    found, wanted = (f(tokens, lengths, initial) for f in (chunked, slow.rule))
    inputs = [*tokens, *([] if initial is None else [initial])]
    weights = [torch.randn_like(x) for x in wanted]
    for ours, exact in zip(found, wanted, strict=True):
        torch.testing.assert_close(ours, exact, atol=1e-9, rtol=1e-9)
    grads = [
        torch.autograd.grad(sum((x * w).sum() for x, w in zip(pair, weights, strict=True)), inputs)
        for pair in (found, wanted)
    ]
    for ours, exact in zip(*grads, strict=True):
        torch.testing.assert_close(ours, exact, atol=1e-8, rtol=1e-8)


@table("lengths", [[1], [5, 3], [130, 1, 64]])
def test_a_token_after_another_has_the_numbers_of_all_at_once(lengths: list[int]):
    """Of each segment the first tokens in chunks, the rest step by step."""
    heads = random.choice(HEADS)
    tokens = slow.draw_tokens(sum(lengths), heads=heads, dims=(5, 3))
    outputs, finals = slow.rule(tokens, lengths, None)
    pieces = [Tokens(*x) for x in zip(*(x.split(lengths) for x in tokens), strict=True)]
    for own, expected, final in zip(pieces, outputs.split(lengths), finals, strict=True):
        num_tokens = len(own.v)
        split = random.randint(1, num_tokens)
        head = Tokens(*(x[:split] for x in own))
        found, state = chunked(head, [split], None)
        rows = [*found]
        for t in range(split, num_tokens):
            output, state = step(Tokens(*(x[t : t + 1] for x in own)), state)
            rows.append(output[0])
        torch.testing.assert_close(torch.stack(rows), expected)
        torch.testing.assert_close(state[0], final)


def test_bfloat16_inputs_are_computed_in_float32():
    lengths = [100, 30]
    exact = slow.draw_tokens(sum(lengths), heads=(2, 4), dims=(8, 8))
    rounded = Tokens(*(x.detach().bfloat16() for x in exact))
    wide = Tokens(*(x.float() for x in rounded))
    found, state = chunked(rounded, lengths, None)
    wanted, final = chunked(wide, lengths, None)
    assert found.dtype == torch.bfloat16
    assert state.dtype == torch.float32
    assert torch.equal(found, wanted.bfloat16())
    assert torch.equal(state, final)


@pytest.mark.parametrize("g", [0.0, -1e-6, -50.0, -1e4])
def test_decays_from_none_to_all_stay_finite(g: float):
    """The decay between two tokens is a quotient of products over the chunk, which may each be
    zero in float32."""
    tokens = slow.draw_tokens(3 * CHUNK, heads=(1, 2), dtype=torch.float32)
    tokens = tokens._replace(g=torch.full_like(tokens.g, g).requires_grad_())
    found, state = chunked(tokens, [3 * CHUNK], None)
    exact = Tokens(*(x.detach().double() for x in tokens))
    wanted, final = slow.rule(exact, [3 * CHUNK], None)
    torch.testing.assert_close(found.double(), wanted, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(state.double(), final, atol=2e-5, rtol=1e-4)
    grads = torch.autograd.grad(found.sum() + state.sum(), [*tokens])
    assert all(bool(grad.isfinite().all()) for grad in grads)
