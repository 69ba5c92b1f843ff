"""Weights of 8-bit codes on CUDA: their products beside plain ones, and decode steps with them.

    python -m benchmarks.gpu.int8_check [SECTION ...] [--shape qwen3-8b] [--seconds N]

Sections; the one with a star runs only when it is named:

    products   errors against float64, times of a layer's products, plain and packed
    tiles *    every tile for each of these products
    experts    a layer of Qwen3-30B-A3B's experts: errors against float64, times, plain and packed
    parity     an engine with packed weights against a packed forward: mean k3, ratios outside
    sync       how long a sync into such an engine takes, its proof, a planted wrong byte
    steps      decode steps of B sequences with 1,024 tokens, plain and packed
"""

from __future__ import annotations

import argparse
import gc
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from time import perf_counter

import torch
from benchmarks.gpu.engine_check import decode_speed, parity
from benchmarks.gpu.sections import Run
from torch import Tensor

from hone.engine.engine import EmbeddedEngine
from hone.engine.settings import EngineConfig
from hone.families.shape import ModelShape
from hone.models import layer_kernels
from hone.models.expert_kernels import choose_tiles, sum_parts
from hone.models.experts import Experts, route
from hone.models.int8_kernels import choose_tile, int8_product
from hone.models.int8_kernels import unpack_rows as unpack_on_gpu
from hone.models.int8_rows import pack_rows, unpack_rows
from hone.models.load import blank_model, load_model
from hone.models.manifest import export_weights
from hone.models.product_kernels import Tile
from hone.models.settings import ModelConfig
from hone.models.tiny import SHAPES, make_model_folder
from hone.weights.sync import WeightSync

ROWS = (1, 8, 32, 64, 128, 256, 512)
BANDWIDTH = 4.29e12
CONTEXT = 1024
ROTATED_BYTES = 400 << 20
"""Weights that calls take in turn, so that none is in the cache."""


def products_of(shape: str) -> dict[str, tuple[int, int, dict[str, bool]]]:
    """Outputs, inputs and kind of a layer's products."""
    config = SHAPES[shape]
    width, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_heads"] * config["head_dim"]
    keys = config["num_kv_heads"] * config["head_dim"]
    return {
        "q, k, v": (heads + 2 * keys, width, {}),
        "o": (width, heads, {"split": True}),
        "gate, up": (2 * inner, width, {"gated": True}),
        "down": (width, inner, {"split": True}),
    }


def plain(x: Tensor, weight: Tensor, kind: dict[str, bool]) -> Tensor:
    if "gated" in kind:
        return layer_kernels.gated_linear(x, weight, None)
    if "split" in kind:
        return layer_kernels.sum_linear(x, weight, None)
    return layer_kernels.linear(x, weight, None)


def graph_us(call: Callable[[int], object], count: int, repeats: int = 9) -> float:
    """Microseconds of a call in a recorded graph of `count`, each with other weights."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):  # `torch.cuda.graph` also collects garbage, which takes long
        call(0)
        torch.cuda.synchronize()
        graph.capture_begin()
        for i in range(count):
            call(i)
        graph.capture_end()
    torch.cuda.synchronize()
    times: list[float] = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / count)
    return sorted(times)[repeats // 2]


def make_weights(outputs: int, inputs: int) -> tuple[list[Tensor], list[Tensor]]:
    count = max(2, min(40, ROTATED_BYTES // (outputs * inputs)))
    weights = [
        torch.randn(outputs, inputs, device="cuda", dtype=torch.bfloat16) / inputs**0.5
        for _ in range(count)
    ]
    return weights, [pack_rows(weight) for weight in weights]


@torch.inference_mode()
def products(run: Run) -> None:
    shape = run.args.shape
    weights, packed = make_weights(1536, 1024)
    wide = unpack_rows(packed[0], torch.float64)
    run.check("unpacking", torch.equal(unpack_on_gpu(packed[0], torch.bfloat16), wide.bfloat16()))
    off = ((wide - weights[0].double()).abs().amax(1) / weights[0].double().abs().amax(1)).max()
    run.check("rounding, of a row's largest <= 1/254", bool(off <= 1 / 253), f"{float(off):.2e}")
    run.row(f"{shape}: us", "rows", "plain", "packed", "unpacked first", "limit", "error")
    for name, (outputs, inputs, kind) in products_of(shape).items():
        weights, packed = make_weights(outputs, inputs)
        for rows in ROWS:
            if not run.has_time(name):
                return
            x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
            error = error_of(x, packed[0], kind)
            if error > 6e-3:
                run.check(f"{name}, {rows} rows", False, f"{error:.1e}")
            count = len(weights)
            limit = outputs * inputs / BANDWIDTH * 1e6
            run.row(
                name,
                rows,
                graph_us(lambda i: plain(x, weights[i], kind), count),  # noqa: B023
                graph_us(lambda i: plain(x, packed[i], kind), count),  # noqa: B023
                graph_us(
                    lambda i: plain(x, unpack_on_gpu(packed[i], x.dtype), kind),  # noqa: B023
                    count,
                ),
                limit,
                f"{error:.1e}",
            )


def error_of(x: Tensor, packed: Tensor, kind: dict[str, bool]) -> float:
    exact = x.double() @ unpack_rows(packed, torch.float64).T
    if "gated" in kind:
        gate, up = exact.chunk(2, -1)
        exact = torch.nn.functional.silu(gate) * up
    found = plain(x, packed, kind)
    found = found.sum(0) if found.ndim == 3 else found
    return float((found.double() - exact).norm() / exact.norm())


def all_tiles(rows: int, kind: dict[str, bool]) -> Iterator[Tile]:
    """Those that are worth trying for so many rows."""
    fitting = min(max(1 << (rows - 1).bit_length(), 16), 128)
    parts = 2 if "gated" in kind else 1
    for tile_rows, (columns, warps), depth, stages in itertools.product(
        sorted({fitting, max(fitting // 2, 16)}),
        ((64, 4), (128, 4), (128, 8)),
        (128, 256),
        (3, 4, 6),
    ):
        shared = stages * depth * (2 * tile_rows + columns * parts)
        registers = 2 * parts * tile_rows * columns // (32 * warps)
        if shared < 220_000 and registers <= 160:
            for splits in (1, 2, 4) if "split" in kind else (1,):
                yield Tile(tile_rows, columns, depth, splits, warps, stages)


@torch.inference_mode()
def tiles(run: Run) -> None:
    shape = run.args.shape
    run.row(f"{shape}: us", "rows", "chosen", "best", "second", "third", "limit")
    for name, (outputs, inputs, kind) in products_of(shape).items():
        _, packed = make_weights(outputs, inputs)
        for rows in (8, 32, 64, 128, 256):
            x = torch.randn(rows, inputs, device="cuda", dtype=torch.bfloat16)
            found: list[tuple[float, Tile]] = []
            for tile in all_tiles(rows, kind):
                fits = inputs % (tile.depth * tile.splits) == 0
                if not fits or not run.has_time(name):
                    continue
                try:
                    us = graph_us(
                        lambda i, t=tile: int8_product(x, packed[i], None, **kind, tile=t),  # noqa: B023
                        min(len(packed), 6),
                        5,
                    )
                except Exception as error:  # noqa: BLE001  out of resources: another tile
                    run.note(f"{tile}: {type(error).__name__}")
                    torch.cuda.synchronize()
                    continue
                found.append((us, tile))
            found.sort()
            chosen = choose_tile(
                rows, outputs, inputs, gated="gated" in kind, split="split" in kind
            )
            known = {tile: us for us, tile in found}
            best = [f"{us:.1f} {'/'.join(map(str, tile))}" for us, tile in found[:6]]
            limit = outputs * inputs / BANDWIDTH * 1e6
            run.note(f"{name} {rows}: chosen {known.get(chosen)} limit {limit:.1f}; {best}")
            run.row(name, rows, known.get(chosen, "-"), *(us for us, _ in found[:3]), limit)


@torch.inference_mode()
def experts(run: Run) -> None:
    number, width, inner, per_token = 128, 2048, 768, 8
    layers: list[tuple[Experts, Experts]] = []
    for seed in range(3):
        torch.manual_seed(seed)
        router, gate_up, down = (
            torch.randn(*size, device="cuda", dtype=torch.bfloat16) / size[-1] ** 0.5
            for size in ((number, width), (number, 2 * inner, width), (number, width, inner))
        )
        plain_one = Experts(
            router=router, gate_up=gate_up, down=down, per_token=per_token, normalises=True
        )
        codes = replace(plain_one, gate_up=pack_rows(gate_up), down=pack_rows(down))
        layers.append((plain_one, codes))
    run.row("experts: us", "tokens", "plain", "packed", "limit", "error", "best tiles")
    for tokens in (1, 16, 64, 128, 256, 512):
        if not run.has_time("experts"):
            return
        x = torch.randn(tokens, width, device="cuda", dtype=torch.bfloat16)
        touched = number * (1 - (1 - per_token / number) ** tokens)
        limit = touched * 3 * width * inner / BANDWIDTH * 1e6
        error = error_of_experts(x, layers[0][1])
        times = [
            graph_us(lambda i, k=kind: layer_kernels.sum_experts(x, layers[i][k]), 3)  # noqa: B023
            for kind in (0, 1)
        ]
        run.check(f"{tokens} tokens", error < 6e-3, *times, limit, f"{error:.1e}")
        found: list[tuple[float, str]] = []
        chosen = choose_tiles(tokens, layers[0][1])
        assert chosen is not None
        for first, second in itertools.product(expert_tiles(chosen[0]), expert_tiles(chosen[1])):
            if first != chosen[0] and second != chosen[1]:
                continue  # one at a time

            def call(i: int, tiles=(first, second)) -> Tensor:
                logits = layer_kernels.linear(x, layers[i][1].router, None)  # noqa: B023
                return sum_parts(x, logits, layers[i][1], tiles)  # noqa: B023

            found.append((graph_us(call, 3, 5), f"{tuple(first)} {tuple(second)}"))
        found.sort()
        run.note(f"{tokens}: {found[:5]}")


def expert_tiles(chosen: Tile) -> Iterator[Tile]:
    yield chosen
    for tokens, columns, depth, warps, stages in itertools.product(
        sorted({chosen.rows, max(chosen.rows // 2, 16)}),
        (64, 128),
        (128, 256),
        (4, 8),
        (3, 4, 6),
    ):
        tile = Tile(tokens, columns, depth, 1, warps, stages)
        shared = stages * depth * 2 * (tokens + columns)
        is_served = 4 * tokens * columns // (32 * warps) <= 160 and (columns == 128 or warps == 4)
        if shared < 200_000 and is_served and tile != chosen and stages * depth <= 768:
            yield tile


def error_of_experts(x: Tensor, codes: Experts) -> float:
    parts = layer_kernels.sum_experts(x, codes)
    found = parts.double().sum(0) if parts.ndim == 3 else parts.double()
    ids_TK, weights_TK = route(layer_kernels.linear(x, codes.router, None), codes)
    exact = torch.zeros_like(found)
    for expert in ids_TK.unique().tolist():
        token, choice = (ids_TK == expert).nonzero(as_tuple=True)
        gate_up, down = (
            unpack_rows(weight[expert], torch.float64) for weight in (codes.gate_up, codes.down)
        )
        gate, up = (x[token].double() @ gate_up.T).chunk(2, -1)
        made = (torch.nn.functional.silu(gate) * up) @ down.T
        exact.index_add_(0, token, made * weights_TK[token, choice].double().unsqueeze(1))
    return float((found - exact).norm() / exact.norm())


def load(shape: str, *, packs_rows: bool):
    with tempfile.TemporaryDirectory() as folder:
        make_model_folder(folder, shape)
        cfg = ModelConfig(path=folder, init="random")
        return load_model(cfg, device="cuda", seed=0, packs_rows=packs_rows)


def make_engine(model, batch: int, **fields) -> EmbeddedEngine:
    cfg = EngineConfig(max_num_seqs=batch, gpu_memory_utilization=0.9, **fields)
    return EmbeddedEngine(model, cfg, eos_token_ids=(), max_model_len=2048, owns_weights=True)


def steps(run: Run) -> None:
    shape = run.args.shape
    run.row(f"{shape}: ms a decode step", "weights", "B", "ms", "share of limit", "prefill tok/s")
    for packs_rows in (False, True):
        model = load(shape, packs_rows=packs_rows)
        sizes = ModelShape.from_config(model.config.to_dict())
        engine = make_engine(model, 256)
        for batch in (8, 32, 64, 128, 256):
            if not run.has_time(f"B = {batch}"):
                return
            prefill, step_s = decode_speed(
                model, engine, batch=batch, context=CONTEXT, num_steps=40
            )
            read = sizes.decode_bytes(2, packs_rows=packs_rows)
            read += batch * CONTEXT * sizes.kv_bytes_per_token()
            run.row(
                "",
                "int8" if packs_rows else "bfloat16",
                batch,
                1e3 * step_s,
                read / BANDWIDTH / step_s,
                prefill,
            )
        del model, engine
        gc.collect()
        torch.cuda.empty_cache()


class _Holder:
    """The part of a trainer that a sync uses."""

    def __init__(self, model) -> None:
        self.model = model

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return export_weights(self.model)


def blank_engine(shape: str, batch: int) -> EmbeddedEngine:
    with tempfile.TemporaryDirectory() as folder:
        make_model_folder(folder, shape)
        cfg = ModelConfig(path=folder, init="random")
        model = blank_model(cfg, device="cuda", packs_rows=True)
    cfg = EngineConfig(max_num_seqs=batch, gpu_memory_utilization=0.5, enable_sleep=True)
    return EmbeddedEngine(model, cfg, eos_token_ids=(), max_model_len=2048, owns_weights=True)


def agreement(run: Run) -> None:
    model = load(run.args.shape, packs_rows=False)
    engine = blank_engine(run.args.shape, 64)
    WeightSync(_Holder(model), engine).push(1)
    for temperature in (1.0, 0.7):
        k3, outside, _ = parity(model, engine, temperature=temperature)
        run.check(f"k3 KL at {temperature}", k3 < 2e-3, f"{k3:.2e}, {outside:.2%} outside")


def sync(run: Run) -> None:
    model = load(run.args.shape, packs_rows=False)
    engine = blank_engine(run.args.shape, 64)
    pushes = WeightSync(_Holder(model), engine)
    for version in range(1, 4):
        torch.cuda.synchronize()
        report = pushes.push(version)
        run.row("sync and proof, ms", 1e3 * report.seconds, report.bytes / 2**30)
    start_s = perf_counter()
    engine.sleep()
    engine.wake()
    run.row("sleep and wake, ms", 1e3 * (perf_counter() - start_s))
    pushes.push(4)
    engine.begin_sync()
    manifest = pushes.engine.named_weights()
    name, weight = next((n, w) for n, w in manifest if w.dtype is torch.int8)
    weight.view(-1)[5] += 1
    try:
        engine.finish_sync(_manifest_of(model, engine))
    except RuntimeError as error:
        run.check("a wrong code is named", name in str(error))
    else:
        run.check("a wrong code is named", False)


def _manifest_of(model, engine):
    from hone.models.manifest import build_manifest
    from hone.weights.sync import Delivery

    targets = Delivery(engine)
    parts = ((n, engine.shard(n, w)) for n, w in export_weights(model))
    return build_manifest(parts, 5, dtypes=targets.dtypes)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="qwen3-8b", choices=SHAPES)


if __name__ == "__main__":
    main_run = Run(
        __doc__,
        ("products", "tiles", "experts", "parity", "sync", "steps"),
        on_request=("tiles",),
        seconds=300,
        add_flags=add_flags,
    )
    sections = {
        "products": products,
        "tiles": tiles,
        "parity": agreement,
        "sync": sync,
        "experts": experts,
    }
    bound = {name: lambda call=call: call(main_run) for name, call in sections.items()}
    bound["steps"] = lambda: steps(main_run)
    sys.exit(main_run.go(bound))
