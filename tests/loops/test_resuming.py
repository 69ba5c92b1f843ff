"""What a person is told who goes on with the run that a folder holds."""

from __future__ import annotations

import json
import shutil
import time
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tests.loops.conftest import MakeConfig
from tests.tables import table

from hone.checkpoint.store import Checkpoint, CheckpointStore
from hone.config.tree import RLConfig, SFTConfig
from hone.distributed.mesh import Mesh
from hone.distributed.processes import processes
from hone.distributed.roles import Roles
from hone.distributed.settings import AxisSizes
from hone.distributed.signals import PendingSignal
from hone.distributed.watch import Watch
from hone.errors import UserError
from hone.loops import reinforce
from hone.loops.launch import Launch, plan_run
from hone.loops.resuming import announce, find_checkpoint
from hone.loops.run import Run
from hone.observe.disk import MANIFEST_NAME
from hone.observe.resumed_run import newest_step, require_resumable, save_config
from hone.tools.report.write import write_report

ALONE = AxisSizes()


def checkpoint(**fields: Any) -> Checkpoint:
    base: dict[str, Any] = {"step": 6, "path": Path("a/step_6"), "parts": {}, "metric": None}
    base |= {"saved_at": NOON, "written_by": ALONE}
    return Checkpoint(**base | fields)


NOON = time.mktime((2026, 11, 21, 12, 0, 0, 0, 0, -1))


@pytest.mark.parametrize(
    ("written_by", "own", "said"),
    [
        (AxisSizes(), AxisSizes(), "6, from a/step_6, saved 2026-11-21 12:00 by 1 process"),
        (
            AxisSizes(data=2, tensor=2, fsdp=2),
            AxisSizes(data=2, tensor=2, fsdp=2),
            " by 4 processes (data 2 x tensor 2, shards over 2)",
        ),
        (
            AxisSizes(),
            AxisSizes(data=2, fsdp=2),
            " by 1 process; now 2 processes (data 2, shards over 2), so each reads its own regions "
            "of the tensors",
        ),
    ],
)
def test_who_wrote_a_checkpoint_is_told_in_one_line(
    written_by: AxisSizes, own: AxisSizes, said: str, make_config: MakeConfig
) -> None:
    cfg = make_config(run={"steps": 9})
    (line,) = announce(checkpoint(written_by=written_by), cfg, own)
    assert line.endswith(said)
    assert "\n" not in line


def test_what_has_changed_is_told(make_config: MakeConfig, tmp_path: Path) -> None:
    run = {"dir": tmp_path, "steps": 9}
    old = make_config(run=run)
    save_config(old)
    assert len([*announce(checkpoint(), old, ALONE)]) == 1
    new = make_config(
        run=run | {"steps": 12, "resume": 6},
        trainer={"optimizer": {"lr": 1e-4}},
        model={"path": "other"},
    )
    lines = [*announce(checkpoint(), new, ALONE)][1:]
    assert "changed since then: trainer.optimizer.lr is 0.0001, was 0.003" in lines
    assert f"changed since then: model.path is other, was {old.model.path}" in lines
    assert not any("run." in line for line in lines)


@table(
    "optimizer, steps, said",
    [
        # 6 of 9 steps of a cosine: 0.003 (1 + cos(2 pi / 3)) / 2, and 0.003 (1 + cos(pi / 3)) / 2
        ({"schedule": "cosine"}, 18, "goes on at 0.00225, and would have been 0.00075."),
        ({"schedule": "linear", "min_lr_ratio": 0.5}, 12, "at 0.00225, and would have been 0.002."),
        ({"schedule": "cosine"}, 9, None),
        ({"schedule": "cosine", "warmup_steps": 7}, 18, None),
        ({"schedule": "constant"}, 18, None),
    ],
)
def test_a_learning_rate_that_jumps_with_more_steps_is_told(
    make_config: MakeConfig, tmp_path: Path, optimizer: Any, steps: int, said: str | None
) -> None:
    def asked(steps: int) -> RLConfig:
        trainer = {"optimizer": {"lr": 3e-3} | optimizer}
        return make_config(run={"dir": tmp_path, "steps": steps}, trainer=trainer)

    save_config(asked(9))
    lines = [*announce(checkpoint(), asked(steps), ALONE)][1:]
    if said is None:
        assert lines == []
    else:
        (line,) = lines
        assert line.startswith(f"changed since then: run.steps is {steps}, was 9, and trainer.")
        assert said in line
        assert f"{optimizer['schedule']} ends with it" in line


def test_the_policys_schedule_begins_when_the_critic_has_warmed_up(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """After 2 of 4 steps of two mini-batches, the first of them the critic's alone."""

    def asked(steps: int) -> RLConfig:
        return make_config(
            run={"dir": tmp_path, "steps": steps},
            algorithm={"advantage": "gae"},
            critic={"warmup_steps": 1},
            trainer={
                "optimizer": {"lr": 3e-3, "schedule": "linear"},
                "prompts_per_minibatch": 2,
            },
        )

    save_config(asked(4))
    line = [*announce(checkpoint(step=2), asked(7), ALONE)][-1]
    assert "goes on at 0.0025, and would have been 0.002." in line  # 5 / 6 and 2 / 3 of it


def test_what_has_changed_is_an_event_of_the_run(make_config: MakeConfig, tmp_path: Path) -> None:
    run = {"dir": tmp_path, "steps": 9}
    save_config(make_config(run=run))
    for lr in (0.003, 0.5, 0.5):  # as it was, another, the same again
        cfg = make_config(run=run, trainer={"optimizer": {"lr": lr}})
        mesh, store = Mesh.alone("cpu"), CheckpointStore(tmp_path / "checkpoints")
        roles = Roles("policy", mesh, mesh)
        given = {"tracing": Mock(), "metrics_server": None, "lock": None, "early": PendingSignal()}
        plan, watch = plan_run(cfg, "cpu", world_size=1), Watch(processes(), 9.0)
        Launch(cfg, plan, roles, watch, store, checkpoint(), **given).save_config()
    (event,) = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert (event["kind"], event["step"]) == ("changed", 6)
    assert event["settings"] == ["trainer.optimizer.lr is 0.5, was 0.003"]


def test_a_run_with_nothing_left_to_do_says_so(make_config: MakeConfig, tmp_path: Path) -> None:
    run = {"dir": tmp_path, "steps": 6}
    save_config(make_config(run=run, trainer={"optimizer": {"lr": 1e-4}}))
    cfg = make_config(run=run)
    _, line = announce(checkpoint(), cfg, ALONE)
    assert line.startswith("run.steps is 6: nothing is left to train. Raise it to go on")


def a_checkpoint(folder: Path, step: int, order: int) -> None:
    place = folder / "checkpoints" / f"step_{step}"
    place.mkdir(parents=True)
    manifest = {"content": {"metadata": {"step": step, "order": order}}}
    (place / MANIFEST_NAME).write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("steps", "changes", "told"),
    [
        (6, {}, None),
        (9, {"trainer": {"optimizer": {"lr": 0.5}}}, None),
        (6, {"trainer": {"optimizer": {"lr": 0.5}}}, "trainer.optimizer.lr is 0.5, was 0.003"),
        (6, {"reward": {"functions": [{"fn": "math"}]}}, "reward.functions is "),
        (6, {"log": {"samples_per_step": 3}, "checkpoint": {"keep_last": 1}}, None),
        (6, {"run": {"seed": 9}}, "run.seed is 9, was 0"),
        (9, {"run": {"seed": 9}}, "run.seed is 9, was 0"),
        (9, {"run": {"seed": 9}, "trainer": {"optimizer": {"lr": 0.5}}}, "run.seed is 9, was 0"),
    ],
)
def test_settings_that_would_be_ignored_are_refused_by_name(
    steps: int, changes: dict[str, Any], told: str | None, make_config: MakeConfig, tmp_path: Path
) -> None:
    """Of a run that is over, and a seed of any."""
    run = {"dir": tmp_path, "seed": 0}
    save_config(make_config(run=run | {"steps": 6}))
    a_checkpoint(tmp_path, 6, order=1)
    cfg = make_config(**changes | {"run": run | {"steps": steps} | changes.get("run", {})})
    if told is None:
        require_resumable(cfg, newest=newest_step(tmp_path))
        return
    with pytest.raises(UserError) as caught:
        require_resumable(cfg, newest=newest_step(tmp_path))
    assert told in str(caught.value)
    assert "another run.dir" in str(caught.value)
    assert ("has made its 6 steps" in str(caught.value)) == ("run" not in changes)


def test_the_newest_checkpoint_is_the_one_that_was_saved_last(tmp_path: Path) -> None:
    """A run that has gone back to an earlier one has later steps beside it."""
    assert newest_step(tmp_path) is None
    for order, step in enumerate((3, 9, 5)):
        a_checkpoint(tmp_path, step, order)
    (tmp_path / "checkpoints" / ".step_12.partial").mkdir()
    (tmp_path / "checkpoints" / "step_20").mkdir()
    assert newest_step(tmp_path) == 5


@pytest.mark.parametrize(
    ("every", "advice"),
    [
        (50, "A lower checkpoint.every_n_steps (now 50) saves earlier"),
        (0, "checkpoint.every_n_steps is 0"),
    ],
)
def test_a_run_that_starts_over_says_what_is_lost(
    every: int,
    advice: str,
    make_config: MakeConfig,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that died in step 3, before a checkpoint; not one that finds an empty folder."""
    cfg = make_config(run={"steps": 4}, checkpoint={"every_n_steps": every})
    caplog.set_level("INFO", logger="hone")
    with monkeypatch.context() as patch:
        patch.setattr(Run, "finish", dies_after(2))
        with pytest.raises(RuntimeError, match="died"):
            reinforce.run(cfg)
    assert "begins at step 0" not in caplog.text
    caplog.clear()
    reinforce.run(cfg)
    (line,) = [r.getMessage() for r in caplog.records if "begins at step 0" in r.getMessage()]
    assert f"run.dir={str(cfg.run.dir)!r} holds records of an earlier launch up to step 2" in line
    assert advice in line


def dies_after(step: int) -> Any:
    finish = Run.finish

    def wrapped(self: Run[Any], number: int, *args: Any, **kwargs: Any) -> bool:
        if number > step:
            raise RuntimeError("died")
        return finish(self, number, *args, **kwargs)

    return wrapped


def test_another_command_is_refused(make_config: MakeConfig, tmp_path: Path) -> None:
    rl = make_config(run={"dir": tmp_path})
    sft = SFTConfig.model_validate(
        {"run": {"dir": tmp_path}, "model": {"path": "m"}, "data": {"train": [{"path": "d"}]}}
    )
    store = CheckpointStore(tmp_path / "checkpoints")
    for before, after, named in ((rl, sft, "rl"), (sft, rl, "sft")):
        save_config(before)
        assert find_checkpoint(before, store) is None
        with pytest.raises(UserError, match=f"holds a run of `hone {named}`: choose another"):
            find_checkpoint(after, store)


def copy_of_a_model(folder: Path, original: str, **changes: Any) -> str:
    """A folder with the same architecture and weights, but for what changes in its config."""
    shutil.copytree(original, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))
    return str(folder)


class HasACheckpoint(CheckpointStore):
    """A store whose newest checkpoint is of step 6."""

    is_empty = False

    def load(self, which: Any) -> Checkpoint:
        return checkpoint()


def saved_run(make_config: MakeConfig, folder: Path, model: Path | str) -> Any:
    """Builds the configuration of a run in `folder` / run, of which one of `model` is held."""
    make = partial(make_config, run={"dir": folder / "run", "steps": 9})
    (folder / "run").mkdir()
    save_config(make(model={"path": str(model)}))
    return make


def found(cfg: RLConfig) -> Checkpoint | None:
    return find_checkpoint(cfg, HasACheckpoint(cfg.run.dir / "checkpoints"))


@pytest.mark.parametrize(
    ("now", "reason"),
    [
        ({"path": "other"}, "model.path"),
        ({"path": "Qwen/Qwen3-0.6B"}, "model.path"),
        ({"init": "random"}, "model.init"),
    ],
)
def test_another_model_is_refused(
    now: dict[str, str],
    reason: str,
    make_config: MakeConfig,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    model = make_config().model.path
    copy_of_a_model(tmp_path / "other", model)
    make = saved_run(make_config, tmp_path, model)
    assert found(make()) is not None
    second = make(model={"path": model} | now)
    with pytest.raises(UserError, match=f"{reason} is .*choose another run.dir") as refused:
        found(second)
    record = tmp_path / "run" / "model.json"
    assert repr(model) in str(refused.value) or "pretrained" in str(refused.value)
    assert f"remove {str(record)!r}" in str(refused.value)
    record.unlink()  # on purpose
    assert found(second) is not None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"path": "model"}'])
def test_a_damaged_record_of_the_model_is_named(
    text: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    cfg = make_config(run={"dir": tmp_path})
    (tmp_path / "model.json").write_text(text)
    with pytest.raises(UserError, match=r"model\.json.*is damaged\. Remove it"):
        found(cfg)


def test_another_architecture_at_the_same_place_is_refused(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    path = copy_of_a_model(tmp_path / "model", make_config().model.path)
    make = saved_run(make_config, tmp_path, path)
    cfg, file = make(model={"path": path}), Path(path) / "config.json"
    config = json.loads(file.read_text())
    # Written again by another version of transformers, with keys that are new.
    file.write_text(json.dumps(config | {"transformers_version": "99", "a_new_key": 1}))
    assert found(cfg) is not None
    file.write_text(json.dumps(config | {"intermediate_size": 96}))
    with pytest.raises(UserError, match=r"intermediate_size is 96, was 64"):
        found(cfg)


@pytest.mark.parametrize("spelling", ["./model", "{folder}/model", "link", "../{name}/model"])
def test_another_spelling_of_the_same_place_goes_on(
    spelling: str, make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    copy_of_a_model(tmp_path / "model", make_config().model.path)
    (tmp_path / "link").symlink_to("model")
    make = saved_run(make_config, tmp_path, "model")
    path = spelling.format(folder=tmp_path, name=tmp_path.name)
    assert found(make(model={"path": path})) is not None


def test_a_relative_path_means_the_folder_it_meant_then(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same words from another working directory are another model."""
    for place in ("one", "two"):
        copy_of_a_model(tmp_path / place / "model", make_config().model.path)
    monkeypatch.chdir(tmp_path / "one")
    make = saved_run(make_config, tmp_path, "model")
    monkeypatch.chdir(tmp_path / "two")
    with pytest.raises(UserError, match=r"model\.path is .*two/model"):
        found(make(model={"path": "model"}))


@pytest.mark.parametrize(
    "content",
    [b"run: {dir: [", b"\xff\xfe\x00run", b"just a line", b"- a\n- b\n", b"a: b\x00c", b"7"],
    ids=repr,
)
def test_a_garbled_configuration_is_named(make_config: MakeConfig, content: bytes) -> None:
    cfg = make_config()
    cfg.run.dir.mkdir()
    (cfg.run.dir / "config.yaml").write_bytes(content)
    for read in (partial(reinforce.run, cfg), partial(write_report, cfg.run.dir)):
        with pytest.raises(UserError, match=r"run/config\.yaml is damaged \(.*\)\. Put back"):
            read()
