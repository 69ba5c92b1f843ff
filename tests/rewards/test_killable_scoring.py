"""Scoring code that loops, forks, eats memory or crashes costs one sample and nothing else."""

import signal
import socket
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import psutil
import pytest

from hone.errors import UserError
from hone.rewards import pool
from hone.rewards.scorer import Scorer
from hone.types import FailureKind
from tests.rewards.misbehaving import (
    CRASHING,
    GREEDY,
    HANGING,
    INVALID,
    LEAVING,
    RAISING,
    WAITS_FOR,
)
from tests.rewards.scoring import (
    LIMIT_S,
    PATIENCE_S,
    Processes,
    config,
    make_sample,
    misbehaving_scorer,
    plant,
)

KINDS = {
    FailureKind.TIMEOUT: HANGING,
    FailureKind.OUT_OF_MEMORY: GREEDY,
    FailureKind.CRASH: CRASHING,
    FailureKind.EXCEPTION: RAISING,
    FailureKind.INVALID: INVALID,
}
ACTIONS = [(action, kind) for kind, actions in KINDS.items() for action in actions]


@pytest.fixture
def processes(monkeypatch):
    return Processes(monkeypatch)


def check_verdict(scorer, action, kind):
    """The action costs its sample, in time, and the samples around it nothing."""
    good = [make_sample("good", index=i) for i in range(4)]
    bad = make_sample(action, index=4)
    start = time.monotonic()
    scorer.score([*good[:2], bad, *good[2:]])
    assert time.monotonic() - start < LIMIT_S + PATIENCE_S
    assert bad.failure is kind, bad.failure_detail
    assert bad.reward is None
    assert bad.failure_detail.startswith("score") or kind is FailureKind.INVALID
    assert all(sample.valid and sample.reward.total == 1.0 for sample in good)


def check_no_survivor(scorer, processes, actions):
    """After the calls only the fork server and its two workers run."""
    scorer.score([make_sample(action, index=i) for i, action in enumerate(actions)])
    found = processes.wait_until(lambda found: len(found) <= 3)
    assert len(found) <= 3, found
    assert "sleep 1000" not in found.values()


@pytest.fixture(scope="module")
def shared_scorer():
    with misbehaving_scorer() as scorer:
        scorer.score([make_sample("good")])
        yield scorer


@pytest.mark.parametrize(("action", "kind"), ACTIONS, ids=[action for action, _ in ACTIONS])
def test_R13_verdict_in_time_and_others_unaffected(shared_scorer, action, kind):
    check_verdict(shared_scorer, action, kind)


@pytest.mark.parametrize(
    ("mutant", "action", "kind"),
    [
        ("no deadline", "nap", FailureKind.TIMEOUT),
        ("no memory limit", "reserve", FailureKind.OUT_OF_MEMORY),
        ("errors score 0", "raise", FailureKind.EXCEPTION),
    ],
)
def test_R13_verdict_check_catches(monkeypatch, shared_scorer, mutant, action, kind):
    check_verdict(shared_scorer, action, kind)
    plant(monkeypatch, mutant)
    with misbehaving_scorer() as scorer, pytest.raises(AssertionError):
        check_verdict(scorer, action, kind)


def test_R13_no_survivor(processes):
    with misbehaving_scorer() as scorer:
        check_no_survivor(scorer, processes, [*LEAVING, "good"])
        check_no_survivor(scorer, processes, ["daemon and hang", "fork and segfault"])
        left_processes_behind = scorer.score([make_sample(action) for action in LEAVING])
        assert [sample.reward.total for sample in left_processes_behind] == [1.0] * len(LEAVING)
    assert processes.commands() == {}


def test_R13_no_survivor_check_catches_orphans(monkeypatch, processes):
    plant(monkeypatch, "orphans live")
    processes.patience_s = 1.0
    with misbehaving_scorer() as scorer, pytest.raises(AssertionError):
        check_no_survivor(scorer, processes, ["daemon", "background"])
    processes.kill()


def test_R13_close_ends_running_calls_and_their_children(processes):
    scorer = misbehaving_scorer(timeout_s=100.0)
    for action in ("daemon and hang", "subprocess session", "loop in C", "good"):
        scorer.submit(make_sample(action))

    def all_run(found):  # a worker that starts late gets its sample in a later poll
        assert scorer.poll(0.1) == []
        return len(found) >= 5

    started = processes.wait_until(all_run)
    assert len(started) >= 5  # fork server, two workers, and what they started
    start = time.monotonic()
    scorer.close()
    assert time.monotonic() - start < PATIENCE_S  # not the 100 s that calls may take
    assert processes.commands() == {}


DRIVER = f"""
    import sys
    sys.path[:0] = [{str(Path(__file__).parents[2])!r}]
    from tests.rewards.scoring import make_sample, misbehaving_scorer, pool
    pool.FORK_SERVER = sys.argv[1]
    scorer = misbehaving_scorer(timeout_s=100.0)
    scorer.submit(make_sample("daemon and hang"))
    scorer.submit(make_sample("subprocess session"))
    scorer.poll(0.3)
    print("ready", flush=True)
    while True:  # a worker that starts late gets its sample in a later poll
        scorer.poll(0.3)
"""


def check_dies_with_driver(processes, fork_server, *, patience_s=PATIENCE_S):
    """kill -9 of the driver ends the fork server, the workers and what these started."""
    driver = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(DRIVER), fork_server],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert driver.stdout.readline() == "ready\n"
    assert len(processes.wait_until(lambda found: len(found) >= 6)) >= 6
    driver.kill()
    driver.wait()
    driver.stdout.close()
    processes.patience_s = patience_s
    assert processes.wait_until(lambda found: not found) == {}


def test_R13_killing_the_driver_leaves_nothing(processes):
    check_dies_with_driver(processes, "hone.rewards.fork_server")


def test_R13_driver_check_catches_a_fork_server_that_leaves_things_behind(monkeypatch, processes):
    plant(monkeypatch, "stays behind")
    with pytest.raises(AssertionError, match="sleep 1000"):
        check_dies_with_driver(processes, "tests.rewards.mutant_fork_server", patience_s=2.0)
    processes.kill()


def check_good_samples_do_not_wait(timeout_s):
    """With 0.5 % stuck, the other worker does all others before the deadline strikes."""
    with misbehaving_scorer(timeout_s=timeout_s) as scorer:
        scorer.score([make_sample("good", index=i) for i in range(100)])  # learns that it is fast
        samples = [make_sample("good", index=i) for i in range(198)]
        samples.insert(100, make_sample("sleep", index=198))
        for sample in samples:
            scorer.submit(sample)
        order = []
        while len(order) < 198:
            order += scorer.poll(1.0)
        assert {sample.text for sample in order} == {"good"}
        assert scorer.pending == 1
        assert scorer.stats().num_kills == 0


def test_R13_good_samples_do_not_wait_for_a_stuck_one():
    check_good_samples_do_not_wait(timeout_s=10 * PATIENCE_S)


def test_R13_waiting_check_catches_samples_left_behind_a_stuck_one(monkeypatch):
    plant(monkeypatch, "samples wait")
    with pytest.raises(AssertionError, match="sleep"):
        check_good_samples_do_not_wait(timeout_s=2.0)


def runs_sleep(found):
    return "sleep 1000" in found.values()


def test_R13_deadline_holds_while_the_driver_is_away(processes):
    with misbehaving_scorer() as scorer:
        scorer.score([make_sample("good")])
        scorer.submit(make_sample("subprocess"))
        # From here on nobody polls: the driver is in an optimizer step, say.
        assert runs_sleep(processes.wait_until(runs_sleep))
        found = processes.wait_until(lambda found: not runs_sleep(found))
        assert not runs_sleep(found)
        (sample,) = scorer.poll(PATIENCE_S)
        assert sample.failure is FailureKind.TIMEOUT


def test_R13_fork_server_killed_by_someone_else(processes):
    with misbehaving_scorer() as scorer:
        scorer.submit(make_sample("sleep"))
        fork_server = psutil.Process(scorer._pool._process.pid)
        fork_server.kill()
        with pytest.raises(UserError, match="reward workers ended"):
            scorer.poll(PATIENCE_S)
    assert processes.wait_until(lambda found: not found) == {}


def test_signals_to_every_process_of_a_run_end_no_call(tmp_path):
    """As `ray job stop` and SLURM send them: the step is finished first, which needs rewards."""
    begun, free = tmp_path / "begun", tmp_path / "free"
    file = tmp_path / "patient.py"
    file.write_text(
        "import pathlib, time\n"
        "def score(completion):\n"
        f"    pathlib.Path({str(begun)!r}).touch()\n"
        f"    while not pathlib.Path({str(free)!r}).exists():\n        time.sleep(0.01)\n"
        "    return 1.0\n"
    )
    cfg = config(f"{file}:score", timeout_s=PATIENCE_S)
    with Scorer(cfg, max_completion_tokens=64) as scorer:
        sample = make_sample("good")
        scorer.submit(sample)
        end = time.monotonic() + PATIENCE_S
        while not begun.exists() and time.monotonic() < end:
            time.sleep(0.01)
        tree = [psutil.Process(scorer._pool._process.pid)]
        tree += tree[0].children(recursive=True)
        assert len(tree) > 1
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            for process in tree:
                process.send_signal(number)
        free.touch()
        while scorer.pending:
            scorer.poll(1.0)
        assert all(process.is_running() for process in tree)
    assert sample.reward is not None, sample.failure_detail
    assert sample.reward.total == 1.0


def test_what_a_reward_starts_ends_by_signals_as_usual(tmp_path):
    """A program, and forks of the worker, however early the signal comes."""
    file = tmp_path / "starting.py"
    file.write_text(
        "import multiprocessing, subprocess, time\n"
        "def score(completion):\n"
        "    program = subprocess.Popen(['sleep', '1000'])\n"
        "    program.terminate()\n"
        "    codes = {program.wait()}\n"
        "    context = multiprocessing.get_context('fork')\n"
        "    for _ in range(20):\n"
        "        fork = context.Process(target=time.sleep, args=(1000,))\n"
        "        fork.start()\n"
        "        fork.terminate()\n"
        "        fork.join()\n"
        "        codes.add(fork.exitcode)\n"
        "    return float(codes == {-15})\n"
    )
    cfg = config(f"{file}:score", timeout_s=PATIENCE_S)
    with Scorer(cfg, max_completion_tokens=64) as scorer:
        sample = make_sample("good")
        scorer.score([sample])
    assert sample.reward is not None, sample.failure_detail
    assert sample.reward.total == 1.0


@pytest.mark.parametrize("number", ["SIGKILL", "SIGABRT"])
def test_a_reward_that_ends_the_workers_parent_is_named(tmp_path, number):
    file = tmp_path / "deadly.py"
    file.write_text(
        "import os, signal, time\n"
        f"def score(completion):\n    os.kill(os.getppid(), signal.{number})\n    time.sleep(9)\n"
    )
    # On a busy machine a worker may take longer to begin than the usual deadline lets it.
    cfg = config(f"{file}:score", timeout_s=PATIENCE_S)
    with Scorer(cfg, max_completion_tokens=64) as scorer, pytest.raises(UserError) as caught:
        scorer.score([make_sample("good", index=i) for i in range(4)])
    for told in (f"killed by {number}", "reward.functions", "deadly.py:score", "os.getppid"):
        assert told in str(caught.value)


def test_a_parent_that_closes_its_connection_and_lives_on_is_ended(monkeypatch):
    monkeypatch.setattr(pool, "_CLOSE_S", 0.1)
    with misbehaving_scorer(num_workers=1) as scorer:
        scorer.submit(make_sample("good"))
        scorer._pool._stream.sock.shutdown(socket.SHUT_RD)
        with pytest.raises(UserError, match="its connection was closed, and it has been killed"):
            scorer.poll(PATIENCE_S)


def test_async_functions_score_and_are_killed():
    with misbehaving_scorer("asynchronous") as scorer:
        good, wrong, hang = scorer.score([make_sample(t) for t in ("good", "wrong", "hang")])
    assert (good.reward.total, wrong.reward.total) == (1.0, 0.0)
    assert hang.failure is FailureKind.TIMEOUT


def test_large_samples_pass_while_a_worker_is_stuck(tmp_path):
    """Requests larger than a socket's buffer neither block the driver nor get lost."""
    free = tmp_path / "free"
    with misbehaving_scorer(num_workers=1, timeout_s=PATIENCE_S) as scorer:
        scorer.score([make_sample("good", index=i) for i in range(50)])
        stuck = make_sample(f"{WAITS_FOR}{free}", blob="x" * 2_000_000)
        samples = [make_sample("good", index=i, blob="x" * 300_000) for i in range(20)]
        for sample in [stuck, *samples]:
            scorer.submit(sample)  # one that blocks lasts until the stuck call is killed
        free.touch()
        while scorer.pending:
            scorer.poll(1.0)
    assert all(sample.valid for sample in [stuck, *samples])


PATHOLOGICAL = {
    "power tower": r"\boxed{9^{9^{9^{9}}}}",
    "power tower in Python": "The answer is 9**9**9**9",
    "factorials": r"\boxed{((9!)!)!}",
    "deep fraction": r"\boxed{" + r"\frac{1}{1+" * 300 + "x" + "}" * 301,
    "deep roots": r"\boxed{" + r"\sqrt{" * 400 + "2" + "}" * 401,
    "parentheses": r"\boxed{" + "(" * 3000 + "1" + ")" * 3000 + "}",
    "open braces": r"\boxed{" * 3000,
    "sum": r"\boxed{\sum_{n=1}^{10^{12}} \frac{1}{n^n}}",
    "integral": r"\boxed{\int_0^1 \sin(\cos(x^x)) e^{x^3} dx}",
    "digits": "9" * 200_000,
}


def test_R13_pathological_mathematics():
    texts = PATHOLOGICAL.values()
    samples = [make_sample(text, answer="42", index=i) for i, text in enumerate(texts)]
    good = [make_sample(r"so it is \boxed{42}", answer="42", index=i) for i in range(100, 140)]
    with Scorer(config("math"), max_completion_tokens=64) as scorer:
        start = time.monotonic()
        scorer.score([*samples, *good])
        assert time.monotonic() - start < len(samples) * LIMIT_S / 2 + PATIENCE_S
    assert all(sample.reward.total == 1.0 for sample in good)
    for sample in samples:
        killed = sample.failure in (FailureKind.TIMEOUT, FailureKind.OUT_OF_MEMORY)
        assert killed or sample.reward.total == 0.0, (sample.text[:40], sample.failure_detail)
    assert sum(sample.failure is FailureKind.TIMEOUT for sample in samples) >= 5


def test_no_torch_anywhere():
    code = (
        "import hone.rewards.scorer, hone.rewards.fork_server, sys; print('torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout == "False\n"
