"""Evaluation: sample held-out prompts, score them, summarise."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from hone.config.reward import RewardConfig
from hone.config.run import EvaluationConfig
from hone.observe.metrics import Last, Mean, Metrics, Sum
from hone.rewards.score import ENV_NAME
from hone.rewards.scorer import check_failure_rate
from hone.rollout.comm import Comm, SingleProcess
from hone.rollout.episodes import Episodes
from hone.rollout.requests import sampling_params
from hone.rollout.runner import Runner, RunningGroup, SampleScorer
from hone.rollout.state import sample_of_values, sample_values
from hone.types import Prompt, Sample, SamplingEngine

__all__ = [
    "PassRule",
    "evaluate",
    "pass_at_k",
    "pass_rule",
    "standard_error",
    "summarise",
]


def evaluate(
    prompts: Sequence[Prompt],
    *,
    engine: SamplingEngine,
    scorer: SampleScorer,
    cfg: EvaluationConfig,
    episodes: Episodes,
    stop: Sequence[str | int] = (),
    max_failure_rate: float = 1.0,
    comm: Comm | None = None,
    progress: Callable[[int, int], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[Sample] | None:
    """Scored samples, `n_samples_per_prompt` for each prompt, in order.

    Processes share the prompts, and all return all samples; all return None where `should_stop`,
    asked between steps of the engine, has become true in one of them. Raises FailureRateError as
    soon as a process alone has more failed samples than `max_failure_rate` allows of all.

    The same seed draws the same samples at every evaluation of a run, so that two evaluations
    differ by the weights alone. `stop` ends completions. Leaves nothing behind in the engine.
    """
    comm = comm or SingleProcess()
    sampling = sampling_params(cfg, stop)
    groups = [
        RunningGroup.of(
            prompt,
            sampling,
            episodes,
            group_id=f"eval-{number}",
            indices=range(cfg.n_samples_per_prompt),
            order=number,
        )
        for number, prompt in enumerate(prompts)
        if number % comm.size == comm.rank
    ]
    num_samples = len(prompts) * cfg.n_samples_per_prompt
    num_own = len(groups) * cfg.n_samples_per_prompt
    runner = Runner(engine, scorer, episodes)
    runner.submit(groups)
    while runner.groups and not should_stop():
        num_failed = runner.num_failed
        runner.step()
        if runner.num_failed > num_failed:
            check_failure_rate(_ended(groups), max_failure_rate, num_samples=num_samples)
        if progress is not None:
            progress(runner.num_ended, num_own)
    own = None if runner.groups else _ended(groups)
    if own is None:
        runner.withdraw()
        scorer.cancel()
    if comm.size == 1:
        return own
    shares = comm.gather(None if own is None else [sample_values(sample) for sample in own])
    if None in shares:
        return None
    found: list[Sample] = []
    for number, prompt in enumerate(prompts):  # that of number n is with process n modulo the size
        share = shares[number % comm.size] or []
        start = number // comm.size * cfg.n_samples_per_prompt
        values = share[start : start + cfg.n_samples_per_prompt]
        found += [sample_of_values(one, prompt) for one in values]
    return found


def _ended(groups: Iterable[RunningGroup]) -> list[Sample]:
    return [sample for entry in groups for sample in entry.group.samples]


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Unbiased chance that at least one of k samples passes, `1 - C(n - c, k) / C(n, k)`.

    arXiv:2107.03374. Requires 1 <= k <= num_samples.
    """
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


@dataclass(frozen=True, slots=True)
class PassRule:
    """When a sample passes: all of these functions that apply to it give at least the threshold."""

    functions: tuple[str, ...]
    threshold: float

    def passes(self, sample: Sample) -> bool | None:
        """None where no function applies."""
        scores = [_parts(sample)[name] for name in self.functions if name in _parts(sample)]
        return min(scores) >= self.threshold if scores else None


def pass_rule(
    samples: Sequence[Sample], cfg: EvaluationConfig, reward: RewardConfig
) -> PassRule | str:
    """By what samples pass, or why that cannot be said.

    It is `eval.pass_function` where that is set. Else functions of positive weight count, without
    `overlong`, which gives 0 to all that is not too long: all of them, where they give nothing but
    0 and 1 and, of several, each gives 1 at least once. One that has given only 0 may be of shaped
    scores. A rule holds for a whole run, or pass@k would change its meaning.
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
        name: next(score for score in held if score not in (0.0, 1.0))
        for name, held in counted.items()
        if not {0.0, 1.0}.issuperset(held)
    }
    never = [name for name, held in counted.items() if name not in shaped and 1.0 not in held]
    if counted and not shaped and (len(counted) == 1 or not never):
        return PassRule(tuple(counted), 1.0)
    causes = [f"{name} returned {score:.4g}, neither 0 nor 1" for name, score in shaped.items()]
    causes += [f"{name} returned only 0" for name in never]
    found = ", ".join(causes) or "no function of positive weight says whether an answer is right"
    return (
        f"{found}. To have it, set eval.pass_function to the reward function that decides whether "
        "an answer is right, and eval.pass_threshold to its lowest score that counts as right"
    )


def _scores(samples: Sequence[Sample]) -> dict[str, list[float]]:
    """What each reward function gave to those samples to which it applies."""
    scores: dict[str, list[float]] = defaultdict(list)
    for sample in samples:
        for name, score in _parts(sample).items():
            if "/" not in name:  # else one of the further numbers of a function
                scores[name].append(score)
    return dict(scores)


def _parts(sample: Sample) -> Mapping[str, float]:
    return sample.reward.parts if sample.valid and sample.reward is not None else {}


def standard_error(clusters: Iterable[Sequence[float]]) -> float | None:
    """Standard error of the mean of all values, which are drawn a cluster at a time; None for fewer
    than two clusters.

    With S_i the sum and n_i the number of the values of cluster i of G, m the mean and N the number
    of all: sqrt(G / (G - 1) * sum_i (S_i - n_i m)^2) / N. One value a cluster gives the usual
    s / sqrt(G).
    """
    held = [values for values in clusters if values]
    if len(held) < 2:
        return None
    number = sum(map(len, held))
    mean = math.fsum(map(math.fsum, held)) / number
    squares = math.fsum((math.fsum(values) - len(values) * mean) ** 2 for values in held)
    return math.sqrt(len(held) / (len(held) - 1) * squares) / number


def summarise(
    samples: Sequence[Sample],
    cfg: EvaluationConfig,
    rule: PassRule | str,
    *,
    has_env: bool = False,
) -> Metrics:
    """Metrics under `eval/`, and under `eval/<task>/` where there are several tasks.

    Failed samples are counted and left out; a prompt without any valid sample does not enter. There
    is pass@k where `rule`, from `pass_rule`, says by what samples pass. `stderr` is the standard
    error over prompts: rows that repeat a prompt with its answer are one cluster. With an
    environment, which may make another task of each row, they are one where all columns are alike.
    """
    prompts = {sample.prompt.id: _content(sample.prompt, has_env=has_env) for sample in samples}
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


def _content(prompt: Prompt, *, has_env: bool) -> tuple[Hashable, ...]:
    """What a prompt has in common with those of rows that repeat it: its tokens and its answer, of
    an environment all columns."""
    columns = repr(sorted(prompt.metadata.items())) if has_env else ""
    return prompt.token_ids, prompt.answer, columns


def _summary(
    samples: Sequence[Sample],
    cfg: EvaluationConfig,
    prefix: str,
    rule: PassRule | str,
    prompt_of: Mapping[str, int],
) -> Metrics:
    """Of some of the samples; `prompt_of` is the number of the prompt that a row, by id, has."""
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
    """Mean and standard error of values of samples, each with the number of its prompt."""
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
    """pass@k is the mean over rows, of which each has samples of its own."""
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
