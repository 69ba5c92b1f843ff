"""A session answers every call of a turn once, in the order of the calls."""

import asyncio
import json
import re
import threading
from dataclasses import replace

import pytest

from hone.envs.session import Action, DataRow, End, ToolCall
from hone.envs.tools.session import ToolSession
from hone.envs.tools.tool import Tool, ToolError, ToolLostError, function_tool
from hone.errors import UserError

PATIENCE_S = 60


def add(a: int, b: int = 1) -> int:
    """Add.

    Args:
        a: The first
        b: The second
    """
    return a + b


async def wait(x: str) -> str:
    """Wait.

    Args:
        x: Anything
    """
    await asyncio.sleep(0)
    return x


def tool(name, function):
    schema = {"name": name, "parameters": {"type": "object", "additionalProperties": True}}
    return Tool({"type": "function", "function": schema}, function)


def session_of(*tools, tool_format="hermes", **limits):
    return ToolSession(
        [x if isinstance(x, Tool) else function_tool(x) for x in tools],
        tool_format=tool_format,
        **limits,
    )


def call(name, id="", /, **arguments):
    return ToolCall(name=name, arguments=arguments, id=id)


def action(*calls, parse_error="", must_end=False):
    return Action(text="", token_ids=(1,), content="", tool_calls=calls,
                  parse_error=parse_error, stop_reason="eos", index=0, must_end=must_end,
                  tokens_left=9)  # fmt: skip


def row():
    return DataRow(prompt="", messages=(), unrendered="", answer=None, raw_answer=None, task="",
                   columns={}, seed=0, max_turns=8, max_tokens=9)  # fmt: skip


def played(session, *actions):
    """The answers to the actions, in one event loop."""

    async def play():
        assert await session.start(row()) is None
        try:
            return [await session.step(each) for each in actions]
        finally:
            await session.close()

    return asyncio.run(play())


def contents(messages):
    return [message["content"] for message in messages]


def error(text):
    return json.loads(text)["error"]


def test_calls_are_answered_in_their_order_with_name_and_id():
    given = action(call("add", "id0", a=1), call("wait", x="x"), call("add", a=2, b=3))
    (messages,) = played(session_of(add, wait), given)
    assert messages == [
        {"role": "tool", "name": "add", "tool_call_id": "id0", "content": "2"},
        {"role": "tool", "name": "wait", "content": "x"},
        {"role": "tool", "name": "add", "content": "5"},
    ]


@pytest.mark.parametrize("is_async", [False, True])
def test_calls_of_a_turn_run_at_the_same_time(is_async):
    """Each call waits for all others, so one after the other they would never end."""
    if is_async:
        barrier = None

        async def meet(x):
            nonlocal barrier
            barrier = barrier or asyncio.Barrier(8)
            async with asyncio.timeout(PATIENCE_S):
                await barrier.wait()
            return x
    else:
        met = threading.Barrier(8)

        def meet(x):
            met.wait(PATIENCE_S)
            return x

    (messages,) = played(
        session_of(tool("meet", meet)), action(*(call("meet", x=n) for n in range(8)))
    )
    assert contents(messages) == [str(n) for n in range(8)]


def test_a_turn_without_calls_ends_the_episode_without_a_score():
    (end,) = played(session_of(add), action())
    assert isinstance(end, End)
    assert end.score is None


def test_a_turn_after_which_none_is_left_runs_nothing():
    ran = []
    session = session_of(tool("run", lambda: ran.append(1)))
    (end,) = played(session, action(call("run"), must_end=True))
    assert isinstance(end, End)
    assert not ran
    assert end.metrics["tools/unanswered_calls"] == 1


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (call("ad", a=1), "there is no tool 'ad'. Did you mean 'add'? Tools: add, wait."),
        (call("add"), "add: the argument 'a' is missing. Arguments: a, b."),
        (call("add", a="1"), "add: 'a' must be of type integer, got \"1\"."),
        (call("add", a=1, c=2), "add: there is no argument 'c'. Arguments: a, b."),
    ],
)
def test_a_wrong_call_is_answered_with_what_is_wrong(made, text):
    (messages,) = played(session_of(add, wait), action(made, call("add", a=1)))
    assert error(messages[0]["content"]) == text
    assert messages[1]["content"] == "2"


def raising(error):
    def tool():
        raise error

    return tool


class Unspeakable(Exception):
    def __str__(self):
        raise RuntimeError


@pytest.mark.parametrize(
    ("raised", "text"),
    [
        (ValueError("bad word"), "ValueError: bad word"),
        (KeyError("x"), "KeyError: 'x'"),
        (SystemExit(3), "SystemExit: 3"),
        (StopIteration("end"), "StopIteration: end"),
        (TimeoutError("slow"), "TimeoutError: slow"),
        (ValueError("half \ud800"), "ValueError: half ?"),
        (Unspeakable(), "Unspeakable: (its text cannot be shown)"),
    ],
)
def test_an_exception_of_a_tool_is_its_answer(raised, text):
    (messages, _) = played(session_of(tool("t", raising(raised))), action(call("t")), action())
    assert error(messages[0]["content"]) == text


def test_an_exception_of_an_async_tool_is_its_answer():
    async def fail():
        raise ValueError("no")

    (messages,) = played(session_of(tool("t", fail)), action(call("t")))
    assert error(messages[0]["content"]) == "ValueError: no"


def test_the_answer_of_a_server_to_a_wrong_call_is_not_wrapped():
    failing = tool("t", raising(ToolError('{"error": "as it says"}')))
    (messages, end) = played(session_of(failing), action(call("t")), action())
    assert error(messages[0]["content"]) == "as it says"
    assert end.metrics["tools/errors_raised"] == 1


@pytest.mark.parametrize("raised", [ToolLostError("gone"), MemoryError()])
def test_a_lost_tool_fails_the_step_once_the_other_calls_have_ended(raised):
    ended = []
    session = session_of(tool("t", raising(raised)), tool("u", lambda: ended.append(1)))
    with pytest.raises(type(raised)):
        played(session, action(call("t"), call("u")))
    assert ended


@pytest.mark.parametrize(
    ("result", "text"),
    [
        ("text", "text"),
        ("", ""),
        (3, "3"),
        (None, "null"),
        ({"a": [1, "\u00e9"]}, '{"a": [1, "\u00e9"]}'),
        ("half \udc80", "half ?"),
        (True, "true"),
    ],
)
def test_a_result_that_is_no_text_becomes_json(result, text):
    (messages,) = played(session_of(tool("t", lambda: result)), action(call("t")))
    assert contents(messages) == [text]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image", "image": b"..."},
        {"type": "image_url", "image_url": {"url": "data:..."}},
        {"type": "input_image", "image_url": "data:..."},
    ],
)
def test_a_result_with_an_image_stays_a_list_of_parts(part):
    result = [{"type": "text", "text": "seen"}, part]
    (messages,) = played(session_of(tool("t", lambda: result)), action(call("t")))
    assert contents(messages) == [result]


def test_a_list_whose_entries_say_no_type_is_json():
    result = [{"image": "a.png", "price": 3}]
    (messages,) = played(session_of(tool("t", lambda: result)), action(call("t")))
    assert contents(messages) == [json.dumps(result)]


def test_a_result_that_is_no_json_fails_the_step():
    with pytest.raises(TypeError, match=r"tool 't' returned \{1\} of type set"):
        played(session_of(tool("t", lambda: {1})), action(call("t")))


def test_a_function_that_returns_an_awaitable_is_awaited():
    (messages,) = played(session_of(tool("t", lambda: wait("x"))), action(call("t")))
    assert contents(messages) == ["x"]


def test_calls_above_the_limits_are_answered_and_not_run():
    ran = []
    session = session_of(
        tool("t", lambda n: ran.append(n) or n), max_parallel_calls=2, max_tool_calls=4
    )
    turns = [[0, 1, 2], [3, 4], [5]]
    answers = played(session, *(action(*(call("t", n=n) for n in turn)) for turn in turns))
    assert [len(messages) for messages in answers] == [3, 2, 1]
    assert "at most 2 calls are run in a turn" in error(answers[0][2]["content"])
    assert "at most 4 calls are run in all" in error(answers[1][1]["content"])
    assert "answer without tools" in error(answers[2][0]["content"])
    assert sorted(ran) == [0, 1, 3]


def test_what_was_not_understood_is_answered_after_the_calls():
    (messages, alone) = played(
        session_of(add),
        action(call("add", a=1), parse_error="no JSON"),
        action(parse_error="no JSON"),
    )
    assert messages[0]["content"] == "2"
    assert messages[1]["role"] == "tool"
    assert error(messages[1]["content"]) == "a call was not understood: no JSON"
    assert len(alone) == 1


def test_for_mistral_it_has_an_id_of_nine_characters_that_no_other_turn_has():
    turns = [action(parse_error="no JSON"), replace(action(parse_error="no JSON"), index=12)]
    answers = played(session_of(add, tool_format="mistral"), *turns)
    ids = [messages[0]["tool_call_id"] for messages in answers]
    assert all(re.fullmatch("[a-zA-Z0-9]{9}", one) for one in ids)
    assert ids[0] != ids[1]


def test_calls_and_errors_are_counted():
    session = session_of(add, tool("bad", raising(ValueError("x"))), max_parallel_calls=3)
    *_, end = played(
        session,
        action(call("add", a=1), call("bad"), call("none"), call("add", a=1)),
        action(call("add"), parse_error="x"),
        action(call("add", a=1), must_end=True),
    )
    seconds = end.metrics.pop("tools/seconds")
    assert seconds >= 0
    assert end.metrics == {
        "tools/calls": 5,
        "tools/errors": 5,
        "tools/errors_parse": 1,
        "tools/errors_unknown_tool": 1,
        "tools/errors_arguments": 1,
        "tools/errors_raised": 1,
        "tools/errors_over_limit": 1,
        "tools/unanswered_calls": 1,
    }


def test_methods_of_an_object_share_its_state():
    class Counter:
        count = 0

        def more(self, by: int) -> int:
            """Count.

            Args:
                by: How much
            """
            self.count += by
            return self.count

    first, second = played(
        session_of(Counter().more), action(call("more", by=2)), action(call("more", by=3))
    )
    assert contents([*first, *second]) == ["2", "5"]


def test_two_tools_of_one_name_are_refused():
    with pytest.raises(UserError, match="two tools have the name 'add'"):
        session_of(add, add)


class Recorded:
    def __init__(self, log, fails=False):
        self.log, self.fails = log, fails

    def start(self):
        self.log.append("start")
        if self.fails:
            raise ToolLostError("it is not there")

    def close(self):
        self.log.append("close")


def test_servers_live_as_long_as_the_session():
    log = []
    session = session_of(add, servers=[Recorded(log)])
    played(session, action(call("add", a=1)))
    assert log == ["start", "close"]


def test_a_server_that_does_not_start_fails_the_start_and_is_closed():
    log = []
    session = session_of(add, servers=[Recorded(log, fails=True), Recorded(log)])

    async def start():
        try:
            await session.start(row())
        finally:
            await session.close()

    with pytest.raises(ToolLostError):
        asyncio.run(start())
    assert sorted(log) == ["close", "close", "start", "start"]
