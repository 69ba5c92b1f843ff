"""A reward model: its scores, what it reads, when it is asked, and what comes of its number."""

from __future__ import annotations

import math
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import replace
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
from hone.model_input import Content, ModelInput
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
from hone.rollout.settings import EnvConfig
from hone.rollout.transcripts import Transcript, Transcripts
from hone.types import FailureKind, Prompt, Sample, StopReason, Turn
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
    asked = [Transcript(tuple(ids)) for ids in sequences]
    found = reward_model(folder).begin(asked).result()
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
    tokenizer = make_char_tokenizer(ALPHABET + "</>\n" + "abcdefghijklmnopqrstuvwxyz")
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
    assert spelt(tokenizer, found.token_ids) == expected.format(end=tokenizer.eos_token)


def turn(text: str, observed: str = "", messages: Sequence[Any] = (), **fields: Any) -> Turn:
    values: dict[str, Any] = {"start": 0, "end": 0, "stop_reason": StopReason.EOS} | fields
    return Turn(text=text, observed=observed, messages=tuple(messages), **values)


TOOL = {"role": "tool", "content": "8"}
USER = {"role": "user", "content": "4"}
SAYS = "<assistant>3{end}\n<tool>8{end}\n"
OPENED = {"messages": (*MESSAGES, USER)}
SHOWN: dict[str, Any] = {"messages": (MESSAGES[1],)}


@table(
    "fields, turns, keys, expected",
    [
        # Its own system prompt and template are in the messages that were rendered for the policy.
        (OPENED, [turn("whole")], {}, "<system>9{end}\n<user>1+2={end}\n<user>4{end}\n"
         "<assistant>whole{end}\n"),
        (SHOWN, [turn("3", "~", [TOOL]), turn("5")], {"system_prompt": "7"},
         f"<user>1+2={{end}}\n{SAYS}<assistant>5{{end}}\n"),
        (SHOWN, [turn("3", "~", [TOOL]), turn("5", "6"), turn("7", "~", [TOOL, USER]), turn("2")],
         {"prompt_template": "{prompt}!"},
         f"<user>1+2={{end}}\n{SAYS}<assistant>567{{end}}\n<tool>8{{end}}\n<user>4{{end}}\n"
         "<assistant>2{end}\n"),
        # The last turn was cut by the longest completion, or whole where turns were used up.
        (SHOWN, [turn("3", "~", [TOOL]), turn("5", stop_reason=StopReason.LENGTH)], {},
         f"<user>1+2={{end}}\n{SAYS}<assistant>5"),
        # What the environment says in text alone is part of the policy's message.
        (SHOWN, [turn("3", "=1="), turn("5")], {}, "<user>1+2={end}\n<assistant>whole{end}\n"),
        # Without a template on one side it is text: what the policy was shown.
        ({}, [turn("3", "~=1="), turn("5")], {}, "<user>1+2={end}\n<assistant>whole{end}\n"),
        (SHOWN, [turn("3", "~", [TOOL]), turn("5")], {"chat": "never"}, "1+2=whole{end}"),
        (SHOWN, [turn("3", "~", [TOOL]), turn("5", stop_reason=StopReason.LENGTH)],
         {"chat": "never"}, "1+2=whole"),
        # Reasoning that the template has opened is closed in each of the turns.
        (SHOWN | {"text": "1<think>"}, [turn("3</think>4", "<think>", [TOOL]), turn("5</think>6")],
         {}, "<user>1+2={end}\n<assistant><think>3</think>4{end}\n<tool>8{end}\n"
         "<assistant><think>5</think>6{end}\n"),
    ],
)  # fmt: skip
def test_it_reads_an_episode_as_a_dialogue(
    fields: dict[str, Any], turns: list[Turn], keys: dict[str, Any], expected: str
) -> None:
    """Also one that its limit of turns has ended."""
    tokenizer = chatting()
    transcripts = Transcripts(tokenizer, data(**keys), max_tokens=64, vocab_size=99, path="judge")
    episode = sample(0, "whole")
    episode.prompt, episode.turns = replace(prompt(), **fields), turns
    episode.stop_reason = StopReason.MAX_TURNS
    found = transcripts.of_sample(episode)
    assert spelt(tokenizer, found.token_ids) == expected.format(end=tokenizer.eos_token)


def test_what_an_episode_says_in_ids_is_not_left_out_of_a_dialogue() -> None:
    transcripts = Transcripts(chatting(), data(), max_tokens=64, vocab_size=99, path="judge")
    turns = [turn("3", end=1), turn("4", "~", [TOOL], start=3, end=4), turn("5", start=6, end=7)]
    shown = replace(prompt(), **SHOWN)
    with pytest.raises(UserError, match="answered a turn with token_ids and another one with mess"):
        transcripts.of(shown, "whole", is_truncated=False, turns=turns)
    assert transcripts.of(shown, "whole", is_truncated=False, turns=turns[:1])


def test_what_an_environment_says_is_rendered_before_the_run() -> None:
    """By the reward model's template too, which may leave out a role."""
    template = CHAT.replace("in messages", "in messages if m.role != 'tool'")
    transcripts = Transcripts(chatting(template), data(), max_tokens=64, vocab_size=99, path="j")
    shown = replace(prompt(), **SHOWN)
    transcripts.check(shown, [turn("3", "~", [USER])])
    with pytest.raises(UserError, match=r"reward.model.path='j': .*leaves out message 3, of"):
        transcripts.check(shown, [turn("3", "~", [TOOL])])


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
        self.busy_s = 0.0

    def begin(self, sequences: Sequence[Transcript]) -> Future[list[float]]:
        lengths = [len(sequence.token_ids) for sequence in sequences]
        self.passes.append(lengths)
        self.busy_s += 1.5
        noise = len(self.passes) * 1e-3
        done: Future[list[float]] = Future()
        done.set_result([self.by_length.get(length, length + noise) for length in lengths])
        return done


def judge(
    fake: Any,
    *,
    functions: Sequence[str | dict[str, Any]] = (),
    weight: float = 1.0,
    budget: int = 1000,
    clip: tuple[float, float] | None = None,
    env: EnvConfig | None = None,
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
        make_char_tokenizer(ALPHABET + "abcdefghijklmnopqrstuvwxyz"),
        data(chat="never"),
        max_tokens=64,
        vocab_size=99,
        path="judge",
    )
    scorer = Scorer(rewards, max_completion_tokens=64, env=env)
    return RewardModelScorer(fake, transcripts, scorer, rewards)


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
    assert own.stats().model_s == 3.0


class OfImages:
    """Transcripts that have the same ids, and the image that a sample names."""

    max_tokens = 64

    def of_sample(self, sample: Sample) -> Transcript:
        content = Content(kind="image", hash=sample.text, start=1, num_tokens=2)
        return Transcript((1, 2, 2, 3), ModelInput((content,)))


def test_equal_ids_with_other_images_are_other_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hone.rollout.judge.prefetch_pixels", lambda *_: None)  # there are none
    fake = Fake()
    own = judge(fake)
    own._transcripts = OfImages()  # pyright: ignore[reportAttributeAccessIssue]
    scored(own, [sample(0, "a"), sample(1, "b"), sample(2, "a")])
    assert fake.passes == [[4, 4]]


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

    def begin(self, sequences: Sequence[Transcript]) -> Future[list[float]]:
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


# -- with environments and functions of whole groups -----------------------------------------------

GAME = """
def answer(text, turns):
    if text == "bad":
        raise ValueError("of this one")
    if text == "more" and len(turns) == 1:
        return "1"
    return 0.25 if text == "done" else None


class Stateless:
    def step(self, episode):
        return answer(episode.turn, episode.turns)


class Live:
    def start(self, row):
        self.turns = []

    def step(self, action):
        self.turns.append(action.text)
        return answer(action.text, self.turns)


def rank(completions, **columns):
    return [sum(len(x) < len(text) for x in completions) for text in completions]


def own(completion):
    return len(completion)
"""


def finished(own: RewardModelScorer) -> list[Sample]:
    found: list[Sample] = []
    while own.pending:
        found += own.poll(0.01)
    return sorted(found, key=lambda one: one.index)


def of_turns(number: int, *texts: str) -> Sample:
    one = sample(number, "".join(texts))
    one.turns, one.must_end = [turn(text) for text in texts], False
    return one


@pytest.mark.parametrize("name", ["Stateless", "Live"])
def test_it_scores_an_episode_once_its_environment_has_ended_it(tmp_path: Path, name: str) -> None:
    """Whoever else scores it, and never a turn that is not the last one, nor one that has failed.
    A prompt has 4 tokens, and one ends the text."""
    file, fake = tmp_path / "game.py", Fake({9: 2.0, 8: -1.0, 12: 8.0})
    file.write_text(GAME)
    env = EnvConfig(path=f"{file}:{name}", retries=0)
    functions: list[Any] = [f"{file}:own", {"fn": f"{file}:rank", "whole_groups": True}]
    own = judge(fake, functions=functions, weight=0.5, env=env, clip=(-9.0, 21.0))
    if name == "Live":
        own.submit(*(of_turns(number) for number in range(5)))
        assert [one.observation is not None for one in finished(own)] == [True] * 5
        assert fake.passes == []
    texts = ["done", "one", "more", "bad", "one"]
    own.submit(*(of_turns(number, text) for number, text in enumerate(texts)))
    done, one, more, bad, again = finished(own)
    # Sessions end in any order.
    assert sorted(lengths for lengths in fake.passes for lengths in lengths) == [8, 9]
    assert done.reward is not None
    assert (done.reward.total, dict(done.reward.parts)) == (1.25, {"env": 0.25, REWARD_MODEL: 2.0})
    assert not done.awaits_group
    assert (bad.failure, bad.reward) == (FailureKind.EXCEPTION, None)
    assert (more.observation is not None, more.reward) == (True, None)
    for waiting in (one, again):
        assert waiting.awaits_group
        assert waiting.reward is not None
        assert waiting.reward.total == 5.5
    more.observation, more.text = None, "more1on"
    more.turns.append(turn("on"))
    own.submit(more)
    assert [each.index for each in finished(own)] == [2]
    assert more.awaits_group
    assert more.reward is not None
    assert more.reward.total == 18.0, "not clipped before all is there"
    num_passes = len(fake.passes)
    own.compare([one, more, again])
    assert own.pending == 3
    assert finished(own) == [one, more, again]
    assert len(fake.passes) == num_passes
    assert [each.reward and each.reward.total for each in (one, more, again)] == [5.5, 21.0, 5.5]
    assert more.reward is not None
    assert dict(more.reward.parts) == {"own": 7.0, REWARD_MODEL: 8.0, "rank": 2.0}
    assert not any(each.awaits_group for each in (one, more, again))


def test_whole_groups_without_an_environment_wait_for_it_too(tmp_path: Path) -> None:
    file, fake = tmp_path / "game.py", Slow()
    file.write_text(GAME)
    own = judge(fake, functions=[{"fn": f"{file}:rank", "whole_groups": True}], clip=(0.0, 7.0))
    samples = [sample(0, "3"), sample(1, "33")]
    own.submit(*samples)
    for _ in range(20):
        assert own.poll(0.01) == []
    fake.answer(0)
    assert finished(own) == samples
    assert all(one.awaits_group for one in samples)
    own.compare(samples)
    assert finished(own) == samples
    assert [one.reward and one.reward.total for one in samples] == [pytest.approx(6.001), 7.0]


def test_what_it_cannot_read_leaves_the_group(tmp_path: Path) -> None:
    file = tmp_path / "game.py"
    file.write_text(GAME)
    own = judge(Fake(), functions=[{"fn": f"{file}:rank", "whole_groups": True}])
    long, short = sample(0, "3" * 60), sample(1, "3")
    own.submit(long, short)
    assert finished(own) == [long, short]
    assert long.failure is FailureKind.INVALID
    assert (long.awaits_group, short.awaits_group) == (False, True)


def test_it_is_the_whole_reward_of_what_the_environment_leaves_to_it(tmp_path: Path) -> None:
    file = tmp_path / "game.py"
    file.write_text(GAME)
    own = judge(Fake({8: -1.0}), env=EnvConfig(path=f"{file}:Stateless"))
    own.submit(one := of_turns(0, "one"))
    assert finished(own) == [one]
    assert one.reward is not None
    assert (one.reward.total, dict(one.reward.parts)) == (-1.0, {REWARD_MODEL: -1.0})
