"""Loading: what comes back, and how each mistake is told."""

from __future__ import annotations

import json
from contextlib import nullcontext
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import load_file, save_file

from hone.config.errors import UserError
from hone.config.model import ModelConfig
from hone.models.load import check_exact, compute_dtype, load_model
from hone.models.support import FAMILIES, check_supported, context_length, eos_token_ids
from hone.models.tiny import make_tiny_model
from hone.models.tokenizer import load_tokenizer
from tests.models.families import FAMILY_FIELDS, family_folder, family_model

TINY = {"hidden_size": 16, "num_layers": 1, "num_heads": 2, "head_dim": 8, "intermediate_size": 16}


@pytest.fixture
def folder(tmp_path):
    return make_tiny_model(tmp_path / "model", **TINY)


def load(folder, **options):
    return load_model(ModelConfig(path=str(folder), **options), device="cpu", seed=1)


def edit_config(folder, **fields):
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))


def test_every_family_is_tested():
    assert set(FAMILY_FIELDS) == set(FAMILIES)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("init", ["pretrained", "random"])
@pytest.mark.parametrize("family", FAMILIES)
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


@pytest.mark.parametrize("family", FAMILIES)
def test_random_models_differ_from_pretrained_ones_in_weights_alone(family):
    drawn, read = (load(family_folder(family), init=init) for init in ("random", "pretrained"))
    assert [(n, p.shape) for n, p in drawn.named_parameters()] == [
        (n, p.shape) for n, p in read.named_parameters()
    ]
    for name, buffer in read.named_buffers():
        assert torch.equal(drawn.get_buffer(name), buffer), name
    std = drawn.config.initializer_range
    for name, weight in drawn.named_parameters():
        if name.endswith("_proj.weight"):
            assert weight.std().item() == pytest.approx(std, rel=0.2), name
        elif "norm" in name:
            assert set(weight.unique().tolist()) <= {0.0, 1.0}, name
        elif name.endswith("bias"):
            assert not weight.any(), name
    tied = drawn.get_input_embeddings().weight is drawn.get_output_embeddings().weight
    assert tied == bool(drawn.config.tie_word_embeddings)


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


def drop_weight(folder):
    file = folder / "model.safetensors"
    weights = load_file(file)
    weights.pop("model.layers.0.mlp.up_proj.weight")
    save_file(weights, file, metadata={"format": "pt"})


MISTAKES = {
    "no folder": (lambda f: None, "./nowhere", FileNotFoundError, "no such folder"),
    "a file": (lambda f: None, "config.json", ValueError, "is a file"),
    "no config": (lambda f: (f / "config.json").unlink(), "", FileNotFoundError, "config.json"),
    "bad config": (lambda f: (f / "config.json").write_text("{"), "", FileNotFoundError, "config"),
    "no weights": (
        lambda f: (f / "model.safetensors").unlink(),
        "",
        FileNotFoundError,
        "init=random",
    ),
    "a weight is absent": (drop_weight, "", ValueError, "up_proj"),
    "unknown family": (
        lambda f: edit_config(f, model_type="gpt2"),
        "",
        ValueError,
        "'gpt2' is not supported; supported: llama",
    ),
    "no family at all": (
        lambda f: edit_config(f, model_type="nonesuch"),
        "",
        ValueError,
        "no known family",
    ),
    "images": (lambda f: edit_config(f, model_type="qwen2_vl"), "", ValueError, "reads images"),
    "a larger model's config": (
        lambda f: edit_config(f, hidden_size=32),
        "",
        (ValueError, RuntimeError),
        "size|shape|mismatch",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_told(folder, mistake):
    spoil, path, error, message = MISTAKES[mistake]
    spoil(folder)
    with pytest.raises(error, match=message):
        load(path if path.startswith(".") else folder / path)


REFUSED = {
    "quantization_config": {"quant_method": "awq"},
    "attention_dropout": 0.1,
    "logit_scale": 0.5,
    "final_logit_softcapping": 30.0,
    "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4},
    "layer_types": ["chunked_attention"],
}


@pytest.mark.parametrize("field", REFUSED)
def test_refuses_what_is_not_served(field):
    config = family_model("llama").config
    setattr(config, field, REFUSED[field])
    with pytest.raises(ValueError, match=r"not served"):
        check_supported(config)


@pytest.mark.parametrize("rope_type", ["linear", "llama3", "yarn"])
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


@pytest.mark.skipif(find_spec("triton") is None, reason="exact mode needs triton")
@pytest.mark.parametrize(
    ("case", "message"),
    [
        (({}, {}, (9, 0)), "serves heads of 32, 64, 128, got 8; or set model.exact=false"),
        (({"head_dim": 32}, {"dtype": "float32"}, (9, 0)), "got float32; set model.dtype=bfloat16"),
        (({"head_dim": 32}, {}, (7, 5)), "needs a GPU of compute capability 8.0 or later, got T4"),
        (({"head_dim": 32, "hidden_size": 20}, {}, (9, 0)), "multiples of 8, got hidden_size=20"),
        (({"head_dim": 32}, {}, (9, 0)), None),
        (({}, {"exact": False}, (9, 0)), None),
    ],
)
def test_R22_exact_mode_is_refused_from_the_config_alone(case, message, tmp_path, monkeypatch):
    fields, options, capability = case
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "T4")
    folder = make_tiny_model(tmp_path, weights=False, **TINY | fields)
    cfg = ModelConfig(path=str(folder), **{"exact": True} | options)
    refused = nullcontext() if message is None else pytest.raises(UserError, match=message)
    with refused:
        check_exact(cfg, torch.device("cuda"))
