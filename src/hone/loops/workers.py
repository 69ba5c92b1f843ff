"""Builds the workers of pools: an engine or a frozen model without a trainer beside it."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing, contextmanager, nullcontext
from datetime import timedelta

import torch.distributed as dist

from hone.config.errors import UserError
from hone.config.tree import RLConfig
from hone.distributed.pool import ThreadWorker
from hone.engine.worker import EngineWorker, LockStep
from hone.loops.launch import choose_device
from hone.loops.parts import make_engine
from hone.loops.remote import Pools
from hone.models.load import blank_model, load_model
from hone.models.tensor_parallel import TensorParallel
from hone.models.tokenizer import load_tokenizer
from hone.rollout.engine_pool import EnginePool
from hone.rollout.scorer_pool import ScorerPool
from hone.trainer.scorer import FrozenScorer
from hone.weights.receiver import WeightReceiver

__all__ = ["build_engine_thread", "build_engine_worker", "build_reference", "thread_pools"]


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
        model = blank_model(cfg.model, device=device, tp=tp)
    engine = make_engine(
        cfg, model, tokenizer, owns_weights=True, tensor_parallel=tp, device=device
    )
    receiver = WeightReceiver(engine, device)
    group = None
    if tp.size > 1:
        patience = timedelta(seconds=cfg.cluster.engine_timeout_s)
        ranks = dist.new_group(backend="gloo", timeout=patience)
        assert isinstance(ranks, dist.ProcessGroup)
        group = LockStep(ranks)
    return EngineWorker(engine, receiver.receive, name=name, group=group)


def build_engine_thread(cfg: RLConfig, *, name: str) -> EngineWorker:
    """An engine in a thread beside the trainer. Raises UserError on a GPU."""
    if choose_device(cfg.run).type != "cpu":
        raise UserError(
            "pipeline.enabled is on and cluster.num_engines is 0, so that the engine runs in a "
            "thread beside the trainer: that is served on a CPU, since on a GPU neither may wait "
            "for the device while the other records CUDA graphs. Set cluster.num_engines, "
            "pipeline.enabled to false, or run.device to cpu."
        )
    return build_engine_worker(cfg, name=name)


def build_reference(cfg: RLConfig) -> FrozenScorer:
    """The policy before training, whole and frozen on this process's device: of `model.path`, or
    drawn from `run.seed` as the policy was, whatever step the run is at.

    Raises UserError and FileNotFoundError as the model's loader does.
    """
    device = choose_device(cfg.run)
    return FrozenScorer(
        load_model(cfg.model, device=device, seed=cfg.run.seed),
        cfg.trainer,
        temperature=cfg.rollout.temperature,
        exact=cfg.model.exact,
    )


@contextmanager
def thread_pools(cfg: RLConfig) -> Generator[Pools]:
    """The engines and references of a run in threads of this process, on its device."""
    timeout_s = cfg.cluster.engine_timeout_s
    engines = EnginePool(
        [build_engine_thread(cfg, name=f"engine {i}") for i in range(cfg.num_engines_apart)],
        restart=None,
        timeout_s=timeout_s,
        max_restarts=0,
    )
    references = None
    if cfg.cluster.num_references:
        references = ScorerPool(
            [
                ThreadWorker(f"reference {i}", build_reference(cfg))
                for i in range(cfg.cluster.num_references)
            ],
            restart=None,
            timeout_s=timeout_s,
            max_restarts=0,
        )
    with closing(engines), closing(references) if references else nullcontext():
        yield Pools(engines, host="127.0.0.1", references=references)
