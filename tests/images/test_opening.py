"""Images of rows: each form is read, and each broken one is refused by name."""

from __future__ import annotations

import base64
import gc
import os
import struct
import threading
import zlib
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps
from PIL.Image import Exif

from hone.images import opening
from hone.images.opening import ImageError, load_rgb, open_image, verify
from tests.images.drawn import drawn, encoded

PICTURE = drawn(0)
PNG = encoded(PICTURE)
JPEG = encoded(PICTURE, "JPEG", quality=90)


def array(image: Image.Image) -> Any:
    return np.asarray(image, dtype=np.int64)


def loaded(value: object, folder: Path | None = None) -> Any:
    """The pixels of a value, whose size has to be known before."""
    file = open_image(value, folder=folder)
    verify(file)
    found = load_rgb(file)
    assert found.mode == "RGB"
    assert (found.height, found.width) == (file.height, file.width)
    return array(found)


# ---- forms ---------------------------------------------------------------------------------------


def test_every_form_of_a_value_is_the_same_image(tmp_path: Path) -> None:
    path = tmp_path / "sub" / "a picture.png"
    path.parent.mkdir()
    path.write_bytes(PNG)
    text = base64.b64encode(PNG).decode()
    broken_lines = "\n".join(text[i : i + 76] for i in range(0, len(text), 76))
    values: list[object] = [
        "sub/a picture.png",
        path,
        str(path),
        path.as_uri(),
        PNG,
        bytearray(PNG),
        memoryview(PNG),
        text,
        broken_lines,
        f"data:image/png;base64,{text}",
        {"bytes": PNG, "path": "elsewhere.png"},
        {"bytes": None, "path": "sub/a picture.png"},
        {"type": "image", "image": PNG},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{text}"}},
        {"url": path.as_uri()},
        {"type": "image", "image": PNG, "path": "elsewhere.png"},
        {"type": "image", "image": {"bytes": PNG, "path": "elsewhere.png"}},
        {"type": "input_image", "image_url": path.as_uri(), "path": "elsewhere.png"},
    ]
    files = [open_image(value, folder=tmp_path) for value in values]
    assert {file.digest for file in files} == {files[0].digest}
    assert {(file.height, file.width) for file in files} == {(60, 80)}
    for file in files:
        np.testing.assert_array_equal(array(load_rgb(file)), array(PICTURE))


def test_files_with_the_same_bytes_are_one_as_long_as_somebody_has_it(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    on_disk = open_image("a.png", folder=tmp_path)
    first, second, other = (open_image(bytearray(data), folder=None) for data in (PNG, PNG, JPEG))
    assert first is second
    assert first.digest == on_disk.digest != other.digest
    assert isinstance(on_disk.source, Path), "bytes in memory stand for no file on disk"
    del first, second
    gc.collect()
    assert on_disk.digest not in opening._files_in_memory


def test_an_image_of_pillow_keeps_its_pixels_and_has_one_digest() -> None:
    file, again = (open_image(PICTURE.copy(), folder=None) for _ in range(2))
    assert file == again
    np.testing.assert_array_equal(array(load_rgb(file)), array(PICTURE))
    assert open_image(drawn(1), folder=None).digest != file.digest


@pytest.mark.parametrize(
    ("format", "options", "tolerance"),
    [
        ("PNG", {}, 0),
        ("JPEG", {"quality": 95}, 12),
        ("JPEG", {"quality": 95, "progressive": True}, 12),
        ("WEBP", {"lossless": True}, 0),
        ("GIF", {}, 40),
        ("BMP", {}, 0),
        ("TIFF", {}, 0),
        ("TIFF", {"compression": "tiff_lzw"}, 0),
        ("PPM", {}, 0),
        ("AVIF", {"quality": 100}, 12),
        ("JPEG2000", {}, 2),
    ],
)
def test_formats(format: str, options: dict[str, Any], tolerance: int) -> None:
    found = loaded(encoded(PICTURE, format, **options))
    assert np.abs(found - array(PICTURE)).max() <= tolerance


@pytest.mark.parametrize("format", ["PNG", "JPEG", "TIFF", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_a_turned_camera(format: str, orientation: int) -> None:
    exif = Exif()
    exif[0x0112] = orientation
    options = {"lossless": True} if format == "WEBP" else {}
    data = encoded(PICTURE, format, exif=exif, **options)
    turned = drawn(0)
    turned.getexif()[0x0112] = orientation
    want = array(ImageOps.exif_transpose(turned))
    found = loaded(data)
    assert found.shape == want.shape
    assert np.abs(found - want).max() <= (20 if format == "JPEG" else 0)


def test_orientation_behind_the_pixels_of_a_png_is_neither_looked_for_nor_applied() -> None:
    exif = Exif()
    exif[0x0112] = 6
    body = exif.tobytes().removeprefix(b"Exif\0\0")
    chunk = struct.pack(">I", len(body)) + b"eXIf" + body
    chunk += struct.pack(">I", zlib.crc32(b"eXIf" + body))
    end = PNG.index(b"IEND") - 4
    np.testing.assert_array_equal(loaded(PNG[:end] + chunk + PNG[end:]), array(PICTURE))


# ---- colours -------------------------------------------------------------------------------------


def over_white(rgba: Any) -> Any:
    """A slow reference: each colour by its share, the rest white."""
    alpha = rgba[..., 3:].astype(float) / 255
    return rgba[..., :3] * alpha + 255 * (1 - alpha)


def test_alpha_is_laid_over_white() -> None:
    rng = np.random.default_rng(3)
    rgba = rng.integers(0, 256, (20, 30, 4), dtype=np.uint8)
    rgba[:5, :, 3], rgba[5:10, :, 3] = 0, 255
    found = loaded(encoded(Image.fromarray(rgba)))
    assert np.abs(found - over_white(rgba)).max() <= 1
    assert (found[:5] == 255).all()  # black without background is not a black square
    np.testing.assert_array_equal(found[5:10], rgba[5:10, :, :3])
    grey = Image.fromarray(rgba).convert("LA")
    assert np.abs(loaded(encoded(grey)) - over_white(array(grey.convert("RGBA")))).max() <= 1


@pytest.mark.parametrize("format", ["PNG", "GIF"])
def test_a_palette_and_its_transparent_colour(format: str) -> None:
    palette = PICTURE.quantize(16)
    np.testing.assert_array_equal(loaded(encoded(palette, format)), array(palette.convert("RGB")))
    found = loaded(encoded(palette, format, transparency=5))
    index = np.asarray(palette)
    assert (index == 5).any()
    assert (found[index == 5] == 255).all()
    np.testing.assert_array_equal(found[index != 5], array(palette.convert("RGB"))[index != 5])


@pytest.mark.parametrize("format", ["PNG", "TIFF"])
def test_grey_of_16_bits_keeps_its_shades(format: str) -> None:
    values = np.linspace(0, 65535, 40 * 50).reshape(40, 50).astype(np.uint16)
    found = loaded(encoded(Image.fromarray(values), format))
    for colour in range(3):
        np.testing.assert_array_equal(found[..., colour], values // 256)


def test_grey_of_8_bits_and_of_one() -> None:
    grey = PICTURE.convert("L")
    np.testing.assert_array_equal(loaded(encoded(grey)), np.dstack([array(grey)] * 3))
    bits = PICTURE.convert("1")
    np.testing.assert_array_equal(loaded(encoded(bits)), np.dstack([255 * array(bits)] * 3))


def test_cmyk() -> None:
    cmyk = PICTURE.convert("CMYK")
    np.testing.assert_array_equal(loaded(encoded(cmyk, "TIFF")), array(PICTURE))
    found = loaded(encoded(cmyk, "JPEG", quality=95))
    assert np.abs(found - array(PICTURE)).max() <= 12


@pytest.mark.parametrize("format", ["GIF", "PNG", "WEBP"])
def test_the_first_frame_of_several(format: str) -> None:
    frames = [Image.new("RGB", (30, 20), colour) for colour in ("red", "lime", "blue")]
    options = {"lossless": True} if format == "WEBP" else {}
    data = encoded(frames[0], format, save_all=True, append_images=frames[1:], **options)
    np.testing.assert_array_equal(loaded(data), array(frames[0]))


@pytest.mark.parametrize("size", [(1, 1), (20_000, 20), (20, 20_000), (1, 3000)])
def test_sizes_at_the_edge(size: tuple[int, int]) -> None:
    assert loaded(encoded(Image.new("RGB", size, "teal"))).shape == (size[1], size[0], 3)


# ---- refused -------------------------------------------------------------------------------------


def refused(value: object, folder: Path | None = None, **options: Any) -> str:
    with pytest.raises(ImageError) as found:
        open_image(value, folder=folder, **options)
    return str(found.value)


def test_files_that_are_not_there(tmp_path: Path) -> None:
    (tmp_path / "folder.png").mkdir()
    (tmp_path / "loop.png").symlink_to("loop.png")
    os.mkfifo(tmp_path / "pipe.png")
    (tmp_path / "empty.png").touch()
    missing = refused("no.png", tmp_path)
    assert str(tmp_path / "no.png") in missing
    assert "the folder of the data file" in missing
    assert "is the folder" in refused("folder.png", tmp_path)
    assert "no regular file" in refused("pipe.png", tmp_path)
    assert "is empty: it has 0 bytes" in refused("empty.png", tmp_path)
    assert "cannot be read" in refused("loop.png", tmp_path)
    assert "cannot be read" in refused("a\0b.png", tmp_path)
    assert "is the text" in refused("x" * 5000, tmp_path)


def test_a_file_that_may_not_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.png").write_bytes(PNG)

    def read(self: Path) -> bytes:  # root may read every file
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "read_bytes", read)
    assert "cannot be read from" in refused("a.png", tmp_path)
    assert refused("a.png", tmp_path).endswith("a.png: Permission denied")


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (b"", "is empty: it has 0 bytes"),
        (b"this is a text\n" * 9, "begin with b'this is ', which is no image.*formats are PNG, "),
        (PNG[:20], "which is no image"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "which is no image"),
        ("", "is an empty text"),
        ("data:image/png;base64", "without a comma"),
        ("data:image/png;base64,iVBORw0KGgo=!", "base64 cannot be decoded"),
        ("data:image/png;base64,iVBORw0KGgo", "base64 cannot be decoded"),
        ("data:image/png;base64,", "is empty"),
        ("iVBORw0KGgoAAAAAAAAAAAAAAAAAAAAAAAAAA", "is base64 cannot be decoded"),
        ("https://example.invalid/a.png", "is the URL https://.*data.image_urls"),
        ({"url": "HTTP://example.invalid/a.png"}, "is the URL"),
        ({}, "nothing in it"),
        ({"bytes": None, "path": None}, "is a dict with 'bytes', 'path'"),
        ("file://[::1/a.png", "is the URL file://.*, which is none"),
        ("~nobody-of-this-name/a.png", "cannot be read from ~nobody"),
        (7, "value of type int"),
        (None, "value of type NoneType"),
        ([PNG], "value of type list"),
    ],
)
def test_values_that_are_no_image(value: object, words: str) -> None:
    with pytest.raises(ImageError, match=words):
        open_image(value, folder=None)


def png_of_size(width: int, height: int) -> bytes:
    """A PNG that says it has so many pixels, and has none."""

    def chunk(name: bytes, body: bytes) -> bytes:
        rest = struct.pack(">I", zlib.crc32(name + body))
        return struct.pack(">I", len(body)) + name + body + rest

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")
    return b"\x89PNG\r\n\x1a\n" + body


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
def test_bombs_and_sizes_of_nothing() -> None:
    assert open_image(png_of_size(8_947_848, 10), folder=None).width == 8_947_848
    assert "at most 89,478,485 are decoded" in refused(png_of_size(8_947_849, 10))
    assert "too large" in refused(png_of_size(60_000, 60_000))
    refused(png_of_size(0, 10))


def test_values_without_a_range() -> None:
    floats = Image.fromarray(np.linspace(0, 9, 12, dtype=np.float32).reshape(3, 4))
    assert "mode 'F'" in refused(encoded(floats, "TIFF"))


def test_damaged_avif_is_refused() -> None:
    """Its decoder raises RuntimeError."""
    whole = encoded(PICTURE, "AVIF")
    num_refused = 0
    for place in range(len(whole) // 2, len(whole), max(len(whole) // 100, 1)):
        data = bytearray(whole)
        data[place] ^= 0xFF
        for decode in (verify, load_rgb):
            try:
                decode(open_image(bytes(data), folder=None))
            except ImageError:
                num_refused += 1
    assert num_refused > 0


def test_files_cut_anywhere_are_refused_or_whole(tmp_path: Path) -> None:
    """`verify`, which decodes less, and `load_rgb` agree on every one."""
    rng = np.random.default_rng(5)
    progressive = encoded(PICTURE, "JPEG", progressive=True)
    num_refused = 0
    for data in (PNG, JPEG, progressive, encoded(PICTURE, "WEBP"), encoded(PICTURE, "GIF")):
        for size in [*rng.integers(len(data) // 3, len(data), 12), len(data) // 2]:
            try:
                file = open_image(data[:size], folder=None)
            except ImageError:
                num_refused += 1
                continue
            outcomes: list[bool] = []
            for decode in (verify, load_rgb):
                try:
                    decode(file)
                    outcomes.append(True)
                except ImageError:
                    outcomes.append(False)
            assert outcomes[0] == outcomes[1], f"{data[:8]!r} cut at {size} of {len(data)}"
            num_refused += not outcomes[0]
    assert num_refused > 55
    for data in (PNG, JPEG):
        with pytest.raises(ImageError, match=r"cannot be decoded.*the file is damaged"):
            load_rgb(open_image(data[: len(data) // 2], folder=None))


def test_a_file_that_has_changed_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(PNG)
    file = open_image("a.png", folder=tmp_path)
    (tmp_path / "a.png").write_bytes(encoded(drawn(1)))
    for decode in (load_rgb, verify):
        with pytest.raises(ImageError, match="has changed since the data were read"):
            decode(file)
    (tmp_path / "a.png").unlink()
    with pytest.raises(ImageError, match="does not exist"):
        load_rgb(file)


# ---- URLs ----------------------------------------------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    asked: list[str]

    def do_GET(self) -> None:
        type(self).asked.append(self.path)
        self.send_response(404 if self.path == "/no.png" else 200)
        self.end_headers()
        if self.path == "/a.png":
            self.wfile.write(PNG)
        elif self.path == "/endless":
            while True:
                try:
                    self.wfile.write(bytes(1 << 16))
                except ConnectionError:
                    return

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[str]:
    Handler.asked = []
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as served:
        thread = threading.Thread(target=served.serve_forever, args=(0.01,))
        thread.start()
        yield f"http://127.0.0.1:{served.server_port}"
        served.shutdown()
        thread.join()


def test_urls_are_fetched_once_where_that_is_asked_for(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "is the URL" in refused(f"{server}/a.png")
    assert Handler.asked == []
    file = open_image({"url": f"{server}/a.png"}, folder=None, may_fetch=True)
    for _ in range(2):
        np.testing.assert_array_equal(array(load_rgb(file)), array(PICTURE))
    assert Handler.asked == ["/a.png"]
    assert "cannot be fetched" in refused(f"{server}/no.png", may_fetch=True)
    monkeypatch.setattr(opening, "MAX_BYTES", 1 << 20)
    assert "1,048,576 are the most" in refused(f"{server}/endless", may_fetch=True)
    monkeypatch.setattr(opening, "MAX_BYTES", 1 << 40)
    monkeypatch.setattr(opening, "FETCH_S", 0.05)
    assert "not read within 0.05 s" in refused(f"{server}/endless", may_fetch=True)
