"""Preferences in the shapes that users have, and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hone.config.data import SourceConfig
from hone.config.errors import UserError
from hone.config.tree import PairsDataConfig
from hone.data.pairs import load_pairs, read_pairs
from hone.data.sources import read_source
from hone.models.tiny import make_char_tokenizer

ASK = [{"role": "user", "content": "2+2="}]


def says(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def written(folder: Path, rows: list[dict[str, Any]]) -> SourceConfig:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return SourceConfig(path=str(path))


def read(folder: Path, *rows: dict[str, Any], is_unpaired: bool = False) -> list[Any]:
    source = written(folder, list(rows))
    return read_pairs(read_source(source), source, "pairs", is_unpaired=is_unpaired)


@pytest.mark.parametrize(
    ("row", "prompt", "said"),
    [
        ({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, "2+2=", ("4", "5")),
        ({"chosen": "2+2=4", "rejected": "2+2=5"}, "2+2=", ("4", "5")),
        ({"chosen": "is it 4", "rejected": "is it 5"}, "is it", (" 4", " 5")),
        ({"prompt": ASK, "chosen": [says("4")], "rejected": [says("5")]}, ASK, ("4", "5")),
        ({"prompt": ASK, "chosen": "4", "rejected": "5"}, ASK, ("4", "5")),
        ({"chosen": [*ASK, says("4")], "rejected": [*ASK, says("5")]}, ASK, ("4", "5")),
        (
            {"prompt": "2+2=", "chosen": [*ASK, says("4")], "rejected": [*ASK, says("5")]},
            ASK,
            ("4", "5"),
        ),
        ({"question": "2+2=", "chosen": [says("4")], "rejected": [says("5")]}, "2+2=", ("4", "5")),
    ],
)
def test_pairs_are_read_in_their_layouts(
    row: dict[str, Any], prompt: Any, said: tuple[str, str], tmp_path: Path
) -> None:
    (pair,) = read(tmp_path, row)
    assert pair.labels == (True, False)
    assert [x.prompt for x in pair.completions] == [prompt, prompt]
    assert tuple(x.completion["content"] for x in pair.completions) == said


def test_completions_with_labels_and_pairs_taken_apart(tmp_path: Path) -> None:
    row = {"prompt": "2+2=", "completion": "4", "label": True}
    items = read(tmp_path, row, row | {"completion": "5", "label": 0}, is_unpaired=True)
    assert [x.labels for x in items] == [(True,), (False,)]
    items = read(tmp_path, {"prompt": "2+2=", "chosen": "4", "rejected": "5"}, is_unpaired=True)
    assert [(x.id, x.labels) for x in items] == [
        ("pairs:1:chosen", (True,)),
        ("pairs:1:rejected", (False,)),
    ]


@pytest.mark.parametrize(
    ("row", "is_unpaired", "said"),
    [
        ({"prompt": "a", "completion": "b", "label": True}, False, "no column 'chosen'; found"),
        ({"prompt": "a", "chosen": "b"}, False, "no column 'rejected'"),
        ({"prompt": "a", "completion": "b"}, True, "no column 'label'"),
        ({"prompt": "a", "completion": "b", "label": "good"}, True, "must be true or false"),
        ({"chosen": "yes", "rejected": "no"}, False, "no common start"),
        ({"prompt": "a", "chosen": "b", "rejected": [says("c")]}, False, "must both be text"),
        ({"prompt": "a", "chosen": "b", "rejected": ""}, False, "rejected must be non-empty"),
        ({"prompt": "a", "chosen": "b", "rejected": None}, False, "nothing in column 'rejected'"),
        ({"chosen": ASK, "rejected": ASK}, False, "must be non-empty"),
    ],
)
def test_what_is_no_preference_is_refused(
    row: dict[str, Any], is_unpaired: bool, said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=said):
        read(tmp_path, row, is_unpaired=is_unpaired)


def test_equal_completions_are_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    read(tmp_path, {"prompt": "a", "chosen": "b", "rejected": "b"})
    assert "1 of 1 pairs have one completion twice" in caplog.text


def test_completions_alone_are_trained_and_both_keep_the_limits(tmp_path: Path) -> None:
    source = written(
        tmp_path,
        [
            {"prompt": "2+2=", "chosen": "4", "rejected": "5"},
            {"prompt": "2+2=", "chosen": "4", "rejected": "5" * 30},
        ],
    )
    cfg = PairsDataConfig(train=(source,), chat="never", max_tokens=16)
    data = load_pairs(cfg, make_char_tokenizer("0123456789+="), seed=0, is_unpaired=False)
    (item,) = data.train.sources[0]
    assert [len(row.token_ids) for row in item.rows] == [6, 6]
    assert [row.loss_mask for row in item.rows] == [[False] * 4 + [True] * 2] * 2
    assert len(data.report.dropped) == 1
