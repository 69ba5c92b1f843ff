"""Compiles decoder layers for a GPU without one: torch generates Triton kernels, which do nothing.
Prints as JSON how many graphs the first micro-batch has, and those of further ones.

    python -m tests.trainer.compiled_layers qwen3          # or: hybrid, moe

What lies between the compiled graphs, attention and recurrence, is replaced by something cheap.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import Tensor
from torch._dynamo.utils import counters
from torch._functorch import config as functorch_config
from torch._inductor import async_compile, config, ir, scheduler
from transformers import PreTrainedModel

from hone.attention import PackedContext, interface
from hone.attention.recurrent import mixing
from hone.models.decoder import hidden_states
from tests import triton_compilations
from tests.recurrent.models import HYBRID, passes_of
from tests.trainer.examples import tiny_model

SIZES = [1024, 1023, 6000, 4000, 300, 2]
"""Numbers of tokens: as many as the model is wide, and on both sides of 5,120, from where on a norm
of 1,024 values would be computed otherwise."""
WIDE: dict[str, Any] = {
    "hidden_size": 1024,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
}


def model_of(kind: str) -> PreTrainedModel:
    if kind == "hybrid":
        fields = HYBRID | WIDE | {"linear_key_head_dim": 128, "linear_value_head_dim": 128}
        return tiny_model(dtype=torch.bfloat16, **fields | {"num_hidden_layers": 4})
    if kind == "moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        return tiny_model("qwen3_moe", dtype=torch.bfloat16, **WIDE | experts)
    return tiny_model(kind, dtype=torch.bfloat16, **WIDE)


def attend(q: Tensor, k: Tensor, v: Tensor, context: PackedContext, **_: Any) -> Tensor:
    return q + (k + v).repeat_interleave(q.shape[1] // k.shape[1], 1)


def mix(inputs: Any, weight: Tensor, heads: mixing.DeltaHeads, *_: Any) -> Tensor:
    v = heads.split(inputs.channels * weight.sum())[2]
    return v * (inputs.g * inputs.beta)[..., None].to(v.dtype)


class _Kernel:
    def run(self, *_: Any, **__: Any) -> None:
        return None


def pretend() -> None:
    triton_compilations.pretend()
    config.cpu_backend = "triton"
    config.fx_graph_cache = False
    config.compile_threads = 1
    assert hasattr(scheduler, "_is_gpu_triton_backend")
    replaced: list[tuple[Any, str, Any]] = [
        (ir, "is_gpu", lambda device: True),
        (scheduler, "_is_gpu_triton_backend", lambda *nodes: True),
        (async_compile.AsyncCompile, "triton", lambda *_, **__: _Kernel()),
        (functorch_config, "enable_autograd_cache", False),
        (interface.backends, "packed_attention", attend),
        (mixing, "_over_segments", mix),
    ]
    for place, name, value in replaced:
        setattr(place, name, value)


def main() -> None:
    model = model_of(sys.argv[1] if len(sys.argv) > 1 else "qwen3")
    pretend()
    passes_of(model, compile=True).train()
    graphs: list[int] = []
    for size in SIZES:
        for with_gradient in (True, False):
            with torch.set_grad_enabled(with_gradient):
                ids = torch.zeros(size, dtype=torch.long)
                context = PackedContext.from_lengths([size])
                found = hidden_states(model, ids, torch.arange(size), context)
                if with_gradient:
                    found.float().sum().backward()
        graphs.append(counters["stats"]["unique_graphs"])
    json.dump({"first": graphs[0], "later": graphs[1:]}, sys.stdout)


if __name__ == "__main__":
    main()
