"""What vLLM tells of experts, against stand-ins for its parts: on a CPU it packs their weights and
records no routes. `benchmarks/gpu/vllm_check.py` and `routes_check.py --backend vllm` test vLLM."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoConfig

from hone.engine.sequence import Sequence
from hone.engine.vllm.routes import VLLMRoutes
from hone.engine.vllm.weights import VLLMWeights
from hone.types import Request, SamplingParams
from tests.engine.test_vllm import on_vllm

NUM_LAYERS, NUM_CHOSEN, DENSE = 3, 2, 1


class Recorder:
    """vLLM's side: routes of all layers, of the prompt with the first token, then one at a time."""

    def __init__(self, num_experts: int = 8) -> None:
        config = AutoConfig.for_model(
            "qwen3_moe", num_hidden_layers=NUM_LAYERS, num_experts=num_experts,
            num_experts_per_tok=NUM_CHOSEN, mlp_only_layers=[DENSE],
        )  # fmt: skip
        self.states: dict[str, Any] = {}
        self.draw = np.random.default_rng(0)
        llm = SimpleNamespace(output_processor=SimpleNamespace(request_states=self.states))
        self.routes = VLLMRoutes(config, llm)
        self.num_experts = num_experts

    def begin(self, key: str) -> list[Any]:
        self.states[f"{key}-x"] = SimpleNamespace(routed_experts_chunks=[])
        self.routes.begin(key, f"{key}-x")
        return self.states[f"{key}-x"].routed_experts_chunks

    def rows(self, number: int) -> Any:
        kind = np.uint8 if self.num_experts <= 256 else np.uint16
        size = number, NUM_LAYERS, NUM_CHOSEN
        return self.draw.integers(self.num_experts, size=size).astype(kind)


def sequence_of(*prompt: int) -> Sequence:
    request = Request(id="a", prompt_ids=prompt, sampling=SamplingParams(max_tokens=8))
    return Sequence(request=request, arrival=0, stop_ids=frozenset())


def sampled(sequence: Sequence, chunks: list[Any], told: Any) -> None:
    chunks.append(told)
    sequence.append(7, -1.0, 0)


@pytest.mark.parametrize("num_experts", [8, 255, 256, 300])
def test_routes_are_of_all_tokens_but_the_last_and_of_layers_with_experts(num_experts):
    vllm, sequence = Recorder(num_experts), sequence_of(1, 2, 3)
    chunks = vllm.begin("0")
    prompt, second = vllm.rows(3), vllm.rows(1)
    sampled(sequence, chunks, prompt)
    sampled(sequence, chunks, second)
    del vllm.states["0-x"]  # vLLM has ended it, and tells the whole
    told = np.concatenate([prompt, second])
    output = SimpleNamespace(outputs=[SimpleNamespace(routed_experts=told)])
    vllm.routes.take("0", sequence, output)
    assert sequence.routes is not None
    assert sequence.routes.dtype == (np.uint8 if num_experts < 255 else np.int16)
    assert sequence.routes.shape == (len(sequence.token_ids) - 1, NUM_LAYERS - 1, NUM_CHOSEN)
    assert (sequence.routes == told[:, [0, 2]]).all()


def test_one_that_is_handed_over_again_keeps_what_sampled_its_tokens():
    vllm, sequence = Recorder(), sequence_of(1, 2)
    first = [vllm.rows(2), vllm.rows(1)]
    chunks = vllm.begin("0")
    for told in first:
        sampled(sequence, chunks, told)
    vllm.routes.take("0", sequence)
    again, last = vllm.rows(4), vllm.rows(1)
    chunks = vllm.begin("1")
    for told in (again, last):
        sampled(sequence, chunks, told)
    vllm.routes.take("1", sequence)
    kept = np.concatenate([*first, again[3:], last])[:, [0, 2]]
    assert sequence.routes is not None
    assert (sequence.routes == kept).all()


def test_one_without_a_token_has_no_routes():
    vllm, sequence = Recorder(), sequence_of(1, 2)
    vllm.begin("0")
    vllm.routes.take("0", sequence)
    assert sequence.routes is None


@pytest.mark.parametrize("num_told", [2, 4])
def test_planted_routes_of_too_many_or_few_tokens_are_refused(num_told):
    vllm, sequence = Recorder(), sequence_of(1, 2, 3)
    sampled(sequence, vllm.begin("0"), vllm.rows(num_told))
    with pytest.raises(RuntimeError, match=f"the experts of {num_told} tokens of request 'a'"):
        vllm.routes.take("0", sequence)


@on_vllm
@pytest.mark.parametrize("rank", [0, 1])
def test_weights_of_experts_have_the_names_and_parts_of_a_sync(rank):
    experts = nn.Module()
    parallel = SimpleNamespace(ep_rank=rank)
    experts.moe_config = SimpleNamespace(moe_parallel_config=parallel)
    experts.global_num_experts, experts.local_num_experts = 4, 2
    experts.w13_weight = nn.Parameter(torch.zeros(2, 6, 5))
    experts.w2_weight = nn.Parameter(torch.zeros(2, 5, 3))
    mlp, runner = nn.Module(), nn.Module()
    mlp.gate = nn.Linear(5, 4, bias=False)
    mlp.experts, runner.routed_experts, runner.gate = runner, experts, mlp.gate
    model = nn.Module()
    model.mlp = mlp
    weights = VLLMWeights(model, is_tied=False)
    named = dict(weights.named())
    assert named.keys() == {"mlp.gate.weight", "mlp.experts.gate_up_proj", "mlp.experts.down_proj"}
    named["mlp.experts.down_proj"].fill_(1)
    assert experts.w2_weight.eq(1).all(), "a view"
    whole = torch.arange(4.0).reshape(4, 1, 1).expand(4, 6, 5)
    assert weights.shard("mlp.experts.gate_up_proj", whole).unique().tolist() == [
        2 * rank,
        2 * rank + 1,
    ]
    router = torch.zeros(4, 5)
    assert weights.shard("mlp.gate.weight", router) is router
