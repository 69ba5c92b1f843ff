"""The commands called from Python: configuration, rewards, data, results."""

from __future__ import annotations

import ast
import inspect
import json
import math
import os
import subprocess
import sys
import textwrap
import time
import types
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
import yaml
from datasets import Dataset

import hone
from hone.algorithms.settings import AlgorithmConfig
from hone.config.run import RunConfig
from hone.curves import curves
from hone.data.given import given_rows
from hone.loops.launch import lock_run_dir
from hone.notebook import following, is_notebook
from tests.tables import table
from tests.tiny_runs import lines, write_inputs

ROOT = Path(__file__).parents[2]
DATA = {"data": {"chat": "never", "max_prompt_tokens": 8}}
SECTIONS: dict[str, Any] = {
    "model": {"path": "model"},
    "run": {"steps": 3, "device": "cpu"},
    "rollout": {"prompts_per_step": 4, "n_samples_per_prompt": 4, "max_completion_tokens": 8},
    "engine": {"max_num_seqs": 16},
    "log": {"to": []},
}
GENERATION = {"model": {"path": "model"}, "run": {"device": "cpu"}}


@pytest.fixture(autouse=True)
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    write_inputs(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def rows() -> list[dict[str, Any]]:
    return lines(Path("train.jsonl"))


SCALE = 2.0


@pytest.mark.slow
def test_a_run_with_functions_of_this_process_and_rows_in_memory() -> None:
    pids: list[int] = []

    def even(completion: str) -> float:  # what it appends stays in its worker
        pids.append(os.getpid())
        return SCALE * sum(c in "02468" for c in completion) / max(len(completion), 1)

    class Long:
        def __call__(self, completions: list[str], **columns: Any) -> list[float]:
            return [float(len(text)) for text in completions]

    reward = [even, {"fn": Long(), "weight": 0.5}, lambda completion: 1.0, "exact_match"]
    result = hone.rl(DATA, reward=reward, data=rows(), eval_data=rows()[:4], **SECTIONS)
    assert pids == []
    assert (result.run_dir, result.steps, result.stopped_by) == (Path("runs/rl"), 3, None)
    assert [row["step"] for row in result.metrics] == [1, 2, 3]
    assert result.final["reward/mean"] == result.metrics[-1]["reward/mean"]
    assert len(pd.DataFrame(result.metrics)) == 3
    sample = result.samples[0]
    assert sample.parts.keys() == {"even", "Long", "lambda", "exact_match"}
    assert sample.parts["Long"] == len(sample.completion)
    assert sample.reward == pytest.approx(
        sample.parts["even"] + 0.5 * sample.parts["Long"] + 1 + sample.parts["exact_match"]
    )
    assert (sample.split, sample.step) == ("train", 1)
    assert len(sample.logprobs) == len(sample.token_ids)
    assert (result.model_dir / "config.json").is_file()
    assert result.report.is_file()
    assert "reward" in repr(result)
    assert "<svg" in result._repr_html_()
    (file,) = Path("runs/rl/data").glob("*/train.jsonl")
    assert lines(file) == rows()
    # the same call finds the run finished; one with more steps goes on
    given = {"reward": reward, "data": rows(), "eval_data": rows()[:4]}
    assert hone.rl(DATA, **given, **SECTIONS).steps == 3
    longer = {**SECTIONS, "run": {"steps": 4, "device": "cpu"}}
    assert hone.rl(DATA, **given, **longer).steps == 4


@pytest.mark.slow
def test_no_worker_is_left_and_one_that_hangs_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HONE_TEST_MARK", "a fork server of its own")

    def hang(completion: str) -> float:
        print("a page of text " * 10_000)  # noqa: T201
        if len(completion) % 2:
            time.sleep(600)
        return 1.0

    before = {child.pid for child in psutil.Process().children(recursive=True)}
    sections = SECTIONS | {"run": {"steps": 1, "device": "cpu"}}
    reward = {"functions": [{"fn": hang}], "timeout_s": 0.3, "max_failure_rate": 1.0}
    result = hone.rl(DATA, reward=reward, data=rows(), **sections)
    assert {x.failure for x in result.samples} == {None, "timeout"}
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_a_function_that_can_be_imported_is() -> None:
    from hone.api import _name  # pyright: ignore[reportPrivateUsage]

    inherited: dict[str, Any] = {}
    assert _name(json.dumps, inherited) == "json:dumps"
    assert inherited == {}
    first, second = (lambda completion: 0.0), (lambda completion: 1.0)
    assert [_name(f, inherited) for f in (first, second, first)] == [
        "__main__:lambda", "__main__:lambda_2", "__main__:lambda",
    ]  # fmt: skip


def test_recipes_dicts_and_typed_sections_are_merged_in_this_order() -> None:
    Path("mine.yaml").write_text(
        "model: {path: model}\ndata: {train: [{path: train.jsonl}], chat: never}\n"
        "run: {seed: 3, steps: 7}\nalgorithm: {advantage: rloo}\n"
    )
    by_recipe = hone.check("mine.yaml", run={"steps": 9}).config
    assert (by_recipe["run"]["seed"], by_recipe["run"]["steps"]) == (3, 9)
    assert by_recipe["run"]["dir"] == "runs/mine"
    assert by_recipe["algorithm"]["advantage"] == "rloo"
    typed = hone.check("mine.yaml", run=RunConfig(steps=9)).config
    assert typed == by_recipe  # what the typed section leaves open stays the recipe's
    tree = hone.RLConfig.model_validate(by_recipe)
    changed = hone.check(tree, algorithm=AlgorithmConfig(advantage="grpo"), data="eval.jsonl")
    assert changed.config["algorithm"]["advantage"] == "grpo"
    assert [x["path"] for x in changed.config["data"]["train"]] == ["eval.jsonl"]
    assert by_recipe == hone.check(tree).config


def test_settings_of_data_are_arguments_by_their_own_names() -> None:
    in_section = hone.check(DATA, data=rows(), **SECTIONS).config
    by_name = hone.check(data=rows(), **DATA["data"], **SECTIONS).config
    assert by_name == in_section
    over_config = hone.check(DATA, data=rows(), max_prompt_tokens=6, **SECTIONS).config
    assert (over_config["data"]["max_prompt_tokens"], over_config["data"]["chat"]) == (6, "never")
    with pytest.raises(hone.UserError, match=r"max_promt_tokens: unknown key.*max_prompt_tokens"):
        hone.check(DATA, data=rows(), max_promt_tokens=6, **SECTIONS)


def test_check_returns_what_is_wrong_and_leaves_nothing() -> None:
    before = sorted(Path().rglob("*"))
    found = hone.check(DATA, reward=lambda completion: 1.0, data=rows(), **SECTIONS)
    assert found.errors == []
    assert found.derived["samples_per_step"] == 16
    wrong = {"reward": lambda completion, level: 1.0, "data": rows(), "nproc": 3}
    assert any("needs 'level'" in text for text in hone.check(DATA, **wrong, **SECTIONS).errors)
    assert hone.check({"model": {"path": "model"}, **DATA}, command="eval", data=rows()).config
    assert sorted(Path().rglob("*")) == before


def test_evaluation_and_generation() -> None:
    scores = hone.evaluate(
        DATA, reward=["exact_match", lambda completion: 1.0], data=rows()[:5],
        eval={"max_completion_tokens": 8}, **GENERATION,
    )  # fmt: skip
    assert scores.metrics["eval/reward/lambda/mean"] == 1.0
    shown = scores._repr_html_().replace("<wbr>", "")  # pyright: ignore[reportPrivateUsage]
    assert "<td>eval/reward/lambda/mean</td><td>1</td><td>0</td>" in shown
    assert len(scores.samples) == 5
    generation = {"max_completion_tokens": 8}
    found = hone.generate(DATA, data=["1+1=", "2+2="], generation=generation, **GENERATION)
    assert [sample.prompt for sample in found] == ["1+1=", "2+2="]
    assert not Path("completions.jsonl").exists()
    hone.generate(
        DATA, data=["1+1="], output=Path("kept.jsonl"), generation=generation, **GENERATION
    )
    assert len(lines(Path("kept.jsonl"))) == 1
    settings = yaml.safe_load(Path("kept.jsonl.config.yaml").read_text())
    assert lines(Path(settings["data"]["train"][0]["path"])) == [{"prompt": "1+1="}]
    assert Path(settings["data"]["train"][0]["path"]).is_relative_to("kept.jsonl.data")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_refused_call_leaves_the_folder_of_a_run_as_it_is() -> None:
    folder = Path("runs/mine/data")
    folder.mkdir(parents=True)
    (folder / "train.jsonl").write_text("an earlier run's\n")
    sections = SECTIONS | {"run": {"steps": 1, "device": "cpu", "dir": "runs/mine"}}
    before = contents(Path("runs"))
    for mistake in ({"reward": lambda completion, level: 1.0}, {"trainer": {"gpus": 1}}):
        with pytest.raises(hone.UserError):
            hone.rl(DATA, **{"data": rows(), "reward": "exact_match", **sections} | mistake)
        assert contents(Path("runs")) == before
    with lock_run_dir(Path("runs/mine")), pytest.raises(hone.UserError, match="another run is at"):
        hone.rl(DATA, data=rows(), reward="exact_match", **sections)
    assert contents(Path("runs")).items() >= before.items()


@pytest.mark.slow
def test_rows_and_functions_that_have_changed_are_told(caplog: pytest.LogCaptureFixture) -> None:
    def call(reward: Any, *, steps: int, num_rows: int = 80) -> None:
        caplog.clear()
        sections = SECTIONS | {"run": {"steps": steps, "device": "cpu"}}
        hone.rl(DATA, data=rows()[:num_rows], eval_data=rows()[-4:], reward=reward, **sections)

    def told() -> list[str]:
        begin = "changed since then: "
        messages = [record.getMessage() for record in caplog.records]
        return [x.removeprefix(begin).split(" is ")[0] for x in messages if x.startswith(begin)]

    caplog.set_level("INFO", logger="hone")
    call(reward := constant(1.0), steps=1)
    (before,) = Path("runs/rl/data").glob("*/train.jsonl")
    earlier = before.read_bytes()
    call(reward, steps=2)
    assert told() == []
    call(constant(1.0, doubled=True), steps=3)
    assert told() == ["the code of reward.functions.0.fn (__main__:score)"]
    with pytest.raises(hone.UserError, match=r"num_rows was \[80\] and is now \[40\]"):
        call(constant(1.0, doubled=True), steps=4, num_rows=40)
    assert told() == ["data.train"]
    assert before.read_bytes() == earlier
    for steps, changed in ((3, "the code of reward.functions.0.fn .__main__:score. is"), (1, "")):
        with pytest.raises(hone.UserError, match=f"nothing is left to train, .*: {changed}"):
            call(constant(1.0), steps=steps)
    call(constant(1.0, doubled=True), steps=3)


def constant(value: float, *, doubled: bool = False) -> Any:
    def score(completion: str) -> float:
        return value

    def twice(completion: str) -> float:
        return 2 * value

    twice.__qualname__ = score.__qualname__
    return twice if doubled else score


@pytest.mark.slow
def test_an_environment_of_this_process() -> None:
    class Flat:
        def __init__(self, bonus: float) -> None:
            self.bonus = bonus

        def step(self, episode: Any) -> float:
            return self.bonus

    env = {"path": Flat, "args": {"bonus": 0.25}}
    assert hone.check(DATA, data=rows(), env=env, **SECTIONS).errors == []
    result = hone.rl(DATA, data=rows(), env=env, **SECTIONS)
    assert {sample.reward for sample in result.samples} == {0.25}


@pytest.mark.slow
def test_supervised() -> None:
    data = {"data": DATA["data"] | {"max_tokens": 24, "examples_per_step": 8}}
    result = hone.sft(data, data=rows(), model={"path": "model"}, run=SECTIONS["run"])
    assert result.steps == 3
    assert result.final["train/loss"] > 0
    assert result.samples == []


@pytest.mark.slow
def test_preferences_and_a_reward_model() -> None:
    pairs = [{"prompt": f"{n}+1=", "chosen": f"{n + 1}", "rejected": "0"} for n in range(1, 9)]
    data = {"chat": "never", "max_prompt_tokens": 8, "max_tokens": 24, "examples_per_step": 8}
    given: dict[str, Any] = {"data": pairs, "model": {"path": "model"}, "run": SECTIONS["run"]}
    assert hone.check(command="reward-model", **given).errors == []
    learned = hone.dpo({"data": data}, **given)
    assert learned.final["rewards/accuracies"] >= 0
    scorer = given | {"run": given["run"] | {"dir": "runs/scorer"}}
    result = hone.reward_model({"data": data}, **scorer)
    assert result.steps == 3
    assert "SequenceClassification" in (result.model_dir / "config.json").read_text()


@table("kind", ["list", "generator", "DataFrame", "Dataset", "texts"])
def test_kinds_of_rows(kind: str) -> None:
    held = [{"prompt": "a", "n": 1, "tags": ["x"]}, {"prompt": "b", "n": None, "tags": []}]
    given: Any = {
        "list": held,
        "generator": (row for row in held),
        "DataFrame": pd.DataFrame(held),
        "Dataset": Dataset.from_list(held),
        "texts": ["a", "b"],
    }[kind]
    expected = [{"prompt": "a"}, {"prompt": "b"}] if kind == "texts" else held
    assert given_rows(given, "data") == expected


def test_columns_of_one_name_are_refused() -> None:
    frame = pd.DataFrame([["a", 1, 2, 3]], columns=["prompt", "n", "n", "m"])
    with pytest.raises(hone.UserError, match="data has several columns named n; rename them"):
        given_rows(frame, "data")


def test_an_infinite_number_is_no_missing_value() -> None:
    with pytest.raises(
        hone.UserError, match="data, row 2, column 'n' holds inf, which JSON cannot"
    ):
        given_rows([{"n": math.nan}, {"n": math.inf}], "data")


@pytest.mark.slow
def test_messages_go_where_the_program_wants_them(capfd: Any) -> None:
    program = """
import logging, sys
import hone
if "own" in sys.argv:
    logging.basicConfig(format="mine: %(message)s", level=logging.WARNING)
hone.check({"model": {"path": "model"}, "data": {"train": [{"path": "train.jsonl"}]}})
def only(completion): return 1.0
hone.generate({"data": {"max_prompt_tokens": 8}}, data=["1+1="], model={"path": "model"},
              generation={"max_completion_tokens": 4}, run={"device": "cpu"})
"""
    Path("program.py").write_text(program)
    for argument, told in (("", True), ("own", False)):
        done = run_program("program.py", argument)
        assert done.returncode == 0, done.stderr
        assert ("rows kept" in done.stderr) is told


def run_program(*arguments: str) -> Any:
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT)])
    command = [sys.executable, *arguments]
    env = os.environ | {"PYTHONPATH": path}
    return subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)


def test_importing_is_light() -> None:
    program = "import sys, hone; print('torch' in sys.modules, 'pydantic' in sys.modules)"
    assert run_program("-c", program).stdout == "False False\n"
    program = "import sys, hone; hone.rl; print('torch' in sys.modules)"
    assert run_program("-c", program).stdout == "False\n"


def test_public_names() -> None:
    assert all(getattr(hone, name) for name in hone.__all__)
    assert set(hone.__all__) - {"__version__"} == {*hone.api.__all__, *hone._PARTS}  # type: ignore
    assert not {*hone.api.__all__} & hone._PARTS.keys()  # type: ignore
    assert all(inspect.getdoc(getattr(hone, name)) for name in hone._PARTS)
    with pytest.raises(AttributeError, match="no attribute 'train'"):
        hone.train  # type: ignore # noqa: B018


def test_type_checkers_find_each_part_where_it_is() -> None:
    typed = {
        name.asname or name.name: node.module + (f":{name.name}" if name.asname else "")
        for node in ast.walk(ast.parse(Path(hone.__file__).read_text()))
        if isinstance(node, ast.ImportFrom) and node.module is not None
        for name in node.names
    }
    assert {name: typed[name] for name in hone._PARTS} == hone._PARTS


def test_a_notebook_shows_bar_and_curves(monkeypatch: pytest.MonkeyPatch, inputs: Path) -> None:
    shown: list[str] = []

    class ZMQInteractiveShell:
        pass

    class Handle:
        def update(self, html: str) -> None:
            shown.append(html)

    display = types.ModuleType("IPython.display")
    vars(display).update(HTML=str, display=lambda html, display_id: Handle())
    ipython = types.ModuleType("IPython")
    vars(ipython).update(get_ipython=ZMQInteractiveShell, display=display)
    assert not is_notebook()
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    monkeypatch.setitem(sys.modules, "IPython.display", display)
    assert is_notebook()
    with following(inputs, 4):
        table = [{"step": step, "reward/mean": step / 10} for step in (1, 2, 3)]
        (inputs / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in table))
    assert "step 3 of 4" in shown[-1]
    assert curves(table) in shown[-1]
    assert curves(table[:1]) == ""


def test_a_notebook_reads_what_is_appended_alone(tmp_path: Path) -> None:
    from hone.notebook import _Table  # pyright: ignore[reportPrivateUsage]

    file = tmp_path / "metrics.jsonl"
    table = _Table(file)
    assert not table.grow()
    file.write_text('{"step": 1, "a": 0}\n{"step": 2')
    assert table.grow()
    assert table.rows == [{"step": 1, "a": 0}]
    assert not table.grow()
    with file.open("r+") as held:  # would be read if it were read again
        held.write("x" * 19)
        held.seek(0, 2)
        held.write(', "a": 1}\n{"step": 2, "b": 2}\n')
    assert table.grow()
    assert table.rows == [{"step": 1, "a": 0}, {"step": 2, "a": 1, "b": 2}]
    other = tmp_path / "other"
    other.write_text('{"step": 1, "a": 5}\n')
    other.replace(file)  # as a run does that goes on
    assert table.grow()
    assert table.rows == [{"step": 1, "a": 5}]


def test_the_examples_of_docstrings_are_code() -> None:
    trained = hone.rl, hone.sft, hone.dpo, hone.reward_model
    for call in (*trained, hone.evaluate, hone.generate, hone.check):
        text = inspect.getdoc(call) or ""
        example = [line for line in text.splitlines() if line.startswith("    ")]
        assert example, call
        compile(textwrap.dedent("\n".join(example)), call.__name__, "exec")


@pytest.mark.slow
def test_from_an_installed_wheel(tmp_path: Path) -> None:
    """Built, installed into a folder, and used by a script that knows nothing of this tree."""
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", "site"]
    subprocess.run([*pip, str(ROOT)], check=True, cwd=tmp_path, timeout=600)
    program = """
import hone, sys
assert "site" in hone.__file__, hone.__file__
def even(completion):
    return sum(c in "02468" for c in completion) / max(len(completion), 1)
result = hone.rl({"data": {"chat": "never", "max_prompt_tokens": 8}}, reward=even,
    data="train.jsonl", model={"path": "model"}, run={"steps": 2, "device": "cpu"},
    rollout={"prompts_per_step": 2, "n_samples_per_prompt": 2, "max_completion_tokens": 8},
    log={"to": []})
print(result.steps, hone.check("gsm8k").derived["samples_per_step"])
"""
    (tmp_path / "program.py").write_text(program)
    assert (tmp_path / "site" / "hone" / "py.typed").is_file()
    env = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    done = subprocess.run(
        [sys.executable, "program.py"], env=env, capture_output=True, text=True, cwd=tmp_path,
        timeout=600,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "2 256"


def test_a_section_of_any_command_is_one_of_hone_rl() -> None:
    """`hone.DataConfig` is the section of commands without a curriculum."""
    data = hone.DataConfig(train=(hone.SourceConfig(path="rows.jsonl"),), shuffle=False)
    cfg = hone.RLConfig(model={"path": "here"}, data=data)  # type: ignore[arg-type]
    assert (cfg.data.train, cfg.data.shuffle) == (data.train, False)
    assert cfg.data.model_fields_set == {"train", "shuffle"}
