"""Connections that ask for nothing, ask slowly, or do not take their answer, and bodies."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from hone.door import bodies, connections, server
from hone.door.connections import Connections
from tests.door.served import PATIENCE_S, Reply, Served, chat_body, in_threads, serving, until, user

HEAD = "POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n"


def connected(served: Served, text: str = "") -> socket.socket:
    found = socket.create_connection(("127.0.0.1", served.port), PATIENCE_S)
    found.sendall(text.encode())
    return found


def rest_of(found: socket.socket) -> bytes:
    """What the server sends until it ends the connection."""
    parts: list[bytes] = []
    try:
        while part := found.recv(2**16):
            parts.append(part)
    except ConnectionResetError:
        pass
    found.close()
    return b"".join(parts)


def answer_of(found: socket.socket) -> bytes:
    """One answer whose body is a JSON object without others in it."""
    text = b""
    while not text.endswith(b"}"):
        text += (part := found.recv(2**16))
        assert part, "the connection has ended"
    return text


def chat(served: Served, text: str = "x") -> Reply:
    return served.send("/v1/chat/completions", chat_body(user(text)))


# -- connections ---------------------------------------------------------------------------------


@pytest.mark.parametrize("text", ["", "POST /v1/chat", HEAD])
def test_connections_that_ask_for_nothing_make_room(
    text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "_MORE_CONNECTIONS", 4)
    with serving(max_requests=2, max_sessions=2) as served:
        served.engine.gate.clear()

        def ask() -> Reply:
            return chat(served)

        def crowd() -> bytes:
            until(lambda: len(served.engine.submitted) == 1)
            silent = [connected(served, text) for _ in range(24)]
            ends = [rest_of(found) for found in silent[:12]]
            assert served.send("/v1/models", method="GET").status == 200
            served.engine.gate.set()
            for found in silent[12:]:
                found.close()
            return b"".join(ends)

        reply, said = in_threads([ask, crowd])
    assert reply.status == 200, "a request that is being sampled keeps its connection"
    assert said == b""


def test_the_head_of_a_request_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving() as served:
        key = f"x-api-key: {served.key}\r\n"
        good = f"GET /sessions HTTP/1.1\r\nHost: x\r\n{key}\r\n"
        kept, refused = connected(served, good), connected(served, good)
        for found in (kept, refused):
            assert b" 405 " in answer_of(found)
        monkeypatch.setattr(connections, "HEAD_S", 0.02)
        silent, slow = connected(served), connected(served, "GET /")
        # Each of these has had an answer in time.
        kept.sendall(f"{good}GET /".encode())
        refused.sendall(f"{HEAD}\r\nhalf".encode())
        assert rest_of(silent) == rest_of(slow) == b""
        assert rest_of(kept).count(b" 405 ") == 1
        assert rest_of(refused).count(b" 401 ") == 1, "what follows a refusal is not waited for"


def test_a_body_has_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "BODY_S", 0.02)
    with serving() as served:
        found = connected(served, f"{HEAD}x-api-key: {served.key}\r\n\r\nhalf")
        text = rest_of(found).decode()
    assert " 408 " in text
    assert "the body did not come within 0.02 s" in text


def test_a_client_that_leaves_within_its_body_is_no_error(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with serving() as served:
        connected(served, f"{HEAD}x-api-key: {served.key}\r\n\r\nhalf").close()
        until(lambda: not served.server._server.server_state.tasks)
        assert chat(served).status == 200
    assert not caplog.records


class Clock(asyncio.AbstractEventLoop):
    """A loop with timers alone, whose time passes when a test says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[asyncio.TimerHandle] = []

    def get_debug(self) -> bool:
        return False

    def time(self) -> float:
        return self.now

    def call_later(self, delay: float, callback: Any, *args: Any, **_: Any) -> Any:
        timer = asyncio.TimerHandle(self.now + delay, callback, args, self)
        self.timers.append(timer)
        return timer

    def _timer_handle_cancelled(self, timer: asyncio.TimerHandle) -> None:
        self.timers.remove(timer)

    def wait(self, seconds: float) -> None:
        self.now += seconds
        for timer in [timer for timer in self.timers if timer.when() <= self.now]:
            self.timers.remove(timer)
            timer._run()


class Transport(asyncio.Transport):
    def __init__(self) -> None:
        super().__init__()
        self.num_unsent = 0
        self.is_aborted = False

    def get_write_buffer_size(self) -> int:
        return self.num_unsent

    def abort(self) -> None:
        self.is_aborted = True


@pytest.fixture
def alone() -> tuple[Any, Transport, Clock]:
    clock, transport = Clock(), Transport()
    config = uvicorn.Config(lambda: None, log_config=None)  # type: ignore[arg-type]
    of_uvicorn = {"config": config, "server_state": ServerState(), "app_state": {}}
    made: Callable[..., Any] = Connections(8).protocol
    connection = made(**of_uvicorn, _loop=clock)
    connection.connection_made(transport)
    return connection, transport, clock


def test_a_client_that_takes_nothing_of_its_answer_is_left(
    alone: tuple[Any, Transport, Clock],
) -> None:
    connection, transport, clock = alone
    transport.num_unsent = 10**8
    connection.pause_writing()
    for _ in range(50):  # a slow client, for longer than any deadline
        transport.num_unsent -= 1
        clock.wait(connections.STALL_S)
        assert not transport.is_aborted
    clock.wait(connections.STALL_S)
    assert transport.is_aborted


def test_a_connection_that_is_gone_has_no_timers(alone: tuple[Any, Transport, Clock]) -> None:
    connection, transport, clock = alone
    connection.pause_writing()
    connection.resume_writing()
    assert len(clock.timers) == 1, "it waits for a request again"
    connection.pause_writing()
    connection.connection_lost(OSError())
    assert not clock.timers
    assert not transport.is_aborted


@pytest.mark.parametrize(
    ("soft", "hard", "raised", "most"),
    [
        (4096, 4096, None, 1000),
        (1024, 4096, 1512, 1000),
        (1024, resource.RLIM_INFINITY, 1512, 1000),
        (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None, 1000),
        (1024, 1024, 1024, 512),
        (256, 1200, 1200, 688),
        (256, 512, 512, 256),
    ],
)
def test_connections_leave_files_for_others(
    soft: int, hard: int, raised: int | None, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    sets: list[tuple[int, tuple[int, int]]] = []
    monkeypatch.setattr(resource, "getrlimit", lambda _: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda *given: sets.append(given))
    assert Connections(1000).most == most
    assert sets == ([] if raised is None else [(resource.RLIMIT_NOFILE, (raised, hard))])


# -- bodies --------------------------------------------------------------------------------------


def test_all_bodies_have_one_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "ALL_BYTES", 0)  # the bound is that of four bodies
    body = chat_body(user("x"), stream=True, user="x" * 900)
    with serving(max_body_mib=0.001) as served:
        served.engine.gate.clear()

        def ask() -> Reply:
            return served.send("/v1/chat/completions", body)

        def too_much() -> list[Reply]:
            until(lambda: served.handover._num_open == 4)
            refused = [ask(), served.send("/sessions", {"x": "x" * 900})]
            served.engine.gate.set()
            return refused

        *answered, refused = in_threads([ask, ask, ask, ask, too_much])
        assert [reply.status for reply in answered] == [200] * 4
        for reply in refused:
            assert (reply.status, reply.json["error"]["code"]) == (429, "bodies_full")
            assert reply.headers["retry-after"] == "1"
        assert ask().status == 200, "what has been answered takes no room"


def test_a_request_with_two_lengths_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy may take one of them, and this server the other."""
    inner = "GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"
    with serving() as served:
        text = HEAD.replace("10", str(len(inner) + 5)) + f"x-api-key: {served.key}\r\n"
        found = connected(served, f"{text}Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n{inner}")
        said = rest_of(found).decode()
    assert said.count("HTTP/1.1 ") == 1
    assert " 400 " in said
    assert (
        "Content-Length and Transfer-Encoding"
        in json.loads(said.split("\r\n\r\n")[1])["error"]["message"]
    )
