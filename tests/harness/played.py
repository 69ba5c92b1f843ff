"""Programs over a scripted engine: no model, a real server, real processes."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from time import monotonic
from typing import Any

from hone.config.tree import EvaluateDataConfig
from hone.door.door import Door, ServedModel
from hone.door.handover import Handover
from hone.door.harness import HarnessScorer
from hone.door.prompts import Prompts
from hone.door.server import DoorServer
from hone.door.settings import DoorConfig
from hone.models.tokenizer import decoder
from hone.rewards.scorer import Scorer
from hone.rewards.settings import RewardConfig
from hone.rollout.episodes import Episodes
from hone.rollout.runner import Runner, RunningGroup
from hone.rollout.settings import EnvConfig
from hone.types import Prompt, Sample, SamplingParams
from tests.door.served import PATIENCE_S, Script, ScriptedEngine, echo, tokenizer_of
from tests.harness.programs import command_of

__all__ = ["SAMPLING", "Played", "group_of", "played"]

SAMPLING = SamplingParams(max_tokens=400)


@dataclass
class Played:
    """A scorer of programs with its engine."""

    scorer: HarnessScorer
    engine: ScriptedEngine
    door: Door
    episodes: Episodes
    runners: list[Runner] = field(default_factory=list[Runner])

    def runner(self) -> Runner:
        self.runners.append(Runner(self.engine, self.scorer, self.episodes))
        return self.runners[-1]

    def play(self, *groups: RunningGroup, runner: Runner | None = None) -> list[Sample]:
        """All samples of the groups, in order."""
        runner = runner or self.runner()
        runner.submit(groups)
        finish(runner)
        return [sample for group in groups for sample in group.group.samples]

    def play_one(self, **fields: Any) -> Sample:
        (sample,) = self.play(group_of(self.episodes, indices=[0], **fields))
        return sample


def finish(runner: Runner) -> None:
    """Step until all groups have ended."""
    deadline = monotonic() + PATIENCE_S
    while runner.groups:
        runner.step()
        assert monotonic() < deadline, "the episodes do not end"


def group_of(
    episodes: Episodes,
    *,
    group_id: str = "1-0",
    indices: Sequence[int] = (0, 1),
    number: int = 0,
    sampling: SamplingParams = SAMPLING,
    **columns: Any,
) -> RunningGroup:
    prompt = Prompt(
        id=f"train:{number}",
        token_ids=(5, 6),
        text="hello",
        unrendered="hello",
        answer="world",
        metadata=columns,
        messages=({"role": "user", "content": "hello"},),
    )
    return RunningGroup.of(
        prompt, sampling, episodes, group_id=group_id, indices=indices, order=number, number=number
    )


@contextmanager
def played(
    folder: Path,
    program: str,
    script: Script = echo,
    *,
    functions: Sequence[dict[str, Any]] = (),
    max_model_len: int = 4096,
    max_sessions: int = 64,
    **env: Any,
) -> Generator[Played]:
    """A scorer whose episodes are played by `program`, which may use `CLIENT`."""
    tokenizer = tokenizer_of()
    decode = decoder(tokenizer, [tokenizer.eos_token_id])
    command = command_of(folder, "program", program)
    cfg = EnvConfig.model_validate({"harness": {"command": command}, "retries": 0, **env})
    rewards = RewardConfig.model_validate(
        {"functions": functions, "num_workers": 1, "max_failure_rate": 1.0}
    )
    handover = Handover(max_requests=64)
    prompts = Prompts(
        tokenizer,
        EvaluateDataConfig(),
        vocab_size=len(tokenizer),
        max_model_len=max_model_len,
        end_ids=[tokenizer.eos_token_id],
    )
    model = ServedModel(
        name="scripted",
        decode=decode,
        token_text=lambda token: tokenizer.decode([token]),
        defaults=SamplingParams(max_tokens=256),
    )
    door = Door(model, prompts, handover, DoorConfig(max_sessions=max_sessions))
    engine = ScriptedEngine(script, tokenizer)
    with DoorServer(door) as server:
        scorer = HarnessScorer(
            lambda access: Scorer(
                rewards,
                max_completion_tokens=SAMPLING.max_tokens,
                env=cfg,
                open_access=access,
            ),
            door,
            server,
            handover,
            max_turns=cfg.max_turns,
            max_turn_tokens=cfg.max_turn_tokens,
            history=cfg.history,
        )
        try:
            episodes = Episodes(decode=decode, purpose="rollout")
            yield Played(scorer, engine, door, episodes)
        finally:
            scorer.close()
