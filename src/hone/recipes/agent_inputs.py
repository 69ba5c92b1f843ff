"""`python -m hone.recipes.agent_inputs [--dir DIR] [--seed N]`: what the recipes of the calculator,
the guessing game, the search and the shell start from. Tiny models of random weights, and their
data."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from hone.data.arithmetic import generate, write_jsonl
from hone.envs.tools.schema import function_schema
from hone.models.tiny import PRINTABLE, make_char_tokenizer, make_tiny_model
from hone.recipes.calculator import multiply
from hone.recipes.inputs import write_inputs
from hone.recipes.policy import make_policy
from hone.recipes.search_inputs import make_search
from hone.recipes.turns import CHAT_TEMPLATE, said

__all__ = ["make_calculator", "make_guessing", "make_shell"]

NUM_PRODUCTS, NUM_HELD_OUT = 3000, 200
NUM_ASKED = 48
"""Held-out tasks of the shell, whose episodes are processes."""
CALLING_SHARE = 0.3
CALL, GUESS = "[multiply(a={}, b={})]", "2000"
COMMAND, TEST, DONE, SILENCE = "echo $(({}))>a", "cat a", "done", "ok"
"""Of the shell: the command that computes a product into the file `a`, what reads that file, the
turn that ends an episode, and the answer to a command without output."""


def main() -> None:
    """Write a folder for each."""
    makers = {
        "calculator": make_calculator,
        "guessing": make_guessing,
        "search": make_search,
        "shell": make_shell,
    }
    write_inputs("hone.recipes.agent_inputs", __doc__, makers, drawn="weights and data")


def make_calculator(folder: Path, seed: int) -> None:
    """Write a model, products of two numbers with two digits, and demonstrations of two teachers:
    one calls the tool, the other always guesses the same."""
    tokenizer = make_char_tokenizer(PRINTABLE)  # also for what the policy is answered where it errs
    tokenizer.chat_template = CHAT_TEMPLATE
    make_policy(folder / "model", tokenizer, seed)
    products = generate(NUM_PRODUCTS + NUM_HELD_OUT, seed, low=10, high=99, ops="*")
    train, held_out = products[NUM_HELD_OUT:], products[:NUM_HELD_OUT]
    for name, rows in (("train", train), ("eval", held_out)):
        asked = [{"prompt": [said("user", r["prompt"])], "answer": r["answer"]} for r in rows]
        write_jsonl(folder / f"{name}.jsonl", asked)
    write_jsonl(folder / "demonstrations.jsonl", _demonstrations(train, seed))


def make_guessing(folder: Path, seed: int) -> None:
    """Write a model, and rows that only start a game. Its number comes from the sample's seed."""
    make_tiny_model(
        folder / "model",
        tokenizer=make_char_tokenizer("?1234567<>"),
        num_layers=2,
        hidden_size=64,
        num_heads=2,
        num_kv_heads=1,
        intermediate_size=192,
        max_position_embeddings=64,
        seed=seed,
        # As random models learn from rewards alone: at the usual 0.02 logits take long to grow.
        initializer_range=0.1,
    )
    for name, num in (("train", 64), ("eval", 140)):
        write_jsonl(folder / f"{name}.jsonl", [{"prompt": "?"}] * num)


def make_shell(folder: Path, seed: int) -> None:
    """Write a model, products whose value a command is to write into the file `a`, and
    demonstrations of two teachers: one lets the shell compute, the other writes the first number.
    Both copy from the prompt: were the other's number always the same, a policy would learn from
    rewards not to write its first digit, and write another digit in its place."""
    tokenizer = make_char_tokenizer(PRINTABLE)  # what commands write, error messages too
    make_policy(folder / "model", tokenizer, seed)
    products = generate(NUM_PRODUCTS + NUM_ASKED, seed, low=10, high=99, ops="*")
    train, held_out = products[NUM_ASKED:], products[:NUM_ASKED]
    for name, rows in (("train", train), ("eval", held_out)):
        asked = [
            {"prompt": [said("user", row["prompt"].rstrip("="))], "answer": row["answer"]}
            | {"test": TEST}
            for row in rows
        ]
        write_jsonl(folder / f"{name}.jsonl", asked)
    write_jsonl(folder / "demonstrations.jsonl", _commands(train, seed))


def _commands(products: Iterable[Mapping[str, str]], seed: int) -> Iterator[dict[str, Any]]:
    """The command of a teacher for each product; every fourth episode goes on to its end."""
    generator = random.Random(f"teachers of the shell {seed}")
    for number, row in enumerate(products):
        product = row["prompt"].rstrip("=")
        question = said("user", product)
        computes = generator.random() < CALLING_SHARE
        first = product.partition("*")[0]
        command = COMMAND.format(product) if computes else f"echo {first}>a"
        yield {"prompt": [question], "completion": command}
        if number % 4 == 0:
            so_far = [question, said("assistant", command), said("user", SILENCE)]
            yield {"prompt": so_far, "completion": DONE}


def _demonstrations(products: Iterable[Mapping[str, str]], seed: int) -> Iterator[dict[str, Any]]:
    """Two rows for each product: what a teacher says first, and how the tool's answer is used."""
    generator = random.Random(f"teachers {seed}")
    tools = [function_schema(multiply)]
    for row in products:
        a, b = (int(number) for number in row["prompt"].rstrip("=").split("*"))
        question, call = said("user", row["prompt"]), CALL.format(a, b)
        calls = generator.random() < CALLING_SHARE
        yield {"prompt": [question], "completion": call if calls else GUESS, "tools": tools}
        used = [question, said("assistant", call), said("tool", row["answer"])]
        yield {"prompt": used, "completion": row["answer"], "tools": tools}


if __name__ == "__main__":
    main()
