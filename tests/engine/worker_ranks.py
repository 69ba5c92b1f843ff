"""Runs a tensor-parallel engine in one of two processes (`tests.ranks`); rank 0 prints JSON."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from datetime import timedelta
from threading import Semaphore

import torch
import torch.distributed as dist

from hone.distributed.channel import GroupChannel
from hone.engine import worker
from hone.engine.engine import EmbeddedEngine
from hone.engine.settings import EngineConfig
from hone.engine.worker import EngineWorker
from hone.models.manifest import build_manifest
from hone.models.tensor_parallel import TensorParallel, shard_model
from hone.types import EngineLostError, Request, SamplingParams
from tests.models.test_generation_model import make_model

CPU = torch.device("cpu")
TIMEOUT_S = 300.0
"""Of a rank for another that is there."""
LOST_S = 3.0
"""Of a rank for another that is gone. However late it is noticed, it is said in the same words."""
INTERVAL_S = 0.25
REQUESTS = [
    Request(
        id=f"{seed}",
        prompt_ids=tuple(range(3 + seed % 2, 12)),
        sampling=SamplingParams(max_tokens=14, temperature=0.8 * (seed > 0), seed=seed),
    )
    for seed in range(4)
]
POISONED = replace(REQUESTS[0], id="poisoned", prompt_ids=(10**6,))


def make_engine(tp=None):
    model = make_model()
    cfg = EngineConfig(
        max_num_seqs=4,
        enforce_eager=True,
        tensor_parallel_size=tp.size if tp else 1,
    )
    model = model if tp is None else shard_model(model, tp)
    return EmbeddedEngine(
        model, cfg, eos_token_ids=(), max_model_len=64, block_size=4, tensor_parallel=tp
    )


def take(host, count):
    done, deadline = {}, time.monotonic() + TIMEOUT_S
    while len(done) < count:
        assert time.monotonic() < deadline
        done |= {c.request_id: c for c in host.poll(1.0).completions}
    return done


class Receiver:
    """Confirms the weights that are there, as a version."""

    def __init__(self, engine, rank):
        self.engine, self.rank, self.places = engine, rank, []

    def __call__(self, spec, place):
        self.places.append(place)
        if spec == "fails on the last":
            if self.rank:
                raise RuntimeError("the last one failed")
            return
        self.engine.begin_sync()
        self.engine.finish_sync(build_manifest(self.engine.named_weights(), spec))


def new_group(timeout_s):
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))


class CountedChannel(GroupChannel):
    """Counts what the first rank sends."""

    def __init__(self, group):
        super().__init__(group)
        self.sent = Semaphore(0)

    def broadcast(self, value):
        self.sent.release()
        return super().broadcast(value)


def idle(channel):
    """What a first rank without work needs to send something four times, which keeps the others
    waiting: CPU seconds, and whether it waits meanwhile."""
    while channel.sent.acquire(blocking=False):
        pass
    cpu_s, start_s = time.process_time(), time.monotonic()
    for _ in range(4):
        assert channel.sent.acquire(timeout=TIMEOUT_S), "the others are left waiting"
    return {
        "cpu seconds": time.process_time() - cpu_s,
        "waits": time.monotonic() - start_s >= 3 * INTERVAL_S,
    }


def command(host, engine, channel):
    """The first rank's part of a session."""
    found = {}
    host.submit(REQUESTS)
    done = take(host, 4)
    found["tokens"] = [list(done[r.id].token_ids) for r in REQUESTS]
    alone = make_engine()
    alone.submit(REQUESTS)
    expected = {}
    while alone.has_unfinished:
        expected |= {c.request_id: list(c.token_ids) for c in alone.step()}
    found["tokens of one rank"] = [expected[r.id] for r in REQUESTS]

    host.receive(5, 3)
    host.submit([POISONED, replace(REQUESTS[1], id="good"), replace(REQUESTS[0], id="aborted")])
    (aborted,) = host.abort(["aborted", "unknown"]) or [None]
    again = take(host, 2)
    found["errors"] = {
        "good": again["good"].error,
        "poisoned": "vocabulary" in again["poisoned"].error,
    }
    found["aborted is a prefix"] = (
        list(aborted.token_ids) == found["tokens"][0][: len(aborted.token_ids)]
    )
    found["versions"] = [list(one.weight_versions) for one in (done["1"], again["good"])]
    try:
        host.receive("fails on the last")
    except RuntimeError as error:
        found["error of rank 1"] = str(error)
    host.receive(6)
    found["idle"] = idle(channel)
    host.submit([replace(REQUESTS[2], id="later")])
    found["alive after idling"] = take(host, 1)["later"].token_ids == found["tokens"][2]
    found["first rank"] = [host.poll().stats.num_generated_tokens, engine.has_unfinished]
    host.close()
    return found


def new_host(group, *, fails=False):
    """Of a rank whose engine needs no other, so that it can be without them."""
    engine = make_engine()
    if fails:
        engine.step = None  # cannot be called
    return EngineWorker(engine, None, name="engine 2", ranks=GroupChannel(group))


def other_rank_fails(rank, group):
    """What the first says of it."""
    host = new_host(group, fails=rank > 0)
    if rank:
        try:
            host.follow()
        except (TypeError, EngineLostError):  # the first may have given up before
            return None
    try:
        host.submit(REQUESTS)
        take(host, 4)
    except EngineLostError as error:
        return str(error)
    return "nothing"


def first_rank_is_gone(rank, group):
    """What another says of it."""
    if rank == 0:
        dist.destroy_process_group(group)
        return None
    host = new_host(group)
    try:
        host.follow()
    except EngineLostError as error:
        return str(error)
    return "nothing"


def main():
    torch.set_num_threads(1)
    tp = TensorParallel.from_environment(2, CPU)
    engine = make_engine(tp)
    receiver = Receiver(engine, tp.rank)
    groups = [new_group(timeout_s) for timeout_s in (TIMEOUT_S, LOST_S, LOST_S)]
    worker.IDLE_S = INTERVAL_S
    channel = CountedChannel(groups[0])
    host = EngineWorker(engine, receiver, name="engine 2", ranks=channel)
    if tp.rank == 0:
        found = command(host, engine, channel)
    else:
        host.follow()
        found = {"other rank": [engine.stats().num_generated_tokens, engine.has_unfinished]}
        found["leader closed"] = "followed to the end"
        assert not host._finished
    places = receiver.places[0]
    found["follower died" if tp.rank == 0 else "follower"] = other_rank_fails(tp.rank, groups[1])
    dist.barrier()
    found["leader died" if tp.rank else "leader"] = first_rank_is_gone(tp.rank, groups[2])
    everyone = [None, None]
    dist.all_gather_object(everyone, (places, found))
    if tp.rank == 0:
        merged = everyone[0][1] | everyone[1][1]
        json.dump(merged | {"places": [of_rank for of_rank, _ in everyone]}, sys.stdout)
