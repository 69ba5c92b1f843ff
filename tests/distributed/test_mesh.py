"""Sizes of the axes, and a mesh of one process; groups of several are judged by tests.trainer."""

from __future__ import annotations

import pytest
import torch

from hone.distributed.joined import JoinedMesh
from hone.distributed.mesh import Axis, Mesh
from hone.distributed.processes import Processes
from hone.distributed.settings import AxisSizes, ParallelConfig
from hone.distributed.store import LostPeerError
from hone.errors import UserError


@pytest.mark.parametrize(
    ("keys", "world", "sizes"),
    [
        ({}, 8, AxisSizes(data=8, fsdp=8)),
        ({"zero_stage": 0}, 8, AxisSizes(data=8, fsdp=1)),
        ({"fsdp_size": 4}, 8, AxisSizes(data=8, fsdp=4)),
        ({"tensor_parallel_size": 2}, 8, AxisSizes(data=4, tensor=2, fsdp=4)),
        (
            {"ring_size": 2, "ulysses_size": 2, "tensor_parallel_size": 2},
            8,
            AxisSizes(data=1, ring=2, ulysses=2, tensor=2, fsdp=4),
        ),
    ],
)
def test_data_fills_what_the_other_axes_leave(keys, world, sizes):
    assert AxisSizes.of(ParallelConfig(**keys), world) == sizes
    assert sizes.world == world


@pytest.mark.parametrize(
    ("keys", "world", "said"),
    [
        ({"ring_size": 2, "tensor_parallel_size": 2}, 6, r"= 4 processes a replica.*, 6\."),
        ({"fsdp_size": 3}, 8, r"fsdp_size is 3, which does not divide the 8 processes"),
        ({"fsdp_size": 4, "tensor_parallel_size": 4}, 8, r"does not divide the 2 processes"),
    ],
)
def test_sizes_that_do_not_divide_are_refused_with_their_product(keys, world, said):
    with pytest.raises(UserError, match=said):
        AxisSizes.of(ParallelConfig(**keys), world)


def test_one_process_shares_with_nobody():
    only = Processes(rank=0, world_size=1, local_rank=0, local_world_size=1)
    mesh = JoinedMesh.join(ParallelConfig(), only, torch.device("cpu"))
    assert mesh == Mesh.alone("cpu")
    assert mesh.is_first
    assert mesh.fsdp is mesh.tensor_mesh is mesh.control is None
    assert {mesh.data, mesh.context, mesh.tensor, mesh.world} == {Axis()}
    assert mesh.gather("x") == ["x"]
    mesh.agree("anything", object())
    (values,) = mesh.gather_values(torch.arange(3.0), [3])
    assert values.tolist() == [0.0, 1.0, 2.0]
    assert not torch.distributed.is_initialized()


def test_a_host_that_others_cannot_reach_is_told_how_to_name_its_interface(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "nowhere0")
    own = Processes(rank=1, world_size=2, local_rank=0, local_world_size=1)
    store = torch.distributed.HashStore()
    with pytest.raises(LostPeerError, match=r"rank 1 on \S+ could not connect.*nowhere0") as told:
        JoinedMesh.join(ParallelConfig(timeout_s=5), own, torch.device("cpu"), store=store)
    assert "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME" in str(told.value)
    assert not torch.distributed.is_initialized()


def test_a_reference_with_the_same_axes_shares_the_mesh():
    mesh = Mesh.alone("cpu")
    assert mesh.for_reference(ParallelConfig()) is mesh
