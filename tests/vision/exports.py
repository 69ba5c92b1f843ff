"""Exports of tiny vision-language models, and what is asked of those who load them.

`tests/vision/test_loaded_elsewhere.py` asks on a CPU, `benchmarks/gpu/vllm_images_check.py` on a
GPU.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from PIL.Image import Image
from torch import Tensor
from transformers import AutoProcessor, AutoTokenizer, PreTrainedModel

from hone.checkpoint.export import export_hf
from hone.data.prompts import load_prompts
from hone.data.settings import DataConfig
from hone.distributed.mesh import Mesh
from hone.loops.inputs import image_reader
from hone.models.manifest import export_weights
from hone.models.settings import ModelConfig
from hone.types import Prompt
from tests.vision.examples import Twin, picture
from tests.vision.test_export import trained
from tests.vision.test_load import PUBLISHED, renamed

SERVED: dict[str, Any] = {"num_heads": 2, "num_kv_heads": 1, "head_dim": 32}
"""Sizes that vLLM computes on a CPU."""
TEXTS = "what is ", "? it is "
PILLOW = {"use_fast": False}
"""The option of processors and of vLLM with which pictures are resized as they were for training.
transformers will call it `backend="pil"`, with which its processors of videos cannot be loaded."""
PICTURES = (
    (picture(1, 90, 60),),
    (picture(2, 90, 60),),  # the same ids
    (picture(3, 50, 120), picture(4, 64, 64)),
)


@dataclass
class Export:
    """What hone has written of a model that it has trained."""

    family: str
    model: PreTrainedModel
    folder: Path

    @cached_property
    def cfg(self) -> ModelConfig:
        return ModelConfig(path=str(self.folder))

    @cached_property
    def tokenizer(self) -> Any:
        return AutoTokenizer.from_pretrained(self.folder)

    @cached_property
    def processor(self) -> Any:
        """transformers' processor, which resizes by torchvision unless it gets `PILLOW`."""
        return AutoProcessor.from_pretrained(self.folder)

    @cached_property
    def pillow(self) -> Any:
        return AutoProcessor.from_pretrained(self.folder, **PILLOW)

    @cached_property
    def placeholder_id(self) -> int:
        reader = image_reader(self.cfg, DataConfig(train=()), self.tokenizer)
        assert reader is not None
        return reader.settings.placeholder_id

    def read(self, *images: Image, limit: int = 768) -> Prompt:
        """What a run makes of a row with these images."""
        names = [f"{number}.png" for number in range(len(images))]
        for name, image in zip(names, images, strict=True):
            image.save(self.folder.parent / name)
        row = {"images": names, "prompt": TEXTS[0] + "<image>" * len(images) + TEXTS[1]}
        file = self.folder.parent / "rows.jsonl"
        file.write_text(json.dumps(row) + "\n")
        source: Any = {"path": str(file)}
        cfg = DataConfig(train=(source,), max_image_tokens=limit, image_workers=0)
        reader = image_reader(self.cfg, cfg, self.tokenizer)
        (prompt,) = load_prompts(cfg, self.tokenizer, images=reader).known_rows()
        return prompt

    def process(self, processor: Any, *images: Image, **options: Any) -> dict[str, Tensor]:
        """What a processor makes of a conversation with these images."""
        return processor.apply_chat_template(
            messages(images),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=True,
            return_tensors="pt",
            **options,
        )


def messages(images: Sequence[Image]) -> list[dict[str, Any]]:
    shown = [{"type": "image", "image": image} for image in images]
    said = [{"type": "text", "text": text} for text in TEXTS]
    return [{"role": "user", "content": [said[0], *shown, said[1]]}]


def made_export(folder: Path, family: str) -> Export:
    """The export of a new tiny model, whose source has a published checkpoint's names of tensors:
    vLLM does not know those that transformers writes of Gemma 3."""
    twin = Twin(folder / "drawn", family, **SERVED)
    source = renamed(twin.folder, folder / "source", PUBLISHED[family])
    return exported(family, source, folder / "saved")


def exported(family: str, source: Path, folder: Path) -> Export:
    """A model that was loaded from `source`, trained and saved."""
    twin = Twin.at(source, family)
    model = trained(twin)
    named = export_weights(model)
    export_hf(model, twin.tokenizer, folder, torch.float32, named, mesh=Mesh.alone("cpu"))
    return Export(family, model, folder)


def logprobs(whole: Any, made: dict[str, Tensor], completion: Sequence[int]) -> Tensor:
    """Of the completion, under transformers' whole model after what a processor has made."""
    after = torch.tensor([completion])
    given = {name: x for name, x in made.items() if name != "attention_mask"}
    given["input_ids"] = torch.cat([made["input_ids"], after], 1)
    for name in given.keys() & {"mm_token_type_ids", "token_type_ids"}:
        given[name] = torch.cat([made[name], torch.zeros_like(after)], 1)
    logits = whole(**given).logits[0, -len(completion) - 1 : -1]
    return logits.log_softmax(-1).gather(1, after.T)[:, 0]


def vllm_answers(exports: Sequence[Export], device: str) -> list[list[Any]]:
    """What vLLM answers to each of `PICTURES`, of each model, with pictures resized by pillow and
    then by torchvision: ids of the prompt, sampled ids, and their log-probabilities."""
    asked: list[dict[str, Any]] = []
    for export in exports:
        prompts: list[dict[str, Any]] = []
        for options in (PILLOW, {}):
            for number, images in enumerate(PICTURES):
                names = [f"{number}-{place}.png" for place in range(len(images))]
                files = [str(export.folder.parent / name) for name in names]
                for file, image in zip(files, images, strict=True):
                    image.save(file)
                text = export.processor.apply_chat_template(
                    messages(images), add_generation_prompt=True, tokenize=False
                )
                prompts.append({"text": text, "images": files, "options": options})
        stop = export.placeholder_id
        asked.append({"folder": str(export.folder), "stop": stop, "prompts": prompts})
    file = exports[0].folder.parent / "asked.json"
    file.write_text(json.dumps(asked))
    command = [sys.executable, "-m", "tests.vision.vllm_answers", str(file), device]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1800)
    assert ended.returncode == 0, ended.stderr
    return json.loads(ended.stdout.splitlines()[-1])
