"""The receiving side of a weight sync, in the process of an engine or of one of its ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch import Tensor

from hone.models.manifest import ManifestBuilder, build_manifest, compare, match_layout
from hone.types import Engine, WeightManifest
from hone.weights.buckets import WeightBucket, WeightEntry
from hone.weights.link import Link, LinkError, SyncStore, join_store
from hone.weights.protocol import BUFFERS, RECEIVED, SENT, ReceiveSpec, manifest_from_json
from hone.weights.sync import Delivery

__all__ = ["WeightReceiver"]


class WeightReceiver:
    """The engine's end of `BroadcastSync`."""

    def __init__(self, engine: Engine, device: torch.device) -> None:
        self.engine = engine
        self.device = device
        self._place: tuple[str, int] | None = None
        self._store: dist.TCPStore | None = None
        self._link: Link | None = None

    @torch.no_grad()
    def receive(self, spec: ReceiveSpec, rank: int) -> None:
        """Receive one delivery; the engine then samples with it, as `spec.version`.

        `rank` counts the ranks of all engines. Raises RuntimeError naming tensors that do not fit
        the engine, did not arrive as they were sent, or differ from what the engine holds;
        NonFiniteWeightsError for values that overflow the engine's dtype; and LinkError where the
        sender or another engine is gone or gives up. After an error the engine refuses to sample
        until a later delivery succeeds.
        """
        on_device = torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()
        with on_device:
            sync_store = SyncStore(self._join(spec), spec, 1 + rank)
            try:
                self.engine.begin_sync()
                manifest = self._take(spec, sync_store, Delivery(self.engine))
            except Exception as error:
                if not isinstance(error, LinkError):
                    sync_store.give_up(f"{spec.names[sync_store.rank]}: {error}")
                self.close()
                raise
            self.engine.finish_sync(manifest)

    def close(self) -> None:
        """Disconnect from the sender."""
        if self._link is not None:
            self._link.drop()
        self._link = self._store = self._place = None

    def _join(self, spec: ReceiveSpec) -> dist.TCPStore:
        """The sender's store; connects where it is a new one."""
        place = spec.host, spec.port
        if self._store is None or self._place != place:
            self.close()
            self._store = join_store(spec.host, spec.port, timeout_s=spec.timeout_s)
            self._place = place
        return self._store

    def _take(self, spec: ReceiveSpec, sync_store: SyncStore, delivery: Delivery) -> WeightManifest:
        """Receive all weights into the engine; the manifest that its tensors must have."""
        if diff := match_layout(self._shard_shapes(spec.entries), delivery.targets):
            raise RuntimeError(f"it cannot take version {spec.version}: {diff.describe()}")
        assert self._store is not None
        self._link = Link.meet(self._store, sync_store, self.device, self._link)
        arriving = ManifestBuilder()
        coming = self._arriving(spec, self._link, sync_store, arriving)
        # The sender has checked that they are finite.
        shards = delivery.sources(coming, are_finite=True)
        changed = _changed_shards(shards, spec.entries, delivery)
        manifest = build_manifest(changed, spec.version, dtypes=delivery.dtypes)
        arrived = arriving.finish(spec.version)
        sent = manifest_from_json(sync_store.gather(SENT, [0])[0])
        if sent.version != spec.version:
            raise RuntimeError(f"version {spec.version} was announced, and {sent.version} came")
        if diff := compare(sent, arrived):
            raise RuntimeError(
                f"version {spec.version} did not arrive as it was sent: {diff.describe()}"
            )
        sync_store.put(RECEIVED)
        sync_store.gather(RECEIVED)
        return WeightManifest(spec.version, {**arrived.tensors, **manifest.tensors})

    def _shard_shapes(self, entries: Iterable[WeightEntry]) -> dict[str, torch.Size]:
        """The shape of this rank's shard of each weight."""
        return {
            name: self.engine.shard(name, torch.empty(entry.shape, device="meta")).shape
            for entry in entries
            for name in entry.names
        }

    def _arriving(
        self, spec: ReceiveSpec, link: Link, sync_store: SyncStore, arrived: ManifestBuilder
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights as they arrive, and add them to the manifest `arrived`."""
        waiting = deque(spec.buckets())
        coming: deque[tuple[WeightBucket, Tensor, dist.Work]] = deque()
        while waiting or coming:
            while waiting and len(coming) < BUFFERS:
                bucket = waiting.popleft()
                buffer = bucket.new_buffer(link.device)
                coming.append((bucket, buffer, link.broadcast(buffer)))
            bucket, buffer, work = coming[0]
            link.wait(work, sync_store)
            coming.popleft()
            named = dict(bucket.named_views(buffer.to(self.device)))
            del buffer
            for name, tensor in named.items():
                arrived.add(name, tensor)
            arrived.flush()
            yield from named.items()
            del named  # frees this bucket before the next one is allocated


def _changed_shards(
    shards: Iterable[tuple[str, Tensor]], entries: Iterable[WeightEntry], delivery: Delivery
) -> Iterator[tuple[str, Tensor]]:
    """Shards whose shape or dtype differs from the whole tensor that arrived. All others equal it
    bit for bit, and its record in the manifest holds for them."""
    arrived = {name: (entry.shape, entry.dtype) for entry in entries for name in entry.names}
    for name, shard in shards:
        if (tuple(shard.shape), delivery.dtypes.get(name)) != arrived[name]:
            yield name, shard
