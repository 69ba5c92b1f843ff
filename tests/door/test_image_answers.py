"""Answers to requests with images by tiny models, against `hone generate`, against the engine alone
and against transformers' whole model, which sees the pixels."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL.Image import Image

import hone
from hone.data.prompts import load_prompts
from hone.data.settings import DataConfig, ServedDataConfig, SourceConfig
from hone.loops.inputs import image_reader
from hone.loops.served import serve_model
from hone.model_input import Content, ModelInput
from hone.rollout.requests import request_seed
from hone.types import Request, SamplingParams
from tests.door.served import Served, running
from tests.images.drawn import encoded
from tests.vision.examples import Example, Twin, picture
from tests.vision.test_engine import engine_of, run

TOLERANCE = 1e-5
ONE, TWO = picture(1), picture(2)
LONGEST = 8
PROMPT = "which one is it, or neither?"


@pytest.fixture(scope="module", params=["qwen3_vl", "gemma3"])
def twin(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Twin:
    """Without tied weights, with which a tiny model answers an image with its placeholders."""
    folder = tmp_path_factory.mktemp(request.param)
    return Twin(folder, request.param, tie_word_embeddings=False)


@pytest.fixture(scope="module")
def served(twin: Twin) -> Iterator[Served]:
    model, prompts = serve_model(
        twin.cfg,
        twin.tokenizer,
        name="tiny",
        defaults=SamplingParams(max_tokens=LONGEST),
        max_model_len=400,
        data=ServedDataConfig(image_workers=0),
    )
    with running(engine_of(twin), model, prompts) as found:
        yield found


def base64_of(image: Image) -> str:
    return base64.b64encode(encoded(image)).decode()


def uri(image: Image) -> str:
    return f"data:image/png;base64,{base64_of(image)}"


def said(*images: Image) -> list[dict[str, Any]]:
    """The messages of a row of data, and of OpenAI's chat API."""
    parts = [{"type": "image_url", "image_url": {"url": uri(image)}} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": PROMPT}]}]


def said_to_anthropic(*images: Image) -> list[dict[str, Any]]:
    source = {"type": "base64", "media_type": "image/png"}
    parts = [{"type": "image", "source": source | {"data": base64_of(image)}} for image in images]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": PROMPT}]}]


def chat(served: Served, *images: Image, **options: Any) -> dict[str, Any]:
    """The answer of OpenAI's chat API with the ids of the prompt and the answer."""
    body = {"messages": said(*images), "logprobs": True, "return_token_ids": True}
    reply = served.send("/v1/chat/completions", body | {"temperature": 0.0} | options)
    assert reply.status == 200, reply.body
    return reply.json


def tokens(answer: dict[str, Any]) -> tuple[list[int], list[float]]:
    [choice] = answer["choices"]
    logprobs = [entry["logprob"] for entry in choice["logprobs"]["content"]]
    return choice["token_ids"], logprobs


@torch.no_grad()
def expected(
    twin: Twin, prompt_ids: Sequence[int], token_ids: Sequence[int], images: Sequence[Image]
) -> list[float]:
    """The log-probabilities of a completion by transformers' whole model."""
    example = Example([*prompt_ids, *token_ids], model_input_of(twin, prompt_ids), tuple(images))
    return twin.logprobs(example, len(token_ids)).tolist()


def model_input_of(twin: Twin, ids: Sequence[int]) -> ModelInput:
    """A content for each run of placeholders."""
    contents: list[Content] = []
    for place, token in enumerate(ids):
        if token == twin.settings.placeholder_id and ids[place - 1] != token:
            stop = next(n for n in range(place, len(ids)) if ids[n] != token)
            contents.append(Content(kind="image", hash="", start=place, num_tokens=stop - place))
    return ModelInput(tuple(contents))


def test_greedy_answers_are_those_of_hone_generate(twin: Twin, served: Served) -> None:
    rows = [{"messages": said(*images)} for images in ((ONE,), (TWO, ONE), (ONE, TWO))]
    found = hone.generate(
        data=rows,
        model={"path": str(twin.folder)},
        generation={"max_completion_tokens": LONGEST, "temperature": 0.0},
        run={"device": "cpu"},
    )
    for images, sample in zip(((ONE,), (TWO, ONE), (ONE, TWO)), found, strict=True):
        answer = chat(served, *images)
        ids, logprobs = tokens(answer)
        assert ids == sample.token_ids
        assert logprobs == pytest.approx(sample.logprobs, abs=TOLERANCE)
        assert answer["choices"][0]["message"]["content"] == sample.completion
        assert logprobs == pytest.approx(
            expected(twin, answer["prompt_token_ids"], ids, images), abs=TOLERANCE
        )
        body = {"max_tokens": LONGEST, "temperature": 0.0, "messages": said_to_anthropic(*images)}
        reply = served.send("/v1/messages", body)
        assert reply.status == 200, reply.body
        assert reply.json["content"][0]["text"] == sample.completion
        assert reply.json["usage"]["input_tokens"] == len(answer["prompt_token_ids"])


def test_sampled_answers_are_those_of_the_engine_with_the_same_seed(
    twin: Twin, served: Served, tmp_path: Path
) -> None:
    """The prompt is that of a row of data with the same messages."""
    (tmp_path / "rows.jsonl").write_text(json.dumps({"messages": said(ONE, TWO)}) + "\n")
    data = DataConfig(
        train=(SourceConfig(path=str(tmp_path / "rows.jsonl")),),
        max_image_tokens=768,
        image_workers=0,
    )
    reader = image_reader(twin.cfg, data, twin.tokenizer)
    found = load_prompts(data, twin.tokenizer, seed=0, max_prompt_tokens=400, images=reader)
    [prompt] = found.known_rows()
    for seed in (3, 4):
        answer = chat(served, ONE, TWO, temperature=1.0, seed=seed)
        assert tuple(answer["prompt_token_ids"]) == prompt.token_ids
        sampling = SamplingParams(
            max_tokens=LONGEST, seed=request_seed(0, "serve", seed, "seed", 0)
        )
        request = Request(
            id="a",
            prompt_ids=prompt.token_ids,
            sampling=sampling,
            model_input=prompt.model_input,
        )
        done = run(engine_of(twin), [request])["a"]
        ids, logprobs = tokens(answer)
        assert ids == [*done.token_ids][: len(ids)]
        assert logprobs == pytest.approx([*done.logprobs][: len(ids)], abs=TOLERANCE)


def test_exchanged_images_give_other_log_probs(twin: Twin, served: Served) -> None:
    answers = [chat(served, *images, max_tokens=1) for images in ((ONE, TWO), (TWO, ONE))]
    assert answers[0]["prompt_token_ids"] == answers[1]["prompt_token_ids"]
    for answer, images in zip(answers, ((ONE, TWO), (TWO, ONE)), strict=True):
        ids, [logprob] = tokens(answer)
        [right] = expected(twin, answer["prompt_token_ids"], ids, images)
        [wrong] = expected(twin, answer["prompt_token_ids"], ids, images[::-1])
        assert logprob == pytest.approx(right, abs=TOLERANCE)
        assert abs(right - wrong) > 1e-3


def test_turns_of_a_session_have_the_log_probs_of_the_whole_model(
    twin: Twin, served: Served
) -> None:
    """Three turns, each with an image; then the second again with another one. The seed is one with
    which no turn samples a placeholder, whatever other tests have opened before."""
    client, images = served.open(seed=1), [picture(number, 60, 60 + number) for number in range(4)]
    messages: list[dict[str, Any]] = []
    for image in images[:3]:
        messages += said(image)
        answer = client.chat(*messages, max_tokens=4)
        messages.append(answer["choices"][0]["message"])
    client.chat(*messages[:2], *said(images[3]), max_tokens=4)
    end = client.end()
    assert (end["bridged"], end["forks"], end["num_paths"]) == (2, 1, 2)
    for path, seen in zip(end["paths"], (images[:3], [images[0], images[3]]), strict=True):
        num_asked = len(path["prompt_token_ids"])
        ids = [*path["prompt_token_ids"], *path["token_ids"]]
        pads = {n for n, token in enumerate(ids) if token == twin.settings.placeholder_id}
        places = [
            n for x in path["images"] for n in range(x["start"], x["start"] + x["num_tokens"])
        ]
        assert pads == {*places}, "no turn has sampled one: transformers takes it for an image's"
        example = Example(ids, model_input_of(twin, ids), tuple(seen))
        logprobs = twin.logits(example).log_softmax(-1)
        for place, is_sampled in enumerate(path["loss_mask"]):
            if is_sampled:
                token = num_asked + place
                wanted = logprobs[token - 1, ids[token]].item()
                assert path["logprobs"][place] == pytest.approx(wanted, abs=TOLERANCE)
