"""A run small enough to be repeated: two layers, one-digit sums, a handful of samples a step."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from hone.config.tree import RLConfig
from hone.data.arithmetic import ALPHABET, generate, write_jsonl
from hone.models.tiny import make_char_tokenizer, make_tiny_model


def write_inputs(
    folder: Path,
    *,
    head_dim: int = 16,
    num_kv_heads: int = 1,
    num_layers: int = 2,
    num_rows: int = 100,
    high: int = 9,
    **fields: Any,
) -> None:
    """`model`, of the `fields` of `make_tiny_model`, `train.jsonl`, `eval.jsonl` (the last 20 rows)
    and `rewards.py`."""
    make_tiny_model(
        folder / "model",
        tokenizer=make_char_tokenizer(ALPHABET),
        hidden_size=2 * head_dim,
        num_layers=num_layers,
        num_heads=2,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=4 * head_dim,
        max_position_embeddings=64,
        **fields,
    )
    rows = generate(num_rows, seed=0, low=0, high=high)
    write_jsonl(folder / "train.jsonl", rows[:-20])
    write_jsonl(folder / "eval.jsonl", rows[-20:])
    (folder / "rewards.py").write_text(
        "def even(completion):\n"
        "    return sum(c in '02468' for c in completion) / max(len(completion), 1)\n"
    )


def right_and_backwards() -> list[dict[str, str]]:
    """Pairs of the right answer to a sum and the same backwards, where these differ."""
    return [
        {"prompt": row["prompt"], "chosen": row["answer"], "rejected": row["answer"][::-1]}
        for row in generate(80, seed=0, low=0, high=99)
        if row["answer"] != row["answer"][::-1]
    ]


def make_classifier(
    folder: Path, *, family: str = "qwen3", pad: str | None = None, context: int = 64
) -> Path:
    """A model that scores at random, unlike for any two sequences."""
    tokenizer = make_char_tokenizer(ALPHABET)
    tokenizer.pad_token = pad or tokenizer.pad_token
    make_tiny_model(
        folder,
        tokenizer=tokenizer,
        family=family,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=64,
        max_position_embeddings=context,
    )
    torch.manual_seed(3)
    model = AutoModelForSequenceClassification.from_pretrained(folder, num_labels=1)
    model.config.pad_token_id = tokenizer.pad_token_id
    torch.nn.init.normal_(model.score.weight)
    model.save_pretrained(folder)
    return folder


def tiny_config(inputs: Path, run_dir: Path, **sections: dict[str, Any]) -> RLConfig:
    """A run on what `write_inputs` wrote; keyword arguments override keys of sections."""
    tree: dict[str, dict[str, Any]] = {
        "run": {"dir": run_dir, "steps": 3, "device": "cpu"},
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
        "engine": {"max_num_seqs": 16},
        "reward": {"functions": [{"fn": f"{inputs / 'rewards.py'}:even"}], "num_workers": 1},
        "trainer": {"optimizer": {"lr": 3e-3}, "logits_chunk_tokens": 64},
        "eval": {"max_completion_tokens": 8},
        "log": {"to": []},
    }
    for name, overrides in sections.items():
        tree[name] = tree.get(name, {}) | overrides
    return RLConfig.model_validate(tree)


def lines(file: Path) -> list[dict[str, Any]]:
    """The objects of a JSON lines file; none where there is no such file. The times of turns, which
    no two runs have in common, are left out."""
    rows = [json.loads(line) for line in file.open(encoding="utf-8")] if file.exists() else []
    for row in rows:
        for turn in row.get("turns") or ():
            for name in ("policy_s", "env_s"):
                turn.pop(name, None)
    return rows


def learning_config(
    inputs: Path, run_dir: Path, *, seed: int, steps: int = 20, lr: float = 6e-3, **sections: Any
) -> RLConfig:
    """Updates in which the reward of `rewards.py` rises from 0.3 to 0.8 or 0.9."""
    sizes = {"prompts_per_step": 8, "n_samples_per_prompt": 4}
    return tiny_config(
        inputs,
        run_dir,
        **sections
        | {
            "run": {"steps": steps, "seed": seed},
            "rollout": sizes | sections.get("rollout", {}),
            "algorithm": {"correction": {"kind": "tis"}} | sections.get("algorithm", {}),
            "trainer": {"optimizer": {"lr": lr}, "logits_chunk_tokens": 64},
            "eval": {"max_completion_tokens": 8},
        },
    )


def assert_all_learn_as_much(rewards: Mapping[str, Sequence[Sequence[float]]]) -> None:
    """The mean rewards of every step, for each mode and seed: all rise, and to the same level."""
    levels: dict[str, float] = {}
    for mode, runs in rewards.items():
        for run in runs:
            assert sum(run[-4:]) > sum(run[:4]) + 4 * 0.15, f"{mode}: {run}"
        levels[mode] = sum(sum(run[-4:]) for run in runs) / (4 * len(runs))
    assert max(levels.values()) - min(levels.values()) < 0.12, levels
