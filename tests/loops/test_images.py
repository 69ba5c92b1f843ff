"""Every command on rows with images, of a tiny vision-language model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tests.images.drawn import drawn, encoded
from tests.images.workers import workers
from tests.tiny_runs import lines

import hone
from hone.cli.main import main
from hone.models.contents import features_of
from hone.models.load import load_model
from hone.models.settings import ModelConfig
from hone.models.tiny_vision import make_tiny_vision_model

QUESTION = "<image>what is it?"
NUM_ROWS = 8
DATA = {"data": {"max_prompt_tokens": 200, "max_image_tokens": 32}}
MODEL = {"model": {"path": "model"}}
TRAINING: dict[str, Any] = {
    **MODEL,
    "run": {"steps": 1, "device": "cpu"},
    "trainer": {"optimizer": {"lr": 3e-3}},
    "log": {"to": []},
}
SUPERVISED: dict[str, Any] = {"data": {**DATA["data"], "examples_per_step": 4, "max_tokens": 220}}
PATHS_ALONE = "rewards.py:paths_alone"
"""A reward that counts images, of rows that have them as paths."""
REWARDS = """
from pathlib import Path


def paths_alone(completion, images):
    assert all(Path(name).is_file() for name in images), images
    return float(len(images))
"""
GENERATION: dict[str, Any] = {**MODEL, "run": {"device": "cpu"}}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and rows with none, one or two images."""
    folder = tmp_path_factory.mktemp("images")
    make_tiny_vision_model(
        folder / "model", family="qwen2_5_vl", hidden_size=32, num_layers=2, num_heads=2,
        num_kv_heads=1, intermediate_size=48, tower_layers=1,
    )  # fmt: skip
    rows: list[dict[str, Any]] = []
    for number in range(NUM_ROWS):
        names = [f"{number}_{n}.png" for n in range(number % 3)]
        for n, name in enumerate(names):
            (folder / name).write_bytes(encoded(drawn(10 * number + n, 60, 60 + 20 * n)))
        prompt = "<image>" * len(names) + f"what is {number}?"
        rows.append({"images": names, "prompt": prompt, "answer": "4", "completion": "4"})
        rows[-1] |= {"chosen": "4", "rejected": "no"}
    for name, columns in {
        "prompts": ("images", "prompt", "answer"),
        "demonstrations": ("images", "prompt", "completion"),
        "pairs": ("images", "prompt", "chosen", "rejected"),
    }.items():
        text = "".join(json.dumps({c: row[c] for c in columns}) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(text)
    (folder / "rewards.py").write_text(REWARDS)
    return folder


@pytest.fixture(autouse=True)
def in_inputs(inputs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(inputs)


def test_reinforcement_learning_and_its_evaluation() -> None:
    result = hone.rl(
        DATA, data="prompts.jsonl", eval_data="prompts.jsonl", reward=PATHS_ALONE,
        rollout={"prompts_per_step": NUM_ROWS, "n_samples_per_prompt": 2,
                 "max_completion_tokens": 4},
        engine={"max_num_seqs": 16}, eval={"max_completion_tokens": 4, "every_n_steps": 1},
        **TRAINING | {"run": {**TRAINING["run"], "dir": "runs/rl"}},
    )  # fmt: skip
    mean = sum(number % 3 for number in range(NUM_ROWS)) / NUM_ROWS
    (step,) = [row for row in lines(Path("runs/rl/metrics.jsonl")) if "reward/mean" in row]
    assert step["reward/mean"] == step["eval/reward/mean"] == mean
    assert step["off_policy/mismatch_kl"] < 1e-9
    text = Path("runs/rl/samples.jsonl").read_text()
    assert "base64" not in text
    assert text.count("<|image_pad|>") < 200  # the mark of each image, and not its tokens
    trained = load_model(ModelConfig(path=str(result.run_dir / "model")), device="cpu")
    assert features_of(trained) is not None


def test_evaluation_and_generation() -> None:
    scores = hone.evaluate(
        DATA, data="prompts.jsonl", reward=PATHS_ALONE, eval={"max_completion_tokens": 4},
        **GENERATION,
    )  # fmt: skip
    assert len(scores.samples) == NUM_ROWS
    found = hone.generate(
        DATA, data="prompts.jsonl", generation={"max_completion_tokens": 4}, **GENERATION
    )
    assert [sample.prompt.count("<|image_pad|>") for sample in found] == [
        number % 3 for number in range(NUM_ROWS)
    ]


def test_a_call_that_has_returned_leaves_no_process_that_decodes() -> None:
    before = workers()
    hone.generate(DATA, data="prompts.jsonl", generation={"max_completion_tokens": 4}, **GENERATION)
    assert workers() == before
    hone.data_check("prompts.jsonl", command="rl", **MODEL, **DATA)
    assert workers() == before


def test_generated_rows_are_demonstrations_in_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inputs: Path
) -> None:
    flags = ["--model.path=model", "--run.device=cpu", "--data.max_image_tokens=32"]
    flags += ["--data.train.0.path=prompts.jsonl", "--generation.max_completion_tokens=4"]
    flags += ["--run.seed=1"]  # with which a model of few tokens samples no placeholder of an image
    assert main(["generate", *flags, f"--output={tmp_path / 'rows.jsonl'}"]) == 0
    named = [row.get("images", []) for row in lines(tmp_path / "rows.jsonl")]
    assert [len(images) for images in named] == [number % 3 for number in range(NUM_ROWS)]
    monkeypatch.chdir(tmp_path)
    model = {"model": {"path": str(inputs / "model")}}
    hone.sft(SUPERVISED, data="rows.jsonl", **{**TRAINING, **model})


def test_demonstrations() -> None:
    hone.sft(SUPERVISED, data="demonstrations.jsonl", **TRAINING)


def test_preferences() -> None:
    hone.dpo(SUPERVISED, data="pairs.jsonl", **TRAINING)
    hone.reward_model(SUPERVISED, data="pairs.jsonl", **TRAINING)
