"""The recipes of `examples/`: each passes its check, on the GPUs that it is said to be for."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hone.config.load import load_config
from hone.config.plan import Devices, RunPlan, resolve
from hone.config.tree import RLConfig
from hone.families.model_facts import ModelFacts
from hone.families.shape import public_configs
from hone.hardware import gpu_peaks
from hone.planner.fitting import check_gpu_memory
from hone.rules import findings
from tests.cli.planned_figures import PLAN, planned_comment
from tests.config import workspace as files
from tests.tables import table

EXAMPLES = Path(__file__).parents[2] / "examples"
LAUNCHERS = sorted(path.relative_to(EXAMPLES).as_posix() for path in EXAMPLES.glob("launch/*"))
RECIPES = sorted({str(p.relative_to(EXAMPLES)) for p in EXAMPLES.rglob("*.yaml")} - {*LAUNCHERS})
_ROW = re.compile(r"\]\((\S+)\) \|.*\|\s*([^|]*?)\s*\|$", re.MULTILINE)
ROWS = dict(_ROW.findall((EXAMPLES / "README.md").read_text()))
"""By file: the GPUs in its row of the table."""
GPUS = {"80": "A100", "48": "L40S"}
PER_NODE = 8
QWEN2 = files.MODEL_CONFIG | {
    "model_type": "qwen2",
    "head_dim": 128,
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_attention_heads": 28,
    "num_hidden_layers": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152_064,
    "max_position_embeddings": 32_768,
    "tie_word_embeddings": False,
}
"""Of 7B, which is no public name of hone's."""


def with_local_model(recipe: str, folder: Path) -> RLConfig:
    """The recipe with a model of the same shape, without weights, and one row of data."""
    name = load_config(RLConfig, EXAMPLES / recipe, []).model.path.rpartition("/")[2]
    public = public_configs().get(name.lower().removesuffix("-instruct").removesuffix("-base"))
    shape = QWEN2 if public is None else {**files.MODEL_CONFIG, **public}
    (folder / "model" / "config.json").write_text(json.dumps(shape))
    local = ["--model.path=model", "--data.train=[{path: train.jsonl}]"]
    return load_config(RLConfig, EXAMPLES / recipe, local)


def num_processes(recipe: str, cfg: RLConfig) -> int:
    """As the command in the file's comment says."""
    said = re.search(r"--nproc (\d+)", text := (EXAMPLES / recipe).read_text())
    nodes = re.search(r"--nodes (\d+) .*slurm_colocated", text)
    if nodes:
        return PER_NODE * int(nodes[1])
    return int(said[1]) if said else cfg.cluster.num_trainers


def plan_of(recipe: str) -> RunPlan:
    """As it is shipped, on nodes with the GPUs of its row."""
    cfg = load_config(RLConfig, EXAMPLES / recipe, [])
    return resolved(recipe, cfg, num_processes(recipe, cfg), per_node=PER_NODE)


def resolved(recipe: str, cfg: RLConfig, nproc: int, *, per_node: int | None = None) -> RunPlan:
    """`per_node` tells fast links from slow ones; None: of GPUs that are not here."""
    gpu = gpu_peaks(GPUS[ROWS[recipe].split(" of ")[1].split()[0]])
    assert gpu is not None
    devices = Devices(kind="cuda", gpu=gpu, per_node=per_node)
    return resolve(cfg, ModelFacts.known(cfg.model.path), devices, world_size=nproc)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    files.fill(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@table("recipe", RECIPES)
def test_R22_every_example_passes_its_check_and_fits(recipe: str, folder: Path) -> None:
    shipped = load_config(RLConfig, EXAMPLES / recipe, [])
    cfg = with_local_model(recipe, folder)
    nproc = num_processes(recipe, cfg)
    (gpus,) = re.fullmatch(r"([\d +]+) of \d+ GB", ROWS[recipe]).groups()  # type: ignore[union-attr]
    for each in (shipped, cfg):
        plan = resolved(recipe, each, nproc)
        assert [finding.message for finding in findings(plan, can_install=True)] == []
        assert [*check_gpu_memory(plan)] == []
    sampling = cfg.cluster.num_engines * cfg.engine.tensor_parallel_size
    apart = [number for number in (sampling, cfg.cluster.num_critics) if number]
    assert [int(n) for n in gpus.split("+")] == [nproc, *apart]


@table("recipe", [r for r in RECIPES if PLAN.search((EXAMPLES / r).read_text())])
def test_the_plan_in_a_comment_is_what_the_planner_says(recipe: str) -> None:
    """After a change: `python -m tests.cli.planned_figures`."""
    found = PLAN.search((EXAMPLES / recipe).read_text())
    assert found is not None
    assert found[0] == planned_comment(plan_of(recipe))


def test_every_large_recipe_has_its_plan() -> None:
    large = [r for r in RECIPES if r.startswith("large/")]
    assert len(large) == 6
    for recipe in ("hybrid.yaml", *large):
        assert PLAN.search((EXAMPLES / recipe).read_text()), recipe


def test_every_example_is_in_the_table() -> None:
    assert sorted(ROWS) == sorted([*RECIPES, *LAUNCHERS])


def test_X1_the_16_gpu_template_of_20_is_refused_with_its_sum() -> None:
    """Reference, reward, critic and actor of 4 GPUs each beside two engines of 2: the trainers'
    part of it, 16, leaves none to engines."""
    cfg = load_config(
        RLConfig,
        EXAMPLES / "split_16.yaml",
        ["--cluster.num_trainers=16", "--cluster.num_engines=2"],
    )
    plan = resolve(cfg, None, Devices(), world_size=16)
    (told,) = [x.message for x in findings(plan) if x.level == "error"]
    assert "the number of devices of all roles is 20" in told
    assert "(cluster.num_nodes 2 x cluster.devices_per_node 8 = 16)" in told
