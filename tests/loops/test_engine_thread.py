"""Sampling ahead in one process: the engine works in a thread beside the trainer."""

from __future__ import annotations

import json
import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tests.loops.conftest import MakeConfig

from hone.config.tree import RLConfig
from hone.distributed.pool import WorkersLostError
from hone.engine.engine import EmbeddedEngine
from hone.loops import reinforce
from hone.loops.step import Outcome
from hone.trainer.trainer import Trainer

AHEAD: dict[str, Any] = {
    "pipeline": {"enabled": True, "max_staleness": 2, "async_queue_size": 2},
    "algorithm": {"correction": {"kind": "tis"}},
    "log": {"samples_per_step": 99},
}


def rows(cfg: RLConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (cfg.run.dir / "metrics.jsonl").read_text().splitlines()]


def samples(cfg: RLConfig) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (cfg.run.dir / "samples.jsonl").read_text().splitlines()]


def test_R19_a_staleness_of_0_in_a_thread_is_the_synchronous_run(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """The engine begins a group while it gets the next: the last bits may differ."""
    log = {"samples_per_step": 99}
    sync = make_config(run={"dir": tmp_path / "sync"}, log=log)
    pipeline = {"enabled": True, "max_staleness": 0}
    thread = make_config(run={"dir": tmp_path / "thread"}, log=log, pipeline=pipeline)
    for cfg in (sync, thread):
        reinforce.run(cfg)
    assert [s["token_ids"] for s in samples(thread)] == [s["token_ids"] for s in samples(sync)]
    expected = load_file(sync.run.dir / "model" / "model.safetensors")
    for name, value in load_file(thread.run.dir / "model" / "model.safetensors").items():
        torch.testing.assert_close(value, expected[name], rtol=1e-5, atol=1e-6)


def test_R19_a_thread_trains_every_prompt_once_within_the_bound_through_an_interruption(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C in the third update saves after it; the second launch resumes what was in flight."""
    cfg = make_config(run={"steps": 8}, eval={"every_n_steps": 3}, **AHEAD)
    update, num_updates = Trainer.update, 0

    def interrupted(self: Trainer, *args: Any, **kwargs: Any) -> Any:
        nonlocal num_updates
        num_updates += 1
        if num_updates == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return update(self, *args, **kwargs)

    monkeypatch.setattr(Trainer, "update", interrupted)
    outcome = reinforce.run(cfg)
    assert outcome == Outcome(3, stopped_by=signal.SIGINT)
    state = json.loads(
        (cfg.run.dir / "checkpoints" / f"step_{outcome.steps}" / "rollout.json").read_text()
    )
    assert state["groups"]
    reinforce.run(cfg)
    assert [row["step"] for row in rows(cfg)] == list(range(1, 9))
    assert 0 < max(row["rollout/staleness/max"] for row in rows(cfg)) <= 2
    found = samples(cfg)
    assert Counter(s["prompt_id"] for s in found) == dict.fromkeys(
        {s["prompt_id"] for s in found}, 4
    )
    assert len(found) == 8 * 4 * 4


def test_an_error_in_the_thread_ends_the_run_with_its_cause(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    step = EmbeddedEngine.step
    num_steps = 0

    def fails(self: EmbeddedEngine) -> Any:
        nonlocal num_steps
        num_steps += 1
        if num_steps > 30:
            raise ZeroDivisionError("the sampler divides by zero")
        return step(self)

    monkeypatch.setattr(EmbeddedEngine, "step", fails)
    cfg = make_config(run={"steps": 50}, **AHEAD)
    with pytest.raises(WorkersLostError, match=r"thread of this process.*divides by zero"):
        reinforce.run(cfg)
    events = [json.loads(x) for x in (cfg.run.dir / "events.jsonl").read_text().splitlines()]
    assert "divides by zero" in events[-1]["message"]


def test_adapters_and_the_reference_train_beside_a_thread(make_config: MakeConfig) -> None:
    sections = AHEAD | {
        "model": {"path": make_config().model.path, "lora": {"rank": 2}},
        "algorithm": {"correction": {"kind": "tis"}, "kl": {"coef": 0.05}},
    }
    cfg = make_config(eval={"at_start": True}, **sections)
    reinforce.run(cfg)
    assert [row["step"] for row in rows(cfg)] == [0, 1, 2, 3]
    assert all("policy/ref_kl" in row for row in rows(cfg)[1:])
