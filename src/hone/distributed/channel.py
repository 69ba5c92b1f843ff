"""Messages between the processes of a run, over process groups of torch.distributed.

Messages are pickles, and a program that can reach the store of the rendezvous can pose as one of
the processes. So each message is signed with the key of the run, and is never unpickled without a
valid signature. A signature proves that a process of the run wrote the bytes, not that they are new
or meant for this place.
"""

from __future__ import annotations

import hmac
import io
import pickle
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from hone.distributed.processes import HONE_KEY, run_key
from hone.errors import UserError

__all__ = ["Channel", "GroupChannel", "broadcast", "gather"]

T = TypeVar("T")
_SIGNATURE_BYTES = 32


class Channel:
    """Small messages between some processes of a run, in CPU memory.

    Uses its own gloo group, outside of any world of torch.distributed. Calls are collective, in the
    same order. They raise RuntimeError if a process is gone, and UserError if a message is not
    signed with the key of this run.
    """

    def __init__(
        self, name: str, store: dist.Store, ranks: Sequence[int], own: int, timeout: timedelta
    ) -> None:
        """Connect to the other processes. `ranks` are the members' ranks in the run, `own` is this
        process's."""
        self.group_name = name
        self.rank, self.size = ranks.index(own), len(ranks)
        scoped = dist.PrefixStore(name, store)
        self._group: Any  # the stubs lack what all backends have
        self._group = dist.ProcessGroupGloo(scoped, self.rank, self.size, timeout)

    def broadcast(self, value: Any, source: int = 0) -> Any:
        """The picklable `value` of the process with rank `source`."""
        return broadcast(self._group, value, source)

    def gather(self, value: Any) -> list[Any]:
        """The picklable `value` of every process, by rank."""
        return gather(self._group, value)

    @property
    def num_started(self) -> int:
        """Number of collectives that this process has started."""
        return self._group._get_sequence_number_for_group()


class GroupChannel:
    """Small messages over a CPU process group of torch.distributed. The group's timeout limits the
    wait for another process.

    Calls are collective, and raise ConnectionError if a process is gone or does not answer.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.rank = dist.get_rank(group)
        self.size = dist.get_world_size(group)
        self._group = group

    def broadcast(self, value: Any) -> Any:
        """The picklable `value` of the first process."""
        with _naming_others():
            return broadcast(self._group, value)

    def gather(self, value: T) -> list[T]:
        """The picklable `value` of every process, by rank."""
        with _naming_others():
            return gather(self._group, value)

    def total(self, *counts: int) -> tuple[int, ...]:
        """The sum of each count over all processes."""
        totals = torch.tensor(counts, dtype=torch.int64)
        with _naming_others():
            dist.all_reduce(totals, group=self._group)
        return tuple(totals.tolist())


@contextmanager
def _naming_others() -> Generator[None]:
    try:
        yield
    except RuntimeError as error:
        raise ConnectionError(f"another rank is gone or does not answer: {error}") from error


def broadcast(group: Any, value: Any, source: int = 0) -> Any:
    """The picklable `value` of the process with rank `source` in a group for CPU tensors.
    Collective; raises as the calls of a `Channel`."""
    is_own = group.rank() == source
    message = packed(value) if is_own else torch.empty(0, dtype=torch.uint8)
    num_bytes = torch.tensor([len(message)])
    group.broadcast(num_bytes, source).wait()
    if not is_own:
        message = message.new_empty(int(num_bytes))
    group.broadcast(message, source).wait()
    return value if is_own else unpacked(message)


def gather(group: Any, value: Any) -> list[Any]:
    """The picklable `value` of every process of a group, by rank. Collective, as `broadcast`."""
    message = packed(value)
    sizes = [int(size) for size in _all(group, torch.tensor([len(message)]))]
    padded = message.new_zeros(max(sizes))
    padded[: len(message)] = message
    gathered = zip(_all(group, padded), sizes, strict=True)
    return [unpacked(theirs[:size]) for theirs, size in gathered]


def _all(group: Any, own: Tensor) -> list[Tensor]:
    gathered = [torch.empty_like(own) for _ in range(group.size())]
    group.allgather([gathered], [own]).wait()
    return gathered


def packed(value: Any) -> Tensor:
    """Pack a picklable value into a uint8 tensor [B]: the signature, then the pickle, without a
    second copy."""
    message = io.BytesIO(bytes(_SIGNATURE_BYTES))
    message.seek(_SIGNATURE_BYTES)
    pickle.dump(value, message, protocol=5)
    view = message.getbuffer()
    view[:_SIGNATURE_BYTES] = _signature(view[_SIGNATURE_BYTES:])
    return torch.frombuffer(view, dtype=torch.uint8)


def unpacked(message: Tensor) -> Any:
    """Inverse of `packed`. Raises UserError if no process of this run has signed the bytes."""
    view = message.numpy().data
    content = view[_SIGNATURE_BYTES:]
    if not hmac.compare_digest(view[:_SIGNATURE_BYTES], _signature(content)):
        raise UserError(
            "a message between processes of this run is not signed with its key: another program "
            "has taken the place of one of them, or they were started with different values of "
            f"{HONE_KEY}. Run in a network that others cannot reach, and give the same "
            f"{HONE_KEY} to all processes."
        )
    return pickle.loads(content)


def _signature(content: memoryview) -> bytes:
    # Not `hmac.digest`, whose limit is 2 GiB.
    return hmac.new(run_key(), content, "sha256").digest()
