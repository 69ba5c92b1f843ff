"""How few tokens a text can have, from its size alone: a bound for texts too long to tokenise."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["max_bytes_per_token"]

_UNICODE_FORMS = ("NFC", "NFD", "NFKC", "NFKD")
_FORM_SHRINKS = 8
"""More than the bytes of a text over those of any of its Unicode normal forms. A code point of the
form stands for at most 4 of the canonical decomposition, each of which came from a code point of at
most 4 bytes; of a byte for 1, of 2 bytes for at most 3."""
_KEEP_ALL = ("ByteLevel", "Digits", "Metaspace", "Prepend", "UnicodeScripts")
"""Steps before the model that drop nothing; some put characters in place of others of fewer
bytes."""
_SPLITS = ("Punctuation", "Split")
"""Those that drop nothing unless their behaviour is to remove."""


def max_bytes_per_token(tokenizer: PreTrainedTokenizerBase) -> int | None:
    """Bytes of UTF-8 text for which one token can stand at most, so that a text of n bytes has at
    least n divided by this many tokens; None where nothing bounds them.

    Nothing does where the tokenizer drops characters (spaces, accents, what it has no token for),
    or one token stands for all of an unknown word; and where it is not of the `tokenizers` library,
    so that what it does cannot be looked up.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return None
    parts: dict[str, Any] = json.loads(backend.to_str())
    steps = [*_steps(parts["normalizer"]), *_steps(parts["pre_tokenizer"])]
    added: list[dict[str, Any]] = parts["added_tokens"]
    if any(token["lstrip"] or token["rstrip"] for token in added):
        return None
    shrinks = [_shrinks(step) for step in steps]
    vocabulary: set[str] = set(backend.get_vocab(with_added_tokens=False))
    is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
    if None in shrinks or not _tells_all_apart(parts["model"], vocabulary, is_byte_level):
        return None
    # Of a byte-level token each character stands for one byte, so that this is more than enough; a
    # token for what is unknown stands for one character.
    longest = max(len(token.encode()) for token in backend.get_vocab())
    return max(longest, 4) * math.prod(x for x in shrinks if x is not None)


def _steps(step: dict[str, Any] | None) -> Iterator[dict[str, Any]]:
    """A normalizer or pre-tokenizer as a flat sequence."""
    if step is None:
        return
    if step["type"] != "Sequence":
        yield step
        return
    for part in step.get("normalizers", step.get("pretokenizers", ())):
        yield from _steps(part)


def _shrinks(step: Mapping[str, Any]) -> int | None:
    """How many bytes of a text become one at most; None where it may lose any number of them."""
    kind = step["type"]
    if kind in _KEEP_ALL:
        return 1
    if kind in _UNICODE_FORMS:
        return _FORM_SHRINKS
    if kind in _SPLITS:
        return None if step["behavior"] == "Removed" else 1
    pattern = step.get("pattern", {}).get("String") if kind == "Replace" else None
    if pattern is None or not step["content"]:
        return None
    return math.ceil(len(pattern.encode()) / len(step["content"].encode()))


def _tells_all_apart(model: Mapping[str, Any], vocabulary: set[str], is_byte_level: bool) -> bool:
    """Whether what has no token of its own gets one for each byte or character, or is an error."""
    match model["type"]:
        case "BPE":
            if is_byte_level:
                return _bytes_as_characters() <= vocabulary
            unknown_alone = model["unk_token"] is not None and not model["fuse_unk"]
            return unknown_alone or (model["byte_fallback"] and vocabulary >= _BYTE_TOKENS)
        case "Unigram":
            return model.get("byte_fallback", False) and vocabulary >= _BYTE_TOKENS
        case "WordLevel":
            return model["unk_token"] not in vocabulary
        case _:
            return False


_BYTE_TOKENS = {f"<0x{byte:02X}>" for byte in range(256)}


def _bytes_as_characters() -> set[str]:
    from tokenizers.pre_tokenizers import ByteLevel

    return set(ByteLevel.alphabet())
