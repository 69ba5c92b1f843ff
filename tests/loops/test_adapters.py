"""Whole runs that train adapters: what is sampled, resumed, exported; and in several processes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.loops.conftest import MakeConfig
from tests.loops.test_processes import ALL_SAMPLES, assert_same_run, run_hone
from tests.tiny_runs import lines, tiny_config, write_inputs

from hone.loops import reinforce

LORA = {"rank": 4, "alpha": 8.0}


def config(make: MakeConfig, folder: Path, lora: dict[str, Any], **sections: Any) -> Any:
    model = make().model.path
    return make(
        run={"dir": folder, "device": "cpu", **sections.pop("run", {})},
        model={"path": model, "lora": lora},
        trainer={"optimizer": {"lr": 3e-2}, "logits_chunk_tokens": 64},
        algorithm={"kl": {"coef": 0.01}},
        log=ALL_SAMPLES,
        **sections,
    )


@pytest.mark.parametrize("four_bits", [False, True])
def test_adapters_learn_and_the_engine_samples_what_is_exported(
    make_config: MakeConfig, tmp_path: Path, four_bits: bool
) -> None:
    """The launch gate compares the adapted trainer with the merged engine in each launch."""
    lora = LORA | {"load_in_4bit": four_bits}
    reinforce.run(config(make_config, tmp_path / "run", lora, run={"steps": 2}))
    reinforce.run(config(make_config, tmp_path / "run", lora, run={"steps": 3}))
    found = lines(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in found] == [1, 2, 3]
    assert all(row["off_policy/parity/kl"] < 1e-9 for row in (found[0], found[2]))
    assert all(row["off_policy/mismatch_kl"] < 1e-9 for row in found)
    base = load_file(Path(make_config().model.path) / "model.safetensors")
    merged = load_file(tmp_path / "run" / "model" / "model.safetensors")
    assert merged.keys() == base.keys()
    held = sum(tensor.nbytes for tensor in merged.values()) / 2**30
    assert all(row["mem/engine_weights_gib"] == held for row in found), "beside the trainer's"
    changed = {name for name in base if not torch.equal(base[name], merged[name])}
    assert changed
    assert all(name.endswith("_proj.weight") for name in changed)
    document = json.loads((tmp_path / "run" / "adapter" / "adapter_config.json").read_text())
    assert document["r"] == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "axis", ["zero_stage 3", "tensor_parallel_size 2", "pipeline_parallel_size 2"]
)
def test_adapters_of_two_processes_are_those_of_one(tmp_path: Path, axis: str) -> None:
    write_inputs(tmp_path / "inputs", num_kv_heads=2)
    make_config = partial(tiny_config, tmp_path / "inputs", tmp_path / "run")
    one = config(make_config, tmp_path / "one", LORA)
    reinforce.run(one)
    two = config(make_config, tmp_path / "two", LORA)
    key, value = axis.split()
    run_hone("rl", two, tmp_path, "--nproc", "2", f"--trainer.parallel.{key}", value)
    assert_same_run(one.run.dir, two.run.dir)
    adapters = [
        load_file(cfg.run.dir / "adapter" / "adapter_model.safetensors") for cfg in (one, two)
    ]
    assert adapters[0].keys() == adapters[1].keys()
    for name, tensor in adapters[0].items():
        # Three moves of 0.03: sums over ranks are rounded otherwise.
        torch.testing.assert_close(adapters[1][name], tensor, rtol=0, atol=5e-5)
