"""`examples/loop.py`: training written out with the public parts of hone."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import hone
from hone.cli import quickstart
from hone.cli.main import main
from tests.test_imports import loaded_by_example
from tests.tiny_runs import write_inputs

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "loop.py"


@pytest.fixture
def loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The program, in a folder of its own."""
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("loop", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(loop: ModuleType, capsys: pytest.CaptureFixture[str]) -> tuple[float, list[float], float]:
    """The held-out reward before training, the reward of each step, the held-out reward after."""
    capsys.readouterr()
    loop.main()
    told = capsys.readouterr().out
    before, after = map(float, re.findall(r"held-out reward (\S+)", told))
    return (
        before,
        [float(found) for found in re.findall(r"^step.*?reward (\S+)", told, re.M)],
        after,
    )


def even(completion: str) -> float:
    """A reward that a model of random weights earns too: the share of even digits."""
    return sum(c in "02468" for c in completion) / max(len(completion), 1)


def test_the_loop_learns_and_saves_what_transformers_loads(
    loop: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write_inputs(Path("runs/quickstart"))
    constants = {"MODEL": "runs/quickstart/model", "LEARNING_RATE": 6e-3, "STEPS": 12}
    sizes = {"PROMPTS_PER_STEP": 8, "SAMPLES_PER_PROMPT": 4}
    for name, value in {**constants, **sizes, "correct": even}.items():
        assert hasattr(loop, name)
        monkeypatch.setattr(loop, name, value)
    before, rewards, after = run(loop, capsys)
    assert len(rewards) == 12
    assert sum(rewards[-4:]) > sum(rewards[:4]) + 4 * 0.1, rewards
    assert after > before + 0.15
    start: Any = AutoModelForCausalLM.from_pretrained(loop.MODEL)
    trained: Any = AutoModelForCausalLM.from_pretrained(loop.OUTPUT)
    for name, weight in start.state_dict().items():
        assert not torch.equal(weight, trained.state_dict()[name]), name
    tokenizer = AutoTokenizer.from_pretrained(loop.OUTPUT)
    ids = tokenizer("1+1=", return_tensors="pt").input_ids
    greedy = trained.generate(ids, max_new_tokens=4, do_sample=False)[0, ids.shape[1] :]
    assert even(tokenizer.decode(greedy, skip_special_tokens=True)) > 0.5


def test_the_loop_executes_nothing_of_hone_that_is_not_counted(
    loop: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What functions import when they are called is not in the count of what a loop loads: it is
    for features that a plain run does not use."""
    write_inputs(Path("runs/quickstart"))
    small = {"STEPS": 1, "PROMPTS_PER_STEP": 2, "SAMPLES_PER_PROMPT": 2}
    for name, value in {**small, "MODEL": "runs/quickstart/model"}.items():
        monkeypatch.setattr(loop, name, value)
    executed: set[str] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        executed.add(frame.f_code.co_filename)

    sys.setprofile(note)
    try:
        run(loop, capsys)
    finally:
        sys.setprofile(None)
    root = Path(hone.__file__).parent
    modules = {
        ".".join(("hone", *Path(file).relative_to(root).with_suffix("").parts))
        for file in executed
        if Path(file).is_relative_to(root)
    }
    counted = loaded_by_example()
    assert "hone.engine.model_runner" in modules
    assert not {name.removesuffix(".__init__") for name in modules} - counted.keys()


@pytest.mark.slow
def test_the_loop_as_shipped_goes_on_from_the_quick_start(
    loop: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    quickstart.make_inputs(quickstart.DEFAULT_FOLDER, seed=0)
    assert main(["sft", "quickstart-sft", "--run.steps", "500"]) == 0
    monkeypatch.setattr(loop, "STEPS", 25)
    before, rewards, after = run(loop, capsys)
    assert after > before + 0.15, (before, rewards, after)


def test_the_page_on_python_names_every_part() -> None:
    page = (ROOT / "docs" / "python.md").read_text()
    section = page.partition("\n## A loop of your own\n")[2].partition("\n## ")[0]
    parts = hone._PARTS  # type: ignore[attr-defined]
    assert [name for name in parts if not re.search(rf"\b{name}\b", section)] == []
