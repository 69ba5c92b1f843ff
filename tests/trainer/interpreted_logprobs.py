"""Runs the kernels of log-probabilities in Triton's interpreter and prints errors as JSON.

A process of its own, as the interpreter is chosen before triton is first imported.
"""

from __future__ import annotations

import json
import sys
from unittest.mock import patch

from tests import triton_interpreter  # noqa: F401  # isort: skip

import torch

from hone.trainer import logprob_kernels as kernels
from hone.trainer import logprobs as twins
from tests.trainer.logprob_cases import BUGS, CASES

BLOCK = 64


def draw(num_rows, num_words, spread, seed):
    """Logits, labels partly of other ranks, and gradients of log-probs and entropies."""
    generator = torch.Generator().manual_seed(seed)
    logits = spread * torch.randn(num_rows, num_words, generator=generator)
    labels = torch.randint(-num_words, 2 * num_words, (num_rows,), generator=generator)
    labels[0], labels[1] = num_words - 1, 0
    return logits, labels, *torch.randn(2, num_rows, generator=generator)


def relative(actual, expected):
    return float((actual.double() - expected).norm() / expected.norm())


def errors(num_words, *, spread=3.0, temperature=1.0, softcap=None, with_entropy=True, dtype=None):
    """Relative errors of each statistic and of the gradient, against torch in float64."""
    logits, labels, *grads = draw(5, num_words, spread, seed=num_words)
    wide = [x.double() for x in (logits, *grads)]
    options = {"temperature": temperature, "softcap": softcap}
    statistics = kernels.part_statistics(logits, labels, **options, with_entropy=with_entropy)
    expected = twins.part_statistics(wide[0].clone(), labels, **options, with_entropy=with_entropy)
    assert statistics.shape == expected.shape
    found = [relative(*pair) for pair in zip(statistics, expected, strict=True)]
    scores = twins._combine(expected[None])
    gradients = []
    for function, (x, grad_logprobs, grad_entropy), kind in (
        (kernels.logits_gradient, (logits, *grads), dtype or torch.float32),
        (twins.logits_gradient, wide, torch.float64),
    ):
        entropy = None if scores.entropy is None else scores.entropy.to(x.dtype)
        gradients.append(
            function(
                x,
                labels,
                normaliser_C=scores.normaliser.to(x.dtype),
                entropy_C=entropy,
                grad_logprobs_C=grad_logprobs,
                grad_entropy_C=grad_entropy if with_entropy else None,
                **options,
                dtype=kind,
            )
        )
    assert gradients[0].dtype == (dtype or torch.float32)
    return [*found, relative(*gradients)]


def shifted_labels(function):
    return lambda logits, labels, **options: function(logits, labels + 1, **options)


def main() -> None:
    with (
        patch.object(kernels, "STATISTICS_BLOCK", BLOCK),
        patch.object(kernels, "GRADIENT_BLOCK", BLOCK),
    ):
        results = {name: errors(**case) for name, case in CASES.items()}
        results["half"] = errors(200, dtype=torch.float16)
        for name in BUGS:
            with patch.object(kernels, name, shifted_labels(getattr(kernels, name))):
                results[name] = errors(**CASES["several blocks"])
    json.dump(results, sys.stdout)


if __name__ == "__main__":
    main()
