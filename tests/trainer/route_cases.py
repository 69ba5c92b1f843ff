"""Small models with experts, what an engine samples with them, and the experts that tokens pass."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hone.algorithms.grpo import GRPO
from hone.algorithms.settings import AlgorithmConfig
from hone.attention import PackedContext
from hone.engine.engine import EmbeddedEngine
from hone.engine.settings import EngineConfig
from hone.families.registry import spec_of
from hone.models.decoder import alias_module, hidden_states
from hone.rollout.episodes import Episodes
from hone.types import (
    Column,
    Completion,
    Group,
    Prompt,
    Request,
    Reward,
    Row,
    SamplingParams,
)
from tests.trainer.examples import VOCAB, tiny_model

FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "mlp_only_layers": [0],
        "num_hidden_layers": 3,
    },
    "glm4_moe": {
        "moe_intermediate_size": 24,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "attention_bias": True,
        "use_qk_norm": True,
        "routed_scaling_factor": 1.5,
        "num_hidden_layers": 3,
    },
    "qwen3_5_moe_text": {
        "moe_intermediate_size": 24,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "shared_expert_intermediate_size": 16,
        "num_hidden_layers": 2,
        "layer_types": ["full_attention", "linear_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
    },
}
PROMPTS = [[7, 3, 11, 5, 2, 9, 1, 4, 6], [7, 3, 11, 5, 2, 9, 1, 4, 8, 20], [40, 2]]
"""Two share blocks of four tokens."""


def model_of(family: str) -> PreTrainedModel:
    return tiny_model(family, **FAMILIES[family])


def engine_of(model: PreTrainedModel, *, max_model_len: int = 64, **fields: Any) -> EmbeddedEngine:
    """Beside a trainer of `model`, whose layers are its own."""
    settings = EngineConfig.model_validate({"max_num_seqs": 8, **fields})
    return EmbeddedEngine(
        alias_module(model),
        settings,
        eos_token_ids=(),
        max_model_len=max_model_len,
        block_size=4,
        records_routes=True,
    )


def request(number: int, *, max_tokens: int = 8, **fields: Any) -> Request:
    prompt = PROMPTS[number % len(PROMPTS)]
    sampling = SamplingParams(max_tokens=max_tokens, seed=number)
    return Request(id=f"g/{number}", prompt_ids=tuple(prompt), sampling=sampling, **fields)


def complete(engine: EmbeddedEngine, requests: Sequence[Request]) -> list[Completion]:
    engine.submit(requests)
    found: dict[str, Completion] = {}
    while engine.has_unfinished:
        found |= {done.request_id: done for done in engine.step()}
    return [found[one.id] for one in requests]


def ids_of(one: Request, done: Completion) -> list[int]:
    return [*one.prompt_ids, *done.token_ids]


def rows_of(requests: Sequence[Request], completions: Sequence[Completion]) -> list[Row]:
    """As a run makes them of what an engine has sampled."""
    episodes = Episodes(decode=str)
    groups: list[Group] = []
    for one, done in zip(requests, completions, strict=True):
        prompt = Prompt(id=one.id, token_ids=one.prompt_ids, text="")
        sample = episodes.begin(prompt, one.id, number=0)
        episodes.take(sample, done, max_tokens=64)
        sample.reward = Reward(total=1.0)
        groups.append(Group(id=one.id, prompt=prompt, samples=[sample]))
    algorithm = GRPO(AlgorithmConfig(advantage="reinforce_pp"), max_completion_tokens=64)
    rows = algorithm.rows(groups, version=0)
    draw = torch.Generator().manual_seed(3)
    for row in rows:
        row.columns["advantages"] = Column(torch.randn(row.num_trained, generator=draw))
        row.columns["logprobs/policy"] = row.columns["logprobs/engine"]
    return rows


@contextmanager
def passed(model: PreTrainedModel) -> Generator[list[Tensor]]:
    """The experts [T, K] that layers are given, in the order in which they are computed."""
    found: list[Tensor] = []
    layers: Any = model.base_model.layers
    handles = [
        layer.mlp.experts.register_forward_pre_hook(lambda _, inputs: found.append(inputs[1]))
        for layer in layers
        if hasattr(layer.mlp, "experts")
    ]
    yield found
    for handle in handles:
        handle.remove()


def chosen(model: PreTrainedModel, token_ids: Sequence[int]) -> Tensor:
    """The experts [T, L, K] that routers choose for a sequence alone."""
    ids = torch.tensor(token_ids)
    context = PackedContext.from_lengths([len(ids)])
    with passed(model) as found, torch.no_grad():
        hidden_states(model, ids, torch.arange(len(ids)), context)
    return torch.stack(found, 1)


@torch.no_grad()
def disturb(model: PreTrainedModel, *, seed: int = 0) -> None:
    """Move the routers, so that other experts are chosen."""
    draw = torch.Generator().manual_seed(seed)
    for index in spec_of(model.config.model_type).expert_layers(model.config.to_dict()):
        layers: Any = model.base_model.layers
        weight = layers[index].mlp.gate.weight
        weight += 0.15 * torch.randn(weight.shape, generator=draw)


assert max(map(max, PROMPTS)) < VOCAB
