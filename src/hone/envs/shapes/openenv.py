"""Servers of OpenEnv: `openenv:http://HOST:PORT`, one WebSocket (`/ws`) for each episode.

`reset` gets the seed of the row, `env.args.reset`, and the columns named in `env.args.columns`.
`step` gets an action: the turn, where it is a JSON object, else the turn as the value of one field
of the action. That field is `env.args.action_field`, or what the server's `/schema` leaves: its
only required field, or its only field. The policy reads the observation: its only field, where that
is a text, or the one that `env.args.observation_field` names, else all fields as JSON. Rewards of
all steps are added; where the server never gave one, `reward.functions` score the episode.

An action that does not fit the server's schema (`VALIDATION_ERROR`) is answered with what is wrong.
Every other error, among them a server without room for another session, and a lost connection, is a
failure of the session. A server serves one session at a time unless it says otherwise: set
`env.concurrency` to what it has.

The package `websockets` speaks the protocol. A thread of it answers the server's pings while a turn
is sampled, without which servers close the connection.
"""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from dataclasses import dataclass, replace
from typing import Any, Protocol

from hone.address import address_problem
from hone.envs.session import Action, DataRow, Opening
from hone.envs.shapes.maker import EnvMaker
from hone.envs.shapes.reading import number_of
from hone.envs.shapes.stepping import Reply, SteppingSession
from hone.errors import did_you_mean
from hone.extras import import_extra
from hone.types import Observation

__all__ = ["Fields", "OpenEnvSession", "by_address"]

_CONNECT_SECONDS = 30.0
_LONGEST_MESSAGE_BYTES = 64 * 2**20
_LARGEST_SEED = 2**31
"""Servers give their seed to generators that take 32 bits."""
_ARGS = ("action_field", "observation_field", "reset", "columns")


class Connection(Protocol):
    """A WebSocket, as the package `websockets` has it."""

    def send(self, message: str) -> None: ...

    def recv(self) -> str | bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Fields:
    """How texts become actions, and observations texts."""

    action: str | None = None
    """The field of the action that a turn fills; None: a turn must be a JSON object."""
    observation: str | None = None
    """The field of the observation that the policy reads; None: all of them."""
    reset: Mapping[str, Any]
    """Sent with every `reset`."""
    columns: Sequence[str]
    """Columns of the row that are sent with its `reset`."""


def by_address(address: str, args: Mapping[str, Any]) -> EnvMaker:
    """The maker of `openenv:ADDRESS`. It asks the server for its schema where it needs a field.

    Raises ValueError for an address or args that are wrong, and where the server does not answer.
    """
    if (problem := address_problem(address)) is not None:
        raise ValueError(f"'{address}' is not the address of an OpenEnv server: {problem}")
    fields = _fields(args)
    if fields.action is None:
        fields = replace(fields, action=_action_field(address))
    connect = import_extra("websockets", needed_by="env.path", module="websockets.sync.client")
    url = f"ws{address[4:].rstrip('/')}/ws"

    def connection() -> AbstractContextManager[Connection]:
        # Its own pings are off: a server that computes for long would be taken for lost.
        return connect.connect(
            url,
            open_timeout=_CONNECT_SECONDS,
            ping_interval=None,
            max_size=_LONGEST_MESSAGE_BYTES,
        )

    return EnvMaker(shape="OpenEnv", make=lambda: OpenEnvSession(connection, fields))


def _fields(args: Mapping[str, Any]) -> Fields:
    for name in args:
        if name not in _ARGS:
            raise ValueError(
                f"env.args has '{name}'; an OpenEnv server takes {', '.join(_ARGS)}."
                f"{did_you_mean(name, _ARGS)}"
            )
    return Fields(
        action=args.get("action_field"),
        observation=args.get("observation_field"),
        reset=dict(args.get("reset") or {}),
        columns=tuple(args.get("columns") or ()),
    )


def _action_field(address: str) -> str | None:
    """The field of the action that a text can only mean, by the server's schema."""
    try:
        with urllib.request.urlopen(
            f"{address.rstrip('/')}/schema", timeout=_CONNECT_SECONDS
        ) as answer:
            schema = json.load(answer)["action"]
    except urllib.error.HTTPError as error:
        raise ValueError(
            f"'{address}' answers {error.code} to /schema; set env.args.action_field to the field "
            "of the action that a turn's text becomes"
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ValueError(f"no OpenEnv server answers at '{address}': {error}") from None
    names = [name for name in schema.get("properties", {}) if name != "metadata"]
    required = [name for name in schema.get("required", ()) if name in names]
    for found in (required, names):
        if len(found) == 1:
            return found[0]
    return None


class OpenEnvSession(SteppingSession):
    """An episode on a server."""

    def __init__(
        self, connect: Callable[[], AbstractContextManager[Connection]], fields: Fields
    ) -> None:
        self._connect = connect
        self._fields = fields
        self._open = ExitStack()
        self._socket: Connection | None = None

    async def start(self, row: DataRow) -> Opening:
        """Connect and reset. Raises OSError where the server cannot be reached, RuntimeError where
        it answers with an error."""
        self._socket = self._open.enter_context(self._connect())
        columns = {name: row.columns[name] for name in self._fields.columns}
        data = {"seed": row.seed % _LARGEST_SEED, **self._fields.reset, **columns}
        kind, answer = self._ask("reset", data)
        if kind != "observation":
            raise RuntimeError(f"the OpenEnv server answered `reset` with {_message(answer)}")
        return "\n" + self._shown(answer)

    async def play(self, action: Action) -> Reply:
        """Send the turn as an action. Raises RuntimeError for an error that is not the policy's."""
        data = self._action(action.text)
        if data is None:
            refusal = "Answer with a JSON object, the fields of the action."
            return Reply(observation=Observation(refusal), reward=None)
        kind, answer = self._ask("step", data)
        if kind == "error" and answer.get("code") == "VALIDATION_ERROR":
            return Reply(observation=Observation(_message(answer)), reward=None)
        if kind != "observation":
            raise RuntimeError(f"the OpenEnv server answered `step` with {_message(answer)}")
        reward = answer.get("reward")
        return Reply(
            observation=Observation(self._shown(answer)),
            reward=None if reward is None else number_of(reward),
            is_over=bool(answer.get("done")),
        )

    async def close(self) -> None:
        """End the session on the server, and the connection. A connection that is lost already has
        ended it."""
        if self._socket is None:
            return
        with suppress(Exception):  # the package has errors of its own for a lost connection
            self._socket.send(json.dumps({"type": "close"}))
        self._open.close()

    def _ask(self, kind: str, data: Mapping[str, Any]) -> tuple[str, Mapping[str, Any]]:
        """Send a frame; the type and the data of its answer."""
        assert self._socket is not None
        with suppress(Exception):  # a server without room says so and closes: that is read below
            self._socket.send(json.dumps({"type": kind, "data": data}))
        frame = json.loads(self._socket.recv())
        return frame["type"], frame["data"]

    def _action(self, text: str) -> Mapping[str, Any] | None:
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            value = None
        if isinstance(value, dict):
            return value
        return None if self._fields.action is None else {self._fields.action: text}

    def _shown(self, answer: Mapping[str, Any]) -> str:
        """What the policy reads of an observation."""
        fields = {
            name: value
            for name, value in answer["observation"].items()
            if value is not None and name != "metadata"
        }
        if self._fields.observation is not None:
            value = fields.get(self._fields.observation, "")
        else:
            value = next(iter(fields.values())) if len(fields) == 1 else fields
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _message(error: Mapping[str, Any]) -> str:
    """What an error frame says, for the policy or a person."""
    details = [
        f"{'.'.join(map(str, one.get('loc', ())))}: {one.get('msg', '')}"
        for one in error.get("errors", ())
    ]
    return "; ".join([f"{error.get('code')}: {error.get('message')}", *details])
