"""Runs pipeline stages in one of several processes (`tests.ranks`), part after part.

Whole trainers are compared with one that rank 0 trains alone, of the same rows.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hone.algorithms.sft import SFT, CrossEntropy
from hone.attention import ATTENTION_NAME
from hone.checkpoint.export import export_hf
from hone.checkpoint.sharded import local_part
from hone.checkpoint.store import CheckpointStore
from hone.config.algorithm import AlgorithmConfig
from hone.config.trainer import SFTTrainerConfig
from hone.loops.supervised import evaluate
from hone.models.deferred import Weight, defer
from hone.models.manifest import export_weights
from hone.trainer import parallel_model, pipeline
from hone.trainer.models import Models
from hone.trainer.pipeline import Pipeline
from hone.trainer.policy import BasePolicy
from hone.trainer.trainer import Trainer
from hone.weights.sync import WeightSync
from tests.ranks import run_parts
from tests.trainer.examples import make_trainer, random_rows, tiny_model
from tests.trainer.parallel_ranks import (
    STEP,
    compare,
    difference,
    everywhere,
    of_all_stages,
    on_mesh,
    rows_near,
    scalars,
    shared,
    whole,
)
from tests.weights.test_sync import ModuleEngine

MODEL = {"num_hidden_layers": 5}
UNTIED = {**MODEL, "tie_word_embeddings": False}
COSTLY = {**MODEL, "vocab_size": 16384}
"""Its head takes as long as three layers."""
TWO = {"pipeline_parallel_size": 2}
GROUPS = TWO | {"virtual_stages": 2}
TENSOR = TWO | {"tensor_parallel_size": 2}
OF_TWO = {f"two stages, zero {zero}": TWO | {"zero_stage": zero} for zero in range(4)}
LAYOUTS = {
    2: {**OF_TWO, "two groups each": GROUPS | {"zero_stage": 1}},
    4: {
        **OF_TWO,
        "two stages, two copies of shards": TWO | {"zero_stage": 1, "fsdp_size": 1},
        "four stages": {"pipeline_parallel_size": 4, "zero_stage": 1},
        **{
            f"two stages, {axis} 2": TWO | {f"{axis}_size": 2, "zero_stage": zero}
            for axis, zero in (("tensor_parallel", 1), ("ulysses", 2), ("ring", 3))
        },
        **{f"two groups each, zero {zero}": GROUPS | {"zero_stage": zero} for zero in range(4)},
        "two groups each, two copies of shards": GROUPS | {"zero_stage": 2, "fsdp_size": 1},
        **{
            f"two groups each, {axis} 2": GROUPS | {f"{axis}_size": 2, "zero_stage": zero}
            for axis, zero in (("tensor_parallel", 1), ("ulysses", 2), ("ring", 3))
        },
    },
}
ONE_ROW = {"micro_batch_size": 1}


def stages():
    """Two stages; of four processes each of two tensor parallel ones."""
    return TWO if dist.get_world_size() == 2 else TENSOR


def cases():
    """Model, loss, rows and settings of each comparison."""
    parallel = TWO | {"zero_stage": 1}
    many, few = random_rows(13, seed=5), random_rows(1, seed=6)
    plain, entropy = AlgorithmConfig(), AlgorithmConfig(entropy_coef=0.1)
    for name, layout in LAYOUTS[dist.get_world_size()].items():
        yield name, MODEL, entropy, many, {"micro_batch_size": 2, "parallel": layout}
    yield "untied", UNTIED, plain, many, {"micro_batch_size": 2, "parallel": parallel}
    yield "costly head", COSTLY, entropy, many, {"micro_batch_size": 2, "parallel": parallel}
    costly = {**COSTLY, "tie_word_embeddings": False, "num_hidden_layers": 7}
    settings = {"micro_batch_size": 2, "parallel": GROUPS}
    yield "costly head, two groups each", costly, plain, many, settings
    for mode in ("full", "selective", "uniform:2", "block:2"):
        settings = {**ONE_ROW, "recompute": mode, "parallel": parallel}
        yield f"recompute {mode}", MODEL, plain, many, settings
    settings = {**ONE_ROW, "recompute": "uniform:2", "parallel": GROUPS}
    yield "two groups each, recompute uniform:2", MODEL, plain, many, settings
    if dist.get_world_size() == 4:
        yield from cases_of_tensor(plain, many, few)
        yield from cases_of_groups(plain, many, few)
        of_four = {"pipeline_parallel_size": 4, "zero_stage": 1}
        deeper = {**COSTLY, "num_hidden_layers": 9}
        yield "costly head, four stages", deeper, plain, many, {**ONE_ROW, "parallel": of_four}
        settings = {**ONE_ROW, "parallel": TENSOR | {"zero_stage": 3}}
        yield "costly head, tensor 2", COSTLY, plain, many, settings
    yield "one micro-batch", MODEL, plain, few, {"parallel": parallel}
    yield (
        "uneven micro-batches",
        MODEL,
        plain,
        random_rows(7, seed=7),
        {
            "max_tokens_per_microbatch": 60,
            "parallel": parallel,
        },
    )
    yield (
        "moments on the host",
        MODEL,
        plain,
        many,
        {
            **ONE_ROW,
            "offload": "optimizer",
            "parallel": parallel,
        },
    )
    yield (
        "sliding windows",
        {
            **UNTIED,
            "family": "gemma3_text",
            "num_hidden_layers": 6,
            "sliding_window": 8,
            "query_pre_attn_scalar": 8,
        },
        plain,
        many,
        {"micro_batch_size": 3, "parallel": parallel},
    )


def cases_of_tensor(cfg, many, few):
    """Two stages of two tensor parallel processes each."""
    parallel = TENSOR | {"zero_stage": 1}
    yield "tensor 2, untied", UNTIED, cfg, few, {"parallel": parallel}
    for mode in ("full", "selective", "uniform:2"):
        settings = {**ONE_ROW, "recompute": mode, "parallel": parallel}
        yield f"tensor 2, recompute {mode}", MODEL, cfg, many, settings
    yield "tensor 2, one micro-batch", MODEL, cfg, few, {"parallel": parallel}
    settings = {"max_tokens_per_microbatch": 60, "parallel": TENSOR | {"zero_stage": 3}}
    yield "tensor 2, uneven micro-batches", MODEL, cfg, random_rows(7, seed=5), settings
    settings = {**ONE_ROW, "offload": "optimizer", "parallel": parallel}
    yield "tensor 2, moments on the host", MODEL, cfg, many, settings


def cases_of_groups(cfg, many, few):
    """Stages of two groups of layers."""
    parallel = {"parallel": GROUPS | {"zero_stage": 1}}
    yield "two groups each, untied", UNTIED, cfg, many, {"micro_batch_size": 2, **parallel}
    yield "two groups each, one micro-batch", MODEL, cfg, few, parallel
    settings = {"max_tokens_per_microbatch": 60, "parallel": GROUPS | {"zero_stage": 3}}
    yield "two groups each, uneven micro-batches", MODEL, cfg, random_rows(7, seed=7), settings
    for mode in ("full", "selective", "block:1"):
        settings = {**ONE_ROW, "recompute": mode, **parallel}
        yield f"two groups each, recompute {mode}", MODEL, cfg, many, settings
    settings = {**ONE_ROW, "offload": "optimizer", **parallel}
    yield "two groups each, moments on the host", MODEL, cfg, many, settings
    deeper = {**UNTIED, "num_hidden_layers": 9}
    of_four = {"pipeline_parallel_size": 4, "virtual_stages": 2}
    yield "four stages of two groups", deeper, cfg, many, {**ONE_ROW, "parallel": of_four}
    three = {**ONE_ROW, "parallel": TWO | {"virtual_stages": 3}}
    yield "three groups each", deeper, cfg, many, three


def layouts():
    found = {}
    for name, model, cfg, rows, settings in cases():
        near = rows_near(tiny_model(**model), cfg, rows)
        found[name] = compare(model, cfg, near, settings)
    return found


def bfloat16():
    """One row a pass, so that both round the same passes, and only sums over them differ; and not
    tied, where one process adds up the two gradients of the embedding in bfloat16."""
    cfg = AlgorithmConfig(entropy_coef=0.1)
    rows = rows_near(tiny_model(dtype=torch.bfloat16, **UNTIED), cfg, random_rows(6, seed=1))
    return {
        name: compare(UNTIED, cfg, rows, {**ONE_ROW, "parallel": layout}, dtype=torch.bfloat16)
        for name, layout in LAYOUTS[dist.get_world_size()].items()
    }


def supervised():
    """Metrics of two steps of SFT and an evaluation, alone and in stages."""
    rows = random_rows(7, seed=1)
    for row in rows:
        row.columns.clear()
    cfg = SFTTrainerConfig.model_validate({"max_tokens_per_microbatch": 40, **STEP})
    found = []
    for mesh in (None, on_mesh(TWO)):
        model = tiny_model(**MODEL)
        trainer = Trainer(model, cfg, CrossEntropy(), total_steps=10, mesh=mesh)
        measure = partial(evaluate, Models({"policy": trainer}), SFT())
        steps = (measure, trainer.update, trainer.update, measure)
        found.append([scalars(step(rows)) for step in steps])
    return found


def value_model():
    config = tiny_model(**MODEL).config
    config.num_labels = 1
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForSequenceClassification.from_config(
            config, dtype=torch.float32, attn_implementation=ATTENTION_NAME
        )
    return model.eval()


def scores():
    """Largest differences of each output without gradient, and of a critic's values."""
    rows = random_rows(9, seed=3)
    wanted = frozenset(("logprobs", "entropy", "top_ids", "top_logprobs"))
    found = {}
    for name, model, outputs in (
        ("policy", partial(tiny_model, **MODEL), wanted),
        ("critic", value_model, frozenset({"values"})),
    ):
        per_mesh = []
        for mesh in (None, on_mesh(stages()), on_mesh(GROUPS)):
            trainer = make_trainer(model(), mesh=mesh, micro_batch_size=2)
            per_mesh.append(trainer.outputs(rows, outputs))
        for output in sorted(outputs):
            alone, *staged = (torch.cat([of[output] for of in each]) for each in per_mesh)
            for layout, scored in zip(("stages", "groups"), staged, strict=True):
                found[f"{name} {output}, {layout}"] = [
                    float((alone - scored).abs().max()),
                    str(scored.dtype) == str(alone.dtype),
                ]
    return found


def in_flight():
    """Most forward passes whose backward was still to come, and passes in their order."""
    trainer = make_trainer(tiny_model(**MODEL), mesh=on_mesh(TWO), **ONE_ROW)
    order = []
    run, begin = trainer.model._run_stage, trainer.model._sharded.begin_micro_batch

    def forward(*args):
        order.append("F")
        return run(*args)

    def backward(*, is_last, group):
        order.append("b" if is_last else "B")
        begin(is_last=is_last, group=group)

    with (
        patch.object(trainer.model, "_run_stage", forward),
        patch.object(trainer.model._sharded, "begin_micro_batch", backward),
    ):
        trainer.forward_backward(random_rows(4 * trainer.mesh.data.size, seed=4))
    return "".join(order)


def parts_held():
    """Names that each rank holds, and its share of their values."""
    found = {}
    for name, parallel in LAYOUTS[dist.get_world_size()].items():
        trainer = make_trainer(tiny_model(**MODEL), mesh=on_mesh(parallel), parallel=parallel)
        masters = trainer.policy.masters
        held = sum(local_part(m.detach()).numel() for m in masters.values())
        found[name] = [sorted(masters), held / sum(m.numel() for m in masters.values())]
    return found


def round_trip():
    """Masters and the next step of a run that goes on in another number of stages, or with other
    layers in each."""
    one, two = {"zero_stage": 1}, TWO | {"zero_stage": 1}
    cases = {
        "two stages, then one": (two, one),
        "one stage, then two": (one, two),
        "two stages, shards, then whole": (two, TWO | {"zero_stage": 0}),
    }
    cases["two groups each, then one stage"] = (GROUPS | one, one)
    cases["two stages, cut otherwise"] = (two, two)
    if dist.get_world_size() == 4:
        cases["two stages, then two groups each"] = (two, GROUPS)
        cases["four stages, then two"] = ({"pipeline_parallel_size": 4}, two)
        cases["two stages of tensor 2, then one"] = (TENSOR, one)
        cases["tensor 2, then two stages of it"] = ({"tensor_parallel_size": 2}, TENSOR)
    rows = rows_near(tiny_model(**MODEL), AlgorithmConfig(), random_rows(6, seed=2))
    found = {}
    otherwise = patch.object(pipeline, "stage_layers", lambda *_, **__: [[range(1)], [range(1, 5)]])

    def trainer_of(seed, parallel):
        model = tiny_model(**MODEL, seed=seed)
        return make_trainer(model, mesh=on_mesh(parallel), parallel=parallel, **STEP)

    with TemporaryDirectory() as own_folder:
        for name, layouts in cases.items():
            is_cut_otherwise = name.endswith("cut otherwise")
            with otherwise if is_cut_otherwise else nullcontext():
                first = trainer_of(0, layouts[0])
            second = trainer_of(1, layouts[1])
            if is_cut_otherwise:
                assert first.policy.masters.keys() != second.policy.masters.keys()
            first.update(rows)
            folder = Path(shared(own_folder)) / name
            store = CheckpointStore(folder, mesh=first.mesh, timeout_s=60)
            tensors, metadata = first.state_dict()
            store.save(1, {"trainer": tensors})
            store = CheckpointStore(folder, mesh=second.mesh, timeout_s=60)
            second.load_state_dict(store.load(1).parts["trainer"], metadata)
            masters = [
                of_all_stages(t.mesh, {n: whole(m).clone() for n, m in t.policy.masters.items()})
                for t in (first, second)
            ]
            are_equal = all(torch.equal(m, masters[1][n]) for n, m in masters[0].items())
            norms = [scalars(t.update(rows))["train/grad_norm"] for t in (first, second)]
            weights = [dict(t.named_weights()) for t in (first, second)]
            found[name] = {
                "tensors": len(tensors),
                "equal": are_equal and masters[0].keys() == masters[1].keys(),
                "norms": norms,
                "go on alike": max(
                    difference(weights[1][n], weight) for n, weight in weights[0].items()
                ),
            }
        dist.barrier()
    return found


def delivered():
    """What an engine beside each stage samples with after a push, and what is exported. Where
    matrices are shared, sums would be rounded to bfloat16 otherwise."""
    narrow = torch.bfloat16 if dist.get_world_size() == 2 else torch.float32
    found = {}
    with TemporaryDirectory() as own_folder:
        for name, fields, dtype, parallel in (
            ("tied", MODEL, torch.float32, stages()),
            ("untied", UNTIED, narrow, stages()),
            ("groups", MODEL, torch.float32, GROUPS),
        ):
            alone = make_trainer(tiny_model(dtype=dtype, **fields), **ONE_ROW, **STEP)
            mesh = on_mesh(parallel)
            trainer = make_trainer(tiny_model(dtype=dtype, **fields), mesh=mesh, **ONE_ROW, **STEP)
            for each in (alone, trainer):
                each.update(random_rows(6))
            engine = ModuleEngine(tiny_model(dtype=dtype, seed=1, **fields))
            WeightSync(trainer, engine).push(3)
            held, expected = dict(export_weights(engine.model)), dict(alone.named_weights())
            folder = Path(shared(own_folder)) / name
            policy, tokenizer = trainer.policy, SimpleNamespace(save_pretrained=lambda _: None)
            weights = policy.named_masters()
            export_hf(policy.model, tokenizer, folder, torch.float32, weights, mesh=mesh)
            exported = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            masters = dict(alone.policy.named_masters())
            trainer.sleep()
            asleep = dict(trainer.named_weights())
            trainer.wake()
            found[name] = {
                "names": dict(trainer.named_weights()).keys() == expected.keys(),
                "engine": max(
                    difference(held[n].double(), w.double()) for n, w in expected.items()
                ),
                "version": engine.weight_version,
                "exported": max(
                    difference(exported.state_dict()[n], w.float()) for n, w in masters.items()
                ),
                "asleep": all(torch.equal(held[n], w) for n, w in asleep.items()),
            }
        dist.barrier()
    return found


def deferred():
    """Names that a stage reads of a model whose weights come later, and whether they are right."""
    read = []

    class Source:
        def give(self, take, *, device):
            for name, value in whole_model.named_parameters():
                weight = Weight.of(name, value.detach())
                take(replace(weight, read=lambda s, n=name, w=weight: read.append(n) or w.read(s)))
            for name, value in whole_model.named_buffers():
                take(Weight.of(name, value))

    whole_model = tiny_model(**MODEL)
    with torch.device("meta"):
        empty = tiny_model(**MODEL)
    defer(empty, Source())
    trainer = make_trainer(empty, mesh=on_mesh(GROUPS))
    expected = dict(whole_model.named_parameters())
    return {
        "read": sorted(read) == sorted(trainer.policy.masters),
        "equal": all(
            torch.equal(w, expected[n]) for n, w in trainer.named_weights() if n in expected
        ),
    }


def planted():
    """The worst difference with each fault of a stage."""
    send, num_copies = Pipeline._send, BasePolicy._num_copies

    def swapped(self, tensor, group, receiver):
        send(self, tensor.flip(1), group, receiver)

    bugs = {
        "nothing": nullcontext(),
        "tied gradients stay apart": patch.object(
            parallel_model, "add_tied_gradients", lambda model, mesh: None
        ),
        "copies of the embedding count twice": patch.object(
            BasePolicy,
            "_num_copies",
            lambda self, name: num_copies(self, name) // (1 + (self._masters[name] is self._tied)),
        ),
        "norm of the own stage": patch.object(BasePolicy, "_add_up", lambda self, values: None),
        "tokens in another order": patch.object(Pipeline, "_send", swapped),
        "stages hold the first layers": patch.object(
            pipeline, "stage_layers", lambda *_, **__: [[range(3)], [range(1, 5)]]
        ),
    }
    cfg = AlgorithmConfig()
    rows = rows_near(tiny_model(**MODEL), cfg, random_rows(5, seed=8))
    found = {}
    for name, plant in bugs.items():
        with plant:
            try:
                outcome = compare(MODEL, cfg, rows, {**ONE_ROW, "parallel": TWO})
            except AssertionError as error:  # the two copies of the embedding differ
                outcome = {"copies": 1.0, "told": str(error)}
        worst = (
            max(v for k, v in outcome.items() if k in (*MEASURES, "copies"))
            if (dist.get_rank() == 0)
            else 0.0
        )
        found[name] = max(everywhere(worst))
    return found


MEASURES = ("logprobs", "loss", "gradient", "metrics", "weights", "masters")


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    parts = [layouts, supervised, scores, in_flight, parts_held, round_trip, delivered, deferred]
    of_two = [bfloat16, planted]
    run_parts(parts + of_two if dist.get_world_size() == 2 else parts)
