"""Checks the fused layers on CUDA against transformers, and times what they are made of.

`python -m benchmarks.gpu.layers_check` compares hidden states in bfloat16 with float32, kernel by
kernel with the functions of transformers, and recorded steps with eager ones; then it times layers
without attention, their parts, choices of the kernels' launch parameters, the head, and what an
eager prefill costs the host. The table of checks comes last. Exits with 1 where one fails.
"""

from __future__ import annotations

import copy
import cProfile
import pstats
import statistics
import sys
import time
from collections import Counter
from itertools import accumulate, product

import torch
import torch.nn.functional as F
import triton
from torch import Tensor
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm, apply_rotary_pos_emb

from hone.attention import ATTENTION_NAME, PackedContext, PagedContext, triton_write
from hone.attention.context import FP8_DTYPE
from hone.models import layer_kernels as kernels
from hone.models import layer_ops, product_kernels
from hone.models.decoder import alias_module, hidden_states
from hone.models.fused_layers import FusedDecoder
from hone.models.generation import generation_model
from hone.models.product_kernels import Tile, small_product
from hone.models.tiny import SHAPES

DEVICE = torch.device("cuda")
SIDE = torch.cuda.Stream() if torch.cuda.is_available() else None
BATCHES = (1, 8, 32, 64, 128, 256, 512)
BLOCK_SIZE = 16
BANDWIDTH, MATRIX_RATE = 4.29e12, 7.9e14
TILES = (
    (64, 32, 128, 4, 4),
    (64, 32, 128, 4, 6),
    (64, 64, 128, 4, 4),
    (64, 64, 64, 4, 6),
    (64, 128, 64, 4, 5),
    (128, 32, 64, 4, 6),
    (128, 64, 64, 4, 5),
    (128, 64, 64, 8, 5),
    (128, 128, 64, 8, 4),
)
"""Rows, columns and depth of tiles, warps and stages."""
MAX_SHARED_BYTES = 220_000
DIFFERENT = 0.02
"""Share of a kernel's bfloat16 values that another order of summing may round differently."""


def make_model(shape: str, num_layers: int, vocab_size: int = 4096):
    fields = dict(SHAPES[shape])
    config = AutoConfig.for_model(
        fields["family"],
        vocab_size=vocab_size,
        num_hidden_layers=num_layers,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
        hidden_size=fields["hidden_size"],
        intermediate_size=fields["intermediate_size"],
        num_attention_heads=fields["num_heads"],
        num_key_value_heads=fields["num_kv_heads"],
        head_dim=fields["head_dim"],
        tie_word_embeddings=fields["tie_word_embeddings"],
        max_position_embeddings=fields["max_position_embeddings"],
    )
    torch.manual_seed(0)
    with DEVICE:
        model = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation=ATTENTION_NAME
        ).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
    return model


class Cache:
    """A paged cache of B sequences of `length` tokens at most."""

    def __init__(self, model, batch: int, length: int) -> None:
        config, self.width = model.config, -(-length // BLOCK_SIZE)
        order = torch.randperm(batch * self.width, generator=torch.Generator().manual_seed(0))
        self.tables = order.view(batch, self.width)
        shape = (2, len(order), BLOCK_SIZE, config.num_key_value_heads, config.head_dim)
        self.layers = [
            torch.zeros(shape, dtype=torch.bfloat16, device=DEVICE)
            for _ in range(config.num_hidden_layers)
        ]

    def context(self, starts, sizes, *, is_decode: bool) -> tuple[Tensor, PagedContext]:
        """Positions, and the context of the next `sizes` tokens of each sequence."""
        positions = [torch.arange(s, s + n) for s, n in zip(starts, sizes, strict=True)]
        slots = [
            self.tables[i, where // BLOCK_SIZE] * BLOCK_SIZE + where % BLOCK_SIZE
            for i, where in enumerate(positions)
        ]
        lengths = [s + n for s, n in zip(starts, sizes, strict=True)]
        borders = torch.tensor([0, *accumulate(sizes)], dtype=torch.int32)
        return torch.cat(positions).to(DEVICE), PagedContext(
            kv_caches=self.layers,
            block_tables=self.tables[: len(sizes)].to(DEVICE, torch.int32),
            slot_mapping=torch.cat(slots).to(DEVICE),
            cu_seqlens_q=borders.to(DEVICE),
            context_lens=torch.tensor(lengths, dtype=torch.int32, device=DEVICE),
            max_seqlen_q=max(sizes),
            max_context_len=max(lengths),
            query_lens=() if is_decode else tuple(sizes),
            key_lens=() if is_decode else tuple(lengths),
        )


# ---------------------------------------------------------------- checks


CHECKS: list[tuple[bool, str, str]] = []


def check(name: str, good: bool, text: str) -> None:
    CHECKS.append((good, name, text))


def tokens(*shape: int) -> Tensor:
    return torch.randint(4096, shape, device=DEVICE)


@torch.inference_mode()
def check_model(shape: str, num_layers: int) -> None:
    """Two chunks of three prompts, then a recorded decode step, against one float32 forward."""
    model = make_model(shape, num_layers)
    exact = copy.deepcopy(model).float()
    alias = alias_module(model)
    generation = generation_model(model, compile=True)
    steps = [[200, 33, 64], [57, 100, 1], [1, 1, 1]]
    lengths = [sum(sizes) for sizes in zip(*steps, strict=True)]
    ids = [tokens(n) for n in lengths]

    def run(forward, last=None) -> tuple[Tensor, list]:
        cache, starts, rows = Cache(model, 3, max(lengths)), [0, 0, 0], [[], [], []]
        for sizes in steps:
            where = zip(ids, starts, sizes, strict=True)
            chunk = torch.cat([x[s : s + n] for x, s, n in where])
            positions, context = cache.context(starts, sizes, is_decode=max(sizes) == 1)
            arguments = (chunk, positions, context)
            out = last(arguments) if last and context.is_decode else forward(*arguments)
            for row, part in zip(rows, out.split(sizes), strict=True):
                row.append(part)
            starts = [s + n for s, n in zip(starts, sizes, strict=True)]
        return torch.cat([torch.cat(row) for row in rows]).float(), cache.layers

    def recorded(arguments) -> Tensor:
        generation.hidden_states(*arguments)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = generation.hidden_states(*arguments)
        out.fill_(float("nan"))
        graph.replay()
        return out.clone()

    ours, our_cache = run(generation.hidden_states)
    again, _ = run(generation.hidden_states, recorded)
    theirs, their_cache = run(lambda *arguments: hidden_states(alias, *arguments))
    expected = hidden_states(
        exact,
        torch.cat(ids),
        torch.cat([torch.arange(n, device=DEVICE) for n in lengths]),
        PackedContext.from_lengths(lengths, device=DEVICE),
    )
    distance, reference = ((x - expected).norm() / expected.norm() for x in (ours, theirs))
    check(
        f"{shape}: distance to float32 <= 1.1 x transformers'",
        bool(distance <= 1.1 * reference),
        f"{distance:.3e} against {reference:.3e}",
    )
    check(f"{shape}: recorded equals eager", torch.equal(ours, again), "bitwise")
    our_kv, their_kv = our_cache[0].float(), their_cache[0].float()
    gap = ((our_kv - their_kv).norm() / their_kv.norm()).item()
    check(f"{shape}: first layer's keys and values", gap < 5e-3, f"{gap:.1e} off transformers'")
    positions, context = Cache(model, 1, 16).context([0], [9], is_decode=False)
    before = generation.hidden_states(ids[0][:9], positions, context).clone()
    model.model.layers[-1].self_attn.v_proj.weight.mul_(1.5)
    after = generation.hidden_states(ids[0][:9], positions, context)
    check(f"{shape}: follows a parameter", not torch.equal(before, after), "")


@torch.inference_mode()
def check_kernels() -> None:
    """Bit by bit with the functions of transformers in bfloat16."""

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, device=DEVICE).bfloat16()

    def different(pairs) -> float:
        return max((a != b).float().mean().item() for a, b in pairs)

    for rows, width in ((1, 1024), (37, 4096), (513, 2560)):
        x, residual, norm = normal(rows, width), normal(rows, width), Qwen3RMSNorm(width)
        norm.weight = torch.nn.Parameter(normal(width))
        total = x + residual
        normed = kernels.add_rms_norm(x, residual, norm.weight, 1e-6)
        alone = kernels.rms_norm(total, norm.weight, 1e-6)
        share = different([(normed, norm(total)), (residual, total), (alone, norm(total))])
        check(f"norm {rows} x {width}", share < DIFFERENT, f"{share:.2%} of the values differ")
        gate_up = normal(rows, 2 * width)
        gate, up = gate_up.chunk(2, -1)
        share = different([(kernels.silu_mul(gate_up), F.silu(gate) * up)])
        check(f"silu {rows} x {width}", share < DIFFERENT, f"{share:.2%} of the values differ")
    for rows, heads, kv_heads, dim in ((1, 16, 8, 128), (300, 32, 8, 128), (33, 14, 2, 64)):
        qkv = normal(rows, heads + 2 * kv_heads, dim)
        norms = [Qwen3RMSNorm(dim) for _ in range(2)]
        for norm in norms:
            norm.weight = torch.nn.Parameter(normal(dim))
        angles = 100 * torch.randn(500, dim // 2, device=DEVICE)
        table = torch.cat((angles.cos(), angles.sin()), -1).bfloat16()
        positions = torch.randint(500, (rows,), device=DEVICE)
        cos, sin = (torch.cat((x, x), -1) for x in table[positions].chunk(2, -1))
        slots = torch.randperm(2 * rows, device=DEVICE)[:rows]
        slots[rows // 2] = -1
        cache = normal(2, 2 * rows, 1, kv_heads, dim)
        q, k, v = qkv.clone().split((heads, kv_heads, kv_heads), 1)
        q, k = apply_rotary_pos_emb(norms[0](q), norms[1](k), cos, sin, unsqueeze_dim=1)
        stored, kept = cache.clone().flatten(1, 2), slots >= 0
        stored[0, slots[kept]], stored[1, slots[kept]] = k[kept], v[kept]
        scales = torch.rand(2, kv_heads, device=DEVICE) / 50
        quantised = torch.zeros_like(cache).to(FP8_DTYPE)
        expected = torch.zeros_like(quantised)
        triton_write.write_kv(k, v, expected, slots, scales)
        options = {"q_norm": norms[0].weight, "k_norm": norms[1].weight, "eps": 1e-6}
        options |= {"num_heads": heads, "slot_mapping": slots}
        kernels.rotate_heads(
            qkv.clone(), positions, table, kv_cache=quantised, kv_scales=scales, **options
        )
        found = kernels.rotate_heads(qkv, positions, table, kv_cache=cache, **options)
        pairs = [*zip(found, (q, k, v), strict=True), (cache.flatten(1, 2), stored)]
        share = different([*pairs, (quantised.float(), expected.float())])
        name = f"rotate {rows} x {heads}/{kv_heads} x {dim}"
        check(name, share < DIFFERENT, f"{share:.2%} of the values differ")


@torch.inference_mode()
def check_products() -> None:
    """Each kind of product of few rows against float64, and no further from it than cuBLAS."""
    for num_rows, num_outputs, num_inputs in ((1, 4096, 1024), (33, 1024, 2048), (64, 6144, 4096)):
        x = torch.randn(num_rows, num_inputs, device=DEVICE).bfloat16()
        weight = torch.randn(num_outputs, num_inputs, device=DEVICE).bfloat16() / num_inputs**0.5
        bias = torch.randn(num_outputs, device=DEVICE).bfloat16()
        gate, up = (x.double() @ weight.double().T).chunk(2, -1)
        plain = F.linear(x, weight)
        their_gate, their_up = plain.chunk(2, -1)
        cases = {
            "plain": ({}, plain, torch.cat((gate, up), -1)),
            "bias": ({"bias": bias}, F.linear(x, weight, bias), torch.cat((gate, up), -1) + bias),
            "gated": ({"gated": True}, F.silu(their_gate) * their_up, F.silu(gate) * up),
            "split": ({"split": True}, plain, torch.cat((gate, up), -1)),
        }
        for name, (options, theirs, exact) in cases.items():
            first, again = (small_product(x, weight, **options) for _ in range(2))
            if first is None:
                continue
            found = first.sum(0) if name == "split" else first
            ours, reference = ((y - exact).norm() / exact.norm() for y in (found, theirs))
            check(
                f"product {name} {num_rows} x {num_outputs} x {num_inputs}",
                bool(ours <= 1.1 * reference) and torch.equal(again, first),
                f"{ours:.2e}, cuBLAS {reference:.2e}",
            )


# ---------------------------------------------------------------- times


def graph_us(call, repeats: int = 15) -> float:
    """Median device time of what `call` launches, replayed from a graph."""
    graph = torch.cuda.CUDAGraph()
    SIDE.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(SIDE):  # `torch.cuda.graph` also collects garbage, which takes long
        call()
        torch.cuda.synchronize()
        graph.capture_begin()
        call()
        graph.capture_end()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats + 2):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times[2:])


def repeated_us(call, count: int = 40) -> float:
    """Device time of one call among `count` in a graph; its inputs stay in the L2 cache."""

    def calls() -> None:
        for _ in range(count):
            call()

    return graph_us(calls, 7) / count


@torch.compiler.disable
def no_attention(module, query, key, value, attention_mask, **_):
    return query.transpose(1, 2), None


def keep_queries(q: Tensor, *_: object, **__: object) -> Tensor:
    return q


@torch.inference_mode()
def time_layers(shape: str, num_layers: int, *, compiled_at: tuple[int, ...]) -> None:
    AttentionInterface.register("skipped", no_attention)
    model = make_model(shape, num_layers)
    variants = {}
    for name in ("eager", "compiled"):
        variants[name] = alias_module(model)
        variants[name].config._attn_implementation = "skipped"
    for layer in variants["compiled"].model.layers:
        layer.compile(dynamic=True)
    decoder = FusedDecoder(model, layer_ops.LayerOps(layer_ops.choose_kernels(model.device)))
    attend, layer_ops.attend_paged = layer_ops.attend_paged, keep_queries
    layer_params = sum(p.numel() for p in model.model.layers[0].parameters())
    print(f"\n{shape}, {num_layers} layers without attention: us a layer")
    print("   T   limit   fused   compiled   eager   rotary, embedding, first norm (us a forward)")
    for batch in BATCHES:
        cache = Cache(model, batch, 64)
        positions, context = cache.context([40] * batch, [1] * batch, is_decode=True)
        ids = tokens(batch)

        def stock(name, arguments=(ids, positions, context)):
            return graph_us(lambda: hidden_states(variants[name], *arguments)) / num_layers

        def before(ids=ids, positions=positions):
            x = F.embedding(ids, decoder._embedding)
            decoder._rotary.rows(64)
            decoder._ops.rms_norm(x, decoder._first_norm)

        fused = graph_us(lambda c=context, i=ids, p=positions: decoder(i, p, c)) / num_layers
        limit = max(2 * layer_params / BANDWIDTH, 2 * layer_params * batch / MATRIX_RATE)
        compiled = f"{stock('compiled'):8.1f}" if batch in compiled_at else "       -"
        print(
            f"{batch:4} {limit * 1e6:7.1f} {fused:7.1f}   {compiled} {stock('eager'):7.1f}   "
            f"{graph_us(before):7.1f}"
        )
    time_parts(decoder, model.config, layer_params)
    count_kernels(decoder, model)
    layer_ops.attend_paged = attend


def time_parts(decoder: FusedDecoder, config, layer_params: int) -> None:
    """Every kernel of a layer alone; products run over the weights of all layers in turn."""
    layers = decoder.layers
    layer = layers[0]
    width, inner = config.hidden_size, config.intermediate_size
    heads, kv_heads, dim = layers[0].heads.num_heads, config.num_key_value_heads, config.head_dim
    print("   T  add+norm  rotate+write  silu*mul |  us, TB/s of weights and TFLOP/s of products")
    for batch in (*BATCHES, 8192):
        x, residual = (torch.randn(batch, width, device=DEVICE).bfloat16() for _ in range(2))
        qkv = torch.randn(batch, heads + 2 * kv_heads, dim, device=DEVICE).bfloat16()
        table = torch.randn(500, dim, device=DEVICE).bfloat16()
        positions = torch.randint(500, (batch,), device=DEVICE)
        gate_up = torch.randn(batch, 2 * inner, device=DEVICE).bfloat16()
        cache = torch.zeros(2, batch, 1, kv_heads, dim, device=DEVICE, dtype=torch.bfloat16)
        slots = torch.randperm(batch, device=DEVICE)

        def rotate(q=qkv, p=positions, c=table, kv=cache, s=slots):
            kernels.rotate_heads(
                q,
                p,
                c,
                q_norm=layer.heads.q_norm,
                k_norm=layer.heads.k_norm,
                eps=1e-6,
                num_heads=heads,
                kv_cache=kv,
                slot_mapping=s,
            )

        def norm(x=x, r=residual):
            kernels.add_rms_norm(x, r, layer.mlp_norm.weight, 1e-6)

        norm_us, rotate_us = repeated_us(norm), repeated_us(rotate)
        silu_us = repeated_us(lambda g=gate_up: kernels.silu_mul(g))
        text = f"{batch:5} {norm_us:8.2f} {rotate_us:10.2f} {silu_us:12.2f}   |"
        total = 0.0
        for name in ("qkv", "o", "gate_up", "down"):
            weight = getattr(layer if name in ("qkv", "o") else layer.mlp, name).weight
            inputs = torch.randn(batch, weight.shape[1], device=DEVICE).bfloat16()

            def products(name=name, inputs=inputs):
                for other in layers:
                    projection = getattr(other, name)
                    F.linear(inputs, projection.weight, projection.bias)

            us = graph_us(products, 7) / len(layers)
            total += us
            rate = weight.nbytes / us / 1e6
            flops = 2 * weight.numel() * batch / us / 1e6
            text += f" {name} {us:.1f} ({rate:.2f}, {flops:.0f})"
        print(f"{text} sum {total:.1f}")


def count_kernels(decoder: FusedDecoder, model) -> None:
    positions, context = Cache(model, 32, 64).context([40] * 32, [1] * 32, is_decode=True)
    ids = tokens(32)
    decoder(ids, positions, context)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        decoder(ids, positions, context)
        torch.cuda.synchronize()
    names = Counter(e.name[:60] for e in profile.events() if e.device_type.name == "CUDA")
    print(f"kernels at T=32: {sum(names.values()) / len(decoder.layers):.2f} a layer")
    for name, count in names.most_common(12):
        print(f"  {count / len(decoder.layers):5.2f} {name}")


@torch.inference_mode()
def compare_products(
    shape: str, num_layers: int, batches: tuple[int, ...], *, search: bool = False
) -> None:
    """Layers without attention by product: cuBLAS, own tiles as chosen, and others.

    Each is timed in the layer it is part of, since launches overlap their neighbours.
    """
    model = make_model(shape, num_layers)
    decoder = FusedDecoder(model, layer_ops.LayerOps(layer_ops.choose_kernels(model.device)))
    attend, layer_ops.attend_paged = layer_ops.attend_paged, keep_queries
    choose = product_kernels.choose_tile
    layer = decoder.layers[0]
    kinds = {
        "qkv": (layer.qkv.weight, {"gated": False, "split": False}),
        "o": (layer.o.weight, {"gated": False, "split": True}),
        "gate_up": (layer.mlp.gate_up.weight, {"gated": True, "split": False}),
        "down": (layer.mlp.down.weight, {"gated": False, "split": True}),
    }
    print(f"\n{shape}: us a layer without attention")
    for batch in batches:
        cache = Cache(model, batch, 64)
        positions, context = cache.context([40] * batch, [1] * batch, is_decode=True)
        ids = tokens(batch)

        def timed(tiles, p=positions, c=context, i=ids) -> float:
            """With tiles by name; the others are left to cuBLAS."""
            by_key = {
                (*kinds[name][0].shape, *kinds[name][1].values()): tile
                for name, tile in tiles.items()
            }
            product_kernels.choose_tile = lambda _, n, k, gated, split: by_key.get(
                (n, k, gated, split)
            )
            return graph_us(lambda: decoder(i, p, c), 9) / num_layers

        chosen = {name: choose(batch, *w.shape, **options) for name, (w, options) in kinds.items()}
        cublas = timed({})
        best, now = dict(chosen), timed(chosen)
        print(f"T={batch:<4} cuBLAS {cublas:6.1f}  own {now:6.1f}", end="")
        for name, (weight, options) in kinds.items() if search else ():
            times: dict[Tile | None, float] = {None: timed({**best, name: None})}
            outputs = weight.shape[0] // (2 if options["gated"] else 1)
            for (rows, columns, depth, warps, stages), splits in product(TILES, (1, 2, 4)):
                columns_at_once = columns * (2 if options["gated"] else 1)
                programs = outputs // columns * splits * -(-batch // rows)
                is_possible = not (
                    outputs % columns
                    or weight.shape[1] % (depth * splits)
                    or (splits > 1 and not options["split"])
                    or stages * depth * (rows + columns_at_once) * 2 > MAX_SHARED_BYTES
                )
                if is_possible and 60 <= programs <= 600:
                    tile = Tile(rows, columns, depth, splits, warps, stages)
                    times[tile] = timed({**best, name: tile})
            ranked = sorted(times, key=times.__getitem__)[:3]
            best[name] = ranked[0]
            text = "  ".join(f"{tuple(t) if t else 'cuBLAS'} {times[t]:.1f}" for t in ranked)
            print(f"\n       {name:8} {text}   cuBLAS {times[None]:.1f}", end="")
        print(f"\n       best together {timed(best):.1f}", flush=True)
    product_kernels.choose_tile = choose
    layer_ops.attend_paged = attend


@torch.inference_mode()
def time_head() -> None:
    print("\nhead of 151,936: us with float32 out | bfloat16 out | bfloat16 out, then cast")
    for width in (1024, 4096):
        weight = torch.randn(151936, width, device=DEVICE).bfloat16() / 32
        for batch in (1, 8, 32, 64, 128, 256, 512):
            x = torch.randn(batch, width, device=DEVICE).bfloat16()
            exact = graph_us(lambda x=x, w=weight: torch.mm(x, w.T, out_dtype=torch.float32))
            half = graph_us(lambda x=x, w=weight: x @ w.T)
            cast = graph_us(lambda x=x, w=weight: (x @ w.T).float())
            limit = max(weight.nbytes / BANDWIDTH, 2 * weight.numel() * batch / MATRIX_RATE) * 1e6
            print(f"{width:6} T={batch:<4} {exact:8.1f} {half:8.1f} {cast:8.1f}  limit {limit:.1f}")
        if width == 1024:
            logits = torch.mm(x, weight.T, out_dtype=torch.float32)
            expected = x.double() @ weight.double().T
            error = ((logits - expected).norm() / expected.norm()).item()
            check("head in float32", error < 1e-5, f"relative error {error:.1e}")


@torch.inference_mode()
def time_host() -> None:
    """What the host spends on an eager forward of Qwen3-0.6B, and when the device is done."""
    model = make_model("qwen3-0.6b", 28)
    alias = alias_module(model)
    generation = generation_model(model, compile=False)
    print("\neager forward of 28 layers: ms of the host (and until the device is done)")
    for lengths, is_decode in (([128] * 4, False), ([1024] * 8, False), ([1] * 32, True)):
        cache = Cache(model, len(lengths), 1100)
        starts = [40] * len(lengths) if is_decode else [0] * len(lengths)
        positions, context = cache.context(starts, lengths, is_decode=is_decode)
        ids = tokens(sum(lengths))
        results = []
        for forward in (generation.hidden_states, lambda *x: hidden_states(alias, *x)):
            times = []
            for _ in range(8):
                torch.cuda.synchronize()
                start = time.perf_counter()
                forward(ids, positions, context)
                launched = time.perf_counter()
                torch.cuda.synchronize()
                times.append((launched - start, time.perf_counter() - start))
            host, total = (statistics.median(x[3:]) * 1e3 for x in zip(*times, strict=True))
            results.append(f"{host:6.2f} ({total:6.2f})")
        kind = "decode" if is_decode else "prefill"
        print(f"  {kind} T={sum(lengths):<5} fused {results[0]}   transformers {results[1]}")

    profile = cProfile.Profile()
    cache = Cache(model, 4, 200)
    positions, context = cache.context([0] * 4, [128] * 4, is_decode=False)
    profile.enable()
    for _ in range(5):
        generation.hidden_states(tokens(512), positions, context)
    profile.disable()
    pstats.Stats(profile, stream=sys.stdout).sort_stats("tottime").print_stats(22)
    x, residual = (torch.randn(1, 1024, device=DEVICE).bfloat16() for _ in range(2))
    weight = x[0].clone()
    matrix = torch.randn(1024, 1024, device=DEVICE).bfloat16()
    gate_up = torch.randn(1, 6144, device=DEVICE).bfloat16()
    positions, table = torch.zeros(1, dtype=torch.int64, device=DEVICE), x.view(8, 128)
    qkv = torch.randn(1, 32, 128, device=DEVICE).bfloat16()
    calls = {
        "add_rms_norm": lambda: kernels.add_rms_norm(x, residual, weight, 1e-6),
        "silu_mul": lambda: kernels.silu_mul(gate_up),
        "rotate_heads": lambda: kernels.rotate_heads(
            qkv,
            positions,
            table,
            q_norm=weight[:128],
            k_norm=weight[:128],
            eps=1e-6,
            num_heads=16,
            kv_cache=None,
            slot_mapping=None,
        ),
        "small_product": lambda: small_product(x, matrix, tile=Tile(64, 32, 128, 1, 4, 4)),
        "F.linear": lambda: F.linear(x, matrix),
    }
    for name, call in calls.items():
        call()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(300):
            call()
        print(f"  one launch of {name}: {(time.perf_counter() - start) / 300 * 1e6:.1f} us of host")
        torch.cuda.synchronize()


def main() -> int:
    started = time.perf_counter()
    print(f"torch {torch.__version__}, triton {triton.__version__}, {torch.cuda.get_device_name()}")
    check_kernels()
    check_products()
    check_model("qwen3-0.6b", 6)
    check_model("qwen3-8b", 3)
    for good, name, text in CHECKS:
        if not good:
            print(f"FAIL {name:58} {text}", flush=True)
    time_layers("qwen3-0.6b", 28, compiled_at=(32, 256))
    time_layers("qwen3-8b", 4, compiled_at=())
    compare_products("qwen3-0.6b", 28, (1, 16, 32, 64, 96))
    compare_products("qwen3-0.6b", 28, (128, 192, 256), search=True)
    for shape, num_layers in (("qwen3-1.7b", 8), ("qwen3-4b", 8), ("qwen3-8b", 4)):
        compare_products(shape, num_layers, (1, 32, 64, 128))
    time_head()
    time_host()
    print(f"\n{time.perf_counter() - started:.0f} s")
    for good, name, text in CHECKS:
        print(f"{'ok  ' if good else 'FAIL'} {name:58} {text}")
    return 0 if all(good for good, *_ in CHECKS) else 1


if __name__ == "__main__":
    sys.exit(main())
