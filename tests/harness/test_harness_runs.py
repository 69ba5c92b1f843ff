"""Whole runs whose episodes are played by programs, over HTTP."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from hone.config.tree import EvaluateConfig, RLConfig
from hone.loops import reinforce
from hone.loops.evaluation import run_evaluation
from hone.models.tiny import make_tiny_model
from tests.door.test_clients import needs_pythons, with_package
from tests.harness.programs import command_of
from tests.tiny_runs import lines

TEMPLATE = (
    "{% for m in messages %}({{ m.role[0] }}:{{ m.content }}){% endfor %}"
    "{% if add_generation_prompt %}(a:{% endif %}"
)
TWO_TURNS = """
messages = [*TASK["messages"]]
log = []
for turn in range(2):
    answer = chat(messages, max_tokens=5)
    log.append(answer)
    messages += [said(answer), {"role": "user", "content": str(turn)}]
with open(os.path.join(os.environ["LOG"], TASK["columns"]["answer"] + str(os.getpid())), "w") as f:
    json.dump(log, f)
print("this is no score")
print(json.dumps({"score": len(said(log[-1])["content"]) % 2, "turns": 2}))
"""


BY_OPENAI = """
import json
import os
import sys

from openai import OpenAI

task, log = json.load(sys.stdin), []
messages = [*task["messages"]]
for turn in range(2):
    answer = OpenAI().chat.completions.create(
        model=os.environ["HONE_MODEL"],
        messages=messages,
        max_tokens=5,
        logprobs=True,
        extra_body={"return_token_ids": True},
    )
    log.append(answer.model_dump())
    said = answer.choices[0].message.content
    messages += [{"role": "assistant", "content": said}, {"role": "user", "content": str(turn)}]
with open(os.path.join(os.environ["LOG"], str(os.getpid())), "w") as file:
    json.dump(log, file)
print(json.dumps({"score": len(said) % 2, "turns": 2}))
"""
BY_ANTHROPIC = """
import json
import os
import sys

from anthropic import Anthropic

task, log = json.load(sys.stdin), []
messages = [*task["messages"]]
for turn in range(2):
    answer = Anthropic().messages.create(
        model=os.environ["HONE_MODEL"], messages=messages, max_tokens=5
    )
    log.append("".join(block.text for block in answer.content))
    messages += [{"role": "assistant", "content": log[-1]}, {"role": "user", "content": str(turn)}]
with open(os.path.join(os.environ["LOG"], str(os.getpid())), "w") as file:
    json.dump(log, file)
print(json.dumps({"score": len(log[-1]) % 2, "turns": 2}))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("harness")
    rows = [{"prompt": f"{n}+{n}", "answer": str(2 * n)} for n in range(8)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "template.jinja").write_text(TEMPLATE)
    (folder / "rewards.py").write_text(
        "def odd(completion):\n    return float(len(completion) % 2)\n"
    )
    make_tiny_model(folder / "model", hidden_size=16, num_layers=1)
    return folder


def configured(folder: Path, run_dir: Path, command: str, **sections: Any) -> RLConfig:
    tree: dict[str, Any] = {
        "model": {
            "path": str(folder / "model"),
            "chat_template": str(folder / "template.jinja"),
        },
        "data": {
            "train": [{"path": str(folder / "train.jsonl")}],
            "eval": [{"path": str(folder / "train.jsonl"), "max_rows": 2}],
        },
        "run": {"dir": str(run_dir), "steps": 2, "device": "cpu"},
        "rollout": {
            "prompts_per_step": 2,
            "n_samples_per_prompt": 2,
            "max_completion_tokens": 40,
        },
        "env": {"harness": {"command": command}},
        "log": {"to": [], "samples_per_step": 99},
    }
    return RLConfig.model_validate(tree | sections)


def run(cfg: RLConfig) -> list[dict[str, Any]]:
    reinforce.run(cfg)
    return lines(cfg.run.dir / "samples.jsonl")


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "log"
    folder.mkdir()
    monkeypatch.setenv("LOG", str(folder))
    return folder


def answers_in(log: Path) -> dict[tuple[int, ...], list[Any]]:
    """All answers that programs have logged, by prompt and answer as one sequence of ids."""
    found: dict[tuple[int, ...], list[Any]] = {}
    for file in log.iterdir():
        for answer in json.loads(file.read_text()):
            ids = (*answer["prompt_token_ids"], *answer["choices"][0]["token_ids"])
            found.setdefault(ids, []).append(answer)
    return found


def require_logged(sample: dict[str, Any], answers: dict[tuple[int, ...], list[Any]]) -> None:
    """Both sides have the same ids, log-probabilities and versions, turn by turn."""
    for turn in sample["turns"]:
        start, end = turn["start"], turn["end"]
        ids = (*sample["prompt_token_ids"], *sample["token_ids"][:end])
        logprobs = [
            [entry["logprob"] for entry in answer["choices"][0]["logprobs"]["content"]]
            for answer in answers[ids]
        ]
        assert sample["logprobs"][start:end] in logprobs
        assert sample["weight_versions"][end - 1] in [a["weight_version"] for a in answers[ids]]


MODES: dict[str, dict[str, Any]] = {
    "in turns": {},
    "carried over": {
        "rollout": {
            "prompts_per_step": 2,
            "n_samples_per_prompt": 2,
            "max_completion_tokens": 40,
            "oversample_prompts": 2,
        }
    },
    "ahead, paused": {"pipeline": {"max_staleness": 1}},
    "ahead, aborted": {"pipeline": {"max_staleness": 1, "in_flight": "abort"}},
    "ahead, finished": {"pipeline": {"max_staleness": 1, "in_flight": "finish"}},
}


@pytest.mark.parametrize("mode", MODES)
def test_a_run_trains_on_what_its_programs_were_sent(
    folder: Path, tmp_path: Path, log: Path, mode: str
) -> None:
    command = command_of(tmp_path, "two_turns", TWO_TURNS)
    sections = {
        "eval": {"every_n_steps": 2, "max_completion_tokens": 40},
        "run": {"dir": str(tmp_path / "run"), "steps": 4, "device": "cpu"},
    }
    samples = run(configured(folder, tmp_path / "run", command, **(sections | MODES[mode])))
    trained = [sample for sample in samples if sample["split"] == "train"]
    evaluated = [sample for sample in samples if sample["split"] == "eval"]
    assert len(trained) == 16
    assert evaluated
    answers = answers_in(log)
    for sample in samples:
        assert sample["failure"] is None, sample["failure_detail"]
        assert len(sample["turns"]) == 2
        assert sample["reward"] in (0.0, 1.0)
        assert sample["reward_parts"]["env/turns"] == 2.0
    for sample in trained:
        require_logged(sample, answers)


def played_by(
    python: str, program: str, folder: Path, tmp_path: Path, log: Path
) -> list[dict[str, Any]]:
    """The samples of a run whose program needs the packages of another Python."""
    for file in log.iterdir():
        file.unlink()
    place = tmp_path / "client.py"
    place.write_text(program)
    run_dir = tmp_path / python.replace("/", "-")
    samples = run(configured(folder, run_dir, shlex.join([python, str(place)])))
    assert len(samples) == 8
    assert [sample["failure"] for sample in samples] == [None] * 8
    return samples


@pytest.mark.slow
@needs_pythons
def test_a_run_is_driven_by_openais_package(folder: Path, tmp_path: Path, log: Path) -> None:
    for python in with_package("openai"):
        samples = played_by(python, BY_OPENAI, folder, tmp_path, log)
        answers = answers_in(log)
        for sample in samples:
            assert len(sample["turns"]) == 2
            require_logged(sample, answers)


@pytest.mark.slow
@needs_pythons
def test_a_run_is_driven_by_anthropics_package(folder: Path, tmp_path: Path, log: Path) -> None:
    """Its answers have no ids, so texts are compared."""
    for python in with_package("anthropic"):
        samples = played_by(python, BY_ANTHROPIC, folder, tmp_path, log)
        logs = sorted(json.loads(file.read_text()) for file in log.iterdir())
        texts = [
            [sample["text"][slice(*turn["chars"])] for turn in sample["turns"]]
            for sample in samples
        ]
        assert sorted(texts) == logs


def test_a_resumed_run_plays_interrupted_episodes_from_their_start(
    folder: Path, tmp_path: Path, log: Path
) -> None:
    """Carried-over episodes have no program in the new process."""
    command = command_of(tmp_path, "two_turns", TWO_TURNS)
    sections = MODES["carried over"] | {"checkpoint": {"every_n_steps": 1}}
    for steps in (1, 3):
        place = {"dir": str(tmp_path / "run"), "steps": steps, "device": "cpu"}
        samples = run(configured(folder, tmp_path / "run", command, **sections, run=place))
    assert {sample["step"] for sample in samples} == {1, 2, 3}
    assert all(sample["failure"] is None for sample in samples)


def test_an_evaluation_plays_by_programs(folder: Path, tmp_path: Path, log: Path) -> None:
    tree = configured(folder, tmp_path / "run", command_of(tmp_path, "two", TWO_TURNS))
    found = run_evaluation(
        EvaluateConfig.model_validate(
            {
                "model": tree.model.model_dump(include={"path", "chat_template"}),
                "data": {"eval": [{"path": str(folder / "train.jsonl")}]},
                "run": {"dir": str(tmp_path / "eval"), "device": "cpu"},
                "env": tree.env.model_dump(),
                "eval": {"max_completion_tokens": 40},
            }
        )
    )
    assert 0.0 <= found["eval/reward/mean"] <= 1.0
    samples = lines(tmp_path / "eval" / "eval_samples.jsonl")
    assert len(samples) == 8
    assert all(len(sample["turns"]) == 2 for sample in samples)
