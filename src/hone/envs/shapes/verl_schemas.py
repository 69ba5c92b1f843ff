"""In place of verl's schemas of tools and their answers, where verl is not installed."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

__all__ = [
    "OpenAIFunctionParametersSchema",
    "OpenAIFunctionPropertySchema",
    "OpenAIFunctionSchema",
    "OpenAIFunctionToolSchema",
    "ToolResponse",
]


class OpenAIFunctionPropertySchema(BaseModel):
    """A parameter of a function."""

    type: str | list[str]
    description: str | None = None
    enum: list[Any] | None = None


class OpenAIFunctionParametersSchema(BaseModel):
    """The parameters of a function."""

    type: str
    properties: dict[str, OpenAIFunctionPropertySchema]
    required: list[str] = Field(default_factory=list[str])


class OpenAIFunctionSchema(BaseModel):
    """A function."""

    name: str
    description: str
    parameters: OpenAIFunctionParametersSchema = Field(
        default_factory=lambda: OpenAIFunctionParametersSchema(type="object", properties={})
    )
    strict: bool = False


class OpenAIFunctionToolSchema(BaseModel):
    """A tool."""

    type: str
    function: OpenAIFunctionSchema


class ToolResponse(BaseModel):
    """The answer of a tool."""

    text: str | None = None
    image: list[Any] | None = None
    video: list[Any] | None = None
