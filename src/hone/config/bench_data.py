"""What `hone bench data` reads: images of a recipe, or numbers of drawn ones."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from hone.config.base import Section
from hone.config.run import GenerateRunConfig
from hone.config.tree import EvaluateDataConfig

__all__ = ["BenchDataConfig", "DrawnConfig"]


class DrawnConfig(Section):
    """Images that are drawn where no data are named, as JPEG."""

    number: int = Field(default=8, ge=1)
    """Different images."""

    height: int = Field(default=1080, ge=1)
    """Pixels."""

    width: int = Field(default=1920, ge=1)
    """Pixels."""


class BenchDataConfig(Section):
    """`hone bench data`: images a second that threads and processes make ready for a tower, alone
    and while a model is trained, and what that costs the training."""

    run: GenerateRunConfig = GenerateRunConfig()
    """Device and seed of the training during which images are made."""
    data: EvaluateDataConfig = EvaluateDataConfig()
    """Rows with images, as in a recipe, and their size in tokens, as of Qwen3-VL. Without sources
    images are drawn."""
    drawn: DrawnConfig = DrawnConfig()
    workers: int | None = Field(default=None, ge=1)
    """Most threads or processes; they are also measured with 1. Unset: one for each core of this
    process, at most 8."""
    seconds: float = Field(default=3.0, gt=0)
    """Time of each of the measurements."""
    output: Path = Path("bench-data.json")
    """JSON file that receives all numbers."""
