"""Workloads for engines: requests drawn from a seed or read from a file.

A workload fixes the lengths exactly: every request samples `max_tokens` tokens, whatever token
would end it. Token ids are random, so a model with random weights serves as well as a trained one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from pydantic import Field, ValidationError, model_validator

from hone.config.base import Section
from hone.config.bench import DecodeConfig
from hone.config.schema import locate, nearest
from hone.config.tree import BenchEngineConfig
from hone.errors import UserError
from hone.types import Request, SamplingParams

__all__ = ["Workload", "decode", "groups", "make_workload", "read_requests", "uniform"]


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests that are submitted together, in this order."""

    name: str
    requests: tuple[Request, ...]

    @property
    def prompt_lengths(self) -> list[int]:
        return [len(request.prompt_ids) for request in self.requests]

    @property
    def output_lengths(self) -> list[int]:
        return [request.sampling.max_tokens for request in self.requests]

    @property
    def num_output_tokens(self) -> int:
        return sum(self.output_lengths)

    @property
    def longest(self) -> int:
        """Longest prompt plus output, in tokens."""
        return max(map(sum, zip(self.prompt_lengths, self.output_lengths, strict=True)))

    def redrawn(self, seed: int, vocab_size: int) -> Self:
        """A workload with the same lengths and other token ids, for warm-up. Equal prompts stay
        equal."""
        rng = np.random.default_rng(seed)
        distinct = dict.fromkeys(request.prompt_ids for request in self.requests)
        fresh = {old: _draw_ids(rng, len(old), vocab_size) for old in distinct}
        requests = tuple(replace(x, prompt_ids=fresh[x.prompt_ids]) for x in self.requests)
        return replace(self, requests=requests)

    def check_fits(self, max_model_len: int, *, limit: str) -> None:
        """Raise UserError, which names the first request that is longer than `limit` allows."""
        for request in self.requests:
            prompt, output = len(request.prompt_ids), request.sampling.max_tokens
            if prompt + output > max_model_len:
                raise UserError(
                    f"workload {self.name}: request {request.id} has {prompt} prompt and {output} "
                    f"output tokens, {prompt + output} in all, but {limit} is {max_model_len}"
                )


def make_workload(cfg: BenchEngineConfig, vocab_size: int) -> Workload:
    """The workload that `cfg.workload` names. Raises UserError for a file with a bad line."""
    match cfg.workload:
        case "decode":
            budget = cfg.engine.max_num_batched_tokens
            draw = partial(decode, cfg.decode, max_num_batched_tokens=budget)
        case "uniform":
            draw = uniform
        case "groups":
            draw = groups
        case path:
            draw = partial(read_requests, Path(path))
    return draw(seed=cfg.run.seed, vocab_size=vocab_size)


def uniform(*, seed: int, vocab_size: int) -> Workload:
    """256 requests with prompts and outputs of 100 to 1,024 tokens each, uniformly drawn."""
    rng = np.random.default_rng(seed)
    prompts, outputs = rng.integers(100, 1025, size=(2, 256)).tolist()
    return _workload("uniform", rng, prompts, outputs, vocab_size=vocab_size)


def groups(*, seed: int, vocab_size: int) -> Workload:
    """64 prompts of 256 tokens, 8 samples each. Output lengths are log-normal, median 800 and sigma
    0.7, and cut at 3,800: the long tail of reinforcement learning."""
    rng = np.random.default_rng(seed)
    drawn = rng.lognormal(np.log(800), 0.7, size=64 * 8)
    outputs = np.clip(np.rint(drawn), 1, 3800).astype(int).tolist()
    return _workload("groups", rng, [256] * 64, outputs, vocab_size=vocab_size)


def decode(
    cfg: DecodeConfig, *, max_num_batched_tokens: int, seed: int, vocab_size: int
) -> Workload:
    """`cfg.batch` sequences that decode together for `cfg.steps` steps around `cfg.context` tokens.

    While the last prompts are prefilled, `max_num_batched_tokens` per step, the first sequences
    already decode; so all get as many tokens more. Raises UserError if the context leaves no room
    for a prompt.
    """
    budget = max(max_num_batched_tokens - cfg.batch, 1)
    lead = -(-cfg.batch * cfg.context // budget) + 2
    prompt = cfg.context - (cfg.steps + lead) // 2
    if prompt < 1:
        raise UserError(
            f"decode.context={cfg.context} is too short for decode.steps={cfg.steps} steps around "
            f"it, after the {lead} that {cfg.batch} prompts take; raise decode.context to at least "
            f"{cfg.context + 1 - prompt}, or lower decode.steps or decode.batch"
        )
    rng = np.random.default_rng(seed)
    lengths = [cfg.steps + lead] * cfg.batch
    return _workload("decode", rng, [prompt] * cfg.batch, lengths, vocab_size=vocab_size)


class _Line(Section):
    """One line of a file of requests."""

    prompt_tokens: int | None = Field(default=None, ge=1)
    """Length of a prompt of random ids."""

    prompt_ids: tuple[int, ...] | None = Field(default=None, min_length=1)
    """The prompt itself, in place of its length."""

    max_tokens: int = Field(ge=1)
    """Tokens to sample."""

    n: int = Field(default=1, ge=1)
    """Samples of this prompt."""

    temperature: float = Field(default=1.0, ge=0)
    """Divisor of the logits; 0 is greedy."""

    top_p: float = Field(default=1.0, gt=0, le=1)
    """Smallest set of tokens whose probability reaches this much."""

    top_k: int = Field(default=0, ge=0)
    """Number of most probable tokens kept; 0 keeps all."""

    min_p: float = Field(default=0.0, ge=0, lt=1)
    """Drop tokens less probable than this share of the most probable one."""

    @model_validator(mode="after")
    def _has_one_prompt(self) -> Self:
        if (self.prompt_tokens is None) == (self.prompt_ids is None):
            raise ValueError("give either prompt_tokens (a number) or prompt_ids (a list)")
        return self


_SAMPLING = {"temperature", "top_p", "top_k", "min_p"}


def read_requests(path: Path, *, seed: int, vocab_size: int) -> Workload:
    """Read requests from a JSONL file, one object per line. Raises UserError, which names the wrong
    line."""
    rng = np.random.default_rng(seed)
    requests: list[Request] = []
    for number, line in _read_lines(path):
        wrong = [x for x in line.prompt_ids or () if not 0 <= x < vocab_size]
        if wrong:
            raise UserError(
                f"{path}, line {number}: prompt_ids holds {wrong[0]}; ids are from 0 to "
                f"{vocab_size - 1}"
            )
        ids = line.prompt_ids or _draw_ids(rng, line.prompt_tokens or 0, vocab_size)
        sampling = line.model_dump(include=_SAMPLING)
        requests += _requests(f"{number}", ids, [line.max_tokens] * line.n, rng, **sampling)
    if not requests:
        raise UserError(f"{path} holds no requests")
    return Workload(path.name, tuple(requests))


def _read_lines(path: Path) -> Iterator[tuple[int, _Line]]:
    """The lines with their numbers, from 1. Blank lines are skipped."""
    with path.open(encoding="utf-8") as file:
        for number, text in enumerate(file, start=1):
            if text.strip():
                try:
                    yield number, _Line.model_validate_json(text, strict=True)
                except ValidationError as error:
                    raise UserError(f"{path}, line {number}: {_explain(error)}") from error


def _explain(error: ValidationError) -> str:
    """Describe the problem of a line. A misspelt key comes first: it explains one that is
    missing."""
    details = error.errors(include_url=False)
    detail = next((x for x in details if x["type"] == "extra_forbidden"), details[0])
    path = [str(part) for part in detail["loc"]]
    match detail["type"]:
        case "json_invalid" | "model_type":
            return f"no JSON object: {detail['msg']}"
        case "extra_forbidden":
            near = nearest(_Line, path)
            keys = ", ".join(_Line.model_fields)
            hint = f"did you mean {' or '.join(near)}?" if near else f"allowed: {keys}"
            return f"unknown key '{path[0]}'; {hint}"
        case "missing":
            return f"'{path[0]}' is required"
        case "value_error":
            return detail["msg"].removeprefix("Value error, ")
        case _:
            field = locate(_Line, path[:1])
            assert field is not None, f"{path=}"
            return f"{path[0]} is {detail['input']!r}; allowed: {field.allowed}"


def _workload(
    name: str,
    rng: np.random.Generator,
    prompts: Sequence[int],
    outputs: Sequence[int],
    *,
    vocab_size: int,
) -> Workload:
    """A workload with equally many requests for each prompt length and the output lengths in
    order."""
    num_samples = len(outputs) // len(prompts)
    requests: list[Request] = []
    for index, length in enumerate(prompts):
        ids = _draw_ids(rng, length, vocab_size)
        own = outputs[index * num_samples : (index + 1) * num_samples]
        requests += _requests(f"{index}", ids, own, rng)
    return Workload(name, tuple(requests))


def _requests(
    name: str,
    prompt_ids: tuple[int, ...],
    outputs: Sequence[int],
    rng: np.random.Generator,
    **sampling: Any,
) -> list[Request]:
    """One request per output length, each with its own seed, for the same prompt."""
    return [
        Request(
            id=f"{name}/{index}",
            prompt_ids=prompt_ids,
            sampling=SamplingParams(
                max_tokens=length, seed=int(rng.integers(2**31)), ignore_eos=True, **sampling
            ),
        )
        for index, length in enumerate(outputs)
    ]


def _draw_ids(rng: np.random.Generator, length: int, vocab_size: int) -> tuple[int, ...]:
    return tuple(rng.integers(vocab_size, size=length).tolist())
