"""Whole runs with environments in which functions of whole groups and a reward model score."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from hone.cli.main import main
from hone.config.tree import EvaluateConfig, RLConfig
from hone.loops import reinforce
from hone.loops.evaluation import run_evaluation
from hone.observe.episode_rows import read_turns
from tests.tiny_runs import lines, make_classifier, tiny_config, write_inputs

CODE = '''
from hone.envs import Observation


def answer(turns, must_end):
    """One to three turns, which end with a reward where the last one is odd, and else without."""
    if must_end or len(turns) == 3 or turns[-1][:1] in tuple("0123"):
        return 0.5 if turns[-1][-1:] in tuple("13579") else None
    return Observation(f"={len(turns[-1])}=", role=None, reward=0.25, max_tokens=3)


class Stateless:
    def step(self, episode):
        return answer(episode.turns, episode.must_end)


class Live:
    def start(self, row):
        self.turns = []
        return f"{row.seed % 7}="

    def step(self, action):
        self.turns.append(action.text)
        return answer(self.turns, action.must_end)

    def finish(self):
        return None


def own(completion):
    return len(completion) / 8


def rank(completions, log_metric, **columns):
    log_metric("size", len(completions))
    return [sum(len(other) < len(text) for other in completions) / 4 for text in completions]


def double(x: int) -> int:
    """Double a number.

    Args:
        x: The number
    """
    return 2 * x
'''
AHEAD: dict[str, Any] = {
    "pipeline": {"max_staleness": 2},
    "algorithm": {"correction": {"kind": "tis"}},
}
CARRIED: dict[str, Any] = {"rollout": {"oversample_prompts": 3}}
WEIGHT = 0.5


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("scored")
    write_inputs(folder)
    (folder / "code.py").write_text(CODE)
    make_classifier(folder / "judge")
    return folder


def rewards(inputs: Path, **model: Any) -> dict[str, Any]:
    code, path = inputs / "code.py", str(inputs / "judge")
    return {
        "functions": [
            {"fn": f"{code}:rank", "whole_groups": True, "weight": 2.0},
            {"fn": f"{code}:own"},
        ],
        "model": {"path": path, "weight": WEIGHT, "max_tokens_per_forward": 128} | model,
        "clip": [-1.0, 2.0],
        "num_workers": 2,
    }


def configured(inputs: Path, folder: Path, **sections: Any) -> RLConfig:
    rollout = {"prompts_per_step": 4, "n_samples_per_prompt": 4, "max_completion_tokens": 24}
    defaults = {
        "log": {"to": [], "samples_per_step": 999},
        "reward": rewards(inputs),
        "run": {"dir": folder, "steps": 3},
        "eval": {"every_n_steps": 2, "max_completion_tokens": 24, "n_samples_per_prompt": 3},
    }
    rollout |= sections.pop("rollout", {})
    return tiny_config(inputs, folder, **defaults | sections, rollout=rollout)


def env(inputs: Path, name: str) -> dict[str, Any]:
    """With turns so short that three of them and what is said between them always fit."""
    return {"path": f"{inputs / 'code.py'}:{name}", "max_turn_tokens": 5}


class Judge:
    """The reward model, by transformers alone."""

    def __init__(self, folder: Path) -> None:
        self._model = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=torch.float32
        ).eval()
        self._tokenizer = AutoTokenizer.from_pretrained(folder)

    def __call__(self, text: str, *, ends: bool) -> float:
        text += self._tokenizer.eos_token if ends else ""
        ids = self._tokenizer(text, add_special_tokens=False, return_tensors="pt").input_ids
        with torch.no_grad():
            return float(self._model(ids).logits[0, 0])


def is_scored_by_env(row: Mapping[str, Any]) -> bool:
    turns = read_turns(row)
    assert turns is not None
    return turns[-1].text[-1:] in tuple("13579")


def assert_scored(rows: Sequence[Mapping[str, Any]], judge: Judge, *, num_samples: int) -> None:
    """Each row has the reward that is computed from the texts of its group."""
    groups: dict[tuple[Any, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        groups.setdefault((row.get("step"), row["prompt_id"]), []).append(row)
    for samples in groups.values():
        assert len(samples) == num_samples
        left = [row["text"] for row in samples if not is_scored_by_env(row)]
        for row in samples:
            assert row["failure"] is None, row["failure_detail"]
            turns = row["turns"]
            earned = 0.25 * (len(turns) - 1)
            expected: dict[str, float] = {}
            if is_scored_by_env(row):
                expected["env"] = earned + 0.5
            else:
                expected |= {"env": earned} if earned else {}
                expected["own"] = len(row["text"]) / 8
                expected["rank"] = sum(len(text) < len(row["text"]) for text in left) / 4
                expected["rank/size"] = len(left)
            ends = turns[-1]["stop_reason"] != "length"
            expected["reward_model"] = judge(row["prompt"] + row["text"], ends=ends)
            assert row["reward_parts"] == pytest.approx(expected, abs=1e-5)
            total = expected.get("env", 0.0) + expected.get("own", 0.0)
            total += 2.0 * expected.get("rank", 0.0) + WEIGHT * expected["reward_model"]
            assert row["reward"] == pytest.approx(min(max(total, -1.0), 2.0), abs=1e-5)
    assert {"rank" in row["reward_parts"] for row in rows} == {True, False}
    assert len({len(row["turns"]) for row in rows}) > 1


@pytest.mark.parametrize(
    ("name", "sections"),
    [("Stateless", CARRIED), ("Live", AHEAD)],
    ids=["without memory, carried over", "sessions, ahead"],
)
def test_every_sample_of_a_run_has_the_reward_of_its_episode_and_group(
    inputs: Path, tmp_path: Path, name: str, sections: dict[str, Any]
) -> None:
    """In training and in its evaluations: the environment's own score or those of functions, one by
    one and of the group, and the reward model's, in one clipped sum."""
    cfg = configured(inputs, tmp_path, env=env(inputs, name), **sections)
    reinforce.run(cfg)
    samples, judge = lines(tmp_path / "samples.jsonl"), Judge(inputs / "judge")
    of_split = {
        split: [row for row in samples if row["split"] == split] for split in ("train", "eval")
    }
    assert_scored(of_split["train"], judge, num_samples=4)
    assert_scored(of_split["eval"], judge, num_samples=3)
    assert len(of_split["train"]) == 3 * 4 * 4


def test_an_evaluation_and_batch_inference_score_the_same(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the best of a group is chosen by its rewards."""
    cfg = EvaluateConfig.model_validate(
        {
            "run": {"dir": tmp_path / "eval", "device": "cpu"},
            "model": {"path": str(inputs / "model")},
            "data": {
                "eval": [{"path": str(inputs / "eval.jsonl"), "max_rows": 6}],
                "chat": "never",
            },
            "reward": rewards(inputs),
            "env": env(inputs, "Live"),
            "eval": {"max_completion_tokens": 24, "n_samples_per_prompt": 4},
        }
    )
    found = run_evaluation(cfg)
    rows = lines(tmp_path / "eval" / "eval_samples.jsonl")
    assert len(rows) == 24
    assert_scored(rows, Judge(inputs / "judge"), num_samples=4)
    mean = sum(row["reward"] for row in rows) / len(rows)
    assert found["eval/reward/mean"] == pytest.approx(mean)

    monkeypatch.chdir(tmp_path)
    flags = [f"--model.path={inputs / 'model'}", "--run.device=cpu", "--data.chat=never"]
    flags += [f"--data.train.0.path={inputs / 'eval.jsonl'}", "--data.train.0.max_rows=6"]
    flags += ["--n_samples_per_prompt=4", "--generation.max_completion_tokens=24"]
    flags += [f"--env.path={inputs / 'code.py'}:Live", "--env.max_turn_tokens=5"]
    flags += [f"--reward.functions={json.dumps(rewards(inputs)['functions'])}"]
    flags += [f"--reward.model.path={inputs / 'judge'}", f"--reward.model.weight={WEIGHT}"]
    flags += ["--reward.clip=[-1,2]"]
    for keep in ("all", "best"):
        assert main(["generate", *flags, f"--keep={keep}", f"--output={keep}.jsonl"]) == 0
    written = [row | {"text": row["completion"]} for row in lines(tmp_path / "all.jsonl")]
    assert_scored(written, Judge(inputs / "judge"), num_samples=4)
    groups: dict[str, list[float]] = {}
    for row in written:
        groups.setdefault(row["prompt_id"], []).append(row["reward"])
    best = [row["reward"] for row in lines(tmp_path / "best.jsonl")]
    assert best == pytest.approx([max(group) for group in groups.values()])
