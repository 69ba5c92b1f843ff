"""The report of `hone check`: the numbers of a plan, one per line.

Algorithmic batch sizes are global, so they do not change with the number of devices; micro-batches
are local. Their link is `mini = micro x accumulation x data-parallel`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import NamedTuple

from hone.address import names_code
from hone.config.plan import BatchArithmetic, Role, RunPlan
from hone.config.tree import EvaluateConfig, GenerateConfig, RLConfig, SFTConfig
from hone.distributed.settings import AxisSizes
from hone.engine.settings import BLOCK_SIZE, EngineConfig, num_snapshots, num_state_rows
from hone.families.shape import ModelShape
from hone.families.stages import most_of_a_round, passes_in_flight, stage_layers
from hone.hardware import GIB
from hone.planner.disk import disk_use
from hone.planner.recompute import KEY, chosen_values, is_open
from hone.planner.run_memory import RunMemory, in_gib
from hone.user_code.signatures import OWN, parsed_parameters, shape_of

__all__ = ["Line", "plan_lines"]


class Line(NamedTuple):
    """One number, and its derivation."""

    name: str
    value: int | float | str
    how: str


def plan_lines(plan: RunPlan) -> list[Line]:
    """All numbers of a run. There are none where its processes cannot be laid out, and no sizes of
    a model that is not served, since parts of it would not be counted."""
    if plan.problem is not None:
        return []
    if plan.is_refused:
        plan = replace(plan, model=None)
    lines = [*_steps(plan), *_shapes(plan), *_cluster(plan), *_pipeline(plan)]
    if plan.batch is not None and plan.trainer is not None:
        lines += [*_layout(plan), *_critic_layout(plan)]
        lines += [*_experts(plan), *_micro_batches(plan, plan.batch), *_recompute(plan)]
    return [*lines, *_engine(plan), *_reward_model(plan), *_memory(plan)]


def _steps(plan: RunPlan) -> Iterator[Line]:
    cfg, batch, longest = plan.config, plan.batch, plan.max_sequence_tokens
    if batch is None:
        samples = cfg.n_samples_per_prompt if isinstance(cfg, GenerateConfig) else None
        if isinstance(cfg, EvaluateConfig):
            samples = cfg.eval.n_samples_per_prompt
        if samples is not None:
            yield Line("samples_per_prompt", samples, "n_samples_per_prompt")
    elif isinstance(cfg, SFTConfig):
        yield Line("samples_per_optimizer_step", batch.samples_per_step, "data.examples_per_step")
        yield Line("optimizer_steps", batch.optimizer_steps, "run.steps")
    else:
        yield from _rollouts(batch)
    if longest is None:
        return
    parts = plan.max_sequence_parts
    how = " + ".join(f"{key} {value}" for key, value in parts.items())
    yield Line("max_sequence_tokens", longest, how)
    if batch is not None:
        rows = batch.samples_per_step
        what = "rows" if isinstance(cfg, SFTConfig) else "samples"
        yield Line("max_tokens_per_step", rows * longest, f"{rows} {what} x {longest}")


def _shapes(plan: RunPlan) -> Iterator[Line]:
    """The framework whose signature reward functions have, as far as their files show it."""
    if isinstance(plan.config, RLConfig | EvaluateConfig):
        reward = plan.config.reward
        for name, entry in zip(reward.names, reward.functions, strict=True):
            parameters = parsed_parameters(entry.fn) if names_code(entry.fn) else None
            if parameters is not None and (shape := shape_of(parameters)) is not OWN:
                yield Line(f"reward.{name}", f"{shape.framework}'s shape", f"its `{shape.mark}`")


def _rollouts(batch: BatchArithmetic) -> Iterator[Line]:
    num_samples, steps = batch.samples_per_prompt, batch.optimizer_steps_per_rollout
    yield Line("prompts_per_step", batch.prompts_per_step, "rollout.prompts_per_step")
    yield Line(
        "samples_per_step",
        batch.samples_per_step,
        f"{batch.prompts_per_step} prompts x {num_samples} samples",
    )
    yield Line(
        "optimizer_steps_per_rollout",
        steps,
        f"{batch.num_minibatches} mini-batches x {batch.num_epochs} epochs",
    )
    yield Line(
        "samples_per_optimizer_step",
        batch.samples_per_optimizer_step,
        f"{batch.prompts_per_minibatch} prompts x {num_samples}",
    )
    yield Line(
        "optimizer_steps", batch.optimizer_steps, f"{batch.num_steps} steps x {steps} a rollout"
    )


def _cluster(plan: RunPlan) -> Iterator[Line]:
    """Devices by role, where not all are the trainers'."""
    cfg = plan.config
    if not isinstance(cfg, RLConfig) or not cfg.cluster.is_used:
        return
    cluster, roles = cfg.cluster, cfg.cluster.devices(cfg.engine.tensor_parallel_size)
    for role in roles:
        yield Line(f"{role.role}_devices", role.number, role.words)
    there = "; not checked against what there is: cluster.devices_per_node is unset"
    if cluster.devices_per_node is not None:
        held = cluster.num_nodes * cluster.devices_per_node
        there = f"; there are {cluster.num_nodes} nodes x {cluster.devices_per_node} = {held}"
    numbers = [role.number for role in roles]
    yield Line("devices", sum(numbers), f"{' + '.join(map(str, numbers))}{there}")


def _pipeline(plan: RunPlan) -> Iterator[Line]:
    """How far sampling runs ahead of training, in asynchronous runs."""
    cfg = plan.config
    if not isinstance(cfg, RLConfig) or not cfg.pipeline.samples_ahead:
        return
    prompts, staleness = cfg.rollout.prompts_per_step, cfg.pipeline.max_staleness
    how = f"pipeline.max_staleness {staleness} batches of {prompts} prompts"
    yield Line("groups_ahead", staleness * prompts, how)
    how = "those, and the batch that is trained next"
    yield Line("max_open_groups", (1 + staleness) * prompts, how)
    yield Line("max_staleness", staleness, "updates between the weights of a sample and its own")


def _layout(plan: RunPlan) -> Iterator[Line]:
    """Each process's share of an optimizer step's rows; nothing with one process."""
    sizes = plan.policy.axes
    assert plan.batch is not None
    assert plan.trainer is not None
    if sizes.world == 1:
        return
    yield Line("processes", sizes.world, "one a device")
    stage, has_head = plan.trainer.parallel.zero_stage, not plan.gives_values
    yield from _axes(sizes, plan.shape, zero_stage=stage, has_head=has_head)
    yield Line(
        "rows_per_data_rank",
        plan.rows_per_data_rank,
        f"{plan.batch.samples_per_optimizer_step} rows of an optimizer step / data {sizes.data}, "
        "at most",
    )


def _critic_layout(plan: RunPlan) -> Iterator[Line]:
    """The layout of a remote critic with several processes, and the source of its sizes."""
    cfg, role = plan.config, plan.roles.get("critic")
    if role is None or not role.has_own_devices or role.axes.world == 1:
        return
    assert isinstance(cfg, RLConfig)
    own = cfg.critic.parallel.model_dump(exclude_none=True)
    told = ", ".join(f"critic.parallel.{key} {size}" for key, size in own.items())
    how = f"{told}, and else as trainer.parallel" if told else "as trainer.parallel"
    yield Line("critic_processes", role.axes.world, f"one a device, divided by {how}")
    shape = None if plan.shape is None else RunMemory(plan).shape_of(role)
    stage = role.trainer.parallel.zero_stage
    yield from _axes(role.axes, shape, zero_stage=stage, has_head=False, prefix="critic_")


def _axes(
    sizes: AxisSizes,
    shape: ModelShape | None,
    *,
    zero_stage: int,
    has_head: bool,
    prefix: str = "",
) -> Iterator[Line]:
    """How several processes divide a trained model; the names of the lines begin with `prefix`."""
    stages, groups = sizes.pipeline, sizes.virtual_stages
    if stages > 1 and shape is not None and shape.num_layers >= stages * groups:
        layers = stage_layers(shape, stages, groups, has_head=has_head)
        split = ", ".join(" + ".join(str(len(group)) for group in own) for own in layers)
        passes = passes_in_flight(0, stages, groups, num_batches=most_of_a_round(stages))
        number = f"{passes}" if groups == 1 else f"{passes / groups:.3g}"
        yield Line(
            f"{prefix}stages",
            stages,
            f"pipeline, first to last of {split} layers{' and the head' if has_head else ''}; the "
            f"first has up to {number} micro-batches in flight; each is laid out as follows",
        )
    yield Line(
        f"{prefix}layout",
        f"{sizes.data} x {sizes.ring} x {sizes.ulysses} x {sizes.tensor}",
        "data x ring x ulysses x tensor; the last are neighbours",
    )
    yield Line(
        f"{prefix}shards",
        sizes.fsdp * sizes.tensor,
        f"of what zero_stage {zero_stage} cuts: fsdp {sizes.fsdp} x tensor {sizes.tensor}",
    )
    if sizes.expert > 1:
        yield Line(
            f"{prefix}experts",
            f"1/{sizes.expert}",
            f"of every layer's on a process; {sizes.expert_fsdp} share one set of shards of them",
        )


def _experts(plan: RunPlan) -> Iterator[Line]:
    """Experts of the trained model, if it has any."""
    shape = plan.shape
    if shape is None or not shape.num_experts:
        return
    how = [
        f"in {shape.num_expert_layers} of {shape.num_layers} layers",
        "no loss balances their load",
    ]
    if isinstance(plan.config, RLConfig) and plan.config.algorithm.routing_replay:
        how.append("trained tokens pass those that they passed when they were sampled")
    value = f"{shape.experts_per_token} of {shape.num_experts}"
    yield Line("experts_per_token", value, "; ".join(how))


def _micro_batches(plan: RunPlan, batch: BatchArithmetic) -> Iterator[Line]:
    """The micro-batch identity, and the token budgets where these decide the division."""
    trainer, sizes = plan.trainer, plan.policy.axes
    assert trainer is not None
    micro, most = plan.min_micro_batch, plan.max_accumulation
    identity = (
        f"{batch.samples_per_optimizer_step} <= {micro} micro x {most} accumulation x "
        f"{sizes.data} data ranks"
    )
    if trainer.micro_batch_size is not None:
        yield Line("micro_batch_size", micro, "trainer.micro_batch_size, in place of tokens")
        if trainer.max_tokens_per_forward is not None:
            tokens = trainer.max_tokens_per_forward
            yield Line("tokens_per_forward", tokens, "forward only, on one device")
        yield Line("accumulation", most, identity)
        return
    budget, row = trainer.max_tokens_per_microbatch, plan.tokens_per_packed_row
    forward = trainer.max_tokens_per_forward or 2 * budget
    yield Line("tokens_per_microbatch", budget, "forward and backward, on one device")
    yield Line("tokens_per_forward", forward, "forward only, on one device")
    if "critic" in plan.roles and isinstance(plan.config, RLConfig):
        own = plan.config.critic.max_tokens_per_microbatch
        how = "critic.max_tokens_per_microbatch"
        if own is None:
            how = (
                "as the policy's: layers keep as much of a token, and the logits that a critic has "
                f"not are {trainer.logits_chunk_tokens} tokens' at a time"
            )
        yield Line("critic_tokens_per_microbatch", own or budget, how)
        critic = plan.roles["critic"].trainer
        scored = critic.max_tokens_per_forward or 2 * critic.max_tokens_per_microbatch
        yield Line("critic_tokens_per_forward", scored, "its values, without gradient")
    if "teacher" in plan.roles and isinstance(plan.config, RLConfig):
        scored = plan.config.teacher.max_tokens_per_forward
        how = "as the policy's" if scored is None else "teacher.max_tokens_per_forward"
        yield Line("teacher_tokens_per_forward", scored or forward, how)
    if sizes.context > 1:
        how = f"{budget} x ring {sizes.ring} x ulysses {sizes.ulysses}"
        yield Line("tokens_per_packed_row", row, how)
    fitting = f"sequences of {plan.max_sequence_tokens} tokens that fit {row}"
    yield Line("min_micro_batch_size", micro, fitting)
    yield Line("max_accumulation", most, f"{identity}, if all samples are of full length")


def _recompute(plan: RunPlan) -> Iterator[Line]:
    """The value of `trainer.recompute auto`, and the reason for it."""
    if KEY in plan.chosen:
        yield Line("recompute", chosen_values(plan)[KEY], f"{KEY} auto: {plan.chosen[KEY]}")
    elif is_open(plan):
        how = f"{KEY} is chosen when the run starts; the memory below is that of off"
        yield Line("recompute", "auto", how)


def _engine(plan: RunPlan) -> Iterator[Line]:
    engine, longest = plan.engine, plan.max_sequence_tokens
    if engine is None or longest is None:
        return
    context = plan.model and plan.model.context_length
    if context is not None:
        yield Line("model_context_tokens", context, "config.json of model.path")
    length = plan.max_model_len or longest
    per_sequence = -(-length // BLOCK_SIZE)
    blocks = per_sequence * engine.max_num_seqs
    yield Line("kv_blocks_per_sequence", per_sequence, f"{length} tokens / {BLOCK_SIZE} a block")
    yield Line(
        "kv_blocks_at_full_load",
        blocks,
        f"{per_sequence} x engine.max_num_seqs {engine.max_num_seqs}",
    )
    per_token = plan.model and plan.model.kv_bytes_per_token(plan.kv_dtype)
    if per_token is not None:
        how = f"keys and values of {_with_keys(plan.shape)}, {plan.kv_dtype}"
        yield Line("kv_bytes_per_token", per_token, how)
        yield Line(
            "kv_gib_at_full_load",
            round(blocks * BLOCK_SIZE * per_token / GIB, 3),
            f"{blocks} blocks x {BLOCK_SIZE} tokens",
        )
    if plan.shape is not None and plan.shape.recurrent_indices:
        yield from _states(plan, plan.shape, engine)


def _with_keys(shape: ModelShape | None) -> str:
    """The layers that have keys and values, in words."""
    if shape is None or not shape.recurrent_indices:
        return "all layers"
    return f"the {shape.num_attention_layers} layers with attention"


def _states(plan: RunPlan, shape: ModelShape, engine: EngineConfig) -> Iterator[Line]:
    """Memory of recurrent layers' states, as the embedded engine keeps them."""
    size = shape.state_bytes(plan.num_bytes)
    how = f"of the {len(shape.recurrent_indices)} layers without attention, whatever its length"
    yield Line("state_bytes_per_sequence", size, how)
    if plan.roles["engine"].engine.backend == "embedded":
        number, shares = engine.max_num_seqs, engine.enable_prefix_caching
        rows = num_state_rows(number, enable_prefix_caching=shares)
        snapshots = num_snapshots(number, enable_prefix_caching=shares)
        how = f"{rows} states: engine.max_num_seqs {number}, {snapshots} of prompts, 1 unused"
        yield Line("state_gib", round(rows * size / GIB, 3), how)


def _reward_model(plan: RunPlan) -> Iterator[Line]:
    """Memory of the reward model's passes; also of its weights where the run has no training, whose
    sum would include them."""
    cfg = plan.config
    if "reward_model" not in plan.roles or not isinstance(
        cfg, RLConfig | EvaluateConfig | GenerateConfig
    ):
        return
    how = "reward.model.max_tokens_per_forward; no logits, and nothing kept for a gradient"
    yield Line("reward_model_tokens_per_pass", cfg.reward.model.max_tokens_per_forward, how)
    if plan.shape is None:
        return
    run = RunMemory(plan)
    if plan.batch is None:
        yield _gib("reward_model_gib", run.frozen["reward model"], f"{plan.dtype}, frozen, whole")
    if run.judging:  # colocated; a remote one is in the peak of its phase
        how = "the widest moment of a layer"
        how += ", and the weights that it gathers" * (plan.roles["reward_model"].axes.world > 1)
        yield _gib("reward_model_pass_gib", sum(run.judging.values()), how)


def _memory(plan: RunPlan) -> Iterator[Line]:
    """Memory of the fullest device: the state between steps, and the peak of each phase compared to
    the device's memory."""
    if plan.shape is None:
        return
    yield Line("parameters", plan.shape.num_params, "from config.json or the public name")
    run, gpu = RunMemory(plan), plan.devices.gpu
    yield from _towers(run)
    has = "" if gpu is None or plan.is_on_cpu else f"{gpu.name} has {gpu.memory_gib}"
    if plan.batch is not None:
        step, how = run.step, _shards(plan.policy)
        held = {
            "weights": (step.weights, f"{plan.dtype}, {how}"),
            "masters": (step.masters, f"float32, where weights are not, {how}"),
            "gradients": (step.gradients, f"float32, {how}"),
            "optimizer": (step.optimizer, f"moments, {how}"),
        }
        if run.role is not None and run.role.shares_devices_of and run.engine.weights:
            form = "int8 in layers" if plan.packs_rows else plan.dtype
            held["engine"] = (run.engine.weights, f"{form}, the engine's own")
        purpose = "for the KL term" if isinstance(plan.config, RLConfig) else "frozen"
        for role in plan.scorers:
            if num_bytes := run.frozen[role.title]:
                what = purpose if role.name == "reference" else "frozen"
                is_whole = role.name == "reward_model" and role.axes.world == 1
                of_each = "whole" if is_whole else _shards(role)
                held[role.name] = (num_bytes, f"{plan.dtype}, {what}, {of_each}")
        if run.critic_beside is not None:
            of_each = _shards(plan.roles["critic"])
            held["critic"] = (run.critic_at_rest, f"its weights, masters and moments, {of_each}")
        for name, (num_bytes, what) in held.items():
            yield _gib(f"{name}_gib", num_bytes, what)
        total = sum(num_bytes for num_bytes, _ in held.values())
        less = ", without the vision tower" * (run.shape.tower is not None)
        yield _gib("total_gib", total, f"of one device, before activations and KV cache{less}")
        asleep = run.trainer_asleep + run.engine_asleep + run.reward_model_asleep
        what = "what is offloaded" + ", and what sleeps" * bool(asleep)
        yield _gib("host_gib", run.offloaded + asleep, f"of a process, in host memory: {what}")
        yield _gib("training_peak_gib", step.peak, _sentences(in_gib(step.parts), has))
        if run.critic is not None:
            yield _gib("critic_peak_gib", run.critic.peak, in_gib(run.critic.parts))
        if (use := disk_use(plan)) is not None:
            yield _gib("export_gib", use.export, "on disk: what has been trained")
            yield _gib("checkpoint_gib", use.state, "on disk: masters and moments of one")
            how = f"on disk: checkpoints that are there at one time ({use.num_at_end}), the export"
            yield _gib("disk_peak_gib", use.most_at_end, how)
    else:
        yield _gib("weights_gib", run.engine.weights, plan.dtype)
    if run.is_known and not plan.is_on_cpu and plan.engine is not None:
        for phase in run.phases():
            name = f"{phase.title.replace(' ', '_')}_peak_gib"
            yield _gib(name, phase.num_bytes, _sentences(in_gib(phase.parts), has))


def _towers(run: RunMemory) -> Iterator[Line]:
    """Size of the tower, and the memory of all towers on a device."""
    if (tower := run.shape.tower) is None:
        return
    yield Line("vision_tower_parameters", tower.num_params, "of the vision tower, which is frozen")
    towers = run.towers("engine" if run.plan.trainer is None else "policy")
    how = "model.image_cache_gib for each model on the device, and one pass"
    yield _gib("vision_tower_gib", sum(towers.values()), f"the vision tower: weights, {how}")


def _shards(role: Role) -> str:
    """Text on how processes divide the weights of a model."""
    number = role.axes.fsdp * role.axes.tensor
    return f"{number} shards" if number > 1 else "of one process"


def _gib(name: str, num_bytes: int, how: str) -> Line:
    gib = num_bytes / GIB
    return Line(name, round(gib, 1 if gib >= 10 else 3), how)


def _sentences(*texts: str) -> str:
    return ". ".join(filter(None, texts))
