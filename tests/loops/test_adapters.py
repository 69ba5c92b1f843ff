"""Whole runs that train adapters: what is sampled, resumed, exported; and in several processes."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.loops.conftest import MakeConfig, built_run
from tests.loops.test_processes import ALL_SAMPLES, assert_same_run, run_hone
from tests.tiny_runs import lines, tiny_config, write_inputs
from torch import Tensor

from hone.families.spec import EXPERT_MATRICES
from hone.loops import reinforce
from hone.models.manifest import export_weights
from hone.models.nf4 import dequantise, quantise

LORA: dict[str, Any] = {"rank": 4, "alpha": 8.0}


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


EXPERTS: dict[str, Any] = {
    "family": "qwen3_moe",
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [0],
}
ON_EXPERTS = LORA | {"target_modules": ["q_proj", *EXPERT_MATRICES]}


def unmerged(merged: dict[str, Tensor], adapter: dict[str, Tensor], name: str) -> Tensor:
    """A matrix of an exported expert without its adapter, in float64. `name` is the one in files,
    in which each expert is by itself."""
    layer, _, rest = name.partition(".experts.")
    expert, matrix, _ = rest.split(".")
    is_down = matrix == "down_proj"
    place = f"base_model.model.{layer}.experts{'' if is_down else '.base_layer'}"
    a, b = (adapter[f"{place}.{leaf}.weight"].double() for leaf in ("lora_A", "lora_B"))
    number, rank = EXPERTS["num_experts"], LORA["rank"]
    a = a.view(number, rank, -1)[int(expert)]
    b = b.view(len(b), rank, number)[:, :, int(expert)]
    if not is_down:
        b = b.chunk(2)[matrix == "up_proj"]
    return merged[name].double() - LORA["alpha"] / rank * b @ a


@pytest.mark.parametrize(
    ("weight_dtype", "four_bits"), [("auto", False), ("int8", False), ("auto", True)]
)
def test_adapters_of_experts_learn_and_the_engine_samples_what_is_exported(
    tmp_path: Path, weight_dtype: str, four_bits: bool
) -> None:
    """Every sync proves that the engine's weights are the trainer's merged ones, and the launch
    gate compares what both compute. The reference of the KL term is the model without adapters."""
    write_inputs(tmp_path / "inputs", **EXPERTS)
    make = partial(tiny_config, tmp_path / "inputs", tmp_path / "run")
    engine, lora = {"weight_dtype": weight_dtype}, ON_EXPERTS | {"load_in_4bit": four_bits}
    for steps in (2, 3):
        cfg = config(make, tmp_path / "run", lora, run={"steps": steps}, engine=engine)
        reinforce.run(cfg)
    found = lines(tmp_path / "run" / "metrics.jsonl")
    assert [row["step"] for row in found] == [1, 2, 3]
    limit = 1e-9 if weight_dtype == "auto" else 1e-2
    assert all(row["off_policy/mismatch_kl"] < limit for row in found)
    assert found[0]["policy/ref_kl"] < 1e-9 < found[2]["policy/ref_kl"]
    base = load_file(Path(make().model.path) / "model.safetensors")
    merged = load_file(tmp_path / "run" / "model" / "model.safetensors")
    adapter = load_file(tmp_path / "run" / "adapter" / "adapter_model.safetensors")
    assert merged.keys() == base.keys()
    of_experts = [name for name in base if ".mlp.experts." in name]
    assert len(of_experts) == 3 * EXPERTS["num_experts"]
    for name in of_experts:
        assert not torch.equal(merged[name], base[name]), f"{name} has not been trained"
        without, whole = unmerged(merged, adapter, name), base[name]
        if four_bits:
            whole = dequantise(*quantise(whole), tuple(whole.shape), torch.float64)
        torch.testing.assert_close(without, whole.double(), rtol=1e-5, atol=1e-6)


def test_an_engine_has_the_merged_experts_after_each_of_three_updates(tmp_path: Path) -> None:
    """Those of a plain loop over experts in float64, rounded once."""
    write_inputs(tmp_path / "inputs", **EXPERTS)
    make = partial(tiny_config, tmp_path / "inputs", tmp_path / "run")
    with built_run(config(make, tmp_path / "run", ON_EXPERTS)) as run:
        run.sampling.weights.push(0)
        before: dict[str, Tensor] = {}
        for step in (1, 2, 3):
            groups = run.collector.collect(step)
            run.trainer.update(run.models.prepare(run.algorithm, groups, version=step - 1)[0])
            run.sampling.weights.push(step)
            held = {name: weight.clone() for name, weight in run.sampling.engine.named_weights()}
            own = dict(export_weights(run.trainer.policy.model))
            for name in EXPERT_MATRICES:
                path = f"model.layers.1.mlp.{name}"
                weight, a, b = (own[f"{path}.{leaf}"] for leaf in ("weight", "lora_A", "lora_B"))
                expected = [
                    weight[i].double()
                    + LORA["alpha"] / LORA["rank"] * b[i].double() @ a[i].double()
                    for i in range(EXPERTS["num_experts"])
                ]
                torch.testing.assert_close(held[path].double(), torch.stack(expected))
                assert not torch.equal(held[path], before.get(path, weight))
            before = held


@pytest.mark.slow
@pytest.mark.parametrize(
    ("axis", "lora", "model"),
    [
        ("zero_stage 3", LORA, {}),
        ("tensor_parallel_size 2", LORA, {}),
        ("pipeline_parallel_size 2", LORA, {}),
        ("expert_parallel_size 2", ON_EXPERTS, EXPERTS),
    ],
)
def test_adapters_of_two_processes_are_those_of_one(
    tmp_path: Path, axis: str, lora: dict[str, Any], model: dict[str, Any]
) -> None:
    write_inputs(tmp_path / "inputs", num_kv_heads=2, **model)
    make_config = partial(tiny_config, tmp_path / "inputs", tmp_path / "run")
    one = config(make_config, tmp_path / "one", lora)
    reinforce.run(one)
    two = config(make_config, tmp_path / "two", lora)
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
