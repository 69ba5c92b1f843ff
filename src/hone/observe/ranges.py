"""Names of ranges and facts in traces, shared by writers and readers."""

__all__ = ["FACTS", "RANGE"]

FACTS = "hone"
"""Key of a trace for its step and process."""
RANGE = "hone/"
"""Prefix of hone's range names, which separates them from those of libraries."""
