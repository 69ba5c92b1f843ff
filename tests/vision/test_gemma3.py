"""Gemma 3, whose tokens of an image attend to each other in both directions."""

from __future__ import annotations

import json

import pytest
import torch

from hone.trainer.prefixes import shared_prefixes
from tests.engine.test_generation import limit_memory
from tests.tables import table
from tests.vision.examples import Twin, picture
from tests.vision.test_engine import check, engine_of, prompts, requests, run
from tests.vision.test_oracles import (
    TOLERANCE,
    expected_logprobs,
    found_logprobs,
    rows_of,
    trained,
)

IMAGE = 16
"""Tokens of an image."""
WINDOWS = [1, 5, IMAGE + 3, 24]


@pytest.fixture(scope="module")
def twins(tmp_path_factory):
    """A model for each sliding window, of which some are smaller than an image."""
    found = {}
    for window in WINDOWS:
        twin = Twin(tmp_path_factory.mktemp(f"window{window}"), "gemma3")
        path = twin.folder / "config.json"
        config = json.loads(path.read_text())
        config["text_config"]["sliding_window"] = window
        path.write_text(json.dumps(config))
        found[window] = twin
    return found


@pytest.fixture(scope="module")
def twin(twins):
    return twins[24]


@table("window", WINDOWS)
def test_a_window_hides_from_engine_and_trainer_what_it_hides_in_transformers(twins, window):
    twin = twins[window]
    examples = prompts(twin)
    check(twin, examples, run(engine_of(twin), requests(twin, examples, copies=1)))
    with torch.no_grad():
        difference = found_logprobs(trained(twin), rows_of(twin)) - expected_logprobs(twin)
    assert difference.abs().max() < TOLERANCE


@table("budget", [IMAGE, IMAGE + 1, 20, 31, 33])
def test_limits_that_fall_inside_an_image(twin, budget):
    """With many sequences, so that images find decodes before them."""
    examples = prompts(twin)
    engine = engine_of(twin, max_num_batched_tokens=budget)
    sizes = []
    schedule = engine._scheduler.schedule
    engine._scheduler.schedule = lambda: sizes.append(plan := schedule()) or plan
    check(twin, examples, run(engine, requests(twin, examples, copies=3)))
    assert max(plan.num_tokens for plan in sizes) <= budget


def test_the_rest_of_an_image_reads_its_beginning_from_cached_blocks(twin):
    """The ids differ behind the image and in one block with its end, which is not shared then."""
    prompts_ = [
        twin.sequence("a" * n, picture(1), f"{letter} what is it?")
        for n in range(4)
        for letter in "xy"
    ]
    engine = engine_of(twin)
    done = run(engine, requests(twin, prompts_, copies=1))
    check(twin, prompts_, done)
    (image,) = prompts_[0].model_input.contents
    cached = [done[f"{2 * n + 1}/0"].num_cached_tokens - n for n in range(4)]
    assert any(image.start < first < image.stop for first in cached)


def test_an_image_larger_than_a_step_is_refused(twin):
    engine = engine_of(twin, max_num_batched_tokens=IMAGE - 1)
    examples = prompts(twin)
    asked = requests(twin, examples, copies=1)
    with pytest.raises(ValueError, match=r"'0/0'.*16 tokens.*max_num_batched_tokens=15 to 16"):
        engine.submit(asked)
    texts = [request for request in asked if not request.model_input]
    check(twin, examples, run(engine, texts))


@pytest.mark.parametrize("room", [IMAGE, 20, 40])
def test_where_memory_ends_images_stay_whole(twin, room, monkeypatch):
    examples = prompts(twin)
    failed = limit_memory(monkeypatch, lambda: room)
    check(twin, examples, run(engine_of(twin), requests(twin, examples)))
    assert 0 < len(failed) < 8


def test_an_image_that_finds_no_memory_ends_it(twin, monkeypatch):
    failed = limit_memory(monkeypatch, lambda: IMAGE - 1)
    with pytest.raises(torch.OutOfMemoryError):
        run(engine_of(twin), requests(twin, prompts(twin)))
    assert len(failed) < 8


def test_a_shared_prefix_never_ends_inside_an_image(twin):
    """A row that trains nothing shares all but its last token, here one of an image."""
    example = twin.sequence("look at this: ", picture(1))
    (image,) = example.model_input.contents
    rows = [example.row(str(number), group="g") for number in range(3)]
    for row in rows:
        row.token_ids = row.token_ids[: image.stop]
        row.loss_mask = [False] * image.stop
    assert shared_prefixes(rows) == [image.start] * 3
