"""Tensor parallelism of the engine on the GPUs of one host.

    torchrun --nproc-per-node 2 -m benchmarks.gpu.tensor_parallel_check [SECTION ...] [--seconds N]

One GPU or four do as well. Every rank also runs the whole model alone on its own GPU. Sections:

    sums     a layer's sum, its addition to the residual and the norm, in several ways
    gathers  of logits
    parity   of samples with the packed forward, in every mode; ranks' bits must be equal
    decode   steps of a whole model, alone and in the group

Weights are random. Timings lie in CUDA graphs.
"""

import argparse
import itertools
import sys
import tempfile
from contextlib import contextmanager
from functools import partial
from statistics import median
from unittest.mock import patch

import torch
import torch.distributed as dist
from benchmarks.gpu.engine_check import BANDWIDTH, decode_speed, ideal_step_s, make_requests
from benchmarks.gpu.engine_modes import MAX_LEN, parity
from benchmarks.gpu.engine_modes import run as sample
from benchmarks.gpu.sections import Run, release

from hone.distributed.processes import processes
from hone.engine.engine import EmbeddedEngine
from hone.engine.settings import EngineConfig
from hone.families.registry import spec_of
from hone.families.spec import RecurrentLayers
from hone.models import layer_kernels, tensor_parallel, tensor_parallel_kernels
from hone.models.load import load_model
from hone.models.manifest import build_manifest, compare, export_weights
from hone.models.settings import ModelConfig
from hone.models.tensor_parallel import TensorParallel, shard_model
from hone.models.tensor_parallel_kernels import GatherMailboxes, SumMailboxes
from hone.models.tiny import SHAPES, make_model_folder

GIB = 2**30
EPS = 1e-6
MAX_K3, MAX_OUTSIDE = 2e-3, 0.08
MODES = {
    "graphs": {"kv_cache_gib": 8.0},
    "no graphs": {"kv_cache_gib": 8.0, "enforce_eager": True},
    "chunked prefill": {"kv_cache_gib": 8.0, "max_num_batched_tokens": 96},
    "preemption": {"kv_cache_gib": 1.2},
}
SUM_BYTES = [1 << shift for shift in range(16, 25)]


def everywhere(tp, value):
    """The value of every rank."""
    if tp.size == 1:
        return [value]
    values = [None] * tp.size
    dist.all_gather_object(values, value)
    return values


def same_everywhere(tp, value):
    return all(other == value for other in everywhere(tp, value))


def load(shape, device):
    with tempfile.TemporaryDirectory() as folder:
        make_model_folder(folder, shape)
        return load_model(ModelConfig(path=folder, init="random"), device=device, seed=0)


# ---------------------------------------------------------------- parity


def requests_of(model):
    shared = {"group": 8, "num_prompt": 200, "vocab_size": model.config.vocab_size}
    return make_requests(64, **shared, max_tokens=160, temperature=1.0)


def states_gib(config, batch):
    """Of the recurrent layers of so many sequences, besides keys and values."""
    if not spec_of(config.model_type).is_hybrid:
        return 0.0
    layers = RecurrentLayers.of(config.to_dict())
    return batch * layers.state_bytes(2) / GIB


def check_parity(run: Run, tp, device):
    """R4 and R5 of a group and of one rank alone, in every mode; ranks' bits must be equal."""
    model = load(run.args.parity_shape, device)
    manifest = build_manifest(export_weights(model), 0)
    same = all(not compare(manifest, other) for other in everywhere(tp, manifest))
    run.check("ranks have drawn the same weights", same)
    columns = ("k3", "outside", "mean ratio", "preempted", "cached", "ranks equal")
    run.row("samples, by mode and ranks", *columns)
    requests = requests_of(model)
    shard = shard_model(model, tp)
    alone = TensorParallel(rank=0, size=1, device=device)
    cases = [("graphs", alone, model)]
    cases += [(mode, tp, shard) for mode in MODES] if tp.size > 1 else []
    for mode, group, module in cases:
        name = f"{mode}, TP {group.size}"
        if not run.has_time(name):
            return
        cache_gib = MODES[mode]["kv_cache_gib"] + states_gib(model.config, 64)
        options = dict(MODES[mode], kv_cache_gib=cache_gib / group.size)
        cfg = EngineConfig(
            max_num_seqs=64,
            tensor_parallel_size=group.size,
            **options,
        )
        engine = EmbeddedEngine(
            module, cfg, eos_token_ids=(), max_model_len=MAX_LEN, tensor_parallel=group
        )
        done = sample(engine, requests)
        stats = engine.stats()
        k3, outside, ratio = parity(model, requests, done)
        bits = {key: (one.token_ids, one.logprobs) for key, one in done.items()}
        equal = same_everywhere(tp, bits)
        good = k3 <= MAX_K3 and outside <= MAX_OUTSIDE and 0.99 <= ratio <= 1.01 and equal
        counts = stats.num_preemptions, stats.num_cached_tokens
        run.check(name, good, k3, f"{outside:.2%}", ratio, *counts, equal)
        engine.sleep()  # its cache would outlive it until the next collection
        del engine
        release()


# ---------------------------------------------------------------- sums and gathers


def seconds(tp, compute, *, calls=36, replays=15):
    """Of one call inside a graph of several."""
    compute()
    torch.cuda.synchronize()
    dist.barrier()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(calls):
            compute()
    events = [torch.cuda.Event(enable_timing=True) for _ in range(replays + 1)]
    graph.replay()
    for event in events[:-1]:
        event.record()
        graph.replay()
    events[-1].record()
    torch.cuda.synchronize()
    times = [a.elapsed_time(b) for a, b in itertools.pairwise(events)]
    return max(everywhere(tp, median(times) / 1e3 / calls))


class Sums:
    """A layer's sum, its addition to the residual and the norm, in several ways."""

    def __init__(self, tp, device, width=4096):
        self.tp, self.width = tp, width
        draw = torch.Generator(device).manual_seed(0)
        self.weight = torch.rand(width, generator=draw, device=device).bfloat16()
        max_rows = SUM_BYTES[-1] // (2 * width)
        self.mailboxes = SumMailboxes(
            tp._connect,
            rank=tp.rank,
            size=tp.size,
            max_rows=max_rows,
            width=width,
            dtype=torch.bfloat16,
        )
        import torch.distributed._symmetric_memory as symmetric_memory

        self.symmetric = symmetric_memory.empty(
            max_rows, width, dtype=torch.bfloat16, device=device
        )
        symmetric_memory.rendezvous(self.symmetric, tp._group)

    def ways(self, x, residual):
        rows, name = len(x), self.tp._group.group_name
        posted = self.symmetric[:rows]

        def normed(total):
            return layer_kernels.add_rms_norm(total, residual, self.weight, EPS)

        def one_shot():
            posted.copy_(x)
            return normed(torch.ops.symm_mem.one_shot_all_reduce(posted, "sum", name))

        def two_shot():
            posted.copy_(x)
            return normed(torch.ops.symm_mem.two_shot_all_reduce_(posted, "sum", name))

        return {
            "norm alone": lambda: normed(x),
            "NCCL": lambda: normed(self.tp.all_reduce(x)),
            "torch one-shot": one_shot,
            "torch two-shot": two_shot,
            "fused": lambda: self.mailboxes.add_rms_norm(x, residual, self.weight, EPS),
        }

    def errors(self, rounds=300):
        """Rounds of random sizes: whether ranks have the same bits, and those that a twin has."""
        tp, wrong, unequal = self.tp, 0, 0
        draw = torch.Generator(self.weight.device).manual_seed(0)
        for number in range(rounds):
            rows = (1, 64, 7, 300, self.mailboxes.max_rows)[number % 5]
            shape = tp.size, rows, self.width
            parts = torch.randn(shape, generator=draw, device=draw.device).bfloat16()
            residual = torch.randn(shape[1:], generator=draw, device=draw.device).bfloat16()
            total = torch.zeros_like(residual, dtype=torch.float32)
            for part in parts:
                total += part.float()
            twin = residual.clone()
            expected = layer_kernels.add_rms_norm(total.bfloat16(), twin, self.weight, EPS)
            actual = self.mailboxes.add_rms_norm(parts[tp.rank], residual, self.weight, EPS)
            gap = (actual.float() - expected.float()).abs().max() / expected.abs().max()
            wrong += not torch.equal(residual, twin) or gap.item() > 2e-2
            if number % 30 == 0:
                unequal += not same_everywhere(tp, actual.float().cpu().numpy().tobytes())
        return wrong, unequal


def check_sums(run: Run, tp, device):
    if tp.size == 1:
        return
    sums = Sums(tp, device)
    wrong, unequal = sums.errors()
    good = wrong == unequal == 0
    run.check("300 sums of random parts", good, f"{wrong} wrong", f"{unequal} of 10 unequal")
    names = ["norm alone", "NCCL", "torch one-shot", "torch two-shot", "fused"]
    run.row("sum and norm, us", *names)
    for size in SUM_BYTES:
        if not run.has_time(f"sums of {size >> 10} KiB"):
            return
        rows = size // 2 // sums.width
        x = torch.zeros(rows, sums.width, dtype=torch.bfloat16, device=device)
        ways = sums.ways(x, torch.zeros_like(x))
        times = []
        for name in names:
            try:
                times.append(seconds(tp, ways[name]) * 1e6)
            except RuntimeError as error:  # of torch's own, where it cannot serve a size
                times.append(str(error)[:20])
                torch.cuda.synchronize()
        run.row(f"{size >> 10} KiB, {rows} rows", *times)
    tilings = (256, 512, 1024, 2048)
    run.row("fused, us, by elements a warp", *tilings)
    for rows in (8, 64, 256):
        times = []
        for elements in tilings:
            with patch.object(tensor_parallel_kernels, "NORM_ELEMENTS_PER_WARP", elements):
                x = torch.zeros(rows, sums.width, dtype=torch.bfloat16, device=device)
                times.append(seconds(tp, sums.ways(x, torch.zeros_like(x))["fused"]) * 1e6)
        run.row(f"{rows} rows", *times)


def check_gathers(run: Run, tp, device, vocab_size=151936):
    if tp.size == 1:
        return
    tilings = [(1024, 4), (2048, 4), (4096, 8), (4096, 16), (8192, 16)]
    run.row("gather of logits, us, by tile x warps", "NCCL", *(f"{t} x {w}" for t, w in tilings))
    width = vocab_size // tp.size
    for rows in (1, 8, 64, 256):
        if not run.has_time(f"gathers of {rows} rows"):
            return
        parts = torch.randn(
            tp.size,
            rows,
            width,
            device=device,
            generator=torch.Generator(device).manual_seed(rows),
        )
        x, expected = parts[tp.rank].contiguous(), torch.cat(list(parts), 1)
        good, times = True, []
        for tile, warps in tilings:
            with (
                patch.object(tensor_parallel_kernels, "GATHER_TILE", tile),
                patch.object(tensor_parallel_kernels, "GATHER_WARPS", warps),
            ):
                programs = tensor_parallel.GATHER_PROGRAMS * 4096 // tile
                mailboxes = GatherMailboxes(
                    tp._connect, rank=tp.rank, size=tp.size, num_programs=programs
                )
                for _ in range(5):
                    good &= torch.equal(mailboxes.gather_columns(x), expected)
                times.append(seconds(tp, partial(mailboxes.gather_columns, x), calls=8) * 1e6)
        with through_nccl(tp):
            nccl = seconds(tp, partial(tp.gather_columns, x), calls=8)
        run.check(f"{rows} rows", good, nccl * 1e6, *times)


# ---------------------------------------------------------------- decode steps


@contextmanager
def through_nccl(tp):
    """No kernels that read the memory of other ranks."""
    gathers, tp._gathers = tp._gathers, None
    with patch.object(tensor_parallel, "MAX_SUM_BYTES", 0):
        yield
    tp._gathers = gathers


def step_time(model, group, *, batch, context, num_steps=48):
    per_token = 2 * model.config.num_hidden_layers * model.config.head_dim * 2
    per_token *= model.config.num_key_value_heads
    length = context + num_steps
    cfg = EngineConfig(
        max_num_seqs=batch,
        kv_cache_gib=batch * (length + 64) * per_token / GIB + states_gib(model.config, batch),
        tensor_parallel_size=group.size,
    )
    engine = EmbeddedEngine(
        model, cfg, eos_token_ids=(), max_model_len=length + 16, tensor_parallel=group
    )
    _, step_s = decode_speed(model, engine, batch=batch, context=context, num_steps=num_steps)
    engine.sleep()
    return step_s


def check_decode(run: Run, tp, device):
    shape, context = run.args.shape, run.args.context
    model = load(shape, device)
    alone = TensorParallel(rank=0, size=1, device=device)
    run.row(
        f"{shape}, context {context}: a step",
        *("ms", "against TP 1", "of its limit"),
        f"({BANDWIDTH / 1e12} TB/s a GPU)",
    )
    first = {}

    def measure(name, module, group, batch) -> None:
        if run.has_time(f"decode, B={batch}, {name}"):
            ideal = ideal_step_s(module, batch=batch, context=context)
            time = max(everywhere(tp, step_time(module, group, batch=batch, context=context)))
            first.setdefault(batch, time)
            gain = f"{first[batch] / time:.2f}x"
            run.row(f"B={batch}, {name}", 1e3 * time, gain, f"{ideal / time:.0%}")
            release()

    for batch in run.args.batches:
        measure("TP 1", model, alone, batch)
    if tp.size == 1:
        return
    shard = shard_model(model, tp)
    del model
    release()
    for batch in run.args.batches:
        measure(f"TP {tp.size}", shard, tp, batch)
        with through_nccl(tp):
            measure(f"TP {tp.size}, NCCL alone", shard, tp, batch)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="qwen3-8b", choices=SHAPES)
    parser.add_argument("--parity-shape", default="qwen3-0.6b", choices=SHAPES)
    parser.add_argument("--batches", type=int, nargs="*", default=[64, 8, 256])
    parser.add_argument("--context", type=int, default=1024)


def main() -> None:
    names = ("sums", "gathers", "parity", "decode")
    run = Run(__doc__, names, seconds=240, add_flags=add_flags)
    device = torch.device("cuda", processes().local_rank)
    torch.cuda.set_device(device)
    tp = TensorParallel.from_environment(processes().world_size, device)
    run.row(f"{tp.size} x {torch.cuda.get_device_name()}, torch {torch.__version__}, bfloat16")
    work = (check_sums, check_gathers, check_parity, check_decode)
    sections = {
        name: partial(part, run, tp, device) for name, part in zip(names, work, strict=True)
    }
    sys.exit(run.go(sections))


if __name__ == "__main__":
    main()
