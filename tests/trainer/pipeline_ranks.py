"""Runs pipeline stages in one of several processes (`tests.ranks`), part after part."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.distributed as dist
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from hone.attention import ATTENTION_NAME
from hone.checkpoint.export import export_hf
from hone.checkpoint.sharded import local_part
from hone.distributed.mesh import Mesh
from hone.distributed.processes import processes
from hone.models.adapters import adapt
from hone.models.deferred import Weight, defer
from hone.models.manifest import export_weights
from hone.models.settings import LoraConfig
from hone.trainer import pipeline
from hone.trainer.pipeline import Pipeline
from hone.trainer.policy import BasePolicy
from hone.weights.sync import WeightSync
from tests.rank_cases import (
    STEP,
    Case,
    difference,
    go_on,
    on_mesh,
    outcomes,
    shared,
    start,
    stir_adapters,
    supervised_steps,
    worst_of,
)
from tests.trainer.examples import make_trainer, random_rows, tiny_model
from tests.weights.test_sync import ModuleEngine

MODEL = {"num_hidden_layers": 5}
ADAPTERS = LoraConfig(rank=3, alpha=5)
ADAPTERS_4BIT = LoraConfig(rank=3, alpha=5, load_in_4bit=True)
UNTIED = {**MODEL, "tie_word_embeddings": False}
COSTLY = {**MODEL, "vocab_size": 16384}
"""Its head takes as long as three layers."""
WINDOWS = {
    **UNTIED,
    "family": "gemma3_text",
    "num_hidden_layers": 6,
    "sliding_window": 8,
    "query_pre_attn_scalar": 8,
}
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


def cases(world):
    """More rows in the longer runs of four processes: of two each micro-batch has up to two."""
    many = partial(random_rows, 7 if world == 2 else 13, seed=5)
    few, uneven = partial(random_rows, 1, seed=6), partial(random_rows, 7, seed=7)
    two_rows, tokens = {"micro_batch_size": 2}, {"max_tokens_per_microbatch": 60}
    one, groups = TWO | {"zero_stage": 1}, GROUPS | {"zero_stage": 1}
    plain = Case(one, many, two_rows, model=MODEL)
    base = replace(plain, objective={"entropy_coef": 0.1})
    deep = COSTLY | {"tie_word_embeddings": False, "num_hidden_layers": 7}
    found = {
        **{name: replace(base, parallel=layout) for name, layout in LAYOUTS[world].items()},
        "untied": replace(plain, model=UNTIED),
        "adapters": replace(plain, lora=ADAPTERS),
        "adapters over four bits": replace(plain, lora=ADAPTERS_4BIT),
        "adapters, two groups each": replace(
            plain, parallel=GROUPS | {"zero_stage": 3}, model=UNTIED, lora=ADAPTERS
        ),
        "costly head": replace(base, model=COSTLY),
        "costly head, two groups each": replace(plain, parallel=GROUPS, model=deep),
        "one micro-batch": replace(plain, rows=few, settings={}),
        "uneven micro-batches": replace(plain, rows=uneven, settings=tokens),
        "sliding windows": replace(plain, settings={"micro_batch_size": 3}, model=WINDOWS),
    }

    def each(start, parallel, modes, more=()):
        knobs = {f"recompute {mode}": {"recompute": mode} for mode in modes} | dict(more)
        for name, knob in knobs.items():
            case = replace(plain, parallel=parallel, settings=two_rows | knob)
            found[start + name] = case

    on_host = {"moments on the host": {"offload": "optimizer"}}
    each("", one, ("full", "selective", "uniform:2", "block:2"), on_host)
    each("two groups each, ", GROUPS, ("uniform:2",))
    if world == 2:
        return found
    tensor = TENSOR | {"zero_stage": 1}
    found["tensor 2, adapters"] = replace(plain, parallel=tensor, lora=ADAPTERS)
    each("tensor 2, ", tensor, ("full", "selective", "uniform:2"), on_host)
    each("two groups each, ", groups, ("full", "selective", "block:1"), on_host)
    deeper, deepest = UNTIED | {"num_hidden_layers": 9}, COSTLY | {"num_hidden_layers": 9}
    of_one = replace(plain, settings=ONE_ROW)
    for name, parallel, rows in (
        ("tensor 2, ", TENSOR, partial(random_rows, 7, seed=5)),
        ("two groups each, ", GROUPS, uneven),
    ):
        first, third = parallel | {"zero_stage": 1}, parallel | {"zero_stage": 3}
        found |= {
            f"{name}untied": replace(plain, parallel=first, model=UNTIED),
            f"{name}one micro-batch": replace(plain, parallel=first, rows=few, settings={}),
            f"{name}uneven micro-batches": replace(
                plain, parallel=third, rows=rows, settings=tokens
            ),
        }
    four = {"pipeline_parallel_size": 4}
    return found | {
        "costly head, tensor 2": replace(of_one, parallel=TENSOR | {"zero_stage": 3}, model=COSTLY),
        "costly head, four stages": replace(
            of_one, parallel=four | {"zero_stage": 1}, model=deepest
        ),
        "four stages of two groups": replace(
            of_one, parallel=four | {"virtual_stages": 2}, model=deeper
        ),
        "three groups each": replace(of_one, parallel=TWO | {"virtual_stages": 3}, model=deeper),
    }


def layouts():
    return outcomes(cases(dist.get_world_size()))


BFLOAT16 = {
    name: Case(
        layout,
        partial(random_rows, 4, seed=1),
        alike=ONE_ROW,
        model=UNTIED,
        objective={"entropy_coef": 0.1},
        dtype=torch.bfloat16,
    )
    for name, layout in LAYOUTS[2].items()
}
"""One row a pass on both sides, which round the same passes: only sums over them differ. Not tied:
one process adds up the two gradients of a tied embedding in bfloat16."""


def bfloat16():
    return outcomes(BFLOAT16)


def supervised():
    return supervised_steps(TWO, **MODEL)


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


CUT_OTHERWISE = "two stages, cut otherwise"


def round_trips(world):
    """Layouts of a run and of the one that goes on from it, by the name of the case."""
    one, two = {"zero_stage": 1}, TWO | {"zero_stage": 1}
    layouts = {
        "two stages, then one": (two, one),
        "one stage, then two": (one, two),
        "two stages, shards, then whole": (two, TWO | {"zero_stage": 0}),
        "two groups each, then one stage": (GROUPS | one, one),
        CUT_OTHERWISE: (two, two),
    }
    if world == 4:
        layouts |= {
            "two stages, then two groups each": (two, GROUPS),
            "four stages, then two": ({"pipeline_parallel_size": 4}, two),
            "two stages of tensor 2, then one": (TENSOR, one),
            "tensor 2, then two stages of it": ({"tensor_parallel_size": 2}, TENSOR),
        }
    return layouts


def round_trip():
    """A run that goes on in another number of stages, or with other layers in each."""
    layouts = round_trips(dist.get_world_size())
    return go_on(layouts, {CUT_OTHERWISE: lambda: cut_into(range(1), range(1, 5))}, **MODEL)


def cut_into(*stages):
    """Of so many layers each stage, whatever they cost."""
    return patch.object(pipeline, "stage_layers", lambda *_, **__: [[own] for own in stages])


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
            ("adapters", MODEL, torch.float32, stages()),
        ):

            def make(of: Mesh | None, lora=name == "adapters", dtype=dtype, fields=fields):
                model = tiny_model(dtype=dtype, **fields)
                if lora:
                    adapt(model, ADAPTERS, seed=0)
                    stir_adapters(model)
                return make_trainer(model, mesh=of, **ONE_ROW, **STEP)

            mesh = on_mesh(parallel)
            alone, trainer = make(None), make(mesh)
            for each in (alone, trainer):
                each.update(random_rows(6))
            engine = ModuleEngine(tiny_model(dtype=dtype, seed=1, **fields))
            WeightSync(trainer, engine).push(3)
            held, expected = dict(export_weights(engine.model)), dict(alone.named_weights())
            folder = Path(shared(own_folder)) / name
            policy, tokenizer = trainer.policy, SimpleNamespace(save_pretrained=lambda _: None)
            is_merged = name == "adapters"
            weights = trainer.named_weights() if is_merged else policy.named_masters()
            export_hf(policy.model, tokenizer, folder, torch.float32, weights, mesh=mesh)
            exported = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
            masters = expected if is_merged else dict(alone.policy.named_masters())
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


send, num_copies = Pipeline._send, BasePolicy._num_copies


def send_swapped(self, tensor, group, receiver):
    send(self, tensor.flip(1), group, receiver)


def count_tied_twice(self, name):
    return num_copies(self, name) // (1 + (self._masters[name] is self._tied))


RIGHT = Case(TWO, partial(random_rows, 5, seed=8), ONE_ROW, model=MODEL)
BUGS = {
    "nothing": nullcontext,
    "tied gradients stay apart": lambda: patch.object(
        Pipeline, "add_tied_gradients", lambda self: None
    ),
    "copies of the embedding count twice": lambda: patch.object(
        BasePolicy, "_num_copies", count_tied_twice
    ),
    "norm of the own stage": lambda: patch.object(BasePolicy, "_add_up", lambda self, values: None),
    "tokens in another order": lambda: patch.object(Pipeline, "_send", send_swapped),
    "stages hold the first layers": lambda: cut_into(range(3), range(1, 5)),
}
MEASURES = ("logprobs", "loss", "gradient", "metrics", "weights", "masters")


def planted():
    """The worst difference with each fault of a stage."""
    return {name: worst_of(replace(RIGHT, plant=plant), *MEASURES) for name, plant in BUGS.items()}


def main() -> None:
    parts = [layouts, supervised, scores, in_flight, parts_held, round_trip, delivered, deferred]
    start([*parts, bfloat16, planted] if processes().world_size == 2 else parts)
