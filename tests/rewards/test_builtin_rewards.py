"""The built-in rewards against hand-computed values."""

import os

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.errors import UserError
from hone.rewards.builtin import ExactMatch, Format, Length, Math, Overlong, warm_up_math
from hone.rewards.scorer import Scorer
from hone.rewards.settings import RewardConfig, RewardFunctionConfig
from tests.tables import table

MATH_TABLE = [
    # GSM8K style
    ("She sells 9 * 2 = 18 dollars.\n#### 18", "18", True),
    ("#### 1,234", "1234", True),
    ("#### 1234", "1,234", True),
    ("#### 17", "18", False),
    ("#### $18.00", "18", True),
    ("#### -5", "-5", True),
    ("#### 5", "-5", False),
    ("#### 18 eggs", "18", True),
    ("#### 18\nThat took 3 steps.", "18", True),
    ("#### 3\nno, wait.\n#### 18", "18", True),
    ("The total is 5 apples and 3 pears, so 8.", "8", True),
    ("The total is 5 apples and 3 pears, so 8.", "5", False),
    ("she makes $18 every day.", "18", True),
    ("The answer is $1,234.", "1234", True),
    ("The answer is 1,234,567.", "1234567", True),
    ("so 3 + 4 = 7", "7", True),
    ("**42**", "42", True),
    ("72 clips.", "72", True),
    ("It weighs 3.50 kg", "3.5", True),
    ("It weighs 3.51 kg", "3.5", False),
    ("\N{MINUS SIGN}7", "-7", True),
    ("I do not know", "42", False),
    ("", "42", False),
    ("100 000", "100,000", True),
    # boxed
    (r"First 3, then \boxed{42}.", "42", True),
    (r"\boxed{42} and then I thought of 43", "42", True),
    (r"\boxed{43}", "42", False),
    (r"\boxed{1,234}", "1234", True),
    (r"\boxed{1{,}234}", "1234", True),
    (r"\boxed{1\,234}", "1234", True),
    (r"\boxed{12\text{ cm}}", "12", True),
    (r"\boxed{\$18}", "18", True),
    (r"\boxed{\frac{3}{4}}", "0.75", True),
    (r"\boxed{\frac12}", r"\frac{1}{2}", True),
    (r"\boxed{0.333333}", r"\frac{1}{3}", True),
    (r"\boxed{0.33}", r"\frac{1}{3}", False),
    (r"\boxed{\sqrt{12}}", r"2\sqrt{3}", True),
    (r"\boxed{(x+1)^2}", "x^2+2x+1", True),
    (r"\boxed{(x+1)^2}", "x^2+2x+2", False),
    (r"\boxed{x=5}", "5", True),
    (r"\boxed{(1, 2)}", "(1,2)", True),
    (r"\boxed{(2, 1)}", "(1,2)", False),
    (r"\boxed{2, 1}", r"\{1,2\}", True),
    (r"\boxed{A}", r"\text{A}", True),
    (r"\boxed{B}", r"\text{A}", False),
    (r"\boxed{50\%}", "0.5", True),
    (r"\boxed{\frac{\pi}{2}}", r"$\frac{\pi}{2}$", True),
    (r"\boxed{\frac{\pi}{2}}", r"\boxed{\frac{\pi}{3}}", False),
    (r"The answer is $\frac{2}{4}$", "1/2", True),
    (r"\boxed{", "42", False),
    (r"\boxed{1}\boxed{2}", "2", False),
    ("9" * 5000, "42", False),
]


@table("completion, answer, verdict", MATH_TABLE)
def test_math(completion, answer, verdict):
    assert Math()(completion=completion, answer=answer) == float(verdict)


SEPARATORS = {
    "comma": ",",
    "braced comma": "{,}",
    "space": " ",
    "thin": r"\,",
    "braced thin": r"{\,}",
    "negative": r"\!",
    "comma, negative": r",\!",
    "medium": r"\:",
    "thick": r"\;",
    "control space": r"\ ",
    "tie": "~",
    "no-break": "\u00a0",
    "figure": "\u2007",
    "thin, Unicode": "\u2009",
    "narrow no-break": "\u202f",
}


@table("separator", SEPARATORS.values())
def test_math_reads_thousands_however_they_are_separated(separator):
    small, large = f"1{separator}000", f"-1{separator}234{separator}567.5"
    for written, value, other in ((small, "1000", "0"), (large, "-1234567.5", "-1")):
        for form in (r"\boxed{%s}", "The answer is $%s$.", r"so \(%s\)", r"\boxed{x = %s}"):
            completion = form % written
            assert Math()(completion=completion, answer=value) == 1.0, f"{completion=}"
            assert Math()(completion=completion, answer=other) == 0.0, f"{completion=}"
            assert Math()(completion=completion, answer=written) == 1.0, f"{completion=}"
        for gold in (written, rf"\boxed{{{written}}}", f"${written}$"):
            assert Math()(completion=rf"\boxed{{{value}}}", answer=gold) == 1.0, f"{gold=}"
            assert Math()(completion=rf"\boxed{{{other}}}", answer=gold) == 0.0, f"{gold=}"


@table(
    "completion, answer, verdict",
    [
        # Two numbers, and numbers that are not grouped by three, stay what they are.
        (r"\boxed{1, 200}", "1200", False),
        (r"\boxed{(1, 200)}", "1200", False),
        (r"\boxed{(1,\ 200)}", "(1,200)", True),
        (r"\boxed{(1,\,200)}", "(1,200)", True),
        (r"\boxed{\{1,\,200\}}", "1200", False),
        (r"\boxed{1 00}", "100", False),
        (r"\boxed{10 00}", "1000", False),
        (r"\boxed{1 0000}", "10000", False),
        (r"\boxed{1 000 2}", "10002", False),
        (r"\boxed{1234\,567}", "1234567", False),
        (r"\boxed{1~00}", "100", False),
        (r"\boxed{1{,}5}", "15", False),
        (r"\boxed{\frac1 200}", "1200", False),
        (r"\boxed{0.123\,456}", "0.123456", True),
        (r"\boxed{12 000 \text{ km}}", "12000", True),
        (r"\boxed{\$12 000}", "12000", True),
        (r"\boxed{12 000\%}", "120", True),
    ],
)
def test_math_joins_groups_of_three_alone(completion, answer, verdict):
    assert Math()(completion=completion, answer=answer) == float(verdict)


ACCURACY_REWARD_TABLE = [
    # The verdicts of TRL 1.16's `accuracy_reward`.
    (r"\boxed{42}", "42", True),
    (r"\boxed{43}", "42", False),
    (r"so $x = 42$", "42", False),
    (r"The final answer is $42$. I hope it is correct.", "42", True),
    (r"Answer: $\frac{1}{2}$", "0.5", True),
    (r"The answer is $1,234$.", "1234", True),
    ("The answer is 42.", "42", False),
    ("Answer: 42", "42", False),
    ("#### 42", "42", False),
    ("42", "42", False),
    (r"#### \boxed{42}", "42", True),
    (r"\boxed{42} #### 43", "42", True),
    ("", "42", False),
]


@table("completion, answer, verdict", ACCURACY_REWARD_TABLE)
def test_math_of_latex_alone_reads_as_trl_does(completion, answer, verdict):
    strict = Math(latex_only=True)
    assert strict(completion=completion, answer=answer) == float(verdict)


def test_math_of_latex_alone_reads_thousands_too():
    assert Math(latex_only=True)(completion=r"\boxed{1 000}", answer="1 000") == 1.0
    assert Math(latex_only=True)(completion=r"\boxed{1 000}", answer="0") == 0.0


@given(st.integers(-(10**9), 10**9))
def test_math_on_any_integer(number):
    for text in (f"#### {number:,}", f"so \\boxed{{{number}}}", f"The answer is {number}."):
        assert Math()(completion=text, answer=str(number)) == 1.0
        assert Math()(completion=text, answer=str(number + 1)) == 0.0


def test_math_without_an_answer_is_an_error():
    with pytest.raises(ValueError, match="no answer"):
        Math()(completion="42", answer=None)
    with pytest.raises(ValueError, match="cannot be read as mathematics"):
        Math()(completion="42", answer="")


def test_R25_a_broken_math_verify_is_an_error_not_a_zero(tmp_path, monkeypatch):
    (tmp_path / "math_verify.py").write_text("raise ImportError('lib.so')")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    cfg = RewardConfig(functions=(RewardFunctionConfig(fn="math"),), num_workers=1)
    with pytest.raises(ValueError, match=r"`math_verify` library, .* broken: lib\.so"):
        Scorer(cfg, max_completion_tokens=8)


def test_math_stops_where_math_verify_is_broken(monkeypatch):
    import math_verify

    monkeypatch.setattr(math_verify, "verify", lambda *_, **__: False)
    with pytest.raises(UserError, match="reinstall"):
        warm_up_math()


@table(
    "settings, completion, answer, expected",
    [
        ({}, " 42\n", "42", 1.0),
        ({}, "42.", "42", 0.0),
        ({}, "Paris", "paris", 0.0),
        ({"ignore_case": True}, "PARIS ", "paris", 1.0),
        ({"pattern": r"<answer>(.*?)</answer>"}, "so <answer> 42 </answer>", "42", 1.0),
        ({"pattern": r"<answer>(.*?)</answer>"}, "so <answer>\n42\n</answer>", "42", 1.0),
        ({"pattern": r"<answer>(.*?)</answer>"}, "so 42", "42", 0.0),
        ({"pattern": r"(\d+)"}, "first 7, then 42", "42", 1.0),
        ({"pattern": r"\d+"}, "first 7, then 42", "7", 0.0),
        ({"pattern": r"a(b)?"}, "a", "", 1.0),
    ],
)
def test_exact_match(settings, completion, answer, expected):
    assert ExactMatch(**settings)(completion=completion, answer=answer) == expected


def test_exact_match_without_an_answer_is_an_error():
    with pytest.raises(ValueError, match="no answer"):
        ExactMatch()(completion="42", answer=None)


def test_functions_that_match_regular_expressions_run_in_workers():
    assert Math().isolated
    assert ExactMatch(pattern="x").isolated
    assert Format(pattern="x").isolated
    trusted = (
        ExactMatch(),
        Format(tags=("a",)),
        Length(target_tokens=1),
        Overlong(buffer_tokens=1),
    )
    assert not any(function.isolated for function in trusted)


@table(
    "settings, completion, expected",
    [
        ({"tags": ("think", "answer")}, "<think>a</think> <answer>b</answer>", 1.0),
        ({"tags": ("think", "answer")}, "<answer>b</answer><think>a</think>", 0.0),
        ({"tags": ("think", "answer")}, "<think>a<answer>b</answer></think>", 0.0),
        ({"tags": ("think",)}, "<think>a</think><think>b</think>", 0.0),
        ({"tags": ("think",)}, "</think>a<think>", 0.0),
        ({"tags": ("think",)}, "<think>a", 0.0),
        ({"pattern": r"^Answer: .+$"}, "Answer: a\nb", 1.0),
        ({"pattern": r"^Answer: .+$"}, "My Answer: a", 0.0),
        ({"pattern": "b", "tags": ("a",)}, "<a>b</a>", 1.0),
        ({"pattern": "c", "tags": ("a",)}, "<a>b</a>", 0.0),
    ],
)
def test_format(settings, completion, expected):
    assert Format(**settings)(completion=completion) == expected


@table(
    "settings, prompt, completion, expected",
    [
        ({"tags": ("think", "answer")}, "user\n<think>\n", "a</think><answer>2</answer>", 1),
        ({"tags": ("think", "answer")}, "user\n<think>", "<think>a</think><answer>2</answer>", 1),
        ({"tags": ("think", "answer")}, "user\n<think>\n", "a<answer>2</answer>", 0),
        ({"tags": ("think", "answer")}, "user\n", "a</think><answer>2</answer>", 0),
        ({"tags": ("think", "answer")}, "<think>user\n", "a</think><answer>2</answer>", 0),
        ({"pattern": "^<think>.*</think>2$"}, "user\n<think>\n", "a</think>2", 1),
        ({"pattern": "^a</think>2$"}, "user\n<think>\n", "a</think>2", 1),
        ({"pattern": "^2$"}, "<assistant>", "2", 1),
    ],
)
def test_format_counts_a_tag_that_the_prompt_has_opened(settings, prompt, completion, expected):
    assert Format(**settings)(completion=completion, prompt=prompt) == expected


@table(
    "num_tokens, width, expected",
    [(100, None, 1.0), (50, None, 0.5), (150, None, 0.5), (0, None, 0.0), (250, None, 0.0),
     (90, 20, 0.5), (120, 20, 0.0), (100, 20, 1.0)],
)  # fmt: skip
def test_length(num_tokens, width, expected):
    length = Length(target_tokens=100, width_tokens=width)
    assert length(completion_ids=[0] * num_tokens) == pytest.approx(expected)


OVERLONG_TABLE = [
    # tokens, limit, buffer, expected: DAPO's example has limit 20480 and buffer 4096
    (0, 20480, 4096, 0.0),
    (16384, 20480, 4096, 0.0),
    (16385, 20480, 4096, -1 / 4096),
    (18432, 20480, 4096, -0.5),
    (20479, 20480, 4096, -4095 / 4096),
    (20480, 20480, 4096, -1.0),
    (30000, 20480, 4096, -1.0),
    (10, 10, 10, -1.0),
    (3, 10, 10, -0.3),
    (10, 10, 0, 0.0),
    (11, 10, 0, -1.0),
]


def check_overlong(overlong):
    for num_tokens, limit, buffer, expected in OVERLONG_TABLE:
        ids = [0] * num_tokens
        for settings, longest in (({}, limit), ({"max_tokens": limit}, 77)):
            function = overlong(buffer_tokens=buffer, **settings)
            value = function(completion_ids=ids, stop_reason="eos", max_completion_tokens=longest)
            assert value == pytest.approx(expected, abs=1e-12), (num_tokens, limit, buffer)
    cut = {"completion_ids": [0] * 10, "stop_reason": "length", "max_completion_tokens": 10}
    assert overlong(buffer_tokens=0, truncation_penalty=0.5)(**cut) == -0.5
    assert overlong(buffer_tokens=4, truncation_penalty=0.5)(**cut) == -1.5
    not_cut = cut | {"stop_reason": "eos"}
    assert overlong(buffer_tokens=0, truncation_penalty=0.5)(**not_cut) == 0.0


def test_overlong():
    check_overlong(Overlong)


class _NotCapped(Overlong):
    def __call__(self, *, completion_ids, max_completion_tokens, **_):
        start = (self.max_tokens or max_completion_tokens) - self.buffer_tokens
        return -max(0.0, (len(completion_ids) - start) / max(self.buffer_tokens, 1))


class _BufferBehindTheLimit(Overlong):
    def __call__(self, *, completion_ids, max_completion_tokens, **_):
        over = len(completion_ids) - (self.max_tokens or max_completion_tokens)
        return -min(1.0, max(0.0, over / max(self.buffer_tokens, 1)))


@table("wrong", [_NotCapped, _BufferBehindTheLimit])
def test_overlong_check_catches(wrong):
    with pytest.raises(AssertionError):
        check_overlong(wrong)
