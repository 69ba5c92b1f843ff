"""Packages that only some settings need: absent, broken, or shadowed by a folder (R25)."""

from __future__ import annotations

import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest

from hone import extras, flash4
from hone.errors import UserError
from hone.extras import import_extra, is_installed, missing_extra


def check_told(words: str) -> None:
    with pytest.raises(UserError, match=rf"log\.x needs the `extra_x` .*{words}.*'extra-x>=3'"):
        import_extra("extra_x", needed_by="log.x")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder on the import path; what is imported from it is forgotten afterwards."""
    monkeypatch.setitem(extras.INSTALL, "extra_x", "extra-x>=3")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("extra_x", "extra_x.part"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    return tmp_path


def test_R25_an_absent_package_is_named(site: Path) -> None:
    assert not is_installed("extra_x")
    check_told("not installed")


def test_R25_a_folder_of_that_name_is_no_package(site: Path) -> None:
    (site / "extra_x").mkdir()
    assert not is_installed("extra_x")
    check_told("not installed")


@pytest.mark.parametrize(
    "code",
    ["import a_module_that_is_missing", "import sys; sys.nothing", "raise OSError('lib.so')"],
)
def test_R25_a_broken_package_is_not_called_absent(site: Path, code: str) -> None:
    (site / "extra_x.py").write_text(code)
    assert is_installed("extra_x")
    assert missing_extra("extra_x", needed_by="log.x") is None  # nothing of it was run
    check_told("broken: .*--force-reinstall")


def test_R25_what_is_told_to_install_is_a_dependency_or_an_extra() -> None:
    of_torch = {"cuda-bindings", "triton"}  # its CUDA builds bring them
    told = set(extras.INSTALL.values()) - of_torch | set(flash4.REQUIREMENTS)
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    lines = chain(project["dependencies"], *project["optional-dependencies"].values())
    assert told <= {line.partition(";")[0].strip() for line in lines}


def test_a_module_inside_a_package(site: Path) -> None:
    (site / "extra_x").mkdir()
    (site / "extra_x" / "__init__.py").touch()
    (site / "extra_x" / "part.py").write_text("value = 3")
    part = import_extra("extra_x", module="extra_x.part", needed_by="this")
    assert part.value == 3
