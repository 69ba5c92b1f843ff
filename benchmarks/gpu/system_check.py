"""Checks on one GPU that need trainer and engine together.

    python -m benchmarks.gpu.system_check [SECTION ...] [--shape qwen3-0.6b] [--seconds N]

Sections; the last two run on a GPU only, the others on a CPU as well (`--shape tiny`):

    sync      weights into a copied and into an aliasing engine
    gate      the launch gate with and without decode graphs
    versions  the KV cache across a change of weights
    sleep     memory and tokens across sleep and wake
    logprobs  memory of log-probabilities over the full vocabulary

Weights are random.
"""

from __future__ import annotations

import argparse
import copy
import gc
import sys
import tempfile
from collections.abc import Callable
from functools import partial

import torch
from benchmarks.gpu.sections import Run

from hone.algorithms.objective import PolicyObjective
from hone.algorithms.settings import AlgorithmConfig
from hone.engine.engine import EmbeddedEngine
from hone.engine.settings import EngineConfig
from hone.errors import UserError
from hone.models.decoder import alias_module, head_weight
from hone.models.load import load_model
from hone.models.manifest import build_manifest
from hone.models.settings import ModelConfig
from hone.models.tiny import SHAPES, make_model_folder, make_tiny_model
from hone.trainer.logprobs import token_logprobs
from hone.trainer.policy import StaleWeightsError
from hone.trainer.settings import TrainerConfig
from hone.trainer.trainer import Trainer
from hone.types import Column, Request, Row, SamplingParams
from hone.weights.parity import check_parity, measure_parity
from hone.weights.sync import WeightSync

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ON_GPU = DEVICE.type == "cuda"
GIB = 2**30
MAX_LEN = 512


Report = Callable[[str, object, str, bool], None]
"""Takes the name of a row, what was found, its bound and whether that holds."""


def build(shape: str):
    with tempfile.TemporaryDirectory() as folder:
        if shape == "tiny":
            make_tiny_model(folder, weights=False)
        else:
            make_model_folder(folder, shape)
        return load_model(ModelConfig(path=folder, init="random"), device=DEVICE, seed=0)


def make_trainer(model, *, temperature=1.0, **settings) -> Trainer:
    return Trainer(
        model,
        TrainerConfig(**settings),
        PolicyObjective(AlgorithmConfig(), max_completion_tokens=MAX_LEN),
        temperature=temperature,
        total_steps=10,
    )


def make_engine(module, **settings) -> EmbeddedEngine:
    cfg = {"max_num_seqs": 64, "kv_cache_gib": 4 if ON_GPU else 0.1}
    return EmbeddedEngine(
        module, EngineConfig(**cfg | settings), eos_token_ids=(), max_model_len=MAX_LEN
    )


def requests(
    count: int, *, group: int = 8, num_prompt: int = 100, max_tokens: int = 64, spread=0, tag=""
):
    """Groups of equal prompts. Completions end together, or in four waves `spread` tokens apart."""
    draw = torch.Generator().manual_seed(1)
    prompts = torch.randint(90, (count // group + 1, num_prompt), generator=draw).tolist()
    return [
        Request(
            id=f"{tag}{i}",
            prompt_ids=tuple(prompts[i // group]),
            sampling=SamplingParams(seed=i, max_tokens=max_tokens - i % 4 * spread),
        )
        for i in range(count)
    ]


def finish(engine):
    done = []
    while engine.has_unfinished:
        done += engine.step()
    return {completion.request_id: completion for completion in done}


def rollout(engine, count: int, **options) -> list[Row]:
    asked = requests(count, **options)
    engine.submit(asked)
    done = finish(engine)
    return [
        Row(
            id=request.id,
            token_ids=[*request.prompt_ids, *done[request.id].token_ids],
            loss_mask=[False] * len(request.prompt_ids) + [True] * len(done[request.id].token_ids),
            columns={
                "logprobs/engine": Column(torch.tensor(done[request.id].logprobs)),
                "staleness": Column(
                    torch.zeros(len(done[request.id].token_ids), dtype=torch.int32)
                ),
            },
        )
        for request in asked
    ]


def tokens(rows: list[Row]) -> list[list[int]]:
    return [row.token_ids for row in rows]


@torch.no_grad()
def masters_follow(trainer) -> None:
    """Masters of the weights as they are now; a float32 model is its own masters."""
    if ON_GPU:
        trainer.policy.load_masters(
            {name: p.detach().float() for name, p in trainer.policy.parameters.items()}
        )


@torch.no_grad()
def disturb(module, scale: float = 0.05) -> None:
    """A strong change of every weight, in place."""
    for parameter in module.parameters():
        parameter.add_(torch.randn_like(parameter), alpha=scale)


def num_different(trainer, engine) -> int:
    wanted = dict(trainer.named_weights())
    return sum(not torch.equal(wanted[name], held) for name, held in engine.named_weights())


def check_sync(report: Report, model) -> None:
    copied = make_engine(copy.deepcopy(model))  # before the trainer puts hooks on the parameters
    trainer = make_trainer(model)
    sync = WeightSync(trainer, copied)
    for attempt, sleeps in enumerate((False, False, True), start=1):
        disturb(copied.model, 1.0)
        if sleeps:
            copied.sleep()
            copied.wake()
        before = num_different(trainer, copied)
        done = sync.push(attempt)
        after = num_different(trainer, copied)
        name = f"R3 copied engine, sync {attempt}" + (" after sleep" if sleeps else "")
        total = len(dict(trainer.named_weights()))
        value = f"{before} -> {after} of {total} tensors differ"
        report(name, value, "all -> 0", before == total and after == 0)
    report("R3 a sync that moves every byte, s", f"{done.seconds:.4f}", "", done.bytes > 0)

    copied.begin_sync()
    victim = list(copied.model.parameters())[7]
    victim.data.view(-1)[3] += 1
    try:
        copied.finish_sync(build_manifest(trainer.named_weights(), 9))
        refused = "accepted"
    except RuntimeError as error:
        refused = "refused" if "1 different" in str(error) else str(error)
    report("R3 one element of the engine is wrong", refused, "refused", refused == "refused")

    aliased = make_engine(alias_module(model))
    disturb(model, 0.01)
    sync = WeightSync(trainer, aliased)
    if ON_GPU:  # a float32 model is its own masters
        try:
            sync.push(1)
            refused = "accepted"
        except StaleWeightsError:
            refused = "refused"
        report("R3 weights that masters do not round to", refused, "refused", refused == "refused")
    masters_follow(trainer)
    done = sync.push(1)
    passed = done.bytes == 0 and num_different(trainer, aliased) == 0
    report("R3 aliased engine, bytes moved", done.bytes, "0", passed)
    report("R3 proof of an aliased sync, s", f"{done.seconds:.4f}", "", True)


def check_gate(report: Report, model) -> None:
    trainer = make_trainer(model)
    dtype = "bfloat16" if ON_GPU else "float32"
    kinds = {"graphs": {}, "no graphs": {"enforce_eager": True}}
    drawn = {}
    # 128 sequences fill a recorded size. 37 are padded, and pass through smaller sizes as they end.
    for name, settings in kinds.items():
        engine = make_engine(
            alias_module(model), max_num_seqs=128, kv_cache_gib=8 if ON_GPU else 0.1, **settings
        )
        for count, spread in ((128, 0), (37, 20)):
            rows = drawn[name, count] = rollout(engine, count, max_tokens=256, spread=spread)
            found = measure_parity(rows, trainer)
            value = f"{found.kl:.1e}, {found.share_outside:.1%} outside"
            good = found.kl <= (2e-3 if ON_GPU else 1e-6) and found.share_outside <= 0.08
            report(f"R4 k3 KL, {name}, {count} sequences", value, "2.0e-03, 8%", good)
    check_parity(drawn["graphs", 128], trainer, "auto", dtype=dtype)
    wrong = make_trainer(model, temperature=0.5)
    try:
        check_parity(drawn["graphs", 128], wrong, "auto", dtype=dtype)
        verdict = "passed"
    except UserError:
        verdict = "stopped"
    report("R4 gate on a wrong temperature", verdict, "stopped", verdict == "stopped")


def check_weight_versions(report: Report, model) -> None:
    """No key or value of older weights is read after a sync."""
    trainer = make_trainer(model)
    engine = make_engine(alias_module(model))
    sync = WeightSync(trainer, engine)
    sync.push(1)
    old = rollout(engine, 8)
    engine.submit(requests(8, tag="again"))
    cached = max(c.num_cached_tokens for c in finish(engine).values())
    report("R9 cached prompt tokens under the same weights", cached, "> 0", cached > 0)
    engine.submit(requests(8, tag="flight"))
    for _ in range(10):
        engine.step()
    disturb(model)
    masters_follow(trainer)
    sync.push(2)
    versions = {tuple(c.weight_versions) for c in finish(engine).values()}
    mixed = versions == {(1,) * 10 + (2,) * 54}
    report("R9 versions of tokens in flight", "1 x 10, 2 x 54" if mixed else versions, "", mixed)
    asked = requests(8, group=1, tag="new")
    engine.submit(asked)
    warm = finish(engine)
    first = max(c.num_cached_tokens for c in warm.values())
    report("R9 cached tokens of first new prompts", first, "0", first == 0)
    cold_engine = make_engine(alias_module(model))
    cold_engine.submit(asked)
    cold = finish(cold_engine)
    same = all(warm[r.id].token_ids == cold[r.id].token_ids for r in asked)
    same &= all(warm[r.id].logprobs == cold[r.id].logprobs for r in asked)
    report("R9 equals a cold engine, bit by bit", same, "True", same)
    changed = tokens(old)[0][100:] != warm["new0"].token_ids
    report("R9 the change of weights changes tokens", changed, "True", changed)


def check_sleep(report: Report, model) -> None:
    engine = make_engine(alias_module(model))
    before = tokens(rollout(engine, 16))
    gc.collect()
    torch.cuda.empty_cache()
    held = torch.cuda.mem_get_info()[0]
    engine.sleep()
    freed = (torch.cuda.mem_get_info()[0] - held) / GIB
    torch.cuda.empty_cache()  # as training in between does, and recording a graph
    engine.wake()
    again = tokens(rollout(engine, 16))
    torch.cuda.empty_cache()
    back = torch.cuda.mem_get_info()[0]
    report("sleep frees, GiB of 4 GiB", f"{freed:.2f}", ">= 3.99", freed >= 3.99)
    difference = abs(back - held) / 2**20
    report("memory after waking, MiB of difference", f"{difference:.1f}", "<= 64", difference <= 64)
    report("same tokens after waking", before == again, "True", before == again)


def check_logprob_memory(report: Report, model) -> None:
    """Peak above the inputs, the result and the gradients, by number of tokens."""
    weight = head_weight(model)
    vocab, width, chunk = *weight.shape, 1024
    chunk_gib = chunk * vocab * 4 / GIB
    peaks = []
    for num_tokens in (4096, 16384, 65536):
        hidden = torch.randn(
            num_tokens, width, device=DEVICE, dtype=model.dtype, requires_grad=True
        )
        labels = torch.randint(vocab, (num_tokens,), device=DEVICE)
        torch.cuda.reset_peak_memory_stats()
        base = torch.cuda.memory_allocated()
        logprobs, _ = token_logprobs(
            model, hidden, labels, temperature=1.0, chunk_tokens=chunk, with_entropy=True
        )
        grads = torch.autograd.grad(logprobs.sum(), [hidden, weight])
        own = hidden.nbytes + weight.numel() * 4  # gradients
        peaks.append((torch.cuda.max_memory_allocated() - base - own) / GIB)
        whole = num_tokens * vocab * 4 / GIB
        value = f"{peaks[-1]:.2f} GiB (whole logits {whole:.1f})"
        bound = 4 * chunk_gib + weight.numel() * 2 / GIB
        name = f"R15 log-probs of {num_tokens} tokens, peak"
        report(name, value, f"<= {bound:.2f} GiB", peaks[-1] <= bound)
        if num_tokens == 4096:
            with torch.no_grad():
                logits = (hidden.float() @ weight.float().T).log_softmax(-1)
                error = (logits.gather(-1, labels[:, None])[:, 0] - logprobs).abs().max().item()
            report("R15 chunked against whole", f"{error:.1e}", "<= 1e-4", error <= 1e-4)
            del logits
        del hidden, labels, logprobs, grads
    growth = peaks[-1] - peaks[0]
    report("R15 growth from 4k to 64k tokens, GiB", f"{growth:.3f}", "<= 0.05", growth <= 0.05)


CHECKS = {
    "sync": check_sync,
    "gate": check_gate,
    "versions": check_weight_versions,
    "sleep": check_sleep,
    "logprobs": check_logprob_memory,
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shape", default="qwen3-0.6b", choices=["tiny", *SHAPES])


def main() -> None:
    run = Run(__doc__, tuple(CHECKS), seconds=240, add_flags=add_flags)
    shape = run.args.shape
    device = torch.cuda.get_device_name() if ON_GPU else "CPU"
    run.row(f"{shape}, random weights, {device}, torch {torch.__version__}")

    def report(name: str, value: object, bound: str, passed: bool) -> None:
        run.check(name, passed, f"{value!s:44}", f"{bound:14}")

    def on_new_model(check: Callable[..., None]) -> None:
        check(report, build(shape))

    served = CHECKS if ON_GPU else dict(list(CHECKS.items())[:3])
    sys.exit(run.go({name: partial(on_new_model, check) for name, check in served.items()}))


if __name__ == "__main__":
    main()
