"""Tensors of a checkpoint that its model does not have are in every export, with the same bytes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.models.families import family_folder
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5ForConditionalGeneration,
)

from hone.checkpoint.atomic import CheckpointError
from hone.checkpoint.export import export_hf, rehearse_export
from hone.distributed.mesh import Mesh
from hone.models.deferred import Weight, take_source
from hone.models.load import blank_model, load_deferred, load_model, load_value_model
from hone.models.manifest import build_manifest, export_weights
from hone.models.settings import ModelConfig
from hone.models.tiny import make_tiny_model
from hone.models.tiny_vision import make_tiny_vision_model
from hone.models.weight_files import unread_of

ALONE = Mesh.alone("cpu")
WEIGHTS = "model.safetensors"


def mtp(width: int, *, prefix: str = "mtp", num_experts: int = 0) -> dict[str, Tensor]:
    """A head that predicts further tokens, named as published ones, in bfloat16."""
    sizes: dict[str, tuple[int, ...]] = {
        "fc.weight": (width, 2 * width),
        "norm.weight": (width,),
        "pre_fc_norm_embedding.weight": (width,),
        "pre_fc_norm_hidden.weight": (width,),
        "layers.0.self_attn.q_proj.weight": (width, width),
    }
    for expert in range(num_experts):
        for name in ("gate_proj", "up_proj", "down_proj"):
            sizes[f"layers.0.mlp.experts.{expert}.{name}.weight"] = (width, width)
    draw = torch.Generator().manual_seed(4)
    return {
        f"{prefix}.{name}": torch.randn(size, generator=draw).bfloat16()
        for name, size in sizes.items()
    }


def add(folder: Path, tensors: dict[str, Tensor]) -> Path:
    save_file(load_file(folder / WEIGHTS) | tensors, folder / WEIGHTS, {"format": "pt"})
    return folder


def whole(folder: Path) -> Path:
    return add(make_tiny_vision_model(folder, family="qwen3_5", num_layers=2), mtp(64))


def text(folder: Path) -> Path:
    make_tiny_model(folder, family="qwen3_5_text", num_layers=2, hidden_size=64)
    return add(folder, mtp(64))


def text_of_a_whole(folder: Path) -> Path:
    """The files of a whole model with the configuration of its decoder alone."""
    whole(folder)
    config = json.loads((folder / "config.json").read_text())
    config = {**config["text_config"], "architectures": ["Qwen3_5ForCausalLM"]}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def another_layer(folder: Path) -> Path:
    """As published models of GLM-4.5, whose head is a layer behind the last one."""
    shutil.copytree(family_folder("glm4_moe"), folder)
    return add(folder, mtp(32, prefix="model.layers.92", num_experts=3))


def mixture(folder: Path) -> Path:
    """With experts each by itself, as transformers writes them."""
    make_tiny_vision_model(folder, family="qwen3_5_moe", num_layers=2)
    return add(folder, mtp(64, num_experts=3))


def stacked(folder: Path) -> Path:
    """As the published models: experts of the decoder in two tensors, those of the head not."""
    mixture(folder)
    state = AutoModelForImageTextToText.from_pretrained(folder).state_dict()
    del state["lm_head.weight"]  # tied
    save_file(state | mtp(64, num_experts=3), folder / WEIGHTS, {"format": "pt"})
    return folder


def stacked_text(folder: Path) -> Path:
    make_tiny_model(folder, family="qwen3_5_moe_text", num_layers=2, hidden_size=64)
    state = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    del state["lm_head.weight"]
    save_file(state | mtp(64, num_experts=3), folder / WEIGHTS, {"format": "pt"})
    return folder


SOURCES: dict[str, tuple[Callable[[Path], Path], tuple[str, ...]]] = {
    "whole": (whole, ("mtp.",)),
    "text": (text, ("mtp.",)),
    "text of a whole": (text_of_a_whole, ("mtp.", "model.visual.")),
    "another layer": (another_layer, ("model.layers.92.",)),
    "mixture": (mixture, ("mtp.",)),
    "stacked": (stacked, ("mtp.",)),
    "stacked text": (stacked_text, ("mtp.",)),
}
"""Checkpoints, and prefixes of the tensors that are not read."""


@cache
def source(name: str) -> Path:
    make, _ = SOURCES[name]
    return make(Path(mkdtemp(prefix="hone-")) / "model")


def config_of(folder: Path) -> ModelConfig:
    return ModelConfig(path=str(folder))


def given(model: PreTrainedModel) -> dict[str, Tensor]:
    """The tensors of a model that may be deferred."""
    weights, found = take_source(model), dict[str, Tensor]()
    if weights is None:
        return dict(export_weights(model))

    def take(weight: Weight) -> None:
        found[weight.name] = weight.whole()

    weights.give(take, device=torch.device("cpu"))
    return {name: found[name] for name in model.state_dict() if name in found}


def export(folder: Path, out: Path, load: Any = load_model, **options: Any) -> Path:
    model: PreTrainedModel = load(config_of(folder), device="cpu", seed=0)
    args = model, AutoTokenizer.from_pretrained(folder), out, torch.float32
    num_bytes = rehearse_export(*args, mesh=ALONE)
    assert not out.exists()
    export_hf(*args, given(model).items(), mesh=ALONE, **options)
    assert num_bytes == sum(x.nbytes for x in tensors_of(out).values())
    return out


def tensors_of(folder: Path) -> dict[str, Tensor]:
    files = [load_file(file) for file in sorted(folder.glob("*.safetensors"))]
    return {name: tensor for held in files for name, tensor in held.items()}


def assert_same(found: Tensor, expected: Tensor, name: str) -> None:
    assert found.dtype == expected.dtype, name
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8)), name


@pytest.mark.parametrize("load", [load_model, load_deferred])
@pytest.mark.parametrize("name", SOURCES)
def test_an_export_has_the_tensors_of_the_files(name: str, load: Any, tmp_path: Path) -> None:
    expected = load_file(source(name) / WEIGHTS)
    found = tensors_of(export(source(name), tmp_path / "out", load))
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        assert_same(tensor, expected[key], key)
    again = tensors_of(export(tmp_path / "out", tmp_path / "again", load))
    assert again.keys() == found.keys()


@pytest.mark.parametrize("name", SOURCES)
def test_they_are_no_part_of_the_model(name: str) -> None:
    _, prefixes = SOURCES[name]
    model = load_model(config_of(source(name)), device="cpu")
    assert unread_of(model)
    assert all(key.startswith(prefixes) for key in unread_of(model).entries)
    own = build_manifest(export_weights(model), version=1).tensors
    assert not any(key.startswith(prefixes) for key in own)
    blank = blank_model(config_of(source(name)), device="cpu")
    assert own.keys() == build_manifest(export_weights(blank), version=1).tensors.keys()


@pytest.mark.parametrize("file_bytes", [1, 20_000])
def test_several_files_have_them(file_bytes: int, tmp_path: Path) -> None:
    out = export(source("whole"), tmp_path / "out", file_bytes=file_bytes)
    index = json.loads((out / "model.safetensors.index.json").read_text())["weight_map"]
    expected = load_file(source("whole") / WEIGHTS)
    assert index.keys() == expected.keys()
    for name, file in index.items():
        assert_same(load_file(out / file)[name], expected[name], name)


def test_a_format_is_that_of_the_weights_alone(tmp_path: Path) -> None:
    """Where the exported model is to be in another format."""
    model = load_model(config_of(source("text")), device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(source("text"))
    out = tmp_path / "out"
    export_hf(model, tokenizer, out, torch.bfloat16, export_weights(model), mesh=ALONE)
    expected = load_file(source("text") / WEIGHTS)
    for name, tensor in tensors_of(out).items():
        assert tensor.dtype == torch.bfloat16
        if name.startswith("mtp."):
            assert_same(tensor, expected[name], name)


@torch.no_grad()
def test_transformers_loads_both_ways_what_was_trained(tmp_path: Path) -> None:
    model: Any = load_model(config_of(source("whole")), device="cpu")
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.02)
    tokenizer = AutoTokenizer.from_pretrained(source("whole"))
    out, before = tmp_path / "out", load_file(source("whole") / WEIGHTS)
    export_hf(model, tokenizer, out, torch.float32, export_weights(model), mesh=ALONE)
    for name, tensor in tensors_of(out).items():
        is_untrained = name.startswith(("mtp.", "model.visual."))
        assert torch.equal(tensor, before[name]) == is_untrained, name
    ids = torch.tensor([[5, 9, 33, 41, 7, 2, 60, 11]])
    logits: list[Tensor] = []
    for kind in (Qwen3_5ForConditionalGeneration, Qwen3_5ForCausalLM):
        loaded, info = kind.from_pretrained(out, output_loading_info=True)
        assert not any(info.values()), info
        loaded.set_attn_implementation("eager")
        logits.append(loaded(input_ids=ids).logits)
    assert torch.equal(*logits)
    model.set_attn_implementation("eager")
    assert torch.equal(model(input_ids=ids).logits, logits[0])


def test_other_models_have_none() -> None:
    cfg = config_of(source("whole"))
    assert not unread_of(load_model(config_of(family_folder("qwen3")), device="cpu"))
    assert not unread_of(load_model(ModelConfig(path=cfg.path, init="random"), device="cpu"))
    # It predicts no tokens.
    assert not unread_of(load_value_model(cfg, device="cpu", seed=0))


def test_a_file_that_is_gone_is_told(tmp_path: Path) -> None:
    folder = shutil.copytree(source("text"), tmp_path / "model")
    model = load_model(config_of(folder), device="cpu")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    shutil.rmtree(folder)
    args = model, tokenizer, tmp_path / "out", torch.float32, export_weights(model)
    with pytest.raises(CheckpointError, match=r"one cannot be read any more .* Put the file back"):
        export_hf(*args, mesh=ALONE)
    assert not (tmp_path / "out").exists()
