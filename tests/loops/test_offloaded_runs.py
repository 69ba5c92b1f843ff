"""Whole runs whose weights lie on the host: the same samples, the same exported model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.loops.conftest import MakeConfig
from tests.loops.test_processes import ALL_SAMPLES, rows

from hone.config.tree import SFTConfig
from hone.data.arithmetic import generate
from hone.loops import reinforce, supervised
from hone.loops.step import Outcome

AWAY = {"offload_optimizer": True, "offload_gradients": True}


def check_same_export(one: Path, other: Path) -> None:
    exported = [load_file(folder / "model" / "model.safetensors") for folder in (one, other)]
    assert exported[0].keys() == exported[1].keys()
    assert all(torch.equal(exported[1][name], tensor) for name, tensor in exported[0].items())


def test_adapters_beside_weights_on_the_host(make_config: MakeConfig, tmp_path: Path) -> None:
    for name, knobs in (("plain", {}), ("away", AWAY)):
        reinforce.run(
            make_config(
                run={"dir": tmp_path / name, "device": "cpu", "steps": 2},
                model={"path": make_config().model.path, "lora": {"rank": 4, "alpha": 8.0}},
                trainer={"optimizer": {"lr": 3e-2}, **knobs},
                algorithm={"kl": {"coef": 0.01}},
                log=ALL_SAMPLES,
            )
        )
    plain, away = (rows(tmp_path / name) for name in ("plain", "away"))
    for key in ("train/loss", "train/grad_norm", "reward/mean", "off_policy/mismatch_kl"):
        assert [row[key] for row in away] == [row[key] for row in plain], key
    check_same_export(tmp_path / "plain", tmp_path / "away")


def test_supervised_runs_go_on_and_export_weights_on_the_host(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_config()
    sums = generate(20, seed=0, low=0, high=9)
    examples = [{"prompt": row["prompt"], "completion": row["answer"]} for row in sums]
    (tmp_path / "sft.jsonl").write_text("\n".join(map(json.dumps, examples)))

    def run(name: str, steps: int, knobs: dict[str, Any]) -> Outcome:
        return supervised.run(
            SFTConfig.model_validate(
                {
                    "run": {"dir": tmp_path / name, "steps": steps, "device": "cpu"},
                    "model": {"path": base.model.path},
                    "data": {"train": [{"path": str(tmp_path / "sft.jsonl")}], "chat": "never"},
                    "trainer": {"optimizer": {"lr": 1e-2}, **knobs},
                }
            )
        )

    run("plain", 3, {})
    run("away", 2, AWAY)
    run("away", 3, AWAY)
    check_same_export(tmp_path / "plain", tmp_path / "away")

    config = (tmp_path / "away" / "config.yaml").read_text()
    monkeypatch.delattr(supervised, "load_for_training")
    assert run("away", 3, {}) == Outcome(steps=3), "nothing is left to train"
    assert (tmp_path / "away" / "config.yaml").read_text() == config
