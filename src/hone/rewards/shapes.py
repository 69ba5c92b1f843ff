"""What a reward function is called with, and what its result means, by the shape of its signature.

A function of TRL or OpenRLHF takes lists: it gets lists of one sample, so that each sample has its
deadline and its own failure, or lists of all samples of a prompt, with `whole_groups`.

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
    "InvalidScoreError",
    "Part",
    "ScoreTypeError",
    "call_arguments",
    "own_part",
    "read_parts",
]


class InvalidScoreError(Exception):
    """A reward function returned something that is not a score."""


class ScoreTypeError(InvalidScoreError):
    """What it returned is not even of a type that a score may have."""


@dataclass(frozen=True, slots=True)
class Part:
    """What one function said about one sample; None: it does not apply."""

    score: float | None
    metrics: Mapping[str, float] = field(default_factory=dict[str, float])


def call_arguments(
    shape: Shape,
    givens: Sequence[Mapping[str, Any]],
    args: Mapping[str, Any],
    logged: dict[str, Any],
) -> dict[str, Any]:
    """All that a function of this shape may ask for by name, from what is `given` of each sample
    (see `score.arguments`) and its own `args`. What a function of TRL logs while it runs comes into
    `logged`. Only a shape that takes lists is called with several."""
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
                "extra_info": dict(columns.get("extra_info") or {}),
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


def _trl(givens: Sequence[Mapping[str, Any]], logged: dict[str, Any]) -> dict[str, Any]:
    def log_extra(name: str, values: Sequence[Any]) -> None:
        logged[name] = values

    return {
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


def read_parts(value: object, shape: Shape, logged: Mapping[str, Any], num: int) -> list[Part]:
    """Check what a function of this shape returned for `num` samples, with what it has `logged`;
    its part of each.

    Raises InvalidScoreError for what is no score, and for a number that is not finite.
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
            scores = [_finite(one, "a score") for one in _each(score, num)]
        case _:
            return [own_part(value)]
    return [
        Part(None if score is None else _finite(score, "a score"), _numbers(others, index, num))
        for index, score in enumerate(scores)
    ]


def own_part(value: object) -> Part:
    """A number, a bool, None, or a mapping with `score` and further numbers. Raises
    InvalidScoreError."""
    if not isinstance(value, Mapping):
        return Part(None if value is None else _finite(value, "a score"))
    score, others = _split(value, "score")
    metrics = {str(key): _finite(item, f"metric '{key}'") for key, item in others.items()}
    return Part(None if score is None else _finite(score, "a score"), metrics)


def _split(value: object, key: str) -> tuple[object, dict[str, Any]]:
    """The score of a mapping, and what else is in it."""
    if not isinstance(value, Mapping):
        return value, {}
    if key not in value:
        raise ScoreTypeError(f"returned a mapping without '{key}': keys {list(value)[:20]}")
    return value[key], {str(name): item for name, item in value.items() if name != key}


def _plain(value: object) -> Any:
    """Tensors and arrays as numbers and lists of numbers."""
    to_list = getattr(value, "tolist", None)
    return to_list() if callable(to_list) else value


def _each(value: object, num: int) -> list[Any]:
    """The values of a list, tuple, tensor or array with one for each of `num` samples; a single one
    as it is."""
    value = _plain(value)
    if not isinstance(value, list | tuple):
        if num == 1:
            return [value]
        raise ScoreTypeError(f"returned {value!r:.80} for {num} completions; return a list")
    if len(value) != num:
        raise ScoreTypeError(
            f"returned {len(value)} values for a list of {num}; return one for each completion"
        )
    return [_each(one, 1)[0] if isinstance(one, list | tuple) else one for one in value]


def _of_list(value: object, num: int) -> list[Any]:
    """The values of a list with one for each of `num` samples, which a function of TRL returns."""
    if not isinstance(_plain(value), list | tuple):
        raise ScoreTypeError(
            f"returned {value!r:.80}; a function that takes `completions` is called as TRL's, with "
            f"a list of {num}, and returns a list with a score for each: return [score]. Take "
            "`completion` to be called with one and return a number."
        )
    return _each(value, num)


def _numbers(values: Mapping[str, Any], index: int, num: int) -> dict[str, float]:
    """The finite numbers among what a function reports beside the scores of `num` samples, of the
    one at `index` where there is a list of them; all else is left out."""
    plain = {name: _plain(value) for name, value in values.items()}
    plain = {
        k: v[index] if isinstance(v, list | tuple) and len(v) == num else v
        for k, v in plain.items()
    }
    # A diagnostic of 0 / 0 must not cost the sample its reward.
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
