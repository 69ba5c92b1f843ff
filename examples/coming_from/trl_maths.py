"""A GRPO script of TRL: accuracy by a column of the data set. `make quickstart` first."""

import json
from pathlib import Path

import hone

# Rows as plain dicts; a data set of `datasets` is taken as it is, too.
rows = map(json.loads, Path("runs/quickstart/train.jsonl").read_text().splitlines())
dataset = [{"prompt": row["prompt"], "solution": row["answer"]} for row in rows]


def accuracy_reward(completions, solution, **kwargs):
    """Reward 1 for the right number."""
    return [1.0 if text == truth else 0.0 for text, truth in zip(completions, solution)]


result = hone.rl(
    {"data": {"chat": "never"}},  # TRL renders texts as they are
    reward=accuracy_reward,
    data=dataset,
    model={"path": "runs/quickstart/sft/model"},
    rollout={"prompts_per_step": 32, "n_samples_per_prompt": 8, "max_completion_tokens": 6},
    trainer={"optimizer": {"lr": 5e-4}},
    run={"dir": "runs/trl_maths", "steps": 60},
)
print(result)
