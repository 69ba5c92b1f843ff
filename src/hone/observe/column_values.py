"""Conversion of column values of Parquet and `datasets` to text and JSON."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from datetime import date, time
from decimal import Decimal
from typing import Any

__all__ = ["as_text", "json_value"]


def as_text(value: Any) -> str:
    """Convert a value to text: bytes as UTF-8, numbers and decimals as digits, dates and times in
    ISO 8601, lists and objects as JSON.

    Raises ValueError, with a description of the value, for null, a number that is not finite, and
    any other type.
    """
    match value:
        case str():
            return value
        case None:
            raise ValueError("null")
        case float() | Decimal() if not math.isfinite(value):
            raise ValueError(f"{value}, which is no number")
        case Decimal():
            return f"{value:f}"
        case date() | time():
            return value.isoformat()
        case bytes():
            try:
                return value.decode()
            except UnicodeDecodeError:
                raise ValueError(f"{len(value):,} bytes that are no UTF-8 text") from None
        case _:
            try:
                return json.dumps(value, ensure_ascii=False, allow_nan=False, default=json_value)
            except ValueError as error:
                words = "a number that is not finite" if "JSON compliant" in f"{error}" else error
                raise ValueError(f"{words}") from None


def json_value(value: Any) -> Any:
    """Convert a value that JSON lacks, as `default` of `json.dumps`: a decimal to a number; dates,
    times and bytes to text. Raises ValueError for other types."""
    match value:
        case Mapping():
            return dict(value)
        case Decimal():
            return int(value) if value == value.to_integral_value() else float(value)
        case date() | time() | bytes():
            return as_text(value)
        case _:
            raise ValueError(f"{type(value).__name__}, which is neither text nor number")
