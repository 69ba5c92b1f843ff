"""The recipe of word problems: what is asked, how it is solved, and one step of each half."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from hone.cli.main import main
from hone.config.load import load_config
from hone.config.plan import Devices, resolve
from hone.config.recipe import resolve_recipe
from hone.config.tree import RLConfig, SFTConfig
from hone.families.model_facts import ModelFacts
from hone.recipes import word_problems
from hone.recipes.word_problems import Problem, invent, make_word_problems, right
from hone.rules import findings
from tests.tables import table
from tests.tiny_runs import lines

FOLDER = Path("runs/word-problems")
HELD_OUT = {"held-out-short": 8, "held-out-five-steps": 8, "held-out-six-steps": 8}
FILES = {"shown": 60, "train": 40, **HELD_OUT}
SMALL = {"hidden_size": 32, "num_layers": 2, "num_heads": 2, "num_kv_heads": 1, "head_dim": 16}

A, B, N = r"(?P<a>[A-Z][a-z]+)", r"(?P<b>[A-Z][a-z]+)", r"(?P<n>\d+)"
MEANINGS = {
    rf"{A} has {N} \w+": lambda a, n: n,
    rf"(Then )?{A} (buys|finds|gets another) {N}.*": lambda a, n: a + n,
    rf"A friend gives {A} {N} \w+": lambda a, n: a + n,
    rf"(Then )?{A} (gives away|loses|sells) {N} .*": lambda a, n: a - n,
    rf"{N} of {A}'s \w+ are broken and thrown away": lambda a, n: a - n,
    rf"{A} divides .* equally among {N} bags and keeps one bag": lambda a, n: a // n,
    rf"{A} splits .* into {N} equal piles and keeps one pile": lambda a, n: a // n,
    rf"{B} (has|owns) {N} times (as many|the number of) .*{A}( has)?": lambda a, n: a * n,
    rf"{B} has {N} more \w+ than {A}": lambda a, n: a + n,
    rf"{B} has as many \w+ as {A} and {N} more": lambda a, n: a + n,
    rf"{B} has {N} fewer \w+ than {A}": lambda a, n: a - n,
    rf"With {N} more, {B} would have as many \w+ as {A}": lambda a, n: a - n,
}
"""What sentences say, as a reader of the English would put it: of `a`, or of `b` from `a`."""
WITHOUT_MEANING = r".*(years old|miles from the sea|costs \d+ dollars|chairs in the room)"


def solve(text: str) -> int:
    """The answer from the text alone."""
    *facts, question = re.split(r"(?<=[.?])\s", text)
    owned: dict[str, int] = {}
    for fact in facts:
        if re.fullmatch(WITHOUT_MEANING, fact.removesuffix(".")):
            continue
        matches = [(re.fullmatch(way, fact.removesuffix(".")), f) for way, f in MEANINGS.items()]
        ((match, meaning),) = [(match, f) for match, f in matches if match]
        a, b = match["a"], match.groupdict().get("b")
        owned[b or a] = meaning(owned.get(a, 0), int(match["n"]))
    if match := re.fullmatch(rf"How many \w+ do {A} and {B} have together\?", question):
        return owned[match["a"]] + owned[match["b"]]
    match = re.fullmatch(rf"How many \w+ does {A} have now\?", question)
    assert match, question
    return owned[match["a"]]


def computed(problem: Problem) -> str:
    """The solution without its words."""
    return re.sub(r"[A-Za-z ]+", " ", problem.solution)


@pytest.fixture
def inputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current folder, with fewer problems and a smaller model than the command writes."""
    monkeypatch.chdir(tmp_path)
    for name, number in (("NUM_SHOWN", 60), ("NUM_TRAIN", 40), ("NUM_HELD_OUT", 8)):
        monkeypatch.setattr(word_problems, name, number)
    monkeypatch.setattr(word_problems, "MODEL", {**SMALL, "intermediate_size": 64})
    make_word_problems(FOLDER, 0)


@pytest.mark.parametrize("num_steps", [2, 3, 4, 5, 6])
def test_the_answer_is_what_the_text_says(num_steps: int) -> None:
    problems = invent(400, 7, (num_steps,))
    assert len({computed(problem) for problem in problems}) == 400
    for problem in problems:
        assert solve(problem.text) == problem.answer, problem.text
        assert 1 <= problem.answer <= 2 * word_problems.LARGEST
        assert problem.num_steps == num_steps


def test_every_line_of_a_solution_is_right_and_leads_to_the_answer() -> None:
    for problem in invent(2000, 3, (2, 4, 6)):
        *steps, last = problem.solution.split("\n")
        assert len(steps) == problem.num_steps
        result = ""
        for step in steps:
            found = re.search(r"(\d+) ([-+*/]) (\d+) = (\d+) \w+\.$", step)
            assert found, step
            a, sign, b, result = found.groups()
            expected = {"+": int(a) + int(b), "-": int(a) - int(b), "*": int(a) * int(b)}
            expected["/"] = int(a) // int(b)
            assert expected[sign] == int(result), step
            assert sign != "/" or int(a) % int(b) == 0, step
        assert last == f"#### {problem.answer}" == f"#### {result}"
        assert right(problem.solution, str(problem.answer)) == 1


def test_all_kinds_of_steps_and_facts_occur() -> None:
    text = " ".join(problem.text for problem in invent(3000, 1, (2, 3, 4)))
    ways = (word_problems.MORE, word_problems.LESS, word_problems.TIMES, word_problems.PARTS)
    facts = (word_problems.ABOVE, word_problems.BELOW, word_problems.OTHER_FACTS)
    for way in sum(ways + facts, ()):
        assert max(re.split(r"\{\w+\}", way), key=len) in text, way


def test_another_fact_cannot_be_what_a_sentence_is_about() -> None:
    """Whoever gives away 5 of "them" may give away chairs, where a sentence before is on chairs."""
    problems = invent(500, 2, (2, 3, 4))
    assert any("chairs" in problem.text for problem in problems)
    for problem in problems:
        *facts, _ = re.split(r"(?<=[.?])\s", problem.text)
        (things,) = {thing for thing in word_problems.THINGS if f" {thing}" in problem.text}
        for fact in facts:
            assert things in fact or re.fullmatch(WITHOUT_MEANING, fact.removesuffix(".")), fact


def test_no_two_problems_are_one_with_other_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one held out, the other may be trained on."""
    monkeypatch.setattr(word_problems.random.Random, "randint", lambda draw, a, b: min(a + 1, b))
    problems = invent(200, 0, (2, 3, 4))
    assert len({computed(problem) for problem in problems}) == 200


def test_more_problems_begin_with_the_same_ones() -> None:
    assert invent(50, 4, (2, 3)) == invent(80, 4, (2, 3))[:50]
    assert invent(50, 4, (2, 3)) != invent(50, 5, (2, 3))


@table(
    "completion, reward",
    [
        ("Ben has 3 + 4 = 7 cards.\n#### 7", 1),
        ("#### 7\n#### 8", 0),
        ("#### 8\n#### 7 ", 1),
        ("#### 77", 0),
        ("#### 07", 0),
        ("7", 0),
        ("", 0),
        ("#### 7 cards", 0),
    ],
)
def test_the_reward_reads_the_number_behind_the_last_mark(completion: str, reward: int) -> None:
    assert right(completion, "7") == reward


@pytest.mark.usefixtures("inputs")
def test_no_problem_is_in_two_files_and_only_the_warm_up_has_solutions() -> None:
    rows = {name: lines(FOLDER / f"{name}.jsonl") for name in FILES}
    assert {name: len(found) for name, found in rows.items()} == FILES
    last = [row["prompt"].split("\n\n")[-1] for found in rows.values() for row in found]
    assert len({*last}) == sum(FILES.values())
    assert all("completion" in row for row in rows["shown"])
    assert not any("completion" in row for name in FILES if name != "shown" for row in rows[name])
    steps = {name: {row["steps"] for row in found} for name, found in rows.items()}
    assert steps["shown"] == {2, 3, 4}
    assert steps["held-out-short"] <= {2, 3, 4}
    assert steps["held-out-five-steps"] == {5}
    assert steps["held-out-six-steps"] == {6}
    assert steps["train"] == {2, 3, 4, 5, 6}
    tokenizer = AutoTokenizer.from_pretrained(FOLDER / "model")
    text = "Ben has 907 cards."
    tokens = tokenizer.tokenize(text)
    assert [token for token in tokens if any(x.isdigit() for x in token)] == ["9", "0", "7"]
    assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.usefixtures("inputs")
def test_half_of_the_shown_rows_begin_with_another_shown_problem_and_its_solution() -> None:
    """So that the warm-up trains positions at which longer problems end."""
    rows = lines(FOLDER / "shown.jsonl")
    alone = {row["prompt"]: row["completion"] for row in rows if "\n\n" not in row["prompt"]}
    longer = [row for row in rows if row["prompt"] not in alone]
    assert 20 <= len(longer) <= 40
    texts = {row["prompt"].split("\n\n")[-1] + row["completion"] for row in rows}
    for row in longer:
        first, problem = row["prompt"].split("\n\n")
        assert first in texts
        assert solve(problem.removesuffix("\n")) == int(row["answer"]), problem
        assert right(row["completion"], row["answer"]) == 1


@pytest.mark.usefixtures("inputs")
@table("name", ["word-problems-sft", "word-problems-rl"])
def test_every_recipe_passes_its_check(name: str) -> None:
    tree = SFTConfig if name.endswith("sft") else RLConfig
    cfg = load_config(tree, resolve_recipe(name), [f"--model.path={FOLDER}/model"])
    plan = resolve(cfg, ModelFacts.known(cfg.model.path), Devices(kind="cpu"), world_size=1)
    assert [finding.message for finding in findings(plan)] == []


@pytest.mark.usefixtures("inputs")
def test_one_step_of_each_half() -> None:
    few = ["--run.steps=1", "--log.to=[]", "--trainer.optimizer.warmup_steps=0"]
    assert main(["sft", "word-problems-sft", *few, "--data.examples_per_step=8"]) == 0
    few += ["--eval.every_n_steps=1", "--eval.at_start=false", "--eval.max_completion_tokens=8"]
    few += ["--rollout.prompts_per_step=2", "--rollout.n_samples_per_prompt=4"]
    few += ["--rollout.max_completion_tokens=16"]
    assert main(["rl", "word-problems-rl", *few]) == 0
    samples = lines(FOLDER / "rl/samples.jsonl")
    assert all(sample["failure"] is None for sample in samples)
    (row,) = lines(FOLDER / "rl/metrics.jsonl")
    for name in HELD_OUT:
        assert row[f"eval/{name}/num_prompts"] == 8


def test_a_problem_is_as_written_down() -> None:
    """So that files of one seed stay the same from one version to the next."""
    text = (
        "Hugo has 59 plates. Hugo sells 54 plates. Alice has 53 more plates than Hugo. Alice "
        "splits the plates into 2 equal piles and keeps one pile. How many plates does "
        "Alice have now?"
    )
    steps = ("Hugo has 59 - 54 = 5 plates.", "Alice has 5 + 53 = 58 plates.")
    solution = "\n".join([*steps, "Alice has 58 / 2 = 29 plates.", "#### 29"])
    assert invent(1, 0, (3,)) == [Problem(text, solution, answer=29, num_steps=3)]
