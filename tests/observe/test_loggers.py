"""The files of a run folder, and what resuming cuts off."""

import json
import math
from dataclasses import replace
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hone.config.run import LogConfig
from hone.observe.histogram import Histogram
from hone.observe.loggers import (
    BRANCH_TOKENS,
    ENTROPY,
    PER_TOKEN,
    POLICY_LOGPROBS,
    RunLog,
    completion_row,
    json_line,
    pair_row,
)
from hone.types import NOT_SAMPLED, Branch, PerToken, Sample, StopReason, Turn
from tests.observe.fake_run import make_group

PLAIN = LogConfig(to=())


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_steps(folder: Path, steps: range, *, resume_step: int | None = None) -> None:
    rng = np.random.default_rng(0)
    with RunLog(folder, PLAIN, resume_step=resume_step) as log:
        for step in steps:
            log.log(step, {"reward/mean": step / 10})
            log.event("alarm", step=step)
            log.samples(step, [make_group(step, 0, rng)])


def answered(columns: dict[str, Any]) -> list[Sample]:
    """Two samples of a prompt whose row has these columns."""
    group = make_group(1, 1, np.random.default_rng(0), num_samples=2)
    prompt = replace(group.prompt, unrendered="1+1=", metadata=columns)
    return [replace(sample, prompt=prompt) for sample in group.samples]


OWN_NAMES = {
    "id": 7,
    "index": 3,
    "reward": 0.25,
    "turns": 2,
    "token_ids": [1],
    "rendered": "a",
    "row": {"id": 1},
    "completion": "older",
    "response": "older",
    "output": "older",
    "ground_truth": "2",
}
"""Columns of a user whose names a row of `hone generate` has for itself, or that would be read in
place of what it has."""
OF_PAIRS = {"chosen": "old", "rejected": "older", "rejected_reward": 0.5, "margin": 2.0}


def test_no_column_of_the_user_is_lost_in_what_is_generated() -> None:
    columns = {"prompt": "1+1=", "answer": "480", "task": "default", "level": 3}
    best, worst = answered(columns | OWN_NAMES | OF_PAIRS)
    row = json.loads(json_line(completion_row(best)))
    assert (row["prompt"], row["completion"], row["answer"]) == ("1+1=", best.text, "480")
    assert (row["id"], row["index"]) == (best.id, best.index)
    assert best.reward is not None
    assert row["reward"] == best.reward.total
    assert row["row"] == OWN_NAMES
    assert row["level"] == 3
    assert {name: row[name] for name in OF_PAIRS} == OF_PAIRS
    pair = json.loads(json_line(pair_row(best, worst)))
    assert (pair["chosen"], pair["rejected"]) == (best.text, worst.text)
    assert pair["row"] == OWN_NAMES | OF_PAIRS
    assert "margin" not in pair
    assert [*pair][-1] == "loss_mask", "values for each token come last"


def test_a_row_says_the_same_once_and_another_value_twice() -> None:
    for columns, nested in (
        ({"answer": "480", "prompt": "1+1="}, {}),
        ({"answer": 480}, {"answer": 480}),
        ({"prompt": "not asked", "question": "1+1="}, {"prompt": "not asked"}),
    ):
        (sample, _) = answered(columns)
        assert completion_row(sample).get("row", {}) == nested


def test_values_of_arrow_are_written_as_json_has_them() -> None:
    values = {"cost": Decimal("3.5"), "on": date(2024, 2, 29), "said": b"a", "image": b"\xff\x00"}
    row = json.loads(json_line({"given": values, **values}))
    written = {"cost": 3.5, "on": "2024-02-29", "said": "a", "image": "/wA="}
    assert row == {"given": written, **written}


@pytest.mark.parametrize("name", ["metrics", "events", "samples", "histograms"])
def test_resuming_cuts_the_steps_that_come_again(tmp_path: Path, name: str) -> None:
    write_steps(tmp_path, range(1, 8))
    write_steps(tmp_path, range(5, 10), resume_step=5)
    steps = [row["step"] for row in rows(tmp_path / f"{name}.jsonl")]
    assert list(dict.fromkeys(steps)) == list(range(1, 10))
    assert steps == sorted(steps)
    per_step = 4 if name == "samples" else 1
    assert len(steps) == 9 * per_step


def test_a_fresh_run_starts_its_files_afresh(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 4))
    write_steps(tmp_path, range(1, 2))
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [1]


def test_a_torn_last_line_is_dropped(tmp_path: Path) -> None:
    write_steps(tmp_path, range(1, 4))
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "reward/me')
    write_steps(tmp_path, range(4, 5), resume_step=4)
    assert [row["step"] for row in rows(tmp_path / "metrics.jsonl")] == [1, 2, 3, 4]


def test_each_row_is_on_disk_at_once_and_valid_json(tmp_path: Path) -> None:
    with RunLog(tmp_path, PLAIN) as log:
        log.log(1, {"good": 1.5, "bad": float("nan"), "worse": float("-inf")})
        log.event("dump", values=[1.0, float("inf")])
        text = (tmp_path / "metrics.jsonl").read_text()
        row = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
        assert (row["step"], row["good"], row["bad"], row["worse"]) == (1, 1.5, None, None)
        assert rows(tmp_path / "events.jsonl")[0]["values"] == [1.0, None]


INTS = st.lists(st.integers(-(2**31), 2**31 - 1), max_size=20)


@given(
    ids=INTS,
    mask=st.lists(st.integers(0, 1), max_size=20),
    logprobs=st.lists(st.floats(), max_size=20),
    text=st.text(st.characters()),  # surrogates too
    number=st.floats(),
)
def test_a_row_reads_back_with_every_bit(
    ids: list[int], mask: list[int], logprobs: list[float], text: str, number: float
) -> None:
    arrays = {
        "ids": PerToken("i", ids),
        "mask": PerToken("b", mask),
        "logprobs": PerToken("d", logprobs),
    }
    line = json_line({"text": text, **arrays, "after": [number, None]})
    assert line.endswith(b"}\n")
    assert line.count(b"\n") == 1
    row = json.loads(line)
    assert list(row) == ["text", *arrays, "after"]
    assert (row["ids"], row["mask"]) == (ids, mask)
    assert row["text"].encode(errors="surrogatepass") == text.encode(errors="surrogatepass")
    finite = [x if math.isfinite(x) else None for x in (*logprobs, number)]
    assert list(map(repr, [*row["logprobs"], row["after"][0]])) == list(map(repr, finite))


def test_samples_are_whole_groups_spread_over_the_step(tmp_path: Path) -> None:
    groups = [make_group(1, index, np.random.default_rng(index)) for index in range(4)]
    with RunLog(tmp_path, LogConfig(to=(), samples_per_step=7)) as log:
        log.samples(1, groups, advantages={groups[0].samples[0].id: 0.5})
        log.samples(2, [])
    written = rows(tmp_path / "samples.jsonl")
    wanted = [sample.id for group in (groups[0], groups[2]) for sample in group.samples]
    assert [row["id"] for row in written] == wanted
    assert [row["advantage"] for row in written] == [0.5, *[None] * 7]
    sample = groups[0].samples[0]
    assert sample.reward is not None
    first = written[0]
    assert first["token_ids"] == sample.token_ids
    assert first["logprobs"] == sample.logprobs
    assert first["weight_versions"] == sample.weight_versions
    assert first["loss_mask"] == [1] * len(sample.token_ids)
    assert first["prompt_token_ids"] == list(sample.prompt.token_ids)
    assert first["num_tokens"] == len(sample.token_ids)
    assert (first["reward"], first["reward_parts"]) == (sample.reward.total, sample.reward.parts)
    assert (first["stop_reason"], first["failure"]) == ("eos", None)
    arrays = [k for k, value in first.items() if isinstance(value, list) and k != "turns"]
    assert arrays[0] == PER_TOKEN
    assert list(first)[-len(arrays) :] == arrays, "readers of the rest stop there"


@pytest.mark.parametrize(("kept", "expected"), [(0, 0), (3, 4), (5, 8), (100, 8)])
def test_samples_per_step(tmp_path: Path, kept: int, expected: int) -> None:
    groups = [make_group(1, index, np.random.default_rng(index)) for index in range(2)]
    with RunLog(tmp_path, LogConfig(to=(), samples_per_step=kept)) as log:
        log.samples(1, groups)
    ids = [row["id"] for row in rows(tmp_path / "samples.jsonl")]
    assert len(set(ids)) == len(ids) == expected
    failed = [row for row in rows(tmp_path / "samples.jsonl") if row["failure"]]
    assert all(row["reward"] is None and row["failure"] == "timeout" for row in failed)


@pytest.mark.parametrize(
    ("split", "versions", "expected"),
    [
        ("train", [[4, 4], [4, 4]], None),
        ("train", [[4, 4], [2, NOT_SAMPLED, 4]], {0: 1, 2: 1}),
        ("eval", [[4, 4], [2, 4]], None),
    ],
)
def test_staleness_is_that_of_the_oldest_token(
    tmp_path: Path, split: str, versions: list[list[int]], expected: dict[int, int] | None
) -> None:
    """Step 5 trains version 4."""
    group = make_group(1, 0, np.random.default_rng(0))
    samples = [
        replace(sample, weight_versions=own)
        for sample, own in zip(group.samples[:2], versions, strict=True)
    ]
    with RunLog(tmp_path, PLAIN) as log:
        log.samples(5, [replace(group, samples=samples)], split=split)
    (row,) = rows(tmp_path / "histograms.jsonl")
    if expected is None:
        assert "staleness" not in row
        return
    held = row["staleness"]
    assert (held["low"], held["high"]) == (min(expected), max(expected))
    assert (held["counts"][0], held["counts"][-1]) == tuple(expected.values())


def test_what_the_policy_says_of_a_sample_is_at_its_trained_tokens(tmp_path: Path) -> None:
    group = make_group(1, 0, np.random.default_rng(0))
    scored, other, *_ = group.samples
    scored = replace(
        scored,
        token_ids=[1, 2, 3],
        logprobs=[-1.0] * 3,
        weight_versions=[0, NOT_SAMPLED, 0],
        loss_mask=[True, False, True],
    )
    with RunLog(tmp_path, PLAIN) as log:
        samples = [replace(group, samples=[scored, other])]
        scores = {POLICY_LOGPROBS: torch.tensor([-0.5, -0.25]), ENTROPY: torch.tensor([1.0, 0.5])}
        log.samples(1, samples, policy={scored.id: scores})
    first, second = rows(tmp_path / "samples.jsonl")
    assert first[POLICY_LOGPROBS] == [-0.5, None, -0.25]
    assert POLICY_LOGPROBS not in second
    assert first[ENTROPY] == [1.0, None, 0.5]
    assert list(first)[-2:] == [POLICY_LOGPROBS, ENTROPY], "behind all others of tokens"


def test_abandoned_paths_are_in_the_row_of_their_sample(tmp_path: Path) -> None:
    """Their turns before the per-token part, which readers skip, and their tokens in it."""
    group = make_group(1, 0, np.random.default_rng(0))
    plain, sample, *_ = group.samples
    turn = Turn(start=0, end=1, text="so", stop_reason=StopReason.EOS, observed="no", reward=0.5)
    branch = Branch(
        prompt_ids=(5, 6),
        token_ids=[7, 8],
        logprobs=[-1.5, 0.0],
        weight_versions=[0, NOT_SAMPLED],
        loss_mask=[True, False],
        turns=[turn],
    )
    sample = replace(sample, branches=[branch])
    num_own = len(sample.token_ids)
    scores = {
        f"{sample.id}#1": {ENTROPY: torch.tensor([0.25])},
        sample.id: {ENTROPY: torch.full((num_own,), 0.5)},
    }
    with RunLog(tmp_path, PLAIN) as log:
        log.samples(1, [replace(group, samples=[plain, sample])], policy=scores)
    first, second = rows(tmp_path / "samples.jsonl")
    assert not {"branches", BRANCH_TOKENS}.intersection(first)
    (turns,), (tokens,) = second["branches"], second[BRANCH_TOKENS]
    assert turns == {
        "turns": [
            {"start": 0, "end": 1, "stop_reason": "eos", "reward": 0.5, "text": "so",
             "observed": [{"content": "no"}]}
        ]
    }  # fmt: skip
    assert tokens == {
        PER_TOKEN: [5, 6],
        "token_ids": [7, 8],
        "logprobs": [-1.5, 0.0],
        "weight_versions": [0, NOT_SAMPLED],
        "loss_mask": [1, 0],
        ENTROPY: [0.25, None],
    }
    assert second[ENTROPY] == [0.5] * num_own
    assert second["num_tokens"] == sample.num_sampled == num_own + 1
    names = list(second)
    assert names.index("branches") < names.index(PER_TOKEN) < names.index(BRANCH_TOKENS)


def test_groups_with_a_failure_come_first_where_asked_for(tmp_path: Path) -> None:
    groups = [make_group(1, index, np.random.default_rng(index)) for index in (1, 2, 0, 3)]
    with RunLog(tmp_path, LogConfig(to=(), samples_per_step=4)) as log:
        log.samples(1, groups, failed_first=True)
    ids = [row["id"] for row in rows(tmp_path / "samples.jsonl")]
    assert ids == [sample.id for sample in groups[2].samples]


@pytest.mark.parametrize(("order", "written"), [((1, 2, 3, 0), 3), ((0, 2, 3, 1), 0)])
def test_one_written_group_has_a_failure_where_there_is_any(
    order: tuple[int, ...], written: int, tmp_path: Path
) -> None:
    """Else the message of a rare failure would be in no file."""
    groups = [make_group(1, index, np.random.default_rng(index)) for index in order]
    failed = [any(sample.failure for sample in group.samples) for group in groups]
    assert failed == [index == 0 for index in order]
    with RunLog(tmp_path, LogConfig(to=(), samples_per_step=4)) as log:
        log.samples(1, groups)
    ids = [row["id"] for row in rows(tmp_path / "samples.jsonl")]
    assert ids == [sample.id for sample in groups[written].samples]


def test_histograms_are_of_all_samples_of_a_step(tmp_path: Path) -> None:
    groups = [make_group(1, index, np.random.default_rng(index)) for index in range(5)]
    with RunLog(tmp_path, LogConfig(to=(), samples_per_step=4)) as log:
        log.samples(1, groups)
        log.samples(2, [], split="eval")
    (row,) = rows(tmp_path / "histograms.jsonl")
    samples = [sample for group in groups for sample in group.samples]
    rewards = [sample.reward.total for sample in samples if sample.reward is not None]
    assert (row["step"], row["split"]) == (1, "train")
    found = row["reward"]
    assert (found["low"], found["high"]) == (min(rewards), max(rewards))
    assert (found["counts"][0], found["counts"][-1]) == (rewards.count(0.1), rewards.count(1.1))
    assert sum(row["completion_tokens"]["counts"]) == len(samples)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([], None),
        ([math.nan, math.inf], None),
        ([2.0, 2.0], (2, 1.5, 2.5)),
        ([0.0, 3.0, math.nan], (2, 0.0, 3.0)),
    ],
    ids=str,
)
def test_histogram(values: list[float], expected: tuple[int, float, float] | None) -> None:
    found = Histogram.of(values)
    assert (found and (sum(found.counts), found.low, found.high)) == expected
    if found is not None:
        assert len(found.edges) == len(found.counts) + 1
