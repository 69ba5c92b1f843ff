"""What drafting from siblings and earlier rollouts yields, and what it costs the host.

    python benchmarks/speculation.py
    python benchmarks/speculation.py --shared 0.5 --tokens 2048

Simulated rollouts, no model: the completions of a prompt follow one text and leave it for passages
of their own, some of which other completions also take. `--shared` is the part that lies on text of
the prompt's other completions. Every prompt is sampled in two epochs, by groups of 8; finished
sequences are replaced at once, so that the batch stays full. Tokens a step count the sampled one.

Host times are medians on one core. `propose` stands between the tokens of a step and the launch of
the next one, as does `extend`; `learn` runs while the device computes.
"""

from __future__ import annotations

import argparse
from itertools import cycle
from time import perf_counter

import numpy as np
from numpy.typing import NDArray

from hone.engine.speculation import DRAFT_LENGTHS, DraftIndex, accept

VOCAB_SIZE = 150_000
GROUP_SIZE = 8
PROMPT_TOKENS = 128
PASSAGE_TOKENS = 12  # mean length of a passage beside the common text
PLACE_TOKENS = 4  # distance of the places where the common text can be left


class Corpus:
    """Prompts and endless fresh completions of them."""

    def __init__(self, *, num_tokens: int, shared: float, seed: int) -> None:
        self._random = np.random.default_rng(seed)
        self._num_tokens = num_tokens
        # Half of the departures lead to passages that others take too, so of each stretch with
        # the passage after it, all but half a passage is shared.
        stretch = PASSAGE_TOKENS * (shared - 0.5) / (1 - shared)
        if stretch < PLACE_TOKENS:
            raise ValueError(f"--shared is {shared}; simulated are 0.625 and more")
        self._leaving = PLACE_TOKENS / stretch

    def words(self, size: int) -> NDArray[np.int64]:
        """Tokens with the long tail of a vocabulary: a few of them make up most of a text."""
        return np.minimum(self._random.zipf(1.3, size), VOCAB_SIZE) - 1

    def prompt(self) -> tuple[NDArray[np.int64], NDArray[np.int64], list[list[NDArray[np.int64]]]]:
        """The prompt, the common text, and the passages known at each of its tokens."""
        passages = [
            [self.words(self._passage_size()) for _ in range(3)] for _ in range(self._num_tokens)
        ]
        return self.words(PROMPT_TOKENS), self.words(self._num_tokens), passages

    def completion(
        self, text: NDArray[np.int64], passages: list[list[NDArray[np.int64]]]
    ) -> NDArray[np.int64]:
        pieces: list[NDArray[np.int64]] = []
        for place in range(PLACE_TOKENS, len(text), PLACE_TOKENS):
            pieces.append(text[place - PLACE_TOKENS : place])
            if self._random.random() < self._leaving:
                known = self._random.random() < 0.5
                choice = self._random.choice(3, p=(0.6, 0.3, 0.1))
                pieces.append(
                    passages[place][choice] if known else self.words(self._passage_size())
                )
        return np.concatenate(pieces)[: self._num_tokens]

    def _passage_size(self) -> int:
        return 1 + int(self._random.exponential(PASSAGE_TOKENS - 1))


def simulate(num_seqs: int, k: int, args: argparse.Namespace) -> dict[str, float]:
    """Tokens a step in each epoch and host microseconds a step."""
    corpus = Corpus(num_tokens=args.tokens, shared=args.shared, seed=args.seed)
    prompts = [corpus.prompt() for _ in range(2 * num_seqs // GROUP_SIZE)]
    index = DraftIndex(num_seqs)
    sequences = [np.empty(0, np.int64)] * num_seqs
    done = np.zeros(num_seqs, np.int64)
    slots = np.arange(num_seqs)
    rate: dict[str, float] = {}
    times: dict[str, list[float]] = {"propose": [], "extend": [], "learn": []}
    for epoch in (1, 2):
        queue = cycle([prompt for prompt in prompts for _ in range(GROUP_SIZE)])
        num_left = len(prompts) * GROUP_SIZE
        done[:] = args.tokens
        sequences = [np.empty(0, np.int64)] * num_seqs
        num_steps, num_tokens = 0, 0
        while num_left > 0:
            for slot in slots:
                if done[slot] >= len(sequences[slot]):
                    prompt, text, passages = next(queue)
                    sequences[slot] = corpus.completion(text, passages)
                    done[slot] = 0
                    num_left -= 1
                    index.start(int(slot), prompt.tolist())
            begun_s = perf_counter()
            drafts = index.propose(slots, k)
            proposed_s = perf_counter()
            index.learn()
            learned_s = perf_counter()
            truth = np.full((num_seqs, k + 1), -2)
            for slot in slots:
                ahead = sequences[slot][done[slot] : done[slot] + k + 1]
                truth[slot, : len(ahead)] = ahead
            left = np.array([len(sequence) for sequence in sequences]) - done
            counts = np.minimum(accept(drafts, truth) + 1, left)
            extending_s = perf_counter()
            index.extend(slots, truth, counts)
            times["extend"].append(perf_counter() - extending_s)
            times["propose"].append(proposed_s - begun_s)
            times["learn"].append(learned_s - proposed_s)
            done += counts
            num_steps += 1
            num_tokens += int(counts.sum())
        rate[f"epoch {epoch}"] = num_tokens / num_steps / num_seqs
    return rate | {name: 1e6 * float(np.median(values)) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shared", type=float, default=0.7, help="part of the text in common")
    parser.add_argument("--tokens", type=int, default=512, help="tokens of a completion")
    parser.add_argument("--num-seqs", type=int, nargs="+", default=[64, 256, 512])
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    titles = ["sequences", "drafts", "tokens/step in epoch 1", "in epoch 2"]
    titles += ["propose us", "extend us", "learn us"]
    print("|", " | ".join(titles), "|")
    print("|" + " --- |" * len(titles))
    for num_seqs in args.num_seqs:
        for k in DRAFT_LENGTHS:
            got = simulate(num_seqs, k, args)
            print(
                f"| {num_seqs} | {k} | {got['epoch 1']:.2f} | {got['epoch 2']:.2f} "
                f"| {got['propose']:.0f} | {got['extend']:.0f} | {got['learn']:.0f} |",
                flush=True,
            )


if __name__ == "__main__":
    main()
