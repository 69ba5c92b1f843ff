"""Loading: what comes back, and how each mistake is told."""

from __future__ import annotations

import json
import logging
import shutil
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from hone.errors import UserError
from hone.families.registry import SPECS
from hone.models import load as load_module
from hone.models import weight_files
from hone.models.deferred import take_source
from hone.models.load import (
    blank_model,
    compute_dtype,
    load_deferred,
    load_end_ids,
    load_model,
    load_value_model,
)
from hone.models.settings import ModelConfig
from hone.models.support import check_supported, context_length, eos_token_ids
from hone.models.tiny import make_tiny_model
from hone.models.tokenizer import load_tokenizer
from tests.models.families import FAMILY_FIELDS, family_folder, family_model
from tests.tables import table
from tests.tiny_runs import make_classifier

TINY = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "head_dim": 8, "intermediate_size": 16}


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path)


def make_folder(tmp_path):
    return make_tiny_model(tmp_path / "model", **TINY)


def load(folder, **options):
    return load_model(ModelConfig(path=str(folder), **options), device="cpu", seed=1)


def edit_config(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_every_family_is_tested():
    assert set(FAMILY_FIELDS) == set(SPECS)


@table("dtype", ["float32", "bfloat16"])
@table("init", ["pretrained", "random"])
@table("family", SPECS)
def test_parameters_take_the_dtype_and_rotary_stays_float32(family, init, dtype):
    model = load(family_folder(family), init=init, dtype=dtype)
    assert {p.dtype for p in model.parameters()} == {getattr(torch, dtype)}
    rotary = [b.dtype for name, b in model.named_buffers() if "inv_freq" in name]
    assert set(rotary) == {torch.float32}
    assert not model.training


def test_auto_dtype():
    cfg = ModelConfig(path="x")
    assert compute_dtype(cfg, "cpu") is torch.float32
    assert compute_dtype(cfg, "cuda") is torch.bfloat16
    assert compute_dtype(ModelConfig(path="x", dtype="float32"), "cuda") is torch.float32


def test_random_weights_follow_the_seed_alone(folder):
    cfg = ModelConfig(path=str(folder), init="random")
    state = torch.get_rng_state()
    first = load_model(cfg, device="cpu", seed=4).state_dict()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(99)
    again = load_model(cfg, device="cpu", seed=4).state_dict()
    other = load_model(cfg, device="cpu", seed=5).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


@table("family", SPECS)
def test_random_models_differ_from_pretrained_ones_in_weights_alone(family):
    drawn, read = (load(family_folder(family), init=init) for init in ("random", "pretrained"))
    assert [(n, p.shape) for n, p in drawn.named_parameters()] == [
        (n, p.shape) for n, p in read.named_parameters()
    ]
    for name, buffer in read.named_buffers():
        assert torch.equal(drawn.get_buffer(name), buffer), name
    std = drawn.config.initializer_range
    for name, weight in drawn.named_parameters():
        if name.endswith(("_proj.weight", "mlp.gate.weight")):
            assert weight.std().item() == pytest.approx(std, rel=0.2), name
        elif "norm" in name:
            assert set(weight.unique().tolist()) <= {0.0, 1.0}, name
        elif name.endswith(".bias"):
            assert not weight.any(), name
    tied = drawn.get_input_embeddings().weight is drawn.get_output_embeddings().weight
    assert tied == bool(drawn.config.tie_word_embeddings)


@pytest.mark.parametrize("reader", [load_model, load_deferred])
def test_weights_that_take_seconds_are_announced(folder, monkeypatch, caplog, reader):
    caplog.set_level("INFO", logger="hone")
    cfg = ModelConfig(path=str(folder))
    reader(cfg, device="cpu", seed=0)
    assert "loading" not in caplog.text
    monkeypatch.setattr(load_module, "_QUICK_BYTES", 1)
    reader(cfg, device="cpu", seed=0)
    assert f"loading the weights in {folder}, 0.0 GiB" in caplog.messages


def test_pretrained_weights_are_those_on_disk(folder):
    state = load(folder).state_dict()
    for name, tensor in load_file(folder / "model.safetensors").items():
        assert torch.equal(state[name], tensor), name


@pytest.mark.parametrize("init", ["random", "pretrained"])
def test_a_model_on_the_host_is_the_one_of_the_device(folder, init):
    there = load(folder, init=init).state_dict()
    here = load_model(
        ModelConfig(path=str(folder), init=init), device="cpu", seed=1, on_host=True
    ).state_dict()
    assert all(torch.equal(tensor, there[name]) for name, tensor in here.items())


def test_a_model_on_the_host_has_the_format_of_the_device(folder):
    model = load_model(ModelConfig(path=str(folder)), device="cuda", seed=1, on_host=True)
    assert {x.device.type for x in (*model.parameters(), *model.buffers())} == {"cpu"}
    assert model.dtype == torch.bfloat16


def given(model):
    """What comes for a deferred model, by name; None where it is there already."""
    source, found = take_source(model), {}
    if source is None:
        return None

    def take(weight):
        assert weight.name not in found
        found[weight.name] = weight.whole().clone()

    source.give(take, device=torch.device("cpu"))
    return found


def tensors(model):
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def defer(folder, **options):
    return load_deferred(ModelConfig(path=str(folder), **options), device="cpu", seed=1)


@table("init", ["pretrained", "random"])
@table("family", SPECS)
def test_what_is_deferred_is_what_would_be_loaded(family, init):
    folder = family_folder(family)
    expected, model = load(folder, init=init), defer(folder, init=init)
    assert {t.device.type for t in tensors(model).values()} == {"meta"}
    found = given(model)
    assert found.keys() == tensors(expected).keys()
    for name, tensor in tensors(expected).items():
        assert torch.equal(found[name], tensor), name
        assert tensors(model)[name].dtype == tensor.dtype, name
    assert given(model) is None, "weights come once"
    same_surroundings(model, expected)
    blank = blank_model(ModelConfig(path=str(folder), init=init), device="cpu")
    same_surroundings(blank, expected)
    assert [(n, p.shape) for n, p in blank.named_parameters()] == [
        (n, p.shape) for n, p in expected.named_parameters()
    ]
    assert not any(bool(p.any()) for p in blank.parameters())
    for name, buffer in expected.named_buffers():
        assert torch.equal(blank.get_buffer(name), buffer), name


def same_surroundings(model, expected):
    assert type(model) is type(expected)
    assert model.config.to_dict() == expected.config.to_dict()
    assert model.config.name_or_path == expected.config.name_or_path
    assert model.generation_config.to_dict() == expected.generation_config.to_dict()
    assert not model.training
    assert model.dtype == expected.dtype
    tied = [
        m.get_input_embeddings().weight is m.get_output_embeddings().weight
        for m in (model, expected)
    ]
    assert tied[0] == tied[1]


def test_a_deferred_model_has_the_generation_config_of_the_file(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [11, 12]}))
    same_surroundings(defer(folder), load(folder))
    assert {11, 12} <= set(eos_token_ids(defer(folder), None))


def edit_weights(folder, edit):
    file = folder / "model.safetensors"
    weights = edit(load_file(file))
    save_file(weights, file, metadata={"format": "pt"})


HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
READABLE = {
    "a backbone": lambda w: {name.removeprefix("model."): tensor for name, tensor in w.items()},
    "buffers that were saved once": (
        lambda w: w | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    ),
    "the tied head too": lambda w: w | {HEAD: w[EMBEDDING].clone()},
    "the tied head alone": lambda w: {
        HEAD if name == EMBEDDING else name: tensor for name, tensor in w.items()
    },
    "half precision": lambda w: {name: tensor.half() for name, tensor in w.items()},
    "double precision": lambda w: {name: tensor.double() for name, tensor in w.items()},
}
OTHERWISE = {
    "a tied head of its own": (
        lambda w: w | {HEAD: w[EMBEDDING] + 1},
        "values of model.embed_tokens.weight and lm_head.weight, which are tied, differ",
    ),
    "integers": (
        lambda w: w | {"model.norm.weight": w["model.norm.weight"].to(torch.int32)},
        "model.norm.weight is of the format I32",
    ),
    "both with and without prefix": (
        lambda w: w | {"norm.weight": w["model.norm.weight"].clone()},
        "they hold model.norm.weight twice",
    ),
}


@table("files", READABLE)
def test_files_that_name_tensors_like_the_modules_are_read_in_parts(tmp_path, files):
    folder = make_folder(tmp_path)
    edit_weights(folder, READABLE[files])
    expected, found = load(folder), given(defer(folder))
    assert found is not None
    for name, tensor in tensors(expected).items():
        assert torch.equal(found[name].to(tensor.dtype), tensor), name


@pytest.mark.parametrize("files", OTHERWISE)
def test_other_files_are_loaded_whole_and_the_log_says_why(folder, files, caplog):
    edit, reason = OTHERWISE[files]
    edit_weights(folder, edit)
    with caplog.at_level(logging.WARNING, "hone"):
        model = defer(folder)
    assert given(model) is None
    assert f"can be loaded only whole: {reason}. Each process takes" in caplog.text
    expected = load(folder)
    assert all(torch.equal(tensors(model)[n], t) for n, t in tensors(expected).items())


def pickled(folder):
    weights = load_file(folder / "model.safetensors")
    torch.save(weights, folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


SURROUNDINGS = {
    "a pickle": (pickled, "there is no safetensors file among them"),
    "an adapter": (
        lambda f: (f / "adapter_config.json").write_text('{"peft_type": "LORA"}'),
        "there is an adapter with them",
    ),
    "other names": (
        lambda f: edit_config(f, transformers_weights="model.safetensors"),
        "config.json has them in model.safetensors",
    ),
}


def treated_otherwise(case: str) -> Any:
    """transformers itself reads an adapter where peft is installed, and there is none here."""
    reads = case == "an adapter" and find_spec("peft") is not None
    return pytest.param(case, marks=pytest.mark.skipif(reads, reason="peft is installed"))


@pytest.mark.parametrize("case", [treated_otherwise(case) for case in SURROUNDINGS])
def test_folders_that_transformers_treats_otherwise_are_left_to_it(folder, case, caplog):
    spoil, reason = SURROUNDINGS[case]
    expected = load(folder)
    spoil(folder)
    with caplog.at_level(logging.WARNING, "hone"):
        model = defer(folder)
    assert reason in caplog.text
    assert all(torch.equal(tensors(model)[n], t) for n, t in tensors(expected).items())


def test_a_part_of_the_files_that_is_gone_is_told_by_transformers(folder):
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": {EMBEDDING: "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(FileNotFoundError, match=r"model-00001-of-00001\.safetensors"):
        defer(folder)


def test_files_of_the_hub_are_asked_for_by_the_name_of_their_repository(folder, monkeypatch):
    model = defer(folder)
    expected = given(model)
    asked = []

    def cached_file(path, name):
        asked.append((path, name))
        return str(folder / name) if (folder / name).exists() else None

    monkeypatch.setattr(weight_files, "cached_file", cached_file)
    source = weight_files.find_weights("org/name", model, {})
    found = {}
    source.give(lambda w: found.update({w.name: w.whole()}), device=torch.device("cpu"))
    assert ("org/name", "model.safetensors") in asked
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.items())
    assert found.keys() == {name for name, _ in model.named_parameters()}


def drop_weight(folder):
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights.pop("model.layers.0.mlp.up_proj.weight")
    save_file(weights, file, metadata={"format": "pt"})


def spoil_weight(name, value):
    def edit(weights):
        weights[name].view(-1)[3] = value
        return weights

    return lambda folder: edit_weights(folder, edit)


def add_weight(name):
    return lambda folder: edit_weights(folder, lambda w: w | {name: torch.ones(1)})


NORM, QUERY = "model.norm.weight", "model.layers.0.self_attn.q_proj.weight"
CLASSIFIER = {"architectures": ["Qwen3ForSequenceClassification"]}

MISTAKES = {
    "a weight is NaN": (
        spoil_weight(NORM, torch.nan),
        "",
        UserError,
        "1 of 16 values of model.norm.weight are NaN or infinite",
    ),
    "a weight is infinite": (
        spoil_weight(QUERY, -torch.inf),
        "",
        UserError,
        "1 of 256 values of .*q_proj.weight are NaN or infinite",
    ),
    "more layers than the config": (
        add_weight("model.layers.1.mlp.up_proj.weight"),
        "",
        UserError,
        r"holds 1 weights for which .* no place, among them \['model.layers.1.mlp",
    ),
    "the head of a scorer": (add_weight("score.weight"), "", UserError, "no place.*score.weight"),
    "a scorer": (
        lambda f: edit_config(f, **CLASSIFIER),
        "",
        UserError,
        r"\['Qwen3ForSequenceClassification'\], which scores texts and predicts no tokens",
    ),
    "no folder": (lambda f: None, "./nowhere", FileNotFoundError, "nowhere"),
    "no config": (lambda f: (f / "config.json").unlink(), "", UserError, "config.json"),
    "bad config": (lambda f: (f / "config.json").write_text("{"), "", FileNotFoundError, "config"),
    "no weights": (
        lambda f: (f / "model.safetensors").unlink(),
        "",
        FileNotFoundError,
        "init=random",
    ),
    "a pointer of Git LFS": (
        lambda f: (f / "model.safetensors").write_text("version https://git-lfs.github.com/"),
        "",
        UserError,
        "holds no safetensors that can be read .*Git LFS",
    ),
    "a weight is absent": (drop_weight, "", ValueError, "up_proj"),
    "unknown family": (
        lambda f: edit_config(f, model_type="gpt2"),
        "",
        ValueError,
        "family gpt2 with no hidden_size.* is not served",
    ),
    "no family at all": (
        lambda f: edit_config(f, model_type="nonesuch"),
        "",
        ValueError,
        "no known family",
    ),
    "a number format with its module": (
        lambda f: edit_config(f, dtype="torch.bfloat16"),
        "",
        UserError,
        "holds dtype = 'torch.bfloat16', where transformers takes 'bfloat16'; correct it",
    ),
    "a number format by a short name": (
        lambda f: edit_config(f, dtype=None, torch_dtype="fp16"),
        "",
        UserError,
        "holds torch_dtype = 'fp16', where transformers takes 'float16'",
    ),
    "images": (lambda f: edit_config(f, model_type="qwen2_vl"), "", ValueError, "vision_config"),
    "a larger model's config": (
        lambda f: edit_config(f, hidden_size=32),
        "",
        UserError,
        "has the shape .* should have",
    ),
}


@table("mistake", MISTAKES)
def test_mistakes_are_told(tmp_path, mistake):
    folder = make_folder(tmp_path)
    spoil, path, error, message = MISTAKES[mistake]
    spoil(folder)
    for reader in (load, defer):
        with pytest.raises(error, match=message):
            given(reader(path if path.startswith(".") else folder / path))


@pytest.mark.parametrize("kind", ["pickle", "safetensors"])
def test_a_weight_without_a_place_is_told_of_pickles_too(folder, kind):
    add_weight("model.layers.7.mlp.up_proj.weight")(folder)
    if kind == "pickle":
        pickled(folder)
    with pytest.raises(UserError, match=r"no place, among them \['model.layers.7"):
        load(folder)


def test_weights_that_transformers_declares_as_not_loaded_are_named_in_one_line(tmp_path, caplog):
    folder = tmp_path / "model"
    shutil.copytree(family_folder("glm4_moe"), folder)
    add_weight("model.layers.92.shared_head.norm.weight")(folder)
    for reader in (load, defer):
        caplog.clear()
        with caplog.at_level(logging.INFO, "hone"):
            reader(folder)
        (line,) = (x.message for x in caplog.records if "not read" in x.message)
        assert "holds 1 tensors that are not read, among them model.layers.92.shared" in line
        assert line.endswith("Glm4MoeForCausalLM does not have these parts, and exports keep them")


def test_what_scores_is_loaded_as_such_and_its_values_are_looked_at(tmp_path):
    folder = make_classifier(tmp_path / "judge")
    cfg = ModelConfig(path=str(folder))
    assert load_value_model(cfg, device="cpu", seed=0).score.weight.shape == (1, 32)
    spoil_weight("score.weight", torch.nan)(folder)
    with pytest.raises(UserError, match=r"1 of 32 values of score.weight are NaN"):
        load_value_model(cfg, device="cpu", seed=0)


def test_a_missing_weight_is_told_before_anything_is_read(folder, monkeypatch, caplog):
    drop_weight(folder)
    monkeypatch.setattr("hone.models.load.load_model", None)
    with pytest.raises(UserError, match=r"lacks 1 weights, among them .*up_proj"):
        defer(folder)
    edit_weights(folder, lambda w: w | {"something.else": torch.ones(1)})
    monkeypatch.undo()
    with pytest.raises(UserError, match=r"lacks 1 weights, among them .*up_proj"):
        defer(folder)
    assert "whole: they name something.else" in caplog.text, "it might be what transformers renames"


REFUSED = {
    "quantization_config": {"quant_method": "awq"},
    "attention_dropout": 0.1,
    "logit_scale": 0.5,
    "final_logit_softcapping": 30.0,
    "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    "layer_types": ["chunked_attention"],
}


@table("field", REFUSED)
def test_refuses_what_is_not_served(field):
    config = family_model("llama").config
    setattr(config, field, REFUSED[field])
    with pytest.raises(ValueError, match=r"not served"):
        check_supported(config)


@table("rope_type", ["linear", "llama3", "yarn"])
def test_accepts_rotary_scalings_of_position_alone(rope_type):
    config = family_model("llama").config
    config.rope_parameters = {"rope_type": rope_type, "factor": 2.0, "rope_theta": 1e4}
    check_supported(config)


def test_eos_ids_are_merged_from_all_three_places(folder):
    model, tokenizer = load(folder), load_tokenizer(ModelConfig(path=str(folder)))
    assert eos_token_ids(model, tokenizer) == (tokenizer.eos_token_id,)
    model.generation_config.eos_token_id = [9, 7]
    model.config.eos_token_id = 7
    assert eos_token_ids(model, tokenizer) == (tokenizer.eos_token_id, 7, 9)
    assert eos_token_ids(model, None) == (7, 9)
    model.generation_config.eos_token_id = None
    assert eos_token_ids(model, None) == (7,)
    model.config.eos_token_id = None
    assert eos_token_ids(model, None) == ()


def test_eos_ids_of_the_generation_config_file(folder):
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [11, 12]}))
    assert {11, 12} <= set(eos_token_ids(load(folder), None))


@table("declares", ["generation_config.json", "config.json", "random"])
def test_the_ends_are_known_before_the_model_is_loaded(folder, declares, tmp_path):
    """What is trained and what sampling ends at is one thing."""
    folder = shutil.copytree(folder, tmp_path / declares)
    cfg = ModelConfig(path=str(folder), init="random" if declares == "random" else "pretrained")
    file = "generation_config.json" if declares == "random" else declares
    fields = json.loads((folder / file).read_text()) if (folder / file).is_file() else {}
    (folder / file).write_text(json.dumps(fields | {"eos_token_id": [5, 9]}))
    tokenizer = load_tokenizer(cfg)
    model = load_model(cfg, device="cpu", seed=0)
    ends = load_end_ids(cfg, tokenizer)
    assert ends == eos_token_ids(model, tokenizer)
    assert ({5, 9} <= set(ends)) == (declares != "random")


def test_context_length(folder):
    assert context_length(load(folder).config) == 512


def test_tokenizer_mistakes_are_told(folder, tmp_path):
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match=r"model\.tokenizer"):
        load_tokenizer(ModelConfig(path=str(folder), tokenizer=str(tmp_path / "empty")))
    template = tmp_path / "chat.jinja"
    with pytest.raises(FileNotFoundError, match=r"model\.chat_template"):
        load_tokenizer(ModelConfig(path=str(folder), chat_template=template))
    template.write_text("{{ messages[0]['content'] }}!")
    tokenizer = load_tokenizer(ModelConfig(path=str(folder), chat_template=template))
    turn = [{"role": "user", "content": "hi"}]
    assert tokenizer.apply_chat_template(turn, tokenize=False) == "hi!"
