"""Images of samples: how rows name them, and their small pictures in the run folder."""

from __future__ import annotations

import io
import logging
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from hone.config.run import LogConfig
from hone.data.prompts import load_prompts
from hone.data.settings import DataConfig, SourceConfig
from hone.images import thumbnails as thumbnails_module
from hone.images.opening import ImageFile, load_rgb
from hone.images.pixels import TilePixels, TileSource, layout_of
from hone.images.store import STORE
from hone.images.thumbnails import EDGE, Thumbnails
from hone.model_input import Content, ModelInput
from hone.observe.loggers import RunLog
from hone.observe.run_folder import read_picture
from hone.types import Group, Sample, StopReason, Turn
from tests.data.support import write_rows
from tests.images.drawn import drawn
from tests.images.family import FAMILIES, Family
from tests.images.image_samples import (
    MARK,
    SETTINGS,
    drawing,
    photograph,
    sample_of,
    saved,
    tiles_at,
)
from tests.observe.fake_run import make_group


def named(folder: Path, *samples: Sample, max_pictures: int = 512) -> list[dict[str, Any]]:
    with Thumbnails(folder, max_pictures=max_pictures) as thumbnails:
        return [row for sample in samples for row in thumbnails.rows(sample)]


def files(folder: Path) -> dict[str, Path]:
    return {file.stem: file for file in (folder / "images").iterdir()}


def picture(folder: Path, name: str) -> Image.Image:
    found = read_picture(folder, name)
    assert found is not None
    return Image.open(io.BytesIO(found.data))


def one(file: ImageFile) -> Sample:
    return sample_of(f"{MARK}?", tiles_at(3, file, [(4, 6)]))


def test_a_row_names_each_image_with_its_tokens_and_its_mark(tmp_path: Path) -> None:
    plain = tiles_at(5, drawing(tmp_path, 1), [(4, 6)])
    tiled = tiles_at(40, drawing(tmp_path, 2), [(8, 8), (8, 8)])
    again = tiles_at(180, drawing(tmp_path, 1), [(4, 6)])
    text = f"First {MARK}, then {MARK} or {MARK}?"
    rows = named(tmp_path, sample_of(text, [*plain, *tiled, *again], num_asked=210))
    places = [6, 6 + len(MARK) + 7, 6 + 2 * len(MARK) + 11]
    assert [text[p : p + len(MARK)] for p in places] == [MARK] * 3, "of the test itself"
    chars = [(place, place + len(MARK)) for place in places]
    shape = {"num_tokens": 24, "rows": 4, "columns": 6}
    assert rows == [
        {"hash": plain[0].hash, "start": 5, "end": 29, **shape, "chars": chars[0]},
        {
            "hash": tiled[0].hash,
            "start": 40,
            "end": 169,
            "num_tokens": 128,
            "rows": 8,
            "columns": 8,
            "tiles": 2,
            "chars": chars[1],
        },
        {"hash": plain[0].hash, "start": 180, "end": 204, **shape, "chars": chars[2]},
    ]
    assert set(files(tmp_path)) == {plain[0].hash, tiled[0].hash}, "one picture for all tiles"


@pytest.mark.parametrize("name", FAMILIES)
def test_a_prompt_of_each_family_has_a_mark_for_each_image(name: str, tmp_path: Path) -> None:
    """Read as a run reads them. SmolVLM makes several tiles of an image."""
    drawing(tmp_path, 1, (90, 70))
    photograph(tmp_path, 2, (300, 200))
    family = Family(name, tmp_path / "model")
    row = {"prompt": "Is <image> like <image>?", "answer": "no"}
    images = ["drawing1.png", "photograph2.png"]
    path = write_rows(tmp_path / "train.jsonl", [row | {"images": images}])
    cfg = DataConfig(train=(SourceConfig(path=str(path)),))
    reader = family.reader()
    (prompt,) = load_prompts(cfg, family.tokenizer, images=reader).known_rows()
    sample = sample_of("", ())
    sample.prompt = prompt
    rows = named(tmp_path, sample)
    assert [prompt.text[slice(*row["chars"])] for row in rows] == 2 * [reader.settings.mark]
    for row in rows:
        ids = prompt.token_ids[row["start"] : row["end"]]
        assert ids.count(reader.settings.placeholder_id) == row["num_tokens"]
        assert ids[0] == ids[-1] == reader.settings.placeholder_id
    assert prompt.token_ids.count(reader.settings.placeholder_id) == sum(
        row["num_tokens"] for row in rows
    )
    sizes = {file.stem: Image.open(file).size for file in files(tmp_path).values()}
    assert [sizes[row["hash"]] for row in rows] == [(90, 70), (256, 171)]


def test_an_image_behind_a_turn_is_of_that_turn(tmp_path: Path) -> None:
    """The turns have two and one of the sample's five tokens."""
    sample = one(drawing(tmp_path, 1))
    (shown,) = tiles_at(202, drawing(tmp_path, 2), [(1, 2)])
    contents = (*sample.prompt.model_input.contents, shown)
    sample.prompt = type(sample.prompt)(
        id="p",
        token_ids=sample.prompt.token_ids,
        text=sample.prompt.text,
        model_input=ModelInput(contents),
    )
    sample.turns = [
        Turn(start=start, end=end, text="", stop_reason=StopReason.EOS)
        for start, end in ((0, 2), (4, 5))
    ]
    first, second = named(tmp_path, sample)
    assert "turn" not in first
    assert second["turn"] == 0
    assert (second["start"], second["end"]) == (202, 204)
    assert "chars" not in second


def test_the_picture_is_the_image_made_small(tmp_path: Path) -> None:
    for file in (drawing(tmp_path, 1), photograph(tmp_path, 2)):
        (row,) = named(tmp_path, one(file))
        small, large = picture(tmp_path, row["hash"]), load_rgb(file)
        assert max(small.size) == EDGE
        assert small.width * large.height == small.height * large.width
        coarse = [np.asarray(image.resize((8, 8)), np.float64) for image in (small, large)]
        assert np.abs(coarse[0] - coarse[1]).mean() < 6
        assert len(files(tmp_path)[row["hash"]].read_bytes()) < 30_000
    assert {file.suffix for file in files(tmp_path).values()} == {".png", ".jpg"}, "the smaller"


def test_the_picture_of_several_tiles_shows_all_of_the_image(tmp_path: Path) -> None:
    """In its proportions, though the tile that shows all of it is a square."""
    file = saved(tmp_path, drawn(3, 200, 300), "smooth.png")  # whose corners differ
    settings = replace(SETTINGS, family="smolvlm", edge=160, longest_edge=320, words=("<a>", "<b>"))
    assert len(layout_of(file, settings).tiles) > 2
    small = thumbnails_module._picture("", TileSource(file, settings, 0))
    assert small.size == (256, 171)
    expected = load_rgb(file).resize((12, 8))
    found = np.asarray(small.resize((12, 8)), np.float64)
    assert np.abs(found - np.asarray(expected, np.float64)).mean() < 6


def test_a_small_image_stays_as_it_is(tmp_path: Path) -> None:
    file = saved(tmp_path, Image.new("RGB", (30, 20), (200, 30, 40)), "small.png")
    (row,) = named(tmp_path, one(file))
    assert picture(tmp_path, row["hash"]).size == (30, 20)


def test_a_picture_is_made_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Samples of a group name it again, and so does a run that is resumed."""
    made: list[str] = []
    pixels = STORE.pixels

    def counted(hashes: Sequence[str]) -> list[TilePixels]:
        made.extend(hashes)
        return pixels(hashes)

    monkeypatch.setattr(STORE, "pixels", counted)
    samples = [one(drawing(tmp_path, 1)) for _ in range(8)]
    for _ in range(2):
        assert len(named(tmp_path, *samples)) == 8
    assert len(made) == len(files(tmp_path)) == 1


@pytest.mark.skipif(sys.platform != "linux", reason="other systems do not say their peak")
def test_an_image_of_a_stranger_takes_no_memory_of_the_trainer(tmp_path: Path) -> None:
    """A file of 5 KB becomes 103 MiB, in a process of the pool."""
    bomb = saved(tmp_path, Image.new("1", (6000, 6000)), "bomb.png")
    STORE.use_workers(1)
    try:
        named(tmp_path, one(drawing(tmp_path, 1)))  # what starts with the first picture is there
        Path("/proc/self/clear_refs").write_text("5")  # begins the peak anew
        start, _ = memory_mib()
        (row,) = named(tmp_path, one(bomb))
        _, peak = memory_mib()
    finally:
        STORE.use_workers(0)
    assert picture(tmp_path, row["hash"]).size == (256, 256)
    assert peak - start < 32


def memory_mib() -> tuple[float, float]:
    """Resident memory of this process, and its peak."""
    lines = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    now, peak = (int(lines[name].split()[0]) / 1024 for name in ("VmRSS", "VmHWM"))
    return now, peak


def test_the_pictures_named_last_stay(tmp_path: Path) -> None:
    images = [one(drawing(tmp_path, seed)) for seed in range(6)]
    hashes = [sample.prompt.model_input.contents[0].hash for sample in images]
    named(tmp_path, images[0], max_pictures=3)
    named(tmp_path, *images[1:4], images[1], *images[4:], max_pictures=3)
    assert set(files(tmp_path)) == {hashes[1], hashes[4], hashes[5]}


def test_an_image_that_cannot_be_read_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    gone, whole = drawing(tmp_path, 31), drawing(tmp_path, 2)  # the first has no pixels yet
    assert isinstance(gone.source, Path)
    gone.source.unlink()
    with caplog.at_level(logging.WARNING):
        rows = named(tmp_path, one(gone), one(gone), one(whole))
    assert set(files(tmp_path)) == {rows[2]["hash"]}
    assert rows[0]["hash"] == one(gone).prompt.model_input.contents[0].hash, "it is named"
    (message,) = [record.getMessage() for record in caplog.records]
    assert f"row {gone.source} has no picture" in message
    assert "does not exist" in message


def test_a_folder_that_takes_no_files_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "images").write_text("a file where the folder should be")
    with caplog.at_level(logging.WARNING):
        assert len(named(tmp_path, one(drawing(tmp_path, 1)))) == 1
    assert "FileExistsError" in caplog.text


def test_a_mistake_beside_the_training_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: object) -> None:
        raise ZeroDivisionError(arguments)

    monkeypatch.setattr(thumbnails_module, "_picture", fail)
    with caplog.at_level(logging.WARNING):
        assert len(named(tmp_path, one(drawing(tmp_path, 1)))) == 1
    assert "ZeroDivisionError" in caplog.text


def test_of_pixels_from_another_process_the_tile_is_shown(tmp_path: Path) -> None:
    values = np.random.default_rng(3).integers(0, 256, (32, 64, 3), dtype=np.uint8)
    content = Content(kind="image", hash="ab" * 16, start=3, num_tokens=2, shape=(1, 1, 2))
    sample = sample_of("no mark", [content])
    STORE.receive({content.hash: TilePixels(values, SETTINGS)}, [sample.prompt.model_input])
    (row,) = named(tmp_path, sample)
    assert "chars" not in row
    assert picture(tmp_path, content.hash).size == (64, 32)


def test_a_run_without_images_is_as_before(tmp_path: Path) -> None:
    written: list[bytes] = []
    for name in ("plain", "with"):
        folder, rng = tmp_path / name, np.random.default_rng(0)
        with Thumbnails(folder) as thumbnails:
            images = thumbnails.rows if name == "with" else lambda sample: ()
            with RunLog(folder, LogConfig(to=()), images=images) as log:
                log.samples(1, [make_group(1, index, rng) for index in range(2)])
        assert not (folder / "images").exists()
        written.append((folder / "samples.jsonl").read_bytes())
    assert written[0] == written[1]
    assert b'"images"' not in written[0]


def test_rows_of_a_log_name_images_before_their_tokens(tmp_path: Path) -> None:
    """So that readers of the rest need not parse these."""
    sample = one(drawing(tmp_path, 1))
    group = Group(id="g", prompt=sample.prompt, samples=[sample])
    with (
        Thumbnails(tmp_path) as thumbnails,
        RunLog(tmp_path, LogConfig(to=()), images=thumbnails.rows) as log,
    ):
        log.samples(1, [group])
    line = (tmp_path / "samples.jsonl").read_text()
    assert line.index('"images": [{"hash": ') < line.index('"prompt_token_ids"')
    assert len(line) < 3000
