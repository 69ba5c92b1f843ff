"""A GRPO script of TRL: accuracy by a column of the data set. `make quickstart` first."""

from datasets import load_dataset

import hone

dataset = load_dataset("json", data_files="runs/quickstart/train.jsonl", split="train")
dataset = dataset.rename_column("answer", "solution").remove_columns("completion")


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
