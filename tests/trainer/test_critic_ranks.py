"""Several processes train a critic as one does, in every layout (`critic_ranks`)."""

from __future__ import annotations

import pytest
import torch

from hone.models.load import load_value_model
from hone.models.settings import ModelConfig
from hone.models.tiny import make_tiny_model
from tests.ranks import parts_of, run_ranks
from tests.trainer.parallel_cases import LAYOUTS

pytestmark = [pytest.mark.slow]


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    shape = {"vocab_size": 48, "hidden_size": 32, "num_layers": 2, "seed": 0}
    make_tiny_model(folder / "tied", **shape)
    make_tiny_model(folder / "untied", tie_word_embeddings=False, **shape)
    critic = load_value_model(ModelConfig(path=str(folder / "tied")), device="cpu", seed=0)
    with torch.no_grad():
        critic.score.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    critic.save_pretrained(folder / "critic")
    return parts_of(run_ranks("tests.trainer.critic_ranks", request.param, folder))


def test_R1_R8_a_critic_in_every_layout_is_that_of_one_process(ranks):
    first = ranks[0]["layouts"]
    assert len(first) == 2 * len(LAYOUTS[len(ranks)])
    for name, outcome in first.items():
        assert outcome["loss"] < 1e-6, "added up in float32"
        for measure in ("values", "gradient", "weights"):
            assert outcome[measure] < (1e-12 if "float64" in name else 1e-5), (name, outcome)
        assert all(found["layouts"][name]["same everywhere"] for found in ranks), name


@pytest.mark.parametrize("model", ["tied", "untied"])
def test_a_fresh_critic_is_the_backbone_with_a_head_of_zeros(ranks, model):
    """Read in parts; float32 masters of what computes in bfloat16."""
    outcome = ranks[0]["fresh"][model]
    assert outcome["values"] == 0
    assert max(outcome["loss"], outcome["gradient"]) < 1e-6, outcome
    assert outcome["weights"] < 1e-3, "rounded: a sum in another order may cross a border"


def test_R10_ranks_without_rows_change_no_critic(ranks):
    outcome = ranks[0]["no_rows"]
    assert all(found["no_rows"]["same everywhere"] for found in ranks)
    assert max(outcome["loss"], outcome["gradient"], outcome["weights"]) < 1e-4
