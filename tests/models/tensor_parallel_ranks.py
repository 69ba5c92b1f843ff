"""Runs tensor parallelism in one of several processes (`tests.ranks`); rank 0 prints JSON.

Every rank also runs the whole model alone, and what comes out is compared there.
The kernels run in Triton's interpreter, on memory that the processes share through FOLDER.
"""

# Kernels take their arguments by position.
# ruff: noqa: PLR0917

from __future__ import annotations

import copy
import json
import os
import sys
import time
from pathlib import Path
from unittest.mock import patch

os.environ["TRITON_INTERPRET"] = "1"

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from hone.engine import base
from hone.engine.engine import EmbeddedEngine
from hone.engine.kv_cache import KVCache
from hone.engine.settings import EngineConfig
from hone.errors import UserError
from hone.models import tensor_parallel, tensor_parallel_kernels
from hone.models.layer_ops import LayerOps, Norm, TorchKernels
from hone.models.load import load_model
from hone.models.manifest import export_weights
from hone.models.tensor_parallel import TensorParallel, TensorParallelOps, shard_model, shard_of
from hone.models.tensor_parallel_kernels import GatherMailboxes, SumMailboxes
from hone.types import Request, SamplingParams
from hone.weights.sync import NonFiniteWeightsError, WeightSync
from tests.models.test_generation_model import SCHEDULES, Generation, make_model, make_samples
from tests.rank_cases import everywhere, of_first
from tests.vision.examples import Twin
from tests.vision.test_engine import prompts
from tests.vision.test_engine import requests as requests_with_images

MODELS = (
    "llama, group of 4",
    "llama, all biases",
    "mistral",
    "qwen2",
    "qwen3, heads of 128, tied",
    "qwen3, biases, mixed layers",
)
"""Shapes of `test_generation_model`."""

UNFUSED = {"smollm3": {"attention_bias": True, "mlp_bias": True}, "exaone4": {}}
"""Families on the layers of transformers, with fields of their own."""

ENGINES = {
    "plain": {},
    "chunked prefill": {"max_num_batched_tokens": 6},
    "preemption": {"blocks": 20},
    "no prefix caching": {"enable_prefix_caching": False},
}
CPU = torch.device("cpu")
EPS = 1e-5


def difference(actual, expected):
    """Largest, as a share of the largest value."""
    assert actual.shape == expected.shape
    assert actual.dtype == expected.dtype
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def run(model, tp=None):
    """Hidden states [T, D] and logits [T, V] of all tokens, prompts in chunks, then decoded."""
    steps = Generation(model, make_samples(), tp=tp)
    for chunks in SCHEDULES["prompts, then decode"]:
        steps.step(chunks)
    return torch.cat([torch.cat(rows) for rows in steps.hidden]), steps.logits()


def forward(name, tp):
    """Differences of hidden states and logits between the group and one rank alone."""
    model = make_model(name, **UNFUSED.get(name, {}))
    expected = of_first(lambda: run(copy.deepcopy(model)))
    actual = run(shard_model(model, tp), tp)
    return {
        "hidden": difference(actual[0], expected[0]),
        "logits": difference(actual[1], expected[1]),
        "equal on all ranks": all(torch.equal(other, actual[1]) for other in everywhere(actual[1])),
    }


# ---------------------------------------------------------------- planted bugs


def swapped(*modules):
    def other_ranks_part(name, tensor, config, tp):
        if any(module in name for module in modules):
            tp = TensorParallel(rank=tp.size - 1 - tp.rank, size=tp.size, device=CPU)
        return shard_of(name, tensor, config, tp)

    return patch.object(tensor_parallel, "shard_of", other_ranks_part)


BUGS = {
    "sum left out": lambda: patch.object(TensorParallel, "all_reduce", lambda self, x: x),
    "heads swapped between ranks": lambda: swapped("q_proj"),
    "queries and keys swapped": lambda: swapped("q_proj", "k_proj"),
    "inner sizes swapped": lambda: swapped("up_proj"),
    "head swapped between ranks": lambda: swapped("lm_head"),
    "bias added by every rank": lambda: patch.object(
        TensorParallelOps, "sum_linear", LayerOps.sum_linear
    ),
}


def planted(tp):
    found = {}
    for name, plant in BUGS.items():
        with plant():
            found[name] = forward("llama, all biases", tp)["logits"]
    found["nothing"] = forward("llama, all biases", tp)["logits"]
    return found


# ---------------------------------------------------------------- the engine


def make_engine(model, tp, **options):
    size = 1 if tp is None else tp.size
    block_bytes = 2048 // size  # of this model, 4 tokens
    gib = (options.pop("blocks", 500) + 0.5) * block_bytes / 2**30
    cfg = {"max_num_seqs": 4, "max_num_batched_tokens": 64, "kv_cache_gib": gib}
    return EmbeddedEngine(
        model if tp is None else shard_model(model, tp),
        EngineConfig(**cfg | {"tensor_parallel_size": size} | options),
        eos_token_ids=(3,),
        max_model_len=64,
        block_size=4,
        tensor_parallel=tp,
    )


def requests(temperature):
    """Two groups with prompts of several blocks, more than may run at once."""
    prompts = [tuple(range(5, 5 + n)) for n in (9, 22)]
    return [
        Request(
            id=f"{i}",
            prompt_ids=prompts[i % 2],
            sampling=SamplingParams(max_tokens=12 + 2 * i, temperature=temperature, seed=i),
        )
        for i in range(8)
    ]


def tokens_of(engine, temperature):
    return completed(engine, requests(temperature))


def completed(engine, asked):
    """Tokens and log-probabilities by request."""
    engine.submit(asked)
    done = []
    while engine.has_unfinished:
        done += engine.step()
    return {x.request_id: x.token_ids for x in done}, {x.request_id: x.logprobs for x in done}


def largest_gap(a, b):
    return max(abs(x - y) for key in a for x, y in zip(a[key], b[key], strict=True))


def engine(options, tp):
    model = make_model()
    alone = make_engine(copy.deepcopy(model), None, **options)
    group = make_engine(model, tp, **options)
    found = {"same tokens": True, "gap": 0.0, "equal on all ranks": True}
    for temperature in (0.0, 1.0):
        expected = of_first(lambda at=temperature: tokens_of(alone, at))
        actual = tokens_of(group, temperature)
        found["same tokens"] &= expected[0] == actual[0]
        found["gap"] = max(found["gap"], largest_gap(expected[1], actual[1]))
        found["equal on all ranks"] &= all(other == actual for other in everywhere(actual))
    return found | {"preemptions": group.stats().num_preemptions}


def images(twin, tp):
    """Engines whose prompts have images, with the tower on every rank."""
    asked = requests_with_images(twin, prompts(twin))
    found = []
    for group in (None, tp):
        size = 1 if group is None else group.size
        engine = EmbeddedEngine(
            load_model(twin.cfg, device=CPU, tp=group),
            EngineConfig(kv_cache_gib=0.01, tensor_parallel_size=size, max_num_batched_tokens=24),
            eos_token_ids=(),
            max_model_len=400,
            block_size=4,
            tensor_parallel=group,
        )
        found.append(completed(engine, asked))
    expected, actual = found
    return {
        "same tokens": expected[0] == actual[0],
        "gap": largest_gap(expected[1], actual[1]),
        "equal on all ranks": all(other == actual for other in everywhere(actual)),
    }


def cache_sizes(tp):
    """Blocks of caches for which ranks have different room."""
    group = make_engine(make_model(), tp, blocks=50 - tp.rank)
    return everywhere(group._blocks.num_blocks)


def failed_wake(tp):
    """One rank finds no memory: nobody wakes, and all can try again."""
    group = make_engine(make_model(), tp)
    before = tokens_of(group, 0.0)
    group.sleep()
    lacking = UserError("too little memory")
    fails = patch.object(KVCache, "_require_memory", side_effect=lacking if tp.rank else None)
    try:
        with fails:
            group.wake()
        message = ""
    except UserError as error:
        message = str(error)
    found = {"message": message, "state": group.state, "asleep": group._cache.is_asleep}
    group.wake()
    return found | {"same tokens": tokens_of(group, 0.0)[0] == before[0]}


# ---------------------------------------------------------------- weight sync


class Trainer:
    def __init__(self, model):
        self.model = model

    def named_weights(self):
        return export_weights(self.model)


def push(trainer, group, version):
    try:
        report = WeightSync(trainer, group).push(version)
    except (RuntimeError, NonFiniteWeightsError) as error:
        return f"{type(error).__name__}: {error}"
    return report.bytes


def weight_sync(name, tp):
    group = make_engine(make_model(name), tp)
    new = make_model(name, seed=1)
    trainer = Trainer(new)
    found = {}
    deliver = base.deliver

    def flip_a_bit(pairs):
        deliver(pairs)
        pairs[-1][0].view(torch.int32).view(-1)[-1] ^= 1
        return 0

    other = TensorParallel(rank=tp.size - 1 - tp.rank, size=tp.size, device=CPU)
    others = {n: shard_of(n, tensor, new.config, other) for n, tensor in trainer.named_weights()}

    def send_other_parts(pairs):
        deliver([(target, others[n]) for n, target in group.named_weights()])
        return 0

    faults = {
        "nothing sent": lambda pairs: 0,
        "the other rank's parts": send_other_parts,
        "a bit flipped": flip_a_bit,
        "a bit flipped on the last rank": deliver if tp.rank == 0 else flip_a_bit,
    }
    for fault, deliver_wrongly in faults.items():
        with patch.object(base, "deliver", deliver_wrongly):
            found[fault] = push(trainer, group, 1)
    last = new.model.layers[-1].mlp.down_proj.weight
    kept = last.detach().clone()
    with torch.no_grad():
        last[0, -1] = float("nan")  # in the part of the last rank
        found["not finite"] = push(trainer, group, 1)
        last.copy_(kept)
    found["bytes"] = push(trainer, group, 2)
    found["expected bytes"] = sum(t.nbytes for _, t in group.named_weights())
    expected = of_first(lambda: tokens_of(make_engine(new, None), 0.0))
    actual = tokens_of(group, 0.0)
    found["same tokens"] = expected[0] == actual[0]
    found["gap"] = largest_gap(expected[1], actual[1])
    return found


# ---------------------------------------------------------------- kernels


def connect_through(folder, tp):
    count = iter(range(1000))

    def connect(num_bytes):
        number = next(count)
        paths = [folder / f"{number}-{rank}" for rank in range(tp.size)]
        paths[tp.rank].write_bytes(bytes(num_bytes))
        dist.barrier()
        return [
            torch.from_file(str(path), shared=True, size=num_bytes, dtype=torch.uint8)
            for path in paths
        ]

    return connect


class Slow:
    """Holds the second rank back, between a meeting and reading, until the first has posted again.

    Ranks tell each other by files.
    """

    def __init__(self, folder, rank):
        self.folder, self.rank, self.num_posts = folder, rank, 0

    def post(self):
        self.num_posts += 1
        (self.folder / f"post-{self.rank}-{self.num_posts}").touch()

    def hold_back(self):
        deadline = time.monotonic() + 300
        while self.rank and not (self.folder / f"post-0-{self.num_posts + 1}").exists():
            assert time.monotonic() < deadline, "the first rank posts no more"
            time.sleep(0.001)


@triton.jit
def meet_and_read_late(flags_ptr, meetings_ptr, program, meeting, RANK, SIZE):
    slow.post()
    right_meet(flags_ptr, meetings_ptr, program, meeting, RANK, SIZE)
    slow.hold_back()
    tl.debug_barrier()


@triton.jit
def do_not_wait(flags_ptr, meetings_ptr, program, meeting, RANK, SIZE):
    tl.store(meetings_ptr + program, meeting)


right_meet = tensor_parallel_kernels._meet
slow = None


def kernel_sums(
    connect,
    tp,
    dtype,
    *,
    widths=(64,),
    rounds=(3, 6, 1, 6, 2),
    one_place=False,
    in_turn=False,
):
    """Rounds with different numbers of rows; the largest difference from sums in plain torch."""
    worst, equal = 0.0, True
    for width in widths:
        sums = SumMailboxes(
            connect, rank=tp.rank, size=tp.size, max_rows=6, width=width, dtype=dtype
        )
        for number, rows in enumerate(rounds):
            draw = torch.Generator().manual_seed(number)
            parts = torch.randn(tp.size, rows, width, generator=draw).to(dtype)
            residual, weight = (
                torch.randn(*shape, generator=draw).to(dtype) for shape in ((rows, width), (width,))
            )
            if one_place:
                sums._meetings += 1
            twin = residual.clone()
            total = parts.float().sum(0).to(dtype)
            norm = Norm(weight, EPS, zero_centred=rows == 6)
            expected = TorchKernels().add_rms_norm(total, twin, *norm)
            if in_turn and tp.rank > 0:
                dist.barrier()
            actual = sums.add_rms_norm(parts[tp.rank].contiguous(), residual, *norm)
            if in_turn and tp.rank == 0:
                dist.barrier()
            equal &= torch.equal(residual, twin)
            worst = max(worst, difference(actual, expected))
    return {"difference": worst, "residual is equal": equal}


def kernel_gathers(connect, tp):
    """Rows of one and of several tiles, and more rows than mailboxes."""
    gathers = GatherMailboxes(connect, rank=tp.rank, size=tp.size, num_programs=4)
    equal = True
    for number, shape in enumerate(((2, 40), (9, 25), (3, 4100), (1, 4096))):
        parts = torch.randn(tp.size, *shape, generator=torch.Generator().manual_seed(number))
        actual = gathers.gather_columns(parts[tp.rank].contiguous())
        equal &= torch.equal(actual, torch.cat(list(parts), 1))
    return {"equal": equal}


def kernels(folder, tp):
    connect = connect_through(folder, tp)
    found = {
        str(dtype): kernel_sums(connect, tp, dtype, widths=(64, 96))
        for dtype in (torch.float32, torch.float16)
    }
    found["gather"] = kernel_gathers(connect, tp)
    with patch.object(tensor_parallel_kernels, "_meet", do_not_wait):
        found["no wait"] = kernel_sums(connect, tp, torch.float32, in_turn=True)
    global slow
    slow = Slow(folder, tp.rank)
    with patch.object(tensor_parallel_kernels, "_meet", meet_and_read_late):
        for name, one_place in (("late", False), ("late, one place", True)):
            found[name] = kernel_sums(
                connect, tp, torch.float32, rounds=(1,) * 4, one_place=one_place
            )
            slow.post()  # lets go of the last round
    return found


def main(folder):
    folder = Path(folder)
    torch.set_num_threads(1)
    # In a process group only the first rank would write its files.
    own = folder / os.environ["RANK"]
    twins = {name: Twin(own / name, name) for name in ("qwen2_5_vl", "qwen3_vl")}
    tp = TensorParallel.from_environment(2, CPU)
    found = {
        "forward": {name: forward(name, tp) for name in (*MODELS, *UNFUSED)},
        "planted": planted(tp),
        "engine": {name: engine(options, tp) for name, options in ENGINES.items()},
        "images": {name: images(twin, tp) for name, twin in twins.items()},
        "cache": cache_sizes(tp),
        "failed wake": failed_wake(tp),
        "sync": {name: weight_sync(name, tp) for name in ("qwen3", "qwen3, heads of 128, tied")},
        "kernels": kernels(folder, tp),
        "smallest": tp.smallest(7 + tp.rank),
    }
    found_everywhere = everywhere(found)
    if tp.rank == 0:
        json.dump(found_everywhere, sys.stdout)
    dist.destroy_process_group()
