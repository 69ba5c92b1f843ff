"""The frozen reference model without a trainer beside it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

from hone.config.tree import RLConfig
from hone.loops.launch import choose_device
from hone.models.load import check_exact, load_model
from hone.rollout.reference_group import LocalReference, ReferenceGroup
from hone.trainer.scorer import FrozenScorer

__all__ = ["local_references", "make_reference"]


def make_reference(cfg: RLConfig) -> FrozenScorer:
    """The policy before training, whole and frozen on this process's device: of `model.path`, or
    drawn from `run.seed` as the policy was, whatever step the run is at.

    Raises UserError and FileNotFoundError as the model's loader does.
    """
    device = choose_device(cfg.run)
    check_exact(cfg.model, device)
    return FrozenScorer(
        load_model(cfg.model, device=device, seed=cfg.run.seed),
        cfg.trainer,
        temperature=cfg.rollout.temperature,
        exact=cfg.model.exact,
    )


@contextmanager
def local_references(cfg: RLConfig) -> Generator[ReferenceGroup | None]:
    """`cluster.num_references` references in threads of this process, in place of a cluster; None
    where there are none of their own."""
    if not cfg.cluster.num_references:
        yield None
        return

    def start(index: int) -> LocalReference:
        return LocalReference(f"reference {index}", make_reference(cfg))

    group = ReferenceGroup(
        [start(index) for index in range(cfg.cluster.num_references)],
        restart=start,
        timeout_s=cfg.cluster.engine_timeout_s,
        max_restarts=cfg.cluster.max_engine_restarts,
    )
    try:
        yield group
    finally:
        group.close()
