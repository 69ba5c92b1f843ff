"""Where no Ray can be joined is found at once, and told; where one may be is left to Ray."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from hone.cluster import address
from hone.cluster.address import unreachable
from hone.config.load import dump_config
from tests.tiny_runs import tiny_config, write_inputs

SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])
HTTP_1 = b"HTTP/1.1 400 Bad Request\r\n\r\n"


@contextmanager
def listener(*answers: bytes) -> Iterator[str]:
    """Takes one connection, waits for what it says, and sends `answers`, one packet each."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            try:
                connection, _ = server.accept()
            except OSError:
                return
            with connection:
                connection.recv(1024)
                for answer in answers:
                    connection.sendall(answer)
                    time.sleep(0.02)
                if not answers:
                    connection.recv(1024)  # until the other side has had enough

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"127.0.0.1:{server.getsockname()[1]}"
        thread.join()


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_who_speaks_grpc_may_be_ray(scheme: str) -> None:
    with listener(SETTINGS[:2], SETTINGS[2:]) as place:
        assert unreachable(scheme + place) is None


def test_others_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = free_address()
    said = unreachable(nobody)
    assert said is not None
    host, port = nobody.split(":")
    for words in (repr(nobody), f"nobody answers at port {port} of {host} (", "ray start --head"):
        assert words in said
    monkeypatch.setenv("RAY_ADDRESS", nobody)
    assert f"RAY_ADDRESS, which auto reads, is {nobody!r}, and nobody" in (
        unreachable("auto") or ""
    )
    with listener(HTTP_1) as place:
        assert "does not speak gRPC" in (unreachable(place) or "")
    with listener(b"") as place:
        assert "does not speak gRPC" in (unreachable(place) or "")
    monkeypatch.setattr(address, "_ANSWER_S", 0.1)
    with listener() as place:
        assert "nobody answers" in (unreachable(place) or "")


def test_a_cluster_that_encrypts_is_left_to_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_USE_TLS", "1")
    with listener(b"\x15\x03\x01") as place:
        assert unreachable(place) is None
    assert unreachable(free_address()) is not None


def test_a_name_may_be_resolved_slowly(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = socket.getaddrinfo

    def slowly(host: str, *args: Any, **kwargs: Any) -> Any:
        time.sleep(0.3)
        return resolve("127.0.0.1" if host == "head.cluster" else host, *args, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", slowly)
    monkeypatch.setattr(address, "_CONNECT_S", 0.1)
    with listener(SETTINGS) as place:
        assert unreachable(place.replace("127.0.0.1", "head.cluster")) is None


@pytest.mark.parametrize(
    "given",
    [
        "head",
        "head:",
        ":6379",
        "head:port",
        "head:70000",
        "local",
        "",
        "tcp://head:1",
        "ray://head",
    ],
)
def test_what_is_no_address_is_refused(given: str) -> None:
    assert "is neither host:port nor ray://host:port" in (unreachable(given) or "")


def test_what_ray_must_find_is_left_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    assert unreachable("auto") is None
    monkeypatch.setenv("RAY_ADDRESS", nobody := free_address())
    said = unreachable("auto") or ""
    assert "cluster.address='auto'" in said
    assert f"port {nobody.split(':')[1]} of" in said


@pytest.mark.parametrize("num_trainers", [1, 2])
def test_a_wrong_address_ends_a_run_before_anything_is_loaded(
    tmp_path: Path, num_trainers: int
) -> None:
    pytest.importorskip("ray")  # without it that is what is told
    write_inputs(tmp_path)
    cluster = {"num_engines": 1, "num_trainers": num_trainers, "address": free_address()}
    cfg = tiny_config(tmp_path, tmp_path / "run", cluster=cluster)
    (tmp_path / "recipe.yaml").write_text(dump_config(cfg))
    program = (
        "import sys, json; from hone.cli.main import main; code = main(sys.argv[1:]);"
        "print(json.dumps([code, *({'torch', 'ray', 'transformers'} & set(sys.modules))]))"
    )
    words = [sys.executable, "-c", program, "rl", str(tmp_path / "recipe.yaml")]
    run = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True)
    assert json.loads(run.stdout) == [2]
    assert "error: there is no Ray cluster at cluster.address='127.0.0.1:" in run.stderr
    assert not (tmp_path / "run").exists()
