from __future__ import annotations

import gc
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from hone.errors import UserError
from hone.trainer import host_gradients, offload, pieces
from hone.trainer.host_gradients import HostGradients
from hone.trainer.offload import Bucket, StateOffload, host_tensors, stream_buckets
from hone.trainer.pieces import norm_of_pieces
from hone.trainer.policy import Policy
from hone.trainer.settings import OptimizerConfig
from hone.trainer.update_rules import ParameterOptimizer
from tests.trainer.examples import make_trainer, random_rows, tiny_model

CPU = torch.device("cpu")
AWAY: dict[str, Any] = {"offload": "gradients"}


def test_buckets_are_changed_on_the_device_and_come_back():
    buckets = [
        Bucket(
            [torch.randn(n), torch.randn(n).bfloat16()],
            read=[torch.randn(n)],
        )
        for n in (100, 3, 4096, 7, 1)
    ]
    changed = [[(2 * t.double() + i).to(t.dtype) for t in b.changed] for i, b in enumerate(buckets)]
    read = [b.read[0].clone() for b in buckets]

    def update(index: int, staged: Bucket) -> None:
        for hosts, there in zip(buckets[index], staged, strict=True):
            for host, device in zip(hosts, there, strict=True):
                assert host.data_ptr() != device.data_ptr()
                assert host.dtype == device.dtype
        for device in staged.changed:
            device.copy_((2 * device.double() + index).to(device.dtype))
        staged.read[0].zero_()

    stream_buckets(buckets, update, CPU)
    for bucket, want, unchanged in zip(buckets, changed, read, strict=True):
        assert all(torch.equal(g, w) for g, w in zip(bucket.changed, want, strict=True))
        assert torch.equal(bucket.read[0], unchanged)


def test_host_tensors_do_not_overlap():
    layout = [(torch.Size([5]), torch.float32), (torch.Size([3, 3]), torch.bfloat16)]
    first, second = host_tensors(layout, CPU, purpose="test")
    first.fill_(1)
    second.fill_(2)
    assert bool((first == 1).all())
    assert second.shape == (3, 3)


def test_too_little_host_memory_is_said_before_it_is_taken():
    free = psutil.virtual_memory().available
    with pytest.raises(UserError, match=r"masters: this takes .* GiB of host memory, and .* free"):
        host_tensors([(torch.Size([2 * free]), torch.uint8)], CPU, purpose="masters")


@pytest.mark.parametrize("seed", range(3))
def test_gradients_on_the_host_are_those_added_up_on_the_device(
    seed: int, monkeypatch: pytest.MonkeyPatch
):
    """Pieces that do not fit, parameters that come late, never or in another order."""
    monkeypatch.setattr(pieces, "_PIECE_ELEMENTS", 10)
    monkeypatch.setattr(host_gradients, "BUCKET_BYTES", 64)
    generator = torch.Generator().manual_seed(seed)
    names = [f"p{i}" for i in range(6)]
    shapes = dict(zip(names, [(5, 7), (3,), (11, 1), (0, 4), (40,), (2, 2)], strict=True))
    like = {name: torch.zeros(shape) for name, shape in shapes.items()}
    on_host = HostGradients(like, CPU, window_bytes=80)
    most = 0
    for _step in range(3):
        total: dict[str, Tensor] = {}
        order = torch.randperm(6, generator=generator).tolist()
        for micro_batch in range(4):
            if micro_batch == 3:
                order = order[::-1]
            for i in order:
                if i == 5 and micro_batch < 2:
                    continue
                name = names[i]
                gradient = torch.randn(shapes[name], generator=generator).bfloat16()
                on_host.add(name, gradient)
                held = total.get(name)
                total[name] = gradient.float() if held is None else held.add_(gradient)
                ahead = sum(value.nbytes for value, _ in on_host._ahead.values())
                most = max(most, on_host._bytes_leaving + ahead)
        tensors, norms = on_host.tensors, on_host.norms
        assert list(tensors) == list(norms) == names
        assert all(torch.equal(tensors[n], t) for n, t in total.items())
        for name, norm_K in norms.items():
            assert torch.equal(torch.linalg.vector_norm(norm_K), norm_of_pieces([total[name]]))
        on_host.clear()
        assert on_host.tensors == {}
        assert not on_host._ahead
    assert 80 < most <= 80 + 80 + 40  # both windows, and the piece that fills one


def sleeper(*, offload: bool = False) -> tuple[Policy, ParameterOptimizer]:
    policy = Policy(tiny_model(dtype=torch.bfloat16), offload_optimizer=offload)
    optimizer = ParameterOptimizer(
        policy.masters,
        OptimizerConfig(lr=0.01),
        policy.embedding_names,
        offload=offload,
        write_back=policy.write_back if offload else None,
    )
    return policy, optimizer


def step(policy: Policy, optimizer: ParameterOptimizer, seed: int) -> None:
    give_gradients(policy, seed)
    apply(policy, optimizer)


def apply(policy: Policy, optimizer: ParameterOptimizer) -> None:
    policy.apply(lambda: optimizer.step(policy.gradients, 1.0))
    policy.drop_gradient()


def give_gradients(policy: Policy, seed: int) -> None:
    """As backward does, through the hooks."""
    generator = torch.Generator().manual_seed(seed)
    loss = sum((p * torch.randn(p.shape, generator=generator)).sum() for p in parameters(policy))
    assert isinstance(loss, Tensor)
    loss.backward()


def parameters(policy: Policy) -> list[nn.Parameter]:
    return list(policy.parameters.values())


def held_bytes(policy: Policy, optimizer: ParameterOptimizer) -> int:
    tensors = [*policy._masters.values(), *optimizer.device_tensors(), *policy.gradients.values()]
    return sum(t.untyped_storage().nbytes() for t in tensors)


@pytest.mark.parametrize("offloaded", [False, True])
def test_R14_sleep_and_wake_change_no_number(offloaded: bool):
    awake, awake_optimizer = sleeper(offload=offloaded)
    policy, optimizer = sleeper(offload=offloaded)
    weights = [p.data_ptr() for p in parameters(policy)]
    for seed in range(5):
        step(awake, awake_optimizer, seed)
        give_gradients(policy, seed)
        held = held_bytes(policy, optimizer)
        policy.sleep(optimizer.device_tensors())
        if not offloaded:
            assert held > 0
            assert held_bytes(policy, optimizer) == 0
            with pytest.raises(RuntimeError, match="the policy sleeps"):
                policy.apply(lambda: None)
        policy.wake()
        assert held_bytes(policy, optimizer) == held
        apply(policy, optimizer)
    assert weights == [p.data_ptr() for p in parameters(policy)]
    for name, master in awake.masters.items():
        assert torch.equal(master, policy.masters[name]), name
        assert torch.equal(awake.parameters[name], policy.parameters[name]), name


def test_sleep_leaves_what_lies_on_the_host_for_good():
    trainer = make_trainer(tiny_model(dtype=torch.bfloat16), **AWAY)
    rows = random_rows(4)
    trainer.update(rows)
    trainer.forward_backward(rows)
    expected = {n: g.clone() for n, g in trainer.policy.gradients.items()}
    trainer.sleep()
    trainer.wake()
    assert all(torch.equal(g, expected[n]) for n, g in trainer.policy.gradients.items())


def test_R16_host_memory_is_flat_over_200_sleeps():
    policy, optimizer = sleeper()
    step(policy, optimizer, 0)
    process = psutil.Process()
    rss: list[int] = []
    addresses: set[int] = set()
    for _ in range(200):
        policy.sleep(optimizer.device_tensors())
        policy.wake()
        gc.collect(0)
        assert policy._state_offload is not None
        addresses.add(policy._state_offload._hosts[0].data_ptr())
        rss.append(process.memory_info().rss)
    assert len(addresses) == 1
    # The state has 230 kB. One huge page, which the system may make at any time, has 2 MiB.
    assert min(rss[-20:]) - min(rss[30:50]) < 4 * 2**20


def test_a_failed_wake_stays_asleep_and_succeeds_later(monkeypatch: pytest.MonkeyPatch):
    policy, optimizer = sleeper()
    step(policy, optimizer, 0)
    before = {n: m.detach().clone() for n, m in policy.masters.items()}
    policy.sleep(optimizer.device_tensors())
    storages = [storage for storage, _ in policy._state_offload._away]

    class Full:
        """A storage on a device that has no room left."""

        def __init__(self, storage: torch.UntypedStorage) -> None:
            self.device, self.storage = storage.device, storage

        def resize_(self, size: int) -> None:
            if size:
                raise torch.OutOfMemoryError("no room")

    away: Any = policy._state_offload._away
    away[-1] = (Full(away[-1][0]), away[-1][1])
    with pytest.raises(torch.OutOfMemoryError):
        policy.wake()
    assert all(s.nbytes() == 0 for s in storages)
    away[-1] = (away[-1][0].storage, away[-1][1])
    policy.wake()
    assert all(torch.equal(policy.masters[n], m) for n, m in before.items())


def test_planted_sleep_that_brings_back_other_bytes_is_caught(monkeypatch: pytest.MonkeyPatch):
    class Shifted(StateOffload):
        def restore(self) -> None:
            hosts = [host for _, host in self._away]
            for host in hosts:
                host[:1].add_(1)
            super().restore()

    monkeypatch.setattr("hone.trainer.offload.StateOffload", Shifted)
    with pytest.raises(AssertionError):
        test_R14_sleep_and_wake_change_no_number(False)


def test_a_bucket_that_does_not_come_back_is_caught(monkeypatch: pytest.MonkeyPatch):
    copy_all = offload._copy_all
    calls = iter(range(1_000_000))
    monkeypatch.setattr(
        offload, "_copy_all", lambda a, b: copy_all(a, b) if next(calls) % 2 == 0 else None
    )
    with pytest.raises(AssertionError):
        test_buckets_are_changed_on_the_device_and_come_back()
