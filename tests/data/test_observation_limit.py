"""What an environment says is cut in the middle, to a number of tokens."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.data.observation_limit import cut_middle, cut_observation
from hone.data.template_check import RenderError
from hone.types import Observation
from tests.data.support import bpe_tokenizer, char_tokenizer

BPE, CHARS = bpe_tokenizer(), char_tokenizer()


def encode_with(tokenizer):
    return lambda text: tokenizer.encode(text, add_special_tokens=False)


def cut(text, limit, tokenizer=BPE):
    return cut_middle(text, limit, encode_with(tokenizer), tokenizer.decode)


@settings(max_examples=150, deadline=None)
@given(st.text(st.sampled_from("ab 12\n\u00e9\u4e2d\U0001f600"), max_size=300), st.integers(1, 120))
def test_the_result_fits_and_a_short_text_stands(text, limit):
    encode = encode_with(BPE)
    found = cut(text, limit)
    if len(encode(text)) <= limit:
        assert found == text
    else:
        assert found != text
        assert len(encode(found)) <= limit


def test_the_start_and_the_end_stay_and_the_note_counts_the_rest():
    text = "".join(f"<{n}>" for n in range(500))
    found = cut(text, 100, CHARS)
    first, count, last = re.fullmatch(
        r"(.*)\n\.\.\. \[([\d,]+) tokens left out\] \.\.\.\n(.*)", found, re.DOTALL
    ).groups()
    assert text.startswith(first)
    assert text.endswith(last)
    assert abs(len(first) - len(last)) <= 1
    assert int(count.replace(",", "")) == len(text) - len(first) - len(last)
    assert len(found) == 100


def test_no_half_of_a_character_is_left_at_the_cut():
    text = "\U0001f600\u4e2d" * 200
    for limit in range(30, 60):
        assert "\N{REPLACEMENT CHARACTER}" not in cut(text, limit)


def test_a_limit_below_the_note_keeps_the_start():
    assert cut("x" * 100, 5, CHARS) == "x" * 5


def test_without_words_for_the_note_the_start_stays():
    def encode(text: str) -> list[int]:
        if unknown := set(text) - set("0123456789"):
            raise RenderError(f"unknown: {sorted(unknown)}")
        return [int(digit) for digit in text]

    def decode(ids) -> str:
        return "".join(map(str, ids))

    assert cut_middle("0123456789" * 5, 7, encode, decode) == "0123456"
    assert cut_middle("0123456789" * 500, 7, encode, decode) == "0123456"
    assert cut_middle("01234", 7, encode, decode) == "01234"


def test_a_text_that_is_encoded_otherwise_than_its_parts_fits_too():
    """Four characters a token in a long text, and one in a short one."""

    def encode(text):
        size = 4 if len(text) > 500 else 1
        return [text[start : start + size] for start in range(0, len(text), size)]

    found = cut_middle("x" * 1000, 100, encode, "".join)
    assert len(encode(found)) <= 100
    assert "left out" in found


def test_a_huge_text_is_not_encoded_whole():
    longest = 0

    def encode(text):
        nonlocal longest
        longest = max(longest, len(text))
        return BPE.encode(text, add_special_tokens=False)

    found = cut_middle("ab" * 10**6, 100, encode, BPE.decode)
    assert longest < 10**4
    assert re.search(r"\[1,987,200 characters and more left out\]", found)
    assert len(BPE.encode(found, add_special_tokens=False)) <= 100


@pytest.mark.parametrize("role", ["user", None])
def test_the_text_of_an_observation_is_cut(role):
    given = Observation("x" * 200, role=role, reward=0.5)
    found, num_cut = cut_observation(given, 60, encode_with(CHARS), CHARS.decode)
    assert found.content == cut("x" * 200, 60, CHARS)
    assert (found.role, found.reward, num_cut) == (role, 0.5, 1)


def test_each_message_of_an_observation_is_cut_by_itself():
    parts = [{"type": "text", "text": "x" * 200}]
    messages = [
        {"role": "tool", "name": "f", "content": "x" * 200},
        {"role": "tool", "content": "short"},
        {"role": "tool", "content": parts},
    ]
    found, num_cut = cut_observation(Observation(messages), 60, encode_with(CHARS), CHARS.decode)
    assert found.content == [
        {"role": "tool", "name": "f", "content": cut("x" * 200, 60, CHARS)},
        messages[1],
        {"role": "tool", "content": [{"type": "text", "text": cut("x" * 200, 60, CHARS)}]},
    ]
    assert num_cut == 2
    assert messages[0]["content"] == "x" * 200


def test_ids_of_an_observation_stand():
    given = Observation(token_ids=tuple(range(99)))
    assert cut_observation(given, 5, encode_with(CHARS), CHARS.decode) == (given, 0)
