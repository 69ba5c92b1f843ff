"""Rows so long that tokenising them takes minutes and gigabytes: dropped by their beginning."""

import logging
import re

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hone.config.tree import SFTDataConfig
from hone.data.prompts import load_prompts
from hone.data.settings import DataConfig, SourceConfig
from hone.data.sft import load_sft
from hone.errors import UserError
from tests.data.support import CHATML, char_tokenizer, write_rows
from tests.tables import table


def recording_lengths(tokenizer):
    """The tokenizer, and the list of lengths of the texts that it is given."""
    lengths = []

    class Recording(type(tokenizer)):
        def __call__(self, text, *args, **kwargs):
            lengths.extend(map(len, [text] if isinstance(text, str) else text))
            return super().__call__(text, *args, **kwargs)

    tokenizer.__class__ = Recording
    return tokenizer, lengths


HUGE = 30_000


def load_rl(source, tokenizer, **settings):
    cfg = DataConfig(train=(source,), max_prompt_tokens=100, **settings)
    return load_prompts(cfg, tokenizer, seed=0)


def load_demonstrations(source, tokenizer, **settings):
    cfg = SFTDataConfig(train=(source,), max_prompt_tokens=100, max_tokens=200, **settings)
    return load_sft(cfg, tokenizer, seed=0)


@table("template", [None, CHATML])
@table(
    "load, column",
    [(load_rl, "prompt"), (load_demonstrations, "prompt"), (load_demonstrations, "completion")],
)
def test_huge_rows_are_dropped_before_they_are_tokenised(tmp_path, caplog, load, column, template):
    row = {"prompt": "p", "completion": "c"}
    limit = {"prompt": "data.max_prompt_tokens = 100", "completion": "data.max_tokens = 200"}[
        column
    ]
    path = write_rows(tmp_path / "a.jsonl", [row, row | {column: "x" * HUGE}, row])
    source = SourceConfig(path=path)
    tokenizer, lengths = recording_lengths(char_tokenizer(template))
    with caplog.at_level(logging.WARNING):
        loaded = load(source, tokenizer)
    assert max(lengths) < 4000
    assert (loaded.report.num_rows, loaded.report.num_kept) == (3, 2)
    (lost,) = loaded.report.dropped
    assert (lost.id, lost.limit, lost.is_cut) == ("a:2", limit, True)
    assert 200 < lost.num_tokens <= HUGE + 30
    assert f"a.jsonl, line 2 (at least {lost.num_tokens})" in caplog.text
    message = rf"line 2: at least {lost.num_tokens} tokens, but {re.escape(limit)}"
    with pytest.raises(UserError, match=message):
        load(source, tokenizer, overlong_prompts="error")


def words_tokenizer():
    """One token a word, known or not; spaces are dropped."""
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1}, "[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


@table("text", ["x" * HUGE + " a", "a" + " " * HUGE, " " * HUGE + "a", "a " * 50 + "x" * HUGE])
def test_a_huge_text_of_few_tokens_is_kept_whole(tmp_path, text):
    tokenizer = words_tokenizer()
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": text}])
    (kept,) = load_rl(SourceConfig(path=path), tokenizer).train.take(1)
    assert list(kept.token_ids) == tokenizer(text)["input_ids"]
    assert kept.text == text
