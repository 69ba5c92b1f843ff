"""Frozen models on devices of their own, in threads of this process: the run is the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from queue import Queue
from time import sleep
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file
from tests.loops.conftest import MakeConfig
from tests.tiny_runs import lines, make_classifier
from torch import Tensor

from hone.algorithms.algorithm import Outputs
from hone.algorithms.grpo import GRPO
from hone.algorithms.settings import AlgorithmConfig, KLConfig, Output
from hone.config.tree import RLConfig
from hone.data.arithmetic import ALPHABET
from hone.distributed import team
from hone.distributed.pool import ThreadWorker
from hone.loops import rank0, reinforce, workers
from hone.loops.launch import plan_run
from hone.models.tiny import make_char_tokenizer, make_tiny_model
from hone.rollout.scorer_pool import ScorerPool
from hone.trainer.frozen import FrozenScorer
from hone.trainer.models import Models
from hone.types import Group, Prompt, Reward, Row, Sample, StopReason

LOSS: dict[str, Any] = {"kl": {"coef": 0.2}}
REWARD: dict[str, Any] = {"kl": {"coef": 0.2, "placement": "reward", "estimator": "k1"}}


class Peer:
    """One of two processes; what the first one says, the other hears."""

    def __init__(self, said: Queue[Any], *, is_first: bool) -> None:
        self.said, self.is_first = said, is_first
        self.num_told = 0

    def broadcast(self, value: Any) -> Any:
        self.num_told += 1
        if self.is_first:
            self.said.put(value)
            return value
        return self.said.get(timeout=120)


def test_who_does_not_drive_references_hears_what_they_found(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """And, while that takes long, now and then that it should wait on."""
    monkeypatch.setattr(team, "KEEPALIVE_S", 0.01)
    monkeypatch.setattr(rank0, "LOOK_S", 0.02)
    rows = [
        Row(id=f"{n}", token_ids=[1] * (n + 2), loss_mask=[False] + [True] * (n + 1))
        for n in range(5)
    ]

    class Scorer:
        def score(self, rows: Sequence[Row], outputs: frozenset[Output]) -> Any:
            while len(rows) and peers[0].num_told < 2:  # words to wait on
                sleep(0.001)
            values = torch.cat([torch.zeros(0), *(torch.ones(r.num_trained) for r in rows)])
            return values[None].numpy()

    group = ScorerPool(
        "reference",
        [ThreadWorker("reference 0", Scorer())],
        restart=lambda index: pytest.fail(f"{index} was lost"),
        timeout_s=120.0,
        max_restarts=0,
    )
    said: Queue[Any] = Queue()
    peers = [Peer(said, is_first=is_first) for is_first in (True, False)]
    leds = [
        rank0.Rank0Scorer(cast(Any, peer), references, lambda rows: [[4, 3], [1, 0, 2]])
        for peer, references in zip(peers, (group, None), strict=True)
    ]
    waits = [led.begin(rows, frozenset({"logprobs"})) for led in leds]
    found = [wait() for wait in waits]
    group.close()
    for of_rows in found:
        assert [own["logprobs"].tolist() for own in of_rows] == [[1.0] * (n + 1) for n in range(5)]
    assert peers[0].num_told == peers[1].num_told > 2


def test_what_was_begun_ahead_is_not_scored_again() -> None:
    """But for rows that are others by then."""
    asked: list[list[str]] = []

    class Scorer:
        def score(self, rows: Sequence[Row], outputs: frozenset[Output]) -> Any:
            asked.extend([[row.id for row in rows]] if rows else [])
            values = [torch.full((row.num_trained,), float(row.id)) for row in rows]
            return torch.cat([torch.zeros(0), *values])[None].numpy()

    pool = ScorerPool(
        "teacher",
        [ThreadWorker("teacher 0", Scorer())],
        restart=None,
        timeout_s=120,
        max_restarts=0,
    )
    peer = Peer(Queue(), is_first=True)
    scorer = rank0.Rank0Scorer(cast(Any, peer), pool, lambda rows: [[i] for i in range(len(rows))])
    rows = [Row(id=f"{n}", token_ids=[1] * 3, loss_mask=[False, True, True]) for n in range(4)]
    outputs = frozenset[Output]({"logprobs"})
    scorer.begin_ahead(rows[:2], outputs)
    scorer.begin_ahead(rows[2:3], outputs)
    rows[1] = replace(rows[1], loss_mask=[False, False, True])
    found = scorer.begin([rows[2], rows[1], rows[3], rows[0]], outputs)()
    pool.close()
    expected = [[2.0, 2.0], [1.0], [3.0, 3.0], [0.0, 0.0]]
    assert [own["logprobs"].tolist() for own in found] == expected
    assert asked == [["0"], ["1"], ["2"], ["1"], ["3"]]


def test_ahead_of_training_rows_are_scored_as_groups_end(
    make_config: MakeConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is trained has the scores of the reference, most of them begun before it was taken."""
    cfg = make_config(
        algorithm=LOSS | {"correction": {"kind": "tis"}},
        cluster={"num_references": 2},
        pipeline={"max_staleness": 2},
        rollout={"truncated_samples": "mask", "mask_off_policy_tokens": True},
        run={"steps": 4},
    )
    plan = plan_run(cfg, "cpu", world_size=1)
    reference = cast(FrozenScorer, workers.build_scorer(plan.roles["reference"], plan))
    begun: list[int] = []
    ahead, begin = rank0.Rank0Scorer.begin_ahead, rank0.Rank0Scorer.begin

    def counted(own: Any, rows: Sequence[Row], outputs: frozenset[Output]) -> None:
        begun.append(len(rows))
        ahead(own, rows, outputs)

    def compared(own: Any, rows: Sequence[Row], outputs: frozenset[Output]) -> Any:
        taken = [row for row in rows if row.id in own._ahead]
        wait = begin(own, rows, outputs)

        def found() -> list[Outputs]:
            values, expected = wait(), reference.begin(rows, outputs)()
            for one, other in zip(values, expected, strict=True):
                assert torch.allclose(one["logprobs"], other["logprobs"], atol=1e-5)
            return values

        assert len(taken) == len(rows)
        return found

    monkeypatch.setattr(rank0.Rank0Scorer, "begin_ahead", counted)
    monkeypatch.setattr(rank0.Rank0Scorer, "begin", compared)
    reinforce.run(cfg)
    assert sum(begun) >= 4 * 16


@pytest.mark.parametrize(
    ("kl", "is_needed", "expected"),
    [
        ({"coef": 0.1}, False, ["begin", "wait"]),
        ({"coef": 0.1}, True, ["begin", "policy", "wait"]),
        ({"coef": 0.1, "placement": "reward"}, False, ["begin", "policy", "wait"]),
        ({}, True, ["policy"]),
        ({}, False, []),
    ],
)
def test_the_policy_is_scored_while_a_reference_is(
    kl: dict[str, Any], is_needed: bool, expected: list[str]
) -> None:
    """Where its scores are needed at all."""
    order: list[str] = []

    class Policy:
        def outputs_before(self, rows: Sequence[Row]) -> frozenset[Output]:
            return frozenset({"logprobs"}) if is_needed else frozenset()

        def begin(
            self, rows: Sequence[Row], outputs: frozenset[Output]
        ) -> Callable[[], list[Outputs]]:
            def wait() -> list[Outputs]:
                order.append("policy")
                return [{"logprobs": torch.zeros(row.num_trained)} for row in rows]

            return wait

    class Reference:
        def begin(
            self, rows: Sequence[Row], outputs: frozenset[Output]
        ) -> Callable[[], list[Outputs]]:
            order.append("begin")

            def wait() -> list[Outputs]:
                order.append("wait")
                return [{"logprobs": torch.ones(row.num_trained)} for row in rows]

            return wait

    prompt = Prompt(id="p", token_ids=(1, 2), text="")
    samples = [
        Sample(
            id=f"p/{index}",
            prompt=prompt,
            index=index,
            token_ids=[3],
            logprobs=[-1.0],
            weight_versions=[0],
            loss_mask=[True],
            stop_reason=StopReason.EOS,
            reward=Reward(total=float(index)),
        )
        for index in range(2)
    ]
    cfg = AlgorithmConfig(kl=KLConfig(**kl), advantage="reinforce_pp")
    group = Group(id="p", prompt=prompt, samples=samples)
    algorithm = GRPO(cfg, max_completion_tokens=8)
    models = Models({"policy": cast(Any, Policy())}, {"reference": Reference()})
    rows, _ = models.prepare(algorithm, [group], version=0)
    assert order == expected
    assert all(("logprobs/policy" in row.columns) == ("policy" in order) for row in rows)
    assert all(("logprobs/reference" in row.columns) == ("wait" in order) for row in rows)


def run(cfg: RLConfig) -> tuple[list[dict[str, float]], dict[str, torch.Tensor]]:
    """The rows of a run, as far as they do not follow from time, and the weights at its end."""
    reinforce.run(cfg)
    kept = ("reward/", "train/", "policy/", "off_policy/", "step")
    found = lines(cfg.run.dir / "metrics.jsonl")
    rows = [{k: v for k, v in row.items() if k.startswith(kept)} for row in found]
    return rows, load_file(cfg.run.dir / "model" / "model.safetensors")


@pytest.mark.parametrize(
    ("algorithm", "trainer"),
    [
        (REWARD | {"advantage": "reinforce_pp"}, {}),
        (LOSS, {"prompts_per_minibatch": 2}),
    ],
    ids=["in the reward", "in the loss of several optimizer steps"],
)
def test_R19_one_reference_apart_is_the_run_beside_bit_for_bit(
    make_config: MakeConfig, tmp_path: Path, algorithm: dict[str, Any], trainer: dict[str, Any]
) -> None:
    """It runs the passes of the trainer, several a step, at the temperature that samples."""
    base = make_config()
    sections: dict[str, Any] = {
        "algorithm": algorithm,
        "rollout": base.rollout.model_dump() | {"temperature": 0.8},
        "trainer": base.trainer.model_dump() | {"max_tokens_per_forward": 48} | trainer,
    }
    beside, expected = run(make_config(run={"dir": tmp_path / "beside"}, **sections))
    apart = {"num_references": 1}
    rows, weights = run(make_config(run={"dir": tmp_path / "apart"}, cluster=apart, **sections))
    assert beside[-1]["policy/ref_kl"] > 0
    assert rows == beside
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


TEACHER: dict[str, Any] = {"max_tokens_per_forward": 40}


@pytest.mark.parametrize(
    "teacher",
    [TEACHER, TEACHER | {"loss": "reverse_kl", "top_k": 5, "reward_coef": 0.5}],
    ids=["of sampled tokens", "of its likeliest words"],
)
def test_R19_one_teacher_apart_is_the_run_beside_bit_for_bit(
    make_config: MakeConfig, tmp_path: Path, teacher: dict[str, Any]
) -> None:
    """In passes of its own budget, which is that of no other model."""
    make_tiny_model(
        tmp_path / "teacher",
        tokenizer=make_char_tokenizer(ALPHABET),
        hidden_size=64,
        num_layers=1,
        max_position_embeddings=64,
        seed=3,
    )
    sections = {"teacher": {"path": str(tmp_path / "teacher"), **teacher}}
    beside, expected = run(make_config(run={"dir": tmp_path / "beside"}, **sections))
    apart = {"num_teachers": 1}
    rows, weights = run(make_config(run={"dir": tmp_path / "apart"}, cluster=apart, **sections))
    assert rows == beside
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize("number", [1, 3])
def test_R19_reward_models_apart_are_the_run_beside_bit_for_bit(
    make_config: MakeConfig, tmp_path: Path, number: int
) -> None:
    """Whichever of them scores a pass, and whenever its answer comes."""
    judge = make_classifier(tmp_path / "judge")
    model = {"path": str(judge), "max_tokens_per_forward": 30}
    sections = {"reward": {"functions": [], "model": model}}
    beside, expected = run(make_config(run={"dir": tmp_path / "beside"}, **sections))
    apart = {"num_reward_models": number}
    rows, weights = run(make_config(run={"dir": tmp_path / "apart"}, cluster=apart, **sections))
    assert len({row["reward/mean"] for row in rows}) == 3
    assert rows == beside
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_references_apart_are_the_policy_before_training_in_every_launch(
    make_config: MakeConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Drawn weights, engines apart too, sampling ahead of a staleness of 0: two launches, of which
    the second goes on, are the run beside, but for the last bits. Not so with other weights."""
    model = make_config().model.model_dump() | {"init": "random"}
    ahead = {"max_staleness": 0}
    sections: dict[str, Any] = {"model": model, "algorithm": {"kl": {"coef": 5.0}}}
    apart = sections | {"cluster": {"num_engines": 1, "num_references": 2}, "pipeline": ahead}
    _, expected = run(make_config(run={"dir": tmp_path / "beside"}, **sections))

    def distance(name: str, *launches: int) -> float:
        rows, weights = [], dict[str, Tensor]()
        for steps in launches:
            rows, weights = run(make_config(run={"dir": tmp_path / name, "steps": steps}, **apart))
        assert len(rows) == 3
        return max(float((weights[key] - expected[key]).abs().max()) for key in expected)

    assert distance("apart", 1, 3) < 1e-5
    real = workers.load_model
    monkeypatch.setattr(  # the planted bug
        workers, "load_model", lambda cfg, *, device, seed: real(cfg, device=device, seed=1)
    )
    assert distance("other", 3) > 1e-3
