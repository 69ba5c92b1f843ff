"""Which shape an environment has, and what is said of one that has none."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from hone.envs import shapes
from hone.envs.shapes import methods_problem, prefix_of
from hone.errors import UserError
from hone.rewards.play import Player
from hone.user_code.resolve import check_signature, resolve
from tests.envs.shapes.driver import action, maker_of, play, row

CLASSES = '''
class Own:
    """A session of hone."""

    def __init__(self, word="go"):
        self.word, self.log = word, []

    def start(self, row):
        return self.word

    async def step(self, action):
        return 1.0 if action.text == self.word else "again"

    def close(self):
        self.log.append("closed")


class Stateless:
    def step(self, episode):
        return 1.0


class StatelessWithMore:
    def reset(self): ...

    def step(self, episode):
        return 1.0


class StatelessByAnotherName:
    def helper(self): ...

    def step(self, view):
        return 1.0


class TrlTools:
    def reset(self, **columns): ...

    def look(self) -> str:
        return "a wall"


class TrlWithStep:
    def reset(self, **columns): ...

    def step(self, direction: str) -> str:
        return direction

    def get_reward(self) -> float:
        return 0.0


class SkyRL:
    def __init__(self, env_config=None, extras=None):
        self.extras = extras

    def init(self, prompt):
        return [*prompt, {"role": "user", "content": f"goal {self.extras['goal']}"}], {}

    def step(self, action):
        done = action == "end"
        said = [] if done else [{"role": "user", "content": "more"}]
        return {"observations": said, "reward": 0.5, "done": done, "metadata": {}}

    def get_metrics(self):
        return {"steps": 2, "name": "x"}

    def close(self): ...


class SkyRLWithoutExtras:
    def __init__(self, config): ...

    def init(self, prompt): ...

    def step(self, action): ...


class Arena:
    def reset(self, num_players, seed=None):
        self.num = seed

    def step(self, action):
        self.num -= 1
        return self.num == 0, {}

    def get_observation(self):
        return 0, f"left {self.num}"

    def close(self):
        return {0: 0.75}, {0: {"turn_count": 3, "reason": "won"}}


class OpenRLHFAgent:
    async def reset(self, states): ...

    async def step(self, states): ...


class ResetAlone:
    def reset(self, **columns): ...

    def get_reward(self): ...

    def _look(self): ...


class ResetAndStep:
    def reset(self, seed=None): ...

    def step(self, action): ...


class StartAndInit:
    def start(self, row): ...

    def init(self, prompt): ...

    def step(self, action): ...


class Nothing:
    def _hidden(self): ...


class Fails:
    def __init__(self):
        raise RuntimeError("no room")

    def reset(self, **columns): ...

    def look(self): ...


def make_own(word="go"):
    return Own(word)


def make_trl():
    return TrlTools()


Stateless.__call__ = Own.__call__ = lambda self: None
an_object, a_session = Stateless(), Own()
'''


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shapes") / "classes.py"
    path.write_text(CLASSES)
    return path


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("Own", "hone"),
        ("make_own", "hone"),
        ("Stateless", None),
        ("StatelessWithMore", None),
        ("StatelessByAnotherName", None),
        ("an_object", None),
        ("TrlTools", "TRL"),
        ("TrlWithStep", "TRL"),
        ("make_trl", "TRL"),
        ("SkyRL", "SkyRL-Gym"),
        ("Arena", "textarena"),
        ("OpenRLHFAgent", "OpenRLHF"),
    ],
)
def test_the_shape_of_a_class(file: Path, name: str, shape: str | None) -> None:
    made = shapes.made_from(f"{file}:{name}", {}, resolve=resolve)
    assert (made.shape if made else None) == shape
    if made is None:
        path = f"{file}:{name}"
        Player(resolve(path, "environment"), path, {})  # is what plays it
    else:
        assert made.file == str(file)
        assert made.needs_tool_format == (shape == "TRL")


@pytest.mark.parametrize(
    ("name", "args", "words"),
    [
        ("ResetAlone", {}, "it has `get_reward` and `reset`. For TRL's shape a public method is"),
        ("ResetAndStep", {}, "it has `reset` and `step`. Shapes: hone, stateless: `step.*; TRL: "),
        ("StartAndInit", {}, "which is the shape of hone and SkyRL-Gym; inherit from"),
        ("Nothing", {}, "it has no public methods. Shapes: "),
        ("Own", {"wrod": "x"}, "env.args do not fit '.*', which takes word: .*Did you mean 'word'"),
        ("TrlTools", {"x": 1}, "env.args do not fit .*, which takes nothing"),
        ("SkyRLWithoutExtras", {}, "do not fit"),
        ("Fails", {}, "making '.*Fails' failed: RuntimeError: no room"),
        ("a_session", {}, "is an object, and each episode needs its own; name its class"),
        ("Missing", {}, "has no environment 'Missing'"),
    ],
)
def test_what_is_said_of_one_that_cannot_be_played(
    file: Path, name: str, args: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        shapes.made_from(f"{file}:{name}", args, resolve=resolve)


def test_methods_alone_say_what_is_wrong() -> None:
    """As where a file is read before a run, and not imported."""
    assert methods_problem(["reset", "look", "__init__"]) is None
    assert methods_problem(["step"]) is None
    assert methods_problem(["step", "step(episode)", "reset"]) is None
    assert "For TRL's shape" in str(methods_problem(["reset", "_look", "__init__"]))
    assert "no public methods" in str(methods_problem(["__init__", "_x"]))


@pytest.mark.parametrize("name", ["gymnasium:X-v0", "textarena:X", "skyrl:x", "verifiers:x"])
def test_a_missing_package_is_named(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hone.extras.is_installed", lambda _: False)
    package = {"skyrl": "skyrl_gym"}.get(str(prefix_of(name)), prefix_of(name))
    with pytest.raises(UserError, match=f"env.path needs the `{package}` library.*pip install"):
        maker_of(name)


def test_the_scorer_of_reasoning_gym_needs_no_column_by_name() -> None:
    spec = "hone.envs.shapes.reasoning_gym:score_answer"
    found = check_signature(resolve(spec), spec, {"tag": ""})
    assert found == {"columns": [], "framework": "hone"}


def test_prefixes_are_names_of_frameworks_alone() -> None:
    assert prefix_of("openenv:http://127.0.0.1:8000") == "openenv"
    assert prefix_of("my/envs.py:Game") is None
    assert prefix_of("package.module:Game") is None
    assert prefix_of("openenv") is None


def test_an_own_session_is_made_anew_for_each_episode(file: Path) -> None:
    maker = maker_of(f"{file}:Own", {"word": "stop"})
    first: Any = maker.make()
    played = play(first, row(), ["x", "stop"], cut=False)
    assert (played.opening, played.said, first.log) == ("stop", ["again"], ["closed"])
    assert maker.make() is not first


def test_a_class_in_the_shape_of_skyrl_gym(file: Path) -> None:
    played = play(maker_of(f"{file}:SkyRL").make(), row(goal=3), ["a", "end"])
    assert played.opening == [{"role": "user", "content": "goal 3"}]
    assert played.said == [[{"role": "user", "content": "more"}]]
    assert played.end is not None
    assert (played.reward, played.end.metrics) == (1.0, {"steps": 2.0})
    cut = play(maker_of(f"{file}:SkyRL").make(), row(goal=3), ["a", "b"])
    assert cut.end is not None
    assert (cut.reward, cut.end.truncated) == (1.0, True)


def test_a_class_in_the_shape_of_textarena(file: Path) -> None:
    played = play(maker_of(f"{file}:Arena").make(), row(seed=2**31 + 3), ["a", "b", "c"])
    assert [played.opening, *played.said] == ["left 3", "left 2", "left 1"]
    assert played.end is not None
    assert (played.reward, played.end.metrics) == (0.75, {"turn_count": 3.0})


def test_a_turn_is_played_once_though_its_observation_did_not_fit(file: Path) -> None:
    session: Any = maker_of(f"{file}:Arena").make()

    async def steps() -> Any:
        await session.start(row(seed=5))
        await session.step(action("a", 0))
        return await session.step(action("a", 0, must_end=True))

    end = asyncio.run(steps())
    assert (end.score, end.truncated, session._game.num) == (0.0, True, 4)
