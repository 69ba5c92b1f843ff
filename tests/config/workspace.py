"""A folder with a small model and data set in it, and flags that use them without a finding."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from hone.families.vision import gemma3, qwen3_vl
from tests.config.trees import WALKED

CONTEXT = 4096
VOCAB_SIZE = 1000
MODEL_CONFIG = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": CONTEXT,
    "tie_word_embeddings": True,
}

OTHERS: dict[str, dict[str, object]] = {
    "gemma2": {"model_type": "gemma2"},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 8},
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "glm4_moe": {
        "model_type": "glm4_moe",
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
    },
    "hybrid": {
        "model_type": "qwen3_5_text",
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "linear_conv_kernel_dim": 4,
    },
    "glm4": {"model_type": "glm4"},
    "gpt2": {"model_type": "gpt2", "hidden_size": None},
    "quantised": {"quantization_config": {"quant_method": "awq"}},
    "chunked": {"layer_types": ["chunked_attention"] * 2},
    "dynamic": {"rope_scaling": {"type": "dynamic", "factor": 2.0}},
    "gelu": {"hidden_act": "gelu"},
    "odd": {"hidden_size": 36, "intermediate_size": 36, "head_dim": 9},
    "wide": {"head_dim": 32},
    "large": {"head_dim": 8192, "num_key_value_heads": 4},
    "impossible": {"num_hidden_layers": -1},
    "narrow": {"vocab_size": 1},
    "one_key_head": {"num_key_value_heads": 1},
    "three_heads": {"num_attention_heads": 3, "num_key_value_heads": 1},
}
"""Models that differ from `model` in these fields of their `config.json`."""

VISION: dict[str, Any] = {
    "qwen3_vl": qwen3_vl.SPEC.public["qwen3-vl-2b"],
    "gemma3": gemma3.SPEC.public["gemma-3-4b"],
    "seeing_judge": {
        **gemma3.SPEC.public["gemma-3-4b"],
        "architectures": ["Gemma3ForSequenceClassification"],
        "id2label": {"0": "LABEL_0"},
    },
    "llava": {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model"}},
}
"""Vision-language models, of which one is not served."""

_CLASSIFIER = {"architectures": ["Qwen3ForSequenceClassification"]}
JUDGES: dict[str, dict[str, object]] = {
    "judge": {**_CLASSIFIER, "id2label": {"0": "LABEL_0"}},
    "short": {**_CLASSIFIER, "id2label": {"0": "LABEL_0"}, "max_position_embeddings": 512},
    "two": _CLASSIFIER,
    "small_judge": {**_CLASSIFIER, "id2label": {"0": "LABEL_0"}, "vocab_size": 1},
    "language": {"architectures": ["Qwen3ForCausalLM"]},
}
"""Likewise, but for what scores."""


_ROWS_OF_A_STEP = 64

BASE = {name: [*tree.checked] for name, tree in WALKED.items()}
"""Flags of each command with which `hone check` has nothing to say."""


def fill(folder: Path) -> None:
    """Write the files that `BASE` names, and reward files good and bad."""
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(MODEL_CONFIG))
    (model / "tokenizer.json").write_text('{"model": {"vocab": {"a": 0, "b": 1}}}')
    (model / "chat_template.jinja").write_text("{{ messages }}")
    (model / "model.safetensors").write_bytes(b"")
    pair = '{"prompt": "1+1=", "chosen": "2", "rejected": "3"}\n'
    row = '{"prompt": "1+1=", "answer": "2", "completion": "2"}\n'
    (folder / "pairs.jsonl").write_text(_ROWS_OF_A_STEP * pair)
    (folder / "train.jsonl").write_text(_ROWS_OF_A_STEP * row)
    (folder / "notes.txt").write_text("no data set")
    (folder / "bare").mkdir()
    (folder / "bare" / "config.json").write_text(json.dumps(MODEL_CONFIG))
    (folder / "bare" / "tokenizer.json").write_text("{}")
    (folder / "mute").mkdir()
    (folder / "mute" / "config.json").write_text(json.dumps(MODEL_CONFIG))
    (folder / "mute" / "model.safetensors").write_bytes(b"")
    for name, fields in OTHERS.items():
        shutil.copytree(model, folder / name)
        (folder / name / "config.json").write_text(json.dumps(MODEL_CONFIG | fields))
    for name, fields in JUDGES.items():
        shutil.copytree(model, folder / name)
        (folder / name / "config.json").write_text(json.dumps(MODEL_CONFIG | fields))
    for name, config in VISION.items():
        shutil.copytree(model, folder / name)
        (folder / name / "config.json").write_text(json.dumps(config))
    shutil.copytree(model, folder / "foreign")
    (folder / "foreign" / "tokenizer.json").write_text('{"model": {"vocab": [["a", 0], ["c", 0]]}}')
    (folder / "empty").mkdir()
    (folder / "scores.py").write_text("def score(completion, answer):\n    return 1.0\n")
    (folder / "ranks.py").write_text(
        "def rank(completions):\n    return [1.0]\n\n"
        "def needy(completions, environments):\n    return [1.0]\n\n"
        "def hoping(completions, environments=None):\n    return [1.0]\n"
    )
    (folder / "labels.py").write_text("def score(queries, prompts, labels):\n    return [1.0]\n")
    (folder / "imports.py").write_text(
        "from __future__ import annotations\nimport json\nimport scores, no_such_module.deep\n"
        "def score(completion):\n    return 1.0\n"
        "class Game:\n    def step(self, episode):\n        return 1.0\n"
    )
    (folder / "relative.py").write_text("from . import scores\ndef score(completion): return 1.0\n")
    (folder / "own_path.py").write_text(
        "import sys\nsys.path.append('lib')\nimport in_lib\ntry:\n    import no_such\n"
        "except ImportError:\n    pass\ndef score(completion): return 1.0\n"
    )
    (folder / "silent.py").write_text("def score():\n    return 1.0\n")
    (folder / "needy.py").write_text("def score(completion, depth):\n    return 1.0\n")
    (folder / "envs.py").write_text(
        "class Game:\n    def step(self, episode):\n        return 1.0\n"
        "class Mute:\n    def stop(self, episode):\n        return 1.0\n"
    )
    (folder / "broken.py").write_text("def score(:\n")
