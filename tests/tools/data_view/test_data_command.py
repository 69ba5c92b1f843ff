"""`hone data`: what it says is what a run reads, and its figures are those of a slow count."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import AutoTokenizer

from hone.cli import data as command
from hone.cli.main import main
from hone.config.data_view import VIEWS
from hone.config.tree import TREES
from hone.data.filters import REASONS
from hone.data.pairs import load_pairs
from hone.data.prompts import load_prompts
from hone.data.sft import load_sft
from hone.models.tiny import make_bpe_tokenizer, make_tiny_model
from hone.tools.data_view.check import check
from hone.tools.data_view.chosen import choose
from hone.tools.data_view.counts import Lengths
from hone.tools.data_view.problems import Problems
from hone.tools.data_view.show import Piece, kind_of, show
from hone.tools.data_view.stats import Stats, count
from hone.tools.data_view.terminal import elided
from hone.tools.data_view.text import Language, plain_text
from tests.data.support import CHATML

Rows = Sequence[Mapping[str, Any]]
PLAIN = plain_text("")
PROMPTS = [
    {
        "question": f"What is {n % 90}+1?" + " now" * (n % 9),
        "answer": f"{n % 7}",
        "task": "ab"[n % 3 > 0],
    }
    for n in range(700)
]
DEMONSTRATIONS = [{"prompt": f"Say {n}.", "completion": "yes " * (n % 11 + 1)} for n in range(300)]
PAIRS = [
    {"prompt": f"Is it {n}?", "chosen": "yes " * (n % 5 + 1), "rejected": "no " * (n % 7) + "no"}
    for n in range(300)
]
WRITERS: Mapping[str, Callable[[Rows, Path], object]] = {
    "jsonl": lambda rows, path: path.write_text("".join(f"{json.dumps(x)}\n" for x in rows)),
    "parquet": lambda rows, path: pq.write_table(pa.Table.from_pylist([*rows]), path),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tokenizer = make_bpe_tokenizer(["What is 1+1? Say yes no now."], 280)
    tokenizer.chat_template = CHATML
    return make_tiny_model(
        tmp_path_factory.mktemp("model"),
        tokenizer=tokenizer,
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=64,
        max_position_embeddings=512,
    )


@pytest.fixture(params=WRITERS)
def write(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[Rows], Path]:
    def written(rows: Rows) -> Path:
        path = tmp_path / f"rows.{request.param}"
        WRITERS[request.param](rows, path)
        return path

    return written


def in_lines(rows: Sequence[Any], path: Path) -> str:
    path.write_text("".join((x if isinstance(x, str) else json.dumps(x)) + "\n" for x in rows))
    return str(path)


def language_of(viewed: Any) -> Language:
    from hone.tools.data_view.tokens import model_language

    return model_language(viewed.cfg)


def said(capsys: pytest.CaptureFixture[str]) -> str:
    return " ".join(capsys.readouterr().out.split())


# Statistics.


def slow_quantile(lengths: Sequence[int], share: float) -> int:
    """The smallest length that at least this share does not exceed, by looking at each."""
    return next(
        length
        for length in sorted(lengths)
        if sum(other <= length for other in lengths) >= share * len(lengths)
    )


def require_lengths(found: Lengths, lengths: Sequence[int]) -> None:
    assert found.counts == Counter(lengths)
    assert (found.shortest, found.longest, found.total) == (
        min(lengths),
        max(lengths),
        sum(lengths),
    )
    assert found.mean == pytest.approx(statistics.fmean(lengths))
    for share in (0.05, 0.25, 0.5, 0.75, 0.95, 0.99):
        assert found.quantile(share) == slow_quantile(lengths, share)
    for limit in found.limits(17):
        assert found.above(limit) == sum(length > limit for length in lengths)
    bars = found.bars()
    assert len(bars) <= 21
    for bar in bars:
        assert bar.number == sum(bar.low <= length < bar.high for length in lengths)
    assert sum(bar.number for bar in bars) == len(lengths)


def test_figures_of_prompts_are_those_of_a_slow_count(write: Callable[[Rows], Path]) -> None:
    path = write(PROMPTS)
    stats = count(choose([str(path)], None), PLAIN)
    assert (stats.num_rows, stats.num_read, stats.missing_answers) == (700, 700, 0)
    (source,) = stats.sources
    assert source.files == {str(path): path.stat().st_size}
    assert stats.tasks == Counter(row["task"] for row in PROMPTS)
    assert list(stats.lengths) == ["prompt"]
    require_lengths(stats.lengths["prompt"], [len(row["question"]) for row in PROMPTS])
    prompts = Counter(row["question"] for row in PROMPTS)
    assert stats.prompts.num_distinct == len(prompts)
    assert stats.prompts.num_repeats == sum(number - 1 for number in prompts.values())
    answers = Counter(row["answer"] for row in PROMPTS)
    assert [(x.text, x.number) for x in stats.answers.most_frequent(3)] == answers.most_common(3)


def test_duplicates_are_those_of_most_rows_with_their_first_place(tmp_path: Path) -> None:
    asked = ["a", "b", "c", "b", "c", "c", "d"]
    path = in_lines([{"prompt": text} for text in asked], tmp_path / "rows.jsonl")
    stats = count(choose([path], None), PLAIN)
    found = [(x.text, x.number, x.place) for x in stats.duplicates()]
    assert found == [("c", 3, f"{path}, line 3"), ("b", 2, f"{path}, line 2")]
    assert stats.prompts.num_repeats == 3


def test_lengths_in_tokens_are_those_of_a_run(write: Callable[[Rows], Path], model: Path) -> None:
    path = write(DEMONSTRATIONS)
    viewed = choose([str(path), f"--model.path={model}"], None)
    stats = count(viewed, language_of(viewed))
    cfg: Any = viewed.cfg
    tokenizer = AutoTokenizer.from_pretrained(model)
    data = load_sft(cfg.data, tokenizer, seed=0, end_ids=(tokenizer.eos_token_id,))
    rows = data.known_rows()
    assert len(rows) == len(DEMONSTRATIONS)
    require_lengths(stats.lengths["whole row"], [len(row.token_ids) for row in rows])
    require_lengths(stats.lengths["completion"], [sum(row.loss_mask) for row in rows])
    require_lengths(stats.lengths["prompt"], [row.loss_mask.count(False) for row in rows])
    assert stats.limits == {
        "prompt": ("data.max_prompt_tokens", 1024),
        "whole row": ("data.max_tokens", 512),
    }


def test_pairs_count_both_completions(write: Callable[[Rows], Path], model: Path) -> None:
    path = write(PAIRS)
    viewed = choose([str(path), f"--model.path={model}"], None)
    stats = count(viewed, language_of(viewed))
    cfg: Any = viewed.cfg
    tokenizer = AutoTokenizer.from_pretrained(model)
    rows = load_pairs(cfg.data, tokenizer, seed=0).known_rows()
    both = [sum(row.loss_mask) for pair in rows for row in pair.rows]
    require_lengths(stats.lengths["completion"], both)
    whole = [max(len(row.token_ids) for row in pair.rows) for pair in rows]
    require_lengths(stats.lengths["whole row"], whole)
    assert stats.num_read == len(PAIRS)


def test_missing_answers_and_refused_rows_are_counted(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}", "answer": None if n % 10 == 3 else "1"} for n in range(500)]
    path = in_lines([*rows[:16], '{"prompt": ', *rows[16:]], tmp_path / "rows.jsonl")
    stats = count(choose([path], None), PLAIN)
    assert (stats.num_rows, stats.num_read, stats.missing_answers) == (500, 450, 50)
    assert len(stats.problems) == 51


def test_folders_and_recipes_have_several_files_and_sources(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    for number in range(3):
        in_lines(PROMPTS[number * 10 : number * 10 + 10], folder / f"{number}.jsonl")
    other = in_lines(PROMPTS[:5], tmp_path / "other.jsonl")
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(
        f"data:\n  train: [{{path: {folder}}}, {{path: {other}, max_rows: 4}}]\n"
        f"  eval: [{{path: {other}}}]\nreward: {{functions: [{{fn: math}}]}}\n"
    )
    stats = count(choose([str(recipe)], None), PLAIN)
    assert [source.num_rows for source in stats.sources] == [30, 4, 5]
    assert [len(source.files) for source in stats.sources] == [3, 1, 1]
    assert stats.sources[0].num_bytes == sum(x.stat().st_size for x in folder.iterdir())
    assert main(["data", "stats", str(recipe)]) == 0
    assert "only it has keys such as reward.functions.0.fn" in said(capsys)
    # A SOURCE takes the place of all of these.
    stats = count(choose([str(recipe), other, "--data.train.0.max_rows=3"], None), PLAIN)
    assert [source.num_rows for source in stats.sources] == [3]


def test_columns_that_only_late_rows_have_are_read_as_a_run_reads_them(tmp_path: Path) -> None:
    """A run chooses columns from all rows: here the tasks begin after the first block."""
    rows = [
        {"prompt": f"{n}"} | ({"task": "late"} if n > 400 else {"task": None}) for n in range(600)
    ]
    path = in_lines([row for row in rows if row["task"]][:0] + rows, tmp_path / "rows.jsonl")
    stats = count(choose([path], None), PLAIN)
    assert stats.sources[0].roles["task"] == "task"
    assert len(stats.problems) == 401, "rows without a task, which a run refuses"
    assert stats.tasks == {"late": 199}
    rows = [
        {"prompt": None, "question": f"{n}"} if n < 300 else {"prompt": "x"} for n in range(400)
    ]
    stats = count(choose([in_lines(rows, tmp_path / "rows.jsonl")], None), PLAIN)
    assert stats.sources[0].roles["prompt"] == "prompt"
    assert (stats.num_read, len(stats.problems)) == (100, 300)


def test_prompts_are_taken_off_pairs_only_where_all_repeat_them(tmp_path: Path) -> None:
    def pair(prompt: str, start: str) -> dict[str, str]:
        return {"prompt": prompt, "chosen": f"{start} a", "rejected": f"{start} b"}

    rows = [pair(f"q{n}", f"q{n}") for n in range(400)]
    rows[0] = pair("a long question", "a long question")
    checked = check(choose([in_lines(rows, tmp_path / "rows.jsonl")], None), PLAIN)
    assert "all 400 rows begin with the prompt" in checked.warnings[0]
    assert checked.longest == len("a long question a")
    rows.append(pair("q400", "x"))
    checked = check(choose([in_lines(rows, tmp_path / "rows.jsonl")], None), PLAIN)
    assert not checked.warnings
    assert checked.longest == 2 * len("a long question") + len(" a"), "a row of the first block"


def test_the_last_bar_has_the_longest_rows() -> None:
    lengths = [*range(1, 1001), 90_000]
    found = Lengths(Counter(lengths))
    require_lengths(found, lengths)
    assert found.bars()[-1].high == 90_001
    assert found.bars()[0].low == 0
    alone = Lengths(Counter({7: 3}))
    assert [(bar.low, bar.high, bar.number) for bar in alone.bars()] == [(7, 8, 3)]
    assert alone.limits() == [4, 8]
    assert alone.limits(5) == [4, 5, 8]
    assert Lengths(Counter({0: 1})).limits() == [1]


# Showing rows.


def test_the_mask_is_that_of_a_run(write: Callable[[Rows], Path], model: Path) -> None:
    path = write(DEMONSTRATIONS[:3])
    tokenizer = AutoTokenizer.from_pretrained(model)
    for flags in ([], ["--data.train_on_prompt=true"]):
        viewed = choose([str(path), f"--model.path={model}", *flags], None)
        shown = show(viewed, language_of(viewed), first=1, number=3)
        cfg: Any = viewed.cfg
        rows = load_sft(cfg.data, tokenizer, seed=0).known_rows()
        for row, own in zip(shown.sources[0].rows, rows, strict=True):
            (text,) = row.texts
            assert row.id == own.id
            assert text.num_trained == sum(own.loss_mask)
            assert "".join(x.text for x in text.pieces) == tokenizer.decode(own.token_ids)
            trained = [t for t, is_in in zip(own.token_ids, own.loss_mask, strict=True) if is_in]
            shown_trained = "".join(x.text for x in text.pieces if x.is_trained)
            assert shown_trained == tokenizer.decode(trained)
            special = [x.text for x in text.pieces if x.is_special]
            assert special.count("<|im_end|>") == 2
            assert not any("<|im" in x.text for x in text.pieces if not x.is_special)


def test_prompts_and_pairs_are_shown_as_a_run_has_them(
    write: Callable[[Rows], Path], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    path = write(PAIRS[:2])
    assert main(["data", "show", str(path), f"--model.path={model}", "--rows=1"]) == 0
    out = capsys.readouterr().out
    assert "read as `hone dpo` would" in out
    assert "⟦yes <|im_end|>⟧" in out
    assert "⟦no<|im_end|>⟧" in out, "of the first row"
    path = write(PROMPTS[:2])
    viewed = choose([str(path), f"--model.path={model}"], None)
    (row, _) = show(viewed, language_of(viewed), first=1, number=2).sources[0].rows
    cfg: Any = viewed.cfg
    prompt = load_prompts(cfg.data, tokenizer).known_rows()[0]
    assert "".join(piece.text for piece in row.texts[0].pieces) == prompt.text
    assert row.texts[0].num_whole == len(prompt.token_ids)
    assert not row.texts[0].has_mask
    assert dict(row.facts) == {"task": "a", "answer": "0"}


def test_columns_are_described_with_what_they_are_read_as(
    write: Callable[[Rows], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    turns = [{"role": "user", "content": "hi"}]
    rows = [
        {"prompt": turns, "reward_model": {"ground_truth": f"{n}"}, "data_source": "m", "n": n}
        for n in range(5)
    ]
    assert main(["data", "show", str(write(rows)), "--from", "2", "--rows", "2"]) == 0
    out = said(capsys)
    assert "verl's: prompts with the answer in reward_model.ground_truth" in out
    assert "reward_model.ground_truth text answer 0" in out
    assert "prompt messages prompt" in out
    assert "data_source text task m" in out
    assert "n whole number passed on 0" in out
    assert [f"rows:{n}" in out for n in (1, 2, 3, 4)] == [False, True, True, False]


RECOGNISED: list[tuple[str, dict[str, Any], str, str]] = [
    ("answers", {"question": "q", "answer": "a"}, "rl", "no demonstration and no pair"),
    ("completions", {"prompt": "q", "response": "a"}, "sft", "`response` and no answer"),
    ("both", {"prompt": "q", "response": "a", "answer": "1"}, "rl", "--for sft learns the latter"),
    ("pairs", {"prompt": "q", "chosen": "a", "rejected": "b"}, "dpo", "`chosen` and `rejected`"),
    ("labels", {"prompt": "q", "completion": "a", "label": True}, "dpo", "as KTO's"),
    (
        "dialogues",
        {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]},
        "sft",
        "end with the assistant",
    ),
]


@pytest.mark.parametrize(
    ("row", "name", "since"), [case[1:] for case in RECOGNISED], ids=[x[0] for x in RECOGNISED]
)
def test_the_command_is_recognised_by_the_columns(
    row: dict[str, Any], name: str, since: str, tmp_path: Path
) -> None:
    path = in_lines([row], tmp_path / "rows.jsonl")
    viewed = choose([path], None)
    assert (viewed.command, since in viewed.since) == (name, True), viewed.since
    assert not check(viewed, PLAIN).problems


def test_keys_and_words_decide_before_columns(tmp_path: Path) -> None:
    path = in_lines([{"prompt": "q", "completion": "a", "answer": "1"}], tmp_path / "rows.jsonl")
    assert choose([path], "sft").command == "sft"
    assert choose([path, "--data.train_on_prompt=true"], None).command == "sft"
    assert choose([path, "--rollout.temperature=0.5"], None).command == "rl"
    (tmp_path / "mine.yaml").write_text("algorithm: {loss: simpo}\n")
    pairs = in_lines([PAIRS[0]], tmp_path / "pairs.jsonl")
    viewed = choose([str(tmp_path / "mine.yaml"), pairs], None)
    assert viewed.command == "dpo"
    assert choose([pairs, "--algorithm.center_coef=0.1"], None).command == "reward-model"


def test_trees_have_the_keys_of_their_commands() -> None:
    for name, tree in VIEWS.items():
        assert issubclass(tree, TREES[name])


def test_without_a_model_texts_are_plain(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = in_lines(DEMONSTRATIONS[:1], tmp_path / "rows.jsonl")
    assert main(["data", "show", path]) == 0
    out = said(capsys)
    assert "prompt Say 0. 6 characters" in out
    assert "--model.path shows its tokens" in out
    assert main(["data", "show", path, "--model.path=./nowhere"]) == 0
    assert "lengths are in characters, since" in said(capsys)
    assert main(["data", "check", path, "--model.path=./nowhere"]) == 2


def test_long_texts_keep_their_two_ends() -> None:
    text = "".join(chr(33 + n % 90) for n in range(1000))
    cuts = [0, 90, 400, 410, 999, 1000]
    pieces = [Piece(text[begin:end], is_trained=end > 410) for begin, end in pairwise(cuts)]
    assert elided(pieces, 1000) == pieces
    kept = elided(pieces, 100)
    place = kept.index(900)
    assert "".join(x.text for x in kept[:place] if isinstance(x, Piece)) == text[:50]
    tail = [x for x in kept[place + 1 :] if isinstance(x, Piece)]
    assert "".join(x.text for x in tail) == text[-50:]
    assert all(piece.is_trained for piece in tail)


def test_kinds_are_in_words() -> None:
    cases = {
        "true or false": True,
        "whole number": 1,
        "text": "a",
        "list of texts": ["a"],
        "empty list": [],
        "object with a, b": {"a": 1, "b": 2},
        "messages": [{"role": "user", "content": ""}],
    }
    assert [kind_of(value) for value in cases.values()] == list(cases)


# Checking.


def test_all_problems_are_told_with_their_places(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[Any] = [{"question": f"q{n}", "answer": f"{n}"} for n in range(1, 301)]
    rows[16] = '{"question": "x", '
    for line in range(100, 130):
        rows[line - 1] = {"question": "q", "answer": None}
    rows[269] = {"question": ["a"], "answer": "1"}
    rows[279] = "[1, 2]"
    path = in_lines(rows, tmp_path / "rows.jsonl")
    checked = check(choose([path], None), PLAIN)
    kinds = {name: kind.number for name, kind in checked.problems.kinds.items()}
    assert kinds == {
        "not valid JSON": 1,
        "nothing in column 'answer', which was to give the answer": 30,
        "column 'question' holds a list": 1,
        "a row must be a JSON object with named columns": 1,
    }
    assert (checked.num_rows, checked.sources[0].num_kept) == (298, 267)
    assert main(["data", "check", path]) == 1
    out = said(capsys)
    for line in (17, 100, 119, 270, 280):
        assert f"{path}, line {line}: " in out
    assert f"{path}, line 120: " not in out, "20 of a kind are told"
    assert "and 10 more" in out
    assert "change: fill the column" in out
    assert "errors: 33" in out


def test_columns_that_reward_functions_need_are_asked_of_every_row(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": f"q{n}", "label": f"{n}", "level": n} for n in range(1, 301)
    ]
    rows[269]["level"] = None
    del rows[279]["level"]
    rows[289] = {"prompt": "q", "label": "1", "level": None, "depth": 1}
    path = in_lines(rows, tmp_path / "rows.jsonl")
    code = tmp_path / "own.py"
    code.write_text("def graded(completion, answer, level, depth=0):\n    return 1.0\n")
    words = [path, "--for=rl", f"--reward.functions.0.fn={code}:graded"]
    assert main(["data", "check", *words]) == 1
    out = said(capsys)
    for line in (270, 280, 290):
        assert f"{path}, line {line}: '{code}:graded' needs the column 'level' of each row" in out
    assert "(here are: depth, label, prompt); fill it" in out
    assert "or give the parameter a default" in out
    assert "errors: 3" in out
    # `answer` is the column with that role.
    filled = [row | {"level": 1} for row in rows]
    assert main(["data", "check", in_lines(filled, tmp_path / "rows.jsonl"), *words[1:]]) == 0
    bare = in_lines([{"prompt": f"q{n}"} for n in range(9)], tmp_path / "bare.jsonl")
    capsys.readouterr()
    assert main(["data", "check", bare, "--for=rl", "--reward.functions.0.fn=exact_match"]) == 1
    assert "error: 9 x 'exact_match' needs the answer of each row" in said(capsys)


def test_a_good_source_is_taken(write: Callable[[Rows], Path], model: Path) -> None:
    for rows in (PROMPTS, DEMONSTRATIONS, PAIRS):
        assert main(["data", "check", str(write(rows)), f"--model.path={model}"]) == 0


def test_what_is_dropped_is_what_a_run_drops(
    write: Callable[[Rows], Path], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(model)
    long = [{"prompt": "Say it. " * 40, "completion": "yes"}]
    path = write([*DEMONSTRATIONS, *long])
    words = [
        str(path),
        f"--model.path={model}",
        "--data.max_tokens=32",
        "--data.max_prompt_tokens=60",
    ]
    viewed = choose(words, None)
    checked = check(viewed, language_of(viewed))
    cfg: Any = viewed.cfg
    report = load_sft(cfg.data, tokenizer, seed=0).report
    by_limit = Counter(f"more tokens than {row.limit}" for row in report.dropped)
    assert {reason: x.number for reason, x in checked.dropped.items()} == by_limit
    assert len(by_limit) == 2
    assert checked.longest == report.longest_tokens
    assert not checked.problems
    told = [message.partition(":")[0] for x in checked.dropped.values() for message in x.told]
    assert set(told) <= {row.location for row in report.dropped}
    assert main(["data", "check", *words, "--data.overlong_prompts=error"]) == 1
    assert "set data.overlong_prompts to 'drop'" in said(capsys)
    assert main(["data", "check", *words, "--data.max_prompt_tokens=5"]) == 1
    assert "a run would have no row left" in said(capsys)


def test_rows_that_are_held_out_are_those_of_a_run(
    write: Callable[[Rows], Path], model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = str(write([{"prompt": f"Say {n}.", "answer": "1"} for n in range(700)]))
    words = [path, f"--model.path={model}", "--data.eval_fraction=0.3"]
    viewed = choose(words, None)
    checked = check(viewed, language_of(viewed))
    cfg: Any = viewed.cfg
    data = load_prompts(cfg.data, AutoTokenizer.from_pretrained(model), seed=cfg.run.seed)
    assert 0 < checked.sources[0].num_held_out == len(data.eval)
    assert main(["data", "check", *words, "--data.eval_fraction=0.000001"]) == 1
    assert "holds out none of the rows" in said(capsys)


def test_a_template_that_refuses_rows_is_a_problem_of_each(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    strict = tmp_path / "strict.jinja"
    strict.write_text(
        "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}"
        "{% endif %}{{ m['content'] }}{% endfor %}"
    )
    turns = [[{"role": "user", "content": f"q{n}"}] for n in range(9)]
    rows = [
        {"prompt": [{"role": "system", "content": "s"}, *turn] if n in (4, 7) else turn}
        for n, turn in enumerate(turns)
    ]
    path = in_lines(rows, tmp_path / "rows.jsonl")
    flags = [f"--model.path={model}", f"--model.chat_template={strict}"]
    assert main(["data", "check", path, *flags]) == 1
    out = said(capsys)
    assert "2 x the chat template does not accept these messages" in out
    assert [f"line {n}: the chat" in out for n in (4, 5, 8, 9)] == [False, True, True, False]
    assert main(["data", "check", path, f"--model.path={model}", "--data.chat=never"]) == 1
    assert "9 x the prompt is a list of chat messages" in said(capsys)


def test_weak_pairs_are_warned_of(tmp_path: Path) -> None:
    rows = [*PAIRS, {"prompt": "q", "chosen": "a", "rejected": "a"}] * 2
    checked = check(choose([in_lines(rows, tmp_path / "rows.jsonl")], None), PLAIN)
    assert not checked.problems
    (warning,) = checked.warnings
    assert "2 of the 602 rows have one completion twice, which teaches nothing" in warning
    assert warning.endswith("line 301")


def test_places_and_values_make_no_new_kind() -> None:
    problems = Problems()
    for number in range(1, 31):
        problems.add(f"a, b.jsonl, line {number}: {number} tokens, but data.max_tokens = 3; raise")
        problems.add(f"x.parquet, row {number}, column 'image': it is broken: {number}.png")
    assert [(kind.what, kind.number) for kind in problems.kinds.values()] == [
        ("N tokens, but data.max_tokens = N; raise", 30),
        ("it is broken", 30),
    ]
    assert len(problems.kinds["it is broken"].told) == 20


# Wrong inputs.


def test_what_is_wrong_with_the_words(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = in_lines(PROMPTS[:3], tmp_path / "rows.jsonl")
    empty = in_lines([], tmp_path / "empty.jsonl")
    cases: dict[tuple[str, ...], str] = {
        ("look",): "takes show, stats or check, got 'look'",
        ("show", "nowhere.jsonl"): "no such file or folder: nowhere.jsonl",
        ("stats", "nowhere.jsonl"): "no such file or folder: nowhere.jsonl",
        ("show", empty): "holds no rows",
        ("stats", empty): "holds no rows",
        ("show", "gsm9k"): "no recipe of that name",
        ("show",): "no data are named",
        ("show", path, "--rows", "0"): "--rows takes a whole number",
        ("show", path, "--from", "4"): "has no row 4",
        ("stats", path, "--output", "x.txt"): "--output takes the name of an HTML page",
        ("stats", path, "--for", "ppo"): "--for takes one of rl, sft, dpo, reward-model",
        ("check", path, "--data.max_row", "3"): "max_row",
    }
    for words, problem in cases.items():
        assert main(["data", *words]) == 2, words
        assert problem in capsys.readouterr().err, words


@pytest.mark.parametrize("action", ["show", "check"])
def test_what_a_run_refuses_exits_with_1(
    action: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    both = in_lines([{"question": "q", "instruction": "i", "answer": "1"}], tmp_path / "rows.jsonl")
    assert main(["data", action, both]) == 1
    out = said(capsys)
    assert "the prompt may be in any of the columns question, instruction" in out
    assert "columns.prompt" in out
    assert main(["data", action, both, "--data.train.0.columns.prompt=question"]) == 0


def test_check_says_of_sources_that_are_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in ("nowhere.jsonl", in_lines([], tmp_path / "empty.jsonl")):
        assert main(["data", "check", path]) == 1
        assert "errors: 1" in said(capsys)


def test_reading_goes_on_after_bad_rows_and_bad_files(tmp_path: Path) -> None:
    folder = tmp_path / "many"
    folder.mkdir()
    in_lines([*PROMPTS[:5], "{", *PROMPTS[:5], "{"], folder / "a.jsonl")
    rows = "".join(f"{json.dumps(row)}\n" for row in [*PROMPTS[:4], 3, *PROMPTS[:4]])
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(rows.encode()))
    (folder / "c.jsonl.gz").write_bytes(gzip.compress(random.randbytes(9000).hex().encode())[:-900])
    (folder / "d.json").write_text(json.dumps([PROMPTS[0], "no row", PROMPTS[1]]))
    (folder / "e.parquet").write_bytes(b"PAR1 and nothing of it")
    broken = folder / "f.parquet"
    pq.write_table(pa.Table.from_pylist(PROMPTS[:90]), broken, row_group_size=30)
    page = pq.ParquetFile(broken).metadata.row_group(1).column(0)
    begin, data = page.dictionary_page_offset, bytearray(broken.read_bytes())
    data[begin : begin + page.total_compressed_size] = bytes(page.total_compressed_size)
    broken.write_bytes(data)
    in_lines(PROMPTS[:3], folder / "g.jsonl")
    for path in (str(folder), str(folder / "*")):
        checked = check(choose([path], None), PLAIN)
        assert checked.num_rows == 10 + 8 + 2 + 60 + 3
        told = [message for kind in checked.problems.kinds.values() for message in kind.told]
        places = ("a.jsonl, line 6", "a.jsonl, line 12", "b.jsonl.gz, line 5", "c.jsonl.gz")
        for place in (*places, "d.json, row 2", "e.parquet", "f.parquet"):
            assert sum(place in message for message in told) == 1, place
        assert len(told) == 7
        ends = [f"{path}, after {number} rows" for number in (18, 20, 50)]
        assert checked.problems.stopped == ends


# Rows that filters leave out.

FILTERS = ("--data.missing_answers=drop", "--data.duplicates=drop", "--data.filter=rules.py:keep")
FILTERED = [
    {
        "prompt": f"p{n * n % 23}",
        "answer": [None, "", "1", "2"][n % 4],
        "completion": [None, "", "1", "2"][n % 4],
        "chosen": [None, "", "1", "2"][n % 4],
        "rejected": "3",
        "id": n,
    }
    for n in range(600)
]
FILTER = "def keep(row):\n    return row['id'] % 5 != 2\n"


@pytest.mark.parametrize("command", ["rl", "sft", "dpo"])
def test_check_stats_and_show_leave_out_what_a_run_does(
    command: str,
    write: Callable[[Rows], Path],
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rules.py").write_text(FILTER)
    words = [str(write(FILTERED)), *FILTERS, f"--model.path={model}"]
    viewed = choose(words, command)
    tokenizer = AutoTokenizer.from_pretrained(model)
    load: Any = {"rl": load_prompts, "sft": load_sft, "dpo": load_pairs}[command]
    kept = [row.id for row in load(viewed.cfg.data, tokenizer, seed=0).train.first_rows()]
    report = load(viewed.cfg.data, tokenizer, seed=0).report
    assert set(report.skipped) == {"filter", "missing_answer", "duplicate"}
    for language in (PLAIN, language_of(viewed)):
        checked = check(viewed, language)
        assert not checked.problems
        numbers = {
            reason: checked.dropped[REASONS[reason].of_many].number for reason in report.skipped
        }
        assert numbers == report.skipped
        told = {reason: checked.dropped[REASONS[reason].of_many].told[0] for reason in numbers}
        assert told == report.first_skipped
        (source,) = checked.sources
        assert (source.num_rows, source.num_kept) == (600, len(kept))
        stats = count(viewed, language)
        assert stats.num_read == len(kept)
        assert not stats.missing_answers
        assert stats.dropped.skipped_in_words == report.skipped_in_words
        (shown,) = show(viewed, language, first=250, number=20).sources
        left = [row.id for row in shown.rows if not dict(row.facts).get("dropped")]
        assert left == [name for name in kept if 250 <= int(name.rpartition(":")[2]) < 270]
        assert len(shown.rows) == 20
        reasons = [dict(row.facts)["dropped"] for row in shown.rows if row.id not in left]
        assert all(
            any(reason.startswith(f"a row with {x.of_many}") for x in REASONS.values())
            for reason in reasons
        )


def test_what_filters_leave_out_is_printed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rules.py").write_text(FILTER)
    in_lines(FILTERED, tmp_path / "rows.jsonl")
    for action in ("check", "stats", "show"):
        page = tmp_path / f"{action}.html"
        words = ["data", action, "rows.jsonl", *FILTERS, "--for", "rl", f"--output={page}"]
        assert main(words) == 0
        out = said(capsys)
        assert "no answer (data.missing_answers is drop)" in out
        assert "no answer (data.missing_answers is drop)" in Page(page.read_text()).said
        if action != "show":
            assert "the content of an earlier row (data.duplicates is drop)" in out
            assert "false from data.filter" in out


def test_a_filter_that_fails_is_a_problem_of_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rules.py").write_text("def keep(row):\n    return len(row['task']) > 0\n")
    rows: list[dict[str, Any]] = [{"prompt": "p", "answer": "1", "task": "x"} for _ in range(40)]
    rows[3]["task"] = rows[30]["task"] = None
    path = in_lines(rows, tmp_path / "rows.jsonl")
    checked = check(choose([path, "--data.filter=rules.py:keep"], "rl"), PLAIN)
    assert (checked.num_rows, checked.sources[0].num_kept) == (40, 38)
    (kind,) = checked.problems.kinds.values()
    assert kind.number == 2
    assert [message.partition(": ")[0] for message in kind.told] == [
        f"{path}, line 4",
        f"{path}, line 31",
    ]
    assert main(["data", "check", path, "--data.filter=rules.py:gone"]) == 2
    assert "data.filter: rules.py has no function 'gone'" in capsys.readouterr().err


# Where it is shown.


def in_process(*words: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hone", *words],
        capture_output=True,
        text=True,
        env={name: x for name, x in os.environ.items() if name != "NO_COLOR"} | env,
        timeout=600,
    )


def test_a_pipe_gets_no_colours_and_no_torch_is_loaded(tmp_path: Path) -> None:
    path = in_lines(DEMONSTRATIONS[:2], tmp_path / "rows.jsonl")
    for action in ("show", "stats", "check"):
        done = in_process("data", action, path, TERM="xterm-256color")
        assert done.returncode == 0, done.stderr
        assert "\x1b" not in done.stdout + done.stderr
        assert "rows" in done.stdout
    program = "import sys; from hone.cli.main import main; main(sys.argv[1:]); "
    program += "sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program, "data", "stats", path], timeout=600)
    assert done.returncode == 0


def test_a_terminal_gets_colours_unless_it_wants_none(
    tmp_path: Path, model: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = in_lines([{"prompt": "a\x1b[31mb", "completion": "yes"}], tmp_path / "rows.jsonl")
    words = ["data", "show", path, f"--model.path={model}"]
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "\x1b[32myes" in out
    assert "\x1b[31m" not in out, "what the data say is no colour"
    assert "⟦" not in out
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(words) == 0
    out = capsys.readouterr().out
    assert not re.search(r"\x1b\[[0-9;]*3[0-9]", out)
    assert "⟦yes" in out


class Page(HTMLParser):
    """The tags of a page, closed in order, and its text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.said = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta", "wbr"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.said += data


def page_of(words: Sequence[str], folder: Path, *, code: int = 0) -> Page:
    file = folder / "page.html"
    assert main(["data", *words, f"--output={file}"]) == code
    text = file.read_text()
    assert "src=" not in text
    assert "http" not in text
    assert "<script" not in text
    return Page(text)


def test_pages_say_what_the_terminal_says(tmp_path: Path, model: Path) -> None:
    path = in_lines([{"prompt": "<b>1 & 2</b>", "completion": "yes"}], tmp_path / "rows.jsonl")
    page = page_of(["show", path, f"--model.path={model}"], tmp_path)
    assert "<b>1 & 2</b>" in page.said
    kinds = [attrs["class"] for tag, attrs in page.tags if tag == "span" and "class" in attrs]
    assert {"trained", "untrained", "special trained", "special untrained"} <= set(kinds)
    assert "hone sft" in page.said

    path = in_lines(PROMPTS, tmp_path / "rows.jsonl")
    page = page_of(["stats", path], tmp_path)
    stats = count(choose([path], None), PLAIN)
    bars = [attrs for tag, attrs in page.tags if tag == "rect"]
    assert len(bars) == len(stats.lengths["prompt"].bars())
    assert [tag for tag, _ in page.tags if tag == "text"] == [], "letters shrink with the drawing"
    lefts = re.findall(r"left: ([\d.]+)%", f"{page.tags}")
    assert 1 <= len(lefts) <= 5
    assert max(map(float, lefts)) < 90
    numbers = re.findall(r"characters: ([\d,]+)", page.said)
    assert sum(int(number.replace(",", "")) for number in numbers) == 700
    for text in ("Missing answers", "Most frequent answers", "Rows by task", "Prompts that repeat"):
        assert text in page.said

    path = in_lines([*PROMPTS[:16], "{", *PROMPTS[:3]], tmp_path / "rows.jsonl")
    page = page_of(["check", path], tmp_path, code=1)
    assert f"{path}, line 17: not valid JSON" in page.said
    assert "Change: mend the lines" in page.said


def test_ctrl_c_ends_with_what_was_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = in_lines(PROMPTS * 3, tmp_path / "rows.jsonl")
    told: list[int] = []
    tell = command.Progress.tell

    def interrupted(self: Any, num_rows: int) -> None:
        told.append(num_rows)
        if num_rows == 512:
            signal.raise_signal(signal.SIGINT)
        tell(self, num_rows)

    monkeypatch.setattr(command.Progress, "tell", interrupted)
    before = signal.getsignal(signal.SIGINT)
    assert threading.current_thread() is threading.main_thread()
    for action, words in {
        "stats": "these are the figures of the first 512 rows alone",
        "check": "interrupted: 512 rows were checked, and no more",
    }.items():
        told.clear()
        assert main(["data", action, path]) == 130
        assert words in said(capsys)
        assert told == [256, 512]
    assert signal.getsignal(signal.SIGINT) is before


def test_interrupted_figures_are_of_whole_blocks(tmp_path: Path) -> None:
    path = in_lines(PROMPTS, tmp_path / "rows.jsonl")

    def tell(num_rows: int) -> None:
        if num_rows == 512:
            raise KeyboardInterrupt

    stats: Stats = count(choose([path], None), PLAIN, tell)
    assert stats.is_interrupted
    require_lengths(stats.lengths["prompt"], [len(row["question"]) for row in PROMPTS[:512]])
    assert stats.tasks == Counter(row["task"] for row in PROMPTS[:512])


def test_progress_says_rows_and_bytes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = in_lines(PROMPTS * 2, tmp_path / "rows.jsonl")
    monkeypatch.setattr(command, "_TELL_EVERY_S", 0.0)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    assert main(["data", "stats", path]) == 0
    lines = capsys.readouterr().err.split("\r")
    assert re.search(r"256 rows, [\d,]+ rows/s, [\d.]+ MiB read", "".join(lines))
    assert lines[-1] == "\x1b[K", "the line is gone at the end"


def test_memory_is_that_of_counts() -> None:
    """Values keep 8 bytes a row, and so many texts that they do not grow with the rows."""
    from hone.tools.data_view.counts import MOST_KEPT, Values

    values = Values()
    for number in range(MOST_KEPT + 100):
        values.add(number, "text", "place")
    assert values.digests.itemsize == 8
    assert len(values.texts) == MOST_KEPT
    values.add(MOST_KEPT + 50, "text", "place")
    (found,) = values.most_frequent(3, at_least=2)
    assert (found.number, found.text) == (2, None)


def test_the_help_page_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["--help"], ["stats", "--help"]):
        assert main(["data", *words]) == 0
        out = capsys.readouterr().out
        for text in ("hone data show", "hone data stats", "hone data check", "--output"):
            assert text in out
        assert all(len(line) <= 90 for line in out.split("\n"))


def test_kto_reads_pairs_as_two_completions_of_a_row(tmp_path: Path, model: Path) -> None:
    path = in_lines(PAIRS, tmp_path / "rows.jsonl")
    viewed = choose([path, f"--model.path={model}", "--algorithm.loss=kto"], None)
    language = language_of(viewed)
    checked = check(viewed, language)
    assert (checked.num_rows, checked.sources[0].num_kept) == (300, 300)
    stats = count(viewed, language)
    assert (stats.num_read, stats.lengths["completion"].number) == (300, 600)
    assert stats.prompts.num_repeats == 0
    (row,) = show(viewed, language, first=1, number=1).sources[0].rows
    assert [text.label for text in row.texts] == ["good completion", "bad completion"]


@pytest.mark.parametrize("role", ["difficulty", "pass_rate"])
def test_check_refuses_an_order_of_rows_that_a_run_does_not_know(role: str, tmp_path: Path) -> None:
    path = in_lines(
        [{"prompt": f"{n}", "answer": "1", "x": n} for n in range(9)], tmp_path / "a.jsonl"
    )
    recipe = tmp_path / "mine.yaml"
    recipe.write_text(f"data: {{train: [{{path: {path}, columns: {{{role}: x}}}}]}}")
    problems = check(choose([str(recipe), "--data.shuffle_window=4"], "rl"), PLAIN).problems
    assert len(problems) == 1
    (kind,) = problems.kinds.values()
    assert f"columns.{role} is for a source that is read whole" in kind.told[0]
    assert not check(choose([str(recipe)], "rl"), PLAIN).problems
