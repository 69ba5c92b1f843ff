"""Group sequence policy optimisation, arXiv:2507.18071."""

from __future__ import annotations

from hone.algorithms.corrections import importance_ratio
from hone.algorithms.policy_loss import LossInputs, LossTerms, clipped_surrogate
from hone.algorithms.sequences import sequence_mean_to_tokens
from hone.config.algorithm import AlgorithmConfig


def loss(inputs: LossInputs, cfg: AlgorithmConfig) -> LossTerms:
    """PPO's surrogate with the sequence's geometric mean ratio
    `exp(mean_t(logprobs - old_logprobs))` in place of each token's. verl lets a token's gradient
    flow through that token alone, which comes to the same where a sample has one advantage."""
    log_ratio = inputs.logprobs - inputs.old_logprobs
    mean = sequence_mean_to_tokens(log_ratio, inputs.sequence_index, inputs.num_sequences)
    return clipped_surrogate(importance_ratio(mean), inputs.advantages, cfg)
