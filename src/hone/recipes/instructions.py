"""The reward of the recipe `instructions`: which of a row's checks an answer keeps.

A row has a column `checks`, a mapping of the names below to what they ask for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["CHECKS", "follows"]


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True


def _has_all(text: str, words: list[str]) -> bool:
    return all(word.casefold() in text.casefold() for word in words)


def _has_any(text: str, words: list[str]) -> bool:
    return any(word.casefold() in text.casefold() for word in words)


CHECKS: Mapping[str, Callable[[str, Any], bool]] = {
    "min_words": lambda text, number: len(text.split()) >= number,
    "max_words": lambda text, number: len(text.split()) <= number,
    "keywords": _has_all,
    "forbidden": lambda text, words: not _has_any(text, words),
    "lowercase": lambda text, wanted: (text == text.lower()) == wanted,
    "commas": lambda text, wanted: ("," in text) == wanted,
    "bullets": lambda text, number: (
        sum(x.lstrip().startswith("* ") for x in text.split("\n")) == number
    ),
    "json": lambda text, wanted: _is_json(text) == wanted,
    "ends_with": lambda text, end: text.rstrip().endswith(end),
}
"""By name: whether an answer keeps the check, given what the row asks for."""


def follows(completion: str, checks: Mapping[str, Any]) -> float:
    """The share of checks that the answer keeps: what stands between <answer> and </answer>, or the
    whole completion without these. 1 means that all are kept.

    Raises KeyError for a check that is not known.
    """
    answer = completion.rpartition("<answer>")[2].partition("</answer>")[0].strip()
    asked = {name: value for name, value in checks.items() if value is not None}
    kept = [CHECKS[name](answer, value) for name, value in asked.items()]
    return sum(kept) / len(kept) if kept and answer else 0.0
