"""The nouns of the system, and the two protocols that everything else is built around.

A *prompt* is sampled `n` times by an *engine*; each answer is a *sample*; the answers to one
prompt form a *group*. Scored groups become *rows* (a sample plus its advantages), which are packed
into *micro-batches* for a *trainer*.

A sample is tokens, never text: ids as sampled, with the behaviour log-probability and the weight
version written where each token was sampled. Nothing downstream re-tokenises, and no mask is ever
inferred from a padding id.

This module imports torch for type checkers only, so planners and configuration stay light.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableSequence, Sequence
from dataclasses import KW_ONLY, dataclass, field
from enum import StrEnum
from functools import cache
from operator import attrgetter
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, SupportsIndex

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    Routes = NDArray[np.integer[Any]]
    """The experts that tokens passed in each layer that has them: ids [T, L, K]; the largest number
    of the format stands for a token of which nobody knows (`hone.models.routes`)."""
    _Array = array[Any]
else:
    Routes = Any  # whoever reads annotations when it runs needs no numpy
    _Array = array

__all__ = [
    "NOT_SAMPLED",
    "Column",
    "Completion",
    "Engine",
    "EngineLostError",
    "EngineStats",
    "Extent",
    "FailureKind",
    "Group",
    "LossExtent",
    "Message",
    "MicroBatch",
    "Observation",
    "PackedKeys",
    "PerToken",
    "Preference",
    "Prompt",
    "Request",
    "Reward",
    "Routes",
    "Row",
    "Sample",
    "SamplingEngine",
    "SamplingParams",
    "StopReason",
    "TensorRecord",
    "Trainer",
    "Turn",
    "WeightManifest",
    "opened_tag",
    "with_opened_tag",
]

Message = dict[str, Any]
"""One chat turn, `{"role": ..., "content": ...}`, as chat templates take it."""

_OPENED = re.compile(r"<\w+>\s*\Z")


def opened_tag(prompt: str) -> str:
    """The tag that a rendered prompt ends with, and the blanks behind it: `<think>` of templates of
    reasoning models, which a completion then closes without having opened it. Else empty."""
    found = _OPENED.search(prompt)
    return found[0] if found else ""


def with_opened_tag(prompt: str, completion: str) -> str:
    """What a completion is as a message: where it closes a tag that its prompt has opened, the tag
    stands before it."""
    opened = opened_tag(prompt)
    tag = opened.rstrip()
    is_closed = bool(tag) and tag.replace("<", "</") in completion
    return (
        completion if not is_closed or completion.lstrip().startswith(tag) else opened + completion
    )


NOT_SAMPLED = -1
"""Weight version of a token that no weights have sampled: an environment has inserted it."""


@cache
def _getter(kind: type[Any]) -> Callable[[Any], tuple[Any, ...]]:
    return attrgetter(*kind.__slots__)


def _field_values(self: Any) -> tuple[Any, ...]:
    """The values of a dataclass with slots, as it is pickled. `dataclasses` would look its fields
    up each time, which takes longer than all else in a message of requests."""
    return _getter(type(self))(self)


def _set_field_values(self: Any, values: tuple[Any, ...]) -> None:
    for name, value in zip(self.__slots__, values, strict=True):
        object.__setattr__(self, name, value)


class StopReason(StrEnum):
    """Why generation ended. Written where it ended, never guessed from ids."""

    EOS = "eos"
    """An end-of-sequence or stop id was sampled; it is the last token of the completion."""
    STOP_STRING = "stop_string"
    """The decoded completion contains one of the stop strings."""
    LENGTH = "length"
    """`max_tokens` or the context limit was reached: the completion is truncated."""
    ABORT = "abort"
    """The request was withdrawn; the completion is what had been sampled until then."""
    ERROR = "error"
    """No engine can serve the request; `Completion.error` says why."""
    MAX_TURNS = "max_turns"
    """Of an episode alone: it had all its turns, and the environment would have gone on."""


class FailureKind(StrEnum):
    """Why a sample carries no reward. A failed sample never reaches an advantage or a loss."""

    TIMEOUT = "timeout"
    OUT_OF_MEMORY = "out_of_memory"
    CRASH = "crash"
    EXCEPTION = "exception"
    INVALID = "invalid"
    """The scorer returned something that is not a finite number."""
    ENGINE = "engine"
    """No engine can serve the request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """The distribution a request samples from, and when it ends."""

    __getstate__, __setstate__ = _field_values, _set_field_values

    max_tokens: int
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    min_p: float = 0.0
    seed: int = 0
    """Seed of this request alone: the same request gives the same tokens in any batch."""
    stop_token_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    """Sample to `max_tokens` whatever is drawn (benchmarks)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """One question, rendered once; `token_ids` is what the engine sees."""

    __getstate__, __setstate__ = _field_values, _set_field_values

    id: str
    """Stable over epochs, shuffles and workers, unique in the data set: `<source>:<row>`."""
    token_ids: tuple[int, ...]
    text: str
    """The rendered prompt, for people."""
    answer: str | None = None
    """Ground truth handed to the rewards."""
    task: str = "default"
    metadata: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """The columns of the row; that of the answer holds what `answer_pattern` took out of it."""
    unrendered: str | list[Message] = ""
    """The prompt as the row has it: text or messages, before any template."""
    raw_answer: Any = None
    """The answer as the row has it, before it is made a text."""
    messages: tuple[Message, ...] = ()
    """What the chat template rendered, where an environment may add to it; else empty."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to be generated."""

    __getstate__, __setstate__ = _field_values, _set_field_values

    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    """Lower goes first; resumed samples are put before fresh ones."""
    resumed: Completion | None = None
    """Tokens sampled earlier (a partial rollout); generation goes on after them."""


class PerToken(_Array):
    """A value for each token, in 1 to 8 bytes. Equals a list of the same values."""

    __slots__ = ()
    __hash__ = None

    if TYPE_CHECKING:  # the stubs have one for each type code

        def __new__(cls, typecode: str, values: Iterable[Any] = ..., /) -> Self: ...

    def __eq__(self, other: object) -> bool:
        return self.tolist() == other if isinstance(other, list) else super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __iadd__(self, values: Iterable[Any]) -> Self:
        self.extend(values)
        return self

    def __reduce_ex__(self, protocol: SupportsIndex, /) -> tuple[Any, ...]:
        # Bytes of the message itself, where that can be: they are copied once.
        values = PickleBuffer(self) if int(protocol) >= 5 else self.tobytes()
        return PerToken, (self.typecode, values)

    def __deepcopy__(self, memo: object) -> PerToken:
        return PerToken(self.typecode, self)


_CODES = {"token_ids": "i", "logprobs": "d", "weight_versions": "i", "loss_mask": "b"}
"""How the values of each token are kept: type codes of `array`, which keep every bit."""


class _Compact:
    """Sequences with a value for each token are kept as arrays: in a fifth of the memory of lists,
    and a tenth of their time between processes."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if name in _CODES and not isinstance(values := getattr(self, name), PerToken):
                setattr(self, name, PerToken(_CODES[name], values))


@dataclass(slots=True, kw_only=True)
class Completion(_Compact):
    """What an engine sampled for one request. The three arrays are parallel, one entry a token."""

    request_id: str
    token_ids: MutableSequence[int]
    logprobs: MutableSequence[float]
    """Log-probability of each token under the distribution it was drawn from."""
    weight_versions: MutableSequence[int]
    """Version of the weights that sampled each token."""
    stop_reason: StopReason
    num_cached_tokens: int = 0
    """Prompt tokens whose keys and values were read from the prefix cache."""
    error: str = ""
    """With stop reason `error`, why no engine can serve the request."""
    text: str | None = None
    """The tokens decoded, where the process of the engine has done it."""
    routes: Routes | None = None
    """Of the prompt and these tokens, from the first on: each as it was when what follows it was
    sampled. The last one has none. None where the engine records none."""

    @classmethod
    def as_submitted(cls, request: Request, stop_reason: StopReason, error: str = "") -> Completion:
        """What a request has that no engine has worked on: nothing, or its resumed tokens."""
        had = request.resumed
        return cls(
            request_id=request.id,
            token_ids=had.token_ids if had else [],
            logprobs=had.logprobs if had else [],
            weight_versions=had.weight_versions if had else [],
            stop_reason=stop_reason,
            num_cached_tokens=had.num_cached_tokens if had else 0,
            routes=had.routes if had else None,
            error=error,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """A score and the parts it is the weighted sum of."""

    __getstate__, __setstate__ = _field_values, _set_field_values

    total: float
    parts: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class Observation:
    """What an environment says to a turn that does not end the episode."""

    content: str | Sequence[Message] = ""
    """A text, which becomes a message of `role`, or whole messages, rendered by the chat template.
    Where prompts are rendered without one, the text as it is."""
    role: str | None = "user"
    """Of the message that a text becomes; None: the text is appended as it is, and the policy
    goes on in the same message."""
    _: KW_ONLY
    token_ids: tuple[int, ...] = ()
    """Appended as they are, in place of `content`."""
    reward: float = 0.0
    """Of the turn that this answers; an episode's reward is the sum."""
    max_tokens: int | None = None
    """Longest next turn, in tokens; None: what is left of the episode."""
    stop: tuple[str, ...] = ()
    """Texts that end the next turn; none: those of the first turn."""
    state: Any = None
    """JSON values that the next call gets; None: what they were."""


@dataclass(slots=True, kw_only=True)
class Turn:
    """What the policy sampled at one go, and what the environment added behind it."""

    start: int
    """Position in `Sample.token_ids` of its first token."""
    end: int
    """Position behind its last token; what was added lies between it and the next turn."""
    text: str
    stop_reason: StopReason
    observed: str = ""
    """The text added behind the policy's; with a chat template from the end of the message on."""
    messages: tuple[Message, ...] = ()
    """Those among it."""
    reward: float = 0.0


@dataclass(slots=True, kw_only=True)
class Sample(_Compact):
    """One answer to a prompt: an episode, of one turn or of several.

    `loss_mask` says which completion tokens the policy sampled (and may be trained on); tokens an
    environment inserted are part of the episode but masked, with log-probability 0 and weight
    version `NOT_SAMPLED`. `len(token_ids) == len(logprobs) == len(weight_versions) ==
    len(loss_mask)` at all times.
    """

    id: str
    prompt: Prompt
    index: int
    """Position in the group, 0 <= index < n."""
    token_ids: MutableSequence[int]
    logprobs: MutableSequence[float]
    weight_versions: MutableSequence[int]
    loss_mask: MutableSequence[bool]
    stop_reason: StopReason
    """Of the last turn, or the limit that ended the episode."""
    text: str = ""
    """The decoded completion, for rewards and people; never re-encoded."""
    turns: list[Turn] = field(default_factory=list[Turn])
    routes: Routes | None = None
    """Of the prompt and the tokens, as far as they are known, as of a `Completion`."""
    seed: int = 0
    """For the environment; equal in all samples of a group."""
    state: Any = None
    """The environment's, JSON values."""
    must_end: bool = True
    """No turn or token is left, or it has failed: there is only a score to come."""
    observation: Observation | None = None
    """What the environment has just answered, on the way to the next turn."""
    reward: Reward | None = None
    failure: FailureKind | None = None
    failure_detail: str = ""

    @property
    def truncated(self) -> bool:
        return self.stop_reason in (StopReason.LENGTH, StopReason.MAX_TURNS)

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled, whether they are trained or masked."""
        return len(self.weight_versions) - self.weight_versions.count(NOT_SAMPLED)

    @property
    def valid(self) -> bool:
        """Scored without failure: may enter baselines, losses and reward means."""
        return self.failure is None and self.reward is not None


@dataclass(slots=True, kw_only=True)
class Group:
    """All samples of one prompt in one step. The baseline of an advantage is taken over these."""

    id: str
    prompt: Prompt
    samples: list[Sample]

    @property
    def valid_samples(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.valid]


Extent = Literal["trained", "token", "row"]
"""What a column has a value for: each trained token (N), each token (T), or the row as a whole."""

LossExtent = Literal["trained", "row", "unit"]
"""What an objective gives a value for."""


@dataclass(frozen=True, slots=True)
class Column:
    """Values that a row has in addition to its token ids, such as advantages or a label."""

    values: Tensor  # [N, ...], [T, ...] or [1, ...] as `per` says, in host memory
    per: Extent = "trained"


@dataclass(slots=True, kw_only=True)
class Row:
    """One token sequence to train on, and what the loss needs for it.

    `loss_mask` covers all T tokens; entry t says whether token t is trained, so `loss_mask[0]` is
    always False. N tokens are trained.
    """

    id: str
    group_id: str = ""
    """Group the row came from; rows of one group share every mini-batch."""
    unit: str = ""
    """Rows of one unit, such as the two of a preference, share a micro-batch; they are of one
    group. Empty: the row is one by itself."""
    token_ids: list[int]
    loss_mask: list[bool]
    columns: dict[str, Column] = field(default_factory=dict[str, Column])
    """`advantages`, `staleness` (int32 updates since the oldest weights behind a token), and
    `<output>/<who>`: `logprobs/engine` as sampled, `logprobs/policy` before the update,
    `logprobs/reference`; after it `entropy/policy` of some rows, for people."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_trained(self) -> int:
        return sum(self.loss_mask)

    def column(self, name: str) -> Tensor:
        """The values of a column. Raises KeyError naming those that the row has."""
        if name not in self.columns:
            raise KeyError(f"row {self.id!r} has no column {name!r}, only {sorted(self.columns)}")
        return self.columns[name].values


@dataclass(frozen=True, slots=True)
class Preference:
    """Two completions of a prompt, the chosen one first, or one that is good or not: rows whose
    completions, with their end tokens, are trained."""

    id: str
    rows: tuple[Row, ...]
    labels: tuple[bool, ...]
    margin: float = 0.0
    """Of a pair, by how much the chosen one's reward should exceed the other's."""

    @property
    def token_ids(self) -> list[int]:
        return [token for row in self.rows for token in row.token_ids]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedKeys:
    """The keys of packed sequences some of which begin with tokens of another one: K in all, T of
    them different. What a sequence has packed itself are the last of its keys."""

    index: Tensor  # [K] int64 into [T]: the token of each key, one sequence after the other
    cu_seqlens: Tensor  # [S + 1] int32, borders of sequences among the keys
    max_seqlen: int
    lengths: tuple[int, ...]  # [S] host copy of the differences of cu_seqlens
    uses: Tensor  # [K] int32 into [K]: the keys of the first token, then those of the second, ...
    uses_starts: Tensor  # [T + 1] int32: where those of each token begin among `uses`


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """Several rows laid end to end: one forward pass, no padding anywhere.

    T tokens, S sequences, N trained tokens, U units. A trained token at position t is predicted by
    the hidden state at t - 1, so `predict_index` holds where t - 1 lies and `labels` the id at t.
    With `keys` rows may lack their leading tokens, which another row has.
    """

    input_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, within the sequence
    cu_seqlens: Tensor  # [S + 1] int32, borders of sequences
    max_seqlen: int
    keys: PackedKeys | None = None
    predict_index: Tensor  # [N] int64 into [T]
    labels: Tensor  # [N] int64
    sequence_index: Tensor  # [N] int64 into [S]
    unit_index: Tensor  # [S] int64 into [U]
    num_units: int
    weights: Tensor  # [N], [S] or [U] float32 as `Objective.per` says; over one optimizer step they
    # carry the whole normalisation
    columns: Mapping[str, Tensor] = field(default_factory=dict[str, Any])
    """Of the rows end to end: [N, ...], [T, ...] or [S, ...]."""
    ids: tuple[str, ...] = ()  # [S] row ids
    lengths: tuple[int, ...] = ()  # [S] host copy of the differences of cu_seqlens

    @property
    def num_sequences(self) -> int:
        return len(self.ids)

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids.shape[0])

    def column(self, name: str) -> Tensor:
        """A column of the rows. Raises KeyError naming those that they have."""
        if name not in self.columns:
            raise KeyError(f"the rows have no column {name!r}, only {sorted(self.columns)}")
        return self.columns[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot of an engine; counters run since the engine was made."""

    __getstate__, __setstate__ = _field_values, _set_field_values

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    """Share of KV blocks in use, 0 to 1."""
    kv_cache_bytes: int = 0
    """Of all blocks; 0 where the engine does not say."""
    weight_bytes: int = 0
    """Of its own parameters; 0 where they are the trainer's."""
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens served from the prefix cache."""
    num_generated_tokens: int = 0
    num_steps: int = 0
    busy_s: float = 0.0
    """Seconds spent inside `step`."""
    num_first_tokens: int = 0
    """Requests whose first token is known."""
    num_lost: int = 0
    """Of a pool, engines that were lost, in whose place another one starts."""


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """One line of a weight manifest."""

    shape: tuple[int, ...]
    dtype: str
    """As exported to the engine, for example `bfloat16`."""
    checksum: int
    """Position-dependent 64-bit sum over the exported bits."""
    tied_to: str | None = None
    """First name of the same storage, where several names share one parameter."""


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """Everything a weight sync must deliver: version and one record a tensor."""

    version: int
    tensors: Mapping[str, TensorRecord]


class EngineLostError(RuntimeError):
    """An engine of other threads or processes has ended, or must be taken to have: its requests and
    its weights are gone."""

    def __init__(self, engine: str, cause: str) -> None:
        super().__init__(engine, cause)  # what pickle makes it of again
        self.engine = engine
        self.cause = cause

    def __str__(self) -> str:
        return f"{self.engine} is lost: {self.cause}"


class SamplingEngine(Protocol):
    """Samples completions: what rollouts need of an engine."""

    @property
    def weight_version(self) -> int: ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Raises ValueError for one that can never fit."""
        ...

    def step(self) -> list[Completion]:
        """Advance every running sequence by at least one token; return those that finished."""
        ...

    def abort(self, request_ids: Iterable[str]) -> list[Completion]:
        """Withdraw requests and return what they had, with stop reason `abort`."""
        ...

    @property
    def has_unfinished(self) -> bool: ...

    def stats(self) -> EngineStats: ...


class Engine(SamplingEngine, Protocol):
    """An engine in this process. `step` is driven by the caller; nothing runs behind its back."""

    @property
    def needs_weights(self) -> bool:
        """Whether it can sample only once a sync has delivered weights: it has slept without."""
        ...

    def sleep(self) -> None:
        """Free the KV cache, and weights that the engine may forget. Legal only while nothing is
        running."""
        ...

    def wake(self) -> None:
        """Allocate again what was freed. Legal only while asleep."""
        ...

    def begin_sync(self) -> None:
        """Refuse to sample until `finish_sync` has confirmed a manifest."""
        ...

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors the engine samples with, under Hugging Face names."""
        ...

    def shard(self, name: str, tensor: Tensor) -> Tensor:
        """The part of a full weight that this engine holds, in the form in which it does: a view,
        the tensor itself, or one of its own."""
        ...

    def finish_sync(self, manifest: WeightManifest) -> None:
        """Compare the engine's own tensors with the manifest; adopt its version, drop stale KV.

        Raises RuntimeError naming missing, unexpected and different tensors.
        """
        ...


class Trainer(Protocol):
    """Holds the policy being trained."""

    def logprobs(self, rows: Sequence[Row]) -> list[Tensor]:
        """Log-probability of each row's trained tokens, [N_i] float32 on the CPU."""
        ...

    def update(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        """Train on the rows: mini-batches and epochs as configured. Returns metrics."""
        ...

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights an engine must sample with, under Hugging Face names."""
        ...
