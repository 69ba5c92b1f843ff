"""vLLM on a GPU with exports that see images: its log-probabilities beside transformers'.

    python -m benchmarks.gpu.vllm_images_check [FAMILY ...]
    python -m benchmarks.gpu.vllm_images_check qwen3_vl --device cpu     # is the script sound?

Tiny models of each family in float32, written by an export. Gemma 3 is why this script is there:
on a CPU, where `make test-vllm` compares the other families, vLLM's attention is causal inside its
images. Needs torchvision, and for SmolVLM num2words. Exits with 1 where a check fails.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from benchmarks.gpu.sections import Run
from tests.vision.examples import FAMILIES
from tests.vision.exports import PICTURES, logprobs, made_export, vllm_answers
from torch import Tensor
from transformers import AutoModelForImageTextToText

MOST = {"pillow": 1e-3, "torchvision": 0.05}
"""Largest difference of a log-probability, by what resizes images for vLLM."""
CAUSAL = 0.01
"""Least difference where a model attends to images in one direction and should in both."""


def check(run: Run, family: str) -> None:
    with TemporaryDirectory() as folder, torch.no_grad():
        export = made_export(Path(folder), family)
        (found,) = vllm_answers([export], run.args.device)
        whole: Any = AutoModelForImageTextToText.from_pretrained(export.folder)
        for number, images in enumerate(PICTURES):
            made = export.process(export.pillow, *images)
            for by, (ids, tokens, given) in zip(MOST, found[number :: len(PICTURES)], strict=True):
                name = f"{family}, prompt {number}, resized by {by}"
                run.check(f"{name}: ids", ids == made["input_ids"][0].tolist())
                away = gap(given, logprobs(whole, made, tokens))
                run.check(f"{name}: largest difference", away < MOST[by], away)
                if family == "gemma3" and by == "pillow":
                    causal = {key: x for key, x in made.items() if key != "token_type_ids"}
                    away = gap(given, logprobs(whole, causal, tokens))
                    run.check(f"{name}: from causal attention", away > CAUSAL, away)


def gap(given: list[float], expected: Tensor) -> float:
    return (torch.tensor(given) - expected).abs().max().item()


def main() -> None:
    def add_flags(parser: Any) -> None:
        parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")

    run = Run(__doc__, FAMILIES, seconds=480, add_flags=add_flags)
    sys.exit(run.go({family: partial(check, run, family) for family in FAMILIES}))


if __name__ == "__main__":
    main()
