"""Runs in environments that show images, against transformers' whole model and the drawn images."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL.Image import Image

import hone
from hone.config.tree import RLConfig
from hone.errors import UserError
from hone.loops import reinforce
from hone.model_input import Content, ModelInput
from hone.rollout.transcripts import Transcript, Transcripts
from hone.trainer.trainer import Trainer
from hone.types import NOT_SAMPLED, Row, Sample, StopReason
from tests.tiny_runs import lines, make_classifier, tiny_config, write_inputs
from tests.vision.examples import Example, Judge, Twin, picture

ENVS = '''
import base64
import io
import random
import tempfile

import numpy as np
from PIL.Image import fromarray

from hone.envs import Observation


def picture(seed, width, height):
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (-(-height // 10), -(-width // 10), 3), dtype=np.uint8)
    return fromarray(small.repeat(10, 0).repeat(10, 1)[:height, :width])


def drawn(number):
    """The image of a number in one of the ways in which one may be given."""
    image = picture(number, 40 + number % 50, 30 + number % 40)
    if number % 4 == 0:
        return image
    stream = io.BytesIO()
    image.save(stream, "PNG")
    if number % 4 == 1:
        return stream.getvalue()
    if number % 4 == 2:
        return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode()
    path = tempfile.mkstemp(suffix=".png")[1]
    open(path, "wb").write(stream.getvalue())
    return path


def question(seed, turn):
    number = random.Random(f"{seed} {turn}").randrange(10_000)
    return [
        {"type": "text", "text": f"n{number}:"},
        {"type": "image", "image": drawn(number)},
        {"type": "text", "text": "which?"},
    ]


class Stateless:
    """Two images: one in the parts of a message, one in messages."""

    def step(self, episode):
        number = len(episode.turns)
        if number == 3:
            return float(len(episode.turn))
        said = question(episode.seed, number)
        if number == 1:
            return Observation(said, max_tokens=4)
        messages = [{"role": "user", "content": said}, {"role": "user", "content": "go"}]
        return Observation(messages, max_tokens=4)


class Live:
    """An image at the start, one behind the first turn, and one in the policy's own message."""

    def start(self, row):
        self.seed, self.num_turns = row.seed, 0
        return question(row.seed, 0)

    def step(self, action):
        self.num_turns += 1
        if self.num_turns == 3:
            return float(len(action.text))
        said = question(self.seed, self.num_turns)
        return Observation(said, role="user" if self.num_turns == 1 else None, max_tokens=4)
'''
FAMILIES = ("qwen3_vl", "gemma3")
ONE_FAMILY = pytest.mark.parametrize("twin", FAMILIES[:1], indirect=True, scope="module")
LONGEST = 400
CARRIED_OVER: dict[str, Any] = {
    "rollout": {"oversample_prompts": 2},
    "engine": {"max_num_seqs": 5},
    "checkpoint": {"every_n_steps": 1},
}
"""A run whose steps leave episodes to the next one."""


@pytest.fixture(scope="module", params=FAMILIES)
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twin:
    return Twin(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shown")
    (folder / "envs.py").write_text(ENVS)
    picture(1).save(folder / "one.png")
    rows = [
        {"prompt": f"{number}?"} | ({"image": "one.png"} if number % 2 else {})
        for number in range(8)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def configured(inputs: Path, twin: Twin, folder: Path, name: str, **sections: Any) -> RLConfig:
    names: dict[str, Any] = {
        "run": {"dir": folder, "steps": 1},
        "model": {"path": str(twin.folder)},
        "data": {"eval": [], "chat": "auto", "max_prompt_tokens": 500},
        "env": {"path": f"{inputs / 'envs.py'}:{name}", "max_turn_tokens": 4},
        "rollout": {
            "prompts_per_step": 2,
            "n_samples_per_prompt": 3,
            "max_completion_tokens": LONGEST,
        },
        "reward": {"functions": [], "num_workers": 2},
        "engine": {"max_num_seqs": 8, "max_num_batched_tokens": 256},
        "log": {"to": [], "samples_per_step": 99},
    }
    for section, keys in sections.items():
        names[section] = names.get(section, {}) | keys
    return tiny_config(inputs, folder, **names)


class Seen:
    """The rows that a run trains, with the trainer's log-probabilities of their trained tokens."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.rows: dict[str, Row] = {}
        self.logprobs: dict[str, torch.Tensor] = {}
        update = Trainer.update

        def noted(trainer: Trainer, rows: Sequence[Row], *args: Any) -> Any:
            for row, logprobs in zip(rows, trainer.logprobs(rows), strict=True):
                self.rows[row.id], self.logprobs[row.id] = row, logprobs
            return update(trainer, rows, *args)

        monkeypatch.setattr(Trainer, "update", noted)

    def __iter__(self) -> Iterator[tuple[Row, torch.Tensor]]:
        return ((row, self.logprobs[name]) for name, row in self.rows.items())


def images_of(row: Row, twin: Twin) -> list[Image]:
    """The images that the texts of a row name: those of the environment are drawn again."""
    text = str(twin.tokenizer.decode(row.token_ids))
    named = map(int, re.findall(r"n(\d+):", text))
    is_odd = int(re.findall(r"(\d)\?", text)[0]) % 2
    return [*[picture(1)] * is_odd, *(picture(n, 40 + n % 50, 30 + n % 40) for n in named)]


def expected(row: Row, twin: Twin) -> torch.Tensor | None:
    """The log-probabilities of the trained tokens by transformers' whole model, from pixels. None
    where the policy has sampled a placeholder, which transformers would take for an image's."""
    is_pad = [token == twin.settings.placeholder_id for token in row.token_ids]
    if any(pad and trained for pad, trained in zip(is_pad, row.loss_mask, strict=True)):
        return None
    runs = [*re.finditer("1+", "".join("01"[pad] for pad in is_pad))]
    places = [(run.start(), run.end() - run.start()) for run in runs]
    assert [(c.start, c.num_tokens) for c in row.model_input.contents] == places
    contents = [Content(kind="image", hash="", start=start, num_tokens=n) for start, n in places]
    images = tuple(images_of(row, twin))
    logits = twin.logits(Example(row.token_ids, ModelInput(tuple(contents)), images))
    trained = torch.tensor(row.loss_mask).nonzero()[:, 0]
    labels = torch.tensor(row.token_ids)[trained]
    return logits.log_softmax(-1)[trained - 1].gather(1, labels[:, None])[:, 0]


def check(seen: Seen, twin: Twin, *, num_images: int, at_least: int = 3) -> None:
    """All rows have the log-probabilities of the whole model, in the engine and in the trainer."""
    num_checked = 0
    for row, logprobs in seen:
        assert len(images_of(row, twin)) >= num_images
        wanted = expected(row, twin)
        if wanted is not None:
            torch.testing.assert_close(row.column("logprobs/engine"), wanted, atol=1e-4, rtol=0)
            torch.testing.assert_close(logprobs, wanted, atol=1e-4, rtol=0)
            num_checked += 1
    assert num_checked >= at_least


@pytest.mark.parametrize("name", ["Stateless", "Live"])
def test_engine_and_trainer_see_the_images_that_an_environment_shows(
    name: str, inputs: Path, twin: Twin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = Seen(monkeypatch)
    reinforce.run(configured(inputs, twin, tmp_path, name))
    check(seen, twin, num_images=2 + (name == "Live"))
    written = (tmp_path / "samples.jsonl").read_text()
    assert "base64" not in written
    assert '"hash"' in written
    assert len(written) < 6 * 8000


class Judged:
    """The samples that a reward model scores, as they are when the run has ended."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.samples: list[Sample] = []
        read = Transcripts.of_sample

        def noted(transcripts: Transcripts, sample: Sample) -> Transcript:
            self.samples.append(sample)
            return read(transcripts, sample)

        monkeypatch.setattr(Transcripts, "of_sample", noted)


def dialogue(sample: Sample) -> list[str | Image]:
    """The texts and images of an episode in the template of tiny models, written by hand. Images of
    the environment are drawn again from the numbers that it says."""
    number = int(re.findall(r"(\d)\?", str(sample.prompt.unrendered))[0])

    def asked(said: str) -> list[str | Image]:
        (n,) = map(int, re.findall(r"n(\d+):", said))
        return [f"n{n}:", picture(n, 40 + n % 50, 30 + n % 40), "which?"]

    opening = [part["text"] for part in sample.prompt.messages[0]["content"] if "text" in part]
    found: list[str | Image] = ["<|im_start|>", *[picture(1)] * (number % 2), f"{number}?"]
    found += asked(opening[1]) if "n" in "".join(opening) else []
    found.append("<|im_end|><|im_start|>")
    *earlier, last = sample.turns
    for turn in earlier:
        if turn.messages:
            first, *later = (message["content"] for message in turn.messages)
            found += [turn.text, "<|im_end|><|im_start|>", *asked(first[0]["text"])]
            found += [f"<|im_end|><|im_start|>{text}" for text in later]
            found.append("<|im_end|><|im_start|>")
        else:
            found += [turn.text, *asked(turn.observed)]
    return [*found, last.text, "" if last.stop_reason is StopReason.LENGTH else "<|im_end|>"]


def assert_scored(samples: Sequence[Sample], judge: Judge, *, at_least: int) -> None:
    """Each sample has its score with that of the environment, but for those that spell an image."""
    num_checked = 0
    for sample in samples:
        if sample.failure is not None:
            assert "which stands for an image" in sample.failure_detail
            continue
        assert sample.reward is not None
        parts = dialogue(sample)
        assert len([part for part in parts if not isinstance(part, str)]) >= 2
        assert sample.reward.parts["reward_model"] == pytest.approx(judge.score(*parts), abs=1e-5)
        assert sample.reward.total == sum(sample.reward.parts.values())
        num_checked += 1
    assert num_checked >= at_least


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch) -> Judged:
    return Judged(monkeypatch)


@ONE_FAMILY
@pytest.mark.parametrize("name", ["Stateless", "Live"])
def test_a_reward_model_sees_the_images_that_an_environment_shows(
    name: str, inputs: Path, twin: Twin, tmp_path: Path, judged: Judged
) -> None:
    """One of the other family."""
    judge = Judge(tmp_path / "judge", "gemma3")
    reward = {"model": {"path": str(judge.judge)}}
    reinforce.run(configured(inputs, twin, tmp_path / "run", name, reward=reward))
    assert len(judged.samples) == 6
    assert_scored(judged.samples, judge, at_least=4)


@ONE_FAMILY
def test_a_reward_model_sees_what_was_shown_before_a_run_was_resumed(
    inputs: Path, twin: Twin, tmp_path: Path, judged: Judged
) -> None:
    judge = Judge(tmp_path / "judge", "gemma3")
    sections = CARRIED_OVER | {"reward": {"model": {"path": str(judge.judge)}}}
    for last in (1, 2):
        run = {"dir": tmp_path / "run", "steps": last}
        judged.samples.clear()
        reinforce.run(configured(inputs, twin, tmp_path, "Stateless", run=run, **sections))
    versions = [{*sample.weight_versions} - {NOT_SAMPLED} for sample in judged.samples]
    assert any(len(each) > 1 for each in versions)
    assert_scored(judged.samples, judge, at_least=4)


@ONE_FAMILY
def test_a_resumed_run_goes_on_with_images_that_were_shown(
    inputs: Path, twin: Twin, tmp_path: Path
) -> None:
    """Episodes that wait in a checkpoint have the images of their turns with them. Log-probs are
    rounded as the sequences that are computed together let them be, and those are others after a
    resume."""
    held: list[list[dict[str, Any]]] = []
    for name, ends in {"straight": (3,), "resumed": (1, 3)}.items():
        for last in ends:
            run = {"dir": tmp_path / name, "steps": last}
            reinforce.run(
                configured(inputs, twin, tmp_path / name, "Stateless", run=run, **CARRIED_OVER)
            )
        held.append(lines(tmp_path / name / "samples.jsonl"))
    straight, resumed = ([sample.pop("logprobs") for sample in each] for each in held)
    assert held[0] == held[1]
    for before, after in zip(straight, resumed, strict=True):
        assert after == pytest.approx(before, abs=1e-4)
    versions = [set(sample["weight_versions"]) - {NOT_SAMPLED} for sample in held[0]]
    assert any(len(each) > 1 for each in versions)


@ONE_FAMILY
def test_evaluation_and_generation(inputs: Path, twin: Twin, tmp_path: Path) -> None:
    rows, limits = inputs / "train.jsonl", {"data": {"max_prompt_tokens": 500}}
    common: dict[str, Any] = {
        "model": {"path": str(twin.folder)},
        "env": {"path": f"{inputs / 'envs.py'}:Live", "max_turn_tokens": 4},
    }
    run: dict[str, Any] = {"device": "cpu"}
    reward = {"functions": (), "num_workers": 2}
    longest = {"max_completion_tokens": LONGEST}
    apart = run | {"dir": tmp_path}
    scored = hone.evaluate(limits, data=rows, eval=longest, reward=reward, run=apart, **common)
    found = hone.generate(limits, data=rows, generation=longest, run=run, **common)
    for sample in (*scored.samples, *found):
        assert sample.failure is None
        assert len(re.findall(r"n\d+:", sample.prompt)) == 1
        assert len(re.findall(r"n\d+:", sample.completion)) == 2


@ONE_FAMILY
def test_a_text_model_is_told_before_the_run(inputs: Path, twin: Twin, tmp_path: Path) -> None:
    write_inputs(tmp_path)
    (tmp_path / "texts.jsonl").write_text('{"prompt": "1"}\n')
    cfg = configured(
        inputs,
        twin,
        tmp_path / "run",
        "Stateless",
        model={"path": str(tmp_path / "model")},
        data={"train": [{"path": str(tmp_path / "texts.jsonl")}]},
        rollout={"max_completion_tokens": 32},
    )
    with pytest.raises(UserError, match="shows an image, and the model reads text alone"):
        reinforce.run(cfg)


@ONE_FAMILY
@pytest.mark.parametrize("name", ["Stateless", "Live"])
def test_a_reward_model_of_text_is_refused_before_the_run(
    name: str, inputs: Path, twin: Twin, tmp_path: Path
) -> None:
    """By the first row, which has no image of its own."""
    (tmp_path / "texts.jsonl").write_text('{"prompt": "1"}\n')
    cfg = configured(
        inputs,
        twin,
        tmp_path / "run",
        name,
        data={"train": [{"path": str(tmp_path / "texts.jsonl")}]},
        reward={"model": {"path": str(make_classifier(tmp_path / "judge"))}},
    )
    with pytest.raises(UserError, match=r"row texts:1 has an image, and the reward model reads te"):
        reinforce.run(cfg)
