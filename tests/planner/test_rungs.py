"""What is left to give up where memory ends, and what it costs."""

from __future__ import annotations

from typing import Any

import pytest

from hone.config.load import load_config
from hone.config.plan import Devices, RunPlan, resolve
from hone.config.tree import RLConfig, SFTConfig
from hone.families.model_facts import ModelFacts
from hone.families.shape import public_shape
from hone.hardware import gpu_peaks
from hone.planner.rungs import Rungs


def planned(
    *flags: str, tree: type[RLConfig | SFTConfig] = RLConfig, gpu: str | None = "H200"
) -> RunPlan:
    data = "--data.train=[{path: public/data}]"
    cfg = load_config(tree, None, ["--model.path=Qwen/Qwen3-0.6B", data, *flags])
    shape = public_shape("qwen3-0.6b")
    assert shape is not None
    devices = Devices(kind="cuda", gpu=None if gpu is None else gpu_peaks(gpu))
    return resolve(cfg, ModelFacts.of_shape(shape), devices, world_size=1)


def test_a_rung_tells_what_it_saves_and_costs():
    told = Rungs(planned()).cost({"trainer.recompute": "full"})
    gib, seconds = (float(part.split()[0]) for part in told.partition("prediction ")[2].split(", "))
    assert gib < -1
    assert seconds > 0


@pytest.mark.parametrize(
    "plan", [None, planned(gpu=None)], ids=["no plan", "a GPU that is not known"]
)
def test_what_is_not_known_is_not_predicted(plan: RunPlan | None, monkeypatch: Any):
    monkeypatch.setattr("hone.planner.rungs.installed_gpu", lambda: None)
    assert Rungs(plan).cost({"trainer.recompute": "full"}) == ""


def test_rungs_of_another_start_save_memory_and_have_not_been_taken():
    told = Rungs(planned()).rest()
    keys = ["engine.enable_sleep", "trainer.optimizer.state_dtype", "trainer.offload optimizer"]
    places = [told.index(key) for key in [*keys, "engine.gpu_memory_utilization"]]
    assert places == sorted(places), "the cheapest first"
    assert "recompute" not in told
    assert "max_tokens" not in told
    assert "zero_stage" not in told, "of one process"
    assert all(float(part.split()[0]) < 0 for part in told.split("prediction ")[1:])


def test_nothing_is_proposed_that_is_not_served():
    muon = planned("--trainer.optimizer.name=muon")
    assert "trainer.offload" not in Rungs(muon).rest()
    assert "engine" not in Rungs(planned(tree=SFTConfig)).rest()
