from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hone.models.decoder import head_product, head_weight
from hone.trainer import logprobs as logprobs_module
from hone.trainer.logprobs import token_logprobs, token_scores
from tests.tables import table
from tests.trainer.examples import VOCAB, tiny_model

Scores = tuple[Tensor, Tensor, Tensor, Tensor]
"""log-probs, entropies, gradient of the hidden states, gradient of the head"""


def inputs(num_tokens: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(num_tokens)
    hidden = 2 * torch.randn(num_tokens, 32, generator=generator, dtype=torch.float64)
    labels = torch.randint(VOCAB, (num_tokens,), generator=generator)
    return hidden.to(dtype), labels, torch.randn(2, num_tokens, generator=generator)


def scores(model: Any, num_tokens: int, chunk: int, temperature: float) -> Scores:
    hidden, labels, factors = inputs(num_tokens, model.dtype)
    hidden.requires_grad_()
    logprobs, entropy = token_logprobs(
        model, hidden, labels, temperature=temperature, chunk_tokens=chunk, with_entropy=True
    )
    assert entropy is not None
    loss = (factors[0] * logprobs + factors[1] * entropy).sum()
    gradients = torch.autograd.grad(loss, [hidden, head_weight(model)])
    return logprobs.detach(), entropy.detach(), *gradients


def slow_scores(model: Any, num_tokens: int, temperature: float, cap: float | None) -> Scores:
    """The definition, token by token in float64."""
    hidden, labels, factors = inputs(num_tokens, torch.float64)
    hidden.requires_grad_()
    weight = head_weight(model).detach().double().requires_grad_()
    logprobs, entropies = [], []
    for state, label in zip(hidden, labels, strict=True):
        logits = weight @ state
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        p = (logits / temperature).exp() / (logits / temperature).exp().sum()
        logprobs.append(p[label].log())
        entropies.append(-(p * p.log()).sum())
    logprobs, entropy = torch.stack(logprobs), torch.stack(entropies)
    loss = (factors[0] * logprobs + factors[1] * entropy).sum()
    return logprobs.detach(), entropy.detach(), *torch.autograd.grad(loss, [hidden, weight])


@table("family", ["qwen3", "gemma2"])
@table("temperature", [1.0, 0.6])
@table("chunk", [1, 7, 16, 64])
def test_R15_chunked_values_and_gradients_equal_the_definition(
    family: str, temperature: float, chunk: int
):
    fields = {"final_logit_softcapping": 3.0} if family == "gemma2" else {}
    model = tiny_model(family, **fields)
    expected = slow_scores(model, 37, temperature, fields.get("final_logit_softcapping"))
    for got, want in zip(scores(model, 37, chunk, temperature), expected, strict=True):
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-5)


@table("family", ["qwen3", "gemma2"])
@table("chunk", [1, 16, 64])
def test_other_words_than_the_label_equal_the_definition(family: str, chunk: int):
    """The label among them or not, and the likeliest ones."""
    cap = {"final_logit_softcapping": 3.0} if family == "gemma2" else {}
    model = tiny_model(family, dtype=torch.float64, **cap)
    hidden, labels, factors = inputs(37, torch.float64)
    ids = torch.stack([(labels + 3) % VOCAB, labels, (labels + 1) % VOCAB], 1)
    ids[::2, 1] = (labels[::2] + 7) % VOCAB
    weights = torch.randn(3, generator=torch.Generator().manual_seed(0)).double()

    def loss(logprobs: Tensor, entropy: Tensor, at: Tensor) -> Tensor:
        return (factors[0] * logprobs + factors[1] * entropy + at @ weights).sum()

    hidden.requires_grad_()
    head = head_weight(model)
    options: Any = {
        "temperature": 0.7,
        "chunk_tokens": chunk,
        "with_entropy": True,
        "with_mean": True,
    }
    found = token_scores(model, hidden, labels, **options, at_ids_NK=ids.int())
    own = loss(found["logprobs"], found["entropy"], found["logprobs_at"])
    logits = hidden @ head.T
    if cap:
        logits = 3.0 * torch.tanh(logits / 3.0)
    whole = (logits / 0.7).log_softmax(-1)
    entropy = -(whole.exp() * whole).sum(-1)
    expected = loss(whole.gather(1, labels[:, None])[:, 0], entropy, whole.gather(1, ids))
    torch.testing.assert_close(found["logprobs_at"], whole.gather(1, ids))
    torch.testing.assert_close(found["mean_logits"], (logits / 0.7).mean(-1).detach())
    for one, two in zip(
        torch.autograd.grad(own, [hidden, head]),
        torch.autograd.grad(expected, [hidden, head], retain_graph=True),
        strict=True,
    ):
        torch.testing.assert_close(one, two, rtol=1e-10, atol=1e-10)
    for number in (5, VOCAB + 1):
        with torch.no_grad():
            found = token_scores(model, hidden, labels, **options, top_k=number)
        with_gradient = token_scores(model, hidden, labels, **options, top_k=number)
        assert torch.equal(with_gradient["top_ids"], found["top_ids"])
        assert not with_gradient["top_logprobs"].requires_grad
        top = whole.topk(min(number, whole.shape[-1]))
        assert torch.equal(found["top_ids"], top.indices.int())
        torch.testing.assert_close(found["top_logprobs"], top.values.detach())


def test_entropy_or_logprobs_alone_have_the_right_gradient():
    model = tiny_model(dtype=torch.float64)
    for used in (0, 1):
        results = []
        for chunk in (8, 100):
            hidden, labels, factors = inputs(37, torch.float64)
            hidden.requires_grad_()
            values = token_logprobs(
                model, hidden, labels, temperature=0.7, chunk_tokens=chunk, with_entropy=True
            )
            results.append(torch.autograd.grad((factors[used] * values[used]).sum(), hidden)[0])
        torch.testing.assert_close(results[0], results[1], rtol=1e-12, atol=1e-12)


class Products:
    """Logits that were computed, of which no more than one chunk may exist when the next is."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[ref[Tensor]] = []
        monkeypatch.setattr(logprobs_module, "head_product", self._product)

    def _product(self, *args: Any, **kwargs: Any) -> Tensor:
        assert not self.alive(), "two chunks of logits at a time"
        logits = head_product(*args, **kwargs)
        self.made.append(ref(logits))
        return logits

    def alive(self) -> list[int]:
        """Tokens of each chunk that exists."""
        return [len(logits) for x in self.made if (logits := x()) is not None]


@table("chunk", [8, 36, 37, 100])
def test_the_last_chunk_is_computed_once_and_freed_by_backward(
    chunk: int, monkeypatch: pytest.MonkeyPatch
):
    products, number = Products(monkeypatch), -(-37 // chunk)
    model = tiny_model(dtype=torch.float64)
    hidden, labels, factors = inputs(37, torch.float64)
    hidden.requires_grad_()

    def forward() -> Tensor:
        options: Any = {"temperature": 0.7, "chunk_tokens": chunk}
        logprobs, _ = token_logprobs(model, hidden, labels, **options)
        return (factors[0] * logprobs).sum()

    loss = forward()
    assert products.alive() == [min(chunk, 37)]
    (first,) = torch.autograd.grad(loss, hidden, retain_graph=True)
    assert len(products.made) == 2 * number - 1
    assert products.alive() == []
    (second,) = torch.autograd.grad(loss, hidden)  # computes all of them
    assert torch.equal(first, second)
    # Of passes whose backward is still to come only the newest keeps logits.
    earlier, later = forward(), forward()
    products.made.clear()
    for loss, computed in ((later, number - 1), (earlier, 2 * number - 1)):
        assert torch.equal(torch.autograd.grad(loss, hidden)[0], first)
        assert len(products.made) == computed


def test_without_tokens_nothing_is_kept(monkeypatch: pytest.MonkeyPatch):
    products = Products(monkeypatch)
    model = tiny_model(dtype=torch.float64)
    hidden, labels, _ = inputs(0, torch.float64)
    hidden.requires_grad_()
    logprobs, _ = token_logprobs(model, hidden, labels, temperature=1.0, chunk_tokens=8)
    gradients = torch.autograd.grad(logprobs.sum(), [hidden, head_weight(model)])
    assert products.alive() == []
    assert not any(x.any() for x in gradients)


def test_no_entropy_is_none_in_every_path():
    model = tiny_model()
    hidden, labels, _ = inputs(10)
    for chunk in (4, 100):
        logprobs, entropy = token_logprobs(
            model, hidden, labels, temperature=1.0, chunk_tokens=chunk, with_entropy=False
        )
        assert entropy is None
        assert logprobs.requires_grad


class LargestTensor(TorchDispatchMode):
    """Remembers the most elements that any operation produced."""

    def __init__(self) -> None:
        super().__init__()
        self.numel = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        sizes = [t.numel() for t in tree_leaves(result) if isinstance(t, Tensor)]
        self.numel = max(self.numel, *sizes, 0)
        return result


def check_memory(num_tokens: int, chunk: int, *, used_chunk: int) -> None:
    vocabulary = 4096
    model = tiny_model(vocab_size=vocabulary)
    hidden, labels, _ = inputs(num_tokens)
    hidden.requires_grad_()
    kept: list[int] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor.numel())
        return tensor

    with LargestTensor() as largest, torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        logprobs, entropy = token_logprobs(
            model, hidden, labels, temperature=0.9, chunk_tokens=used_chunk, with_entropy=True
        )
        assert entropy is not None
        saved = max(kept)
        (logprobs - 0.1 * entropy).sum().backward()
    limit = max(chunk * vocabulary, vocabulary * 32)
    assert largest.numel <= limit, f"{largest.numel=} {limit=}"
    assert saved <= vocabulary * 32, f"{saved=} outlives the forward pass"


@pytest.mark.parametrize("num_tokens", [64, 1024])
def test_R15_no_more_than_a_chunk_of_logits_exists(num_tokens: int):
    check_memory(num_tokens, 32, used_chunk=32)


def test_R15_planted_unchunked_head_is_caught():
    with pytest.raises(AssertionError, match="largest"):
        check_memory(1024, 32, used_chunk=1024)


def test_bfloat16_head_adds_chunks_in_float32():
    """Equal contributions of 1 from 600 chunks: bfloat16 would stop counting at 256."""
    model = tiny_model(dtype=torch.bfloat16)
    with torch.no_grad():
        head_weight(model).zero_()
    hidden = torch.zeros(600, 32, dtype=torch.bfloat16)
    hidden[:, 0] = 1.0
    labels = torch.zeros(600, dtype=torch.int64)
    logprobs, _ = token_logprobs(
        model, hidden, labels, temperature=1.0, chunk_tokens=1, with_entropy=False
    )
    (gradient,) = torch.autograd.grad(logprobs.sum(), head_weight(model))
    assert float(gradient[0, 0]) == pytest.approx(600 * (1 - 1 / VOCAB), rel=1e-2)
