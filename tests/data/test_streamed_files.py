"""Streamed sources over real files: the rows, splits and orders of sources that are read whole."""

from __future__ import annotations

import json
import logging
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from hone.config.tree import PairsDataConfig, SFTDataConfig
from hone.data import loading
from hone.data.chat import Renderer
from hone.data.items import RowsOfItems
from hone.data.order import BlockSizes
from hone.data.pairs import load_pairs
from hone.data.prompts import load_prompts
from hone.data.reading import PromptReader
from hone.data.settings import DataConfig, PairSourceConfig, SourceConfig
from hone.data.sft import load_sft
from hone.data.sources import SourceRow
from hone.data.stream import Stream
from hone.data.streamed import StreamedRows
from hone.errors import UserError
from hone.types import Prompt
from tests.data.support import char_tokenizer, write_rows

TOKENIZER = char_tokenizer()
NUM_ROWS = 600


def rows(num: int = NUM_ROWS) -> list[dict[str, Any]]:
    return [
        {"prompt": f"{i}+1=", "answer": f"{i + 1}", "completion": f"{i + 1}"} for i in range(num)
    ]


def write(folder: Path, kind: str, data: list[dict[str, Any]], num_files: int = 3) -> str:
    """The rows in several files; Parquet in row groups of 50."""
    folder.mkdir()
    size = -(-len(data) // num_files)
    for number in range(num_files):
        part = data[number * size : (number + 1) * size]
        if kind == "parquet":
            table = pa.Table.from_pylist(part)
            pq.write_table(table, folder / f"part-{number}.parquet", row_group_size=50)
        else:
            write_rows(folder / f"part-{number}.jsonl", part)
    return str(folder)


def load(path: str, *, seed: int = 0, **settings: Any):
    cfg = DataConfig(train=(SourceConfig(path=path),), **settings)
    return load_prompts(cfg, TOKENIZER, seed=seed)


def ids(items) -> list[str]:
    return [item.id for item in items]


@pytest.fixture(params=["parquet", "jsonl"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return write(tmp_path / "data", request.param, rows())


def test_a_window_of_all_draws_what_a_source_that_is_read_whole_does(path: str):
    whole, streamed = load(path), load(path, shuffle_window=NUM_ROWS)
    assert isinstance(streamed.train.sources[0], StreamedRows)
    drawn = whole.train.take(1500)
    assert ids(streamed.train.take(1500)) == ids(drawn)
    again = load(path, shuffle_window=NUM_ROWS).train.take(1500)
    for one, other in zip(drawn, again, strict=True):
        assert (one.id, one.token_ids, one.answer, one.text) == (
            other.id,
            other.token_ids,
            other.answer,
            other.text,
        )


def test_three_epochs_are_the_same_however_often_a_run_is_killed(path: str):
    settings = {"shuffle_window": 100, "max_prompt_tokens": 6}
    whole = ids(load(path, **settings).train.take(1300))
    kept = {f"data:{i + 1}" for i in range(NUM_ROWS) if len(f"{i}+1=") + 1 <= 6}
    assert sorted(whole[: len(kept)]) == sorted(kept)
    found: list[str] = []
    state: dict[str, Any] | None = None
    for num in (1, 99, 200, 37, 263, 700):
        stream = load(path, **settings).train
        if state is not None:
            stream.load_state_dict(json.loads(json.dumps(state)))
        found += ids(stream.take(num))
        state = stream.state_dict()
        stream.take(11)  # lost by the kill
    assert found == whole


def test_what_is_dropped_is_counted_and_said_once(path: str, caplog: pytest.LogCaptureFixture):
    data = load(path, shuffle_window=NUM_ROWS, max_prompt_tokens=5, shuffle=False)
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        data.train.take(10)
        data.train.take(1)
    (message,) = [record.getMessage() for record in caplog.records]
    assert "part-0" in message
    assert "(6 tokens)" in message
    found = {name: metric.value for name, metric in data.metrics().items()}
    assert found == {"data/rows_read": NUM_ROWS + 1, "data/skipped_too_long": NUM_ROWS - 10}


def test_held_out_rows_are_the_first_ones_and_never_train(path: str):
    settings = {"eval_fraction": 0.3}
    whole = load(path, **settings)
    streamed = load(path, shuffle_window=80, max_eval_rows=20, **settings)
    assert ids(streamed.eval) == ids(whole.eval)[:20]
    drawn = ids(streamed.train.take(len(whole.train)))
    assert sorted(drawn) == sorted(ids(whole.train.first_rows()))
    cfg = DataConfig(train=(SourceConfig(path=path),), **settings)
    generated = PromptReader(cfg, TOKENIZER, seed=0, max_prompt_tokens=100).read()
    assert sorted(ids(prompt for _, prompt in generated)) == sorted(drawn)


def test_demonstrations_and_preferences_are_streamed_too(path: str, tmp_path: Path):
    cfg = {"eval_fraction": 0.2, "max_tokens": 40}
    demonstrations = [
        load_sft(
            SFTDataConfig(train=(SourceConfig(path=path),), shuffle_window=window, **cfg),
            TOKENIZER,
            seed=1,
        )
        for window in (None, NUM_ROWS)
    ]
    drawn = [data.train.take(700) for data in demonstrations]
    assert [(x.id, x.token_ids, x.loss_mask) for x in drawn[0]] == [
        (x.id, x.token_ids, x.loss_mask) for x in drawn[1]
    ]
    pairs = [{"prompt": "a", "chosen": f"a{i}", "rejected": f"a-{i}"} for i in range(99)]
    source = PairSourceConfig(path=write_rows(tmp_path / "pairs.jsonl", pairs))
    preferences = [
        load_pairs(PairsDataConfig(train=(source,), shuffle_window=w), TOKENIZER, seed=1)
        for w in (None, 99)
    ]
    drawn = [data.train.take(150) for data in preferences]
    assert drawn[0] == drawn[1]


@pytest.mark.parametrize("kind", ["lines", "parquet"])
def test_pairs_are_streamed_as_single_completions(kind: str, tmp_path: Path):
    """Two items a row, each where it comes in a source that is read whole. Some are too long."""
    draw = random.Random(kind)
    pairs = [
        {"prompt": f"{i % 70}=", "chosen": f"{i}", "rejected": "-" * draw.randrange(1, 9)}
        for i in range(333)
    ]
    source = PairSourceConfig(path=write(tmp_path / "pairs", kind, pairs))

    def load(window: int | None, **settings: Any):
        cfg = PairsDataConfig(train=(source,), shuffle_window=window, max_tokens=9, **settings)
        return load_pairs(cfg, TOKENIZER, seed=1, is_unpaired=True)

    whole, streamed = load(None), load(666)
    num_kept = len(whole.train)
    assert 333 < num_kept < 666
    assert whole.train.take(2 * num_kept) == streamed.train.take(2 * num_kept)
    # Ten prompts are repeated with their completions: of each pair, both completions once.
    repeated = write(tmp_path / "repeated", kind, pairs[:100] + pairs[:10])
    settings: dict[str, Any] = {"train": (PairSourceConfig(path=repeated),), "duplicates": "drop"}
    both = [
        load_pairs(
            PairsDataConfig(shuffle_window=window, max_tokens=9, **settings),
            TOKENIZER,
            seed=1,
            is_unpaired=True,
        ).train
        for window in (None, 50, 220)
    ]
    num_once = len(both[0])
    once = [sorted((x.token_ids, x.labels) for x in stream.take(num_once)) for stream in both]
    assert once[0] == once[1] == once[2]
    assert num_once == sum(int(x.id.split(":")[1]) <= 100 for x in whole.train.first_rows())
    drawn, state = list[Any](), None
    for num in (1, 63, 100):
        stream = load(100).train
        if state is not None:
            stream.load_state_dict(json.loads(json.dumps(state)))
        drawn += stream.take(num)
        state = stream.state_dict()
    assert drawn == load(100).train.take(164)
    names = [x.id for x in load(100).train.take(num_kept)]
    assert sorted(names) == sorted(x.id for x in whole.train.first_rows())
    assert {name.rpartition(":")[2] for name in names} == {"chosen", "rejected"}
    split = load(100, eval_fraction=0.2, max_eval_rows=31)
    held_out = {x.id.rpartition(":")[0] for x in load(None, eval_fraction=0.2).eval}
    assert ids(split.eval) == ids(load(None, eval_fraction=0.2).eval)[:31]
    num_train = len(load(None, eval_fraction=0.2).train)
    assert not held_out & {x.id.rpartition(":")[0] for x in split.train.take(num_train)}


def test_a_pair_is_read_once_for_both_of_its_items():
    asked = list[Any]()

    class Rows:
        fingerprint = "of the rows"
        sizes = BlockSizes(
            first_rows=np.array([0, 3]), num_rows=np.array([3, 2]), num_bytes=np.array([9, 5])
        )

        def rows(self, block: int, numbers: Sequence[int], /) -> list[SourceRow]:
            asked.append((block, list(numbers)))
            return [SourceRow({"n": number}, "") for number in numbers]

    items = RowsOfItems(Rows(), 2)
    assert (items.sizes.total_rows, items.sizes.total_bytes) == (10, 14)
    assert items.sizes.first_rows.tolist() == [0, 6]
    assert [row.columns["n"] for row in items.rows(1, [3, 0, 2, 1])] == [1, 0, 1, 0]
    assert asked == [(1, [1, 0])]


def test_large_sources_are_streamed_by_themselves(path: str, monkeypatch: pytest.MonkeyPatch):
    assert not isinstance(load(path).train.sources[0], StreamedRows)
    monkeypatch.setattr(loading, "WHOLE_BYTES", 1000)
    assert isinstance(load(path).train.sources[0], StreamedRows)


def test_only_what_is_drawn_is_rendered(path: str, monkeypatch: pytest.MonkeyPatch):
    rendered: list[int] = []

    class Counts(Renderer):
        def prompts(self, examples, **rest):
            rendered.append(len(examples))
            return super().prompts(examples, **rest)

    monkeypatch.setattr("hone.data.prompts.Renderer", Counts)
    monkeypatch.setattr("hone.data.streamed._MAX_AHEAD_ROWS", 300)
    data = load(path, shuffle_window=100)
    data.train.take(10)
    data.train.take(10)
    assert sum(rendered) <= 64 + 3 * 256


def test_a_row_that_is_wrong_is_named_when_it_is_read(tmp_path: Path):
    data = rows(400)
    data[350]["prompt"] = None
    path = write(tmp_path / "data", "jsonl", data, 1)
    stream = load(path, shuffle_window=400, shuffle=False).train
    assert len(stream.take(200)) == 200
    with pytest.raises(UserError, match=r"part-0\.jsonl, line 351"):
        stream.take(200)


def test_rows_are_checked_as_they_are_read(path: str):
    data = load(path, shuffle_window=NUM_ROWS)
    seen: set[str] = set()
    data.check(lambda rows: seen.update(ids(rows)))
    drawn = ids(data.train.take(500))
    assert set(drawn) <= seen


def test_mixed_with_a_source_that_is_read_whole(path: str, tmp_path: Path, monkeypatch):
    small = write_rows(tmp_path / "small.jsonl", [{"prompt": "p", "answer": "x"}] * 9)
    sources = (SourceConfig(path=path, weight=3), SourceConfig(path=small))
    monkeypatch.setattr(loading, "WHOLE_BYTES", 5000)
    data = load_prompts(DataConfig(train=sources), TOKENIZER, seed=0)
    kinds = [isinstance(source, StreamedRows) for source in data.train.sources]
    assert kinds == [True, False]
    for _ in range(20):
        drawn = ids(data.train.take(4))
        assert sum(name.startswith("small") for name in drawn) == 1


def test_a_file_that_has_changed_is_other_data(tmp_path: Path):
    path = write(tmp_path / "data", "jsonl", rows(100), 2)
    saved = load(path, shuffle_window=100).train.state_dict()
    load(path, shuffle_window=100).train.load_state_dict(saved)
    write_rows(tmp_path / "data" / "part-1.jsonl", [{**row, "answer": "1"} for row in rows(50)])
    with pytest.raises(UserError, match="belongs to other data: fingerprint"):
        load(path, shuffle_window=100).train.load_state_dict(saved)


@pytest.mark.slow
@pytest.mark.parametrize("window", [300, 2500, 10_000])
def test_R18_three_epochs_killed_at_200_places(tmp_path: Path, window: int):
    """With one, two and five resumes: each goes on at the saved row, whatever was read ahead."""
    path = write(tmp_path / "data", "parquet", rows(10_000), 8)
    settings = {"shuffle_window": window, "max_prompt_tokens": 7, "eval_fraction": 0.05}

    def start(state: dict[str, Any]) -> Stream[Prompt]:
        stream = load(path, max_eval_rows=1, **settings).train
        stream.load_state_dict(state)
        return stream

    stream = load(path, max_eval_rows=1, **settings).train
    first = stream.state_dict()
    places = sorted(random.Random(window).sample(range(1, 28_000), 200))
    whole, states = list[str](), dict[int, str]()
    for place in places:
        whole += ids(stream.take(place - len(whole)))
        states[place] = json.dumps(stream.state_dict())
    whole += ids(stream.take(400))
    served = whole[: len(set(whole))]
    assert len(served) == len(set(served)), "a row was drawn twice within an epoch"
    assert first["num_rows"] == [10_000]
    for number, place in enumerate(places):
        state, found = json.loads(states[place]), list[str]()
        for _ in range((1, 2, 5)[number % 3]):
            again = start(state)
            found += ids(again.take(7))
            state = json.loads(json.dumps(again.state_dict()))
            again.take(3)  # lost by the kill
        assert found == whole[place : place + len(found)]
