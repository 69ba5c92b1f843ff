"""`hone generate`: prompts are read as they are needed, completions written as they come.

prompts ──► `Batch` ──► `_chosen` ──► part of this replica ──► output, once all are done
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from itertools import chain, islice
from operator import itemgetter
from time import monotonic
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hone.config.parallel import ParallelConfig
from hone.config.tree import GenerateConfig
from hone.data.reading import num_rows, read_prompts
from hone.distributed.mesh import Mesh
from hone.loops.engine_ranks import EngineRanks
from hone.loops.inference import counting, load_engine
from hone.loops.inputs import (
    room_for_prompts,
    share_of_workers,
    transcripts_of,
    try_out,
    turns_of,
)
from hone.loops.launch import join
from hone.loops.workers import judged
from hone.models.load import load_config
from hone.models.tensor_parallel import TensorParallel
from hone.models.tokenizer import decoder, load_tokenizer, require_known_tokens
from hone.observe.kept_result import settings_text
from hone.observe.loggers import completion_row, json_line, pair_row
from hone.observe.parts import Part, PartWriter, finish_parts, read_parts, taken_parts
from hone.observe.whole_file import write_whole
from hone.paths import settings_file
from hone.rewards.scorer import FailureRateError, Scorer, describe_failures
from hone.rollout.batch import Batch
from hone.rollout.buffer import Progress
from hone.rollout.episodes import Episodes
from hone.rollout.requests import sampling_params
from hone.rollout.runner import Runner
from hone.types import Prompt, Sample

__all__ = ["run_generation"]

_log = logging.getLogger(__name__)

_TRIED_PROMPTS = 64
_MAX_DESCRIBED = 100


def run_generation(cfg: GenerateConfig) -> int:
    """Sample `n_samples_per_prompt` completions for each prompt and write into `output` what
    `keep` says; the number of rows.

    Goes on where it was killed; of an output that is there, nothing is done. Of several processes
    each replica of the engine takes its share of the prompts, and the first process puts together
    what they have written, in the order of the prompts. Raises UserError, and FailureRateError
    where more than `reward.max_failure_rate` of the completions cannot be scored.
    """
    parallel, size = ParallelConfig(), cfg.engine.tensor_parallel_size
    with join(cfg.run, parallel) as (mesh, watch):
        ranks = EngineRanks.join(size, mesh, timeout_s=parallel.timeout_s)
        watch.follow(mesh.groups | ranks.groups)
        watch.enter("generate")
        if mesh.broadcast(cfg.output.is_file()):
            _log.info("%s is there already; remove it to have it made anew", cfg.output)
            with cfg.output.open("rb") as lines:
                return sum(1 for _ in lines)
        with ExitStack() as stack:
            parts: list[Part] = []
            if mesh.is_first:
                write_whole(settings_file(cfg.output), settings_text(cfg), "output")
                parts = stack.enter_context(taken_parts(cfg.output))
            _generate(cfg, mesh, ranks, mesh.broadcast(parts))
            mesh.gather(None)  # all are done
            parts = read_parts(cfg.output)
            mesh.gather(None)
            if mesh.is_first:
                finish_parts(cfg.output)
                _conclude(cfg, parts)
            mesh.gather(None)  # it is there
    return sum(part.done.num_rows for part in parts)


def _conclude(cfg: GenerateConfig, parts: Sequence[Part]) -> None:
    drawn = sum(part.done.num_samples for part in parts)
    failed = sum(part.done.num_failed for part in parts)
    if not _is_scored(cfg):
        return
    if drawn > failed:
        mean = sum(part.done.reward_sum for part in parts) / (drawn - failed)
        _log.info("%s completions drawn, mean reward %.4g", f"{drawn:,}", mean)
    if failed:
        _log.warning("warning: %s of them have no reward", f"{failed:,}")


def _generate(cfg: GenerateConfig, mesh: Mesh, ranks: EngineRanks, parts: Sequence[Part]) -> None:
    """Sample what is not done yet: the first rank of each engine drives it, reads the prompts and
    writes the part of its replica; the other ranks repeat its calls."""
    torch.manual_seed(cfg.run.seed)
    tokenizer = load_tokenizer(cfg.model)
    turns = turns_of(cfg, tokenizer)
    tp, limit = ranks.tp, cfg.max_completion_tokens
    with ExitStack() as stack:
        prompts: Iterator[Prompt] = iter(())
        scorer = scores = None
        if ranks.is_first:
            prompts = _known(_prompts_of(cfg, tokenizer), tokenizer, cfg)
        if ranks.is_first and _is_scored(cfg):
            rewards = share_of_workers(cfg.reward, processes_per_engine=tp.size)
            scorer = Scorer(rewards, max_completion_tokens=limit, env=cfg.env)
            stack.enter_context(scorer)
            first = list(islice(prompts, _TRIED_PROMPTS))
            prompts = chain(first, prompts)
            if mesh.is_first:
                try_out(scorer, first, tokenizer, turns)
            scores = judged(scorer, transcripts_of(cfg, first), cfg, mesh.device)
        lead = ranks.lead(load_engine(cfg, mesh, tp, tokenizer))
        counter = stack.enter_context(counting(mesh, "prompts"))
        if scorer is not None:
            scorer.on_wait = counter.waiting

        def make(between: Progress) -> None:
            episodes = Episodes(
                decode=decoder(tokenizer, turns.ends),
                max_turns=1 if scorer is None else scorer.max_turns,
                render=turns,
                run_seed=cfg.run.seed,
                purpose="generate",
            )
            batch = Batch(
                _left_of(prompts, tp, parts),
                Runner(lead.engine, scores, episodes),
                sampling=sampling_params(cfg.generation, cfg.generation.stop),
                num_samples=cfg.n_samples_per_prompt,
                max_in_engine=2 * cfg.engine.max_num_seqs,
            )
            with closing(PartWriter(cfg.output, tp.replica, tp.num_replicas)) as writer:
                total = -(-num_rows(cfg.data) // tp.num_replicas)
                if mesh.is_first and (before := sum(part.done.num_groups for part in parts)):
                    folder = parts[0].path.parent
                    _log.info("going on after %s prompts, from %s", f"{before:,}", folder)
                failures, begun_s = _Failures(cfg, total), monotonic()
                while not batch.is_done:
                    for number, samples in batch.step():
                        failures.check(samples)
                        rows = [json_line(row) for row in _chosen(samples, cfg)]
                        writer.append(number, samples, rows)
                    between(writer.done.num_groups, total)
                    counter.count(writer.done.num_groups, total)
            stats, passed_s = lead.engine.stats(), monotonic() - begun_s
            told = f"{stats.num_generated_tokens:,} tokens in {passed_s:.1f} s, "
            told += f"{stats.busy_s / passed_s:.1%} of it in the engine"
            _log.info("%s: %.0f tok/s", told, stats.num_generated_tokens / passed_s)

        lead.broadcast_from_rank0(make)


def _is_scored(cfg: GenerateConfig) -> bool:
    """Whether completions have rewards."""
    return cfg.reward.has_parts or cfg.env.path is not None


def _prompts_of(cfg: GenerateConfig, tokenizer: PreTrainedTokenizerBase) -> Iterator[Prompt]:
    return read_prompts(
        cfg.data,
        tokenizer,
        seed=cfg.run.seed,
        max_prompt_tokens=room_for_prompts(cfg),
        keeps_messages=cfg.env.path is not None,
    )


def _left_of(
    prompts: Iterator[Prompt], tp: TensorParallel, parts: Sequence[Part]
) -> Iterator[tuple[int, Prompt]]:
    """The prompts of this replica that no part has, with their numbers."""
    for number, prompt in enumerate(prompts):
        is_own = number % tp.num_replicas == tp.replica
        if is_own and not any(part.has(number) for part in parts):
            yield number, prompt


def _known(
    prompts: Iterator[Prompt], tokenizer: PreTrainedTokenizerBase, cfg: GenerateConfig
) -> Iterator[Prompt]:
    """The prompts as they are read. Raises UserError for one that the model has no tokens for."""
    vocab_size = load_config(cfg.model).vocab_size
    for prompt in prompts:
        require_known_tokens([prompt], tokenizer, vocab_size, cfg.model.path)
        yield prompt


def _chosen(samples: Sequence[Sample], cfg: GenerateConfig) -> list[dict[str, Any]]:
    """Rows of what `keep` leaves of a group."""
    if cfg.keep == "all":
        return [completion_row(sample) for sample in samples]
    scored = [(sample.reward.total, sample) for sample in samples if sample.reward is not None]
    if cfg.keep == "passing":
        return [completion_row(one) for reward, one in scored if reward >= cfg.pass_threshold]
    if not scored:
        return []
    highest, best = max(scored, key=itemgetter(0))
    if cfg.keep == "best":
        return [completion_row(best)]
    lowest, worst = min(scored, key=itemgetter(0))
    return [pair_row(best, worst)] if lowest < highest else []


class _Failures:
    """Ends a run of which too many completions cannot be scored."""

    def __init__(self, cfg: GenerateConfig, num_prompts: int) -> None:
        self._limit = cfg.reward.max_failure_rate
        self._num_samples = num_prompts * cfg.n_samples_per_prompt
        self._number, self._first = 0, list[Sample]()

    def check(self, samples: Sequence[Sample]) -> None:
        failed = [sample for sample in samples if sample.failure is not None]
        self._number += len(failed)
        self._first += failed[: _MAX_DESCRIBED - len(self._first)]
        if failed and self._number > self._limit * self._num_samples:
            raise FailureRateError(
                f"{self._number:,} completions have no reward, more than the allowed "
                f"{self._limit:.0%} of all (`reward.max_failure_rate`): "
                f"{describe_failures(self._first)}",
                self._first,
            )
