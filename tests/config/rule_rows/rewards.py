"""Combinations that the rules on rewards find."""

from __future__ import annotations

from tests.config.rule_rows.row import Row

WHOLE = "reward.functions.0.fn=ranks.py:rank reward.functions.0.whole_groups=true"
"""A function that compares the completions of a prompt."""

ROWS: list[Row] = [
    # what a file imports
    ("rl", "reward.functions.0.fn=imports.py:score", "error", "reward.functions.0.fn"),
    ("eval", "reward.functions.0.fn=relative.py:score", "error", "reward.functions.0.fn"),
    ("rl", "env.path=imports.py:Game", "error", "env.path"),
    # rewards
    ("rl", "reward.functions=[]", "error", "reward.functions"),
    ("rl", "reward.functions.0.weight=0", "error", "reward.functions"),
    ("rl", "reward.clip=[1,-1]", "error", "reward.clip"),
    ("rl", "reward.clip=[1,1]", "error", "reward.clip"),
    ("rl", "reward.functions.0.fn=exact_mach", "error", "reward.functions.0.fn"),
    ("rl", "reward.functions.0.fn=scores.py:", "error", "reward.functions.0.fn"),
    ("rl", "reward.functions.0.fn=nowhere.py:score", "error", "reward.functions.0.fn"),
    ("rl", "reward.functions.0.fn=scores.py:scroe", "error", "reward.functions.0.fn"),
    ("rl", "reward.functions.0.fn=broken.py:score", "error", "reward.functions.0.fn"),
    ("rl", "reward.functions.0.fn=no_such_module.x:score", "error", "reward.functions.0.fn"),
    ("rl", "reward.functions.0.fn=scores/py:score", "error", "reward.functions.0.fn"),
    ("rl", "reward.functions.0.fn=ftp://host/get_reward", "error", "reward.functions.0.fn"),
    ("rl", "reward.functions.0.fn=localhost:5000/get_reward", "error", "reward.functions.0.fn"),
    ("rl", "reward.functions.0.fn=code_tests reward.timeout_s=5", "error",
     "reward.functions.0.args.timeout_s reward.timeout_s"),
    ("rl", "env.path=Game", "error", "env.path"),
    ("rl", "env.path=nowhere.py:Game", "error", "env.path"),
    ("rl", "env.path=envs.py:Gmae", "error", "env.path"),
    ("rl", "env.path=envs.py:Mute", "error", "env.path"),
    ("rl", "env.max_turns=3", "warning", "env.max_turns env.path"),
    ("rl", 'env.args={"depth":3}', "warning", "env.args env.path"),
    ("rl", "reward.functions.0.whole_groups=true", "error", "reward.functions.0.fn"),
    ("rl", "reward.functions.0.fn=scores.py:score reward.functions.0.whole_groups=true", "error",
     "reward.functions.0.fn"),
    ("rl", "reward.functions.0.fn=ranks.py:needy reward.functions.0.whole_groups=true", "error",
     "reward.functions.0.fn"),
    ("eval", "reward.functions.0.fn=ranks.py:hoping reward.functions.0.whole_groups=true "
     "eval.n_samples_per_prompt=2 env.path=envs.py:Game", "warning",
     "reward.functions.0.whole_groups"),
    ("eval", WHOLE, "warning", "reward.functions.0.whole_groups eval.n_samples_per_prompt"),
    # a reward model
    ("rl", "reward.model.path=language", "error", "reward.model.path"),
    ("eval", "reward.model.path=two", "error", "reward.model.path"),
    ("generate", "reward.model.path=two", "error", "reward.model.path"),
    ("rl", "reward.model.path=judge reward.model.weight=0", "error",
     "reward.model.weight"),
    ("rl", "reward.model.path=short", "warning",
     "data.max_prompt_tokens rollout.max_completion_tokens reward.model.path"),
    ("rl", "model.path=qwen3_vl reward.model.path=seeing_judge data.max_image_tokens=255", "error",
     "data.max_image_tokens reward.model.path"),
    ("rl", "reward.model.weight=2", "warning", "reward.model.weight reward.model.path"),
    ("rl", "reward.model.max_tokens_per_forward=99", "warning",
     "reward.model.max_tokens_per_forward reward.model.path"),
    ("rl", "reward.num_workers=100000", "warning", "reward.num_workers"),
    ("rl", "reward.max_failure_rate=1", "warning", "reward.max_failure_rate"),
    # models that nothing can run, or not so
    ("generate", "keep=best n_samples_per_prompt=2", "error", "keep reward.functions"),
    ("generate", "keep=pairs reward.functions.0.fn=math", "error", "keep n_samples_per_prompt"),
    ("generate", "keep=best reward.functions.0.fn=math", "warning",
     "keep n_samples_per_prompt"),
    ("generate", "pass_threshold=0.5", "warning", "pass_threshold keep"),
    # traces
    ("rl", "reward.functions.0.fn=silent.py:score", "error", "reward.functions.0.fn"),
]  # fmt: skip
