"""Rows of `hone sft`, `hone dpo` and `hone reward-model`."""

from __future__ import annotations

from dataclasses import replace

from tests.config.row import Row
from tests.config.walk_rows.shared import (
    CHAT,
    EIGHT,
    FIRST_HELD_OUT,
    NO_LEVEL,
    NO_PICTURES,
    course_rows,
    filter_rows,
    image_rows,
    mix_rows,
    model_rows,
    not_used,
    run_rows,
    source_rows,
    trainer_rows,
)

SFT_COLUMNS = ("--data.train=[{path: columns.jsonl, max_rows: 8}]",)
SFT_EVAL_COLUMNS = ("--data.eval=[{path: columns.jsonl, max_rows: 4}]",)
SFT_HUB = ("--data.train=[{path: owner/name, columns: {answer: answer}}]",)
SFT_EVAL_HUB = ("--data.eval=[{path: owner/name, max_rows: 4, columns: {answer: answer}}]",)
SFT_SPLIT = ("--data.train=[{path: split, columns: {answer: answer}}]",)
SFT_EVAL_SPLIT = ("--data.eval=[{path: split, columns: {answer: answer}}]",)


def sft_sources(section: str) -> dict[str, Row]:
    is_train, key = section == "train", f"data.{section}.0"
    columns = SFT_COLUMNS if is_train else SFT_EVAL_COLUMNS
    rows = source_rows(
        section,
        "metrics",
        {
            "columns.prompt": Row("q", "metrics", columns),
            "columns.answer": Row("c", "metrics", columns),
            "columns.task": not_used(f"{key}.columns.task", "kind"),
            "answer_pattern": not_used(f"{key}.answer_pattern", "^."),
            "task": not_used(f"{key}.task", "sums"),
        },
    )
    rows[f"{key}.split"] = Row("test", "metrics", SFT_SPLIT if is_train else SFT_EVAL_SPLIT)
    hub = SFT_HUB if is_train else SFT_EVAL_HUB
    rows[f"{key}.subset"] = Row("main", "datasets.load_dataset", hub)
    if is_train:
        rows |= mix_rows(
            "metrics", "path: train.jsonl, columns: {answer: answer}", "path: columns.jsonl"
        )
    return rows


SFT: dict[str, Row] = {
    **run_rows(trains=True),
    **model_rows("metrics", lora=True, chat=("--data.chat=always", "--data.max_prompt_tokens=24")),
    **sft_sources("train"),
    **sft_sources("eval"),
    **image_rows(),
    **filter_rows("metrics"),
    "run.seed": Row("1", "metrics"),
    "data.eval_fraction": Row("0.5", "metrics", ("--data.eval=[]", "--eval.every_n_steps=0")),
    "data.shuffle": Row("false", "metrics"),
    "data.shuffle_window": Row("2", "metrics"),
    "data.max_eval_rows": Row("1", "metrics", FIRST_HELD_OUT),
    "data.chat": Row("always", "metrics", ("--data.max_prompt_tokens=24",)),
    "data.system_prompt": Row("1", "metrics", CHAT),
    "data.prompt_template": Row("1{prompt}", "metrics"),
    "data.max_prompt_tokens": Row("3", "log:too long"),
    "data.overlong_prompts": Row("error", "log:raise the limit", ("--data.max_prompt_tokens=3",)),
    "data.max_tokens": Row("6", "metrics"),
    "data.examples_per_step": Row("3", "metrics"),
    "data.train_on_prompt": Row("true", "metrics"),
    **{
        key: replace(row, command=row.command and "check sft")
        for key, row in trainer_rows("metrics", rl=False).items()
    },
    **course_rows(),
    "log.samples_per_step": not_used("log.samples_per_step", "1"),
    "checkpoint.keep_best": Row(
        "false",
        "files",
        (
            "--checkpoint.every_n_steps=1",
            "--checkpoint.keep_last=1",
            "--eval.every_n_steps=1",
            "--run.steps=3",
            "--trainer.optimizer.lr=30",  # so that the loss rises
        ),
    ),
}


def dpo_sources(section: str) -> dict[str, Row]:
    key, other = f"data.{section}.0", "[{path: pairs/test.jsonl}]"
    columns = (f"--data.{section}=[{{path: preferred.jsonl}}]",)
    labelled = (
        *KTO,
        "--data.train=[{path: labelled.jsonl}]",
        "--data.eval=[{path: labelled.jsonl}]",
    )
    if section == "eval":
        other = "[{path: pairs/train.jsonl}]"
    rows = {
        f"data.{section}": Row(other, "metrics"),
        f"{key}.path": Row("preferred.jsonl", "metrics"),
        f"{key}.split": Row("test", "metrics", (f"--data.{section}=[{{path: pairs}}]",)),
        f"{key}.subset": Row(
            "main", "datasets.load_dataset", (f"--data.{section}=[{{path: owner/name}}]",)
        ),
        f"{key}.max_rows": Row("2", "metrics"),
        f"{key}.columns.prompt": Row("q", "metrics", columns),
        f"{key}.columns.answer": Row("c", "metrics", labelled),
        f"{key}.columns.chosen": Row("c", "metrics", columns),
        f"{key}.columns.rejected": Row("c", "metrics", columns),
        f"{key}.columns.label": Row("good", "metrics", labelled),
        f"{key}.columns.margin": not_used(f"{key}.columns.margin", "c"),
        f"{key}.columns.images": NO_PICTURES,
        f"{key}.columns.difficulty": NO_LEVEL
        if section == "train"
        else not_used(f"{key}.columns.difficulty", "level"),
        f"{key}.columns.pass_rate": not_used(f"{key}.columns.pass_rate", "rate"),
        f"{key}.columns.task": not_used(f"{key}.columns.task", "kind"),
        f"{key}.answer_pattern": not_used(f"{key}.answer_pattern", "^."),
        f"{key}.task": not_used(f"{key}.task", "sums"),
    }
    if section == "train":
        rows |= mix_rows("metrics", "path: pairs/train.jsonl", "path: preferred.jsonl")
    return rows


KTO = ("--algorithm.loss=kto",)
MORE_PAIRS = (  # more than one pass has room for
    "--data.examples_per_step=8",
    "--data.eval=[{path: pairs/train.jsonl}]",
)
KEEP_BEST = SFT["checkpoint.keep_best"]
DPO: dict[str, Row] = {
    **{
        key: replace(row, command=row.command and "check dpo")
        for key, row in SFT.items()
        if not key.startswith(("data.train", "data.eval.")) and key != "data.eval"
    },
    **dpo_sources("train"),
    **dpo_sources("eval"),
    **{
        f"trainer.max_tokens_per_{key}": replace(
            SFT[f"trainer.max_tokens_per_{key}"], value=value, given=MORE_PAIRS
        )
        for key, value in (("microbatch", "48"), ("forward", "50"))
    },
    "trainer.micro_batch_size": replace(SFT["trainer.micro_batch_size"], value="2"),
    **{
        f"trainer.parallel.reference_{name}_size": Row("3", "findings", EIGHT, command="check dpo")
        for name in ("ring", "ulysses")
    },
    "checkpoint.keep_best": replace(KEEP_BEST, given=(*KEEP_BEST.given, "--algorithm.loss=ipo")),
    "algorithm.loss": Row("{hinge: 1, sft: 0.1}", "metrics"),
    "algorithm.beta": Row("0.7", "metrics"),
    "algorithm.reference_cache": Row("kept", "log:scored by the reference, and kept in kept/"),
    "algorithm.label_smoothing": Row("0.2", "metrics"),
    "algorithm.simpo_gamma": Row("0.9", "metrics", ("--algorithm.loss=simpo",)),
    "algorithm.desirable_weight": Row("2", "metrics", KTO),
    "algorithm.undesirable_weight": Row("2", "metrics", KTO),
}


def scorer_sources(section: str) -> dict[str, Row]:
    key = f"data.{section}.0.columns"
    columns = (f"--data.{section}=[{{path: preferred.jsonl}}]",)
    return dpo_sources(section) | {
        f"{key}.margin": Row("m", "metrics", columns),
        f"{key}.answer": not_used(f"{key}.answer", "c"),
        f"{key}.label": not_used(f"{key}.label", "c"),
    }


REWARD_MODEL: dict[str, Row] = {
    **{
        key: replace(row, command=row.command and "check reward-model")
        for key, row in {**DPO, **{key: SFT[key] for key in SFT if "reference_" in key}}.items()
        if not key.startswith("algorithm.")
    },
    **scorer_sources("train"),
    **scorer_sources("eval"),
    "trainer.max_tokens_per_microbatch": replace(
        DPO["trainer.max_tokens_per_microbatch"], value="50"
    ),
    "trainer.logits_chunk_tokens": not_used("trainer.logits_chunk_tokens", "64"),
    "checkpoint.keep_best": KEEP_BEST,
    "algorithm.center_coef": Row("0.5", "metrics"),
}
