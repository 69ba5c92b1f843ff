"""The base of every configuration section: frozen, strict, self-describing."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

__all__ = ["Section"]


class Section(BaseModel):
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
