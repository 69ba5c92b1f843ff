"""Buckets: both sides cut the same list alike, and every byte comes back."""

from __future__ import annotations

import torch
from torch import Tensor

from hone.weights.buckets import ALIGNMENT, WeightEntry, layout_of, plan_buckets
from tests.tables import table

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.uint8)


def random_weights(seed: int) -> list[tuple[str, Tensor]]:
    draw = torch.Generator().manual_seed(seed)
    named = []
    for index in range(30):
        rank = int(torch.randint(4, (1,), generator=draw))
        shape = torch.randint(1, 9, (rank,), generator=draw).tolist()
        values = torch.randint(0, 256, shape, generator=draw)
        named.append((f"w{index}", values.to(DTYPES[index % len(DTYPES)])))
    named.insert(20, ("tied", named[3][1]))
    named.append(("tied too", named[3][1]))
    named.append(("a view of it", named[3][1].view(-1)[:1]))
    return named


@table("bucket_bytes", [1, 100, 1000, 4096, 1 << 30])
@table("seed", range(3))
def test_every_tensor_comes_back_under_all_its_names(seed: int, bucket_bytes: int) -> None:
    named = random_weights(seed)
    entries = layout_of(named)
    wanted, found = dict(named), {}
    for bucket in plan_buckets(entries, bucket_bytes):
        assert bucket.num_bytes <= bucket_bytes or len(bucket.entries) == 1
        sent = bucket.new_buffer(CPU)
        for entry, view in zip(bucket.entries, bucket.views(sent), strict=True):
            view.copy_(wanted[entry.names[0]])
        found |= {name: view.clone() for name, view in bucket.named_views(sent.clone())}
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype
        assert torch.equal(found[name], tensor)


def test_buckets_are_as_few_as_their_order_allows() -> None:
    entries = [WeightEntry((str(n),), (n,), torch.uint8) for n in (100, 100, 300, 20, 700, 10)]
    buckets = plan_buckets(entries, 512)
    assert [[e.names[0] for e in bucket.entries] for bucket in buckets] == [
        ["100", "100"],
        ["300", "20"],
        ["700"],
        ["10"],
    ]
    assert [bucket.offsets for bucket in buckets] == [(0, ALIGNMENT), (0, 384), (0,), (0,)]
    assert plan_buckets([], 512) == []


def test_tied_names_are_one_entry_and_equal_values_are_not() -> None:
    one, other = torch.ones(3), torch.ones(3)
    entries = layout_of([("a", one), ("b", other), ("c", one)])
    assert [entry.names for entry in entries] == [("a", "c"), ("b",)]


def test_the_same_address_later_is_not_the_same_memory() -> None:
    entries = layout_of((f"w{n}", torch.zeros(1000)) for n in range(20))
    assert len(entries) == 20
