"""Values of a token that a layer keeps in several processes (`tests.ranks`); rank 0 prints JSON.

They are means over the processes, since experts of one get more tokens than those of another.
"""

from __future__ import annotations

import json
import sys
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from hone.attention import PackedContext
from hone.checkpoint.sharded import local_part
from hone.distributed.settings import AxisSizes
from hone.families.shape import ModelShape
from hone.models.contents import follow_inputs
from hone.models.decoder import decoder_layers, hidden_states
from hone.trainer.cost import LayerCode, training_memory
from hone.trainer.experts import divide_experts
from hone.trainer.settings import TrainerConfig
from hone.trainer.tensor import parallelize
from tests.rank_cases import on_mesh
from tests.trainer.examples import VOCAB, tiny_model

NUM_TOKENS, HEAD = 256, 16
SIZES: dict[str, Any] = {"hidden_size": 64, "head_dim": HEAD, "intermediate_size": 96}
EXPERTS: dict[str, Any] = {
    "family": "qwen3_moe",
    "moe_intermediate_size": 96,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [],
}
SHARED: dict[str, Any] = {
    "family": "glm4_moe",
    "moe_intermediate_size": 96,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 0,
    "use_qk_norm": True,
}
TENSOR, OWN = {"tensor_parallel_size": 2}, {"expert_parallel_size": 2}
CASES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "dense, tensor 2": ({}, TENSOR),
    "divided experts": (EXPERTS, OWN),
    "divided experts, tensor 2": (EXPERTS, TENSOR | OWN),
    "divided experts beside a shared one, tensor 2": (SHARED, TENSOR | OWN),
}


def kept(num_layers: int, case: str, code: LayerCode) -> int:
    """Bytes that a forward pass keeps, without what no plan counts: a CPU's buffers of attention,
    angles, which all layers share, ids, and what has fewer numbers a row than a head."""
    fields, parallel = CASES[case]
    model = tiny_model(dtype=torch.bfloat16, num_hidden_layers=num_layers, **SIZES | fields)
    follow_inputs(model)
    mesh = on_mesh(parallel)
    if num_layers:
        divide_experts(model, mesh)
    parallelize(model, mesh)
    for layer in decoder_layers(model) if code == "compiled" else ():
        layer.compile(backend="aot_eager")
    storages = dict[int, Tensor]()
    weights = {local_part(p).untyped_storage().data_ptr() for p in model.parameters()}

    def keep(x: Tensor) -> Tensor:
        is_of_heads = x.dim() > 2 and x.shape[-2:] == (NUM_TOKENS, HEAD)
        is_planned = x.is_floating_point() and x.dim() > 1 and x.shape[-1] >= HEAD
        if is_planned and not is_of_heads:
            storages[x.untyped_storage().data_ptr()] = x
        return x

    ids, positions = torch.randint(VOCAB, (NUM_TOKENS,)), torch.arange(NUM_TOKENS)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        hidden_states(model, ids, positions, PackedContext.from_lengths([NUM_TOKENS]))
    return sum(x.untyped_storage().nbytes() for at, x in storages.items() if at not in weights)


def planned(num_layers: int, case: str, code: LayerCode) -> int:
    fields, parallel = CASES[case]
    model = tiny_model(num_hidden_layers=num_layers, **SIZES | fields)
    cfg = TrainerConfig.model_validate({"parallel": parallel})
    memory = training_memory(
        ModelShape.from_config(model.config.to_dict()),
        cfg,
        dtype="bfloat16",
        num_tokens=NUM_TOKENS,
        layers=code,
        sizes=AxisSizes.of(cfg.parallel, dist.get_world_size()),
    )
    return memory.activations


def main() -> None:
    dist.init_process_group("gloo")
    found: dict[str, list[float]] = {}
    for case in CASES:
        for code in get_args(LayerCode):
            torch.compiler.reset()
            own = torch.tensor(kept(1, case, code) - kept(0, case, code))
            dist.all_reduce(own)
            expected = planned(2, case, code) - planned(1, case, code)
            bytes_of_all = own.item() / dist.get_world_size(), expected
            found[f"{case}, {code}"] = [n / NUM_TOKENS / 2 for n in bytes_of_all]
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(found))
    dist.destroy_process_group()
