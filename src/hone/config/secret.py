"""Secrets in a configuration, which is written into run folders, reports and trackers.

They stay in the environment: headers and addresses of services name a variable, as `$API_KEY`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from urllib.parse import parse_qsl, quote, urlsplit

__all__ = ["VARIABLE", "secret_problem", "variables_of", "with_variables"]

VARIABLE = re.compile(r"\$([A-Za-z_]\w*)")
"""An environment variable in a value."""

_WORDS = frozenset(
    (
        *("apikey", "auth", "authorization", "bearer", "cookie", "credential", "credentials"),
        *("key", "passwd", "password", "pwd", "secret", "sig", "signature", "token"),
    )
)
_ALWAYS = _WORDS - {"auth", "bearer", "cookie", "key", "sig", "signature", "token"}
"""Word that marks a setting as secret; other words also appear in names of columns and tokens."""
_PAIRS = frozenset(
    (
        *(("api", "key"), ("access", "key"), ("private", "key"), ("auth", "key")),
        *(("api", "token"), ("access", "token"), ("auth", "token"), ("hf", "token")),
    )
)
_KNOWN_KEY = re.compile(
    r"(?:Bearer\s+)?(?:(?:sk|gsk|glpat|github_pat|gh[opsu]|xox[abp])[-_][\w-]{20,}"
    r"|hf_[A-Za-z0-9]{30,}|AKIA[A-Z0-9]{16}|AIza[\w-]{30,})"
)
"""Keys of services that are known by how they begin."""


_PARAMETER = re.compile(r"(?<=[?&])([^=&#]+)=\$([A-Za-z_]\w*)(?=&|#|$)")
"""A parameter of an address whose value is a variable."""


def variables_of(address: str) -> list[str]:
    """Environment variables that stand for secrets in the parameters of an address. Others, such as
    `format=$csv`, are the service's own."""
    return [variable for name, variable in _PARAMETER.findall(address) if _is_secret_name(name)]


def with_variables(address: str, values: Mapping[str, str]) -> str:
    """The address with the values of these variables in it."""

    def put(found: re.Match[str]) -> str:
        name, variable = found.groups()
        return f"{name}={quote(values[variable], safe='')}" if _is_secret_name(name) else found[0]

    return _PARAMETER.sub(put, address)


def _is_secret_name(name: str) -> bool:
    """Whether the name of a parameter, such as `api_key`, says that its value is a secret."""
    return bool(_WORDS.intersection(_words(name)))


def secret_problem(at: Sequence[str | int], value: str) -> str | None:
    """Why the text at a key of a configuration would make a secret known, and where it belongs; or
    None. The secret is not repeated."""
    names = [str(part) for part in at]
    if problem := _in_address(value, is_path=names[-1] == "path"):
        return problem
    words = _words(names[-1])
    # The last word says what a thing is: `secret_word` is a word, `client_secret` a secret.
    is_named = words[-1:] != [] and words[-1] in _ALWAYS
    is_named |= bool(_PAIRS.intersection(pairwise(words)))
    is_free = "args" in names[:-1] and names[-2] != "headers"  # which say what is wrong themselves
    is_key = _KNOWN_KEY.fullmatch(value) is not None
    if is_key or (is_free and is_named and value and not VARIABLE.search(value)):
        variable = _variable(names[-1])
        return (
            f"it looks like a key, which would be written into the run folder; export {variable} "
            f"and read os.environ['{variable}'] in your code, or write ${variable} where it is a "
            "header of a service"
        )
    return None


def _in_address(value: str, *, is_path: bool) -> str | None:
    """`is_path`: of rows or of a model, which no address gives."""
    if not re.fullmatch(r"[A-Za-z][A-Za-z0-9+.-]*://\S+", value):
        return None
    try:
        parts = urlsplit(value)
    except ValueError:
        return None  # what is wrong with it is said elsewhere
    download = "nothing is read from an address here: download it, and name the file or folder"
    if parts.password is not None or (parts.username and parts.scheme.startswith("http")):
        service = (
            "for a service export SERVICE_AUTH='Basic ...' and give the header Authorization: "
            "$SERVICE_AUTH, else let the address ask for none"
        )
        return (
            "it holds a user name or a password, which would be written into the run folder; "
            + (download if is_path else service)
        )
    for name, text in parse_qsl(parts.query):
        if _is_secret_name(name) and not VARIABLE.fullmatch(text):
            variable = _variable(name)
            service = (
                f"export {variable} and write {name}=${variable}, which is read when a service is "
                "asked"
            )
            return f"its parameter '{name}' would be written into the run folder; " + (
                download if is_path else service
            )
    return None


def _words(name: str) -> list[str]:
    """The words of a name: `apiKey`, `api_key` and `X-Api-Key` have `api` and `key`."""
    return re.findall(r"[a-z0-9]+", re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower())


def _variable(name: str) -> str:
    """Allowed names of the environment variable of a setting."""
    return "_".join(_words(name)).upper() or "API_KEY"
