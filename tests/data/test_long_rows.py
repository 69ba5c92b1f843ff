"""Rows so long that tokenising them takes minutes and gigabytes: dropped by their size alone, and
never one that would have fitted."""

import logging
import re

import pytest
from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import PreTrainedTokenizerFast

from hone.config.data import DataConfig, SourceConfig
from hone.config.errors import UserError
from hone.config.tree import SFTDataConfig
from hone.data import chat
from hone.data.prompts import load_prompts
from hone.data.sft import load_sft
from hone.data.token_bytes import max_bytes_per_token
from tests.data.support import CHATML, REWRITES_HISTORY, bpe_tokenizer, char_tokenizer, write_rows

ALPHABET = pre_tokenizers.ByteLevel.alphabet()
BYTE_TOKENS = [f"<0x{byte:02X}>" for byte in range(256)]


def wrap(model, *, normalizer=None, pre_tokenizer=None, added=()):
    tokenizer = Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.add_special_tokens(list(added))
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_level():
    """As Qwen's: NFC, a split that drops nothing, bytes; a token for 64 spaces."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(r"\s+|\S+"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=330, initial_alphabet=ALPHABET, show_progress=False, max_token_length=64
    )
    tokenizer.train_from_iterator([" " * 64, "ééé", "abab"] * 20, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def sentence_pieces(model=None, **parts):
    """As Llama 2's: spaces become another character, what is unknown becomes bytes."""
    vocabulary = {token: n for n, token in enumerate([*BYTE_TOKENS, "▁", "a", "aa", "<unk>"])}
    model = model or models.BPE(
        vocabulary, [("a", "a")], byte_fallback=True, fuse_unk=True, unk_token="<unk>"
    )
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return wrap(model, **{"normalizer": normalizer} | parts)


def pieces():
    return [(token, -1.0) for token in ["<unk>", *BYTE_TOKENS, "▁", "a", "aaaa"]]


LETTERS = {"[UNK]": 0, "a": 1, "b": 2, "aaaa": 3}
BOUNDED = {
    "byte level": byte_level(),
    "byte level of the tests": bpe_tokenizer(),
    "characters": char_tokenizer(),
    "sentence pieces": sentence_pieces(),
    "unigram": sentence_pieces(models.Unigram(pieces(), 0, byte_fallback=True)),
    "unknown by character": wrap(models.BPE(LETTERS, [], unk_token="[UNK]")),
    "compatibility forms": wrap(
        models.BPE(LETTERS | {"aa": 4}, [("a", "a"), ("aa", "aa")], unk_token="[UNK]"),
        normalizer=normalizers.NFKC(),
    ),
}
TEXTS = [
    "a" * 3000,
    " " * 3000,
    "aaaa " * 600,
    "e\u0301" * 1000,
    "\u212a" * 1000,  # the sign of Kelvin is K in every normal form
    "\u1fbf\u03b1\u0313\u0300\u0345" * 500,  # five code points become two
    "\U0001d41a" * 800,  # a bold a is a in the compatibility forms
    "<|im_start|>" * 300,
    "\U0001f600" * 800,
    "\x00\x7f\u2028" * 500,
]


@pytest.mark.parametrize("name", BOUNDED)
def test_no_text_has_fewer_tokens_than_its_size_says(name):
    tokenizer = BOUNDED[name]
    most = max_bytes_per_token(tokenizer)
    assert most is not None
    assert most < 700  # so that the bound is of use
    for text in TEXTS:
        if name == "characters" and not (text.isascii() and text.isprintable()):
            continue  # it has no token for these, which is an error
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        assert len(ids) * most >= len(text.encode()), repr(text[:10])


LONG = 5000
UNBOUNDED = {
    "unknown words": (
        wrap(
            models.WordLevel(LETTERS, "[UNK]"), pre_tokenizer=pre_tokenizers.Split(" ", "isolated")
        ),
        "x" * LONG,
    ),
    "word pieces": (wrap(models.WordPiece(LETTERS, unk_token="[UNK]")), "a" * LONG),
    "unknown runs": (wrap(models.BPE(LETTERS, [], unk_token="[UNK]", fuse_unk=True)), "x" * LONG),
    "unknown dropped": (wrap(models.BPE(LETTERS, [])), "x" * LONG),
    "bytes that are missing": (
        wrap(models.BPE(LETTERS, []), pre_tokenizer=pre_tokenizers.ByteLevel()),
        "x" * LONG,
    ),
    "unigram": (sentence_pieces(models.Unigram([("[UNK]", 0.0), ("a", -1.0)], 0)), "x" * LONG),
    "spaces dropped": (
        wrap(models.WordLevel({"a": 0}, "none"), pre_tokenizer=pre_tokenizers.WhitespaceSplit()),
        "a" + " " * LONG,
    ),
    "split removes": (
        sentence_pieces(pre_tokenizer=pre_tokenizers.Split("a", "removed")),
        "a" * LONG,
    ),
    "replaced by nothing": (sentence_pieces(normalizer=normalizers.Replace("a", "")), "a" * LONG),
    "replaced by pattern": (
        sentence_pieces(normalizer=normalizers.Replace(Regex("a+"), "a")),
        "a" * LONG,
    ),
    "accents": (sentence_pieces(normalizer=normalizers.StripAccents()), "\u0301" * LONG),
    "strip": (sentence_pieces(normalizer=normalizers.Strip()), " " * LONG),
    "a token that eats spaces": (
        sentence_pieces(added=[AddedToken("<end>", rstrip=True)]),
        "<end>" + " " * LONG,
    ),
}


@pytest.mark.parametrize("name", UNBOUNDED)
def test_tokenizers_whose_tokens_have_no_bound(name):
    tokenizer, text = UNBOUNDED[name]
    assert len(tokenizer(text, add_special_tokens=False)["input_ids"]) < 20  # why there is none
    assert max_bytes_per_token(tokenizer) is None


class Watched(PreTrainedTokenizerFast):
    """A tokenizer that knows the longest text it was given."""

    longest = 0

    def __call__(self, text, *args, **kwargs):
        texts = [text] if isinstance(text, str) else text
        type(self).longest = max([self.longest, *map(len, texts)])
        return super().__call__(text, *args, **kwargs)


def watched(template):
    tokenizer = char_tokenizer(template)
    tokenizer.__class__ = type("Watched", (Watched,), {})
    return tokenizer


HUGE = 30_000


def load_rl(source, tokenizer, **settings):
    cfg = DataConfig(train=(source,), max_prompt_tokens=100, **settings)
    return load_prompts(cfg, tokenizer, seed=0)


def load_demonstrations(source, tokenizer, **settings):
    cfg = SFTDataConfig(train=(source,), max_prompt_tokens=100, max_tokens=200, **settings)
    return load_sft(cfg, tokenizer, seed=0)


@pytest.mark.parametrize("template", [None, CHATML])
@pytest.mark.parametrize("load", [load_rl, load_demonstrations])
@pytest.mark.parametrize("column", ["prompt", "completion"])
def test_huge_rows_are_dropped_before_they_are_tokenised(tmp_path, caplog, load, column, template):
    if load is load_rl and column == "completion":
        pytest.skip("a prompt has none")
    row = {"prompt": "p", "completion": "c"}
    path = write_rows(tmp_path / "a.jsonl", [row, row | {column: "x" * HUGE}, row])
    source, tokenizer = SourceConfig(path=path), watched(template)
    with caplog.at_level(logging.WARNING):
        loaded = load(source, tokenizer)
    assert type(tokenizer).longest < 1000
    assert (loaded.report.num_rows, loaded.report.num_kept) == (3, 2)
    (lost,) = loaded.report.dropped
    key = "max_prompt_tokens" if column == "prompt" else "max_tokens"
    assert (lost.id, lost.limit.split()[0]) == ("a:2", f"data.{key}")
    assert 200 < lost.num_tokens <= HUGE + 30
    assert f"a.jsonl, line 2 (at least {lost.num_tokens})" in caplog.text
    told = rf"line 2: at least {lost.num_tokens} tokens, but {re.escape(lost.limit)}"
    with pytest.raises(UserError, match=told):
        load(source, tokenizer, overlong_prompts="error")


SLICED = {
    "unigram": (
        sentence_pieces(models.Unigram([("[UNK]", 0.0), ("▁", -1.0), ("a", -1.0)], 0)),
        "a a aa ",
    ),
    "word pieces": (
        wrap(
            models.WordPiece(LETTERS | {"##a": 4}, unk_token="[UNK]"),
            pre_tokenizer=pre_tokenizers.BertPreTokenizer(),
        ),
        "aa  a b ",
    ),
    "a token that eats spaces": (
        sentence_pieces(added=[AddedToken("<end>", lstrip=True, rstrip=True)]),
        "<end>  aa  <end> ",
    ),
    "a token that is long": (sentence_pieces(added=[AddedToken("a" * 3000)]), "ab aa "),
}


@pytest.mark.parametrize("load", [load_rl, load_demonstrations])
@pytest.mark.parametrize("name", SLICED)
def test_what_size_alone_does_not_drop_is_tokenised_in_slices(tmp_path, monkeypatch, load, name):
    """Up to twice the limit whole, so that its length is exact; far beyond never."""
    monkeypatch.setattr(chat, "SLICE_CHARS", 2000)
    plain, words = SLICED[name]
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain.backend_tokenizer, eos_token="a")
    tokenizer.__class__ = type("Watched", (Watched,), {})
    lengths = [len(tokenizer(words * n, add_special_tokens=False)["input_ids"]) for n in (1, 2)]
    once = lengths[1] - lengths[0]
    fits, above, huge = (words * (n // once) for n in (90, 190, 100_000))
    texts = [fits, above, huge]
    rows = [{"prompt": text, "completion": "b"} for text in texts]
    type(tokenizer).longest = 0
    loaded = load(SourceConfig(path=write_rows(tmp_path / "a.jsonl", rows)), tokenizer)
    assert type(tokenizer).longest < max(3000, len(above) + 10)
    assert loaded.report.num_kept == 1
    dropped = [(row.id, row.is_exact) for row in loaded.report.dropped]
    assert dropped == [("a:2", True), ("a:3", False)]
    whole = len(plain(huge, add_special_tokens=False)["input_ids"])
    assert 100 < loaded.report.dropped[1].num_tokens <= whole


@pytest.mark.parametrize("name", UNBOUNDED)
def test_a_huge_text_of_few_tokens_is_kept(tmp_path, monkeypatch, name):
    """Its slices are counted, and cuts are not held against it."""
    monkeypatch.setattr(chat, "SLICE_CHARS", 250)
    tokenizer, text = UNBOUNDED[name]
    text += "a" if text.isspace() else ""
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": text}])
    if not ids:
        with pytest.raises(UserError, match="no tokens at all"):
            load_rl(SourceConfig(path=path), tokenizer)
        return
    (kept,) = load_rl(SourceConfig(path=path), tokenizer).train.take(1)
    assert list(kept.token_ids) == ids


def test_a_long_text_of_few_tokens_is_kept(tmp_path):
    """Tokens for 64 spaces each: 2,880 characters that fit into 100 tokens."""
    path = write_rows(
        tmp_path / "a.jsonl", [{"prompt": "a" + " " * 64 * 45}, {"prompt": "ab" * 40_000}]
    )
    loaded = load_rl(SourceConfig(path=path), BOUNDED["byte level"])
    assert [row.id for row in loaded.train.take(1)] == ["a:1"]
    assert [row.is_exact for row in loaded.report.dropped] == [False]


@pytest.mark.parametrize("template", [None, REWRITES_HISTORY])
def test_a_demonstration_is_as_long_as_up_to_its_end(tmp_path, template):
    """What follows the last end token is left out, so it counts for nothing."""
    row = {"prompt": "p", "completion": "c<|im_end|>" + "x" * HUGE}
    path = write_rows(tmp_path / "a.jsonl", [row])
    cfg = SFTDataConfig(train=(SourceConfig(path=path),), max_tokens=200)
    (kept,) = load_sft(cfg, char_tokenizer(template), seed=0).train.take(1)
    assert len(kept.token_ids) < 60


def test_half_a_character_pair_is_counted(tmp_path):
    """A lone surrogate, which JSON can spell and UTF-8 cannot."""
    path = write_rows(tmp_path / "a.jsonl", [{"prompt": "p"}, {"prompt": "\ud800" * 100_000}])
    loaded = load_rl(SourceConfig(path=path), BOUNDED["byte level of the tests"])
    assert loaded.report.num_kept == 1
