"""What reads the files for schedulers and the packages of a release says that they are right.

`make test-launch` runs these tests, in an environment of their own that adds the parsers to what
the tests have (`constraints-launch.txt`). Only that of the image needs a network: it asks the
package index what its requirements resolve to.
"""

from __future__ import annotations

import importlib
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

from hone.config.load import dump_config
from hone.extras import is_installed
from tests.cluster.hosts import HERE, PYTHON, SCRATCH, Command, hosts
from tests.launch.distribution import ROOT, build, run
from tests.launch.image import copied, instructions, pip_installs
from tests.tiny_runs import lines, tiny_config, write_inputs

FOLDER = ROOT / "examples/launch"
BIN = Path(sys.executable).parent
PARSERS = ("aiohttp_cors", "kubernetes_validate", "sky", "twine", "uv")
KUBERNETES = ("1.31", "1.37")
"""The oldest version in which fields of these files are stable, and the newest that is known."""
RUN_S = 900.0
"""Ends a job that hangs."""

pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(
        not all(map(is_installed, PARSERS)), reason="make test-launch has the parsers"
    ),
]


@pytest.mark.parametrize("version", KUBERNETES)
@pytest.mark.parametrize("name", sorted(p.name for p in FOLDER.glob("kubernetes*")))
def test_kubernetes_knows_every_field(name: str, version: str) -> None:
    library = importlib.import_module("kubernetes_validate")
    documents = [*yaml.safe_load_all((FOLDER / name).read_text())]
    for document in documents:
        library.validate(document, version, strict=True)
    documents[-1]["spec"]["template"]["spec"]["restartPolicies"] = "Never"
    with pytest.raises(library.ValidationError, match="restartPolicies"):
        library.validate(documents[-1], version, strict=True)


READING = """
import json, sys
import sky, yaml
from sky.skylet import constants

with open(sys.argv[1]) as file:
    task = sky.Task.from_yaml_config(yaml.safe_load(file), secrets_overrides=[("HONE_KEY", "k")])
(resources,) = task.resources
variables = [value for value in vars(constants).values() if isinstance(value, str)]
print(json.dumps({
    "num_nodes": task.num_nodes,
    "accelerators": resources.accelerators,
    "secrets": list(task.secrets),
    "volumes": task.volumes,
    "run": task.run,
    "variables": [name for name in variables if name.startswith("SKYPILOT_")],
}))
"""
"""In a process of its own, whose home is empty: SkyPilot writes there."""


def test_skypilot_reads_the_task(tmp_path: Path) -> None:
    told = run(
        *(sys.executable, "-c", READING, FOLDER / "skypilot.yaml"),
        cwd=tmp_path,
        env=os.environ | {"HOME": f"{tmp_path}", "SKYPILOT_DISABLE_USAGE_COLLECTION": "1"},
    )
    found = json.loads(told.splitlines()[-1])
    assert (found["num_nodes"], found["accelerators"]) == (2, {"H200": 8})
    assert (found["secrets"], found["volumes"]) == (["HONE_KEY"], {"/runs": "hone-runs"})
    used = set(re.findall(r"\$\{?(SKYPILOT_\w+)", found["run"]))
    assert len(used) == 4
    assert used <= set(found["variables"])


def test_packages_pass_the_check_of_the_index(tmp_path: Path) -> None:
    """Among others the long description can be rendered."""
    built = build(tmp_path)
    told = run(sys.executable, "-m", "twine", "check", "--strict", built.wheel, built.sdist)
    assert told.count("PASSED") == 2


def test_what_the_image_installs_can_be_installed_there(tmp_path: Path) -> None:
    """For the Python and the system of its base, from the files that it copies."""
    copied(tmp_path)
    for words in pip_installs():
        options, requirements = words[:3], words[3:]
        assert options[:2] == ["--no-cache-dir", "--constraint"]
        constraints = tmp_path / options[2].removeprefix("/")
        (tmp_path / "in.txt").write_text("\n".join(_placed(requirements, tmp_path)))
        resolved = run(
            *(BIN / "uv", "pip", "compile", "--quiet", "--no-cache", "--no-annotate"),
            *("--python-version", "3.12", "--python-platform", "x86_64-manylinux_2_39"),
            *("--constraint", constraints, tmp_path / "in.txt"),
        )
        versions = dict(re.findall(r"(?m)^([\w.-]+)==(\S+)", resolved))
    wanted = dict(re.findall(r"(?m)^([\w.-]+)==(\S+)", constraints.read_text()))
    assert versions["torch"] == wanted["torch"]
    assert {"flash-attn-4", "fla-core", "ray", "starlette"} <= set(versions)
    ((_, base), *_) = instructions()
    assert base.split(":")[1].split(".")[0] == versions["nvidia-cuda-runtime"].split(".")[0]


def _placed(requirements: list[str], root: Path) -> Iterator[str]:
    """Requirements with the folder `/src` below `root`."""
    for text in requirements:
        extras = text.removeprefix("/src")
        yield text if extras == text else f"hone-rl{extras} @ {(root / 'src').as_uri()}"


REAPING = """
import ctypes, os, sys

ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER
os.spawnvp(os.P_NOWAIT, sys.argv[1], sys.argv[1:])
while True:
    os.wait()
"""
"""Runs a command and waits for whatever it leaves behind, as the first process of a machine does,
or tini in the image: `ray job stop` counts a process that nobody has waited for as one that
works."""


def test_a_job_of_ray_is_stopped_with_everything_saved_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the page has it, on a host of its own, whose ports are free. The engine is Ray's."""
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")  # no token in the home folder
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    write_inputs(inputs)
    cluster = {"num_engines": 1, "address": "auto"}
    cfg = tiny_config(HERE, HERE / "run", run={"steps": 5000}, cluster=cluster)
    (inputs / "recipe.yaml").write_text(dump_config(cfg))
    for name, module in (("ray", "ray.scripts.scripts"), ("hone", "hone")):
        program = inputs / name
        program.write_text(f'#!/bin/sh\nexec "{PYTHON}" -m {module} "$@"\n')
        program.chmod(0o755)
    rows = inputs / "run/metrics.jsonl"
    with hosts(tmp_path, "head", shared=inputs) as (head,):
        monkeypatch.setenv("PATH", f"{HERE}{os.pathsep}{os.environ['PATH']}")
        words = ("start", "--head", "--block", "--num-cpus", "2", "--temp-dir", SCRATCH / "ray")
        ray = head.start(PYTHON, "-c", REAPING, "ray", *words)
        ray.await_(lambda: "Ray runtime started" in ray.told, RUN_S)

        job = head.start(FOLDER / "ray_job.sh", "recipe.yaml")
        job.await_(lambda: rows.exists() and len(lines(rows)) > 2, RUN_S)
        head.run("ray", "job", "stop", _name(job), timeout_s=RUN_S)
        job.wait(RUN_S)
        step = lines(rows)[-1]["step"]
        assert f"stopped and saved after step {step}" in job.told, job.told

        again = head.start(FOLDER / "ray_job.sh", "recipe.yaml", "--run.steps", f"{step + 1}")
        assert again.wait(RUN_S) == 0, again.told
        assert [row["step"] for row in lines(rows)] == [*range(1, step + 2)]


def _name(job: Command) -> str:
    (name,) = set(re.findall(r"raysubmit_\w+", job.told))
    return name
