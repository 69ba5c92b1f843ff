"""Families whose tokens have several positions, against transformers' Qwen2.5-VL.

hone has no such family: a rule of three axes stands in for one, and the text model of a tiny
Qwen2.5-VL, whose rotary embedding has three, for its layers. What transformers computes of each
sequence alone, with positions of its own `get_rope_index`, is the reference.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import (
    PreTrainedModel,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2_5_VLTextConfig,
)

from hone.attention import ATTENTION_NAME, PackedContext
from hone.attention.context import ContentFeatures
from hone.distributed.mesh import Mesh
from hone.engine.engine import EmbeddedEngine
from hone.engine.settings import EngineConfig
from hone.families.registry import SPECS
from hone.families.spec import ModelSpec
from hone.model_input import TEXT, Content, InputSpec, ModelInput
from hone.models.contents import follow_contents
from hone.models.decoder import alias_module, head_logits, hidden_states
from hone.positions import packed_positions, position_shift
from hone.trainer.batcher import Batcher
from hone.trainer.collating import collate
from hone.trainer.context import _padded
from hone.trainer.prefixes import shared_prefixes
from hone.trainer.settings import SFTTrainerConfig
from hone.types import Request, Row, SamplingParams
from tests.tables import table

VOCAB, IMAGE_ID = 40, 39


class Grid:
    """Positions of frames, rows and columns; behind an image all go on from the largest."""

    num_axes = 3

    def rows(self, model_input, num_tokens):
        found, index, position = [], 0, 0
        for content in model_input.contents:
            text = content.start - index
            found.append(np.tile(np.arange(position, position + text), (3, 1)))
            position += text
            found.append(np.indices(content.shape).reshape(3, -1) + position)
            position += max(content.shape)
            index = content.stop
        text = max(num_tokens - index, 0)
        found.append(np.tile(np.arange(position, position + text), (3, 1)))
        return np.concatenate(found, axis=1)[:, :num_tokens]


GRID = InputSpec(kinds=frozenset({"image"}), positions=Grid())


def image(start: int, rows: int, columns: int) -> Content:
    return Content(
        kind="image",
        hash=f"{rows}x{columns}",
        start=start,
        num_tokens=rows * columns,
        shape=(1, rows, columns),
    )


def grids_of(model_input: ModelInput) -> Tensor:
    """Frames, rows and columns [K, 3] in patches, four of which are a token."""
    return torch.tensor([(t, 2 * h, 2 * w) for t, h, w in (x.shape for x in model_input.contents)])


def ids_of(model_input: ModelInput, num_tokens: int, seed: int) -> list[int]:
    ids = torch.randint(
        1, IMAGE_ID, (num_tokens,), generator=torch.Generator().manual_seed(seed)
    ).tolist()
    for content in model_input.contents:
        ids[content.start : content.stop] = [IMAGE_ID] * content.num_tokens
    return ids


INPUTS = [
    ModelInput((image(3, 3, 4),)),
    TEXT,
    ModelInput((image(1, 2, 2), image(6, 4, 3))),
]
LENGTHS = [20, 9, 23]
SEQUENCES = [ids_of(*each, seed) for seed, each in enumerate(zip(INPUTS, LENGTHS, strict=True))]


class TextModel(PreTrainedModel):
    """The language model of a Qwen2.5-VL with its head, as hone holds models."""

    config_class = Qwen2_5_VLTextConfig
    base_model_prefix = "model"
    _supports_attention_backend = True

    def __init__(self, config, whole):
        super().__init__(config)
        self.model = whole.model.language_model
        self.lm_head: nn.Linear = whole.lm_head

    def get_output_embeddings(self):
        return self.lm_head


@dataclass
class Twins:
    """The same weights with our attention and with transformers' own."""

    ours: PreTrainedModel
    theirs: Qwen2_5_VLForConditionalGeneration

    @staticmethod
    def pixels(model_input: ModelInput) -> Tensor:
        """Patches [P, 1176] of random images."""
        num_patches = 4 * sum(content.num_tokens for content in model_input.contents)
        return torch.randn(num_patches, 1176, generator=torch.Generator().manual_seed(num_patches))

    def rope_index(self, ids: list[int], model_input: ModelInput) -> tuple[Tensor, Tensor]:
        """Positions [3, 1, T] of transformers, and what it adds to indices behind all images."""
        is_image = torch.zeros(1, len(ids), dtype=torch.int32)
        for content in model_input.contents:  # not by ids: a model may sample a placeholder
            is_image[0, content.start : content.stop] = 1
        return self.theirs.model.get_rope_index(
            torch.tensor([ids]),
            mm_token_type_ids=is_image,
            image_grid_thw=grids_of(model_input) if model_input else None,
        )

    def logits(self, ids: list[int], model_input: ModelInput) -> Tensor:
        """Of transformers, for one sequence: [T, V]."""
        positions, _ = self.rope_index(ids, model_input)
        hidden = self.theirs.model.language_model(
            input_ids=torch.tensor([ids]), position_ids=positions, use_cache=False
        ).last_hidden_state
        return self.theirs.lm_head(hidden)[0]


@pytest.fixture(scope="module")
def twins():
    text = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "initializer_range": 0.3,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 100.0,
            "mrope_section": [2, 1, 1],
        },
    }
    vision = {"depth": 1, "hidden_size": 16, "out_hidden_size": 32, "num_heads": 2}
    vision |= {"intermediate_size": 16, "fullatt_block_indexes": [0]}
    config = Qwen2_5_VLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE_ID, dtype="float32"
    )
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        config._attn_implementation = "eager"
        theirs = Qwen2_5_VLForConditionalGeneration(config).eval()
        other = Qwen2_5_VLForConditionalGeneration(copy.deepcopy(config)).eval()
        other.load_state_dict(theirs.state_dict())
        other.model.language_model.config._attn_implementation = ATTENTION_NAME
        ours = TextModel(other.model.language_model.config, other).eval()
    ours.requires_grad_(requires_grad=False)
    return Twins(ours, theirs)


@pytest.fixture
def family(twins, monkeypatch):
    model_type = twins.ours.config.model_type
    spec = ModelSpec(model_type=model_type, qkv_bias=True, o_bias=False, inputs=GRID)
    monkeypatch.setitem(SPECS, model_type, spec)


def test_the_stand_in_numbers_as_transformers_does(twins):
    for ids, model_input in zip(SEQUENCES, INPUTS, strict=True):
        expected, shift = twins.rope_index(ids, model_input)
        assert Grid().rows(model_input, len(ids)).tolist() == expected[:, 0].tolist()
        assert position_shift(Grid(), model_input) == int(shift)


def test_without_a_rule_positions_are_the_indices_and_the_same_array():
    indices, positions = packed_positions([3, 1, 2], np.array([0, 5, 2]))
    assert positions is indices
    assert indices.tolist() == [0, 1, 2, 5, 2, 3]
    assert packed_positions([2, 3])[0].tolist() == [0, 1, 0, 1, 2]


def test_pieces_of_a_sequence_have_the_positions_of_the_whole():
    whole = Grid().rows(INPUTS[2], 23)
    for border in range(1, 23):
        indices, positions = packed_positions(
            [border, 23 - border],
            np.array([0, border]),
            inputs=[INPUTS[2], INPUTS[2]],
            rule=Grid(),
        )
        assert indices.tolist() == list(range(23))
        assert np.array_equal(positions, whole)


def rows_of(completion: int = 4) -> list[Row]:
    return [
        Row(
            id=str(number),
            group_id=f"{number}",
            token_ids=ids,
            loss_mask=[False] * (len(ids) - completion) + [True] * completion,
            model_input=model_input,
        )
        for number, (ids, model_input) in enumerate(zip(SEQUENCES, INPUTS, strict=True))
    ]


def packed_logits(model, rows, prefixes=None) -> Tensor:
    """Logits [N, V] that predict the trained tokens, as a trainer computes them."""
    batch = collate(rows, [1.0] * len(rows), "cpu", prefixes=prefixes, inputs=GRID)
    context = PackedContext(
        cu_seqlens=batch.cu_seqlens,
        max_seqlen=batch.max_seqlen,
        lengths=batch.lengths,
        keys=batch.keys,
    )
    hidden = hidden_states(model, batch.input_ids, batch.position_ids, context)
    return head_logits(model, hidden[batch.predict_index])


def expected_logits(twins, rows) -> Tensor:
    return torch.cat(
        [
            twins.logits(row.token_ids, row.model_input)[row.loss_mask.index(True) - 1 : -1]
            for row in rows
        ]
    )


@torch.no_grad()
def test_packed_rows_have_the_logits_of_each_alone(twins, family):
    rows = rows_of()
    expected = expected_logits(twins, rows)
    assert torch.allclose(packed_logits(twins.ours, rows), expected, atol=2e-5)
    for row in rows:  # or positions would not matter, and the test could not fail
        row.model_input = TEXT
    assert not torch.allclose(packed_logits(twins.ours, rows), expected, atol=1e-2)
    batcher = Batcher.of(SFTTrainerConfig(), twins.ours)
    passes = [[0, 1, 2], []]
    full, empty = batcher.micro_batches(rows_of(), [1.0] * 3, passes, Mesh.alone("cpu"))
    assert full.position_ids.shape == (3, sum(LENGTHS))
    assert empty.position_ids.shape == (3, 4)


@torch.no_grad()
def test_rows_of_a_group_share_a_prompt_with_an_image(twins, family):
    first = rows_of()[2]
    rows = [first]
    for number in range(3):
        tokens = [*first.token_ids[:-4], *ids_of(TEXT, 4, 50 + number)]
        rows.append(
            Row(
                id=f"{number}",
                group_id=first.group_id,
                token_ids=tokens,
                loss_mask=first.loss_mask,
                model_input=first.model_input,
            )
        )
    prefixes = shared_prefixes(rows)
    assert prefixes == [19] * 4
    found = packed_logits(twins.ours, rows, prefixes)
    assert torch.allclose(found, expected_logits(twins, rows), atol=2e-5)


@torch.no_grad()
def test_features_stand_in_the_place_of_placeholders(twins, family):
    model = alias_module(twins.ours)
    follow_contents(model)
    model = alias_module(model)  # as an engine has it of a trainer's
    follow_contents(model)
    assert len(model.base_model._forward_pre_hooks) == 1
    rows, expected, features = rows_of(), [], []
    for row, model_input in zip(rows, INPUTS, strict=True):
        pixels, options = twins.pixels(model_input), {}
        if model_input:
            options = {"pixel_values": pixels, "image_grid_thw": grids_of(model_input)}
            features += twins.theirs.model.get_image_features(**options).pooler_output
        logits = twins.theirs(
            input_ids=torch.tensor([row.token_ids]),
            position_ids=twins.rope_index(row.token_ids, model_input)[0],
            **options,
        ).logits[0]
        expected.append(logits[row.loss_mask.index(True) - 1 : -1])
    batch = collate(rows, [1.0] * 3, "cpu", inputs=GRID)
    context = PackedContext.from_lengths(batch.lengths)
    index = (batch.input_ids == IMAGE_ID).nonzero().squeeze(1)
    context.contents = ContentFeatures(index=index, features=torch.cat(features))
    hidden = hidden_states(model, batch.input_ids, batch.position_ids, context)
    found = head_logits(model, hidden[batch.predict_index])
    assert torch.allclose(found, torch.cat(expected), atol=5e-5)
    context.contents = None
    hidden = hidden_states(model, batch.input_ids, batch.position_ids, context)
    found = head_logits(model, hidden[batch.predict_index])
    assert not torch.allclose(found, torch.cat(expected), atol=1e-2)


def test_a_family_of_text_has_no_hook(twins):
    model = copy.deepcopy(twins.ours)
    follow_contents(model)
    assert not model.base_model._forward_pre_hooks


def test_what_pads_a_split_pass_has_all_axes():
    positions = torch.arange(4)
    assert _padded(positions, 2).tolist() == [0, 1, 2, 3, 0, 1]
    assert _padded(positions.expand(3, 4), 2).tolist() == [[0, 1, 2, 3, 0, 1]] * 3
    assert torch.equal(_padded(positions, 0), positions)


@torch.no_grad()
@table("budget", [64, 7])
def test_an_engine_samples_with_the_log_probabilities_of_transformers(twins, family, budget):
    """With chunks of prompts that end inside images, a prefix cache, and decode steps behind."""
    engine = EmbeddedEngine(
        twins.ours,
        EngineConfig(max_num_seqs=4, max_num_batched_tokens=budget, kv_cache_gib=0.001),
        eos_token_ids=(),
        max_model_len=40,
        block_size=4,
    )
    requests = [
        Request(
            id=f"{number}",
            prompt_ids=tuple(SEQUENCES[number % 3]),
            sampling=SamplingParams(max_tokens=6, seed=number),
            model_input=INPUTS[number % 3],
        )
        for number in range(6)
    ]
    done = {}
    engine.submit(requests[:3])
    while engine.has_unfinished:
        done |= {completion.request_id: completion for completion in engine.step()}
    engine.submit(requests[3:])
    while engine.has_unfinished:
        done |= {completion.request_id: completion for completion in engine.step()}
    assert [done[str(n)].num_cached_tokens for n in range(3, 6)] == [16, 8, 20]
    for request in requests:
        completion = done[request.id]
        ids = [*request.prompt_ids, *completion.token_ids]
        logprobs = twins.logits(ids, request.model_input).log_softmax(-1)
        predicted = logprobs[len(request.prompt_ids) - 1 : -1]
        expected = predicted.gather(1, torch.tensor([list(completion.token_ids)]).T)[:, 0]
        assert torch.allclose(torch.tensor(completion.logprobs).float(), expected, atol=2e-5)
