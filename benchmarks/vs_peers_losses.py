"""hone's losses, advantages, divergences and metrics against the functions that TRL, verl and
OpenRLHF train with, on the same random tensors in float64.

    python -m venv peers && peers/bin/pip install torch==2.13.0 trl==1.16.0 peft omegaconf \
        tensordict ray orjson pylatexenc pydantic pyyaml numpy
    peers/bin/pip install --no-deps verl==0.9.1 openrlhf==0.11.2
    PYTHONPATH=src peers/bin/python benchmarks/vs_peers_losses.py [--draws 20]

A peer's own code runs: trainers' methods are called on a stand-in for the trainer, with a model
that gives the drawn logits. `vllm` and `deepspeed`, which OpenRLHF imports beside them, are
stand-ins too. The comparisons are in `peer_losses/`, by kind. Each line is the largest
|a - b| / max(1, |b|) over all draws, of the value and of the gradient with respect to
log-probabilities, logits, values or rewards. Where definitions differ, the line says what was done
to compare them. The exit status is 1 where a line is above 1e-6.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any

import torch

from peer_losses.advantages import advantages, generalised
from peer_losses.drawn import Draw, Found
from peer_losses.policy import (
    critic,
    divergences,
    policy_of_openrlhf,
    policy_of_trl,
    policy_of_verl,
)
from peer_losses.preferences import dpo, dpo_of_openrlhf, kto, without_reference
from peer_losses.supervised import reward_model, supervised

LIMIT = 1e-6

COMPARISONS: list[Callable[[Draw], Found]] = [
    supervised, reward_model, dpo, dpo_of_openrlhf, without_reference, kto,
    policy_of_trl, policy_of_verl, policy_of_openrlhf, divergences, critic, advantages, generalised,
]  # fmt: skip


def distance(own: Any, expected: Any) -> float:
    pairs = zip(own, expected, strict=True) if isinstance(own, tuple) else [(own, expected)]
    worst = 0.0
    for one, other in pairs:
        a, b = (torch.as_tensor(x, dtype=torch.float64) for x in (one, other))
        assert a.shape == b.shape, f"{a.shape=} {b.shape=}"
        worst = max(worst, float(((a - b).abs() / b.abs().clamp(min=1)).max()))
    return worst


def main() -> None:
    parser = argparse.ArgumentParser(description=str(__doc__).partition("\n\n")[0])
    parser.add_argument("--draws", type=int, default=20)
    args = parser.parse_args()
    worst: dict[tuple[str, str, str], float] = {}
    for seed in range(args.draws):
        for compare in COMPARISONS:
            for *line, own, expected in compare(Draw(seed)):
                key = (line[0], line[1], line[2])
                worst[key] = max(worst.get(key, 0.0), distance(own, expected))
    print("| what | whose function | what differs by definition | largest difference |")
    print("|---|---|---|---|")
    for (what, whose, note), value in worst.items():
        print(f"| {what} | {whose} | {note} | {value:.0e} |")
    beyond = [key for key, value in worst.items() if not value <= LIMIT]
    print(f"\n{len(worst)} lines, {args.draws} draws, {len(beyond)} above {LIMIT:.0e}")
    sys.exit(bool(beyond))


if __name__ == "__main__":
    main()
