"""Recipes of one name in two folders do not go on with each other's run."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hone.cli import rl
from hone.cli.main import main
from hone.config.rules.finding import Finding
from hone.loops import reinforce
from hone.loops.run import Outcome

RECIPE = """\
model: {path: org/model}
data:
  train:
  - path: org/data
"""


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Runs of `a/mine.yaml` and `b/mine.yaml` that do nothing but take their folder."""
    monkeypatch.chdir(tmp_path)
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "mine.yaml").write_text(RECIPE)

    def run(cfg, make_engines, *, pages) -> Outcome:
        cfg.run.dir.mkdir(parents=True, exist_ok=True)
        (cfg.run.dir / "config.yaml").touch()
        return Outcome(1)

    def no_findings(cfg: object, world_size: int) -> list[Finding]:
        return []

    monkeypatch.setattr(rl, "check", no_findings)
    monkeypatch.setattr(reinforce, "run", run)
    return lambda *arguments: main(["rl", *arguments])


def test_another_recipe_of_that_name_is_refused(train, tmp_path, capsys):
    assert train("a/mine.yaml") == 0
    assert train(str(tmp_path / "a" / "mine.yaml")) == 0, "the same"
    capsys.readouterr()
    for arguments in (["rl"], ["check"]):
        assert main([*arguments, "b/mine.yaml"]) == 2
        told = capsys.readouterr().err
        for part in ("a/mine.yaml", "b/mine.yaml"):
            assert repr(str(tmp_path / part)) in told
        assert "--run.dir" in told
        assert "remove 'runs/mine/recipe.json'" in told
    assert train("b/mine.yaml", "--run.dir=runs/other") == 0
    (tmp_path / "runs" / "mine" / "recipe.json").unlink()
    assert train("b/mine.yaml") == 0, "moved, as the user has said"
    assert train("a/mine.yaml") == 2


def test_a_folder_without_a_run_belongs_to_nobody(train, tmp_path):
    assert train("a/mine.yaml") == 0
    (tmp_path / "runs" / "mine" / "config.yaml").unlink()
    assert train("b/mine.yaml") == 0


def test_a_run_of_flags_alone_has_no_recipe(train, tmp_path):
    flags = ["--model.path=org/model", "--data.train.0.path=org/data"]
    assert train(*flags) == 0
    assert train(*flags, "--run.steps=7") == 0
    assert not list(tmp_path.rglob("recipe.json"))


def test_a_simulation_takes_no_folder(train, tmp_path):
    assert main(["plan", "gsm8k", "--model.shape=qwen3-0.6b", "--plan.steps=4"]) == 0
    assert not (tmp_path / "runs").exists()


def test_a_built_in_recipe_goes_by_its_name(train, tmp_path):
    assert train("gsm8k", "--model.path=org/model") == 0
    (record,) = tmp_path.rglob("recipe.json")
    assert json.loads(record.read_text()) == {"recipe": "gsm8k"}
