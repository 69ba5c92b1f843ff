"""The causal convolution of packed segments against itself token by token."""

from __future__ import annotations

import torch

from hone.attention.recurrent.convolution import convolve, convolve_step
from tests.recurrent import slow
from tests.tables import table

LENGTHS = [[1], [9], [1, 1, 1], [2, 7, 1], [3, 4, 50]]
WIDTHS = [2, 4, 5]


@table("lengths", LENGTHS)
@table("width", WIDTHS)
@table("starts", [False, True])
def test_no_token_of_another_segment_is_seen(lengths: list[int], width: int, starts: bool):
    channels = 6
    x = torch.randn(sum(lengths), channels, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(channels, width, dtype=torch.float64, requires_grad=True)
    initial = None
    if starts:
        shape = len(lengths), width - 1, channels
        initial = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    inputs = [x, weight, *([] if initial is None else [initial])]
    found, wanted = (f(x, weight, lengths, initial) for f in (convolve, slow.convolve))
    factors = [torch.randn_like(values) for values in wanted]
    grads = []
    for outcome in (found, wanted):
        total = sum((a * b).sum() for a, b in zip(outcome, factors, strict=True))
        grads.append(torch.autograd.grad(total, inputs))
    for ours, exact in zip((*found, *grads[0]), (*wanted, *grads[1]), strict=True):
        torch.testing.assert_close(ours, exact)


@table("width", WIDTHS)
def test_a_token_after_another_has_the_numbers_of_all_at_once(width: int):
    num_segments, num_tokens, channels = 3, 7, 5
    x = torch.randn(num_segments, num_tokens, channels, dtype=torch.float64)
    weight = torch.randn(channels, width, dtype=torch.float64)
    before = torch.randn(num_segments, width - 1, channels, dtype=torch.float64)
    lengths = [num_tokens] * num_segments
    outputs, last = slow.convolve(x.flatten(0, 1), weight, lengths, before)
    found = []
    for t in range(num_tokens):
        output, before = convolve_step(x[:, t], weight, before)
        found.append(output)
    torch.testing.assert_close(torch.stack(found, 1).flatten(0, 1), outputs)
    torch.testing.assert_close(before, last)
