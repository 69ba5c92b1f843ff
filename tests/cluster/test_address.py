"""Where no Ray can be joined is found at once, and told; where one may be is left to Ray."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from hone.config.load import dump_config
from hone.distributed.address import unreachable
from hone.errors import UserError
from tests.tiny_runs import tiny_config, write_inputs


def free_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


@pytest.mark.parametrize("scheme", ["", "ray://"])
def test_who_answers_may_be_ray(scheme: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert unreachable(f"{scheme}127.0.0.1:{server.getsockname()[1]}") is None


def test_nobody_at_an_address_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    nobody = free_address()
    said = unreachable(nobody)
    assert said is not None
    host, port = nobody.split(":")
    for words in (repr(nobody), f"nobody answers at port {port} of {host} (", "ray start --head"):
        assert words in said
    monkeypatch.setenv("RAY_ADDRESS", nobody)
    said = unreachable("auto") or ""
    assert "cluster.address='auto'" in said
    assert f"RAY_ADDRESS, which auto reads, is {nobody!r}, and nobody" in said
    monkeypatch.delenv("RAY_ADDRESS")
    assert unreachable("auto") is None, "what Ray must find is left to it"


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
    run = subprocess.run(words, capture_output=True, text=True, timeout=600, check=True)
    assert json.loads(run.stdout) == [2]
    assert "error: there is no Ray cluster at cluster.address='127.0.0.1:" in run.stderr
    assert not (tmp_path / "run").exists()


def test_a_ray_of_this_host_that_does_not_start_in_time_is_told_with_remedies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from hone.distributed import ray

    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))

    def start(error: Exception) -> None:
        monkeypatch.setattr(ray.ray, "init", Mock(side_effect=error))
        ray._start(2, 0)

    for error in (Exception("The current node timed out during startup."), TimeoutError("30 s")):
        with pytest.raises(
            UserError, match=rf"did not start on this host: {error}.*ulimit -u.*{tmp_path}/ray-"
        ):
            start(error)
    with pytest.raises(TypeError):  # a mistake of ours
        start(TypeError("no such argument"))
