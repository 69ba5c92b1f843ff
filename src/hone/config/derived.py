"""Numbers that follow from a configuration: what a step really does, and what it takes.

Algorithmic batch sizes are global, so they do not change with the number of devices; micro-batches
are local. Their link is `mini = micro x accumulation x data-parallel`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from hone.config.engine import EngineConfig
from hone.config.model import ModelConfig
from hone.config.model_facts import ModelFacts
from hone.config.parallel import AxisSizes
from hone.config.rollout import GenerationConfig
from hone.config.trainer import SFTTrainerConfig
from hone.config.tree import EvaluateConfig, GenerateConfig, RLConfig, SFTConfig

__all__ = [
    "Derived",
    "compute_dtype",
    "derived_eval",
    "derived_generate",
    "derived_rl",
    "derived_sft",
    "kv_dtype",
    "optimizer_steps_per_rollout",
    "samples_per_optimizer_step",
    "trainers_hold_reference",
]

_GIB = 2**30


@dataclass(frozen=True, slots=True)
class Derived:
    """One number, and how it comes about."""

    name: str
    value: int | float | str
    how: str


def compute_dtype(model: ModelConfig, device: str) -> str:
    """The number format of forward and backward; `auto` follows the device."""
    if model.dtype != "auto":
        return model.dtype
    return {"cpu": "float32", "cuda": "bfloat16"}.get(device, "auto")


def kv_dtype(engine: EngineConfig, model: ModelConfig, device: str) -> str:
    """The number format of the KV cache."""
    return "fp8" if engine.kv_cache_dtype == "fp8" else compute_dtype(model, device)


def optimizer_steps_per_rollout(cfg: RLConfig) -> int:
    """Optimizer steps that one rollout is used for, over all its epochs."""
    prompts = cfg.rollout.prompts_per_step
    return _ceil(prompts, cfg.trainer.prompts_per_minibatch or prompts) * cfg.trainer.num_epochs


def trainers_hold_reference(cfg: RLConfig) -> bool:
    """Whether there is a frozen model beside the policy: the KL term has one, unless that is the
    base of adapters, or has devices of its own."""
    return cfg.algorithm.kl.coef > 0 and not (cfg.model.lora.rank or cfg.cluster.num_references)


def samples_per_optimizer_step(cfg: RLConfig) -> int:
    """Samples of one mini-batch, over all devices."""
    prompts = cfg.rollout.prompts_per_step
    mini_prompts = min(cfg.trainer.prompts_per_minibatch or prompts, prompts)
    return mini_prompts * cfg.rollout.n_samples_per_prompt


def derived_rl(
    cfg: RLConfig, *, world_size: int | None = None, num_params: int | None = None
) -> list[Derived]:
    """What one step of `hone rl` does with `world_size` processes, one a device; None: with as few
    as make up one replica.

    `num_params` adds the memory of weights and optimizer; the KV cache is sized where the model's
    `config.json` is at hand.
    """
    rollout = cfg.rollout
    prompts, num_samples = rollout.prompts_per_step, rollout.n_samples_per_prompt
    samples = prompts * num_samples
    mini_prompts = min(cfg.trainer.prompts_per_minibatch or prompts, prompts)
    mini = samples_per_optimizer_step(cfg)
    per_rollout = optimizer_steps_per_rollout(cfg)
    longest = cfg.data.max_prompt_tokens + rollout.max_completion_tokens
    sizes = AxisSizes.of(cfg.trainer.parallel, world_size)
    adapted, is_apart = cfg.model.lora.rank > 0, cfg.num_engines_apart > 0
    is_alias = sizes.world == 1 and not adapted and cfg.engine.backend == "embedded"
    return [
        Derived("prompts_per_step", prompts, "rollout.prompts_per_step"),
        Derived("samples_per_step", samples, f"{prompts} prompts x {num_samples} samples"),
        Derived(
            "optimizer_steps_per_rollout",
            per_rollout,
            f"{_ceil(prompts, mini_prompts)} mini-batches x {cfg.trainer.num_epochs} epochs",
        ),
        Derived("samples_per_optimizer_step", mini, f"{mini_prompts} prompts x {num_samples}"),
        Derived(
            "optimizer_steps",
            cfg.run.steps * per_rollout,
            f"{cfg.run.steps} steps x {per_rollout} a rollout",
        ),
        Derived(
            "max_sequence_tokens",
            longest,
            f"prompt {cfg.data.max_prompt_tokens} + completion {rollout.max_completion_tokens}",
        ),
        Derived("max_tokens_per_step", samples * longest, f"{samples} samples x {longest}"),
        *_cluster(cfg),
        *_pipeline(cfg),
        *_layout(cfg.trainer, mini, sizes),
        *_micro_batches(cfg.trainer, mini, longest, sizes),
        *_engine(cfg.engine, cfg.model, cfg.run.device, longest),
        *_training_memory(
            cfg.model,
            cfg.run.device,
            num_params,
            sizes,
            zero_stage=cfg.trainer.parallel.zero_stage,
            engine_copy=not is_apart and not is_alias,
            shares_weights=not is_apart and is_alias,
            reference=cfg.algorithm.kl.coef > 0 and not adapted and not cfg.cluster.num_references,
            adapted=adapted,
        ),
    ]


def derived_sft(
    cfg: SFTConfig, *, world_size: int | None = None, num_params: int | None = None
) -> list[Derived]:
    """What one optimizer step of `hone sft` does; `world_size` as in `derived_rl`."""
    rows, longest = cfg.data.examples_per_step, cfg.data.max_tokens
    sizes = AxisSizes.of(cfg.trainer.parallel, world_size)
    return [
        Derived("samples_per_optimizer_step", rows, "data.examples_per_step"),
        Derived("optimizer_steps", cfg.run.steps, "run.steps"),
        Derived("max_sequence_tokens", longest, "data.max_tokens"),
        Derived("max_tokens_per_step", rows * longest, f"{rows} rows x {longest}"),
        *_layout(cfg.trainer, rows, sizes),
        *_micro_batches(cfg.trainer, rows, longest, sizes),
        *_training_memory(
            cfg.model,
            cfg.run.device,
            num_params,
            sizes,
            zero_stage=cfg.trainer.parallel.zero_stage,
            engine_copy=False,
            shares_weights=False,
            reference=False,
            adapted=cfg.model.lora.rank > 0,
        ),
    ]


def derived_eval(
    cfg: EvaluateConfig, *, world_size: int | None = None, num_params: int | None = None
) -> list[Derived]:
    """What `hone eval` generates."""
    return _generation(cfg, cfg.eval, cfg.eval.n_samples_per_prompt, num_params)


def derived_generate(
    cfg: GenerateConfig, *, world_size: int | None = None, num_params: int | None = None
) -> list[Derived]:
    """What `hone generate` generates."""
    return _generation(cfg, cfg.generation, cfg.n_samples_per_prompt, num_params)


def _generation(
    cfg: EvaluateConfig | GenerateConfig,
    generation: GenerationConfig,
    num_samples: int,
    num_params: int | None,
) -> list[Derived]:
    longest = cfg.data.max_prompt_tokens + generation.max_completion_tokens
    dtype = compute_dtype(cfg.model, cfg.run.device)
    rows = [
        Derived("samples_per_prompt", num_samples, "n_samples_per_prompt"),
        Derived(
            "max_sequence_tokens",
            longest,
            f"prompt {cfg.data.max_prompt_tokens} + completion {generation.max_completion_tokens}",
        ),
        *_engine(cfg.engine, cfg.model, cfg.run.device, longest),
    ]
    if num_params is not None:
        rows.append(Derived("parameters", num_params, "from config.json or the public name"))
        rows.append(_gib("weights_gib", num_params, _num_bytes(dtype), dtype))
    return rows


def _cluster(cfg: RLConfig) -> Iterator[Derived]:
    """Devices by role, where not all are the trainers'."""
    cluster, size = cfg.cluster, cfg.engine.tensor_parallel_size
    if not cluster.is_used:
        return
    roles = cluster.devices(size)
    for role in roles:
        yield Derived(f"{role.role}_devices", role.number, role.words)
    there = "; not checked against what there is: cluster.devices_per_node is unset"
    if cluster.devices_per_node is not None:
        held = cluster.num_nodes * cluster.devices_per_node
        there = f"; there are {cluster.num_nodes} nodes x {cluster.devices_per_node} = {held}"
    numbers = [role.number for role in roles]
    yield Derived("devices", sum(numbers), f"{' + '.join(map(str, numbers))}{there}")


def _pipeline(cfg: RLConfig) -> Iterator[Derived]:
    """How far sampling runs ahead of the training, where it does."""
    pipeline, prompts = cfg.pipeline, cfg.rollout.prompts_per_step
    if not pipeline.enabled:
        return
    queue, staleness = pipeline.async_queue_size, pipeline.max_staleness
    ahead = staleness if queue is None else min(queue, staleness)
    yield Derived(
        "groups_ahead",
        ahead * prompts,
        f"{ahead} batches of {prompts} prompts: pipeline.max_staleness {staleness}"
        + ("" if queue is None else f" or pipeline.async_queue_size {queue}, the lesser"),
    )
    yield Derived(
        "max_open_groups", (1 + ahead) * prompts, "those, and the batch that is trained next"
    )
    yield Derived("max_staleness", staleness, "updates between the weights of a sample and its own")


def _layout(trainer: SFTTrainerConfig, mini: int, sizes: AxisSizes) -> Iterator[Derived]:
    """Which process has what of an optimizer step's rows; nothing with one process."""
    if sizes.world == 1:
        return
    yield Derived("processes", sizes.world, "one a device")
    yield Derived(
        "layout",
        f"{sizes.data} x {sizes.ring} x {sizes.ulysses} x {sizes.tensor}",
        "data x ring x ulysses x tensor; the last are neighbours",
    )
    yield Derived(
        "shards",
        sizes.fsdp * sizes.tensor,
        f"of what zero_stage {trainer.parallel.zero_stage} cuts: fsdp {sizes.fsdp} x tensor "
        f"{sizes.tensor}",
    )
    yield Derived(
        "rows_per_data_rank",
        _ceil(mini, sizes.data),
        f"{mini} rows of an optimizer step / data {sizes.data}, at most",
    )


def _micro_batches(
    trainer: SFTTrainerConfig, mini: int, longest: int, sizes: AxisSizes
) -> Iterator[Derived]:
    """The micro-batch identity, and the token budgets where they are what cuts."""
    local = _ceil(mini, sizes.data)
    shared = f"{sizes.data} data ranks"
    if trainer.micro_batch_size is not None:
        micro = min(trainer.micro_batch_size, local)
        accumulation = _ceil(local, micro)
        yield Derived("micro_batch_size", micro, "trainer.micro_batch_size; token budgets unused")
        yield Derived(
            "accumulation",
            accumulation,
            f"{mini} <= {micro} micro x {accumulation} accumulation x {shared}",
        )
        return
    budget = trainer.max_tokens_per_microbatch
    forward = trainer.max_tokens_per_forward or 2 * budget
    row = budget * sizes.context
    micro = max(min(row // longest, local), 1)
    most = _ceil(local, micro)
    yield Derived("tokens_per_microbatch", budget, "forward and backward, on one device")
    yield Derived("tokens_per_forward", forward, "forward only, on one device")
    if sizes.context > 1:
        how = f"{budget} x ring {sizes.ring} x ulysses {sizes.ulysses}"
        yield Derived("tokens_per_packed_row", row, how)
    yield Derived("min_micro_batch_size", micro, f"sequences of {longest} tokens that fit {row}")
    yield Derived(
        "max_accumulation",
        most,
        f"{mini} <= {micro} micro x {most} accumulation x {shared}, "
        "if all samples are of full length",
    )


def _engine(
    engine: EngineConfig, model: ModelConfig, device: str, longest: int
) -> Iterator[Derived]:
    facts = ModelFacts.read(model.path)
    context = facts.context_length if facts else None
    if context is not None:
        yield Derived("model_context_tokens", context, "config.json of model.path")
    length = min(engine.max_model_len or context or longest, max(longest, 1))
    per_sequence = _ceil(length, engine.block_size)
    blocks = per_sequence * engine.max_num_seqs
    yield Derived(
        "kv_blocks_per_sequence", per_sequence, f"{length} tokens / {engine.block_size} a block"
    )
    yield Derived(
        "kv_blocks_at_full_load",
        blocks,
        f"{per_sequence} x engine.max_num_seqs {engine.max_num_seqs}",
    )
    dtype = kv_dtype(engine, model, device)
    per_token = facts.kv_bytes_per_token(dtype) if facts else None
    if per_token is not None:
        held = "bfloat16" if dtype == "auto" else dtype
        yield Derived("kv_bytes_per_token", per_token, f"keys and values of all layers, {held}")
        yield Derived(
            "kv_gib_at_full_load",
            round(blocks * engine.block_size * per_token / _GIB, 3),
            f"{blocks} blocks x {engine.block_size} tokens",
        )


def _training_memory(
    model: ModelConfig,
    device: str,
    num_params: int | None,
    sizes: AxisSizes,
    *,
    zero_stage: int,
    engine_copy: bool,
    shares_weights: bool,
    reference: bool,
    adapted: bool,
) -> Iterator[Derived]:
    """Memory of one device that does not depend on the batch, in GiB.

    `engine_copy`: beside the trainer lie weights of the engine's own; `shares_weights`: it samples
    with the trainer's. Of adapters nothing is counted.
    """
    if num_params is None:
        return
    dtype = compute_dtype(model, device)
    held = "bfloat16" if dtype == "auto" else dtype
    mixed = held != "float32"
    tensor, shards = sizes.tensor, sizes.tensor * sizes.fsdp
    reference_shards = shards if zero_stage else sizes.world
    yield Derived("parameters", num_params, "from config.json or the public name")

    def part(name: str, num_bytes: int, how: str, parts: int) -> Derived:
        split = f" / {parts} parts" if parts > 1 else ""
        return _gib(name, num_params, num_bytes, how + split, parts)

    whole = f"{held}, shared with the engine" if shares_weights else held
    parts = [part("weights_gib", _num_bytes(held), whole, shards if zero_stage == 3 else tensor)]
    if not adapted:
        master = "float32" if mixed else "the weights themselves"
        parts += [
            part("masters_gib", 4 * mixed, master, shards),
            part("gradients_gib", 4, "float32", shards if zero_stage >= 2 else tensor),
            part("optimizer_gib", 8, "two float32 moments; Muon keeps one for matrices", shards),
        ]
    if engine_copy:
        parts.append(part("engine_gib", _num_bytes(held), f"{held}, the engine's own", 1))
    if reference:
        parts.append(
            part(
                "reference_gib",
                _num_bytes(held),
                f"{held}, for the KL term; sharded in every stage",
                reference_shards,
            )
        )
    yield from parts
    total = round(sum(float(part.value) for part in parts), 3)
    before = "adapters, activations and KV cache" if adapted else "activations and KV cache"
    yield Derived("total_gib", total, f"of one device, before {before}")


def _gib(name: str, num_params: int, num_bytes: int, how: str, parts: int = 1) -> Derived:
    value = round(num_params * num_bytes / parts / _GIB, 3)
    return Derived(name, value, f"{num_bytes} bytes each, {how}")


def _num_bytes(dtype: str) -> int:
    return 4 if dtype == "float32" else 2


def _ceil(total: int, part: int) -> int:
    return -(-total // part)
