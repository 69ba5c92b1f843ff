"""Speed and memory of training on a GPU: `python -m benchmarks.gpu.trainer_check [shape] [tokens]`.

A randomly initialised Qwen3 in bfloat16 takes forward and backward passes over packed sequences of
1,024 tokens, with recomputation and compilation on and off. Prints one JSON object a line:
milliseconds and tokens/s of a pass, share of the arithmetic limit, peak memory, and first of all
the head alone: its chunked log-probs against whole logits, and what they hold at the peak.
"""

from __future__ import annotations

import gc
import json
import sys
import time
from typing import Any

import torch
from benchmarks.gpu.models import build
from benchmarks.gpu.timing import wall_ms
from transformers import PreTrainedModel

from hone.algorithms.objective import PolicyObjective
from hone.algorithms.settings import AlgorithmConfig
from hone.models.decoder import head_weight
from hone.trainer.logprobs import token_logprobs
from hone.trainer.settings import TrainerConfig
from hone.trainer.trainer import Trainer
from hone.types import Column, Row

LENGTH, PROMPT = 1024, 128
PEAK_FLOPS = 790e12
GIB = 1 << 30


def report(**values: Any) -> None:
    sys.stdout.write(
        json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in values.items()})
        + "\n"
    )
    sys.stdout.flush()


def rows(num_tokens: int, vocab: int) -> list[Row]:
    generator = torch.Generator().manual_seed(0)
    num_trained = LENGTH - PROMPT
    return [
        Row(
            id=f"r{i}",
            group_id=f"g{i // 8}",
            token_ids=torch.randint(vocab, (LENGTH,), generator=generator).tolist(),
            loss_mask=[False] * PROMPT + [True] * num_trained,
            columns={
                "logprobs/engine": Column(torch.full((num_trained,), -11.9)),
                "advantages": Column(
                    torch.randn(1, generator=generator).expand(num_trained).clone()
                ),
            },
        )
        for i in range(num_tokens // LENGTH)
    ]


def check_head(model: PreTrainedModel, chunk: int, *, entropy: bool = False) -> None:
    """Values against whole float32 logits, and memory above the inputs and their gradients."""
    num_tokens, width = 8192, model.config.hidden_size
    generator = torch.Generator("cuda").manual_seed(0)
    hidden = torch.randn(num_tokens, width, generator=generator, device="cuda").bfloat16()
    hidden.requires_grad_()
    labels = torch.randint(model.config.vocab_size, (num_tokens,), device="cuda")
    weight = head_weight(model)
    factor = 0.1 if entropy else 0.0

    def step() -> torch.Tensor:
        logprobs, entropies = token_logprobs(
            model,
            hidden,
            labels,
            temperature=1.0,
            chunk_tokens=chunk,
            with_entropy=True,
        )
        assert entropies is not None
        loss = logprobs.sum() + factor * entropies.sum() if factor else logprobs.sum()
        torch.autograd.grad(loss, [hidden, weight])
        return logprobs.detach()

    logprobs = step()
    with torch.no_grad():
        logits = hidden[:1024].float() @ weight.float().T
        exact = torch.log_softmax(logits, -1).gather(-1, labels[:1024, None]).squeeze(-1)
    error = float((logprobs[:1024] - exact).abs().max())
    assert error < 1e-4, f"{error=}"
    del logits
    torch.cuda.reset_peak_memory_stats()
    base = torch.cuda.memory_allocated()
    milliseconds = wall_ms(step, 5)
    peak = torch.cuda.max_memory_allocated() - base
    report(
        what="head",
        chunk=chunk,
        entropy_gradient=entropy,
        ms_per_8192_tokens=milliseconds,
        peak_gib=peak / GIB,
        float32_logits_of_a_chunk_gib=chunk * model.config.vocab_size * 4 / GIB,
        float32_head_gradient_gib=weight.numel() * 4 / GIB,
        whole_logits_gib=num_tokens * model.config.vocab_size * 4 / GIB,
        max_error=error,
    )


def check_update(shape: str, num_tokens: int, **settings: bool) -> dict[str, torch.Tensor]:
    model = build(shape)
    config = TrainerConfig.model_validate({"max_tokens_per_microbatch": num_tokens, **settings})
    trainer = Trainer(
        model,
        config,
        PolicyObjective(AlgorithmConfig(), max_completion_tokens=LENGTH),
        total_steps=100,
    )
    batch = rows(num_tokens, model.config.vocab_size)
    start = time.perf_counter()
    trainer.forward_backward(batch)
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    names = (
        "model.layers.0.self_attn.q_proj.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
    )
    gradients = {n: trainer.policy.gradients[n].clone().cpu() for n in names}

    def passes() -> None:
        trainer.policy.drop_gradient()
        trainer.forward_backward(batch)

    torch.cuda.reset_peak_memory_stats()
    milliseconds = wall_ms(passes, 5)
    peak = torch.cuda.max_memory_allocated()
    trainer.policy.drop_gradient()
    update = wall_ms(lambda: trainer.update(batch), 3)
    forward = wall_ms(lambda: trainer.logprobs(batch), 3)
    parameters = sum(p.numel() for p in model.parameters())
    attention = 2 * model.config.num_hidden_layers * model.config.num_attention_heads * 128 * LENGTH
    flops = 3 * num_tokens * (2 * parameters + attention)
    report(
        what="update",
        shape=shape,
        tokens=num_tokens,
        **settings,
        forward_backward_ms=milliseconds,
        tokens_per_s=num_tokens / milliseconds * 1e3,
        share_of_peak_flops=flops / (milliseconds * 1e-3) / PEAK_FLOPS,
        peak_gib=peak / GIB,
        whole_update_ms=update,
        logprobs_ms=forward,
        first_pass_s=first,
    )
    return gradients


def main() -> None:
    shape = sys.argv[1] if len(sys.argv) > 1 else "qwen3-0.6b"
    num_tokens = int(sys.argv[2]) if len(sys.argv) > 2 else 32768
    report(what="device", name=torch.cuda.get_device_name(), torch=torch.__version__)
    model = build(shape)
    for chunk in (512, 1024, 2048, 4096):
        check_head(model, chunk)
    check_head(model, 1024, entropy=True)
    del model
    expected: dict[str, torch.Tensor] = {}
    for settings in (
        {"recompute": "off", "compile": False},
        {"recompute": "full", "compile": False},
        {"recompute": "off", "compile": True},
        {"recompute": "full", "compile": True},
    ):
        gc.collect()
        torch.cuda.empty_cache()
        gradients = check_update(shape, num_tokens, **settings)
        expected = expected or gradients
        for name, want in expected.items():
            difference = float((gradients[name] - want).norm() / want.norm())
            report(what="gradient", name=name, **settings, relative_difference=difference)
            assert difference < 0.05, f"{name}: {difference}"


if __name__ == "__main__":
    main()
