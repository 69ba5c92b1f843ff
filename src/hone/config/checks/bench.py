"""All checks of `hone bench engine`."""

from __future__ import annotations

from collections.abc import Iterator
from difflib import get_close_matches
from pathlib import Path

from hone.config.bench import WORKLOADS, BenchModelConfig
from hone.config.checks.files import check_model
from hone.config.checks.finding import Finding, differs, error, warning
from hone.config.checks.generation import (
    check_engine,
    check_exact,
    check_output,
    check_tensor_parallel,
)
from hone.config.extras import is_installed
from hone.config.model import ModelConfig
from hone.config.model_facts import ModelFacts
from hone.config.tree import BenchEngineConfig

__all__ = ["check_bench_engine"]


def check_bench_engine(cfg: BenchEngineConfig) -> list[Finding]:
    """Findings for `hone bench engine`, errors first."""
    facts = ModelFacts.read(cfg.model.path) if cfg.model.path else None
    findings = [
        *_model(cfg.model, device=cfg.run.device),
        *_workload(cfg, facts=facts),
        *check_engine(
            cfg.engine, device=cfg.run.device, num_samples=1, samples_key="n", trains=False
        ),
        *check_tensor_parallel(cfg.engine, facts=facts, scores=False),
        *check_exact(cfg.model, cfg.engine, device=cfg.run.device, facts=facts),
        *_comparison(cfg),
        *_output(cfg),
    ]
    return sorted(findings, key=lambda finding: finding.level)


def _model(model: BenchModelConfig, *, device: str) -> Iterator[Finding]:
    """One model, by its folder or by a public shape."""
    if (model.path is None) == (model.shape is None):
        got = "neither model.path nor model.shape is"
        if model.path is not None:
            got = "both model.path and model.shape are"
        yield error(
            f"{got} set; name a folder (or hub name) in "
            "model.path, or a public shape such as qwen3-0.6b in model.shape.",
            "model.path",
            "model.shape",
        )
    elif model.path is not None:
        policy = ModelConfig(path=model.path, init=model.init, dtype=model.dtype)
        yield from check_model(policy, device=device, needs_tokenizer=False)


def _workload(cfg: BenchEngineConfig, *, facts: ModelFacts | None) -> Iterator[Finding]:
    """Whether there is such a workload, and whether its settings count."""
    if cfg.workload not in WORKLOADS and not Path(cfg.workload).is_file():
        near = get_close_matches(cfg.workload, WORKLOADS, 1)
        hint = f" Did you mean '{near[0]}'?" if near else ""
        yield error(
            f"workload '{cfg.workload}' is neither a file of requests nor one of "
            f"{', '.join(WORKLOADS)}.{hint}",
            "workload",
        )
    if cfg.workload != "decode":
        for name in differs(cfg.decode, "batch", "context", "steps"):
            yield warning(
                f"decode.{name} has no effect with workload {cfg.workload}; set workload to "
                f"decode, or remove decode.{name}.",
                f"decode.{name}",
                "workload",
            )
        return
    if cfg.decode.batch > cfg.engine.max_num_seqs:
        yield error(
            f"decode.batch is {cfg.decode.batch}, but engine.max_num_seqs lets only "
            f"{cfg.engine.max_num_seqs} sequences run at once. Raise engine.max_num_seqs, or lower "
            "decode.batch.",
            "decode.batch",
            "engine.max_num_seqs",
        )
    context = facts.context_length if facts else None
    if context is not None and cfg.decode.context >= context:
        yield error(
            f"decode.context is {cfg.decode.context}, but the model at model.path has a context of "
            f"{context} tokens. Lower decode.context.",
            "decode.context",
            "model.path",
        )


def _comparison(cfg: BenchEngineConfig) -> Iterator[Finding]:
    """Whether the engine to compare with is here, and runs on as many devices."""
    against = cfg.against
    if against is None:
        return
    size = cfg.engine.tensor_parallel_size
    if size > 1:
        yield error(
            f"against is {against}, which is compared on one GPU, but engine.tensor_parallel_size "
            f"is {size}. Leave against unset.",
            "against",
            "engine.tensor_parallel_size",
        )
    if not is_installed(against):
        yield error(
            f"against is {against}, but the package `{against}` is not installed for this Python. "
            f"Install it (`pip install {against}`), or leave against unset.",
            "against",
        )


def _output(cfg: BenchEngineConfig) -> Iterator[Finding]:
    """Whether the numbers can be written where they should go."""
    if cfg.output.suffix != ".json":
        yield error(
            f"output is '{cfg.output}'; give the path of a .json file, such as bench.json.",
            "output",
        )
    else:
        yield from check_output(cfg.output)
