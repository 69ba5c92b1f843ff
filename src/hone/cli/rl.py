"""`hone rl RECIPE [--nproc N] [flags]`: reinforcement learning with verifiable rewards."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Unpack

from hone.cli.command import (
    check_here,
    conclude,
    has_nothing_left,
    load_arguments,
    load_checked,
    quiet_transformers,
    require_no_error,
    run_in_processes,
    say_loading,
    take_nproc,
)
from hone.config.rules.finding import Finding
from hone.config.rules.view import Fact, Known
from hone.config.tree import RLConfig
from hone.distributed.address import unreachable
from hone.distributed.processes import processes
from hone.extras import import_extra
from hone.observe.resumed_run import newest_step

if TYPE_CHECKING:
    from hone.loops.run import Outcome

__all__ = ["check", "run", "train"]


def run(argv: Sequence[str]) -> int:
    """Check the recipe, then train. Torch and Ray are loaded only after every check has passed."""
    nproc, arguments = take_nproc(argv)
    cluster, requested_by = load_arguments(RLConfig, arguments)[0].cluster, "--nproc"
    if cluster.is_used and nproc is None and processes().world_size == 1:
        if cluster.num_trainer_nodes > 1:
            return _run_on_nodes(arguments)
        nproc, requested_by = cluster.num_processes, cluster.processes_by
    if nproc is not None and nproc > 1:
        return run_in_processes("rl", RLConfig, arguments, check, nproc, requested_by=requested_by)
    cfg = load_checked(RLConfig, arguments, check)
    if has_nothing_left(cfg):
        return 0
    outcome = train(cfg)
    return conclude(
        cfg.run,
        steps=outcome.steps,
        stopped_by=outcome.stopped_by,
        is_saved=outcome.is_saved,
    )


def _run_on_nodes(arguments: Sequence[str]) -> int:
    """Check the recipe, then start the trainers on nodes of the Ray cluster."""
    cfg, _ = load_arguments(RLConfig, arguments, starts=True)
    require_no_error(check(cfg, cfg.cluster.num_processes))
    if has_nothing_left(cfg):
        return 0
    import_extra("ray", needed_by=cfg.cluster.used_by)
    from hone.distributed.ray_trainers import run_on_nodes

    return run_on_nodes(cfg, arguments, lambda: newest_step(cfg.run.dir))


def train(cfg: RLConfig) -> Outcome:
    """Train in this process with a checked configuration."""
    if cfg.cluster.needs_ray:
        import_extra("ray", needed_by=cfg.cluster.used_by)
    say_loading()
    from hone.loops import reinforce
    from hone.loops.workers import ray_pools, thread_pools
    from hone.tools.report.pages import PAGES

    quiet_transformers()
    pools = ray_pools if cfg.cluster.needs_ray else thread_pools
    return reinforce.run(cfg, pools, pages=PAGES)


def check(cfg: RLConfig, world_size: int, **known: Unpack[Known]) -> list[Finding]:
    """Findings of `hone check`, and whether the cluster of `cluster.address` can be joined, which
    only this host may know. The first process tries it."""
    own, address = processes(), cfg.cluster.address
    if own.local_world_size < own.world_size:
        words = "the number of processes on one node"
        known["num_trainers_here"] = Fact(own.local_world_size, words)
    found = check_here(cfg, world_size, **known)
    is_wrong = any(finding.level == "error" for finding in found)
    if is_wrong or address is None or not cfg.cluster.is_used or own.rank > 0:
        return found
    reason = unreachable(address)
    return found if reason is None else [Finding("error", ("cluster.address",), reason), *found]
