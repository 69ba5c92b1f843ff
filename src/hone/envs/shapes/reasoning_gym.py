"""The scorers of reasoning-gym, as a reward function.

reasoning-gym makes rows and scores answers of one turn, so it needs no environment:

    reward.functions: [{fn: "hone.envs.shapes.reasoning_gym:score_answer"}]

docs/environments.md has a script that writes rows of its data sets.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NoReturn

from hone.extras import import_extra

__all__ = ["no_environment", "score_answer"]

_Scorer = Callable[[str | None, dict[str, Any]], float]


def score_answer(completion: str, metadata: Mapping[str, Any], tag: str = "answer") -> float:
    """The score from 0 to 1 that the data set of the row gives a completion.

    The row has the columns of an entry: `question`, `answer` and `metadata`, whose `source_dataset`
    names the data set. The answer is the text in the last `<answer>` of the completion, as
    `reasoning_gym.utils.extract_answer` finds it; a completion without one is scored as no answer.
    With an empty `tag` the whole completion is the answer.

    Some scorers raise for an answer that they cannot read, such as a word for a number: it scores
    0. Raises what the scorer raises for the right answer of the row, KeyError for a row without
    these columns, UserError where the package is not installed.
    """
    scorer = _scorer(metadata["metadata"]["source_dataset"])
    entry, answer = _as_made(metadata, scorer), completion
    if tag:
        answer = _gym("utils").extract_answer(completion, tag_name=tag)
    try:
        return float(scorer(answer, entry))
    except Exception:  # noqa: BLE001 - foreign code, which has read the right answer just now
        return 0.0


def _as_made(columns: Mapping[str, Any], scorer: _Scorer) -> dict[str, Any]:
    """The entry of a row as its data set made it. JSON has no tuples, and data sets that compare
    with tuples (arc_agi) would take the right answer for a wrong one: then lists become tuples."""
    entry = {name: columns[name] for name in ("question", "answer", "metadata")}
    if entry["answer"] is None or (score := scorer(entry["answer"], entry)) == 1:
        return entry
    frozen = {**entry, "metadata": _frozen(entry["metadata"])}
    return frozen if scorer(entry["answer"], frozen) > score else entry


def _frozen(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _frozen(item) for key, item in value.items()}
    return tuple(map(_frozen, value)) if isinstance(value, list) else value


def no_environment(name: str, _: Mapping[str, Any]) -> NoReturn:
    """Raise ValueError: what to write instead of `env.path: reasoning_gym:NAME`."""
    raise ValueError(
        f"'reasoning_gym:{name}' is a source of rows with answers of one turn. Write its rows to a "
        "file (docs/environments.md), leave env.path unset, and score them by "
        "`hone.envs.shapes.reasoning_gym:score_answer` in reward.functions"
    )


@cache
def _scorer(name: str) -> _Scorer:
    return _gym("factory").get_score_answer_fn(name)


def _gym(module: str) -> Any:
    return import_extra("reasoning_gym", needed_by="score_answer", module=f"reasoning_gym.{module}")
