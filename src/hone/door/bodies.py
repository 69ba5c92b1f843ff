"""Bodies of requests: how long each may be and take, and how much all of them may take together."""

from __future__ import annotations

import asyncio

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hone.door.refusal import Refusal, openai_error

__all__ = ["ALL_BYTES", "BODY_S", "BodyBudget", "read_body"]

BODY_S = 60.0
"""Longest time for a body to come, in seconds."""
ALL_BYTES = 2**30
"""Bytes that the bodies of all requests may have together, from their first byte to the end of
their answer: as many requests as may wait with a million bytes each. Four of the longest bodies
always have room."""


class BodyBudget:
    """An ASGI application around another one, which counts what is read of bodies, and lets no
    request through whose end others may see elsewhere."""

    def __init__(self, app: ASGIApp, *, max_body: int) -> None:
        """`max_body` is the length of the longest body, in bytes."""
        self._app, self._most = app, max(ALL_BYTES, 4 * max_body)
        self._num_bytes = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and _has_two_lengths(Headers(scope=scope)):
            refusal = Refusal(
                400,
                "the request has Content-Length and Transfer-Encoding; send one of them",
                closes=True,
            )
            response = JSONResponse(openai_error(refusal), refusal.status, headers=refusal.headers)
            await response(scope, receive, send)
            return
        num_held = 0

        async def counted() -> Message:
            nonlocal num_held
            message = await receive()
            size = len(message.get("body", b""))
            if self._num_bytes + size > self._most:
                raise Refusal(
                    429,
                    f"the requests that are read, sampled or wait have {self._most / 2**20:g} MiB "
                    "in all, which is as much as there may be; ask again",
                    code="bodies_full",
                    retry_after_s=1,
                )
            self._num_bytes += size
            num_held += size
            return message

        try:
            await self._app(scope, counted, send)
        finally:
            self._num_bytes -= num_held


def _has_two_lengths(headers: Headers) -> bool:
    """Whether a proxy before this server may see another end of a request than it does: then what
    follows would be read as a request of its own."""
    return "content-length" in headers and "transfer-encoding" in headers


async def read_body(request: Request, max_bytes: int) -> bytes:
    """The body of a request. Raises Refusal as soon as it is longer than `max_bytes`, after
    `BODY_S`, and where the client leaves."""
    too_long = Refusal(
        413, f"the body is longer than {max_bytes / 2**20:g} MiB (serve.max_body_mib)"
    )
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > max_bytes:
        raise too_long
    parts, size = list[bytes](), 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                size += len(part)
                if size > max_bytes:
                    raise too_long
                parts.append(part)
    except TimeoutError:
        raise Refusal(408, f"the body did not come within {BODY_S:g} s", closes=True) from None
    except ClientDisconnect:
        raise Refusal(400, "the client left before its body had come") from None
    return b"".join(parts)
