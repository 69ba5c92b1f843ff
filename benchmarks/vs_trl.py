"""GRPO step rate on one CPU: hone beside TRL, the same work in one run.

    pip install "trl==1.16.0"
    python benchmarks/vs_trl.py

Both train the same tiny Qwen3 (128 wide, 4 layers, random weights, float32) on the same prompts
with the same reward: 64 completions of at most 64 tokens in groups of 8, one optimizer step a
batch, no KL term, AdamW. TRL samples with its own `generate`. The two alternate in rounds, so that
a slow moment of the machine hits both; the median step of each is reported. The first steps of a
round are warm-up and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NUM_PROMPTS, GROUP, MAX_TOKENS, LR = 8, 8, 64, 1e-4
WARM_UP = 2


def reward_even(completion: str) -> float:
    """Share of even digits: every random completion earns something."""
    return sum(c in "02468" for c in completion) / max(len(completion), 1)


def make_inputs(folder: Path) -> None:
    """The model folder and the prompts, for both."""
    from hone.data.arithmetic import ALPHABET, generate, write_jsonl
    from hone.models.tiny import make_char_tokenizer, make_tiny_model

    alphabet = ALPHABET + "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVW"
    make_tiny_model(folder / "model", tokenizer=make_char_tokenizer(alphabet), seed=0)
    write_jsonl(folder / "prompts.jsonl", generate(512, seed=0, low=100, high=999))


def run_hone(folder: Path, steps: int) -> list[float]:
    """Seconds of each step."""
    from hone.cli.main import main

    run_dir = folder / f"hone-{time.time_ns()}"
    reward = f"{Path(__file__).resolve()}:reward_even"
    flags = {
        "run.dir": run_dir,
        "run.steps": steps,
        "model.path": folder / "model",
        "data.train": json.dumps([{"path": str(folder / "prompts.jsonl")}]),
        "data.chat": "never",
        "data.max_prompt_tokens": 16,
        "rollout.prompts_per_step": NUM_PROMPTS,
        "rollout.n_samples_per_prompt": GROUP,
        "rollout.max_completion_tokens": MAX_TOKENS,
        "reward.functions": json.dumps([{"fn": reward}]),
        "trainer.optimizer.lr": LR,
        "checkpoint.every_n_steps": 0,
        "log.to": "[]",
    }
    code = main(["rl", *(part for k, v in flags.items() for part in (f"--{k}", str(v)))])
    assert code == 0, f"hone rl ended with {code}"
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").open()]
    return [row["time/step_s"] for row in rows]


def run_trl(folder: Path, steps: int) -> list[float]:
    """Seconds of each step."""
    from datasets import load_dataset
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.seconds: list[float] = []

        def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
            self.start = time.perf_counter()

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            self.seconds.append(time.perf_counter() - self.start)

    def reward(completions: list[str], **_: Any) -> list[float]:
        return [reward_even(text) for text in completions]

    clock = Clock()
    trainer = GRPOTrainer(
        model=str(folder / "model"),
        reward_funcs=reward,
        train_dataset=load_dataset("json", data_files=str(folder / "prompts.jsonl"), split="train"),
        args=GRPOConfig(
            output_dir=str(folder / "trl"),
            max_steps=steps,
            per_device_train_batch_size=NUM_PROMPTS * GROUP,
            num_generations=GROUP,
            max_completion_length=MAX_TOKENS,
            learning_rate=LR,
            beta=0.0,
            lr_scheduler_type="constant",
            gradient_checkpointing=False,
            bf16=False,
            use_cpu=True,
            report_to="none",
            save_strategy="no",
            logging_steps=1000,
            disable_tqdm=True,
        ),
        callbacks=[clock],
    )
    trainer.train()
    return clock.seconds


def one_round(who: str, folder: Path, steps: int) -> list[float]:
    """Run one side in a process of its own; its last line of output is the list of seconds."""
    output = subprocess.run(
        [sys.executable, __file__, "--side", who, "--folder", str(folder), "--steps", str(steps)],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"},
    ).stdout
    return json.loads(output.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12, help="steps a round, warm-up included")
    parser.add_argument("--side", choices=["hone", "trl"], help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.side:
        seconds = (run_hone if args.side == "hone" else run_trl)(args.folder, args.steps)
        print("\n" + json.dumps(seconds))
        return

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_inputs(folder)
        seconds: dict[str, list[float]] = {"hone": [], "trl": []}
        for _ in range(args.rounds):
            for who, held in seconds.items():
                held += one_round(who, folder, args.steps)[WARM_UP:]
    print(f"{platform.processor() or platform.machine()}, {os.cpu_count()} cores")
    medians = {who: statistics.median(held) for who, held in seconds.items()}
    for who, held in seconds.items():
        spread = f"{min(held):.3f} to {max(held):.3f}"
        print(f"{who:5s} {medians[who]:.3f} s a step (median of {len(held)}, {spread})")
    print(f"hone is {medians['trl'] / medians['hone']:.2f} times as fast")


if __name__ == "__main__":
    main()
