"""Reinforcement learning of whole weights and of adapters under every memory option of one process,
and under their pairs, against the run without: what is sampled, trained, saved and resumed.

An option either changes no bit of a run, or rounds elsewhere. One that rounds elsewhere is compared
with the plain run within a tolerance, and is the plain run of its pairs, which have its bits.

One run under an option shows that it changes no bit and that a run goes on under it. The run is
stopped after its first step and launched again for the other two: the third follows the second
without a checkpoint in between. What it saved after every step, the first included, has the bits of
what the plain run saved, so each of the two goes on from a checkpoint of the other.

The quick suite computes in bfloat16. There masters are other memory than weights, and adapters, of
which masters are the weights, stay in float32: it has both cases. Float32 is in the whole suite.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import cache
from itertools import combinations
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tests.loops.conftest import built_run
from tests.loops.test_sync import assert_same, metrics, state_of
from tests.models.families import WHOLE
from tests.ranks import run_ranks
from tests.tiny_runs import tiny_config, write_inputs
from torch import Tensor, nn

from hone.cli.command import plan_here
from hone.config.tree import RLConfig
from hone.data.arithmetic import ALPHABET
from hone.engine.base import EngineState
from hone.engine.engine import EmbeddedEngine
from hone.engine.settings import EngineConfig
from hone.families.registry import FUSED_FAMILIES
from hone.loops import loop
from hone.loops.reinforce import RLRun
from hone.models.tiny import make_char_tokenizer, make_tiny_model
from hone.observe.metrics import Metrics
from hone.rules import findings
from hone.trainer import parallel_model
from hone.trainer.pieces import Piece
from hone.trainer.policy import Policy, StaleWeightsError
from hone.trainer.settings import OptimizerConfig, TrainerConfig
from hone.types import Group

Sections = dict[str, dict[str, Any]]
Moved = Sequence[tuple[Piece, Tensor]]

STEPS = 3
DTYPES = ["bfloat16", pytest.param("float32", marks=pytest.mark.slow)]

FIELDS = {
    "llama": {"attention_bias": True},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "glm4_moe": {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 1,
        "linear_num_value_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 16,
    },
}
"""Of a family's tiny model, beside its sizes."""

ON_HOST = {"offload": "gradients"}

SAME_BITS: dict[str, Sections] = {
    "offload_optimizer": {"trainer": {"offload": "optimizer"}},
    "offload_gradients": {"trainer": ON_HOST},
    "recompute": {"trainer": {"recompute": "full"}},
    "recompute selectively": {"trainer": {"recompute": "selective"}},
    "recompute every 2nd layer": {"trainer": {"recompute": "full", "recompute_every_n_layers": 2}},
    "recompute two layers at once": {"trainer": {"recompute": "uniform:2"}},
    "offload_activations": {"trainer": {"recompute": "full", "offload_activations": True}},
    "offload_activations selectively": {
        "trainer": {"recompute": "selective", "offload_activations": True}
    },
    "trainer.enable_sleep": {"trainer": {"enable_sleep": True}},
    "engine.enable_sleep": {"engine": {"enable_sleep": True}},
}
ROUNDS: dict[str, Sections] = {
    "state_dtype": {"trainer": {"optimizer": {"state_dtype": "bfloat16"}}},
    "logits_chunk_tokens": {"trainer": {"logits_chunk_tokens": 5}},
    "micro_batch_size": {"trainer": {"micro_batch_size": 3}},
    "max_tokens_per_microbatch": {"trainer": {"max_tokens_per_microbatch": 40}},
}
MUON: dict[str, Sections] = {"muon": {"trainer": {"optimizer": {"name": "muon"}}}}
"""Another rule: a plain run of its own."""
ADAPTERS: Sections = {"model": {"lora": {"rank": 4, "alpha": 8.0}}}
FOUR_BITS: dict[str, Sections] = {"load_in_4bit": {"model": {"lora": {"load_in_4bit": True}}}}

TOLERANCE = {"bfloat16": 2**-6, "float32": 2e-6, "state_dtype": 2**-7}
"""Largest distance of gradients that are only added up in another order, by the format that
computes, and of moments that are rounded to bfloat16: some units in the last place, of which
bfloat16 has 2**-8 and float32 1.2e-7. Found: 0.0038, 2.8e-7 and 0.0026."""

FAMILIES = tuple(family for family in FUSED_FAMILIES if family not in WHOLE)
"""A decoder that is only a part of a vision-language model has no folder of its own."""

OTHER_KEYS = {
    "trainer": {
        "compile": "compiles for minutes on a CPU; gradients in tests/trainer/test_recompute.py",
        "matmul_precision": "what products round to, not memory; needs CUDA",
        "max_tokens_per_forward": "no pass here is without a gradient",
        "num_epochs": "the learning rule",
        "parallel": "several processes",
        "parity": "a check",
        "prompts_per_minibatch": "the learning rule",
    },
    "optimizer": dict.fromkeys(
        (
            "lr",
            "betas",
            "eps",
            "weight_decay",
            "muon_lr",
            "max_grad_norm",
            "schedule",
            "warmup_steps",
            "min_lr_ratio",
        ),
        "the learning rule",
    ),
}


@cache
def _inputs() -> tuple[TemporaryDirectory[str], Path]:
    folder = TemporaryDirectory(prefix="hone-memory-")
    write_inputs(Path(folder.name))
    for family in FAMILIES:
        make_tiny_model(
            Path(folder.name) / family,
            family=family,
            tokenizer=make_char_tokenizer(ALPHABET),
            hidden_size=32,
            num_layers=2,
            num_heads=2,
            num_kv_heads=1,
            head_dim=16,
            intermediate_size=48,
            max_position_embeddings=64,
            **FIELDS.get(family, {}),
        )
    return folder, Path(folder.name)


def sections_of(names: tuple[str, ...], adapted: bool) -> Sections:
    """Those of all options together."""
    found: Sections = {}
    for sections in (*(OPTIONS[name] for name in names), ADAPTERS if adapted else {}):
        for section, keys in sections.items():
            own = found.setdefault(section, {})
            for key, value in keys.items():
                own[key] = own.get(key, {}) | value if isinstance(value, dict) else value
    return found


def agree(names: tuple[str, ...]) -> bool:
    """Whether no two options want different values of one key."""
    values: dict[tuple[str, ...], Any] = {}
    for name in names:
        for section, keys in OPTIONS[name].items():
            for key, value in keys.items():
                parts = value if isinstance(value, dict) else {"": value}
                for part, wanted in parts.items():
                    if values.setdefault((section, key, part), wanted) != wanted:
                        return False
    return True


def config(
    sections: Sections, dtype: str, *, folder: Path, steps: int = STEPS, family: str = "qwen3"
) -> RLConfig:
    trainer = sections.get("trainer", {})
    optimizer = {"lr": 3e-2, "weight_decay": 0.1, "max_grad_norm": 0.1}
    return tiny_config(
        _inputs()[1],
        folder,
        run={"dir": folder, "steps": steps},
        model={"path": str(_inputs()[1] / family), "dtype": dtype} | sections.get("model", {}),
        reward={"functions": [{"fn": "length", "args": {"target_tokens": 4}}]},
        engine={"max_num_seqs": 16} | sections.get("engine", {}),
        trainer={"logits_chunk_tokens": 64, "parity": "off"}
        | trainer
        | {"optimizer": optimizer | trainer.get("optimizer", {})},
        algorithm={"correction": {"kind": "tis"}},
        eval={"max_completion_tokens": 8},
        checkpoint={"every_n_steps": 1, "keep_last": STEPS},
    )


@dataclass(frozen=True)
class Course:
    """What a run has come to, and how."""

    rows: list[dict[str, Any]]
    saved: list[dict[str, Any]]
    """The checkpoint of every step."""
    sampled: dict[str, Tensor]
    """The engine's weights."""


def course(cfg: RLConfig, *, interrupted: bool = False) -> Course:
    """Run it to its end or, `interrupted`, for one step, and hold what trained, what sampled and
    what was saved against each other."""
    with built_run(cfg) as run:
        policy = run.trainer.policy
        assert isinstance(policy, Policy)
        with run.phase("train", 1):
            before = {name: master.detach().clone() for name, master in policy.masters.items()}
        with _asked_to_stop(run) if interrupted else nullcontext():
            done = loop.train(run).steps
        assert run.sampling.engine is not None
        with run.phase("push", done):  # an engine of its own weights has slept without them
            run.push(done)
        sampled = {n: t.clone() for n, t in run.sampling.engine.named_weights()}
        with run.phase("train", 1):
            own = dict(policy.named_weights())
            for name, master in policy.masters.items():
                assert torch.equal(own[name], master.to(own[name].dtype)), f"{name} is stale"
                moved = (own[name] != before[name].to(own[name].dtype)).float().mean()
                assert moved > 0, f"{name} has not moved"
            state = {name: t.clone() for name, t in run.trainer.state_dict()[0].items()}
            exported = dict(run.trainer.named_weights())
        assert exported.keys() == sampled.keys()
        assert [n for n, tensor in exported.items() if not torch.equal(sampled[n], tensor)] == []
    saved = [state_of(cfg.run.dir, step) for step in range(1, done + 1)]
    assert_same(saved[-1]["trainer"], state, "saved")
    return Course(metrics(cfg.run.dir), saved, sampled)


@contextmanager
def _asked_to_stop(run: RLRun) -> Generator[None]:
    """Inside, a step that begins is the last one, as after a signal."""
    collect = run.collect

    def interrupt(step: int) -> list[Group]:
        run.interrupt.number = signal.SIGTERM
        return collect(step)

    with patch.object(run, "collect", interrupt):
        yield


@cache
def plain(base: tuple[str, ...], dtype: str, adapted: bool) -> Course:
    """The run with no option but those of `base`, which round or learn in another way."""
    with TemporaryDirectory() as folder:
        return course(config(sections_of(base, adapted), dtype, folder=Path(folder)))


OPTIONS: Mapping[str, Sections] = {**SAME_BITS, **ROUNDS, **MUON, **FOUR_BITS}
BASES = (*ROUNDS, *MUON, *FOUR_BITS)
REFUSED: Sequence[set[str]] = (
    {"offload_optimizer", "muon"},
    {"offload_gradients", "muon"},
    {"offload_gradients", "trainer.enable_sleep"},
)
"""Pairs that a rule refuses: Muon multiplies whole matrices; nothing is left to move to sleep."""


def _singles() -> list[tuple[str, bool]]:
    whole = [(name, False) for name in (*SAME_BITS, *ROUNDS, *MUON)]
    adapted = [(name, True) for name in (*SAME_BITS, *FOUR_BITS)]
    return whole + adapted


def base_of(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(name for name in names if name in BASES)


def _pairs() -> list[tuple[tuple[str, str], bool]]:
    whole = [(pair, False) for pair in combinations((*SAME_BITS, *ROUNDS, *MUON), 2)]
    adapted = [
        (pair, True)
        for pair in combinations((*SAME_BITS, *ROUNDS, *FOUR_BITS), 2)
        if FOUR_BITS.keys() & {*pair}
    ]
    return [(pair, with_adapters) for pair, with_adapters in whole + adapted if agree(pair)]


def assert_same_course(found: Course, expected: Course) -> None:
    assert found.rows == expected.rows
    assert_same(found.saved, expected.saved, "saved")
    assert_same(found.sampled, expected.sampled, "sampled")


def distance(found: Course, expected: Course) -> float:
    """Of the first update's gradients, relative to them, where they differ most: of first moments,
    which are gradients times one factor."""
    first, other = (run.saved[0]["trainer"] for run in (expected, found))
    moments = {n: t for n, t in first.items() if n.startswith("optimizer/exp_avg/")}
    assert len(moments) == sum(name.startswith("weights/") for name in first)
    return max(
        float((other[name].float() - moment).norm() / moment.norm())
        for name, moment in moments.items()
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("name", "adapted"), _singles())
def test_an_option_changes_the_numbers_no_more_than_it_must(
    name: str, adapted: bool, dtype: str, tmp_path: Path
) -> None:
    """From the start, through an interruption, to the end."""
    cfg = config(sections_of((name,), adapted), dtype, folder=tmp_path)
    course(cfg, interrupted=True)
    found = course(cfg)
    assert_same_course(found, plain(base_of((name,)), dtype, adapted))
    if name in ROUNDS:
        limit = TOLERANCE["state_dtype" if name == "state_dtype" else dtype]
        assert 0 < distance(found, plain((), dtype, adapted)) < limit


@pytest.mark.parametrize("adapted", [False, True])
def test_a_run_may_change_its_options_from_launch_to_launch(adapted: bool, tmp_path: Path) -> None:
    launches = (
        (),
        ("offload_gradients", "offload_activations", "engine.enable_sleep"),
        ("offload_optimizer", "recompute selectively", "trainer.enable_sleep"),
    )
    assert len(launches) == STEPS
    for names in launches:
        sections = sections_of(names, adapted)
        found = course(
            config(sections, "bfloat16", folder=tmp_path), interrupted=names != launches[-1]
        )
    assert_same_course(found, plain((), "bfloat16", adapted))


@pytest.mark.parametrize(
    "name", ["offload_gradients", pytest.param("offload_optimizer", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "qwen3"])
def test_every_family_whose_weights_an_engine_merges(
    family: str, name: str, tmp_path: Path
) -> None:
    """In two steps: the second samples with what the first has written. Gradients on the host take
    masters and moments there with them."""
    courses = [
        course(config(sections, "bfloat16", folder=tmp_path / folder, steps=2, family=family))
        for folder, sections in (("plain", {}), ("option", OPTIONS[name]))
    ]
    assert_same_course(*courses)


class DeadMemory(Policy):
    """Steps write where the weights lay before an engine merged them."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._former = {n: nn.Parameter(p.detach()) for n, p in self.parameters.items()}

    def write_back(self, moved: Moved) -> None:
        with patch.object(self, "parameters", self._former):
            super().write_back(moved)


class HalfWritten(Policy):
    """A step writes every second weight into other memory."""

    def write_back(self, moved: Moved) -> None:
        lost = {n: nn.Parameter(p.detach().clone()) for n, p in [*self.parameters.items()][::2]}
        with patch.object(self, "parameters", self.parameters | lost):
            super().write_back(moved)


class WithoutWeights(Policy):
    """Masters are restored, and weights stay what they were."""

    def _write_module(self) -> None:
        for name, master in self._masters.items():
            self._add_checksums(self._host_checksums, [(name, 0, master.detach().view(-1))])


class WithoutRounding(Policy):
    """Masters move, and the module is left alone."""

    def apply(self, update: Callable[[], None]) -> Metrics:
        update()
        return {}


PLANTED: dict[str, tuple[Sections, type[Policy]]] = {
    "dead memory": (OPTIONS["offload_optimizer"], DeadMemory),
    "dead memory, gradients on the host": (OPTIONS["offload_gradients"], DeadMemory),
    "part of the weights": (OPTIONS["offload_optimizer"], HalfWritten),
    "device masters": ({}, WithoutRounding),
    "masters asleep": (OPTIONS["trainer.enable_sleep"], WithoutRounding),
    "adapters": (ADAPTERS, WithoutRounding),
    "restored": (OPTIONS["offload_optimizer"], WithoutWeights),
}


@pytest.mark.parametrize("bug", PLANTED)
def test_a_sync_refuses_weights_that_training_did_not_make(
    bug: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """At the first sync behind the bug; manifests of trainer and engine agree in each of these."""
    sections, planted = PLANTED[bug]
    cfg = config(sections, "bfloat16", folder=tmp_path)
    if bug == "restored":
        course(cfg, interrupted=True)
    monkeypatch.setattr(parallel_model, "Policy", planted)
    with (
        built_run(cfg) as run,
        pytest.raises(StaleWeightsError, match=r"trained weights, the first .* are not what"),
    ):
        loop.train(run)
    assert isinstance(run.sampling.engine, EmbeddedEngine)
    assert (run.sampling.engine.weight_version, run.sampling.engine.state) == (
        0,
        EngineState.SYNCING,
    )


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("names", "adapted"), _pairs(), ids=str)
def test_pairs_of_options_change_no_bit(
    names: tuple[str, str], adapted: bool, dtype: str, tmp_path: Path
) -> None:
    cfg = config(sections_of(names, adapted), dtype, folder=tmp_path)
    if errors := [f for f in findings(plan_here(cfg, 1)) if f.level == "error"]:
        assert set(names) in REFUSED, errors
        return
    assert set(names) not in REFUSED
    found = course(cfg)
    if base_of(names) != names:
        assert_same_course(found, plain(base_of(names), dtype, adapted))


@pytest.mark.slow
def test_engines_of_two_processes_sample_with_rounded_masters(tmp_path: Path) -> None:
    """Shards are gathered for each sync: nothing there could be left behind."""
    for case, wrong in run_ranks("tests.loops.offload_ranks", 2, tmp_path).items():
        assert wrong == {"stale": [], "still": [], "other bits": []}, case


def test_every_key_of_the_trainer_is_in_the_matrix_or_says_why_not() -> None:
    options = merged_keys(OPTIONS)
    sections = {
        "trainer": TrainerConfig.model_fields.keys() - {"optimizer"},
        "optimizer": OptimizerConfig.model_fields.keys(),
    }
    for section, keys in sections.items():
        assert options[section] | OTHER_KEYS[section].keys() == keys
        assert not options[section] & OTHER_KEYS[section].keys()
    assert options["engine"] == {name for name in EngineConfig.model_fields if "enable_sl" in name}


def merged_keys(options: Mapping[str, Sections]) -> dict[str, set[str]]:
    """The keys that options set, by section."""
    found: dict[str, set[str]] = {"trainer": set(), "optimizer": set(), "engine": set()}
    for sections in options.values():
        for section in ("trainer", "engine"):
            found[section] |= sections.get(section, {}).keys() - {"optimizer"}
        found["optimizer"] |= sections.get("trainer", {}).get("optimizer", {}).keys()
    return found
