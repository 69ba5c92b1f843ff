"""vLLM's ranks of one engine, in two processes on a CPU (`tests.ranks`); rank 0 prints JSON."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from hone.config.tree import RLConfig
from hone.distributed.mesh import Mesh
from hone.engine import base as base_module
from hone.engine.settings import EngineConfig
from hone.engine.vllm import setup as vllm_setup
from hone.engine.vllm import weights as vllm_weights
from hone.engine.vllm.engine import VLLMEngine
from hone.engine.worker import EngineWorker
from hone.loops.launch import plan_run
from hone.loops.workers import build_engine_worker
from hone.models.tensor_parallel import TensorParallel
from hone.rollout.engine_pool import EnginePool
from hone.types import Completion, Request
from hone.weights.broadcast import BroadcastSync
from hone.weights.sync import WeightSync
from tests.engine.test_vllm import (
    Models,
    ModuleTrainer,
    largest_difference,
    load_models,
    perturb,
    requests_like,
    run,
)

CPU = torch.device("cpu")
VICTIM = "model.layers.1.self_attn.k_proj.weight"

vllm_setup.import_vllm(CPU)  # once for all ranks


def main(root: str) -> None:
    """Parity of every family whose model lies in `root`, then what an engine does besides."""
    random.seed(5)  # ranks must ask the same
    tp = TensorParallel.from_environment(2, CPU)
    found: dict[str, Any] = {}
    for folder in sorted(Path(root).iterdir()):
        models = load_models(folder)
        engine = make_engine(models, tp)
        found[folder.name] = follow_weights(models, engine)
        if folder.name == "qwen3":
            found |= {"refused": refuse(models, engine), "kept": keep(models, engine)}
            found["preempted"] = preempt(models, tp)
            found["planted"] = plant(models, tp)
            found["hosted"] = host(models, folder)
    if tp.rank == 0:
        print(json.dumps(found))  # noqa: T201


def make_engine(models: Models, tp: TensorParallel, **fields: Any) -> VLLMEngine:
    fields = {"backend": "vllm", "max_num_seqs": 8, **fields}
    return VLLMEngine(
        models.hone,
        EngineConfig(tensor_parallel_size=2, **fields),
        eos_token_ids=(),
        max_model_len=320,
        tokenizer=models.tokenizer,
        tensor_parallel=tp,
    )


def everywhere(value: Any) -> list[Any]:
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def sample(engine: VLLMEngine, requests: Sequence[Request]) -> dict[str, Completion]:
    done = run(engine, requests)
    all_done = everywhere({name: asdict(completion) for name, completion in done.items()})
    assert all_done[0] == all_done[1]
    return done


def difference(models: Models, engine: VLLMEngine) -> float:
    requests = requests_like(6)
    return largest_difference(models.plain, requests, sample(engine, requests))


def change(models: Models, seed: int) -> None:
    torch.manual_seed(seed)
    perturb(models)


def follow_weights(models: Models, engine: VLLMEngine) -> dict[str, Any]:
    """Samples against a forward of the whole model: before, after a change, after its delivery."""
    found: dict[str, Any] = {"first": difference(models, engine)}
    change(models, 1)
    found["stale"] = difference(models, engine)
    WeightSync(ModuleTrainer(models.hone), engine).push(version=7)
    found["fresh"] = difference(models, engine)
    found["version"] = engine.weight_version
    return found


def refuse(models: Models, engine: VLLMEngine) -> dict[str, list[str]]:
    """What every rank says where weights do not come, or do not arrive on one of them."""
    change(models, 2)
    deliver = base_module.deliver

    def on_the_first_alone(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> int:
        target = dict(engine.named_weights())[VICTIM]
        is_kept = dist.get_rank() == 0
        return deliver([pair for pair in pairs if is_kept or not pair[0].is_set_to(target)])

    def failure(trainer: ModuleTrainer) -> str:
        try:
            WeightSync(trainer, engine).push(version=99)
        except RuntimeError as error:
            return str(error)
        return "none"

    found = {"never sent": everywhere(failure(ModuleTrainer(models.hone, forgets=VICTIM)))}
    with patch.object(base_module, "deliver", on_the_first_alone):
        found["not written"] = everywhere(failure(ModuleTrainer(models.hone)))
    of_other_size = torch.empty(6, 64)
    try:
        engine.shard(VICTIM, of_other_size)
        found["other size"] = everywhere("none")
    except RuntimeError as error:
        found["other size"] = everywhere(str(error))
    WeightSync(ModuleTrainer(models.hone), engine).push(version=100)
    return found


def keep(models: Models, engine: VLLMEngine) -> dict[str, Any]:
    """Requests that are aborted and resumed, and that run on under new weights."""
    requests = requests_like(10, max_tokens=20, lengths=range(130, 200), temperature=0.0)
    whole = sample(engine, requests)
    engine.submit(requests)
    for _ in range(7):
        engine.step()
    partial = engine.abort(request.id for request in requests)
    # The order in which they are taken, and what they cache is lost.
    pool = engine._scheduler.kv_cache_manager.block_pool
    free = everywhere([block.block_id for block in pool.free_block_queue.get_all_free_blocks()])
    resumed = [
        replace(request, resumed=done if done.token_ids else None)
        for request, done in zip(requests, partial, strict=True)
    ]
    again = sample(engine, resumed)
    same = sum(again[name].token_ids == whole[name].token_ids for name in whole)
    before = engine.weight_version
    engine.submit(requests)
    for _ in range(5):
        engine.step()
    change(models, 3)
    WeightSync(ModuleTrainer(models.hone), engine).push(version=before + 1)
    late = [replace(request, id=f"late {request.id}") for request in requests]
    done = sample(engine, late)
    versions = {tuple(sorted(set(done[r.id].weight_versions))) for r in requests[:8]}
    fresh = {r.id: done[r.id] for r in late}
    return {
        "same": same,
        "free blocks": free[0] == free[1],
        "versions": versions == {(before, before + 1)},
        "late": largest_difference(models.plain, late, fresh),
    }


def preempt(models: Models, tp: TensorParallel) -> dict[str, Any]:
    """A cache that is too small for all: every rank preempts the same."""
    blocks = 7 * 2 * 2 * 128 * 1 * 32 * 4  # layers, keys and values, tokens, heads, bytes
    engine = make_engine(models, tp, kv_cache_gib=blocks / 2**30, enable_prefix_caching=False)
    requests = requests_like(6, lengths=range(60, 100), max_tokens=120)
    found = largest_difference(models.plain, requests, sample(engine, requests))
    return {"difference": found, "preemptions": everywhere(engine.stats().num_preemptions)}


def plant(models: Models, tp: TensorParallel) -> dict[str, float]:
    """Ranks that take each other's part of something: delivery and proof cannot see that."""
    cut: Callable[..., Any] = vllm_weights._part

    def swapped(victim: int) -> Callable[..., Any]:
        def part(dim: int, size: int, index: int, num_parts: int) -> Any:
            if dim == victim:
                index = num_parts - 1 - index
            return cut(dim, size, index, num_parts)

        return part

    found: dict[str, float] = {}
    for name, dim in (("rows", 0), ("columns", 1)):
        with patch.object(vllm_weights, "_part", swapped(dim)):
            found[name] = difference(models, make_engine(models, tp))
    return found


def host(models: Models, folder: Path) -> dict[str, Any]:
    """Filled by a broadcast and driven in lock-step, as engines with devices of their own are."""
    cfg = RLConfig.model_validate(
        {
            "run": {"dir": folder / "run", "steps": 1, "device": "cpu"},
            "model": {"path": str(folder)},
            "data": {"train": [{"path": "unused"}], "max_prompt_tokens": 312},
            "rollout": {"max_completion_tokens": 8},
            "engine": {
                "backend": "vllm",
                "max_num_seqs": 8,
                "tensor_parallel_size": 2,
            },
            "cluster": {"num_engines": 1},
        }
    )
    driven = build_engine_worker(plan_run(cfg, "cpu", world_size=1))
    if os.environ["RANK"] != "0":
        driven.follow()
        return {}

    def restart(index: int) -> EngineWorker:
        raise AssertionError(f"engine {index} is gone")

    group = EnginePool([driven], restart=restart, timeout_s=60.0, max_restarts=0)
    weights = BroadcastSync(
        ModuleTrainer(models.hone), Mesh.alone(CPU), group, bucket_bytes=1 << 14, timeout_s=60.0
    )
    weights.push(version=1)
    requests = requests_like(6)
    done = run(group, requests)
    first = largest_difference(models.plain, requests, done)
    change(models, 4)
    weights.push(version=2)
    again = [replace(request, id=f"again {request.id}") for request in requests]
    done |= (later := run(group, again))
    found = {
        "first": first,
        "fresh": largest_difference(models.plain, again, later),
        "versions": sorted({v for one in later.values() for v in one.weight_versions}),
        "uncounted": sum(len(one.token_ids) for one in done.values())
        - group.stats().num_generated_tokens,
    }
    weights.close()
    group.close()
    return found
