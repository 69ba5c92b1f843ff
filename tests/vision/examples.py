"""Tiny vision-language models, random images, and transformers' whole model as the reference."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL.Image import Image, fromarray
from torch import Tensor
from transformers import (
    AutoModelForImageTextToText,
    AutoTokenizer,
    Gemma3ForSequenceClassification,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.smolvlm.image_processing_pil_smolvlm import SmolVLMImageProcessorPil

from hone.checkpoint.export import export_hf
from hone.distributed.mesh import Mesh
from hone.families.registry import spec_of
from hone.families.vision.registry import VISION
from hone.families.vision.spec import ImageSettings
from hone.images.opening import open_image
from hone.images.pixels import TileSource, content_hash, layout_of
from hone.images.store import STORE
from hone.model_input import TEXT, Content, ModelInput
from hone.models.heads import value_head
from hone.models.load import load_model, load_value_model
from hone.models.manifest import export_weights
from hone.models.settings import ModelConfig
from hone.models.tiny_vision import make_tiny_vision_model
from hone.types import Row

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen3_5_moe", "gemma3", "smolvlm")
PROCESSORS: dict[str, Any] = {
    "qwen2_5_vl": Qwen2VLImageProcessorPil,
    "qwen3_vl": Qwen2VLImageProcessorPil,
    "qwen3_5": Qwen2VLImageProcessorPil,
    "qwen3_5_moe": Qwen2VLImageProcessorPil,
    "gemma3": Gemma3ImageProcessorPil,
    "smolvlm": SmolVLMImageProcessorPil,
}


def picture(seed: int, width: int = 90, height: int = 70) -> Image:
    """A random image, whose parts of 10 x 10 pixels have one colour."""
    rng = np.random.default_rng(seed)
    small = rng.integers(0, 256, (-(-height // 10), -(-width // 10), 3), dtype=np.uint8)
    return fromarray(small.repeat(10, 0).repeat(10, 1)[:height, :width])


@dataclass(frozen=True)
class Example:
    """Ids of text and images, with the images that they show."""

    ids: list[int]
    model_input: ModelInput
    images: tuple[Image, ...]

    def with_completion(self, ids: Sequence[int]) -> Example:
        return replace(self, ids=[*self.ids, *ids])

    def row(self, name: str, completion: int = 5, group: str = "") -> Row:
        """A row that trains its last tokens."""
        mask = [False] * (len(self.ids) - completion) + [True] * completion
        return Row(
            id=name,
            group_id=group or name,
            token_ids=self.ids,
            loss_mask=mask,
            model_input=self.model_input,
        )


class Twin:
    """One tiny model, loaded by hone and by transformers."""

    def __init__(self, folder: Path, family: str, **options: Any) -> None:
        make_tiny_vision_model(folder, family=family, initializer_range=0.15, **options)
        self._read(folder, family)

    @classmethod
    def at(cls, folder: Path, family: str) -> Twin:
        """The model that another process has written to a folder."""
        twin = cls.__new__(cls)
        twin._read(folder, family)
        return twin

    def _read(self, folder: Path, family: str) -> None:
        self.family, self.folder = family, folder
        self.cfg = ModelConfig(path=str(folder))
        self.spec: Any = VISION[family]

    @cached_property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return AutoTokenizer.from_pretrained(self.folder)

    @cached_property
    def settings(self) -> ImageSettings:
        config, processor = (
            json.loads((self.folder / name).read_text())
            for name in ("config.json", "preprocessor_config.json")
        )
        vocabulary = self.tokenizer.get_vocab()
        return self.spec.settings(config, processor, max_tokens=None, tokens=vocabulary)

    @cached_property
    def whole(self) -> Any:
        """transformers' model, frozen."""
        whole = AutoModelForImageTextToText.from_pretrained(self.folder, attn_implementation="sdpa")
        return whole.eval()

    @property
    def gives_values(self) -> bool:
        """Whether the decoder can be a critic or a reward model."""
        return spec_of(self.spec.defaults["text_config"]["model_type"]).gives_values

    def load(self) -> PreTrainedModel:
        """hone's decoder with its features."""
        return load_model(self.cfg, device="cpu")

    def sequence(self, *parts: str | Image) -> Example:
        """The ids of texts and images, expanded as slowly as can be: a part at a time."""
        text = "".join(
            part
            if isinstance(part, str)
            else self.settings.bare.replace(
                self.settings.mark, self.spec.layout(self.settings, part.height, part.width).text
            )
            for part in parts
        )
        ids: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        images = tuple(part for part in parts if not isinstance(part, str))
        contents: list[Content] = []
        start = 0
        for image in images:
            file = open_image(image, folder=None)
            for number, tile in enumerate(layout_of(file, self.settings).tiles):
                start = ids.index(self.settings.placeholder_id, start)
                content = Content(
                    kind="image",
                    hash=content_hash(file.digest, self.settings, number),
                    start=start,
                    num_tokens=tile.num_tokens,
                    shape=tile.shape,
                )
                STORE.register({content.hash: TileSource(file, self.settings, number)})
                contents.append(content)
                start = content.stop
        return Example(ids, ModelInput(tuple(contents)) if contents else TEXT, images)

    def processed(self, images: Sequence[Image]) -> dict[str, Tensor]:
        """What transformers' image processor makes of images, as arguments of its model."""
        if not images:
            return {}
        options = json.loads((self.folder / "preprocessor_config.json").read_text())
        options.pop("image_processor_type")
        processor = PROCESSORS[self.family](**options)
        found = processor(list(images), return_tensors="pt")
        names = ("pixel_values", "image_grid_thw", "pixel_attention_mask")
        return {name: found[name] for name in names if name in found}

    def kinds(self, sequence: Example) -> Tensor:
        """1 for each token of an image, [1, T]. Not by ids: a model may sample a placeholder."""
        kinds = torch.zeros(1, len(sequence.ids), dtype=torch.int64)
        for content in sequence.model_input.contents:
            kinds[0, content.start : content.stop] = 1
        return kinds

    def arguments(self, sequence: Example) -> dict[str, Tensor]:
        """Arguments of transformers' whole model for one sequence alone, with its pixels."""
        options: dict[str, Tensor] = self.processed(sequence.images)
        if self.family.startswith("qwen"):
            options["mm_token_type_ids"] = self.kinds(sequence)
        elif self.family == "gemma3":  # without them transformers' attention is causal
            options["token_type_ids"] = self.kinds(sequence)
        return {"input_ids": torch.tensor([sequence.ids]), **options}

    def logits(self, sequence: Example) -> Tensor:
        """Logits [T, V] of transformers' whole model."""
        self.whole.model.rope_deltas = None
        return self.whole(**self.arguments(sequence)).logits[0]

    def logprobs(self, sequence: Example, completion: int) -> Tensor:
        """Log-probabilities of the last `completion` tokens. The last one may be a placeholder, of
        which transformers would take an image's."""
        before = replace(sequence, ids=sequence.ids[:-1])
        predicted = self.logits(before).log_softmax(-1)[-completion:]
        labels = torch.tensor(sequence.ids[-completion:])
        return predicted.gather(1, labels[:, None])[:, 0]


class Judge(Twin):
    """A tiny reward model with a random head, in the folder `judge`, and transformers' whole model
    with that head."""

    def __init__(self, folder: Path, family: str) -> None:
        super().__init__(folder / "language", family, seed=5)
        model = load_value_model(self.cfg, device="cpu", seed=0)
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            value_head(model).weight.normal_(std=0.1, generator=generator)
        model.config.pad_token_id = self.tokenizer.pad_token_id
        self.head = value_head(model).weight.detach()[0].clone()
        named = export_weights(model)
        self.judge = export_hf(
            model,
            self.tokenizer,
            folder / "judge",
            torch.float32,
            named,
            mesh=Mesh.alone("cpu"),
            step=1,
        )

    def load_judge(self) -> PreTrainedModel:
        """hone's reward model with its features."""
        return load_value_model(ModelConfig(path=str(self.judge)), device="cpu", seed=0)

    @cached_property
    def classifier(self) -> Any:
        """transformers' class for what is in the folder, which it has for Gemma 3 alone."""
        kind = Gemma3ForSequenceClassification
        return kind.from_pretrained(self.judge, attn_implementation="sdpa").eval()

    @torch.no_grad()
    def score(self, *parts: str | Image) -> float:
        """The score of texts and images by transformers, from pixels: the value at the last token,
        which is none that pads."""
        sequence = self.sequence(*parts)
        assert sequence.ids[-1] != self.tokenizer.pad_token_id
        if self.family == "gemma3":
            return float(self.classifier(**self.arguments(sequence)).logits[0, 0])
        self.whole.model.rope_deltas = None
        hidden_TD = self.whole.model(**self.arguments(sequence)).last_hidden_state[0]
        return float(hidden_TD[-1] @ self.head)
