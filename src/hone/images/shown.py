"""Images that an environment or a request has shown. Nobody can read them again, so a process knows
them as long as a sequence has them (`Content.shown`), and they travel with it.

To another process of the trainer a content brings its image by pickle. A checkpoint has each image
once, next to the sequences (`saved` and `restored`). Engines and scorers get pixels instead
(`hone.images.sending`).
"""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from hone.model_input import ModelInput

if TYPE_CHECKING:
    from hone.images.store import ShownTile

__all__ = ["restored", "saved", "with_images", "without_images"]


def without_images(model_input: ModelInput) -> ModelInput:
    """The input without the images that environments have shown, of which a receiver gets the
    pixels."""
    if all(content.shown is None for content in model_input.contents):
        return model_input
    return ModelInput(tuple(replace(each, shown=None) for each in model_input.contents))


def with_images(model_input: ModelInput, tiles: Mapping[str, ShownTile]) -> ModelInput:
    """The input with those of its images that `restored` has made."""
    if not any(content.hash in tiles for content in model_input.contents):
        return model_input
    return ModelInput(
        tuple(replace(each, shown=tiles.get(each.hash)) for each in model_input.contents)
    )


def saved(inputs: Iterable[ModelInput]) -> dict[str, Any]:
    """The images among `inputs` that environments have shown, as JSON values."""
    tiles = {
        content.hash: content.shown.source
        for each in inputs
        for content in each.contents
        if content.shown is not None
    }
    files = {source.file.digest: source.file.source for source in tiles.values()}
    return {
        "files": {digest: b64encode(data).decode() for digest, data in sorted(files.items())},
        "tiles": {
            name: {
                "file": source.file.digest,
                "settings": asdict(source.settings),
                "number": source.number,
                "location": source.location,
            }
            for name, source in sorted(tiles.items())
        },
    }


def restored(state: Mapping[str, Any]) -> dict[str, ShownTile]:
    """Inverse of `saved`: the tiles by content hash."""
    if not state["files"]:
        return {}
    from hone.families.vision.spec import ImageSettings
    from hone.images.opening import open_image
    from hone.images.pixels import TileSource
    from hone.images.store import STORE

    files = {
        digest: open_image(b64decode(data), folder=None) for digest, data in state["files"].items()
    }
    tiles: dict[str, ShownTile] = {}
    for name, each in state["tiles"].items():
        settings = {key: _tupled(value) for key, value in each["settings"].items()}
        source = TileSource(
            files[each["file"]], ImageSettings(**settings), each["number"], each["location"]
        )
        tiles[name] = STORE.show(source)
    return tiles


def _tupled(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
