"""Check that a planned run fits the memory of its GPUs and its host, and remedies where it does
not."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from hone.config.base import Section
from hone.config.plan import Role, RunPlan, resolve
from hone.config.roles import MODEL_KEYS
from hone.config.rules.finding import Finding
from hone.config.tree import PlanConfig, RLConfig
from hone.distributed.settings import SCORERS, RoleName
from hone.errors import listed
from hone.hardware import GIB
from hone.planner.host_memory import LEAST_LENGTH_SHARE, HostRole, host_roles, shortage
from hone.planner.knobs import (
    ENGINE_WEIGHTS,
    REMOTE_ENGINES,
    SHARED_ROWS,
    Change,
    cache_sizes,
    gpus_of_a_node,
    host_changes,
    knobs,
    setting,
    two_rows,
)
from hone.planner.margin import UNUSABLE, above_plan
from hone.planner.run_memory import Phase, RunMemory
from hone.rules import findings

__all__ = [
    "changed",
    "check_gpu_memory",
    "check_host_memory",
    "check_margin",
    "does_fit",
    "does_fit_host",
    "errors",
    "exceeds_room",
    "gpu_host_roles",
    "has_room_for_two_rows",
    "keeping_margin",
    "leaves_margin",
    "memory_changes",
    "remedies",
    "rl_config",
    "rounds_differently",
]

_OTHER_WAYS = (
    "trainer.parallel.zero_stage",
    "model.lora.rank",
    "model.path",
    *MODEL_KEYS.values(),
    "cluster.num_engines",
    *(f"cluster.num_{name}s" for name in SCORERS),
)
"""Settings that the message may name where no knob is enough."""
S = TypeVar("S", bound=Section)


def check_gpu_memory(plan: RunPlan) -> Iterator[Finding]:
    """Yield an error where a phase does not fit the memory of the plan's GPU; nothing where that is
    not known."""
    if not _excess(plan):
        return
    changes, more = remedies(plan), ""
    if not changes and (rounded := _rounded_weights(plan)):
        changes = [rounded]
        one = {key: rounded[key] for key in rounded if key.startswith("engine.weight")}
        saved = RunMemory(plan).engine.weights - RunMemory(changed(plan, one)).engine.weights
        more = f" It rounds the weights that sample, and saves {saved / GIB:.1f} GiB of them."
    keys = dict.fromkeys(key for change in changes for key in change)
    message = f"{_lack(RunMemory(plan))} {_remedy(changes, plan)}{more}"
    named = keys or [key for key in _OTHER_WAYS if re.search(rf"(?<![.\w]){key}", message)]
    yield Finding("error", tuple(named), message)


def check_margin(plan: RunPlan) -> Iterator[Finding]:
    """Yield a warning where a run fits its GPU by no more than predictions have been off."""
    if leaves_margin(plan):
        return
    wary, gpu = keeping_margin(plan), plan.devices.gpu
    assert gpu is not None
    phases = [x for x in RunMemory(plan).phases() if x.num_bytes > _room(wary, x)]
    taken = [
        f"{x.title} takes {x.num_bytes / GIB:.1f} GiB, and more than {_room(wary, x) / GIB:.1f} "
        "may be too much"
        for x in phases
    ]
    why = f"a program cannot use up to {UNUSABLE:.0%} of it"
    if above := max(_above_plan(plan, x) for x in phases):
        why += f", and peaks of training were measured up to {above:.0%} above their prediction"
    cheapest = remedies(wary, moves=False)[:1]
    advice = _remedy(cheapest, plan) if cheapest else "No setting that was tried makes more room."
    keys = [key for change in cheapest for key in change] or ["model.path"]
    yield Finding(
        "warning",
        tuple(keys),
        f"by prediction the run hardly fits into the {gpu.memory_gib} GiB of a GPU ({gpu.name}): "
        f"{listed(taken)}, since {why}. {advice}",
    )


def leaves_margin(plan: RunPlan) -> bool:
    """Whether a run does not fit, or fits with more room than predictions have been off; true where
    that is not known."""
    return bool(_excess(plan)) or not _excess(keeping_margin(plan))


def keeping_margin(plan: RunPlan) -> RunPlan:
    """The plan, which fits only where it leaves as much of a GPU free as predictions have been
    off."""
    return replace(plan, devices=replace(plan.devices, keeps_margin=True))


def check_host_memory(plan: RunPlan, *, num_local: int) -> Iterator[Finding]:
    """Check host memory for the `num_local` processes of the run on this host: an error where even
    short rows do not fit, a warning where rows of full length do not."""
    available = plan.devices.host_bytes
    if available is None or plan.shape is None or plan.problem is not None:
        return

    def roles(plan: RunPlan, *, at_least: bool) -> list[HostRole]:
        return host_roles(plan, num_local=num_local, at_least=at_least)

    def lack(*, at_least: bool) -> Finding | None:
        def fits(plan: RunPlan) -> bool:
            return _total(roles(plan, at_least=at_least)) <= available

        if fits(plan):  # saves the search for a remedy, which makes dozens of plans
            return None
        takes = (
            f"with rows of 1/{LEAST_LENGTH_SHARE} of full length on average the run takes at least"
            if at_least
            else "with rows of full length the run takes"
        )
        advice, keys = _host_remedy(plan, fits)
        held = roles(plan, at_least=at_least)
        return shortage(held, available=available, takes=takes, advice=advice, keys=keys)

    if finding := lack(at_least=True):
        yield finding
    elif finding := lack(at_least=False):
        yield replace(finding, level="warning")


def does_fit(plan: RunPlan) -> bool:
    """Whether every phase fits the GPU; true where that is not known."""
    return not _excess(plan)


def exceeds_room(plan: RunPlan, name: str, role: str | None = None) -> bool:
    """Whether a phase with this name (and role) takes more of a GPU whose memory is known than it
    may."""
    phases = [x for x in RunMemory(plan).phases() if x.name == name and role in (None, x.role)]
    return any(phase.num_bytes > _room(plan, phase) for phase in phases)


def does_fit_host(plan: RunPlan) -> bool:
    """Whether a host of a GPU run has room for the state that its processes move there; true where
    that is not known."""
    available = plan.devices.host_bytes
    return available is None or _total(gpu_host_roles(plan)) <= available


def has_room_for_two_rows(plan: RunPlan) -> bool:
    """Whether GPUs and host have room for micro-batches of two of the longest rows; true where that
    is not known."""
    if plan.is_on_cpu or plan.shape is None or plan.problem is not None:
        return True
    if not (change := two_rows(plan)):
        return True
    larger = changed(plan, change)
    return does_fit(larger) and does_fit_host(larger)


def gpu_host_roles(plan: RunPlan) -> list[HostRole]:
    """Host memory that the roles of a GPU run take on its fullest host."""
    world = plan.policy.axes.world
    return host_roles(plan, num_local=min(world, gpus_of_a_node(plan)))


def remedies(plan: RunPlan, *, moves: bool = True) -> list[Change]:
    """Every single change that makes a run fit its GPUs, the cheapest first; if there is none,
    several changes that do so together; empty where nothing helps. With `moves`, engines get
    devices of their own as a last resort."""
    known = errors(plan)

    def is_served(change: Change) -> bool:
        return errors(changed(plan, change)) <= known

    singles = [change for change in memory_changes(plan, moves=moves) if is_served(change)]
    fitting = [change for change in singles if not _excess(changed(plan, change))]
    # Of several values of one key, the first is nearest to the configured one.
    fitting = [*{tuple(change): change for change in reversed(fitting)}.values()][::-1]
    if cache := _fitting_cache(plan):
        fitting.insert(0, cache)
    if fitting:
        return fitting
    for starts in (({}, *SHARED_ROWS.gpu(plan)), [*REMOTE_ENGINES.gpu(plan)] if moves else ()):
        several = [_together(plan, start, is_served) for start in starts]
        pruned = [_without_needless(plan, x, is_served) for x in several if x is not None]
        if pruned:
            return [min(pruned, key=len)]
    return []


def _rounded_weights(plan: RunPlan) -> Change | None:
    """Engines with int8 weights, with the further changes that make the run fit, where rules allow
    it. It is not one of the remedies, because a search must not round the engine's weights."""
    known, cfg, start = errors(plan), plan.config, next(ENGINE_WEIGHTS.gpu(plan), None)
    if start is None:
        return None

    def is_served(change: Change) -> bool:
        return errors(changed(plan, change)) <= known

    change = _together(plan, start, is_served)
    if change is None:
        return None
    change = _without_needless(plan, change, is_served)
    if isinstance(cfg, RLConfig) and cfg.algorithm.correction.kind == "none":
        change = {**change, "algorithm.correction.kind": "tis"}
    return change if is_served(change) else None


def _together(plan: RunPlan, start: Change, is_served: Callable[[Change], bool]) -> Change | None:
    """`start` with the fewest further changes that make the plan fit, each of which saves memory;
    None where none do."""
    together = start
    if not is_served(together):
        return None
    for change in ({}, *memory_changes(changed(plan, start), moves=False)):
        further = {**together, **change}
        before, after = changed(plan, together), changed(plan, further)
        if change and (_excess(after) >= _excess(before) or not is_served(further)):
            continue
        together = further
        if not _excess(after):
            return together
        if cache := _fitting_cache(after):
            return {**together, **cache}
    return None


def changed(plan: RunPlan, change: Change) -> RunPlan:
    """The plan with changed settings on the same devices: devices of remote engines are taken from
    the trainers."""
    cfg = _updated(plan.config, change)
    world_size = plan.world_size
    if isinstance(cfg, RLConfig) and cfg.cluster.is_used:
        world_size = cfg.cluster.num_trainers
    return resolve(cfg, plan.model, plan.devices, world_size=world_size, others=plan.others)


# -- GPUs ----------------------------------------------------------------------------------------


def _excess(plan: RunPlan) -> int:
    """Bytes that are lacking, over all phases; 0 where all phases fit and the engine can start, and
    where that is not known."""
    return sum(_excesses(plan))


def _excesses(plan: RunPlan) -> tuple[int, int]:
    """The bytes that are lacking for the phases, and for a cache with which the engine can
    start."""
    gpu = plan.devices.gpu
    if plan.shape is None or plan.is_on_cpu or gpu is None or plan.problem is not None:
        return 0, 0
    if not gpu.memory_gib:
        return 0, 0
    run = RunMemory(plan)
    too_much = sum(max(phase.num_bytes - _room(plan, phase), 0) for phase in run.phases())
    missing = (run.engine.sequence_bytes or 0) - (run.cache or 0) if run.lacks_room_for_one else 0
    return too_much, missing


def _room(plan: RunPlan, phase: Phase) -> int:
    """Bytes that a phase may take of a GPU whose memory is known."""
    gpu, share = plan.devices.gpu, 0.0
    assert gpu is not None
    if plan.devices.keeps_margin:
        share = UNUSABLE + _above_plan(plan, phase)
    return int((1 - share) * (gpu.memory_gib or 0) * GIB)


def _above_plan(plan: RunPlan, phase: Phase) -> float:
    """Largest share by which a phase was measured above its prediction."""
    if phase.name != "train":
        return 0.0
    return above_plan(plan.roles["critic" if phase.role == "critic" else "policy"].axes.world)


def memory_changes(plan: RunPlan, *, moves: bool = False) -> Iterator[Change]:
    """Single changes that save memory of a GPU, the cheapest first. With `moves`, they include
    changes of the models' devices."""
    for knob in knobs(plan):
        if not knob.is_read_by_name and (moves or not knob.moves_models):
            yield from knob.gpu(plan)


def _fitting_cache(plan: RunPlan) -> Change | None:
    """The cache size that fits and is nearest to the configured one; None where none fits."""
    nearest = [*cache_sizes(plan)]
    if not nearest:
        return None
    by_size = sorted(nearest, key=lambda change: max(change.values()))
    too_much, _ = _excesses(changed(plan, by_size[0]))
    _, missing = _excesses(changed(plan, by_size[-1]))
    if too_much or missing:  # each is least there
        return None
    return next((x for x in nearest if not _excess(changed(plan, x))), None)


def _without_needless(plan: RunPlan, change: Change, is_served: Callable[[Change], bool]) -> Change:
    for key in change:
        fewer = {other: change[other] for other in change if other != key}
        if not _excess(changed(plan, fewer)) and is_served(fewer):
            return _without_needless(plan, fewer, is_served)
    return change


def errors(plan: RunPlan) -> set[Finding]:
    """The rules' errors for this plan, except those about packages that are not installed here. For
    `hone plan` they are those of the `hone rl` that it plans."""
    if isinstance(plan.config, PlanConfig):
        cfg = rl_config(plan.config)
        plan = resolve(
            cfg, plan.model, plan.devices, world_size=plan.world_size, others=plan.others
        )
    return set(findings(plan, level="error", can_install=True))


def rl_config(cfg: PlanConfig) -> RLConfig:
    """The `hone rl` configuration that `cfg` plans."""
    return RLConfig.model_construct(**{name: getattr(cfg, name) for name in RLConfig.model_fields})


def rounds_differently(cfg: RLConfig) -> bool:
    """Whether the number formats of trainers and engines differ."""
    engine = cfg.engine
    is_fp8 = "fp8" in (engine.kv_cache_dtype, cfg.trainer.matmul_precision)
    return engine.weight_dtype == "int8" or is_fp8


def _lack(run: RunMemory) -> str:
    """Text on the phases that do not fit, and their parts."""
    gpu, phases = run.plan.devices.gpu, run.phases()
    assert gpu is not None
    limit = (gpu.memory_gib or 0) * GIB
    over = [phase for phase in phases if phase.num_bytes > limit]
    message = ""
    if over:
        others = [phase for phase in phases if phase not in over]
        message = (
            f"by prediction the run does not fit into the {gpu.memory_gib} GiB of a GPU "
            f"({gpu.name}): {listed([f'{x.title} takes {x.in_words()}' for x in over])}"
        )
        fitting = [f"{x.title} {x.in_words()}" for x in others]
        message += f"; {listed(fitting)} would fit." if fitting else "."
    if run.lacks_room_for_one:
        message += (
            f"{' ' * bool(message)}By prediction the KV cache has {(run.cache or 0) / GIB:.2f} "
            f"GiB, and one sequence of {run.engine.max_length} tokens takes "
            f"{(run.engine.sequence_bytes or 0) / GIB:.2f}."
        )
        if states := run.engine.states:
            message += (
                f" States of recurrent layers take {states / GIB:.2f} GiB beside it, in proportion "
                "to engine.max_num_seqs."
            )
    return message


def _remedy(changes: Sequence[Change], plan: RunPlan) -> str:
    words = [
        listed([f"{key} to {str(change[key]).lower()}" for key in change]) for change in changes
    ]
    match words:
        case []:
            if (role := _too_much(plan)) is not None:
                return _less_of(role, plan)
            return f"No setting that was tried makes it fit: take {_other_ways(plan)}."
        case [only]:
            return f"Set {only}."
        case _:
            return f"Set one of these: {'; '.join(words)}."


def _other_ways(plan: RunPlan) -> str:
    """Text on what makes a run smaller where settings are not enough, as far as it does."""
    frozen = RunMemory(plan).frozen
    models = ["model.path", *(role.path_key for role in plan.scorers if frozen[role.title])]
    ways = [f"a smaller model ({listed([*dict.fromkeys(models)], last='or')})"]
    if plan.trainer is None:
        return ways[0]
    if plan.lora is not None and not plan.lora.rank:
        ways.insert(0, "adapters alone (model.lora.rank)")
    if _excess(_on_more_devices(plan)) < _excess(plan):
        ways.insert(0, "more devices (--nproc, with trainer.parallel.zero_stage 3)")
    *others, last = ways
    return f"{', '.join(others)}, or {last}" if others else last


def _on_more_devices(plan: RunPlan) -> RunPlan:
    """The plan with eight times as many trainers that share the weights."""
    number = 8 * (plan.world_size or 1)
    cfg = _updated(plan.config, {"trainer.parallel.zero_stage": 3})
    if isinstance(cfg, RLConfig) and cfg.cluster.is_used:
        cfg = _updated(cfg, {"cluster.num_trainers": number})
    return resolve(cfg, plan.model, plan.devices, world_size=number, others=plan.others)


def _fits_with_settings(plan: RunPlan) -> bool:
    """Whether a plan fits, as it is or with other settings."""
    return not _excess(plan) or bool(remedies(plan, moves=False))


def _too_much(plan: RunPlan) -> Role | None:
    """The frozen model without which the run would fit; None where there is none."""
    for role in plan.scorers:
        key, value = _ABSENT[role.name]
        is_held = role.aliases_weights_of is None and setting(plan.config, key) is not None
        if is_held and _fits_with_settings(changed(plan, {key: value})):
            return role
    return None


def _less_of(role: Role, plan: RunPlan) -> str:
    """Text on what gives each device less of a frozen model, without which the run would fit."""
    ways = [f"take a smaller one ({role.path_key})"]
    if isinstance(plan.config, RLConfig):
        keys = {f"cluster.num_{role.name}s": 0}
        if role.name == "reward_model":
            keys |= {"cluster.num_engines": 0, "trainer.parallel.zero_stage": 3}
        change = {key: n for key, n in keys.items() if setting(plan.config, key) != n}
        if _fits_with_settings(_on_more_devices(changed(plan, change))):
            more = "start more trainers (--nproc), which share it"
            words = listed([f"{key} to {n}" for key, n in change.items()])
            ways.insert(0, f"set {words} and {more}" if change else more)
    run, number = RunMemory(plan), role.axes.fsdp * role.axes.tensor
    held = f"{run.held_by(role) / GIB:.1f} GiB of a device"
    return (
        f"No setting that was tried makes it fit; without the {role.title} ({role.path_key}), "
        f"whose weights take {held}{', in shards' * (number > 1)}, it would: {', or '.join(ways)}."
    )


_ABSENT: Mapping[RoleName, tuple[str, Any]] = {
    "reference": ("algorithm.kl.coef", 0.0),
    "teacher": ("teacher.path", None),
    "reward_model": ("reward.model.path", None),
}
"""The setting with which a run has no such model."""


# -- the host ------------------------------------------------------------------------------------


def _total(roles: Iterable[HostRole]) -> int:
    return sum(role.num_bytes for role in roles)


def _host_remedy(plan: RunPlan, fits: Callable[[RunPlan], bool]) -> tuple[str, tuple[str, ...]]:
    """Text and keys of the remedies with which a run fits its host and still its GPUs: every
    sufficient single change, otherwise all changes together."""
    known, excess = errors(plan), _excess(plan)

    def serves(change: Change) -> bool:
        after = changed(plan, change)
        return fits(after) and _excess(after) <= excess and errors(after) <= known

    candidates = [*host_changes(plan)]
    serving = [change for change in candidates if serves(change)]
    if not serving:
        together = {key: value for change in candidates for key, value in change.items()}
        serving = [together] if together and serves(together) else []
    if serving:
        # The first of several budgets is the largest one that fits.
        first = {tuple(change): change for change in reversed(serving)}
        kept = [*reversed(first.values())]
        return _remedy(kept, plan), tuple(dict.fromkeys(key for change in kept for key in change))
    more = "more memory or a GPU" if plan.is_on_cpu else "more memory"
    return (
        "No setting is enough: take a smaller model (model.path), fewer processes on it, or a host "
        f"with {more}.",
        ("model.path",),
    )


# -- settings by key -----------------------------------------------------------------------------


def _updated(section: S, change: Change) -> S:
    """The section with changed settings. Each section is copied once: a search makes thousands of
    changes. Keys within a section that is itself in the change are applied to the new one."""
    update: dict[str, Any] = {}
    inner: dict[str, dict[str, Any]] = {}
    for key, value in change.items():
        name, _, below = key.partition(".")
        if below:
            inner.setdefault(name, {})[below] = value
        else:
            update[name] = value
    for name, own in inner.items():
        update[name] = _updated(update.get(name, getattr(section, name)), own)
    return section.model_copy(update=update)
