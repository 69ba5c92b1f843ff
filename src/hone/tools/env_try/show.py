"""Prints an episode while it is played: who says what, what it cost, and how it ended."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from hone.observe.printable import printable
from hone.tools.env_try.language import Language, in_words
from hone.types import Message, Prompt, Sample, StopReason, Turn

__all__ = ["LABEL_WIDTH", "Shown"]

LABEL_WIDTH = 11
"""Columns of the terminal for who speaks."""
_STYLES = {"policy": "cyan", "tool": "magenta", "user": "green", "raw": "yellow"}
_MOST = 4000
"""Most characters of a message that are printed."""


class Shown:
    """An `Audience` that prints."""

    def __init__(
        self, console: Console, language: Language, *, is_raw: bool, is_typed: bool
    ) -> None:
        """With `is_raw` the exact text before each turn is printed, as the template renders it,
        in place of messages. With `is_typed` the policy's turns stand on the terminal already."""
        self._console = console
        self._language = language
        self._is_raw = is_raw
        self._is_typed = is_typed

    def begins(self, prompt: Prompt, number: int) -> None:
        """Print a rule with the row."""
        self._console.print()
        title = f"{number} of {len(self._language.prompts)} · row {printable(prompt.id)}"
        self._console.print(Rule(Text(title, style="bold"), align="left", style="dim"))

    def before_turn(self, prompt: Prompt, sample: Sample | None) -> None:
        """Print the prompt, or what was answered to the last turn."""
        if sample is None or not sample.turns:
            self._prompt(prompt)
        else:
            self._answer(sample)

    def turn(self, number: int, text: str) -> None:
        """Print what the policy says."""
        if not self._is_typed:
            self._line(f"policy {number + 1}", _text(text))

    def starts_again(self, why: str) -> None:
        """Print why the session was lost."""
        lines = f"the session was lost: {printable(why)}\nthe episode starts again (env.retries)"
        self._line("", Text(lines, style="yellow"))

    def ends(self, sample: Sample) -> None:
        """Print how the episode ended."""
        if not sample.turns and sample.failure is not None:  # before the first turn
            self._prompt(sample.prompt)
        style = "bold red" if sample.failure is not None else "bold"
        lines = [Text(line, style=style if not n else "") for n, line in enumerate(_end(sample))]
        last = sample.turns[-1] if sample.turns else None
        self._line("end", Text("\n").join(lines), _times(last))
        counts = [f"{len(sample.turns)} turns"]
        if self._language.has_tokens:
            observed = len(sample.token_ids) - sample.num_sampled
            counts += [
                f"tokens: {len(sample.prompt.token_ids):,} of the prompt",
                f"{sample.num_sampled:,} of the policy",
                f"{observed:,} of the environment, of {self._language.max_tokens:,} in all",
            ]
        if sample.attempt:
            counts.append(f"attempt {sample.attempt + 1}")
        self._line("", Text(", ".join(counts), style="dim"))

    def _prompt(self, prompt: Prompt) -> None:
        count = self._count(len(prompt.token_ids))
        if self._is_raw or not prompt.messages:
            self._line("raw" if self._is_raw else "prompt", _text(prompt.text), count)
            return
        self._messages(prompt.messages, count)

    def _answer(self, sample: Sample) -> None:
        turn = sample.turns[-1]
        num_observed = len(sample.token_ids) - turn.end
        meta = " · ".join(filter(None, [self._count(num_observed), _times(turn), _reward(turn)]))
        if self._is_raw:
            self._line("raw", _text(turn.observed), meta)
        elif turn.messages:
            self._messages(turn.messages, meta)
        else:
            self._line("env", _text(turn.observed), meta)

    def _messages(self, messages: Sequence[Message], meta: str) -> None:
        for number, message in enumerate(messages):
            role, name = str(message.get("role", "")), str(message.get("name") or "")
            said = _text(in_words(message.get("content")))
            for call in message.get("tool_calls") or ():
                said.append(f"\n→ {printable(str(call))}", style="magenta")
            self._line(name or role, said, meta if number == len(messages) - 1 else "", role)

    def _count(self, number: int) -> str:
        return f"{number:,} tokens" if self._language.has_tokens else ""

    def _line(self, label: str, said: Text, meta: str = "", role: str = "") -> None:
        style = f"bold {_STYLES.get((role or label).partition(' ')[0], '')}"
        grid = Table.grid(expand=True, padding=(0, 2, 0, 0))
        grid.add_column(width=LABEL_WIDTH, no_wrap=True, overflow="ellipsis")
        grid.add_column(ratio=1, overflow="fold")
        grid.add_column(justify="right", style="dim", no_wrap=True)
        grid.add_row(Text(printable(label), style=style), said, meta)
        self._console.print(grid)


def _text(text: str) -> Text:
    left = len(text) - _MOST
    shown = Text(printable(text[:_MOST]))
    if left > 0:
        shown.append(f" … {left:,} more characters", style="dim")
    return shown


def _times(turn: Turn | None) -> str:
    return "" if turn is None or turn.env_s is None else f"{turn.env_s:.3f} s"


def _reward(turn: Turn) -> str:
    return f"reward {turn.reward:+.4g}" if turn.reward else ""


def _how_it_ended(sample: Sample) -> str:
    """Why an episode without a failure ended, in words."""
    return {
        StopReason.MAX_TURNS: "all turns were used (env.max_turns), or the environment cut it",
        StopReason.LENGTH: "no token was left",
        StopReason.DEADLINE: "the time was over (env.episode_timeout_s)",
    }.get(sample.stop_reason, "the environment ended it")


def _end(sample: Sample) -> Iterator[str]:
    if sample.failure is not None:
        yield f"failed: {sample.failure}"
        yield printable(sample.failure_detail)
        return
    if sample.reward is None:
        yield "no reward"
    else:
        parts = ", ".join(f"{name} {value:.4g}" for name, value in sample.reward.parts.items())
        yield f"reward {sample.reward.total:.4g}" + (f"  ({parts})" if parts else "")
    yield _how_it_ended(sample)
