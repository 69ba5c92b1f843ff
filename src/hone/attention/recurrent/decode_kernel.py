"""One token of each sequence through a gated delta net, in one Triton kernel.

A decode step reads and writes the states, 4 bytes a value each, and little else, so it is bound by
memory. One program serves a sequence and a key head: it convolves the head's query and key once,
then walks over the states of the value heads that share them, some columns at a time, and reads
the next columns while it computes. So every input of the convolution is read by one program only,
which may store the inputs before the next token in its place, and the norm over a head's outputs
needs no other program.

With decay a, b = beta and the state S before the token, as in `delta_rule`,

    u = b (v - a k^T S)         the change of the values
    o = a q^T S + (q^T k) u     q^T of the new state a S + k u^T

so that one pass over S gives both products. Values are rounded where transformers' layer rounds
them: after the convolution, after its silu, beta, the output, and around the norm.

On Hopper GPUs the kernel starts while the one ahead still runs (`hone.attention.launch_overlap`),
and reads its first states before it waits: they were written in an earlier step, and between two
steps lies at least the lookup of embeddings, which waits for all before it.

This module imports triton; `hone.models.layer_kernels` imports it only where it is used.
"""
# A launch passes plain numbers for constexpr parameters and takes `num_warps`, which the types of
# triton do not know; operators of `tl.tensor` are untyped.
# pyright: reportArgumentType=false, reportCallIssue=false, reportOperatorIssue=false
# pyright: reportAttributeAccessIssue=false, reportUnnecessaryComparison=false
# pyright: reportPossiblyUnboundVariable=false
# ruff: noqa: PLR0915, PLR0917

from __future__ import annotations

from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from hone.attention.context import PagedContext
from hone.attention.kernel_launch import launch, next_power_of_2
from hone.attention.recurrent.delta_net import DeltaNet
from hone.attention.recurrent.delta_rule import UNIT_EPS
from hone.attention.recurrent.mixing import DeltaHeads

__all__ = ["Tuning", "choose_tuning", "is_served", "mix_heads"]

MAX_HEAD_DIM = 128
"""Largest size of a head whose states fit into registers."""

_UNIT_EPS = tl.constexpr(UNIT_EPS)
SOFTPLUS_IS_LINEAR = tl.constexpr(20.0)
"""From here on torch's softplus is the identity."""


class Tuning(NamedTuple):
    """Launch parameters of the kernel."""

    columns: int  # of a state at a time, a power of two
    num_warps: int
    max_registers: int | None = None  # a thread


def choose_tuning(heads: DeltaHeads) -> Tuning:
    """Launch parameters for any number of sequences. Of fifteen that were timed on an H200, at the
    heads of 0.8B and 9B, they are the fastest for 1 to 256 sequences, or within 3 % of the fastest
    (benchmarks/README.md)."""
    return Tuning(min(64, heads.value_dim), 4)


def is_served(net: DeltaNet) -> bool:
    """Whether the kernel serves heads of this size: powers of two, as of all public models."""
    sizes = (net.heads.key_dim, net.heads.value_dim)
    return all(size == next_power_of_2(size) and size <= MAX_HEAD_DIM for size in sizes)


def mix_heads(
    projected: Tensor, net: DeltaNet, context: PagedContext, *, tuning: Tuning | None = None
) -> Tensor:
    """`delta_net.mix_heads` of a decode step, for heads that are served: [B, H * V] of projected
    [B, C + H * V + 2 * H], contiguous. Updates the states of `context.state_rows` in place; rows
    that several sequences name, as those of padding do, have undefined contents afterwards.

    The launch depends on shapes only and may be recorded in a CUDA graph.
    """
    rows, states = context.state_rows, context.states[net.layer_idx]
    assert rows is not None, "decode needs the rows of its sequences' states"
    assert states is not None, f"layer {net.layer_idx} has no states"
    for tensor in (projected, *states):
        assert tensor.is_contiguous(), f"{tensor.shape=} {tensor.stride()=}"
    heads, batch = net.heads, len(projected)
    repeats = heads.num_value_heads // heads.num_key_heads
    tuning = tuning or choose_tuning(heads)
    output = projected.new_empty(batch, heads.num_value_heads * heads.value_dim)
    launch(
        _mix_kernel,
        (heads.num_key_heads, batch, 1),
        (output, projected, *states, rows, net.conv, net.log_rate, net.step_bias, net.norm),
        (net.eps, heads.key_dim**-0.5),
        (
            heads.num_key_heads,
            repeats,
            next_power_of_2(repeats),
            heads.key_dim,
            heads.value_dim,
            tuning.columns,
            net.conv.shape[-1],
            next_power_of_2(net.conv.shape[-1]),
        ),
        num_warps=tuning.num_warps,
        max_registers=tuning.max_registers,
    )
    return output


@triton.jit(do_not_specialize=["eps", "scale"])
def _mix_kernel(
    output_ptr: tl.tensor,
    projected_ptr: tl.tensor,
    tails_ptr: tl.tensor,
    states_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    conv_ptr: tl.tensor,
    log_rate_ptr: tl.tensor,
    step_bias_ptr: tl.tensor,
    norm_ptr: tl.tensor,
    eps: tl.tensor,
    scale: tl.tensor,
    KEY_HEADS: tl.constexpr,
    REPEATS: tl.constexpr,
    REPEAT_BLOCK: tl.constexpr,
    KEY_DIM: tl.constexpr,
    VALUE_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    TAPS: tl.constexpr,
    TAP_BLOCK: tl.constexpr,
    OVERLAP: tl.constexpr,
) -> None:
    dtype: tl.constexpr = output_ptr.dtype.element_ty
    heads: tl.constexpr = KEY_HEADS * REPEATS
    channels: tl.constexpr = 2 * KEY_HEADS * KEY_DIM + heads * VALUE_DIM
    blocks: tl.constexpr = VALUE_DIM // COLUMNS
    key_head, sequence = tl.program_id(0), tl.program_id(1).to(tl.int64)
    key_dim, column = tl.arange(0, KEY_DIM), tl.arange(0, COLUMNS)
    row = tl.load(rows_ptr + sequence)
    states_ptr += (row * heads + key_head * REPEATS) * (KEY_DIM * VALUE_DIM)
    states_ptr += key_dim[:, None] * VALUE_DIM + column[None, :]
    state = tl.load(states_ptr)
    query_channel = key_head * KEY_DIM + key_dim
    key_channel = KEY_HEADS * KEY_DIM + query_channel
    query_weight = _weight(conv_ptr, query_channel, TAPS, TAP_BLOCK)
    key_weight = _weight(conv_ptr, key_channel, TAPS, TAP_BLOCK)
    if OVERLAP:
        gdc_launch_dependents()
        gdc_wait()
    projected_ptr += sequence * (channels + heads * VALUE_DIM + 2 * heads)
    tails_ptr += row * ((TAPS - 1) * channels)
    output_ptr += sequence * (heads * VALUE_DIM)
    query_window = _window(projected_ptr, tails_ptr, query_channel, channels, TAPS, TAP_BLOCK)
    key_window = _window(projected_ptr, tails_ptr, key_channel, channels, TAPS, TAP_BLOCK)
    query = _unit(_convolve(query_window, query_weight)) * scale
    key = _unit(_convolve(key_window, key_weight))
    agreement = tl.sum(query * key, 0)
    tl.debug_barrier()  # all threads have read what `_shift` overwrites
    _shift(query_window, tails_ptr, query_channel, channels, TAPS, TAP_BLOCK)
    _shift(key_window, tails_ptr, key_channel, channels, TAPS, TAP_BLOCK)
    for place in range(0, REPEATS * blocks):
        after = place + 1
        next_at = after // blocks * (KEY_DIM * VALUE_DIM) + after % blocks * COLUMNS
        is_there = key_dim < (REPEATS * blocks - after) * KEY_DIM  # all or none
        next_state = tl.load(states_ptr + next_at, mask=is_there[:, None], other=0.0)
        head = key_head * REPEATS + place // blocks
        value_at = head * VALUE_DIM + place % blocks * COLUMNS + column
        value_channel = 2 * KEY_HEADS * KEY_DIM + value_at
        value_weight = _weight(conv_ptr, value_channel, TAPS, TAP_BLOCK)
        value_window = _window(projected_ptr, tails_ptr, value_channel, channels, TAPS, TAP_BLOCK)
        b_ptr = projected_ptr + channels + heads * VALUE_DIM + head
        beta = _sigmoid(tl.load(b_ptr).to(tl.float32)).to(dtype).to(tl.float32)
        step = tl.load(b_ptr + heads).to(tl.float32) + tl.load(step_bias_ptr + head).to(tl.float32)
        rate = tl.exp(tl.load(log_rate_ptr + head).to(tl.float32))
        decay = tl.exp(-rate * _softplus(step))
        value = _convolve(value_window, value_weight)

        products = (state * key[:, None], state * query[:, None])
        known, read = tl.reduce(products, 0, _add_pairs)
        change = beta * (value - decay * known)
        output = decay * read + agreement * change
        state_at = place // blocks * (KEY_DIM * VALUE_DIM) + place % blocks * COLUMNS
        tl.store(states_ptr + state_at, decay * state + key[:, None] * change[None, :])
        tl.store(output_ptr + value_at, output.to(dtype))
        tl.debug_barrier()
        _shift(value_window, tails_ptr, value_channel, channels, TAPS, TAP_BLOCK)
        state = next_state

    # The norm of each head's outputs, which other threads have stored before the last barrier.
    repeat, value_dim = tl.arange(0, REPEAT_BLOCK)[:, None], tl.arange(0, VALUE_DIM)[None, :]
    at = (key_head * REPEATS + repeat) * VALUE_DIM + value_dim
    mask = repeat < REPEATS
    output = tl.load(output_ptr + at, mask=mask, other=0.0).to(tl.float32)
    gate = tl.load(projected_ptr + channels + at, mask=mask, other=0.0).to(tl.float32)
    norm = tl.load(norm_ptr + value_dim).to(tl.float32)
    inverse = tl.rsqrt(tl.sum(output * output, 1) / VALUE_DIM + eps)
    normed = norm * (output * inverse[:, None]).to(dtype).to(tl.float32)
    normed = normed.to(dtype).to(tl.float32) * (gate * _sigmoid(gate))
    tl.debug_barrier()
    tl.store(output_ptr + at, normed.to(dtype), mask=mask)


# Windows are the last inputs of channels, oldest first and the new one last: [TAP_BLOCK, channels].
# So are the weights that multiply them.


@triton.jit
def _weight(
    conv_ptr: tl.tensor, channel: tl.tensor, TAPS: tl.constexpr, TAP_BLOCK: tl.constexpr
) -> tl.tensor:
    tap = tl.arange(0, TAP_BLOCK)[:, None]
    return tl.load(conv_ptr + channel[None, :] * TAPS + tap, mask=tap < TAPS, other=0.0)


@triton.jit
def _window(
    projected_ptr: tl.tensor,
    tails_ptr: tl.tensor,
    channel: tl.tensor,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    TAP_BLOCK: tl.constexpr,
) -> tl.tensor:
    tap = tl.arange(0, TAP_BLOCK)[:, None]
    before_ptr = tails_ptr + tap * CHANNELS + channel[None, :]
    before = tl.load(before_ptr, mask=tap < TAPS - 1, other=0.0)
    newest = tl.load(projected_ptr + channel)
    return tl.where(tap == TAPS - 1, newest[None, :], before)


@triton.jit
def _convolve(window: tl.tensor, weight: tl.tensor) -> tl.tensor:
    """silu of the convolution of windows, in float32."""
    total = tl.sum(window.to(tl.float32) * weight.to(tl.float32), 0)
    total = total.to(window.dtype).to(tl.float32)
    return (total * _sigmoid(total)).to(window.dtype).to(tl.float32)


@triton.jit
def _shift(
    window: tl.tensor,
    tails_ptr: tl.tensor,
    channel: tl.tensor,
    CHANNELS: tl.constexpr,
    TAPS: tl.constexpr,
    TAP_BLOCK: tl.constexpr,
) -> None:
    """Store the inputs before the next token."""
    tap = tl.arange(0, TAP_BLOCK)[:, None]
    target_ptr = tails_ptr + (tap - 1) * CHANNELS + channel[None, :]
    tl.store(target_ptr, window, mask=(tap > 0) & (tap < TAPS))


@triton.jit
def _add_pairs(
    first: tl.tensor, second: tl.tensor, other_first: tl.tensor, other_second: tl.tensor
) -> tuple[tl.tensor, tl.tensor]:
    return first + other_first, second + other_second


@triton.jit
def _unit(x: tl.tensor) -> tl.tensor:
    return x * tl.rsqrt(tl.sum(x * x, 0) + _UNIT_EPS)


@triton.jit
def _sigmoid(x: tl.tensor) -> tl.tensor:
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _softplus(x: tl.tensor) -> tl.tensor:
    """log(1 + exp(x)). The rounding of 1 + exp(x) is divided out, as small steps add up."""
    power = tl.exp(tl.minimum(x, SOFTPLUS_IS_LINEAR))
    total = 1.0 + power
    small = tl.where(total == 1.0, power, tl.log(total) * (power / (total - 1.0)))
    return tl.where(x > SOFTPLUS_IS_LINEAR, x, small)
