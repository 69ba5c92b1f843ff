"""OpenMP's settings: made before torch is loaded, inherited, and never over the user's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hone.distributed import openmp
from hone.distributed.openmp import num_threads_for, set_up_openmp
from hone.families.shape import ModelShape
from tests.tables import table
from tests.tiny_runs import tiny_config, write_inputs

QUICKSTART = ModelShape(
    family="qwen3",
    num_layers=2,
    hidden_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    intermediate_size=384,
    vocab_size=20,
    tied=True,
)
SMALL = ModelShape(
    family="qwen3",
    num_layers=28,
    hidden_size=1024,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    intermediate_size=3072,
    vocab_size=151936,
    tied=True,
)
PASSIVE = {"OMP_WAIT_POLICY": "PASSIVE"}


@table(
    "asked, given, made",
    [
        (("cpu", QUICKSTART, 1), {}, PASSIVE | {"OMP_NUM_THREADS": "1"}),
        (("auto", QUICKSTART, 1), {}, PASSIVE | {"OMP_NUM_THREADS": "1"}),
        (("cpu", SMALL, 1), {}, PASSIVE),  # all cores, as torch counts them
        (("cpu", SMALL, 2), {}, PASSIVE | {"OMP_NUM_THREADS": "4"}),
        (("cpu", SMALL, 32), {}, PASSIVE | {"OMP_NUM_THREADS": "1"}),
        (("cpu", None, 1), {}, PASSIVE),
        (("cpu", QUICKSTART, 1), {"OMP_NUM_THREADS": "3"}, PASSIVE),
        (("cpu", None, 1), {"OMP_WAIT_POLICY": "ACTIVE"}, {}),
        (("cpu", None, 1), {"GOMP_SPINCOUNT": "100"}, {}),
        (("cpu", None, 1), {"KMP_BLOCKTIME": "200"}, {}),
        (("cuda", QUICKSTART, 1), {}, {}),
    ],
)
def test_what_is_set_and_what_is_left(
    asked: tuple[str, ModelShape | None, int],
    given: dict[str, str],
    made: dict[str, str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(openmp, "num_usable_cores", lambda: 8)
    monkeypatch.setattr(openmp.psutil, "cpu_count", lambda logical: 4)
    monkeypatch.setattr(openmp, "max_gpus", lambda visible: 0)
    device, shape, num_processes = asked
    environment = dict(given)
    set_up_openmp(device, shape, num_processes=num_processes, environment=environment)
    assert environment == given | made


def test_a_run_that_finds_a_gpu_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    environment: dict[str, str] = {}
    monkeypatch.setattr(openmp, "max_gpus", lambda visible: 1)
    set_up_openmp("auto", QUICKSTART, environment=environment)
    assert environment == {}
    set_up_openmp("cpu", QUICKSTART, environment=environment)
    assert environment["OMP_WAIT_POLICY"] == "PASSIVE"


def test_threads_grow_with_the_layers_and_not_with_their_number() -> None:
    assert num_threads_for(QUICKSTART, 64) == 1
    assert num_threads_for(SMALL, 64) > 32
    assert num_threads_for(SMALL, 8) == 8


REPORT = """\
import json, os
names = ("OMP_WAIT_POLICY", "OMP_NUM_THREADS")
def score(completion):
    seen = {name: os.environ.get(name) for name in names}
    open(PATH, "w").write(json.dumps(seen))
    return 1.0
"""


@pytest.mark.parametrize("nproc", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_settings_are_there_before_torch_and_in_every_process(
    nproc: int, tmp_path: Path
) -> None:
    """torch itself says with how many threads it computes and how they wait."""
    write_inputs(tmp_path)
    seen = tmp_path / "seen.json"
    (tmp_path / "rewards.py").write_text(REPORT.replace("PATH", repr(str(seen))))
    cfg = tiny_config(tmp_path, tmp_path / "run", run={"steps": 1})
    reward = json.dumps([{"fn": f"{tmp_path / 'rewards.py'}:score"}])
    flags = ["--nproc", str(nproc), "--reward.functions", reward]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(cfg.model_dump_json(exclude_defaults=True))
    plain = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "KMP_"))}
    # libgomp prints what it was told when it is loaded, with torch.
    done = subprocess.run(
        [sys.executable, "-m", "hone", "rl", str(recipe), *flags],
        env=plain | {"OMP_DISPLAY_ENV": "verbose"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    told = [line.strip() for line in done.stderr.splitlines()]
    assert told.count("GOMP_SPINCOUNT = '0'") >= nproc, "else threads spin"
    assert told.count("OMP_NUM_THREADS = '1'") >= nproc, "a tiny model has work for one thread"
    assert json.loads(seen.read_text()) == PASSIVE | {"OMP_NUM_THREADS": "1"}
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    assert 0 < row["perf/cpu_share"] < 1.2
    assert row["perf/load_per_core"] > 0
