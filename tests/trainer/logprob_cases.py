"""What the kernels of log-probabilities are tried on, in a test and the process that it starts."""

from __future__ import annotations

from typing import Any

CASES: dict[str, dict[str, Any]] = {
    "several blocks": {"num_words": 200, "temperature": 0.7},
    "whole blocks": {"num_words": 192},
    "less than a block": {"num_words": 37, "temperature": 1.3},
    "one word": {"num_words": 1, "with_entropy": False},
    "far apart": {"num_words": 300, "spread": 60.0},
    "no entropy": {"num_words": 130, "with_entropy": False, "temperature": 0.6},
    "soft cap": {"num_words": 150, "spread": 20.0, "softcap": 5.0, "temperature": 0.8},
}
BUGS = ("part_statistics", "logits_gradient")
"""Functions that are given labels one too high."""
