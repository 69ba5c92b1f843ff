"""A sample from turn to turn: what the engine has sampled and the environment has said, end to end.

request ──► engine ──► `Episodes.take`: the turn is appended ──► env workers ──► scored, or failed
   ▲                                                                 │ observation
   └────── `Episodes.next_request`: its tokens are appended ◄────────┘

A sample of one turn goes the same way: its first turn is the last, so that it `must_end`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from hone.data.turns import RenderError
from hone.rollout.requests import Decode, request_seed
from hone.types import (
    NOT_SAMPLED,
    Completion,
    FailureKind,
    Message,
    Observation,
    PerToken,
    Prompt,
    Request,
    Sample,
    SamplingParams,
    StopReason,
    Turn,
)

__all__ = ["Episodes", "RenderTurn"]

RenderTurn = Callable[[Sample, Observation], tuple[str, tuple[Message, ...], tuple[int, ...]]]
"""What a rollout needs of `hone.data.turns.TurnRenderer`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """How the samples of one purpose (training, evaluation, generation) go on."""

    decode: Decode
    max_turns: int = 1
    render: RenderTurn | None = None
    """Needed where there may be observations."""
    run_seed: int = 0
    purpose: str = ""

    def first_request(
        self, request_id: str, prompt: Prompt, sampling: SamplingParams, *, number: int
    ) -> Request:
        """The request `<group id>/<index>` for the first turn of a sample."""
        index = int(request_id.rpartition("/")[2])
        seed = request_seed(self.run_seed, self.purpose, number, prompt.id, index)
        return Request(
            id=request_id, prompt_ids=prompt.token_ids, sampling=replace(sampling, seed=seed)
        )

    def begin(self, prompt: Prompt, request_id: str, *, number: int) -> Sample:
        """A sample without tokens, for the request `<group id>/<index>` of the group `number`."""
        return Sample(
            id=request_id,
            prompt=prompt,
            index=int(request_id.rpartition("/")[2]),
            token_ids=[],
            logprobs=[],
            weight_versions=[],
            loss_mask=[],
            stop_reason=StopReason.ABORT,
            seed=request_seed(self.run_seed, self.purpose, number, prompt.id, -1),
            must_end=False,
        )

    def take(self, sample: Sample, completion: Completion, *, max_tokens: int) -> None:
        """Append a finished turn. Every token of it was sampled by the policy.

        `max_tokens` is the longest episode. A completion with an error fails the sample.
        """
        start = len(sample.token_ids)
        if start:
            sample.token_ids += completion.token_ids
            sample.logprobs += completion.logprobs
            sample.weight_versions += completion.weight_versions
        else:
            sample.token_ids = completion.token_ids
            sample.logprobs = completion.logprobs
            sample.weight_versions = completion.weight_versions
        sample.loss_mask += PerToken("b", b"\1" * len(completion.token_ids))
        if completion.routes is not None:  # of all turns: those before keep what sampled them
            had = completion.routes[:0] if sample.routes is None else sample.routes
            sample.routes = np.concatenate([had, completion.routes[len(had) :]])
        text = self.decode(completion.token_ids) if completion.text is None else completion.text
        sample.text = self.decode(sample.token_ids) if start else text
        sample.stop_reason = completion.stop_reason
        if completion.error:
            sample.failure, sample.failure_detail = FailureKind.ENGINE, completion.error
        end = len(sample.token_ids)
        sample.turns.append(
            Turn(start=start, end=end, text=text, stop_reason=completion.stop_reason)
        )
        sample.must_end = (
            len(sample.turns) >= self.max_turns or end >= max_tokens or bool(completion.error)
        )

    def next_request(self, sample: Sample, first: Request) -> Request | None:
        """Append `sample.observation`, and ask for the turn after it; `first` is the request of the
        first one.

        None where that cannot be: the sample has failed, or leaves the turn no token. Then it
        `must_end`, and goes to the environment once more as it was before the observation.
        """
        observation, sample.observation = sample.observation, None
        assert observation is not None, sample.id
        assert self.render is not None, sample.id
        sample.must_end = True
        try:
            text, messages, token_ids = self.render(sample, observation)
        except RenderError as error:
            sample.failure, sample.failure_detail = FailureKind.INVALID, f"env: {error}"
            return None
        num_left = first.sampling.max_tokens - len(sample.token_ids) - len(token_ids)
        if num_left <= 0:
            return None
        sample.must_end = False
        turn = sample.turns[-1]
        turn.observed, turn.messages, turn.reward = text, messages, observation.reward
        if observation.state is not None:
            sample.state = observation.state
        sample.token_ids += token_ids
        sample.logprobs += [0.0] * len(token_ids)
        sample.weight_versions += [NOT_SAMPLED] * len(token_ids)
        sample.loss_mask += [False] * len(token_ids)
        sampling = replace(
            first.sampling,
            max_tokens=min(num_left, observation.max_tokens or num_left),
            stop=observation.stop or first.sampling.stop,
            seed=request_seed(first.sampling.seed, "turn", len(sample.turns), "", 0),
        )
        return replace(
            first,
            prompt_ids=(*sample.prompt.token_ids, *sample.token_ids),
            sampling=sampling,
            resumed=None,
        )
