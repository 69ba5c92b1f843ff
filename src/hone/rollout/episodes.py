"""Episodes: the tokens of a sample over its turns and the environment's observations.

request ──► engine ──► `Episodes.take`: the turn is appended ──► env workers ──► scored, or failed
   ▲                                                                 │ observation
   └────── `Episodes.next_request`: its tokens are appended ◄────────┘

A sample of one turn takes the same path: its first turn is the last, so it `must_end`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import numpy as np

from hone.data.template_check import RenderError
from hone.images.sending import prefetch_pixels
from hone.rollout.requests import Decode, request_seed
from hone.types import (
    NOT_SAMPLED,
    Completion,
    FailureKind,
    Observation,
    PerToken,
    Prompt,
    Request,
    Sample,
    SamplingParams,
    StopReason,
    Turn,
)

if TYPE_CHECKING:
    from hone.data.turns import Appended

__all__ = ["Episodes", "RenderTurn"]


class RenderTurn(Protocol):
    """The part of `hone.data.turns.TurnRenderer` that a rollout needs. Both methods raise
    RenderError."""

    @property
    def ends(self) -> Mapping[int, str]: ...

    @property
    def num_cut(self) -> int: ...

    def __call__(self, sample: Sample, observation: Observation, /) -> Appended: ...

    def opening(self, prompt: Prompt, observation: Observation, /) -> Prompt: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Episodes:
    """Builds the requests and samples of one purpose (training, evaluation, generation)."""

    decode: Decode
    max_turns: int = 1
    max_turn_tokens: int | None = None
    """Longest turn; None: what is left of the episode."""
    render: RenderTurn | None = None
    """Required with an environment."""
    run_seed: int = 0
    purpose: str = ""

    def first_request(
        self, request_id: str, prompt: Prompt, sampling: SamplingParams, *, number: int
    ) -> Request:
        """The request `<group id>/<index>` for the first turn of a sample."""
        index = int(request_id.rpartition("/")[2])
        seed = request_seed(self.run_seed, self.purpose, number, prompt.id, index)
        limit = min(sampling.max_tokens, self.max_turn_tokens or sampling.max_tokens)
        return Request(
            id=request_id,
            prompt_ids=prompt.token_ids,
            sampling=replace(sampling, seed=seed, max_tokens=limit),
            model_input=prompt.model_input,
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
        """Append a finished turn, all of whose tokens the policy sampled.

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
        if completion.routes is not None:
            # They cover all turns; earlier tokens keep the routes of when they were sampled.
            earlier = completion.routes[:0] if sample.routes is None else sample.routes
            sample.routes = np.concatenate([earlier, completion.routes[len(earlier) :]])
        text = self.decode(completion.token_ids) if completion.text is None else completion.text
        sample.text = self.decode(sample.token_ids) if start else text
        sample.stop_reason = completion.stop_reason
        if completion.error:
            sample.failure, sample.failure_detail = FailureKind.ENGINE, completion.error
        end = len(sample.token_ids)
        sample.turns.append(
            Turn(
                start=start,
                end=end,
                text=text,
                stop_reason=completion.stop_reason,
                ended_by=self._end_of(completion),
            )
        )
        sample.must_end = (
            len(sample.turns) >= self.max_turns or end >= max_tokens or bool(completion.error)
        )

    def _end_of(self, completion: Completion) -> str:
        """The text of the token that ended a turn, in an environment."""
        if self.render is None or completion.stop_reason is not StopReason.EOS:
            return ""
        return self.render.ends.get(completion.token_ids[-1], "")

    def next_request(self, sample: Sample, first: Request, *, max_tokens: int) -> Request | None:
        """Append `sample.observation`, and return the request for the next turn; `first` is the
        request of the first turn, and `max_tokens` the longest episode. Of a sample without turns,
        whose session has just started, the observation belongs to the prompt.

        None where the observation cannot be rendered (the sample fails) or leaves no token for a
        turn. Then the sample `must_end`, and goes to the environment once more without the
        observation.
        """
        observation, sample.observation = sample.observation, None
        assert observation is not None, sample.id
        assert self.render is not None, sample.id
        if not sample.turns:
            return self._open(sample, observation, first)
        sample.must_end = True
        try:
            said = self.render(sample, observation)
        except RenderError as error:
            sample.failure, sample.failure_detail = FailureKind.INVALID, f"env: {error}"
            return None
        token_ids = said.token_ids
        num_left = max_tokens - len(sample.token_ids) - len(token_ids)
        if num_left <= 0:
            return None
        sample.must_end = False
        turn = sample.turns[-1]
        turn.observed, turn.messages, turn.reward = said.text, said.messages, observation.reward
        if observation.state is not None:
            sample.state = observation.state
        start = len(sample.token_ids)
        sample.model_input = sample.model_input.followed_by(said.model_input, start)
        prefetch_pixels([said.model_input], lambda: ())
        sample.token_ids += token_ids
        sample.logprobs += [0.0] * len(token_ids)
        sample.weight_versions += [NOT_SAMPLED] * len(token_ids)
        sample.loss_mask += [False] * len(token_ids)
        sampling = replace(
            first.sampling,
            max_tokens=min(
                num_left, observation.max_tokens or num_left, self.max_turn_tokens or num_left
            ),
            stop=observation.stop or first.sampling.stop,
            seed=request_seed(first.sampling.seed, "turn", len(sample.turns), "", 0),
        )
        prompt = sample.prompt
        return replace(
            first,
            prompt_ids=(*prompt.token_ids, *sample.token_ids),
            sampling=sampling,
            resumed=None,
            model_input=prompt.model_input.followed_by(sample.model_input, len(prompt.token_ids)),
        )

    def _open(self, sample: Sample, opening: Observation, first: Request) -> Request | None:
        """The request for the first turn, after the opening of the sample's session."""
        assert self.render is not None, sample.id
        if opening.content:
            try:
                sample.prompt = self.render.opening(sample.prompt, opening)
            except RenderError as error:
                sample.must_end = True
                sample.failure, sample.failure_detail = FailureKind.INVALID, f"env: {error}"
                return None
        num_left = first.sampling.max_tokens
        sampling = replace(
            first.sampling,
            max_tokens=min(num_left, opening.max_tokens or num_left),
            stop=opening.stop or first.sampling.stop,
        )
        return replace(
            first,
            prompt_ids=sample.prompt.token_ids,
            sampling=sampling,
            model_input=sample.prompt.model_input,
        )
