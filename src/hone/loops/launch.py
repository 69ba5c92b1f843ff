"""Start of a run: processes, device, seeds, run folder, and the checkpoint to resume from."""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Generator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TextIO

import numpy as np
import torch
import torch.distributed as dist
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hone.checkpoint.export import export_adapter, rehearse_export
from hone.checkpoint.store import Checkpoint, CheckpointStore
from hone.config.plan import Command, Devices, RunPlan, known_models, resolve
from hone.config.roles import Role
from hone.config.run import GenerateRunConfig
from hone.config.tree import RLConfig, SFTConfig
from hone.distributed.listening import on_loopback
from hone.distributed.mesh import Mesh
from hone.distributed.processes import HONE_KEY, processes, run_key
from hone.distributed.roles import CriticProcesses, Roles
from hone.distributed.settings import ParallelConfig
from hone.distributed.signals import PendingSignal
from hone.distributed.watch import Watch
from hone.distributed.worker_rank import runs_on_gpus
from hone.errors import UserError
from hone.families.model_facts import ModelFacts
from hone.images.store import STORE
from hone.loops.choices import settle
from hone.loops.ending import Ending
from hone.loops.hosts import require_same_inputs, require_shared
from hone.loops.interrupt import terminable
from hone.loops.resuming import announce, announce_restart, changes, find_checkpoint
from hone.models.load import load_deferred, load_model, require_attention
from hone.models.settings import ModelConfig
from hone.observe.disk import writing
from hone.observe.environment import save_environment
from hone.observe.local_server import ADDRESS
from hone.observe.locks import take_lock
from hone.observe.loggers import append_event
from hone.observe.metrics_server import MetricsServer
from hone.observe.pages import Pages
from hone.observe.resumed_run import (
    exported_last,
    exported_step,
    kept_choices,
    save_config,
)
from hone.observe.run_folder import ENVIRONMENT, LOCK, lock_holder
from hone.observe.tracing import Tracing
from hone.planner.recompute import chosen_values
from hone.planner.smaller_start import smaller_start
from hone.trainer.frozen import FrozenScorer
from hone.trainer.trainer import Trainer

__all__ = [
    "FolderLock",
    "Launch",
    "choose_device",
    "export",
    "frozen_scorer",
    "is_complete",
    "join",
    "launch",
    "load_for_training",
    "lock_run_dir",
    "plan_run",
    "rehearse",
]

_log = logging.getLogger(__name__)

_UNSIGNED = (
    f"warning: {HONE_KEY} is not set, so that anyone who reaches the ports of this run can run "
    f"programs in its processes. Give one secret to all hosts (export {HONE_KEY}=..., such as "
    "`openssl rand -hex 32` prints), or make sure that no one else reaches them (docs/security.md)."
)


@dataclass(frozen=True, slots=True)
class Launch:
    """The environment of a started run: plan, processes, folder and checkpoint."""

    cfg: RLConfig | SFTConfig
    plan: RunPlan
    roles: Roles
    watch: Watch
    store: CheckpointStore
    checkpoint: Checkpoint | None
    """The checkpoint to resume from. None for a fresh start."""
    tracing: Tracing
    metrics_server: MetricsServer | None
    """The server of `log.metrics_port`, in the first process."""
    lock: FolderLock | None
    """Set in the first process only."""
    early: PendingSignal
    """A signal that came before the loop began and whose exception was swallowed."""

    def save_config(self) -> None:
        """Write the configuration, versions and devices into the run folder. Called once nothing
        can refuse a resume any more.

        Changed settings of a resumed run are recorded as an event. A launch that has nothing left
        to train keeps the configuration that the run was trained with.
        """
        if self.everyone.is_first and self.steps_done < self.total_steps:
            if self.steps_done and (changed := changes(self.cfg, self.steps_done)):
                fields = {"step": self.steps_done, "settings": changed}
                append_event(self.dir, "changed", **fields)
            save_config(self.cfg, chosen_values(self.plan))
            save_environment(self.dir / ENVIRONMENT, self.mesh.device, self.everyone.size)

    @property
    def mesh(self) -> Mesh:
        """The process mesh of this process's role."""
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

    def smaller_start(self) -> str:
        """Settings with which a run that ran out of memory can be started again, as a sentence."""
        return smaller_start(self.plan)

    @property
    def steps_done(self) -> int:
        """Updates that earlier launches made."""
        return 0 if self.checkpoint is None else self.checkpoint.step


def plan_run(cfg: Command, kind: str, *, world_size: int) -> RunPlan:
    """The plan of a run on devices of this `kind` (a `torch.device` type). `world_size` is the
    number of training processes, or of sampling ones in a command without a trainer."""
    facts = ModelFacts.read(cfg.model.path or "")
    devices = Devices(kind="cpu" if kind == "cpu" else "cuda")
    return resolve(cfg, facts, devices, world_size=world_size, others=known_models(cfg))


def choose_device(cfg: GenerateRunConfig) -> torch.device:
    """The device of `run.device` for this process.

    Raises UserError if CUDA is asked for and there is none, and if this host has fewer GPUs than
    processes.
    """
    if cfg.device == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        place, num_gpus = processes(), torch.cuda.device_count()
        if place.local_world_size > num_gpus:
            raise UserError(
                f"{place.local_world_size} processes were started on this host, one a GPU, and "
                f"torch sees {num_gpus} GPUs. Start at most {num_gpus}, or set run.device to cpu."
            )
        device = torch.device("cuda", place.local_rank)
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
    """Join the processes of a command that all have the same role. See `join_roles`."""
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
    """Join the processes that train together, and watch them until the context ends.

    `critic` describes the processes of a remote critic. `cluster` is the address of a Ray cluster,
    whose workers on other hosts receive weights. A single process sets up nothing. Raises UserError
    if there are fewer GPUs than processes.

    Processes that decode images for the command end with it: the program may go on.
    """
    own = processes()
    is_on_one_host = not own.has_other_hosts and cluster is None
    if own.has_other_hosts and own.rank == 0 and not run_key():
        _log.warning("%s", _UNSIGNED)
    with (
        on_loopback() if is_on_one_host else nullcontext(),
        STORE.own_workers(),
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
        # An engine may have created process groups.
        if own.world_size > 1 and dist.is_initialized():
            dist.destroy_process_group()


@contextmanager
def launch(cfg: RLConfig | SFTConfig, pages: Pages | None = None) -> Generator[Launch]:
    """Join the other processes, seed all random generators, and find the checkpoint to resume from.
    However the block ends, the folder records how the run ended and gets the report of `pages`.

    Seeds are equal in all processes. Raises UserError if `run.resume` does not fit the content of
    the folder, another command wrote the folder, or hosts do not see the same files.
    """
    run, critic, cluster, num_critics = cfg.run, None, None, 0
    if isinstance(cfg, RLConfig):
        cluster, num_critics = cfg.cluster.address, cfg.cluster.num_critics
    kind = "cuda" if runs_on_gpus(run) else "cpu"
    plan = plan_run(cfg, kind, world_size=processes().world_size - num_critics)
    parallel = plan.policy.trainer.parallel
    if (role := plan.roles.get("critic")) is not None and role.has_own_devices:
        critic = CriticProcesses(num_critics, role.trainer.parallel)
    with (
        ExitStack() as stack,
        join_roles(run, parallel, critic=critic, cluster=cluster) as (roles, watch),
    ):
        everyone = roles.everyone
        early = watch.terminated
        if everyone.size == 1:  # with several processes the watch ends each of them
            early = stack.enter_context(terminable())
        random.seed(run.seed)
        np.random.seed(run.seed % 2**32)
        torch.manual_seed(run.seed)
        lock = None
        if everyone.is_first and (run.dir / LOCK).is_file():
            # First: a run that is still at work there may save another checkpoint.
            lock = stack.enter_context(lock_run_dir(run.dir))
        require_same_inputs(plan, everyone)
        require_shared(run.dir, everyone)
        store = CheckpointStore(
            run.dir / "checkpoints",
            keep_last=cfg.checkpoint.keep_last,
            keep_best=cfg.checkpoint.keep_best,
            mesh=everyone,
            # Shorter than the watch's timeout: the store can name the process whose file is
            # missing.
            timeout_s=0.9 * parallel.timeout_s,
        )
        checkpoint = find_checkpoint(cfg, store)
        step = None if checkpoint is None else checkpoint.step
        everyone.agree("the checkpoint to resume from", step)
        if checkpoint is not None:
            for line in announce(checkpoint, cfg, everyone.sizes):
                _log.info("%s", line)
        ending = Ending(run.dir, watch, is_first=everyone.is_first, pages=pages)
        stack.enter_context(ending.report())
        plan = settle(plan, everyone, kept_choices(cfg))
        if everyone.is_first and lock is None:
            with writing(run.dir, "run.dir"):
                run.dir.mkdir(parents=True, exist_ok=True)
            lock = stack.enter_context(lock_run_dir(run.dir))
        holder = everyone.broadcast(os.getpid())
        stack.enter_context(ending.cause(holder))
        require_attention(plan.policy.model, everyone.device)
        if everyone.is_first and checkpoint is None:
            for line in announce_restart(cfg):
                _log.warning("warning: %s", line)
        metrics_server = None
        if everyone.is_first and (port := cfg.log.metrics_port):
            metrics_server = MetricsServer(
                port, run.dir.resolve().name, dashboard=None if pages is None else pages.dashboard
            )
            stack.callback(metrics_server.close)
            _log.info("metrics are served at http://%s:%d/metrics", ADDRESS, port)
        tracing = Tracing(
            cfg.profile,
            cfg.profile.folder(run.dir),
            place=everyone.place,
            device=everyone.device,
            steps_done=step or 0,
        )
        with closing(tracing):
            yield Launch(
                cfg, plan, roles, watch, store, checkpoint, tracing, metrics_server, lock, early
            )


class FolderLock:
    """Exclusive lock of a run folder. The system releases it when this process ends.

    The lock file holds the process id, which the launcher reads if the process is killed.
    """

    def __init__(self, folder: Path) -> None:
        """Lock the folder. Raises UserError if another run has it, or its file system has no
        locks."""
        self._folder = folder
        self._file = self._locked_file()

    def is_held(self) -> bool:
        """Whether the locked file is still the folder's. False once the folder was deleted."""
        locked = os.fstat(self._file.fileno())
        try:
            current = (self._folder / LOCK).stat()
        except FileNotFoundError:
            return False
        return (current.st_dev, current.st_ino) == (locked.st_dev, locked.st_ino)

    def take_again(self) -> None:
        """Create the folder again and lock it. Raises UserError if another run has it by now."""
        with writing(self._folder, "run.dir"):
            self._folder.mkdir(parents=True, exist_ok=True)
        file = self._locked_file()
        self.release()
        self._file = file

    def release(self) -> None:
        self._file.close()

    def _locked_file(self) -> TextIO:
        with ExitStack() as stack:
            with writing(self._folder, "run.dir"):
                # The file holds another run's process id until the lock is ours.
                file = stack.enter_context((self._folder / LOCK).open("a"))
            try:
                take_lock(file, f"run.dir '{self._folder}'")
            except BlockingIOError as error:
                raise UserError(
                    f"another run is at work in run.dir '{self._folder}': process "
                    f"{lock_holder(self._folder)}. Wait for its end, or name another folder."
                ) from error
            with writing(self._folder, "run.dir"):
                file.truncate(0)
                file.write(f"{os.getpid()}\n")
                file.flush()
            stack.pop_all()
            return file


@contextmanager
def lock_run_dir(folder: Path) -> Generator[FolderLock]:
    """Lock a run folder for this process until the context ends."""
    lock = FolderLock(folder)
    try:
        yield lock
    finally:
        lock.release()


def is_complete(launch: Launch) -> bool:
    """Whether all steps are done and `export` has written the resulting model. Collective.

    A run that ended between its last checkpoint and the export may have a model of earlier steps. A
    run that was resumed from an earlier step may have a model of later ones.
    """
    checkpoint, cfg = launch.checkpoint, launch.cfg
    done = exported_step(cfg)
    is_done = done is not None and done >= launch.total_steps
    if is_done and checkpoint is not None and checkpoint.step < launch.total_steps:
        is_newer = exported_last(cfg).stat().st_mtime >= checkpoint.saved_at
        is_done = cfg.run.resume == "auto" and is_newer
    return launch.everyone.broadcast(is_done)


def rehearse(trainer: Trainer, tokenizer: PreTrainedTokenizerBase, launch: Launch) -> int:
    """Do all that `export` or `export_role` will do, except writing the weights. Returns the bytes
    that these will have. Collective. Raises as `rehearse_export`."""
    policy, is_policy = trainer.policy, trainer.role == "policy"
    folder = launch.dir / ("model" if is_policy else trainer.role)
    dtype = _export_dtype(trainer, launch) if is_policy else policy.dtype
    has_adapter = launch.plan.lora is not None and launch.plan.lora.rank > 0
    adapter = launch.dir / "adapter" if is_policy and has_adapter else None
    args = policy.model, tokenizer, folder, dtype
    return rehearse_export(*args, mesh=launch.mesh, adapter=adapter)


def export(
    trainer: Trainer, tokenizer: PreTrainedTokenizerBase, launch: Launch, *, step: int
) -> None:
    """Write the model to `<run.dir>/model`, with adapters merged, and the adapters also to
    `<run.dir>/adapter`. `step` is the update that the model is of. Collective."""
    policy, mesh, lora = trainer.policy, launch.mesh, launch.plan.lora
    dtype = _export_dtype(trainer, launch)
    trainer.export_hf(launch.dir / "model", tokenizer, dtype=dtype, step=step)
    if lora is not None and lora.rank:
        adapters, folder = policy.named_trained(), launch.dir / "adapter"
        export_adapter(policy.model, lora, folder, adapters, mesh=mesh, step=step)


def export_role(
    trainer: Trainer, tokenizer: PreTrainedTokenizerBase, launch: Launch, *, step: int
) -> None:
    """Write a trained model other than the policy to `<run.dir>/<role>`. Collective."""
    trainer.export_hf(launch.dir / trainer.role, tokenizer, step=step)


def _export_dtype(trainer: Trainer, launch: Launch) -> torch.dtype:
    """Dtype in which the policy's weights are written."""
    dtypes = {"float32": torch.float32, "bfloat16": torch.bfloat16}
    return dtypes.get(launch.cfg.checkpoint.export_dtype, trainer.policy.dtype)


def frozen_scorer(role: Role, start: Launch) -> FrozenScorer:
    """Build the frozen scorer of a role, colocated with the trainers and sharded over them."""
    mesh = start.mesh
    return FrozenScorer(
        load_for_training(role.model, mesh, seed=start.cfg.run.seed),
        role.trainer,
        temperature=role.temperature,
        exact=role.is_exact,
        top_k=role.top_k,
        mesh=mesh,
        role=role.name,
        dump_dir=start.dir,
        on_exhausted=start.smaller_start,
    )


def load_for_training(cfg: ModelConfig, mesh: Mesh, *, seed: int) -> PreTrainedModel:
    """Load a model for training on `mesh`: whole for one process; for several without weights, of
    which each process then reads its shards. Raises as `load_model`."""
    if mesh.world.size > 1:
        return load_deferred(cfg, device=mesh.device, seed=seed)
    return load_model(cfg, device=mesh.device, seed=seed)
