"""A server that speaks SGLang's protocol over a tiny model on the CPU, in threads of this process.

Parameters lie as they do in SGLang: the rows of queries, keys and values in one, those of gates and
ups in one, and the vocabulary padded. The model of transformers that computes has views of them.
"""

from __future__ import annotations

import base64
import copy
import json
import pickle
import threading
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from hone.engine.settings import EngineConfig
from hone.engine.sglang import server as server_module
from hone.engine.sglang.server_side import hone_sglang
from hone.types import EngineLostError

PADDING = 3
KEY = "secret"


@dataclass(slots=True)
class Faults:
    """What the server does wrong."""

    shift: bool = False
    """The log-probability of each token is that of the one before it."""
    forgets: str = ""
    """A weight that is not taken."""
    skips_loader: bool = False
    keeps_version: bool = False
    ends_early: bool = False
    """Requests end after two tokens with reason `length`."""
    loses_tokens: bool = False
    dies_after: int = -1
    """Tokens after which it is gone."""
    holds_at: int = -1
    """Requests stand still at so many tokens."""
    retracts: bool = False
    """A request that is ended had been put back to the queue."""


@dataclass(slots=True)
class Seen:
    """What the server was asked for."""

    paths: list[str] = field(default_factory=list)
    bodies: list[Mapping[str, Any]] = field(default_factory=list)
    largest: int = 0
    """Most requests that ran at once."""


class StandIn:
    """As `hone.engine.sglang.server.ServerProcess`, without a process."""

    def __init__(
        self,
        model: PreTrainedModel,
        cfg: EngineConfig,
        *,
        device: torch.device,
        max_model_len: int,
        folder: Path,
    ) -> None:
        self.folder, self.key = folder, KEY
        self.faults, self.seen = Faults(), Seen()
        self.is_gone = False
        self.version = "default"
        self.computes, self.holds = _fused(model)
        options = server_module.arguments(model, cfg, device=device, max_model_len=max_model_len)
        self.context: int = options["context-length"]
        self.pool = int(options.get("max-total-tokens", 1000))
        self.ended: set[str] = set()
        self.running: set[str] = set()
        self.standing: set[str] = set()
        """Requests that stand still."""
        self.memory = True
        self.go = threading.Condition()
        self.generator = torch.Generator().manual_seed(0)
        stand_in = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                stand_in.control(self, None)

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                stand_in.control(self, body)

            def log_message(self, *args: object) -> None:
                pass

        class Quiet(ThreadingHTTPServer):
            daemon_threads = False  # `server_close` waits for them

            def handle_error(self, *args: object) -> None:
                if not stand_in.is_gone:
                    traceback.print_exc()

        self.http = Quiet(("127.0.0.1", 0), Handler)
        self.port = int(self.http.server_address[1])
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def call(self, path: str, body: Mapping[str, Any] | None = None) -> Any:
        return server_module.call(self, path, body)

    def check(self) -> None:
        if self.is_gone:
            raise EngineLostError(server_module.NAME, "it ended with code -9. The end of its log:")

    def release(self) -> None:
        """Let requests that stand still go on."""
        with self.go:
            self.faults.holds_at = -1
            self.go.notify_all()

    def wait_until_one_stands(self) -> None:
        with self.go:
            assert self.go.wait_for(lambda: self.standing, 60)

    def close(self) -> None:
        self.is_gone = True
        self.release()
        self.http.shutdown()
        self.http.server_close()

    def control(self, handler: Any, body: Any) -> None:
        self.seen.paths.append(handler.path)
        if self.is_gone:
            handler.connection.close()
            return
        if handler.headers["Authorization"] != f"Bearer {self.key}":
            _answer(handler, 401, {"error": "Unauthorized"})
            return
        match handler.path:
            case "/generate":
                self.seen.bodies.append(body)
                self.generate(handler, body)
            case "/server_info":
                _answer(handler, 200, {"max_total_num_tokens": self.pool, "page_size": 1})
            case "/abort_request":
                with self.go:
                    self.ended.add(body["rid"])
                    self.go.notify_all()
                _answer(handler, 200, None)
            case "/flush_cache":
                _answer(handler, 400 if self.running else 200, None)
            case "/release_memory_occupation" | "/resume_memory_occupation":
                self.memory = handler.path == "/resume_memory_occupation"
                if not self.memory:
                    for parameter in self.holds.parameters():
                        parameter.data.fill_(torch.nan)
                _answer(handler, 200, None)
            case "/update_weights_from_tensor":
                self.update(handler, body)
            case _:
                _answer(handler, 404, None)

    def update(self, handler: Any, body: Mapping[str, Any]) -> None:
        assert body["load_format"] == server_module.LOADER
        [named] = map(base64.b64decode, body["serialized_named_tensors"])
        assert pickle.loads(named) == []
        if self.running:
            _answer(handler, 400, {"success": False, "message": "requests are running"})
            return
        if not self.faults.skips_loader:
            kept = {n: t.clone() for n, t in hone_sglang.weights(self.holds)}
            hone_sglang.answer(self.holds, self.folder)
            if self.faults.forgets:
                held = dict(hone_sglang.weights(self.holds))
                held[self.faults.forgets].copy_(kept[self.faults.forgets])
        if "weight_version" in body and not self.faults.keeps_version:
            self.version = body["weight_version"]
        _answer(handler, 200, {"success": True, "message": "Success"})

    def generate(self, handler: Any, body: Mapping[str, Any]) -> None:
        self.running.add(body["rid"])
        self.seen.largest = max(self.seen.largest, len(self.running))
        try:
            handler.send_response(200)
            handler.send_header("Transfer-Encoding", "chunked")
            handler.end_headers()
            self.stream(handler, body)
        finally:
            self.running.discard(body["rid"])

    def stream(self, handler: Any, body: Mapping[str, Any]) -> None:
        params, rid = body["sampling_params"], body["rid"]
        token_ids = list(body["input_ids"])
        longest = min(self.context, self.pool) - 1
        if len(token_ids) >= longest - 5:
            self.running.discard(rid)
            _send(handler, {"error": {"message": f"{len(token_ids)} tokens are too many"}})
            return
        left = longest - len(token_ids) - 1
        params = params | {"max_new_tokens": min(params["max_new_tokens"], left)}
        found: list[tuple[float, int]] = []
        sent = 0
        while True:
            reason = self.finish(rid, params, found)
            if reason is None:
                with self.go:
                    if len(found) == self.faults.holds_at:
                        self.standing.add(rid)
                        self.go.notify_all()
                    self.go.wait_for(
                        lambda: len(found) != self.faults.holds_at or rid in self.ended
                    )
                    if rid in self.ended:
                        continue
                    logprob, token_id = self.sample(token_ids, params["temperature"])
                token_ids.append(token_id)
                found.append((found[-1][0] if self.faults.shift and found else logprob, token_id))
                if len(found) == self.faults.dies_after:
                    self.is_gone = True
                    handler.connection.close()
                    return
            if reason is not None:
                self.running.discard(rid)  # before it says so: the next may come at once
            if reason is not None or len(found) % params["stream_interval"] == 1:
                new = found[sent + self.faults.loses_tokens :]
                ids = [token_id for _, token_id in new]
                if reason == {"type": "abort"} and self.faults.retracts:
                    new, ids = found, [token_id for _, token_id in found[-1:]]
                _send(handler, {
                    "output_ids": ids,
                    "meta_info": {
                        "finish_reason": reason,
                        "weight_version": self.version,
                        "completion_tokens": len(found),
                        "cached_tokens": 0,
                        "output_token_logprobs": [[lp, token_id, None] for lp, token_id in new],
                    },
                })  # fmt: skip
                sent = len(found)
            if reason is not None:
                handler.wfile.write(b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n")
                return

    def finish(
        self, rid: str, params: Mapping[str, Any], found: list[tuple[float, int]]
    ) -> dict[str, Any] | None:
        if rid in self.ended or self.is_gone:
            return {"type": "abort"}
        if found and not params["ignore_eos"] and found[-1][1] in params["stop_token_ids"]:
            return {"type": "stop", "matched": found[-1][1]}
        if len(found) == (2 if self.faults.ends_early else params["max_new_tokens"]):
            return {"type": "length", "length": len(found)}
        return None

    @torch.no_grad()
    def sample(self, token_ids: list[int], temperature: float) -> tuple[float, int]:
        logits = self.computes(torch.tensor([token_ids])).logits[0, -1].float()
        logprobs = torch.log_softmax(logits / (temperature or 1.0), -1)
        index = (
            logprobs.exp().multinomial(1, generator=self.generator)
            if temperature
            else logprobs.argmax()[None]
        )
        return float(logprobs[index]), int(index)


def _answer(handler: Any, status: int, content: Any) -> None:
    data = json.dumps(content).encode()
    handler.send_response(status)
    handler.send_header("Content-Length", str(len(data)))
    handler.end_headers()
    handler.wfile.write(data)


def _send(handler: Any, content: Any) -> None:
    data = b"data: " + json.dumps(content).encode() + b"\n\n"
    handler.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


def _fused(model: PreTrainedModel) -> tuple[PreTrainedModel, nn.Module]:
    """A model of random weights that computes, and the tree of the parameters that it reads."""
    config = copy.deepcopy(model.config)
    computes = AutoModelForCausalLM.from_config(
        config, dtype=model.dtype, attn_implementation="eager"
    ).eval()
    holds = nn.Module()
    pieces: dict[str, list[tuple[nn.Parameter, str]]] = {}
    fused = {name: whole for whole, names in hone_sglang.FUSED.items() for name in names}
    for name, parameter in computes.named_parameters(remove_duplicate=False):
        path, _, leaf = name.rpartition(".")
        parent, _, last = path.rpartition(".")
        pieces.setdefault(f"{parent}.{fused.get(last, last)}.{leaf}".strip("."), []).append(
            (parameter, last)
        )
    made: dict[int, nn.Parameter] = {}
    for name, parts in pieces.items():
        path, _, leaf = name.rpartition(".")
        module = _module(holds, path)
        first, last = parts[0]
        tensors = [parameter.detach() for parameter, _ in parts]
        if last in ("embed_tokens", "lm_head"):
            module.org_vocab_size = len(first)
            tensors.append(torch.full((PADDING, first.shape[1]), torch.nan, dtype=first.dtype))
        whole = made.setdefault(id(first), nn.Parameter(torch.cat(tensors), requires_grad=False))
        if len(parts) > 1:
            module.output_sizes = [len(parameter) for parameter, _ in parts]
        setattr(module, leaf, whole)
    for name, parts in pieces.items():
        whole: Tensor = holds.get_parameter(name)
        start = 0
        for parameter, _ in parts:
            length = len(parameter)
            parameter.data = whole.data[start : start + length]
            start += length
    return computes, holds


def _module(root: nn.Module, path: str) -> Any:
    for name in path.split("."):
        if not hasattr(root, name):
            root.add_module(name, nn.Module())
        root = getattr(root, name)
    return root
