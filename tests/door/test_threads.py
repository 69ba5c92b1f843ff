"""A door in a program: sessions are opened and ended by threads that are not the server's."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from hone.door.door import Door
from hone.door.handover import Handover
from hone.door.loop_calls import LoopCalls
from hone.door.refusal import Refusal
from hone.door.server import DoorServer
from hone.door.settings import DoorConfig
from tests.door.served import PATIENCE_S, SessionClient, chat_body, in_threads, serving, until, user


def test_a_thread_ends_a_session_in_the_event_loop_while_a_turn_is_sampled() -> None:
    with serving() as served:
        session = served.door.open_session()
        client = SessionClient(served, session.id, served.door.keys.session_key(session.id))
        client.chat(user("one"))
        served.engine.gate.clear()  # the runner stands still until the session has ended
        threads: list[str] = []
        served.door._on_finished = lambda found: (
            served.finished.append(found),
            threads.append(threading.current_thread().name),
        )

        def ask() -> Any:
            return client.send("/v1/chat/completions", chat_body(user("two")))

        def end() -> Any:
            until(lambda: len(served.engine.submitted) == 2)
            return served.door.end_soon(session.id, "failed", "no disk").result(PATIENCE_S)

        reply, finished = in_threads([ask, end])
        served.engine.gate.set()
        until(lambda: served.engine.aborted)
    assert (reply.status, reply.json["error"]["code"]) == (503, "aborted")
    assert (finished.status, finished.detail, finished.num_turns) == ("failed", "no disk", 1)
    assert served.finished == [finished]
    assert threads == ["hone-door"]


def test_a_session_is_ended_once_however_many_ask() -> None:
    with serving() as served:
        session = served.door.open_session()
        ends = [served.door.end_soon(session.id) for _ in range(3)]
        errors = [end.exception(PATIENCE_S) for end in ends]
        assert [error is None for error in errors] == [True, False, False]
        assert all(isinstance(error, Refusal) and error.status == 404 for error in errors[1:])
        assert served.finished == [ends[0].result()]


def test_sessions_are_ended_before_a_server_runs_and_after_it_has_ended() -> None:
    with serving() as served:
        kept = served.door.open_session()
        SessionClient(served, kept.id, served.door.keys.session_key(kept.id)).chat(user("one"))
    assert served.door.end_soon(kept.id).result(0).num_turns == 1

    model, prompts = served.door.model, served.door.prompts
    door = Door(model, prompts, Handover(max_requests=1), DoorConfig(), on_finished=lambda _: None)
    assert door.end_soon(door.open_session().id).result(0).num_turns == 0


def test_a_server_needs_no_file_and_may_be_closed_before_it_has_started() -> None:
    with serving() as served:
        door = Door(
            served.door.model, served.door.prompts, Handover(max_requests=1), DoorConfig(port=0)
        )
        server = DoorServer(door)
        assert server.url == f"http://127.0.0.1:{server.port}"
        server.close()


def test_calls_that_the_loop_has_left_are_made_when_it_has_ended() -> None:
    calls, made = LoopCalls(), list[tuple[int, int]]()

    def call(number: int) -> int:
        made.append((number, threading.get_ident()))
        return number

    async def run() -> int:
        loop = asyncio.get_running_loop()
        calls.attach(loop)
        assert calls.soon(lambda: call(0)).done(), "the loop does not wait for itself"
        asked = await loop.run_in_executor(None, calls.soon, lambda: call(1))
        return await asyncio.wrap_future(asked)

    assert asyncio.run(run()) == 1
    # The loop is closed, and that is not known yet.
    thread = threading.Thread(target=lambda: late.append(calls.soon(lambda: call(2))))
    late: list[Any] = []
    thread.start()
    thread.join()
    assert not late[0].done()
    calls.detach()
    assert late[0].result(0) == 2
    assert made == [(number, threading.get_ident()) for number in range(3)]


def test_an_error_of_a_call_is_raised_for_the_one_who_asked() -> None:
    with pytest.raises(ZeroDivisionError):
        LoopCalls().soon(lambda: 1 // 0).result(0)
