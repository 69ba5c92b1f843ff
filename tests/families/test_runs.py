"""A whole run of every family: its launch gate, sampling, training, adapters, files, memory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from hone.families.registry import SPECS
from hone.loops import reinforce
from tests.models.families import FAMILY_FIELDS, WHOLE
from tests.planner.memory_cases import KINDS, held, plan
from tests.tables import table
from tests.tiny_runs import tiny_config, write_inputs

BUFFERS = ("e_score_correction_bias",)
"""Of files, that RL leaves as they are."""
WITH_EXPERTS = [name for name, spec in SPECS.items() if spec.experts]


@pytest.mark.parametrize("family", [name for name in FAMILY_FIELDS if name not in WHOLE])
def test_a_run_trains_what_it_samples_and_is_resumed_and_exported(
    family: str, tmp_path: Path
) -> None:
    write_inputs(tmp_path, family=family, **FAMILY_FIELDS[family])
    for steps, lora in ((1, {}), (2, {}), (1, {"rank": 2})):
        folder = tmp_path / f"run {lora}"
        cfg = tiny_config(
            tmp_path,
            folder,
            run={"dir": folder, "device": "cpu", "steps": steps},
            model={"path": str(tmp_path / "model"), "lora": lora},
        )
        reinforce.run(cfg)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [row["step"] for row in rows if "train/loss" in row] == [*range(1, steps + 1)]
        assert rows[-1]["off_policy/mismatch_kl"] < 1e-9
        assert rows[-1]["train/grad_norm"] > 0
        source, trained = (
            load_file(path / "model.safetensors") for path in (tmp_path / "model", folder / "model")
        )
        assert trained.keys() == source.keys()
        unchanged = {name for name in source if torch.equal(source[name], trained[name])}
        unchanged = {name for name in unchanged if not name.endswith(BUFFERS)}
        adapted = tuple(f"{name}.weight" for name in SPECS[family].lora_targets)
        unchanged = {name for name in unchanged if not (lora and ".mlp.experts." in name)}
        assert all(lora and not name.endswith(adapted) for name in unchanged), unchanged
        loaded: Any = AutoModelForCausalLM.from_pretrained(folder / "model")
        assert type(loaded.config) is type(AutoConfig.for_model(family))


@pytest.mark.parametrize("family", WITH_EXPERTS)
def test_routes_of_samples_are_replayed_also_of_a_run_that_goes_on(
    family: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With more prompts than a step takes, whose samples wait in the checkpoint."""
    write_inputs(tmp_path, family=family, **FAMILY_FIELDS[family])
    found: list[dict[str, float]] = []
    for name, all_steps in (("whole", (3,)), ("in parts", (1, 3))):
        folder = tmp_path / name
        for steps in all_steps:
            cfg = tiny_config(
                tmp_path,
                folder,
                run={"dir": folder, "device": "cpu", "steps": steps},
                algorithm={"routing_replay": True},
                rollout={"oversample_prompts": 1},
            )
            with caplog.at_level("INFO"):
                reinforce.run(cfg)
        rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        found.append(rows[-1])
    for key in ("train/loss", "train/grad_norm", "reward/mean"):
        assert found[0][key] == pytest.approx(found[1][key], rel=1e-5), key
    assert "no loss balances the load of experts" in caplog.text


@table("family", FAMILY_FIELDS)
def test_a_trainer_holds_just_what_is_counted(family: str) -> None:
    case = {"model": {"family": family, **FAMILY_FIELDS[family]}}
    memory = plan(case)
    assert {kind: getattr(memory, kind) for kind in KINDS} == held(case)
