"""Images in requests: what the engine gets of them, what is refused, and how long they are kept.

The engine is scripted, and the server, the readers of images and the tokenizers are the real ones.
"""

from __future__ import annotations

import base64
import gc
import io
import json
import struct
import threading
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from hone.door import images as door_images
from hone.door import sessions
from hone.door.images import OpenedImage
from hone.images import opening, pixels
from hone.images.opening import ImageFile, open_image
from hone.images.pixels import content_hash, layout_of
from hone.images.store import STORE
from hone.model_input import ModelInput
from tests.door.served import (
    TOOLS,
    Reply,
    Served,
    SessionClient,
    chat_body,
    in_threads,
    serving,
    until,
    user,
)
from tests.images.drawn import drawn, encoded
from tests.images.family import Family
from tests.tables import check_rows, table

CHAT, RESPONSES, MESSAGES = "/v1/chat/completions", "/v1/responses", "/v1/messages"
COMPLETIONS, GENERATE = "/v1/completions", "/inference/v1/generate"
PNG = encoded(drawn(1))


@pytest.fixture(scope="module", params=["qwen3_vl", "gemma3"])
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family("qwen3_vl", tmp_path_factory.mktemp("qwen3_vl"))


@pytest.fixture(autouse=True)
def no_image_is_left() -> Iterator[None]:
    """Each test ends with the images of requests with which it began. Those are of other tests of
    this process, which pytest may keep alive, as it does where one has failed."""
    gc.collect()
    before = len(STORE._shown)
    yield
    gc.collect()
    assert len(STORE._shown) <= before


def png(number: int) -> bytes:
    """An image of these tests alone: what others keep of theirs must not be found."""
    return encoded(drawn(9_000 + number))


def uri(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def part(data: bytes | str) -> dict[str, Any]:
    """A part of OpenAI's chat API."""
    url = data if isinstance(data, str) else uri(data)
    return {"type": "image_url", "image_url": {"url": url}}


def block(data: bytes) -> dict[str, Any]:
    """A block of Anthropic's API."""
    text = base64.b64encode(data).decode()
    return {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": text}}


def text(said: str) -> dict[str, Any]:
    return {"type": "text", "text": said}


def sees(served: Served) -> tuple[list[int], ModelInput]:
    """The prompt of the last request to the engine."""
    request = served.engine.submitted[-1]
    return [*request.prompt_ids], request.model_input


def check_seen(served: Served, family: Family, said: str, *images: int) -> None:
    """The engine has the ids that the family's own processor makes of a text with marks, and the
    hashes of these drawings in the places of their tokens."""
    ids, model_input = sees(served)
    settings = family.reader().settings
    assert ids == family.reference(said, [drawn(number) for number in images])
    files = [open_image(png(number), folder=None) for number in images]
    tiles = [(file, n) for file in files for n in range(len(layout_of(file, settings).tiles))]
    hashes = [content_hash(file.digest, settings, n) for file, n in tiles]
    assert [content.hash for content in model_input.contents] == hashes
    places = [n for n, token in enumerate(ids) if token == settings.placeholder_id]
    assert places == [n for each in model_input.contents for n in range(each.start, each.stop)]


def rendered(family: Family, messages: list[list[str | None]]) -> str:
    """Messages of texts, and None for an image, as the chat template of tiny models writes them."""
    bare = family.reader().settings.bare if family.name != "gemma3" else "<start_of_image>"
    said = "".join(
        "<|im_start|>" + "".join(bare if each is None else each for each in parts) + "<|im_end|>"
        for parts in messages
    )
    return f"{said}<|im_start|>"


# -- what the engine gets ------------------------------------------------------------------------


FORMS: dict[str, tuple[str, Any]] = {
    "chat": (CHAT, {"messages": [user([text("one "), part(png(1)), part(png(2))])]}),
    "chat, a text": (
        CHAT,
        {
            "messages": [
                user([text("one "), {"type": "image_url", "image_url": uri(png(1))}, part(png(2))])
            ]
        },
    ),
    "chat, as templates": (
        CHAT,
        {
            "messages": [
                user([text("one "), *({"type": "image", "image": uri(png(n))} for n in (1, 2))])
            ]
        },
    ),
    "responses": (
        RESPONSES,
        {
            "input": [
                user(
                    [
                        {"type": "input_text", "text": "one "},
                        {"type": "input_image", "image_url": uri(png(1)), "detail": "auto"},
                        {"type": "input_image", "image_url": uri(png(2))},
                    ]
                )
            ]
        },
    ),
    "anthropic": (
        MESSAGES,
        {"max_tokens": 64, "messages": [user([text("one "), block(png(1)), block(png(2))])]},
    ),
}


@table("form", FORMS)
def test_every_api_shows_the_engine_the_same_images(family: Family, form: str) -> None:
    path, body = FORMS[form]
    with serving(lambda _: "ab", sees=family) as served:
        for streams in (False, True):
            assert served.send(path, body | {"stream": streams}).status == 200
            check_seen(served, family, rendered(family, [["one ", None, None]]), 1, 2)


CALL = '<call>add {"a": 1}</call>'
TOOL_FORMS: dict[str, tuple[str, list[Any], dict[str, Any]]] = {
    "chat": (
        CHAT,
        [{"role": "tool", "tool_call_id": "call_0", "content": [text("is "), part(png(1))]}],
        {"tools": TOOLS},
    ),
    "responses": (
        RESPONSES,
        [
            {
                "type": "function_call_output",
                "call_id": "call_0",
                "output": [
                    {"type": "input_text", "text": "is "},
                    {"type": "input_image", "image_url": uri(png(1))},
                ],
            }
        ],
        {"tools": [{"type": "function", "name": "add", "parameters": {"type": "object"}}]},
    ),
    "anthropic": (
        MESSAGES,
        [
            user(
                [
                    {
                        "type": "tool_result",
                        "tool_use_id": "call_0",
                        "content": [text("is "), block(png(1))],
                    }
                ]
            )
        ],
        {"tools": [{"name": "add", "input_schema": {"type": "object"}}], "max_tokens": 64},
    ),
}


@table("form", TOOL_FORMS)
def test_a_tool_may_answer_with_an_image(qwen: Family, form: str) -> None:
    path, answers, options = TOOL_FORMS[form]
    field = "input" if path == RESPONSES else "messages"
    with serving(lambda _: CALL, sees=qwen) as served:
        client = served.open()
        first = client.send(path, {field: [user("add")]} | options).json
        said: list[Any]
        if path == CHAT:
            said = [first["choices"][0]["message"]]
        elif path == RESPONSES:
            said = first["output"]
        else:
            said = [{"role": "assistant", "content": first["content"]}]
        reply = client.send(path, {field: [user("add"), *said, *answers]} | options)
        assert reply.status == 200, reply.body
        ids, model_input = sees(served)
        end = json.loads(client.send("/end", {"return_paths": True}).body)
    assert (end["bridged"], end["num_paths"]) == (1, 1)
    tail = rendered(qwen, [["is ", None]])
    wanted = qwen.reference(tail, [drawn(1)])
    assert ids[-len(wanted) :] == wanted
    [content] = model_input.contents
    assert ids[content.start : content.stop] == [qwen.reader().settings.placeholder_id] * 4
    [path_] = end["paths"]
    assert path_["images"] == [{"hash": content.hash, "start": content.start, "num_tokens": 4}]


# -- one turn or two -----------------------------------------------------------------------------


def asked(client: SessionClient, *messages: dict[str, Any], **options: Any) -> dict[str, Any]:
    """The message of an answer."""
    return client.chat(*messages, **options)["choices"][0]["message"]


def test_requests_that_are_equal_but_for_an_image_are_two_paths(family: Family) -> None:
    with serving(sees=family) as served:
        client = served.open()
        first = asked(client, user([part(png(1)), text("?")]))
        ids = sees(served)[0]
        asked(client, user([part(png(2)), text("?")]))
        other_ids, other = sees(served)
        # Behind the first: what follows is rendered alone, and the image in it is another one.
        second = asked(client, user([part(png(1)), text("?")]), first, user([part(png(3))]))
        asked(client, user([part(png(1)), text("?")]), first, user([part(png(4))]))
        asked(client, user([part(png(2)), text("?")]), first, user([part(png(3))]))
        end = client.end()
    assert ids == other_ids, "the ids say nothing of it"
    assert second
    assert {name: end[name] for name in ("bridged", "forks", "branches")} == {
        "bridged": 0,
        "forks": 2,
        "branches": 2,
    }
    hashes = [[image["hash"] for image in path["images"]] for path in end["paths"]]
    one, two, three, four = (hash_of(family, number) for number in (1, 2, 3, 4))
    assert hashes == [[two], [one, three], [one, four], [two, three]]
    assert [content.hash for content in other.contents] == [two]


def hash_of(family: Family, number: int) -> str:
    file = open_image(png(number), folder=None)
    return content_hash(file.digest, family.reader().settings, 0)


def test_an_image_that_is_sent_again_is_the_same_one(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each request of an agent has all images of its history: they are decoded once, and kept
    once, whichever request has brought them."""
    decoded: list[int] = []
    made = pixels.load_rgb
    monkeypatch.setattr(pixels, "load_rgb", lambda file: decoded.append(1) or made(file))
    monkeypatch.setattr(STORE, "max_bytes", 0)  # nothing is kept of pixels
    others, own = num_sources(), range(40, 43)  # of other tests of this process, and of this one
    with serving(sees=family) as served:
        client, messages = served.open(history="linear"), list[dict[str, Any]]()
        for number in own:
            messages.append(user([part(png(number)), text(f"{number}")]))
            messages.append(asked(client, *messages))
        assert sum(decoded) == 3
        assert [each.hash for each in sees(served)[1].contents] == [
            hash_of(family, number) for number in own
        ]
        num_kept: list[int] = []
        served.engine.on_step = lambda: num_kept.append(num_sources())
        asked(client, *messages, user("and?"))
        assert {number - others for number in num_kept} == {3}
        end = client.end()
    assert (end["bridged"], end["num_paths"]) == (3, 1)
    hashes = [image["hash"] for image in end["paths"][0]["images"]]
    assert hashes == [hash_of(family, number) for number in own]


def num_sources() -> int:
    """How many times this process has the bytes of an image."""
    gc.collect()
    files = [each for each in gc.get_objects() if isinstance(each, ImageFile)]
    return len({id(file.source) for file in files})


# -- what is refused -----------------------------------------------------------------------------


def bomb(width: int, height: int) -> bytes:
    """A PNG of some kilobytes that says it has so many pixels, and has rows of zeros."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return (
            struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        )

    head = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    rows = zlib.compress(bytes(1000 * (1 + -(-min(width, 8000) // 8))))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", rows) + chunk(b"IEND", b"")


def in_mode(mode: str) -> bytes:
    stream = io.BytesIO()
    Image.new(mode, (8, 8)).save(stream, "TIFF")
    return stream.getvalue()


BAD: dict[str, tuple[Any, str]] = {
    "nothing": ({"type": "image_url"}, "without an image"),
    "null": ({"type": "image_url", "image_url": {"url": None}}, "without an image"),
    "a number": ({"type": "image_url", "image_url": {"url": 5}}, "without an image"),
    "an object": ({"type": "image", "image": {"bytes": [1, 2]}}, "without an image"),
    "empty": (part(""), "without an image"),
    "the id of a file": ({"type": "input_image", "file_id": "file-1"}, "without an image"),
    "http": (part("http://127.0.0.1:9/a.png"), "is the URL .*nothing is fetched"),
    "https": (part("HTTPS://example.invalid/a.png"), "is the URL .*nothing is fetched"),
    "a file": (part("file:///etc/passwd"), "is the text .*nothing is fetched or opened"),
    "a path": (part("/etc/passwd"), "is the text .*nothing is fetched or opened"),
    "base64 alone": (part(base64.b64encode(PNG).decode()), "as a data URI"),
    "no comma": (part("data:image/png;base64"), "is a data URI that is not base64"),
    "percents": (part("data:image/png,%89PNG"), "is a data URI that is not base64"),
    "no base64": (part("data:image/png;base64,*#"), "base64 cannot be decoded"),
    "no bytes": (part("data:image/png;base64,"), "has 0 bytes"),
    "no image": (part(uri(b"GET / HTTP/1.1")), "is no image that can be read"),
    "SVG": (part(uri(b"<svg xmlns='http://www.w3.org/2000/svg'/>")), "is no image that can be"),
    "PDF": (part(uri(b"%PDF-1.7 ...")), "is no image that can be read"),
    "too many pixels": (part(uri(bomb(30_000, 30_000))), "is 30,000 x 30,000 pixels|too large"),
    "a bomb": (part(uri(bomb(2**30, 2**30))), "too large|pixels"),
    "its first half": (part(uri(PNG[: len(PNG) // 2])), "cannot be decoded"),
    "half a JPEG": (part(uri(encoded(drawn(1), "JPEG")[:700])), "cannot be decoded"),
    "broken inside": (part(uri(PNG[:200] + bytes(50) + PNG[250:])), "cannot be decoded"),
    "pixels of unknown range": (part(uri(in_mode("F"))), "mode 'F'"),
    "too flat": (part(uri(encoded(Image.new("RGB", (3000, 2))))), "aspect ratio|shape|edge"),
    "source of a URL": (
        {"type": "image", "source": {"type": "url", "url": "https://example.invalid/a.png"}},
        "is the URL .*nothing is fetched",
    ),
    "source of a file": ({"type": "image", "source": {"type": "file", "file_id": "f"}}, "base64"),
    "source without data": ({"type": "image", "source": {"type": "base64"}}, "base64"),
}


def test_a_bad_image_is_refused_by_name(qwen: Family) -> None:
    with serving(sees=qwen) as served:

        def check(image: dict[str, Any], words: str) -> None:
            messages = [user("a"), user([text("b"), image])]
            reply = served.send(CHAT, chat_body(*messages))
            check_refused(reply, words, "messages[1].content[1]")
            if image["type"] == "image":
                reply = served.send(MESSAGES, {"max_tokens": 5, "messages": messages})
                check_refused(reply, words, "messages[1].content[1]")

        check_rows(BAD, check, minimum=20)
        assert not served.engine.submitted
        assert served.send(CHAT, chat_body(user([part(PNG)]))).status == 200


def check_refused(reply: Reply, words: str, field: str) -> None:
    assert reply.status == 400, reply.body
    error = reply.json["error"]
    assert "param" not in error or error["param"].removesuffix(".source") == field
    assert pytest.raises(Exception, match=words).matches(ValueError(error["message"]))
    assert error["message"].startswith(field)
    assert reply.headers["x-should-retry"] == "false"


def test_nothing_is_opened_or_fetched_for_a_stranger(
    qwen: Family, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Also where the data of the run may be fetched (`data.image_urls`)."""
    tried: list[Any] = []
    for name in ("_fetch", "_read"):
        monkeypatch.setattr(opening, name, lambda *args: tried.append(args) or PNG)
    (tmp_path / "a.png").write_bytes(PNG)
    places = ["http://127.0.0.1:9/a.png", f"{tmp_path}/a.png", f"file://{tmp_path}/a.png", "~/a"]
    # Such as would be taken for data by what follows the name of their kind.
    places += ["http://127.0.0.1:9/a;base64,b.png", f"{tmp_path}/a;base64,b.png"]
    with serving(sees=qwen) as served:
        images = served.door.model.images
        assert images is not None
        monkeypatch.setattr(images.reader, "_may_fetch", True)
        for place in places:
            shown = {"type": "input_image", "image_url": place}
            asked_ = [
                (CHAT, {"messages": [user([part(place)])]}),
                (CHAT, {"messages": [user([{"type": "image", "image": {"path": place}}])]}),
                (CHAT, {"messages": [user([{"type": "image", "path": place}])]}),
                (RESPONSES, {"input": [user([shown])]}),
                (
                    MESSAGES,
                    {
                        "max_tokens": 5,
                        "messages": [
                            user([{"type": "image", "source": {"type": "url", "url": place}}])
                        ],
                    },
                ),
            ]
            for path, body in asked_:
                assert served.send(path, body).status == 400
    assert not tried


@pytest.mark.parametrize("path", [CHAT, RESPONSES, MESSAGES])
def test_a_text_model_refuses_an_image_by_name(path: str) -> None:
    image = block(PNG) if path == MESSAGES else part(PNG)
    field = "input" if path == RESPONSES else "messages"
    with serving() as served:
        body = {field: [user([text("a"), image])], "max_tokens": 5}
        reply = served.send(path, body)
        assert reply.status == 400
        message = reply.json["error"]["message"]
        assert message.startswith(f"{field}[0].content[1] is an image, and scripted reads text")
        assert not served.engine.submitted


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, {"messages": [{"role": "assistant", "content": [part(PNG)]}, user("a")]},
         "messages[0].content[0]"),
        (RESPONSES, {"input": [{"role": "assistant", "content": [part(PNG)]}, user("a")]},
         "input[0].content[0]"),
        (MESSAGES, {"max_tokens": 5, "system": [block(PNG)], "messages": [user("a")]},
         "system[0]"),
        (MESSAGES, {"max_tokens": 5, "messages": [
            {"role": "assistant", "content": [block(PNG)]}, user("a")]},
         "messages[0].content[0].type"),
    ],
)  # fmt: skip
def test_images_stand_where_they_are_asked(
    qwen: Family, path: str, body: dict[str, Any], field: str
) -> None:
    with serving(sees=qwen) as served:
        reply = served.send(path, body)
        assert reply.status == 400
        assert field in reply.json["error"]["message"]


def test_texts_and_ids_do_not_spell_images(family: Family) -> None:
    settings = family.reader().settings
    marks = {settings.mark, settings.placeholder}
    with serving(lambda _: "ab", sees=family) as served:
        for mark in marks:
            for path, body in (
                (CHAT, {"messages": [user(f"a {mark}")]}),
                (CHAT, {"messages": [user([part(PNG), text(mark)])]}),
                (RESPONSES, {"input": f"a {mark}"}),
                (MESSAGES, {"messages": [user(mark)], "max_tokens": 5}),
                (COMPLETIONS, {"prompt": f"a {mark}"}),
            ):
                reply = served.send(path, body)
                assert reply.status == 400
                assert repr(mark) in reply.json["error"]["message"]
        ids = [5, settings.placeholder_id, 6]
        client = served.open()
        assert client.send(GENERATE, {"token_ids": [5]}).status == 200
        later = [5, *family.ids("ab"), family.tokenizer.eos_token_id, *ids]
        for who, path, body in (
            (served, COMPLETIONS, {"prompt": ids}),
            (served, GENERATE, {"token_ids": ids}),
            (client, GENERATE, {"token_ids": later}),
        ):
            reply = who.send(path, body)
            assert reply.status == 400
            assert "stands for a part of an image" in reply.json["error"]["message"]
        # A turn in a session may end in such a text: what has been sampled is not looked at.
        said = asked(client, user("a"))
        assert client.chat(user("a"), said, user("b"))
        assert client.send(CHAT, chat_body(user("a"), said, user(mark))).status == 400


# -- bounds --------------------------------------------------------------------------------------


def test_images_of_too_many_tokens_are_not_decoded(
    qwen: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(STORE, "pixels", lambda _: pytest.fail("it was decoded"))
    with serving(sees=qwen, max_model_len=100) as served:
        reply = served.send(CHAT, chat_body(user([part(png(n)) for n in range(26)])))
        assert (reply.status, reply.json["error"]["code"]) == (400, "context_length_exceeded")
        assert "26 images of the request have 104 tokens" in reply.json["error"]["message"]


def test_the_pixels_of_a_request_are_bounded(qwen: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of images that are not known: what a session has sent before costs nothing."""
    monkeypatch.setattr(door_images, "MAX_NEW_PIXELS", 3 * 60 * 80)
    with serving(sees=qwen) as served:
        client = served.open()
        refused = client.send(CHAT, chat_body(user([part(png(n)) for n in range(4)])))
        assert refused.status == 400
        assert "19,200 pixels together; at most 14,400" in refused.json["error"]["message"]
        assert client.send(CHAT, chat_body(user([part(PNG)] * 9))).status == 200, "one image"
        first = user([part(png(n)) for n in (2, 3, 4)])
        said = asked(client, first)
        asked(client, first, said, user([part(png(n)) for n in (5, 6, 7)]))


def test_the_bytes_of_images_of_a_session_are_bounded(
    qwen: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = [len(png(number)) for number in range(3)]
    monkeypatch.setattr(sessions, "MAX_IMAGE_BYTES", sum(sizes[:2]))
    with serving(sees=qwen) as served:
        client = served.open()
        for _ in range(3):  # each counts once
            asked(client, user([part(png(0))]), seed=1)
            asked(client, user([part(png(1))]), seed=1)
        reply = client.send(CHAT, chat_body(user([part(png(2))])))
        assert (reply.status, reply.json["error"]["code"]) == (409, "session_full")
        assert "of images" in reply.json["error"]["message"]
        asked(served.open(), user([part(png(2))]))


# -- time and memory -----------------------------------------------------------------------------


def test_others_are_answered_while_images_are_decoded(
    qwen: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate, begun = threading.Event(), threading.Event()
    made = STORE.pixels

    def slow(hashes: list[str]) -> Any:
        begun.set()
        assert gate.wait(60)
        return made(hashes)

    monkeypatch.setattr(STORE, "pixels", slow)
    with serving(sees=qwen) as served:

        def ask_others() -> list[int]:
            assert begun.wait(60)
            bodies = [chat_body(user("a")), chat_body(user("b"), stream=True)]
            found = [served.send(CHAT, body).status for body in bodies]
            session = served.open()
            found.append(session.send("/end").status)
            gate.set()
            return found

        slowed = lambda: served.send(CHAT, chat_body(user([part(PNG)]))).status  # noqa: E731
        assert [*in_threads([slowed, ask_others])] == [200, [200, 200, 200]]


def test_a_session_that_ends_while_its_image_is_decoded_gets_no_turn(
    qwen: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = STORE.pixels
    with serving(sees=qwen) as served:
        client = served.open()

        def ended(hashes: list[str]) -> Any:
            client.end()
            return made(hashes)

        monkeypatch.setattr(STORE, "pixels", ended)
        reply = client.send(CHAT, chat_body(user([part(PNG)])))
        assert (reply.status, reply.json["error"]["code"]) == (404, "session_not_found")
        assert not served.engine.submitted


def test_processes_of_the_pool_decode(qwen: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pixels, "load_rgb", lambda _: pytest.fail("it was decoded here"))
    STORE.use_workers(1)
    try:
        with serving(sees=qwen) as served:
            assert served.send(CHAT, chat_body(user([part(png(31))]))).status == 200
            half = part(uri(png(32)[:2000]))
            reply = served.send(CHAT, chat_body(user([half])))
            check_refused(reply, "cannot be decoded", "messages[0].content[0]")
    finally:
        STORE.use_workers(0)


def alive(served: Served) -> dict[str, int]:
    """What this process has of images that requests have brought, besides what tests look at."""
    served.engine.submitted.clear()
    served.finished.clear()
    gc.collect()
    objects = gc.get_objects()
    return {
        "known": len(STORE._shown),
        "files": sum(isinstance(each, ImageFile) for each in objects),
        "opened": sum(isinstance(each, OpenedImage) for each in objects),
    }


def test_images_are_given_back_with_their_session(qwen: Family) -> None:
    with serving(sees=qwen) as served:
        nothing = alive(served)  # but what other tests of this process have left
        client, other = served.open(), served.open()
        messages = list[dict[str, Any]]()
        for number in range(3):
            messages.append(user([part(png(number)), text("?")]))
            messages.append(asked(client, *messages))
        asked(client, user([part(png(8))]))
        asked(other, user([part(png(1))]))
        until(lambda: alive(served)["opened"] == nothing["opened"])
        known = nothing["known"]
        assert alive(served)["known"] == known + 4, "an image of two sessions is there once"
        client.end()
        until(lambda: alive(served)["known"] == known + 1)
        other.end()
        until(lambda: alive(served) == nothing)
        # Requests of no session, those that are refused, and those whose clients leave.
        assert served.send(CHAT, chat_body(user([part(png(1))]))).status == 200
        assert (
            served.send(CHAT, chat_body(user([part(png(1)), part("data:;base64,YQ==")]))).status
            == 400
        )
        served.engine.gate.clear()
        connection = served.connect()
        connection.request(
            "POST", CHAT, json.dumps(chat_body(user([part(png(1))]))), {"x-api-key": served.key}
        )
        until(lambda: served.engine.has_unfinished)
        connection.close()
        served.engine.gate.set()
        until(lambda: alive(served) == nothing)
