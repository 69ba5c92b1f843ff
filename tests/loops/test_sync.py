"""The whole loop in one process: repeatable, resumable, stoppable."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from tests.loops.conftest import MakeConfig, built_run, start_hone, wait_for_row
from tests.tiny_runs import lines

from hone.checkpoint.store import CheckpointStore
from hone.checkpoint.tree import in_memory
from hone.loops import loop, reinforce
from hone.loops.run import Outcome
from hone.observe.run_folder import RunFolder

OF_THE_LAUNCH = ("time/", "perf/", "mem/", "timestamp_s", "off_policy/parity/")
"""What the clock says, and the gate that every launch passes anew."""


def metrics(run_dir: Path) -> list[dict[str, Any]]:
    """The rows of a run, without what differs from launch to launch."""
    rows = lines(run_dir / "metrics.jsonl")
    return [{k: v for k, v in row.items() if not k.startswith(OF_THE_LAUNCH)} for row in rows]


def samples(run_dir: Path) -> list[tuple[str, list[int], list[float]]]:
    rows = lines(run_dir / "samples.jsonl")
    return [(row["id"], row["token_ids"], row["logprobs"]) for row in rows]


def weights_hash(run_dir: Path) -> str:
    tensors = load_file(run_dir / "model" / "model.safetensors")
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(name.encode() + tensor.numpy().tobytes())
    return digest.hexdigest()


def state_of(run_dir: Path, step: int) -> dict[str, Any]:
    return in_memory(dict(CheckpointStore(run_dir / "checkpoints").load(step).parts))


def assert_same(a: Any, b: Any, path: str = "") -> None:
    """Bitwise equality of nested states."""
    if isinstance(a, torch.Tensor):
        assert torch.equal(a, b), path
    elif isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            assert_same(a[key], b[key], f"{path}/{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}/{i}")
    else:
        assert a == b, path


def test_R25_the_same_run_twice_is_the_same_run(make_config: MakeConfig, tmp_path: Path) -> None:
    dirs = [tmp_path / "first", tmp_path / "second"]
    for run_dir in dirs:
        reinforce.run(make_config(run={"dir": run_dir, "steps": 4}, log={"samples_per_step": 99}))
    assert metrics(dirs[0]) == metrics(dirs[1])
    assert samples(dirs[0]) == samples(dirs[1])
    assert weights_hash(dirs[0]) == weights_hash(dirs[1])
    other = tmp_path / "other"
    reinforce.run(make_config(run={"dir": other, "steps": 4, "seed": 1}))
    assert weights_hash(other) != weights_hash(dirs[0])


def test_R24_the_time_is_accounted_for(make_config: MakeConfig) -> None:
    cfg = make_config(run={"steps": 5}, eval={"every_n_steps": 2}, checkpoint={"every_n_steps": 2})
    reinforce.run(cfg)
    for row in lines(cfg.run.dir / "metrics.jsonl"):
        assert row["time/unattributed_s"] <= 0.05 * row["time/step_s"] + 0.01, row["step"]
        assert row["perf/tokens_per_s"] > 0
        assert not any(name.startswith("perf/R_") for name in row), "a CPU has no known limit"


def test_on_policy_metrics_say_so(make_config: MakeConfig) -> None:
    """With one process, one version and float32 there is no mismatch to speak of."""
    cfg = make_config()
    reinforce.run(cfg)
    for step, row in enumerate(metrics(cfg.run.dir), start=1):
        assert row["step"] == step
        assert row["rollout/weight_version/min"] == row["rollout/weight_version/max"] == step - 1
        assert row["off_policy/mismatch_kl"] < 1e-9
        assert row["policy/ratio/mean"] == 1.0
        assert row["policy/clip_fraction"] == 0.0


@pytest.mark.slow
def test_R17_resume_after_kill_is_exact(make_config: MakeConfig, tmp_path: Path) -> None:
    """12 steps straight against 5, kill -9, 9, kill -9, 12: every bit of the state is equal.

    Over-sampling is on, so partial rollouts are part of what must survive.
    """
    sections: dict[str, Any] = {
        "rollout": {"oversample_prompts": 3, "max_completion_tokens": 12},
        "checkpoint": {"every_n_steps": 1, "keep_last": 20},
        "algorithm": {"kl": {"coef": 0.01}},
        "log": {"samples_per_step": 99},
    }
    straight = make_config(run={"dir": tmp_path / "straight", "steps": 12}, **sections)
    reinforce.run(straight)
    broken = make_config(run={"dir": tmp_path / "broken", "steps": 12}, **sections)
    for kill_after in (4, 8, None):
        process = start_hone(broken, tmp_path)
        if kill_after is not None:
            wait_for_row(process, broken, kill_after)
            process.kill()
        output, _ = process.communicate(timeout=600)
        assert process.returncode == (0 if kill_after is None else -9), output.decode()
    assert_same(state_of(straight.run.dir, 12), state_of(broken.run.dir, 12))
    assert metrics(straight.run.dir) == metrics(broken.run.dir)
    assert samples(straight.run.dir) == samples(broken.run.dir)
    assert weights_hash(straight.run.dir) == weights_hash(broken.run.dir)
    for row in metrics(broken.run.dir)[8:]:
        assert row["policy/ref_kl"] > 0, "the reference stays the original, not the resumed policy"


@pytest.mark.parametrize("part", ["trainer", "trainer_metadata", "data", "rollout", "random"])
def test_R17_a_checkpoint_without_a_part_is_refused(make_config: MakeConfig, part: str) -> None:
    cfg = make_config(run={"steps": 1})
    reinforce.run(cfg)
    for file in (cfg.run.dir / "checkpoints" / "step_1").glob(f"{part}.*"):
        file.unlink()
    with pytest.raises((ValueError, OSError), match=part):
        reinforce.run(make_config(run={"steps": 2, "resume": 1}))


@pytest.mark.parametrize("bug", ["moments", "data", "rollout"])
def test_R17_planted_a_forgotten_part_is_seen(
    make_config: MakeConfig, tmp_path: Path, bug: str
) -> None:
    """The comparison above must turn red when a resume skips a part of the state."""
    sections: dict[str, Any] = {"checkpoint": {"every_n_steps": 1, "keep_last": 20}}
    if bug == "rollout":
        sections["rollout"] = {"oversample_prompts": 3, "max_completion_tokens": 12}
    straight = make_config(run={"dir": tmp_path / "straight", "steps": 4}, **sections)
    reinforce.run(straight)
    broken = make_config(run={"dir": tmp_path / "broken", "steps": 2}, **sections)
    reinforce.run(broken)
    resumed = make_config(run={"dir": tmp_path / "broken", "steps": 4}, **sections)
    with built_run(resumed) as run:
        fresh = make_config(run={"dir": tmp_path / "fresh"}, **sections)
        with built_run(fresh) as unresumed:
            if bug == "moments":
                tensors, metadata = run.trainer.state_dict()
                untrained = unresumed.trainer.state_dict()[0]
                for name in tensors:
                    if name.startswith("optimizer/") and name in untrained:
                        tensors[name] = untrained[name]
                    elif name.startswith("optimizer/"):
                        tensors[name] = torch.zeros_like(tensors[name])
                run.trainer.load_state_dict(tensors, metadata)
            elif bug == "data":
                run.sampling.data.train.load_state_dict(unresumed.sampling.data.train.state_dict())
            else:
                run.collector._collector._buffer.load_state_dict(unresumed.collector.state_dict())
        loop.train(run)
    with pytest.raises(AssertionError):
        assert_same(state_of(straight.run.dir, 4), state_of(broken.run.dir, 4))


def members(session: int) -> list[int]:
    """Living processes of a session, and orphans that it left."""
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process.pid)
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return found


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        (signal.SIGTERM, 143),
        (signal.SIGHUP, 129),
        (signal.SIGKILL, -9),
    ],
    ids=["SIGINT", "SIGTERM", "SIGHUP", "SIGKILL"],
)
def test_R25_any_end_leaves_nothing_running(
    make_config: MakeConfig, tmp_path: Path, number: signal.Signals, code: int
) -> None:
    cfg = make_config(run={"steps": 100_000})
    process = start_hone(cfg, tmp_path)
    try:
        wait_for_row(process, cfg)
        children = psutil.Process(process.pid).children(recursive=True)
        assert children, "the reward workers"
        process.send_signal(number)
        output = process.communicate(timeout=600)[0].decode()
    finally:
        process.kill()
    assert process.returncode == code, output
    deadline = time.monotonic() + 60
    while any(child.is_running() for child in children) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [child for child in children if child.is_running()]
    assert not members(process.pid)
    steps = CheckpointStore(cfg.run.dir / "checkpoints").steps()
    assert bool(steps) == (number != signal.SIGKILL)
    assert "Traceback" not in output
    assert RunFolder.read(cfg.run.dir).status == "stopped"
    if steps:
        assert metrics(cfg.run.dir)[-1]["step"] == steps[-1], "the step in progress is kept"


def files_of(run_dir: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in run_dir.rglob("*") if file.is_file()}


def test_a_second_launch_has_nothing_left_to_do(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is told: it loads no model, and the folder tells of the run that was."""
    first = make_config()
    reinforce.run(first)
    before = files_of(first.run.dir)
    second = make_config(run={"steps": 2})
    with monkeypatch.context() as patch:
        patch.delattr(reinforce, "build_run")
        assert reinforce.run(second) == Outcome(steps=3)
    assert files_of(first.run.dir) == before

    model = first.run.dir / "model" / "config.json"
    os.utime(model, (0, 0))
    reinforce.run(second)
    assert model.stat().st_mtime > 0, "one of earlier steps is replaced"
    config = first.run.dir / "config.yaml"
    assert config.read_bytes() == before[config]
    weights = model.with_name("model.safetensors")
    assert weights.read_bytes() == before[weights]


def test_reward_rises(make_config: MakeConfig) -> None:
    """Even digits pay: 40 steps are enough to see it (R25's tiny task)."""
    cfg = make_config(run={"steps": 40}, rollout={"prompts_per_step": 8})
    reinforce.run(cfg)
    rewards = [row["reward/mean"] for row in metrics(cfg.run.dir)]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:5]) / 5 + 0.25


def alarms(run_dir: Path) -> set[str]:
    events = lines(run_dir / "events.jsonl")
    return {event["name"] for event in events if event["kind"] == "alarm"}


def test_R24_older_weights_are_no_mismatch_of_engine_and_trainer(make_config: MakeConfig) -> None:
    """Tokens that older weights sampled differ by the update, which is no fault of the sync."""
    cfg = make_config(
        run={"steps": 5}, rollout={"oversample_prompts": 3, "max_completion_tokens": 12}
    )
    reinforce.run(cfg)
    rows = metrics(cfg.run.dir)
    mixed = [r for r in rows if r["rollout/weight_version/min"] < r["rollout/weight_version/max"]]
    assert mixed, "the run must carry samples over"
    for row in rows:
        assert row["off_policy/mismatch_kl"] < 1e-9
    for row in mixed:
        assert row["off_policy/kl"] > 1e-6
    assert not alarms(cfg.run.dir) & {"mismatch_kl", "mismatch_kl_growing"}


def test_R24_a_single_sample_has_no_spread_to_miss(make_config: MakeConfig) -> None:
    """Without a group baseline, one sample a prompt is a healthy setting."""
    cfg = make_config(
        rollout={"prompts_per_step": 8, "n_samples_per_prompt": 1},
        algorithm={"advantage": "reinforce_pp"},
    )
    reinforce.run(cfg)
    assert all(row["train/grad_norm"] > 0 for row in metrics(cfg.run.dir))
    assert "zero_spread" not in alarms(cfg.run.dir)


def test_a_float32_export_of_a_bfloat16_run_keeps_the_masters(
    make_config: MakeConfig, inputs: Path
) -> None:
    """What the optimizer reached must not be lost to the format that the module computes in."""
    cfg = make_config(
        model={"path": str(inputs / "model"), "dtype": "bfloat16"},
        checkpoint={"every_n_steps": 0, "export_dtype": "float32"},
    )
    reinforce.run(cfg)
    saved = state_of(cfg.run.dir, 3)["trainer"]
    exported = load_file(cfg.run.dir / "model" / "model.safetensors")
    for name, tensor in exported.items():
        assert torch.equal(tensor, saved[f"weights/{name}"]), name
