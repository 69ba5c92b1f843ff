"""Whether a planned run fits into GPUs and into its host, and what would make it fit."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar, get_args

from hone.config.base import Section
from hone.config.plan import RunPlan, resolve
from hone.config.rules import Finding, findings
from hone.config.rules.facts import LONG_ROW
from hone.config.trainer import OffloadLevel, SFTTrainerConfig
from hone.config.tree import PlanConfig, RLConfig, SFTConfig
from hone.errors import listed
from hone.hardware import GIB
from hone.planner.host_memory import (
    LEAST_LENGTH_SHARE,
    HostRole,
    host_roles,
    saved_at_the_end,
    saves_in_background,
    shortage,
)
from hone.planner.run_memory import RunMemory

__all__ = [
    "GPUS_OF_A_NODE",
    "Change",
    "changed",
    "check_gpu_memory",
    "check_host_memory",
    "does_fit",
    "does_fit_host",
    "errors",
    "gpu_host_roles",
    "has_room_for_two_rows",
    "kept_logits",
    "memory_changes",
    "remedies",
    "rl_config",
    "rounds_apart",
    "setting",
    "two_rows",
]

GPUS_OF_A_NODE = 8
"""Where `cluster.devices_per_node` does not say."""
Change: TypeAlias = Mapping[str, Any]
"""Settings by key."""
_CHUNK_TOKENS = SFTTrainerConfig().logits_chunk_tokens
"""The default: smaller chunks save little for the time that they take."""
_LAST_RESORT = ("trainer.parallel.zero_stage", "model.lora.rank", "model.path")
S = TypeVar("S", bound=Section)


def check_gpu_memory(plan: RunPlan) -> Iterator[Finding]:
    """Whether every phase fits the memory of the plan's GPU; nothing where that is not known."""
    if not _excess(plan):
        return
    changes, more = remedies(plan), ""
    if not changes and (rounded := _rounded_weights(plan)):
        changes = [rounded]
        one = {key: rounded[key] for key in rounded if key.startswith("engine.weight")}
        saved = RunMemory(plan).engine_weights - RunMemory(changed(plan, one)).engine_weights
        more = f" It rounds the weights that sample, and saves {saved / GIB:.1f} GiB of them."
    keys = dict.fromkeys(key for change in changes for key in change)
    named = keys or [key for key in _LAST_RESORT if setting(plan.config, key) is not None]
    told = f"{_lack(RunMemory(plan))} {_remedy(changes, plan)}{more}"
    yield Finding("error", tuple(named), told)


def check_host_memory(plan: RunPlan, *, num_local: int) -> Iterator[Finding]:
    """Whether the host's memory holds the run, `num_local` of whose processes are here: an error
    where even short rows do not fit, a warning where rows of full length do not."""
    available = plan.devices.host_bytes
    if available is None or plan.shape is None or plan.problem is not None:
        return

    def roles(plan: RunPlan, *, at_least: bool) -> list[HostRole]:
        return host_roles(plan, num_local=num_local, at_least=at_least)

    def lack(*, at_least: bool) -> Finding | None:
        def fits(plan: RunPlan) -> bool:
            return _total(roles(plan, at_least=at_least)) <= available

        if fits(plan):  # the search for a remedy takes dozens of plans
            return None
        takes = (
            f"with rows of 1/{LEAST_LENGTH_SHARE} of full length on average the run takes at least"
            if at_least
            else "with rows of full length the run takes"
        )
        advice, keys = _host_remedy(plan, fits)
        found = roles(plan, at_least=at_least)
        return shortage(found, available=available, takes=takes, advice=advice, keys=keys)

    if found := lack(at_least=True):
        yield found
    elif found := lack(at_least=False):
        yield replace(found, level="warning")


def does_fit(plan: RunPlan) -> bool:
    """Whether every phase fits the GPU, as far as that is known."""
    return not _excess(plan)


def does_fit_host(plan: RunPlan) -> bool:
    """Whether a host of a GPU run holds what its processes move there, as far as that is known."""
    available = plan.devices.host_bytes
    return available is None or _total(gpu_host_roles(plan)) <= available


def two_rows(plan: RunPlan) -> Change:
    """The budget of tokens by which short rows are packed, two of the longest; nothing where it is
    that large, and where rows fill a device by themselves or are shared."""
    trainer, longest = plan.trainer, plan.max_sequence_tokens
    if trainer is None or trainer.micro_batch_size is not None or longest is None:
        return {}
    if longest > LONG_ROW or plan.policy.axes.context > 1:
        return {}
    is_less = trainer.max_tokens_per_microbatch < 2 * longest
    return {"trainer.max_tokens_per_microbatch": 2 * longest} if is_less else {}


def has_room_for_two_rows(plan: RunPlan) -> bool:
    """Whether GPUs and host hold micro-batches of two of the longest rows, as far as is known."""
    if plan.is_on_cpu or plan.shape is None or plan.problem is not None:
        return True
    if not (change := two_rows(plan)):
        return True
    larger = changed(plan, change)
    return does_fit(larger) and does_fit_host(larger)


def kept_logits(plan: RunPlan) -> Change:
    """The setting with which all logits of a micro-batch are one chunk, so that none is computed
    twice; nothing where they are."""
    trainer = plan.trainer
    if trainer is None or plan.batch is None or plan.max_sequence_tokens is None:
        return {}
    num_tokens, _ = RunMemory(plan).micro_batches(trainer, plan.policy)
    is_less = trainer.logits_chunk_tokens < num_tokens
    return {"trainer.logits_chunk_tokens": num_tokens} if is_less else {}


def gpu_host_roles(plan: RunPlan) -> list[HostRole]:
    """What the fullest host of a GPU run is to hold."""
    world = plan.policy.axes.world
    return host_roles(plan, num_local=min(world, plan.devices.per_node or GPUS_OF_A_NODE))


def remedies(plan: RunPlan, *, moves: bool = True) -> list[Change]:
    """Each single change that makes a run fit its GPUs, the cheapest first; else several that do
    together; none where nothing does.

    The order is that of benchmarks/memory.md, by time a GiB. Where models may be moved, engines get
    devices of their own as a last resort.
    """
    known = errors(plan)

    def is_served(change: Change) -> bool:
        return errors(changed(plan, change)) <= known

    singles = [change for change in memory_changes(plan, moves=moves) if is_served(change)]
    fitting = [change for change in singles if not _excess(changed(plan, change))]
    # Of several sizes of one key the first is nearest to what is configured.
    found = [*{tuple(change): change for change in reversed(fitting)}.values()][::-1]
    if cache := _other_cache(plan):
        found.insert(0, cache)
    if found:
        return found
    shared: Iterator[Change] = _shared_tokens(plan) if plan.trainer is not None else iter(())
    for starts in (({}, *shared), [*_engines_apart(plan)] if moves else ()):
        several = [_together(plan, start, is_served) for start in starts]
        pruned = [_without_needless(plan, x, is_served) for x in several if x is not None]
        if pruned:
            return [min(pruned, key=len)]
    return []


def _rounded_weights(plan: RunPlan) -> Change | None:
    """Engines with 8-bit weights, and what else it takes, where that makes a run fit and rules
    allow it. Not among the remedies: it changes what samples, which is not for a search to do."""
    if plan.engine is None or plan.engine.weight_dtype != "auto":
        return None
    known, cfg = errors(plan), plan.config

    def is_served(change: Change) -> bool:
        return errors(changed(plan, change)) <= known

    found = _together(plan, {"engine.weight_dtype": "int8"}, is_served)
    if found is None:
        return None
    found = _without_needless(plan, found, is_served)
    if isinstance(cfg, RLConfig) and cfg.algorithm.correction.kind == "none":
        found = {**found, "algorithm.correction.kind": "tis"}
    return found if is_served(found) else None


def _together(plan: RunPlan, start: Change, is_served: Callable[[Change], bool]) -> Change | None:
    """`start` and as few further changes as make the plan fit, each of which helps; or None."""
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
        if cache := _other_cache(after):
            return {**together, **cache}
    return None


def changed(plan: RunPlan, change: Change) -> RunPlan:
    """The plan of a configuration with other settings, on the same devices: those of engines of
    their own are taken from the trainers."""
    cfg = plan.config
    for key, value in change.items():
        cfg = _replaced(cfg, key.split("."), value)
    world_size = plan.world_size
    if isinstance(cfg, RLConfig) and cfg.cluster.is_used:
        world_size = cfg.cluster.num_trainers
    return resolve(cfg, plan.model, plan.devices, world_size=world_size, teacher=plan.teacher)


# -- GPUs ----------------------------------------------------------------------------------------


def _excess(plan: RunPlan) -> int:
    """Bytes that are lacking, over all phases; 0 where all fit and the engine starts, and where
    that is not known."""
    gpu = plan.devices.gpu
    if plan.shape is None or plan.is_on_cpu or gpu is None or plan.problem is not None:
        return 0
    run, limit = RunMemory(plan), (gpu.memory_gib or 0) * GIB
    if not limit:
        return 0
    too_much = sum(max(phase.num_bytes - limit, 0) for phase in run.phases())
    missing = (run.sequence_bytes or 0) - (run.cache or 0) if run.lacks_room_for_one else 0
    return too_much + missing


def memory_changes(plan: RunPlan, *, moves: bool = False) -> Iterator[Change]:
    """Single changes that save memory of a GPU, the cheapest first; where models may be `moves`d,
    of their devices too."""
    cfg, trainer = plan.config, plan.trainer
    if moves and isinstance(cfg, RLConfig):
        yield from ({f"cluster.num_{role}s": 0} for role in cfg.cluster.num_scorers)
    longest = plan.max_sequence_tokens
    if "reward_model" in plan.roles and longest is not None:
        budget = setting(cfg, "reward.model.max_tokens_per_forward") // 2
        while budget >= longest:
            yield {"reward.model.max_tokens_per_forward": budget}
            budget //= 2
    if trainer is None or longest is None:
        return
    if plan.engine is not None:
        yield {"engine.enable_sleep": True}
    # A placement of `hone plan` has engines of its size.
    if isinstance(cfg, RLConfig) and not (plan.is_apart or isinstance(cfg, PlanConfig)):
        for size in (2, 4, 8):
            if size > cfg.engine.tensor_parallel_size:
                yield {"engine.tensor_parallel_size": size}
    yield {"trainer.optimizer.state_dtype": "bfloat16"}
    yield {"trainer.parallel.zero_stage": 3}
    yield from _smaller_budgets(plan)
    chunk = trainer.logits_chunk_tokens // 2
    while chunk >= _CHUNK_TOKENS:
        yield {"trainer.logits_chunk_tokens": chunk}
        chunk //= 2
    if plan.engine is not None:
        yield {"trainer.enable_sleep": True}
    yield {"trainer.offload": "optimizer"}
    yield {"trainer.recompute": "full"}
    yield {"trainer.offload": "parameters", "trainer.parallel.zero_stage": 3}
    yield from _shared_tokens(plan)


def _smaller_budgets(plan: RunPlan) -> Iterator[Change]:
    assert plan.trainer is not None
    budget = plan.trainer.max_tokens_per_microbatch // 2
    while plan.trainer.micro_batch_size is None and budget >= _longest_part(plan):
        yield {"trainer.max_tokens_per_microbatch": budget}
        budget //= 2
    own = (
        setting(plan.config, "critic.max_tokens_per_microbatch") if "critic" in plan.roles else None
    )
    while own is not None and own // 2 >= _longest_part(plan):
        own //= 2
        yield {"critic.max_tokens_per_microbatch": own}


def _longest_part(plan: RunPlan) -> int:
    """Tokens of the longest row that one device has."""
    return -(-(plan.max_sequence_tokens or 0) // plan.policy.axes.context)


def _shared_tokens(plan: RunPlan) -> Iterator[Change]:
    """Processes that share the tokens of rows too long for a smaller budget."""
    assert plan.trainer is not None
    longest, budget, size = _longest_part(plan), plan.trainer.max_tokens_per_microbatch, 2
    if plan.policy.axes.context > 1 or longest <= budget // 2:
        return
    while size <= (plan.world_size or 1):
        budget = min(budget, -(-longest // size))
        for key in ("ulysses_size", "ring_size"):
            yield {
                f"trainer.parallel.{key}": size,
                "trainer.max_tokens_per_microbatch": budget,
            }
        size *= 2


def _engines_apart(plan: RunPlan) -> Iterator[Change]:
    """Half of the devices, or all but a node, to engines; each over as few as possible."""
    cfg, total = plan.config, plan.world_size or 1
    if not isinstance(cfg, RLConfig) or cfg.cluster.is_used:
        return
    for size in (1, 2, 4, 8):
        if 2 * size > total:
            return
        num_trainers = min(total - total // 2 // size * size, GPUS_OF_A_NODE)
        num_engines = (total - num_trainers) // size
        change: dict[str, Any] = {
            "cluster.num_engines": num_engines,
            "engine.tensor_parallel_size": size,
            "cluster.num_trainers": num_trainers,
        }
        if total > GPUS_OF_A_NODE:
            change |= {
                "cluster.address": "auto",
                "cluster.num_nodes": -(-total // GPUS_OF_A_NODE),
                "cluster.devices_per_node": GPUS_OF_A_NODE,
            }
        yield change


def _other_cache(plan: RunPlan) -> Change | None:
    """The cache that fits and is nearest to the configured one, by its key; None: none is."""
    engine = plan.engine
    if engine is None:
        return None
    if engine.kv_cache_gib is not None:
        key, now = "engine.kv_cache_gib", engine.kv_cache_gib
        sizes = {round(now * n / 100, 1) for n in range(1, 201)} - {0.0}
    else:
        key, now = "engine.gpu_memory_utilization", engine.gpu_memory_utilization
        sizes = {n / 100 for n in range(1, 96)}
    nearest = sorted(sizes, key=lambda size: abs(size - now))
    return next(({key: x} for x in nearest if not _excess(changed(plan, {key: x}))), None)


def _without_needless(plan: RunPlan, change: Change, is_served: Callable[[Change], bool]) -> Change:
    for key in change:
        fewer = {other: change[other] for other in change if other != key}
        if not _excess(changed(plan, fewer)) and is_served(fewer):
            return _without_needless(plan, fewer, is_served)
    return change


def errors(plan: RunPlan) -> set[Finding]:
    """What stands against a run of this plan, but for packages that are not installed here; of
    `hone plan` against the `hone rl` that it is for."""
    if isinstance(plan.config, PlanConfig):
        cfg = rl_config(plan.config)
        plan = resolve(
            cfg, plan.model, plan.devices, world_size=plan.world_size, teacher=plan.teacher
        )
    found = findings(plan, can_install=True)
    return {finding for finding in found if finding.level == "error"}


def rl_config(cfg: PlanConfig) -> RLConfig:
    """The `hone rl` that a plan is for."""
    return RLConfig.model_construct(**{name: getattr(cfg, name) for name in RLConfig.model_fields})


def rounds_apart(cfg: RLConfig) -> bool:
    """Whether trainers and engines compute in formats that differ by more than their kernels do."""
    engine = cfg.engine
    is_fp8 = "fp8" in (engine.kv_cache_dtype, cfg.trainer.matmul_precision)
    return engine.weight_dtype == "int8" or is_fp8


def _lack(run: RunMemory) -> str:
    """What does not fit, and what it consists of."""
    gpu, phases = run.plan.devices.gpu, run.phases()
    assert gpu is not None
    limit = (gpu.memory_gib or 0) * GIB
    over = [phase for phase in phases if phase.num_bytes > limit]
    told = ""
    if over:
        others = [phase for phase in phases if phase not in over]
        told = (
            f"by prediction the run does not fit into the {gpu.memory_gib} GiB of a GPU "
            f"({gpu.name}): {listed([f'{x.title} takes {x.in_words()}' for x in over])}"
        )
        fitting = [f"{x.title} {x.in_words()}" for x in others]
        told += f"; {listed(fitting)} would fit." if fitting else "."
    if run.lacks_room_for_one:
        told += (
            f"{' ' * bool(told)}By prediction the KV cache has {(run.cache or 0) / GIB:.2f} GiB, "
            f"and one sequence of {run.max_length} tokens takes "
            f"{(run.sequence_bytes or 0) / GIB:.2f}."
        )
    return told


def _remedy(changes: Sequence[Change], plan: RunPlan) -> str:
    told = [
        listed([f"{key} to {str(change[key]).lower()}" for key in change]) for change in changes
    ]
    match told:
        case []:
            more = "a smaller model (model.path)"
            if plan.trainer is not None:
                ways = ["more devices (--nproc, with trainer.parallel.zero_stage 3)"]
                if plan.lora is not None and not plan.lora.rank:
                    ways.append("adapters alone (model.lora.rank)")
                more = f"{', '.join(ways)}, or {more}"
            return f"No setting that was tried makes it fit: take {more}."
        case [only]:
            return f"Set {only}."
        case _:
            return f"Set one of these: {'; '.join(told)}."


# -- the host ------------------------------------------------------------------------------------


def _total(roles: Iterable[HostRole]) -> int:
    return sum(role.num_bytes for role in roles)


def _host_remedy(plan: RunPlan, fits: Callable[[RunPlan], bool]) -> tuple[str, tuple[str, ...]]:
    """What makes a run fit its host and still its GPUs, in words, and the keys: each change that
    does by itself, else all together."""
    known, excess = errors(plan), _excess(plan)

    def serves(change: Change) -> bool:
        after = changed(plan, change)
        return fits(after) and _excess(after) <= excess and errors(after) <= known

    candidates = [*_host_candidates(plan)]
    found = [change for change in candidates if serves(change)]
    if not found:
        together = {key: value for change in candidates for key, value in change.items()}
        found = [together] if together and serves(together) else []
    if found:
        # Of several budgets the first is the largest that fits.
        first = {tuple(change): change for change in reversed(found)}
        kept = [*reversed(first.values())]
        return _remedy(kept, plan), tuple(dict.fromkeys(key for change in kept for key in change))
    more = "more memory or a GPU" if plan.is_on_cpu else "more memory"
    return (
        "No setting is enough: take a smaller model (model.path), fewer processes on it, or a host "
        f"with {more}.",
        ("model.path",),
    )


def _host_candidates(plan: RunPlan) -> Iterator[Change]:
    trainer, cfg = plan.trainer, plan.config
    if trainer is None:
        return
    if isinstance(cfg, RLConfig | SFTConfig) and saves_in_background(cfg):
        yield {f"checkpoint.{key}": value for key, value in saved_at_the_end(cfg).items()}
    if not plan.is_on_cpu:
        yield from _smaller_offloads(plan)
        return
    if trainer.recompute != "full" and not trainer.recompute_every_n_layers > 1:
        yield {"trainer.recompute": "full"}
    yield from _smaller_budgets(plan)
    if trainer.optimizer.state_dtype != "bfloat16" and trainer.optimizer.name == "adamw":
        yield {"trainer.optimizer.state_dtype": "bfloat16"}
    if plan.lora is not None and not plan.lora.rank:
        yield {"model.lora.rank": 16}


def _smaller_offloads(plan: RunPlan) -> Iterator[Change]:
    """Single changes that leave more on the GPUs or make it smaller, the cheapest first; each
    level of what is offloaded, from the lowest."""
    trainer, engine = plan.trainer, plan.engine
    assert trainer is not None
    for level in get_args(OffloadLevel):
        if level == trainer.offload:
            break
        yield {"trainer.offload": level}
    if trainer.offload_activations:
        yield {"trainer.offload_activations": False}
    if getattr(trainer, "enable_sleep", False):
        yield {"trainer.enable_sleep": False}
    if engine is not None and engine.backend == "vllm" and engine.enable_sleep:
        yield {"engine.enable_sleep": False}
    if trainer.optimizer.state_dtype != "bfloat16" and trainer.optimizer.name == "adamw":
        yield {"trainer.optimizer.state_dtype": "bfloat16"}
    if plan.lora is not None and not plan.lora.rank:
        yield {"model.lora.rank": 16}


# -- settings by key -----------------------------------------------------------------------------


def setting(cfg: Any, key: str) -> Any:
    """The value of a setting; None where a tree does not have it."""
    for name in key.split("."):
        cfg = getattr(cfg, name, None)
    return cfg


def _replaced(section: S, path: list[str], value: Any) -> S:
    name, *inner = path
    if inner:
        value = _replaced(getattr(section, name), inner, value)
    return section.model_copy(update={name: value})
