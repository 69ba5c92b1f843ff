"""Whole runs whose episodes are played by programs, over HTTP."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hone.config.tree import RLConfig
from hone.loops import reinforce
from hone.models.tiny import make_tiny_model
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
        "data": {"train": [{"path": str(folder / "train.jsonl")}]},
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


def test_a_program_plays_all_episodes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log").mkdir()
    monkeypatch.setenv("LOG", str(tmp_path / "log"))
    command = command_of(tmp_path, "two_turns", TWO_TURNS)
    samples = run(configured(folder, tmp_path / "run", command))
    assert len(samples) == 8
    logs = [json.loads(file.read_text()) for file in (tmp_path / "log").iterdir()]
    for sample in samples:
        print(sample)
    print(logs[0])
