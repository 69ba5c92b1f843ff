"""The scorer of a process that samples, and with it the server for programs that play episodes."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from hone.config.tree import EvaluateConfig, GenerateConfig, RLConfig
from hone.models.settings import ModelConfig
from hone.rewards.scorer import Scorer
from hone.rewards.settings import RewardConfig
from hone.rollout.runner import SampleScorer
from hone.types import SamplingParams

__all__ = ["Scoring", "scoring"]


class Scoring(NamedTuple):
    """What scores the samples of a process."""

    scorer: Scorer
    """The environment and the functions, in their workers."""
    plays: SampleScorer
    """What a runner submits samples to: `scorer`, or the programs that play episodes."""


@contextmanager
def scoring(
    cfg: RLConfig | EvaluateConfig | GenerateConfig,
    rewards: RewardConfig,
    model: ModelConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    tool_format: str | None,
    max_model_len: int | None,
) -> Generator[Scoring]:
    """Start the workers of `rewards` and of the environment. For `env.harness.command` open the
    door, at a free port of loopback, to the model that is sampled, `model`; no path of an episode
    is longer than `max_model_len` tokens. Raises as `Scorer`."""
    limit = cfg.max_completion_tokens
    if cfg.env.harness.command is None:
        made = Scorer(rewards, max_completion_tokens=limit, env=cfg.env, tool_format=tool_format)
        with made as scorer:
            yield Scoring(scorer, scorer)
        return
    # Imported only here: with it come the packages of the server.
    from hone.door.door import Door
    from hone.door.handover import Handover
    from hone.door.harness import HarnessScorer
    from hone.door.server import DoorServer
    from hone.door.settings import DoorConfig
    from hone.loops.served import serve_model

    served, prompts = serve_model(
        model,
        tokenizer,
        name=model.path,
        defaults=SamplingParams(max_tokens=limit),
        max_model_len=max_model_len,
        data=cfg.data,
    )
    # Those of an evaluation come to those of training, which rest; each may ask several at once.
    num_sessions = 2 * cfg.env.concurrency
    settings = DoorConfig(
        max_sessions=num_sessions,
        max_requests=_REQUESTS_PER_SESSION * num_sessions,
        **({} if served.images is None else {"max_body_mib": _BODY_WITH_IMAGES_MIB}),
    )
    handover = Handover(max_requests=settings.max_requests)
    door = Door(served, prompts, handover, settings)
    with DoorServer(door) as server:
        harness = HarnessScorer(
            lambda open_access: Scorer(
                rewards, max_completion_tokens=limit, env=cfg.env, open_access=open_access
            ),
            door,
            server,
            handover,
            max_turns=cfg.env.max_turns,
            max_turn_tokens=cfg.env.max_turn_tokens,
            history=cfg.env.history,
        )
        try:
            yield Scoring(harness.scorer, harness)
        finally:
            harness.close()


_REQUESTS_PER_SESSION = 16
"""Requests that one program may have at once, on average; further ones are asked to come again."""
_BODY_WITH_IMAGES_MIB = 64.0
"""Each request has all images of its episode so far, in base64."""
