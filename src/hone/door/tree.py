"""The episode of a session: what was given and what was sampled, as a tree.

    root: messages ── turn ── messages ── turn            the path of one row
                        └──── messages ── turn            another row, which shares the first turn

Below a node of given messages lie the turns that were sampled after it, below a turn what was
given next. A node has the token ids that it adds to its path, made once: a later request that has
the same messages up to a turn goes on behind that turn's ids. A path from a root to a leaf is a
row.

The same tree holds prompts that are texts or token ids. `Node.part` is what requests are compared
by: keys of messages, a text, or ids. The key of a message has the hashes of its images: the ids of
two requests may be equal where their images are not.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

from hone.model_input import TEXT, ModelInput
from hone.types import NOT_SAMPLED, Message, Prompt, Sample, StopReason, Turn

__all__ = ["Node", "Place", "Sampled", "Tree", "input_of", "path_of", "sample_of"]

Kind = Literal["start", "bridged", "fork", "branch"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What the policy sampled for one request; the first three have one entry a token."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    weight_versions: tuple[int, ...]
    text: str
    """The decoded tokens, without those that end a turn."""
    stop_reason: StopReason


@dataclass(eq=False, slots=True, kw_only=True)
class Node:
    """Given messages, or a turn of the policy."""

    part: Sequence[Any]
    """What a request must have at this place: keys of messages, a text, or token ids."""
    token_ids: tuple[int, ...]
    """The ids that this node adds to its path."""
    model_input: ModelInput = TEXT
    """The images among these ids."""
    text: str = ""
    """The text of these ids as it was rendered; of a turn, as it was decoded."""
    messages: tuple[Message, ...] = ()
    """The messages that were rendered; of a turn, the answer. Empty for texts and ids."""
    columns: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Of a root, what the chat template got with the messages: tools and variables."""
    sampled: Sampled | None = None
    """None: it was given."""
    reward: float = 0.0
    """Of a turn."""
    parent: Node | None = None
    children: list[Node] = field(default_factory=list["Node"])


class Place(NamedTuple):
    """Where a request belongs in a tree."""

    turn: Node | None
    """The turn that it goes on behind; None: it starts anew."""
    given: Node | None
    """A node that has all of what follows that turn, from an earlier request."""
    num_known: int
    """Length of the beginning of the request that lies on the path to `turn`."""
    kind: Kind
    """`start`: the first request. `bridged`: it extends the last turn. `fork`: it shares the path
    to an earlier turn, or asks once more after the same messages. `branch`: it shares nothing."""


class Tree:
    """The turns of one session."""

    def __init__(self) -> None:
        self.turns: list[Node] = []
        """All turns, in the order in which they ended."""
        self.num_tokens = 0
        """Tokens of all nodes."""
        self._roots: dict[Hashable, list[Node]] = {}

    @property
    def last(self) -> Node | None:
        """The newest turn."""
        return self.turns[-1] if self.turns else None

    def find(self, opening: Hashable, whole: Sequence[Any]) -> Place:
        """The place of a request: behind the turn with the longest path that `whole` extends.

        Only requests of equal `opening` (kind of prompt, tools, variables of the template) share
        nodes. Of turns with equal paths the newest counts.
        """
        turn, num_known = None, 0
        unseen = [(root, 0) for root in self._roots.get(opening, ())]
        while unseen:
            node, start = unseen.pop()
            end = start + len(node.part)
            if whole[start:end] != node.part:
                continue
            # Nothing can follow a turn with which the request ends.
            if node.sampled is not None and end < len(whole) and (turn is None or end > num_known):
                turn, num_known = node, end
            unseen += ((child, end) for child in node.children)
        siblings = self._roots.get(opening, ()) if turn is None else turn.children
        rest = whole[num_known:]
        given = next((node for node in siblings if node.part == rest), None)
        if not self.turns:
            kind: Kind = "start"
        elif turn is not None and turn is self.last:
            kind = "bridged"
        else:
            kind = "branch" if turn is None and given is None else "fork"
        return Place(turn, given, num_known, kind)

    def add(self, opening: Hashable, turn: Node | None, given: Node, sampled: Node) -> None:
        """Add a turn that was sampled after `given`, which follows `turn`. Where another request
        had the same messages and ids there, its node stands for `given`. Messages that count as the
        same may have other ids, as those with other blanks around a text: then both stay."""
        siblings = self._roots.setdefault(opening, []) if turn is None else turn.children
        same = (n for n in siblings if n.part == given.part and n.token_ids == given.token_ids)
        known = next(same, None)
        if known is None:
            given.parent = turn
            siblings.append(given)
            self.num_tokens += len(given.token_ids)
        sampled.parent = known or given
        sampled.parent.children.append(sampled)
        self.turns.append(sampled)
        self.num_tokens += len(sampled.token_ids)

    def paths(self) -> Iterator[tuple[list[Node], set[Node]]]:
        """Each path from a root to a leaf, in the order in which the leaves ended, with the turns
        that are trained in it: those that no earlier path has."""
        seen = set[Node]()
        for leaf in self.turns:
            if leaf.children:
                continue
            nodes = path_of(leaf)
            new = {node for node in nodes if node.sampled is not None} - seen
            seen |= new
            yield nodes, new


def path_of(node: Node) -> list[Node]:
    """The nodes from the root to `node`."""
    path = [node]
    while (parent := path[-1].parent) is not None:
        path.append(parent)
    return path[::-1]


def input_of(nodes: Sequence[Node]) -> ModelInput:
    """The images among the ids of nodes, one after the other."""
    found, num_tokens = TEXT, 0
    for node in nodes:
        found = found.followed_by(node.model_input, num_tokens)
        num_tokens += len(node.token_ids)
    return found


def sample_of(nodes: Sequence[Node], *, id: str = "", trained: Collection[Node] = ()) -> Sample:
    """A path as a sample: the first node is its prompt, and only tokens of `trained` turns are in
    its `loss_mask`."""
    root = nodes[0]
    sample = Sample(
        id=id,
        prompt=Prompt(
            id=id,
            token_ids=root.token_ids,
            text=root.text,
            messages=root.messages,
            metadata=root.columns,
            model_input=root.model_input,
        ),
        index=0,
        token_ids=[],
        logprobs=[],
        weight_versions=[],
        loss_mask=[],
        stop_reason=StopReason.ABORT,
        model_input=input_of(nodes[1:]),
    )
    for node in nodes[1:]:
        start, num_new = len(sample.token_ids), len(node.token_ids)
        sample.token_ids += node.token_ids
        sample.loss_mask += [node in trained] * num_new
        if node.sampled is None:
            sample.logprobs += [0.0] * num_new
            sample.weight_versions += [NOT_SAMPLED] * num_new
            turn = sample.turns[-1]
            turn.observed, turn.messages = node.text, node.messages
            continue
        sample.logprobs += node.sampled.logprobs
        sample.weight_versions += node.sampled.weight_versions
        sample.stop_reason = node.sampled.stop_reason
        sample.turns.append(
            Turn(
                start=start,
                end=start + num_new,
                text=node.text,
                stop_reason=node.sampled.stop_reason,
                reward=node.reward,
            )
        )
    return sample
