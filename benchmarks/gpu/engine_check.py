"""The embedded engine on one GPU: parity with the packed forward, decode speed, memory, as a table.

    python -m benchmarks.gpu.engine_check --shape qwen3-0.6b

Exits with 1 when a number is outside its bound. Weights are random: parity does not need trained
ones, and bounds hold for them too.
"""

import argparse
import sys
import tempfile
from statistics import median
from time import perf_counter

import torch

from hone.attention import PackedContext
from hone.engine.engine import EmbeddedEngine
from hone.engine.settings import EngineConfig
from hone.models.decoder import head_logits, hidden_states
from hone.models.load import load_model
from hone.models.settings import ModelConfig
from hone.models.tiny import SHAPES, make_model_folder
from hone.types import Request, SamplingParams

DEVICE = "cuda"
GIB = 2**30
BANDWIDTH = 4.3e12  # bytes/s, device copy on an H200
MAX_K3, MAX_OUTSIDE = 2e-3, 0.08


def make_requests(count, *, group, num_prompt, vocab_size, **params):
    """Groups of equal random prompts."""
    draw = torch.Generator().manual_seed(0)
    prompts = torch.randint(vocab_size, (count // group, num_prompt), generator=draw).tolist()
    return [
        Request(
            id=str(i),
            prompt_ids=tuple(prompts[i // group]),
            sampling=SamplingParams(seed=i, ignore_eos=True, **params),
        )
        for i in range(count)
    ]


def finish(engine):
    done = []
    while engine.has_unfinished:
        done += engine.step()
    return {completion.request_id: completion for completion in done}


@torch.inference_mode()
def packed_logprobs(model, request, completion):
    """Log-probabilities of the completion by one packed forward, [N] float64 on the CPU."""
    tokens = torch.tensor([*request.prompt_ids, *completion.token_ids], device=DEVICE)
    context = PackedContext.from_lengths([len(tokens)], device=DEVICE)
    hidden = hidden_states(model, tokens, torch.arange(len(tokens), device=DEVICE), context)
    first = len(request.prompt_ids)
    logits = head_logits(model, hidden[first - 1 : -1]).float() / request.sampling.temperature
    labels = tokens[first:].unsqueeze(-1)
    return logits.log_softmax(-1).gather(-1, labels).squeeze(-1).double().cpu()


def agreement(gaps):
    """k3 estimate of KL(engine || trainer), share of ratios outside [0.9, 1.1], mean ratio, from
    log p_trainer - log p_engine of sampled tokens."""
    ratios = gaps.exp()
    outside = ((ratios < 0.9) | (ratios > 1.1)).double().mean().item()
    return (ratios - 1 - gaps).mean().item(), outside, ratios.mean().item()


def parity(model, engine, *, temperature):
    """Mean k3 estimate of KL(engine || trainer) and share of ratios outside [0.9, 1.1]."""
    requests = make_requests(
        64,
        group=8,
        num_prompt=200,
        vocab_size=model.config.vocab_size,
        max_tokens=256,
        temperature=temperature,
    )
    engine.submit(requests)
    done = finish(engine)
    gaps = torch.cat(
        [
            packed_logprobs(model, request, done[request.id])
            - torch.tensor(done[request.id].logprobs, dtype=torch.float64)
            for request in requests
        ]
    )
    k3, outside, _ = agreement(gaps)
    cached = sum(completion.num_cached_tokens for completion in done.values())
    return k3, outside, cached


def decode_speed(model, engine, *, batch, context, num_steps):
    """Prefill tokens/s, and the median decode step in seconds around `context` tokens."""
    num_prompt = context - num_steps // 2
    requests = make_requests(
        batch,
        group=1,
        num_prompt=num_prompt,
        vocab_size=model.config.vocab_size,
        max_tokens=num_steps,
    )
    engine.submit(requests)
    started_s = perf_counter()
    while engine.stats().num_waiting:
        engine.step()
    prefill_s = perf_counter() - started_s
    times_s = []
    while engine.has_unfinished:
        started_s = perf_counter()
        finished = engine.step()
        times_s.append(perf_counter() - started_s)
        if finished:
            break
    engine.abort([request.id for request in requests])
    return batch * num_prompt / prefill_s, median(times_s[5:])


def ideal_step_s(model, *, batch, context):
    """Time to read the weights and the keys and values of a decode step once."""
    config = model.config
    per_token = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim * 2
    weights = sum(parameter.nbytes for parameter in model.parameters())
    return (weights + batch * context * per_token) / BANDWIDTH


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="qwen3-0.6b", choices=SHAPES)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--num-steps", type=int, default=64)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_model_folder(folder, args.shape)
        model = load_model(ModelConfig(path=folder, init="random"), device=DEVICE, seed=0)
    started_s = perf_counter()
    cfg = EngineConfig(max_num_seqs=args.batch, gpu_memory_utilization=0.5)
    engine = EmbeddedEngine(model, cfg, eos_token_ids=(), max_model_len=2048)
    rows = [("engine start, s", f"{perf_counter() - started_s:.2f}", "")]

    failed = False
    for temperature in (1.0, 0.7):
        k3, outside, cached = parity(model, engine, temperature=temperature)
        failed |= k3 > MAX_K3 or outside > MAX_OUTSIDE
        rows += [
            (f"mean k3 KL, T={temperature}", f"{k3:.2e}", f"<= {MAX_K3:.0e}"),
            (f"ratios outside [0.9, 1.1], T={temperature}", f"{outside:.2%}", f"<= {MAX_OUTSIDE}"),
            (f"cached prompt tokens of 12800, T={temperature}", f"{cached}", ""),
        ]
    prefill, step_s = decode_speed(
        model, engine, batch=args.batch, context=args.context, num_steps=args.num_steps
    )
    ideal_s = ideal_step_s(model, batch=args.batch, context=args.context)
    before = torch.cuda.mem_get_info()[0]
    started_s = perf_counter()
    engine.sleep()
    sleep_s = perf_counter() - started_s
    freed = torch.cuda.mem_get_info()[0] - before
    started_s = perf_counter()
    engine.wake()
    wake_s = perf_counter() - started_s
    rows += [
        ("prefill, tokens/s", f"{prefill:,.0f}", ""),
        (f"decode step, B={args.batch}, context {args.context}, ms", f"{step_s * 1e3:.2f}", ""),
        ("decode, tokens/s", f"{args.batch / step_s:,.0f}", ""),
        ("share of the bandwidth limit", f"{ideal_s / step_s:.0%}", ""),
        ("freed by sleep, GiB", f"{freed / GIB:.1f}", ""),
        ("sleep, ms", f"{sleep_s * 1e3:.1f}", ""),
        ("wake, ms", f"{wake_s * 1e3:.1f}", ""),
    ]
    device = torch.cuda.get_device_name()
    sys.stdout.write(f"{args.shape} bf16 random weights, {device}, torch {torch.__version__}\n")
    for name, value, bound in rows:
        sys.stdout.write(f"| {name:46} | {value:>12} | {bound:8} |\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
