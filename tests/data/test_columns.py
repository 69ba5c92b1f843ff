"""Column mapping and detection."""

import json
import re
import textwrap
from datetime import date, datetime, time, timedelta
from decimal import Decimal

import pyarrow.parquet
import pytest
import yaml

from hone.data.chat import Renderer
from hone.data.columns import choose_columns, map_rows, read_examples
from hone.data.settings import ColumnsConfig, DataConfig, SourceConfig
from hone.data.sources import SourceRow, read_source
from hone.errors import UserError
from tests.data.support import char_tokenizer
from tests.tables import table

USER = {"role": "user", "content": "hi"}
ASSISTANT = {"role": "assistant", "content": "hello"}


def map_dicts(rows, *, demonstrations=False, named=None, location="f, line {}", **settings):
    source = SourceConfig(path="d/f.jsonl", columns=ColumnsConfig(**(named or {})), **settings)
    read = [SourceRow(row, location.format(i)) for i, row in enumerate(rows, start=1)]
    columns = choose_columns(read, source, demonstrations=demonstrations)
    return map_rows(read, source, columns, name="f")


@table("name", ["prompt", "question", "problem", "input", "instruction"])
@table("answer", ["answer", "ground_truth", "solution", "label", "target"])
def test_usual_names_are_found(name, answer):
    (example,) = map_dicts([{name: "2+2", answer: "4", "level": 3}])
    assert (example.id, example.prompt, example.answer) == ("f:1", "2+2", "4")
    assert (example.task, example.raw_answer) == ("f", "4")
    assert example.metadata == {name: "2+2", answer: "4", "level": 3}  # under their own names too


def test_rows_as_verl_writes_them():
    row = {
        "data_source": "openai/gsm8k",
        "prompt": [USER],
        "reward_model": {"style": "rule", "ground_truth": 42},
        "extra_info": {"split": "train", "index": 0},
    }
    (example,) = map_dicts([row])
    assert (example.prompt, example.answer, example.task) == ([USER], "42", "openai/gsm8k")
    assert (example.raw_answer, example.metadata) == (42, row)
    (example,) = map_dicts([row], named={"answer": "extra_info.split"}, task="mine")
    assert (example.answer, example.task) == ("train", "mine")


def test_named_columns_win():
    row = {"q.1": "two?", "prompt": "other", "gold": ["2", "two"], "kind": "easy"}
    (example,) = map_dicts([row], named={"prompt": "q.1", "answer": "gold", "task": "kind"})
    assert (example.prompt, example.answer, example.task) == ("two?", '["2", "two"]', "easy")
    assert example.raw_answer == ["2", "two"]
    assert example.metadata == row


def test_rewards_get_the_answer_that_a_pattern_takes_out():
    row = {"prompt": "a", "solution": "so #### 4", "meta": {"truth": "x 5"}}
    (example,) = map_dicts([row], answer_pattern=r"####\s*(.+)")
    assert (example.answer, example.raw_answer, example.metadata["solution"]) == ("4", "4", "4")
    (example,) = map_dicts([row], named={"answer": "meta.truth"}, answer_pattern=r"\d")
    assert (example.raw_answer, example.metadata) == ("5", row)


def read_from_parquet(path, values, **settings):
    """Examples of rows with these answers."""
    rows = [{"prompt": "a", "answer": value} for value in values]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    source = SourceConfig(path=str(path), **settings)
    return read_examples(read_source(source), source, "f")


TEXTS = {
    "decimal": ([Decimal("3.50"), Decimal("-0.05")], ["3.50", "-0.05"]),
    "large decimal": ([Decimal("1E+3")], ["1000"]),
    "date": ([date(2024, 2, 29)], ["2024-02-29"]),
    "datetime": ([datetime(2024, 2, 29, 12, 5)], ["2024-02-29T12:05:00"]),
    "time": ([time(12, 5)], ["12:05:00"]),
    "bytes": (["4 \u20ac".encode()], ["4 \u20ac"]),
    "number": ([0.5, 3.0], ["0.5", "3.0"]),
    "boolean": ([True], ["true"]),
    "list": (
        [[{"on": date(2024, 2, 29), "costs": Decimal("3.50"), "is": b"x"}]],
        ['[{"on": "2024-02-29", "costs": 3.5, "is": "x"}]'],
    ),
}


@table("kind", TEXTS)
def test_a_value_of_an_answer_is_its_text_and_no_quoted_one(kind, tmp_path):
    values, texts = TEXTS[kind]
    examples = read_from_parquet(tmp_path / "f.parquet", values)
    assert [example.answer for example in examples] == texts
    assert [example.raw_answer for example in examples] == values


@table(
    "values, message",
    [
        ([[1.0], [float("nan")]], r"row 2: column 'answer' holds a number that is not finite"),
        ([1.0, float("nan")], r"row 2: column 'answer' holds nan, which is no number; put text or"),
        ([float("-inf")], r"row 1: column 'answer' holds -inf, which is no number"),
        ([b"\xff\x00"], r"row 1: column 'answer' holds 2 bytes that are no UTF-8 text"),
        ([timedelta(days=1)], r"row 1: column 'answer' holds timedelta, which is neither text nor"),
    ],
)
def test_a_value_that_has_no_text_is_refused(values, message, tmp_path):
    with pytest.raises(UserError, match=message):
        read_from_parquet(tmp_path / "f.parquet", values)
    with pytest.raises(UserError, match=message.replace("'answer'", "'task'").partition(";")[0]):
        map_dicts(
            [{"prompt": "a", "task": value} for value in values],
            location="row {}",
        )


def test_no_answer_column_is_fine_and_completions_stay_for_the_rewards():
    (example,) = map_dicts([{"prompt": "a", "response": "b"}])
    assert example.answer is None
    assert example.completion is None
    assert example.metadata["response"] == "b"


def test_nulls_that_parquet_adds_to_messages_are_removed():
    turn = {"role": "user", "content": "a", "tool_calls": None}
    (example,) = map_dicts([{"messages": [turn]}])
    assert example.prompt == [{"role": "user", "content": "a"}]
    assert example.metadata["messages"] == example.prompt


def test_a_null_among_arguments_of_a_call_is_the_author_s_in_json_alone(tmp_path):
    arguments = {"city": "Rome", "unit": None}
    calls = [{"type": "function", "function": {"name": "weather", "arguments": arguments}}]
    rows = [{"messages": [USER, {"role": "assistant", "content": None, "tool_calls": calls}, USER]}]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "f.parquet")
    (tmp_path / "f.jsonl").write_text(json.dumps(rows[0]))
    found = []
    for name in ("f.jsonl", "f.parquet"):
        source = SourceConfig(path=str(tmp_path / name))
        (example,) = read_examples(read_source(source), source, "f")
        assert example.prompt[1]["content"] == ""
        found.append(example.prompt[1]["tool_calls"][0]["function"]["arguments"])
    assert found == [arguments, {"city": "Rome"}]


def test_content_in_parts_is_the_text_of_the_parts():
    """As APIs have it, and Parquet, which fills up what other parts have."""
    parts = [{"type": "text", "text": "1", "image": None}, {"type": "text", "text": "+1="}]
    (example,) = map_dicts([{"messages": [{"role": "user", "content": parts}]}])
    assert example.prompt == [{"role": "user", "content": "1+1="}]
    row = {"prompt": "1+1=", "completion": [{"role": "assistant", "content": parts[:1]}]}
    (example,) = map_dicts([row], demonstrations=True)
    assert example.completion == {"role": "assistant", "content": "1"}


def test_a_call_of_a_tool_is_a_demonstration():
    calls = [{"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}]
    turn = {"role": "assistant", "content": None, "tool_calls": calls}
    (example,) = map_dicts([{"messages": [USER, turn]}], demonstrations=True)
    assert example.completion == {"role": "assistant", "content": "", "tool_calls": calls}


@table(
    "pattern, text, answer",
    [
        (r"####\s*(.+)", "so 3+4=7\n#### 7 ", "7"),
        (r"####\s*(.+)", "#### 1,234", "1,234"),
        (r"####\s*(.+)", "12/2 = <<12/2=6>>6\n####6", "6"),
        (r"-?\d+$", "it is -5", "-5"),
    ],
)
def test_answer_pattern(pattern, text, answer):
    (example,) = map_dicts([{"question": "a", "answer": text}], answer_pattern=pattern)
    assert example.answer == answer


def test_demonstrations():
    (example,) = map_dicts([{"prompt": "a", "completion": "b"}], demonstrations=True)
    assert (example.prompt, example.completion) == ("a", {"role": "assistant", "content": "b"})
    (example,) = map_dicts(
        [{"question": "a", "answer": "b"}], demonstrations=True, named={"answer": "answer"}
    )
    assert example.completion == {"role": "assistant", "content": "b"}
    (example,) = map_dicts([{"messages": [USER, ASSISTANT]}], demonstrations=True)
    assert (example.prompt, example.completion) == ([USER], ASSISTANT)
    (example,) = map_dicts([{"prompt": [USER], "completion": [ASSISTANT]}], demonstrations=True)
    assert (example.prompt, example.completion) == ([USER], ASSISTANT)


MODEL = {"style": "rule", "ground_truth": "1"}
LAYOUTS = {
    # columns of a row -> where prompt, answer and task are found
    "verl": (
        {"data_source": "d", "prompt": [USER], "answer": "long", "reward_model": MODEL},
        ("prompt", "reward_model.ground_truth", "data_source"),
    ),
    "TRL, conversational": ({"prompt": [USER], "solution": "1"}, ("prompt", "solution", None)),
    "TRL, from a dialogue set": (
        {"prompt": "a", "messages": [USER, ASSISTANT]},
        ("prompt", None, None),
    ),
    "OpenRLHF": (
        {"input": "a", "label": "1", "datasource": "d"},
        ("input", "label", "datasource"),
    ),
    "mathematics": (
        {"problem": "a", "solution": "so", "answer": "1"},
        ("problem", "answer", None),
    ),
}


@table("layout", LAYOUTS)
def test_layouts_are_recognised(layout):
    row, expected = LAYOUTS[layout]
    found = choose_columns([SourceRow(row, "f, line 1")], SourceConfig(path="f.jsonl"))
    assert (found.prompt, found.answer, found.task) == expected
    assert str(found).startswith("verl's layout: " if layout == "verl" else "prompt from ")


def test_dialogues_are_demonstrations_also_beside_a_prompt():
    rows = [SourceRow({"prompt": "hi", "messages": [USER, ASSISTANT]}, "f, line 1")]
    found = choose_columns(rows, SourceConfig(path="f.jsonl"), demonstrations=True)
    assert str(found) == (
        "dialogues, of which the last message is to be learned: prompt from 'messages'"
    )
    (example,) = map_rows(rows, SourceConfig(path="f.jsonl"), found, name="f")
    assert (example.prompt, example.completion) == ([USER], ASSISTANT)


def test_the_settings_for_alpaca_read_it():
    row = {"instruction": "Add.", "input": "1 and 2", "output": "3"}
    with pytest.raises(UserError) as refused:
        map_dicts([row], demonstrations=True)
    told = re.search(r"`columns.prompt` to (\w+) and .*template to (.*)\.$", str(refused.value))
    assert told
    named, template = told.groups()
    (example,) = map_dicts([row], demonstrations=True, named={"prompt": named})
    cfg = DataConfig(train=(), prompt_template=yaml.safe_load(template))
    (rendered,) = Renderer(char_tokenizer(), cfg).prompts([example])
    assert rendered.text == "Add.\n\n1 and 2"
    assert example.completion == {"role": "assistant", "content": "3"}


def test_the_program_for_sharegpt_writes_messages(tmp_path, monkeypatch):
    turns = [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "hello"}]
    (tmp_path / "shared.json").write_text(json.dumps([{"id": "a", "conversations": turns}]))
    source = SourceConfig(path=str(tmp_path / "shared.json"))
    with pytest.raises(UserError, match="'conversations' have `from` and `value`") as refused:
        read_examples(read_source(source), source, "f", demonstrations=True)
    monkeypatch.chdir(tmp_path)
    program = str(refused.value).partition("\n\n")[2].partition("\n\n")[0]
    exec(textwrap.dedent(program), {})
    written = SourceConfig(path="messages.jsonl")
    (example,) = read_examples(read_source(written), written, "f", demonstrations=True)
    assert (example.prompt, example.completion) == ([USER], ASSISTANT)


OK = {"prompt": "a", "answer": "1"}
BAD_ROWS = {
    "no prompt column": (
        [{"text": "a", "n": 1}],
        {},
        r"no column for the prompt: looked for prompt, messages, question, .*; found text, n\. "
        r"Name the right one in `columns.prompt`",
    ),
    "two prompts": (
        [{"instruction": "a", "input": "b"}],
        {},
        r"the prompt may be in any of the columns input, instruction\. .*`columns.prompt` .*set "
        r"`columns.prompt` to instruction and data.prompt_template to \"{instruction}",
    ),
    "two answers": (
        [{"prompt": "a", "answer": "1", "ground_truth": "1"}],
        {},
        r"the answer may be in any of the columns answer, ground_truth\. .*`columns.answer`",
    ),
    "named column absent": (
        [OK],
        {"named": {"answer": "gold"}},
        r"no column for the answer: looked for gold; found prompt, answer",
    ),
    "prompt missing": ([OK, OK, {"answer": "1"}], {}, r"f, line 3: nothing in column 'prompt'"),
    "prompt null": ([OK, {**OK, "prompt": None}], {}, r"f, line 2: nothing in column 'prompt'"),
    "answer missing": ([OK, {"prompt": "a"}], {}, r"f, line 2: nothing in column 'answer'"),
    "prompt empty": ([OK, {**OK, "prompt": " "}], {}, r"f, line 2: the prompt in .* got \" \""),
    "no messages": ([{"prompt": []}], {}, r"f, line 1: the prompt .* got \[\]"),
    "prompt a number": ([OK, {**OK, "prompt": 5}], {}, r"f, line 2: the prompt .* text .* got 5"),
    "kinds differ": (
        [OK, {**OK, "prompt": [USER]}],
        {},
        r"f, line 2: column 'prompt' holds a list, but text or a number in f, line 1",
    ),
    "answer kinds differ": (
        [OK, {**OK, "answer": ["1"]}],
        {},
        r"f, line 2: column 'answer' holds a list",
    ),
    "no role": ([{"prompt": [{"content": "a"}]}], {}, r"f, line 1: a chat message needs a role"),
    "no content": (
        [{"prompt": [{"role": "user"}]}],
        {},
        r"line 1: a 'user' message has no content",
    ),
    "a sound": (
        [{"prompt": [{"role": "user", "content": [{"type": "audio", "url": "a"}]}]}],
        {},
        r"line 1: the content of a message must be text, or .*, got .*audio",
    ),
    "content an object": (
        [{"prompt": [USER, {"role": "tool", "content": {"sum": 2}}]}],
        {},
        r'line 1: the content .*, got \{"sum": 2\}\. Write what a tool gives as JSON in a text',
    ),
    "empty message": (
        [{"messages": [USER, {"role": "assistant", "content": ""}]}],
        {"demonstrations": True},
        r"f, line 1: a demonstration .* with text or tool_calls",
    ),
    "nothing to sample": ([{"messages": [USER, ASSISTANT]}], {}, r"ends with an assistant message"),
    "pattern without match": (
        [{"prompt": "a", "answer": "#### 1"}, {"prompt": "a", "answer": "none " * 99}],
        {"answer_pattern": r"####\s*(.+)"},
        r"f, line 2: answer_pattern .* finds nothing in column 'answer': none none .*\.\.\.$",
    ),
    "pattern without answers": (
        [{"prompt": "a"}],
        {"answer_pattern": "x"},
        r"no column for the answer",
    ),
    "bad pattern": ([OK], {"answer_pattern": "("}, r"'\(' is not a regular expression"),
    "no completion": ([OK], {"demonstrations": True}, r"no column for the completion"),
    "empty completion": (
        [{"prompt": "a", "completion": ""}],
        {"demonstrations": True},
        r"f, line 1: a demonstration must be non-empty text",
    ),
    "dialogue without answer": (
        [{"messages": [USER]}],
        {"demonstrations": True},
        r"f, line 1: a demonstration .* one assistant message",
    ),
    "dialogue of one answer": (
        [{"messages": [ASSISTANT]}],
        {"demonstrations": True},
        r"f, line 1: no message stands before the demonstration",
    ),
}


@table("case", BAD_ROWS)
def test_R22_a_bad_row_is_named_with_its_remedy(case):
    rows, settings, message = BAD_ROWS[case]
    with pytest.raises(UserError, match=message):
        map_dicts(rows, **settings)
