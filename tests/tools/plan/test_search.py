"""Plans for hardware that is not here, against arithmetic that calls nothing of the planner.

What a run must hold and compute is written down from the sizes of the models: bytes of weights,
states, activations and keys, FLOPs of products and attention, bytes over links.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import Any

import pytest

from hone.config.load import load_config
from hone.config.plan import Devices, RunPlan, resolve
from hone.config.tree import PlanConfig
from hone.errors import UserError
from hone.families.model_facts import ModelFacts
from hone.families.shape import ModelShape, public_shape
from hone.hardware import known_gpu
from hone.planner.fitting import (
    changed,
    does_fit,
    does_fit_host,
    errors,
    gpu_host_roles,
    keeping_margin,
    rl_config,
)
from hone.planner.run_memory import RunMemory, peak_bytes
from hone.rules import findings
from hone.tools.plan.comparison import Outcome, compare, planned_config
from hone.tools.plan.layouts import layouts
from hone.tools.plan.search import Notes, _placements, plan_of, search
from hone.tools.plan.simulator import Placement
from hone.tools.plan.training_time import TrainingTime
from tests.tables import table

GIB = 2**30


@dataclass(frozen=True)
class Model:
    """Sizes as in the model's `config.json`."""

    name: str
    layers: int
    hidden: int
    heads: int
    kv_heads: int
    inter: int
    vocab: int
    head_dim: int = 128

    @property
    def matrices(self) -> int:
        """Parameters of all layers' matrices."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return self.layers * self.hidden * (2 * q + 2 * kv + 3 * self.inter)

    @property
    def ends(self) -> int:
        """Embedding and head."""
        return 2 * self.vocab * self.hidden

    @property
    def params(self) -> int:
        return self.matrices + self.ends


QWEN_8B = Model("qwen3-8b", 36, 4096, 32, 8, 12288, 151936)
LLAMA_70B = Model("llama-3.1-70b", 80, 8192, 64, 8, 28672, 128256)


@dataclass(frozen=True)
class GPU:
    """From the data sheets."""

    name: str
    gib: int
    flops: float
    link: float
    host: float
    bandwidth: float


A10 = GPU("a10", 22, 125e12, 32e9, 25e9, 0.6e12)
A100 = GPU("a100", 79, 312e12, 300e9, 25e9, 2.039e12)
H200 = GPU("h200", 140, 790e12, 450e9, 50e9, 4.3e12)

CASES = {
    "8B on 4 + 4 A10": (QWEN_8B, A10, ("--cluster.num_trainers=4", "--cluster.num_engines=4")),
    "70B on 64 A100": (LLAMA_70B, A100, ("--plan.gpus=64", "--cluster.devices_per_node=8")),
    "70B on 16 H200": (LLAMA_70B, H200, ("--plan.gpus=16",)),
    "128k tokens on 8 A100": (
        QWEN_8B,
        A100,
        (
            "--plan.gpus=8",
            "--data.max_prompt_tokens=1024",
            "--rollout.max_completion_tokens=131072",
            "--plan.lengths.median=60000",
            "--rollout.prompts_per_step=8",
        ),
    ),
}


def planned(model: Model, gpu: GPU, flags: tuple[str, ...]) -> PlanConfig:
    given = (f"--model.shape={model.name}", f"--plan.gpu={gpu.name}", "--plan.steps=4", *flags)
    return load_config(PlanConfig, None, given)


@cache
def outcomes_of(name: str) -> tuple[Outcome, ...]:
    """All ways to run a case. The search takes seconds, and several tests look at what it found."""
    return tuple(compare(planned(*CASES[name])).outcomes)


def trainer_bytes(model: Model, plan: RunPlan) -> float:
    """What the fullest trainer holds while it trains: states by their place, gathered weights,
    what layers keep of a micro-batch whose rows are as long as they can be, and gradients."""
    cfg = plan.config
    assert isinstance(cfg, PlanConfig)
    trainer, parallel = cfg.trainer, cfg.trainer.parallel
    tensor, world = parallel.tensor_parallel_size, plan.world_size or 1
    context = parallel.ulysses_size * parallel.ring_size
    away = {"none": 0, "optimizer": 1, "gradients": 2, "parameters": 3}[trainer.offload]
    one_layer = model.matrices / model.layers
    # 4 bytes of a master, 8 of moments, 4 of a gradient, each shared by all processes; one has
    # weights that compute beside its masters.
    held = 4 * (away < (3 if world > 1 else 1)) + 8 * (away < 1) + 4 * (away < 2)
    states = held * model.params / world
    whole = model.params if parallel.zero_stage < 3 else model.ends + 2 * one_layer
    gathered = 2 * whole / tensor
    longest = cfg.data.max_prompt_tokens + cfg.rollout.max_completion_tokens
    rows = cfg.rollout.prompts_per_step * cfg.rollout.n_samples_per_prompt
    tokens = min(trainer.max_tokens_per_microbatch, rows * longest / context)
    stream = 2 * model.hidden * tokens / tensor
    q, kv = model.heads * model.head_dim, model.kv_heads * model.head_dim
    # Layers keep: two residuals, two norms' results, q k v and the output, gate, up, product.
    each = 2 * tokens * (4 * model.hidden / tensor + (2 * q + 2 * kv + 3 * model.inter) / tensor)
    # Those that are recomputed: their input, and what attention returned.
    number = math.ceil(model.layers / trainer.recompute_every_n_layers)
    number *= trainer.recompute != "off"
    mode, _, block = trainer.recompute.partition(":")
    number = int(block) if mode == "block" else number
    of_one = stream * (not trainer.offload_activations)
    of_one += (trainer.recompute == "selective") * tokens * (2 * q + 4 * model.heads) / tensor
    kept = number * of_one + (model.layers - number) * each + each * (number > 0)
    # Backward has as much of one layer as gradients; the head's, and a layer's on their way; or the
    # logits that it begins with, in float32, and their gradient.
    logits = 6 * min(trainer.logits_chunk_tokens, tokens) * model.vocab / tensor
    moving = max(each, logits) + (4 * model.vocab * model.hidden + 6 * one_layer) / tensor
    return states + gathered + kept + moving


def step_seconds(model: Model, gpu: GPU, plan: RunPlan, rows: list[int]) -> float:
    """Products and attention of an update at the rates that are assumed (0.88 of what large
    products reach for very wide models, 0.36 for attention to very many tokens, 0.93 of both in
    several processes), and what is known to hold them up: copies from and to the host of states
    and parameters, exchanges of tensor and Ulysses parallelism."""
    cfg = plan.config
    assert isinstance(cfg, PlanConfig)
    trainer, parallel, world = cfg.trainer, cfg.trainer.parallel, plan.world_size or 1
    tokens = sum(rows)
    products = 2 * (model.matrices * tokens + model.vocab * model.hidden * tokens)
    attention = sum(4 * model.layers * model.heads * model.head_dim * n * n / 2 for n in rows)
    mode, _, block = trainer.recompute.partition(":")
    again = int(block) / model.layers if mode == "block" else 1 / trainer.recompute_every_n_layers
    share = {"off": 0, "selective": 0.8, "full": 1, "block": 1, "uniform": 1}[mode] * again
    reached = gpu.flops * (0.8 if gpu.name != "h200" else 1)  # of what the data sheet says
    rate = world * reached * (0.93 if world > 1 else 1)
    own_tokens = tokens * parallel.tensor_parallel_size / world
    passes = math.ceil(own_tokens / trainer.max_tokens_per_microbatch)
    stay = min(trainer.logits_chunk_tokens * passes / own_tokens, 1)
    narrow = 1 + 3.55 * reached / gpu.bandwidth / model.hidden
    short = 1 + 1000 * tokens / sum(n * n for n in rows)
    attention_s = short * attention / (0.88 * 0.41 * rate)
    seconds = 3 * (narrow * products / (0.88 * rate) + attention_s)
    seconds += share * (narrow * 2 * model.matrices * tokens / (0.88 * rate) + attention_s)
    seconds -= stay * narrow * 2 * model.vocab * model.hidden * tokens / (0.88 * rate)
    computed = seconds
    if trainer.offload != "none":  # masters and moments in, and out beside them
        seconds += 12 * model.params / world / gpu.host
    own = tokens * parallel.tensor_parallel_size / world
    if trainer.offload == "parameters":  # shards come twice a micro-batch
        passes = math.ceil(own / trainer.max_tokens_per_microbatch)
        seconds += passes * 2 * 2 * model.params / world / gpu.host
    if (shards := world // parallel.tensor_parallel_size) > 1:
        # Gathers and sums of a micro-batch, which nothing hides over NVLink.
        near, stage = world <= 8, parallel.zero_stage
        passes = math.ceil(own / trainer.max_tokens_per_microbatch)
        often = stage > 1 or trainer.offload in ("gradients", "parameters")
        sent = 4 * (2 if stage == 0 else 1) * (passes if often else 1)
        sent += {0: 0, 3: 4 * passes}.get(stage, 2)
        sent *= model.params / parallel.tensor_parallel_size * (shards - 1) / shards
        hidden = 0 if near and gpu.link > 1e11 else 0.8 * computed
        seconds += max(sent / ((gpu.link if near else 50e9) * 0.7) - hidden, 0)
    talking = 2 + again * (trainer.recompute != "off")
    attending = 2 + again * (mode not in ("off", "selective"))
    link = gpu.link * 0.7
    if (size := parallel.tensor_parallel_size) > 1:
        stream = 2 * model.layers * model.hidden * own
        seconds += talking * 4 * stream * (size - 1) / size / link
    if (size := parallel.ulysses_size) > 1:
        width = (2 * model.heads + 2 * model.kv_heads) * model.head_dim
        values = 2 * model.layers * width * own / parallel.tensor_parallel_size
        seconds += attending * values * (size - 1) / size / link
    if (size := parallel.ring_size) > 1:
        keys = 2 * model.layers * model.kv_heads * model.head_dim * own
        keys /= parallel.tensor_parallel_size
        seconds += keys * (2 * attending * (size - 1) + 4 * size) / link
    return seconds


@pytest.mark.parametrize("name", CASES)
def test_arithmetic_confirms_what_is_planned(name: str) -> None:
    """Every split: trainers within a fifth by memory and 15 % by time, and all of it on its GPU.
    Those in pipeline stages have arithmetic of their own (`test_training_time.py`)."""
    model, gpu, flags = CASES[name]
    cfg = planned(model, gpu, flags)
    in_one = [x for x in outcomes_of(name) if x.plan.policy.axes.pipeline == 1]
    found = {x.run.placement: x for x in in_one}
    assert found
    for placement, outcome in found.items():
        plan, told = outcome.plan, outcome.name
        own = plan.config
        assert isinstance(own, PlanConfig)
        least = trainer_bytes(model, plan)
        assert least < 1.05 * gpu.gib * GIB, told
        assert RunMemory(plan).step.peak == pytest.approx(least, rel=0.2), told
        assert all(x.num_bytes <= gpu.gib * GIB for x in RunMemory(plan).phases()), told
        # An engine's weights, and keys and values of the longest sample.
        longest = own.data.max_prompt_tokens + own.rollout.max_completion_tokens
        keys = 2 * 2 * model.layers * model.kv_heads * model.head_dim * longest
        share = own.engine.gpu_memory_utilization * gpu.gib * GIB
        assert (2 * model.params + keys) / placement.tensor_parallel_size < share, told
        # A row fits the budgets of those that share it, and the axes divide processes and heads.
        parallel, trainer = own.trainer.parallel, own.trainer
        context, tensor = parallel.ulysses_size * parallel.ring_size, parallel.tensor_parallel_size
        assert trainer.max_tokens_per_microbatch * context >= longest, told
        assert placement.num_trainers % (context * tensor) == 0, told
        assert model.heads % (tensor * parallel.ulysses_size) == 0, told
        rows = [min(2000, longest)] * 512
        seconds = TrainingTime(plan, cfg.plan).step_s(rows, sum(rows))
        assert seconds == pytest.approx(step_seconds(model, gpu, plan, rows), rel=0.15), told


def test_long_rows_are_shared_where_no_trainer_holds_one() -> None:
    """193k tokens, 8 x A100."""
    model, gpu, flags = CASES["128k tokens on 8 A100"]
    flags = (*flags, "--rollout.max_completion_tokens=196608")
    plans = {
        x.run.placement: x.plan
        for x in compare(planned(model, gpu, flags)).outcomes
        if x.run.placement.colocated
    }
    assert plans
    for plan in plans.values():
        assert plan.policy.axes.context > 1
        assert plan.tokens_per_packed_row >= 197_632


AXES = [x for x in product((1, 2, 4, 8), repeat=3) if math.prod(x) in (2, 4, 8)]


@table("sizes", AXES)
@table("recompute", ["off", "selective", "full"])
def test_axes_cost_what_they_send(sizes: tuple[int, int, int], recompute: str) -> None:
    names = ("tensor_parallel_size", "ulysses_size", "ring_size")
    parallel: dict[str, Any] = {**dict(zip(names, sizes, strict=True)), "zero_stage": 3}
    cfg = PlanConfig.model_validate(
        {
            "model": {"shape": "qwen3-8b"},
            "trainer": {"parallel": parallel, "recompute": recompute},
            "plan": {"overhead_s": 0},
        }
    )
    shape = public_shape("qwen3-8b")
    assert shape is not None
    devices = Devices(kind="cuda", gpu=known_gpu("a10"), per_node=8)
    plan = resolve(cfg, ModelFacts.of_shape(shape), devices, world_size=8)
    rows = [2048] * 512
    seconds = TrainingTime(plan, cfg.plan).step_s(rows, sum(rows))
    assert seconds == pytest.approx(step_seconds(QWEN_8B, A10, plan, rows), rel=0.03)


def bytes_sent(
    monkeypatch: pytest.MonkeyPatch, num_gpus: int, parallel: dict[str, int], axis: str, size: int
) -> float:
    """Bytes for which links are busy once an axis has this size, beyond those without, of 30B-A3B
    on nodes of 8: a step of 512 rows. Links and products are such that sums of weights hide."""
    # Of fewer experts fewer gradients are added up.
    monkeypatch.setattr(TrainingTime, "_adding_s", lambda self, model: 0.0)
    trainer = {"parallel": {"zero_stage": 1, **parallel}}
    cfg = PlanConfig.model_validate({"model": {"shape": "qwen3-30b-a3b"}, "trainer": trainer})
    shape = public_shape("qwen3-30b-a3b")
    assert shape is not None
    gpu = replace(known_gpu("h200"), link_bytes_per_s=9e10, flops_per_s=1e14)
    devices = Devices(kind="cuda", gpu=gpu, per_node=8)
    whole = resolve(cfg, ModelFacts.of_shape(shape), devices, world_size=num_gpus)
    divided = changed(whole, {f"trainer.parallel.{axis}_parallel_size": size})
    whole_s, divided_s = (
        TrainingTime(plan, cfg.plan).step_s([2048] * 512, 2048 * 512) for plan in (whole, divided)
    )
    return (divided_s - whole_s) * gpu.link_bytes_per_s * 0.7


def test_experts_in_stages_send_the_tokens_of_their_own_layers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In two stages on 16 of two nodes: of 48 layers 25, twice the tokens."""
    sent = bytes_sent(monkeypatch, 16, {"pipeline_parallel_size": 2}, "expert", 8)
    # Eight experts of a token, there and back, forward and backward; two bytes a value.
    assert sent == pytest.approx(2 * 2 * 2 * 8 * 2048 * 25 * (512 * 2048) / 8 * 7 / 8, rel=1e-6)


def test_experts_beside_matrices_send_each_token_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """On 8: what two that share matrices gather and add up is that of attention alone, and they
    send half the tokens each."""
    sent = bytes_sent(monkeypatch, 8, {"expert_parallel_size": 2}, "tensor", 2)
    # A gather and a sum of hidden states, forward and backward, of which half comes from the other.
    assert sent == pytest.approx(2 * 2 * 2 * 2048 * 48 * (512 * 2048) / 4 / 2, rel=1e-6)


def test_who_shares_matrices_shares_experts() -> None:
    cfg = PlanConfig.model_validate({"model": {"shape": "qwen3-30b-a3b"}})
    shape = public_shape("qwen3-30b-a3b")
    assert shape is not None
    devices = Devices(kind="cuda", gpu=known_gpu("h200"), per_node=8)
    plan = resolve(cfg, ModelFacts.of_shape(shape), devices, world_size=16)
    sizes = {
        tuple(
            layout.get(f"trainer.parallel.{axis}_parallel_size", 1) for axis in ("tensor", "expert")
        )
        for layout in layouts(plan)
    }
    assert sizes == {(1, 1), (1, 8), (2, 8), (4, 8), (8, 8)}


def test_weights_of_four_bits_are_written_in_every_pass() -> None:
    """Half a byte and a scale of four bytes for 64 of them are read, two bytes written."""
    seconds: dict[bool, float] = {}
    for is_4bit in (False, True):
        lora = {"rank": 16, "load_in_4bit": is_4bit}
        cfg = PlanConfig.model_validate({"model": {"shape": "qwen3-8b", "lora": lora}})
        shape = public_shape("qwen3-8b")
        assert shape is not None
        devices = Devices(kind="cuda", gpu=known_gpu("a10"))
        plan = resolve(cfg, ModelFacts.of_shape(shape), devices, world_size=1)
        seconds[is_4bit] = TrainingTime(plan, cfg.plan).step_s([2048] * 64, 2048 * 64)
    passes = 2 * 8  # of eight micro-batches of 16,384 tokens
    unpacked = passes * (0.5 + 4 / 64 + 2) * QWEN_8B.matrices / A10.bandwidth
    assert seconds[True] - seconds[False] == pytest.approx(unpacked, rel=1e-6)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        # 70.6e9 x 16 bytes of states are 140 GiB on each of 8; adapters of 4 bits fit.
        (
            ("--model.shape=llama-3.1-70b", "--plan.gpu=a10", "--plan.gpus=8"),
            r"model\.lora\.rank 32, model\.lora\.load_in_4bit true \(another method, which trains "
            r"adapters alone\)|of these GPUs",
        ),
        # One sample's keys and values take 18 GiB, beside 15 of weights, of an engine over two.
        (
            (
                "--model.shape=qwen3-8b",
                "--plan.gpu=a10",
                "--plan.gpus=2",
                "--data.max_prompt_tokens=1024",
                "--rollout.max_completion_tokens=131072",
            ),
            "of these GPUs|4 x A100",
        ),
        (
            (
                "--model.shape=qwen3-8b",
                "--plan.gpu=a100",
                "--plan.gpus=1",
                "--trainer.optimizer.name=muon",  # whose matrices stay on the device
            ),
            r"model\.lora\.rank 32 \(another method, which trains adapters alone\)",
        ),
        # A base of four bits, 18 GiB, and beside it 61 GiB of weights that sample.
        (
            (
                "--model.shape=qwen3-32b",
                "--plan.gpu=h100",
                "--plan.gpus=1",
                "--model.lora.rank=16",
                "--model.lora.load_in_4bit=true",
            ),
            r"engine\.weight_dtype int8 \(which rounds the weights that sample\)",
        ),
    ],
)
def test_the_impossible_is_refused_with_what_would_make_it_possible(
    flags: tuple[str, ...], said: str
) -> None:
    with pytest.raises(UserError, match=rf"It would be possible with .*({said})"):
        compare(load_config(PlanConfig, None, [*flags, "--plan.steps=4"]))


def test_8_bit_weights_are_named_only_where_rules_allow_them() -> None:
    """They would make the room, and `hone rl` would refuse them for this family."""
    flags = ["--model.shape=gemma-3-12b", "--plan.gpu=5090", "--plan.gpus=1", "--plan.steps=4"]
    flags += ["--model.lora.rank=16", "--model.lora.load_in_4bit=true"]
    flags += ["--rollout.max_completion_tokens=512"]
    with pytest.raises(UserError, match=r"possible with 2 of these GPUs or 1 x A100"):
        compare(load_config(PlanConfig, None, flags))
    flags += ["--engine.weight_dtype=int8"]
    with pytest.raises(UserError, match=r"1 trainer: engine\.weight_dtype is int8, and the model"):
        compare(load_config(PlanConfig, None, flags))


@pytest.mark.parametrize("named", ["shape", "path"])
def test_what_rules_out_a_plan_names_the_model_by_the_key_that_was_given(named: str) -> None:
    flags = [f"--model.{named}=qwen3-30b-a3b", "--model.exact=true", "--plan.gpus=1"]
    cfg = load_config(PlanConfig, None, flags)
    shape = public_shape("qwen3-30b-a3b")
    assert shape is not None
    alone = Placement(num_trainers=1, num_engines=1, colocated=True)
    told = [x.message for x in errors(plan_of(cfg, shape, known_gpu("h200"), alone))]
    where = {"shape": "of model.shape is", "path": "at model.path is"}[named]
    assert any(f"the model {where}" in message for message in told), told


def ways_to_recompute(num_layers: int) -> list[tuple[str, int, bool]]:
    """Mode, of every so manieth layer, and whether inputs are offloaded."""
    blocks = -(-num_layers // 8), -(-3 * num_layers // 4)
    ways = [("off", 1, False), ("full", 1, True), ("full", 4, False), ("uniform:2", 1, False)]
    ways += [(mode, n, False) for mode in ("selective", "full") for n in (1, 2)]
    return ways + [(f"block:{number}", 1, False) for number in blocks]


def every_choice(
    cfg: PlanConfig, placement: Placement, ways: list[tuple[str, int, bool]]
) -> list[RunPlan]:
    """Plans of all ways to recompute so, offload, shard and sleep that fit with the margin and are
    served."""
    assert cfg.model.shape is not None
    shape = public_shape(cfg.model.shape)
    assert shape is not None
    base = keeping_margin(plan_of(cfg, shape, known_gpu(cfg.plan.gpu), placement))
    known = {x for x in errors(base) if "data.train" in x.message}
    found: list[RunPlan] = []
    levels = ("none", "optimizer", "gradients", "parameters")
    for way in product(ways, levels, (0, 1, 2, 3), (False, True), (False, True)):
        (mode, every, away), level, stage, engine_sleeps, trainer_sleeps = way
        change = {
            "trainer.recompute": mode,
            "trainer.recompute_every_n_layers": every,
            "trainer.offload_activations": away,
            "trainer.offload": level,
            "trainer.parallel.zero_stage": stage,
            "engine.enable_sleep": engine_sleeps,
            "trainer.enable_sleep": trainer_sleeps,
        }
        plan = changed(base, change)
        if does_fit_host(plan) and does_fit(plan) and errors(plan) <= known:
            found.append(plan)
    return found


@pytest.mark.parametrize("goal", ["throughput", "memory"])
@pytest.mark.parametrize(("name", "host_gib"), [("4090", None), ("4090", 8), ("l40s", None)])
def test_no_choice_of_settings_is_better_than_the_one_found(
    name: str, host_gib: int | None, goal: str
) -> None:
    """Of 1.7B on four GPUs two by two: all 640 ways to recompute, offload, shard and sleep. A host
    of 8 GiB has room for none of the offloads that are best without a limit."""
    axes = {"tensor_parallel_size": 2}
    tree: dict[str, Any] = {
        "model": {"shape": "qwen3-1.7b"},
        "trainer": {"micro_batch_size": 8, "parallel": axes},
        "plan": {"gpus": 4, "gpu": name, "goal": goal, "steps": 4, "host_gib": host_gib},
        "checkpoint": {"every_n_steps": 0},
    }
    cfg = PlanConfig.model_validate(tree)
    shape, gpu = public_shape("qwen3-1.7b"), known_gpu(name)
    assert shape is not None
    placement = Placement(num_trainers=4, num_engines=4, colocated=True)
    found = search(cfg, shape, gpu, 4, Notes())[placement]
    rows, num_trained = [256 + 800] * 512, 800 * 512

    def cost(plan: RunPlan) -> float:
        if goal == "memory":
            return peak_bytes(plan)
        return TrainingTime(plan, cfg.plan).step_s(rows, num_trained)

    costs = [cost(plan) for plan in every_choice(cfg, placement, ways_to_recompute(28))]
    assert len(costs) > 20
    if goal == "memory":
        assert cost(found) == pytest.approx(min(costs))
    else:
        # None of these choices has logits in one chunk.
        chunk = {"trainer.logits_chunk_tokens": cfg.trainer.logits_chunk_tokens}
        assert cost(changed(found, chunk)) == min(costs)


@pytest.mark.parametrize(
    ("model", "gpu", "axes", "num_rows", "way"),
    [
        ("qwen3-32b", "h200", {"ring_size": 2}, 37, "uniform:2"),
        ("qwen3-8b", "a100", {"ring_size": 2}, 16, "block:27"),
    ],
)
def test_layers_recomputed_together_or_in_a_block_are_found_where_they_alone_are_best(
    model: str, gpu: str, axes: dict[str, int], num_rows: int, way: str
) -> None:
    """Every other way to recompute takes longer, or does not fit."""
    tree: dict[str, Any] = {
        "model": {"shape": model},
        "trainer": {"micro_batch_size": num_rows, "parallel": axes},
        "plan": {"gpus": 8, "gpu": gpu, "steps": 4},
        "rollout": {"max_completion_tokens": 2048},
        "checkpoint": {"every_n_steps": 0},
    }
    cfg, shape = PlanConfig.model_validate(tree), public_shape(model)
    assert shape is not None
    placement = Placement(num_trainers=8, num_engines=8, colocated=True)
    found = search(cfg, shape, known_gpu(gpu), 8, Notes())[placement]
    assert found.trainer is not None
    assert found.trainer.recompute == way
    rows, num_trained = [256 + 800] * 512, 800 * 512

    def seconds(plan: RunPlan) -> float:
        return TrainingTime(plan, cfg.plan).step_s(rows, num_trained)

    others = [each for each in ways_to_recompute(shape.num_layers) if each[0] != way]
    assert min(map(seconds, every_choice(cfg, placement, others))) > seconds(found)


def test_engines_of_several_gpus_beside_trainers_are_tried() -> None:
    shape = public_shape("llama-3.1-8b")
    assert shape is not None
    tree = {"model": {"shape": "llama-3.1-8b"}, "plan": {"gpus": 4, "gpu": "h200"}}
    colocated = [x for x in _placements(PlanConfig.model_validate(tree), shape, 4) if x.colocated]
    assert [x.tensor_parallel_size for x in colocated] == [1, 2, 4]
    tree |= {"engine": {"tensor_parallel_size": 4}}
    colocated = [x for x in _placements(PlanConfig.model_validate(tree), shape, 4) if x.colocated]
    assert [x.tensor_parallel_size for x in colocated] == [1, 4]


QWEN_7B = 7_615_616_512
ON_4090 = ("--model.shape=qwen2.5-7b", "--plan.gpu=4090", "--plan.gpus=2", "--plan.steps=4")


def test_what_a_host_does_not_hold_is_no_plan() -> None:
    """7B on two GPUs of 24 GiB: one trainer, which offloads 16 bytes a parameter, and copies 12 of
    them for a checkpoint."""
    offloaded, copied = 16 * QWEN_7B / GIB, 12 * QWEN_7B / GIB
    found = compare(load_config(PlanConfig, None, [*ON_4090, "--plan.host_gib=200"]))
    roles = gpu_host_roles(found.outcomes[0].plan)
    assert sum(x.num_bytes for x in roles) / GIB == pytest.approx(offloaded + copied, rel=1e-3)
    with pytest.raises(UserError) as refused:
        compare(load_config(PlanConfig, None, [*ON_4090, f"--plan.host_gib={offloaded + 1}"]))
    told = str(refused.value)
    assert "checkpoint.every_n_steps 0 (which saves no checkpoint)" in told
    (enough,) = re.findall(r"(\d+) GiB of memory on each host \(plan.host_gib\)", told)
    assert offloaded + copied <= int(enough) <= 1.02 * (offloaded + copied)  # or some activations
    assert "model.lora.rank 32" in told
    with pytest.raises(UserError) as refused:
        compare(load_config(PlanConfig, None, [*ON_4090, f"--plan.host_gib={offloaded - 1}"]))
    assert "checkpoint.every_n_steps" not in str(refused.value)


def test_two_trainers_of_a_host_share_its_memory() -> None:
    """8B on two H100s: what they offload together is within what the host has; with less than that
    other settings are taken."""
    flags = ("--model.shape=qwen3-8b", "--plan.gpu=h100", "--plan.gpus=2", "--plan.steps=4")
    at_end = "--checkpoint.every_n_steps=0"
    plans = {
        gib: [x.plan for x in compare(load_config(PlanConfig, None, given)).outcomes]
        for gib in (400, 60)
        for given in [[*flags, at_end, f"--plan.host_gib={gib}"]]
    }
    for gib, found in plans.items():
        for plan in found:
            assert sum(x.num_bytes for x in gpu_host_roles(plan)) <= gib * GIB
    needs = [sum(x.num_bytes for x in gpu_host_roles(plan)) / GIB for plan in plans[400]]
    assert max(needs) > 60, "the limit decides something"


def check_plans(cfg: PlanConfig, shape: ModelShape, outcomes: Sequence[Outcome]) -> int:
    """Every way to run passes `hone check` for its GPUs, and fits device and host; how many."""
    for outcome in outcomes:
        run = rl_config(planned_config(cfg, outcome))
        given = outcome.plan.devices  # not those of this host
        devices = Devices(kind="cuda", gpu=given.gpu, host_bytes=given.host_bytes)
        trainers = outcome.run.placement.num_trainers
        plan = resolve(run, ModelFacts.of_shape(shape), devices, world_size=trainers)
        refused = [x.message for x in findings(plan) if x.level == "error"]
        assert refused == ["data.train is empty. Name at least one source."], outcome.name
        assert does_fit(plan), outcome.name
        assert does_fit_host(plan), outcome.name
    return len(outcomes)


def test_packages_that_are_not_installed_here_rule_nothing_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Engines apart need Ray there, not where they are planned."""
    monkeypatch.setattr("hone.extras.is_installed", lambda package: False)
    model, gpu, flags = CASES["8B on 4 + 4 A10"]
    placements = [x.run.placement for x in compare(planned(model, gpu, flags)).outcomes]
    assert any(not placement.colocated for placement in placements)


@pytest.mark.parametrize("name", CASES)
def test_every_plan_passes_the_check(name: str) -> None:
    model, gpu, flags = CASES[name]
    shape = public_shape(model.name)
    assert shape is not None
    assert check_plans(planned(model, gpu, flags), shape, outcomes_of(name))


SEEDS = [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 30))]


@pytest.mark.parametrize("seed", SEEDS)
def test_no_plan_for_any_hardware_is_one_that_cannot_start(seed: int) -> None:
    """Models, GPUs, lengths and limits by chance: what is proposed runs; else it is refused, with
    words."""
    draw = random.Random(seed)
    name = draw.choice(["qwen3-0.6b", "qwen3-1.7b", "qwen2.5-7b", "qwen3-8b", "qwen3-32b"])
    shape = public_shape(name)
    assert shape is not None
    rank = draw.choice([0, 0, 32])
    flags = {
        "model.shape": name,
        "plan.gpu": draw.choice(["4090", "a10", "a100-40g", "a100", "h100", "h200"]),
        "plan.gpus": draw.choice([1, 2, 3, 4, 6, 8, 16]),
        "plan.steps": 4,
        "plan.prompt_tokens": draw.choice([64, 1000]),
        "rollout.max_completion_tokens": draw.choice([512, 4096, 16384]),
        "rollout.prompts_per_step": draw.choice([7, 16, 32]),
        "rollout.n_samples_per_prompt": draw.choice([4, 8]),
        "plan.goal": draw.choice(["throughput", "memory", "on_policy"]),
        "model.lora.rank": rank,
        "model.lora.load_in_4bit": str(bool(rank) and draw.random() < 0.5).lower(),
        **draw.choice([{}, {"plan.host_gib": 64}, {"plan.host_gib": 500}]),
    }
    cfg = load_config(PlanConfig, None, [f"--{key}={value}" for key, value in flags.items()])
    with suppress(UserError):  # which is for what is impossible alone
        assert check_plans(cfg, shape, compare(cfg).outcomes), flags
