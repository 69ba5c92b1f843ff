"""However a run ends, its folder says why: an event, the failing samples, and the report."""

from __future__ import annotations

import fcntl
import gc
import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.loops.conftest import MakeConfig
from tests.observe.test_disk import largest_file
from tests.tiny_runs import lines

from hone.checkpoint.store import CheckpointError, CheckpointStore
from hone.config.tree import SFTConfig
from hone.distributed.processes import Processes
from hone.distributed.watch import Watch
from hone.errors import UserError
from hone.garbage import COLLECTION_THRESHOLDS, rare_garbage_collection
from hone.loops import loop, reinforce, supervised
from hone.loops import run as run_module
from hone.loops.ending import Ending, record_death
from hone.loops.run import Outcome
from hone.observe.disk import DiskError
from hone.observe.run_folder import RunFolder
from hone.rewards.scorer import FailureRateError
from hone.rollout import collector
from hone.rollout.evaluate import evaluate
from hone.tools.report.pages import PAGES
from hone.trainer.parallel_model import ParallelModel
from hone.trainer.trainer import Trainer


def last_event(folder: Path) -> dict[str, Any]:
    return lines(folder / "events.jsonl")[-1]


def raising(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def test_a_reward_that_fails_leaves_cause_samples_and_report(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    (tmp_path / "broken.py").write_text(
        "def score(completion, answer):\n"
        "    if int(answer) % 2 and completion != answer:\n"  # the run asks before it starts
        "        raise KeyError('no such column')\n"
        "    return 0.0\n"
    )
    cfg = make_config(
        reward={
            "functions": [{"fn": f"{tmp_path / 'broken.py'}:score"}],
            "num_workers": 1,
            "max_failure_rate": 0.3,
        },
        log={"to": [], "samples_per_step": 4},
    )
    with pytest.raises(ValueError, match="samples have no reward") as caught:
        reinforce.run(cfg, pages=PAGES)
    event = last_event(cfg.run.dir)
    told = {key: event[key] for key in ("kind", "message", "error", "step", "phase")}
    assert told == {
        "kind": "error",
        "message": str(caught.value),
        "error": "FailureRateError",
        "step": 1,
        "phase": "generate",
    }
    samples = lines(cfg.run.dir / "samples.jsonl")
    assert len(samples) == 4
    assert all("no such column" in sample["failure_detail"] for sample in samples)
    assert RunFolder.read(cfg.run.dir).status == "failed"
    page = (cfg.run.dir / "report.html").read_text()
    assert "The run failed in step 1, during generate" in page
    assert page.index("samples have no reward") < page.index('id="samples"')


APART = {"cluster": {"num_engines": 1}, "pipeline": {"max_staleness": 1}}
ALL_FAIL = {
    # sections; phase, step and split; the message
    "while sampling": ({}, ("generate", 1, "train"), "of 32 samples have no reward"),
    "ahead of the training": (APART, ("generate", 1, "train"), "first 24 samples"),
    "first of an evaluation": (
        {"eval": {"at_start": True, "n_samples_per_prompt": 8}},
        ("eval", 0, "eval"),
        "first 24 samples",
    ),
    "share of an evaluation": (
        {"eval": {"at_start": True}},
        ("eval", 0, "eval"),
        "of 20 samples have no reward",
    ),
}


@pytest.mark.parametrize("case", ALL_FAIL)
def test_samples_are_written_where_none_can_be_scored(
    case: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    sections, place, message = ALL_FAIL[case]
    (tmp_path / "broken.py").write_text(
        "def score(completion, answer):\n"
        "    if completion != answer:\n"
        "        raise KeyError('no such column')\n"
        "    return 1.0\n"
    )
    functions = [{"fn": f"{tmp_path / 'broken.py'}:score"}]
    cfg = make_config(
        rollout={"n_samples_per_prompt": 8},
        reward={"functions": functions, "num_workers": 1},
        log={"to": [], "samples_per_step": 4},
        **sections,
    )
    with pytest.raises(FailureRateError, match=message):
        reinforce.run(cfg)
    event = last_event(cfg.run.dir)
    samples = lines(cfg.run.dir / "samples.jsonl")
    assert [(event["phase"], row["step"], row["split"]) for row in samples] == [place] * 4
    assert all("no such column" in row["failure_detail"] for row in samples)


ENDS: dict[BaseException, tuple[str, str]] = {
    RuntimeError("a bug"): ("error", "a bug"),
    AssertionError(): ("error", "AssertionError"),
    KeyboardInterrupt(): ("interrupted", "Ctrl-C ended the run at once"),
}


@pytest.mark.parametrize(
    ("where", "place"),
    [
        ((reinforce, "build_run"), ("start", 0)),
        ((Trainer, "update"), ("train", 1)),
        ((run_module, "export"), ("checkpoint", 3)),
    ],
    ids=["start", "step", "export"],
)
@pytest.mark.parametrize("error", ENDS, ids=["bug", "no text", "Ctrl-C"])
def test_every_error_is_an_event(
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    where: tuple[Any, str],
    place: tuple[str, int],
    error: BaseException,
) -> None:
    (phase, step), (kind, message) = place, ENDS[error]
    cfg = make_config()
    monkeypatch.setattr(*where, raising(error))
    with pytest.raises(type(error)):
        reinforce.run(cfg, pages=PAGES)
    event = last_event(cfg.run.dir)
    told = {key: event[key] for key in ("kind", "message", "step", "phase")}
    assert told == {"kind": kind, "message": message, "step": step, "phase": phase}
    assert ("traceback" in event) == (kind == "error")
    expected = "failed" if kind == "error" else {0: "stopped", 1: "stopped", 3: "finished"}[step]
    assert RunFolder.read(cfg.run.dir).status == expected
    assert message in (cfg.run.dir / "report.html").read_text()
    assert bool(lines(cfg.run.dir / "samples.jsonl")) == (step > 0), "of the failed step too"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_before_the_first_step_ends_the_run_with_a_report(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    cfg = make_config()
    before = signal.getsignal(number)
    monkeypatch.setattr(reinforce, "build_run", lambda *_: os.kill(os.getpid(), number))
    with pytest.raises(SystemExit) as caught:
        reinforce.run(cfg, pages=PAGES)
    assert caught.value.code == 128 + number
    assert signal.getsignal(number) is before
    assert last_event(cfg.run.dir)["message"] == f"{number.name} ended the run at once"
    assert (cfg.run.dir / "report.html").exists()


@pytest.mark.parametrize(
    ("number", "at_start"),
    [
        (signal.SIGINT, True),
        (signal.SIGTERM, True),
        (signal.SIGTERM, False),
        (signal.SIGHUP, False),
    ],
)
def test_a_signal_ends_an_evaluation_at_once(
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    number: signal.Signals,
    at_start: bool,
) -> None:
    """Before the first step there is nothing to save; later the step is, without the evaluation."""
    waited_for: list[int] = []

    def signalled(*args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), number)
        result = evaluate(*args, **kwargs)
        waited_for.append(0 if result is None else len(result))
        return result

    monkeypatch.setattr(collector, "evaluate", signalled)
    cfg = make_config(eval={"at_start": at_start, "every_n_steps": 2})
    outcome = reinforce.run(cfg)
    assert waited_for == [0]
    assert outcome == Outcome(0 if at_start else 2, stopped_by=number)
    held = lines(cfg.run.dir / "metrics.jsonl")
    assert [row["step"] for row in held] == ([] if at_start else [1, 2])
    assert not [name for row in held for name in row if name.startswith("eval/")]
    assert CheckpointStore(cfg.run.dir / "checkpoints").steps() == ([] if at_start else [2])
    assert (cfg.run.dir / "model").exists() != at_start
    assert last_event(cfg.run.dir)["kind"] == "interrupted"
    assert "Ctrl-C again ends it at once" in capfd.readouterr().err or number != signal.SIGINT
    monkeypatch.setattr(collector, "evaluate", evaluate)
    assert reinforce.run(cfg) == Outcome(3)
    assert lines(cfg.run.dir / "metrics.jsonl")[-1]["step"] == 3


@pytest.mark.parametrize("at_start", [True, False])
def test_a_signal_ends_a_supervised_evaluation_before_its_next_pass(
    sft_config: SFTConfig, monkeypatch: pytest.MonkeyPatch, at_start: bool
) -> None:
    """As it does one of samples: a large held-out set takes longer than schedulers wait."""
    original, passes = ParallelModel.forward, list[int]()

    def signalled(model: ParallelModel, *args: Any) -> Any:
        if not torch.is_grad_enabled():
            passes.append(1)
            os.kill(os.getpid(), signal.SIGTERM)
        return original(model, *args)

    monkeypatch.setattr(ParallelModel, "forward", signalled)
    every_row = sft_config.trainer.model_copy(update={"micro_batch_size": 1})
    evaluation = sft_config.eval.model_copy(update={"at_start": at_start, "every_n_steps": 2})
    cfg = sft_config.model_copy(update={"eval": evaluation, "trainer": every_row})
    done = 0 if at_start else 2
    assert supervised.run(cfg) == Outcome(done, stopped_by=signal.SIGTERM)
    assert len(passes) == 1, "of ten"
    held = lines(cfg.run.dir / "metrics.jsonl")
    assert [row["step"] for row in held] == [*range(1, done + 1)]
    assert not [name for row in held for name in row if name.startswith("eval/")]
    assert CheckpointStore(cfg.run.dir / "checkpoints").steps() == ([] if at_start else [2])
    monkeypatch.setattr(ParallelModel, "forward", original)
    assert supervised.run(cfg) == Outcome(3)
    assert "eval/loss" in lines(cfg.run.dir / "metrics.jsonl")[-1]


def test_a_signal_that_is_ignored_stays_so(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As under nohup."""
    previous = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    train = loop.train

    def hung_up(run: Any) -> Any:
        os.kill(os.getpid(), signal.SIGHUP)
        return train(run)

    monkeypatch.setattr(loop, "train", hung_up)
    try:
        assert reinforce.run(make_config()).stopped_by is None
    finally:
        signal.signal(signal.SIGHUP, previous)


def test_a_run_that_goes_on_drops_the_error_of_the_step_it_repeats(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = make_config()
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "update", raising(RuntimeError("a bug")))
        with pytest.raises(RuntimeError):
            reinforce.run(cfg)
    reinforce.run(cfg)
    assert RunFolder.read(cfg.run.dir).status == "finished"
    assert "error" not in {event["kind"] for event in lines(cfg.run.dir / "events.jsonl")}


def test_a_run_that_failed_after_its_last_step_is_finished_once_it_was_completed(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next launch trains no step, so no row is newer than the error."""
    cfg = make_config()
    with monkeypatch.context() as patch:
        patch.setattr(run_module, "export", raising(OSError("no space")))
        with pytest.raises(OSError, match="no space"):
            reinforce.run(cfg)
    assert RunFolder.read(cfg.run.dir).error is not None
    reinforce.run(cfg, pages=PAGES)
    assert last_event(cfg.run.dir)["kind"] == "finished"
    run = RunFolder.read(cfg.run.dir)
    assert (run.status, run.error) == ("finished", None)
    assert "The run failed" not in (cfg.run.dir / "report.html").read_text()


@pytest.mark.parametrize("problem", [KeyError("timestamp_s"), TypeError("x"), OSError("x")])
def test_a_report_that_cannot_be_drawn_does_not_replace_the_error_of_the_run(
    make_config: MakeConfig,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    problem: Exception,
) -> None:
    cfg = make_config()
    monkeypatch.setattr(reinforce, "build_run", raising(RuntimeError("the cause")))
    with pytest.raises(RuntimeError, match="the cause") as caught:
        reinforce.run(cfg, pages=replace(PAGES, write_report=raising(problem)))
    assert "the report could not be drawn" in "".join(getattr(caught.value, "__notes__", []))


def test_a_process_that_ends_for_another_one_does_not_wait_for_its_report(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    is_over = threading.Event()
    monkeypatch.setattr("hone.loops.ending._DRAWING_S", 0.1, raising=False)
    pages = replace(PAGES, write_report=lambda *_, **__: is_over.wait(600))
    watch = Watch(Processes(0, 1, 0, 1), 60.0)
    (tmp_path / ".lock").write_text("11\n")
    with Ending(tmp_path, watch, is_first=False, pages=pages).cause(11):
        assert watch.on_end is not None
        leaving = threading.Thread(target=watch.on_end, args=["rank 1 is gone"], daemon=True)
        leaving.start()
        leaving.join(60)
    try:
        assert not leaving.is_alive()
        assert last_event(tmp_path)["message"] == "rank 1 is gone"
    finally:
        is_over.set()


@pytest.mark.parametrize(
    ("lock", "is_recorded"),
    [(None, False), ("", False), ("7", False), ("12\n", True), ("garbled", False)],
)
def test_a_death_is_recorded_only_where_a_process_of_the_run_took_the_folder(
    tmp_path: Path, lock: str | None, is_recorded: bool
) -> None:
    """An earlier run has left its lock file."""
    if lock is not None:
        (tmp_path / ".lock").write_text(lock)
    record_death(tmp_path, "killed", pids=[11, 12], step=0, phase="start")
    assert (tmp_path / "events.jsonl").exists() == is_recorded


def test_a_run_writes_into_the_lock_which_process_took_the_folder(make_config: MakeConfig) -> None:
    cfg = make_config()
    cfg.run.dir.mkdir(parents=True)
    (cfg.run.dir / ".lock").write_text("1234567890")
    reinforce.run(cfg)
    assert (cfg.run.dir / ".lock").read_text() == f"{os.getpid()}\n"


def test_the_folder_of_another_run_is_left_alone(make_config: MakeConfig) -> None:
    cfg = make_config()
    cfg.run.dir.mkdir(parents=True)
    with (cfg.run.dir / ".lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("11\n")
        file.flush()
        with pytest.raises(UserError, match="another run is at work"):
            reinforce.run(cfg)
        record_death(cfg.run.dir, "killed", pids=[11], step=1, phase="train")
        assert (cfg.run.dir / ".lock").read_text() == "11\n"
    assert [path.name for path in cfg.run.dir.iterdir()] == [".lock"]


def test_a_checkpoint_that_does_not_fit_has_no_event(
    make_config: MakeConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    """It is written behind the training, which learns of it at the next step at the latest."""
    cfg = make_config(
        run={"steps": 9}, checkpoint={"every_n_steps": 3}, log={"to": [], "samples_per_step": 0}
    )
    with largest_file(60_000), pytest.raises(CheckpointError) as caught:
        reinforce.run(cfg)
    text = str(caught.value)
    assert text.startswith(f"Could not write {cfg.run.dir / 'checkpoints' / 'step_3'} (run.dir)")
    assert "bytes, " in text
    events = lines(cfg.run.dir / "events.jsonl")
    assert "checkpoint" not in {event["kind"] for event in events}
    assert (events[-1]["kind"], events[-1]["message"]) == ("error", text)
    assert not list((cfg.run.dir / "checkpoints").iterdir())
    assert "Exception in thread" not in capfd.readouterr().err


def test_a_full_disk_does_not_hide_the_error_that_ends_the_run(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = make_config()
    full = raising(DiskError("Could not write x (run.dir)"))
    monkeypatch.setattr("hone.observe.disk.AppendedFile.write", full)
    monkeypatch.setattr("hone.tools.report.write.write_whole", full)
    monkeypatch.setattr(reinforce, "build_run", raising(RuntimeError("the cause")))
    with pytest.raises(RuntimeError, match="the cause"):
        reinforce.run(cfg, pages=PAGES)
    assert "the cause is not in the run folder" in caplog.text
    assert "the report could not be drawn" in caplog.text


def test_every_checkpoint_has_its_event(make_config: MakeConfig) -> None:
    cfg = make_config(run={"steps": 4}, checkpoint={"every_n_steps": 1, "keep_last": 9})
    reinforce.run(cfg)
    events = lines(cfg.run.dir / "events.jsonl")
    assert [event["step"] for event in events if event["kind"] == "checkpoint"] == [1, 2, 3, 4]


def test_a_checkpoint_has_its_event_where_the_next_step_fails(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = make_config(run={"steps": 4}, checkpoint={"every_n_steps": 2})
    update = Trainer.update

    def fail_in_step_3(trainer: Trainer, *args: Any) -> Any:
        if len(lines(cfg.run.dir / "metrics.jsonl")) == 2:
            wait_until((cfg.run.dir / "checkpoints" / "step_2").is_dir)
            raise RuntimeError("a bug")
        return update(trainer, *args)

    monkeypatch.setattr(Trainer, "update", fail_in_step_3)
    with pytest.raises(RuntimeError, match="a bug"):
        reinforce.run(cfg)
    events = lines(cfg.run.dir / "events.jsonl")
    assert [(event["kind"], event.get("step")) for event in events if event["kind"] != "alarm"] == [
        ("checkpoint", 2),
        ("error", 3),
    ]


def wait_until(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_garbage_is_collected_as_before_once_a_run_has_ended() -> None:
    def end() -> None:
        with rare_garbage_collection():
            assert gc.get_threshold() == COLLECTION_THRESHOLDS
            assert gc.get_freeze_count() > 10_000
            raise KeyboardInterrupt

    before = gc.get_threshold()
    with pytest.raises(KeyboardInterrupt):
        end()
    assert gc.get_threshold() == before
    assert gc.get_freeze_count() == 0
