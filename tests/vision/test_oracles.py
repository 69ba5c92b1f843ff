"""Tower, embeddings, positions, packing and gradients against transformers' whole model."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from hone.attention import PackedContext
from hone.attention.context import ContentFeatures
from hone.distributed.mesh import Mesh
from hone.families.registry import inputs_of
from hone.families.vision.registry import VISION
from hone.model_input import TEXT, Content, ModelInput, content_pieces
from hone.models.contents import follow_inputs, require_features
from hone.models.decoder import alias_module, head_logits, hidden_states
from hone.models.features import FeatureSource
from hone.positions import packed_positions, position_shift
from hone.trainer.collating import collate
from hone.trainer.parallel_model import ParallelModel
from hone.trainer.prefixes import shared_prefixes
from hone.trainer.settings import SFTTrainerConfig
from hone.types import Row
from tests.tables import table
from tests.vision.examples import Example, Twin, picture

TOLERANCE = 2e-5


def examples(twin: Twin) -> list[Example]:
    """Sequences with one, no and three images, two of which have one size."""
    return [
        twin.sequence("what is ", picture(1), "? it is red."),
        twin.sequence("no image here, only text"),
        twin.sequence(picture(2), picture(3), " or ", picture(4, 50, 120), "? the first"),
    ]


def rows_of(twin: Twin) -> list[Row]:
    return [each.row(str(number)) for number, each in enumerate(examples(twin))]


def expected_logprobs(twin: Twin) -> Tensor:
    with torch.no_grad():
        return torch.cat([twin.logprobs(each, 5) for each in examples(twin)])


def trained(twin: Twin) -> ParallelModel:
    return ParallelModel(twin.load(), SFTTrainerConfig(compile="off"), Mesh.alone("cpu"))


def found_logprobs(model: ParallelModel, rows: list[Row], prefixes=None) -> Tensor:
    inputs = inputs_of(model.module.config)
    batch = collate(rows, [1.0] * len(rows), "cpu", prefixes=prefixes, inputs=inputs)
    return model.forward(batch, frozenset({"logprobs"}))["logprobs"]


@torch.no_grad()
def test_the_tower_gives_the_features_of_the_whole_model(twin):
    images = [picture(1), picture(2), picture(4, 50, 120)]
    example = twin.sequence(*images)
    source = require_features(twin.load())
    starts, sizes = [0], [len(example.ids)]
    found = source.gather(content_pieces([example.model_input], starts, sizes))
    output = twin.whole.model.get_image_features(**twin.processed(images))
    features = output.pooler_output
    if not isinstance(features, Tensor):
        features = torch.cat(list(features))
    assert torch.equal(found.features, features.flatten(0, -2))
    if twin.family == "qwen3_vl":
        deepstack = torch.stack([torch.cat(list(each)) for each in output.deepstack_features])
        assert torch.equal(found.deepstack, deepstack)
    else:
        assert found.deepstack is None
    where = torch.tensor(example.ids) == twin.settings.placeholder_id
    assert found.index.tolist() == where.nonzero()[:, 0].tolist()


@torch.no_grad()
def test_a_tile_has_the_same_features_alone_and_among_others(twin):
    example = twin.sequence(picture(1), picture(2), picture(4, 50, 120))
    source = require_features(twin.load())
    hashes = [content.hash for content in example.model_input.contents]
    tiles = source._pixels_of(hashes)
    together = source.tower.encode(tiles)
    for tile, features in zip(tiles, together, strict=True):
        (alone,) = source.tower.encode([tile])
        assert torch.equal(alone.embeds, features.embeds)


def test_positions_are_those_of_transformers(twin):
    rule = inputs_of(twin.load().config).positions
    if not twin.family.startswith("qwen"):
        assert rule is None
        return
    for each in examples(twin):
        grids = twin.processed(each.images).get("image_grid_thw")
        expected, shift = twin.whole.model.get_rope_index(
            torch.tensor([each.ids]), mm_token_type_ids=twin.kinds(each), image_grid_thw=grids
        )
        assert rule.rows(each.model_input, len(each.ids)).tolist() == expected[:, 0].tolist()
        assert position_shift(rule, each.model_input) == int(shift)
        for border in range(1, len(each.ids)):
            _, positions = packed_positions([border], inputs=[each.model_input], rule=rule)
            assert positions.tolist() == expected[:, 0, :border].tolist()


def test_packed_rows_have_the_logprobs_of_each_alone_in_the_whole_model(twin):
    model, rows = trained(twin), rows_of(twin)
    difference = found_logprobs(model, rows) - expected_logprobs(twin)
    assert difference.abs().max() < TOLERANCE


def moved(content: Content) -> Content:
    return replace(content, start=content.start + 1)


def swapped(contents: tuple[Content, ...]) -> tuple[Content, ...]:
    """The contents of the first two tiles in each other's place."""
    first, second, *rest = contents
    return (replace(first, hash=second.hash), replace(second, hash=first.hash), *rest)


@table(
    "mistake",
    [
        "moved by a token",
        "swapped",
        "left out",
        "one position a token",
        "deepstack left out",
        "deepstack in the wrong order",
        "features in the wrong order",
    ],
)
def test_each_mistake_shows(twin, mistake, monkeypatch):
    """What would make the comparisons above fail; otherwise they could not."""
    model, rows = trained(twin), rows_of(twin)
    expected = expected_logprobs(twin)
    if mistake == "moved by a token":
        for row in rows:
            contents = tuple(map(moved, row.model_input.contents))
            row.model_input = ModelInput(contents)
    elif mistake == "swapped":
        rows[2].model_input = ModelInput(swapped(rows[2].model_input.contents))
    elif mistake == "left out":
        monkeypatch.setattr(FeatureSource, "gather", lambda *_: None)
    elif mistake == "one position a token":
        if not twin.family.startswith("qwen"):
            return
        monkeypatch.setattr(
            "hone.families.vision.grid_positions.GridPositions.rows",
            lambda self, model_input, n: torch.arange(n).expand(3, n).numpy(),
        )
    else:
        if twin.family != "qwen3_vl" and mistake.startswith("deepstack"):
            return
        gather = FeatureSource.gather

        def wrong(source: FeatureSource, pieces: object) -> ContentFeatures | None:
            found = gather(source, pieces)
            if found is None:
                return None
            if mistake == "features in the wrong order":
                return replace(found, features=found.features.flip(0))
            no_layers = None if mistake == "deepstack left out" else found.deepstack.flip(0)
            return replace(found, deepstack=no_layers)

        monkeypatch.setattr(FeatureSource, "gather", wrong)
    difference = found_logprobs(model, rows) - expected
    assert difference.abs().max() > 50 * TOLERANCE


def test_rows_of_a_group_share_a_prompt_with_images(twin):
    first = examples(twin)[2]
    letters = twin.tokenizer("abcdefghijklmnopqrst", add_special_tokens=False)["input_ids"]
    group = [first.with_completion(letters[5 * n : 5 * n + 5]) for n in range(4)]
    rows = [each.row(str(number), group="g") for number, each in enumerate(group)]
    prefixes = shared_prefixes(rows)
    assert prefixes == [len(first.ids)] * 4
    with torch.no_grad():
        expected = torch.cat([twin.logprobs(each, 5) for each in group])
    model = trained(twin)
    found = found_logprobs(model, rows, prefixes)
    assert (found - expected).abs().max() < TOLERANCE
    source = require_features(model.module)
    assert source.num_encoded == len(first.model_input.contents)  # not once a row


def test_rows_with_other_images_share_only_what_is_before_them(twin):
    one, other = (
        twin.sequence("look at this long text: ", picture(seed), "? what is it? hello")
        for seed in (1, 2)
    )
    assert one.ids == other.ids
    rows = [one.row("0", group="g"), other.row("1", group="g")]
    start = one.model_input.contents[0].start
    assert max(shared_prefixes(rows)) <= start


def gradients(loss: Tensor, named: dict[str, Tensor]) -> dict[str, Tensor]:
    found = torch.autograd.grad(loss, list(named.values()))
    return dict(zip(named, found, strict=True))


def test_gradients_are_those_of_the_whole_model_with_a_frozen_tower(twin):
    model = trained(twin)
    found = gradients(
        found_logprobs(model, rows_of(twin)).sum(), dict(model.module.named_parameters())
    )
    whole = copy.deepcopy(twin.whole)
    prefix, other = VISION[twin.family].decoder_prefix, Twin.__new__(Twin)
    other.__dict__.update(twin.__dict__ | {"whole": whole})
    named = {
        "model." + name.removeprefix(prefix) if name.startswith(prefix) else name: parameter
        for name, parameter in whole.named_parameters()
        if name.startswith((prefix, "lm_head"))
    }
    expected = gradients(sum(other.logprobs(each, 5).sum() for each in examples(twin)), named)
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        scale = expected[name].abs().max()
        assert (gradient - expected[name]).abs().max() <= 2e-4 * scale + 1e-6, name


@torch.no_grad()
def test_an_alias_reads_the_same_features_by_one_hook(twin):
    model = twin.load()
    follow_inputs(model)
    alias = alias_module(model)
    follow_inputs(alias)
    assert len(alias.base_model._forward_pre_hooks) == 1
    assert require_features(alias) is require_features(model)
    (row, *_) = rows_of(twin)
    batch = collate([row], [1.0], "cpu", inputs=inputs_of(model.config))
    logits = []
    for module in (model, alias):
        context = PackedContext.from_lengths(batch.lengths)
        context.contents = require_features(module).gather(batch.contents)
        hidden = hidden_states(module, batch.input_ids, batch.position_ids, context)
        logits.append(head_logits(module, hidden))
    assert torch.equal(*logits)


def test_a_model_without_a_tower_names_itself(twin):
    model = trained(twin)
    del model.module._hone_features
    with pytest.raises(ValueError, match="has no tower to encode them"):
        found_logprobs(model, rows_of(twin))


def test_a_bound_on_kept_features_changes_nothing(twin):
    rows = rows_of(twin)
    expected = found_logprobs(trained(twin), rows)
    model = trained(twin)
    source = require_features(model.module)
    source.max_bytes = 0
    for row in [*rows, *rows]:
        found_logprobs(model, [row])
    assert torch.equal(found_logprobs(model, rows), expected)
    assert not source._kept
    assert source._num_bytes == 0


def test_a_row_of_text_alone_needs_no_tower(twin):
    model = trained(twin)
    row = rows_of(twin)[1]
    assert row.model_input is TEXT
    found_logprobs(model, [row])
    assert require_features(model.module).num_encoded == 0
