"""Checks on context parallelism: whether processes can share a model's attention heads."""

from __future__ import annotations

from collections.abc import Iterator

from hone.config.checks.finding import Finding, error
from hone.config.model_facts import ModelFacts

__all__ = ["check_ulysses", "ulysses_problem"]


def check_ulysses(
    key: str, size: int, facts: ModelFacts | None, *, tensor_parallel_size: int = 1
) -> Iterator[Finding]:
    """`key`, which holds `size`, against the heads of a model, as far as its facts are known."""
    heads = facts.divided.get("num_attention_heads") if facts else None
    if facts is None or heads is None:
        return
    key_heads = facts.divided.get("num_key_value_heads", heads)
    parts = heads // tensor_parallel_size, key_heads // tensor_parallel_size
    if problem := ulysses_problem(size, *parts):
        yield error(f"{key} is {size}, for the model at model.path: {problem}.", key, "model.path")


def ulysses_problem(size: int, num_heads: int, num_kv_heads: int) -> str | None:
    """Why `size` processes cannot share so many query and key heads, or None where they can.

    Each takes equally many query heads and all the key heads that these need; a key head may be
    needed by several.
    """
    if num_heads % size == 0 and (num_kv_heads % size == 0 or size % num_kv_heads == 0):
        return None
    fitting = [
        n
        for n in range(1, num_heads + 1)
        if num_heads % n == 0 and (num_kv_heads % n == 0 or n % num_kv_heads == 0)
    ]
    return (
        f"each process takes equally many of the {num_heads} query heads and of the "
        f"{num_kv_heads} key heads, or a whole key head that others take too; sizes that do: "
        f"{', '.join(map(str, fitting))}. Use one of them, or split the tokens further by "
        "ring_size, which divides no heads"
    )
