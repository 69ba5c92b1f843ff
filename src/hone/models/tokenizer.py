"""Loads tokenizers, and decodes token ids to text."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Protocol, cast

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hone.errors import UserError
from hone.families.tokens import OTHER_TOKENS, difference, lacking_room, unknown_token
from hone.hub import locate_model
from hone.models.settings import ModelConfig
from hone.models.support import silent_token_ids

__all__ = [
    "decoder",
    "load_tokenizer",
    "require_known_tokens",
    "require_padding",
    "require_room_for_tokens",
    "require_same_tokens",
]


def load_tokenizer(cfg: ModelConfig, *, path_key: str = "model.path") -> PreTrainedTokenizerBase:
    """Load the tokenizer of `cfg`, with `cfg.chat_template` in place of its own if that is set.
    `path_key` is the key of `cfg.path` in messages.

    Raises FileNotFoundError if the tokenizer or the template file cannot be found. Raises UserError
    if the hub has it but cannot be reached, and if its files cannot be read.
    """
    source = cfg.tokenizer or cfg.path
    key = "model.tokenizer" if cfg.tokenizer else path_key
    place = locate_model(source, key)
    try:
        tokenizer = AutoTokenizer.from_pretrained(place, trust_remote_code=cfg.trust_remote_code)
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"no tokenizer found at {key}={source!r}: {error}. Set model.tokenizer to a folder or "
            "hub name that holds one"
        ) from error
    except Exception as error:  # tokenizers raises bare ones, transformers KeyError and others
        raise UserError(
            f"the tokenizer at {key}={source!r} cannot be read: {type(error).__name__}: {error}. "
            "Its tokenizer.json may be damaged or of another version: get it again, or set "
            "model.tokenizer to another folder or hub name"
        ) from error
    if cfg.chat_template is not None:
        if not cfg.chat_template.is_file():
            raise FileNotFoundError(f"model.chat_template={str(cfg.chat_template)!r}: no such file")
        tokenizer.chat_template = cfg.chat_template.read_text(encoding="utf-8")
    return tokenizer


def decoder(
    tokenizer: PreTrainedTokenizerBase, end_ids: Collection[int]
) -> Callable[[Sequence[int]], str]:
    """Function from the token ids of a completion to its text, exactly as the tokens spell it.

    It leaves out `end_ids`, which end a turn of the model (`eos_token_ids`), the padding, and the
    token with which the chat template ends a turn. All others are text, special or not.
    """
    silent = np.array(sorted(silent_token_ids(end_ids, tokenizer)), np.int64)

    def decode(token_ids: Sequence[int]) -> str:
        ids = np.asarray(token_ids, np.int64)
        text = tokenizer.decode(
            ids[~np.isin(ids, silent)],  # for a list transformers checks each number
            skip_special_tokens=False,
            clean_up_tokenization_spaces=False,
        )
        assert isinstance(text, str)
        return text

    return decode


def require_padding(tokenizer: PreTrainedTokenizerBase) -> int:
    """The id of the padding token, by which a sequence classifier finds where a row ends. A
    tokenizer without one gets its end token for it, as in TRL."""
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token
    return cast(int, tokenizer.pad_token_id)


def require_same_tokens(
    own: PreTrainedTokenizerBase, other: PreTrainedTokenizerBase, key: str, path: str
) -> None:
    """Raise UserError if a token of the policy differs or is missing in the model at `path`, which
    `key` names: it would score other texts than the policy wrote."""
    found = difference(own.get_vocab(), other.get_vocab())
    if found is not None:
        raise UserError(
            f"{key}={path!r} has another tokenizer than the policy: {found}. {OTHER_TOKENS[key]}."
        )


def require_room_for_tokens(
    own: PreTrainedTokenizerBase, vocab_size: int, key: str, path: str, other_size: int
) -> None:
    """Raise UserError if the model at `path`, which `key` names and which has `other_size` tokens,
    lacks a token that the policy, of `vocab_size`, can write."""
    found = lacking_room(own.get_vocab(), vocab_size, other_size)
    if found is not None:
        raise UserError(
            f"{key}={path!r} has fewer tokens than the policy: {found}. {OTHER_TOKENS[key]}."
        )


class Tokenised(Protocol):
    """A row as token ids."""

    @property
    def id(self) -> str: ...
    @property
    def token_ids(self) -> Sequence[int]: ...


def require_known_tokens(
    rows: Iterable[Tokenised], tokenizer: PreTrainedTokenizerBase, vocab_size: int, path: str
) -> None:
    """Raise UserError for the first row with a token that the model at `path`, of `vocab_size`
    tokens, lacks: its embedding has no row for it."""
    for row in rows:
        if unknown := unknown_token(row.token_ids, vocab_size, tokenizer.convert_ids_to_tokens):
            raise UserError(
                f"row {row.id} has {unknown}, and the model at "
                f"{path!r} has {vocab_size}: its tokenizer has more. Name the model's own in "
                "model.tokenizer, leave such rows out, or use a model that has room for them "
                "(resize_token_embeddings in transformers)"
            )
