"""Parameters and FLOPs against the real transformers models and against counting."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    GemmaConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from hone.families.shape import ModelShape
from tests.tables import table

TINY: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 80,
    "vocab_size": 97,
}

CONFIGS: dict[str, PreTrainedConfig] = {
    "llama": LlamaConfig(**TINY),
    "llama_biases": LlamaConfig(**TINY, attention_bias=True, mlp_bias=True),
    "llama_tied": LlamaConfig(**TINY, tie_word_embeddings=True),
    "mistral": MistralConfig(**TINY),
    "qwen2": Qwen2Config(**{**TINY, "head_dim": 8}),
    "qwen3": Qwen3Config(**TINY),
    "qwen3_biases": Qwen3Config(**TINY, attention_bias=True, tie_word_embeddings=True),
    "gemma": GemmaConfig(**TINY),
    "gemma2": Gemma2Config(**TINY),
    "gemma3": Gemma3TextConfig(**TINY),
}


@table("name", CONFIGS)
def test_num_params_equals_the_real_model(name: str, tmp_path: Path) -> None:
    config = CONFIGS[name]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    head = model.get_output_embeddings().weight.numel()
    total = sum(parameter.numel() for parameter in model.parameters())

    config.save_pretrained(tmp_path)
    for source in (tmp_path, tmp_path / "config.json", config.to_dict()):
        shape = ModelShape.from_config(source)
        assert shape.num_params == total
        assert shape.head_params == head
        assert shape.body_params == total - head * (1 if shape.tied else 2)


def test_head_dim_and_kv_heads_may_be_left_out() -> None:
    config = {key: TINY[key] for key in TINY if key not in ("head_dim", "num_key_value_heads")}
    shape = ModelShape.from_config({**config, "model_type": "llama"})
    assert (shape.head_dim, shape.num_kv_heads) == (8, 6)
    assert ModelShape.from_config({**config, "model_type": "gemma"}).tied


def test_unknown_family_and_missing_key_are_explained() -> None:
    with pytest.raises(ValueError, match="mamba model lacks 'hidden_size'"):
        ModelShape.from_config({"model_type": "mamba"})
    with pytest.raises(ValueError, match="qwen3 model lacks 'hidden_size'"):
        ModelShape.from_config({"model_type": "qwen3"})


@table(
    "config, num_sliding",
    [
        ({"model_type": "mistral", "sliding_window": 64}, 3),
        ({"model_type": "mistral", "sliding_window": None}, 0),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False}, 0),
        ({"model_type": "qwen2", "sliding_window": 64, "max_window_layers": 1}, 2),
        ({"model_type": "gemma2", "sliding_window": 64}, 2),
        (json.loads(Gemma2Config(**TINY).to_json_string()), 2),
        (json.loads(Gemma3TextConfig(**TINY | {"num_hidden_layers": 7}).to_json_string()), 6),
        ({"model_type": "gemma3_text", "sliding_window": 64, "num_hidden_layers": 7}, 6),
    ],
)
def test_sliding_layers_of_old_and_new_configurations(
    config: dict[str, Any], num_sliding: int
) -> None:
    assert ModelShape.from_config({**TINY, **config}).num_sliding_layers == num_sliding


@settings(deadline=None)
@given(
    lengths=st.lists(st.integers(1, 300), min_size=1, max_size=6),
    window=st.none() | st.integers(1, 200),
)
def test_visible_keys_equal_counting_up_to_half_a_key_a_token(
    lengths: list[int], window: int | None
) -> None:
    shape = ModelShape.from_config({**TINY, "model_type": "mistral", "sliding_window": window})
    counted = sum(min(t + 1, window or t + 1) for n in lengths for t in range(n))
    assert abs(shape.visible_keys(lengths) - counted) <= 0.5 * sum(lengths)


def test_sequences_cost_what_they_cost_alone() -> None:
    shape = ModelShape.from_config(CONFIGS["qwen3"].to_dict())
    lengths = [1, 30, 500]
    assert np.isclose(sum(shape.forward_flops([n]) for n in lengths), shape.forward_flops(lengths))
    assert shape.forward_flops(lengths, num_head_tokens=0) == pytest.approx(
        shape.forward_flops(lengths) - 2 * shape.head_params * sum(lengths)
    )
