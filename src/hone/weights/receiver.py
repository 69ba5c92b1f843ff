"""Taking weights in the process of an engine, or of one of its ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import nullcontext
from time import perf_counter

import torch
import torch.distributed as dist
from torch import Tensor

from hone.models.manifest import ManifestBuilder, build_manifest, compare
from hone.types import Engine, TensorRecord, WeightManifest
from hone.weights.adapted import Cut, Holding, KeptBase, MergeDiffersError, Way, lacks_room
from hone.weights.buckets import Bucket, Entry
from hone.weights.link import Board, Link, LinkError, join_store
from hone.weights.protocol import (
    BUFFERS,
    CHOSE,
    HOLDS,
    RECEIVED,
    SENT,
    Proof,
    Received,
    ReceiveSpec,
    board_of,
)
from hone.weights.sync import GROUP_BYTES, Delivery, in_groups, match_layout

__all__ = ["WeightReceiver"]


class WeightReceiver:
    """The engine's end of `BroadcastSync`."""

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self.engine = engine
        self.device = device
        self._place: tuple[str, int] | None = None
        self._store: dist.TCPStore | None = None
        self._link: Link | None = None
        self._base: KeptBase | None = None
        self._memory: dict[str, Tensor] = {}
        """Of the last base, trusted or not: page-locked memory would never come back."""
        self._objection: str | None = None
        """Why this rank no longer merges."""

    @torch.no_grad()
    def receive(self, spec: ReceiveSpec, rank: int) -> Received:
        """Take one delivery; the engine then samples with it, as `spec.version`.

        `rank` counts all ranks of all engines. Raises RuntimeError naming tensors that the engine
        cannot take, that did not arrive as they were sent, or that it does not hold, of those that
        it has merged MergeDiffersError;
        NonFiniteWeightsError for values that are too large for its format; and LinkError where
        the sender, or another engine, is gone or gives up. After an error the engine refuses to
        sample until a later delivery succeeds.
        """
        start = perf_counter()
        on_device = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        with on_device:
            board = board_of(self._join(spec), spec, rank=1 + rank)
            try:
                self.engine.begin_sync()
                delivery = Delivery(self.engine)
                manifest = self._take(spec, board, delivery)
            except Exception as error:
                if not isinstance(error, LinkError):
                    self._base = None  # it may be why
                    board.give_up(f"{spec.names[board.rank]}: {error}")
                self.close()
                raise
            kept, self._base = self._base, None
            self.engine.finish_sync(manifest)  # an engine that is not as it should be keeps nothing
            if kept is not None:
                self._base, kept.records = kept, manifest.tensors
        return Received(
            version=spec.version, bytes=delivery.num_bytes, seconds=perf_counter() - start
        )

    def close(self) -> None:
        """Leave the link."""
        if self._link is not None:
            self._link.drop()
        self._link = self._store = self._place = None

    def _join(self, spec: ReceiveSpec) -> dist.TCPStore:
        """The sender's store."""
        place = spec.host, spec.port
        if self._store is None or self._place != place:
            self.close()
            self._store = join_store(spec.host, spec.port, timeout_s=spec.timeout_s)
            self._place = place
        return self._store

    def _take(self, spec: ReceiveSpec, board: Board, delivery: Delivery) -> WeightManifest:
        """The manifest that the engine's own tensors must have."""
        if diff := match_layout(self._part_shapes(spec.entries), delivery.targets):
            raise RuntimeError(f"it cannot take version {spec.version}: {diff.describe()}")
        way, cuts = self._way(spec, board)
        assert self._store is not None
        self._link = Link.meet(self._store, board, self.device, self._link)
        arriving = ManifestBuilder()
        merged: dict[str, TensorRecord] = {}
        base = self._base
        coming = self._arriving(spec, way, self._link, board, arriving)
        if way is Way.MERGED:
            # The sender has looked at them.
            own = delivery.sources(coming, are_finite=True)
            own = _unlike(own, spec.entries, delivery)
        else:
            assert spec.adapters is not None
            if way is Way.BASE:
                self._base = None
                layout = KeptBase.layout(spec.adapters, self.engine.shard)
                base = KeptBase.allocate(spec.adapters.base, layout, self._memory, self.device)
                self._memory = base.tensors
            assert base is not None
            parts = base.merged(spec.adapters, way, self.engine.shard, coming)
            parts = _recorded(parts, spec.adapters.merged_names, merged)
            own = delivery.sources(parts, are_parts=True)
        manifest = build_manifest(own, spec.version, dtypes=delivery.dtypes)
        arrived = arriving.finish(spec.version)
        if way is Way.MERGED:
            manifest = WeightManifest(spec.version, {**arrived.tensors, **manifest.tensors})
        proof: Proof = board.gather(SENT, [0])[0]
        if proof.sent.version != spec.version:
            raise RuntimeError(
                f"version {spec.version} was announced, and {proof.sent.version} came"
            )
        if diff := compare(proof.sent, arrived):
            raise RuntimeError(
                f"version {spec.version} did not arrive as it was sent: {diff.describe()}"
            )
        if base is not None and way is not Way.MERGED:
            self._require_same(way, base, proof, cuts, merged)
        board.put(RECEIVED)
        board.gather(RECEIVED)
        if way is Way.ADAPTERS:
            assert base is not None
            return WeightManifest(spec.version, {**base.records, **manifest.tensors})
        if way is Way.BASE:
            assert base is not None
            self._base, base.arrived = base, arrived.tensors
        return manifest

    def _way(self, spec: ReceiveSpec, board: Board) -> tuple[Way, Mapping[str, Cut]]:
        """What comes, which the sender chooses once all ranks have said what they hold, and this
        rank's parts of what is merged."""
        if spec.adapters is None:
            return Way.MERGED, {}
        shard, objection = self.engine.shard, self._objection
        if objection is None and self._base is None:
            objection = lacks_room(KeptBase.layout(spec.adapters, shard), self._memory)
        holding = Holding.of(self._base, spec.adapters, shard, self.device, objection)
        board.put(HOLDS, holding)
        return board.gather(CHOSE, [0])[0], holding.cuts

    def _require_same(
        self,
        way: Way,
        base: KeptBase,
        proof: Proof,
        cuts: Mapping[str, Cut],
        merged: Mapping[str, TensorRecord],
    ) -> None:
        """Raise MergeDiffersError unless this rank has merged what the sender has, and the sender
        has frozen what it had when this rank got it."""
        wanted = {weight: proof.merged[cut.name(weight)] for weight, cut in cuts.items()}
        frozen = {name: base.arrived[name] for name in proof.frozen}
        version = proof.sent.version
        expected = WeightManifest(version, {**wanted, **proof.frozen})
        if diff := compare(expected, WeightManifest(version, {**merged, **frozen})):
            if way is Way.BASE:
                self._objection = "it has merged to other bits than the trainer"
            raise MergeDiffersError(
                f"what it has merged, or kept, for version {version} is not what the trainer "
                f"has: {diff.describe()}"
            )

    def _part_shapes(self, entries: Iterable[Entry]) -> dict[str, torch.Size]:
        """Of what this rank should hold."""
        return {
            name: self.engine.shard(name, torch.empty(entry.shape, device="meta")).shape
            for entry in entries
            for name in entry.names
        }

    def _arriving(
        self, spec: ReceiveSpec, way: Way, link: Link, board: Board, arrived: ManifestBuilder
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights as they come, and add them to what has `arrived`."""
        waiting = deque(spec.buckets(way))
        coming: deque[tuple[Bucket, Tensor, dist.Work]] = deque()
        while waiting or coming:
            while waiting and len(coming) < BUFFERS:
                bucket = waiting.popleft()
                buffer = bucket.new_buffer(link.device)
                coming.append((bucket, buffer, link.broadcast(buffer)))
            bucket, buffer, work = coming[0]
            link.wait(work, board)
            coming.popleft()
            named = dict(bucket.named_views(buffer.to(self.device)))
            del buffer
            for name, tensor in named.items():
                arrived.add(name, tensor)
            arrived.flush()
            yield from named.items()
            del named  # before there is memory for another bucket


def _unlike(
    parts: Iterable[tuple[str, Tensor]], entries: Iterable[Entry], delivery: Delivery
) -> Iterator[tuple[str, Tensor]]:
    """Parts that are not, bit for bit, the whole tensors that arrived, of which there are records
    already."""
    shapes = {name: entry.shape for entry in entries for name in entry.names}
    for name, part in parts:
        if tuple(part.shape) != shapes[name] or not delivery.is_as_it_came(name, part):
            yield name, part


def _recorded(
    named: Iterable[tuple[str, Tensor]],
    wanted: frozenset[str],
    records: dict[str, TensorRecord],
) -> Iterator[tuple[str, Tensor]]:
    """Yield tensors, and write down what the wanted ones are."""
    for group in in_groups(named, GROUP_BYTES):
        chosen = ((name, tensor) for name, tensor in group.items() if name in wanted)
        records |= build_manifest(chosen, 0).tensors
        yield from group.items()
