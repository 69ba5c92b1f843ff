"""Engines on devices of their own, and sampling ahead of the training."""

from __future__ import annotations

from collections.abc import Iterator

from hone.config.checks.finding import Finding, differs, error, warning
from hone.config.checks.parallel import context_size
from hone.config.cluster import ClusterConfig, host_and_port
from hone.config.extras import missing_extra
from hone.config.tree import RLConfig

__all__ = [
    "check_cluster",
    "check_pipeline",
    "check_references",
    "trainers_on_several_nodes",
]


def check_cluster(cfg: RLConfig, world_size: int | None) -> Iterator[Finding]:
    """Whether the devices of all roles add up, and which settings need engines apart."""
    cluster = cfg.cluster
    if not cluster.is_used:
        meant = [f"cluster.{name}" for name in differs(cluster, *type(cluster).model_fields)]
        if meant:
            yield error(
                f"{', '.join(meant)}: set, but neither engines nor references have devices of "
                "their own (cluster.num_engines and cluster.num_references are 0): every training "
                "process has both on its own device, and there is no cluster. Set one of the two, "
                "or remove it; --nproc N starts N training processes.",
                *meant,
                "cluster.num_engines",
                "cluster.num_references",
            )
        return
    if not cluster.num_engines and differs(cluster, "update_weight_buffer_size"):
        yield warning(
            "cluster.update_weight_buffer_size has no effect: cluster.num_engines is 0, and "
            "weights stay in their processes. Remove it.",
            "cluster.update_weight_buffer_size",
            "cluster.num_engines",
        )
    apart = cluster.used_by
    if (missing := missing_extra("ray", needed_by=apart)) is not None:
        yield error(f"{missing}.", apart)
    if world_size is not None and world_size != cluster.num_trainers:
        yield error(
            f"cluster.num_trainers is {cluster.num_trainers}, but {world_size} training processes "
            f"were asked for. With {apart} leave out --nproc; under torchrun start "
            "cluster.num_trainers processes.",
            "cluster.num_trainers",
            apart,
        )
    if cluster.address is None and cluster.num_nodes > 1:
        yield error(
            f"cluster.num_nodes is {cluster.num_nodes}, but cluster.address is unset, so that the "
            "run stays on this host. Name the Ray cluster, or set cluster.num_nodes to 1.",
            "cluster.num_nodes",
            "cluster.address",
        )
    address = cluster.address
    if address is not None and address != "auto" and host_and_port(address) is None:
        yield error(
            f"cluster.address is {address!r}: it must be host:port of the Ray cluster's head, "
            "ray://host:port of Ray's client, or auto. Unset, a Ray of this host alone is started.",
            "cluster.address",
        )
    yield from _devices(cfg)
    yield from check_references(cfg)
    for section, enabled in (
        ("engine", cfg.engine.enable_sleep),
        ("trainer", cfg.trainer.enable_sleep),
    ):
        if enabled and cluster.num_engines:
            yield error(
                f"{section}.enable_sleep is on, which makes room for whom it shares a device with; "
                f"with cluster.num_engines {cluster.num_engines} trainers and engines share none. "
                "Set it to false.",
                f"{section}.enable_sleep",
                "cluster.num_engines",
            )


def _devices(cfg: RLConfig) -> Iterator[Finding]:
    """The sum that a placement is: every role has devices of its own."""
    cluster, size = cfg.cluster, cfg.engine.tensor_parallel_size
    if cluster.devices_per_node is None:
        if cluster.num_nodes > 1 and cluster.is_used and cluster.num_trainers > 1:
            yield warning(
                f"cluster.num_trainers is {cluster.num_trainers}: beside engines or references, "
                f"all trainers must be on one of the cluster.num_nodes {cluster.num_nodes} nodes, "
                "and cluster.devices_per_node, which says whether they fit, is not set. Set it.",
                "cluster.num_trainers",
                "cluster.num_nodes",
                "cluster.devices_per_node",
            )
        return
    held = cluster.num_nodes * cluster.devices_per_node
    there = (
        f"cluster.num_nodes {cluster.num_nodes} x cluster.devices_per_node "
        f"{cluster.devices_per_node} = {held}"
    )
    roles = cluster.devices(size)
    needed, words = sum(role.number for role in roles), " + ".join(role.words for role in roles)
    keys = (
        *(key for role in roles for key in role.keys),
        "cluster.num_nodes",
        "cluster.devices_per_node",
    )
    if needed > held:
        yield error(
            f"{needed} devices are needed: {words} = "
            f"{' + '.join(str(role.number) for role in roles)}; there are {there}. Use fewer, or "
            "more nodes.",
            *keys,
        )
    elif cluster.num_trainers > cluster.devices_per_node:
        yield trainers_on_several_nodes(cluster, cluster.devices_per_node)
    elif size > cluster.devices_per_node:
        yield error(
            f"engine.tensor_parallel_size is {size}, but a node has cluster.devices_per_node "
            f"{cluster.devices_per_node}: the ranks of an engine talk twice a layer and must be on "
            "one node. Use at most that.",
            "engine.tensor_parallel_size",
            "cluster.devices_per_node",
        )
    elif cluster.num_engines > (most := _max_engines(cluster, size)):
        beside = cluster.devices_per_node - cluster.num_trainers
        yield error(
            f"cluster.num_engines is {cluster.num_engines}, but of engines of "
            f"engine.tensor_parallel_size {size} devices, each on one node, only fit {most}: "
            f"{beside} devices of the trainers' node (cluster.devices_per_node "
            f"{cluster.devices_per_node} - cluster.num_trainers {cluster.num_trainers}) and the "
            "other nodes hold no more. Use fewer engines, or a size that divides what a node has.",
            "cluster.num_engines",
            "engine.tensor_parallel_size",
            "cluster.num_trainers",
            "cluster.devices_per_node",
        )
    elif needed < held:
        yield warning(
            f"{held - needed} of {there} devices stay idle: {words} = {needed}. The best use of "
            f"them is more {'engines' if cluster.num_engines else 'trainers'}.",
            *keys,
        )


def trainers_on_several_nodes(cluster: ClusterConfig, num_local: int) -> Finding:
    """The error about more trainers beside a cluster than `num_local`, which one node has."""
    per_node = cluster.devices_per_node
    how = "" if per_node is None else f" (cluster.devices_per_node {per_node})"
    return error(
        f"cluster.num_trainers is {cluster.num_trainers}, but one node has {num_local}{how}: "
        f"trainers on several nodes with {cluster.used_by} above 0 are not served yet. Use at "
        f"most {num_local} (trainer.parallel.zero_stage 3 and trainer.offload_optimizer save "
        "memory), or no cluster (cluster.num_engines and cluster.num_references 0): torchrun "
        "starts trainers on several nodes, each with an engine on its own device.",
        "cluster.num_trainers",
        cluster.used_by,
        *([] if per_node is None else ["cluster.devices_per_node"]),
    )


def _max_engines(cluster: ClusterConfig, size: int) -> int:
    """Engines of `size` devices, each on one node, that fit beside the trainers, which share one;
    references are of one device and take what is left."""
    per_node = cluster.devices_per_node
    assert per_node is not None
    beside, others = per_node - cluster.num_trainers, cluster.num_nodes - 1
    return beside // size + others * (per_node // size)


def check_references(cfg: RLConfig) -> Iterator[Finding]:
    """Whether there is something for references with devices of their own to score."""
    num_references = cfg.cluster.num_references
    if not num_references:
        return
    given = f"cluster.num_references is {num_references}, but"
    if cfg.algorithm.kl.coef == 0:
        yield error(
            f"{given} algorithm.kl.coef is 0, so that there is no reference model and nothing for "
            "it to score. Set algorithm.kl.coef, or remove cluster.num_references.",
            "cluster.num_references",
            "algorithm.kl.coef",
        )
    if cfg.model.lora.rank:
        yield error(
            f"{given} model.lora.rank is {cfg.model.lora.rank}: the reference of adapters is the "
            "model without them, which the trainers have anyway. Remove cluster.num_references.",
            "cluster.num_references",
            "model.lora.rank",
        )
    trainer, longest = cfg.trainer, cfg.data.max_prompt_tokens + cfg.rollout.max_completion_tokens
    if context_size(trainer.parallel) == 1:
        return  # what a trainer's pass holds, a reference's does
    key, budget = "trainer.max_tokens_per_forward", trainer.max_tokens_per_forward
    if budget is None:
        key, budget = "trainer.max_tokens_per_microbatch", 2 * trainer.max_tokens_per_microbatch
    if trainer.micro_batch_size is None and longest > budget:
        yield error(
            f"{given} a sequence of {longest} tokens (data.max_prompt_tokens + "
            f"rollout.max_completion_tokens) does not fit into the {budget} that {key} gives a "
            "pass of one device, and a reference has one. Raise it, or remove "
            "cluster.num_references: beside the policy it shares the tokens of a row.",
            "cluster.num_references",
            "data.max_prompt_tokens",
            "rollout.max_completion_tokens",
            key,
        )


def check_pipeline(cfg: RLConfig) -> Iterator[Finding]:
    """What sampling ahead needs, and what it cannot be combined with."""
    pipeline = cfg.pipeline
    if not pipeline.enabled:
        meant = [f"pipeline.{name}" for name in differs(pipeline, *type(pipeline).model_fields)]
        if meant:
            yield warning(
                f"{', '.join(meant)}: set, but pipeline.enabled is false, so that it does nothing. "
                "Enable it, or remove it.",
                *meant,
                "pipeline.enabled",
            )
        return
    for section, enabled in (
        ("engine", cfg.engine.enable_sleep),
        ("trainer", cfg.trainer.enable_sleep),
    ):
        if enabled and cfg.has_engine_thread:
            yield error(
                f"{section}.enable_sleep is on, which makes room for whom it shares a device with; "
                "with pipeline.enabled and cluster.num_engines 0 trainer and engine work on one "
                "device at the same time. Set it to false.",
                f"{section}.enable_sleep",
                "pipeline.enabled",
                "cluster.num_engines",
            )
    size = cfg.engine.tensor_parallel_size
    if cfg.has_engine_thread and size > 1:
        yield error(
            f"engine.tensor_parallel_size is {size}, but with pipeline.enabled and "
            "cluster.num_engines 0 the engine runs in a thread of the first training process. Set "
            "cluster.num_engines, or engine.tensor_parallel_size to 1.",
            "engine.tensor_parallel_size",
            "pipeline.enabled",
            "cluster.num_engines",
        )
    if cfg.has_engine_thread and cfg.engine.backend == "vllm":
        yield error(
            "engine.backend is vllm, which runs in processes of its own; with pipeline.enabled and "
            "cluster.num_engines 0 the engine runs in a thread. Set cluster.num_engines, or "
            "engine.backend to embedded.",
            "engine.backend",
            "pipeline.enabled",
            "cluster.num_engines",
        )
    if cfg.rollout.oversample_prompts:
        yield error(
            f"rollout.oversample_prompts is {cfg.rollout.oversample_prompts}, but with "
            "pipeline.enabled engines begin samples ahead anyway, as many as "
            "pipeline.max_staleness and pipeline.async_queue_size allow. Set it to 0.",
            "rollout.oversample_prompts",
            "pipeline.enabled",
        )
    if pipeline.max_staleness > 0 and cfg.algorithm.correction.kind == "none":
        yield warning(
            f"pipeline.max_staleness is {pipeline.max_staleness}, so that older weights have "
            "sampled part of what is trained, and algorithm.correction.kind is none: their "
            "gradient is biased. `tis` weights each token by how likely it is now. "
            "(rollout.mask_off_policy_tokens leaves out what was sampled before an interruption, "
            "not what is old.)",
            "pipeline.max_staleness",
            "algorithm.correction.kind",
        )
    queue_size = pipeline.async_queue_size
    if queue_size is not None and queue_size > pipeline.max_staleness:
        yield warning(
            f"pipeline.async_queue_size is {queue_size}, but with "
            f"pipeline.max_staleness {pipeline.max_staleness} no more than so many batches may be "
            "sampled ahead. Raise pipeline.max_staleness, or lower it.",
            "pipeline.async_queue_size",
            "pipeline.max_staleness",
        )
