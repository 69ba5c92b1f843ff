"""A process group over processes that were started separately.

The sender of weights hosts a TCP store. Each delivery has its own `SyncStore` in it, to which
members post the phases they have completed, or the reason why they give up. Tensors are sent over a
`Link`, a process group (gloo for CPUs, NCCL for GPUs) that is kept from delivery to delivery as
long as its members are the same and still connected.

Every wait has a deadline, and an error names the members that were waited for.
"""

from __future__ import annotations

import hmac
import os
import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast

import orjson
import torch
import torch.distributed as dist
from torch import Tensor

from hone.weights.protocol import ReceiveSpec

__all__ = ["Link", "LinkError", "SyncStore", "join_store"]

POLL_S, MAX_POLL_S, POLL_GROWTH = 0.0001, 0.02, 1.1
"""Pause between two polls: the first, the longest, and the growth from one to the next. So a wait
lasts at most a tenth longer than needed."""

_GIVEN_UP = "given up"
_SIGNATURE_BYTES = 32


class LinkError(RuntimeError):
    """Members of a delivery cannot reach each other, are late, or give up. The text says who and
    why."""


def join_store(host: str, port: int, *, timeout_s: float) -> dist.TCPStore:
    """A connection to the sender's store. Raises LinkError when it does not answer in time."""
    try:
        return dist.TCPStore(host, port, timeout=timedelta(seconds=timeout_s))
    except dist.DistError as error:
        raise LinkError(
            f"the sender of weights does not answer at {host}:{port} within {timeout_s:g} s. "
            "Can this machine reach that address?"
        ) from error


class SyncStore:
    """The store in which the members of one delivery post the phases that they have completed.

    Any process that reaches the store's port can write into it. So messages are JSON, never
    pickles, and are signed with the run's key, which is never sent through the store. A message
    without the signature for its key in the store fails the delivery.

    `watch` is called now and then while this member waits; what it raises ends the wait.
    """

    def __init__(
        self,
        store: dist.Store,
        spec: ReceiveSpec,
        rank: int,
        watch: Callable[[], None] = lambda: None,
    ) -> None:
        self.spec = spec
        self.rank = rank
        self._store = dist.PrefixStore(f"delivery {spec.delivery}", store)
        self._deadline = time.monotonic() + spec.timeout_s
        self._watch = watch
        self._phases: list[str] = []

    @property
    def left_s(self) -> float:
        """Seconds until the deadline of the delivery."""
        return max(self._deadline - time.monotonic(), 0.0)

    def put(self, phase: str, value: Any = None) -> None:
        """Post that this member has completed `phase`, with a JSON value for the others; tuples
        arrive as lists."""
        self._phases.append(phase)
        with self._reaching():
            # The store takes bytes; its type stubs do not say so.
            self._store.set(key := _key(phase, self.rank), cast(str, self._signed(key, value)))

    def gather(self, phase: str, ranks: Sequence[int] | None = None) -> list[Any]:
        """Wait for the members (all, or `ranks`) to complete `phase`, and return their values."""
        ranks = range(len(self.spec.names)) if ranks is None else ranks
        keys = [_key(phase, rank) for rank in ranks]

        def missing() -> str:
            late = [r for r, key in zip(ranks, keys, strict=True) if not self._store.check([key])]
            return f"{', '.join(self.spec.names[rank] for rank in late)} had not {phase}"

        with self._reaching():
            self.wait(lambda: self._store.check(keys), missing)
            messages = self._store.multi_get(keys)
        return [self._verified(key, value) for key, value in zip(keys, messages, strict=True)]

    def give_up(self, reason: str) -> None:
        """Post for all members that this delivery fails. The first reason is kept."""
        signed = cast(str, self._signed(_GIVEN_UP, reason))
        with self._reaching():
            self._store.compare_set(_GIVEN_UP, "", signed)

    def _signed(self, key: str, value: Any) -> bytes:
        content = orjson.dumps(value)
        return self._signature(key, content) + content

    def _verified(self, key: str, message: bytes) -> Any:
        """The value of a message; LinkError where no member of this run has posted it there."""
        signature, content = message[:_SIGNATURE_BYTES], message[_SIGNATURE_BYTES:]
        if not hmac.compare_digest(signature, self._signature(key, content)):
            raise LinkError(
                f"what stands under '{key}' in the sender's store is not signed with the key of "
                "this run: another program has written there. Run hone in a network that others "
                "cannot reach."
            )
        return orjson.loads(content)

    def _signature(self, key: str, content: bytes) -> bytes:
        """The signature covers delivery and key too, so that no message can be replayed under
        another key."""
        place = f"{self.spec.delivery}/{key}\0".encode()
        return hmac.digest(self.spec.key, place + content, "sha256")

    def wait(self, is_done: Callable[[], bool], missing: Callable[[], str]) -> None:
        """Return once `is_done()`.

        Raises LinkError past the deadline (with the text of `missing()`), where a member gives up
        (with its reason), and where the store is gone.
        """
        pause, since_look = POLL_S, 0.0
        while not is_done():
            if since_look >= MAX_POLL_S:
                since_look = 0.0
                self._look()
                if not self.left_s:
                    raise LinkError(f"{missing()} after {self.spec.timeout_s:g} s")
            time.sleep(pause)
            since_look += pause
            pause = min(POLL_GROWTH * pause, MAX_POLL_S)

    def _look(self) -> None:
        """Raise LinkError where a member has given up, and whatever `watch` raises."""
        with self._reaching():
            reason = self._store.get(_GIVEN_UP) if self._store.check([_GIVEN_UP]) else None
        if reason is not None:
            raise LinkError(self._verified(_GIVEN_UP, reason))
        self._watch()

    def clear(self) -> None:
        """Delete what members have put; call it after all have read it."""
        for phase in self._phases:
            for rank in range(len(self.spec.names)):
                self._store.delete_key(_key(phase, rank))

    @contextmanager
    def _reaching(self) -> Generator[None]:
        try:
            yield
        except dist.DistNetworkError as error:
            raise LinkError(f"{self.spec.names[0]} is gone, and its store with it") from error


def _key(phase: str, rank: int) -> str:
    return f"{phase}/{rank}"


class Link:
    """One member of a process group for broadcasts from rank 0.

    With NCCL, calls run on the current stream, as in torch.distributed. Where members share a GPU,
    tensors are sent through host memory with gloo, since NCCL needs a GPU for each member.
    """

    def __init__(self, store: dist.Store, sync_store: SyncStore, device: torch.device) -> None:
        """Collective over the members of `sync_store`; use `meet`."""
        spec, rank = sync_store.spec, sync_store.rank
        self.generation = spec.delivery
        self.names = spec.names
        self.device = device
        """The device on which tensors must be to be sent or received."""
        size = len(spec.names)
        scoped = dist.PrefixStore(f"link {self.generation}", store)
        timeout = timedelta(seconds=spec.timeout_s)
        self._group: Any  # the stubs lack what all backends have
        if device.type == "cuda":
            self._group = _nccl_group(scoped, rank, size, timeout)
            return
        try:
            self._group = dist.ProcessGroupGloo(scoped, rank, size, timeout)
        except RuntimeError as error:
            raise LinkError(
                f"{spec.names[rank]} could not connect to the other members of "
                f"{', '.join(spec.names)}: {error}. Each announces the address of one network "
                "interface; GLOO_SOCKET_IFNAME, set where a process starts, names another."
            ) from error

    @classmethod
    def meet(
        cls, store: dist.Store, sync_store: SyncStore, device: torch.device, last: Link | None
    ) -> Link:
        """The link `last` where all members still have it, else a new one. Collective.

        Raises LinkError naming members that did not come, and RuntimeError where some members are
        on CPUs and some on GPUs, which no link connects.
        """
        names = sync_store.spec.names
        if last is not None and last.names != names:
            last.drop()  # some of its members are gone
            last = None
        gpu = str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else None
        sync_store.put("joined the link", (last and last.generation, device.type, gpu))
        notes = sync_store.gather("joined the link")
        if others := [
            n for n, (_, kind, _) in zip(names, notes, strict=True) if kind != device.type
        ]:
            raise RuntimeError(
                f"{names[sync_store.rank]} is on a {device.type} device, {', '.join(others)} not: "
                "weights go from CPU to CPU or from GPU to GPU"
            )
        if last is not None and all(generation == last.generation for generation, _, _ in notes):
            return last
        if last is not None:
            last.drop()
        gpus = [gpu for _, _, gpu in notes]
        if gpu is not None and len(set(gpus)) < len(gpus):
            device = torch.device("cpu")  # NCCL needs a GPU for each member
        return cls(store, sync_store, device)

    def broadcast(self, tensor: Tensor) -> dist.Work:
        """Start to send a contiguous tensor (rank 0), or to receive into it (all others)."""
        try:
            return self._group.broadcast(tensor, 0)
        except RuntimeError as error:
            raise LinkError(f"the link broke: {error}") from error

    def wait(self, work: dist.Work, sync_store: SyncStore) -> None:
        """Block the host until a broadcast has ended.

        Raises LinkError where a connection broke, and in the cases of `SyncStore.wait`.
        """
        # Polled, not `work.wait`: that notices no member that gives up and, with NCCL, none that
        # has died.
        sync_store.wait(work.is_completed, lambda: "some member had not received all weights")
        try:
            work.wait()
        except RuntimeError as error:
            raise LinkError(f"the link broke: {error}") from error

    def drop(self) -> None:
        """Close the connections, even during a broadcast, so that the other members' waits end."""
        if self._group is None:
            return
        self._group.abort()
        # gloo closes them when the group is destroyed, and that waits for running broadcasts up to
        # their timeout; so another thread does it. It is no daemon: the interpreter must not exit
        # in the middle of it.
        last_reference = [self._group]
        self._group = None
        threading.Thread(target=last_reference.clear, name="hone-link").start()


def _nccl_group(
    store: dist.Store, rank: int, size: int, timeout: timedelta
) -> dist.ProcessGroupNCCL:
    options: Any = dist.ProcessGroupNCCL.Options()
    options.group_name = "weights"
    options.global_ranks_in_group = list(range(size))
    # `Link.wait` keeps the deadlines. NCCL's watchdog would end this process, though only the link
    # has failed; so its timeout is longer, and its error handling is off.
    options._timeout = 4 * timeout
    before = os.environ.get("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = "0"  # read by the constructor
    try:
        return dist.ProcessGroupNCCL(store, rank, size, options)
    finally:
        if before is None:
            del os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"]
        else:
            os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] = before
