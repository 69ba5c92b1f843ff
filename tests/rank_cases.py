"""What several processes train together, compared with one process alone: a table of cases.

A module of ranks (`tests.ranks`) has tables of `Case`: a layout, rows and what is trained. Its
parts give `outcomes` of a table, and the test of the module judges them with `check_cases`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import cache, cached_property, partial
from math import inf
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from hone.algorithms.settings import AlgorithmConfig
from hone.algorithms.sft import SFT, CrossEntropy
from hone.checkpoint.store import CheckpointStore
from hone.distributed.joined import JoinedMesh
from hone.distributed.mesh import Mesh
from hone.distributed.settings import AxisSizes, ParallelConfig
from hone.loops.supervised import evaluate
from hone.models.adapters import adapt
from hone.models.settings import LoraConfig
from hone.observe.metrics import to_scalars
from hone.trainer.models import Models
from hone.trainer.settings import SFTTrainerConfig
from hone.trainer.trainer import Trainer
from hone.types import Row
from tests.ranks import run_parts
from tests.tables import check_rows
from tests.trainer.examples import make_trainer, near_policy, random_rows, tiny_model

CPU = torch.device("cpu")
TIMEOUT_S = 300
"""For what ranks do together; only where one does not come does another wait so long."""
STEP: dict[str, Any] = {"optimizer": {"lr": 0.01, "eps": 1e-3, "max_grad_norm": 0.3}}
CUT = {"train/num_micro_batches"}
"""Metrics that say how the work was cut."""
OF_TOKENS = {"policy/clip_fraction", "train/share_with_gradient"}
"""Shares of tokens on one side of a border: once weights have moved, a rounding may carry one
across."""
Outcome = dict[str, Any]
T = TypeVar("T")


# ---------------------------------------------------------------- the table


@dataclass(frozen=True)
class Case:
    """A layout and what is trained in it."""

    parallel: Mapping[str, Any]
    rows: Callable[[], list[Row]]
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the group's trainer. The one of one process takes all rows in one pass: how they are cut
    changes nothing (R1), and in models so small a pass costs more than its tokens."""
    alike: Mapping[str, Any] = field(default_factory=dict)
    """Settings of both trainers: what rounds otherwise, or replays."""
    model: Mapping[str, Any] = field(default_factory=dict)
    lora: LoraConfig | None = None
    objective: Mapping[str, Any] = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    trainer_class: type[Trainer] = Trainer
    plant: Callable[[], AbstractContextManager[Any]] = nullcontext
    """A mistake in the group's trainer."""

    def trainer(self, **settings: Any) -> Trainer:
        model = tiny_model(dtype=self.dtype, **self.model)
        if self.lora is not None:
            adapt(model, self.lora, seed=0)
            stir_adapters(model)
        cfg = AlgorithmConfig.model_validate(self.objective)
        return make_trainer(model, cfg, **{**STEP, **self.alike, **settings})

    def alone(self) -> OneProcess:
        """The same for all cases that differ in the group alone."""
        what = repr((self.rows, self.alike, self.model, self.lora, self.objective, self.dtype))
        if what not in _ALONE:
            _ALONE[what] = OneProcess(self)
        return _ALONE[what]


def stir_adapters(model: PreTrainedModel) -> None:
    """Adapters away from where they start: with B of zeros A would have no gradient."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("lora_B"):
                parameter += 0.1 * torch.randn(parameter.shape, generator=draw)


class OneProcess:
    """What rank 0 computes alone, and the rows for all."""

    def __init__(self, case: Case) -> None:
        self._case = case
        self.rows = of_first(self._rows)

    def _rows(self) -> list[Row]:
        rows = self._case.rows()
        near_policy(rows, self._case.trainer())
        return rows

    @cached_property
    def steps(self) -> Steps:
        return Steps(self._case.trainer(), self.rows)


_ALONE: dict[str, OneProcess] = {}


class Steps:
    """Scores, then two updates of a trainer. Collective."""

    def __init__(self, trainer: Trainer, rows: Sequence[Row]) -> None:
        before = {name: tensor.double() for name, tensor in trainer.named_weights()}
        self.logprobs = trainer.logprobs(rows)
        gradient: dict[str, Tensor] = {}
        step = trainer.optimizer.step

        def stepping(norm: Tensor) -> Any:
            """The gradient of the first update is there while it steps."""
            if not gradient:
                gradient.update({n: whole(g).double() for n, g in trainer.policy.gradients.items()})
            return step(norm)

        with patch.object(trainer.optimizer, "step", stepping):
            self.metrics = [scalars(trainer.update(rows)) for _ in range(2)]
        masters = {name: whole(m).double() for name, m in trainer.policy.masters.items()}
        mesh = trainer.mesh
        self.moves = {n: tensor.double() - before[n] for n, tensor in trainer.named_weights()}
        self.gradient = of_all_stages(mesh, gradient)
        self.masters = of_all_stages(mesh, masters)

    def numbers(self) -> list[Any]:
        return [[of_row.tolist() for of_row in self.logprobs], self.metrics]

    def differences(self, expected: Steps) -> Outcome:
        """Largest of each kind, all but those of log-probs relative."""
        flat, expected_flat = torch.cat(self.logprobs), torch.cat(expected.logprobs)
        loss, expected_loss = (of.metrics[0]["train/loss"] for of in (self, expected))
        return {
            "logprobs": float((flat - expected_flat).abs().max()),
            "loss": metric_error("train/loss", loss, expected_loss),
            "gradient": of_each(self.gradient, expected.gradient),
            "metrics": max(
                metric_error(key, self.metrics[step].get(key, inf), want.get(key, inf))
                for step, want in enumerate(expected.metrics)
                for key in self.metrics[step].keys() | want.keys()
                if step == 0 or key not in OF_TOKENS
            ),
            "weights": difference(flatten(self.moves), flatten(expected.moves)),
            "masters": difference(flatten(self.masters), flatten(expected.masters)),
        }


def outcomes(cases: Mapping[str, Case]) -> dict[str, Outcome]:
    """What the group computes in each case against what one process does: on rank 0, which also
    works alone, its differences, and on all whether their numbers are the same. Collective."""
    return {name: outcome(case) for name, case in cases.items()}


def outcome(case: Case) -> Outcome:
    alone, mesh = case.alone(), on_mesh(case.parallel)
    with case.plant():
        trainer = case.trainer(
            mesh=mesh,
            parallel=case.parallel,
            trainer_class=case.trainer_class,
            **case.settings,
        )
        steps = Steps(trainer, alone.rows)
    numbers = steps.numbers()
    result = {
        "same everywhere": all(other == numbers for other in everywhere(numbers)),
        "formats": sorted({str(m.to_local().dtype) for m in trainer.policy.masters.values()}),
    }
    return result if dist.get_rank() else result | steps.differences(alone.steps)


def worst_of(case: Case, *measures: str) -> float:
    """The largest difference, or 1 where copies of one tensor differ. On every rank."""
    try:
        found = outcome(case)
    except AssertionError:
        found = dict.fromkeys(measures, 1.0)
    return max(everywhere(max(found.get(measure, 0.0) for measure in measures)))


def check_cases(
    ranks: Sequence[Mapping[str, Any]],
    part: str,
    cases: Mapping[str, Any],
    limits: Mapping[str, float],
) -> None:
    """All ranks of all cases have the same numbers, which differ from those of one process by less
    than the limits."""
    assert ranks[0][part].keys() == cases.keys()

    def check(name: str) -> None:
        beyond = beyond_limits(ranks[0][part][name], limits)
        assert not beyond, beyond
        assert all(rank[part][name]["same everywhere"] for rank in ranks)

    check_rows(cases.keys(), check)


def beyond_limits(found: Outcome, limits: Mapping[str, float], *, times: float = 1) -> Outcome:
    """Measures that differ by more than they may."""
    return {name: found[name] for name, most in limits.items() if not found[name] < times * most}


def start(parts: Sequence[Callable[[], object]]) -> None:
    """Join the group of all ranks, and run the parts in it."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    run_parts(parts)


# ---------------------------------------------------------------- groups


@cache
def _mesh_of(sizes: AxisSizes, timeout_s: float) -> Mesh:
    return JoinedMesh.of_group(sizes, CPU, timeout=timedelta(seconds=timeout_s))


def on_mesh(parallel: Mapping[str, Any] | None = None, *, timeout_s: float = TIMEOUT_S) -> Mesh:
    sizes = AxisSizes.of(ParallelConfig(**parallel or {}), dist.get_world_size())
    return _mesh_of(sizes, timeout_s)


def shared(value: Any) -> Any:
    """Rank 0's value, everywhere."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def of_first(work: Callable[[], T]) -> T:
    """What rank 0 computes while the others wait, everywhere."""
    return shared(work() if dist.get_rank() == 0 else None)


def everywhere(value: Any) -> list[Any]:
    """The values of all ranks."""
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def of_all_stages(mesh: Mesh, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """What each pipeline stage has; what two have must be the same."""
    merged: dict[str, Tensor] = {}
    for own in mesh.gather_stages(tensors):
        for name, tensor in own.items():
            assert torch.equal(merged.setdefault(name, tensor), tensor), name
    return merged


def attempt(function: Callable[[], object]) -> str:
    """The error of a call, or nothing."""
    try:
        function()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


# ---------------------------------------------------------------- numbers


def whole(tensor: Tensor) -> Tensor:
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def flatten(tensors: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


def difference(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, as a share of the largest expected value."""
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def of_each(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Largest relative difference of the norm of one of several named tensors."""
    assert actual.keys() == expected.keys()
    return max(
        float((actual[n] - want).norm() / want.norm().clamp(min=1e-12))
        for n, want in expected.items()
    )


def equal(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(t, other[n]) for n, t in one.items())


def scalars(metrics: Any) -> dict[str, float]:
    return {name: value for name, value in to_scalars(metrics).items() if name not in CUT}


def metric_error(key: str, found: float, want: float) -> float:
    """The relative difference of two values of a metric; infinite where one side lacks it.

    A loss is compared with its terms, which are of order one and cancel. A rounding may add a few
    to the weights that an update leaves alone, or take a few."""
    if inf in (found, want):
        return inf
    if key == "train/share_unchanged" and abs(found - want) < 1e-3:
        return 0.0
    return abs(found - want) / max(abs(want), 1.0 if key == "train/loss" else 1e-3)


# ---------------------------------------------------------------- parts of several modules


def supervised_steps(parallel: Mapping[str, Any], **model: Any) -> list[Any]:
    """Metrics of two steps of SFT and of an evaluation on both sides of them, by one process and by
    all."""
    rows = random_rows(7, seed=1)
    for row in rows:
        row.columns.clear()
    cfg = SFTTrainerConfig.model_validate({"max_tokens_per_microbatch": 40, **STEP})
    found: list[Any] = []
    for mesh in (None, on_mesh(parallel)):
        trainer = Trainer(tiny_model(**model), cfg, CrossEntropy(), total_steps=10, mesh=mesh)
        measure = partial(evaluate, Models({"policy": trainer}), SFT())
        steps = (measure, trainer.update, trainer.update, measure)
        found.append([scalars(step(rows)) for step in steps])
    return found


def go_on(
    layouts: Mapping[str, tuple[Mapping[str, Any], Mapping[str, Any]]],
    plants: Mapping[str, Callable[[], AbstractContextManager[Any]]] | None = None,
    **model: Any,
) -> dict[str, Outcome]:
    """A run that is saved in one layout and goes on in another, against the first that goes on:
    its masters, the norm of the next gradient, and the weights after it. `plants` change how the
    first run divides its model."""
    rows, found = random_rows(6, seed=2), {}
    with TemporaryDirectory() as own_folder:
        for name, (before, after) in layouts.items():
            with (plants or {}).get(name, nullcontext)():
                first = _trainer_of(0, before, model)
            second = _trainer_of(1, after, model)
            first.update(rows)
            folder = Path(shared(own_folder)) / name
            store = CheckpointStore(folder, mesh=first.mesh, timeout_s=TIMEOUT_S)
            tensors, metadata = first.state_dict()
            store.save(1, {"trainer": tensors})
            store = CheckpointStore(folder, mesh=second.mesh, timeout_s=TIMEOUT_S)
            second.load_state_dict(store.load(1).parts["trainer"], metadata)
            # Copies: a whole master may be the master itself, which the next step changes.
            masters = [
                of_all_stages(t.mesh, {n: whole(m).clone() for n, m in t.policy.masters.items()})
                for t in (first, second)
            ]
            held = [set(trainer.policy.masters) for trainer in (first, second)]
            norms = [scalars(t.update(rows))["train/grad_norm"] for t in (first, second)]
            weights = [dict(trainer.named_weights()) for trainer in (first, second)]
            found[name] = {
                "equal": equal(*masters),
                "norms": abs(norms[0] - norms[1]) / norms[0],
                "weights": max(difference(weights[1][n], w) for n, w in weights[0].items()),
                "held alike": held[0] == held[1],
            }
        dist.barrier()
    return found


def _trainer_of(seed: int, parallel: Mapping[str, Any], model: Mapping[str, Any]) -> Trainer:
    model = tiny_model(**model, seed=seed)
    return make_trainer(model, mesh=on_mesh(parallel), parallel=parallel, **STEP)


def check_go_on(
    ranks: Sequence[Mapping[str, Any]], part: str, layouts: Mapping[str, Any], limit: float
) -> None:
    """On every rank, all runs of `go_on` have the numbers of the first."""
    assert ranks[0][part].keys() == layouts.keys()

    def check(name: str) -> None:
        for rank in ranks:
            found = rank[part][name]
            assert found["equal"]
            assert max(found["norms"], found["weights"]) < limit, found

    check_rows(layouts.keys(), check)
