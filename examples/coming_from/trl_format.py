"""A GRPO script of TRL: messages, two rewards with weights, one of them `async`, one that abstains.
`make quickstart` first.
"""

import json
import re
from pathlib import Path

import hone


def make_conversation(example):
    return {"prompt": [{"role": "user", "content": example["prompt"]}]}


# Rows as plain dicts; a data set of `datasets` is taken as it is, too.
rows = map(json.loads, Path("runs/quickstart/train.jsonl").read_text().splitlines())
dataset = [{"answer": row["answer"], **make_conversation(row)} for row in rows]


def format_reward(completions, **kwargs):
    """Reward exactly two digits."""
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"^\d\d$", content) else 0.0 for content in contents]


async def large_sums_reward(prompts, completions, answer, trainer_state, **kwargs):
    """Reward the right number, where it has two digits; others are not judged."""
    rewards = []
    for completion, truth in zip(completions, answer):
        right = float(completion[0]["content"] == truth)
        rewards.append(right if len(truth) == 2 else None)
    return rewards


result = hone.rl(
    reward=[format_reward, {"fn": large_sums_reward, "weight": 0.5}],
    data=dataset,
    model={
        "path": "runs/quickstart/sft/model",
        "chat_template": Path(__file__).with_name("messages.jinja"),
    },
    rollout={"prompts_per_step": 32, "n_samples_per_prompt": 8, "max_completion_tokens": 6},
    trainer={"optimizer": {"lr": 5e-4}},
    run={"dir": "runs/trl_format", "steps": 60},
)
print(result)
