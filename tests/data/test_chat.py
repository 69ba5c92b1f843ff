"""R6, data part: text becomes ids once, and those ids are measured, stored and sent."""

import json
import logging
import random
from collections.abc import Callable
from datetime import date
from decimal import Decimal
from pathlib import Path

import pyarrow.parquet
import pytest
from transformers import PreTrainedTokenizerFast

from hone.config.tree import PairsDataConfig, SFTDataConfig
from hone.data.chat import Demonstration, Rendered, Renderer
from hone.data.columns import choose_columns, map_rows
from hone.data.pairs import load_pairs
from hone.data.prompts import load_prompts
from hone.data.settings import DataConfig, PairSourceConfig, SourceConfig
from hone.data.sft import load_sft
from hone.data.sources import SourceRow
from hone.data.turns import TurnRenderer
from hone.errors import UserError
from hone.models.tiny import make_bpe_tokenizer, make_char_tokenizer
from hone.rollout.judge import Transcripts
from hone.types import Observation, Prompt, Sample, StopReason, Turn
from tests.data.support import (
    CHATML,
    NO_SYSTEM,
    REWRITES_HISTORY,
    SPELLS_BOS,
    STRIPS_THINKING,
    TAKES_TOOLS,
    bpe_tokenizer,
    char_tokenizer,
    write_rows,
)
from tests.tables import table

TEMPLATES = {
    "chatml": CHATML,
    "spells bos": SPELLS_BOS,
    "strips thinking": STRIPS_THINKING,
    "rewrites history": REWRITES_HISTORY,
    "plain": None,
}
TOKENIZERS: dict[str, Callable[[str | None], PreTrainedTokenizerFast]] = {
    "char": char_tokenizer,
    "bpe": bpe_tokenizer,
}


def dialogue(num_turns: int, seed: int = 0) -> list[dict]:
    """User, thinking assistant and tool, turn by turn; the last turn is not the assistant's."""
    words = random.Random(seed)
    turns: list[dict] = [{"role": "system", "content": "use the tool 12345"}]
    while len(turns) < num_turns:
        number = words.randint(0, 10**6)
        turns += [
            {"role": "user", "content": f"what is abba {number}?"},
            {"role": "assistant", "content": f"<think>aab {number}</think> call {number}"},
            {"role": "tool", "content": f'{{"result": {number}}}'},
        ]
    return turns


def examples_of(prompts: list, completions: list | None = None):
    rows = [{"prompt": prompt} for prompt in prompts]
    if completions:
        rows = [{**row, "completion": c} for row, c in zip(rows, completions, strict=True)]
    located = [SourceRow(row, f"f, line {i}") for i, row in enumerate(rows, start=1)]
    source = SourceConfig(path="f.jsonl")
    columns = choose_columns(located, source, demonstrations=completions is not None)
    return map_rows(located, source, columns, name="f")


def render(tokenizer, prompts: list, **settings) -> list[Rendered]:
    cfg = DataConfig(train=(), **settings)
    return Renderer(tokenizer, cfg).prompts(examples_of(prompts))


class CountingTokenizer(PreTrainedTokenizerFast):
    """Counts how often a chat template is applied."""

    num_rendered = 0

    def apply_chat_template(self, *args, **kwargs):
        self.num_rendered += 1
        return super().apply_chat_template(*args, **kwargs)


# --------------------------------------------------------------------------- R6: prompts


def reference_ids(tokenizer, messages: list[dict]) -> list[int]:
    """The library's own rendering straight to ids; the twin of `Renderer.prompts`."""
    rendered = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True)
    return list(rendered["input_ids"])


def check_stored_ids(folder, tokenizer) -> None:
    """What a prompt stores is what the template gives, and what the length filter measured."""
    dialogues = [dialogue(num, seed=num) for num in (2, 5, 20, 21, 20, 60)]
    path = write_rows(folder / "d.jsonl", [{"messages": turns} for turns in dialogues])
    expected = [reference_ids(tokenizer, turns) for turns in dialogues]
    limit = sorted(map(len, expected))[3]
    cfg = DataConfig(train=(SourceConfig(path=path),), max_prompt_tokens=limit, shuffle=False)
    data = load_prompts(cfg, tokenizer, seed=0)
    kept = [ids for ids in expected if len(ids) <= limit]
    stored = data.train.take(len(kept))
    assert [list(prompt.token_ids) for prompt in stored] == kept
    assert len(data.train) == len(kept)
    measured = {row.id: row.num_tokens for row in data.report.dropped}
    too_long = {f"d:{i}": len(ids) for i, ids in enumerate(expected, start=1) if len(ids) > limit}
    assert measured == too_long


@table("template", ["chatml", "spells bos", "strips thinking"])
@table("kind", TOKENIZERS)
def test_R6_stored_ids_are_the_rendered_ids(tmp_path, kind, template):
    check_stored_ids(tmp_path, TOKENIZERS[kind](TEMPLATES[template]))


def test_R6_holds_for_the_tokenizers_of_the_quick_start(tmp_path):
    text = "".join(map(chr, range(32, 127))) + "\n"
    check_stored_ids(tmp_path, make_char_tokenizer(text))
    check_stored_ids(tmp_path, make_bpe_tokenizer(["what is abba 12345"] * 5, 300))


def tokenises_twice(self, examples, **_):
    """Ids of the decoded ids: begin-of-text doubles, and spelled special tokens are lost."""
    return [
        Rendered(prompt.text, tuple(self.tokenizer(prompt.text)["input_ids"]))
        for prompt in prompts_of(self, examples)
    ]


def drops_the_header(self, examples, **_):
    """The last turn's header is missing, as when `add_generation_prompt` is forgotten."""
    return [Rendered(p.text, p.token_ids[:-2]) for p in prompts_of(self, examples)]


def measures_the_content(self, examples, **_):
    """Ids of the messages' text alone, as a length filter before rendering would see them."""
    texts = ["".join(turn["content"] for turn in example.prompt) for example in examples]
    return [Rendered(text, tuple(self.tokenizer(text)["input_ids"])) for text in texts]


prompts_of = Renderer.prompts


@table("bug", [tokenises_twice, drops_the_header, measures_the_content])
def test_R6_planted_bugs_turn_the_ids_red(tmp_path, monkeypatch, bug):
    monkeypatch.setattr(Renderer, "prompts", bug)
    with pytest.raises(AssertionError):
        check_stored_ids(tmp_path, bpe_tokenizer(SPELLS_BOS))


def test_R6_a_dialogue_is_rendered_once():
    base = bpe_tokenizer(CHATML)
    tokenizer = CountingTokenizer(tokenizer_object=base.backend_tokenizer)
    tokenizer.chat_template = CHATML
    render(tokenizer, [dialogue(20, seed=i) for i in range(7)])
    assert tokenizer.num_rendered == 7 + 1  # what the template writes of this shape


# --------------------------------------------------------------------------- R6: demonstrations


def demonstrate(tokenizer, prompts: list, completions: list) -> list[Demonstration]:
    renderer = Renderer(tokenizer, DataConfig(train=()))
    return renderer.demonstrations(examples_of(prompts, completions))


TEXT_PROMPTS = ["what is 123", "aab", "the ab", "12345 6789", "a"]
TEXT_COMPLETIONS = ["45", "bab", "abba aab", "0", "bba 33"]


def check_demonstrations(tokenizer) -> None:
    """A demonstration goes on from exactly the ids that the model is asked with, and ends."""
    rows = demonstrate(tokenizer, TEXT_PROMPTS, TEXT_COMPLETIONS)
    asked = render(tokenizer, TEXT_PROMPTS)
    end = tokenizer.eos_token_id
    for row, prompt, completion in zip(rows, asked, TEXT_COMPLETIONS, strict=True):
        assert row.token_ids[: row.num_prompt_tokens] == prompt.token_ids
        learnt = row.token_ids[row.num_prompt_tokens :]
        assert learnt[-1] == end
        assert learnt.count(end) == 1
        assert tokenizer.decode(learnt[:-1]) == completion


@table("template", TEMPLATES)
@table("kind", TOKENIZERS)
def test_R6_demonstrations_go_on_from_the_prompt_as_asked(kind, template):
    check_demonstrations(TOKENIZERS[kind](TEMPLATES[template]))


def trusts_the_whole(self, example, prompt, text, whole):
    """The prompt's ids are cut from the rendering of prompt and answer, unchecked."""
    end = self.tokenizer.eos_token_id
    return Demonstration((*whole, end) if whole[-1] != end else whole, len(prompt.token_ids))


def re_encodes_the_row(self, example, prompt, text, whole):
    row = demonstration_of(self, example, prompt, text, whole)
    text = self.tokenizer.decode(row.token_ids, skip_special_tokens=False)
    ids = tuple(self.tokenizer(text, add_special_tokens=False)["input_ids"])
    return Demonstration(ids, row.num_prompt_tokens)


def keeps_the_tail(self, example, prompt, text, whole):
    return Demonstration(
        (*prompt.token_ids, *whole[len(prompt.token_ids) :]), len(prompt.token_ids)
    )


demonstration_of = Renderer._demonstration


@table(
    "bug, template",
    [
        (trusts_the_whole, REWRITES_HISTORY),
        (trusts_the_whole, None),
        (re_encodes_the_row, None),
        (keeps_the_tail, CHATML),
    ],
)
def test_R6_planted_bugs_turn_demonstrations_red(monkeypatch, bug, template):
    monkeypatch.setattr(Renderer, "_demonstration", bug)
    with pytest.raises(AssertionError):
        check_demonstrations(bpe_tokenizer(template))


def test_R6_ids_that_do_not_survive_decoding_are_kept():
    """The rows above are only a test if decoding and encoding would change them."""
    tokenizer = bpe_tokenizer()
    rows = demonstrate(tokenizer, TEXT_PROMPTS, TEXT_COMPLETIONS)
    decoded = [tokenizer.decode(row.token_ids[1:-1]) for row in rows]
    again = [tuple(tokenizer(text, add_special_tokens=False)["input_ids"]) for text in decoded]
    assert any(ids != row.token_ids[1:-1] for ids, row in zip(again, rows, strict=True))


def test_fields_of_a_rewritten_history_are_not_lost_silently():
    turns = [{"role": "assistant", "content": "b", "reasoning_content": "c"}]
    with pytest.raises(UserError, match=r"line 1: .*demonstration's reasoning_content cannot"):
        demonstrate(bpe_tokenizer(REWRITES_HISTORY), ["a"], [turns])
    assert demonstrate(bpe_tokenizer(CHATML), ["a"], [turns])


def test_demonstrations_need_an_end_token():
    tokenizer = char_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(UserError, match="no end-of-sequence token"):
        demonstrate(tokenizer, ["a"], ["b"])


# --------------------------------------------------------------------------- masks


def load_rows(folder, tokenizer, rows, **settings):
    path = write_rows(folder / "s.jsonl", rows)
    cfg = SFTDataConfig(train=(SourceConfig(path=path),), shuffle=False, **settings)
    data = load_sft(cfg, tokenizer, seed=0)
    return data.train.take(len(data.train))


@table("template", TEMPLATES)
def test_mask_covers_completion_and_end_alone(tmp_path, template):
    tokenizer = bpe_tokenizer(TEMPLATES[template])
    (row,) = load_rows(tmp_path, tokenizer, [{"prompt": "what is 1", "completion": "23 aab"}])
    trained = [i for i, mask in zip(row.token_ids, row.loss_mask, strict=True) if mask]
    assert tokenizer.decode(trained[:-1]) == "23 aab"
    assert trained[-1] == tokenizer.eos_token_id
    assert row.loss_mask == sorted(row.loss_mask)


def test_train_on_prompt_covers_all_but_the_first_token(tmp_path):
    rows = [{"prompt": "what is 1", "completion": "23 aab"}]
    (row,) = load_rows(tmp_path, bpe_tokenizer(CHATML), rows, train_on_prompt=True)
    assert row.loss_mask == [False] + [True] * (row.num_tokens - 1)


@table("chat", ["auto", "always", "never"])
def test_demonstrations_in_a_template_that_nobody_asked_for_are_told_once(tmp_path, caplog, chat):
    rows = [{"prompt": "1 + 1 =", "completion": "2"}, {"prompt": "1 + 2 =", "completion": "3"}]
    with caplog.at_level(logging.INFO):
        load_rows(tmp_path, bpe_tokenizer(CHATML), rows, chat=chat)
    told = "demonstrations are put into the tokenizer's chat template (with data.chat=never they"
    assert caplog.text.count(told) == (chat == "auto")
    assert ("the first one: '<|im_start|>user" in caplog.text) == (chat == "auto")


# --------------------------------------------------------------------------- modes and mistakes


def test_plain_prompts_begin_as_the_tokenizer_wants():
    tokenizer = char_tokenizer()
    (prompt,) = render(tokenizer, ["12"])
    assert list(prompt.token_ids) == tokenizer("12")["input_ids"]
    assert prompt.token_ids[0] == tokenizer.bos_token_id
    (prompt,) = render(make_char_tokenizer("12"), ["12"], chat="never")
    assert len(prompt.token_ids) == 2


def test_auto_uses_the_template_where_there_is_one():
    assert render(char_tokenizer(CHATML), ["hi"])[0].text.endswith("assistant\n")
    assert render(char_tokenizer(CHATML), ["hi"], chat="never")[0].text == "hi"
    assert render(char_tokenizer(), ["hi"])[0].text == "hi"


def test_system_prompt_comes_first():
    (prompt,) = render(char_tokenizer(CHATML), ["hi"], system_prompt="Be brief.")
    assert prompt.text.startswith("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi")


def test_prompt_template_fills_columns_and_leaves_other_braces():
    rows = [SourceRow({"question": "1+{prompt}", "unit": 5}, "f, line 1")]
    source = SourceConfig(path="f.jsonl")
    examples = map_rows(rows, source, choose_columns(rows, source), name="f")
    template = r"{prompt} in {unit}; {{unit}}; \boxed{} {"
    cfg = DataConfig(train=(), prompt_template=template)
    (prompt,) = Renderer(char_tokenizer(), cfg).prompts(examples)
    assert prompt.text == r"1+{prompt} in 5; {unit}; \boxed{} {"


WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
    },
}
CALCULATE = {
    "type": "function",
    "function": {
        "name": "calculate",
        "parameters": {"type": "object", "properties": {"sum": {"type": "string"}}},
    },
}
QUIET = {"enable_thinking": False}
ASKED = [{"role": "user", "content": "is it hot?"}]
CALLS = {
    "role": "assistant",
    "content": "wait",
    "tool_calls": [{"function": {"name": "weather", "arguments": {"city": "Bern"}}}],
}
CALCULATES = {
    "role": "assistant",
    "content": "so",
    "tool_calls": [{"function": {"name": "calculate", "arguments": {"sum": "1"}}}],
}
FOUND = {"role": "tool", "content": "30"}


def in_transformers(messages, **arguments) -> str:
    """The text as a user of transformers writes it."""
    return char_tokenizer(TAKES_TOOLS).apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **arguments
    )


def loaded_texts(path: Path) -> list[str]:
    cfg = DataConfig(train=(SourceConfig(path=str(path)),), max_prompt_tokens=2000, shuffle=False)
    data = load_prompts(cfg, char_tokenizer(TAKES_TOOLS), seed=0)
    return [prompt.text for prompt in data.train.take(len(data.train))]


TOOL_ROWS = {
    "tools": ({"tools": [WEATHER]}, {"tools": [WEATHER]}),
    "tools as JSON text": ({"tools": json.dumps([WEATHER])}, {"tools": [WEATHER]}),
    "nulls that the user writes": (
        {"tools": json.dumps([{**WEATHER, "default": None}])},
        {"tools": [{**WEATHER, "default": None}]},
    ),
    "variables": ({"chat_template_kwargs": QUIET}, QUIET),
    "both": ({"tools": [WEATHER], "chat_template_kwargs": QUIET}, {"tools": [WEATHER], **QUIET}),
    "none": ({"tools": [], "chat_template_kwargs": None}, {}),
}


@table("case", TOOL_ROWS)
def test_tools_and_variables_of_a_row_reach_the_template(case, tmp_path, caplog):
    columns, arguments = TOOL_ROWS[case]
    caplog.set_level(logging.INFO)
    for prompt in ("is it hot?", ASKED):
        write_rows(tmp_path / "t.jsonl", [{"prompt": prompt, **columns}])
        assert loaded_texts(tmp_path / "t.jsonl") == [in_transformers(ASKED, **arguments)]
    assert (f"gets the columns {' and '.join(columns)} of" in caplog.text) == bool(arguments)


def test_every_kind_of_row_shows_its_tools(tmp_path):
    """Demonstrations, pairs, what a reward model reads, and what an environment answers."""
    tokenizer = char_tokenizer(TAKES_TOOLS)
    row = {"messages": [*ASKED, CALLS], "tools": [WEATHER]}
    (found,) = load_rows(tmp_path, tokenizer, [row], max_tokens=2000)
    whole = tokenizer.apply_chat_template([*ASKED, CALLS], tools=[WEATHER], tokenize=False)
    assert json.dumps(WEATHER) in whole
    assert f"{tokenizer.decode(found.token_ids)}\n" == whole
    asked = in_transformers(ASKED, tools=[WEATHER])
    pair = {"prompt": ASKED, "chosen": "30", "rejected": "40", "tools": [WEATHER]}
    source = PairSourceConfig(path=write_rows(tmp_path / "p.jsonl", [pair]))
    cfg = PairsDataConfig(train=(source,), max_tokens=2000)
    (preference,) = load_pairs(cfg, tokenizer, seed=0).train.take(1)
    texts = [tokenizer.decode(row.token_ids) for row in preference.rows]
    assert texts == [f"{asked}30<|im_end|>", f"{asked}40<|im_end|>"]
    prompt = Prompt(
        id="a:1",
        token_ids=(1,),
        text=asked,
        unrendered=ASKED,
        messages=tuple(ASKED),
        metadata={"prompt": ASKED, "tools": [WEATHER]},
    )
    transcripts = Transcripts(
        tokenizer, DataConfig(train=()), max_tokens=2000, path="judge", vocab_size=1 << 17
    )
    ids = transcripts.of(prompt, "30", is_truncated=False).token_ids
    assert tokenizer.decode(ids) == f"{asked}30<|im_end|>\n"
    sample = Sample(
        id="0/0",
        prompt=prompt,
        index=0,
        token_ids=[5, tokenizer.eos_token_id],
        logprobs=[0.0] * 2,
        weight_versions=[0] * 2,
        loss_mask=[True] * 2,
        stop_reason=StopReason.EOS,
        turns=[Turn(start=0, end=2, text="a", stop_reason=StopReason.EOS)],
    )
    observed, *_ = TurnRenderer(tokenizer, DataConfig(train=()), vocab_size=len(tokenizer))(
        sample, Observation("hot")
    )
    assert observed == "<|im_end|>\n<|im_start|>user\nhot<|im_end|>\n<|im_start|>assistant\n"


def test_nulls_that_parquet_adds_do_not_reach_the_prompt(tmp_path):
    """Arrow gives each object the fields that any object of the column has, at any depth."""
    rows = [
        {
            "messages": [*ASKED, CALLS, FOUND],
            "tools": [WEATHER],
            "chat_template_kwargs": QUIET,
        },
        {
            "messages": [*ASKED, CALCULATES, FOUND],
            "tools": [CALCULATE],
            "chat_template_kwargs": {"length": {"most": 5}},
        },
    ]
    path = tmp_path / "p.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    assert loaded_texts(path) == [
        in_transformers(row["messages"], tools=row["tools"], **row["chat_template_kwargs"])
        for row in rows
    ]


def test_tools_that_no_template_writes_are_warned_of_once(caplog):
    rows = [SourceRow({"prompt": "a", "tools": [WEATHER]}, "f, line 1")]
    source = SourceConfig(path="f.jsonl")
    examples = map_rows(rows, source, choose_columns(rows, source), name="f")
    for template, is_warned in (("{prompt}", True), ("{prompt} {tools}", False)):
        caplog.clear()
        renderer = Renderer(char_tokenizer(), DataConfig(train=(), prompt_template=template))
        renderer.prompts(examples)
        renderer.prompts(examples)
        assert caplog.text.count("the model does not see the columns tools") == is_warned
    Renderer(char_tokenizer(CHATML), DataConfig(train=())).prompts(examples)
    assert caplog.text.count("the chat template does not write tools") == 1


NO_TOOLS = {
    "names of tools": ({"tools": ["weather"]}, r"f, line 1: column 'tools' .* \['weather'\]; mend"),
    "a text": ({"tools": "hammer"}, r"f, line 1: column 'tools' .* 'hammer'; mend"),
    "an object": ({"tools": WEATHER}, r"f, line 1: column 'tools' .* a list of JSON schemas"),
    "a list": ({"chat_template_kwargs": [1]}, r"f, line 1: .* an object of variables .* \[1\]"),
    "an argument of ours": (
        {"chat_template_kwargs": {"tokenize": True, "tools": [1]}},
        r"f, line 1: tokenize, tools in column 'chat_template_kwargs' would change how",
    ),
}


@table("case", NO_TOOLS)
def test_what_is_no_tool_is_refused(case):
    columns, message = NO_TOOLS[case]
    rows, source = (
        [SourceRow({"prompt": "a", **columns}, "f, line 1")],
        SourceConfig(path="f.jsonl"),
    )
    examples = map_rows(rows, source, choose_columns(rows, source), name="f")
    with pytest.raises(UserError, match=message):
        Renderer(char_tokenizer(TAKES_TOOLS), DataConfig(train=())).prompts(examples)


@table(
    "value, text",
    [
        (Decimal("3.50"), "3.50"),
        (date(2024, 2, 29), "2024-02-29"),
        ([{"city": "Bern", "sum": None}], '[{"city": "Bern"}]'),
        (None, r"f, line 1: column 'facts' holds null; put text"),
        (float("nan"), r"f, line 1: column 'facts' holds nan, which is no number"),
    ],
)
def test_a_column_in_a_prompt_template_is_its_text(value, text):
    rows = [SourceRow({"prompt": "a", "facts": value}, "f, line 1")]
    source = SourceConfig(path="f.jsonl")
    examples = map_rows(rows, source, choose_columns(rows, source), name="f")
    renderer = Renderer(char_tokenizer(), DataConfig(train=(), prompt_template="{prompt}{facts}"))
    if "line 1" in text:
        with pytest.raises(UserError, match=text):
            renderer.prompts(examples)
    else:
        assert renderer.prompts(examples)[0].text == f"a{text}"


TURNS = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
MISTAKES = {
    "always": (None, {"chat": "always"}, ["hi"], "has no chat template; give one in"),
    "system, no template": (None, {"system_prompt": "a"}, ["hi"], "system_prompt needs a chat"),
    "system, never": (
        CHATML,
        {"system_prompt": "a", "chat": "never"},
        ["hi"],
        "data.chat is 'never', the tokenizer has a template",
    ),
    "two systems": (
        CHATML,
        {"system_prompt": "a"},
        [TURNS],
        "line 1: .* system message of its own",
    ),
    "messages, no template": (None, {}, [TURNS], "line 1: .* list of chat messages, but"),
    "template of text": (
        CHATML,
        {"prompt_template": "Sum: {prompt}"},
        [TURNS],
        r"line 1: .* data.prompt_template 'Sum: \{prompt\}' is text around a prompt that is text",
    ),
    "template refuses": (NO_SYSTEM, {}, [TURNS], "line 1: .*System role not supported"),
    "unknown field": (
        None,
        {"prompt_template": "{prompt} {hint}"},
        ["hi"],
        r"line 1: .* names the column 'hint'; the row has prompt.* write \{\{hint\}\}",
    ),
    "no field": (None, {"prompt_template": "say {}"}, ["hi"], "names no column"),
    "unknown letter": (None, {}, ["hi", "h\u00e9", "ho"], "line 2: .* cannot encode .*: h\u00e9"),
    "half a surrogate pair": (None, {}, ["hi", "\ud800"], "line 2: .* cannot encode"),
}


@table("case", MISTAKES)
def test_R22_mistakes_are_named(case):
    template, settings, prompts, message = MISTAKES[case]
    with pytest.raises(UserError, match=message):
        render(char_tokenizer(template), prompts, **settings)


def test_a_prompt_of_no_tokens_is_refused():
    tokenizer = make_char_tokenizer("ab")
    tokenizer.chat_template = "{{ messages[0].content | trim }}"
    with pytest.raises(UserError, match="line 1: the prompt renders to no tokens"):
        render(tokenizer, [[{"role": "user", "content": " "}]])
