"""Runs the decode kernel of gated delta nets in Triton's interpreter; prints as JSON how it
compares.

A process of its own, as in `tests.models.interpreted_layer_kernels`. The twin is the layer in plain
torch, in float32 whatever the kernel computes in.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from contextlib import nullcontext
from unittest.mock import patch

from tests import triton_interpreter  # noqa: F401  # isort: skip

import torch
from torch import Tensor

from hone.attention.recurrent import decode_kernel, delta_rule
from hone.attention.recurrent.decode_kernel import Tuning
from hone.attention.recurrent.mixing import DeltaHeads
from tests.recurrent.steps import Step, draw_net

LIMITS = {torch.float32: 2e-6, torch.float16: 3e-3}
"""Of distances relative to the norm of what is right."""
CASES = {
    # key heads, value heads, their sizes, weights of a channel, columns at a time
    "a head for each key": ((2, 2, 16, 16, 4), 8),
    "two heads for each key": ((2, 4, 8, 16, 4), 16),
    "three heads, three weights": ((1, 3, 16, 8, 3), 4),
    "four heads, whole states": ((1, 4, 8, 8, 4), 8),
}
ROWS = [3, 0, 4]


def make_step(case: str, dtype: torch.dtype) -> Step:
    (num_keys, num_values, key_dim, value_dim, taps), _ = CASES[case]
    heads = DeltaHeads(
        num_key_heads=num_keys, num_value_heads=num_values, key_dim=key_dim, value_dim=value_dim
    )
    return Step.draw(draw_net(heads, dtype, taps=taps), ROWS, 6)


def compute(step: Step, columns: int) -> Tensor:
    tuning = Tuning(columns, 1)
    return decode_kernel.mix_heads(step.projected, step.net, step.context, tuning=tuning)


def distance(actual: Tensor, expected: Tensor) -> float:
    assert actual.shape == expected.shape
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def compare(case: str, dtype: torch.dtype, change: Callable[[Step], None] | None = None) -> float:
    """The largest distance of outputs, states and tails after two tokens."""
    step = make_step(case, dtype)
    twin = step.copy(torch.float32)
    if change is not None:
        change(twin)
    found = []
    for number in range(2):
        if number:
            later = Step.draw(step.net, ROWS, 1, seed=7).projected
            step.projected.copy_(later)
            twin.projected.copy_(later)
        found.append(distance(compute(step, CASES[case][1]), twin.reference()))
    found += [distance(step.states, twin.states), distance(step.tails, twin.tails)]
    return max(found)


def no_offset(step: Step) -> None:
    step.net.step_bias.zero_()


def other_rows(step: Step) -> None:
    step.rows[:] = torch.tensor([3, 4, 0])


def late_decay(tokens: delta_rule.Tokens, state: Tensor) -> tuple[Tensor, Tensor]:
    """The mistake: the state decays once it has been updated."""
    output, updated = delta_rule_step(tokens._replace(g=0 * tokens.g), state)
    return output, updated * tokens.g.exp()[..., None, None]


delta_rule_step = delta_rule.step


def shared_row() -> bool:
    """Sequences that name one row leave the others as they should be."""
    step = make_step("two heads for each key", torch.float32)
    twin = step.copy()
    step.rows[:] = torch.tensor([5, 2, 5])
    twin.rows[:] = torch.tensor([5, 2, 1])
    output, expected = compute(step, 8), twin.reference()
    kept = torch.tensor([0, 2, 3, 4])  # neither the shared row nor the twin's own
    pairs = [(output[1], expected[1])]
    pairs += [(step.states[kept], twin.states[kept]), (step.tails[kept], twin.tails[kept])]
    return all(distance(x, y) < LIMITS[torch.float32] for x, y in pairs)


def main() -> None:
    wrong = {
        f"{case}, {dtype}": error
        for case in CASES
        for dtype, limit in LIMITS.items()
        if not (error := compare(case, dtype)) < limit
    }
    bugs = {
        "bias left out": (no_offset, nullcontext()),
        "states of other rows": (other_rows, nullcontext()),
        "decay after the update": (None, patch.object(delta_rule, "step", late_decay)),
    }
    missed = {}
    for bug, (change, context) in bugs.items():
        with context:
            error = compare("two heads for each key", torch.float16, change)
        if error < 3 * LIMITS[torch.float16]:
            missed[bug] = error
    results = {"cases": len(CASES) * len(LIMITS), "wrong": wrong, "missed": missed}
    json.dump(results | {"shared row": shared_row()}, sys.stdout)


if __name__ == "__main__":
    main()
