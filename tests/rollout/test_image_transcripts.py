"""What a reward model that sees images reads of a sample, against ids written by hand."""

from __future__ import annotations

import gc
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hone.data.prompts import load_prompts
from hone.data.settings import DataConfig, SourceConfig
from hone.data.turns import TurnRenderer
from hone.errors import UserError
from hone.images.parts import data_uri
from hone.images.store import STORE
from hone.rollout.transcripts import Transcript, Transcripts
from hone.types import Observation, Prompt, Sample, StopReason, Turn
from tests.images.drawn import drawn, encoded
from tests.images.family import FAMILIES, Family
from tests.tables import table

A, B, C = encoded(drawn(1, 64, 96)), encoded(drawn(2, 70, 40)), encoded(drawn(3, 50, 90))
PAIRS = [("qwen3_vl", other) for other in FAMILIES] + [
    ("smolvlm", "gemma3"),
    ("gemma3", "smolvlm"),
]
"""Families of a policy and of its reward model."""
USER = {"role": "user", "content": "hm"}


@pytest.fixture(scope="module")
def families(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Family]:
    return {name: Family(name, tmp_path_factory.mktemp(name)) for name in FAMILIES}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a.png").write_bytes(A)
    (tmp_path / "b.png").write_bytes(B)
    return tmp_path


def settings(folder: Path, row: dict[str, Any], **keys: Any) -> DataConfig:
    (folder / "train.jsonl").write_text(json.dumps(row) + "\n")
    return DataConfig(train=(SourceConfig(path=str(folder / "train.jsonl")),), **keys)


def prompt_of(family: Family, cfg: DataConfig) -> Prompt:
    data = load_prompts(cfg, family.tokenizer, images=family.reader(), keeps_messages=True)
    return data.known_rows()[0]


def transcripts_of(family: Family, cfg: DataConfig, **changes: Any) -> Transcripts:
    values: dict[str, Any] = {"images": family.reader(), "max_tokens": 2000, **changes}
    size = len(family.tokenizer)
    return Transcripts(family.tokenizer, cfg, vocab_size=size, path="judge", **values)


def assert_reads(family: Family, found: Transcript, text: str, *images: bytes) -> None:
    """The ids of `text` with an image for each `<image>` in it, and the images at their places."""
    reader, marks = family.reader(), text.replace("<image>", "\x00")
    row = reader.read(list(images), None)
    marks = marks.replace("\x00", reader.settings.bare)
    ids = family.ids(reader.expand(marks, row, "by hand"))
    assert list(found.token_ids) == ids
    hashes = [reader.hash_of(x, n) for x in row for n in range(len(x.layout.tiles))]
    assert [content.hash for content in found.model_input.contents] == hashes
    covered = [n for x in found.model_input.contents for n in range(x.start, x.stop)]
    pad = reader.settings.placeholder_id
    assert covered == [place for place, token in enumerate(ids) if token == pad]


TEXT_OF_ROW = "<image> or <image>?"
ROW = {"images": ["a.png", "b.png"], "prompt": TEXT_OF_ROW}


@table("policy, judge", PAIRS)
def test_a_prompt_and_its_completion(
    policy: str, judge: str, families: dict[str, Family], folder: Path
) -> None:
    """With messages, as a text, and as it was cut; two images, whatever is in the policy's ids."""
    family, own = families[policy], families[judge]
    messages = [{"role": "user", "content": TEXT_OF_ROW}]
    for row in (ROW, {"images": ROW["images"], "messages": messages}):
        cfg = settings(folder, row)
        transcripts, prompt = transcripts_of(own, cfg), prompt_of(family, cfg)
        for is_truncated, end in ((False, "<|im_end|>"), (True, "")):
            found = transcripts.of(prompt, "b", is_truncated=is_truncated)
            text = f"<|im_start|>{TEXT_OF_ROW}<|im_end|><|im_start|>b{end}"
            assert_reads(own, found, text, A, B)
        transcripts.check(prompt)
        transcripts.check(replace(prompt, answer="b"))
    for asked in (TEXT_OF_ROW, " or?"):
        cfg = settings(folder, ROW | {"prompt": asked}, chat="never")
        found = transcripts_of(own, cfg).of(prompt_of(family, cfg), "b", is_truncated=False)
        text = asked if asked == TEXT_OF_ROW else f"<image><image>{asked}"
        assert_reads(own, found, f"{text}b<|im_end|>", A, B)


def played(
    family: Family, cfg: DataConfig, said: Sequence[Observation], opening: Observation | None = None
) -> Sample:
    """An episode whose turns are `t0`, `t1`, ... with what the environment has said between."""
    render = TurnRenderer(
        family.tokenizer, cfg, vocab_size=len(family.tokenizer), images=family.reader()
    )
    prompt = prompt_of(family, cfg)
    if opening is not None:
        prompt = render.opening(prompt, opening)
    sample = Sample(
        id="s", prompt=prompt, index=0, token_ids=[], logprobs=[], weight_versions=[],
        loss_mask=[], stop_reason=StopReason.EOS,
    )  # fmt: skip
    for number, answer in enumerate((*said, None)):
        start = len(sample.token_ids)
        ids = family.ids(f"t{number}")
        if answer is None or answer.role is not None:
            ids += family.ids("<|im_end|>")
        reason = StopReason.EOS if len(ids) > 2 else StopReason.STOP_STRING
        sample.token_ids += ids
        end = len(sample.token_ids)
        sample.turns.append(Turn(start=start, end=end, text=f"t{number}", stop_reason=reason))
        if answer is not None:
            made = render(sample, answer)
            turn = sample.turns[-1]
            turn.observed, turn.messages = made.text, made.messages
            sample.model_input = sample.model_input.followed_by(made.model_input, end)
            sample.token_ids += made.token_ids
    sample.text = "never read"
    return sample


def shown(text: str, image: bytes) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}, {"type": "image", "image": data_uri(image)}]


@table("policy, judge", PAIRS)
def test_an_episode_in_which_images_are_shown(
    policy: str, judge: str, families: dict[str, Family], folder: Path
) -> None:
    """At its start, in messages, and in the text of the policy's own message."""
    family, own = families[policy], families[judge]
    cfg = settings(folder, {"images": ["a.png"], "prompt": "<image>?"})
    said = [
        Observation(shown("look ", B)),
        Observation(shown("see ", C), role=None),
        Observation([{"role": "user", "content": shown("and ", A)}, USER, USER]),
    ]
    sample = played(family, cfg, said, Observation(shown(" go ", C)))
    transcripts = transcripts_of(own, cfg)
    text = (
        "<|im_start|><image>? go <image><|im_end|><|im_start|>t0<|im_end|>"
        "<|im_start|>look <image><|im_end|><|im_start|>t1see <image>t2<|im_end|>"
        "<|im_start|>and <image><|im_end|><|im_start|>hm<|im_end|><|im_start|>hm<|im_end|>"
        "<|im_start|>t3<|im_end|>"
    )
    assert_reads(own, transcripts.of_sample(sample), text, A, C, B, C, A)
    sample.turns[-1].stop_reason = StopReason.LENGTH
    found = transcripts.of_sample(sample)
    assert_reads(own, found, text.removesuffix("<|im_end|>"), A, C, B, C, A)
    alone = played(family, cfg, said[1:2])
    text = "<|im_start|><image>?<|im_end|><|im_start|>t0see <image>t1<|im_end|>"
    assert_reads(own, transcripts.of_sample(alone), text, A, C)


@table("policy, judge", PAIRS)
def test_an_episode_without_a_chat_template(
    policy: str, judge: str, families: dict[str, Family], folder: Path
) -> None:
    """All of it is a text, of the policy, or of the reward model alone."""
    family, own = families[policy], families[judge]
    cfg = settings(folder, {"images": ["a.png"], "prompt": "is it?"}, chat="never")
    said = [Observation(shown("see ", C), role=None)]
    sample = played(family, cfg, said, Observation(shown(" go ", B)))
    found = transcripts_of(own, cfg).of_sample(sample)
    assert_reads(own, found, "<image>is it? go <image>t0see <image>t1<|im_end|>", A, B, C)
    plain = settings(folder, {"images": ["a.png"], "prompt": "is it?"})
    sample = played(family, plain, [Observation(shown("see ", C))])
    found = transcripts_of(own, cfg).of_sample(sample)
    text = "<image>is it?t0<|im_end|><|im_start|>see <image><|im_end|><|im_start|>t1<|im_end|>"
    assert_reads(own, found, text, A, C)


def test_images_that_were_shown_are_known_as_long_as_somebody_reads_them(
    families: dict[str, Family], folder: Path
) -> None:
    """The reward model's own pixels of them too, and those of the data for ever."""
    cfg = settings(folder, {"images": ["a.png"], "prompt": "<image>?"})
    image = encoded(drawn(123, 60, 80))
    sample = played(families["qwen3_vl"], cfg, [Observation(shown("look ", image))])
    found = transcripts_of(families["gemma3"], cfg).of_sample(sample)
    of_data, of_episode = (content.hash for content in found.model_input.contents)
    assert STORE.pixels([of_data, of_episode])
    del sample
    gc.collect()
    assert STORE.source(of_episode) is not None
    del found
    gc.collect()
    assert STORE.source(of_episode) is None
    assert STORE.source(of_data) is not None


def test_what_cannot_be_read_is_said_with_the_row(
    families: dict[str, Family], folder: Path
) -> None:
    family, own = families["gemma3"], families["qwen3_vl"]
    cfg = settings(folder, ROW)
    transcripts, prompt = transcripts_of(own, cfg), prompt_of(family, cfg)
    for mark in ("<|image_pad|>", "a <|vision_start|><|image_pad|><|vision_end|>"):
        with pytest.raises(
            UserError, match=r"row train:1: the completion has '<\|image_pad\|>', w"
        ):
            transcripts.of(prompt, mark, is_truncated=False)
        turns = [Turn(start=0, end=1, text=mark, stop_reason=StopReason.EOS)]
        with pytest.raises(
            UserError, match=r"row train:1: the completion has '<\|image_pad\|>', w"
        ):
            transcripts.of(prompt, "a", is_truncated=False, turns=turns)
    found = transcripts.of(prompt, "<start_of_image>", is_truncated=False)  # of the policy alone
    text = f"<|im_start|>{TEXT_OF_ROW}<|im_end|><|im_start|><start_of_image><|im_end|>"
    assert_reads(own, found, text, A, B)
    (folder / "b.png").write_bytes(encoded(drawn(1, 900, 4)))
    wide = prompt_of(family, settings(folder, ROW))
    said = r"reward.model.path='judge': row train:1: for the reward model image 2 is 4 x 900 pix"
    with pytest.raises(UserError, match=said):
        transcripts.check(wide)
    text_alone = transcripts_of(own, cfg, images=None)
    with pytest.raises(
        UserError, match=r"row train:1 has an image, and the reward model reads tex"
    ):
        text_alone.check(prompt)
    without = settings(folder, {"prompt": "?"})
    for observation in (Observation(shown("", A)), Observation(shown("", A), role=None)):
        sample = played(family, without, [observation])
        with pytest.raises(UserError, match=r"row train:1 has an image, and the reward model rea"):
            text_alone.of_sample(sample)
    assert text_alone.of(prompt_of(family, without), "a", is_truncated=False).token_ids
