"""How far engine and trainer are from float32, and so from each other, by the depth of a model.

    python -m benchmarks.gpu.mismatch_check [SHAPE ...] [--layers 8 32] [--seconds N]

The engine samples from random weights in bfloat16. The log-probabilities of these tokens are
computed again by the trainer's packed forward and by transformers' own layers, both in bfloat16,
and in float32 by the packed forward without other packages. An error is the root of the mean square
of the difference from float32; recurrent layers of the trainer also run in plain torch. Where
engine and trainer differ by a fault, one of them is further from float32 than transformers is.
"""

from __future__ import annotations

import sys
from argparse import ArgumentParser
from collections.abc import Callable
from functools import partial

import torch
from benchmarks.gpu.engine_check import DEVICE, agreement, finish, make_requests, packed_logprobs
from benchmarks.gpu.hybrid_check import plain_torch
from benchmarks.gpu.models import build
from benchmarks.gpu.sections import Run, release
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from hone.engine.engine import EmbeddedEngine
from hone.engine.settings import EngineConfig
from hone.models.contents import follow_inputs
from hone.types import Completion, Request

SHAPES = ("qwen3.5-9b", "qwen3-8b", "qwen3.5-0.8b", "qwen3-0.6b")
MOST = 1.3
"""Largest error of engine or trainer, over that of transformers in the same format."""
Samples = list[tuple[Request, Completion]]


def add_flags(parser: ArgumentParser) -> None:
    parser.add_argument("--layers", type=int, nargs="+", default=[8, 32])


def sample(model: PreTrainedModel) -> Samples:
    requests = make_requests(
        16,
        group=4,
        num_prompt=200,
        vocab_size=model.config.vocab_size,
        max_tokens=256,
        temperature=1.0,
    )
    cfg = EngineConfig(max_num_seqs=16, kv_cache_gib=4.0)
    engine = EmbeddedEngine(model, cfg, eos_token_ids=(), max_model_len=512)
    engine.submit(requests)
    done = finish(engine)
    return [(request, done[request.id]) for request in requests]


def packed(model: PreTrainedModel, samples: Samples) -> Tensor:
    return torch.cat([packed_logprobs(model, *pair) for pair in samples])


@torch.inference_mode()
def whole(model: PreTrainedModel, samples: Samples) -> Tensor:
    """Log-probabilities of the sampled tokens by transformers alone."""
    found: list[Tensor] = []
    for request, completion in samples:
        ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]], device=DEVICE)
        first = len(request.prompt_ids)
        logits = model(input_ids=ids, use_cache=False).logits[0, first - 1 : -1].float()
        labels = ids[0, first:].unsqueeze(-1)
        found.append(logits.log_softmax(-1).gather(-1, labels).squeeze(-1).double().cpu())
    return torch.cat(found)


def transformers_own(model: PreTrainedModel) -> PreTrainedModel:
    """A model with the same weights and none of our layers or kernels."""
    config = AutoConfig.for_model(**(model.config.to_dict()))
    with torch.device(DEVICE):
        own = AutoModelForCausalLM.from_config(
            config, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
    own.load_state_dict(model.state_dict())
    return own.eval()


def check(run: Run, shape: str) -> None:
    run.row(shape, "layers", "engine", "trainer", "plain torch", "transformers", "k3", "outside")
    for num_layers in run.args.layers:
        if not run.has_time(f"{shape}, {num_layers} layers"):
            return
        with run.attempt(f"{shape}, {num_layers} layers"):
            compare(run, shape, num_layers)
        release()


def compare(run: Run, shape: str, num_layers: int) -> None:
    model = build(shape, num_layers=num_layers)
    follow_inputs(model)
    samples = sample(model)
    found = {
        "engine": torch.tensor(
            [value for _, done in samples for value in done.logprobs], dtype=torch.float64
        ),
        "trainer": packed(model, samples),
    }
    with plain_torch():
        found["plain torch"] = packed(model, samples)
    own = transformers_own(model)
    found["transformers"] = whole(own, samples)
    del own
    release()
    with plain_torch():
        exact = packed(model.float(), samples)
    errors = {name: rms(values - exact) for name, values in found.items()}
    k3, outside, _ = agreement(found["trainer"] - found["engine"])
    good = max(errors["engine"], errors["trainer"]) <= MOST * errors["transformers"]
    cells = [f"{value:.4f}" for value in errors.values()]
    run.row(f"  of {len(exact)} tokens", num_layers, *cells, f"{k3:.2e}", f"{outside:.1%}")
    run.check(f"{shape}, {num_layers} layers: as far from float32 as transformers", good)


def rms(values: Tensor) -> float:
    return values.square().mean().sqrt().item()


def main() -> None:
    run = Run(__doc__, SHAPES, seconds=240, add_flags=add_flags)
    work: dict[str, Callable[[], object]] = {shape: partial(check, run, shape) for shape in SHAPES}
    sys.exit(run.go(work))


if __name__ == "__main__":
    main()
