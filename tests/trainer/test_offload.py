from __future__ import annotations

import gc
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from hone.cli.command import plan_here
from hone.config.errors import UserError
from hone.config.rules import Finding, findings
from hone.config.trainer import OptimizerConfig
from hone.config.tree import RLConfig
from hone.trainer import host_state, offload
from hone.trainer.host_state import HostMasters, StreamedGradients, norm_of_pieces
from hone.trainer.offload import Bucket, HostBuffer, StateOffload, stream_buckets
from hone.trainer.policy import Policy
from hone.trainer.update_rules import ParameterOptimizer
from tests.trainer.examples import make_trainer, random_rows, tiny_model

CPU = torch.device("cpu")
AWAY: dict[str, Any] = {"offload_optimizer": True, "offload_gradients": True}


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


def test_tensors_of_a_buffer_do_not_overlap():
    layout = [(torch.Size([5]), torch.float32), (torch.Size([3, 3]), torch.bfloat16)]
    first, second = HostBuffer.for_layout(layout, CPU, purpose="test").tensors(layout)
    first.fill_(1)
    second.fill_(2)
    assert bool((first == 1).all())
    assert second.shape == (3, 3)


def test_too_little_host_memory_is_said_before_it_is_taken():
    free = psutil.virtual_memory().available
    with pytest.raises(UserError, match=r"masters: this takes .* GiB of host memory, and .* free"):
        HostBuffer(2 * free, CPU, purpose="masters")


def test_host_masters_are_float32_copies_and_their_gradients_add_up_in_float32():
    weights = {"a": torch.randn(4, 3).bfloat16(), "b": torch.randn(7).bfloat16()}
    host = HostMasters.copied(weights, CPU)
    gradients = [torch.randn(4, 3).bfloat16() for _ in range(3)]
    for gradient in gradients:
        host.add_gradient("a", gradient)
    total = gradients[0].float() + gradients[1].float() + gradients[2].float()
    assert torch.equal(host.gradients["a"], total)
    assert "b" not in host.gradients
    for name, weight in weights.items():
        assert host.masters[name].dtype == torch.float32
        assert torch.equal(host.masters[name], weight.float())


@pytest.mark.parametrize("seed", range(3))
def test_streamed_gradients_are_those_added_up_on_the_device(
    seed: int, monkeypatch: pytest.MonkeyPatch
):
    """Pieces that do not fit, parameters that come late, never or in another order."""
    monkeypatch.setattr(host_state, "_PIECE_ELEMENTS", 10)
    monkeypatch.setattr(host_state, "BUCKET_BYTES", 64)
    generator = torch.Generator().manual_seed(seed)
    names = [f"p{i}" for i in range(6)]
    shapes = dict(zip(names, [(5, 7), (3,), (11, 1), (0, 4), (40,), (2, 2)], strict=True))
    like = {name: torch.zeros(shape) for name, shape in shapes.items()}
    streamed = StreamedGradients(like, CPU, window_bytes=80)
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
                streamed.add(name, gradient)
                held = total.get(name)
                total[name] = gradient.float() if held is None else held.add_(gradient)
                ahead = sum(value.nbytes for value, _ in streamed._ahead.values())
                most = max(most, streamed._bytes_leaving + ahead)
        tensors, norms = streamed.tensors, streamed.norms
        assert list(tensors) == list(norms) == names
        assert all(torch.equal(tensors[n], t) for n, t in total.items())
        for name, norm_K in norms.items():
            assert torch.equal(torch.linalg.vector_norm(norm_K), norm_of_pieces([total[name]]))
        streamed.scale = torch.tensor(0.5)
        streamed.clear()
        assert streamed.tensors == {}
        assert streamed.scale is None
        assert not streamed._ahead
    assert 80 < most <= 80 + 80 + 40  # both windows, and the piece that fills one


def sleeper(*, offload: bool = False) -> tuple[Policy, ParameterOptimizer]:
    policy = Policy(tiny_model(dtype=torch.bfloat16), offload_optimizer=offload)
    optimizer = ParameterOptimizer(
        policy.masters,
        OptimizerConfig(lr=0.01),
        policy.embedding_names,
        offload=offload,
        host_masters=policy.host_masters,
    )
    return policy, optimizer


def step(policy: Policy, optimizer: ParameterOptimizer, seed: int) -> None:
    give_gradients(policy, seed)
    policy.apply(lambda: optimizer.step(1.0))


def give_gradients(policy: Policy, seed: int) -> None:
    """As backward does, through the hooks."""
    generator = torch.Generator().manual_seed(seed)
    loss = sum((p * torch.randn(p.shape, generator=generator)).sum() for p in parameters(policy))
    assert isinstance(loss, Tensor)
    loss.backward()


def parameters(policy: Policy) -> list[nn.Parameter]:
    return list(policy.parameters.values())


def held_bytes(policy: Policy, optimizer: ParameterOptimizer) -> int:
    tensors = [*policy._masters.values(), *optimizer.device_tensors()]
    tensors += [p.grad for p in policy._masters.values() if p.grad is not None]
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
        policy.apply(lambda: optimizer.step(1.0))
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
    sleeping = AWAY | {"enable_sleep": True}
    cfg = RLConfig.model_validate(
        {"model": {"path": "."}, "data": {"train": []}, "trainer": sleeping}
    )
    (finding,) = [x for x in findings(plan_here(cfg, 1)) if "trainer.enable_sleep" in x.keys]
    assert finding.level == "error"
    assert "nothing is left to move" in finding.message


def test_R16_host_memory_is_flat_over_200_sleeps():
    policy, optimizer = sleeper()
    step(policy, optimizer, 0)
    process, parking = psutil.Process(), policy._state_offload
    rss: list[int] = []
    addresses: set[int] = set()
    for _ in range(200):
        policy.sleep(optimizer.device_tensors())
        policy.wake()
        gc.collect(0)
        assert parking._buffer is not None
        addresses.add(parking._buffer.bytes.data_ptr())
        rss.append(process.memory_info().rss)
    assert len(addresses) == 1
    assert rss[-1] - rss[50] < 1.5 * 2**20


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

    monkeypatch.setattr("hone.trainer.policy.StateOffload", Shifted)
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


@pytest.mark.parametrize(
    ("settings", "exact", "device", "level", "keys"),
    [
        ({"offload_activations": True}, False, "auto", "error", "offload_activations recompute"),
        ({"recompute_every_n_layers": 2}, False, "auto", "warning", "recompute_every_n_layers"),
        ({"recompute": "selective"}, True, "auto", "error", "recompute model.exact"),
        (
            {"recompute": "full", "recompute_every_n_layers": 2},
            True,
            "auto",
            "error",
            "recompute_every_n_layers model.exact",
        ),
        ({"offload_optimizer": True}, False, "cpu", "warning", "offload_optimizer run.device"),
        ({"offload_gradients": True}, False, "auto", "error", "offload_optimizer is off"),
        (
            {"offload_optimizer": True, "offload_parameters": True},
            False,
            "auto",
            "error",
            "offload_gradients is off",
        ),
        (
            {"offload_gradients": True, "optimizer": {"name": "muon"}},
            False,
            "auto",
            "error",
            "multiplies whole momentum matrices",
        ),
        (AWAY | {"offload_parameters": True}, True, "auto", "error", "model.exact"),
        (
            AWAY | {"offload_parameters": True, "parallel": {"zero_stage": 2}, "world_size": 2},
            False,
            "auto",
            "error",
            "zero_stage to 3",
        ),
        (
            AWAY | {"offload_parameters": True, "world_size": 1},
            False,
            "auto",
            "error",
            "offload_parameters --nproc",
        ),
    ],
)
def test_combinations_that_cannot_be_meant_are_told(
    settings: dict[str, Any], exact: bool, device: str, level: str, keys: str
):
    world_size = settings.get("world_size")
    trainer = {key: value for key, value in settings.items() if key != "world_size"}
    (finding,) = told_of(trainer, exact=exact, device=device, world_size=world_size)
    assert finding.level == level
    assert all(key in finding.message for key in (*keys.split(), *finding.keys))


@pytest.mark.parametrize(
    "settings",
    [
        {"recompute": "full", "recompute_every_n_layers": 2, "offload_activations": True},
        {"recompute": "selective", "offload_optimizer": True},
        AWAY | {"offload_parameters": True, "parallel": {"zero_stage": 3}},
        {},
    ],
)
def test_good_combinations_are_silent(settings: dict[str, Any]):
    assert told_of(settings, exact=False, device="auto") == []


def told_of(
    trainer: dict[str, Any], *, exact: bool, device: str, world_size: int | None = None
) -> list[Finding]:
    """What the rules say of the settings of a trainer."""
    model = {"path": ".", "exact": exact}
    cfg = RLConfig.model_validate(
        {"run": {"device": device}, "model": model, "data": {"train": []}, "trainer": trainer}
    )
    found = findings(plan_here(cfg, world_size))
    memory = ("trainer.offload", "trainer.recompute")
    return [x for x in found if any(key.startswith(memory) for key in x.keys)]
