"""Sessions on servers of OpenEnv, against its own client on the same server; and by a connection
written here, without the package."""

from __future__ import annotations

import importlib.util
import json
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hone.envs.shapes.openenv import Fields, OpenEnvSession
from hone.extras import is_installed
from tests.envs.shapes.driver import Played, maker_of, play, row

FIELDS = Fields(action="message", reset={"level": 2}, columns=("board",))


class Scripted:
    """A connection whose frames are written down, and that remembers what was sent."""

    def __init__(self, frames: Sequence[dict[str, Any] | Exception]) -> None:
        self.frames = list(frames)
        self.sent: list[dict[str, Any]] = []
        self.closed = 0

    def send(self, message: str) -> None:
        self.sent.append(json.loads(message))

    def recv(self) -> str:
        frame = self.frames.pop(0)
        if isinstance(frame, Exception):
            raise frame
        return json.dumps(frame)

    def __enter__(self) -> Scripted:
        return self

    def __exit__(self, *_: object) -> None:
        self.closed += 1


def observation(reward: float | None = None, *, done: bool = False, **fields: Any) -> Any:
    data = {"observation": {**fields, "metadata": {}}, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


def error(code: str, message: str, errors: Sequence[Any] = ()) -> Any:
    return {"type": "error", "data": {"code": code, "message": message, "errors": list(errors)}}


def scripted(
    frames: Sequence[Any], turns: Sequence[str], *, fields: Fields = FIELDS
) -> tuple[Played, Scripted]:
    connection = Scripted(frames)
    data = row(board="3x3", seed=2**40 + 5)
    return play(OpenEnvSession(lambda: connection, fields), data, turns), connection


def test_an_episode_by_its_frames() -> None:
    frames = [
        observation(said="Begin."),
        observation(0.25, said="Go on.", hint=None),
        observation(0.5, board=[1, 2], left=3),
        observation(2, done=True, said="Over."),
    ]
    played, connection = scripted(frames, ["one", '{"message": "two", "n": 1}', "three", "four"])
    assert played.opening == "\nBegin."
    assert played.said == ["Go on.", '{"board": [1, 2], "left": 3}']
    assert (played.rewards, played.reward) == ([0.25, 0.5], 2.75)
    assert played.end is not None
    assert not played.end.truncated
    assert connection.sent == [
        {"type": "reset", "data": {"seed": 5 + 2**40 % 2**31, "level": 2, "board": "3x3"}},
        {"type": "step", "data": {"message": "one"}},
        {"type": "step", "data": {"message": "two", "n": 1}},
        {"type": "step", "data": {"message": "three"}},
        {"type": "close"},
    ]
    assert connection.closed == 1


def test_an_action_that_does_not_fit_is_answered_and_every_other_error_is_a_failure() -> None:
    wrong = [{"loc": ["number"], "msg": "not a number"}]
    frames = [
        observation(said="Begin."),
        error("VALIDATION_ERROR", "Invalid message", wrong),
        observation(1.0, done=True),
    ]
    played, _ = scripted(frames, ["x", "5"])
    assert played.said == ["VALIDATION_ERROR: Invalid message; number: not a number"]
    assert played.reward == 1.0
    full, bug = error("CAPACITY_REACHED", "no room"), error("EXECUTION_ERROR", "bug")
    for failing, words in (
        ([full], "answered `reset` with CAPACITY_REACHED: no room"),
        ([frames[0], bug], "answered `step` with EXECUTION_ERROR: bug"),
    ):
        connection = Scripted(failing)
        with pytest.raises(RuntimeError, match=words):
            play(OpenEnvSession(lambda c=connection: c, FIELDS), row(board=""), ["x"])
        assert connection.closed == 1
    lost = Scripted([frames[0], ConnectionResetError("lost")])
    with pytest.raises(ConnectionResetError):
        play(OpenEnvSession(lambda: lost, FIELDS), row(board=""), ["x"])
    assert lost.closed == 1


def test_without_any_reward_the_reward_functions_score() -> None:
    frames = [observation(said="a"), observation(said="b"), observation(done=True)]
    assert scripted(frames, ["1", "2"])[0].reward is None
    frames = [observation(said="a"), observation(1.0, said="b"), observation(done=True)]
    assert scripted(frames, ["1", "2"])[0].reward == 1.0


def test_which_field_is_read_and_written() -> None:
    fields = Fields(observation="said", reset={}, columns=())
    frames = [observation(said="Begin.", n=1), observation(done=True, said="x", n=2)]
    played, connection = scripted(frames, ["no object", '{"n": 3}'], fields=fields)
    assert played.opening == "\nBegin."
    assert played.said == ["Answer with a JSON object, the fields of the action."]
    assert connection.sent[1] == {"type": "step", "data": {"n": 3}}


def test_wrong_addresses_and_arguments_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'ws://host' is not the address.*http://HOST"):
        maker_of("openenv:ws://host")
    with pytest.raises(ValueError, match=r"'http://a:b@host' .*password"):
        maker_of("openenv:http://a:b@host")
    with pytest.raises(ValueError, match=r"'actionfield'.*Did you mean 'action_field'"):
        maker_of("openenv:http://host", {"actionfield": "x"})
    with closing(socket.socket()) as bound:  # a port on which nobody listens
        bound.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(ValueError, match=f"no OpenEnv server answers at '{address}'"):
            maker_of(f"openenv:{address}")


# The package's server


@contextmanager
def served(app: Any, **settings: Any) -> Iterator[str]:
    import uvicorn

    listening = socket.socket()
    listening.bind(("127.0.0.1", 0))
    listening.listen()
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", **settings))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]})
    thread.start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        thread.join()
        listening.close()


def app_of(environment: Any, action: Any, seen: Any, num: int = 4) -> Any:
    from openenv.core.env_server.http_server import create_app

    return create_app(environment, action, seen, env_name="env", max_concurrent_envs=num)


@pytest.fixture(scope="module")
def echo(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The environment that `openenv init` writes, unmodified."""
    if not is_installed("openenv"):
        pytest.skip("openenv is not installed")
    template = Path(str(importlib.util.find_spec("openenv").origin)).parent  # type: ignore[union-attr]
    template /= "cli/templates/openenv_env"
    folder = tmp_path_factory.mktemp("echo") / "echo_env"
    folder.mkdir()
    for file in ("models.py", "server/__ENV_NAME___environment.py"):
        text = (template / file).read_text()
        for mark, name in (("NAME__", "echo"), ("CLASS_NAME__", "Echo"), ("TITLE_NAME__", "Echo")):
            text = text.replace(f"__ENV_{mark}", name)
        (folder / Path(file).name.replace("__ENV_NAME__", "echo")).write_text(text)
    sys.path.insert(0, str(folder))
    import echo_environment

    return echo_environment


def own_client(address: str, messages: Sequence[str], **reset: Any) -> tuple[list[Any], list[Any]]:
    """OpenEnv's own client: observations, and rewards of the steps."""
    from openenv.core.generic_client import GenericEnvClient

    with GenericEnvClient(base_url=address).sync() as client:
        results = [client.reset(**reset)]
        results += [client.step({"message": message}) for message in messages]
    return [one.observation for one in results], [one.reward for one in results[1:]]


@pytest.mark.envs
def test_the_template_of_openenv_unmodified(echo: ModuleType) -> None:
    app = app_of(echo.EchoEnvironment, echo.EchoAction, echo.EchoObservation)
    messages = ["Hello", "", "Ünïcödé " * 400]
    with served(app) as address:
        observations, rewards = own_client(address, messages)
        maker = maker_of(f"openenv:{address}")
        sessions = [play(maker.make(), row(), messages) for _ in range(2)]
        with_field = maker_of(f"openenv:{address}", {"observation_field": "echoed_message"})
        texts = play(with_field.make(), row(), messages)
    for played in sessions:
        shown = [played.opening, *played.said]
        for text, expected in zip(shown, observations[:3], strict=True):
            expected.pop("metadata", None)
            assert isinstance(text, str)
            assert json.loads(text) == {k: v for k, v in expected.items() if v is not None}
        assert played.end is not None
        assert [*played.rewards, played.end.score] == rewards
    assert texts.said == messages[:2]


@pytest.mark.envs
def test_a_server_that_pings_while_a_turn_is_sampled(echo: ModuleType) -> None:
    """It closes connections that do not answer within 0.2 seconds."""
    app = app_of(echo.EchoEnvironment, echo.EchoAction, echo.EchoObservation)
    with served(app, ws_ping_interval=0.1, ws_ping_timeout=0.2) as address:
        session = maker_of(f"openenv:{address}", {"observation_field": "echoed_message"}).make()

        class Slow:
            """The session behind a policy that takes a second for each turn."""

            start, close = session.start, session.close

            async def step(self, action: Any) -> Any:
                time.sleep(1)
                return await session.step(action)

        assert play(Slow(), row(), ["a", "b", "c"]).said == ["a", "b"]


@pytest.mark.envs
def test_a_full_server_fails_the_session_and_bad_actions_do_not(echo: ModuleType) -> None:
    app = app_of(echo.EchoEnvironment, echo.EchoAction, echo.EchoObservation, num=1)
    with served(app) as address:
        maker = maker_of(f"openenv:{address}", {"observation_field": "echoed_message"})
        played = play(maker.make(), row(), ['{"wrong": 1}', "right", "end"])
        assert "VALIDATION_ERROR" in played.said[0]
        assert played.said[1] == "right"
        from openenv.core.generic_client import GenericEnvClient

        with GenericEnvClient(base_url=address).sync() as client:
            client.reset()
            with pytest.raises(RuntimeError, match="CAPACITY_REACHED"):
                play(maker.make(), row(), ["x"])
