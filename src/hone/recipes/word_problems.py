"""`python -m hone.recipes.word_problems [--dir DIR] [--seed N]`: what the recipes
`word-problems-sft` and `word-problems-rl` start from. Word problems in English with two to six
steps, and a model of 84 M random weights that can read them.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hone.data.arithmetic import write_jsonl
from hone.models.tiny import make_bpe_tokenizer, make_tiny_model
from hone.recipes.inputs import write_inputs

__all__ = ["Problem", "invent", "make_word_problems", "right"]

SHORT, LONG = (2, 3, 4), (5, 6)
"""Steps of the problems that the warm-up shows with their solutions, and of those that it never
shows."""
HELD_OUT: Mapping[str, tuple[int, ...]] = {"short": SHORT, "five-steps": (5,), "six-steps": (6,)}
"""Steps of the problems of each file that is held out."""
NUM_SHOWN, NUM_TRAIN, NUM_HELD_OUT = 120_000, 40_000, 500
SHORT_SHARE = 4
"""One training problem in four is short, so that what the warm-up taught is not forgotten."""
LARGEST = 999
OTHER_FACT_SHARE = 0.4
"""Share of problems with a fact that has nothing to do with the answer."""
MODEL: Mapping[str, Any] = {
    "hidden_size": 768,
    "num_layers": 12,
    "num_heads": 12,
    "num_kv_heads": 4,
    "head_dim": 64,
    "intermediate_size": 2304,
    "max_position_embeddings": 512,
}
MARK = "####"
"""What stands before the number of an answer, as in GSM8K."""
COMPUTED = re.compile(r"\d+ [-+*/] \d+")
"""One step in numbers, as a solution has it."""

# Sentences name the things and nobody who is not counted: "them" might be the chairs of another
# fact, and people among whom something is shared might be those of the question.
PEOPLE = (
    *("Alice", "Ben", "Carla", "David", "Emma", "Felix", "Grace", "Hugo", "Iris", "Jack", "Kira"),
    *("Leo", "Maria", "Noah", "Olga", "Paul", "Rosa", "Sam", "Tina", "Victor", "Wendy", "Yusuf"),
)
THINGS = (
    *("apples", "books", "buttons", "candles", "cards", "coins", "cookies", "eggs", "flowers"),
    *("marbles", "mugs", "pencils", "plates", "postcards", "seeds", "shells", "stamps", "tickets"),
)

MORE = (
    "{a} buys {n} more {things}.",
    "Then {a} finds {n} {things}.",
    "A friend gives {a} {n} {things}.",
    "{a} gets another {n} {things}.",
)
LESS = (
    "{a} gives away {n} {things}.",
    "Then {a} loses {n} {things}.",
    "{a} sells {n} {things}.",
    "{n} of {a}'s {things} are broken and thrown away.",
)
TIMES = (
    "{b} has {n} times as many {things} as {a}.",
    "{b} owns {n} times the number of {things} that {a} has.",
)
PARTS = (
    "{a} divides the {things} equally among {n} bags and keeps one bag.",
    "{a} splits the {things} into {n} equal piles and keeps one pile.",
)
ABOVE = ("{b} has {n} more {things} than {a}.", "{b} has as many {things} as {a} and {n} more.")
BELOW = (
    "{b} has {n} fewer {things} than {a}.",
    "With {n} more, {b} would have as many {things} as {a}.",
)
OTHER_FACTS = (
    "{a} is {n} years old.",
    "{a} lives {n} miles from the sea.",
    "The bus costs {n} dollars.",
    "There are {n} chairs in the room.",
)


class Problem(NamedTuple):
    """A problem, its solution in the words of the warm-up, and the number that it asks for."""

    text: str
    solution: str
    answer: int
    num_steps: int


class _Story:
    """A story in the making: its sentences, and how many of one thing each person has so far."""

    def __init__(self, draw: random.Random) -> None:
        self._draw = draw
        self._things = draw.choice(THINGS)
        self._people = draw.sample(PEOPLE, 8)
        self._owner = self._people.pop()
        self._value = draw.randint(3, 99)
        self._owned = {self._owner: self._value}
        self.facts = [f"{self._owner} has {self._value} {self._things}."]
        self.steps: list[str] = []

    def go_on(self) -> None:
        """One step more, of a kind whose result is a whole number from 1 to LARGEST."""
        value, draw = self._value, self._draw
        kinds: list[Callable[[], None]] = []
        if value < LARGEST - 10:
            kinds += [self._more] * 2 + [self._above]
        if value > 12:
            kinds += [self._less] * 2 + [self._below]
        if value * 2 <= LARGEST:
            kinds += [self._times] * 2
        if any(value % n == 0 for n in range(2, 10)):
            kinds.append(self._parts)
        draw.choice(kinds)()

    def ask(self, *, together: bool) -> Problem:
        """The problem up to here. `together` asks for the sum of what two people have, which is one
        step more and needs a story of two people."""
        owner, things, value = self._owner, self._things, self._value
        if together:
            other = self._draw.choice([x for x in self._owned if x != owner])
            question = f"How many {things} do {other} and {owner} have together?"
            value += self._owned[other]
            self.steps.append(
                f"Together they have {self._owned[other]} + {self._value} = {value} {things}."
            )
        else:
            question = f"How many {things} does {owner} have now?"
        solution = "\n".join([*self.steps, f"{MARK} {value}"])
        return Problem(" ".join([*self.facts, question]), solution, value, len(self.steps))

    def mention(self) -> None:
        """A fact that changes nothing."""
        name, number = self._draw.choice(self._people), self._draw.randint(5, 99)
        fact = self._draw.choice(OTHER_FACTS).format(a=name, n=number)
        self.facts.insert(self._draw.randint(1, len(self.facts)), fact)

    @property
    def num_people(self) -> int:
        return len(self._owned)

    def _more(self) -> None:
        n = self._draw.randint(2, min(99, LARGEST - self._value))
        self._add(MORE, n, f"+ {n}", self._value + n)

    def _less(self) -> None:
        n = self._draw.randint(2, min(99, self._value - 1))
        self._add(LESS, n, f"- {n}", self._value - n)

    def _times(self) -> None:
        n = self._draw.randint(2, min(9, LARGEST // self._value))
        self._add(TIMES, n, f"* {n}", self._value * n, other=True)

    def _parts(self) -> None:
        n = self._draw.choice([n for n in range(2, 10) if self._value % n == 0])
        self._add(PARTS, n, f"/ {n}", self._value // n)

    def _above(self) -> None:
        n = self._draw.randint(2, min(99, LARGEST - self._value))
        self._add(ABOVE, n, f"+ {n}", self._value + n, other=True)

    def _below(self) -> None:
        n = self._draw.randint(2, min(99, self._value - 1))
        self._add(BELOW, n, f"- {n}", self._value - n, other=True)

    def _add(
        self, ways: Sequence[str], n: int, change: str, value: int, *, other: bool = False
    ) -> None:
        """Add a sentence and its step. With `other` the number is that of somebody new, who is
        spoken of from here on."""
        new = self._people.pop() if other else self._owner
        fact = self._draw.choice(ways).format(a=self._owner, b=new, n=n, things=self._things)
        self.facts.append(fact)
        self.steps.append(f"{new} has {self._value} {change} = {value} {self._things}.")
        self._owner, self._value, self._owned[new] = new, value, value


def invent(number: int, seed: int, num_steps: Sequence[int]) -> list[Problem]:
    """`number` problems, whose steps are drawn from `num_steps`; no two of them are computed with
    the same numbers. They depend on the arguments alone, and more of them begin with the same
    ones."""
    draw = random.Random(f"word problems {seed} {[*num_steps]}")
    found: dict[str, Problem] = {}
    while len(found) < number:
        problem = _invent(draw, draw.choice(num_steps))
        found.setdefault(" ".join(COMPUTED.findall(problem.solution)), problem)
    return [*found.values()]


def _invent(draw: random.Random, num_steps: int) -> Problem:
    story = _Story(draw)
    for _ in range(num_steps - 1):
        story.go_on()
    together = story.num_people > 1 and draw.random() < 0.25
    if not together:
        story.go_on()
    if draw.random() < OTHER_FACT_SHARE:
        story.mention()
    return story.ask(together=together)


def right(completion: str, answer: str) -> float:
    """1 where the number behind the last `####` of a completion is the answer, else 0."""
    _, mark, number = completion.rpartition(MARK)
    return float(bool(mark) and number.strip() == answer)


def make_word_problems(folder: Path, seed: int) -> None:
    """Write an untrained model, and rows of problems. No problem is in two files, not even with
    other names and things."""
    draw = random.Random(f"order {seed}")
    num_short = NUM_TRAIN // SHORT_SHARE
    wanted: dict[tuple[int, ...], int] = {SHORT: NUM_SHOWN + num_short}
    wanted |= {(steps,): (NUM_TRAIN - num_short) // len(LONG) for steps in LONG}
    problems = {steps: invent(NUM_HELD_OUT + wanted[steps], seed, steps) for steps in wanted}
    for name, steps in HELD_OUT.items():
        held_out = problems[steps]
        write_jsonl(folder / f"held-out-{name}.jsonl", map(_row, held_out[:NUM_HELD_OUT]))
        del held_out[:NUM_HELD_OUT]
    shown = problems[SHORT][:NUM_SHOWN]
    write_jsonl(folder / "shown.jsonl", (_shown_row(x, shown, draw) for x in shown))
    mixed = [*problems[SHORT][NUM_SHOWN:], *(x for steps in LONG for x in problems[steps,])]
    draw.shuffle(mixed)
    write_jsonl(folder / "train.jsonl", map(_row, mixed))
    texts = (f"{x.text}\n{x.solution}" for x in shown[:20_000])
    tokenizer = make_bpe_tokenizer(texts, vocab_size=1024, split_digits=True)
    make_tiny_model(folder / "model", tokenizer=tokenizer, seed=seed, **MODEL)


def _row(problem: Problem) -> dict[str, str | int]:
    return {
        "prompt": f"{problem.text}\n",
        "answer": str(problem.answer),
        "steps": problem.num_steps,
    }


def _shown_row(
    problem: Problem, shown: Sequence[Problem], draw: random.Random
) -> dict[str, str | int]:
    """A problem with its solution. Half of the rows begin with another such problem, solved, so
    that the positions at which long problems end are trained as well."""
    row = _row(problem) | {"completion": problem.solution}
    if draw.random() < 0.5:
        first = draw.choice(shown)
        row["prompt"] = f"{first.text}\n{first.solution}\n\n{row['prompt']}"
    return row


def main() -> None:
    """Write the folder."""
    makers = {"word-problems": make_word_problems}
    write_inputs("hone.recipes.word_problems", __doc__, makers, drawn="weights and problems")


if __name__ == "__main__":
    main()
