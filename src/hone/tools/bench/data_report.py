"""Table and JSON file of `hone bench data`."""

from __future__ import annotations

import json
import platform
from dataclasses import asdict
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from hone.observe.whole_file import whole_file
from hone.tools.bench.data import DataResult
from hone.version import __version__

__all__ = ["as_json", "print_table", "write_file"]

_PLURALS = {"thread": "threads", "process": "processes"}


def write_file(result: DataResult) -> None:
    """Write `cfg.output`."""
    with whole_file(result.cfg.output, "output") as file:
        json.dump(as_json(result), file, indent=1)
        file.write("\n")


def as_json(result: DataResult) -> dict[str, Any]:
    """All numbers: images and training steps a second, bytes, pixels."""
    return {
        "images": {
            "number": result.num_images,
            "bytes": result.num_bytes,
            "pixels": result.num_pixels,
        },
        "training": {"device": result.device, "steps_per_s": result.steps_alone},
        "num_cores": result.num_cores,
        "calling_thread": {"images_per_s": result.caller},
        "workers": [asdict(rate) for rate in result.rates],
        "versions": {
            "hone": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
        "config": result.cfg.model_dump(mode="json"),
    }


def print_table(result: DataResult, console: Console) -> None:
    """Print images and training steps a second, by what makes the images."""
    megapixels = result.num_pixels / result.num_images / 1e6
    kilobytes = result.num_bytes / result.num_images / 1e3
    console.print(
        f"{result.num_images} images of {megapixels:,.3g} megapixels and {kilobytes:,.3g} kB; "
        f"{result.num_cores} cores; training on {result.device}",
        style="bold",
        markup=False,
    )
    table = Table(box=None)
    table.add_column("made by", no_wrap=True)
    for heading in ("images/s alone", "and training", "steps/s", "of alone"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_row("nobody", "", "", f"{result.steps_alone:,.3g}", "100 %")
    table.add_row("the calling thread", f"{result.caller:,.3g}", "", "", "")
    for rate in result.rates:
        table.add_row(
            f"{rate.number} {rate.kind if rate.number == 1 else _PLURALS[rate.kind]}",
            f"{rate.alone:,.3g}",
            f"{rate.beside:,.3g}",
            f"{rate.steps:,.3g}",
            f"{100 * rate.steps / result.steps_alone:.0f} %",
        )
    console.print(table)
