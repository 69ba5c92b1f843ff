"""Context parallelism against one process: four processes run all cases, these tests judge them."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

from hone.distributed.mesh import Axis, Mesh
from hone.distributed.settings import AxisSizes
from hone.model_input import Content, InputSpec, ModelInput
from hone.trainer.collating import collate
from hone.trainer.context import ContextShard, gather, split
from hone.types import Row
from tests.ranks import run_ranks
from tests.trainer.context_ranks import MESHES, RINGS, WORLD, bare, uneven_rows

LOGPROBS, GRADIENTS = 1e-5, 1e-4


@pytest.fixture(scope="module")
def results():
    return run_ranks("tests.trainer.context_ranks", WORLD)


def beyond(results, prefix, forward, backward):
    """Cases under `prefix` whose errors are larger."""
    cases = {name: pair for name, pair in results.items() if name.startswith(prefix)}
    assert cases
    return {n: pair for n, pair in cases.items() if not (pair[0] < forward and pair[1] < backward)}


@pytest.mark.slow
def test_R8_context_parallelism_gives_the_numbers_of_one_process(results):
    for mesh in MESHES:
        assert not beyond(results, f"attention/{mesh}/", 1e-12, 1e-12)
        assert not beyond(results, f"float32/{mesh}", LOGPROBS, GRADIENTS)
        assert not beyond(results, f"model/{mesh}/", LOGPROBS, GRADIENTS)
        # R7: no row's tokens move another's log-probs, not by a bit.
        assert results[f"isolation/{mesh}"] == 0
    assert len(results) > 120
    # Planted bugs of the ring, which the same comparison must see.
    assert RINGS
    assert not beyond(results, "planted/none", LOGPROBS, GRADIENTS)
    for bug in ("chunk order", "no rescaling", "whole chunks", "one token more", "positions"):
        forward, backward = results[f"planted/{bug}"]
        assert forward > 0.1, bug
        assert backward > 0.1, bug
    assert results["planted/whole chunks leak"] > 0.1
    assert results["planted/one token more leaks"] > 0.1
    assert results["planted/summed gradient"][1] == pytest.approx(WORLD - 1, rel=1e-3)


def alone_as(rank, *, ring=1, ulysses=1):
    """The mesh of one rank, as far as `split` looks at it: no group."""
    return Mesh(
        device=torch.device("cpu"),
        sizes=AxisSizes(ring=ring, ulysses=ulysses),
        context=Axis(rank, ring * ulysses),
        ring=Axis(rank // ulysses, ring),
        ulysses=Axis(rank % ulysses, ulysses),
    )


@pytest.mark.parametrize(("ring", "ulysses"), [(1, 1), (2, 1), (1, 3), (4, 1), (2, 3), (3, 2)])
@pytest.mark.parametrize("number", [1, 2, 9])
def test_shares_hold_every_token_once(ring, ulysses, number):
    rows = [*uneven_rows(number, seed=number), bare("short", [5, 6], [False, True])]
    batch = collate(rows, [1.0] * len(rows), "cpu")
    found, trained, lengths = [], [], set()
    for rank in range(ring * ulysses):
        share = split(batch, alone_as(rank, ring=ring, ulysses=ulysses))
        ids, positions = share.input_ids, share.position_ids
        assert len(ids) == len(positions) == share.context.num_tokens
        lengths.add(len(ids))
        found += zip(positions.tolist(), ids.tolist(), strict=True)
        predicted_at = positions[share.predict_index]
        trained += zip(predicted_at.tolist(), share.labels.tolist(), strict=True)
        own = share.others.own if isinstance(share, ContextShard) else slice(None)
        assert torch.equal(share.labels, batch.labels[own])
        assert torch.equal(predicted_at, batch.position_ids[batch.predict_index][own])
    assert len(lengths) == 1
    padding = len(found) - batch.num_tokens
    assert 0 <= padding < 2 * ring * ulysses
    expected = [*zip(batch.position_ids.tolist(), batch.input_ids.tolist(), strict=True)]
    assert sorted(found) == sorted(expected + [(p, 0) for p in range(padding)])
    assert len(trained) == len(batch.labels)


@pytest.mark.parametrize(("ring", "ulysses"), [(2, 1), (1, 3), (2, 2)])
def test_gathered_values_and_their_gradients_are_those_of_one_process(ring, ulysses, monkeypatch):
    """Every rank computes the same objective of what is gathered, and has its own tokens' part of
    the gradient once. The ranks take turns here, with what the others would send worked out."""
    batch = collate(uneven_rows(5, seed=1), [1.0] * 5, "cpu")
    meshes = [alone_as(rank, ring=ring, ulysses=ulysses) for rank in range(ring * ulysses)]
    shares = [split(batch, mesh) for mesh in meshes]
    values_N2 = torch.randn(len(batch.labels), 2, dtype=torch.float64, requires_grad=True)
    coefficients_N2 = torch.randn_like(values_N2)

    def all_gather(received, sent, group):
        for share, part in zip(shares, received, strict=True):
            own = values_N2.detach()[share.others.own]
            part.copy_(F.pad(own, (0, 0, 0, len(sent) - len(own))))

    monkeypatch.setattr(dist, "all_gather", all_gather)
    monkeypatch.setattr(dist, "all_reduce", lambda x, **_: x.mul_(len(shares)))
    (expected,) = torch.autograd.grad((values_N2**2 * coefficients_N2).sum(), values_N2)
    found = torch.zeros_like(expected)
    for share in shares:
        values_n2 = values_N2.detach()[share.others.own].requires_grad_()
        gathered = gather(values_n2, share)
        assert torch.equal(gathered, values_N2)
        (gathered**2 * coefficients_N2).sum().backward()
        found[share.others.own] += values_n2.grad
    assert torch.equal(found, expected)


def test_one_rank_has_the_batch_itself():
    batch = collate(uneven_rows(3, seed=0), [1.0] * 3, "cpu")
    share = split(batch, Mesh.alone("cpu"))
    assert torch.equal(share.input_ids, batch.input_ids)
    assert share.context.parallel is None
    assert share.context.lengths == batch.lengths
    values = torch.randn(len(batch.labels), requires_grad=True)
    assert gather(values, share) is values


def test_images_seen_in_both_directions_are_refused():
    image = Content(kind="image", hash="a", start=1, num_tokens=3)
    row = Row(
        id="picture",
        token_ids=[1, 2, 3, 4, 5],
        loss_mask=[False] * 4 + [True],
        model_input=ModelInput((image,)),
    )
    inputs = InputSpec(kinds=frozenset({"image"}), attends_within=True)
    batch = collate([row], [1.0], "cpu", inputs=inputs)
    with pytest.raises(ValueError, match=r"rows picture.*parallel.ring_size"):
        split(batch, alone_as(0, ring=2))


def test_a_batch_on_a_device_is_refused():
    batch = collate(uneven_rows(2, seed=0), [1.0] * 2, "meta")
    with pytest.raises(ValueError, match="on meta cannot be split"):
        split(batch, alone_as(0, ring=2))
