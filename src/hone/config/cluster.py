"""Where training processes and engines live when they are apart."""

from __future__ import annotations

from pydantic import Field

from hone.config.base import Section

__all__ = ["ClusterConfig"]


class ClusterConfig(Section):
    """Processes on Ray. Without engines of their own none is started: each training process has an
    engine on its own device, and `--nproc` says how many there are."""

    address: str | None = None
    """Ray cluster to join: `auto` for the one this host belongs to, or `host:port`. Unset: a Ray of
    this host alone is started for the run."""

    num_trainers: int = Field(default=1, ge=1)
    """Processes that train together, one a device; `trainer.parallel` says how."""

    num_engines: int = Field(default=0, ge=0)
    """Engines on devices of their own, `engine.tensor_parallel_size` devices each. More engines are
    faster than larger ones where the model fits. 0: engines share the trainers' devices."""

    num_nodes: int = Field(default=1, ge=1)
    """Hosts that the run may use."""

    devices_per_node: int | None = Field(default=None, ge=1)
    """GPUs of a host, or with `run.device` cpu processes that it may hold; unset: what Ray finds.
    Trainers and engines together must fit."""

    update_weight_buffer_size: int = Field(default=512 << 20, ge=1)
    """Bytes of weights that are on their way to engines at a time; two such buffers are held. A
    tensor that is larger travels alone."""

    engine_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds in which an engine that has work must show progress; a silent one is restarted."""

    max_engine_restarts: int = Field(default=3, ge=0)
    """Restarts of engines in a run before it gives up."""
