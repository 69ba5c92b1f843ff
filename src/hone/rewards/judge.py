"""LLM as a judge: a model behind an OpenAI-compatible API that rates completions in text.

Source: OpenAI's `POST /chat/completions`, as vLLM, SGLang and others serve it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field, model_validator

from hone.address import address_problem
from hone.data.settings import fill_template, template_fields
from hone.observe.column_values import as_text
from hone.rewards.base import compile_regex
from hone.rewards.remote import Remote, shown
from hone.rewards.shapes import InvalidScoreError, ScoreTypeError

__all__ = ["Judge"]


class Judge(Remote):
    """The number that `pattern` takes out of what a model answers to `template`.

    An answer in which the pattern is not found is a failure.
    """

    base_url: str
    """Address of the API, such as `http://localhost:8000/v1`: `/chat/completions` is appended."""

    model: str
    """The model, by the name it has there."""

    template: str
    """What the model is asked, as the message of a user. `{prompt}` (as the row has it),
    `{completion}`, `{answer}` and any column of the data are filled in; `{{name}}` gives `{name}`,
    and other braces stay as they are."""

    pattern: str
    """Regular expression with one group, which is the number; its last match counts. `.` matches
    line ends too."""

    max_tokens: int = Field(default=1024, ge=1)
    """Longest answer, in tokens."""

    temperature: float = Field(default=0.0, ge=0)
    """0: the likeliest answer."""

    @model_validator(mode="after")
    def _check(self) -> Judge:
        if problem := address_problem(self.base_url):
            raise ValueError(f"base_url: {problem}")
        if (num_groups := compile_regex(self.pattern).groups) != 1:
            raise ValueError(
                f"pattern {self.pattern!r} has {num_groups} groups; write one, around the number, "
                "and (?:...) for others"
            )
        if "completion" not in self.fields:
            raise ValueError("template has no {completion}, so every completion is judged alike")
        return self

    @property
    def fields(self) -> list[str]:
        """What `template` names."""
        return template_fields(self.template)

    def __call__(
        self, *, prompts: Sequence[Any], completions: Sequence[Any], **columns: Sequence[Any]
    ) -> list[float]:
        values = {name: column[0] for name, column in columns.items() if isinstance(column, list)}
        values |= {"prompt": prompts[0], "completion": completions[0]}
        content = {
            "model": self.model,
            "messages": [{"role": "user", "content": self._question(values)}],
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
        }
        url = f"{self.base_url.rstrip('/')}/chat/completions"
        return [self._score(self.post(url, content))]

    def _question(self, values: Mapping[str, Any]) -> str:
        def value_of(name: str) -> str:
            if values.get(name) is None:
                known = ", ".join(sorted(key for key, value in values.items() if value is not None))
                raise ValueError(
                    f"the template names {name!r}, which this row does not have (it has {known}). "
                    f"For literal braces write {{{{{name}}}}}."
                )
            try:
                return _as_text(values[name])
            except ValueError as error:
                raise ValueError(f"the template names {name!r}, which holds {error}") from error

        return fill_template(self.template, value_of)

    def _score(self, answer: Any) -> float:
        match answer:
            case {"choices": [{"message": {"content": str() | None as content}, **choice}, *_]}:
                text = content or ""
            case _:
                raise ScoreTypeError(
                    f"answered {shown(answer)}, in which there is no choices[0].message.content"
                )
        numbers = [match[1] for match in compile_regex(self.pattern).finditer(text)]
        if not numbers:
            is_cut = choice.get("finish_reason") == "length"
            raise InvalidScoreError(
                f"the pattern {self.pattern!r} is not in its answer, which ends {text[-200:]!r}"
                + f" and was cut at max_tokens ({self.max_tokens})" * is_cut
            )
        try:
            return float(numbers[-1])
        except (TypeError, ValueError):  # None where the group is not part of the match
            raise InvalidScoreError(
                f"the pattern {self.pattern!r} took {numbers[-1]!r} out of its answer, which is no "
                "number"
            ) from None


def _as_text(value: Any) -> str:
    """The value as text: text unchanged, the content of a single message, several messages with
    their roles, and anything else as JSON."""
    match value:
        case str():
            return value
        case [{"content": str(content)}]:
            return content
        case [{"role": _, "content": _}, *_]:
            return "\n\n".join(f"{turn['role']}: {_as_text(turn['content'])}" for turn in value)
        case _:
            return as_text(value)
