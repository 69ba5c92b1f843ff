"""Runs tensor parallelism in one of several processes (`tests.ranks`), part after part.

Two processes share a model; four are two such pairs with different rows and FSDP over them. Every
process also runs the whole model alone, and what comes out is compared there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hone.attention import PackedContext
from hone.distributed.mesh import Axis, Mesh
from hone.distributed.processes import processes
from hone.families.registry import DIVIDED_FAMILIES, SPECS
from hone.models.adapted import adapters_off
from hone.models.adapters import adapt
from hone.models.contents import follow_inputs
from hone.models.decoder import hidden_states
from hone.models.settings import LoraConfig
from hone.trainer import logprobs, tensor
from hone.trainer.experts import divide_experts
from hone.trainer.logprobs import token_scores
from hone.trainer.sharded import ShardedPolicy
from hone.trainer.tensor import parallelize
from tests.models.families import FAMILY_FIELDS
from tests.rank_cases import on_mesh, start
from tests.trainer.examples import VOCAB, tiny_model

Found = dict[str, Any]
EXPERTS: dict[str, Any] = {
    "family": "qwen3_moe",
    **FAMILY_FIELDS["qwen3_moe"],
    "mlp_only_layers": [],
}
CASES: dict[str, dict[str, Any]] = {
    **{
        name: {"family": name, **FAMILY_FIELDS[name]}
        for name in DIVIDED_FAMILIES
        if SPECS[name].experts is None
    },
    "llama, untied, all biases": {
        "family": "llama",
        "tie_word_embeddings": False,
        "attention_bias": True,
        "mlp_bias": True,
    },
    "qwen3, untied, odd vocabulary": {
        "family": "qwen3",
        "tie_word_embeddings": False,
        "vocab_size": VOCAB + 3,
        "pad_token_id": VOCAB - 5,
    },
}
LENGTHS = {"odd": (5, 1, 7), "even": (4, 8), "one token": (1,)}


def score(
    model: PreTrainedModel, lengths: tuple[int, ...], ranks: Axis | None, seed: int = 0
) -> tuple[Tensor, ...]:
    """Log-probability and entropy of every token's successor, packed, and log-probabilities of
    three more words."""
    draw = torch.Generator().manual_seed(100 * sum(lengths) + seed)
    ids, labels = torch.randint(VOCAB, (2, sum(lengths)), generator=draw)
    if model.config.pad_token_id is not None:  # whose embedding is not trained
        ids[-1] = model.config.pad_token_id
    borders = torch.tensor([0, *lengths]).cumsum(0)
    context = PackedContext(
        cu_seqlens=borders.int(), max_seqlen=max(lengths), lengths=tuple(lengths)
    )
    positions = torch.cat([torch.arange(n) for n in lengths])
    found = token_scores(
        model,
        hidden_states(model, ids, positions, context),
        labels,
        temperature=0.7,
        chunk_tokens=5,
        with_entropy=True,
        with_mean=True,
        at_ids_NK=torch.randint(VOCAB, (len(ids), 3), generator=draw),
        tensor=ranks,
    )
    return tuple(found[name] for name in ("logprobs", "entropy", "logprobs_at", "mean_logits"))


def likeliest(model: PreTrainedModel, lengths: tuple[int, ...], ranks: Axis | None) -> Tensor:
    """Ids of the three likeliest successors of each of some states."""
    hidden = torch.randn(
        sum(lengths), model.config.hidden_size, generator=torch.Generator().manual_seed(1)
    )
    labels = torch.zeros(len(hidden), dtype=torch.int64)
    with torch.no_grad():
        found = token_scores(
            model, hidden, labels, temperature=0.7, chunk_tokens=5, top_k=3, tensor=ranks
        )
    return found["top_ids"]


def loss_of(scores: tuple[Tensor, ...], seed: int = 0) -> Tensor:
    values, entropy, at, _ = scores
    draw = torch.Generator().manual_seed(seed)
    factors = torch.randn(2, len(values), generator=draw)
    of_words = torch.randn(at.shape[-1], generator=draw)
    return (factors[0] * values + factors[1] * entropy + at @ of_words).sum()


ADAPTERS = LoraConfig(rank=3, alpha=5)


def make(case: str, *, lora: LoraConfig | None = None, **fields: Any) -> PreTrainedModel:
    """Biases, norms and adapters away from where they start, so that they matter."""
    model = tiny_model(**CASES[case] | fields)
    if lora is not None:
        adapt(model, lora, seed=3)
    draw = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1 or name.endswith("lora_B"):
                parameter += 0.3 * torch.randn(parameter.shape, generator=draw)
    follow_inputs(model)
    return model


def gradient_error(actual: PreTrainedModel, expected: PreTrainedModel) -> float:
    """Largest relative difference of a parameter's gradient.

    Of one that is zero but for rounding (queries and keys of a single token) the difference is
    relative to the largest gradient.
    """
    wanted = {n: p.grad for n, p in expected.named_parameters() if p.grad is not None}
    found = {n: p.grad for n, p in actual.named_parameters() if p.grad is not None}
    assert found.keys() == wanted.keys()
    errors, largest = [], max(gradient.norm() for gradient in wanted.values())
    for name, gradient in found.items():
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        size = wanted[name].norm()
        scale = size if size > 1e-6 * largest else largest
        errors.append(float((whole - wanted[name]).norm() / scale))
    return max(errors)


def compare(actual: Any, expected: Any) -> float:
    return max(float((a - b).detach().abs().max()) for a, b in zip(actual, expected, strict=True))


def same_everywhere(values: Tensor, group: Any) -> bool:
    parts = [torch.empty_like(values) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, values.detach().contiguous(), group=group)
    return all(torch.equal(part, values) for part in parts)


def step(case: str, lengths: tuple[int, ...], mesh: Mesh, prepare: Any = None, **fields: Any):
    whole = make(case, **fields)
    split = copy.deepcopy(whole)
    parallelize(split, mesh)
    for model in (whole, split) if prepare is not None else ():
        prepare(model)
    scores = [score(whole, lengths, None), score(split, lengths, mesh.tensor)]
    for pair in scores:
        loss_of(pair).backward()
    with torch.inference_mode():
        scored = score(split, lengths, mesh.tensor)
    return {
        "values": compare(scores[1], scores[0]),
        "values without gradient": compare(scored, scores[0]),
        "gradients": gradient_error(split, whole),
        "likeliest": torch.equal(
            likeliest(split, lengths, mesh.tensor), likeliest(whole, lengths, None)
        ),
        "equal on all ranks": same_everywhere(scores[1][0], mesh.tensor.group),
        "largest part": max(
            p.to_local().numel() / p.numel()
            for name, p in split.named_parameters()
            if p.ndim == 2 and "lora" not in name
        ),
    }


def recompute(model: PreTrainedModel) -> None:
    model.gradient_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    for layer in model.base_model.layers:
        layer.training = True


def compiled() -> Found:
    """Layers traced by the compiler, once for all numbers of tokens."""
    return {family: trace(family) for family in ("qwen3", "qwen3_5_text", "qwen3_moe")}


def trace(family: str) -> Found:
    mesh, case = tensor_mesh(), {"num_hidden_layers": 1, "layer_types": None}
    if family == "qwen3_moe":
        mesh = on_mesh({"tensor_parallel_size": 2, "expert_parallel_size": 2})
        whole = tiny_model(**EXPERTS | case)
        follow_inputs(whole)
    else:
        whole = make(family, **case)
    split = copy.deepcopy(whole)
    parallelize(split, mesh)
    divide_experts(split, mesh)
    for layer in split.base_model.layers:
        layer.compile(dynamic=True, backend="aot_eager")
    errors = []
    for lengths in ((5, 1, 7), (9, 3), (11,)):
        for model, ranks in ((whole, None), (split, mesh.tensor)):
            model.zero_grad()
            loss_of(score(model, lengths, ranks)).backward()
        errors.append(gradient_error(split, whole))
    return {"gradients": max(errors)}


def frozen() -> Found:
    """What is not trained stays so, and has no gradient."""
    mesh = tensor_mesh()
    model = make("qwen3, untied, odd vocabulary")
    model.requires_grad_(False)
    model.base_model.layers[0].self_attn.q_proj.weight.requires_grad_(True)
    parallelize(model, mesh)
    loss_of(score(model, (5, 4), mesh.tensor)).backward()
    return {"trained": [name for name, p in model.named_parameters() if p.grad is not None]}


ADAPTED = (
    *("qwen3", "qwen3_5_text", "llama, untied, all biases"),
    "qwen3, untied, odd vocabulary",
)
STEPS: dict[str, tuple[str, tuple[int, ...], Any]] = {
    **{case: (case, LENGTHS["odd"], None) for case in CASES},
    **{f"tokens {name}": ("qwen3", LENGTHS[name], None) for name in LENGTHS},
    "recomputed": ("qwen2", LENGTHS["odd"], recompute),
    "recurrent, recomputed": ("qwen3_5_text", LENGTHS["odd"], recompute),
}


def steps() -> Found:
    return {
        name: step(case, lengths, tensor_mesh(), prepare)
        for name, (case, lengths, prepare) in STEPS.items()
    }


def adapted() -> Found:
    """Models with adapters, and what a reference computes without them."""
    found, prepare = {}, recompute
    for case in ADAPTED:
        found[case] = step(case, LENGTHS["odd"], tensor_mesh(), prepare, lora=ADAPTERS)
        found[case] |= {"reference": without_adapters(case)}
        prepare = None
    return found


def without_adapters(case: str) -> float:
    """Difference of the frozen base, computed by split layers whose adapters are off."""
    whole = make(case, lora=ADAPTERS)
    split = copy.deepcopy(whole)
    parallelize(split, tensor_mesh())
    with torch.no_grad(), adapters_off(split), adapters_off(whole):
        scores = score(split, LENGTHS["odd"], tensor_mesh().tensor)
        expected = score(whole, LENGTHS["odd"], None)
    with torch.no_grad():
        assert compare(expected, score(whole, LENGTHS["odd"], None)) > 0.01
    return compare(scores, expected)


# ---------------------------------------------------------------- planted bugs

combine = logprobs._combine
first_row = logprobs.first_row


def without_other_maxima(statistics: Tensor) -> Any:
    statistics = statistics.clone()
    statistics[:, 0] = statistics[0, 0].clone()
    return combine(statistics)


BUGS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "nothing": nullcontext,
    "norm gradients not added up": lambda: patch.object(tensor, "_sum", lambda x, mesh: x),
    "labels owned by the wrong rank": lambda: patch.object(
        logprobs, "first_row", lambda rows, rank, size: first_row(rows, size - 1 - rank, size)
    ),
    "maxima of other ranks left out": lambda: patch.object(
        logprobs, "_combine", without_other_maxima
    ),
    "gradients of hidden states not added up": lambda: patch.object(
        logprobs.dist, "all_reduce", lambda *_, **__: None
    ),
    "gradients of hidden states added up twice": lambda: patch.object(
        tensor, "_GatherWhole", tensor._Gather
    ),
    "embeddings of the wrong rank": lambda: patch.object(
        tensor, "first_row", lambda rows, rank, size: first_row(rows, size - 1 - rank, size)
    ),
    "recurrent rows taken as they lie": lambda: patch.object(
        tensor, "own_rows", lambda parameter, blocks: tensor.own_part(parameter)
    ),
    "recurrent norm gradients not added up": lambda: patch.object(
        tensor, "_sum", lambda x, mesh: x
    ),
    "adapters: gradients of whole ones not added up": lambda: patch.object(
        tensor, "_sum", lambda x, mesh: x
    ),
    "adapters: added on each rank to what is added up": lambda: patch.object(
        tensor.RowLora, "forward", adapter_behind_the_sum
    ),
    "recurrent adapters: rows of B as they lie": lambda: patch.object(
        tensor, "own_rows", only_adapters_as_they_lie
    ),
}


def adapter_behind_the_sum(self: Any, x: Tensor) -> Tensor:
    y = tensor._scatter_sum(
        torch.nn.functional.linear(x, tensor.own_part(self.weight)), tensor._mesh(self.weight)
    )
    a, b = tensor.own_part(self.lora_A), tensor._shared(self.lora_B)
    own = self.add_adapter(torch.zeros_like(x @ x.new_zeros(x.shape[-1], len(b))), x, a, b)
    return y + own[:, : y.shape[1]]


own_rows = tensor.own_rows


def only_adapters_as_they_lie(parameter: Tensor, blocks: Any) -> Tensor:
    if parameter.shape[-1] == ADAPTERS.rank:
        return tensor.own_part(parameter)
    return own_rows(parameter, blocks)


def planted() -> Found:
    mesh, found = tensor_mesh(), {}
    for name, plant in BUGS.items():
        with plant():
            case = "qwen3_5_text" if name.startswith("recurrent") else "qwen3"
            lora = ADAPTERS if "adapters" in name else None
            result = step(case, LENGTHS["odd"], mesh, lora=lora)
        found[name] = {key: result[key] for key in ("values", "gradients")}
    return found


# ---------------------------------------------------------------- with FSDP


def sharded(case: str, mesh: Mesh, *, stage: int, is_recomputed: bool) -> Found:
    """Two micro-batches on each place of the data axis, whose gradients add up."""
    case, _, adapters = case.partition(" with ")
    whole = make(case, lora=ADAPTERS if adapters else None)
    split = copy.deepcopy(whole)
    parallelize(split, mesh)
    if is_recomputed:
        recompute(split)
    policy = ShardedPolicy(split, mesh, stage=stage)
    names = list(LENGTHS)[:2]
    for index in range(2 * mesh.sizes.data):
        loss_of(score(whole, LENGTHS[names[index % 2]], None, seed=index), seed=index).backward()
    values = []
    for turn in range(2):
        index = 2 * mesh.data.rank + turn
        lengths = LENGTHS[names[index % 2]]
        policy.sharded.begin_micro_batch(is_last=turn == 1)
        with torch.no_grad():
            expected = score(whole, lengths, None, seed=index)
        scores = policy.sharded(lambda n=lengths, i=index: score(split, n, mesh.tensor, seed=i))
        loss_of(scores, seed=index).backward()
        values.append(compare(scores, expected))
    kinds = {str(p.device_mesh.mesh_dim_names) for p in split.parameters()}
    return {
        "values": max(values),
        "gradients": gradient_error(split, whole),
        "meshes": sorted(kinds),
    }


def shards() -> Found:
    return {
        f"{case}, stage {stage}": sharded(
            case, tensor_mesh(), stage=stage, is_recomputed=stage == 3
        )
        for case in (
            *("qwen3", "llama, untied, all biases", "qwen3, untied, odd vocabulary"),
            *("qwen3 with adapters", "llama, untied, all biases with adapters"),
        )
        for stage in (2, 3)
    }


def tensor_mesh() -> Mesh:
    return on_mesh({"tensor_parallel_size": 2, "zero_stage": 3})


def main(part: str = "") -> None:
    if part:
        start([compiled])
    else:
        start([steps, adapted, frozen, planted] if processes().world_size == 2 else [shards])
