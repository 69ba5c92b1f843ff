"""Whole runs in which memory ends midway: they learn what a run with enough of it learns."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.loops.conftest import MakeConfig
from tests.tiny_runs import lines

from hone.config.load import dump_config
from hone.loops import reinforce
from hone.trainer.out_of_memory import NOTES
from hone.trainer.parallel_model import ParallelModel

SECTIONS: dict[str, Any] = {
    "trainer": {
        "optimizer": {"lr": 3e-3},
        "logits_chunk_tokens": 64,
        "max_tokens_per_microbatch": 128,
    },
    "checkpoint": {"every_n_steps": 1},
    "algorithm": {"kl": {"coef": 0.01}},
}
LIMITED = """
import os
if os.environ.get("RANK") == "1":
    import torch
    from hone.trainer.parallel_model import ParallelModel
    forward, count = ParallelModel.forward, [0]

    def limited(self, batch, outputs):
        count[0] += torch.is_grad_enabled()
        if torch.is_grad_enabled() and count[0] > 1 and batch.num_tokens > 45:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(self, batch, outputs)

    ParallelModel.forward = limited
"""
"""Rank 1 has room for one large pass in each launch, as before there are moments. Its passes have
64 and 52 tokens, since rows of a group share their prompt."""


def assert_same_weights(one: Path, other: Path) -> None:
    weights = [load_file(folder / "model" / "model.safetensors") for folder in (one, other)]
    for name, tensor in weights[0].items():
        assert float((tensor - weights[1][name]).abs().max()) < 1e-5, name


@pytest.mark.slow
def test_a_run_of_one_process_goes_on_with_less(
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    calm = make_config(run={"dir": tmp_path / "calm"}, **SECTIONS)
    reinforce.run(calm)
    forward = ParallelModel.forward

    def limited(self: ParallelModel, batch: Any, outputs: Any) -> Any:
        if batch.num_tokens > (60 if torch.is_grad_enabled() else 100):
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(self, batch, outputs)

    monkeypatch.setattr(ParallelModel, "forward", limited)
    cfg = make_config(run={"dir": tmp_path / "short", "steps": 2}, **SECTIONS)
    with caplog.at_level(logging.WARNING):
        reinforce.run(cfg)
        assert "trainer.max_tokens_per_microbatch " in caplog.text
        assert "trainer.max_tokens_per_forward " in caplog.text
        caplog.clear()
        reinforce.run(make_config(run={"dir": tmp_path / "short"}, **SECTIONS))
    assert "computed again" not in caplog.text, "the second launch begins with what fits"
    rows = lines(cfg.run.dir / "metrics.jsonl")
    assert [row.get("mem/policy_replays", 0) for row in rows] == [2, 0, 0]
    assert [row.get("mem/reference_replays", 0) for row in rows] == [1, 0, 0]
    assert all(row["mem/policy_backward_cap"] <= 60 for row in rows)
    alarms = [e["name"] for e in lines(cfg.run.dir / "events.jsonl") if e["kind"] == "alarm"]
    assert "out_of_memory" in alarms
    assert_same_weights(calm.run.dir, cfg.run.dir)


@pytest.mark.slow
def test_two_processes_start_again_with_less(make_config: MakeConfig, tmp_path: Path) -> None:
    calm = make_config(run={"dir": tmp_path / "calm"}, **SECTIONS)
    reinforce.run(calm)
    (tmp_path / "sitecustomize.py").write_text(LIMITED)
    cfg = make_config(run={"dir": tmp_path / "short"}, **SECTIONS)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(dump_config(cfg))
    path = f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"
    done = subprocess.run(
        [sys.executable, "-m", "hone", "rl", str(recipe), "--nproc", "2"],
        capture_output=True,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("starting 2 processes again") == 1, done.stderr
    assert "going on after step 1" in done.stderr
    notes = json.loads((cfg.run.dir / NOTES).read_text(encoding="utf-8"))
    assert notes["policy/backward"]["configured"] == 128
    assert notes["policy/backward"]["now"] <= 45
    assert_same_weights(calm.run.dir, cfg.run.dir)
