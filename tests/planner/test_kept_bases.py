"""What engines apart keep of an adapted model in host memory, against what they do keep."""

from __future__ import annotations

import pytest

from hone.cli.main import main
from hone.config.load import load_config
from hone.config.tree import RLConfig
from hone.planner.fitting import check_host_memory
from hone.planner.memory import kept_base_bytes
from hone.planner.model_shape import ModelShape, public_shape
from hone.planner.run_memory import derived_run_memory, engine_rank_host_bytes
from tests.weights.test_adapted import CASES, Setting

GIB = 1 << 30
RUN = (
    "--model.path=Qwen/Qwen3-8B",
    "--data.train=[{path: public/data}]",
    "--model.lora.rank=32",
    "--cluster.num_engines=4",
)


def configured(*flags: str) -> RLConfig:
    return load_config(RLConfig, None, [*RUN, *flags])


def shape() -> ModelShape:
    found = public_shape("qwen3-8b")
    assert found is not None
    return found


@pytest.mark.parametrize("case", CASES)
def test_the_plan_is_what_ranks_keep(case: str) -> None:
    """An engine of one rank, and one of two."""
    setting = Setting(case)
    setting.push()
    lora, trained, _ = CASES[case]
    small = ModelShape.from_config(setting.trainer.model.config.to_dict())
    for receivers in setting.engines.receivers.values():
        planned = kept_base_bytes(
            small, lora, num_bytes=trained.itemsize, tensor_parallel_size=len(receivers)
        )
        for receiver in receivers:
            kept = receiver._base
            assert kept is not None
            assert sum(tensor.nbytes for tensor in kept.tensors.values()) == planned > 0
    setting.close()


def test_hone_check_has_a_line_for_it() -> None:
    (line,) = derived_run_memory(
        configured("--engine.tensor_parallel_size=2"), shape(), world_size=None, gpu=None
    )
    assert (line.name, line.value) == ("engine_rank_host_gib", pytest.approx(13.9 / 2, abs=0.5))
    assert "of each of 8 engine ranks" in line.how
    for flag in ("--model.lora.rank=0", "--cluster.num_engines=0"):
        assert engine_rank_host_bytes(configured(flag), shape()) == 0
        assert derived_run_memory(configured(flag), shape(), world_size=None, gpu=None) == []


def test_a_host_that_cannot_hold_them_is_refused() -> None:
    cfg = configured()
    kept = engine_rank_host_bytes(cfg, shape())
    assert [*check_host_memory(cfg, shape(), host_bytes=4 * kept)] == []
    (found,) = check_host_memory(cfg, shape(), host_bytes=4 * kept - 1)
    assert found.level == "error"
    assert all(key in found.message for key in found.keys)
    told = f"4 ranks of {kept / GIB:.1f} GiB (model.lora) take {4 * kept / GIB:.1f}."
    assert told in found.message
    elsewhere = configured("--cluster.address=head:6379")
    assert [*check_host_memory(elsewhere, shape(), host_bytes=1)] == []


def test_hone_check_refuses_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["check", "rl", *RUN, "--run.device=cpu", "--cluster.num_engines=400"]) == 2
    assert "400 ranks of " in " ".join(capsys.readouterr().out.split())
