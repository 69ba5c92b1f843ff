"""What specs say of vision-language families against transformers' classes and configurations."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from hone.families.model_facts import ModelFacts
from hone.families.registry import unserved
from hone.families.shape import ModelShape, public_shape
from hone.families.vision.registry import VISION, decoder_config
from hone.models.tiny_vision import make_tiny_vision_model
from tests.tables import table

PUBLIC = {name: config for spec in VISION.values() for name, config in spec.public.items()}


def whole_model(config: Any) -> Any:
    with torch.device("meta"):
        return AutoModelForImageTextToText.from_config(config)


def parsed(config: Any) -> Any:
    fields = {name: value for name, value in config.items() if name != "model_type"}
    return AutoConfig.for_model(config["model_type"], **fields)


def assert_sizes(config: Any, shape: ModelShape | None) -> None:
    """The parameters of decoder and tower are those of the whole model of transformers."""
    whole = whole_model(parsed(config))
    inside = whole.model.language_model if hasattr(whole.model, "language_model") else None
    decoder = whole.model.text_model if inside is None else inside
    parameters = {*decoder.parameters(), *whole.lm_head.parameters()}
    num_params = sum(p.numel() for p in parameters)
    others = sum(p.numel() for p in whole.parameters()) - num_params
    assert shape is not None
    assert shape.tower is not None
    assert shape.num_params == num_params
    assert shape.tower.num_params == others
    assert shape.vision_family == config["model_type"]
    text = whole.config.get_text_config()
    assert shape.family == text.model_type
    assert shape.num_layers == text.num_hidden_layers


@table("name", PUBLIC)
def test_public_shapes_have_transformers_parameters(name: str) -> None:
    assert_sizes(PUBLIC[name], public_shape(name))


@table("family", VISION)
def test_a_tiny_model_has_transformers_parameters(family: str, tmp_path) -> None:
    make_tiny_vision_model(tmp_path, family=family, weights=False, num_layers=4)
    config = json.loads((tmp_path / "config.json").read_text())
    facts = ModelFacts.read(tmp_path)
    assert facts is not None
    assert_sizes(config, facts.shape)
    assert facts.unserved == ()
    assert facts.vision_family == family


PUBLISHED: dict[str, Any] = {
    "qwen2_5_vl": {  # without a part for the text, and with the older name of its positions
        "architectures": ["Qwen2_5_VLForConditionalGeneration"],
        "hidden_act": "silu",
        "hidden_size": 2048,
        "image_token_id": 151655,
        "intermediate_size": 11008,
        "max_position_embeddings": 128000,
        "max_window_layers": 70,
        "model_type": "qwen2_5_vl",
        "num_attention_heads": 16,
        "num_hidden_layers": 36,
        "num_key_value_heads": 2,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]},
        "rope_theta": 1000000.0,
        "sliding_window": 32768,
        "tie_word_embeddings": True,
        "use_sliding_window": False,
        "vision_config": {
            "depth": 32,
            "hidden_act": "silu",
            "hidden_size": 1280,
            "intermediate_size": 3420,
            "num_heads": 16,
            "out_hidden_size": 2048,
            "patch_size": 14,
            "spatial_merge_size": 2,
            "window_size": 112,
            "fullatt_block_indexes": [7, 15, 23, 31],
            "temporal_patch_size": 2,
        },
        "vocab_size": 151936,
    },
    "gemma3": {  # with few fields: the others have transformers' defaults
        "architectures": ["Gemma3ForConditionalGeneration"],
        "boi_token_index": 255999,
        "eoi_token_index": 256000,
        "image_token_index": 262144,
        "mm_tokens_per_image": 256,
        "model_type": "gemma3",
        "text_config": {
            "hidden_size": 2560,
            "intermediate_size": 10240,
            "model_type": "gemma3_text",
            "num_hidden_layers": 34,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
        },
        "vision_config": {
            "hidden_size": 1152,
            "image_size": 896,
            "intermediate_size": 4304,
            "model_type": "siglip_vision_model",
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "patch_size": 14,
            "vision_use_head": False,
        },
    },
    "qwen3_5": {  # with the name of the whole in the tower's part, and a head for further tokens
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "image_token_id": 248056,
        "model_type": "qwen3_5",
        "text_config": {
            "attention_bias": False,
            "attn_output_gate": True,
            "full_attention_interval": 4,
            "head_dim": 256,
            "hidden_size": 5120,
            "intermediate_size": 17408,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 48,
            "linear_value_head_dim": 128,
            "mamba_ssm_dtype": "float32",
            "max_position_embeddings": 262144,
            "mlp_only_layers": [],
            "model_type": "qwen3_5_text",
            "mtp_num_hidden_layers": 1,
            "mtp_use_dedicated_embeddings": False,
            "num_attention_heads": 24,
            "num_hidden_layers": 64,
            "num_key_value_heads": 4,
            "partial_rotary_factor": 0.25,
            "rope_parameters": {
                "mrope_interleaved": True,
                "mrope_section": [11, 11, 10],
                "partial_rotary_factor": 0.25,
                "rope_theta": 10000000,
                "rope_type": "default",
            },
            "tie_word_embeddings": False,
            "vocab_size": 248320,
        },
        "tie_word_embeddings": False,
        "vision_config": {
            "deepstack_visual_indexes": [],
            "depth": 27,
            "hidden_size": 1152,
            "in_channels": 3,
            "intermediate_size": 4304,
            "model_type": "qwen3_5",
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": 5120,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        "vision_end_token_id": 248054,
        "vision_start_token_id": 248053,
    },
    "smolvlm": {
        "architectures": ["SmolVLMForConditionalGeneration"],
        "image_token_id": 49190,
        "model_type": "smolvlm",
        "scale_factor": 4,
        "text_config": {
            "head_dim": 64,
            "hidden_size": 576,
            "intermediate_size": 1536,
            "max_position_embeddings": 8192,
            "model_type": "llama",
            "num_attention_heads": 9,
            "num_hidden_layers": 30,
            "num_key_value_heads": 3,
            "vocab_size": 49280,
        },
        "tie_word_embeddings": False,
        "vision_config": {
            "hidden_size": 768,
            "image_size": 512,
            "model_type": "smolvlm_vision",
            "num_attention_heads": 12,
            "patch_size": 16,
        },
    },
}
"""Files as they were published, shortened to what matters here."""


@table("family", PUBLISHED)
def test_published_files_are_read_whole(family: str) -> None:
    config = PUBLISHED[family]
    facts = ModelFacts.from_config(config)
    assert facts.unserved == ()
    assert facts.lacks is None
    assert_sizes(config, facts.shape)
    same = {
        "qwen2_5_vl": "qwen2.5-vl-3b",
        "qwen3_5": "qwen3.5-27b",
        "gemma3": "gemma-3-4b",
        "smolvlm": "smolvlm2-256m-video",
    }
    assert facts.shape == public_shape(same[family])
    assert facts.context_length == parsed(config).get_text_config().max_position_embeddings


def test_a_part_of_another_model_is_left_as_it_is() -> None:
    config = {"model_type": "llava", "vision_config": {"depth": 1}}
    assert decoder_config(config) is config


def test_quantised_weights_of_a_whole_model_are_not_served() -> None:
    config = {**PUBLISHED["gemma3"], "quantization_config": {"bits": 4}}
    assert unserved(config) == ["quantization_config"]


NAMES = {
    "google/gemma-3-4b-it": ("gemma3_text", "gemma3"),
    "Qwen/Qwen3-VL-4B-Instruct": ("qwen3_vl_text", "qwen3_vl"),
    "Qwen/Qwen2.5-VL-7B-Instruct": ("qwen2_5_vl_text", "qwen2_5_vl"),
    "HuggingFaceTB/SmolVLM2-2.2B-Instruct": ("llama", "smolvlm"),
    "llava-hf/llava-1.5-7b-hf": ("llava", None),
    "llava-hf/llava-v1.6-mistral-7b-hf": ("llava_next", None),
    "Qwen/Qwen2-VL-7B-Instruct": ("qwen2_vl", None),
    "Qwen/Qwen3-VL-30B-A3B-Instruct": ("qwen3_vl_moe", None),
    "Qwen/Qwen3.8-Flash-Next": ("qwen4_exp", None),
    "Qwen/Qwen3.5-9B": ("qwen3_5_text", "qwen3_5"),
    "OpenGVLab/InternVL3-8B-hf": ("internvl", None),
    "mistral-community/pixtral-12b": ("pixtral", None),
    "meta-llama/Llama-3.2-11B-Vision-Instruct": ("mllama", None),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": ("llama4", None),
    "HuggingFaceTB/SmolVLM-256M-Instruct": ("idefics3", None),
}


@table("name", NAMES)
def test_hub_names_tell_the_family(name: str) -> None:
    facts = ModelFacts.known(name)
    assert facts is not None
    assert (facts.family, facts.vision_family) == NAMES[name]
    assert bool(facts.unserved) == (facts.vision_family is None)


@table("name", ["Qwen/Qwen3-8B", "meta-llama/Llama-3.2-3B-Instruct", "google/gemma-2-9b-it"])
def test_names_of_text_models_are_no_others(name: str) -> None:
    facts = ModelFacts.known(name)
    assert facts is None or not (facts.unserved or facts.vision_family)


@pytest.mark.parametrize("name", PUBLIC)
def test_flops_grow_with_the_patches(name: str) -> None:
    tower = VISION[PUBLIC[name]["model_type"]].tower_cost(PUBLIC[name])
    assert tower.flops(2000) > 2 * tower.flops(1000) > 0
    assert tower.flops(1000) > 2.0 * 1000 * 0.8 * (tower.num_params * 0.5)
