"""One of four processes that compare context parallelism with one process (`tests.ranks`).

Rank 0 prints JSON. Every case is a largest error over ranks, relative where gradients of parameters
are concerned. A mesh of two context ranks exists twice, side by side along the data axis, on the
same rows.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import random
import sys
from collections.abc import Callable
from contextlib import contextmanager
from datetime import timedelta
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from hone.attention import (
    ContextParallel,
    PackedContext,
    context_parallel,
    reference,
)
from hone.attention.interface import attention
from hone.attention.token_shares import padded_tokens, token_ranges
from hone.distributed.joined import JoinedMesh
from hone.distributed.mesh import Mesh
from hone.distributed.settings import AxisSizes
from hone.models.decoder import hidden_states
from hone.trainer import context as trainer_context
from hone.trainer.collating import collate
from hone.trainer.context import gather, split
from hone.trainer.logprobs import token_logprobs
from hone.types import Row
from tests.trainer.examples import VOCAB, random_rows, tiny_model

WORLD = 4
TIMEOUT = timedelta(seconds=300)
MESHES = {
    "ring 2": AxisSizes(data=2, ring=2),
    "ring 4": AxisSizes(ring=4),
    "ulysses 2": AxisSizes(data=2, ulysses=2),
    "ulysses 4": AxisSizes(ulysses=4),
    "ring 2 x ulysses 2": AxisSizes(ring=2, ulysses=2),
}
PACKINGS = {
    "one token": (1,),
    "three tokens": (1, 1, 1),
    "one sequence": (37,),
    "longer than a chunk": (3, 29, 2),
    "borders at chunks": (8, 8, 8, 8),
    "divides": (5, 11, 16),
}
HEADS = {"4 on 4": (4, 4), "8 on 2": (8, 2), "4 on 1": (4, 1)}
OPTIONS = {
    "plain": {},
    "window": {"sliding_window": 5},
    "window of one": {"sliding_window": 1},
    "softcap and window": {"softcap": 0.7, "sliding_window": 9},
}
RINGS = tuple(name for name in MESHES if "ring" in name)


def largest(error: float) -> float:
    """Of all ranks."""
    value = torch.tensor(error, dtype=torch.float64)
    dist.all_reduce(value, dist.ReduceOp.MAX)
    return value.item()


# ---------------------------------------------------------------- attention alone


def attention_errors(
    mesh: Mesh, lengths, *, heads=(4, 2), dtype=torch.float64, seed=0, **options
) -> tuple[float, float]:
    """Of the output and of the gradients of q, k and v, against float64 attention of the row."""
    sizes = {"ring": mesh.ring.size, "ulysses": mesh.ulysses.size}
    total = padded_tokens(sum(lengths), **sizes)
    if total > sum(lengths):
        lengths = (*lengths, total - sum(lengths))
    draw = torch.Generator().manual_seed(seed)
    shapes = [(total, h, 8) for h in (heads[0], heads[1], heads[1], heads[0])]
    row = [torch.randn(shape, generator=draw, dtype=torch.float64) for shape in shapes]
    ranges = token_ranges(total, **sizes, ring_rank=mesh.ring.rank, ulysses_rank=mesh.ulysses.rank)
    own = torch.cat([torch.arange(tokens.start, tokens.stop) for tokens in ranges])

    whole = [x.clone().requires_grad_() for x in row[:3]]
    settings = {"window": options.get("sliding_window"), "softcap": options.get("softcap")}
    expected = reference.packed_attention(*whole, tuple(lengths), scale=0.4, **settings)
    expected.backward(row[3])

    context = dataclasses.replace(
        PackedContext.from_lengths(lengths),
        parallel=ContextParallel(ring=mesh.ring, ulysses=mesh.ulysses),
    )
    parts = [x[own].to(dtype).transpose(0, 1)[None].requires_grad_() for x in row[:3]]
    output, _ = attention(
        nn.Module(), *parts, None, scaling=0.4, attention_context=context, **options
    )
    output.backward(row[3][own].to(dtype)[None])
    forward = (output[0] - expected[own]).abs().max().item()
    backward = max(
        (part.grad[0].transpose(0, 1) - x.grad[own]).abs().max().item()
        for part, x in zip(parts, whole, strict=True)
    )
    return largest(forward), largest(backward)


def attention_cases(meshes: dict[str, Mesh], results: dict) -> None:
    for name, mesh in meshes.items():
        for packing, lengths in PACKINGS.items():
            results[f"attention/{name}/{packing}"] = attention_errors(mesh, lengths)
        for label, heads in HEADS.items():
            results[f"attention/{name}/{label}"] = attention_errors(mesh, (9, 1, 20), heads=heads)
        for label, options in OPTIONS.items():
            results[f"attention/{name}/{label}"] = attention_errors(mesh, (4, 30, 9), **options)
        rng = random.Random(name)
        for number in range(12):
            lengths = tuple(rng.choice((1, 2, 7, 30)) + rng.randrange(6) for _ in range(6))
            window = rng.choice((None, None, rng.randint(1, 40)))
            results[f"attention/{name}/random {number}"] = attention_errors(
                mesh, lengths[: rng.randint(1, 6)], seed=number, sliding_window=window
            )
        results[f"float32/{name}"] = attention_errors(mesh, (50, 3, 70), dtype=torch.float32)


# ---------------------------------------------------------------- a model


def batch_of(rows):
    weights = [1 / (1 + i) for i in range(len(rows))]
    return collate(rows, weights, "cpu")


def objective(logprobs_N, entropy_N, batch):
    """Not linear in its inputs, so that a token's gradient depends on its own values."""
    return ((logprobs_N**2 - 0.3 * entropy_N) * batch.weights).sum()


def scores_alone(model, batch):
    context = PackedContext.from_lengths(batch.lengths)
    hidden = hidden_states(model, batch.input_ids, batch.position_ids, context)
    return token_logprobs(
        model,
        hidden[batch.predict_index],
        batch.labels,
        temperature=0.9,
        chunk_tokens=16,
        with_entropy=True,
    )


def scores_split(model, batch, mesh, change=lambda share: share):
    share = change(split(batch, mesh))
    hidden = hidden_states(model, share.input_ids, share.position_ids, share.context)
    values = token_logprobs(
        model,
        hidden[share.predict_index],
        share.labels,
        temperature=0.9,
        chunk_tokens=16,
        with_entropy=True,
    )
    return gather(torch.stack(values, dim=1), share).unbind(1)


def model_errors(model, rows, mesh, **options) -> tuple[float, float]:
    """Of log-probs and entropy, and relative of the worst parameter's gradient."""
    batch = batch_of(rows)
    alone, parallel = model, copy.deepcopy(model)
    expected = scores_alone(alone, batch)
    alone.zero_grad()
    objective(*expected, batch).backward()
    found = scores_split(parallel, batch, mesh, **options)
    objective(*found, batch).backward()
    # Where a gradient is zero in theory (of queries that see one key) only rounding is left of it.
    floor = 1e-2 * max(p.grad.norm() for p in alone.parameters())
    worst = 0.0
    for one, other in zip(alone.parameters(), parallel.parameters(), strict=True):
        dist.all_reduce(other.grad, group=mesh.context.group)
        distance = (one.grad - other.grad).norm() / max(one.grad.norm(), floor)
        worst = max(worst, distance.item())
    error = max((a - b).abs().max().item() for a, b in zip(expected, found, strict=True))
    return largest(error), largest(worst)


def one_sequence(num_tokens, trained):
    rng = random.Random(num_tokens)
    ids = [rng.randrange(VOCAB) for _ in range(num_tokens)]
    return bare("x", ids, [t in trained for t in range(num_tokens)])


def bare(name, token_ids, loss_mask):
    return Row(id=name, token_ids=token_ids, loss_mask=loss_mask)


def uneven_rows(number, seed, max_completion=24):
    rows = random_rows(number, seed=seed, max_completion=max_completion)
    return [bare(row.id, row.token_ids, row.loss_mask) for row in rows]


def model_cases(meshes: dict[str, Mesh], results: dict) -> None:
    rows = {
        "uneven rows": uneven_rows(7, seed=3),
        "more rows": uneven_rows(12, seed=4, max_completion=60),
        "one long row": [one_sequence(101, set(range(1, 101)))],
        "one trained token": [one_sequence(41, {40})],
        "two tokens": [one_sequence(2, {1})],
        "a pass without rows": [bare("", [0] * 4, [False, True, True, True])],
    }
    models = {
        "qwen3": tiny_model(),
        "gemma3_text": tiny_model(
            "gemma3_text", sliding_window=6, layer_types=["sliding_attention", "full_attention"]
        ),
        "gemma2": tiny_model("gemma2", sliding_window=6, attn_logit_softcapping=2.0),
    }
    for name, mesh in meshes.items():
        for label, chosen in rows.items():
            results[f"model/{name}/{label}"] = model_errors(models["qwen3"], chosen, mesh)
        for family in ("gemma3_text", "gemma2"):
            results[f"model/{name}/{family}"] = model_errors(
                models[family], rows["uneven rows"], mesh
            )
        results[f"isolation/{name}"] = neighbour_moves(models["qwen3"], rows["uneven rows"], mesh)


def neighbour_moves(model, rows, mesh) -> float:
    """How far other rows' log-probs move when one row's tokens change, over each row."""
    moved = 0.0
    with torch.no_grad():
        before, _ = scores_split(model, batch_of(rows), mesh)
        for i, row in enumerate(rows):
            other = bare(row.id, [(t + 7) % VOCAB for t in row.token_ids], row.loss_mask)
            batch = batch_of([*rows[:i], other, *rows[i + 1 :]])
            after, _ = scores_split(model, batch, mesh)
            others = batch.sequence_index != i
            moved = max(moved, (after - before)[others].abs().max().item())
            assert (after - before)[~others].abs().max() > 1e-3
    return largest(moved)


# ---------------------------------------------------------------- planted bugs


@contextmanager
def planted(name: str, value, module=context_parallel):
    with mock.patch.object(module, name, value):
        context_parallel._ring_plan.cache_clear()
        yield
    context_parallel._ring_plan.cache_clear()


def unscaled_merge(output, lse, other, other_lse):
    output.add_(other).mul_(0.5)
    torch.logaddexp(lse, other_lse, out=lse)


def whole_chunks(borders, chunk, a, b, window):
    if b < a:
        yield range(a * chunk, (a + 1) * chunk), range(b * chunk, (b + 1) * chunk), (-1, -1)


def one_token_more(real: Callable):
    def rectangles(borders, chunk, a, b, window):
        for queries, keys, visible in real(borders, chunk, a, b, window):
            yield queries, range(max(keys.start - 1, b * chunk), keys.stop), visible

    return rectangles


def summed_gradient(ctx, *grads):
    dist.all_reduce(grads[0])
    return grads[0].index_select(0, ctx.own), None


def in_order(share):
    return dataclasses.replace(share, position_ids=torch.arange(len(share.position_ids)))


def planted_cases(meshes: dict[str, Mesh], results: dict) -> None:
    rows, model, ring = uneven_rows(7, seed=3), tiny_model(), meshes["ring 4"]
    real_numbers = context_parallel.chunk_numbers

    def split_only(share):
        # Tokens are split as they should be, then the ring takes chunks for neighbours.
        context_parallel.chunk_numbers = lambda ring, rank: (2 * rank, 2 * rank + 1)
        return share

    context_parallel._ring_plan.cache_clear()
    results["planted/chunk order"] = model_errors(model, rows, ring, change=split_only)
    context_parallel.chunk_numbers = real_numbers
    with planted("merge", unscaled_merge):
        results["planted/no rescaling"] = model_errors(model, rows, ring)
    with planted("_rectangles", whole_chunks):
        results["planted/whole chunks"] = model_errors(model, rows, ring)
        results["planted/whole chunks leak"] = neighbour_moves(model, rows, ring)
    with planted("_rectangles", one_token_more(context_parallel._rectangles)):
        results["planted/one token more"] = model_errors(model, rows, ring)
        results["planted/one token more leaks"] = neighbour_moves(model, rows, ring)
    results["planted/positions"] = model_errors(model, rows, ring, change=in_order)
    with mock.patch.object(trainer_context._Gather, "backward", staticmethod(summed_gradient)):
        results["planted/summed gradient"] = model_errors(model, rows, ring)
    results["planted/none"] = model_errors(model, rows, ring)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=TIMEOUT)
    cpu = torch.device("cpu")
    meshes = {
        name: JoinedMesh.of_group(sizes, cpu, timeout=TIMEOUT) for name, sizes in MESHES.items()
    }
    results: dict = {}
    attention_cases(meshes, results)
    model_cases(meshes, results)
    planted_cases(meshes, results)
    if dist.get_rank() == 0:
        json.dump(results, sys.stdout)
    dist.barrier()
    dist.destroy_process_group()
