"""Messages between the processes of a run: nobody else's are unpickled."""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hone.distributed.channel import Channel, packed, unpacked
from hone.distributed.listening import host_store
from hone.distributed.processes import HONE_KEY
from hone.errors import UserError

PATIENCE = timedelta(seconds=60)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv(HONE_KEY, "a secret")
    return "a secret"


class Exploit:
    """A pickle that runs a program when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


def as_bytes(message: bytes) -> torch.Tensor:
    return torch.tensor(list(message), dtype=torch.uint8)


def test_a_message_arrives_as_it_was() -> None:
    value: dict[str, Any] = {"names": ("one", "two"), "weights": torch.arange(3)}
    arrived = unpacked(packed(value))
    assert arrived["names"] == value["names"]
    assert torch.equal(arrived["weights"], value["weights"])


def test_what_no_process_of_the_run_has_signed_is_never_unpickled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tmp_path / "ran"
    exploit = pickle.dumps(Exploit(mark))
    signed = bytes(packed("ours").numpy())
    monkeypatch.setenv(HONE_KEY, "a guess")
    guessed = packed(Exploit(mark))
    monkeypatch.delenv(HONE_KEY)
    keyless = packed(Exploit(mark))
    monkeypatch.setenv(HONE_KEY, "a secret")
    forged = (
        *(as_bytes(exploit), as_bytes(bytes(32) + exploit), as_bytes(signed[:32] + exploit)),
        *(as_bytes(signed[:-1]), as_bytes(signed[:20]), as_bytes(b"")),
        *(guessed, keyless),
    )
    for message in forged:
        with pytest.raises(UserError, match=r"is not signed with its key.* same HONE_KEY"):
            unpacked(message)
    assert not mark.exists()
    assert unpacked(as_bytes(signed)) == "ours"


def broadcast_by_stranger(group: Any, message: torch.Tensor) -> None:
    group.broadcast(torch.tensor([len(message)]), 1).wait()
    group.broadcast(message, 1).wait()


def gather_by_stranger(group: Any, message: torch.Tensor) -> None:
    sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(2)]
    group.allgather([sizes], [torch.tensor([len(message)])]).wait()
    padded = torch.zeros(max(map(int, sizes)), dtype=torch.uint8)
    padded[: len(message)] = message
    group.allgather([[torch.empty_like(padded) for _ in range(2)]], [padded]).wait()


@pytest.mark.parametrize(
    ("attack", "call"),
    [
        (broadcast_by_stranger, lambda channel: channel.broadcast(None, 1)),
        (gather_by_stranger, lambda channel: channel.gather("ours")),
    ],
)
def test_a_stranger_who_takes_the_place_of_a_process_runs_nothing(
    attack: Callable[[Any, torch.Tensor], None], call: Callable[[Channel], Any], tmp_path: Path
) -> None:
    """Whoever reaches the store can meet the others as one of them."""
    store = host_store("127.0.0.1", timeout_s=60.0)

    def strange() -> None:
        own = dist.TCPStore("127.0.0.1", store.port, timeout=PATIENCE)
        group = dist.ProcessGroupGloo(dist.PrefixStore("all", own), 1, 2, PATIENCE)
        attack(group, as_bytes(pickle.dumps(Exploit(tmp_path / "ran"))))

    with ThreadPoolExecutor(1) as pool:
        stranger = pool.submit(strange)
        channel = Channel("all", store, range(2), 0, PATIENCE)
        with pytest.raises(UserError, match="another program has taken the place of one of them"):
            call(channel)
        stranger.result(60.0)
    assert not (tmp_path / "ran").exists()
