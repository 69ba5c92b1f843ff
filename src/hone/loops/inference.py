"""Evaluation and generation with a model as it is: no trainer, no updates."""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import chain
from time import monotonic

import torch
from rich.progress import Progress
from transformers import PreTrainedTokenizerBase

from hone.config.parallel import ParallelConfig
from hone.config.paths import settings_file
from hone.config.tree import EvaluateConfig, GenerateConfig
from hone.data.prompts import PromptData
from hone.data.turns import TurnRenderer
from hone.distributed.mesh import Mesh
from hone.loops.ending import evaluation_cause
from hone.loops.inputs import decoder, prompts_of, share_of_workers, try_out
from hone.loops.launch import join
from hone.loops.workers import make_engine
from hone.models.load import load_model
from hone.models.tensor_parallel import TensorParallel
from hone.models.tokenizer import load_tokenizer
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
from hone.rollout.requests import requests_for, sampling_params
from hone.types import Engine, Prompt, Sample

__all__ = ["run_evaluation", "run_generation"]

_log = logging.getLogger(__name__)
_LINE_EVERY_S = 20.0


def run_evaluation(cfg: EvaluateConfig) -> dict[str, float]:
    """Score the model on `data.eval`; write `eval.json`, `eval_samples.jsonl` and the report to
    `run.dir`.

    Processes share the prompts; each returns the metrics of all, and the first one writes. Where
    too many samples have no reward, the samples are written all the same; the error is an event.
    """
    with evaluation_cause(cfg.run.dir), join(cfg.run, ParallelConfig()) as (mesh, watch):
        watch.enter("eval")
        if mesh.is_first:
            write_whole(cfg.run.dir / EVAL_CONFIG, settings_text(cfg), "run.dir")
            save_environment(cfg.run.dir / EVAL_ENVIRONMENT, mesh.device, mesh.world.size)
        try:
            samples = _evaluated(cfg, mesh)
        except FailureRateError as error:
            _write_samples(cfg, mesh, error.samples)
            raise
        _write_samples(cfg, mesh, samples)
        check_failure_rate(samples, cfg.reward.max_failure_rate)
        rule = pass_rule(samples, cfg.eval, cfg.reward)
        scalars = to_scalars(summarise(samples, cfg.eval, rule))
        if isinstance(rule, str):
            _log.info("there is no pass@k: %s", rule)
        if mesh.is_first:
            write_whole(cfg.run.dir / EVAL_METRICS, json.dumps(scalars, indent=2), "run.dir")
            write_report(cfg.run.dir)
    return scalars


def _write_samples(cfg: EvaluateConfig, mesh: Mesh, samples: Sequence[Sample]) -> None:
    if mesh.is_first:
        rows = [json_line(sample_row(sample)).decode() for sample in samples]
        write_whole(cfg.run.dir / EVAL_SAMPLES, "".join(rows), "run.dir")


def _evaluated(cfg: EvaluateConfig, mesh: Mesh) -> list[Sample]:
    limit = cfg.eval.max_completion_tokens
    tp, tokenizer, data = _prepared(cfg, mesh)
    turns = TurnRenderer(tokenizer, cfg.data)
    rewards = share_of_workers(cfg.reward)
    with Scorer(rewards, max_completion_tokens=limit, env=cfg.env) as scorer:
        if mesh.is_first:
            try_out(scorer, data.eval, tokenizer, turns)
        engine = _engine(cfg, mesh, tp, tokenizer)
        with _counter(mesh) as progress:
            scorer.on_wait = progress.waiting
            samples = evaluate(
                data.eval,
                engine=engine,
                scorer=scorer,
                cfg=cfg.eval,
                stop=cfg.eval.stop,
                episodes=Episodes(
                    decode=decoder(tokenizer),
                    max_turns=scorer.max_turns,
                    render=turns,
                    run_seed=cfg.run.seed,
                    purpose="eval",
                ),
                comm=mesh,
                max_failure_rate=cfg.reward.max_failure_rate,
                progress=progress.samples,
            )
        assert samples is not None, "nothing asks it to stop"
        return samples


def _prepared(
    cfg: EvaluateConfig | GenerateConfig, mesh: Mesh
) -> tuple[TensorParallel, PreTrainedTokenizerBase, PromptData]:
    """What is there before any weight is loaded."""
    tp = TensorParallel.from_environment(cfg.engine.tensor_parallel_size, mesh.device)
    torch.manual_seed(cfg.run.seed)
    tokenizer = load_tokenizer(cfg.model)
    return tp, tokenizer, prompts_of(cfg, tokenizer)


def _engine(
    cfg: EvaluateConfig | GenerateConfig,
    mesh: Mesh,
    tp: TensorParallel,
    tokenizer: PreTrainedTokenizerBase,
) -> Engine:
    own = None if cfg.engine.backend == "vllm" else tp
    model = load_model(cfg.model, device=mesh.device, seed=cfg.run.seed, tp=own)
    return make_engine(cfg, model, tokenizer, owns_weights=True, tensor_parallel=tp)


def run_generation(cfg: GenerateConfig) -> int:
    """Sample `n_samples_per_prompt` completions for each prompt into `output`; their number.

    Of several processes each group takes its share of the prompts, and the first process writes
    all rows, in the order of the prompts.
    """
    with join(cfg.run, ParallelConfig()) as (mesh, watch):
        watch.enter("generate")
        return _generated(cfg, mesh)


def _generated(cfg: GenerateConfig, mesh: Mesh) -> int:
    tp, tokenizer, data = _prepared(cfg, mesh)
    engine, episodes = _engine(cfg, mesh, tp, tokenizer), Episodes(decode=decoder(tokenizer))
    limit = cfg.generation.max_completion_tokens
    owners: dict[str, Prompt] = {}
    places: list[tuple[int, int]] = []
    for number, prompt in enumerate(chain(*data.train.sources)):
        if number % tp.num_replicas != tp.replica:
            continue
        requests = requests_for(
            prompt,
            sampling_params(cfg.generation, cfg.generation.stop),
            group_id=f"{number}",
            num_samples=cfg.n_samples_per_prompt,
            run_seed=cfg.run.seed,
            purpose="generate",
            number=0,
        )
        engine.submit(requests)
        owners |= {request.id: prompt for request in requests}
        places += [(number, index) for index in range(len(requests))]
    rows: dict[str, str] = {}
    with _counter(mesh) as counter:
        while engine.has_unfinished:
            for completion in engine.step():
                name = completion.request_id
                sample = episodes.begin(owners[name], name, number=0)
                episodes.take(sample, completion, max_tokens=limit)
                rows[sample.id] = json_line(sample_row(sample)).decode()
            counter.samples(len(rows), len(owners))
    own = list(zip(places, (rows[name] for name in owners), strict=True))
    everywhere = sorted(chain(*tp.gather_objects(own)))
    if mesh.is_first:
        write_whole(settings_file(cfg.output), settings_text(cfg), "output")
        write_whole(cfg.output, "".join(row for _, row in everywhere), "output")
    return len(everywhere)


class _Counter:
    """A bar of the first process's finished samples, shown on a terminal and gone at the end."""

    def __init__(self, bar: Progress) -> None:
        self._bar = bar
        self._task = bar.add_task("samples", total=None)
        self._told_at = -math.inf

    def samples(self, done: int, total: int) -> None:
        self._bar.update(self._task, completed=done, total=total)

    def waiting(self, text: str) -> None:
        """Say what keeps the samples waiting; without a terminal in a line now and then."""
        if self._bar.console.is_terminal:
            self._bar.update(self._task, description=text)
        elif not self._bar.disable and monotonic() - self._told_at > _LINE_EVERY_S:
            self._told_at = monotonic()
            _log.info("%s", text)


@contextmanager
def _counter(mesh: Mesh) -> Generator[_Counter]:
    columns = Progress.get_default_columns()
    with Progress(*columns, transient=True, disable=not mesh.is_first) as bar:
        yield _Counter(bar)
