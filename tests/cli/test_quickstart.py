"""`hone quickstart`, with a few steps: the two commands, a stop, a second call."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hone.cli import quickstart
from hone.config import UserError


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same commands with fewer steps."""
    call = quickstart._call
    steps = {"sft": "30", "rl": "8"}
    monkeypatch.setattr(quickstart, "_call", lambda c, a: call(c, [*a, "--run.steps", steps[c]]))


@pytest.mark.usefixtures("short")
def test_the_quick_start_runs_and_can_be_called_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "qs"
    arguments = ["--dir", str(folder), "--seed", "3"]
    assert quickstart.run(arguments) == 0
    assert "Held-out accuracy" in capsys.readouterr().out
    for command in ("sft", "rl"):
        assert (folder / command / "report.html").exists()
        assert (folder / command / "model" / "model.safetensors").exists()
    before = (folder / "rl" / "metrics.jsonl").read_text()
    assert quickstart.run(arguments) == 0
    assert (folder / "rl" / "metrics.jsonl").read_text() == before
    assert "Going on" in capsys.readouterr().out
    with pytest.raises(UserError, match="seed 3"):
        quickstart.run(["--dir", str(folder), "--seed", "4"])
    train = {json.loads(line)["prompt"] for line in (folder / "train.jsonl").open()}
    held_out = {json.loads(line)["prompt"] for line in (folder / "eval.jsonl").open()}
    assert len(held_out) == quickstart.NUM_HELD_OUT
    assert not train & held_out


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="not a whole quick start"):
        quickstart.run(["--dir", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
