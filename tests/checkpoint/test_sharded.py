"""Checkpoints that several processes write and any number reads.

What needs a group runs in four processes, `sharded_ranks`, whose outcomes are judged here.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from tests.checkpoint.sharded_ranks import LAYOUTS, model, whole
from tests.ranks import run_ranks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from hone.checkpoint.atomic import CheckpointError
from hone.checkpoint.sharded import Region, StoredPart, StoredTensor, laid_out, own_part
from hone.checkpoint.store import CheckpointStore
from hone.checkpoint.tree import split_tree

WORLD_SIZE = 4


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sharded")
    return folder, run_ranks("tests.checkpoint.sharded_ranks", WORLD_SIZE, folder)


def test_every_layout_comes_back_whole_and_in_parts(run):
    for found in run[1]:
        assert found["wrong"] == []
        assert found["step"] == 2


def test_what_is_no_tensor_is_the_first_process_s(run):
    assert [found["data"] for found in run[1]] == [{"cursor": 64, "rank": 0}] * WORLD_SIZE


def test_processes_with_equal_copies_share_the_writing(run):
    assert [found["writers of copies"] for found in run[1]] == [2] * WORLD_SIZE


def test_several_processes_export_the_files_of_one(run):
    for rank, found in enumerate(run[1]):
        export = found["export"]
        assert export["differing"] == []
        assert export["num_files"] > 2 * WORLD_SIZE
        assert "the disk is on fire" in export["one fails"]
        assert rank == 2 or "process 2" in export["one fails"]
        assert export["former stays"]
        assert "not ours to replace" in export["refused"]
        assert export["refused"].startswith("CheckpointError" if rank else "ValueError")


def test_a_process_that_fails_is_named_on_all_and_leaves_nothing(run):
    for rank, found in enumerate(run[1]):
        assert "the disk is on fire" in found["one fails"]
        assert rank == 2 or "process 2" in found["one fails"]
        assert found["left behind"] == []


def test_damage_to_one_file_is_seen_by_all(run):
    for found in run[1]:
        assert "trainer.rank3.safetensors is damaged" in found["one is damaged"]
        assert found["fallback"] == 1


def test_R11_a_silent_process_is_named(run):
    for found in run[1]:
        assert "process 1 has not written its part" in found["one is silent"]


def test_processes_that_load_their_own_parts_train_as_with_whole_models(run):
    assert [found["deferred"] for found in run[1]] == [[]] * WORLD_SIZE


def test_one_process_reads_what_four_wrote(run):
    parts = CheckpointStore(run[0] / "run").load(1).parts["trainer"]
    for name in [*LAYOUTS, "small", "plain"]:
        assert torch.equal(own_part(parts[name], like=torch.empty(whole(name).shape)), whole(name))
    for name, value in model(None).named_parameters():
        assert torch.equal(parts[name].full(), value)


def cuts(draw, size):
    inner = draw(st.sets(st.integers(1, size - 1), max_size=3)) if size > 1 else set()
    borders = [0, *sorted(inner), size]
    return list(pairwise(borders))


@st.composite
def stored(draw):
    """A tensor cut into boxes, and a region of it."""
    shape = tuple(draw(st.lists(st.integers(1, 6), min_size=0, max_size=3)))
    boxes = [()]
    for size in shape:
        spans = cuts(draw, size)
        boxes = [(*box, span) for box in boxes for span in spans]
    starts = [draw(st.integers(0, size - 1)) for size in shape]
    ends = [draw(st.integers(start, size)) for start, size in zip(starts, shape, strict=True)]
    return (
        shape,
        boxes,
        Region(tuple(starts), tuple(e - s for s, e in zip(starts, ends, strict=True))),
    )


@given(case=stored())
def test_any_region_is_read_from_any_pieces(tmp_path_factory, case):
    shape, boxes, region = case
    folder = tmp_path_factory.mktemp("pieces")
    tensor = torch.randn(shape)
    pieces = []
    for number, box in enumerate(boxes):
        part = Region(tuple(a for a, _ in box), tuple(b - a for a, b in box))
        file = folder / f"{number}.bin"
        file.write_bytes(b"head" + tensor[part.slices].contiguous().numpy().tobytes())
        pieces.append(StoredPart(file, 4, part))
    saved = StoredTensor("w", tensor.shape, tensor.dtype, tuple(pieces))
    assert torch.equal(saved.full(), tensor)
    assert torch.equal(saved.read(region), tensor[region.slices])
    lacking = StoredTensor("w", tensor.shape, tensor.dtype, tuple(pieces[1:]))
    with pytest.raises(CheckpointError, match="missing"):
        lacking.full()
    twice = StoredTensor("w", tensor.shape, tensor.dtype, (*pieces, pieces[0]))
    with pytest.raises(CheckpointError, match="overlap"):
        twice.full()


def test_a_tensor_of_another_shape_is_refused():
    with pytest.raises(ValueError, match=r"shape \(2, 3\) was saved, \(3, 2\) is wanted"):
        own_part(torch.zeros(2, 3), like=torch.zeros(3, 2))


@pytest.fixture
def rows_on_gpus():
    """A weight of 6 rows, of which this process has the last 3, on a mesh of GPUs that no process
    of this test has: whatever would go to one fails, or is seen by its device."""
    store = FakeStore()
    dist.init_process_group("fake", rank=1, world_size=2, store=store)
    mesh = DeviceMesh("cuda", [0, 1], _init_backend=False, _rank=1)
    yield DTensor.from_local(torch.empty(3, 4, device="meta"), mesh, [Shard(0)], run_check=False)
    dist.destroy_process_group()


def test_host_memory_is_laid_out_as_a_device_tensor_and_stays_there(rows_on_gpus):
    host = torch.randn(3, 4).bfloat16()
    moment = laid_out(host, like=rows_on_gpus)
    assert moment.shape == (6, 4)
    assert moment.dtype == torch.bfloat16
    assert moment.device.type == "cpu"
    assert moment.to_local().data_ptr() == host.data_ptr()
    part = split_tree(moment, "moment", is_first=False, copy=True).parts["moment"]
    assert (part.offsets, part.shape) == ((3, 0), (6, 4))
    assert torch.equal(part.local, host)
    assert part.local.data_ptr() != host.data_ptr()


def test_of_what_is_saved_a_process_takes_its_part(rows_on_gpus):
    saved = torch.randn(6, 4)
    assert own_part(saved, like=rows_on_gpus).data_ptr() == saved[3:].data_ptr()


def test_a_part_of_another_shape_is_refused(rows_on_gpus):
    with pytest.raises(ValueError, match=r"part has shape \(3, 4\), not \(6, 4\)"):
        laid_out(torch.zeros(6, 4), like=rows_on_gpus)
