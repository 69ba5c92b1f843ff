"""Rows with a token that a model lacks are refused by name before any weight is read; what an
environment answers fails its sample alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from tests.loops.conftest import MakeConfig

from hone.config.tree import DPOConfig, GenerateConfig, RewardModelingConfig, SFTConfig
from hone.data.arithmetic import ALPHABET
from hone.errors import UserError
from hone.loops import reinforce, supervised
from hone.loops.generation import run_generation
from hone.loops.inputs import Tools, prompts_of, transcripts_of, turns_of
from hone.loops.launch import plan_run
from hone.loops.workers import thread_pools
from hone.models.tiny import make_char_tokenizer, make_tiny_model
from hone.models.tokenizer import load_tokenizer
from hone.rollout.episodes import Episodes
from hone.types import (
    Completion,
    FailureKind,
    Observation,
    Prompt,
    Request,
    Sample,
    SamplingParams,
    StopReason,
)

SIZE = 10
"""Tokens of the model; its tokenizer has more."""


@pytest.fixture
def narrow(tmp_path: Path) -> str:
    tokenizer = make_char_tokenizer(ALPHABET)
    assert len(tokenizer) > SIZE
    return str(make_narrow(tmp_path / "narrow"))


def make_narrow(folder: Path, **fields: Any) -> Path:
    return make_tiny_model(
        folder,
        tokenizer=make_char_tokenizer(ALPHABET),
        vocab_size=SIZE,
        hidden_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        intermediate_size=32,
        max_position_embeddings=64,
        weights=False,
        **fields,
    )


def refuses(call: Callable[[], object], *said: str) -> None:
    with pytest.raises(UserError) as caught:
        call()
    for text in said:
        assert text in str(caught.value)


def test_rows_are_refused_where_they_are_read(
    narrow: str, make_config: MakeConfig, sft_config: SFTConfig, tmp_path: Path
) -> None:
    cfg = make_config(model={"path": narrow})
    told = f"and the model at '{narrow}' has {SIZE}: its tokenizer has more"
    refuses(lambda: prompts_of(cfg, load_tokenizer(cfg.model)), "row train:", told)

    supervised_cfg = sft_config.model_copy(update={"model": cfg.model})
    start = Mock(plan=plan_run(supervised_cfg, "cpu", world_size=1))
    refuses(lambda: supervised.build_run(supervised_cfg, start).__enter__(), told)

    tree = {
        "model": {"path": narrow},
        "run": {"device": "cpu"},
        "data": {"train": cfg.data.train, "chat": "never", "max_prompt_tokens": 8},
        "generation": {"max_completion_tokens": 4},
        "reward": {"functions": [{"fn": "exact_match"}]},
        "output": tmp_path / "out.jsonl",
    }
    refuses(lambda: run_generation(GenerateConfig.model_validate(tree)), "row train:1 ", told)


def test_models_that_read_what_the_policy_writes_have_all_its_tokens(
    narrow: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    told = (
        f"its model has {SIZE} tokens, and 7 of the policy's lie beyond, the first is token {SIZE}"
    )
    for sections in (
        {"teacher": {"path": narrow}},
        {"critic": {"path": narrow}, "algorithm": {"advantage": "gae"}},
    ):
        cfg = make_config(**sections)
        start = Mock(plan=plan_run(cfg, "cpu", world_size=1))
        run = reinforce.build_run(cfg, start, thread_pools)
        refuses(run.__enter__, told)

    judge = make_narrow(tmp_path / "judge")
    config = judge / "config.json"
    config.write_text(config.read_text().replace("ForCausalLM", "ForSequenceClassification"))
    cfg = make_config(reward={"model": {"path": str(judge)}})
    prompts = prompts_of(cfg, load_tokenizer(cfg.model)).train.first_rows()
    plan = plan_run(cfg, "cpu", world_size=1)
    refuses(lambda: transcripts_of(plan, prompts), "reward.model.path", f"its model has {SIZE}")


def test_pairs_are_refused_where_they_are_read(narrow: str, tmp_path: Path) -> None:
    file = tmp_path / "pairs.jsonl"
    file.write_text('{"prompt": "11", "chosen": "2", "rejected": "9"}')
    tree = {"model": {"path": narrow}, "data": {"train": [{"path": str(file)}], "chat": "never"}}
    tree |= {"run": {"dir": tmp_path / "run", "steps": 1, "device": "cpu"}}
    told = f"has the token '9', number 15, and the model at '{narrow}' has {SIZE}"
    for kind in (DPOConfig, RewardModelingConfig):
        cfg = kind.model_validate(tree)
        start = Mock(plan=plan_run(cfg, "cpu", world_size=1))
        run = supervised.build_run(cfg, start)
        refuses(run.__enter__, "row pairs:1 ", told)


def answered(render: Any, observation: Observation) -> tuple[Sample, Request | None]:
    """A sample whose second turn the environment has answered, and the request of the third."""
    prompt = Prompt(id="train:7", token_ids=(3,), text="0")
    episodes = Episodes(decode=str, max_turns=4, render=render)
    first = Request(id="0/0", prompt_ids=(3,), sampling=SamplingParams(max_tokens=32))
    sample = episodes.begin(prompt, "0/0", number=0)
    request = None
    for said in (Observation("0", role=None), observation):
        drawn = Completion(
            request_id="0/0",
            token_ids=[4],
            logprobs=[0.0],
            weight_versions=[0],
            stop_reason=StopReason.STOP_STRING,
        )
        episodes.take(sample, drawn, max_tokens=32)
        sample.observation = said
        request = episodes.next_request(sample, first, max_tokens=32)
    return sample, request


def test_an_answer_with_a_token_that_the_model_lacks_fails_its_sample(
    narrow: str, make_config: MakeConfig
) -> None:
    """The engine would refuse the request of the turn after it, and end the run."""
    cfg = make_config(model={"path": narrow}, data={"chat": "never"})
    render = turns_of(cfg, load_tokenizer(cfg.model), tools=Tools())
    told = f"has the token '9', number 15, and the model has {SIZE}: its tokenizer has more"
    for said, text in ((Observation("9", role=None), " '9',"), (Observation(token_ids=(15,)), "")):
        sample, request = answered(render, said)
        assert (request, sample.failure) == (None, FailureKind.INVALID)
        assert told in sample.failure_detail
        assert "env: row train:7: what the environment answers to turn 2" in sample.failure_detail
        assert text in sample.failure_detail
        assert len(sample.token_ids) == 3  # nothing of it is appended
    sample, request = answered(render, Observation("0", role=None))
    assert sample.failure is None
    assert request is not None
