"""Which tokens two tokenizers have in common: a model that reads another's ids must know them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

__all__ = ["OTHER_TOKENS", "difference", "tokens_of"]

OTHER_TOKENS = {
    "teacher.path": "Choose a teacher with the policy's tokens, or train on the teacher's "
    "completions with `hone sft`",
    "critic.path": "Choose a model with the policy's tokens, or leave it unset",
}
"""What to do where a model that reads the policy's ids has others, by the key that names it."""


def tokens_of(folder: Path) -> dict[str, int]:
    """Ids by their texts, of `tokenizer.json` in a folder; empty where it is none, or of a form
    that is not known here."""
    try:
        held: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        vocabulary = held["model"]["vocab"]
        if isinstance(vocabulary, list):  # of unigram models: each text with its score
            vocabulary = {text: number for number, (text, _) in enumerate(vocabulary)}
        added = {token["content"]: token["id"] for token in held.get("added_tokens", ())}
        return vocabulary | added
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def difference(own: Mapping[str, int], other: Mapping[str, int]) -> str | None:
    """How many of the policy's `own` tokens are others, or none, to another model, in words; None
    where it knows them all. It may know more."""
    differing = {text: number for text, number in own.items() if other.get(text) != number}
    if not differing:
        return None
    text = min(differing, key=differing.__getitem__)
    there = f"token {other[text]}" if text in other else "no such token"
    return (
        f"{len(differing):,} of {len(own):,} tokens differ, the first is {text!r}, token "
        f"{differing[text]} of the policy and {there} there"
    )
