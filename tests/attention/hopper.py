"""Compiles a Triton kernel for compute capability 9.0; needs no GPU."""

from __future__ import annotations

import re


def products(kernel, types, constants, *, aligned=(), **options) -> set[str]:
    """The instructions of the matrix unit in the kernel's code, which is assembled too.

    Arguments without a type are 32-bit integers; `aligned` are multiples of 16.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    signature = {name: "constexpr" if name in constants else "i32" for name in kernel.arg_names}
    attributes = {(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(
        fn=kernel, signature=signature | types, constexprs=constants, attrs=attributes
    )
    code = compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm
    assert code["cubin"]
    return set(re.findall(r"(?:wgmma\.mma_async|mma\.sync)\.\S*?(m\d+n\d+k\d+)", code["ptx"]))
