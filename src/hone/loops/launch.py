"""What every run does before its first step: device, seeds, folder, the point to go on from."""

from __future__ import annotations

import random
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from hone.checkpoint.store import Checkpoint, CheckpointStore
from hone.config.base import Section
from hone.config.errors import UserError
from hone.config.load import dump_config
from hone.config.run import CheckpointConfig, GenerateRunConfig, RunConfig
from hone.distributed.processes import processes

__all__ = [
    "Launch",
    "choose_device",
    "export_dtype",
    "launch",
    "require_one_process",
]


@dataclass(frozen=True, slots=True)
class Launch:
    """Where a run lives and where it starts."""

    device: torch.device
    dir: Path
    store: CheckpointStore
    checkpoint: Checkpoint | None
    """What to go on from; None starts afresh."""

    @property
    def steps_done(self) -> int:
        """Updates that earlier launches made."""
        return 0 if self.checkpoint is None else self.checkpoint.step

    @property
    def resume_step(self) -> int | None:
        """First step to be computed again; None where the run folder starts afresh."""
        return None if self.checkpoint is None else self.checkpoint.step + 1


def choose_device(cfg: GenerateRunConfig) -> torch.device:
    """The device of `run.device`: under torchrun, of this process.

    Raises UserError where CUDA is asked for and there is none, and where this host has fewer GPUs
    than processes.
    """
    if cfg.device == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        own, num_devices = processes(), torch.cuda.device_count()
        if own.local_world_size > num_devices:
            raise UserError(
                f"torchrun started {own.local_world_size} processes on this host, one a GPU, but "
                f"torch sees {num_devices}. Start at most {num_devices} (--nproc-per-node "
                f"{num_devices})."
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


def require_one_process() -> None:
    """Raise UserError under torchrun with several processes: they would write the same folder."""
    world_size = processes().world_size
    if world_size > 1:
        raise UserError(
            f"torchrun started {world_size} processes, but this command runs in one; only `hone "
            "generate` and `hone bench engine` use several. Start it without torchrun."
        )


def launch(run: RunConfig, checkpoint: CheckpointConfig, tree: Section) -> Launch:
    """Seed everything, prepare the run folder, save the resolved configuration in it.

    Raises UserError where `run.resume` does not fit what the folder holds.
    """
    require_one_process()
    device = choose_device(run)
    random.seed(run.seed)
    np.random.seed(run.seed % 2**32)
    torch.manual_seed(run.seed)
    store = CheckpointStore(
        run.dir / "checkpoints", keep_last=checkpoint.keep_last, keep_best=checkpoint.keep_best
    )
    checkpoint_found = _find(run, store)
    run.dir.mkdir(parents=True, exist_ok=True)
    (run.dir / "config.yaml").write_text(dump_config(tree), encoding="utf-8")
    return Launch(device=device, dir=run.dir, store=store, checkpoint=checkpoint_found)


def export_dtype(cfg: CheckpointConfig, model: PreTrainedModel) -> torch.dtype:
    """Number format of the exported folder."""
    names = {"auto": model.dtype, "float32": torch.float32, "bfloat16": torch.bfloat16}
    return names[cfg.export_dtype]


def _find(run: RunConfig, store: CheckpointStore) -> Checkpoint | None:
    """The checkpoint that `run.resume` asks for. A folder with damaged ones only is an error: to
    start afresh beside them would look like going on."""
    if isinstance(run.resume, int):
        return store.load(run.resume)
    if store.is_empty:
        return None
    if run.resume == "never":
        raise UserError(
            f"run.resume is never, but run.dir={str(run.dir)!r} holds checkpoints. Choose another "
            "run.dir, or run.resume=auto to go on from them."
        )
    return store.load("latest")
