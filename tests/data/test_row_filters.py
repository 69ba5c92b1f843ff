"""Rows that are left out before they are rendered: over files, in every command that reads them."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hone.cli.command import first_rows
from hone.config.tree import PairsDataConfig, RLConfig, SFTConfig, SFTDataConfig, SFTRunConfig
from hone.data.missing import is_silent
from hone.data.pairs import load_pairs, map_pairs
from hone.data.prompts import load_prompts
from hone.data.reading import PromptReader
from hone.data.row_filters import load_filter
from hone.data.rows import SourceRow
from hone.data.settings import (
    ColumnsConfig,
    DataConfig,
    PairSourceConfig,
    SourceBase,
    SourceConfig,
)
from hone.data.sft import load_sft
from hone.data.streamed import StreamedRows
from hone.errors import UserError
from hone.models.settings import TrainedModelConfig
from hone.observe.resumed_run import changed_settings, save_config
from hone.rollout.settings import RolloutConfig
from hone.tools.data_view.check import check
from hone.tools.data_view.chosen import choose
from hone.tools.data_view.text import plain_text
from tests.data.support import char_tokenizer, write_rows
from tests.data.test_streamed_files import ids, write
from tests.tables import table

TOKENIZER = char_tokenizer()
ALL = {"missing_answers": "drop", "duplicates": "drop"}


def rows(num: int = 400) -> list[dict[str, Any]]:
    """Rows of which many repeat another one's content, some have no answer, and some are odd."""
    answers = (None, "", " \n", *(f"{n}" for n in range(4)))
    return [
        {
            "prompt": f"{number * number % 97}+1=",
            "answer": answers[number % 7],
            "completion": answers[number % 7],
            "id": number,
        }
        for number in range(num)
    ]


@pytest.fixture
def rules(tmp_path: Path) -> str:
    file = tmp_path / "rules.py"
    file.write_text(
        "def keep(row):\n    return row['id'] % 5 != 2\n"
        "def fails(row):\n    return 1 / (row['id'] - 3) < 99\n"
        "def says(row):\n    return row['answer']\n"
        "def none(row):\n    return False\n"
        "def changes(row):\n    row['prompt'] = 'changed'\n    return True\n"
        "WORD = 'keep'\n"
    )
    return str(file)


def expected(data: Sequence[Mapping[str, Any]], order: Sequence[int]) -> list[int]:
    """Numbers of the rows that are left, by a set over the order."""
    seen: set[tuple[str, str]] = set()
    found: list[int] = []
    for number in order:
        row = data[number]
        content = row["prompt"], row["answer"]
        if row["id"] % 5 == 2 or not (row["answer"] or "").strip() or content in seen:
            continue
        seen.add(content)
        found.append(number)
    return found


def names(numbers: Sequence[int]) -> list[str]:
    return [f"data:{number + 1}" for number in numbers]


def config(path: str, **settings: Any) -> DataConfig:
    return DataConfig(train=(SourceConfig(path=path),), **settings)


@pytest.fixture(params=["parquet", "jsonl"])
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return write(tmp_path / "data", request.param, rows())


def test_whole_streamed_and_generated_rows_are_those_of_a_slow_pass(path: str, rules: str):
    settings: dict[str, Any] = {**ALL, "filter": f"{rules}:keep"}
    data = rows()
    left = expected(data, range(len(data)))
    whole = load_prompts(config(path, **settings), TOKENIZER, seed=4)
    assert ids(whole.train.first_rows()) == names(left)
    reader = PromptReader(config(path, **settings), TOKENIZER, seed=4, max_prompt_tokens=99)
    assert ids(prompt for _, prompt in reader.read()) == names(left)
    cfg = config(path, shuffle_window=100, missing_answers="drop")
    plain = load_prompts(cfg, TOKENIZER, seed=4)
    made = plain.train.sources[0]
    assert isinstance(made, StreamedRows)
    orders = [made._order_of(epoch) for epoch in range(3)]
    served = [
        number
        for order in orders
        for number in expected(data, [order[place] for place in range(len(data))])
    ]
    streamed = load_prompts(config(path, shuffle_window=100, **settings), TOKENIZER, seed=4)
    drawn = streamed.train.take(len(served))
    assert ids(drawn) == names(served)
    assert len(left) < len(set(ids(drawn))), "each epoch has its own first rows"
    counted = {name: metric.value for name, metric in streamed.metrics().items()}
    read = counted.pop("data/rows_read")
    assert read == len(served) + sum(counted.values())
    assert set(counted) == {f"data/skipped_{x}" for x in ("filter", "missing_answer", "duplicate")}


def test_what_whole_sources_drop_is_said_in_one_line(
    path: str, rules: str, caplog: pytest.LogCaptureFixture
):
    data = rows()
    left = len(expected(data, range(len(data))))
    with caplog.at_level(logging.WARNING):
        found = load_prompts(config(path, **ALL, filter=f"{rules}:keep"), TOKENIZER)
    (line,) = [text for text in caplog.messages if "rows kept" in text]
    assert f"{left} of 400 rows kept" in line
    filtered = sum(row["id"] % 5 == 2 for row in data)
    missing = sum(row["id"] % 5 != 2 and row["id"] % 7 < 3 for row in data)
    for number, words in (
        (filtered, "false from data.filter: "),
        (missing, "no answer (data.missing_answers is drop): "),
        (
            400 - filtered - missing - left,
            "the content of an earlier row (data.duplicates is drop)",
        ),
    ):
        assert f"; {number} dropped with {words}" in line
    assert found.report.skipped.total() == 400 - left
    # The place of the first one, and what is wrong with it.
    assert "nothing in column 'answer'" in line
    assert ("line 1:" in line) or ("row 1:" in line)


def test_the_first_row_of_each_reason_is_logged_when_it_is_skipped(
    path: str, rules: str, caplog: pytest.LogCaptureFixture
):
    settings: dict[str, Any] = {**ALL, "filter": f"{rules}:keep", "shuffle_window": 400}
    data = load_prompts(config(path, **settings), TOKENIZER)
    caplog.clear()
    data.train.take(70)
    told = [text for text in caplog.messages if "a row was skipped" in text]
    assert len(told) == 3
    for words in (
        "since data.filter returns false for it: ",
        "since it has no answer: ",
        "since an earlier row has the same content: ",
    ):
        assert sum(words in text for text in told) == 1


def test_held_out_rows_are_filtered_too(path: str, rules: str):
    data = rows()
    settings: dict[str, Any] = {**ALL, "filter": f"{rules}:keep", "eval_fraction": 0.3}
    whole = load_prompts(config(path, **settings), TOKENIZER)
    left = names(expected(data, range(len(data))))
    assert sorted(ids(whole.eval) + ids(whole.train.first_rows())) == sorted(left)
    streamed = load_prompts(config(path, shuffle_window=90, **settings), TOKENIZER)
    assert ids(streamed.eval) == ids(whole.eval)
    assert not set(ids(streamed.eval)) & set(ids(streamed.train.take(300)))
    cfg = DataConfig(train=(), eval=(SourceBase(path=path),), **ALL, filter=f"{rules}:keep")
    assert ids(load_prompts(cfg, TOKENIZER).eval) == left


def test_ids_are_the_numbers_in_the_file(tmp_path: Path):
    data = [{"prompt": "a", "answer": None}, {"prompt": "b", "answer": "1"}]
    path = write_rows(tmp_path / "f.jsonl", data)
    for window in (None, 9):
        found = load_prompts(config(path, missing_answers="drop", shuffle_window=window), TOKENIZER)
        assert ids(found.train.take(2)) == ["f:2", "f:2"]


def test_by_default_rows_are_as_they_were(tmp_path: Path):
    data = [{"prompt": "a", "answer": "1"}] * 3 + [{"prompt": "b", "answer": ""}]
    path = write_rows(tmp_path / "f.jsonl", data)
    assert len(load_prompts(config(path), TOKENIZER).train) == 4
    data.append({"prompt": "c", "answer": None})
    path = write_rows(tmp_path / "f.jsonl", data)
    with pytest.raises(UserError, match=r"line 5: nothing in column 'answer'"):
        load_prompts(config(path), TOKENIZER)


# Answers.


def answered(tmp_path: Path, values: Sequence[Any], pattern: str | None = None) -> list[Any]:
    data = [{"prompt": f"p{n}", "answer": value} for n, value in enumerate(values)]
    source = SourceConfig(
        path=write_rows(tmp_path / "f.jsonl", data),
        answer_pattern=pattern,
        columns=ColumnsConfig(answer="answer"),
    )
    cfg = DataConfig(train=(source,), missing_answers="drop")
    return [row.answer for row in load_prompts(cfg, TOKENIZER).train.first_rows()]


def test_prompts_without_an_answer_are_dropped(tmp_path: Path):
    assert answered(tmp_path, ["1", None, "", " ", 0, False, "\t"]) == ["1", "0", "false"]
    assert answered(tmp_path, [[1], [], None]) == ["[1]", "[]"]
    found = answered(tmp_path, ["#### 1", "none", None, "####  ", "#### 2"], r"####(.*)")
    assert found == ["1", "2"]
    # Other wrong values stay errors.
    with pytest.raises(UserError, match="line 1: column 'answer' holds nan"):
        answered(tmp_path, [float("nan"), "1"])
    with pytest.raises(UserError, match="line 2: column 'answer' holds nan"):
        answered(tmp_path, ["#### 1", float("nan")], r"####\s*(.*)")


SAID = [{"role": "assistant", "content": "yes"}]
CALL = {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
SILENT = [None, "", " \n", [], [{"role": "assistant", "content": ""}], [{"role": "assistant"}]]
SILENT += [[{"role": "assistant", "content": [{"type": "text", "text": " "}]}]]
SILENT += [[{"role": "assistant", "content": None, "tool_calls": None}]]
SPEAKING = ["x", SAID, [CALL], [{"role": "user", "content": ""}], 3, ["x"], {"a": 1}]
SPEAKING += [[{"role": "assistant", "content": [{"type": "image", "image": "a.png"}]}]]


@table("value", SILENT)
def test_completions_that_say_nothing(value: Any):
    assert is_silent(value)


@table("value", SPEAKING)
def test_completions_that_say_something_or_are_wrong(value: Any):
    assert not is_silent(value)


def test_demonstrations_without_completion_are_dropped(tmp_path: Path):
    def load(data: list[dict[str, Any]]) -> list[str]:
        path = write_rows(tmp_path / "f.jsonl", data)
        cfg = SFTDataConfig(train=(SourceConfig(path=path),), missing_answers="drop", chat="never")
        return ids(load_sft(cfg, TOKENIZER, seed=0).train.first_rows())

    texts = ["a", None, "", "b"]
    assert load([{"prompt": "p", "completion": text} for text in texts]) == ["f:1", "f:4"]
    turn = {"role": "user", "content": "p"}
    cfg = SFTDataConfig(train=(), missing_answers="drop")
    dialogues = [[turn, *SAID], [turn, {"role": "assistant", "content": ""}], [turn, *SAID]]
    path = write_rows(tmp_path / "d.jsonl", [{"messages": each} for each in dialogues])
    cfg = cfg.model_copy(update={"train": (SourceConfig(path=path),), "chat": "always"})
    tokenizer = char_tokenizer(
        "{% for m in messages %}{{ m['role'] }}:{{ m['content'] }}\n{% endfor %}"
        "{% if add_generation_prompt %}assistant:{% endif %}"
    )
    assert ids(load_sft(cfg, tokenizer, seed=0).train.first_rows()) == ["d:1", "d:3"]
    # A dialogue that ends with the user is wrong, not without an answer.
    write_rows(tmp_path / "d.jsonl", [{"messages": [turn, *SAID]}, {"messages": [turn]}])
    with pytest.raises(UserError, match="line 2: a demonstration must be"):
        load_sft(cfg, tokenizer, seed=0)


@table("window", [None, 9])
def test_pairs_with_a_silent_completion_are_dropped(tmp_path: Path, window: int | None):
    def load(data: list[tuple[Any, Any]], **prompt: str) -> list[str]:
        rows = [{**prompt, "chosen": a, "rejected": b} for a, b in data]
        source = PairSourceConfig(path=write_rows(tmp_path / "f.jsonl", rows))
        cfg = PairsDataConfig(
            train=(source,),
            chat="never",
            shuffle=False,
            missing_answers="drop",
            shuffle_window=window,
        )
        found = load_pairs(cfg, TOKENIZER, seed=0)
        located = [SourceRow(row, "row") for row in rows]
        items, _ = map_pairs(located, source, drops_missing=True)
        drawn = found.train.take(len(items))
        texts = [str(TOKENIZER.decode(x.rows[0].token_ids)) for x in drawn]
        assert all(text.startswith("<bos>p") for text in texts)
        return ids(drawn)

    plain = [("a", "b"), (None, "b"), ("a", ""), (" ", "b"), ("c", "d")]
    assert load(plain, prompt="p") == ["f:1", "f:5"]
    # Where all repeat the prompt, what follows it counts; a null is no counterexample.
    repeated = [("p:a", "p:b"), ("p:", "p:b"), (None, "p:b"), ("p:c", "p: ")]
    assert load(repeated, prompt="p:") == ["f:1"]
    # Without a prompt, what follows the common start counts.
    assert load([("p: a", "p: b"), ("p: a", "p:"), ("p: c", "p: d")]) == ["f:1", "f:3"]


def test_labelled_completions_that_are_silent_are_dropped(tmp_path: Path):
    rows = [{"prompt": "p", "completion": x, "label": True} for x in ("a", "", None, "b")]
    source = PairSourceConfig(path=write_rows(tmp_path / "f.jsonl", rows))
    cfg = PairsDataConfig(train=(source,), chat="never", missing_answers="drop", shuffle=False)
    found = load_pairs(cfg, TOKENIZER, seed=0, is_unpaired=True)
    assert ids(found.train.take(2)) == ["f:1", "f:4"]
    assert len(found.train) == 2


def test_duplicates_of_pairs_have_the_same_completions_and_margin(tmp_path: Path):
    rows = [{"prompt": "p", "chosen": "a", "rejected": "b", "margin": 1, "id": n} for n in range(3)]
    rows += [{**rows[0], "rejected": "c"}, {**rows[0], "margin": 2}, {**rows[0], "prompt": "q"}]
    source = PairSourceConfig(path=write_rows(tmp_path / "f.jsonl", rows))
    cfg = PairsDataConfig(train=(source,), chat="never", duplicates="drop", shuffle=False)
    found = load_pairs(cfg, TOKENIZER, seed=0, for_reward_model=True)
    assert ids(found.train.first_rows()) == ["f:1", "f:4", "f:5", "f:6"]
    unpaired = load_pairs(cfg, TOKENIZER, seed=0, is_unpaired=True)
    assert len(unpaired.train) == 2 * 3  # margins are not read


def test_what_a_template_reads_is_content(tmp_path: Path):
    rows = [{"prompt": "p", "answer": "1", "input": f"{n % 2}", "id": n} for n in range(4)]
    path = write_rows(tmp_path / "f.jsonl", rows)
    settings = {"duplicates": "drop", "prompt_template": "{prompt} {input}"}
    assert len(load_prompts(config(path), TOKENIZER).train) == 4
    assert ids(load_prompts(config(path, **settings), TOKENIZER).train.first_rows()) == [
        "f:1",
        "f:2",
    ]
    for columns in ({"tools": '[{"name": "f"}]'}, {"chat_template_kwargs": {"a": 1}}):
        rows = [{"prompt": "p", "answer": "1"}, {"prompt": "p", "answer": "1", **columns}]
        path = write_rows(tmp_path / "f.jsonl", rows)
        template = "{% for m in messages %}{{ m['content'] }}{% endfor %}{{ tools }}{{ a }}"
        found = load_prompts(config(path, duplicates="drop"), char_tokenizer(template))
        assert len(found.train) == 2


# The user's function.


def test_a_function_gets_the_row_as_it_is_in_the_file(tmp_path: Path, rules: str):
    turns = [{"role": "user", "content": "hi"}]
    row = {"messages": turns, "answer": 3, "extra": {"a": [1, None]}}
    (tmp_path / "f.jsonl").write_text("")
    path = write_rows(tmp_path / "f.jsonl", [row])
    Path(rules).write_text(f"def keep(row):\n    return row == {row!r} and type(row) is dict\n")
    cfg = config(path, filter=f"{rules}:keep", chat="always")
    template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert len(load_prompts(cfg, char_tokenizer(template)).train) == 1


@table("window", [None, 9])
def test_a_function_that_fails_or_returns_no_bool_is_refused(
    tmp_path: Path, rules: str, window: int | None
):
    data = [{"prompt": "p", "answer": "1", "id": n} for n in range(9)]
    path = write_rows(tmp_path / "f.jsonl", data)
    for name, problem in (
        ("fails", r"line 4: data\.filter '.*:fails' failed for this row: .*rules\.py:4: Zero"),
        ("says", r"line 1: data\.filter '.*:says' must return True or False, and returned str"),
        ("keeps", r"data\.filter: .* has no function 'keeps' .*Did you mean"),
        ("WORD", r"data\.filter: .* is of type str, which cannot be called"),
    ):
        cfg = config(path, filter=f"{rules}:{name}", shuffle_window=window)
        with pytest.raises(UserError, match=problem):
            load_prompts(cfg, TOKENIZER)
        with pytest.raises(UserError, match=problem):
            list(PromptReader(cfg, TOKENIZER, seed=0, max_prompt_tokens=99).read())
    with pytest.raises(UserError, match=r"data\.filter: no file"):
        load_filter(str(tmp_path / "none.py") + ":keep")


def test_a_function_cannot_change_the_columns(tmp_path: Path, rules: str):
    path = write_rows(tmp_path / "f.jsonl", [{"prompt": "p", "answer": "1"}])
    found = load_prompts(config(path, filter=f"{rules}:changes"), TOKENIZER)
    assert found.train.take(1)[0].text == "p"


def test_columns_are_those_of_the_rows_that_are_used(tmp_path: Path, rules: str):
    data: list[dict[str, Any]] = [{"problem": "q", "answer": "1", "id": 2}]
    data += [{"question": ["wrong"], "answer": "1", "id": 7}]
    data += [{"question": "p", "answer": "1", "id": n} for n in (3, 4)]
    path = write_rows(tmp_path / "f.jsonl", data)
    for window in (None, 9):
        cfg = config(path, filter=f"{rules}:keep", shuffle_window=window, shuffle=False)
        assert ids(load_prompts(cfg, TOKENIZER).train.take(2)) == ["f:3", "f:4"]


def test_where_nothing_is_left_the_reasons_are_named(tmp_path: Path, rules: str):
    data = [{"prompt": "p", "answer": "1", "id": n} for n in range(9)]
    path = write_rows(tmp_path / "f.jsonl", data)
    cfg = config(path, filter=f"{rules}:none")
    with pytest.raises(UserError, match=r"none of the 9 rows is left: 9 dropped with false"):
        load_prompts(cfg, TOKENIZER)
    with pytest.raises(UserError, match=r"0 of 9 rows kept; 9 dropped with false from"):
        list(PromptReader(cfg, TOKENIZER, seed=0, max_prompt_tokens=99).read())
    cfg = config(path, filter=f"{rules}:none", shuffle_window=9)
    with pytest.raises(UserError, match=r"none of the 9 rows is left: 9 dropped with false"):
        load_prompts(cfg, TOKENIZER)


def test_columns_are_found_behind_many_rows_that_are_left_out(tmp_path: Path, rules: str):
    """As in a file that is sorted by what the function looks at."""
    data: list[dict[str, Any]] = [{"problem": n, "answer": [], "id": 2} for n in range(600)]
    data += [{"question": "p", "answer": "1", "id": 3}]
    path = write_rows(tmp_path / "f.jsonl", data)
    cfg = config(path, filter=f"{rules}:keep", shuffle_window=9)
    assert ids(load_prompts(cfg, TOKENIZER).train.take(2)) == ["f:601"] * 2
    reader = PromptReader(cfg, TOKENIZER, seed=0, max_prompt_tokens=99)
    assert ids(prompt for _, prompt in reader.read()) == ["f:601"]
    checked = check(choose([path, f"--data.filter={rules}:keep"], "rl"), plain_text(""))
    assert (checked.num_dropped, checked.sources[0].num_kept, len(checked.problems)) == (600, 1, 0)


# Before a run.


def test_first_rows_are_checked_without_those_that_are_left_out(tmp_path: Path, rules: str):
    data: list[dict[str, Any]] = [{"prompt": ["wrong"], "completion": "1", "id": 2}]
    data += [
        {"prompt": "p", "completion": None, "id": 3},
        {"prompt": "p", "completion": "1", "id": 4},
    ]
    path = write_rows(tmp_path / "f.jsonl", data)

    def problems(**settings: Any) -> list[str]:
        cfg = SFTConfig(
            model=TrainedModelConfig(path="none"),
            data=SFTDataConfig(train=(SourceConfig(path=path),), **settings),
        )
        found = first_rows(cfg)
        return [f"{each['key']}: {each['problem']}" for each in found.get("data_problems", ())]

    keep = {"filter": f"{rules}:keep"}
    assert problems(**keep, missing_answers="drop") == []
    (told,) = problems(**keep)
    assert "data.train.0.path: " in told
    assert "line 2: nothing in column 'completion'" in told
    (told,) = problems(missing_answers="drop")
    assert "line 1: a chat message needs a role" in told
    (told,) = problems(filter=f"{rules}:fails", missing_answers="drop")
    assert "line 2: data.filter" in told
    (told,) = problems(filter=f"{rules}:gone")
    assert told.startswith(f"data.filter: {rules} has no function 'gone'")


def test_a_run_that_goes_on_notices_other_code_of_its_filter(tmp_path: Path, rules: str):
    path = write_rows(tmp_path / "f.jsonl", [{"prompt": "p", "completion": "1", "id": 3}])
    cfg = SFTConfig(
        run=SFTRunConfig(dir=tmp_path / "run"),
        model=TrainedModelConfig(path="none"),
        data=SFTDataConfig(train=(SourceConfig(path=path),), filter=f"{rules}:keep"),
    )
    cfg.run.dir.mkdir()
    save_config(cfg)
    assert changed_settings(cfg) == {}
    Path(rules).write_text("def keep(row):\n    return True\n")
    assert list(changed_settings(cfg)) == [f"the code of data.filter ({rules}:keep)"]


def test_first_pairs_are_checked_without_silent_ones():
    rows = [{"prompt": "p:", "chosen": f"p:{x}", "rejected": "p:n"} for x in ("a", "", "b")]
    rows += [{"prompt": "p:", "chosen": None, "rejected": "p:n"}]
    located = [SourceRow(row, f"row {number}") for number, row in enumerate(rows, start=1)]
    items, told = map_pairs(located, PairSourceConfig(path="f"), drops_missing=True)
    assert [item.location for item in items] == ["row 1", "row 3"]
    assert told == [
        "chosen and rejected of all first 3 rows begin with the prompt, which is taken off them"
    ]


def test_rows_that_do_not_fill_a_step_are_counted_with_what_the_filter_leaves(tmp_path: Path):
    (tmp_path / "own.py").write_text("def even(row):\n    return row['id'] % 2 == 0\n")
    data = [{"prompt": "p", "answer": "1", "completion": "1", "id": n} for n in range(200)]
    path = write_rows(tmp_path / "f.jsonl", data)

    def number(size: int, *sources: str, **settings: Any) -> int | None:
        train = tuple(SourceConfig(path=each) for each in sources)
        model = TrainedModelConfig(path="none")
        rl = RLConfig(
            model=model,
            data=DataConfig(train=train, **settings),
            rollout=RolloutConfig(prompts_per_step=size),
        )
        sft = SFTConfig(
            model=model, data=SFTDataConfig(train=train, examples_per_step=size, **settings)
        )
        (found,) = {first_rows(cfg).get("num_train_rows") for cfg in (rl, sft)}
        return found

    even = {"filter": f"{tmp_path / 'own.py'}:even"}
    assert number(200, path) is None
    assert number(201, path) == 200
    assert number(100, path, **even) is None
    assert number(101, path, **even) == 100
    assert number(201, path, path, **even) == 200
    assert number(201, path, "owner/name") is None
