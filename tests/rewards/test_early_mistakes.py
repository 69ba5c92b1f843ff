"""What is wrong with a reward function is said before a model is loaded, or after few samples."""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hone.cli import command
from hone.cli.command import first_rows, plan_here
from hone.config.rules.finding import Finding
from hone.config.run import EvaluationConfig
from hone.config.tree import EvaluateConfig, RLConfig
from hone.data import blocks
from hone.data.settings import DataConfig
from hone.errors import UserError
from hone.loops import reinforce, workers
from hone.loops.evaluation import run_evaluation
from hone.rewards import pool, scorer
from hone.rewards.scorer import FailureRateError, Scorer
from hone.rewards.settings import RewardConfig
from hone.rollout.episodes import Episodes
from hone.rollout.evaluate import evaluate
from hone.rules import findings
from hone.types import FailureKind, Prompt, Sample
from tests.rewards.scoring import make_sample
from tests.rollout.fakes import FakeEngine
from tests.tiny_runs import tiny_config, write_inputs


def reward(path: Path, source: str, **settings: object) -> RewardConfig:
    """A configuration with the function `f` of this source."""
    path.write_text(source)
    args = settings.pop("args", {})
    plain = {"timeout_s": 60.0, "memory_limit_gib": 1.0, "num_workers": 1}
    functions = [{"fn": f"{path}:f", "args": args}]
    return RewardConfig.model_validate(plain | {"functions": functions} | settings)


def told_of(cfg: RewardConfig, data: DataConfig) -> list[Finding]:
    """What the rules say of reward functions and the rows that they are given."""
    tree = RLConfig.model_validate({"model": {"path": "."}, "data": data, "reward": cfg})
    found = findings(plan_here(tree, 1), **first_rows(tree))
    return [x for x in found if "reward.functions" in x.keys[0] or "JSON array" in x.message]


def make(cfg: RewardConfig) -> Scorer:
    return Scorer(cfg, max_completion_tokens=8)


def rows(*metadata: dict[str, object]) -> list[Prompt]:
    return [
        Prompt(id=f"train:{n}", token_ids=(1,), text="Q", answer="42", metadata=held)
        for n, held in enumerate(metadata, start=1)
    ]


def encode(text: str) -> list[int]:
    return [ord(c) for c in text]


# -- before anything runs ------------------------------------------------------------------------

FLAWS = {
    "def f(): return 1.0": "takes nothing of a sample",
    "def f(*args): return 1.0": "takes nothing of a sample",
    "def f(completions): return [1.0]": None,
    "def f(completions, completion): return [1.0]": "keep one of them",
    "def f(solution_str, ground_truth, level): return 1.0": "also needs 'level'",
    "def f(queries, prompts, labels, **rest): return [1.0]": None,
    "def f(completion, /): return 1.0": "position only",
    "def f(completion, sclae=1): return 1.0": "Did you mean 'sclae'",
    "def f(completion, **rest): return 1.0": None,
    "def f(completion, *, scale): return 1.0": None,
    "async def f(completion, scale=2): return 1.0": None,
    "import functools\n@functools.cache\ndef f(): return 1.0": None,  # may take what is not seen
    "def f(): return 1.0\nf = lambda completion, scale: 1.0": None,
    "from elsewhere import f": None,
}


@pytest.mark.parametrize("source", FLAWS)
def test_a_signature_is_checked_without_running_the_file(source: str, tmp_path: Path) -> None:
    flaw = FLAWS[source]
    source = f"raise SystemExit('it ran')\n{source}"
    has_scale = "scale" in source or "sclae" in source
    (tmp_path / "elsewhere.py").touch()  # which one of them imports
    cfg = reward(tmp_path / "r.py", source, args={"scale": 3} if has_scale else {})
    found = [
        finding.message
        for finding in told_of(cfg, DataConfig(train=()))
        if finding.level == "error"
    ]
    assert len(found) == (flaw is not None), found
    assert flaw is None or flaw in found[0]


def test_columns_are_checked_where_the_data_are_here(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text(
        '{"question": "a", "answer": "1", "level": 2}\n{"question": "b", "answer": "1"}\n'
    )
    data = DataConfig.model_validate({"train": [{"path": str(tmp_path / "d.jsonl")}]})
    good = reward(tmp_path / "g.py", "def f(completion, answer, prompt, level=1): return 1.0")
    assert told_of(good, data) == []
    for name, told in (("level", "line 2"), ("levle", "Did you mean 'level'?")):
        cfg = reward(tmp_path / "b.py", f"def f(completion, {name}): return 1.0")
        (finding,) = told_of(cfg, data)
        assert finding.level == "error"
        assert "reward.functions.0.fn" in finding.message
        assert f"needs '{name}'" in finding.message
        assert told in finding.message
        columns = "answer, question" if name == "level" else "answer, level, question"
        assert f"(which has: {columns})" in finding.message
    named = reward(tmp_path / "a.py", "def f(completion, level): return 1.0", args={"level": 1})
    assert told_of(named, data) == []


ANSWERED = {
    "rewards.py:f": "def f(completion, answer): return float(completion == answer)",
    "trl.py:f": "def f(completions, answer, **rest): return [1.0]",
    "verl.py:f": "def f(data_source, solution_str, ground_truth, extra_info=None): return 1.0",
    "exact_match": None,
    "math": None,
}


@pytest.mark.parametrize("name", ANSWERED)
@pytest.mark.parametrize("has_some", [False, True])
def test_an_answer_that_no_row_has_is_missed_before_the_run(
    name: str, has_some: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the rules, and for what they cannot parse or read by the first look of a run."""
    monkeypatch.chdir(tmp_path)
    lines = [f'{{"prompt": "{n}", "result": "1"}}\n' for n in range(70)]
    (tmp_path / "d.jsonl").write_text("".join(lines))
    (tmp_path / "e.jsonl").write_text('{"prompt": "a", "answer": "1"}\n')
    paths = ["e.jsonl"] * has_some + ["d.jsonl"]
    data = DataConfig.model_validate({"train": [{"path": path} for path in paths]})
    source = ANSWERED[name]
    if source is not None:
        (tmp_path / name.removesuffix(":f")).write_text(source)
    cfg = RewardConfig.model_validate({"functions": [{"fn": name}], "num_workers": 1})
    (finding,) = told_of(cfg, data)
    assert finding.level == "error"
    for told in (
        f"'{name}' needs the answer",
        f"64 of the first 64 rows of data.train.{int(has_some)} lack it",
        "d.jsonl, line 1",
        "(which has: prompt, result)",
        f"data.train.{int(has_some)}.columns.answer",
    ):
        assert told in finding.message
    assert ("give the parameter a default" in finding.message) == (source is not None)
    prompts = [
        Prompt(id=f"d:{n}", token_ids=(1,), text="Q", answer=answer, metadata={"result": "1"})
        for n, answer in enumerate(["1"] * has_some + [None] * 2)
    ]
    told = rf"'{name}' needs the answer .* 2 of {len(prompts)} rows .*columns\.answer"
    with make(cfg) as scorer_, pytest.raises(UserError, match=told):
        scorer_.check_data(prompts, encode)


@pytest.mark.parametrize("column", ["label", "note"])
def test_labels_that_are_all_empty_are_told(column: str, tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "d.jsonl").write_text(f'{{"prompt": "a", "{column}": "1"}}\n')
    data = DataConfig.model_validate({"train": [{"path": str(tmp_path / "d.jsonl")}]})
    cfg = reward(tmp_path / "r.py", "def f(queries, prompts, labels): return [1.0]")
    found = told_of(cfg, data)
    caplog.set_level("INFO")
    with make(cfg) as scorer_:
        scorer_.check_data([replace(row, answer=None) for row in rows({})], encode)
    assert "all labels are '', since no row has an answer" in caplog.text
    if column == "label":
        assert found == []
        return
    (finding,) = found
    assert finding.level == "warning"
    assert "all of them are ''" in finding.message
    assert "data.train.0.columns.answer" in finding.message
    assert "(columns: note, prompt)" in finding.message


def test_a_null_is_missed_as_a_column_is(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text(
        '{"prompt": "a", "level": 1}\n{"prompt": "b", "level": null}\n'
    )
    data = DataConfig.model_validate({"train": [{"path": str(tmp_path / "d.jsonl")}]})
    cfg = reward(tmp_path / "r.py", "def f(completion, level): return 1.0")
    told = "lack it, the first is"
    (finding,) = told_of(cfg, data)
    assert f"1 of the first 2 rows of data.train.0 {told}" in finding.message
    assert "d.jsonl, line 2 (which has: prompt)" in finding.message
    with make(cfg) as scorer_, pytest.raises(UserError, match=f"1 of 2 rows {told} row train:2"):
        scorer_.check_data(rows({"level": 1}, {"level": None}), encode)


def test_an_answer_that_a_function_can_do_without_is_not_missed(tmp_path: Path) -> None:
    (tmp_path / "d.jsonl").write_text('{"prompt": "a"}\n')
    data = DataConfig.model_validate({"train": [{"path": str(tmp_path / "d.jsonl")}]})
    for source in (
        "def f(completion, answer=None): return 1.0",
        "def f(queries, prompts, labels=()): return [1.0]",
        "def f(completion, **rest): return 1.0",
    ):
        cfg = reward(tmp_path / "r.py", source)
        assert told_of(cfg, data) == []
        with make(cfg) as scorer_:
            scorer_.check_data([Prompt(id="d:1", token_ids=(1,), text="Q", metadata={})], encode)


@pytest.mark.parametrize("looks", ["where needed", "not the second process", "nothing needed"])
@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("rows.jsonl", '{"prompt": "a"}\n' * 40),
        ("rows.json", '\n {"prompt": "a"}\n' * 40),
        ("short.json", '[{"prompt": "a"}]'),
        ("long.json", "\ufeff\n [" + ", ".join(['{"prompt": "a"}'] * 40) + "]"),
    ],
)
def test_rows_are_looked_at_where_columns_are_needed(
    looks: str,
    name: str,
    content: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the first process, and never a large array, which could only be parsed whole."""
    rank = int(looks == "not the second process")
    places = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": 2}
    for variable, value in places.items():
        monkeypatch.setenv(variable, str(value))
    monkeypatch.setattr(command, "_MAX_ARRAY_BYTES", 100, raising=False)
    read: list[str] = []
    real = blocks.parse_json

    def parse(text: str, location: str) -> object:
        read.append(location)
        return real(text, location)

    monkeypatch.setattr(blocks, "parse_json", parse)
    (tmp_path / name).write_text(content, encoding="utf-8")
    data = DataConfig.model_validate({"train": [{"path": str(tmp_path / name)}]})
    column = "" if looks == "nothing needed" else ", level"
    cfg = reward(tmp_path / "r.py", f"def f(completion{column}): return 1.0")
    found = [(finding.level, finding.message) for finding in told_of(cfg, data)]
    if looks != "where needed":
        assert found == []
        assert looks == "nothing needed" or read == []
    elif name == "long.json":
        ((level, message),) = found
        assert level == "warning"
        assert "data.train.0.path" in message
        assert "long.json' is a JSON array" in message
        assert read == []
    else:
        assert [level for level, _ in found] == ["error"]
        assert read


# -- before the model is loaded ------------------------------------------------------------------

MISTAKES = {
    "name": ("def f(completion):\n    return lenght(completion)", "NameError: name 'lenght'"),
    "attribute": ("import math\ndef f(completion):\n    return math.squ(2)", "no attribute 'squ'"),
    "import": ("def f(completion):\n    import nowhere_at_all", "No module named"),
    "call": (
        "import inspect\ndef f(): return 1.0\n"
        "f.__signature__ = inspect.signature(lambda completion: 1.0)",
        "unexpected keyword argument",
    ),
    "not a number": ("def f(completion):\n    return 'good'", "returned str"),
}
PERHAPS = {
    "json": (
        "import json\ndef f(completion):\n    return json.loads(completion)['score']",
        "TypeError: 'int' object",
    ),
    "json get": (
        "import json\ndef f(completion):\n    return json.loads(completion).get(1)",
        "get",
    ),
    "unbound": (
        "def f(completion):\n    for c in completion:\n        if c == 'x': y = 1\n    return y",
        "UnboundLocalError",
    ),
    "executed": ("def f(completion):\n    return eval(completion + 'x')", "SyntaxError"),
    "executed name": ("def f(completion):\n    return eval('x' + completion)", "NameError"),
    "hang": ("import time\ndef f(completion):\n    time.sleep(99)", "timeout: f: killed after 1 s"),
    "not finite": ("def f(completion):\n    return float('nan')", "must be finite"),
    "crash": ("import os\ndef f(completion):\n    os._exit(3)", "exit code 3"),
}


@pytest.mark.parametrize("mistake", PERHAPS)
def test_what_another_completion_may_avoid_is_a_warning(
    mistake: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    source, told = PERHAPS[mistake]
    limit_s = 1.0 if mistake == "hang" else 60.0
    with (
        make(reward(tmp_path / "r.py", source, timeout_s=limit_s)) as scorer_,
        caplog.at_level(logging.WARNING),
    ):
        scorer_.check_data(rows({}), encode)
    (record,) = caplog.records
    assert "no reward could be computed for row train:1" in record.message
    assert told in record.message


@pytest.mark.parametrize("mistake", MISTAKES)
def test_each_function_is_called_on_one_row_in_its_worker(mistake: str, tmp_path: Path) -> None:
    source, told = MISTAKES[mistake]
    with (
        make(reward(tmp_path / "r.py", source)) as scorer_,
        pytest.raises(UserError, match="row train:1") as caught,
    ):
        scorer_.check_data(rows({}, {}), encode)
    assert told in str(caught.value)
    assert mistake != "raise" or "r.py:2" in str(caught.value)


def test_a_function_that_works_is_called_once_more_and_leaves_no_trace(tmp_path: Path) -> None:
    calls = tmp_path / "calls"
    source = (
        f"def f(completion, answer, completion_ids, level):\n"
        f"    open({str(calls)!r}, 'a').write(f'{{completion}} {{answer}} {{completion_ids}}|')\n"
        "    return 1.0\n"
    )
    with make(reward(tmp_path / "r.py", source)) as scorer_:
        scorer_.check_data(rows({"level": 1}, {"level": 2}), encode)
        assert calls.read_text() == "42 42 [52, 50]|"
        stats = scorer_.stats()
        assert (stats.num_scored, stats.num_pending, dict(stats.num_failed)) == (0, 0, {})
        assert scorer_.score([make_sample("x", level=3)])[0].valid


def test_a_row_far_behind_that_lacks_a_column_is_named(tmp_path: Path) -> None:
    cfg = reward(tmp_path / "r.py", "def f(completion, level): return 1.0")
    held = [{"level": 1}] * 200 + [{"lvel": 1}] + [{"level": 1}] * 50
    with (
        make(cfg) as scorer_,
        pytest.raises(UserError, match=r"1 of 251 rows lack it, the first is row train:201"),
    ):
        scorer_.check_data(rows(*held), encode)


def test_a_run_and_an_evaluation_try_functions_before_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_inputs(tmp_path)
    (tmp_path / "rewards.py").write_text("def even(completion):\n    return unknown\n")

    def load(*_: object, **__: object) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr(reinforce, "load_for_training", load)
    monkeypatch.setattr(workers, "load_model", load)
    cfg = tiny_config(tmp_path, tmp_path / "run")
    with pytest.raises(UserError, match=r"row train:1, .*rewards\.py:2: NameError: name 'unknown'"):
        reinforce.run(cfg)
    names = ("model", "engine", "reward")
    tree = {name: getattr(cfg, name).model_dump() for name in names}
    tree["model"] = {"path": cfg.model.path}
    tree["data"] = cfg.data.model_dump(exclude={"curriculum"})
    tree["run"] = {"dir": tmp_path / "eval", "device": "cpu"}
    tree["eval"] = {"max_completion_tokens": 8}
    with pytest.raises(UserError, match=r"row eval:1, .*rewards\.py:2: NameError: name 'unknown'"):
        run_evaluation(EvaluateConfig.model_validate(tree))


# -- after few samples ---------------------------------------------------------------------------

WRONG_FILE = """\
import json
def f(completion, index):
    if index % 4 == 0:
        raise RuntimeError(f"sample {index}")
    return json.loads(completion)["score"]
"""


def test_a_run_ends_when_all_of_the_first_samples_fail(tmp_path: Path) -> None:
    """The place told is in the user's file, though the error is raised in a library."""
    with make(reward(tmp_path / "r.py", WRONG_FILE)) as scorer_:
        for index in range(300):
            scorer_.submit(row(index))
        with pytest.raises(FailureRateError) as caught:
            wait_for(scorer_)
        assert scorer_.stats().num_pending > 200, "most were not waited for"
    text = str(caught.value)
    assert "all of the first 24" in text
    assert "24 x exception" in text
    assert "(18 x)" in text, "the commonest of two causes"
    assert "r.py:5: JSONDecodeError" in text


def wait_for(scorer_: Scorer) -> None:
    while scorer_.pending:
        scorer_.poll(1.0)


def row(index: int) -> Sample:
    sample = make_sample("no json", index=index)
    prompt = Prompt(id=f"p:{index}", token_ids=(1,), text="Q", metadata={"index": index})
    sample.prompt = prompt
    return sample


def test_one_score_or_the_users_word_lets_a_run_go_on(tmp_path: Path) -> None:
    source = "def f(completion):\n    return 1.0 if completion == 'good' else 1 / 0\n"
    bad = [make_sample("bad", index=n) for n in range(40)]
    with make(reward(tmp_path / "r.py", source)) as scorer_:
        samples = scorer_.score([make_sample("good"), *bad])
        assert sum(sample.valid for sample in samples) == 1
    with make(reward(tmp_path / "r.py", source, max_failure_rate=1)) as scorer_:
        samples = scorer_.score([make_sample("bad", index=n) for n in range(40)])
        assert not any(sample.valid for sample in samples)


def test_an_evaluation_ends_when_all_of_the_first_samples_fail() -> None:
    prompts = [Prompt(id=f"d:{n}", token_ids=(1, 2), text="Q") for n in range(100)]  # no answers
    with (
        Scorer(RewardConfig(), max_completion_tokens=8) as scorer_,
        pytest.raises(FailureRateError, match=r"first 24 .*no answer"),
    ):
        evaluate(
            prompts,
            engine=FakeEngine(),
            scorer=scorer_,
            cfg=EvaluationConfig(max_completion_tokens=8),
            episodes=Episodes(decode=str, run_seed=0, purpose="eval"),
        )


# -- while it lasts ------------------------------------------------------------------------------


def test_what_is_waited_for_is_said_in_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scorer, "_WAIT_S", 0.0)
    source = (
        "import time\ndef f(completion):\n    time.sleep(99 * (completion == 'slow'))\n    return 1"
    )
    told: list[str] = []
    with make(reward(tmp_path / "r.py", source, timeout_s=1.0)) as scorer_:
        scorer_.on_wait = told.append
        texts = ["fast", "slow", "slow", "fast"]
        for index, text in enumerate(texts):
            scorer_.submit(make_sample(text, index=index))
        scorer_.poll(0.0)
        assert told == [], "the caller has other work"
        while scorer_.pending:
            scorer_.poll(0.05)
        assert told
        assert all(text.startswith("scoring ") and " of 4" in text for text in told)
        assert any(re.search(", [1-4] timed out", text) for text in told), told


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("import time\ntime.sleep(99)\ndef f(completion): return 1", "killed after 1 s"),
        (
            "import os, time\nfor _ in range(300):\n    if os.fork() == 0: time.sleep(99)\n"
            "time.sleep(99)\ndef f(completion): return 1",
            r"started \d{3} processes; at most 256",
        ),
    ],
)
def test_an_import_that_hangs_or_forks_without_end_is_named(
    source: str,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(pool, "LOAD_TIMEOUT_S", 1.0 if "killed after" in told else 60.0)
    monkeypatch.setattr(pool, "_SLOW_IMPORT_S", 0.01)
    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(ValueError, match=rf"r\.py:f\): .*{told}"),
        make(reward(tmp_path / "r.py", source)),
    ):
        pass
    assert "r.py:f) has taken" in caplog.text


def test_a_call_that_forks_without_end_is_killed_before_its_deadline(tmp_path: Path) -> None:
    source = (
        "import os, time\ndef f(completion):\n    if completion == 'good': return 1\n"
        "    for _ in range(300):\n        if os.fork() == 0: time.sleep(99)\n    time.sleep(99)\n"
    )
    with make(reward(tmp_path / "r.py", source, timeout_s=60.0)) as scorer_:
        bad, good = scorer_.score([make_sample("fork"), make_sample("good", index=1)])
    assert bad.failure is FailureKind.CRASH
    assert re.search(r"started \d{3} processes; at most 256", bad.failure_detail)
    assert good.valid


def test_a_child_that_an_import_forked_does_not_answer(tmp_path: Path) -> None:
    source = "import os\nPID = os.fork()\ndef f(completion): return 1 + (PID == 0)\n"
    with make(reward(tmp_path / "r.py", source)) as scorer_:
        samples = scorer_.score([make_sample("x", index=n) for n in range(50)])
    assert {sample.reward.total for sample in samples if sample.reward} == {1.0}
    assert all(sample.valid for sample in samples)
