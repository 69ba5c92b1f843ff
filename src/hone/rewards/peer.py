"""Values and calls between an untrusted program and the process that judges it.

Plain values are sent as copies, in tagged JSON. Any other object stays in its process: the other
side gets a `Remote`, a proxy that sends a message for each use. So a program returns answers and
never sees the expected values: a `Remote` is equal to no plain value, and a test's value is never
sent for a comparison.
"""

from __future__ import annotations

import builtins
import json
import socket
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from fractions import Fraction
from time import monotonic
from typing import Any, NoReturn

__all__ = ["Link", "Peer", "Remote", "RemoteError"]

_MAX_LINE_BYTES = 1 << 26
_EXACT = 1 << 53
_COLLECTIONS: dict[str, Callable[[Iterable[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "deque": deque,
}
_SCALARS: dict[str, tuple[Callable[[Any], list[Any]], Callable[..., Any]]] = {
    "int": (lambda x: [hex(x)], lambda x: int(x, 16)),
    "bytes": (lambda x: [x.hex()], bytes.fromhex),
    "bytearray": (lambda x: [x.hex()], bytearray.fromhex),
    "complex": (lambda x: [x.real, x.imag], complex),
    "range": (lambda x: [x.start, x.stop, x.step], range),
    "Decimal": (lambda x: [str(x)], Decimal),
    "Fraction": (
        lambda x: [hex(x.numerator), hex(x.denominator)],
        lambda x, y: Fraction(int(x, 16), int(y, 16)),
    ),
    "timedelta": (lambda x: [x.days, x.seconds, x.microseconds], timedelta),
    "datetime": (lambda x: [x.isoformat()], datetime.fromisoformat),
    "date": (lambda x: [x.isoformat()], date.fromisoformat),
    "time": (lambda x: [x.isoformat()], time.fromisoformat),
}
"""By name of a type: how its values are encoded as lists of JSON values, and decoded again."""
_COPIED = {
    one: one.__name__
    for one in (
        *(str, int, float, dict, list, tuple, set, frozenset, deque, bytes, bytearray, complex),
        *(range, Decimal, Fraction, timedelta, datetime, date, time),
    )
}


class RemoteError(Exception):
    """The other side has ended, or has sent an invalid message."""


class Link:
    """JSON messages over a stream socket, one in each line."""

    def __init__(self, sock: socket.socket, deadline: float | None = None) -> None:
        self._sock = sock
        self._deadline = deadline
        """Time of `time.monotonic` after which the other side counts as ended."""
        self._arrived = bytearray()

    def send(self, message: Any) -> None:
        """Send a message. Raises RemoteError where the other side has ended."""
        self._watch_the_clock()
        try:
            self._sock.sendall(json.dumps(message).encode() + b"\n")
        except OSError as error:
            raise RemoteError(str(error)) from None

    def receive(self) -> Any:
        """The next message. Raises RemoteError where the other side ends, or sends none."""
        start = 0
        while (end := self._arrived.find(b"\n", start)) < 0:
            start = len(self._arrived)
            if start > _MAX_LINE_BYTES:
                raise RemoteError("too long a message")
            self._watch_the_clock()
            try:
                piece = self._sock.recv(1 << 16)
            except OSError as error:
                raise RemoteError(str(error)) from None
            if not piece:
                raise RemoteError("the other side has ended")
            self._arrived += piece
        line = bytes(self._arrived[:end])
        del self._arrived[: end + 1]
        try:
            return json.loads(line)
        except (ValueError, RecursionError) as error:
            raise RemoteError(str(error)) from None

    def _watch_the_clock(self) -> None:
        if self._deadline is None:
            return
        left_s = self._deadline - monotonic()
        if left_s <= 0.0:  # a socket timeout alone would not stop a side that keeps sending
            raise RemoteError("the deadline has passed")
        self._sock.settimeout(left_s)


class Peer:
    """One side of a link. The program's side answers every request. The judge's side only lets its
    functions be called, and public attributes of objects that tests define be used."""

    def __init__(self, link: Link, *, is_judge: bool) -> None:
        self.link = link
        self._is_judge = is_judge
        self._held: dict[int, Any] = {}
        """Objects for which the other side has a `Remote`, by number."""
        self._numbers: dict[int, int] = {}
        self._classes: dict[int, type] = {}
        """The judge's stand-ins for exception classes of the program, by number."""
        self.names: dict[str, Any] = {}
        """The global names of the program."""
        self.own: Collection[str] = ()
        """Global names that the program has defined itself (`verdicts.own_names`)."""

    # ---- asking ----------------------------------------------------------------------------------

    def _ask(self, what: str, *words: Any) -> dict[str, Any]:
        """Send a request and return the answer; answer the other side's requests meanwhile."""
        self.link.send({"ask": what, "words": words})
        while True:
            message = self.link.receive()
            if not isinstance(message, dict):
                raise RemoteError("no answer")
            if "ask" not in message:
                return message
            self.answer(message)

    def result(self, what: str, *words: Any) -> Any:
        """The value of the other side's answer. Raises the other side's errors, with their built-in
        base class, and RemoteError."""
        may_end = what == "do" and words[1] == "__next__"
        return self._value_of(self._ask(what, *words), may_end=may_end)

    def has(self, names: Collection[str], *, of_its_own: bool = False) -> set[str]:
        """Those of `names` that are globals of the program or, with `of_its_own`, that it has
        defined itself."""
        answer = self._ask("own" if of_its_own else "has", sorted(names)).get("value")
        if not isinstance(answer, list) or not all(isinstance(name, str) for name in answer):
            raise RemoteError("no answer")
        return set(names).intersection(answer)

    def call(self, number: int, args: Sequence[Any], named: Mapping[str, Any]) -> Any:
        """Call a function of the other side and return its value. Changes that it makes to
        containers among `args` are made to the originals."""
        words = [self.encode(value) for value in args]
        message = self._ask("call", number, words, {k: self.encode(v) for k, v in named.items()})
        if isinstance(after := message.get("after"), list):
            for value, word in zip(args, after, strict=False):
                _become(value, self.decode(word))
        return self._value_of(message)

    def _value_of(self, message: Mapping[str, Any], *, may_end: bool = False) -> Any:
        if "value" in message:
            return self.decode(message["value"])
        kind, text = self.decode(message.get("error")), str(message.get("text"))
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            kind = RuntimeError  # such as SystemExit, which must not end this process
        if self._is_judge and not may_end and issubclass(kind, StopIteration | StopAsyncIteration):
            kind = RuntimeError  # it would end a loop of the test, as in `all(map(f, xs))`
        try:
            error = kind(text)
        except TypeError:  # a class with more arguments, such as UnicodeDecodeError
            error = RuntimeError(text)
        raise error

    # ---- answering -------------------------------------------------------------------------------

    def serve(self) -> NoReturn:
        """Answer requests until the other side ends; then raises RemoteError."""
        while True:
            self.answer(self.link.receive())

    def answer(self, message: Mapping[str, Any]) -> None:
        """Execute a request, and send its value or error."""
        try:
            reply = self._reply(message["ask"], message["words"])
        except RemoteError:
            raise
        except BaseException as error:  # noqa: BLE001 - a program may raise anything
            try:
                reply = {"error": self.encode(type(error)), "text": str(error)}
            except Exception:  # noqa: BLE001 - the program's error classes may raise anything too
                reply = {"error": ["class", "RuntimeError"], "text": ""}
        self.link.send(reply)

    def _reply(self, what: str, words: list[Any]) -> dict[str, Any]:
        if what == "call":
            number, given, named = words
            function = self._held[number]
            args = [self.decode(word) for word in given]
            value = function(*args, **{name: self.decode(word) for name, word in named.items()})
            reply = {"value": self.encode(value)}
            after = [self.encode(value) for value in args]
            return reply | ({"after": after} if after != given else {})
        if what == "get":
            return {"value": self.encode(getattr(self._open(words[0], words[1]), words[1]))}
        if what == "set":
            setattr(self._open(words[0], words[1]), words[1], self.decode(words[2]))
            return {"value": None}
        if self._is_judge:
            raise TypeError("the tests do not allow that")
        if what in ("has", "own"):
            held = self.names if what == "has" else self.own
            return {"value": [name for name in words[0] if name in held]}
        if what == "name":
            return {"value": self.encode(self.names[words[0]])}
        assert what == "do", f"{what=}"
        number, name, *rest = words
        return {"value": self.encode(_do(self._held[number], name, *map(self.decode, rest)))}

    def _open(self, number: int, name: str) -> Any:
        """The object with a number. Raises AttributeError where its attribute may not be used."""
        value = self._held[number]
        if self._is_judge and (name.startswith("_") or type(value).__module__ != "test"):
            raise AttributeError(name)
        return value

    # ---- values ----------------------------------------------------------------------------------

    def encode(self, value: Any) -> Any:
        """A value as JSON; types that JSON lacks become lists that begin with the type's tag."""
        if value is None or isinstance(value, bool):
            return value
        if isinstance(value, Remote):
            return ["yours", number_of(value)]
        if isinstance(value, type):
            return self._encode_class(value)
        name = next((_COPIED[base] for base in type(value).__mro__ if base in _COPIED), "")
        if isinstance(value, Enum) or not name:
            return self._encode_array(value)
        if name in ("str", "float"):
            return str(value) if name == "str" else float(value)
        if name == "int" and abs(value) < _EXACT:
            return int(value)
        if name == "dict":
            return ["dict", [[self.encode(key), self.encode(item)] for key, item in value.items()]]
        if name in _COLLECTIONS:
            return [name, [self.encode(item) for item in value]]
        return [name, *_SCALARS[name][0](value)]

    def _encode_array(self, value: Any) -> Any:
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic):
            plain = value.item()
            if not isinstance(plain, numpy.generic):  # long doubles are their own item
                return self.encode(plain)
        if numpy is not None and isinstance(value, numpy.ndarray) and value.dtype.kind in "biufcSU":
            return [
                "array",
                value.dtype.str,
                list(value.shape),
                self.encode(value.ravel().tolist()),
            ]
        return self._refer(value)

    def _encode_class(self, value: type) -> Any:
        if getattr(builtins, value.__name__, None) is value:
            return ["class", value.__name__]
        word = self._refer(value)
        if issubclass(value, BaseException):
            base = next(x for x in value.__mro__ if getattr(builtins, x.__name__, None) is x)
            return ["error", word[1], value.__name__, base.__name__]
        return word

    def _refer(self, value: Any) -> list[Any]:
        if self._is_judge and not callable(value) and type(value).__module__ != "test":
            raise TypeError(f"a test cannot give a {type(value).__name__} to a program")
        number = self._numbers.setdefault(id(value), len(self._numbers))
        self._held[number] = value  # keeps it alive, so that its id is not reused
        return ["mine", number]

    def decode(self, word: Any) -> Any:
        """Inverse of `encode`. Raises RemoteError for what `encode` never makes."""
        if not isinstance(word, list):
            if isinstance(word, dict):
                raise RemoteError("no value")
            return word
        try:
            return self._decode(*word)
        except (TypeError, ValueError, KeyError, AttributeError, ArithmeticError) as error:
            raise RemoteError(f"no value: {error}") from None

    def _decode(self, kind: str, *words: Any) -> Any:
        if kind in _COLLECTIONS:
            return _COLLECTIONS[kind](map(self.decode, words[0]))
        if kind in _SCALARS:
            return _SCALARS[kind][1](*words)
        match kind:
            case "dict":
                return {self.decode(key): self.decode(value) for key, value in words[0]}
            case "array":
                import numpy  # only where a program answers with one

                return numpy.array(self.decode(words[2]), dtype=words[0]).reshape(words[1])
            case "class":
                value = getattr(builtins, words[0])
                if not isinstance(value, type):
                    raise TypeError("no class")
                return value
            case "error":
                return self._error_class(*words)
            case "yours":
                return self._held[words[0]]
            case "mine":
                return Remote(self, int(words[0]))
            case _:
                raise ValueError(kind)

    def _error_class(self, number: int, name: str, base: str) -> type:
        """A local class for an exception class of the other side, so that a test can catch it."""
        if number not in self._classes:
            kind = getattr(builtins, base)
            if not issubclass(kind, BaseException):
                raise TypeError("no exception")
            self._classes[number] = type(str(name), (kind,), {})
        return self._classes[number]


def _become(value: Any, after: Any) -> None:
    """Give a container the content that a call has given its copy."""
    if type(value) is not type(after):
        return
    match value:
        case list() | bytearray():
            value[:] = after
        case dict() | set():
            value.clear()
            value.update(after)
        case deque():
            value.clear()
            value.extend(after)
        case _:
            pass


_DONE_BY: dict[str, Callable[..., Any]] = {
    "__iter__": iter, "__next__": next, "__len__": len, "__bool__": bool, "__str__": str,
    "__repr__": repr, "__int__": int, "__float__": float, "__abs__": abs, "__hash__": hash,
    "__instancecheck__": lambda kind, value: isinstance(value, kind),
}  # fmt: skip


def _do(value: Any, name: str, *args: Any) -> Any:
    if name in _DONE_BY:
        return _DONE_BY[name](value, *args)
    outcome = getattr(type(value), name)(value, *args)
    if outcome is NotImplemented:
        raise TypeError(f"{name} is not defined between these")
    return outcome


class Remote:
    """An object of the other side."""

    __slots__ = ("_number", "_peer")

    def __init__(self, peer: Peer, number: int) -> None:
        object.__setattr__(self, "_peer", peer)
        object.__setattr__(self, "_number", number)

    def __call__(self, *args: Any, **named: Any) -> Any:
        return self._peer.call(self._number, args, named)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._peer.result("get", self._number, name)

    def __setattr__(self, name: str, value: Any) -> None:
        self._peer.result("set", self._number, name, self._peer.encode(value))

    def __instancecheck__(self, instance: Any) -> Any:
        return isinstance(instance, Remote) and _ask_to_do("__instancecheck__")(self, instance)


def number_of(remote: Remote) -> int:
    """The number of the object on the other side."""
    return object.__getattribute__(remote, "_number")


def _ask_to_do(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        peer: Peer = self._peer
        return peer.result("do", self._number, name, *map(peer.encode, args))

    return method


def _between_two(name: str) -> Callable[[Remote, Any], Any]:
    """A binary operation, which is sent to the other side only if both operands are its objects. A
    plain value would show the program what a test expects, and it could answer accordingly."""

    def method(self: Remote, other: Any) -> Any:
        return _ask_to_do(name)(self, other) if isinstance(other, Remote) else NotImplemented

    return method


_OF_ITS_OWN = (
    *("iter", "next", "len", "bool", "str", "repr", "int", "float", "abs", "hash", "neg"),
    *("getitem", "setitem", "delitem", "enter", "exit"),
)
_OF_TWO = (
    *("eq", "ne", "lt", "le", "gt", "ge"),
    *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"),
)
for _name in _OF_ITS_OWN:
    setattr(Remote, f"__{_name}__", _ask_to_do(f"__{_name}__"))
for _name in _OF_TWO:
    setattr(Remote, f"__{_name}__", _between_two(f"__{_name}__"))
