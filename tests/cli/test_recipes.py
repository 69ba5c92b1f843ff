"""The recipes that come with hone: listed, shown, copied, checked for their GPU, and tried."""

from __future__ import annotations

import io
import json
import re
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from hone.cli.main import main
from hone.config.load import load_config
from hone.config.plan import Devices, resolve
from hone.config.recipe import RECIPES, recipe_names, resolve_recipe
from hone.config.tree import RLConfig
from hone.families.model_facts import ModelFacts
from hone.families.vision.registry import VISION
from hone.hardware import known_gpu
from hone.models.tiny import make_bpe_tokenizer, make_tiny_model
from hone.models.tiny_vision import make_tiny_vision_model
from hone.planner.fitting import check_gpu_memory
from hone.recipes.instructions import follows
from hone.rules import findings
from tests.config import workspace as files
from tests.tables import table
from tests.tiny_runs import lines


def picture(number: int) -> bytes:
    """A figure as the bytes of a PNG, larger than `data.max_image_tokens` allows."""
    file = io.BytesIO()
    Image.new("RGB", (900 + 10 * number, 700), (number, 90, 200)).save(file, "PNG")
    return file.getvalue()


TRAINED = ("code", "dapo-maths", "geometry3k", "gsm8k", "instructions")
SHAPES: dict[str, dict[str, Any]] = {
    "Qwen3-0.6B": {"hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16},
    "Qwen3-1.7B-Base": {"hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16},
    "Qwen2.5-Coder-1.5B-Instruct": {
        "model_type": "qwen2",
        "hidden_size": 1536,
        "intermediate_size": 8960,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "Qwen3-VL-2B-Instruct": dict(VISION["qwen3_vl"].public["qwen3-vl-2b"]),
}
COMMON = {
    "num_hidden_layers": 28,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "max_position_embeddings": 32_768,
}
ROWS: dict[str, list[dict[str, Any]]] = {
    "gsm8k": [
        {"question": f"What is {n} and {n + 1}?", "answer": f"Easy.\n#### {2 * n + 1}"}
        for n in range(8)
    ],
    "dapo-maths": [
        {
            "data_source": "math_dapo",
            "prompt": [{"role": "user", "content": f"What is {n} + {n}? Answer: $Answer"}],
            "reward_model": {"ground_truth": str(2 * n), "style": "rule"},
            "extra_info": {"index": n},
        }
        for n in range(8)
    ],
    "geometry3k": [
        {
            "images": [{"bytes": picture(n), "path": None}],
            "problem": f"<image>What is the longest side, if the others are {n}?",
            "answer": str(2 * n),
        }
        for n in range(8)
    ],
    "code": [
        {
            "text": f"Write a function to add {n}.",
            "code": f"def add(x): return x + {n}",
            "test_list": [f"assert add({m}) == {m + n}" for m in range(3)],
        }
        for n in range(8)
    ],
    "instructions": [
        {"prompt": f"Name {n} rivers.", "checks": {"lowercase": True, "max_words": n + 9}}
        for n in range(40)
    ],
}


def output(capsys: pytest.CaptureFixture[str], *argv: str, code: int = 0) -> str:
    assert main(argv) == code
    captured = capsys.readouterr()
    return captured.out + captured.err


def test_every_recipe_is_listed_with_its_command_and_a_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = output(capsys, "recipes")
    assert max(map(len, text.splitlines())) <= 80
    flat = " ".join(text.split())
    for name in recipe_names():
        first = (RECIPES / f"{name}.yaml").read_text().partition("\n")[0]
        assert first.startswith("# ")
        assert first.endswith(".")
        assert f"{name} {first[2:]}"[:30] in flat
    assert "hone sft quickstart-sft" in flat
    assert "hone eval quickstart-eval" in flat


def test_show_prints_the_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert output(capsys, "recipes", "show", "gsm8k") == (RECIPES / "gsm8k.yaml").read_text()
    told = output(capsys, "recipes", "show", "gsm8", code=2)
    assert "no recipe 'gsm8' comes with hone. Did you mean `gsm8k`?" in told


def test_copies_are_the_users_and_overwrite_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert output(capsys, "recipes", "copy", "gsm8k") == "gsm8k.yaml\n"
    copied = Path("gsm8k.yaml").read_text()
    assert "#   hone rl gsm8k.yaml\n" in copied
    shipped = (RECIPES / "gsm8k.yaml").read_text()
    assert copied.replace("rl gsm8k.yaml", "rl gsm8k") == shipped
    Path("gsm8k.yaml").write_text("mine")
    assert "'gsm8k.yaml' exists." in output(capsys, "recipes", "copy", "gsm8k", code=2)
    assert Path("gsm8k.yaml").read_text() == "mine"
    output(capsys, "recipes", "copy", "gsm8k", "--overwrite")
    assert Path("gsm8k.yaml").read_text() == copied
    Path("sub").mkdir()
    assert output(capsys, "recipes", "copy", "code", "sub") == "sub/code.yaml\n"
    assert load_config(RLConfig, Path("sub/code.yaml"), []) == load_config(
        RLConfig, resolve_recipe("code"), []
    )
    assert "there is no folder 'no'" in output(capsys, "recipes", "copy", "code", "no/x", code=2)


@table("name", TRAINED)
def test_R22_every_recipe_passes_its_check_and_fits_its_gpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("hone.extras.is_installed", lambda package: True)
    files.fill(tmp_path)
    monkeypatch.chdir(tmp_path)
    shipped = load_config(RLConfig, resolve_recipe(name), [])
    shape = SHAPES[shipped.model.path.rpartition("/")[2]]
    if "text_config" not in shape:
        shape = COMMON | {"model_type": "qwen3"} | shape
    Path("model/config.json").write_text(json.dumps(shape | {"tie_word_embeddings": True}))
    local = ["--model.path=model", "--data.train.0.path=train.jsonl"]
    Path("eval.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n')
    local += ["--data.eval.0.path=eval.jsonl"] if shipped.data.eval else []
    cfg = load_config(RLConfig, resolve_recipe(name), local)
    comment = (RECIPES / f"{name}.yaml").read_text().partition("\nrun:")[0]
    said = re.search(r"GPU: one of (\d+) GB", comment)
    assert said is not None
    for gpu in {"h200", {"80": "a100-80g", "141": "h200"}[said[1]]}:
        devices = Devices(kind="cuda", gpu=known_gpu(gpu))
        plan = resolve(cfg, ModelFacts.known("model"), devices, world_size=1)
        assert [finding.message for finding in findings(plan)] == []
        assert [*check_gpu_memory(plan)] == []
    assert shipped.model.path.rpartition("/")[2] in comment


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_every_recipe_runs_with_a_tiny_model(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    suffix = "parquet" if name == "geometry3k" else "jsonl"
    for file in (f"train.{suffix}", f"eval.{suffix}"):
        if suffix == "parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[name]), file)
        else:
            Path(file).write_text("".join(json.dumps(row) + "\n" for row in ROWS[name]))
    if name == "geometry3k":
        make_tiny_vision_model(Path("model"), family="qwen3_vl")
    else:
        texts = [text for row in ROWS[name] for text in (json.dumps(row), *["0123456789 " * 4])]
        make_tiny_model(
            Path("model"),
            tokenizer=make_bpe_tokenizer(texts, 400),
            hidden_size=32,
            num_layers=2,
            num_heads=2,
            num_kv_heads=1,
            head_dim=16,
            intermediate_size=64,
            max_position_embeddings=2048,
        )
    shipped = load_config(RLConfig, resolve_recipe(name), [])
    flags = {
        "run.steps": 2,  # less than the warm-up of each
        "run.device": "cpu",
        "model.path": "model",
        "data.train.0.path": f"train.{suffix}",
        "rollout.prompts_per_step": 2,
        "rollout.n_samples_per_prompt": 4,
        "rollout.max_completion_tokens": 16,
        "eval.max_completion_tokens": 16,
        "eval.n_samples_per_prompt": 1,
        "reward.num_workers": 1,
        "log.to": "[]",
    }
    flags |= {"data.eval.0.path": f"eval.{suffix}"} if shipped.data.eval else {}
    if name == "dapo-maths":  # of a random model no group has a sample that is right
        flags |= {
            "reward.functions.1.args.buffer_tokens": 8,
            "trainer.prompts_per_minibatch": 2,
            "rollout.dynamic_sampling": "false",
        }
    arguments = [part for key, value in flags.items() for part in (f"--{key}", str(value))]
    assert main(["rl", name, *arguments]) == 0
    rows = lines(Path("runs") / name / "metrics.jsonl")
    assert [row["step"] for row in rows] == [0, 1, 2]
    assert all(row["rollout/valid"] == 8 for row in rows[1:]), "every sample was scored"
    assert Path("runs", name, "model", "model.safetensors").exists()


@table(
    "completion, checks, share",
    [
        ("<answer>loire, ebro</answer>", {"lowercase": True, "max_words": 2}, 1.0),
        ("<think>LONG</think><answer>Loire</answer>", {"lowercase": True, "max_words": 2}, 0.5),
        ("two words", {"min_words": 3}, 0.0),
        ("* a\n* b", {"bullets": 2, "forbidden": ["c"], "keywords": ["A", "b"]}, 1.0),
        ('{"a": 1}', {"json": True, "commas": False, "ends_with": "}"}, 1.0),
        ("text", {"json": True}, 0.0),
        ("text", {"json": True, "lowercase": None}, 0.0),
        ("<answer></answer>", {"max_words": 3}, 0.0),
    ],
)
def test_checks_of_instructions(completion: str, checks: dict[str, Any], share: float) -> None:
    assert follows(completion, checks) == share
