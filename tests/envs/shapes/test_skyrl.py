"""Environments of SkyRL-Gym, unmodified, against SkyRL's own `SkyRLGymGenerator` on a scripted
engine: equal turns, observations, masks, rewards and metrics."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import sqlite3
import sys
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest

from hone.extras import is_installed
from tests.envs.shapes.driver import Played, maker_of, play, row

pytestmark = pytest.mark.envs

PROMPT = [{"role": "user", "content": "Play."}]
END = "<|im_end|>"
OPEN = "<|im_start|>"
PACKAGES = (
    "skyrl",
    "skyrl.backends",
    "skyrl.backends.skyrl_train",
    "skyrl.backends.skyrl_train.inference_servers",
    "skyrl.train",
    "skyrl.train.generators",
)


@pytest.fixture
def generator(monkeypatch: pytest.MonkeyPatch) -> Iterator[type]:
    """SkyRL's class. Its packages import an engine, Ray and a trainer, so only the modules that it
    needs are imported."""
    if not (is_installed("skyrl") and is_installed("skyrl_gym")):
        pytest.skip("skyrl is not installed")
    root = Path(str(importlib.util.find_spec("skyrl").origin)).parent.parent  # type: ignore
    for name in PACKAGES:
        package = ModuleType(name)
        package.__path__ = [str(root.joinpath(*name.split(".")))]
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.setitem(sys.modules, "skyrl.train.config", MagicMock())
    module = importlib.import_module("skyrl.train.generators.skyrl_gym_generator")
    yield module.SkyRLGymGenerator
    for name in [name for name in sys.modules if name.startswith("skyrl.")]:
        if name not in PACKAGES and name != "skyrl.train.config":
            del sys.modules[name]


class Letters:
    """A tokenizer with an id for each letter and mark, and the template of Qwen."""

    eos_token, eos_token_id = END, 1
    marks = (OPEN, END)

    def encode(self, text: str, **_: Any) -> list[int]:
        for number, mark in enumerate(self.marks):
            text = text.replace(mark, chr(number))
        return [*map(ord, text)]

    def decode(self, ids: Sequence[int]) -> str:
        return "".join(self.marks[i] if i < len(self.marks) else chr(i) for i in ids)

    def apply_chat_template(
        self, messages: Sequence[Any], *, add_generation_prompt: bool = False, **_: Any
    ) -> list[int]:
        text = "".join(f"{OPEN}{m['role']}\n{m['content']}{END}\n" for m in messages)
        return self.encode(text + (f"{OPEN}assistant\n" if add_generation_prompt else ""))


class Engine:
    """Gives the scripted turns, each with the token that ends it."""

    def __init__(self, turns: Sequence[str]) -> None:
        self.turns = list(turns)

    async def generate(self, _: Any, model: Any = None) -> dict[str, Any]:
        turn = self.turns.pop(0)
        ids = Letters().encode(turn + END)
        return {"responses": [turn], "response_ids": [ids], "stop_reasons": ["stop"]}

    async def finish_session(self, _: Any) -> None: ...


def generated(
    generator: Any, name: str, columns: dict[str, Any], turns: list[str], *, config: Any, most: int
) -> Any:
    """SkyRL's own loop."""
    settings = SimpleNamespace(
        max_turns=most, batched=False, use_conversation_multi_turn=True, chat_template_kwargs={},
        chat_template=SimpleNamespace(source="name", name_or_path=None),
        step_wise_trajectories=False, append_eos_token_after_stop_str_in_multi_turn=True,
        apply_overlong_filtering=False, use_cache_salt=False,
        inference_engine=SimpleNamespace(enable_return_routed_experts=False),
    )  # fmt: skip
    gym = SimpleNamespace(max_env_workers=0, **{name: config})
    made = generator(settings, gym, Engine(turns), Letters())
    return asyncio.run(
        made.agent_loop(PROMPT, name, {"prompt": PROMPT, **columns}, 1000, 10_000, {})
    )


def check(
    generator: Any,
    name: str,
    columns: dict[str, Any],
    turns: list[str],
    *,
    args: dict[str, Any] | None = None,
    most: int = 5,
) -> Played:
    """Play the turns by a session and by SkyRL, and compare."""
    from omegaconf import OmegaConf

    config = OmegaConf.create(args) if args else {}
    expected = generated(generator, name, dict(columns), turns, config=config, most=most)
    played = play(
        maker_of(f"skyrl:{name}", args).make(), row(PROMPT, **columns, max_turns=most), turns,
        cut=False,
    )  # fmt: skip
    assert played.end is not None
    assert played.end.metrics == {key: float(v) for key, v in expected.env_metrics.items()}
    # Turns and what stands between them, by SkyRL's mask of the loss.
    marked = list(zip(expected.loss_mask, expected.response_ids, strict=True))
    parts = [
        (is_turn, Letters().decode([letter for _, letter in part]))
        for is_turn, part in groupby(marked, key=lambda one: one[0])
    ]
    assert [text for is_turn, text in parts if is_turn] == [
        turn + END for turn in turns[: len(played.said) + 1]
    ]
    observed = [text for is_turn, text in parts if not is_turn]
    assert len(observed) == len(played.said)
    for text, said in zip(observed, played.said, strict=True):
        rendered = Letters().decode(
            Letters().apply_chat_template(said or [], add_generation_prompt=True)
        )
        assert text == f"\n{rendered}"
    # Rewards at the last token of each turn.
    ends = [i for i, (is_turn, letter) in enumerate(marked) if is_turn and letter == 1]
    rewards = [*played.rewards, played.end.score]
    assert [expected.reward[end] for end in ends] == rewards
    assert sum(expected.reward) == pytest.approx(played.reward)
    return played


def test_single_turns(generator: type) -> None:
    truth = {"reward_spec": {"ground_truth": "72"}}
    for turn, score in (("so #### 72", 1.0), ("so #### 71", 0.0), ("72", 0.0)):
        assert check(generator, "gsm8k", truth, [turn]).reward == score
    aime = {"reward_model": {"ground_truth": "204"}}
    rewards = [
        check(generator, "aime", aime, [turn]).reward
        for turn in ("Answer: 204", "Answer: 203", "nothing")
    ]
    assert rewards[0] == 1.0
    assert rewards[1] != 1.0
    tests = json.dumps(
        [{"input": "3\n", "output": "9\n", "testtype": "stdin", "metadata": {"func_name": None}}]
    )
    square = "```python\nprint(int(input()) ** 2)\n```"
    for turn in (square, square.replace("** 2", "+ 2"), "no code"):
        check(generator, "lcb", {"reward_spec": {"ground_truth": tests}}, [turn])


def test_several_turns(generator: type) -> None:
    truth = {"reward_spec": {"ground_truth": "72"}}
    for turns in (["thinking", "#### 72"], ["#### 72", "#### 72"], ["a", "b", "c", "d", "e"]):
        check(generator, "gsm8k_multi_turn", truth, turns)
        check(generator, "gsm8k_multi_turn", truth, turns, most=2)


def test_a_database(generator: type, tmp_path: Path) -> None:
    folder = tmp_path / "spider/database/shop"
    folder.mkdir(parents=True)
    with sqlite3.connect(folder / "shop.sqlite") as database:
        database.execute("create table items (name text, price int)")
        database.executemany("insert into items values (?, ?)", [("pen", 2), ("ink", 9)])
    gold = "SELECT name FROM items WHERE price > 5"
    columns = {"db_id": "shop", "data": "spider", "reward_spec": {"ground_truth": gold}}
    answers = [
        ["<think>look</think><sql>SELECT * FROM items</sql>", f"<solution>{gold}</solution>"],
        ["<sql>SELECT nonsense</sql>", "no query", "<solution>SELECT name FROM items</solution>"],
        ["a", "b", "c"],
    ]
    for turns in answers:
        check(generator, "text2sql", columns, turns, args={"db_path": str(tmp_path)}, most=3)


def test_an_unknown_name_lists_those_there_are() -> None:
    pytest.importorskip("skyrl_gym")
    with pytest.raises(ValueError, match=r"no environment 'gsm9k'. Did you mean 'gsm8k'"):
        maker_of("skyrl:gsm9k")
