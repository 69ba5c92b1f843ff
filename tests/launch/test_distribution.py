"""What a release would hold: it is built, read, installed without a clone, and trains."""

from __future__ import annotations

import re
import tomllib
import zipfile
from pathlib import Path

import pytest
from packaging.version import Version

from hone.version import __version__
from tests.launch.distribution import ROOT, Built, build, install, unpack

PACKAGE = ROOT / "src" / "hone"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return build(tmp_path_factory.mktemp("built"))


def contents(wheel: Path) -> dict[str, int]:
    """Checksums of a wheel's files by their paths."""
    with zipfile.ZipFile(wheel) as archive:
        return {entry.filename: entry.CRC for entry in archive.infolist()}


def test_the_wheel_is_the_package_and_nothing_else(built: Built) -> None:
    files = (path for path in PACKAGE.rglob("*") if path.is_file())
    wanted = {
        path.relative_to(PACKAGE.parent).as_posix()
        for path in files
        if "__pycache__" not in path.parts
    }
    found = {name for name in contents(built.wheel) if ".dist-info/" not in name}
    assert found == wanted
    assert {"hone/py.typed", "hone/recipes/quickstart-rl.yaml", "hone/config/aliases.yaml"} <= found
    assert {"hone/tools/report/page.html.jinja", "hone/tools/report/page.css"} <= found


def test_the_sdist_makes_the_same_wheel(built: Built, tmp_path: Path) -> None:
    root = unpack(built.sdist, tmp_path / "unpacked")
    again = build(tmp_path / "again", root)
    assert contents(again.wheel) == contents(built.wheel)
    for name in ("tests/conftest.py", "docs/tutorial.md", "examples/loop.py", "constraints.txt"):
        assert (root / name).is_file(), name


def test_the_long_description_is_the_readme_without_links_into_the_repository(
    built: Built,
) -> None:
    text = built.metadata.get_payload()
    assert isinstance(text, str)
    links = re.findall(r"\]\(([^)]*)\)", text) + re.findall(r'(?:src|srcset|href)="([^"]*)"', text)
    assert [link for link in links if not link.startswith(("https://", "#"))] == []
    assert built.metadata["Description-Content-Type"] == "text/markdown"
    readme = (ROOT / "README.md").read_text()
    for heading in re.findall(r"(?m)^#+ .*", readme):
        assert heading in text, heading
    assert len(text) > 0.8 * len(readme)


def test_the_metadata_are_those_of_the_project(built: Built) -> None:
    metadata = built.metadata
    assert metadata["Version"] == __version__
    assert set(metadata.get_all("Provides-Extra", [])) == set(PROJECT["optional-dependencies"])
    assert metadata.get_all("Classifier") == PROJECT["classifiers"]
    lowest, highest = re.findall(r"3\.(\d+)", PROJECT["requires-python"])
    minors = [re.fullmatch(r".* :: 3\.(\d+)", text) for text in PROJECT["classifiers"]]
    assert [int(m[1]) for m in minors if m] == [*range(int(lowest), int(highest))]


def test_the_version_is_the_newest_of_the_changelog_or_comes_after_it() -> None:
    """`make dist` asks for more: that this version has its section."""
    headings = re.findall(r"(?m)^## (.*)", (ROOT / "CHANGELOG.md").read_text())
    assert headings[0] == "Unreleased"
    dated = [re.fullmatch(r"(\d+\.\d+\.\d+) - \d{4}-\d\d-\d\d", text) for text in headings[1:]]
    assert all(dated), headings
    versions = [Version(match[1]) for match in dated if match]
    assert versions == sorted(set(versions), reverse=True)
    assert all(Version(__version__) >= version for version in versions)


SHORT = """
from hone.cli import quickstart

call, steps = quickstart._call, {"sft": "30", "rl": "8"}
quickstart._call = lambda command, words: call(command, [*words, "--run.steps", steps[command]])
raise SystemExit(quickstart.run([]))
"""
"""`hone quickstart` with fewer steps."""


@pytest.mark.slow
def test_an_installed_wheel_trains_without_a_clone(built: Built, tmp_path: Path) -> None:
    """With what it requires and nothing else, away from the sources."""
    installed = install(built, tmp_path)
    place = installed.run("python", "-c", "import hone; print(hone.__file__)").strip()
    assert Path(place).is_relative_to(tmp_path)
    assert installed.run("hone", "--version").split()[:2] == ["hone", __version__]
    told = installed.run("python", "-c", SHORT)
    assert "Held-out accuracy" in told, told
    folder = installed.folder / "runs" / "quickstart"
    for command in ("sft", "rl"):
        assert (folder / command / "report.html").is_file()
        assert (folder / command / "model" / "model.safetensors").is_file()
