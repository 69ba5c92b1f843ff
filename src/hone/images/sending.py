"""Makes pixels ahead of time, and sends them to the process that computes with them.

Requests and rows are on their way to another process with the pixels of their images:

    worker.call("submit", with_pixels(requests))

In this process the result is the list of the items. Pickled, it brings the pixels of their images,
each once, into the store of the process that unpickles it. So a process that has read no data can
compute whatever it is sent, and whoever computes an image need not know where it came from.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

from hone.model_input import ModelInput

if TYPE_CHECKING:
    from hone.images.pixels import TilePixels

__all__ = ["prefetch_pixels", "with_pixels"]


class HasInput(Protocol):
    """A request, a row, or any other item that has inputs besides ids."""

    @property
    def model_input(self) -> ModelInput: ...


T = TypeVar("T", bound=HasInput)


class _WithPixels(list[T]):
    """A list that is pickled with the pixels of its items' images."""

    def __reduce__(self) -> tuple[Callable[..., list[Any]], tuple[Any, ...]]:
        from hone.images.shown import without_images  # not for texts
        from hone.images.store import STORE

        hashes = {content.hash for item in self for content in item.model_input.contents}
        items = [replace(cast("Any", x), model_input=without_images(x.model_input)) for x in self]
        return _receive, (items, STORE.payload(sorted(hashes)))


def prefetch_pixels(now: Iterable[ModelInput], later: Callable[[], Iterable[ModelInput]]) -> None:
    """Let the workers of `data.image_workers` make the pixels of inputs that are needed now, and
    then of those that will be needed later. Nothing happens where those of now have no images."""
    wanted = [content.hash for each in now for content in each.contents]
    if not wanted:
        return
    from hone.images.store import STORE

    STORE.prefetch([*wanted, *(content.hash for each in later() for content in each.contents)])


def with_pixels(items: Iterable[T]) -> list[T]:
    """The items as a list, which brings the pixels of their images to another process."""
    found = list(items)
    return _WithPixels(found) if any(item.model_input.contents for item in found) else found


def _receive(items: list[Any], pixels: dict[str, TilePixels]) -> list[Any]:
    from hone.images.store import STORE

    STORE.receive(pixels, [item.model_input for item in items])
    return items
