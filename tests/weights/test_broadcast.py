"""Weights to engines apart: every bit from any mesh, every fault named, nobody left waiting."""

from __future__ import annotations

import re
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.weights.broadcast_ranks import CASES

FAULTS = {
    "flipped bit": r"RuntimeError: two: version \d+ did not arrive as it was sent: .*q_proj",
    "lost tensor": r"RuntimeError: two: .* 1 different\n  different: model.embed_tokens.weight",
    "reused too early": r"RuntimeError: one: version \d+ did not arrive as it was sent: .*weight",
    "stale version": r"RuntimeError: (one|two): version (\d+) was announced, and \d+ came",
    "not finite": r"NonFiniteWeightsError: 1 of 2048 values of model.layers.1.mlp.up_proj.weight",
    "killed": "EngineLostError: two is lost: its process is gone",
    "hung": r"EngineLostError: one is lost: no answer to .* one(, two)? had not joined the link",
}
"""What each is called."""


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Any:
    # Sockets have short names.
    folder = tmp_path_factory.mktemp("b")
    return run_ranks("tests.weights.broadcast_ranks", 4, folder)


@pytest.mark.parametrize("mesh", ["stage 3", "tensor 2"])
def test_R3_every_bit_arrives_from_any_mesh_in_any_buckets(found: Any, mesh: str) -> None:
    arrivals = {name: own for name, own in found["arrivals"].items() if name.startswith(mesh)}
    assert len(arrivals) == len(CASES) + 2, "three sizes of buckets for one of the cases"
    for name, (first, second, *_) in arrivals.items():
        for version, own in enumerate((first, second), start=1):
            assert own["wrong"] == [], name
            assert own["versions"] == [[version], [version] * 2]
            assert own["confirmed"] == version
        assert first["link"] == second["link"] == 1


def test_R3_the_embedded_engine_samples_with_what_was_sent(found: Any) -> None:
    tokens = [own[2]["tokens"] for own in found["arrivals"].values() if len(own) == 3]
    assert tokens == [[2] * 4] * (2 * len(CASES))


@pytest.mark.parametrize("base", ["whole", "4-bit"])
def test_R3_engines_get_the_merged_weights_of_adapters(found: Any, base: str) -> None:
    assert found["adapters"][base] == {"wrong": [], "version": 2}


@pytest.mark.parametrize("fault", FAULTS)
def test_R2_R3_a_fault_is_named_everywhere_and_the_next_push_is_good(
    found: Any, fault: str
) -> None:
    own = found["failures"][fault]
    assert own["everywhere"] == [own["told"]] * 2
    assert re.search(FAULTS[fault], own["told"], re.DOTALL), own["told"]
    assert not own["nan"]
    if fault != "lost tensor":  # which one of the engines alone has found, at the very end
        assert "syncing" in own["tokens"]
    assert own["then"] == ""
    assert own["then wrong"] == []
    assert own["then tokens"]


def test_R11_lost_engines_are_named_within_the_deadline(found: Any) -> None:
    """Not when one that hangs comes back, or when pushes may last no longer: both are minutes."""
    assert found["failures"]["killed"]["seconds"] < 120
    assert found["failures"]["hung"]["seconds"] < 120


def test_R2_without_the_proof_a_flipped_bit_stays(found: Any) -> None:
    own = found["failures"]["flipped bit, no proof"]
    assert own["told"] == ""
    assert own["wrong"]


def test_R2_a_trainer_with_other_weights_than_before(found: Any) -> None:
    layout = found["failures"]["layout"]
    assert "exports lm_head.weight where it had model.norm.weight before" in layout["changed"]
    refusal = r"(one|two): it cannot take .* unexpected: model.norm.weight"
    assert re.search(refusal, layout["refused"], re.DOTALL)
    assert layout["then"] == ""
