"""The Dockerfile, without Docker: what it says, and that the files which it copies are enough."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from hone.version import __version__
from tests.launch.distribution import ROOT, build
from tests.launch.image import copied, instructions, pip_installs

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
OF_GPU_HOSTS = {"data", "flash", "hybrid", "images", "ray", "serve"}
_APT = re.compile(
    r"apt-get update && apt-get install --yes --no-install-recommends((?: [a-z0-9.+-]+)+) "
    r"&& rm -rf /var/lib/apt/lists/\*"
)


def told(keyword: str) -> list[str]:
    return [arguments for found, arguments in instructions() if found == keyword]


def test_its_base_is_a_version_with_a_python_that_hone_supports() -> None:
    (base,) = told("FROM")
    assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-base-ubuntu24\.04", base)  # Python 3.12
    assert "Programming Language :: Python :: 3.12" in PROJECT["classifiers"]


def test_what_it_starts_is_installed_and_runs_as_no_root() -> None:
    (packages,) = [match[1].split() for text in told("RUN") if (match := _APT.fullmatch(text))]
    assert {"gcc", "python3-dev", "python3-venv", "tini"} <= set(packages)
    assert told("ENTRYPOINT") == ['["tini", "--"]']
    assert told("CMD") == ['["hone", "doctor"]']
    (user,) = told("USER")
    added = [text for text in told("RUN") if text.startswith("useradd ")]
    assert len(added) == 1
    assert re.match(rf"useradd --create-home --uid \d{{4}} {user} ", added[0])
    order = [keyword for keyword, _ in instructions()]
    assert order.index("USER") < order.index("COPY"), "pip and hone run as that user"


def test_every_run_is_of_a_known_form() -> None:
    forms = (_APT.pattern, r"useradd .*", r"python3 -m venv /opt/hone", r"pip install .*")
    for text in told("RUN"):
        assert any(re.fullmatch(form, text) for form in forms), text
    assert told("ENV") == ["PATH=/opt/hone/bin:$PATH"]


def test_it_installs_hone_with_extras_that_there_are() -> None:
    first, second = pip_installs()
    options = ["--no-cache-dir", "--constraint", "/src/constraints.txt"]
    assert first == [*options, "torch", "transformers"]
    assert second[:3] == options
    (extras,) = re.findall(r"/src\[(.*)\]", second[3])
    assert set(extras.split(",")) == OF_GPU_HOSTS
    assert set(PROJECT["optional-dependencies"]) >= OF_GPU_HOSTS
    page = (ROOT / "docs/launching.md").read_text()
    named = re.search(r"holds the extras ((?:`\w+`(?:, | and )?)+)", page)
    assert named is not None
    assert set(re.findall(r"\w+", named[1])) - {"and"} == OF_GPU_HOSTS
    for text in (page, (ROOT / "Dockerfile").read_text()):
        assert f"docker build --tag hone:{__version__} ." in text


def test_the_files_that_it_copies_make_hones_wheel(tmp_path: Path) -> None:
    """And Docker is given just these."""
    names = copied(tmp_path)
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert ignored[0] == "*"
    assert sorted(line[1:] for line in ignored if line.startswith("!")) == sorted(names)
    built = build(tmp_path / "built", tmp_path / "src")
    assert built.metadata["Version"] == __version__
    assert (tmp_path / "src/constraints.txt").is_file()
