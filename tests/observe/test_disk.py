"""A disk that is full: whole records or none, and a message with path, key and sizes."""

import errno
import json
import os
import re
import resource
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from hone.cli import import_, quickstart
from hone.cli.recipes import copy_recipe
from hone.config.run import LogConfig
from hone.data.arithmetic import write_jsonl
from hone.data.given import GivenRows
from hone.door.security import read_key
from hone.observe.disk import (
    TEMPORARY,
    AppendedFile,
    DiskError,
    temporary_directory,
    temporary_folder,
    writing,
)
from hone.observe.loggers import RunLog
from hone.observe.trackers import TensorBoardTracker
from hone.observe.whole_file import write_whole
from hone.recipes.inputs import write_inputs as recipe_inputs


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """No file of this process grows beyond it: the write that would takes a part, as on a full
    disk, and the next one fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def write_rows(folder: Path) -> None:
    with RunLog(folder, LogConfig(to=())) as log:
        for step in range(1, 100):
            log.log(step, {"reward/mean": 0.5})


def write_scalars(folder: Path) -> None:
    logger = TensorBoardTracker(folder, None)
    for step in range(1, 100):
        logger.log(step, {"reward/mean": 0.5})


def write_text(folder: Path) -> None:
    write_whole(folder / "config.yaml", "x" * 3000, "run.dir")


@pytest.mark.parametrize(
    ("write", "name"),
    [
        (write_rows, "metrics.jsonl"),
        (write_scalars, "tensorboard/events.out.tfevents"),
        (write_text, "config.yaml"),
    ],
)
def test_the_error_says_where_which_key_and_how_much(
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    write: Callable[[Path], None],
    name: str,
) -> None:
    num_threads = threading.active_count()
    with largest_file(2000), pytest.raises(DiskError) as caught:
        write(tmp_path)
    text = str(caught.value)
    assert text.startswith(f"Could not write {tmp_path / name}")
    assert re.search(r"\(run\.dir\): .*; it needs [0-9,]+ bytes, [0-9,]+ bytes are free", text)
    assert threading.active_count() <= num_threads
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("problem", "advice"),
    [
        (OSError(errno.ENOSPC, "x"), "Free some space or set run.dir to another place."),
        (OSError(errno.EDQUOT, "x"), "Free some space or set run.dir to another place."),
        (
            SafetensorError("Error: No space left on device (os error 28)"),
            "Free some space or set run.dir to another place.",
        ),
        (OSError(errno.EACCES, "x"), "Set run.dir to a place that can be written."),
        (OSError(errno.EROFS, "x"), "Set run.dir to a place that can be written."),
        (NotADirectoryError(errno.ENOTDIR, "x"), "Set run.dir to a place that can be written."),
        (
            SafetensorError("Error: Permission denied (os error 13)"),
            "Set run.dir to a place that can be written.",
        ),
    ],
)
def test_space_is_asked_for_only_where_it_is_missing(
    tmp_path: Path, problem: Exception, advice: str
) -> None:
    with pytest.raises(DiskError) as caught, writing(tmp_path / "a", "run.dir"):
        raise problem
    assert str(caught.value).endswith(f" {advice}")
    assert str(caught.value).count("Free some space") == advice.count("Free some space")


def test_a_folder_that_may_not_be_entered_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even whether what lies in it exists can be asked there."""
    real, closed = os.stat, tmp_path / "closed"

    def stat(path: str | Path, **settings: Any) -> os.stat_result:
        if closed in Path(path).parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return real(path, **settings)

    closed.mkdir()
    monkeypatch.setattr(os, "stat", stat)
    with pytest.raises(DiskError) as caught, writing(closed / "run" / "a", "run.dir"):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    assert str(caught.value).endswith("are free there. Set run.dir to a place that can be written.")


def test_temporary_files_that_have_no_place_name_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "gone"))
    for make in (temporary_folder, temporary_directory):
        with pytest.raises(DiskError) as caught:
            make("hone-")
        text = str(caught.value)
        assert text.startswith(f"Could not write {tmp_path / 'gone'} (TMPDIR in the environment): ")
        assert text.endswith("Set TMPDIR in the environment to a place that can be written.")
    with pytest.raises(DiskError, match=f"{tmp_path}/none"):
        temporary_folder("hone-", tmp_path / "none")


def write_key(folder: Path) -> None:
    read_key(folder / "key")


def copy_a_recipe(folder: Path) -> None:
    copy_recipe("gsm8k", folder / "own.yaml")


def convert(folder: Path) -> None:
    (folder / "run.sh").write_text("python -m verl.trainer.main_ppo data.train_batch_size=8\n")
    assert not import_.run(["verl", str(folder / "run.sh"), "--output", str(folder / "own.yaml")])


def given_rows(folder: Path) -> None:
    GivenRows.of("train", [{"prompt": "x" * 3000}]).write(folder, TEMPORARY)


def problems(folder: Path) -> None:
    write_jsonl(folder / "train.jsonl", [{"prompt": "x" * 3000}])


@pytest.mark.parametrize(
    ("write", "name", "key"),
    [
        (write_key, "key", "serve.key_file"),
        (copy_a_recipe, "own.yaml", "the argument PATH"),
        (convert, "own.yaml", "--output"),
        (given_rows, r"\w+/train.jsonl", re.escape(TEMPORARY)),
        (problems, "train.jsonl", "--dir"),
    ],
)
def test_every_file_that_does_not_fit_names_what_chose_its_place(
    tmp_path: Path, write: Callable[[Path], None], name: str, key: str
) -> None:
    write(tmp_path)
    for file in [*tmp_path.glob("*")]:
        shutil.rmtree(file) if file.is_dir() else file.unlink()
    with largest_file(60 if write is convert else 10), pytest.raises(DiskError) as caught:
        write(tmp_path)
    assert re.match(rf"Could not write {tmp_path}/{name} \({key}\): ", str(caught.value))
    left = {file.name for file in tmp_path.rglob("*") if file.is_file()}
    assert left <= {"run.sh"}, "a part that the next start would read"


def test_inputs_of_recipes_that_do_not_fit_end_without_a_traceback(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def make(folder: Path, seed: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("sys.argv", ["x", "--dir", str(tmp_path)])
    with pytest.raises(SystemExit) as ended:
        recipe_inputs("hone.recipes.search_inputs", None, {"search": make}, drawn="data")
    assert ended.value.code == 2
    told = f"Could not write {tmp_path / 'search'} (--dir): [Errno 28] No space left on device; "
    assert told in capsys.readouterr().err


def test_a_quick_start_that_does_not_fit_names_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(folder: Path, seed: int) -> None:
        raise SafetensorError("Error: No space left on device (os error 28)")

    monkeypatch.setattr(quickstart, "make_inputs", make)
    with pytest.raises(DiskError, match=r"\(--dir\): .* Free some space or set --dir"):
        quickstart.run(["--dir", str(tmp_path / "quick")])


def test_a_record_that_does_not_fit_leaves_no_part(tmp_path: Path) -> None:
    with largest_file(2000), pytest.raises(DiskError):
        write_rows(tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, len(rows) + 1))
    file = AppendedFile(tmp_path / "a", "run.dir")
    with largest_file(10):
        file.write(b"12345678")
        with pytest.raises(DiskError, match="it needs 5 bytes"):
            file.write(b"abcde")
    file.write(b"9")
    assert (tmp_path / "a").read_bytes() == b"123456789"


def test_a_text_that_does_not_fit_leaves_the_former_one(tmp_path: Path) -> None:
    write_whole(tmp_path / "config.yaml", "before", "run.dir")
    with largest_file(2000), pytest.raises(DiskError, match="it needs 3,000 bytes"):
        write_text(tmp_path)
    assert [file.read_text() for file in tmp_path.iterdir()] == ["before"]
