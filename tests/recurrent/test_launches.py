"""Launch parameters of the package's kernels: which are found, and where the package reads them."""

from __future__ import annotations

import json
import os
import sys
from types import ModuleType

import pytest
import torch

from hone.attention.recurrent import launches

KERNELS = {
    "causal_conv1d_fwd_kernel",
    "causal_conv1d_bwd_kernel",
    "l2norm_fwd_kernel",
    "l2norm_bwd_kernel",
    "chunk_local_cumsum_scalar_kernel",
    "chunk_gated_delta_rule_fwd_kkt_solve_kernel",
    "recompute_w_u_fwd_kernel",
    "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
    "chunk_fwd_kernel_o",
    "chunk_bwd_kernel_dv_local",
    "chunk_gated_delta_rule_bwd_kernel_dhu_blockdim64",
    "prepare_wy_repr_bwd_kernel",
}
"""Those that `fla_rule` and `fla_convolution` call."""
FIELDS = {"kwargs", "num_warps", "num_stages", "num_ctas", "maxnreg"}
GPU = torch.device("cuda")
NAMES = ("FLA_CACHE_MODE", "FLA_CONFIG_DIR")


def variables() -> dict[str, str]:
    return {name: os.environ[name] for name in NAMES if name in os.environ}


def test_each_kernel_has_a_file_as_the_package_reads_it():
    files = list(launches.FOLDER.iterdir())
    assert {file.name for file in files} == {f"{name}.json" for name in KERNELS}
    for file in files:
        found = json.loads(file.read_text(encoding="utf-8"))
        assert found["kernel_name"] == file.stem
        assert set(found["default_config"]) == FIELDS


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A Hopper GPU, and the package, which is not imported yet."""
    for name in NAMES:
        monkeypatch.setenv(name, "")  # so that it is taken back
        monkeypatch.delenv(name)
    monkeypatch.setattr(launches, "is_installed", lambda name: name == "fla")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.delitem(sys.modules, "fla", raising=False)
    return monkeypatch


def test_the_package_reads_them_on_hopper_gpus(environment: pytest.MonkeyPatch):
    launches.use_found_launches(GPU)
    assert variables() == dict(zip(NAMES, ("default", str(launches.FOLDER)), strict=True))


@pytest.mark.parametrize("reason", ["cpu", "other GPU", "not installed", "imported", "own folder"])
def test_nothing_is_set_elsewhere(environment: pytest.MonkeyPatch, reason: str):
    if reason == "other GPU":
        environment.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    elif reason == "not installed":
        environment.setattr(launches, "is_installed", lambda name: False)
    elif reason == "imported":
        environment.setitem(sys.modules, "fla", ModuleType("fla"))
    elif reason == "own folder":
        environment.setenv("FLA_CONFIG_DIR", "/mine")
    before = variables()
    launches.use_found_launches(torch.device("cpu") if reason == "cpu" else GPU)
    assert variables() == before


def test_models_are_built_after_it(environment: pytest.MonkeyPatch):
    """transformers imports the package with the model's module."""
    from hone.models import load
    from hone.models.settings import ModelConfig

    seen: list[torch.device] = []
    environment.setattr(launches, "use_found_launches", seen.append)
    load._options(ModelConfig(path="somewhere"), GPU)
    assert seen == [GPU]
