"""Rewritten histories, and prompts of a sample's own: checkpoints, processes, masks, counts."""

from __future__ import annotations

import json
import pickle
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from hone.config.run import EvaluationConfig
from hone.observe.metrics import to_scalars
from hone.rollout.buffer import apply_masks
from hone.rollout.collector import SingleProcess
from hone.rollout.counts import RolloutCounts
from hone.rollout.episodes import Episodes
from hone.rollout.eval_metrics import summarise
from hone.rollout.evaluate import evaluate
from hone.rollout.metrics import rollout_metrics
from hone.rollout.settings import RolloutConfig
from hone.rollout.state import (
    group_from_dict,
    group_to_dict,
    sample_of_values,
    sample_values,
)
from hone.types import Branch, Group, PerToken, Sample, StopReason, Turn
from tests.algorithms.episodes import PROMPT, path, rewritten, sample_of
from tests.rollout.fakes import (
    CyclicPrompts,
    FakeEngine,
    FakeScorer,
    by_first_token,
    collect,
    make_collector,
    prompt,
)
from tests.rollout.test_sharing import Thread, in_threads


def turns(*borders: tuple[int, int]) -> list[Turn]:
    return [Turn(start=a, end=b, text="t", stop_reason=StopReason.EOS) for a, b in borders]


def episode(index: int = 0, *, versions: tuple[list[int], list[int]] | None = None) -> Sample:
    """Two paths: of a turn, and of two turns with an observation of a token in between."""
    rng = random.Random(index)
    first = path(rng, PROMPT.token_ids, [True, True, True])
    last = path(rng, (4, 5, 6, 7), [True, False, True])
    first.turns, last.turns = turns((0, 3)), turns((0, 1), (2, 3))
    first.routes = np.full((6, 1, 2), 3, np.uint8)
    if versions is not None:
        first.weight_versions, last.weight_versions = versions
    return sample_of(f"g/{index}", [first, last], float(index))


def in_group(*samples: Sample) -> Group:
    return Group(id="g", prompt=PROMPT, samples=list(samples))


def test_a_checkpoint_keeps_branches_and_prompts() -> None:
    """The group's prompt is there once, and is the same object in all samples that have it."""
    plain = sample_of("g/1", [path(random.Random(1), PROMPT.token_ids, [True])], 1.0)
    group = in_group(episode(), plain)
    data = json.loads(json.dumps(group_to_dict(group)))
    assert ["prompt" in row for row in data["samples"]] == [True, False]
    read = group_from_dict(data)
    branched, other = read.samples
    assert other.prompt is read.prompt
    assert other == plain
    assert branched.prompt.token_ids == (4, 5, 6, 7)
    (branch,), (given,) = branched.branches, group.samples[0].branches
    assert branch.routes is not None
    assert given.routes is not None
    assert np.array_equal(branch.routes, given.routes)
    assert isinstance(branch.token_ids, PerToken)
    branch.routes = given.routes = None
    assert branched == group.samples[0]


@pytest.mark.parametrize("protocol", [2, 5])
def test_another_process_gets_branches_and_prompts(protocol: int) -> None:
    sample = episode()
    sample.branches[0].routes = None
    values = pickle.loads(pickle.dumps(sample_values(sample, PROMPT), protocol))
    assert sample_of_values(values, PROMPT) == sample
    shared = replace(sample, prompt=PROMPT)
    values = pickle.loads(pickle.dumps(sample_values(shared, PROMPT), protocol))
    assert "prompt" not in values
    assert sample_of_values(values, PROMPT).prompt is PROMPT


class Pickled(Thread):
    """Processes, of which each gets copies."""

    def gather(self, value: Any, /) -> list[Any]:
        return [pickle.loads(own) for own in super().gather(pickle.dumps(value))]


def rewrite(sample: Sample) -> float:
    """A scorer's reward, which leaves a sample with another prompt and an earlier path."""
    if sample.token_ids[0] % 3:
        earlier = path(random.Random(sample.token_ids[0]), sample.prompt.token_ids, [True, False])
        sample.branches.append(earlier)
        ids = (*sample.prompt.token_ids, sample.index)
        sample.prompt = replace(sample.prompt, token_ids=ids)
    return by_first_token(sample)


def collected(comm: Any) -> list[Any]:
    collector = make_collector(
        scorer=FakeScorer(rewrite, delay=2),
        prompts=CyclicPrompts(),
        comm=comm,
        prompts_per_step=4,
        n_samples_per_prompt=3,
        max_completion_tokens=9,
        oversample_prompts=2,
    )
    return [[group_to_dict(g) for g in collect(collector, step)] for step in range(3)]


def test_processes_collect_branches_and_prompts_as_one_does() -> None:
    alone = collected(SingleProcess())
    samples = [s for step in alone for group in step for s in group["samples"]]
    assert any(s["branches"] for s in samples)
    assert any("prompt" in s for s in samples)
    for own in in_threads(2, lambda comm: collected(Pickled(comm.meeting, comm.rank))):
        assert own == alone


def evaluated(comm: Any) -> list[Sample]:
    found = evaluate(
        [prompt(number) for number in range(5)],
        engine=FakeEngine(),
        scorer=FakeScorer(rewrite, delay=2),
        cfg=EvaluationConfig(n_samples_per_prompt=3, max_completion_tokens=9),
        episodes=Episodes(decode=lambda ids: str(list(ids)), run_seed=3, purpose="eval"),
        comm=comm,
    )
    assert found is not None
    return found


def test_processes_evaluate_branches_and_prompts_as_one_does() -> None:
    alone = evaluated(SingleProcess())
    assert any(sample.branches for sample in alone)
    for own in in_threads(3, lambda comm: evaluated(Pickled(comm.meeting, comm.rank))):
        assert own == alone


def test_a_truncated_episode_is_masked_on_all_paths() -> None:
    cut, whole = replace(episode(0), stop_reason=StopReason.LENGTH), episode(1)
    apply_masks([in_group(cut, whole)], RolloutConfig(truncated_samples="mask"))
    assert [any(own.loss_mask) for own in cut.paths.values()] == [False, False]
    assert [*cut.trained_paths] == ["g/0"], "it counts in the baseline"
    assert whole.loss_mask == [True, False, True]
    assert whole.branches[0].loss_mask == [True] * 3


def test_old_tokens_are_those_before_the_newest_of_all_paths() -> None:
    sample = episode(versions=([1, 2, 2], [2, -1, 2]))
    apply_masks([in_group(sample)], RolloutConfig(mask_off_policy_tokens=True))
    assert sample.branches[0].loss_mask == [False, True, True]
    assert sample.loss_mask == [True, False, True]
    sample = episode(versions=([1, 2, 2], [3, -1, 3]))
    apply_masks([in_group(sample)], RolloutConfig(mask_off_policy_tokens=True))
    assert [*sample.trained_paths] == ["g/0"]


def metrics_of(*samples: Sample) -> dict[str, float]:
    return to_scalars(rollout_metrics([in_group(*samples)], RolloutCounts()))


def test_metrics_are_of_episodes() -> None:
    found = metrics_of(episode(0, versions=([1, 1, 1], [2, -1, 3])), episode(1))
    assert found["rollout/samples"] == 2
    assert found["rollout/completion_tokens/mean"] == 5
    assert found["rollout/num_tokens"] == 10
    assert found["rollout/prompt_tokens/mean"] == 3, "before the first sampled token"
    assert found["rollout/turns/mean"] == 3
    assert found["rollout/observation_tokens/mean"] == 1
    assert found["rollout/rows_per_episode/max"] == 2
    assert found["rollout/duplicate_share"] == 0
    assert (found["rollout/weight_version/min"], found["rollout/weight_version/max"]) == (0, 3)


def test_rows_are_counted_only_where_a_history_was_rewritten() -> None:
    plain = sample_of("g/1", [path(random.Random(1), PROMPT.token_ids, [True] * 3)], 1.0)
    plain.turns = turns((0, 1), (2, 3))
    assert "rollout/rows_per_episode/mean" not in metrics_of(plain, plain)
    assert metrics_of(episode(), plain)["rollout/rows_per_episode/mean"] == 1.5


def test_equal_samples_are_equal_on_all_paths() -> None:
    """Also in their prompts: the same answer to another opening is another sample."""
    one, same, other, opened = (episode() for _ in range(4))
    other.branches[0].token_ids[0] += 1
    opened.prompt = replace(opened.prompt, token_ids=(4, 5, 6, 8))
    assert metrics_of(one, same, other, opened)["rollout/duplicate_share"] == 0.25


def test_repeated_prompts_of_an_evaluation_are_found_by_their_openings() -> None:
    """Two rows with the same prompt are one cluster, whatever contexts their samples end in."""
    samples = [replace(episode(i), prompt=replace(episode(i).prompt, id=f"d:{i}")) for i in (0, 1)]
    samples[1].prompt = replace(samples[1].prompt, token_ids=(9, 9))
    found = to_scalars(summarise(samples, EvaluationConfig(), "none"))
    assert found["eval/num_prompts"] == 1
    assert found["eval/completion_tokens/mean"] == 5


def test_all_paths_of_random_episodes_are_saved() -> None:
    for seed in range(5):
        for group in rewritten(seed):
            data = json.loads(json.dumps(group_to_dict(group)))
            assert group_from_dict(data) == group
            assert all(isinstance(b, Branch) for s in group.samples for b in s.branches)
