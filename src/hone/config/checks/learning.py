"""Checks on batches, the learning rule and the optimizer."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

from hone.config.algorithm import GROUP_ESTIMATORS, AlgorithmConfig
from hone.config.checks.finding import Finding, differs, error, warning
from hone.config.rollout import RolloutConfig
from hone.config.trainer import OptimizerConfig, SFTTrainerConfig, TrainerConfig

__all__ = [
    "check_algorithm",
    "check_batches",
    "check_budget",
    "check_kl",
    "check_memory",
    "check_optimizer",
]

_BUDGET = "trainer.max_tokens_per_microbatch"
_SECTION = "trainer.parallel."
_LONG_ROW = 32768
"""Tokens of a row above which it fills a device by itself: packing several brings nothing."""
_OFFLOADS = ("offload_optimizer", "offload_gradients", "offload_parameters")


def check_budget(
    trainer: SFTTrainerConfig,
    *,
    longest: int,
    longest_of: str,
    sequences_per_step: int,
    world_size: int | None,
    context_size: int = 1,
) -> Iterator[Finding]:
    """Token budgets against the longest sequence, and micro-batches against the step.

    `context_size` of `world_size` processes (None: not known yet) share the tokens of a row, and
    each has its budget.
    """
    longest_keys = longest_of.split(" + ")
    budget, forward = trainer.max_tokens_per_microbatch, trainer.max_tokens_per_forward
    if trainer.micro_batch_size is not None:
        if differs(trainer, "max_tokens_per_microbatch", "max_tokens_per_forward"):
            yield warning(
                f"trainer.micro_batch_size ({trainer.micro_batch_size} sequences) and {_BUDGET} "
                f"({budget} tokens) or trainer.max_tokens_per_forward are both set: "
                "trainer.micro_batch_size is used and the token budgets are not. Remove one.",
                "trainer.micro_batch_size",
                _BUDGET,
                "trainer.max_tokens_per_forward",
            )
        if trainer.micro_batch_size > sequences_per_step:
            yield warning(
                f"trainer.micro_batch_size is {trainer.micro_batch_size}, more than the "
                f"{sequences_per_step} sequences of an optimizer step; it acts as "
                f"{sequences_per_step}.",
                "trainer.micro_batch_size",
            )
        return
    total, row = f"{longest_of} = {longest}", longest
    if context_size > 1:
        longest = -(-longest // context_size)
        total += f", {longest} on each of {context_size} processes that share a row"
    if budget < longest:
        yield error(
            f"{_BUDGET} is {budget}, but a sequence may take {longest} tokens ({total}) and is "
            f"never cut. Raise {_BUDGET} to at least {longest}"
            f"{_or_share(row, budget, world_size, context_size)}.",
            _BUDGET,
            *longest_keys,
        )
    elif context_size == 1 and budget < 2 * longest and longest <= _LONG_ROW:
        yield warning(
            f"{_BUDGET} is {budget}, less than twice the longest sequence ({total}): micro-batches "
            f"of long sequences stay half empty. Use {2 * longest} or more where memory allows.",
            _BUDGET,
            *longest_keys,
        )
    if forward is not None and forward < longest:
        yield error(
            f"trainer.max_tokens_per_forward is {forward}, but a sequence may take {longest} "
            f"tokens ({total}). Raise it to at least {longest} or leave it unset.",
            "trainer.max_tokens_per_forward",
            *longest_keys,
        )
    elif forward is not None and forward < budget:
        yield warning(
            f"trainer.max_tokens_per_forward is {forward}, less than {_BUDGET} = {budget}, though "
            "a pass without backward needs less memory; leave it unset for twice that budget.",
            "trainer.max_tokens_per_forward",
            _BUDGET,
        )


def _or_share(row: int, budget: int, world_size: int | None, context_size: int) -> str:
    """What else serves a row of `row` tokens than the budget that just holds it: more for short
    rows, which are packed; for long ones more processes that share it."""
    if row <= _LONG_ROW:
        return f"; {2 * -(-row // context_size)} or more packs well"
    sizes = f"{_SECTION}ulysses_size or {_SECTION}ring_size"
    if world_size is None:
        return f", or share a row over devices: with several devices set {sizes}"
    larger = [n for n in range(context_size + 1, world_size + 1) if world_size % n == 0]
    if not larger:
        return ""
    size = next((n for n in larger if -(-row // n) <= budget), larger[-1])
    share = -(-row // size)
    enough = "" if share <= budget else f", and {_BUDGET} to {share}"
    return f", or share a row over processes: set {sizes} (or their product) to {size}{enough}"


def check_memory(
    trainer: SFTTrainerConfig,
    *,
    exact: bool,
    device: str,
    world_size: int | None = None,
) -> Iterator[Finding]:
    """What is recomputed and what waits in host memory."""
    yield from _recompute(trainer, exact=exact)
    yield from _offload(trainer)
    if trainer.offload_parameters:
        yield from _offloaded_parameters(trainer, exact=exact, world_size=world_size)
    if device == "cpu":
        for name in differs(trainer, "offload_activations", *_OFFLOADS):
            yield warning(
                f"trainer.{name} moves data to host memory, but run.device is cpu: it only costs "
                f"time. Remove trainer.{name}.",
                f"trainer.{name}",
                "run.device",
            )


def _recompute(trainer: SFTTrainerConfig, *, exact: bool) -> Iterator[Finding]:
    mode, every = trainer.recompute, trainer.recompute_every_n_layers
    if trainer.offload_activations and mode == "off":
        yield error(
            "trainer.offload_activations keeps the inputs of recomputed layers on the host, and "
            "trainer.recompute is off. Set trainer.recompute to full or selective, or turn "
            "trainer.offload_activations off.",
            "trainer.offload_activations",
            "trainer.recompute",
        )
    if every > 1 and mode == "off":
        yield warning(
            f"trainer.recompute_every_n_layers is {every}, but trainer.recompute is off: nothing "
            "is recomputed. Set trainer.recompute to full, or remove it.",
            "trainer.recompute_every_n_layers",
            "trainer.recompute",
        )
    if exact and mode == "selective":
        yield error(
            "trainer.recompute is selective, but model.exact recomputes whole layers or none. Set "
            "trainer.recompute to full or off.",
            "trainer.recompute",
            "model.exact",
        )
    elif exact and mode == "full":
        for name in differs(trainer, "recompute_every_n_layers", "offload_activations"):
            yield error(
                f"trainer.{name} is {getattr(trainer, name)}, but model.exact recomputes every "
                f"layer from its input on the device. Remove trainer.{name}.",
                f"trainer.{name}",
                "model.exact",
            )


def _offload(trainer: SFTTrainerConfig) -> Iterator[Finding]:
    """Gradients, then parameters, follow the optimizer's states to the host."""
    if trainer.optimizer.name == "muon":
        for name in _OFFLOADS[1:]:
            if getattr(trainer, name):
                yield error(
                    f"trainer.{name} is on, and trainer.optimizer.name is muon: Muon "
                    "orthogonalises whole matrices, while what lies on the host visits the device "
                    f"in pieces. Use adamw, or turn trainer.{name} off.",
                    f"trainer.{name}",
                    "trainer.optimizer.name",
                )
        return
    reasons = (
        "the step that streams states fetches gradients too",
        "without weights on the device there is no room for what is twice as large",
    )
    for (needed, name), reason in zip(pairwise(_OFFLOADS), reasons, strict=True):
        if getattr(trainer, name) and not getattr(trainer, needed):
            yield error(
                f"trainer.{name} is on, and trainer.{needed} is off: {reason}. Turn "
                f"trainer.{needed} on, or trainer.{name} off.",
                f"trainer.{name}",
                f"trainer.{needed}",
            )


def _offloaded_parameters(
    trainer: SFTTrainerConfig, *, exact: bool, world_size: int | None
) -> Iterator[Finding]:
    """Whether layers' weights can leave the device."""
    key, stage = "trainer.offload_parameters", trainer.parallel.zero_stage
    if exact:
        yield error(
            f"{key} is on, and model.exact too: exact mode computes with the engine's layers, "
            "which hold their weights. Turn one of them off.",
            key,
            "model.exact",
        )
    if world_size is not None and world_size > 1 and stage != 3:
        yield error(
            f"{key} is on, and trainer.parallel.zero_stage is {stage}, which keeps the gathered "
            "weights of all layers on the device. Set it to 3.",
            key,
            "trainer.parallel.zero_stage",
        )
    if world_size == 1:
        yield error(
            f"{key} is on, and one process trains: it keeps the shards of several in host memory. "
            "Start several processes (--nproc N), or turn it off.",
            key,
        )


def check_batches(rollout: RolloutConfig, trainer: TrainerConfig) -> Iterator[Finding]:
    """Mini-batches cut a step into equal parts."""
    prompts, mini = rollout.prompts_per_step, trainer.prompts_per_minibatch
    if mini is not None and prompts % mini:
        below = max(d for d in range(1, prompts + 1) if prompts % d == 0 and d <= mini)
        yield error(
            f"trainer.prompts_per_minibatch is {mini}, which does not divide "
            f"rollout.prompts_per_step = {prompts}; optimizer steps would differ in size. "
            f"Use {below}, or another divisor.",
            "trainer.prompts_per_minibatch",
            "rollout.prompts_per_step",
        )


def check_algorithm(
    algorithm: AlgorithmConfig,
    rollout: RolloutConfig,
    *,
    steps_per_rollout: int,
    resumes_samples: bool,
) -> Iterator[Finding]:
    """Advantages, losses, clipping and corrections. `resumes_samples`: under other weights than
    those that began them."""
    if algorithm.advantage in GROUP_ESTIMATORS and rollout.n_samples_per_prompt == 1:
        yield error(
            f"algorithm.advantage {algorithm.advantage} compares the samples of a prompt, but "
            "rollout.n_samples_per_prompt is 1, so every advantage would be 0. Raise "
            "rollout.n_samples_per_prompt, or use reinforce_pp.",
            "algorithm.advantage",
            "rollout.n_samples_per_prompt",
        )
    if algorithm.advantage == "dr_grpo" and algorithm.aggregation == "sequence_mean":
        yield warning(
            "algorithm.advantage is dr_grpo, but algorithm.aggregation sequence_mean brings back "
            "the length bias it removes; use constant.",
            "algorithm.advantage",
            "algorithm.aggregation",
        )
    yield from _clipping(algorithm, steps_per_rollout)
    yield from _correction(algorithm, rollout)
    yield from _penalty(algorithm, rollout, resumes_samples=resumes_samples)
    if algorithm.entropy_coef < 0:
        yield warning(
            f"algorithm.entropy_coef is {algorithm.entropy_coef:g}: a negative bonus drives the "
            "policy towards one answer; use 0 or above.",
            "algorithm.entropy_coef",
        )


def _clipping(algorithm: AlgorithmConfig, steps_per_rollout: int) -> Iterator[Finding]:
    low, high, loss = algorithm.clip_low, algorithm.clip_high, algorithm.loss
    if algorithm.dual_clip is not None and loss != "ppo_clip":
        yield error(
            f"algorithm.dual_clip is set, but algorithm.loss {loss} does not use it. Remove "
            "algorithm.dual_clip, or set algorithm.loss to ppo_clip.",
            "algorithm.dual_clip",
            "algorithm.loss",
        )
    if loss == "gspo" and min(low, high) > 0.05:
        yield warning(
            f"algorithm.loss gspo clips the mean ratio of a sequence, which stays within a few "
            f"thousandths of 1; algorithm.clip_low {low:g} and algorithm.clip_high {high:g} never "
            "act. The paper uses 3e-4 and 4e-4.",
            "algorithm.loss",
            "algorithm.clip_low",
            "algorithm.clip_high",
        )
    if loss == "gspo" and algorithm.aggregation != "sequence_mean":
        yield warning(
            f"algorithm.loss gspo is defined on whole sequences; algorithm.aggregation "
            f"{algorithm.aggregation} weighs long ones more. Use sequence_mean.",
            "algorithm.loss",
            "algorithm.aggregation",
        )
    if high < low:
        yield warning(
            f"algorithm.clip_high ({high:g}) is below algorithm.clip_low ({low:g}): unlikely "
            "tokens can fall faster than they can rise. Are the two swapped?",
            "algorithm.clip_high",
            "algorithm.clip_low",
        )
    if low >= 1 and loss == "ppo_clip":
        yield warning(
            f"algorithm.clip_low is {low:g}: ratios are never below 0, so nothing is clipped from "
            "below; 0.2 is usual.",
            "algorithm.clip_low",
        )
    if steps_per_rollout > 1 and high >= 1:
        yield warning(
            f"one rollout is used for {steps_per_rollout} optimizer steps "
            "(trainer.prompts_per_minibatch, trainer.num_epochs), but algorithm.clip_high "
            f"{high:g} hardly clips; the policy may run away from its samples; use 0.2 to 0.3.",
            "algorithm.clip_high",
            "trainer.prompts_per_minibatch",
            "trainer.num_epochs",
        )


def _correction(algorithm: AlgorithmConfig, rollout: RolloutConfig) -> Iterator[Finding]:
    correction = algorithm.correction
    low, high, kind = correction.low, correction.high, correction.kind
    key = "algorithm.correction"
    if kind == "none":
        unused = [f"{key}.{name}" for name in differs(correction, "low", "high")]
        if unused:
            yield warning(
                f"{' and '.join(unused)} set, but {key}.kind is none: nothing is corrected. Set "
                f"{key}.kind, or remove {' and '.join(unused)}.",
                f"{key}.kind",
                *unused,
            )
        if rollout.oversample_prompts:
            yield warning(
                "rollout.oversample_prompts carries samples over to newer weights, but "
                f"{key}.kind is none: the gradient of what older weights have sampled is biased. "
                f"Set {key}.kind to tis or icepop. (rollout.mask_off_policy_tokens leaves out what "
                "was sampled before an interruption, not samples that waited for their group.)",
                "rollout.oversample_prompts",
                f"{key}.kind",
            )
        return
    if kind == "tis" and differs(correction, "low"):
        yield warning(
            f"{key}.low is {low:g}, but {key}.kind tis only cuts at {key}.high; use icepop or "
            "sequence_mask for a lower end.",
            f"{key}.low",
            f"{key}.kind",
        )
    if kind != "tis" and low >= high:
        yield error(
            f"{key}.low ({low:g}) must be below {key}.high ({high:g}); no ratio lies between.",
            f"{key}.low",
            f"{key}.high",
        )
    elif high < 1 or (kind != "tis" and low > 1):
        yield error(
            f"{key}.low {low:g} and {key}.high {high:g} exclude 1, the ratio of samples that are "
            "exactly on-policy. Use a range around 1, such as 0.5 to 2.",
            f"{key}.low",
            f"{key}.high",
        )


def _penalty(
    algorithm: AlgorithmConfig, rollout: RolloutConfig, *, resumes_samples: bool
) -> Iterator[Finding]:
    """A masked token pays no penalty, so sequences would be compared by how much is masked."""
    kl, masks = algorithm.kl, list[str]()
    if rollout.truncated_samples == "mask":
        masks.append("truncated_samples")
    if rollout.mask_off_policy_tokens and resumes_samples:
        masks.append("mask_off_policy_tokens")
    whole_sequences = algorithm.advantage in ("grpo", "dr_grpo", "rloo")
    if kl.coef == 0 or kl.placement != "reward" or not whole_sequences:
        return
    for name in masks:
        yield error(
            f"rollout.{name} is {getattr(rollout, name)}, and masked tokens pay no KL penalty: "
            f"algorithm.advantage {algorithm.advantage} would compare penalised samples with "
            "spared ones. Set algorithm.kl.placement to loss, or use reinforce_pp_baseline.",
            "algorithm.kl.placement",
            "algorithm.advantage",
            f"rollout.{name}",
        )


def check_kl(algorithm: AlgorithmConfig) -> Iterator[Finding]:
    """The distance to the reference model."""
    kl = algorithm.kl
    if kl.coef == 0:
        for name in differs(kl, "placement", "estimator"):
            yield warning(
                f"algorithm.kl.{name} is {getattr(kl, name)}, but algorithm.kl.coef is 0: no KL "
                f"term is computed. Set algorithm.kl.coef, or remove algorithm.kl.{name}.",
                f"algorithm.kl.{name}",
                "algorithm.kl.coef",
            )
    elif kl.placement == "loss" and kl.estimator == "k1":
        yield error(
            "algorithm.kl.estimator k1 with algorithm.kl.placement loss has an expected gradient "
            "of zero: it would cost a reference pass and do nothing. Use k2 or k3, or set "
            "algorithm.kl.placement to reward.",
            "algorithm.kl.estimator",
            "algorithm.kl.placement",
        )
    elif kl.placement == "reward" and kl.estimator != "k1":
        yield warning(
            f"algorithm.kl.placement reward with algorithm.kl.estimator {kl.estimator} biases the "
            "gradient; in the reward k1 is the estimator of the reverse KL.",
            "algorithm.kl.placement",
            "algorithm.kl.estimator",
        )


def check_optimizer(
    optimizer: OptimizerConfig, *, total_steps: int, fine_tunes: bool
) -> Iterator[Finding]:
    """Learning rates and their course over `total_steps` optimizer steps."""
    key = "trainer.optimizer"
    if optimizer.lr == 0:
        yield warning(f"{key}.lr is 0: nothing is learnt; 1e-6 is usual for RL.", f"{key}.lr")
    if not all(0 <= beta < 1 for beta in optimizer.betas):
        yield error(
            f"{key}.betas is {list(optimizer.betas)}; both must be at least 0 and below 1.",
            f"{key}.betas",
        )
    if optimizer.name == "muon" and not differs(optimizer, "muon_lr"):
        yield warning(
            f"{key}.name is muon with the default {key}.muon_lr of {optimizer.muon_lr:g}, a rate "
            "for pre-training; fine-tuning usually takes 1e-4 to 1e-3. Set it.",
            f"{key}.name",
            f"{key}.muon_lr",
        )
    if optimizer.name != "muon":
        for name in differs(optimizer, "muon_lr", "muon_momentum"):
            yield warning(
                f"{key}.{name} is set, but {key}.name is {optimizer.name}; set {key}.name to muon, "
                f"or remove {key}.{name}.",
                f"{key}.{name}",
                f"{key}.name",
            )
    if fine_tunes and not differs(optimizer, "lr"):
        yield warning(
            f"{key}.lr is at its default of {optimizer.lr:g}, a rate for RL; supervised "
            "fine-tuning usually takes 1e-5 to 1e-4.",
            f"{key}.lr",
        )
    if optimizer.warmup_steps > total_steps:
        yield error(
            f"{key}.warmup_steps is {optimizer.warmup_steps}, but the run has {total_steps} "
            f"optimizer steps (run.steps): {key}.lr is never reached. Lower {key}.warmup_steps.",
            f"{key}.warmup_steps",
            "run.steps",
        )
    if optimizer.schedule == "constant" and differs(optimizer, "min_lr_ratio"):
        yield warning(
            f"{key}.min_lr_ratio is the end of a falling schedule, but {key}.schedule is constant; "
            "use linear or cosine.",
            f"{key}.min_lr_ratio",
            f"{key}.schedule",
        )
