"""What an environment says, as it leaves its worker: images are data URIs of the files' bytes."""

from __future__ import annotations

import io
from base64 import b64decode, b64encode
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hone.envs.session import DataRow
from hone.rewards import said as said_module
from hone.rewards import wire
from hone.rewards.play import read_answer
from hone.rewards.said import num_image_bytes, sendable
from hone.rewards.score import Verdict
from hone.rewards.session_player import SessionCall, SessionPlayer
from hone.rewards.shapes import InvalidScoreError
from hone.rewards.worker import _plain  # pyright: ignore[reportPrivateUsage]
from hone.types import Observation
from tests.vision.examples import picture


def file_of(image: Image.Image, kind: str) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind)
    return stream.getvalue()


def bytes_in(part: dict[str, Any]) -> bytes:
    return b64decode(part["image"].partition(",")[2])


PNG, JPEG = (file_of(picture(1), kind) for kind in ("PNG", "JPEG"))


def test_all_ways_to_give_an_image(tmp_path: Path) -> None:
    (tmp_path / "a.jpg").write_bytes(JPEG)
    uri = "data:image/png;base64," + b64encode(PNG).decode()
    parts = [
        {"type": "image", "image": PNG},
        {"type": "image", "image": str(tmp_path / "a.jpg")},
        {"type": "image_url", "image_url": {"url": uri}},
        {"type": "image", "image": picture(1)},
        {"type": "text", "text": "which?"},
    ]
    for said in (parts, [{"role": "user", "content": parts, "name": "x"}]):
        made = sendable(said)
        content = made if said is parts else made[0]["content"]
        found = [bytes_in(part) for part in content[:4]]
        assert found[:3] == [PNG, JPEG, PNG]
        shown = Image.open(io.BytesIO(found[3]))
        assert shown.tobytes() == picture(1).tobytes()
        assert content[4] == parts[4]
        assert num_image_bytes(made) == sum(len(part["image"]) for part in content[:4])
    assert sendable([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == "ab"


@pytest.mark.parametrize(
    ("image", "words"),
    [
        (JPEG[: len(JPEG) // 2], "an image that cannot be decoded"),
        ("/no/such/file.png", "an image that does not exist"),
        (b"", "an image that is empty"),
        ("https://example.org/a.png", "an image that is the URL"),
        (7, "an image that is a value of type int"),
    ],
)
def test_an_image_that_cannot_be_read_fails_the_sample_by_name(image: Any, words: str) -> None:
    with pytest.raises(InvalidScoreError, match=words):
        sendable([{"type": "image", "image": image}])


def test_too_many_bytes_fail_the_sample_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_IMAGE_BYTES", 4 * len(PNG))
    sendable([{"type": "image", "image": PNG}] * 2)
    with pytest.raises(InvalidScoreError, match=f"and an answer may have {4 * len(PNG):,}"):
        sendable([{"type": "image", "image": PNG}] * 4)
    assert said_module.wire is wire


def test_an_image_does_not_count_as_text_of_the_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "MAX_RESULT_BYTES", len(PNG))
    (part,) = sendable([{"type": "image", "image": PNG}])
    plain = _plain(1, Verdict(observation=Observation([part])))
    assert plain["observation"]["content"] == [part]
    long = _plain(1, Verdict(observation=Observation("x" * len(PNG))))
    assert "the result takes" in long["detail"]


def test_a_session_shortens_texts_and_keeps_images() -> None:
    class Live:
        def start(self, row: DataRow) -> Any:
            return [{"type": "text", "text": "x" * 10**6}, {"type": "image", "image": PNG}]

    player = SessionPlayer(Live, read_answer, file=None)
    found = player(SessionCall(kind="start", row=_ROW))
    assert isinstance(found, Observation)
    text, image = found.content
    assert len(text["text"]) < 2 * 10**5
    assert bytes_in(image) == PNG


_ROW = DataRow(
    prompt="", messages=(), unrendered="", answer=None, raw_answer=None, task="", columns={},
    seed=0, max_turns=1, max_tokens=1,
)  # fmt: skip
