"""Scoring of one sample by several named functions, whose weighted sum is its reward.

This code knows nothing of processes: it runs in workers (users' functions, mathematics) and in the
caller (trusted built-ins).
"""

from __future__ import annotations

import asyncio
import inspect
import math
import time
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import ModuleType
from typing import Any, Protocol, TypeVar

from hone.rewards.base import Builtin, ServiceError
from hone.rewards.shapes import (
    DeadlineError,
    FunctionScore,
    InvalidScoreError,
    ProgramError,
    ScoreTypeError,
    call_arguments,
    read_scores,
)
from hone.types import FailureKind, Observation, Reward, Sample, StopReason
from hone.user_code.resolve import error_location
from hone.user_code.signatures import shape_of

__all__ = [
    "ENV_NAME",
    "RewardFunction",
    "Verdict",
    "add_own",
    "arguments",
    "attempt",
    "await_result",
    "score",
    "score_group",
]

MAX_DETAIL_CHARS = 2000

ENV_NAME = "env"
"""Name of an environment's score among the parts of a reward."""

T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The outcome for one sample: exactly one of a reward, a failure, or an observation with which
    its episode continues. Or, in `of_group`, the verdicts on samples that were scored in one
    call."""

    reward: Reward | None = None
    of_group: tuple[Verdict, ...] = ()
    observation: Observation | None = None
    stop_reason: StopReason | None = None
    """The limit that has ended an episode; None where the environment ended it."""
    failure: FailureKind | None = None
    detail: str = ""
    is_certain: bool = False
    """The failure does not depend on the completion: every other one would fail too."""
    is_session_lost: bool = False
    """The session of an episode has failed or its process has ended, so that the episode may be
    played again from its start."""
    seconds: float = 0.0


class Scoring(Protocol[T_co]):
    """A reward function, or an environment."""

    name: str
    file: str | None
    """Its source file, for messages."""

    @property
    def function(self) -> Callable[..., Any]: ...

    def __call__(self, given: Any, /) -> T_co:
        """Call it. Raises InvalidScoreError, or whatever the user's code raises."""
        ...


class RewardFunction:
    """A function with its name, weight and arguments. It is called in the shape of its signature,
    with the arguments that the signature names."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str,
        weight: float,
        args: Mapping[str, Any],
        whole_groups: bool = False,
    ) -> None:
        self.whole_groups = whole_groups
        """Whether it is called with all samples of a prompt, rather than with one."""
        self.function = function
        self.name = name
        self.weight = weight
        self.args = args
        code = getattr(inspect.unwrap(function), "__code__", None)
        self.file: str | None = code.co_filename if code is not None else None
        self._parameters = inspect.signature(function).parameters
        self._shape = shape_of(self._parameters.values())
        self._takes_all = any(p.kind is p.VAR_KEYWORD for p in self._parameters.values())

    def __call__(self, givens: Sequence[Mapping[str, Any]]) -> list[FunctionScore]:
        """Score samples in one call. Raises InvalidScoreError, or whatever the function raises."""
        logged: dict[str, Any] = {}
        available = call_arguments(self._shape, givens, self.args, logged)
        if self._takes_all:
            chosen = {key: value for key, value in available.items() if key.isidentifier()}
        else:
            chosen = {name: available[name] for name in self._parameters if name in available}
        for name, parameter in self._parameters.items():
            required = parameter.default is parameter.empty
            variable = parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL)
            if required and not variable and name not in chosen:
                columns = ", ".join(sorted(givens[0]["metadata"])) or "none"
                raise TypeError(
                    f"'{self.name}' needs '{name}', which is neither in its args nor a column of "
                    f"this row (columns: {columns})"
                )
        value = await_result(self.function(**chosen))
        return read_scores(value, self._shape, logged, len(givens))


def arguments(sample: Sample, *, max_completion_tokens: int) -> dict[str, Any]:
    """The values from which the arguments of reward functions are taken: those of
    `hone.user_code.signatures.GIVEN`, in that order, then those that other frameworks need."""
    metadata, unrendered = dict(sample.prompt.metadata), sample.prompt.unrendered
    return {
        "completion": sample.text,
        "prompt": sample.prompt.text,
        "answer": sample.prompt.answer,
        "completion_ids": list(sample.token_ids),
        "task": sample.prompt.task,
        "stop_reason": str(sample.stop_reason),
        "metadata": metadata,
        "messages": metadata.get("messages") if isinstance(unrendered, str) else unrendered,
        "max_completion_tokens": max_completion_tokens,
        "turns": [turn.text for turn in sample.turns],
        "unrendered": unrendered,
        "raw_answer": sample.prompt.raw_answer,
        "weight_version": max(sample.weight_versions, default=0),
    }


def score(
    functions: Sequence[RewardFunction],
    given: Mapping[str, Any],
    *,
    of_env: FunctionScore | None = None,
    on_call: Callable[[int], None] | None = None,
    may_abstain: bool = False,
) -> Verdict:
    """Call all functions except those of whole groups, and sum weight x score over those that
    apply, plus the score of an environment.

    `on_call` gets the index of each function just before its call. An error in a function is a
    failure, never a score. Where functions of whole groups follow, the reward is partial. Where no
    function applies, the sample fails too, except with `may_abstain` or where the reward is
    partial: then the total is 0 without parts, to which another score will be added.
    """
    start = time.perf_counter()
    weighted = [] if of_env is None else [(ENV_NAME, 1.0, of_env)]
    for index, function in enumerate(functions):
        if function.whole_groups:
            continue
        if on_call is not None:
            on_call(index)
        outcome = attempt(function, [given])
        if isinstance(outcome, Verdict):
            return replace(outcome, seconds=time.perf_counter() - start)
        (part,) = outcome
        weighted.append((function.name, function.weight, part))
    is_partial = any(function.whole_groups for function in functions)
    seconds = time.perf_counter() - start
    verdict = _combine(weighted, may_abstain=may_abstain or is_partial, seconds=seconds)
    if verdict.reward is None or not is_partial:
        return verdict
    return replace(verdict, reward=replace(verdict.reward, is_partial=True))


def score_group(
    functions: Sequence[RewardFunction],
    givens: Sequence[Mapping[str, Any]],
    *,
    on_call: Callable[[int], None],
) -> Verdict:
    """Call each function of whole groups once with all samples `givens`. The verdict has one
    verdict for each sample, or is one failure of all. `on_call` is that of `score`."""
    start = time.perf_counter()
    called: list[list[tuple[str, float, FunctionScore]]] = []
    for index, function in enumerate(functions):
        if not function.whole_groups:
            continue
        on_call(index)
        outcome = attempt(function, givens)
        if isinstance(outcome, Verdict):
            return replace(outcome, seconds=time.perf_counter() - start)
        called.append([(function.name, function.weight, part) for part in outcome])
    seconds = time.perf_counter() - start
    verdicts = [
        _combine(weighted, may_abstain=True, seconds=seconds)
        for weighted in zip(*called, strict=True)
    ]
    return Verdict(of_group=tuple(verdicts), seconds=seconds)


def add_own(own: Reward, in_group: Verdict, *, may_abstain: bool = False) -> Verdict:
    """The sum of a sample's partial reward and of its verdict `in_group`. `may_abstain` is that of
    `score`."""
    if in_group.reward is None:
        return in_group
    parts = {**own.parts, **in_group.reward.parts}
    total = own.total + in_group.reward.total
    return _checked(total, parts, may_abstain=may_abstain, seconds=in_group.seconds)


def attempt(function: Scoring[T], given: Any) -> T | Verdict:
    """The result of `function` for `given`, or a failed verdict where it raises."""
    try:
        return function(given)
    except InvalidScoreError as error:
        kind, detail = FailureKind.INVALID, str(error)
        is_certain = isinstance(error, ScoreTypeError)
    except ServiceError as error:
        kind, detail, is_certain = error.kind, str(error), True
    except DeadlineError as error:
        kind, detail, is_certain = FailureKind.TIMEOUT, str(error), False
    except ProgramError as error:
        kind, detail, is_certain = FailureKind.EXCEPTION, str(error), False
    except MemoryError:
        kind, detail, is_certain = FailureKind.OUT_OF_MEMORY, "ran out of memory", False
    except (Exception, SystemExit) as error:  # noqa: BLE001 - foreign code may raise anything
        kind, detail = FailureKind.EXCEPTION, error_location(error, function.file)
        is_certain = _is_certain(error, function)
    detail = f"{function.name}: {detail}"[:MAX_DETAIL_CHARS]
    return Verdict(failure=kind, detail=detail, is_certain=is_certain)


def _is_certain(error: BaseException, function: Scoring[Any]) -> bool:
    """Whether the error is in the function's code or call, so that every completion causes it."""
    if isinstance(function.function, Builtin):
        # Built-ins score every completion, and raise ValueError for a bad row. Other errors come
        # from this host, such as a full disk, or from a library that cannot handle the completion.
        return isinstance(error, ValueError)
    frames = traceback.extract_tb(error.__traceback__)
    if any(frame.filename.startswith("<") and frame.filename != function.file for frame in frames):
        return False  # raised in code that the function executes, perhaps the completion
    match error:
        case UnboundLocalError():
            return False
        case NameError() | ImportError():
            return True
        case AttributeError():
            return isinstance(error.obj, ModuleType)
        case TypeError():
            return frames[-1].filename == __file__  # the call itself does not fit the signature
        case _:
            return False


def _combine(
    weighted: Sequence[tuple[str, float, FunctionScore]], *, may_abstain: bool, seconds: float
) -> Verdict:
    total, named = 0.0, dict[str, float]()
    for name, weight, part in weighted:
        if part.score is not None:
            total += weight * part.score
            named[name] = part.score
        named |= {f"{name}/{key}": value for key, value in part.metrics.items()}
    return _checked(total, named, may_abstain=may_abstain, seconds=seconds)


def _checked(
    total: float, named: Mapping[str, float], *, may_abstain: bool, seconds: float
) -> Verdict:
    """The verdict with this reward; a failure where it is not finite, or where nothing scored the
    sample (names with a `/` are metrics, not scores)."""
    if not may_abstain and all("/" in name for name in named):
        detail = "every reward function returned None, so nothing scored this sample"
    elif not math.isfinite(total):
        detail = f"the weighted sum of {named} is {total}"
    else:
        return Verdict(reward=Reward(total=total, parts=named), seconds=seconds)
    detail = detail[:MAX_DETAIL_CHARS]
    return Verdict(failure=FailureKind.INVALID, detail=detail, seconds=seconds)


def await_result(value: Any) -> Any:
    """What foreign code returned, or what it gives once it is awaited."""
    return _event_loop().run(_await(value)) if inspect.isawaitable(value) else value


@cache
def _event_loop() -> asyncio.Runner:
    """One event loop for all calls: clients that users keep in a module belong to one loop."""
    return asyncio.Runner()


async def _await(value: Awaitable[Any]) -> object:
    return await value
