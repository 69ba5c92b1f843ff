"""Completions that share a prompt's keys, against attention of each whole sequence by itself."""

from __future__ import annotations

import random
from itertools import accumulate, pairwise

import pytest
import torch

from hone.attention import merging, shared_prompts
from hone.attention.shared_prompts import SharedPrompts, packed_attention

LIMIT = 1e-12


def sequences(layout: SharedPrompts) -> list[list[int]]:
    """Rows of each whole sequence, its prompt's first."""
    pieces = [list(range(*ends)) for ends in pairwise(accumulate(layout.lengths, initial=0))]
    counts = layout.num_completions
    prompts, others = pieces[: len(counts)], pieces[len(counts) :]
    owners = [p for p, count in zip(prompts, counts, strict=True) for _ in range(count)]
    owners += [[]] * (len(others) - len(owners))
    return [prompt + own for prompt, own in zip(owners, others, strict=True)]


def twin(q, k, v, layout, *, scale, window=None, softcap=None):
    """Every sequence alone, dense; the output of a prompt is that of its first sequence."""
    group = q.shape[1] // k.shape[1]
    outputs = {}
    for rows in sequences(layout):
        keys, values = (x[rows].repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[rows], keys) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        behind = torch.arange(len(rows))[:, None] - torch.arange(len(rows))
        hidden = behind < 0
        if window is not None:
            hidden |= behind >= window
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        for row, output in zip(rows, torch.einsum("hqk,khd->qhd", weights, values), strict=True):
            outputs.setdefault(row, output)
    return torch.stack([outputs[row] for row in range(len(q))])


def row_of(layout, heads=(4, 2), dtype=torch.float64, seed=0):
    """q, k, v and the gradient of the output."""
    draw = torch.Generator().manual_seed(seed)
    widths = (heads[0], heads[1], heads[1], heads[0])
    shapes = [(sum(layout.lengths), width, 6) for width in widths]
    return [torch.randn(shape, generator=draw, dtype=torch.float64).to(dtype) for shape in shapes]


def results(attend, row, layout, **options):
    """Output and gradients of q, k and v."""
    inputs = [x.clone().requires_grad_() for x in row[:3]]
    output = attend(*inputs, layout, scale=0.6, **options)
    output.backward(row[3])
    return [output.detach(), *(x.grad for x in inputs)]


def errors(layout, row=None, **options):
    row = row or row_of(layout)
    found, expected = (results(f, row, layout, **options) for f in (packed_attention, twin))
    return [(a - b).abs().max().item() for a, b in zip(found, expected, strict=True)]


LAYOUTS = {
    "one prompt": SharedPrompts((5, 3, 4, 1), (3,)),
    "two prompts and one alone": SharedPrompts((5, 2, 3, 1, 6, 4, 7), (2, 2)),
    "one token each": SharedPrompts((1, 1, 1), (2,)),
    "long prompt": SharedPrompts((30, 1, 2, 9), (2,)),
    "one completion": SharedPrompts((4, 5, 3), (1,)),
}
OPTIONS = {
    "plain": {},
    "window of one": {"window": 1},
    "window": {"window": 4},
    "long window": {"window": 11},
    "softcap": {"softcap": 0.7},
    "softcap and window": {"softcap": 0.7, "window": 6},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_equals_each_sequence_alone(layout, options):
    assert max(errors(layout, **options)) < LIMIT


@pytest.mark.parametrize("seed", range(30))
def test_equals_each_sequence_alone_at_random(seed):
    rng = random.Random(seed)
    counts = [rng.randint(1, 4) for _ in range(rng.randint(1, 4))]
    num_pieces = len(counts) + sum(counts) + rng.randint(0, 3)
    lengths = [rng.choice((1, 2, 9)) + rng.randrange(5) for _ in range(num_pieces)]
    layout = SharedPrompts(tuple(lengths), tuple(counts))
    assert layout.max_seqlen == max(map(len, sequences(layout)))
    row = row_of(layout, heads=rng.choice(((4, 2), (3, 3), (4, 1))), seed=seed)
    for window in (None, rng.randint(1, 6), rng.randint(1, 25)):
        assert max(errors(layout, row, window=window)) < LIMIT, f"{window=}"


def test_a_long_window_is_one_call_for_all_completions():
    layout = LAYOUTS["two prompts and one alone"]
    cpu = torch.device("cpu")
    arguments = (layout.lengths, layout.num_completions)
    assert len(shared_prompts._blocks(*arguments, None, cpu)) == 2
    assert len(shared_prompts._blocks(*arguments, 4, cpu)) > 4


@pytest.mark.parametrize("window", [None, 4])
def test_R7_a_completion_sees_its_prompt_and_itself_alone(window):
    layout = LAYOUTS["two prompts and one alone"]
    row = row_of(layout, dtype=torch.float32)
    before = packed_attention(*row[:3], layout, scale=0.6, window=window)
    pieces = [range(*ends) for ends in pairwise(accumulate(layout.lengths, initial=0))]
    for own in pieces[2:]:  # all that are no prompts
        changed = [x.clone() for x in row[:3]]
        for x in changed:
            x[own.start : own.stop] += 3.0
        moved = packed_attention(*changed, layout, scale=0.6, window=window) != before
        assert moved[own.start : own.stop].any()
        moved[own.start : own.stop] = False
        assert not moved.any()


def one_sequence_of(real):
    """Completions of a prompt run into each other."""

    def blocks(lengths, counts, window, device):
        ends = pairwise(accumulate(counts, initial=len(counts)))
        joined = [sum(lengths[first:last]) for first, last in ends]
        rest = lengths[len(counts) + sum(counts) :]
        own = real((*lengths[: len(counts)], *joined, *rest), (1,) * len(counts), window, device)
        return own[0], *real(lengths, counts, window, device)[1:]

    return blocks


def key_one_off(real):
    """The last token of each prompt is not seen."""

    def blocks(lengths, counts, window, device):
        own, shared = real(lengths, counts, window, device)
        short = shared.of(
            range(shared.queries.start, shared.queries.stop),
            range(shared.keys.start, shared.keys.stop),
            lengths=shared.query_lens,
            key_lens=(shared.key_lens[0] - 1, shared.key_lens[1] + 1),
            window=(-1, -1),
            device=device,
        )
        return own, short

    return blocks


PLANTED = {
    "completions see each other": (shared_prompts, "_blocks", one_sequence_of),
    "prompts cut elsewhere": (shared_prompts, "_blocks", key_one_off),
    "merged without scale": (
        merging,
        "merge",
        lambda _: lambda output, lse, other, other_lse: output.add_(other).mul_(0.5),
    ),
}


@pytest.mark.parametrize("name", PLANTED)
def test_R7_planted_bugs_are_seen(name, monkeypatch):
    module, function, bug = PLANTED[name]
    monkeypatch.setattr(module, function, bug(getattr(module, function)))
    assert errors(LAYOUTS["two prompts and one alone"])[0] > 1e-3


def test_planted_a_prompt_whose_completions_give_it_no_gradient(monkeypatch):
    real = merging.add_key_gradients
    monkeypatch.setattr(
        shared_prompts, "add_key_gradients", lambda total, shares: real(total, shares[:1])
    )
    output, q, k, v = errors(LAYOUTS["one prompt"])
    assert max(output, q) < LIMIT
    assert min(k, v) > 1e-2


def test_counts_that_do_not_fit_are_refused():
    for counts in ((3,), (0, 1), (1, 1, 1), ()):
        with pytest.raises(ValueError, match="needs a completion"):
            SharedPrompts((4, 2, 2), counts)
