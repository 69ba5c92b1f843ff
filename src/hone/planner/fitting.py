"""Whether a run of `hone rl` fits into a GPU, and what would make it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from hone.config.base import Section
from hone.config.hardware import Peaks
from hone.config.model_facts import ModelFacts
from hone.config.plan import Devices, resolve
from hone.config.rules import Finding, findings
from hone.config.tree import RLConfig, SFTConfig
from hone.families.shape import ModelShape
from hone.planner.host_memory import LEAST_LENGTH_SHARE, HostRole, host_roles, shortage
from hone.planner.run_memory import RunMemory

__all__ = ["check_host_fits", "check_run_memory"]

_GIB = 1 << 30
_LAST_RESORT = ("trainer.parallel.zero_stage", "model.lora.rank")
S = TypeVar("S", bound=Section)
C = TypeVar("C", bound=RLConfig | SFTConfig)


def check_run_memory(
    cfg: RLConfig, shape: ModelShape, *, world_size: int, gpu: Peaks
) -> Iterator[Finding]:
    """Whether every phase fits the memory of `gpu`. Raises UserError as `AxisSizes.of` does."""
    if gpu.memory_gib is None or cfg.run.device == "cpu":
        return
    fit = _Fit(shape, world_size, gpu)
    if not fit.excess(cfg):
        return
    changes = _remedies(cfg, fit)
    keys = dict.fromkeys(key for change in changes for key in change)
    lack = _lack(RunMemory(cfg, shape, world_size, gpu), gpu)
    yield Finding("error", tuple(keys or _LAST_RESORT), f"{lack} {_remedy(changes)}")


def check_host_fits(
    cfg: RLConfig | SFTConfig,
    shape: ModelShape,
    *,
    world_size: int | None,
    num_local: int,
    available: int,
) -> Iterator[Finding]:
    """Whether `available` bytes of this host's memory hold a training run, `num_local` of whose
    `world_size` trainers are here: an error where even short rows do not fit, a warning where rows
    of full length do not. Raises UserError as `AxisSizes.of` does."""

    def roles(cfg: RLConfig | SFTConfig, *, at_least: bool) -> list[HostRole]:
        return host_roles(cfg, shape, world_size=world_size, num_local=num_local, at_least=at_least)

    def lack(*, at_least: bool) -> Finding | None:
        takes = (
            f"with rows of 1/{LEAST_LENGTH_SHARE} of full length on average the run takes at least"
            if at_least
            else "with rows of full length the run takes"
        )
        if cfg.run.device != "cpu":
            advice, keys = _OFFLOAD_LESS, tuple(_offloads(cfg))
        else:
            fits = lambda cfg: _total(roles(cfg, at_least=at_least)) <= available  # noqa: E731
            advice, keys = _host_remedy(cfg, fits)
        return shortage(
            roles(cfg, at_least=at_least),
            available=available,
            takes=takes,
            advice=advice,
            keys=keys,
        )

    if found := lack(at_least=True):
        yield found
    elif found := lack(at_least=False):
        yield replace(found, level="warning")


_OFFLOAD_LESS = (
    "Offload less (trainer.offload_optimizer and what builds on it, trainer.offload_activations, "
    "trainer.enable_sleep), or start fewer processes on this host."
)


def _total(roles: Sequence[HostRole]) -> int:
    return sum(role.num_bytes for role in roles)


def _offloads(cfg: RLConfig | SFTConfig) -> Iterator[str]:
    for name in ("offload_optimizer", "offload_activations", "enable_sleep"):
        if getattr(cfg.trainer, name, False):
            yield f"trainer.{name}"


def _host_remedy(
    cfg: RLConfig | SFTConfig, fits: Callable[[RLConfig | SFTConfig], bool]
) -> tuple[str, tuple[str, ...]]:
    """What makes a run on a CPU fit, in words, and the keys: each change that does by itself, else
    all together."""
    candidates = [*_host_candidates(cfg)]
    found = [change for change in candidates if fits(_changed(cfg, change))]
    if not found:
        together = {key: value for change in candidates for key, value in change.items()}
        found = [together] if together and fits(_changed(cfg, together)) else []
    if found:
        # Of several budgets the first is the largest that fits.
        first = {tuple(change): change for change in reversed(found)}
        kept = [*reversed(first.values())]
        return _remedy(kept), tuple(dict.fromkeys(key for change in kept for key in change))
    return (
        "No setting is enough: take a smaller model (model.path), fewer processes, or a host with "
        "more memory or a GPU.",
        ("model.path",),
    )


def _host_candidates(cfg: RLConfig | SFTConfig) -> Iterator[dict[str, Any]]:
    trainer = cfg.trainer
    longest = (
        cfg.data.max_tokens
        if isinstance(cfg, SFTConfig)
        else cfg.data.max_prompt_tokens + cfg.rollout.max_completion_tokens
    )
    if trainer.recompute != "full" and not trainer.recompute_every_n_layers > 1:
        yield {"trainer.recompute": "full"}
    budget = trainer.max_tokens_per_microbatch // 2
    while trainer.micro_batch_size is None and budget >= longest:
        yield {"trainer.max_tokens_per_microbatch": budget}
        budget //= 2
    if trainer.optimizer.state_dtype != "bfloat16" and trainer.optimizer.name == "adamw":
        yield {"trainer.optimizer.state_dtype": "bfloat16"}
    if not cfg.model.lora.rank:
        yield {"model.lora.rank": 16}


def _lack(run: RunMemory, gpu: Peaks) -> str:
    """What does not fit, and what it consists of."""
    limit, phases = (gpu.memory_gib or 0) * _GIB, run.phases()
    over = [phase for phase in phases if phase.num_bytes > limit]
    told = ""
    if over:
        others = [phase for phase in phases if phase not in over]
        told = (
            f"by prediction the run does not fit into the {gpu.memory_gib} GiB of a GPU "
            f"({gpu.name}): {_listed([f'{x.title} takes {x.in_words()}' for x in over])}"
        )
        fitting = [f"{x.title} {x.in_words()}" for x in others]
        told += f"; {_listed(fitting)} would fit." if fitting else "."
    if run.lacks_room_for_one:
        told += (
            f"{' ' * bool(told)}By prediction the KV cache has {run.cache_gib:.2f} GiB, and one "
            f"sequence of {run.max_model_len} tokens (engine.max_model_len) takes "
            f"{run.sequence_gib:.2f}."
        )
    return told


def _remedy(changes: list[dict[str, Any]]) -> str:
    told = [
        _listed([f"{key} to {str(change[key]).lower()}" for key in change]) for change in changes
    ]
    match told:
        case []:
            return (
                "No other setting makes enough room: train on more devices (--nproc, with "
                "trainer.parallel.zero_stage 3), adapters alone (model.lora.rank), or a smaller "
                "model."
            )
        case [only]:
            return f"Set {only}."
        case _:
            return f"Set one of these: {'; '.join(told)}."


def _listed(words: list[str]) -> str:
    return " and ".join([*([", ".join(words[:-1])] if words[:-1] else []), *words[-1:]])


@dataclass(frozen=True, slots=True)
class _Fit:
    """How far a configuration is from fitting."""

    shape: ModelShape
    world_size: int
    gpu: Peaks

    def excess(self, cfg: RLConfig) -> int:
        """Bytes that are lacking, over all phases; 0 where all fit and the engine starts."""
        run = RunMemory(cfg, self.shape, self.world_size, self.gpu)
        limit = (self.gpu.memory_gib or 0) * _GIB
        too_much = sum(max(phase.num_bytes - limit, 0) for phase in run.phases())
        missing = (run.sequence_bytes or 0) - (run.cache or 0) if run.lacks_room_for_one else 0
        return too_much + missing

    def other_cache(self, cfg: RLConfig) -> dict[str, Any] | None:
        """The cache that fits and is nearest to the configured one, by its key; None: none is."""
        engine = cfg.engine
        if engine.kv_cache_gib is not None:
            key, now = "engine.kv_cache_gib", engine.kv_cache_gib
            sizes = {round(now * n / 100, 1) for n in range(1, 201)} - {0.0}
        else:
            key, now = "engine.gpu_memory_utilization", engine.gpu_memory_utilization
            sizes = {n / 100 for n in range(1, 96)}
        nearest = sorted(sizes, key=lambda size: abs(size - now))
        return next(
            ({key: size} for size in nearest if not self.excess(_changed(cfg, {key: size}))), None
        )


def _remedies(cfg: RLConfig, fit: _Fit) -> list[dict[str, Any]]:
    """Each single change that makes the run fit, the cheapest first; else several that do together.

    The order is that of benchmarks/memory.md, by time a GiB.
    """
    known = _errors(cfg, fit.world_size)

    def is_served(change: Mapping[str, Any]) -> bool:
        return _errors(_changed(cfg, change), fit.world_size) <= known

    singles = [change for change in _candidates(cfg) if is_served(change)]
    found = [change for change in singles if not fit.excess(_changed(cfg, change))]
    if cache := fit.other_cache(cfg):
        found.insert(0, cache)
    if found:
        return found
    together: dict[str, Any] = {}
    for change in singles:
        further = together | change
        before, after = _changed(cfg, together), _changed(cfg, further)
        if fit.excess(after) >= fit.excess(before) or not is_served(further):
            continue
        together = further
        if not fit.excess(after):
            return [_without_needless(cfg, together, fit)]
        if cache := fit.other_cache(after):
            return [_without_needless(cfg, together | cache, fit)]
    return []


def _without_needless(cfg: RLConfig, change: dict[str, Any], fit: _Fit) -> dict[str, Any]:
    for key in change:
        fewer = {other: change[other] for other in change if other != key}
        if not fit.excess(_changed(cfg, fewer)):
            return _without_needless(cfg, fewer, fit)
    return change


def _candidates(cfg: RLConfig) -> Iterator[dict[str, Any]]:
    trainer = cfg.trainer
    if cfg.cluster.num_references:
        yield {"cluster.num_references": 0}
    yield {"engine.max_model_len": cfg.data.max_prompt_tokens + cfg.rollout.max_completion_tokens}
    yield {"engine.enable_sleep": True}
    yield {"trainer.optimizer.state_dtype": "bfloat16"}
    yield {"trainer.parallel.zero_stage": 3}
    yield {"trainer.max_tokens_per_microbatch": trainer.max_tokens_per_microbatch // 2}
    yield {"trainer.enable_sleep": True}
    yield {"trainer.offload_optimizer": True}
    yield {"trainer.recompute": "full"}


def _errors(cfg: RLConfig, world_size: int) -> set[Finding]:
    plan = resolve(cfg, ModelFacts.known(cfg.model.path), Devices(), world_size=world_size)
    return {finding for finding in findings(plan) if finding.level == "error"}


def _changed(cfg: C, change: Mapping[str, Any]) -> C:
    for key, value in change.items():
        cfg = _replaced(cfg, key.split("."), value)
    return cfg


def _replaced(section: S, path: list[str], value: Any) -> S:
    name, *inner = path
    if inner:
        value = _replaced(getattr(section, name), inner, value)
    return section.model_copy(update={name: value})
