"""Losses of pairs: pure functions, one value for each pair, and KTO's of single completions. The
names of the losses, and which keys act on each, stand in `hone.algorithms.settings`.

A score is the log-probability of a completion, summed over its tokens, less the reference's:
`log pi(y|x) - log ref(y|x)`; beta times it is the implicit reward. Names, values and defaults are
those of TRL 1.16 (`DPOTrainer`, `CPOTrainer`, `ORPOTrainer`) except where a docstring says so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from hone.algorithms.settings import PreferenceConfig

__all__ = ["LOSSES", "SFT_WEIGHT", "Pairs", "kto", "log_odds_of_chosen"]

DISCOPOP_TAU = 0.05
"""Temperature of the blend, as in the paper."""
SFT_WEIGHT: Mapping[str, float] = {"sft": 1.0, "cpo": 1.0, "orpo": 1.0}
"""Losses that include the cross-entropy of the chosen completions, with its weight. It is the mean
over the chosen tokens of an optimizer step, so `PairObjective` adds it."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """U pairs, [U] float each."""

    chosen: Tensor  # log-probabilities, summed over the tokens of the completion
    rejected: Tensor
    reference_chosen: Tensor  # 0 where the loss has no reference
    reference_rejected: Tensor
    num_chosen: Tensor  # tokens
    num_rejected: Tensor

    @property
    def chosen_scores(self) -> Tensor:
        return self.chosen - self.reference_chosen

    @property
    def rejected_scores(self) -> Tensor:
        return self.rejected - self.reference_rejected

    @property
    def delta(self) -> Tensor:
        """Score of the chosen less that of the rejected."""
        return self.chosen_scores - self.rejected_scores


def sigmoid(pairs: Pairs, cfg: PreferenceConfig) -> Tensor:
    """DPO, arXiv:2305.18290; with `label_smoothing` conservative DPO
    (https://ericmitchell.ai/cdpo.pdf), which TRL's `sigmoid` no longer has."""
    return _smoothed(cfg.beta * pairs.delta, cfg)


def hinge(pairs: Pairs, cfg: PreferenceConfig) -> Tensor:
    """SLiC, arXiv:2305.10425, on normalised likelihoods as in RSO, arXiv:2309.06657."""
    return torch.relu(1 - cfg.beta * pairs.delta)


def ipo(pairs: Pairs, cfg: PreferenceConfig) -> Tensor:
    """IPO, arXiv:2310.12036, eq. 17. Scores are means over tokens, as in TRL and as its authors
    advise; OpenRLHF uses sums."""
    delta = pairs.chosen_scores / pairs.num_chosen - pairs.rejected_scores / pairs.num_rejected
    return (delta - 1 / (2 * cfg.beta)) ** 2


def exo_pair(pairs: Pairs, cfg: PreferenceConfig) -> Tensor:
    """EXO, arXiv:2402.00856, eq. 16: the reverse KL divergence of the model's preferences from the
    smoothed labels."""
    epsilon = torch.tensor(cfg.label_smoothing, dtype=pairs.delta.dtype)
    logits = cfg.beta * pairs.delta
    right = torch.sigmoid(logits) * (F.logsigmoid(logits) - torch.log1p(-epsilon))
    return right + torch.sigmoid(-logits) * (F.logsigmoid(-logits) - torch.log(epsilon))


def nca_pair(pairs: Pairs, cfg: PreferenceConfig) -> Tensor:
    """NCA, arXiv:2402.05369: each implicit reward is compared with zero, which keeps that of the
    chosen completion from falling."""
    chosen, rejected = cfg.beta * pairs.chosen_scores, cfg.beta * pairs.rejected_scores
    return -F.logsigmoid(chosen) - 0.5 * F.logsigmoid(-chosen) - 0.5 * F.logsigmoid(-rejected)


def robust(pairs: Pairs, cfg: PreferenceConfig) -> Tensor:
    """Robust DPO, arXiv:2403.00409: unbiased where each label is wrong with the probability
    `label_smoothing`."""
    logits, flipped = cfg.beta * pairs.delta, cfg.label_smoothing
    clean = -(1 - flipped) * F.logsigmoid(logits)
    return (clean + flipped * F.logsigmoid(-logits)) / (1 - 2 * flipped)


def bco_pair(pairs: Pairs, cfg: PreferenceConfig) -> Tensor:
    """BCO on pairs, arXiv:2404.04656, without the moving mean of rewards, as in TRL."""
    chosen, rejected = cfg.beta * pairs.chosen_scores, cfg.beta * pairs.rejected_scores
    return -F.logsigmoid(chosen) - F.logsigmoid(-rejected)


def sppo_hard(pairs: Pairs, cfg: PreferenceConfig) -> Tensor:
    """SPPO, arXiv:2405.00675, eq. 4.7 with probabilities 1 and 0."""
    return (pairs.chosen_scores - 0.5 / cfg.beta) ** 2 + (
        pairs.rejected_scores + 0.5 / cfg.beta
    ) ** 2


def apo_zero(pairs: Pairs, cfg: PreferenceConfig) -> Tensor:
    """APO-zero, arXiv:2408.06266, eq. 7: for chosen completions better than the model's own."""
    chosen = 1 - torch.sigmoid(cfg.beta * pairs.chosen_scores)
    return chosen + torch.sigmoid(cfg.beta * pairs.rejected_scores)


def apo_down(pairs: Pairs, cfg: PreferenceConfig) -> Tensor:
    """APO-down, arXiv:2408.06266, eq. 8: for chosen completions worse than the model's own."""
    chosen = torch.sigmoid(cfg.beta * pairs.chosen_scores)
    return chosen + 1 - torch.sigmoid(cfg.beta * pairs.delta)


def discopop(pairs: Pairs, cfg: PreferenceConfig) -> Tensor:
    """DiscoPOP, arXiv:2406.08414, eq. 5: the logistic and the exponential loss, blended with a
    share that the logits set."""
    logits = cfg.beta * pairs.delta
    share = torch.sigmoid(logits / DISCOPOP_TAU)
    return -F.logsigmoid(logits) * (1 - share) + torch.exp(-logits) * share


def cpo(pairs: Pairs, cfg: PreferenceConfig) -> Tensor:
    """CPO, arXiv:2401.08417: DPO with a uniform reference, plus the cross-entropy of the chosen
    completion (`SFT_WEIGHT`)."""
    return _smoothed(cfg.beta * (pairs.chosen - pairs.rejected), cfg)


def simpo(pairs: Pairs, cfg: PreferenceConfig) -> Tensor:
    """SimPO, arXiv:2405.14734: mean log-probabilities and a margin between rewards. TRL adds the
    cross-entropy of the chosen completion by default; here that is `{simpo: 1, sft: 1}`."""
    delta = pairs.chosen / pairs.num_chosen - pairs.rejected / pairs.num_rejected
    return _smoothed(cfg.beta * delta - cfg.simpo_gamma, cfg)


def orpo(pairs: Pairs, cfg: PreferenceConfig) -> Tensor:
    """ORPO, arXiv:2403.07691: beta times the odds-ratio term, plus the cross-entropy of the chosen
    completion (`SFT_WEIGHT`), in which TRL also includes the prompt's tokens."""
    return -cfg.beta * F.logsigmoid(log_odds_of_chosen(pairs))


def log_odds_of_chosen(pairs: Pairs) -> Tensor:
    """Log of the odds of the chosen over those of the rejected, by mean log-probabilities, [U]."""
    chosen, rejected = pairs.chosen / pairs.num_chosen, pairs.rejected / pairs.num_rejected
    return _log_odds(chosen) - _log_odds(rejected)


def sft(pairs: Pairs, cfg: PreferenceConfig) -> Tensor:
    """Zeros: the loss is only the cross-entropy of the chosen completion (`SFT_WEIGHT`)."""
    del cfg
    return torch.zeros_like(pairs.chosen)


def kto(scores: Tensor, is_desirable: Tensor, divergence: Tensor, cfg: PreferenceConfig) -> Tensor:
    """KTO, arXiv:2402.01306, of S completions: `1 - sigmoid(beta (score - divergence))` for a
    desirable one, `1 - sigmoid(beta (divergence - score))` for an undesirable one. All [S].

    `divergence` estimates the KL divergence of the policy from the reference: the mean score of
    prompts that are paired with completions of other prompts, and 0 where that is negative.
    """
    sign = 2 * is_desirable.to(scores.dtype) - 1
    desirable, undesirable = cfg.desirable_weight, cfg.undesirable_weight
    weights = torch.where(
        is_desirable, scores.new_tensor(desirable), scores.new_tensor(undesirable)
    )
    return weights * (1 - torch.sigmoid(cfg.beta * sign * (scores - divergence)))


def _smoothed(logits: Tensor, cfg: PreferenceConfig) -> Tensor:
    flipped = cfg.label_smoothing
    return -(1 - flipped) * F.logsigmoid(logits) - flipped * F.logsigmoid(-logits)


def _log_odds(logprobs: Tensor) -> Tensor:
    """`log(p / (1 - p))`. It is infinite at p = 1, where the largest float below is used
    instead."""
    below = torch.clamp(logprobs, max=-torch.finfo(logprobs.dtype).tiny)
    return below - torch.log(-torch.expm1(below))


LOSSES: Mapping[str, Callable[[Pairs, PreferenceConfig], Tensor]] = {
    "sigmoid": sigmoid,
    "hinge": hinge,
    "ipo": ipo,
    "exo_pair": exo_pair,
    "nca_pair": nca_pair,
    "robust": robust,
    "bco_pair": bco_pair,
    "sppo_hard": sppo_hard,
    "apo_zero": apo_zero,
    "apo_down": apo_down,
    "discopop": discopop,
    "cpo": cpo,
    "simpo": simpo,
    "orpo": orpo,
    "sft": sft,
}
