"""A run small enough to be repeated: two layers, one-digit sums, a handful of samples a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hone.config.tree import RLConfig
from hone.data.arithmetic import ALPHABET, generate, write_jsonl
from hone.models.tiny import make_char_tokenizer, make_tiny_model

MakeConfig = Callable[..., RLConfig]


@pytest.fixture(scope="session")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with `model`, `train.jsonl` and `eval.jsonl`."""
    folder = tmp_path_factory.mktemp("inputs")
    make_tiny_model(
        folder / "model",
        tokenizer=make_char_tokenizer(ALPHABET),
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=64,
        max_position_embeddings=64,
    )
    rows = generate(100, seed=0, low=0, high=9)
    write_jsonl(folder / "train.jsonl", rows[:80])
    write_jsonl(folder / "eval.jsonl", rows[80:])
    (folder / "rewards.py").write_text(
        "def even(completion):\n"
        "    return sum(c in '02468' for c in completion) / max(len(completion), 1)\n"
    )
    return folder


@pytest.fixture
def make_config(inputs: Path, tmp_path: Path) -> MakeConfig:
    """Builds the configuration of a run in `tmp_path`; keyword arguments override sections."""

    def make(**sections: dict[str, Any]) -> RLConfig:
        tree: dict[str, dict[str, Any]] = {
            "run": {"dir": tmp_path / "run", "steps": 3, "device": "cpu"},
            "model": {"path": str(inputs / "model")},
            "data": {
                "train": [{"path": str(inputs / "train.jsonl")}],
                "eval": [{"path": str(inputs / "eval.jsonl")}],
                "chat": "never",
                "max_prompt_tokens": 8,
            },
            "rollout": {
                "prompts_per_step": 4,
                "n_samples_per_prompt": 4,
                "max_completion_tokens": 8,
            },
            "engine": {"max_num_seqs": 16, "max_model_len": 32, "block_size": 4},
            "reward": {"functions": [{"fn": f"{inputs / 'rewards.py'}:even"}], "num_workers": 1},
            "trainer": {"optimizer": {"lr": 3e-3}, "logits_chunk_tokens": 64},
            "eval": {"max_completion_tokens": 8},
            "checkpoint": {"every_n_steps": 0},
            "log": {"tensorboard": False, "report": False},
        }
        for name, overrides in sections.items():
            tree[name] = tree.get(name, {}) | overrides
        return RLConfig.model_validate(tree)

    return make


def has_a_row(file: Path) -> bool:
    """Whether `metrics.jsonl` has a whole line: the last may be half written."""
    return file.exists() and "\n" in file.read_text()
