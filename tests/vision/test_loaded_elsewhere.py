"""What others make of an export: transformers' processor and whole model, and vLLM.

The processors need torchvision, and SmolVLM's num2words. `make test-vllm` runs these tests, in an
environment that has both.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoProcessor,
    PreTrainedModel,
)

from hone.distributed.mesh import Mesh
from hone.engine.engine import EmbeddedEngine
from hone.engine.settings import EngineConfig
from hone.extras import is_installed
from hone.models.contents import require_features
from hone.models.load import load_model
from hone.trainer.parallel_model import ParallelModel
from hone.trainer.settings import SFTTrainerConfig
from hone.types import Completion, Prompt, Request, Row, SamplingParams
from tests.tables import table
from tests.vision.examples import FAMILIES, Twin, picture
from tests.vision.exports import PICTURES, Export, exported, logprobs, made_export, vllm_answers
from tests.vision.test_oracles import found_logprobs
from tests.vision.vllm_answers import MAX_TOKENS

pytestmark = pytest.mark.vllm
has_processors = pytest.mark.skipif(
    not (is_installed("torchvision") and is_installed("num2words")),
    reason="torchvision and num2words are not installed",
)
has_vllm = pytest.mark.skipif(not is_installed("vllm"), reason="vLLM is not installed")

HYBRIDS = ("qwen3_5", "qwen3_5_moe")
SERVED = [family for family in FAMILIES if family not in HYBRIDS]
"""Families with which vLLM has been tried on a CPU."""
EXACT = 5e-5
"""Float32 log-probabilities of two implementations, over a few layers."""
LIMIT = 20
"""`data.max_image_tokens`: fewer tokens than some pictures have without a limit."""


@pytest.fixture(scope="module")
def export_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Export]:
    made: dict[str, Export] = {}

    def export(family: str) -> Export:
        if family not in made:
            made[family] = made_export(tmp_path_factory.mktemp(family), family)
        return made[family]

    return export


def seen(model: PreTrainedModel, prompt: Prompt) -> dict[str, Tensor]:
    """What reaches the tower of a model with a prompt, under the names of the processor."""
    source = require_features(model)
    found: dict[str, Tensor] = {}

    def keep(module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> None:
        found["pixel_values"] = given[0] if given else named["pixel_values"]
        if "grid_thw" in named:
            found["image_grid_thw"] = named["grid_thw"]

    first = next(iter(source.tower.modules.values()))
    hook = first.register_forward_pre_hook(keep, with_kwargs=True)
    source.tower.encode(source._pixels_of([x.hash for x in prompt.model_input.contents]))
    hook.remove()
    return found


def equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> bool:
    """Whether a processor gives the same numbers; it may have a dimension for the sequence."""
    return all(
        x.shape == expected[name].reshape(x.shape).shape
        and torch.equal(x, expected[name].reshape(x.shape))
        for name, x in found.items()
    )


@has_processors
@pytest.mark.parametrize("family", FAMILIES)
def test_the_processor_makes_the_ids_and_pixels_of_a_run(
    family: str, export_of: Callable[[str], Export]
) -> None:
    export = export_of(family)
    for images in PICTURES:
        prompt = export.read(*images)
        made = export.process(export.pillow, *images)
        assert made["input_ids"][0].tolist() == [*prompt.token_ids]
        assert equal(seen(export.model, prompt), made)


@has_processors
@pytest.mark.parametrize("family", FAMILIES)
def test_torchvision_resizes_to_nearly_the_same_pixels(
    family: str, export_of: Callable[[str], Export]
) -> None:
    """Of the 256 values of a colour, few differ by more than one."""
    export = export_of(family)
    std = export.processor.image_processor.image_std
    for images in PICTURES:
        by_pillow, made = (export.process(x, *images) for x in (export.pillow, export.processor))
        assert torch.equal(by_pillow["input_ids"], made["input_ids"])
        assert torch.equal(*(x.get("image_grid_thw", torch.ones(1)) for x in (by_pillow, made)))
        difference = (by_pillow["pixel_values"] - made["pixel_values"]).abs() * 255 * max(std)
        assert difference.mean() < 0.2
        assert (difference > 1.5).float().mean() < 0.02


@has_processors
@pytest.mark.parametrize("family", FAMILIES)
def test_a_limit_of_tokens_is_an_option_of_the_processor(
    family: str, export_of: Callable[[str], Export]
) -> None:
    """As docs/images.md says it."""
    export = export_of(family)
    images = [picture(5, 200, 160)]
    options = {
        "qwen2_5_vl": {"size": {"shortest_edge": 4 * 28**2, "longest_edge": LIMIT * 28**2}},
        "qwen3_vl": {"size": {"shortest_edge": 4 * 32**2, "longest_edge": LIMIT * 32**2}},
        "gemma3": {},
        "smolvlm": {"size": {"longest_edge": 32}},  # one tile, of 16 tokens
    }["qwen3_vl" if family in HYBRIDS else family]
    prompt = export.read(*images, limit=LIMIT)
    made = export.process(export.pillow, *images, processor_kwargs=options)
    assert made["input_ids"][0].tolist() == [*prompt.token_ids]
    assert equal(seen(export.model, prompt), made)
    unlimited = export.process(export.pillow, *images)
    assert (len(unlimited["input_ids"][0]) > len(prompt.token_ids)) == (family != "gemma3")


@has_processors
@pytest.mark.parametrize("family", FAMILIES)
@torch.no_grad()
def test_the_whole_model_has_the_trainers_logprobs(
    family: str, export_of: Callable[[str], Export]
) -> None:
    export = export_of(family)
    whole: Any = AutoModelForImageTextToText.from_pretrained(
        export.folder, attn_implementation="sdpa"
    ).eval()
    model = ParallelModel(export.model, SFTTrainerConfig(compile="off"), Mesh.alone("cpu"))
    completion = [*range(5, 12)]
    for number, images in enumerate(PICTURES):
        prompt = export.read(*images)
        made = export.process(export.pillow, *images)
        expected = logprobs(whole, made, completion)
        row = Row(
            id=str(number),
            group_id=str(number),
            token_ids=[*prompt.token_ids, *completion],
            loss_mask=[False] * len(prompt.token_ids) + [True] * len(completion),
            model_input=prompt.model_input,
        )
        assert (found_logprobs(model, [row]) - expected).abs().max() < 1e-5
        export.model.train(mode=False)


@has_processors
@table("family", FAMILIES)
def test_files_of_one_processor_stay_one_file(family: str, tmp_path: Path) -> None:
    """As transformers writes processors: without a file of the image processor."""
    twin = Twin(tmp_path / "drawn", family)
    processor = AutoProcessor.from_pretrained(twin.folder)
    source = tmp_path / "source"
    shutil.copytree(twin.folder, source)
    for name in ("preprocessor_config.json", "processor_config.json"):
        (source / name).unlink(missing_ok=True)
    processor.save_pretrained(source)
    assert not (source / "preprocessor_config.json").exists()
    export = exported(family, source, tmp_path / "saved")
    own = AutoImageProcessor.from_pretrained(export.folder, backend="pil")
    assert own.to_dict() == AutoImageProcessor.from_pretrained(source, backend="pil").to_dict()
    prompt = export.read(*PICTURES[0])
    made = export.process(export.pillow, *PICTURES[0])
    assert made["input_ids"][0].tolist() == [*prompt.token_ids]
    assert equal(seen(export.model, prompt), made)


@pytest.fixture(scope="module")
def served(export_of: Callable[[str], Export]) -> dict[str, list[Any]]:
    """What vLLM answers, by family."""
    found = vllm_answers([export_of(family) for family in SERVED], "cpu")
    return dict(zip(SERVED, found, strict=True))


@has_processors
@has_vllm
@pytest.mark.parametrize("family", SERVED)
@torch.no_grad()
def test_vllm_samples_what_our_engine_does(
    family: str, export_of: Callable[[str], Export], served: dict[str, list[Any]]
) -> None:
    """vLLM's attention on a CPU is causal inside a picture of Gemma 3 as well, where transformers'
    model with such attention is the reference."""
    export = export_of(family)
    prompts = [export.read(*images) for images in PICTURES]
    completions = sampled(export, prompts)
    by_pillow, by_torchvision = served[family][: len(PICTURES)], served[family][len(PICTURES) :]
    for number, images in enumerate(PICTURES):
        ids, tokens, found = by_pillow[number]
        assert ids == [*prompts[number].token_ids]
        own = completions[str(number)]
        expected = torch.tensor(own.logprobs)
        if family == "gemma3":
            made = export.process(export.pillow, *images)
            del made["token_type_ids"]
            whole: Any = AutoModelForImageTextToText.from_pretrained(export.folder)
            causal = logprobs(whole, made, tokens)
            assert differs(causal, expected)
            expected = causal
        else:
            assert tokens == [*own.token_ids]
        assert (torch.tensor(found) - expected).abs().max() < EXACT
        other_ids, other_tokens, other = by_torchvision[number]
        assert (other_ids, other_tokens) == (ids, tokens)
        assert (torch.tensor(other) - expected).abs().max() < 0.05
    assert by_pillow[0][0] == by_pillow[1][0]
    first, second = (torch.tensor(by_pillow[number][2]) for number in (0, 1))
    assert differs(first, second), "it does not see pictures"


def differs(some: Tensor, others: Tensor) -> bool:
    return some.shape != others.shape or bool((some - others).abs().max() > 0.01)


def sampled(export: Export, prompts: Sequence[Prompt]) -> dict[str, Completion]:
    """What hone's engine samples greedily, with the weights of the export."""
    engine = EmbeddedEngine(
        load_model(export.cfg, device="cpu"),
        EngineConfig(max_num_seqs=4, kv_cache_gib=0.01),
        eos_token_ids=(),
        max_model_len=512,
    )
    stops = (export.placeholder_id,)  # of which vLLM would expect a picture
    params = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, stop_token_ids=stops)
    engine.submit(
        [
            Request(
                id=str(number),
                prompt_ids=prompt.token_ids,
                model_input=prompt.model_input,
                sampling=params,
            )
            for number, prompt in enumerate(prompts)
        ]
    )
    done: dict[str, Completion] = {}
    while engine.has_unfinished:
        done |= {completion.request_id: completion for completion in engine.step()}
    return done
