"""Engines and frozen models without a trainer beside them, and the pools that they form."""

from __future__ import annotations

import atexit
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hone.config.cluster import ScorerName
from hone.config.tree import EvaluateConfig, GenerateConfig, RLConfig
from hone.distributed.pool import RecordEvent, ThreadWorker
from hone.distributed.processes import processes
from hone.engine.engine import EmbeddedEngine
from hone.engine.worker import EngineWorker, LockStep
from hone.loops.launch import choose_device
from hone.models.load import blank_model, load_config, load_model, load_value_model
from hone.models.support import context_length, eos_token_ids
from hone.models.tensor_parallel import TensorParallel
from hone.models.tokenizer import decoder, load_tokenizer
from hone.observe.tracing import EngineTracer, MemoryRecorder
from hone.rewards.scorer import Scorer
from hone.rollout.engine_pool import EnginePool
from hone.rollout.judge import Judge, PooledRewardModel, RewardModel, Transcripts
from hone.rollout.scorer_pool import ScorerPool
from hone.rollout.vllm import VLLMEngine
from hone.trainer.scorer import FrozenScorer
from hone.types import Engine
from hone.weights.receiver import WeightReceiver

__all__ = [
    "Pools",
    "build_engine_worker",
    "build_scorer",
    "build_worker",
    "judged",
    "make_engine",
    "ray_pools",
    "reserved_gpus",
    "thread_pools",
]

MAX_RESTARTS = 3
"""Of engines in a run before it gives up, and as many of each model that scores."""


@dataclass(frozen=True, slots=True)
class Pools:
    """The workers with weights of their own, by role; the first training process has them."""

    engines: EnginePool
    """Empty where each training process drives an engine on its device."""
    scorers: Mapping[ScorerName, ScorerPool] = field(default_factory=dict[ScorerName, ScorerPool])
    """Frozen models with devices of their own."""
    host: str = "127.0.0.1"
    """How workers reach this process."""

    def report_to(self, event: RecordEvent) -> None:
        """Call `event` for each worker that is lost from now on, as `Pool.report_to`."""
        self.engines.report_to(event)
        for scorer in self.scorers.values():
            scorer.report_to(event)

    def close(self) -> None:
        """End all workers."""
        for scorer in self.scorers.values():
            scorer.close()
        self.engines.close()


def make_engine(
    cfg: RLConfig | EvaluateConfig | GenerateConfig,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    *,
    owns_weights: bool,
    tensor_parallel: TensorParallel | None = None,
    device: torch.device | None = None,
    name: str = "engine 0",
) -> Engine:
    """The engine of `engine.backend` over `model`, which with `tensor_parallel` is this rank's.

    vLLM has weights of its own: for it the model is whole in any case, may lie on meta, and
    `device` says where vLLM runs. Traces go by its `name`."""
    eos = eos_token_ids(model, tokenizer)
    longest = cfg.data.max_prompt_tokens + cfg.max_completion_tokens
    max_model_len = min(longest, context_length(model.config))
    records_routes = isinstance(cfg, RLConfig) and cfg.algorithm.routing_replay
    engine: VLLMEngine | EmbeddedEngine
    if cfg.engine.backend == "vllm":
        engine = VLLMEngine(
            model,
            cfg.engine,
            eos_token_ids=eos,
            tokenizer=tokenizer,
            max_model_len=max_model_len,
            device=device,
            tensor_parallel=tensor_parallel,
            records_routes=records_routes,
        )
    else:
        engine = EmbeddedEngine(
            model,
            cfg.engine,
            eos_token_ids=eos,
            tokenizer=tokenizer,
            max_model_len=max_model_len,
            owns_weights=owns_weights,
            tensor_parallel=tensor_parallel,
            exact=cfg.model.exact,
            records_routes=records_routes,
        )
    if isinstance(cfg, RLConfig) and cfg.profile.rollout.steps:
        engine.tracer = EngineTracer(
            cfg.profile.rollout,
            cfg.profile.folder(cfg.run.dir),
            name=name,
            tp_rank=0 if tensor_parallel is None else tensor_parallel.rank,
        )
    return engine


def judged(
    scorer: Scorer,
    transcripts: Transcripts | None,
    cfg: RLConfig | EvaluateConfig | GenerateConfig,
    device: torch.device,
    pool: ScorerPool | None = None,
) -> Scorer | Judge:
    """`scorer`, with the reward model where `transcripts` are made for one: beside it, or in
    `pool`. Raises as `load_model`, before the engine looks how much memory there is."""
    model = cfg.reward.model.config_of(cfg.model)
    if transcripts is None or model is None:
        return scorer
    judge: RewardModel | PooledRewardModel
    if pool is None:
        judge = RewardModel(load_value_model(model, device=device, seed=cfg.run.seed))
    else:
        judge = PooledRewardModel(pool, pad_id=load_config(model).pad_token_id)
    return Judge(judge, transcripts, scorer, cfg.reward)


def build_engine_worker(cfg: RLConfig, *, name: str = "engine") -> EngineWorker:
    """This process's rank of an engine of `cfg`, which samples once a sync has filled it.

    The ranks of an engine find each other by torchrun's variables. Raises UserError as the engine
    and the model's loader do.
    """
    device = choose_device(cfg.run)
    tp = TensorParallel.from_environment(cfg.engine.tensor_parallel_size, device)
    tokenizer = load_tokenizer(cfg.model)
    if cfg.engine.backend == "vllm":  # it allocates weights of its own
        model = blank_model(cfg.model, device="meta")
    else:
        model = blank_model(cfg.model, device=device, tp=tp, packs_rows=cfg.engine.packs_rows)
    engine = make_engine(
        cfg, model, tokenizer, owns_weights=True, tensor_parallel=tp, device=device, name=name
    )
    receiver = WeightReceiver(engine, device)
    group = None
    if tp.size > 1:
        patience = timedelta(seconds=cfg.cluster.engine_timeout_s)
        ranks = dist.new_group(backend="gloo", timeout=patience)
        assert isinstance(ranks, dist.ProcessGroup)
        group = LockStep(ranks)
    return EngineWorker(
        engine,
        receiver.receive,
        name=name,
        group=group,
        decode=decoder(tokenizer, eos_token_ids(model, tokenizer)),
    )


def build_scorer(role: ScorerName, cfg: RLConfig) -> FrozenScorer | RewardModel:
    """A frozen model, whole on this process's device. The reference is the policy before training:
    of `model.path`, or drawn from `run.seed` as the policy was, whatever step the run is at.

    Raises UserError and FileNotFoundError as the model's loader does.
    """
    device, seed = choose_device(cfg.run), cfg.run.seed
    if role == "reward_model":
        judge = cfg.reward.model.config_of(cfg.model)
        assert judge is not None, "rules keep it from runs without one"
        return RewardModel(load_value_model(judge, device=device, seed=seed))
    model, trainer = cfg.model, cfg.trainer
    if role == "teacher":
        assert cfg.teacher_model is not None, "rules keep it from runs without one"
        model, trainer = cfg.teacher_model, cfg.teacher_trainer
    return FrozenScorer(
        load_model(model, device=device, seed=seed),
        trainer,
        temperature=cfg.rollout.temperature,
        exact=model.exact,
        top_k=cfg.teacher.top_k,
        role=role,
        dump_dir=cfg.run.dir,
        on_exhausted=lambda: "",
    )


def build_worker(
    role: Literal["engine"] | ScorerName, cfg: RLConfig, name: str
) -> EngineWorker | FrozenScorer | RewardModel:
    """An engine, or a model that scores, in the process that it has for itself."""
    place = f"{name.replace(' ', '')}_tp{processes().rank}"
    folder = cfg.profile.folder(cfg.run.dir) / "memory_snapshot"
    recorder = MemoryRecorder(cfg.profile.memory, folder, place, choose_device(cfg.run))
    atexit.register(recorder.close)  # it lives as long as the process
    return build_engine_worker(cfg, name=name) if role == "engine" else build_scorer(role, cfg)


@contextmanager
def reserved_gpus(cfg: RLConfig) -> Generator[None]:
    """Keep the GPUs of this host's trainers from all that has others."""
    from hone.distributed.ray import reserve_gpus

    with reserve_gpus(cfg):
        yield


@contextmanager
def thread_pools(cfg: RLConfig) -> Generator[Pools]:
    """The engines and frozen models of a run in threads of this process, on its device."""
    num_engines = cfg.num_engines_apart
    engines = [build_engine_worker(cfg, name=f"engine {i}") for i in range(num_engines)]
    supervision: dict[str, Any] = {
        "restart": None,
        "timeout_s": cfg.cluster.engine_timeout_s,
        "max_restarts": 0,
    }
    scorers: dict[ScorerName, ScorerPool] = {}
    for role, number in cfg.cluster.num_scorers.items():
        workers = [ThreadWorker(f"{role} {i}", build_scorer(role, cfg)) for i in range(number)]
        scorers[role] = ScorerPool(role, workers, **supervision)
    with closing(Pools(EnginePool(engines, **supervision), scorers)) as pools:
        yield pools


@contextmanager
def ray_pools(cfg: RLConfig) -> Generator[Pools]:
    """The engines and frozen models of `cluster` on Ray, beside an engine in a thread of this
    process where that is to sample ahead. Raises as `ray_workers`."""
    from hone.distributed.ray import ray_workers

    with ray_workers(cfg, "hone.loops.workers:build_worker") as cluster:
        started = cluster.start_all()
        engines: list[Any] = started.get("engine", [])
        if cfg.has_engine_thread:
            engines = [build_engine_worker(cfg, name="engine 0")]
        supervision: dict[str, Any] = {
            "timeout_s": cfg.cluster.engine_timeout_s,
            "max_restarts": MAX_RESTARTS,
            "start_timeout_s": cluster.starting_s,
        }
        restart = None if cfg.has_engine_thread else partial(cluster.start, "engine")
        pool = EnginePool(engines, restart=restart, **supervision)
        scorers: dict[ScorerName, ScorerPool] = {
            role: ScorerPool(
                role, started[role], restart=partial(cluster.start, role), **supervision
            )
            for role in cfg.cluster.num_scorers
        }
        with closing(Pools(pool, scorers, cluster.host)) as pools:
            yield pools
