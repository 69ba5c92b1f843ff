"""Packages that only some settings need: absent, broken, or shadowed by a folder (R25)."""

from __future__ import annotations

import re
import sys
import tomllib
from itertools import chain
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from hone import extras, flash4
from hone.errors import UserError
from hone.extras import import_extra, is_installed, missing_extra

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]
OF_OTHERS = {"cuda-bindings", "ray[default]", "sglang==0.5.15", "torch", "triton"}
"""Requirements of messages and pages that are no dependency of hone: what builds of torch bring,
and what others need, in an environment of their own."""
_INSTALL = re.compile(
    r"pip install(?: --constraint \S+| --?[a-z-]+)*((?: '[^'{ ]+')+| [\w.][\w.=<>-]*)"
)


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


def required() -> set[str]:
    """The lines of dependencies and extras, without markers."""
    lines = chain(PROJECT["dependencies"], *EXTRAS.values())
    return {line.partition(";")[0].strip() for line in lines}


def test_R25_what_is_told_to_install_is_a_dependency_or_an_extra() -> None:
    of_torch = {"cuda-bindings", "triton"}  # its CUDA builds bring them
    told = set(extras.INSTALL.values()) - of_torch | set(flash4.REQUIREMENTS)
    assert told <= required()


def is_known(word: str, known: set[str]) -> bool:
    if own := re.fullmatch(r"(?:\.|hone-rl)(?:\[([\w,]+)\])?", word):
        return set((own[1] or "data").split(",")) <= set(EXTRAS)
    return word in known


def test_R25_every_line_for_pip_names_what_can_be_installed() -> None:
    """In sources, recipes and pages: an extra that there is, or a requirement as `pyproject.toml`
    has it (or the name alone)."""
    files = [*(ROOT / "src").rglob("*.py"), *(ROOT / "src").rglob("*.yaml")]
    files += [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    files += [file for kind in ("py", "sh", "yaml", "md") for file in EXAMPLES.rglob(f"*.{kind}")]
    known = required() | {Requirement(line).name for line in required()} | OF_OTHERS
    wrong: list[str] = []
    num_lines = 0
    for file in files:
        for words in _INSTALL.findall(file.read_text()):
            named = [word.strip("'") for word in words.split()]
            wrong += [f"{file.name}: {word}" for word in named if not is_known(word, known)]
            num_lines += 1
    assert wrong == []
    assert num_lines > 10


def test_a_module_inside_a_package(site: Path) -> None:
    (site / "extra_x").mkdir()
    (site / "extra_x" / "__init__.py").touch()
    (site / "extra_x" / "part.py").write_text("value = 3")
    part = import_extra("extra_x", module="extra_x.part", needed_by="this")
    assert part.value == 3
