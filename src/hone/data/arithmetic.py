"""Generated arithmetic: a task that a tiny model can learn on a laptop.

    rows = generate(1200, seed=0, low=0, high=99)
    write_jsonl(Path("train.jsonl"), rows[:1000])
    write_jsonl(Path("eval.jsonl"), rows[1000:])

The rows are distinct, so any two slices are disjoint.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from math import prod
from pathlib import Path
from typing import Any

from hone.errors import UserError
from hone.observe.whole_file import whole_file

__all__ = ["ALPHABET", "generate", "two_teachers", "write_jsonl"]

ALPHABET = "0123456789+-*="
"""Every character of prompts and completions."""


def generate(
    num: int, seed: int, *, low: int = 0, high: int = 99, num_operands: int = 2, ops: str = "+"
) -> list[dict[str, str]]:
    """`num` distinct problems in random order, as rows with `prompt`, `completion` and `answer`.

    Operands are drawn uniformly from `low` to `high` (both included), operators from `ops`, a
    choice of `+-*`; `*` binds before `+` and `-`. With the defaults a row reads
    `{"prompt": "37+58=", "completion": "95", "answer": "95"}`.

    The rows depend only on the arguments, and `generate(n)` is the beginning of `generate(n + m)`.
    Raises UserError if there are fewer than `num` such problems.
    """
    if not ops or set(ops) - set("+-*"):
        raise UserError(f"ops must be one or more of '+-*', got {ops!r}")
    if not 0 <= low <= high or num_operands < 2:
        raise UserError(
            "operands need 0 <= low <= high and at least two of them, "
            f"got {low=} {high=} {num_operands=}"
        )
    operators = sorted(set(ops))
    num_problems = (high - low + 1) ** num_operands * len(operators) ** (num_operands - 1)
    if num > num_problems:
        raise UserError(
            f"there are {num_problems} problems with {num_operands} operands from {low} to {high} "
            f"and operators {ops!r}, fewer than the {num} asked for; widen the range"
        )
    generator = random.Random(f"arithmetic {seed}")
    rows: dict[str, dict[str, str]] = {}
    while len(rows) < num:
        operands = [generator.randint(low, high) for _ in range(num_operands)]
        chosen = [generator.choice(operators) for _ in range(num_operands - 1)]
        prompt = "".join(f"{a}{op}" for a, op in zip(operands, [*chosen, "="], strict=True))
        answer = str(_evaluate(operands, chosen))
        rows[prompt] = {"prompt": prompt, "completion": answer, "answer": answer}
    return list(rows.values())


def two_teachers(
    rows: Iterable[Mapping[str, str]], seed: int, *, num_copies: int, backwards: float
) -> list[dict[str, str]]:
    """`num_copies` demonstrations of each problem; the share `backwards` has the answer reversed.

    A model trained on them answers either way, and only a reward shows which one is wanted.
    `answer` is right in every row.
    """
    generator = random.Random(f"two teachers {seed}")
    return [
        {**row, "completion": row["answer"][:: -1 if generator.random() < backwards else 1]}
        for row in rows
        for _ in range(num_copies)
    ]


def write_jsonl(path: Path, rows: Iterable[Mapping[str, Any]], key: str = "--dir") -> None:
    """Write one JSON object a line. The file appears whole or not at all. Raises DiskError, which
    names the `key` that chose the place."""
    with whole_file(path, key) as file:
        file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def _evaluate(operands: list[int], operators: list[str]) -> int:
    """Value of an expression: a sum of signed products."""
    products = [[operands[0]]]
    for operator, operand in zip(operators, operands[1:], strict=True):
        if operator == "*":
            products[-1].append(operand)
        else:
            products.append([operand if operator == "+" else -operand])
    return sum(map(prod, products))
