"""Runs with tools, and with environments of other shapes: from the key to the sample."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hone.cli import env
from hone.config.tree import RLConfig
from hone.envs.tools.formats.registry import parse
from hone.errors import UserError
from hone.loops import reinforce
from hone.models.tiny import make_tiny_model
from hone.observe.episode_rows import read_turns
from tests.tiny_runs import lines

TEMPLATE = (
    "{% if tools %}{% for tool in tools %}[{{ tool.function.name }}]{% endfor %}{% endif %}"
    "{% for m in messages %}({{ m.role[0] }}:{{ m.content }}){% endfor %}"
    "{% if add_generation_prompt %}(a:{% endif %}"
    "{# <tool_call>{'name': 'f', 'arguments': {}}</tool_call> #}"
)
TOOLS = '''
import time


def double(x: int) -> int:
    """Double a number.

    Args:
        x: The number
    """
    return 2 * int(x)


class Counter:
    """An environment of TRL."""

    def reset(self, **row) -> str | None:
        self.calls = 0
        return f" count {row['answer']}"

    def count(self, by: str) -> str:
        """Count.

        Args:
            by: How far
        """
        self.calls += 1
        return f"at {self.calls}"

    def get_reward(self) -> float:
        return float(self.calls)


def any_answer(completion, answer):
    return float(len(completion) % 2)


def shares(completions, **columns):
    total = sum(map(len, completions)) or 1
    return [len(text) / total for text in completions]
'''


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tools")
    (folder / "tools.py").write_text(TOOLS)
    rows = [{"prompt": f"{n}+{n}", "answer": str(2 * n)} for n in range(8)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "template.jinja").write_text(TEMPLATE)
    make_tiny_model(folder / "model", hidden_size=16, num_layers=1)
    return folder


def configured(folder: Path, run_dir: Path, **sections: Any) -> RLConfig:
    tree: dict[str, Any] = {
        "model": {
            "path": str(folder / "model"),
            "chat_template": str(folder / "template.jinja"),
        },
        "data": {"train": [{"path": str(folder / "train.jsonl")}]},
        "run": {"dir": str(run_dir), "steps": 2, "device": "cpu"},
        "rollout": {
            "prompts_per_step": 2,
            "n_samples_per_prompt": 4,
            "max_completion_tokens": 60,
        },
        "reward": {"functions": [{"fn": f"{folder / 'tools.py'}:any_answer"}], "num_workers": 1},
        "log": {"to": [], "samples_per_step": 99},
    }
    return RLConfig.model_validate(tree | sections)


def run(cfg: RLConfig) -> list[dict[str, Any]]:
    reinforce.run(cfg)
    return lines(cfg.run.dir / "samples.jsonl")


def test_tools_are_shown_and_a_turn_without_calls_is_scored(folder: Path, tmp_path: Path) -> None:
    settings = {"tools": [f"{folder / 'tools.py'}:double"], "max_turns": 3, "max_turn_tokens": 6}
    samples = run(configured(folder, tmp_path, env=settings))
    for sample in samples:
        assert sample["prompt"].startswith("[double](u:")
        assert sample["failure"] is None
        assert len(sample["turns"]) == 1
        assert sample["reward"] == len(sample["text"]) % 2
        assert sample["reward_parts"]["env/tools/calls"] == 0.0
        assert not parse(sample["text"], "hermes", {}).calls


def test_episodes_with_tools_are_compared(folder: Path, tmp_path: Path) -> None:
    """By a function of whole groups, which gets the texts of all episodes of a prompt."""
    settings = {"tools": [f"{folder / 'tools.py'}:double"], "max_turns": 3, "max_turn_tokens": 6}
    function = {"fn": f"{folder / 'tools.py'}:shares", "whole_groups": True}
    rewards = {"functions": [function], "num_workers": 1}
    samples = run(configured(folder, tmp_path, env=settings, reward=rewards))
    groups: dict[str, list[dict[str, Any]]] = {}
    for sample in samples:
        groups.setdefault(sample["id"].rpartition("/")[0], []).append(sample)
    for group in groups.values():
        lengths = [len(sample["text"]) for sample in group]
        assert len(lengths) == 4
        for sample in group:
            assert sample["failure"] is None
            assert sample["reward"] == pytest.approx(len(sample["text"]) / (sum(lengths) or 1))


def test_an_environment_of_trl_trains_unchanged(folder: Path, tmp_path: Path) -> None:
    settings = {"path": f"{folder / 'tools.py'}:Counter", "max_turns": 3}
    for sample in run(configured(folder, tmp_path, env=settings)):
        assert sample["prompt"].startswith("[count](u:")
        assert f" count {sample['answer']})" in sample["prompt"]
        assert sample["failure"] is None
        assert sample["reward"] == 0.0


def test_a_template_without_tools_is_refused_before_the_model(folder: Path, tmp_path: Path) -> None:
    plain = tmp_path / "plain.jinja"
    plain.write_text(TEMPLATE.partition("{% endif %}")[2])
    settings = {"tools": [f"{folder / 'tools.py'}:double"]}
    model = {"path": str(folder / "model"), "chat_template": str(plain)}
    with pytest.raises(UserError, match="tools"):
        run(configured(folder, tmp_path / "run", env=settings, model=model))


def test_a_template_that_cannot_go_on_is_refused_before_the_model(
    folder: Path, tmp_path: Path
) -> None:
    rewrites = tmp_path / "rewrites.jinja"
    rewrites.write_text("{% if messages | length > 1 %}again{% endif %}" + TEMPLATE)
    settings = {"tools": [f"{folder / 'tools.py'}:double"]}
    model = {"path": str(folder / "model"), "chat_template": str(rewrites)}
    with pytest.raises(UserError, match="answers of the environment's tools cannot follow"):
        run(configured(folder, tmp_path / "run", env=settings, model=model))


def test_calls_are_run_and_answered_in_their_order(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By scripted turns, through the runner and the workers of training."""
    calls = ['{"name": "double", "arguments": {"x": 4}}', '{"name": "duoble", "arguments": {}}']
    script = ["".join(f"<tool_call>{call}</tool_call>" for call in calls), "done"]
    (tmp_path / "script.json").write_text(json.dumps(script))
    output = tmp_path / "episodes.jsonl"
    flags = [
        f"--env.tools=[{folder / 'tools.py'}:double]",
        f"--reward.functions=[{{fn: '{folder / 'tools.py'}:any_answer'}}]",
        f"--data.train=[{{path: {folder / 'train.jsonl'}}}]",
        f"--model.path={folder / 'model'}",
        f"--model.chat_template={folder / 'template.jinja'}",
        "--rollout.max_completion_tokens=400",
    ]
    given = [f"--script={tmp_path / 'script.json'}", f"--json={output}"]
    assert env.run(["try", "--rows=1", *given, *flags]) == 0
    (sample,) = lines(output)
    assert sample["prompt"].startswith("[double](u:")
    turns = read_turns(sample)
    assert turns is not None
    first, last = turns
    assert [said.text for said in first.observed] == [
        "8",
        json.dumps({"error": "there is no tool 'duoble'. Did you mean 'double'? Tools: double."}),
    ]
    assert last.text == "done"
    parts = sample["reward_parts"]
    assert (parts["env/tools/calls"], parts["env/tools/errors_unknown_tool"]) == (2.0, 1.0)
    assert "double" in capsys.readouterr().out
