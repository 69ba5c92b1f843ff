"""Adapters to engines apart: the bits of a merged delivery, from a small share of its bytes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hone.config.model import LoraConfig
from hone.distributed.mesh import Mesh
from hone.models.adapters import LoraLinear, adapt, adapted_weights, merged_weights
from hone.models.manifest import build_manifest, compare, export_weights, memory_of
from hone.models.tensor_parallel import TensorParallel, shard_of
from hone.types import WeightManifest
from hone.weights import adapted
from hone.weights.adapted import MergeDiffersError
from hone.weights.broadcast import BroadcastSync
from hone.weights.protocol import ReceiveSpec
from hone.weights.receiver import WeightReceiver
from tests.trainer.examples import tiny_model

CPU = torch.device("cpu")
FIELDS: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 192, "head_dim": 16}
LORA = LoraConfig(rank=3, alpha=7.0)
FOUR_BITS = LORA.model_copy(update={"load_in_4bit": True})
SOME = LORA.model_copy(update={"target_modules": ("o_proj", "up_proj")})
CASES: dict[str, tuple[LoraConfig, torch.dtype, torch.dtype]] = {
    "float32": (LORA, torch.float32, torch.float32),
    "bfloat16": (LORA, torch.bfloat16, torch.bfloat16),
    "float32 to bfloat16": (LORA, torch.float32, torch.bfloat16),
    "4-bit": (FOUR_BITS, torch.bfloat16, torch.bfloat16),
    "some projections": (SOME, torch.bfloat16, torch.bfloat16),
}
"""Adapters, format of the trainer, format of the engines."""


class AdaptedTrainer:
    """The part of the Trainer protocol that a sync uses."""

    def __init__(self, lora: LoraConfig, dtype: torch.dtype) -> None:
        self.model = tiny_model(dtype=dtype, **FIELDS)
        adapt(self.model, lora, seed=3)

    def stored(self) -> Iterator[tuple[str, Tensor]]:
        return export_weights(self.model)

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return merged_weights(self.model, self.stored())

    @torch.no_grad()
    def update(self, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        for module in self.model.modules():
            if isinstance(module, LoraLinear):
                for parameter in (module.lora_A, module.lora_B):
                    parameter.copy_(0.2 * torch.randn(parameter.shape, generator=draw))


class RankEngine:
    """One rank's parts of a model's weights, and the part of the protocol that a sync uses."""

    def __init__(self, rank: int, size: int, dtype: torch.dtype) -> None:
        self.tp = TensorParallel(rank=rank, size=size, device=CPU)
        self.weights: dict[str, Tensor] = {}
        self.weight_version = 0
        made: dict[object, Tensor] = {}
        for name, tensor in export_weights(tiny_model(**FIELDS, seed=1)):
            part = self.shard(name, tensor)
            blank = torch.full(part.shape, 7.0, dtype=dtype)
            self.weights[name] = made.setdefault(memory_of(part), blank)

    def begin_sync(self) -> None:
        self.weight_version = -1

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.weights.items())

    def shard(self, name: str, tensor: Tensor) -> Tensor:
        return shard_of(name, tensor, self.tp)

    def finish_sync(self, manifest: WeightManifest) -> None:
        if diff := compare(manifest, build_manifest(self.named_weights(), manifest.version)):
            raise RuntimeError(f"it samples with others: {diff.describe()}")
        self.weight_version = manifest.version


class Answer:
    """Of all ranks of an engine."""

    def __init__(self, ranks: Sequence[Future[Any]]) -> None:
        self._ranks = ranks

    def result(self, timeout_s: float, /) -> Any:
        return [rank.result(timeout_s) for rank in self._ranks]


class Engines:
    """`Receivers` in threads: one engine of one rank, and one of two."""

    engine_ranks: Mapping[str, int] = {"one": 1, "two": 2}

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._pool = ThreadPoolExecutor(3)
        self.receivers: dict[str, list[WeightReceiver]] = {}
        self.edits: dict[str, Callable[[ReceiveSpec], ReceiveSpec]] = {}
        """What an engine takes a delivery for, by its name."""
        for name in self.engine_ranks:
            self.start(name)

    def start(self, name: str) -> None:
        """Also again: an engine without weights takes the place of the one that was there."""
        for receiver in self.receivers.get(name, ()):
            receiver.close()
        size = self.engine_ranks[name]
        engines: list[Any] = [RankEngine(rank, size, self._dtype) for rank in range(size)]
        self.receivers[name] = [WeightReceiver(engine, CPU) for engine in engines]

    def begin_sync(self) -> None: ...

    def finish_sync(self, version: int) -> None: ...

    def start_receive(self, spec: ReceiveSpec) -> list[Answer]:
        answers: list[Answer] = []
        rank = 0
        for name, receivers in self.receivers.items():
            own = self.edits.get(name, lambda spec: spec)(spec)
            calls = [self._pool.submit(r.receive, own, rank + i) for i, r in enumerate(receivers)]
            answers.append(Answer(calls))
            rank += len(receivers)
        return answers

    def wrong(self, trainer: AdaptedTrainer) -> list[str]:
        """Names whose bits some rank does not sample with."""
        found: list[str] = []
        for receivers in self.receivers.values():
            for receiver in receivers:
                held = dict(receiver.engine.named_weights())
                for name, whole in trainer.named_weights():
                    part = receiver.engine.shard(name, whole).to(self._dtype)
                    if not torch.equal(held.pop(name), part):
                        found.append(name)
                assert not held
        return found

    def versions(self) -> set[int]:
        return {r.engine.weight_version for rs in self.receivers.values() for r in rs}

    def close(self) -> None:
        for receivers in self.receivers.values():
            for receiver in receivers:
                receiver.close()
        self._pool.shutdown()


class Setting:
    """A trainer, engines and the way between them."""

    def __init__(self, case: str, bucket_bytes: int = 9000) -> None:
        lora, trained, sampled = CASES[case]
        self.trainer = AdaptedTrainer(lora, trained)
        self.engines = Engines(sampled)
        stored = adapted_weights(self.trainer.model, self.trainer.stored)
        assert stored is not None
        self.sync = BroadcastSync(
            self.trainer,  # pyright: ignore[reportArgumentType]
            Mesh.alone(CPU),
            self.engines,
            bucket_bytes=bucket_bytes,
            timeout_s=20.0,
            adapted=stored,
        )
        self.stored = stored
        self.version = 0

    def push(self) -> int:
        """Bytes that were sent of new weights, of which each bit has arrived."""
        self.version += 1
        self.trainer.update(seed=self.version)
        report = self.sync.push(self.version)
        assert self.engines.wrong(self.trainer) == []
        assert self.engines.versions() == {self.version}
        assert report.num_tensors == len(list(self.trainer.named_weights()))
        return report.bytes

    def trained_bytes(self) -> int:
        return sum(t.nbytes for n, t in self.trainer.stored() if n in self.stored.trained)

    def close(self) -> None:
        self.sync.close()
        self.engines.close()


@pytest.fixture
def setting(request: pytest.FixtureRequest) -> Iterator[Setting]:
    made = Setting(getattr(request, "param", "bfloat16"))
    yield made
    made.close()


@pytest.mark.parametrize("setting", CASES, indirect=True)
def test_R3_engines_hold_the_bits_of_merged_weights_and_get_adapters_alone(
    setting: Setting,
) -> None:
    stored = {memory_of(t): t.nbytes for _, t in setting.trainer.stored()}
    first, *later = (setting.push() for _ in range(3))
    padding = 128 * len(stored)
    assert sum(stored.values()) <= first < sum(stored.values()) + padding
    adapters = setting.trained_bytes()
    for sent in later:
        assert adapters <= sent < adapters + padding < first


@pytest.mark.parametrize("restarted", ["one", "two"])
def test_R3_an_engine_that_starts_again_gets_the_base(setting: Setting, restarted: str) -> None:
    whole, adapters = setting.push(), setting.push()
    setting.engines.start(restarted)
    assert setting.push() == whole
    assert setting.push() == adapters < whole


@pytest.mark.parametrize("bucket_bytes", [1, 1 << 30])
def test_R3_in_buckets_of_any_size(bucket_bytes: int) -> None:
    setting = Setting("4-bit", bucket_bytes)
    for _ in range(2):
        setting.push()
    setting.close()


def test_ranks_keep_their_parts_of_the_adapted_projections_alone(setting: Setting) -> None:
    setting.push()
    names = {f"{path}.weight" for path in setting.stored.projections}
    for receivers in setting.engines.receivers.values():
        for receiver in receivers:
            assert receiver._base is not None
            shapes = {n: t.shape for n, t in receiver._base.tensors.items()}
            held = {n: t.shape for n, t in receiver.engine.named_weights() if n in names}
            assert shapes == held


def test_engines_without_room_for_the_base_get_merged_weights(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Those that have it need no more room when another one starts again."""
    setting.push()
    adapters = setting.push()
    monkeypatch.setattr(adapted.psutil, "virtual_memory", lambda: SimpleNamespace(available=1))
    assert setting.push() == adapters
    setting.engines.receivers["two"][0]._base = None  # as after a failure
    base = setting.push()
    assert base > adapters
    assert not caplog.messages
    setting.engines.start("one")
    assert adapters < setting.push() != base
    (warning,) = caplog.messages
    assert "one: the frozen weights" in warning
    assert "GiB of 0.0 GiB that are free" in warning
    monkeypatch.undo()
    assert setting.push() == base


def test_engines_that_merge_otherwise_once_more_get_merged_weights(
    setting: Setting, caplog: pytest.LogCaptureFixture
) -> None:
    setting.push()
    adapters = setting.push()
    setting.engines.edits["two"] = forget_scaling
    for _ in ("adapters alone", "with the base"):
        with pytest.raises(MergeDiffersError, match="two"):
            setting.push()
    assert setting.push() > adapters
    (warning,) = caplog.messages
    assert "two rank 0: it has merged to other bits" in warning


def test_engines_that_compute_otherwise_get_merged_weights(
    setting: Setting, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    setting.push()
    monkeypatch.setattr(adapted, "arithmetic_of", lambda device: "another GPU")
    with caplog.at_level(logging.WARNING):
        merged = [setting.push() for _ in range(2)]
    assert (
        merged[0]
        == merged[1]
        >= sum({memory_of(t): t.nbytes for _, t in tuple(setting.trainer.named_weights())}.values())
    )
    (warning,) = caplog.messages
    assert "merged weights are sent" in warning
    monkeypatch.undo()
    assert setting.push() < merged[0] / 4


# ---------------------------------------------------------------- planted bugs


def change(spec: ReceiveSpec, **fields: Any) -> ReceiveSpec:
    assert spec.adapters is not None
    return replace(spec, adapters=replace(spec.adapters, **fields))


def forget_scaling(spec: ReceiveSpec) -> ReceiveSpec:
    assert spec.adapters is not None
    one = {path: replace(p, scaling=1.0) for path, p in spec.adapters.projections.items()}
    return change(spec, projections=one)


@pytest.mark.parametrize("engine", ["one", "two"])
@pytest.mark.parametrize("is_first", [True, False])
def test_R2_a_forgotten_scaling_is_seen(setting: Setting, engine: str, is_first: bool) -> None:
    if not is_first:
        setting.push()
    setting.engines.edits[engine] = forget_scaling
    with pytest.raises(RuntimeError, match=f"{engine}.* it has merged.* is not what the trainer"):
        setting.push()
    assert setting.engines.versions() == {-1}
    setting.engines.edits.clear()
    setting.push()


@pytest.mark.parametrize("case", ["bfloat16", "4-bit"])
def test_R3_a_base_of_other_values_is_seen_and_replaced(case: str) -> None:
    setting = Setting(case)
    whole, adapters = setting.push(), setting.push()
    base = setting.engines.receivers["one"][0]._base
    assert base is not None
    name, tensor = next(iter(base.tensors.items()))
    tensor.view(torch.uint8)[0] ^= 1
    with pytest.raises(RuntimeError, match="one: what it has merged") as caught:
        setting.push()
    assert name.rpartition(".")[0] in str(caught.value)
    assert [setting.push(), setting.push()] == [whole, adapters]
    setting.close()


@pytest.mark.parametrize("name", ["layers.1.mlp.down_proj", "layers.0.input_layernorm"])
def test_R3_a_trainer_with_other_frozen_weights_is_seen(setting: Setting, name: str) -> None:
    whole = setting.push()
    with torch.no_grad():
        setting.trainer.model.get_parameter(f"model.{name}.weight").view(-1)[3] += 1.0
    with pytest.raises(RuntimeError, match=rf"1 different\n.*{name}.weight"):
        setting.push()
    assert setting.push() == whole


def test_R3_frozen_weights_that_an_engine_has_lost_are_seen(setting: Setting) -> None:
    whole = setting.push()
    setting.engines.receivers["one"][0].engine.weights["model.norm.weight"][0] += 1.0
    with pytest.raises(RuntimeError, match=r"it samples with others.*\n.*model.norm.weight"):
        setting.push()
    assert setting.push() == whole


@pytest.mark.parametrize("lost", [("lora_B",), ("lora_A", "lora_B")])
def test_R2_a_missing_adapter_is_seen(setting: Setting, lost: tuple[str, ...]) -> None:
    setting.push()
    path = "model.layers.0.self_attn.q_proj"
    spec = setting.sync._layout
    assert spec is not None
    assert spec[1] is not None
    trained = spec[1].trained - {f"{path}.{leaf}" for leaf in lost}
    setting.sync._layout = spec[0], replace(spec[1], trained=trained)
    with pytest.raises(RuntimeError, match=path):
        setting.push()
    setting.push()


def test_R2_adapters_of_another_version_are_seen(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    setting.push()
    before = {name: tensor.clone() for name, tensor in setting.trainer.stored()}
    arriving = WeightReceiver._arriving

    def late(self: WeightReceiver, *arguments: Any) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in arriving(self, *arguments):
            is_stale = self is setting.engines.receivers["two"][0] and "layers.1" in name
            yield name, before[name] if is_stale else tensor

    monkeypatch.setattr(WeightReceiver, "_arriving", late)
    with pytest.raises(RuntimeError, match=r"(?s)two: what it has merged.* 7 different.*layers.1"):
        setting.push()
    monkeypatch.undo()
    setting.push()


def test_R2_adapters_that_overflow_are_named(setting: Setting) -> None:
    setting.push()
    name = "model.layers.0.mlp.up_proj.lora_B"
    parameter = setting.trainer.model.get_parameter(name)
    setting.trainer.update = lambda seed: parameter.data.view(-1)[0].fill_(float("nan"))
    with pytest.raises(ValueError, match=f"1 of .* values of {name} are NaN"):
        setting.push()
