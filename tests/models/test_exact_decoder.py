"""The decoders of exact mode: their structure and gradients, with torch in place of the kernels."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch
from transformers import PreTrainedModel

from hone.attention import PackedContext, PagedContext
from hone.errors import UserError
from hone.models import exact_decoder
from hone.models.decoder import head_logits, hidden_states
from hone.models.exact_decoder import PackedDecoder, require_exact
from hone.models.generation import generation_model
from tests.models.exact_fakes import use_torch
from tests.tables import table
from tests.trainer.examples import tiny_model

pytestmark = pytest.mark.skipif(not find_spec("triton"), reason="triton cannot be imported")
LENGTHS = (5, 1, 12, 7)
CASES = {
    "qwen3": {},
    "qwen2": {"tie_word_embeddings": False},
    "llama": {"attention_bias": True, "pad_token_id": 3},
    "mistral": {"sliding_window": 4},
}


@pytest.fixture
def torch_kernels(monkeypatch):
    return use_torch(monkeypatch)


def inputs(vocab_size: int):
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(vocab_size, (sum(LENGTHS),), generator=draw)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    return ids, positions, PackedContext.from_lengths(LENGTHS)


def gradients(model: PreTrainedModel, hidden):
    model.zero_grad()
    draw = torch.Generator().manual_seed(1)
    hidden.backward(torch.randn(hidden.shape, generator=draw, dtype=hidden.dtype))
    return {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}


@table("recompute", [False, True])
@table("family", CASES)
def test_packed_decoder_is_the_model(torch_kernels, family, recompute):
    check_packed_decoder(family, recompute=recompute)


def check_packed_decoder(family, *, recompute):
    model = tiny_model(family, dtype=torch.float64, **CASES[family])
    ids, positions, context = inputs(model.config.vocab_size)
    expected = hidden_states(model, ids, positions, context)
    wanted = gradients(model, expected)
    decoder = PackedDecoder(model, recompute=recompute)
    actual = decoder(ids, positions, context)
    found = gradients(model, actual)
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)
    assert set(found) == set(wanted)
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_gradients_of_the_kernels_compile(torch_kernels, monkeypatch):
    """As on CUDA, but for the code that is made of the graph."""
    compiled = torch.compile(
        exact_decoder._gradients, dynamic=True, fullgraph=True, backend="aot_eager"
    )
    monkeypatch.setattr(exact_decoder, "_gradients_of", lambda device_type: compiled)
    check_packed_decoder("qwen3", recompute=False)


def test_packed_decoder_without_gradients_can_be_trained_afterwards(torch_kernels):
    """Scoring comes first, and under inference mode."""
    model = tiny_model(dtype=torch.float64)
    ids, positions, context = inputs(model.config.vocab_size)
    decoder = PackedDecoder(model, recompute=False)
    with torch.inference_mode():
        scored = decoder(ids, positions, context)
    hidden = decoder(ids, positions, context)
    assert torch.equal(hidden, scored)
    assert not decoder._rotary.rows(1).is_inference(), "kernels save it for backward"
    hidden.sum().backward()
    assert all(p.grad is not None for p in model.base_model.parameters())


def test_every_product_is_exact(torch_kernels):
    """Of the trainer's decoder, of the engine's, and of both heads."""
    model = tiny_model()
    ids, positions, context = inputs(model.config.vocab_size)
    width, inner, vocab = 32, 64, model.config.vocab_size
    layer = [(64, width), (width, 32), (2 * inner, width), (width, inner)]
    PackedDecoder(model, recompute=False)(ids, positions, context)
    assert torch_kernels == 2 * layer
    torch_kernels.clear()
    generator = generation_model(model, compile=False, exact=True)
    paged = one_prompt(model, len(ids))
    hidden = generator.hidden_states(ids, torch.arange(len(ids)), paged)
    assert torch_kernels == 2 * layer
    torch_kernels.clear()
    logits = generator.logits(hidden)
    with torch.no_grad():
        torch.testing.assert_close(logits, head_logits(model, hidden, exact=True))
    assert torch_kernels == 2 * [(vocab, width)]
    assert logits.dtype == torch.float32


def test_engine_and_packed_decoder_are_the_same_function(torch_kernels):
    model = tiny_model(dtype=torch.float64)
    ids, _, _ = inputs(model.config.vocab_size)
    positions = torch.arange(len(ids))
    packed = PackedDecoder(model, recompute=False)
    expected = packed(ids, positions, PackedContext.from_lengths([len(ids)]))
    generator = generation_model(model, compile=False, exact=True)
    actual = generator.hidden_states(ids, positions, one_prompt(model, len(ids)))
    torch.testing.assert_close(actual, expected)


def one_prompt(model: PreTrainedModel, length: int) -> PagedContext:
    config = model.config
    shape = (2, 8, 16, config.num_key_value_heads, config.head_dim)
    caches = [torch.zeros(shape, dtype=model.dtype) for _ in range(config.num_hidden_layers)]
    return PagedContext(
        kv_caches=caches,
        block_tables=torch.arange(8, dtype=torch.int32)[None],
        slot_mapping=torch.arange(length),
        cu_seqlens_q=torch.tensor([0, length], dtype=torch.int32),
        context_lens=torch.tensor([length], dtype=torch.int32),
        max_seqlen_q=length,
        max_context_len=length,
        query_lens=(length,),
        key_lens=(length,),
    )


def test_foreign_modules_are_refused(monkeypatch):
    monkeypatch.setattr(exact_decoder, "exact_supported", lambda config, device: None)
    model = tiny_model()
    model.base_model.layers[0].mlp.down_proj = torch.nn.Sequential(torch.nn.Linear(64, 32))
    with pytest.raises(UserError, match=r"model\.exact.*Qwen3ForCausalLM has other modules"):
        require_exact(model)


def test_cpu_is_refused():
    with pytest.raises(UserError, match=r"model\.exact: .*got cpu.*model\.exact=false"):
        generation_model(tiny_model(), compile=False, exact=True)
