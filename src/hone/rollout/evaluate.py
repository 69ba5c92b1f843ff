"""Evaluation: sample held-out prompts and score them. `summary.py` says what the samples show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from hone.config.run import EvaluationConfig
from hone.rewards.scorer import check_failure_rate
from hone.rollout.comm import Comm, SingleProcess
from hone.rollout.episodes import Episodes
from hone.rollout.requests import sampling_params
from hone.rollout.runner import Runner, RunningGroup, SampleScorer
from hone.rollout.state import sample_of_values, sample_values
from hone.types import Prompt, Sample, SamplingEngine

__all__ = ["evaluate"]


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
    meet: Callable[[bool], bool] = bool,
    progress: Callable[[int, int], None] | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> list[Sample] | None:
    """Scored samples, `n_samples_per_prompt` for each prompt, in order.

    The prompts are distributed over the processes of `comm`, and each process returns all samples.
    All return None where `should_stop()`, called between engine steps, is true in one of them.
    Raises FailureRateError as soon as one process has more failed samples than `max_failure_rate`
    allows for all.

    The same seed gives the same samples at every evaluation of a run, so two evaluations differ
    only by the weights. `stop` are stop strings and ids, `meet` is that of `Collector`. The engine
    is left without requests, and none of these samples has a session any more.
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

    def advance() -> None:
        num_failed = runner.num_failed
        runner.step()
        if runner.num_failed > num_failed:
            check_failure_rate(_ended(groups), max_failure_rate, num_samples=num_samples)
        if progress is not None:
            progress(runner.num_ended, num_own)

    while runner.is_sampling and not should_stop():
        advance()
    while meet(bool(runner.groups) and not should_stop()):
        advance()
    own = None if runner.groups else _ended(groups)
    if own is None:
        runner.drop()
    if comm.size == 1:
        return own
    values = [
        sample_values(sample, entry.group.prompt)
        for entry in groups
        for sample in entry.group.samples
    ]
    values_by_rank = comm.gather(None if own is None else values)
    if None in values_by_rank:
        return None
    samples: list[Sample] = []
    for number, prompt in enumerate(prompts):  # prompt n was sampled by process n modulo the size
        of_rank = values_by_rank[number % comm.size] or []
        start = number // comm.size * cfg.n_samples_per_prompt
        of_prompt = of_rank[start : start + cfg.n_samples_per_prompt]
        samples += [sample_of_values(fields, prompt) for fields in of_prompt]
    return samples


def _ended(groups: Iterable[RunningGroup]) -> list[Sample]:
    return [sample for entry in groups for sample in entry.group.samples]
