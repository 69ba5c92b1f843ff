"""Models and tokenizers made on the spot."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM

from hone.models.settings import ModelConfig
from hone.models.tiny import (
    SHAPES,
    make_bpe_tokenizer,
    make_char_tokenizer,
    make_model_folder,
    make_tiny_model,
)
from hone.models.tokenizer import load_tokenizer
from tests.tables import table

CHARS = make_char_tokenizer("0123456789+-*= \n?")
BYTES = make_bpe_tokenizer(["the cat sat on the mat", "das Wetter ist schön"], 300)
TURNS = [
    {"role": "user", "content": "1+2=?"},
    {"role": "assistant", "content": "3"},
    {"role": "user", "content": "3*3=?"},
]


@settings(max_examples=50, deadline=None)
@given(st.text("0123456789+-*= \n?"))
def test_characters_round_trip_one_token_each(text):
    ids = CHARS(text).input_ids
    assert len(ids) == len(text)
    assert CHARS.decode(ids) == text


@settings(max_examples=50, deadline=None)
@given(st.text())
def test_bytes_round_trip(text):
    assert BYTES.decode(BYTES(text).input_ids) == text


def test_unknown_characters_are_an_error():
    with pytest.raises(Exception, match="UNK"):
        CHARS("x")


@pytest.mark.parametrize("tokenizer", [CHARS, BYTES], ids=["chars", "bytes"])
def test_a_saved_tokenizer_is_the_same(tokenizer, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    again = load_tokenizer(ModelConfig(path=str(tmp_path)))
    for prompt in (True, False):
        options = {"add_generation_prompt": prompt, "return_dict": False}
        ids = tokenizer.apply_chat_template(TURNS, **options)
        assert again.apply_chat_template(TURNS, **options) == ids
    assert again.decode(ids, skip_special_tokens=True).endswith(
        "3*3=?" + "\n" * ("\n" in again.chat_template)
    )
    assert (again.eos_token, again.pad_token) == ("<|im_end|>", "<|endoftext|>")
    assert len({again.eos_token_id, again.pad_token_id, *again("<|im_start|>").input_ids}) == 3


@pytest.mark.parametrize("tokenizer", [CHARS, BYTES], ids=["chars", "bytes"])
def test_a_prompt_begins_the_whole_conversation(tokenizer):
    prompt = tokenizer.apply_chat_template(TURNS[:1], add_generation_prompt=True, return_dict=False)
    whole = tokenizer.apply_chat_template(TURNS[:2], return_dict=False)
    assert whole[: len(prompt)] == prompt
    answer = tokenizer("3").input_ids
    assert whole[len(prompt) :][:2] == [*answer, tokenizer.eos_token_id]


def test_tiny_model_is_drawn_from_its_seed(tmp_path):
    shape = {"hidden_size": 16, "num_layers": 1, "tokenizer": CHARS}
    a, b, c = (
        load_file(make_tiny_model(tmp_path / name, seed=seed, **shape) / "model.safetensors")
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    name = "model.embed_tokens.weight"
    assert a[name].shape == (len(CHARS), 16)
    assert torch.equal(a[name], b[name])
    assert not torch.equal(a[name], c[name])


PUBLIC_PARAMETERS = {
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "llama-3.1-8b": 8_030_261_248,
    "glm-4.5-air": 106_852_245_504,
    "glm-4.5": 352_797_814_784,
    "llama-3.1-70b": 70_553_706_496,
    "llama-3.3-70b": 70_553_706_496,
    "mistral-7b-v0.3": 7_248_023_552,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3.5-0.8b": 752_393_024,
    "qwen3.5-2b": 1_881_825_088,
    "qwen3.5-4b": 4_205_751_296,
    "qwen3.5-9b": 8_953_803_264,
    **dict.fromkeys(("qwen3.5-27b", "qwen3.6-27b", "qwen3.8-27b"), 26_895_998_464),
    **dict.fromkeys(("qwen3.5-35b-a3b", "qwen3.6-35b-a3b"), 34_660_610_688),
    "qwen3.5-122b-a10b": 122_111_526_912,
    "qwen3.5-397b-a17b": 396_346_350_336,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
}


@table("shape", SHAPES)
def test_shapes_have_the_parameters_of_the_public_models(tmp_path, shape):
    folder = make_model_folder(tmp_path, shape, tokenizer=CHARS)
    assert not list(folder.glob("*.safetensors"))
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder))
    assert sum(p.numel() for p in model.parameters()) == PUBLIC_PARAMETERS[shape]


def test_unknown_shape_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"qwen9.*known: .*llama-3\.2-1b, .*qwen3-0\.6b"):
        make_model_folder(tmp_path, "qwen9")


def test_small_vocabulary_is_told():
    with pytest.raises(ValueError, match="at least 259"):
        make_bpe_tokenizer(["a"], 100)
