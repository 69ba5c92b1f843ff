"""Learning-rate schedules: pure functions of the optimizer step."""

from __future__ import annotations

from math import cos, pi

from hone.trainer.settings import OptimizerConfig

__all__ = ["lr_scale"]


def lr_scale(step: int, cfg: OptimizerConfig, total_steps: int) -> float:
    """Factor on the peak learning rate for optimizer step `step`, counted from 0.

    Warm-up takes `1 / (W + 1), ..., W / (W + 1)`, so that no step is wasted at rate 0 and step W is
    the first at the peak. Decay then runs to `min_lr_ratio`, reached at `total_steps`, where it
    stays.
    """
    warmup = cfg.warmup_steps
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if cfg.schedule == "constant":
        return 1.0
    progress = min((step - warmup) / max(total_steps - warmup, 1), 1.0)
    decay = 1.0 - progress if cfg.schedule == "linear" else 0.5 * (1.0 + cos(pi * progress))
    return cfg.min_lr_ratio + (1.0 - cfg.min_lr_ratio) * decay
