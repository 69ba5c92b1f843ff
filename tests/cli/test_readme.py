"""The README: its figures, pictures, recipe, and loop are those of the repository."""

from __future__ import annotations

import re
import shlex
import shutil
import struct
import textwrap
from pathlib import Path

import pytest

from hone.cli.main import main
from hone.config.load import load_config
from hone.config.plan import Devices
from hone.config.plan import resolve as resolve_plan
from hone.config.tree import RLConfig
from hone.families.model_facts import ModelFacts
from hone.hardware import gpu_peaks
from hone.planner.fitting import check_gpu_memory
from hone.user_code.resolve import resolve
from tests.config import workspace as files

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BENCHMARKS = (ROOT / "benchmarks/README.md").read_text()
SPEED = "Beside TRL, verl, OpenRLHF and prime-rl"
STEPS = "## Whole steps on one H200"
ENGINE = "## The engine on H200s"
MODES = "## Modes of a run, and what `hone plan` says of them"


def block(language: str, containing: str) -> str:
    """The block of code with this text."""
    blocks = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    (found,) = (each for each in blocks if containing in each)
    return found


def paragraphs() -> list[str]:
    """Those on speed: the first says what the letters mean, the second is the table."""
    return README.partition(f"\n## {SPEED}\n\n")[2].partition("\n## ")[0].split("\n\n")


def speed_table() -> list[list[str]]:
    """The cells of each row below the heading."""
    return [line.strip("| ").split(" | ") for line in paragraphs()[1].splitlines()[2:]]


def section(heading: str) -> str:
    """The text below a heading of the benchmarks, to the next one of its level."""
    level = heading.partition(" ")[0]
    return BENCHMARKS.partition(f"\n{heading}\n")[2].partition(f"\n{level} ")[0]


def is_measured(figure: str, heading: str) -> bool:
    return re.search(rf"(?<![\d.,]){figure}0?(?!\d)", section(heading)) is not None


def test_seconds_are_those_of_the_benchmarks() -> None:
    seconds = [
        figure
        for cell in (cell for row in speed_table() for cell in row[1:])
        if cell.endswith(" s m") or " s** m" in cell or " s m," in cell
        for figure in re.findall(r"(?<![\d.])\d+\.\d+", cell.partition(", with")[0])
    ]
    assert len(seconds) == 8
    assert [each for each in seconds if not is_measured(each, STEPS)] == []


def test_rates_in_the_text_are_those_of_the_benchmarks() -> None:
    text = paragraphs()[2]
    rates = re.findall(r"\d+,\d{3}(?=\s+tokens/s|;| and vLLM|\. The)", text)
    assert len(rates) == 4
    assert [each for each in rates if not is_measured(each, ENGINE)] == []
    (times,) = re.findall(r"(\d\.\d+) times", text)
    assert is_measured(times, MODES)


def test_every_cell_says_whose_figure_it_is() -> None:
    for label, *cells in speed_table():
        assert len(cells) == 5, label
        for cell in cells:
            assert (
                cell == "not known"
                or re.search(r" m(,|$)| p$|\[p\]\[\w+\]$", cell)
                or (cell.startswith("its own"))
            ), cell


def test_the_loop_is_that_of_the_example() -> None:
    shown = block("python", "weights.push").splitlines()
    example = textwrap.indent("\n".join(shown), "    ")
    assert example in (ROOT / "examples/loop.py").read_text()


def test_the_recipe_loads_and_its_reward_is_the_function_that_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    files.fill(tmp_path)
    Path("mine.yaml").write_text(block("yaml", "# mine.yaml"))
    Path("rewards.py").write_text(block("python", "# rewards.py"))
    config = load_config(RLConfig, Path("mine.yaml"), [])
    assert config.model.path == "Qwen/Qwen3-0.6B"
    is_short = resolve(config.reward.functions[1].fn)
    assert [is_short("x" * length) for length in (399, 400)] == [1.0, 0.0]


def test_the_check_of_a_small_card_says_what_the_text_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine.yaml").write_text(block("yaml", "# mine.yaml"))
    gpu = gpu_peaks("RTX 4090")
    assert gpu is not None
    config = load_config(RLConfig, Path("mine.yaml"), [])
    facts = ModelFacts.known(config.model.path)
    plan = resolve_plan(config, facts, Devices(kind="cuda", gpu=gpu), world_size=1)
    (message,) = (finding.message for finding in check_gpu_memory(plan))
    (needed,) = re.findall(r"predicts (\d+\.\d) GiB, more than the 24 GiB", README)
    assert f"takes {needed} GiB" in message
    assert "24 GiB" in message
    named = re.findall(r"(\b\w+\.\w+) to \w+", message)
    assert f"`{named[0]}` and `{named[1]}`" in README
    assert len(named) == 2


def test_the_line_that_checks_for_a_small_card_refuses_and_advises(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    files.fill(tmp_path)
    shutil.copy("train.jsonl", "test.jsonl")
    Path("mine.yaml").write_text(block("yaml", "# mine.yaml"))
    Path("rewards.py").write_text(block("python", "# rewards.py"))
    line = next(x for x in block("bash", "hone check mine.yaml").splitlines() if "hone check" in x)
    assert main(shlex.split(line, comments=True)[1:]) == 2
    told = " ".join(capsys.readouterr().out.split())
    assert "Planned for 1 x RTX 4090 of 24 GiB." in told
    assert "Set engine.enable_sleep to true and trainer.max_tokens_per_microbatch to 8192." in told
    assert "errors: 1, warnings: 0" in told


def test_pictures_are_there_in_both_colours_of_one_size_and_for_phones() -> None:
    """A browser takes the first source that fits, so those of phones come first."""
    first, second, third, shown = re.findall(r"<(?:source|img) .*?>", README)
    phone, dark = "max-width:600px", "prefers-color-scheme:dark"
    assert [(phone in x, dark in x) for x in (first, second, third, shown)] == [
        (True, True), (True, False), (False, True), (False, False),
    ]  # fmt: skip
    sizes: list[tuple[int, int]] = []
    for source, name in (
        (first, "phone-dark"),
        (second, "phone-light"),
        (third, "dark"),
        (shown, "light"),
    ):
        (file,) = re.findall(r'"(docs/pictures/[\w-]+\.png)"', source)
        assert file == f"docs/pictures/report-{name}.png"
        content = (ROOT / file).read_bytes()
        assert len(content) < 250_000, name
        sizes.append(struct.unpack(">II", content[16:24]))
    assert sizes[0] == sizes[1]
    assert sizes[2] == sizes[3]
    # At twice the points of a phone of 390, so that its letters are those of the report.
    assert (sizes[0][0], sizes[2][0]) == (780, 1400)


def test_it_can_be_read_in_three_minutes() -> None:
    assert len(README.split()) < 1250
