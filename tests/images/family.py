"""Tiny families with the readers of their images, and the ids that transformers makes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm import processing_smolvlm
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from hone.images.reader import ImageReader
from hone.models.tiny_vision import make_tiny_vision_model, make_vision_tokenizer

__all__ = ["FAMILIES", "Family"]

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "gemma3", "smolvlm")


class Family:
    """The files of a tiny model, and the ids that its processor makes."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.tokenizer: Any = make_vision_tokenizer(name)
        make_tiny_vision_model(folder, family=name, tokenizer=self.tokenizer, weights=False)
        self.config, self.processor = (
            json.loads((folder / file).read_text())
            for file in ("config.json", "preprocessor_config.json")
        )

    def reader(self, max_tokens: int = 300, **changes: Any) -> ImageReader:
        vocabulary = self.tokenizer.get_vocab()
        config = self.config | changes
        return ImageReader.of(config, self.processor, vocabulary, max_tokens=max_tokens)

    def ids(self, text: str) -> list[int]:
        return self.tokenizer(text, add_special_tokens=False)["input_ids"]

    def reference(self, text: str, images: list[Any]) -> list[int]:
        """The ids of a text with the marks of a chat template, as transformers makes them."""
        sizes = {key: value for key, value in self.processor.items() if "type" not in key}
        if self.name == "gemma3":
            made: Any = Gemma3Processor(
                image_processor=Gemma3ImageProcessorPil(**sizes),
                tokenizer=self.tokenizer,
                image_seq_length=16,
            )
            return made(text=[text], images=[images])["input_ids"][0]
        if self.name == "smolvlm":
            made = _WithoutVideo(
                SmolVLMImageProcessorPil(**sizes), self.tokenizer, None, image_seq_len=16
            )
            return made(text=[text], images=[images])["input_ids"][0]
        # Qwen's processors need torchvision: the number of pads is that of its image processor.
        processor = Qwen2VLImageProcessorPil(**sizes)
        (pad,) = self.ids("<|image_pad|>")
        pieces: list[int] = []
        rest = iter(images)
        for token in self.ids(text):
            if token != pad:
                pieces.append(token)
                continue
            image = next(rest)
            grid = processor.get_number_of_image_patches(image.height, image.width, {})
            pieces += [pad] * (grid // 4)
        return pieces


class _WithoutVideo(processing_smolvlm.SmolVLMProcessor):
    """SmolVLM's processor needs torchvision for videos alone."""

    @classmethod
    def get_attributes(cls) -> list[str]:
        return ["image_processor", "tokenizer"]
