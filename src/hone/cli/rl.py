"""`hone rl RECIPE [--nproc N] [flags]`: reinforcement learning with verifiable rewards."""

from __future__ import annotations

from collections.abc import Sequence

from hone.cli.command import (
    check_here,
    conclude,
    load_arguments,
    load_checked,
    plan_here,
    quiet_transformers,
    run_in_processes,
    take_nproc,
)
from hone.cluster.address import unreachable
from hone.config.extras import import_extra
from hone.config.rules import Fact, Finding, findings
from hone.config.tree import RLConfig
from hone.distributed.processes import processes

__all__ = ["run"]


def run(argv: Sequence[str]) -> int:
    """Check the recipe, then train. Torch and Ray are loaded only after every check has passed."""
    nproc, arguments = take_nproc(argv)
    cluster, asked_by = load_arguments(RLConfig, arguments).cluster, "--nproc"
    if cluster.is_used and nproc is None and processes().world_size == 1:
        nproc, asked_by = cluster.num_trainers, "cluster.num_trainers"
    if nproc is not None and nproc > 1:
        return run_in_processes("rl", RLConfig, arguments, _check, nproc, asked_by=asked_by)
    cfg = load_checked(RLConfig, arguments, _check)
    if cfg.cluster.is_used:
        import_extra("ray", needed_by=cluster.used_by)
        from hone.cluster.pools import ray_pools as make_pools
    else:
        from hone.loops.workers import thread_pools as make_pools
    from hone.loops import reinforce

    quiet_transformers()
    outcome = reinforce.run(cfg, make_pools)
    return conclude(cfg.run, steps=outcome.steps, stopped_by=outcome.stopped_by)


def _check(cfg: RLConfig, world_size: int) -> list[Finding]:
    """What `hone check` says, and whether there is a cluster to join: that may be known here alone.
    The first process joins it."""
    found, address = check_here(cfg, world_size), cfg.cluster.address
    own = processes()
    if own.local_world_size < own.world_size:
        here = Fact(own.local_world_size, "the number of processes on one node")
        here_too = findings(plan_here(cfg, world_size, starts=True), num_trainers_here=here)
        found = list(dict.fromkeys([*here_too, *found]))
    is_wrong = any(finding.level == "error" for finding in found)
    if is_wrong or address is None or not cfg.cluster.is_used or processes().rank > 0:
        return found
    reason = unreachable(address)
    return found if reason is None else [Finding("error", ("cluster.address",), reason), *found]
