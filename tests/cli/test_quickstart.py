"""`hone quickstart`, with a few steps: the two commands, a stop, a second call."""

from __future__ import annotations

import json
import shlex
import shutil
from pathlib import Path

import pytest

from hone.cli import quickstart
from hone.cli.main import main
from hone.config.recipe import resolve_recipe
from hone.errors import UserError


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same commands with fewer steps."""
    call = quickstart._call
    steps = {"sft": "30", "rl": "8"}
    monkeypatch.setattr(quickstart, "_call", lambda c, a: call(c, [*a, "--run.steps", steps[c]]))


def check_next_steps(told: str, folder: Path) -> None:
    """What the last lines suggest works as it is printed."""
    commands = [shlex.split(x) for x in told.partition("Next")[2].splitlines()[1:]]
    assert [words[1] for words in commands] == ["eval", "generate", "report", "rl"]
    for words in commands:
        assert shutil.which(words[0]) is not None
        assert main(words[1:]) == 0, words
    assert "eval/pass@4" in json.loads((folder / "eval" / "eval.json").read_text())
    assert len((folder / "completions.jsonl").read_text().splitlines()) == quickstart.NUM_HELD_OUT


@pytest.mark.usefixtures("short")
def test_the_quick_start_runs_and_can_be_called_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "qs"
    arguments = ["--dir", str(folder), "--seed", "3"]
    assert quickstart.run(arguments) == 0
    told = capsys.readouterr().out
    assert "Held-out accuracy" in told
    check_next_steps(told, folder)
    for command in ("sft", "rl"):
        assert (folder / command / "report.html").exists()
        assert (folder / command / "model" / "model.safetensors").exists()
    before = (folder / "rl" / "metrics.jsonl").read_text()
    assert quickstart.run(arguments) == 0
    assert (folder / "rl" / "metrics.jsonl").read_text() == before
    assert "Resuming" in capsys.readouterr().out
    with pytest.raises(UserError, match="seed 3"):
        quickstart.run(["--dir", str(folder), "--seed", "4"])
    train = {json.loads(line)["prompt"] for line in (folder / "train.jsonl").open()}
    held_out = {json.loads(line)["prompt"] for line in (folder / "eval.jsonl").open()}
    assert len(held_out) == quickstart.NUM_HELD_OUT
    assert not train & held_out


def test_the_shipped_recipes_are_of_the_default_folder() -> None:
    """There the same commands need no flags."""
    for command, *flags in (words[:] for words in quickstart._next_steps(Path("elsewhere"))):
        if command not in ("eval", "generate"):
            continue
        name, *moved = flags
        text = resolve_recipe(name).read_text()
        paths = [value for value in moved if value.startswith("elsewhere")]
        assert len(paths) == 3
        for value in paths:
            assert value.replace("elsewhere", str(quickstart.DEFAULT_FOLDER)) in text


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(UserError, match="not a whole quick start"):
        quickstart.run(["--dir", str(tmp_path)])
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]
