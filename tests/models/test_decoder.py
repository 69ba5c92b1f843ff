"""Our forward equals transformers' own; the aliased module is the same weights."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, masking_utils

from hone.attention import PackedContext
from hone.models.decoder import alias_module, head_logits, head_weight, hidden_states
from tests.models.families import (
    FAMILY_FIELDS,
    WHOLE,
    family_folder,
    family_model,
    packed_logprobs,
    random_samples,
)
from tests.tables import table

LENGTHS = (9, 1, 14)


def check_equals_transformers(family, model, implementation):
    kind = AutoModelForImageTextToText if family in WHOLE else AutoModelForCausalLM
    stock = kind.from_pretrained(
        family_folder(family), dtype=torch.float32, attn_implementation=implementation
    ).eval()
    samples = random_samples(LENGTHS)
    with torch.no_grad():
        expected = [stock(sample[None]).logits[0].log_softmax(-1) for sample in samples]
        actual = packed_logprobs(model, samples)
    torch.testing.assert_close(actual, expected, rtol=0, atol=2e-5)


IMPLEMENTATIONS = [
    (family, implementation)
    for family in FAMILY_FIELDS
    for implementation in ("sdpa", "eager")
    if (family, implementation) != ("gemma2", "sdpa")  # sdpa knows no soft cap
]


@table("family, implementation", IMPLEMENTATIONS)
def test_equals_transformers(family, implementation):
    check_equals_transformers(family, family_model(family), implementation)


@pytest.mark.parametrize("field", ["sliding_window", "attn_logit_softcapping"])
def test_transformers_check_catches_an_ignored_feature(field):
    model = family_model("gemma2")
    for layer in model.model.layers:
        setattr(layer.self_attn, field, None)
    with pytest.raises(AssertionError):
        check_equals_transformers("gemma2", model, "eager")


def test_transformers_check_catches_a_missing_final_cap():
    model = family_model("gemma2")
    model.config.final_logit_softcapping = None
    with pytest.raises(AssertionError):
        check_equals_transformers("gemma2", model, "eager")


def test_forward_without_context_is_an_error():
    with pytest.raises(ValueError, match="needs attention_context"):
        family_model("qwen3")(torch.arange(5)[None])


def test_forward_searches_for_no_packed_sequences(monkeypatch):
    """That search waits for the device, once a forward."""

    def refuse(_):
        raise AssertionError("transformers looked for packed sequences")

    monkeypatch.setattr(masking_utils, "find_packed_sequence_indices", refuse)
    for family in FAMILY_FIELDS:
        packed_logprobs(family_model(family), random_samples(LENGTHS))


def storage(model):
    return {name: tensor.data_ptr() for name, tensor in model.state_dict().items()}


@table("family", FAMILY_FIELDS)
def test_alias_shares_every_tensor(family):
    model = family_model(family)
    alias = alias_module(model.train())
    assert storage(alias) == storage(model)
    assert all(a is b for a, b in zip(alias.parameters(), model.parameters(), strict=True))
    assert all(a is b for a, b in zip(alias.buffers(), model.buffers(), strict=True))
    tied = model.config.tie_word_embeddings
    assert (head_weight(alias) is alias.get_input_embeddings().weight) == tied
    assert model.training
    assert not alias.training
    assert storage(copy.deepcopy(model)) != storage(model)  # what a plain copy would do


def test_alias_follows_an_optimizer_step():
    model = family_model("qwen3")
    alias = alias_module(model)
    samples = random_samples(LENGTHS)
    before = packed_logprobs(alias, samples)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    packed_logprobs(model, samples)[0].square().mean().backward()
    optimizer.step()
    after = packed_logprobs(alias, samples)
    assert torch.equal(torch.cat(after), torch.cat(packed_logprobs(model, samples)))
    assert not torch.allclose(torch.cat(before), torch.cat(after))


def test_recompute_gives_the_same_gradients():
    """The context reaches recomputed layers too."""
    samples = random_samples(LENGTHS)
    grads = []
    for recompute in (False, True):
        model = family_model("qwen3").train()
        if recompute:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        loss = torch.cat(packed_logprobs(model, samples)).square().sum()
        grads.append(torch.autograd.grad(loss, list(model.parameters())))
    torch.testing.assert_close(*grads, rtol=0, atol=0)


def test_head_takes_any_rows():
    model = family_model("gemma2")
    ids = random_samples([9])[0]
    hidden = hidden_states(model, ids, torch.arange(9), PackedContext.from_lengths([9]))
    rows = torch.tensor([7, 2])
    torch.testing.assert_close(
        head_logits(model, hidden[rows]), head_logits(model, hidden)[rows], rtol=1e-5, atol=1e-5
    )
