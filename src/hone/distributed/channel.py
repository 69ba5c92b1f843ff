"""Messages between the processes of a run, over groups of torch.distributed.

They are pickles, and whoever reaches the store in which processes meet can pass for one of them. So
each is signed with the key of the run, and what is not is never unpickled. A signature says that a
process of the run has written the bytes, not that they are new or meant for this place.
"""

from __future__ import annotations

import hmac
import io
import pickle
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hone.distributed.processes import HONE_KEY, run_key
from hone.errors import UserError

__all__ = ["Channel", "broadcast", "gather"]

_SIGNATURE_BYTES = 32


class Channel:
    """Some processes of a run, for small messages between their hosts' memories.

    A gloo group of its own, which no world of torch.distributed knows. Calls are collective, in the
    same order, and raise RuntimeError where a process is gone, and UserError where a message is not
    signed with the key of this run.
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
        return broadcast(self._group, value, source)

    def gather(self, value: Any) -> list[Any]:
        """The picklable `value` of every process, by rank."""
        return gather(self._group, value)

    @property
    def num_started(self) -> int:
        """Collectives that this process has started."""
        return self._group._get_sequence_number_for_group()


def broadcast(group: Any, value: Any, source: int = 0) -> Any:
    """The picklable `value` of the process that has the rank `source` in a group, which takes
    tensors of the CPU. Collective; raises as the calls of a `Channel`."""
    is_own = group.rank() == source
    message = packed(value) if is_own else torch.empty(0, dtype=torch.uint8)
    num_bytes = torch.tensor([len(message)])
    group.broadcast(num_bytes, source).wait()
    if not is_own:
        message = message.new_empty(int(num_bytes))
    group.broadcast(message, source).wait()
    return value if is_own else unpacked(message)


def gather(group: Any, value: Any) -> list[Any]:
    """The picklable `value` of every process of a group, as `broadcast`; by rank."""
    message = packed(value)
    sizes = [int(size) for size in _all(group, torch.tensor([len(message)]))]
    padded = message.new_zeros(max(sizes))
    padded[: len(message)] = message
    found = zip(_all(group, padded), sizes, strict=True)
    return [unpacked(theirs[:size]) for theirs, size in found]


def _all(group: Any, own: Tensor) -> list[Tensor]:
    found = [torch.empty_like(own) for _ in range(group.size())]
    group.allgather([found], [own]).wait()
    return found


def packed(value: Any) -> Tensor:
    """A picklable value as bytes [B], which are written once: the signature, then the pickle."""
    message = io.BytesIO(bytes(_SIGNATURE_BYTES))
    message.seek(_SIGNATURE_BYTES)
    pickle.dump(value, message, protocol=5)
    view = message.getbuffer()
    view[:_SIGNATURE_BYTES] = _signature(view[_SIGNATURE_BYTES:])
    return torch.frombuffer(view, dtype=torch.uint8)


def unpacked(message: Tensor) -> Any:
    """Inverse of `packed`. Raises UserError where no process of this run has signed the bytes."""
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
    # Not `hmac.digest`, which takes 2 GiB at most.
    return hmac.new(run_key(), content, "sha256").digest()
