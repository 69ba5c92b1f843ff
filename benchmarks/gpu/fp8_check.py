"""Products in other formats on one GPU: `python -m benchmarks.gpu.fp8_check [SECTION ...]`.

    products   a projection in float8, forward and backward, against its definition in float64
    gradients  log-probs and gradients of whole models in bfloat16 and float8 against float32
    steps      optimizer steps of the trainer on three shapes in bfloat16 and float8
    tf32       the same of a float32 model, without and with `tf32`
    recipes *  other scales, and wide projections alone, on the 1.7b shape (only where named)

Needs the extra `fp8`. A product in float8 is right where it is its definition, up to bfloat16;
whether it is worth having is for `steps` to say.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from functools import partial
from time import perf_counter
from typing import Any
from unittest.mock import patch

import torch
from benchmarks.gpu.models import build
from benchmarks.gpu.rounding import errors
from benchmarks.gpu.sections import Run
from benchmarks.gpu.timing import wall_ms
from tests.trainer import float8_twin
from torch import Tensor, nn
from transformers import PreTrainedModel

from hone.algorithms.objective import PolicyObjective
from hone.algorithms.settings import AlgorithmConfig
from hone.models.decoder import decoder_layers
from hone.trainer import precision
from hone.trainer.settings import TrainerConfig
from hone.trainer.trainer import Trainer
from hone.types import Column, Row

SECTIONS = ("products", "gradients", "steps", "tf32", "recipes")
SHAPES: dict[str, dict[str, Any]] = {
    "qwen3-0.6b": {},
    "qwen3-1.7b": {},
    "qwen3-4b": {"recompute": "full"},
}
TOKENS, LENGTH, PROMPT = 16384, 2048, 256
LENGTHS = (257, 2, 700, 66, 1024, 33)
"""Of rows of `gradients`: packed they are no multiple of 16."""
PRODUCT_ERROR = 2.0**-6
"""Of a row, relative to its largest value: bfloat16, and float8's sums, which are shorter."""
GRADIENT_ERROR, MAX_KL = 0.3, 0.02
SMALL = ("qwen3-0.6b", 4)
"""Shape and layers where sizes do not matter."""
GIB = 1 << 30


def main() -> int:
    run = Run(__doc__, SECTIONS, on_request=("recipes",), seconds=90)
    run.row(torch.cuda.get_device_name(), f"torch {torch.__version__}")
    sections = (products, gradients, steps, tf32, recipes)
    return run.go({section.__name__: partial(section, run) for section in sections})


def rows_of(lengths: Sequence[int], vocab_size: int) -> list[Row]:
    draw = torch.Generator().manual_seed(0)
    rows: list[Row] = []
    for index, length in enumerate(lengths):
        num_prompt = min(PROMPT, length // 2)
        num_trained = length - num_prompt
        rows.append(
            Row(
                id=f"r{index}",
                group_id=f"g{index // 8}",
                token_ids=torch.randint(vocab_size, (length,), generator=draw).tolist(),
                loss_mask=[False] * num_prompt + [True] * num_trained,
                columns={
                    "advantages": Column(torch.randn(1, generator=draw).expand(num_trained).clone())
                },
            )
        )
    return rows


def trainer_of(model: PreTrainedModel, **settings: Any) -> Trainer:
    return Trainer(
        model,
        TrainerConfig.model_validate({"max_tokens_per_microbatch": TOKENS, **settings}),
        PolicyObjective(AlgorithmConfig(), max_completion_tokens=LENGTH),
        total_steps=100,
    )


# ---------------------------------------------------------------- products


def products(run: Run) -> None:
    run.row("largest error of a row", "tokens", "output", "d input", "d weight", "eager / compiled")
    model = build(SMALL[0], num_layers=1)
    precision.apply_matmul_precision(model, "fp8", torch.device("cuda"))
    mlp: Any = decoder_layers(model)[0].mlp
    for name, layer in {"up": mlp.up_proj, "down": mlp.down_proj}.items():
        layer.weight.data.mul_(torch.logspace(-2, 2, len(layer.weight), device="cuda")[:, None])
        for kind, call in {"eager": layer, "compiled": torch.compile(layer, dynamic=True)}.items():
            for num_tokens in (16, 1, 37, 1000, 4099):
                found, wanted = one_product(layer, call, num_tokens)
                off = [worst_row(f, w) for f, w in zip(found, wanted, strict=True)]
                good = all(error < PRODUCT_ERROR for error in off)
                run.check(f"{name} {kind}", good, num_tokens, *off)


def one_product(
    layer: nn.Linear, call: Callable[[Tensor], Tensor], num_tokens: int
) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
    draw = torch.Generator("cuda").manual_seed(num_tokens)

    def spread(width: int) -> Tensor:
        sizes = torch.randn(num_tokens, 1, generator=draw, device="cuda").clamp(-2, 2)
        values = torch.randn(num_tokens, width, generator=draw, device="cuda")
        return (10**sizes * values).bfloat16()

    x, grad = spread(layer.in_features).requires_grad_(), spread(layer.out_features)
    output = call(x[None])[0]
    found = torch.autograd.grad(output, [x, layer.weight], grad)
    return (output.detach(), *found), float8_twin.projection(x, layer.weight, grad)


def worst_row(found: Tensor, wanted: Tensor) -> float:
    largest = wanted.abs().amax(1, keepdim=True).clamp(min=1e-30)
    return float(((found.double() - wanted).abs() / largest).max())


# ---------------------------------------------------------------- whole models


def gradients(run: Run) -> None:
    """What is off in float8 must be what is off in its definition, not more for being compiled."""
    shape, num_layers = SMALL
    variants: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
        "float32": (torch.float32, {"compile": False}),
        "bfloat16": (torch.bfloat16, {"compile": False}),
        "fp8, not compiled": (torch.bfloat16, {"compile": False, "matmul_precision": "fp8"}),
        "fp8": (torch.bfloat16, {"matmul_precision": "fp8"}),
        "fp8, recompute": (torch.bfloat16, {"matmul_precision": "fp8", "recompute": "full"}),
    }
    run.row("against float32", "log-probs", "mean k3", "packing", "gradient", "worst kind")
    wanted: tuple[Tensor, dict[str, Tensor]] | None = None
    for name, (dtype, settings) in variants.items():
        with run.attempt(name):
            model = build(shape, num_layers=num_layers, dtype=dtype)
            trainer = trainer_of(model, **settings)
            rows = rows_of(LENGTHS, model.config.vocab_size)
            logprobs, packing = scored(trainer, rows)
            found = gradient_of(trainer, rows, logprobs)
            wanted = wanted or (logprobs, found)
            apart = logprobs - wanted[0]
            off = errors(found, wanted[1])
            kl = float((apart.exp() - 1 - apart).mean())
            good = off["all"] < GRADIENT_ERROR and kl < MAX_KL
            worst = max(off, key=lambda kind: off[kind])
            cells = (
                float(apart.abs().mean()),
                kl,
                packing,
                off["all"],
                f"{worst} {off[worst]:.3f}",
            )
            run.check(name, good, *cells)


def scored(trainer: Trainer, rows: list[Row]) -> tuple[Tensor, float]:
    """Log-probs of all rows together, and how far those are of each row alone."""
    together = trainer.logprobs(rows)
    alone = [trainer.logprobs([row])[0] for row in rows]
    return torch.cat(together), float((torch.cat(alone) - torch.cat(together)).abs().max())


def gradient_of(trainer: Trainer, rows: list[Row], logprobs: Tensor) -> dict[str, Tensor]:
    """In float32 on the host; of two micro-batches, neither with a multiple of 16 tokens."""
    pieces = logprobs.split([row.num_trained for row in rows])
    for row, piece in zip(rows, pieces, strict=True):
        row.columns["logprobs/policy"] = Column(piece.clone())
        row.columns["logprobs/engine"] = Column(piece.clone())
    for part in (rows[:3], rows[3:]):
        trainer.forward_backward(part)
    found = {name: g.float().cpu() for name, g in trainer.policy.gradients.items()}
    trainer.policy.drop_gradient()
    return found


def steps(run: Run) -> None:
    table = Steps(run)
    for shape, settings in SHAPES.items():
        table.first = None
        for name in ("default", "fp8"):
            if not run.has_time(f"{shape} {name}"):
                return
            table.add(f"{shape} {name}", partial(build, shape), matmul_precision=name, **settings)


class Steps:
    """A table of optimizer steps, each compared with the first."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.first: float | None = None
        run.row("step", "ms", "tokens/s", "times as fast", "peak GiB", "first s")

    def add(self, name: str, make: Callable[[], PreTrainedModel], **settings: Any) -> None:
        with self.run.attempt(name):
            self._add(name, trainer_of(make(), **settings))

    def _add(self, name: str, trainer: Trainer) -> None:
        rows = rows_of([LENGTH] * (TOKENS // LENGTH), trainer.policy.model.config.vocab_size)
        for row in rows:
            row.columns["logprobs/policy"] = Column(torch.full((row.num_trained,), -11.9))
            row.columns["logprobs/engine"] = Column(torch.full((row.num_trained,), -11.9))
        begun = perf_counter()
        trainer.update(rows)
        torch.cuda.synchronize()
        first_s = perf_counter() - begun
        trainer.update(rows)
        torch.cuda.reset_peak_memory_stats()
        time_ms = wall_ms(lambda: trainer.update(rows), 3)
        peak = torch.cuda.max_memory_allocated() / GIB
        self.first = self.first or time_ms
        rate = f"{TOKENS / time_ms * 1e3:,.0f}"
        self.run.row(name, time_ms, rate, self.first / time_ms, peak, first_s)


def tf32(run: Run) -> None:
    """The setting is the process's: it is taken back."""
    table, own = Steps(run), torch.get_float32_matmul_precision()
    make = partial(build, SMALL[0], num_layers=SMALL[1], dtype=torch.float32)
    for name in ("default", "tf32"):
        table.add(f"float32 {name}", make, matmul_precision=name, compile=False)
    torch.set_float32_matmul_precision(own)


def recipes(run: Run) -> None:
    """What `precision` could do instead."""
    plain = precision._fits  # pyright: ignore[reportPrivateUsage]

    def is_wide(module: nn.Module) -> bool:
        return plain(module) and min(module.weight.shape) > 1024

    table, make = Steps(run), partial(build, "qwen3-1.7b")
    table.add("default", make)
    choices: dict[str, dict[str, Any]] = {
        "rowwise": {"_RECIPE": "rowwise"},
        "rowwise, wider than 1,024": {"_fits": is_wide},
        "rowwise, dW in bfloat16": {"_RECIPE": "rowwise_with_gw_hp"},
        "tensorwise": {"_RECIPE": "tensorwise"},
    }
    for name, changes in choices.items():
        if not run.has_time(name):
            return
        with patch.multiple(precision, **changes):
            table.add(name, make, matmul_precision="fp8")


if __name__ == "__main__":
    sys.exit(main())
