"""Groups of episodes whose history was rewritten, and linear ones cut into such."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from hone.types import Branch, FailureKind, Group, Prompt, Reward, Sample, StopReason

PROMPT = Prompt(id="data:0", token_ids=(1, 2, 3), text="q")


def path(
    rng: random.Random, context: Sequence[int], mask: Sequence[bool], *, vocab: int = 48
) -> Branch:
    """A path of random tokens, of which those outside the mask were inserted by an environment."""
    return Branch(
        prompt_ids=tuple(context),
        token_ids=[rng.randrange(vocab) for _ in mask],
        logprobs=[rng.uniform(-3, -0.1) if m else 0.0 for m in mask],
        weight_versions=[0 if m else -1 for m in mask],
        loss_mask=list(mask),
    )


def sample_of(name: str, paths: Sequence[Branch], reward: float | None, **fields: Any) -> Sample:
    """An episode with these paths; without a reward it has failed."""
    *branches, last = paths
    prompt = PROMPT
    if last.prompt_ids != prompt.token_ids:
        prompt = replace(PROMPT, token_ids=last.prompt_ids)
    return Sample(
        id=name,
        prompt=prompt,
        index=int(name.rpartition("/")[2]),
        token_ids=last.token_ids,
        logprobs=last.logprobs,
        weight_versions=last.weight_versions,
        loss_mask=last.loss_mask,
        turns=last.turns,
        routes=last.routes,
        stop_reason=StopReason.EOS,
        branches=branches,
        reward=None if reward is None else Reward(total=reward),
        failure=FailureKind.CRASH if reward is None else None,
        **fields,
    )


def random_mask(rng: random.Random, length: int) -> list[bool]:
    mask = [rng.random() < 0.7 for _ in range(length)]
    mask[rng.randrange(length)] = True
    return mask


def rewritten(seed: int, *, num_groups: int = 3, size: int = 3) -> list[Group]:
    """Groups of episodes of one to three paths: some begin with the prompt, some with a summary.
    One path of the first group is masked, and so is a whole episode; one episode has failed."""
    rng = random.Random(seed)
    groups: list[Group] = []
    for number in range(num_groups):
        samples: list[Sample] = []
        for index in range(size):
            paths = [path(rng, PROMPT.token_ids, random_mask(rng, rng.randint(2, 7)))]
            for _ in range(rng.randint(0, 2)):
                kept = (*paths[-1].prompt_ids, *paths[-1].token_ids)[: rng.randint(0, 8)]
                context = (*(kept or (4,)), *(rng.randrange(48) for _ in range(rng.randint(0, 3))))
                paths.append(path(rng, context, random_mask(rng, rng.randint(1, 7))))
            samples.append(sample_of(f"{number}/{index}", paths, rng.uniform(-1, 1)))
        groups.append(Group(id=f"{number}", prompt=PROMPT, samples=samples))
    if size > 2:
        first = groups[0].samples
        masked = path(rng, (4, 5), [True, True])
        masked.loss_mask = [False, False]
        first[0].branches.append(masked)
        first[1].branches.append(path(rng, (6,), [True]))
        for own in (first[1], *first[1].branches):
            own.loss_mask = [False] * len(own.token_ids)
        lost = sample_of("1/2", [path(rng, PROMPT.token_ids, [True])], None)
        groups[1].samples[2] = lost
    return groups


def cut(sample: Sample, at: Sequence[int]) -> Sample:
    """The same tokens in the same contexts, as an episode whose path ends at each index of `at`."""
    ends = sorted({*at, len(sample.token_ids)})
    whole = [*sample.prompt.token_ids, *sample.token_ids]
    offset, start = len(sample.prompt.token_ids), 0
    paths: list[Branch] = []
    for end in ends:
        own = slice(start, end)
        paths.append(
            Branch(
                prompt_ids=tuple(whole[: offset + start]),
                token_ids=list(sample.token_ids)[own],
                logprobs=list(sample.logprobs)[own],
                weight_versions=list(sample.weight_versions)[own],
                loss_mask=list(sample.loss_mask)[own],
            )
        )
        start = end
    reward = None if sample.reward is None else sample.reward.total
    return sample_of(sample.id, paths, reward)
