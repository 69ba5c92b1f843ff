"""The algorithm that a configuration asks for."""

from __future__ import annotations

from typing import Any

from hone.algorithms.algorithm import Algorithm
from hone.algorithms.distillation import Distillation, DivergingFromTeacher
from hone.algorithms.grpo import GRPO
from hone.algorithms.ppo import PPO
from hone.algorithms.preferences.dpo import DPO
from hone.algorithms.preferences.kto import KTO
from hone.algorithms.preferences.reward_model import RewardModeling
from hone.algorithms.sft import SFT
from hone.config.tree import DPOConfig, RewardModelingConfig, RLConfig, SFTConfig

__all__ = ["algorithm_of"]


def algorithm_of(cfg: RLConfig | SFTConfig, *, pad_id: int | None = None) -> Algorithm[Any]:
    """The algorithm of a training command; each command collects items of its own type. `pad_id` is
    the tokenizer's padding token: a reward model gives its value at the last token before it."""
    if isinstance(cfg, RewardModelingConfig):
        return RewardModeling(cfg.algorithm, pad_id=pad_id)
    if isinstance(cfg, DPOConfig):
        if cfg.algorithm.is_unpaired:
            return KTO(cfg.algorithm, max_tokens=cfg.data.max_tokens)
        return DPO(cfg.algorithm)
    if isinstance(cfg, SFTConfig):
        return SFT()
    longest = cfg.rollout.max_completion_tokens
    if cfg.algorithm.needs_critic:
        return PPO(cfg.algorithm, cfg.critic, max_completion_tokens=longest)
    if cfg.teacher.path is not None:
        is_sampled = cfg.teacher.loss == "policy_gradient"
        make = Distillation if is_sampled else DivergingFromTeacher
        return make(cfg.algorithm, cfg.teacher, max_completion_tokens=longest)
    return GRPO(cfg.algorithm, max_completion_tokens=longest)
