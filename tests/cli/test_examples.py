"""The recipes of `examples/`: each passes its check, on the GPUs that it is said to be for."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hone.config.hardware import gpu_peaks
from hone.config.load import load_config
from hone.config.model_facts import ModelFacts
from hone.config.plan import Devices, resolve
from hone.config.rules import findings
from hone.config.tree import RLConfig
from hone.planner.fitting import check_gpu_memory
from tests.config import workspace as files

EXAMPLES = Path(__file__).parents[2] / "examples"
RECIPES = sorted(str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.yaml"))
_ROW = re.compile(r"\]\((\S+)\) \|.*\|\s*([^|]*?)\s*\|$", re.MULTILINE)
ROWS = dict(_ROW.findall((EXAMPLES / "README.md").read_text()))
"""By file: the GPUs in its row of the table."""
GPUS = {"80": "A100", "48": "L40S"}
QWEN3 = files.MODEL_CONFIG | {"head_dim": 128, "num_key_value_heads": 8, "vocab_size": 151_936}
SIZES: dict[str, dict[str, Any]] = {
    "Qwen3-1.7B": QWEN3
    | dict(zip(("hidden_size", "intermediate_size"), (2048, 6144), strict=True)),
    "Qwen3-4B": QWEN3 | dict(zip(("hidden_size", "intermediate_size"), (2560, 9728), strict=True)),
    "Qwen3-8B": QWEN3 | dict(zip(("hidden_size", "intermediate_size"), (4096, 12288), strict=True)),
    "Qwen2-7B-Instruct": QWEN3
    | {
        "model_type": "qwen2",
        "hidden_size": 3584,
        "intermediate_size": 18944,
        "num_key_value_heads": 4,
        "vocab_size": 152_064,
    },
}
LAYERS = {"Qwen3-1.7B": (28, 16), "Qwen3-4B": (36, 32), "Qwen3-8B": (36, 32)}


def with_local_model(recipe: str, folder: Path) -> RLConfig:
    """The recipe with a model of the same shape, without weights, and one row of data."""
    name = load_config(RLConfig, EXAMPLES / recipe, []).model.path.rpartition("/")[2]
    layers, heads = LAYERS.get(name, (28, 28))
    shape = SIZES[name] | {
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "max_position_embeddings": 32_768,
        "tie_word_embeddings": name in ("Qwen3-1.7B", "Qwen3-4B"),
    }
    (folder / "model" / "config.json").write_text(json.dumps(shape))
    local = ["--model.path=model", "--data.train=[{path: train.jsonl}]"]
    return load_config(RLConfig, EXAMPLES / recipe, local)


def num_processes(recipe: str, cfg: RLConfig) -> int:
    """As the command in the file's comment says."""
    said = re.search(r"--nproc (\d+)", (EXAMPLES / recipe).read_text())
    return int(said[1]) if said else cfg.cluster.num_trainers


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    files.fill(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("recipe", RECIPES)
def test_R22_every_example_passes_its_check_and_fits(recipe: str, folder: Path) -> None:
    shipped = load_config(RLConfig, EXAMPLES / recipe, [])
    cfg = with_local_model(recipe, folder)
    nproc = num_processes(recipe, cfg)
    gpus, gib = re.fullmatch(r"([\d +]+) of (\d+) GB", ROWS[recipe]).groups()  # type: ignore[union-attr]
    gpu = gpu_peaks(GPUS[gib])
    assert gpu is not None
    for each in (shipped, cfg):
        facts, devices = ModelFacts.known(each.model.path), Devices(kind="cuda", gpu=gpu)
        plan = resolve(each, facts, devices, world_size=nproc)
        assert [finding.message for finding in findings(plan)] == []
        assert [*check_gpu_memory(plan)] == []
    sampling = cfg.cluster.num_engines * cfg.engine.tensor_parallel_size
    assert [int(n) for n in gpus.split("+")] == [nproc, *([sampling] if sampling else [])]


def test_every_example_is_in_the_table() -> None:
    scripts = [path.name for path in EXAMPLES.glob("*.sh")]
    assert sorted(ROWS) == sorted([*RECIPES, *scripts])


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
