"""The README: its figures, pictures, recipe, and loop are those of the repository."""

from __future__ import annotations

import re
import struct
import textwrap
from pathlib import Path

import pytest

from hone.config.load import load_config
from hone.config.tree import RLConfig
from hone.user_code.resolve import resolve
from tests.config import workspace as files

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BENCHMARKS = (ROOT / "benchmarks/README.md").read_text()
MATRIX_RATE_TFLOPS, DATA_SHEET_TFLOPS = 780, 989
"""Of an H200: what its matrix products reached as training was measured, and what is published."""
SECTIONS = {
    "GRPO step, 0.6B": "## Whole steps on one H200",
    "GRPO step, 1.7B": "## Whole steps on one H200",
    "DPO step, 1.7B": "## Whole steps on one H200",
    "Sampling, 0.6B": "## The engine on H200s",
    "Training, 0.6B": "### Logits that stay, gradients that are not copied",
    "GRPO step of a tiny model on a CPU": "## One CPU, beside TRL",
}
"""Where the figures of a row were measured, by how its label begins."""


def block(language: str, containing: str) -> str:
    """The block of code with this text."""
    blocks = re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)
    (found,) = (each for each in blocks if containing in each)
    return found


def speed_table() -> list[list[str]]:
    """The cells of each row below the heading."""
    section = README.partition("\n## Speed\n")[2].partition("\n## ")[0]
    rows = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("|")]
    return rows[2:]


def section(heading: str) -> str:
    """The text below a heading of the benchmarks, to the next one of its level."""
    level = heading.partition(" ")[0]
    return BENCHMARKS.partition(f"\n{heading}\n")[2].partition(f"\n{level} ")[0]


def test_figures_that_are_measured_by_us_are_in_the_benchmarks() -> None:
    for label, *cells in speed_table():
        (heading,) = (place for start, place in SECTIONS.items() if label.startswith(start))
        text = section(heading)
        figures = re.findall(r"([\d.,]+)(?: s)?(?:\*\*)? m\b", " ".join(cells))
        assert figures, label
        if label.startswith("Training"):
            (share,) = re.findall(r"\| \*\*155\.1 ms\*\* \| (0\.\d+) ", text)
            found = float(share) * MATRIX_RATE_TFLOPS / DATA_SHEET_TFLOPS
            assert float(figures[0]) == pytest.approx(found, abs=0.005)
            continue
        for figure in figures:
            assert re.search(rf"(?<![\d.,]){figure}0?(?![\d])", text), (label, figure)


def test_every_cell_says_whose_figure_it_is() -> None:
    for label, *cells in speed_table():
        assert len(cells) == 5, label
        for cell in cells:
            assert cell == "-" or re.search(r"\d\S*( s)?(\*\*)? m\b", cell) or "[p][" in cell, cell


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
    assert [is_short("x" * length, "7") for length in (399, 400)] == [1.0, 0.0]


def test_pictures_are_there_in_both_colours_and_of_one_size() -> None:
    sizes = []
    for name in re.findall(r"docs/pictures/[\w-]+\.png", README):
        content = (ROOT / name).read_bytes()
        assert len(content) < 250_000, name
        sizes.append(struct.unpack(">II", content[16:24]))
    assert len(sizes) == 2
    assert sizes[0] == sizes[1]


def test_it_can_be_read_in_three_minutes() -> None:
    assert len(README.split()) < 1100
