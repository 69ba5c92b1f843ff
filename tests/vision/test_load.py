"""Both parts of a checkpoint, by every way of loading, under new and old names of tensors."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, PreTrainedModel

from hone.errors import UserError
from hone.models.contents import require_features, require_whole
from hone.models.deferred import Weight, take_source
from hone.models.heads import value_head
from hone.models.load import blank_model, load_config, load_deferred, load_model, load_value_model
from hone.models.settings import ModelConfig
from hone.models.tiny_vision import make_tiny_vision_model
from tests.vision.examples import FAMILIES, Twin

PUBLISHED = {
    "qwen2_5_vl": ((r"^model\.visual\.", "visual."), (r"^model\.language_model\.", "model.")),
    "qwen3_vl": (),
    "qwen3_5": (),
    "qwen3_5_moe": (),
    "gemma3": (
        (r"^model\.vision_tower\.", "vision_tower.vision_model."),
        (r"^model\.multi_modal_projector\.", "multi_modal_projector."),
        (r"^model\.language_model\.", "language_model.model."),
    ),
    "smolvlm": (),
}
"""Patterns of names in transformers 5, and what published checkpoints have in their place."""
TOWER_MATRIX = {
    "qwen2_5_vl": "model.visual.merger.mlp.0.weight",
    "qwen3_vl": "model.visual.deepstack_merger_list.1.linear_fc2.weight",
    "qwen3_5": "model.visual.merger.linear_fc2.weight",
    "qwen3_5_moe": "model.visual.merger.linear_fc1.weight",
    "gemma3": "model.multi_modal_projector.mm_input_projection_weight",
    "smolvlm": "model.connector.modality_projection.proj.weight",
}


def renamed(folder: Path, out: Path, patterns) -> Path:
    """The checkpoint with names in its file that `patterns` give to those of transformers 5."""
    shutil.copytree(folder, out)
    whole = AutoModelForImageTextToText.from_pretrained(folder)
    tensors = {}
    for name, tensor in whole.state_dict().items():
        if name == "lm_head.weight":  # tied
            continue
        for pattern, other in patterns:
            name = re.sub(pattern, other, name)
        tensors[name] = tensor.contiguous()
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def parts(model: PreTrainedModel) -> dict[str, Tensor]:
    """Tensors of decoder and tower by their names in the whole model, buffers included."""
    whole, tower = require_whole(model), require_features(model).tower
    named = [*model.state_dict().items(), *model.named_buffers()]
    found = {whole.whole_name(name): tensor for name, tensor in named}
    inside = [*tower.modules.state_dict().items(), *tower.modules.named_buffers()]
    return found | {f"model.{name}": tensor for name, tensor in inside}


def assert_equal(model: PreTrainedModel, whole: nn.Module) -> None:
    expected = {**dict(whole.state_dict()), **dict(whole.named_buffers())}
    found = parts(model)
    assert found.keys() == expected.keys()
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


@pytest.mark.parametrize("patterns", ["new", "published"])
def test_both_parts_are_those_of_transformers(twin: Twin, patterns: str, tmp_path: Path) -> None:
    named = PUBLISHED[twin.family] if patterns == "published" else ()
    folder = renamed(twin.folder, tmp_path / "model", named)
    model = load_model(ModelConfig(path=str(folder)), device="cpu")
    assert_equal(model, twin.whole)
    keys = require_whole(model).keys
    assert {*keys.values()} == {*load_file(folder / "model.safetensors")}


def given(model: PreTrainedModel) -> dict[str, Tensor]:
    """Tensors of a deferred model by their names in the whole model, read in halves."""
    source, found = take_source(model), dict[str, Tensor]()
    assert source is not None
    whole = require_whole(model)

    def take(weight: Weight) -> None:
        name = whole.whole_name(weight.name)
        if not weight.shape:
            found[name] = weight.whole()
            return
        rows, *rest = (slice(0, size) for size in weight.shape)
        halves = slice(0, rows.stop // 2), slice(rows.stop // 2, rows.stop)
        found[name] = torch.cat([weight.read((half, *rest)) for half in halves])

    source.give(take, device=torch.device("cpu"))
    return found


@pytest.mark.parametrize("init", ["pretrained", "random"])
def test_weights_in_parts_are_those_of_the_loaded_model(twin: Twin, init: Any) -> None:
    cfg = ModelConfig(path=str(twin.folder), init=init)
    model, deferred = (load(cfg, device="cpu", seed=7) for load in (load_model, load_deferred))
    assert {p.device.type for p in deferred.parameters()} == {"meta"}
    expected = parts(model)
    tower = require_features(deferred).tower.modules
    found = given(deferred) | {f"model.{name}": x for name, x in tower.state_dict().items()}
    assert expected.keys() - found.keys() <= {  # tied, and buffers of the tower
        "lm_head.weight",
        *(f"model.{name}" for name, _ in tower.named_buffers()),
    }
    for name, tensor in found.items():
        assert torch.equal(tensor, expected[name]), name


def test_random_weights_follow_the_seed(twin: Twin) -> None:
    cfg = ModelConfig(path=str(twin.folder), init="random")
    one, same, other = (parts(load_model(cfg, device="cpu", seed=seed)) for seed in (7, 7, 8))
    assert all(torch.equal(one[name], same[name]) for name in one)
    drawn = [name for name, x in one.items() if x.ndim > 1 and not name.endswith("position_ids")]
    zero = "model.multi_modal_projector.mm_input_projection_weight"  # as transformers leaves it
    assert all(not torch.equal(one[name], other[name]) for name in drawn if name != zero)


def test_an_engine_elsewhere_has_the_tower_and_zeros(twin: Twin) -> None:
    for init in ("pretrained", "random"):
        cfg = ModelConfig(path=str(twin.folder), init=init)
        blank = blank_model(cfg, device="cpu", seed=3)
        expected = require_features(load_model(cfg, device="cpu", seed=3)).tower.modules
        found = require_features(blank).tower.modules.state_dict()
        assert all(torch.equal(x, found[name]) for name, x in expected.state_dict().items())
        assert not any(parameter.any() for parameter in blank.parameters())


@pytest.mark.parametrize("deferred", [False, True])
def test_a_critic_has_the_backbone_the_tower_and_a_head_of_zeros(twin: Twin, deferred) -> None:
    if not twin.gives_values:
        pytest.skip("transformers has no such decoder with a head for scores")
    cfg = ModelConfig(path=str(twin.folder))
    critic = load_value_model(cfg, device="cpu", seed=0, deferred=deferred)
    expected = twin.whole.state_dict()
    if deferred:
        found = given(critic)
    else:
        assert not value_head(critic).weight.any()
        found = parts(critic)
    score = found.pop("score.weight")
    assert score.shape == (1, critic.config.hidden_size)
    assert not score.any()
    for name, tensor in found.items():
        if name in expected:
            assert torch.equal(tensor, expected[name]), name
    assert require_features(critic).tower.modules.state_dict()


def corrupted(folder: Path, out: Path, change) -> ModelConfig:
    shutil.copytree(folder, out)
    tensors = load_file(out / "model.safetensors")
    change(tensors)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return ModelConfig(path=str(out))


@pytest.mark.parametrize("load", [load_model, load_deferred, blank_model, load_value_model])
@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda tensors, key: tensors.pop(key), "lacks 1 weights"),
        (lambda tensors, key: tensors.update({key: tensors[key][:-1].clone()}), "has the shape"),
        (lambda tensors, key: tensors[key].view(-1)[3:4].fill_(float("nan")), "are NaN"),
        (lambda tensors, key: tensors.update({f"{key}s": tensors[key].clone()}), "no place"),
    ],
)
def test_a_broken_tower_is_refused(twin: Twin, load: Any, change, told: str, tmp_path) -> None:
    if load is load_value_model and not twin.gives_values:
        pytest.skip("transformers has no such decoder with a head for scores")
    key = require_whole(twin.load()).keys[TOWER_MATRIX[twin.family]]
    cfg = corrupted(twin.folder, tmp_path / "bad", lambda tensors: change(tensors, key))
    with pytest.raises(UserError, match=told):
        load(cfg, device="cpu", seed=0)


def test_weights_that_are_no_safetensors_are_refused(twin: Twin, tmp_path: Path) -> None:
    folder = tmp_path / "old"
    shutil.copytree(twin.folder, folder)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(UserError, match="no safetensors file among them"):
        load_model(ModelConfig(path=str(folder)), device="cpu")


def test_a_quantised_model_is_refused(twin: Twin, tmp_path: Path) -> None:
    folder = tmp_path / "awq"
    shutil.copytree(twin.folder, folder)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "awq", "bits": 4}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="quantization_config"):
        load_config(ModelConfig(path=str(folder)))


def test_families_are_those_of_the_examples() -> None:
    from hone.families.vision.registry import VISION

    assert {*FAMILIES} == {*VISION} == {*PUBLISHED}


def test_half_precision_keeps_what_transformers_keeps(tmp_path: Path) -> None:
    make_tiny_vision_model(tmp_path, family="qwen3_vl")
    model = load_model(ModelConfig(path=str(tmp_path), dtype="bfloat16"), device="cpu")
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert_equal(model, whole)
