"""Weights that an engine gives up in sleep: memory given back, graphs that stay valid, times.

    python -m benchmarks.gpu.sleeping_weights_check [--dry]
    torchrun --nproc-per-node 2 -m benchmarks.gpu.sleeping_weights_check      # one engine over both

Qwen3-1.7B with random weights; prints what it finds and exits with 1 where the driver does not get
the weights back, or samples after three cycles of sleep, wake and sync are not those before.
`--dry` takes a small model on a CPU.
"""

from __future__ import annotations

import sys
import tempfile
from time import perf_counter

import torch

from hone.distributed.processes import processes
from hone.engine.engine import EmbeddedEngine
from hone.engine.settings import EngineConfig
from hone.models.load import blank_model, load_model
from hone.models.manifest import export_weights
from hone.models.settings import ModelConfig
from hone.models.tensor_parallel import TensorParallel
from hone.models.tiny import make_model_folder, make_tiny_model
from hone.types import Request, SamplingParams
from hone.weights.sync import WeightSync

REQUESTS = [
    Request(
        id=f"{i}",
        prompt_ids=tuple(range(5, 25 + i % 7)),
        sampling=SamplingParams(max_tokens=24, seed=i, ignore_eos=True),
    )
    for i in range(16)
]


class Trainer:
    """Has whole weights."""

    def __init__(self, model):
        self.model = model

    def named_weights(self):
        return export_weights(self.model)


def sample(engine):
    engine.submit(REQUESTS)
    found = {}
    while engine.has_unfinished:
        found |= {one.request_id: (one.token_ids, one.logprobs) for one in engine.step()}
    return found


def seconds(call, device):
    if device.type == "cuda":
        torch.cuda.synchronize()
    start = perf_counter()
    call()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return perf_counter() - start


def main() -> int:
    is_dry, own = "--dry" in sys.argv, processes()
    device = torch.device("cpu") if is_dry else torch.device("cuda", own.local_rank)
    if not is_dry:
        torch.cuda.set_device(device)
    tp = TensorParallel.from_environment(own.world_size, device)
    with tempfile.TemporaryDirectory() as folder:
        if is_dry:
            make_tiny_model(folder, num_kv_heads=2, weights=False)
        else:
            make_model_folder(folder, "qwen3-1.7b")
        cfg = ModelConfig(path=folder, init="random")
        whole = load_model(cfg, device=device, seed=0)
        part = blank_model(cfg, device=device, tp=tp)
    engine = EmbeddedEngine(
        part,
        EngineConfig(enable_sleep=True, kv_cache_gib=0.1, tensor_parallel_size=tp.size),
        eos_token_ids=(),
        max_model_len=128,
        owns_weights=True,
        tensor_parallel=tp,
    )
    num_bytes = sum(parameter.nbytes for parameter in part.parameters())
    sync = WeightSync(Trainer(whole), engine)
    sync.push(0)
    before, is_right = sample(engine), True
    for version in (1, 2, 3):
        cache = engine.stats().kv_cache_bytes
        free = 0 if is_dry else torch.cuda.mem_get_info(device)[0]
        asleep_s = seconds(engine.sleep, device)
        given = 0 if is_dry else torch.cuda.mem_get_info(device)[0] - free - cache
        awake_s = seconds(engine.wake, device)
        sync_s = seconds(lambda version=version: sync.push(version), device)
        is_same = sample(engine) == before
        is_right &= is_same and (is_dry or given >= 0.98 * num_bytes)
        print(
            f"rank {tp.rank}: {num_bytes / 2**20:.0f} MiB of weights, {given / 2**20:.0f} given "
            f"back; sleep {1e3 * asleep_s:.1f} ms, wake {1e3 * awake_s:.1f}, sync "
            f"{1e3 * sync_s:.1f}; samples {'equal' if is_same else 'DIFFER'}"
        )
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
