"""A reward model that sees images: whole runs, against transformers' whole model from pixels."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL.Image import Image
from tests.loops.test_processes import run_hone
from tests.tiny_runs import lines, make_classifier, tiny_config
from tests.vision.examples import Judge, picture
from transformers import PreTrainedModel

import hone
from hone.cli.main import main
from hone.config.tree import RLConfig
from hone.errors import UserError
from hone.loops import reinforce, workers
from hone.models.contents import require_features
from hone.models.tiny import PRINTABLE, make_char_tokenizer, make_tiny_model
from hone.models.tiny_vision import make_tiny_vision_model

NUM_IMAGES = (0, 1, 3, 1, 0, 3)
"""Of each row. Rows 1 and 3 have the same text, and images of one size."""
TEXTS = {1: ("what is ", "?"), 3: ("", " or ", "", "? look: ")}
"""What stands around the images of a row; one text is between all two images."""
TOLERANCE = 1e-5
FAMILIES = ("qwen3_vl", "gemma3")


def parts_of(number: int) -> list[str | Image]:
    """The prompt of a row: texts and images by turns."""
    if not NUM_IMAGES[number]:
        return [f"no image in {number}?"]
    first, *rest = TEXTS[NUM_IMAGES[number]]
    parts: list[str | Image] = [first]
    for place, text in enumerate(rest):
        parts += [picture(10 * number + place, 60 + 20 * place, 50), text]
    return parts


@pytest.fixture(scope="module")
def judges(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Judge]:
    return {family: Judge(tmp_path_factory.mktemp(family), family) for family in FAMILIES}


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rows, and a policy of each family."""
    folder = tmp_path_factory.mktemp("inputs")
    for family in FAMILIES:
        make_tiny_vision_model(folder / family, family=family)
    rows: list[dict[str, Any]] = []
    for number in range(len(NUM_IMAGES)):
        names: list[str] = []
        for part in parts_of(number):
            if not isinstance(part, str):
                names.append(f"{number}_{len(names)}.png")
                part.save(folder / names[-1])
        prompt = "".join(x if isinstance(x, str) else "<image>" for x in parts_of(number))
        rows.append({"images": names, "prompt": prompt, "answer": "4"})
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def configured(inputs: Path, family: str, judge: Path, folder: Path, **sections: Any) -> RLConfig:
    longest, rows = {"max_completion_tokens": 12}, [{"path": str(inputs / "train.jsonl")}]
    names: dict[str, dict[str, Any]] = {
        "run": {"dir": folder, "steps": 1},
        "model": {"path": str(inputs / family)},
        "data": {"train": rows, "eval": rows, "chat": "auto", "max_prompt_tokens": 300},
        "rollout": {"prompts_per_step": 6, "n_samples_per_prompt": 3, **longest},
        # A random policy writes a token that stands for an image now and then.
        "reward": {
            "functions": [],
            "model": {"path": str(judge), "max_tokens_per_forward": 300},
            "max_failure_rate": 1.0,
        },
        "engine": {"max_num_seqs": 8, "max_num_batched_tokens": 256},
        "eval": {"every_n_steps": 1, **longest},
        "log": {"to": [], "samples_per_step": 99},
    }
    for section, keys in sections.items():
        names[section] = names.get(section, {}) | keys
    return tiny_config(inputs, folder, **names)


def assert_scored(rows: list[dict[str, Any]], judge: Judge) -> None:
    """Each row of samples, at its score, but for those that spell an image."""
    marks = (judge.settings.mark, judge.settings.placeholder)
    seen: set[int] = set()
    for row in rows:
        number = int(re.findall(r":(\d+)", row["prompt_id"])[0]) - 1
        if any(mark in row["text"] for mark in marks):
            assert "which stands for an image with the reward model" in row["failure_detail"]
            continue
        seen.add(NUM_IMAGES[number])
        end = "" if row["stop_reason"] == "length" else "<|im_end|>"
        asked = ("<|im_start|>", *parts_of(number), "<|im_end|><|im_start|>")
        expected = judge.score(*asked, row["text"] + end)
        assert row["reward_parts"]["reward_model"] == pytest.approx(expected, abs=TOLERANCE)
    assert seen == {0, 1, 3}


class Loaded:
    """The reward models that runs load in this process."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.models: list[PreTrainedModel] = []
        load = workers.load_value_model

        def noted(*args: Any, **options: Any) -> PreTrainedModel:
            self.models.append(load(*args, **options))
            return self.models[-1]

        monkeypatch.setattr(workers, "load_value_model", noted)

    def __iter__(self) -> Iterator[PreTrainedModel]:
        return iter(self.models)


PPO: dict[str, Any] = {"algorithm": {"advantage": "gae"}}
APART: dict[str, Any] = {"cluster": {"num_reward_models": 2}, "pipeline": {"max_staleness": 1}}


RUNS = {
    "of one family": ("qwen3_vl", "qwen3_vl", {}),
    "of another, PPO": ("qwen3_vl", "gemma3", PPO),
    "of yet another": ("gemma3", "qwen3_vl", {}),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_reward_of_a_run_is_the_score_of_the_model(
    name: str,
    inputs: Path,
    judges: dict[str, Judge],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In training and evaluation; an image is encoded once in all of it."""
    policy, of_judge, sections = RUNS[name]
    loaded, judge = Loaded(monkeypatch), judges[of_judge]
    cfg = configured(inputs, policy, judge.judge, tmp_path, run={"steps": 2}, **sections)
    reinforce.run(cfg)
    samples = lines(tmp_path / "samples.jsonl")
    number = cfg.rollout.n_samples_per_prompt
    assert [sum(row["step"] == n for row in samples) for n in (1, 2)] == [6 * number + 6] * 2
    assert {row["stop_reason"] for row in samples} > {"length"}
    assert_scored(samples, judge)
    (model,) = loaded
    assert require_features(model).num_encoded == sum(NUM_IMAGES)


def test_reward_models_apart_score_samples_ahead_of_training(
    inputs: Path, judges: dict[str, Judge], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In passes of several sequences, whichever of the models has them."""
    loaded, judge = Loaded(monkeypatch), judges["gemma3"]
    cfg = configured(inputs, "qwen3_vl", judge.judge, tmp_path, run={"steps": 2}, **APART)
    reinforce.run(cfg)
    assert_scored(lines(tmp_path / "samples.jsonl"), judge)
    assert len(loaded.models) == 2
    assert all(require_features(model).num_encoded <= sum(NUM_IMAGES) for model in loaded)


@pytest.mark.slow
def test_processes_that_share_it_score_the_images_of_each_other(
    inputs: Path, judges: dict[str, Judge], tmp_path: Path
) -> None:
    judge, shards = judges["gemma3"], {"parallel": {"zero_stage": 3}}
    folder = tmp_path / "run"
    cfg = configured(inputs, "qwen3_vl", judge.judge, folder, trainer=shards)
    run_hone("rl", cfg, tmp_path, "--nproc", "2")
    assert_scored(lines(folder / "samples.jsonl"), judge)


@pytest.mark.parametrize("number", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_an_evaluation_in_one_process_and_in_several(
    number: int, inputs: Path, judges: dict[str, Judge], tmp_path: Path
) -> None:
    """Others are sent the pixels of an image as the reward model needs it, which is not as the
    policy does."""
    judge = judges["gemma3"]
    flags = [
        f"--model.path={inputs / 'qwen3_vl'}", f"--data.eval.0.path={inputs / 'train.jsonl'}",
        "--data.max_prompt_tokens=300", "--reward.functions=[]", "--reward.max_failure_rate=1",
        f"--reward.model.path={judge.judge}", "--reward.model.max_tokens_per_forward=300",
        "--eval.max_completion_tokens=12", "--eval.n_samples_per_prompt=3",
        "--run.device=cpu", f"--run.dir={tmp_path}", f"--nproc={number}",
    ]  # fmt: skip
    assert main(["eval", *flags]) == 0
    assert_scored(lines(tmp_path / "eval_samples.jsonl"), judge)


def test_a_reward_model_of_text_is_refused_before_the_run(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded, path = Loaded(monkeypatch), make_classifier(tmp_path / "text")
    row = {"images": [str(inputs / "1_0.png")], "prompt": "1"}
    (tmp_path / "train.jsonl").write_text(json.dumps(row) + "\n")
    data = {"train": [{"path": str(tmp_path / "train.jsonl")}], "eval": []}
    cfg = configured(inputs, "qwen3_vl", path, tmp_path / "run", data=data, eval={})
    with pytest.raises(UserError, match="reads text alone, so that it would not see what it scor"):
        reinforce.run(cfg)
    assert not loaded.models
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_texts_of_a_policy_of_text_are_scored_too(judges: dict[str, Judge], tmp_path: Path) -> None:
    judge = judges["qwen3_vl"]
    make_tiny_model(tmp_path / "model", tokenizer=make_char_tokenizer(PRINTABLE), num_layers=1)
    (tmp_path / "train.jsonl").write_text('{"prompt": "why?"}\n')
    found = hone.evaluate(
        data=tmp_path / "train.jsonl", model={"path": str(tmp_path / "model")},
        reward={"functions": (), "model": {"path": str(judge.judge)}},
        eval={"max_completion_tokens": 4}, run={"device": "cpu", "dir": tmp_path / "eval"},
    )  # fmt: skip
    (sample,) = found.samples
    assert sample.stop_reason == "length"
    expected = judge.score("<|im_start|>why?<|im_end|><|im_start|>", sample.completion)
    assert sample.reward == pytest.approx(expected, abs=TOLERANCE)
