"""Arguments and results of reward functions, by the shape of their signature.

Functions of TRL and OpenRLHF take lists. They get lists of one sample, so that each sample has its
own deadline and failure, or with `whole_groups` lists of all samples of a prompt.

Sources: TRL `GRPOTrainer._calculate_rewards`, verl `NaiveRewardManager`, OpenRLHF's
`examples/python/reward_func.py`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from types import SimpleNamespace
from typing import Any

from hone.user_code.signatures import GIVEN, Shape

__all__ = [
    "DeadlineError",
    "FunctionScore",
    "InvalidScoreError",
    "ProgramError",
    "ScoreTypeError",
    "call_arguments",
    "read_score",
    "read_scores",
]


class InvalidScoreError(Exception):
    """A reward function returned something that is not a score."""


class DeadlineError(Exception):
    """An episode has passed its deadline and has no score."""


class ProgramError(Exception):
    """The program that plays an episode has failed."""


class ScoreTypeError(InvalidScoreError):
    """A reward function returned a value of a type that no score has."""


@dataclass(frozen=True, slots=True)
class FunctionScore:
    """The score of one sample by one function, with further numbers; the score None means that the
    function does not apply."""

    score: float | None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])
    is_truncated: bool = False
    """For an environment: a limit has ended the episode, or the environment has cut it."""
    earned: float = 0.0
    """For an environment: the reward of an observation that came too late to be shown."""


def call_arguments(
    shape: Shape,
    givens: Sequence[Mapping[str, Any]],
    args: Mapping[str, Any],
    logged: dict[str, Any],
) -> dict[str, Any]:
    """All arguments that a function of this shape may name, from the values of each sample (see
    `score.arguments`) and its own `args`. Metrics that a function of TRL logs are added to
    `logged`. Only a shape that takes lists gets several samples."""
    given = givens[0]
    columns: Mapping[str, Any] = given["metadata"]
    match shape.framework:
        case "TRL":
            rows = [
                {"answer": g["answer"], "task": g["task"]} | dict(g["metadata"]) for g in givens
            ]
            lists = {name: [row.get(name) for row in rows] for name in rows[0]}
            return lists | {**args} | _trl(givens, logged)
        case "verl":
            return {**args} | {
                "data_source": columns.get("data_source", given["task"]),
                "solution_str": given["completion"],
                "ground_truth": given["raw_answer"],
                "extra_info": dict(columns.get("extra_info") or {}) | _of_agent(given),
            }
        case "OpenRLHF":
            labels = [g["raw_answer"] for g in givens]
            return {**args} | {
                "queries": [g["prompt"] + g["completion"] for g in givens],
                "prompts": [g["prompt"] for g in givens],
                "labels": ["" if label is None else label for label in labels],
            }
        case _:
            return {**columns} | {**args} | {name: given[name] for name in GIVEN}


def _of_agent(given: Mapping[str, Any]) -> dict[str, Any]:
    """What an environment of verl gives to reward functions: `tool_rewards`, `turn_scores`, and
    what its tools have kept in `agent_data.extra_fields`."""
    return dict(getattr(given.get("environment"), "extra_fields", None) or {})


def _trl(givens: Sequence[Mapping[str, Any]], logged: dict[str, Any]) -> dict[str, Any]:
    def log_extra(name: str, values: Sequence[Any]) -> None:
        logged[name] = values

    live = [given["environment"] for given in givens if "environment" in given]
    environments = {"environments": live} if live else {}
    return environments | {
        "prompts": [given["unrendered"] for given in givens],
        "completions": [
            given["completion"]
            if isinstance(given["unrendered"], str)
            else [{"role": "assistant", "content": given["completion"]}]
            for given in givens
        ],
        "completion_ids": [given["completion_ids"] for given in givens],
        "trainer_state": SimpleNamespace(
            global_step=max(given["weight_version"] for given in givens)
        ),
        "log_metric": logged.__setitem__,
        "log_extra": log_extra,
    }


def read_scores(
    value: object, shape: Shape, logged: Mapping[str, Any], num: int
) -> list[FunctionScore]:
    """The scores in the result of a function of this shape for `num` samples, with the metrics that
    it has `logged`.

    Raises InvalidScoreError for results that are not scores or not finite.
    """
    match shape.framework:
        case "TRL":
            scores = [None] * num if value is None else _of_list(value, num)
            others = logged
        case "verl":
            score, others = _split(value, "score")
            scores = [_finite(_plain(score), "a score")]
        case "OpenRLHF":
            score, others = _split(value, "rewards")
            extra = others.pop("extra_logs", None)
            others |= extra if isinstance(extra, Mapping) else {}
            scores = [_finite(value, "a score") for value in _each(score, num)]
        case _:
            return [read_score(value)]
    return [
        FunctionScore(
            None if score is None else _finite(score, "a score"), _numbers(others, index, num)
        )
        for index, score in enumerate(scores)
    ]


def read_score(value: object) -> FunctionScore:
    """The score in a result of hone's own shape: a number, a bool, None, or a mapping with `score`
    and further numbers. Raises InvalidScoreError."""
    if not isinstance(value, Mapping):
        return FunctionScore(None if value is None else _finite(value, "a score"))
    score, others = _split(value, "score")
    metrics = {str(key): _finite(item, f"metric '{key}'") for key, item in others.items()}
    return FunctionScore(None if score is None else _finite(score, "a score"), metrics)


def _split(value: object, key: str) -> tuple[object, dict[str, Any]]:
    """The score in a mapping, and its other items."""
    if not isinstance(value, Mapping):
        return value, {}
    if key not in value:
        raise ScoreTypeError(f"returned a mapping without '{key}': keys {list(value)[:20]}")
    return value[key], {str(name): item for name, item in value.items() if name != key}


def _plain(value: object) -> Any:
    """Tensors and arrays as numbers and lists of numbers; other values unchanged."""
    to_list = getattr(value, "tolist", None)
    return to_list() if callable(to_list) else value


def _each(value: object, num: int) -> list[Any]:
    """The values of a list, tuple, tensor or array with one value for each of `num` samples; for
    one sample also a single value."""
    value = _plain(value)
    if not isinstance(value, list | tuple):
        if num == 1:
            return [value]
        raise ScoreTypeError(f"returned {value!r:.80} for {num} completions; return a list")
    if len(value) != num:
        raise ScoreTypeError(
            f"returned {len(value)} values for a list of {num}; return one for each completion"
        )
    return [_each(item, 1)[0] if isinstance(item, list | tuple) else item for item in value]


def _of_list(value: object, num: int) -> list[Any]:
    """The values of a TRL function's list, one for each of `num` samples."""
    if not isinstance(_plain(value), list | tuple):
        raise ScoreTypeError(
            f"returned {value!r:.80}; a function that takes `completions` is called as TRL's, with "
            f"a list of {num}, and returns a list with a score for each: return [score]. Take "
            "`completion` to be called with one and return a number."
        )
    return _each(value, num)


def _numbers(values: Mapping[str, Any], index: int, num: int) -> dict[str, float]:
    """The finite numbers among the further results of a function, for the sample at `index`: a list
    of `num` values has one for each sample. Other values are left out."""
    plain = {name: _plain(value) for name, value in values.items()}
    plain = {
        k: v[index] if isinstance(v, list | tuple) and len(v) == num else v
        for k, v in plain.items()
    }
    # A diagnostic that is NaN must not fail the sample.
    numbers = {k: float(v) for k, v in plain.items() if isinstance(v, Real)}
    return {k: number for k, number in numbers.items() if math.isfinite(number)}


def _finite(value: object, what: str) -> float:
    if not isinstance(value, Real):
        kind = f"{type(value).__module__}.{type(value).__qualname__}".removeprefix("builtins.")
        hint = ""
        if isinstance(value, list):
            hint = "; one that takes and returns lists, as TRL's, is known by `completions`"
        raise ScoreTypeError(
            f"returned {kind} as {what}; return a number, a bool, None (does not apply) or a dict "
            f"with 'score' and further numbers{hint}"
        )
    try:
        number = float(value)
    except OverflowError:
        raise InvalidScoreError(f"returned {what} too large for a float") from None
    if not math.isfinite(number):
        raise InvalidScoreError(f"returned {number} as {what}; it must be finite")
    return number
