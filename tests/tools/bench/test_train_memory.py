"""From a record of allocations to kinds of memory: by hand, and of a small model of torch."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from hone.tools.bench.train_memory import (
    KINDS,
    Event,
    Marks,
    MemoryProbe,
    Storages,
    existing_tensors,
    play,
)

CPU = torch.device("cpu")


def record(*events):
    """Each event at the next time; addresses stand for themselves."""
    return [Event(time, address, size) for time, (address, size) in enumerate(events)]


def held(**kinds):
    found = Storages()
    for address, (kind, size) in enumerate(kinds.values(), start=100):
        found.kinds[address], found.num_bytes[address] = kind, size
    return found


def test_a_step_by_hand():
    events = record(
        (1, 10),  # 0: kept by the first forward
        (2, 5),  # 1: not kept
        (2, -5),  # 2
        (3, 40),  # 3: logits
        (3, -40),  # 4
        (4, 7),  # 5: a gradient
        (1, -10),  # 6
        (1, 20),  # 7: kept by the second forward, at the same address
        (5, 30),  # 8: in its backward
        (1, -20),  # 9
        (5, -30),  # 10
        (6, 3),  # 11: the optimizer's
        (4, -7),  # 12
        (6, -3),  # 13
    )
    marks = Marks(gradients={4}, forwards=[(0, 2), (7, 7)], passes_end=10)
    found = play(
        events, storages=held(a=("weights", 100), b=("optimizer", 200)), base=310, marks=marks
    )
    # Weights 100, optimizer 200, 10 unknown; then 7 of gradient, 20 kept and 30 computed with.
    assert found.peak == 310 + 7 + 20 + 30
    assert found.phase == "backward"
    assert found.at_peak == {
        "weights": 100, "masters": 0, "gradients": 7, "optimizer": 200, "activations": 20,
        "other": 40,
    }  # fmt: skip
    assert found.largest["activations"] == 20
    assert found.largest["other"] == 50  # the logits beside what was unknown


def test_a_peak_in_the_optimizer():
    marks = Marks(gradients=set(), forwards=[(0, 0)], passes_end=1)
    events = record((1, 10), (1, -10), (2, 50), (2, -50))
    found = play(events, storages=held(a=("masters", 5)), base=5, marks=marks)
    assert (found.peak, found.phase) == (55, "optimizer")
    assert found.at_peak["other"] == 50
    assert found.at_peak["activations"] == 0


def test_gathered_weights_are_weights():
    gathered = held()
    gathered.kinds[7] = "weights"
    marks = Marks(gradients=set(), forwards=[(0, 1)], passes_end=9)
    events = record((7, 30), (8, 4), (7, -30), (8, -4))
    found = play(events, storages=gathered, base=0, marks=marks)
    assert found.largest["weights"] == 30
    assert found.largest["activations"] == 4


def test_a_block_at_a_gradients_address_that_is_gone_before_the_end_is_none():
    marks = Marks(gradients={4}, forwards=[(0, 0)], passes_end=5)
    events = record((1, 1), (4, 9), (4, -9), (4, 6))
    found = play(events, storages=held(), base=0, marks=marks)
    assert found.largest["gradients"] == 6
    assert found.largest["other"] == 9


def test_a_block_that_was_given_back_unseen_does_not_count_beside_the_next():
    marks = Marks(gradients={7}, forwards=[(0, 0)], passes_end=4)
    found = play(record((9, 1), (7, 5), (7, 30)), storages=held(), base=0, marks=marks)
    assert found.largest["gradients"] == 30
    assert found.peak == 31


def test_memory_nobody_had_counted_may_be_given_back():
    marks = Marks(gradients=set(), forwards=[], passes_end=0)
    found = play(record((55, -10), (1, 4)), storages=held(), base=0, marks=marks)
    assert found.peak == 4
    assert found.at_peak["other"] == 4


def test_masters_that_compute_are_weights():
    wide = [nn.Parameter(torch.zeros(8))]
    narrow = [nn.Parameter(torch.zeros(8, dtype=torch.bfloat16))]
    moment = torch.zeros(4)
    same = existing_tensors(
        weights=[*wide, *wide], masters=wide, moments=[moment], dtype=torch.float32, device=CPU
    )
    assert [same.total(kind) for kind in KINDS] == [32, 0, 0, 16, 0, 0]
    apart = existing_tensors(
        weights=narrow, masters=wide, moments=[], dtype=torch.bfloat16, device=CPU
    )
    assert [apart.total(kind) for kind in KINDS] == [16, 32, 0, 0, 0, 0]


@pytest.mark.parametrize("num_passes", [1, 3])
def test_a_network_of_torch(num_passes):
    """Two layers of known sizes: what forward keeps is both inputs of products but the first, which
    exists before; ReLU keeps its result, which is the second's input."""
    width, batch = 64, 512
    layers = nn.Sequential(nn.Linear(width, width, bias=False), nn.ReLU(), nn.Linear(width, 1))
    x = torch.randn(batch, width)
    parameters = list(layers.parameters())
    probe = MemoryProbe(CPU)

    def step():
        with probe.passes(lambda: [p.grad for p in parameters if p.grad is not None]):
            for _ in range(num_passes):
                with probe.forward(layers.parameters):
                    y = layers(x)
                y.sum().backward()
                del y
        work = torch.zeros(8, batch, width)  # an optimizer that needs much
        del work
        layers.zero_grad(set_to_none=True)

    found = probe.measure(
        step,
        existing_tensors(
            weights=parameters, masters=parameters, moments=[], dtype=torch.float32, device=CPU
        ),
    )
    weights = 4 * sum(p.numel() for p in parameters)
    activations = 4 * batch * (width + 1)  # and the result itself
    assert found.at_peak["weights"] == found.largest["weights"] == weights
    assert found.largest["gradients"] == weights
    assert found.largest["activations"] == activations
    assert found.phase == "optimizer"
    assert found.at_peak["other"] == 8 * 4 * batch * width
    assert found.peak == sum(found.at_peak.values()) == 2 * weights + 8 * 4 * batch * width
    assert found.host == 0
