"""Rows of `hone eval` and `hone generate`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tests.config.row import Row
from tests.config.walk_rows.rl import RL
from tests.config.walk_rows.shared import (
    CHAT,
    NO_PICTURES,
    WHOLE_GROUPS,
    engine_rows,
    eval_rows,
    filter_rows,
    image_rows,
    model_rows,
    not_used,
    run_rows,
    sampling_rows,
    unmixed_rows,
)


def inference_sources(section: str, key: str, shown: str, told: tuple[str, ...]) -> dict[str, Row]:
    columns = (f"--data.{section}=[{{path: columns.jsonl, max_rows: 4}}]",)
    return {
        f"{key}.columns.prompt": Row("q", shown, columns),
        f"{key}.columns.answer": Row("a", shown, columns),
        f"{key}.columns.task": Row("kind", shown, columns),
        f"{key}.columns.images": NO_PICTURES,
        f"{key}.columns.difficulty": not_used(f"{key}.columns.difficulty", "level"),
        f"{key}.columns.pass_rate": not_used(f"{key}.columns.pass_rate", "rate"),
        f"{key}.answer_pattern": Row("^.", shown, told),
        f"{key}.task": Row("sums", shown),
        f"{key}.path": Row("split/train.jsonl", shown, told),
        f"{key}.split": Row("test", shown, (f"--data.{section}=[{{path: split}}]",)),
        f"{key}.subset": Row(
            "main", "datasets.load_dataset", (f"--data.{section}=[{{path: owner/name}}]",)
        ),
        f"{key}.max_rows": Row("3", shown, told),
        f"data.{section}": Row("[{path: columns.jsonl, max_rows: 3}]", shown),
    }


def rendering_rows(shown: str, section: str) -> dict[str, Row]:
    return {
        "data.chat": Row("always", shown, ("--data.max_prompt_tokens=24",)),
        "data.system_prompt": Row("1", shown, CHAT),
        "data.prompt_template": Row("1{prompt}", shown),
        "data.max_prompt_tokens": Row("3", "log:too long"),
        "data.overlong_prompts": Row(
            "error", "log:raise the limit", ("--data.max_prompt_tokens=3",)
        ),
        "data.shuffle": not_used("data.shuffle", "false"),
        "data.shuffle_window": not_used("data.shuffle_window", "2"),
        "data.max_eval_rows": not_used("data.max_eval_rows", "2"),
        **image_rows(),
        **filter_rows(shown, section),
    }


RUNS = ("--run.", "--rollout.", "--eval.every_n_steps")


def without_runs(flags: Iterable[str], section: str) -> tuple[str, ...]:
    """Flags of `hone rl` for a command whose settings of sampling are in `section`."""
    kept = (flag.replace("--rollout.stop=", f"--{section}.stop=") for flag in flags)
    return tuple(flag for flag in kept if not flag.startswith(RUNS))


REWARDS = {key: row for key, row in RL.items() if key.startswith(("env.", "reward."))}
EVALUATE: dict[str, Row] = {
    **run_rows(trains=False),
    **model_rows("samples", lora=False),
    **inference_sources("eval", "data.eval.0", "samples", ()),
    **rendering_rows("samples", "eval"),
    **engine_rows("samples", generates=False),
    **{
        key: replace(
            row,
            shows="samples" if row.shows == "metrics" else row.shows,
            given=without_runs(row.given, "eval"),
        )
        for key, row in REWARDS.items()
    },
    **eval_rows("scores"),
    "eval.stop": Row("['1', 5, 6]", "scores"),
}
SCORED = ("--reward.functions=[{fn: 'rewards.py:even'}]", "--reward.num_workers=1")
HELD_OUT = ("--data.eval=[]", "--data.train=[{path: eval.jsonl}]", "--data.eval_fraction=0.5")
EVALUATE |= {
    key.replace("data.eval", "data.train"): Row(
        row.value.replace("max_rows: 3", "max_rows: 9"),
        row.shows.replace("data.eval", "data.train"),
        tuple(
            flag.replace("data.eval", "data.train").replace("max_rows: 4", "max_rows: 9")
            for flag in row.given
        ),
    )
    for key, row in inference_sources("eval", "data.eval.0", "samples", ()).items()
}
EVALUATE |= unmixed_rows()
EVALUATE = {
    key: Row(row.value, row.shows, (*HELD_OUT, *row.given)) if key.startswith("data.train") else row
    for key, row in EVALUATE.items()
}
EVALUATE["reward.functions.0.whole_groups"] = replace(
    WHOLE_GROUPS, shows="samples", given=(*WHOLE_GROUPS.given, "--eval.n_samples_per_prompt=2")
)
# Of the first rows of eval.jsonl none is left for training.
EVALUATE["data.train.0.max_rows"] = Row(
    "30", "samples", (*HELD_OUT, "--data.train=[{path: train.jsonl}]")
)
EVALUATE["data.eval_fraction"] = Row("0.8", "samples", HELD_OUT)
EVALUATE["data.max_eval_rows"] = Row("1", "samples", (*HELD_OUT, "--data.shuffle_window=2"))
UNUSED_EVAL = "log:data.eval is .*and has no effect"
GENERATE: dict[str, Row] = {
    **run_rows(trains=False, has_dir=False),
    **model_rows("samples", lora=False),
    **inference_sources("train", "data.train.0", "samples", ()),
    **rendering_rows("samples", "train"),
    **unmixed_rows(),
    **engine_rows("samples", generates=True),
    **sampling_rows("generation", "samples"),
    "generation.stop": Row("['1', 5, 6]", "samples"),
    "data.eval": Row("[{path: eval.jsonl}]", UNUSED_EVAL),
    **{
        f"data.eval.0.{name}": Row(
            value,
            UNUSED_EVAL,
            flag="--data.eval=[{path: eval.jsonl, split: test, subset: main, "
            "max_rows: 2, columns: {prompt: q, answer: a, task: kind, images: x, "
            "difficulty: x, pass_rate: x}, answer_pattern: x, task: x}]",
        )
        for name, value in (
            ("path", "eval.jsonl"),
            ("split", "test"),
            ("subset", "main"),
            ("max_rows", "2"),
            ("columns.prompt", "q"),
            ("columns.answer", "a"),
            ("columns.task", "kind"),
            ("columns.images", "x"),
            ("columns.difficulty", "x"),
            ("columns.pass_rate", "x"),
            ("answer_pattern", "x"),
            ("task", "x"),
        )
    },
    "data.eval_fraction": Row("0.5", "samples"),
    "n_samples_per_prompt": Row("2", "samples"),
    **{
        key: replace(
            row,
            shows="samples" if row.shows == "metrics" else row.shows,
            given=(
                *SCORED[1:],
                *without_runs(row.given or SCORED[:1], "generation"),
            ),
        )
        for key, row in REWARDS.items()
    },
    "keep": Row("best", "samples", (*SCORED, "--n_samples_per_prompt=2")),
    "pass_threshold": Row("0", "samples", (*SCORED, "--keep=passing")),
    "output": Row("elsewhere.jsonl", "files"),
}
GENERATE["reward.functions.0.whole_groups"] = replace(
    WHOLE_GROUPS, shows="samples", given=(*WHOLE_GROUPS.given, "--n_samples_per_prompt=2")
)
