"""The whole loop in one process: repeatable, resumable, stoppable."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file
from tests.loops.conftest import MakeConfig, built_run, start_hone, wait_for_row
from tests.loops.forked_hone import Copy, parent_of_copies
from tests.tables import check_rows
from tests.tiny_runs import learning_config, lines

from hone.checkpoint.atomic import read_manifest
from hone.checkpoint.store import CheckpointStore
from hone.checkpoint.tree import in_memory
from hone.config.load import dump_config
from hone.config.tree import RLConfig
from hone.loops import loop, reinforce
from hone.loops.reinforce import RLRun
from hone.loops.run import Outcome
from hone.observe.disk import MANIFEST_NAME
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
    """Of a step and of one with evaluation and checkpoint: in the best of four, since a machine
    that is busy may stop a process anywhere."""
    cfg = make_config(run={"steps": 8}, eval={"every_n_steps": 2}, checkpoint={"every_n_steps": 2})
    reinforce.run(cfg)
    rows = lines(cfg.run.dir / "metrics.jsonl")
    assert all(row["perf/tokens_per_s"] > 0 for row in rows)
    assert not any(name.startswith("perf/R_") for row in rows for name in row), "unknown on a CPU"
    for kind in (rows[::2], rows[1::2]):
        assert min(row["time/unattributed_s"] / row["time/step_s"] for row in kind) <= 0.05


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


def test_R17_a_checkpoint_without_a_part_is_refused(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    whole = make_config(run={"steps": 1})
    reinforce.run(whole)

    def check(part: str) -> None:
        folder = tmp_path / part
        shutil.copytree(whole.run.dir, folder)
        files = [*(folder / "checkpoints" / "step_1").glob(f"{part}.*")]
        assert files
        for file in files:
            file.unlink()
        with pytest.raises((ValueError, OSError), match=part):
            reinforce.run(make_config(run={"dir": folder, "steps": 2, "resume": 1}))

    check_rows(["trainer", "trainer_metadata", "data", "rollout", "random"], check)


def test_R17_planted_a_forgotten_part_is_seen(make_config: MakeConfig, tmp_path: Path) -> None:
    """The comparison above must turn red when a resume skips a part of the state."""
    sections: dict[str, Any] = {
        "checkpoint": {"every_n_steps": 1, "keep_last": 20},
        "rollout": {"oversample_prompts": 3, "max_completion_tokens": 12},
    }
    straight = make_config(run={"dir": tmp_path / "straight", "steps": 4}, **sections)
    reinforce.run(straight)
    with built_run(make_config(run={"dir": tmp_path / "fresh"}, **sections)) as unresumed:
        fresh = unresumed.sampling.data.train.state_dict(), unresumed.collector.state_dict()

    def moments(run: RLRun) -> None:
        tensors, metadata = run.trainer.state_dict()
        without = {n: t.zero_() if n.startswith("optimizer/") else t for n, t in tensors.items()}
        run.trainer.load_state_dict(without, metadata)

    def data(run: RLRun) -> None:
        run.sampling.data.train.load_state_dict(fresh[0])

    def rollout(run: RLRun) -> None:
        run.collector._collector._buffer.load_state_dict(fresh[1])

    def nothing(run: RLRun) -> None:
        """All is restored: the row that proves that the others differ by what they forget."""

    def is_seen(forget: Callable[[RLRun], None]) -> None:
        folder = tmp_path / forget.__name__
        shutil.copytree(straight.run.dir, folder)
        run = {"dir": folder, "steps": 4, "resume": 2}
        with built_run(make_config(run=run, **sections)) as resumed:
            forget(resumed)
            loop.train(resumed)
        seen = pytest.raises(AssertionError) if forget is not nothing else nullcontext()
        with seen:
            assert_same(state_of(straight.run.dir, 4), state_of(folder, 4))

    check_rows([moments, data, rollout, nothing], is_seen)


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


ENDS = {
    "SIGINT": (signal.SIGINT, 130),
    "SIGTERM": (signal.SIGTERM, 143),
    "SIGHUP": (signal.SIGHUP, 129),
    "SIGKILL": (signal.SIGKILL, -9),
}
"""Signals and the exit statuses of the runs that they end."""


def test_R25_any_end_leaves_nothing_running(make_config: MakeConfig, tmp_path: Path) -> None:
    with parent_of_copies() as parent:

        def check(number: signal.Signals, code: int) -> None:
            cfg = make_config(run={"dir": tmp_path / number.name, "steps": 100_000})
            recipe = tmp_path / f"{number.name}.yaml"
            recipe.write_text(dump_config(cfg))
            process = Copy(parent, tmp_path / f"{number.name}.log", ["rl", str(recipe)])
            assert_nothing_is_left(process, cfg, number, code)

        check_rows(ENDS, check)


def assert_nothing_is_left(process: Copy, cfg: RLConfig, number: int, code: int) -> None:
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
    while is_left := [*filter(psutil.Process.is_running, children), *members(process.pid)]:
        assert time.monotonic() < deadline, is_left
        time.sleep(0.05)
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
    manifest = model.with_name(MANIFEST_NAME)
    manifest.write_text(manifest.read_text().replace('"step": 3', '"step": 1'))
    reinforce.run(second)
    assert read_manifest(model.parent).metadata == {"step": 3}, "one of earlier steps is replaced"
    config = first.run.dir / "config.yaml"
    assert config.read_bytes() == before[config]
    weights = model.with_name("model.safetensors")
    assert weights.read_bytes() == before[weights]


def test_reward_rises(inputs: Path, tmp_path: Path) -> None:
    """Even digits pay: 20 steps are enough to see it (R25's tiny task)."""
    cfg = learning_config(inputs, tmp_path / "run", seed=0)
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
        checkpoint={"export_dtype": "float32"},
    )
    reinforce.run(cfg)
    saved = state_of(cfg.run.dir, 3)["trainer"]
    exported = load_file(cfg.run.dir / "model" / "model.safetensors")
    for name, tensor in exported.items():
        assert torch.equal(tensor, saved[f"weights/{name}"]), name
