"""The package `fla` may be installed or not: on a CPU nothing of it is used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hone import extras
from hone.attention.recurrent import kernels

# transformers takes the functions of the package, wherever it can import it, for its own layers.
STAND_IN = {
    "fla/__init__.py": "__version__ = '0.6.0'\n",
    "fla/ops/__init__.py": "",
    "fla/modules/__init__.py": "",
    "fla/ops/gated_delta_rule/__init__.py": """
def refuse(query, key, value, g, beta, initial_state=None, output_final_state=False, **rest):
    raise RuntimeError("kernels of fla were called")
chunk_gated_delta_rule = fused_recurrent_gated_delta_rule = refuse
""",
    "fla/modules/convolution.py": """
def causal_conv1d(*values, **rest):
    raise RuntimeError("kernels of fla were called")
""",
}
PROGRAM = """
import json, sys, torch
from hone.attention.recurrent.kernels import has_fla
from hone.extras import is_installed
from tests.recurrent.models import hybrid_model, passes_of, rows_of
from hone.trainer.collating import collate
from hone.families.registry import inputs_of
torch.manual_seed(0)
model = hybrid_model(torch.float32)
rows = rows_of([(3, 2), (3, 40)], prompt=[1, 2, 3])
inputs = inputs_of(model.config)
found = []
for prefixes in (None, [3, 3]):
    batch = collate(rows, [1.0] * 2, "cpu", prefixes=prefixes, inputs=inputs)
    found.append(passes_of(model).forward(batch, frozenset({"logprobs"}))["logprobs"])
found[1].sum().backward()
print(json.dumps([is_installed("fla"), [x.tolist() for x in found]]))
"""


def printed(*folders: Path) -> str:
    root = Path(__file__).parents[2]
    path = os.pathsep.join(map(str, (*folders, root / "src", root)))
    words = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(
        words, env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def test_numbers_on_a_cpu_are_the_same_with_the_package(tmp_path: Path):
    for name, text in STAND_IN.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    with_package = printed(tmp_path)
    assert with_package.startswith("[true")
    if not extras.is_installed("fla"):
        assert with_package.replace("[true", "[false", 1) == printed()


def test_the_package_computes_16_bit_products_on_a_gpu_alone(monkeypatch: pytest.MonkeyPatch):
    class OnGpu:
        is_cuda, dtype = True, torch.bfloat16

    for installed in (set[str](), {"fla"}, {"triton"}, {"fla", "triton"}):
        monkeypatch.setattr(kernels, "is_installed", lambda name, have=installed: name in have)
        kernels.has_fla.cache_clear()
        assert kernels._uses_fla(OnGpu()) == (len(installed) == 2)
    OnGpu.dtype = torch.float32
    assert not kernels._uses_fla(OnGpu())
    kernels.has_fla.cache_clear()
