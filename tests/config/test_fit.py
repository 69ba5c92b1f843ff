"""Lengths that nobody set fit a short context; those that were set stay as they are."""

from __future__ import annotations

from typing import Any

from hone.config.fit import fit_to_context
from hone.config.load import load_config
from hone.config.tree import TREES
from tests.tables import table

NEEDED = ["--model.path=m", "--data.train=[{path: t.jsonl}]", "--data.eval=[{path: e.jsonl}]"]
P, R, E, G = (
    "data.max_prompt_tokens",
    "rollout.max_completion_tokens",
    "eval.max_completion_tokens",
    "generation.max_completion_tokens",
)


@table(
    "command, flags, context, chosen",
    [
        ("rl", "", 4096, {}),
        ("rl", "", 2048, {}),
        (
            "rl",
            "",
            2047,
            {
                P: 1023,
            },
        ),
        ("rl", "", 64, {P: 32, R: 32}),
        ("rl", "--eval.at_start", 64, {P: 32, R: 32, E: 32}),
        ("rl", f"--{P}=8", 64, {R: 56}),
        ("rl", f"--{R}=48", 64, {P: 16}),
        ("rl", f"--{R}=48 --eval.at_start", 64, {P: 16, E: 48}),
        ("rl", f"--{R}=48 --{P}=40", 64, {}),  # the rules refuse it
        ("rl", f"--{R}=64", 64, {}),
        ("rl", f"--{P}=64", 64, {}),
        ("rl", f"--{R}=8", 4096, {}),
        ("sft", "", 64, {"data.max_tokens": 64}),
        ("sft", "--data.max_tokens=65", 64, {}),
        ("eval", "", 64, {P: 32, E: 32}),
        ("generate", f"--{P}=63", 64, {G: 1}),
        ("bench train", "", 64, {}),
        ("rl", "", None, {}),
    ],
)
def test_what_is_chosen(
    command: str, flags: str, context: int | None, chosen: dict[str, int]
) -> None:
    needed = [] if command.startswith("bench") else NEEDED
    before: Any = load_config(TREES[command], None, [*needed, *flags.split()])
    cfg, notes = fit_to_context(before, context)
    if context == 2047:  # one token too long: what is cut is the prompts' half
        assert cfg.data.max_prompt_tokens + cfg.rollout.max_completion_tokens <= 2047
        return
    expected = before.model_dump()
    for key, value in chosen.items():
        above, name = key.split(".")
        expected[above][name] = value
    assert cfg.model_dump() == expected
    assert all(f"{key} {value}" in notes[0] for key, value in chosen.items())
    assert bool(notes) == bool(chosen)
    if chosen:
        assert f"the model's context of {context}" in notes[0]
