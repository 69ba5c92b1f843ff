"""Whole runs in several processes of this machine: the same numbers as in one, and clean ends."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file
from tests.loops.conftest import MakeConfig, start_hone, wait_for_row
from tests.tiny_runs import lines

from hone.checkpoint.store import CheckpointStore
from hone.config.base import Section
from hone.config.load import dump_config
from hone.config.run import GenerateRunConfig
from hone.config.tree import EvaluateConfig, SFTConfig
from hone.distributed.processes import HONE_KEY
from hone.distributed.settings import ParallelConfig
from hone.errors import UserError
from hone.loops import evaluation, reinforce, supervised
from hone.loops.launch import join_roles

ENGINES = ("engine/steps", "engine/waiting", "engine/kv_cache_usage")
OF_THE_MACHINE = ("time/", "perf/", "mem/", "timestamp_s", *ENGINES)
OF_THE_LAUNCH = ("off_policy/parity/",)
NOISE = ("off_policy/kl", "off_policy/mismatch_kl", "off_policy/ratio/", "train/num_micro_batches")
"""Differences of the last bits between engine and trainer; and of how rows are packed."""


def test_processes_of_one_host_meet_on_loopback(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines of a cluster, which take the weights, may be on other hosts."""
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    run, parallel = GenerateRunConfig(device="cpu"), ParallelConfig()
    for cluster, interface in ((None, "lo"), ("head:6379", None)):
        with join_roles(run, parallel, cluster=cluster):
            assert os.environ.get("GLOO_SOCKET_IFNAME") == interface


def test_several_hosts_without_a_key_are_warned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, number in (
        ("RANK", 0),
        ("WORLD_SIZE", 2),
        ("LOCAL_RANK", 0),
        ("LOCAL_WORLD_SIZE", 1),
    ):
        monkeypatch.setenv(name, f"{number}")
    run, parallel = GenerateRunConfig(device="cpu"), ParallelConfig()
    for key, is_warned in (("", True), ("a secret", False)):
        monkeypatch.setenv(HONE_KEY, key)
        caplog.clear()
        with pytest.raises(UserError, match="MASTER_ADDR is unset"), join_roles(run, parallel):
            pass
        assert ("HONE_KEY is not set" in caplog.text) == is_warned


def command(name: str, cfg: Section, folder: Path, launcher: list[str], *more: str) -> list[str]:
    recipe = folder / f"{name}-{len(list(folder.glob('*.yaml')))}.yaml"
    recipe.write_text(dump_config(cfg))
    return [sys.executable, *launcher, "-m", "hone", name, str(recipe), *more]


def run_hone(*args: Any, launcher: list[str] | None = None, code: int = 0) -> str:
    return run_command(command(args[0], args[1], args[2], launcher or [], *args[3:]), code)


def run_command(words: list[str], code: int) -> str:
    done = subprocess.run(
        words,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=600,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    assert done.returncode == code, done.stdout
    return done.stdout


def assert_same_run(one: Path, several: Path) -> None:
    """Metrics to 1e-6, samples token by token, weights to float32's last bits."""
    for alone, shared in zip(
        lines(one / "metrics.jsonl"), lines(several / "metrics.jsonl"), strict=True
    ):
        ignored = OF_THE_MACHINE + OF_THE_LAUNCH + NOISE
        for key in alone.keys() | shared.keys():
            if not key.startswith(ignored):
                # A sum's last bit decides whether the smallest updates change a weight.
                within = 1e-4 if key == "train/share_unchanged" else 1e-6
                assert shared[key] == pytest.approx(alone[key], rel=1e-5, abs=within), key
    for a, b in zip(lines(one / "samples.jsonl"), lines(several / "samples.jsonl"), strict=True):
        for name in ("logprobs", "policy_logprobs", "entropy"):  # the last two of training
            found, expected = (
                [float("nan") if x is None else x for x in each.pop(name, [])] for each in (b, a)
            )  # an environment's tokens have none
            assert found == pytest.approx(expected, rel=1e-5, abs=2e-5, nan_ok=True)
        # Samples of an evaluation have no advantage; a model's rewards are of other passes.
        for name in ("advantage", "reward", "reward_parts"):
            assert b.pop(name, 0) == pytest.approx(a.pop(name, 0), rel=1e-5, abs=1e-5)
        assert a == b
    weights = [load_file(folder / "model" / "model.safetensors") for folder in (one, several)]
    assert weights[0].keys() == weights[1].keys()
    for name, tensor in weights[0].items():
        assert float((tensor - weights[1][name]).abs().max()) < 1e-5, name


def assert_metrics_of_samples(run_dir: Path) -> None:
    """R24: what a row says of its samples, recomputed from the samples on disk."""
    for row in lines(run_dir / "metrics.jsonl"):
        place = row["step"], "train"
        written = lines(run_dir / "samples.jsonl")
        own = [s for s in written if (s["step"], s["split"]) == place]
        assert row["rollout/samples"] == len(own)
        rewards = [s["reward"] for s in own if s["reward"] is not None]
        assert row["reward/mean"] == pytest.approx(sum(rewards) / len(rewards), abs=1e-6)
        tokens = [len(s["token_ids"]) for s in own]
        assert row["rollout/completion_tokens/mean"] == pytest.approx(sum(tokens) / len(tokens))
        assert row["rollout/num_tokens"] == sum(tokens)
        assert row["train/num_tokens"] == sum(sum(s["loss_mask"]) for s in own)
        distinct = {(s["prompt_id"], s["index"]) for s in own}
        assert len(distinct) == len(own)


ALL_SAMPLES = {"samples_per_step": 99}


@pytest.mark.slow
def test_R24_two_processes_are_one_run(
    make_config: MakeConfig, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """With evaluation, dynamic sampling, the reference, two mini-batches; then on in one process.

    The resumed run ends as the straight one does: a checkpoint does not know who wrote it.
    """
    sections: dict[str, Any] = {
        "rollout": {"dynamic_sampling": True},
        "trainer": {
            "prompts_per_minibatch": 2,
            "optimizer": {"lr": 3e-3},
            "logits_chunk_tokens": 64,
        },
        "algorithm": {"kl": {"coef": 0.01}},
        "eval": {"every_n_steps": 2, "n_samples_per_prompt": 2},
        "log": ALL_SAMPLES,
    }
    one = make_config(run={"dir": tmp_path / "one"}, **sections)
    reinforce.run(one)
    two = make_config(run={"dir": tmp_path / "two", "steps": 2}, **sections)
    output = run_hone("rl", two, tmp_path, "--nproc", "2")
    assert output.count("done after step 2") == 1
    assert output.count("rows kept") == 1, "one process speaks"
    assert_metrics_of_samples(two.run.dir)
    with caplog.at_level(logging.INFO, "hone"):
        reinforce.run(make_config(run={"dir": tmp_path / "two"}, **sections))
    assert "by 2 processes (data 2, shards over 2); now 1 process, so" in caplog.text
    assert_same_run(one.run.dir, two.run.dir)


COUNTED = """
import os
from pathlib import Path

class Counted:
    def __init__(self, file):
        # A pool of workers has one parent process.
        with Path(file).open("a") as loads:
            loads.write(f"{os.getppid()}\\n")

    def step(self, episode):
        return float(len(episode.turn))
"""


@pytest.mark.slow
def test_an_environment_is_loaded_once_to_learn_what_it_is(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """By the first process, besides the workers of the two that play episodes."""
    (tmp_path / "envs.py").write_text(COUNTED)
    loads = tmp_path / "loads"
    env = {"path": f"{tmp_path / 'envs.py'}:Counted", "args": {"file": str(loads)}}
    cfg = make_config(
        run={"dir": tmp_path / "two", "steps": 1},
        env=env,
        reward={"functions": [], "num_workers": 2},
    )
    run_hone("rl", cfg, tmp_path, "--nproc", "2")
    assert len(lines(cfg.run.dir / "metrics.jsonl")) == 1
    assert len(set(loads.read_text().split())) == 3


@pytest.mark.slow
def test_R21_four_processes_share_few_prompts(make_config: MakeConfig, tmp_path: Path) -> None:
    """Over-sampling carries samples over; some processes have no prompt at times."""
    sections: dict[str, Any] = {
        "rollout": {"prompts_per_step": 2, "oversample_prompts": 3, "max_completion_tokens": 12},
        "engine": {"max_num_seqs": 32},  # all at once
        "log": ALL_SAMPLES,
    }
    one = make_config(run={"dir": tmp_path / "one"}, **sections)
    reinforce.run(one)
    assert any(row["rollout/carried_samples"] for row in lines(one.run.dir / "metrics.jsonl"))
    four = make_config(run={"dir": tmp_path / "four"}, **sections)
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "4"]
    run_hone("rl", four, tmp_path, launcher=launcher)  # more than `--nproc` grants two cores
    assert_same_run(one.run.dir, four.run.dir)


@pytest.mark.slow
def test_R24_supervised_training_under_torchrun(sft_config: SFTConfig, tmp_path: Path) -> None:
    supervised.run(sft_config)
    run = sft_config.run.model_copy(update={"dir": tmp_path / "two"})
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    recipe = sft_config.model_copy(update={"run": run})
    output = run_hone("sft", recipe, tmp_path, launcher=launcher)
    assert output.count("done after step 3") == 1
    (tmp_path / "one" / "samples.jsonl").write_text("")
    assert_same_run(tmp_path / "one", tmp_path / "two")


@pytest.mark.slow
def test_R24_an_evaluation_in_two_processes(make_config: MakeConfig, tmp_path: Path) -> None:
    tree = make_config()
    cfg = EvaluateConfig.model_validate(
        {
            "run": {"dir": tmp_path / "one", "device": "cpu"},
            "model": tree.model.model_dump(exclude={"lora"}),
            "data": tree.data.model_dump(exclude={"curriculum"}) | {"train": []},
            "engine": tree.engine.model_dump(),
            "reward": tree.reward.model_dump(),
            "eval": {"max_completion_tokens": 8, "n_samples_per_prompt": 4},
        }
    )
    alone = evaluation.run_evaluation(cfg)
    run = cfg.run.model_copy(update={"dir": tmp_path / "two"})
    output = run_hone("eval", cfg.model_copy(update={"run": run}), tmp_path, "--nproc", "2")
    assert output.count("eval/reward/mean") == 1
    shared = json.loads((tmp_path / "two" / "eval.json").read_text())
    assert shared == pytest.approx(alone, rel=1e-9)
    both = [
        [row["id"] for row in lines(tmp_path / name / "eval_samples.jsonl")]
        for name in ("one", "two")
    ]
    assert both[0] == both[1]


# -- ends ---------------------------------------------------------------------------------------


@contextmanager
def running(cfg: Any, folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """`hone rl --nproc 2`, past its first recorded step; afterwards nothing of it is left."""
    process = start_hone(cfg, folder, "--nproc", "2")
    descendants: list[psutil.Process] = []
    try:
        wait_for_row(process, cfg)
        descendants = psutil.Process(process.pid).children(recursive=True)
        yield process
        deadline = time.monotonic() + 60
        while any(map(is_alive, descendants)):
            assert time.monotonic() < deadline, [*filter(is_alive, descendants)]
            time.sleep(0.05)
    finally:
        for child in filter(is_alive, descendants):
            child.kill()
        if process.poll() is None:
            process.kill()
        process.communicate()


def is_alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def ranks(launcher: int) -> dict[int, psutil.Process]:
    children = psutil.Process(launcher).children()
    return {int(child.environ()["RANK"]): child for child in children}


def endless(make_config: MakeConfig, timeout_s: float = 600, **sections: Any) -> Any:
    trainer = {"logits_chunk_tokens": 64, "parallel": {"timeout_s": timeout_s}}
    return make_config(run={"steps": 100_000}, trainer=trainer, **sections)


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP], ids=lambda number: number.name
)
def test_R25_a_signal_stops_all_after_the_step(
    make_config: MakeConfig, tmp_path: Path, number: signal.Signals
) -> None:
    cfg = endless(make_config)
    with running(cfg, tmp_path) as process:
        os.killpg(process.pid, number)  # as a terminal does
        output = process.communicate(timeout=600)[0].decode()
        assert process.returncode == 128 + number, output
    last = lines(cfg.run.dir / "metrics.jsonl")[-1]["step"]
    assert output.count(f"stopped and saved after step {last}") == 1, output
    assert "Traceback" not in output
    assert CheckpointStore(cfg.run.dir / "checkpoints").steps() == [last]


HELD_REWARD = """
import pathlib, time
here = pathlib.Path(__file__).parent
def score(completion):
    while (here / "hold").exists():
        (here / "is_held").touch()
        time.sleep(0.01)
    return len(completion) / 8
"""


def wait_for_file(file: Path) -> None:
    deadline = time.monotonic() + 600
    while not file.exists():
        assert time.monotonic() < deadline, f"no {file.name} in time"
        time.sleep(0.005)


def read_until(process: subprocess.Popen[bytes], text: str) -> str:
    """What it prints, up to the line with `text`."""
    assert process.stdout is not None
    read = ""
    for line in process.stdout:
        read += line.decode()
        if text in read:
            return read
    raise AssertionError(read)


@pytest.mark.slow
def test_R25_a_second_ctrl_c_ends_all_at_once(make_config: MakeConfig, tmp_path: Path) -> None:
    """In a step that does not end by itself: its rewards wait for a file."""
    (tmp_path / "held.py").write_text(HELD_REWARD)
    function = {"fn": f"{tmp_path / 'held.py'}:score"}
    reward = {"functions": [function], "num_workers": 1, "timeout_s": 10_000}
    cfg = endless(make_config, reward=reward)
    with running(cfg, tmp_path) as process:
        (tmp_path / "hold").touch()
        wait_for_file(tmp_path / "is_held")
        os.killpg(process.pid, signal.SIGINT)
        output = read_until(process, "Ctrl-C again ends it at once")
        os.killpg(process.pid, signal.SIGINT)
        output += process.communicate(timeout=600)[0].decode()
        assert process.returncode == 130, output
    assert "Traceback" not in output
    ends = [line for line in output.splitlines() if "the same command goes on" in line]
    assert len(ends) == 1, output
    CheckpointStore(cfg.run.dir / "checkpoints").steps()  # whole or not there


@pytest.mark.slow
def test_R11_a_run_names_a_process_that_has_stopped(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """After `timeout_s`, not after the 600 seconds that are its default."""
    cfg = endless(make_config, timeout_s=30)
    with running(cfg, tmp_path) as process:
        victim = ranks(process.pid)[1]
        victim.send_signal(signal.SIGSTOP)
        output = process.communicate(timeout=500)[0].decode()
        assert process.returncode == 1, output
    (error,) = (line for line in output.splitlines() if "rror" in line)
    assert error.startswith("error: rank 1"), output
    assert f"pid {victim.pid}" in error
    assert " of step " in error
    assert len(output[output.index(error) :].splitlines()) <= 6, output


@pytest.mark.slow
def test_R11_no_process_outlives_its_launcher(make_config: MakeConfig, tmp_path: Path) -> None:
    cfg = endless(make_config)
    with running(cfg, tmp_path) as process:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_R11_the_error_of_one_process_is_the_error_of_the_run(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text(
        "import os\n"
        "assert os.environ['RANK'] == '0', 'this host lacks the checker'\n"
        "def score(completion):\n"
        "    return 0.0\n"
    )
    function = {"fn": f"{tmp_path / 'broken.py'}:score"}
    cfg = make_config(reward={"functions": [function], "num_workers": 2})
    output = run_hone("rl", cfg, tmp_path, "--nproc", "2", code=2)
    errors = [line for line in output.splitlines() if "rror" in line]
    assert errors[0].startswith("error: "), output
    assert "this host lacks the checker" in errors[0]
    assert output.count("this host lacks the checker") == 1, output
    assert "Traceback" not in output


BUG_OF_RANK_1 = """
import os, sys
from hone.trainer.trainer import Trainer
def fail(*_):
    raise RuntimeError("a bug of one rank")
if os.environ["RANK"] == "1":
    Trainer.update = fail
from hone.cli.main import main
sys.exit(main(sys.argv[1:]))
"""
DEATH_OF_RANK_1 = """
import os, psutil
def score(completion):
    if os.environ["RANK"] == "1":
        os.kill(psutil.Process(os.getppid()).ppid(), 9)
    return 0.0
"""


def the_error(run_dir: Path) -> dict[str, Any]:
    """The one error among the events, which the report shows on top."""
    events = lines(run_dir / "events.jsonl")
    (error,) = [event for event in events if event["kind"] == "error"]
    page = (run_dir / "report.html").read_text()
    assert "The run failed" in page
    assert error["message"].splitlines()[0] in page
    return error


@pytest.mark.slow
def test_the_folder_has_the_error_of_another_rank(make_config: MakeConfig, tmp_path: Path) -> None:
    cfg = make_config(log={"to": []})
    program = [sys.executable, "-c", BUG_OF_RANK_1, *command("rl", cfg, tmp_path, [])[3:]]
    launcher = (
        "import sys\nfrom hone.distributed.spawn import spawn\nsys.exit(spawn(sys.argv[1:], 2))"
    )
    output = run_command([sys.executable, "-c", launcher, *program], 1)
    assert "RuntimeError: a bug of one rank" in output
    error = the_error(cfg.run.dir)
    told = {key: error[key] for key in ("message", "error", "step", "phase")}
    assert told == {
        "message": "a bug of one rank",
        "error": "RuntimeError",
        "step": 1,
        "phase": "train",
    }


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["hone", "torchrun"])
def test_the_folder_says_who_was_killed(
    make_config: MakeConfig, tmp_path: Path, launcher: str
) -> None:
    (tmp_path / "deadly.py").write_text(DEATH_OF_RANK_1)
    cfg = make_config(
        reward={"functions": [{"fn": f"{tmp_path / 'deadly.py'}:score"}], "num_workers": 2},
        log={"to": []},
    )
    if launcher == "hone":
        output = run_hone("rl", cfg, tmp_path, "--nproc", "2", code=1)
        text = output[output.index("error: rank 1 (pid ") :]
        assert output.count("rror") == 1, output
        assert "out of memory" in text.splitlines()[1]
        assert "from their last checkpoint" in text.splitlines()[1]
    else:
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        run_hone("rl", cfg, tmp_path, launcher=torchrun, code=1)
    error = the_error(cfg.run.dir)
    assert error["message"].startswith("rank 1 (pid ")
    assert ("was killed by SIGKILL" in error["message"]) == (launcher == "hone")
    assert (error["step"], error["phase"]) == (1, "generate")
