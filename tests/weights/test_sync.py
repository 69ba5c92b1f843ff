"""Weight sync: complete and proven, with every way of getting it wrong planted."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from hone.engine import base as base_module
from hone.engine.engine import EmbeddedEngine
from hone.engine.settings import EngineConfig
from hone.models.decoder import alias_module
from hone.models.manifest import build_manifest, compare, export_weights
from hone.models.tiny import make_tiny_model
from hone.types import Request, SamplingParams, WeightManifest
from hone.weights import sync as sync_module
from hone.weights.sync import NonFiniteWeightsError, WeightSync
from tests.tables import table


class ModuleTrainer:
    """The part of the Trainer protocol that a sync uses."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return export_weights(self.model)


class ModuleEngine:
    """The part of the Engine protocol that a sync uses, over any module."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.weight_version = 0
        self.confirmed = True

    def begin_sync(self) -> None:
        self.confirmed = False

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return export_weights(self.model)

    def shard(self, name: str, tensor: Tensor) -> Tensor:
        return tensor

    def write(self, parts: Mapping[str, tuple[Tensor, Tensor]]) -> int:
        return base_module.deliver(list(parts.values()))

    def finish_sync(self, manifest: WeightManifest) -> None:
        diff = compare(manifest, build_manifest(self.named_weights(), manifest.version))
        if diff:
            raise RuntimeError(diff.describe())
        self.weight_version = manifest.version
        self.confirmed = True


class Policy(nn.Module):
    """Equal-shaped, square, tied and buffered tensors: everything the planted bugs need."""

    def __init__(self, *, tied: bool = True) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 8)
        self.up = nn.Linear(8, 8)
        self.down = nn.Linear(8, 8)
        self.head = nn.Linear(8, 8, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.randn(3))
        self.register_buffer("steps", torch.tensor(5))


@torch.no_grad()
def randomise(model: nn.Module) -> None:
    for tensor in model.state_dict().values():
        if tensor.is_floating_point():
            tensor.normal_()
        else:
            tensor.random_(0, 100)


def assert_equal_bits(trainer: nn.Module, engine: nn.Module) -> None:
    wanted, found = dict(export_weights(trainer)), dict(export_weights(engine))
    assert wanted.keys() == found.keys()
    for name, value in wanted.items():
        assert torch.equal(value.to(found[name].dtype), found[name]), name


def make_sync(trainer: nn.Module, engine: Any) -> WeightSync:
    return WeightSync(ModuleTrainer(trainer), engine)  # pyright: ignore[reportArgumentType]


@table("tied", [True, False])
@table("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_R3_sync_replaces_every_weight_twice(tied: bool, dtype: torch.dtype) -> None:
    trainer, engine = Policy(tied=tied), ModuleEngine(Policy(tied=tied).to(dtype))
    sync = make_sync(trainer, engine)
    for version in (1, 2):
        randomise(trainer)
        randomise(engine.model)
        report = sync.push(version)
        assert_equal_bits(trainer, engine.model)
        assert (engine.weight_version, engine.confirmed) == (version, True)
        distinct = {t.data_ptr(): t.nbytes for _, t in export_weights(engine.model)}
        assert report.bytes == sum(distinct.values())


def test_R3_aliased_weights_are_proven_but_not_moved() -> None:
    trainer = Policy()
    engine = ModuleEngine(trainer)
    before = {name: tensor.clone() for name, tensor in export_weights(trainer)}
    report = make_sync(trainer, engine).push(4)
    assert (report.bytes, engine.weight_version) == (0, 4)
    assert all(torch.equal(before[name], tensor) for name, tensor in export_weights(trainer))


Pairs = Sequence[tuple[Tensor, Tensor]]
Deliver = Callable[[Pairs], int]


def drop_one(pairs: Pairs, trainer: Policy, deliver: Deliver) -> None:
    deliver(pairs[:-1])


def send_reference(pairs: Pairs, trainer: Policy, deliver: Deliver) -> None:
    reference = [tensor for _, tensor in export_weights(Policy())]
    deliver([(t, r) for (t, _), r in zip(pairs, dict.fromkeys(reference), strict=False)])


def reload_stale_copy(pairs: Pairs, trainer: Policy, deliver: Deliver) -> None:
    """What was there before comes back over what was just sent."""
    stale = [target.clone() for target, _ in pairs]
    deliver(pairs)
    deliver([(target, old) for (target, _), old in zip(pairs, stale, strict=True)])


def skip_buffers(pairs: Pairs, trainer: Policy, deliver: Deliver) -> None:
    buffers = {buffer.data_ptr() for buffer in trainer.buffers()}
    deliver([pair for pair in pairs if pair[1].data_ptr() not in buffers])


def swap_equal_shapes(pairs: Pairs, trainer: Policy, deliver: Deliver) -> None:
    up, down = trainer.up.weight.data_ptr(), trainer.down.weight.data_ptr()
    source = {s.data_ptr(): s for _, s in pairs}
    swapped = {**source, up: source[down], down: source[up]}
    deliver([(t, swapped[s.data_ptr()]) for t, s in pairs])


def transpose(pairs: Pairs, trainer: Policy, deliver: Deliver) -> None:
    square = trainer.up.weight.data_ptr()
    deliver([(t, s.t() if s.data_ptr() == square else s) for t, s in pairs])


def flip_last_bit(pairs: Pairs, trainer: Policy, deliver: Deliver) -> None:
    deliver(pairs)
    pairs[2][0].view(torch.int32).view(-1)[-1] ^= 1


def copy_one_chunk_only(pairs: Pairs, trainer: Policy, deliver: Deliver) -> None:
    """A transport that sends in two chunks and confirms after the first."""
    deliver([(t[: len(t) // 2], s[: len(t) // 2]) if t.dim() else (t, s) for t, s in pairs])


FAULTS = [
    drop_one,
    send_reference,
    reload_stale_copy,
    skip_buffers,
    swap_equal_shapes,
    transpose,
    flip_last_bit,
    copy_one_chunk_only,
]


@table("fault", FAULTS)
@table("tied", [True, False])
def test_R2_R3_faulty_delivery_is_caught(
    fault: Callable[[Pairs, Policy, Deliver], None], tied: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, engine = Policy(tied=tied), ModuleEngine(Policy(tied=tied))
    deliver = base_module.deliver

    def faulty(pairs: Pairs) -> int:
        fault(pairs, trainer, deliver)
        return 0

    sync = make_sync(trainer, engine)
    with monkeypatch.context() as patch:
        patch.setattr(base_module, "deliver", faulty)
        with pytest.raises(RuntimeError, match="different: "):
            sync.push(1)
    assert (engine.weight_version, engine.confirmed) == (0, False)
    sync.push(1)  # the same sync without the fault
    assert engine.confirmed


class WithoutBuffers(ModuleTrainer):
    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self.model.named_parameters(remove_duplicate=False))


class WithoutTies(ModuleTrainer):
    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.model.named_parameters()
        yield from self.model.named_buffers()


@pytest.mark.parametrize(
    ("exporter", "unexpected"), [(WithoutBuffers, "scale"), (WithoutTies, "head.weight")]
)
def test_R2_incomplete_export_is_caught(exporter: type[ModuleTrainer], unexpected: str) -> None:
    engine = ModuleEngine(Policy())
    sync = WeightSync(exporter(Policy()), engine)  # pyright: ignore[reportArgumentType]
    with pytest.raises(RuntimeError, match=f"unexpected: {unexpected}"):
        sync.push(1)
    assert not engine.confirmed


@pytest.mark.parametrize("tied", [True, False])
def test_R3_change_of_tie_state_is_caught(tied: bool) -> None:
    trainer, engine = Policy(tied=tied), ModuleEngine(Policy(tied=not tied))
    with pytest.raises(RuntimeError, match=r"head\.weight: "):
        make_sync(trainer, engine).push(1)


def test_shapes_are_never_broadcast() -> None:
    trainer, engine = Policy(), ModuleEngine(Policy())
    trainer.up.bias = nn.Parameter(torch.ones(1))
    with pytest.raises(RuntimeError, match=r"up\.bias: shape \[8\], expected \[1\]"):
        make_sync(trainer, engine).push(1)


@table("value", [float("nan"), float("inf"), -float("inf")])
@table("aliased", [True, False])
def test_R23_non_finite_weights_are_never_sent(value: float, aliased: bool) -> None:
    check_not_sent(value, aliased=aliased)


def check_not_sent(value: float, *, aliased: bool) -> None:
    trainer = Policy()
    engine = ModuleEngine(trainer if aliased else Policy())
    with torch.no_grad():
        trainer.down.weight[2, 3] = value
    before = {name: tensor.clone() for name, tensor in export_weights(engine.model)}
    with pytest.raises(NonFiniteWeightsError, match=r"1 of 64 values of down\.weight"):
        make_sync(trainer, engine).push(1)
    assert not engine.confirmed
    for name, tensor in export_weights(engine.model):
        assert torch.equal(tensor.nan_to_num(), before[name].nan_to_num())


def test_R23_finite_means_finite_in_the_engines_format() -> None:
    trainer, engine = Policy(), ModuleEngine(Policy().half())
    with torch.no_grad():
        trainer.up.weight.fill_(60000.0)  # their sum overflows float16, no element does
    make_sync(trainer, engine).push(1)
    with torch.no_grad():
        trainer.up.weight[0, 0] = 70000.0
    with pytest.raises(NonFiniteWeightsError, match=r"up\.weight"):
        make_sync(trainer, engine).push(2)


@pytest.mark.parametrize("planted", ["never", "first only"])
def test_R23_missing_finite_check_turns_red(planted: str, monkeypatch: pytest.MonkeyPatch) -> None:
    check = sync_module.check_finite
    first = {"never": 0, "first only": 1}[planted]
    monkeypatch.setattr(
        sync_module,
        "check_finite",
        lambda sources, dtypes: check(dict(list(sources.items())[:first]), dtypes),
    )
    with pytest.raises(pytest.fail.Exception):
        check_not_sent(float("nan"), aliased=False)


# --- the embedded engine ---------------------------------------------------------------------


def tiny(folder: Path, *, family: str, tied: bool, seed: int = 0) -> PreTrainedModel:
    make_tiny_model(
        folder,
        family=family,
        hidden_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=64,
        tie_word_embeddings=tied,
        seed=seed,
    )
    return AutoModelForCausalLM.from_pretrained(folder, attn_implementation="hone").eval()


def embedded(model: PreTrainedModel) -> EmbeddedEngine:
    config = EngineConfig(kv_cache_gib=0.001, max_num_seqs=4, max_num_batched_tokens=64)
    return EmbeddedEngine(model, config, eos_token_ids=(2,), max_model_len=64)


def generate(engine: EmbeddedEngine) -> tuple[list[int], list[float], list[int]]:
    params = SamplingParams(max_tokens=12, temperature=1.0, seed=3, ignore_eos=True)
    engine.submit([Request(id="r", prompt_ids=(5, 6, 7, 8), sampling=params)])
    while engine.has_unfinished:
        if done := engine.step():
            return done[0].token_ids, done[0].logprobs, done[0].weight_versions
    raise AssertionError("no completion")


@pytest.mark.parametrize("family", ["qwen3", "llama"])
@pytest.mark.parametrize("tied", [True, False])
def test_R3_embedded_engine_samples_with_what_was_sent(
    family: str, tied: bool, tmp_path: Path
) -> None:
    trainer = tiny(tmp_path, family=family, tied=tied)
    engine = embedded(tiny(tmp_path, family=family, tied=tied))
    sync = make_sync(trainer, engine)
    for version in (1, 2, 3):
        randomise(engine.model)
        with torch.no_grad():
            for parameter in trainer.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        if version == 3:
            engine.sleep()
            engine.wake()
        assert sync.push(version).bytes
        assert_equal_bits(trainer, engine.model)
        cold = generate(embedded(alias_module(trainer)))
        tokens, logprobs, versions = generate(engine)
        assert (tokens, logprobs) == cold[:2]
        assert versions == [version] * 12


def test_R3_embedded_engine_on_the_trainers_own_tensors(tmp_path: Path) -> None:
    trainer = tiny(tmp_path, family="qwen3", tied=True)
    engine = embedded(alias_module(trainer))
    report = make_sync(trainer, engine).push(1)
    assert report.bytes == 0
    before = generate(engine)
    with torch.no_grad():
        trainer.get_input_embeddings().weight.mul_(1.5)
    make_sync(trainer, engine).push(2)
    tokens, logprobs, versions = generate(engine)
    assert versions == [2] * 12
    assert (tokens, logprobs) != before[:2]
