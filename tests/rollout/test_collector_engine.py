"""R19 with the embedded engine and weights that change: staleness 0 is the synchronous run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hone.engine.engine import EmbeddedEngine
from hone.engine.settings import EngineConfig
from hone.models.load import load_model
from hone.models.manifest import build_manifest
from hone.models.settings import ModelConfig
from hone.models.tiny import make_tiny_model
from hone.rollout.collector import Collector
from hone.rollout.counts import RolloutCounts
from hone.rollout.settings import PipelineConfig, RolloutConfig
from hone.rollout.state import group_to_dict
from hone.types import Prompt
from tests.rollout.fakes import FakeScorer

OPTIONS = {
    "prompts_per_step": 3,
    "n_samples_per_prompt": 2,
    "max_completion_tokens": 12,
    "dynamic_sampling": True,
    "truncated_samples": "mask",
    "mask_off_policy_tokens": True,
}
COUNTED = [
    f.name for f in fields(RolloutCounts) if not f.name.endswith("_s") and f.name != "staleness"
]


class Prompts:
    def __init__(self) -> None:
        self.position = 0

    def take(self, num: int, *, step: int) -> list[Prompt]:
        start, self.position = self.position, self.position + num
        return [
            Prompt(id=f"data:{i}", token_ids=tuple(range(3 + i % 30, 6 + i % 37)), text="")
            for i in range(start, start + num)
        ]


@pytest.fixture(scope="module")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> Callable[[], PreTrainedModel]:
    folder = make_tiny_model(
        tmp_path_factory.mktemp("tiny"),
        num_layers=2,
        hidden_size=32,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=64,
        initializer_range=0.25,
        seed=5,
    )
    return lambda: load_model(ModelConfig(path=str(Path(folder))), device="cpu", seed=0)


def set_weights(engine: EmbeddedEngine, version: int) -> None:
    """The weights of a version: a function of it alone."""
    engine.begin_sync()
    with torch.no_grad():
        for index, parameter in enumerate(engine.model.parameters()):
            generator = torch.Generator().manual_seed(1000 * version + index)
            parameter.copy_(0.25 * torch.randn(parameter.shape, generator=generator))
    engine.finish_sync(build_manifest(engine.named_weights(), version))


def parts(model: PreTrainedModel) -> dict[str, Any]:
    cfg = EngineConfig(kv_cache_gib=0.001, max_num_seqs=4, max_num_batched_tokens=64)
    return {
        "engine": EmbeddedEngine(
            model, cfg, eos_token_ids=tuple(range(40, 60)), max_model_len=64, block_size=4
        ),
        "scorer": FakeScorer(delay=2),
        "prompts": Prompts(),
        "decode": lambda ids: " ".join(map(str, ids)),
        "seed": 7,
    }


def make_ahead(model: PreTrainedModel, **pipeline: Any) -> Collector:
    return Collector(
        rollout_cfg=RolloutConfig.model_validate(OPTIONS),
        pipeline_cfg=PipelineConfig.model_validate({"max_staleness": 1} | pipeline),
        **parts(model),
    )


def batches(ahead: Collector, versions: range, num_polls: int) -> Iterator[Any]:
    for version in versions:
        yield [group_to_dict(group) for group in ahead.collect(version + 1)]
        for _ in range(num_polls):
            ahead._step()
        with ahead.pause(version + 1):
            set_weights(ahead.engine, version + 1)  # type: ignore[arg-type]


@pytest.mark.parametrize("in_flight", ["pause", "abort"])
def test_R17_a_collector_goes_on_bit_for_bit(
    make_model: Callable[[], PreTrainedModel], in_flight: str
) -> None:
    pipeline = {"max_staleness": 2, "in_flight": in_flight}
    first, second = (make_ahead(make_model(), **pipeline) for _ in range(2))
    set_weights(first.engine, 0)  # type: ignore[arg-type]
    begun = list(batches(first, range(3), num_polls=2))
    with first.idle():
        state = json.loads(json.dumps(first.state_dict()))
    assert any(r["resumed"] for entry in state["groups"] for r in entry["requests"].values())
    second.load_state_dict(state)
    second.prompts.position = first.prompts.position
    set_weights(second.engine, 3)  # type: ignore[arg-type]
    expected = list(batches(first, range(3, 6), num_polls=2))
    actual = list(batches(second, range(3, 6), num_polls=2))
    assert actual == expected
    versions = [
        {v for s in g["samples"] for v in s["weight_versions"]} for step in begun for g in step
    ]
    assert max(map(len, versions)) > 1, "weights must change within groups"
