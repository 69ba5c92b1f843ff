"""Calls over a line: in order of nothing, each answered once, or lost with a cause."""

# pyright: reportPrivateUsage=false

from __future__ import annotations

import os
import random
import resource
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import suppress
from itertools import pairwise
from typing import Any, ClassVar

import pytest

from hone.distributed import calls
from hone.distributed.calls import Frames, Hub, Line, frame, serve
from hone.errors import UserError
from hone.types import EngineLostError

PATIENCE_S = 60.0


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


def test_those_who_only_connect_keep_nobody_out_and_take_no_files(hub: Hub) -> None:
    line = hub.line("engine 0")
    strangers = [socket.create_connection(hub.address) for _ in range(calls._MAX_STRANGERS + 2)]
    try:
        strangers[0].settimeout(PATIENCE_S)
        assert strangers[0].recv(1) == b"", "the oldest has to go"
        answering = threading.Thread(
            target=serve,
            args=(hub.address, line.key, lambda method, args: method),
            kwargs={"num_threads": 1},
        )
        answering.start()
        assert line.call("echo").result(PATIENCE_S) == "echo"
        line.end("it is enough")
        answering.join(PATIENCE_S)
    finally:
        for stranger in strangers:
            stranger.close()


def test_a_hub_may_have_as_many_lines_as_were_asked_for() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    many = [os.open(os.devnull, os.O_RDONLY) for _ in range(300)]
    soft = max(num_files() + 20, 64)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
        Hub("127.0.0.1", num_lines=soft).close()
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] >= soft + num_files()
    finally:
        for file in many:
            os.close(file)
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_a_host_that_allows_too_few_lines_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1024, 1024))
    with pytest.raises(
        UserError, match=r"1,000 engines .* \d,\d\d\d files .* is 1,024 .*ulimit -Hn"
    ):
        Hub("127.0.0.1", num_lines=1000)


def num_files() -> int:
    return len(fds())


@pytest.mark.skipif(sys.platform != "linux", reason="counts files in /proc")
def test_nobody_is_let_in_for_a_while_where_no_file_can_be_opened(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Who has come is told of by the system at once, and again: the thread must not go round."""
    accept, tries = Hub._accept, list[float]()
    monkeypatch.setattr(calls, "_FULL_S", 0.3)
    monkeypatch.setattr(Hub, "_accept", lambda hub: (tries.append(time.monotonic()), accept(hub)))
    line, before = hub.line("engine 0"), resource.getrlimit(resource.RLIMIT_NOFILE)
    pending = line.call("echo", 1)
    with socket.socket() as sock:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, fds())) + 1, before[1]))
            spare = fill()
            sock.connect(hub.address)
            sock.sendall(line.key)
            wait_until(lambda: len(tries) >= 3)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for number in spare:
            os.close(number)
        pauses = [later - sooner for sooner, later in pairwise(tries[:3])]
        assert all(pause >= 0.25 for pause in pauses), pauses
        assert "no further process can connect" in caplog.text
        _, method, args = next(Frames().feed(sock.recv(1000)))
        assert (method, args) == ("echo", (1,))
        sock.sendall(frame((0, True, "answer")))
        assert pending.result(PATIENCE_S) == "answer"


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def fds() -> list[str]:
    return os.listdir("/proc/self/fd")


def fill() -> list[int]:
    """Open files until there may be no more."""
    opened = list[int]()
    with suppress(OSError):
        while True:
            opened.append(os.dup(0))
    return opened


@pytest.mark.parametrize("num_lines", [1, 100])
def test_answers_of_many_lines_come_whole(num_lines: int) -> None:
    """Larger than what is read at once, and from enough lines that reading waits for more."""
    hub = Hub("127.0.0.1", num_lines=num_lines)
    try:
        lines = [hub.line(f"engine {number}") for number in range(num_lines)]
        threads = [serving(hub, line) for line in lines]
        sizes = [1, calls._READ_BYTES, 3 * calls._READ_BYTES + 7]
        values = [bytes([number]) * sizes[number % 3] for number in range(num_lines)]
        pending = [
            [line.call("echo", value) for _ in range(3)]
            for line, value in zip(lines, values, strict=True)
        ]
        for value, theirs in zip(values, pending, strict=True):
            assert [call.result(PATIENCE_S) for call in theirs] == [value] * 3
        for line in lines:
            line.end("the test is over")
        for thread in threads:
            thread.join(PATIENCE_S)
    finally:
        hub.close()


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
