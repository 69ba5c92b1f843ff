"""Symptoms in real runs on the CPU: each raises its alarm, and its advice, when followed, helps.

What helps is counted, in decode steps, calls and tokens, since seconds of a busy machine say
little; it is half of what the planner predicted, or more. Of what a CPU does not have,
`perf/gpu_utilization` comes from a faked probe; alarms of a full device, slow deliveries, and
trainers and engines that wait for each other have made-up metrics
(`tests/observe/test_advice.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from tests.tiny_runs import lines, tiny_config

from hone.config.tree import RLConfig
from hone.data.arithmetic import ALPHABET, write_jsonl
from hone.loops.reinforce import run
from hone.models.tiny import make_char_tokenizer, make_tiny_model
from hone.observe.gpu_use import GPUUse

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


def engine_s(row: Row) -> float:
    return row["perf/engine_busy_s"]


def generate_s(row: Row) -> float:
    return row["time/generate_s"]


@dataclass(frozen=True, kw_only=True)
class Case:
    """How a symptom comes about, and by what its cure is measured."""

    sections: Callable[[Path], Sections]
    key: str
    """What the advice must change."""
    measure: Callable[[Sequence[Row]], float] = engine_steps
    """Less is better."""
    whole_s: Callable[[Row], float] = engine_s
    """The time of a step that it is a measure of."""


CASES: dict[str, Case] = {
    "engine_queue": Case(
        sections=lambda _: {"engine": {"max_num_seqs": 4}},
        key="engine.max_num_seqs",
    ),
    "preemptions": Case(
        sections=lambda _: {"engine": {"max_num_seqs": 32, "kv_cache_gib": 700 * TOKEN_GIB}},
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
        whole_s=lambda row: row["time/step_s"],
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
        whole_s=generate_s,
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
def test_advice_that_is_followed_helps_by_half_of_what_was_predicted(
    inputs: Path, tmp_path: Path, name: str
) -> None:
    case = CASES[name]
    sections = case.sections(inputs)
    before, alarms = rows_and_alarms(config(inputs, tmp_path / "before", sections))
    alarm = alarms[name]
    assert case.key in alarm["change"]
    assert alarm["gain_s"] > 0
    predicted = alarm["gain_s"] / fmean(map(case.whole_s, before))
    change = alarm["change"]
    after, left = rows_and_alarms(config(inputs, tmp_path / "after", followed(sections, change)))
    # The first steps after a start carry nothing over yet.
    helped = 1 - case.measure(after[3:]) / case.measure(before[3:])
    assert helped >= predicted / 2, (helped, predicted, alarm["message"])
    if name != "long_tail":  # which is shorter, and still there
        assert name not in left or left[name]["change"] != change


def test_fresher_samples_diverge_less(inputs: Path, tmp_path: Path) -> None:
    """Staleness 4 at a learning rate of 1e-2 loses the policy. Half of the staleness is said to
    leave a quarter of the divergence."""
    sections: Sections = {
        "run": {"steps": 12},
        "rollout": {"prompts_per_step": 4, "max_completion_tokens": 128},
        "engine": {"max_num_seqs": 128},
        "pipeline": {"max_staleness": 4},
        "algorithm": {"correction": {"kind": "tis"}},
        "trainer": {"optimizer": {"lr": 1e-2}},
    }
    before, alarms = rows_and_alarms(config(inputs, tmp_path / "before", sections))
    alarm = alarms["stale_samples"]
    assert alarm["change"] == {"pipeline.max_staleness": 2}
    changed = followed(sections, alarm["change"])
    after, _ = rows_and_alarms(config(inputs, tmp_path / "after", changed))
    diverged = [sum(row["off_policy/kl"] for row in rows) for rows in (before, after)]
    assert 1 - diverged[1] / diverged[0] >= 0.75 / 2, diverged


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
    before, alarms = rows_and_alarms(config(inputs, tmp_path / "before", sections))
    num_before, calls[0] = calls[0], 0
    alarm = alarms["low_gpu_utilization"]
    assert alarm["change"] == {"trainer.recompute": "off"}
    changed = followed(sections, alarm["change"])
    rows_and_alarms(config(inputs, tmp_path / "after", changed))
    train_s = sorted(row["time/train_s"] for row in before)[len(before) // 2]
    assert 1 - calls[0] / num_before >= alarm["gain_s"] / train_s / 2
