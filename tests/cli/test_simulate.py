"""`hone simulate`: help, the table, the files, mistakes, and neither torch nor a model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from hone.cli.main import main
from hone.config import schema
from hone.config.checks.simulate import check_simulate
from hone.config.tree import SimulateConfig

SMALL = (
    "--model.shape=qwen3-0.6b",
    "--rollout.prompts_per_step=4",
    "--rollout.n_samples_per_prompt=4",
    "--simulate.gpus=3",
    "--simulate.steps=4",
    "--simulate.lengths.median=100",
)


@pytest.fixture(autouse=True)
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")


def output(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    assert main(["simulate", *argv]) == code
    captured = capsys.readouterr()
    return captured.out + captured.err


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_help_teaches(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, *argv)
    assert "hone simulate gsm8k --simulate.gpus 8" in text
    assert max(map(len, text.splitlines())) <= 80


def test_R22_help_explains_every_key(capsys: pytest.CaptureFixture[str]) -> None:
    flat = " ".join(output(capsys, "--help", "simulate", "model").split())
    for field in schema.fields(SimulateConfig):
        if field.path[0] in ("simulate", "model"):
            assert field.help in flat, field.key
            assert field.key in flat
    assert "no section 'simulat'" in output(capsys, "--help", "simulat", code=2)


def test_table_numbers_and_plot(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, *SMALL, "--output=out/here.json")
    assert max(map(len, text.splitlines())) <= 80
    flat = " ".join(text.split())
    assert "qwen3-0.6b on 3 x H200: 4 prompts of 256 tokens x 4 samples a step" in flat
    assert "sync colocated 3 = 3" in flat
    assert "Asynchrony " in flat
    assert "a step of sync colocated, 3 GPUs: " in flat
    written = json.loads(Path("out/here.json").read_text())
    assert written["config"]["rollout"]["prompts_per_step"] == 4
    assert len(written["runs"]) == 2 + 2 * 4
    for run in written["runs"]:
        assert len(run["steps"]) == 4
        assert f"{run['tokens_per_s']:,.0f}" in flat
        lengths = sum(step["num_completion_tokens"] for step in run["steps"])
        prompts = 4 * 4 * 4 * 256  # steps, prompts, samples, tokens
        assert sum(step["num_tokens"] for step in run["steps"]) == lengths + prompts
        assert 0 < run["completion_tokens_per_s"] < run["tokens_per_s"]
    assert f"{written['runs'][0]['completion_tokens_per_s']:,.0f} of completions" in flat
    assert Path("out/here.svg").read_text().startswith("<svg ")


def test_nothing_is_written_unless_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, *SMALL)
    assert "sync colocated" in text
    assert not list(Path.cwd().iterdir())
    assert "numbers in" not in text


def test_the_plain_run_is_shown_and_what_is_dropped(capsys: pytest.CaptureFixture[str]) -> None:
    tail = ("--simulate.gpus=8", "--simulate.lengths.sigma=1.5", "--pipeline.too_old=drop")
    text = output(capsys, *SMALL, *tail)
    assert "sync colocated" in text
    assert "slower ones are left out; --output FILE.json has all" in " ".join(text.split())
    assert "dropped" in text


def test_recipes_and_mistakes(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "gsm8k", "--simulate.gpus=2", "--simulate.steps=4")
    assert "Qwen/Qwen3-0.6B on 2 x H200: 32 prompts" in " ".join(text.split())
    for flags, said in (
        (["--simulate.gpu=H2000"], "hone's table lacks"),
        (["--simulate.gpus=1", "--engine.tensor_parallel_size=2"], "cannot be split into trainers"),
        (["--simulate.gpuz=1"], "simulate.gpuz"),
        (["--nproc", "2"], "set simulate.gpus instead"),
        (
            ["--cluster.num_engines=3"],
            "+ cluster.num_engines 3 x engine.tensor_parallel_size 1 = 4",
        ),
        (["--cluster.num_references=1"], "nothing for it to score"),
        (
            ["--cluster.num_references=8", "--algorithm.kl.coef=0.1", "--simulate.gpus=8"],
            "leaves none of 8 GPUs to trainers and engines",
        ),
        (["--output=x.svg"], "give the path of a .json file"),
        (["--simulate.lengths.distribution=file"], "simulate.lengths.path"),
    ):
        assert said in output(capsys, *SMALL, *flags, code=2)
    assert not Path("x.svg").exists()
    unused = SimulateConfig.model_validate({"simulate": {"lengths": {"path": "x"}}})
    (finding,) = check_simulate(unused, 1)
    assert "simulate.lengths.path has no effect" in finding.message


def test_neither_torch_nor_transformers_is_loaded() -> None:
    program = (
        "import sys; from hone.cli.main import main; code = main(sys.argv[1:]);"
        "raise SystemExit(code or bool({'torch', 'transformers'} & set(sys.modules)))"
    )
    subprocess.run([sys.executable, "-c", program, "simulate", *SMALL], check=True)
