"""What an environment shows becomes ids and contents, or is refused by name."""

from __future__ import annotations

import io
from base64 import b64encode
from pathlib import Path
from typing import Any

import pytest
from transformers.models.smolvlm import processing_smolvlm

from hone.data.settings import DataConfig
from hone.data.template_check import RenderError
from hone.data.turns import TurnRenderer
from hone.model_input import TEXT
from hone.types import Message, Observation, Prompt, Sample, StopReason, Turn
from tests.images.family import FAMILIES, Family
from tests.vision.examples import picture


def uri(seed: int, width: int = 90, height: int = 70) -> str:
    stream = io.BytesIO()
    picture(seed, width, height).save(stream, "PNG")
    return "data:image/png;base64," + b64encode(stream.getvalue()).decode()


def image(seed: int, *size: int) -> Message:
    return {"type": "image", "image": uri(seed, *size)}


def text(said: str) -> Message:
    return {"type": "text", "text": said}


@pytest.fixture(autouse=True)
def without_video(monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolVLM's processor needs this package for videos alone."""
    monkeypatch.setattr(processing_smolvlm, "num2words", object())


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family("qwen3_vl", tmp_path_factory.mktemp("qwen"))


def renderer(family: Family, *, reads: bool = True, **options: Any) -> TurnRenderer:
    tokenizer = family.tokenizer
    images = family.reader() if reads else None
    cfg = DataConfig(train=(), **{"chat": options.pop("chat", "auto")})
    return TurnRenderer(tokenizer, cfg, vocab_size=len(tokenizer), images=images, **options)


def asked(family: Family) -> Prompt:
    messages: tuple[Message, ...] = ({"role": "user", "content": "hello"},)
    rendered = family.tokenizer.apply_chat_template(
        list(messages), tokenize=False, add_generation_prompt=True
    )
    return Prompt(
        id="p", token_ids=tuple(family.ids(rendered)), text=rendered, messages=messages,
        unrendered="hello",
    )  # fmt: skip


def answered(family: Family, turn: str = "yes") -> Sample:
    ids = family.ids(turn)
    return Sample(
        id="s", prompt=asked(family), index=0, token_ids=ids, logprobs=[0.0] * len(ids),
        weight_versions=[0] * len(ids), loss_mask=[True] * len(ids),
        stop_reason=StopReason.STOP_STRING,
        turns=[Turn(start=0, end=len(ids), text=turn, stop_reason=StopReason.STOP_STRING)],
    )  # fmt: skip


SIZES = ((90, 70), (40, 120))


def shown() -> list[Message]:
    return [text("a"), image(1, *SIZES[0]), text("b"), image(2, *SIZES[1])]


def test_an_answer_has_the_ids_of_the_familys_processor(family: Family) -> None:
    render = renderer(family)
    made = render(answered(family), Observation(shown()))
    pictures = [picture(n, *size) for n, size in enumerate(SIZES, 1)]
    assert list(made.token_ids) == family.reference(made.text, pictures)
    reader = family.reader()
    places = [
        n for n, token in enumerate(made.token_ids) if token == reader.settings.placeholder_id
    ]
    covered = [n for c in made.model_input.contents for n in range(c.start, c.stop)]
    assert places == covered
    (message,) = made.messages
    hashes = [part["hash"] for part in message["content"] if part["type"] == "image"]
    assert hashes[0] == made.model_input.contents[0].hash
    assert all(content.shown is not None for content in made.model_input.contents)


def test_an_opening_stands_behind_the_images_of_the_prompt(family: Family) -> None:
    render = renderer(family)
    once = render.opening(asked(family), Observation(shown()[:2]))
    twice = render.opening(once, Observation([{"role": "user", "content": shown()[2:]}]))
    pictures = [picture(n, *size) for n, size in enumerate(SIZES, 1)]
    assert list(twice.token_ids) == family.reference(twice.text, pictures)
    first = once.model_input.contents
    assert twice.model_input.contents[: len(first)] == first


def test_without_a_template_an_image_stands_among_the_text(family: Family) -> None:
    render = renderer(family, chat="never")
    made = render(answered(family), Observation(shown(), role=None))
    pictures = [picture(n, *size) for n, size in enumerate(SIZES, 1)]
    assert made.messages == ()
    assert list(made.token_ids) == family.reference(made.text, pictures)
    prompt = Prompt(id="p", token_ids=(1, 2, 3), text="abc")
    opened = render.opening(prompt, Observation(shown()))
    assert opened.token_ids == (1, 2, 3, *made.token_ids)
    assert opened.model_input == TEXT.followed_by(made.model_input, 3)


def test_a_limit_cuts_texts_and_never_an_image(qwen: Family) -> None:
    (size,) = {
        c.num_tokens for c in renderer(qwen)(answered(qwen), Observation([image(1)]))[3].contents
    }
    limit = size + 60
    render = renderer(qwen, max_observation_tokens=limit)
    made = render(answered(qwen), Observation([text("x" * 200), image(1), text("y" * 200)]))
    assert [c.num_tokens for c in made.model_input.contents] == [size]
    said = made.messages[0]["content"]
    assert sum(len(part.get("text", "")) for part in said) <= 60
    assert "left out" in said[0]["text"]
    assert render.num_cut == 1
    tight = renderer(qwen, max_observation_tokens=size - 1)
    with pytest.raises(RenderError, match=rf"1 image of {size} tokens in one message"):
        tight(answered(qwen), Observation([image(1)]))


REFUSED: dict[str, tuple[Any, str]] = {
    "path": ([{"type": "image", "image": "/etc/hostname"}], "must be a data URI"),
    "bytes": ([{"type": "image", "image": b"abc"}], "must be a data URI"),
    "broken": ([{"type": "image", "image": "data:image;base64,aGVsbG8="}], "image 1 is 5 bytes"),
    "mark": ("look: <|image_pad|>", "says '<|vision_start|><|image_pad|><|vision_end|>'|says '<"),
    "mark in a part": ([text("<|image_pad|>"), image(1)], "stands for an image"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_shown_is_refused_by_name(case: str, qwen: Family) -> None:
    said, words = REFUSED[case]
    with pytest.raises(RenderError, match=words):
        renderer(qwen)(answered(qwen), Observation(said))


def test_a_text_model_refuses_images_and_takes_text_as_before(qwen: Family) -> None:
    render = renderer(qwen, reads=False)
    with pytest.raises(RenderError, match="the model reads text alone"):
        render(answered(qwen), Observation([image(1)]))
    made = render(answered(qwen), Observation("no"))
    assert made.model_input is TEXT


def test_too_large_an_opening_is_refused(qwen: Family, tmp_path: Path) -> None:
    render = renderer(qwen, max_prompt_tokens=20)
    with pytest.raises(RenderError, match="20 leave room"):
        render.opening(asked(qwen), Observation([image(1, 300, 300)]))
