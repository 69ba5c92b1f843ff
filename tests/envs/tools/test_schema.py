"""Schemas of functions are those of transformers."""

import functools
import inspect
import itertools
from typing import Any, Literal, Optional, Union

import pytest
from transformers.utils import get_json_schema

from hone.envs.tools.schema import function_schema
from hone.errors import UserError

OptionalText, OldUnion = Optional[str], Union[int, str]  # noqa: UP007, UP045
TYPES = [
    int, float, str, bool, Any, None, list, tuple, dict, list[int], list[list[str]],
    tuple[int, str], dict[str, int], dict[str, list[float]], int | None, OptionalText, OldUnion,
    int | str | None, list[int] | str, list | tuple, Literal["a", "b"], Literal[1, 2],
    Literal["a", 1, None, True], Literal["a"] | None, dict[str, Any], list[Literal["x", "y"]],
    bytes, list[int] | dict[str, int] | None, tuple[int, list[str]], float | int,
]  # fmt: skip


def made(types, *, doc=None, returns=inspect.Parameter.empty, defaults=0):
    """A function whose parameters have `types`, the last `defaults` of them with a default."""

    def tool(**arguments):
        return arguments

    first = len(types) - defaults
    tool.__annotations__ = {f"p{n}": kind for n, kind in enumerate(types)}
    parameters = [
        inspect.Parameter(
            f"p{n}",
            inspect.Parameter.KEYWORD_ONLY,
            annotation=kind,
            default=None if n >= first else inspect.Parameter.empty,
        )
        for n, kind in enumerate(types)
    ]
    if returns is not inspect.Parameter.empty:
        tool.__annotations__["return"] = returns
    tool.__signature__ = inspect.Signature(parameters, return_annotation=returns)
    lines = "\n".join(f"    p{n}: Parameter {n}" for n in range(len(types)))
    tool.__doc__ = doc or f"Do a thing.\n\nArgs:\n{lines}\n"
    return tool


@pytest.mark.parametrize("kind", TYPES, ids=str)
def test_the_schema_of_each_type(kind):
    for defaults in (0, 1):
        function = made([kind], defaults=defaults, returns=kind)
        assert function_schema(function) == get_json_schema(function)


def test_the_schemas_of_several_parameters():
    for types in itertools.islice(itertools.combinations(TYPES, 3), 0, None, 37):
        function = made(list(types), defaults=len(types) % 3)
        assert function_schema(function) == get_json_schema(function)


DOCSTRINGS = [
    "Do it.\n\nArgs:\n    p0: One\n    p1: Two",
    "Do it.\n\nArgs:\n  p0: One\n     more of it\n\n     and more\n  p1:\n     Two\n\nReturns:\n"
    "  A sum\n",
    "\n    First line,\n    second line.\n\n      Indented.\n\n    Args:\n        p0: One: with a "
    "colon\n        p1: Two (a note)\n\n    Returns:\n        Some\n        lines.\n\n    Raises:\n"
    "        E: x\n",
    'Do it.\nArgs:\n    p0: Of (choices: ["tea", " coffee "])\n    p1: Two (Choices: [1, 2])\n',
    "Do it.\n\nArgs:\n    p0: One\n    p1: Two\n\nRaises:\n    ValueError: never\n",
    "Do it.\n\nArgs:\n    p1: Two\n    p0: One\n    p2: of none\nReturns:\n    x",
    "Do it.\n\nArgs:\n    p0: One\n\nReturns:\n    p1: Two",
]


@pytest.mark.parametrize("doc", DOCSTRINGS)
def test_docstrings_are_read_as_by_transformers(doc):
    function = made([str, int], doc=doc, returns=int)
    try:
        theirs = get_json_schema(function)
    except ValueError as error:
        pytest.skip(f"transformers refuses it: {error}")
    except Exception as error:
        if type(error).__name__ != "DocstringParsingException":
            raise
        with pytest.raises(UserError):
            function_schema(function)
    else:
        assert function_schema(function) == theirs


def real(city: str, days: int = 3, unit: Literal["C", "F"] = "C") -> dict[str, float]:
    """The weather of the next days.

    Args:
        city: Where, as
            "Berlin, Germany"
        days: How many days
        unit: Unit of temperatures

    Returns:
        Temperatures by day
    """
    return {}


async def later(x: float) -> float:
    """Wait.

    Args:
        x: How long
    """
    return x


def nothing() -> str:
    """No argument at all."""
    return ""


class Game:
    def move(self, to: "str", far: bool = False) -> str:
        """Move.

        Args:
            to: Where to
            far: Whether far
        """
        return to

    @classmethod
    def all(cls, x: int):
        """All.

        Args:
            x: A number
        """

    @staticmethod
    def free(x: int):
        """Free.

        Args:
            x: A number
        """


@pytest.mark.parametrize(
    "function",
    [real, later, nothing, Game().move, Game.all, Game.free, functools.wraps(real)(lambda *a: 0)],
)
def test_functions_and_bound_methods(function):
    assert function_schema(function) == get_json_schema(function)


def test_types_in_parentheses_are_understood_too():
    function = made(
        [int, str], doc="Do.\n\nArgs:\n    p0 (int): One\n    p1 (str, optional): Two\n"
    )
    properties = function_schema(function)["function"]["parameters"]["properties"]
    assert [entry["description"] for entry in properties.values()] == ["One", "Two"]


def untyped(x):
    """Do.

    Args:
        x: A thing
    """


def undocumented(x: int):
    pass


def undescribed(x: int):
    """Do."""


def starred(*x: int):
    """Do.

    Args:
        x: Things
    """


def keywords(**x: int):
    """Do.

    Args:
        x: Things
    """


def positional(x: int, /):
    """Do.

    Args:
        x: A thing
    """


def unresolved(x: "Missing"):  # noqa: F821
    """Do.

    Args:
        x: A thing
    """


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (untyped, "'x' of the tool 'untyped' has no type; write it as in\n    def add"),
        (undocumented, "'undocumented' has no docstring; write it as in"),
        (undescribed, "does not describe the parameter 'x'"),
        (starred, r"takes `\*x"),
        (keywords, r"takes `\*\*x"),
        (positional, "by position only"),
        (unresolved, "'Missing' is not defined"),
        (functools.partial(real, "x"), "a function or method with a name"),
        (lambda: 0, "a function or method with a name"),
        (made([set[int]]), "the parameter 'p0' of the tool 'tool' has the type set"),
        (made([tuple[int, ...]]), "write list"),
        (made([Literal[b"x"]]), "Literal"),
        (made([str], doc="D.\n\nArgs:\n    p0: x (choices: tea)\n"), "list of JSON values"),
    ],
)
def test_what_is_missing_is_said(function, text):
    with pytest.raises(UserError, match=text):
        function_schema(function)
