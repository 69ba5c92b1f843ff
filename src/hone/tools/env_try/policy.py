"""A policy whose turns are written by a person: in a script, or line by line at the terminal."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from hone.errors import UserError
from hone.types import Completion, EngineStats, Prompt, Request, SamplingParams, StopReason

__all__ = ["NextText", "Script", "ScriptedEngine", "completion_of", "typed_line"]

NextText = Callable[[Request], str | None]
"""Gets the request for a turn, and returns what the policy says; None where it says no more."""


class ScriptedEngine:
    """An engine whose completions are given as texts. A turn ends with the model's end token, at a
    stop string, or at its longest length, as a sampled one does."""

    weight_version = 0

    def __init__(
        self,
        next_text: NextText,
        encode: Callable[[str], Sequence[int]],
        end_id: int | None,
    ) -> None:
        """`encode` and `end_id` are those of `Language`."""
        self._next_text = next_text
        self._encode = encode
        self._end_id = end_id
        self._waiting: list[Request] = []

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests."""
        self._waiting += requests

    def step(self) -> list[Completion]:
        """Complete the first request."""
        request = self._waiting.pop(0)
        text = self._next_text(request)
        if text is None:
            return [
                Completion.as_submitted(
                    request, StopReason.ERROR, "nothing is given that the policy could say here"
                )
            ]
        return [completion_of(request, text, self._encode, self._end_id)]

    def abort(self, request_ids: Iterable[str]) -> list[Completion]:
        """Withdraw requests."""
        names = set(request_ids)
        gone = [request for request in self._waiting if request.id in names]
        self._waiting = [request for request in self._waiting if request.id not in names]
        return [Completion.as_submitted(request, StopReason.ABORT) for request in gone]

    @property
    def has_unfinished(self) -> bool:
        return bool(self._waiting)

    def stats(self) -> EngineStats:
        """No counters: nothing is sampled."""
        return EngineStats()


def completion_of(
    request: Request, text: str, encode: Callable[[str], Sequence[int]], end_id: int | None
) -> Completion:
    """The completion of a request that says `text`, cut where a sampled one would end."""
    said, reason = _cut_at_stop(text, request.sampling)
    ids = list(encode(said))
    if reason is StopReason.EOS and end_id is not None:
        ids.append(end_id)
    if len(ids) > request.sampling.max_tokens:
        ids, reason = ids[: request.sampling.max_tokens], StopReason.LENGTH
    return Completion(
        request_id=request.id,
        token_ids=ids,
        logprobs=[0.0] * len(ids),
        weight_versions=[0] * len(ids),
        stop_reason=reason,
    )


def _cut_at_stop(text: str, sampling: SamplingParams) -> tuple[str, StopReason]:
    found = [(text.find(stop), len(stop)) for stop in sampling.stop if stop in text]
    if not found:
        return text, StopReason.EOS
    at, length = min(found)
    return text[: at + length], StopReason.STOP_STRING


class Script:
    """Texts of the policy's turns: the same list for all episodes, or one by the id of the row."""

    def __init__(self, texts: Sequence[str] | Mapping[str, Sequence[str]], name: str) -> None:
        """`name` is the file, for messages."""
        self._texts = texts
        self._name = name

    @classmethod
    def read(cls, path: Path) -> Script:
        """Read a JSON file. Raises UserError where it is no script."""
        if not path.is_file():
            raise UserError(f"--script {path}: no such file")
        try:
            held: Any = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise UserError(f"--script {path} is no JSON: {error}") from None
        is_by_row = isinstance(held, dict)
        lists = [*cast("dict[str, Any]", held).values()] if is_by_row else [held]
        for texts in lists:
            if not isinstance(texts, list) or not all(
                isinstance(text, str) for text in cast("list[Any]", texts)
            ):
                raise UserError(
                    f"--script {path} must hold a list of texts, which are the policy's turns in "
                    'every episode, such as ["look", "go north"], or an object with such a list '
                    f"for each id of a row; got {texts!r:.80}"
                )
        return cls(held, str(path))

    def require(self, prompts: Sequence[Prompt]) -> None:
        """Raise UserError for a row that the script does not have."""
        if not isinstance(self._texts, Mapping):
            return
        lacking = [prompt.id for prompt in prompts if prompt.id not in self._texts]
        if lacking:
            raise UserError(
                f"--script {self._name} has no turns for the rows {', '.join(lacking)}, only for "
                f"{', '.join(self._texts) or 'none'}"
            )

    def text(self, row_id: str, turn: int) -> str | None:
        """What the policy says in turn `turn`, from 0; None where the script has ended."""
        texts = self._texts[row_id] if isinstance(self._texts, Mapping) else self._texts
        return texts[turn] if turn < len(texts) else None


def typed_line(mark: str) -> str | None:
    """A turn that a person types; a line that ends with a backslash goes on in the next one. None
    at the end of the input (Ctrl-D)."""
    lines: list[str] = []
    try:
        while True:
            line = input(mark if not lines else " " * len(mark))
            if not line.endswith("\\"):
                return "\n".join([*lines, line])
            lines.append(line[:-1])
    except EOFError:
        return None
