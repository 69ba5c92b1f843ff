"""Packed rows and shared prompts of a whole hybrid model against each row alone in transformers."""

from __future__ import annotations

import random
from contextlib import nullcontext

import pytest
import torch

from hone.families.registry import inputs_of
from hone.models.contents import follow_inputs
from hone.models.decoder import alias_module
from hone.trainer.collating import collate
from hone.types import Row
from tests.recurrent.models import (
    check_gradients,
    gradients_of,
    hybrid_model,
    logprobs_alone,
    passes_of,
    rows_of,
    twin_of,
)
from tests.recurrent.unrounded import unrounded
from tests.tables import table

CUTS = [[(1, 1)], [(1, 3), (2, 1), (1, 1)], [(3, 70), (5, 6), (1, 140), (2, 2)]]


def check(rows: list[Row], prefixes: list[int] | None, dtype: torch.dtype = torch.float64) -> None:
    model = hybrid_model(dtype)
    twin = twin_of(model)
    passes = passes_of(model)
    batch = collate(
        rows, [1.0] * len(rows), "cpu", prefixes=prefixes, inputs=inputs_of(model.config)
    )
    assert batch.segments is not None
    assert len(batch.segments.levels) == (2 if prefixes else 1)
    is_exact = dtype == torch.float64
    with unrounded() if is_exact else nullcontext():
        wanted = torch.cat([logprobs_alone(twin, row) for row in rows])
        found = passes.forward(batch, frozenset({"logprobs"}))["logprobs"].double()
        factors = torch.randn_like(wanted)
        grads, exact = (
            gradients_of(m, (x * factors).sum()) for m, x in ((model, found), (twin, wanted))
        )
    torch.testing.assert_close(found, wanted, atol=1e-9 if is_exact else 1e-3, rtol=1e-5)
    check_gradients(grads, exact, limit=1e-8 if is_exact else 5e-3)


@table("cut", CUTS)
def test_rows_of_any_cut_are_each_alone(cut: list[tuple[int, int]]):
    check(rows_of(cut), None)


def test_rows_of_any_cut_are_each_alone_in_float32():
    check(rows_of(CUTS[-1]), None, torch.float32)


@table("length", [1, 2, 3, 4, 65, 130])
def test_rows_with_a_shared_prompt_are_each_alone(length: int):
    """Also with a prompt that the convolution reaches over."""
    prompt = torch.randint(97, (length,)).tolist()
    sizes = [random.randint(1, 70) for _ in range(3)]
    check(rows_of([(length, n) for n in (*sizes, 1)], prompt=prompt), [length] * 4)


def test_groups_and_rows_that_share_nothing_in_one_pass():
    groups = []
    for name, length, sizes in (("a", 2, [5, 1]), ("b", 7, [3, 66, 2]), ("", 4, [9])):
        prompt = torch.randint(97, (length,)).tolist()
        rows = rows_of([(length, n) for n in sizes], prompt=prompt)
        for row in rows:
            row.id, row.group_id = f"{name}.{row.id}", name
            groups.append((row, length if name else 0))
    random.shuffle(groups)
    check(*(list(column) for column in zip(*groups, strict=True)))


@pytest.mark.slow
def test_compiled_layers_share_graphs():
    """The number of a layer and the cut of a pass are no part of them."""
    from torch._dynamo.utils import counters

    kinds = {"num_hidden_layers": 10, "layer_types": ["linear_attention"] * 10}
    model = hybrid_model(torch.float32, initializer_range=0.05, **kinds)
    inputs = inputs_of(model.config)
    eager, compiled = passes_of(alias_module(model)), passes_of(model, compile=True)
    compiled.train()
    torch._dynamo.reset()
    counters.clear()
    for cut in CUTS[1:]:
        rows = rows_of(cut)
        batch = collate(rows, [1.0] * len(rows), "cpu", inputs=inputs)
        found, wanted = (
            m.forward(batch, frozenset({"logprobs"}))["logprobs"] for m in (compiled, eager)
        )
        torch.testing.assert_close(found, wanted, atol=1e-3, rtol=1e-3)
        found.sum().backward()
    assert not counters["recompile_limit"]
    assert counters["stats"]["unique_graphs"] < 8, "fewer than layers"


def test_layers_are_followed_once_and_an_alias_has_layers_of_its_own():
    model = hybrid_model()
    follow_inputs(model)
    before = [m.__dict__["forward"] for m in model.modules() if "forward" in m.__dict__]
    follow_inputs(model)
    assert [m.__dict__["forward"] for m in model.modules() if "forward" in m.__dict__] == before
    alias = alias_module(model)
    theirs = [m.__dict__["forward"] for m in alias.modules() if "forward" in m.__dict__]
    assert len(before) == len(theirs) == 3
    own = {*map(id, alias.modules())}
    assert all(id(forward.module) in own for forward in theirs)


def test_a_forward_without_a_context_is_refused():
    model = hybrid_model()
    follow_inputs(model)
    with pytest.raises(ValueError, match="attention_context"):
        model(input_ids=torch.tensor([[1, 2, 3]]))
