"""Images of samples in the report and in the served page."""

from __future__ import annotations

import base64
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from email.message import Message
from pathlib import Path
from typing import Any

import pytest

from hone.config.run import LogConfig
from hone.images.thumbnails import Thumbnails
from hone.observe.loggers import RunLog
from hone.tools.report import images as images_module
from hone.tools.report.images import asked_of, images_of, marked_pieces
from hone.tools.report.served import serve
from hone.tools.report.write import write_report
from hone.types import Group
from tests.images.image_samples import MARK, drawing, photograph, sample_of, tiles_at
from tests.observe.fake_run import write_run
from tests.tools.report.test_report_samples import (
    needs_node,
    opened,
    rows_of,
    run_script,
    with_tokenizer,
    write_rows,
)

Row = dict[str, Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of two groups of four samples: the first with two images, the second with one."""
    run = write_run(tmp_path / "run", num_steps=1)
    first, second = drawing(tmp_path, 1), photograph(tmp_path, 2)
    two = [*tiles_at(5, first, [(4, 6)]), *tiles_at(60, second, [(8, 8)] * 2)]
    with (
        Thumbnails(run) as thumbnails,
        RunLog(run, LogConfig(to=(), samples_per_step=8), images=thumbnails.rows) as log,
    ):
        for group, (text, contents) in enumerate(
            [(f"Is {MARK} in {MARK}?", two), (f"What is {MARK}?", two[:1])]
        ):
            samples = [sample_of(text, contents, group=group, index=i) for i in range(4)]
            log.samples(1, [Group(id=f"{group}", prompt=samples[0].prompt, samples=samples)])
    return run


TEXTS = [
    "image 1, 24 tokens (4 x 6), tokens 5 to 28",
    "image 2, 128 tokens (2 tiles of 8 x 8), tokens 60 to 188",
]


def test_a_prompt_has_a_mark_for_each_image_and_what_is_said_of_it(folder: Path) -> None:
    _, groups = opened(folder)
    assert [group["prompt"] for group in groups] == [
        "Is [image 1: 24 tokens] in [image 2: 128 tokens]?",
        "What is [image 1: 24 tokens]?",
    ]
    assert [[image["text"] for image in group["images"]] for group in groups] == [TEXTS, TEXTS[:1]]
    hashes = [image["hash"] for image in rows_of(folder)[0]["images"]]
    assert [image["hash"] for image in groups[0]["images"]] == hashes
    assert all("images" not in sample for group in groups for sample in group["samples"])


def test_the_page_has_each_picture_once(folder: Path) -> None:
    html = write_report(folder).read_text()
    held = re.search(r'<script type="application/json" id="pictures">(.*?)</script>', html)
    assert held is not None
    pictures = json.loads(held[1])
    assert {
        name: base64.b64decode(uri.partition("base64,")[2]) for name, uri in pictures.items()
    } == {file.stem: file.read_bytes() for file in (folder / "images").iterdir()}
    assert {uri.partition(";")[0] for uri in pictures.values()} == {
        "data:image/png",
        "data:image/jpeg",
    }
    assert all(html.count(uri) == 1 for uri in pictures.values())


def test_of_too_many_pictures_the_last_ones_are_in_the_page(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (image["hash"] for image in rows_of(folder)[0]["images"])
    size = len(base64.b64encode((folder / "images" / f"{second}.jpg").read_bytes()))
    monkeypatch.setattr(images_module, "MAX_PICTURE_BYTES", size)
    html = write_report(folder).read_text()
    assert f'"{second}":"data:' in html
    assert f'"{first}":"data:' not in html


def test_a_page_without_images_has_no_pictures(tmp_path: Path) -> None:
    html = write_report(write_run(tmp_path / "run", num_steps=1)).read_text()
    assert 'id="pictures"' not in html


def test_a_sample_with_images_of_its_own_has_them(folder: Path) -> None:
    """A session may open with another image in the same text."""
    rows = rows_of(folder)
    own = [rows[4], rows[5] | {"images": [rows[5]["images"][0] | {"hash": "ab" * 16}]}]
    write_rows(folder, own)
    _, [group] = opened(folder)
    assert group["images"][0]["hash"] == rows[4]["images"][0]["hash"]
    assert "images" not in group["samples"][0]
    assert group["samples"][1]["images"][0]["hash"] == "ab" * 16


def test_a_column_of_the_data_is_no_list_of_images() -> None:
    """`hone generate` keeps the columns of a row."""
    for given in (["a.png"], "a.png", None, 3, [{"path": "a.png", "bytes": None}]):
        head = {"prompt": "p", "images": given}
        assert asked_of(head) == {"prompt": "p"}


def test_the_tokens_of_an_image_are_one_mark() -> None:
    """The sample begins at token 100, behind a prompt with an image."""
    head: Row = {
        "images": [
            {"hash": "a", "start": 5, "end": 29, "num_tokens": 24},
            {"hash": "b", "start": 102, "end": 105, "num_tokens": 3, "turn": 0},
        ]
    }
    pieces = ["x", "<s>", "pad", "pad", "pad", "</s>", "y"]
    marked = ["x", "<s>", "[image 2: 3 tokens]", "", "", "</s>", "y"]
    assert marked_pieces(pieces, head, begin=100) == marked


def test_an_episode_has_its_images_at_their_turns(folder: Path) -> None:
    """In the texts of its turns, and token by token."""
    with_tokenizer(folder)
    row = rows_of(folder)[0]
    end = len(row["prompt_token_ids"])
    shown = {"hash": "ab" * 16, "start": end + 2, "end": end + 4, "num_tokens": 2, "turn": 0}
    turns = [
        {"start": 0, "end": 2, "text": "look", "observed": [{"role": "tool", "content": "here:"}]},
        {"start": 4, "end": 5, "text": "seen"},
    ]
    write_rows(folder, [row | {"turns": turns, "images": [*row["images"], shown]}])
    _, [group] = opened(folder)
    (sample,) = group["samples"]
    assert [image["text"] for image in group["images"]] == TEXTS, "of the prompt alone"
    images = [{"hash": "ab" * 16, "text": "image 3, 2 tokens, tokens 202 to 203"}]
    assert [turn.get("images") for turn in sample["turns"]] == [images, None]
    assert sample["pieces"][2:4] == ["[image 3: 2 tokens]", ""]
    with serve(folder, 0) as server:
        episodes = json.loads(get(server.port, "episodes")[1])
    (last,) = episodes["last"]
    assert last["prompt"] == "Is [image 1: 24 tokens] in [image 2: 128 tokens]?"
    assert last["images"] == group["images"]
    assert last["turns"][0]["images"] == images


# -- the served page ----------------------------------------------------------------------------


def get(port: int, path: str, host: str = "127.0.0.1") -> tuple[int, bytes, Message]:
    request = urllib.request.Request(f"http://127.0.0.1:{port}/{path}", headers={"Host": host})
    try:
        with urllib.request.urlopen(request) as reply:
            return reply.status, reply.read(), reply.headers
    except urllib.error.HTTPError as error:
        return error.code, error.read(), error.headers


def test_pictures_are_served_by_hash(folder: Path) -> None:
    with serve(folder, 0) as server:
        group = json.loads(get(server.port, "group?number=0")[1])
        assert [image["text"] for image in group["images"]] == TEXTS
        page = json.loads(get(server.port, "samples")[1])
        assert page["questions"][1] == "What is [image 1: 24 tokens]?"
        for image, suffix, kind in zip(
            group["images"], (".png", ".jpg"), ("image/png", "image/jpeg"), strict=True
        ):
            status, data, headers = get(server.port, f"picture?hash={image['hash']}")
            file = folder / "images" / f"{image['hash']}{suffix}"
            assert (status, data) == (200, file.read_bytes())
            assert headers["Content-Type"] == kind
            assert headers["X-Content-Type-Options"] == "nosniff"
            assert get(server.port, f"picture?hash={image['hash']}", "evil.example")[0] == 403


def test_nothing_else_is_served_as_a_picture(folder: Path) -> None:
    """Neither files elsewhere, nor other files of the folder, nor what a link there leads to."""
    (folder / "secret.png").write_bytes(b"secret")
    (folder / "images" / "notes.png").write_bytes(b"notes")
    (folder / "images" / f"{'ab' * 16}.png").symlink_to(folder / "secret.png")
    names = [
        "",
        "../secret",
        "..%2Fsecret",
        "..%2fsecret.png",
        urllib.parse.quote(str(folder / "secret"), safe=""),
        "ab%00",
        "notes",
        "ab" * 16,
        "cd" * 16,
        "%C3%A9",
        "a%0A",
    ]
    with serve(folder, 0) as server:
        for name in names:
            assert get(server.port, f"picture?hash={name}")[0] == 404, name
        assert get(server.port, "picture")[0] == 404
        assert get(server.port, f"images/{'cd' * 16}.png")[0] == 404


def test_a_written_page_embeds_no_other_file_either(folder: Path) -> None:
    (folder / "secret.png").write_bytes(b"secret")
    rows = rows_of(folder)
    write_rows(folder, [rows[0] | {"images": [rows[0]["images"][0] | {"hash": "../secret"}]}])
    html = write_report(folder).read_text()
    assert base64.b64encode(b"secret").decode() not in html


# -- the page's script --------------------------------------------------------------------------


@needs_node
def test_names_and_texts_are_escaped() -> None:
    """Rows are data: neither text nor hash may become HTML, nor a name of JavaScript's own."""
    evil = {"hash": '"><script>alert(1)</script>', "text": "<img src=x onerror=alert(2)>"}
    uri = json.dumps(f"data:{evil['hash']}")
    drawn = [
        f"(PICTURES = {pictures}, imagesHtml([{json.dumps(evil)}]))"
        for pictures in ("null", f"new Map([[{json.dumps(evil['hash'])}, {uri}]])", "new Map()")
    ]
    names = [{"hash": name, "text": "t"} for name in ("constructor", "__proto__")]
    *escaped, plain = run_script(f"[{','.join(drawn)}, imagesHtml({json.dumps(names)})]")
    for html in escaped:
        assert "<script" not in html
        assert "<img src=x" not in html
        assert "&#60;img src=x onerror=alert(2)&#62;" in html
    figure = "<figure><figcaption>t</figcaption></figure>"
    assert plain == f'<div class="images">{figure}{figure}</div>'


@needs_node
def test_a_picture_comes_from_the_page_or_from_the_server() -> None:
    image = json.dumps({"hash": "ab", "text": "image 1"})
    sources = ("new Map([['ab', 'data:x']])", "null")
    drawn = [f"(PICTURES = {held}, imagesHtml([{image}]))" for held in sources]
    page, server, *without = run_script(f"[{','.join(drawn)}, imagesHtml([]), imagesHtml()]")
    assert '<img src="data:x"' in page
    assert '<img src="picture?hash=ab"' in server
    assert without == ["", ""]


@needs_node
def test_a_click_enlarges_a_picture_by_its_longer_edge_and_another_undoes_it() -> None:
    sizes = [(256, 26), (26, 256), (24, 18), (256, 256)]
    widths = run_script(
        f"""{json.dumps(sizes)}.map(([naturalWidth, naturalHeight]) => {{
          const held = new Set();
          const toggle = (name) => held.delete(name) ? false : Boolean(held.add(name));
          const picture = {{ naturalWidth, naturalHeight, style: {{}} }};
          const button = {{ firstElementChild: picture, classList: {{ toggle }} }};
          return [0, 1].map(() => (enlarge(button), picture.style.width));
        }})"""
    )
    assert widths == [["480px", ""], ["49px", ""], ["480px", ""], ["480px", ""]]
    assert 'onclick="enlarge(this)"' in run_script(
        "(PICTURES = null, imagesHtml([{hash: 'ab', text: ''}]))"
    )


@needs_node
def test_images_stand_below_their_prompt_and_at_their_turn(folder: Path) -> None:
    index, groups = opened(folder)
    mask = "new Uint8Array(99).fill(1)"
    html = run_script(f"groupHtml({json.dumps(index)}, 0, {json.dumps(groups[0])}, {mask})")
    places = [html.index(text) for text in ("[image 2: 128 tokens]", *TEXTS, '<div class="cards">')]
    assert places == sorted(places)
    turns = [
        {
            "text": "look",
            "observed": [{"role": "tool", "text": "here"}],
            "images": [{"hash": "ab", "text": "the image"}],
        },
        {"text": "seen", "images": [{"hash": "cd", "text": "at the end"}]},
    ]
    html = run_script(f"turnsHtml({json.dumps(turns)})")
    places = [html.index(word) for word in ("look", "here", "the image", "seen", "at the end")]
    assert places == sorted(places)
    assert html.count("the image") == 1


def test_what_is_said_of_an_image() -> None:
    image = {"hash": "a", "start": 0, "end": 1, "num_tokens": 1}
    large = {"hash": "b", "start": 1500, "end": 2700, "num_tokens": 1190, "tiles": 3}
    assert [held["text"] for held in images_of({"images": [image, large]})] == [
        "image 1, 1 token, token 0",
        "image 2, 1,190 tokens (3 tiles), tokens 1,500 to 2,699",
    ]
