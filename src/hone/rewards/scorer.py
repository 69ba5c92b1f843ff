"""Rewards for samples, while the caller does other work.

    with Scorer(cfg.reward, max_completion_tokens=1024) as scorer:
        scorer.submit(sample)
        for sample in scorer.poll():
            sample.reward or sample.failure

Every sample comes back exactly once, with either a reward or a failure; one that goes on in an
environment with `observation`, to be submitted again after its next turn. No failure ever turns
into a number.
"""

from __future__ import annotations

import logging
import math
import os
import re
import sys
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, Self

from hone.address import names_code
from hone.config.env import EnvConfig
from hone.config.reward import BUILTIN_REWARDS, RewardConfig, RewardFunctionConfig
from hone.errors import UserError
from hone.rewards.base import Builtin
from hone.rewards.builtin import build
from hone.rewards.play import EpisodeSoFar, episode_of
from hone.rewards.pool import Pool
from hone.rewards.resolve import check_signature
from hone.rewards.score import RewardFunction, Verdict, add_own, arguments, score
from hone.rewards.worker import EnvSpec, FunctionSpec, Job
from hone.types import FailureKind, Prompt, Sample, StopReason, Turn
from hone.user_code.inherited import inherited
from hone.user_code.signatures import SHAPES, Shape, missing_column

__all__ = ["FailureRateError", "Scorer", "ScorerStats", "check_failure_rate", "describe_failures"]

_log = logging.getLogger(__name__)

LOAD_TIMEOUT_S = 120.0
"""Deadline of importing the user's modules, which may draw in large libraries from a cold disk."""
_NUM_TIMES = 10_000
_FIRST_CALLS = 24
"""So many failures and no score say that no sample will ever be scored."""
_WAIT_S = 5.0
"""How long scoring may keep the caller waiting before anything is said of it."""


class FailureRateError(ValueError):
    """Too many samples of a step could not be scored.

    `samples` are those that were looked at, with what failed among them.
    """

    def __init__(self, message: str, samples: Sequence[Sample] = ()) -> None:
        super().__init__(message)
        self.samples = samples


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerStats:
    """Counters since the scorer was made."""

    num_scored: int
    """Samples with a reward."""
    num_failed: Mapping[FailureKind, int]
    """Samples without one, by kind; kinds that never occurred are left out."""
    num_pending: int
    num_kills: int
    """Workers killed at a deadline."""
    p99_s: float
    """99th percentile of the time in reward functions, over the last 10,000 samples; nan: none."""
    model_s: float = 0.0
    """Time in a reward model."""


@dataclass(slots=True)
class _Group:
    """Samples of a prompt that functions compare, once each has been scored by itself."""

    num_left: int
    """Of them that have not been, or have not failed."""
    scored: list[tuple[Sample, Verdict]] = field(default_factory=list[tuple[Sample, Verdict]])


class Scorer:
    """Scores samples by the configured environment and functions.

    Where all of them are trusted built-ins they run here, in `submit`; otherwise all run in worker
    processes. Raises ValueError for a function that cannot be found, loaded or called as it is
    configured, and FailureRateError when none of the first samples can be scored.
    """

    def __init__(
        self,
        cfg: RewardConfig,
        *,
        max_completion_tokens: int,
        env: EnvConfig | None = None,
        trusted: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        """`trusted` are functions that run here as built-ins do, by their names in `cfg`."""
        env, trusted = env or EnvConfig(), trusted or {}
        self.max_turns = env.max_turns if env.path is not None else 1
        """Turns of an episode; where one is the last, a sample `must_end`."""
        self.on_wait: Callable[[str], None] | None = None
        """Called with a text on how far scoring is, where the caller has waited for nothing else
        for some seconds."""
        self._cfg = cfg
        self._first_failures: list[Sample] = []
        self._batch: Counter[str] = Counter()
        """Of the samples since nothing was pending: how many came, came to a verdict, failed."""
        self._waiting_since: float | None = None
        self._max_completion_tokens = max_completion_tokens
        self.takes_whole_groups = any(entry.whole_groups for entry in cfg.functions)
        """All samples of a prompt must be submitted together."""
        self._asked: dict[int, tuple[Sample, _Group | None] | _Group] = {}
        """What workers have: a sample, with its group where functions compare them, or a group; by
        ticket."""
        self._num_open = 0
        """Samples that were submitted and have no verdict."""
        self._done: list[Sample] = []
        self._num_submitted = 0
        self._num_scored = 0
        self._num_failed: Counter[FailureKind] = Counter()
        self._times_s: deque[float] = deque(maxlen=_NUM_TIMES)
        self._inline: list[RewardFunction] = []
        self._pool: Pool | None = None
        self._has_env = env.path is not None
        self._has_answered = False
        """An observation has come: samples can be scored as far as is known."""
        self._may_abstain = cfg.model.path is not None
        """A reward model scores too, elsewhere."""
        if not cfg.has_parts and not self._has_env:
            raise ValueError("`reward.functions` is empty; name one, such as `exact_match`")
        builtins = _builtins(cfg, max_completion_tokens)
        names = cfg.names
        functions = [
            trusted.get(entry.fn, None if builtin is None or builtin.isolated else builtin)
            for entry, builtin in zip(cfg.functions, builtins, strict=True)
        ]
        if self._has_env or any(function is None for function in functions):
            self._pool = Pool(_job(cfg, names, env))
            return
        for name, entry, function in zip(names, cfg.functions, functions, strict=True):
            assert function is not None
            self._inline.append(RewardFunction(function, name=name, weight=entry.weight, args={}))

    @classmethod
    def in_process(cls, function: Callable[..., Any], *, max_completion_tokens: int) -> Scorer:
        """A scorer of one function, which runs in this process, inside `submit`.

        There is no worker, no deadline and no limit on memory: a function that may hang or crash is
        better named in `RewardConfig`. Its parameters say what it needs, as in recipes:
        `completion`, `prompt`, `answer`, `max_completion_tokens` (the longest completion), any
        column of the data. It returns a number, or a dict with `score` and further numbers. Where
        it raises, the sample has failed and gets no score.

        Raises ValueError where it has other parameters, or they cannot be seen.
        """
        spec = f"{function.__module__}:{getattr(function, '__name__', type(function).__name__)}"
        check_signature(function, spec, {})
        cfg = RewardConfig(functions=(RewardFunctionConfig(fn=spec),))
        return cls(cfg, max_completion_tokens=max_completion_tokens, trusted={spec: function})

    def check_data(
        self, prompts: Sequence[Prompt], encode: Callable[[str], list[int]]
    ) -> Sample | None:
        """Find mistakes of functions before any sample is drawn: look for the columns that they
        need in all of `prompts`, then call each function once, with the first prompt and its answer
        as the completion, of which `encode` makes the token ids. An environment is called with it
        as the only turn: where that does not end the episode, the sample is returned.

        Raises UserError naming the row, and warns where a call fails as it might for this
        completion alone.
        """
        signatures = (
            [check_signature(each.function, each.name, {}) for each in self._inline]
            if self._pool is None
            else self._pool.signatures or []
        )
        for entry, signature in zip(self._cfg.functions, signatures, strict=True):
            is_builtin = entry.fn in BUILTIN_REWARDS
            shape = next((x for x in SHAPES if x.framework == signature["framework"]), None)
            if shape is not None and not is_builtin:
                as_messages = shape.framework == "TRL" and any(
                    not isinstance(prompt.unrendered, str) for prompt in prompts
                )
                has_answers = any(prompt.answer is not None for prompt in prompts)
                is_empty = shape.framework == "OpenRLHF" and not has_answers
                _log.info(
                    "%s is called as %s's reward functions, with %s%s%s",
                    entry.fn,
                    shape.framework,
                    _called_with(shape, whole_groups=entry.whole_groups),
                    "; completions are messages, as prompts are" * as_messages,
                    "; all labels are '', since no row has an answer" * is_empty,
                )
            for name in signature["columns"]:
                lacking = [p for p in prompts if _lacks(p, name)]
                if lacking:
                    found = [(f"row {prompt.id}", _held(prompt)) for prompt in lacking]
                    raise UserError(missing_column(entry.fn, name, found, f"{len(prompts):,} rows"))
        return self._try_out(prompts[0], encode) if prompts else None

    def _try_out(self, prompt: Prompt, encode: Callable[[str], list[int]]) -> Sample | None:
        text = prompt.answer or prompt.text
        token_ids = encode(text)
        sample = Sample(
            id=f"{prompt.id}/trial",
            prompt=prompt,
            index=0,
            token_ids=token_ids,
            logprobs=[0.0] * len(token_ids),
            weight_versions=[0] * len(token_ids),
            loss_mask=[True] * len(token_ids),
            stop_reason=StopReason.EOS,
            text=text,
            turns=[Turn(start=0, end=len(token_ids), text=text, stop_reason=StopReason.EOS)],
            must_end=self.max_turns == 1,
        )
        given = arguments(sample, max_completion_tokens=self._max_completion_tokens)
        if self._pool is None:
            verdict = score(self._inline, given, may_abstain=self._may_abstain)
        else:
            verdict = self._wait_for(self._pool, given, self._episode(sample))
            if self.takes_whole_groups and verdict.reward is not None:
                in_group = self._wait_for(self._pool, [given, given])
                first = in_group.of_group[0] if in_group.of_group else in_group
                verdict = add_own(verdict, first, may_abstain=self._may_abstain)
        if verdict.failure is not None:
            what = "answer" if prompt.answer else "prompt"
            problem = (
                f"no reward could be computed for row {prompt.id}, with its {what} as the "
                f"completion ({text[:80]!r}): {verdict.failure}: {verdict.detail}. Each "
                "function of reward.functions is called once before the model is loaded, and must "
                "give every completion a number, a wrong one too; so is an environment."
            )
            if verdict.is_certain:
                raise UserError(problem)
            _log.warning("warning: %s", problem)
        sample.observation = verdict.observation
        return sample if verdict.observation is not None else None

    def _wait_for(
        self,
        pool: Pool,
        given: dict[str, Any] | list[dict[str, Any]],
        episode: EpisodeSoFar | None = None,
    ) -> Verdict:
        """The verdict on one request; nothing else is under way."""
        pool.submit(self._new_ticket(), given, episode)
        verdicts: list[tuple[int, Verdict]] = []
        while not verdicts:
            verdicts = pool.poll(timeout_s=1.0)
        ((_, verdict),) = verdicts
        return verdict

    def _new_ticket(self) -> int:
        self._num_submitted += 1
        return self._num_submitted - 1

    def _episode(self, sample: Sample) -> EpisodeSoFar | None:
        return episode_of(sample, max_turns=self.max_turns) if self._has_env else None

    def submit(self, *samples: Sample) -> None:
        """Begin to score `samples`; `poll` returns each when it is done. Where functions take whole
        groups, they are all of a prompt.

        One that has failed already comes back as it is.
        """
        group = _Group(len(samples)) if self.takes_whole_groups else None
        for sample in samples:
            self._submit(sample, group)

    def _submit(self, sample: Sample, group: _Group | None) -> None:
        assert sample.reward is None, f"{sample.id=} {sample.reward=}"
        if sample.failure is not None:
            self._num_failed[sample.failure] += 1
            self._done.append(sample)
            if group is not None:
                group.num_left -= 1
            return
        if not self._num_open:
            self._batch.clear()
        self._batch["samples"] += 1
        self._num_open += 1
        given = arguments(sample, max_completion_tokens=self._max_completion_tokens)
        if self._pool is None:
            self._finish(sample, score(self._inline, given, may_abstain=self._may_abstain))
            return
        ticket = self._new_ticket()
        self._asked[ticket] = (sample, group)
        self._pool.submit(ticket, given, self._episode(sample))

    def _take(self, pool: Pool, ticket: int, verdict: Verdict) -> None:
        """A verdict on a sample, or on a group."""
        asked = self._asked.pop(ticket)
        if isinstance(asked, _Group):
            each = verdict.of_group or (verdict,) * len(asked.scored)  # one failure of all
            for (sample, own), in_group in zip(asked.scored, each, strict=True):
                verdict = add_own(own, in_group, may_abstain=self._may_abstain)
                self._finish(sample, verdict)
            return
        sample, group = asked
        if group is None or verdict.failure is not None:
            self._finish(sample, verdict)
        else:
            group.scored.append((sample, verdict))
        if group is None:
            return
        group.num_left -= 1
        if group.num_left == 0 and group.scored:
            group.scored.sort(key=lambda one: one[0].index)  # however fast each was scored
            ticket = self._new_ticket()
            self._asked[ticket] = group
            limit = self._max_completion_tokens
            givens = [arguments(one, max_completion_tokens=limit) for one, _ in group.scored]
            pool.submit(ticket, givens)

    def poll(self, timeout_s: float = 0.0) -> list[Sample]:
        """Samples that have come to a verdict, or are to go on; waits at most `timeout_s` for the
        first one."""
        if self._pool is not None:
            for ticket, verdict in self._pool.poll(0.0 if self._done else timeout_s):
                self._take(self._pool, ticket, verdict)
            self._report_waiting(timeout_s)
        done, self._done = self._done, []
        return done

    def _report_waiting(self, timeout_s: float) -> None:
        if not self._num_open or timeout_s == 0.0:  # else the caller has other work
            self._waiting_since = None
            return
        now = monotonic()
        if self._waiting_since is None:
            self._waiting_since = now
        if self.on_wait is not None and now - self._waiting_since > _WAIT_S:
            batch = self._batch
            text = f"scoring {batch['done']:,} of {batch['samples']:,}"
            timeouts = batch[FailureKind.TIMEOUT]
            text += f", {timeouts:,} timed out" if timeouts else ""
            others = batch["failed"] - timeouts
            self.on_wait(text + (f", {others:,} failed" if others else ""))

    def cancel(self) -> None:
        """Give up on all pending samples: `poll` returns none of them."""
        if self._pool is not None:
            self._pool.cancel()
        self._asked.clear()
        self._num_open = 0
        self._done.clear()

    def score(self, samples: Sequence[Sample]) -> list[Sample]:
        """Score all of `samples` and return them in the same order. Nothing else may be pending.
        Where functions take whole groups, they are all of one prompt."""
        assert self.pending == 0, f"{self.pending=}"
        self.submit(*samples)
        while self.pending:
            self.poll(timeout_s=1.0)
        return list(samples)

    @property
    def uses_workers(self) -> bool:
        """Scoring takes CPU time of other processes, beside whatever the caller does."""
        return self._pool is not None

    @property
    def pending(self) -> int:
        """Samples submitted and not yet returned by `poll`."""
        return self._num_open + len(self._done)

    def stats(self) -> ScorerStats:
        times = sorted(self._times_s)
        return ScorerStats(
            num_scored=self._num_scored,
            num_failed=dict(self._num_failed),
            num_pending=self.pending,
            num_kills=self._pool.num_kills if self._pool else 0,
            p99_s=times[math.ceil(0.99 * len(times)) - 1] if times else math.nan,
        )

    def close(self) -> None:
        """End all workers and everything they started. Pending samples get no verdict."""
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _finish(self, sample: Sample, verdict: Verdict) -> None:
        self._num_open -= 1
        said = (verdict.reward, verdict.failure, verdict.observation)
        assert sum(one is not None for one in said) == 1, f"{sample.id=} {verdict=}"
        sample.observation = verdict.observation
        sample.stop_reason = verdict.stop_reason or sample.stop_reason
        sample.reward = verdict.reward
        if sample.reward is not None and not self._may_abstain:  # else its total is not complete
            total = self._cfg.clipped(sample.reward.total)
            sample.reward = replace(sample.reward, total=total)
        sample.failure = verdict.failure
        sample.failure_detail = verdict.detail
        if verdict.observation is not None:
            self._has_answered = True
        elif verdict.failure is None:
            self._num_scored += 1
        else:
            self._num_failed[verdict.failure] += 1
            self._batch["failed"] += 1
            self._batch[verdict.failure] += 1
        self._batch["done"] += 1
        self._times_s.append(verdict.seconds)
        self._done.append(sample)
        self._check_first_calls(sample)

    def _check_first_calls(self, sample: Sample) -> None:
        if self._num_scored or self._has_answered or self._cfg.max_failure_rate == 1:
            return
        self._first_failures.append(sample)
        if len(self._first_failures) == _FIRST_CALLS:
            raise FailureRateError(
                f"all of the first {_FIRST_CALLS} samples failed to be scored: "
                f"{describe_failures(self._first_failures)}. No step and no evaluation waits for "
                "more.",
                self._first_failures,
            )


def _called_with(shape: Shape, *, whole_groups: bool) -> str:
    if not shape.takes_lists:
        return shape.called_with
    if whole_groups:
        return "lists of all completions of a prompt"
    return f"{shape.called_with}; with whole_groups it could compare those of a prompt"


def _lacks(prompt: Prompt, column: str) -> bool:
    """Whether its row lacks a column that a function needs, or the answer."""
    return prompt.answer is None if column == "answer" else column not in _held(prompt)


def _held(prompt: Prompt) -> list[str]:
    """The columns that hold something in its row."""
    return [name for name, value in prompt.metadata.items() if value is not None]


def check_failure_rate(
    samples: Sequence[Sample], limit: float, *, num_samples: int | None = None
) -> None:
    """Raise FailureRateError where the share of failed samples exceeds `limit` (0 to 1).

    The share is of `num_samples`, where `samples` are the first of so many: scoring the others
    cannot bring it under the limit any more. The text names the most frequent kind of failure, with
    one example.
    """
    failed = [sample for sample in samples if sample.failure is not None]
    total = len(samples) if num_samples is None else num_samples
    if not failed or len(failed) <= limit * total:
        return
    rest = total - len(samples)
    scored = len(samples) - len(failed)
    so_far = f" ({scored} are scored, the other {rest} were not waited for)" if rest else ""
    raise FailureRateError(
        f"{len(failed)} of {total} samples have no reward{so_far}, more than the allowed "
        f"{limit:.0%} (`reward.max_failure_rate`): {describe_failures(failed)}",
        samples,
    )


def describe_failures(samples: Sequence[Sample]) -> str:
    """The kinds of failure by number, and an example of the commonest cause of the commonest.

    At least one of `samples` must have failed.
    """
    failed = [sample for sample in samples if sample.failure is not None]
    kinds = Counter(sample.failure for sample in failed)
    kind, _ = kinds.most_common()[0]
    counts = ", ".join(f"{number} x {name}" for name, number in kinds.most_common())
    of_kind = [sample for sample in failed if sample.failure is kind]
    causes = Counter(_cause(sample.failure_detail) for sample in of_kind)
    cause, number = causes.most_common()[0]
    example = next(sample for sample in of_kind if _cause(sample.failure_detail) == cause)
    return (
        f"{counts}. The commonest cause ({number} x), for example of sample {example.id}: "
        f"{example.failure_detail or 'no detail'}"
    )


def _cause(detail: str) -> str:
    """A failure without what differs from sample to sample: the place and the type of an exception
    (`score: rewards.py:12: KeyError: 'x'`)."""
    found = re.match(r".*?:\d+: \w+", detail, re.DOTALL)
    return found[0] if found else detail


def _builtins(cfg: RewardConfig, max_completion_tokens: int) -> list[Builtin | None]:
    """The built-in behind each function, None for the user's own, which are not touched here."""
    builtins: list[Builtin | None] = []
    for index, entry in enumerate(cfg.functions):
        builtin = None
        if not names_code(entry.fn):
            try:
                builtin = build(entry.fn, entry.args)
                builtin.check_limit(max_completion_tokens)
            except ValueError as error:
                raise ValueError(f"reward.functions[{index}] ({entry.fn}): {error}") from None
        builtins.append(builtin)
    return builtins


def _job(cfg: RewardConfig, names: Sequence[str], env: EnvConfig) -> Job:
    specs = [*(entry.fn for entry in cfg.functions), env.path or ""]
    return Job(
        env=EnvSpec(path=env.path, args=dict(env.args)) if env.path is not None else None,
        functions=tuple(
            FunctionSpec(
                name=name,
                spec=entry.fn,
                weight=entry.weight,
                args=dict(entry.args),
                whole_groups=entry.whole_groups,
            )
            for name, entry in zip(names, cfg.functions, strict=True)
        ),
        timeout_s=cfg.timeout_s,
        load_timeout_s=LOAD_TIMEOUT_S,
        memory_limit_bytes=int(cfg.memory_limit_gib * 2**30),
        driver_pid=os.getpid(),
        import_path=tuple(sys.path),
        num_workers=cfg.worker_limit,
        inherits=any(inherited(spec) is not None for spec in specs),
        may_abstain=cfg.model.path is not None,
    )
