"""SGLang behind the `Engine` protocol: a client of a server process on the same device.

SGLang schedules, computes and draws. Which token ends a request, its versions, and which weights
arrived are decided here, by the code of the embedded engine, so that all engines mean the same.

Every request to the server lives under one weight version: `begin_sync` withdraws all of them and
keeps their tokens; after the sync they are sent again with these tokens. So each token's version is
certain, and no key or value outlives the weights that computed it. Between two calls of `step` the
server continues with the requests that it has.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from itertools import count
from time import monotonic, perf_counter, sleep
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from hone.distributed.listening import LOOPBACK
from hone.engine.base import EngineBase, EngineState
from hone.engine.sequence import Sequence
from hone.engine.settings import EngineConfig
from hone.engine.sglang.server import NAME, RESERVED_TOKENS, Server, ServerProcess
from hone.engine.sglang.streams import Event, Streams
from hone.engine.sglang.weights import RemoteWeights
from hone.errors import UserError
from hone.models.manifest import build_manifest, compare, export_weights, match_layout
from hone.models.tensor_parallel import TensorParallel
from hone.types import (
    Completion,
    EngineLostError,
    EngineStats,
    Request,
    StopReason,
    WeightManifest,
)

__all__ = ["SGLangEngine"]

STREAM_INTERVAL = 16
"""Tokens between two messages of the server on a request. A request that ends by a stop string is
ended here, so up to so many tokens behind it are sampled for nothing."""
_STEP_S = 0.05
_STALL_S = 300.0
_END_S = 120.0
_ASK_AGAIN_S = 0.5


class SGLangEngine(EngineBase):
    """The `Engine` protocol over an SGLang server, with a copy of the weights of `model`.

    `model` gives architecture, dtype and, unless it lies on the meta device, the first weights, as
    version 0; it is not used afterwards. One on the meta device needs `device`, and its engine a
    sync before it samples. `eos_token_ids` end every request that does not ignore them; `tokenizer`
    serves stop strings alone. `max_model_len`, in tokens, is the model's context length by default.

    With `engine.enable_sleep`, `sleep` gives up the KV cache and the weights, which the next sync
    delivers again. Draws are the server's: seeds of requests have no effect on them.

    After an exception out of `step` the engine is in no known state: make it anew.

    Raises UserError where SGLang is not there or of a version that is not served, or its cache is
    too small for one sequence; and EngineLostError, with the end of the server's log, from any call
    after the server has ended.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cfg: EngineConfig,
        *,
        eos_token_ids: Collection[int],
        tokenizer: PreTrainedTokenizerBase | None = None,
        max_model_len: int | None = None,
        device: torch.device | None = None,
        start: Callable[..., Server] | None = None,
    ) -> None:
        device = device or model.device
        super().__init__(
            model.config,
            cfg,
            eos_token_ids=eos_token_ids,
            tokenizer=tokenizer,
            max_model_len=max_model_len,
            tensor_parallel=TensorParallel(rank=0, size=1, device=device),
        )
        self._max_num_seqs = cfg.max_num_seqs
        self._frees_memory = cfg.enable_sleep
        start = start or ServerProcess
        self._server = start(model, cfg, device=device, max_model_len=self.max_model_len)
        self._weights = RemoteWeights(self._server, device)
        self._streams = Streams(LOOPBACK, self._server.port, self._server.key)
        self._cache_tokens = _cache_tokens(self._server.call("/server_info"), self.max_model_len)
        self.state = EngineState.SYNCING
        self._keys: dict[str, str] = {}
        """Server-side name of each request that has been sent."""
        self._by_key: dict[str, Sequence] = {}
        self._begun: dict[str, int] = {}
        """Number of tokens of each request when it was sent."""
        self._handed_over = count()
        self._ended: list[Completion] = []
        """Completions of requests that ended while others were withdrawn; the next step returns
        them."""
        self._leaving: set[str] = set()
        """Ids of requests that are being withdrawn."""
        self._heard_s = monotonic()
        self._num_prompt_tokens = self._num_cached_tokens = 0
        if model.device.type != "meta":
            self._adopt(model)

    @property
    def has_unfinished(self) -> bool:
        """Whether any request is queued or running, or has ended since the last step."""
        return bool(self._sequences or self._ended)

    def submit(self, requests: Seq[Request]) -> None:
        """Queue requests, all or none. Legal in any state.

        Raises ValueError for one that can never fit, is malformed, samples from a part of the
        distribution, or reuses an unfinished id.
        """
        for request in requests:
            _check_whole_distribution(request)
        self._sequences |= self._new_sequences(requests, self._sequences)

    def step(self) -> list[Completion]:
        """Send queued requests to the server, as many as may run, and return those that finished.

        Waits for news of the server, for 0.05 seconds at most.
        """
        self._require(EngineState.AWAKE, call="step")
        if not self.has_unfinished:
            return []
        started_s = perf_counter()
        if self.tracer is not None:
            begins = any(not sequence.logprobs for sequence in self._sequences.values())
            self.tracer.begin(self.weight_version, is_prefill=begins)
        self._hand_over()
        excess = self._hear(self._streams.take(0.0 if self._ended else _STEP_S))
        self._end_at_server(excess)
        self._num_steps += 1
        if self.tracer is not None:
            self.tracer.end(is_idle=not self._sequences)
        self._busy_s += perf_counter() - started_s
        ended, self._ended = self._ended, []
        return ended

    def abort(self, request_ids: Iterable[str]) -> list[Completion]:
        """Withdraw requests and return what they had, with stop reason `abort`.

        Ids that are not queued or running are passed over: they may just have finished.
        """
        names = [name for name in request_ids if name in self._sequences]
        self._take_back(names)
        return [
            self._sequences.pop(name).completion(StopReason.ABORT)
            for name in names
            if name in self._sequences
        ]

    def sleep(self) -> None:
        """Free the KV cache and the weights; queued requests stay.

        Raises RuntimeError while sequences run, or the engine is neither awake nor without weights.
        """
        self._require(EngineState.AWAKE, EngineState.SYNCING, call="sleep")
        if self._by_key:
            raise RuntimeError(
                f"sleep() while {len(self._by_key)} sequences run; finish or abort them first"
            )
        if self._frees_memory:
            self._wait_until_idle()
            self._server.call("/release_memory_occupation", {})
        self.state = EngineState.ASLEEP

    def wake(self) -> None:
        """Allocate the memory that `sleep` freed. The next sync delivers the weights."""
        self._require(EngineState.ASLEEP, call="wake")
        if self._frees_memory:
            self._server.call("/resume_memory_occupation", {})
        self.state = EngineState.SYNCING if self._frees_memory else EngineState.AWAKE

    def begin_sync(self) -> None:
        """Refuse to sample until `finish_sync` has confirmed a manifest.

        Running sequences keep their tokens, and compute their keys and values again afterwards.
        Legal again after a delivery that failed.
        """
        self._require(EngineState.AWAKE, EngineState.SYNCING, call="begin_sync")
        self._take_back(list(self._keys))
        self._wait_until_idle()
        self.state = EngineState.SYNCING

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights that the server computes with, on the meta device, tied ones by each name."""
        return iter(self._weights.targets.items())

    def shard(self, name: str, tensor: Tensor) -> Tensor:
        """The weight itself: the server holds whole ones."""
        return tensor

    def write(self, parts: Mapping[str, tuple[Tensor, Tensor]]) -> int:
        """Copy parts of weights into the parameters of the server; return the bytes written."""
        return self._weights.write(parts)

    def finish_sync(self, manifest: WeightManifest) -> None:
        """Compare what the server's parameters hold to the manifest, and adopt its version.

        The server computes the checksums, and drops all keys and values. Raises RuntimeError naming
        missing, unexpected and different tensors, and stays in sync.
        """
        self._require(EngineState.SYNCING, call="finish_sync")
        if diff := compare(manifest, self._weights.held(manifest.version)):
            raise RuntimeError(
                f"weight sync to version {manifest.version} is incomplete: {diff.describe()}"
            )
        self.weight_version = manifest.version
        self.state = EngineState.AWAKE

    def stats(self) -> EngineStats:
        """A snapshot; counters run since the engine was made."""
        num_running = len(self._by_key)
        in_cache = sum(len(sequence.token_ids) for sequence in self._by_key.values())
        return EngineStats(
            num_running=num_running,
            num_waiting=len(self._sequences) - num_running,
            kv_cache_usage=min(in_cache / self._cache_tokens, 1.0),
            weight_bytes=self._weights.num_bytes,
            num_prompt_tokens=self._num_prompt_tokens,
            num_cached_tokens=self._num_cached_tokens,
            num_generated_tokens=self._num_generated_tokens,
            num_steps=self._num_steps,
            busy_s=self._busy_s,
            num_first_tokens=self._num_first_tokens,
        )

    # -- requests at the server ------------------------------------------------------------------

    def _hand_over(self) -> None:
        """Send the requests that are first in line, as many as may run."""
        room = self._max_num_seqs - len(self._by_key)
        if room <= 0:
            return
        queued = [s for name, s in self._sequences.items() if name not in self._keys]
        for sequence in sorted(queued, key=lambda sequence: sequence.order)[:room]:
            # All names have the same length, since the server ends every request whose name begins
            # with a given one.
            key = f"hone-{next(self._handed_over):012d}"
            self._keys[sequence.request.id] = key
            self._by_key[key] = sequence
            self._begun[key] = len(sequence.logprobs)
            self._streams.open(key, _body(key, sequence))
            self._heard_s = monotonic()

    def _hear(self, events: Iterable[Event]) -> list[str]:
        """Append arrived tokens to their sequences; returns the server-side names of requests that
        ended here but still run on the server. Raises RuntimeError for unexpected answers, and
        EngineLostError where the server has ended or is silent for five minutes."""
        excess: list[str] = []
        for event in events:
            self._heard_s = monotonic()
            sequence = self._by_key.get(event.name)
            if sequence is None:  # ended here
                continue
            if event.chunk is None:
                self._server.check()
                raise EngineLostError(
                    NAME,
                    f"request {sequence.request.id!r} was not served to its end: "
                    f"{event.error or 'its answer ended without a reason'}",
                )
            finish: Mapping[str, Any] | None = event.chunk["meta_info"].get("finish_reason")
            reason = self._append(sequence, event.name, event.chunk)
            if reason is not None:
                self._ended.append(sequence.completion(reason))
                self._forget(sequence)
                if finish is None:
                    excess.append(event.name)
            elif finish is not None:
                self._leave(sequence, finish)
        if self._by_key and monotonic() - self._heard_s > _STALL_S:
            self._server.check()
            raise EngineLostError(
                NAME, f"it has said nothing of {len(self._by_key)} requests for {_STALL_S:.0f} s"
            )
        return excess

    def _append(self, sequence: Sequence, key: str, chunk: Mapping[str, Any]) -> StopReason | None:
        """Append the tokens of a message to a sequence, up to one that ends it."""
        info: Mapping[str, Any] = chunk["meta_info"]
        token_ids: list[int] = chunk["output_ids"]
        received = len(sequence.logprobs) - self._begun[key]
        if received + len(token_ids) != info["completion_tokens"]:
            # When a request that waits again for room in the cache is ended, SGLang reports its
            # last token and the log-probabilities of all. Tokens not known yet are sampled again.
            if (info.get("finish_reason") or {}).get("type") == "abort":
                return None
            raise RuntimeError(
                f"{NAME} has sampled {info['completion_tokens']} tokens of request "
                f"{sequence.request.id!r} and delivered {received + len(token_ids)}"
            )
        if token_ids and str(info.get("weight_version")) != str(self.weight_version):
            raise RuntimeError(
                f"{NAME} sampled request {sequence.request.id!r} with weights of version "
                f"{info.get('weight_version')!r}; those of {self.weight_version} were proven"
            )
        found: list[list[Any]] = info.get("output_token_logprobs") or []
        if [entry[1] for entry in found] != token_ids:
            raise RuntimeError(
                f"{NAME} gave the log-probabilities of tokens {[entry[1] for entry in found]} for "
                f"the tokens {token_ids} of request {sequence.request.id!r}"
            )
        if sequence.num_cached_tokens < 0 and token_ids:
            num_prompt = len(sequence.request.prompt_ids)
            sequence.num_cached_tokens = min(int(info.get("cached_tokens") or 0), num_prompt)
            self._num_prompt_tokens += num_prompt
            self._num_cached_tokens += sequence.num_cached_tokens
            self._num_first_tokens += not sequence.logprobs
        for logprob, token_id, *_ in found:
            reason = sequence.append(int(token_id), float(logprob), self.weight_version)
            self._num_generated_tokens += 1
            if reason is not None:
                return reason
        return None

    def _leave(self, sequence: Sequence, finish: Mapping[str, Any]) -> None:
        """Handle a request that the server ended without a stop reason, which is expected only
        after it was withdrawn."""
        name = sequence.request.id
        if finish["type"] != "abort" or name not in self._leaving:
            raise RuntimeError(
                f"{NAME} ended request {name!r} after {len(sequence.logprobs)} of "
                f"{sequence.request.sampling.max_tokens} tokens, with reason {dict(finish)}, which "
                "nobody asked for"
            )
        self._leaving.discard(name)
        self._drop(name)

    def _take_back(self, names: Iterable[str]) -> None:
        """Withdraw requests and wait until the server has ended them; they keep their tokens. A
        request that finishes in that time is returned by the next step."""
        self._leaving = {name for name in names if name in self._keys}
        deadline = monotonic() + _END_S
        asked_s = 0.0
        while self._leaving & self._keys.keys():
            if monotonic() - asked_s > _ASK_AGAIN_S:  # it may not have seen the request yet
                self._end_at_server([self._keys[n] for n in self._leaving if n in self._keys])
                asked_s = monotonic()
            self._end_at_server(self._hear(self._streams.take(_STEP_S)))
            if monotonic() > deadline:
                self._server.check()
                raise EngineLostError(NAME, f"it did not end requests within {_END_S:.0f} s")
        self._leaving = set()

    def _end_at_server(self, keys: Iterable[str]) -> None:
        for key in keys:
            self._server.call("/abort_request", {"rid": key})

    def _forget(self, sequence: Sequence) -> None:
        del self._sequences[sequence.request.id]
        self._drop(sequence.request.id)

    def _drop(self, name: str) -> None:
        key = self._keys.pop(name)
        del self._by_key[key], self._begun[key]

    def _wait_until_idle(self) -> None:
        """Let the server drop all keys and values, which it does when no request is left; after
        that weights and memory may change."""
        deadline = monotonic() + _END_S
        while True:
            try:
                self._server.call("/flush_cache", {})
                return
            except RuntimeError as error:
                if isinstance(error, EngineLostError) or monotonic() > deadline:
                    raise
            sleep(0.01)

    @torch.no_grad()
    def _adopt(self, model: PreTrainedModel) -> None:
        """Take the weights of `model` as version 0. Raises RuntimeError where they do not match."""
        targets = self._weights.targets
        named = dict(export_weights(model))
        if diff := match_layout({name: tensor.shape for name, tensor in named.items()}, targets):
            raise RuntimeError(f"SGLang does not hold the weights of this model: {diff.describe()}")
        self.begin_sync()
        self.write({name: (targets[name], tensor) for name, tensor in named.items()})
        dtypes = {name: target.dtype for name, target in targets.items()}
        self.finish_sync(build_manifest(named.items(), 0, dtypes=dtypes))


def _cache_tokens(info: Mapping[str, Any], max_model_len: int) -> int:
    """Number of tokens in the server's KV cache. Raises UserError where one sequence of full length
    may not fit, which SGLang would truncate."""
    found, page = int(info["max_total_num_tokens"]), int(info["page_size"])
    least = max_model_len + max(RESERVED_TOKENS, 2 * page + 1)
    if found < least:
        raise UserError(
            f"the KV cache of {NAME} has room for {found} tokens, and a sequence of "
            f"{max_model_len} needs {least}: raise engine.kv_cache_gib or "
            "engine.gpu_memory_utilization, or make sequences shorter"
        )
    return found


def _body(key: str, sequence: Sequence) -> dict[str, Any]:
    """A request to the server for the rest of a sequence."""
    params = sequence.request.sampling
    return {
        "rid": key,
        "input_ids": list(sequence.token_ids),
        "stream": True,
        "return_logprob": True,
        "sampling_params": {
            "max_new_tokens": sequence.num_left,
            "temperature": params.temperature,
            # Stop strings are watched for here, and end-of-sequence ids are stop ids.
            "stop_token_ids": sorted(sequence.stop_ids),
            "ignore_eos": not sequence.stop_ids,
            "stream_interval": STREAM_INTERVAL,
        },
    }


def _check_whole_distribution(request: Request) -> None:
    """Raise ValueError for a request whose log-probabilities SGLang would not report: they are of
    all tokens, also where it draws from some."""
    params = request.sampling
    if params.top_p < 1 or params.top_k > 0 or params.min_p > 0:
        raise ValueError(
            f"request {request.id!r} has top_p={params.top_p}, top_k={params.top_k} and "
            f"min_p={params.min_p}; SGLang reports log-probabilities of the whole distribution, so "
            "they must be 1, 0 and 0"
        )
