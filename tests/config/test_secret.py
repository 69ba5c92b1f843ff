"""Secrets in a configuration are refused before anything of it is written, and never repeated."""

from __future__ import annotations

from typing import Any

import pytest

from hone.config.load import load_noted
from hone.config.secret import secret_problem, variables_of, with_variables
from hone.config.tree import RLConfig
from hone.errors import UserError
from tests.tables import table

SECRET = "s3cr3t" * 5
REFUSED: dict[str, tuple[tuple[str, ...], str, str]] = {
    "a key in a query": (("fn",), f"https://h/a?model=x&api_key={SECRET}", "api_key=$API_KEY"),
    "a key of another spelling": (("fn",), f"http://h/a?apiKey={SECRET}", "apiKey=$API_KEY"),
    "a signature": (("fn",), f"https://h/a?X-Amz-Signature={SECRET}", "Signature=$X_AMZ"),
    "a signed path": (
        ("data", "path"),
        f"https://h/a?key={SECRET}",
        "folder; nothing is read from",
    ),
    "a password": (("fn",), f"http://me:{SECRET}@host/a", "a password"),
    "a path's password": (("data", "path"), f"s3://me:{SECRET}@b/rows", "folder; nothing is read"),
    "a token as a user": (("fn",), f"https://{SECRET}@host/a", "a user name"),
    "a judge's address": (("args", "base_url"), f"http://h/v1?key={SECRET}", "key=$KEY"),
    "an argument": (("args", "api_key"), SECRET, "os.environ['API_KEY']"),
    "a nested one": (("args", "client", "password"), SECRET, "os.environ['PASSWORD']"),
    "a known kind": (("args", "model"), f"sk-{SECRET}", "export MODEL"),
    "a known kind of text": (("log", "project"), f"hf_{SECRET}a1", "export PROJECT"),
}
ALLOWED: dict[str, tuple[tuple[str, ...], str]] = {
    "a variable in a query": (("fn",), "https://h/a?model=x&api_key=$MY_KEY"),
    "an address without a secret": (("fn",), "https://h/a?model=keyword&max_tokens=5"),
    "a name of a column": (("args", "answer_key"), "label"),
    "a token of a text": (("args", "eos_token"), "<|im_end|>"),
    "a word that is a secret of a game": (("args", "secret_word"), "apple"),
    "a column of passwords": (("args", "password_column"), "pw"),
    "a key of a dict": (("args", "key"), "answer"),
    "a model": (("model", "path"), "sk-labs/some-model"),
    "a header, which says itself what is wrong": (("args", "headers", "X-Key"), "$MY_KEY"),
    "an SSH user": (("data", "path"), "ssh://git@host/rows"),
    "a template": (("data", "prompt_template"), f"ask http://h/?key={SECRET} for it"),
}


@table("name", REFUSED)
def test_a_secret_is_refused_with_the_place_where_it_belongs(name: str) -> None:
    at, value, words = REFUSED[name]
    problem = secret_problem(at, value)
    assert problem is not None
    assert words in problem
    assert SECRET not in problem


@table("name", ALLOWED)
def test_what_is_no_secret_is_allowed(name: str) -> None:
    assert secret_problem(*ALLOWED[name]) is None


def reward(fn: str, **args: Any) -> dict[str, Any]:
    return {"functions": [{"fn": fn, "args": args}]}


@table(
    "given",
    [
        reward(f"http://localhost:1/a?api_key={SECRET}"),
        reward("rewards.py:f", api_key=SECRET),
        reward("judge", base_url=f"http://h/v1?token={SECRET}"),
    ],
)
def test_no_tree_is_made_of_a_secret(given: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="written into the run folder") as raised:
        load_noted(RLConfig, None, ["--model.path", "x"], [("here", {"reward": given})])
    assert SECRET not in str(raised.value)


def test_a_variable_is_read_where_the_address_is_asked() -> None:
    address = "https://h/a?model=x&api_key=$MY_KEY&format=$csv"
    assert variables_of(address) == ["MY_KEY"]
    assert (
        with_variables(address, {"MY_KEY": "a b"})
        == "https://h/a?model=x&api_key=a%20b&format=$csv"
    )
