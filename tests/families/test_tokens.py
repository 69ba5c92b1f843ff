"""Which tokens two tokenizers have in common, by the texts and ids of both."""

from __future__ import annotations

import random

from hone.families.tokens import difference
from tests.tables import check_rows

OWN = {"a": 0, "b": 1, "c": 2}
DIFFERENCES = [
    ({"b": 0, "a": 1, "c": 2}, "2 of 3 tokens differ, the first is 'a', token 0 of the policy and"),
    ({"a": 0, "b": 1, "c": 7}, "1 of 3 tokens differ, the first is 'c', token 2 .* token 7 there"),
    ({"a": 0, "c": 2, "d": 1}, "the first is 'b', token 1 of the policy and no such token there"),
]


def test_the_first_token_that_differs_is_named() -> None:
    def check(other: dict[str, int], words: str) -> None:
        found = difference(OWN, other)
        assert found is not None
        assert all(part in found for part in words.split(" .* ")), found

    check_rows(DIFFERENCES, check)


def test_a_model_may_know_more_tokens_and_none_may_have_another_id() -> None:
    ids = list(range(50))
    own = {f"t{number}": number for number in ids}
    assert difference(own, own | {"more": 50}) is None
    random.shuffle(ids)
    other = {f"t{number}": mixed for number, mixed in enumerate(ids)}
    moved = sum(number != mixed for number, mixed in enumerate(ids))
    assert f"{moved} of 50 tokens differ" in str(difference(own, other))
