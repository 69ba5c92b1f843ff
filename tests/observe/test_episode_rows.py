"""The turns of an episode in the row of a sample file: the texts that are read are those of the
sample, and are in the row once."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hone.observe.episode_rows import Said, read_turns, turn_rows
from hone.observe.loggers import completion_row, json_line, pair_row, sample_row
from hone.types import Message, Sample, StopReason, Turn
from tests.observe.fake_run import make_group


def turn(text: str, observed: str = "", *messages: Message, **fields: Any) -> Turn:
    return Turn(
        start=0,
        end=1,
        text=text,
        stop_reason=StopReason.EOS,
        observed=observed,
        messages=messages,
        **fields,
    )


TOOL = {"role": "tool", "name": "add", "content": "7 🙂", "tool_call_id": "c1"}
CALL: dict[str, Any] = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"function": {"name": "add", "arguments": {"a": 3}}}],
}
ASKED = {"role": "user", "content": "go on"}
TURNS = [
    turn(
        "add 3 4", "\n<tool>7 🙂\n<user>go on\n<policy>", TOOL, {"role": "user", "content": "go on"}
    ),
    turn("add 3 4", "<raw>", reward=-0.1, policy_s=1.23456, env_s=0.01),
    turn("it is 7", env_s=0.5),
]
TEXT = "add 3 4\n<tool>7 🙂\n<user>go on\n<policy>add 3 4<raw>it is 7"


def episode(turns: list[Turn], text: str) -> Sample:
    sample = make_group(1, 0, np.random.default_rng(0), num_samples=1).samples[0]
    return replace(sample, turns=turns, text=text)


def written(sample: Sample, **given: Any) -> dict[str, Any]:
    return json.loads(json_line(sample_row(sample, **given)))


def test_texts_and_messages_are_read_as_they_were() -> None:
    turns = read_turns(written(episode(TURNS, TEXT), with_times=True))
    assert turns is not None
    assert [record.text for record in turns] == ["add 3 4", "add 3 4", "it is 7"]
    assert turns[0].observed == (
        Said(role="tool", text="7 🙂", name="add"),
        Said(role="user", text="go on"),
    )
    assert turns[1].observed == (Said(role="", text="<raw>"),)
    assert turns[2].observed == ()
    assert [(record.policy_s, record.env_s) for record in turns] == [
        (None, None),
        (1.2346, 0.01),
        (None, 0.5),
    ]
    assert [record.reward for record in turns] == [0.0, -0.1, 0.0]


def test_no_text_is_written_twice() -> None:
    line = json.dumps(written(episode(TURNS, TEXT))["turns"])
    for said in ("add 3 4", "go on", "it is 7", "<raw>", "7 "):
        assert said not in line
    assert '"tool_call_id": "c1"' in line


def test_what_the_text_lacks_is_written_out() -> None:
    """Decoding all tokens at once may give another text than turn by turn."""
    turns = read_turns(written(episode(TURNS, "add 3 4 and something else")))
    assert turns is not None
    assert [record.text for record in turns] == ["add 3 4", "add 3 4", "it is 7"]
    assert turns[0].observed[0].text == "7 🙂"


def test_calls_of_tools_are_kept() -> None:
    turns = read_turns(written(episode([turn("a", "b", CALL), turn("c")], "abc")))
    assert turns is not None
    assert turns[0].observed == (
        Said(role="assistant", text="", tool_calls=(*CALL["tool_calls"],)),
    )


def test_a_sample_without_an_environment_has_no_texts_of_turns() -> None:
    row = written(episode([turn("an answer")], "an answer"), with_times=True)
    assert row["turns"] == [{"start": 0, "end": 1, "stop_reason": "eos", "reward": 0.0}]
    assert read_turns(row) is None
    assert read_turns({"turns": []}) is None


def test_times_are_left_out_of_results_that_must_repeat() -> None:
    row = written(episode(TURNS, TEXT))
    assert not {"policy_s", "env_s"} & {name for entry in row["turns"] for name in entry}


@pytest.mark.parametrize("opened", ["", "<think>\n"])
def test_rows_of_hone_generate_refer_to_their_completion(opened: str) -> None:
    """Which begins with the tag that the prompt opens, where the completion closes it."""
    turns = [turn("so </think> 3", "<raw>"), turn("4")]
    sample = episode(turns, "so </think> 3<raw>4")
    sample.prompt = replace(sample.prompt, text=f"Sum? {opened}", unrendered="Sum?")
    for row in (completion_row(sample), pair_row(sample, sample)):
        read = read_turns(json.loads(json_line(row)))
        assert read is not None
        assert [record.text for record in read] == ["so </think> 3", "4"]
        assert read[0].observed[0].text == "<raw>"


def test_branches_with_their_texts_written_out_are_read() -> None:
    branch = {"turns": [{"start": 0, "end": 2, "text": "a", "observed": "b"}]}
    (record,) = read_turns(branch) or ()
    assert (record.text, record.observed) == ("a", (Said(role="", text="b"),))


def test_an_empty_text_writes_everything_out() -> None:
    assert [row["text"] for row in turn_rows(TURNS, "")] == ["add 3 4", "add 3 4", "it is 7"]
