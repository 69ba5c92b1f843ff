"""Tiny vision-language models with strong weights, sequences with random images, and what
transformers' whole model says of them."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import numpy as np
import torch
from PIL.Image import Image, fromarray
from transformers import AutoModelForImageTextToText, AutoTokenizer, PreTrainedModel
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from hone.families.vision.registry import VISION
from hone.families.vision.spec import ImageSettings
from hone.images.store import STORE, TilePixels
from hone.model_input import Content, ModelInput
from hone.models.load import load_model
from hone.models.settings import ModelConfig
from hone.models.tiny_vision import make_tiny_vision_model
from hone.models.vision_decoders import register_decoders

MAX_TOKENS = 80
"""Of one image, which is 2 x 2 tiles and the whole for SmolVLM."""


@lru_cache
def folder_of(family: str) -> Path:
    """A whole model whose weights are so large that attention is far from uniform."""
    folder = make_tiny_vision_model(
        mkdtemp(prefix=f"hone-{family}-"), family=family, tie_word_embeddings=False
    )
    whole = AutoModelForImageTextToText.from_pretrained(folder)
    draw = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            centre = float("norm" in name and name.endswith("weight") and family != "gemma3")
            scale = 0.6 if "embed_tokens" in name else 0.15
            parameter.copy_(centre + scale * torch.randn(parameter.shape, generator=draw))
    whole.save_pretrained(folder)
    return folder


def decoder_of(family: str) -> PreTrainedModel:
    """The decoder of `folder_of` with its tower, as hone loads it."""
    return load_model(ModelConfig(path=str(folder_of(family))), device="cpu")


def picture(rng: np.random.Generator, height: int, width: int) -> Image:
    return fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8))


@dataclass
class Pixels:
    """Made when they are asked for, as those of a data set are."""

    values: Any
    settings: ImageSettings

    def pixels(self) -> TilePixels:
        return TilePixels(self.values.copy(), self.settings)


@dataclass
class Sequence:
    """Ids with contents, and the images that they stand for."""

    ids: list[int]
    model_input: ModelInput
    images: list[Image] = field(default_factory=list)


class Writer:
    """Makes sequences of one family from text and images."""

    def __init__(self, family: str) -> None:
        folder = folder_of(family)
        register_decoders()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.spec = VISION[family]
        self.config = json.loads((folder / "config.json").read_text())
        self.processor = json.loads((folder / "preprocessor_config.json").read_text())
        vocabulary = self.tokenizer.get_vocab()
        self.settings = self.spec.settings(
            self.config, self.processor, max_tokens=MAX_TOKENS, tokens=vocabulary
        )
        self.specials = {*self.tokenizer.added_tokens_decoder}
        self._numbers = iter(range(1_000_000))

    def write(self, *parts: str | Image) -> Sequence:
        ids: list[int] = []
        contents: list[Content] = []
        images: list[Image] = []
        for part in parts:
            if isinstance(part, str):
                ids += self.tokenizer(part, add_special_tokens=False)["input_ids"]
                continue
            images.append(part)
            layout = self.spec.layout(self.settings, part.height, part.width)
            text = self.settings.bare.replace(self.settings.mark, layout.text)
            place, stop = len(ids), 0
            ids += self.tokenizer(text, add_special_tokens=False)["input_ids"]
            pixels = self.spec.tiles(self.settings, part, layout)
            for tile, values in zip(layout.tiles, pixels, strict=True):
                start = ids.index(self.settings.placeholder_id, max(place, stop))
                stop = start + tile.num_tokens
                assert set(ids[start:stop]) == {self.settings.placeholder_id}
                name = f"{self.spec.model_type} {id(self)} {next(self._numbers)}"
                STORE.register({name: Pixels(values, self.settings)})
                contents.append(
                    Content(
                        kind="image",
                        hash=name,
                        start=start,
                        num_tokens=tile.num_tokens,
                        shape=tile.shape,
                    )
                )
        return Sequence(ids, ModelInput(tuple(contents)), images)


class Whole:
    """transformers' whole model, with its own processor of images."""

    def __init__(self, writer: Writer) -> None:
        self.writer = writer
        self.family = writer.spec.model_type
        self.model: Any = AutoModelForImageTextToText.from_pretrained(folder_of(self.family))
        fields = {k: v for k, v in writer.processor.items() if k != "image_processor_type"}
        if self.family == "smolvlm":
            fields["size"] = {"longest_edge": writer.settings.longest_edge}
            self.processor: Any = SmolVLMImageProcessorPil(**fields)
        else:
            self.processor = Qwen2VLImageProcessorPil(**fields)

    @torch.no_grad()
    def logprobs(self, sequence: Sequence, completion: list[int]) -> torch.Tensor:
        """Of the tokens of a completion [N, V], before each of them."""
        ids = torch.tensor([[*sequence.ids, *completion]])
        inputs: dict[str, Any] = {}
        if sequence.images:
            images = [sequence.images] if self.family == "smolvlm" else sequence.images
            found = self.processor(images, return_tensors="pt")
            inputs = {k: v for k, v in found.items() if k not in ("rows", "cols")}
        if self.family.startswith("qwen"):
            kinds = torch.zeros_like(ids)
            for content in sequence.model_input.contents:
                kinds[0, content.start : content.stop] = 1
            inputs["mm_token_type_ids"] = kinds
        logits = self.model(input_ids=ids, **inputs).logits[0]
        return logits[len(sequence.ids) - 1 : -1].log_softmax(-1)
