"""Preferences in the shapes that users have, and what is wrong with them."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest

from hone.config.tree import PairsDataConfig
from hone.data.pairs import load_pairs, map_pairs, read_pairs
from hone.data.settings import PairColumnsConfig, PairSourceConfig
from hone.data.sources import SourceRow, read_source
from hone.errors import UserError
from hone.models.tiny import make_char_tokenizer
from hone.rollout.judge import Transcripts
from hone.types import Prompt
from tests.tables import table

ASK = [{"role": "user", "content": "2+2="}]


def says(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def written(
    folder: Path, rows: list[dict[str, Any]], columns: Mapping[str, str] = {}
) -> PairSourceConfig:
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return PairSourceConfig(path=str(path), columns=PairColumnsConfig(**columns))


def read(
    folder: Path, *rows: dict[str, Any], columns: Mapping[str, str] = {}, **rest: bool
) -> list[Any]:
    source = written(folder, list(rows), columns)
    return read_pairs(read_source(source), source, "pairs", **rest)


@table(
    "row, prompt, said",
    [
        ({"prompt": "2+2=", "chosen": "4", "rejected": "5"}, "2+2=", ("4", "5")),
        ({"chosen": "2+2=4", "rejected": "2+2=5"}, "2+2=", ("4", "5")),
        ({"chosen": "is it 4", "rejected": "is it 5"}, "is it", (" 4", " 5")),
        ({"chosen": "it is 14", "rejected": "it is 15"}, "it is", (" 14", " 15")),
        ({"chosen": "it is four", "rejected": "it is fourteen"}, "it is", (" four", " fourteen")),
        ({"chosen": "it is 4", "rejected": "it is 4, or 5"}, "it is 4", ("", ", or 5")),
        ({"prompt": "2+2=", "chosen": "4", "rejected": ""}, "2+2=", ("4", "")),
        ({"prompt": ASK, "chosen": [says("4")], "rejected": [says("")]}, ASK, ("4", "")),
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


@table(
    "row",
    [
        {"prompt": "2+2=", "chosen": "2+2=4", "rejected": "2+2=5"},
        {"prompt": "2+2=", "completion": "2+2=4", "label": True},
    ],
)
def test_a_prompt_that_all_completions_repeat_is_taken_off(
    row: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = {key: "Hi" if key == "prompt" else row[key] for key in row}
    names = [key for key in row if key in ("chosen", "rejected", "completion")]
    greeting = other | dict.fromkeys(names, "Hi there")
    is_unpaired = "label" in row
    items = read(tmp_path, row, greeting, is_unpaired=is_unpaired)
    said = [[x.completion["content"] for x in item.completions] for item in items]
    assert said == [[row[name][4:] for name in names], [" there"] * len(names)]
    told = f"{' and '.join(names)} of all 2 rows begin with the prompt, which is taken off them"
    assert told in caplog.text
    source = written(tmp_path, [row])
    assert (
        "of all first 1 rows"
        in map_pairs(read_source(source), source, is_unpaired=is_unpaired)[1][0]
    )
    # In one row of many it is what is said.
    items = read(tmp_path, greeting, row | dict.fromkeys(names, "4"), is_unpaired=is_unpaired)
    assert items[0].completions[0].completion["content"] == "Hi there"


def test_turns_that_both_share_may_end_a_longer_prompt(tmp_path: Path) -> None:
    asked = [{"role": "system", "content": "Add."}, *ASK]
    row = {"prompt": asked, "chosen": [*ASK, says("4")], "rejected": [*ASK, says("5")]}
    (pair,) = read(tmp_path, row)
    assert [x.prompt for x in pair.completions] == [asked, asked]


def test_completions_with_labels_and_pairs_taken_apart(tmp_path: Path) -> None:
    row = {"prompt": "2+2=", "completion": "4", "label": True}
    items = read(tmp_path, row, row | {"completion": "5", "label": 0}, is_unpaired=True)
    assert [x.labels for x in items] == [(True,), (False,)]
    items = read(tmp_path, {"prompt": "2+2=", "chosen": "4", "rejected": "5"}, is_unpaired=True)
    assert [(x.id, x.labels) for x in items] == [
        ("pairs:1:chosen", (True,)),
        ("pairs:1:rejected", (False,)),
    ]


@table(
    "row, is_unpaired, said",
    [
        (
            {"prompt": "a", "completion": "b", "label": True},
            False,
            "no column for the chosen completion: .* Name the right one in `columns.chosen`",
        ),
        ({"prompt": "a", "chosen": "b"}, False, "no column for the rejected completion"),
        ({"prompt": "a", "completion": "b"}, True, "no column for the label"),
        ({"prompt": "a", "completion": "b", "label": "good"}, True, "must be true or false"),
        ({"chosen": "yes", "rejected": "no"}, False, "no common start"),
        ({"prompt": "a", "chosen": "b", "rejected": [says("c")]}, False, "must both be text"),
        ({"chosen": ASK, "rejected": ASK}, False, "must be text, or end with one assistant"),
    ],
)
def test_what_is_no_preference_is_refused(
    row: dict[str, Any], is_unpaired: bool, said: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=said):
        read(tmp_path, row, is_unpaired=is_unpaired)


@pytest.mark.parametrize(
    ("chosen", "rejected", "said"),
    [
        ("b", "b", "have one completion twice"),
        ("", "c", "prefer to say nothing"),
    ],
)
def test_pairs_that_teach_little_are_counted(
    chosen: str, rejected: str, said: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    usual = {"prompt": "a", "chosen": "b", "rejected": "c"}
    source = written(tmp_path, [usual, usual | {"chosen": chosen, "rejected": rejected}])
    rows = read_source(source)
    _, (told,) = map_pairs(rows, source)
    assert told.startswith(f"1 of the first 2 rows {said}")
    assert told.endswith("line 2")
    assert map_pairs(rows[:1], source)[1] == []
    assert caplog.text == ""  # of the first rows it may not be said as of all
    read_pairs(rows, source, "pairs")
    assert f"1 of the 2 rows {said}" in caplog.text


NAMED = {"q": "2+2=", "good": "4", "bad": "5", "by": 0.5, "chosen": "x", "rejected": "x"}


def test_columns_may_have_other_names(tmp_path: Path) -> None:
    columns = {"prompt": "q", "chosen": "good", "rejected": "bad", "margin": "by"}
    (pair,) = read(tmp_path, NAMED, columns=columns, reads_margin=True)
    assert [x.completion["content"] for x in pair.completions] == ["4", "5"]
    assert [x.prompt for x in pair.completions] == ["2+2="] * 2
    assert pair.margin == 0.5
    columns = {"prompt": "q", "answer": "bad", "label": "is_good"}
    (single,) = read(
        tmp_path,
        {"q": "2+2=", "bad": "5", "is_good": False, "label": True},
        columns=columns,
        is_unpaired=True,
    )
    assert single.completions[0].completion["content"] == "5"
    assert single.labels == (False,)


@table(
    "margin, reads, found",
    [(2, True, 2.0), (-0.5, True, -0.5), (2, False, 0.0), ("much", False, 0.0)],
)
def test_margins_are_read_where_asked_for(
    margin: Any, reads: bool, found: float, tmp_path: Path
) -> None:
    pair = {"prompt": "a", "chosen": "b", "rejected": "c", "margin": margin}
    (read_pair,) = read(tmp_path, pair, reads_margin=reads)
    assert read_pair.margin == found
    (read_pair,) = read(tmp_path, {"prompt": "a", "chosen": "b", "rejected": "c"})
    assert read_pair.margin == 0


@table("column", ["prompt", "chosen", "rejected", "margin"])
def test_a_row_may_lack_no_column_that_others_have(column: str, tmp_path: Path) -> None:
    pair = {"prompt": "a", "chosen": "b", "rejected": "c", "margin": 1}
    with pytest.raises(UserError, match=f"line 2: nothing in column '{column}'"):
        read(tmp_path, pair, pair | {column: None}, reads_margin=True)


def test_values_of_arrow_are_read_or_refused(tmp_path: Path) -> None:
    """A margin may be a decimal; a label may be no date."""
    source = written(tmp_path, [])
    row = {"prompt": "a", "chosen": "b", "rejected": "c", "margin": Decimal("0.5")}
    (pair,) = read_pairs([SourceRow(row, "row 1")], source, "pairs", reads_margin=True)
    assert pair.margin == 0.5
    row = {"prompt": "a", "completion": "b", "label": date(2024, 2, 29)}
    with pytest.raises(UserError, match="row 1: the label must be true or false, got datetime"):
        read_pairs([SourceRow(row, "row 1")], source, "pairs", is_unpaired=True)


@table("margin", ["much", True, float("nan")])
def test_a_margin_is_a_number(margin: Any, tmp_path: Path) -> None:
    pair = {"prompt": "a", "chosen": "b", "rejected": "c", "margin": margin}
    with pytest.raises(UserError, match=r"line 1: the margin must be a finite number, got"):
        read(tmp_path, pair, reads_margin=True)


def test_texts_without_a_prompt_are_no_messages(tmp_path: Path) -> None:
    tokenizer = make_char_tokenizer("2+=45")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    cfg = PairsDataConfig(train=(written(tmp_path, [{"chosen": "2+2=4", "rejected": "2+2=5"}]),))
    with pytest.raises(UserError, match=r"line 1: chosen and rejected are texts without a prompt"):
        load_pairs(cfg, tokenizer, seed=0)
    data = load_pairs(cfg.model_copy(update={"chat": "never"}), tokenizer, seed=0)
    assert len(data.train) == 1


def test_an_empty_completion_is_its_end_token(tmp_path: Path) -> None:
    rows = [{"prompt": "2+2=", "chosen": "4", "rejected": "", "margin": 2}]
    tokenizer = make_char_tokenizer("2+=4")
    cfg = PairsDataConfig(train=(written(tmp_path, rows),), chat="never")
    data = load_pairs(cfg, tokenizer, seed=0, for_reward_model=True)
    (pair,) = data.train.first_rows()
    assert [sum(row.loss_mask) for row in pair.rows] == [2, 1]
    assert pair.rows[1].token_ids[-1] == tokenizer.eos_token_id
    assert pair.margin == 2


@pytest.mark.parametrize("end", ["<|im_end|>", "<|im_end|>\n"])
def test_a_reward_model_is_trained_with_what_it_scores(tmp_path: Path, end: str) -> None:
    """All that the template writes: the value is read behind a turn's line break, too."""
    tokenizer = make_char_tokenizer("2+=45\n")
    turn = "{{ m['content'] + END }}".replace("END", repr(end))
    tokenizer.chat_template = "{% for m in messages %}" + turn + "{% endfor %}"
    cfg = PairsDataConfig(
        train=(written(tmp_path, [{"prompt": "2+2=", "chosen": "4", "rejected": "5"}]),)
    )
    (pair,) = load_pairs(cfg, tokenizer, seed=0, for_reward_model=True).train.first_rows()
    transcripts = Transcripts(tokenizer, cfg, max_tokens=64, vocab_size=99, path="model")
    prompt = Prompt(id="1", text="2+2=", token_ids=(1,), unrendered="2+2=")
    for row, said in zip(pair.rows, ("4", "5"), strict=True):
        found = transcripts.of(prompt, said, is_truncated=False)
        assert row.token_ids == list(found.token_ids)
        messages = [{"role": "user", "content": "2+2="}, {"role": "assistant", "content": said}]
        assert row.token_ids == tokenizer.apply_chat_template(messages, return_dict=False)


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
    (item,) = data.train.first_rows()
    assert [len(row.token_ids) for row in item.rows] == [6, 6]
    assert [row.loss_mask for row in item.rows] == [[False] * 4 + [True] * 2] * 2
    assert len(data.report.dropped) == 1


@table("chat", ["auto", "always", "never"])
def test_pairs_in_a_template_that_nobody_asked_for_are_told_once(
    chat: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As prompts and demonstrations: a model that was never trained on it fails with it."""
    rows = [{"prompt": "2+2=", "chosen": "4", "rejected": each} for each in ("5", "6")]
    tokenizer = make_char_tokenizer("0123456789+=")
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}="
    cfg = PairsDataConfig(train=(written(tmp_path, rows),), chat=chat, shuffle=False)
    with caplog.at_level(logging.INFO):
        load_pairs(cfg, tokenizer, seed=0)
    told = "preferences are put into the tokenizer's chat template"
    assert caplog.text.count(told) == (chat == "auto")
    assert ("the first one: '2+2==" in caplog.text) == (chat == "auto")
