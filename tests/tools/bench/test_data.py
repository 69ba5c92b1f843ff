"""`hone bench data` from the command line to its files, on a CPU."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from hone.images.opening import open_image
from hone.tools.bench import data
from hone.tools.bench.data import _Supply
from tests.images.drawn import drawn, encoded
from tests.tools.bench.test_command import output

SHORT = ("bench", "data", "--run.device=cpu", "--seconds=0.1", "--workers=2")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.delenv("HONE_TRACEBACK", raising=False)
    return tmp_path


def test_drawn_images_end_to_end(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = ("--drawn.number=3", "--drawn.height=60", "--drawn.width=100")
    text = output(capsys, *SHORT, *size, "--output=out/d.json")
    assert "3 images of 0.006 megapixels" in text
    assert "training on cpu" in text
    for label in ("nobody", "the calling thread", "1 thread", "2 threads", "1 process"):
        assert re.search(rf"^ *{label} ", text, re.MULTILINE), label
    found = json.loads((folder / "out/d.json").read_text())
    assert found["images"]["pixels"] == 3 * 60 * 100
    assert found["calling_thread"]["images_per_s"] > 0
    assert [(rate["kind"], rate["number"]) for rate in found["workers"]] == [
        ("thread", 1),
        ("thread", 2),
        ("process", 1),
        ("process", 2),
    ]
    for rate in found["workers"]:
        assert rate["alone"] > 0
        assert rate["steps"] > 0
    steps = found["training"]["steps_per_s"]
    share = found["workers"][3]["steps"] / steps
    (line,) = (line for line in text.splitlines() if "2 processes" in line)
    assert line.rstrip().endswith(f" {100 * share:.0f} %")


def test_images_of_a_recipe(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "a.png").write_bytes(encoded(drawn(0)))
    rows = [{"images": ["a.png", "a.png"]}, {"images": []}, {"image": "a.png"}]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "mine.yaml").write_text("data: {train: [{path: rows.jsonl}]}\nmodel: {path: x}\n")
    text = output(capsys, *SHORT[:2], "mine.yaml", *SHORT[2:], "--workers=1")
    assert "3 images of 0.0048 megapixels" in text
    (folder / "rows.jsonl").write_text('{"image": "no.png"}\n')
    text = output(capsys, *SHORT[:2], "mine.yaml", *SHORT[2:], code=2)
    assert "rows.jsonl, line 1: an image does not exist" in text
    (folder / "rows.jsonl").write_text('{"prompt": "no image"}\n')
    text = output(capsys, *SHORT[:2], "mine.yaml", *SHORT[2:], code=2)
    assert "no row of the data has an image in a column 'images' or 'image'," in text


def test_an_image_that_breaks_ends_the_measurement(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = encoded(drawn(0))
    (folder / "a.png").write_bytes(whole[: len(whole) // 2])
    (folder / "rows.jsonl").write_text('{"image": "a.png"}\n')
    text = output(capsys, *SHORT, "--data.train=[{path: rows.jsonl}]", code=2)
    assert "an image cannot be decoded" in text


def test_help(capsys: pytest.CaptureFixture[str]) -> None:
    text = output(capsys, "bench", "data", "--help")
    assert "--drawn.height" in text
    assert "--data.max_image_tokens" in text


def test_rates_are_images_and_calls_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock of whole seconds, of which each call takes one; an image is ready in each call."""
    now = [0.0]
    monkeypatch.setattr(data.time, "perf_counter", lambda: now[0])
    waiting: list[data.Future[list[data.TilePixels]]] = []

    def submit(file: object) -> data.Future[list[data.TilePixels]]:
        waiting.append(data.Future())
        return waiting[-1]

    supply = _Supply(submit, [open_image(encoded(drawn(0)), folder=None)])

    def call() -> None:
        now[0] += 2.0
        if waiting:
            waiting.pop(0).set_result([])

    supply._next()
    supply._next()
    assert supply.measure(call, 10.0) == (0.5, 0.5)
    assert len(waiting) == 2  # there are always as many in work
