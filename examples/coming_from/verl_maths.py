"""verl's Parquet and `compute_score`. `make quickstart` first."""

import json
from pathlib import Path

import pyarrow as pa
from pyarrow.parquet import write_table

import hone


def make_map_fn(split):
    def process_fn(example, idx):
        return {
            "data_source": "sums",
            "prompt": [{"role": "user", "content": example["prompt"]}],
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": example["answer"]},
            "extra_info": {"split": split, "index": idx},
        }

    return process_fn


rows = map(json.loads, Path("runs/quickstart/train.jsonl").read_text().splitlines())
process_fn = make_map_fn("train")
dataset = [process_fn(example, idx) for idx, example in enumerate(rows)]
write_table(pa.Table.from_pylist(dataset), "runs/quickstart/train.parquet")


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """1 for the right number."""
    return 1.0 if solution_str.strip() == ground_truth else 0.0


result = hone.rl(
    reward=compute_score,
    data="runs/quickstart/train.parquet",
    model={
        "path": "runs/quickstart/sft/model",
        "chat_template": Path(__file__).with_name("messages.jinja"),
    },
    rollout={"prompts_per_step": 32, "n_samples_per_prompt": 8, "max_completion_tokens": 6},
    trainer={"optimizer": {"lr": 5e-4}},
    run={"dir": "runs/verl_maths", "steps": 60},
)
print(result)
