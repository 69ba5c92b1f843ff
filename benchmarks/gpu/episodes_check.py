"""What an environment costs: episodes of several turns, with an environment that does no work,
against single turns of as many tokens.

    python -m benchmarks.gpu.episodes_check --shape qwen3-0.6b
    python -m benchmarks.gpu.episodes_check --shape tiny --episodes 16 --turn-tokens 16 (on a CPU)

Engine, runner, scorer, workers and the renderer of turns are those of a run. The weights are
random, and each turn takes all tokens that it may. Single turns sample as many tokens as episodes
of several turns, and get as many: what the environment would say is part of their prompts. In each
round all kinds are played, in another order, and compared with the single turns of this round,
which are played at its start and at its end.

    stateless, session, tools   all turns have the same length, so that all episodes wait for the
                                environment at the same time, and the GPU with them
    ..., mixed                  the turns have different lengths, as those of a trained policy

Random weights call no tools: the last tokens of each turn of `tools` are replaced by a call.

The first table has tokens a second and their ratio to single turns; the second one where the
seconds of the driver went. Exits with 1 where an episode fails, and where turns of different
lengths have less than `--least` times the speed of single turns.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, cast

import torch
from benchmarks.gpu.sections import Run
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hone.data.settings import DataConfig
from hone.data.turns import TurnRenderer
from hone.engine.engine import EmbeddedEngine
from hone.engine.settings import EngineConfig
from hone.models.load import load_model
from hone.models.settings import ModelConfig
from hone.models.tiny import CHAT_TEMPLATE, SHAPES, make_tiny_model
from hone.models.tokenizer import decoder
from hone.rewards.scorer import Scorer
from hone.rewards.settings import RewardConfig, RewardFunctionConfig
from hone.rollout.episodes import Episodes
from hone.rollout.runner import Runner, RunningGroup
from hone.rollout.settings import EnvConfig
from hone.types import Completion, PerToken, Prompt, SamplingParams

SAID = "the value is 3"
CODE = f'''
import random

from hone.envs import Observation

SAID = "{SAID}"


def turn_lengths(seed, turns, tokens):
    """Lengths of a pair of turns add up to twice the usual one."""
    drawn, lengths = random.Random(seed), []
    while len(lengths) < turns:
        lengths.append(drawn.randint(tokens // 2, tokens * 3 // 2))
        lengths.append(2 * tokens - lengths[-1])
    return lengths


class Stateless:
    def __init__(self, turns=0, tokens=0):
        self.turns, self.tokens = turns, tokens

    def step(self, episode):
        if episode.must_end:
            return 1.0
        if not self.tokens:
            return SAID
        lengths = turn_lengths(episode.task, self.turns, self.tokens)
        return Observation(SAID, max_tokens=lengths[len(episode.turns)])


class Session:
    def __init__(self, turns=0, tokens=0):
        self.turns, self.tokens = turns, tokens

    def start(self, row):
        if not self.tokens:
            return None
        self.lengths = turn_lengths(row.task, self.turns, self.tokens)
        return Observation(max_tokens=self.lengths[0])

    def step(self, action):
        if action.must_end:
            return 1.0
        if not self.tokens:
            return SAID
        return Observation(SAID, max_tokens=self.lengths[action.index + 1])


def look_up(name: str) -> str:
    """Find a value.

    Args:
        name: What it is called
    """
    return SAID


def score(completion):
    return 1.0
'''
CALL = '<tool_call>{"name": "look_up", "arguments": {"name": "x"}}</tool_call>'
GROUP = 8
LEAST = 0.97
PARTS = ("engine", "submit", "decode", "render", "ask", "answers")


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of episodes. It has an environment or tools, or neither and one turn."""

    name: str
    env: str = ""
    """The class in `CODE`."""
    has_tools: bool = False
    is_mixed: bool = False
    """Whether its turns have different lengths."""

    @property
    def role(self) -> str:
        """The role of what it says to the policy."""
        return "tool" if self.has_tools else "user"


SINGLE = Kind(name="single turns")
KINDS = (
    Kind(name="stateless", env="Stateless"),
    Kind(name="session", env="Session"),
    Kind(name="tools", has_tools=True),
    Kind(name="stateless, mixed", env="Stateless", is_mixed=True),
    Kind(name="session, mixed", env="Session", is_mixed=True),
)


@dataclass(frozen=True, kw_only=True)
class Played:
    """What a round of a kind took."""

    tokens_per_s: float
    """Sampled tokens."""
    seconds: dict[str, float]
    """Those of the whole, as `total`, and of each of `PARTS`."""
    num_steps: int
    """Steps of the engine."""


class Clock:
    """Seconds of this process by what it did."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(PARTS, 0.0)

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any) -> Any:
            start = perf_counter()
            result = function(*args)
            self.seconds[part] += perf_counter() - start
            return result

        return call


class Timed:
    """Stands for `whole`, and takes the time of the methods in `parts`, by their names, and of
    calls of itself, as `called`."""

    def __init__(self, whole: Any, clock: Clock, *, called: str = "", **parts: str) -> None:
        self._whole = whole
        self._call = clock.timed(called, whole) if called else None
        for method, part in parts.items():
            setattr(self, method, clock.timed(part, getattr(whole, method)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._whole, name)

    def __call__(self, *args: Any) -> Any:
        assert self._call is not None
        return self._call(*args)


class WritesCalls:
    """An engine whose completions end with these tokens."""

    def __init__(self, engine: EmbeddedEngine, token_ids: Sequence[int]) -> None:
        self._engine, self._token_ids = engine, token_ids

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def step(self) -> list[Completion]:
        ended = self._engine.step()
        for completion in ended:
            sampled = completion.token_ids
            completion.token_ids = PerToken("i", sampled[: -len(self._token_ids)])
            completion.token_ids += self._token_ids
        return ended


def make_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """A byte-level tokenizer in which every id has a text, so that what random weights sample
    takes as long to decode as a real completion."""
    pad, start, end = special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges: list[tuple[str, str]] = []
    stems = list(letters)
    while len(pieces) < vocab_size:
        room = vocab_size - len(pieces)
        longer = list(itertools.islice(itertools.product(stems, letters), room))
        merges += longer
        stems = [stem + letter for stem, letter in longer]
        pieces += stems
    vocab = {piece: token_id for token_id, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=end,
        pad_token=pad,
        additional_special_tokens=[start],
        clean_up_tokenization_spaces=False,
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


class Checks:
    """The kinds, over one engine."""

    def __init__(self, run: Run, folder: Path, stack: ExitStack) -> None:
        self.run, self.args = run, run.args
        is_tiny = self.args.shape == "tiny"
        shape: dict[str, Any] = (
            {"max_position_embeddings": 4096} if is_tiny else {**SHAPES[self.args.shape]}
        )
        vocab_size = 1024 if is_tiny else cast(int, shape["vocab_size"])
        self.tokenizer = make_tokenizer(vocab_size)
        make_tiny_model(folder, tokenizer=self.tokenizer, weights=False, **shape)
        self.render = TurnRenderer(self.tokenizer, DataConfig(train=()), vocab_size=vocab_size)
        self.call_ids = self.tokenizer.encode(CALL)
        self.num_tokens = self.args.turns * self.args.turn_tokens
        if self.args.turns % 2 or self.args.turn_tokens // 2 < len(self.call_ids):
            raise SystemExit(
                f"--turns must be even, and half of --turn-tokens at least {len(self.call_ids)}, "
                "for a call of a tool"
            )
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model = load_model(ModelConfig(path=str(folder), init="random"), device=device, seed=0)
        start = perf_counter()
        self.engine = EmbeddedEngine(
            model,
            EngineConfig(max_num_seqs=self.args.episodes, gpu_memory_utilization=0.5),
            eos_token_ids=(),
            max_model_len=self.args.prompt_tokens + 64 + self.longest(KINDS[0]),
        )
        run.note("engine started, s", perf_counter() - start)
        (folder / "given.py").write_text(CODE)
        self.kinds = [SINGLE, *(kind for kind in KINDS if self.args.only in kind.name)]
        self.scorers = {
            kind: stack.enter_context(self.scorer(kind, str(folder / "given.py")))
            for kind in self.kinds
        }
        self.draw, self.num_drawn = random.Random(0), 0
        self.rounds: list[dict[Kind, list[Played]]] = []

    def longest(self, kind: Kind) -> int:
        """Longest completion: what is sampled and, between turns, what the environment says."""
        given = 0 if kind is SINGLE else (self.args.turns - 1) * len(self.said(kind.role))
        return self.num_tokens + given

    def said(self, role: str) -> list[int]:
        """The ids between two turns."""
        message = {"role": role, "content": SAID}
        text = self.tokenizer.apply_chat_template(
            [message], tokenize=False, add_generation_prompt=True
        )
        return self.tokenizer.encode(f"<|im_end|>\n{text}")

    def scorer(self, kind: Kind, code: str) -> Scorer:
        """The scorer of a kind; that of single turns works in this process, for next to nothing."""
        if kind is SINGLE:
            return Scorer.in_process(
                lambda completion: 1.0, max_completion_tokens=self.longest(kind)
            )
        lengths = {"turns": self.args.turns, "tokens": self.args.turn_tokens}
        env = EnvConfig(
            path=None if kind.has_tools else f"{code}:{kind.env}",
            tools=(f"{code}:look_up",) if kind.has_tools else (),
            args=lengths if kind.is_mixed else {},
            max_turns=self.args.turns,
            max_turn_tokens=None if kind.is_mixed else self.args.turn_tokens,
            concurrency=self.args.episodes,
        )
        functions = (RewardFunctionConfig(fn=f"{code}:score"),) if kind.has_tools else ()
        return Scorer(
            RewardConfig(functions=functions, max_failure_rate=1.0),
            max_completion_tokens=self.longest(kind),
            env=env,
            tool_format="hermes" if kind.has_tools else None,
        )

    def prompt(self, kind: Kind) -> Prompt:
        """A new prompt; that of single turns contains what an environment would say."""
        self.num_drawn += 1
        letters = "abcdefghijklmnopqrstuvwxyz"
        words = (self.draw.choice(letters) + self.draw.choice(letters) for _ in itertools.count())
        content = " ".join(itertools.islice(words, self.args.prompt_tokens // 2))
        message = {"role": "user", "content": content}
        text = cast(
            str,
            self.tokenizer.apply_chat_template(
                [message], tokenize=False, add_generation_prompt=True
            ),
        )
        token_ids = self.tokenizer.encode(text)
        if kind is SINGLE:
            token_ids += self.said("user") * (self.args.turns - 1)
        return Prompt(
            id=f"rows:{self.num_drawn}",
            token_ids=tuple(token_ids),
            text=text,
            messages=(message,),
            task=str(self.num_drawn),
        )

    def play(self, kind: Kind) -> Played:
        """All episodes of a round. Raises RuntimeError where one has failed."""
        clock = Clock()
        engine: Any = WritesCalls(self.engine, self.call_ids) if kind.has_tools else self.engine
        scorer = self.scorers[kind]
        episodes = Episodes(
            decode=clock.timed("decode", decoder(self.tokenizer, ())),
            max_turns=scorer.max_turns,
            max_turn_tokens=scorer.max_turn_tokens,
            render=cast(Any, Timed(self.render, clock, called="render")),
        )
        timed: Any = Timed(scorer, clock, submit="ask", poll="answers")
        runner = Runner(
            cast(Any, Timed(engine, clock, step="engine", submit="submit")), timed, episodes
        )
        groups = [self.group(kind, episodes, order) for order in range(self.args.episodes // GROUP)]
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        start = perf_counter()
        runner.submit(groups)
        samples = list[Any]()
        while runner.groups:
            samples += [one for entry in runner.step().groups for one in entry.group.samples]
        seconds = perf_counter() - start
        for sample in samples:
            turns = 1 if kind is SINGLE else self.args.turns
            sampled = sum(sample.loss_mask)
            if sample.failure or sampled != self.num_tokens or len(sample.turns) != turns:
                raise RuntimeError(
                    f"{kind.name}: {sample.id} has {len(sample.turns)} turns and {sampled} "
                    f"sampled tokens of {self.num_tokens}; {sample.failure_detail}"
                )
        return Played(
            tokens_per_s=len(samples) * self.num_tokens / seconds,
            seconds={"total": seconds, **clock.seconds},
            num_steps=runner.num_steps,
        )

    def group(self, kind: Kind, episodes: Episodes, order: int) -> RunningGroup:
        prompt = self.prompt(kind)
        group = RunningGroup.of(
            prompt,
            SamplingParams(max_tokens=self.longest(kind)),
            episodes,
            group_id=prompt.id,
            indices=range(GROUP),
            order=order,
        )
        if kind.env == "Stateless" and kind.is_mixed:
            # Such an environment says nothing before the first turn.
            space: dict[str, Any] = {}
            exec(CODE, space)
            first = space["turn_lengths"](prompt.task, self.args.turns, self.args.turn_tokens)[0]
            group.requests = {
                index: replace(request, sampling=replace(request.sampling, max_tokens=first))
                for index, request in group.requests.items()
            }
        return group

    def play_rounds(self) -> None:
        """Play all rounds, and report them."""
        for number in range(self.args.rounds + 1):
            if not self.run.has_time(f"round {number}"):
                break
            others = self.kinds[1:]
            shift = number % max(len(others), 1)
            played: dict[Kind, list[Played]] = defaultdict(list)
            for kind in (SINGLE, *others[shift:], *others[:shift], SINGLE):
                found = self.play(kind)
                played[kind].append(found)
                self.run.note(f"round {number}, {kind.name}, tokens/s", found.tokens_per_s)
            if number:  # the first one starts workers and compiles
                self.rounds.append(played)
        if self.rounds:
            self.report()

    def report(self) -> None:
        row = self.run.row
        row("", "tokens/s", "of single", "least", "most")
        for kind in self.kinds:
            ratios = [self.ratio(played, kind) for played in self.rounds]
            speed = median(one.tokens_per_s for played in self.rounds for one in played[kind])
            cells = (
                f"{speed:,.0f}",
                *(f"{x:.3f}" for x in (median(ratios), min(ratios), max(ratios))),
            )
            if kind.is_mixed:
                self.run.check(kind.name, median(ratios) >= self.args.least, *cells)
            else:
                row(kind.name, *cells)
        row("")
        row("ms of a round", "total", "steps", *PARTS)
        for kind in self.kinds:
            every = [one for played in self.rounds for one in played[kind]]
            parts = ("total", *PARTS)
            total, *rest = (median(1e3 * one.seconds[part] for one in every) for part in parts)
            steps = median(one.num_steps for one in every)
            row(kind.name, f"{total:.0f}", f"{steps:.0f}", *(f"{part:.0f}" for part in rest))
        if self.args.output:
            rounds = [
                {kind.name: [asdict(one) for one in found] for kind, found in played.items()}
                for played in self.rounds
            ]
            self.args.output.write_text(json.dumps({"args": str(self.args), "rounds": rounds}))

    def ratio(self, played: dict[Kind, list[Played]], kind: Kind) -> float:
        """Speed as a share of that of single turns in the same round; of single turns, that of the
        last ones as a share of the first."""
        first, last = (one.seconds["total"] for one in played[SINGLE])
        if kind is SINGLE:
            return first / last
        return (first + last) / 2 / played[kind][0].seconds["total"]


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="qwen3-0.6b", choices=["tiny", *SHAPES])
    parser.add_argument("--episodes", type=int, default=256)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--turn-tokens", type=int, default=256, help="sampled tokens of a turn")
    parser.add_argument("--prompt-tokens", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=5, help="after one that does not count")
    parser.add_argument("--only", default="", help="only kinds with this in their names")
    parser.add_argument("--least", type=float, default=LEAST)
    parser.add_argument("--output", type=Path, help="JSON file for all numbers")


if __name__ == "__main__":
    started = Run(__doc__, ("episodes",), seconds=300, add_flags=add_flags)
    with tempfile.TemporaryDirectory() as name, ExitStack() as scorers:
        checks = Checks(started, Path(name), scorers)
        sys.exit(started.go({"episodes": checks.play_rounds}))
