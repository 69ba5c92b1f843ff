from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from hone.attention import PackedContext
from hone.models.adapters import adapt
from hone.models.decoder import alias_module, hidden_states
from hone.models.settings import LoraConfig
from hone.trainer import recompute
from hone.trainer.offload import ActivationOffload
from hone.trainer.recompute import apply_recompute
from hone.trainer.settings import SFTTrainerConfig
from tests.planner.memory_cases import EXPERTS, ON_EXPERTS, ON_EXPERTS_4BIT
from tests.tables import table
from tests.trainer.examples import VOCAB, make_trainer, tiny_model

LENGTHS = (5, 1, 11, 7)
NUM_LAYERS = 4


def layers_of(model: PreTrainedModel) -> nn.ModuleList:
    return model.base_model.layers


def model_with(mode: Any, dtype: torch.dtype = torch.float32, **settings: Any) -> PreTrainedModel:
    model = tiny_model(dtype=dtype, num_hidden_layers=NUM_LAYERS)
    apply_recompute(layers_of(model), configured(mode, **settings))
    return model


def configured(mode: Any, *, every: int = 1, offload: bool = False) -> SFTTrainerConfig:
    return SFTTrainerConfig(
        recompute=mode, recompute_every_n_layers=every, offload_activations=offload
    )


def loss_of(model: PreTrainedModel, lengths: tuple[int, ...] = LENGTHS, *, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(VOCAB, (sum(lengths),), generator=generator)
    positions = torch.cat([torch.arange(n) for n in lengths])
    hidden_TD = hidden_states(model, ids, positions, PackedContext.from_lengths(lengths))
    return (hidden_TD.float() * torch.randn(hidden_TD.shape, generator=generator)).sum()


def gradients_of(model: PreTrainedModel, **which: Any) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    loss_of(model, **which).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def assert_same_bits(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert got.keys() == expected.keys()
    different = [name for name, value in expected.items() if not torch.equal(got[name], value)]
    assert not different, different


class CountedProducts(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


@table("dtype", [torch.float32, torch.bfloat16])
@table("mode", ["selective", "full"])
@table("every, offload", [(1, False), (1, True), (2, True), (3, False)])
def test_gradients_have_the_bits_of_a_pass_that_keeps_all(
    mode: str, every: int, offload: bool, dtype: torch.dtype
):
    expected = gradients_of(model_with("off", dtype))
    model = model_with(mode, dtype, every=every, offload=offload)
    for _ in range(2):
        assert_same_bits(gradients_of(model), expected)


@table("offload", [False, True])
@table("mode", ["uniform:2", "uniform:3", "uniform:9", "block:3", "block:9"])
def test_methods_have_the_bits_of_a_pass_that_keeps_all(mode: str, offload: bool):
    for family in ("qwen3", "gemma3_text"):
        fields = {"num_hidden_layers": NUM_LAYERS} | (
            {"sliding_window": 4, "query_pre_attn_scalar": 8} if family != "qwen3" else {}
        )
        model = tiny_model(family, dtype=torch.bfloat16, **fields)
        expected = gradients_of(model)
        apply_recompute(layers_of(model), configured(mode, offload=offload))
        for _ in range(2):
            assert_same_bits(gradients_of(model), expected)


@table(
    "mode, spans",
    [
        ("off", []),
        ("full", [(0,), (1,), (2,), (3,)]),
        ("uniform:1", [(0,), (1,), (2,), (3,)]),
        ("uniform:2", [(0, 1), (2, 3)]),
        ("uniform:3", [(0, 1, 2), (3,)]),
        ("uniform:9", [(0, 1, 2, 3)]),
        ("block:3", [(0,), (1,), (2,)]),
        ("block:9", [(0,), (1,), (2,), (3,)]),
    ],
)
def test_spans_keep_the_input_of_their_first_layer(mode: str, spans: list[tuple[int, ...]]):
    assert [tuple(span) for span in configured(mode).recomputed_spans(NUM_LAYERS)] == spans
    kept: list[tuple[int, ...]] = []
    model = model_with(mode)
    watched = torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(tuple(x.shape)) or x, lambda x: x
    )
    repeated = backward_counts(mode)["rsqrt"] - backward_counts("off")["rsqrt"]
    assert repeated == 4 * sum(map(len, spans))
    with watched:
        loss_of(model)
    if sum(map(len, spans)) == NUM_LAYERS:  # else plain layers keep more of that shape
        assert kept.count((1, sum(LENGTHS), 32)) == len(spans) + 3, "and the final norm's"


def test_a_pass_that_fails_midway_leaves_nothing_for_the_next(monkeypatch: pytest.MonkeyPatch):
    model = model_with("uniform:4")
    expected = gradients_of(model_with("off"))

    def fail(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError("planted")

    for number in (0, 2, 3):
        with monkeypatch.context() as patched:
            patched.setattr(layers_of(model)[number], "_gradient_checkpointing_func", fail)
            with pytest.raises(torch.OutOfMemoryError):
                loss_of(model)
        assert_same_bits(gradients_of(model), expected)


@pytest.mark.slow
def test_compiled_layers_recompute_the_same_bits():
    results: list[dict[str, Tensor]] = []
    for mode, offload in (
        ("off", False),
        ("selective", True),
        ("full", False),
        ("uniform:2", False),
    ):
        torch._dynamo.reset()
        model = tiny_model(num_hidden_layers=2)
        apply_recompute(layers_of(model), configured(mode, offload=offload))
        for layer in layers_of(model):
            layer.compile(backend="aot_eager", dynamic=True)
        gradients_of(model, lengths=(3, 4, 9), seed=1)
        results.append(gradients_of(model))
    for result in results[1:]:
        assert_same_bits(result, results[0])


def backward_counts(mode: str, **settings: Any) -> Counter[str]:
    loss = loss_of(model_with(mode, **settings))
    with CountedProducts() as counted:
        loss.backward()
    return counted.counts


def test_selective_repeats_no_product_and_full_repeats_every_layer_that_it_is_asked_to():
    """A layer has seven linear maps; the last one's result is not needed again."""
    off, selective = backward_counts("off"), backward_counts("selective")
    assert selective["mm"] == off["mm"]
    assert selective["rsqrt"] == off["rsqrt"] + 4 * NUM_LAYERS  # the norms are repeated
    for every, num_layers in ((1, 4), (2, 2), (3, 2), (4, 1)):
        full = backward_counts("full", every=every)
        assert full["mm"] - off["mm"] in (6 * num_layers, 7 * num_layers)
        assert full["rsqrt"] == off["rsqrt"] + 4 * num_layers


@table("lora", [LoraConfig(), ON_EXPERTS, ON_EXPERTS_4BIT])
def test_selective_repeats_no_product_of_experts_but_in_layers_that_are_compiled(lora: LoraConfig):
    def counted(mode: str, *, are_compiled: bool = False) -> Counter[str]:
        model = tiny_model(dtype=torch.bfloat16, **EXPERTS)
        if lora.rank:
            adapt(model, lora, seed=0)
        apply_recompute(layers_of(model), configured(mode), are_compiled=are_compiled)
        loss = loss_of(model)
        with CountedProducts() as found:
            loss.backward()
        gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
        assert_same_bits(gradients, expected.setdefault("all kept", gradients))
        return found.counts

    expected: dict[str, Any] = {}
    off, selective, full = map(counted, ("off", "selective", "full"))
    assert selective["_grouped_mm"] == off["_grouped_mm"] < full["_grouped_mm"]
    assert selective["topk"] == full["topk"] == 1
    assert counted("selective", are_compiled=True)["_grouped_mm"] == full["_grouped_mm"]


def test_no_dropout_is_switched_on():
    model = model_with("full", every=2)
    training = {name for name, module in model.named_modules() if module.training}
    assert training == {"model.layers.0", "model.layers.2"}


def test_a_second_module_over_the_weights_keeps_all():
    model = model_with("full", offload=True)
    alias = alias_module(model)
    assert not any(module.training for module in alias.modules())
    assert_same_bits(gradients_of(alias), gradients_of(model))


def test_passes_without_gradient_keep_nothing(monkeypatch: pytest.MonkeyPatch):
    model = model_with("full", offload=True)
    monkeypatch.setattr(recompute, "checkpoint", None)
    with torch.no_grad():
        loss_of(model)


def test_layers_that_cannot_recompute_are_refused():
    with pytest.raises(ValueError, match="Linear is no GradientCheckpointingLayer"):
        apply_recompute(nn.ModuleList([nn.Linear(2, 2)]), configured("full"))


def test_the_trainer_passes_its_settings_on():
    model = tiny_model(num_hidden_layers=NUM_LAYERS)
    make_trainer(model, recompute="full", recompute_every_n_layers=2)
    assert [layer.training for layer in layers_of(model)] == [True, False, True, False]


def with_offload(monkeypatch: pytest.MonkeyPatch, cls: type[ActivationOffload]) -> Any:
    made: list[ActivationOffload] = []

    def make() -> ActivationOffload:
        made.append(cls())
        return made[-1]

    monkeypatch.setattr("hone.trainer.offload.ActivationOffload", make)
    model = model_with("full", offload=True)
    return model, made[0]


def test_R16_host_buffers_are_reused_over_micro_batches_of_any_size(
    monkeypatch: pytest.MonkeyPatch,
):
    model, offload = with_offload(monkeypatch, ActivationOffload)
    for seed in range(30):
        generator = torch.Generator().manual_seed(seed)
        lengths = tuple(torch.randint(1, 30, (3,), generator=generator).tolist())
        gradients_of(model, lengths=lengths, seed=seed)
        if seed % 5 == 0:
            loss_of(model, lengths)  # a forward whose backward never comes
    assert offload.num_buffers <= NUM_LAYERS + 1
    assert len(offload._free) >= NUM_LAYERS - 1


def test_only_layer_inputs_go_to_the_host(monkeypatch: pytest.MonkeyPatch):
    shapes: list[tuple[int, ...]] = []

    class Watched(ActivationOffload):
        def _keep(self, tensor: Tensor) -> Any:
            if tensor.numel():
                shapes.append(tuple(tensor.shape))
            return super()._keep(tensor)

    model, _ = with_offload(monkeypatch, Watched)
    gradients_of(model)
    assert shapes == [(1, sum(LENGTHS), 32)] * NUM_LAYERS


def test_empty_tensors_take_no_buffer():
    """torch 2.11 saves one for each recomputed layer; the order of the others must not change."""
    offload = ActivationOffload()
    values = torch.randn(3, dtype=torch.float64, requires_grad=True)
    with offload.hooks():
        nothing = torch.empty(0, dtype=torch.float64, requires_grad=True)
        total = values.exp().sum() + (nothing * nothing).sum()
    assert offload.num_buffers == 1
    total.backward()
    assert torch.equal(values.grad, values.detach().exp())
    assert nothing.grad.shape == (0,)


class StalePrefetch(ActivationOffload):
    """Hands out what was fetched for another layer."""

    def _start(self, kept: Any) -> None:
        if kept.incoming is None:
            super()._start(kept)
            stale, self.fetched = getattr(self, "fetched", kept.incoming), kept.incoming
            kept.incoming = stale


class EarlyReuse(ActivationOffload):
    """Takes a buffer that is still needed."""

    def _keep(self, tensor: Tensor) -> Any:
        kept = super()._keep(tensor)
        if isinstance(kept, Tensor):
            return kept
        self._free.append(kept.host.detach().view(-1).view(torch.uint8))
        return kept


@pytest.mark.parametrize("planted", [StalePrefetch, EarlyReuse])
def test_planted_stale_buffers_are_caught(
    planted: type[ActivationOffload], monkeypatch: pytest.MonkeyPatch
):
    model, _ = with_offload(monkeypatch, planted)
    with pytest.raises(AssertionError):
        assert_same_bits(gradients_of(model), gradients_of(model_with("off")))
