"""The answers of tools follow the policy's own tokens, as the template writes them after calls."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from hone.data.settings import DataConfig
from hone.data.template_check import RenderError
from hone.data.turns import TurnRenderer
from hone.errors import UserError
from hone.types import Message, Observation, Prompt, Sample, StopReason, Turn
from tests.data.calling_templates import (
    CLOSES_LATE,
    COHERE,
    DEEPSEEK_R1,
    DEEPSEEK_V31,
    DEEPSEEK_V32,
    ENDS_TEXTS,
    GEMMA4,
    GLM,
    LEAVES_OUT,
    MINIMAX,
    MISTRAL,
    NEMOTRON,
    ONE_CALL,
    QWEN3_WITHOUT_THINKING,
    REWRITES,
    Family,
)
from tests.data.support import ids_of
from tests.tables import table

ASKED: Message = {"role": "user", "content": "1 + 1?"}
TOO: Message = {"role": "user", "content": "and 2 + 2?"}


def answer(content: str, name: str = "add", call_id: str = "") -> Message:
    message: Message = {"role": "tool", "name": name, "content": content}
    return message | ({"tool_call_id": call_id} if call_id else {})


TWO = (answer("2", "add", "abcdefgh1"), answer("3", "sub", "abcdefgh2"))
ONE = (answer("4", "mul", "abcdefgh3"),)


class Played:
    """An episode of scripted turns."""

    def __init__(
        self, family: Family, *, ends: Sequence[str] | None = None, **settings: Any
    ) -> None:
        self.tokenizer = family.tokenizer()
        self.render = TurnRenderer(
            self.tokenizer,
            DataConfig(train=()),
            vocab_size=len(self.tokenizer),
            end_ids=ids_of(self.tokenizer, *(family.ends if ends is None else ends)),
            **settings,
        )
        text = self.tokenizer.apply_chat_template(
            [ASKED], tokenize=False, add_generation_prompt=True
        )
        self.sample = Sample(
            id="0", prompt=Prompt(id="f:1", token_ids=(1,), text=str(text), messages=(ASKED,)),
            index=0, token_ids=[], logprobs=[], weight_versions=[], loss_mask=[],
            stop_reason=StopReason.EOS,
        )  # fmt: skip

    def turn(self, text: str, *messages: Message, end: str | None = None) -> str:
        """The tokens after a turn, as a text. `end` is the token that ends it; an empty text: it
        was cut."""
        end = str(self.tokenizer.eos_token) if end is None else end
        ids = self.tokenizer(text + end, add_special_tokens=False)["input_ids"]
        start = len(self.sample.token_ids)
        self.sample.token_ids += ids
        reason = StopReason.EOS if end else StopReason.STOP_STRING
        turn = Turn(start=start, end=start + len(ids), text=text, stop_reason=reason)
        self.sample.turns.append(turn)
        said = self.render(self.sample, Observation(messages))
        turn.observed, turn.messages, appended = said.text, said.messages, said.token_ids
        self.sample.token_ids += appended
        return str(self.tokenizer.decode([*appended]))


EMPTY_THOUGHT = re.compile(r"<think>\s*(</think>\s*)?\Z")
THOUGHT = "so\n</think>"
GOES_ON: dict[str, tuple[Family, str, str, str, str]] = {
    # The turn, and what follows it with two answers and, at the next turn, with one.
    "deepseek_r1": (
        DEEPSEEK_R1, THOUGHT, "<eos>",
        "<outputs><output>2</output>\n<output>3</output><outputs_end>",
        "<outputs><output>4</output><outputs_end>",
    ),
    "deepseek_v31": (
        DEEPSEEK_V31, "", "<eos>",
        "<outputs><output>2</output>\n<output>3</output><outputs_end>",
        "<outputs><output>4</output><outputs_end>",
    ),
    "deepseek_v32": (
        DEEPSEEK_V32, THOUGHT, "<eos>",
        "\n\n<results>\n<result>2</result>\n<result>3</result>\n</results>\n\n<think>",
        "\n\n<results>\n<result>4</result>\n</results>\n\n<think>",
    ),
    "glm45": (
        GLM, "\n<think>so</think>\n<tool_call>add</tool_call>", "<|observation|>",
        "\n<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n</tool_response><|assistant|>",
        "\n<tool_response>\n4\n</tool_response><|assistant|>",
    ),
    "mistral": (
        MISTRAL, "[TOOL_CALLS]add[ARGS]{}", "</s>",
        "[TOOL_RESULTS]abcdefgh1[TOOL_CONTENT]2[/TOOL_RESULTS]"
        "[TOOL_RESULTS]abcdefgh2[TOOL_CONTENT]3[/TOOL_RESULTS]",
        "[TOOL_RESULTS]abcdefgh3[TOOL_CONTENT]4[/TOOL_RESULTS]",
    ),
    "gemma4": (
        GEMMA4, "<|tool_call>call:add{}<tool_call|>", "<|tool_response>",
        'response:add{value:<|"|>2<|"|>}<tool_response|>'
        '<|tool_response>response:sub{value:<|"|>3<|"|>}<tool_response|>',
        'response:mul{value:<|"|>4<|"|>}<tool_response|>',
    ),
    "minimax": (
        MINIMAX, THOUGHT, "[e~[",
        "\n]~b]tool\n<response>2</response>\n<response>3</response>[e~[\n]~b]ai\n<think>\n",
        "\n]~b]tool\n<response>4</response>[e~[\n]~b]ai\n<think>\n",
    ),
    "cohere": (
        COHERE, "<|START_THINKING|>so<|END_THINKING|><|START_ACTION|>[]<|END_ACTION|>", "<|END|>",
        '<|TURN|><|SYSTEM|>[["abcdefgh1", "2"], ["abcdefgh2", "3"]]<|END|><|TURN|><|BOT|>',
        '<|TURN|><|SYSTEM|>[["abcdefgh3", "4"]]<|END|><|TURN|><|BOT|>',
    ),
    "nemotron": (
        NEMOTRON, THOUGHT, "<S12>",
        "\n\n<S11>User\n<TOOL_RESPONSE>[2, 3]</TOOL_RESPONSE>\n\n<S11>Assistant\n<think>\n\n",
        "\n\n<S11>User\n<TOOL_RESPONSE>[4]</TOOL_RESPONSE>\n\n<S11>Assistant\n<think>\n\n",
    ),
    "qwen3": (
        QWEN3_WITHOUT_THINKING, "<tool_call>\n{}\n</tool_call>", "<|im_end|>",
        "\n<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
        "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n<think>\n\n</think>\n\n",
    ),
    "ends_texts": (
        ENDS_TEXTS, "<tool_call>\n{}\n</tool_call>", "<|im_end|>",
        "\n<|im_start|>user\n<tool_response>\n2\n</tool_response>\n<tool_response>\n3\n"
        "</tool_response><|im_end|>\n<|im_start|>assistant\n",
        "\n<|im_start|>user\n<tool_response>\n4\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n",
    ),
    "one_call": (
        ONE_CALL, "[add(), sub()]", "<eot>", "<tool>2<eot><tool>3<eot><assistant>",
        "<tool>4<eot><assistant>",
    ),
}  # fmt: skip


@table("name", GOES_ON)
def test_the_answers_follow_as_the_template_has_them_after_calls(name: str) -> None:
    family, said, end, two, one = GOES_ON[name]
    played = Played(family)
    for messages, expected in ((TWO, two), (ONE, one), (TWO, two), (ONE, one)):
        assert played.turn(said, *messages, end=end) == expected
    # Every token is there once, and those of the policy as they were sampled.
    text = str(played.tokenizer.decode([*played.sample.token_ids]))
    assert text == (said + end + two + said + end + one) * 2


@table("name", [*{*GOES_ON} - {"one_call"}])
def test_an_episode_reads_as_the_template_writes_its_calls(name: str) -> None:
    """The observations are those of the whole conversation with calls as data, in their order, but
    for the reasoning that a header opens."""
    family, _, end, *_ = GOES_ON[name]
    played = Played(family)
    history = [ASKED]
    for answers in (TWO, ONE, TWO):
        arguments = '{"x": 1}' if name == "deepseek_v31" else {"x": "1"}
        calls = [
            {
                "id": each["tool_call_id"],
                "type": "function",
                "function": {"name": each["name"], "arguments": arguments},
            }
            for each in answers
        ]
        history += [{"role": "assistant", "content": "", "tool_calls": calls}, *answers]
        played.turn("call", *answers, end=end)
    whole = str(
        played.tokenizer.apply_chat_template(history, tokenize=False, add_generation_prompt=True)
    )
    *earlier, last = played.sample.turns
    place = 0
    for turn in earlier:
        header = EMPTY_THOUGHT.sub("", turn.observed)
        place = whole.index(header, place) + len(header)
    assert whole.endswith(last.observed)
    assert whole.index(last.observed, place) > place


@table(
    "name, end, expected",
    [
        # The token that ends a turn before answers also opens them: it is not another end.
        ("gemma4", "<turn|>", '<|tool_response>response:mul{value:<|"|>4<|"|>}<tool_response|>'),
        ("gemma4", "", '<|tool_response>response:mul{value:<|"|>4<|"|>}<tool_response|>'),
        ("glm45", "<|user|>", "<|observation|>\n<tool_response>\n4\n</tool_response><|assistant|>"),
        # Here it is, and one is enough.
        ("qwen3", "<|endoftext|>", GOES_ON["qwen3"][4]),
        ("qwen3", "", "<|im_end|>" + GOES_ON["qwen3"][4]),
    ],
)
def test_a_turn_that_ended_in_another_way_goes_on_all_the_same(
    name: str, end: str, expected: str
) -> None:
    family, said, *_ = GOES_ON[name]
    assert Played(family).turn(said, *ONE, end=end) == expected


@table("name", ["mistral", "gemma4"])
def test_a_user_may_speak_once_tools_have_answered(name: str) -> None:
    family, said, end, two, _ = GOES_ON[name]
    played = Played(family)
    played.turn(said, *TWO, end=end)
    before = played.sample.turns[0].observed
    followed = {
        "mistral": "[INST]and 2 + 2?[/INST]",
        "gemma4": "\n<|turn>user\nand 2 + 2?<turn|>\n<|turn>model\n<|channel>thought\n<channel|>",
    }
    observed = played.turn("2.", TOO, end={"mistral": "</s>", "gemma4": "<turn|>"}[name])
    assert observed == followed[name]
    assert played.sample.turns[0].observed == before
    assert played.turn(said, *TWO, end=end) == two


def test_a_user_may_speak_behind_the_answers_of_tools() -> None:
    family, said, end, *_ = GOES_ON["mistral"]
    # With a call as data two users would follow each other; as a text the turn stands between.
    assert Played(family).turn(said, *ONE, TOO, end=end) == (
        "[TOOL_RESULTS]abcdefgh3[TOOL_CONTENT]4[/TOOL_RESULTS][INST]and 2 + 2?[/INST]"
    )
    family, said, end, *_ = GOES_ON["gemma4"]
    assert Played(family).turn(said, *ONE, TOO, end=end) == (
        'response:mul{value:<|"|>4<|"|>}<tool_response|><|turn>user\nand 2 + 2?<turn|>\n'
        "<|turn>model\n<|channel>thought\n<channel|>"
    )


def test_reasoning_that_a_user_makes_the_template_drop_is_refused() -> None:
    family, said, end, *_ = GOES_ON["deepseek_r1"]
    played = Played(family)
    played.turn(said, *TWO, end=end)
    with pytest.raises(RenderError, match=r"anew.*model\.chat_template"):
        played.turn("4.", TOO)


def test_what_stands_before_a_turn_must_stay() -> None:
    with pytest.raises(RenderError, match=r"before the policy's turn anew.*chat_template"):
        Played(REWRITES).turn("call", *ONE)


def test_an_answer_that_the_template_leaves_out_is_refused() -> None:
    with pytest.raises(RenderError, match="leaves out message 3, of the role 'tool'"):
        Played(LEAVES_OUT).turn("call", *ONE)


def test_where_answers_begin_must_be_known() -> None:
    """The model does not declare the token that ends its turns with calls."""
    played = Played(GEMMA4, ends=["<eos>"])
    with pytest.raises(RenderError, match=r"'<eos>'.*eos_token_id"):
        played.turn("call", *ONE, end="<eos>")


def test_answers_without_ids_have_the_names_of_their_own_calls() -> None:
    observed = Played(GEMMA4).turn("call", answer("2", "add"), answer("3", "sub"))
    assert [part.partition("{")[0] for part in observed.split("response:")[1:]] == ["add", "sub"]


# ---------------------------------------------------------------------------------- gpt-oss


def test_answers_to_gpt_oss_are_written_as_its_format_has_them() -> None:
    family = Family(MISTRAL.template, ("<|call|>", "<|return|>"))
    played = Played(family, tool_format="harmony")
    assert played.turn("call", *TWO) == (
        '<|start|>functions.add to=assistant<|channel|>commentary<|message|>"2"<|end|>'
        '<|start|>functions.sub to=assistant<|channel|>commentary<|message|>"3"<|end|>'
        "<|start|>assistant"
    )
    assert played.sample.turns[0].messages == TWO


@table("tool_format, family", [("harmony", MISTRAL), ("mistral", MISTRAL), ("hermes", ENDS_TEXTS)])
def test_each_answer_is_cut_by_itself(tool_format: str, family: Family) -> None:
    """A long answer leaves the short ones as they are, and each has the whole limit."""
    played = Played(family, tool_format=tool_format, max_observation_tokens=60)
    long = "".join(f"{number} " for number in range(99))
    texts = ["short", long, "short too", long]
    ids = [f"abcdefgh{number}" for number in range(4)]
    given = [answer(text, call_id=id) for text, id in zip(texts, ids, strict=True)]
    observed = played.turn("call", *given)
    assert played.render.num_cut == 2
    kept = [message["content"] for message in played.sample.turns[0].messages]
    assert kept[0::2] == texts[0::2]
    assert kept[1] == kept[3]
    assert kept[1].startswith("0 1 2 ")
    assert kept[1].endswith(" 97 98 ")
    assert "tokens left out" in kept[1]
    assert len(kept[1]) <= 60
    for text in kept:
        assert text in observed.replace("\\n", "\n")


# -------------------------------------------------------------------------------- the start


@table("name", GOES_ON)
def test_a_template_that_goes_on_passes_the_check_at_the_start(name: str) -> None:
    played = Played(GOES_ON[name][0], tool_format="mistral" if name == "mistral" else "hermes")
    played.render.require_answers()


def test_the_check_at_the_start_needs_no_word_of_the_tokenizer() -> None:
    """Whose words may be those of one task alone."""
    played = Played(ONE_CALL, tool_format="hermes")
    words = Tokenizer(models.WordLevel({"<eot>": 0, "<pad>": 1}))
    played.render.tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eot>")
    played.render.tokenizer.chat_template = ONE_CALL.template
    played.render.require_answers()


@table(
    "family, ends, message",
    [
        (REWRITES, REWRITES.ends, "before the policy's turn anew"),
        (LEAVES_OUT, LEAVES_OUT.ends, "leaves out"),
        (CLOSES_LATE, CLOSES_LATE.ends, "before the policy's turn anew"),
        (GEMMA4, ("<eos>",), "eos_token_id"),
    ],
)
def test_a_template_that_cannot_go_on_is_refused_at_the_start(
    family: Family, ends: tuple[str, ...], message: str
) -> None:
    played = Played(family, tool_format="hermes", ends=ends)
    with pytest.raises(UserError, match=rf"answers of the environment's tools.*{message}"):
        played.render.require_answers()
