"""Whole commands whose rewards come from a service and from a judge."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.rewards.serving import Server, serving
from tests.tiny_runs import learning_config, lines

from hone.cli.main import main
from hone.config.tree import RLConfig
from hone.errors import UserError
from hone.loops import reinforce

KEY = "sk-verySecret_42"


@pytest.fixture
def server() -> Iterator[Server]:
    with serving() as server:
        yield server


def test_a_run_does_not_load_a_model_without_its_service(
    make_config: Callable[..., RLConfig], monkeypatch: pytest.MonkeyPatch, server: Server
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(reinforce, "load_for_training", load)
    reward = {"functions": [{"fn": f"{server.url}/missing_page"}], "timeout_s": 60}
    with pytest.raises(UserError, match=r"missing_page: HTTP status 404 \(Not Found\)"):
        reinforce.run(make_config(reward=reward))


@pytest.mark.slow
def test_a_policy_learns_from_a_service_as_from_a_function(
    inputs: Path, tmp_path: Path, server: Server
) -> None:
    names = {"service": f"{server.url}/get_reward", "function": f"{inputs / 'rewards.py'}:even"}
    curves: dict[str, list[float]] = {}
    for name, fn in names.items():
        reward = {"functions": [{"fn": fn}], "num_workers": 2}
        cfg = learning_config(inputs, tmp_path / name, seed=1, reward=reward)
        reinforce.run(cfg)
        rows = lines(cfg.run.dir / "metrics.jsonl")
        curves[name] = [row["reward/mean"] for row in rows if "reward/mean" in row]
    assert curves["service"] == curves["function"]
    assert curves["service"][-1] > curves["service"][0] + 0.15
    last = lines(tmp_path / "service" / "metrics.jsonl")[-1]
    assert last["reward/127.0.0.1_get_reward/mean"] == last["reward/mean"]


@pytest.mark.slow
def test_a_judge_scores_in_every_command_and_its_key_is_written_nowhere(
    inputs: Path,
    tmp_path: Path,
    server: Server,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    args = {
        "base_url": f"{server.url}/v1",
        "model": "m",
        "template": "{prompt}{completion}",
        "pattern": r"Score: (\d+)",
        "headers": {"Authorization": "Bearer $JUDGE_KEY"},
    }
    functions = [{"fn": "judge", "args": args}, {"fn": "exact_match"}]
    run: dict[str, Any] = {
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
        "reward": {"functions": functions, "num_workers": 2},
        "run": {"dir": str(tmp_path / "run"), "steps": 2, "device": "cpu"},
        "generation": {"max_completion_tokens": 8},
        "eval": {"max_completion_tokens": 8, "every_n_steps": 2},
    }
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(json.dumps(run))
    for command in (["rl"], ["eval"], ["generate", f"--output={tmp_path / 'rows.jsonl'}"]):
        before = len(server.requests)
        assert main([command[0], str(recipe), *command[1:]]) == 0, capfd.readouterr().err
        assert len(server.requests) > before
    assert {headers["Authorization"] for _, headers, _ in server.requests} == {f"Bearer {KEY}"}
    rows = lines(tmp_path / "run" / "metrics.jsonl")
    assert any("reward/judge/mean" in row for row in rows)
    assert any("eval/reward/judge/mean" in row for row in rows)
    assert all(row["reward"] is not None for row in lines(tmp_path / "rows.jsonl"))
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(written) > 10
    assert [path for path in written if KEY.encode() in path.read_bytes()] == []
    told = capfd.readouterr()
    assert KEY not in told.out + told.err
