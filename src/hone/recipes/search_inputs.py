"""What the recipes `search-sft` and `search-rl` start from: a tiny model of random weights,
documents on invented people and towns, and questions on them."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from hone.data.arithmetic import write_jsonl
from hone.envs.tools.schema import function_schema
from hone.models.tiny import PRINTABLE, make_char_tokenizer
from hone.recipes.policy import make_policy
from hone.recipes.search import Documents
from hone.recipes.turns import CHAT_TEMPLATE, said

__all__ = ["make_search"]

NUM_PEOPLE, NUM_TOWNS, NUM_HELD_OUT = 600, 100, 100
CONSONANTS, VOWELS = "bdfgklmnprstvz", "aeiou"
TOWN, LEADER = "town of {}?", "leader of the town of {}?"
LIVES, LED = "lives in {}", "led by {}"
CALL, GUESS = '[search(query="{}")]', "unknown"
SEARCHING_SHARE, SECOND_SHARE = 0.3, 0.5
"""How often a teacher searches first, and how often it searches again where it must."""
WORDS = (
    "town of ", "leader of the town of ", "lives in ", "led by ", '[search(query="', '")]', ": ",
    GUESS, "search", "read", "nothing found",
)  # fmt: skip
"""What is one token. Names are spelt in letters, so that those of the held-out people can be
copied, and so is what the policy is answered where it errs."""


class World(NamedTuple):
    """Who lives where, and who leads each town."""

    town_of: dict[str, str]
    leader_of: dict[str, str]

    def documents(self) -> Iterator[tuple[str, str]]:
        """The name and the text of each document."""
        for person, town in self.town_of.items():
            yield person, LIVES.format(town)
        for town, leader in self.leader_of.items():
            yield town, LED.format(leader)


def make_search(folder: Path, seed: int) -> None:
    """Write a model, a file for each person and each town, questions of one search and of two, and
    demonstrations of teachers who search sometimes."""
    world = invent(seed)
    texts = folder / "documents"
    texts.mkdir(parents=True, exist_ok=True)
    for name, text in world.documents():
        (texts / f"{name}.txt").write_text(f"{text}\n", encoding="utf-8")
    environment = Documents(str(texts))
    tools = [function_schema(environment.read), function_schema(environment.search)]
    people = [*world.town_of]
    held_out, train = people[:NUM_HELD_OUT], people[NUM_HELD_OUT:]
    for name, asked in (("train", train), ("eval", held_out)):
        write_jsonl(folder / f"{name}.jsonl", questions(world, asked))
    write_jsonl(folder / "demonstrations.jsonl", demonstrations(world, train, tools, seed))
    tokenizer = make_char_tokenizer(PRINTABLE, WORDS)
    tokenizer.chat_template = CHAT_TEMPLATE
    make_policy(folder / "model", tokenizer, seed)


def invent(seed: int) -> World:
    """People and towns with names of two syllables, all different."""
    draw = random.Random(f"people and towns {seed}")
    syllables = ["".join(pair) for pair in product(CONSONANTS, VOWELS)]
    names = ["".join(pair) for pair in product(syllables, repeat=2)]
    chosen = draw.sample(names, NUM_PEOPLE + NUM_TOWNS)
    people, towns = chosen[:NUM_PEOPLE], chosen[NUM_PEOPLE:]
    town_of = {person: draw.choice(towns) for person in people}
    return World(town_of, dict(zip(towns, draw.sample(people, NUM_TOWNS), strict=True)))


def questions(world: World, people: Sequence[str]) -> Iterator[dict[str, Any]]:
    """For each person a question of one search, and one of two."""
    for person in people:
        town = world.town_of[person]
        for asked, answer in ((TOWN, town), (LEADER, world.leader_of[town])):
            yield {"prompt": [said("user", asked.format(person))], "answer": answer}


def demonstrations(
    world: World, people: Sequence[str], tools: Sequence[dict[str, Any]], seed: int
) -> Iterator[dict[str, Any]]:
    """For each question a row with a teacher's first turn, and rows on how answers of the search
    are used: of those who ask for a leader, only some search for the town."""
    draw = random.Random(f"teachers {seed}")

    def row(turns: Sequence[str], completion: str) -> dict[str, Any]:
        roles = ("user", *("assistant", "tool") * len(turns))
        prompt = [said(role, turn) for role, turn in zip(roles, turns, strict=False)]
        return {"prompt": prompt, "completion": completion, "tools": [*tools]}

    for person in people:
        town = world.town_of[person]
        found = f"{person}: {LIVES.format(town)}"
        for asked in (TOWN, LEADER):
            question, call = asked.format(person), CALL.format(person)
            yield row([question], call if draw.random() < SEARCHING_SHARE else GUESS)
            if asked == TOWN:
                yield row([question, call, found], town)
                continue
            again, leader = CALL.format(town), world.leader_of[town]
            yield row([question, call, found], again if draw.random() < SECOND_SHARE else town)
            yield row([question, call, found, again, f"{town}: {LED.format(leader)}"], leader)
