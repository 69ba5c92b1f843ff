"""The engine's log-probabilities against transformers' whole model, from pixels."""

from __future__ import annotations

import pytest
import torch

from hone.engine.engine import EmbeddedEngine
from hone.engine.settings import EngineConfig
from hone.models.contents import require_features
from hone.types import Completion, Request, SamplingParams
from tests.tables import table
from tests.vision.examples import Example, Twin, picture

TOLERANCE = 1e-5


def prompts(twin: Twin) -> list[Example]:
    """Prompts with one, no and three images; two with other images of one size have the same
    ids."""
    found = [
        twin.sequence("what is ", picture(1), "? it is red."),
        twin.sequence("what is ", picture(9), "? it is red."),
        twin.sequence("no image here, only text"),
        twin.sequence(picture(2), picture(3), " or ", picture(4, 50, 120), "? the first"),
    ]
    assert found[0].ids == found[1].ids
    return found


def engine_of(twin: Twin, **options) -> EmbeddedEngine:
    max_model_len = options.pop("max_model_len", 400)
    settings = {"max_num_seqs": 16, "max_num_batched_tokens": 512, "kv_cache_gib": 0.01}
    return EmbeddedEngine(
        twin.load(),
        EngineConfig(**settings | options),
        eos_token_ids=(),
        max_model_len=max_model_len,
        block_size=4,
    )


def requests(
    twin: Twin, examples: list[Example], copies: int = 2, max_tokens: int = 6
) -> list[Request]:
    """Requests that end with a placeholder: transformers would read it as one of an image."""
    return [
        Request(
            id=f"{number}/{copy}",
            prompt_ids=tuple(example.ids),
            sampling=SamplingParams(
                max_tokens=max_tokens,
                seed=10 * number + copy,
                stop_token_ids=(twin.settings.placeholder_id,),
            ),
            model_input=example.model_input,
        )
        for number, example in enumerate(examples)
        for copy in range(copies)
    ]


def run(engine: EmbeddedEngine, asked: list[Request]) -> dict[str, Completion]:
    engine.submit(asked)
    done: dict[str, Completion] = {}
    while engine.has_unfinished:
        done |= {completion.request_id: completion for completion in engine.step()}
    return done


@torch.no_grad()
def check(twin: Twin, examples: list[Example], done: dict[str, Completion]) -> None:
    for name, completion in done.items():
        example = examples[int(name.partition("/")[0])]
        number = len(completion.token_ids)
        expected = twin.logprobs(example.with_completion(completion.token_ids), number)
        difference = torch.tensor(completion.logprobs).float() - expected
        assert difference.abs().max() < TOLERANCE, name


def test_a_batch_of_all_kinds_of_rows(twin):
    examples = prompts(twin)
    engine = engine_of(twin)
    check(twin, examples, run(engine, requests(twin, examples)))


def test_a_group_encodes_its_image_once(twin):
    (example, *_) = prompts(twin)
    engine = engine_of(twin)
    done = run(engine, requests(twin, [example], copies=8))
    check(twin, [example], done)
    source = require_features(engine.model)
    assert source.num_encoded == len(example.model_input.contents)
    assert sum(completion.num_cached_tokens > 0 for completion in done.values()) == 7


@table("budget", [9, 24, 40])
def test_chunks_that_end_inside_images(twin, budget):
    if twin.family == "gemma3" and budget < 16:
        return  # an image of 16 tokens is never divided
    examples = prompts(twin)
    engine = engine_of(twin, max_num_batched_tokens=budget, max_num_seqs=4)
    check(twin, examples, run(engine, requests(twin, examples)))


def test_prefixes_are_shared_by_content(twin):
    """The second pass over prompts reads cached blocks; another image of the same size does not."""
    examples = prompts(twin)
    engine = engine_of(twin)
    run(engine, requests(twin, examples[:1], copies=1))
    done = run(engine, requests(twin, examples, copies=1))
    check(twin, examples, done)
    start = examples[1].model_input.contents[0].start
    assert done["0/0"].num_cached_tokens >= len(examples[0].ids) - 4
    assert done["1/0"].num_cached_tokens <= start


def test_preempted_sequences_are_computed_again(twin):
    examples = prompts(twin)
    asked = requests(twin, examples, copies=3, max_tokens=24)
    longest = max(len(each.ids) for each in examples) + 24
    engine = engine_of(twin, kv_cache_gib=_room(twin, longest + 60), max_model_len=longest)
    check(twin, examples, run(engine, asked))
    assert engine.stats().num_preemptions > 0


def _room(twin: Twin, num_tokens: int) -> float:
    """GiB of keys and values for so many tokens."""
    config = twin.load().config
    values = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return num_tokens * values * 4 / 2**30


def test_a_resumed_request_goes_on_behind_its_image(twin):
    (example, *_) = prompts(twin)
    engine = engine_of(twin)
    (asked,) = requests(twin, [example], copies=1, max_tokens=8)
    engine.submit([asked])
    for _ in range(4):
        engine.step()
    (part,) = engine.abort([asked.id])
    assert 0 < len(part.token_ids) < 8
    resumed = Request(
        id=asked.id,
        prompt_ids=asked.prompt_ids,
        sampling=asked.sampling,
        model_input=asked.model_input,
        resumed=part,
    )
    done = run(engine_of(twin), [resumed])
    check(twin, [example], done)
    (whole,) = run(engine_of(twin), [asked]).values()
    assert done[asked.id].token_ids == whole.token_ids


def test_an_image_beyond_the_prompt_is_refused(twin):
    (example, *_) = prompts(twin)
    request = Request(
        id="a",
        prompt_ids=tuple(example.ids[: example.model_input.contents[-1].stop - 1]),
        sampling=SamplingParams(max_tokens=2),
        model_input=example.model_input,
    )
    with pytest.raises(ValueError, match=r"'a' has content of kind image up to token \d+, but"):
        engine_of(twin).submit([request])
