"""Calls of tools are read as the families' chat templates write them."""

import json
import random
import re
import time
from typing import get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS
from transformers.utils.chat_parsing import parse_response

from hone.envs.session import Action, ToolCall
from hone.envs.tools.formats.found import MAX_ERRORS
from hone.envs.tools.formats.invoke_calls import DSML
from hone.envs.tools.formats.registry import FORMATS, detect, format_of, parse
from hone.envs.tools.reading import argument_schemas, read_action
from hone.errors import UserError
from hone.rollout.settings import ToolFormatName
from tests.envs.tools.templates import (
    AS_TEXT,
    FORMAT_OF,
    PLAIN_KEYS,
    PYTHONIC,
    STEP3,
    TEMPLATES,
    WHOLE_TURN,
    WRITES_IDS,
    written,
)

ANY = {"type": ["null", "boolean", "integer", "number", "array", "object"]}
WORDS = st.from_regex(r"[a-z_][a-z0-9_]{0,8}", fullmatch=True)
TEXTS = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)
PLAIN = st.text("abc xyz.,\u00e9\n", max_size=12)
NUMBERS = st.integers(-(10**12), 10**12) | st.floats(allow_nan=False, allow_infinity=False)
LEAVES = st.none() | st.booleans() | NUMBERS


def values(texts, keys=None):
    keys = texts if keys is None else keys
    return st.recursive(
        LEAVES | texts,
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys, inner, max_size=3),
        max_leaves=6,
    )


def calls_of(template):
    """Calls that the template can write so that they can be read: formats without quotes or
    escapes cannot carry every text."""
    if template in PYTHONIC:
        arguments = st.dictionaries(WORDS, PLAIN | LEAVES, max_size=3)
        nested = st.dictionaries(WORDS, st.lists(NUMBERS | PLAIN, max_size=2), max_size=2)
        arguments = arguments | nested
    elif template in AS_TEXT:
        arguments = st.dictionaries(WORDS, PLAIN | values(PLAIN), max_size=3)
    elif template in PLAIN_KEYS:
        arguments = st.dictionaries(WORDS, values(TEXTS, WORDS), max_size=3)
    else:
        arguments = st.dictionaries(WORDS | TEXTS, values(TEXTS), max_size=3)
    ids = st.from_regex(r"[a-zA-Z0-9]{9}", fullmatch=True)
    call = st.builds(
        lambda name, arguments, id: ToolCall(name=name, arguments=arguments, id=id),
        WORDS,
        arguments,
        ids,
    )
    return st.lists(call, min_size=1, max_size=3)


def schemas_of(calls):
    """Schemas that say of each argument whether it is a text."""
    return {
        call.name: {
            "properties": {
                key: {"type": "string"} if isinstance(value, str) else ANY
                for other in calls
                if other.name == call.name
                for key, value in other.arguments.items()
            }
        }
        for call in calls
    }


@pytest.mark.parametrize("template", sorted(TEMPLATES))
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_what_a_template_writes_is_read_back(template, data):
    calls = data.draw(calls_of(template))
    if template in AS_TEXT:  # one schema per name, so one call per name
        calls = [*{call.name: call for call in calls}.values()]
    content = "" if template in WHOLE_TURN else data.draw(st.text("ab \u00e9.", max_size=9))
    text = written(template, content, calls)

    parsed = parse(text, FORMAT_OF.get(template, template), schemas_of(calls))

    assert parsed.parse_error == "", text
    assert [(x.name, x.arguments) for x in parsed.calls] == [(x.name, x.arguments) for x in calls]
    assert parsed.content == content.strip()
    if template in WRITES_IDS:
        assert [x.id for x in parsed.calls] == [x.id for x in calls]
    if template == "kimi_k2":
        assert [x.id for x in parsed.calls] == [
            f"functions.{x.name}:{n}" for n, x in enumerate(calls)
        ]


NASTY = {
    "text": 'he said "no"\n\\ and it\'s 5 > 3 & \u00e9 \u6c49 \U0001f600',
    "empty": "", "blank": "  ",
    "like_a_number": "12", "like_null": "null", "big": 2**70, "negative": -1, "small": 1e-7,
    "whole": 3.0, "yes": True, "no": False, "none": None, "no_entries": [], "no_keys": {},
    "nested": {"a": [1, {"b": "x\ty", "c": [[]]}, None, "true"], "d": -2.5},
}  # fmt: skip
PLAIN_NASTY = {key: value for key, value in NASTY.items() if key not in ("text", "nested")} | {
    "text": "two\nlines \u6c49", "nested": [1, [2.5, []], "true"],
}  # fmt: skip


@pytest.mark.parametrize("template", sorted(TEMPLATES))
def test_nasty_arguments_come_back_with_their_types(template):
    arguments = PLAIN_NASTY if template in PYTHONIC else NASTY
    calls = [ToolCall(name="f", arguments=arguments, id="abcdefghi"),
             ToolCall(name="g", arguments={}, id="abcdefghj")]  # fmt: skip
    parsed = parse(
        written(template, "", calls), FORMAT_OF.get(template, template), schemas_of(calls)
    )
    assert parsed.parse_error == ""
    first, second = parsed.calls
    # By their texts, as 3.0 == 3 and True == 1.
    assert json.dumps(first.arguments, sort_keys=True) == json.dumps(arguments, sort_keys=True)
    assert second.arguments == {}


@pytest.mark.parametrize("template", sorted(TEMPLATES))
def test_a_turn_that_is_cut_off_runs_only_whole_calls(template):
    arguments = {"a": "one two", "b": [12, {"c": 3.5}], "d": 789}
    calls = [ToolCall(name=name, arguments=arguments, id="abcdefghi") for name in ("f", "gg")]
    text, form, schemas = (
        written(template, "", calls), FORMAT_OF.get(template, template), schemas_of(calls),
    )  # fmt: skip
    marks = (*FORMATS[form].marks, *FORMATS[form].around)
    expected, seen = [(call.name, call.arguments) for call in calls], set()
    for end in range(len(text) + 1):
        parsed = parse(text[:end], form, schemas)
        found = [(call.name, call.arguments) for call in parsed.calls]
        assert found == expected[: len(found)], text[:end]
        assert found or parsed.parse_error or not any(mark in text[:end] for mark in marks)
        seen.add(len(found))
    assert seen >= {0, 2}


SAYS_MORE = sorted({*TEMPLATES} - WHOLE_TURN - {"harmony", "harmony_template"})


@pytest.mark.parametrize("template", SAYS_MORE)
def test_what_stands_behind_the_calls_is_said(template):
    text = written(template, "Before.", [ToolCall(name="f", arguments={"x": 1}, id="abcdefghi")])
    parsed = parse(f"{text}\nAfter.", FORMAT_OF.get(template, template), {})
    assert len(parsed.calls) == 1
    assert "".join(parsed.content.split()) == "Before.After."


@pytest.mark.parametrize("form", ["cohere", "ernie45"])
def test_marks_around_an_answer_are_no_part_of_it(form):
    opening, closing, *_ = FORMATS[form].framing
    parsed = parse(f"{opening}\nIt is 7.\n{closing}", form, {})
    assert (parsed.content, parsed.calls, parsed.parse_error) == ("It is 7.", (), "")


@pytest.mark.parametrize("template", sorted({*TEMPLATES} - {"harmony", "harmony_template"}))
@pytest.mark.parametrize("opened", [False, True])
def test_reasoning_is_cut_off_whether_the_prompt_or_the_turn_opens_it(template, opened):
    name = FORMAT_OF.get(template, template)
    opening, closing = FORMATS[name].reasoning
    if template == "seed_oss":
        opening, closing = "<seed:think>", "</seed:think>"
    call = ToolCall(name="f", arguments={"x": 1})
    mark = next(iter(FORMATS[name].marks), "[")
    text = f"{'' if opened else opening}\nwith {mark} or not?{closing}\n\n" + written(
        template, "", [call]
    )

    parsed = parse(text, name, {"f": {}}, opened=f"{opening}\n" if opened else "")

    assert parsed.reasoning == f"with {mark} or not?"
    assert [(x.name, x.arguments) for x in parsed.calls] == [("f", {"x": 1})]
    assert parsed.parse_error == ""


def test_reasoning_that_no_tag_ends_runs_no_call():
    call = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    for text, opened in ((f"<think>so {call}", ""), (f"so {call}", "<think>")):
        parsed = parse(text, "hermes", {}, opened=opened)
        assert parsed.calls == ()
        assert "reasoning" in parsed.parse_error
    assert parse("<think>so", "hermes", {}).parse_error == ""


def test_a_closing_tag_of_reasoning_in_an_argument_stays_there():
    text = '<tool_call>{"name": "f", "arguments": {"x": "</think>"}}</tool_call>'
    assert parse(text, "hermes", {}).calls[0].arguments == {"x": "</think>"}


def test_analysis_of_harmony_is_reasoning_and_its_final_message_the_content():
    text = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>yes"
    parsed = parse(text, "harmony", {})
    assert (parsed.reasoning, parsed.content, parsed.calls) == ("hm", "yes", ())
    assert parsed.parse_error == ""


SCHEMAS = {
    "f": {
        "properties": {
            "text": {"type": "string"},
            "count": {"type": "integer"},
            "maybe": {"type": "string", "nullable": True},
            "either": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
            "flag": {"type": "boolean"},
            "many": {"type": "array", "items": {"type": "integer"}},
            "chosen": {"enum": ["a", "1"]},
        }
    }
}


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("text", "12", "12"),
        ("text", "[1]", "[1]"),
        ("text", " two\nlines ", " two\nlines "),
        ("count", "12", 12),
        ("count", " 12 ", 12),
        ("count", "twelve", "twelve"),
        ("count", "1.5", "1.5"),
        ("maybe", "null", None),
        ("maybe", "None", None),
        ("maybe", "no", "no"),
        ("either", "7", 7),
        ("either", "seven", "seven"),
        ("flag", "True", True),
        ("flag", "false", False),
        ("many", "[1, 2]", [1, 2]),
        ("many", "1, 2", "1, 2"),
        ("chosen", "1", "1"),
        ("unknown", "3", 3),
        ("unknown", "three", "three"),
    ],
)
def test_the_schema_says_what_an_argument_without_quotes_is(name, text, value):
    for turn, form in (
        (f"<function=f><parameter={name}>{text}</parameter></function>", "qwen3_coder"),
        (
            f"<tool_call>f<arg_key>{name}</arg_key><arg_value>{text}</arg_value></tool_call>",
            "glm45",
        ),
    ):
        (call,) = parse(turn, form, SCHEMAS).calls
        assert call.arguments == {name: value}
        assert type(call.arguments[name]) is type(value)


MALFORMED = {
    "hermes": ['<tool_call>{"name": "f", "arguments": {"x": 1}', "<tool_call>f()</tool_call>",
               '{"name": "f", "arguments": {}}</tool_call>', "<tool_call></tool_call>",
               '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
               '<tool_call>{"name": "", "arguments": {}}</tool_call>',
               '<tool_call>{"name": "f", "arguments": {"x": NaN}}</tool_call>',
               '<tool_call>{"name": "f", "arguments": {"x": 1e999}}</tool_call>',
               '<tool_call>{"name": "f", "arguments": {"x": "\\ud800"}}</tool_call>',
               '<tool_call>{"name": "f", "arguments": "no JSON"}</tool_call>',
               '<tool_call>{"name": "f", "arguments": {}} and more</tool_call>'],
    "qwen3_coder": ["<tool_call>\n<function=f>\n<parameter=x>\n1", "<tool_call>{}</tool_call>",
                    "<function=f><parameter=x>1</function>", "x</function>", "<function=>"
                    "</function>", "words</tool_call>"],
    "llama3_json": ['{"name": "f", "parameters": {"x": ', "<|python_tag|>print(1)",
                    '{"name": "f", "parameters": 3}', "<|python_tag|>",
                    '{"name": "f", "parameters": {}}; {"nam'],
    "mistral": ["[TOOL_CALLS]", '[TOOL_CALLS][{"name": "f"', "[TOOL_CALLS]f[ARGS]", "f[ARGS]{}",
                "[TOOL_CALLS][]", '[TOOL_CALLS][{"nome": "f"}]'],
    "deepseek_v3": [f"{deepseek}" for deepseek in ()],
    "glm45": ["<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1", "<tool_call>", "f</tool_call>",
              "<tool_call>f <arg_value>1</arg_value></tool_call>"],
    "kimi_k2": ["<|tool_calls_section_begin|>f", "<|tool_call_begin|>functions.f:0",
                "<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{<|tool_call_end|>"],
    "phi4": ['functools[{"name": "f"', "<|tool_call|>f()<|/tool_call|>", "functools[]"],
    "granite": ["<|tool_call|>f()", '<|tool_call|>[{"name": "f", "arguments": ', "<tool_call>"],
    "olmo3": ["<function_calls>\nf(x=1", "<function_calls>\nf(1)\n</function_calls>",
              "<function_calls></function_calls>", "f(x=1)</function_calls>",
              "<function_calls>f(x=g())</function_calls>", "<function_calls>f(x='a)"],
    "lfm2": ["<|tool_call_start|>[f(x=1)", "<|tool_call_start|>f(x=1)<|tool_call_end|>",
             "<|tool_call_start|>[]<|tool_call_end|>"],
    "pythonic": ["[f(x=1", "[f(x=y)]", "<|python_start|>print(1)<|python_end|>",
                 "[f(x=1), and so on"],
    "gemma4": ['<|tool_call>call:f{x:<|"|>1', "<|tool_call>call:f{x:1",
               "<|tool_call>f{}<tool_call|>", "<|tool_call>call:f{x:-}<tool_call|>",
               "<|tool_call>call:f{x:one}<tool_call|>", "<|tool_call>call:f{x}<tool_call|>",
               "<|tool_call>call:f{x:1e999}<tool_call|>", "<|tool_call>call:f{}.<tool_call|>",
               "<|tool_call>", "call:f{}<tool_call|>", "<|tool_call>call:f{x:[1}<tool_call|>",
               f"<|tool_call>call:f{{x:{'[' * 99}{']' * 99}}}<tool_call|>",
               '<|tool_call>call:f{x:"\\ud800"}<tool_call|>'],
    "functiongemma": ["<start_function_call>call:f{x:<escape>1", "<start_function_call>",
                      "<start_function_call>call:f{x:<escape>1<escape><end_function_call>"],
    "cohere": ["<|START_ACTION|>[", '<|START_ACTION|>[{"tool_name": 1}]<|END_ACTION|>',
               "<|START_ACTION|>[]<|END_ACTION|>", "<|START_ACTION|>[1]<|END_ACTION|>",
               "<|END_ACTION|>",
               '<|START_ACTION|>[{"tool_name": "f", "parameters": []}]<|END_ACTION|>'],
    "apertus": ['<|tools_prefix|>[{"f": {"x": 1}', "<|tools_prefix|>{}<|tools_suffix|>",
                '<|tools_prefix|>[{"f": {}, "g": {}}]<|tools_suffix|>', "<|tools_suffix|>"],
    "hunyuan": ["<tool_calls></tool_calls>", "<tool_calls>[]</tool_calls>", "<tool_calls>[{",
                '<tool_calls>[{"name": "f"}] and', "</tool_calls>"],
    "nemotron": ['<TOOLCALL>[{"name": "f", "arguments": "x"}]</TOOLCALL>', "<TOOLCALL>[",
                 '<TOOLCALL>{"name": "f"}</toolcall>', "</TOOLCALL>"],
    "internlm": ["<|action_start|><|interpreter|>\nprint(1)<|action_end|>", "<|action_start|>",
                 '<|action_start|><|plugin|>{"name": "f"', "<|action_end|>"],
    "xlam": ['[{"name": "f", "arguments": {"x": 1}', '[{"name": "f", "arguments": 3}]',
             '```json\n[{"name": "f", "arguments"',
             '[{"name": "f", "arguments": {}}, {"nome": "g"}]'],
    "ernie45": ['<tool_call>{"name": "f"', "<tool_call>f()</tool_call>"],
    "longcat": ["<longcat_tool_call>f\n", '<longcat_tool_call>{"name": "f"', "</longcat_tool_call>",
                "<longcat_tool_call>f<longcat_arg_key>x</longcat_arg_key><longcat_arg_value>1"],
    "minimax_m2": ['<minimax:tool_call><invoke name="f"><parameter name="x">1', "</invoke>",
                   "<minimax:tool_call>f()</minimax:tool_call>", "<invoke>", '<invoke name="f">and',
                   '<invoke name=""></invoke>', '<parameter name="x">1</parameter>'],
    "deepseek_v32": [f'<{DSML}invoke name="f"><{DSML}parameter name="x" string="false">a'
                     f"</{DSML}parameter></{DSML}invoke>", f"<{DSML}function_calls>f",
                     f'<{DSML}invoke name="f">{{"x": 1', f'<{DSML}invoke name="f">{{"x": 1}}.',
                     f'<{DSML}invoke name="f"><{DSML}parameter name="x" string="true">1',
                     f'<{DSML}parameter name="x">', f"<{DSML}tool_calls></{DSML}tool_calls>"],
    "step3": ['<steptml:invoke name="f"><steptml:parameter name="x">1', "<steptml:invoke>",
              f"{STEP3[0]}{STEP3[1]}function{STEP3[2]}f{STEP3[3]}"],
    "harmony": ["<|channel|>commentary to=functions.f <|constrain|>json<|message|>{",
                "<|channel|>commentary to=functions.f <|constrain|>json"],
}  # fmt: skip
MALFORMED["deepseek_v3"] = [
    text.format(b=b, s=s, e=e)
    for b, s, e in [["<\uff5ctool\u2581call\u2581begin\uff5c>", "<\uff5ctool\u2581sep\uff5c>",
                     "<\uff5ctool\u2581call\u2581end\uff5c>"]]
    for text in ["{b}function{s}f\n```json\n[1]\n```{e}", "{b}f{s}", "{b}f", "f{s}{{}}{e}",
                 "{b}function{s}f\n```json\n{{"]
]  # fmt: skip


@pytest.mark.parametrize(
    ("form", "text"), [(form, text) for form, texts in MALFORMED.items() for text in texts]
)
def test_what_looks_like_a_call_and_is_none_is_a_parse_error(form, text):
    parsed = parse(text, form, {})
    assert parsed.parse_error, parsed
    assert [call.name for call in parsed.calls] in ([], ["f"])


def test_every_format_has_malformed_calls():
    assert MALFORMED.keys() == FORMATS.keys()


def test_a_malformed_call_leaves_the_others():
    good = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parsed = parse(f"{good}<tool_call>{{'name'}}</tool_call>and{good}", "hermes", {})
    assert len(parsed.calls) == 2
    assert "Expecting property name" in parsed.parse_error
    assert parsed.content == "and"
    parsed = parse('[TOOL_CALLS][{"name": "f"}, {"nome": "g"}, {"name": "h"}]', "mistral", {})
    assert [call.name for call in parsed.calls] == ["f", "h"]
    assert "nome" in parsed.parse_error


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_a_plain_answer_has_no_calls(form):
    for text in ("", "42", "The answer is [3, 4].", '{"answer": 42}', '{"name": "Bob", "age": 3}'):
        parsed = parse(text, form, {})
        assert (parsed.calls, parsed.parse_error, parsed.content) == ((), "", text)


def test_arguments_as_json_in_a_text_are_read():
    text = '<tool_call>{"name": "f", "arguments": "{\\"x\\": 1}"}</tool_call>'
    assert parse(text, "hermes", {}).calls[0].arguments == {"x": 1}


def test_calls_written_as_python_may_have_all_its_constants():
    text = (
        "[f(a='it\\'s', b=\"\\u00e9\\n\", c=(1, -2.5, +3e2), d={'k': [None, true, False]}, "
        "e='''two\nlines''', f=\"\"\"q\"\"\"), g()]"
    )
    first, second = parse(text, "pythonic", {}).calls
    assert first.arguments == {
        "a": "it's", "b": "\u00e9\n", "c": [1, -2.5, 300.0],
        "d": {"k": [None, True, False]}, "e": "two\nlines", "f": "q",
    }  # fmt: skip
    assert (second.name, second.arguments) == ("g", {})


# --------------------------------------------------------------------- hostile texts


PIECES = sorted(
    {mark for form in FORMATS.values() for mark in (*form.marks, *form.around)}
    | {pair for form in FORMATS.values() for pair in form.reasoning or ()}
    | set('{}[]()<>"\\\'`:;,=fx1 \n')
    | {'{"name": "f", "arguments": {', '"a": "', "<function=f>", "<parameter=x>", "[f(x=", "'''",
       "functools[", "call:f{x:", '<|"|>', "<escape>", f'<{DSML}invoke name="f">', "```json",
       '<invoke name="f">', '<parameter name="x">', '<steptml:invoke name="f">', "<|plugin|>",
       '[{"name": "f", "arguments": ', '{"f": {', "<|channel|>", "<|message|>", "<|end|>",
       "\\ud800", "null", "<arg_value>",
       "</arg_value>", "</arg_key>", "```json\n", "functions.f:0", "[CALL_ID]", "-", "1e9",
       "\ud800"}
)  # fmt: skip


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), st.lists(st.sampled_from(PIECES), max_size=25))
def test_no_text_raises_and_none_is_lost(form, pieces):
    text = "".join(pieces)
    parsed = parse(text, form, {"f": {"properties": {"x": {"type": "integer"}}}})
    json.dumps([call.arguments for call in parsed.calls], allow_nan=False)
    marks = FORMATS[form].marks
    if any(mark in text for mark in marks) and not parsed.calls and form != "harmony":
        assert parsed.parse_error or any(mark in parsed.reasoning for mark in marks)


@pytest.mark.parametrize("form", sorted(FORMATS))
def test_long_hostile_texts_take_linear_time(form):
    """A quadratic reader takes minutes of CPU time for these; a linear one takes far less than a
    second for each."""
    random.seed(0)
    pieces = [*PIECES, *FORMATS[form].marks * 4]
    texts = [(piece * 10**6)[: 3 * 10**5] for piece in pieces]
    texts += ["".join(random.choices(pieces, k=40)) * 2000 for _ in range(4)]
    valid = [t for t in TEMPLATES if FORMAT_OF.get(t, t) == form]
    texts += [written(t, "", [ToolCall(name="f", arguments={"x": 1})] * 5000) for t in valid]
    start = time.process_time()
    for text in texts:
        parse(text, form, {})
    assert time.process_time() - start < 60


def test_reading_stops_after_many_malformed_calls_and_says_so():
    good = '<tool_call>{"name": "f", "arguments": {}}</tool_call>'
    parsed = parse(good + "<tool_call>x</tool_call>" * 1000 + good, "hermes", {})
    assert len(parsed.calls) == 1
    assert parsed.parse_error.count("no valid JSON") == 3
    assert f"and {MAX_ERRORS - 2} more" in parsed.parse_error


def test_deep_values_are_refused():
    for depth in (200, 10**5):
        text = f'<tool_call>{{"name": "f", "arguments": {{"x": {"[" * depth}{"]" * depth}}}}}'
        assert parse(text, "hermes", {}).parse_error
        assert parse(f"[f(x={'[' * depth}{']' * depth})]", "pythonic", {}).parse_error


# ------------------------------------------------------------------ transformers' parser


def response_template(model_type):
    return next(v for names, v in _RESPONSE_TEMPLATE_FALLBACKS.items() if model_type in names)


@settings(max_examples=20, deadline=None)
@given(calls_of("hermes"), st.text("ab .", max_size=9), st.booleans())
def test_turns_of_qwen_are_read_as_by_transformers(calls, content, thinks):
    text = ("<think>\nso\n</think>\n\n" if thinks else "") + written("hermes", content, calls)
    theirs = parse_response(text, response_template("qwen3"), prefix="")
    ours = parse(text, "hermes", {})
    assert [{"name": x.name, "arguments": x.arguments} for x in ours.calls] == [
        x["function"] for x in theirs["tool_calls"]
    ]
    assert ours.content == theirs.get("content", "").strip()
    assert ours.reasoning == theirs.get("thinking", "").strip()


@settings(max_examples=20, deadline=None)
@given(
    st.dictionaries(
        WORDS,
        st.recursive(
            PLAIN | st.integers() | st.booleans(),
            lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3),
            max_leaves=5,
        ),
        max_size=3,
    ),
    st.booleans(),
)
def test_turns_of_gemma_4_are_read_as_by_transformers(arguments, thinks):
    calls = [ToolCall(name=name, arguments=arguments) for name in ("f", "g")]
    text = ("<|channel>thought\nso<channel|>" if thinks else "") + written("gemma4", "", calls)
    theirs = parse_response(text, response_template("gemma4"), prefix="")
    ours = parse(text, "gemma4", {})
    assert [{"name": x.name, "arguments": x.arguments} for x in ours.calls] == [
        x["function"] for x in theirs["tool_calls"]
    ]
    assert ours.reasoning == theirs.get("thinking", "").strip()


@settings(max_examples=20, deadline=None)
@given(st.dictionaries(WORDS, st.text("abc", min_size=1, max_size=5) | st.integers(), max_size=3))
def test_turns_of_qwen_3_5_are_read_as_by_transformers(arguments):
    call = ToolCall(name="f", arguments=arguments)
    schema = schemas_of([call])["f"] | {"type": "object"}
    for key, value in arguments.items():
        schema["properties"][key] = {"type": "string" if isinstance(value, str) else "integer"}
    tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
    text = written("qwen3_coder", "", [call])
    theirs = parse_response(text, response_template("qwen3_5"), prefix="", tools=[tool])
    (ours,) = parse(text, "qwen3_coder", argument_schemas([tool])).calls
    assert ours.arguments == theirs["tool_calls"][0]["function"]["arguments"] == arguments


# --------------------------------------------------------------------------- detection


@pytest.mark.parametrize("template", sorted(TEMPLATES))
def test_the_format_is_found_from_the_template(template):
    expected = FORMAT_OF.get(template, template)
    asked = {
        "llama3_json": 'Respond in the format {"name": function name, "parameters": dictionary}.',
        "pythonic": "[func_name1(params_name1=params_value1), ...]",
        "xlam": "When using tools, make calls in a single JSON array:",
        "xlam_fence": "When using tools, make calls in a single JSON array:",
        "phi4_marks": "<|tool|>{{ tools }}<|/tool|>",
    }.get(template, TEMPLATES[template])
    assert detect(asked) == format_of("auto", asked) == expected
    assert format_of("hermes", asked) == "hermes"


def test_an_unknown_template_is_refused_with_the_names():
    for template in (None, "{{ messages }}"):
        with pytest.raises(UserError, match=r"env\.tool_format.*glm45, .*hermes.*auto") as caught:
            detect(template)
        assert ("is missing" in str(caught.value)) == (template is None)


# ------------------------------------------------------------------------------ actions


def action(text, **fields):
    fields = {"index": 0, "must_end": False, "stop_reason": "eos", "tokens_left": 9} | fields
    return Action(text=text, token_ids=(1,), content=text, **fields)


def test_an_action_gets_what_its_text_says():
    given = action('<think>so</think>Hi<tool_call>{"name": "f"}</tool_call><tool_call>')
    read = read_action(given, "hermes", {})
    assert (read.content, read.reasoning) == ("Hi", "so")
    assert read.tool_calls == (ToolCall(name="f", arguments={}),)
    assert "before the call is complete" in read.parse_error
    assert (read.text, read.index) == (given.text, given.index)


def test_the_content_of_a_plain_turn_is_its_text():
    given = action(" Hello.<|special|> ")
    assert read_action(given, "hermes", {}).content == given.text


def test_calls_of_mistral_without_id_get_one_of_nine_characters():
    read = read_action(action("[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]g[ARGS]{}", index=3), "mistral", {})
    ids = [call.id for call in read.tool_calls]
    assert all(re.fullmatch(r"[a-zA-Z0-9]{9}", id) for id in ids)
    assert len({*ids}) == 2
    for id, expected in (
        ("abcdefghi", "abcdefghi"),
        ("a", "t0000c000"),
        ("a" * 8 + "-", "t0000c000"),
    ):
        read = read_action(action(f'[TOOL_CALLS][{{"name": "f", "id": "{id}"}}]'), "mistral", {})
        assert read.tool_calls[0].id == expected


def test_the_key_of_the_recipe_allows_these_formats():
    assert {*get_args(ToolFormatName)} == {"auto", *FORMATS}
