"""The routes of the server, as a Starlette application.

    GET  /v1/models                            POST /sessions
    POST [/sessions/S]/v1/chat/completions     POST /sessions/S/reward
    POST [/sessions/S]/v1/completions          POST /sessions/S/end
    POST [/sessions/S]/v1/responses
    POST [/sessions/S]/v1/messages
    POST [/sessions/S]/inference/v1/generate

A request with a session's key belongs to that session on the routes without `/sessions/S` too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from hone.door.bodies import BodyBudget, read_body
from hone.door.door import Door
from hone.door.refusal import Refusal, anthropic_error, openai_error
from hone.door.repeats import Sent
from hone.door.sessions import Session
from hone.door.turns import Answer, Asked, AskedTurn
from hone.door.wire.chat import ChatOptions, ChatWriter, read_chat, written_chat
from hone.door.wire.completions import (
    CompletionOptions,
    CompletionWriter,
    read_completion,
    written_completion,
)
from hone.door.wire.fields import Fields, read_json
from hone.door.wire.generate import read_generate, written_generate
from hone.door.wire.messages import MessagesWriter, read_messages, written_messages
from hone.door.wire.responses import (
    ResponseOptions,
    ResponsesWriter,
    read_response,
    written_response,
)
from hone.door.wire.sessions import read_opening, read_status, set_reward, written_session
from hone.door.wire.streaming import EventStream, Writer, left
from hone.types import SamplingParams

__all__ = ["make_app"]

_CLIENT_LEFT = 499
"""Status of an answer that nobody reads."""
_Endpoint = Callable[[Request], Awaitable[Response]]
_ErrorBody = Callable[[Refusal], dict[str, Any]]


def make_app(door: Door) -> Starlette:
    """The application of a door."""
    routes = _Routes(door)
    asking = {
        "/v1/chat/completions": routes.chat,
        "/v1/completions": routes.completions,
        "/v1/responses": routes.responses,
        "/v1/messages": routes.messages,
        "/inference/v1/generate": routes.generate,
    }
    found = [Route("/v1/models", _refusing(routes.models), methods=["GET"])]
    for path, endpoint in asking.items():
        body = anthropic_error if path.endswith("messages") else openai_error
        for start in ("", "/sessions/{session}"):
            found.append(Route(start + path, _refusing(endpoint, body), methods=["POST"]))
    found += [
        Route("/sessions/{session}/v1/models", _refusing(routes.models), methods=["GET"]),
        Route("/sessions", _refusing(routes.open_session), methods=["POST"]),
        Route("/sessions/{session}/reward", _refusing(routes.reward), methods=["POST"]),
        Route("/sessions/{session}/end", _refusing(routes.end_session), methods=["POST"]),
    ]
    app = Starlette(
        routes=found,
        exception_handlers={HTTPException: _no_route},
        middleware=[Middleware(BodyBudget, max_body=routes.max_body)],
    )
    # Else a path with one slash too many is answered by the name that the request gives the server.
    app.router.redirect_slashes = False
    return app


async def _no_route(request: Request, error: Exception) -> Response:
    """The answer where no route fits."""
    assert isinstance(error, HTTPException)
    text = f"there is no {request.method} {request.url.path:.100} here (docs/serving.md)"
    refusal = Refusal(error.status_code, text)
    return JSONResponse(openai_error(refusal), refusal.status, headers=refusal.headers)


def _refusing(endpoint: _Endpoint, error_body: _ErrorBody = openai_error) -> _Endpoint:
    """The endpoint with refusals as answers."""

    async def answer(request: Request) -> Response:
        try:
            return await endpoint(request)
        except Refusal as refusal:
            return JSONResponse(error_body(refusal), refusal.status, headers=refusal.headers)

    return answer


class _Routes:
    def __init__(self, door: Door) -> None:
        self._door = door
        self.max_body = int(door.cfg.max_body_mib * 2**20)

    # -- models and sessions ---------------------------------------------------------------------

    async def models(self, request: Request) -> Response:
        self._session_id(request)
        entry = {
            "id": self._door.model.name,
            "object": "model",
            "created": 0,
            "owned_by": "hone",
            "max_model_len": self._door.prompts.max_model_len,
        }
        return JSONResponse({"object": "list", "data": [entry]})

    async def open_session(self, request: Request) -> Response:
        self._door.keys.require_server_key(request.headers)
        history, seed = read_opening(await self._fields(request))
        session = self._door.open_session(history=history, seed=seed)
        base_url = f"{request.base_url}sessions/{session.id}"
        return JSONResponse(
            {
                "session": session.id,
                "key": self._door.keys.session_key(session.id),
                "base_url": base_url,
                "openai_base_url": f"{base_url}/v1",
            }
        )

    async def reward(self, request: Request) -> Response:
        session_id = self._named_session(request)
        fields = await self._fields(request)
        session = self._door.session(session_id)
        if session.terms is not None:
            raise Refusal(
                403,
                "the reward of an episode that a run trains or evaluates is the last line that its "
                "program prints, or that of reward.functions: whatever a completion makes run "
                "might find this key",
            )
        set_reward(fields, session)
        return JSONResponse({"session": session_id})

    async def end_session(self, request: Request) -> Response:
        session_id = self._named_session(request)
        fields = await self._fields(request)
        status, detail = read_status(fields)
        has_paths = fields.flag("return_paths")
        if self._door.session(session_id).terms is not None:
            raise Refusal(403, "the episode of a run ends when its program ends")
        finished = self._door.end_session(session_id, status, detail)
        return JSONResponse(written_session(finished, has_paths=has_paths))

    # -- requests for a turn ---------------------------------------------------------------------

    async def generate(self, request: Request) -> Response:
        body, model = await self._body(request), self._door.model.name
        turn = await self._ask(body, read_generate)
        return await _answered(request, turn, lambda answer: written_generate(turn, answer, model))

    async def chat(self, request: Request) -> Response:
        body = await self._body(request)
        options = ChatOptions(body.fields, self._door.model.name)
        turn = await self._ask(body, read_chat)
        if body.streams:
            return self._streamed(turn, ChatWriter(options, self._texts))
        return await _answered(
            request, turn, lambda answer: written_chat(turn, answer, options, self._of(answer))
        )

    async def completions(self, request: Request) -> Response:
        body = await self._body(request)
        options = CompletionOptions(body.fields, self._door.model.name)
        turn = await self._ask(body, read_completion)
        if body.streams:
            return self._streamed(turn, CompletionWriter(options, self._texts))
        return await _answered(
            request,
            turn,
            lambda answer: written_completion(turn, answer, options, self._of(answer)),
        )

    async def responses(self, request: Request) -> Response:
        body = await self._body(request)
        options = ResponseOptions(body.fields, self._door.model.name)
        turn = await self._ask(body, read_response)
        if body.streams:
            return self._streamed(turn, ResponsesWriter(options))
        return await _answered(
            request, turn, lambda answer: written_response(turn, answer, options)
        )

    async def messages(self, request: Request) -> Response:
        body, model = await self._body(request), self._door.model.name
        turn = await self._ask(body, read_messages)
        if body.streams:
            return self._streamed(turn, MessagesWriter(model), anthropic_error)
        return await _answered(request, turn, lambda answer: written_messages(turn, answer, model))

    async def _body(self, request: Request) -> _Body:
        session_id = self._session_id(request)
        session = None if session_id is None else self._door.session(session_id)
        content = await read_body(request, self.max_body)
        # The same path with and without the session in it is one route.
        route = request.url.path.removeprefix(f"/sessions/{session_id}")
        sent = Sent(route, session_id, request.headers, content)
        fields = read_json(content)
        return _Body(fields, fields.flag("stream"), sent, session)

    async def _ask(self, body: _Body, read: Callable[[Fields, SamplingParams], Asked]) -> AskedTurn:
        asked = read(body.fields, self._door.defaults(body.session))
        asked = await self._door.opened(asked)
        if body.session is not None:
            # It may have ended while the body came, or while images were decoded.
            self._door.session(body.session.id)
        return self._door.ask(asked, body.sent, body.session, streams=body.streams)

    def _streamed(
        self, turn: AskedTurn, writer: Writer, error_body: _ErrorBody = openai_error
    ) -> Response:
        return EventStream(turn, writer, self._door.model.decode, error_body)

    def _texts(self, token_ids: Sequence[int]) -> list[str]:
        return [self._door.model.token_text(token) for token in token_ids]

    def _of(self, answer: Answer) -> list[str]:
        return self._texts(answer.sampled.token_ids)

    def _session_id(self, request: Request) -> str | None:
        return self._door.keys.session_of(request.headers, request.path_params.get("session"))

    def _named_session(self, request: Request) -> str:
        session_id = self._session_id(request)
        assert session_id is not None, "the path names one"
        return session_id

    async def _fields(self, request: Request) -> Fields:
        """The fields of a body, which may be empty."""
        return read_json(await read_body(request, self.max_body) or b"{}")


class _Body(NamedTuple):
    """A request for a turn, as it was sent."""

    fields: Fields
    streams: bool
    sent: Sent
    session: Session | None


async def _answered(
    request: Request, turn: AskedTurn, written: Callable[[Answer], dict[str, Any]]
) -> Response:
    """The answer to a request that does not stream. Where the client leaves before, the turn is
    aborted."""
    with turn.reading():
        gone = asyncio.create_task(left(request.receive))
        try:
            await asyncio.wait({turn.answer, gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
        if not turn.answer.done():
            return Response(status_code=_CLIENT_LEFT)
        return JSONResponse(written(turn.answer.result()))
