"""The kernels between the matrix products, run by Triton's interpreter, against transformers'."""

from __future__ import annotations

from importlib.util import find_spec

import pytest
import torch

from tests.interpreted import run_interpreted
from tests.tables import table

pytestmark = pytest.mark.skipif(not find_spec("triton"), reason="triton cannot be imported")


def test_R4_kernels_round_as_transformers():
    results = run_interpreted("tests.models.interpreted_layer_kernels")
    assert results["cases"] == 98
    assert not results["wrong"]
    assert not results["missed"], "planted bugs"


def compile_for_hopper(kernel, pointers, constants, **options):
    """The kernel's assembly for compute capability 9.0, as it is launched there; needs no GPU."""
    return compile_for(90, kernel, pointers, constants, **options).asm["ptx"]


def compile_for(capability, kernel, pointers, constants, **options):
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile

    constants = {**constants, "OVERLAP": capability >= 90}
    types = {name: "constexpr" if name in constants else "i32" for name in kernel.arg_names}
    signature = {**types, **pointers}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if signature[name].startswith("*")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"enable_fp_fusion": False, "launch_pdl": capability >= 90, **options}
    return compile(source, target=GPUTarget("cuda", capability, 32), options=options)


HALF = "*bf16"
HEADS = {
    "ZERO_CENTRED": False,
    "QUERY_ROWS": 1,
    "NUM_HEADS": 16,
    "NUM_KV_HEADS": 8,
    "HEAD_DIM": 128,
    "ROTARY": 128,
    "HEADS": 8,
    "BLOCK": 64,
}
ROTATE = {"q_ptr": HALF, "qkv_ptr": HALF, "rotary_ptr": HALF, "positions_ptr": "*i64"}
ROTATE["eps"] = "fp32"


@pytest.fixture
def kernels(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # triton 3.9 warns where it is unset
    from hone.models import layer_kernels

    return layer_kernels


def test_kernels_compile_for_hopper(kernels):
    norm = {"output_ptr": HALF, "residual_ptr": HALF, "weight_ptr": HALF, "eps": "fp32"}
    norm_sizes = {"ZERO_CENTRED": False, "WIDTH": 1024, "BLOCK": 1024}
    for added, parts in (({"x_ptr": HALF}, 1), ({"x_ptr": "*fp32"}, 4), ({}, 1)):
        constants = {**norm_sizes, "PARTS": parts} | ({} if added else {"x_ptr": None})
        check_waits(compile_for_hopper(kernels._norm_kernel, norm | added, constants, num_warps=2))
    cache = {"cache_ptr": HALF, "slots_ptr": "*i64", "q_norm_ptr": HALF, "k_norm_ptr": HALF}
    for optional in ({}, cache, cache | {"cache_ptr": "*fp8e4nv", "scales_ptr": "*fp32"}):
        absent = {name: None for name in (*cache, "scales_ptr") if name not in optional}
        ptx = compile_for_hopper(kernels._rotate_kernel, ROTATE | optional, HEADS | absent)
        check_waits(ptx)
    half_rotated = HEADS | {"ROTARY": 64} | dict.fromkeys((*cache, "scales_ptr"))
    check_waits(compile_for_hopper(kernels._rotate_kernel, ROTATE, half_rotated))
    gated = HEADS | {"ZERO_CENTRED": True, "QUERY_ROWS": 2, "scales_ptr": None}
    check_waits(compile_for_hopper(kernels._rotate_kernel, ROTATE | cache, gated))
    zero_centred = norm | {"x_ptr": HALF}, norm_sizes | {"ZERO_CENTRED": True, "PARTS": 1}
    check_waits(compile_for_hopper(kernels._norm_kernel, *zero_centred, num_warps=2))
    ptx = compile_for_hopper(
        kernels._gate_kernel,
        {"output_ptr": HALF, "x_ptr": HALF, "qkv_ptr": HALF},
        {"WIDTH": 4096, "QKV_WIDTH": 10240, "HEAD_DIM": 256, "BLOCK": 1024},
    )
    check_waits(ptx)
    ptx = compile_for_hopper(
        kernels._silu_mul_kernel,
        {"output_ptr": HALF, "gate_up_ptr": HALF},
        {"WIDTH": 3072, "BLOCK": 1024},
    )
    check_waits(ptx)


def check_waits(ptx):
    """Nothing is written before the kernel ahead ends."""
    lines = ptx.splitlines()
    [wait] = [i for i, line in enumerate(lines) if "griddepcontrol.wait" in line]
    assert not any("st.global" in line for line in lines[:wait])
    assert any("st.global" in line for line in lines[wait:])


@pytest.mark.parametrize("num_rows", [1, 128, 256])
@pytest.mark.parametrize(
    ("gated", "split", "output"),
    [(False, False, HALF), (True, False, HALF), (False, True, "*fp32")],
)
def test_small_products_use_the_matrix_units_of_hopper(kernels, gated, split, output, num_rows):
    from hone.models import product_kernels

    tile = product_kernels.choose_tile(num_rows, 6144, 1024, gated=gated, split=split)
    constants = {
        "bias_ptr": None,
        "OUTPUTS": 3072,
        "INPUTS": 1024,
        "SPLITS": tile.splits,
        "GATED": gated,
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
        "PREFETCHED": 256,
        "PREFETCH_BLOCK": 256,
    }
    ptx = compile_for_hopper(
        product_kernels._product_kernel,
        {"output_ptr": output, "x_ptr": HALF, "weight_ptr": HALF},
        constants,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    assert "wgmma.mma_async" in ptx
    assert "cp.async.cg" in ptx
    assert ptx.index("prefetch.global.L2") < ptx.index("griddepcontrol.wait")
    assert ptx.index("griddepcontrol.wait") < ptx.index("cp.async.cg")
    check_waits(ptx)


KINDS_OF_PRODUCTS = [
    ({"gated": False, "split": False}, HALF),
    ({"gated": True, "split": False}, HALF),
    ({"gated": False, "split": True}, "*fp32"),
]


def compile_packed_product(capability, num_rows, kind, output, **limit):
    from hone.models.int8_kernels import _product_kernel, choose_tile

    tile = choose_tile(num_rows, 6144, 1024, **kind, **limit)
    constants = {
        "bias_ptr": None,
        "OUTPUTS": 3072,
        "INPUTS": 1024,
        "SPLITS": tile.splits,
        "GATED": kind["gated"],
        "ROWS": tile.rows,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
    }
    pointers = {"output_ptr": output, "planes_ptr": "*i8", "scales_ptr": "*fp32"}
    pointers["weight_ptr"] = "*i8"
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    return compile_for(capability, _product_kernel, pointers, constants, **options)


@pytest.mark.parametrize("num_rows", [1, 64, 256])
@pytest.mark.parametrize(("kind", "output"), KINDS_OF_PRODUCTS)
@pytest.mark.usefixtures("kernels")
def test_products_of_packed_rows_use_the_matrix_units_of_hopper(kind, output, num_rows):
    ptx = compile_packed_product(90, num_rows, kind, output).asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert ".s32.s8.s8" in ptx
    assert "cp.async.cg" in ptx
    check_waits(ptx)


@pytest.mark.parametrize(("capability", "limit"), [(80, 163), (89, 99), (90, 227)])
@pytest.mark.parametrize(("kind", "output"), KINDS_OF_PRODUCTS)
@pytest.mark.usefixtures("kernels")
def test_tiles_of_packed_rows_fit_the_memory_of_a_program(kind, output, capability, limit):
    """On A100; on A10, L40S and 4090; on Hopper."""
    for num_rows in (1, 32, 64, 128, 256):
        made = compile_packed_product(capability, num_rows, kind, output, memory=limit * 1024)
        assert made.metadata.shared <= limit * 1024, num_rows


@table("num_rows", [1, 32, 64, 256])
@table("num_inputs", [896, 3200, 4096])
@pytest.mark.usefixtures("kernels")
def test_packed_rows_of_whole_128_have_a_tile(num_rows, num_inputs):
    """Of 0.5B, and of an eighth of 32B; else each step would unpack the weight."""
    from hone.models.int8_kernels import choose_tile

    for kind, _ in KINDS_OF_PRODUCTS:
        tile = choose_tile(num_rows, 5120, num_inputs, **kind)
        assert tile is not None
        assert num_inputs % (tile.depth * tile.splits) == 0


def test_unpacking_and_splitting_compile_for_hopper(kernels):
    from hone.models import int8_kernels

    pointers = {"planes_ptr": "*i8", "scales_ptr": "*fp32", "x_ptr": HALF}
    sizes = {"WIDTH": 12288, "BLOCK": 8192}
    check_waits(compile_for_hopper(int8_kernels._split_kernel, pointers, sizes, num_warps=8))
    pointers = {"output_ptr": HALF, "weight_ptr": "*i8"}
    sizes = {"INPUTS": 3072, "BLOCK": 2048}
    check_waits(compile_for_hopper(int8_kernels._unpack_kernel, pointers, sizes, num_warps=4))


def test_expert_kernels_compile_for_hopper(kernels):
    from hone.models import expert_kernels

    route = {"ids_ptr": "*i32", "gates_ptr": "*fp32", "gate_scale": "fp32"}
    sizes = {"EXPERTS": 128, "BLOCK": 128, "PER_TOKEN": 8, "CHOICES": 8, "NORMALISES": True}
    for scores, absent in (
        ({"logits_ptr": HALF}, {"correction_ptr": None}),
        ({"logits_ptr": "*fp32", "correction_ptr": "*fp32"}, {}),
    ):
        kernel = expert_kernels._route_kernel
        check_waits(compile_for_hopper(kernel, route | scores, sizes | absent, num_warps=1))
    group = {"pairs_ptr": "*i32", "counts_ptr": "*i32", "ids_ptr": "*i32"}
    numbers = {"FIRST": 64, "BLOCK": 1024}
    check_waits(compile_for_hopper(expert_kernels._group_kernel, group, numbers))


@table("num_tokens", [1, 64, 256, 1024])
@pytest.mark.parametrize("product", ["gate_up", "down"])
@table("has_codes", [False, True])
def test_products_of_experts_use_the_matrix_units_of_hopper(
    kernels, product, num_tokens, has_codes
):
    from hone.models import expert_kernels
    from hone.models.experts import Experts
    from hone.models.int8_rows import pack_rows

    sizes = {"router": (128, 2048), "gate_up": (128, 1536, 2048), "down": (128, 2048, 768)}
    weights = {name: torch.empty(size, device="meta") for name, size in sizes.items()}
    if has_codes:
        weights |= {name: pack_rows(weights[name]) for name in ("gate_up", "down")}
    tiles = expert_kernels.choose_tiles(
        num_tokens, Experts(**weights, per_token=8, normalises=True)
    )
    tile = tiles[product == "down"]
    lists = {"pairs_ptr": "*i32", "counts_ptr": "*i32", "weight_ptr": HALF}
    if product == "gate_up":
        kernel, outputs, inputs = expert_kernels._gate_up_kernel, 768, 2048
        pointers = {"inner_ptr": HALF, "x_ptr": HALF}
    else:
        kernel, outputs, inputs = expert_kernels._down_kernel, 2048, 768
        pointers = {"parts_ptr": "*fp32", "inner_ptr": HALF, "gates_ptr": "*fp32"}
    absent = {"scales_ptr": None}
    if has_codes:
        lists["weight_ptr"] = "*i8"
        pointers |= {"x_ptr" if product == "gate_up" else "inner_ptr": "*i8", "scales_ptr": "*fp32"}
        if product == "gate_up":
            pointers["inner_ptr"] = HALF
        absent = {}
    constants = absent | {
        "OUTPUTS": outputs,
        "INPUTS": inputs,
        "PER_TOKEN": 8,
        "CODES": has_codes,
        "TOKENS": tile.rows,
        "COLUMNS": tile.columns,
        "DEPTH": tile.depth,
    }
    options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
    ptx = compile_for_hopper(kernel, pointers | lists, constants, **options)
    assert "wgmma.mma_async" in ptx
    assert (".s32.s8.s8" in ptx) == has_codes
    assert "cp.async.cg" in ptx
    check_waits(ptx)


def test_rotation_rounds_every_product_and_sum_on_hopper(kernels):
    """Contracted to `fma.rn.bf16`, a fifth of the values would differ from transformers'."""
    absent = dict.fromkeys(("q_norm_ptr", "k_norm_ptr", "cache_ptr", "slots_ptr", "scales_ptr"))
    ptx = compile_for_hopper(kernels._rotate_kernel, ROTATE, HEADS | absent)
    assert "fma.rn.bf16" not in ptx
    contracted = compile_for_hopper(
        kernels._rotate_kernel, ROTATE, HEADS | absent, enable_fp_fusion=True
    )
    assert "fma.rn.bf16" in contracted


@table(
    "rows, outputs, inputs, gated, split, tile",
    [
        (1, 4096, 1024, False, False, (64, 32, 128, 1, 4, 6)),  # Qwen3-0.6B
        (64, 1024, 2048, False, True, (64, 32, 128, 4, 4, 6)),
        (64, 6144, 1024, True, False, (64, 32, 128, 1, 4, 4)),
        (128, 1024, 3072, False, True, (64, 64, 128, 4, 4, 4)),
        (256, 1024, 3072, False, True, (128, 64, 64, 4, 8, 5)),
        (257, 1024, 3072, False, True, None),
        (64, 6144, 4096, False, False, (64, 64, 128, 1, 4, 4)),  # Qwen3-8B
        (64, 4096, 12288, False, True, (64, 64, 128, 2, 4, 4)),
        (65, 4096, 12288, False, True, None),
        (1, 1000, 1024, False, True, None),  # no tile divides its outputs,
        (1, 1024, 1000, False, True, None),  # or its inputs
        (1, 1024, 2048, False, False, None),  # few programs
        (1, 2560, 4096, False, True, None),  # 160 programs: most would wait for a few
    ],
)
def test_tiles_occupy_the_device_and_divide_the_weight(
    rows, outputs, inputs, *, gated, split, tile
):
    from hone.models.product_kernels import choose_tile

    assert choose_tile(rows, outputs, inputs, gated=gated, split=split) == tile


def test_products_that_are_not_served_are_left_to_the_caller():
    from hone.models.layer_kernels import linear, sum_linear
    from hone.models.product_kernels import small_product

    x, weight = torch.randn(3, 1024), torch.randn(4096, 1024)
    assert small_product(x, weight) is None
    expected = torch.nn.functional.linear(x, weight)
    assert torch.equal(linear(x, weight, None), expected)
    assert torch.equal(sum_linear(x, weight, None), expected)


class Recorded:
    """A kernel that notes how it is launched and returns itself as what was compiled."""

    def __init__(self):
        self.inspected, self.direct = [], []

    def __getitem__(self, grid):
        def run(*arguments, **options):
            (self.inspected if options else self.direct).append((grid, arguments))
            return self

        return run


def test_launches_are_inspected_once_for_each_kind_of_argument():
    from hone.attention.kernel_launch import launch

    kernel, x = Recorded(), torch.zeros(64)

    def run(*tensors, constants=(7,), num_warps=4, numbers=(1, 0.5)):
        launch(kernel, (2, 1, 1), tensors, numbers, constants, num_warps=num_warps)

    run(x, None)
    assert kernel.inspected == [((2, 1, 1), (x, None, 1, 0.5, 7, False))]
    run(torch.zeros(8), None, numbers=(3, 0.25))  # what changes from call to call
    assert kernel.direct[0][1][1:] == (None, 3, 0.25, 7, False)
    for arguments, options in (
        ((x, x), {}),
        ((x.half(), None), {}),
        ((x, None), {"constants": (8,)}),
        ((x, None), {"num_warps": 2}),
        ((x[1:], None), {}),  # another alignment
    ):
        before = len(kernel.inspected)
        run(*arguments, **options)
        assert len(kernel.inspected) == before + 1, (arguments, options)
    run(x[1:], None)
    assert len(kernel.inspected) == 7  # odd addresses are inspected every time
    assert len(kernel.direct) == 1
