"""Calls over a line: in order of nothing, each answered once, or lost with a cause."""

from __future__ import annotations

import random
import socket
import threading
from collections.abc import Generator, Sequence
from contextlib import suppress
from typing import Any, ClassVar

import pytest

from hone.distributed import calls
from hone.distributed.calls import Frames, Hub, Line, frame, serve
from hone.types import EngineLostError

PATIENCE_S = 30.0


@pytest.fixture
def hub() -> Generator[Hub]:
    hub = Hub("127.0.0.1", lost_after_s=0.05)
    yield hub
    hub.close()


class Target:
    def __init__(self) -> None:
        self.may_end = threading.Event()

    def wait(self) -> str:
        assert self.may_end.wait(PATIENCE_S)
        return "waited"

    def let_end(self) -> None:
        self.may_end.set()

    def echo(self, value: Any) -> Any:
        return value

    def refuse(self) -> None:
        raise ValueError("it is refused")

    def fail(self) -> None:
        raise Odd(1, 2)


class Odd(Exception):
    """Cannot be made again of its message."""

    def __init__(self, one: int, other: int) -> None:
        super().__init__(f"{one} and {other}")


def serving(hub: Hub, line: Line, num_threads: int = 2) -> threading.Thread:
    target = Target()

    def call(method: str, args: Sequence[Any]) -> Any:
        return getattr(target, method)(*args)

    keywords = {"num_threads": num_threads}
    thread = threading.Thread(target=serve, args=(hub.address, line.key, call), kwargs=keywords)
    thread.start()
    return thread


def test_calls_are_answered_in_any_order_and_those_before_the_start_too(hub: Hub) -> None:
    line = hub.line("engine 0")
    early, large = line.call("wait"), bytes(5_000_000)
    thread = serving(hub, line)
    assert line.call("echo", large).result(PATIENCE_S) == large
    assert not early.done()
    line.call("let_end").result(PATIENCE_S)
    assert early.result(PATIENCE_S) == "waited"
    with pytest.raises(ValueError, match="it is refused"):
        line.call("refuse").result(PATIENCE_S)
    with pytest.raises(RuntimeError, match="Odd: 1 and 2"):
        line.call("fail").result(PATIENCE_S)
    line.end("the test is over")
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def test_what_is_open_when_a_line_ends_is_lost_with_the_first_cause(hub: Hub) -> None:
    line = hub.line("engine 0")
    told = list[str]()
    pending = line.call("echo", 1)
    pending.add_done_callback(lambda _: told.append("told"))
    line.end("it was killed")
    line.end("something later")
    with pytest.raises(EngineLostError, match="engine 0 is lost: it was killed"):
        pending.result(0.0)
    with pytest.raises(EngineLostError, match="it was killed"):
        line.call("echo", 2).result(0.0)
    assert told == ["told"]


def test_a_process_whose_connection_ends_is_lost(hub: Hub) -> None:
    line = hub.line("engine 0")
    pending = line.call("echo", 1)
    with socket.create_connection(hub.address) as sock:
        sock.sendall(line.key)
        sock.recv(1)
    with pytest.raises(EngineLostError, match="connection"):
        pending.result(PATIENCE_S)


def test_a_process_that_reads_nothing_is_lost(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calls, "_SEND_S", 1.0)
    line = hub.line("engine 0")
    with socket.create_connection(hub.address) as sock:
        sock.sendall(line.key)
        pending = line.call("echo", bytes(50_000_000))
        with pytest.raises(EngineLostError, match="not read what was sent"):
            pending.result(PATIENCE_S)


def test_who_does_not_know_the_key_is_not_listened_to(hub: Hub) -> None:
    line = hub.line("engine 0")
    with socket.create_connection(hub.address) as sock:
        sock.sendall(bytes(calls.KEY_BYTES) + frame(Loaded()))
        with suppress(ConnectionResetError):
            assert sock.recv(1) == b""
    thread = serving(hub, line)
    assert line.call("echo", 3).result(PATIENCE_S) == 3
    assert not Loaded.times
    line.end("the test is over")
    thread.join(PATIENCE_S)


class Loaded:
    times: ClassVar[list[str]] = []

    def __reduce__(self) -> tuple[Any, ...]:
        return Loaded.times.append, ("unpickled",)


@pytest.mark.parametrize("seed", range(3))
def test_values_come_out_of_a_stream_however_it_is_cut(seed: int) -> None:
    draw, frames = random.Random(seed), Frames()
    values = [bytes(draw.randrange(200)) for _ in range(20)]
    stream = b"".join(map(frame, values))
    found = list[Any]()
    while stream:
        cut = draw.randrange(1, 100)
        found += frames.feed(stream[:cut])
        stream = stream[cut:]
    assert found == values
