"""Manifest of a model's weights, which two sides can compare.

A manifest has one record for each exported tensor: shape, dtype, tie and a 64-bit checksum. The
trainer writes one of the exported weights, the engine one of its own, and a sync is complete when
`compare` finds no difference.

The checksum is a multilinear hash in two levels. A tensor's bits, as 32-bit words `w`, are cut into
rows of `ROW_WORDS`; row r gives `s_r = sum_i w_ri * table_i mod 2**64` with fixed random 64-bit
multipliers (Lemire and Kaser, arXiv:1202.4961: two different rows agree with probability at most
2**-32), and the checksum is `sum_r mix(s_r + mix(r)) mod 2**64`. Integer sums do not depend on
their order, so every device and every grouping gives the same value. A 32-bit word times a 64-bit
multiplier keeps at least 33 bits of each difference, so that sign flips do not cancel.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, field
from functools import cache
from hashlib import blake2b

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from hone.types import TensorRecord, WeightManifest

__all__ = [
    "ManifestBuilder",
    "ManifestDiff",
    "RoundedChecksums",
    "build_manifest",
    "checksum_of",
    "compare",
    "export_weights",
    "match_layout",
    "memory_of",
]

ROW_WORDS = 16384
GROUP_WORDS = 1 << 26


def export_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield every parameter and persistent buffer, detached, under its Hugging Face name.

    A tied parameter appears under each of its names. Values are the module's own storage, not
    copies.
    """
    for name, value in model.state_dict().items():
        if isinstance(value, Tensor):  # not the opaque extra state that a module may add
            yield name, value


@torch.no_grad()
def build_manifest(
    named: Iterable[tuple[str, Tensor]],
    version: int,
    *,
    dtypes: Mapping[str, torch.dtype] | None = None,
    are_held: bool = False,
) -> WeightManifest:
    """Describe weights: one record a name, with the checksum of the exact bits.

    Names whose tensors are one and the same memory are tied: later ones point to the first by
    `tied_to`, so a change of tie state is a difference even where the values agree.

    `dtypes` casts a tensor before it is described, as the sync that exports it does. The work stays
    on the tensors' device (one device for all). Tensors made on the fly need not all exist at once:
    they are let go after every `GROUP_WORDS`. Ones that `are_held` elsewhere take one launch.
    """
    builder = ManifestBuilder(dtypes, group_words=None if are_held else GROUP_WORDS)
    for name, tensor in named:
        builder.add(name, tensor)
    return builder.finish(version)


def checksum_of(named: Mapping[str, Tensor]) -> str:
    """One checksum of the names, shapes and bits of tensors, in hexadecimal digits."""
    manifest = build_manifest(named.items(), 0, are_held=True)
    records = sorted((name, astuple(record)) for name, record in manifest.tensors.items())
    return blake2b(repr(records).encode(), digest_size=8).hexdigest()


class ManifestBuilder:
    """Builder of a manifest for weights that come one by one."""

    def __init__(
        self, dtypes: Mapping[str, torch.dtype] | None = None, *, group_words: int | None = None
    ) -> None:
        """Without `group_words` weights are released only at `flush`."""
        self._dtypes = dtypes or {}
        self._entries: dict[str, tuple[tuple[int, ...], torch.dtype, str]] = {}
        self._owners: dict[object, tuple[str, StorageWeakRef]] = {}
        self._group_words = group_words
        self._group: list[Tensor] = []  # words of weights without sums yet
        self._sums: list[Tensor] = []  # row sums of all other weights
        self._num_rows: list[int] = []  # number of rows of each weight

    def add(self, name: str, tensor: Tensor) -> None:
        """Add one weight under one of its names."""
        dtype = self._dtypes.get(name, tensor.dtype)
        memory = memory_of(tensor)
        owner, storage = self._owners.get(memory, (name, None))
        if storage is None or storage.expired():  # the same address is not the same memory
            owner = name
            self._owners[memory] = name, StorageWeakRef(tensor.untyped_storage())
        self._entries[name] = tuple(tensor.shape), dtype, owner
        if owner == name:
            words = _words(tensor.to(dtype))
            self._num_rows.append(-(-words.numel() // ROW_WORDS))
            self._group.append(words)
            limit = self._group_words
            if limit is not None and sum(x.numel() for x in self._group) >= limit:
                self.flush()

    def flush(self) -> None:
        """Release all weights. On a GPU the work has only begun."""
        if self._group:
            self._sums.append(_row_sums(self._group))
            self._group = []

    def finish(self, version: int) -> WeightManifest:
        """Wait for the work, and return the manifest."""
        self.flush()
        owners = [name for name, (_, _, owner) in self._entries.items() if owner == name]
        checksums = _combine(self._sums, self._num_rows)
        checksum_of = dict(zip(owners, checksums, strict=True))
        records = {
            name: TensorRecord(
                shape=shape,
                dtype=str(dtype).removeprefix("torch."),
                checksum=checksum_of[owner],
                tied_to=None if owner == name else owner,
            )
            for name, (shape, dtype, owner) in self._entries.items()
        }
        return WeightManifest(version=version, tensors=records)


class RoundedChecksums:
    """The checksums of weights, taken from the masters that these weights are rounded from.

    They are those of `build_manifest` where the weights hold what their masters round to. Masters
    may come in pieces: a row's sum is the sum over its pieces. A call of `add` is one launch on a
    GPU, which reads the masters once, 4 bytes an element, and writes 8 bytes for `ROW_WORDS`
    words of weights.
    """

    def __init__(self) -> None:
        self._pieces: dict[str, list[tuple[int, Tensor]]] = {}
        """First row and row sums, int64 [R], of each piece of each weight."""

    @torch.no_grad()
    def add(self, pieces: Iterable[tuple[str, int, Tensor]], dtype: torch.dtype) -> None:
        """Take in pieces of masters: a weight's name, the first element of the piece in the
        flattened weight (from 0 on in order; 0 replaces what there was of that weight), and the
        piece, flat, float32 or `dtype`. All on one device and of one dtype; `dtype` is that of the
        weights. A piece must start at a whole 32-bit word of the weight.
        """
        found = list(pieces)
        if not found:
            return
        starts = [start * dtype.itemsize for _, start, _ in found]
        assert not any(start % 4 for start in starts), "a piece begins inside a 32-bit word"
        first_words = [start // 4 for start in starts]
        sums = _rounded_row_sums([master for *_, master in found], first_words, dtype)
        parts = sums.split(
            [
                -(-(word % ROW_WORDS + -(-master.numel() * dtype.itemsize // 4)) // ROW_WORDS)
                for word, (*_, master) in zip(first_words, found, strict=True)
            ]
        )
        for (name, start, _), word, part in zip(found, first_words, parts, strict=True):
            if start == 0:
                self._pieces[name] = []
            self._pieces[name].append((word // ROW_WORDS, part))

    def values(self) -> dict[str, int]:
        """Wait for the work, and return the checksum of each weight."""
        if not self._pieces:
            return {}
        pieces = [piece for own in self._pieces.values() for piece in own]
        num_rows = [max(row + len(s) for row, s in own) for own in self._pieces.values()]
        ends = np.cumsum([0, *num_rows])
        owners = np.repeat(ends[:-1], [len(own) for own in self._pieces.values()])
        totals = np.zeros(ends[-1], np.int64)
        rows = [
            np.arange(owner + row, owner + row + len(s))
            for owner, (row, s) in zip(owners, pieces, strict=True)
        ]
        np.add.at(totals, np.concatenate(rows), torch.cat([s for _, s in pieces]).cpu().numpy())
        checksums = _combine([torch.from_numpy(totals)], num_rows)
        return dict(zip(self._pieces, checksums, strict=True))


def memory_of(tensor: Tensor) -> tuple[object, ...]:
    """A key that is equal for two tensors exactly when they are the same elements in memory."""
    return tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()


@dataclass(frozen=True, slots=True, kw_only=True)
class ManifestDiff:
    """Difference between actual and expected weights. False if there is none."""

    missing: tuple[str, ...] = ()
    """Expected names that are missing."""
    unexpected: tuple[str, ...] = ()
    """Names that were not expected."""
    different: Mapping[str, str] = field(default_factory=dict[str, str])
    """Names on both sides whose tensors differ, with the difference."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.different)

    def describe(self, limit: int = 8) -> str:
        """The counts, then up to `limit` names of each kind; for error messages."""
        lines = [
            f"{len(self.missing)} tensors missing, {len(self.unexpected)} unexpected, "
            f"{len(self.different)} different"
        ]
        entries = {
            "missing": self.missing,
            "unexpected": self.unexpected,
            "different": tuple(f"{name}: {what}" for name, what in self.different.items()),
        }
        for kind, items in entries.items():
            lines += [f"  {kind}: {item}" for item in items[:limit]]
            if len(items) > limit:
                lines.append(f"  {kind}: and {len(items) - limit} more")
        return "\n".join(lines)


def compare(expected: WeightManifest, actual: WeightManifest) -> ManifestDiff:
    """Compare names, shapes, dtypes, ties and checksums; versions are the caller's business."""
    pairs = {
        name: (record, actual.tensors[name])
        for name, record in expected.tensors.items()
        if name in actual.tensors
    }
    return ManifestDiff(
        missing=tuple(name for name in expected.tensors if name not in actual.tensors),
        unexpected=tuple(name for name in actual.tensors if name not in expected.tensors),
        different={name: _difference(*pair) for name, pair in pairs.items() if pair[0] != pair[1]},
    )


def match_layout(sources: Mapping[str, torch.Size], targets: Mapping[str, Tensor]) -> ManifestDiff:
    """Compare names and shapes of trainer and engine."""
    return ManifestDiff(
        missing=tuple(name for name in sources if name not in targets),
        unexpected=tuple(name for name in targets if name not in sources),
        different={
            name: f"shape {list(targets[name].shape)}, expected {list(shape)}"
            for name, shape in sources.items()
            if name in targets and targets[name].shape != shape
        },
    )


def _difference(expected: TensorRecord, actual: TensorRecord) -> str:
    if expected.shape != actual.shape:
        return f"shape {list(actual.shape)}, expected {list(expected.shape)}"
    if expected.dtype != actual.dtype:
        return f"dtype {actual.dtype}, expected {expected.dtype}"
    if expected.checksum != actual.checksum:
        return f"values (checksum {actual.checksum:016x}, expected {expected.checksum:016x})"
    got, wanted = actual.tied_to or "no other name", expected.tied_to or "no other name"
    return f"tied to {got}, expected tied to {wanted}"


def _words(tensor: Tensor) -> Tensor:
    """The bits of a tensor as a flat int32 tensor, zero-padded to whole words."""
    flat = tensor.detach().contiguous().view(-1)
    if flat.nbytes % 4:
        flat = nn.functional.pad(flat.view(torch.uint8), (0, -flat.nbytes % 4))
    elif flat.storage_offset() * flat.element_size() % 4:  # a view may not start inside a word
        flat = flat.clone()
    return flat.view(torch.int32)


def _row_sums(group: list[Tensor]) -> Tensor:
    """`row @ table` in wrapping int64 arithmetic for all rows of flat tensors, in order: [R]."""
    table = _table(group[0].device)
    if table.is_cuda:
        from hone.models.manifest_kernel import row_sums

        return row_sums(group, table)
    multipliers = table.numpy()
    sums: list[NDArray[np.int64]] = []
    for words in map(Tensor.numpy, group):
        size = len(words) // ROW_WORDS * ROW_WORDS
        # einsum fuses the cast, the product and the sum: there are no temporaries.
        if size:
            full = words[:size].reshape(-1, ROW_WORDS)
            sums.append(np.einsum("rw,w->r", full, multipliers))
        if size < len(words):
            rest = words[size:].reshape(1, -1)
            sums.append(np.einsum("rw,w->r", rest, multipliers[: rest.size]))
    return torch.from_numpy(np.concatenate([*sums, np.empty(0, np.int64)]))


def _rounded_row_sums(masters: list[Tensor], first_words: list[int], dtype: torch.dtype) -> Tensor:
    """`_row_sums` of the rounded `masters`, whose first words are `first_words` of their
    weights."""
    columns = [word % ROW_WORDS for word in first_words]
    if masters[0].is_cuda and (masters[0].dtype, dtype) == (torch.float32, torch.bfloat16):
        from hone.models.manifest_kernel import rounded_row_sums

        return rounded_row_sums(masters, columns, _table(masters[0].device))
    # Zeros in front add nothing.
    words = [_words(master.to(dtype)) for master in masters]
    padded = [nn.functional.pad(w, (c, 0)) if c else w for w, c in zip(words, columns, strict=True)]
    return _row_sums(padded)


def _combine(sums: list[Tensor], num_rows: list[int]) -> list[int]:
    """The checksum of each tensor, from the row sums of all; tensor i has `num_rows[i]` rows."""
    if not sums:
        return []
    ends = np.cumsum([0, *num_rows])
    index = np.arange(ends[-1]) - np.repeat(ends[:-1], num_rows)
    mixed = _mix(torch.cat(sums).cpu().numpy().view(np.uint64) + _mix(index.astype(np.uint64)))
    totals = np.concatenate([np.zeros(1, np.uint64), np.cumsum(mixed)])[ends]
    return np.diff(totals).tolist()


@cache
def _table(device: torch.device) -> Tensor:
    """The multipliers: [ROW_WORDS] int64, fixed for ever."""
    # Offset so that the table shares no value with the row indices mixed in `_combine`.
    values = _mix(np.arange(ROW_WORDS, dtype=np.uint64) + np.uint64(1 << 63))
    return torch.from_numpy(values.view(np.int64)).to(device)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): a bijection that spreads every bit."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
