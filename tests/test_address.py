"""Addresses of services: their form, and what a reward is called after them."""

from __future__ import annotations

from hone.address import address_problem, name_of_address, names_code
from hone.rewards.settings import RewardConfig
from tests.tables import table

NAMES = {
    "http://localhost:5000/get_reward": "localhost_get_reward",
    "https://Scores.example.org/v1/get_reward/?model=a&k=b": "scores.example.org_v1_get_reward",
    "HTTP://10.0.0.7:80": "10.0.0.7",
    "http://[::1]:5000/a%20b": "1_a_20b",
}
PROBLEMS = {
    "http://": "http://HOST:PORT/PATH",
    "http:///get_reward": "http://HOST:PORT/PATH",
    "localhost:5000/get_reward": "http://HOST:PORT/PATH",
    "http://host:port/get_reward": "no address",
    "http://host:99999/get_reward": "no address",
    "http://[::1/get_reward": "no address",
    "https://me:secret@host/get_reward": "a user name or a password",
    "https://secret@host/get_reward": "a user name or a password",
    "http://host/get reward": "a blank",
    "http://host/get_reward#part": "a '#'",
    "http://höst/get_reward": "ASCII",
}


@table("address", NAMES)
def test_a_good_address_has_a_name(address: str) -> None:
    assert address_problem(address) is None
    assert name_of_address(address) == NAMES[address]
    assert not names_code(address)


@table("address", PROBLEMS)
def test_what_is_wrong_with_an_address(address: str) -> None:
    problem = address_problem(address)
    assert problem is not None
    assert PROBLEMS[address] in problem
    assert "secret" not in problem


def test_names_of_functions_of_all_kinds() -> None:
    specs = ["math", "http://h:1/a", "a.py:f", "judge", "http://h:2/a", "b:f", "judge"]
    cfg = RewardConfig.model_validate({"functions": [{"fn": spec} for spec in specs]})
    assert cfg.names == ["math", "h_a", "f", "judge", "h_a_2", "f_2", "judge_2"]
