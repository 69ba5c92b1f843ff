"""Runs an engine over ranks that share each layer's experts, in one of several processes
(`tests.ranks`), part after part.

Every rank also runs the whole model alone, and what comes out is compared there.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial, wraps
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hone.attention import ATTENTION_NAME
from hone.distributed.processes import processes
from hone.engine import base
from hone.engine.engine import EmbeddedEngine
from hone.engine.settings import EngineConfig
from hone.models import experts, tensor_parallel
from hone.models.manifest import export_weights
from hone.models.tensor_parallel import TensorParallel, shard_model, shard_of
from hone.types import Completion, Request, SamplingParams
from hone.weights.sync import WeightSync
from tests.rank_cases import everywhere, of_first
from tests.ranks import run_parts

CPU = torch.device("cpu")
VOCAB, NUM_EXPERTS = 52, 8
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": NUM_EXPERTS, "norm_topk_prob": True, "mlp_only_layers": [0]},
    "glm4_moe": {
        "n_routed_experts": NUM_EXPERTS,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "use_qk_norm": True,
        "routed_scaling_factor": 1.5,
    },
}
AS_IT_COMES, NONE_TO_THE_FIRST, ALL_TO_THE_LAST_RANK = ROUTINGS = (
    "as it comes",
    "no token to the first expert",
    "all tokens to the last rank",
)


def make_model(
    family: str, *, seed: int = 0, routing: str = AS_IT_COMES, size: int = 1
) -> PreTrainedModel:
    """A layer with an MLP and two with experts, of which a token passes two; for `routing` to the
    experts of `size` ranks."""
    fields = {
        "vocab_size": VOCAB,
        "hidden_size": 40,
        "intermediate_size": 56,
        "moe_intermediate_size": 24,
        "num_experts_per_tok": 2,
        "num_hidden_layers": 3,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "max_position_embeddings": 64,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
        "pad_token_id": 0,
        "bos_token_id": None,
    }
    config = AutoConfig.for_model(family, **fields | FAMILIES[family])
    favour = torch.zeros(NUM_EXPERTS)
    if routing == NONE_TO_THE_FIRST:
        favour[0] = -5
    elif routing == ALL_TO_THE_LAST_RANK:
        favour[-NUM_EXPERTS // size :] = 5
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = AutoModelForCausalLM.from_config(
            config, attn_implementation=ATTENTION_NAME, dtype=torch.float32
        ).eval()
        with torch.no_grad():
            for name, value in export_weights(model):
                value.copy_(float("norm" in name) + 0.25 * torch.randn_like(value))
                if name.endswith("e_score_correction_bias"):
                    value.mul_(0.2).add_(favour)
                elif family == "qwen3_moe" and favour.any():
                    _send(name, value, favour)
    return model


def _send(name: str, value: Tensor, favour: Tensor) -> None:
    """A router without a bias sees one where hidden states have a value that is always the same:
    the first, which nothing is added to."""
    if name.endswith("embed_tokens.weight"):
        value[:, 0] = 6.0
    elif name.endswith("o_proj.weight"):
        value[0] = 0.0
    elif "down_proj" in name:
        value[..., 0, :] = 0.0
    elif "norm" in name and value.numel() == 40:
        value[0] = 1.0
    elif name.endswith("mlp.gate.weight"):
        value[:, 0] += 3 * favour


def make_engine(model: PreTrainedModel, tp: TensorParallel | None) -> EmbeddedEngine:
    size = 1 if tp is None else tp.size
    cfg = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "kv_cache_gib": 0.01 / size}
    return EmbeddedEngine(
        model if tp is None else shard_model(model, tp),
        EngineConfig.model_validate({**cfg, "tensor_parallel_size": size, "enable_sleep": True}),
        eos_token_ids=(3,),
        max_model_len=64,
        block_size=4,
        owns_weights=True,
        tensor_parallel=tp,
        records_routes=True,
    )


def complete(engine: EmbeddedEngine, temperature: float = 0.0) -> dict[str, Completion]:
    """Of two groups with prompts of several blocks, more than may run at once."""
    prompts = [tuple(range(5, 5 + n)) for n in (6, 35)]
    engine.submit(
        [
            Request(
                id=f"{i}",
                prompt_ids=prompts[i % 2],
                sampling=SamplingParams(max_tokens=5 + i, temperature=temperature, seed=i),
            )
            for i in range(5)
        ]
    )
    done: list[Completion] = []
    while engine.has_unfinished:
        done += engine.step()
    return {one.request_id: one for one in done}


def compared(ours: dict[str, Completion], theirs: dict[str, Completion]) -> dict[str, Any]:
    assert ours.keys() == theirs.keys()
    pairs = [(ours[key], theirs[key]) for key in theirs]
    gaps = [
        abs(a - b)
        for one, other in pairs
        for a, b in zip(one.logprobs, other.logprobs, strict=False)  # bugs change lengths
    ]
    return {
        "same tokens": all(a.token_ids == b.token_ids for a, b in pairs),
        "same routes": all(_routes(a) == _routes(b) for a, b in pairs),
        "gap": max(gaps),
    }


def _routes(done: Completion) -> list[Any]:
    """Of a token's experts the order says nothing."""
    assert done.routes is not None
    return torch.from_numpy(done.routes).sort(-1).values.tolist()


def experts_passed(done: dict[str, Completion]) -> list[int]:
    """By any token in any layer."""
    return sorted({expert for one in done.values() for expert in one.routes.flatten().tolist()})  # type: ignore[union-attr]


def alone(model: PreTrainedModel, temperature: float = 0.0) -> dict[str, Completion]:
    """What one rank with the whole model completes."""
    return of_first(lambda: complete(make_engine(copy.deepcopy(model), None), temperature))


def engines(tp: TensorParallel) -> dict[str, Any]:
    """What differs between the engine of all ranks and one alone, by family and routing."""
    found: dict[str, Any] = {}
    for family in FAMILIES:
        for routing in ROUTINGS:
            model = make_model(family, routing=routing, size=tp.size)
            temperature = 1.0 if routing == NONE_TO_THE_FIRST else 0.0
            theirs = alone(model, temperature)
            ours = complete(make_engine(model, tp), temperature)
            numbers = {key: (one.token_ids, one.logprobs) for key, one in ours.items()}
            found[f"{family}, {routing}"] = compared(ours, theirs) | {
                "equal on all ranks": all(other == numbers for other in everywhere(numbers)),
                "experts": experts_passed(theirs),
            }
    return found


# ---------------------------------------------------------------- planted bugs


def _own_router(name: str, tensor: Tensor, config: Any, tp: TensorParallel) -> Tensor:
    """The mistake: what a rank does not have it does not choose either."""
    part = shard_of(name, tensor, config, tp)
    if not name.endswith("mlp.gate.weight"):
        return part
    hidden = torch.full_like(tensor, 0.0)
    own = slice(tp.rank * len(tensor) // tp.size, (tp.rank + 1) * len(tensor) // tp.size)
    hidden[own] = tensor[own]
    return hidden


def _first_experts(name: str, tensor: Tensor, config: Any, tp: TensorParallel) -> Tensor:
    if ".experts." in name:
        tp = TensorParallel(rank=0, size=tp.size, device=CPU)
    return shard_of(name, tensor, config, tp)


def _whole_shared_experts(name: str, tensor: Tensor, config: Any, tp: TensorParallel) -> Tensor:
    """The mistake: every rank adds the output of shared experts."""
    return tensor if ".shared_experts." in name else shard_of(name, tensor, config, tp)


def _from_zero(*inputs: Tensor, first: int) -> Tensor:
    return _right_sum_own(*inputs, first=0 * first)


def _all_rows(x: Tensor, ids: Tensor, *inputs: Tensor, first: int) -> Tensor:
    """The mistake: tokens of other ranks' experts pass one of this rank."""
    return experts.sum_chosen(x, (ids - first) % len(inputs[-1]), *inputs)


_right_sum_own = experts.sum_own


def plant(stack: ExitStack, name: str, mistake: Callable[..., Tensor]) -> None:
    module = experts if name == "sum_own" else tensor_parallel
    stack.enter_context(patch.object(module, name, mistake))


BUGS: dict[str, tuple[str, Callable[..., Tensor]]] = {
    "first experts everywhere": ("shard_of", _first_experts),
    "router divided": ("shard_of", _own_router),
    "shared experts added by every rank": ("shard_of", _whole_shared_experts),
    "ids from zero on": ("sum_own", _from_zero),
    "experts of others computed": ("sum_own", _all_rows),
}


def planted(tp: TensorParallel) -> dict[str, float]:
    """The largest difference of log-probabilities with each bug, and with none."""
    found: dict[str, float] = {}
    for family in FAMILIES:
        model = make_model(family)
        expected = alone(model)
        for bug, planting in {**BUGS, "none": None}.items():
            if "shared" in bug and family == "qwen3_moe":
                continue
            with ExitStack() as stack:
                if planting is not None:
                    plant(stack, *planting)
                actual = complete(make_engine(model, tp))
            found[f"{family}, {bug}"] = compared(actual, expected)["gap"]
    return found


# ---------------------------------------------------------------- weights


class Trainer:
    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model

    def named_weights(self) -> Any:
        return export_weights(self.model)


def push(model: PreTrainedModel, group: EmbeddedEngine, version: int) -> str:
    try:
        WeightSync(Trainer(model), group).push(version)  # type: ignore[arg-type]
    except RuntimeError as error:
        return str(error)
    return ""


def weights(tp: TensorParallel) -> dict[str, Any]:
    """A sync into an engine that has slept, which gives its weights up: with the experts of
    another rank it is refused, with its own it samples as an engine alone."""
    found: dict[str, Any] = {}
    deliver = base.deliver
    for family in FAMILIES:
        group, new = make_engine(make_model(family), tp), make_model(family, seed=1)
        group.sleep()
        group.wake()
        other = TensorParallel(rank=(tp.rank + 1) % tp.size, size=tp.size, device=CPU)
        theirs = {
            name: shard_of(name, whole, new.config, other)
            for name, whole in export_weights(new)
            if ".experts." in name
        }

        def send_others(pairs: Any, group: Any = group, theirs: Any = theirs) -> int:
            num_bytes = deliver(pairs)
            held = dict(group.named_weights())
            deliver([(held[name], part) for name, part in theirs.items()])
            return num_bytes

        with patch.object(base, "deliver", send_others):
            refusal = push(new, group, 1)
        delivered = push(new, group, 2)
        ours, expected = complete(group), alone(new)
        own = sum(tensor.nbytes for name, tensor in group.named_weights() if ".experts." in name)
        whole = sum(tensor.nbytes for name, tensor in export_weights(new) if ".experts." in name)
        found[family] = compared(ours, expected) | {
            "refusal": refusal,
            "delivered": delivered,
            "share of experts": own / whole,
        }
    return found


def _of(part: Callable[[TensorParallel], Any], tp: TensorParallel) -> Callable[[], Any]:
    return wraps(part)(partial(part, tp))


def main() -> None:
    torch.set_num_threads(1)
    tp = TensorParallel.from_environment(processes().world_size, CPU)

    parts = (engines, planted, weights)
    run_parts([_of(part, tp) for part in (parts if tp.size == 2 else parts[:1])])
    dist.destroy_process_group()
