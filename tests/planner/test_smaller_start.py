"""Settings with which a run that has no memory left can be started again."""

from __future__ import annotations

import pytest

from hone.config.load import load_config
from hone.config.plan import Devices, RunPlan, resolve
from hone.config.tree import RLConfig, SFTConfig
from hone.families.model_facts import ModelFacts
from hone.families.shape import public_shape
from hone.hardware import gpu_peaks
from hone.planner.smaller_start import smaller_start


def planned(
    *flags: str, tree: type[RLConfig | SFTConfig] = RLConfig, gpu: str | None = "H200"
) -> RunPlan:
    data = "--data.train=[{path: public/data}]"
    cfg = load_config(tree, None, ["--model.path=Qwen/Qwen3-0.6B", data, *flags])
    shape = public_shape("qwen3-0.6b")
    assert shape is not None
    devices = Devices(kind="cuda", gpu=None if gpu is None else gpu_peaks(gpu))
    return resolve(cfg, ModelFacts.of_shape(shape), devices, world_size=1)


def test_where_the_gpu_is_not_known_no_bytes_are_predicted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("hone.planner.smaller_start.installed_gpu", lambda: None)
    text = smaller_start(planned(gpu=None))
    assert "trainer.offload optimizer" in text
    assert "prediction" not in text


def test_changes_save_memory_and_are_none_that_a_step_makes_itself():
    text = smaller_start(planned())
    keys = ["engine.enable_sleep", "trainer.optimizer.state_dtype", "trainer.offload optimizer"]
    places = [text.index(key) for key in [*keys, "engine.gpu_memory_utilization"]]
    assert places == sorted(places), "the cheapest first"
    assert "recompute" not in text
    assert "max_tokens" not in text
    assert "zero_stage" not in text, "of one process"
    assert all(float(part.split()[0]) < 0 for part in text.split("prediction ")[1:])


def test_nothing_is_proposed_that_is_not_served():
    muon = planned("--trainer.optimizer.name=muon")
    assert "trainer.offload" not in smaller_start(muon)
    assert "engine" not in smaller_start(planned(tree=SFTConfig))
