"""Several processes share frozen models: they say what a whole copy says (`shared_judge_ranks`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from hone.models.load import load_value_model
from hone.models.settings import ModelConfig
from hone.models.tiny import make_tiny_model
from tests.ranks import Parts, parts_of, run_ranks
from tests.rollout.shared_judge_ranks import ASKED, LAYOUTS
from tests.tables import check_rows

pytestmark = [pytest.mark.slow]
SHAPE: dict[str, Any] = {
    "vocab_size": 51,  # leaves the last of several processes less than the others
    "hidden_size": 32,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "intermediate_size": 64,
}


@pytest.fixture(scope="module", params=[2, 4])
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Sequence[Parts]:
    folder = tmp_path_factory.mktemp("models")
    make_tiny_model(folder / "model", tie_word_embeddings=False, **SHAPE)
    judge = load_value_model(ModelConfig(path=str(folder / "model")), device="cpu", seed=0)
    with torch.no_grad():
        judge.score.weight.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    judge.save_pretrained(folder / "judge")
    module = "tests.rollout.shared_judge_ranks"
    return parts_of(run_ranks(module, request.param, folder))


def test_R8_scores_are_those_of_a_whole_copy_whoever_asks(ranks: Sequence[Parts]) -> None:
    """Whether a rank asks much, little or nothing."""
    for found in ranks:
        assert found["scores"].keys() == LAYOUTS[len(ranks)].keys()

        def check(layout: str, found: Parts = found) -> None:
            differences = found["scores"][layout]
            assert differences.keys() == ASKED.keys()
            assert max(differences.values()) < 1e-6, differences

        check_rows(found["scores"].keys(), check)


def test_all_meet_until_nobody_waits(ranks: Sequence[Parts]) -> None:
    expected = [number < len(ranks) - 1 for number in range(len(ranks))]
    assert all(found["meetings"] == expected for found in ranks)


def test_R8_logprobs_of_a_reference_are_those_of_a_whole_copy(ranks: Sequence[Parts]) -> None:
    for found in ranks:
        assert max(found["logprobs"].values()) < 1e-6, found["logprobs"]


def test_a_process_has_the_weights_that_are_planned(ranks: Sequence[Parts]) -> None:
    found = ranks[0]["memory"]
    assert len(found) == 2 * len(LAYOUTS[len(ranks)])
    check_rows(found.keys(), lambda name: _same(*found[name]))


def _same(planned: int, held: int) -> None:
    assert planned == held


def test_asleep_they_leave_the_device_and_awake_they_say_the_same(ranks: Sequence[Parts]) -> None:
    for found in ranks:
        for name in ("reward model", "reference"):
            own = found["sleep"][name]
            assert own["asleep"] == [0, 0], name
            assert own["awake again"] == own["awake"] > 0, name
            assert own["same"], name
