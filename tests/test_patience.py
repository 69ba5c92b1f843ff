"""A test fails for what it found, not for how long other programs kept the machine."""

import time

from hypothesis import given, settings
from hypothesis import strategies as st


@settings(max_examples=2)
@given(st.booleans())
def test_an_example_of_hypothesis_may_take_long(drawn: bool) -> None:
    time.sleep(0.3)  # beyond the deadline that Hypothesis sets by itself
