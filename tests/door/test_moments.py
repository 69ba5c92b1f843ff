"""Requests that come in the same moment as the end of a turn or of a session: calls of one event
loop, in an order that this file chooses."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from hone.door import repeats
from hone.door.door import Door
from hone.door.handover import Handover
from hone.door.prompts import TokenPrompt
from hone.door.refusal import Refusal
from hone.door.repeats import Sent
from hone.door.sessions import History, Session, Terms
from hone.door.settings import DoorConfig
from hone.door.turns import Asked, AskedTurn
from hone.rollout.episodes import Episodes
from hone.rollout.runner import Runner
from hone.types import SamplingParams
from tests.door.served import PATIENCE_S, serving

SAMPLING = SamplingParams(max_tokens=1)


class Stepped:
    """A door without a server, whose runner makes steps where a test says so."""

    def __init__(self) -> None:
        with serving() as served:
            self.engine = served.engine
            model, prompts = served.door.model, served.door.prompts
        self.handover = Handover(max_requests=8)
        self.door = Door(model, prompts, self.handover, DoorConfig())
        self.runner = Runner(self.engine, None, Episodes(decode=model.decode, purpose="serve"))

    def open(self, *, max_turns: int, history: History = "tree") -> Session:
        return self.door.open_session(
            history=history, terms=Terms(sampling=SAMPLING, max_turns=max_turns)
        )

    def ask(self, number: int, session: Session | None) -> AskedTurn:
        prompt = TokenPrompt((5, number))
        asked = Asked(prompt=prompt, prompt_field="token_ids", sampling=SAMPLING)
        return self.door.ask(asked, self.sent(number, session), session)

    @staticmethod
    def sent(number: int, session: Session | None, *, is_retry: bool = False) -> Sent:
        session_id = None if session is None else session.id
        headers = {"x-stainless-retry-count": "1"} if is_retry else {}
        return Sent("/inference/v1/generate", session_id, headers, b"%d" % number)

    async def answer(self, turn: AskedTurn) -> None:
        """Have a turn sampled."""
        async with asyncio.timeout(PATIENCE_S):
            while not turn.answer.done():
                self.handover.take(self.runner)
                if self.runner.has_requests:
                    self.handover.give(self.runner, self.runner.step().turns)
                await asyncio.sleep(0)


@pytest.fixture
def as_recorded(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[], object]], None]:
    """Makes a call once the next turn is in its tree, before anybody else learns of it."""
    record = Session.record

    def make_next(call: Callable[[], object]) -> None:
        def recorded(*args: object) -> None:
            record(*args)  # type: ignore[arg-type]
            monkeypatch.setattr(Session, "record", record)
            asyncio.get_running_loop().call_soon(call)

        monkeypatch.setattr(Session, "record", recorded)

    return make_next


async def leave(turn: AskedTurn) -> None:
    """Wait as its only client, and leave."""
    with turn.reading():
        await asyncio.sleep(0)


@pytest.mark.parametrize(("history", "max_turns"), [("linear", 2), ("tree", 1)])
def test_a_turn_whose_client_has_left_has_no_place_in_its_session(
    history: History, max_turns: int
) -> None:
    stepped = Stepped()

    async def run() -> None:
        session = stepped.open(history=history, max_turns=max_turns)
        left = stepped.ask(1, session)
        await leave(left)
        turn = stepped.ask(2, session)  # its task has not heard of it
        assert left.task is not None
        assert not left.task.done()
        await stepped.answer(turn)
        assert turn.answer.result().turn == 0
        finished = stepped.door.end_session(session.id)
        assert (finished.num_turns, finished.limit, finished.rewritten) == (1, None, "")

    asyncio.run(run())


def test_a_turn_that_has_just_ended_counts_once(
    as_recorded: Callable[[Callable[[], object]], None],
) -> None:
    stepped = Stepped()

    async def run() -> None:
        session = stepped.open(max_turns=2)
        first, others = stepped.ask(1, session), list[AskedTurn]()
        as_recorded(lambda: others.append(stepped.ask(2, session)))
        await stepped.answer(first)
        [second] = others
        await stepped.answer(second)
        with pytest.raises(Refusal, match="has used its 2 turns"):
            stepped.ask(3, session)
        assert stepped.door.end_session(session.id).num_turns == 2

    asyncio.run(run())


def test_an_answer_that_comes_as_its_session_ends_takes_no_room_of_others(
    as_recorded: Callable[[Callable[[], object]], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(repeats, "MAX_FINISHED", 1)
    stepped = Stepped()

    async def run() -> None:
        kept = stepped.ask(1, None)
        await stepped.answer(kept)
        session = stepped.open(max_turns=2)
        turn = stepped.ask(2, session)
        as_recorded(lambda: stepped.door.end_session(session.id))
        await stepped.answer(turn)
        await asyncio.sleep(0)  # whoever waits for it has heard of it
        assert turn.answer.result().turn == 0
        again = stepped.sent(1, None, is_retry=True)
        assert stepped.door.repeats.first(again) is kept
        with pytest.raises(Refusal, match="it has ended"):
            stepped.door.session(session.id)

    asyncio.run(run())
