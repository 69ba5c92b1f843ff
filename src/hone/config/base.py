"""The base of every configuration section: frozen, strict, self-describing."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError

from hone.errors import UserError

__all__ = ["Section"]


class _SectionType(type(BaseModel)):
    """Tells what is wrong with a section that a program makes, in words and without a traceback of
    the library. What comes from recipes and flags `hone.config.load` explains, with its line."""

    if not TYPE_CHECKING:  # else the types of arguments would be lost

        def __call__(cls, *args: Any, **values: Any) -> Any:
            try:
                return super().__call__(*args, **values)
            except ValidationError as error:
                problems = [_problem(cls, dict(found)) for found in error.errors()]
            raise UserError(f"{cls.__name__}: {'; '.join(problems)}")


def _problem(section: type[BaseModel], found: dict[str, Any]) -> str:
    key = ".".join(map(str, found["loc"]))
    if found["type"] == "extra_forbidden":
        near = get_close_matches(key, section.model_fields, 1)
        keys = ", ".join(section.model_fields)
        return f"no key '{key}'; " + (f"did you mean '{near[0]}'?" if near else f"allowed: {keys}")
    if found["type"] == "missing":
        return f"'{key}' is required"
    return f"{key} is {found['input']!r}: {found['msg']}"


class Section(BaseModel, metaclass=_SectionType):
    """A group of settings.

    Unknown keys are errors, numbers are finite, values cannot change after loading, and the
    docstring under a field is its help text.
    """

    model_config = ConfigDict(
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # in what a reward function is given
    )
