"""CPU time that the host takes around the forward passes, of this tree and of another one.

    git worktree add /tmp/before HEAD~1
    python -m benchmarks.host_time /tmp/before

Both trees are run in turn, each in processes of its own, and the least time of each part is shown:
planning the steps of an engine with its prefix cache, submitting requests to another process,
finding shared prompts and laying rows end to end, and a whole generation of a tiny model.
"""

from __future__ import annotations

import argparse
import json
import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import process_time

REPEATS = 5
ROUNDS = 4


def _plan_steps() -> None:
    from hone.engine.block_manager import BlockManager
    from hone.engine.scheduler import Scheduler
    from hone.engine.sequence import Sequence
    from hone.types import Request, SamplingParams

    blocks = BlockManager(num_blocks=16_384, block_size=16, enable_prefix_caching=True)
    scheduler = Scheduler(blocks, max_num_seqs=256, max_num_batched_tokens=16_384)
    for number in range(256):
        request = Request(
            id=str(number),
            prompt_ids=tuple(range(number // 8, number // 8 + 512)),
            sampling=SamplingParams(max_tokens=200),
        )
        scheduler.add(Sequence(request=request, arrival=number, stop_ids=frozenset()))
    while plan := scheduler.schedule():
        sampling = [*plan.decodes, *(chunk.sequence for chunk in plan.chunks if chunk.samples)]
        ended = []
        for sequence in sampling:
            sequence.num_in_flight -= 1
            if sequence.append(7, -1.0, 0) is not None:
                ended.append(sequence)
        scheduler.remove(ended)


def _submit() -> None:
    from hone.types import Request, SamplingParams

    requests = [
        Request(id=str(number), prompt_ids=(7,) * 64, sampling=SamplingParams(max_tokens=200))
        for number in range(2_000)
    ]
    pickle.loads(pickle.dumps(requests, protocol=5))


def _collate() -> None:
    from hone.trainer.collating import collate
    from hone.trainer.prefixes import shared_prefixes
    from hone.types import Row

    rows = [
        Row(
            id=str(number),
            group_id=str(number // 8),
            token_ids=[number // 8] * 256 + [100 + number] * 256,
            loss_mask=[False] * 256 + [True] * 256,
        )
        for number in range(64)
    ]
    prefixes = shared_prefixes(rows)
    for first in range(0, 64, 16):
        own = slice(first, first + 16)
        collate(rows[own], [1.0] * 16, "cpu", prefixes=prefixes[own])


def _generation() -> Callable[[], None]:
    from hone.engine.engine import EmbeddedEngine
    from hone.engine.settings import EngineConfig
    from hone.models.load import load_model
    from hone.models.settings import ModelConfig
    from hone.models.tiny import make_char_tokenizer, make_tiny_model
    from hone.types import Request, SamplingParams

    folder = make_tiny_model(
        Path(tempfile.mkdtemp()),
        tokenizer=make_char_tokenizer("abcdef"),
        seed=0,
        num_layers=1,
        hidden_size=16,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
    )
    model = load_model(ModelConfig(path=str(folder)), device="cpu", seed=0)

    def generate() -> None:
        engine = EmbeddedEngine(
            model, EngineConfig(max_num_seqs=32, kv_cache_gib=0.05), eos_token_ids=()
        )
        engine.submit(
            [
                Request(
                    id=str(number),
                    prompt_ids=(3,) * 64,
                    sampling=SamplingParams(max_tokens=64, seed=number),
                )
                for number in range(32)
            ]
        )
        while engine.has_unfinished:
            engine.step()

    return generate


def _measure() -> dict[str, float]:
    """Least CPU milliseconds of each part."""
    parts = {
        "planning 200 steps": _plan_steps,
        "sending 2,000 requests": _submit,
        "collating 64 rows": _collate,
        "generating 2,048 tokens": _generation(),
    }
    found: dict[str, float] = {}
    for name, part in parts.items():
        part()
        times: list[float] = []
        for _ in range(REPEATS):
            start = process_time()
            part()
            times.append(process_time() - start)
        found[name] = 1000 * min(times)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("other", nargs="?", type=Path, help="another tree; unset: measure here")
    other = parser.parse_args().other
    if other is None:
        print(json.dumps(_measure()))
        return
    here = Path(__file__).resolve().parents[1]
    least: dict[Path, dict[str, float]] = {other: {}, here: {}}
    for _ in range(ROUNDS):
        for tree, own in least.items():
            environment = {**os.environ, "PYTHONPATH": str(tree / "src"), "OMP_NUM_THREADS": "1"}
            script = [sys.executable, str(Path(__file__).resolve())]
            output = subprocess.run(
                script, env=environment, check=True, capture_output=True, text=True
            ).stdout
            for name, value in json.loads(output.splitlines()[-1]).items():
                own[name] = min(value, own.get(name, value))
    for name, before in least[other].items():
        after = least[here][name]
        print(f"{name:26} {before:9.2f} ms {after:9.2f} ms {after / before - 1:+7.1%}")


if __name__ == "__main__":
    main()
