"""Rewards from a service over HTTP, and the base class of rewards that call services.

A reward worker makes the call and waits for the answer, so its deadline also covers the service,
the network and a regular expression over the answer. Waiting processes cost no more than waiting
threads (docs/design/remote-rewards.md has the measurement).

Source: OpenRLHF's `--reward.remote_url` (`openrlhf/utils/agent.py`, `openrlhf/cli/serve_rm.py`).
"""

from __future__ import annotations

import json
import os
import random
import re
import ssl
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from http.client import HTTPException
from time import monotonic, sleep
from typing import IO, Any, Self
from urllib.error import HTTPError, URLError
from urllib.parse import quote, quote_plus
from urllib.request import HTTPRedirectHandler, HTTPSHandler, OpenerDirector, Request, build_opener

from pydantic import Field, PrivateAttr, model_validator

from hone.address import address_problem
from hone.config.secret import VARIABLE, variables_of, with_variables
from hone.observe.column_values import json_value
from hone.rewards.base import Builtin, ServiceError
from hone.rewards.shapes import ScoreTypeError
from hone.types import FailureKind

__all__ = ["Remote", "Service", "shown"]

MAX_ANSWER_BYTES = 4 * 2**20
"""Largest answer of a service, in bytes."""
_FIRST_WAIT_S, _LONGEST_WAIT_S = 0.25, 8.0
"""Pause before the second attempt, which doubles before each next one, and the longest pause."""
_MARGIN_S, _MARGIN_SHARE = 0.5, 0.1
"""Margin before `reward.timeout_s`, in seconds and as its largest share: a call ends so much
earlier, so that its error is reported before the worker is killed."""
_SHOWN_CHARS = 200
"""Characters of an answer that are shown in messages."""
_SECRET = re.compile("auth|cookie|key|secret|token", re.IGNORECASE)
"""Names of headers whose values must not be written into a run folder."""


class Remote(Builtin):
    """A reward that waits for a service."""

    headers: dict[str, str] = Field(default_factory=dict)
    """HTTP headers of each request. `$NAME` in a value is the environment variable of that name,
    which is read when it is sent and written nowhere."""

    _timeout_s: float = PrivateAttr(default=10.0)
    """Seconds for a call with its retries."""

    @model_validator(mode="after")
    def _check_headers(self) -> Self:
        for name, value in self.headers.items():
            if not re.fullmatch(r"[A-Za-z0-9-]+", name) or not re.fullmatch(r"[ -~]+", value):
                raise ValueError(f"headers: {name!r} is no name of a header, or its value no text")
            # The value is not repeated: it may be the key itself.
            if _SECRET.search(name) and not VARIABLE.search(value):
                raise ValueError(
                    f"headers.{name} would be written into the run folder; put what is secret into "
                    "an environment variable and write it as $NAME"
                )
        return self

    @property
    def isolated(self) -> bool:
        return True

    def limit_time(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s - min(_MARGIN_S, _MARGIN_SHARE * timeout_s)

    def post(self, url: str, content: Mapping[str, Any]) -> Any:
        """Post `content` to `url` as JSON, and return the JSON answer.

        Attempts are repeated, with growing pauses, after the statuses 429 and 5xx and where the
        connection is refused or lost. Raises ServiceError without an answer, and ScoreTypeError
        for an answer that is not JSON.
        """
        secrets = {
            name: _read_variable(name)
            for value in self.headers.values()
            for name in VARIABLE.findall(value)
        }
        secrets |= {name: _read_variable(name) for name in variables_of(url)}
        url = with_variables(url, secrets)
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        for name, value in self.headers.items():
            headers[name] = VARIABLE.sub(lambda match: secrets[match[1]], value)
        data = json.dumps(content, default=json_value).encode()
        limit = f"{self._timeout_s:g} s of `reward.timeout_s`"
        deadline, wait_s, attempts = monotonic() + self._timeout_s, _FIRST_WAIT_S, 0
        while True:
            attempts += 1
            try:
                left_s = max(deadline - monotonic(), 0.001)
                body = _attempt(Request(url, data, headers), left_s, secrets.values())
                break
            except _TransientError as error:
                pause_s = wait_s * random.uniform(0.5, 1.0)  # so that workers do not retry at once
                wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
                if monotonic() + pause_s >= deadline:
                    raise ServiceError(f"{error} ({attempts} attempts in {limit})") from None
                sleep(pause_s)
            except TimeoutError:
                raise ServiceError(f"no answer within {limit}", FailureKind.TIMEOUT) from None
        try:
            return json.loads(body)
        except (ValueError, RecursionError):
            raise ScoreTypeError(f"answered what is not JSON: {shown(body)}") from None


class Service(Remote):
    """A service that gets `{"query": [...], "prompts": [...], "labels": [...]}`, with lists of one
    sample or of a whole group, and answers `{"rewards": [...]}`.

    The query is the rendered prompt with the completion. `scores` and `extra_logs` in the answer
    become metrics.
    """

    url: str
    """The address, to which each sample is posted."""

    @model_validator(mode="after")
    def _check(self) -> Service:
        if problem := address_problem(self.url):
            raise ValueError(problem)
        return self

    def __call__(
        self, *, queries: Sequence[str], prompts: Sequence[str], labels: Sequence[Any]
    ) -> Mapping[str, Any]:
        content = {"query": queries, "prompts": prompts, "labels": labels}
        answer = self.post(self.url, content)
        if not isinstance(answer, Mapping) or "rewards" not in answer:
            raise ScoreTypeError(f'answered {shown(answer)}; it must be {{"rewards": [NUMBER]}}')
        rewards = answer["rewards"]
        if not isinstance(rewards, list) or len(rewards) != len(queries):
            raise ScoreTypeError(
                f"answered the rewards {shown(rewards)} to {len(queries)} queries; it must be a "
                "list with a number for each"
            )
        if any(
            isinstance(reward, bool) or not isinstance(reward, int | float) for reward in rewards
        ):
            raise ScoreTypeError(f"answered the rewards {shown(rewards)}; each must be a number")
        return answer


def _read_variable(name: str) -> str:
    value = os.environ.get(name, "").strip()
    if not re.fullmatch(r"[ -~]+", value):
        raise ServiceError(
            f"the environment variable {name}, which `headers` or the address names, "
            + ("is not the text of a header" if value else "is not set")
        )
    return value


class _TransientError(Exception):
    """An error after which another attempt may succeed."""


def _attempt(request: Request, timeout_s: float, secrets: Iterable[str]) -> str:
    """The text of one answer, with secrets replaced. Raises _TransientError, TimeoutError, and
    ServiceError for errors that another attempt would repeat."""
    try:
        with _opener().open(request, timeout=timeout_s) as response:
            text = _read(response, secrets)
            if response.length:  # read(size) does not raise at the end of an incomplete answer
                raise _TransientError("the connection was closed within the answer")
            return text
    except HTTPError as error:
        with error:
            reason = _without(secrets, f"{error.reason}")
            message = f"HTTP status {error.code} ({reason}): {shown(_read(error, secrets))}"
        if error.code == 429 or error.code >= 500:
            raise _TransientError(message) from None
        if location := error.headers.get("Location"):
            message += f"; it has moved to {_without(secrets, location)}"
        raise ServiceError(message) from None
    except (OSError, HTTPException) as error:
        cause = error.reason if isinstance(error, URLError) else error
        if isinstance(cause, TimeoutError):
            raise TimeoutError from None
        kind = _TransientError if isinstance(cause, ConnectionError) else ServiceError
        message = f"cannot be reached: {type(cause).__name__}: {_without(secrets, str(cause))}"
        if isinstance(cause, ssl.SSLCertVerificationError):
            message += ". If you have your own certificate authority, set SSL_CERT_FILE to its file"
        raise kind(message) from None


def _read(answer: IO[bytes], secrets: Iterable[str]) -> str:
    body = answer.read(MAX_ANSWER_BYTES + 1)
    if len(body) > MAX_ANSWER_BYTES:
        raise ServiceError(f"its answer has more than {MAX_ANSWER_BYTES:,} bytes")
    return _without(secrets, body.decode(errors="replace"))


def _without(secrets: Iterable[str], text: str) -> str:
    """A service's text with secrets replaced, also in the URL-quoted forms of its address."""
    for secret in secrets:
        for form in (secret, quote(secret, safe=""), quote(secret), quote_plus(secret)):
            text = text.replace(form, "***")
    return text


def shown(value: object) -> str:
    """An answer of a service, or its beginning, for messages."""
    text = value if isinstance(value, str) else json.dumps(value)
    return repr(text if len(text) <= _SHOWN_CHARS else f"{text[:_SHOWN_CHARS]}...")


class _NoRedirects(HTTPRedirectHandler):
    """Turns redirects into errors: they would make a GET of a POST, and send the key to another
    host."""

    def redirect_request(self, *_: Any, **__: Any) -> None:
        """Return None, so that the redirect is an HTTPError."""


@cache
def _opener() -> OpenerDirector:
    """The opener of all requests, cached since reading this host's certificates takes 20 ms."""
    return build_opener(HTTPSHandler(context=ssl.create_default_context()), _NoRedirects())
