"""Trains in one of several processes (`tests.ranks`), part after part; see `test_parallel.py`."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch
from weakref import ref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hone.algorithms.settings import AlgorithmConfig
from hone.algorithms.sft import CrossEntropy
from hone.checkpoint.sharded import local_part, own_part
from hone.checkpoint.store import CheckpointStore
from hone.distributed.joined import JoinedMesh
from hone.distributed.processes import processes
from hone.engine import base
from hone.extras import is_installed
from hone.models.adapters import adapt
from hone.models.manifest import export_weights
from hone.models.settings import LoraConfig
from hone.trainer import batcher, host_gradients, precision, sharded, update_rules
from hone.trainer import gathering as gathering_room
from hone.trainer import policy as policy_module
from hone.trainer.host_gradients import HostGradients
from hone.trainer.models import Models
from hone.trainer.settings import SFTTrainerConfig
from hone.trainer.sharded import ShardedPolicy
from hone.trainer.trainer import Trainer
from hone.types import Column
from hone.weights import sync
from hone.weights.sync import WeightSync
from tests.rank_cases import (
    STEP,
    TIMEOUT_S,
    Case,
    attempt,
    difference,
    equal,
    on_mesh,
    outcomes,
    scalars,
    shared,
    start,
    supervised_steps,
    whole,
)
from tests.trainer import float8_twin
from tests.trainer.examples import (
    logprobs_of,
    make_reference,
    make_trainer,
    random_rows,
    tiny_model,
)
from tests.trainer.parallel_cases import LAYOUTS, runs
from tests.weights.test_sync import ModuleEngine

ONE_ROW = {"micro_batch_size": 1}
NUM_ROWS = {2: 9, 4: 13}
"""Of a run in so many processes."""


def layout_cases(world):
    return {
        name: Case(
            run["settings"]["parallel"],
            partial(random_rows, NUM_ROWS[world], seed=number, rows_per_episode=1 + number % 2),
            {key: value for key, value in run["settings"].items() if key != "parallel"},
            model=run["model"],
            objective=run["objective"],
        )
        for number, (name, run) in enumerate(runs(world).items())
    }


NARROW = Case({}, partial(random_rows, 4, seed=1), dtype=torch.bfloat16)
BFLOAT16 = {
    name: replace(NARROW, parallel=parallel, alike=ONE_ROW, objective={"entropy_coef": 0.1})
    for name, parallel in {
        **{f"stage {stage}": {"zero_stage": stage} for stage in range(4)},
        "tensor": {"tensor_parallel_size": 2},
    }.items()
}
"""One row a pass on both sides, which round the same passes: only sums over them differ."""
FLOAT8 = {
    f"stage {stage}": replace(
        NARROW,
        parallel={"zero_stage": stage},
        alike={**ONE_ROW, "matmul_precision": "fp8", "recompute": "full"},
    )
    for stage in (1, 3)
}


def layouts():
    return outcomes(layout_cases(dist.get_world_size()))


def bfloat16():
    return outcomes(BFLOAT16)


def float8():
    """As `bfloat16`, with products that torchao computes; nothing without it."""
    if not is_installed("torchao"):
        return None
    with (
        patch.object(precision, "require_matmul_precision", lambda *_: None),
        patch.object(torch, "_scaled_mm", float8_twin.scaled_mm),
    ):
        return outcomes(FLOAT8)


def gathering():
    """Differences between tensors gathered together and one by one, for several sizes of groups."""
    world = dist.get_world_size()
    grids = {"one axis": (world,), "copies": (world, 1)}
    if world > 2:
        grids["two copies"] = (world // 2, 2)
    found = {}
    for name, sizes in grids.items():
        grid = init_device_mesh("cpu", sizes)
        copies = [Replicate()] * (len(sizes) - 1)
        torch.manual_seed(1)
        values = [torch.randn(n, 3) for n in (8, 4, 5, 16, 1)] + [torch.randn(12), torch.randn(8)]
        spread = [distribute_tensor(value, grid, [*copies, Shard(0)]) for value in values]
        spread[3] = distribute_tensor(values[3][:, : sizes[-1]], grid, [*copies, Shard(1)])
        spread.insert(2, torch.randn(7))
        asked = [(t, torch.bfloat16 if i % 5 == 1 else t.dtype) for i, t in enumerate(spread)]
        for limit in (1, 100, 1 << 20):
            with patch.object(gathering_room, "GATHER_BYTES", limit):
                together = list(gathering_room.wholes(asked))
            found[f"{name} {limit}"] = [
                i
                for i, ((tensor, dtype), value) in enumerate(zip(asked, together, strict=True))
                if value.dtype != dtype or not torch.equal(value, whole(tensor).to(dtype))
            ]
        if name == "copies":  # of which each rank has all: nothing is made
            held = {local_part(tensor).data_ptr() for tensor, _ in asked}
            found["made anew"] = [
                i
                for i, ((tensor, dtype), value) in enumerate(zip(asked, together, strict=True))
                if dtype == tensor.dtype and value.data_ptr() not in held
            ]
    return found


def axes():
    """This rank's place on every axis, and who shares its shards."""
    found = {}
    for name, parallel in LAYOUTS[dist.get_world_size()].items():
        mesh = on_mesh(parallel)
        members = {
            axis: dist.get_process_group_ranks(group)
            for axis in ("data", "context", "ring", "ulysses", "tensor")
            if (group := getattr(mesh, axis).group)
        }
        found[name] = {
            "places": {axis: getattr(mesh, axis).rank for axis in members},
            "members": members,
            "shards": dict(zip(mesh.fsdp.mesh_dim_names, mesh.fsdp.shape, strict=True)),
            "sharers": mesh.fsdp.mesh.tolist(),
            "values": [
                x.tolist()
                for x in mesh.gather_values(
                    torch.full((mesh.data.rank + 1,), float(mesh.data.rank)),
                    [1 + rank for rank in range(mesh.data.size)],
                )
            ],
        }
    return found


# ---------------------------------------------------------------- planted bugs


class WeightsOfOwnRows(Trainer):
    """Normalises by the tokens of one rank."""

    def _micro_batches(self, rows, weights):
        own = list(super()._micro_batches(rows, weights))
        total = sum(row.num_trained for row in rows)
        share = sum(len(batch.labels) for batch in own if batch.ids) / total
        for batch in own:
            batch.weights = batch.weights / share
            yield batch


class OwnMetrics(Trainer):
    def forward_backward(self, *args):
        self.model._merge_ranks = lambda loss, metrics: (loss, metrics)
        return super().forward_backward(*args)


def set_divide_factor(self, factor):
    original_divide_factor(self, factor * dist.get_world_size())


def local_norm(self):
    local = [g.to_local() for g in self.gradients.values()]
    return torch.nn.utils.get_total_norm(local)


def reduce_in_bfloat16(**options):
    return MixedPrecisionPolicy(**options | {"reduce_dtype": torch.bfloat16})


original_divide_factor = FSDPModule.set_gradient_divide_factor
RIGHT = Case({}, partial(random_rows, 5, seed=4), ONE_ROW)
RIGHT_IN_BFLOAT16 = replace(RIGHT, settings={}, alike=ONE_ROW, dtype=torch.bfloat16)
BUGS = {
    "nothing": RIGHT,
    "averages": replace(
        RIGHT,
        plant=lambda: patch.object(FSDPModule, "set_gradient_divide_factor", set_divide_factor),
    ),
    "weights of own rows": replace(RIGHT, trainer_class=WeightsOfOwnRows),
    "norm of own shards": replace(
        RIGHT, plant=lambda: patch.object(ShardedPolicy, "gradient_norm", local_norm)
    ),
    "metrics of own rows": replace(RIGHT, trainer_class=OwnMetrics),
    "reduced in bfloat16": replace(
        RIGHT_IN_BFLOAT16,
        plant=lambda: patch.object(sharded, "MixedPrecisionPolicy", reduce_in_bfloat16),
    ),
    "reduced in float32": RIGHT_IN_BFLOAT16,
}


def planted():
    return outcomes(BUGS)


# ---------------------------------------------------------------- schedules


def one_huge_row():
    rows = random_rows(6, seed=5, max_completion=3)
    return rows + random_rows(1, seed=6, max_completion=110)


def one_trained_row():
    rows = random_rows(9, seed=7)
    for row in rows[1:]:
        row.loss_mask = [False] * row.num_tokens
        row.columns = dict.fromkeys(row.columns, Column(torch.empty(0)))
    return rows


SCHEDULES = {
    # Of stage 3 a rank without rows gathers weights in passes without gradient too.
    name: Case(
        {"zero_stage": stage},
        rows,
        {"max_tokens_per_microbatch": 120},
        objective={"aggregation": "sequence_mean"},
    )
    for name, stage, rows in (
        ("one row", 3, partial(random_rows, 1, seed=2)),
        ("few", 2, partial(random_rows, 3, seed=3)),
        ("random", 1, partial(random_rows, 11, seed=4)),
        ("one huge", 0, one_huge_row),
        ("masked", 3, one_trained_row),
    )
}
"""Rows that leave ranks without any, or with far more than the others."""


def schedules():
    return outcomes(SCHEDULES)


def one_pass_more(*args, **options):
    passes = original_plan(*args, **options)
    if dist.get_rank() == 1:
        return [[*own, []] for own in passes]
    return passes


original_plan = batcher.plan


def disagreements():
    rows = random_rows(6)
    trainer = make_trainer(tiny_model(), mesh=on_mesh({"zero_stage": 3}))
    with patch.object(batcher, "plan", one_pass_more):
        found = {
            "plans": attempt(lambda: trainer.update(rows)),
            "plans of scores": attempt(lambda: trainer.logprobs(rows)),
        }
    own = rows[:-1] if dist.get_rank() else rows
    found["rows"] = attempt(lambda: trainer.update(own))
    found["none trained"] = attempt(lambda: trainer.update([] if dist.get_rank() else rows))
    cfg = SFTTrainerConfig.model_validate(STEP)
    supervised = Trainer(tiny_model(), cfg, CrossEntropy(), total_steps=10, mesh=on_mesh())
    found["no demonstrations"] = attempt(lambda: supervised.update([] if dist.get_rank() else rows))
    found["afterwards"] = attempt(lambda: trainer.update(rows))
    return found


def hang():
    """The planted bug: nobody asks whether plans agree. Leaves groups behind that are of no use."""
    trainer = make_trainer(tiny_model(), mesh=on_mesh({"zero_stage": 3}, timeout_s=10))
    with (
        patch.object(batcher, "plan", one_pass_more),
        patch.object(JoinedMesh, "agree", lambda *_: None),
    ):
        return attempt(lambda: trainer.update(random_rows(6)))


# ---------------------------------------------------------------- what else ranks do together


def non_finite():
    """A gradient that is not finite on one rank, wherever it waits, and a row."""
    found = {"gradients": [stopped(knobs) for knobs in ({}, AWAY, ALL_AWAY)]}
    trainer = make_trainer(tiny_model(), mesh=on_mesh({"zero_stage": 2}))
    bad = random_rows(6)
    bad[4].column("advantages")[0] = float("nan")
    return found | {"row": attempt(lambda: trainer.update(bad))}


def weight_sync():
    found = {}
    for name, dtype, fields in (
        ("float32, tied", torch.float32, {}),
        ("bfloat16", torch.bfloat16, {"tie_word_embeddings": False}),
    ):
        model = tiny_model(dtype=dtype, **fields)
        engine = ModuleEngine(tiny_model(dtype=dtype, seed=1, **fields))
        trainer = make_trainer(model, mesh=on_mesh(), **STEP)
        trainer.update(random_rows(6))
        held = []
        original = base.deliver

        def deliver(pairs, held=held, original=original):
            held.append(sum(source.nbytes for _, source in pairs))
            return original(pairs)

        with (
            patch.object(sync, "GROUP_BYTES", 8192),
            patch.object(base, "deliver", deliver),
        ):
            report = WeightSync(trainer, engine).push(3)
        sent = dict(trainer.named_weights())
        held_by_engine = dict(export_weights(engine.model))
        with patch.object(base, "deliver", lambda pairs: 0):
            trainer.update(random_rows(6))
            missing = attempt(lambda t=trainer, e=engine: WeightSync(t, e).push(4))
        last = trainer.policy.masters["model.norm.weight"].detach().to_local()
        if dist.get_rank() == 1:
            last.view(-1)[-1] = float("nan")
        found[name] = {
            "version": engine.weight_version,
            "bytes": report.bytes,
            "expected bytes": sum(
                {t.data_ptr(): t.nbytes for t in held_by_engine.values()}.values()
            ),
            "most at a time": max(held),
            "dtypes": sorted({str(t.dtype) for t in sent.values()}),
            "same names": sorted(sent) == sorted(held_by_engine),
            "equal": all(torch.equal(held_by_engine[n], t) for n, t in sent.items()),
            "nothing sent": missing,
            "not finite": attempt(lambda t=trainer, e=engine: WeightSync(t, e).push(5)),
        }
    return found


def reference():
    """Scored over a context axis of its own."""
    found = {}
    rows = random_rows(9, seed=8)
    alone = make_trainer(tiny_model(seed=3))
    for name, parallel in {
        "as the policy": {"zero_stage": 2},
        "ulysses": {"reference_ulysses_size": 2, "zero_stage": 0},
        "ring": {"reference_ring_size": 2, "reference_ulysses_size": 1, "ulysses_size": 2},
    }.items():
        settings = {"parallel": parallel, "max_tokens_per_forward": 40}
        mesh = on_mesh(parallel)
        cfg = AlgorithmConfig.model_validate({"kl": {"coef": 0.1}})
        group = make_trainer(tiny_model(), cfg, mesh=mesh, **settings)
        scorer = make_reference(tiny_model(seed=3), mesh=mesh, **settings)
        scored, expected = logprobs_of(scorer, rows), alone.logprobs(rows)
        found[name] = {
            "difference": max(
                float((a - b).abs().max()) for a, b in zip(scored, expected, strict=True)
            ),
            "bytes": sum(p.to_local().nbytes for p in scorer.model.module.parameters()),
            "of": sum(p.nbytes for p in scorer.model.module.parameters()),
        }
        group.update(rows)
        own = scorer.model.mesh.groups
        found[name] |= {
            "groups are known": own | on_mesh(parallel).groups
            == Models({"policy": group}, {"reference": scorer}).groups,
            "groups of its own": len(own - on_mesh(parallel).groups),
        }
    return found


def states():
    """Masters from whole tensors and from shards; asleep and awake again."""
    found = {}
    for name, parallel in {"data": {}, "tensor": {"tensor_parallel_size": 2}}.items():
        trainer = make_trainer(tiny_model(), mesh=on_mesh(parallel), **STEP)
        other = dict(tiny_model(seed=5).named_parameters())
        trainer.policy.load_masters(other)
        whole_taken = all(
            torch.equal(t, other[n]) for n, t in trainer.named_weights() if n in other
        )
        saved = {name: m.detach().clone() for name, m in trainer.policy.masters.items()}
        trainer.update(random_rows(4))
        trainer.policy.load_masters(saved)
        shards_taken = all(
            torch.equal(t, other[n]) for n, t in trainer.named_weights() if n in other
        )
        before = trainer.logprobs(random_rows(3))
        trainer.sleep()
        asleep = sum(
            m.to_local().untyped_storage().nbytes() for m in trainer.policy._masters.values()
        )
        trainer.wake()
        after = trainer.logprobs(random_rows(3))
        found[name] = {
            "whole": whole_taken,
            "shards": shards_taken,
            "bytes asleep": asleep,
            "same": all(torch.equal(a, b) for a, b in zip(before, after, strict=True)),
            "refused": attempt(lambda t=trainer: t.policy.load_masters({})),
        }
    return found


def restored():
    """From a checkpoint, into a model of other weights and moments."""
    found = {}
    rows = random_rows(4)
    with TemporaryDirectory() as own_folder:
        away = {"offload": "optimizer", "optimizer": {"state_dtype": "bfloat16"}}
        for name, (parallel, knobs) in {
            "data": ({}, STEP),
            "tensor": ({"tensor_parallel_size": 2}, STEP),
            "moments on the host": ({"zero_stage": 2}, away),
        }.items():
            mesh = on_mesh(parallel)
            straight, resumed = (
                make_trainer(tiny_model(seed=seed), mesh=mesh, parallel=parallel, **knobs)
                for seed in (0, 5)
            )
            straight.update(rows)
            resumed.update(random_rows(5, seed=9))
            store = CheckpointStore(Path(shared(own_folder)) / name, mesh=mesh, timeout_s=TIMEOUT_S)
            tensors, metadata = straight.state_dict()
            store.save(1, {"trainer": tensors})
            counts = []
            with (
                patch.object(policy_module, "own_part", one_by_one(counts)),
                patch.object(update_rules, "own_part", one_by_one(counts)),
            ):
                resumed.load_state_dict(store.load(1).parts["trainer"], metadata)
            weights = [dict(t.named_weights()) for t in (straight, resumed)]
            metrics = [scalars(t.update(rows)) for t in (straight, resumed)]
            weights_after = [dict(t.named_weights()) for t in (straight, resumed)]
            found[name] = {
                "equal": equal(*weights),
                "go on alike": metrics[0] == metrics[1] and equal(*weights_after),
                "read": len(counts),
                "of": 3 * len(straight.policy.masters),
                "held": max(counts),
            }
        dist.barrier()
    return found


# ---------------------------------------------------------------- what waits on the host

AWAY = {"offload": "gradients"}
ALL_AWAY = {"offload": "parameters"}


def course(knobs, parallel, *, settings=ONE_ROW, dtype=torch.bfloat16, lora=False, resume=None):
    """All numbers of two steps, the second of which goes on from a saved state, with `resume`'s
    knobs."""
    rows = random_rows(4, seed=1)

    def fresh(knobs, seed):
        model = tiny_model(dtype=dtype, seed=seed, tie_word_embeddings=not lora)
        if lora:
            adapt(model, LoraConfig(rank=3), seed=seed)
        return make_trainer(
            model, mesh=on_mesh(parallel), parallel=parallel, **STEP, **settings, **knobs
        )

    trainer = fresh(knobs, 0)
    found = {"metrics 0": str(scalars(trainer.update(rows)))}
    if resume is not None:
        tensors, metadata = trainer.state_dict()
        trainer = fresh(resume, 1 if not lora else 0)
        trainer.load_state_dict({n: t.clone() for n, t in tensors.items()}, metadata)
    found["logprobs"] = torch.cat(trainer.logprobs(rows))
    found["metrics 1"] = str(scalars(trainer.update(rows)))
    found |= {f"exported {n}": t.clone() for n, t in trainer.named_weights()}
    return found | {n: whole(t).clone() for n, t in trainer.state_dict()[0].items()}


def stopped(knobs):
    """What a gradient that is not finite on one rank leads to."""
    parallel = {"zero_stage": 3}
    trainer = make_trainer(
        tiny_model(), mesh=on_mesh(parallel), parallel=parallel, **ONE_ROW, **knobs
    )
    name, rows = "model.layers.1.mlp.down_proj.weight", random_rows(6)
    trainer.update(rows)
    before = {n: t.clone() for n, t in trainer.named_weights()}
    add = HostGradients.add

    def overflow(shard):
        if dist.get_rank() == 1:
            shard.view(-1)[5] = float("inf")

    def adding(self, to, shard):
        if to == name:
            overflow(shard)
        add(self, to, shard)

    with ExitStack() as stack:
        if knobs != AWAY:
            hook = trainer.policy.masters[name].register_post_accumulate_grad_hook(
                lambda master: overflow(master.grad.to_local())
            )
            stack.callback(hook.remove)
        stack.enter_context(patch.object(HostGradients, "add", adding))
        message = attempt(lambda: trainer.update(rows))
    unchanged = equal(dict(trainer.named_weights()), before)
    return [message, unchanged, attempt(lambda: trainer.update(rows))]


def differing(found, expected):
    """Names of what differs, and by how much the masters do, at most."""
    assert found.keys() == expected.keys()
    names = [
        n
        for n, e in expected.items()
        if not (found[n] == e if isinstance(e, str) else torch.equal(found[n], e))
    ]
    masters = [n for n in names if n.startswith("weights/")]
    worst = max((difference(found[n].double(), expected[n].double()) for n in masters), default=0)
    return {"names": names, "masters": worst}


def unscaled(self, gradients, lr, _):
    right_stream(self, gradients, lr, None)


right_stream = update_rules.ParameterOptimizer._stream


class LastMicroBatch(HostGradients):
    """Forgets what earlier micro-batches brought."""

    def add(self, name, gradient):
        self._norms.pop(name, None)
        super().add(name, gradient)


def offloaded():
    """Gradients and shards on the host, against none of it."""
    cases = {
        "stage 2": ({"zero_stage": 2}, [AWAY], {}),
        "stage 3": ({"zero_stage": 3}, [AWAY, ALL_AWAY], {}),
        "float32, recomputed": (
            {"zero_stage": 3},
            [ALL_AWAY],
            {"dtype": torch.float32, "settings": ONE_ROW | {"recompute": "full"}},
        ),
        "tensor 2": ({"tensor_parallel_size": 2, "zero_stage": 3}, [ALL_AWAY], {}),
        "adapters": ({"zero_stage": 3}, [ALL_AWAY], {"lora": True}),
        "stage 0, one pass": ({"zero_stage": 0}, [AWAY], {"settings": {}}),
        "stage 1": ({"zero_stage": 1}, [AWAY], {}),
    }
    if dist.get_world_size() == 4:
        copies = {"zero_stage": 3, "fsdp_size": 2}
        cases = {
            "stage 0, one pass": cases["stage 0, one pass"],
            "copies": (copies, [AWAY, ALL_AWAY], {}),
        }
    found = {}
    for name, (parallel, knobs, options) in cases.items():
        plain = course({}, parallel, **options)
        found[name] = [differing(course(k, parallel, **options), plain) for k in knobs]
        if name == "stage 3":
            there = course({}, parallel, resume=ALL_AWAY)
            back = course(ALL_AWAY, parallel, resume={})
            found["resumed"] = [differing(there, plain), differing(back, plain)]
            with patch.object(update_rules.ParameterOptimizer, "_stream", unscaled):
                found["not clipped"] = [differing(course(k, parallel), plain) for k in knobs]
            with patch.object(host_gradients, "HostGradients", LastMicroBatch):
                found["earlier passes"] = [differing(course(AWAY, parallel), plain)]
    return found


def one_by_one(counts):
    """`own_part`, noting each time how many tensors that it gave are still there."""
    given = []

    def taking(value, *, like):
        counts.append(sum(tensor() is not None for tensor in given))
        tensor = own_part(value, like=like)
        given.append(ref(tensor))
        return tensor

    return taking


def supervised():
    return supervised_steps({})


PARTS = (axes, gathering, layouts, schedules, disagreements, offloaded)
PARTS_OF_TWO = (
    *(bfloat16, float8, planted, non_finite, weight_sync, reference, supervised),
    *(states, restored, hang),
)


def main():
    start(PARTS + PARTS_OF_TWO if processes().world_size == 2 else PARTS)
