"""Log-probability and entropy of trained tokens without ever holding their logits.

Logits of 32k tokens over 152k words are 20 GB in float32. Here the head runs over a chunk of tokens
at a time, forward and again in backward, so that memory is `chunk_tokens x V` whatever N is.

Letters: N trained tokens, C of them in a chunk, D model width, V vocabulary. With
`l = logits / temperature` and `p = softmax(l)`: `logprob = l_y - logsumexp(l)`,
`H = -sum(p log p)`, and their gradients are

    d logprob / d l = onehot(y) - p          d H / d l = -p (log p + H)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from hone.models.decoder import head_logits, head_weight

__all__ = ["token_logprobs"]


def token_logprobs(
    model: PreTrainedModel,
    hidden_ND: Tensor,
    labels_N: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool = False,
    compile: bool = False,
    exact: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of `labels_N` and entropy of each distribution, both [N] float32.

    Differentiable in the hidden states and in the head's weights, whose gradients add up over
    chunks in float32. At most `chunk_tokens` rows of logits exist at any time. `compile` fuses
    what is done with them, so that a chunk takes twice its float32 logits and no more; otherwise
    copies come on top. With `exact`, log-probabilities are the bits that an engine in exact mode
    samples with.
    """
    head = _Head(model, temperature, chunk_tokens, with_entropy, compile, exact)
    if torch.is_grad_enabled():
        return _ChunkedLogprobs.apply(head, labels_N, hidden_ND, head_weight(model))
    scores = head.score(hidden_ND, labels_N)
    return scores.logprobs, scores.entropy


class _Scores(NamedTuple):
    """One value a token, [N] or [C] each."""

    logprobs: Tensor
    entropy: Tensor | None
    normaliser: Tensor
    """logsumexp(l)"""

    def rows(self, rows: slice) -> _Scores:
        entropy = None if self.entropy is None else self.entropy[rows]
        return _Scores(self.logprobs[rows], entropy, self.normaliser[rows])


@dataclass(frozen=True, slots=True)
class _Head:
    model: PreTrainedModel
    temperature: float
    chunk_tokens: int
    with_entropy: bool
    compile: bool
    exact: bool

    def score(self, hidden_ND: Tensor, labels_N: Tensor) -> _Scores:
        chunks = [
            self._score_chunk(hidden, labels)
            for hidden, labels in zip(
                hidden_ND.split(self.chunk_tokens), labels_N.split(self.chunk_tokens), strict=True
            )
        ]
        logprobs, entropies, normalisers = zip(*chunks, strict=True)
        entropy_N = torch.cat(entropies) if self.with_entropy else None
        return _Scores(torch.cat(logprobs), entropy_N, torch.cat(normalisers))

    def logits(self, hidden_CD: Tensor) -> Tensor:
        return head_logits(self.model, hidden_CD, exact=self.exact)

    def _score_chunk(self, hidden_CD: Tensor, labels_C: Tensor) -> _Scores:
        score, _ = _kernels(self.compile)
        logits_CV = self.logits(hidden_CD)
        if not self.exact:
            return score(logits_CV, labels_C, self.temperature, self.with_entropy)
        logprobs_C = _exact_logprobs(logits_CV, labels_C, self.temperature)
        scores = score(logits_CV, labels_C, self.temperature, self.with_entropy)
        return scores._replace(logprobs=logprobs_C)


def _exact_logprobs(logits_CV: Tensor, labels_C: Tensor, temperature: float) -> Tensor:
    from hone.models.token_logprobs import token_logprobs  # needs triton, absent on CPUs

    temperatures_C = logits_CV.new_full((len(logits_CV),), temperature)
    return token_logprobs(logits_CV, labels_C, temperatures_C)


class _ChunkedLogprobs(torch.autograd.Function):
    """`_Head.score`; backward computes each chunk's logits a second time."""

    @staticmethod
    def forward(
        ctx: Any, head: _Head, labels_N: Tensor, hidden_ND: Tensor, weight_VD: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        scores = head.score(hidden_ND, labels_N)
        ctx.head = head
        ctx.save_for_backward(labels_N, hidden_ND, weight_VD, *scores)
        ctx.set_materialize_grads(False)
        return scores.logprobs, scores.entropy

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[None, None, Tensor, Tensor]:
        head: _Head = ctx.head
        labels_N, hidden_ND, weight_VD, *saved = ctx.saved_tensors
        scores = _Scores(*saved)
        grad_logprobs_N, grad_entropy_N = grads
        if grad_logprobs_N is None:
            grad_logprobs_N = torch.zeros_like(scores.logprobs)
        _, logits_gradient = _kernels(head.compile)

        grad_hidden_ND = torch.empty_like(hidden_ND)
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=_accumulation_dtype(weight_VD.dtype))
        for start in range(0, hidden_ND.shape[0], head.chunk_tokens):
            rows = slice(start, start + head.chunk_tokens)
            with torch.enable_grad():
                hidden_CD = hidden_ND[rows].detach().requires_grad_()
                logits_CV = head.logits(hidden_CD)
            grad_logits_CV, grad_label_C = logits_gradient(
                logits_CV.detach(),
                scores.rows(rows),
                grad_logprobs_N[rows],
                None if grad_entropy_N is None else grad_entropy_N[rows],
                head.temperature,
            )
            grad_logits_CV.scatter_(-1, labels_N[rows, None], grad_label_C[:, None])
            grad_hidden_ND[rows], grad_chunk_VD = torch.autograd.grad(
                logits_CV, [hidden_CD, weight_VD], grad_logits_CV
            )
            grad_weight_VD += grad_chunk_VD
        return None, None, grad_hidden_ND, grad_weight_VD


def _score(logits_CV: Tensor, labels_C: Tensor, temperature: float, with_entropy: bool) -> _Scores:
    """May overwrite the logits."""
    scaled_CV = _scaled(logits_CV, temperature)
    normaliser_C = torch.logsumexp(scaled_CV, dim=-1)
    logprobs_C = scaled_CV.gather(-1, labels_C[:, None]).squeeze(-1) - normaliser_C
    if not with_entropy:
        return _Scores(logprobs_C, None, normaliser_C)
    log_p_CV = scaled_CV.sub_(normaliser_C[:, None])
    return _Scores(logprobs_C, -log_p_CV.exp().mul_(log_p_CV).sum(-1), normaliser_C)


def _logits_gradient(
    logits_CV: Tensor,
    scores: _Scores,
    grad_logprobs_C: Tensor,
    grad_entropy_C: Tensor | None,
    temperature: float,
) -> tuple[Tensor, Tensor]:
    """Gradient with respect to the logits, [C, V] in their dtype, right everywhere but at the
    labels; and the values that belong there, [C]. May overwrite the logits."""
    log_p_CV = _scaled(logits_CV, temperature).sub_(scores.normaliser[:, None])
    p_label_C = scores.logprobs.exp()
    factor_C = grad_logprobs_C / temperature
    if grad_entropy_C is None or scores.entropy is None:
        grad_CV = log_p_CV.exp_().mul_(-factor_C[:, None])
        grad_label_C = factor_C - p_label_C * factor_C
    else:
        slope_C = grad_entropy_C / temperature
        p_CV = log_p_CV.exp()
        surprise_CV = log_p_CV.add_(scores.entropy[:, None])
        grad_CV = surprise_CV.mul_(-slope_C[:, None]).sub_(factor_C[:, None]).mul_(p_CV)
        slope_C = slope_C * (scores.logprobs + scores.entropy)
        grad_label_C = factor_C - p_label_C * (factor_C + slope_C)
    return grad_CV.to(logits_CV.dtype), grad_label_C.to(logits_CV.dtype)


def _scaled(logits_CV: Tensor, temperature: float) -> Tensor:
    """Logits over temperature in float32 or wider; the same storage where nothing changes."""
    scaled_CV = logits_CV.to(_accumulation_dtype(logits_CV.dtype))
    return scaled_CV if temperature == 1.0 else scaled_CV / temperature


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float32, or wider where the model is."""
    return torch.promote_types(dtype, torch.float32)


@cache
def _kernels(
    compile: bool,
) -> tuple[Callable[..., _Scores], Callable[..., tuple[Tensor, Tensor]]]:
    """`_score` and `_logits_gradient`, as they stand or each fused by torch.compile."""
    if compile:
        return torch.compile(_score), torch.compile(_logits_gradient)
    return _score, _logits_gradient
