"""Judging bfloat16 by float32: no number of its own says whether a result is right.

How far bfloat16 takes a gradient from that of float32 depends on model and rows. So the plain
computation in bfloat16 is compared with float32 as well, and a result is right where its error is
about as large; a wrong one is off by its own size, which is a hundred times that.

How much larger may it be? A product whose sum is split over N ranks is rounded in N parts, each of
1/N of its variance, and again at each of N - 1 additions, where k parts have k/N of it. So the
variance of its error is 1 + (2 + ... + N) / N times that of one rounding, and what depends on it is
off by no more than that. Attention in two blocks is the case N = 2.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from torch import Tensor

WHOLE, KIND = 1.1, 1.75
"""Beyond that: for all elements together, and for one kind of parameter, which may be few."""


def split_noise(num_ranks: int = 2) -> float:
    """By how much splitting sums over so many ranks may multiply an error."""
    return (1 + sum(range(2, num_ranks + 1)) / num_ranks) ** 0.5


def kind_of(name: str) -> str:
    """`q_proj` of `model.layers.3.self_attn.q_proj.weight`, `q_proj.bias` of its bias."""
    *_, module, parameter = ("", *name.split("."))
    return module if parameter == "weight" and module else f"{module}.{parameter}".strip(".")


def errors(found: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> dict[str, float]:
    """Relative distance of the tensors of each kind, and of `all`. Raises KeyError for names that
    only one of both has."""
    if found.keys() != wanted.keys():
        raise KeyError(f"only one has {sorted(found.keys() ^ wanted.keys())}")
    gaps: defaultdict[str, float] = defaultdict(float)
    norms: defaultdict[str, float] = defaultdict(float)
    for name, want in wanted.items():
        gap = float((found[name].float() - want.float()).norm()) ** 2
        norm = float(want.float().norm()) ** 2
        for kind in ("all", kind_of(name)):
            gaps[kind] += gap
            norms[kind] += norm
    return {kind: (gaps[kind] / max(norms[kind], 1e-60)) ** 0.5 for kind in gaps}


def worst_ratio(found: Mapping[str, float], plain: Mapping[str, float]) -> tuple[float, str]:
    """The largest ratio of two `errors` of one kind, and which that is."""
    return max((found[kind] / max(plain[kind], 1e-30), kind) for kind in plain if kind != "all")
