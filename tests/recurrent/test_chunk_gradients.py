"""Gradients inside of chunks against autograd of the formulas in the module's text."""

import torch

from hone.attention.recurrent.chunk_gradients import (
    ChunkInputs,
    chunk_gradients,
    chunk_places,
    into_chunks,
    out_of_chunks,
)
from hone.segments import Segment, plan_segments

L, K, V = 8, 5, 6


def test_gradients_are_those_of_autograd():
    torch.manual_seed(torch.seed() % 2**31)
    lengths = torch.tensor([L, 5, 1])
    shape, dtype = (len(lengths), 2), torch.float64
    is_token = torch.arange(L) < lengths[:, None]
    q, k, w, u, do = (
        torch.randn(*shape, L, size, dtype=dtype) * is_token[:, None, :, None]
        for size in (K, K, K, V, V)
    )
    h, dh = (torch.randn(*shape, K, V, dtype=dtype) for _ in range(2))
    decays = -torch.rand(*shape, L, dtype=dtype)
    total = decays.cumsum(-1)
    scale = K**-0.5
    learnt = [x.clone().requires_grad_() for x in (q, k, w, total)]
    fixed = {"u": u, "h": h, "lasts": lengths - 1, "is_token": is_token, "do": do, "dh": dh}
    expected, d_values, values = by_autograd(*learnt, **fixed, scale=scale)
    inputs = ChunkInputs(q, k, values, do, d_values, total)
    found = chunk_gradients(inputs, lengths - 1, h, dh, scale)
    for one, other in zip(found, expected, strict=True):
        chosen = is_token[:, None].expand(one.shape[:3])
        torch.testing.assert_close(one[chosen].double(), other[chosen], atol=2e-5, rtol=2e-5)


def by_autograd(q, k, w, total, *, u, h, lasts, is_token, do, dh, scale):
    values = u - w @ h
    values.retain_grad()
    pairs = (total[..., :, None] - total[..., None, :]).tril().exp().tril()
    output = scale * (total.exp()[..., None] * (q @ h) + (q @ k.mT * pairs) @ values)
    end = total.gather(2, lasts[:, None, None].expand(-1, total.shape[1], 1))
    to_end = torch.where(is_token[:, None], (end - total).exp(), 0.0)
    last = end[..., None].exp() * h + (k * to_end[..., None]).mT @ values
    ((output * do).sum() + (last * dh).sum()).backward()
    return [x.grad for x in (q, k, w, total)], values.grad, values.detach()


def test_tokens_go_into_chunks_and_come_out():
    segments = [Segment(0, 3), Segment(3, 1), Segment(4, 5)]
    (level,) = plan_segments(segments, torch.as_tensor).levels
    assert level.chunks.tolist() == [[0, 0], [1, 0], [2, 0]]
    chunks = torch.tensor([[0, 0], [1, 0], [2, 0], [2, 1]])
    places = chunk_places(level.cu_seqlens, chunks, 4)
    assert places.tolist() == [[0, 1, 2, -1], [3, -1, -1, -1], [4, 5, 6, 7], [8, -1, -1, -1]]
    for shape in ((9, 2), (9, 2, 3)):
        x = torch.randn(shape)
        cut = into_chunks(x, places, 4)
        for chunk, own in zip(cut, places.tolist(), strict=True):
            for number, place in enumerate(own):
                wanted = torch.zeros(shape[1:]) if place < 0 else x[place]
                assert torch.equal(chunk[::2, number], wanted)
                assert torch.equal(chunk[1::2, number], wanted)
        assert torch.equal(out_of_chunks(cut[:, ::2], places, 9), x)
