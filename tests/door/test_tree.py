"""The tree of a session, against a list of all requests and answers that is searched from the
start each time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

from hone.door.harness import assemble
from hone.door.sessions import Session
from hone.door.tree import Node, Place, Sampled, input_of, path_of
from hone.model_input import Content, ModelInput
from hone.rollout.episodes import Episodes
from hone.types import NOT_SAMPLED, Prompt, StopReason

CHOICES = st.integers(0, 10_000)


@dataclass
class Told:
    """A request and its answer, as a log has them: all messages, and the ids of each."""

    messages: list[str]
    ids: list[int]
    mask: list[int]
    """For each id the number of the turn that sampled it, or -1."""
    before: Told | None
    """The turn that the request went on behind."""
    num_sampled: int


class Log:
    """The reference: every path whole, nothing shared."""

    def __init__(self) -> None:
        self.turns: list[Told] = []

    def best(self, asked: list[str]) -> Told | None:
        """The newest of the longest turns that `asked` extends."""
        found = None
        for turn in self.turns:
            length = len(turn.messages)
            is_start = turn.messages == asked[:length] and length < len(asked)
            if is_start and (found is None or length >= len(found.messages)):
                found = turn
        return found

    def rows(self) -> list[tuple[list[int], list[bool], list[int]]]:
        """Rows: turns that no other continues, in order; each turn is trained where it is first."""
        leaves = [
            turn
            for number, turn in enumerate(self.turns)
            if not any(number in other.mask for other in self.turns if other is not turn)
        ]
        seen: set[int] = set()
        rows: list[tuple[list[int], list[bool], list[int]]] = []
        for leaf in leaves:
            new = {n for n in leaf.mask if n >= 0} - seen
            seen |= new
            rows.append((leaf.ids, [n in new for n in leaf.mask], leaf.mask))
        return rows


def images_among(ids: Sequence[int], owners: Sequence[int]) -> tuple[Content, ...]:
    """Every third id that no turn has sampled is an image of one token."""
    return tuple(
        Content(kind="image", hash=f"{token}", start=place, num_tokens=1)
        for place, (token, owner) in enumerate(zip(ids, owners, strict=True))
        if owner < 0 and token % 3 == 0
    )


def play(steps: list[tuple[int, int, int]]) -> tuple[Session, Log]:
    """A session of requests: each takes some earlier conversation, cuts it, and adds messages. A
    message has ids of its own whenever it is rendered, so that sharing shows."""
    session, log = Session(id="s", history="tree", seed=0), Log()
    fresh = iter(range(10**9))
    for which, cut, new in steps:
        base = log.turns[which % len(log.turns)].messages if log.turns else []
        kept = base[: cut % (len(base) + 1)]
        asked = [*kept, *(f"given {new % 3}" for _ in range(1 + new % 2))]
        place = session.find("chat", tuple(asked))
        before = log.best(asked)
        if place.given is not None:
            node = place.given
        else:
            ids = tuple(next(fresh) for _ in asked[place.num_known :])
            node = Node(
                part=tuple(asked[place.num_known :]),
                token_ids=ids,
                model_input=ModelInput(images_among(ids, [-1] * len(ids))),
            )
        # The reference decides by itself whose ids the request goes on with.
        number = len(log.turns)
        same = [t for t in log.turns if t.messages[:-1] == asked and t.before is before]
        if same:
            known = slice(0, -same[0].num_sampled)
            ids, mask = same[0].ids[known], same[0].mask[known]
        else:
            ids = [*(before.ids if before else []), *node.token_ids]
            mask = [*(before.mask if before else []), *[-1] * len(node.token_ids)]
        path = [] if place.turn is None else path_of(place.turn)
        assert [i for n in (*path, node) for i in n.token_ids] == ids
        assert input_of((*path, node)).contents == images_among(ids, mask)
        text = f"sampled {new % 2}"
        sampled = tuple(next(fresh) for _ in range(1 + new % 3))
        turn = Node(
            part=(text,),
            token_ids=sampled,
            sampled=Sampled(
                token_ids=sampled,
                logprobs=tuple(-float(i) for i in sampled),
                weight_versions=(number,) * len(sampled),
                text=text,
                stop_reason=StopReason.EOS,
            ),
        )
        session.record("chat", place, node, turn)
        log.turns.append(
            Told(
                [*asked, text],
                [*ids, *sampled],
                [*mask, *[number] * len(sampled)],
                before,
                len(sampled),
            )
        )
    return session, log


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(CHOICES, CHOICES, CHOICES), min_size=1, max_size=12))
def test_rows_are_those_of_a_log_that_shares_nothing(steps: list[tuple[int, int, int]]) -> None:
    session, log = play(steps)
    finished = session.finish("completed")
    rows = log.rows()
    assert len(finished.paths) == len(rows)
    for sample, (ids, trained, owners) in zip(finished.paths, rows, strict=True):
        num_prompt = len(sample.prompt.token_ids)
        assert [*sample.prompt.token_ids, *sample.token_ids] == ids
        assert [bool(flag) for flag in sample.loss_mask] == trained[num_prompt:]
        versions = [NOT_SAMPLED if n < 0 else n for n in owners[num_prompt:]]
        assert list(sample.weight_versions) == versions
        logprobs = [0.0 if n < 0 else -float(i) for i, n in zip(ids, owners, strict=True)]
        assert list(sample.logprobs) == logprobs[num_prompt:]
        asked = sample.prompt.model_input
        images = asked.followed_by(sample.model_input, num_prompt).contents
        assert images == images_among(ids, owners)
        assert all(image.stop <= num_prompt for image in asked.contents)
    trained_ids = [
        token
        for sample in finished.paths
        for token, flag in zip(sample.token_ids, sample.loss_mask, strict=True)
        if flag
    ]
    sampled = [token for node in session.tree.turns for token in node.token_ids]
    assert sorted(trained_ids) == sorted(sampled), "each sampled token is trained exactly once"
    assert finished.num_turns == len(steps)


@settings(deadline=None, max_examples=200)
@given(st.lists(st.tuples(CHOICES, CHOICES, CHOICES), min_size=1, max_size=12))
def test_the_paths_of_a_sample_are_the_rows_with_their_images(
    steps: list[tuple[int, int, int]],
) -> None:
    session, log = play(steps)
    prompt = Prompt(
        id="p", token_ids=(3,), text="", model_input=ModelInput(images_among([3], [-1]))
    )
    sample = Episodes(decode=str).begin(prompt, "g/0", number=0)
    assemble(sample, session.finish("completed"), str)
    paths = sample.paths.values()
    for path, (ids, trained, owners) in zip(paths, log.rows(), strict=True):
        assert [*path.prompt_ids, *path.token_ids] == ids
        assert [False] * len(path.prompt_ids) + [*map(bool, path.loss_mask)] == trained
        assert path.model_input.contents == images_among(ids, owners)


def test_a_text_and_ids_are_compared_by_their_beginnings() -> None:
    for whole, answer, longer in (("ab", "cd", "abcdx"), ((1, 2), (3,), (1, 2, 3, 4))):
        session = Session(id="s", history="tree", seed=0)
        place = session.find("kind", whole)
        given_node = Node(part=whole, token_ids=(1,))
        turn = Node(part=answer, token_ids=(2,), sampled=sampled_of((2,)))
        session.record("kind", place, given_node, turn)
        assert session.find("kind", longer) == (turn, None, len(whole) + len(answer), "bridged")
        assert session.find("kind", whole) == (None, given_node, 0, "fork")
        assert session.find("other", longer).kind == "branch"


def test_nothing_follows_an_empty_answer_but_what_is_new() -> None:
    session = Session(id="s", history="tree", seed=0)
    turn = Node(part="", token_ids=(2,), sampled=sampled_of((2,)))
    session.record("text", session.find("text", "ab"), Node(part="ab", token_ids=(1,)), turn)
    assert session.find("text", "ab").kind == "fork"
    assert session.find("text", "abc").turn is turn


def sampled_of(ids: tuple[int, ...]) -> Sampled:
    return Sampled(
        token_ids=ids,
        logprobs=(0.0,) * len(ids),
        weight_versions=(0,) * len(ids),
        text="",
        stop_reason=StopReason.EOS,
    )


def test_messages_that_count_as_the_same_and_have_other_ids_stay_apart() -> None:
    """As texts that differ in the blanks around them. Each turn keeps the prompt of its own."""
    session = Session(id="s", history="tree", seed=0)
    prompts = {(1, 2): 7, (1, 3): 8}
    for prompt_ids, token in prompts.items():
        place = Place(None, None, 0, "branch")
        turn = Node(part=["a"], token_ids=(token,), sampled=sampled_of((token,)))
        session.record("chat", place, Node(part=["u"], token_ids=prompt_ids), turn)
    paths = session.finish("completed").paths
    assert {path.prompt.token_ids: path.token_ids[0] for path in paths} == prompts
