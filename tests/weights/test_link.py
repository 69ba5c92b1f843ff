"""Notes between members of a delivery: deadlines, reasons and names."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from socket import socket
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from hone.distributed.listening import host_store
from hone.weights.link import Link, LinkError, SyncStore, join_store
from hone.weights.protocol import ReceiveSpec
from tests.ports import listening
from tests.ranks import ROOT

NAMES = ("the trainer", "one", "two")
KEY = bytes(range(32))


@pytest.fixture
def store() -> dist.TCPStore:
    return host_store("127.0.0.1", timeout_s=60.0)


def sync_store(
    store: dist.Store,
    rank: int,
    timeout_s: float = 0.3,
    watch: Callable[[], None] = lambda: None,
    *,
    delivery: int = 7,
    names: tuple[str, ...] = NAMES,
) -> SyncStore:
    spec = ReceiveSpec(
        version=1,
        delivery=delivery,
        host="",
        port=0,
        names=names,
        entries=(),
        bucket_bytes=1,
        timeout_s=timeout_s,
        key=KEY,
    )
    return SyncStore(store, spec, rank, watch)


def member(store: dist.TCPStore, rank: int) -> tuple[dist.TCPStore, SyncStore]:
    own = join_store("127.0.0.1", store.port, timeout_s=60.0)
    return own, sync_store(own, rank, timeout_s=60.0)


def test_notes_arrive_by_rank(store: dist.TCPStore) -> None:
    for rank in (2, 0, 1):
        sync_store(store, rank).put("come", {"rank": rank})
    _, notes = member(store, 1)
    assert [note["rank"] for note in notes.gather("come")] == [0, 1, 2]
    sync_store(store, 0).put("come")
    assert notes.gather("come", [0]) == [None]


class Exploit:
    """A pickle that runs a program when it is read."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.mark}",)


@pytest.mark.parametrize("phase", ["come", "given up"])
def test_what_a_stranger_writes_into_the_store_is_refused_and_never_unpickled(
    store: dist.TCPStore, phase: str, tmp_path: Path
) -> None:
    waiting = sync_store(store, 0, timeout_s=60.0)
    board = dist.PrefixStore("delivery 7", join_store("127.0.0.1", store.port, timeout_s=60.0))
    place = "come/1" if phase == "come" else phase
    board.set(place, pickle.dumps(Exploit(tmp_path / "ran")))
    with pytest.raises(LinkError, match=f"'{place}' in the sender's store is not signed"):
        waiting.gather("come", [1] if phase == "come" else [2])
    assert not (tmp_path / "ran").exists()


def test_a_message_is_good_for_its_place_and_its_key_alone(store: dist.TCPStore) -> None:
    sync_store(store, 1).put("come", "signed")
    board = dist.PrefixStore("delivery 7", store)
    message = board.get("come/1")
    board.set("come/2", message)
    dist.PrefixStore("delivery 8", store).set("come/1", message)
    for delivery, rank in ((7, 2), (8, 1)):
        reader = sync_store(store, 0, timeout_s=60.0, delivery=delivery)
        with pytest.raises(LinkError, match="is not signed with the key of this run"):
            reader.gather("come", [rank])
    assert sync_store(store, 0, timeout_s=60.0).gather("come", [1]) == ["signed"]


def test_the_store_listens_at_the_address_that_is_meant_alone(store: dist.TCPStore) -> None:
    assert {host for host, port in listening() if port == store.port} == {"127.0.0.1"}


def test_an_address_of_another_machine_is_refused() -> None:
    with pytest.raises(OSError, match=r"no port can be opened at 192\.0\.2\.1 .*an address of it"):
        host_store("192.0.2.1", timeout_s=60.0)


def test_notes_that_all_have_read_are_removed(store: dist.TCPStore) -> None:
    others, boards = store.num_keys(), [sync_store(store, rank) for rank in range(3)]
    for own in boards:
        own.put("come")
    assert store.num_keys() == others + 3
    boards[0].gather("come")
    boards[0].clear()
    assert store.num_keys() == others


def test_R11_those_who_did_not_come_are_named_at_the_deadline(store: dist.TCPStore) -> None:
    waiting = sync_store(store, 0)
    sync_store(store, 1).put("joined the link")
    start = time.monotonic()
    with pytest.raises(LinkError, match=r"^the trainer, two had not joined the link after 0.3 s$"):
        waiting.gather("joined the link")
    assert 0.25 < time.monotonic() - start < 60  # the store alone would wait for five minutes


def test_R11_a_reason_ends_every_wait_and_the_first_stands(store: dist.TCPStore) -> None:
    _, other = member(store, 2)
    other.give_up("two: no memory")
    sync_store(store, 1).give_up("one: the link broke")
    with pytest.raises(LinkError, match=r"^two: no memory$"):
        sync_store(store, 0, timeout_s=60.0).gather("come")
    later = sync_store(store, 0, timeout_s=0.1, delivery=8)
    with pytest.raises(LinkError, match="had not come"):
        later.gather("come")


def test_R11_what_the_watch_raises_ends_a_wait(store: dist.TCPStore) -> None:
    def watch() -> None:
        raise LinkError("one: gone")

    with pytest.raises(LinkError, match="one: gone"):
        sync_store(store, 0, timeout_s=60.0, watch=watch).gather("come")


def test_R11_a_sender_that_is_gone_is_named() -> None:
    gone = host_store("127.0.0.1", timeout_s=60.0)
    _, notes = member(gone, 1)
    del gone
    with pytest.raises(LinkError, match="the trainer is gone"):
        notes.gather("come")


def test_R11_nobody_answers() -> None:
    with closing(socket()) as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]  # taken, so that nobody else can listen there
        with pytest.raises(LinkError, match=f"does not answer at 127.0.0.1:{port} within 1 s"):
            join_store("127.0.0.1", port, timeout_s=1.0)


def meet_all(store: dist.TCPStore, devices: list[str]) -> list[Link | Exception]:
    def meet(rank: int) -> Link | Exception:
        own, notes = member(store, rank)
        try:
            return Link.meet(own, notes, torch.device(devices[rank]), None)
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(len(NAMES)) as pool:
        return list(pool.map(meet, range(len(NAMES))))


def test_no_link_spans_kinds_of_devices(store: dist.TCPStore) -> None:
    told = meet_all(store, ["cpu", "cpu", "meta"])
    assert "the trainer is on a cpu device, two not" in str(told[0])
    assert "two is on a meta device, the trainer, one not" in str(told[2])


@pytest.mark.parametrize(("gpus", "kind"), [(["a", "b", "a"], "cpu"), (["a", "b", "c"], "cuda")])
def test_a_link_of_members_that_share_a_gpu_goes_through_host_memory(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch, gpus: list[str], kind: str
) -> None:
    def properties(device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(uuid=gpus[device.index])

    monkeypatch.setattr(torch.cuda, "get_device_properties", properties)
    monkeypatch.setattr("hone.weights.link._nccl_group", lambda *_: None)
    for link in meet_all(store, ["cuda:0", "cuda:1", "cuda:2"]):
        assert isinstance(link, Link)
        assert link.device.type == kind
        link.drop()


def test_R11_a_dropped_link_ends_the_others_broadcasts(store: dist.TCPStore) -> None:
    sender, *others = meet_all(store, ["cpu"] * 3)
    assert isinstance(sender, Link)
    waiting = [link.broadcast(torch.empty(9, dtype=torch.uint8)) for link in others]
    sender.drop()
    sender.drop()
    for link, work in zip(others, waiting, strict=True):
        with pytest.raises(LinkError, match="the link broke"):
            link.wait(work, member(store, 1)[1])
        link.drop()


def test_R11_those_who_stay_leave_a_link_with_one_who_is_gone(store: dist.TCPStore) -> None:
    *staying, gone = meet_all(store, ["cpu"] * 3)
    assert isinstance(gone, Link)
    gone.drop()

    def take(rank: int) -> torch.Tensor:
        own, held = join_store("127.0.0.1", store.port, timeout_s=60.0), staying[rank]
        assert isinstance(held, Link)
        notes = sync_store(own, rank, 60.0, delivery=8, names=NAMES[:2])
        link = Link.meet(own, notes, torch.device("cpu"), held)
        tensor = torch.arange(9) if rank == 0 else torch.zeros(9, dtype=torch.int64)
        link.wait(link.broadcast(tensor), notes)
        return tensor

    with ThreadPoolExecutor(2) as pool:
        for tensor in pool.map(take, range(2)):
            assert torch.equal(tensor, torch.arange(9))


def test_R25_a_process_ends_well_right_after_it_has_dropped_a_link() -> None:
    """Under a broadcast that nobody sends, whose group takes a moment to go."""
    script = """
from tests.weights.test_link import *
store = host_store("127.0.0.1", timeout_s=60.0)
links = meet_all(store, ["cpu"] * 3)
work = links[1].broadcast(torch.empty(9, dtype=torch.uint8))
for link in links:
    link.drop()
"""
    ended = subprocess.run(
        [sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, timeout=600
    )
    assert ended.returncode == 0, ended.stderr
