"""A row's image: found, its header read, and decoded to RGB. Every way in which it can be bad is an
`ImageError` that says what to change.

    file = open_image("drawings/7.png", folder=Path("data"))      # size and digest; nothing decoded
    picture = load_rgb(file)                                      # pillow's image, in RGB

The size is that of the picture as it is shown: where EXIF data say that a camera was turned, height
and width are exchanged here already, so that the tokens of an image are known from its header.
"""

from __future__ import annotations

import base64
import binascii
import errno
import io
import os
import re
import stat
import struct
import time
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote_to_bytes, urlsplit
from weakref import WeakValueDictionary

from hone.extras import import_extra
from hone.images.parts import IMAGE_FIELDS, image_in

if TYPE_CHECKING:
    from PIL.Image import Image

__all__ = ["MAX_BYTES", "MAX_PIXELS", "ImageError", "ImageFile", "load_rgb", "open_image", "verify"]

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "JPEG2000", "PPM")
"""Formats that are read, by pillow's names. It knows more, some of which start other programs."""
MAX_PIXELS = 89_478_485
"""Most pixels of an image: 256 MiB in RGB, from which on pillow warns of a decompression bomb."""
MAX_BYTES = 256 << 20
"""Most bytes of an image's file."""
FETCH_S = 30.0
"""Time limit for an image from a URL."""

_MODES = {"1", "L", "LA", "P", "PA", "RGB", "RGBA", "RGBX", "CMYK", "YCbCr"}
_GREY_16_BITS = {"I;16", "I;16B", "I;16L", "I;16N"}
_BASE64 = re.compile(r"(iVBORw0KGgo|/9j/|R0lGOD|UklGR|SUkqA|TU0AK)[A-Za-z0-9+/\s]{16,}={0,2}\s*")
"""Base64 of a file that begins as a PNG, JPEG, GIF, WebP or TIFF does."""
_TURNS = {2: 0, 3: 3, 4: 1, 5: 5, 6: 4, 7: 6, 8: 2}
"""Number of pillow's `Transpose` that undoes an orientation of EXIF; from 5 on height and width are
exchanged."""
# Errors that pillow's readers raise for files that break their format.
_BROKEN = (
    OSError,
    SyntaxError,
    ValueError,
    IndexError,
    KeyError,
    TypeError,
    EOFError,
    OverflowError,
    RuntimeError,  # of AVIF
    struct.error,
    zlib.error,
)


class ImageError(ValueError):
    """An image that cannot be used. The message is a predicate: `<location>: image 2 <message>`."""


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ImageFile:
    """One image of a row. Its header has been read; it is not decoded."""

    digest: str
    """Digest of the file's bytes, in hexadecimal."""
    source: Path | bytes
    """The path of the file, or its bytes."""
    height: int
    width: int
    """Pixels, as the image is shown."""


_files_in_memory = WeakValueDictionary[str, ImageFile]()
"""Files whose source is their bytes, by digest: rows and episodes with the same image share one."""


def open_image(value: object, *, folder: Path | None, may_fetch: bool = False) -> ImageFile:
    """The image that a value of a row stands for.

    A value is a path, relative to `folder`; the bytes of a file; a data URI; base64 of a file;
    pillow's image; an `http` or `https` URL, if `may_fetch`; or a dict of these: the hub's
    `{"bytes": ..., "path": ...}`, of which one may be null, or a part of a chat message with
    `image`, `image_url` or `url`. Raises ImageError, and UserError where pillow is not installed.
    """
    if isinstance(value, Mapping):
        if (found := image_in(cast("Mapping[Any, Any]", value))) is None:
            raise ImageError(
                f"is a dict with {', '.join(map(repr, value)) or 'nothing in it'}; one of "
                f"{', '.join(map(repr, IMAGE_FIELDS))} must hold the image"
            )
        return open_image(found, folder=folder, may_fetch=may_fetch)
    if isinstance(value, str):
        value = _from_text(value, may_fetch=may_fetch)
    if isinstance(value, Path):
        try:
            path = (folder or Path()) / value.expanduser()
        except RuntimeError as error:  # `~name` of nobody
            raise ImageError(f"cannot be read from {_shortened(str(value))}: {error}") from error
        return _described(_read(path), source=path.absolute())
    if isinstance(value, bytes | bytearray | memoryview):
        data = bytes(value)
        return _described(data, source=data)
    if isinstance(value, _pillow().Image):
        data = _as_png(cast("Image", value))
        return _described(data, source=data)
    raise ImageError(
        f"is a value of type {type(value).__name__}; an image is a path, bytes, a data URI, "
        "base64, an image of pillow, or {bytes, path}"
    )


def load_rgb(file: ImageFile) -> Image:
    """The image, decoded to RGB with 8 bits and turned by its EXIF data; of several frames the
    first. Raises ImageError where it cannot be decoded as a whole.

    Transparent pixels become white, as in Qwen's and SmolVLM's own programs. Leaving alpha out
    would show the colours that lie behind transparent pixels, mostly black: a black drawing
    without background would be a black square.
    """
    image = _shown(_header(_bytes_of(file)))
    if (image.height, image.width) != (file.height, file.width):
        raise ImageError(
            f"is {image.width} x {image.height} pixels once decoded, and {file.width} x "
            f"{file.height} by its header; save it anew"
        )
    return image


def verify(file: ImageFile) -> None:
    """Raise the ImageError that `load_rgb` would raise. A JPEG is decoded at an eighth of its size,
    which reads all of it in less than half of the time."""
    image = _header(_bytes_of(file))
    try:
        if image.format in ("JPEG", "MPO"):
            image.draft(image.mode, (image.width // 8, image.height // 8))
        image.load()
    except _BROKEN as error:
        raise _undecodable(error) from error


# ---- bytes ---------------------------------------------------------------------------------------


def _from_text(text: str, *, may_fetch: bool) -> Path | bytes:
    scheme = text[:8].partition(":")[0].lower() if ":" in text[:8] else ""
    if scheme == "data":
        return _from_data_uri(text)
    if scheme in ("http", "https"):
        if not may_fetch:
            raise ImageError(
                f"is the URL {_shortened(text)}, and images are not fetched: download it and give "
                "its path, or set data.image_urls to true"
            )
        return _fetch(text)
    if scheme == "file":
        try:
            return Path(os.fsdecode(unquote_to_bytes(urlsplit(text).path)))
        except ValueError as error:
            raise ImageError(f"is the URL {_shortened(text)}, which is none: {error}") from error
    if _BASE64.fullmatch(text):
        return _decoded(text, "is base64")
    if not text:
        raise ImageError("is an empty text; give a path, or leave the image out of the row")
    return Path(text)


def _from_data_uri(text: str) -> bytes:
    head, comma, body = text.partition(",")
    if not comma:
        raise ImageError("is a data URI without a comma, behind which its bytes would be")
    if head.lower().endswith(";base64"):
        return _decoded(body, "is a data URI whose base64")
    return unquote_to_bytes(body)


def _decoded(text: str, subject: str) -> bytes:
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise ImageError(f"{subject} cannot be decoded: {error}; encode the file anew") from error


def _fetch(url: str) -> bytes:
    """The bytes at a URL, within limits of time and size."""
    from http.client import HTTPException
    from urllib.request import Request, urlopen

    end, parts, num_bytes = time.monotonic() + FETCH_S, list[bytes](), 0
    try:
        with urlopen(Request(url, headers={"User-Agent": "hone"}), timeout=FETCH_S) as answer:
            while part := answer.read1(1 << 16):
                parts.append(part)
                num_bytes += len(part)
                if num_bytes > MAX_BYTES:
                    raise ImageError(f"is at {_shortened(url)} and {_too_large(num_bytes)}")
                if time.monotonic() > end:
                    raise TimeoutError(f"not read within {FETCH_S:g} s")
    except (HTTPException, OSError) as error:  # those of urllib are OSErrors
        raise ImageError(f"cannot be fetched from {_shortened(url)}: {error}") from error
    return b"".join(parts)


def _read(path: Path) -> bytes:
    """The bytes of a file."""
    try:
        found = path.stat()
        if stat.S_ISDIR(found.st_mode):
            raise ImageError(f"is the folder {path}; give the path of a file")
        if not stat.S_ISREG(found.st_mode):
            raise ImageError(f"is {path}, which is no regular file")
        if found.st_size > MAX_BYTES:
            raise ImageError(f"is the file {path} and {_too_large(found.st_size)}")
        return path.read_bytes()
    except FileNotFoundError as error:
        raise ImageError(
            f"does not exist: there is no file {_shortened(str(path))}; relative paths start at "
            "the folder of the data file"
        ) from error
    except (OSError, ValueError) as error:  # ValueError: a path with a null character
        if getattr(error, "errno", None) == errno.ENAMETOOLONG:
            raise ImageError(
                f"is the text {_shortened(str(path))}, which is too long for a path and is not "
                "base64 of an image"
            ) from error
        why = getattr(error, "strerror", None) or error
        raise ImageError(f"cannot be read from {_shortened(str(path))}: {why}") from error


def _bytes_of(file: ImageFile) -> bytes:
    """The bytes of an image that was opened before."""
    if isinstance(file.source, bytes):
        return file.source
    data = _read(file.source)
    if _digest(data) != file.digest:
        raise ImageError(
            f"is the file {file.source}, which has changed since the data were read; start the run "
            "anew"
        )
    return data


# ---- pillow --------------------------------------------------------------------------------------


def _described(data: bytes, *, source: Path | bytes) -> ImageFile:
    digest = _digest(data)
    if isinstance(source, bytes) and (known := _files_in_memory.get(digest)) is not None:
        return known
    image = _header(data)
    height, width = image.height, image.width
    if _orientation(image) >= 5:
        height, width = width, height
    file = ImageFile(digest=digest, source=source, height=height, width=width)
    return _files_in_memory.setdefault(digest, file) if isinstance(source, bytes) else file


def _header(data: bytes) -> Image:
    """The image of a file's bytes, whose header is read and whose pixels are not."""
    pillow = _pillow()
    if not data:
        raise ImageError("is empty: it has 0 bytes")
    try:
        image: Image = pillow.open(io.BytesIO(data), formats=FORMATS)
    except pillow.DecompressionBombError as error:
        raise ImageError(f"is too large: {error}") from error
    except _BROKEN as error:
        raise ImageError(
            f"is {len(data):,} bytes that begin with {data[:8]!r}, which is no image that can be "
            f"read; formats are {', '.join(FORMATS)}"
        ) from error
    size = f"is {image.width:,} x {image.height:,} pixels"
    if image.width < 1 or image.height < 1:
        raise ImageError(f"{size}: it has none")
    if image.width * image.height > MAX_PIXELS:
        raise ImageError(f"{size}; at most {MAX_PIXELS:,} are decoded, so make it smaller")
    if image.mode not in _MODES | _GREY_16_BITS:
        raise ImageError(
            f"has pixels of pillow's mode {image.mode!r}, whose range of values is not known; save "
            "it with 8 or 16 bits for each colour"
        )
    return image


def _orientation(image: Image) -> int:
    """The number in the EXIF data that says how the camera was turned; 1 where it was not. It must
    be read before the image is decoded."""
    if image.format == "TIFF":  # which pillow turns by itself
        return 1
    if image.format == "PNG" and "exif" not in image.info:
        return 1  # pillow would decode the image to look for EXIF data behind the pixels
    try:
        orientation: int = image.getexif().get(0x0112, 1)
    except _BROKEN:  # broken EXIF data say nothing
        return 1
    return orientation if orientation in _TURNS else 1


def _shown(image: Image) -> Image:
    """The image, decoded to RGB and turned upright."""
    orientation = _orientation(image)
    try:
        image.load()
        image = _to_rgb(image)
    except _BROKEN as error:
        raise _undecodable(error) from error
    if orientation == 1:
        return image
    return image.transpose(_pillow().Transpose(_TURNS[orientation]))


def _to_rgb(image: Image) -> Image:
    pillow = _pillow()
    if image.mode in _GREY_16_BITS:  # pillow's own conversion makes all above 255 white
        import numpy as np

        return pillow.fromarray((np.asarray(image) >> 8).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        white = pillow.new("RGBA", image.size, "white")
        return pillow.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def _as_png(image: Image) -> bytes:
    """Bytes of a file that shows the same as an image in memory."""
    stream = io.BytesIO()
    _shown(image).save(stream, "PNG", compress_level=1)
    return stream.getvalue()


def _undecodable(error: Exception) -> ImageError:
    return ImageError(f"cannot be decoded: {error}; the file is damaged, so make or copy it anew")


def _too_large(num_bytes: int) -> str:
    return f"has at least {num_bytes:,} bytes; {MAX_BYTES:,} are the most that are read"


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:100]}... ({len(text):,} characters)"


def _digest(data: bytes) -> str:
    return blake2b(data, digest_size=16).hexdigest()


def _pillow() -> Any:
    return import_extra("PIL", module="PIL.Image", needed_by="a row with images")
