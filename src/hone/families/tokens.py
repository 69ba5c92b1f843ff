"""Compares the tokens of two tokenizers: a model that reads another's ids must know them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = [
    "OTHER_TOKENS",
    "difference",
    "is_of_tokenizers",
    "lacking_room",
    "raises_for_unknown",
    "tokens_beyond",
    "tokens_of",
    "unknown_token",
]

OTHER_TOKENS = {
    "teacher.path": "Choose a teacher with the policy's tokens, or train on the teacher's "
    "completions with `hone sft`",
    "critic.path": "Choose a model with the policy's tokens, or leave it unset",
}
"""Remedies if a model that reads the policy's ids has other tokens, by the key that names it."""


def tokens_of(folder: Path) -> dict[str, int]:
    """Ids by text, from `tokenizer.json` in a folder. Empty if it is missing or its form is
    unknown."""
    vocabulary, added = _parts(folder)
    return vocabulary | added


def tokens_beyond(folder: Path, vocab_size: int, *, template: str) -> dict[str, int]:
    """Tokens of a folder's tokenizer that a model of `vocab_size` tokens lacks: ids by text.

    Covers the vocabulary, and of the added tokens those that `template` writes or that begin and
    end a text. Sound models lack others, as Gemma 3 lacks that for images: a row that spells one is
    refused when it is read.
    """
    vocabulary, added = _parts(folder)
    ends = [*_ends(folder)]
    used = {text: i for text, i in added.items() if text in template or text in ends}
    return {text: i for text, i in (vocabulary | used).items() if i >= vocab_size}


def raises_for_unknown(file: Path) -> bool:
    """Whether a `tokenizer.json` is of a kind that raises for a text that it has no token for: one
    of whole words or pieces without an unknown token. Byte-pair tokenizers have all bytes, or skip
    unknown text."""
    try:
        model = json.loads(file.read_text(encoding="utf-8"))["model"]
        return model["type"] in ("WordLevel", "WordPiece", "Unigram")
    except (OSError, ValueError, KeyError, TypeError):
        return False


def is_of_tokenizers(error: Exception) -> bool:
    """Whether the error is a refusal of a text or a file by `tokenizers`. It raises a bare
    Exception for a text without tokens and for a damaged file, and TypeError for half a surrogate
    pair."""
    return type(error) in (Exception, TypeError)


def _parts(folder: Path) -> tuple[dict[str, int], dict[str, int]]:
    """Ids by text, of the vocabulary and of the added tokens."""
    try:
        held: dict[str, Any] = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        vocabulary = held["model"]["vocab"]
        if isinstance(vocabulary, list):  # unigram models: each text with its score
            vocabulary = {text: number for number, (text, _) in enumerate(vocabulary)}
        added = {token["content"]: token["id"] for token in held.get("added_tokens", ())}
        own = {text: number for text, number in vocabulary.items() if text not in added}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}, {}
    return own, added


def _ends(folder: Path) -> Iterator[str]:
    """The texts of the tokens that begin and end a text."""
    try:
        held = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        for name in ("bos_token", "eos_token"):
            token = held.get(name) or ""
            yield token if isinstance(token, str) else token["content"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return


def lacking_room(own: Mapping[str, int], vocab_size: int, other_size: int) -> str | None:
    """Message that a model of `other_size` tokens lacks some of the policy's tokens `own` that the
    policy, of `vocab_size`, can write. None if it has room for all."""
    beyond = [i for i in own.values() if other_size <= i < vocab_size]
    if not beyond:
        return None
    return (
        f"its model has {other_size:,} tokens, and {len(beyond):,} of the policy's lie beyond, the "
        f"first is token {min(beyond)}"
    )


def unknown_token(
    token_ids: Sequence[int], vocab_size: int, name_of: Callable[[int], object]
) -> str | None:
    """Message that a text has a token which its model, of `vocab_size` tokens, lacks, or None.
    `name_of` returns the text of a token."""
    beyond = max(token_ids, default=0)
    if beyond < vocab_size:
        return None
    return f"the token {name_of(beyond)!r}, number {beyond}"


def difference(own: Mapping[str, int], other: Mapping[str, int]) -> str | None:
    """Message on how many of the policy's tokens `own` differ or are missing in another model, or
    None. The other model may know more tokens."""
    differing = {text: number for text, number in own.items() if other.get(text) != number}
    if not differing:
        return None
    text = min(differing, key=differing.__getitem__)
    there = f"token {other[text]}" if text in other else "no such token"
    return (
        f"{len(differing):,} of {len(own):,} tokens differ, the first is {text!r}, token "
        f"{differing[text]} of the policy and {there} there"
    )
