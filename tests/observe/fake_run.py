"""Run folders as the loops write them, with plausible curves and any planted symptom."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import yaml

from hone.config.run import LogConfig
from hone.observe.alarms import Alarms
from hone.observe.loggers import RunLog
from hone.types import FailureKind, Group, Prompt, Reward, Sample, StopReason

Scalars = dict[str, float]
Symptom = Callable[[Scalars, int], None]
"""Changes the metrics of a step, given how many steps the symptom has lasted (from 0)."""


def healthy_step(step: int, rng: np.random.Generator) -> Scalars:
    """Metrics of a run that learns: reward rises, entropy sinks slowly, everything is noisy."""
    noise = lambda scale=0.1: float(rng.lognormal(0, scale))  # noqa: E731
    progress = 1 - math.exp(-step / 60)
    reward = 0.12 + 0.7 * progress + float(rng.normal(0, 0.02))
    length = (180 + 160 * progress) * noise(0.04)
    generate, train = 7.2 * noise(0.06), 4.1 * noise(0.03)
    phases = {"generate": generate, "train": train, "experience": 0.7 * noise(), "sync": 0.05}
    rest = 0.02 * (generate + train) * noise()
    step_s = sum(phases.values()) + rest
    mismatch = 1.6e-3 * noise(0.15)
    return {
        "reward/mean": reward,
        "reward/std": 0.45 * noise(0.05),
        "reward/correct/mean": reward - 0.05,
        "reward/format/mean": min(0.4 + progress, 1.0),
        "rollout/completion_tokens/mean": length,
        "rollout/completion_tokens/p95": 1.9 * length,
        "rollout/completion_tokens/max": 512.0,
        "rollout/truncated_share": 0.04 * noise(0.3),
        "rollout/zero_spread_share": min(0.35 * noise(0.1) + 0.2 * progress, 0.8),
        "rollout/duplicate_share": 0.002 * noise(),
        "rollout/valid": 512.0 - int(rng.integers(0, 3)),
        "rollout/failed/timeout": float(rng.integers(0, 3)),
        "rollout/weight_version/min": float(step - 1),
        "rollout/weight_version/max": float(step - 1),
        "policy/entropy": (1.1 - 0.6 * progress) * noise(0.03),
        "policy/clip_fraction": 0.006 * noise(0.3),
        "policy/approx_kl": 4e-4 * noise(0.3),
        "policy/ref_kl": 0.03 * progress * noise(),
        "off_policy/mismatch_kl": mismatch,
        "off_policy/ratio/mean": 0.998 + float(rng.normal(0, 0.002)),
        "off_policy/ratio/p05": 0.93 + float(rng.normal(0, 0.004)),
        "off_policy/ratio/p95": 1.07 + float(rng.normal(0, 0.004)),
        "train/loss": -0.01 + float(rng.normal(0, 0.01)),
        "train/grad_norm": 0.35 * noise(0.3),
        "train/lr": 1e-6 * min(step / 10, 1.0),
        "train/num_tokens": 512 * length,
        "train/num_skipped_steps": 0.0,
        "train/update_to_weight_ratio": 2e-6 * noise(),
        "train/share_unchanged": 0.98,
        **{f"time/{name}_s": value for name, value in phases.items()},
        "time/unattributed_s": rest,
        "time/step_s": step_s,
        "perf/tokens_per_s": 512 * (length + 120) / step_s,
        "perf/generated_tokens_per_s": 512 * length / generate,
        "perf/R_gen": 0.68 * noise(0.02),
        "perf/R_train": 0.43 * noise(0.02),
        "perf/R_step": 0.55 * noise(0.02),
        "perf/mfu": 0.34 * noise(0.02),
        "perf/network_sent_bytes_per_s": 2.1e9 * noise(0.05),
        "perf/network_received_bytes_per_s": 1.9e9 * noise(0.05),
        "mem/rss_gib": 5.7 + 0.3 * min(step / 5, 1.0) + 0.01 * step + 0.01 * noise(),
        "mem/rss_without_caches_gib": 5.2 + 0.3 * min(step / 5, 1.0) + 0.01 * noise(),
        "mem/gpu_peak_gib": 61.0,
        "mem/gpu_free_gib": 22.0 + 0.1 * noise(),
    }


def supervised_step(step: int, rng: np.random.Generator) -> Scalars:
    """Metrics of `hone sft`: no sampling, no reward."""
    loss = 1.2 + 1.6 * math.exp(-step / 30)
    train_s = 0.8 * float(rng.lognormal(0, 0.05))
    return {
        "train/loss": loss + float(rng.normal(0, 0.03)),
        "train/grad_norm": 1.1 * float(rng.lognormal(0, 0.1)),
        "train/lr": 2e-5 * (1 + math.cos(math.pi * step / 200)) / 2,
        "train/num_tokens": 60_000.0,
        "time/train_s": train_s,
        "time/unattributed_s": 0.01,
        "time/step_s": train_s + 0.01,
        "perf/tokens_per_s": 60_000 / (train_s + 0.01),
        "mem/rss_gib": 3.0,
        "mem/rss_without_caches_gib": 2.8,
        **({"eval/loss": loss + 0.05} if step % 25 == 0 else {}),
    }


TEXT = (
    "The train leaves at 9 and arrives at 13, so it travels for 4 hours. At 80 km per hour that "
    "is 4 * 80 = 320 km. Then it goes back half of the way, 160 km, which makes 480 km in all.\n\n"
    "Answer: 480"
)


def make_group(step: int, index: int, rng: np.random.Generator, *, num_samples: int = 4) -> Group:
    """A group of samples with words as tokens; one of them failed."""
    prompt = Prompt(
        id=f"gsm8k:{step * 7 + index}",
        token_ids=tuple(range(100, 140)),
        text="A train leaves at 9:00 and arrives at 13:00. It drives 80 km per hour and then "
        "returns half of the way. How many kilometres does it travel in all? <think>",
        answer="480",
    )
    samples: list[Sample] = []
    for sample_index in range(num_samples):
        count = int(rng.integers(30, 60))
        correct = float(rng.random() < 0.6)
        failed = sample_index == num_samples - 1 and index == 0
        logprobs = (-(rng.exponential(0.7, count) ** 1.6)).tolist()
        samples.append(
            Sample(
                id=f"{prompt.id}/{step}/{sample_index}",
                prompt=prompt,
                index=sample_index,
                token_ids=rng.integers(0, 150_000, count).tolist(),
                logprobs=logprobs,
                weight_versions=[step - 1] * count,
                loss_mask=[True] * count,
                stop_reason=StopReason.LENGTH if sample_index == 2 else StopReason.EOS,
                text=TEXT,
                reward=None
                if failed
                else Reward(total=correct + 0.1, parts={"correct": correct, "format": 0.1}),
                failure=FailureKind.TIMEOUT if failed else None,
                failure_detail="no verdict within 10 s" if failed else "",
            )
        )
    return Group(id=f"{prompt.id}/{step}", prompt=prompt, samples=samples)


RL_CONFIG = {
    "run": {"steps": 200, "seed": 17},
    "model": {"path": "Qwen/Qwen3-0.6B"},
    "data": {"train": [{"path": "data/gsm8k.jsonl"}]},
    "algorithm": {"advantage": "grpo", "loss": "ppo_clip"},
}
SFT_CONFIG = {key: RL_CONFIG[key] for key in ("run", "model", "data")}


def write_run(
    folder: Path,
    *,
    num_steps: int,
    supervised: bool = False,
    symptom: Symptom | None = None,
    seed: int = 0,
) -> Path:
    """Write a run folder through the real loggers and alarms."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(yaml.safe_dump(SFT_CONFIG if supervised else RL_CONFIG))
    rng, alarms = np.random.default_rng(seed), Alarms()
    make_step = supervised_step if supervised else healthy_step
    with RunLog(folder, LogConfig(to=(), samples_per_step=4)) as log:
        for step in range(1, num_steps + 1):
            scalars = make_step(step, rng)
            if not supervised and (step == 1 or step % 25 == 0):
                score = scalars["reward/mean"] - 0.03
                scalars |= {
                    "eval/reward/mean": score,
                    "eval/pass@1": score,
                    "eval/pass_threshold": 1.0,
                    "eval/pass@4": score + 0.1,
                }
                scalars["time/eval_s"] = 3.0
                scalars["time/step_s"] += 3.0
                log.event("checkpoint", step=step, path=f"checkpoints/step_{step}")
            if symptom is not None and step > num_steps // 2:
                symptom(scalars, step - num_steps // 2 - 1)
            log.log(step, scalars)
            for alarm in alarms.check(step, scalars):
                log.event("alarm", **alarm.fields())
            if not supervised:
                log.samples(step, [make_group(step, i, rng) for i in range(2)])
    return folder
