"""Where training processes and engines live when they are apart."""

from __future__ import annotations

from typing import NamedTuple

from pydantic import Field

from hone.config.base import Section

__all__ = ["ClusterConfig", "host_and_port"]


class ClusterConfig(Section):
    """Processes on Ray. Where nothing but training has devices none is started: each training
    process has an engine on its own device, and `--nproc` says how many there are."""

    address: str | None = None
    """Ray cluster to join: `auto` for the one this host belongs to, `host:port` of its head, or
    `ray://host:port` of Ray's client. Unset: a Ray of this host alone is started for the run."""

    num_trainers: int = Field(default=1, ge=1)
    """Processes that train together, one a device; `trainer.parallel` says how. All on the host
    that the run is started on, or where they are more than `devices_per_node`, on whole nodes of
    the Ray cluster."""

    num_engines: int = Field(default=0, ge=0)
    """Engines on devices of their own, `engine.tensor_parallel_size` devices each. More engines are
    faster than larger ones where the model fits. 0: engines share the trainers' devices."""

    num_references: int = Field(default=0, ge=0)
    """Copies of the reference model of `algorithm.kl` on devices of their own, one each, which
    share the rows of a step. 0: it lies beside the policy, sharded over the trainers."""

    num_nodes: int = Field(default=1, ge=1)
    """Hosts that the run may use."""

    devices_per_node: int | None = Field(default=None, ge=1)
    """GPUs of a host, or with `run.device` cpu processes that it may hold; unset: what Ray finds.
    Trainers, engines and references together must fit."""

    update_weight_buffer_size: int = Field(default=512 << 20, ge=1)
    """Bytes of weights that are on their way to engines at a time; two such buffers are held. A
    tensor that is larger travels alone."""

    engine_timeout_s: float = Field(default=120.0, gt=0)
    """Seconds in which an engine or a reference that has work must show progress; a silent one is
    restarted, three times in a run."""

    @property
    def is_used(self) -> bool:
        """Whether anything but training has devices of its own, so that there is a cluster."""
        return self.num_engines > 0 or self.num_references > 0

    @property
    def num_trainer_nodes(self) -> int:
        """Nodes that the trainers are on."""
        each = self.devices_per_node or self.num_trainers
        return -(-self.num_trainers // each)

    @property
    def used_by(self) -> str:
        """The setting that makes it so, for messages."""
        return "cluster.num_engines" if self.num_engines else "cluster.num_references"

    def devices(self, tensor_parallel_size: int) -> list[RoleDevices]:
        """The devices of each role that has some, with engines of so many."""
        num_ranks = self.num_engines * tensor_parallel_size
        engine = ("cluster.num_engines", "engine.tensor_parallel_size")
        sampling = f"{engine[0]} {self.num_engines} x {engine[1]} {tensor_parallel_size}"
        roles = [
            RoleDevices.of("trainer", "cluster.num_trainers", self.num_trainers),
            RoleDevices("engine", num_ranks, sampling, engine),
            RoleDevices.of("reference", "cluster.num_references", self.num_references),
        ]
        return [role for role in roles if role.number]


class RoleDevices(NamedTuple):
    """What a role has for itself."""

    role: str
    number: int
    words: str
    """The settings that it follows from."""
    keys: tuple[str, ...]
    """Their names."""

    @classmethod
    def of(cls, role: str, key: str, number: int) -> RoleDevices:
        """As many as a setting says."""
        return cls(role, number, f"{key} {number}", (key,))


def host_and_port(address: str) -> tuple[str, int] | None:
    """What `host:port` or `ray://host:port` names; None for what is neither."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or "/" in host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        return None
    return host.strip("[]"), int(port)
