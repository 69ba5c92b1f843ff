"""All checks of `hone bench engine` and `hone bench train`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from difflib import get_close_matches
from itertools import chain
from pathlib import Path

from hone.config.bench import WORKLOADS, BenchModelConfig, BenchTrainModelConfig
from hone.config.checks.files import check_model
from hone.config.checks.finding import Finding, differs, error, warning
from hone.config.checks.generation import (
    check_engine,
    check_exact,
    check_output,
    check_tensor_parallel,
)
from hone.config.checks.layers import (
    check_adapters,
    check_matmul_precision,
)
from hone.config.checks.learning import check_budget, check_memory, check_optimizer
from hone.config.checks.parallel import (
    check_context_budget,
    check_parallel,
    check_share,
    context_size,
    replica_size,
)
from hone.config.checks.vllm import check_vllm_bench
from hone.config.engine import EngineConfig
from hone.config.extras import missing_extra
from hone.config.model import ModelConfig, TrainedModelConfig
from hone.config.model_facts import ModelFacts
from hone.config.tree import BenchEngineConfig, BenchTrainConfig

__all__ = ["bench_train_model", "check_bench_engine", "check_bench_train"]


def check_bench_engine(cfg: BenchEngineConfig, world_size: int) -> list[Finding]:
    """Findings for `hone bench engine` in `world_size` processes, errors first."""
    facts = ModelFacts.read(cfg.model.path) if cfg.model.path else None
    findings = [
        *_model(cfg.model, device=cfg.run.device),
        *_workload(cfg, facts=facts),
        *check_engine(
            cfg.engine, device=cfg.run.device, num_samples=1, samples_key="n", trains=False
        ),
        *check_tensor_parallel(cfg.engine, facts=facts, scores=False),
        *_processes(cfg.engine, world_size),
        *check_exact(cfg.model, cfg.engine, device=cfg.run.device, facts=facts),
        *check_vllm_bench(cfg.engine),
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


def _processes(engine: EngineConfig, world_size: int) -> Iterator[Finding]:
    """Whether the processes are those of one engine."""
    size = engine.tensor_parallel_size
    if world_size != size:
        needed, how = "1 process", "without torchrun"
        if size > 1:
            needed = f"{size} processes"
            how = f"with `torchrun --nproc-per-node {size} -m hone bench engine ...`"
        yield error(
            f"one engine is measured, which takes {needed} where engine.tensor_parallel_size is "
            f"{size}, got {world_size}: start it {how}.",
            "engine.tensor_parallel_size",
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
    missing = missing_extra(against, needed_by=f"against={against}", on_cpu=cfg.run.device == "cpu")
    if missing is not None:
        yield error(f"{missing}. Or leave against unset.", "against")


def _output(cfg: BenchEngineConfig | BenchTrainConfig) -> Iterator[Finding]:
    """Whether the numbers can be written where they should go."""
    if cfg.output.suffix != ".json":
        yield error(
            f"output is '{cfg.output}'; give the path of a .json file, such as bench.json.",
            "output",
        )
    else:
        yield from check_output(cfg.output)


def check_bench_train(
    cfg: BenchTrainConfig,
    world_size: int | None,
    *,
    facts: ModelFacts | None,
    longest: int,
    num_rows: int,
) -> list[Finding]:
    """Findings for `hone bench train`, errors first.

    `facts` are those of the path or the shape; `longest` and `num_rows` the workload's.
    """
    model, trainer, is_fixed = bench_train_model(cfg.model), cfg.trainer, cfg.workload == "rows"
    longest_of = "rows.tokens" if is_fixed else f"the longest row of {cfg.workload}"
    rates = check_optimizer(trainer.optimizer, total_steps=_ENDLESS, fine_tunes=False)
    findings: tuple[Iterable[Finding], ...] = (
        _model(cfg.model, device=cfg.run.device),
        check_adapters(cfg.model.lora, trainer, exact=model.exact),
        check_matmul_precision(trainer, model, device=cfg.run.device),
        _objective(cfg),
        check_exact(model, EngineConfig(), device=cfg.run.device, facts=facts),
        _context(cfg.workload, longest=longest, longest_of=longest_of, facts=facts),
        check_budget(
            trainer,
            longest=longest,
            longest_of=longest_of,
            sequences_per_step=num_rows,
            world_size=world_size,
            context_size=context_size(trainer.parallel),
        ),
        check_context_budget(trainer, longest=longest, longest_of=longest_of),
        check_parallel(trainer, model, world_size=world_size, facts=facts, has_reference=False),
        check_share(
            world_size,
            key="rows.per_step" if is_fixed else "workload",
            number=num_rows,
            what="train",
            together=replica_size(trainer.parallel),
        ),
        check_memory(trainer, exact=model.exact, device=cfg.run.device, world_size=world_size),
        (finding for finding in rates if finding.level == "error"),
        _unused_in_training(cfg),
        _output(cfg),
    )
    found = dict.fromkeys(chain.from_iterable(findings))
    if cfg.model.shape is not None:
        found = dict.fromkeys(_name_shape(finding) for finding in found)
    return sorted(found, key=lambda finding: finding.level)


_ENDLESS = 1 << 62


def bench_train_model(model: BenchTrainModelConfig, path: str | None = None) -> TrainedModelConfig:
    """The section of a run that names the same model; a public shape lies at `path`."""
    is_shape = model.shape is not None
    return TrainedModelConfig(
        path=path or model.path or "",
        init="random" if is_shape else model.init,
        dtype=model.dtype,
        exact=model.exact,
        lora=model.lora,
    )


def _name_shape(finding: Finding) -> Finding:
    """The other checks speak of a folder."""
    message = finding.message.replace("model at model.path", "model of model.shape")
    keys = tuple("model.shape" if key == "model.path" else key for key in finding.keys)
    return replace(finding, message=message, keys=keys)


def _objective(cfg: BenchTrainConfig) -> Iterator[Finding]:
    if cfg.model.exact and cfg.objective == "sft":
        yield warning(
            "model.exact makes trainer and engine compute the same bits, and objective is sft, "
            "which has no engine: it has no effect. Remove model.exact, or set objective to rl.",
            "model.exact",
            "objective",
        )


def _context(
    workload: str, *, longest: int, longest_of: str, facts: ModelFacts | None
) -> Iterator[Finding]:
    context = facts.context_length if facts else None
    if context is not None and longest > context:
        yield error(
            f"{longest_of} is {longest} tokens, but the model at model.path has a context of "
            f"{context}. Use rows of at most {context} tokens.",
            "rows.tokens" if workload == "rows" else "workload",
            "model.path",
        )


def _unused_in_training(cfg: BenchTrainConfig) -> Iterator[Finding]:
    """Settings of a run, or of the other workload, that a single optimizer step does not have."""
    for name in differs(
        cfg.trainer, "prompts_per_minibatch", "num_epochs", "enable_sleep", "parity"
    ):
        yield warning(
            f"trainer.{name} has no effect: a step of the benchmark is one optimizer step. Remove "
            "it.",
            f"trainer.{name}",
        )
    if cfg.workload != "rows":
        for name in differs(cfg.rows, "per_step", "tokens"):
            yield warning(
                f"rows.{name} has no effect with workload {cfg.workload}; set workload to rows, or "
                f"remove rows.{name}.",
                f"rows.{name}",
                "workload",
            )
