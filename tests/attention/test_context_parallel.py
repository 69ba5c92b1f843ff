"""Who computes which scores of a split row, what a block is, and who can share heads.

What the ranks then exchange is tested with processes in tests/trainer/test_context.py.
"""

from __future__ import annotations

import json
import random
from itertools import accumulate

import pytest
import torch

from hone.attention import blocks, flash
from hone.attention.blocks import AttentionBlock, merge
from hone.attention.context_parallel import _ring_plan
from hone.attention.token_shares import padded_tokens, token_ranges
from hone.config.plan import Devices, resolve
from hone.config.rules.finding import Finding
from hone.config.tree import SFTConfig
from hone.distributed.settings import ulysses_problem
from hone.families.model_facts import ModelFacts
from hone.rules import findings
from tests.tables import table

CPU = torch.device("cpu")
SIZES = [(ring, ulysses) for ring in (1, 2, 3, 4, 8) for ulysses in (1, 2, 3, 4)]


@table("ring, ulysses", SIZES)
def test_ranks_have_equal_parts_in_ascending_order(ring, ulysses):
    for num_tokens in (1, 2, 7, 24, 97, 1000):
        total = padded_tokens(num_tokens, ring=ring, ulysses=ulysses)
        assert num_tokens <= total < num_tokens + 2 * ring * ulysses
        everything = []
        for rank in range(ring * ulysses):
            ranges = token_ranges(
                total,
                ring=ring,
                ulysses=ulysses,
                ring_rank=rank // ulysses,
                ulysses_rank=rank % ulysses,
            )
            own = [t for tokens in ranges for t in tokens]
            assert len(own) == total // (ring * ulysses)
            assert own == sorted(own)
            everything += own
        assert sorted(everything) == list(range(total))


def seen(lengths, window):
    """[T, T] 1 where a query sees a key."""
    total = sum(lengths)
    visible = torch.zeros(total, total, dtype=torch.int64)
    for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False):
        for p in range(start, start + length):
            first = start if window is None else max(start, p - window + 1)
            visible[p, first : p + 1] = 1
    return visible


def scores_of(block):
    """[Tq, Tk] 1 where the block has a score, by the definition of its window."""
    visible = torch.zeros(sum(block.query_lens), sum(block.key_lens), dtype=torch.int64)
    left, right = block.window
    q0 = k0 = 0
    for lq, lk in zip(block.query_lens, block.key_lens, strict=True):
        for p in range(lq):
            aligned = p + lk - lq
            first = max(0, aligned - left) if left >= 0 else 0
            last = min(lk - 1, aligned + right) if right >= 0 else lk - 1
            assert first <= last
            visible[q0 + p, k0 + first : k0 + last + 1] = 1
        q0, k0 = q0 + lq, k0 + lk
    return visible


def positions(total, ring, rank):
    ranges = token_ranges(total, ring=ring, ulysses=1, ring_rank=rank, ulysses_rank=0)
    return torch.cat([torch.arange(tokens.start, tokens.stop) for tokens in ranges])


def computed(lengths, ring, window):
    """[T, T] how often the ring computes each score, and scores of each rank at each step."""
    total = sum(lengths)
    counts = torch.zeros(total, total, dtype=torch.int64)
    work = torch.zeros(ring, ring, dtype=torch.int64)
    for rank in range(ring):
        own = positions(total, ring, rank)
        for step, step_blocks in enumerate(_ring_plan(tuple(lengths), ring, rank, window, CPU)):
            visiting = positions(total, ring, (rank - step) % ring)
            for block in step_blocks:
                part = scores_of(block)
                counts[own[block.queries][:, None], visiting[block.keys][None]] += part
                work[rank, step] += part.sum()
    return counts, work


@table("ring", [2, 3, 4])
@table("seed", range(12))
def test_R7_every_score_is_computed_once_and_no_other(ring, seed):
    rng = random.Random(seed)
    lengths = [rng.choice((1, 2, 9, 25)) + rng.randrange(4) for _ in range(rng.randint(1, 6))]
    padding = padded_tokens(sum(lengths), ring=ring, ulysses=1) - sum(lengths)
    lengths += [padding] if padding else []
    for window in (None, 1, 2, rng.randint(3, 12), sum(lengths) - 1, sum(lengths)):
        counts, _ = computed(lengths, ring, window)
        assert torch.equal(counts, seen(lengths, window)), f"{lengths=} {window=}"


@pytest.mark.parametrize("ring", [2, 4])
def test_one_long_sequence_is_equal_work_for_all(ring):
    _, work = computed([32 * ring], ring, None)
    assert (work == work[0]).all()
    # Two rectangles of a chunk's size a step; at home one of them is two triangles.
    assert (work[0, 1:] == 2 * 16 * 16).all()
    assert work[0, 0] == 16 * 16 + 2 * (16 * 17 // 2)


def dense(q, k, v, visible, *, scale, softcap=None):
    """Output [Tq, Hq, D] and log-sum-exp [Hq, Tq] by the definition."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(visible == 0, float("-inf"))
    return torch.einsum("hqk,khd->qhd", scores.softmax(-1), v), scores.logsumexp(-1)


BLOCKS = {
    "packed": AttentionBlock.of(range(9), range(9), lengths=(4, 1, 4), window=(-1, 0), device=CPU),
    "packed, window": AttentionBlock.of(
        range(9), range(9), lengths=(6, 3), window=(2, 0), device=CPU
    ),
    "rectangle": AttentionBlock.of(range(7), range(3), window=(-1, -1), device=CPU),
    "corner": AttentionBlock.of(range(3), range(5), window=(2, 2), device=CPU),
}


@table("softcap", [None, 0.8])
@table("name", BLOCKS)
def test_block_equals_the_definition(name, softcap):
    block = BLOCKS[name]
    options = {"scale": 0.7, "softcap": softcap}
    shapes = [
        (sum(lens), heads, 5)
        for lens, heads in ((block.query_lens, 4), (block.key_lens, 2), (block.key_lens, 2))
    ]
    draw = torch.Generator().manual_seed(len(name))
    q, k, v = (torch.randn(s, generator=draw, dtype=torch.float64).requires_grad_() for s in shapes)
    expected, expected_lse = dense(q, k, v, scores_of(block), **options)
    output, lse = blocks.attend(q, k, v, block, **options)
    torch.testing.assert_close(output, expected)
    torch.testing.assert_close(lse, expected_lse)
    grad = torch.randn(output.shape, generator=draw, dtype=torch.float64)
    found = blocks.gradients(
        grad, q, k, v, block, output=output.detach(), lse=lse.detach(), **options
    )
    for a, b in zip(found, torch.autograd.grad(expected, (q, k, v), grad), strict=True):
        torch.testing.assert_close(a, b)


@table("distance", [0.0, 30.0, -30.0, 200.0])
def test_merging_halves_gives_the_whole(distance):
    """Also where one half outweighs the other beyond what exp can hold."""
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(n, 2, 8, generator=draw) for n in (5, 12, 12))
    k[:6] += distance * q.mean(0) / q.mean(0).norm(dim=-1, keepdim=True) ** 2
    all_keys = torch.ones(5, 12)
    expected, expected_lse = dense(*(x.double() for x in (q, k, v)), all_keys, scale=1.0)
    (output, lse), other = (
        dense(q, k[s], v[s], all_keys[:, s], scale=1.0) for s in (slice(6), slice(6, 12))
    )
    merge(output, lse, *other)
    torch.testing.assert_close(output.double(), expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(lse.double(), expected_lse, rtol=1e-5, atol=1e-5)


def test_flash_operators_take_these_arguments():
    """Shapes and types only: benchmarks/gpu/context_check.py runs the kernels themselves."""
    block = AttentionBlock.of(range(6), range(4), window=(-1, -1), device=torch.device("meta"))
    q, k, v = (
        torch.empty(n, h, 8, dtype=torch.bfloat16, device="meta")
        for n, h in ((6, 4), (4, 2), (4, 2))
    )
    output, lse = flash.attend_block(q, k, v, block, scale=0.5)
    assert (output.shape, lse.shape, lse.dtype) == (q.shape, (4, 6), torch.float32)
    found = flash.block_gradients(output, q, k, v, block, output=output, lse=lse, scale=0.5)
    assert [x.shape for x in found] == [q.shape, k.shape, v.shape]


@table(
    "size, heads, key_heads",
    [(1, 5, 5), (4, 8, 4), (4, 8, 2), (4, 8, 1), (8, 32, 8), (16, 32, 8)],
)
def test_heads_that_can_be_shared(size, heads, key_heads):
    assert ulysses_problem(size, heads, key_heads) is None


def facts_of(tmp_path, **config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return ModelFacts.read(str(tmp_path))


def told_of(
    key: str, size: int, facts: ModelFacts | None, tensor_parallel_size: int = 1
) -> list[Finding]:
    """What the rules say of so many processes that share the heads of a model."""
    parallel = {"ulysses_size": size, "tensor_parallel_size": tensor_parallel_size}
    cfg = SFTConfig.model_validate(
        {"model": {"path": "."}, "data": {"train": []}, "trainer": {"parallel": parallel}}
    )
    return [x for x in findings(resolve(cfg, facts, Devices())) if x.keys[0] == key]


@table(
    "size, heads, tensor, allowed",
    [(3, (8, 4), 1, "1, 2, 4, 8"), (4, (12, 6), 1, "1, 2, 3, 6, 12"), (8, (16, 8), 4, "1, 2, 4")],
)
def test_heads_that_cannot_be_shared_are_an_error(tmp_path, size, heads, tensor, allowed):
    facts = facts_of(tmp_path, num_attention_heads=heads[0], num_key_value_heads=heads[1])
    key = "trainer.parallel.ulysses_size"
    (finding,) = told_of(key, size, facts, tensor_parallel_size=tensor)
    assert finding.level == "error"
    assert finding.message.startswith(f"{key} is {size}, for the model at model.path: ")
    assert f"sizes that do: {allowed}. " in finding.message


def test_heads_of_an_unknown_model_are_not_judged(tmp_path):
    key = "trainer.parallel.ulysses_size"
    assert not told_of(key, 3, None)
    assert not told_of(key, 3, facts_of(tmp_path, hidden_size=8))
    assert not told_of(key, 3, facts_of(tmp_path, num_attention_heads=9))
