"""A recipe of OpenRLHF: a `reward_func` that returns rewards, scores and logs. `make quickstart`
first.
"""

import re

import torch

import hone


def reward_func(queries, prompts, labels, **kwargs):
    """Two digits of which the first is 1, and a little for the right number."""
    formatted, right = [], []
    for query, prompt, label in zip(queries, prompts, labels):
        response = query[len(prompt) :]
        formatted.append(1.0 if re.fullmatch(r"1\d", response) else 0.0)
        right.append(1.0 if response == label else 0.0)
    formatted, right = torch.tensor(formatted), torch.tensor(right)
    return {
        "rewards": formatted + 0.2 * right,
        "scores": formatted,
        "extra_logs": {"accuracy": right.mean(), "format": formatted},
    }


result = hone.rl(
    reward=reward_func,
    data={"train": [{"path": "runs/quickstart/train.jsonl"}], "chat": "never"},
    model={"path": "runs/quickstart/sft/model"},
    rollout={"prompts_per_step": 32, "n_samples_per_prompt": 8, "max_completion_tokens": 6},
    trainer={"optimizer": {"lr": 5e-4}},
    run={"dir": "runs/openrlhf_format", "steps": 60},
)
print(result)
