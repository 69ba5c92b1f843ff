"""The environment's tools reach the chat template, before those of a row."""

import json

import pytest

from hone.data.chat import Renderer
from hone.data.prompts import load_prompts
from hone.data.reading import PromptReader
from hone.data.settings import DataConfig, SourceConfig
from hone.data.turns import TurnRenderer
from hone.errors import UserError
from hone.types import Observation, Sample, StopReason, Turn
from tests.data.support import CHATML, TAKES_TOOLS, char_tokenizer, write_rows


def tool(name):
    return {"type": "function", "function": {"name": name, "description": "Do.", "parameters": {}}}


ADD, MUL, ROW = tool("add"), tool("mul"), tool("row")
ASKED = [{"role": "user", "content": "1 + 1?"}]
ONLY_FIRST = TAKES_TOOLS.replace("for tool in tools", "for tool in tools[:1]")
REFUSES = "{% if tools %}{{ raise_exception('no tools, please') }}{% endif %}" + CHATML


def config(tmp_path, *rows):
    write_rows(tmp_path / "rows.jsonl", [{"prompt": ASKED, "answer": "2", **row} for row in rows])
    source = SourceConfig(path=str(tmp_path / "rows.jsonl"))
    return DataConfig(train=(source,), max_prompt_tokens=3000, shuffle=False)


def in_transformers(messages, tools):
    return char_tokenizer(TAKES_TOOLS).apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True
    )


@pytest.mark.parametrize(
    ("row", "shown"),
    [
        ({}, [ADD, MUL]),
        ({"tools": [ROW]}, [ADD, MUL, ROW]),
        ({"tools": json.dumps([ROW])}, [ADD, MUL, ROW]),
        ({"tools": []}, [ADD, MUL]),
    ],
)
def test_prompts_show_the_environments_tools_then_the_rows(row, shown, tmp_path):
    cfg, tokenizer = config(tmp_path, row), char_tokenizer(TAKES_TOOLS)
    loaded = load_prompts(cfg, tokenizer, keeps_messages=True, tools=[ADD, MUL]).known_rows()
    reader = PromptReader(cfg, tokenizer, seed=0, max_prompt_tokens=3000, tools=[ADD, MUL])
    read = [prompt for _, prompt in reader.read()]
    expected = in_transformers(ASKED, shown)
    assert [prompt.text for prompt in (*loaded, *read)] == [expected] * 2


def test_observations_are_rendered_with_the_same_tools(tmp_path):
    cfg, tokenizer = config(tmp_path, {"tools": [ROW]}), char_tokenizer(TAKES_TOOLS)
    (prompt,) = load_prompts(cfg, tokenizer, keeps_messages=True, tools=[ADD]).known_rows()
    sample = Sample(
        id="0", prompt=prompt, index=0, token_ids=[9, 3], logprobs=[0.0] * 2,
        weight_versions=[0] * 2, loss_mask=[True] * 2, stop_reason=StopReason.EOS,
        turns=[Turn(start=0, end=2, text="x", stop_reason=StopReason.EOS)],
    )  # fmt: skip
    render = TurnRenderer(tokenizer, cfg, vocab_size=len(tokenizer), tools=[ADD])
    answers = [{"role": "tool", "name": "add", "content": "2"}]
    made = render(sample, Observation(answers))
    assert made.messages == (*answers,)
    said = {"role": "assistant", "content": "x"}
    whole = in_transformers([*ASKED, said, *answers], [ADD, ROW])
    assert whole == f"{prompt.text}x{made.text}"


def test_a_row_with_a_tool_of_the_same_name_is_refused(tmp_path):
    cfg = config(tmp_path, {}, {"tools": [tool("mul"), tool("add")]})
    with pytest.raises(UserError, match=r"rows\.jsonl, line 2: column 'tools' has the tool 'add'"):
        load_prompts(cfg, char_tokenizer(TAKES_TOOLS), tools=[ADD])


@pytest.mark.parametrize(
    ("template", "text"),
    [
        (CHATML, "does not write the environment's tool 'add'"),
        (ONLY_FIRST, "does not write the environment's tool 'mul'"),
        (REFUSES, "does not accept the environment's tools .*no tools, please"),
        (None, "prompts are rendered without one"),
    ],
)
def test_a_template_that_does_not_write_the_tools_is_refused(template, text):
    with pytest.raises(UserError, match=text):
        Renderer(char_tokenizer(template), DataConfig(train=()), tools=[ADD, MUL])


def test_without_tools_of_the_environment_such_a_template_is_taken():
    Renderer(char_tokenizer(CHATML), DataConfig(train=()))
