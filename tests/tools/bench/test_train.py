"""`hone bench train` from the command line to its files, on a CPU with a tiny model."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from hone.cli.command import plan_here
from hone.cli.main import main
from hone.config import schema
from hone.config.bench import RowsConfig
from hone.config.tree import BenchTrainConfig
from hone.models.tiny import make_tiny_model
from hone.rules import findings
from hone.tools.bench import train
from hone.trainer.optimizer import Optimizer
from tests.tables import table
from tests.tools.bench.test_command import output

BASE = ("bench", "train", "--model.path=model", "--model.init=random", "--run.device=cpu")
SMALL = ("--steps=2", "--warmup_steps=1", "--trainer.max_tokens_per_microbatch=40")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.delenv("HONE_TRACEBACK", raising=False)
    make_tiny_model(tmp_path / "model", num_layers=2, hidden_size=32, weights=False)
    for name in (tmp_path / "model").glob("tokenizer*"):
        name.unlink()
    return tmp_path


def matrices():
    """Numbers of weights in products of a layer, all layers, and in the head."""
    config = AutoConfig.from_pretrained("model")
    model = AutoModelForCausalLM.from_config(config)
    body = sum(p.numel() for n, p in model.named_parameters() if "embed" not in n)
    return config, body, config.vocab_size * config.hidden_size


def flops_by_hand(lengths, num_trained):
    """2 FLOPs a weight and token, 4 a head, head size and visible key; thrice a forward."""
    config, body, head = matrices()
    pairs = sum(n * n for n in lengths) / 2
    attention = 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * pairs
    return 3 * (2 * body * sum(lengths) + 2 * head * num_trained + attention)


def test_rows_end_to_end(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = ("--rows.tokens=20", "--rows.per_step=4")
    text = output(capsys, *BASE, *SMALL, *rows, "--output=out/t.json")
    for label in ("tokens/s", "optimizer step", "utilisation, step, of measured", "activations"):
        assert label in text
    assert "model: 4 rows of 20 tokens a step" in text
    assert "data-sheet" not in text
    found = json.loads((folder / "out/t.json").read_text())
    speed, steps = found["speed"], found["steps"]
    assert found["workload"] == {"num_rows": 4, "num_tokens": 80}
    assert len(steps["step_s"]) == 2
    assert speed["step_s"] == statistics.median(steps["step_s"])
    assert speed["tokens_per_s"] == pytest.approx(80 / speed["step_s"])
    assert speed["tokens_per_s_per_device"] == speed["tokens_per_s"]
    assert speed["num_micro_batches"] == 2  # of 40 tokens at most
    for passes, optimizer, step in zip(
        steps["forward_backward_s"], steps["optimizer_s"], steps["step_s"], strict=True
    ):
        assert 0 < optimizer < passes
        assert 0.5 * step < passes + optimizer <= step
    flops = flops_by_hand([20] * 4, 76)
    assert speed["model_flops_per_step"] == pytest.approx(flops)
    rate = found["device"]["measured_flops_per_s"]
    assert speed["utilisation"]["step"] == {
        "of_measured": pytest.approx(flops / (speed["step_s"] * rate)),
        "of_datasheet": None,
    }
    assert found["config"]["rows"] == {"per_step": 4, "tokens": 20}
    memory, planned = found["memory"]["played_back"], found["memory"]["planned"]
    num_params = found["model"]["num_params"]
    for kind, num_bytes in {"weights": 4, "masters": 0, "gradients": 4, "optimizer": 8}.items():
        assert memory["largest"][kind] == num_bytes * num_params == planned[kind]
    assert sum(memory["at_peak"].values()) == memory["peak"] == found["memory"]["peak"]
    assert 0 < memory["largest"]["activations"] < memory["peak"]


def bench(*flags: str) -> dict:
    assert main((*BASE, *SMALL, "--rows.tokens=16", "--rows.per_step=5", *flags)) == 0
    return json.loads(Path("bench-train.json").read_text())


@pytest.mark.usefixtures("folder")
def test_what_is_computed_again_does_not_count() -> None:
    plain, again = bench(), bench("--trainer.recompute=full")
    expected = flops_by_hand([16] * 5, 75)
    assert plain["speed"]["model_flops_per_step"] == pytest.approx(expected)
    assert again["speed"]["model_flops_per_step"] == pytest.approx(expected)
    kept = [x["memory"]["played_back"]["largest"]["activations"] for x in (plain, again)]
    assert kept[1] < kept[0] / 3
    planned = [x["memory"]["planned"]["activations"] for x in (plain, again)]
    assert planned[1] < planned[0] / 3


class Clock:
    """Stands for the module `time`; it goes on where a test says so."""

    now = 0.0

    def perf_counter(self) -> float:
        self.now += 1e-6  # whoever asks twice gets no division by zero
        return self.now


@pytest.mark.usefixtures("folder")
def test_warm_up_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    update, calls, clock = train.Trainer.update, [], Clock()

    def slow_at_first(self, rows):
        calls.append(len(rows))
        clock.now += 100.0 if len(calls) <= 2 else 1.0
        return update(self, rows)

    monkeypatch.setattr(train, "time", clock)
    monkeypatch.setattr(train.Trainer, "update", slow_at_first)
    found = bench("--warmup_steps=2", "--steps=3")
    assert calls == [5] * 6  # two to warm up, three measured, one recorded
    assert found["speed"]["first_step_s"] == pytest.approx(100.0, abs=0.1)
    assert found["steps"]["step_s"] == pytest.approx([1.0] * 3, abs=0.1)


@pytest.mark.usefixtures("folder")
def test_the_optimizer_is_timed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    step = Optimizer.step

    def slow(self, norm):
        time.sleep(0.4)
        return step(self, norm)

    monkeypatch.setattr(Optimizer, "step", slow)
    speed = bench()["speed"]
    assert speed["optimizer_s"] > 0.4
    assert speed["step_s"] >= speed["optimizer_s"] + speed["forward_backward_s"]


@pytest.mark.usefixtures("folder")
def test_supervised_steps_and_adapters() -> None:
    found = bench("--objective=sft", "--model.lora.rank=2", "--model.dtype=bfloat16")
    model, planned = found["model"], found["memory"]["planned"]
    measured = found["memory"]["played_back"]["largest"]
    assert model["num_trained_params"] < model["num_params"] / 5
    assert measured["masters"] == 4 * model["num_trained_params"] == planned["masters"]
    assert measured["weights"] == 2 * (model["num_params"] + model["num_trained_params"])
    assert found["speed"]["model_flops_per_step"] < flops_by_hand([16] * 5, 75)


@pytest.mark.slow
def test_tokens_and_rates_of_all_processes_count(folder: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    flags = (*SMALL, "--rows.tokens=16", "--rows.per_step=8", "--trainer.parallel.zero_stage=3")
    outcome = subprocess.run(
        [*command, "-m", "hone", *BASE, *flags],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert outcome.returncode == 0, outcome.stderr
    assert outcome.stdout.count("tokens/s of each device") == 1  # rank 0 alone prints
    found = json.loads((folder / "bench-train.json").read_text())
    speed, device = found["speed"], found["device"]
    assert device["num_devices"] == 2
    assert speed["tokens_per_s"] == pytest.approx(8 * 16 / speed["step_s"])
    assert speed["tokens_per_s_per_device"] == pytest.approx(4 * 16 / speed["step_s"])
    assert speed["model_flops_per_step"] == pytest.approx(flops_by_hand([16] * 8, 120))
    assert speed["num_micro_batches"] == 2  # of 64 tokens each
    memory, planned = found["memory"]["played_back"], found["memory"]["planned"]
    for kind in ("gradients", "optimizer"):
        assert memory["largest"][kind] == pytest.approx(planned[kind], rel=0.01)
    assert planned["optimizer"] == pytest.approx(4 * found["model"]["num_params"], rel=0.01)


# -- mistakes -----------------------------------------------------------------------------------


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hone.tools.bench.train.load_for_training", None)
    monkeypatch.setattr("hone.tools.bench.train.join", None)


@pytest.mark.usefixtures("nothing_runs")
@table(
    "flags, texts",
    [
        (
            ["--rows.tokens=400", "--trainer.max_tokens_per_microbatch=300"],
            ["trainer.max_tokens_per_microbatch is 300", "rows.tokens = 400"],
        ),
        (["--rows.tokens=600"], ["the longest row is 600 (rows.tokens)", "at most 512 tokens"]),
        (
            ["--model.shape=qwen3-0.6b"],
            ["there is one model. Remove model.path, or remove model.shape"],
        ),
        (["--model.path=null"], ["model.path is unset, and model.shape is unset"]),
        (["--model.init=pretrained"], ["holds no weights"]),
        (
            ["--trainer.optimizer.name=muon", "--trainer.offload=optimizer"],
            ["trainer.offload is optimizer, and trainer.optimizer.name is muon"],
        ),
        (["--model.exact"], ["model.exact is on, and run.device is cpu"]),
        (["--model.lora.load_in_4bit"], ["model.lora.rank is 0"]),
        (["--trainer.offload_activations"], ["trainer.recompute is off"]),
        (["--trainer.parallel.ring_size=2"], ["2 processes a replica", "number of processes, 1"]),
        (["--output=model"], ["output is 'model'. Give the path of a .json file"]),
        (["--rows.token=9"], ["did you mean --rows.tokens?"]),
    ],
)
def test_mistakes(
    flags: list[str], texts: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = output(capsys, *BASE, *flags, code=2)
    assert "Traceback" not in text
    for part in texts:
        assert part in text


@pytest.mark.usefixtures("nothing_runs")
def test_the_heads_of_a_shape_are_known(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, value in {"RANK": 0, "WORLD_SIZE": 3, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 3}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setattr("hone.cli.main._claim", lambda _: lambda code: None)
    shape = ("bench", "train", "--model.shape=qwen3-0.6b", "--run.device=cpu")
    text = output(capsys, *shape, "--trainer.parallel.tensor_parallel_size=3", code=2)
    assert "num_attention_heads = 16, num_key_value_heads = 8 of the model of model.shape" in text
    text = output(capsys, *shape, "--trainer.parallel.ulysses_size=3", code=2)
    assert "for the model of model.shape" in text


@pytest.mark.usefixtures("folder")
def test_warnings() -> None:
    cfg = BenchTrainConfig.model_validate(
        {
            "model": {"path": "model", "init": "random", "exact": True},
            "run": {"device": "cuda"},
            "objective": "sft",
            "rows": {"tokens": 9, "per_step": 4},
            "trainer": {"num_epochs": 2, "parity": "off"},
        }
    )
    messages = [finding.message for finding in findings(plan_here(cfg, 8))]
    for part in (
        "trainer.num_epochs is 2 and trainer.parity is off and have no effect",
        "since objective is sft: it makes trainer and engine",
        "(rows.per_step), less than the number of processes (8)",
    ):
        assert any(part in message for message in messages), (part, messages)


def test_processes_that_share_rows_all_have_some() -> None:
    def warnings(ring_size: int) -> list[str]:
        cfg = BenchTrainConfig.model_validate(
            {
                "model": {"shape": "qwen3-0.6b"},
                "rows": {"tokens": 4096, "per_step": 1},
                "trainer": {
                    "max_tokens_per_microbatch": 4096 // ring_size,
                    "parallel": {"ring_size": ring_size},
                },
            }
        )
        found = findings(plan_here(cfg, 4))
        return [finding.message for finding in found if finding.level == "warning"]

    assert warnings(4) == []
    assert any(
        "less than the number of groups of 2 processes (2)" in message for message in warnings(2)
    )
    assert any("less than the number of processes (4)" in message for message in warnings(1))


def test_rows_carry_what_the_objective_needs() -> None:
    cfg = RowsConfig(tokens=20, per_step=3)
    rows = train.draw_rows(cfg, vocab_size=99, seed=3, objective="rl")
    assert [(row.num_tokens, row.num_trained) for row in rows] == [(20, 19)] * 3
    assert not rows[0].loss_mask[0]
    again = train.draw_rows(cfg, vocab_size=99, seed=3, objective="rl")
    assert [row.token_ids for row in rows] == [row.token_ids for row in again]
    assert rows[0].token_ids != rows[1].token_ids
    assert max(token for row in rows for token in row.token_ids) < 99
    assert all(len(row.column("advantages")) == 19 for row in rows)
    plain = train.draw_rows(cfg, vocab_size=99, seed=3, objective="sft")
    assert not any(row.columns for row in plain)


def test_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert "hone bench train" in output(capsys, "bench")
    flat = " ".join(output(capsys, "bench", "train", "--help", "all").split())
    for field in schema.fields(BenchTrainConfig):
        assert field.key in flat
        assert field.help in flat


def test_hone_check_plans_the_peak(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ("check", "sft", "--model.path=model", "--model.init=random", "--data.train.0.path=x")
    words = (*words, "--gpu=h200")
    found = json.loads(output(capsys, *words, "--json", code=2))["derived"]
    larger = (*words, "--trainer.max_tokens_per_microbatch=1000000", "--json")
    peak = json.loads(output(capsys, *larger, code=2))["derived"]["training_peak_gib"]
    assert peak > found["training_peak_gib"]
    assert "H200 has 140" in " ".join(output(capsys, *words, code=2).split())
    few = (*words, "--trainer.micro_batch_size=2", "--json")
    peak = json.loads(output(capsys, *few, code=2))["derived"]["training_peak_gib"]
    assert peak < found["training_peak_gib"]
