"""A cache of a library that cannot be written: its path, and the variable that names another."""

import errno
import os
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from hone import hub
from hone.cli.main import main
from hone.errors import UserError
from hone.models.settings import ModelConfig
from hone.models.tokenizer import load_tokenizer
from hone.observe.caches import unwritten
from hone.observe.disk import DiskError
from hone.observe.user_errors import raises_user_errors
from tests.cli.test_main import raising
from tests.tables import table


@pytest.fixture(autouse=True)
def caches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Caches in a folder of the test, where no place counts as full."""
    monkeypatch.setattr(constants, "HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("HF_HUB_CACHE", "HF_DATASETS_CACHE", "TRITON_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("hone.observe.caches.free_bytes", lambda path: 1 << 40)
    return tmp_path


def failed(code: int, *path: object) -> OSError:
    return OSError(code, os.strerror(code), *path)


@table("code", [errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EACCES])
@table("place, variable", [("hf/hub/x", "HF_HOME"), (".triton/cache/x", "TRITON_CACHE_DIR")])
def test_a_path_in_a_cache_names_its_variable(
    caches: Path, code: int, place: str, variable: str
) -> None:
    text = unwritten(failed(code, str(caches / place)))
    assert text is not None
    key = f"{variable} in the environment"
    assert text.startswith(f"Could not write {caches / place} ({key}): [Errno {code}] ")
    assert text.endswith(
        f"Free some space or set {key} to another place."
        if code in (errno.ENOSPC, errno.EDQUOT)
        else f"Set {key} to a place that can be written."
    )


def test_the_innermost_variable_that_is_set_is_named(
    caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    error = failed(errno.ENOSPC, str(caches / "hf" / "datasets" / "x"))
    assert "(HF_HOME in" in str(unwritten(error))
    monkeypatch.setenv("HF_DATASETS_CACHE", str(caches / "hf" / "datasets"))
    assert "(HF_DATASETS_CACHE in" in str(unwritten(error))


def test_an_error_without_a_path_is_of_the_place_that_is_full(
    caches: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a download in Rust, which is neither an OSError."""
    error = RuntimeError("Data processing error: No space left on device (os error 28)")
    assert unwritten(error) is None
    for name, variable in (("hf", "HF_HOME"), (".triton", "TRITON_CACHE_DIR")):
        full = caches / name
        monkeypatch.setattr(
            "hone.observe.caches.free_bytes", lambda path, full=full: 0 if path == full else 1 << 40
        )
        text = str(unwritten(error))
        assert text.startswith(f"Could not write {full} ({variable} in the environment): Data ")
    assert unwritten(failed(errno.EROFS)) is None


def test_other_errors_are_of_no_cache(caches: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hone.observe.caches.free_bytes", lambda path: 0)
    for error in (
        failed(errno.ENOENT, str(caches / "hf" / "x")),
        failed(errno.EACCES, str(caches / "rows.jsonl")),
        failed(errno.EACCES),
        ValueError("no space left"),
    ):
        assert unwritten(error) is None
    own = DiskError("Could not write runs/x (run.dir)")
    own.__cause__ = failed(errno.ENOSPC)
    assert unwritten(own) is None


def test_a_tokenizer_that_finds_no_space_is_not_missing(
    caches: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The libraries' error is wrapped on its way: as if the model were not there."""

    def full(place: str, **settings: object) -> None:
        raise failed(errno.ENOSPC, str(caches / "hf" / "hub" / "blob"))

    monkeypatch.setattr(hub, "unreachable", lambda: None)
    monkeypatch.setattr("hone.models.tokenizer.AutoTokenizer.from_pretrained", full)
    load = raises_user_errors(lambda: load_tokenizer(ModelConfig(path="no-one/nothing")))
    with pytest.raises(UserError, match=r"^Could not write .*/hub/blob \(HF_HOME in"):
        load()


def test_the_command_line_says_so_of_any_error(
    caches: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("HONE_TRACEBACK", raising=False)
    error = RuntimeError("a kernel was not built")
    error.__cause__ = failed(errno.EROFS, str(caches / ".triton" / "cache" / "x"))
    monkeypatch.setitem(sys.modules, "hone.cli.rl", raising(error))
    assert main(["rl"]) == 2
    text = capsys.readouterr().err
    assert text.startswith(f"error: Could not write {caches / '.triton/cache/x'} (TRITON_CACHE_DIR")
    assert "Traceback" not in text
