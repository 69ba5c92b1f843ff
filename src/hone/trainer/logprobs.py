"""Log-probability and entropy of trained tokens without holding the logits of all of them.

Logits of 32k tokens over 152k words are 20 GB in float32. Here the head runs over a chunk of tokens
at a time, in forward and again in backward, so that memory is `chunk_tokens x V` for any N. The
logits of the last chunk stay until backward, which begins with them: only the others are computed
again. A pass drops those of one before it whose backward is still to come.

Letters: N trained tokens, C of them in a chunk, D model width, V vocabulary or a rank's part of it,
R ranks, S statistics. With `l = logits / temperature` and `p = softmax(l)`:
`logprob = l_y - logsumexp(l)`, `H = -sum(p log p)`, and their gradients are

    d logprob / d l = onehot(y) - p          d H / d l = -p (log p + H)

and, where they are asked for, those of K words more as that of the label.

Forward reads a chunk's logits once, for the maximum m of each row, its mass `s = sum(exp(l - m))`,
its moment `u = sum(exp(l - m) (l - m))` and the label's logit; log-probability and entropy follow
from those. Ranks that share the vocabulary gather them once for all N tokens.
"""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hone.algorithms.settings import Output
from hone.distributed.mesh import Axis
from hone.models.decoder import head_product, head_weight, logit_softcap
from hone.trainer.pieces import accumulation_dtype
from hone.trainer.row_shares import first_row, gather_rows

__all__ = ["token_logprobs", "token_scores"]


def token_logprobs(
    model: PreTrainedModel,
    hidden_ND: Tensor,
    labels_N: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool = False,
    exact: bool = False,
    tensor: Axis | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Log-probability of `labels_N` and entropy of each distribution, both [N] float32.

    Differentiable in the hidden states and in the head's weights, whose gradients add up over
    chunks in float32. At most `chunk_tokens` rows of logits exist at any time, in float32, and in
    backward their gradient in the format of the hidden states. On CUDA kernels take each chunk in
    one pass. With `exact`, log-probabilities are the bits that an engine in exact mode samples
    with.

    `tensor` names the ranks that `hone.trainer.tensor.parallelize` has split the head over. They
    bring the same hidden states and labels, get the same results, and their gradients of the
    hidden states are whole. Collective over them.
    """
    scores = token_scores(
        model,
        hidden_ND,
        labels_N,
        temperature=temperature,
        chunk_tokens=chunk_tokens,
        with_entropy=with_entropy,
        exact=exact,
        tensor=tensor,
    )
    return scores["logprobs"], scores.get("entropy")


def token_scores(
    model: PreTrainedModel,
    hidden_ND: Tensor,
    labels_N: Tensor,
    *,
    temperature: float,
    chunk_tokens: int,
    with_entropy: bool = False,
    with_mean: bool = False,
    at_ids_NK: Tensor | None = None,
    top_k: int = 0,
    exact: bool = False,
    tensor: Axis | None = None,
) -> dict[Output, Tensor]:
    """The outputs of `token_logprobs` by name, and further outputs of each distribution: with
    `at_ids_NK` the log-probabilities of those words as `logprobs_at`, [N, K] and differentiable;
    with `top_k`, without gradient, the likeliest words as `top_ids`, int32, and `top_logprobs`, the
    likeliest first: all, of a smaller vocabulary; with `with_mean`, without gradient too, the mean
    of all logits as `mean_logits`.
    """
    ranks = tensor or Axis()
    weight_VD, first = _own_rows(model, ranks)
    head = _Head(
        temperature=temperature,
        softcap=logit_softcap(model),
        chunk_tokens=chunk_tokens,
        with_entropy=with_entropy,
        with_mean=with_mean,
        num_words=head_weight(model).shape[0],
        top_k=top_k,
        exact=exact,
        ranks=ranks,
        first=first,
    )
    labels_N = labels_N - first if first else labels_N
    at_ids_NK = None if at_ids_NK is None else at_ids_NK.long() - first
    if torch.is_grad_enabled():
        scores = _Scores(*_ChunkedLogprobs.apply(head, (labels_N, at_ids_NK), hidden_ND, weight_VD))
    else:
        scores = head.score(hidden_ND, labels_N, at_ids_NK, weight_VD)
    by_name: dict[Output, Tensor | None] = {
        "logprobs": scores.logprobs,
        "entropy": scores.entropy,
        "mean_logits": scores.mean_logits,
        "logprobs_at": scores.logprobs_at,
        "top_ids": scores.top_ids,
        "top_logprobs": scores.top_logprobs,
    }
    return {output: value for output, value in by_name.items() if value is not None}


def _own_rows(model: PreTrainedModel, ranks: Axis) -> tuple[Tensor, int]:
    """This rank's rows of the head and the number of the first; differentiable."""
    weight: Any = head_weight(model)
    if not isinstance(weight, DTensor):
        if ranks.size > 1:
            raise ValueError(f"the head is whole, not split over {ranks.size} tensor ranks")
        return weight, 0
    if weight.device_mesh.ndim != 1 or weight.device_mesh.size() != ranks.size:
        raise ValueError(
            f"the head lies in shards over {weight.device_mesh}, expected the {ranks.size} tensor "
            "ranks alone: score inside a pass of ShardedModel"
        )
    return weight.to_local(), first_row(weight.shape[0], ranks.rank, ranks.size)


class _Scores(NamedTuple):
    """Outputs of each token, [N] each, or [N, K] for those of K words."""

    logprobs: Tensor
    entropy: Tensor | None
    logprobs_at: Tensor | None
    """[N, K]"""
    normaliser: Tensor
    """logsumexp(l)"""
    mean_logits: Tensor | None = None
    top_ids: Tensor | None = None
    top_logprobs: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Head:
    temperature: float
    softcap: float | None
    chunk_tokens: int
    with_entropy: bool
    with_mean: bool
    num_words: int
    """Size of the vocabulary over all ranks."""
    top_k: int
    exact: bool
    ranks: Axis
    first: int
    """Vocabulary index of the first row of `weight_VD`. Labels and ids are counted from it; those
    of other ranks lie outside."""

    def chunks(self, num_tokens: int) -> list[slice]:
        """Tokens of each chunk, in order. The first may be smaller, so that the last, whose logits
        are kept, is full. Without tokens there is one, which is empty."""
        ends = [*range(num_tokens, 0, -self.chunk_tokens)][::-1] or [0]
        return [slice(max(end - self.chunk_tokens, 0), end) for end in ends]

    def score(
        self,
        hidden_ND: Tensor,
        labels_N: Tensor,
        at_ids_NK: Tensor | None,
        weight_VD: Tensor,
        kept: list[Tensor] | None = None,
    ) -> _Scores:
        """The requested outputs of all tokens. `kept` receives the logits of the last chunk."""
        statistics: list[Tensor] = []
        exact_logprobs: list[Tensor] = []
        top: list[tuple[Tensor, Tensor]] = []
        mean_row_D = self._mean_row(weight_VD)
        for rows in self.chunks(len(hidden_ND)):
            labels_C = labels_N[rows]
            logits_CV = head_product(hidden_ND[rows], weight_VD, exact=self.exact)
            if self.exact:
                exact_logprobs.append(_exact_logprobs(logits_CV, labels_C, self.temperature))
            summed_KC = logits_CV.new_empty(0, len(labels_C), dtype=torch.float32)
            if at_ids_NK is not None:
                summed_KC = self._scaled_at(logits_CV, at_ids_NK[rows]).T
            if self.with_mean:
                mean_C = self._mean_logits(hidden_ND[rows], mean_row_D, logits_CV)
                summed_KC = torch.cat([mean_C[None], summed_KC])
            if self.top_k:
                top.append(self._top(logits_CV))
            part_SC = _operations(logits_CV).part_statistics(
                logits_CV,
                labels_C,
                temperature=self.temperature,
                softcap=self.softcap,
                with_entropy=self.with_entropy,
            )
            statistics.append(torch.cat([part_SC, summed_KC]))
            if kept is not None and rows.stop == len(hidden_ND):
                kept.append(logits_CV)
            del logits_CV  # before the next chunk's
        statistics_RSN = torch.cat(statistics, 1)[None]
        if self.ranks.group is not None:
            statistics_RSN = gather_rows(statistics_RSN, self.ranks.group)
        own, mean_R1N, at_RKN = statistics_RSN.tensor_split(
            [3 + self.with_entropy, 3 + self.with_entropy + self.with_mean], 1
        )
        scores = _combine(own)
        if self.with_mean:
            scores = scores._replace(mean_logits=mean_R1N.sum((0, 1)))
        if self.exact:
            scores = scores._replace(logprobs=torch.cat(exact_logprobs))
        if at_ids_NK is not None:
            scores = scores._replace(logprobs_at=at_RKN.sum(0).T - scores.normaliser[:, None])
        if self.top_k:
            top_ids, scaled_NK = self._top_of_ranks(*map(torch.cat, zip(*top, strict=True)))
            logprobs_NK = scaled_NK - scores.normaliser[:, None]
            scores = scores._replace(top_ids=top_ids, top_logprobs=logprobs_NK)
        return scores

    def chunk_gradient(
        self,
        logits_CV: Tensor,
        labels_C: Tensor,
        at: tuple[Tensor, Tensor] | None,
        *,
        dtype: torch.dtype,
        **per_token: Tensor | None,
    ) -> Tensor:
        """Gradient with respect to a chunk's logits, [C, V] in `dtype`.

        `at` are ids and gradients [C, K] of `logprobs_at`; `per_token` are those arguments [C] of
        `logits_gradient`.
        """
        scattered: list[tuple[Tensor, Tensor]] = []
        if at is not None:
            # Each word's own term is scattered; the term that all words share depends only on the
            # sum.
            at_ids_CK, grad_CK = at
            grad_label_C = per_token["grad_logprobs_C"]
            assert grad_label_C is not None
            for ids, grad in ((at_ids_CK, grad_CK), (labels_C[:, None], grad_label_C[:, None])):
                place, is_own = _own_place(ids, logits_CV)
                slope = self._slope(logits_CV.gather(-1, place))
                scattered.append((place, torch.where(is_own, grad * slope, 0.0)))
            per_token["grad_logprobs_C"] = grad_label_C + grad_CK.sum(-1)
            labels_C = torch.full_like(labels_C, -1)
        grad_CV = _operations(logits_CV).logits_gradient(
            logits_CV,
            labels_C,
            **per_token,
            temperature=self.temperature,
            softcap=self.softcap,
            dtype=dtype,
        )
        for place, grad in scattered:
            grad_CV.scatter_add_(-1, place, grad.to(grad_CV.dtype))
        return grad_CV

    def _mean_row(self, weight_VD: Tensor) -> Tensor | None:
        """This rank's share of the mean row of the head, [D]. Its product with a hidden state is
        the mean logit, which saves a pass over the V logits of each token. None where the mean is
        not requested, or where logits are capped, since capping is not linear."""
        if not self.with_mean or self.softcap is not None:
            return None
        wide = accumulation_dtype(weight_VD.dtype)
        return weight_VD.detach().sum(0, dtype=wide) / (self.num_words * self.temperature)

    def _mean_logits(
        self, hidden_CD: Tensor, mean_row_D: Tensor | None, logits_CV: Tensor
    ) -> Tensor:
        """This rank's share of each token's mean of scaled logits, [C]."""
        if mean_row_D is None:
            sum_C = _capped(logits_CV.detach(), self.softcap).sum(-1)
            return sum_C / (self.num_words * self.temperature)
        return hidden_CD.detach().to(mean_row_D.dtype) @ mean_row_D

    def _scaled_at(self, logits_CV: Tensor, ids_CK: Tensor) -> Tensor:
        """Scaled logits [C, K]; 0 for words of other ranks."""
        place, is_own = _own_place(ids_CK, logits_CV)
        scaled_CK = _capped(logits_CV.gather(-1, place), self.softcap) / self.temperature
        return torch.where(is_own, scaled_CK, 0.0)

    def _slope(self, logits_CK: Tensor) -> Tensor:
        """Derivative of the scaled logit with respect to the logit."""
        capped_CK = _capped(logits_CK, self.softcap)
        if self.softcap is None:
            return torch.full_like(capped_CK, 1 / self.temperature)
        return (1 - (capped_CK / self.softcap).square()) / self.temperature

    def _top(self, logits_CV: Tensor) -> tuple[Tensor, Tensor]:
        """The likeliest words of this rank: their ids in the whole vocabulary, and their scaled
        logits."""
        top = logits_CV.topk(min(self.top_k, logits_CV.shape[-1]))
        scaled_CK = _capped(top.values, self.softcap) / self.temperature
        return (top.indices + self.first).int(), scaled_CK

    def _top_of_ranks(self, ids_NK: Tensor, scaled_NK: Tensor) -> tuple[Tensor, Tensor]:
        if self.ranks.group is None:
            return ids_NK, scaled_NK
        ids, scaled = (
            gather_rows(x[None], self.ranks.group).transpose(0, 1).flatten(1)
            for x in (ids_NK, scaled_NK)
        )
        top = scaled.topk(min(self.top_k, scaled.shape[-1]))
        return ids.gather(-1, top.indices), top.values


def _own_place(ids: Tensor, logits_CV: Tensor) -> tuple[Tensor, Tensor]:
    """Column of each id, and whether this rank has it; the column is 0 where it has not."""
    is_own = (ids >= 0) & (ids < logits_CV.shape[-1])
    return ids.where(is_own, 0), is_own


def _exact_logprobs(logits_CV: Tensor, labels_C: Tensor, temperature: float) -> Tensor:
    from hone.models.token_logprobs import token_logprobs  # needs triton, absent on CPUs

    temperatures_C = logits_CV.new_full((len(logits_CV),), temperature)
    return token_logprobs(logits_CV, labels_C, temperatures_C)


def _combine(statistics_RSN: Tensor) -> _Scores:
    """Scores from the statistics of every part of the vocabulary."""
    maximum_RN, mass_RN, label_RN, *moments = statistics_RSN.unbind(1)
    maximum_N = maximum_RN.amax(0)
    distance_RN = maximum_RN - maximum_N
    weight_RN = distance_RN.exp()
    mass_N = (weight_RN * mass_RN).sum(0)
    log_mass_N = mass_N.log()
    logprobs_N = label_RN.sum(0) - maximum_N - log_mass_N
    entropy_N = None
    for moment_RN in moments:
        moment_N = (weight_RN * (moment_RN + distance_RN * mass_RN)).sum(0)
        entropy_N = log_mass_N - moment_N / mass_N
    return _Scores(logprobs_N, entropy_N, None, maximum_N + log_mass_N)


class _Newest(threading.local):
    """The logits that a thread's newest pass has kept for its backward."""

    def __init__(self) -> None:
        self.kept: list[Tensor] = []


_newest = _Newest()


class _ChunkedLogprobs(torch.autograd.Function):
    """Autograd function of `_Head.score`; backward recomputes the logits of all chunks but the
    last."""

    @staticmethod
    def forward(
        ctx: Any,
        head: _Head,
        ids: tuple[Tensor, Tensor | None],
        hidden_ND: Tensor,
        weight_VD: Tensor,
    ) -> tuple[Tensor | None, ...]:
        """`ids` are the labels [N] and other words [N, K]."""
        labels_N, at_ids_NK = ids
        _newest.kept.clear()  # so only one chunk exists, with any number of passes under way
        ctx.kept = _newest.kept = list[Tensor]()  # a saved tensor could not be freed halfway
        scores = head.score(hidden_ND, labels_N, at_ids_NK, weight_VD, ctx.kept)
        ctx.head = head
        ctx.save_for_backward(
            labels_N, at_ids_NK, hidden_ND, weight_VD, scores.entropy, scores.normaliser
        )
        ctx.set_materialize_grads(False)
        constant = (scores.normaliser, scores.mean_logits, scores.top_ids, scores.top_logprobs)
        ctx.mark_non_differentiable(*(x for x in constant if x is not None))
        return (scores.logprobs, scores.entropy, scores.logprobs_at, *constant)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        head: _Head = ctx.head
        labels_N, at_ids_NK, hidden_ND, weight_VD, entropy_N, normaliser_N = ctx.saved_tensors
        grad_logprobs_N, grad_entropy_N, grad_at_NK, *_ = grads
        if grad_logprobs_N is None:
            grad_logprobs_N = torch.zeros_like(normaliser_N)
        *_, needs_hidden, needs_weight = ctx.needs_input_grad

        grad_hidden_ND = torch.empty_like(hidden_ND) if needs_hidden else None
        wide = accumulation_dtype(weight_VD.dtype)
        grad_weight_VD = torch.zeros_like(weight_VD, dtype=wide) if needs_weight else None
        per_token = {
            "normaliser_C": normaliser_N,
            "entropy_C": entropy_N,
            "grad_logprobs_C": grad_logprobs_N,
            "grad_entropy_C": grad_entropy_N,
        }
        for rows in reversed(head.chunks(len(hidden_ND))):
            hidden_CD = hidden_ND[rows]
            if ctx.kept:
                logits_CV = ctx.kept.pop()
            else:
                logits_CV = head_product(hidden_CD, weight_VD, exact=head.exact)
            grad_logits_CV = head.chunk_gradient(
                logits_CV,
                labels_N[rows],
                None if grad_at_NK is None else (at_ids_NK[rows], grad_at_NK[rows]),
                dtype=hidden_CD.dtype,
                **{name: x if x is None else x[rows] for name, x in per_token.items()},
            )
            del logits_CV  # before the next chunk's
            if grad_hidden_ND is not None:
                torch.mm(grad_logits_CV, weight_VD, out=grad_hidden_ND[rows])
            if grad_weight_VD is not None:
                _add_product(grad_weight_VD, grad_logits_CV.T, hidden_CD)
            del grad_logits_CV  # before the next chunk's
        if grad_hidden_ND is not None and head.ranks.size > 1:
            dist.all_reduce(grad_hidden_ND, group=head.ranks.group)
        return None, None, grad_hidden_ND, grad_weight_VD


def _add_product(sum_VD: Tensor, a_VC: Tensor, b_CD: Tensor) -> None:
    """sum += a @ b in the dtype of the sum."""
    if sum_VD.dtype == a_VC.dtype:
        sum_VD.addmm_(a_VC, b_CD)
    elif sum_VD.is_cuda:
        # `addmm` reads and writes the sum itself, which saves a tensor for the product and a pass
        # over both.
        torch.addmm(sum_VD, a_VC, b_CD, out_dtype=sum_VD.dtype, out=sum_VD)
    else:
        sum_VD += a_VC @ b_CD


def part_statistics(
    logits_CV: Tensor,
    labels_C: Tensor,
    *,
    temperature: float,
    softcap: float | None,
    with_entropy: bool,
) -> Tensor:
    """Maximum, mass, label's logit and, with entropy, moment of each row, [S, C].

    A label outside the V columns has a logit of 0.
    """
    scaled_CV = _capped(logits_CV, softcap) / temperature
    maximum_C = scaled_CV.amax(-1)
    num_words = scaled_CV.shape[-1]
    label_C = scaled_CV.gather(-1, labels_C.clamp(0, num_words - 1)[:, None]).squeeze(-1)
    label_C = label_C.where((labels_C >= 0) & (labels_C < num_words), 0.0)
    distance_CV = scaled_CV.sub_(maximum_C[:, None])
    mass_CV = distance_CV.exp()
    statistics = [maximum_C, mass_CV.sum(-1), label_C]
    if with_entropy:
        statistics.append(mass_CV.mul_(distance_CV).sum(-1))
    return torch.stack(statistics)


def logits_gradient(
    logits_CV: Tensor,
    labels_C: Tensor,
    *,
    normaliser_C: Tensor,
    entropy_C: Tensor | None,
    grad_logprobs_C: Tensor,
    grad_entropy_C: Tensor | None,
    temperature: float,
    softcap: float | None,
    dtype: torch.dtype,
) -> Tensor:
    """Gradient with respect to the logits, [C, V] in `dtype`.

    The entropy's gradient is left out where `grad_entropy_C` is None.
    """
    capped_CV = _capped(logits_CV, softcap)
    log_p_CV = capped_CV / temperature - normaliser_C[:, None]
    p_CV = log_p_CV.exp()
    if grad_entropy_C is None or entropy_C is None:
        grad_CV = p_CV.mul_(-grad_logprobs_C[:, None])
    else:
        surprise_CV = log_p_CV.add_(entropy_C[:, None])
        grad_CV = surprise_CV.mul_(-grad_entropy_C[:, None]).sub_(grad_logprobs_C[:, None])
        grad_CV.mul_(p_CV)
    is_own = (labels_C >= 0) & (labels_C < grad_CV.shape[-1])
    place_C = labels_C.where(is_own, 0)
    grad_CV.scatter_add_(-1, place_C[:, None], grad_logprobs_C.where(is_own, 0.0)[:, None])
    grad_CV.div_(temperature)
    if softcap is not None:
        grad_CV.mul_(1 - (capped_CV / softcap).square())
    return grad_CV.to(dtype)


def _capped(logits_CV: Tensor, softcap: float | None) -> Tensor:
    """Logits after the softcap, in float32 or wider."""
    wide_CV = logits_CV.to(accumulation_dtype(logits_CV.dtype))
    return wide_CV if softcap is None else torch.tanh(wide_CV / softcap) * softcap


def _operations(logits_CV: Tensor) -> Any:
    """The module that computes this chunk of logits: Triton's on CUDA, otherwise this one."""
    if logits_CV.is_cuda and logits_CV.dtype == torch.float32:
        from hone.trainer import logprob_kernels  # needs triton, absent on CPUs

        return logprob_kernels
    return sys.modules[__name__]
