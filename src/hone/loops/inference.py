"""`hone eval`: a model as it is, without trainer and updates; and what `hone generate` shares."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Generator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from time import monotonic

import torch
from rich import get_console
from rich.progress import Progress
from transformers import PreTrainedTokenizerBase

from hone.config.parallel import ParallelConfig
from hone.config.tree import EvaluateConfig, GenerateConfig
from hone.distributed.mesh import Mesh
from hone.loops.ending import evaluation_cause
from hone.loops.engine_ranks import EngineRanks
from hone.loops.inputs import (
    prompts_of,
    share_of_workers,
    transcripts_of,
    try_out,
    turns_of,
)
from hone.loops.launch import join
from hone.loops.workers import judged, make_engine
from hone.models.load import load_model
from hone.models.tensor_parallel import TensorParallel
from hone.models.tokenizer import decoder, load_tokenizer
from hone.observe.environment import save_environment
from hone.observe.kept_result import settings_text
from hone.observe.loggers import json_line, sample_row
from hone.observe.metrics import to_scalars
from hone.observe.report.write import write_report
from hone.observe.run_folder import EVAL_CONFIG, EVAL_ENVIRONMENT, EVAL_METRICS, EVAL_SAMPLES
from hone.observe.whole_file import write_whole
from hone.rewards.scorer import FailureRateError, Scorer, check_failure_rate
from hone.rollout.episodes import Episodes
from hone.rollout.evaluate import evaluate, pass_rule, summarise
from hone.types import Engine, Sample

__all__ = ["Counter", "counting", "load_engine", "run_evaluation"]

_log = logging.getLogger(__name__)
_LINE_EVERY_S = 20.0


def run_evaluation(cfg: EvaluateConfig) -> dict[str, float]:
    """Score the model on `data.eval`; write `eval.json`, `eval_samples.jsonl` and the report to
    `run.dir`.

    Processes share the prompts; each returns the metrics of all, and the first one writes. Where
    too many samples have no reward, the samples are written all the same; the error is an event.
    """
    parallel, size = ParallelConfig(), cfg.engine.tensor_parallel_size
    with evaluation_cause(cfg.run.dir), join(cfg.run, parallel) as (mesh, watch):
        ranks = EngineRanks.join(size, mesh, timeout_s=parallel.timeout_s)
        watch.follow(mesh.groups | ranks.groups)
        watch.enter("eval")
        if mesh.is_first:
            write_whole(cfg.run.dir / EVAL_CONFIG, settings_text(cfg), "run.dir")
            save_environment(cfg.run.dir / EVAL_ENVIRONMENT, mesh.device, mesh.world.size)
        try:
            samples = _evaluated(cfg, mesh, ranks)
        except FailureRateError as error:
            _write_samples(cfg, mesh, error.samples)
            raise
        _write_samples(cfg, mesh, samples)
        check_failure_rate(samples, cfg.reward.max_failure_rate)
        scalars: dict[str, float] = {}
        if mesh.is_first:
            rule = pass_rule(samples, cfg.eval, cfg.reward)
            scalars = to_scalars(
                summarise(samples, cfg.eval, rule, has_env=cfg.env.path is not None)
            )
            if isinstance(rule, str):
                _log.info("pass@k is not reported: %s", rule)
            write_whole(cfg.run.dir / EVAL_METRICS, json.dumps(scalars, indent=2), "run.dir")
            write_report(cfg.run.dir)
        return mesh.broadcast(scalars)


def _write_samples(cfg: EvaluateConfig, mesh: Mesh, samples: Sequence[Sample]) -> None:
    if mesh.is_first:
        rows = [json_line(sample_row(sample)).decode() for sample in samples]
        write_whole(cfg.run.dir / EVAL_SAMPLES, "".join(rows), "run.dir")


def _evaluated(cfg: EvaluateConfig, mesh: Mesh, ranks: EngineRanks) -> list[Sample]:
    limit = cfg.eval.max_completion_tokens
    torch.manual_seed(cfg.run.seed)
    tokenizer = load_tokenizer(cfg.model)
    data = prompts_of(cfg, tokenizer)
    turns = turns_of(cfg, tokenizer)
    rewards = share_of_workers(cfg.reward, processes_per_engine=ranks.tp.size)
    with ExitStack() as stack:
        scorer = scores = None
        if ranks.is_first:
            scorer = Scorer(rewards, max_completion_tokens=limit, env=cfg.env)
            stack.enter_context(scorer)
            if mesh.is_first:
                try_out(scorer, data.eval, tokenizer, turns)
            scores = judged(scorer, transcripts_of(cfg, data.eval), cfg, mesh.device)
        lead = ranks.lead(load_engine(cfg, mesh, ranks.tp, tokenizer))
        progress = stack.enter_context(counting(mesh, "samples"))

        def make(between: Callable[[int, int], None]) -> list[Sample] | None:
            assert scorer is not None
            assert scores is not None
            scorer.on_wait = progress.waiting

            def both(done: int, total: int) -> None:
                between(done, total)
                progress.count(done, total)

            return evaluate(
                data.eval,
                engine=lead.engine,
                scorer=scores,
                cfg=cfg.eval,
                stop=cfg.eval.stop,
                episodes=Episodes(
                    decode=decoder(tokenizer, turns.ends),
                    max_turns=scorer.max_turns,
                    render=turns,
                    run_seed=cfg.run.seed,
                    purpose="eval",
                ),
                comm=ranks.comm,
                max_failure_rate=cfg.reward.max_failure_rate,
                progress=both,
            )

        samples = lead.broadcast_from_rank0(make)
        assert samples is not None, "nothing asks it to stop"
        return samples


def load_engine(
    cfg: EvaluateConfig | GenerateConfig,
    mesh: Mesh,
    tp: TensorParallel,
    tokenizer: PreTrainedTokenizerBase,
) -> Engine:
    """The engine of this process, with the weights of `model.path`."""
    own = None if cfg.engine.backend == "vllm" else tp
    model = load_model(
        cfg.model, device=mesh.device, seed=cfg.run.seed, tp=own, packs_rows=cfg.engine.packs_rows
    )
    return make_engine(cfg, model, tokenizer, owns_weights=True, tensor_parallel=tp)


class Counter:
    """What the first process has done of its share and how long the rest takes: a bar on a
    terminal, gone at the end, and lines elsewhere."""

    def __init__(self, bar: Progress, noun: str) -> None:
        self._bar, self._noun = bar, noun
        self._task = bar.add_task(noun, total=None)
        self._begun: tuple[float, int] | None = None
        """When and at what number the counting began."""
        self._told_at = -math.inf
        self._is_silent = bar.disable or bar.console.is_terminal
        """Whether there are no lines."""

    def count(self, done: int, total: int) -> None:
        """Show how many are done; without a terminal in a line now and then."""
        self._bar.update(self._task, completed=done, total=total)
        now = monotonic()
        if self._begun is None:
            self._begun = now, done
            self._told_at = now
        if self._is_silent or now - self._told_at < _LINE_EVERY_S or done == self._begun[1]:
            return
        self._told_at, (began_s, before) = now, self._begun
        left_s = (now - began_s) / (done - before) * (total - done)
        _log.info("%s of %s %s, %s left", f"{done:,}", f"{total:,}", self._noun, _time(left_s))

    def waiting(self, text: str) -> None:
        """Say what keeps the samples waiting; without a terminal in a line now and then."""
        if self._bar.console.is_terminal:
            self._bar.update(self._task, description=text)
        elif not self._is_silent and monotonic() - self._told_at > _LINE_EVERY_S:
            self._told_at = monotonic()
            _log.info("%s", text)


@contextmanager
def counting(mesh: Mesh, noun: str) -> Generator[Counter]:
    """A counter of things called `noun`."""
    columns = Progress.get_default_columns()
    # A notebook would need further packages for a bar.
    is_shown = mesh.is_first and not get_console().is_jupyter
    with Progress(*columns, transient=True, disable=not is_shown) as bar:
        yield Counter(bar, noun)


def _time(seconds: float) -> str:
    """`1:02:03`, hours, minutes and seconds."""
    return f"{timedelta(seconds=round(seconds))}"
