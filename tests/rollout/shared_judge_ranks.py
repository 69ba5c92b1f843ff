"""Frozen models that several processes share, in one of them (`tests.ranks`).

Rank 0 also has whole copies.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hone.algorithms.settings import Output
from hone.checkpoint.sharded import local_part
from hone.config.plan import RunPlan
from hone.loops.launch import plan_run
from hone.loops.workers import colocated_reward_model
from hone.models.load import load_deferred, load_model, load_value_model
from hone.models.settings import ModelConfig
from hone.planner.run_memory import RunMemory
from hone.rollout.judge import RewardModel
from hone.rollout.shared_judge import SharedRewardModel
from hone.rollout.transcripts import Transcript
from hone.trainer.frozen import FrozenScorer
from hone.trainer.settings import TrainerConfig
from tests.rank_cases import everywhere, of_first, on_mesh, start
from tests.tiny_runs import tiny_config
from tests.trainer.examples import random_rows

FOLDER = Path()
MAX_TOKENS = 24
LAYOUTS: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        "stage 3": {"zero_stage": 3},
        "policy in two parts of a layer": {"zero_stage": 3, "tensor_parallel_size": 2},
    },
    4: {
        "stage 3": {"zero_stage": 3},
        "two copies": {"zero_stage": 3, "fsdp_size": 2},
        "policy in two rings": {"zero_stage": 3, "ring_size": 2},
    },
}
ASKED: dict[str, Callable[[int], Sequence[int]]] = {
    "each some": lambda rank: [3 + rank, 9],
    "unequal": lambda rank: [4 + n for n in range(7 - 2 * rank)] if rank < 2 else [],
    "one alone": lambda rank: [5] * (rank == 1),
    "one longer than a pass": lambda rank: [MAX_TOKENS + 9] * (rank == 0),
    "nobody": lambda rank: [],
}
"""Lengths of the sequences of each rank."""


def sequences(asked: Callable[[int], Sequence[int]], rank: int) -> list[Transcript]:
    draw = torch.Generator().manual_seed(rank)
    return [
        Transcript(tuple(torch.randint(4, 48, (length,), generator=draw).tolist()))
        for length in asked(rank)
    ]


def layouts() -> dict[str, dict[str, Any]]:
    return LAYOUTS[dist.get_world_size()]


def plan_of(parallel: dict[str, Any]) -> RunPlan:
    cfg = tiny_config(
        FOLDER,
        FOLDER / "run",
        algorithm={"kl": {"coef": 0.1}},
        reward={"model": {"path": str(FOLDER / "judge"), "max_tokens_per_forward": MAX_TOKENS}},
        trainer={"parallel": parallel},
    )
    return plan_run(cfg, "cpu", world_size=dist.get_world_size())


def shared_judge(parallel: dict[str, Any]) -> SharedRewardModel:
    judge = colocated_reward_model(plan_of(parallel), on_mesh(parallel), scores=False)
    assert isinstance(judge, SharedRewardModel)
    return judge


def scored(judge: SharedRewardModel, asked: Callable[[int], Sequence[int]]) -> list[float]:
    """What this rank learns of its sequences, asked in two parts."""
    own = sequences(asked, dist.get_rank())
    parts = [judge.begin(own[:1]), judge.begin(own[1:])]
    judge.meet(is_waiting=False)
    return [*chain.from_iterable(part.result(timeout=0) for part in parts)]


def expected() -> dict[str, list[list[float]]]:
    """Of a whole copy, by what is asked and by rank."""
    module = load_value_model(ModelConfig(path=str(FOLDER / "judge")), device="cpu", seed=0)
    whole, ranks = RewardModel(module), range(dist.get_world_size())
    return {
        name: [whole.begin(sequences(asked, rank)).result() for rank in ranks]
        for name, asked in ASKED.items()
    }


def difference(found: Sequence[float], want: Sequence[float]) -> float:
    assert len(found) == len(want)
    return max((abs(x - y) for x, y in zip(found, want, strict=True)), default=0.0)


def scores() -> dict[str, dict[str, float]]:
    """The largest difference of this rank's scores in each layout."""
    want = of_first(expected)
    return {
        layout: {
            name: difference(scored(judge, asked), want[name][dist.get_rank()])
            for name, asked in ASKED.items()
        }
        for layout, parallel in layouts().items()
        for judge in [shared_judge(parallel)]
    }


def meetings() -> list[bool]:
    """What each of several meetings says, where rank r waits in the first r of them."""
    judge = shared_judge({"zero_stage": 3})
    rank, size = dist.get_rank(), dist.get_world_size()
    return [judge.meet(number < rank) for number in range(size)]


def held_bytes(module: nn.Module) -> int:
    """Bytes of the weights that this process has, each tensor once."""
    held = {id(p): local_part(p.detach()) for p in module.parameters()}
    return sum(part.numel() * part.element_size() for part in held.values())


def storage_bytes(module: nn.Module) -> int:
    """Bytes of the memory that these take."""
    parts = (local_part(p.detach()).untyped_storage() for p in module.parameters())
    return sum({part.data_ptr() or id(part): part.nbytes() for part in parts}.values())


def memory() -> dict[str, tuple[int, int]]:
    """Planned and held bytes of the fullest process."""
    found: dict[str, tuple[int, int]] = {}
    for layout, parallel in layouts().items():
        planned, (reference, _) = RunMemory(plan_of(parallel)).frozen, reference_of(parallel)
        for name, module in (
            ("reward model", shared_judge(parallel)._model.module),
            ("reference", reference.model.module),
        ):
            held = max(everywhere(held_bytes(module)))
            found[f"{name}, {layout}"] = planned[name], held
    return found


def sleep() -> dict[str, Any]:
    """What a reward model and a reference that have slept twice take and say."""
    judge = shared_judge({"zero_stage": 3})
    reference, rows = reference_of({"zero_stage": 3})
    outputs = frozenset[Output]({"logprobs"})

    def logprobs() -> list[float]:
        found = reference.begin(rows, outputs)()
        return [*chain.from_iterable(of_row["logprobs"].tolist() for of_row in found)]

    found: dict[str, Any] = {}
    for name, model, weights, said in (
        ("reward model", judge, judge._model.module, partial(scored, judge, ASKED["unequal"])),
        ("reference", reference, reference.model.module, logprobs),
    ):
        before, awake, asleep = said(), storage_bytes(weights), list[int]()
        said_after: list[list[float]] = []
        for _ in range(2):
            model.sleep()
            asleep.append(storage_bytes(weights))
            model.wake()
            said_after.append(said())
        found[name] = {
            "asleep": asleep,
            "awake": awake,
            "awake again": storage_bytes(weights),
            "same": all(each == before for each in said_after),
        }
    return found


def reference_of(parallel: dict[str, Any] | None) -> tuple[FrozenScorer, list[Any]]:
    """A reference, alone where `parallel` is None, and rows for it, fewer than processes have
    room for."""
    cfg = ModelConfig(path=str(FOLDER / "model"))
    load = load_model if parallel is None else load_deferred
    trainer = TrainerConfig.model_validate({"parallel": parallel or {}})
    mesh = None if parallel is None else on_mesh(parallel)
    model = load(cfg, device="cpu", seed=0)
    return FrozenScorer(model, trainer, mesh=mesh), random_rows(3, seed=3)


def logprobs() -> dict[str, float]:
    """The largest difference of a reference's log-probabilities in each layout, of three rows and
    of one."""
    outputs = frozenset[Output]({"logprobs"})

    def alone() -> list[list[float]]:
        scorer, rows = reference_of(None)
        return [of_row["logprobs"].tolist() for of_row in scorer.begin(rows, outputs)()]

    want, found = of_first(alone), dict[str, float]()
    for layout, parallel in layouts().items():
        scorer, rows = reference_of(parallel)
        for number in (3, 1):
            own = scorer.begin(rows[:number], outputs)()
            found[f"{layout}, {number} rows"] = max(
                difference(of_row["logprobs"].tolist(), want[i]) for i, of_row in enumerate(own)
            )
    return found


def main(folder: str) -> None:
    global FOLDER
    FOLDER = Path(folder)
    start((scores, meetings, memory, sleep, logprobs))
