"""What peers train with. Packages that they import beside it are stand-ins."""

from __future__ import annotations

import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

# TRL looks for vLLM, so it comes before the stand-ins.
from trl.experimental.cpo.cpo_trainer import CPOTrainer
from trl.experimental.gkd.gkd_trainer import GKDTrainer
from trl.experimental.orpo.orpo_trainer import ORPOTrainer
from trl.trainer.dpo_trainer import DPOTrainer
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.kto_trainer import KTOTrainer
from trl.trainer.reward_trainer import RewardTrainer


class _StandIns(MetaPathFinder, Loader):
    """Packages that peers import beside what is compared."""

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        is_one = fullname.partition(".")[0] in {"vllm", "deepspeed", "flash_attn"}
        return ModuleSpec(fullname, self, is_package=True) if is_one else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = ModuleType(spec.name)
        module.__getattr__ = lambda name: MagicMock(name=name)  # type: ignore[method-assign]
        return module

    def exec_module(self, module: ModuleType) -> None:
        pass


sys.meta_path.append(_StandIns())
from openrlhf.models import loss as openrlhf  # noqa: E402
from openrlhf.models.utils import compute_approx_kl  # noqa: E402
from openrlhf.trainer.ppo_utils.experience_maker import RemoteExperienceMaker  # noqa: E402
from verl.trainer.ppo import core_algos as verl  # noqa: E402
from verl.trainer.ppo.metric_utils import compute_data_metrics  # noqa: E402
from verl.workers.config import ActorConfig  # noqa: E402

__all__ = [
    "ActorConfig",
    "CPOTrainer",
    "DPOTrainer",
    "GKDTrainer",
    "GRPOTrainer",
    "KTOTrainer",
    "ORPOTrainer",
    "RemoteExperienceMaker",
    "RewardTrainer",
    "compute_approx_kl",
    "compute_data_metrics",
    "openrlhf",
    "verl",
]
