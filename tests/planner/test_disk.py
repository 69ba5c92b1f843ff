"""What a run writes is planned, and compared with what is free before it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from hone.cli import command
from hone.cli.main import main
from hone.config.load import load_config
from hone.config.plan import Devices, RunPlan, resolve
from hone.config.tree import RLConfig
from hone.families.model_facts import ModelFacts
from hone.families.shape import public_shape
from hone.planner.disk import DiskUse, check_disk, disk_use
from tests.tables import table

DATA = "--data.train=[{path: public/data}]"


def planned(*flags: str) -> RunPlan:
    cfg = load_config(RLConfig, None, [DATA, "--model.path=Qwen/Qwen3-1.7B", *flags])
    found = public_shape("qwen3-1.7b")
    assert found is not None
    devices = Devices(kind="cuda", host_bytes=1 << 40)
    return resolve(cfg, ModelFacts.of_shape(found), devices, world_size=4)


N = 1_720_574_976
"""Parameters of Qwen3-1.7B, whose head is tied."""
EVALUATED = ("--data.eval_fraction=0.1", "--eval.every_n_steps=10")


@table(
    "flags, expected",
    [
        # Masters and two moments in float32; at 50 of 100 steps, and the end.
        ((), DiskUse(2 * N, 12 * N, 1, 2)),
        (("--checkpoint.every_n_steps=10",), DiskUse(2 * N, 12 * N, 3, 3)),
        (("--checkpoint.every_n_steps=0",), DiskUse(2 * N, 12 * N, 0, 0)),
        (("--checkpoint.every_n_steps=100",), DiskUse(2 * N, 12 * N, 0, 1)),
        ((*EVALUATED, "--checkpoint.every_n_steps=0"), DiskUse(2 * N, 12 * N, 4, 4)),
        (
            (*EVALUATED, "--checkpoint.keep_best=false", "--checkpoint.keep_last=1"),
            DiskUse(2 * N, 12 * N, 1, 2),
        ),
        (
            ("--checkpoint.export_dtype=float32", "--trainer.optimizer.state_dtype=bfloat16"),
            DiskUse(4 * N, 8 * N, 1, 2),
        ),
    ],
)
def test_bytes_by_hand(flags: tuple[str, ...], expected: DiskUse) -> None:
    assert disk_use(planned(*flags)) == expected


def test_adapters_are_all_that_a_checkpoint_of_them_has() -> None:
    use = disk_use(planned("--model.lora.rank=8"))
    assert use is not None
    adapters = (use.export - 2 * N) // 4
    assert 0 < adapters < N // 100
    assert use.state == 12 * adapters


GB = 10**9


@table(
    "flags, free, held, level, words",
    [
        ((), 45, 0, None, ""),
        ((), 44, 0, "warning", "ends with its model alone and cannot be extended"),
        ((), 24, 21, None, ""),
        ((), 23, 0, "error", "there are 1 of 20.6 GB"),
        ((), 3, 90, "error", "does not hold the trained model: it has 3.4 GB"),
        (("--checkpoint.every_n_steps=0",), 4, 0, None, ""),
        (("--checkpoint.every_n_steps=10",), 60, 0, "error", "checkpoint.keep_last to 1"),
    ],
)
def test_the_disk_is_compared_with_the_plan(
    flags: tuple[str, ...], free: int, held: int, level: str | None, words: str
) -> None:
    found = [*check_disk(planned(*flags), free=free * GB, held=held * GB)]
    assert [finding.level for finding in found] == ([] if level is None else [level])
    assert all(words in finding.message for finding in found)


def test_a_run_is_refused_where_its_model_does_not_fit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a folder's checkpoints have is theirs again; for other machines it is a warning."""
    monkeypatch.setattr(command, "free_bytes", lambda path: 2 * GB)
    words = ["check", "rl", DATA, "--model.path=Qwen/Qwen3-1.7B", f"--run.dir={tmp_path}"]
    main([*words, "--gpu=h100", "--nproc=1"])
    text = " ".join(capsys.readouterr().out.split())
    assert "warning: by prediction run.dir" in text
    assert "does not hold the trained model: it has 3.4 GB, and 2.0 GB are free there" in text
