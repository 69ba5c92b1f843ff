"""Episodes of several rows: ids, masks and ages, and that cutting an episode changes nothing."""

from __future__ import annotations

import random
from typing import Any, get_args

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.algorithms.advantages import AdvantageName
from hone.algorithms.aggregation import Aggregation
from hone.algorithms.distillation import Distillation
from hone.algorithms.grpo import GRPO
from hone.algorithms.ppo import PPO
from hone.algorithms.rows import row_weights
from hone.algorithms.settings import AlgorithmConfig, CriticConfig, TeacherConfig
from hone.observe.metrics import to_scalars
from hone.types import Branch, Column, Group, Row
from tests.algorithms.episodes import PROMPT, cut, path, random_mask, rewritten, sample_of
from tests.tables import table

IN_REWARD = {"kl": {"coef": 0.3, "placement": "reward", "estimator": "k1"}}
COLUMNS = ("logprobs/policy", "logprobs/reference", "logprobs/teacher", "values/critic")


def rows_of(groups: list[Group], *, version: int = 0) -> list[Row]:
    return GRPO(AlgorithmConfig(), max_completion_tokens=16).rows(groups, version)


def test_each_path_with_a_trained_token_is_a_row_of_its_episode() -> None:
    rng = random.Random(0)
    first = path(rng, PROMPT.token_ids, [True, False, True])
    masked = path(rng, (7, 8), [True])
    masked.loss_mask = [False]
    last = path(rng, (9,), [False, True])
    sample = sample_of("g/0", [first, masked, last], 1.0)
    one, other = rows_of([Group(id="g", prompt=PROMPT, samples=[sample, cut(sample, [])])])[:2]
    assert [one.id, other.id] == ["g/0#1", "g/0"]
    assert one.episode == other.episode == "g/0"
    assert one.group_id == other.group_id == "g"
    assert one.token_ids == [1, 2, 3, *first.token_ids]
    assert one.loss_mask == [False, False, False, True, False, True]
    assert other.token_ids == [9, *last.token_ids]
    assert other.loss_mask == [False, False, True]
    sampled = torch.tensor([first.logprobs[0], first.logprobs[2]], dtype=torch.float32)
    assert torch.equal(one.column("logprobs/engine"), sampled)
    assert sample.num_sampled == 4
    assert sample.opening_ids == PROMPT.token_ids


def test_an_episode_without_a_trained_token_has_the_row_of_its_last_path() -> None:
    """It counts in the baseline, and steps that train nothing are explained by their rows."""
    sample = rewritten(0)[0].samples[1]
    assert sample.branches
    assert [*sample.trained_paths] == [sample.id]
    sample.branches.clear()
    assert [*sample.trained_paths] == [sample.id]


def test_ids_of_rows_are_unique() -> None:
    ids = [row.id for row in rows_of(rewritten(1))]
    assert len({*ids}) == len(ids) > 8


def test_a_path_begins_with_the_age_of_its_own_first_token() -> None:
    """Its context is a prompt, computed anew by the weights that sample its first token."""
    rng = random.Random(0)
    first, last = (path(rng, PROMPT.token_ids, [True] * 3) for _ in range(2))
    first.weight_versions, last.weight_versions = [1, 2, 2], [2, 2, 3]
    sample = sample_of("g/0", [first, last], 1.0)
    rows = rows_of([Group(id="g", prompt=PROMPT, samples=[sample, sample])], version=3)
    assert rows[0].column("staleness").tolist() == [2, 2, 2]
    assert rows[1].column("staleness").tolist() == [1, 1, 1]


def test_each_path_replays_its_own_routes() -> None:
    rng = random.Random(0)
    paths = [path(rng, PROMPT.token_ids, [True] * 2) for _ in range(2)]
    for number, own in enumerate(paths):
        own.routes = np.full((4, 1, 2), number, np.uint8)
    sample = sample_of("g/0", paths, 1.0)
    rows = rows_of([Group(id="g", prompt=PROMPT, samples=[sample, sample])])
    assert [row.column("routes")[:, 0, 0].tolist() for row in rows[:2]] == [
        [0, 0, 0, 0, 255],
        [1, 1, 1, 1, 255],
    ]


def test_a_row_has_the_prompt_of_its_sample() -> None:
    """Which need not be that of the group: an environment may open an episode."""
    sample = sample_of("g/0", [path(random.Random(0), (1, 2, 3, 4, 5), [True])], 1.0)
    row, _ = rows_of([Group(id="g", prompt=PROMPT, samples=[sample, sample])])
    assert row.token_ids[:5] == [1, 2, 3, 4, 5]
    assert row.loss_mask == [False] * 5 + [True]


def with_scores(rows: list[Row], seed: int) -> None:
    """Scores of each episode's tokens, the same however it is cut."""
    scores: dict[str, torch.Tensor] = {}
    for row in rows:
        if row.episode not in scores:
            generator = torch.Generator().manual_seed(seed + sum(map(ord, row.episode)))
            scores[row.episode] = torch.randn(len(COLUMNS), 16, generator=generator)
        own, scores[row.episode] = scores[row.episode].tensor_split([row.num_trained], 1)
        for name, values in zip(COLUMNS, own, strict=True):
            row.columns[name] = Column(values)


def targets_of(algorithm: Any, groups: list[Group], seed: int) -> dict[str, Any]:
    """The advantages and returns of each episode's tokens, and the metrics."""
    rows = algorithm.rows(groups, 0)
    with_scores(rows, seed)
    metrics = to_scalars(algorithm.targets(rows, groups))
    found: dict[str, list[float]] = {}
    for row in rows:
        for name in {"advantages", "returns"}.intersection(row.columns):
            found.setdefault(f"{row.episode} {name}", []).extend(row.column(name).tolist())
    return {"metrics": metrics, **found}


def algorithms(kl: dict[str, Any]) -> list[Any]:
    """One of each advantage, and a teacher's."""
    made: list[Any] = []
    for advantage in get_args(AdvantageName):
        cfg = AlgorithmConfig.model_validate(
            {"advantage": advantage, "gamma": 0.9, "lam": 0.8, **kl}
        )
        if advantage == "gae":
            made.append(PPO(cfg, CriticConfig(), max_completion_tokens=16))
        else:
            made.append(GRPO(cfg, max_completion_tokens=16))
    teacher = TeacherConfig(path="t", reward_coef=0.5)
    made.append(Distillation(AlgorithmConfig(), teacher, max_completion_tokens=16))
    return made


@st.composite
def linear_groups(draw: st.DrawFn) -> tuple[list[Group], list[Group]]:
    """Groups of linear episodes, and the same tokens in episodes of several paths."""
    rng = random.Random(draw(st.integers(0, 10**6)))
    whole: list[Group] = []
    parts: list[Group] = []
    for number in range(rng.randint(1, 3)):
        samples = [
            sample_of(
                f"{number}/{index}",
                [path(rng, PROMPT.token_ids, random_mask(rng, rng.randint(1, 9)))],
                rng.choice([0.0, 1.0, rng.uniform(-1, 1)]),
            )
            for index in range(rng.randint(2, 4))
        ]
        cuts = [cut(s, [rng.randint(1, 9) for _ in range(rng.randint(0, 3))]) for s in samples]
        whole.append(Group(id=f"{number}", prompt=PROMPT, samples=samples))
        parts.append(Group(id=f"{number}", prompt=PROMPT, samples=cuts))
    return whole, parts


@settings(max_examples=40, deadline=None)
@given(linear_groups(), st.sampled_from([{}, IN_REWARD]), st.integers(0, 99))
def test_cutting_an_episode_changes_no_target(
    groups: tuple[list[Group], list[Group]], kl: dict[str, Any], seed: int
) -> None:
    """Bit for bit, for each advantage, also with penalties in the reward and with a critic."""
    whole, parts = groups
    for algorithm in algorithms(kl):
        assert targets_of(algorithm, parts, seed) == targets_of(algorithm, whole, seed)


@settings(max_examples=60, deadline=None)
@given(linear_groups())
def test_cutting_an_episode_changes_no_weight(groups: tuple[list[Group], list[Group]]) -> None:
    whole, parts = groups
    for name in get_args(Aggregation):
        found: list[dict[str, list[float]]] = []
        for cut_or_not in (whole, parts):
            rows = rows_of(cut_or_not)
            of_tokens: dict[str, list[float]] = {}
            for row, weight in zip(rows, row_weights(name, rows, 16), strict=True):
                of_tokens.setdefault(row.episode, []).extend([weight] * row.num_trained)
            found.append(of_tokens)
        assert found[0] == found[1]


@table("name", get_args(Aggregation))
def test_weights_of_an_episode_are_those_of_one_sequence(name: Aggregation) -> None:
    """Episodes of 2 + 2 and of 1 trained tokens; limit 10."""
    masks = {"a#1": [False, True, True], "b": [False, True], "a": [False, True, True]}
    rows = [
        Row(id=row_id, episode=row_id[0], token_ids=[0] * len(mask), loss_mask=mask)
        for row_id, mask in masks.items()
    ]
    expected = {
        "token_mean": [1 / 5, 1 / 5, 1 / 5],
        "sequence_mean": [1 / 8, 1 / 2, 1 / 8],
        "constant": [1 / 20, 1 / 20, 1 / 20],
    }
    assert row_weights(name, rows, 10) == pytest.approx(expected[name])
    for own in rows:
        own.episode = ""
    apart = {
        "token_mean": [1 / 5] * 3,
        "sequence_mean": [1 / 6, 1 / 3, 1 / 6],
        "constant": [1 / 30] * 3,
    }
    assert row_weights(name, rows, 10) == pytest.approx(apart[name])


def test_an_episode_counts_once_in_the_baseline() -> None:
    """Rewards 1, 0, 0 by one, two and three rows: the mean is 1/3, not that of six rows."""
    rng = random.Random(0)
    samples = [
        sample_of(f"g/{i}", [path(rng, PROMPT.token_ids, [True]) for _ in range(i + 1)], reward)
        for i, reward in enumerate((1.0, 0.0, 0.0))
    ]
    groups = [Group(id="g", prompt=PROMPT, samples=samples)]
    algorithm = GRPO(AlgorithmConfig(advantage="dr_grpo"), max_completion_tokens=16)
    rows = algorithm.rows(groups, 0)
    algorithm.targets(rows, groups)
    found = [float(row.column("advantages")) for row in rows]
    assert found == pytest.approx([2 / 3, *[-1 / 3] * 5])


def test_the_critic_sees_one_episode_with_its_reward_at_the_end() -> None:
    """Two paths of a token each, values 0.5 and 0.2, reward 1, gamma 0.9, lambda 0.8: the value
    after the first path is that of the second one's first token."""
    rng = random.Random(0)
    paths: list[Branch] = [path(rng, PROMPT.token_ids, [True]), path(rng, (9,), [True])]
    groups = [Group(id="g", prompt=PROMPT, samples=[sample_of("g/0", paths, 1.0)])]
    cfg = AlgorithmConfig(advantage="gae", gamma=0.9, lam=0.8)
    algorithm = PPO(cfg, CriticConfig(), max_completion_tokens=16)
    rows = algorithm.rows(groups, 0)
    by_id = {row.id: row for row in rows}
    for name, value in (("g/0#1", 0.5), ("g/0", 0.2)):
        by_id[name].columns["values/critic"] = Column(torch.tensor([value]))
    algorithm.targets(rows, groups)
    last = 1 - 0.2
    first = 0.9 * 0.2 - 0.5 + 0.9 * 0.8 * last
    returns = [float(by_id[name].column("returns")) for name in ("g/0#1", "g/0")]
    assert returns == pytest.approx([first + 0.5, last + 0.2])
