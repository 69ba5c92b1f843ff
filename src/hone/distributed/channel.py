"""Messages between processes that are in different worlds of torch.distributed."""

from __future__ import annotations

import io
import pickle
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Channel", "packed", "unpacked"]


class Channel:
    """Some processes of a run, for small messages between their hosts' memories.

    A gloo group of its own, which no world of torch.distributed knows. Calls are collective, in the
    same order, and raise RuntimeError where a process is gone.
    """

    def __init__(
        self, name: str, store: dist.Store, ranks: Sequence[int], own: int, timeout: timedelta
    ) -> None:
        """Meet the other processes. `ranks` are theirs in the run, `own` is this one's."""
        self.group_name = name
        self.rank, self.size = ranks.index(own), len(ranks)
        scoped = dist.PrefixStore(name, store)
        self._group: Any  # the stubs lack what all backends have
        self._group = dist.ProcessGroupGloo(scoped, self.rank, self.size, timeout)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """The picklable `value` of the process with the rank `source`."""
        message = packed(value) if self.rank == source else torch.empty(0, dtype=torch.uint8)
        num_bytes = torch.tensor([len(message)])
        self._group.broadcast(num_bytes, source).wait()
        if self.rank != source:
            message = message.new_empty(int(num_bytes))
        self._group.broadcast(message, source).wait()
        return value if self.rank == source else unpacked(message)

    def gather(self, value: Any) -> list[Any]:
        """The picklable `value` of every process, by rank."""
        message = packed(value)
        sizes = [int(size) for size in self._all(torch.tensor([len(message)]))]
        padded = message.new_zeros(max(sizes))
        padded[: len(message)] = message
        found = zip(self._all(padded), sizes, strict=True)
        return [unpacked(theirs[:size]) for theirs, size in found]

    def _all(self, own: Tensor) -> list[Tensor]:
        found = [torch.empty_like(own) for _ in range(self.size)]
        self._group.allgather([found], [own]).wait()
        return found

    @property
    def num_started(self) -> int:
        """Collectives that this process has started."""
        return self._group._get_sequence_number_for_group()


def packed(value: Any) -> Tensor:
    """A picklable value as bytes [B], which are written once."""
    message = io.BytesIO()
    pickle.dump(value, message, protocol=5)
    return torch.frombuffer(message.getbuffer(), dtype=torch.uint8)


def unpacked(message: Tensor) -> Any:
    """Inverse of `packed`; of those bytes alone, from a process of this run."""
    return pickle.loads(message.numpy().data)
