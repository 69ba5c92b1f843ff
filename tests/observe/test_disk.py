"""A disk that is full: whole records or none, and a message with path, key and sizes."""

import errno
import json
import re
import resource
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from safetensors import SafetensorError

from hone.config.run import LogConfig
from hone.observe.disk import AppendedFile, DiskError, writing
from hone.observe.loggers import RunLog
from hone.observe.trackers import TensorBoardTracker
from hone.observe.whole_file import write_whole


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
