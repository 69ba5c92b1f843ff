"""A door over a scripted engine: no model, a real server at a free port."""

from __future__ import annotations

import http.client
import json
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from time import monotonic, sleep
from typing import Any
from urllib.parse import urlsplit

from transformers import PreTrainedTokenizerFast

from hone.config.tree import EvaluateDataConfig
from hone.door.calls import CalledTool, ReadAnswer
from hone.door.door import Door, ServedModel
from hone.door.handover import Handover, TokensSince
from hone.door.images import RequestImages
from hone.door.prompts import Prompts
from hone.door.security import Keys
from hone.door.server import DoorServer
from hone.door.sessions import FinishedSession
from hone.door.settings import DoorConfig
from hone.door.turns import AskedTurn
from hone.models.tiny import make_bpe_tokenizer
from hone.models.tokenizer import decoder
from hone.rollout.episodes import Episodes
from hone.rollout.runner import Runner
from hone.types import Completion, EngineStats, Request, SamplingParams, StopReason
from tests.images.family import Family
from tests.rollout.fakes import draw

TEMPLATE = (
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "{% for call in message['tool_calls'] or [] %}<call>{{ call['function']['name'] }} "
    "{{ call['function']['arguments'] | tojson }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
THINKING = TEMPLATE.replace(
    "{{ message['content'] }}",
    "{% if message['role'] == 'assistant' and loop.index0 < ns.last %}"
    "{{ message['content'].split('</think>')[-1].lstrip() }}"
    "{% else %}{{ message['content'] }}{% endif %}",
).replace(
    "{% for message in messages %}",
    "{% set ns = namespace(last=-1) %}{% for message in messages %}"
    "{% if message['role'] == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% for message in messages %}",
    1,
)
"""As Qwen3's: thoughts before the last message of the user are left out."""
PATIENCE_S = 60.0
"""Longest wait of a test that hangs."""
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
Script = Callable[[Request], str]


@cache
def tokenizer_of(template: str = TEMPLATE) -> PreTrainedTokenizerFast:
    made = make_bpe_tokenizer(["the quick brown fox says hello to the world"], 300)
    made.chat_template = template
    return made


class ScriptedEngine:
    """Answers each request with the tokens of a text, one a step, and an end token. Where `gate` is
    cleared, it waits."""

    def __init__(self, script: Script, tokenizer: PreTrainedTokenizerFast) -> None:
        self.script, self.tokenizer = script, tokenizer
        self.weight_version = 3
        self.gate = threading.Event()
        self.gate.set()
        self.error: Exception | None = None
        self.submitted: list[Request] = []
        self.aborted: list[str] = []
        self.num_steps = 0
        self.on_step: Callable[[], object] = lambda: None
        self._running: dict[str, tuple[Request, list[int], Completion]] = {}

    @property
    def has_unfinished(self) -> bool:
        return bool(self._running)

    def submit(self, requests: Sequence[Request]) -> None:
        for request in requests:
            self.submitted.append(request)
            ids = self.tokenizer(self.script(request), add_special_tokens=False)["input_ids"]
            done = Completion(
                request_id=request.id,
                token_ids=[],
                logprobs=[],
                weight_versions=[],
                stop_reason=StopReason.ABORT,
            )
            self._running[request.id] = (request, [*ids, self.tokenizer.eos_token_id], done)

    def step(self) -> list[Completion]:
        assert self.gate.wait(PATIENCE_S)
        self.num_steps += 1
        self.on_step()
        if self.error is not None:
            raise self.error
        ended: list[Completion] = []
        for request, script, done in [*self._running.values()]:
            place = len(done.token_ids)
            done.token_ids.append(script[place])
            done.logprobs.append(logprob_of(request, place))
            done.weight_versions.append(self.weight_version)
            reason = self._reason(request, done, is_last=place + 1 == len(script))
            if reason is not None:
                done.stop_reason = reason
                ended.append(done)
                del self._running[request.id]
        return ended

    def _reason(self, request: Request, done: Completion, *, is_last: bool) -> StopReason | None:
        text = self.tokenizer.decode([*done.token_ids])
        if any(stop in text for stop in request.sampling.stop):
            return StopReason.STOP_STRING
        if is_last:
            return StopReason.EOS
        is_full = len(done.token_ids) == request.sampling.max_tokens
        return StopReason.LENGTH if is_full else None

    def abort(self, request_ids: Iterable[str]) -> list[Completion]:
        names = [name for name in request_ids if name in self._running]
        self.aborted += names
        return [self._running.pop(name)[2] for name in names]

    def tokens_since(self, request_id: str, start: int) -> tuple[list[int], list[float]]:
        if request_id not in self._running:
            return [], []
        done = self._running[request_id][2]
        return [*done.token_ids[start:]], [*done.logprobs[start:]]

    def stats(self) -> EngineStats:
        return EngineStats()


def logprob_of(request: Request, place: int) -> float:
    """Unlike for any two tokens."""
    return -1.0 - draw(request.sampling.seed, place) / 2**40


def echo(request: Request) -> str:
    """An answer that follows from the seed."""
    return f"answer {draw(request.sampling.seed) % 10_000}"


def read_calls(text: str, tools: Any, opened: str) -> ReadAnswer:
    """Calls written as `<call>NAME ARGUMENTS</call>`."""
    del tools, opened
    content, *calls = text.split("<call>")
    made = [call.removesuffix("</call>").partition(" ") for call in calls]
    return ReadAnswer(
        content.strip() if made else text,
        tuple(
            CalledTool(id=f"call_{number}", name=name, arguments=arguments)
            for number, (name, _, arguments) in enumerate(made)
        ),
    )


@dataclass
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def events(self) -> list[Any]:
        """The data of server-sent events, without the last of OpenAI's."""
        found = [
            line.removeprefix("data: ")
            for line in self.body.decode().splitlines()
            if line.startswith("data: ")
        ]
        return [json.loads(data) for data in found if data != "[DONE]"]


@dataclass
class Served:
    """A running server, and what a client needs."""

    url: str
    key: str
    door: Door
    engine: ScriptedEngine
    handover: Handover
    server: DoorServer
    finished: list[FinishedSession] = field(default_factory=list[FinishedSession])
    errors: list[BaseException] = field(default_factory=list[BaseException])

    @property
    def port(self) -> int:
        return self.server.port

    @property
    def turns(self) -> list[AskedTurn]:
        """The turns that the server remembers."""
        return list(dict.fromkeys(self.door.repeats._turns.values()))

    def connect(self) -> http.client.HTTPConnection:
        place = urlsplit(self.url)
        return http.client.HTTPConnection(place.hostname or "", place.port, timeout=PATIENCE_S)

    def send(
        self,
        path: str,
        body: Any = None,
        *,
        key: str | None = None,
        method: str = "POST",
        **headers: str,
    ) -> Reply:
        connection = self.connect()
        connection.request(
            method,
            path,
            body if isinstance(body, bytes) else json.dumps(body or {}),
            {"Authorization": f"Bearer {self.key if key is None else key}"}
            | {name.replace("_", "-"): value for name, value in headers.items()},
        )
        answer = connection.getresponse()
        reply = Reply(
            answer.status,
            {name.lower(): value for name, value in answer.getheaders()},
            answer.read(),
        )
        connection.close()
        return reply

    def open(self, **body: Any) -> SessionClient:
        reply = self.send("/sessions", body)
        assert reply.status == 200, reply.body
        return SessionClient(self, **{k: reply.json[k] for k in ("session", "key")})


@dataclass
class SessionClient:
    served: Served
    session: str
    key: str

    def send(self, path: str, body: Any = None, **headers: str) -> Reply:
        return self.served.send(f"/sessions/{self.session}{path}", body, key=self.key, **headers)

    def chat(self, *messages: dict[str, Any], **body: Any) -> Any:
        reply = self.send("/v1/chat/completions", chat_body(*messages, **body))
        assert reply.status == 200, reply.body
        return reply.json

    def end(self) -> Any:
        return self.send("/end", {"return_paths": True}).json


def chat_body(*messages: dict[str, Any], **body: Any) -> dict[str, Any]:
    return {"messages": [*messages], "logprobs": True, "return_token_ids": True} | body


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@contextmanager
def serving(
    script: Script = echo,
    *,
    template: str = TEMPLATE,
    max_model_len: int = 4096,
    shows_tokens: bool = True,
    key: str | None = None,
    sees: Family | None = None,
    **settings: Any,
) -> Generator[Served]:
    """A door whose engine writes what `script` says. `sees` is the family of a model that sees
    images; None: it reads text alone."""
    tokenizer = tokenizer_of(template) if sees is None else sees.tokenizer
    reader = None if sees is None else sees.reader()
    engine = ScriptedEngine(script, tokenizer)
    prompts = Prompts(
        tokenizer,
        EvaluateDataConfig(),
        vocab_size=len(tokenizer),
        max_model_len=max_model_len,
        end_ids=[tokenizer.eos_token_id],
        images=reader,
    )
    images = None
    if reader is not None:
        images = RequestImages(reader, max_model_len=max_model_len, num_threads=2)
    model = ServedModel(
        name="scripted",
        decode=decoder(tokenizer, [tokenizer.eos_token_id]),
        token_text=lambda token: tokenizer.decode([token]),
        defaults=SamplingParams(max_tokens=256),
        read_calls=read_calls,
        images=images,
    )
    since = engine.tokens_since if shows_tokens else None
    with running(engine, model, prompts, since=since, key=key, **settings) as served:
        yield served


@contextmanager
def running(
    engine: Any,
    model: ServedModel,
    prompts: Prompts,
    *,
    since: TokensSince | None = None,
    key: str | None = None,
    **settings: Any,
) -> Generator[Served]:
    """A server with an engine, which a thread of its own drives."""
    cfg = DoorConfig(**settings)
    handover = Handover(max_requests=cfg.max_requests)
    finished: list[FinishedSession] = []
    errors: list[BaseException] = []
    door = Door(model, prompts, handover, cfg, keys=Keys(key), on_finished=finished.append)
    runner = Runner(engine, None, Episodes(decode=model.decode, purpose="serve"))

    def drive() -> None:
        try:
            handover.serve(runner, since)
        except RuntimeError as error:
            errors.append(error)

    thread = threading.Thread(target=drive)
    with DoorServer(door) as server:
        thread.start()
        try:
            yield Served(
                server.url, door.keys.key, door, engine, handover, server, finished, errors
            )
        finally:
            if isinstance(engine, ScriptedEngine):
                engine.gate.set()
            handover.close()
            thread.join(PATIENCE_S)
    assert not thread.is_alive()
    assert errors or not runner.groups, "every turn is closed"


def until(condition: Callable[[], object]) -> None:
    """Wait for something that another thread does."""
    deadline = monotonic() + PATIENCE_S
    while not condition():
        assert monotonic() < deadline, "it never came"
        sleep(0.002)


def in_threads(calls: Iterable[Callable[[], Any]]) -> Iterator[Any]:
    """The results of calls that are made at the same time, in their order."""
    calls = [*calls]
    with ThreadPoolExecutor(len(calls)) as pool:
        yield from [future.result(PATIENCE_S) for future in [pool.submit(c) for c in calls]]
