"""Environments of TRL, by hand, and against its own `GRPOTrainer` with scripted turns."""

from __future__ import annotations

import asyncio
import copy
import importlib.util
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hone.envs.session import Action, ToolCall
from hone.rewards.environment import EnvSpec
from hone.rewards.load_environment import load_environment
from tests.envs.shapes.driver import Played, action, maker_of, play, row

COUNTERS = '''
import asyncio


class Counter:
    """Reach the number that the row names."""

    def reset(self, goal, start=0, **columns):
        self.total, self.goal, self.log = start, goal, []
        assert columns["prompt"]
        return f" Start at {start}."

    def add(self, number: int) -> int:
        """Add a number to the total.

        Args:
            number: What to add.

        Returns:
            The total.
        """
        self.log.append("add")
        self.total += number
        return self.total

    async def later(self, text: str) -> str:
        """Say a text later.

        Args:
            text: What to say.
        """
        self.log.append("later")
        await asyncio.sleep(0)
        if text == "fail":
            raise RuntimeError("nothing to say")
        return f"{text} after {self.total}"

    def divide(self, by: float) -> dict:
        """Divide the total.

        Args:
            by: The divisor.
        """
        self.log.append("divide")
        self.total = self.total / by
        return {"total": self.total, "parts": [1, None]}

    def get_reward(self) -> float:
        return float(self.total == self.goal)

    def _hidden(self) -> None: ...


class WithoutReward:
    def reset(self, **columns):
        return None

    def look(self) -> str:
        """Look around."""
        return [{"type": "text", "text": "a wall, "}, {"type": "text", "text": "a door"}]

    def exhaust(self) -> str:
        """Use all memory."""
        raise MemoryError
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "counters.py"
    path.write_text(COUNTERS)
    return path


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


def calls(*made: ToolCall, **fields: Any) -> Action:
    return action("calls", 0, calls=made, **fields)


def contents(played: Played) -> list[list[str]]:
    return [[message["content"] for message in said] for said in played.said]


def test_an_episode_by_hand(file: Path) -> None:
    maker = maker_of(f"{file}:Counter")
    assert (maker.shape, maker.needs_tool_format) == ("TRL", True)
    assert [tool.__name__ for tool in maker.tools] == ["add", "divide", "later"]
    turns = [calls(call("add", number=3)), calls(call("add", number=4)), action("done", 2)]
    played = play(maker.make(), row(goal=7), turns)
    assert played.opening == " Start at 0."
    assert played.said[0] == [{"role": "tool", "name": "add", "content": "3"}]
    assert (contents(played), played.reward) == ([["3"], ["7"]], 1.0)
    assert played.end is not None
    assert played.end.metrics == {"tools/calls": 2.0, "tools/errors": 0.0}
    again = play(maker.make(), row(goal=8), turns)
    assert again.reward == 0.0


def test_tools_beside_those_of_the_class_are_refused(file: Path) -> None:
    """The class would not get their calls, and they not those of the class."""
    tool = file.with_name("more.py")
    tool.write_text('def more() -> str:\n    """Say more."""\n    return "more"\n')
    spec = EnvSpec(path=f"{file}:Counter", args={}, tools=(f"{tool}:more",), timeout_s=10,
                   max_sessions=1)  # fmt: skip
    with pytest.raises(ValueError, match="has tools of its own, which it runs itself"):
        load_environment(spec)


def test_what_is_wrong_with_a_call_is_its_answer(file: Path) -> None:
    made = calls(
        call("divide", by=0),
        call("subtract", number=1),
        call("add", count=1),
        call("_hidden"),
        call("later", text="fail"),
        call("reset", goal=0),
        parse_error="no closing brace",
    )
    played = play(maker_of(f"{file}:Counter").make(), row(goal=1), [made, "end"])
    words = ["division by zero", "Tool subtract not found.", "Counter.add() got an unexpected",
             "Tool _hidden not found.", "nothing to say", "Tool reset not found.",
             "no closing brace"]  # fmt: skip
    assert len(contents(played)[0]) == len(words)
    for text, expected in zip(contents(played)[0], words, strict=True):
        assert text.startswith("{'error': ")
        assert expected in text
    assert played.end is not None
    assert played.end.metrics == {"tools/calls": 6.0, "tools/errors": 7.0}


def test_a_turn_of_which_no_call_can_be_read_does_not_end_the_episode(file: Path) -> None:
    turns = [calls(parse_error="no closing brace"), calls(call("add", number=1)), "end"]
    played = play(maker_of(f"{file}:Counter").make(), row(goal=1), turns)
    assert contents(played) == [["{'error': 'no closing brace'}"], ["1"]]
    assert played.reward == 1.0


def test_results_stand_in_the_order_of_their_calls_with_their_ids(file: Path) -> None:
    session: Any = maker_of(f"{file}:Counter").make()
    made = [
        ToolCall(name="later", arguments={"text": "a"}, id="one"),
        ToolCall(name="add", arguments={"number": 2}, id="two"),
        ToolCall(name="later", arguments={"text": "b"}),
    ]
    played = play(session, row(goal=2), [calls(*made), "end"])
    said = [(message.get("tool_call_id"), message["content"]) for message in played.said[0]]
    assert said == [("one", "a after 2"), ("two", "2"), (None, "b after 2")]
    assert session._env.log == ["add", "later", "later"]  # as TRL runs them


def test_calls_of_the_last_turn_are_not_made_and_no_turn_is_played_twice(file: Path) -> None:
    maker = maker_of(f"{file}:Counter")
    played = play(maker.make(), row(goal=0), [calls(call("add", number=3))])
    assert played.end is not None
    assert (played.reward, played.end.truncated) == (1.0, True)

    async def twice() -> Any:
        session: Any = maker.make()
        await session.start(row(goal=3))
        once = calls(call("add", number=3))
        return await session.step(once), await session.step(calls(*once.tool_calls, must_end=True))

    said, end = asyncio.run(twice())
    assert (said[0]["content"], end.score, end.truncated) == ("3", 1.0, True)


def test_without_get_reward_the_reward_functions_score(file: Path) -> None:
    played = play(maker_of(f"{file}:WithoutReward").make(), row(), [calls(call("look")), "end"])
    assert (played.opening, played.reward) == (None, None)
    assert contents(played) == [["a wall, a door"]]


def test_memory_is_a_failure_and_no_answer(file: Path) -> None:
    maker = maker_of(f"{file}:WithoutReward")
    with pytest.raises(MemoryError):
        play(maker.make(), row(), [calls(call("exhaust")), "end"])
    with pytest.raises(TypeError, match="goal"):  # of `reset`
        play(maker_of(f"{file}:Counter").make(), row(), ["end"])


# TRL's own trainer


@dataclass
class Own:
    """What TRL's trainer made of the scripts."""

    prompts: list[Any] = field(default_factory=list)
    completions: list[list[dict[str, Any]]] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    call_frequency: float = 0.0
    failure_frequency: float = 0.0


Script = Sequence[Sequence[ToolCall]]
"""The calls of each turn; a last turn without calls is added."""


def texts_of(script: Script, number: int) -> list[str]:
    """The turns as Qwen writes them. Each names its script, so that its rollout is known again."""
    return [
        f"script {number}. "
        + "\n".join(
            f"<tool_call>\n{json.dumps({'name': c.name, 'arguments': c.arguments})}\n</tool_call>"
            for c in made
        )
        for made in [*script, []]
    ]


def byte_tokenizer(template: str) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|im_end|>", pad_token="<|endoftext|>"
    )
    fast.add_tokens([AddedToken("<|im_start|>", special=True)])
    fast.add_tokens(
        ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>",
         "</tool_response>"]
    )  # fmt: skip
    fast.chat_template = template
    return fast


def trained(
    env: type, scripts: Sequence[Script], columns: dict[str, Any], folder: Path, most: int | None
) -> Own:
    """One step of TRL's `GRPOTrainer`, whose generation is replaced by the scripts."""
    from datasets import Dataset
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    found = importlib.util.find_spec("trl")
    assert found is not None
    template = Path(str(found.origin)).parent / "chat_templates/qwen3.jinja"
    tokenizer = byte_tokenizer(template.read_text())
    own, written = Own(), [texts_of(script, number) for number, script in enumerate(scripts)]

    class Scripted(GRPOTrainer):
        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
            turns: list[str] = []
            for place, ids in enumerate(prompt_ids):
                text = tokenizer.decode(ids)
                known = [n for n in range(len(scripts)) if f"script {n}. " in text]
                number = known[0] if known else place
                turns.append(written[number][text.count(f"script {number}. ")])
            return [tokenizer(f"{turn}<|im_end|>")["input_ids"] for turn in turns], None

        def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, ids: Any) -> Any:
            rewards = super()._calculate_rewards(inputs, prompts, completions, ids)
            own.prompts, own.completions = copy.deepcopy(prompts), copy.deepcopy(completions)
            own.rewards = rewards[:, -1].tolist()
            return rewards

    config = Qwen3Config(
        vocab_size=len(tokenizer) + 8, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8,
    )  # fmt: skip
    prompt = [{"role": "user", "content": "Count."}]
    trainer = Scripted(
        model=Qwen3ForCausalLM(config),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=GRPOConfig(
            output_dir=str(folder), per_device_train_batch_size=len(scripts),
            num_generations=len(scripts), max_completion_length=3000, max_steps=1, report_to=[],
            use_cpu=True, bf16=False, max_tool_calling_iterations=most, save_strategy="no",
            gradient_checkpointing=False,
        ),
        train_dataset=Dataset.from_list([{"prompt": prompt, **columns}]),
        processing_class=tokenizer,
        environment_factory=env,
    )  # fmt: skip
    trainer.train()
    (logged,) = [entry for entry in trainer.state.log_history if "tools/call_frequency" in entry]
    own.call_frequency = logged["tools/call_frequency"]
    own.failure_frequency = logged["tools/failure_frequency"]
    return own


SCRIPTS: list[Script] = [
    [[call("add", number=3)], [call("add", number=4)]],
    [[call("divide", by=0), call("add", number=7)], [call("later", text="so")]],
    [[call("nothing"), call("add", count=1)], [call("later", text="fail")],
     [call("add", number=7)]],
    [],
    [[call("later", text="a"), call("add", number=2), call("later", text="fail")]],
    [[call("divide", by=4)], [call("add", number=1)], [call("add", number=1)],
     [call("add", number=5)]],
]  # fmt: skip


@pytest.mark.envs
@pytest.mark.parametrize("most", [None, 2])
def test_the_trainer_of_trl_plays_the_same(file: Path, tmp_path: Path, most: int | None) -> None:
    pytest.importorskip("trl")
    pytest.importorskip("accelerate")
    maker = maker_of(f"{file}:Counter")
    columns = {"goal": 7, "start": 0}
    own = trained(sys.modules["hone_reward_counters"].Counter, SCRIPTS, columns, tmp_path, most)
    num_calls = num_failed = 0.0
    for number, script in enumerate(SCRIPTS):
        made = [calls(*turn) for turn in script] + [action("end", 0)]
        turns = made if most is None else made[: most + 1]
        played = play(maker.make(), row(**columns), turns)
        (message,) = own.prompts[number]
        assert message["content"] == f"Count.{played.opening}"
        assert played.reward == own.rewards[number]
        answers = turn_by_turn(own.completions[number])
        assert len(answers) == len(played.said)
        for theirs, ours in zip(answers, played.said, strict=True):
            # Results of asynchronous tools come last in TRL, and in their places here.
            assert sorted(map(str, theirs)) == sorted(map(str, ours))
            asynchronous = [message["name"] == "later" for message in ours]
            if asynchronous == sorted(asynchronous):
                assert theirs == ours
        assert played.end is not None
        num_calls += played.end.metrics["tools/calls"]
        num_failed += played.end.metrics["tools/errors"]
    assert num_calls / len(SCRIPTS) == pytest.approx(own.call_frequency)
    assert num_failed / num_calls == pytest.approx(own.failure_frequency)


def turn_by_turn(completion: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The messages of tools after each of the policy's turns that has some."""
    answers: list[list[dict[str, Any]]] = []
    for message in completion:
        if message["role"] != "tool":
            answers.append([])
        else:
            answers[-1].append(message)
    return [messages for messages in answers if messages]
