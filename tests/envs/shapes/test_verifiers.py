"""Environments of verifiers, against the package's own `run_rollout` with a scripted client: equal
messages, rewards and metrics.

`make test-agents` runs them, in an environment of their own.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hone.envs.session import Action, DataRow, ToolCall
from hone.types import Message
from tests.envs.shapes.driver import Played, action, maker_of, play, play_async, row

clients = pytest.importorskip("verifiers.clients")
pytestmark = pytest.mark.envs

MODULE = '''
import verifiers as vf
from datasets import Dataset

ROWS = [{"question": f"What is {n} and {n}?", "answer": str(2 * n)} for n in range(4)]


def exact(completion, answer, **kwargs):
    return float(completion[-1].content.endswith(answer))


async def brief(completion, state, **kwargs):
    return 1 / len(completion[-1].content)


def sums(weight=0.25):
    """One turn, two weighted rewards."""
    rubric = vf.Rubric(funcs=[exact, brief], weights=[1.0, weight])
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(ROWS), system_prompt="Be brief.", rubric=rubric
    )


class Hints(vf.MultiTurnEnv):
    """Says how far a guess is off; ends by itself at the right one."""

    async def setup_state(self, state):
        state["off"] = []

    async def env_response(self, messages, state, **kwargs):
        off = int(messages[-1].content) - int(state["answer"])
        state["off"].append(off)
        said = [{"role": "user", "content": f"off by {off}"}]
        if not off:
            state["final_env_response"] = said
        return said


async def nearness(state, **kwargs):
    return 1 / (1 + sum(map(abs, state["off"])))


def hints(max_turns=4):
    return Hints(
        dataset=Dataset.from_list(ROWS), rubric=vf.Rubric(funcs=[nearness]), max_turns=max_turns
    )


async def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return a + b


def spell(word: str) -> str:
    """Spell a word.

    Args:
        word: What to spell.
    """
    return "-".join(word)


def tools():
    return vf.ToolEnv(
        dataset=Dataset.from_list(ROWS), rubric=vf.Rubric(funcs=[exact]), tools=[add, spell],
        max_turns=3,
    )


class Account(vf.StatefulToolEnv):
    """Passes the state of the rollout to a tool, hidden from the policy."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.add_tool(self.pay, args_to_skip=["account"])

    async def setup_state(self, state):
        state["account"] = {"left": 10}

    def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
        return {**tool_args, "account": state["account"]}

    async def pay(self, sum: int, account: dict) -> str:
        """Pay a sum.

        Args:
            sum: How much.
        """
        if sum > account["left"]:
            raise ValueError("not enough")
        account["left"] -= sum
        return f"{account['left']} left"


async def left(state, **kwargs):
    return float(state["account"]["left"])


def accounts():
    return Account(dataset=Dataset.from_list(ROWS), rubric=vf.Rubric(funcs=[left]), max_turns=5)


class Broken(vf.MultiTurnEnv):
    async def env_response(self, messages, state, **kwargs):
        raise vf.InfraError("sandbox lost")


def broken():
    return Broken(dataset=Dataset.from_list(ROWS), rubric=vf.Rubric(funcs=[exact]))


class Rewrites(vf.MultiTurnEnv):
    async def get_prompt_messages(self, state):
        return [{"role": "user", "content": f"turn {len(state['trajectory'])}"}]

    async def env_response(self, messages, state, **kwargs):
        return []


def rewrites():
    return Rewrites(dataset=Dataset.from_list(ROWS), rubric=vf.Rubric(funcs=[exact]), max_turns=3)


def relative(completions, **kwargs):
    return [float(len(completions)) for _ in completions]


def groups():
    return vf.SingleTurnEnv(dataset=Dataset.from_list(ROWS), rubric=vf.Rubric(funcs=[relative]))


class Walk:
    """A game in Gymnasium's words: reach 3."""

    def reset(self, **kwargs):
        self.place = 0
        return f"You are at 0, seed {kwargs.get('seed')}.", {}

    def step(self, number):
        self.place += number
        return f"at {self.place}", float(self.place), self.place >= 3, False, {}


def walks():
    from verifiers.envs.experimental.gym_env import GymEnv

    return GymEnv(
        env_cls=Walk, num_train_episodes=5, num_eval_episodes=0, max_episode_steps=4,
        action_parser=int,
    )


load_environment = hints
'''


@pytest.fixture(scope="module")
def module(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("verifiers") / "many_envs.py"
    file.write_text(MODULE)
    sys.path.insert(0, str(file.parent))
    return file


class Script(clients.Client):
    """A model that says the scripted turns, as a client of the package."""

    def __init__(self, turns: Sequence[Action]) -> None:
        super().__init__(None)
        self.turns, self.prompts = list(turns), list[Any]()

    async def get_response(self, prompt: Any, **_: Any) -> Any:
        from verifiers.types import Response, ResponseMessage
        from verifiers.types import ToolCall as Call

        self.prompts.append([message.model_dump(exclude_none=True) for message in prompt])
        index = len(self.prompts) - 1
        turn = self.turns[index]
        made = [
            Call(id=f"call_{index}_{n}", name=c.name, arguments=json.dumps(c.arguments))
            for n, c in enumerate(turn.tool_calls)
        ]
        message = ResponseMessage(
            role="assistant", content=turn.text, tool_calls=made or None,
            finish_reason="tool_calls" if made else "stop", is_truncated=False,
        )  # fmt: skip
        return Response(id="x", created=0, model="m", message=message)

    def setup_client(self, config: Any) -> None: ...

    async def to_native_tool(self, tool: Any) -> Any: ...

    async def to_native_prompt(self, messages: Any) -> Any: ...

    async def get_native_response(self, *args: Any, **kwargs: Any) -> Any: ...

    async def raise_from_native_response(self, response: Any) -> None: ...

    async def from_native_response(self, response: Any) -> Any: ...

    async def close(self) -> None: ...


def own_rollout(env: Any, example: dict[str, Any], turns: Sequence[Action]) -> tuple[Any, Script]:
    client = Script(turns)
    return asyncio.run(env.run_rollout(dict(example), client, "m", {})), client


def data_of(env: Any, number: int) -> tuple[DataRow, dict[str, Any]]:
    """A row of the environment's own data set, as a row of ours."""
    example = env.get_dataset()[number]
    columns = {name: value for name, value in example.items() if name != "prompt"}
    prompt: list[Message] = [dict(message) for message in example["prompt"]]
    return row(prompt, **columns), example


def check_same(path: str, turns: Sequence[Action], *, number: int = 3, env: Any = None) -> Played:
    """Play the turns by a session and by the package, and compare."""
    maker = maker_of(path)
    name = path.rpartition(":")[2]
    env = env or getattr(sys.modules["hone_reward_many_envs"], name)()
    data, example = data_of(env, number)
    played = play(maker.make(), data, turns, cut=False)
    output, client = own_rollout(env, example, turns)
    assert output["error"] is None
    assert played.end is not None
    assert played.reward == output["reward"]
    assert played.end.metrics == pytest.approx({k: float(v) for k, v in output["metrics"].items()})
    assert played.end.truncated == output["is_truncated"]
    # Each request of the package is the one before, the turn, and what the session said.
    for index, said in enumerate(played.said):
        before, after = client.prompts[index], client.prompts[index + 1]
        assert after[: len(before)] == before
        assert after[len(before)]["content"] == turns[index].text
        assert after[len(before) + 1 :] == list(said)
    assert len(client.prompts) == len(played.said) + 1
    return played


def test_one_turn_with_weighted_rewards(module: Path) -> None:
    assert maker_of(f"{module}:sums").shape == "verifiers"
    for text in ("It is 6", "6", "It is 7"):
        assert check_same(f"{module}:sums", [action(text, 0)]).said == []
    maker = maker_of(f"{module}:sums", {"weight": 0.0})
    data, _ = data_of(sys.modules["hone_reward_many_envs"].sums(), 3)
    assert play(maker.make(), data, ["6"]).reward == 1.0
    assert data.messages[0] == {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    "guesses", [["6"], ["4", "6"], ["1", "2", "6"], ["1", "2", "3", "4"], ["9", "8", "7", "6"]]
)
def test_several_turns(module: Path, guesses: list[str]) -> None:
    check_same(f"{module}:hints", [action(guess, 0) for guess in guesses])


@pytest.mark.parametrize("steps", ["1 2 x", "3 x", "1 -1 0 1", "1 north x"])
def test_the_gym_environment_of_the_package(module: Path, steps: str) -> None:
    check_same(f"{module}:walks", [action(step, 0) for step in steps.split()])


def calls(text: str, *made: ToolCall) -> Action:
    return action(text, 0, calls=made)


def test_tools_with_and_without_state(module: Path) -> None:
    maker = maker_of(f"{module}:tools")
    assert maker.needs_tool_format
    assert [one["function"]["name"] for one in maker.tool_schemas] == ["add", "spell"]
    assert maker.tool_schemas[0]["function"]["parameters"]["required"] == ["a", "b"]
    add = ToolCall(name="add", arguments={"a": 3, "b": 3})
    spell = ToolCall(name="spell", arguments={"word": "six"})
    wrong = ToolCall(name="add", arguments={"a": 3})
    unknown = ToolCall(name="subtract", arguments={})
    check_same(f"{module}:tools", [calls("I add", add, spell), action("It is 6", 1)])
    check_same(f"{module}:tools", [calls("", wrong, unknown), calls("", add), calls("", add)])
    pay = [ToolCall(name="pay", arguments={"sum": number}) for number in (3, 20, 4)]
    played = check_same(
        f"{module}:accounts", [calls("", pay[0]), calls("", *pay[1:]), action("done", 2)]
    )
    assert played.reward == 3.0
    assert [message["content"] for message in played.said[1]] == ["not enough", "3 left"]


def test_a_limit_of_hone_ends_the_rollout_and_it_is_scored(module: Path) -> None:
    maker = maker_of(f"{module}:hints")
    env = sys.modules["hone_reward_many_envs"].hints()
    data, _ = data_of(env, 3)
    played = play(maker.make(), data, ["4", "5"])  # the second must end
    assert played.end is not None
    assert (played.reward, played.end.truncated) == (1 / 4, True)
    assert played.end.metrics["num_turns"] == 2.0

    async def twice() -> Any:
        session = maker.make()
        await session.start(data)
        said = await session.step(action("4", 0))
        end = await session.step(action("4", 0, must_end=True))
        await session.close()
        return said, end

    said, end = asyncio.run(twice())
    assert said == [{"role": "user", "content": "off by -2"}]
    assert (end.score, end.truncated, end.metrics["num_turns"]) == (1 / 3, True, 1.0)


def test_an_error_of_the_environment_is_a_failure_and_no_reward(module: Path) -> None:
    data, _ = data_of(sys.modules["hone_reward_many_envs"].hints(), 3)
    with pytest.raises(RuntimeError, match=r"ended with an error.*sandbox lost"):
        play(maker_of(f"{module}:broken").make(), data, ["6", "6"])
    with pytest.raises(ValueError, match="rewrote message 0 of the conversation"):
        play(maker_of(f"{module}:rewrites").make(), data, ["6", "6"])


def test_rewards_of_groups_are_refused(module: Path) -> None:
    with pytest.raises(ValueError, match="compares the rollouts of a group"):
        maker_of(f"{module}:groups")


def test_an_environment_by_its_id(module: Path) -> None:
    maker = maker_of("verifiers:many-envs", {"max_turns": 1})
    data, _ = data_of(sys.modules["many_envs"].hints(), 3)
    played = play(maker.make(), data, ["4", "6"], cut=False)
    assert played.end is not None
    assert played.said == []
    with pytest.raises(ValueError, match="loading 'verifiers:no-such-env' failed"):
        maker_of("verifiers:no-such-env")


def test_a_session_that_is_closed_early_leaves_nothing(module: Path) -> None:
    data, _ = data_of(sys.modules["hone_reward_many_envs"].hints(), 3)

    async def tasks() -> int:
        await play_async(maker_of(f"{module}:hints").make(), data, ["4"], cut=False)
        return len(asyncio.all_tasks())

    assert asyncio.run(tasks()) == 1
