"""The settings that trade memory for time: one row each, in one list.

    for knob in knobs(plan):
        for change in knob.gpu(plan):    # {"trainer.parallel.zero_stage": 3}
            ...

Remedies for a run that does not fit, the search of `hone plan`, the candidates of `hone tune`, the
advice of alarms and the list of an out-of-memory error read these rows, and know no setting that is
not here. To add a knob is to add its row.

The rows of all parts of a run stand in one module, because their order is one price list over all
parts, and because the planner, which reads them, may not import what trains or samples
(pyproject.toml). `Knob.part` says whose a row is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, TypeAlias, get_args

from hone.config.plan import RunPlan
from hone.config.rules.facts import LONG_ROW
from hone.config.tree import PlanConfig, RLConfig, SFTConfig
from hone.distributed.settings import SCORERS, RoleName
from hone.engine.backends import BACKENDS
from hone.engine.settings import CPU_CACHE_GIB
from hone.families.stages import stage_layers
from hone.planner.host_memory import saved_at_the_end, saves_in_background
from hone.planner.run_memory import RunMemory
from hone.trainer.settings import OffloadLevel, SFTTrainerConfig

__all__ = [
    "BUDGETS",
    "CACHE",
    "ENGINE_SIZE",
    "ENGINE_WEIGHTS",
    "GPUS_OF_A_NODE",
    "KNOBS",
    "LOGITS",
    "MOMENTS",
    "OFFLOAD",
    "RECOMPUTE",
    "REMOTE_ENGINES",
    "SEARCHED",
    "SEQUENCES",
    "SHARED_ROWS",
    "ZERO",
    "Change",
    "Effect",
    "Knob",
    "cache_sizes",
    "choices_that_differ",
    "gpus_of_a_node",
    "host_changes",
    "knobs",
    "setting",
    "two_rows",
]

Change: TypeAlias = Mapping[str, Any]
"""Settings by key."""
Changes: TypeAlias = Callable[[RunPlan], Iterator[Change]]
"""Changes of a plan, in the order that the field's docstring gives; none where the knob does not
apply."""

GPUS_OF_A_NODE = 8
"""Devices of a node, where `cluster.devices_per_node` is unset."""
_CHUNK_TOKENS = SFTTrainerConfig().logits_chunk_tokens
"""The default chunk size: smaller chunks save little memory for their time."""


class Effect(IntEnum):
    """Side effect of a knob besides memory and time; a larger value is a larger change."""

    NONE = 0
    ROUNDING = 1
    """Trained or sampling weights are rounded differently."""
    METHOD = 2
    """The training method changes."""


def _no_changes(plan: RunPlan) -> Iterator[Change]:
    return iter(())


@dataclass(frozen=True, kw_only=True, slots=True)
class Knob:
    """A setting, or several that change together, with its changes for each resource."""

    keys: tuple[str, ...]
    """All settings that its changes set."""
    part: RoleName
    """The part of a run without which the knob has no meaning."""
    gpu: Changes = _no_changes
    """Changes that save memory of a GPU, the nearest to the configured value first."""
    host: Changes = _no_changes
    """Changes that save memory of a host, the one that leaves least there first."""
    time: Changes = _no_changes
    """Changes that save time and take memory of a GPU, the one that is tried first in front."""
    choices: Changes = _no_changes
    """All values that a search may choose and `hone tune` may try, each with all settings it
    depends on, from the fastest to the one with the least GPU memory."""
    num_fastest: int = 1
    """Number of first choices that may be the fastest, depending on other knobs."""
    num_smallest: int = 1
    """Number of last choices that may take the least memory."""
    effect: Effect = Effect.NONE
    moves_models: bool = False
    """Whether it changes the placement of models on devices."""
    is_lowered_in_a_step: bool = False
    """Whether a running step changes it after an out-of-memory error
    (`hone.trainer.out_of_memory`), so that it is not advised for a new launch."""
    lets_gpus_wait: bool = False
    """Whether its price is idle time of GPUs, and not recomputation."""
    is_read_by_name: bool = False
    """Whether callers that go over the whole list skip it: it saves another kind of memory, or is
    tried only where nothing else is enough."""


def knobs(plan: RunPlan) -> Iterator[Knob]:
    """The rows for the parts that a plan has, in the order of `KNOBS`."""
    return (knob for knob in KNOBS if knob.part in plan.roles)


def host_changes(plan: RunPlan) -> Iterator[Change]:
    """Single changes that save memory of a host. Those without a side effect come first, and among
    them those whose feature costs the GPUs most time, since switching it off gains the most."""
    dearest_first = reversed([*knobs(plan)])
    for knob in sorted(dearest_first, key=lambda knob: knob.effect):
        yield from knob.host(plan)


def choices_that_differ(knob: Knob, plan: RunPlan) -> list[Change]:
    """The choices of a knob, reduced to settings that differ from the plan's. The plan's own
    choice, an empty change, comes first."""
    choices: list[Change] = [{}]
    for change in knob.choices(plan):
        differing = {k: v for k, v in change.items() if v != setting(plan.config, k)}
        if differing and differing not in choices:
            choices.append(differing)
    return choices


def gpus_of_a_node(plan: RunPlan) -> int:
    """Number of devices of each node: the recipe's, or `GPUS_OF_A_NODE`."""
    return plan.devices.per_node or GPUS_OF_A_NODE


def setting(cfg: Any, key: str) -> Any:
    """The value of a setting; None where the configuration does not have it."""
    for name in key.split("."):
        cfg = getattr(cfg, name, None)
    return cfg


def _to(key: str, value: Any) -> Changes:
    """A setting to one value, where the plan has the setting at another."""

    def changes(plan: RunPlan) -> Iterator[Change]:
        if setting(plan.config, key) not in (None, value):
            yield {key: value}

    return changes


# -- cluster and checkpoint ------------------------------------------------------------------------


def _scorers_with_the_trainers(plan: RunPlan) -> Iterator[Change]:
    if isinstance(plan.config, RLConfig):
        yield from ({f"cluster.num_{role}s": 0} for role in plan.config.cluster.num_scorers)


def _remote_engines(plan: RunPlan) -> Iterator[Change]:
    """Give engines half of the devices, or all but one node; each engine takes as few devices as
    possible."""
    cfg, total = plan.config, plan.world_size or 1
    if not isinstance(cfg, RLConfig) or cfg.cluster.is_used:
        return
    for size in (1, 2, 4, 8):
        if 2 * size > total:
            return
        num_trainers = min(total - total // 2 // size * size, GPUS_OF_A_NODE)
        change: dict[str, Any] = {
            "cluster.num_engines": (total - num_trainers) // size,
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


def _saved_at_the_end(plan: RunPlan) -> Iterator[Change]:
    cfg = plan.config
    if isinstance(cfg, RLConfig | SFTConfig) and saves_in_background(cfg):
        yield {f"checkpoint.{key}": value for key, value in saved_at_the_end(cfg).items()}


# -- engine ----------------------------------------------------------------------------------------


def _sleeping_engine(plan: RunPlan) -> Iterator[Change]:
    if plan.trainer is not None and plan.engine is not None and not plan.engine.enable_sleep:
        yield {"engine.enable_sleep": True}


def _waking_engine(plan: RunPlan) -> Iterator[Change]:
    engine = plan.engine
    if engine is None or plan.is_on_cpu or not engine.enable_sleep:
        return
    if BACKENDS[engine.backend].keeps_weights_asleep:
        yield {"engine.enable_sleep": False}


def _sleep(key: str) -> Changes:
    """Choices of a sleep setting: on, or as in the recipe. A search never switches it off."""

    def choices(plan: RunPlan) -> Iterator[Change]:
        present: bool | None = setting(plan.config, key)
        if present is not None and not (plan.is_apart or plan.is_on_cpu):
            yield from ({key: value} for value in dict.fromkeys((present, True)))

    return choices


def _larger_engines(plan: RunPlan) -> Iterator[Change]:
    # Each placement of `hone plan` already has its own size of engines.
    is_placed = plan.is_apart or isinstance(plan.config, PlanConfig)
    if isinstance(plan.config, RLConfig) and not is_placed:
        present = plan.config.engine.tensor_parallel_size
        yield from ({"engine.tensor_parallel_size": n} for n in (2, 4, 8) if n > present)


def _smaller_engines(plan: RunPlan) -> Iterator[Change]:
    """Twice as many engines, each over half of the devices."""
    cfg = plan.config
    if isinstance(cfg, RLConfig) and (size := cfg.engine.tensor_parallel_size) > 1:
        number = cfg.cluster.num_engines
        more = {"cluster.num_engines": 2 * number} if number else {}
        yield {"engine.tensor_parallel_size": size // 2, **more}


def _int8_weights(plan: RunPlan) -> Iterator[Change]:
    if plan.engine is not None and plan.engine.weight_dtype == "auto":
        yield {"engine.weight_dtype": "int8"}


def cache_sizes(plan: RunPlan) -> Iterator[Change]:
    """Smaller and larger sizes of the engine's cache, the nearest to the configured one first."""
    engine = plan.engine
    if engine is None:
        return
    if engine.kv_cache_gib is not None:
        key, present = "engine.kv_cache_gib", engine.kv_cache_gib
        sizes = {round(present * n / 100, 1) for n in range(1, 201)} - {0.0}
    else:
        key, present = "engine.gpu_memory_utilization", engine.gpu_memory_utilization
        sizes = {n / 100 for n in range(1, 96)}
    yield from ({key: size} for size in sorted(sizes, key=lambda size: abs(size - present)))


def _smaller_cache(plan: RunPlan) -> Iterator[Change]:
    engine = plan.engine
    if engine is not None and engine.kv_cache_gib is None and not plan.is_apart:
        share = max(round(engine.gpu_memory_utilization - 0.1, 2), 0.05)
        yield {"engine.gpu_memory_utilization": share}


def _larger_cache(plan: RunPlan) -> Iterator[Change]:
    engine = plan.engine
    if engine is None:
        return
    size = engine.kv_cache_gib or (CPU_CACHE_GIB if plan.is_on_cpu else None)
    if size is not None:
        yield from ({"engine.kv_cache_gib": factor * size} for factor in (2.0, 1.5))
        return
    tenths = range(int(10 * engine.gpu_memory_utilization) + 1, 10)
    yield from ({"engine.gpu_memory_utilization": tenth / 10} for tenth in tenths)


def _fewer_sequences(plan: RunPlan) -> Iterator[Change]:
    if plan.engine is not None:
        present = plan.engine.max_num_seqs
        yield from ({"engine.max_num_seqs": max(int(x * present), 1)} for x in (0.75, 0.5))


def _all_sequences(plan: RunPlan) -> Iterator[Change]:
    engine, batch = plan.engine, plan.batch
    if engine is not None and batch is not None and engine.max_num_seqs < batch.samples_per_step:
        yield {"engine.max_num_seqs": batch.samples_per_step}


# -- reward model ----------------------------------------------------------------------------------


def _smaller_reward_passes(plan: RunPlan) -> Iterator[Change]:
    key, longest = "reward.model.max_tokens_per_forward", plan.max_sequence_tokens
    if "reward_model" in plan.roles and longest is not None:
        yield from _halved(key, setting(plan.config, key), least=longest)


# -- trainer and critic ----------------------------------------------------------------------------


def _halved(key: str, present: int, *, least: int) -> Iterator[Change]:
    """A half, a quarter and so on of a number of tokens, none below `least`."""
    while (present := present // 2) >= least:
        yield {key: present}


def _longest_part(plan: RunPlan) -> int | None:
    """Tokens of one device's part of the longest row; None where no setting limits the length."""
    longest = plan.max_sequence_tokens
    return None if longest is None else -(-longest // plan.policy.axes.context)


def _zero_stages(plan: RunPlan) -> Iterator[Change]:
    """ZeRO stages, where several processes share weights. Stage 0 sends more than 1, and 3 more
    than 2."""
    if (plan.world_size or 1) > 1:
        yield from ({"trainer.parallel.zero_stage": stage} for stage in (2, 1, 0, 3))


def _smaller_budgets(plan: RunPlan) -> Iterator[Change]:
    trainer, longest = plan.trainer, _longest_part(plan)
    if trainer is None or longest is None:
        return
    if trainer.micro_batch_size is None:
        key = "trainer.max_tokens_per_microbatch"
        yield from _halved(key, trainer.max_tokens_per_microbatch, least=longest)
    own = "critic.max_tokens_per_microbatch"
    if "critic" in plan.roles and (budget := setting(plan.config, own)) is not None:
        yield from _halved(own, budget, least=longest)


def _smaller_budgets_on_a_cpu(plan: RunPlan) -> Iterator[Change]:
    if plan.is_on_cpu:
        yield from _smaller_budgets(plan)


def _doubled_budget(plan: RunPlan) -> Iterator[Change]:
    trainer = plan.trainer
    if trainer is None or plan.batch is None or plan.max_accumulation == 1:
        return
    if trainer.micro_batch_size:
        yield {"trainer.micro_batch_size": 2 * trainer.micro_batch_size}
    else:
        key = "trainer.max_tokens_per_microbatch"
        yield {key: 2 * trainer.max_tokens_per_microbatch}


def two_rows(plan: RunPlan) -> Change:
    """Raise the token budget to two of the longest rows, so that short rows are packed; empty where
    it is large enough, and where a row fills a device or is shared."""
    trainer, longest = plan.trainer, plan.max_sequence_tokens
    if trainer is None or trainer.micro_batch_size is not None or longest is None:
        return {}
    if longest > LONG_ROW or plan.policy.axes.context > 1:
        return {}
    is_less = trainer.max_tokens_per_microbatch < 2 * longest
    return {"trainer.max_tokens_per_microbatch": 2 * longest} if is_less else {}


def _smaller_chunks(plan: RunPlan) -> Iterator[Change]:
    if plan.trainer is not None:
        key = "trainer.logits_chunk_tokens"
        yield from _halved(key, plan.trainer.logits_chunk_tokens, least=_CHUNK_TOKENS)


def _one_chunk(plan: RunPlan) -> Iterator[Change]:
    """Compute all logits of a micro-batch in one chunk, so that none is computed twice."""
    trainer = plan.trainer
    if trainer is None or plan.batch is None or plan.max_sequence_tokens is None:
        return
    num_tokens, _ = RunMemory(plan).micro_batches(plan.policy)
    if trainer.logits_chunk_tokens < num_tokens:
        yield {"trainer.logits_chunk_tokens": num_tokens}


def _waking_trainer(plan: RunPlan) -> Iterator[Change]:
    if not plan.is_on_cpu and setting(plan.trainer, "enable_sleep"):
        yield {"trainer.enable_sleep": False}


def _levels(plan: RunPlan) -> tuple[OffloadLevel, ...]:
    """Offload levels below the plan's, the lowest first."""
    levels: tuple[OffloadLevel, ...] = get_args(OffloadLevel)
    return () if plan.trainer is None else levels[: levels.index(plan.trainer.offload)]


def _offloaded_optimizer(plan: RunPlan) -> Iterator[Change]:
    if plan.trainer is not None and not plan.trainer.offloads("optimizer"):
        yield {"trainer.offload": "optimizer"}


def _offloaded_parameters(plan: RunPlan) -> Iterator[Change]:
    """With gradients, which alone are dearer (52 ms a GiB of the 15 of a 4B model) than the
    parameters on top of them (4 ms)."""
    if plan.trainer is not None:
        change = {"trainer.offload": "parameters", "trainer.parallel.zero_stage": 3}
        if any(setting(plan.config, key) != value for key, value in change.items()):
            yield change


def _lower_offloads(plan: RunPlan) -> Iterator[Change]:
    if not plan.is_on_cpu:
        yield from ({"trainer.offload": level} for level in _levels(plan))


def _no_offload(plan: RunPlan) -> Iterator[Change]:
    yield from ({"trainer.offload": level} for level in _levels(plan)[:1])


def _every_offload(plan: RunPlan) -> Iterator[Change]:
    if not plan.is_on_cpu:
        yield from ({"trainer.offload": level} for level in get_args(OffloadLevel))


def _recomputing(
    mode: str, every_n_layers: int = 1, *, offload_activations: bool = False
) -> dict[str, Any]:
    return {
        "trainer.recompute": mode,
        "trainer.recompute_every_n_layers": every_n_layers,
        "trainer.offload_activations": offload_activations,
    }


_full_recompute = _to("trainer.recompute", "full")


def _less_kept_of_layers(plan: RunPlan) -> Iterator[Change]:
    """Less host memory for activations: of a CPU run the tensors that layers keep, of a GPU run the
    offloaded inputs of layers."""
    if plan.is_on_cpu:
        yield from _full_recompute(plan)
    elif plan.trainer is not None and plan.trainer.offload_activations:
        yield {"trainer.offload_activations": False}


def _ways_to_recompute(plan: RunPlan) -> Iterator[Change]:
    """Ways to recompute. `block:N` is included where no other way recomputes as many layers."""
    assert plan.shape is not None
    axes = plan.policy.axes
    stages = stage_layers(plan.shape, axes.pipeline, axes.virtual_stages)
    num_layers = max(len(group) for own in stages for group in own)
    yield _recomputing("off")
    yield _recomputing(f"block:{-(-num_layers // 8)}")
    yield _recomputing("selective", 2)
    yield _recomputing("full", 4)
    yield _recomputing("full", 2)
    yield _recomputing("selective")
    yield _recomputing(f"block:{-(-3 * num_layers // 4)}")
    yield _recomputing("full")
    yield _recomputing("uniform:2")
    if not plan.is_on_cpu:
        yield _recomputing("full", offload_activations=True)


def _shared_rows(plan: RunPlan) -> Iterator[Change]:
    """Processes that share the tokens of rows too long for a smaller budget."""
    if plan.trainer is None or plan.policy.axes.context > 1:
        return
    longest = _longest_part(plan)
    if longest is None:
        return
    budget, size = plan.trainer.max_tokens_per_microbatch, 2
    if longest <= budget // 2:
        return
    while size <= (plan.world_size or 1):
        budget = min(budget, -(-longest // size))
        for key in ("ulysses_size", "ring_size"):
            yield {
                f"trainer.parallel.{key}": size,
                "trainer.max_tokens_per_microbatch": budget,
            }
        size *= 2


def _adapters(plan: RunPlan) -> Iterator[Change]:
    if plan.lora is not None and not plan.lora.rank:
        yield {"model.lora.rank": 16}


# -- the rows --------------------------------------------------------------------------------------

CACHE = Knob(
    keys=("engine.gpu_memory_utilization", "engine.kv_cache_gib"),
    part="engine",
    gpu=_smaller_cache,
    time=_larger_cache,
    is_read_by_name=True,
)
SEQUENCES = Knob(
    keys=("engine.max_num_seqs",),
    part="engine",
    gpu=_fewer_sequences,
    time=_all_sequences,
    is_read_by_name=True,  # it saves room in the cache, which takes all memory that it gets
)
ENGINE_SIZE = Knob(
    keys=("engine.tensor_parallel_size", "cluster.num_engines"),
    part="engine",
    gpu=_larger_engines,
    time=_smaller_engines,
)
_rounded_moments = _to("trainer.optimizer.state_dtype", "bfloat16")
MOMENTS = Knob(
    keys=("trainer.optimizer.state_dtype",),
    part="policy",
    gpu=_rounded_moments,
    host=_rounded_moments,
    effect=Effect.ROUNDING,
)
ZERO = Knob(
    keys=("trainer.parallel.zero_stage",),
    part="policy",
    gpu=_to("trainer.parallel.zero_stage", 3),
    choices=_zero_stages,
    num_fastest=2,
)
BUDGETS = Knob(
    keys=(
        "trainer.max_tokens_per_microbatch",
        "critic.max_tokens_per_microbatch",
        "trainer.micro_batch_size",
    ),
    part="policy",
    gpu=_smaller_budgets,
    host=_smaller_budgets_on_a_cpu,
    time=_doubled_budget,
    is_lowered_in_a_step=True,
)
LOGITS = Knob(
    keys=("trainer.logits_chunk_tokens",),
    part="policy",
    gpu=_smaller_chunks,
    time=_one_chunk,
)
OFFLOAD = Knob(
    keys=("trainer.offload",),
    part="policy",
    gpu=_offloaded_optimizer,
    host=_lower_offloads,
    time=_no_offload,
    choices=_every_offload,
    lets_gpus_wait=True,
)
RECOMPUTE = Knob(
    keys=tuple(_recomputing("full")),
    part="policy",
    gpu=_full_recompute,
    host=_less_kept_of_layers,
    time=_to("trainer.recompute", "off"),
    choices=_ways_to_recompute,
    is_lowered_in_a_step=True,
)
SHARED_ROWS = Knob(
    keys=(
        "trainer.parallel.ulysses_size",
        "trainer.parallel.ring_size",
        "trainer.max_tokens_per_microbatch",
    ),
    part="policy",
    gpu=_shared_rows,
)
REMOTE_ENGINES = Knob(
    keys=(
        "cluster.num_engines",
        "engine.tensor_parallel_size",
        "cluster.num_trainers",
        "cluster.address",
        "cluster.num_nodes",
        "cluster.devices_per_node",
    ),
    part="engine",
    gpu=_remote_engines,
    moves_models=True,
    is_read_by_name=True,
)
ENGINE_WEIGHTS = Knob(
    keys=("engine.weight_dtype",),
    part="engine",
    gpu=_int8_weights,
    effect=Effect.ROUNDING,
    is_read_by_name=True,
)

KNOBS = (
    # In the order of time for a GiB of a GPU, the cheapest first (benchmarks/memory.md, measured on
    # steps of sixteen micro-batches; the numbers behind the keys are ms per GiB). Lists,
    # trials and searches keep this order, or its reverse where memory is spent to save time.
    Knob(  # not measured: frozen models get the trainer's devices
        keys=tuple(f"cluster.num_{role}s" for role in SCORERS),
        part="policy",
        gpu=_scorers_with_the_trainers,
        moves_models=True,
    ),
    Knob(  # not measured: passes without gradients, once a step
        keys=("reward.model.max_tokens_per_forward",),
        part="reward_model",
        gpu=_smaller_reward_passes,
    ),
    CACHE,  # 0 while it is not full
    SEQUENCES,
    Knob(  # 1.4
        keys=("engine.enable_sleep",),
        part="engine",
        gpu=_sleeping_engine,
        host=_waking_engine,
        choices=_sleep("engine.enable_sleep"),
        num_smallest=2,  # its room may go to the cache
        lets_gpus_wait=True,
    ),
    ENGINE_SIZE,  # not measured
    MOMENTS,  # 3 to 8
    ZERO,  # 7
    BUDGETS,  # 5 to 12
    LOGITS,  # 22 to 63 down to the default, below it 225 to 680
    Knob(  # 46
        keys=("trainer.enable_sleep",),
        part="policy",
        gpu=_to("trainer.enable_sleep", True),
        host=_waking_trainer,
        choices=_sleep("trainer.enable_sleep"),
        num_smallest=2,
        lets_gpus_wait=True,
    ),
    OFFLOAD,  # 17 to 27
    RECOMPUTE,  # 38 to 98; with inputs of layers on the host the last GiB 414 to 429
    Knob(  # 52 and less, but it needs the optimizer's states on the host first
        keys=("trainer.offload", "trainer.parallel.zero_stage"),
        part="policy",
        gpu=_offloaded_parameters,
        lets_gpus_wait=True,
    ),
    SHARED_ROWS,  # not measured, and for rows that no smaller budget holds
    REMOTE_ENGINES,
    ENGINE_WEIGHTS,
    Knob(
        keys=("model.lora.rank",),
        part="policy",
        host=_adapters,
        effect=Effect.METHOD,
    ),
    Knob(
        keys=("checkpoint.every_n_steps", "checkpoint.keep_best"),
        part="policy",
        host=_saved_at_the_end,
    ),
)
"""Every setting that trades memory for time."""
SEARCHED = tuple(knob for knob in reversed(KNOBS) if knob.choices is not _no_changes)
"""Knobs of a search; recomputation, which has most choices, comes first."""
