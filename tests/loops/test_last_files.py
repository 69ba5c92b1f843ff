"""However a run ends, its model is on disk, and what writing it needs is tried before."""

from __future__ import annotations

import errno
import json
import os
import shutil
import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from tests.loops.conftest import MakeConfig
from tests.observe.test_disk import largest_file
from tests.tables import table
from tests.tiny_runs import lines
from transformers import PreTrainedTokenizerFast

from hone.checkpoint.atomic import MANIFEST_NAME, CheckpointError, read_manifest
from hone.checkpoint.store import CheckpointStore
from hone.config.plan import Devices, resolve
from hone.config.tree import SFTConfig
from hone.errors import UserError
from hone.families.model_facts import ModelFacts
from hone.loops import reinforce, supervised
from hone.loops.interrupt import Terminated, terminable
from hone.loops.launch import FolderLock
from hone.loops.loop import train
from hone.loops.run import Outcome, Run
from hone.loops.saving import Saver, time_in_words
from hone.models.settings import LoraConfig
from hone.observe.resumed_run import exported_step, is_finished, require_resumable
from hone.observe.run_folder import LOCK
from hone.planner.disk import disk_use
from hone.tools.report.pages import PAGES
from hone.trainer.trainer import Trainer


def saved_steps(cfg: SFTConfig) -> list[int]:
    return CheckpointStore(cfg.run.dir / "checkpoints").steps()


def exported(cfg: SFTConfig) -> Any:
    """The step whose model is in the run folder, whole."""
    return read_manifest(cfg.run.dir / "model").metadata["step"]


def with_checkpoint(cfg: SFTConfig, every: int, **changes: Any) -> SFTConfig:
    """The same run without evaluations, which would save the best."""
    checkpoint = cfg.checkpoint.model_copy(update={"every_n_steps": every, **changes})
    evaluation = cfg.eval.model_copy(update={"every_n_steps": 0})
    return cfg.model_copy(update={"checkpoint": checkpoint, "eval": evaluation})


def in_step(monkeypatch: pytest.MonkeyPatch, number: int, act: Callable[[], object]) -> None:
    """Have something happen while the trainer makes its `number`th update."""
    update, made = Trainer.update, list[int]()

    def wrapped(trainer: Trainer, *args: Any, **kwargs: Any) -> Any:
        made.append(1)
        if len(made) == number:
            act()
        return update(trainer, *args, **kwargs)

    monkeypatch.setattr(Trainer, "update", wrapped)


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_run_that_saves_nothing_ends_with_its_model_alone(
    sft_config: SFTConfig, caplog: pytest.LogCaptureFixture
) -> None:
    cfg = with_checkpoint(sft_config, 0)
    assert supervised.run(cfg) == Outcome(3, is_saved=False)
    assert (exported(cfg), saved_steps(cfg)) == (3, [])
    assert is_finished(cfg)
    assert supervised.run(cfg).steps == 3, "and nothing is made again"
    longer = cfg.model_copy(update={"run": cfg.run.model_copy(update={"steps": 5})})
    with pytest.raises(UserError, match="cannot be extended, and beginning again would replace"):
        require_resumable(longer, newest=None)
    other = cfg.model_copy(update={"data": cfg.data.model_copy(update={"max_tokens": 15})})
    with pytest.raises(UserError, match="settings have changed since"):
        require_resumable(other, newest=None)


def test_the_model_is_written_before_the_state(
    sft_config: SFTConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the last step, and where a signal ends the run that else saves nothing."""
    found: list[tuple[int, int]] = []
    save = CheckpointStore.save

    def noting(store: CheckpointStore, step: int, *args: Any, **kwargs: Any) -> Path:
        found.append((step, exported(cfg)))
        return save(store, step, *args, **kwargs)

    monkeypatch.setattr(CheckpointStore, "save", noting)
    with monkeypatch.context() as patch:
        cfg = with_checkpoint(sft_config, 0)
        in_step(patch, 2, terminate)
        assert supervised.run(cfg) == Outcome(2, stopped_by=signal.SIGTERM)
    assert (found, saved_steps(cfg)) == ([(2, 2)], [2])
    cfg = with_checkpoint(sft_config, 50)
    assert supervised.run(cfg) == Outcome(3)
    assert found == [(2, 2), (3, 3)]
    use = disk_use(resolve(cfg, ModelFacts.read(cfg.model.path), Devices(kind="cpu")))
    assert use is not None
    (state,) = cfg.run.dir.glob("checkpoints/step_3/trainer.*.safetensors")
    for file, num_bytes in (
        (state, use.state),
        (cfg.run.dir / "model/model.safetensors", use.export),
    ):
        assert num_bytes < file.stat().st_size < 1.05 * num_bytes + 16_000, "with names"


# Of the tiny model of float32: the model has one third of the bytes of its state.
ENDS: dict[str, tuple[int, Callable[[], object] | None, Outcome | type[Exception]]] = {
    # checkpoint.every_n_steps, what comes in step 2, how the run ends
    "after the last step": (50, None, Outcome(3, is_saved=False)),
    "after a signal": (
        0,
        terminate,
        Outcome(2, stopped_by=signal.SIGTERM, is_saved=False),
    ),
    "on the way": (1, None, CheckpointError),
}


@table("end", ENDS)
def test_a_model_that_fits_is_kept_where_its_state_does_not(
    end: str, sft_config: SFTConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every, act, outcome = ENDS[end]
    cfg = with_checkpoint(sft_config, every)
    run_dir = tmp_path / end.replace(" ", "-")
    cfg = cfg.model_copy(update={"run": cfg.run.model_copy(update={"dir": run_dir})})
    if act is not None:
        in_step(monkeypatch, 2, act)
    model_bytes = (Path(cfg.model.path) / "model.safetensors").stat().st_size
    with largest_file(2 * model_bytes):
        if isinstance(outcome, Outcome):
            assert supervised.run(cfg) == outcome
        else:
            with pytest.raises(outcome, match=r"The model of step \d was written"):
                supervised.run(cfg)
    assert exported(cfg) >= 1
    assert saved_steps(cfg) == []
    assert not list(run_dir.rglob("*.partial")), "nothing is left of it"
    unsaved = [e["step"] for e in lines(run_dir / "events.jsonl") if e["kind"] == "unsaved"]
    assert unsaved == ([outcome.steps] if isinstance(outcome, Outcome) else [])


def test_the_state_is_kept_where_its_model_cannot_be_written(
    sft_config: SFTConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can be mended then, and the same command goes on."""
    cfg = with_checkpoint(sft_config, 0)
    save = PreTrainedTokenizerFast.save_pretrained

    def fail(*_: Any, **__: Any) -> None:
        raise ValueError("no such file")

    with monkeypatch.context() as patch:
        in_step(patch, 3, lambda: patch.setattr(PreTrainedTokenizerFast, "save_pretrained", fail))
        with pytest.raises(UserError, match="does not write its tokenizer"):
            supervised.run(cfg)
    assert PreTrainedTokenizerFast.save_pretrained is save
    assert saved_steps(cfg) == [3]
    assert supervised.run(cfg) == Outcome(3)
    assert exported(cfg) == 3


def test_a_run_has_written_its_models_once_the_critic_is_there(make_config: MakeConfig) -> None:
    cfg = make_config(algorithm={"advantage": "gae"})
    found: list[int | None] = []
    for role in ("model", "critic"):
        folder = cfg.run.dir / role
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        manifest = {"content": {"metadata": {"step": 3}}}
        (folder / MANIFEST_NAME).write_text(json.dumps(manifest))
        found.append(exported_step(cfg))
    assert found == [None, 3]


def test_a_run_of_a_version_that_wrote_no_step_has_the_model_of_its_newest_state(
    sft_config: SFTConfig,
) -> None:
    """Which was saved right before; a state that is newer has no model."""
    supervised.run(sft_config)
    manifest = sft_config.run.dir / "model" / MANIFEST_NAME
    document = json.loads(manifest.read_text())
    assert document["content"]["metadata"].pop("step") == 3
    manifest.write_text(json.dumps(document))
    state = sft_config.run.dir / "checkpoints" / "step_3" / MANIFEST_NAME
    saved_s = json.loads(state.read_text())["content"]["metadata"]["saved_at"]
    found: list[tuple[int | None, bool]] = []
    for written_s in (saved_s + 2, saved_s - 2):
        os.utime(manifest, (written_s, written_s))
        found.append((exported_step(sft_config), is_finished(sft_config)))
    assert found == [(3, True), (None, False)]
    shutil.rmtree(state.parent)
    assert exported_step(sft_config) is None


def test_a_model_is_whole_whatever_is_put_into_its_folder_later(make_config: MakeConfig) -> None:
    """As programs that upload it do. Adapters, which are written last, are those of the model."""
    cfg = make_config(model={"lora": {"rank": 2}})
    model, adapters = cfg.run.dir / "model", cfg.run.dir / "adapter" / "adapter_config.json"
    for file in (model / MANIFEST_NAME, adapters):
        file.parent.mkdir(parents=True)
        file.write_text(json.dumps({"content": {"metadata": {"step": 3}}}))
    written = adapters.stat().st_mtime
    found: list[int | None] = []
    for folder, manifest in (
        (written - 1, written - 1),
        (written + 9, written - 1),
        (0, written + 9),
    ):
        os.utime(model / MANIFEST_NAME, (manifest, manifest))
        os.utime(model, (folder, folder))
        found.append(exported_step(cfg))
    assert found == [3, 3, None], "the last are of an earlier model"


def test_a_model_that_an_earlier_launch_left_out_is_written_as_the_last_one_is() -> None:
    """The trainer has the device, and nothing is sampled, where its weights are read."""
    events: list[str] = []

    class Ended:
        launch = SimpleNamespace(steps_done=3, total_steps=3)
        interrupt = nullcontext()
        outcome = Outcome(3)

        def rehearse(self) -> None:
            events.append("rehearse")

        def start(self) -> bool:
            events.append("start")
            return False

        def steps(self) -> Iterator[int]:
            return iter(())

        @contextmanager
        def phase(self, name: str, step: int) -> Generator[None]:
            events.append(f"begin {name}")
            yield
            events.append(f"end {name}")

        def export(self, step: int) -> None:
            events.append(f"export {step}")

    assert train(cast(Any, Ended())) == Outcome(3)
    assert events == ["rehearse", "start", "begin save", "export 3", "end save"]


def test_what_an_export_needs_is_tried_before_the_first_step(
    sft_config: SFTConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise KeyError("vocab_file")

    in_step(monkeypatch, 1, lambda: pytest.fail("a step was made"))
    lora = sft_config.model.model_copy(update={"lora": LoraConfig(rank=2)})
    for name in ("model", "adapter"):
        folder = sft_config.run.dir / name
        folder.mkdir(parents=True)
        (folder / "mine.txt").write_text("")
        with pytest.raises(ValueError, match=f"{name} exists and is not ours to replace"):
            supervised.run(sft_config.model_copy(update={"model": lora}))
        shutil.rmtree(folder)
    monkeypatch.setattr(PreTrainedTokenizerFast, "save_pretrained", fail)
    with pytest.raises(UserError, match=r"its tokenizer.*vocab_file"):
        supervised.run(sft_config)
    assert not [path for path in sft_config.run.dir.iterdir() if "model" in path.suffixes]


def test_what_is_published_is_trained_and_exported_as_it_came(
    sft_config: SFTConfig, inputs: Path, tmp_path: Path
) -> None:
    """Models are published with generation configs that transformers loads and does not save."""
    model = shutil.copytree(inputs / "model", tmp_path / "model")
    given = {"do_sample": False, "temperature": 0.6, "top_p": 0.9, "pad_token_id": -1}
    file = model / "generation_config.json"
    file.write_text(json.dumps(given))
    of_it = sft_config.model.model_copy(update={"path": str(model)})
    cfg = with_checkpoint(sft_config, 0).model_copy(update={"model": of_it})
    supervised.run(cfg)
    written = json.loads((cfg.run.dir / "model" / "generation_config.json").read_text())
    assert {key: written[key] for key in given} == given


def test_a_folder_that_is_deleted_ends_the_run_with_all_that_can_be_saved(
    sft_config: SFTConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = with_checkpoint(sft_config, 0)
    with monkeypatch.context() as patch:
        in_step(patch, 2, lambda: shutil.rmtree(cfg.run.dir))
        with pytest.raises(UserError, match=r"was deleted.*ends after step 2, which is saved"):
            supervised.run(cfg, pages=PAGES)
    assert (exported(cfg), saved_steps(cfg)) == (2, [2])
    assert lines(cfg.run.dir / "events.jsonl")[-1]["kind"] == "error"
    assert "was deleted" in (cfg.run.dir / "report.html").read_text()
    assert supervised.run(cfg).steps == 3, "the same command goes on"


def test_a_folder_that_another_run_has_taken_is_left_to_it(
    sft_config: SFTConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg, others = with_checkpoint(sft_config, 0), list[FolderLock]()

    def replace() -> None:
        shutil.rmtree(cfg.run.dir)
        cfg.run.dir.mkdir()
        others.append(FolderLock(cfg.run.dir))
        (cfg.run.dir / LOCK).write_text("4711\n")  # in another process than this one

    in_step(monkeypatch, 2, replace)
    with pytest.raises(UserError, match=r"was deleted.*another run is at work.*process 4711"):
        supervised.run(cfg, pages=PAGES)
    others.pop().release()
    assert [path.name for path in cfg.run.dir.iterdir()] == [LOCK], "no event and no report either"


def test_a_folder_that_is_deleted_after_a_signal_stays_deleted(
    sft_config: SFTConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else whoever stops a run, deletes its folder and starts anew would go on with the old run."""
    cfg = with_checkpoint(sft_config, 1)

    def stop_and_delete() -> None:
        terminate()
        shutil.rmtree(cfg.run.dir)

    with monkeypatch.context() as patch:
        in_step(patch, 2, stop_and_delete)
        with pytest.raises(UserError, match=r"was deleted.*a signal ends it: step 2 is not saved"):
            supervised.run(cfg, pages=PAGES)
    assert not cfg.run.dir.exists()


@pytest.mark.parametrize("what", ["model", "state"])
def test_a_folder_that_is_deleted_while_the_end_is_written_stays_deleted(
    what: str, sft_config: SFTConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once the model, or once everything has been written: nothing is made anew, and the run does
    not say that it has finished."""
    cfg = with_checkpoint(sft_config, 50)
    place, name = (Run, "export") if what == "model" else (Saver, "last")
    write = getattr(place, name)

    def write_and_lose(*args: Any, **kwargs: Any) -> None:
        write(*args, **kwargs)
        shutil.rmtree(cfg.run.dir)

    monkeypatch.setattr(place, name, write_and_lose)
    with pytest.raises(UserError, match="was deleted while the run wrote its end"):
        supervised.run(cfg, pages=PAGES)
    assert not cfg.run.dir.exists()


def test_a_run_that_still_writes_is_not_read_by_the_next_one(
    sft_config: SFTConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may save another checkpoint, and delete the one that is being read."""
    supervised.run(sft_config)
    lock = FolderLock(sft_config.run.dir)
    monkeypatch.setattr(CheckpointStore, "load", lambda *_, **__: pytest.fail("it was read"))
    with pytest.raises(UserError, match=rf"another run is at work.*process {os.getpid()}\. Wait"):
        supervised.run(sft_config)
    lock.release()


def test_a_file_system_without_locks_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As Lustre without `-o flock`, or a bucket that is mounted as a folder."""

    def flock(file: object, operation: int) -> None:
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(UserError, match=rf"run\.dir '{tmp_path}' has no locks.*not impl.*flock"):
        FolderLock(tmp_path)


class EndsInDel:
    """Receives a signal where Python swallows what handlers raise."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __del__(self) -> None:
        os.kill(os.getpid(), self.number)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@table("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_signal_that_python_swallows_ends_the_block(number: signal.Signals) -> None:
    wanted = KeyboardInterrupt if number == signal.SIGINT else Terminated
    went_on: list[int] = []

    def signalled() -> None:
        with terminable():
            EndsInDel(number)
            went_on.append(number)

    with pytest.raises(wanted):
        signalled()
    assert went_on, "the exception was not swallowed, and the test shows nothing"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_signal_that_python_swallows_ends_the_run_before_its_first_step(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    load = reinforce.load_for_training

    def loading(*args: Any, **kwargs: Any) -> Any:
        EndsInDel(signal.SIGTERM)
        return load(*args, **kwargs)

    monkeypatch.setattr(reinforce, "load_for_training", loading)
    cfg = make_config()
    assert reinforce.run(cfg) == Outcome(0, stopped_by=signal.SIGTERM)
    assert lines(cfg.run.dir / "events.jsonl")[-1]["kind"] == "interrupted"


def test_a_signal_says_how_long_the_run_writes(
    sft_config: SFTConfig, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("hone.loops.run._RATE_BYTES", 1 << 12)
    in_step(monkeypatch, 2, terminate)
    supervised.run(with_checkpoint(sft_config, 0))
    told = capfd.readouterr().err
    assert "SIGTERM: the run ends after this step" in told
    assert "s to write, then the state (" in told
    words = time_in_words(3_400_000_000, 24_000_000_000, 1.2e9)
    assert "the model (3.4 GB) takes about 3 s to write, then the state (24.0 GB) 20 s" in words
