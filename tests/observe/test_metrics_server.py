"""What Prometheus reads, and whether a run is told to be late."""

from __future__ import annotations

import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Generator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from hone.errors import UserError
from hone.observe import local_server
from hone.observe.metrics_server import MetricsServer, exposition


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def server(clock: Clock) -> Generator[MetricsServer]:
    with closing(MetricsServer(0, "gsm8k", clock=clock)) as server:
        yield server


def get(server: MetricsServer, path: str, **headers: str) -> tuple[int, str]:
    url = f"http://127.0.0.1:{server.port}{path}"
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers)) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def health(server: MetricsServer) -> tuple[int, dict[str, Any]]:
    status, text = get(server, "/health")
    return status, json.loads(text)


def test_the_text_is_what_prometheus_reads() -> None:
    scalars = {"reward/mean": 0.5, "eval/pass@1": float("nan"), "a": float("inf"), "step": 3}
    assert exposition(scalars, run='my "run"\\1').decode() == "".join(
        f'# TYPE {name} gauge\n{name}{{run="my \\"run\\"\\\\1"}} {value}\n'
        for name, value in [
            ("hone_reward_mean", "0.5"),
            ("hone_eval_pass_1", "NaN"),
            ("hone_a", "+Inf"),
            ("hone_step", "3"),
        ]
    )


def test_the_newest_step_is_served(server: MetricsServer) -> None:
    assert get(server, "/metrics") == (200, "")
    server.publish(1, {"reward/mean": 0.25, "loss": 3.0, "eval/reward/mean": 0.75}, num_alarms=2)
    server.publish(2, {"reward/mean": 0.5}, num_alarms=1)
    status, text = get(server, "/metrics")
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert status == 200
    assert values == {
        'hone_eval_reward_mean{run="gsm8k"}': "0.75",  # until the next one
        'hone_reward_mean{run="gsm8k"}': "0.5",
        'hone_step{run="gsm8k"}': "2",
        'hone_last_step_timestamp_seconds{run="gsm8k"}': "1000.0",
        'hone_alarms{run="gsm8k"}': "3",
    }


@pytest.mark.parametrize(
    ("step_s", "age_s", "status"),
    [(10.0, 299.0, "ok"), (10.0, 301.0, "late"), (100.0, 499.0, "ok"), (100.0, 501.0, "late")],
)
def test_a_run_is_late_by_the_age_of_its_last_step(
    server: MetricsServer, clock: Clock, step_s: float, age_s: float, status: str
) -> None:
    """Five times the longest step, and five minutes."""
    assert health(server) == (200, {"status": "starting", "step": 0, "age_s": None, "limit_s": 300})
    for step, seconds in enumerate([step_s, 1.0, 1.0], start=1):
        server.publish(step, {})
        clock.now_s += seconds
    server.publish(4, {})
    clock.now_s += age_s
    code, told = health(server)
    assert (code, told["status"]) == (503 if status == "late" else 200, status)
    assert (told["step"], told["age_s"], told["limit_s"]) == (4, age_s, max(5 * step_s, 300))


def test_other_paths_and_names_are_refused(server: MetricsServer) -> None:
    status, text = get(server, "/")
    assert (status, "/metrics" in text) == (404, True)
    assert get(server, "/metrics", Host="evil.example")[0] == 403
    assert get(server, "/metrics", Host=f"localhost:{server.port}")[0] == 200


def test_nobody_elses_slowness_holds_up_a_step(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """Readers that take nothing of a reply larger than what the system buffers."""
    monkeypatch.setattr(local_server, "_TIMEOUT_S", 600.0)
    with closing(MetricsServer(0, "gsm8k", clock=clock)) as server:
        check_slow_readers(server)


def check_slow_readers(server: MetricsServer) -> None:
    large = {f"metric/{number}": 1 / 3 for number in range(200_000)}
    server.publish(1, large)
    readers = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(8)]
    for reader in readers:
        reader.sendall(b"GET /metrics HTTP/1.0\r\n\r\n")
    begin_s = time.monotonic()
    server.publish(2, {"reward/mean": 0.5})
    assert get(server, "/health")[0] == 200
    assert "hone_reward_mean" in get(server, "/metrics")[1]
    assert time.monotonic() - begin_s < 300, "less than the time that a reader is given"
    for reader in readers:
        reader.close()


def test_many_connections_take_no_file_that_the_run_needs(
    monkeypatch: pytest.MonkeyPatch, clock: Clock
) -> None:
    """Of those that ask nothing the oldest goes as one more comes, and whoever asks is answered."""
    monkeypatch.setattr(local_server, "_TIMEOUT_S", 600.0)
    monkeypatch.setattr(local_server, "_MAX_OPEN", 4)
    with closing(MetricsServer(0, "gsm8k", clock=clock)) as server, ExitStack() as stack:
        place = "127.0.0.1", server.port
        silent = [stack.enter_context(socket.create_connection(place, 60.0)) for _ in range(6)]
        assert [each.recv(1) for each in silent[:2]] == [b"", b""]
        assert get(server, "/health")[0] == 200
        assert silent[2].recv(1) == b""
        silent[5].sendall(b"GET /health HTTP/1.0\r\n\r\n")
        assert silent[5].recv(12) == b"HTTP/1.0 200"


def test_a_port_that_is_taken_is_named(server: MetricsServer) -> None:
    with pytest.raises(UserError, match=rf"log\.metrics_port is {server.port}.*another program"):
        MetricsServer(server.port, "other")
