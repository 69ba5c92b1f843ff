"""What a user of the Python API can get wrong: each ends in a UserError that says cause and remedy,
with no traceback of anything but the call.
"""

from __future__ import annotations

import functools
import math
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import hone
from hone.config.run import RunConfig
from hone.rewards.settings import RewardConfig
from tests.api.own_functions import Missing, raising, zero
from tests.tables import table
from tests.tiny_runs import lines, write_inputs

DATA = {"chat": "never", "max_prompt_tokens": 8}
ROWS = [{"prompt": f"{n}+1=", "answer": f"{n + 1}"} for n in range(4)]
SECTIONS: dict[str, Any] = {
    "run": {"steps": 1, "device": "cpu"},
    "rollout": {"prompts_per_step": 2, "n_samples_per_prompt": 2, "max_completion_tokens": 8},
    "engine": {"max_num_seqs": 4},
    "log": {"to": []},
}


OWN: dict[str, Any] = {"prompt": "1+1="}
OWN["self"] = OWN


def rl(config: Any = None, **given: Any) -> Callable[[], Any]:
    """A call with a good value for all that is not `given`."""
    model = {"model": {"path": "model"}} if "model" not in given else {}
    base = {"reward": zero, "data": ROWS, **SECTIONS, **model}
    return lambda: hone.rl({"data": DATA} if config is None else config, **base | given)


def returning(value: Any) -> Any:
    return lambda completion: value


def in_a_thread() -> None:
    found: list[BaseException] = []

    def call() -> None:
        try:
            rl()()
        except hone.UserError as error:
            found.append(error)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    raise found[0]


WRONG: dict[str, tuple[Callable[[], Any], str]] = {
    # -- configuration
    "no such recipe": (lambda: hone.rl("gms8k"), r"recipe 'gms8k': no such file.*gsm8k"),
    "no such file": (lambda: hone.sft(Path("mine.yaml")), "recipe 'mine.yaml': no such file"),
    "a folder": (lambda: hone.rl("model"), "a folder, not a file"),
    "a broken recipe": (lambda: hone.rl("broken.yaml"), "not valid YAML: line 1"),
    "config a number": (lambda: hone.rl(3), "config is of type int; give the name or path"),  # type: ignore
    "config a list": (lambda: hone.rl([("run", {})]), "config is of type list"),  # type: ignore
    "nothing": (lambda: hone.rl(), r"model.path: required"),
    "no data": (lambda: hone.rl(model={"path": "model"}), r"data.train: required"),
    "misspelt section": (rl(rolout={"prompts_per_step": 2}), "rolout: unknown key.*rollout"),
    "misspelt key": (rl(run={"stesp": 3}), r"run.stesp: unknown key.*run\.steps"),
    "a key of TRL": (rl(rollout={"num_generations": 4}), "n_samples_per_prompt"),
    "a key of verl": (rl(trainer={"ppo_mini_batch_size": 4}), "prompts_per_minibatch"),
    "a text for a number": (rl(run={"steps": "many"}), r"run.steps: got 'many' \(run=\)"),
    "a boolean for a number": (rl(run={"steps": True}), "run.steps: got True"),
    "too small": (rl(rollout={"n_samples_per_prompt": 0}), "n_samples_per_prompt: got 0"),
    "nan": (rl(trainer={"optimizer": {"lr": math.nan}}), "trainer.optimizer.lr: got nan"),
    "a section as a number": (rl(run=3), "run: got 3"),
    "a key that is no text": (rl({1: {}}), "the key 1 must be a text"),
    "a function among settings": (rl(run={"steps": zero}), "run.steps is a function"),
    "the tree of another call": (
        lambda: hone.sft(hone.EvaluateConfig(model={"path": "model"})),  # type: ignore
        "config is a EvaluateConfig, and this call takes a SFTConfig",
    ),
    "a typed section misspelt": (
        lambda: RunConfig(stpes=3),
        "no key 'stpes'; did you mean 'steps'",
    ),  # type: ignore
    "a typed section ill-typed": (lambda: RunConfig(steps="x"), "steps is 'x'"),  # type: ignore
    "a typed section incomplete": (lambda: hone.RLConfig(), "'model' is required"),  # type: ignore
    "sections that do not fit": (
        rl(rollout=SECTIONS["rollout"] | {"n_samples_per_prompt": 1}),
        "algorithm.advantage",
    ),
    "several processes": (
        rl(cluster={"num_engines": 1, "num_trainers": 2}),
        "num_trainers 2 asks for several processes",
    ),
    "in a thread": (in_a_thread, "call it from the main thread"),
    "a path with a null": (rl(run={"dir": "a\0b"}), "run.dir: holds a null character"),
    "no such model": (rl(model={"path": "./nowhere"}), "nowhere"),
    "an unknown tracker": (rl(log={"to": ["wand"]}), "log.to.0: got 'wand'.*wandb"),
    # -- rewards
    "reward a number": (rl(reward=3), "reward is 3; give a function"),
    "no rewards": (rl(reward=[]), r"reward is \[\]; give a function"),
    "a list with a number": (rl(reward=[zero, 3]), "reward holds 3, which is no function"),
    "an unknown built-in": (rl(reward="exact_mach"), "Did you mean exact_match"),
    "no such file of rewards": (rl(reward="reward.py:f"), "there is no file 'reward.py'"),
    "an entry misspelt": (
        rl(reward={"fn": zero, "wieght": 2}),
        r"reward.functions.0.wieght: unknown key.*weight",
    ),
    "an entry without function": (rl(reward={"weight": 2}), r"reward.functions.0.fn: required"),
    "a class": (rl(reward=Missing), "reward is the class Missing; give a function, or an instance"),
    "takes nothing": (rl(reward=lambda: 1.0), "takes nothing of a sample"),
    "by position only": (rl(reward=lambda a, /: 1.0), "by position only"),
    "needs what is not there": (rl(reward=lambda completion, levle: 1.0), "needs 'levle'"),
    "needs what verl does not give": (
        rl(reward=lambda solution_str, ground_truth, level: 1.0),
        "and also needs 'level': give it a default",
    ),
    "of two shapes": (rl(reward=lambda completion, completions: 1.0), "keep one of them"),
    "args that it does not take": (
        rl(reward={"fn": zero, "args": {"scale": 2}}),
        "has no parameter 'scale'",
    ),
    "args that samples bring": (
        rl(reward={"fn": lambda completion, answer: 1.0, "args": {"answer": "2"}}),
        "which every sample brings",
    ),
    "functions that are no list": (
        rl(reward={"functions": zero}),
        "reward.functions is a function or a class; functions go into reward=, alone or in a list",
    ),
    "written in C": (rl(reward=functools.partial(max, 1)), "does not show its parameters"),
    "returns a text": (rl(reward=returning("1")), "returned str as a score; return a number"),
    "returns a list": (rl(reward=returning([1.0])), "returned list as a score"),
    "returns a dict without score": (rl(reward=returning({"x": 1})), "without 'score'"),
    "returns too many": (rl(reward=lambda completions: [1.0, 2.0]), "2 values for a list of 1"),
    "returns nan": (rl(reward=returning(math.nan)), "returned nan as a score"),
    "abstains always": (rl(reward=returning(None)), "every reward function returned None"),
    "an unknown name inside": (rl(reward=raising), "NameError: name 'undefined'"),
    "ends its process": (rl(reward=lambda completion: __import__("os")._exit(3)), "exit code 3"),
    # -- data
    "data a number": (rl(data=3), "data is of type int; give a list of dicts"),
    "data of no kind": (rl(data=Missing()), "data is of type Missing"),
    "data bytes": (rl(data=b"rows"), "data is of type bytes"),
    "no rows": (rl(data=[]), "data holds no rows"),
    "rows of numbers": (rl(data=[1, 2]), "data, row 1 is of type int"),
    "columns for rows": (
        rl(data={"prompt": ["1+1="], "answer": ["2"]}),
        "data is a dict with the keys prompt, answer; give one split of it, or rows",
    ),
    "a value without JSON": (
        rl(data=[{"prompt": "1+1=", "image": Missing()}]),
        "data, row 1, column 'image' holds Missing",
    ),
    "no prompt column": (rl(data=[{"text": "1+1="}]), "no column for the prompt.*found text"),
    "two prompt columns": (
        rl(data=[{"instruction": "a", "input": "b"}]),
        "may be in any of the columns input, instruction",
    ),
    "a row that holds itself": (
        rl(data=[OWN]),
        "data, row 1 contains itself; leave that column out",
    ),
    "half a character": (rl(data=[{"prompt": "\ud800"}]), "row 1, column 'prompt' holds .*decode"),
    "prompts of null": (
        rl(data=[{"prompt": None, "answer": "1"}]),
        r"found prompt \(null in all rows looked at\), answer",
    ),
    "an empty prompt": (rl(data=[{"prompt": ""}]), "row|line 1: the prompt"),
    "an answer that the tokenizer does not know": (
        rl(data=[{"prompt": "1+1=", "answer": "é"}]),
        "the tokenizer cannot encode 'é', the answer of the first row",
    ),
    "rows too long": (rl(data=[{"prompt": "1+" * 40}]), "all 1 rows are too long"),
    "characters unknown": (rl(data=[{"prompt": "héllo"}]), "tokenizer"),
    "no such data file": (rl(data="rows.jsonl"), "rows.jsonl"),
    "no demonstration": (
        lambda: hone.sft(data=ROWS, model={"path": "model"}),
        "no column for the completion",
    ),
    # -- the other calls
    "no such command": (lambda: hone.check("gsm8k", command="train"), "command='train'; allowed"),
    "no such GPU": (lambda: hone.check("gsm8k", gpu="h3000"), "h3000"),
    "a GPU as a number": (lambda: hone.check("gsm8k", gpu=3), "gpu=3; allowed: the name of a GPU"),  # type: ignore
    "commands": (lambda: hone.check("gsm8k", command=["rl"]), r"command=\['rl'\]; allowed"),  # type: ignore
    "processes as text": (lambda: hone.check("gsm8k", nproc="8"), "nproc='8'; allowed"),  # type: ignore
    "a prompt that is no list": (
        lambda: hone.generate(model={"path": "model"}, data="What is 1+1?"),
        r"names no file and no data set; prompts go into a list: data=\['What is 1\+1\?'\]",
    ),
    "an environment that is made": (
        rl(env={"path": Missing()}),
        "env.path: got <.*; allowed: text",
    ),
    "an environment without step": (rl(env={"path": Missing}), "is no environment: it has no"),
    "generate without data": (lambda: hone.generate(model={"path": "model"}), "data.train"),
    "evaluate an RL section": (
        lambda: hone.evaluate(model={"path": "model"}, data=ROWS, rollout={}),
        "rollout: unknown key",
    ),
}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_inputs(folder)
    (folder / "broken.yaml").write_text("run: {steps: [}\n")
    return folder


def test_they_are_fifty() -> None:
    assert len(WRONG) >= 50


@table("case", WRONG)
def test_cause_and_remedy_and_no_foreign_traceback(
    case: str, inputs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(inputs)
    monkeypatch.delenv("HONE_TRACEBACK", raising=False)
    call, message = WRONG[case]
    with pytest.raises(hone.UserError, match=f"(?s){message}") as caught:
        call()
    shown = "".join(traceback.format_exception(caught.value))
    files = {frame.filename for frame in traceback.extract_tb(caught.value.__traceback__)}
    package = str(Path(hone.__file__).parent)
    assert all(file == __file__ or file.startswith(package) for file in files), files
    assert "During handling" not in shown
    assert "direct cause" not in shown


def test_the_cause_is_in_the_run_folder(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(inputs)
    folder = inputs / "runs" / "failed"
    with pytest.raises(hone.UserError):
        rl(reward=returning("1"), run={"steps": 1, "device": "cpu", "dir": folder})()
    (event,) = [x for x in lines(folder / "events.jsonl") if x["kind"] == "error"]
    assert "returned str as a score" in event["message"]


def test_the_traceback_is_there_for_who_asks(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(inputs)
    monkeypatch.setenv("HONE_TRACEBACK", "1")
    with pytest.raises(hone.UserError) as caught:
        rl(data=[])()
    assert "given_rows" in "".join(traceback.format_exception(caught.value))


def test_typed_rewards_are_the_same() -> None:
    cfg = RewardConfig(functions=({"fn": "exact_match"},))  # type: ignore
    assert cfg == RewardConfig()
