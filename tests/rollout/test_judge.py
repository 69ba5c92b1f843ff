"""A reward model: its scores, what it reads, when it is asked, and what comes of its number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, PreTrainedTokenizerBase

from hone.data.arithmetic import ALPHABET
from hone.data.settings import DataConfig, SourceConfig
from hone.distributed.pool import WorkersLostError
from hone.errors import UserError
from hone.models.load import load_value_model
from hone.models.settings import ModelConfig
from hone.models.tiny import make_char_tokenizer
from hone.rewards.scorer import Scorer
from hone.rewards.settings import (
    REWARD_MODEL,
    RewardConfig,
    RewardFunctionConfig,
    RewardModelConfig,
)
from hone.rollout.judge import RewardModel, RewardModelScorer
from hone.rollout.transcripts import Transcripts
from hone.types import FailureKind, Prompt, Sample, StopReason
from tests.tables import table
from tests.tiny_runs import make_classifier

CHAT = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}<|im_end|>\n{% endfor %}"
CHAT += "{% if add_generation_prompt %}<assistant>{% endif %}"


def reward_model(folder: Path) -> RewardModel:
    cfg = ModelConfig(path=str(folder))
    return RewardModel(load_value_model(cfg, device="cpu", seed=0))


@pytest.mark.parametrize("family", ["qwen3", "llama", "gemma2"])
def test_scores_are_those_of_transformers_on_each_sequence_alone(
    family: str, tmp_path: Path
) -> None:
    """Also where the end token pads, as it does in many models: they are read before it."""
    tokenizer = make_char_tokenizer(ALPHABET)
    folder = make_classifier(tmp_path, family=family, pad=str(tokenizer.eos_token))
    end = tokenizer.eos_token_id
    generator = torch.Generator().manual_seed(1)
    sequences = [
        torch.randint(4, len(ALPHABET), (length,), generator=generator).tolist() + [end] * ends
        for length, ends in ((5, 1), (30, 0), (1, 0), (17, 2), (64, 0))
    ]
    found = reward_model(folder).begin(sequences).result()
    twin = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        expected = [float(twin(torch.tensor([ids])).logits[0, 0]) for ids in sequences]
    assert max(expected) - min(expected) > 0.1
    assert found == pytest.approx(expected, abs=1e-5)


# -- what it reads -------------------------------------------------------------------------------


def data(**keys: Any) -> DataConfig:
    return DataConfig(train=(SourceConfig(path="train.jsonl"),), **keys)


def prompt(asked: Any = "1+2=", **fields: Any) -> Prompt:
    return Prompt(id="train:1", token_ids=(1, 2), text="1+2=", unrendered=asked, **fields)


def spelt(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    return str(tokenizer.decode(list(ids), clean_up_tokenization_spaces=False))


def chatting(template: str | None = CHAT) -> PreTrainedTokenizerBase:
    tokenizer = make_char_tokenizer(ALPHABET + "<>\n" + "abcdefghijklmnopqrstuvwxyz")
    tokenizer.chat_template = template
    return tokenizer


MESSAGES = [{"role": "system", "content": "9"}, {"role": "user", "content": "1+2="}]


@table(
    "asked, keys, is_truncated, expected",
    [
        ("1+2=", {"chat": "never"}, False, "1+2=3{end}"),
        ("1+2=", {"chat": "never"}, True, "1+2=3"),
        ("1+2=", {"chat": "never", "prompt_template": "{prompt}{kind}"}, False, "1+2=73{end}"),
        ("1+2=", {}, False, "<user>1+2={end}\n<assistant>3{end}\n"),
        (MESSAGES, {}, False, "<system>9{end}\n<user>1+2={end}\n<assistant>3{end}\n"),
        (MESSAGES, {}, True, "<system>9{end}\n<user>1+2={end}\n<assistant>3"),
        (
            "1+2=",
            {"system_prompt": "5"},
            False,
            "<system>5{end}\n<user>1+2={end}\n<assistant>3{end}\n",
        ),
    ],
)
def test_it_reads_text_in_its_own_tokens_and_template(
    asked: Any, keys: dict[str, Any], is_truncated: bool, expected: str
) -> None:
    tokenizer = chatting()
    found = Transcripts(tokenizer, data(**keys), max_tokens=64, vocab_size=99, path="judge").of(
        prompt(asked, metadata={"kind": "7"}), "3", is_truncated=is_truncated
    )
    assert spelt(tokenizer, found) == expected.format(end=tokenizer.eos_token)


@table(
    "tokenizer, asked, keys, said",
    [
        (chatting(None), MESSAGES, {}, "list of chat messages"),
        (chatting(None), "1", {"system_prompt": "5"}, "system_prompt needs a chat"),
        (chatting("{{ raise_exception('only 3 turns') }}"), "1", {}, "only 3 turns"),
    ],
)
def test_what_it_cannot_read_is_said_before_the_run(
    tokenizer: PreTrainedTokenizerBase, asked: Any, keys: dict[str, Any], said: str
) -> None:
    with pytest.raises(UserError, match=rf"reward.model.path='judge': .*{said}"):
        Transcripts(tokenizer, data(**keys), max_tokens=64, vocab_size=99, path="judge").check(
            prompt(asked)
        )


# -- when it is asked ----------------------------------------------------------------------------


class Fake:
    """Scores a sequence by its length, and by the pass that it is in."""

    def __init__(self, scores: dict[int, float] | None = None) -> None:
        self.passes: list[list[int]] = []
        self.by_length = scores or {}

    def begin(self, sequences: Sequence[Sequence[int]]) -> Future[list[float]]:
        self.passes.append([len(ids) for ids in sequences])
        noise = len(self.passes) * 1e-3
        done: Future[list[float]] = Future()
        done.set_result([self.by_length.get(len(ids), len(ids) + noise) for ids in sequences])
        return done


def judge(
    fake: Any,
    *,
    functions: Sequence[str | dict[str, Any]] = (),
    weight: float = 1.0,
    budget: int = 1000,
    clip: tuple[float, float] | None = None,
) -> RewardModelScorer:
    model = RewardModelConfig(path="judge", weight=weight, max_tokens_per_forward=budget)
    rewards = RewardConfig(
        functions=tuple(
            RewardFunctionConfig(weight=2.0, **({"fn": fn} if isinstance(fn, str) else fn))
            for fn in functions
        ),
        model=model,
        clip=clip,
        num_workers=1,
    )
    transcripts = Transcripts(
        make_char_tokenizer(ALPHABET),
        data(chat="never"),
        max_tokens=64,
        vocab_size=99,
        path="judge",
    )
    return RewardModelScorer(fake, transcripts, Scorer(rewards, max_completion_tokens=64), rewards)


def sample(number: int, text: str, *, answer: str = "3") -> Sample:
    return Sample(
        id=f"1-0/{number}",
        prompt=prompt(answer=answer),
        index=number,
        token_ids=[1] * len(text),
        logprobs=[0.0] * len(text),
        weight_versions=[0] * len(text),
        loss_mask=[True] * len(text),
        stop_reason=StopReason.EOS,
        text=text,
    )


def scored(own: RewardModelScorer, samples: Sequence[Sample]) -> list[Sample]:
    for one in samples:
        own.submit(one)
    found: list[Sample] = []
    while own.pending:
        found += own.poll(0.01)
    return sorted(found, key=lambda one: one.index)


def test_the_reward_is_the_weighted_sum() -> None:
    """A sequence is the prompt of 4 tokens, the completion and the end."""
    found = scored(
        judge(Fake({6: -1.5, 7: 4.0}), functions=["exact_match"], weight=0.5),
        [sample(0, "3"), sample(1, "4"), sample(2, "33")],
    )
    parts = [dict(one.reward.parts) for one in found if one.reward]
    assert parts == [
        {"exact_match": 1.0, REWARD_MODEL: -1.5},
        {"exact_match": 0.0, REWARD_MODEL: -1.5},
        {"exact_match": 0.0, REWARD_MODEL: 4.0},
    ]
    assert [one.reward.total for one in found if one.reward] == [2 - 0.75, -0.75, 2.0]


def test_the_whole_sum_is_clipped_and_no_part_of_it() -> None:
    found = scored(
        judge(Fake({6: -1.5, 7: 9.0}), functions=["exact_match"], clip=(0.0, 1.0)),
        [sample(0, "3"), sample(1, "4"), sample(2, "33")],
    )
    assert [one.reward.total for one in found if one.reward] == [0.5, 0.0, 1.0]
    assert found[2].reward is not None
    assert found[2].reward.parts[REWARD_MODEL] == 9.0


def test_it_scores_what_no_function_does(tmp_path: Path) -> None:
    """Alone, and beside functions that say nothing of a sample, or of all of a prompt."""
    file = tmp_path / "silent.py"
    file.write_text(
        "def none(completion):\n    return None\n"
        "def all(completions):\n    return [None] * len(completions)\n"
    )
    silent: list[Any] = [f"{file}:none", {"fn": f"{file}:all", "whole_groups": True}]
    for functions in ([], silent[:1], silent[1:], silent):
        own = judge(Fake({6: 0.25}), functions=functions)
        (found,) = scored(own, [sample(0, "3")])
        assert found.reward is not None
        assert (found.reward.total, found.reward.parts) == (0.25, {REWARD_MODEL: 0.25})


@table("score", [math.nan, math.inf, -math.inf])
def test_what_is_no_number_fails_the_sample(score: float) -> None:
    """Of one that was seen before, too, and whatever the functions say."""
    own = judge(Fake({6: score}), functions=["exact_match"])
    found = scored(own, [sample(0, "3"), sample(1, "33"), sample(2, "3")])
    assert [one.valid for one in found] == [False, True, False]
    for one in (found[0], found[2]):
        assert (one.reward, one.failure) == (None, FailureKind.INVALID)
        assert f"reward_model: the score is {score}" in one.failure_detail


def test_what_is_longer_than_its_context_fails_and_is_never_cut() -> None:
    fake = Fake()
    found = scored(judge(fake), [sample(0, "3" * 60), sample(1, "3" * 59)])
    assert [one.valid for one in found] == [False, True]
    assert "65 tokens, more than its context of 64" in found[0].failure_detail
    assert fake.passes == [[64]]


def test_a_failure_of_the_engine_stays_what_it_was() -> None:
    lost = sample(0, "3")
    lost.failure, lost.failure_detail = FailureKind.ENGINE, "no room"
    fake = Fake()
    (found,) = scored(judge(fake), [lost])
    assert (found.failure, found.failure_detail, found.reward) == ("engine", "no room", None)
    assert fake.passes == []


def test_equal_completions_earn_the_same_whatever_pass_they_are_in() -> None:
    fake = Fake()
    own = judge(fake, budget=12)
    texts = ["3", "44", "3", "555", "44", "3"]
    for number, text in enumerate(texts):
        own.submit(sample(number, text))
    rewards: dict[str, set[float]] = {}
    for one in own.poll(0.01):
        assert one.reward is not None
        rewards.setdefault(one.text, set()).add(one.reward.total)
    assert {text: len(totals) for text, totals in rewards.items()} == {"3": 1, "44": 1, "555": 1}
    assert sorted(chain(*fake.passes)) == [6, 7, 8], "each once"


@table(
    "budget, lengths, passes",
    [
        (1000, [1, 2, 3], [[6, 7, 8]]),
        (16, [1, 2, 3], [[6, 7], [8]]),
        (9, [1, 3, 2], [[6], [8], [7]]),
        (1, [1, 9], [[6], [14]]),
    ],
)
def test_passes_keep_to_their_budget(
    budget: int, lengths: list[int], passes: list[list[int]]
) -> None:
    """One token is added to each; a sequence above the budget has a pass of its own."""
    fake = Fake()
    scored(judge(fake, budget=budget), [sample(n, "3" * x) for n, x in enumerate(lengths)])
    assert fake.passes == passes


def test_a_pass_is_made_when_it_is_full_or_after_some_polls() -> None:
    """As long as the caller has something else to do, and so does not say that it waits."""
    fake = Fake()
    own = judge(fake, budget=16)
    own.submit(sample(0, "3"))
    assert own.poll() == []
    own.submit(sample(1, "33"))
    own.submit(sample(2, "333"))
    assert [one.index for one in own.poll()] == [0, 1]
    polls = 0
    while not (found := own.poll()):
        polls += 1
        assert polls < 100
    assert polls == 31
    assert [one.index for one in found] == [2]
    assert fake.passes == [[6, 7], [8]]
    assert own.stats().model_s > 0


def test_what_is_cancelled_never_comes_back() -> None:
    fake = Fake()
    own = judge(fake, functions=["exact_match"])
    own.submit(sample(0, "3"))
    own.cancel()
    assert (own.pending, own.poll(0.01), fake.passes) == (0, [], [])
    (found,) = scored(own, [sample(0, "33")])
    assert found.text == "33"


class Slow(Fake):
    """Answers when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[tuple[Future[list[float]], list[float]]] = []

    def begin(self, sequences: Sequence[Sequence[int]]) -> Future[list[float]]:
        scoring: Future[list[float]] = Future()
        self.open.append((scoring, super().begin(sequences).result()))
        return scoring

    def answer(self, number: int) -> None:
        scoring, scores = self.open[number]
        scoring.set_result(scores)


def test_what_is_scored_elsewhere_comes_when_it_is_there() -> None:
    """The caller is not held up, and an equal sequence waits for the same answer."""
    fake = Slow()
    own = judge(fake, budget=7)
    own.submit(sample(0, "3"))
    own.submit(sample(1, "44"))
    assert own.poll(0.01) == []
    own.submit(sample(2, "3"))
    assert own.poll(0.01) == []
    assert fake.passes == [[6], [7]]
    fake.answer(1)
    assert [one.index for one in own.poll(0.01)] == [1]
    fake.answer(0)
    found = own.poll(0.01)
    assert [one.index for one in found] == [0, 2]
    assert found[0].reward == found[1].reward
    assert own.pending == 0


def test_an_answer_to_what_was_cancelled_is_nobodys() -> None:
    fake = Slow()
    own = judge(fake)
    own.submit(sample(0, "3"))
    assert own.poll(0.01) == []
    own.cancel()
    own.submit(sample(0, "3"))
    assert own.poll(0.01) == []
    fake.answer(0)
    assert own.poll(0.01) == []
    fake.answer(1)
    (found,) = own.poll(0.01)
    assert found.reward is not None
    assert found.reward.total == pytest.approx(6.002)


def test_who_scores_elsewhere_and_is_lost_ends_the_run_with_the_cause() -> None:
    fake = Slow()
    own = judge(fake)
    own.submit(sample(0, "3"))
    assert own.poll(0.01) == []
    fake.open[0][0].set_exception(WorkersLostError("reward_model 0 is lost"))
    with pytest.raises(WorkersLostError, match="reward_model 0"):
        own.poll(0.01)
