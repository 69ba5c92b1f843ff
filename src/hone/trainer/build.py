"""Assembly of a trainer's components from its settings.

Each choice is made once, here. Modules of features that are off are not imported.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from transformers import PreTrainedModel

from hone.distributed.mesh import Mesh
from hone.trainer.attempts import Attempts
from hone.trainer.parallel_model import ParallelModel
from hone.trainer.policy import BasePolicy
from hone.trainer.settings import SFTTrainerConfig

__all__ = ["attempts", "frozen_model", "trained_model"]


def attempts(
    cfg: SFTTrainerConfig,
    mesh: Mesh,
    *,
    role: str,
    folder: Path | None = None,
    on_exhausted: Callable[[], str] | None = None,
) -> Attempts:
    """The policy for out-of-memory errors in passes of `role`: retry with smaller passes where a
    `folder` for notes or `on_exhausted` is given, otherwise run each pass once. Arguments as of
    `hone.trainer.out_of_memory.Repair`. Collective."""
    if folder is None and on_exhausted is None:
        return Attempts(cfg, role=role)
    from hone.trainer.out_of_memory import Repair

    return Repair(cfg, mesh, role=role, folder=folder, on_exhausted=on_exhausted)


def frozen_model(
    module: PreTrainedModel,
    cfg: SFTTrainerConfig,
    mesh: Mesh,
    *,
    temperature: float = 1.0,
    exact: bool = False,
    top_k: int = 1,
) -> ParallelModel:
    """A model that is only scored; several processes keep shards of it over their own mesh,
    `mesh.for_reference`. It computes exactly as the policy does: otherwise the policy would have a
    divergence from a copy of itself. Arguments as of `ParallelModel`; `module` is changed in
    place."""
    module.requires_grad_(False)
    kind = _distributed() if mesh.world.size > 1 else ParallelModel
    model = kind(module, cfg, mesh, temperature=temperature, exact=exact, top_k=top_k)
    model.freeze()
    return model


def trained_model(
    module: PreTrainedModel,
    cfg: SFTTrainerConfig,
    mesh: Mesh,
    *,
    temperature: float = 1.0,
    exact: bool = False,
    replays_routes: bool = False,
) -> tuple[ParallelModel, BasePolicy]:
    """The model in training, and its weights: masters and gradients. Arguments as of
    `ParallelModel`; `module` is changed in place."""
    if mesh.pipeline.size > 1:
        from hone.trainer.pipeline_model import PipelineModel

        kind = PipelineModel
    else:
        kind = _distributed() if mesh.world.size > 1 else ParallelModel
    model = kind(
        module,
        cfg,
        mesh,
        temperature=temperature,
        exact=exact,
        replays_routes=replays_routes,
    )
    return model, model.train()


def _distributed() -> type[ParallelModel]:
    """The class for a model that several processes share, imported only where it is needed."""
    from hone.trainer.distributed_model import DistributedModel

    return DistributedModel
