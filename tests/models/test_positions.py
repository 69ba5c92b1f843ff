"""Indices and positions of tokens, and pieces of contents among the tokens of a pass."""

from __future__ import annotations

import numpy as np
import torch

from hone.distributed.mesh import Mesh
from hone.families.vision.grid_positions import GridPositions
from hone.families.vision.registry import VISION
from hone.model_input import TEXT, Content, ContentPiece, ModelInput, content_pieces
from hone.positions import packed_positions
from hone.trainer.collating import empty_batch
from hone.trainer.context import _padded

INPUT = ModelInput(
    tuple(
        Content(kind="image", hash=name, start=start, num_tokens=h * w, shape=(1, h, w))
        for name, start, h, w in (("a", 1, 2, 2), ("b", 6, 4, 3))
    )
)


def test_without_a_rule_positions_are_the_indices_and_the_same_array():
    indices, positions = packed_positions([3, 1, 2], np.array([0, 5, 2]))
    assert positions is indices
    assert indices.tolist() == [0, 1, 2, 5, 2, 3]
    assert packed_positions([2, 3])[0].tolist() == [0, 1, 0, 1, 2]


def test_pieces_of_a_sequence_have_the_positions_of_the_whole():
    rule = GridPositions()
    whole = rule.rows(INPUT, 23)
    for border in range(1, 23):
        indices, positions = packed_positions(
            [border, 23 - border], np.array([0, border]), inputs=[INPUT, INPUT], rule=rule
        )
        assert indices.tolist() == list(range(23))
        assert np.array_equal(positions, whole)


def test_contents_are_cut_where_slices_of_sequences_end():
    pieces = content_pieces([INPUT, TEXT, INPUT], [0, 0, 3], [8, 2, 20])
    assert pieces == [
        ContentPiece("a", 0, 4, 1),
        ContentPiece("b", 0, 2, 6),
        ContentPiece("a", 2, 2, 10),
        ContentPiece("b", 0, 12, 13),
    ]
    assert content_pieces([INPUT], [5], [1]) == []


def test_each_token_of_a_content_is_in_one_piece_of_random_slices():
    rng = np.random.default_rng()
    for _ in range(50):
        borders = sorted({0, 23, *rng.integers(1, 23, 4).tolist()})
        starts, sizes = borders[:-1], np.diff(borders).tolist()
        found = [
            (piece.hash, piece.offset + i, piece.place + i)
            for piece in content_pieces([INPUT] * len(sizes), starts, sizes)
            for i in range(piece.size)
        ]
        expected = [
            (each.hash, i, each.start + i)
            for each in INPUT.contents
            for i in range(each.num_tokens)
        ]
        assert found == expected, borders


def test_what_pads_a_split_pass_has_all_axes():
    positions = torch.arange(4)
    assert _padded(positions, 2).tolist() == [0, 1, 2, 3, 0, 1]
    assert _padded(positions.expand(3, 4), 2).tolist() == [[0, 1, 2, 3, 0, 1]] * 3
    assert torch.equal(_padded(positions, 0), positions)


def test_a_pass_without_rows_has_all_axes():
    device = Mesh.alone("cpu").device
    assert empty_batch(device, inputs=VISION["qwen3_vl"].inputs).position_ids.shape == (3, 4)
    assert empty_batch(device).position_ids.shape == (4,)
