"""Trains decoders on rows with images in one of two processes (`tests.ranks`); see
`test_training_ranks.py`."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any
from unittest.mock import patch

import torch

from hone.algorithms.settings import AlgorithmConfig
from hone.models.features import FeatureSource
from hone.trainer.trainer import Trainer
from hone.types import Column, Row
from tests.rank_cases import STEP, Case, of_first, outcomes, start
from tests.trainer.examples import make_trainer
from tests.vision.examples import FAMILIES, Twin, picture


@cache
def twin_of(family: str) -> Twin:
    """Collective when it is called first: only one process of a group writes a model."""
    folder = of_first(lambda: Twin(Path(mkdtemp(prefix="hone-")), family, num_layers=2).folder)
    return Twin.at(folder, family)


def rows_of(family: str) -> list[Row]:
    """Two groups of three rows that share a prompt with images, a row with three images, and two
    of text alone. One process may get no image at all."""
    twin = twin_of(family)
    letters = twin.tokenizer("abcdefghijklmnopqrstuvwxyz", add_special_tokens=False)["input_ids"]
    prompts = {
        "a": twin.sequence("what is ", picture(1), "? it is"),
        "b": twin.sequence(picture(2, 60, 90), "?"),
        "c": twin.sequence(picture(3), picture(4), " or ", picture(5, 50, 120), "?"),
        "d": twin.sequence("no image here"),
    }
    generator = torch.Generator().manual_seed(0)
    rows: list[Row] = []
    for number, group in enumerate("aaabbbcdd"):
        completion = letters[number : number + 4 + number % 3]
        row = (
            prompts[group]
            .with_completion(completion)
            .row(f"r{number}", completion=len(completion), group=f"g{group}")
        )
        columns = {
            f"logprobs/{who}": torch.zeros(len(completion))
            for who in ("engine", "policy", "reference")
        }
        columns["advantages"] = torch.randn(1, generator=generator).expand(len(completion)).clone()
        row.columns = {name: Column(values) for name, values in columns.items()}
        rows.append(row)
    return rows


@dataclass(frozen=True)
class VisionCase(Case):
    """A case whose model is a decoder with a tower."""

    def trainer(self, **settings: Any) -> Trainer:
        rows_of(self.model["family"])  # every rank knows the pixels, as those of a data set
        cfg = AlgorithmConfig.model_validate(self.objective)
        model = twin_of(self.model["family"]).load()
        return make_trainer(model, cfg, **{**STEP, **self.alike, **settings})


LAYOUTS = {
    "stage 0": {"zero_stage": 0},
    "stage 3": {"zero_stage": 3},
    "tensor": {"tensor_parallel_size": 2},
}
DIVIDED = ("qwen2_5_vl", "qwen3_vl", "smolvlm")
"""Families whose layers the tensor axis divides."""
CASES = {
    f"{family}, {layout}": VisionCase(
        parallel,
        partial(rows_of, family),
        {"max_tokens_per_microbatch": 400, "recompute": "full" if layout == "stage 3" else "off"},
        model={"family": family},
        objective={"entropy_coef": 0.1},
    )
    for family in FAMILIES
    for layout, parallel in LAYOUTS.items()
    if layout != "tensor" or family in DIVIDED
}


def layouts():
    for family in FAMILIES:
        twin_of(family)
    return outcomes(CASES)


def _without_images() -> AbstractContextManager[Any]:
    return patch.object(FeatureSource, "gather", lambda *_: None)


def mistakes():
    """A group in which one process forgets the images is seen."""
    case = replace(CASES["qwen3_vl, stage 3"], plant=_without_images)
    return outcomes({"images left out": case})


def main() -> None:
    start([layouts, mistakes])
