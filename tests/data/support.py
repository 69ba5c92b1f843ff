"""Small tokenizers, and rows on disk."""

import json
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<bos>", "<|im_start|>", "<|im_end|>"]

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""What Qwen's template does with plain turns."""

SPELLS_BOS = "<bos>" + CHATML

STRIPS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% set text = m['content'] %}"
    "{% if m['role'] == 'assistant' and not loop.last and '</think>' in text %}"
    "{% set text = text.split('</think>')[-1] %}{% endif %}"
    "{{ text }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

REWRITES_HISTORY = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}"
    "{% if messages[-1]['role'] == 'assistant' %} (answered){% endif %}\n"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""A prompt that is no prefix of prompt plus answer."""

TAKES_TOOLS = (
    "{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool | tojson }}{% endfor %}"
    "<|im_end|>\n{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}"
    "{% if m.tool_calls is defined %}{{ m.tool_calls | tojson }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n{% endif %}"
    "{% endif %}"
)
"""Tools and a switch of its own, as Qwen's template has them."""

SHORTENS_HISTORY = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if not loop.last or add_generation_prompt %}{{ 'a note to the prompt: ' }}{% endif %}"
    "{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}a header that answers lack<|im_start|>assistant\n{% endif %}"
)
"""A prompt that has more tokens than it has once an answer follows."""

NO_SYSTEM = (
    "{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ raise_exception('System role not supported') }}{% endif %}"
    "<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def fast(tokenizer: Tokenizer, template: str | None) -> PreTrainedTokenizerFast:
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single="<bos> $A",
                special_tokens=[("<bos>", tokenizer.token_to_id("<bos>"))],
            ),
        ]
    )
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<|im_end|>", pad_token="<pad>"
    )
    wrapped.chat_template = template
    return wrapped


def char_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """One token a printable ASCII character, a begin-of-text token in front of plain text."""
    alphabet = ["\n", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate([*SPECIAL, *alphabet])}))
    tokenizer.add_special_tokens(SPECIAL)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return fast(tokenizer, template)


def bpe_tokenizer(template: str | None = None) -> PreTrainedTokenizerFast:
    """Byte-level BPE with merges, so that most id sequences do not survive decode and encode."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = ["what is the answer to the question", "12345 67890 11 22 33", "aabbab abab abba"] * 9
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return fast(tokenizer, template)


def write_rows(path: Path, rows) -> str:
    """A JSONL file; returns its name for a source."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


GEMMA = (
    "<bos>{% for m in messages %}<start_of_turn>"
    "{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
LLAMA3 = (
    "<|begin_of_text|>{% for m in messages %}<|start_header_id|>{{ m['role'] }}<|end_header_id|>"
    "\n\n{% if m.tool_calls %}<|python_tag|>{{ m.tool_calls[0].function.name }}"
    "({{ m.tool_calls[0].function.arguments | tojson }})<|eom_id|>"
    "{% else %}{{ m['content'] | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
OPENS_THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{{ m['content'] if '</think>' not in m['content'] else m['content'].split('</think>')[-1] }}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
"""As DeepSeek's: the header opens what the model thinks, and an answer's thoughts are left out."""

_DIALECTS = {
    "gemma": (
        GEMMA,
        ["<pad>", "<eos>", "<bos>", "<start_of_turn>", "<end_of_turn>"],
        {"bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>"},
    ),
    "llama3": (
        LLAMA3,
        [
            "<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
            "<|eom_id|>", "<|eot_id|>", "<|python_tag|>", "<|finetune_right_pad_id|>",
        ],
        {
            "bos_token": "<|begin_of_text|>",
            "eos_token": "<|eot_id|>",
            "pad_token": "<|finetune_right_pad_id|>",
        },
    ),
    "qwen": (
        CHATML,
        [
            "<|endoftext|>", "<|im_start|>", "<|im_end|>",
            "<think>", "</think>", "<tool_call>", "</tool_call>",
        ],
        {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"},
    ),
}  # fmt: skip


def dialect(name: str, template: str | None = "its own", **tokens: str) -> PreTrainedTokenizerFast:
    """One token a character, with the special tokens and the turns of a family; `tokens` such as
    `eos_token` in place of its own."""
    own, special, named = _DIALECTS[name]
    alphabet = ["\n", *map(chr, range(32, 127))]
    tokenizer = Tokenizer(models.WordLevel({t: i for i, t in enumerate([*special, *alphabet])}))
    tokenizer.add_special_tokens(special)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    if bos := named.get("bos_token"):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, tokenizer.token_to_id(bos))]
        )
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, **named | tokens)
    wrapped.chat_template = own if template == "its own" else template
    return wrapped


def ids_of(tokenizer: PreTrainedTokenizerFast, *tokens: str) -> tuple[int, ...]:
    ids = tokenizer.convert_tokens_to_ids([*tokens])
    assert isinstance(ids, list)
    return tuple(ids)
