"""Llama: the layout that the other dense families vary."""

from hone.families.spec import DENSE_TENSOR_PLAN, DecodeLayout, ModelSpec, sizes

SPEC = ModelSpec(
    model_type="llama",
    decode=DecodeLayout("transformers.models.llama.modeling_llama", "Llama"),
    tensor_plan=DENSE_TENSOR_PLAN,
    public={
        f"llama-{name}": sizes("llama", numbers, 128_256, context=131_072, tied=tied)
        for name, tied, numbers in (
            ("3.2-1b", True, (16, 2048, 32, 8, 8192)),
            ("3.2-3b", True, (28, 3072, 24, 8, 8192)),
            ("3.1-8b", False, (32, 4096, 32, 8, 14336)),
            ("3.1-70b", False, (80, 8192, 64, 8, 28672)),
            ("3.3-70b", False, (80, 8192, 64, 8, 28672)),
        )
    },
)
