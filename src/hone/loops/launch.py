"""What every run does before its first step: processes, device, seeds, folder, where to go on."""

from __future__ import annotations

import fcntl
import logging
import os
import random
from collections import deque
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hone.checkpoint.export import export_hf
from hone.checkpoint.store import Checkpoint, CheckpointStore
from hone.config.errors import UserError
from hone.config.model import ModelConfig
from hone.config.parallel import ParallelConfig
from hone.config.run import GenerateRunConfig
from hone.config.tree import RLConfig, SFTConfig
from hone.distributed.mesh import Mesh
from hone.distributed.processes import processes
from hone.distributed.roles import CriticProcesses, Roles
from hone.distributed.watch import Watch
from hone.loops.ending import Ending
from hone.loops.hosts import require_same_inputs, require_shared
from hone.loops.interrupt import terminable
from hone.loops.resuming import announce, announce_restart, changes, find_checkpoint
from hone.models.adapters import save_adapter
from hone.models.load import load_deferred, load_model
from hone.observe.disk import writing
from hone.observe.environment import save_environment
from hone.observe.local_server import ADDRESS
from hone.observe.loggers import append_event
from hone.observe.metrics_server import MetricsServer
from hone.observe.resumed_run import exported_last, save_config
from hone.observe.run_folder import ENVIRONMENT, LOCK
from hone.observe.tracing import Tracing
from hone.trainer.gathering import wholes
from hone.trainer.trainer import Trainer

__all__ = [
    "Launch",
    "choose_device",
    "export",
    "is_complete",
    "join",
    "launch",
    "load_for_training",
    "lock_run_dir",
]

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Launch:
    """Where a run lives and where it starts."""

    cfg: RLConfig | SFTConfig
    roles: Roles
    watch: Watch
    store: CheckpointStore
    checkpoint: Checkpoint | None
    """What to resume from; None starts afresh."""
    tracing: Tracing
    metrics_server: MetricsServer | None
    """In the first process, where there is one."""

    def save_config(self) -> None:
        """Write the configuration, versions and devices into the run folder, once nothing stands
        against resuming; what has changed since it was written there is an event. A launch that
        trains nothing leaves that which the run was trained with."""
        if self.everyone.is_first and self.steps_done < self.total_steps:
            if self.steps_done and (changed := changes(self.cfg, self.steps_done)):
                fields = {"step": self.steps_done, "settings": changed}
                append_event(self.dir, "changed", **fields)
            save_config(self.cfg)
            save_environment(self.dir / ENVIRONMENT, self.mesh.device, self.everyone.size)

    @property
    def mesh(self) -> Mesh:
        """Of the processes that train what this one trains."""
        return self.roles.mesh

    @property
    def everyone(self) -> Mesh:
        """All processes of the run."""
        return self.roles.everyone

    @property
    def dir(self) -> Path:
        return self.cfg.run.dir

    @property
    def total_steps(self) -> int:
        return self.cfg.run.steps

    @property
    def steps_done(self) -> int:
        """Updates that earlier launches made."""
        return 0 if self.checkpoint is None else self.checkpoint.step


def choose_device(cfg: GenerateRunConfig) -> torch.device:
    """The device of `run.device`: under torchrun, of this process.

    Raises UserError where CUDA is asked for and there is none, and where this host has fewer GPUs
    than processes.
    """
    if cfg.device == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        own, num_gpus = processes(), torch.cuda.device_count()
        if own.local_world_size > num_gpus:
            raise UserError(
                f"{own.local_world_size} processes were started on this host, one a GPU, and torch "
                f"sees {num_gpus} GPUs. Start at most {num_gpus}, or set run.device to cpu."
            )
        device = torch.device("cuda", own.local_rank)
        torch.cuda.set_device(device)
        return device
    if cfg.device == "cuda":
        raise UserError(
            "run.device is cuda, but torch sees no GPU "
            f"(torch {torch.__version__}). Use run.device=cpu or auto, or install a CUDA build."
        )
    return torch.device("cpu")


@contextmanager
def join(run: GenerateRunConfig, parallel: ParallelConfig) -> Generator[tuple[Mesh, Watch]]:
    """This process's place among all, which train the same, as `join_roles`."""
    with join_roles(run, parallel) as (roles, watch):
        yield roles.mesh, watch


@contextmanager
def join_roles(
    run: GenerateRunConfig, parallel: ParallelConfig, *, critic: CriticProcesses | None = None
) -> Generator[tuple[Roles, Watch]]:
    """This process's place among all that train together, under watch; left behind at the end.

    With one process nothing is set up. Raises UserError where there are fewer GPUs than processes.
    """
    own = processes()
    with Watch(own, parallel.timeout_s) as watch:
        device = choose_device(run)
        watch.join()
        roles = Roles.join(parallel, own, device, critic=critic)
        if critic is not None:
            watch.take_role(roles.own)
        watch.enter("start")
        watch.follow(roles.mesh.groups, roles.channels)
        yield roles, watch
        if own.world_size > 1 and dist.is_initialized():  # an engine may have groups of its own
            dist.destroy_process_group()


@contextmanager
def launch(cfg: RLConfig | SFTConfig) -> Generator[Launch]:
    """Join the other processes, seed everything, find out where to go on. At the end of the block,
    whichever it is, the folder says how the run ended.

    Seeds are equal in all processes. Raises UserError where `run.resume` does not fit what the
    folder holds, another command has written it, or hosts do not see the same files.
    """
    run, parallel = cfg.run, cfg.trainer.parallel
    critic = None
    if isinstance(cfg, RLConfig) and cfg.cluster.num_critics:
        critic = CriticProcesses(cfg.cluster.num_critics, cfg.critic_parallel)
    with (
        ExitStack() as stack,
        join_roles(run, parallel, critic=critic) as (roles, watch),
    ):
        everyone = roles.everyone
        if everyone.size == 1:  # of several, the watch ends each
            stack.enter_context(terminable())
        random.seed(run.seed)
        np.random.seed(run.seed % 2**32)
        torch.manual_seed(run.seed)
        require_same_inputs(cfg, everyone)
        require_shared(run.dir, everyone)
        store = CheckpointStore(
            run.dir / "checkpoints",
            keep_last=cfg.checkpoint.keep_last,
            keep_best=cfg.checkpoint.keep_best,
            mesh=everyone,
            timeout_s=0.9 * parallel.timeout_s,  # it knows whose file is missing, the watch less
        )
        found = find_checkpoint(cfg, store)
        everyone.agree("the checkpoint to resume from", None if found is None else found.step)
        if found is not None:
            for line in announce(found, cfg, everyone.sizes):
                _log.info("%s", line)
        ending = Ending(run.dir, watch, is_first=everyone.is_first)
        stack.enter_context(ending.report())
        if everyone.is_first:
            with writing(run.dir, "run.dir"):
                run.dir.mkdir(parents=True, exist_ok=True)
            stack.enter_context(lock_run_dir(run.dir))
        stack.enter_context(ending.cause())
        if everyone.is_first and found is None:
            for line in announce_restart(cfg):
                _log.warning("warning: %s", line)
        metrics_server = None
        if everyone.is_first and (port := cfg.log.metrics_port):
            metrics_server = MetricsServer(port, run.dir.resolve().name)
            stack.callback(metrics_server.close)
            _log.info("metrics are served at http://%s:%d/metrics", ADDRESS, port)
        tracing = Tracing(
            cfg.profile,
            cfg.profile.folder(run.dir),
            place=everyone.place,
            device=everyone.device,
            steps_done=0 if found is None else found.step,
        )
        with closing(tracing):
            yield Launch(cfg, roles, watch, store, found, tracing, metrics_server)


@contextmanager
def lock_run_dir(folder: Path) -> Generator[None]:
    """Keep other runs out of a run folder; the system lets go of it when this process ends. The
    process id stays in the lock file, for the launcher of a process that is killed.

    Raises UserError where another run is in there.
    """
    with writing(folder, "run.dir"):
        file = (folder / LOCK).open("a")  # another run's process id is in it until it is ours
    with file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise UserError(
                f"another run is at work in run.dir '{folder}'. Wait for its end, or name another "
                "folder."
            ) from error
        with writing(folder, "run.dir"):
            file.truncate(0)
            file.write(f"{os.getpid()}\n")
            file.flush()
        yield


def is_complete(launch: Launch) -> bool:
    """Whether all steps lie behind the run, and `export` has written what came of them. Collective.

    A run that ended between its last checkpoint and the export may have a model of earlier steps.
    """
    found = launch.checkpoint
    if found is None or found.step < launch.total_steps:
        return False
    written_last = exported_last(launch.cfg)
    return launch.everyone.broadcast(
        written_last.is_file() and written_last.stat().st_mtime >= found.saved_at
    )


def export(trainer: Trainer, tokenizer: PreTrainedTokenizerBase, launch: Launch) -> None:
    """Write the trained model to `<run.dir>/model`, and adapters, which are merged there, also to
    `<run.dir>/adapter`. Collective."""
    policy, mesh, lora = trainer.policy, launch.mesh, launch.cfg.model.lora
    dtypes = {"auto": policy.dtype, "float32": torch.float32, "bfloat16": torch.bfloat16}
    dtype = dtypes[launch.cfg.checkpoint.export_dtype]
    if lora.rank or dtype == policy.dtype:
        weights = trainer.named_weights()
    else:  # the finest there are: masters in place of what is computed with
        weights = policy.named_masters()
    export_hf(policy.model, tokenizer, launch.dir / "model", dtype, weights, mesh=mesh)
    if lora.rank:
        adapters = _wholes(policy.masters)
        if mesh.is_first:
            with writing(launch.dir / "adapter", "run.dir"):
                save_adapter(launch.dir / "adapter", policy.model, lora, adapters)
        else:
            deque(adapters, maxlen=0)  # gathered by all


def export_role(trainer: Trainer, tokenizer: PreTrainedTokenizerBase, launch: Launch) -> None:
    """Write a model that has learnt beside the policy to `<run.dir>/<role>`. Collective."""
    policy = trainer.policy
    folder, weights = launch.dir / trainer.role, trainer.named_weights()
    export_hf(policy.model, tokenizer, folder, policy.dtype, weights, mesh=launch.mesh)


def load_for_training(cfg: ModelConfig, mesh: Mesh, *, seed: int) -> PreTrainedModel:
    """The model that a trainer of `mesh` takes: without weights for several processes, of which
    each reads its shards; whole for one. Raises as `load_model`."""
    if mesh.world.size > 1:
        return load_deferred(cfg, device=mesh.device, seed=seed)
    return load_model(cfg, device=mesh.device, seed=seed)


def _wholes(tensors: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Gather tensors of which processes hold parts."""
    values = ((tensor.detach(), tensor.dtype) for tensor in tensors.values())
    yield from zip(tensors, wholes(values), strict=True)
