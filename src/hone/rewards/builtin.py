"""The built-in rewards. Each is a section of settings (`args` in a recipe) that can be called with
the fields of a sample that it needs.

`isolated` rewards run in worker processes like users' code, since a completion can make them run
for ever. The others are a few string or number operations and run in the caller.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from time import monotonic
from typing import Any

from pydantic import Field, PrivateAttr, ValidationError, model_validator
from pydantic_core import ErrorDetails

from hone.address import is_address
from hone.errors import UserError, did_you_mean
from hone.extras import import_extra
from hone.rewards.base import Builtin, compile_regex
from hone.rewards.code import count_passed, program_in, read_tests
from hone.rewards.jail import Jail, JailError
from hone.rewards.judge import Judge
from hone.rewards.remote import Service
from hone.rewards.settings import CODE_TIMEOUT_S
from hone.types import with_opened_tag

__all__ = [
    "BUILTINS",
    "CodeTests",
    "ExactMatch",
    "Format",
    "Length",
    "Math",
    "Overlong",
    "build",
    "warm_up_math",
]


class ExactMatch(Builtin):
    """1 where the completion, or what `pattern` takes out of it, equals the answer; else 0."""

    pattern: str | None = None
    """Regular expression; the first group (or whole match) of its last match is compared. No match
    scores 0."""

    ignore_case: bool = False
    """Compare without regard to case."""

    @model_validator(mode="after")
    def _compile(self) -> ExactMatch:
        if self.pattern is not None:
            compile_regex(self.pattern)
        return self

    @property
    def isolated(self) -> bool:
        return self.pattern is not None  # a regular expression may backtrack for ever

    def __call__(self, *, completion: str, answer: str | None) -> float:
        given = completion
        if self.pattern is not None:
            matches = list(compile_regex(self.pattern).finditer(completion))
            if not matches:
                return 0.0
            given = matches[-1][1 if matches[-1].re.groups else 0] or ""
        return float(self._normalise(given) == self._normalise(_required(answer)))

    def _normalise(self, text: str) -> str:
        return text.strip().casefold() if self.ignore_case else text.strip()


class Format(Builtin):
    """1 where the completion has the demanded form, else 0."""

    pattern: str | None = None
    """Regular expression that must be found; anchor it with `^` and `$` to cover the whole
    completion. `.` matches line ends too."""

    tags: tuple[str, ...] = ()
    """Tags that must each open and close exactly once, one behind the other in this order:
    `[think, answer]` wants `<think>..</think>..<answer>..</answer>`. A first tag that the prompt
    has opened, as templates of reasoning models do, counts as the completion's."""

    @model_validator(mode="after")
    def _demands_something(self) -> Format:
        if self.pattern is None and not self.tags:
            raise ValueError("set `pattern` or `tags`, else every completion passes")
        if self.pattern is not None:
            compile_regex(self.pattern)
        return self

    @property
    def isolated(self) -> bool:
        return self.pattern is not None  # a regular expression may backtrack for ever

    def __call__(self, *, completion: str, prompt: str = "") -> float:
        texts = {completion, with_opened_tag(prompt, completion)}
        return float(any(map(self._fits, texts)))

    def _fits(self, completion: str) -> bool:
        if self.pattern is not None and not compile_regex(self.pattern).search(completion):
            return False
        marks = [mark for tag in self.tags for mark in (f"<{tag}>", f"</{tag}>")]
        places = [completion.find(mark) for mark in marks]
        once = all(completion.count(mark) == 1 for mark in marks)
        return once and places == sorted(places)


class Length(Builtin):
    """Falls linearly from 1 at `target_tokens` to 0 at `width_tokens` away from it."""

    target_tokens: int = Field(ge=1)
    """Completion length that earns 1, in tokens."""

    width_tokens: int | None = Field(default=None, ge=1)
    """Distance from the target at which 0 is reached, in tokens; unset: `target_tokens`."""

    def __call__(self, *, completion_ids: list[int]) -> float:
        width = self.width_tokens or self.target_tokens
        return max(0.0, 1.0 - abs(len(completion_ids) - self.target_tokens) / width)


class Overlong(Builtin):
    """DAPO's soft overlong punishment (arXiv:2503.14476, equation 13), from 0 down to -1.

    With n tokens, limit L and buffer C: 0 for n <= L - C, then (L - C - n) / C, and -1 for n > L.
    """

    buffer_tokens: int = Field(ge=0)
    """Tokens before the limit over which the punishment grows; 0 leaves `truncation_penalty`."""

    max_tokens: int | None = Field(default=None, ge=1)
    """The limit, in tokens; unset: the longest completion that is sampled."""

    truncation_penalty: float = Field(default=0.0, ge=0)
    """Subtracted on top where the completion was cut at the length limit."""

    def check_limit(self, max_completion_tokens: int) -> None:
        limit = self.max_tokens or max_completion_tokens
        if self.buffer_tokens > limit:
            raise ValueError(
                f"buffer_tokens is {self.buffer_tokens}, more than the {limit} tokens a completion "
                f"may have; set it to at most that"
            )

    def __call__(
        self, *, completion_ids: list[int], stop_reason: str, max_completion_tokens: int
    ) -> float:
        limit = self.max_tokens or max_completion_tokens
        num_over = len(completion_ids) - (limit - self.buffer_tokens)
        if num_over <= 0:
            penalty = 0.0
        elif num_over >= self.buffer_tokens:
            penalty = 1.0
        else:
            penalty = num_over / self.buffer_tokens
        return -penalty - (self.truncation_penalty if stop_reason == "length" else 0.0)


class Math(Builtin):
    """1 where the completion's final result equals the answer mathematically (math-verify), else 0.

    The result is what stands behind the last `####`, else the last `\\boxed{}`, else what is
    announced as the answer, else the last formula or number. A completion that cannot be read as
    mathematics is wrong; an answer that cannot be read is an error. The answer needs no delimiters:
    `1/2`, `$1/2$` and `\\boxed{1/2}` are the same.
    """

    latex_only: bool = False
    """Read the result only where it is LaTeX in `\\boxed{}`, or in `$...$` and the like behind
    words such as "the answer is": the strict reading, that of TRL's `accuracy_reward`. Bare numbers
    and `####` then score 0."""

    @property
    def isolated(self) -> bool:
        return True  # 9^9^9^9 is a valid completion

    def __call__(self, *, completion: str, answer: str | None) -> float:
        gold = _gold(_required(answer))
        text = completion
        if not self.latex_only and "####" in text:
            text = text.rpartition("####")[2].strip().partition("\n")[0]
        try:
            return float(_equal(gold, _parse(text, latex_only=self.latex_only)))
        except (ValueError, TypeError, ArithmeticError, RecursionError):
            return 0.0  # sympy cannot make sense of what the model wrote


class CodeTests(Builtin):
    """1 where the program in the completion passes all tests in the answer, else 0.

    The program is the last fenced block of Python, or the whole completion. The answer has the
    tests: Python with assertions, a JSON list of such texts (MBPP), or a JSON object with `inputs`
    and `outputs` of a whole program, or of the function `fn_name` (APPS, TACO). It runs in a jail,
    and is judged outside of its process: SECURITY.md says what that contains.
    """

    timeout_s: float = Field(default=CODE_TIMEOUT_S, gt=0)
    """Seconds that all tests of a sample may take, less than `reward.timeout_s`; what has not
    passed then has failed."""

    partial_credit: bool = False
    """Give the share of tests that pass."""

    _jail: Jail | None = PrivateAttr(default=None)

    @property
    def isolated(self) -> bool:
        return True

    def settle(self, folder: Path | None) -> Sequence[str]:
        self._jail = Jail(folder)
        return list(self._jail.missing.values())

    def __call__(self, *, completion: str, answer: str | None) -> float:
        tests = read_tests(_required(answer))
        if self._jail is None:
            self.settle(None)
            assert self._jail is not None
        try:
            passed = count_passed(
                program_in(completion), tests, monotonic() + self.timeout_s, self._jail
            )
        except JailError:
            self._jail = None  # the next call starts another one
            raise
        return passed / len(tests) if self.partial_credit else float(passed == len(tests))


def warm_up_math() -> None:
    """Import math-verify, fill its pattern caches (0.4 s), and check that it works.

    Unreadable completions score 0, so a broken installation would look like a model that is always
    wrong. Raises UserError where it is missing or broken.
    """
    import_extra("math_verify", needed_by="the reward `math`")
    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns that its timeouts are off
    if Math()(completion="so $x = \\frac{2}{4}$", answer="0.5") != 1.0:
        raise UserError(
            "math-verify does not find 2/4 equal to 0.5; reinstall it: "
            "pip install --force-reinstall math-verify"
        )


@cache
def _gold(answer: str) -> list[Any]:
    """The answer parsed by math-verify: the value, and the text as a fallback."""
    text = answer.strip()
    if not _DELIMITED.search(text):
        text = rf"\boxed{{{text}}}"
    gold = _parse(text)
    if not gold:
        raise ValueError(f"the answer {answer!r} cannot be read as mathematics; use `exact_match`")
    return gold


def _parse(text: str, *, latex_only: bool = False) -> list[Any]:
    # Imported here, since it takes 0.4 s and the driver only checks settings.
    from latex2sympy2_extended import NormalizationConfig
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse

    text = _join_thousands(text.replace("\N{MINUS SIGN}", "-"))
    if latex_only:
        strict = LatexExtractionConfig(
            normalization_config=NormalizationConfig(units=True),
            boxed_match_priority=0,
            try_extract_without_anchor=False,
        )
        targets, mode = (strict,), "first_match"
    else:
        targets = (LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig())
        mode = "any_match"
    return parse(
        text,
        targets,
        extraction_mode=mode,
        parsing_timeout=None,  # pyright: ignore[reportArgumentType] - None is documented, the annotation is not
        raise_on_error=True,
    )


def _join_thousands(text: str) -> str:
    """Remove the separators from numbers whose digits are grouped by three.

    math-verify reads `\\boxed{1 000}` as the product of 1 and 0. A typographic space between groups
    is always a separator. A plain space or comma may also separate the numbers of a list, so it is
    removed only from the number at the start of a formula.
    """
    text = _SPACED_NUMBER.sub(lambda match: re.sub(_TYPOGRAPHIC_SPACE, "", match[0]), text)
    return _LEADING_NUMBER.sub(lambda match: match[1] + re.sub("[ ,]", "", match[2]), text)


def _equal(gold: list[Any], prediction: list[Any]) -> bool:
    from math_verify import verify

    # Signals cannot stop C loops; the worker's deadline can.
    return verify(gold, prediction, timeout_seconds=None, raise_on_error=True)


_DELIMITED = re.compile(r"\\boxed|\\\(|\\\[|^\$.*\$$", re.DOTALL)
_TYPOGRAPHIC_SPACE = r"(?:,?\\!|\\[,:; ]|\{\\?,\}|[~\u00a0\u2007\u2009\u202f])"
_SPACED_NUMBER = re.compile(rf"(?<!\d)\d{{1,3}}(?:{_TYPOGRAPHIC_SPACE}\d{{3}})+(?!\d)")
_LEADING_NUMBER = re.compile(
    r"((?:\\boxed\{|\$|\\\(|\\\[)\s*(?:[A-Za-z]\w*\s*=\s*)?[-+]?\s*(?:\\?\$\s*)?)"
    r"(\d{1,3}(?:(?: \d{3})+|(?:,\d{3})+))(?![ ,]?\d)"
)


BUILTINS: Mapping[str, type[Builtin]] = {
    "exact_match": ExactMatch,
    "math": Math,
    "format": Format,
    "length": Length,
    "overlong": Overlong,
    "code_tests": CodeTests,
    "judge": Judge,
}


def build(name: str, args: Mapping[str, Any]) -> Builtin:
    """The built-in reward `name`, or the service at that address, with its settings.

    Raises ValueError for an unknown name or setting, with the nearest known one.
    """
    if is_address(name):
        if "url" in args:
            raise ValueError("no setting 'url': the address is the name of the function")
        args = {**args, "url": name}
    elif name not in BUILTINS:
        raise ValueError(
            f"no built-in reward of that name; there are {', '.join(BUILTINS)}, and your own are "
            f"written `package.module:function` or `path/to/file.py:function`; a service is its "
            f"http:// address."
            f"{did_you_mean(name, BUILTINS)}"
        )
    kind = BUILTINS.get(name, Service)
    try:
        return kind.model_validate(args)
    except ValidationError as error:
        raise ValueError("; ".join(_explain(kind, problem) for problem in error.errors())) from None


def _explain(kind: type[Builtin], problem: ErrorDetails) -> str:
    setting = ".".join(str(part) for part in problem["loc"])
    settings = [name for name in kind.model_fields if name != "url"]
    if problem["type"] == "extra_forbidden":
        known = f" It has: {', '.join(settings)}." if settings else " It has none."
        return f"no setting '{setting}'.{did_you_mean(setting, settings) or known}"
    if problem["type"] == "missing":
        return f"it needs args.{setting}"
    text = problem["msg"].removeprefix("Value error, ")
    return f"args.{setting} is {problem['input']!r}: {text}" if setting else text


def _required(answer: str | None) -> str:
    if answer is None:
        raise ValueError("this row has no answer; name its column in `data.*.columns.answer`")
    return answer
