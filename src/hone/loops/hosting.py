"""Engines without a trainer beside them."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing, contextmanager
from datetime import timedelta

import torch.distributed as dist

from hone.config.tree import RLConfig
from hone.engine.host import EngineHost, LockStep
from hone.loops.apart import Engines
from hone.loops.launch import choose_device
from hone.loops.parts import make_engine
from hone.loops.references import local_references
from hone.models.load import blank_model, check_exact
from hone.models.tensor_parallel import TensorParallel
from hone.models.tokenizer import load_tokenizer
from hone.rollout.engine_group import EngineGroup
from hone.rollout.handles import LocalHandle
from hone.weights.receiver import WeightReceiver

__all__ = ["local_engines", "make_host"]


def make_host(cfg: RLConfig, *, name: str = "engine") -> EngineHost:
    """This process's rank of an engine of `cfg`, which samples once a sync has filled it.

    The ranks of an engine find each other as torchrun's variables say. Raises UserError as the
    engine and the model's loader do.
    """
    device = choose_device(cfg.run)
    check_exact(cfg.model, device)
    tp = TensorParallel.from_environment(cfg.engine.tensor_parallel_size, device)
    tokenizer = load_tokenizer(cfg.model)
    if cfg.engine.backend == "vllm":  # it makes room for weights of its own
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
    return EngineHost(engine, receiver.receive, name=name, group=group)


@contextmanager
def local_engines(cfg: RLConfig) -> Generator[Engines]:
    """The engines and references of a run in threads of this process, on its device."""

    def start(index: int) -> LocalHandle:
        return LocalHandle(make_host(cfg, name=f"engine {index}"))

    group = EngineGroup(
        [start(index) for index in range(cfg.num_engines_apart)],
        restart=None,
        timeout_s=cfg.cluster.engine_timeout_s,
        max_restarts=0,
    )
    with closing(group), local_references(cfg) as references:
        yield Engines(group, host="127.0.0.1", references=references)
