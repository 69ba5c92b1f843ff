"""Runs the way of weights to engines apart in four processes (`tests.ranks`); rank 0 prints JSON.

Ranks 0 and 1 are a trainer, FSDP or tensor parallel. Rank 2 has an embedded engine. Rank 3 has two
ranks of a tensor-parallel engine, as threads; it forks, so that its engine can be killed and comes
back. Trainers and engines share no process group: rank 0 calls engines over sockets.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext
from datetime import timedelta
from itertools import count
from multiprocessing.connection import Client, Connection, Listener
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from hone.checkpoint.sharded import local_part
from hone.distributed.joined import JoinedMesh
from hone.distributed.mesh import Mesh
from hone.distributed.settings import AxisSizes
from hone.engine import base
from hone.engine.engine import EmbeddedEngine
from hone.engine.settings import EngineConfig
from hone.models.adapted import merged_weights
from hone.models.adapters import adapt
from hone.models.manifest import (
    ManifestDiff,
    build_manifest,
    compare,
    export_weights,
    memory_of,
)
from hone.models.settings import LoraConfig
from hone.models.tensor_parallel import TensorParallel, shard_of
from hone.trainer.sharded import ShardedPolicy
from hone.trainer.tensor import parallelize
from hone.types import EngineLostError, Request, SamplingParams, WeightManifest
from hone.weights import broadcast, receiver
from hone.weights.broadcast import BroadcastSync
from hone.weights.buckets import WeightBucket
from hone.weights.link import Link
from hone.weights.protocol import ReceiveSpec
from hone.weights.receiver import WeightReceiver
from tests.recurrent.models import HYBRID
from tests.trainer.examples import tiny_model

CPU = torch.device("cpu")
CASES: dict[str, dict[str, Any]] = {
    "qwen3, tied": {"family": "qwen3"},
    "llama, untied": {"family": "llama", "tie_word_embeddings": False},
    "qwen3, tied, odd vocabulary": {"family": "qwen3", "vocab_size": 51},
    "hybrid": HYBRID,
}

DTYPES = (torch.float32, torch.bfloat16, torch.float32, torch.float32)
"""What the engines of each case compute in."""
ENGINES = {"one": 1, "two": 2}
"""Ranks of each."""
KILLED = 9

# ---------------------------------------------------------------- engines


class PartEngine:
    """One rank's parts of a model's weights, and the part of the protocol that a sync uses."""

    def __init__(self, model: Any, rank: int, dtype: torch.dtype) -> None:
        self._tp = TensorParallel(rank=rank, size=ENGINES["two"], device=CPU)
        self._config = model.config
        self._weights: dict[str, Tensor] = {}
        self.weight_version = 0
        made: dict[object, Tensor] = {}
        parts: list[Tensor] = []  # kept: the memory of one that was copied would be that of another
        for name, tensor in export_weights(model):
            part = self.shard(name, tensor)
            parts.append(part)
            zeros = torch.zeros(part.shape, dtype=dtype)
            self._weights[name] = made.setdefault(memory_of(part), zeros)

    def begin_sync(self) -> None:
        pass

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._weights.items())

    def shard(self, name: str, tensor: Tensor) -> Tensor:
        return shard_of(name, tensor, self._config, self._tp)

    def write(self, parts: Mapping[str, tuple[Tensor, Tensor]]) -> int:
        return base.deliver(list(parts.values()))

    def finish_sync(self, manifest: WeightManifest) -> None:
        diff = compare(manifest, build_manifest(self.named_weights(), manifest.version))
        if diff:
            raise RuntimeError(diff.describe())
        self.weight_version = manifest.version


def embedded(model: Any) -> EmbeddedEngine:
    cfg = EngineConfig(kv_cache_gib=0.001, max_num_seqs=4, max_num_batched_tokens=64)
    engine = EmbeddedEngine(model, cfg, eos_token_ids=(2,), max_model_len=64)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return engine


def generate(engine: EmbeddedEngine) -> list[int]:
    """Versions of the tokens of an answer."""
    params = SamplingParams(max_tokens=4, seed=3, ignore_eos=True)
    requests = [Request(id="r", prompt_ids=(5, 6, 7), sampling=params)]
    try:
        engine.submit(requests)
        while engine.has_unfinished:
            if done := engine.step():
                return list(done[0].weight_versions)
    finally:
        engine.abort(["r"])
    return []


named_views, wait, deliver = WeightBucket.named_views, Link.wait, base.deliver
begin_sync = EmbeddedEngine.begin_sync


def flip_one_bit(self: WeightBucket, buffer: Tensor) -> Any:
    buffer[buffer.numel() // 2] ^= 1
    return named_views(self, buffer)


memory = torch.empty(1 << 20, dtype=torch.uint8)


def reuse(self: WeightBucket, device: torch.device) -> Tensor:
    """The next bucket comes into memory whose weights have not been taken yet."""
    return memory[: self.num_bytes]


def wait_long(self: Link, work: Any, board: Any) -> None:
    wait(self, work, board)
    time.sleep(0.1)


def die(self: Link, work: Any, board: Any) -> None:
    wait(self, work, board)
    os._exit(KILLED)


given_up, give_up = os.pipe()
"""Readable once the trainer has stopped waiting for the engine that hangs. An event of
multiprocessing would need a semaphore, for which a host may have no room in /dev/shm."""


def hang(self: Any) -> None:
    select.select([given_up], [], [], 600)
    begin_sync(self)


def lose_first(pairs: Any) -> int:
    return deliver(list(pairs)[1:])


def believe(*_: Any) -> ManifestDiff:
    return ManifestDiff()


FAULTS: dict[str, list[tuple[Any, str, Any]]] = {
    "flipped bit": [(WeightBucket, "named_views", flip_one_bit)],
    "flipped bit, no proof": [
        (WeightBucket, "named_views", flip_one_bit),
        (receiver, "compare", believe),
    ],
    "lost tensor": [(base, "deliver", lose_first)],
    "reused too early": [(WeightBucket, "new_buffer", reuse), (Link, "wait", wait_long)],
    "killed": [(Link, "wait", die)],
    "hung": [(EmbeddedEngine, "begin_sync", hang)],
}
"""Planted in the process of an engine, for one delivery."""


class Served:
    """The ranks of one engine in this process, as rank 0 of the trainer calls them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.engines: list[Any] = []
        self.receivers: list[WeightReceiver] = []

    def make(self, case: str, dtype: torch.dtype) -> None:
        model = tiny_model(**CASES[case], seed=1).to(dtype)
        if self.name == "one":
            self.engines = [embedded(model)]
        else:
            self.engines = [PartEngine(model, rank, dtype) for rank in range(ENGINES["two"])]
        self.receivers = [WeightReceiver(engine, CPU) for engine in self.engines]

    def receive(self, spec: ReceiveSpec, first_rank: int, fault: str | None) -> None:
        with ExitStack() as stack:
            for planted in FAULTS[fault] if fault else []:
                stack.enter_context(patch.object(*planted))
            pool = stack.enter_context(ThreadPoolExecutor(len(self.receivers)))
            answers = [
                pool.submit(receiver.receive, spec, first_rank + rank)
                for rank, receiver in enumerate(self.receivers)
            ]
            for answer in answers:
                answer.result()

    def weights(self) -> list[dict[str, Tensor]]:
        return [{n: t.clone() for n, t in e.named_weights()} for e in self.engines]

    def versions(self) -> list[int]:
        return [engine.weight_version for engine in self.engines]

    def generate(self) -> list[int]:
        return generate(self.engines[0])


def serve(name: str, address: str) -> None:
    served = Served(name)
    calls = connect(address)
    while True:
        method, *arguments = calls.recv()
        if method == "end":
            return
        try:
            calls.send((getattr(served, method)(*arguments), None))
        except (RuntimeError, ValueError) as error:
            calls.send((None, error))


def connect(address: str) -> Connection:
    while not Path(address).exists():
        time.sleep(0.02)
    return Client(address)


def serve_again_when_killed(name: str, folder: str) -> None:
    for life in count():
        pid = os.fork()
        if not pid:
            serve(name, f"{folder}/{name}{life}")
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        if os.waitstatus_to_exitcode(status) != KILLED:
            return


# ---------------------------------------------------------------- the trainer's side


class Answer:
    def __init__(self, engine: str, calls: Connection) -> None:
        self._engine, self._calls = engine, calls
        self._told: tuple[Any, Exception | None] | None = None

    def result(self, timeout_s: float) -> Any:
        if self._told is None:
            try:
                if not self._calls.poll(timeout_s):
                    raise TimeoutError
                self._told = self._calls.recv()
            except (EOFError, ConnectionError) as error:
                raise EngineLostError(self._engine, "its process is gone") from error
        value, error = self._told
        if error is not None:
            raise error
        return value


class Engines:
    """`Receivers` over sockets."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._lives = dict.fromkeys(ENGINES, -1)
        self._calls: dict[str, Connection] = {}
        self.faults: dict[str, str] = {}
        self.held = 0
        self.version = 0
        for name in ENGINES:
            self.meet(name)

    @property
    def engine_ranks(self) -> Mapping[str, int]:
        return ENGINES

    def meet(self, name: str) -> None:
        self._lives[name] += 1
        with Listener(f"{self._folder}/{name}{self._lives[name]}") as listener:
            self._calls[name] = listener.accept()

    def call(self, name: str, method: str, *arguments: Any, timeout_s: float = 300.0) -> Any:
        return self.start(name, method, *arguments).result(timeout_s)

    def start(self, name: str, method: str, *arguments: Any) -> Answer:
        self._calls[name].send((method, *arguments))
        return Answer(name, self._calls[name])

    def begin_sync(self) -> None:
        self.held += 1

    def start_receive(self, spec: ReceiveSpec) -> list[Answer]:
        answers: list[Answer] = []
        first_rank = 0
        for name, num_ranks in ENGINES.items():
            fault = self.faults.pop(name, None)
            answers.append(self.start(name, "receive", spec, first_rank, fault))
            first_rank += num_ranks
        return answers

    def finish_sync(self, version: int) -> None:
        self.version = version

    def make(self, case: str, dtype: torch.dtype) -> None:
        self.config = tiny_model(**CASES[case]).config
        for name in ENGINES:
            self.call(name, "make", case, dtype)

    def wrong(self, whole: Mapping[str, Tensor], dtype: torch.dtype) -> list[str]:
        """Names whose bits are not in some engine."""
        found: list[str] = []
        for engine, num_ranks in ENGINES.items():
            for rank, held in enumerate(self.call(engine, "weights")):
                tp = TensorParallel(rank=rank, size=num_ranks, device=CPU)
                assert held.keys() == whole.keys()
                for name, tensor in whole.items():
                    if not torch.equal(
                        held[name], shard_of(name, tensor, self.config, tp).to(dtype)
                    ):
                        found.append(f"{engine} {rank} {name}")
        return found


def make_policy(case: str, mesh: Mesh) -> ShardedPolicy:
    model = tiny_model(**CASES[case])
    if mesh.tensor.size > 1:
        parallelize(model, mesh)
    return ShardedPolicy(model, mesh, stage=3)


@torch.no_grad()
def move(policy: ShardedPolicy) -> None:
    """A deterministic update."""
    for parameter in policy.parameters.values():
        local_part(parameter).mul_(1.25)


def whole_weights(policy: ShardedPolicy) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in policy.named_weights()}


def outcome(function: Callable[[], Any]) -> str:
    """Of a push: its error, or nothing."""
    try:
        function()
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def arrivals(meshes: Mapping[str, Mesh], engines: Engines | None) -> dict[str, Any]:
    """Bit for bit, from any mesh, in buckets of any size, twice over one link."""
    found: dict[str, Any] = {}
    for kind, mesh in meshes.items():
        for case, dtype in zip(CASES, DTYPES, strict=True):
            policy = make_policy(case, mesh)
            if engines:
                engines.make(case, dtype)
            num_bytes = sum(t.nbytes for t in whole_weights(policy).values())
            for bucket_bytes in (1, 5000, num_bytes) if case == "qwen3, tied" else (5000,):
                name = f"{kind}, {case}, {bucket_bytes}"
                pushing = BroadcastSync(
                    policy, mesh, engines, bucket_bytes=bucket_bytes, timeout_s=300.0
                )
                found[name] = [push_and_look(pushing, v, dtype) for v in (1, 2)]
                pushing.close()
            if engines:
                found[name].append({"tokens": engines.call("one", "generate")})
    return found


def push_and_look(pushing: BroadcastSync, version: int, dtype: torch.dtype) -> dict[str, Any]:
    move(pushing.trainer)
    pushing.push(version)
    whole = whole_weights(pushing.trainer)
    engines = pushing.receivers
    if engines is None:
        return {}
    return {
        "wrong": engines.wrong(whole, dtype),
        "versions": [engines.call(engine, "versions") for engine in ENGINES],
        "confirmed": engines.version,
        "link": pushing._link.generation,
    }


class AdaptedPolicy:
    """A sharded policy that trains adapters over a frozen base."""

    def __init__(self, mesh: Mesh, lora: LoraConfig) -> None:
        model = tiny_model(**CASES["qwen3, tied"])
        adapt(model, lora, seed=3)
        self.policy = ShardedPolicy(model, mesh, stage=3)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return merged_weights(self.policy.model, self.policy.named_weights())

    @torch.no_grad()
    def move(self) -> None:
        for parameter in self.policy.parameters.values():
            if parameter.requires_grad:
                local_part(parameter).add_(0.125)


def adapters(mesh: Mesh, engines: Engines | None) -> dict[str, Any]:
    """Merged weights of a sharded trainer."""
    found: dict[str, Any] = {}
    for name, is_4bit in {"whole": False, "4-bit": True}.items():
        lora = LoraConfig(rank=3, alpha=7.0, load_in_4bit=is_4bit)
        trainer = AdaptedPolicy(mesh, lora)
        if engines:
            engines.make("qwen3, tied", torch.float32)
        pushing = BroadcastSync(trainer, mesh, engines, bucket_bytes=5000, timeout_s=300.0)
        own: dict[str, Any] = {"wrong": []}
        for version in (1, 2):
            trainer.move()
            pushing.push(version)
            whole = {n: t.clone() for n, t in trainer.named_weights()}
            if engines:
                own["wrong"] += engines.wrong(whole, torch.float32)
        if engines:
            own["version"] = engines.version
        pushing.close()
        found[name] = own
    return found


def failures(mesh: Mesh, engines: Engines | None) -> dict[str, Any]:
    """Each is named on all ranks, leaves engines without tokens, and the next push is good."""
    found: dict[str, Any] = {}
    policy = make_policy("llama, untied", mesh)
    if engines:
        engines.make("llama, untied", torch.float32)
    pushing = BroadcastSync(policy, mesh, engines, bucket_bytes=5000, timeout_s=300.0)
    pushing.push(1)
    versions = count(2)
    real_manifest = broadcast.build_manifest

    def stale_version(named: Any, version: int) -> WeightManifest:
        return real_manifest(named, version - 1)

    plants: dict[str, tuple[dict[str, str], Any]] = {
        "flipped bit": ({"two": "flipped bit"}, nullcontext()),
        "flipped bit, no proof": ({"two": "flipped bit, no proof"}, nullcontext()),
        "lost tensor": ({"two": "lost tensor"}, nullcontext()),
        "reused too early": ({"one": "reused too early"}, nullcontext()),
        "stale version": ({}, patch.object(broadcast, "build_manifest", stale_version)),
        "not finite": ({}, nullcontext()),
        "killed": ({"two": "killed"}, nullcontext()),
        "hung": ({"one": "hung"}, patch.object(pushing, "timeout_s", 1.0)),
    }
    weight = local_part(policy.parameters["model.layers.1.mlp.up_proj.weight"].detach())
    for name, (faults, plant) in plants.items():
        move(policy)
        if engines:
            engines.faults = dict(faults)
        kept = weight[0, 0].item()
        if name == "not finite" and mesh.world.rank == 1:
            weight[0, 0] = float("nan")
        start = time.monotonic()
        with plant, patch.object(broadcast, "SETTLE_S", 0.5):
            told = outcome(lambda: pushing.push(next(versions)))
        seconds = time.monotonic() - start
        if name == "hung":
            os.write(give_up, b"1")
        whole = whole_weights(policy)
        weight[0, 0] = kept
        own = {"told": told, "seconds": seconds, "everywhere": mesh.gather(told)}
        if engines:
            if name == "killed":
                engines.meet("two")
                engines.call("two", "make", "llama, untied", torch.float32)
            if name == "hung":
                engines._calls["one"].recv()  # what it says when it is too late
            own["wrong"] = engines.wrong(whole, torch.float32)
            own["tokens"] = outcome(lambda: engines.call("one", "generate"))
            own["nan"] = any(
                bool(t.isnan().any())
                for e in ENGINES
                for w in engines.call(e, "weights")
                for t in w.values()
            )
        good = next(versions)
        own["then"] = outcome(lambda v=good: pushing.push(v))
        whole = whole_weights(policy)
        if engines:
            own["then wrong"] = engines.wrong(whole, torch.float32)
            own["link"] = pushing._link.generation
            own["then tokens"] = engines.call("one", "generate") == [good] * 4
        found[name] = own
    found["layout"] = changed_layout(pushing, policy)
    pushing.close()
    return found


def changed_layout(pushing: BroadcastSync, policy: ShardedPolicy) -> dict[str, str]:
    """Weights that engines do not have, and weights that were other ones before."""
    named = policy.named_weights

    def without_norm() -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor) for name, tensor in named() if name != "model.norm.weight")

    with patch.object(policy, "named_weights", without_norm):
        changed = outcome(lambda: pushing.push(100))
        refused = outcome(lambda: pushing.push(101))
    return {"changed": changed, "refused": refused, "then": outcome(lambda: pushing.push(102))}


def main(folder: str) -> None:
    rank = int(os.environ["RANK"])
    if rank == 2:
        serve("one", f"{folder}/one0")
        return
    if rank == 3:
        serve_again_when_killed("two", folder)
        return
    timeout = timedelta(seconds=300)
    dist.init_process_group("gloo", rank=rank, world_size=2, timeout=timeout)
    meshes = {
        "stage 3": JoinedMesh.of_group(AxisSizes(data=2, fsdp=2), CPU, timeout=timeout),
        "tensor 2": JoinedMesh.of_group(AxisSizes(tensor=2), CPU, timeout=timeout),
    }
    engines = Engines(folder) if rank == 0 else None
    start = time.monotonic()
    found = {"arrivals": arrivals(meshes, engines)}
    found["adapters"] = adapters(meshes["stage 3"], engines)
    found["failures"] = failures(meshes["stage 3"], engines)
    found["seconds"] = time.monotonic() - start
    if engines:
        for name in ENGINES:
            engines._calls[name].send(("end",))
        json.dump(found, sys.stdout)
    dist.barrier()
    dist.destroy_process_group()
