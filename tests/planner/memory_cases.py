"""Settings whose memory is counted, and what a trainer with them holds."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hone.checkpoint.sharded import local_part
from hone.distributed.settings import AxisSizes
from hone.families.shape import ModelShape
from hone.families.spec import EXPERT_MATRICES
from hone.models.adapters import adapt
from hone.models.settings import LoraConfig
from hone.tools.bench.train_memory import existing_tensors
from hone.trainer.cost import TrainingMemory, training_memory
from hone.trainer.settings import TrainerConfig
from tests.trainer.examples import make_trainer, random_rows, tiny_model

STATES = {"optimizer": {"state_dtype": "bfloat16"}}
MUON = {"optimizer": {"name": "muon"}}
LORA = LoraConfig(rank=3)
SOME = LoraConfig(rank=2, target_modules=("q_proj", "down_proj"))
ON_EXPERTS = LoraConfig(rank=3, target_modules=("q_proj", *EXPERT_MATRICES))
ON_EXPERTS_4BIT = ON_EXPERTS.model_copy(update={"load_in_4bit": True})
QLORA = LoraConfig(rank=3, load_in_4bit=True)
UNTIED = {"tie_word_embeddings": False}
EXPERTS = {
    "family": "qwen3_moe",
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [0],
}
HYBRID = {
    "family": "qwen3_5_text",
    "num_hidden_layers": 3,
    "full_attention_interval": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
ODD = {"vocab_size": 51}  # leaves the last of several processes less than the others

ALONE: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float32": {"dtype": "float32"},
    "untied": {"model": UNTIED},
    "llama biases": {"model": {"family": "llama", "attention_bias": True, "mlp_bias": True}},
    "bfloat16 states": {"trainer": STATES},
    "muon": {"trainer": MUON},
    "adapters": {"lora": LORA},
    "some adapters": {"lora": SOME, "dtype": "float32"},
    "4-bit": {"lora": QLORA},
    "adapters on experts": {"model": EXPERTS, "lora": ON_EXPERTS},
    "4-bit experts": {"model": EXPERTS, "lora": ON_EXPERTS_4BIT},
    "adapters on experts, muon": {"model": EXPERTS, "lora": ON_EXPERTS, "trainer": MUON},
    "recurrent layers": {"model": HYBRID},
    "recurrent layers, muon": {"model": HYBRID, "trainer": MUON},
    "recurrent layers, adapters": {"model": HYBRID, "lora": LORA},
}
CASES: dict[str, dict[str, Any]] = {
    **{f"stage {stage}": {"parallel": {"zero_stage": stage}} for stage in (0, 1, 2, 3)},
    "float32": {"dtype": "float32", "model": ODD},
    "uneven": {"parallel": {"zero_stage": 3}, "model": ODD | UNTIED},
    "hybrid": {"parallel": {"zero_stage": 3, "fsdp_size": 2}},
    "tensor 2": {"parallel": {"tensor_parallel_size": 2}},
    "ulysses 2": {"parallel": {"ulysses_size": 2}},
    "muon": {"trainer": MUON},
    "bfloat16 states": {"trainer": STATES},
    "adapters": {"lora": LORA, "parallel": {"zero_stage": 3}},
    "adapters, tensor 2": {"lora": LORA, "parallel": {"tensor_parallel_size": 2}},
    "adapters, two stages of pipeline": {
        "model": {"num_hidden_layers": 3},
        "lora": LORA,
        "parallel": {"zero_stage": 1, "pipeline_parallel_size": 2},
    },
    "4-bit, two stages of pipeline": {
        "model": {"num_hidden_layers": 3},
        "lora": QLORA,
        "parallel": {"zero_stage": 1, "pipeline_parallel_size": 2},
    },
    **{
        f"experts over {size}, stage {stage}": {
            "model": EXPERTS,
            "parallel": {"zero_stage": stage, "expert_parallel_size": size},
        }
        for size, stage in ((2, 0), (2, 3), (4, 3))
    },
    "experts and matrices over 2": {
        "model": EXPERTS,
        "parallel": {"zero_stage": 3, "tensor_parallel_size": 2, "expert_parallel_size": 2},
    },
    **{
        f"two stages of pipeline, stage {stage}": {
            "model": {"num_hidden_layers": 3, "tie_word_embeddings": tied},
            "parallel": {"zero_stage": stage, "pipeline_parallel_size": 2},
        }
        for stage, tied in ((1, True), (3, False))
    },
    "recurrent layers, stage 3": {"model": HYBRID, "parallel": {"zero_stage": 3}},
    "recurrent layers, two stages of pipeline": {
        "model": HYBRID | {"num_hidden_layers": 5},
        "parallel": {"zero_stage": 1, "pipeline_parallel_size": 2},
    },
    "adapters beside experts": {
        "model": EXPERTS,
        "lora": LORA,
        "parallel": {"zero_stage": 3, "expert_parallel_size": 2},
    },
    **{
        f"adapters on experts, stage {stage}": {
            "model": EXPERTS,
            "lora": ON_EXPERTS,
            "parallel": {"zero_stage": stage, "expert_parallel_size": 2},
        }
        for stage in (0, 3)
    },
    "4-bit experts in whole layers": {
        "model": EXPERTS,
        "lora": ON_EXPERTS_4BIT,
        "parallel": {"zero_stage": 3},
    },
    "adapters on whole layers of experts": {
        "model": EXPERTS,
        "lora": ON_EXPERTS,
        "parallel": {"zero_stage": 3},
    },
}
KINDS = ("weights", "masters", "gradients", "optimizer")


AWAY = {"offload": "gradients"}
ALL_AWAY = {"offload": "parameters"}
OFFLOADED: dict[str, dict[str, Any]] = {
    "gradients": {"trainer": AWAY},
    "gradients, float32": {"trainer": AWAY, "dtype": "float32"},
    "parameters": {"trainer": ALL_AWAY, "model": UNTIED},
    "parameters, float32": {"trainer": ALL_AWAY, "dtype": "float32"},
    "parameters, bfloat16 states": {"trainer": ALL_AWAY | STATES},
    "parameters, adapters": {"trainer": ALL_AWAY, "lora": LORA},
    "parameters, 4-bit": {"trainer": ALL_AWAY, "lora": QLORA},
    "parameters, adapters on experts": {
        "trainer": ALL_AWAY,
        "model": EXPERTS,
        "lora": ON_EXPERTS,
        "parallel": {"expert_parallel_size": 2},
    },
    "parameters, experts": {
        "trainer": ALL_AWAY,
        "model": EXPERTS,
        "parallel": {"expert_parallel_size": 2},
    },
}
"""With several processes in stage 3."""


def settings(case: dict[str, Any]) -> TrainerConfig:
    return TrainerConfig(**case.get("trainer", {}), parallel=case.get("parallel", {}))


def model_of(case: dict[str, Any]):
    dtype = getattr(torch, case.get("dtype", "bfloat16"))
    return tiny_model(dtype=dtype, **case.get("model", {}))


def plan(case: dict[str, Any], world_size: int = 1) -> TrainingMemory:
    cfg, lora = settings(case), case.get("lora")
    return training_memory(
        ModelShape.from_config(model_of(case).config.to_dict()),
        cfg,
        dtype=case.get("dtype", "bfloat16"),
        num_tokens=64,
        layers="eager",
        lora=lora,
        sizes=AxisSizes.of(cfg.parallel, world_size),
    )


def held_on_host(case: dict[str, Any], mesh=None) -> dict[str, int]:
    """Bytes there of what is offloaded, and of the module on the device, between two steps."""
    model = model_of(case)
    if lora := case.get("lora"):
        adapt(model, lora, seed=0)
    trainer = make_trainer(model, mesh=mesh, **settings(case).model_dump())
    trainer.update(random_rows(8))
    policy, (state, _) = trainer.policy, trainer.state_dict()
    away = [t for n, t in state.items() if n.startswith("optimizer/exp")]
    if policy.masters_on_host:
        away += policy.masters.values()
    host = sum(local_part(t.detach()).nbytes for t in away) + policy.host_bytes
    weights = set(model.state_dict(keep_vars=True).values())
    if mesh is not None and policy.masters_on_host:
        # On a CPU both places look the same; what is sharded is what FSDP has offloaded.
        host += sum(
            local_part(t.detach()).nbytes
            for t in weights
            if isinstance(t, DTensor) and not t.requires_grad
        )
        weights = {t for t in weights if not isinstance(t, DTensor)}
    held = existing_tensors(
        weights=weights,
        masters=() if policy.masters_on_host else policy.masters.values(),
        moments=(),
        dtype=policy.dtype,
        device=policy.device,
    )
    return {"host": host, "weights": held.total("weights")}


_UNCOUNTED = "e_score_correction_bias"
"""A number for each expert, in a buffer."""


def held(case: dict[str, Any], mesh=None) -> dict[str, int]:
    """Bytes by kind after a step and the passes of another."""
    model = model_of(case)
    if lora := case.get("lora"):
        adapt(model, lora, seed=0)
    trainer = make_trainer(model, mesh=mesh, **settings(case).model_dump())
    rows = random_rows(8)
    trainer.update(rows)
    trainer.forward_backward(rows)
    state = trainer.optimizer.state_dict()
    moments = [t for n, t in state.items() if n.startswith(("optimizer/exp", "optimizer/mom"))]
    found = existing_tensors(
        weights=[
            t for n, t in model.state_dict(keep_vars=True).items() if not n.endswith(_UNCOUNTED)
        ],
        masters=trainer.policy.masters.values(),
        moments=moments,
        dtype=trainer.policy.dtype,
        device=trainer.policy.device,
    )
    found.add("gradients", trainer.policy.gradients.values(), trainer.policy.device)
    stages = trainer.mesh.gather_stages({kind: found.total(kind) for kind in KINDS})
    return max(stages, key=lambda own: sum(own.values()))
