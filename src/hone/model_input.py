"""Inputs of a model besides token ids, such as images.

    image = Content(kind="image", hash="9f3a...", start=4, num_tokens=64, shape=(1, 8, 8))
    prompt = Prompt(id="geometry:7", token_ids=ids, text=text, model_input=ModelInput((image,)))

Ids are expanded once, where the prompt is made: a content of `num_tokens` tokens has as many
placeholder ids. Engine and trainer see the same ids and the same `ModelInput`, which `Prompt`,
`Request` and `Row` carry. It has no features: they are looked up by hash. A sequence of text alone
has `TEXT`, a single object in each process.

This module imports neither numpy nor torch.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = [
    "TEXT",
    "TEXT_ONLY",
    "Content",
    "ContentKey",
    "ContentPiece",
    "ContentSpan",
    "InputSpec",
    "ModelInput",
    "PositionRule",
    "content_pieces",
    "content_spans",
    "inside_of",
    "pieces_within",
    "prompt_digest",
    "same_until",
]

ContentKey = tuple[int, str]
"""Start and hash of a content. The ids of a sequence and the keys of its contents determine all
that a model sees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """One item of a sequence that is not text, such as an image, and the tokens in its place."""

    kind: str
    """A kind of `InputSpec.kinds`, for example `image`."""
    hash: str
    """Digest of all that determines the features: kind, processed pixels, processor."""
    start: int
    """Index in the sequence of its first token."""
    num_tokens: int
    shape: tuple[int, ...] = ()
    """Sizes for a `PositionRule`, such as frames, rows and columns of an image, in tokens."""
    shown: Any = field(default=None, compare=False, repr=False)
    """The image where an environment or a request has shown it (`hone.images.shown`): processes
    know it as long as a sequence has it. None for an image of the data, which can be read again."""

    @property
    def key(self) -> ContentKey:
        """Start and hash, which distinguish contents in sequences with the same ids."""
        return self.start, self.hash

    @property
    def stop(self) -> int:
        """Index after its last token."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True, weakref_slot=True)
class ModelInput:
    """The contents of a sequence, in the order of their tokens. It is false without contents.

    Raises ValueError for contents without tokens, and for contents that overlap or are out of
    order.
    """

    contents: tuple[Content, ...] = ()

    def __post_init__(self) -> None:
        end = 0
        for content in self.contents:
            if content.start < end or content.num_tokens < 1:
                raise ValueError(
                    f"content {content.kind} with {content.num_tokens} tokens starts at token "
                    f"{content.start}; contents need at least one token each, and the next one may "
                    f"start at {end} or later"
                )
            end = content.stop

    def __bool__(self) -> bool:
        return bool(self.contents)

    def __reduce__(self) -> str | tuple[object, ...]:
        # Pickled by name: a message of a thousand requests has it once, and copies share `TEXT`.
        return "TEXT" if self is TEXT else (ModelInput, (self.contents,))

    @property
    def key(self) -> tuple[ContentKey, ...]:
        """The keys of all contents, which distinguish inputs of sequences with the same ids; empty
        for text."""
        return tuple(content.key for content in self.contents)

    def followed_by(self, other: ModelInput, num_tokens: int) -> ModelInput:
        """The input of a sequence of `num_tokens` tokens, which has this one, with another sequence
        behind it, which has `other`."""
        if not other.contents:
            return self
        later = (replace(each, start=each.start + num_tokens) for each in other.contents)
        return ModelInput((*self.contents, *later))

    def split(self, index: int) -> tuple[ModelInput, ModelInput]:
        """The inputs of the tokens before `index` and of those from there on, inside of no
        content."""
        assert inside_of(self, index) is None, f"{index=} {self.key=}"
        earlier = tuple(each for each in self.contents if each.start < index)
        later = tuple(
            replace(each, start=each.start - index) for each in self.contents if each.start >= index
        )
        return ModelInput(earlier) if earlier else TEXT, ModelInput(later) if later else TEXT

    def key_of(self, start: int, stop: int) -> tuple[ContentKey, ...]:
        """The part of `key` that belongs to contents with a token in `start .. stop`."""
        return tuple(
            content.key
            for content in self.contents
            if content.start < stop and content.stop > start
        )


TEXT = ModelInput()
"""The input of a sequence of text: no contents."""


class PositionRule(Protocol):
    """The positions of tokens for the rotary embedding of a model family, where they differ from
    the index (`hone.positions`)."""

    @property
    def num_axes(self) -> int:
        """Number of positions of each token (A)."""
        ...

    def rows(self, model_input: ModelInput, num_tokens: int) -> NDArray[np.int64]:
        """Positions [A, num_tokens] of the first tokens of a sequence. No position exceeds the
        token's index, and after the last content positions grow by one a token on all axes."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class InputSpec:
    """The inputs besides ids that the models of a family accept."""

    kinds: frozenset[str] = frozenset()
    """Kinds of contents."""
    positions: PositionRule | None = None
    """Positions for the rotary embedding; None: the index in the sequence."""
    attends_within: bool = False
    """Whether the tokens of a content attend to each other in both directions (Gemma 3). To the
    tokens of other contents and of text attention is causal."""
    has_states: bool = False
    """Whether some layers keep a state in place of keys and values, so that a pass is cut into
    segments (`hone.segments`)."""

    def refusal(self, model_input: ModelInput, num_tokens: int) -> str:
        """Why a sequence of `num_tokens` tokens with this input cannot be computed, as a predicate
        ("has content ...") for a message; empty where it can."""
        if not model_input.contents:
            return ""
        unknown = sorted({content.kind for content in model_input.contents} - self.kinds)
        if unknown:
            served = " and ".join(["text", *sorted(self.kinds)])
            return (
                f"has content of kind {', '.join(unknown)}, and only {served} can be computed "
                "here; leave such rows out, or use a model and an engine that take them"
            )
        last = model_input.contents[-1]
        if last.stop > num_tokens:
            return (
                f"has content of kind {last.kind} up to token {last.stop}, but only {num_tokens} "
                "tokens; its ids need one placeholder for each token of the content"
            )
        return ""


@dataclass(frozen=True, slots=True)
class ContentPiece:
    """The tokens of a content that one pass computes."""

    hash: str
    offset: int
    """First of its features."""
    size: int
    place: int
    """Index in the pass of its first token."""


def content_pieces(
    inputs: Sequence[ModelInput], starts: Sequence[int], sizes: Sequence[int]
) -> list[ContentPiece]:
    """The pieces of contents among slices of sequences laid end to end, in the order of their
    tokens. Slice s has `sizes[s]` tokens of sequence s from its token `starts[s]` on."""
    pieces: list[ContentPiece] = []
    place = 0
    for each, start, size in zip(inputs, starts, sizes, strict=True):
        for content in each.contents:
            begin, end = max(content.start, start), min(content.stop, start + size)
            if begin < end:
                pieces.append(
                    ContentPiece(
                        content.hash, begin - content.start, end - begin, place + begin - start
                    )
                )
        place += size
    return pieces


def pieces_within(pieces: Sequence[ContentPiece], start: int, stop: int) -> list[ContentPiece]:
    """The parts of pieces among tokens `start .. stop` of their pass, placed from `start` on."""
    found: list[ContentPiece] = []
    for piece in pieces:
        begin, end = max(piece.place, start), min(piece.place + piece.size, stop)
        if begin < end:
            offset = piece.offset + begin - piece.place
            found.append(ContentPiece(piece.hash, offset, end - begin, begin - start))
    return found


@dataclass(frozen=True, slots=True)
class ContentSpan:
    """The tokens of a content that one pass computes, up to the last one of the content."""

    sequence: int
    """Number of its sequence in the pass."""
    place: int
    """Index in the pass of its first token."""
    size: int
    stop: int
    """Index in the sequence after its last token."""


def content_spans(
    inputs: Sequence[ModelInput], starts: Sequence[int], sizes: Sequence[int]
) -> list[ContentSpan]:
    """The spans of contents among slices of sequences, as `content_pieces` takes them. No slice may
    end inside a content: its tokens would not see those behind the slice."""
    spans: list[ContentSpan] = []
    place = 0
    for sequence, (each, start, size) in enumerate(zip(inputs, starts, sizes, strict=True)):
        inside = inside_of(each, start + size)
        assert inside is None, f"{sequence=} {start=} {size=} {inside=}"
        for content in each.contents:
            begin = max(content.start, start)
            if begin < content.stop <= start + size:
                spans.append(
                    ContentSpan(sequence, place + begin - start, content.stop - begin, content.stop)
                )
        place += size
    return spans


def inside_of(model_input: ModelInput, index: int) -> Content | None:
    """The content that has tokens on both sides of the border before token `index`."""
    return next((c for c in model_input.contents if c.start < index < c.stop), None)


TEXT_ONLY = InputSpec()
"""The spec of a family that accepts only text, with one position for each token."""


def prompt_digest(token_ids: Sequence[int], model_input: ModelInput = TEXT) -> bytes:
    """A digest of 16 bytes, equal for prompts that are the same to a model."""
    digest = blake2b(array("q", token_ids), digest_size=16)
    if model_input:
        digest.update(repr(model_input.key).encode())
    return digest.digest()


def same_until(inputs: Iterable[ModelInput], limit: int) -> int:
    """The number of tokens, at most `limit`, before the first content that not all of `inputs`
    have."""
    for contents in zip_longest(*(each.contents for each in inputs)):
        if any(content != contents[0] for content in contents):
            return min(limit, *(content.start for content in contents if content is not None))
    return limit
