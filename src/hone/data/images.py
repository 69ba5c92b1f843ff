"""The images of a row: which values they are, and where among its text they stand.

    {"images": ["a.png", "b.png"], "prompt": "<image> or <image>?"}
    {"image": "a.png", "prompt": "What is it?"}                          before the text
    {"messages": [{"role": "user", "content": [{"type": "image", "image": "a.png"},
                                               {"type": "text", "text": "What is it?"}]}]}

A row is read to messages with parts `{"type": "image"}` and `{"type": "text", "text": ...}`, or to
a text with marks `<image>`, and to the values of its images in that order. What it keeps of an
image for rewards and files is a path, never its bytes.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeVar, cast

from hone.data.filters import FilterReport
from hone.data.settings import DataConfig
from hone.data.sources import SourceRow, shorten
from hone.errors import UserError
from hone.images.parts import has_images, image_in, is_image_part
from hone.types import Message

if TYPE_CHECKING:
    from hone.images.opening import ImageError
    from hone.images.reader import ImageReader, RowImage

__all__ = [
    "MARK",
    "NO_IMAGES",
    "GivenImages",
    "content_of",
    "has_mark",
    "open_images",
    "parts_of",
    "take_images",
    "values_in",
    "without_bytes",
]

_log = logging.getLogger(__name__)

MARK = "<image>"
"""Text that stands for an image in a prompt, and for image bytes in what rewards get."""
_LONGEST_PATH = 4096


@dataclass(frozen=True, slots=True)
class GivenImages:
    """The images of a row as they are written in it."""

    values: tuple[Any, ...] = ()
    place: str = ""
    """Where they are, for messages: `train.jsonl, line 3, column 'images'`."""
    folder: Path | None = None
    """What relative paths are relative to."""


NO_IMAGES = GivenImages()


class WithImages(Protocol):
    """A row that may have images."""

    @property
    def given_images(self) -> GivenImages: ...
    @property
    def has_mark(self) -> bool:
        """Whether the text of its prompt has `MARK`."""
        ...

    def with_images(self, images: tuple[RowImage, ...]) -> Self: ...


R = TypeVar("R", bound=WithImages)


def open_images(
    rows: Sequence[R], reader: ImageReader | None, cfg: DataConfig, report: FilterReport
) -> list[R]:
    """The rows with their images opened. Rows with an image that cannot be read are added to the
    report with `data.image_errors` drop, else an error.

    Raises UserError; also for images where `reader` is None, which a text model has.
    """
    if reader is not None and rows:
        _say_unseen(rows)
    if not any(row.given_images.values for row in rows):
        return list(rows)
    from hone.images.opening import ImageError  # which data of text alone do not need
    from hone.images.store import STORE

    opened: list[tuple[R, tuple[RowImage, ...]]] = []
    for row in rows:
        given = row.given_images
        if given.values and reader is None:
            raise UserError(
                f"{given.place}: the row has images, and the model reads text alone. Name a "
                "vision-language model in model.path, or set `columns.images` of this source to "
                "'' to leave the images of a column out"
            )
        try:
            images = () if reader is None else reader.read(given.values, given.folder)
        except ImageError as error:
            _drop(f"{given.place}: {error}", cfg, report, error)
        else:
            opened.append((row, images))
    broken = STORE.broken(x.file for _, images in opened for x in images)
    kept: list[R] = []
    for row, images in opened:
        found = next(((n, x) for n, x in enumerate(images, 1) if x.file.digest in broken), None)
        if found is None:
            kept.append(row.with_images(images) if images else row)
        else:
            error = broken[found[1].file.digest]
            _drop(f"{row.given_images.place}: image {found[0]} {error}", cfg, report, error)
    return kept


def _say_unseen(rows: Sequence[WithImages]) -> None:
    """Log where a model that sees images gets none, which a misspelt column would cause."""
    marked = sum(not row.given_images.values and row.has_mark for row in rows)
    if marked:
        _log.warning(
            "%s of %s rows have %s in the prompt and no images: it stays text. Name the column "
            "with the images in `columns.images` of the source",
            f"{marked:,}",
            f"{len(rows):,}",
            MARK,
        )
    elif not any(row.given_images.values for row in rows):
        _log.info("no row has images, and the model sees them")


def _drop(problem: str, cfg: DataConfig, report: FilterReport, error: ImageError) -> None:
    """Report a row whose image cannot be read, or raise UserError where that is an error."""
    if cfg.image_errors == "error":
        raise UserError(
            f"{problem}. Mend or remove the row, or set data.image_errors to 'drop'"
        ) from error
    report.unreadable.append(problem)


def has_mark(prompt: str | Sequence[Message]) -> bool:
    """Whether a prompt, a text or messages, has `MARK` in its text."""
    texts = [prompt] if isinstance(prompt, str) else [message["content"] for message in prompt]
    return any(isinstance(text, str) and MARK in text for text in texts)


def values_in(value: Any) -> tuple[Any, ...]:
    """The images of a column's value: a list of images, a single one, or nothing."""
    if value is None or (isinstance(value, str | list | tuple) and not value):
        return ()
    return tuple(cast("Sequence[Any]", value)) if isinstance(value, list | tuple) else (value,)


def content_of(content: Any, row: SourceRow) -> str | list[dict[str, Any]]:
    """The content of a message: a text, or with images a list of parts. An image part has the image
    in `image`, where it is given there. Raises UserError for other content, of which a template
    would write the Python repr."""
    parts: list[Any] = content if isinstance(content, list) else [{"text": content}]
    made: list[dict[str, Any]] = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) else None
        if isinstance(part, dict) and is_image_part(part):
            value = image_in(part)
            made.append({"type": "image"} | ({} if value is None else {"image": value}))
        elif isinstance(text, str):
            made.append({"type": "text", "text": text})
        else:
            shown = shorten(json.dumps(content, default=str))
            raise UserError(
                f"{row.location}: the content of a message must be text, or a list of parts such "
                'as {"type": "text", "text": "..."} and {"type": "image", "image": "a.png"}, got '
                f"{shown}. Write what a tool gives as JSON in a text"
            )
    return made if has_images(made) else "".join(part["text"] for part in made)


def parts_of(text: str, num_images: int, location: str) -> list[dict[str, Any]]:
    """A text with marks as parts. Images without any mark come before it. Raises UserError where
    there are fewer or more marks than images."""
    first, *rest = text.split(MARK)
    if not rest:
        return [*({"type": "image"} for _ in range(num_images)), *_text_part(text)]
    if len(rest) != num_images:
        raise _mismatch(location, num_images, len(rest))
    parts = _text_part(first)
    for piece in rest:
        parts += [{"type": "image"}, *_text_part(piece)]
    return parts


def take_images(
    prompt: str | list[Message], row: SourceRow, column: str | None, values: tuple[Any, ...]
) -> tuple[str | list[Message], GivenImages]:
    """A prompt without the values of images, and these in the order of its image parts and marks.
    `values` are those of `column`. The marks of a prompt that is text are left to `parts_of`.

    Raises UserError where values and places differ in number, and for images of the assistant.
    """
    place = f"{row.location}, column {column!r}" if values else row.location
    if isinstance(prompt, str):
        return prompt, GivenImages(values, place, row.folder) if values else NO_IMAGES
    if not values and not any(has_images(message["content"]) for message in prompt):
        return prompt, NO_IMAGES
    messages = [_with_parts(message, marks=bool(values)) for message in prompt]
    _refuse_answers(messages, row)
    places = [part for x in messages for part in _images_in(x)]
    if values and not places:
        messages = _before_first_text(messages, len(values), row)
        places = [part for x in messages for part in _images_in(x)]
    own = [part for part in places if "image" in part]
    if len(places) - len(own) != len(values):
        raise _mismatch(row.location, len(values), len(places) - len(own))
    following = iter(values)
    found = tuple(part["image"] if "image" in part else next(following) for part in places)
    clean = [{**message, "content": _clean(message["content"])} for message in messages]
    return clean, GivenImages(found, place, row.folder)


def without_bytes(value: Any) -> Any:
    """A value of a row with the path, or `<image>`, in place of the bytes of images."""
    if isinstance(value, bytes | bytearray) or hasattr(value, "getbands"):  # pillow's images
        return MARK
    if isinstance(value, str):
        is_data = value.startswith("data:image") or (
            len(value) > _LONGEST_PATH and " " not in value
        )
        return MARK if is_data else value
    if isinstance(value, Mapping):
        fields = cast("Mapping[str, Any]", value)
        if isinstance(fields.get("bytes"), bytes):
            return fields.get("path") or MARK
        return {name: without_bytes(item) for name, item in fields.items()}
    return [without_bytes(item) for item in value] if isinstance(value, list | tuple) else value


def _text_part(text: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text}] if text else []


def _with_parts(message: Message, *, marks: bool) -> Message:
    """A message whose marks are image parts."""
    content = message["content"]
    if not marks or not (isinstance(content, list) or MARK in content):
        return message
    parts: list[dict[str, Any]] = []
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        text = part.get("text", "")
        parts += parts_of(text, text.count(MARK), "") if MARK in text else [part]
    return {**message, "content": parts}


def _images_in(message: Message) -> list[dict[str, Any]]:
    content = message["content"]
    return [part for part in content if part["type"] == "image"] if has_images(content) else []


def _refuse_answers(messages: Sequence[Message], row: SourceRow) -> None:
    for number, message in enumerate(messages, start=1):
        if message["role"] == "assistant" and _images_in(message):
            raise UserError(
                f"{row.location}: message {number}, of the assistant, has an image, and models "
                "answer with text alone; put the image into a message of the user"
            )


def _before_first_text(messages: list[Message], number: int, row: SourceRow) -> list[Message]:
    """The messages with `number` images before the text of the first one of the user."""
    for place, message in enumerate(messages):
        if message["role"] == "user":
            content = message["content"]
            said = _text_part(content) if isinstance(content, str) else content
            parts = [*({"type": "image"} for _ in range(number)), *said]
            return [*messages[:place], {**message, "content": parts}, *messages[place + 1 :]]
    raise UserError(
        f"{row.location}: the row has images without a mark {MARK}, and no message of the user to "
        "put them into"
    )


def _clean(content: Any) -> Any:
    if not has_images(content):
        return content
    return [{"type": "image"} if part["type"] == "image" else part for part in content]


def _mismatch(location: str, num_images: int, num_marks: int) -> UserError:
    images = f"{num_images} image{'s' * (num_images != 1)}"
    marks = f"{num_marks} place{'s' * (num_marks != 1)}"
    return UserError(
        f"{location}: {images} in the row's column of images, and {marks} for them in the prompt "
        f"({MARK} in its text, or parts of the type image without an image); give one for each, or "
        "no mark at all to put the images before the text"
    )
