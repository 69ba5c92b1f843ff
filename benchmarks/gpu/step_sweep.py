"""Times whole decode steps by how attention is launched: how many programs, and how early.

`python -m benchmarks.gpu.step_sweep` builds Qwen3-8B with random weights and a cache for 256
sequences of 1,024 tokens. It checks attention that starts early against attention that does not
(bit by bit, over all layers), then times one recorded step, from embedding to logits, with each
choice: launches overlap their neighbours, so that no part is timed alone. Qwen3-0.6B follows. Exits
with 1 where a check fails.
"""

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import triton
from benchmarks.gpu.layers_check import CHECKS as checks
from benchmarks.gpu.layers_check import DEVICE, Cache, check, graph_us, make_model

from hone.attention import triton_decode
from hone.attention.triton_decode import DecodeTuning
from hone.models.generation import generation_model

BANDWIDTH = 4.3e12
TIME_LIMIT_S = 140
STARTED = time.monotonic()
PLAIN = DecodeTuning(64, 2, 3, 4)
TUNINGS = [
    PLAIN,
    DecodeTuning(64, 2, 3, 6),
    DecodeTuning(64, 2, 3, 8),
    DecodeTuning(64, 2, 3, 12),
    DecodeTuning(64, 2, 3, 16),
    DecodeTuning(64, 2, 3, 5, 200),
    DecodeTuning(64, 2, 3, 10, 200),
]

Choice = tuple[DecodeTuning, bool]
"""How attention is built, and whether it starts before the kernel ahead of it has ended."""


class Step:
    """One decode step of a model, with choices made for it."""

    def __init__(self, shape: str, num_layers: int) -> None:
        self.model = make_model(shape, num_layers, vocab_size=151936)
        self.generation = generation_model(self.model, compile=False)

    def prepare(self, batch: int, context: int) -> None:
        self.cache = self.paged = None  # frees the former one
        self.cache = Cache(self.model, batch, context)
        for layer in self.cache.layers:
            layer.normal_()
        self.batch, self.context = batch, context
        self.positions, self.paged = self.cache.context(
            [context - 1] * batch, [1] * batch, is_decode=True
        )
        self.ids = torch.randint(151936, (batch,), device=DEVICE)

    def hidden(self) -> torch.Tensor:
        return self.generation.hidden_states(self.ids, self.positions, self.paged)

    def us(self, choice: Choice, repeats: int) -> float:
        """Device time."""
        with chosen(choice):
            return graph_us(lambda: self.generation.logits(self.hidden()), repeats)

    @torch.inference_mode()
    def check_early_start(self) -> None:
        found = []
        for is_early in (False, True):
            with chosen((PLAIN, is_early)):
                found += [self.hidden().clone() for _ in range(3)]
        same = all(torch.equal(found[0], other) for other in found)
        check("attention that starts early equals one that does not", same, "bitwise, all layers")

    @property
    def limit_us(self) -> float:
        weights = sum(p.nbytes for p in self.model.parameters())
        per_token = sum(x[0, 0, 0].nbytes * 2 for x in self.cache.layers)
        return (weights + self.batch * self.context * per_token) / BANDWIDTH * 1e6


@contextmanager
def chosen(choice: Choice) -> Iterator[None]:
    """Within it attention is launched as said."""
    tuning, is_early = choice
    with (
        mock.patch.object(triton_decode, "choose_tuning", return_value=tuning),
        mock.patch.object(triton_decode, "overlaps", return_value=is_early),
    ):
        yield


def elapsed() -> float:
    return time.monotonic() - STARTED


def rank(step: Step, name: str, choices: list[Choice], repeats: int = 7) -> list[Choice]:
    """The choices, fastest first, and their times on a line; as many as there is time for."""
    timed = []
    for choice in choices:
        if elapsed() < TIME_LIMIT_S or not timed:
            timed.append((step.us(choice, repeats), choice))
    timed.sort(key=lambda pair: pair[0])
    texts = [f"{_short(choice)} {us / 1e3:.3f}" for us, choice in timed]
    print(f"{name:10} {'  '.join(texts)}  [{elapsed():.0f} s]", flush=True)
    return [choice for _, choice in timed]


def _short(choice: Choice) -> str:
    tuning, is_early = choice
    programs = f"{tuning.programs_per_processor}p{tuning.max_registers or ''}"
    return f"{programs} {'early' if is_early else 'late'}"


def time_large() -> None:
    step = Step("qwen3-8b", 36)
    step.prepare(256, 1024)
    print(f"8B, B=256, ctx 1024: ms of a step; limit {step.limit_us / 1e3:.2f} [{elapsed():.0f} s]")
    step.check_early_start()
    best = rank(step, "8B 256", [(tuning, True) for tuning in TUNINGS])[0][0]
    choices = [(tuning, is_early) for tuning in (PLAIN, best) for is_early in (True, False)]
    for _ in range(2):
        rank(step, "8B again", choices, 11)
    for batch, context in ((128, 1024), (512, 512)):
        step.prepare(batch, context)
        rank(step, f"8B {batch}", choices)


def time_small() -> None:
    step = Step("qwen3-0.6b", 28)
    for batch in (256, 32, 1):
        step.prepare(batch, 1024)
        choices = list(itertools.product(TUNINGS[:5:2], (True, False)))
        rank(step, f"0.6B {batch}", choices, 11)


def main() -> int:
    print(f"torch {torch.__version__}, triton {triton.__version__}, {torch.cuda.get_device_name()}")
    time_large()
    torch.cuda.empty_cache()
    time_small()
    for good, name, text in checks:
        if not good:
            print(f"FAIL {name:58} {text}")
    print(
        f"{len(checks)} checks, {sum(not good for good, *_ in checks)} failed [{elapsed():.0f} s]"
    )
    return 0 if all(good for good, *_ in checks) else 1


if __name__ == "__main__":
    sys.exit(main())
