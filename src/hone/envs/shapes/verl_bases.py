"""In place of verl's base classes, where verl is not installed (it needs Ray, vLLM or SGLang, and
tensordict even to import them) or has them no more: verl 0.9 has no interactions.

`bases` lets files of tools and interactions be imported as they are. The names, fields and results
are those of verl 0.7 to 0.9.
"""

from __future__ import annotations

import asyncio
import importlib.util
import inspect
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any
from uuid import uuid4

__all__ = ["bases", "missing_part"]

_NAMES: Mapping[str, Sequence[str]] = {
    "verl": (),
    "verl.tools": (),
    "verl.tools.base_tool": ("BaseTool", "OpenAIFunctionToolSchema", "ToolResponse"),
    "verl.tools.function_tool": ("FunctionTool", "function_tool", "load_function_tools_from_path"),
    "verl.tools.schemas": (
        "OpenAIFunctionParametersSchema", "OpenAIFunctionPropertySchema", "OpenAIFunctionSchema",
        "OpenAIFunctionToolSchema", "ToolResponse",
    ),
    "verl.interactions": (),
    "verl.interactions.base": ("BaseInteraction",),
    "verl.experimental": (),
    "verl.experimental.agent_loop": ("AgentLoopBase", "AgentLoopOutput", "register"),
    "verl.experimental.agent_loop.agent_loop": ("AgentLoopBase", "AgentLoopOutput", "register"),
    "verl.utils": (),
    "verl.utils.rollout_trace": ("rollout_trace_op",),
}  # fmt: skip
"""What there is, by module."""


@contextmanager
def bases() -> Generator[None]:
    """Let modules that are imported in the block import verl's base classes. Those of an installed
    verl come first."""
    finder = _Finder()
    sys.meta_path.append(finder)
    try:
        yield
    finally:
        sys.meta_path.remove(finder)
        for name in finder.made:
            sys.modules.pop(name, None)


def missing_part(error: BaseException | None) -> str | None:
    """The module of verl that was imported and has nothing in its place here, or None."""
    while error is not None:
        if isinstance(error, ModuleNotFoundError) and f"{error.name}.".startswith("verl."):
            return error.name
        error = error.__cause__ or error.__context__
    return None


class _Finder(MetaPathFinder, Loader):
    """Makes the modules of `_NAMES` when they are imported and no other finder has them."""

    def __init__(self) -> None:
        self.made: list[str] = []

    def find_spec(self, fullname: str, path: Any, target: Any = None) -> ModuleSpec | None:
        if fullname not in _NAMES:
            return None
        is_package = any(name.startswith(f"{fullname}.") for name in _NAMES)
        return ModuleSpec(fullname, self, is_package=is_package)

    def exec_module(self, module: ModuleType) -> None:
        from hone.envs.shapes import verl_schemas  # it needs pydantic

        self.made.append(module.__name__)
        for name in _NAMES[module.__name__]:
            setattr(module, name, globals().get(name) or getattr(verl_schemas, name))


class BaseTool:
    """In place of verl's class: a tool that keeps its state by the id of an instance."""

    __module__ = "verl.tools.base_tool"

    def __init__(self, config: dict[str, Any], tool_schema: Any = None) -> None:
        self.config = config
        self.tool_schema = tool_schema
        self.tool_schema = tool_schema or self.get_openai_tool_schema()
        if self.tool_schema is None:
            raise ValueError(
                f"{type(self).__name__} has no schema: give `tool_schema` in the file of tools, or "
                "let `get_openai_tool_schema` return one"
            )
        self.name: str = self.tool_schema.function.name

    def get_openai_tool_schema(self) -> Any:
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **_: Any) -> tuple[str, Any]:
        return instance_id or uuid4().hex, _response()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **_: Any
    ) -> tuple[Any, float, dict[str, Any]]:
        raise NotImplementedError(f"{type(self).__name__} has no method `execute`")

    async def calc_reward(self, instance_id: str, **_: Any) -> float:
        return 0.0

    async def release(self, instance_id: str, **_: Any) -> None:
        """Nothing is held."""


class BaseInteraction:
    """In place of verl's class: a user that answers turns, with state by the id of an instance."""

    __module__ = "verl.interactions.base"

    def __init__(self, config: dict[str, Any]) -> None:
        self.config = config
        self.name: str = config.get("name", "interaction_agent")

    async def start_interaction(self, instance_id: str | None = None, **_: Any) -> str:
        return instance_id or uuid4().hex

    async def generate_response(
        self, instance_id: str, messages: list[dict[str, Any]], **_: Any
    ) -> tuple[bool, str, float, dict[str, Any]]:
        raise NotImplementedError(f"{type(self).__name__} has no method `generate_response`")

    async def calculate_score(self, *_: Any, **__: Any) -> float:
        return 0.0

    async def finalize_interaction(self, *_: Any, **__: Any) -> None:
        """Nothing is held."""


class AgentLoopBase:
    """In place of verl's class, whose subclasses call an engine themselves."""

    __module__ = "verl.experimental.agent_loop.agent_loop"


class AgentLoopOutput:
    """In place of verl's class."""

    __module__ = "verl.experimental.agent_loop.agent_loop"


def register(name: str) -> Callable[[type], type]:
    """In place of verl's decorator of agent loops."""
    return lambda kind: kind


def rollout_trace_op(function: Callable[..., Any]) -> Callable[..., Any]:
    """In place of verl's decorator, which traces nothing where no tracker is set."""
    return function


class FunctionTool:
    """In place of verl's class: a function with its name and schema."""

    __module__ = "verl.tools.function_tool"

    def __init__(self, name: str, fn: Callable[..., Any], tool_schema: Any) -> None:
        self.name, self.fn, self.tool_schema = name, fn, tool_schema

    async def call(self, parameters: Mapping[str, Any]) -> Any:
        if inspect.iscoroutinefunction(self.fn):
            return await self.fn(**parameters)
        return await asyncio.to_thread(self.fn, **parameters)


_registered: dict[str, FunctionTool] = {}


def function_tool(name: Any = None, *, schema: Any = None) -> Any:
    """In place of verl's decorator, with and without arguments."""

    def decorated(function: Callable[..., Any], called: str | None = None) -> Callable[..., Any]:
        from hone.envs.shapes.verl_schemas import OpenAIFunctionToolSchema
        from hone.envs.tools.schema import function_schema

        called = called or function.__name__
        written = schema if schema is not None else function_schema(function)
        if isinstance(written, Mapping):
            written = OpenAIFunctionToolSchema.model_validate(written)
        if schema is None:
            written.function.name = called
        if called in _registered and _registered[called].fn is not function:
            raise ValueError(f"two tools have the name '{called}'; rename one")
        _registered[called] = FunctionTool(called, function, written)
        return function

    if callable(name):
        return decorated(name)
    return lambda function: decorated(function, name)


def load_function_tools_from_path(path: str) -> list[FunctionTool]:
    """In place of verl's function: the decorated functions of a file, by name."""
    _registered.clear()
    file = Path(path).resolve()
    name = f"hone_tools_{file.stem}"
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None, path
    assert spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return [_registered[each] for each in sorted(_registered)]


def _response() -> Any:
    from hone.envs.shapes.verl_schemas import ToolResponse

    return ToolResponse()
