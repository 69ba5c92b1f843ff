"""The checks of `hone simulate`."""

from __future__ import annotations

from collections.abc import Iterator

from hone.config.checks.cluster import check_references
from hone.config.checks.finding import Finding, differs, error, warning
from hone.config.checks.generation import check_output
from hone.config.simulate import GPUS_UNSET
from hone.config.tree import SimulateConfig

__all__ = ["check_simulate"]


def check_simulate(cfg: SimulateConfig, world_size: int) -> list[Finding]:
    """Findings for `hone simulate`, errors first."""
    findings = [*_output(cfg), *_lengths(cfg), *_devices(cfg), *_nodes(cfg)]
    return sorted(findings, key=lambda finding: finding.level)


def _output(cfg: SimulateConfig) -> Iterator[Finding]:
    if cfg.output is None:
        return
    if cfg.output.suffix != ".json":
        yield error(
            f"output is '{cfg.output}'; give the path of a .json file, such as simulate.json. "
            "The plot is written beside it as .svg.",
            "output",
        )
    else:
        yield from check_output(cfg.output)


def _lengths(cfg: SimulateConfig) -> Iterator[Finding]:
    lengths, keys = cfg.simulate.lengths, ("simulate.lengths.path", "simulate.lengths.distribution")
    if lengths.distribution == "file" and lengths.path is None:
        yield error(
            "simulate.lengths.distribution is file; name the file in simulate.lengths.path.", *keys
        )
    elif lengths.distribution != "file" and lengths.path is not None:
        yield warning(
            "simulate.lengths.path has no effect with simulate.lengths.distribution "
            f"{lengths.distribution}; set simulate.lengths.distribution to file, or remove "
            "simulate.lengths.path.",
            *keys,
        )


def _devices(cfg: SimulateConfig) -> Iterator[Finding]:
    """Whether the split of the recipe is one of the GPUs that are asked for."""
    yield from check_references(cfg)
    gpus, roles = cfg.simulate.gpus, cfg.cluster.devices(cfg.engine.tensor_parallel_size)
    num_references, there = cfg.cluster.num_references, gpus or GPUS_UNSET
    if not cfg.cluster.num_engines and num_references >= there:
        yield error(
            f"cluster.num_references is {num_references}, which leaves none of {there} GPUs to "
            "trainers and engines. Raise simulate.gpus, or use fewer.",
            "cluster.num_references",
            "simulate.gpus",
        )
    total = sum(role.number for role in roles)
    if cfg.cluster.num_engines and gpus not in (None, total):
        yield error(
            f"simulate.gpus is {gpus}, but {' + '.join(role.words for role in roles)} = {total} "
            "GPUs. Leave out simulate.gpus, or set cluster.num_engines to 0, which tries all "
            "splits.",
            "simulate.gpus",
            *(key for role in roles for key in role.keys),
        )


def _nodes(cfg: SimulateConfig) -> Iterator[Finding]:
    """A recipe of several hosts has these; there are none in a simulation."""
    keys = [f"cluster.{x}" for x in differs(cfg.cluster, "num_nodes", "devices_per_node")]
    if keys:
        yield warning(
            f"{' and '.join(keys)}: no effect on what is simulated, where any two GPUs are linked "
            "alike, whatever their hosts. How many there are, simulate.gpus says, or with "
            "cluster.num_engines the split.",
            *keys,
        )
