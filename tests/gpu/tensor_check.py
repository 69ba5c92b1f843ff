"""Tensor parallelism on GPUs: `torchrun --nproc-per-node 2 -m tests.gpu.tensor_check [shape]`.

A few layers of a Qwen3, split over all ranks and whole on each: values and gradients of packed rows
against the whole model, in float32 where rounding would hide errors, with layers
compiled and not; then milliseconds of forward and backward. Prints one table; half a minute.
"""

from __future__ import annotations

import copy
import os
import sys
import time
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hone.attention import ATTENTION_NAME, PackedContext
from hone.distributed.mesh import Axis, Mesh, MeshSizes
from hone.models.decoder import hidden_states
from hone.models.tiny import SHAPES
from hone.trainer.logprobs import token_logprobs
from hone.trainer.tensor import parallelize

NUM_LAYERS, LENGTH = 4, 1024
TOLERANCES = {torch.float32: (2e-4, 2e-3), torch.bfloat16: (0.3, 0.08)}
"""Largest difference of a log-probability, relative difference of a parameter's gradient."""


def build(shape: str, dtype: torch.dtype) -> PreTrainedModel:
    fields = dict(SHAPES[shape]) | {"num_hidden_layers": NUM_LAYERS}
    fields["num_attention_heads"] = fields.pop("num_heads")
    fields["num_key_value_heads"] = fields.pop("num_kv_heads")
    del fields["num_layers"]
    config = AutoConfig.for_model(fields.pop("family"), **fields)
    torch.manual_seed(0)
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(
            config, dtype=dtype, attn_implementation=ATTENTION_NAME
        ).eval()


def run(model: PreTrainedModel, num_tokens: int, ranks: Axis | None) -> Tensor:
    """Forward and backward of packed rows, the last of which may be short."""
    draw = torch.Generator().manual_seed(num_tokens)
    ids, labels = torch.randint(model.config.vocab_size, (2, num_tokens), generator=draw).cuda()
    lengths = [LENGTH] * (num_tokens // LENGTH)
    lengths += [num_tokens % LENGTH] if num_tokens % LENGTH else []
    borders = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    context = PackedContext(cu_seqlens=borders, max_seqlen=max(lengths), lengths=tuple(lengths))
    positions = torch.cat([torch.arange(n) for n in lengths]).cuda()
    logprobs, entropy = token_logprobs(
        model,
        hidden_states(model, ids, positions, context),
        labels,
        temperature=1.0,
        chunk_tokens=1024,
        with_entropy=True,
        tensor=ranks,
    )
    assert entropy is not None
    model.zero_grad()
    (logprobs + 0.1 * entropy).sum().backward()
    return logprobs.detach()


def gradient_error(split: PreTrainedModel, whole: PreTrainedModel) -> float:
    errors: list[float] = []
    for (name, ours), (_, theirs) in zip(
        split.named_parameters(), whole.named_parameters(), strict=True
    ):
        assert isinstance(ours.grad, DTensor), name
        assert theirs.grad is not None, name
        difference = ours.grad.full_tensor().float() - theirs.grad.float()
        errors.append(float(difference.norm() / theirs.grad.float().norm()))
    return max(errors)


def milliseconds(model: PreTrainedModel, num_tokens: int, ranks: Axis | None) -> float:
    times: list[float] = []
    for _ in range(6):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run(model, num_tokens, ranks)
        torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - start))
    return sorted(times)[len(times) // 2]


def main() -> None:
    shape = sys.argv[1] if len(sys.argv) > 1 else "qwen3-1.7b"
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    device = torch.device("cuda", torch.cuda.current_device())
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    size = dist.get_world_size()
    mesh = Mesh.of_group(MeshSizes(tensor=size), device, timeout=timedelta(seconds=120))
    lines: list[str] = []
    for dtype, compiled in (
        (torch.float32, False),
        (torch.bfloat16, False),
        (torch.bfloat16, True),
    ):
        whole = build(shape, dtype)
        split = copy.deepcopy(whole)
        parallelize(split, mesh)
        for model in (whole, split) if compiled else ():
            for layer in model.base_model.layers:
                layer.compile(dynamic=True)
        limits = TOLERANCES[dtype]
        for num_tokens in (2 * LENGTH + 37, 3 * LENGTH + 1, 2 * LENGTH):
            expected, found = run(whole, num_tokens, None), run(split, num_tokens, mesh.tensor)
            errors = float((found - expected).abs().max()), gradient_error(split, whole)
            lines.append(
                f"{str(dtype)[6:]:>9} compiled={compiled!s:>5} {num_tokens:5d} tokens: "
                f"log-prob {errors[0]:.2e} gradient {errors[1]:.2e}"
            )
            is_fine = errors[0] < limits[0] and errors[1] < limits[1]
            lines[-1] += "" if is_fine else "  TOO MUCH"
        if dtype == torch.bfloat16:
            alone = milliseconds(whole, 8 * LENGTH, None)
            shared = milliseconds(split, 8 * LENGTH, mesh.tensor)
            lines.append(
                f"          compiled={compiled!s:>5} {8 * LENGTH} tokens: one GPU {alone:.1f} ms, "
                f"{size} GPUs {shared:.1f} ms, speed-up {alone / shared:.2f}"
            )
        del whole, split
    if mesh.is_first:
        sys.stdout.write("\n".join(lines) + "\n")
        sys.stdout.flush()
    dist.destroy_process_group()
    sys.exit(any("TOO MUCH" in line for line in lines))


if __name__ == "__main__":
    main()
