"""The files of `examples/launch`: scripts are sound, files agree with each other and with the page,
and the command of the Indexed Job is stopped and goes on over two hosts."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from hone.config.load import dump_config, load_config
from hone.config.recipe import resolve_recipe
from hone.config.tree import RLConfig
from hone.version import __version__
from tests.cluster.hosts import HERE, PYTHON, Command, hosts
from tests.launch.distribution import ROOT
from tests.tiny_runs import lines, tiny_config, write_inputs

FOLDER = ROOT / "examples/launch"
PAGE = (ROOT / "docs/launching.md").read_text()
BIN = Path(sys.executable).parent
FINISH_S = 840
"""What torchrun leaves its processes in these files; each scheduler leaves torchrun more."""


def documents(name: str) -> list[dict[str, Any]]:
    return [*yaml.safe_load_all((FOLDER / name).read_text())]


def job(name: str) -> dict[str, Any]:
    (found,) = [document for document in documents(name) if document["kind"] == "Job"]
    return found


def pod(name: str) -> dict[str, Any]:
    return job(name)["spec"]["template"]["spec"]


def container(name: str) -> dict[str, Any]:
    (only,) = pod(name)["containers"]
    return only


def script(name: str) -> str:
    """The program for a shell that a file is, or holds."""
    text = (FOLDER / name).read_text()
    if not name.endswith(".yaml"):
        return text
    task = yaml.safe_load(text)
    return f"#!/bin/bash\n{task['setup']}\n{task['run']}"


def flags(words: list[str]) -> list[str]:
    """What follows the recipe in a command `hone rl RECIPE ...`, but for `--nproc N`."""
    own = words[words.index("rl") + 2 :]
    if "--nproc" in own:
        del own[own.index("--nproc") : own.index("--nproc") + 2]
    return own


@pytest.mark.parametrize("name", [*sorted(p.name for p in FOLDER.glob("*.sh")), "skypilot.yaml"])
def test_scripts_pass_shellcheck(name: str) -> None:
    told = subprocess.run(
        [BIN / "shellcheck", "--severity=style", "-"],
        input=script(name),
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stdout + told.stderr


def test_the_page_names_every_file_and_every_file_is_a_program_or_a_document() -> None:
    names = sorted(path.name for path in FOLDER.iterdir())
    assert sorted(re.findall(r"\]\(\.\./examples/launch/(\S+)\)", PAGE)) == names
    for path in FOLDER.glob("*.sh"):
        assert os.access(path, os.X_OK), path
        assert path.read_text().startswith("#!/usr/bin/env bash\n"), path


def test_slurm_signals_the_step_of_the_run_alone() -> None:
    """Steps are numbered by their `srun`, and the last one is hone's."""
    text = script("slurm_async.sh")
    steps = re.findall(r"(?m)^srun .*\\\n +(\w+) ", text)
    assert steps == ["ray", "ray", "hone"]
    assert "trap 'scancel --signal TERM \"$SLURM_JOB_ID.2\"' TERM" in text


def test_the_commands_of_files_are_commands_of_hone() -> None:
    commands = [container("kubernetes_job.yaml")["args"]]
    commands.append(container("kubernetes_indexed_job.yaml")["args"])
    commands.append(script("skypilot.yaml").split())
    commands.append(["rl", "gsm8k", "--run.dir", "run"])
    assert " --run.dir run &&" in script("hf_job.sh")
    for words in commands:
        assert words[words.index("rl") - 1 : words.index("rl")] in (["hone"], [])
        cfg = load_config(RLConfig, resolve_recipe("quickstart-rl"), flags(words))
        assert str(cfg.run.dir) in ("/runs/mine", "run")


def test_the_indexed_job_is_one_run_of_its_pods() -> None:
    name = "kubernetes_indexed_job.yaml"
    whole, words = job(name), container(name)["args"]
    spec, of_pod = whole["spec"], pod(name)
    others = {document["kind"]: document for document in documents(name)}
    service, policy = others["Service"], others["NetworkPolicy"]["spec"]
    number = spec["completions"]
    assert spec["completionMode"] == "Indexed"
    assert (spec["parallelism"], f"--nnodes={number}") == (number, words[1])
    assert of_pod["subdomain"] == service["metadata"]["name"]
    first = f"{whole['metadata']['name']}-0.{of_pod['subdomain']}"
    assert f"--rdzv-endpoint={first}:29500" in words
    labels = spec["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == labels
    assert policy["podSelector"]["matchLabels"] == labels
    assert policy["ingress"] == [{"from": [{"podSelector": {"matchLabels": labels}}]}]
    assert "HONE_KEY" in {variable["name"] for variable in container(name)["env"]}


@pytest.mark.parametrize("name", ["kubernetes_job.yaml", "kubernetes_indexed_job.yaml"])
def test_jobs_of_kubernetes_use_the_image_and_all_gpus(name: str) -> None:
    own = container(name)
    (gpus,) = own["resources"]["limits"].values()
    words = " ".join(own["args"]).replace("--nproc-per-node=", "--nproc ")
    assert f"--nproc {gpus} " in words
    assert own["image"].endswith(f"/hone:{__version__}")
    user = re.search(r"--uid (\d+)", (ROOT / "Dockerfile").read_text())
    assert user is not None
    assert pod(name)["securityContext"]["runAsUser"] == int(user[1])
    assert {mount["name"] for mount in own["volumeMounts"]} == {
        volume["name"] for volume in pod(name)["volumes"]
    }


def test_each_scheduler_waits_longer_than_torchrun_and_the_page_says_how_long() -> None:
    environment = {v["name"]: v for v in container("kubernetes_indexed_job.yaml")["env"]}
    of_pods = environment["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]["value"]
    (of_slurm,) = re.findall(
        r"export TORCH_ELASTIC_SHUTDOWN_TIMEOUT=(\d+)", script("slurm_colocated.sh")
    )
    assert (of_pods, of_slurm) == (f"{FINISH_S}", f"{FINISH_S}")
    waits = [pod(name)["terminationGracePeriodSeconds"] for name in
             ("kubernetes_job.yaml", "kubernetes_indexed_job.yaml")]  # fmt: skip
    for name in ("slurm_colocated.sh", "slurm_async.sh"):
        waits += map(int, re.findall(r"(?m)^#SBATCH --signal=(?:B:)?TERM@(\d+)$", script(name)))
    waits += map(int, re.findall(r'"RAY_JOB_STOP_WAIT_TIME_S": "(\d+)"', script("ray_job.sh")))
    assert waits == [900] * 5
    rows = PAGE.partition("| who stops |")[2].partition("\n\n")[0]
    assert f"`TORCH_ELASTIC_SHUTDOWN_TIMEOUT={FINISH_S}`" in rows
    assert rows.count("900") == 4
    assert min(waits) > FINISH_S


def test_hugging_face_resolves_the_job(tmp_path: Path) -> None:
    """The client of the hub, which would submit it."""
    client = tmp_path / "hf"
    client.write_text(f'#!/bin/sh\nshift 2\nexec "{BIN / "hf"}" jobs run --dry-run "$@"\n')
    client.chmod(0o755)
    own = {"PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}", "HOME": str(tmp_path)}
    told = subprocess.run(
        [FOLDER / "hf_job.sh", "image:1", "org/model", "gsm8k", "--run.steps", "3", "--x", "a b"],
        env=os.environ | own | {"HF_TOKEN": "hf_secret"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stdout + told.stderr
    command = "hone rl gsm8k --run.steps 3 --x a\\ b --run.dir run && hf upload org/model run/model"
    assert f"bash -c '{command}'" in told.stdout
    assert re.search(r"flavor +h200x8\n", told.stdout)
    assert "hf_secret" not in told.stdout


@pytest.mark.slow
def test_the_indexed_job_is_stopped_by_one_pod_and_goes_on(tmp_path: Path) -> None:
    """Two hosts, one process each. SIGTERM reaches torchrun of the second alone."""
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    write_inputs(inputs)
    cfg = tiny_config(HERE, HERE / "run", run={"steps": 5000}, checkpoint={"every_n_steps": 0})
    (inputs / "recipe.yaml").write_text(dump_config(cfg))
    args = container("kubernetes_indexed_job.yaml")["args"]
    replaced = {"--nproc-per-node=8": "--nproc-per-node=1", "/runs/mine": f"{HERE / 'run'}"}
    words = [replaced.get(word, word.replace("/runs", f"{HERE}")) for word in args[1:]]
    environment = {"HONE_KEY": "a secret", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": f"{FINISH_S}"}

    with hosts(tmp_path, "hone-0.hone", "hone-1.hone", shared=inputs) as pods:

        def start(*more: str) -> list[Command]:
            torchrun = (PYTHON, "-m", "torch.distributed.run", *words, *more)
            return [pod.start(*torchrun, **environment) for pod in pods]

        first, second = start()
        rows = inputs / "run/metrics.jsonl"
        second.await_(lambda: rows.exists() and len(lines(rows)) > 2, FINISH_S)
        second.send_signal(signal.SIGTERM)
        assert first.wait(FINISH_S) == second.wait(FINISH_S) == 1, first.told + second.told
        step = lines(rows)[-1]["step"]
        assert f"stopped and saved after step {step}" in first.told
        assert (inputs / "run/model/model.safetensors").is_file()
        for _ in ("goes on", "has finished"):
            for command in start("--run.steps", f"{step + 1}"):
                assert command.wait(FINISH_S) == 0, command.told
            assert [row["step"] for row in lines(rows)] == [*range(1, step + 2)]
