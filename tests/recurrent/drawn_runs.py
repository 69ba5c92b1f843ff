"""Runs of `hone rl` with random tiny hybrid models and random settings, drawn from a seed.

    OMP_NUM_THREADS=1 python -m tests.recurrent.drawn_runs 0 50

runs and replays these seeds, says what each was, and prints the largest differences.
"""

from __future__ import annotations

import json
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from hone.config.tree import RLConfig
from hone.data.arithmetic import ALPHABET
from hone.loops import reinforce
from hone.models.tiny import make_char_tokenizer, make_tiny_model
from tests.recurrent.replay import Replay, replay
from tests.tiny_runs import lines, tiny_config

__all__ = ["LIMITS", "draw_run", "replayed"]

LIMITS = {
    "weights": 1e-3,
    "critic": 1e-3,
    "moments": 1e-3,
    "engine": 3e-5,
    "trainer": 3e-5,
    "entropy": 3e-5,
    "advantage": 3e-5,
    "grad_norm": 1e-4,
    "loss": 1e-4,
}
"""The largest differences between a run in float32 and its replay in float64 (`Replay.largest`), of
which rounding alone makes a tenth to a half. `weights` and `moments` are relative to the update and
the moments of each tensor, the losses and norms to themselves; log-probabilities and entropies are
as they are, and those of the trainer are written with five digits.

Below 1e-5 of the weights' own size nothing can be compared that depends on the sign of a gradient
near zero. So AdamW's `eps` is 1e-5 or more: with 1e-8 single elements whose gradient is rounding
move by the whole learning rate, in either direction, which in a tensor of 500 elements is a tenth
of the update."""

REWARD = """
def spread(completion):
    return sum((i + 1) * ord(c) for i, c in enumerate(completion)) % 17 / 16
"""
ENV = '''
from hone.envs import Observation


class Talk:
    """One to four turns, with answers of 1 to 20 tokens between them."""

    def step(self, episode):
        number = sum((i + 1) * ord(c) for i, c in enumerate(episode.turn)) + len(episode.turns)
        reward = number % 17 / 16
        if number % 5 == 0 or len(episode.turns) == 4:
            return reward
        said = "".join("0123456789+-*="[(number * (i + 3)) % 14] for i in range(1 + number % 20))
        return Observation(said, role=None, reward=reward, max_tokens=2 + number % 6)
'''


def draw_run(seed: int, folder: Path) -> RLConfig:
    """Write the model, data, rewards and environment of a run, and return its configuration."""
    draw = random.Random(seed)
    family = draw.choice(["qwen3_5_text", "qwen3_5_text", "qwen3_5_moe_text"])
    has_env = draw.random() < 0.4
    longest_prompt = draw.choice([6, 24, 50, 80])
    longest_completion = draw.choice([24, 40]) if has_env else draw.choice([3, 8, 20])
    length = longest_prompt + longest_completion
    folder.mkdir(parents=True, exist_ok=True)
    block_bytes = _write_model(draw, folder / "model", family, seed)
    _write_prompts(draw, folder / "train.jsonl", longest_prompt)
    _write_prompts(draw, folder / "eval.jsonl", longest_prompt, number=3)
    (folder / "rewards.py").write_text(REWARD)
    (folder / "envs.py").write_text(ENV)

    algorithm = _algorithm(draw, family, seed)
    advantage = algorithm["advantage"]
    rollout: dict[str, Any] = {
        "prompts_per_step": draw.choice([2, 2, 3]),
        "n_samples_per_prompt": draw.choice([2, 3, 4]),
        "max_completion_tokens": longest_completion,
        "temperature": draw.choice([0.7, 1.0, 1.0, 1.3]),
    }
    if longest_completion in (20, 40) and draw.random() < 0.4:
        rollout["truncated_samples"] = "mask"
    if advantage in ("reinforce_pp", "gae") and draw.random() < 0.3:
        rollout |= {"prompts_per_step": 6, "n_samples_per_prompt": 1}
    if draw.random() < 0.3:
        rollout["oversample_prompts"] = draw.choice([1, 2])
        if draw.random() < 0.3:
            rollout["mask_off_policy_tokens"] = True
    if draw.random() < 0.15 and rollout["n_samples_per_prompt"] > 1:
        rollout["dynamic_sampling"] = True
    kl = algorithm.get("kl", {})
    if kl.get("placement") == "reward" and advantage in ("grpo", "dr_grpo", "rloo"):
        rollout["truncated_samples"] = "train"
        rollout.pop("mask_off_policy_tokens", None)

    engine: dict[str, Any] = {
        "max_num_seqs": draw.choice([2, 3, 6, 16]),
        "max_num_batched_tokens": draw.choice([4, 7, 16, 33, 8192]),
        "enable_prefix_caching": draw.random() < 0.8,
        "enable_sleep": draw.random() < 0.25,
    }
    if draw.random() < 0.6:
        num_blocks = -(-length // 16) + draw.choice([0, 1, 3])
        engine["kv_cache_gib"] = (num_blocks + 0.5) * block_bytes / 2**30
    run: dict[str, Any] = {"dir": folder / "run", "steps": 3, "seed": seed, "device": "cpu"}
    sections: dict[str, Any] = {
        "run": run,
        "data": {
            "train": [{"path": str(folder / "train.jsonl")}],
            "eval": [{"path": str(folder / "eval.jsonl")}],
            "chat": "never",
            "max_prompt_tokens": longest_prompt,
        },
        "rollout": rollout,
        "engine": engine,
        "algorithm": algorithm,
        "trainer": _trainer(draw, length, rollout["prompts_per_step"]),
        "reward": {"functions": [{"fn": f"{folder}/rewards.py:spread"}], "num_workers": 1},
        "checkpoint": {"every_n_steps": 1, "keep_last": 3},
        "log": {"to": [], "samples_per_step": 999},
    }
    if advantage == "gae":
        sections["critic"] = {
            "lr": _lr(draw),
            "value_clip": draw.choice([None, 0.5, 0.02]),
            "warmup_steps": draw.choice([0, 0, 1]),
        }
    if has_env:
        sections["env"] = {"path": f"{folder}/envs.py:Talk", "max_turns": draw.choice([3, 4])}
        sections["reward"] = {"functions": [], "num_workers": 1}
    if draw.random() < 0.15:
        sections["eval"] = {"every_n_steps": 1, "max_completion_tokens": 5}
    return tiny_config(folder, folder / "run", **sections)


def _write_model(draw: random.Random, folder: Path, family: str, seed: int) -> int:
    """A model whose states matter: its weights are larger than those that transformers draws, and
    norms and time steps lie away from where they start. Returns the bytes of a block of keys."""
    num_layers = draw.choice([2, 3, 4])
    kinds = ["full_attention", "linear_attention"]
    kinds += draw.choices(kinds, weights=[1, 3], k=num_layers - 2)
    draw.shuffle(kinds)
    num_kv_heads = draw.choice([1, 2])
    num_heads = num_kv_heads * draw.choice([1, 2, 4])
    head_dim = draw.choice([8, 16])
    key_heads = draw.choice([1, 2])
    fields: dict[str, Any] = {
        "layer_types": kinds,
        "linear_num_key_heads": key_heads,
        "linear_num_value_heads": key_heads * draw.choice([1, 2, 3]),
        "linear_key_head_dim": draw.choice([4, 8, 16]),
        "linear_value_head_dim": draw.choice([4, 12, 16]),
        "linear_conv_kernel_dim": draw.choice([2, 3, 4, 4]),
        "initializer_range": 0.08,
    }
    if family == "qwen3_5_moe_text":
        fields |= {"num_experts": draw.choice([4, 8]), "num_experts_per_tok": draw.choice([2, 3])}
    make_tiny_model(
        folder,
        family=family,
        tokenizer=make_char_tokenizer(ALPHABET),
        hidden_size=draw.choice([24, 32]),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=48,
        max_position_embeddings=256,
        tie_word_embeddings=draw.random() < 0.5,
        seed=seed,
        **fields,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(seed)
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter += 0.3 * torch.randn_like(parameter)
    model.save_pretrained(folder)
    return 2 * 16 * num_kv_heads * head_dim * 4 * kinds.count("full_attention")


def _write_prompts(draw: random.Random, file: Path, longest: int, number: int = 12) -> None:
    """Prompts of all lengths, of which several begin alike."""
    stems = ["".join(draw.choices(ALPHABET, k=draw.randrange(longest))) for _ in range(3)]
    prompts: list[str] = []
    for _ in range(number):
        stem = draw.choice(stems)
        prompts.append(
            stem + "".join(draw.choices(ALPHABET, k=draw.randint(1, longest - len(stem))))
        )
    rows = [{"prompt": prompt, "answer": "0"} for prompt in prompts]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _algorithm(draw: random.Random, family: str, seed: int) -> dict[str, Any]:
    names = ["grpo", "grpo", "dr_grpo", "rloo", "reinforce_pp", "reinforce_pp_baseline"]
    if family == "qwen3_5_text":
        names.append("gae")
    loss = draw.choice(["ppo_clip", "ppo_clip", "ppo_clip", "cispo", "gspo", "gmpo", "sapo"])
    loss = "gspo" if seed % 7 == 4 else loss  # the first seeds happen to draw it never
    found: dict[str, Any] = {
        "advantage": draw.choice(names),
        "loss": loss,
        "aggregation": draw.choice(["token_mean", "sequence_mean", "constant"]),
        "entropy_coef": draw.choice([0.0, 0.0, 0.01]),
    }
    if loss != "sapo":
        low, high = draw.choice([(0.2, 0.2), (0.02, 0.05), (0.01, 0.02)])
        if loss == "gspo":  # the ratios of whole sequences
            low, high = 3e-3, 4e-3
        found |= {"clip_low": low, "clip_high": high}
    if loss == "ppo_clip":
        found["dual_clip"] = draw.choice([None, None, 1.02])
    if draw.random() < 0.5:
        placement = draw.choice(["loss", "reward"])
        estimator = draw.choice(["k2", "k3"] if placement == "loss" else ["k1", "k2", "k3"])
        found["kl"] = {"coef": 0.1, "placement": placement, "estimator": estimator}
    kind = draw.choice(["none", "tis", "icepop", "sequence_mask"])
    correction: dict[str, Any] = {"kind": kind}
    if kind != "none":
        correction["high"] = draw.choice([1.01, 2.0])
    if kind in ("icepop", "sequence_mask"):
        correction["low"] = draw.choice([0.99, 0.5])
    found["correction"] = correction
    if found["advantage"] == "gae":
        found |= {"gamma": draw.choice([0.9, 1.0]), "lam": draw.choice([0.8, 1.0])}
    if family == "qwen3_5_moe_text" and draw.random() < 0.5:
        found["routing_replay"] = True
    return found


def _trainer(draw: random.Random, length: int, num_prompts: int) -> dict[str, Any]:
    schedule = draw.choice(["constant", "constant", "linear", "cosine"])
    optimizer: dict[str, Any] = {
        "lr": _lr(draw),
        "betas": draw.choice([(0.9, 0.95), (0.8, 0.999), (0.0, 0.9)]),
        "eps": draw.choice([1e-5, 1e-4]),
        "weight_decay": draw.choice([0.0, 0.1, 1.0]),
        "max_grad_norm": draw.choice([0.0, 0.1, 1.0]),
        "schedule": schedule,
        "warmup_steps": draw.choice([0, 0, 2]),
    }
    if schedule != "constant":
        optimizer["min_lr_ratio"] = draw.choice([0.0, 0.3])
    found: dict[str, Any] = {
        "optimizer": optimizer,
        "parity": "off",
        "recompute": draw.choice(["off", "off", "full", "selective", "uniform:2", "block:1"]),
        "logits_chunk_tokens": draw.choice([5, 64, 1024]),
        "num_epochs": draw.choice([1, 1, 2]),
    }
    if draw.random() < 0.5:
        found["prompts_per_minibatch"] = draw.randint(1, num_prompts)
    if draw.random() < 0.4:
        found["micro_batch_size"] = draw.choice([1, 2, 3])
    else:
        found["max_tokens_per_microbatch"] = draw.choice([length, 2 * length, 4 * length, 16384])
    return found


def _lr(draw: random.Random) -> float:
    return draw.choice([2e-4, 5e-4, 1e-3])


def replayed(seed: int, folder: Path) -> Replay:
    """Run and replay a seed in an empty folder."""
    cfg = draw_run(seed, folder)
    reinforce.run(cfg)
    return replay(cfg.run.dir, folder / "model")


def _main(seeds: Iterable[int]) -> None:
    """Print what each seed has found, and the largest difference of each kind."""
    worst: dict[str, tuple[float, int, str]] = {}
    folder = Path(tempfile.mkdtemp(prefix="drawn-runs-"))
    disable_progress_bar()
    for seed in seeds:
        own = folder / str(seed)
        begin = time.perf_counter()
        cfg = draw_run(seed, own)
        reinforce.run(cfg)
        middle = time.perf_counter()
        found = replay(cfg.run.dir, own / "model")
        end = time.perf_counter()
        for kind, difference in found.largest.items():
            worst[kind] = max(worst.get(kind, (-1.0, 0, "")), (difference, seed, found.where[kind]))
        metrics = lines(cfg.run.dir / "metrics.jsonl")
        counts = {
            "steps": found.num_steps,
            "tokens": found.num_tokens,
            "stale": found.num_stale,
            "cut": found.num_cut,
            "preempted": sum(row.get("engine/preemptions", 0) for row in metrics),
            "cached": max(row.get("rollout/cached_token_share", 0) for row in metrics),
            "turns": max(row.get("rollout/turns/max", 1) for row in metrics),
        }
        wrong = {
            k: f"{v:.1e} {found.where[k]}" for k, v in found.largest.items() if not v < LIMITS[k]
        }
        texts = [f"{name} {value:.3g}" for name, value in counts.items()]
        texts.append(f"{middle - begin:.1f} + {end - middle:.1f} s")
        sys.stdout.write(f"{seed}: {', '.join(texts)} {wrong or ''}\n")
        sys.stdout.flush()
        shutil.rmtree(own)
    for kind, (difference, seed, where) in worst.items():
        sys.stdout.write(f"{kind}: {difference:.2e} of {LIMITS[kind]:.0e} (seed {seed}, {where})\n")
    shutil.rmtree(folder)


if __name__ == "__main__":
    _main(range(*map(int, sys.argv[1:])))
