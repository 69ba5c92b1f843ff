"""Symptoms in real runs on the CPU: each raises its alarm, and its advice, when followed, helps.

What helps is counted, in decode steps, calls and tokens, since seconds of a busy machine say
little. What a CPU does not have is put in its place: what a probe reads of a GPU, the end of
memory, a slow network, a slow optimizer. That a device is all but full has made-up metrics alone
(`tests/observe/test_advice.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch
from tests.tiny_runs import lines, tiny_config

from hone.config.tree import RLConfig
from hone.data.arithmetic import ALPHABET, write_jsonl
from hone.engine.engine import EmbeddedEngine
from hone.loops.reinforce import run
from hone.models.tiny import make_char_tokenizer, make_tiny_model
from hone.observe.gpu_use import GPUUse
from hone.trainer.optimizer import Optimizer
from hone.trainer.parallel_model import ParallelModel
from hone.weights.link import Link

pytestmark = pytest.mark.slow

Sections = dict[str, dict[str, Any]]
Row = Mapping[str, float]
TOKEN_GIB = 2 * 2 * 16 * 4 / 2**30
"""Keys and values of a token: two layers, one head of 16 float32 values."""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models that end an answer after 100 and after 15 tokens on average, prompts of 4 and of 900
    tokens, and a reward function of 50 ms."""
    folder = tmp_path_factory.mktemp("inputs")
    letters = "".join(dict.fromkeys(ALPHABET + "".join(map(chr, range(33, 127)))))
    for name, alphabet in (("model", letters), ("short", ALPHABET)):
        make_tiny_model(
            folder / name,
            tokenizer=make_char_tokenizer(alphabet),
            hidden_size=32,
            num_layers=2,
            num_heads=2,
            num_kv_heads=1,
            head_dim=16,
            intermediate_size=64,
            max_position_embeddings=2048,
        )
    for name, length in (("train", 4), ("long", 900), ("eval", 4)):
        rows = [{"prompt": f"{n:03}=" * (length // 4), "answer": "1"} for n in range(200)]
        write_jsonl(folder / f"{name}.jsonl", rows)
    (folder / "rewards.py").write_text(
        "import time\n\n"
        "def even(completion):\n"
        "    return sum(c in '02468' for c in completion) / max(len(completion), 1)\n\n"
        "def slow(completion):\n"
        "    time.sleep(0.05)\n"
        "    return even(completion)\n"
    )
    return folder


def engine_steps(rows: Sequence[Row]) -> float:
    return sum(row["engine/steps"] for row in rows)


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a symptom comes about, and by what its cure is measured."""

    sections: Callable[[Path], Sections]
    key: str
    """What the advice must change."""
    measure: Callable[[Sequence[Row]], float] = engine_steps
    """Less is better."""


CASES: dict[str, Case] = {
    "engine_queue": Case(
        sections=lambda _: {"run": {"steps": 6}, "engine": {"max_num_seqs": 4}},
        key="engine.max_num_seqs",
    ),
    "preemptions": Case(
        sections=lambda _: {
            "run": {"steps": 6},
            "engine": {"max_num_seqs": 32, "kv_cache_gib": 700 * TOKEN_GIB},
        },
        key="engine.kv_cache_gib",
    ),
    "long_tail": Case(
        sections=lambda _: {
            "rollout": {
                "prompts_per_step": 16,
                "n_samples_per_prompt": 8,
                "max_completion_tokens": 1000,
            },
            "engine": {"max_num_seqs": 256},
        },
        key="rollout.oversample_prompts",
    ),
    "training_waits": Case(
        sections=lambda _: {
            "run": {"steps": 16},
            "rollout": {"n_samples_per_prompt": 8, "max_completion_tokens": 1000},
            "engine": {"max_num_seqs": 256},
            "pipeline": {"max_staleness": 1},
            "algorithm": {"correction": {"kind": "tis"}},
        },
        key="pipeline.max_staleness",
    ),
    "slow_rewards": Case(
        sections=lambda inputs: {
            "model": {"path": str(inputs / "short")},
            "engine": {"max_num_seqs": 64},
            "reward": {"functions": [{"fn": f"{inputs / 'rewards.py'}:slow"}], "num_workers": 1},
        },
        key="reward.num_workers",
        # Sleeping workers take no core: the least of the steps is little more than their sleep.
        measure=lambda rows: min(row["time/generate_s"] for row in rows),
    ),
    "slow_generation": Case(
        sections=lambda inputs: {
            "data": {
                "train": [{"path": str(inputs / "long.jsonl")}],
                "max_prompt_tokens": 910,
            },
            "model": {"path": str(inputs / "short")},
            "rollout": {"prompts_per_step": 4, "max_completion_tokens": 64},
            "engine": {"max_num_seqs": 64, "enable_prefix_caching": False},
        },
        key="engine.enable_prefix_caching",
        # Prompt tokens whose keys and values are computed.
        measure=lambda rows: sum(1 - row["rollout/cached_token_share"] for row in rows),
    ),
}


def config(inputs: Path, folder: Path, sections: Sections) -> RLConfig:
    defaults: Sections = {
        "run": {"steps": 8},
        "data": {"max_prompt_tokens": 16},
        "rollout": {
            "prompts_per_step": 8,
            "n_samples_per_prompt": 4,
            "max_completion_tokens": 400,
        },
        "trainer": {"optimizer": {"lr": 1e-5}},
    }
    merged = {name: defaults.get(name, {}) | sections.get(name, {}) for name in defaults | sections}
    return tiny_config(inputs, folder, **merged)


def followed(sections: Sections, change: Mapping[str, Any]) -> Sections:
    """The sections with the settings that an alarm names."""
    found: Sections = {name: dict(section) for name, section in sections.items()}
    for key, value in change.items():
        name, *path = key.split(".")
        inner = found.setdefault(name, {})
        for part in path[:-1]:
            inner = inner.setdefault(part, {})
        inner[path[-1]] = value
    return found


def rows_and_alarms(cfg: RLConfig) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    run(cfg)
    events = lines(cfg.run.dir / "events.jsonl")
    alarms = {event["name"]: event for event in events if event["kind"] == "alarm"}
    return lines(cfg.run.dir / "metrics.jsonl"), alarms


@pytest.mark.parametrize("name", CASES)
def test_advice_that_is_followed_helps(inputs: Path, tmp_path: Path, name: str) -> None:
    case = CASES[name]
    sections = case.sections(inputs)
    before, alarms = rows_and_alarms(config(inputs, tmp_path / "before", sections))
    alarm = alarms[name]
    if name == "engine_queue":
        assert max(row["engine/kv_cache_usage/max"] for row in before) < 0.5
    assert case.key in alarm["change"]
    change = alarm["change"]
    after, left = rows_and_alarms(config(inputs, tmp_path / "after", followed(sections, change)))
    # The first steps after a start carry nothing over yet.
    taken = [case.measure(rows[3:]) for rows in (before, after)]
    assert taken[1] < taken[0], (taken, alarm["message"])
    if name != "long_tail":  # which is shorter, and still there
        assert name not in left or left[name]["change"] != change


@pytest.mark.parametrize(
    ("max_staleness", "lr", "change"),
    [(4, 8e-3, {"pipeline.max_staleness": 2}), (1, 1.2e-2, {"trainer.optimizer.lr": 6e-3})],
    ids=["staleness", "learning rate"],
)
def test_fresher_samples_or_smaller_steps_diverge_less(
    inputs: Path, tmp_path: Path, max_staleness: int, lr: float, change: Mapping[str, Any]
) -> None:
    """Several steps of such learning rates move the policy too far for samples that are as stale as
    that, although none is too large by itself: that would be another alarm, which silences this
    one. Half of the staleness, and where that is 1 half of the rate, is said to leave a quarter of
    the divergence."""
    sections: Sections = {
        "run": {"steps": 12},
        "rollout": {"prompts_per_step": 4, "max_completion_tokens": 128},
        "engine": {"max_num_seqs": 128},
        "pipeline": {"max_staleness": max_staleness},
        "algorithm": {"correction": {"kind": "tis"}},
        "trainer": {"prompts_per_minibatch": 1, "optimizer": {"lr": lr}},
    }
    before, alarms = rows_and_alarms(config(inputs, tmp_path / "before", sections))
    assert "large_update" not in alarms
    alarm = alarms["stale_samples"]
    assert alarm["change"] == change
    changed = followed(sections, alarm["change"])
    after, _ = rows_and_alarms(config(inputs, tmp_path / "after", changed))
    diverged = [sum(row["off_policy/kl"] for row in rows) for rows in (before, after)]
    assert 1 - diverged[1] / diverged[0] >= 0.75 / 2, diverged


def test_a_run_that_keeps_what_it_was_cut_down_to_computes_nothing_twice(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory ends in passes of more than 200 tokens, with gradient, and of 300 without."""
    forward, failed = ParallelModel.forward, [0]

    def limited(self: ParallelModel, batch: Any, outputs: Any) -> Any:
        if batch.num_tokens > (200 if torch.is_grad_enabled() else 300):
            failed[0] += 1
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return forward(self, batch, outputs)

    monkeypatch.setattr(ParallelModel, "forward", limited)
    sections: Sections = {
        "run": {"steps": 1},
        "rollout": {"max_completion_tokens": 60},
        "algorithm": {"kl": {"coef": 0.01}},
        "trainer": {"max_tokens_per_microbatch": 512, "optimizer": {"lr": 1e-5}},
    }
    before, alarms = rows_and_alarms(config(inputs, tmp_path / "before", sections))
    (row,) = before
    assert row["mem/policy_replays"] + row["mem/reference_replays"] == failed[0] > 1
    alarm, failed[0] = alarms["out_of_memory"], 0
    assert set(alarm["change"]) == {
        "trainer.max_tokens_per_microbatch",
        "trainer.max_tokens_per_forward",
    }
    changed = followed(sections, alarm["change"])
    after, left = rows_and_alarms(config(inputs, tmp_path / "after", changed))
    assert failed == [0]
    assert "out_of_memory" not in left
    losses = [[row["train/loss"] for row in rows] for rows in (before, after)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4, abs=1e-6)


def test_wider_buffers_wait_less_often_for_a_slow_network(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every buffer of weights takes 30 ms to arrive, whatever its size."""
    send, sent = Link.broadcast, [0]

    def delayed(self: Link, *args: Any, **fields: Any) -> Any:
        sent[0] += 1
        time.sleep(0.03)
        return send(self, *args, **fields)

    monkeypatch.setattr(Link, "broadcast", delayed)
    sections: Sections = {
        "model": {"path": str(inputs / "short")},
        "run": {"steps": 6},
        "cluster": {"num_engines": 1, "update_weight_buffer_size": 2048},
    }
    _, alarms = rows_and_alarms(config(inputs, tmp_path / "before", sections))
    alarm, num_before, sent[0] = alarms["slow_sync"], sent[0], 0
    assert alarm["change"] == {"cluster.update_weight_buffer_size": 4096}
    changed = followed(sections, alarm["change"])
    rows_and_alarms(config(inputs, tmp_path / "after", changed))
    assert sent[0] < num_before


def test_an_engine_less_is_not_missed_where_engines_wait(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The optimizer takes four times as long as two engines need to sample ahead, however busy the
    machine is. What the change's second trainer brings needs a device of its own, and is not
    measured here."""
    update, sample, num_sampled = Optimizer.step, EmbeddedEngine.step, [0]

    def counted(self: EmbeddedEngine) -> Any:
        num_sampled[0] += 1
        return sample(self)

    def slow(self: Optimizer, *args: Any, **fields: Any) -> Any:
        begun_s, before = time.monotonic(), None
        while before != num_sampled[0]:
            before = num_sampled[0]
            time.sleep(0.1)
        time.sleep(3 * (time.monotonic() - begun_s))
        return update(self, *args, **fields)

    monkeypatch.setattr(EmbeddedEngine, "step", counted)
    monkeypatch.setattr(Optimizer, "step", slow)
    sections: Sections = {
        "model": {"path": str(inputs / "short")},
        "run": {"steps": 10},
        "rollout": {"prompts_per_step": 2, "max_completion_tokens": 32},
        "cluster": {"num_engines": 2},
        "pipeline": {"max_staleness": 2},
        "algorithm": {"correction": {"kind": "tis"}},
    }
    _, alarms = rows_and_alarms(config(inputs, tmp_path / "before", sections))
    assert alarms["engines_wait"]["change"] == {
        "cluster.num_engines": 1,
        "cluster.num_trainers": 2,
    }
    fewer = followed(sections, {"cluster.num_engines": 1})
    after, _ = rows_and_alarms(config(inputs, tmp_path / "after", fewer))
    assert num_sampled[0] > 0
    waits = [row["perf/wait_for_samples_share"] for row in after[3:]]
    assert median(waits) < 0.05, waits


def test_a_probe_that_reads_an_idle_gpu_leads_to_less_recomputation(
    inputs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The probe is faked: there is no GPU. What is advised is real: fewer forward passes of layers
    to train a step."""
    from transformers.models.qwen3 import modeling_qwen3

    probe = lambda _: GPUUse(lambda: 0.4, interval_s=0.01)  # noqa: E731
    monkeypatch.setattr(GPUUse, "of", probe)
    calls = [0]
    forward = modeling_qwen3.Qwen3MLP.forward

    def counted(self: Any, hidden: Any) -> Any:
        calls[0] += hidden.requires_grad or hidden.grad_fn is not None
        return forward(self, hidden)

    monkeypatch.setattr(modeling_qwen3.Qwen3MLP, "forward", counted)
    sections: Sections = {
        "model": {"path": str(inputs / "short")},
        "trainer": {"recompute": "full", "optimizer": {"lr": 1e-5}},
    }
    _, alarms = rows_and_alarms(config(inputs, tmp_path / "before", sections))
    num_before, calls[0] = calls[0], 0
    alarm = alarms["low_gpu_utilization"]
    assert alarm["change"] == {"trainer.recompute": "off"}
    changed = followed(sections, alarm["change"])
    rows_and_alarms(config(inputs, tmp_path / "after", changed))
    assert calls[0] < num_before
