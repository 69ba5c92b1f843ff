"""What the server does: answers requests, and keeps the sessions that they belong to.

request ──► images (threads wait for their decoding)
        ──► place in the session's tree ──► ids (one thread renders) ──► `Handover.sample`
answer  ◄── tool calls are read ◄── a node is added to the tree ◄──────────────┘
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import count

from hone.data.template_check import RenderError
from hone.door.calls import ReadAnswer, ReadCalls
from hone.door.handover import Handover
from hone.door.images import RequestImages, bytes_of, given_in
from hone.door.loop_calls import LoopCalls
from hone.door.prompts import ChatPrompt, Prompts, TextPrompt, message_key
from hone.door.refusal import Refusal
from hone.door.repeats import Repeats, Sent
from hone.door.security import Keys
from hone.door.sessions import (
    MAX_CONTEXTS,
    FinishedSession,
    History,
    Session,
    Sessions,
    Status,
    Terms,
)
from hone.door.settings import DoorConfig
from hone.door.tree import Node, Place, Sampled, input_of, path_of
from hone.door.turns import Answer, Asked, AskedTurn
from hone.model_input import ModelInput
from hone.types import Message, Prompt, SamplingParams, StopReason, opened_tag

__all__ = ["Door", "OnFinished", "ServedModel"]

OnFinished = Callable[[FinishedSession], object]
"""Gets each session that has ended; must return at once."""
_DISTRIBUTION = ("temperature", "top_p", "top_k", "min_p")
"""Sampling parameters that say from which distribution tokens are sampled."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServedModel:
    """The model behind the door."""

    name: str
    decode: Callable[[Sequence[int]], str]
    """Token ids to text, without tokens that end a turn."""
    token_text: Callable[[int], str]
    """The text of one token."""
    defaults: SamplingParams
    """What a request gets that does not say otherwise. Its `max_tokens` bounds an answer where the
    request has no bound."""
    read_calls: ReadCalls | None = None
    unread_calls: str = ""
    """Why tool calls are not read."""
    images: RequestImages | None = None
    """Opens the images of requests; None: the model reads text alone."""


class Door:
    """Answers requests by a runner's thread, and keeps sessions."""

    def __init__(
        self,
        model: ServedModel,
        prompts: Prompts,
        handover: Handover,
        cfg: DoorConfig,
        *,
        keys: Keys | None = None,
        on_finished: OnFinished = lambda _: None,
    ) -> None:
        """`on_finished` gets sessions as they end: in the event loop, or while no server runs in
        the thread that ends them."""
        self.loop_calls = LoopCalls()
        self.model, self.cfg, self.keys = model, cfg, keys or Keys()
        self.repeats = Repeats()
        self.prompts = prompts
        self._handover, self._on_finished = handover, on_finished
        self._sessions = Sessions(max_sessions=cfg.max_sessions, timeout_s=cfg.session_timeout_s)
        # One thread, since tokenizers and the checks of templates are used by one at a time.
        self._renderer = ThreadPoolExecutor(1, "hone-door-render")
        self._asked = count()

    def close(self) -> None:
        self._renderer.shutdown(wait=False, cancel_futures=True)
        if self.model.images is not None:
            self.model.images.close()

    # -- sessions --------------------------------------------------------------------------------

    def open_session(
        self, *, history: History = "tree", seed: int | None = None, terms: Terms | None = None
    ) -> Session:
        """Open a session; equal seeds and requests give equal turns. Any thread may call this.
        Raises Refusal where too many are open."""
        return self._sessions.open(
            history=history,
            seed=lambda: next(self._asked) if seed is None else seed,
            terms=terms,
            on_expired=lambda session: self.loop_calls.soon(
                partial(self._finish, session, "expired")
            ),
        )

    def session(self, session_id: str) -> Session:
        """The open session of this id. Raises Refusal."""
        return self._sessions.find(session_id)

    def end_session(
        self, session_id: str, status: Status = "completed", detail: str = ""
    ) -> FinishedSession:
        """End a session and hand it over. Turns that are being sampled are aborted. Call it in the
        event loop. Raises Refusal where no such session is open."""
        session = self._sessions.take(session_id)
        for task in session.running:
            task.cancel()
        return self._finish(session, status, detail)

    def end_soon(
        self, session_id: str, status: Status = "completed", detail: str = ""
    ) -> Future[FinishedSession]:
        """As `end_session`, in the event loop of the server; any thread may call this. The future
        has Refusal where no such session is open. It does not wait for the runner, so the thread
        that steps the runner may wait for it."""
        return self.loop_calls.soon(partial(self.end_session, session_id, status, detail))

    def _finish(self, session: Session, status: Status, detail: str = "") -> FinishedSession:
        self.repeats.forget(session.id)
        finished = session.finish(status, detail)
        self._on_finished(finished)
        return finished

    # -- requests --------------------------------------------------------------------------------

    async def opened(self, asked: Asked) -> Asked:
        """The request with its images opened. Raises Refusal."""
        prompt = asked.prompt
        if not isinstance(prompt, ChatPrompt) or not (given := given_in(prompt.messages)):
            return asked
        if self.model.images is None:
            raise Refusal(
                400,
                f"{given[0].field} is an image, and {self.model.name} reads text alone; send text, "
                "or serve a vision-language model",
                field=given[0].field,
            )
        messages, images = await self.model.images.opened(prompt.messages)
        return replace(asked, prompt=replace(prompt, messages=messages, images=images))

    def ask(
        self, asked: Asked, sent: Sent, session: Session | None, *, streams: bool = False
    ) -> AskedTurn:
        """The turn that answers a request, which `opened` has returned: a new one, or that of the
        request that it repeats. With `streams` a new one shows its tokens while they are sampled.
        Raises Refusal."""
        if (first := self.repeats.first(sent)) is not None:
            if session is not None:
                session.counts["repeated"] += 1
            return first
        if asked.reads_calls and self.model.read_calls is None:
            raise Refusal(400, f"tools cannot be used: {self.model.unread_calls}", field="tools")
        whole = asked.prompt.whole
        place = Place(None, None, 0, "start")
        if session is not None:
            session.require_turn()
            place = session.find(asked.prompt.opening, whole)
            self._note_ignored(asked, session)
        turn = AskedTurn(
            stop=tuple(asked.sampling.stop), reads_calls=asked.reads_calls, streams=streams
        )
        task = asyncio.create_task(self._answer(turn, asked, session, place))
        turn.run(task)
        if session is not None:
            session.running.add(task)
            task.add_done_callback(session.running.discard)
        self.repeats.remember(sent, turn)
        return turn

    async def _answer(
        self, turn: AskedTurn, asked: Asked, session: Session | None, place: Place
    ) -> Answer:
        """Sample a turn. It is recorded once it is whole, and only then."""
        place, given = await self._rendered(asked, session, place)
        before = [] if place.turn is None else path_of(place.turn)
        nodes = (*before, given)
        ids = tuple(token for node in nodes for token in node.token_ids)
        sampling = self._sampling(asked, session, num_tokens=len(ids), before=before)
        if session is not None and given is not place.given:
            session.require_tokens(len(given.token_ids), MAX_CONTEXTS * self.prompts.max_model_len)
            session.require_images(bytes_of(given.model_input))
        turn.prompt_ids = ids
        self._handover.require_place()  # a request that is sent again gets the seed of the first
        prompt, number = self._seeded(asked, session, ids, input_of(nodes))
        sampled = await self._handover.sample(
            prompt,
            sampling,
            number=number,
            # Where nobody reads along, the thread of the engine has no work with it.
            on_tokens=turn.show if turn.streams else None,
            owner="" if session is None or session.terms is None else session.terms.owner,
        )
        answer = self._read(asked, ids, given, sampled)
        if session is None:
            return answer
        node = _node(asked, answer)
        session.record(asked.prompt.opening, place, given, node)
        return replace(answer, turn=len(session.tree.turns) - 1)

    def _sampling(
        self, asked: Asked, session: Session | None, *, num_tokens: int, before: Sequence[Node]
    ) -> SamplingParams:
        """The sampling parameters of a turn behind `num_tokens` tokens, whose path begins with the
        nodes `before`. Raises Refusal where no token is left."""
        try:
            room = self.prompts.require_room(num_tokens, asked.prompt_field)
        except Refusal:
            if session is not None and session.terms is not None:
                session.limit = session.limit or StopReason.LENGTH
            raise
        if session is None:
            return replace(asked.sampling, max_tokens=min(asked.sampling.max_tokens, room))
        num_given = num_tokens - len(before[0].token_ids) if before else 0
        return session.fitted(asked.sampling, num_given=num_given, room=room)

    def defaults(self, session: Session | None) -> SamplingParams:
        """The sampling parameters of a request that does not say otherwise: those of the model, or
        the distribution that the terms of its session fix."""
        if session is None or session.terms is None:
            return self.model.defaults
        fixed = {name: getattr(session.terms.sampling, name) for name in _DISTRIBUTION}
        return replace(self.model.defaults, **fixed)

    def _note_ignored(self, asked: Asked, session: Session) -> None:
        """Note what a request asks for that the terms of its session fix otherwise."""
        if session.terms is not None:
            usual = self.defaults(session)
            session.ignored.update(
                name
                for name in (*_DISTRIBUTION, "stop_token_ids", "ignore_eos")
                if getattr(asked.sampling, name) != getattr(usual, name)
            )
            session.ignored.update(["seed"] if asked.seed is not None else [])

    async def _rendered(
        self, asked: Asked, session: Session | None, place: Place
    ) -> tuple[Place, Node]:
        """The node of what the request adds, and its place: where it cannot be appended to the
        turn before it, a branch of a tree."""
        loop, prompt = asyncio.get_running_loop(), asked.prompt
        try:
            given = await loop.run_in_executor(self._renderer, self.prompts.behind, place, prompt)
        except RenderError as error:
            assert session is not None, "without a session nothing is appended"
            if session.history == "linear":
                raise session.rewritten(str(error)) from error
            place = Place(None, None, 0, "branch")
            given = await loop.run_in_executor(self._renderer, self.prompts.first, prompt)
        return place, given

    def _seeded(
        self,
        asked: Asked,
        session: Session | None,
        ids: tuple[int, ...],
        model_input: ModelInput,
    ) -> tuple[Prompt, int]:
        """The prompt and the number that make the seed of a turn: a client's seed, else the
        session's and the turn's place in it, else one that no other request has. In the episode of
        a run a client's seed does not count: it would make the samples of a group equal."""
        if asked.seed is not None and (session is None or session.terms is None):
            name, number = "seed", asked.seed
        elif session is not None:
            name, number = f"session/{session.seed}", session.num_started
        else:
            name, number = "request", next(self._asked)
        if session is not None:
            session.num_started += 1
        return Prompt(id=name, token_ids=ids, text="", model_input=model_input), number

    def _read(self, asked: Asked, ids: tuple[int, ...], given: Node, sampled: Sampled) -> Answer:
        text, stopped_by = sampled.text, None
        if sampled.stop_reason is StopReason.STOP_STRING:
            places = {stop: text.find(stop) for stop in asked.sampling.stop}
            found = [stop for stop, place in places.items() if place >= 0]
            stopped_by = min(found, key=places.__getitem__, default=None)
            if stopped_by is not None:
                text = text[: places[stopped_by]]
        read = ReadAnswer(text)
        if asked.reads_calls and self.model.read_calls is not None:
            assert isinstance(asked.prompt, ChatPrompt)
            read = self.model.read_calls(text, asked.prompt.tools, opened_tag(given.text))
        return Answer(
            prompt_ids=ids,
            sampled=sampled,
            content=read.content,
            calls=read.calls,
            reasoning=read.reasoning,
            stopped_by=stopped_by,
        )


def _node(asked: Asked, answer: Answer) -> Node:
    """The node of a turn in the tree, with the message that a client sends back."""
    sampled, messages = answer.sampled, tuple[Message, ...]()
    part: Sequence[object] = sampled.token_ids
    if isinstance(asked.prompt, ChatPrompt):
        message: Message = {"role": "assistant", "content": answer.content}
        if answer.calls:
            message["tool_calls"] = [call.rendered for call in answer.calls]
        messages = (message,)
        part = (message_key(message),)
    elif isinstance(asked.prompt, TextPrompt):
        part = answer.content
    return Node(
        part=part,
        token_ids=sampled.token_ids,
        text=sampled.text,
        messages=messages,
        sampled=sampled,
    )
