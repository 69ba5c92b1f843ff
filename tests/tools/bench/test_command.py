"""`hone bench engine` from the command line to its files, on a CPU with a tiny model."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest
from transformers import AutoConfig

from hone.cli.main import main
from hone.config import schema
from hone.config.bench import BenchModelConfig
from hone.config.tree import BenchEngineConfig
from hone.engine.engine import EmbeddedEngine
from hone.families.shape import ModelShape
from hone.models.tiny import SHAPES, make_model_folder, make_tiny_model
from hone.models.vision import text_config_of
from hone.tools.bench.bench import vllm_model
from tests.tables import table
from tests.tools.bench.test_vllm_runner import FAKE


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("HONE_TRACEBACK", raising=False)
    make_tiny_model(tmp_path / "model", num_layers=1, hidden_size=32, weights=False)
    for name in (tmp_path / "model").glob("tokenizer*"):
        name.unlink()
    (tmp_path / "requests.jsonl").write_text(
        '{"prompt_tokens": 40, "max_tokens": 12, "n": 3}\n{"prompt_tokens": 9, "max_tokens": 5}\n'
    )
    return tmp_path


BASE = ("bench", "engine", "--model.path=model", "--model.init=random", "--run.device=cpu")


def output(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    assert main(argv) == code
    captured = capsys.readouterr()
    return captured.out + captured.err


def test_a_file_of_requests_end_to_end(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, *BASE, "--workload=requests.jsonl", "--output=out/r.json")
    for label in ("output tokens/s", "share of the limit", "first token p99", "cold start"):
        assert label in text
    assert "4 requests, 129 prompt and 41 output tokens" in text
    found = json.loads((folder / "out/r.json").read_text())
    engine = found["engines"]["hone"]
    assert sum(engine["steps"]["num_tokens"]) == found["workload"]["num_output_tokens"] == 41
    summary = engine["summary"]
    assert summary["tokens_per_s"] == pytest.approx(41 / summary["total_s"])
    assert 0 < summary["share_of_limit"] < 1
    # Two of three equal prompts take two blocks of 16 from the first; none is left of the warm-up.
    assert summary["cached_prompt_share"] == pytest.approx(2 * 32 / 129)
    assert found["speedup"] is None
    assert found["config"]["workload"] == "requests.jsonl"


def test_progress_is_told_while_nothing_is_printed(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("hone.tools.bench.bench.PROGRESS_S", 0.0)
    (folder / "requests.jsonl").write_text('{"prompt_tokens": 9, "max_tokens": 3}\n')
    with caplog.at_level("INFO", logger="hone"):
        assert main([*BASE, "--workload=requests.jsonl"]) == 0
    told = caplog.text
    stages = ("drawing random weights", "making the engine", "warming up: ", "measuring: ")
    places = [told.find(stage) for stage in stages]
    assert -1 not in places, told
    assert places == sorted(places), told
    assert "measuring: 3 of 3 tokens after" in told


def test_decode_of_a_full_batch(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ("--decode.batch=6", "--decode.context=48", "--decode.steps=12")
    text = output(capsys, *BASE, "--workload=decode", *sizes)
    assert re.search(r"largest decode batch +6", text)
    decode = json.loads(Path("bench.json").read_text())["engines"]["hone"]["summary"]["decode"]
    assert decode["batch"] == 6
    assert decode["num_steps"] >= 12
    assert decode["context"] == pytest.approx(48, abs=2)


@table(
    "shape, kind",
    [
        ("qwen3.5-0.8b", "Qwen3_5ForConditionalGeneration"),
        ("qwen3.5-35b-a3b", "Qwen3_5MoeForConditionalGeneration"),
    ],
)
def test_vllm_gets_a_hybrid_as_it_is_published_and_loads_no_tower(
    shape: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hone.tools.bench.bench.is_installed", lambda name: name != "flashinfer")
    make_model_folder(tmp_path, shape)
    options = vllm_model(shape, tmp_path)
    assert options["language_model_only"] is True
    assert options["gdn_prefill_backend"] == "triton"
    whole = AutoConfig.from_pretrained(options["model"])
    assert whole.architectures == [kind]
    ours = ModelShape.from_config(AutoConfig.from_pretrained(tmp_path).to_dict())
    theirs = ModelShape.from_config(text_config_of(whole).to_dict())
    assert theirs.vision_family == whole.model_type
    # Transformers makes up a size of dense layers where a model has none.
    same = {"vision_family": None, "intermediate_size": theirs.intermediate_size}
    assert replace(theirs, **same) == replace(ours, **same)
    assert vllm_model(None, Path(options["model"])) == options


def test_vllm_gets_any_other_model_as_it_is(folder: Path) -> None:
    assert vllm_model(None, folder / "model") == {"model": str(folder / "model")}


def test_against_vllm(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(FAKE), prepend=os.pathsep)
    monkeypatch.syspath_prepend(FAKE)
    flags = ("--workload=requests.jsonl", "--against=vllm", "--engine.max_num_seqs=8")
    text = output(capsys, *BASE, *flags, "--engine.kv_cache_gib=0.5")
    assert "vllm 0.24.0" in text
    assert "hone / vllm" in text
    assert re.search(r"total time .*\dx *\n", text)
    found = json.loads(Path("bench.json").read_text())
    theirs, ours = (found["engines"][name]["summary"]["tokens_per_s"] for name in ("vllm", "hone"))
    assert found["speedup"] == pytest.approx(ours / theirs)
    assert sum(found["engines"]["vllm"]["steps"]["num_tokens"]) == 41
    (line,) = (x for x in Path("bench.vllm.log").read_text().splitlines() if "options" in x)
    assert json.loads(line.removeprefix("options ")) == {
        "dtype": "float32",
        "enable_prefix_caching": True,
        "gpu_memory_utilization": 0.5,
        "kv_cache_dtype": "auto",
        "kv_cache_memory_bytes": 2**29,
        "runner": "generate",
        "load_format": "dummy",
        "max_model_len": 52,
        "max_num_seqs": 8,
        "model": "model",
        "seed": 0,
        "skip_tokenizer_init": True,
    }


@pytest.fixture
def nothing_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hone.tools.bench.bench.load_model", None)
    monkeypatch.setattr("hone.tools.bench.bench.run_vllm", None)


@pytest.fixture
def with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(FAKE)


@pytest.mark.usefixtures("nothing_runs", "with_vllm")
@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--engine.kv_cache_gib=1e-5"], "the KV cache is too small: engine.kv_cache_gib=1e-05"),
        (["--engine.max_num_seqs=900000000"], "max_num_seqs=900000000 sequences do not fit"),
    ],
)
def test_what_does_not_fit_is_told_before_vllm_runs(
    flags: list[str],
    text: str,
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    base = (*BASE, "--workload=requests.jsonl", "--against=vllm")
    assert text in output(capsys, *base, *flags, code=2)
    assert "vLLM runs first" not in caplog.text


@pytest.mark.usefixtures("folder", "nothing_runs")
@table(
    "world_size, size, text",
    [
        ("2", 1, "tensor_parallel_size is 1, and not the number of processes (2)"),
        ("4", 2, "is 2, and not the number of processes (4)"),
        (None, 2, "is 2, and not the number of processes (1)"),
    ],
)
def test_processes_that_do_not_fit(
    world_size: str | None,
    size: int,
    text: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hone.tools.bench.bench.bench_engine", None)
    if world_size is not None:
        for name, value in zip(
            ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"),
            ("0", "0", world_size, world_size),
            strict=True,
        ):
            monkeypatch.setenv(name, value)
    flag = f"--engine.tensor_parallel_size={size}"
    assert text in output(capsys, *BASE, "--workload=requests.jsonl", flag, code=2)


def test_exact_mode_reaches_model_and_engine(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[bool] = []

    class Engine(EmbeddedEngine):
        def __init__(self, *args: Any, exact: bool, **options: Any) -> None:
            seen.append(exact)
            super().__init__(*args, **options)

    monkeypatch.setattr("hone.tools.bench.bench.EmbeddedEngine", Engine)
    base = ("bench", "engine", "--model.path=model", "--model.init=random")
    text = output(
        capsys, *base, "--model.exact=true", "--run.device=cpu", "--workload=requests.jsonl", code=2
    )
    assert "model.exact is on, and run.device is cpu" in text
    monkeypatch.setattr("hone.cli.command.max_gpus", lambda visible: None)
    output(capsys, *base, "--model.exact=true", "--workload=requests.jsonl")
    assert seen == [True]


@pytest.mark.usefixtures("nothing_runs")
@table(
    "flags, texts",
    [
        (["--workload=unifrom"], ["'unifrom'", "Did you mean 'uniform'?"]),
        (["--workload=nothing.jsonl"], ["a file of requests, or one of decode, uniform"]),
        (["--against=vllm"], ["against=vllm needs the `vllm` library"]),
        (["--against=sglang"], ["against: got 'sglang'"]),
        (
            ["--model.shape=qwen3-0.6b"],
            ["there is one model. Remove model.path, or remove model.shape"],
        ),
        (["--model.path=null"], ["model.path is unset, and model.shape is unset"]),
        (["--model.path=nowhere/"], ["model.path 'nowhere/' does not exist"]),
        (["--model.path=modl"], ["model.path 'modl' does not exist", "Did you mean 'model'?"]),
        (["--model.init=pretrained"], ["holds no weights"]),
        (["--workload=decode", "--decode.batch=300"], ["decode.batch is 300", "max_num_seqs"]),
        (
            ["--workload=decode"],
            ["decode.context is 1024", "context of the model at model.path (512)"],
        ),
        (["--workload=decode", "--decode.context=60"], ["decode.context=60 is too short"]),
        (["--workload=uniform"], ["request ", "the model's context length is 512"]),
        (["--workload=bad.jsonl"], ["bad.jsonl, line 2: unknown key 'max_token'"]),
        (["--output=model"], ["output is 'model'. Give the path of a .json file"]),
        (["--output=folder.json"], ["output 'folder.json' is a folder"]),
        (["--output=bad.jsonl/x/y.json"], ["bad.jsonl', which is no folder"]),
        (["--decode.steps=3"], ["decode.steps is 3 and has no effect, since workload is uniform"]),
        (["--worklaod=uniform"], ["did you mean --workload?"]),
    ],
)
def test_mistakes(
    flags: list[str],
    texts: list[str],
    folder: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    (folder / "folder.json").mkdir(exist_ok=True)
    (folder / "bad.jsonl").write_text('{"prompt_tokens": 1, "max_tokens": 1}\n{"max_token": 1}\n')
    text = output(capsys, *BASE, *flags, code=2) + caplog.text
    assert "Traceback" not in text
    for part in texts:
        assert part in text


def test_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    assert "usage: hone bench engine" in output(capsys, "bench")
    assert "usage: hone bench engine" in output(capsys, "bench", "--help")
    assert "there is `hone bench engine`" in output(capsys, "bench", "engin", code=2)
    text = output(capsys, "bench", "engine", "--help", "all")
    flat = " ".join(text.split())
    for field in schema.fields(BenchEngineConfig):
        assert field.key in flat
        assert field.help in flat
    assert max(map(len, text.splitlines())) <= 80
    section = output(capsys, "bench", "engine", "--help", "decode")
    assert "--decode.batch" in section
    assert "--model.path" not in section


def test_the_shapes_are_among_those_of_the_tiny_models() -> None:
    annotation = BenchModelConfig.model_fields["shape"].annotation
    (literal, _) = get_args(annotation)
    assert set(get_args(literal)) <= set(SHAPES)


@pytest.mark.parametrize("weight_dtype", ["auto", "int8"])
def test_two_processes_that_share_experts_are_one_engine(folder: Path, weight_dtype: str) -> None:
    config = AutoConfig.for_model(
        "qwen3_moe",
        hidden_size=64,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_experts=8,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=500,
        max_position_embeddings=512,
        eos_token_id=1,
        pad_token_id=0,
        bos_token_id=None,
    )
    config.save_pretrained(folder / "experts")
    launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    flags = ("--model.path=experts", "--workload=requests.jsonl", "--output=out/r.json")
    own = ("--engine.tensor_parallel_size=2", f"--engine.weight_dtype={weight_dtype}")
    command = (*launcher, "-m", "hone", *BASE, *flags, *own)
    done = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads((folder / "out/r.json").read_text())
    steps = found["engines"]["hone"]["steps"]["num_tokens"]
    assert sum(steps) == found["workload"]["num_output_tokens"] == 41
    assert done.stdout.count("output tokens/s") == 1, "one of both tells"
