"""Runs expert parallelism in one of several processes (`tests.ranks`), part after part.

Layers of experts are compared with transformers' loop over experts in float64, of the tokens of all
ranks; whole trainers with one process.
"""

from __future__ import annotations

import copy
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.func import functional_call

from hone.distributed.processes import processes
from hone.families.spec import EXPERT_MATRICES
from hone.models.adapters import adapt
from hone.models.expert_adapters import ExpertLora
from hone.models.settings import LoraConfig
from hone.trainer import experts as expert_module
from hone.trainer.experts import divide_experts, experts_of
from hone.trainer.policy import BasePolicy
from tests.rank_cases import (
    Case,
    difference,
    everywhere,
    go_on,
    on_mesh,
    outcomes,
    start,
    stir_adapters,
    worst_of,
)
from tests.trainer.examples import make_trainer, random_rows, tiny_model

MODEL = {
    "family": "qwen3_moe",
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "norm_topk_prob": True,
    "mlp_only_layers": [0],
}
HYBRID = {
    "family": "qwen3_5_moe_text",
    "moe_intermediate_size": 24,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "shared_expert_intermediate_size": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
}
SHARED = {
    "family": "glm4_moe",
    "moe_intermediate_size": 24,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "n_group": 1,
    "topk_group": 1,
}
"""With an expert that all tokens pass, and an MLP in its first layer."""
HIDDEN = 32
ADAPTED = LoraConfig(rank=3, alpha=6.0, target_modules=("q_proj", *EXPERT_MATRICES))
DEEPER = MODEL | {"num_hidden_layers": 5}
"""With experts in each of two stages of layers, of which `MODEL` has them in one."""
STAGES = {"pipeline_parallel_size": 2, "expert_parallel_size": 2}
TENSOR = {"tensor_parallel_size": 2, "expert_parallel_size": 2, "zero_stage": 3}
LAYOUTS = {
    2: {
        **{
            f"stage {stage}": {"expert_parallel_size": 2, "zero_stage": stage} for stage in range(4)
        },
        "tensor": TENSOR | {"zero_stage": 0},
        "tensor, shards": TENSOR,
    },
    4: {
        "all four": {"expert_parallel_size": 4},
        "two, shards": {"expert_parallel_size": 2, "zero_stage": 3},
        "two, copies": {"expert_parallel_size": 2, "zero_stage": 0},
        "two, stage 1": {"expert_parallel_size": 2, "zero_stage": 1},
        "two, stage 2": {"expert_parallel_size": 2, "zero_stage": 2},
        "more than share shards": {"expert_parallel_size": 4, "fsdp_size": 2},
        "split sequences": {"expert_parallel_size": 2, "ulysses_size": 2},
        "ring": {"expert_parallel_size": 2, "ring_size": 2, "zero_stage": 3},
        "tensor, shards": TENSOR,
        "tensor, copies": TENSOR | {"zero_stage": 0},
        "tensor and more ranks": TENSOR | {"expert_parallel_size": 4},
        "tensor, split sequences": TENSOR | {"ulysses_size": 2, "zero_stage": 1},
        "tensor, two stages of layers": TENSOR | {"pipeline_parallel_size": 2},
        **{
            f"two stages of layers, zero {zero}": STAGES | {"zero_stage": zero}
            for zero in (0, 1, 3)
        },
    },
}


def routes(name, num_tokens, rank):
    """Ids of the experts of a rank's tokens, [T, K]."""
    draw = torch.Generator().manual_seed(rank)
    ids = torch.stack([torch.randperm(8, generator=draw)[:2] for _ in range(max(num_tokens, 1))])
    match name:
        case "all to one":
            return torch.full((num_tokens, 1), 5)
        case "expert without tokens":
            return torch.where(ids == 3, ids.roll(1, 1), ids)[:num_tokens] % 7
        case "unsorted choices":
            return ids.flip(1)[:num_tokens]
    return ids[:num_tokens]


ROUTES = {
    "random": (9, 5, 7, 3),
    "unsorted choices": (4, 6, 2, 8),
    "all to one": (6, 4, 5, 3),
    "expert without tokens": (8, 8, 8, 8),
    "rank without tokens": (0, 7, 0, 5),
    "no tokens": (0, 0, 0, 0),
}


def of(tensor):
    """The gradient of a leaf, zeros where none came."""
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad


def layer(name, lora=None):
    """Largest differences of one layer's outputs and gradients, as shares of their size. With
    `lora` the reference has the merged weights of adapted experts."""
    rank, world = dist.get_rank(), dist.get_world_size()
    model = tiny_model(**MODEL)
    original = experts_of(model.base_model.layers[1])
    reference = copy.deepcopy(original).double()
    reference.config._experts_implementation = "eager"
    if lora is not None:
        adapt(model, lora, seed=0)
        stir_adapters(model)
    leaves = {n: p.detach().double().requires_grad_() for n, p in original.named_parameters()}
    merged = merged_experts(leaves, 0.0 if lora is None else lora.alpha / lora.rank)
    mesh = on_mesh({"expert_parallel_size": world})
    holder = SimpleNamespace(
        config=SimpleNamespace(model_type="qwen3_moe"),
        base_model=SimpleNamespace(layers=[SimpleNamespace(mlp=SimpleNamespace(experts=original))]),
    )
    with patch.object(expert_module, "decoder_layers", lambda model: model.base_model.layers):
        divide_experts(holder, mesh)

    inputs = []
    for other in range(world):
        draw = torch.Generator().manual_seed(10 + other)
        num_tokens = ROUTES[name][other]
        ids = routes(name, num_tokens, other)
        hidden = torch.randn(num_tokens, HIDDEN, generator=draw)
        gates = torch.rand(ids.shape, generator=draw)
        upstream = torch.randn(num_tokens, HIDDEN, generator=draw)
        inputs.append((hidden, ids, gates, upstream))
    hidden, ids, gates, upstream = inputs[rank]
    hidden, gates = hidden.requires_grad_(), gates.requires_grad_()
    output = original(hidden, ids, gates)
    (output * upstream).sum().backward()

    joint = [torch.cat(values) for values in zip(*inputs, strict=True)]
    wanted_in, wanted_gates = (joint[i].detach().double().requires_grad_() for i in (0, 2))
    wanted = functional_call(reference, merged, (wanted_in, joint[1], wanted_gates))
    if wanted.requires_grad:  # the loop ran: of no token at all it gives plain zeros
        (wanted * joint[3].double()).sum().backward()

    first = sum(ROUTES[name][:rank])
    own = slice(first, first + len(hidden))
    pairs = {
        "outputs": (output, wanted[own]),
        "gradients of inputs": (hidden.grad, of(wanted_in)[own]),
        "gradients of gates": (gates.grad, of(wanted_gates)[own]),
    }
    for which, parameter in original.named_parameters():
        if parameter.requires_grad:
            pairs[f"gradient of {which}"] = (parameter.grad.full_tensor(), of(leaves[which]))
    return {
        what: difference(a.detach().double(), b.detach()) if a.numel() else 0.0
        for what, (a, b) in pairs.items()
    }


def merged_experts(leaves, scaling):
    """The two tensors of experts, from those of their adapters."""
    return {
        which: leaves[which]
        if which in leaves
        else leaves[f"{which}.weight"]
        + scaling * leaves[f"{which}.lora_B"] @ leaves[f"{which}.lora_A"]
        for which in ("gate_up_proj", "down_proj")
    }


def layers():
    found = {name: layer(name) for name in ROUTES}
    return found | {f"{name}, adapted": layer(name, ADAPTED) for name in ROUTES}


def cases(world):
    rows = partial(random_rows, 7 if world == 2 else 13, seed=5)
    base = Case({}, rows, {"micro_batch_size": 2}, model=MODEL, objective={"entropy_coef": 0.1})
    shards = {"expert_parallel_size": 2, "zero_stage": 3}
    found = {
        **{name: replace(base, parallel=layout) for name, layout in LAYOUTS[world].items()},
        "recomputed": replace(
            base, parallel=shards, settings=base.settings | {"recompute": "full"}
        ),
        "ranks without rows": replace(
            base, parallel=shards, rows=partial(random_rows, 1, seed=6), settings={}
        ),
    }
    found |= {
        f"recurrent layers, stage {stage}": replace(
            base, parallel={"expert_parallel_size": 2, "zero_stage": stage}, model=HYBRID
        )
        for stage in (0, 3)
    }
    tensor = replace(base, parallel=TENSOR)
    found |= {
        "tensor, recomputed": replace(tensor, settings=base.settings | {"recompute": "full"}),
        "tensor, a shared expert": replace(tensor, model=SHARED),
        "tensor, fewer tokens than ranks": replace(
            tensor, rows=partial(random_rows, 1, seed=6), settings={}
        ),
        "tensor, adapters": replace(tensor, lora=ADAPTED),
    }
    found |= {
        f"adapters, stage {stage}": replace(
            base, parallel={"expert_parallel_size": 2, "zero_stage": stage}, lora=ADAPTED
        )
        for stage in range(4)
    }
    found |= {
        f"adapters of whole layers, stage {stage}": replace(
            base, parallel={"zero_stage": stage}, lora=ADAPTED
        )
        for stage in (0, 3)
    }
    found["adapters of one matrix, recomputed"] = replace(
        found["recomputed"], lora=ADAPTED.model_copy(update={"target_modules": EXPERT_MATRICES[1:]})
    )
    if world == 4:
        deep = replace(base, parallel=STAGES, model=DEEPER)
        found |= {
            f"experts in both stages, {mode}": replace(
                deep, settings=base.settings | {"recompute": mode}
            )
            for mode in ("off", "full", "uniform:2")
        }
        of_groups = replace(deep, parallel=STAGES | {"virtual_stages": 2})
        found["experts in groups of layers"] = of_groups
        found["adapters in both stages"] = replace(deep, lora=ADAPTED)
    return found


def layouts():
    return outcomes(cases(dist.get_world_size()))


def parts_held():
    """Shares of expert weights and of all others that this rank holds, by layout."""
    found = {}
    for name, parallel in LAYOUTS[dist.get_world_size()].items():
        model = DEEPER if "pipeline_parallel_size" in parallel else MODEL
        trainer = make_trainer(tiny_model(**model), mesh=on_mesh(parallel), parallel=parallel)
        held = {True: [0, 0], False: [0, 0]}
        for key, master in trainer.policy.masters.items():
            count = held[".experts." in key]
            count[0] += master.to_local().numel()
            count[1] += master.numel()
        found[name] = [own / total for own, total in (held[True], held[False])]
    return found


def round_trips(world):
    """Layouts of a run and of the one that goes on from it, by the name of the case."""
    divided, shards = {"expert_parallel_size": world}, {"zero_stage": 3}
    layouts = {
        "divided, then not": (divided, shards),
        "not, then divided": (shards, divided),
        "divided in two, then in more": (
            shards | {"expert_parallel_size": 2},
            divided | {"zero_stage": 0},
        ),
    }
    layouts["tensor, then not"] = (TENSOR | {"expert_parallel_size": world}, divided)
    if world == 4:
        layouts["stages of layers, then none"] = (STAGES, divided)
        layouts["no stages of layers, then two"] = (shards, STAGES)
    return layouts


def round_trip():
    """A run that goes on with experts divided otherwise."""
    return go_on(round_trips(dist.get_world_size()), **MODEL)


def own_pairs_in_turn(self, *products):
    """As if each expert had the B of another."""
    return right_adapters(self, *products[:-1], products[-1].roll(1, 0))


right_adapters = ExpertLora.add_adapters
BUGS = {
    "nothing": nullcontext,
    "each expert has another's adapter": lambda: patch.object(
        ExpertLora, "add_adapters", own_pairs_in_turn
    ),
    "outputs in the order of experts": lambda: patch.object(
        expert_module, "_inverse", lambda order: order
    ),
    "gradients stay where they are": lambda: patch.object(
        expert_module._Exchange,
        "backward",
        staticmethod(lambda ctx, grad: (grad.new_zeros(sum(ctx.sent), HIDDEN), None, None, None)),
    ),
    "every rank holds the first experts": lambda: patch.object(
        expert_module, "own_part", lambda p: p.full_tensor()[: len(p.to_local())]
    ),
}


def planted():
    found = {}
    for name, plant in BUGS.items():
        with plant():
            worst = max(layer("random", ADAPTED).values())
        found[name] = max(everywhere(worst))
    return found


def num_copies(self, name):
    """As if each stage of layers had the experts of all."""
    stages = self.mesh.sizes.pipeline if ".experts." in name else 1
    return stages * right_copies(self, name)


right_copies = BasePolicy._num_copies
BUGS_OF_STAGES = {
    "nothing": nullcontext,
    "stages count each other's experts": lambda: patch.object(
        BasePolicy, "_num_copies", num_copies
    ),
    "experts of a stage have half a gradient": lambda: patch.object(
        expert_module._Exchange,
        "backward",
        staticmethod(
            lambda ctx, grad: (
                0.5 * expert_module._exchange(grad, ctx.received, ctx.sent, ctx.group),
                None,
                None,
                None,
            )
        ),
    ),
}


def planted_of_stages():
    """The worst difference from one process with each fault of experts in two stages of layers."""
    right = replace(cases(4)["experts in both stages, off"], rows=partial(random_rows, 7, seed=5))
    return {
        name: worst_of(replace(right, plant=plant), "gradient", "metrics")
        for name, plant in BUGS_OF_STAGES.items()
    }


def main() -> None:
    parts = [layers, layouts, parts_held, round_trip, planted]
    start(parts if processes().world_size == 2 else [*parts, planted_of_stages])
