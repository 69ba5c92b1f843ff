"""Pixels ahead of time, and on their way to other processes."""

from __future__ import annotations

import gc
import pickle

import pytest
import torch

from hone.data.stream import Stream
from hone.engine.engine import EmbeddedEngine
from hone.engine.settings import EngineConfig
from hone.images import store as store_module
from hone.images.opening import open_image
from hone.images.pixels import TileSource, content_hash
from hone.images.sending import prefetch_pixels, with_pixels
from hone.images.store import PixelStore
from hone.model_input import TEXT, Content, ModelInput
from hone.types import Completion, Prompt, Request, SamplingParams
from tests.vision.examples import Twin, picture


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    return Twin(tmp_path_factory.mktemp("qwen"), "qwen3_vl").settings


def source_of(settings, seed: int) -> tuple[str, TileSource]:
    file = open_image(picture(seed), folder=None)
    return content_hash(file.digest, settings, 0), TileSource(file, settings, 0)


def input_of(*hashes: str) -> ModelInput:
    return ModelInput(
        tuple(
            Content(kind="image", hash=name, start=10 * n, num_tokens=4)
            for n, name in enumerate(hashes)
        )
    )


def request(name: str, model_input: ModelInput) -> Request:
    return Request(
        id=name, prompt_ids=(1,), sampling=SamplingParams(max_tokens=1), model_input=model_input
    )


def test_requests_bring_each_image_once_to_another_process(settings, monkeypatch):
    here, there = PixelStore(), PixelStore()
    sources = dict(source_of(settings, seed) for seed in (1, 2))
    here.register(sources)
    one, other = sources
    sent = with_pixels(
        [request("a", input_of(one)), request("b", input_of(one, other)), request("c", TEXT)]
    )
    monkeypatch.setattr(store_module, "STORE", here)
    message = pickle.dumps(sent, protocol=5)
    size = sum(pixels.values.nbytes for pixels in here.pixels([one, other]))
    assert size < len(message) < 1.1 * size + 4096
    monkeypatch.setattr(store_module, "STORE", there)
    received = pickle.loads(message)
    assert received == sent
    assert type(received) is list
    for name, ours in zip((one, other), here.pixels([one, other]), strict=True):
        (theirs,) = there.pixels([name])
        assert (theirs.values == ours.values).all()
        assert theirs.settings == ours.settings
    del received
    gc.collect()
    there.receive({}, [])
    with pytest.raises(KeyError):
        there.pixels([one])


def sampled(engine: EmbeddedEngine, requests: list[Request]) -> list[Completion]:
    engine.submit(requests)
    done: list[Completion] = []
    while engine.has_unfinished:
        done += engine.step()
    return done


def test_an_engine_of_another_process_has_pixels_as_long_as_requests_need_them(
    tmp_path, monkeypatch
):
    """Images that it has been sent, and forgotten, may be sent again."""
    twin = Twin(tmp_path, "qwen3_vl")
    examples = [twin.sequence("is ", picture(seed), "red?") for seed in (1, 2)]
    sampling = SamplingParams(max_tokens=4)
    requests = [
        Request(id=f"{n}", prompt_ids=tuple(x.ids), sampling=sampling, model_input=x.model_input)
        for n, x in enumerate(examples)
    ]
    messages = [pickle.dumps(with_pixels(sent)) for sent in (requests, requests[:1])]
    there = PixelStore()
    monkeypatch.setattr(store_module, "STORE", there)
    for message in messages:
        model = twin.load()
        engine = EmbeddedEngine(
            model,
            EngineConfig(max_num_seqs=4, max_num_batched_tokens=64, kv_cache_gib=0.01),
            eos_token_ids=(),
            max_model_len=200,
        )
        done = sampled(engine, pickle.loads(message))
        for completion in done:
            whole = examples[int(completion.request_id)].with_completion(completion.token_ids)
            found = torch.tensor([*completion.logprobs])
            torch.testing.assert_close(found, twin.logprobs(whole, 4), atol=1e-5, rtol=0)
        sampled(engine, [request("text", TEXT)])  # the last step holds its sequences
        gc.collect()
        there.receive({}, [])
        for content in examples[0].model_input.contents:
            with pytest.raises(KeyError):
                there.pixels([content.hash])


def test_requests_of_text_are_a_list_as_before():
    assert type(with_pixels([request("a", TEXT)])) is list
    assert pickle.loads(pickle.dumps(with_pixels([request("a", TEXT)])))[0].model_input is TEXT


def test_in_this_process_nothing_is_made(settings, monkeypatch):
    monkeypatch.setattr(store_module, "STORE", PixelStore())  # which knows no pixels
    assert with_pixels([request("a", input_of("unknown"))])[0].id == "a"


def test_pixels_of_now_are_made_before_those_of_later(monkeypatch):
    class Store:
        asked: tuple[str, ...] = ()

        def prefetch(self, hashes):
            Store.asked = tuple(hashes)

    monkeypatch.setattr(store_module, "STORE", Store())
    prefetch_pixels([TEXT], lambda: pytest.fail("a text needs no look at what comes"))
    prefetch_pixels([TEXT, input_of("a", "b")], lambda: [input_of("c")])
    assert Store.asked == ("a", "b", "c")


def test_a_peek_is_what_comes_next_and_moves_nothing():
    rows = [Prompt(id=f"x:{n}", token_ids=(n,), text="") for n in range(5)]
    stream, other = (Stream([rows[:2], rows[2:]], seed=3, weights=[1, 2]) for _ in range(2))
    for number in (1, 3, 4, 9):
        expected = other.take(number)
        assert stream.peek(number) == expected
        assert stream.peek(number) == expected
        assert stream.take(number) == expected
    assert stream.state_dict() == other.state_dict()
