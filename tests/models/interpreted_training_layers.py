"""Runs the trainer's layers in Triton's interpreter beside transformers'; prints errors as JSON.

A process of its own, as the interpreter is chosen before triton is first imported.
"""

from __future__ import annotations

import json
import sys

from tests import triton_interpreter  # noqa: F401  # isort: skip

import torch
from torch.autograd.graph import saved_tensors_hooks

from hone.attention import PackedContext
from hone.attention.backends import packed_attention
from hone.models import layer_gradients, training_layers
from hone.models.decoder import hidden_states
from hone.models.training_layers import TrainingDecoder
from tests.models.training_cases import BUGS, CASES, LENGTHS
from tests.trainer.examples import tiny_model


class KeepsInputs(torch.autograd.Function):
    """Attention that keeps its very inputs for backward, as those of a GPU do."""

    @staticmethod
    def forward(ctx, rest, *inputs):
        ctx.save_for_backward(*inputs)
        ctx.rest = context, options = rest
        return packed_attention(*inputs, context, **options)

    @staticmethod
    def backward(ctx, grad):
        inputs = [x.detach().requires_grad_() for x in ctx.saved_tensors]
        context, options = ctx.rest
        with torch.enable_grad():
            output = packed_attention(*inputs, context, **options)
        return None, *torch.autograd.grad(output, inputs, grad)


def batch(vocab_size, seed):
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(vocab_size, (sum(LENGTHS),), generator=draw)
    positions = torch.cat([torch.arange(n) for n in LENGTHS])
    return ids, positions, PackedContext.from_lengths(LENGTHS)


def make(family, fields, dtype, frozen=""):
    model = tiny_model(family, dtype=dtype, num_hidden_layers=2, **fields)
    draw = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            noise = torch.randn(parameter.shape, generator=draw, dtype=torch.float64)
            parameter.data += 0.3 * noise.to(dtype)
        if frozen and frozen in name:
            parameter.requires_grad_(False)
    return model


def train(model, backbone, num_batches=1):
    """Hidden states, and gradients of all parameters summed over micro-batches."""
    model.zero_grad()
    found = {}
    for seed in range(num_batches):
        ids, positions, context = batch(model.config.vocab_size, seed)
        hidden = backbone(ids, positions, context)
        draw = torch.Generator().manual_seed(10 + seed)
        # The head's share of a tied embedding comes through autograd.
        logits = hidden @ model.get_output_embeddings().weight.T
        cotangent = torch.randn(logits.shape, generator=draw, dtype=torch.float64)
        logits.backward(cotangent.to(logits.dtype))
        found[f"hidden {seed}"] = hidden.detach().double()
    gradients = {n: p.grad.double() for n, p in model.named_parameters() if p.grad is not None}
    return found | gradients


def errors(family, fields, *, num_batches=1, frozen="", offload=False, **options):
    """Relative error of hidden states and of each parameter's gradient."""
    reference = make(family, fields, torch.float64, frozen)
    wanted = train(reference, lambda *inputs: hidden_states(reference, *inputs), num_batches)
    model = make(family, fields, torch.float32, frozen)
    stashed = []
    if offload:

        def stash(tensor):
            stashed.append(tensor.clone())
            return len(stashed) - 1

        options["save_hooks"] = lambda: saved_tensors_hooks(stash, lambda index: stashed[index])
    found = train(model, TrainingDecoder(model, **options), num_batches)
    if offload and len(stashed) != 2:
        return {"stashed": float("inf")}
    if set(found) != set(wanted):
        return {"names": float("inf")}
    return {
        name: float((found[name] - want).norm() / want.norm().clamp(min=1e-30))
        for name, want in wanted.items()
    }


def collected_elsewhere():
    """`gradient_of` gets each parameter's gradient, and `grad` the head's alone."""
    model = make("qwen3", {}, torch.float32)
    wanted = train(model, TrainingDecoder(model))
    head = model.get_output_embeddings().weight
    totals = {p: torch.zeros_like(p) for p in model.parameters()}
    found = train(model, TrainingDecoder(model, totals.__getitem__))
    left = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    totals[head] += head.grad
    close = all(
        torch.allclose(totals[p].double(), wanted[n], rtol=1e-4, atol=1e-4)
        for n, p in model.named_parameters()
    )
    return close and len(left) == 1 and len(found) == 2


def scored():
    """Hidden states without gradients, in inference mode, have the bits of a training pass."""
    model = make("qwen3", {}, torch.float32)
    decoder = TrainingDecoder(model)
    inputs = batch(model.config.vocab_size, 0)
    with torch.inference_mode():
        first = decoder(*inputs)
    second = decoder(*inputs)
    return torch.equal(first, second) and second.requires_grad and not first.requires_grad


def with_bug(bug):
    """The largest error where something is wrong on purpose."""
    kind, case = BUGS[bug]
    genuine = {}

    def replace(owner, name, function):
        genuine[owner, name] = getattr(owner, name)
        setattr(owner, name, function)

    norm = layer_gradients.norm_gradients
    layer = training_layers.TrainingLayer
    if kind == "residual":
        replace(
            layer_gradients,
            "norm_gradients",
            lambda *args, residual_grad=None: norm(*args),
        )
    elif kind == "overwrite":

        def overwrite(self, linear, grad, x):
            self.of(linear.weight).copy_(grad.T @ x)

        replace(training_layers._Gradients, "add_linear", overwrite)
    elif kind == "stale":
        replace(layer, "rotate", stale_rotation(layer.rotate))
    elif kind == "swapped":
        swap = layer_gradients.rotate_gradients
        replace(
            layer_gradients,
            "rotate_gradients",
            lambda *args: swap(*args)._replace(k_norm=swap(*args).q_norm),
        )
    family, fields, options = CASES[case]
    worst = max(errors(family, fields, **options).values())
    for (owner, name), function in genuine.items():
        setattr(owner, name, function)
    return worst


def stale_rotation(rotate):
    """Forgets to rotate again what was dropped."""

    def stale(self, row, qkv, out=None):
        return rotate(self, row, qkv) if out is None else out.data.zero_()

    return stale


def main() -> None:
    layer_gradients.PROGRAMS = 3  # each takes several tiles
    layer_gradients.NORM_TILE = 128
    training_layers.attend_packed = lambda q, k, v, context, **options: KeepsInputs.apply(
        (context, options), q, k, v
    )
    wanted = sys.argv[1:] or CASES
    results: dict[str, object] = {}
    for case in wanted:
        family, fields, options = CASES[case]
        results[case] = errors(family, fields, **options)
    if wanted is CASES:
        results["bugs"] = {bug: with_bug(bug) for bug in BUGS}
        results["collected elsewhere"] = collected_elsewhere()
        results["scored"] = scored()
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
