"""Generation equals training: prefill in chunks and decode give the packed forward's log-probs."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from hone.models.decoder import head_logits
from tests.models.families import FAMILY_FIELDS, family_model, packed_logprobs, random_samples
from tests.models.paged import PagedRun
from tests.tables import table

LENGTHS = (11, 6, 14)

SCHEDULES = {
    "whole prompts": [{0: 11, 1: 6, 2: 14}],
    "token by token": [{0: 1, 1: 1, 2: 1}] * 6 + [{0: 1, 2: 1}] * 5 + [{2: 1}] * 3,
    "chunks on and off block borders": [{0: 4, 2: 5}, {1: 6, 0: 4, 2: 3}, {2: 6, 0: 3}],
    "decode beside prefill": [{0: 9}, {0: 1, 1: 5, 2: 8}, {0: 1, 1: 1, 2: 6}],
    "prompts, then decode": [{0: 9, 1: 4, 2: 12}, {0: 1, 1: 1, 2: 1}, {2: 1, 0: 1, 1: 1}],
}


def check_paged_equals_packed(family, schedule, *, block_size=4, **options):
    model = family_model(family)
    samples = random_samples(LENGTHS)
    run = PagedRun(model, samples, block_size=block_size, **options)
    for chunks in schedule:
        run.step(chunks)
    with torch.no_grad():
        packed = packed_logprobs(model, samples)
        paged = [head_logits(model, rows).log_softmax(-1) for rows in run.results()]
    torch.testing.assert_close(paged, packed, rtol=0, atol=2e-5)


@pytest.mark.parametrize("schedule", SCHEDULES)
@table("family", FAMILY_FIELDS)
def test_paged_equals_packed(family, schedule):
    check_paged_equals_packed(family, SCHEDULES[schedule])


@table("block_size", [1, 3, 16])
@table("schedule", SCHEDULES)
def test_any_block_size(schedule, block_size):
    check_paged_equals_packed("gemma3_text", SCHEDULES[schedule], block_size=block_size, seed=7)


def test_training_after_generation_in_one_process():
    """What inference mode has cached must not break the next backward."""
    model, samples = family_model("qwen3"), random_samples(LENGTHS)
    run = PagedRun(model, samples)
    run.step(SCHEDULES["whole prompts"][0])
    sum(rows.sum() for rows in packed_logprobs(model, samples)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def changed(**changes):
    def mutate(ids, positions, context):
        fields = {name: change(getattr(context, name)) for name, change in changes.items()}
        return ids, positions, dataclasses.replace(context, **fields)

    return mutate


BUGS = {
    "tables in order": changed(block_tables=lambda tables: tables.sort(1).values),
    "tables of the neighbour": changed(block_tables=lambda tables: tables.roll(1, 0)),
    "newest key unseen": changed(context_lens=lambda lengths: (lengths - 1).clamp(min=1)),
    "slots shifted": changed(slot_mapping=lambda slots: slots.roll(1)),
    "nothing stored": changed(slot_mapping=lambda slots: torch.full_like(slots, -1)),
}


@table("bug", BUGS)
@table("schedule", ["token by token", "decode beside prefill"])
def test_paged_check_catches(bug, schedule):
    with pytest.raises(AssertionError):
        check_paged_equals_packed("qwen3", SCHEDULES[schedule], mutate=BUGS[bug])
