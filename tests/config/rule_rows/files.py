"""Combinations that the rules on files find."""

from __future__ import annotations

from tests.config.rule_rows.row import Row

ROWS: list[Row] = [
    # the critic
    ("rl", "algorithm.advantage=gae critic.path=./nowhere", "error", "critic.path"),
    ("rl", "algorithm.advantage=gae critic.path=empty", "error", "critic.path"),
    ("rl", "algorithm.advantage=gae critic.path=foreign", "error", "critic.path"),
    # the teacher
    ("rl", "teacher.path=./nowhere", "error", "teacher.path"),
    ("rl", "teacher.path=/tmp", "error", "teacher.path"),
    ("rl", "teacher.path=foreign", "error", "teacher.path"),
    ("rl", "teacher.path=judge", "error", "teacher.path"),
    # a model of fewer tokens than the tokenizer, the teacher, the critic and the judge likewise
    *[(command, "model.path=narrow", "error", "model.path")
      for command in ("rl", "sft", "dpo", "reward-model", "eval", "generate")],
    ("rl", "model.path=narrow model.tokenizer=model", "error", "model.path model.tokenizer"),
    ("rl", "teacher.path=narrow", "error", "teacher.path"),
    ("rl", "algorithm.advantage=gae critic.path=narrow", "error", "critic.path"),
    ("eval", "reward.model.path=small_judge", "error", "reward.model.path"),
    # a model that scores in place of one that predicts
    *[(command, "model.path=judge", "error", "model.path")
      for command in ("rl", "sft", "dpo", "eval", "generate")],
    # images
    *[(command, "model.path=llava", "error", "model.path")
      for command in ("rl", "sft", "dpo", "eval", "generate")],
    *[(command, "model.path=gemma3 data.max_image_tokens=255", "error", "data.max_image_tokens")
      for command in ("rl", "serve")],
    ("rl", "model.path=gemma3 engine.max_num_batched_tokens=200", "error",
     "engine.max_num_batched_tokens"),
    ("rl", "model.path=gemma3 data.max_prompt_tokens=256", "warning", "data.max_prompt_tokens"),
    ("rl", "model.path=qwen3_vl data.max_image_tokens=2048", "warning",
     "data.max_image_tokens data.max_prompt_tokens"),
    ("sft", "model.path=qwen3_vl data.max_image_tokens=4096", "warning",
     "data.max_image_tokens data.max_tokens"),
    *[("rl", key, "warning", key.partition("=")[0])
      for key in ("data.max_image_tokens=64", "data.image_errors=drop", "data.image_urls=true",
                  "data.image_workers=0", "model.image_cache_gib=2")],
    *[("serve", key, "warning", key.partition("=")[0])
      for key in ("data.max_image_tokens=64", "data.image_workers=0")],
    # preferences
    ("dpo", "data.train.0.columns.margin=by", "warning", "data.train.0.columns.margin"),
    # a reward model
    ("rl", "reward.model.path=./nowhere", "error", "reward.model.path"),
    ("rl", "reward.model.path=bare", "error", "reward.model.path"),
    # files
    ("rl", "model.path=impossible", "error", "model.path"),
    ("rl", "model.path=runs/none/model", "error", "model.path"),
    ("rl", "model.path=train.jsonl", "error", "model.path"),
    ("rl", "model.path=empty", "error", "model.path"),
    ("rl", "model.path=bare", "error", "model.init model.path"),
    ("rl", "model.path=mute", "error", "model.tokenizer model.path"),
    ("rl", "model.path=bare data.chat=always", "error", "data.chat"),
    ("sft", "model.path=bare data.system_prompt=Answer.", "error", "data.system_prompt"),
    *[(command, f"model.path={path}", level, "model.path")
      for command in ("rl", "sft", "eval", "generate")
      for path, level in (("modle", "error"), ("./modle", "error"),
                          ("bare/none", "warning"))],
    ("rl", "model.tokenizer=./none", "error", "model.tokenizer"),
    ("rl", "model.tokenizer=bare/none", "warning", "model.tokenizer"),
    ("rl", "model.chat_template=none.jinja", "error", "model.chat_template"),
    ("rl", "model.dtype=bfloat16 run.device=cpu", "warning", "model.dtype run.device"),
    ("rl", "data.train=[]", "error", "data.train"),
    ("sft", "data.train.0.answer_pattern=x(.+)", "warning", "data.train.0.answer_pattern"),
    ("eval", "data.shuffle=false", "warning", "data.shuffle"),
    ("eval", "data.shuffle_window=9", "warning", "data.shuffle_window"),
    ("generate", "data.shuffle_window=9", "warning", "data.shuffle_window"),
    *[(command, "data.eval.0.path=eval.jsonl data.eval.0.columns.difficulty=x", "warning",
       "data.eval.0.columns.difficulty")
      for command in ("rl", "sft", "dpo", "reward-model", "eval")],
    *[(command, "data.train.0.columns.pass_rate=x", "warning", "data.train.0.columns.pass_rate")
      for command in ("rl", "sft", "dpo", "reward-model")],
    ("generate", "data.train.0.columns.difficulty=x", "warning", "data.train.0.columns.difficulty"),
    ("rl", "data.max_eval_rows=9", "warning", "data.max_eval_rows"),
    ("generate", "data.max_eval_rows=9 data.eval_fraction=0.5", "warning", "data.max_eval_rows"),
    *[(command, f"{flags}data.train.0.{key}=2", "warning", f"data.train.0.{key}")
      for command, flags in (("eval", "data.train.0.path=rows.jsonl "), ("generate", ""))
      for key in ("weight", "max_epochs", "from_step", "until_step")],
    ("rl", "data.train.0.path=tran.jsonl", "error", "data.train.0.path"),
    ("rl", "data.train.0.path=notes.txt", "error", "data.train.0.path"),
    ("rl", "data.train.1.path=train.jsonl", "warning", "data.train.0.path data.train.1.path"),
    ("rl", "data.train.0.answer_pattern=(", "error", "data.train.0.answer_pattern"),
    ("rl", "data.eval.0.path=train.jsonl eval.every_n_steps=100", "warning",
     "data.eval.0.path data.train.0.path"),
    ("rl", "data.eval.0.path=train.jsonl data.eval_fraction=0.1 eval.every_n_steps=100", "warning",
     "data.eval data.eval_fraction"),
    ("rl", "data.prompt_template=hello", "error", "data.prompt_template"),
    ("rl", "data.prompt_template={prompt", "error", "data.prompt_template"),
    ("rl", "data.chat=never data.system_prompt=x", "warning", "data.chat data.system_prompt"),
    ("generate", "output=train.jsonl", "error", "output data.train.0.path"),
    ("generate", "output=train.jsonl/out.jsonl", "error", "output"),
    ("generate", "output=model", "error", "output"),
    # the course of a run
    ("eval", "data.eval=[]", "error", "data.eval data.train data.eval_fraction"),
    ("generate", "data.eval_fraction=0.1", "warning", "data.eval_fraction data.train"),
    ("rl", "run.dir=train.jsonl", "error", "run.dir"),
    ("rl", "run.dir=train.jsonl/run", "error", "run.dir"),
    ("sft", "run.dir=train.jsonl/run", "error", "run.dir"),
    ("eval", "run.dir=train.jsonl/run/eval", "error", "run.dir"),
    ("generate", "output=train.jsonl/a.jsonl", "error", "output"),
    # models that nothing can run, or not so
    *[(command, "model.path=mixtral", "error", "model.path")
      for command in ("rl", "sft", "eval", "generate", "bench engine", "bench train")],
    *[("rl", f"model.path={name}", "error", "model.path")
      for name in ("quantised", "chunked", "dynamic", "gpt2")],
    ("rl", "model.path=glm4", "warning", "model.path"),
    ("sft", "model.path=glm4 model.lora.rank=4", "error", "model.lora.rank model.path"),
    ("reward-model", "model.path=glm4", "error", "model.path"),
    ("rl", "model.path=glm4 algorithm.advantage=gae", "error", "model.path"),
    ("rl", "critic.path=glm4 algorithm.advantage=gae", "error", "critic.path"),
    ("eval", "reward.model.path=glm4", "error", "reward.model.path"),
    ("rl", "data.chat=never model.chat_template=train.jsonl", "warning",
     "data.chat model.chat_template"),
]  # fmt: skip
