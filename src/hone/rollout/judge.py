"""Scoring by a reward model: the last stage before a sample counts as scored.

completion ─┬─► Scorer: functions, in their workers ─────────────────────────┐
            └─► Transcripts: text, ids ─► passes of the model ─► its score ──┴─► weighted sum

With an environment the model comes after the functions, since only the environment knows which
turn of an episode is its last one. Functions of whole groups come after both.

The model is colocated (whole on the collecting process's device, or in shards over all training
processes: `shared_judge.py`) or remote (copies on their own devices, which score during generation
and training). It is frozen, so a score depends only on the sample: groups are filtered by rewards,
and advantages are computed from them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from time import perf_counter
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel

from hone.algorithms.algorithm import Outputs
from hone.algorithms.preferences.reward_model import valued_at_end
from hone.algorithms.settings import Output
from hone.distributed.mesh import Mesh
from hone.errors import UserError
from hone.families.registry import inputs_of
from hone.images.sending import prefetch_pixels
from hone.model_input import prompt_digest
from hone.rewards.environment import EnvFacts
from hone.rewards.scorer import ScorerStats
from hone.rewards.settings import REWARD_MODEL, RewardConfig
from hone.rollout.runner import RequestSource, SampleScorer, Sessions
from hone.rollout.scorer_pool import ScorerPool
from hone.rollout.transcripts import Transcript, Transcripts
from hone.trainer.build import frozen_model
from hone.trainer.collating import collate
from hone.trainer.frozen import SleepingWeights
from hone.trainer.settings import SFTTrainerConfig
from hone.types import FailureKind, Row, Sample, SamplingParams

__all__ = ["VALUES", "PooledRewardModel", "RewardModel", "RewardModelScorer", "rows_of"]

_MAX_POLLS = 32
"""Most polls, one for each engine step, that a sequence waits for others to fill its pass: a small
pass takes about as long as an engine step."""
_MAX_KEPT = 100_000
"""Largest number of scores that are kept for equal sequences."""


_Sequences = Sequence[Transcript]


class SequenceScorer(Protocol):
    """A reward model, colocated or remote."""

    @property
    def busy_s(self) -> float:
        """Seconds that this process has spent on scoring."""
        ...

    def begin(self, sequences: _Sequences, /) -> Future[list[float]]:
        """Start to score sequences, each at its last token, in one pass. The future raises
        WorkersLostError where all remote scorers are lost."""
        ...


class RewardModel:
    """A frozen sequence classifier with one label, on this process's device."""

    def __init__(self, module: PreTrainedModel) -> None:
        """`module` is a model of `load_value_model`, on its device."""
        self._pad_id: int | None = module.config.pad_token_id
        self._inputs = inputs_of(module.config)
        # Not compiled: compilation takes a minute before the first score, and passes are few.
        cfg = SFTTrainerConfig(compile=False)
        self._model = frozen_model(module, cfg, Mesh.alone(module.device))
        self._weights = SleepingWeights(module)
        self.busy_s = 0.0

    def begin(self, sequences: _Sequences) -> Future[list[float]]:
        """Score sequences before returning; the future is done."""
        start, done = perf_counter(), Future[list[float]]()
        values = self.score(rows_of(sequences, self._pad_id), VALUES)
        done.set_result(values[0].tolist())
        self.busy_s += perf_counter() - start
        return done

    def sleep(self) -> None:
        """Move the weights to host memory. Raises as `SleepingWeights.sleep`."""
        self._weights.sleep()

    def wake(self) -> None:
        """Bring the weights back. Raises as `SleepingWeights.wake`."""
        self._weights.wake()

    @torch.no_grad()
    def score(self, rows: Sequence[Row], outputs: frozenset[Output]) -> npt.NDArray[np.float32]:
        """The values of the trained tokens of `rows`, row after row, from one pass: [1, N].
        `outputs` must be `values` alone."""
        assert outputs == VALUES, outputs
        if not rows:
            return np.zeros((1, 0), np.float32)
        device = self._model.mesh.device
        batch = collate(rows, [0.0] * len(rows), device, inputs=self._inputs)
        return self._model.forward(batch, outputs)["values"].float().cpu().numpy()[None]


class PooledRewardModel:
    """Remote copies of a reward model."""

    busy_s = 0.0
    """This process only asks."""

    def __init__(self, pool: ScorerPool, *, pad_id: int | None) -> None:
        """`pad_id` is the model's padding token."""
        self._pool = pool
        self._pad_id = pad_id

    def begin(self, sequences: _Sequences) -> Future[list[float]]:
        """Score sequences in the background."""
        rows, done = rows_of(sequences, self._pad_id), Future[list[float]]()

        def answer(scoring: Future[list[Outputs]]) -> None:
            if (error := scoring.exception()) is not None:
                done.set_exception(error)
            else:
                done.set_result([outputs["values"].item() for outputs in scoring.result()])

        self._pool.begin(rows, [range(len(rows))], VALUES).add_done_callback(answer)
        return done


VALUES = frozenset[Output]({"values"})
"""The output of a reward model."""


def rows_of(sequences: _Sequences, pad_id: int | None) -> list[Row]:
    """Rows that are valued at their last token before padding, as in transformers. For a model that
    pads with its end token this is the token before the end token, in training as well."""
    return [
        replace(
            valued_at_end(f"{number}", sequence.token_ids, pad_id=pad_id),
            model_input=sequence.model_input,
        )
        for number, sequence in enumerate(sequences)
    ]


_Key = bytes
"""Digest of a sequence, equal for those that are the same to the model."""
_NOTHING = Transcript(())


@dataclass(slots=True)
class _Pending:
    """A sample that waits for the model or for the functions."""

    sample: Sample
    is_asked: bool
    """Whether the model is to score it."""
    sequence: Transcript = _NOTHING
    key: _Key = b""
    score: float | None = None
    problem: str = ""
    """Why the model gives no score."""
    is_compared: bool = False
    """Whether it comes to functions of whole groups, so that it has the model's score."""
    is_returned: bool = False
    """Whether the functions have scored it."""

    @property
    def num_tokens(self) -> int:
        """Tokens in its pass, with the one that `valued_at_end` appends."""
        return len(self.sequence.token_ids) + 1

    @property
    def is_done(self) -> bool:
        has_answer = self.score is not None or bool(self.problem)
        return self.is_returned and (has_answer or not self.is_asked)


class RewardModelScorer:
    """Scores samples by a reward model and by `functions`; a `SampleScorer`.

    A pass starts when sequences fill it, when one has waited for `_MAX_POLLS` polls, or when the
    caller has nothing else to do. So the contents of passes depend on engine steps, not on the
    speed of functions; with an environment, on when that ends the episodes. Equal sequences that
    are pending together get equal scores.
    """

    def __init__(
        self,
        model: SequenceScorer,
        transcripts: Transcripts,
        functions: SampleScorer,
        cfg: RewardConfig,
    ) -> None:
        self._model, self._transcripts, self._functions = model, transcripts, functions
        self._cfg, self._max_tokens = cfg, cfg.model.max_tokens_per_forward
        self._pending: dict[str, _Pending] = {}
        """Samples without a complete reward, by id."""
        self._decided: list[Sample] = []
        """Episodes that the environment has ended since the last `take_decided`."""
        self._queue: deque[_Pending] = deque()
        """Samples that wait for a pass."""
        self._num_queued = 0
        """Tokens in the queue."""
        self._num_polls = 0
        """Polls since the last pass, or since the queue was empty."""
        self._known: dict[_Key, float] = {}
        self._waiting: dict[_Key, list[_Pending]] = {}
        """By a sequence in a running pass: the samples that wait for its score."""
        self._passes: dict[Future[list[float]], list[_Key]] = {}
        """Running passes with their sequences."""

    @property
    def max_turns(self) -> int:
        return self._functions.max_turns

    @property
    def max_turn_tokens(self) -> int | None:
        return self._functions.max_turn_tokens

    @property
    def pending(self) -> int:
        return len(self._pending)

    @property
    def sessions(self) -> Sessions | None:
        return self._functions.sessions

    @property
    def environment(self) -> EnvFacts | None:
        return self._functions.environment

    @property
    def requests(self) -> RequestSource | None:
        return self._functions.requests

    def begin(self, sample: Sample, sampling: SamplingParams) -> None:
        """Start the session of a sample without turns, like `Scorer.begin`."""
        self._pending[sample.id] = _Pending(sample, is_asked=False)
        self._functions.begin(sample, sampling)

    def submit(self, *samples: Sample) -> None:
        """Start to score samples, like `Scorer.submit`."""
        if not self._pending:
            self._known.clear()
        has_ended = self._functions.environment is None
        for sample in samples:
            is_asked = has_ended and sample.failure is None
            pending = self._pending[sample.id] = _Pending(sample, is_asked)
            if is_asked:
                self._enqueue(pending)
        self._functions.submit(*samples)

    def compare(self, samples: Sequence[Sample]) -> None:
        """Like `Scorer.compare`. The partial rewards have the model's scores already."""
        for sample in samples:
            self._pending[sample.id] = _Pending(sample, is_asked=False, is_compared=True)
        self._functions.compare(samples)

    def poll(self, timeout_s: float = 0.0) -> list[Sample]:
        """Return scored samples, like `Scorer.poll`; start the passes that are due first."""
        self._num_polls += bool(self._queue)
        is_due = timeout_s > 0 or self._num_polls >= _MAX_POLLS
        while self._queue and (is_due or self._num_queued >= self._max_tokens):
            self._begin_pass()
        if self._take_passes():
            timeout_s = 0.0
        if self._passes and not self._functions.pending:
            wait(self._passes, timeout_s, FIRST_COMPLETED)
            self._take_passes()
        for sample in self._functions.poll(timeout_s):
            self._take_returned(sample)
        done = [pending for pending in self._pending.values() if pending.is_done]
        for pending in done:
            del self._pending[pending.sample.id]
            if pending.is_asked:
                self._add(pending)
            self._clip(pending.sample)
        return [pending.sample for pending in done]

    def take_decided(self) -> list[Sample]:
        """Pending episodes that the environment has ended since the last call, so that they wait
        for the model alone."""
        decided, self._decided = self._decided, []
        return [sample for sample in decided if sample.id in self._pending]

    def begin_passes(self) -> None:
        """Start the passes of all samples that wait for one."""
        while self._queue:
            self._begin_pass()

    def rest(self) -> list[Sample]:
        """Like `Scorer.rest`."""
        samples = self._functions.rest()
        for sample in samples:
            del self._pending[sample.id]
        return samples

    def wake(self) -> None:
        """Like `Scorer.wake`."""
        self._functions.wake()

    def cancel(self) -> None:
        """Drop all pending samples, like `Scorer.cancel`."""
        self._functions.cancel()
        self._pending.clear()
        self._decided.clear()
        self._queue.clear()
        self._waiting.clear()
        self._passes.clear()
        self._num_queued = self._num_polls = 0

    def stats(self) -> ScorerStats:
        return replace(
            self._functions.stats(), num_pending=self.pending, model_s=self._model.busy_s
        )

    def _take_returned(self, sample: Sample) -> None:
        """Take a sample from the functions. If it is an episode that its environment has ended, the
        model is asked now."""
        pending = self._pending[sample.id]
        pending.is_returned = True
        if self._functions.environment is None or pending.is_compared:
            return
        if sample.reward is not None:
            pending.is_asked = True
            self._decided.append(sample)
            self._enqueue(pending)

    def _enqueue(self, pending: _Pending) -> None:
        sample, limit = pending.sample, self._transcripts.max_tokens
        try:
            sequence = self._transcripts.of_sample(sample)
        except UserError as error:
            pending.problem = f"{error}"
            return
        if (num_tokens := len(sequence.token_ids)) > limit:
            pending.problem = (
                f"for it prompt and completion have {num_tokens:,} tokens, more than its context "
                f"of {limit:,}"
            )
            return
        pending.sequence = sequence
        pending.key = prompt_digest(sequence.token_ids, sequence.model_input)
        pending.score = self._known.get(pending.key)
        if pending.score is None:
            prefetch_pixels([sequence.model_input], lambda: ())
            self._queue.append(pending)
            self._num_queued += pending.num_tokens

    def _begin_pass(self) -> None:
        """Start a pass of the first samples of the queue that fit into it."""
        taken, num_tokens = list[_Pending](), 0
        while self._queue and (
            not taken or num_tokens + self._queue[0].num_tokens <= self._max_tokens
        ):
            taken.append(self._queue.popleft())
            num_tokens += taken[-1].num_tokens
        self._num_queued -= num_tokens
        self._num_polls = 0
        asked: list[_Pending] = []
        for pending in taken:
            if pending.key in self._known:
                pending.score = self._known[pending.key]
            elif pending.key in self._waiting:
                self._waiting[pending.key].append(pending)
            else:
                self._waiting[pending.key] = [pending]
                asked.append(pending)
        if asked:
            scoring = self._model.begin([pending.sequence for pending in asked])
            self._passes[scoring] = [pending.key for pending in asked]

    def _take_passes(self) -> bool:
        """Take the scores of finished passes; whether there were any. Raises the model's errors."""
        done = [scoring for scoring in self._passes if scoring.done()]
        for scoring in done:
            keys = self._passes.pop(scoring)
            for key, score in zip(keys, scoring.result(), strict=True):
                self._known[key] = score
                for pending in self._waiting.pop(key):
                    pending.score = score
        while len(self._known) > _MAX_KEPT:
            del self._known[next(iter(self._known))]
        return bool(done)

    def _clip(self, sample: Sample) -> None:
        if sample.reward is not None and not sample.reward.is_partial:
            total = self._cfg.clipped(sample.reward.total)
            sample.reward = replace(sample.reward, total=total)

    def _add(self, pending: _Pending) -> None:
        """Add the model's weighted score to the reward of the functions."""
        sample = pending.sample
        if sample.failure is not None or sample.reward is None:
            return
        score = math.nan if pending.score is None else pending.score
        total = sample.reward.total + self._cfg.model.weight * score
        if math.isfinite(total):
            parts = {**sample.reward.parts, REWARD_MODEL: score}
            sample.reward = replace(sample.reward, total=total, parts=parts)
        else:
            problem = pending.problem or f"the score is {score}, the reward with it {total}"
            sample.reward, sample.failure = None, FailureKind.INVALID
            sample.failure_detail = f"{REWARD_MODEL}: {problem}"
