"""Lengths as promised, the same requests from the same seed, files read strictly."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hone.config.bench import BenchModelConfig, DecodeConfig
from hone.config.tree import BenchEngineConfig
from hone.errors import UserError
from hone.tools.bench.workloads import decode, groups, make_workload, read_requests, uniform
from tests.tables import table

VOCAB = 1000


def test_uniform_lengths() -> None:
    drawn = [uniform(seed=seed, vocab_size=VOCAB) for seed in range(40)]
    for lengths in (
        [x for workload in drawn for x in workload.prompt_lengths],
        [x for workload in drawn for x in workload.output_lengths],
    ):
        assert len(lengths) == 40 * 256
        assert (min(lengths), max(lengths)) == (100, 1024)
        assert np.mean(lengths) == pytest.approx(562, abs=8)  # 3 standard errors
    prompts, outputs = drawn[0].prompt_lengths, drawn[0].output_lengths
    assert abs(np.corrcoef(prompts, outputs)[0, 1]) < 0.2


def test_groups_share_prompts_and_have_a_log_normal_tail() -> None:
    workload = groups(seed=3, vocab_size=VOCAB)
    assert workload.prompt_lengths == [256] * 512
    prompts = [x.prompt_ids for x in workload.requests]
    assert len(set(prompts)) == 64
    assert all(len(set(prompts[i : i + 8])) == 1 for i in range(0, 512, 8))
    lengths = np.array(
        [x for seed in range(40) for x in groups(seed=seed, vocab_size=9).output_lengths]
    )
    assert np.median(lengths) == pytest.approx(800, rel=0.02)
    uncut = np.log(lengths[lengths < 3800])
    # 3,800 lies 2.226 standard deviations out: 1.3 % are cut.
    assert (lengths == 3800).mean() == pytest.approx(0.0130, abs=0.003)
    assert np.quantile(uncut, 0.1587 / 0.987) == pytest.approx(np.log(800) - 0.7, abs=0.03)


@pytest.mark.parametrize(("batch", "context", "budget"), [(256, 1024, 8192), (4, 64, 16)])
def test_decode_is_around_the_context(batch: int, context: int, budget: int) -> None:
    cfg = DecodeConfig(batch=batch, context=context, steps=20)
    workload = decode(cfg, max_num_batched_tokens=budget, seed=0, vocab_size=VOCAB)
    (prompt,) = set(workload.prompt_lengths)
    (output,) = set(workload.output_lengths)
    assert len(workload.requests) == batch
    assert len({x.prompt_ids for x in workload.requests}) == batch
    assert prompt + output / 2 == pytest.approx(context, abs=1)
    num_prefill_steps = batch * prompt / (budget - batch)
    assert output - num_prefill_steps >= 20


def test_decode_without_room_for_a_prompt() -> None:
    cfg = DecodeConfig(batch=2, context=16, steps=40)
    with pytest.raises(UserError, match=r"decode.context=16 is too short .* to at least 22"):
        decode(cfg, max_num_batched_tokens=1000, seed=0, vocab_size=VOCAB)
    longer = DecodeConfig(batch=2, context=22, steps=40)
    decode(longer, max_num_batched_tokens=1000, seed=0, vocab_size=VOCAB)


@pytest.mark.parametrize("draw", [uniform, groups])
def test_the_seed_decides(draw: Any) -> None:
    assert draw(seed=1, vocab_size=VOCAB) == draw(seed=1, vocab_size=VOCAB)
    assert draw(seed=1, vocab_size=VOCAB) != draw(seed=2, vocab_size=VOCAB)
    requests = draw(seed=1, vocab_size=VOCAB).requests
    assert (
        len({x.id for x in requests}) == len({x.sampling.seed for x in requests}) == len(requests)
    )
    assert all(0 <= token < VOCAB for x in requests for token in x.prompt_ids)
    assert all(x.sampling.ignore_eos for x in requests)


def test_a_warm_up_has_the_lengths_and_shares_but_other_tokens() -> None:
    workload = groups(seed=0, vocab_size=VOCAB)
    other = workload.redrawn(1, VOCAB)
    assert other.prompt_lengths == workload.prompt_lengths
    assert other.output_lengths == workload.output_lengths
    old, new = ([x.prompt_ids for x in y.requests] for y in (workload, other))
    assert not set(old) & set(new)
    assert [old.index(x) for x in old] == [new.index(x) for x in new]


def write(folder: Path, *lines: object) -> Path:
    path = folder / "requests.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("".join(f"{text}\n" for text in texts))
    return path


def test_a_file_of_requests(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"prompt_tokens": 7, "max_tokens": 3, "n": 2, "temperature": 0},
        "",
        {"prompt_ids": [5, 6], "max_tokens": 4, "top_p": 0.5, "top_k": 9, "min_p": 0.1},
    )
    workload = read_requests(path, seed=0, vocab_size=VOCAB)
    first, second, third = workload.requests
    assert workload.prompt_lengths == [7, 7, 2]
    assert workload.output_lengths == [3, 3, 4]
    assert workload.longest == 10
    assert first.prompt_ids == second.prompt_ids
    assert first.sampling.seed != second.sampling.seed
    assert first.sampling.temperature == 0
    assert third.prompt_ids == (5, 6)
    chosen = third.sampling
    assert (chosen.top_p, chosen.top_k, chosen.min_p, chosen.temperature) == (0.5, 9, 0.1, 1)
    assert [x.id for x in workload.requests] == ["1/0", "1/1", "3/0"]


@table(
    "line, text",
    [
        ('{"prompt_tokens": 3', "no JSON object"),
        ("[1]", "no JSON object"),
        ({"prompt_tokens": 3}, "'max_tokens' is required"),
        ({"prompt_tokens": 3, "max_token": 3}, "did you mean max_tokens"),
        ({"max_tokens": 3, "wow": 3}, "unknown key 'wow'; allowed: prompt_tokens, prompt_ids"),
        ({"prompt_tokens": 0, "max_tokens": 3}, "prompt_tokens is 0; allowed: whole number >= 1"),
        ({"prompt_tokens": "7", "max_tokens": 3}, "prompt_tokens is '7'; allowed: whole number"),
        ({"prompt_tokens": 3, "max_tokens": True}, "max_tokens is True; allowed: whole number"),
        (
            {"prompt_tokens": 3, "max_tokens": 3, "top_p": 2},
            "top_p is 2; allowed: number > 0, <= 1",
        ),
        ({"max_tokens": 3}, "either prompt_tokens (a number) or prompt_ids"),
        ({"prompt_tokens": 1, "prompt_ids": [1], "max_tokens": 3}, "either prompt_tokens"),
        ({"prompt_ids": [], "max_tokens": 3}, "prompt_ids is []; allowed: list of whole"),
        (
            {"prompt_ids": [3, 1000], "max_tokens": 3},
            "prompt_ids holds 1000; ids are from 0 to 999",
        ),
        ({"prompt_ids": [3, -1], "max_tokens": 3}, "prompt_ids holds -1; ids are"),
        ({"prompt_ids": [3, "x"], "max_tokens": 3}, "prompt_ids is 'x'; allowed: list of whole"),
    ],
)
def test_bad_lines_are_named(line: object, text: str, tmp_path: Path) -> None:
    path = write(tmp_path, {"prompt_tokens": 1, "max_tokens": 1}, "", line)
    with pytest.raises(UserError) as caught:
        read_requests(path, seed=0, vocab_size=VOCAB)
    assert f"{path}, line 3: " in str(caught.value)
    assert text in str(caught.value)


def test_an_empty_file(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"requests\.jsonl holds no requests"):
        read_requests(write(tmp_path, ""), seed=0, vocab_size=VOCAB)


def test_workloads_by_name(tmp_path: Path) -> None:
    def make(name: str):
        cfg = BenchEngineConfig(model=BenchModelConfig(shape="qwen3-0.6b"), workload=name)
        return make_workload(cfg, VOCAB)

    assert make("uniform") == uniform(seed=0, vocab_size=VOCAB)
    assert make("groups") == groups(seed=0, vocab_size=VOCAB)
    assert len(make("decode").requests) == 256
    path = write(tmp_path, {"prompt_tokens": 1, "max_tokens": 1})
    assert make(str(path)).name == "requests.jsonl"


def test_a_request_that_does_not_fit_is_named(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        {"prompt_tokens": 9, "max_tokens": 7},
        {"prompt_tokens": 9, "max_tokens": 8},
    )
    workload = read_requests(path, seed=0, vocab_size=VOCAB)
    workload.check_fits(17, limit="the model's context length")
    with pytest.raises(
        UserError, match=r"2/0 has 9 prompt and 8 .* the model's context length is 16"
    ):
        workload.check_fits(16, limit="the model's context length")
