"""Runs of text alone on a model with a tower and a head for further tokens, which stay as they
are."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from tests.checkpoint.test_unread import WEIGHTS, add, mtp
from tests.tiny_runs import lines, write_inputs

import hone
from hone.data.arithmetic import ALPHABET
from hone.models.tiny_vision import make_tiny_vision_model, make_vision_tokenizer


def test_what_a_run_does_not_train_is_in_its_model(tmp_path: Path) -> None:
    """Also in that of a run that goes on from a checkpoint."""
    write_inputs(tmp_path)
    folder = make_tiny_vision_model(
        tmp_path / "whole",
        family="qwen3_5",
        tokenizer=make_vision_tokenizer("qwen3_5", ALPHABET),
        hidden_size=32,
        num_layers=2,
        intermediate_size=48,
        tower_layers=1,
    )
    before = load_file(add(folder, mtp(32)) / WEIGHTS)
    for steps in (1, 2):
        result = hone.rl(
            model={"path": str(folder)},
            data=str(tmp_path / "train.jsonl"),
            reward=f"{tmp_path}/rewards.py:even",
            run={"steps": steps, "device": "cpu", "dir": tmp_path / "run"},
            rollout={
                "prompts_per_step": 2,
                "n_samples_per_prompt": 4,
                "max_completion_tokens": 8,
            },
            engine={"max_num_seqs": 8},
            trainer={"optimizer": {"lr": 3e-3}},
            log={"to": []},
        )
        after = load_file(result.run_dir / "model" / WEIGHTS)
        assert after.keys() == before.keys()
        for name, tensor in after.items():
            assert tensor.dtype == before[name].dtype, name
            if name.startswith(("mtp.", "model.visual.")):
                assert torch.equal(tensor, before[name]), name
    assert any(not torch.equal(after[name], before[name]) for name in after)
    rows = [row for row in lines(tmp_path / "run" / "metrics.jsonl") if "train/loss" in row]
    assert [row["step"] for row in rows] == [1, 2]
    assert all(row["off_policy/mismatch_kl"] < 1e-9 for row in rows)
