"""Checks on lengths, sampling and the engine's memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from hone.config.bench import BenchModelConfig
from hone.config.checks.files import unwritable
from hone.config.checks.finding import Finding, differs, error, warning
from hone.config.checks.vllm import undivided
from hone.config.data import DataConfig
from hone.config.engine import EngineConfig
from hone.config.load import dump_config
from hone.config.model import ModelConfig
from hone.config.model_facts import ModelFacts
from hone.config.paths import settings_file
from hone.config.pipeline import PipelineConfig
from hone.config.rollout import GenerationConfig, RolloutConfig
from hone.config.tree import GenerateConfig
from hone.families.registry import FUSED_FAMILIES

__all__ = [
    "check_context",
    "check_engine",
    "check_exact",
    "check_filters",
    "check_kv_cache",
    "check_output",
    "check_overwriting",
    "check_sampling",
    "check_tensor_parallel",
    "check_training_distribution",
    "samples_key",
]

_GIB = 2**30
_SMALL_BATCHED_TOKENS = 2048


def samples_key(section: str) -> str:
    """The key that says how often a prompt of this section is sampled."""
    return "n_samples_per_prompt" if section == "generation" else f"{section}.n_samples_per_prompt"


def check_context(
    data: DataConfig,
    generation: GenerationConfig,
    section: str,
    *,
    engine: EngineConfig,
    model: ModelConfig,
    facts: ModelFacts | None,
) -> Iterator[Finding]:
    """Whether the longest prompt plus completion of `section` fits engine and model."""
    prompt, completion = data.max_prompt_tokens, generation.max_completion_tokens
    longest = prompt + completion
    keys = ("data.max_prompt_tokens", f"{section}.max_completion_tokens")
    total = f"{keys[0]} ({prompt}) + {keys[1]} ({completion}) = {longest}"
    if engine.max_model_len is not None and engine.max_model_len < longest:
        yield error(
            f"engine.max_model_len is {engine.max_model_len}, but {total}. Raise "
            f"engine.max_model_len to {longest}, or shorten one of the two.",
            "engine.max_model_len",
            *keys,
        )
    context = facts.context_length if facts else None
    if context is None:
        return
    if prompt >= context:
        yield error(
            f"{keys[0]} is {prompt}, but the model at model.path has a context of {context} "
            f"tokens, completion included. Lower {keys[0]}, and {keys[1]} ({completion}) where the "
            f"two are more than {context} together.",
            *keys,
            "model.path",
        )
    elif longest > context:
        yield error(
            f"{total}, but the model at model.path ('{model.path}') has a context of {context} "
            f"tokens. Lower {keys[1]} to {context - prompt}, or {keys[0]}.",
            *keys,
            "model.path",
        )
    if engine.max_model_len is not None and engine.max_model_len > context:
        yield error(
            f"engine.max_model_len is {engine.max_model_len}, more than the context of the model "
            f"at model.path, {context} tokens. Leave engine.max_model_len unset.",
            "engine.max_model_len",
            "model.path",
        )


def check_sampling(
    generation: GenerationConfig, section: str, *, num_samples: int, facts: ModelFacts | None
) -> Iterator[Finding]:
    """The sampling distribution of any command."""
    samples = samples_key(section)
    if generation.temperature == 0 and num_samples > 1:
        yield warning(
            f"{section}.temperature is 0 (greedy), so the {samples} = {num_samples} samples of "
            f"a prompt are all equal; set {samples} to 1 or raise the temperature.",
            f"{section}.temperature",
            samples,
        )
    if generation.temperature == 0 and differs(generation, "top_p", "top_k", "min_p"):
        names = differs(generation, "top_p", "top_k", "min_p")
        yield warning(
            f"{section}.temperature is 0 (greedy), so {', '.join(f'{section}.{x}' for x in names)} "
            "changes nothing; remove it or raise the temperature.",
            f"{section}.temperature",
            *(f"{section}.{x}" for x in names),
        )
    if "" in generation.stop:
        yield error(
            f"{section}.stop holds an empty text, which ends every completion at once; remove it.",
            f"{section}.stop",
        )
    vocab_size = facts.vocab_size if facts else None
    for token_id in generation.stop_token_ids:
        if token_id < 0 or (vocab_size is not None and token_id >= vocab_size):
            limit = "" if vocab_size is None else f" and below the vocabulary size {vocab_size}"
            yield error(
                f"{section}.stop_token_ids holds {token_id}; ids are at least 0{limit}.",
                f"{section}.stop_token_ids",
            )


def check_training_distribution(rollout: RolloutConfig) -> Iterator[Finding]:
    """The trainer scores the full softmax, so that is what must have been sampled."""
    for name, off in (("top_p", 1), ("top_k", 0), ("min_p", 0)):
        value = getattr(rollout, name)
        if value != off:
            yield error(
                f"rollout.{name} is {value:g}: a truncated distribution is not the one the "
                f"trainer scores, which biases every ratio. Set rollout.{name} to {off} for "
                f"training; eval.{name} is free.",
                f"rollout.{name}",
            )
    if rollout.temperature == 0:
        yield error(
            "rollout.temperature is 0: greedy samples of a prompt are all equal and nothing can be "
            "learnt from them. Use 1, or a value above 0.",
            "rollout.temperature",
        )
    elif rollout.temperature < 0.1:
        yield warning(
            f"rollout.temperature is {rollout.temperature:g}: groups will hardly differ and "
            "log-probabilities are scaled up by its inverse; 0.6 to 1 is usual.",
            "rollout.temperature",
        )


def check_filters(rollout: RolloutConfig, pipeline: PipelineConfig) -> Iterator[Finding]:
    """Dynamic sampling, over-sampling and partial rollouts."""
    if rollout.dynamic_sampling and rollout.n_samples_per_prompt == 1:
        yield error(
            "rollout.dynamic_sampling drops groups whose rewards are all equal, which with "
            "rollout.n_samples_per_prompt = 1 is every group. Raise rollout.n_samples_per_prompt.",
            "rollout.dynamic_sampling",
            "rollout.n_samples_per_prompt",
        )
    needs = (("max_refill_rounds", "dynamic_sampling", "true"),)
    if pipeline.enabled:
        yield from _interruptions(rollout, pipeline)
    else:
        needs += tuple((name, "oversample_prompts", "above 0") for name in _OF_INTERRUPTED)
    for name, switch, wanted in needs:
        if differs(rollout, name) and not getattr(rollout, switch):
            yield warning(
                f"rollout.{name} has no effect without rollout.{switch}; set rollout.{switch} "
                f"{wanted}, or remove rollout.{name}.",
                f"rollout.{name}",
                f"rollout.{switch}",
            )
    if rollout.oversample_prompts and rollout.max_aborted_count == 0:
        yield warning(
            "rollout.max_aborted_count is 0: every sample is waited for and "
            f"rollout.oversample_prompts = {rollout.oversample_prompts} saves no time. Raise "
            "rollout.max_aborted_count or leave it unset.",
            "rollout.max_aborted_count",
            "rollout.oversample_prompts",
        )
    if rollout.oversample_prompts > rollout.prompts_per_step:
        yield warning(
            f"rollout.oversample_prompts is {rollout.oversample_prompts}, more than "
            f"rollout.prompts_per_step = {rollout.prompts_per_step}: most samples will be several "
            "steps old when they are trained on. A quarter to a half is usual.",
            "rollout.oversample_prompts",
            "rollout.prompts_per_step",
        )


_OF_INTERRUPTED = ("max_aborted_count", "mask_off_policy_tokens")
"""Keys of `rollout` that concern samples which a change of weights has interrupted."""


def _interruptions(rollout: RolloutConfig, pipeline: PipelineConfig) -> Iterator[Finding]:
    """Whether a run ahead of the training interrupts samples as often as keys take it to."""
    for name in differs(rollout, *_OF_INTERRUPTED):
        key, value = f"rollout.{name}", getattr(rollout, name)
        if not pipeline.resumes_samples:
            of = "max_staleness" if pipeline.max_staleness == 0 else "in_flight"
            yield warning(
                f"{key} has no effect with pipeline.{of} {getattr(pipeline, of)}: no sample is "
                f"interrupted by a change of weights. Remove {key}, or change pipeline.{of}.",
                key,
                f"pipeline.{of}",
            )
        elif name == "max_aborted_count" and value >= pipeline.max_staleness:
            yield warning(
                f"{key} is {value} and has no effect: with pipeline.max_staleness "
                f"{pipeline.max_staleness} no sample lives through more changes of weights. Remove "
                f"{key}, or set it below {pipeline.max_staleness}.",
                key,
                "pipeline.max_staleness",
            )


def check_engine(
    engine: EngineConfig,
    *,
    device: str,
    num_samples: int,
    samples_key: str,
    trains: bool,
    shares_device: bool = False,
) -> Iterator[Finding]:
    """Concurrency and memory of generation."""
    if engine.max_num_seqs < num_samples:
        yield warning(
            f"engine.max_num_seqs is {engine.max_num_seqs}, less than {samples_key} = "
            f"{num_samples}: the samples of one prompt cannot all run at once.",
            "engine.max_num_seqs",
            samples_key,
        )
    if engine.max_num_batched_tokens < engine.max_num_seqs:
        yield warning(
            f"engine.max_num_batched_tokens is {engine.max_num_batched_tokens}, less than "
            f"engine.max_num_seqs = {engine.max_num_seqs}: a decode step takes one token of each "
            "running sequence, so only that many can run. Raise engine.max_num_batched_tokens.",
            "engine.max_num_batched_tokens",
            "engine.max_num_seqs",
        )
    elif engine.max_num_batched_tokens < _SMALL_BATCHED_TOKENS and device == "cuda":
        yield warning(
            f"engine.max_num_batched_tokens is {engine.max_num_batched_tokens} with run.device "
            f"cuda: prompts are prefilled in chunks too small to fill a GPU; use at least "
            f"{_SMALL_BATCHED_TOKENS}.",
            "engine.max_num_batched_tokens",
            "run.device",
        )
    if num_samples == 1 and engine.enable_prefix_caching and trains:
        yield warning(
            f"engine.enable_prefix_caching shares prompts within a group, but {samples_key} is 1; "
            "it only helps where prompts begin alike.",
            "engine.enable_prefix_caching",
            samples_key,
        )
    if num_samples > 1 and not engine.enable_prefix_caching:
        yield warning(
            f"engine.enable_prefix_caching is off: each prompt is prefilled {samples_key} = "
            f"{num_samples} times instead of once. Switch it on.",
            "engine.enable_prefix_caching",
            samples_key,
        )
    if engine.enable_sleep and not trains:
        yield warning(
            "engine.enable_sleep frees the KV cache while a trainer works, and nothing trains "
            "here: it has no effect. Remove it.",
            "engine.enable_sleep",
        )
    if shares_device and engine.kv_cache_gib is None and engine.gpu_memory_utilization > 0.8:
        yield warning(
            f"engine.gpu_memory_utilization is {engine.gpu_memory_utilization:g}, but the trainer "
            "needs the same GPU for gradients, optimizer and activations; start with 0.5, or set "
            "engine.kv_cache_gib.",
            "engine.gpu_memory_utilization",
            "engine.kv_cache_gib",
        )
    utilization_set = differs(engine, "gpu_memory_utilization")
    if utilization_set and engine.kv_cache_gib is not None:
        yield warning(
            "engine.gpu_memory_utilization and engine.kv_cache_gib are both set; "
            "engine.kv_cache_gib is used.",
            "engine.gpu_memory_utilization",
            "engine.kv_cache_gib",
        )
    elif utilization_set and device == "cpu":
        yield warning(
            "engine.gpu_memory_utilization has no effect with run.device cpu; set "
            "engine.kv_cache_gib.",
            "engine.gpu_memory_utilization",
            "run.device",
        )


def check_output(output: Path) -> Iterator[Finding]:
    """Whether a file can be written there, which is tried when everything has been computed."""
    if output.is_dir():
        yield error(f"output '{output}' is a folder; give the path of a file.", "output")
        return
    if (problem := unwritable(output.parent)) is not None:
        yield error(f"output '{output}': its folder {problem}; name another place.", "output")


def check_overwriting(cfg: GenerateConfig) -> Iterator[Finding]:
    """Completions and their settings that are there are replaced by the same command alone."""
    settings = settings_file(cfg.output)
    existing = [file for file in (cfg.output, settings) if file.is_file()]
    if not existing:
        return
    if settings not in existing:
        reason = f"output '{cfg.output}' exists, and nothing says how it was made"
    elif settings.read_text(encoding="utf-8", errors="replace") == dump_config(cfg):
        return
    elif cfg.output in existing:
        reason = (
            f"output '{cfg.output}' exists, with completions of other settings, those in "
            f"'{settings}'"
        )
    else:
        reason = (
            f"'{settings}' exists, where the settings of output '{cfg.output}' are kept, and holds "
            "something else"
        )
    files = " and ".join(f"'{file}'" for file in existing)
    yield error(
        f"{reason}. Name another output, or remove {files} to have it written anew.", "output"
    )


def check_tensor_parallel(
    engine: EngineConfig, *, facts: ModelFacts | None, scores: bool, has_cluster: bool = False
) -> Iterator[Finding]:
    """Whether the model divides by `engine.tensor_parallel_size`.

    `scores`: rewards decide what is submitted and aborted when, which ranks would see differently.
    `has_cluster`: the command can set engines apart, where one process decides for all ranks.
    """
    size = engine.tensor_parallel_size
    if size == 1:
        return
    asked = f"engine.tensor_parallel_size is {size}"
    if scores:
        if has_cluster:
            advice = (
                "but an engine beside its trainer samples on that one device. Engines of their own "
                f"devices serve it: set cluster.num_engines (each takes {size} devices) and "
                "cluster.num_trainers. Where the model fits one device beside the trainer's "
                "share, engine.tensor_parallel_size 1 does as well."
            )
        else:
            advice = (
                "but `hone eval` samples on one device. Use 1 where the model fits one; `hone "
                "generate` serves larger ones, without rewards."
            )
        yield error(f"{asked}, {advice}", "engine.tensor_parallel_size")
        return
    divided = facts.divided if facts else {}
    if engine.backend == "vllm":
        yield from _undivided(asked, undivided(divided, size))
        return
    family = facts.family if facts else None
    if family is not None and family not in FUSED_FAMILIES:
        yield error(
            f"{asked}, but the model at model.path is of the family {family!r}, which is not "
            f"divided among devices; {', '.join(FUSED_FAMILIES)} are. Set it to 1.",
            "engine.tensor_parallel_size",
            "model.path",
        )
        return
    uneven = [f"{key} = {number}" for key, number in divided.items() if number % size]
    yield from _undivided(asked, uneven)


def _undivided(asked: str, uneven: Sequence[str]) -> Iterator[Finding]:
    if uneven:
        yield error(
            f"{asked}, which does not divide {', '.join(uneven)} of the model at model.path. "
            "Choose a smaller power of two; further devices run as replicas.",
            "engine.tensor_parallel_size",
            "model.path",
        )


def check_exact(
    model: ModelConfig | BenchModelConfig,
    engine: EngineConfig,
    *,
    device: str,
    facts: ModelFacts | None,
) -> Iterator[Finding]:
    """What `model.exact` needs, as far as no device is asked and no hub."""
    if not model.exact:
        return
    needs = [
        ("run.device", device, device != "cpu", "cuda"),
        ("model.dtype", model.dtype, model.dtype != "float32", "auto"),
        ("engine.kv_cache_dtype", engine.kv_cache_dtype, engine.kv_cache_dtype == "auto", "auto"),
        ("engine.tensor_parallel_size", size := engine.tensor_parallel_size, size == 1, "1"),
    ]
    for key, got, is_served, allowed in needs:
        if not is_served:
            yield error(
                f"model.exact is on, which {key} {got} cannot serve. Set {key} to {allowed}, or "
                "model.exact to false.",
                "model.exact",
                key,
            )
    family = facts.family if facts else None
    if family is not None and family not in FUSED_FAMILIES:
        yield error(
            f"model.exact is on, but the model at model.path is of the family {family!r}; served "
            f"are {', '.join(FUSED_FAMILIES)}. Set model.exact to false.",
            "model.exact",
            "model.path",
        )


def check_kv_cache(
    engine: EngineConfig, *, longest: int, longest_of: str, dtype: str, facts: ModelFacts | None
) -> Iterator[Finding]:
    """Whether the cache of a device holds at least one sequence of full length.

    A number format that is not known yet counts as 2 bytes, so that the error is certain.
    """
    if engine.block_size > longest:
        yield warning(
            f"engine.block_size is {engine.block_size}, longer than the longest sequence "
            f"({longest_of} = {longest}); most of each block stays empty. 16 is usual.",
            "engine.block_size",
        )
    per_token = facts.kv_bytes_per_token(dtype) if facts else None
    if engine.kv_cache_gib is None or per_token is None:
        return
    num_tokens = -(-longest // engine.block_size) * engine.block_size
    needed = num_tokens * per_token // engine.tensor_parallel_size
    if engine.kv_cache_gib * _GIB < needed:
        yield error(
            f"engine.kv_cache_gib is {engine.kv_cache_gib:g}, but one sequence of full length "
            f"({longest_of} = {longest} tokens) takes {needed / _GIB:.3g} GiB. Raise "
            "engine.kv_cache_gib, or shorten sequences.",
            "engine.kv_cache_gib",
            *longest_of.split(" + "),
        )
