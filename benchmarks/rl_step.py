"""Where the time of an RL step goes: the real `hone rl` on random weights of a named shape.

    python benchmarks/rl_step.py --shape qwen3-0.6b
    python benchmarks/rl_step.py --shape tiny --steps 2 --prompts 4 --group 4 \
        --prompt-tokens 32 --completion-tokens 32

Weights and prompts are made on the spot. Untrained models practically never sample the end of
sequence, so every completion has full length. Further flags are settings, `--trainer.compile true`.
The first step compiles kernels and runs the launch gate; medians are over the others. Totals leave
checkpoints out. A run that `--seconds` ends prints the steps it has done and exits with 1.
"""

from __future__ import annotations

import argparse
import json
import platform
import random
import signal
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any, NoReturn

COLUMNS = {
    "generate s": "time/generate_s",
    "rows s": "time/experience_s",
    "train s": "time/train_s",
    "sync s": "time/sync_s",
    "record s": "time/record_s",
    "other s": "time/unattributed_s",
    "total s": "total_s",
    "tokens/s": "tokens_per_s",
    "R_gen": "perf/R_gen",
    "R_train": "perf/R_train",
    "R_step": "R_step",
    "peak GiB": "mem/gpu_peak_gib",
    "mismatch KL": "off_policy/mismatch_kl",
}
"""Column titles and the keys of a step's numbers."""

INTERRUPTED = 130


def reward(completion: str) -> float:
    """Cheap, and different within almost every group."""
    return sum(map(ord, completion)) % 8 / 8


def make_inputs(folder: Path, args: argparse.Namespace) -> None:
    """The model folder without weights, and prompts of about as many tokens as asked for."""
    from hone.models.tiny import SHAPES, make_bpe_tokenizer, make_tiny_model

    draw = random.Random(0)
    syllables = ["ba", "ko", "li", "mu", "ne", "pa", "ri", "so", "tu", "ze"]
    words = ["".join(draw.choices(syllables, k=draw.randint(1, 4))) for _ in range(600)]
    texts = [" ".join(draw.choices(words, k=args.prompt_tokens)) for _ in range(4 * args.prompts)]
    tokenizer = make_bpe_tokenizer(texts, vocab_size=1024)
    if args.shape == "tiny":
        make_tiny_model(folder / "model", tokenizer=tokenizer, weights=False)
    else:
        shape = {**SHAPES[args.shape], **({"num_layers": args.layers} if args.layers else {})}
        make_tiny_model(folder / "model", **shape, tokenizer=tokenizer, weights=False)
    with (folder / "prompts.jsonl").open("w", encoding="utf-8") as file:
        for text in texts:
            ids = tokenizer.encode(text)[: args.prompt_tokens]
            file.write(json.dumps({"prompt": tokenizer.decode(ids), "answer": ""}) + "\n")


def command(folder: Path, args: argparse.Namespace, settings: list[str]) -> list[str]:
    """Arguments of `hone` for a run on what `make_inputs` has made; `settings` come last."""
    longest = args.prompt_tokens + 8  # cutting a text may split its last word anew
    flags = {
        "run.dir": folder / "run",
        "run.steps": args.steps,
        "model.path": folder / "model",
        "model.init": "random",
        "data.train": json.dumps([{"path": str(folder / "prompts.jsonl")}]),
        "data.chat": "never",
        "data.max_prompt_tokens": longest,
        "rollout.prompts_per_step": args.prompts,
        "rollout.n_samples_per_prompt": args.group,
        "rollout.max_completion_tokens": args.completion_tokens,
        "engine.max_num_seqs": args.prompts * args.group,
        "reward.functions": json.dumps([{"fn": f"{Path(__file__).resolve()}:reward"}]),
        "log.to": "[]",
    }
    given = [part for name, value in flags.items() for part in (f"--{name}", str(value))]
    return ["rl", *given, *settings]


def run(folder: Path, args: argparse.Namespace, settings: list[str]) -> list[dict[str, float]]:
    """Train and return the metrics of each step."""
    from hone.cli.main import main as hone

    if args.seconds:
        signal.signal(signal.SIGALRM, interrupt)
        signal.alarm(args.seconds)
    code = hone(command(folder, args, ["--checkpoint.every_n_steps", "0", *settings]))
    signal.alarm(0)
    metrics = folder / "run" / "metrics.jsonl"
    if code != 0 and not (code == INTERRUPTED and metrics.exists()):
        sys.exit(code)
    with metrics.open(encoding="utf-8") as file:
        return [derived(json.loads(line)) for line in file]


def interrupt(*_: object) -> NoReturn:
    """Ends `hone rl` at once, saving nothing."""
    raise KeyboardInterrupt


def derived(row: dict[str, float]) -> dict[str, float]:
    """Adds the step without its checkpoint, and what depends on it."""
    total_s = row["time/step_s"] - row.get("time/checkpoint_s", 0.0)
    num_tokens = row["perf/tokens_per_s"] * row["time/step_s"]
    own = {"total_s": total_s, "tokens_per_s": num_tokens / total_s}
    if "perf/R_step" in row:
        own["R_step"] = row["perf/R_step"] * row["time/step_s"] / total_s
    return row | own


def device_name() -> str:
    import torch

    if torch.cuda.is_available():
        return f"{torch.cuda.get_device_name()}, torch {torch.__version__}"
    return f"{platform.processor() or platform.machine()}, torch {torch.__version__}"


def cell(key: str, value: float | None) -> str:
    if value is None:
        return "-"
    if key == "off_policy/mismatch_kl":
        return f"{value:.1e}"
    return f"{value:,.0f}" if key == "tokens_per_s" else f"{value:.3f}"


def table(rows: list[dict[str, float]]) -> str:
    later = rows[1:] or rows
    medians = {
        key: statistics.median(row[key] for row in later)
        for key in COLUMNS.values()
        if all(key in row for row in later)
    }
    lines = [["step", *COLUMNS], ["---"] * (1 + len(COLUMNS))]
    lines += [
        [str(i + 1), *(cell(key, row.get(key)) for key in COLUMNS.values())]
        for i, row in enumerate(rows)
    ]
    lines.append(["median", *(cell(key, medians.get(key)) for key in COLUMNS.values())])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", default="qwen3-0.6b", help="a shape of models.tiny, or tiny")
    parser.add_argument("--layers", type=int, default=0, help="so many; 0: all that it has")
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--prompts", type=int, default=32, help="prompts a step")
    parser.add_argument("--group", type=int, default=8, help="samples a prompt")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--completion-tokens", type=int, default=1024)
    parser.add_argument("--output", type=Path, help="JSON file for all numbers")
    parser.add_argument("--seconds", type=int, default=0, help="end after so many; 0: never")
    args, settings = parser.parse_known_args()
    with tempfile.TemporaryDirectory() as name:
        make_inputs(Path(name), args)
        rows = run(Path(name), args, settings)
    if not rows:
        sys.exit(f"no step was done within {args.seconds} s")
    parity: dict[str, Any] = {
        key.removeprefix("off_policy/parity/"): value
        for key, value in rows[0].items()
        if key.startswith("off_policy/parity/")
    }
    unattributed = max(row["time/unattributed_s"] / row["total_s"] for row in rows[1:] or rows)
    print(f"\n{args.shape}, {args.prompts} x {args.group} samples, {device_name()}")
    print(f"settings: {' '.join(settings) or 'defaults'}\n")
    print(table(rows))
    print(f"\nlaunch gate: {', '.join(f'{key} {value:.2e}' for key, value in parity.items())}")
    print(f"largest unattributed share of a step: {unattributed:.1%}")
    if args.output:
        run_facts = {"shape": args.shape, "settings": settings, "device": device_name()}
        args.output.write_text(json.dumps({**run_facts, "steps": rows}, indent=1))
    if len(rows) < args.steps:
        sys.exit(f"{len(rows)} of {args.steps} steps within {args.seconds} s")


if __name__ == "__main__":
    main()
