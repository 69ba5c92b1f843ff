"""Memory that really ends on one GPU, and what is computed all the same.

    python -m benchmarks.gpu.out_of_memory_check [SECTION ...] [--seconds N]

Sections; the allocator is given less than the work wants, so that the errors are CUDA's own:

    trainer  a step that is computed again in shorter passes: its gradient beside that of a trainer
             which has had this cap from the start
    engine   a step of prompts that is computed again in smaller ones: its tokens beside those of an
             engine with memory enough
    run      `hone rl` to its end with a cap that does not fit
    pair     `hone rl --nproc 2` on two GPUs, of which the second has less memory left; named alone,
             since it wants both

Weights are random, of the shape of Qwen3-0.6B.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import torch
from benchmarks.gpu.models import build
from benchmarks.gpu.sections import Run, release
from benchmarks.gpu.trainer_check import LENGTH, rows

from hone.algorithms.objective import PolicyObjective
from hone.algorithms.settings import AlgorithmConfig
from hone.cli.main import main
from hone.data.arithmetic import write_jsonl
from hone.engine.engine import EmbeddedEngine
from hone.engine.settings import EngineConfig
from hone.models.tiny import make_model_folder
from hone.trainer.settings import TrainerConfig
from hone.trainer.trainer import Trainer
from hone.types import Request, SamplingParams

SHAPE = "qwen3-0.6b"
GIB = 1 << 30
TOKENS = 65_536
PROMPT, COUNT = 1024, 64
REWARD = "def reward(completion, **kwargs):\n    return float(len(completion) % 7)\n"


@contextmanager
def at_most(num_bytes: int) -> Generator[None]:
    """The allocator of this process fails beyond so many."""
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.set_per_process_memory_fraction(num_bytes / total)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def make_trainer(max_tokens: int) -> Trainer:
    return Trainer(
        build(SHAPE),
        TrainerConfig(max_tokens_per_microbatch=max_tokens),
        PolicyObjective(AlgorithmConfig(), max_completion_tokens=LENGTH),
        total_steps=10,
        on_exhausted=lambda: "",
    )


def gradient(trainer: Trainer) -> dict[str, torch.Tensor]:
    trainer.policy.drop_gradient()
    trainer.forward_backward(rows(TOKENS, trainer.model.module.config.vocab_size))
    return {name: value.float().cpu() for name, value in trainer.policy.gradients.items()}


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Norm of the difference, of the norm."""
    square = sum(float((a[name] - b[name]).square().sum()) for name in a)
    return (square / sum(float(value.square().sum()) for value in b.values())) ** 0.5


def trainer() -> None:
    tight = make_trainer(TOKENS)
    with at_most(30 * GIB):
        repaired = gradient(tight)
    cap, replays = tight.batcher.oom_caps.get("backward", TOKENS), tight.repair.num_failures
    del tight
    release()
    roomy = make_trainer(cap)
    wanted, again = gradient(roomy), gradient(roomy)
    del roomy
    noise, found = distance(again, wanted), distance(repaired, wanted)
    run.check("trainer: memory ended", replays > 0 and cap < TOKENS, f"{replays} times", cap)
    good = found <= max(2 * noise, 1e-6)
    run.check("trainer: gradient", good, f"off {found:.2e}", f"twice the same {noise:.2e}")


def sample(limit: bool) -> tuple[dict[str, tuple[int, ...]], int]:
    """Completions by request, and the tokens that a step may have in the end."""
    cfg = EngineConfig(max_num_seqs=COUNT, max_num_batched_tokens=COUNT * PROMPT, kv_cache_gib=10)
    model = build(SHAPE)
    engine = EmbeddedEngine(model, cfg, eos_token_ids=(), max_model_len=PROMPT + 32)
    draw = torch.Generator().manual_seed(1)
    prompts = torch.randint(10_000, (COUNT, PROMPT), generator=draw).tolist()
    asked = [
        Request(id=f"{i}", prompt_ids=tuple(ids), sampling=SamplingParams(seed=i, max_tokens=32))
        for i, ids in enumerate(prompts)
    ]
    engine.submit(asked)
    room = torch.cuda.memory_reserved() + GIB // 2 if limit else 100 * GIB
    done: dict[str, tuple[int, ...]] = {}
    with at_most(room):
        while engine.has_unfinished:
            done |= {c.request_id: tuple(c.token_ids) for c in engine.step()}
    return done, engine._scheduler.limit.now  # pyright: ignore[reportPrivateUsage]


def engine() -> None:
    tight, limit = sample(limit=True)
    release()
    roomy, _ = sample(limit=False)
    run.check("engine: memory ended", limit < COUNT * PROMPT, f"steps of {limit} tokens")
    pairs = [zip(tight[i], roomy[i], strict=True) for i in roomy]
    equal = sum(a == b for pair in pairs for a, b in pair)
    # Sums of other shapes round otherwise in bfloat16; a sample parts once, then stays apart.
    run.check("engine: all finish", len(tight) == COUNT, f"{equal / (COUNT * 32):.3f} equal")


def train(folder: Path, name: str, *flags: str) -> tuple[int, list[dict[str, float]]]:
    """`hone rl` over three steps: its exit code, and metrics by step."""
    words = f"""--model.path={folder / "model"} --model.init=random --run.dir={folder / name}
        --data.train.0.path={folder / "rows.jsonl"} --run.steps=3 --rollout.prompts_per_step=8
        --rollout.n_samples_per_prompt=8 --rollout.max_completion_tokens=1000 --log.to=[]
        --engine.kv_cache_gib=4 --reward.functions.0.fn={folder / "reward.py"}:reward""".split()
    code = main(["rl", *words, *flags])
    lines = (folder / name / "metrics.jsonl").read_text().splitlines()
    return code, [json.loads(line) for line in lines]


@contextmanager
def inputs() -> Generator[Path]:
    """A folder with a model, rows and a reward."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model_folder(folder / "model", SHAPE)
        write_jsonl(
            folder / "rows.jsonl", [{"prompt": f"{n} + 1 =", "answer": "2"} for n in range(64)]
        )
        (folder / "reward.py").write_text(REWARD)
        yield folder


def whole_run() -> None:
    with inputs() as folder:
        with at_most(45 * GIB):
            code, steps = train(folder, "run", f"--trainer.max_tokens_per_microbatch={TOKENS}")
        noted = (folder / "run" / "out_of_memory.json").is_file()
    cap = steps[-1].get("mem/policy_backward_cap")
    run.check(
        "run: ends well", code == 0 and steps[-1]["step"] == 3, f"cap {cap}", f"noted {noted}"
    )


def pair() -> None:
    """Each process has 32 rows a step, some 32,000 tokens, in one pass; the second GPU has no room
    for it, since this process holds most of its memory."""
    flags = ["--nproc=2", f"--trainer.max_tokens_per_microbatch={TOKENS}"]
    with inputs() as folder:
        free = torch.cuda.mem_get_info(1)[0]
        held = torch.empty(free - 45 * GIB, dtype=torch.uint8, device="cuda:1")
        code, steps = train(folder, "short", *flags)
        notes = json.loads((folder / "short" / "out_of_memory.json").read_text())
        cap = notes["policy/backward"]["now"]
        del held
        release()
        flags[1] = f"--trainer.max_tokens_per_microbatch={cap}"
        roomy_code, roomy = train(folder, "roomy", *flags)
    run.check("pair: ends well", code == roomy_code == 0, f"{len(steps)} steps", f"cap {cap}")
    for name in ("train/loss", "train/grad_norm", "reward/mean"):
        pairs = [(a[name], b[name]) for a, b in zip(steps, roomy, strict=True)]
        run.row(name, *(f"{a:.4g} {b:.4g}" for a, b in pairs))
    norms = [
        (a["train/grad_norm"], b["train/grad_norm"]) for a, b in zip(steps, roomy, strict=True)
    ]
    off = abs(norms[0][0] / norms[0][1] - 1)
    run.check("pair: gradient of the first step", off < 0.02, f"{off:.2e} off in norm")


if __name__ == "__main__":
    run = Run(__doc__, ("trainer", "engine", "run", "pair"), on_request=["pair"], seconds=150)
    sys.exit(run.go({"trainer": trainer, "engine": engine, "run": whole_run, "pair": pair}))
