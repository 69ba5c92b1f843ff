"""The wheel and the sdist of this tree, and an environment with just what the wheel requires.

The environment needs no package index: it links to the distributions that the wheel requires, which
the environment of the tests has too. Whatever else that one has (pytest, extras, hone itself) is
not there, so that a dependency which `pyproject.toml` does not name is missed.
"""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

import pytest
from packaging.requirements import Requirement

__all__ = ["ROOT", "Built", "Installed", "build", "install", "run", "unpack"]

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Built:
    """What `hatchling build` has made."""

    wheel: Path
    sdist: Path

    @property
    def metadata(self) -> Message:
        """The wheel's METADATA; its payload is the long description."""
        with zipfile.ZipFile(self.wheel) as archive:
            (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
            return Parser().parsestr(archive.read(name).decode())


@dataclass(frozen=True)
class Installed:
    """A virtual environment, and a folder in which its commands run."""

    bin: Path
    folder: Path

    def run(self, *words: str) -> str:
        """Run a command of the environment to its end, which must be a good one; what it prints."""
        own = {"PATH": f"{self.bin}{os.pathsep}/usr/bin{os.pathsep}/bin", "HOME": f"{self.folder}"}
        environment = own | {"OMP_NUM_THREADS": "1", "LANG": "C.UTF-8"}
        return run(self.bin / words[0], *words[1:], cwd=self.folder, env=environment)


def build(folder: Path, root: Path = ROOT) -> Built:
    """Build `root` as `pip` does, but with the backend that is installed here."""
    run(sys.executable, "-m", "hatchling", "build", "-d", folder, cwd=root)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    return Built(wheel, sdist)


def unpack(sdist: Path, folder: Path) -> Path:
    """Unpack an sdist; the folder that holds its files."""
    with tarfile.open(sdist) as archive:
        archive.extractall(folder, filter="data")
    (root,) = folder.iterdir()
    return root


def install(built: Built, folder: Path) -> Installed:
    """Install the wheel into a new environment in `folder`. Fails the test where something that the
    wheel requires is missing."""
    environment = folder / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment)
    python = environment / "bin" / "python"
    paths = sysconfig.get_paths("venv", vars={"base": f"{environment}"})
    for required in required_distributions(built.metadata.get_all("Requires-Dist", [])):
        _link(required, Path(paths["purelib"]))
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-index", "--quiet"]
    run(*pip, built.wheel)
    work = folder / "work"
    work.mkdir()
    return Installed(environment / "bin", work)


def required_distributions(requirements: Iterable[str]) -> list[Distribution]:
    """The distributions that requirements without extras need, with those that these need."""
    found: dict[str, Distribution] = {}
    seen: set[tuple[str, str]] = set()
    left = [(Requirement(text), "") for text in requirements]
    while left:
        requirement, extra = left.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        for own in {"", *requirement.extras}:
            if (requirement.name, own) in seen:
                continue
            seen.add((requirement.name, own))
            try:
                dist = distribution(requirement.name)
            except PackageNotFoundError:
                pytest.fail(f"{requirement} is required, and is not installed", pytrace=False)
            found[dist.name] = dist
            left += [(Requirement(text), own) for text in dist.requires or []]
    return [*found.values()]


def _link(dist: Distribution, site: Path) -> None:
    """Link to the top folders and files of a distribution."""
    for name in {file.parts[0] for file in dist.files or []} - {"..", "__pycache__"}:
        if not (site / name).exists():
            (site / name).symlink_to(Path(f"{dist.locate_file(name)}"))


def run(*words: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Run a command to its end, which must be a good one; what it prints."""
    told = subprocess.run(
        words, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False
    )
    output = told.stdout.decode(errors="replace")
    assert told.returncode == 0, f"{[*map(str, words)]} ended with {told.returncode}:\n{output}"
    return output
