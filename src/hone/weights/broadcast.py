"""Verified weight sync from the training processes to engines in other processes.

All training processes iterate over `named_weights()` together, which gathers a few whole weights at
a time. Rank 0 fills buckets with them and broadcasts each bucket to every rank of every engine. Two
buckets exist at a time: while one is filled or unpacked, the other is in flight. Each engine rank
copies its shard of each weight into the tensors it samples with.

Verification has two halves. Each engine rank compares what it received with the sender's manifest
of what it read from the trainer; then `Engine.finish_sync` compares the tensors that the engine
samples with against a manifest of the rank's shards of what arrived. Each rank waits until the
first half has succeeded on all ranks, so that the ranks of one engine never hold different
versions. A failure on any rank repeats the delivery for all.

With LoRA the merged weights are sent. Sending only the adapters, which engines merged into a base
kept in host memory, did not pay: 0.53 s for 8B at rank 32, against 0.09 s for the merged weights
over NVLink (benchmarks/README.md).
"""

from __future__ import annotations

import secrets
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from time import monotonic, perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from hone.distributed.listening import LOOPBACK, host_store
from hone.distributed.mesh import Mesh
from hone.distributed.pool import Pending
from hone.models.manifest import build_manifest
from hone.types import EngineLostError, Trainer
from hone.weights.buckets import WeightBucket, WeightEntry, layout_of
from hone.weights.link import Link, LinkError, SyncStore
from hone.weights.protocol import (
    BUFFERS,
    RECEIVED,
    SENT,
    Receivers,
    ReceiveSpec,
    manifest_to_json,
)
from hone.weights.sync import NonFiniteWeightsError, SyncReport, check_finite

__all__ = ["BroadcastSync"]

SETTLE_S = 5.0
"""How long the sender waits for the engines' errors after a delivery has failed."""
AGAIN = "push again, and engines are sent the new names and shapes"


class BroadcastSync:
    """Sends the weights of a trainer's processes to remote engines."""

    def __init__(
        self,
        trainer: Trainer,
        mesh: Mesh,
        receivers: Receivers | None,
        *,
        bucket_bytes: int,
        timeout_s: float,
        host: str = LOOPBACK,
    ) -> None:
        """Every training process makes one; only rank 0 gets `receivers`.

        `timeout_s` bounds a whole delivery. `host` is the address of this machine for engines.
        """
        assert mesh.is_first == (receivers is not None), f"{mesh.world.rank=}"
        self.trainer = trainer
        self.mesh = mesh
        self.receivers = receivers
        self.bucket_bytes = bucket_bytes
        self.timeout_s = timeout_s
        self.host = host
        self._entries: Sequence[WeightEntry] | None = None
        """The weights that engines must hold, in the order in which they are sent."""
        self._store: dist.TCPStore | None = None
        self._link: Link | None = None
        self._delivery = 0
        self._key = secrets.token_bytes(32)

    @torch.no_grad()
    def push(self, version: int) -> SyncReport:
        """Make all engines sample with the trainer's weights from now on, as `version`.

        Collective over the training processes: all get the same report, or raise.

        Raises NonFiniteWeightsError; StaleWeightsError where weights differ from the rounded master
        weights; EngineLostError where an engine is gone or does not answer; and RuntimeError naming
        engine and tensors where weights did not arrive as they were sent. After an error no engine
        samples until a later push succeeds; a new push may follow at once.
        """
        if self._entries is None:
            # One more pass over the weights: engines must know the layout before the data comes.
            self._entries = layout_of(self.trainer.named_weights())
        weights = iter(self.trainer.named_weights())
        if self.receivers is None:
            _exhaust(weights)
            return self._agree(None)
        try:
            report = self._deliver(version, self.receivers, self._entries, weights)
        except Exception as error:
            _exhaust(weights)  # the other processes still take part in the same iteration
            self._entries = None  # a changed layout may be the cause
            self.mesh.gather(_portable(error))
            raise
        return self._agree(report)

    def close(self) -> None:
        """Disconnect from the engines."""
        self._drop_link()
        self._store = None

    def _agree(self, outcome: SyncReport | Exception | None) -> SyncReport:
        """The outcome on rank 0, returned or raised by every training process."""
        result = self.mesh.gather(outcome)[0]
        if isinstance(result, Exception):
            self._entries = None  # a changed layout may be the cause
            raise result
        return result

    def _deliver(
        self,
        version: int,
        receivers: Receivers,
        entries: Sequence[WeightEntry],
        weights: Iterable[tuple[str, Tensor]],
    ) -> SyncReport:
        start = perf_counter()
        receivers.begin_sync()
        if self._store is None:
            self._store = host_store(self.host, timeout_s=self.timeout_s)
        self._delivery += 1
        ranks = receivers.engine_ranks
        spec = ReceiveSpec(
            version=version,
            delivery=self._delivery,
            host=self.host,
            port=self._store.port,
            names=_member_names(ranks),
            entries=tuple(entries),
            bucket_bytes=self.bucket_bytes,
            timeout_s=self.timeout_s,
            key=self._key,
        )
        engines = _Answers(dict(zip(ranks, receivers.start_receive(spec), strict=True)))
        sync_store = SyncStore(self._store, spec, 0, watch=engines.look)
        try:
            buckets = spec.buckets()
            self._link = Link.meet(self._store, sync_store, self.mesh.device, self._link)
            sending = _send(weights, buckets, self._link, sync_store, self.mesh.device)
            sync_store.put(SENT, manifest_to_json(build_manifest(sending, version)))
            sync_store.put(RECEIVED)
            sync_store.gather(RECEIVED)
            late = f"it had not confirmed its weights after {self.timeout_s:g} s"
            if failure := engines.failure(sync_store.left_s, late):
                raise failure
        except Exception as error:
            sync_store.give_up(f"{spec.names[0]}: {error}")
            self._drop_link()
            cause = engines.failure(SETTLE_S, f"no answer to a delivery that failed: {error}")
            if isinstance(error, LinkError) and not isinstance(cause, LinkError | None):
                raise cause from error
            raise
        sync_store.clear()
        receivers.finish_sync(version)
        return SyncReport(
            seconds=perf_counter() - start,
            bytes=sum(bucket.num_bytes for bucket in buckets),
        )

    def _drop_link(self) -> None:
        if self._link is not None:
            self._link.drop()
            self._link = None


def _member_names(ranks: Mapping[str, int]) -> tuple[str, ...]:
    """Names of the members of a link, by rank."""
    names = ["the trainer"]
    for engine, num_ranks in ranks.items():
        rank_names = [f"{engine} rank {rank}" for rank in range(num_ranks)]
        names += rank_names if num_ranks > 1 else [engine]
    return tuple(names)


def _exhaust(weights: Iterable[tuple[str, Tensor]]) -> None:
    for _ in weights:
        pass


def _portable(error: Exception) -> Exception:
    """The error for other processes: a RuntimeError in place of classes that might not pickle."""
    picklable = (EngineLostError, NonFiniteWeightsError)
    return error if isinstance(error, picklable) else RuntimeError(str(error))


def _send(
    weights: Iterable[tuple[str, Tensor]],
    buckets: Sequence[WeightBucket],
    link: Link,
    sync_store: SyncStore,
    device: torch.device,
) -> Iterator[tuple[str, Tensor]]:
    """Yield each weight once it is copied into its bucket; full buckets are broadcast meanwhile.

    Raises NonFiniteWeightsError before a bucket with such weights is sent, and RuntimeError where
    weights differ from the planned buckets.
    """
    weights = iter(weights)
    tied = {name for bucket in buckets for entry in bucket.entries for name in entry.names[1:]}
    in_flight: deque[tuple[dist.Work, Tensor]] = deque()
    for bucket in buckets:
        if len(in_flight) == BUFFERS:
            link.wait(in_flight[0][0], sync_store)
            in_flight.popleft()
        buffer = bucket.new_buffer(device)
        filled: dict[str, Tensor] = {}
        for entry, view in zip(bucket.entries, bucket.views(buffer), strict=True):
            for name, tensor in weights:
                if name in tied:
                    yield name, tensor
                    continue
                _require_next(entry, name, tensor)
                filled[name] = view.copy_(tensor)
                yield name, tensor
                break
            else:
                raise RuntimeError(f"The trainer no longer exports {entry.names[0]}; {AGAIN}")
        check_finite(filled, {name: view.dtype for name, view in filled.items()})
        buffer = buffer.to(link.device)
        in_flight.append((link.broadcast(buffer), buffer))
    for name, tensor in weights:
        if name not in tied:
            _require_next(None, name, tensor)
        yield name, tensor
    for work, _ in in_flight:
        link.wait(work, sync_store)


def _require_next(entry: WeightEntry | None, name: str, tensor: Tensor) -> None:
    """Raise RuntimeError unless `tensor` is the next entry."""
    if entry is None or entry.names[0] != name:
        expected = "nothing more" if entry is None else entry.names[0]
        raise RuntimeError(f"The trainer exports {name} where it had {expected} before; {AGAIN}")
    if (tuple(tensor.shape), tensor.dtype) != (entry.shape, entry.dtype):
        raise RuntimeError(
            f"{name} was {list(entry.shape)} {entry.dtype} before and is {list(tensor.shape)} "
            f"{tensor.dtype} now; {AGAIN}"
        )


class _Answers:
    """The engines' answers to one delivery."""

    def __init__(self, pending: Mapping[str, Pending]) -> None:
        self._pending = pending

    def look(self) -> None:
        """Raise LinkError where an engine has failed by now."""
        for engine, pending in self._pending.items():
            try:
                pending.result(0.0)
            except TimeoutError:
                continue
            except (RuntimeError, ValueError, OSError) as error:
                raise LinkError(f"{engine}: {error}") from error

    def failure(self, timeout_s: float, late: str) -> Exception | None:
        """Wait until all have answered, and return the failure that is nearest to the cause.

        A lost engine comes before other errors, and these before a broken link, which is mostly a
        consequence. `late` is the cause given for an engine that does not answer.
        """
        deadline = monotonic() + timeout_s
        failures: list[Exception] = []
        for engine, pending in self._pending.items():
            try:
                pending.result(max(deadline - monotonic(), 0.0))
            except TimeoutError:
                failures.append(EngineLostError(engine, late))
            except (EngineLostError, LinkError) as error:
                failures.append(error)
            except NonFiniteWeightsError as error:
                failures.append(NonFiniteWeightsError(f"{engine}: {error}"))
            except (RuntimeError, ValueError, OSError) as error:
                failures.append(RuntimeError(f"{engine}: {error}"))
        failures.sort(  # 0: lost engine, 1: other error, 2: broken link
            key=lambda e: 2 * isinstance(e, LinkError) or not isinstance(e, EngineLostError)
        )
        return failures[0] if failures else None
