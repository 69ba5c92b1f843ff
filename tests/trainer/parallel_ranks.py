"""Trains in one of several processes (`tests.ranks`), part after part.

Rank 0 also trains each model alone, and what comes out is compared there.
"""

from __future__ import annotations

from contextlib import ExitStack
from datetime import timedelta
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from unittest.mock import patch
from weakref import ref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hone.algorithms.sft import SFT, CrossEntropy
from hone.checkpoint.sharded import local_part, own_part
from hone.checkpoint.store import CheckpointStore
from hone.config.algorithm import AlgorithmConfig
from hone.config.extras import is_installed
from hone.config.model import LoraConfig
from hone.config.parallel import AxisSizes, ParallelConfig
from hone.config.trainer import SFTTrainerConfig
from hone.distributed.mesh import Mesh
from hone.loops.supervised import evaluate
from hone.models.adapters import adapt
from hone.models.manifest import export_weights
from hone.observe.metrics import to_scalars
from hone.trainer import batcher, precision, sharded, update_rules
from hone.trainer import gathering as gathering_room
from hone.trainer import policy as policy_module
from hone.trainer.host_gradients import HostGradients
from hone.trainer.models import Models
from hone.trainer.sharded import ShardedPolicy
from hone.trainer.trainer import Trainer
from hone.types import Column
from hone.weights import sync
from hone.weights.sync import WeightSync
from tests.ranks import run_parts
from tests.trainer import float8_twin
from tests.trainer.examples import (
    gradients,
    logprobs_of,
    make_reference,
    make_trainer,
    near_policy,
    random_rows,
    tiny_model,
)
from tests.trainer.parallel_cases import LAYOUTS, runs
from tests.weights.test_sync import ModuleEngine

CPU = torch.device("cpu")
TIMEOUT_S = 60
"""For what ranks do together; only where one does not come does another wait so long."""
STEP = {"optimizer": {"lr": 0.01, "eps": 1e-3, "max_grad_norm": 0.3}}
CUT = {"train/num_micro_batches"}
"""Metrics that say how the work was cut."""
OF_TOKENS = {"policy/clip_fraction", "train/share_with_gradient"}
"""Shares of tokens on one side of a border: once weights have moved, a rounding may carry one
across."""


@cache
def mesh_of(sizes, timeout_s):
    return Mesh.of_group(sizes, CPU, timeout=timedelta(seconds=timeout_s))


def on_mesh(parallel=None, *, timeout_s=TIMEOUT_S):
    sizes = AxisSizes.of(ParallelConfig(**parallel or {}), dist.get_world_size())
    return mesh_of(sizes, timeout_s)


def shared(value):
    """Rank 0's value, everywhere."""
    box = [value]
    dist.broadcast_object_list(box, src=0)
    return box[0]


def rows_near(model, cfg, rows):
    near_policy(rows, make_trainer(model, cfg))
    return shared(rows)


def everywhere(value):
    values = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def difference(actual, expected):
    """Largest, as a share of the largest value."""
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-30))


def of_each(actual, expected):
    """Largest relative difference of the norm of one of several named tensors."""
    assert actual.keys() == expected.keys()
    return max(
        float((actual[n] - want).norm() / want.norm().clamp(min=1e-12))
        for n, want in expected.items()
    )


def scalars(metrics):
    return {k: v for k, v in to_scalars(metrics).items() if k not in CUT}


def compare(model, cfg, rows, settings, *, trainer_class=Trainer, dtype=torch.float32):
    """What a group of processes computes against what one does alone.

    Only rank 0 works alone, and only its differences count.
    """
    make = {"algorithm": cfg, **STEP, **settings}
    is_first = dist.get_rank() == 0
    alone_settings = {k: v for k, v in make.items() if k != "parallel"}
    alone = make_trainer(tiny_model(dtype=dtype, **model), **alone_settings) if is_first else None
    group = make_trainer(
        tiny_model(dtype=dtype, **model),
        mesh=on_mesh(settings.get("parallel")),
        trainer_class=trainer_class,
        **make,
    )
    before = {n: t.double() for n, t in group.named_weights()}

    logprobs = group.logprobs(rows)
    loss, _ = group.forward_backward(rows)
    found = of_all_stages(group.mesh, gradients(group))
    metrics = [scalars(group.update(rows)) for _ in range(2)]
    weights = {n: t.double() for n, t in group.named_weights()}
    masters = {n: whole(m).double() for n, m in group.policy.masters.items()}
    masters = of_all_stages(group.mesh, masters)
    outcome = [[x.tolist() for x in logprobs], float(loss), metrics]
    result = {
        "same everywhere": all(other == outcome for other in everywhere(outcome)),
        "formats": sorted({str(m.to_local().dtype) for m in group.policy.masters.values()}),
    }
    if alone is None:
        return result

    expected_loss, _ = alone.forward_backward(rows)
    expected = gradients(alone)
    flat, expected_flat = torch.cat(logprobs), torch.cat(alone.logprobs(rows))
    expected_metrics = [scalars(alone.update(rows)) for _ in range(2)]
    assert [m.keys() for m in metrics] == [m.keys() for m in expected_metrics]
    moved = {n: t.double() - before[n] for n, t in alone.named_weights()}
    expected_masters = {n: m.detach().double() for n, m in alone.policy.masters.items()}
    return result | {
        "logprobs": float((flat - expected_flat).abs().max()),
        "loss": abs(float(loss) - float(expected_loss)) / abs(float(expected_loss)),
        "gradient": of_each(found, expected),
        "metrics": max(
            metric_error(key, m[key], want)
            for step, (m, e) in enumerate(zip(metrics, expected_metrics, strict=True))
            for key, want in e.items()
            if step == 0 or key not in OF_TOKENS
        ),
        "weights": difference(flatten({n: weights[n] - before[n] for n in moved}), flatten(moved)),
        "masters": difference(flatten(masters), flatten(expected_masters)),
    }


def metric_error(key, found, want):
    """Relative; of a loss to its terms, which are of order one and cancel. Of weights that an
    update leaves alone a rounding may add or take a few."""
    if key == "train/share_unchanged" and abs(found - want) < 1e-3:
        return 0.0
    return abs(found - want) / max(abs(want), 1.0 if key == "train/loss" else 1e-3)


def of_all_stages(mesh, tensors):
    """What each pipeline stage has; what two have must be the same."""
    merged = {}
    for own in mesh.gather_stages(tensors):
        for name, tensor in own.items():
            assert torch.equal(merged.setdefault(name, tensor), tensor), name
    return merged


def whole(tensor):
    return tensor.detach().full_tensor() if isinstance(tensor, DTensor) else tensor.detach()


def flatten(tensors):
    return torch.cat([tensors[name].flatten() for name in sorted(tensors)])


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


def layouts():
    found = {}
    for name, run in runs(dist.get_world_size()).items():
        cfg = AlgorithmConfig.model_validate(run["objective"])
        rows = rows_near(tiny_model(**run["model"]), cfg, random_rows(13, seed=len(name)))
        found[name] = compare(run["model"], cfg, rows, run["settings"])
    return found


def bfloat16():
    """One row a pass, so that both round the same passes, and only sums over them differ."""
    cfg = AlgorithmConfig(entropy_coef=0.1)
    rows = rows_near(tiny_model(dtype=torch.bfloat16), cfg, random_rows(6, seed=1))
    layouts = {f"stage {stage}": {"zero_stage": stage} for stage in range(4)}
    layouts["tensor"] = {"tensor_parallel_size": 2}
    return {
        name: compare(
            {}, cfg, rows, {"micro_batch_size": 1, "parallel": parallel}, dtype=torch.bfloat16
        )
        for name, parallel in layouts.items()
    }


def float8():
    """As `bfloat16`, with products that torchao computes; nothing without it."""
    if not is_installed("torchao"):
        return None
    cfg = AlgorithmConfig()
    rows = rows_near(tiny_model(dtype=torch.bfloat16), cfg, random_rows(6, seed=1))
    settings = {"micro_batch_size": 1, "matmul_precision": "fp8", "recompute": "full"}
    with (
        patch.object(precision, "require_matmul_precision", lambda *_: None),
        patch.object(torch, "_scaled_mm", float8_twin.scaled_mm),
    ):
        return {
            f"stage {stage}": compare(
                {}, cfg, rows, settings | {"parallel": {"zero_stage": stage}}, dtype=torch.bfloat16
            )
            for stage in (1, 3)
        }


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
BUGS = {
    "nothing": {},
    "averages": {
        "patch": (FSDPModule, "set_gradient_divide_factor", set_divide_factor),
    },
    "weights of own rows": {"trainer_class": WeightsOfOwnRows},
    "norm of own shards": {"patch": (ShardedPolicy, "gradient_norm", local_norm)},
    "metrics of own rows": {"trainer_class": OwnMetrics},
    "reduced in bfloat16": {
        "patch": (sharded, "MixedPrecisionPolicy", reduce_in_bfloat16),
        "dtype": torch.bfloat16,
    },
    "reduced in float32": {"dtype": torch.bfloat16},
}


def planted():
    found = {}
    cfg = AlgorithmConfig()
    rows = rows_near(tiny_model(), cfg, random_rows(7, seed=4))
    for name, bug in BUGS.items():
        options = {key: value for key, value in bug.items() if key != "patch"}
        with ExitStack() as stack:
            if "patch" in bug:
                stack.enter_context(patch.object(*bug["patch"]))
            found[name] = compare({}, cfg, rows, {"micro_batch_size": 1}, **options)
    return found


# ---------------------------------------------------------------- schedules


def schedules():
    """Rows that leave ranks without any, or with far more than the others."""
    lone, few, many = random_rows(1, seed=2), random_rows(3, seed=3), random_rows(11, seed=4)
    huge = random_rows(6, seed=5, max_completion=3) + random_rows(1, seed=6, max_completion=110)
    masked = random_rows(9, seed=7)
    for row in masked[1:]:
        row.loss_mask = [False] * row.num_tokens
        row.columns = dict.fromkeys(row.columns, Column(torch.empty(0)))
    cases = {"one row": lone, "few": few, "random": many, "one huge": huge, "masked": masked}
    found = {}
    for number, (name, rows) in enumerate(cases.items()):
        cfg = AlgorithmConfig(aggregation="sequence_mean")
        rows = rows_near(tiny_model(), cfg, rows)
        found[name] = compare(
            {},
            cfg,
            rows,
            {
                "max_tokens_per_microbatch": 120,
                # Of stage 3 a rank without rows gathers weights in passes without gradient too.
                "parallel": {"zero_stage": 3 - number % 4},
            },
        )
    return found


def one_pass_more(*args, **options):
    passes = original_plan(*args, **options)
    if dist.get_rank() == 1:
        return [[*own, []] for own in passes]
    return passes


original_plan = batcher.plan


def attempt(function):
    try:
        function()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


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
    trainer = make_trainer(tiny_model(), mesh=on_mesh({"zero_stage": 3}, timeout_s=3))
    with (
        patch.object(batcher, "plan", one_pass_more),
        patch.object(Mesh, "agree", lambda *_: None),
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
        original = sync.deliver

        def deliver(pairs, held=held, original=original):
            held.append(sum(source.nbytes for _, source in pairs))
            return original(pairs)

        with (
            patch.object(sync, "GROUP_BYTES", 8192),
            patch.object(sync, "deliver", deliver),
        ):
            report = WeightSync(trainer, engine).push(3)
        sent = dict(trainer.named_weights())
        held_by_engine = dict(export_weights(engine.model))
        with patch.object(sync, "deliver", lambda pairs: 0):
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


def supervised():
    rows = random_rows(7, seed=1)
    for row in rows:
        row.columns.clear()
    cfg = SFTTrainerConfig.model_validate({"max_tokens_per_microbatch": 40, **STEP})
    found = []
    for mesh in (None, on_mesh()):
        trainer = Trainer(tiny_model(), cfg, CrossEntropy(), total_steps=10, mesh=mesh)
        measure = partial(evaluate, Models({"policy": trainer}), SFT())
        steps = (measure, trainer.update, trainer.update, measure)
        found.append([scalars(step(rows)) for step in steps])
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
            store = CheckpointStore(Path(shared(own_folder)) / name, mesh=mesh, timeout_s=60)
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
ONE_ROW = {"micro_batch_size": 1}


def course(knobs, parallel, *, settings=ONE_ROW, dtype=torch.bfloat16, lora=False, resume=None):
    """All numbers of three steps, the last of which goes on from a saved state, with `resume`'s
    knobs."""
    rows = random_rows(7, seed=1)

    def fresh(knobs, seed):
        model = tiny_model(dtype=dtype, seed=seed, tie_word_embeddings=not lora)
        if lora:
            adapt(model, LoraConfig(rank=3), seed=seed)
        return make_trainer(
            model, mesh=on_mesh(parallel), parallel=parallel, **STEP, **settings, **knobs
        )

    trainer = fresh(knobs, 0)
    found = {f"metrics {step}": str(scalars(trainer.update(rows))) for step in range(2)}
    if resume is not None:
        tensors, metadata = trainer.state_dict()
        trainer = fresh(resume, 1 if not lora else 0)
        trainer.load_state_dict({n: t.clone() for n, t in tensors.items()}, metadata)
    found["logprobs"] = torch.cat(trainer.logprobs(rows))
    found["metrics 2"] = str(scalars(trainer.update(rows)))
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


def apart(found, expected):
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
        found[name] = [apart(course(k, parallel, **options), plain) for k in knobs]
        if name == "stage 3":
            there = course({}, parallel, resume=ALL_AWAY)
            back = course(ALL_AWAY, parallel, resume={})
            found["resumed"] = [apart(there, plain), apart(back, plain)]
            with patch.object(update_rules.ParameterOptimizer, "_stream", unscaled):
                found["not clipped"] = [apart(course(k, parallel), plain) for k in knobs]
            with patch.object(policy_module, "HostGradients", LastMicroBatch):
                found["earlier passes"] = [apart(course(AWAY, parallel), plain)]
    return found


def equal(one, other):
    return one.keys() == other.keys() and all(torch.equal(t, other[n]) for n, t in one.items())


def one_by_one(counts):
    """`own_part`, noting each time how many tensors that it gave are still there."""
    given = []

    def taking(value, *, like):
        counts.append(sum(tensor() is not None for tensor in given))
        tensor = own_part(value, like=like)
        given.append(ref(tensor))
        return tensor

    return taking


PARTS = (axes, gathering, layouts, schedules, disagreements, offloaded)
PARTS_OF_TWO = (
    *(bfloat16, float8, planted, non_finite, weight_sync, reference, supervised),
    *(states, restored, hang),
)


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    run_parts(PARTS + PARTS_OF_TWO if dist.get_world_size() == 2 else PARTS)
