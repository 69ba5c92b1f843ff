"""`hone serve`: the door in front of engines with the weights of `model.path`.

The main thread drives the engines, a thread of its own the server; Ctrl-C ends both.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack

import torch

from hone.config.tree import ServeConfig
from hone.distributed.processes import processes
from hone.door.door import Door
from hone.door.handover import Handover, shown_tokens
from hone.door.security import Keys, is_loopback, read_key
from hone.door.server import DoorServer
from hone.errors import UserError
from hone.loops.launch import choose_device
from hone.loops.sampling import join_hosts, load_alone, plan_sampling
from hone.loops.served import serve_model
from hone.loops.workers import local_pools
from hone.models.tokenizer import load_tokenizer
from hone.rollout.episodes import Episodes
from hone.rollout.requests import sampling_params
from hone.rollout.runner import Runner
from hone.types import SamplingEngine

__all__ = ["run_serving"]

_log = logging.getLogger(__name__)


def run_serving(
    cfg: ServeConfig, num_devices: int = 1, *, on_start: Callable[[DoorServer, Keys], object]
) -> None:
    """Serve until Ctrl-C. `on_start` is called once requests are answered.

    With several devices an engine samples on each, in processes of its own. Raises UserError for
    settings that do not fit, and the errors of the model's loader and of the engines.
    """
    if processes().world_size > 1:
        raise UserError(
            "hone serve was started by torchrun; one process of it drives all engines of a host. "
            "Start it alone, with --nproc N for N devices"
        )
    keys = Keys(read_key(cfg.serve.key_file))
    torch.manual_seed(cfg.run.seed)
    with join_hosts(cfg, num_devices, "serve") as host, ExitStack() as stack:
        plan = plan_sampling(cfg, host)
        served = plan.roles["engine"].model
        tokenizer = load_tokenizer(served)
        model, prompts = serve_model(
            served,
            tokenizer,
            name=cfg.serve.model_name or served.path,
            defaults=sampling_params(cfg.generation, cfg.generation.stop),
            max_model_len=cfg.serve.max_model_len,
            data=cfg.data,
        )
        engine: SamplingEngine
        if num_devices > 1:
            engine = stack.enter_context(local_pools(plan, num_devices)).engines
        else:
            engine = load_alone(plan, choose_device(cfg.run), tokenizer)
        episodes = Episodes(decode=model.decode, run_seed=cfg.run.seed, purpose="serve")
        handover = Handover(max_requests=cfg.serve.max_requests)
        server = stack.enter_context(
            DoorServer(Door(model, prompts, handover, cfg.serve, keys=keys))
        )
        if not is_loopback(cfg.serve.host):
            _log.warning(
                "warning: the server listens at %s, and requests and keys travel in the clear "
                "(docs/security.md)",
                cfg.serve.host,
            )
        on_start(server, keys)
        handover.serve(Runner(engine, None, episodes), shown_tokens(engine))
