"""Engines over ranks that share each layer's experts, against one rank alone."""

from __future__ import annotations

import pytest
import torch

from hone.families.model_facts import ModelFacts
from hone.models.tensor_parallel import TensorParallel, shard_model
from tests.models.expert_engine_ranks import (
    ALL_TO_THE_LAST_RANK,
    BUGS,
    FAMILIES,
    NONE_TO_THE_FIRST,
    NUM_EXPERTS,
    make_model,
)
from tests.ranks import Parts, parts_of, run_ranks

TOLERANCE = 1e-5


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> list[Parts]:
    """What each of so many ranks found."""
    module = "tests.models.expert_engine_ranks"
    return parts_of(run_ranks(module, request.param))


def test_R4_R7_ranks_that_share_experts_sample_what_one_does(ranks: list[Parts]) -> None:
    for found in ranks:
        for name, outcome in found["engines"].items():
            assert outcome["same tokens"], name
            assert outcome["same routes"], name
            assert outcome["equal on all ranks"], name
            assert outcome["gap"] < TOLERANCE, name
            passed = outcome["experts"]
            if NONE_TO_THE_FIRST in name:
                assert 0 not in passed
            elif ALL_TO_THE_LAST_RANK in name:
                assert min(passed) >= NUM_EXPERTS - NUM_EXPERTS // len(ranks)
            else:
                assert len(passed) == NUM_EXPERTS


def test_R4_check_catches_planted_bugs(ranks: list[Parts]) -> None:
    if len(ranks) > 2:  # told by two
        return
    for found in ranks:
        planted = found["planted"]
        for family in FAMILIES:
            assert planted.pop(f"{family}, none") < TOLERANCE
        assert len(planted) == 2 * len(BUGS) - 1
        assert min(planted.values()) > 0.01, planted


def test_R3_R14_every_rank_gets_and_proves_its_experts(ranks: list[Parts]) -> None:
    if len(ranks) > 2:
        return
    for found in ranks:
        for family in FAMILIES:
            outcome = found["weights"][family]
            assert "version 1 is incomplete" in outcome["refusal"], family
            assert "mlp.experts.down_proj: values" in outcome["refusal"], family
            assert outcome["delivered"] == "", family
            assert outcome["share of experts"] == 1 / len(ranks), family
            assert outcome["same tokens"], family
            assert outcome["gap"] < TOLERANCE, family


def test_R22_numbers_of_experts_that_ranks_do_not_share_evenly_are_refused() -> None:
    config = make_model("glm4_moe").config
    config.num_attention_heads = config.num_key_value_heads = 48
    config.intermediate_size = 48
    facts = ModelFacts.from_config(config.to_dict())
    assert facts.undivided(8) == []
    assert facts.undivided(16) == [
        "the number of experts = 8",
        "the inner size of shared experts = 24",
    ]
    model = make_model("qwen3_moe")
    model.config.num_experts = 9
    group = TensorParallel(rank=0, size=2, device=torch.device("cpu"))
    with pytest.raises(ValueError, match="2 ranks: the number of experts = 9"):
        shard_model(model, group)
