"""What is saved of a vision-language model is whole: transformers loads it like the source."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    Gemma3ForSequenceClassification,
    Gemma3Processor,
    PreTrainedModel,
)

from hone.checkpoint.atomic import read_manifest
from hone.checkpoint.export import export_adapter, export_hf, rehearse_export
from hone.distributed.mesh import Mesh
from hone.families.registry import spec_of
from hone.models.adapters import adapt
from hone.models.contents import require_features
from hone.models.load import load_model, load_value_model
from hone.models.manifest import export_weights
from hone.models.settings import LoraConfig, ModelConfig
from tests.vision.examples import PROCESSORS, Twin, picture
from tests.vision.test_load import PUBLISHED, parts, renamed

ALONE = Mesh.alone("cpu")


def save(model: PreTrainedModel, twin: Twin, folder: Path, dtype=torch.float32) -> Path:
    named = export_weights(model)
    return export_hf(model, twin.tokenizer, folder, dtype, named, mesh=ALONE, step=3)


@torch.no_grad()
def trained(twin: Twin, folder: Path | None = None) -> PreTrainedModel:
    """The decoder with other weights than those of its folder."""
    model = load_model(ModelConfig(path=str(folder or twin.folder)), device="cpu")
    torch.manual_seed(0)
    for parameter in model.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=0.02)
    return model


def twin_at(folder: Path, twin: Twin) -> Twin:
    """The twin of what is saved in `folder`."""
    other: Any = object.__new__(Twin)
    other.family, other.folder, other.spec = twin.family, folder, twin.spec
    other.cfg = ModelConfig(path=str(folder))
    return other


@pytest.mark.parametrize("patterns", ["new", "published"])
def test_transformers_loads_what_was_trained(twin: Twin, patterns: str, tmp_path: Path) -> None:
    named = PUBLISHED[twin.family] if patterns == "published" else ()
    source = renamed(twin.folder, tmp_path / "source", named)
    model = trained(twin, source)
    args = model, twin.tokenizer, tmp_path / "saved", torch.float32
    num_bytes = rehearse_export(*args, mesh=ALONE)
    assert not (tmp_path / "saved").exists()
    folder = save(model, twin, tmp_path / "saved")

    other = twin_at(folder, twin)
    whole, info = AutoModelForImageTextToText.from_pretrained(folder, output_loading_info=True)
    assert not any(info.values())
    expected = parts(model)
    assert all(torch.equal(x, expected[name]) for name, x in whole.state_dict().items())
    example = other.sequence("what is ", picture(1), "? it is red.")
    assert (other.logits(example) - twin.logits(example)).abs().max() > 0.01
    assert torch.equal(other.logits(example), twin_whole(model, twin, example))

    written, before = (load_file(x / "model.safetensors") for x in (folder, source))
    assert written.keys() == before.keys()
    assert sum(x.nbytes for x in written.values()) == num_bytes
    config, source_config = (json.loads((x / "config.json").read_text()) for x in (folder, source))
    assert config == source_config
    for name in ("preprocessor_config.json",):
        assert (folder / name).read_bytes() == (source / name).read_bytes()


@torch.no_grad()
def twin_whole(model: PreTrainedModel, twin: Twin, example: Any) -> Tensor:
    """Logits of transformers' whole model with the weights of `model` put into it."""
    other = twin_at(twin.folder, twin)
    tensors = parts(model)
    other.whole.load_state_dict({name: tensors[name] for name in other.whole.state_dict()})
    return other.logits(example)


def test_names_are_those_that_transformers_writes(twin: Twin, tmp_path: Path) -> None:
    model = load_model(ModelConfig(path=str(twin.folder), init="random"), device="cpu")
    folder = save(model, twin, tmp_path / "saved", torch.bfloat16)
    whole = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.bfloat16)
    AutoModelForImageTextToText.from_config(whole.config).to(torch.bfloat16).save_pretrained(
        tmp_path / "theirs"
    )
    ours, theirs = (
        {name: (x.shape, x.dtype) for name, x in load_file(x / "model.safetensors").items()}
        for x in (folder, tmp_path / "theirs")
    )
    assert ours == theirs


def test_a_run_starts_from_what_was_saved(twin: Twin, tmp_path: Path) -> None:
    model = trained(twin)
    folder = save(model, twin, tmp_path / "saved")
    again = load_model(ModelConfig(path=str(folder)), device="cpu")
    expected = parts(model)
    for name, tensor in parts(again).items():
        assert torch.equal(tensor, expected[name]), name
    second = save(again, twin, tmp_path / "second")
    files = [x.name for x in folder.iterdir() if x.is_file()]
    assert {x.name for x in second.iterdir()} == {*files}
    for name in files:
        assert (second / name).read_bytes() == (folder / name).read_bytes(), name


def test_the_manifest_has_a_checksum_of_the_tower(twin: Twin, tmp_path: Path) -> None:
    model = trained(twin)

    def told(name: str) -> Any:
        folder = save(model, twin, tmp_path / name)
        return read_manifest(folder).metadata

    first = told("first")
    assert told("same") == first
    assert first["step"] == 3
    with torch.no_grad():
        next(require_features(model).tower.modules.parameters()).view(-1)[-1] += 1
    assert told("other")["tower"] != first["tower"]


def test_adapters_are_of_the_decoder_alone_and_merge(twin: Twin, tmp_path: Path) -> None:
    model = load_model(twin.cfg, device="cpu")
    before = {name: x.clone() for name, x in parts(model).items()}
    lora = LoraConfig(rank=2)
    adapt(model, lora, seed=0)
    adapters = {name: x for name, x in model.named_parameters() if "lora_" in name}
    assert adapters
    with torch.no_grad():
        for parameter in adapters.values():
            parameter.normal_(std=0.1)
    from hone.models.adapted import merged_weights

    named = merged_weights(model, export_weights(model))
    folder = export_hf(model, twin.tokenizer, tmp_path / "saved", torch.float32, named, mesh=ALONE)
    whole = AutoModelForImageTextToText.from_pretrained(folder).state_dict()
    changed = {name for name, x in whole.items() if not torch.equal(x, before[name])}
    assert changed
    assert all(name.startswith(twin.spec.decoder_prefix) for name in changed)
    targets = spec_of(model.config.model_type).lora_targets
    assert {name.split(".")[-2] for name in changed} == {*targets}
    export_adapter(model, lora, tmp_path / "adapter", adapters.items(), mesh=ALONE, step=1)
    peft = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    prefix = f"base_model.model.{twin.spec.decoder_prefix}"
    assert all(name.startswith(prefix) for name in peft)
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    reached = [
        x for x, _ in twin.whole.named_modules() if re.fullmatch(config["target_modules"], x)
    ]
    assert {f"base_model.model.{x}" for x in reached} == {
        name.partition(".lora_")[0] for name in peft
    }


def test_a_reward_model_is_whole_and_loads_again(twin: Twin, tmp_path: Path) -> None:
    if not twin.gives_values:
        pytest.skip("transformers has no such decoder with a head for scores")
    model = load_value_model(twin.cfg, device="cpu", seed=0)
    with torch.no_grad():
        model.score.weight.normal_()
    model.config.pad_token_id = twin.tokenizer.pad_token_id
    folder = save(model, twin, tmp_path / "saved")
    expected = parts(model)
    for deferred in (False, True):
        cfg = ModelConfig(path=str(folder))
        again = load_value_model(cfg, device="cpu", seed=1, deferred=deferred)
        assert again.config.num_labels == 1
        if not deferred:
            for name, tensor in parts(again).items():
                assert torch.equal(tensor, expected[name]), name
    if twin.family == "gemma3":  # the only one of which transformers has a class
        theirs = Gemma3ForSequenceClassification.from_pretrained(folder)
        assert all(torch.equal(x, expected[name]) for name, x in theirs.state_dict().items())


def test_image_processors_load(twin: Twin, tmp_path: Path) -> None:
    folder = save(trained(twin), twin, tmp_path / "saved")
    kind = PROCESSORS[twin.family]
    found, source = (kind.from_pretrained(x) for x in (folder, twin.folder))
    assert found.to_dict() == source.to_dict()
    assert AutoTokenizer.from_pretrained(folder).chat_template == twin.tokenizer.chat_template


def test_a_whole_processor_loads(tmp_path: Path) -> None:
    twin = Twin(tmp_path / "source", "gemma3")
    tokenizer = twin.tokenizer
    image_processor = PROCESSORS["gemma3"].from_pretrained(twin.folder)
    Gemma3Processor(image_processor, tokenizer, image_seq_length=16).save_pretrained(twin.folder)
    folder = save(trained(twin), twin, tmp_path / "saved")
    image, text = picture(1), "what is <start_of_image>?"
    found, source = (
        Gemma3Processor.from_pretrained(place)(images=[[image]], text=[text])
        for place in (folder, twin.folder)
    )
    assert found["input_ids"] == source["input_ids"]
    ours, theirs = (torch.as_tensor(x["pixel_values"]) for x in (found, source))
    assert torch.equal(ours, theirs)


def test_a_template_of_the_processor_is_kept(twin: Twin, tmp_path: Path) -> None:
    source = tmp_path / "source"
    shutil.copytree(twin.folder, source)
    (source / "chat_template.json").write_text('{"chat_template": "x"}')
    model = load_model(ModelConfig(path=str(source)), device="cpu")
    assert not (save(model, twin, tmp_path / "with") / "chat_template.json").exists()
    template, twin.tokenizer.chat_template = twin.tokenizer.chat_template, None
    try:
        assert (save(model, twin, tmp_path / "without") / "chat_template.json").exists()
    finally:
        twin.tokenizer.chat_template = template
