"""One aligned line a step, with or without a terminal."""

import errno
import io
import os

import pytest
from rich.console import Console as RichConsole

from hone.observe.console import HEADER_EVERY, Console, Output
from tests.tables import table


def lines_of(
    rows: list[dict[str, float]],
    *,
    terminal: bool = False,
    runs_ahead: bool = False,
    has_reference: bool = False,
    has_limit: bool = True,
) -> list[str]:
    output = io.StringIO()
    rich = RichConsole(file=output, width=100, force_terminal=terminal, color_system=None)
    with Console(
        len(rows),
        runs_ahead=runs_ahead,
        has_reference=has_reference,
        has_limit=has_limit,
        output=rich,
    ) as console:
        for step, scalars in enumerate(rows, start=1):
            console.progress(3, 8)
            console.step(step, scalars)
    return output.getvalue().splitlines()


ROW = {
    "reward/mean": 0.125,
    "rollout/completion_tokens/mean": 212.3,
    "policy/entropy": 1.84,
    "off_policy/kl": 3.1e-4,
    "perf/tokens_per_s": 9512.4,
    "time/step_s": 12.44,
    "perf/R_step": 0.412,
}


def test_one_aligned_line_a_step() -> None:
    rows = [ROW, {**ROW, "policy/entropy": float("nan"), "reward/mean": -3.0}, {"reward/mean": 1.0}]
    header, *lines = lines_of(rows)
    assert header.split() == (
        ["step", "reward", "length", "entropy", "KL_rollout", "tok/s", "time", "R_step"]
    )
    assert len(lines) == 3
    assert {len(line) for line in (header, *lines)} == {len(header)}
    assert lines[0].split() == ["1", "0.125", "212.3", "1.840", "3.1e-04", "9,512", "12.4s", "0.41"]
    assert lines[1].split()[1:4] == ["-3.000", "212.3", "nan"]
    assert lines[2].split()[2:] == ["·"] * 6


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize(
    ("has_reference", "title", "value"),
    [(False, "KL_rollout", "3.1e-04"), (True, "KL_ref", "0.070")],
)
def test_the_divergence_is_named_by_what_it_is_from(
    runs_ahead: bool, has_reference: bool, title: str, value: str
) -> None:
    """And is never that of one update, which is 0 wherever a rollout has a single one."""
    row = ROW | {"policy/approx_kl": 0.0}
    row |= {"policy/ref_kl": 0.07} if has_reference else {}
    header, line = lines_of([row], runs_ahead=runs_ahead, has_reference=has_reference)
    assert len(header) == len(line)
    shown = dict(zip(header.split(), line.split(), strict=True))
    assert {name: shown[name] for name in shown if "KL" in name} == {title: value}


def test_without_a_hardware_limit_there_is_no_column_for_it() -> None:
    header, line = lines_of([ROW], has_limit=False)
    assert len(header) == len(line)
    assert header.split()[-2:] == ["tok/s", "time"]


def test_supervised_runs_show_their_loss() -> None:
    header, line = lines_of([{"train/loss": 2.5, "train/grad_norm": 0.7, "eval/loss": 2.25}])
    assert header.split()[1:] == ["loss", "grad", "lr", "tok/s", "time"]
    assert line.split()[1:4] == ["2.500", "0.700", "·"]
    assert line.endswith("eval loss 2.250")


def test_fast_steps_share_a_line() -> None:
    fast = ROW | {"time/step_s": 0.8}
    rows = [fast, fast, fast | {"eval/reward/mean": 0.5}, *[fast] * 4, ROW, fast]
    steps = [int(line.split()[0]) for line in lines_of(rows)[1:]]
    assert steps == [1, 3, 6, 8, 9], "the first, evaluated, due, slow, and the last"


def test_the_header_returns() -> None:
    lines = lines_of([ROW] * (HEADER_EVERY + 1))
    assert sum("reward" in line for line in lines) == 2


def test_plain_output_has_no_control_characters() -> None:
    assert all(ord(character) >= 32 for line in lines_of([ROW] * 3) for character in line)


def test_a_terminal_gets_a_bar_besides_the_lines() -> None:
    text = "\n".join(lines_of([ROW] * 3, terminal=True))
    assert text.count("212.3") == 3
    assert "3/3" in text


def test_an_evaluation_shows_the_rate_of_passing_beside_its_threshold() -> None:
    scores = {"eval/reward/mean": 0.973, "eval/pass@1": 0.59, "eval/pass_threshold": 1.0}
    *_, line = lines_of([ROW | scores])
    assert line.endswith("eval 0.973   pass@1 0.590 (score >= 1)")


def test_without_a_terminal_waiting_is_a_line_now_and_then() -> None:
    output = io.StringIO()
    console = Console(3, output=RichConsole(file=output, width=100))
    with console:
        for done in range(5):
            console.waiting(f"scoring {done} of 300, 18 timed out")
    assert output.getvalue().split("\n") == ["      scoring 0 of 300, 18 timed out", ""]


class Lost(io.StringIO):
    """A pipe whose reader is gone, or a file on a full disk."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number

    def write(self, text: str, /) -> int:
        raise OSError(self.number, os.strerror(self.number))


@table("number", [errno.EPIPE, errno.ENOSPC])
def test_output_that_is_lost_ends_no_run_and_is_told_once(number: int) -> None:
    told: list[str] = []
    with Console(9, output=Output(file=Lost(number), width=100), on_lost=told.append) as console:
        for step in (1, 2, 9):
            console.step(step, {"reward/mean": 0.5})
        console.warn("alarm")
    (line,) = told
    assert os.strerror(number) in line
    assert line.endswith("the run goes on without it")
