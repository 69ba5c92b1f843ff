"""The pipelines of docs/pipelines.md: their commands as they stand there, one after the other."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from hone.cli import quickstart
from hone.cli.main import main

PAGE = Path(__file__).parents[2] / "docs" / "pipelines.md"


@pytest.mark.slow
def test_ppo_against_a_reward_model_of_own_answers_raises_what_is_true(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Above 0.9 of held-out pairs; the right number has weight 0 in the reward."""
    monkeypatch.chdir(tmp_path)
    folder = quickstart.DEFAULT_FOLDER
    quickstart.make_inputs(folder, seed=0)
    assert main(["sft", "quickstart-sft"]) == 0
    (row,) = [line for line in PAGE.read_text().splitlines() if line.startswith("| SFT, reward")]
    commands = re.findall(r"`hone ([^`]+)`", row)
    assert [command.split()[0] for command in commands] == ["generate", "reward-model", "rl"]
    for command in commands:
        assert main(shlex.split(command)) == 0, command

    def measured(run: str, name: str) -> list[float]:
        with (folder / run / "metrics.jsonl").open(encoding="utf-8") as file:
            return [row[name] for row in map(json.loads, file) if name in row]

    assert measured("reward-model", "eval/accuracy")[-1] > 0.9
    told = measured("ppo", "eval/reward/reward_model/mean")
    true = measured("ppo", "eval/reward/exact_match/mean")
    assert told[-1] > told[0] + 1, told
    assert true[-1] > true[0] + 0.3, true
