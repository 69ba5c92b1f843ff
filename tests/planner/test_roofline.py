"""Limits against the published table for one H200 and against a step-by-step simulation."""

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hone.families.registry import public_configs
from hone.families.shape import ModelShape, public_shape
from hone.hardware import GPUS, Peaks, gpu_peaks
from hone.planner.roofline import (
    RowPasses,
    decode_step_s,
    generation_time_s,
)
from tests.tables import table

H200 = GPUS[0]


QWEN3 = {
    name: ModelShape.from_config(public_configs()[f"qwen3-{name.lower()}"])
    for name in ("0.6B", "1.7B", "4B", "8B")
}


@table(
    "model, context, batch, tokens_per_s",
    [
        ("0.6B", 1024, 32, 27_797),
        ("0.6B", 8192, 1, 2_017),
        ("1.7B", 512, 256, 55_519),
        ("4B", 2048, 64, 10_054),
        ("8B", 1024, 256, 18_424),
        ("8B", 512, 512, 27_235),
    ],
)
def test_decode_limit_of_the_table(model: str, context: int, batch: int, tokens_per_s: int) -> None:
    step_s = float(decode_step_s(QWEN3[model], H200, batch, batch * context))
    assert batch / step_s == pytest.approx(tokens_per_s, rel=0.01)


@table(
    "model, context, batch, step_ms",
    [
        ("0.8b", 1024, 1, 0.362),
        ("0.8b", 1024, 128, 1.888),
        ("0.8b", 16_384, 64, 3.928),
        ("9b", 1024, 64, 5.724),
        ("9b", 8192, 128, 14.75),
    ],
)
def test_a_decode_step_reads_and_writes_the_states_of_its_sequences(
    model: str, context: int, batch: int, step_ms: float
) -> None:
    """By hand, at 4.3 TB/s. Of 0.8B: 752,393,024 weights of 2 bytes, 12,288 bytes of a key, and
    19,537,920 bytes of states, which are read and written. Of 9B: 7,936,684,544 weights without the
    embedding, 32,768 and 51,511,296."""
    weights, key, state = {
        "0.8b": (752_393_024, 12_288, 19_537_920),
        "9b": (7_936_684_544, 32_768, 51_511_296),
    }[model]
    by_hand = 2 * weights + batch * (context * key + 2 * state)
    assert H200.bytes_per_s == 4.3e12
    assert step_ms == pytest.approx(by_hand / 4.3e9, rel=0.001)
    shape = public_shape(f"qwen3.5-{model}")
    step_s = float(decode_step_s(shape, H200, batch, batch * context))
    assert 1e3 * step_s == pytest.approx(step_ms, rel=0.001)


@table("batch, step_ms", [(1, 1.44), (16, 9.65), (64, 15.4), (256, 20.1)])
def test_a_decode_step_reads_the_experts_that_its_tokens_pass(batch: int, step_ms: float) -> None:
    """Of 128 experts 8, 82, 126 and 128."""
    shape = public_shape("qwen3-30b-a3b")
    step_s = float(decode_step_s(shape, H200, batch, batch * 1024))
    assert 1e3 * step_s == pytest.approx(step_ms, rel=0.01)


@table(
    "model, length, passes, tokens_per_s",
    [
        ("0.6B", 2560, 3, 177_231),
        ("0.6B", 16384, 4, 64_306),
        ("1.7B", 512, 3, 75_238),
        ("4B", 8192, 3, 25_173),
        ("8B", 2560, 3, 16_570),
    ],
)
def test_training_limit_of_the_table(
    model: str, length: int, passes: int, tokens_per_s: int
) -> None:
    passes_of_model = RowPasses(QWEN3[model], num_scorings=passes - 3)
    flops = passes_of_model.flops([length] * 5, num_head_tokens=5 * length)
    seconds = flops / H200.flops_per_s
    assert 5 * length / seconds == pytest.approx(tokens_per_s, rel=0.01)


def test_sizes_of_the_table() -> None:
    assert {name: round(shape.num_params / 1e6) for name, shape in QWEN3.items()} == {
        "0.6B": 596,
        "1.7B": 1721,
        "4B": 4022,
        "8B": 8191,
    }
    assert QWEN3["8B"].kv_bytes_per_token() == 147_456
    assert QWEN3["8B"].decode_bytes() == pytest.approx(15.14e9, rel=1e-3)
    assert QWEN3["8B"].weight_bytes(4) == QWEN3["8B"].num_params * 4


def simulated_generation_s(
    shape: ModelShape, peaks: Peaks, prompts: list[int], completions: list[int], max_num_seqs: int
) -> float:
    """One loop over steps, one over sequences; the prefill's token is not a decode step."""
    waiting = [(p, n - 1) for p, n in zip(prompts, completions, strict=True) if n > 1]
    running: list[tuple[int, int]] = []
    total = (
        sum(
            2 * (shape.body_params * p + shape.head_params) + shape.mixing_flops([p])
            for p in prompts
        )
        / peaks.flops_per_s
    )
    while waiting or running:
        while waiting and len(running) < max_num_seqs:
            running.append(waiting.pop(0))
        keys = sum(context + 1 for context, _ in running)
        if shape.sliding_window is not None:
            seen = sum(min(context + 1, shape.sliding_window) for context, _ in running)
            keys = shape.sliding_share * seen + (1 - shape.sliding_share) * keys
        total += float(decode_step_s(shape, peaks, len(running), keys))
        running = [(context + 1, left - 1) for context, left in running if left > 1]
    return total


@st.composite
def samples(draw: st.DrawFn) -> tuple[list[int], list[int]]:
    pairs = draw(
        st.lists(st.tuples(st.integers(1, 40), st.integers(1, 60)), min_size=1, max_size=20)
    )
    return [prompt for prompt, _ in pairs], [completion for _, completion in pairs]


TINY: dict[str, Any] = {
    "num_hidden_layers": 3,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "vocab_size": 50,
}
KV_BOUND = Peaks("toy", 1e6, 1e9, "measured")
FLOP_BOUND = Peaks("toy", 1e9, 1e6, "measured")


RECURRENT: dict[str, Any] = {
    "model_type": "qwen3_5_text",
    "full_attention_interval": 3,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}
KINDS: dict[str, dict[str, Any]] = {
    "plain": {"model_type": "gemma2", "sliding_window": None},
    "windows": {"model_type": "gemma2", "sliding_window": 16},
    "recurrent layers": RECURRENT,
}


@pytest.mark.parametrize("peaks", [KV_BOUND, FLOP_BOUND])
@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(lengths=samples(), max_num_seqs=st.integers(1, 24))
def test_generation_equals_the_simulation(
    peaks: Peaks, kind: str, lengths: tuple[list[int], list[int]], max_num_seqs: int
) -> None:
    prompts, completions = lengths
    shape = ModelShape.from_config({**TINY, **KINDS[kind]})
    expected = simulated_generation_s(shape, peaks, prompts, completions, max_num_seqs)
    got = generation_time_s(shape, peaks, prompts, completions, max_num_seqs=max_num_seqs)
    assert got == pytest.approx(expected, rel=1e-9)


def test_a_shared_prompt_is_prefilled_once() -> None:
    shape = QWEN3["0.6B"]
    own = generation_time_s(shape, H200, [512] * 8, [64] * 8, max_num_seqs=8)
    shared = generation_time_s(
        shape, H200, [512] * 8, [64] * 8, max_num_seqs=8, prefill_lengths=[512]
    )
    one_prompt_s = shape.forward_flops([512], num_head_tokens=1) / H200.flops_per_s
    assert own - shared == pytest.approx(7 * one_prompt_s)


def test_a_large_step_is_cheap_to_price() -> None:
    rng = np.random.default_rng(0)
    completions = np.minimum(rng.lognormal(6.7, 0.7, 8192), 8192).astype(int).clip(1).tolist()
    start = time.thread_time()  # others may have the core for longer
    generation_time_s(QWEN3["8B"], H200, [256] * 8192, completions, max_num_seqs=256)
    assert time.thread_time() - start < 0.5


@table(
    "device, name",
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("NVIDIA H100 PCIe", "H100 PCIe"),
        ("NVIDIA A100-SXM4-80GB", "A100"),
        ("NVIDIA A100-SXM4-40GB", "A100 40GB"),
        ("NVIDIA A100 80GB PCIe", "A100 80GB PCIe"),
        ("NVIDIA GeForce RTX 4090", "RTX 4090"),
    ],
)
def test_gpus_are_found_by_their_driver_name(device: str, name: str) -> None:
    peaks = gpu_peaks(device)
    assert peaks is not None
    assert peaks.name == name


@table("device", ["NVIDIA H2000", "NVIDIA GeForce RTX 4090 Laptop GPU", "AMD"])
def test_other_devices_are_not_guessed(device: str) -> None:
    assert gpu_peaks(device) is None
