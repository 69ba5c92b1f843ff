"""Small models and uneven rows that the trainer's tests share."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hone.algorithms.objective import PolicyObjective
from hone.algorithms.settings import AlgorithmConfig
from hone.attention import ATTENTION_NAME
from hone.distributed.mesh import Mesh
from hone.models.vision_decoders import own_class
from hone.trainer.frozen import FrozenScorer
from hone.trainer.scorer import RowScorer
from hone.trainer.settings import TrainerConfig
from hone.trainer.trainer import Trainer
from hone.types import Column, Row

VOCAB = 48


def tiny_model(
    family: str = "qwen3", *, dtype: torch.dtype = torch.float32, seed: int = 0, **fields: Any
) -> PreTrainedModel:
    """Two layers, 32 wide; weights large enough for distributions that are far from uniform."""
    config = AutoConfig.for_model(
        family,
        **{
            "vocab_size": VOCAB,
            "hidden_size": 32,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "intermediate_size": 64,
            "max_position_embeddings": 128,
            "pad_token_id": None,
            "tie_word_embeddings": True,
            "initializer_range": 0.2,
            **fields,
        },
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        kind = own_class(AutoModelForCausalLM, config)
        build = AutoModelForCausalLM.from_config if kind is None else kind._from_config
        model = build(config, dtype=torch.float32, attn_implementation=ATTENTION_NAME)
    return model.to(dtype).eval()


def eager_twin(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights in float64 with transformers' own eager attention, no packing."""
    config = copy.deepcopy(model.config)
    twin = AutoModelForCausalLM.from_config(
        config, dtype=torch.float64, attn_implementation="eager"
    )
    twin.load_state_dict(model.state_dict())
    return twin.double().eval()


def random_rows(
    num_rows: int,
    *,
    seed: int = 0,
    max_completion: int = 24,
    group_size: int = 4,
    shared_prompt: int = 0,
    rows_per_episode: int = 1,
) -> list[Row]:
    """Uneven rows with environment tokens in the middle and all log-probs set. The prompts of a
    group differ, or are all the same, of up to `shared_prompt` tokens."""
    rng = random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    prompts: dict[int, list[int]] = {}
    rows: list[Row] = []
    for index in range(num_rows):
        num_prompt, num_completion = rng.randint(1, 9), rng.randint(1, max_completion)
        group = index // group_size
        if shared_prompt and group not in prompts:
            prompts[group] = rng.choices(range(VOCAB), k=rng.randint(1, shared_prompt))
        prompt = prompts.get(group, [])
        num_prompt = len(prompt) or num_prompt
        mask = [False] * num_prompt + [rng.random() < 0.8 for _ in range(num_completion)]
        mask[rng.randrange(num_prompt, len(mask))] = True
        num_trained = sum(mask)
        old = -2.5 + 0.8 * torch.randn(num_trained, generator=generator)
        rows.append(
            Row(
                id=f"r{index}",
                group_id=f"g{group}",
                episode=f"g{group}/{index % group_size // rows_per_episode}",
                token_ids=prompt + [rng.randrange(VOCAB) for _ in mask[len(prompt) :]],
                loss_mask=mask,
                columns={
                    "logprobs/engine": Column(
                        old + 0.3 * torch.randn(num_trained, generator=generator)
                    ),
                    "logprobs/policy": Column(old),
                    "logprobs/reference": Column(
                        old + 0.3 * torch.randn(num_trained, generator=generator)
                    ),
                    "advantages": Column(
                        torch.randn(1, generator=generator).expand(num_trained).clone()
                    ),
                },
            )
        )
    return rows


def near_policy(rows: list[Row], trainer: Trainer, *, seed: int = 0) -> None:
    """Move the rows' log-probs near the policy's own, so that ratios lie around 1."""
    generator = torch.Generator().manual_seed(seed)
    for row, logprobs in zip(rows, trainer.logprobs(rows), strict=True):
        for who, spread in (("policy", 0.2), ("engine", 0.3), ("reference", 1)):
            noise = spread * torch.randn(logprobs.shape, generator=generator)
            row.columns[f"logprobs/{who}"] = Column(logprobs + noise)


def make_trainer(
    model: PreTrainedModel,
    algorithm: AlgorithmConfig | None = None,
    *,
    trainer_class: type[Trainer] = Trainer,
    mesh: Mesh | None = None,
    replays_routes: bool = False,
    **settings: Any,
) -> Trainer:
    return trainer_class(
        model,
        TrainerConfig.model_validate(settings),
        PolicyObjective(algorithm or AlgorithmConfig(), max_completion_tokens=24),
        total_steps=100,
        on_exhausted=lambda: "",
        replays_routes=replays_routes,
        mesh=mesh,
    )


def make_reference(
    model: PreTrainedModel, *, mesh: Mesh | None = None, **settings: Any
) -> FrozenScorer:
    return FrozenScorer(
        model, TrainerConfig.model_validate(settings), mesh=mesh, on_exhausted=lambda: ""
    )


def logprobs_of(scorer: RowScorer, rows: Sequence[Row]) -> list[torch.Tensor]:
    """[N_i] of each row."""
    return [found["logprobs"] for found in scorer.begin(rows, frozenset({"logprobs"}))()]


def gradients(trainer: Trainer) -> dict[str, torch.Tensor]:
    """The gradients the masters hold, whole and in float64, which are then dropped. Collective."""
    result = {
        name: (g.full_tensor() if isinstance(g, DTensor) else g).double().clone()
        for name, g in trainer.policy.gradients.items()
    }
    trainer.policy.drop_gradient()
    return result
