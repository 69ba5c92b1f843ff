"""Runs an engine with weights of 8-bit codes in one of several processes (`tests.ranks`)."""

from __future__ import annotations

import copy
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedModel

from hone.distributed.processes import processes
from hone.engine.engine import EmbeddedEngine
from hone.engine.settings import EngineConfig
from hone.models.int8_rows import pack_rows, unpack_rows
from hone.models.load import blank_model, load_model
from hone.models.manifest import export_weights
from hone.models.settings import ModelConfig
from hone.models.tensor_parallel import TensorParallel, shard_of
from hone.types import Completion, Request, SamplingParams
from hone.weights.sync import WeightSync
from tests.rank_cases import of_first
from tests.ranks import run_parts

CPU = torch.device("cpu")
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3_moe": {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2},
    "glm4_moe": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "moe_intermediate_size": 32,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5,
        "attention_bias": True,
    },
}


def make_folder(folder: Path, family: str) -> Path:
    """The `config.json` of a small model, whose rows two ranks divide into whole sixteens."""
    config = AutoConfig.for_model(
        family,
        vocab_size=52,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=16,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
        initializer_range=0.25,
        **FAMILIES[family],
    )
    config.save_pretrained(folder)
    return folder


class Trainer:
    """The part of a trainer that a sync uses."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def named_weights(self) -> Any:
        return export_weights(self.model)


@torch.no_grad()
def rounded(model: PreTrainedModel, size: int = 1) -> PreTrainedModel:
    """A copy with the values that the codes of `size` ranks stand for."""
    twin = copy.deepcopy(model)
    for name, weight in twin.named_parameters():
        is_matrix = ".layers." in name and weight.ndim > 1 and "mlp.gate.weight" not in name
        if not is_matrix:
            continue
        parts = [
            shard_of(name, weight, model.config, TensorParallel(rank=r, size=size, device=CPU))
            for r in range(size)
        ]
        dim = next((d for d in range(weight.ndim) if parts[0].shape[d] < weight.shape[d]), None)
        whole = [unpack_rows(pack_rows(part), weight.dtype) for part in parts]
        weight.copy_(whole[0] if dim is None else torch.cat(whole, dim))
    return twin


def complete(engine: EmbeddedEngine) -> dict[str, Completion]:
    """Of prompts of several lengths, more than may run at once."""
    engine.submit(
        [
            Request(
                id=f"{i}",
                prompt_ids=tuple(range(5, 5 + (6, 35)[i % 2])),
                sampling=SamplingParams(max_tokens=8 + i, seed=i),
            )
            for i in range(6)
        ]
    )
    done: list[Completion] = []
    while engine.has_unfinished:
        done += engine.step()
    return {one.request_id: one for one in done}


def make_engine(model: PreTrainedModel, tp: TensorParallel | None, **fields: Any) -> EmbeddedEngine:
    size = 1 if tp is None else tp.size
    cfg = EngineConfig(
        max_num_seqs=4, kv_cache_gib=0.01 / size, tensor_parallel_size=size, **fields
    )
    return EmbeddedEngine(
        model,
        cfg,
        eos_token_ids=(3,),
        max_model_len=64,
        block_size=4,
        owns_weights=True,
        tensor_parallel=tp,
    )


def main() -> None:
    torch.set_num_threads(1)
    tp = TensorParallel.from_environment(processes().world_size, CPU)

    def engine() -> dict[str, Any]:
        found: dict[str, Any] = {}
        for family in FAMILIES:
            with TemporaryDirectory() as folder:
                cfg = ModelConfig(path=str(make_folder(Path(folder), family)), init="random")
                model = load_model(cfg, device=CPU, seed=0)
                own = blank_model(cfg, device=CPU, tp=tp, packs_rows=True)
            group = make_engine(own, tp, weight_dtype="int8")
            WeightSync(Trainer(model), group).push(1)
            twin = rounded(model, tp.size)
            ours = complete(group)
            theirs = of_first(lambda twin=twin: complete(make_engine(twin, None)))
            layers = [p for n, p in own.named_parameters() if ".layers." in n]
            found[family] = {
                "same tokens": all(ours[k].token_ids == theirs[k].token_ids for k in theirs),
                "gap": max(
                    abs(a - b)
                    for k in theirs
                    for a, b in zip(ours[k].logprobs, theirs[k].logprobs, strict=False)
                ),
                "share": sum(p.nbytes for p in layers)
                / sum(p.nbytes / 2 for n, p in model.named_parameters() if ".layers." in n),
            }
        return found

    run_parts([engine])
