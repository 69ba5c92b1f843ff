"""Searches the launch parameters of the kernels of `fla-core` for gated delta nets.

    python -m benchmarks.gpu.fla_launches FOLDER [--heads 0.8B] [--kernels NAME ...]

Writes a file for each kernel into FOLDER, in the format that the package reads
(`hone.attention.recurrent.launches`), and prints the time of its three fastest variants and of the
slowest. Variants are compiled by several processes, then measured by one, on forward and backward
of 16,384 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

os.environ["FLA_CACHE_MODE"] = "disabled"  # read when the package is imported, below

WORKERS = 14
"""Processes that compile; the machine of the measurements has 16 cores."""
LENGTHS = [1024] * 16


def autotuners() -> list[Any]:
    """The kernels with variants in all imported modules of the package. Several have the same name,
    of which this process calls one."""
    from triton.runtime.autotuner import Autotuner

    found: dict[int, Any] = {}
    for name, module in list(sys.modules.items()):
        if not name.startswith("fla."):
            continue
        for value in list(vars(module).values()):
            kernel = value
            while kernel is not None and not isinstance(kernel, Autotuner):
                kernel = (
                    getattr(kernel, "fn", None) if "triton" in type(kernel).__module__ else None
                )
            if kernel is not None:
                found[id(kernel)] = kernel
    return list(found.values())


def keep_one_variant(searched: Sequence[str]) -> None:
    """Leave one variant to each kernel that is not among the `searched` ones; none: search all."""
    for kernel in autotuners():
        if searched and kernel.base_fn.__name__ not in searched:
            kernel.configs = kernel.configs[:1]


def compute(name: str) -> None:
    """Call all kernels: forward and backward of the rule from states, and of a layer from zero."""
    import torch
    from benchmarks.gpu.hybrid_check import HEADS, Layer, draw_tokens, of_kernels, rows_plan

    heads = HEADS[name]
    plan = rows_plan(LENGTHS)
    tokens = draw_tokens(sum(LENGTHS), heads)
    shape = len(LENGTHS), heads.num_value_heads, heads.key_dim, heads.value_dim
    states = torch.zeros(shape, device="cuda")
    leaves = [x.requires_grad_() for x in (*tokens, states)]
    outputs = of_kernels(plan, *leaves)
    torch.autograd.grad(outputs, leaves, [torch.ones_like(x) for x in outputs])
    Layer(plan, sum(LENGTHS), heads)()
    torch.cuda.synchronize()


def compile_some(number: int, name: str, kernels: Sequence[str]) -> str:
    """Compile each `WORKERS`th variant of each kernel, from variant `number` on. Returns an empty
    text, or why one cannot be compiled."""
    from hone.attention.recurrent import fla_convolution, fla_rule  # noqa: F401

    keep_one_variant(kernels)
    for kernel in autotuners():
        kernel.configs = kernel.configs[number::WORKERS] or kernel.configs[:1]
    try:
        compute(name)
    except Exception as error:  # noqa: BLE001  # printed; others go on
        return f"worker {number}: {type(error).__name__} {str(error)[:200]}"
    return ""


def write(folder: Path, kernels: Sequence[str]) -> None:
    """Write and print what was found for `kernels`; none: for all."""
    import torch
    import triton

    folder.mkdir(parents=True, exist_ok=True)
    for kernel in sorted(autotuners(), key=lambda kernel: kernel.base_fn.__name__):
        name = kernel.base_fn.__name__
        if not kernel.cache or (kernels and name not in kernels):
            continue
        chosen = list(kernel.cache.values())
        config = chosen[0]
        entry = {
            "kwargs": config.kwargs,
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            "num_ctas": config.num_ctas,
            "maxnreg": config.maxnreg,
        }
        facts = {"kernel_name": name, "triton_version": triton.__version__}
        facts |= {"device": torch.cuda.get_device_name(), "default_config": entry}
        (folder / f"{name}.json").write_text(json.dumps(facts, indent=1) + "\n")
        others = {str(x) for x in chosen[1:]} - {str(config)}
        print(f"{name}: {config}", *(f"\n    or {x}" for x in others))
        times = kernel.configs_timings or {}
        ranked = sorted(times.items(), key=lambda item: _first(item[1]))
        for variant, ms in (*ranked[:3], *ranked[-1:]):
            print(f"    {1e3 * _first(ms):8.1f} us  {variant}")


def _first(times: Any) -> float:
    return times[0] if isinstance(times, (list, tuple)) else times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--heads", default="0.8B", help="of which model (`hybrid_check.HEADS`)")
    parser.add_argument("--kernels", nargs="*", default=(), help="these only")
    args = parser.parse_args()
    start = perf_counter()
    with ProcessPoolExecutor(WORKERS, mp_context=get_context("spawn")) as pool:
        work = partial(compile_some, name=args.heads, kernels=args.kernels)
        for text in pool.map(work, range(WORKERS)):
            if text:
                print(text)
    print(f"compiled in {perf_counter() - start:.0f} s", flush=True)
    from hone.attention.recurrent import fla_convolution, fla_rule  # noqa: F401

    keep_one_variant(args.kernels)
    compute(args.heads)
    print(f"measured in {perf_counter() - start:.0f} s", flush=True)
    write(args.folder, args.kernels)


if __name__ == "__main__":
    main()
