"""Sessions: episodes that a client drives, each with its tree, its reward and its counts.

A session that ends is handed over as `FinishedSession`: its paths are rows, in each of which the
`loss_mask` has the tokens that no earlier path has.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from time import monotonic
from typing import Any, Literal

from hone.door.images import bytes_of
from hone.door.refusal import Refusal
from hone.door.security import new_id
from hone.door.tree import Node, Place, Tree, sample_of
from hone.door.turns import Answer
from hone.types import Reward, Sample, SamplingParams, StopReason

__all__ = [
    "COUNTS",
    "MAX_CONTEXTS",
    "MAX_IMAGE_BYTES",
    "MAX_TURNS",
    "FinishedSession",
    "History",
    "Session",
    "Sessions",
    "Status",
    "Terms",
]

History = Literal["linear", "tree"]
Status = Literal["completed", "failed", "expired"]

COUNTS = ("bridged", "forks", "branches", "repeated")
"""What is counted of requests: those that extend the last turn, share the path to an earlier one,
share nothing with others before them, and those that repeat another one."""
MAX_TURNS = 4096
"""Turns that a session may have. Each request is compared with all turns of its session."""
MAX_CONTEXTS = 32
"""Tokens that a session may have, as a multiple of the model's longest sequence: a linear session
has at most one such sequence, one that rewrites its history may fill 32. A token takes about 100
bytes of memory."""
MAX_IMAGE_BYTES = 2**28
"""Bytes that the images of a session may have, each image counted once."""
_COUNTED = {"start": "starts", "bridged": "bridged", "fork": "forks", "branch": "branches"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """What a run fixes of a session whose episode it trains or evaluates."""

    sampling: SamplingParams
    """The distribution of all turns, whatever a request asks for: the trainer scores tokens of this
    one. `max_tokens` bounds what follows the first messages of a path, turns and given messages
    together. A request may ask for fewer tokens, and for further stop strings."""
    max_turns: int
    """Most turns of the session, on all paths together."""
    max_turn_tokens: int | None = None
    """Longest turn, in tokens; None: what is left."""
    owner: str = ""
    """Id of the sample whose runner samples the turns (`Handover.sample`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedSession:
    """A session that has ended."""

    id: str
    status: Status
    detail: str
    """Why it has failed, in words."""
    paths: list[Sample]
    """Its paths, in the order in which their last turns ended. The prompt of each is its first
    messages; tokens that are in the `loss_mask` of one path are in no other's. `reward` is that of
    the session, `Turn.reward` what a turn was given."""
    reward: Reward | None
    counts: dict[str, int]
    """Numbers by `COUNTS`."""
    limit: StopReason | None = None
    """The first of its terms for which a request was refused: turns or tokens."""
    rewritten: str = ""
    """Why a request did not extend the last turn, where history is `linear`."""
    ignored: frozenset[str] = frozenset()
    """Names of sampling parameters that requests asked for and did not get."""

    @property
    def num_turns(self) -> int:
        """Turns of all paths, each counted once."""
        return sum(sample.loss_mask[turn.start] for sample in self.paths for turn in sample.turns)


@dataclass(eq=False, slots=True, kw_only=True)
class Session:
    """An open session. Only the event loop changes its tree."""

    id: str
    history: History
    """Whether a request may write history anew: it opens a branch, or is refused."""
    seed: int
    """Seed of its turns."""
    tree: Tree = field(default_factory=Tree)
    reward: Reward | None = None
    counts: Counter[str] = field(default_factory=Counter[str])
    running: set[asyncio.Task[Answer]] = field(default_factory=set[asyncio.Task[Answer]])
    """Turns that are being sampled, and those that end in this moment (`num_sampling`)."""
    num_started: int = 0
    """Turns that were started; part of their seeds."""
    image_bytes: dict[str, int] = field(default_factory=dict[str, int])
    """Sizes of the images of its tree, by digest."""
    terms: Terms | None = None
    """None: requests say how they are sampled, and a client sets the reward."""
    limit: StopReason | None = None
    """As in `FinishedSession`, and so the next two."""
    rewrite: str = ""
    ignored: set[str] = field(default_factory=set[str])
    used_at: float = field(default_factory=monotonic)

    @property
    def num_sampling(self) -> int:
        """Turns that may enter the tree. One that was aborted never will, and one that is done has:
        the tasks of both run until the event loop comes to them."""
        return sum(not (task.done() or task.cancelling()) for task in self.running)

    def find(self, opening: Hashable, whole: Sequence[Any]) -> Place:
        """The place of a request in the tree. Raises Refusal where history is `linear` and the
        request does not extend the last turn."""
        place = self.tree.find(opening, whole)
        is_sampling = self.num_sampling > 0
        if self.history == "linear" and (is_sampling or place.kind not in ("start", "bridged")):
            raise self.rewritten(
                "another turn of it is being sampled"
                if is_sampling
                else "its messages are not those of the last turn and new ones behind them"
            )
        return place

    def rewritten(self, why: str) -> Refusal:
        """The refusal of a request that does not extend the last turn of a linear session."""
        self.rewrite = self.rewrite or why
        remedy = (
            'open the session with {"history": "tree"}'
            if self.terms is None
            else "set env.history to tree"
        )
        return Refusal(
            409,
            f"session {self.id} keeps a linear history, and this request does not extend it: "
            f"{why}. Send the earlier messages as they were, or {remedy}, where such a request "
            "opens a branch",
            code="history_rewritten",
        )

    def require_turn(self) -> None:
        """Raise Refusal where the session may have no further turn."""
        num_turns = len(self.tree.turns) + self.num_sampling
        if self.terms is not None and num_turns >= self.terms.max_turns:
            self.limit = self.limit or StopReason.MAX_TURNS
            raise Refusal(
                400,
                f"the episode has used its {self.terms.max_turns} turns (env.max_turns)",
                code="max_turns",
            )
        if num_turns >= MAX_TURNS:
            raise self._full(f"{MAX_TURNS:,} turns", StopReason.MAX_TURNS)

    def require_tokens(self, num_new: int, most: int) -> None:
        """Raise Refusal where `num_new` tokens are too many for a session of at most `most`."""
        if self.tree.num_tokens + num_new > most:
            raise self._full(f"{most:,} tokens", StopReason.LENGTH)

    def require_images(self, new: Mapping[str, int]) -> None:
        """Raise Refusal where images of these sizes, by digest, are too many for a session."""
        if sum((self.image_bytes | dict(new)).values()) > MAX_IMAGE_BYTES:
            raise self._full(f"{MAX_IMAGE_BYTES / 2**20:g} MiB of images", StopReason.LENGTH)

    def _full(self, limit: str, reason: StopReason) -> Refusal:
        self.limit = self.limit or reason
        return Refusal(
            409,
            f"session {self.id} may have at most {limit} in all its branches; end it with "
            "POST /sessions/S/end, and open another",
            code="session_full",
        )

    def fitted(self, asked: SamplingParams, *, num_given: int, room: int) -> SamplingParams:
        """The sampling parameters of a turn behind `num_given` tokens after the first messages of
        its path, with `room` tokens left in the model's context. Raises Refusal where no token is
        left."""
        if self.terms is None:
            return replace(asked, max_tokens=min(asked.max_tokens, room))
        fixed = self.terms.sampling
        left = fixed.max_tokens - num_given
        if left <= 0:
            self.limit = self.limit or StopReason.LENGTH
            raise Refusal(
                400,
                f"the episode has {num_given} tokens after its first messages, and at most "
                f"{fixed.max_tokens} are allowed",
                code="context_length_exceeded",
            )
        return replace(
            fixed,
            max_tokens=min(asked.max_tokens, room, left, self.terms.max_turn_tokens or left),
            stop=(*fixed.stop, *(text for text in asked.stop if text not in fixed.stop)),
        )

    def record(self, opening: Hashable, place: Place, given: Node, sampled: Node) -> None:
        """Add a turn that has ended to the tree."""
        kind = place.kind
        if kind == "start" and self.tree.turns:  # several began at once
            kind = "branch"
        self.counts[_COUNTED[kind]] += 1
        self.tree.add(opening, place.turn, given, sampled)
        self.image_bytes |= bytes_of(given.model_input)

    def finish(self, status: Status, detail: str = "") -> FinishedSession:
        """The session as rows."""
        paths: list[Sample] = []
        for number, (nodes, trained) in enumerate(self.tree.paths()):
            sample = sample_of(nodes, id=f"{self.id}/{number}", trained=trained)
            sample.text = "".join(node.text for node in nodes[1:])
            sample.reward = self.reward
            paths.append(sample)
        return FinishedSession(
            id=self.id,
            status=status,
            detail=detail,
            paths=paths,
            reward=self.reward,
            counts={name: self.counts[name] for name in COUNTS},
            limit=self.limit,
            rewritten=self.rewrite,
            ignored=frozenset(self.ignored),
        )


class Sessions:
    """The open sessions of a server. Any thread may open and find one."""

    def __init__(self, *, max_sessions: int, timeout_s: float) -> None:
        """Sessions without a request for `timeout_s` seconds make room for others."""
        self._max_sessions, self._timeout_s = max_sessions, timeout_s
        self._lock = threading.Lock()
        self._open: dict[str, Session] = {}

    def __len__(self) -> int:
        return len(self._open)

    def open(
        self,
        *,
        history: History,
        seed: Callable[[], int],
        terms: Terms | None = None,
        on_expired: Callable[[Session], object],
    ) -> Session:
        """Open a session. Where as many are open as there may be, those that have had no request
        for long are ended by `on_expired`. Raises Refusal where that is not enough, though not for
        a session with `terms`: a run opens as many as it plays, and each may begin while the one
        before it is being ended. A session that is refused uses up no `seed`."""
        session, expired = None, list[Session]()
        with self._lock:
            if terms is None and len(self._open) >= self._max_sessions:
                limit = monotonic() - self._timeout_s
                expired = [x for x in self._open.values() if x.used_at < limit and not x.running]
                for old in expired:
                    del self._open[old.id]
            if terms is not None or len(self._open) < self._max_sessions:
                session = Session(id=new_id(), history=history, seed=seed(), terms=terms)
                self._open[session.id] = session
        for old in expired:
            on_expired(old)
        if session is None:
            raise Refusal(
                429,
                f"{self._max_sessions} sessions are open, as many as serve.max_sessions allows; "
                "end one with POST /sessions/S/end",
                code="too_many_sessions",
                retry_after_s=5,
            )
        return session

    def find(self, session_id: str) -> Session:
        """The open session of this id. Raises Refusal where there is none."""
        with self._lock:
            session = self._open.get(session_id)
            if session is not None:  # under the lock, else `open` may end it at this moment
                session.used_at = monotonic()
        if session is None:
            raise _unknown(session_id)
        return session

    def take(self, session_id: str) -> Session:
        """Close the session of this id, and return it. Raises Refusal where there is none."""
        with self._lock:
            session = self._open.pop(session_id, None)
        if session is None:
            raise _unknown(session_id)
        return session


def _unknown(session_id: str) -> Refusal:
    return Refusal(
        404,
        f"no session {session_id[:64]!r} is open: it has ended, or there never was one; "
        "POST /sessions opens one",
        code="session_not_found",
    )
