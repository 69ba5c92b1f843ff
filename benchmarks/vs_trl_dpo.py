"""Pairs/s of `hone dpo` and of TRL's DPOTrainer on the same random weights and pairs, one GPU.

    python benchmarks/vs_trl_dpo.py --shape qwen3-1.7b --side hone [--trainer.recompute full]
    python benchmarks/vs_trl_dpo.py --shape qwen3-1.7b --side trl --batch 4 8

Prompts have about 250 tokens, completions log-normal lengths (median 350, sigma 0.7, at most
1,200). Both take AdamW steps of 32 pairs with a frozen reference in memory.
hone packs rows, TRL pads them to the longest of its batch, whose size `--batch` tries in
turn. The first step is not counted. The share of the matrix rate is of 6 N FLOPs a token of the
policy and 2 N of the reference, attention left out, of 790 TFLOP/s. Further flags are settings.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PAIRS_A_STEP = 32
PEAK_FLOPS = 790e12


def longest(shape: str) -> int:
    """Tokens of a row, at most."""
    return 512 if shape == "tiny" else 1500


def make_inputs(folder: Path, shape: str) -> list[int]:
    """The model folder without weights, and pairs. Tokens of each row, prompt included."""
    from hone.models.tiny import make_bpe_tokenizer, make_model_folder, make_tiny_model

    draw = random.Random(0)
    syllables = ["ba", "ko", "li", "mu", "ne", "pa", "ri", "so", "tu", "ze"]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(600)]
    tokenizer = make_bpe_tokenizer([" ".join(draw.choices(words, k=400))], vocab_size=1024)
    if shape == "tiny":
        make_tiny_model(folder / "model", tokenizer=tokenizer, weights=False)
    else:
        make_model_folder(folder / "model", shape, tokenizer=tokenizer)

    def text(num_tokens: int) -> str:
        ids = tokenizer.encode(" ".join(draw.choices(words, k=num_tokens)))
        return tokenizer.decode(ids[:num_tokens])

    lengths: list[int] = []
    with (folder / "pairs.jsonl").open("w", encoding="utf-8") as file:
        for _ in range(8 * PAIRS_A_STEP):
            sizes = [
                min(round(draw.lognormvariate(5.858, 0.7)) + 1, longest(shape) - 300)
                for _ in range(2)
            ]
            prompt = text(250)
            row = {"prompt": prompt, "chosen": text(sizes[0]), "rejected": text(sizes[1])}
            file.write(json.dumps(row) + "\n")
            lengths += [250 + size for size in sizes]
    return lengths


def run_hone(folder: Path, shape: str, steps: int, settings: list[str]) -> list[float]:
    from hone.cli.main import main as hone

    flags: dict[str, Any] = {
        "run.dir": folder / "run",
        "run.steps": steps,
        "model.path": folder / "model",
        "model.init": "random",
        "data.train.0.path": folder / "pairs.jsonl",
        "data.chat": "never",
        "data.max_prompt_tokens": 300,
        "data.max_tokens": longest(shape),
        "data.examples_per_step": PAIRS_A_STEP,
        "trainer.optimizer.lr": 1e-6,
        "eval.every_n_steps": 0,
        "checkpoint.every_n_steps": 0,
        "log.to": "[]",
    }
    code = hone(["dpo", *(x for k, v in flags.items() for x in (f"--{k}", str(v))), *settings])
    metrics = folder / "run" / "metrics.jsonl"
    if code != 0 and not metrics.exists():
        sys.exit(code)
    rows = [json.loads(line) for line in metrics.open(encoding="utf-8")]
    return [row["time/step_s"] - row.get("time/checkpoint_s", 0.0) for row in rows]


def run_trl(folder: Path, steps: int, batch: int, checkpointing: bool) -> list[float]:
    import torch
    from datasets import Dataset
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import DPOConfig, DPOTrainer

    class Clock(TrainerCallback):
        def __init__(self) -> None:
            self.ends: list[float] = []

        def on_step_end(self, *args: Any, **kwargs: Any) -> None:
            torch.cuda.synchronize()
            self.ends.append(time.perf_counter())

    def model() -> Any:
        config = AutoConfig.from_pretrained(folder / "model")
        with torch.device("cuda"):
            return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)

    rows = [json.loads(line) for line in (folder / "pairs.jsonl").open(encoding="utf-8")]
    args = DPOConfig(
        output_dir=str(folder / f"trl{batch}"),
        per_device_train_batch_size=batch,
        gradient_accumulation_steps=PAIRS_A_STEP // batch,
        max_steps=steps,
        max_length=1500,
        bf16=True,
        gradient_checkpointing=checkpointing,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        learning_rate=1e-6,
    )
    clock = Clock()
    trainer = DPOTrainer(
        model(),
        ref_model=model(),
        args=args,
        train_dataset=Dataset.from_list(rows),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[clock],
    )
    trainer.train()
    return [b - a for a, b in zip(clock.ends, clock.ends[1:], strict=False)]


def report(name: str, seconds: list[float], folder: Path, num_tokens: float) -> None:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(folder / "model")
    with torch.device("meta"):
        number = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    step = statistics.median(seconds)
    flops = 8 * number * num_tokens * 2 * PAIRS_A_STEP
    peak = torch.cuda.max_memory_allocated() / 2**30 if torch.cuda.is_available() else 0.0
    print(
        f"RESULT {name}: {step:.2f} s a step, {PAIRS_A_STEP / step:.1f} pairs/s, "
        f"{2 * PAIRS_A_STEP * num_tokens / step:,.0f} tokens/s, "
        f"{flops / step / PEAK_FLOPS:.2f} of the matrix rate, {peak:.1f} GiB; "
        f"steps {', '.join(f'{s:.2f}' for s in seconds)}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--shape", default="qwen3-1.7b")
    parser.add_argument("--side", choices=["hone", "trl"], required=True)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--batch", type=int, nargs="+", default=[4, 8], help="pairs a pass of TRL")
    parser.add_argument("--checkpointing", action="store_true", help="TRL recomputes layers")
    args, settings = parser.parse_known_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        lengths = make_inputs(folder, args.shape)
        mean = statistics.mean(lengths)
        if args.side == "hone":
            seconds = run_hone(folder, args.shape, args.steps, settings)[1:]
            report(f"hone {args.shape} {' '.join(settings)}", seconds, folder, mean)
            return
        for batch in args.batch:
            seconds = run_trl(folder, args.steps, batch, args.checkpointing)
            report(f"TRL {args.shape}, {batch} pairs a pass", seconds, folder, mean)


if __name__ == "__main__":
    main()
