"""Asynchronous scoring of samples, while the caller does other work.

    with Scorer(cfg.reward, max_completion_tokens=1024) as scorer:
        scorer.submit(sample)
        for sample in scorer.poll():
            sample.reward or sample.failure

Every sample is returned exactly once, with either a reward or a failure. A sample whose episode
continues is returned with `observation`, and is submitted again after its next turn. Where
functions take whole groups, a sample is returned with a partial reward, and once more after
`compare`. No failure ever becomes a number.
"""

from __future__ import annotations

import logging
import math
import re
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, Self

from hone.address import names_code
from hone.errors import UserError
from hone.rewards.base import Builtin
from hone.rewards.score import RewardFunction, Verdict, add_own, arguments, score
from hone.rewards.settings import BUILTIN_REWARDS, RewardConfig, RewardFunctionConfig
from hone.rollout.settings import EnvConfig
from hone.types import FailureKind, Prompt, Reward, Sample, SamplingParams, StopReason, Turn
from hone.user_code.resolve import check_signature
from hone.user_code.signatures import SHAPES, Shape, missing_column

if TYPE_CHECKING:
    from socket import socket

    from hone.rewards.environment import EnvFacts
    from hone.rewards.live_programs import OpenAccess
    from hone.rewards.live_sessions import LiveSessions
    from hone.rewards.play import EpisodeSoFar
    from hone.rewards.pool import WorkerPool

__all__ = ["FailureRateError", "Scorer", "ScorerStats", "check_failure_rate", "describe_failures"]

_log = logging.getLogger(__name__)

_NUM_TIMES = 10_000
_FIRST_CALLS = 24
"""After this many failures and no score, not even a partial one between them, no sample is expected
ever to be scored."""
_WAIT_S = 5.0
"""Time that the caller waits for scores before `on_wait` is called, in seconds."""


class FailureRateError(ValueError):
    """Too many samples of a step could not be scored. `samples` are the samples of the check, with
    the failed ones."""

    def __init__(self, message: str, samples: Sequence[Sample] = ()) -> None:
        super().__init__(message)
        self.samples = samples


@dataclass(frozen=True, slots=True, kw_only=True)
class ScorerStats:
    """Counters since the scorer was made."""

    num_scored: int
    """Samples with a reward."""
    num_failed: Mapping[FailureKind, int]
    """Failed samples by kind; kinds that never occurred are left out."""
    num_pending: int
    num_kills: int
    """Workers killed at a deadline."""
    num_requests: Mapping[str, int] = field(default_factory=dict[str, int])
    """Requests of programs that play episodes, by `hone.door.sessions.COUNTS`."""
    num_restarts: int = 0
    """Episodes played again from their start, because their session was lost."""
    p99_s: float
    """99th percentile of the time in reward functions, over the last 10,000 samples, or nan. A
    sample that is scored by itself and then with its group counts as two."""
    model_s: float = 0.0
    """Time in a reward model."""


class Scorer:
    """Scores samples by the configured environment and functions.

    Where all of them are trusted built-ins, they run in this process, in `submit`; otherwise all
    run in worker processes. Raises ValueError for a function that cannot be found, loaded or called
    as configured, and FailureRateError when none of the first samples can be scored.
    """

    def __init__(
        self,
        cfg: RewardConfig,
        *,
        max_completion_tokens: int,
        env: EnvConfig | None = None,
        tool_format: str | None = None,
        open_access: OpenAccess | None = None,
        trusted: Mapping[str, Callable[..., Any]] | None = None,
    ) -> None:
        """`tool_format` is the format of the policy's calls of tools (`env.tool_format`), None
        where the environment has no tools. `open_access` says where a program that plays an episode
        finds the policy (`env.harness.command`). `trusted` are functions that run in this process
        like built-ins, by their names in `cfg`."""
        env, trusted = env or EnvConfig(), trusted or {}
        self.max_turns = env.max_turns if env.is_set else 1
        """Largest number of turns of an episode; after the last one a sample `must_end`."""
        self.max_turn_tokens = env.max_turn_tokens if env.is_set else None
        """Longest turn of an episode, in tokens; None: what is left of the episode."""
        self.on_wait: Callable[[str], None] | None = None
        """Callback with a text on the progress of scoring, after the caller has waited only for
        scores for some seconds."""
        self._cfg = cfg
        self._first_failures: list[Sample] = []
        self._batch: Counter[str] = Counter()
        """Counts since nothing was pending: samples submitted, done, and failed by kind."""
        self._waiting_since: float | None = None
        self._max_completion_tokens = max_completion_tokens
        self._takes_whole_groups = any(entry.whole_groups for entry in cfg.functions)
        self._submitted: dict[int, Sample | Sequence[Sample]] = {}
        """Requests to workers by ticket: a sample, or samples to compare."""
        self._num_open = 0
        """Submitted samples without a verdict."""
        self._done: list[Sample] = []
        self._num_submitted = 0
        self._num_scored = 0
        self._num_failed: Counter[FailureKind] = Counter()
        self._times_s: deque[float] = deque(maxlen=_NUM_TIMES)
        self._inline: list[RewardFunction] = []
        self._pool: WorkerPool | None = None
        self._has_env = env.is_set
        self._episode_of: Callable[[Sample], EpisodeSoFar] | None = None
        self._open_access = open_access
        self.sessions: LiveSessions | None = None
        """The live objects of episodes, where the environment has them; then a sample is submitted
        before its first turn too."""
        self._has_answered = False
        """Whether the environment has answered, so that samples are not expected to fail."""
        self._may_abstain = cfg.model.path is not None
        """Whether a reward model scores samples too, outside of this class."""
        if not cfg.has_parts and env.path is None and env.harness.command is None:
            raise ValueError("`reward.functions` is empty; name one, such as `exact_match`")
        builtins = _builtins(cfg, max_completion_tokens)
        names = cfg.names
        functions = [
            trusted.get(entry.fn, None if builtin is None or builtin.isolated else builtin)
            for entry, builtin in zip(cfg.functions, builtins, strict=True)
        ]
        if self._has_env or any(function is None for function in functions):
            self._pool = self._start_workers(names, env, tool_format)
            return
        for name, entry, function in zip(names, cfg.functions, functions, strict=True):
            assert function is not None
            self._inline.append(RewardFunction(function, name=name, weight=entry.weight, args={}))

    def _start_workers(
        self, names: Sequence[str], env: EnvConfig, tool_format: str | None
    ) -> WorkerPool:
        # Imported only where workers are used.
        from hone.rewards.live_sessions import LiveSessions
        from hone.rewards.play import episode_of
        from hone.rewards.pool import WorkerPool, job_of

        pool = WorkerPool(job_of(self._cfg, names, env, tool_format=tool_format))
        limit = self._max_completion_tokens
        if self._open_access is not None:
            from hone.rewards.live_programs import LivePrograms

            access = self._open_access
            self.sessions = LivePrograms(pool, env, max_tokens=limit, open_access=access)
        elif pool.env is not None and pool.env.has_sessions:
            self.sessions = LiveSessions(pool, env, max_tokens=limit)
        elif self._has_env:
            self._episode_of = partial(episode_of, max_turns=self.max_turns)
        return pool

    @classmethod
    def in_process(cls, function: Callable[..., Any], *, max_completion_tokens: int) -> Scorer:
        """A scorer of one function, which runs in this process, inside `submit`.

        There is no worker, no deadline and no memory limit: name a function that may hang or crash
        in `RewardConfig` instead. The function gets the arguments that its parameters name, as in
        recipes: `completion`, `prompt`, `answer`, `max_completion_tokens` (the longest completion),
        or any column of the data. It returns a number, or a dict with `score` and further numbers.
        Where it raises, the sample has failed and gets no score.

        Raises ValueError where it has other parameters, or they cannot be inspected.
        """
        spec = f"{function.__module__}:{getattr(function, '__name__', type(function).__name__)}"
        check_signature(function, spec, {})
        cfg = RewardConfig(functions=(RewardFunctionConfig(fn=spec),))
        return cls(cfg, max_completion_tokens=max_completion_tokens, trusted={spec: function})

    def check_data(
        self, prompts: Sequence[Prompt], encode: Callable[[str], list[int]]
    ) -> list[Sample]:
        """Find mistakes in reward functions before any sample is drawn. All of `prompts` must have
        the columns that functions need. Then each function is called once, with the first prompt
        and its answer as the completion; `encode` converts text to token ids. An environment is
        called with that completion as the only turn. Returned are the samples whose `observation`
        is what it says: before the turn, where a session says something then, and after it.

        Raises UserError naming the row. A failure that may depend on this completion is only a
        warning.
        """
        signatures = (
            [check_signature(function.function, function.name, {}) for function in self._inline]
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
                    rows = [(f"row {prompt.id}", _columns(prompt)) for prompt in lacking]
                    raise UserError(missing_column(entry.fn, name, rows, f"{len(prompts):,} rows"))
        return self._try_out(prompts[0], encode) if prompts and not self._open_access else []

    def _try_out(self, prompt: Prompt, encode: Callable[[str], list[int]]) -> list[Sample]:
        text = prompt.answer or prompt.text
        token_ids = encode(text)
        said = list[Sample]()
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
        elif self.sessions is not None:
            opened = replace(sample, token_ids=[], turns=[])
            verdict = self._of_session(self._pool, self.sessions, opened, given)
            if verdict.observation is not None:
                opened.observation = verdict.observation
                said += [opened] if verdict.observation.content else []
                verdict = self._of_session(self._pool, self.sessions, sample, given)
                self.sessions.end(sample)
        else:
            verdict = self._wait_for(self._pool, given, self._episode(sample))
        if verdict.reward is not None and verdict.reward.is_partial:
            assert self._pool is not None
            in_group = self._wait_for(self._pool, [given, given])
            first = in_group.of_group[0] if in_group.of_group else in_group
            verdict = add_own(verdict.reward, first, may_abstain=self._may_abstain)
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
        return said if verdict.observation is None else [*said, sample]

    def _of_session(
        self, pool: WorkerPool, sessions: LiveSessions, sample: Sample, given: dict[str, Any]
    ) -> Verdict:
        """Start a session or pass it a turn, and wait for the verdict."""
        sessions.submit(self._new_ticket(), sample, given)
        verdict = self._next_verdict(pool)
        sessions.take(sample, verdict)
        return verdict

    def _wait_for(
        self,
        pool: WorkerPool,
        given: dict[str, Any] | list[dict[str, Any]],
        episode: EpisodeSoFar | None = None,
    ) -> Verdict:
        """Submit one request and wait for its verdict; nothing else may be pending."""
        pool.submit(self._new_ticket(), given, episode)
        return self._next_verdict(pool)

    def _next_verdict(self, pool: WorkerPool) -> Verdict:
        verdicts: list[tuple[int, Verdict]] = []
        while not verdicts:
            verdicts = pool.poll(timeout_s=1.0)
        ((_, verdict),) = verdicts
        return verdict

    def _new_ticket(self) -> int:
        self._num_submitted += 1
        return self._num_submitted - 1

    def _episode(self, sample: Sample) -> EpisodeSoFar | None:
        return None if self._episode_of is None else self._episode_of(sample)

    def begin(self, sample: Sample, sampling: SamplingParams) -> None:
        """Start the session of a sample without turns. Its turns are sampled with `sampling`."""
        self.submit(sample)

    def submit(self, *samples: Sample) -> None:
        """Start to score `samples`; `poll` returns each when it is done.

        A sample that has failed already is returned unchanged.
        """
        for sample in samples:
            self._submit(sample)

    def compare(self, samples: Sequence[Sample]) -> None:
        """Start to score all samples of a group whose rewards are partial in one call of each
        function that takes whole groups; `poll` returns them with their whole rewards."""
        self._add_open(len(samples))
        if not self._takes_whole_groups:  # any more: the run was resumed with other functions
            self._add(samples, Verdict(reward=Reward(total=0.0)))
            return
        assert self._pool is not None
        ticket = self._new_ticket()
        self._submitted[ticket] = samples
        limit = self._max_completion_tokens
        givens = [arguments(sample, max_completion_tokens=limit) for sample in samples]
        self._pool.submit(ticket, givens)

    def _add_open(self, number: int) -> None:
        if not self._num_open:
            self._batch.clear()
        self._batch["samples"] += number
        self._num_open += number

    def _submit(self, sample: Sample) -> None:
        assert sample.reward is None, f"{sample.id=} {sample.reward=}"
        if sample.failure is not None:
            self._num_failed[sample.failure] += 1
            self._done.append(sample)
            if self.sessions is not None:
                self.sessions.end(sample)
            return
        # A program that plays an episode is asked again and again whether it has ended.
        is_asked_again = (
            self._open_access is not None
            and self.sessions is not None
            and self.sessions.is_live(sample)
        )
        if is_asked_again:
            self._num_open += 1
        else:
            self._add_open(1)
        given = arguments(sample, max_completion_tokens=self._max_completion_tokens)
        if self._pool is None:
            self._finish(sample, score(self._inline, given, may_abstain=self._may_abstain))
            return
        ticket = self._new_ticket()
        self._submitted[ticket] = sample
        if self.sessions is not None:
            self.sessions.submit(ticket, sample, given)
        else:
            self._pool.submit(ticket, given, self._episode(sample))

    def _take(self, ticket: int, verdict: Verdict) -> None:
        """Process a verdict on a sample, or on samples that were compared."""
        request = self._submitted.pop(ticket)
        if isinstance(request, Sample):
            if self.sessions is not None:
                self.sessions.take(request, verdict)
            if self._has_env and request.turns:
                turn = request.turns[-1]
                turn.is_answered, turn.env_s = True, verdict.seconds
            self._finish(request, verdict)
            return
        self._add(request, verdict)

    def _add(self, samples: Sequence[Sample], verdict: Verdict) -> None:
        """Add what functions of whole groups have given to the partial rewards of samples. One
        verdict, such as that of a failed call, is that of all."""
        verdicts = verdict.of_group or (verdict,) * len(samples)
        for sample, in_group in zip(samples, verdicts, strict=True):
            own = sample.reward
            assert own is not None, sample.id
            self._finish(sample, add_own(own, in_group, may_abstain=self._may_abstain))

    def poll(self, timeout_s: float = 0.0, *, wake: socket | None = None) -> list[Sample]:
        """Samples with a verdict, or with an observation to continue from; waits at most
        `timeout_s` for the first one, or until `wake` has something to read."""
        if self._pool is not None:
            timeout_s = 0.0 if self._done else timeout_s
            for ticket, verdict in self._pool.poll(timeout_s, wake=wake):
                self._take(ticket, verdict)
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

    def take_decided(self) -> list[Sample]:
        """Return no sample: the answer that ends an episode comes with its scores by functions."""
        return []

    def rest(self) -> list[Sample]:
        """Give the places of sessions to others until `wake`; nothing else may be submitted by
        their owner meanwhile. Returns the samples whose sessions wait for a place, which are no
        longer pending."""
        if self.sessions is None:
            return []
        taken = [self._submitted.pop(ticket) for ticket in self.sessions.rest()]
        self._num_open -= len(taken)
        self._batch["samples"] -= len(taken)
        return [request for request in taken if isinstance(request, Sample)]

    def wake(self) -> None:
        """Go on after `rest`."""
        if self.sessions is not None:
            self.sessions.wake()

    def forget(self, sample: Sample) -> None:
        """Drop one pending sample: `poll` does not return it."""
        assert self._pool is not None
        ticket = next(ticket for ticket, entry in self._submitted.items() if entry is sample)
        del self._submitted[ticket]
        self._num_open -= 1
        self._pool.forget(ticket)

    def cancel(self) -> None:
        """Drop all pending samples: `poll` returns none of them."""
        if self._pool is not None:
            self._pool.cancel()
        if self.sessions is not None:
            self.sessions.cancel()
        self._submitted.clear()
        self._num_open = 0
        self._done.clear()

    def score(self, samples: Sequence[Sample]) -> list[Sample]:
        """Score all of `samples` and return them in the same order. Nothing else may be pending.
        Where functions take whole groups, all samples must be of one prompt."""
        assert self.pending == 0, f"{self.pending=}"
        self.submit(*samples)
        while self.pending:
            self.poll(timeout_s=1.0)
            waiting = [sample for sample in samples if sample.awaits_group]
            if waiting and not self.pending:
                self.compare(waiting)
        return list(samples)

    @property
    def environment(self) -> EnvFacts | None:
        """What the environment is; None without one."""
        return None if self._pool is None else self._pool.env

    @property
    def uses_workers(self) -> bool:
        """Whether scoring runs in other processes, and takes their CPU time."""
        return self._pool is not None

    @property
    def requests(self) -> None:
        """No program asks for turns by itself (`hone.door.harness.HarnessScorer`)."""
        return None

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
            num_restarts=0 if self.sessions is None else self.sessions.num_restarts,
            p99_s=times[math.ceil(0.99 * len(times)) - 1] if times else math.nan,
        )

    def close(self) -> None:
        """Kill all workers and their descendants. Pending samples get no verdict."""
        if self._pool is not None:
            self._pool.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _finish(self, sample: Sample, verdict: Verdict) -> None:
        self._num_open -= 1
        outcomes = (verdict.reward, verdict.failure, verdict.observation)
        assert sum(outcome is not None for outcome in outcomes) == 1, f"{sample.id=} {verdict=}"
        sample.observation = verdict.observation
        sample.stop_reason = verdict.stop_reason or sample.stop_reason
        sample.reward = verdict.reward
        if sample.awaits_group:
            self._batch["samples"] -= 1  # it is submitted once more
            self._first_failures.clear()  # some samples can be scored, as far as one knows
            self._times_s.append(verdict.seconds)
            self._done.append(sample)
            return
        if sample.reward is not None and not self._may_abstain:  # else its total is not complete
            total = self._cfg.clipped(sample.reward.total)
            sample.reward = replace(sample.reward, total=total)
        sample.failure = verdict.failure
        sample.failure_detail = verdict.detail
        if verdict.observation is not None:
            self._has_answered |= self._open_access is None  # else a program is only running
        elif verdict.failure is None:
            self._num_scored += 1
        elif self.sessions is not None and self.sessions.is_restarting(sample):
            self._done.append(sample)  # it has not failed yet
            return
        else:
            self._num_failed[verdict.failure] += 1
            self._batch["failed"] += 1
            self._batch[verdict.failure] += 1
        if self._open_access is None or verdict.observation is None:
            self._batch["done"] += 1
            self._times_s.append(verdict.seconds)
        self._done.append(sample)
        self._check_first_calls(sample)

    def _check_first_calls(self, sample: Sample) -> None:
        if sample.failure is None or self._num_scored or self._has_answered:
            return
        if self._cfg.max_failure_rate == 1:
            return
        self._first_failures.append(sample)
        if len(self._first_failures) == _FIRST_CALLS:
            raise FailureRateError(
                f"all of the first {_FIRST_CALLS} samples failed to be scored: "
                f"{describe_failures(self._first_failures)}. The others are not waited for.",
                self._first_failures,
            )


def _called_with(shape: Shape, *, whole_groups: bool) -> str:
    if not shape.takes_lists:
        return shape.called_with
    if whole_groups:
        return "lists of all completions of a prompt"
    return f"{shape.called_with}; with whole_groups it could compare those of a prompt"


def _lacks(prompt: Prompt, column: str) -> bool:
    """Whether the prompt's row lacks a column that a function needs, or the answer."""
    return prompt.answer is None if column == "answer" else column not in _columns(prompt)


def _columns(prompt: Prompt) -> list[str]:
    """The columns of the prompt's row that are not null."""
    return [name for name, value in prompt.metadata.items() if value is not None]


def check_failure_rate(
    samples: Sequence[Sample], limit: float, *, num_samples: int | None = None
) -> None:
    """Raise FailureRateError where the share of failed samples exceeds `limit` (0 to 1).

    Where `samples` are the first of `num_samples`, the share is that of all `num_samples`: once it
    exceeds the limit, scoring the others cannot change that. The text names the most frequent kind
    of failure, with an example.
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
    """The number of failures of each kind, and an example of the commonest cause of the commonest
    kind. At least one of `samples` must have failed.
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
    """The part of a failure's detail that is equal for samples with the same cause: the location
    and type of an exception, such as `score: rewards.py:12: KeyError`."""
    match = re.match(r".*?:\d+: \w+", detail, re.DOTALL)
    return match[0] if match else detail


def _builtins(cfg: RewardConfig, max_completion_tokens: int) -> list[Builtin | None]:
    """The built-in reward of each function; None for users' functions, which are not imported."""
    builtins: list[Builtin | None] = []
    for index, entry in enumerate(cfg.functions):
        builtin = None
        if not names_code(entry.fn):
            from hone.rewards.builtin import build

            try:
                builtin = build(entry.fn, entry.args)
                builtin.check_limit(max_completion_tokens)
            except ValueError as error:
                raise ValueError(f"reward.functions[{index}] ({entry.fn}): {error}") from None
        builtins.append(builtin)
    return builtins
