"""Reward functions as TRL, verl and OpenRLHF call them, each with what its framework gives it."""

from __future__ import annotations

import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hone.api import check
from hone.rewards.base import Builtin
from hone.rewards.score import RewardFunction, arguments, score
from hone.rewards.scorer import Scorer
from hone.types import FailureKind, Prompt, Sample, StopReason
from hone.user_code.signatures import shape_of
from tests.rewards.scoring import config

MESSAGES = [{"role": "user", "content": "2 + 2?"}]


def sample(**prompt: Any) -> Sample:
    """A completion `four` that weights of version 7 ended."""
    fields = {"text": "<user>2 + 2?", "unrendered": "2 + 2?", "answer": "4", "raw_answer": 4}
    return Sample(
        id="p:1/0",
        prompt=Prompt(id="p:1", token_ids=(1,), task="sums", **fields | prompt),
        index=0,
        token_ids=[5, 6],
        logprobs=[-1.0, -1.0],
        weight_versions=[6, 7],
        loss_mask=[True, True],
        stop_reason=StopReason.EOS,
        text="four",
    )


def verdict(function: Any, args: dict[str, Any] | None = None, **prompt: Any) -> Any:
    functions = [RewardFunction(function, name="f", weight=1.0, args=args or {})]
    return score(functions, arguments(sample(**prompt), max_completion_tokens=8))


def seen_by(function_of: Any, **prompt: Any) -> dict[str, Any]:
    seen: dict[str, Any] = {}
    outcome = verdict(function_of(seen), **prompt)
    assert outcome.reward is not None, outcome
    return seen


def trl(seen: dict[str, Any]) -> Any:
    def f(prompts, completions, completion_ids, trainer_state, level, scale=2, **kwargs):  # noqa: PLR0917
        seen.update(locals())
        return [1.0]

    return f


def test_trl_gets_lists_of_one_sample_and_columns_as_lists() -> None:
    seen = seen_by(trl, metadata={"level": 3, "solution": "4", "odd name": 1})
    assert seen["prompts"] == ["2 + 2?"]
    assert seen["completions"] == ["four"]
    assert seen["completion_ids"] == [[5, 6]]
    assert seen["trainer_state"].global_step == 7
    assert seen["level"] == [3]
    assert seen["scale"] == 2
    others = seen["kwargs"]
    assert others.pop("log_metric")
    assert others.pop("log_extra")
    assert others == {"solution": ["4"], "answer": ["4"], "task": ["sums"]}


def test_trl_gets_messages_of_conversational_data() -> None:
    seen = seen_by(trl, unrendered=MESSAGES, metadata={"level": 3})
    assert seen["prompts"] == [MESSAGES]
    assert seen["completions"] == [[{"role": "assistant", "content": "four"}]]


def test_verl_gets_the_ground_truth_as_it_is_and_the_extra_info() -> None:
    def of(seen: dict[str, Any]) -> Any:
        def compute_score(data_source, solution_str, ground_truth, extra_info=None):
            seen.update(locals())
            return 1

        return compute_score

    model = {"style": "rule", "ground_truth": ["4", "four"]}
    columns = {"data_source": "a/b", "reward_model": model, "extra_info": {"index": 3}}
    seen = seen_by(of, metadata=columns, answer='["4", "four"]', raw_answer=["4", "four"])
    seen.pop("seen")
    assert seen == {
        "data_source": "a/b", "solution_str": "four", "ground_truth": ["4", "four"],
        "extra_info": {"index": 3},
    }  # fmt: skip
    seen = seen_by(of)
    assert (seen["data_source"], seen["extra_info"]) == ("sums", {})


def test_openrlhf_gets_queries_prompts_and_labels() -> None:
    def of(seen: dict[str, Any]) -> Any:
        def reward_func(queries, prompts, labels, **kwargs):
            seen.update(locals())
            return torch.tensor([1.0])

        return reward_func

    seen = seen_by(of)
    assert seen["queries"] == ["<user>2 + 2?four"]
    assert seen["prompts"] == ["<user>2 + 2?"]
    assert (seen["labels"], seen["kwargs"]) == ([4], {})
    assert seen_by(of, raw_answer=None)["labels"] == [""]


async def asynchronous(completions, **kwargs):
    return [float(text == "four") for text in completions]


def logging_one(completions, log_metric, log_extra, **kwargs):
    log_metric("length", 4.0)
    log_extra("right", [True])
    log_extra("words", ["four"])
    return [1.0]


def compute_score(value: Any) -> Any:
    return lambda solution_str, ground_truth: value


def reward_func(value: Any) -> Any:
    return lambda queries, prompts, labels: value


def of_lists(value: Any) -> Any:
    return lambda completions, **kwargs: value


@pytest.mark.parametrize(
    ("function", "parts"),
    [
        (asynchronous, {"f": 1.0}),
        (logging_one, {"f": 1.0, "f/length": 4.0, "f/right": 1.0}),
        (of_lists([0.5]), {"f": 0.5}),
        (of_lists([np.float32(0.5)]), {"f": 0.5}),
        (compute_score(True), {"f": 1.0}),
        (compute_score({"score": 1, "acc": True, "pred": "four"}), {"f": 1.0, "f/acc": 1.0}),
        (reward_func([0.5]), {"f": 0.5}),
        (
            reward_func(
                {
                    "rewards": torch.tensor([0.5]),
                    "scores": torch.tensor([1.0]),
                    "extra_logs": {"accuracy": torch.tensor(1.0), "format": torch.tensor([0.0])},
                }
            ),
            {"f": 0.5, "f/scores": 1.0, "f/accuracy": 1.0, "f/format": 0.0},
        ),
    ],
)
def test_what_they_return(function: Any, parts: dict[str, float]) -> None:
    assert verdict(function).reward.parts == parts


@pytest.mark.parametrize(
    ("function", "told"),
    [
        (of_lists([0.0, 1.0]), "2 values"),
        (of_lists([]), "0 values"),
        (of_lists(["1"]), "returned str"),
        (of_lists(1.0), "returned 1.0; a function that takes `completions`"),
        (of_lists(torch.tensor(1.0)), "return [score]"),
        (of_lists([math.nan]), "nan"),
        (of_lists([None]), "every reward function returned None"),
        (of_lists(None), "every reward function returned None"),
        (compute_score(None), "NoneType"),
        (compute_score({"acc": 1}), "without 'score'"),
        (reward_func({"scores": [1.0]}), "without 'rewards'"),
        (reward_func({"rewards": torch.ones(2)}), "2 values"),
        (lambda completion_ids, **kwargs: [1.0], "known by `completions`"),
    ],
)
def test_what_they_may_not_return(function: Any, told: str) -> None:
    outcome = verdict(function)
    assert outcome.failure is FailureKind.INVALID
    assert told in outcome.detail


SOURCE = """
import time

def of_trl(completions, level, **kwargs):
    return [float(text == "four") for text in completions]

def of_verl(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(60 if solution_str == "hang" else 0)
    return float(solution_str == "four")

def of_openrlhf(queries, prompts, labels):
    return {"rewards": [float(query.endswith("four")) for query in queries]}

def own(completion):
    return 0.5
"""


def test_in_killable_workers_and_said_once(tmp_path: Path, caplog: Any) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(SOURCE)
    names = ("of_trl", "of_verl", "of_openrlhf", "own")
    cfg = config(*(f"{file}:{name}" for name in names), num_workers=1)
    caplog.set_level(logging.INFO)
    with Scorer(cfg, max_completion_tokens=8) as scorer:
        scorer.check_data([sample(metadata={"level": 1}).prompt], lambda text: [1])
        good, hanging = sample(metadata={"level": 1}), sample(metadata={"level": 1})
        hanging.text = "hang"
        scorer.score([good, hanging])
    assert good.reward is not None
    assert good.reward.parts == {"of_trl": 1.0, "of_verl": 1.0, "of_openrlhf": 1.0, "own": 0.5}
    assert hanging.failure is FailureKind.TIMEOUT
    assert hanging.failure_detail.startswith("of_verl")
    told = [record.getMessage() for record in caplog.records if "is called as" in record.message]
    assert "with whole_groups it could compare those of a prompt" in told[0]
    assert "messages" not in "".join(told)
    assert [text.split(":")[-1].split("'")[0] for text in told] == [
        "of_trl is called as TRL", "of_verl is called as verl", "of_openrlhf is called as OpenRLHF",
    ]  # fmt: skip


def test_check_says_the_shape(tmp_path: Path) -> None:
    (tmp_path / "rewards.py").write_text(SOURCE)
    names = ("of_trl", "of_verl", "of_openrlhf", "own")
    functions = [{"fn": f"{tmp_path / 'rewards.py'}:{name}"} for name in names]
    found = check(model={"path": "."}, reward=functions, data=[{"prompt": "a", "level": 1}])
    shapes = {k: v for k, v in found.derived.items() if k.startswith("reward.")}
    assert shapes == {
        "reward.of_trl": "TRL's shape", "reward.of_verl": "verl's shape",
        "reward.of_openrlhf": "OpenRLHF's shape",
    }  # fmt: skip


def test_an_unknown_name_is_certain_also_where_the_function_has_no_file() -> None:
    space: dict[str, Any] = {}
    exec(compile("def f(completion): return undefined", "<stdin>", "exec"), space)
    assert verdict(space["f"]).is_certain
    exec(compile("def f(completion): return eval('undefined')", "<stdin>", "exec"), space)
    assert not verdict(space["f"]).is_certain


@pytest.mark.parametrize(
    ("error", "is_certain"), [(ValueError("no answer"), True), (OSError("disk full"), False)]
)
def test_of_a_built_in_only_what_it_says_of_a_row_is_certain(
    error: Exception, is_certain: bool
) -> None:
    class Failing(Builtin):
        def __call__(self, *, completion: str) -> float:
            raise error

    assert verdict(Failing()).is_certain == is_certain


def test_recognition() -> None:
    from inspect import signature

    def frameworks(*functions: Any) -> list[str]:
        return [shape_of(signature(f).parameters.values()).framework for f in functions]

    assert frameworks(
        lambda completions: [1.0],
        lambda prompts, completions, completion_ids, **kwargs: [1.0],
        lambda solution_str, ground_truth, method="strict": 1.0,
        lambda queries, prompts, labels: [1.0],
        lambda completion, prompts, labels: 1.0,
        lambda **kwargs: 1.0,
        lambda completion, queries: 1.0,
        lambda completion, solution_str: 1.0,
    ) == ["TRL", "TRL", "verl", "OpenRLHF", *["hone"] * 4]
