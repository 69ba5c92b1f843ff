"""The fused decoder of vision-language families equals transformers' whole model."""

from __future__ import annotations

import copy
from dataclasses import replace
from functools import lru_cache

import numpy as np
import pytest
import torch

from hone.engine import model_runner
from hone.engine.engine import EmbeddedEngine
from hone.engine.settings import EngineConfig
from hone.engine.slots import Slots
from hone.errors import UserError
from hone.model_input import TEXT
from hone.models import exact_decoder, fused_layers, generation
from hone.models.features import features_of
from hone.models.fused_layers import FusedDecoder, RotaryTable, is_fusible
from hone.models.int8_rows import pack_rows, unpack_rows
from hone.types import Request, SamplingParams
from tests.tables import table
from tests.vision.tiny import Whole, Writer, decoder_of, picture

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "smolvlm")
TOLERANCE = 1e-5
SAMPLES = 2
NEW_TOKENS = 12
ENGINES = {
    "whole prompts": {},
    "chunks that end inside images": {"max_num_batched_tokens": 7, "max_num_seqs": 3},
    "preemption": {"spare_blocks": 1},
    "no prefix caching": {"enable_prefix_caching": False},
}


@lru_cache
def world(family):
    """A writer, the whole model, and sequences with none, one and three images, of which two have
    one size; smallest family first."""
    writer = Writer(family)
    rng = np.random.default_rng(7)
    wide, other, small = (picture(rng, *size) for size in ((90, 150), (90, 150), (60, 64)))
    sequences = [
        writer.write("no picture here"),
        writer.write("see ", wide, " and tell"),
        writer.write(small, "ab", other, "then", wide, "?"),
        writer.write("see ", other, " and tell"),
    ]
    return writer, Whole(writer), sequences


def engine_of(model, writer, *, spare_blocks=500, **options):
    """With as many blocks of 8 tokens as the longest sequence takes, and `spare_blocks`."""
    config = model.config
    max_model_len = max(len(each.ids) for each in world(writer.spec.model_type)[2]) + NEW_TOKENS
    blocks = spare_blocks + -(-max_model_len // 8)
    head_dim = getattr(config, "head_dim", None) or (
        config.hidden_size // config.num_attention_heads
    )
    bytes_of_block = config.num_hidden_layers * 2 * 8 * config.num_key_value_heads * head_dim * 4
    cfg = {"max_num_seqs": 8, "max_num_batched_tokens": 512}
    return EmbeddedEngine(
        model,
        EngineConfig(**cfg | {"kv_cache_gib": (blocks + 0.5) * bytes_of_block / 2**30} | options),
        eos_token_ids=(),
        tokenizer=writer.tokenizer,
        max_model_len=max_model_len,
        block_size=8,
    )


def complete(engine, sequences):
    """The completions of two samples of each sequence, in this order."""
    requests = [
        Request(
            id=f"{number} {sample}",
            prompt_ids=tuple(sequence.ids),
            model_input=sequence.model_input,
            sampling=SamplingParams(
                max_tokens=NEW_TOKENS, temperature=1.0, seed=10 * number + sample
            ),
        )
        for number, sequence in enumerate(sequences)
        for sample in range(SAMPLES)
    ]
    engine.submit(requests)
    done = []
    while engine.has_unfinished:
        done += engine.step()
    found = {completion.request_id: completion for completion in done}
    return [found[request.id] for request in requests]


def error_of(whole, writer, sequences, completions):
    """Largest difference of log-probabilities. A completion counts up to the first placeholder that
    it samples, which the whole model would take for an image."""
    errors = []
    for number, completion in enumerate(completions):
        ids = list(completion.token_ids)
        stop = next((i + 1 for i, x in enumerate(ids) if x in writer.specials), len(ids))
        expected = whole.logprobs(sequences[number // SAMPLES], ids[:stop])
        chosen = expected.gather(1, torch.tensor(ids[:stop])[:, None])[:, 0]
        errors.append((chosen - torch.tensor(completion.logprobs[:stop])).abs().max().item())
    return max(errors)


@table("family", [*FAMILIES, "gemma3"])
def test_what_is_fused(family):
    assert is_fusible(decoder_of(family)) == (family != "gemma3")


@pytest.mark.parametrize("family", FAMILIES)
@table("name", ENGINES)
def test_R4_engine_equals_the_whole_model(family, name, monkeypatch):
    """And an engine with transformers' layers."""
    writer, whole, sequences = world(family)
    fused = engine_of(decoder_of(family), writer, **ENGINES[name])
    pieces = follow_pieces(monkeypatch)
    found = complete(fused, sequences)
    assert isinstance(fused._runner.model._backbone, FusedDecoder)
    assert error_of(whole, writer, sequences, found) < TOLERANCE
    stats = fused.stats()
    assert (stats.num_preemptions > 0) == (name == "preemption")
    assert (stats.num_cached_tokens > 0) == (name != "no prefix caching")
    assert any(piece.offset for piece in pieces) or name != "chunks that end inside images"
    monkeypatch.setattr(generation, "is_fusible", lambda model: False)
    other = complete(engine_of(decoder_of(family), writer, **ENGINES[name]), sequences)
    for one, two in zip(found, other, strict=True):
        assert one.token_ids == two.token_ids
        np.testing.assert_allclose(one.logprobs, two.logprobs, rtol=0, atol=TOLERANCE)


def follow_pieces(monkeypatch):
    """The parts of contents that passes have."""
    pieces = []
    find = model_runner.content_pieces

    def content_pieces(*arguments):
        pieces.extend(found := find(*arguments))
        return found

    monkeypatch.setattr(model_runner, "content_pieces", content_pieces)
    return pieces


# ---------------------------------------------------------------- planted mistakes


def with_deepstack(change):
    """Change the deepstack of each pass."""

    def plant(patch):
        call = FusedDecoder.__call__

        def changed(self, ids, positions, context):
            contents = context.contents
            if contents is not None:
                other = replace(contents, deepstack=change(contents.deepstack))
                context = replace(context, contents=other)
            return call(self, ids, positions, context)

        patch.setattr(FusedDecoder, "__call__", changed)

    return plant


def with_positions(change):
    def plant(patch):
        find = RotaryTable.of_tokens
        patch.setattr(
            RotaryTable, "of_tokens", lambda self, rows, count: find(self, change(rows), count)
        )

    return plant


def without_shift(patch):
    patch.setattr(Slots, "positions", lambda self, slots, indices: indices)


def with_index(change):
    def plant(patch):
        embed = fused_layers.embed_contents
        patch.setattr(
            fused_layers,
            "embed_contents",
            lambda embeddings, index, features: embed(embeddings, *change(index, features)),
        )

    return plant


BUGS = {
    "deepstack left out": with_deepstack(lambda deep: None),
    "deepstack a layer late": with_deepstack(lambda d: torch.cat((torch.zeros_like(d[:1]), d))),
    "deepstack of layers swapped": with_deepstack(lambda deep: deep.flip(0)),
    "positions of the first axis alone": with_positions(lambda rows: rows[:1].expand(3, -1)),
    "rows and columns swapped": with_positions(lambda rows: rows[[0, 2, 1]]),
    "frames and rows swapped": with_positions(lambda rows: rows[[1, 0, 2]]),
    "one token early": with_index(lambda index, features: ((index - 1).clamp(0), features)),
    "features of another token": with_index(lambda index, features: (index, features.roll(1, 0))),
    "left out": with_index(lambda index, features: (index[:0], features[:0])),
    "shift left out": without_shift,
}


@table("bug", BUGS)
@table("family", FAMILIES)
def test_R4_check_catches_planted_mistakes(family, bug, monkeypatch):
    if family != "qwen3_vl" and "deepstack" in bug:
        return
    if family == "smolvlm" and any(word in bug for word in ("shift", "swapped", "axis")):
        return
    writer, whole, sequences = world(family)
    BUGS[bug](monkeypatch)
    found = complete(engine_of(decoder_of(family), writer), sequences)
    assert error_of(whole, writer, sequences, found) > 100 * TOLERANCE


# ---------------------------------------------------------------- parts


@table("family", ["qwen2_5_vl", "qwen3_vl"])
@table("dtype", [torch.float32, torch.bfloat16])
def test_R4_rows_of_tokens_are_the_models(family, dtype):
    """For any positions, not only those of images."""
    model = decoder_of(family)
    module = model.base_model.rotary_emb
    positions = torch.randint(0, 90, (3, 40))
    rotary = RotaryTable(module, dtype=dtype, device=model.device)
    rows, numbers = rotary.of_tokens(positions, 90)
    cos, sin = module(torch.empty(0, dtype=dtype), positions[:, None])
    assert rows.is_contiguous()
    assert numbers.tolist() == list(range(40))
    half = rows.shape[1] // 2
    assert torch.equal(rows[:, :half], cos[0, :, :half])
    assert torch.equal(rows[:, half:], sin[0, :, :half])


def test_decode_has_one_number_a_token():
    """So that its graphs read the table at one row, as for a text model."""
    model = decoder_of("qwen3_vl")
    writer, _, sequences = world("qwen3_vl")
    engine = engine_of(model, writer)
    seen = []
    forward = engine._runner.model._backbone

    def look(ids, positions, context):
        seen.append((context.is_decode, positions.ndim, context.contents is None))
        return forward(ids, positions, context)

    engine._runner.model._backbone = look
    complete(engine, sequences[1:2])
    assert set(seen) == {(False, 2, False), (True, 1, True)}


def test_R4_weights_of_8_bits(monkeypatch):
    """Layers of codes sample with what the codes stand for; the tower is whole."""
    writer, _, sequences = world("qwen3_vl")
    packed, rounded = decoder_of("qwen3_vl"), decoder_of("qwen3_vl")
    tower = copy.deepcopy(features_of(packed).tower.modules.state_dict())
    for one, two in zip(packed.parameters(), rounded.parameters(), strict=True):
        one.requires_grad_(False)
        if one.ndim == 2 and one.shape != packed.lm_head.weight.shape:
            codes = pack_rows(one.detach())
            one.data = codes
            two.data = unpack_rows(codes, torch.float32)
    a, b = (complete(engine_of(model, writer), sequences) for model in (packed, rounded))
    assert isinstance(engine_of(packed, writer)._runner.model._backbone, FusedDecoder)
    for one, two in zip(a, b, strict=True):
        assert one.token_ids == two.token_ids
        np.testing.assert_allclose(one.logprobs, two.logprobs, rtol=0, atol=TOLERANCE)
    after = features_of(packed).tower.modules.state_dict()
    assert all(torch.equal(tower[name], after[name]) for name in tower)


def test_exact_mode_refuses_images(monkeypatch):
    monkeypatch.setattr(exact_decoder, "exact_supported", lambda config, device: None)
    with pytest.raises(UserError, match="takes images"):
        exact_decoder.require_exact(decoder_of("smolvlm"))


def test_a_text_model_gathers_nothing(monkeypatch):
    """Its forward has no table of its tokens."""
    monkeypatch.setattr(RotaryTable, "of_tokens", None)
    writer, _, sequences = world("smolvlm")
    text = [replace(sequences[0], model_input=TEXT)]
    assert complete(engine_of(decoder_of("smolvlm"), writer), text)
