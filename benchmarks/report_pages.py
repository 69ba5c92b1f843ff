"""How long the pages of `hone watch` take for a run of many samples.

    python benchmarks/report_pages.py --samples 100000 --devices 16

A made-up run is written through the run's own log: groups of 8 samples of 200 tokens, each with
log-probabilities, what the policy says of them and its entropy, a row of metrics a step, and lanes
of as many devices as are asked for. Then its pages are asked for over HTTP, as a browser does, and
the time and size of each answer are printed. The folder is removed at the end; `--keep` names one
that is kept, and used again where it is there.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import urllib.request
from pathlib import Path
from urllib.parse import urlencode

import numpy as np
import torch
import yaml

from hone.config.run import LogConfig
from hone.observe.local_server import ADDRESS
from hone.observe.loggers import ENTROPY, POLICY_LOGPROBS, RunLog
from hone.tools.report.served import serve
from hone.types import Group, Prompt, Reward, Sample, StopReason

GROUPS, SAMPLES, TOKENS = 10, 8, 200
"""Groups a step, samples a group, tokens a sample."""
SPANS = ("generate", "experience", "train", "sync")
RARE = "quicksilver"
"""A word of one sample in 200."""


def make_groups(step: int, rng: np.random.Generator) -> list[Group]:
    """The samples of a step; their texts are words that differ from sample to sample."""
    groups: list[Group] = []
    for place in range(GROUPS):
        prompt = Prompt(id=f"{step}:{place}", token_ids=tuple(range(40)), text="How far? ")
        samples = [make_sample(prompt, step, index, rng) for index in range(SAMPLES)]
        groups.append(Group(id=f"{prompt.id}/{step}", prompt=prompt, samples=samples))
    return groups


def make_sample(prompt: Prompt, step: int, index: int, rng: np.random.Generator) -> Sample:
    """One with a reward, and a rare word in some."""
    words = [f"word{number}" for number in rng.integers(0, 1000, 120)]
    if rng.random() < 1 / 200:
        words[60] = RARE
    reward = float(rng.random() < 0.5)
    return Sample(
        id=f"{prompt.id}/{step}/{index}",
        prompt=prompt,
        index=index,
        token_ids=rng.integers(0, 150_000, TOKENS).tolist(),
        logprobs=(-rng.exponential(0.7, TOKENS)).tolist(),
        weight_versions=[step - 1] * TOKENS,
        loss_mask=[True] * TOKENS,
        stop_reason=StopReason.EOS,
        text=" ".join(words),
        reward=Reward(total=reward, parts={"correct": reward}),
    )


def write_run(folder: Path, num_samples: int, num_devices: int) -> None:
    """The files of a run that has ended."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(yaml.safe_dump({"model": {"path": "m"}}))
    rng = np.random.default_rng(0)
    scored = torch.rand(TOKENS)
    of_step = GROUPS * SAMPLES
    with RunLog(folder, LogConfig(to=(), samples_per_step=of_step)) as log:
        for step in range(1, num_samples // of_step + 1):
            metrics = {f"train/metric_{n}": float(rng.random()) for n in range(60)}
            log.log(step, metrics | {"reward/mean": float(rng.random()), "time/step_s": 10.0})
            groups = make_groups(step, rng)
            policy = {
                sample.id: {POLICY_LOGPROBS: -scored, ENTROPY: scored}
                for group in groups
                for sample in group.samples
            }
            log.samples(step, groups, policy=policy)
            spans = [(name, 10.0 * step + 2.5 * n, 10.0 * step + 2.5 * n + 2.4)
                     for n, name in enumerate(SPANS)]  # fmt: skip
            log.lanes(step, {f"trainer {rank}": spans for rank in range(num_devices)})


def asked(url: str, repeats: int) -> tuple[float, int]:
    """Seconds until all of an answer is there, the median of `repeats`; and its bytes."""
    times: list[float] = []
    size = 0
    for _ in range(repeats):
        begin = time.perf_counter()
        with urllib.request.urlopen(url) as answer:
            size = len(answer.read())
        times.append(time.perf_counter() - begin)
    return statistics.median(times), size


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--samples", type=int, default=100_000)
    parser.add_argument("--devices", type=int, default=16)
    parser.add_argument("--keep", type=Path)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder: Path = args.keep or Path(temporary) / "run"
        if not folder.exists():
            write_run(folder, args.samples, args.devices)
        held = sum(file.stat().st_size for file in folder.iterdir())
        print(f"{args.samples} samples, {args.devices} devices, {held / 2**20:.0f} MiB of files")
        begin = time.perf_counter()
        with serve(folder, port=0) as server:
            print(f"{'start, with the page made':34} {time.perf_counter() - begin:7.3f} s")
            answers = {
                "whether anything has changed": ("/stamp", {}, 9),
                "the page": ("/", {}, 9),
                "samples, first look at the file": ("/samples", {}, 1),
                "another order": ("/samples", {"order": "best"}, 9),
                "a filter": ("/samples", {"show": "truncated"}, 9),
                "the newest": ("/samples", {"order": "newest"}, 9),
                "a group opened": ("/group", {"number": "7"}, 9),
                "a search, rare": ("/samples", {"search": RARE}, 1),
                "a search, in every sample": ("/samples", {"search": "word"}, 1),
            }
            for name, (path, query, repeats) in answers.items():
                seconds, size = asked(
                    f"http://{ADDRESS}:{server.port}{path}?{urlencode(query)}", repeats
                )
                print(f"{name:34} {seconds:7.3f} s {size / 1000:9.1f} kB")


if __name__ == "__main__":
    main()
