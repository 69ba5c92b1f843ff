"""Loading a tokenizer."""

from __future__ import annotations

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from hone.config.errors import UserError
from hone.config.hub import locate_model
from hone.config.model import ModelConfig

__all__ = ["load_tokenizer"]


def load_tokenizer(cfg: ModelConfig) -> PreTrainedTokenizerBase:
    """The tokenizer of `cfg`, with `cfg.chat_template` in place of its own where that is set.

    Raises FileNotFoundError where the tokenizer or the template file cannot be found, UserError
    where the hub would have it and cannot be reached, and where its files cannot be read.
    """
    source = cfg.tokenizer or cfg.path
    key = "model.tokenizer" if cfg.tokenizer else "model.path"
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
