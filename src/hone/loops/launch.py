"""What every run does before its first step: processes, device, seeds, folder, where to go on."""

from __future__ import annotations

import fcntl
import logging
import os
import random
from collections.abc import Generator, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hone.checkpoint.export import export_adapter, rehearse_export
from hone.checkpoint.store import Checkpoint, CheckpointStore
from hone.config.model import ModelConfig
from hone.config.parallel import ParallelConfig
from hone.config.run import GenerateRunConfig
from hone.config.tree import RLConfig, SFTConfig
from hone.distributed.listening import on_loopback
from hone.distributed.mesh import Mesh
from hone.distributed.processes import HONE_KEY, processes, run_key
from hone.distributed.roles import CriticProcesses, Roles
from hone.distributed.signals import Came
from hone.distributed.watch import Watch
from hone.errors import UserError
from hone.loops.ending import Ending
from hone.loops.hosts import require_same_inputs, require_shared
from hone.loops.interrupt import terminable
from hone.loops.resuming import announce, announce_restart, changes, find_checkpoint
from hone.models.load import load_deferred, load_model, require_attention
from hone.observe.disk import writing
from hone.observe.environment import save_environment
from hone.observe.local_server import ADDRESS
from hone.observe.loggers import append_event
from hone.observe.metrics_server import MetricsServer
from hone.observe.resumed_run import (
    exported_last,
    exported_step,
    save_config,
)
from hone.observe.run_folder import ENVIRONMENT, LOCK
from hone.observe.tracing import Tracing
from hone.trainer.gathering import wholes
from hone.trainer.trainer import Trainer

__all__ = [
    "FolderLock",
    "Launch",
    "choose_device",
    "export",
    "is_complete",
    "join",
    "launch",
    "load_for_training",
    "lock_run_dir",
    "rehearse",
]

_log = logging.getLogger(__name__)

_UNSIGNED = (
    f"warning: {HONE_KEY} is not set, so that whoever reaches the ports of this run can have "
    f"programs run in its processes. Give one secret to all hosts (export {HONE_KEY}=..., such as "
    "`openssl rand -hex 32` prints), or see that nobody else reaches them (docs/security.md)."
)


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
    lock: FolderLock | None
    """In the first process."""
    early: Came
    """A signal that came before the loop, and whose exception was swallowed."""

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
    run: GenerateRunConfig,
    parallel: ParallelConfig,
    *,
    critic: CriticProcesses | None = None,
    cluster: str | None = None,
) -> Generator[tuple[Roles, Watch]]:
    """This process's place among all that train together, under watch; left behind at the end.
    `cluster` is the address of a Ray cluster where others may be, which take the weights.

    With one process nothing is set up. Raises UserError where there are fewer GPUs than processes.
    """
    own = processes()
    is_on_one_host = not own.has_other_hosts and cluster is None
    if own.has_other_hosts and own.rank == 0 and not run_key():
        _log.warning("%s", _UNSIGNED)
    with (
        on_loopback() if is_on_one_host else nullcontext(),
        Watch(own, parallel.timeout_s) as watch,
    ):
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
    critic = cluster = None
    if isinstance(cfg, RLConfig):
        cluster = cfg.cluster.address
        if cfg.cluster.num_critics:
            critic = CriticProcesses(cfg.cluster.num_critics, cfg.critic_parallel)
    with (
        ExitStack() as stack,
        join_roles(run, parallel, critic=critic, cluster=cluster) as (roles, watch),
    ):
        everyone = roles.everyone
        early = watch.terminated
        if everyone.size == 1:  # of several, the watch ends each
            early = stack.enter_context(terminable())
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
        lock = None
        ending = Ending(run.dir, watch, is_first=everyone.is_first)
        stack.enter_context(ending.report())
        if everyone.is_first:
            with writing(run.dir, "run.dir"):
                run.dir.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(lock_run_dir(run.dir))
        stack.enter_context(ending.cause())
        require_attention(cfg.model, everyone.device)
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
            yield Launch(cfg, roles, watch, store, found, tracing, metrics_server, lock, early)


class FolderLock:
    """Keeps other runs out of a run folder; the system lets go of it when this process ends. The
    process id stays in the lock file, for the launcher of a process that is killed."""

    def __init__(self, folder: Path) -> None:
        """Take the folder. Raises UserError where another run is in there."""
        self._folder = folder
        self._file = self._taken()

    def is_held(self) -> bool:
        """Whether the file that is locked is still the folder's: not once that was deleted."""
        held = os.fstat(self._file.fileno())
        try:
            there = (self._folder / LOCK).stat()
        except FileNotFoundError:
            return False
        return (there.st_dev, there.st_ino) == (held.st_dev, held.st_ino)

    def take_again(self) -> None:
        """Make the folder anew, and take it. Raises UserError where another run has it by now."""
        with writing(self._folder, "run.dir"):
            self._folder.mkdir(parents=True, exist_ok=True)
        taken = self._taken()
        self.release()
        self._file = taken

    def release(self) -> None:
        """Let others have the folder."""
        self._file.close()

    def _taken(self) -> TextIO:
        with ExitStack() as stack:
            with writing(self._folder, "run.dir"):
                # Another run's process id is in it until it is ours.
                file = stack.enter_context((self._folder / LOCK).open("a"))
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise UserError(
                    f"another run is at work in run.dir '{self._folder}'. Wait for its end, or "
                    "name another folder."
                ) from error
            with writing(self._folder, "run.dir"):
                file.truncate(0)
                file.write(f"{os.getpid()}\n")
                file.flush()
            stack.pop_all()
            return file


@contextmanager
def lock_run_dir(folder: Path) -> Generator[FolderLock]:
    """Have a run folder for this process alone, as `FolderLock`."""
    lock = FolderLock(folder)
    try:
        yield lock
    finally:
        lock.release()


def is_complete(launch: Launch) -> bool:
    """Whether all steps lie behind the run, and `export` has written what came of them. Collective.

    A run that ended between its last checkpoint and the export may have a model of earlier steps,
    and one that went back to an earlier step that of later ones.
    """
    found, cfg = launch.checkpoint, launch.cfg
    done = exported_step(cfg)
    is_done = done is not None and done >= launch.total_steps
    if is_done and found is not None and found.step < launch.total_steps:
        is_newer = exported_last(cfg).stat().st_mtime >= found.saved_at
        is_done = cfg.run.resume == "auto" and is_newer
    return launch.everyone.broadcast(is_done)


def rehearse(trainer: Trainer, tokenizer: PreTrainedTokenizerBase, launch: Launch) -> int:
    """Do all that `export` or `export_role` will do but for the weights; the bytes that these will
    have. Collective. Raises as `rehearse_export`."""
    policy, is_policy = trainer.policy, trainer.role == "policy"
    folder = launch.dir / ("model" if is_policy else trainer.role)
    dtype = _export_dtype(trainer, launch) if is_policy else policy.dtype
    adapter = launch.dir / "adapter" if is_policy and launch.cfg.model.lora.rank else None
    args = policy.model, tokenizer, folder, dtype
    return rehearse_export(*args, mesh=launch.mesh, adapter=adapter)


def export(
    trainer: Trainer, tokenizer: PreTrainedTokenizerBase, launch: Launch, *, step: int
) -> None:
    """Write the model, which `step` has trained, to `<run.dir>/model`, and adapters, which are
    merged there, also to `<run.dir>/adapter`. Collective."""
    policy, mesh, lora = trainer.policy, launch.mesh, launch.cfg.model.lora
    dtype = _export_dtype(trainer, launch)
    trainer.export_hf(launch.dir / "model", tokenizer, dtype=dtype, step=step)
    if lora.rank:
        adapters, folder = _wholes(policy.masters), launch.dir / "adapter"
        export_adapter(policy.model, lora, folder, adapters, mesh=mesh, step=step)


def export_role(
    trainer: Trainer, tokenizer: PreTrainedTokenizerBase, launch: Launch, *, step: int
) -> None:
    """Write a model that has learnt beside the policy to `<run.dir>/<role>`. Collective."""
    trainer.export_hf(launch.dir / trainer.role, tokenizer, step=step)


def _export_dtype(trainer: Trainer, launch: Launch) -> torch.dtype:
    """Of the policy's weights in its folder."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    return dtypes.get(launch.cfg.checkpoint.export_dtype, trainer.policy.dtype)


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
