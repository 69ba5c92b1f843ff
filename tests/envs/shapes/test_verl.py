"""Tools and interactions of verl, by hand, and against its own loop on scripted turns."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from hone.envs.session import Action, ToolCall
from hone.envs.shapes import made_from, methods_problem
from hone.envs.tools.session import ToolSession
from hone.extras import is_installed
from hone.rewards.environment import EnvSpec
from hone.rewards.load_environment import load_environment
from hone.rewards.score import RewardFunction
from hone.rewards.session_player import SessionCall
from hone.user_code.resolve import resolve
from tests.envs.shapes.driver import Played, action, maker_of, play, row

CLASSES = '''
from typing import Any, Optional
from uuid import uuid4

from verl.interactions.base import BaseInteraction
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.utils.rollout_trace import rollout_trace_op

LOG = []


class Submit(BaseTool):
    """Takes an answer, and rewards the right one."""

    def __init__(self, config: dict, tool_schema: OpenAIFunctionToolSchema):
        super().__init__(config, tool_schema)
        self.open = {}

    async def create(self, instance_id: Optional[str] = None, **kwargs):
        instance_id = instance_id or str(uuid4())
        self.open[instance_id] = kwargs["create_kwargs"]["truth"]
        LOG.append("create")
        return instance_id, ToolResponse()

    @rollout_trace_op
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs):
        data = kwargs["agent_data"]
        tries = data.extra_fields["tries"] = data.extra_fields.get("tries", 0) + 1
        if parameters["answer"] == "raise":
            raise RuntimeError("no room")
        if parameters["answer"] == "image":
            return ToolResponse(image=[object()]), 0.0, {}
        right = parameters["answer"] == self.open[instance_id]
        said = f"try {tries} of {len(data.messages)} messages: {right}"
        return ToolResponse(text=said), self.config["price"] + float(right), {"seen": 1}

    async def release(self, instance_id: str, **kwargs) -> None:
        del self.open[instance_id]
        LOG.append("release")


class Count(BaseTool):
    """Describes itself."""

    def get_openai_tool_schema(self):
        return OpenAIFunctionToolSchema.model_validate(
            {"type": "function", "function": {"name": "count", "description": "Count letters."}}
        )

    async def execute(self, instance_id, parameters, **kwargs):
        return ToolResponse(text="many"), None, {}


class GuessInteraction(BaseInteraction):
    """A user who has a number in mind."""

    def __init__(self, config: dict):
        super().__init__(config)
        self.numbers = {}

    async def start_interaction(self, instance_id=None, number=None, **kwargs):
        self.numbers[instance_id] = number
        return instance_id

    async def generate_response(self, instance_id, messages, **kwargs):
        said = messages[-1]["content"]
        right = said == str(self.numbers[instance_id])
        return right, f"{said} is wrong, {len(messages)}", float(right) - 0.25, {}

    async def finalize_interaction(self, instance_id, **kwargs):
        del self.numbers[instance_id]
        LOG.append("finalize")


class Alone:
    """The methods of a tool, without verl's class."""

    def __init__(self, config, tool_schema):
        self.tool_schema, self.name = tool_schema, "alone"

    def create(self, **kwargs):
        return "one"

    def execute(self, instance_id, parameters, agent_data):
        return f"{instance_id} {parameters['word']}", 1, {}

    def release(self, instance_id): ...
'''
FUNCTIONS = '''
from verl.tools.function_tool import function_tool
from verl.tools.schemas import ToolResponse


@function_tool("look_up")
def search(word: str, limit: int = 2) -> dict:
    """Look up a word.

    Args:
        word: The word
        limit: Most results
    """
    return {"word": word, "limit": limit}


@function_tool
async def judge(text: str):
    """Judge a text.

    Args:
        text: The text
    """
    return ToolResponse(text=f"judged {text}"), 0.5, {"a": 1}
'''
TOOLS = """
tools:
  - class_name: {module}.Submit
    config: {{type: native, price: -0.125}}
    tool_schema:
      type: function
      function:
        name: submit
        description: Submit an answer.
        parameters:
          type: object
          properties:
            answer: {{type: string, description: The answer}}
          required: [answer]
  - class_name: {module}.Count
    config: {{type: native}}
"""
INTERACTIONS = """
interaction:
  - class_name: {module}.GuessInteraction
    config: {{}}
  - name: other
    class_name: {module}.GuessInteraction
    config: {{}}
"""
INFO = {
    "index": 3,
    "tools_kwargs": {"submit": {"create_kwargs": {"truth": "42"}}},
    "interaction_kwargs": {"name": "guess", "number": 7},
}
SCHEMA = {
    "type": "function",
    "function": {
        "name": "alone",
        "description": "Alone.",
        "parameters": {"type": "object", "properties": {"word": {"type": "string"}}},
    },
}
MODULE = "tools_and_users"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with tools, functions and interactions, as beside a script of verl."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, MODULE, raising=False)
    Path(f"{MODULE}.py").write_text(CLASSES)
    Path("functions.py").write_text(FUNCTIONS)
    Path("tools.yaml").write_text(TOOLS.format(module=MODULE))
    Path("users.yaml").write_text(INTERACTIONS.format(module=MODULE))
    return tmp_path


def submit(answer: str, **more: Any) -> ToolCall:
    return ToolCall(name="submit", arguments={"answer": answer, **more})


def calls(*made: ToolCall, **fields: Any) -> Action:
    return action("calls", 0, calls=made, **fields)


def info(played: Played) -> Mapping[str, float]:
    assert played.end is not None
    return {
        name: value
        for name, value in played.end.metrics.items()
        if value and name != "tools/seconds"
    }


def test_an_episode_with_tools(folder: Path) -> None:
    maker = maker_of("verl:tools.yaml")
    assert (maker.shape, maker.needs_tool_format) == ("verl", True)
    assert [schema["function"]["name"] for schema in maker.tool_schemas] == ["submit", "count"]
    assert maker.tool_schemas[0]["function"]["parameters"] == {
        "type": "object",
        "properties": {"answer": {"type": "string", "description": "The answer"}},
        "required": ["answer"],
    }
    session: Any = maker.make()
    count = ToolCall(name="count", arguments={})
    turns = [calls(submit("41"), count), calls(submit("42")), action("done", 2)]
    played = play(session, row(extra_info=INFO), turns, cut=False)
    assert played.said == [
        [
            {"role": "tool", "name": "submit", "content": "try 1 of 2 messages: False"},
            {"role": "tool", "name": "count", "content": "many"},
        ],
        [{"role": "tool", "name": "submit", "content": "try 2 of 5 messages: True"}],
    ]
    assert played.end is not None
    assert (played.reward, played.end.truncated) == (None, False)
    assert info(played) == {"tools/calls": 3.0, "tools/reward": 0.75}
    assert sys.modules[MODULE].LOG == ["create", "release"] * 2
    assert session.environment.extra_fields == {
        "tries": 2, "tool_rewards": [-0.125, 0.875], "turn_scores": [], "num_turns": 6,
    }  # fmt: skip


def test_what_goes_wrong_in_a_call_is_its_answer(folder: Path) -> None:
    wrong = calls(submit("raise"), submit("42", more=1), ToolCall(name="subtract", arguments={}))
    session: Any = maker_of("verl:tools.yaml").make()
    played = play(session, row(extra_info=INFO), [wrong, "end"])
    texts = [message["content"] for message in played.said[0]]
    for text, words in zip(
        texts, ["RuntimeError: no room", "no argument 'more'", "no tool 'subtract'"], strict=True
    ):
        assert words in text
    assert sys.modules[MODULE].LOG == ["create", "release"]  # also after an error
    assert info(played)["tools/errors"] == 3.0
    assert session.environment.tool_rewards == [0.0]
    with pytest.raises(RuntimeError, match="returned an image"):
        play(maker_of("verl:tools.yaml").make(), row(extra_info=INFO), [calls(submit("image"))],
             cut=False)  # fmt: skip


def test_an_interaction_answers_turns_without_calls(folder: Path) -> None:
    made = maker_of("verl:tools.yaml,users.yaml")
    session: Any = made.make()
    turns = [action("5", 0), calls(submit("42")), action("7", 2)]
    played = play(session, row(extra_info=INFO), turns, cut=False)
    assert played.said[0] == [{"role": "user", "content": "5 is wrong, 2"}]
    assert played.said[1][0]["content"] == "try 1 of 4 messages: True"
    assert played.end is not None
    assert (played.reward, played.end.truncated) == (None, False)
    assert session.environment.turn_scores == [-0.25, 0.75]
    assert info(played) == {"tools/calls": 1.0, "tools/reward": 0.875, "interaction/score": 0.5}
    assert sys.modules[MODULE].LOG[-1] == "finalize"
    cut = play(made.make(), row(extra_info=INFO), [action("5", 0), action("7", 1)])
    assert cut.end is not None
    assert cut.end.truncated  # the last turn is not answered
    assert info(cut) == {"interaction/score": -0.25}


def test_rewards_of_tools_and_turns_can_be_the_reward(folder: Path) -> None:
    made = maker_of("verl:tools.yaml,users.yaml", {"count_rewards": True})
    played = play(made.make(), row(extra_info=INFO), [calls(submit("42")), "5", "7"], cut=False)
    assert played.reward == 0.875 - 0.25 + 0.75


def test_reward_functions_of_verl_get_what_was_rewarded(folder: Path) -> None:
    session: Any = maker_of("verl:tools.yaml").make()
    play(session, row(extra_info=INFO), [calls(submit("42")), "end"], cut=False)
    seen: list[Any] = []

    def compute_score(data_source: Any, solution_str: Any, ground_truth: Any, extra_info: Any):
        seen.append(extra_info)
        return sum(extra_info["tool_rewards"])

    function = RewardFunction(compute_score, name="f", weight=1.0, args={})
    given = {"metadata": {"extra_info": INFO}, "completion": "end", "raw_answer": "42", "task": ""}
    (scored,) = function([{**given, "environment": session.environment}])
    assert scored.score == 0.875
    assert seen[0]["index"] == 3
    assert (seen[0]["turn_scores"], seen[0]["num_turns"], seen[0]["tries"]) == ([], 4, 1)


def test_functions_of_a_file(folder: Path) -> None:
    made = maker_of("verl:functions.py")
    assert [s["function"]["name"] for s in made.tool_schemas] == ["judge", "look_up"]
    session: Any = made.make()
    asked = calls(
        ToolCall(name="look_up", arguments={"word": "ü"}),
        ToolCall(name="judge", arguments={"text": "x"}),
    )
    played = play(session, row(), [asked, "end"])
    assert [m["content"] for m in played.said[0]] == ['{"word": "ü", "limit": 2}', "judged x"]
    assert session.environment.tool_rewards == [0.0, 0.5]
    assert not [name for name in sys.modules if name.startswith("verl.")]


def test_one_class_without_the_base_of_verl(folder: Path) -> None:
    made = maker_of(f"{MODULE}.py:Alone", {"tool_schema": SCHEMA})
    assert (made.shape, made.file) == ("verl", str(Path(f"{MODULE}.py").resolve()))
    asked = calls(ToolCall(name="alone", arguments={"word": "w"}))
    played = play(made.make(), row(), [asked, "end"])
    assert played.said[0][0]["content"] == "one w"
    user = maker_of(f"{MODULE}.py:GuessInteraction")
    assert not user.needs_tool_format
    assert play(user.make(), row(extra_info=INFO), ["7"], cut=False).end is not None


def test_the_conversation_has_answers_that_no_template_writes(folder: Path) -> None:
    """As for gpt-oss."""
    made = maker_of("verl:tools.yaml")
    assert made.make_with_tools is not None
    session: Any = made.make_with_tools(partial(ToolSession, tool_format="harmony"))

    async def steps() -> Any:
        await session.start(row(extra_info=INFO))
        return await session.step(calls(submit("42")))

    (said,) = asyncio.run(steps())
    assert (said["role"], said["content"]) == ("tool", "try 1 of 2 messages: True")
    assert session.environment.messages[-1]["content"] == "try 1 of 2 messages: True"


def test_hone_runs_the_tools_with_the_limits_of_env(folder: Path) -> None:
    """Beside further functions of `env.tools`."""
    Path("more.py").write_text(
        'def shout(text: str) -> str:\n    """Shout.\n\n    Args:\n        text: It\n    """\n'
        "    return text.upper()\n"
    )
    spec = EnvSpec(
        path="verl:tools.yaml", args={}, tools=("more.py:shout",), tool_format="hermes",
        max_parallel_calls=1, timeout_s=10, max_sessions=1,
    )  # fmt: skip
    player, facts = load_environment(spec)
    names = [schema["function"]["name"] for schema in facts.tools]
    assert (facts.shape, facts.needs_tool_format) == ("verl", True)
    assert sorted(names) == ["count", "shout", "submit"]
    text = (
        '<tool_call>{"name": "shout", "arguments": {"text": "a"}}</tool_call>'
        '<tool_call>{"name": "submit", "arguments": {"answer": "42"}}</tool_call>'
    )
    assert player(SessionCall(kind="start", row=row(extra_info=INFO))) is not None  # type: ignore[arg-type]
    said: Any = player(SessionCall(kind="step", action=action(text, 0)))  # type: ignore[arg-type]
    player.close()  # type: ignore[union-attr]
    assert said.content[0]["content"] == "A"
    assert "at most 1 calls are run in a turn" in said.content[1]["content"]


WRONG = [
    ("verl:", {}, "is no file of tools or interactions; write `verl:tools.yaml`"),
    ("verl:absent.yaml", {}, "there is no file 'absent.yaml'"),
    ("verl:tools.yaml,tools.yaml", {}, "two tools have the name 'submit'"),
    ("verl:users.yaml", {"price": 1}, "env.args.price is not known"),
    ("verl:empty.yaml", {}, "has other, and neither a list `tools` nor a list `interaction`"),
    ("verl:nameless.yaml", {}, "has an entry without class_name"),
    ("verl:mcp.yaml", {}, "has a tool of the type mcp; name the server in env.tools as mcp:"),
    ("verl:shipped.yaml", {}, "no module 'verl.tools.gsm8k_tool'.*install verl in hone's envir"),
    ("verl:refers.yaml", {}, r"refers to values by \$\{...\}; write the values"),
    ("verl:plain.py", {}, "has no function with the decorator"),
    ("verl:needs.py", {}, "needs verl.utils.reward_score of verl, which is not installed here"),
    (f"{MODULE}.py:Submit", {}, "has no schema: give `tool_schema`"),
    ("loops.py:Mine", {}, "has a loop of its own, which calls an engine of verl"),
]
FILES = {
    "empty.yaml": "other: 1\n",
    "nameless.yaml": "tools: [{config: {}}]\n",
    "mcp.yaml": f"tools: [{{class_name: {MODULE}.Count, config: {{type: mcp}}}}]\n",
    "shipped.yaml": "tools: [{class_name: verl.tools.gsm8k_tool.Gsm8kTool, config: {}}]\n",
    "refers.yaml": f"tools: [{{class_name: {MODULE}.Count, config: {{url: '${{oc.env:X}}'}}}}]\n",
    "plain.py": "def f(): ...\n",
    "needs.py": "from verl.utils.reward_score import gsm8k\n",
    "loops.py": "from verl.experimental.agent_loop.agent_loop import AgentLoopBase\n"
    "class Mine(AgentLoopBase):\n    async def run(self, sampling_params, **kwargs): ...\n",
}


@pytest.mark.parametrize(("path", "args", "words"), WRONG)
def test_what_is_said_of_one_that_cannot_be_played(
    folder: Path, path: str, args: dict[str, Any], words: str
) -> None:
    for name, text in FILES.items():
        Path(name).write_text(text)
    with pytest.raises(ValueError, match=words):
        made_from(path, args, resolve=resolve)


def test_methods_of_the_same_names_are_no_mark_in_another_shape() -> None:
    assert methods_problem(["start", "step", "generate_response"]) is None
    assert methods_problem(["reset", "create", "execute", "release"]) is None
    assert methods_problem(["create", "execute", "release"]) is None
    assert methods_problem(["generate_response"]) is None


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        ({"extra_info": {}}, "has the name None; interactions: guess, other"),
        ({"extra_info": {"interaction_kwargs": {"name": "me"}}}, "has the name 'me'"),
        ({"agent_name": "single_turn_agent"}, "has the agent_name 'single_turn_agent'"),
        ({"extra_info": {"tool_selection": ["submit"]}}, "has extra_info.tool_selection"),
    ],
)
def test_a_row_that_cannot_be_played_fails(
    folder: Path, columns: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        play(maker_of("verl:users.yaml").make(), row(**columns), ["5"])


# verl's own loop


@pytest.fixture
def agent_loop(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """`verl.experimental.agent_loop.tool_agent_loop` and `verl.tools` by their files: verl itself
    needs Ray, tensordict and an engine."""
    if not is_installed("verl"):
        pytest.skip("verl is not installed")
    root = Path(str(importlib.util.find_spec("verl").origin)).parent  # type: ignore[union-attr]
    for name in [name for name in sys.modules if name.partition(".")[0] == "verl"]:
        monkeypatch.delitem(sys.modules, name)
    for name in ("", ".tools", ".utils", ".workers", ".workers.rollout", ".experimental",
                 ".experimental.agent_loop"):  # fmt: skip
        package = ModuleType(f"verl{name}")
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        monkeypatch.setitem(sys.modules, f"verl{name}", package)
    stubs: dict[str, dict[str, Any]] = {
        "verl.experimental.agent_loop.agent_loop": {
            "AgentLoopBase": Loop, "AgentLoopOutput": SimpleNamespace, "ToolListWrap": object,
            "register": lambda _: lambda kind: kind,
        },
        "verl.experimental.agent_loop.tool_parser": {"FunctionCall": None, "ToolParser": None},
        "verl.utils.profiler": {"simple_timer": lambda *_: nullcontext()},
        "verl.utils.rollout_trace": {"rollout_trace_op": lambda function: function},
        "verl.workers.rollout.replica": {"TokenOutput": SimpleNamespace},
        "PIL": {"Image": SimpleNamespace(Image=object)},
    }  # fmt: skip
    for name, members in stubs.items():
        module = ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return importlib.import_module("verl.experimental.agent_loop.tool_agent_loop")


class Loop:
    """In place of verl's base class: nothing is rendered, and what was said is kept."""

    said: list[Any]

    def _assert_mm_supported(self, has: bool) -> None:
        assert not has

    def _get_mm_processor_kwargs(self, audios: Any) -> None: ...

    def build_sglang_video_payload(self, *_: Any) -> None: ...

    async def process_multi_modal_info(self, messages: Any) -> dict[str, Any]:
        return {}

    async def ct_build_initial_tokens(self, *_: Any, **__: Any) -> list[int]:
        return [0]

    async def ct_merge_assistant_token(
        self, before: list[int], new: list[int], mask: list[int], *_: Any, **__: Any
    ) -> Any:
        return SimpleNamespace(token_ids=before + new), mask + [1] * len(new), None

    async def ct_merge_context_msg(
        self, before: Any, after: Any, ids: list[int], mask: list[int], *_: Any, **__: Any
    ) -> Any:
        self.said.append(after[len(before) :])
        return SimpleNamespace(token_ids=[*ids, 0]), [*mask, 0], None


def looped(module: Any, tools: Sequence[Any], turns: Sequence[Action], most: int | None) -> Any:
    """verl's own loop over scripted turns, and what it has said after each."""
    loop: Any = object.__new__(module.ToolAgentLoop)
    script, asked = iter(turns), list[Any]()

    async def generate(**_: Any) -> Any:
        turn = next(script)
        asked[:] = [
            SimpleNamespace(name=call.name, arguments=json.dumps(call.arguments), tool_call_id=None)
            for call in turn.tool_calls
        ]
        return SimpleNamespace(
            token_ids=[1], num_preempted=None, extra_fields={}, log_probs=None, routed_experts=None
        )

    async def extract(ids: Any, tools: Any) -> Any:
        return "", [*asked]

    made = {tool.name: tool for tool in tools}
    vars(loop).update(
        said=[], max_user_turns=None, max_assistant_turns=most, max_parallel_calls=8,
        max_tool_response_length=10_000, tool_response_truncate_side="middle", tools=made,
        tool_schemas=[tool.tool_schema.model_dump(exclude_unset=True, exclude_none=True)
                      for tool in tools],
        tool_parser=SimpleNamespace(stop_token_ids=[], extract_tool_calls=extract),
        server_manager=SimpleNamespace(generate=generate), processor=None, response_length=10_000,
        rollout_config=SimpleNamespace(full_determinism=False),
    )  # fmt: skip
    output = asyncio.run(
        loop.run(
            {}, raw_prompt=[{"role": "user", "content": "Play."}], extra_info=INFO,
            tools_kwargs=INFO["tools_kwargs"],
        )
    )  # fmt: skip
    return output, loop.said, loop.tool_schemas


COUNT = ToolCall(name="count", arguments={})
SCRIPTS: list[tuple[list[Action], int | None]] = [
    ([calls(submit("41"), COUNT), calls(submit("42")), action("done", 2)], None),
    ([action("done", 0)], None),
    ([calls(submit("42")), calls(submit("raise"), submit("42")), calls(COUNT)], 3),
    ([calls(COUNT)], 1),
]


@pytest.mark.envs
@pytest.mark.parametrize(("turns", "most"), SCRIPTS)
def test_verl_plays_the_same(
    folder: Path, agent_loop: ModuleType, turns: list[Action], most: int | None
) -> None:
    made = maker_of("verl:tools.yaml")
    assert sys.modules[MODULE].BaseTool.__module__ == "verl.tools.base_tool"
    session: Any = made.make()
    played = play(session, row(extra_info=INFO), turns, cut=most is not None)
    kinds = sys.modules[MODULE]
    schema = made.tool_schemas[0]
    module: Any = sys.modules["verl.tools.schemas"]
    own = [kinds.Submit({"price": -0.125}, module.OpenAIFunctionToolSchema.model_validate(schema)),
           kinds.Count({}, None)]  # fmt: skip
    output, said, schemas = looped(agent_loop, own, turns, most)
    assert schemas == made.tool_schemas
    for ours, theirs in zip(played.said, said, strict=True):
        texts = [message["content"] for message in ours]
        expected = [message["content"] for message in theirs]
        raised = [text.startswith("Error executing tool") for text in expected]
        assert [t for t, r in zip(texts, raised, strict=True) if not r] == [
            t for t, r in zip(expected, raised, strict=True) if not r
        ]
    assert session.environment.tool_rewards == output.extra_fields["tool_rewards"]
    assert session.environment.extra_fields["num_turns"] == output.num_turns
    assert session.environment.extra_fields.get("tries") == output.extra_fields.get("tries")
