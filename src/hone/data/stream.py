"""An endless, ordered stream of rows that can be stopped and resumed anywhere.

The order depends only on (seed, epoch, row ids): each epoch of each source sorts the row ids by a
keyed hash. So the position is one counter for each source.

Several sources are interleaved by weight. The j-th row of a source with share w may come no
earlier than draw floor(j / w) and no later than draw ceil((j + 1) / w) - 1. Taking the row with the
earliest deadline among those allowed so far always meets these windows (Baruah et al.,
Proportionate Progress, Algorithmica 1996). So after k draws each source has given more than
k w - 1 and fewer than k w + 1 rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from functools import cached_property
from hashlib import blake2b
from typing import Any, Generic, Protocol, TypeVar

from hone.errors import UserError

__all__ = ["Item", "Stream", "epoch_order", "keyed_hash"]


class Item(Protocol):
    """The fields of a row that a stream needs."""

    @property
    def id(self) -> str: ...

    @property
    def token_ids(self) -> Sequence[int]: ...


T = TypeVar("T", bound=Item)


def keyed_hash(*parts: int | str) -> int:
    """64-bit hash of the parts, equal on every machine, platform and Python version."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest())


def epoch_order(ids: Sequence[str], *, seed: int, epoch: int, shuffle: bool = True) -> list[int]:
    """Indices into `ids` in the order of epoch number `epoch`."""
    if not shuffle:
        return list(range(len(ids)))
    return sorted(range(len(ids)), key=lambda index: keyed_hash("order", seed, epoch, ids[index]))


def _content(item: Item) -> object:
    return item.id, item.token_ids


class Stream(Generic[T]):
    """Rows of one or several sources, epoch after epoch, without end.

    `weights` are the relative shares of the sources (default: equal). `content` returns the part of
    a row that enters the fingerprint, by which `load_state_dict` recognises the data.
    """

    def __init__(
        self,
        sources: Sequence[Sequence[T]],
        *,
        seed: int,
        weights: Sequence[float] | None = None,
        shuffle: bool = True,
        content: Callable[[T], object] = _content,
    ) -> None:
        weights = [1.0] * len(sources) if weights is None else weights
        assert len(weights) == len(sources), f"{len(weights)=} {len(sources)=}"
        if not all(0 < weight < math.inf for weight in weights):
            raise UserError(f"source weights must be positive and finite, got {list(weights)}")
        self.sources = tuple(tuple(source) for source in sources)
        self.seed = seed
        self.shuffle = shuffle
        exact = [Fraction(str(weight)) for weight in weights]
        self.shares = tuple(weight / sum(exact) for weight in exact)
        self._content = content
        self._drawn = [0] * len(self.sources)
        self._orders: dict[int, tuple[int, list[int]]] = {}

    def __len__(self) -> int:
        """Rows over all sources."""
        return sum(len(source) for source in self.sources)

    def take(self, num: int) -> list[T]:
        """The next `num` rows."""
        if not all(self.sources) or not self.sources:
            raise UserError("there are no rows to train on; name a data set in `data.train`")
        return [self._draw() for _ in range(num)]

    def peek(self, num: int) -> list[T]:
        """The rows that `take` gives next."""
        drawn = list(self._drawn)
        rows = self.take(num)
        self._drawn = drawn
        return rows

    def state_dict(self) -> dict[str, Any]:
        """The position, with the fingerprint of the data, as small JSON values."""
        return {**self._identity, "drawn": list(self._drawn)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position. Raises UserError if it belongs to other data."""
        for key, value in self._identity.items():
            if state[key] != value:
                raise UserError(
                    f"the saved data position belongs to other data: {key} was {state[key]!r} "
                    f"and is now {value!r}. Restore the data settings of that run, or start anew "
                    "in another `run.dir`."
                )
        self._drawn = [int(drawn) for drawn in state["drawn"]]

    def _draw(self) -> T:
        number = self._next_source()
        source = self.sources[number]
        epoch, index = divmod(self._drawn[number], len(source))
        self._drawn[number] += 1
        return source[self._order(number, epoch)[index]]

    def _next_source(self) -> int:
        draws = sum(self._drawn) + 1
        allowed = (
            (Fraction(drawn + 1) / share, number)
            for number, (drawn, share) in enumerate(zip(self._drawn, self.shares, strict=True))
            if drawn < share * draws
        )
        return min(allowed)[1]

    def _order(self, number: int, epoch: int) -> list[int]:
        known = self._orders.get(number)
        if known is None or known[0] != epoch:
            ids = [item.id for item in self.sources[number]]
            known = (epoch, epoch_order(ids, seed=self.seed, epoch=epoch, shuffle=self.shuffle))
            self._orders[number] = known
        return known[1]

    @cached_property
    def _identity(self) -> dict[str, Any]:
        digest = blake2b(digest_size=16)
        for source in self.sources:
            for item in source:
                digest.update(repr(self._content(item)).encode())
        return {
            "seed": self.seed,
            "shuffle": self.shuffle,
            "shares": [str(share) for share in self.shares],
            "num_rows": [len(source) for source in self.sources],
            "fingerprint": digest.hexdigest(),
        }
