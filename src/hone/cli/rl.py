"""`hone rl RECIPE [--nproc N] [flags]`: reinforcement learning with verifiable rewards."""

from __future__ import annotations

from collections.abc import Sequence

from hone.cli.command import (
    check_rl_here,
    conclude,
    load_arguments,
    load_checked,
    quiet_transformers,
    run_in_processes,
    take_nproc,
)
from hone.config.extras import import_extra
from hone.config.tree import RLConfig
from hone.distributed.processes import processes

__all__ = ["run"]


def run(argv: Sequence[str]) -> int:
    """Check the recipe, then train. Torch is loaded only after every check has passed."""
    nproc, arguments = take_nproc(argv)
    cluster = load_arguments(RLConfig, arguments).cluster
    if cluster.is_used:
        needed_by = "cluster.num_engines" if cluster.num_engines else "cluster.num_references"
        import_extra("ray", install="hone-rl[ray]", needed_by=needed_by)
        if nproc is None and processes().world_size == 1:
            nproc = cluster.num_trainers
    if nproc is not None and nproc > 1:
        return run_in_processes("rl", RLConfig, arguments, check_rl_here, nproc)
    cfg = load_checked(RLConfig, arguments, check_rl_here)
    make_engines = None
    if cfg.cluster.is_used:
        from hone.cluster.engines import make_engines
    from hone.loops import reinforce

    quiet_transformers()
    outcome = reinforce.run(cfg, make_engines)
    return conclude(cfg.run, steps=outcome.steps, interrupted=outcome.interrupted)
