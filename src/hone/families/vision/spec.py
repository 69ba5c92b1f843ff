"""Specification of a vision-language family: how an image becomes tokens, and what its tower costs.

A model of such a family is two models here. The *decoder* is that of a text family
(`hone.families.spec.ModelSpec`), which is trained, sampled from and synchronised like any other.
The *tower* is frozen: it turns the tiles of an image into features, which take the place of the
embeddings of the image's tokens.

    settings = spec.settings(config, processor, max_tokens=1024)
    layout = spec.layout(settings, height, width)
    text = layout.text          # in place of the mark that the chat template writes for an image
    tiles = spec.tiles(settings, image, layout)      # uint8 [H, W, 3] each, as the tower sees them

Ids, contents and tiles follow from the size of the image and the settings alone, so an image need
not be decoded to know its number of tokens. This module imports neither torch nor pillow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from hone.families.spec import Json
from hone.model_input import InputSpec

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

__all__ = [
    "MAX_PATCHES",
    "ImageLayout",
    "ImageSettings",
    "Tile",
    "TowerCost",
    "VisionSpec",
    "pixels_of",
    "require_tokens",
    "setting",
    "three",
    "tile_edge",
    "token_text",
    "work_values",
]


MAX_PATCHES = 1 << 15
"""Patches of one pass of a tower, which bound its memory; a larger tile is a pass of its own."""


def work_values(*, pixels: int, hidden: int, inner: int, is_gated: bool = False) -> int:
    """Values that a pass of a tower holds at a time for one patch of `pixels` values: these in
    float32 and rounded, and the residual stream with queries, keys and values, or with what is
    between the products of the MLP."""
    return 3 * pixels + 2 * hidden + max(4 * hidden, (3 if is_gated else 2) * inner)


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageSettings:
    """Settings by which images of one model are processed: facts of its files, and the recipe's
    limit.

    Two images with the same bytes and the same settings have the same features.
    """

    family: str
    """`model_type` of the whole model."""
    patch_size: int
    """Pixels of a patch's edge."""
    merge_size: int
    """Patches along each edge that become one token."""
    min_pixels: int = 0
    max_pixels: int = 0
    """Bounds of the resized image's area, for families that keep the shape of an image."""
    edge: int = 0
    """Pixels of a tile's edge, for families whose tiles are squares of one size."""
    longest_edge: int = 0
    """Longest edge to which an image is resized before it is divided into tiles."""
    is_divided: bool = True
    """Whether an image is divided into tiles, for families that do; else it becomes one."""
    resample: int = 3
    """Number of pillow's filter."""
    mean: tuple[float, float, float] = (0.5, 0.5, 0.5)
    std: tuple[float, float, float] = (0.5, 0.5, 0.5)
    mark: str
    """Text that the model's chat template writes for an image; the layout's text takes its place.
    """
    bare: str
    """Text that stands for an image where there is no chat template; it has the mark once."""
    placeholder: str
    """Token, one for each feature."""
    placeholder_id: int
    words: tuple[str, ...] = ()
    """Further special tokens of the expansion, in an order of the family's own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tile:
    """One picture that the tower gets: all of an image, or a part."""

    height: int
    width: int
    """Pixels."""
    num_tokens: int
    shape: tuple[int, int, int]
    """Frames, rows and columns, in tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLayout:
    """An image as tokens."""

    tiles: tuple[Tile, ...]
    """In the order of their tokens. The last one shows all of the image."""
    text: str
    """Text that takes the place of `ImageSettings.mark`, with one placeholder for each token of
    each tile; placeholders of a tile are not interrupted, those of two tiles never adjoin."""
    rows: int = 0
    columns: int = 0
    """Number of tiles in each direction, besides that of the whole image; 0: one tile alone."""

    @property
    def num_features(self) -> int:
        """Number of placeholders."""
        return sum(tile.num_tokens for tile in self.tiles)


@dataclass(frozen=True, slots=True, kw_only=True)
class TowerCost:
    """Size and work of a tower."""

    num_params: int
    """Parameters, projection into the decoder included."""
    flops_per_patch: float
    """FLOPs of matrix products with weights for one patch."""
    attention_flops_per_pair: float
    """FLOPs of one patch against one other that it attends to, over all layers."""
    window_patches: int = 0
    """Patches of an attention window; 0: all patches of a tile attend to each other."""
    full_layers_share: float = 1.0
    """Share of the layers whose attention is not windowed."""
    patches_per_token: int = 1
    """Patches that become one token."""
    tokens_per_image: int | None = None
    """Tokens of every image; None: they follow from its size."""
    features_per_token: int = 1
    """Feature vectors of decoder width for one token: 1, and one for each layer that takes some."""

    values_per_patch: int = 0
    """Values that a pass holds at a time for one patch: pixels, and a layer's widest moment."""

    def weight_bytes(self, num_bytes: int) -> int:
        """Bytes of the parameters, in a format of `num_bytes` a value."""
        return self.num_params * num_bytes

    def pass_bytes(self, num_tokens: int, num_bytes: int) -> int:
        """Bytes that a pass works with for images of `num_tokens` tokens, at most."""
        num_patches = min(num_tokens * self.patches_per_token, MAX_PATCHES)
        return num_patches * self.values_per_patch * num_bytes

    def flops(self, num_patches: float) -> float:
        """FLOPs of one tile of `num_patches` patches."""
        near = min(self.window_patches, num_patches) if self.window_patches else num_patches
        seen = self.full_layers_share * num_patches + (1 - self.full_layers_share) * near
        return num_patches * (self.flops_per_patch + self.attention_flops_per_pair * seen)


class VisionSpec(Protocol):
    """One vision-language family."""

    @property
    def model_type(self) -> str:
        """`model_type` of the whole model, in its `config.json`."""
        ...

    @property
    def inputs(self) -> InputSpec:
        """The kinds of contents that sequences of the decoder may hold, and the rule by which their
        tokens are numbered."""
        ...

    @property
    def decoder_prefix(self) -> str:
        """Prefix of the decoder's backbone among the names of the whole model's tensors, as
        transformers writes them: `model.language_model.`."""
        ...

    @property
    def tower_prefixes(self) -> tuple[str, ...]:
        """Prefixes of the tower's tensors, in the same names."""
        ...

    @property
    def defaults(self) -> Json:
        """Fields that a `config.json` of the family may leave out, with transformers' defaults, in
        the same form, and the decoder's `model_type`."""
        ...

    @property
    def public(self) -> Mapping[str, Json]:
        """`config.json` of public models, with the fields that matter here, by name in lower
        case."""
        ...

    def settings(
        self, config: Json, processor: Json, *, max_tokens: int | None, tokens: Mapping[str, int]
    ) -> ImageSettings:
        """Settings from the whole model's `config.json`, its image processor's settings and the
        vocabulary's special `tokens`. `max_tokens` is the most tokens of one image. Raises
        ValueError, as a predicate for a message, where the model cannot meet that limit or lacks a
        token."""
        ...

    def layout(self, settings: ImageSettings, height: int, width: int) -> ImageLayout:
        """The tokens of an image of this size in pixels. Raises ValueError, as a predicate, for a
        size that the family does not take."""
        ...

    def tiles(
        self, settings: ImageSettings, image: Image, layout: ImageLayout
    ) -> list[NDArray[np.uint8]]:
        """Pixels [H, W, 3] of each tile of an RGB image."""
        ...

    def tower_cost(self, config: Json) -> TowerCost:
        """Size and work of the tower of a whole model's `config.json`."""
        ...


def token_text(tokens: Mapping[str, int], token_id: int, field: str) -> str:
    """Text of a special token whose id is in the field of a `config.json`. Raises ValueError, as a
    predicate, where the tokenizer does not have it."""
    for text, number in tokens.items():
        if number == token_id:
            return text
    raise ValueError(f"has a tokenizer without the token {token_id} of {field} in its config.json")


def require_tokens(tokens: Mapping[str, int], *names: str) -> None:
    """Raise ValueError, as a predicate, unless the vocabulary has all of these special tokens."""
    if missing := [name for name in names if name not in tokens]:
        raise ValueError(f"has a tokenizer without {', '.join(map(repr, missing))}")


def tile_edge(vision: Json, edge: int | None, what: str) -> int:
    """The edge in pixels of square tiles for the tower of a `vision_config`; `edge` is that of the
    processor, None where its settings do not say. Raises ValueError, as a predicate, unless they
    are the same; it names the tiles by `what`."""
    size: int = vision["image_size"]
    if edge is not None and edge != size:
        raise ValueError(
            f"has a processor that makes {what} of {edge} pixels, and a tower for {size}"
        )
    return size


def setting(processor: Json, name: str, default: Any) -> Any:
    """A field of an image processor's settings, or the family's default."""
    value = processor.get(name)
    return default if value is None else value


def three(values: Sequence[float]) -> tuple[float, float, float]:
    """One value for each colour."""
    red, green, blue = values
    return red, green, blue


def pixels_of(image: Image, size: tuple[int, int], resample: int) -> NDArray[np.uint8]:
    """An RGB image as [H, W, 3], resized to `size`, height and width, in 8 bits, as transformers'
    processors without torchvision resize it."""
    import numpy as np
    from PIL.Image import Resampling

    height, width = size
    if (image.height, image.width) != size:
        image = image.resize((width, height), Resampling(resample))
    return np.asarray(image, dtype=np.uint8)
