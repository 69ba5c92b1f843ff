"""Scoring by a reward model: the last stage before a sample counts as scored.

completion ─┬─► Scorer: functions, in their workers ─────────────────────────┐
            └─► Transcripts: text, ids ─► passes of the model ─► its score ──┴─► weighted sum

The model is colocated (whole on the collecting process's device) or remote (copies on their own
devices, which score during generation and training). It is frozen, so a score depends only on the
sample: groups are filtered by rewards, and advantages are computed from them.
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
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hone.algorithms.algorithm import Outputs
from hone.algorithms.preferences.reward_model import valued_at_end
from hone.algorithms.settings import Output
from hone.data.chat import Renderer
from hone.data.columns import Example
from hone.data.settings import DataConfig
from hone.distributed.mesh import Mesh
from hone.errors import UserError
from hone.rewards.scorer import ScorerStats
from hone.rewards.settings import REWARD_MODEL, RewardConfig
from hone.rollout.runner import RequestSource, SampleScorer, Sessions
from hone.rollout.scorer_pool import ScorerPool
from hone.trainer.build import frozen_model
from hone.trainer.collating import collate
from hone.trainer.settings import SFTTrainerConfig
from hone.types import (
    FailureKind,
    Prompt,
    Reward,
    Row,
    Sample,
    SamplingParams,
    with_opened_tag,
)

__all__ = ["PooledRewardModel", "RewardModel", "RewardModelScorer", "Transcripts"]

_MAX_POLLS = 32
"""Most polls, one for each engine step, that a sequence waits for others to fill its pass: a small
pass takes about as long as an engine step."""
_MAX_KEPT = 100_000
"""Largest number of scores that are kept for equal sequences."""


class Transcripts:
    """Renders prompts with their completions for a reward model, in its own tokens.

    The text is rendered and tokenised again, since the model may have another tokenizer and chat
    template (`Renderer.transcript`). A truncated completion has no end token.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        data: DataConfig,
        *,
        max_tokens: int,
        vocab_size: int,
        path: str,
    ) -> None:
        """`max_tokens` is the model's context, `vocab_size` the size of its vocabulary, `path` its
        name for messages. Raises UserError where its tokenizer cannot render what `data` requires.
        """
        self.max_tokens = max_tokens
        self._vocab_size = vocab_size
        self._path = path
        try:
            self._renderer = Renderer(tokenizer, data)
        except UserError as error:
            raise UserError(f"reward.model.path={path!r}: {error}") from error

    def check(self, prompt: Prompt) -> None:
        """Raise UserError where a prompt of the data cannot be rendered for the model."""
        try:
            self.of(prompt, prompt.answer or prompt.text, is_truncated=False)
        except UserError as error:
            raise UserError(f"reward.model.path={self._path!r}: {error}") from error

    def of(self, prompt: Prompt, completion: str, *, is_truncated: bool) -> list[int]:
        """Token ids. Raises UserError where the text cannot be rendered or tokenised, or becomes a
        token that the model lacks."""
        example = Example(
            id=prompt.id,
            location=f"row {prompt.id}",
            prompt=prompt.unrendered or prompt.text,
            answer=None,
            completion={
                "role": "assistant",
                "content": with_opened_tag(prompt.text, completion),
            },
            task=prompt.task,
            metadata={},
            columns=prompt.metadata,
            raw_answer=None,
            is_truncated=is_truncated,
        )
        ids = list(self._renderer.transcript(example))
        if max(ids, default=0) >= self._vocab_size:
            raise UserError(
                f"prompt and completion have token {max(ids)} of the tokenizer in that folder, and "
                f"its model has {self._vocab_size}: put the model's own tokenizer there"
            )
        return ids


_Sequences = Sequence[Sequence[int]]


class SequenceScorer(Protocol):
    """A reward model, colocated or remote."""

    def begin(self, sequences: _Sequences, /) -> Future[list[float]]:
        """Start to score sequences of ids, each at its last token, in one pass. The future raises
        WorkersLostError where all remote scorers are lost."""
        ...


class RewardModel:
    """A frozen sequence classifier with one label, on this process's device."""

    def __init__(self, module: PreTrainedModel) -> None:
        """`module` is a model of `load_value_model`, on its device."""
        self._pad_id: int | None = module.config.pad_token_id
        # Not compiled: compilation takes a minute before the first score, and passes are few.
        cfg = SFTTrainerConfig(compile=False)
        self._model = frozen_model(module, cfg, Mesh.alone(module.device))

    def begin(self, sequences: _Sequences) -> Future[list[float]]:
        """Score sequences before returning; the future is done."""
        done: Future[list[float]] = Future()
        values = self.score(_rows(sequences, self._pad_id), _VALUES)
        done.set_result(values[0].tolist())
        return done

    @torch.no_grad()
    def score(self, rows: Sequence[Row], outputs: frozenset[Output]) -> npt.NDArray[np.float32]:
        """The values of the trained tokens of `rows`, row after row, from one pass: [1, N].
        `outputs` must be `values` alone."""
        assert outputs == _VALUES, outputs
        if not rows:
            return np.zeros((1, 0), np.float32)
        batch = collate(rows, [0.0] * len(rows), self._model.mesh.device)
        return self._model.forward(batch, outputs)["values"].float().cpu().numpy()[None]


class PooledRewardModel:
    """Remote copies of a reward model."""

    def __init__(self, pool: ScorerPool, *, pad_id: int | None) -> None:
        """`pad_id` is the model's padding token."""
        self._pool = pool
        self._pad_id = pad_id

    def begin(self, sequences: _Sequences) -> Future[list[float]]:
        """Score sequences in the background."""
        rows, done = _rows(sequences, self._pad_id), Future[list[float]]()

        def answer(scoring: Future[list[Outputs]]) -> None:
            if (error := scoring.exception()) is not None:
                done.set_exception(error)
            else:
                done.set_result([outputs["values"].item() for outputs in scoring.result()])

        self._pool.begin(rows, [range(len(rows))], _VALUES).add_done_callback(answer)
        return done


_VALUES = frozenset[Output]({"values"})


def _rows(sequences: _Sequences, pad_id: int | None) -> list[Row]:
    """Rows that are valued at their last token before padding, as in transformers. For a model that
    pads with its end token this is the token before the end token, in training as well."""
    return [valued_at_end(f"{number}", ids, pad_id=pad_id) for number, ids in enumerate(sequences)]


_Ids = tuple[int, ...]


@dataclass(slots=True)
class _Pending:
    """A sample that waits for the model or for the functions."""

    sample: Sample
    ids: _Ids = ()
    score: float | None = None
    problem: str = ""
    """Why the model gives no score."""
    is_returned: bool = False
    """Whether the functions have scored it."""

    @property
    def num_tokens(self) -> int:
        """Tokens in its pass, with the one that `valued_at_end` appends."""
        return len(self.ids) + 1

    @property
    def is_done(self) -> bool:
        return self.is_returned and (self.score is not None or bool(self.problem))


class RewardModelScorer:
    """Scores samples by a reward model and by `functions`; a `SampleScorer`.

    A pass starts when sequences fill it, when one has waited for `_MAX_POLLS` polls, or when the
    caller has nothing else to do. So the contents of passes depend on engine steps, not on the
    speed of functions. Equal sequences that are pending together get equal scores.
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
        self._queue: deque[_Pending] = deque()
        """Samples that wait for a pass."""
        self._num_queued = 0
        """Tokens in the queue."""
        self._num_polls = 0
        """Polls since the last pass, or since the queue was empty."""
        self._known: dict[_Ids, float] = {}
        self._waiting: dict[_Ids, list[_Pending]] = {}
        """By a sequence in a running pass: the samples that wait for its score."""
        self._passes: dict[Future[list[float]], list[_Ids]] = {}
        """Running passes with their sequences."""
        self._busy_s = 0.0

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
    def takes_whole_groups(self) -> bool:
        return self._functions.takes_whole_groups

    @property
    def sessions(self) -> Sessions | None:
        return self._functions.sessions

    @property
    def requests(self) -> RequestSource | None:
        return self._functions.requests

    def begin(self, sample: Sample, sampling: SamplingParams) -> None:
        """Start the session of a sample without turns, like `Scorer.begin`."""
        self._pending[sample.id] = _Pending(sample)
        self._functions.begin(sample, sampling)

    def submit(self, *samples: Sample) -> None:
        """Start to score samples, like `Scorer.submit`."""
        if not self._pending:
            self._known.clear()
        for sample in samples:
            pending = self._pending[sample.id] = _Pending(sample)
            if sample.failure is not None:
                pending.problem = sample.failure_detail or sample.failure
            else:
                self._enqueue(pending)
        self._functions.submit(*samples)

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
            self._pending[sample.id].is_returned = True
        done = [pending for pending in self._pending.values() if pending.is_done]
        for pending in done:
            del self._pending[pending.sample.id]
            self._add(pending)
        return [pending.sample for pending in done]

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
        self._queue.clear()
        self._waiting.clear()
        self._passes.clear()
        self._num_queued = self._num_polls = 0

    def stats(self) -> ScorerStats:
        return replace(self._functions.stats(), num_pending=self.pending, model_s=self._busy_s)

    def _enqueue(self, pending: _Pending) -> None:
        sample, limit = pending.sample, self._transcripts.max_tokens
        try:
            ids = self._transcripts.of(sample.prompt, sample.text, is_truncated=sample.truncated)
        except UserError as error:
            pending.problem = f"{error}"
            return
        if len(ids) > limit:
            pending.problem = (
                f"for it prompt and completion have {len(ids):,} tokens, more than its context of "
                f"{limit:,}"
            )
            return
        pending.ids = tuple(ids)
        pending.score = self._known.get(pending.ids)
        if pending.score is None:
            self._queue.append(pending)
            self._num_queued += pending.num_tokens

    def _begin_pass(self) -> None:
        """Start a pass of the first samples of the queue that fit into it."""
        start, taken, num_tokens = perf_counter(), list[_Pending](), 0
        while self._queue and (
            not taken or num_tokens + self._queue[0].num_tokens <= self._max_tokens
        ):
            taken.append(self._queue.popleft())
            num_tokens += taken[-1].num_tokens
        self._num_queued -= num_tokens
        self._num_polls = 0
        sequences: list[_Ids] = []
        for pending in taken:
            if pending.ids in self._known:
                pending.score = self._known[pending.ids]
            elif pending.ids in self._waiting:
                self._waiting[pending.ids].append(pending)
            else:
                self._waiting[pending.ids] = [pending]
                sequences.append(pending.ids)
        if sequences:
            self._passes[self._model.begin(sequences)] = sequences
        self._busy_s += perf_counter() - start

    def _take_passes(self) -> bool:
        """Take the scores of finished passes; whether there were any. Raises the model's errors."""
        done = [scoring for scoring in self._passes if scoring.done()]
        for scoring in done:
            sequences = self._passes.pop(scoring)
            for ids, score in zip(sequences, scoring.result(), strict=True):
                self._known[ids] = score
                for pending in self._waiting.pop(ids):
                    pending.score = score
        while len(self._known) > _MAX_KEPT:
            del self._known[next(iter(self._known))]
        return bool(done)

    def _add(self, pending: _Pending) -> None:
        """Add the model's weighted score to the reward of the functions."""
        sample = pending.sample
        if sample.failure is not None or sample.reward is None:
            return
        score = math.nan if pending.score is None else pending.score
        total = sample.reward.total + self._cfg.model.weight * score
        if math.isfinite(total):
            parts = {**sample.reward.parts, REWARD_MODEL: score}
            sample.reward = Reward(total=self._cfg.clipped(total), parts=parts)
        else:
            problem = pending.problem or f"the score is {score}, the reward with it {total}"
            sample.reward, sample.failure = None, FailureKind.INVALID
            sample.failure_detail = f"{REWARD_MODEL}: {problem}"
