"""What a person is told who goes on with the run that a folder holds."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
from tests.loops.conftest import MakeConfig

from hone.checkpoint.store import Checkpoint, CheckpointStore
from hone.config.errors import UserError
from hone.config.tree import SFTConfig
from hone.distributed.mesh import MeshSizes
from hone.loops.resuming import announce, find_checkpoint, save_config

ALONE = MeshSizes()


def checkpoint(**fields: Any) -> Checkpoint:
    base: dict[str, Any] = {"step": 6, "path": Path("a/step_6"), "parts": {}, "metric": None}
    base |= {"skipped": (), "saved_at": None, "written_by": None}
    return Checkpoint(**base | fields)


NOON = time.mktime((2026, 11, 21, 12, 0, 0, 0, 0, -1))


@pytest.mark.parametrize(
    ("saved_at", "written_by", "own", "said"),
    [
        (None, None, MeshSizes(), "going on after step 6, from a/step_6"),
        (NOON, MeshSizes(), MeshSizes(), ", saved 2026-11-21 12:00 by 1 process"),
        (
            NOON,
            MeshSizes(data=2, tensor=2, fsdp=2),
            MeshSizes(data=2, tensor=2, fsdp=2),
            " by 4 processes (data 2 x tensor 2, shards over 2)",
        ),
        (
            NOON,
            MeshSizes(),
            MeshSizes(data=2, fsdp=2),
            " by 1 process; now 2 processes (data 2, shards over 2), so each reads its own regions "
            "of the tensors",
        ),
    ],
)
def test_who_wrote_a_checkpoint_is_told_in_one_line(
    saved_at: float | None,
    written_by: MeshSizes | None,
    own: MeshSizes,
    said: str,
    make_config: MakeConfig,
) -> None:
    cfg = make_config(run={"steps": 9})
    (line,) = announce(checkpoint(saved_at=saved_at, written_by=written_by), cfg.run, cfg, own)
    assert line.endswith(said)
    assert "\n" not in line


def test_what_has_changed_is_told(make_config: MakeConfig, tmp_path: Path) -> None:
    run = {"dir": tmp_path, "steps": 9}
    old = make_config(run=run)
    save_config(tmp_path, old)
    assert len([*announce(checkpoint(), old.run, old, ALONE)]) == 1
    new = make_config(
        run=run | {"steps": 12, "resume": 6},
        trainer={"optimizer": {"lr": 1e-4}},
        model={"path": "other"},
    )
    lines = [*announce(checkpoint(), new.run, new, ALONE)][1:]
    assert "changed since then: trainer.optimizer.lr is 0.0001, was 0.003" in lines
    assert f"changed since then: model.path is other, was {old.model.path}" in lines
    assert not any("run." in line for line in lines)


def test_a_run_with_nothing_left_to_do_says_so(make_config: MakeConfig, tmp_path: Path) -> None:
    run = {"dir": tmp_path, "steps": 6}
    save_config(tmp_path, make_config(run=run, trainer={"optimizer": {"lr": 1e-4}}))
    cfg = make_config(run=run)
    _, line = announce(checkpoint(), cfg.run, cfg, ALONE)
    assert line.startswith("run.steps is 6: nothing is left to train. Raise it to go on")


def test_another_command_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    rl = make_config(run={"dir": tmp_path})
    sft = SFTConfig.model_validate(
        {"run": {"dir": tmp_path}, "model": {"path": "m"}, "data": {"train": [{"path": "d"}]}}
    )
    store = CheckpointStore(tmp_path / "checkpoints")
    for before, after, named in ((rl, sft, "rl"), (sft, rl, "sft")):
        save_config(tmp_path, before)
        assert find_checkpoint(before.run, store, before) is None
        with pytest.raises(UserError, match=f"holds a run of `hone {named}`: choose another"):
            find_checkpoint(after.run, store, after)
