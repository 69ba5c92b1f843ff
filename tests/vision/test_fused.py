"""The fused decoder of vision-language families, beside transformers' layers and whole model.

`test_engine` compares it with the whole model in all modes of an engine. Here are its own parts,
and mistakes in them that this comparison must see.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from hone.engine.engine import EmbeddedEngine
from hone.engine.settings import EngineConfig
from hone.engine.slots import Slots
from hone.errors import UserError
from hone.models import exact_decoder, fused_layers, generation
from hone.models.contents import features_of
from hone.models.fused_layers import FusedDecoder, RotaryTable, is_fusible
from hone.models.int8_rows import pack_rows, unpack_rows
from hone.types import Completion
from tests.tables import table
from tests.vision.test_engine import check, engine_of, prompts, requests, run

TOLERANCE = 1e-5


def backbone_of(engine: EmbeddedEngine) -> Any:
    return engine._runner.model._backbone


def assert_close(found: dict[str, Completion], expected: dict[str, Completion]) -> None:
    assert found.keys() == expected.keys()
    for name, one in found.items():
        assert one.token_ids == expected[name].token_ids
        gap = torch.tensor(one.logprobs).float() - torch.tensor(expected[name].logprobs).float()
        assert gap.abs().max() < TOLERANCE, name


UNFUSED = ("gemma3", "qwen3_5_moe")
"""Families whose layers are transformers'."""


@pytest.fixture
def fused(twin):
    """A twin whose family is fused."""
    if twin.family in UNFUSED:
        pytest.skip("its layers are transformers'")
    return twin


def test_what_is_fused(twin):
    engine = engine_of(twin)
    expected = twin.family not in UNFUSED
    assert isinstance(backbone_of(engine), FusedDecoder) == is_fusible(engine.model) == expected


@table("options", [{}, {"max_num_batched_tokens": 9, "max_num_seqs": 4}])
def test_R4_equals_the_layers_of_transformers(fused, options, monkeypatch):
    asked = requests(fused, prompts(fused), max_tokens=12)
    found = run(engine_of(fused, **options), asked)
    monkeypatch.setattr(generation, "is_fusible", lambda model: False)
    other = engine_of(fused, **options)
    assert not isinstance(backbone_of(other), FusedDecoder)
    assert_close(found, run(other, asked))


# ---------------------------------------------------------------- planted mistakes


Plant = Callable[[pytest.MonkeyPatch], None]


def with_deepstack(change: Callable[[Tensor], Tensor | None]) -> Plant:
    def plant(patch: pytest.MonkeyPatch) -> None:
        call = FusedDecoder.__call__

        def changed(self: FusedDecoder, ids: Tensor, positions: Tensor, context: Any) -> Tensor:
            if (contents := context.contents) is not None:
                other = replace(contents, deepstack=change(contents.deepstack))
                context = replace(context, contents=other)
            return call(self, ids, positions, context)

        patch.setattr(FusedDecoder, "__call__", changed)

    return plant


def with_positions(change: Callable[[Tensor], Tensor]) -> Plant:
    find = RotaryTable.of_tokens

    def changed(self: RotaryTable, positions: Tensor, count: int) -> tuple[Tensor, Tensor]:
        return find(self, change(positions), count)

    return lambda patch: patch.setattr(RotaryTable, "of_tokens", changed)


def with_features(change: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]) -> Plant:
    embed = fused_layers.embed_contents

    def changed(embeddings: Tensor, index: Tensor, features: Tensor) -> Tensor:
        return embed(embeddings, *change(index, features))

    return lambda patch: patch.setattr(fused_layers, "embed_contents", changed)


def without_shift(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Slots, "positions", lambda self, slots, indices: indices)


ANY, GRID, DEEP = ("qwen2_5_vl", "qwen3_vl", "smolvlm"), ("qwen2_5_vl", "qwen3_vl"), ("qwen3_vl",)
BUGS: dict[str, tuple[tuple[str, ...], Plant]] = {
    "deepstack left out": (DEEP, with_deepstack(lambda deep: None)),
    "deepstack a layer late": (
        DEEP,
        with_deepstack(lambda deep: torch.cat((torch.zeros_like(deep[:1]), deep))),
    ),
    "deepstack of layers swapped": (DEEP, with_deepstack(lambda deep: deep.flip(0))),
    "one-dimensional positions": (GRID, with_positions(lambda rows: rows[:1].expand(3, -1))),
    "rows and columns swapped": (GRID, with_positions(lambda rows: rows[[0, 2, 1]])),
    "frames and rows swapped": (GRID, with_positions(lambda rows: rows[[1, 0, 2]])),
    "shift left out in decode": (GRID, without_shift),
    "an image a token early": (ANY, with_features(lambda i, rows: ((i - 1).clamp(0), rows))),
    "features of another token": (ANY, with_features(lambda i, rows: (i, rows.roll(1, 0)))),
    "features left out": (ANY, with_features(lambda i, rows: (i[:0], rows[:0]))),
}


@table("bug", BUGS)
def test_R4_check_catches_planted_mistakes(fused, bug, monkeypatch):
    families, plant = BUGS[bug]
    if fused.family not in families:
        return
    plant(monkeypatch)
    examples = prompts(fused)
    done = run(engine_of(fused), requests(fused, examples, copies=1))
    with pytest.raises(AssertionError):
        check(fused, examples, done)


# ---------------------------------------------------------------- parts


@table("dtype", [torch.float32, torch.bfloat16])
def test_R4_rows_of_tokens_are_the_models(fused, dtype):
    """For any positions, not only those of images."""
    if fused.family == "smolvlm":
        pytest.skip("its tokens have one position")
    module = fused.load().base_model.rotary_emb
    positions = torch.randint(0, 90, (3, 40))
    rotary = RotaryTable(module, dtype=dtype, device=torch.device("cpu"))
    rows, numbers = rotary.of_tokens(positions, 90)
    cos, sin = module(torch.empty(0, dtype=dtype), positions[:, None])
    assert rows.is_contiguous()
    assert numbers.tolist() == list(range(40))
    assert torch.equal(torch.cat((rows.chunk(2, -1)[0],) * 2, -1), cos[0])
    assert torch.equal(torch.cat((rows.chunk(2, -1)[1],) * 2, -1), sin[0])


def test_decode_has_one_position_a_token(fused, monkeypatch):
    """Its graphs read the table by the token's position, as those of a text model do."""
    seen: set[tuple[bool, int]] = set()
    engine = engine_of(fused)
    forward = backbone_of(engine)

    def look(ids: Tensor, positions: Tensor, context: Any) -> Tensor:
        seen.add((context.is_decode, positions.ndim))
        assert context.contents is None or not context.is_decode
        return forward(ids, positions, context)

    monkeypatch.setattr(engine._runner.model, "_backbone", look)
    run(engine, requests(fused, prompts(fused)))
    assert seen == {(False, 1 if fused.family == "smolvlm" else 2), (True, 1)}


def test_R4_weights_of_8_bits(fused):
    """Layers of codes sample with what the codes stand for; the tower is whole."""
    packed, rounded = fused.load().requires_grad_(False), fused.load().requires_grad_(False)
    pairs = zip(packed.model.layers.parameters(), rounded.model.layers.parameters(), strict=True)
    for one, two in pairs:
        if one.ndim == 2:
            one.data = pack_rows(one)
            two.data = unpack_rows(one, torch.float32)
    asked = requests(fused, prompts(fused))
    cfg = EngineConfig(max_num_seqs=16, kv_cache_gib=0.01)
    engines = [
        EmbeddedEngine(model, cfg, eos_token_ids=(), max_model_len=400, block_size=4)
        for model in (packed, rounded)
    ]
    assert isinstance(backbone_of(engines[0]), FusedDecoder)
    assert_close(*(run(engine, asked) for engine in engines))
    source = features_of(packed)
    assert source is not None
    assert source.tower.dtype == torch.float32


def test_exact_mode_refuses_images(fused, monkeypatch):
    monkeypatch.setattr(exact_decoder, "exact_supported", lambda config, device: None)
    with pytest.raises(UserError, match="takes images"):
        exact_decoder.require_exact(fused.load())
