"""`hone eval`: evaluates a model without training it."""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence

import torch

from hone.config.tree import EvaluateConfig
from hone.images.thumbnails import Thumbnails
from hone.loops.ending import evaluation_cause
from hone.loops.inputs import facts_of, prompts_of, tools_of, turns_of
from hone.loops.sampling import Host, counting, join_hosts, sampler_of
from hone.loops.workers import gpus_for
from hone.models.tokenizer import load_tokenizer
from hone.observe.environment import save_environment
from hone.observe.kept_result import settings_text
from hone.observe.loggers import json_line, sample_row
from hone.observe.metrics import to_scalars
from hone.observe.pages import Pages
from hone.observe.run_folder import EVAL_CONFIG, EVAL_ENVIRONMENT, EVAL_METRICS, EVAL_SAMPLES
from hone.observe.whole_file import write_whole
from hone.rewards.environment import EnvFacts
from hone.rewards.scorer import FailureRateError, check_failure_rate
from hone.rollout.eval_metrics import pass_rule, summarise
from hone.rollout.evaluate import evaluate
from hone.types import Sample

__all__ = ["run_evaluation"]

_log = logging.getLogger(__name__)


def run_evaluation(
    cfg: EvaluateConfig, num_devices: int = 1, pages: Pages | None = None
) -> dict[str, float]:
    """Score the model on `data.eval`. Writes `eval.json`, `eval_samples.jsonl` and, with `pages`,
    the report to `run.dir`.

    Samples on `num_devices` devices of this host. Under torchrun a host has as many devices as
    processes, and the hosts share the prompts. Each process returns the metrics over
    all samples; the first one writes. If too many samples have no reward, the samples are written,
    FailureRateError is raised, and the error is recorded as an event.
    """
    with evaluation_cause(cfg.run.dir), join_hosts(cfg, num_devices, "eval") as host:
        if host.is_first:
            write_whole(cfg.run.dir / EVAL_CONFIG, settings_text(cfg), "run.dir")
            kind = "cuda" if gpus_for(cfg.run, host.num_devices) else "cpu"
            environment = cfg.run.dir / EVAL_ENVIRONMENT
            save_environment(environment, torch.device(kind), host.num_processes)
        facts = facts_of(cfg.env, cfg.reward, host)
        if not host.is_driver:
            if host.size > 1:
                host.gather(None)
            return host.broadcast(None)
        try:
            samples = _evaluated(cfg, host, facts)
        except FailureRateError as error:
            _write_samples(cfg, host, error.samples)
            raise
        _write_samples(cfg, host, samples)
        check_failure_rate(samples, cfg.reward.max_failure_rate)
        scalars: dict[str, float] = {}
        if host.is_first:
            rule = pass_rule(samples, cfg.eval, cfg.reward)
            scalars = to_scalars(summarise(samples, cfg.eval, rule, has_env=cfg.env.is_set))
            if isinstance(rule, str):
                _log.info("pass@k is not reported: %s", rule)
            write_whole(cfg.run.dir / EVAL_METRICS, json.dumps(scalars, indent=2), "run.dir")
            if pages is not None:
                pages.write_report(cfg.run.dir)
        return host.broadcast(scalars)


def _write_samples(cfg: EvaluateConfig, host: Host, samples: Sequence[Sample]) -> None:
    if host.is_first:
        with Thumbnails(cfg.run.dir) as thumbnails:
            images = [thumbnails.rows(sample) for sample in samples]
        rows = [
            json_line(sample_row(sample, images=own)).decode()
            for sample, own in zip(samples, images, strict=True)
        ]
        write_whole(cfg.run.dir / EVAL_SAMPLES, "".join(rows), "run.dir")


def _evaluated(cfg: EvaluateConfig, host: Host, facts: EnvFacts | None) -> list[Sample]:
    torch.manual_seed(cfg.run.seed)
    tokenizer = load_tokenizer(cfg.model)
    tools = tools_of(facts, cfg.env, tokenizer)
    data = prompts_of(cfg, tokenizer, tools=tools.schemas)
    turns = turns_of(cfg, tokenizer, tools=tools)
    with (
        counting("samples", is_shown=host.is_first) as counter,
        sampler_of(
            cfg,
            host,
            tokenizer,
            turns,
            tool_format=tools.format,
            tried=data.eval,
            purpose="eval",
            counter=counter,
        ) as sampler,
    ):
        assert sampler.scorer is not None, "the rules refuse an evaluation without a reward"
        samples = evaluate(
            data.eval,
            engine=sampler.engine,
            scorer=sampler.scorer,
            cfg=cfg.eval,
            stop=cfg.eval.stop,
            episodes=sampler.episodes,
            comm=host,
            max_failure_rate=cfg.reward.max_failure_rate,
            progress=counter.count,
        )
    assert samples is not None, "should_stop is not set"
    return samples
