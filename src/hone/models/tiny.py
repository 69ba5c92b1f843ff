"""Small models and tokenizers created on demand, and the shapes of public ones.

The quick start, the tests and the benchmarks run on these: no download, any size.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hone.families.registry import SPECS, spec_of

__all__ = [
    "SHAPES",
    "lengthen_memory",
    "make_bpe_tokenizer",
    "make_char_tokenizer",
    "make_model_folder",
    "make_tiny_model",
    "small_fields",
]

PAD_TOKEN, TURN_START, TURN_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
PRINTABLE = "\n" + "".join(chr(code) for code in range(32, 127))

CHAR_CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>{% endif %}"
)
"""Turns without role names: at one token a letter, `assistant` would outweigh the answer."""

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n"
    "{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


_ARGUMENTS = {
    "model_type": "family",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_heads",
    "num_key_value_heads": "num_kv_heads",
}
"""Fields of `config.json` whose names `make_tiny_model` shortens."""

SHAPES: Mapping[str, Mapping[str, Any]] = {
    name: {_ARGUMENTS.get(field, field): value for field, value in config.items()}
    for spec in SPECS.values()
    for name, config in spec.public.items()
}
"""Shapes of public decoders, as keyword arguments of `make_tiny_model`."""


def make_char_tokenizer(alphabet: str, words: Sequence[str] = ()) -> PreTrainedTokenizerFast:
    """Tokenizer with one token per character of `alphabet`; other characters cannot be encoded.
    Texts in `words` are one token each; where two begin at one place, the longer one counts.
    `<|im_end|>` ends a turn and is the end of sequence, `<|endoftext|>` pads."""
    letters = sorted(set(alphabet))
    tokens = [PAD_TOKEN, TURN_START, TURN_END, *letters, *words]
    tokenizer = Tokenizer(models.WordLevel({token: i for i, token in enumerate(tokens)}))
    pieces = [*map(re.escape, sorted(words, key=len, reverse=True)), r"[\s\S]"]
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("|".join(pieces)), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return _fast(tokenizer, CHAR_CHAT_TEMPLATE)


def make_bpe_tokenizer(
    texts: Iterable[str], vocab_size: int, *, split_digits: bool = False
) -> PreTrainedTokenizerFast:
    """Byte-level BPE trained on `texts`; every string round-trips. At least 259 tokens.
    `split_digits` makes each digit a token, so that a number is read and written by its places."""
    if vocab_size < 259:
        raise ValueError(f"{vocab_size=}: 256 bytes and 3 special tokens need at least 259")
    tokenizer = Tokenizer(models.BPE())
    bytes_of_words = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = (
        pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_of_words])
        if split_digits
        else bytes_of_words
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[PAD_TOKEN, TURN_START, TURN_END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _fast(tokenizer, CHAT_TEMPLATE)


def make_tiny_model(
    folder: Path | str,
    *,
    family: str = "qwen3",
    tokenizer: PreTrainedTokenizerFast | None = None,
    vocab_size: int | None = None,
    hidden_size: int = 128,
    num_layers: int = 4,
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 32,
    intermediate_size: int = 384,
    max_position_embeddings: int = 512,
    tie_word_embeddings: bool = True,
    seed: int = 0,
    weights: bool = True,
    **config_fields: Any,
) -> Path:
    """Write a Hugging Face folder: config, float32 weights drawn from `seed`, tokenizer.

    `tokenizer` unset: one token a printable ASCII character. `vocab_size` unset: the tokenizer's.
    `weights` off leaves them out, for `model.init=random`. `config_fields` are further fields of
    the family's config.json, such as `sliding_window`. Experts and recurrent layers are small too,
    unless these fields say otherwise. Returns the folder.
    """
    folder = Path(folder)
    tokenizer = tokenizer or make_char_tokenizer(PRINTABLE)
    small = small_fields(
        family,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
    )
    if "full_attention_interval" in config_fields:
        del small["layer_types"]
    config = AutoConfig.for_model(
        family,
        vocab_size=vocab_size or len(tokenizer),
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        head_dim=head_dim,
        intermediate_size=intermediate_size,
        max_position_embeddings=max_position_embeddings,
        tie_word_embeddings=tie_word_embeddings,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        **small | config_fields,
    )
    # As every published model names it; vLLM takes a model without it for one that embeds.
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    if weights:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        lengthen_memory(model)
        model.save_pretrained(folder)
    else:
        config.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def small_fields(
    family: str,
    *,
    num_layers: int,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    intermediate_size: int,
) -> dict[str, Any]:
    """Fields of a `config.json` that make what sets the family apart as small as its attention and
    MLP: recurrent layers, with attention in every fourth layer and the last one, and experts."""
    spec = spec_of(family)
    fields: dict[str, Any] = {}
    if spec.is_hybrid:
        fields = {
            "layer_types": [
                "full_attention" if number % 4 == 0 or number == num_layers else "linear_attention"
                for number in range(1, num_layers + 1)
            ],
            "linear_num_key_heads": num_kv_heads,
            "linear_num_value_heads": num_heads,
            "linear_key_head_dim": head_dim,
            "linear_value_head_dim": head_dim,
        }
    if (experts := spec.experts) is not None:
        fields |= {experts.numbers[0]: 8, experts.per_token: 2}
        sizes = (experts.size, experts.gated_shared)
        fields |= {name: -(-intermediate_size // 32) * 8 for name in sizes if name is not None}
    return fields


@torch.no_grad()
def lengthen_memory(model: PreTrainedModel) -> None:
    """Let recurrent layers with drawn weights remember tokens, in place: for ten tokens or more.
    transformers draws decays with which most heads forget a token at the next one, where a trained
    model has a memory, and a state that is lost would not be seen."""
    for name, parameter in model.named_parameters():
        if name.endswith("A_log"):
            parameter.sub_(math.log(200))


def make_model_folder(
    folder: Path | str,
    shape: str,
    *,
    tokenizer: PreTrainedTokenizerFast | None = None,
    weights: bool = False,
    seed: int = 0,
) -> Path:
    """Write a Hugging Face folder with a shape of `SHAPES`, by default without weights."""
    if shape not in SHAPES:
        raise ValueError(f"unknown model shape {shape!r}; known: {', '.join(SHAPES)}")
    return make_tiny_model(folder, **SHAPES[shape], tokenizer=tokenizer, weights=weights, seed=seed)


def _fast(tokenizer: Tokenizer, chat_template: str) -> PreTrainedTokenizerFast:
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=TURN_END,
        pad_token=PAD_TOKEN,
        additional_special_tokens=[TURN_START],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = chat_template
    return fast
