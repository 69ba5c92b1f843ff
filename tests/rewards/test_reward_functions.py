"""Finding reward functions, calling them by parameter names, summing what they return."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hone.rewards.score import RewardFunction, arguments, score
from hone.rewards.scorer import Scorer
from hone.types import FailureKind
from hone.user_code.resolve import check_signature, resolve
from tests.rewards.scoring import MISBEHAVING, config, make_sample


def as_function(function, name="f", weight=1.0, **args):
    return RewardFunction(function, name=name, weight=weight, args=args)


def verdict(*functions, **sample):
    sample = make_sample(**{"text": "four", "answer": "4"} | sample)
    return score(functions, arguments(sample, max_completion_tokens=16))


def test_arguments_are_chosen_by_name():
    seen = {}

    def everything(  # noqa: PLR0917
        completion,
        prompt,
        answer,
        completion_ids,
        task,
        stop_reason,
        metadata,
        messages,
        level,
        factor=2,
        missing="default",
    ):
        seen.update(locals())
        return 1

    turns = [{"role": "user", "content": "2 + 2"}]
    verdict(as_function(everything, factor=3), num_tokens=2, level="easy", messages=turns)
    seen.pop("seen")
    assert seen == {
        "completion": "four", "prompt": "Q: ?", "answer": "4", "completion_ids": [0, 1],
        "task": "t", "stop_reason": "eos", "metadata": {"level": "easy", "messages": turns},
        "messages": turns, "level": "easy", "factor": 3, "missing": "default",
    }  # fmt: skip


def test_keyword_catch_all_gets_everything_and_columns_never_shadow():
    seen = {}

    def everything(**kwargs):
        seen.update(kwargs)
        return 1

    verdict(as_function(everything, extra=5), completion="a column", extra="a column", odd=1)
    assert seen["completion"] == "four"
    assert seen["extra"] == 5
    assert seen["odd"] == 1
    assert seen["max_completion_tokens"] == 16


def test_missing_column_is_an_exception_that_names_it():
    outcome = verdict(as_function(lambda level: 1.0), topic="x")
    assert outcome.failure is FailureKind.EXCEPTION
    assert "'level'" in outcome.detail
    assert "topic" in outcome.detail


@pytest.mark.parametrize(
    ("value", "expected"),
    [(2, 2.0), (0.5, 0.5), (True, 1.0), (False, 0.0), (Fraction(1, 4), 0.25),
     (np.float32(0.5), 0.5), (np.int64(3), 3.0), ({"score": 1, "steps": 4}, 1.0)],
)  # fmt: skip
def test_accepted_returns(value, expected):
    outcome = verdict(as_function(lambda: value))
    assert outcome.reward.total == expected
    assert outcome.reward.parts["f"] == expected


@pytest.mark.parametrize(
    "value",
    [math.nan, math.inf, "1", [1.0], 1j, 10**400, {"score": math.nan}, {"score": 1, "m": "x"},
     {"score": 1, "m": -math.inf}, {}, object()],
)  # fmt: skip
def test_refused_returns(value):
    outcome = verdict(as_function(lambda: 1.0, name="g"), as_function(lambda: value))
    assert outcome.reward is None
    assert outcome.failure is FailureKind.INVALID
    assert outcome.detail.startswith("f: ")


def test_none_leaves_a_part_out_and_only_nones_are_invalid():
    nothing = as_function(lambda: None, name="nothing", weight=100.0)
    silent = as_function(lambda: {"score": None, "m": 1.0}, name="silent")
    outcome = verdict(nothing, as_function(lambda: 1.0), silent)
    assert outcome.reward.parts == {"f": 1.0, "silent/m": 1.0}
    assert outcome.reward.total == 1.0
    assert verdict(nothing, silent).failure is FailureKind.INVALID


@given(
    st.lists(
        st.tuples(st.floats(-1e6, 1e6), st.none() | st.floats(-1e6, 1e6)), min_size=1, max_size=6
    )
)
def test_total_is_the_weighted_sum(pairs):
    functions = [
        as_function(lambda value=value: value, name=f"f{i}", weight=weight)
        for i, (weight, value) in enumerate(pairs)
    ]
    outcome = verdict(*functions)
    terms = [weight * value for weight, value in pairs if value is not None]
    if not terms:
        assert outcome.failure is FailureKind.INVALID
    else:
        assert outcome.reward.total == pytest.approx(math.fsum(terms), rel=1e-9, abs=1e-6)


def test_metrics_are_recorded_but_not_in_the_total():
    function = as_function(lambda: {"score": 1, "steps": 40, "ok": True}, weight=0.5)
    reward = verdict(function).reward
    assert reward.total == 0.5
    assert reward.parts == {"f": 1.0, "f/steps": 40.0, "f/ok": 1.0}


@pytest.mark.parametrize(
    ("clip", "weight", "total"),
    [(None, 20, 20), ((-10, 10), 20, 10), ((-10, 10), -20, -10), ((-10, 10), 3, 3), ((2, 5), 0, 2)],
)
def test_the_total_is_clipped_and_its_parts_are_not(clip, weight, total):
    with Scorer(config(("exact_match", weight, {}), clip=clip), max_completion_tokens=8) as scorer:
        (sample,) = scorer.score([make_sample("4", answer="4")])
    assert sample.reward.total == total
    assert sample.reward.parts == {"exact_match": 1.0}


def test_overflow_of_the_sum_is_invalid():
    functions = [as_function(lambda: 1e308, weight=1e308)]
    assert verdict(*functions).failure is FailureKind.INVALID


def test_exception_detail_names_function_place_and_text():
    def broken(completion):
        raise LookupError("no rubric")

    outcome = verdict(as_function(broken, name="rubric"))
    assert outcome.failure is FailureKind.EXCEPTION
    for part in ("rubric: ", "test_reward_functions.py:", "LookupError: no rubric"):
        assert part in outcome.detail


def test_unique_names():
    assert config("m:a", "b.py:b", "m2:a", "a").names == ["a", "b", "a_2", "a_3"]
    assert len(set(config("a", "a_2", "a", "a").names)) == 4


def write(tmp_path, text, name="mine.py"):
    (tmp_path / name).write_text(text)
    return str(tmp_path / name)


def test_resolve_module_and_file(tmp_path):
    assert resolve("math:sqrt") is math.sqrt
    write(tmp_path, "def helper(): return 3.0", "neighbour_of_mine.py")
    path = write(tmp_path, "from neighbour_of_mine import helper\ndef f(): return helper()")
    assert resolve(f"{path}:f")() == 3.0


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("just_a_name", ["package.module:function"]),
        ("no.such.module:f", ["no module 'no'"]),
        ("os.nothing:f", ["no module 'os.nothing'"]),
        ("math:sqr", ["no function 'sqr'", "Did you mean 'sqrt'"]),
        ("math:pi", ["type float", "cannot be called"]),
        ("{folder}/mime.py:f", ["no file", "Did you mean 'mine.py'"]),
        ("{folder}/mine.py:scor", ["no function 'scor'", "Did you mean 'score'"]),
        ("{folder}/broken.py:f", ["importing", "broken.py", "ZeroDivisionError"]),
        ("{folder}/lacking.py:f", ["importing", "no_such_package"]),
        ("{folder}/syntax.py:f", ["importing", "SyntaxError"]),
        ("{folder}/leaves.py:f", ["importing", "SystemExit"]),
    ],
)
def test_resolve_errors(tmp_path, spec, parts):
    write(tmp_path, "def score(completion): return 1.0")
    write(tmp_path, "x = 1 / 0", "broken.py")
    write(tmp_path, "import no_such_package", "lacking.py")
    write(tmp_path, "def f(:", "syntax.py")
    write(tmp_path, "raise SystemExit(2)", "leaves.py")
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is what is tested
        resolve(spec.format(folder=tmp_path))
    assert all(part in str(caught.value) for part in parts), str(caught.value)


@pytest.mark.parametrize(
    ("function", "args", "part"),
    [
        (lambda a, /: 1.0, {}, "by position only"),
        (lambda completion: 1.0, {"alhpa": 1}, "no parameter 'alhpa'"),
        (lambda completion, alpha: 1.0, {"alhpa": 1}, "Did you mean 'alpha'"),
        (lambda answer: 1.0, {"answer": "4"}, "every sample brings"),
        (dict.fromkeys, {}, "by position only"),
    ],
)
def test_signature_errors(function, args, part):
    with pytest.raises(ValueError, match=part):
        check_signature(function, "spec", args)


@pytest.mark.parametrize(
    ("functions", "parts"),
    [
        ([], ["reward.functions", "empty"]),
        (["exact_macht"], ["functions[0]", "Did you mean 'exact_match'"]),
        (["exact_match", ("format", 1.0, {})], ["functions[1] (format)", "pattern", "tags"]),
        ([("format", 1.0, {"pattern": "("})], ["not a regular expression"]),
        ([("exact_match", 1.0, {"patern": "x"})], ["no setting 'patern'", "'pattern'"]),
        ([("overlong", 1.0, {"buffer_tokens": -1})], ["args.buffer_tokens is -1"]),
        ([("overlong", 1.0, {"buffer_tokens": 17})], ["buffer_tokens is 17", "16"]),
        ([("length", 1.0, {})], ["target_tokens"]),
        ([f"{MISBEHAVING}:scor"], ["no function 'scor'", "Did you mean 'score'"]),
        (["math:pow"], ["position only"]),
        (["no_such_package_at_all:f"], ["no module 'no_such_package_at_all'"]),
    ],
)
def test_scorer_refuses_at_launch(functions, parts):
    with pytest.raises(ValueError) as caught:  # noqa: PT011 - the text is what is tested
        Scorer(config(*functions), max_completion_tokens=16)
    assert all(part in str(caught.value) for part in parts), str(caught.value)


def test_a_module_that_ends_the_process_while_loading(tmp_path):
    path = write(tmp_path, "import os; os._exit(7)")
    with pytest.raises(ValueError, match=r"mine\.py:f.*exit code 7"):
        Scorer(config(f"{path}:f"), max_completion_tokens=16)


def test_trusted_functions_start_no_process_and_mixed_ones_agree_with_them(tmp_path):
    path = write(tmp_path, "def bonus(completion): return {'score': 2.0, 'chars': len(completion)}")
    trusted = ["exact_match", ("overlong", 0.5, {"buffer_tokens": 8}), ("exact_match", 0.25, {})]
    samples = [make_sample("4", answer="4", num_tokens=n, index=n) for n in range(20)]
    with Scorer(config(*trusted), max_completion_tokens=16) as inline:
        assert inline._pool is None
        expected = [sample.reward for sample in inline.score(samples)]
    for sample in samples:
        sample.reward = None
    with Scorer(config(*trusted, (f"{path}:bonus", 10.0, {})), max_completion_tokens=16) as mixed:
        for sample, reward in zip(mixed.score(samples), expected, strict=True):
            assert sample.reward.total == pytest.approx(reward.total + 20.0)
            assert sample.reward.parts == {**reward.parts, "bonus": 2.0, "bonus/chars": 1.0}
    assert expected[0].parts.keys() == {"exact_match", "overlong", "exact_match_2"}


def test_submit_and_poll_return_each_sample_once():
    with Scorer(config("exact_match"), max_completion_tokens=16) as scorer:
        samples = [make_sample("4", answer="4", index=i) for i in range(5)]
        for sample in samples:
            scorer.submit(sample)
        assert scorer.pending == 5
        assert scorer.poll() == samples
        assert scorer.poll() == []
        assert scorer.stats().num_scored == 5
        with pytest.raises(AssertionError):
            scorer.submit(samples[0])


def test_a_function_may_run_in_this_process():
    calls = []

    def double(completion, level, max_completion_tokens):
        calls.append(max_completion_tokens)
        return {"score": 2 * float(completion), "level": level}

    scorer = Scorer.in_process(double, max_completion_tokens=16)
    good, bad = make_sample("1.5", level=3), make_sample("four", level=3)
    scorer.submit(good, bad)
    assert scorer.poll() == [good, bad]
    assert calls == [16, 16]
    assert not scorer.uses_workers
    assert good.reward is not None
    assert (good.reward.total, dict(good.reward.parts)) == (3.0, {"double": 3.0, "double/level": 3})
    assert (bad.reward, bad.failure) == (None, FailureKind.EXCEPTION)
    assert "ValueError" in bad.failure_detail

    def positional(completion, /):
        return 1.0

    with pytest.raises(ValueError, match="positional"):
        Scorer.in_process(positional, max_completion_tokens=16)
