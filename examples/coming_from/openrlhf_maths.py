"""A recipe of OpenRLHF: `--input_key`, `--label_key` and a `reward_func` of queries.
`make quickstart` first.
"""

import json

import torch

import hone

with (
    open("runs/quickstart/train.jsonl") as source,
    open("runs/quickstart/labels.jsonl", "w") as out,
):
    for line in source:
        row = json.loads(line)
        out.write(json.dumps({"input": row["prompt"], "label": row["answer"]}) + "\n")


def reward_func(queries, prompts, labels, **kwargs):
    """1 for the right number behind the prompt."""
    rewards = []
    for query, prompt, label in zip(queries, prompts, labels):
        response = query[len(prompt) :]
        rewards.append(1.0 if response.strip() == label else 0.0)
    return torch.tensor(rewards)


columns = {"prompt": "input", "answer": "label"}
result = hone.rl(
    reward=reward_func,
    data={
        "train": [{"path": "runs/quickstart/labels.jsonl", "columns": columns}],
        "chat": "never",  # as without --apply_chat_template
    },
    model={"path": "runs/quickstart/sft/model"},
    rollout={"prompts_per_step": 32, "n_samples_per_prompt": 8, "max_completion_tokens": 6},
    trainer={"optimizer": {"lr": 5e-4}},
    run={"dir": "runs/openrlhf_maths", "steps": 60},
)
print(result)
