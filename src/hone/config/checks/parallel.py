"""Checks on several processes: sizes of the axes against their number, the model, each other."""

from __future__ import annotations

from collections.abc import Iterator

from hone.config.checks.context import check_ulysses
from hone.config.checks.finding import Finding, differs, error, warning
from hone.config.errors import UserError
from hone.config.model import ModelConfig
from hone.config.model_facts import ModelFacts
from hone.config.parallel import AxisSizes, ParallelConfig
from hone.config.trainer import SFTTrainerConfig

__all__ = [
    "check_context_budget",
    "check_parallel",
    "check_processes",
    "check_share",
    "context_size",
    "replica_size",
]

_SECTION = "trainer.parallel."
_TENSOR = f"{_SECTION}tensor_parallel_size"


def check_parallel(
    trainer: SFTTrainerConfig,
    model: ModelConfig,
    *,
    world_size: int | None,
    facts: ModelFacts | None,
    has_reference: bool,
) -> Iterator[Finding]:
    """Whether `world_size` processes can train as `trainer.parallel` says; None: not known yet."""
    yield from _sizes(trainer.parallel, world_size, has_reference=has_reference)
    yield from _heads(trainer.parallel, facts)
    yield from _exact(model, trainer.parallel, world_size)
    yield from _unused(trainer.parallel, world_size)
    if trainer.offload_optimizer and trainer.optimizer.name == "muon":
        yield error(
            "trainer.optimizer.name is muon, and trainer.offload_optimizer is on: Muon multiplies "
            "whole momentum matrices with themselves in every step, which only the device can do "
            "fast enough. Switch trainer.offload_optimizer off, or use adamw.",
            "trainer.optimizer.name",
            "trainer.offload_optimizer",
        )


def check_processes(
    device: str, nproc: int, *, asked_by: str, num_cores: int, max_gpus: int | None
) -> Iterator[Finding]:
    """Whether this host can serve `nproc` processes; `max_gpus` None: not known, so none is wrong.

    `asked_by`: `--nproc`, or the key that says how many. Only for processes that are about to start
    here: `hone check` plans for other hosts too.
    """
    if device == "cuda" or (device == "auto" and max_gpus != 0):
        allowed = max_gpus
        has = f"each process takes a GPU, and this host has {max_gpus or 'none'}"
    else:
        allowed, no_gpu = num_cores, " and no GPU" if device == "auto" else ""
        has = f"this host has {num_cores} CPU cores{no_gpu}"
    if allowed is None or nproc <= allowed:
        return
    is_flag = asked_by == "--nproc"
    one = "Leave out --nproc" if is_flag else f"Set {asked_by} to 1"
    if allowed == 0:
        change = f"{one}, and set run.device to cpu"
    elif allowed == 1:
        change = one
    else:
        change = f"Start at most {allowed}" if is_flag else f"Set {asked_by} to at most {allowed}"
    yield error(
        f"{asked_by} is {nproc}, but with run.device {device} {has}. {change}.",
        "run.device",
        *([] if is_flag else [asked_by]),
    )


def context_size(parallel: ParallelConfig) -> int:
    """Processes that share the tokens of a packed row."""
    return parallel.ring_size * parallel.ulysses_size


def replica_size(parallel: ParallelConfig) -> int:
    """Processes that train the same rows together."""
    return context_size(parallel) * parallel.tensor_parallel_size


def check_context_budget(
    trainer: SFTTrainerConfig, *, longest: int, longest_of: str
) -> Iterator[Finding]:
    """Whether rows are long enough to be worth splitting over processes."""
    size, budget = context_size(trainer.parallel), trainer.max_tokens_per_microbatch
    if size == 1 or trainer.micro_batch_size is not None or longest > budget:
        return
    lower = -(-longest // size)
    yield warning(
        f"{_SECTION}ring_size x {_SECTION}ulysses_size = {size} processes share every row, but the "
        f"longest sequence ({longest_of} = {longest} tokens) fits into "
        f"trainer.max_tokens_per_microbatch = {budget} of one device: splitting it costs time and "
        f"saves nothing. Set both sizes to 1, or lower trainer.max_tokens_per_microbatch (with "
        f"them {lower} is enough).",
        f"{_SECTION}ring_size",
        f"{_SECTION}ulysses_size",
        "trainer.max_tokens_per_microbatch",
        *longest_of.split(" + "),
    )


def check_share(
    world_size: int | None, *, key: str, number: int, what: str, together: int = 1
) -> Iterator[Finding]:
    """Whether `number` of something, set by `key`, gives every process some, or every `together`
    of them that work on the same."""
    shares = (world_size or 0) // together
    if number < shares:
        those = "processes" if together == 1 else f"groups of {together} processes"
        yield warning(
            f"{key} is {number}, fewer than the {shares} {those}: {shares - number} of "
            f"them have nothing to {what}. Raise {key} to a multiple of {shares}, or start "
            "fewer processes.",
            key,
        )


def _sizes(
    parallel: ParallelConfig, world_size: int | None, *, has_reference: bool
) -> Iterator[Finding]:
    try:
        sizes = AxisSizes.of(parallel, world_size)
    except UserError as problem:
        yield _in_keys(str(problem))
        return
    ring, ulysses = parallel.reference_ring_size, parallel.reference_ulysses_size
    if ring is None and ulysses is None:
        return
    keys = [f"{_SECTION}{name}" for name in differs(parallel, *_REFERENCE)]
    if not has_reference:
        yield warning(
            f"{' and '.join(keys)} is set, but the trainers have no reference model of their own "
            "(without a KL term there is none; with adapters it is the policy without them; or it "
            "has devices of its own). Remove it.",
            *keys,
        )
        return
    try:
        AxisSizes.of(parallel.for_reference, sizes.world)
    except UserError:
        product = (ring or sizes.ring) * (ulysses or sizes.ulysses) * sizes.tensor
        yield error(
            f"{' x '.join(keys)} make {product} processes a replica of the reference model "
            f"({_TENSOR} {sizes.tensor} included), which does not divide the {sizes.world} "
            "processes. Use sizes whose product does.",
            *keys,
            _TENSOR,
        )


_REFERENCE = ("reference_ring_size", "reference_ulysses_size")


def _in_keys(problem: str) -> Finding:
    """An error with the keys that its text names."""
    names = ("ring_size", "ulysses_size", "tensor_parallel_size", "fsdp_size")
    return error(problem, *(key for name in names if (key := f"{_SECTION}{name}") in problem))


def _heads(parallel: ParallelConfig, facts: ModelFacts | None) -> Iterator[Finding]:
    """Numbers of the model that an axis must divide."""
    size = parallel.tensor_parallel_size
    divided = facts.divided if facts else {}
    uneven = [f"{key} = {number}" for key, number in divided.items() if number % size]
    if uneven:
        yield error(
            f"{_TENSOR} is {size}, which does not divide {', '.join(uneven)} of the model at "
            "model.path. Use a size that does; further processes share rows or tokens.",
            _TENSOR,
            "model.path",
        )
        return
    for name in ("ulysses_size", "reference_ulysses_size"):
        ulysses: int | None = getattr(parallel, name)
        if ulysses is not None:
            yield from check_ulysses(f"{_SECTION}{name}", ulysses, facts, tensor_parallel_size=size)


def _exact(
    model: ModelConfig, parallel: ParallelConfig, world_size: int | None
) -> Iterator[Finding]:
    sizes = [name for name in _MODEL_SIZES if getattr(parallel, name) > 1]
    if not model.exact or not (sizes or (world_size or 1) > 1):
        return
    keys = [f"{_SECTION}{name}" for name in sizes]
    asked = f"{', '.join(keys)} above 1" if keys else f"{world_size} processes"
    yield error(
        f"model.exact is on, which {asked} cannot serve: sums over processes are taken in another "
        "order than the engine's. Set model.exact to false, or run one process with sizes of 1.",
        "model.exact",
        *keys,
    )


_MODEL_SIZES = ("ring_size", "ulysses_size", "tensor_parallel_size")


def _unused(parallel: ParallelConfig, world_size: int | None) -> Iterator[Finding]:
    """Settings without effect."""
    meant = differs(parallel, "zero_stage", "fsdp_size", "forward_prefetch", "balance_data")
    keys = [f"{_SECTION}{name}" for name in meant]
    if world_size == 1 and meant:
        yield warning(
            f"{', '.join(keys)}: set, but one process has nobody to share with. Start several "
            "(--nproc N), or remove it.",
            *keys,
        )
    elif parallel.forward_prefetch and parallel.zero_stage != 3:
        yield warning(
            f"{_SECTION}forward_prefetch is on, but with {_SECTION}zero_stage "
            f"{parallel.zero_stage} no weights are gathered in forward. Set "
            f"{_SECTION}zero_stage to 3, or switch it off.",
            f"{_SECTION}forward_prefetch",
            f"{_SECTION}zero_stage",
        )
