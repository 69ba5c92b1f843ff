"""Small vision-language models and their files, created on demand (see `hone.models.tiny`)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, PreTrainedTokenizerFast

from hone.families.registry import spec_of
from hone.families.vision.registry import VISION
from hone.models.tiny import (
    PRINTABLE,
    lengthen_memory,
    make_char_tokenizer,
    small_fields,
)
from hone.models.vision import whole_class

__all__ = ["IMAGE_WORDS", "make_tiny_vision_model", "make_vision_tokenizer"]

_QWEN = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe")
_QWEN_WORDS = ("<|vision_start|>", "<|image_pad|>", "<|vision_end|>")
IMAGE_WORDS = {
    **dict.fromkeys(_QWEN, _QWEN_WORDS),
    "qwen2_5_vl": (*_QWEN_WORDS, "<|video_pad|>"),
    "gemma3": (
        "<start_of_image>",
        "<image_soft_token>",
        "<end_of_image>",
        *("\n" * number for number in range(2, 5)),
    ),
    "smolvlm": (
        "<fake_token_around_image>",
        "<image>",
        "<global-img>",
        *(f"<row_{r}_col_{c}>" for r in range(1, 5) for c in range(1, 5)),
    ),
}
"""Special tokens that stand around and for images, and others that transformers' processor or vLLM
looks up, by family."""
_NAMED_WORDS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "boi_token": "<start_of_image>",
        "eoi_token": "<end_of_image>",
        "image_token": "<image_soft_token>",
    },
}
"""Some of them, by the name under which the family's processor asks a tokenizer for them."""
_TILE_TOKENS = 16
"""Tokens of a tile of 32 x 32 pixels."""
_PROCESSORS: dict[str, dict[str, Any]] = {
    "gemma3": {"processor_class": "Gemma3Processor", "image_seq_length": _TILE_TOKENS},
    "smolvlm": {"processor_class": "SmolVLMProcessor", "image_seq_len": _TILE_TOKENS},
}
"""`processor_config.json` of families whose processor has settings of its own."""
_MARKS = {
    **dict.fromkeys(_QWEN, "".join(_QWEN_WORDS)),
    "gemma3": "<start_of_image>",
    "smolvlm": "<image>",
}
_TEMPLATE = (
    "{%% for message in messages %%}<|im_start|>{%% if message['content'] is string %%}"
    "{{ message['content'] }}{%% else %%}{%% for part in message['content'] %%}"
    "{%% if part['type'] == 'image' %%}%s{%% else %%}{{ part['text'] }}{%% endif %%}"
    "{%% endfor %%}{%% endif %%}<|im_end|>{%% endfor %%}"
    "{%% if add_generation_prompt %%}<|im_start|>{%% endif %%}"
)


def make_vision_tokenizer(
    family: str, alphabet: str = PRINTABLE, words: Sequence[str] = ()
) -> PreTrainedTokenizerFast:
    """Tokenizer with one token a character, one for each of the family's marks and each of `words`,
    with a chat template that writes images."""
    tokenizer = make_char_tokenizer(alphabet, (*IMAGE_WORDS[family], *words))
    tokenizer.add_special_tokens(
        {"additional_special_tokens": ["<|im_start|>", *IMAGE_WORDS[family]]}
    )
    # The only way to name tokens of a tokenizer that is there.
    tokenizer._set_model_specific_special_tokens(_NAMED_WORDS.get(family, {}))  # pyright: ignore[reportPrivateUsage]
    tokenizer.chat_template = _TEMPLATE % _MARKS[family]
    return tokenizer


def make_tiny_vision_model(
    folder: Path | str,
    *,
    family: str,
    tokenizer: PreTrainedTokenizerFast | None = None,
    hidden_size: int = 64,
    num_layers: int = 3,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 16,
    intermediate_size: int = 96,
    max_position_embeddings: int = 2048,
    tie_word_embeddings: bool = True,
    tower_layers: int = 2,
    initializer_range: float = 0.02,
    seed: int = 0,
    weights: bool = True,
) -> Path:
    """Write a Hugging Face folder of a vision-language family: config, float32 weights drawn from
    `seed`, tokenizer, settings of its processor and image processor. Images have at least 4 tokens:
    Qwen's patches have 14 and 16 pixels, tiles of Gemma 3 and SmolVLM 32 x 32 pixels and 16 tokens.
    Returns the folder.
    """
    folder = Path(folder)
    tokenizer = tokenizer or make_vision_tokenizer(family)
    ids = tokenizer.get_vocab()
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
        "num_key_value_heads": num_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": intermediate_size,
        "max_position_embeddings": max_position_embeddings,
        "tie_word_embeddings": tie_word_embeddings,
        "initializer_range": initializer_range,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    fields, processor = _fields(family, text, ids, tower_layers)
    config = AutoConfig.for_model(
        family,
        text_config=text,
        tie_word_embeddings=tie_word_embeddings,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        **fields,
    )
    kind = whole_class(config)
    config.architectures = [kind.__name__]
    if weights:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model: Any = kind._from_config(config, dtype=torch.float32)  # pyright: ignore[reportPrivateUsage]
            if family == "gemma3":  # which transformers leaves at zero
                torch.nn.init.normal_(
                    model.model.multi_modal_projector.mm_input_projection_weight, std=0.2
                )
        lengthen_memory(model)
        model.save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor, indent=2))
    if family in _PROCESSORS:
        (folder / "processor_config.json").write_text(json.dumps(_PROCESSORS[family], indent=2))
    return folder


def _fields(
    family: str, text: dict[str, Any], ids: dict[str, int], tower_layers: int
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Fields of the whole model's config besides its text, and settings of its image processor.
    Adds what the family's text config needs to `text`."""
    if family == "qwen2_5_vl":  # whose configuration has no head_dim
        text["head_dim"] = text["hidden_size"] // text["num_attention_heads"]
    half = text["head_dim"] // 2
    if family in _QWEN:
        is_hybrid = spec_of(f"{family}_text").is_hybrid
        if is_hybrid:  # which rotate a part of each head
            half //= 2
            text |= small_fields(
                f"{family}_text",
                num_layers=text["num_hidden_layers"],
                num_heads=text["num_attention_heads"],
                num_kv_heads=text["num_key_value_heads"],
                head_dim=text["head_dim"],
                intermediate_size=text["intermediate_size"],
            )
        third = half // 4
        section = [half - 2 * third, third, third]
        text["rope_parameters"] = {
            "rope_type": "default",
            "rope_theta": 10_000.0,
            "mrope_section": section,
        }
        if is_hybrid:
            text["rope_parameters"]["partial_rotary_factor"] = 0.5
        vision: dict[str, Any] = {
            "initializer_range": text["initializer_range"],
            "depth": tower_layers,
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_heads": 2,
            "out_hidden_size": text["hidden_size"],
        }
        if family != "qwen2_5_vl":
            text["rope_parameters"]["mrope_interleaved"] = True
            vision["num_position_embeddings"] = 64
        if family == "qwen3_vl":
            vision["deepstack_visual_indexes"] = [0, 1]
        elif family == "qwen2_5_vl":
            vision |= {"fullatt_block_indexes": [tower_layers - 1], "window_size": 56}
        fields = {
            "vision_config": vision,
            "image_token_id": ids["<|image_pad|>"],
            "video_token_id": ids.get("<|video_pad|>", len(ids) + 1),
            "vision_start_token_id": ids["<|vision_start|>"],
            "vision_end_token_id": ids["<|vision_end|>"],
        }
        spec: Any = VISION[family]
        patch = spec.patch_size
        processor = {
            "image_processor_type": "Qwen2VLImageProcessor",
            "patch_size": patch,
            "merge_size": 2,
            "temporal_patch_size": 2,
            "size": {
                "shortest_edge": 4 * (2 * patch) ** 2,
                "longest_edge": 64 * (2 * patch) ** 2,
            },
            "image_mean": [*spec.mean],  # vLLM does not normalise where they are left out
            "image_std": [*spec.std],
        }
        return fields, processor
    vision = {
        "initializer_range": text["initializer_range"],
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": tower_layers,
        "num_attention_heads": 2,
        "image_size": 32,
        "patch_size": 4,
    }
    if family == "gemma3":
        text |= {"sliding_window": 24, "query_pre_attn_scalar": text["head_dim"]}
        text["layer_types"] = [
            "full_attention" if layer % 2 else "sliding_attention"
            for layer in range(text["num_hidden_layers"])
        ]
        fields = {
            "vision_config": {
                **vision,
                "model_type": "siglip_vision_model",
                "vision_use_head": False,
            },
            "image_token_index": ids["<image_soft_token>"],
            "boi_token_index": ids["<start_of_image>"],
            "eoi_token_index": ids["<end_of_image>"],
            "mm_tokens_per_image": _TILE_TOKENS,
        }
        return fields, {
            "image_processor_type": "Gemma3ImageProcessor",
            "size": {"height": 32, "width": 32},
        }
    assert family == "smolvlm", family
    text["model_type"] = "llama"
    fields = {
        "vision_config": vision,
        "image_token_id": ids["<image>"],
        "scale_factor": 2,
    }
    return fields, {
        "image_processor_type": "SmolVLMImageProcessor",
        "size": {"longest_edge": 64},
        "max_image_size": {"longest_edge": 32},
    }
