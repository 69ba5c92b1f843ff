"""Exact mode end to end on one GPU: equal bits of engine and trainer, gradients, and what it costs.

    python -m benchmarks.gpu.exact_mode_check [SECTION ...] [--seconds N]

Random weights, Qwen3 0.6B and two layers of 8B. Sections, each for either shape (`-8b`):

    bits       samples of every mode of the engine, scored by the trainer in several packings: all
               log-probabilities must be the same bits; planted faults must be seen
    gradients  against those of the ordinary trainer, both against float32
    times      of engine and trainer, in both modes; eight layers of 8B
"""

from __future__ import annotations

import copy
import gc
import json
import random
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from time import perf_counter

import torch
import torch.nn.functional as F
from benchmarks.gpu.engine_check import decode_speed, finish
from benchmarks.gpu.sections import Run, release
from benchmarks.gpu.timing import wall_ms
from transformers import PreTrainedModel

from hone.algorithms.objective import PolicyObjective
from hone.algorithms.settings import AlgorithmConfig
from hone.attention.interface import attend_paged
from hone.engine.engine import EmbeddedEngine
from hone.engine.settings import EngineConfig
from hone.models.exact_decoder import ExactOps
from hone.models.load import load_model
from hone.models.settings import ModelConfig
from hone.models.tiny import make_model_folder
from hone.observe.metrics import to_scalars
from hone.trainer.settings import TrainerConfig
from hone.trainer.trainer import Trainer
from hone.types import Column, Request, Row, SamplingParams
from hone.weights.parity import measure_parity

DEVICE = "cuda"
MAX_LEN = 1024
BASE = {"max_num_seqs": 64, "kv_cache_gib": 8.0}
MODES = {
    "graphs": {},
    "no graphs": {"enforce_eager": True},
    "chunked prefill": {"max_num_batched_tokens": 96},
    "preemption": {"kv_cache_gib": None},
    "no prefix caching": {"enable_prefix_caching": False},
    "5 at a time": {"max_num_seqs": 5},
}
TRAINERS = {
    "16,384 tokens": {},
    "1,024 tokens, recomputed": {"max_tokens_per_microbatch": MAX_LEN, "recompute": "full"},
    "one at a time": {"micro_batch_size": 1, "logits_chunk_tokens": 100},
}
MAX_GRADIENT_GAP = 1.1
"""Times the ordinary trainer's."""


@cache
def make_model(shape: str, num_layers: int | None = None):
    with tempfile.TemporaryDirectory() as folder:
        path = make_model_folder(folder, shape) / "config.json"
        config = json.loads(path.read_text())
        if num_layers is not None:
            config["num_hidden_layers"] = num_layers
            config.pop("layer_types", None)
        Path(path).write_text(json.dumps(config))
        model = load_model(ModelConfig(path=folder, init="random"), device=DEVICE, seed=0)
    for name, tensor in model.named_parameters():
        if tensor.dim() > 1 and "embed" not in name:  # distributions far from uniform
            tensor.data.mul_(2)
    return model


def make_requests(vocab_size: int) -> list[Request]:
    """64 of mixed lengths, in groups of four with one prompt, at two temperatures."""
    draw = random.Random(0)
    prompts = [
        tuple(draw.randrange(vocab_size) for _ in range(draw.randrange(5, 420))) for _ in range(16)
    ]
    return [
        Request(
            id=str(i),
            prompt_ids=prompts[i // 4],
            sampling=SamplingParams(
                seed=i,
                ignore_eos=True,
                max_tokens=draw.randrange(3, 250),
                temperature=(1.0, 0.7)[i // 4 % 2],
            ),
        )
        for i in range(64)
    ]


def make_engine(model, *, exact: bool = True, **settings) -> EmbeddedEngine:
    cfg = EngineConfig.model_validate(BASE | settings)
    return EmbeddedEngine(model, cfg, eos_token_ids=(), max_model_len=2048, exact=exact)


def sample(engine, requests, tag: str = ""):
    engine.submit([replace(request, id=tag + request.id) for request in requests])
    done = finish(engine)
    return [done[tag + request.id] for request in requests]


def rows_of(requests, completions) -> list[Row]:
    draw = torch.Generator().manual_seed(0)
    return [
        Row(
            id=request.id,
            group_id=str(int(request.id) // 4),
            token_ids=[*request.prompt_ids, *done.token_ids],
            loss_mask=[False] * len(request.prompt_ids) + [True] * len(done.token_ids),
            columns={
                "logprobs/engine": Column(torch.tensor(done.logprobs)),
                "staleness": Column(torch.zeros(len(done.token_ids), dtype=torch.int32)),
                "advantages": Column(
                    torch.randn(1, generator=draw).expand(len(done.token_ids)).clone()
                ),
            },
        )
        for request, done in zip(requests, completions, strict=True)
    ]


def make_trainer(model, temperature: float, *, exact: bool = True, **settings) -> Trainer:
    """The model's one trainer: gradients go to it and to none that was made before."""
    for parameter in model.parameters():
        if parameter._post_accumulate_grad_hooks is not None:
            parameter._post_accumulate_grad_hooks.clear()
    return Trainer(
        model,
        TrainerConfig.model_validate(settings),
        PolicyObjective(AlgorithmConfig(), max_completion_tokens=MAX_LEN),
        temperature=temperature,
        total_steps=10,
        exact=exact,
    )


def at(rows, requests, temperature: float) -> list[Row]:
    return [
        row
        for row, request in zip(rows, requests, strict=True)
        if request.sampling.temperature == temperature
    ]


def num_unequal(trainer, rows) -> int:
    return sum(
        int((scored != row.column("logprobs/engine")).sum())
        for scored, row in zip(trainer.logprobs(rows), rows, strict=True)
    )


def bytes_per_token(model) -> int:
    config = model.config
    return 4 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim


def check_bits(run: Run, name: str, make: Callable[[], PreTrainedModel]) -> None:
    model = make()
    requests = make_requests(model.config.vocab_size)
    first = None
    for mode, settings in MODES.items():
        if not run.has_time(f"{name}: {mode}"):
            return
        if mode == "preemption":
            settings = {"kv_cache_gib": 2000 * bytes_per_token(model) / 2**30}
        began = perf_counter()
        engine = make_engine(model, **settings)
        completions = sample(engine, requests)
        first = first or completions
        same = [
            a.token_ids == b.token_ids and a.logprobs == b.logprobs
            for a, b in zip(completions, first, strict=True)
        ]
        stats, tokens = engine.stats(), sum(len(done.token_ids) for done in completions)
        run.check(
            f"{name}: {mode}",
            all(same),
            f"{sum(same)} of {len(same)} equal; {tokens} tokens, {stats.num_steps} steps, "
            f"{stats.num_preemptions} preemptions, {stats.num_cached_tokens} cached, "
            f"{perf_counter() - began:.0f} s",
        )
        if mode == "preemption":
            run.check(f"{name}: some were preempted", stats.num_preemptions > 0)
        alone = sample(engine, requests[7:8], "alone ")
        run.check(f"{name}: {mode}, alone", alone[0].logprobs == first[7].logprobs)
        del engine
        gc.collect()
    rows = rows_of(requests, first)
    for mode, settings in TRAINERS.items():
        if not run.has_time(f"{name}: trainer, {mode}"):
            return
        for temperature in (1.0, 0.7):
            trainer = make_trainer(model, temperature, compile=False, **settings)
            chosen = at(rows, requests, temperature)
            for order in ("as sampled", "shuffled"):
                if order == "shuffled":
                    random.Random(1).shuffle(chosen)
                unequal = num_unequal(trainer, chosen)
                total = sum(row.num_trained for row in chosen)
                what = f"{name}: trainer, {mode}, T={temperature}, {order}"
                run.check(what, unequal == 0, f"{unequal} of {total} tokens differ")
        _, metrics = trainer.forward_backward(chosen)
        trainer.policy.drop_gradient()
        scalars = to_scalars(metrics)
        found = {key: value for key, value in scalars.items() if key.startswith("off_policy")}
        run.check(
            f"{name}: mismatch in training, {mode}",
            scalars["off_policy/mismatch_kl"] == 0,
            {key: round(value, 9) for key, value in found.items()},
        )
    chosen = at(rows, requests, 0.7)
    report = measure_parity(chosen, trainer)
    run.check(f"{name}: gate", report.max_difference == 0 and report.kl == 0, report)
    ordinary = make_trainer(model, 0.7, exact=False, compile=False)
    unequal = num_unequal(ordinary, chosen)
    run.check(f"{name}: the ordinary trainer is seen", unequal > 0, f"{unequal} tokens differ")
    check_planted(run, name, model, requests, trainer)


def check_planted(run: Run, name: str, model, requests, trainer) -> None:
    """One operation of the engine that depends on the batch."""
    right_linear, right_attention = ExactOps.sum_linear, ExactOps.attend_rotated

    def linear(self, x, projection):
        return F.linear(x, projection.weight, projection.bias)

    def attention(self, *arguments, write):
        q, k, v, heads, context = arguments
        options = {"scale": heads.scale, "window": heads.window, "write": write}
        return attend_paged(q, k, v, heads.layer_index, context, **options)

    chosen = [request for request in requests if request.sampling.temperature == 0.7]
    for fault, planted in (("sum_linear", linear), ("attend_rotated", attention)):
        setattr(ExactOps, fault, planted)
        completions = sample(make_engine(model), chosen)
        ExactOps.sum_linear, ExactOps.attend_rotated = right_linear, right_attention
        rows = rows_of(chosen, completions)
        report = measure_parity(rows, trainer)
        run.check(f"{name}: planted ordinary {fault} is seen", report.max_difference > 0, report)


def check_gradients(run: Run, name: str, make: Callable[[], PreTrainedModel]) -> None:
    """One update's gradient: as near to that of a float32 model as the ordinary trainer's."""
    model = make()
    requests = make_requests(model.config.vocab_size)
    rows = at(rows_of(requests, sample(make_engine(model), requests)), requests, 1.0)

    def gradients(model, **settings) -> dict[str, torch.Tensor]:
        trainer = make_trainer(model, 1.0, compile=False, **settings)
        trainer.forward_backward(rows)
        found = trainer.policy.gradients
        trainer.policy.drop_gradient()
        return found

    wanted = gradients(copy.deepcopy(model).float(), exact=False)

    def gap(found: dict[str, torch.Tensor]) -> float:
        off = sum(float((found[key] - want).square().sum()) for key, want in wanted.items())
        return (off / sum(float(want.square().sum()) for want in wanted.values())) ** 0.5

    ordinary = gap(gradients(model, exact=False))
    for recompute in ("off", "full"):
        found = gap(gradients(model, recompute=recompute))
        run.check(
            f"{name}: gradients, recompute {recompute}",
            found < MAX_GRADIENT_GAP * ordinary,
            f"off float32's by {found:.2e}, the ordinary trainer's by {ordinary:.2e}",
        )


def check_times(run: Run, name: str, make: Callable[[], PreTrainedModel]) -> None:
    model = make()
    run.row(name, "ordinary", "exact", "change")
    time_engine(run, name, model)
    release()
    if run.has_time(f"{name} trainer"):
        time_trainer(run, name, model)


def compare(run: Run, name: str, ordinary: float, exact: float) -> None:
    run.row(name, ordinary, exact, f"{exact / ordinary - 1:+.1%}")


def time_engine(run: Run, name: str, model) -> None:
    for batch, context in ((256, 1024), (32, 1024)):
        found = {}
        for exact in (False, True):
            engine = make_engine(
                model,
                exact=exact,
                max_num_seqs=batch,
                kv_cache_gib=40.0 if batch > 32 else 6.0,
                enable_prefix_caching=False,  # prompts come twice
            )
            decode_speed(model, engine, batch=batch, context=context, num_steps=64)  # compile
            found[exact] = decode_speed(model, engine, batch=batch, context=context, num_steps=64)
            del engine
            release()
        (prefill, step), (exact_prefill, exact_step) = found[False], found[True]
        compare(run, f"{name} decode, B={batch}, {context}, ms", 1e3 * step, 1e3 * exact_step)
        times = 1e6 / prefill, 1e6 / exact_prefill
        compare(run, f"{name} prefill, {batch} x {context}, us/token", *times)


def time_trainer(run: Run, name: str, model, num_tokens: int = 16384, length: int = 1024) -> None:
    draw = torch.Generator().manual_seed(0)
    trained = length - 128
    rows = [
        Row(
            id=f"r{i}",
            group_id=f"g{i // 8}",
            token_ids=torch.randint(model.config.vocab_size, (length,), generator=draw).tolist(),
            loss_mask=[False] * 128 + [True] * trained,
            columns={
                "logprobs/engine": Column(torch.full((trained,), -11.9)),
                "advantages": Column(torch.randn(1, generator=draw).expand(trained).clone()),
            },
        )
        for i in range(num_tokens // length)
    ]
    found, forward = {}, {}
    for exact in (True, False):  # the ordinary trainer compiles the model's layers for good
        trainer = make_trainer(model, 1.0, exact=exact, max_tokens_per_microbatch=num_tokens)
        began = perf_counter()
        trainer.forward_backward(rows)
        torch.cuda.synchronize()
        first = perf_counter() - began

        def both(trainer=trainer):
            trainer.policy.drop_gradient()
            trainer.forward_backward(rows)

        torch.cuda.reset_peak_memory_stats()
        found[exact] = wall_ms(both, 5), torch.cuda.max_memory_allocated() / 2**30, first
        trainer.policy.drop_gradient()
        forward[exact] = wall_ms(lambda trainer=trainer: trainer.logprobs(rows), 3)
        del trainer, both
        release()
    units = f"{num_tokens} tokens, ms"
    compare(run, f"{name} forward + backward, {units}", found[False][0], found[True][0])
    compare(run, f"{name} log-probs, {units}", forward[False], forward[True])
    compare(run, f"{name} peak of training, GiB", found[False][1], found[True][1])
    compare(run, f"{name} first pass, s", found[False][2], found[True][2])


def main() -> None:
    makers = {
        ("", "0.6B"): partial(make_model, "qwen3-0.6b"),
        ("-8b", "8B x 2"): partial(make_model, "qwen3-8b", 2),
    }
    sections = {}
    for (suffix, name), make in makers.items():
        sections["bits" + suffix] = partial(check_bits, name=name, make=make)
        sections["gradients" + suffix] = partial(check_gradients, name=name, make=make)
        if suffix:
            name, make = "8B x 8", partial(make_model, "qwen3-8b", 8)
        sections["times" + suffix] = partial(check_times, name=name, make=make)
    run = Run(__doc__, tuple(sections), seconds=300)
    run.row(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    sys.exit(run.go({name: partial(work, run) for name, work in sections.items()}))


if __name__ == "__main__":
    main()
