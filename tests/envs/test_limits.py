"""What a limit does to an episode with a session: who scores it, and what is left."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hone.envs import Observation
from hone.envs.session import Action, DataRow, End
from hone.envs.tools.session import ToolSession
from hone.envs.tools.tool import function_tool
from hone.envs.tools.with_session import WithTools
from hone.rewards import live_sessions
from hone.rewards.live_sessions import LiveSessions
from hone.rewards.play import EpisodeSoFar, play, read_answer
from hone.rewards.score import RewardFunction, Verdict
from hone.rewards.session_player import SessionCall, SessionPlayer
from hone.rewards.wire import MAX_RESULT_BYTES
from hone.rollout.runner import Runner, RunningGroup
from hone.rollout.settings import EnvConfig
from hone.types import FailureKind, Sample, SamplingParams, StopReason
from hone.user_code.signatures import GIVEN as GIVEN_NAMES
from tests.rollout.fakes import FakeEngine, FakeScorer, prompt
from tests.rollout.test_runner import episodes

ROW = DataRow(
    prompt="?", messages=(), unrendered="?", answer=None, raw_answer=None, task="t", columns={},
    seed=0, max_turns=4, max_tokens=50,
)  # fmt: skip
HALF = RewardFunction(lambda completion: 0.5, name="half", weight=1.0, args={})
GIVEN = {**dict.fromkeys(GIVEN_NAMES), "completion": "c", "metadata": {}}


class Says:
    """Answers with an observation that earns 0.25."""

    def start(self, row: DataRow) -> None:
        pass

    def step(self, action: Action) -> Any:
        return Observation("more", reward=0.25)

    def close(self) -> None:
        pass


class Finishes(Says):
    def finish(self) -> Any:
        return 0.5


class Leaves(Says):
    def finish(self) -> Any:
        return End(score=None)


def echo(text: str) -> str:
    """Say a text again.

    Args:
        text: The text
    """
    return text


def tools() -> ToolSession:
    return ToolSession([function_tool(echo)], tool_format="hermes")


def action(*, must_end: bool) -> Action:
    return Action(text="a", token_ids=(1,), content="a", stop_reason="eos", index=0,
                  must_end=must_end, tokens_left=9)  # fmt: skip


def ended(
    make: Callable[[], Any], *, limit: StopReason = StopReason.LENGTH, is_overdue: bool = False
) -> Verdict:
    """The verdict on an episode whose first observation leaves no token for a turn."""
    player = SessionPlayer(make, read_answer, file=None)

    def called(call: SessionCall, limit: StopReason | None) -> Verdict:
        episode = EpisodeSoFar(given=call, earned=0.0, limit=limit)
        return play(player, [HALF], GIVEN, episode, on_call=lambda _: None)

    called(SessionCall(kind="start", row=ROW), None)
    first = called(SessionCall(kind="step", action=action(must_end=False)), None)
    if first.observation is None:
        return first
    reward = first.observation.reward
    return called(SessionCall(kind="finish", reward=reward, is_overdue=is_overdue), limit)


@pytest.mark.parametrize(
    ("make", "total", "parts"),
    [
        (Says, 0.25, {"env": 0.25}),
        (Finishes, 0.75, {"env": 0.75}),
        (Leaves, 0.75, {"env": 0.25, "half": 0.5}),
        (lambda: WithTools(Says(), tools()), 0.25, {"env": 0.25}),
    ],
    ids=["rewards alone", "finish", "finish without score", "with tools"],
)
def test_the_last_observation_counts_and_finish_scores(
    make: Callable[[], Any], total: float, parts: dict[str, float]
) -> None:
    verdict = ended(make)
    assert verdict.reward is not None
    assert verdict.reward.total == total
    assert dict(verdict.reward.parts) == parts
    assert verdict.stop_reason is StopReason.LENGTH


def test_tools_leave_the_score_to_functions_where_no_token_is_left() -> None:
    session = tools()
    assert session.finish() == End(score=None, truncated=True, metrics=session.metrics())


def test_an_episode_past_its_deadline_is_not_played_again() -> None:
    verdict = ended(Says, limit=StopReason.DEADLINE, is_overdue=True)
    assert verdict.failure is FailureKind.TIMEOUT
    assert not verdict.is_session_lost
    assert ended(Finishes, limit=StopReason.DEADLINE, is_overdue=True).reward is not None


def test_a_text_of_any_length_fits_into_the_answer_of_a_worker() -> None:
    class Floods(Says):
        def step(self, action: Action) -> Any:
            return [{"role": "tool", "content": "\x00" * 10**7}] * 3

    player = SessionPlayer(Floods, read_answer, file=None)
    player(SessionCall(kind="start", row=ROW))
    said = player(SessionCall(kind="step", action=action(must_end=False)))
    assert isinstance(said, Observation)
    assert not isinstance(said.content, str)
    assert sum(6 * len(message["content"]) for message in said.content) < MAX_RESULT_BYTES


class Pool:
    """Takes note of what is asked of sessions."""

    def __init__(self) -> None:
        self.closed: list[int] = []

    def submit(self, ticket: int, given: Any, episode: Any = None, **where: Any) -> None:
        self.last = episode

    def close_session(self, session: int) -> None:
        self.closed.append(session)


def sample(name: str = "g/0") -> Sample:
    return Sample(
        id=name, prompt=prompt(0), index=0, token_ids=[], logprobs=[], weight_versions=[],
        loss_mask=[], stop_reason=StopReason.ABORT, must_end=False,
    )  # fmt: skip


def test_a_pause_counts_towards_no_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(live_sessions, "monotonic", lambda: now[0])
    pool: Any = Pool()
    sessions = LiveSessions(pool, EnvConfig(path="x:y", episode_timeout_s=10), max_tokens=9)
    one = sample()
    sessions.submit(0, one, {})
    sessions.rest()
    now[0] += 1000.0
    sessions.wake()
    now[0] += 9.0
    assert sessions.is_live(one)
    (live,) = sessions._live.values()  # pyright: ignore[reportPrivateUsage]
    assert live.ends_at == 1110.0


def test_sessions_of_groups_that_another_process_goes_on_with_are_closed() -> None:
    pool: Any = Pool()
    scorer: Any = FakeScorer()
    scorer.sessions = LiveSessions(pool, EnvConfig(path="x:y"), max_tokens=9)
    runner = Runner(FakeEngine(), scorer, episodes())
    groups = [
        RunningGroup.of(prompt(n), SamplingParams(max_tokens=9), runner.episodes,
                        group_id=f"g{n}", indices=[0], order=n)
        for n in range(2)
    ]  # fmt: skip
    for number, group in enumerate(groups):
        begun = sample(f"g{number}/0")
        group.episodes[0] = begun
        scorer.sessions.submit(number, begun, {})
        runner.groups[group.group.id] = group
    runner.is_submitted = False
    runner.resume([groups[1]])
    assert pool.closed == [1]
    assert [*runner.groups] == ["g1"]
