"""Runs whose programs send pictures to be counted, against transformers' whole model."""

from __future__ import annotations

import base64
import gc
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from hone.config.tree import EvaluateConfig, RLConfig
from hone.images.store import STORE
from hone.loops import reinforce
from hone.loops.evaluation import run_evaluation
from hone.model_input import Content, ModelInput
from hone.types import NOT_SAMPLED, Row
from tests.envs.test_images import Seen
from tests.harness.programs import command_of
from tests.tiny_runs import lines
from tests.vision.examples import Example, Twin

NUM_PICTURES = 16
ONE_FAMILY = pytest.mark.parametrize("twin", ["qwen3_vl"], indirect=True, scope="module")
COUNTS = """
import base64

NUMBER = int(TASK["columns"]["number"])


def shown(number):
    with open(os.path.join(os.environ["PICTURES"], f"{number}.png"), "rb") as file:
        text = base64.b64encode(file.read()).decode()
    return [
        {"type": "text", "text": f"n{number}:"},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64," + text}},
        {"type": "text", "text": "how many?"},
    ]


messages = [*TASK["messages"]]
log = [messages]
right = 0
for turn in range(2):
    answer = chat(messages, max_tokens=4)
    text = said(answer)["content"]
    right += str(NUMBER % 6) in text
    messages = [*messages, said(answer), {"role": "user", "content": shown(NUMBER + 1 + turn)}]
# The history written anew: the second picture alone.
text = said(chat([{"role": "user", "content": shown(NUMBER + 1)}], max_tokens=4))["content"]
with open(os.path.join(os.environ["LOG"], f"{NUMBER}-{os.getpid()}"), "w") as file:
    json.dump(log, file)
print(json.dumps({"score": right + len(text) % 2}))
"""


def counted(number: int) -> Image.Image:
    """A picture with `number % 6` squares, of a size and a shade of its own."""
    image = Image.new("RGB", (64 + 2 * number, 70), (250, 250, 200 + number))
    for place in range(number % 6):
        left, top = 4 + 20 * (place % 3), 5 + 30 * (place // 3)
        image.paste((200, 10 * number, 30), (left, top, left + 14, top + 15))
    return image


@pytest.fixture(scope="module", params=["qwen3_vl", "gemma3"])
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twin:
    """Without tied weights, with which a tiny model answers an image with its placeholders."""
    folder = tmp_path_factory.mktemp(request.param)
    return Twin(folder, request.param, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pictures")
    for number in range(NUM_PICTURES):
        counted(number).save(folder / f"{number}.png")
    rows = [
        {"image": f"{n}.png", "prompt": f"n{n}:<image>how many?", "answer": str(n % 6), "number": n}
        for n in range(NUM_PICTURES - 3)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture
def log(inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "log"
    folder.mkdir()
    monkeypatch.setenv("LOG", str(folder))
    monkeypatch.setenv("PICTURES", str(inputs))
    return folder


def configured(inputs: Path, twin: Twin, folder: Path, **sections: Any) -> RLConfig:
    tree: dict[str, Any] = {
        "model": {"path": str(twin.folder)},
        "data": {
            "train": [{"path": str(inputs / "train.jsonl")}],
            "max_prompt_tokens": 200,
            "image_workers": 0,
        },
        "run": {"dir": str(folder / "run"), "steps": 2, "device": "cpu"},
        "rollout": {
            "prompts_per_step": 2,
            "n_samples_per_prompt": 2,
            "max_completion_tokens": 200,
        },
        "env": {
            "harness": {"command": command_of(folder, "counts", COUNTS)},
            "history": "tree",
            "retries": 0,
        },
        "reward": {"num_workers": 2},
        "log": {"to": [], "samples_per_step": 99},
    }
    return RLConfig.model_validate(tree | sections)


def expected(row: Row, twin: Twin) -> torch.Tensor | None:
    """The log-probabilities of a row's trained tokens by transformers, which sees the pictures that
    its texts name. None where the policy has sampled a placeholder, which transformers would take
    for an image's."""
    text = str(twin.tokenizer.decode(row.token_ids))
    images = tuple(counted(int(number)) for number in re.findall(r"n(\d+):", text))
    is_pad = [token == twin.settings.placeholder_id for token in row.token_ids]
    if any(pad and trained for pad, trained in zip(is_pad, row.loss_mask, strict=True)):
        return None
    runs = [*re.finditer("1+", "".join("01"[pad] for pad in is_pad))]
    assert len(runs) == len(images)
    places = [(run.start(), run.end() - run.start()) for run in runs]
    assert [(c.start, c.num_tokens) for c in row.model_input.contents] == places
    contents = tuple(Content(kind="image", hash="", start=s, num_tokens=n) for s, n in places)
    with torch.no_grad():
        logits = twin.logits(Example(row.token_ids, ModelInput(contents), images))
    trained = torch.tensor(row.loss_mask).nonzero()[:, 0]
    labels = torch.tensor(row.token_ids)[trained]
    return logits.log_softmax(-1)[trained - 1].gather(1, labels[:, None])[:, 0]


def test_engine_and_trainer_see_the_pictures_that_programs_send(
    inputs: Path, twin: Twin, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two steps: the first has the weights of the reference, and in the second they have changed in
    both alike."""
    seen = Seen(monkeypatch)
    reinforce.run(configured(inputs, twin, tmp_path))
    num_checked = 0
    for number, (row, logprobs) in enumerate(seen):
        engine = row.column("logprobs/engine")
        torch.testing.assert_close(engine, logprobs, atol=1e-5, rtol=0)
        wanted = expected(row, twin) if number < 8 else None
        if wanted is not None:
            torch.testing.assert_close(engine, wanted, atol=1e-5, rtol=0)
            num_checked += 1
    assert num_checked >= 6
    assert len(seen.rows) == 16, "each episode has two paths"
    numbers = sorted(len(row.model_input.contents) for row in seen.rows.values())
    assert numbers == [1] * 8 + [2] * 8
    written = (tmp_path / "run" / "samples.jsonl").read_text()
    assert "base64" not in written
    samples = lines(tmp_path / "run" / "samples.jsonl")
    assert [sample["failure"] for sample in samples] == [None] * 8
    assert {len(sample["branches"]) for sample in samples} == {1}
    assert {len(sample["images"]) for sample in samples} == {1}


@ONE_FAMILY
def test_a_program_gets_the_images_of_its_row(
    inputs: Path, twin: Twin, tmp_path: Path, log: Path
) -> None:
    """As OpenAI's chat API has them, so that messages are sent on as they are."""
    cfg = configured(inputs, twin, tmp_path)
    run_evaluation(
        EvaluateConfig.model_validate(
            {
                "model": {"path": str(twin.folder)},
                "data": cfg.data.model_dump(exclude={"train", "curriculum"})
                | {"eval": [{"path": str(inputs / "train.jsonl"), "max_rows": 3}]},
                "run": {"dir": str(tmp_path / "eval"), "device": "cpu"},
                "env": cfg.env.model_dump(),
                "eval": {"max_completion_tokens": 200},
            }
        )
    )
    gc.collect()
    assert len(STORE._shown) == 0, "nothing is left of what programs have sent"
    files = sorted(log.iterdir())
    assert len(files) == 3
    for file in files:
        [[message]] = json.loads(file.read_text())
        number = int(file.name.partition("-")[0])
        before, image, after = message["content"]
        assert (before["text"], after["text"]) == (f"n{number}:", "how many?")
        data = base64.b64decode(image["image_url"]["url"].partition(",")[2])
        assert data == (inputs / f"{number}.png").read_bytes()


@ONE_FAMILY
def test_episodes_that_wait_in_a_checkpoint_have_their_pictures(
    inputs: Path, twin: Twin, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second launch trains what the first has played, and has none of its pictures."""
    sections: dict[str, Any] = {
        "rollout": {
            "prompts_per_step": 2,
            "n_samples_per_prompt": 2,
            "max_completion_tokens": 200,
            "oversample_prompts": 3,
        },
        "checkpoint": {"every_n_steps": 1},
    }
    seen = Seen(monkeypatch)
    for steps in (1, 3):
        place = {"dir": str(tmp_path / "run"), "steps": steps, "device": "cpu"}
        reinforce.run(configured(inputs, twin, tmp_path, **sections, run=place))
    samples = lines(tmp_path / "run" / "samples.jsonl")
    assert {sample["step"] for sample in samples} == {1, 2, 3}
    assert all(sample["failure"] is None for sample in samples)
    versions = {min(set(s["weight_versions"]) - {NOT_SAMPLED}) for s in samples if s["step"] == 2}
    assert 0 in versions, "an episode of the first launch was trained by the second"
    for row, logprobs in seen:
        if min(row.column("staleness")) == max(row.column("staleness")) == 0:
            engine = row.column("logprobs/engine")
            torch.testing.assert_close(engine, logprobs, atol=1e-5, rtol=0)
