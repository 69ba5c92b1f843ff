"""Steps over gradients that lie on the host: the bits of steps without."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel

from hone.models.adapters import adapt
from hone.models.settings import LoraConfig
from hone.observe.metrics import to_scalars
from hone.trainer import host_gradients, pieces, update_rules
from hone.trainer.host_gradients import HostGradients
from hone.trainer.policy import NonFiniteError
from hone.trainer.trainer import Trainer
from tests.tables import table
from tests.trainer.examples import make_trainer, random_rows, tiny_model

GRADIENTS = {"offload": "gradients"}
ROWS = random_rows(7)


def model_of(*, lora: LoraConfig | None = None, **fields: Any) -> PreTrainedModel:
    model = tiny_model(**{"num_hidden_layers": 4, **fields})
    if lora is not None:
        adapt(model, lora, seed=0)
    return model


def trainer_of(model: PreTrainedModel, **settings: Any) -> Trainer:
    """Micro-batches of two rows and a gradient that is clipped, unless `settings` say otherwise."""
    optimizer = {"lr": 0.01, "weight_decay": 0.1, "max_grad_norm": 0.1}
    return make_trainer(
        model,
        **{
            "micro_batch_size": 2,
            **settings,
            "optimizer": optimizer | settings.get("optimizer", {}),
        },
    )


def state(trainer: Trainer) -> dict[str, Tensor]:
    """Weights, masters and moments."""
    found = {f"exported {name}": t.clone() for name, t in trainer.named_weights()}
    return found | {name: t.clone() for name, t in trainer.state_dict()[0].items()}


def course(trainer: Trainer, *, steps: int = 2) -> dict[str, Tensor]:
    """All numbers of some steps, with passes without gradient before and between them."""
    found = {"logprobs": torch.cat(trainer.logprobs(ROWS))}
    for step in range(steps):
        metrics = to_scalars(trainer.update(ROWS))
        found[f"metrics {step}"] = torch.tensor([*metrics.values()], dtype=torch.float64)
        found[f"logprobs {step}"] = torch.cat(trainer.logprobs(ROWS))
    return found | state(trainer)


def check_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [n for n, t in expected.items() if not torch.equal(found[n], t)] == []


CASES: dict[str, dict[str, Any]] = {
    "bfloat16": {"dtype": torch.bfloat16},
    "float32, untied": {"tie_word_embeddings": False},
    "not clipped": {"settings": {"optimizer": {"max_grad_norm": 0}}},
    "one micro-batch": {"settings": {"micro_batch_size": None}},
    "recomputed": {"settings": {"recompute": "full", "offload_activations": True}},
    "recomputed, every 2nd": {"settings": {"recompute": "full", "recompute_every_n_layers": 2}},
    "selective, bfloat16 states": {
        "dtype": torch.bfloat16,
        "settings": {"recompute": "selective", "optimizer": {"state_dtype": "bfloat16"}},
    },
    "adapters": {"lora": LoraConfig(rank=3), "dtype": torch.bfloat16},
    "adapters on 4 bits": {"lora": LoraConfig(rank=3, load_in_4bit=True)},
    "one layer": {"num_hidden_layers": 1},
}


@pytest.mark.parametrize("knobs", [{"offload": "optimizer"}, GRADIENTS], ids=["", "gradients"])
@table("name", CASES)
def test_offload_changes_no_bit(name: str, knobs: dict[str, str]):
    fields = dict(CASES[name])
    settings = fields.pop("settings", {})
    expected = course(trainer_of(model_of(**fields), **settings))
    check_equal(course(trainer_of(model_of(**fields), **settings, **knobs)), expected)


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_pieces_of_parameters_change_no_bit(state_dtype: str, monkeypatch: pytest.MonkeyPatch):
    """As with parameters that are larger than what travels at a time; the noise that rounds moments
    is counted from a parameter's begin, not a piece's."""
    monkeypatch.setattr(pieces, "_PIECE_ELEMENTS", 500)
    monkeypatch.setattr(host_gradients, "BUCKET_BYTES", 4000)
    monkeypatch.setattr(update_rules, "BUCKET_BYTES", 1024 * 22)
    settings = {"optimizer": {"state_dtype": state_dtype}}
    plain, away = (
        trainer_of(model_of(dtype=torch.bfloat16), **settings, **knobs) for knobs in ({}, GRADIENTS)
    )
    check_equal(course(away), course(plain))


def check_against_no_offload(**knobs: Any) -> None:
    plain, away = (trainer_of(model_of(dtype=torch.bfloat16), **k) for k in ({}, knobs))
    check_equal(course(away), course(plain))


class LastMicroBatch(HostGradients):
    """Forgets what earlier micro-batches brought."""

    def add(self, name: str, gradient: Tensor) -> None:
        self._norms.pop(name, None)
        super().add(name, gradient)


class NormsOfParts(HostGradients):
    """Takes norms of what a micro-batch brings, not of the sum."""

    def add(self, name: str, gradient: Tensor) -> None:
        super().add(name, gradient)
        self._norms[name] = gradient.float().norm()[None]


def unscaled(self: Any, gradients: Any, lr: float, _: Any) -> None:
    right_stream(self, gradients, lr, None)


right_stream = update_rules.ParameterOptimizer._stream

BUGS: dict[str, tuple[dict[str, Any], Any, str, Any]] = {
    "not clipped": (GRADIENTS, update_rules.ParameterOptimizer, "_stream", unscaled),
    "earlier micro-batches": (GRADIENTS, host_gradients, "HostGradients", LastMicroBatch),
    "norms of parts": (GRADIENTS, host_gradients, "HostGradients", NormsOfParts),
}


@table("bug", BUGS)
def test_planted_bugs_change_numbers(bug: str, monkeypatch: pytest.MonkeyPatch):
    knobs, target, name, planted = BUGS[bug]
    monkeypatch.setattr(target, name, planted)
    with pytest.raises(AssertionError):
        check_against_no_offload(**knobs)


class LateCopies:
    """A stream that copies nothing before somebody waits for it, as a slow bus would."""

    def __init__(self, device: torch.device) -> None:
        self.copies: list[Callable[[], object]] = []
        self.num_done = 0

    @contextmanager
    def after(self, *marks: Any) -> Iterator[None]:
        self.copies += [partial(wait_late, mark) for mark in marks]
        with Recording(self.copies):
            yield

    def mark(self) -> tuple[LateCopies, int]:
        return self, len(self.copies)


class Recording(TorchDispatchMode):
    def __init__(self, copies: list[Callable[[], object]]) -> None:
        super().__init__()
        self.copies = copies

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **kwargs or {})
        self.copies.append(partial(func, *args))
        return args[0]


def wait_late(mark: tuple[LateCopies, int] | None) -> None:
    if mark is not None:
        stream, number = mark
        while stream.num_done < number:
            stream.num_done += 1
            stream.copies[stream.num_done - 1]()
            stream.copies[stream.num_done - 1] = lambda: None


def copy_late(monkeypatch: pytest.MonkeyPatch, wait: Callable[[Any], None]) -> None:
    monkeypatch.setattr(host_gradients, "CopyStream", LateCopies)
    monkeypatch.setattr(host_gradients, "wait_for", wait)


class ReusedMemory(HostGradients):
    """What is freed belongs to somebody else at once."""

    def _release_oldest(self) -> None:
        value, _ = self._leaving[0]
        super()._release_oldest()
        value.fill_(float("nan"))


@pytest.mark.parametrize("recompute", ["off", "full"])
def test_nothing_is_read_before_it_has_arrived_or_freed_before_it_has_left(
    recompute: str, monkeypatch: pytest.MonkeyPatch
):
    fields: dict[str, Any] = {"num_hidden_layers": 3, "dtype": torch.bfloat16}
    expected = course(trainer_of(model_of(**fields), recompute=recompute))
    copy_late(monkeypatch, wait_late)
    monkeypatch.setattr(host_gradients, "BUCKET_BYTES", 4000)
    monkeypatch.setattr(host_gradients, "HostGradients", ReusedMemory)
    trainer = trainer_of(model_of(**fields), recompute=recompute, **GRADIENTS)
    check_equal(course(trainer), expected)


def test_planted_step_that_does_not_wait_is_caught(monkeypatch: pytest.MonkeyPatch):
    copy_late(monkeypatch, lambda mark: None)
    with pytest.raises((AssertionError, ValueError)):
        check_against_no_offload(**GRADIENTS)


def test_R23_gradients_that_are_not_finite_stop_the_step():
    trainer = trainer_of(model_of(), **GRADIENTS)
    trainer.update(ROWS)
    before = state(trainer)
    name = "model.layers.1.mlp.down_proj.weight"

    def overflow(gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[3, 5] = float("inf")
        return gradient

    hook = trainer.policy.parameters[name].register_hook(overflow)
    with pytest.raises(NonFiniteError, match=f"the gradient of {name} is not finite"):
        trainer.update(ROWS)
    hook.remove()
    check_equal(state(trainer), before)
    trainer.update(ROWS)
    twin = trainer_of(model_of())
    for _ in range(2):
        twin.update(ROWS)
    check_equal(state(trainer), state(twin))
