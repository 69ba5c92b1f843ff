"""A recipe of verl: a score by source of the data, with what it is made of.
`make quickstart` first.
"""

import json
import re
from pathlib import Path

import pyarrow as pa
from pyarrow.parquet import write_table

import hone


def process_fn(example, idx):
    return {
        "data_source": "large" if int(example["answer"]) > 9 else "small",
        "prompt": [{"role": "user", "content": example["prompt"]}],
        "reward_model": {"style": "rule", "ground_truth": example["answer"]},
        "extra_info": {"index": idx, "digits": 2},
    }


rows = map(json.loads, Path("runs/quickstart/train.jsonl").read_text().splitlines())
dataset = [process_fn(example, idx) for idx, example in enumerate(rows)]
write_table(pa.Table.from_pylist(dataset), "runs/quickstart/train_format.parquet")


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Half for the number of digits, half for the right number, of large ones alone."""
    digits = extra_info["digits"]
    is_formatted = re.fullmatch(rf"\d{{{digits}}}", solution_str) is not None
    is_right = data_source == "large" and solution_str == ground_truth
    return {
        "score": 0.5 * is_formatted + 0.5 * is_right,
        "acc": is_right,
        "format": is_formatted,
        "pred": solution_str,
    }


result = hone.rl(
    reward=compute_score,
    data="runs/quickstart/train_format.parquet",
    model={
        "path": "runs/quickstart/sft/model",
        "chat_template": Path(__file__).with_name("messages.jinja"),
    },
    rollout={"prompts_per_step": 32, "n_samples_per_prompt": 8, "max_completion_tokens": 6},
    trainer={"optimizer": {"lr": 5e-4}},
    run={"dir": "runs/verl_format", "steps": 60},
)
print(result)
