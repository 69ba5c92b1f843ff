"""The experts of decode steps on a GPU: kernels beside torch, and what they take.

    python -m benchmarks.gpu.experts_check [SECTION ...] [--seconds N]

Sections; that with a star runs only when it is named:

    equal      sum_parts against float64, for rows of 1 to 1,024 tokens, softmax and sigmoid scores
    time       a layer's experts of Qwen3-30B-A3B in a CUDA graph, beside the limit of its bandwidth
    layers     whole layers of Qwen3-30B-A3B and GLM-4.5-Air, fused and as transformers has them
    tiles *    every sensible tile of both products
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from benchmarks.gpu.models import build
from benchmarks.gpu.sections import Run
from torch import Tensor

from hone.models import expert_kernels, experts, layer_kernels, layer_ops, product_kernels
from hone.models.decoder import alias_module, hidden_states
from hone.models.experts import Experts, SigmoidScores
from hone.models.fused_layers import FusedDecoder

SECTIONS = ("equal", "time", "layers", "tiles")
WIDTH, INNER, NUMBER, PER_TOKEN = 2048, 768, 128, 8
BATCHES = (1, 4, 16, 64, 128, 256, 512)
DEVICE = "cuda"
COPIES = 4
"""Layers with weights of their own: those of one would stay in the cache."""


def normal(*shape: int, seed: int, scale: float = 1.0) -> Tensor:
    draw = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(shape, generator=draw, device=DEVICE) * scale).bfloat16()


def mixture(seed: int) -> Experts:
    return Experts(
        router=normal(NUMBER, WIDTH, seed=seed, scale=WIDTH**-0.5),
        gate_up=normal(NUMBER, 2 * INNER, WIDTH, seed=seed + 1, scale=WIDTH**-0.5),
        down=normal(NUMBER, WIDTH, INNER, seed=seed + 2, scale=INNER**-0.5),
        per_token=PER_TOKEN,
        normalises=True,
    )


def graph_us(work: Callable[[], Any], repeats: int = 20) -> float:
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for _ in range(3):
        graph.replay()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(repeats):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return 1e3 * start.elapsed_time(end) / repeats


def bandwidth() -> float:
    """Bytes a second of reading much memory."""
    x = torch.empty(1 << 31, dtype=torch.uint8, device=DEVICE).view(torch.int64)
    return x.nbytes / (graph_us(lambda: x.sum(), 5) * 1e-6)


def in_float64(x: Tensor, logits: Tensor, own: Experts) -> Tensor:
    """[T, D], by experts one after the other."""
    ids, gates = experts.route(logits, own)
    total = torch.zeros(x.shape, dtype=torch.float64, device=DEVICE)
    for expert in range(NUMBER):
        token, choice = (ids == expert).nonzero(as_tuple=True)
        if len(token):
            gate, up = (x[token].double() @ own.gate_up[expert].double().T).chunk(2, -1)
            rows = (F.silu(gate) * up) @ own.down[expert].double().T
            total.index_add_(0, token, rows * gates[token, choice].double().unsqueeze(-1))
    return total


def equal(run: Run) -> None:
    run.row("experts against float64", "kernels", "torch")
    softmax = mixture(0)
    correction = normal(NUMBER, seed=4).float() / 4
    sigmoid = replace(softmax, sigmoid=SigmoidScores(correction, scale=2.5))
    for tokens, own in itertools.product((1, 3, 64, 100, 257, 1024), (softmax, sigmoid)):
        x = normal(tokens, WIDTH, seed=9)
        logits = experts.router_logits(x, own)
        expected = in_float64(x, logits, own)
        found = (expert_kernels.sum_parts(x, logits, own).sum(0), experts.sum_experts(x, own))
        errors = [float((y.double() - expected).norm() / expected.norm()) for y in found]
        run.row(f"{tokens} tokens", *(f"{error:.2e}" for error in errors))
        run.check(f"{tokens} tokens", errors[0] < 1.1 * errors[1] + 1e-4)


def touched_bytes(x: Tensor, own: Experts) -> float:
    """Of weights that the experts of these tokens have."""
    ids, _ = experts.route(F.linear(x, own.router), own)
    return 2 * 3 * INNER * WIDTH * len(ids.unique())


def time_experts(run: Run) -> None:
    rate = bandwidth()
    run.row(
        f"us of a layer's experts, {rate / 1e12:.2f} TB/s", "limit", "kernels", "share", "torch"
    )
    own = [mixture(10 * i) for i in range(COPIES)]
    for tokens in BATCHES:
        x = normal(tokens, WIDTH, seed=9)
        limit = sum(touched_bytes(x, m) for m in own) / COPIES / rate * 1e6
        fused = graph_us(lambda x=x: [layer_kernels.sum_experts(x, m) for m in own]) / COPIES
        plain = graph_us(lambda x=x: [experts.sum_experts(x, m) for m in own]) / COPIES
        run.row(f"{tokens} tokens", limit, fused, limit / fused, plain)


def tiles(run: Run) -> None:
    own = [mixture(10 * i) for i in range(COPIES)]
    options = [
        product_kernels.Tile(0, columns, depth, 1, warps, stages)
        for columns, depth, warps, stages in itertools.product(
            (64, 128), (64, 128), (4, 8), (3, 4, 5)
        )
    ]
    for tokens in (1, 16, 64, 256):
        x = normal(tokens, WIDTH, seed=9)
        logits = [F.linear(x, m.router) for m in own]
        chosen = expert_kernels.choose_tiles(tokens, own[0])
        assert chosen is not None
        found: list[tuple[float, str]] = []
        for rows in {16, chosen[0].rows, 2 * chosen[0].rows}:
            base = [tile._replace(rows=rows) for tile in chosen]
            for place, tile in itertools.product((0, 1), options):
                pair = list(base)
                pair[place] = tile._replace(rows=rows)
                try:
                    us = graph_us(
                        lambda x=x, pair=pair, logits=logits: [
                            expert_kernels.sum_parts(x, y, m, tuple(pair))
                            for m, y in zip(own, logits, strict=True)
                        ],
                        5,
                    )
                except Exception as error:  # noqa: BLE001  # a tile may need too much of anything
                    found.append((9e9, f"{place} {tile} {type(error).__name__}"))
                    continue
                found.append((us / COPIES, f"{'gate_up' if place == 0 else 'down'} {pair[place]}"))
            if not run.has_time(f"tiles of {tokens}"):
                break
        run.row(f"{tokens} tokens", f"now {chosen[0]}")
        for us, name in sorted(found)[:14]:
            run.row(f"  {us:8.1f}  {name}")


def layers(run: Run) -> None:
    """Decoder layers whose attention reads short contexts."""
    for shape in ("qwen3-30b-a3b", "glm-4.5-air"):
        layers_of(run, shape)


def layers_of(run: Run, shape: str) -> None:
    from benchmarks.gpu.layers_check import Cache
    from benchmarks.gpu.layers_check import tokens as make_ids

    model = build(shape, num_layers=COPIES)
    decoder = FusedDecoder(model, layer_ops.LayerOps(layer_ops.choose_kernels(model.device)))
    stock = alias_module(model)
    params = sum(p.numel() for p in model.model.layers[-1].parameters())
    run.row(
        f"{shape}: us of a layer of {params / 1e6:.0f} M parameters",
        "fused",
        "transformers",
        "apart",
    )
    with torch.inference_mode():
        for batch in (1, 16, 64, 256):
            cache = Cache(model, batch, 64)
            positions, context = cache.context([40] * batch, [1] * batch, is_decode=True)
            inputs = (make_ids(batch), positions, context)
            fused = graph_us(partial(decoder, *inputs)) / COPIES
            plain = graph_us(partial(hidden_states, stock, *inputs)) / COPIES
            ours, theirs = decoder(*inputs).double(), hidden_states(stock, *inputs).double()
            # Of half the tokens: where two experts score almost alike, one or the other is chosen.
            apart = float(((ours - theirs).norm(dim=1) / theirs.norm(dim=1)).median())
            run.check(f"{batch} tokens", apart < 0.02, fused, plain, f"{apart:.1e}")


def main() -> None:
    run = Run(__doc__, SECTIONS, on_request=SECTIONS[3:], seconds=240)
    run.row(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    work = (equal, time_experts, layers, tiles)
    with torch.inference_mode():
        sys.exit(
            run.go({name: partial(part, run) for name, part in zip(SECTIONS, work, strict=True)})
        )


if __name__ == "__main__":
    main()
