"""`hone generate`: prompts are read as they are needed, completions written as they come.

prompts ──► `Batch` ──► `_chosen` ──► part of this host ──► output, once all are done

A run that goes on begins with the last row before which all is done; data before it are not read.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from itertools import chain, islice
from operator import itemgetter
from time import monotonic
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from hone.config.tree import GenerateConfig
from hone.data.reading import PromptReader
from hone.data.tool_schemas import ToolSchemas
from hone.images.parts import data_uri
from hone.images.store import STORE
from hone.loops.inputs import facts_of, image_reader, room_for_prompts, tools_of, turns_of
from hone.loops.sampling import Host, counting, is_scored, join_hosts, sampler_of
from hone.models.load import load_config
from hone.models.tokenizer import load_tokenizer, require_known_tokens
from hone.observe.kept_result import settings_text
from hone.observe.loggers import completion_row, json_line, pair_row
from hone.observe.resumable_jsonl import (
    PartFile,
    PartFileWriter,
    indexes_folder,
    locked_parts,
    merge_parts,
    read_parts,
    start_of,
)
from hone.observe.whole_file import write_whole
from hone.paths import settings_file
from hone.rewards.environment import EnvFacts
from hone.rewards.scorer import FailureRateError, describe_failures
from hone.rollout.batch import Batch
from hone.rollout.requests import sampling_params
from hone.types import Prompt, Sample

__all__ = ["run_generation"]

_log = logging.getLogger(__name__)

_TRIED_PROMPTS = 64
_MAX_DESCRIBED = 100


def run_generation(cfg: GenerateConfig, num_devices: int = 1) -> int:
    """Sample `n_samples_per_prompt` completions for each prompt and write those that `keep` selects
    into `output`. Returns the number of rows.

    Samples on `num_devices` devices of this host, or on those of torchrun's processes, whose hosts
    share the prompts. The first process joins the outputs in the order of the prompts. A killed run
    is resumed; if `output` exists, nothing is done. Raises UserError, and FailureRateError if more
    than `reward.max_failure_rate` of the completions cannot be scored.
    """
    with join_hosts(cfg, num_devices, "generate") as host:
        if host.broadcast(cfg.output.is_file()):
            _log.info("%s exists already; remove it to generate it again", cfg.output)
            with cfg.output.open("rb") as lines:
                return sum(1 for _ in lines)
        with ExitStack() as stack:
            parts: list[PartFile] = []
            if host.is_first:
                write_whole(settings_file(cfg.output), settings_text(cfg), "output")
                parts = stack.enter_context(locked_parts(cfg.output))
            parts = host.broadcast(parts)
            facts = facts_of(cfg.env, cfg.reward, host)
            if host.is_driver:
                _generate(cfg, host, parts, facts)
            host.gather(None)  # all hosts are done
            parts = read_parts(cfg.output)
            host.gather(None)
            if host.is_first:
                merge_parts(cfg.output)
                _conclude(cfg, parts)
            host.broadcast(None)  # the output is written
    return sum(part.done.num_rows for part in parts)


def _conclude(cfg: GenerateConfig, parts: Sequence[PartFile]) -> None:
    drawn = sum(part.done.num_samples for part in parts)
    failed = sum(part.done.num_failed for part in parts)
    if not is_scored(cfg):
        return
    if drawn > failed:
        mean = sum(part.done.reward_sum for part in parts) / (drawn - failed)
        _log.info("%s completions drawn, mean reward %.4g", f"{drawn:,}", mean)
    if failed:
        _log.warning("warning: %s of them have no reward", f"{failed:,}")


def _generate(
    cfg: GenerateConfig, host: Host, parts: Sequence[PartFile], facts: EnvFacts | None
) -> None:
    """Sample the unfinished prompts of this host."""
    torch.manual_seed(cfg.run.seed)
    tokenizer = load_tokenizer(cfg.model)
    tools = tools_of(facts, cfg.env, tokenizer)
    turns = turns_of(cfg, tokenizer, tools=tools)
    num_before = sum(part.done.num_groups for part in parts)
    reader = _reader_of(cfg, tokenizer, tools.schemas, goes_on=num_before > 0)
    first_group, first_row = start_of(parts)
    prompts = _known(reader.read(first_row), tokenizer, cfg)
    tried = list(islice(prompts, _TRIED_PROMPTS)) if is_scored(cfg) else []
    unfinished = _Unfinished(host.rank, host.size, parts)
    with (
        counting("prompts", is_shown=host.is_first) as counter,
        sampler_of(
            cfg,
            host,
            tokenizer,
            turns,
            tool_format=tools.format,
            tried=[prompt for _, prompt in tried],
            purpose="generate",
            counter=counter,
        ) as sampler,
        closing(PartFileWriter(cfg.output, host.rank, host.size)) as writer,
    ):
        batch = Batch(
            unfinished.of(enumerate(chain(tried, prompts), start=first_group)),
            sampler.runner(),
            sampling=sampling_params(cfg.generation, cfg.generation.stop),
            num_samples=cfg.n_samples_per_prompt,
            max_in_engine=2 * cfg.engine.max_num_seqs * sampler.num_engines,
        )
        total = -(-reader.num_rows // host.size)
        if host.is_first and num_before:
            _log.info(
                "going on after %s prompts, from %s, with row %s of %s",
                f"{num_before:,}",
                parts[0].path.parent,
                f"{first_row + 1:,}",
                f"{reader.num_rows:,}",
            )
        failures, begun_s = _Failures(cfg, total), monotonic()
        while not batch.is_done:
            for number, samples in batch.step():
                failures.check(samples)
                # Rows are encoded between steps of the engine. Two threads were tried for it: they
                # take the interpreter from the thread that starts the engine's steps (33,379
                # tokens/s against 33,786 on an H100, benchmarks/README.md).
                rows = [json_line(row) for row in _chosen(samples, cfg)]
                writer.append(number, samples, rows, row=unfinished.rows.pop(number))
            counter.count(writer.done.num_groups, total)
        stats, passed_s = sampler.engine.stats(), monotonic() - begun_s
        busy = stats.busy_s / passed_s / sampler.num_engines
        message = f"{stats.num_generated_tokens:,} tokens in {passed_s:.1f} s, {busy:.1%} of it in "
        message += (
            "the engine" if sampler.num_engines == 1 else f"each of {sampler.num_engines} engines"
        )
        _log.info("%s: %.0f tok/s", message, stats.num_generated_tokens / passed_s)


def _reader_of(
    cfg: GenerateConfig, tokenizer: PreTrainedTokenizerBase, tools: ToolSchemas, *, goes_on: bool
) -> PromptReader:
    return PromptReader(
        cfg.data,
        tokenizer,
        seed=cfg.run.seed,
        max_prompt_tokens=room_for_prompts(cfg),
        keeps_messages=cfg.env.is_set,
        tools=tools,
        images=image_reader(cfg.model, cfg.data, tokenizer),
        cache=indexes_folder(cfg.output),
        must_be_same=goes_on,
    )


@dataclass(frozen=True, slots=True)
class _Unfinished:
    """Prompts of the host `rank` of `size` that no part file holds."""

    rank: int
    size: int
    parts: Sequence[PartFile]
    rows: dict[int, int] = field(default_factory=dict[int, int])
    """The row of the data of each prompt that was passed on; who writes it takes it out."""

    def of(self, prompts: Iterator[tuple[int, tuple[int, Prompt]]]) -> Iterator[tuple[int, Prompt]]:
        """Those of some prompts, which have numbers and rows, with their numbers."""
        for number, (row, prompt) in prompts:
            is_own = number % self.size == self.rank
            if is_own and not any(part.has(number) for part in self.parts):
                self.rows[number] = row
                yield number, prompt


def _known(
    prompts: Iterator[tuple[int, Prompt]], tokenizer: PreTrainedTokenizerBase, cfg: GenerateConfig
) -> Iterator[tuple[int, Prompt]]:
    """Pass prompts on as they are read. Raises UserError for a prompt with text that the model has
    no tokens for."""
    vocab_size = load_config(cfg.model).vocab_size
    for row, prompt in prompts:
        require_known_tokens([prompt], tokenizer, vocab_size, cfg.model.path)
        yield row, prompt


def _chosen(samples: Sequence[Sample], cfg: GenerateConfig) -> list[dict[str, Any]]:
    """Output rows of the completions of one prompt that `keep` selects."""
    if cfg.keep == "all":
        return [completion_row(sample, _images_of(sample)) for sample in samples]
    scored = [(sample.reward.total, sample) for sample in samples if sample.reward is not None]
    if cfg.keep == "passing":
        return [
            completion_row(s, _images_of(s)) for reward, s in scored if reward >= cfg.pass_threshold
        ]
    if not scored:
        return []
    highest, best = max(scored, key=itemgetter(0))
    if cfg.keep == "best":
        return [completion_row(best, _images_of(best))]
    lowest, worst = min(scored, key=itemgetter(0))
    return [pair_row(best, worst, _images_of(best))] if lowest < highest else []


def _images_of(sample: Sample) -> list[str]:
    """The images of a sample's prompt, for a file in any folder: absolute paths, or data URIs where
    the data have bytes."""
    sources = (STORE.source(content.hash) for content in sample.prompt.model_input.contents)
    files = [source.file.source for source in sources if source is not None and not source.number]
    return [data_uri(file) if isinstance(file, bytes) else str(file) for file in files]


class _Failures:
    """Ends the command when too many completions cannot be scored."""

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
