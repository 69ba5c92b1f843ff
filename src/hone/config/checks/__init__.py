"""Every cross-field check of a configuration, in one place and without torch.

    for finding in check_rl(cfg): ...

Findings with level `error` come first and stop a run before it starts; warnings are told. Files
are looked at as far as they are on this machine; nothing of the user's is imported or run.
`world_size` is the number of processes that will run; None where that is not known yet.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain

from hone.config.checks.cluster import check_cluster, check_pipeline
from hone.config.checks.files import (
    check_data,
    check_log,
    check_model,
    check_run_dir,
    check_unused_data,
)
from hone.config.checks.finding import Finding, differs, error, warning
from hone.config.checks.generation import (
    check_context,
    check_engine,
    check_exact,
    check_filters,
    check_kv_cache,
    check_output,
    check_overwriting,
    check_sampling,
    check_tensor_parallel,
    check_training_distribution,
    samples_key,
)
from hone.config.checks.layers import (
    check_adapters,
    check_matmul_precision,
    check_rounded_trainer,
    check_sleep,
)
from hone.config.checks.learning import (
    check_algorithm,
    check_batches,
    check_budget,
    check_kl,
    check_memory,
    check_optimizer,
)
from hone.config.checks.parallel import (
    check_context_budget,
    check_parallel,
    check_share,
    context_size,
    replica_size,
)
from hone.config.checks.rewards import check_reward
from hone.config.checks.schedule import (
    check_checkpoints,
    check_evaluation,
    check_passing,
    check_ranking,
    check_run,
    evaluates,
)
from hone.config.checks.vllm import check_vllm, check_vllm_sleep
from hone.config.model_facts import ModelFacts
from hone.config.plan import Devices, RunPlan, compute_dtype, resolve
from hone.config.rollout import GenerationConfig
from hone.config.tree import (
    BenchEngineConfig,
    BenchTrainConfig,
    EvaluateConfig,
    GenerateConfig,
    RLConfig,
    SFTConfig,
)

__all__ = ["Finding", "check_eval", "check_generate", "check_rl", "check_sft", "findings"]


def findings(plan: RunPlan) -> list[Finding]:
    """What is wrong with a planned run, errors first."""
    cfg, world_size = plan.config, plan.world_size
    match cfg:
        case RLConfig():
            return check_rl(cfg, world_size)
        case SFTConfig():
            return check_sft(cfg, world_size)
        case EvaluateConfig():
            return check_eval(cfg, world_size)
        case GenerateConfig():
            return check_generate(cfg, world_size)
        case BenchEngineConfig() | BenchTrainConfig():
            return []


def check_rl(cfg: RLConfig, world_size: int | None = None) -> list[Finding]:
    """Findings for `hone rl`."""
    facts = ModelFacts.read(cfg.model.path)
    rollout, num_samples = cfg.rollout, cfg.rollout.n_samples_per_prompt
    plan = resolve(cfg, facts, Devices(), world_size=world_size)
    assert plan.batch is not None
    steps_per_rollout = plan.batch.optimizer_steps_per_rollout
    mini_prompts = cfg.trainer.prompts_per_minibatch or rollout.prompts_per_step
    longest = cfg.data.max_prompt_tokens + rollout.max_completion_tokens
    longest_of = "data.max_prompt_tokens + rollout.max_completion_tokens"
    findings = [
        *_generating(cfg, rollout, "rollout", num_samples, facts),
        check_reward(cfg.reward),
        check_training_distribution(rollout),
        check_filters(rollout, cfg.pipeline),
        _concurrency(cfg),
        _rounded_cache(cfg),
        check_budget(
            cfg.trainer,
            longest=longest,
            longest_of=longest_of,
            sequences_per_step=mini_prompts * num_samples,
            world_size=world_size,
            context_size=context_size(cfg.trainer.parallel),
        ),
        check_context_budget(cfg.trainer, longest=longest, longest_of=longest_of),
        check_parallel(
            cfg.trainer,
            cfg.model,
            world_size=world_size,
            facts=facts,
            has_reference=plan.trainers_hold_reference,
        ),
        check_cluster(cfg, world_size),
        check_pipeline(cfg),
        check_share(
            world_size,
            key="rollout.prompts_per_step",
            number=rollout.prompts_per_step,
            what="generate",
        ),
        check_batches(rollout, cfg.trainer),
        check_memory(
            cfg.trainer,
            exact=cfg.model.exact,
            device=cfg.run.device,
            world_size=world_size,
        ),
        *_layers(cfg, world_size),
        check_rounded_trainer(cfg.trainer, cfg.algorithm),
        check_sleep(cfg.trainer, world_size),
        check_algorithm(
            cfg.algorithm,
            rollout,
            steps_per_rollout=steps_per_rollout,
            resumes_samples=cfg.pipeline.resumes_samples or rollout.oversample_prompts > 0,
        ),
        check_kl(cfg.algorithm),
        check_optimizer(
            cfg.trainer.optimizer,
            total_steps=cfg.run.steps * steps_per_rollout,
            fine_tunes=False,
        ),
        check_run(cfg.run),
        check_evaluation(cfg.eval, cfg.data, cfg.run),
        check_checkpoints(cfg.checkpoint, cfg.run),
        check_vllm_sleep(cfg.engine, cfg.checkpoint, cfg.eval),
        check_log(cfg.log),
        check_unused_data(cfg.data, "rl"),
    ]
    if evaluates(cfg.eval):
        findings += [
            check_context(
                cfg.data, cfg.eval, "eval", engine=cfg.engine, model=cfg.model, facts=facts
            ),
            check_sampling(
                cfg.eval, "eval", num_samples=cfg.eval.n_samples_per_prompt, facts=facts
            ),
            check_ranking(cfg.eval),
            check_vllm(cfg.engine, cfg.model, {"eval": cfg.eval}, device=cfg.run.device),
            check_passing(cfg.eval, cfg.reward),
            _eval_length(cfg),
        ]
    return _unique(findings)


def _layers(cfg: RLConfig | SFTConfig, world_size: int | None) -> list[Iterable[Finding]]:
    exact, lora = cfg.model.exact, cfg.model.lora
    return [
        check_adapters(lora, cfg.trainer, exact=exact),
        check_matmul_precision(cfg.trainer, cfg.model, device=cfg.run.device),
    ]


def check_sft(cfg: SFTConfig, world_size: int | None = None) -> list[Finding]:
    """Findings for `hone sft`."""
    longest, longest_of = cfg.data.max_tokens, "data.max_tokens"
    return _unique(
        [
            check_model(cfg.model, device=cfg.run.device),
            check_data(cfg.data, cfg.model),
            _sft_context(cfg),
            _exact_without_engine(cfg),
            check_budget(
                cfg.trainer,
                longest=longest,
                longest_of=longest_of,
                sequences_per_step=cfg.data.examples_per_step,
                world_size=world_size,
                context_size=context_size(cfg.trainer.parallel),
            ),
            check_context_budget(cfg.trainer, longest=longest, longest_of=longest_of),
            check_parallel(
                cfg.trainer,
                cfg.model,
                world_size=world_size,
                facts=ModelFacts.read(cfg.model.path),
                has_reference=False,
            ),
            check_share(
                world_size,
                key="data.examples_per_step",
                number=cfg.data.examples_per_step,
                what="train",
                together=replica_size(cfg.trainer.parallel),
            ),
            check_memory(cfg.trainer, exact=False, device=cfg.run.device, world_size=world_size),
            *_layers(cfg, world_size),
            check_optimizer(cfg.trainer.optimizer, total_steps=cfg.run.steps, fine_tunes=True),
            check_run(cfg.run),
            check_evaluation(cfg.eval, cfg.data, cfg.run),
            check_checkpoints(cfg.checkpoint, cfg.run),
            check_log(cfg.log),
            check_unused_data(cfg.data, "sft"),
            _samples_nothing(cfg),
        ]
    )


def check_eval(cfg: EvaluateConfig, world_size: int | None = None) -> list[Finding]:
    """Findings for `hone eval`."""
    facts = ModelFacts.read(cfg.model.path)
    return _unique(
        [
            *_generating(cfg, cfg.eval, "eval", cfg.eval.n_samples_per_prompt, facts),
            check_run_dir(cfg.run.dir),
            check_reward(cfg.reward),
            check_passing(cfg.eval, cfg.reward),
            check_unused_data(cfg.data, "eval"),
        ]
    )


def check_generate(cfg: GenerateConfig, world_size: int | None = None) -> list[Finding]:
    """Findings for `hone generate`."""
    facts = ModelFacts.read(cfg.model.path)
    overwritten = [
        error(
            f"output '{cfg.output}' is also read as data.train.{index}.path; name another output.",
            "output",
            f"data.train.{index}.path",
        )
        for index, source in enumerate(cfg.data.train)
        if source.path == str(cfg.output)
    ]
    unused = [
        warning(
            f"data.{name} is set, but `hone generate` answers the prompts of data.train that are "
            f"not held out. Remove data.{name}.",
            f"data.{name}",
            "data.train",
        )
        for name in differs(cfg.data, "eval", "eval_fraction")
    ]
    return _unique(
        [
            *_generating(cfg, cfg.generation, "generation", cfg.n_samples_per_prompt, facts),
            check_output(cfg.output),
            check_overwriting(cfg),
            overwritten,
            unused,
            check_unused_data(cfg.data, "generate"),
        ]
    )


def _generating(
    cfg: RLConfig | EvaluateConfig | GenerateConfig,
    generation: GenerationConfig,
    section: str,
    num_samples: int,
    facts: ModelFacts | None,
) -> list[Iterable[Finding]]:
    """What every command that samples shares."""
    device = cfg.run.device
    return [
        check_model(cfg.model, device=device),
        check_data(cfg.data, cfg.model),
        check_context(
            cfg.data, generation, section, engine=cfg.engine, model=cfg.model, facts=facts
        ),
        check_sampling(generation, section, num_samples=num_samples, facts=facts),
        check_engine(
            cfg.engine,
            device=device,
            num_samples=num_samples,
            samples_key=samples_key(section),
            trains=section == "rollout",
            shares_device=section == "rollout"
            and not _is_apart(cfg)
            and not cfg.engine.enable_sleep,
        ),
        check_tensor_parallel(
            cfg.engine,
            facts=facts,
            scores=section != "generation" and not _is_apart(cfg),
            has_cluster=isinstance(cfg, RLConfig),
        ),
        check_exact(cfg.model, cfg.engine, device=device, facts=facts),
        check_vllm(cfg.engine, cfg.model, {section: generation}, device=device),
        check_kv_cache(
            cfg.engine,
            longest=cfg.data.max_prompt_tokens + generation.max_completion_tokens,
            longest_of=f"data.max_prompt_tokens + {section}.max_completion_tokens",
            dtype="fp8"
            if cfg.engine.kv_cache_dtype == "fp8"
            else compute_dtype(cfg.model.dtype, device),
            facts=facts,
        ),
    ]


def _is_apart(cfg: RLConfig | EvaluateConfig | GenerateConfig) -> bool:
    """Whether engines have devices of their own, and one process tells them what to do."""
    return isinstance(cfg, RLConfig) and cfg.cluster.num_engines > 0


def _concurrency(cfg: RLConfig) -> list[Finding]:
    rollout, engine = cfg.rollout, cfg.engine
    groups = rollout.prompts_per_step + rollout.oversample_prompts
    samples = groups * rollout.n_samples_per_prompt
    if not differs(engine, "max_num_seqs") or engine.max_num_seqs <= samples:
        return []
    return [
        warning(
            f"engine.max_num_seqs is {engine.max_num_seqs}, but a step has only {samples} samples: "
            f"{groups} groups (rollout.prompts_per_step and rollout.oversample_prompts) of "
            f"rollout.n_samples_per_prompt = {rollout.n_samples_per_prompt}. The rest is not used.",
            "engine.max_num_seqs",
            "rollout.prompts_per_step",
            "rollout.n_samples_per_prompt",
        )
    ]


def _rounded_cache(cfg: RLConfig) -> list[Finding]:
    if cfg.engine.kv_cache_dtype != "fp8" or cfg.algorithm.correction.kind != "none":
        return []
    return [
        warning(
            "engine.kv_cache_dtype is fp8, so that samples come from a slightly different policy "
            "than the trainer's, and algorithm.correction.kind is none. Set it to tis.",
            "engine.kv_cache_dtype",
            "algorithm.correction.kind",
        )
    ]


def _eval_length(cfg: RLConfig) -> list[Finding]:
    allowed, measured = cfg.rollout.max_completion_tokens, cfg.eval.max_completion_tokens
    if measured >= allowed:
        return []
    return [
        warning(
            f"eval.max_completion_tokens is {measured}, less than rollout.max_completion_tokens = "
            f"{allowed}: evaluation cuts answers that training lets finish.",
            "eval.max_completion_tokens",
            "rollout.max_completion_tokens",
        )
    ]


def _sft_context(cfg: SFTConfig) -> list[Finding]:
    facts = ModelFacts.read(cfg.model.path)
    context = facts.context_length if facts else None
    if context is None or cfg.data.max_tokens <= context:
        return []
    return [
        error(
            f"data.max_tokens is {cfg.data.max_tokens}, but the model at model.path "
            f"('{cfg.model.path}') has a context of {context} tokens. Lower data.max_tokens.",
            "data.max_tokens",
            "model.path",
        )
    ]


def _samples_nothing(cfg: SFTConfig) -> list[Finding]:
    if not differs(cfg.log, "samples_per_step"):
        return []
    return [
        warning(
            "log.samples_per_step is set, and `hone sft` does not use it: it samples nothing. "
            "Remove it.",
            "log.samples_per_step",
        )
    ]


def _exact_without_engine(cfg: SFTConfig) -> list[Finding]:
    if not cfg.model.exact:
        return []
    return [
        warning(
            "model.exact makes trainer and engine compute the same bits, and `hone sft` has no "
            "engine: it has no effect. Remove it.",
            "model.exact",
        )
    ]


def _unique(findings: Sequence[Iterable[Finding]]) -> list[Finding]:
    """Errors first, each finding once: evaluation may repeat what training already said."""
    found = dict.fromkeys(chain.from_iterable(findings))
    return sorted(found, key=lambda finding: finding.level)
