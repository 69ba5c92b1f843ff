"""Finds what makes a whole decode step fast: programs of attention, its early start, own products.

`python -m tests.gpu.step_sweep` builds Qwen3-8B with random weights and a cache for 256 sequences
of 1,024 tokens. It checks products by bulk copies against float64, and attention that starts early
against attention that does not (bit by bit, over all layers); then it times one recorded step, from
embedding to logits, with each choice: launches overlap their neighbours, so that no part is timed
alone. The table at the end says what each idea gains. Qwen3-0.6B follows with the choices for
attention. Exits with 1 where a check fails.
"""

# ruff: noqa: T201

from __future__ import annotations

import itertools
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from multiprocessing import get_context
from unittest import mock

import torch
import torch.nn.functional as F
import triton

from hone.attention import triton_decode
from hone.attention.triton_decode import DecodeTuning
from hone.models import product_kernels
from hone.models.generation import generation_model
from hone.models.product_kernels import Tile, small_product
from tests.gpu.layers_check import CHECKS as checks
from tests.gpu.layers_check import DEVICE, Cache, check, graph_us, make_model

BANDWIDTH = 4.3e12
TIME_LIMIT_S = 140
STARTED = time.monotonic()

KINDS = {
    "qkv": (6144, 4096, {"gated": False, "split": False}),
    "o": (4096, 4096, {"gated": False, "split": True}),
    "gate_up": (24576, 4096, {"gated": True, "split": False}),
    "down": (4096, 12288, {"gated": False, "split": True}),
}
"""Products of Qwen3-8B: outputs and inputs of the weight, and how it is called."""

TILES = {
    "o": [
        Tile(128, 128, 64, 2, 8, 5, True),
        Tile(128, 128, 64, 2, 4, 5, True),
        Tile(128, 128, 128, 2, 8, 3, True),
        Tile(256, 64, 64, 2, 8, 5, True),
        Tile(256, 128, 64, 4, 8, 4, True),
        Tile(128, 64, 64, 1, 4, 6, True),
        Tile(128, 128, 64, 2, 8, 4, False),
    ],
    "gate_up": [
        Tile(128, 64, 64, 1, 8, 4, True),
        Tile(128, 64, 64, 1, 8, 3, True),
        Tile(128, 64, 64, 1, 4, 3, True),
        Tile(256, 64, 64, 1, 8, 4, True),
        Tile(128, 128, 64, 1, 8, 4, True),
        Tile(128, 64, 64, 1, 8, 3, False),
    ],
    "qkv": [
        Tile(128, 64, 64, 1, 4, 4, True),
        Tile(128, 128, 64, 1, 8, 5, True),
        Tile(256, 64, 64, 1, 8, 5, True),
    ],
}
TILES["down"] = TILES["o"]
ATTENTION = [
    DecodeTuning(64, 2, 3, 4),
    DecodeTuning(64, 2, 3, 6),
    DecodeTuning(64, 2, 3, 8),
    DecodeTuning(64, 2, 3, 12),
    DecodeTuning(64, 2, 3, 16),
    DecodeTuning(64, 2, 3, 5, 200),
    DecodeTuning(64, 2, 3, 10, 200),
]


def compile_product(name: str, tile: Tile) -> str:
    """Empty, or why this one cannot be built."""
    outputs, inputs, options = KINDS[name]
    x = torch.empty(256, inputs, device=DEVICE, dtype=torch.bfloat16)
    weight = torch.empty(outputs, inputs, device=DEVICE, dtype=torch.bfloat16)
    try:
        small_product(x, weight, tile=tile, **options)
        torch.cuda.synchronize()
    except Exception as error:  # noqa: BLE001  # printed; the sweep goes on without
        return f"{name} {tuple(tile)}: {type(error).__name__} {str(error)[:300]}"
    return ""


def tiles_that_build() -> dict[str, list[Tile]]:
    tasks = [(name, tile) for name, tiles in TILES.items() for tile in tiles]
    with ProcessPoolExecutor(12, mp_context=get_context("spawn")) as pool:
        failures = list(pool.map(compile_product, *zip(*tasks, strict=True)))
    print(*filter(None, failures), sep="\n")
    built = [task for task, failure in zip(tasks, failures, strict=True) if not failure]
    return {name: [tile for other, tile in built if other == name] for name in KINDS}


@torch.inference_mode()
def check_tiles(tiles: dict[str, list[Tile]]) -> None:
    """Against float64, no further from it than cuBLAS; also where rows do not fill a tile."""
    for name, (outputs, inputs, options) in KINDS.items():
        weight = torch.randn(outputs, inputs, device=DEVICE).bfloat16() / inputs**0.5
        for num_rows in (256, 193):
            x = torch.randn(num_rows, inputs, device=DEVICE).bfloat16()
            exact, theirs = x.double() @ weight.double().T, F.linear(x, weight)
            if options["gated"]:
                exact, theirs = (
                    F.silu(g) * u for g, u in (y.chunk(2, -1) for y in (exact, theirs))
                )
            reference = ((theirs - exact).norm() / exact.norm()).item()
            for tile in tiles[name]:
                found = small_product(x, weight, tile=tile, **options)
                found = found.sum(0) if options["split"] else found
                error = ((found - exact).norm() / exact.norm()).item()
                check(
                    f"{name} {num_rows} {tuple(tile)}",
                    error <= 1.1 * reference,
                    f"{error:.2e}, cuBLAS {reference:.2e}",
                )


class Step:
    """One decode step of a model, with choices made for it."""

    def __init__(self, shape: str, num_layers: int, batch: int, context: int) -> None:
        self.model = make_model(shape, num_layers, vocab_size=151936)
        self.generation = generation_model(self.model, compile=False)
        self.prepare(batch, context)

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

    def us(
        self,
        tuning: DecodeTuning,
        prefetched: int | None,
        tiles: dict[str, Tile | None],
        n: int = 7,
    ) -> float:
        """Device time; `prefetched` None starts attention only when the kernel ahead has ended."""
        with chosen(tuning, prefetched, tiles):
            return graph_us(lambda: self.generation.logits(self.hidden()), n)

    @torch.inference_mode()
    def check_early_start(self, tuning: DecodeTuning) -> None:
        found = []
        for prefetched in (None, 0, 1, 2):
            with chosen(tuning, prefetched, {}):
                found += [self.hidden().clone() for _ in range(3)]
        same = all(torch.equal(found[0], other) for other in found)
        check("attention that starts early equals one that does not", same, "bitwise, all layers")

    @property
    def limit_us(self) -> float:
        weights = sum(p.nbytes for p in self.model.parameters())
        per_token = sum(x[0, 0, 0].nbytes * 2 for x in self.cache.layers)
        return (weights + self.batch * self.context * per_token) / BANDWIDTH * 1e6


@contextmanager
def chosen(
    tuning: DecodeTuning, prefetched: int | None, tiles: dict[str, Tile | None]
) -> Iterator[None]:
    """Within it kernels are launched as said; products not named are left to the usual rule."""
    choose = product_kernels.choose_tile
    by_key = {(*KINDS[name][:2], *KINDS[name][2].values()): tile for name, tile in tiles.items()}

    def choose_tile(num_rows, num_outputs, num_inputs, *, gated, split):
        key = (num_outputs, num_inputs, gated, split)
        usual = choose(num_rows, num_outputs, num_inputs, gated=gated, split=split)
        return by_key.get(key, usual)

    with (
        mock.patch.object(triton_decode, "choose_tuning", return_value=tuning),
        mock.patch.object(triton_decode, "PREFETCHED_TILES", prefetched or 0),
        mock.patch.object(product_kernels, "choose_tile", choose_tile),
        ExitStack() as late,
    ):
        if prefetched is None:
            late.enter_context(mock.patch.object(triton_decode, "overlaps", return_value=False))
        yield


def elapsed() -> float:
    return time.monotonic() - STARTED


def rank(name: str, choices: Sequence, us: Callable[..., float]) -> list:
    """The choices, fastest first, and their times on a line; as many as there is time for."""
    timed = []
    for choice in choices:
        if elapsed() < TIME_LIMIT_S or not timed:
            timed.append((us(choice), choice))
    timed.sort(key=lambda pair: pair[0])
    texts = [f"{_short(choice)} {us / 1e3:.3f}" for us, choice in timed]
    print(f"{name:9} {'  '.join(texts)}  [{elapsed():.0f} s]", flush=True)
    return [choice for _, choice in timed]


def _short(choice: object) -> str:
    if choice is None:
        return "cuBLAS"
    if isinstance(choice, tuple) and isinstance(choice[0], DecodeTuning):
        tuning, prefetched = choice
        registers = tuning.max_registers or ""
        start = "late" if prefetched is None else f"early+{prefetched}"
        return f"{tuning.programs_per_processor}p{registers} {start}"
    return "/".join(str(int(x)) for x in choice) if isinstance(choice, tuple) else str(choice)


def time_attention(step: Step) -> tuple[DecodeTuning, int | None]:
    """The fastest launch of attention in the step; products as they are chosen now."""
    plain = ATTENTION[0]
    starts = [(plain, prefetched) for prefetched in (None, 0, 1, 2)]
    best = rank("start", starts, lambda c: step.us(*c, {}))[0]
    tunings = [(tuning, best[1]) for tuning in ATTENTION]
    best = rank("programs", tunings, lambda c: step.us(*c, {}))[0]
    again = [(best[0], prefetched) for prefetched in (None, 0, 1, 2)]
    return rank("start", again, lambda c: step.us(*c, {}))[0]


def time_large(tiles: dict[str, list[Tile]]) -> None:
    step = Step("qwen3-8b", 36, 256, 1024)
    print(f"8B, B=256, ctx 1024: ms of a step; limit {step.limit_us / 1e3:.2f} [{elapsed():.0f} s]")
    step.check_early_start(ATTENTION[0])
    attention = time_attention(step)
    own: dict[str, Tile | None] = {}
    for name in ("o", "down", "gate_up", "qkv"):
        ranked = rank(
            name, [None, *tiles[name]], lambda t, name=name: step.us(*attention, {**own, name: t})
        )
        own[name] = ranked[0]
    before = (ATTENTION[0], None)
    ideas = {
        "before": (*before, {}),
        "more programs": (attention[0], None, {}),
        "early start": (ATTENTION[0], attention[1], {}),
        "own products": (*before, own),
        "own o": (*attention, {"o": own["o"]}),
        "both of attention": (*attention, {}),
        "all": (*attention, own),
    }
    for _ in range(2):
        for idea, choice in ideas.items():
            us = step.us(*choice, n=11)
            print(f"  {idea:18} {us / 1e3:7.3f} ms  {step.limit_us / us:.1%} of the limit")
    for batch in (128, 512):
        step.prepare(batch, 1024 if batch < 512 else 512)
        rank(f"B={batch}", [before, attention], lambda c: step.us(*c, {}))


def time_small() -> None:
    step = Step("qwen3-0.6b", 28, 256, 1024)
    for batch, context in ((256, 1024), (32, 1024), (1, 1024)):
        step.prepare(batch, context)
        options = [(ATTENTION[i], start) for i, start in itertools.product((0, 2, 4), (None, 0, 1))]
        rank(f"0.6B {batch}", options, lambda c: step.us(*c, {}, 11))


def main() -> int:
    print(f"torch {torch.__version__}, triton {triton.__version__}, {torch.cuda.get_device_name()}")
    tiles = tiles_that_build()
    print(f"{sum(map(len, tiles.values()))} tiles built [{elapsed():.0f} s]", flush=True)
    check_tiles(tiles)
    print(f"tiles checked [{elapsed():.0f} s]", flush=True)
    time_large(tiles)
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
