"""Whole runs on Ray, started as a user starts them, of which parts are killed on the way."""

from __future__ import annotations

import os
import pickle
import signal
import socket
import struct
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from torch.distributed import TCPStore

from hone.config.load import dump_config
from tests.ports import listening
from tests.tiny_runs import lines, make_classifier, tiny_config, write_inputs

pytest.importorskip("ray")

PROMPTS, SAMPLES = 4, 4
LIMIT_S = 800.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("ray")
    write_inputs(folder, num_kv_heads=2, num_rows=400, high=30)
    return folder


def recipe(folder: Path, name: str, steps: int, **sections: dict[str, Any]) -> Path:
    cfg = tiny_config(
        folder,
        folder / f"{name}-run",
        **{
            "run": {"steps": steps},
            "rollout": {"prompts_per_step": PROMPTS, "n_samples_per_prompt": SAMPLES},
            "algorithm": {"correction": {"kind": "tis"}},
            "log": {"samples_per_step": 99},
        }
        | sections,
    )
    path = folder / f"{name}.yaml"
    path.write_text(dump_config(cfg))
    return path


def start(recipe: Path) -> subprocess.Popen[str]:
    """`hone rl RECIPE`, with its output in a pipe."""
    return subprocess.Popen(
        [sys.executable, "-m", "hone", "rl", str(recipe)],
        cwd=recipe.parent,
        # A Ray that hone starts has a token nevertheless.
        env={**os.environ, "RAY_AUTH_MODE": "disabled", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def wait_for_row(run: subprocess.Popen[str], file: Path, number: int) -> None:
    deadline = time.monotonic() + LIMIT_S
    while not file.exists() or file.read_text().count("\n") < number:
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)


def actors(run: subprocess.Popen[str], kind: str) -> list[psutil.Process]:
    """Those of this run's Ray, which are not its children but its raylet's."""
    found: list[psutil.Process] = []
    for process in psutil.Process(run.pid).children(recursive=True):
        try:
            if process.cmdline()[:1] and process.cmdline()[0].startswith(f"ray::{kind}"):
                found.append(process)
        except psutil.Error:
            continue
    return found


def kill_one(run: subprocess.Popen[str], of: int, kind: str = "EngineRank") -> None:
    """Kill the process of an engine, or a reference, once there are so many."""
    deadline = time.monotonic() + LIMIT_S
    while len(found := actors(run, kind)) < of:
        assert run.poll() is None, run.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.05)
    found[-1].send_signal(signal.SIGKILL)


def check_trained_once(folder: Path, steps: int) -> None:
    """Every prompt that was trained had all its samples, once."""
    samples = [row for row in lines(folder / "samples.jsonl") if row["split"] == "train"]
    counts = Counter(sample["prompt_id"] for sample in samples)
    assert len(samples) == steps * PROMPTS * SAMPLES
    assert set(counts.values()) == {SAMPLES}


def test_more_processes_than_cores_can_serve_are_refused(folder: Path) -> None:
    path = recipe(folder, "many", 1, cluster={"num_engines": 4 * (os.cpu_count() or 1)})
    output, _ = (run := start(path)).communicate(timeout=LIMIT_S)
    assert run.returncode == 2, output
    assert "processes are needed: cluster.num_trainers 1 + cluster.num_engines" in output, output


OF_RANKS: dict[str, Any] = {
    "cluster": {"num_engines": 1, "num_trainers": 2},
    "engine": {"tensor_parallel_size": 2},
    "trainer": {"parallel": {"zero_stage": 3}},
}
"""Two trainers, and an engine of two ranks."""


@pytest.mark.slow
def test_R11_killed_engines_are_replaced_and_no_sample_is_lost_or_trained_twice(
    folder: Path,
) -> None:
    """One as it starts, one at work."""
    steps = 40
    path = recipe(
        folder,
        "killed",
        steps,
        cluster={"num_engines": 2},
        pipeline={"max_staleness": 1},
    )
    run = start(path)
    rows = folder / "killed-run" / "metrics.jsonl"
    kill_one(run, 2)
    wait_for_row(run, rows, 3)
    kill_one(run, 1)
    output, _ = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 0, output
    assert "is lost and replaced (restart 2 of at most 3)" in output, output
    assert len(lines(rows)) == steps
    check_trained_once(rows.parent, steps)


@pytest.mark.slow
def test_R11_a_dead_ray_node_ends_the_run_and_is_named(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing can be started anew on it, so that no restart is waited for."""
    monkeypatch.setenv("RAY_health_check_period_ms", "500")  # when Ray misses the node
    path = recipe(folder, "dead", 2000, cluster={"num_engines": 1}, pipeline={"max_staleness": 1})
    run = start(path)
    wait_for_row(run, folder / "dead-run" / "metrics.jsonl", 2)
    processes = psutil.Process(run.pid).children(recursive=True)
    (raylet,) = (process for process in processes if process.name() == "raylet")
    raylet.kill()
    output, _ = run.communicate(timeout=600.0)
    assert run.returncode == 1, output
    told = output.partition("error: ")[2]
    assert told.startswith("the Ray node of this host, "), output
    assert "/logs'" in told
    assert "goes on from the last checkpoint" in told
    events = lines(folder / "dead-run" / "events.jsonl")
    lost = [event for event in events if event["kind"] == "engine_lost"]
    assert [(event["name"], event["restart"]) for event in lost] == [("engine 0", 1)]
    assert not psutil.wait_procs(processes, timeout=120.0)[1]


@pytest.mark.slow
def test_R11_two_trainers_and_an_engine_of_two_ranks(folder: Path) -> None:
    """A killed rank takes its engine along, which is replaced; Ctrl-C ends all processes."""
    path = recipe(
        folder,
        "ranks",
        2000,
        **OF_RANKS,
    )
    run = start(path)
    rows = folder / "ranks-run" / "metrics.jsonl"
    wait_for_row(run, rows, 2)
    assert lines(rows)[0]["off_policy/parity/kl"] < 1e-6
    kill_one(run, 2)
    wait_for_row(run, rows, len(lines(rows)) + 3)
    processes = psutil.Process(run.pid).children(recursive=True)
    os.kill(run.pid, signal.SIGINT)
    output, _ = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 130, output
    assert "(restart 1 of at most 3)" in output, output
    assert "stopped and saved after step" in output, output
    assert not psutil.wait_procs(processes, timeout=120.0)[1]
    check_trained_once(rows.parent, len(lines(rows)))


class Exploit:
    """A pickle that runs a program when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


def attacks(mark: Path) -> list[bytes]:
    """What a stranger may send to a port, whatever is there: pickles alone, behind their length,
    behind a key, posted, and written into a store of torch."""
    exploit = pickle.dumps(Exploit(mark))
    framed = struct.pack("<Q", len(exploit)) + exploit
    posted = b"POST / HTTP/1.1\r\nContent-Length: %d\r\n\r\n" % len(exploit) + exploit
    magic, key = b"\0" + struct.pack("<I", 0x3C85F7CE), b"/a stranger's"
    written = b"".join(struct.pack("<Q", len(part)) + part for part in (key, exploit))
    return [exploit, framed, bytes(32) + framed, posted, magic + b"\1" + written]


def send(port: int, message: bytes) -> None:
    """Send it, whether or not somebody wants to read it."""
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 60.0) as sock:
        sock.settimeout(60.0)
        sock.sendall(message)
        sock.shutdown(socket.SHUT_WR)


ASKS_RAY = """
import sys
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
try:
    GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None, timeout=60)
except AuthenticationError:
    print("refused")
"""


@pytest.mark.slow
def test_a_run_of_one_host_is_reached_from_no_other_and_by_no_stranger_of_this_one(
    folder: Path,
) -> None:
    """Two trainers and an engine of two ranks: stores, groups, the lines of engines and Ray."""
    path = recipe(
        folder,
        "reached",
        2000,
        **OF_RANKS,
    )
    run, mark = start(path), folder / "ran"
    rows = folder / "reached-run" / "metrics.jsonl"
    wait_for_row(run, rows, 1)
    places: set[tuple[str, str, int]] = set()
    trainers: list[dict[str, str]] = []
    tokens: set[str | None] = set()
    said = [(rows.parent / "config.yaml").read_text()]
    for process in (psutil.Process(run.pid), *psutil.Process(run.pid).children(recursive=True)):
        with suppress(psutil.NoSuchProcess):  # Ray ends some that it does not need
            name, own = process.name(), process.environ()
            said += process.cmdline()
            places |= {(name, host, port) for host, port in listening(process)}
            trainers += [own] if "HONE_LAUNCHER" in own else []
            tokens |= {own.get("RAY_AUTH_TOKEN")} if name == "raylet" else set()
    assert {host for _, host, _ in places} == {"127.0.0.1"}, places
    assert {"gcs_server", "raylet"} < {name for name, _, _ in places}
    (key,), (token,) = {own["HONE_KEY"] for own in trainers}, tokens
    assert token is not None
    assert not [text for text in said if key in text or token in text]

    for _, _, port in places:
        for message in attacks(mark):
            send(port, message)
    store = TCPStore("127.0.0.1", int(trainers[0]["MASTER_PORT"]), timeout=timedelta(seconds=60))
    assert store.get("a stranger's") == pickle.dumps(Exploit(mark))  # the attack has arrived
    (gcs,) = (port for name, _, port in places if name == "gcs_server")
    for auth in ({"RAY_AUTH_MODE": "disabled"}, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": key}):
        asked = subprocess.run(
            [sys.executable, "-c", ASKS_RAY, f"127.0.0.1:{gcs}"],
            env={**os.environ, **auth},
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert asked.stdout == "refused\n", asked.stderr

    wait_for_row(run, rows, len(lines(rows)) + 2)
    os.kill(run.pid, signal.SIGINT)
    output, _ = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 130, output
    assert "is lost" not in output, output
    assert not mark.exists()


@pytest.mark.slow
def test_R2_R3_an_engine_of_two_ranks_divides_experts_that_trainers_divide(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Each takes its own of whole tensors that all trainers gather; what it samples is what they
    train."""
    folder = tmp_path_factory.mktemp("experts")
    fields = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    write_inputs(folder, num_kv_heads=2, family="qwen3_moe", **fields)
    path = recipe(
        folder,
        "experts",
        2,
        cluster={"num_engines": 1, "num_trainers": 2},
        engine={"tensor_parallel_size": 2},
        trainer={"parallel": {"zero_stage": 3, "expert_parallel_size": 2}},
        algorithm={"correction": {"kind": "tis"}, "routing_replay": True},
    )
    output, _ = (run := start(path)).communicate(timeout=LIMIT_S)
    assert run.returncode == 0, output
    rows = lines(folder / "experts-run" / "metrics.jsonl")
    assert rows[0]["off_policy/parity/kl"] < 1e-6
    assert [row["off_policy/mismatch_kl"] < 1e-6 for row in rows] == [True] * 2
    assert rows[0]["perf/sync_bytes"] > 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "roles",
    [{"num_engines": 1, "num_references": 2}, {"num_trainers": 2, "num_references": 1}],
    ids=["engine apart", "engines beside two trainers"],
)
def test_R11_a_killed_reference_is_replaced(folder: Path, roles: dict[str, int]) -> None:
    steps, name = 30, f"references-{len(roles)}-{roles.get('num_engines', 0)}"
    path = recipe(folder, name, steps, cluster=roles, algorithm={"kl": {"coef": 0.1}})
    run = start(path)
    rows = folder / f"{name}-run" / "metrics.jsonl"
    wait_for_row(run, rows, 3)
    kill_one(run, roles["num_references"], "ReferenceRank")
    output, _ = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 0, output
    assert "is lost and replaced (restart 1 of at most 3)" in output, output
    found = lines(rows)
    assert [row["step"] for row in found] == list(range(1, steps + 1))
    assert found[-1]["policy/ref_kl"] > 0 == pytest.approx(found[0]["policy/ref_kl"], abs=1e-6)
    check_trained_once(rows.parent, steps)


@pytest.mark.slow
@pytest.mark.parametrize("role", ["teacher", "reward_model"])
def test_R11_a_killed_teacher_or_reward_model_is_replaced(folder: Path, role: str) -> None:
    """Ahead of the training, where they score what has ended while trainers train."""
    steps, cluster = 30, {"num_engines": 1, f"num_{role}s": 1}
    sections: dict[str, Any] = {"teacher": {"path": str(folder / "model")}}
    if role == "reward_model":
        judge = make_classifier(folder / "judge")
        sections = {"reward": {"functions": [], "model": {"path": str(judge)}}}
    path = recipe(
        folder, f"own-{role}", steps, cluster=cluster, pipeline={"max_staleness": 1}, **sections
    )
    run = start(path)
    rows = folder / f"own-{role}-run" / "metrics.jsonl"
    wait_for_row(run, rows, 3)
    kill_one(run, 1, "TeacherRank" if role == "teacher" else "RewardModelRank")
    output, _ = run.communicate(timeout=LIMIT_S)
    assert run.returncode == 0, output
    assert "is lost and replaced (restart 1 of at most 3)" in output, output
    assert [row["step"] for row in lines(rows)] == list(range(1, steps + 1))
    check_trained_once(rows.parent, steps)
