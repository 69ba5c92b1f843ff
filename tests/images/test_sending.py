"""Pixels ahead of time, and on their way to other processes."""

from __future__ import annotations

import gc
import pickle

import pytest

from hone.data.stream import Stream
from hone.images import store as store_module
from hone.images.opening import open_image
from hone.images.pixels import TileSource, content_hash
from hone.images.sending import prefetch_pixels, with_pixels
from hone.images.store import PixelStore
from hone.model_input import TEXT, Content, ModelInput
from hone.types import Prompt, Request, SamplingParams
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
