"""hone: post-training of language models by reinforcement learning.

    import hone

    def correct(completion: str, answer: str) -> float:
        return float(completion.strip() == answer)

    result = hone.rl("mine.yaml", reward=correct, run={"steps": 100})
    result.metrics[-1]["reward/mean"]

`rl`, `sft`, `dpo`, `reward_model`, `evaluate`, `generate` and `check` are the commands of the
command line, in this process. What a user can get wrong raises `UserError`. Nothing heavy is loaded
before it is needed.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from hone.version import __version__

if TYPE_CHECKING:
    from hone.api import (
        Check,
        DPOConfig,
        EvaluateConfig,
        Evaluation,
        GenerateConfig,
        RewardModelingConfig,
        RLConfig,
        RunResult,
        SampleRecord,
        SFTConfig,
        UserError,
        check,
        dpo,
        evaluate,
        generate,
        reward_model,
        rl,
        sft,
    )

__all__ = [
    "Check",
    "DPOConfig",
    "EvaluateConfig",
    "Evaluation",
    "GenerateConfig",
    "RLConfig",
    "RewardModelingConfig",
    "RunResult",
    "SFTConfig",
    "SampleRecord",
    "UserError",
    "__version__",
    "check",
    "dpo",
    "evaluate",
    "generate",
    "reward_model",
    "rl",
    "sft",
]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("hone.api"), name)
    raise AttributeError(f"module 'hone' has no attribute '{name}'")


def __dir__() -> list[str]:
    return __all__
