"""What a reward function is called with, and what its result means, by the shape of its signature.

A function of TRL or OpenRLHF takes lists: it gets lists of one sample, so that each sample has its
deadline and its own failure.

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

from hone.config.signatures import GIVEN, Shape

__all__ = ["InvalidScoreError", "Part", "ScoreTypeError", "call_arguments", "own_part", "read_part"]


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
    shape: Shape, given: Mapping[str, Any], args: Mapping[str, Any], logged: dict[str, Any]
) -> dict[str, Any]:
    """All that a function of this shape may ask for by name, from `given` (see `score.arguments`)
    and its own `args`. What a function of TRL logs while it runs comes into `logged`."""
    columns: Mapping[str, Any] = given["metadata"]
    match shape.framework:
        case "TRL":
            named = {"answer": given["answer"], "task": given["task"]} | dict(columns)
            return {name: [value] for name, value in named.items()} | {**args} | _trl(given, logged)
        case "verl":
            return {**args} | {
                "data_source": columns.get("data_source", given["task"]),
                "solution_str": given["completion"],
                "ground_truth": given["raw_answer"],
                "extra_info": dict(columns.get("extra_info") or {}),
            }
        case "OpenRLHF":
            label = given["raw_answer"]
            return {**args} | {
                "queries": [given["prompt"] + given["completion"]],
                "prompts": [given["prompt"]],
                "labels": ["" if label is None else label],
            }
        case _:
            return {**columns} | {**args} | {name: given[name] for name in GIVEN}


def _trl(given: Mapping[str, Any], logged: dict[str, Any]) -> dict[str, Any]:
    prompt, completion = given["unrendered"], given["completion"]
    if not isinstance(prompt, str):
        completion = [{"role": "assistant", "content": completion}]

    def log_extra(name: str, values: Sequence[Any]) -> None:
        logged[name] = values

    return {
        "prompts": [prompt],
        "completions": [completion],
        "completion_ids": [given["completion_ids"]],
        "trainer_state": SimpleNamespace(global_step=given["weight_version"]),
        "log_metric": logged.__setitem__,
        "log_extra": log_extra,
    }


def read_part(value: object, shape: Shape, logged: Mapping[str, Any]) -> Part:
    """Check what a function of this shape returned, with what it has `logged`.

    Raises InvalidScoreError for what is no score, and for a number that is not finite.
    """
    match shape.framework:
        case "TRL":
            score = None if value is None else _of_list(value)
            return Part(None if score is None else _finite(score, "a score"), _numbers(logged))
        case "verl":
            score, others = _split(value, "score")
            return Part(_finite(_plain(score), "a score"), _numbers(others))
        case "OpenRLHF":
            score, others = _split(value, "rewards")
            metrics = {key: item for key, item in others.items() if key != "extra_logs"}
            extra = others.get("extra_logs")
            metrics |= extra if isinstance(extra, Mapping) else {}
            return Part(_finite(_only(score), "a score"), _numbers(metrics))
        case _:
            return own_part(value)


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


def _only(value: object) -> Any:
    """The one value of a list, tuple, tensor or array of one sample; a single one as it is."""
    value = _plain(value)
    if not isinstance(value, list | tuple):
        return value
    if len(value) != 1:
        raise ScoreTypeError(f"returned {len(value)} values for a list of one sample; return one")
    return _only(value[0])


def _of_list(value: object) -> Any:
    """The one value of a list of one sample, which a function of TRL returns."""
    if not isinstance(_plain(value), list | tuple):
        raise ScoreTypeError(
            f"returned {value!r:.80}; a function that takes `completions` is called as TRL's, with "
            "a list of one, and returns a list with a score for each: return [score]. Take "
            "`completion` to be called with one and return a number."
        )
    return _only(value)


def _numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """The finite numbers among what a function reports beside its score; all else is left out."""
    plain = {name: _plain(value) for name, value in values.items()}
    plain = {
        k: v[0] if isinstance(v, list | tuple) and len(v) == 1 else v for k, v in plain.items()
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
