"""Ids and contents of rows with images against transformers' processors, for random images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers.models.smolvlm import processing_smolvlm

from hone.errors import UserError
from hone.images.opening import ImageError, open_image
from hone.images.pixels import content_hash, layout_of, make_tiles
from hone.images.reader import ImageReader, RowImage
from hone.images.store import STORE
from hone.model_input import TEXT
from hone.models.tiny_vision import make_vision_tokenizer
from tests.images.drawn import drawn, encoded
from tests.images.family import FAMILIES, Family


@pytest.fixture(autouse=True)
def without_words_for_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolVLM's processor writes the time in videos with this package."""
    monkeypatch.setattr(processing_smolvlm, "num2words", object())


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: Any, tmp_path_factory: pytest.TempPathFactory) -> Family:
    return Family(request.param, tmp_path_factory.mktemp(request.param))


def pictures(seed: int, number: int) -> list[Any]:
    sizes = np.random.default_rng(seed).integers(20, 200, (number, 2))
    return [drawn(seed + k, int(h), int(w)) for k, (h, w) in enumerate(sizes)]


def rendered(reader: ImageReader, number: int) -> str:
    """What a chat template writes for some text with images."""
    return "ab" + "".join(f"{reader.settings.bare}no {place}?" for place in range(number))


def read(reader: ImageReader, images: list[Any]) -> tuple[RowImage, ...]:
    return reader.read([encoded(image) for image in images], None)


@pytest.mark.parametrize("number", [1, 2, 3])
def test_ids_are_those_of_the_processor(family: Family, number: int) -> None:
    reader = family.reader()
    for seed in range(20 * number, 20 * number + 4):
        images = pictures(seed, number)
        text = rendered(reader, number)
        row = read(reader, images)
        ids = family.ids(reader.expand(text, row, "row 1"))
        assert ids == family.reference(text, images)
        check_contents(reader, ids, images, row)


def check_contents(
    reader: ImageReader, ids: list[int], images: list[Any], row: tuple[RowImage, ...]
) -> None:
    """Each placeholder belongs to the tile whose turn it is, and its hash gives that tile's
    pixels."""
    contents = [*reader.contents(ids, row, "row 1").contents]
    settings = reader.settings
    places = [n for n, token in enumerate(ids) if token == settings.placeholder_id]
    assert [n for x in contents for n in range(x.start, x.stop)] == places
    files = [open_image(encoded(image), folder=None) for image in images]
    tiles = [(file, n) for file in files for n in range(len(layout_of(file, settings).tiles))]
    assert len(tiles) == len(contents)
    for (file, n), content in zip(tiles, contents, strict=True):
        tile = layout_of(file, settings).tiles[n]
        assert content.hash == content_hash(file.digest, settings, n)
        assert (content.kind, content.num_tokens, content.shape) == (
            "image",
            tile.num_tokens,
            tile.shape,
        )
        (pixels,) = STORE.pixels([content.hash])
        assert (pixels.values == make_tiles(file, settings)[n].values).all()
    assert reader.images_of(reader.contents(ids, row, "row 1")) == row


def test_a_text_has_no_contents(family: Family) -> None:
    reader = family.reader()
    assert reader.expand("ab", (), "row 1") == "ab"
    assert reader.contents(family.ids("ab"), (), "row 1") is TEXT


def test_the_limit_is_kept(family: Family) -> None:
    for limit in (16, 40, 100):
        reader = family.reader(max_tokens=limit)
        for image in read(reader, [drawn(1, 900, 700), drawn(2, 90, 800), drawn(3, 20, 20)]):
            assert 0 < image.layout.num_features <= limit


def test_what_does_not_match_is_an_error_with_the_row(family: Family) -> None:
    reader = family.reader()
    row = read(reader, pictures(1, 2))
    text, mark = rendered(reader, 2), reader.settings.mark
    for wrong in (rendered(reader, 1), rendered(reader, 3), text.replace(mark, "", 1), "ab"):
        with pytest.raises(UserError, match=r"^row 7: .* 2 images\. A chat template"):
            reader.expand(wrong, row, "row 7")
    expanded = reader.expand(text, row, "row 7")
    with pytest.raises(UserError, match=r"^row 7: the rendered text has"):  # twice expanded
        reader.expand(expanded, row, "row 7")
    placeholder = reader.settings.placeholder
    if placeholder != mark:
        with pytest.raises(UserError, match=rf"^row 7: .*{placeholder!r}, which stands for a part"):
            reader.expand(f"{placeholder} {text}", row, "row 7")


def test_runs_of_placeholders_must_be_the_tiles(family: Family) -> None:
    reader = family.reader()
    first, second = read(reader, [drawn(1, 40, 60), drawn(2, 150, 60)])
    ids = family.ids(reader.expand(rendered(reader, 2), (first, second), "row 7"))
    pad = reader.settings.placeholder_id
    place = ids.index(pad)
    wrong = [
        [*ids[:place], pad, *ids[place:]],  # one more
        [*ids[:place], *ids[place + 1 :]],  # one less
        ids[: len(ids) - ids[::-1].index(pad) - 1],  # the end left out
        [*ids, pad],
    ]
    for broken in wrong:
        with pytest.raises(UserError, match=r"^row 7: the tokenizer makes runs of"):
            reader.contents(broken, (first, second), "row 7")
    if reader.settings.family.startswith("qwen"):  # images of two sizes, swapped
        with pytest.raises(UserError, match=r"^row 7: the tokenizer makes runs of"):
            reader.contents(ids, (second, first), "row 7")


def test_images_without_a_space_between_them(family: Family) -> None:
    """Even a template that separates images by nothing gives each its tokens, or is refused."""
    reader = family.reader()
    row = read(reader, pictures(5, 3))
    text = reader.settings.bare * 3
    ids = family.ids(reader.expand(text, row, "row 7"))
    assert ids == family.reference(text, pictures(5, 3))
    assert len(reader.contents(ids, row, "row 7").contents) == sum(
        len(image.layout.tiles) for image in row
    )


def test_the_text_of_a_row_may_not_spell_a_placeholder(family: Family) -> None:
    reader = family.reader()
    settings = reader.settings
    assert reader.own_mark("what is it?") is None
    for word in {settings.mark, settings.placeholder}:
        assert reader.own_mark(f"what is {word}?") == word


def test_what_cannot_be_read_is_named_by_its_number(family: Family, tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(encoded(drawn(1)))
    reader = family.reader()
    assert len(reader.read(["a.png"], tmp_path)) == 1
    with pytest.raises(ImageError, match=r"^image 2 does not exist: there is no file .*b\.png"):
        reader.read(["a.png", "b.png"], tmp_path)
    with pytest.raises(ImageError, match=r"^image 1 is the URL .*data\.image_urls"):
        reader.read(["https://example.org/a.png", "a.png"], tmp_path)


def test_what_a_model_cannot_do_is_a_predicate() -> None:
    tokens = make_vision_tokenizer("qwen2_5_vl").get_vocab()
    config = {
        "model_type": "qwen2_5_vl",
        "image_token_id": 10**6,
        "vision_start_token_id": 1,
        "vision_end_token_id": 2,
        "vision_config": {},
    }
    with pytest.raises(ValueError, match=r"^has a tokenizer without the token 1000000 of image_"):
        ImageReader.of(config, {}, tokens, max_tokens=100)
    for name in ("do_resize", "do_rescale", "do_normalize"):
        with pytest.raises(ValueError, match=rf"^has {name}: false in its image processor"):
            ImageReader.of(config, {name: False}, tokens, max_tokens=100)


@pytest.mark.parametrize(
    ("name", "field", "size", "what"),
    [
        ("gemma3", "size", {"height": 48, "width": 48}, "images"),
        ("smolvlm", "max_image_size", {"longest_edge": 48}, "tiles"),
    ],
)
def test_a_processor_for_another_tower_is_refused(
    name: str, field: str, size: dict[str, int], what: str, tmp_path: Path
) -> None:
    family = Family(name, tmp_path)
    own = family.processor.pop(field)
    assert family.reader().settings.edge == 32, "the tower says it where the processor does not"
    family.processor[field] = size
    words = f"^has a processor that makes {what} of 48 pixels, and a tower for 32$"
    with pytest.raises(ValueError, match=words):
        family.reader()
    family.processor[field] = own
    assert family.reader().settings.edge == 32


def test_an_image_that_is_gone_is_named_by_its_number(family: Family, tmp_path: Path) -> None:
    reader = family.reader()
    for name in "ab":
        (tmp_path / name).write_bytes(encoded(drawn(ord(name) + 700, 41, 63)))
    row = reader.read(["a", "b"], tmp_path)
    ids = family.ids(reader.expand(rendered(reader, 2), row, "row 1"))
    reader.contents(ids, row, "data.jsonl, line 3")
    (tmp_path / "b").unlink()
    with pytest.raises(ImageError, match=r"^data\.jsonl, line 3: image 2 does not"):
        STORE.pixels([reader.hash_of(row[1])])
