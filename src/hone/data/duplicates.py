"""Rows whose content an earlier row of the epoch has, by digests of 64 bits: 8 bytes a row.

    content of a row ─► digest ─► `Digests`: seen before?
    place in an epoch ─► `Repeats` ─► `Digests` of all places before it

The place alone decides. What a process has not read itself, as after a resume, is read again for
its digests. That any two of n different rows have equal digests has a probability of n * n / 2**65:
one in 370,000 for ten million rows.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from time import monotonic
from typing import Any

import numpy as np
from numpy.typing import NDArray

from hone.data.columns import value_of, without_nulls
from hone.data.rows import SourceRow

__all__ = ["Digests", "Hashes", "Repeats", "digest"]

logger = logging.getLogger(__name__)

Hashes = NDArray[np.uint64]
"""Digests of rows; 0 of a row that is left out anyway, which repeats nothing."""
_LONGEST_RUN = 1 << 22
"""Longest sorted array, so that a merge needs no more than 64 MiB beside what is kept."""
_MOMENT_S = 2.0
"""A pass over earlier rows that takes longer is logged, in seconds."""


def digest(row: SourceRow, columns: Sequence[str], images: str | None = None) -> int:
    """64 bits of the content of a row, which is what it has in these columns, and in that of its
    images; never 0."""
    values: list[Any] = []
    for name in columns:
        value = row.columns.get(name)
        if value is None and "." in name:
            value = value_of(row.columns, name)
        values.append(value if value is None or isinstance(value, str) else _plain(value, row))
    text = _encode(values)
    pictures = value_of(row.columns, images)
    if pictures or '"image' in text:
        # A relative path is another file in another folder.
        text += _encode([_plain(pictures, row), str(row.folder)])
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest()) or 1


def _plain(value: Any, row: SourceRow) -> Any:
    """A value as a run sees it: without fields that only other rows have, and of an image that is
    given by its bytes without its name."""
    if isinstance(value, Mapping) and value.get("bytes") is not None:
        return value["bytes"]
    if isinstance(value, list):
        return [_plain(item, row) for item in value]
    return without_nulls(value, keep=() if row.is_padded else ("arguments",))


def _other(value: Any) -> str:
    """Text for a value that JSON lacks."""
    if isinstance(value, bytes):
        return f"bytes {blake2b(value, digest_size=16).hexdigest()}"
    return f"{type(value).__name__} {value!r}"


_encode = json.JSONEncoder(sort_keys=True, default=_other).encode


class Digests:
    """A set of digests in sorted arrays of 8 bytes each. An array is at least twice as long as the
    next one, or of the greatest length."""

    def __init__(self) -> None:
        self._runs: list[Hashes] = []

    def __len__(self) -> int:
        return sum(map(len, self._runs))

    @property
    def num_bytes(self) -> int:
        """Memory of all arrays."""
        return sum(run.nbytes for run in self._runs)

    def add(self, hashes: Hashes) -> NDArray[np.bool_]:
        """Add digests, [n]. Whether each was added before, or stands before in `hashes`, [n]. One
        that is 0 is not added, and False."""
        values, firsts = np.unique(hashes, return_index=True)
        is_new = values != 0
        for run in self._runs:
            places = np.minimum(np.searchsorted(run, values), len(run) - 1)
            is_new &= run[places] != values
        repeated = hashes != 0
        repeated[firsts[is_new]] = False
        if is_new.any():
            self._append(values[is_new])
        return repeated

    def _append(self, values: Hashes) -> None:
        """Add sorted digests, none of which is there."""
        while self._runs and len(self._runs[-1]) < 2 * len(values):
            if len(self._runs[-1]) + len(values) > _LONGEST_RUN:
                break
            # Of two sorted arrays a stable sort is one merge.
            values = np.sort(np.concatenate([self._runs.pop(), values]), kind="stable")
        self._runs.append(values)


@dataclass
class _Epoch:
    """The places of an epoch whose digests are known."""

    begin: int
    """The first place of which `repeats` is known; those before it have only been added."""
    end: int
    """The first place that has not been added."""
    repeats: NDArray[np.bool_]
    """Whether each place repeats an earlier one, [rows of the source]."""
    digests: Digests | None = field(default_factory=Digests)
    """None once a later epoch has begun."""


class Repeats:
    """Which places of the epochs of a source repeat an earlier place of the epoch.

    `before` gives the digests of all places before one, in any order and some at a time, by reading
    their rows. `name` is that of the source, for messages.
    """

    def __init__(
        self, num_rows: int, before: Callable[[int, int], Iterable[Hashes]], *, name: str
    ) -> None:
        self._num_rows, self._before, self._name = num_rows, before, name
        self._epochs: dict[int, _Epoch] = {}

    def find(self, epoch: int, place: int, hashes: Hashes) -> NDArray[np.bool_]:
        """Whether places of an epoch from `place` on, which have these digests, [n], repeat an
        earlier one, [n]."""
        stop = place + len(hashes)
        known = self._epochs.get(epoch)
        is_known = known is not None and known.begin <= place and stop <= known.end
        if known is None or not (
            is_known or (known.begin <= place <= known.end and known.digests is not None)
        ):
            known = self._started(epoch, place)
        if stop > known.end:
            assert known.digests is not None
            repeats = known.digests.add(hashes[known.end - place :])
            known.repeats[known.end : stop] = repeats
            known.end = stop
        return known.repeats[place:stop]

    def _started(self, epoch: int, place: int) -> _Epoch:
        """Begin to follow an epoch at a place. Of the epoch before it stays known which places
        repeat: a look ahead may go back there."""
        kept = {number: each for number, each in self._epochs.items() if number == epoch - 1}
        for each in kept.values():
            each.digests = None
        found = _Epoch(place, place, np.zeros(self._num_rows, dtype=np.bool_))
        self._epochs = {**kept, epoch: found}
        if place:
            self._read_again(epoch, place, found)
        return found

    def _read_again(self, epoch: int, place: int, found: _Epoch) -> None:
        assert found.digests is not None
        begun_s, num_read, is_told = monotonic(), 0, False
        for hashes in self._before(epoch, place):
            found.digests.add(hashes)
            num_read += len(hashes)
            if not is_told and monotonic() - begun_s > _MOMENT_S:
                is_told = True
                logger.info(
                    "%s: the %s rows of the epoch before this place are read again, to know which "
                    "rows repeat them (data.duplicates is drop)",
                    self._name,
                    f"{place:,}",
                )
        if is_told:
            took_s = monotonic() - begun_s
            logger.info("%s: %s rows read again in %.0f s", self._name, f"{num_read:,}", took_s)
