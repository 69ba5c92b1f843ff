"""Weights from training processes to engines in processes of their own: parity and speed.

    NCCL_NVLS_ENABLE=0 torchrun --nproc-per-node 2 -m benchmarks.gpu.weight_sync_check
    torchrun --nproc-per-node 8 -m benchmarks.gpu.weight_sync_check --trainers 4 speed
    torchrun --nproc-per-node 3 -m benchmarks.gpu.weight_sync_check --trainers 2 --dry   (on CPUs)

The first `--trainers` processes train (FSDP, stage 3, where there are several), each of the others
has an engine. All reach each other over the weight link, and through the launcher's store.

    parity    every bit of a small model, in buckets of several sizes, twice over one link
    hung      an engine that stops taking part is named within the deadline; the next delivery is
              good, over a new link
    speed     an 8B-shaped model: seconds and GB/s of a delivery for each size of buckets, proof
              included; the first over a link also makes it
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from benchmarks.gpu.models import build
from benchmarks.gpu.sections import Run, release
from torch import Tensor
from transformers import PreTrainedModel

from hone.checkpoint.sharded import local_part
from hone.distributed.joined import JoinedMesh
from hone.distributed.mesh import Mesh
from hone.distributed.settings import AxisSizes
from hone.engine.engine import EmbeddedEngine
from hone.engine.settings import EngineConfig
from hone.models.manifest import build_manifest, compare, export_weights
from hone.trainer.sharded import ShardedPolicy
from hone.types import EngineLostError, WeightManifest
from hone.weights import broadcast
from hone.weights.broadcast import BroadcastSync
from hone.weights.link import Link
from hone.weights.protocol import ReceiveSpec
from hone.weights.receiver import WeightReceiver

MIB = 1 << 20
SMALL: dict[str, Any] = {"shape": "qwen3-0.6b", "num_layers": 4}
LARGE: dict[str, Any] = {"shape": "qwen3-8b"}
DRY: dict[str, Any] = {
    "shape": "qwen3-0.6b",
    "num_layers": 2,
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
BUCKETS = (64 * MIB, 256 * MIB, 512 * MIB, 1024 * MIB)
PUSHES = 4
FLOOR_S = 0.5
"""Of a delivery of 8B weights in bfloat16, over a link that stands."""
HUNG_S = 10.0


def calls() -> dist.Store:
    """Where trainers leave calls, and engines answers."""
    address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = dist.TCPStore(address, port, timeout=timedelta(seconds=600))
    return dist.PrefixStore("weight_sync_check", store)


# ---------------------------------------------------------------- engines


class BeginLate:
    """`Link.broadcast`, the first time long after it was called."""

    def __init__(self) -> None:
        self._pause_s = HUNG_S + broadcast.SETTLE_S + 3.0  # it must not answer in time
        self._begin = Link.broadcast

    def __call__(self, link: Link, tensor: Tensor) -> dist.Work:
        pause_s, self._pause_s = self._pause_s, 0.0
        time.sleep(pause_s)  # NCCL takes a broadcast whose other members are gone
        return self._begin(link, tensor)


class Served:
    """The engine of this process."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank, self.device = rank, device
        self.engine: EmbeddedEngine
        self.receiver: WeightReceiver

    def make(self, fields: dict[str, Any]) -> None:
        self.drop()
        model = build(**fields, device=self.device)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        cfg = EngineConfig(kv_cache_gib=0.5, max_num_seqs=4, max_num_batched_tokens=256)
        self.engine = EmbeddedEngine(model, cfg, eos_token_ids=(), max_model_len=256)
        self.receiver = WeightReceiver(self.engine, self.device)

    def drop(self) -> None:
        if hasattr(self, "engine"):
            self.receiver.close()
            del self.engine, self.receiver
        release()

    def receive(self, spec: ReceiveSpec, hangs: bool) -> None:
        if not hangs:
            self.receiver.receive(spec, self.rank)
            return
        late = BeginLate()
        with patch.object(Link, "broadcast", lambda link, tensor: late(link, tensor)):
            self.receiver.receive(spec, self.rank)

    def manifest(self) -> WeightManifest:
        return build_manifest(self.engine.named_weights(), self.engine.weight_version)


def serve(rank: int, device: torch.device) -> None:
    served, store, number = Served(rank, device), calls(), 0
    while True:
        method, *arguments = pickle.loads(store.get(f"call {number}"))
        if method == "end":
            return
        try:
            answer = getattr(served, method)(*arguments), None
        except (RuntimeError, ValueError, TypeError, AttributeError) as error:
            answer = None, RuntimeError(str(error))
        store.set(f"answer {number} {rank}", pickle.dumps(answer))
        number += 1


# ---------------------------------------------------------------- trainers


class Answer:
    def __init__(self, store: dist.Store, key: str) -> None:
        self._store, self._key = store, key

    def result(self, timeout_s: float, /) -> Any:
        deadline = time.monotonic() + timeout_s
        while not self._store.check([self._key]):
            if time.monotonic() >= deadline:
                raise TimeoutError
            time.sleep(0.001)
        value, error = pickle.loads(self._store.get(self._key))
        if error is not None:
            raise error
        return value


class Engines:
    """`Receivers`, as the first trainer calls them."""

    def __init__(self, num_engines: int) -> None:
        self._store, self._number = calls(), 0
        self.engine_ranks: Mapping[str, int] = {f"engine {i}": 1 for i in range(num_engines)}
        self.hangs = False

    def call(self, *call: Any) -> list[Answer]:
        self._store.set(f"call {self._number}", pickle.dumps(call))
        self._number += 1
        return [
            Answer(self._store, f"answer {self._number - 1} {rank}")
            for rank in range(len(self.engine_ranks))
        ]

    def ask(self, *call: Any) -> list[Any]:
        return [answer.result(300.0) for answer in self.call(*call)]

    def begin_sync(self) -> None:
        pass

    def start_receive(self, spec: ReceiveSpec) -> list[Answer]:
        return self.call("receive", spec, self.hangs)

    def finish_sync(self, version: int) -> None:
        pass


class WholeTrainer:
    """One process's."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.parameters = dict(model.named_parameters())
        self._model = model

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return export_weights(self._model)


class Trainers:
    """This process's place among them, and what they send."""

    def __init__(self, run: Run, mesh: Mesh, engines: Engines | None) -> None:
        self.run, self.mesh, self.engines = run, mesh, engines
        self.is_dry = run.args.dry

    def make(self, fields: dict[str, Any]) -> Any:
        release()
        if self.engines is not None:
            self.engines.ask("make", fields)
        model = build(**fields, device=self.mesh.device)
        if self.mesh.world.size == 1:
            return WholeTrainer(model)
        return ShardedPolicy(model, self.mesh, stage=3)

    def sync(
        self, trainer: Any, bucket_bytes: int, timeout_s: float = 120.0, **adapted: Any
    ) -> BroadcastSync:
        return BroadcastSync(
            trainer,
            self.mesh,
            self.engines,
            bucket_bytes=bucket_bytes,
            timeout_s=timeout_s,
            **adapted,
        )

    def num_wrong(self, trainer: Any) -> int:
        """Tensors that some engine does not hold as the trainer does."""
        wanted = build_manifest(trainer.named_weights(), 0)
        held = self.engines.ask("manifest") if self.engines is not None else []
        diffs = [compare(wanted, found) for found in held]
        return sum(len(d.missing) + len(d.unexpected) + len(d.different) for d in diffs)


@torch.no_grad()
def move(trainer: Any) -> None:
    for parameter in trainer.parameters.values():
        local_part(parameter.detach()).mul_(1.25)


def check_parity(own: Trainers) -> None:
    own.run.row("parity", "tensors wrong", "bytes", "new links")
    trainer = own.make(DRY if own.is_dry else SMALL)
    for bucket_bytes in (1, MIB, 64 * MIB, 1 << 40):
        sync = own.sync(trainer, bucket_bytes)
        links: set[Any] = set()
        for version in (1, 2):
            move(trainer)
            report = sync.push(version)
            links.add(sync._link)
            wrong = own.num_wrong(trainer)
            name = f"buckets of {bucket_bytes} bytes, version {version}"
            own.run.check(name, not wrong and len(links) == 1, wrong, report.bytes, len(links))
        sync.close()


def check_hung(own: Trainers) -> None:
    own.run.row("hung", "seconds")
    trainer = own.make(DRY if own.is_dry else SMALL)
    sync = own.sync(trainer, 64 * MIB, HUNG_S)
    sync.push(1)
    if own.engines is not None:
        own.engines.hangs = True
    start, told = time.perf_counter(), ""
    try:
        sync.push(2)
    except EngineLostError as error:
        told = str(error)
    finally:
        if own.engines is not None:
            own.engines.hangs = False
    seconds = time.perf_counter() - start
    limit = HUNG_S + broadcast.SETTLE_S + 2.0
    own.run.check(f"named: {told[:30]}", bool(told) and seconds < limit, seconds)
    time.sleep(5.0)  # the engine comes back
    move(trainer)
    own.run.check("the next", True, sync.push(3).seconds)
    own.run.check("tensors wrong", not (wrong := own.num_wrong(trainer)), wrong)
    sync.close()


def time_deliveries(own: Trainers) -> None:
    own.run.row("speed", "first s", "best s", "GB/s", "walk s", "GiB sent", "peak GiB")
    trainer = own.make(DRY if own.is_dry else LARGE)
    best: list[float] = []
    for bucket_bytes in BUCKETS:
        if not own.run.has_time(f"buckets of {bucket_bytes // MIB} MiB"):
            continue
        release()
        sync = own.sync(trainer, bucket_bytes)
        reports = [sync.push(version) for version in range(1, 1 + PUSHES)]
        sync.close()
        seconds = [report.seconds for report in reports]
        start = time.perf_counter()
        for _ in trainer.named_weights():
            pass
        walk = _waited(own.mesh.device, start)
        sent = reports[0].bytes
        peak = 0
        if own.mesh.device.type == "cuda":
            peak = torch.cuda.max_memory_allocated()
        best.append(min(seconds[1:]))
        cells = (seconds[0], best[-1], sent / best[-1] / 1e9, walk, sent / (1 << 30))
        own.run.row(f"buckets of {bucket_bytes // MIB} MiB", *cells, peak / (1 << 30))
    wrong = own.num_wrong(trainer)
    own.run.check(f"floor {FLOOR_S} s", min(best) <= FLOOR_S and not wrong, min(best), wrong)


def _waited(device: torch.device, start: float) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter() - start


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--trainers", type=int, default=1, help="processes that train, default 1")
    parser.add_argument("--dry", action="store_true", help="a tiny model on CPUs")


def main() -> None:
    run = Run(__doc__, ("parity", "hung", "speed"), seconds=300, add_flags=add_flags)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    num_trainers = run.args.trainers
    if not 0 < num_trainers < world:
        raise SystemExit(f"{num_trainers} trainers of {world} processes leave no engine")
    device = torch.device("cpu")
    if not run.args.dry:
        # On one GPU a trainer and an engine share it, and weights travel through host memory.
        index = int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count()
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
    if rank >= num_trainers:
        serve(rank - num_trainers, device)
        return
    mesh = Mesh.alone(device)
    if num_trainers > 1:
        timeout = timedelta(seconds=60)
        backend = "gloo" if run.args.dry else "cpu:gloo,cuda:nccl"
        dist.init_process_group(backend, rank=rank, world_size=num_trainers, timeout=timeout)
        sizes = AxisSizes(data=num_trainers, fsdp=num_trainers)
        mesh = JoinedMesh.of_group(sizes, device, timeout=timeout)
    engines = Engines(world - num_trainers) if rank == 0 else None
    own = Trainers(run, mesh, engines)
    sections: dict[str, Callable[[], None]] = {
        "parity": partial(check_parity, own),
        "hung": partial(check_hung, own),
        "speed": partial(time_deliveries, own),
    }
    try:
        code = run.go(sections)
    finally:
        if engines is not None:
            engines.call("end")
    sys.exit(code)


if __name__ == "__main__":
    main()
