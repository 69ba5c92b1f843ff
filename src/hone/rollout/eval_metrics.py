"""Summary of an evaluation's samples: rewards, pass rates, and their standard errors."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from hone.config.run import EvaluationConfig
from hone.observe.metrics import Last, Mean, Metrics, Sum
from hone.rewards.score import ENV_NAME
from hone.rewards.settings import RewardConfig
from hone.types import Sample

__all__ = ["PassRule", "pass_at_k", "pass_rule", "standard_error", "summarise"]


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Unbiased chance that at least one of k samples passes, `1 - C(n - c, k) / C(n, k)`.

    arXiv:2107.03374. Requires 1 <= k <= num_samples.
    """
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


@dataclass(frozen=True, slots=True)
class PassRule:
    """A sample passes when each of these functions that applies to it gives at least the
    threshold."""

    functions: tuple[str, ...]
    threshold: float

    def passes(self, sample: Sample) -> bool | None:
        """Whether the sample passes; None where no function applies."""
        scores = [_parts(sample)[name] for name in self.functions if name in _parts(sample)]
        return min(scores) >= self.threshold if scores else None


def pass_rule(
    samples: Sequence[Sample], cfg: EvaluationConfig, reward: RewardConfig
) -> PassRule | str:
    """The rule by which samples pass, or a text on why there is none.

    The rule is `eval.pass_function` where that is set. Else a sample passes when all functions of
    positive weight give 1, provided that they give only 0 and 1. `overlong` does not count, since
    it gives 0 to all that is not too long. Of several functions each must have given 1 at least
    once: one that gave only 0 may have shaped scores. A rule is kept for a whole run, so that
    pass@k keeps its meaning.
    """
    scores = _scores(samples)
    if not scores:
        return "no sample has a reward"
    if cfg.pass_function is not None:
        if cfg.pass_function not in scores:
            return f"eval.pass_function '{cfg.pass_function}' applies to none of the samples"
        return PassRule((cfg.pass_function,), cfg.pass_threshold)
    counted = {
        name: scores[name]
        for name, entry in zip(reward.names, reward.functions, strict=True)
        if name in scores and entry.weight > 0 and entry.fn != "overlong"
    }
    if ENV_NAME in scores:
        counted[ENV_NAME] = scores[ENV_NAME]
    shaped = {
        name: next(score for score in given if score not in (0.0, 1.0))
        for name, given in counted.items()
        if not {0.0, 1.0}.issuperset(given)
    }
    never = [name for name, given in counted.items() if name not in shaped and 1.0 not in given]
    if counted and not shaped and (len(counted) == 1 or not never):
        return PassRule(tuple(counted), 1.0)
    causes = [f"{name} returned {score:.4g}, neither 0 nor 1" for name, score in shaped.items()]
    causes += [f"{name} returned only 0" for name in never]
    cause = ", ".join(causes) or "no function of positive weight says whether an answer is right"
    return (
        f"{cause}. For pass@k, set eval.pass_function to the reward function that decides whether "
        "an answer is right, and eval.pass_threshold to its lowest score that counts as right"
    )


def _scores(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """The scores of each reward function, for the samples to which it applies."""
    scores: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for name, score in _parts(sample).items():
            if "/" not in name:  # else one of the further numbers of a function
                scores[name].append(score)
    return dict(scores)


def _parts(sample: Sample) -> Mapping[str, float]:
    return sample.reward.parts if sample.valid and sample.reward is not None else {}


def standard_error(clusters: Iterable[Sequence[float]]) -> float | None:
    """Cluster-robust standard error of the mean of all values; None for fewer than two clusters.

    For G clusters, where S_i is the sum and n_i the number of the values of cluster i, m the mean
    and N the number of all values: sqrt(G / (G - 1) * sum_i (S_i - n_i m)^2) / N. With one value
    in each cluster it is the usual s / sqrt(G).
    """
    nonempty = [values for values in clusters if values]
    if len(nonempty) < 2:
        return None
    number = sum(map(len, nonempty))
    mean = math.fsum(map(math.fsum, nonempty)) / number
    squares = math.fsum((math.fsum(values) - len(values) * mean) ** 2 for values in nonempty)
    return math.sqrt(len(nonempty) / (len(nonempty) - 1) * squares) / number


def summarise(
    samples: Sequence[Sample],
    cfg: EvaluationConfig,
    rule: PassRule | str,
    *,
    has_env: bool = False,
) -> Metrics:
    """Metrics under `eval/`, and under `eval/<task>/` where there are several tasks.

    Failed samples are counted and left out of means, and so are prompts without a valid sample.
    pass@k is included where `rule`, the result of `pass_rule`, is a rule. `stderr` is the standard
    error over prompts: rows with the same prompt, images and answer are one cluster. With an
    environment all columns must be the same, since it may make another task of each row.
    """
    prompts = {sample.prompt.id: _content(sample, has_env=has_env) for sample in samples}
    numbers = {content: number for number, content in enumerate(dict.fromkeys(prompts.values()))}
    prompt_of = {row: numbers[content] for row, content in prompts.items()}
    metrics = _summary(samples, cfg, "eval", rule, prompt_of)
    by_task: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_task[sample.prompt.task].append(sample)
    if len(by_task) > 1:
        for task, members in sorted(by_task.items()):
            metrics |= _summary(members, cfg, f"eval/{task}", rule, prompt_of)
    return metrics


def _content(sample: Sample, *, has_env: bool) -> tuple[Hashable, ...]:
    """A key that is equal for samples of rows that repeat a prompt: the tokens and images at the
    start of the episode, the answer and, with an environment, all columns."""
    prompt, opening = sample.prompt, sample.opening_ids
    first = next(iter(sample.paths.values()))
    columns = repr(sorted(prompt.metadata.items())) if has_env else ""
    return opening, first.model_input.key_of(0, len(opening)), prompt.answer, columns


def _summary(
    samples: Sequence[Sample],
    cfg: EvaluationConfig,
    prefix: str,
    rule: PassRule | str,
    prompt_of: Mapping[str, int],
) -> Metrics:
    """The metrics of some of the samples. `prompt_of` maps the id of a row to the number of its
    prompt."""
    valid = [sample for sample in samples if sample.valid]
    metrics: Metrics = {
        f"{prefix}/num_prompts": Sum(len({prompt_of[sample.prompt.id] for sample in samples})),
        f"{prefix}/num_samples": Sum(len(samples)),
        f"{prefix}/completion_tokens/mean": Mean.of([float(s.num_sampled) for s in valid]),
        f"{prefix}/truncated_share": Mean.of([s.truncated for s in valid]),
        f"{prefix}/failed_share": Mean.of([not s.valid for s in samples]),
    }
    totals = [(prompt_of[s.prompt.id], s.reward.total) for s in valid if s.reward is not None]
    metrics |= _mean(f"{prefix}/reward", totals)
    for part in sorted({name for sample in valid for name in _parts(sample)}):
        values = [(prompt_of[s.prompt.id], _parts(s)[part]) for s in valid if part in _parts(s)]
        metrics |= _mean(f"{prefix}/reward/{part}", values)
    if isinstance(rule, str):
        return metrics
    return metrics | _passed(valid, cfg, prefix, rule, prompt_of)


def _mean(name: str, values: Iterable[tuple[int, float]]) -> Metrics:
    """Mean and standard error of `values`: pairs of a prompt's number and a sample's value."""
    by_prompt: dict[int, list[float]] = defaultdict(list)
    for number, value in values:
        by_prompt[number].append(value)
    metrics: Metrics = {f"{name}/mean": Mean.of(list(chain(*by_prompt.values())))}
    error = standard_error(by_prompt.values())
    return metrics if error is None else metrics | {f"{name}/stderr": Last(error)}


def _passed(
    valid: Sequence[Sample],
    cfg: EvaluationConfig,
    prefix: str,
    rule: PassRule,
    prompt_of: Mapping[str, int],
) -> Metrics:
    """pass@k for k = 1, 2, 4, ...: the mean over rows, each with its own samples."""
    by_row: dict[str, list[bool]] = defaultdict(list)
    for sample in valid:
        if (passed := rule.passes(sample)) is not None:
            by_row[sample.prompt.id].append(passed)
    metrics: Metrics = {}
    k = 1
    while k <= cfg.n_samples_per_prompt:
        rates: dict[int, list[float]] = defaultdict(list)
        for row, passed in by_row.items():
            if len(passed) >= k:
                rates[prompt_of[row]].append(pass_at_k(len(passed), sum(passed), k))
        if rates:
            metrics[f"{prefix}/pass@{k}"] = Mean.of(list(chain(*rates.values())))
            if (error := standard_error(rates.values())) is not None:
                metrics[f"{prefix}/pass@{k}/stderr"] = Last(error)
        k *= 2
    return metrics | ({f"{prefix}/pass_threshold": Last(rule.threshold)} if metrics else {})
