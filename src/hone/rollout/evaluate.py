"""Evaluation: sample held-out prompts, score them, summarise."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence

from hone.config.run import EvaluationConfig
from hone.observe.metrics import Mean, Metrics
from hone.rollout.open_groups import SampleScorer
from hone.rollout.requests import Decode, requests_for, sample_of
from hone.rollout.rollout import Alone, Peers
from hone.rollout.state import sample_of_values, sample_values
from hone.types import Prompt, Sample, SamplingEngine

__all__ = ["evaluate", "pass_at_k", "summarise"]


def evaluate(
    prompts: Sequence[Prompt],
    *,
    engine: SamplingEngine,
    scorer: SampleScorer,
    cfg: EvaluationConfig,
    decode: Decode,
    seed: int,
    peers: Peers | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[Sample]:
    """Scored samples, `n_samples_per_prompt` for each prompt, in order.

    Processes share the prompts, and all return all samples.

    The same seed draws the same samples at every evaluation of a run, so that two evaluations
    differ by the weights alone. Leaves nothing behind in the engine.
    """
    peers = peers or Alone()
    owners: dict[str, tuple[Prompt, int]] = {}
    for number, prompt in enumerate(prompts[: cfg.max_prompts]):
        if number % peers.size != peers.rank:
            continue
        requests = requests_for(
            prompt,
            cfg,
            group_id=f"eval-{number}",
            num_samples=cfg.n_samples_per_prompt,
            run_seed=seed,
            purpose="eval",
            number=0,
        )
        engine.submit(requests)
        owners |= {request.id: (prompt, index) for index, request in enumerate(requests)}

    done: dict[str, Sample] = {}
    while len(done) < len(owners):
        if engine.has_unfinished:
            for completion in engine.step():
                prompt, index = owners[completion.request_id]
                scorer.submit(sample_of(prompt, index, completion, decode))
        for sample in scorer.poll(0.0 if engine.has_unfinished else 0.05):
            done[sample.id] = sample
        if progress is not None:
            progress(len(done), len(owners))
    own = [done[request_id] for request_id in owners]
    if peers.size == 1:
        return own
    by_prompt: dict[int, list[Sample]] = defaultdict(list)
    for rank, theirs in enumerate(peers.gather([sample_values(sample) for sample in own])):
        for position, values in enumerate(theirs):
            number = rank + peers.size * (position // cfg.n_samples_per_prompt)
            by_prompt[number].append(sample_of_values(values, prompts[number]))
    return [sample for number in sorted(by_prompt) for sample in by_prompt[number]]


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """Unbiased chance that at least one of k samples passes, `1 - C(n - c, k) / C(n, k)`.

    arXiv:2107.03374. Requires 1 <= k <= num_samples.
    """
    return 1.0 - math.comb(num_samples - num_passed, k) / math.comb(num_samples, k)


def summarise(samples: Sequence[Sample], cfg: EvaluationConfig) -> Metrics:
    """Metrics under `eval/`, and under `eval/<task>/` where there are several tasks.

    Failed samples are counted and left out; a prompt without any valid sample does not enter.
    """
    metrics = _summary(samples, cfg, "eval")
    by_task: dict[str, list[Sample]] = defaultdict(list)
    for sample in samples:
        by_task[sample.prompt.task].append(sample)
    if len(by_task) > 1:
        for task, members in sorted(by_task.items()):
            metrics |= _summary(members, cfg, f"eval/{task}")
    return metrics


def _summary(samples: Sequence[Sample], cfg: EvaluationConfig, prefix: str) -> Metrics:
    valid = [sample for sample in samples if sample.valid]
    rewards = [sample.reward.total for sample in valid if sample.reward]
    metrics: Metrics = {
        f"{prefix}/reward/mean": Mean.of(rewards),
        f"{prefix}/completion_tokens/mean": Mean.of([float(len(s.token_ids)) for s in valid]),
        f"{prefix}/truncated_share": Mean.of([s.truncated for s in valid]),
        f"{prefix}/failed_share": Mean.of([not s.valid for s in samples]),
    }
    by_prompt: dict[str, list[bool]] = defaultdict(list)
    for sample, reward in zip(valid, rewards, strict=True):
        by_prompt[sample.prompt.id].append(reward >= cfg.pass_threshold)
    k = 1
    while k <= cfg.n_samples_per_prompt:
        counted = [passed for passed in by_prompt.values() if len(passed) >= k]
        if counted:
            rates = [pass_at_k(len(passed), sum(passed), k) for passed in counted]
            metrics[f"{prefix}/pass@{k}"] = Mean.of(rates)
        k *= 2
    return metrics
