"""Engines of a hybrid model that two processes share (`tests.ranks`), against one alone."""

from __future__ import annotations

import copy
from typing import Any
from unittest.mock import patch

import torch
from transformers import PreTrainedModel

from hone.engine.engine import EmbeddedEngine
from hone.engine.settings import EngineConfig
from hone.models import tensor_parallel
from hone.models.manifest import export_weights
from hone.models.tensor_parallel import TensorParallel, shard_model, shard_of
from hone.types import Request, SamplingParams
from hone.weights.sync import WeightSync
from tests.rank_cases import everywhere, of_first, start
from tests.recurrent.models import VOCAB, hybrid_model

CPU = torch.device("cpu")
OPTIONS: dict[str, dict[str, Any]] = {"plain": {}, "chunked prefill": {"max_num_batched_tokens": 7}}


def make_model(seed: int = 0) -> PreTrainedModel:
    torch.manual_seed(seed)
    return hybrid_model(torch.float32, seed=seed).requires_grad_(False)


def make_engine(
    model: PreTrainedModel, tp: TensorParallel | None, **options: Any
) -> EmbeddedEngine:
    size = 1 if tp is None else tp.size
    settings: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 64}
    settings |= {"kv_cache_gib": 0.02, "tensor_parallel_size": size}
    return EmbeddedEngine(
        model if tp is None else shard_model(model, tp),
        EngineConfig(**settings | options),
        eos_token_ids=(3,),
        max_model_len=64,
        block_size=4,
        tensor_parallel=tp,
    )


def sampled(engine: EmbeddedEngine) -> dict[str, Any]:
    """Two groups with prompts of several blocks, more than may run at once."""
    draw = torch.Generator().manual_seed(5)
    prompts = [tuple(torch.randint(4, VOCAB, (n,), generator=draw).tolist()) for n in (9, 22)]
    asked = [
        Request(
            id=f"{i}",
            prompt_ids=prompts[i % 2],
            sampling=SamplingParams(max_tokens=8 + 2 * i, temperature=1.0, seed=i),
        )
        for i in range(8)
    ]
    engine.submit(asked)
    done = []
    while engine.has_unfinished:
        done += engine.step()
    return {x.request_id: (x.token_ids, x.logprobs) for x in done}


def compared(found: dict[str, Any], wanted: dict[str, Any]) -> dict[str, Any]:
    pairs = [(found[key], wanted[key]) for key in wanted]
    return {
        "same tokens": all(own[0] == other[0] for own, other in pairs),
        "gap": max(
            abs(x - y) for own, other in pairs for x, y in zip(own[1], other[1], strict=False)
        ),
        "equal on all ranks": all(other == found for other in everywhere(found)),
    }


def group() -> TensorParallel:
    return TensorParallel.from_environment(2, CPU)


def engines() -> dict[str, Any]:
    found = {}
    for name, options in OPTIONS.items():
        model = make_model()
        wanted = of_first(
            lambda m=model, o=options: sampled(make_engine(copy.deepcopy(m), None, **o))
        )
        found[name] = compared(sampled(make_engine(model, group(), **options)), wanted)
    return found


class Trainer:
    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def named_weights(self) -> Any:
        return export_weights(self.model)


def sync() -> dict[str, Any]:
    """Whole weights come, of which each rank keeps its own."""
    new = make_model(1)
    engine = make_engine(make_model(), group())
    before = sampled(engine)
    WeightSync(Trainer(new), engine).push(1)
    wanted = of_first(lambda: sampled(make_engine(copy.deepcopy(new), None)))
    return compared(sampled(engine), wanted) | {"differed": before != wanted}


def as_it_lies(name: str, tensor: Any, config: Any, tp: TensorParallel) -> Any:
    if "in_proj_qkv" in name:
        return tensor.chunk(tp.size)[tp.rank]
    return shard_of(name, tensor, config, tp)


def planted() -> dict[str, Any]:
    with patch.object(tensor_parallel, "shard_of", as_it_lies):
        model = make_model()
        wanted = of_first(lambda: sampled(make_engine(copy.deepcopy(model), None)))
        return compared(sampled(make_engine(model, group())), wanted)


def main() -> None:
    start([engines, sync, planted])
