"""Routing replay on a GPU: what graphs and kernels record, what it mends, what it costs.

python -m benchmarks.gpu.routes_check [SECTION ...] [--seconds N] [--backend vllm]

replay     choices of a trainer that differ from those recorded, and log-probabilities, of four
           layers of Qwen3-30B-A3B in bfloat16, with replay and without
time       tokens/s of the engine, of sequences that end all the time, with recording and without
"""

from __future__ import annotations

import argparse
import random
import sys
from functools import partial
from time import perf_counter

import torch
from benchmarks.gpu.models import build
from benchmarks.gpu.sections import Run
from tests.trainer.examples import make_trainer
from tests.trainer.route_cases import complete, passed, rows_of
from transformers import PreTrainedModel

from hone.engine.engine import EmbeddedEngine
from hone.engine.settings import EngineConfig
from hone.engine.vllm.engine import VLLMEngine
from hone.models.decoder import alias_module
from hone.types import Engine, Request, SamplingParams

SECTIONS = ("replay", "time")
SHAPE, NUM_LAYERS = "qwen3-30b-a3b", 4


def engine_of(run: Run, model: PreTrainedModel, *, records_routes: bool) -> Engine:
    limits = {"max_num_seqs": 256, "gpu_memory_utilization": 0.4}
    options = {"eos_token_ids": (), "max_model_len": 1024, "records_routes": records_routes}
    if run.args.backend == "vllm":
        return VLLMEngine(model, EngineConfig(**limits, backend="vllm", kv_cache_gib=8), **options)
    return EmbeddedEngine(alias_module(model), EngineConfig(**limits), **options)


def requests_of(number: int, *, shortest: int, longest: int) -> list[Request]:
    draw = random.Random(1)
    return [
        Request(
            id=f"g/{i}",
            prompt_ids=tuple(draw.randrange(100_000) for _ in range(draw.randint(20, 100))),
            sampling=SamplingParams(max_tokens=draw.randint(shortest, longest), seed=i),
        )
        for i in range(number)
    ]


def replay(run: Run) -> None:
    model = build(SHAPE, num_layers=NUM_LAYERS)
    requests = requests_of(64, shortest=20, longest=60)
    rows = rows_of(requests, complete(engine_of(run, model, records_routes=True), requests))
    recorded = torch.cat([row.column("routes") for row in rows]).long()
    sampled = torch.cat([row.column("logprobs/engine") for row in rows])
    run.row("", "others", "mean |dlogp|", "largest")
    for replays in (False, True):
        model = build(SHAPE, num_layers=NUM_LAYERS)
        trainer = make_trainer(
            model,
            replays_routes=replays,
            compile=False,  # or what `passed` adds would not be called
            max_tokens_per_microbatch=16_384,
            logits_chunk_tokens=1024,
        )
        with passed(model) as ids:
            trained = torch.cat(trainer.logprobs(rows))
        found = torch.stack([own.cpu() for own in ids[-NUM_LAYERS:]], 1)
        # As sets: two experts of one score may come in either order.
        differs = found.sort(-1).values != recorded.sort(-1).values
        share = float(differs[recorded[:, 0, 0] != 255].float().mean())
        off = (trained - sampled).abs()
        run.row("replayed" if replays else "live", share, float(off.mean()), float(off.max()))
        assert not replays or share == 0, f"{share} of the choices are not those recorded"
        del trainer, model


def time_engine(run: Run) -> None:
    model = build(SHAPE, num_layers=NUM_LAYERS)
    requests = requests_of(1024, shortest=64, longest=512)
    run.row("tokens/s", "first", "second")
    for records in (False, True):
        engine, found = engine_of(run, model, records_routes=records), []
        for _ in range(2):
            started = perf_counter()
            done = complete(engine, requests)
            found.append(sum(len(x.token_ids) for x in done) / (perf_counter() - started))
        run.row("recorded" if records else "plain", *found)
        del engine


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--backend", default="embedded", choices=["embedded", "vllm"])


def main() -> None:
    run = Run(__doc__, SECTIONS, seconds=240, add_flags=add_flags)
    run.row(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    work = (replay, time_engine)
    sys.exit(run.go({name: partial(part, run) for name, part in zip(SECTIONS, work, strict=True)}))


if __name__ == "__main__":
    main()
