"""Why a request is not served: a status, and a text for the person who sent it."""

from __future__ import annotations

from typing import Any

__all__ = ["Refusal", "anthropic_error", "openai_error"]

_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
    409: "conflict_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
"""The type of an error in both APIs, by status."""
_TRIED_AGAIN = (408, 429, 503)
"""Statuses after which the same request may succeed."""


class Refusal(Exception):
    """A request is answered with an error.

    The clients of OpenAI and Anthropic send a request again after 408, 409, 429 and 5xx;
    `headers` say whether that can help.
    """

    def __init__(
        self,
        status: int,
        text: str,
        *,
        field: str | None = None,
        code: str | None = None,
        retry_after_s: int | None = None,
        closes: bool = False,
    ) -> None:
        """`field` names the part of the request that is wrong, `code` is OpenAI's name of the
        cause. `closes` ends the connection, where the rest of the request is not read."""
        super().__init__(text)
        self.status, self.field, self.code = status, field, code
        self.retry_after_s, self.closes = retry_after_s, closes

    def again(self) -> Refusal:
        """A copy, to be raised once more: an exception collects where it was raised."""
        return Refusal(
            self.status,
            str(self),
            field=self.field,
            code=self.code,
            retry_after_s=self.retry_after_s,
            closes=self.closes,
        )

    @property
    def headers(self) -> dict[str, str]:
        found = {"x-should-retry": "true" if self.status in _TRIED_AGAIN else "false"}
        if self.retry_after_s is not None:
            found["Retry-After"] = str(self.retry_after_s)
        if self.closes:
            found["Connection"] = "close"
        return found


def openai_error(refusal: Refusal) -> dict[str, Any]:
    """The body of the error in OpenAI's APIs."""
    return {
        "error": {
            "message": str(refusal),
            "type": _KINDS.get(refusal.status, "server_error"),
            "param": refusal.field,
            "code": refusal.code,
        }
    }


def anthropic_error(refusal: Refusal) -> dict[str, Any]:
    """The body of the error in Anthropic's API."""
    kind = _KINDS.get(refusal.status, "api_error")
    return {"type": "error", "error": {"type": kind, "message": str(refusal)}}
