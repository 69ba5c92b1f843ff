"""The data types of the system, and the protocols of engines and trainers.

A *prompt* is sampled `n` times by an *engine*; each answer is a *sample*; the answers to one
prompt form a *group*. Scored groups become *rows* (a sample plus its advantages; several rows where
an agent rewrote its history), which are packed into *micro-batches* for a *trainer*.

A sample is tokens, never text: ids as sampled, each with its log-probability and the version of the
weights that sampled it, both recorded by the engine. Nothing re-tokenises a sample, and no mask is
inferred from a padding id.

Letters of tensor shapes, also as suffixes of names (`hidden_TD`): T packed tokens, N trained
tokens, S sequences (rows of a micro-batch), U units of a loss, V vocabulary, D model width, H
heads, A position axes, G samples of a group, L layers, and K for keys, for the likeliest tokens or
for the experts of a token.

This module imports torch for type checkers only, so that the planner and the configuration load
fast.
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

from hone.model_input import TEXT, ContentPiece, ModelInput
from hone.segments import SegmentPlan

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    Routes = NDArray[np.integer[Any]]
    """The experts that each token was routed to in each layer with experts: ids [T, L, K]. The
    largest value of the dtype stands for a token whose experts are not known
    (`hone.models.routes`)."""
    _Array = array[Any]
else:
    Routes = Any  # annotations are evaluated at run time (pydantic), where numpy is not imported
    _Array = array

__all__ = [
    "NOT_SAMPLED",
    "Branch",
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
    """The tag at the end of a rendered prompt with the whitespace after it, else an empty text.
    Templates of reasoning models end with `<think>`, which the completion closes."""
    match = _OPENED.search(prompt)
    return match[0] if match else ""


def with_opened_tag(prompt: str, completion: str) -> str:
    """The completion as a message. A tag that the prompt opens and the completion closes is put
    before it."""
    opened = opened_tag(prompt)
    tag = opened.rstrip()
    is_closed = bool(tag) and tag.replace("<", "</") in completion
    return (
        completion if not is_closed or completion.lstrip().startswith(tag) else opened + completion
    )


NOT_SAMPLED = -1
"""Weight version of a token that no model sampled: an environment inserted it."""


@cache
def _getter(kind: type[Any]) -> Callable[[Any], tuple[Any, ...]]:
    return attrgetter(*kind.__slots__)


def _field_values(self: Any) -> tuple[Any, ...]:
    """The field values of a dataclass with slots, for pickle. The method that `dataclasses`
    generates looks the fields up each time, which took longer than everything else in a message of
    requests."""
    return _getter(type(self))(self)


def _set_field_values(self: Any, values: tuple[Any, ...]) -> None:
    for name, value in zip(self.__slots__, values, strict=True):
        object.__setattr__(self, name, value)


class StopReason(StrEnum):
    """Why generation ended, as recorded by the engine; it is never guessed from ids."""

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
    """Only for episodes: all turns were used, and the environment had not ended the episode; or it
    has cut the episode at a limit of its own."""
    DEADLINE = "deadline"
    """Only for episodes: the time for it was over (`env.episode_timeout_s`)."""


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
    """The sampling distribution of a request and its stop conditions."""

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
    """The columns of the row; the answer's column has what `answer_pattern` extracted."""
    unrendered: str | list[Message] = ""
    """The prompt in the row: text or messages, before any template."""
    raw_answer: Any = None
    """The answer in the row, before it is converted to text."""
    messages: tuple[Message, ...] = ()
    """The messages that the chat template rendered, where an environment may append to them; else
    empty."""
    model_input: ModelInput = TEXT
    """Inputs of the model besides the ids, such as images."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One sequence to be generated."""

    __getstate__, __setstate__ = _field_values, _set_field_values

    id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    priority: int = 0
    """Lower values are admitted first; resumed samples come before new ones."""
    resumed: Completion | None = None
    """Tokens sampled earlier (a partial rollout); generation continues after them."""
    model_input: ModelInput = TEXT
    """Inputs of the model besides the prompt's ids, such as images."""


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
        # Protocol 5 may send the array's own buffer, so that its bytes are copied once.
        values = PickleBuffer(self) if int(protocol) >= 5 else self.tobytes()
        return PerToken, (self.typecode, values)

    def __deepcopy__(self, memo: object) -> PerToken:
        return PerToken(self.typecode, self)


_CODES = {"token_ids": "i", "logprobs": "d", "weight_versions": "i", "loss_mask": "b"}
"""Type codes of `array` for the per-token fields; none of them loses a bit."""


class _Compact:
    """Base class that stores per-token fields as arrays: a fifth of the memory of lists, and a
    tenth of the time to send them to another process."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name in self.__slots__:
            if name in _CODES and not isinstance(values := getattr(self, name), PerToken):
                setattr(self, name, PerToken(_CODES[name], values))


@dataclass(slots=True, kw_only=True)
class Completion(_Compact):
    """What an engine sampled for one request. The first three sequences have one entry a token."""

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
    """The decoded tokens, where the engine's process has decoded them."""
    routes: Routes | None = None
    """Routes of the prompt and of these tokens, recorded when the next token was sampled; so the
    last token has none. None where the engine records no routes."""

    @classmethod
    def as_submitted(cls, request: Request, stop_reason: StopReason, error: str = "") -> Completion:
        """The completion of a request that no engine worked on: its resumed tokens, or none."""
        resumed = request.resumed
        return cls(
            request_id=request.id,
            token_ids=resumed.token_ids if resumed else [],
            logprobs=resumed.logprobs if resumed else [],
            weight_versions=resumed.weight_versions if resumed else [],
            stop_reason=stop_reason,
            num_cached_tokens=resumed.num_cached_tokens if resumed else 0,
            routes=resumed.routes if resumed else None,
            error=error,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reward:
    """The reward of a sample: a weighted sum of the scores in `parts`."""

    __getstate__, __setstate__ = _field_values, _set_field_values

    total: float
    parts: Mapping[str, float] = field(default_factory=dict[str, float])
    is_partial: bool = False
    """The scores of functions that take whole groups are still to be added."""


@dataclass(frozen=True, slots=True)
class Observation:
    """The environment's answer to a turn that does not end the episode."""

    content: str | Sequence[Message] = ""
    """A text or a list of parts, which become a message of `role`, or messages; both are rendered
    by the chat template. Without a chat template the text is appended unchanged. A part is
    `{"type": "text", "text": ...}` or `{"type": "image", "image": ...}`, with a path, the bytes of
    a file, a data URI or an image of pillow."""
    role: str | None = "user"
    """Role of the message that a text becomes. None: the text is appended unchanged, and the policy
    continues in the same message."""
    _: KW_ONLY
    token_ids: tuple[int, ...] = ()
    """Token ids to append unchanged, in place of `content`."""
    reward: float = 0.0
    """Reward of the turn that this answers; the rewards of all turns are added."""
    max_tokens: int | None = None
    """Longest next turn, in tokens; None: what is left of the episode."""
    stop: tuple[str, ...] = ()
    """Stop strings of the next turn; empty: those of the first turn."""
    state: Any = None
    """JSON values for the next call, as `Episode.state`; None keeps the last ones."""


@dataclass(slots=True, kw_only=True)
class Turn:
    """One turn of the policy, and the observation that follows it."""

    start: int
    """Index in `token_ids`, of the sample or the branch, of the turn's first token."""
    end: int
    """Index after the turn's last token; the observation lies between it and the next turn."""
    text: str
    stop_reason: StopReason
    ended_by: str = ""
    """Text of the token that ended it, which `text` leaves out."""
    observed: str = ""
    """Text of the observation; with a chat template it starts with the end of the policy's
    message."""
    messages: tuple[Message, ...] = ()
    """Messages of the observation; an image is `{"type": "image", "hash": ...}`, with the content
    hash of its first tile."""
    reward: float = 0.0
    is_answered: bool = False
    """Whether an environment has answered it, or has ended or failed the episode. Unlike `env_s` it
    is kept in checkpoints."""
    policy_s: float | None = field(default=None, compare=False)
    """Seconds from the last submission of the turn's request to its end, with waiting for the
    engine. None: not measured."""
    env_s: float | None = field(default=None, compare=False)
    """Seconds that a worker took for the answer of the environment, and for scores where that ended
    the episode. None: not measured."""


_CUT = frozenset({StopReason.LENGTH, StopReason.MAX_TURNS, StopReason.DEADLINE})


@dataclass(slots=True, kw_only=True)
class Branch(_Compact):
    """One path of an episode whose history was rewritten: a context, and the tokens after it.

    The context ends where the path samples its first token that no earlier path has. Per-token
    fields have one entry for each token after the context, as in `Sample`.
    """

    prompt_ids: tuple[int, ...]
    """The context: all tokens before `token_ids`, whoever sampled them."""
    token_ids: MutableSequence[int]
    logprobs: MutableSequence[float]
    weight_versions: MutableSequence[int]
    loss_mask: MutableSequence[bool]
    turns: list[Turn] = field(default_factory=list[Turn])
    routes: Routes | None = None
    """Routes of the context and of the tokens, as in `Completion`, as far as they are known."""
    model_input: ModelInput = TEXT
    """Inputs of the model besides the ids, such as images."""


@dataclass(slots=True, kw_only=True)
class Sample(_Compact):
    """One answer to a prompt: an episode, of one turn or of several.

    `loss_mask` says which completion tokens the policy sampled (and may be trained on); tokens an
    environment inserted are part of the episode but masked, with log-probability 0 and weight
    version `NOT_SAMPLED`. `len(token_ids) == len(logprobs) == len(weight_versions) ==
    len(loss_mask)` at all times.

    An episode whose history was rewritten has several paths: `branches`, and the last one, which is
    in the sample's own fields. A token that an earlier path has sampled is context in a later one,
    which has it in its prompt, or masks it as it masks what an environment inserted. So each
    sampled token has a log-probability, a version and a true entry of `loss_mask` in one path
    alone.
    """

    id: str
    prompt: Prompt
    """The prompt of the group, or one of the sample's own with the same id, such as a prompt to
    which an environment has added its opening, or the context of a rewritten history."""
    index: int
    """Position in the group, 0 <= index < n."""
    token_ids: MutableSequence[int]
    logprobs: MutableSequence[float]
    weight_versions: MutableSequence[int]
    loss_mask: MutableSequence[bool]
    stop_reason: StopReason
    """Stop reason of the last turn, or the limit that ended the episode."""
    model_input: ModelInput = TEXT
    """Inputs of the model besides these tokens, such as images that an environment has shown; they
    start from the first of `token_ids`."""
    text: str = ""
    """The decoded completion, for rewards and people; never re-encoded."""
    turns: list[Turn] = field(default_factory=list[Turn])
    routes: Routes | None = None
    """Routes of the prompt and of the tokens, as in `Completion`, as far as they are known."""
    branches: list[Branch] = field(default_factory=list[Branch])
    """Earlier paths, which were abandoned, in the order in which they were sampled."""
    seed: int = 0
    """Seed for the environment; equal in all samples of a group."""
    state: Any = None
    """State of the environment, JSON values."""
    must_end: bool = True
    """No turn or token is left, or the sample has failed: only a score can follow."""
    attempt: int = 0
    """Number of earlier attempts at this episode, whose sessions were lost."""
    observation: Observation | None = None
    """The environment's last answer, until the next turn is requested."""
    reward: Reward | None = None
    failure: FailureKind | None = None
    failure_detail: str = ""

    @property
    def truncated(self) -> bool:
        return self.stop_reason in _CUT

    @property
    def num_sampled(self) -> int:
        """Tokens that the policy sampled on all paths, whether they are trained or masked."""
        versions = [path.weight_versions for path in (self, *self.branches)]
        return sum(len(own) - own.count(NOT_SAMPLED) for own in versions)

    @property
    def opening_ids(self) -> tuple[int, ...]:
        """Ids of the tokens before the first token that was sampled."""
        return self.branches[0].prompt_ids if self.branches else self.prompt.token_ids

    @property
    def paths(self) -> dict[str, Branch]:
        """All paths in the order in which they were sampled, by the ids of their rows: `<id>#1`,
        `<id>#2` and so on for the branches, and `<id>` for the last one, whose values are the
        sample's own."""
        prompt_ids = self.prompt.token_ids
        last = Branch(
            prompt_ids=prompt_ids,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            weight_versions=self.weight_versions,
            loss_mask=self.loss_mask,
            turns=self.turns,
            routes=self.routes,
            model_input=self.prompt.model_input.followed_by(self.model_input, len(prompt_ids)),
        )
        earlier = {f"{self.id}#{n}": branch for n, branch in enumerate(self.branches, start=1)}
        return {**earlier, self.id: last}

    @property
    def trained_paths(self) -> dict[str, Branch]:
        """The `paths` that become rows: those with a trained token, or the last one where no path
        has any."""
        paths = self.paths
        trained = {name: path for name, path in paths.items() if any(path.loss_mask)}
        return trained or {self.id: paths[self.id]}

    @property
    def valid(self) -> bool:
        """Scored without failure: may enter baselines, losses and reward means."""
        return self.failure is None and self.reward is not None

    @property
    def awaits_group(self) -> bool:
        """Has ended, and is scored by functions that take whole groups once its group has ended."""
        return self.reward is not None and self.reward.is_partial


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
"""Whether a column has one value for each trained token (N), for each token (T), or for the row."""

LossExtent = Literal["trained", "row", "unit"]
"""Whether an objective has one loss value for each trained token, row or unit."""


@dataclass(frozen=True, slots=True)
class Column:
    """Values that a row has in addition to its token ids, such as advantages or a label."""

    values: Tensor  # [N, ...], [T, ...] or [1, ...] as `per` says, in host memory
    per: Extent = "trained"


@dataclass(slots=True, kw_only=True)
class Row:
    """One token sequence to train on, with the columns that the loss needs.

    `loss_mask` covers all T tokens; entry t says whether token t is trained, so `loss_mask[0]` is
    always False. N tokens are trained.
    """

    id: str
    group_id: str = ""
    """Group of the row; rows of one group share every mini-batch."""
    unit: str = ""
    """Rows of one unit, such as the two of a preference, belong to one group and share a
    micro-batch. Empty: the row is a unit by itself."""
    episode: str = ""
    """Rows of one episode, the paths of one sample, belong to one group and count as one sequence
    with all of their trained tokens. Empty: the row is an episode by itself."""
    token_ids: list[int]
    loss_mask: list[bool]
    model_input: ModelInput = TEXT
    """Inputs of the model besides the ids, such as images."""
    columns: dict[str, Column] = field(default_factory=dict[str, Column])
    """Columns by name: `advantages`; `staleness` (int32, updates since the oldest weights that
    influenced a token); and `<output>/<role>`, such as `logprobs/engine` (as sampled),
    `logprobs/policy` (before the update), `logprobs/reference`, and `entropy/policy` (after the
    update, of some rows, for the report)."""

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_trained(self) -> int:
        return sum(self.loss_mask)

    def column(self, name: str) -> Tensor:
        """The values of a column. Raises KeyError with the names of the row's columns."""
        if name not in self.columns:
            raise KeyError(f"row {self.id!r} has no column {name!r}, only {sorted(self.columns)}")
        return self.columns[name].values


@dataclass(frozen=True, slots=True)
class Preference:
    """A pair of completions of one prompt, the chosen one first, or a single completion with a
    label. In each row the completion with its end token is trained."""

    id: str
    rows: tuple[Row, ...]
    labels: tuple[bool, ...]
    margin: float = 0.0
    """For a pair: by how much the reward of the chosen completion should exceed the other's."""

    @property
    def token_ids(self) -> list[int]:
        return [token for row in self.rows for token in row.token_ids]


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexedKeys:
    """The attention keys of S sequences, K in all, by where they lie."""

    index: Tensor  # [K] int64: the packed token or the slot of each key, a sequence after the other
    cu_seqlens: Tensor  # [S + 1] int32, borders of sequences among the keys
    max_seqlen: int
    lengths: tuple[int, ...]  # [S] host copy of the differences of cu_seqlens


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedKeys(IndexedKeys):
    """The attention keys of packed sequences, some of which have tokens in common: keys of T
    distinct tokens. The tokens that a sequence has packed itself are its last keys."""

    uses: Tensor  # [K] int32 into [K]: all keys of token 0, then those of token 1, ...
    uses_starts: Tensor  # [T + 1] int32: start of each token's keys in `uses`


@dataclass(frozen=True, slots=True, kw_only=True)
class Spans:
    """The tokens of contents that attend to each other in both directions
    (`InputSpec.attends_within`): Q tokens of a pass in N spans, each with the tokens of one content
    that the pass computes.

    Each span counts as a sequence of its own, whose keys are all up to the last token of the
    content.
    """

    index: Tensor  # [Q] int64 into [T]
    cu_seqlens: Tensor  # [N + 1] int32, borders of spans
    max_seqlen: int
    lengths: tuple[int, ...]  # [N] host copy of the differences of cu_seqlens
    keys: IndexedKeys


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """Several rows laid end to end: one forward pass, no padding anywhere.

    T tokens, S sequences, N trained tokens, U units. A trained token at position t is predicted by
    the hidden state at t - 1: `predict_index` is the packed index of t - 1, and `labels` the id at
    t. With `keys`, rows may leave out leading tokens that another row has.
    """

    input_ids: Tensor  # [T] int64
    position_ids: Tensor  # [T] int64, within the sequence; [A, T] where the model has several axes
    cu_seqlens: Tensor  # [S + 1] int32, borders of sequences
    max_seqlen: int
    contents: tuple[ContentPiece, ...] = ()
    """The parts of images and other contents among the packed tokens."""
    keys: PackedKeys | None = None
    spans: Spans | None = None
    segments: SegmentPlan | None = None
    """For models with recurrent layers."""
    predict_index: Tensor  # [N] int64 into [T]
    labels: Tensor  # [N] int64
    sequence_index: Tensor  # [N] int64 into [S]
    unit_index: Tensor  # [S] int64 into [U]
    num_units: int
    weights: Tensor  # [N], [S] or [U] float32 as `Objective.per` says; over one optimizer step they
    # carry the whole normalisation
    columns: Mapping[str, Tensor] = field(default_factory=dict[str, Any])
    """The rows' columns, concatenated: [N, ...], [T, ...] or [S, ...]."""
    ids: tuple[str, ...] = ()  # [S] row ids
    lengths: tuple[int, ...] = ()  # [S] host copy of the differences of cu_seqlens

    @property
    def num_sequences(self) -> int:
        return len(self.ids)

    @property
    def num_tokens(self) -> int:
        return int(self.input_ids.shape[0])

    def column(self, name: str) -> Tensor:
        """A column of the rows. Raises KeyError with the names of their columns."""
        if name not in self.columns:
            raise KeyError(f"the rows have no column {name!r}, only {sorted(self.columns)}")
        return self.columns[name]


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineStats:
    """A snapshot of an engine; counters start when the engine is made."""

    __getstate__, __setstate__ = _field_values, _set_field_values

    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage: float = 0.0
    """Share of KV blocks in use, 0 to 1."""
    kv_cache_bytes: int = 0
    """Size of all KV blocks; 0 where the engine does not report it."""
    weight_bytes: int = 0
    """Size of the engine's own parameters; 0 where it shares the trainer's."""
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    """Prompt tokens served from the prefix cache."""
    num_generated_tokens: int = 0
    num_steps: int = 0
    busy_s: float = 0.0
    """Seconds spent inside `step`."""
    num_first_tokens: int = 0
    """Requests whose first token has been sampled."""
    num_lost: int = 0
    """For a pool of engines: lost engines, each of which is replaced."""


@dataclass(frozen=True, slots=True)
class TensorRecord:
    """The entry of one tensor in a weight manifest."""

    shape: tuple[int, ...]
    dtype: str
    """The dtype exported to the engine, for example `bfloat16`."""
    checksum: int
    """Position-dependent 64-bit sum over the exported bits."""
    tied_to: str | None = None
    """First name of the same storage, where several names share one parameter."""


@dataclass(frozen=True, slots=True)
class WeightManifest:
    """What a weight sync must deliver: a version, and a record for each tensor."""

    version: int
    tensors: Mapping[str, TensorRecord]


class EngineLostError(RuntimeError):
    """An engine in another thread or process has ended or no longer answers: its requests and
    weights are gone."""

    def __init__(self, engine: str, cause: str) -> None:
        super().__init__(engine, cause)  # pickle restores the error from these arguments
        self.engine = engine
        self.cause = cause

    def __str__(self) -> str:
        return f"{self.engine} is lost: {self.cause}"


class SamplingEngine(Protocol):
    """The part of an engine that rollouts need: it samples completions."""

    @property
    def weight_version(self) -> int: ...

    def submit(self, requests: Sequence[Request]) -> None:
        """Queue requests. Raises ValueError for one that can never fit."""
        ...

    def step(self) -> list[Completion]:
        """Advance every running sequence by at least one token; return those that finished."""
        ...

    def abort(self, request_ids: Iterable[str]) -> list[Completion]:
        """Withdraw requests and return their tokens so far, with stop reason `abort`."""
        ...

    @property
    def has_unfinished(self) -> bool: ...

    def stats(self) -> EngineStats: ...


class Engine(SamplingEngine, Protocol):
    """An engine in this process. The caller drives it with `step`; it has no thread of its own."""

    @property
    def needs_weights(self) -> bool:
        """Whether a sync must deliver weights before it can sample: its sleep has freed them."""
        ...

    def sleep(self) -> None:
        """Free the KV cache, and the weights where a sync delivers them again. Legal only while no
        request is running."""
        ...

    def wake(self) -> None:
        """Allocate again what `sleep` freed. Legal only while asleep."""
        ...

    def begin_sync(self) -> None:
        """Refuse to sample until `finish_sync` has confirmed a manifest."""
        ...

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors the engine samples with, under Hugging Face names; on the meta device where
        they are in another process."""
        ...

    def shard(self, name: str, tensor: Tensor) -> Tensor:
        """This engine's shard of a whole weight, in the engine's layout: a view, the tensor itself,
        or a new tensor."""
        ...

    def write(self, parts: Mapping[str, tuple[Tensor, Tensor]]) -> int:
        """Copy shards of weights, each (target, source), into tensors of `named_weights`; return
        the bytes written. A target on the meta device is a tensor of another process, to which the
        engine sends the source."""
        ...

    def finish_sync(self, manifest: WeightManifest) -> None:
        """Compare the engine's tensors with the manifest, adopt its version and drop stale KV.

        Raises RuntimeError naming missing, unexpected and different tensors.
        """
        ...


class Trainer(Protocol):
    """The trainer of the policy."""

    def logprobs(self, rows: Sequence[Row]) -> list[Tensor]:
        """Log-probabilities of each row's trained tokens, [N_i] float32 on the CPU."""
        ...

    def update(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        """Train on the rows, in the configured mini-batches and epochs. Returns metrics."""
        ...

    def named_weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights an engine must sample with, under Hugging Face names."""
        ...
