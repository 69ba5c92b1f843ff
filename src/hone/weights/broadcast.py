"""Weights from training processes to engines in processes of their own, proven.

All training processes walk through `named_weights()` together, which makes weights whole some at a
time. The first one fills buckets with them and broadcasts these to every rank of every engine, two
at a time: one is filled, or taken apart, while the other is on its way. An engine's rank copies its
part of each weight into the tensors it samples with.

Of an adapted model the frozen base travels once, and then adapters alone, which engines merge
themselves (`hone.weights.adapted`).

The proof has two halves. What arrived is compared with the sender's manifest of what it read from
the trainer; what the engine samples with is compared, by `Engine.finish_sync`, with a manifest of
the rank's parts of what arrived. Where the rank has merged these, they are compared before with
what the sender merges, part by part. Each rank waits until the first half has succeeded everywhere,
so that the ranks of one engine never part ways. After a failure anywhere the delivery is repeated
for all.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from time import monotonic, perf_counter
from uuid import uuid4

import torch
import torch.distributed as dist
from torch import Tensor

from hone.distributed.mesh import Mesh
from hone.models.adapters import AdaptedWeights, merge_stored
from hone.models.manifest import build_manifest
from hone.types import (
    EngineLostError,
    Trainer,
    WeightManifest,
)
from hone.weights.adapted import (
    AdapterSpec,
    Holding,
    MergeDiffersError,
    Way,
    arithmetic_of,
    choose_way,
    described,
)
from hone.weights.buckets import Bucket, Entry, layout_of
from hone.weights.link import Board, Link, LinkError, host_store
from hone.weights.protocol import (
    BUFFERS,
    CHOSE,
    HOLDS,
    RECEIVED,
    SENT,
    Pending,
    Proof,
    Receivers,
    ReceiveSpec,
    board_of,
)
from hone.weights.sync import (
    NonFiniteWeightsError,
    SyncReport,
    check_finite,
)

__all__ = ["BroadcastSync"]

_log = logging.getLogger(__name__)

SETTLE_S = 5.0
"""How long engines have to say how they fared, after a delivery has failed."""
LOOK_S = 0.2
"""Between two looks at whether an engine has failed."""

AGAIN = "push again, and engines are told of it"


class BroadcastSync:
    """The way of weights from the processes of a trainer to engines elsewhere."""

    def __init__(
        self,
        trainer: Trainer,
        mesh: Mesh,
        receivers: Receivers | None,
        *,
        bucket_bytes: int,
        timeout_s: float,
        host: str = "127.0.0.1",
        adapted: AdaptedWeights | None = None,
    ) -> None:
        """Every training process makes one; `receivers` are given to the first alone.

        `timeout_s` is for a whole delivery. `host` is how engines reach this machine. `adapted` are
        the trainer's weights as it stores them, where it trains adapters.
        """
        if mesh.is_first != (receivers is not None):
            raise ValueError(
                "the first training process, and no other, gets receivers: this one has rank "
                f"{mesh.world.rank} and {'none' if receivers is None else 'some'}"
            )
        self.trainer = trainer
        self.mesh = mesh
        self.receivers = receivers
        self.bucket_bytes = bucket_bytes
        self.timeout_s = timeout_s
        self.host = host
        self.adapted = adapted
        self._base = uuid4().hex
        self._layout: tuple[Sequence[Entry], AdapterSpec | None] | None = None
        self._store: dist.TCPStore | None = None
        self._link: Link | None = None
        self._delivery = 0
        self._has_warned = False

    @torch.no_grad()
    def push(self, version: int) -> SyncReport:
        """Make all engines sample with the trainer's weights from now on, as `version`.

        Collective over the training processes: all get the same report, or raise.

        Raises NonFiniteWeightsError, StaleWeightsError where they are not what the masters round
        to, EngineLostError where an engine is gone or silent, and RuntimeError naming engine and
        tensors where weights did not arrive as they were sent. After an error no engine samples
        until a later push succeeds; that one may come at once.
        """
        if self._layout is None:
            # Walked through once more, since engines must know what comes before it does.
            self._layout = self._lay_out()
        walk = self.trainer.named_weights if self.adapted is None else self.adapted.named
        weights = iter(walk())
        if self.receivers is None:
            _exhaust(weights)
            return self._agree(None)
        try:
            report = self._deliver(version, self.receivers, self._layout, weights)
        except Exception as error:
            _exhaust(weights)  # the other processes are on the same walk
            self._layout = None  # it may be why
            self.mesh.gather(_portable(error))
            raise
        return self._agree(report)

    def close(self) -> None:
        """Leave the link."""
        self._drop_link()
        self._store = None

    def _lay_out(self) -> tuple[Sequence[Entry], AdapterSpec | None]:
        """What engines must sample with, and what the trainer stores where that is not the same."""
        entries = layout_of(self.trainer.named_weights())
        if self.adapted is None:
            return entries, None
        return entries, AdapterSpec(
            base=self._base,
            entries=tuple(layout_of(self.adapted.named())),
            trained=self.adapted.trained,
            projections=self.adapted.projections,
        )

    def _agree(self, outcome: SyncReport | Exception | None) -> SyncReport:
        """What the first process, alone, knows came of it."""
        told = self.mesh.gather(outcome)[0]
        if isinstance(told, Exception):
            self._layout = None  # it may be why
            raise told
        return told

    def _deliver(
        self,
        version: int,
        receivers: Receivers,
        layout: tuple[Sequence[Entry], AdapterSpec | None],
        weights: Iterable[tuple[str, Tensor]],
    ) -> SyncReport:
        start = perf_counter()
        receivers.begin_sync()
        if self._store is None:
            self._store = host_store(self.host, timeout_s=self.timeout_s)
        self._delivery += 1
        ranks = receivers.engine_ranks
        entries, adapters = layout
        spec = ReceiveSpec(
            version=version,
            delivery=self._delivery,
            host=self.host,
            port=self._store.port,
            names=_member_names(ranks),
            entries=tuple(entries),
            adapters=adapters,
            bucket_bytes=self.bucket_bytes,
            timeout_s=self.timeout_s,
        )
        engines = _Answers(dict(zip(ranks, receivers.start_receive(spec), strict=True)))
        board = board_of(self._store, spec, rank=0, watch=engines.look)
        try:
            way, holdings = self._choose(spec, board)
            buckets = spec.buckets(way)
            self._link = Link.meet(self._store, board, self.mesh.device, self._link)
            sender = _Sender(self._link, board, buckets, self.mesh.device)
            board.put(SENT, _send(sender, spec, way, holdings, weights))
            board.put(RECEIVED)
            board.gather(RECEIVED)
            late = f"it had not taken over its weights after {self.timeout_s:g} s"
            if failure := engines.failure(board.left_s, late):
                raise failure
        except Exception as error:
            board.give_up(f"{spec.names[0]}: {error}")
            self._drop_link()
            cause = engines.failure(SETTLE_S, f"no answer to a delivery that failed: {error}")
            if isinstance(error, LinkError) and not isinstance(cause, LinkError | None):
                raise cause from error
            raise
        board.clear()
        receivers.finish_sync(version)
        return SyncReport(
            seconds=perf_counter() - start,
            bytes=sum(bucket.num_bytes for bucket in buckets),
            num_tensors=sum(len(entry.names) for entry in entries),
            aliased=False,
        )

    def _choose(self, spec: ReceiveSpec, board: Board) -> tuple[Way, list[Holding]]:
        """What this delivery consists of, and what each rank of the engines has said."""
        if spec.adapters is None:
            return Way.MERGED, []
        holdings: list[Holding] = board.gather(HOLDS, range(1, len(spec.names)))
        own = arithmetic_of(self.mesh.device)
        way = choose_way(spec.adapters, own, holdings)
        board.put(CHOSE, way)
        if way is Way.MERGED and not self._has_warned:
            self._has_warned = True
            reasons = [
                f"{name}: {holding.objection or f'{holding.arithmetic}, the trainer has {own}'}"
                for name, holding in zip(spec.names[1:], holdings, strict=True)
                if holding.objection or holding.arithmetic != own
            ]
            _log.warning(
                "merged weights are sent at each sync, not adapters alone, since engines cannot "
                "merge these to the trainer's bits. %s",
                "; ".join(reasons),
            )
        return way, holdings

    def _drop_link(self) -> None:
        if self._link is not None:
            self._link.drop()
            self._link = None


def _member_names(ranks: Mapping[str, int]) -> tuple[str, ...]:
    """Of the members of a link, by rank."""
    names = ["the trainer"]
    for engine, num_ranks in ranks.items():
        several = [f"{engine} rank {rank}" for rank in range(num_ranks)]
        names += several if num_ranks > 1 else [engine]
    return tuple(names)


def _exhaust(weights: Iterable[tuple[str, Tensor]]) -> None:
    for _ in weights:
        pass


def _portable(error: Exception) -> Exception:
    """The same for other processes; of any class it might not pickle."""
    kinds = (EngineLostError, MergeDiffersError, NonFiniteWeightsError)
    return error if isinstance(error, kinds) else RuntimeError(str(error))


def _send(
    sender: _Sender,
    spec: ReceiveSpec,
    way: Way,
    holdings: Sequence[Holding],
    weights: Iterable[tuple[str, Tensor]],
) -> Proof:
    """Send what the walk gives, and say what it was."""
    adapters = spec.adapters
    if adapters is None or way is Way.MERGED:
        if adapters is not None:
            weights = merge_stored(adapters.projections, weights)
        return Proof(build_manifest(sender.send(weights), spec.version), {}, {})
    stays = adapters.staying(way)
    passing = described(adapters, stays, holdings, sender.send(weights, stays))
    manifest = build_manifest(passing, spec.version)
    come = {name for entry in adapters.travelling(way) for name in entry.names}
    sent, merged, frozen = {}, {}, {}
    for name, record in manifest.tensors.items():
        kind = sent if name in come else frozen if name in stays else merged
        kind[name] = record
    return Proof(WeightManifest(manifest.version, sent), merged, frozen)


class _Sender:
    """Fills buckets in the order of a walk, and sends them."""

    def __init__(
        self, link: Link, board: Board, buckets: Sequence[Bucket], device: torch.device
    ) -> None:
        self._link = link
        self._board = board
        self._buckets = buckets
        self._device = device
        self._in_flight: deque[tuple[dist.Work, Tensor]] = deque()

    def send(
        self, weights: Iterable[tuple[str, Tensor]], stays: frozenset[str] = frozenset()
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield each weight after it has been put into its bucket, unless it is one that `stays`;
        full buckets are on their way.

        Raises NonFiniteWeightsError before a bucket with such weights is sent, and RuntimeError
        where weights are not those of the buckets.
        """
        slots = self._slots()
        further_names = {n for b in self._buckets for e in b.entries for n in e.names[1:]}
        for name, tensor in weights:
            if name not in further_names and name not in stays:
                entry, view = next(slots, (None, None))
                _require_next(entry, name, tensor)
                assert view is not None
                view.copy_(tensor)
            yield name, tensor
        if (left := next(slots, None)) is not None:
            raise RuntimeError(f"The trainer no longer exports {left[0].names[0]}; {AGAIN}")

    def _slots(self) -> Iterator[tuple[Entry, Tensor]]:
        """Where each entry goes. A bucket leaves when the entry behind it is asked for."""
        for bucket in self._buckets:
            while len(self._in_flight) >= BUFFERS:
                self._wait_for_oldest()
            buffer = bucket.new_buffer(self._device)
            views = bucket.views(buffer)
            yield from zip(bucket.entries, views, strict=True)
            named = {e.names[0]: view for e, view in zip(bucket.entries, views, strict=True)}
            check_finite(named, {name: view.dtype for name, view in named.items()})
            buffer = buffer.to(self._link.device)
            self._in_flight.append((self._link.broadcast(buffer), buffer))
        while self._in_flight:
            self._wait_for_oldest()

    def _wait_for_oldest(self) -> None:
        work, _ = self._in_flight[0]
        self._link.wait(work, self._board)
        self._in_flight.popleft()


def _require_next(entry: Entry | None, name: str, tensor: Tensor) -> None:
    """Raise RuntimeError unless `tensor` is what comes next."""
    if entry is None or entry.names[0] != name:
        wanted = "nothing more" if entry is None else entry.names[0]
        raise RuntimeError(f"The trainer exports {name} where it had {wanted} before; {AGAIN}")
    if (tuple(tensor.shape), tensor.dtype) != (entry.shape, entry.dtype):
        raise RuntimeError(
            f"{name} was {list(entry.shape)} {entry.dtype} before and is {list(tensor.shape)} "
            f"{tensor.dtype} now; {AGAIN}"
        )


class _Answers:
    """What engines say of one delivery, by engine."""

    def __init__(self, pending: Mapping[str, Pending]) -> None:
        self._pending = pending
        self._next_look = monotonic() + LOOK_S

    def look(self) -> None:
        """Raise LinkError where an engine has failed by now. Cheap to call often."""
        if monotonic() < self._next_look:
            return
        self._next_look = monotonic() + LOOK_S
        for engine, pending in self._pending.items():
            try:
                pending.result(0.0)
            except TimeoutError:
                continue
            except (RuntimeError, ValueError, OSError) as error:
                raise LinkError(f"{engine}: {error}") from error

    def failure(self, timeout_s: float, late: str) -> Exception | None:
        """Wait until all have answered, and return the failure that is nearest to the cause.

        That is an engine's death before what others found wrong, before a link that broke. `late`
        is why an engine is taken to be dead that does not answer.
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
            except (MergeDiffersError, NonFiniteWeightsError) as error:
                failures.append(type(error)(f"{engine}: {error}"))
            except (RuntimeError, ValueError, OSError) as error:
                failures.append(RuntimeError(f"{engine}: {error}"))
        failures.sort(key=_distance)
        return failures[0] if failures else None


def _distance(error: Exception) -> int:
    """From the cause."""
    return 0 if isinstance(error, EngineLostError) else 2 if isinstance(error, LinkError) else 1
